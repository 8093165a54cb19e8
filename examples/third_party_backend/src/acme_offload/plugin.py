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

    whole: frozenset[str] = option(
        frozenset(), help="names of module classes that read the weights of modules inside them without calling those"
    )


def create(config: OffloadConfig, device: torch.device | str | None) -> LeafWise:
    """Return a backend; imports torch."""
    from acme_offload.backend import LeafWise

    return LeafWise(config=config, device=device)


@hookimpl
def sidestream_strategies() -> list[Strategy]:
    """Offer `leaf_wise`."""
    return [Strategy(name="leaf_wise", summary="modules take turns, one by one", options=Options, create=create)]
