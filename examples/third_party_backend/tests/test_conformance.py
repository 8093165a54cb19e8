"""Every promise of the framework, tried on this strategy."""

from __future__ import annotations

from torch import nn

from sidestream.streaming.pool import align
from sidestream.testing.conformance import StrategyConformance


class TestLeafWise(StrategyConformance):
    """On the CPU and on the simulated accelerator."""

    strategy = "leaf_wise"

    def device_limit(self, pipe: nn.Module) -> int:
        """Return the bytes of the heaviest module and all around it, and of each component's first parameter."""
        components = list(pipe.children())
        anchors = [next(component.parameters()) for component in components]
        return max(map(_at_once, components)) + sum(anchor.nbytes for anchor in anchors)


def _at_once(module: nn.Module) -> int:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return sum(align(tensor.nbytes) for tensor in own) + max(map(_at_once, module.children()), default=0)
