"""`model_level` passes the kit: as it is by default, with everything selected, with a budget, and released."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from sidestream.testing.conformance import StrategyConformance
from sidestream.testing.conformance.base import all_bytes, distinct


class _ModelLevel(StrategyConformance):
    strategy = "model_level"

    def device_limit(self, pipe: nn.Module) -> int:
        """Return the largest component's bytes and those that stay: a VAE, and each component's first parameter."""
        turns = [child for name, child in pipe.named_children() if self.takes_turns(name)]
        stays = [child for name, child in pipe.named_children() if not self.takes_turns(name)]
        anchors = [next(child.parameters()) for child in turns]
        resident = sum(tensor.nbytes for tensor in (*distinct(*stays), *anchors))
        return resident + max(map(all_bytes, turns))

    def takes_turns(self, name: str) -> bool:
        """Return whether a component takes turns."""
        return name != "vae"


class TestDefault(_ModelLevel):
    """Encoders and DiTs in strict turns."""


class TestAll(_ModelLevel):
    """The VAE, too."""

    settings = {"components": {"dit", "text_encoder", "vae"}}  # noqa: RUF012
