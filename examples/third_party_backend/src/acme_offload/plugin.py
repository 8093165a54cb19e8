"""What the core loads to list, check and make the strategy. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestream import OffloadConfig, Strategy, hookimpl, option, options_class

if TYPE_CHECKING:
    import torch

    from acme_offload.backend import LeafWise


@options_class
class Options:
    """Options of `leaf_wise`."""

    prefetch: bool = option(True, help="copy the next module's weights while the present one computes")
    keep_below_mib: float = option(0.0, minimum=0, help="modules of fewer MiB (2**20 bytes) stay on the device")
    whole: frozenset[str] = option(
        frozenset(),
        help="names of classes whose forward reads the weights of modules inside without calling them",
    )


def create(config: OffloadConfig, device: torch.device | str | None) -> LeafWise:
    """Return a backend; imports torch."""
    from acme_offload.backend import LeafWise

    return LeafWise(config=config, device=device)


@hookimpl
def sidestream_strategies() -> list[Strategy]:
    """Offer `leaf_wise`."""
    summary = "a module's weights are on the device only while that module computes"
    return [Strategy(name="leaf_wise", summary=summary, options=Options, create=create)]
