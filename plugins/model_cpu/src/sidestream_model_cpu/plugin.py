"""The hook implementation: what the core loads to list, check and make the strategy. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestream import OffloadConfig, Strategy, hookimpl
from sidestream_model_cpu.options import ModelLevelOptions

if TYPE_CHECKING:
    import torch

    from sidestream_model_cpu.backend import ModelLevelBackend


def create(config: OffloadConfig, device: torch.device | str | None) -> ModelLevelBackend:
    """Return a backend; imports torch."""
    from sidestream_model_cpu.backend import ModelLevelBackend

    return ModelLevelBackend(config=config, device=device)


@hookimpl
def sidestream_strategies() -> list[Strategy]:
    """Offer `model_level`."""
    return [
        Strategy(
            name="model_level",
            summary="whole components (text encoders, DiTs, a selected VAE) take turns on the device",
            options=ModelLevelOptions,
            create=create,
        )
    ]
