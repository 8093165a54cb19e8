"""The simulated accelerator as a whole: what a test opens, looks at and closes."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from sidestream.streaming.runtime import Copy, DeviceRuntime, WaitMeter, runtime_in_use
from sidestream.testing.simulated.machine import Event, Machine, Memory, Order, Race, Ranges, Stream, TimeModel
from sidestream.testing.simulated.memory import Allocator
from sidestream.testing.simulated.tensor import DEVICE_TYPE, SimTensor, dispatch, host_watch, span

#: The names of all orders.
ORDERS: tuple[str, ...] = tuple(order.value for order in Order)

#: Of pinned memory, bytes.
_ALIGNMENT = 4096

_lock = threading.Lock()
_registered: list[Any] = []
_open: list[SimulatedAccelerator] = []


class RaceError(AssertionError):
    """Work touched the same memory and nothing ordered it; the text names both sides of each race."""


class SimulatedAccelerator:
    """A device `simdev:0` for the length of a `with` block; one at a time in a process.

    `order` says when queued work runs (:class:`Order`), `seed` chooses for `random`. `capacity` limits device bytes,
    `pin_budget` pinned bytes with the allocator's rounding; None: no limit. `model` is the time model.
    Not for use from several threads at once, other than one after the other.
    """

    def __init__(
        self,
        *,
        order: Order | str = Order.LAZY,
        seed: int = 0,
        capacity: int | None = None,
        pin_budget: int | None = None,
        model: TimeModel | None = None,
    ) -> None:
        self.machine = Machine(order=Order(order), seed=seed, model=model or TimeModel())
        self.allocator = Allocator(self.machine, capacity=capacity)
        self.pin_budget = pin_budget
        self.pinned_bytes = 0
        self.peak_pinned_bytes = 0
        self.copied_bytes = 0
        self.read_back_bytes = 0
        self.device: torch.device
        self._host = Ranges()
        self._stack = ExitStack()
        self._pins = 0

    def __enter__(self) -> SimulatedAccelerator:
        register()
        self.device = torch.device(DEVICE_TYPE, 0)
        if _open:
            raise RuntimeError("another simulated accelerator is open; there is one at a time")
        _open.append(self)
        self._stack.callback(_open.remove, self)
        self._stack.enter_context(runtime_in_use(DEVICE_TYPE, lambda device: SimulatedRuntime(device, self)))
        self._stack.enter_context(host_watch(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    # --- what a test looks at --------------------------------------------------------------------------------------

    @property
    def live_bytes(self) -> int:
        """Device bytes in use now."""
        return self.allocator.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Device bytes in use at worst."""
        return self.allocator.peak_bytes

    @property
    def poisoned(self) -> int:
        """How often memory was poisoned: when it was handed out, and when it was freed."""
        return self.allocator.poisoned

    @property
    def races(self) -> list[Race]:
        """What nothing ordered, so far."""
        return self.machine.races

    def check(self) -> None:
        """Raise `RaceError` if there was a race."""
        if self.races:
            lines = "".join(f"\n  {race}" for race in self.races[:8])
            raise RaceError(f"{len(self.races)} races on the simulated accelerator:{lines}")

    def synchronize(self) -> None:
        """Have the host wait for everything."""
        self.machine.synchronize()

    def reset_peak(self) -> None:
        """Count the worst from here on."""
        self.allocator.peak_bytes = self.allocator.live_bytes

    # --- what a stream user does -----------------------------------------------------------------------------------

    def new_stream(self, *, copies: bool = True) -> Stream:
        """Return a stream; `copies` says that it is not one that computes."""
        return self.machine.new_stream(copies=copies)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Have operations inside the block go to `stream`."""
        before, self.machine.current = self.machine.current, stream
        try:
            yield
        finally:
            self.machine.current = before

    def pin(self, nbytes: int) -> torch.Tensor:
        """Return pinned host memory as `uint8`; `RuntimeError` beyond the budget."""
        taken = 1 << (nbytes - 1).bit_length() if nbytes else 0
        if self.pin_budget is not None and self.pinned_bytes + taken > self.pin_budget:
            raise RuntimeError(f"simulated driver: cannot pin {taken} bytes more, {self.pinned_bytes} are pinned")
        self.pinned_bytes += taken
        self.peak_pinned_bytes = max(self.peak_pinned_bytes, self.pinned_bytes)
        # An array tells when the last tensor on its memory is gone; a tensor tells only of itself.
        raw = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
        shift = -raw.ctypes.data % _ALIGNMENT
        array = raw[shift : shift + nbytes]
        self._pins += 1
        start = array.ctypes.data
        self._host.add(start, nbytes, Memory(f"pinned memory {self._pins}"))
        weakref.finalize(array, self._unpin, start, taken)
        with torch.inference_mode(False):
            return torch.from_numpy(array)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a host tensor lies in pinned memory."""
        return self._host.find(tensor.data_ptr()) is not None

    def _unpin(self, start: int, taken: int) -> None:
        self._host.remove(start)
        self.pinned_bytes -= taken

    # --- what operations do ----------------------------------------------------------------------------------------

    def launch(
        self,
        operation: str,
        run: Callable[[], object],
        accesses: Sequence[tuple[SimTensor, bool]],
        seconds: float,
    ) -> None:
        """Queue a kernel on the current stream."""
        touched = [(*_within(tensor), writes) for tensor, writes in accesses]
        self.machine.issue(self.machine.current, operation, run, touched, seconds=seconds)

    def copy_in(self, target: SimTensor, source: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy host to device; from pageable memory, or unless `non_blocking`, the host waits until it is done."""
        self.copied_bytes += source.nbytes
        pinned = self.is_pinned(source)
        touched = [(*_within(target), True)]
        if pinned:
            touched.append((*self._host_within(source), False))
        to, value = target.elem, source.detach()
        self.machine.issue(
            self.machine.current, "copy host to device", lambda: _put(to, value), touched, link_bytes=source.nbytes
        )
        if not (pinned and non_blocking):
            self.machine.synchronize(self.machine.current)

    def copy_out(self, target: torch.Tensor, source: SimTensor, *, non_blocking: bool) -> None:
        """Copy device to host; into pageable memory, or unless `non_blocking`, the host waits until it is done."""
        self.read_back_bytes += source.nbytes
        pinned = self.is_pinned(target)
        touched = [(*_within(source), False)]
        if pinned:
            touched.append((*self._host_within(target), True))
        to, value = target.detach(), source.elem
        self.machine.issue(
            self.machine.current, "copy device to host", lambda: _put(to, value), touched, link_bytes=source.nbytes
        )
        if not (pinned and non_blocking):
            self.machine.synchronize(self.machine.current)

    def host_touches(self, tensor: torch.Tensor, *, writes: bool, operation: str) -> None:
        """Note an access by the host's own operation, if it is to memory that the device may be using."""
        if tensor.layout is torch.strided and tensor.numel() and self.is_pinned(tensor):
            memory, low, high = self._host_within(tensor)
            self.machine.host_access(memory, low, high, writes=writes, operation=operation)

    def _host_within(self, tensor: torch.Tensor) -> tuple[Memory, int, int]:
        low, high = span(tensor)
        found = self._host.find(low)
        if found is None:
            raise RuntimeError("not in pinned memory")
        return found[1], low - found[0], high - found[0]


class SimulatedRuntime(DeviceRuntime):
    """A strategy's way to the simulated accelerator, the same as to a real one."""

    def __init__(self, device: torch.device, accelerator: SimulatedAccelerator) -> None:
        super().__init__(torch.device(DEVICE_TYPE, device.index or 0))
        self.accelerator = accelerator
        self._machine = accelerator.machine

    @property
    def can_pin(self) -> bool:
        return True

    def new_stream(self) -> Stream:
        return self.accelerator.new_stream()

    def empty(self, nbytes: int) -> torch.Tensor:
        buffer = super().empty(nbytes)
        buffer.__dict__["_allocated_on"] = self._machine.current
        return buffer

    def free(self, buffer: torch.Tensor, copy: Copy | None = None) -> None:
        super().free(buffer, copy)
        if buffer.__dict__.pop("_allocated_on", self._machine.current) is not self._machine.current:
            buffer.record_stream(self._machine.current)  # type: ignore[arg-type]

    def copy(self, stream: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copy:
        before, done = Event(), Event()
        self._machine.record(before, self._machine.current)
        self._machine.wait(stream, before)
        with self.accelerator.on(stream), torch.no_grad(), torch.inference_mode(False):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._machine.record(done, stream)
        return Copy(sum(source.nbytes for _, source in pairs), done=done)

    def wait(self, copy: Copy, meter: WaitMeter) -> None:
        if copy.waited:
            return
        before = self._machine.stall
        self._machine.wait(self._machine.current, copy.done)
        meter.measured += self._machine.stall - before
        copy.waited = True

    def read_back(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.copy_(source)

    def pin(self, nbytes: int) -> torch.Tensor:
        return self.accelerator.pin(nbytes)

    def drain(self, stream: Any) -> None:
        self._machine.synchronize(stream)


def current() -> SimulatedAccelerator:
    """Return the accelerator that is open; `RuntimeError` if none is."""
    if not _open:
        raise RuntimeError("no simulated accelerator is open: its tensors live inside `with SimulatedAccelerator():`")
    return _open[-1]


def register() -> None:
    """Teach torch the device type `simdev`, once in a process."""
    with _lock:
        if _registered:
            return
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        hooks, module = _presence()
        _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=module, hook=hooks)
        # Whatever has no tensor of the device among its arguments arrives here: `torch.empty(3, device="simdev")`.
        libraries: Any = torch.library
        library = libraries.Library("_", "IMPL")
        library.fallback(lambda func, *args, **kwargs: dispatch(func, args, kwargs), "PrivateUse1")
        # These would make an empty tensor and resize it, which a tensor of another class cannot be.
        aten = libraries.Library("aten", "IMPL")
        for name in _RESIZING:
            packet, _, overload = name.partition(".")
            func = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(name, functools.partial(_dispatch_factory, func), "PrivateUse1")
        # `torch.tensor(values, device=...)` builds on the CPU and moves.
        torch._C._set_only_lift_cpu_tensors(True)
        _registered.extend((library, aten, hooks, module))


def _presence() -> tuple[Any, Any]:
    """Return what torch asks whether there is such a device: only while one is open."""

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return bool(_open)

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, index: int) -> bool:
            return bool(_open)

    class Module:
        def is_initialized(self) -> bool:
            return bool(_open)

        def is_available(self) -> bool:
            return bool(_open)

        def device_count(self) -> int:
            return len(_open)

        def current_device(self) -> int:
            return 0

        def manual_seed_all(self, seed: int) -> None:
            """There is no generator of its own: kernels are the CPU's."""

        def _is_in_bad_fork(self) -> bool:
            return False

    return Hooks(), Module()


_RESIZING = (
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "linspace",
    "logspace",
    "randperm",
    "tril_indices",
    "triu_indices",
)


def _dispatch_factory(func: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatch(func, args, kwargs)


def _within(tensor: SimTensor) -> tuple[Memory, int, int]:
    low, high = span(tensor.elem)
    base = tensor.block.chunk.bytes.data_ptr()
    return tensor.block.chunk.memory, low - base, high - base


def _put(target: torch.Tensor, value: torch.Tensor) -> None:
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(value)


__all__ = ["ORDERS", "RaceError", "SimulatedAccelerator", "SimulatedRuntime", "current", "register"]
