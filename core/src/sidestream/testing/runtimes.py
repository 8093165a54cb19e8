"""Runtimes for tests: the CPU as a device that shows what a plain CPU hides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from sidestream.streaming.runtime import Copy, CpuRuntime, WaitMeter


class WatchfulRuntime(CpuRuntime):
    """Device memory is poisoned when it is handed out and when it is freed; pinning is simulated and limited.

    With `lazy` a copy runs only when somebody waits for it, so a missing wait shows poison. `pin_limit` is the
    largest single request (bytes) that pinning grants, `pin_total` the sum; None: no limit, 0: pinning fails.
    `capacity` limits device bytes: more is torch's `OutOfMemoryError`. `copied` counts bytes host to device,
    `read_back_bytes` device to host, `pins` the calls to pin. With `separate` what stays on the device is copied there,
    as on an accelerator; otherwise it is left where it is, as on the CPU.
    """

    inline_below = 0

    def __init__(
        self,
        device: torch.device,
        *,
        lazy: bool = False,
        pin_limit: int | None = None,
        pin_total: int | None = None,
        capacity: int | None = None,
        separate: bool = False,
    ) -> None:
        super().__init__(device)
        self.lazy = lazy
        self.pin_limit = pin_limit
        self.pin_total = pin_total
        self.capacity = capacity
        self._separate = separate
        self.copied = 0
        self.read_back_bytes = 0
        self.pins = 0
        self.poisoned = 0

    @property
    def separate(self) -> bool:
        return self._separate

    @property
    def can_pin(self) -> bool:
        return True

    def pin(self, nbytes: int) -> torch.Tensor:
        self.pins += 1
        if self.pin_limit is not None and nbytes > self.pin_limit:
            raise RuntimeError(f"CUDA error: out of memory (simulated: {nbytes} bytes at once)")
        if self.pin_total is not None and self.ledger.pinned_bytes + nbytes > self.pin_total:
            raise RuntimeError(f"CUDA error: out of memory (simulated: {nbytes} bytes more)")
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8)

    def empty(self, nbytes: int) -> torch.Tensor:
        if self.capacity is not None and self.ledger.device_bytes + nbytes > self.capacity:
            raise torch.OutOfMemoryError(f"simulated: {nbytes} bytes asked, capacity {self.capacity}")
        buffer = super().empty(nbytes)
        buffer.fill_(0xFF)
        return buffer

    def free(self, buffer: torch.Tensor, copy: Copy | None = None) -> None:
        super().free(buffer, copy)
        buffer.fill_(0xFF)
        self.poisoned += 1

    def copy(self, stream: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copy:
        self.copied += sum(source.nbytes for _, source in pairs)
        if self.lazy:
            return Copy(sum(source.nbytes for _, source in pairs), done=list(pairs))
        return super().copy(stream, pairs)

    def wait(self, copy: Copy, meter: WaitMeter) -> None:
        if isinstance(copy.done, list):
            for target, source in copy.done:
                super().read_back(target, source)
            copy.done, copy.waited = None, True
            return
        super().wait(copy, meter)

    def read_back(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.read_back_bytes += source.nbytes
        super().read_back(target, source)


class ThrottledRuntime(CpuRuntime):
    """A CPU whose copies take as long as over a link of `bandwidth` bytes a second, on a real thread of their own.

    For proving that copies overlap with computing in real time, whatever this machine's memory does.
    """

    inline_below = 0

    def __init__(self, device: torch.device, *, bandwidth: float) -> None:
        super().__init__(device)
        self.bandwidth = bandwidth

    def move(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        end = time.perf_counter() + sum(source.nbytes for _, source in pairs) / self.bandwidth
        super().move(pairs)
        time.sleep(max(0.0, end - time.perf_counter()))
