"""Start `model_level` on a pipeline, on a CPU that poisons freed memory and counts what moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sidestream import OffloadConfig
from sidestream.testing.runtimes import WatchfulRuntime
from sidestream_model_cpu.backend import ModelLevelBackend

Started = tuple[ModelLevelBackend, WatchfulRuntime]


@pytest.fixture
def start() -> Iterator[Callable[..., Started]]:
    """Return `start(pipe, *, components=None, pin=True, runtime={}, **options)`; what it starts is ended afterwards."""
    backends: list[ModelLevelBackend] = []

    def start(
        pipe: Any,
        *,
        components: set[str] | None = None,
        pin: bool = True,
        runtime: dict[str, Any] | None = None,
        **options: Any,
    ) -> Started:
        made: list[WatchfulRuntime] = []

        def make(device: torch.device) -> WatchfulRuntime:
            made.append(WatchfulRuntime(device, **(runtime or {})))
            return made[-1]

        backend = ModelLevelBackend(
            config=OffloadConfig(
                "model_level",
                components=None if components is None else frozenset(components),
                pin_cpu_memory=pin,
                options=options,
            ),
            device="cpu",
            runtime=make,
        )
        backends.append(backend)
        backend.enable(pipe)
        return backend, made[0] if made else WatchfulRuntime(torch.device("cpu"))

    yield start
    for backend in backends:
        backend.disable()


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
