"""The devices that a strategy is tried on, each of which shows other mistakes.

A *world* is named; a *place* is one that is open: its device, and what it saw being done there.

- `cpu-eager`: copies are done at once; device memory is poisoned when it is handed out and when it is freed.
- `cpu-lazy`: a copy is done when somebody waits for it, so a missing wait shows poison.
- `cpu-separate`: what stays on the device is copied there, as to memory of its own.
- `sim-...`: the simulated accelerator under each of its orders, as far as it is installed. A tensor that was left on
  the host raises there, and a race is named.
"""

from __future__ import annotations

import gc
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from sidestream.backend import BackendState, OffloadBackend
from sidestream.streaming.runtime import runtime_in_use
from sidestream.testing.runtimes import WatchfulRuntime

#: Seeds of the simulated accelerator's random order.
SEEDS = (0, 1)


class Place(ABC):
    """An open world: where a model is resident or offloaded, and what was seen there."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        #: Backends that were made here, to be ended when the place is left.
        self.backends: list[OffloadBackend] = []

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the device."""
        return tensor.to(self.device)

    def resident(self, model: nn.Module) -> Any:
        """Return the model wholly on the device: what offloading is compared with."""
        return model.to(self.device)

    @property
    @abstractmethod
    def watches(self) -> bool:
        """Whether the figures below are known: on the CPU only of strategies that ask `open_runtime`."""

    @property
    @abstractmethod
    def separate(self) -> bool:
        """Whether the device's memory is other than the host's."""

    @property
    @abstractmethod
    def copied_bytes(self) -> int:
        """Bytes copied from host to device so far."""

    @property
    @abstractmethod
    def poisoned(self) -> int:
        """Device buffers that were filled with garbage after they were freed."""

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Bytes on the device now; on the simulated accelerator activations count, too."""

    @property
    @abstractmethod
    def peak_device_bytes(self) -> int:
        """Bytes on the device at worst."""

    @property
    @abstractmethod
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are page-locked now."""

    @property
    @abstractmethod
    def opened(self) -> int:
        """How often the device was opened or used."""

    def holds_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a host tensor lies in memory that was page-locked here."""
        return False

    def settle(self, *, collect: bool = False) -> None:
        """Wait until all that was queued is done; with `collect`, until what nobody refers to any more is gone."""

    def needs(self, what: str) -> None:
        """Skip the test if this device, with nothing offloaded, cannot do what it is about."""

    def check(self) -> None:
        """Raise if anything was done out of order."""

    def leave(self) -> None:
        """End the backends that a test left at work."""
        for backend in reversed(self.backends):
            for _ in range(2):  # a disable that fails may be called until it succeeds
                if backend.state in (BackendState.ENABLED, BackendState.UNDOING):
                    try:
                        backend.disable()
                    except Exception:
                        continue


class _Recorder(WatchfulRuntime):
    """A :class:`WatchfulRuntime` that tells the place what it was asked for."""

    def __init__(self, device: torch.device, place: CpuPlace, **options: Any) -> None:
        super().__init__(device, **options)
        self.place = place

    def new_stream(self) -> Any:
        stream = super().new_stream()
        self.place.streams.append(stream)
        return stream

    def pin(self, nbytes: int) -> torch.Tensor:
        memory = super().pin(nbytes)
        # The addresses outlive the memory; whoever still lies there afterwards was not given memory of its own.
        self.place.pinned_spans.append((memory.data_ptr(), memory.data_ptr() + nbytes))
        self.place.pinned_memory.append(memory)
        return memory

    def drain(self, stream: Any) -> None:
        self.place.drains += 1
        super().drain(stream)


class CpuPlace(Place):
    """The CPU as a device, in the place of the runtime that `open_runtime` gives."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, torch.device("cpu"))
        self.options = options
        self.runtimes: list[_Recorder] = []
        self.streams: list[Any] = []
        self.pinned_spans: list[tuple[int, int]] = []
        self.pinned_memory: list[torch.Tensor] = []
        self.drains = 0

    def make(self, device: torch.device) -> WatchfulRuntime:
        """Return a new runtime, as `open_runtime` would."""
        self.runtimes.append(_Recorder(device, self, **self.options))
        return self.runtimes[-1]

    @property
    def watches(self) -> bool:
        return bool(self.runtimes)

    @property
    def separate(self) -> bool:
        return bool(self.options.get("separate"))

    @property
    def copied_bytes(self) -> int:
        return sum(runtime.copied for runtime in self.runtimes)

    @property
    def poisoned(self) -> int:
        return sum(runtime.poisoned for runtime in self.runtimes)

    @property
    def device_bytes(self) -> int:
        return sum(runtime.ledger.device_bytes for runtime in self.runtimes)

    @property
    def peak_device_bytes(self) -> int:
        return sum(runtime.ledger.peak_device_bytes for runtime in self.runtimes)

    @property
    def pinned_bytes(self) -> int:
        return sum(runtime.ledger.pinned_bytes for runtime in self.runtimes)

    @property
    def opened(self) -> int:
        return len(self.runtimes)

    @property
    def pins(self) -> int:
        """How often page-locked memory was asked for."""
        return sum(runtime.pins for runtime in self.runtimes)

    def holds_pinned(self, tensor: torch.Tensor) -> bool:
        return any(start <= tensor.data_ptr() < end for start, end in self.pinned_spans)


class SimPlace(Place):
    """The simulated accelerator."""

    def __init__(self, name: str, sim: Any) -> None:
        super().__init__(name, sim.device)
        self.sim = sim

    @property
    def watches(self) -> bool:
        return True

    @property
    def separate(self) -> bool:
        return True

    @property
    def copied_bytes(self) -> int:
        return int(self.sim.copied_bytes)

    @property
    def poisoned(self) -> int:
        poisoned = self.sim.poisoned
        return poisoned if isinstance(poisoned, int) else len(poisoned)

    @property
    def device_bytes(self) -> int:
        return int(self.sim.live_bytes)

    @property
    def peak_device_bytes(self) -> int:
        return int(self.sim.peak_bytes)

    @property
    def pinned_bytes(self) -> int:
        return int(self.sim.pinned_bytes)

    @property
    def opened(self) -> int:
        return int(self.sim.live_bytes > 0) + int(self.sim.copied_bytes > 0)

    def settle(self, *, collect: bool = False) -> None:
        if collect:
            gc.collect()
        self.sim.synchronize()

    def needs(self, what: str) -> None:
        try:
            able = _PROBES[what](self)
        except (NotImplementedError, RuntimeError):
            able = False
        if not able:
            pytest.skip(f"the simulated device itself has no {what}")

    def check(self) -> None:
        self.sim.check()


def _takes_data(place: Place) -> bool:
    weight = nn.Parameter(place.to(torch.zeros(2)), requires_grad=False)
    weight.data = place.to(torch.ones(2, dtype=torch.float64))
    return bool((weight.cpu() == 1).all()) and weight.cpu().dtype == torch.float64


def _is_recurrent(place: Place) -> bool:
    return bool(place.resident(nn.LSTM(2, 2))(place.to(torch.ones(1, 1, 2)))[0].cpu().isfinite().all())


def _views_in_inference_mode(place: Place) -> bool:
    weight = nn.Parameter(place.to(torch.ones(2, 2)), requires_grad=False)
    with torch.inference_mode():
        first, second = weight
        return bool((first + second).cpu().isfinite().all())


#: Things that a simulated device may lack, and how it is found out.
_PROBES: dict[str, Callable[[Place], bool]] = {
    "assignment to .data": _takes_data,
    "recurrent kernels": _is_recurrent,
    "views in inference mode": _views_in_inference_mode,
}


def _open_cpu(name: str, limits: dict[str, Any]) -> Iterator[Place]:
    options: dict[str, dict[str, Any]] = {
        "cpu-eager": {},
        "cpu-lazy": {"lazy": True},
        "cpu-separate": {"separate": True},
    }
    place = CpuPlace(name, **options[name], **limits)
    with runtime_in_use("cpu", place.make):
        yield place


def _open_sim(name: str, limits: dict[str, Any]) -> Iterator[Place]:
    simulated = importlib.import_module("sidestream.testing.simulated")
    _, order, *seed = name.split("-")
    with simulated.SimulatedAccelerator(order=order, seed=int(seed[0]) if seed else 0, **limits) as sim:
        yield SimPlace(name, sim)


CPU_WORLDS = ("cpu-eager", "cpu-lazy", "cpu-separate")


def sim_worlds() -> tuple[str, ...]:
    """Return the names of the simulated accelerator's worlds; none where it cannot be imported."""
    try:
        simulated = importlib.import_module("sidestream.testing.simulated")
    except ModuleNotFoundError as error:
        if error.name != "sidestream.testing.simulated":
            raise
        return ()
    names = []
    for order in simulated.ORDERS:
        names += [f"sim-{order}-{seed}" for seed in SEEDS] if order == "random" else [f"sim-{order}"]
    return tuple(names)


def world_names() -> tuple[str, ...]:
    """Return the names of all worlds that can be opened here."""
    return (*CPU_WORLDS, *sim_worlds())


#: The fixtures of a test and the worlds that it is run in.
FIXTURES: dict[str, Callable[[], tuple[str, ...]]] = {
    # All: whether bits and bytes are right.
    "place": world_names,
    # Where a limit can be set, or a call be counted.
    "cpu": lambda: CPU_WORLDS,
    # One of each kind of memory: for what depends on no order.
    "one": lambda: ("cpu-eager", "cpu-separate", *sim_worlds()[:1]),
    # For what depends on neither order nor device.
    "host": lambda: ("cpu-eager", "cpu-separate"),
    # Where the device itself is measured.
    "sim": lambda: sim_worlds()[:1],
    # For what costs seconds.
    "once": lambda: ("cpu-eager",),
}


@contextmanager
def open_world(name: str, **limits: Any) -> Iterator[Any]:
    """Open a world; at its end what a test left at work is ended, and races are raised.

    `limits` are those of the world: `capacity`, `pin_limit` and `pin_total` on the CPU.
    """
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        # One thread and no gradients: equal inputs give equal bits, and offloading is for inference.
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.no_grad())
        opener = _open_cpu if name.startswith("cpu") else _open_sim
        place = stack.enter_context(contextmanager(opener)(name, limits))
        try:
            yield place
        finally:
            place.leave()
        place.check()


class HostWatch(TorchFunctionMode):
    """Sees who computes with a weight's host memory, which is right on a CPU and fails on every other device.

    `seen` has the names. Weights that the report calls resident may be where they are. Of one thread.
    """

    COMPUTING = frozenset(
        {"linear", "embedding", "conv2d", "layer_norm", "batch_norm", "add", "mul", "matmul", "where", "__add__"}
    )

    def __init__(self, place: Place, pipe: nn.Module, backend: OffloadBackend) -> None:
        super().__init__()
        self.seen: list[str] = []
        resident = tuple(tensor.name for tensor in backend.report().resident)
        self._names: dict[int, str] = {}
        if not place.separate:
            for name, tensor in (*pipe.named_parameters(), *pipe.named_buffers()):
                if tensor.nbytes and not any(name == other or name.startswith(f"{other}.") for other in resident):
                    self._names[tensor.data_ptr()] = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.COMPUTING:
            for argument in (*args, *(kwargs or {}).values()):
                if isinstance(argument, torch.Tensor):
                    with torch._C.DisableTorchFunction():
                        name = self._names.get(argument.data_ptr())
                    if name is not None:
                        self.seen.append(name)
        return func(*args, **(kwargs or {}))
