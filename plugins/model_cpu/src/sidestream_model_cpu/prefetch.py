"""The strategy's own stream and pinned pool, and the three verbs that move a component: fetch, wait, evict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sidestream import ComponentKind
from sidestream.streaming.entry import Gate
from sidestream.streaming.image import Held, Image, Structure
from sidestream.streaming.placement import Resident
from sidestream.streaming.pool import PinnedPool
from sidestream.streaming.runtime import Copy, DeviceRuntime, WaitMeter
from sidestream.streaming.store import PinnedStore


class Unit:
    """One component that takes turns: its image, its gate, and its device buffer while it is on the device.

    Without a buffer it costs the device only what `residents` take; with one, `image.nbytes` more.
    """

    def __init__(self, name: str, kind: ComponentKind, module: nn.Module) -> None:
        self.name = name
        self.kind = kind
        self.module = module
        self.image: Image
        self.structure: Structure
        self.gate: Gate
        self.residents: list[Resident] = []
        self.came_from: torch.device | None = None
        self.buffer: torch.Tensor | None = None
        self.copy: Copy | None = None
        self.meter = WaitMeter()
        self.fetches = 0
        self.moved_bytes = 0


class Prefetcher:
    """Moves units between host and device. All three verbs are idempotent; a prefetch is an early `fetch`."""

    def __init__(self, runtime: DeviceRuntime, *, pin: bool, pin_budget: int | None, pin_required: bool) -> None:
        self.runtime = runtime
        self._stream: Any = runtime.new_stream()
        self._pins = pin and runtime.can_pin
        self.pool = PinnedPool(runtime, budget=pin_budget if self._pins else 0, required=pin_required)
        self.store = PinnedStore(self.pool)

    def settle(self, tensors: Sequence[Held]) -> None:
        """Move masters into pinned memory as far as there is any."""
        if self._pins:
            self.store.settle(tensors)

    def fetch(self, unit: Unit) -> bool:
        """Start copying the unit in, unless it is there or on its way; return whether a copy was started."""
        if unit.buffer is not None:
            return False
        unit.image.trust()
        buffer = self.runtime.empty(unit.image.nbytes)
        try:
            unit.copy = self.runtime.copy(self._stream, unit.image.pairs(buffer))
        except BaseException:
            self.runtime.free(buffer)
            raise
        unit.buffer = buffer
        unit.fetches += 1
        unit.moved_bytes += unit.copy.nbytes
        return True

    def wait(self, unit: Unit) -> None:
        """Have what computes next wait for the unit's copy, and bind it."""
        if unit.buffer is None or unit.copy is None:
            return
        try:
            self.runtime.wait(unit.copy, unit.meter)
        except BaseException:
            self.evict(unit)  # half-copied bytes must never be computed with
            raise
        if not unit.image.seen:
            unit.image.see_in(unit.buffer)
        unit.image.bind()

    def unbind(self, unit: Unit) -> None:
        """Have the unit's modules hold their masters again; its bytes stay on the device."""
        if unit.image.bound:
            unit.image.unbind(self.runtime)

    def evict(self, unit: Unit) -> None:
        """Free the unit's device memory after its last reader. Moves nothing: the masters are on the host."""
        self.unbind(unit)
        buffer, copy = unit.buffer, unit.copy
        unit.image.forget_copies()
        unit.buffer, unit.copy = None, None
        if buffer is not None:
            self.runtime.free(buffer, copy)

    def drain(self) -> None:
        """Wait on the host until no copy is under way."""
        self.runtime.drain(self._stream)

    def close(self) -> None:
        """Give the stream back."""
        self.runtime.close(self._stream)
