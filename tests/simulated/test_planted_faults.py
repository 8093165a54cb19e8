"""Faults that offloaders really have, planted one by one in a small streaming loop: each is caught.

Caught by the race detector in a single run, and, apart from it, by wrong numbers in at least one order: a second
opinion that a fault in the detector could not fool. The loop without a fault is clean under every order.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from sidestream.testing.simulated import ORDERS, Event, RaceError, SimulatedAccelerator

LAYERS, WIDTH = 6, 8
RUNS = [(order, seed) for order in ORDERS for seed in (range(8) if order == "random" else range(1))]


def weights() -> list[torch.Tensor]:
    """Return the layers' weights `(WIDTH, WIDTH)`, different each."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(LAYERS)]


def expected() -> torch.Tensor:
    """Return the loop's result, computed plainly."""
    x = torch.ones(2, WIDTH)
    for weight in weights():
        x = torch.tanh(x @ weight)
    return x


def stream_layers(sim: SimulatedAccelerator, fault: str | None = None, *, slots: int = 2) -> torch.Tensor:
    """Compute through `slots` device buffers, the next weight copied while the present one computes.

    This is what a strategy does, spelled out with streams and events so that each step can be left out.
    """
    copies, compute = sim.new_stream(), sim.machine.default
    masters = []
    for weight in weights():
        master = sim.pin(weight.nbytes).view(torch.float32).view(WIDTH, WIDTH)
        master.copy_(weight)
        masters.append(master)
    staging = sim.pin(masters[0].nbytes).view(torch.float32).view(WIDTH, WIDTH)
    x = torch.ones(2, WIDTH, device=sim.device)
    count = slots + 1 if fault == "one slot too many" else slots
    ring: list[torch.Tensor] = []
    if fault != "allocated for each layer on the copy stream":
        ring = [torch.empty(WIDTH, WIDTH, device=sim.device) for _ in range(count)]
    ready = [Event() for _ in range(LAYERS)]
    used = [Event() for _ in range(LAYERS)]
    allocated = Event()
    sim.machine.record(allocated, compute)
    if fault != "no wait for the allocation":
        sim.machine.wait(copies, allocated)
    current: dict[int, torch.Tensor] = {}

    def fetch(layer: int) -> None:
        if layer >= LAYERS:
            return
        previous = layer - slots
        if previous >= 0 and fault not in ("no wait before reuse", "allocated for each layer on the copy stream"):
            source = used[previous + 1] if fault == "waits for an event not recorded yet" else used[previous]
            sim.machine.wait(copies, source)
        if fault == "event recorded before the copy":
            sim.machine.record(ready[layer], copies)
        with sim.on(copies):
            if fault == "allocated for each layer on the copy stream":
                current[layer] = torch.empty(WIDTH, WIDTH, device=sim.device)
            else:
                current[layer] = ring[layer % slots]
            if fault == "staging buffer reused":
                staging.copy_(masters[layer])
                current[layer].copy_(staging, non_blocking=True)
            elif fault == "another layer's bytes":
                current[layer].copy_(masters[(layer + 1) % LAYERS], non_blocking=True)
            else:
                current[layer].copy_(masters[layer], non_blocking=True)
        if fault == "event recorded on the wrong stream":
            sim.machine.record(ready[layer], compute)
        elif fault != "event recorded before the copy":
            sim.machine.record(ready[layer], copies)

    ahead = slots if fault == "prefetch one too deep" else slots - 1
    for layer in range(ahead):
        fetch(layer)
    for layer in range(LAYERS):
        fetch(layer + ahead)
        if fault != "no wait for the copy":
            sim.machine.wait(compute, ready[layer])
        weight = masters[layer] if fault == "weight left on the host" and layer == 3 else current[layer]
        x = torch.tanh(x @ weight)
        sim.machine.record(used[layer], compute)
        if fault == "master edited while its copy is pending" and layer + 1 < LAYERS:
            masters[layer + 1].mul_(2)
            masters[layer + 1].mul_(0.5)
        del weight
        if fault == "allocated for each layer on the copy stream":
            del current[layer]  # freed in use: nothing says that the computing stream still reads it
    if fault == "result read without a synchronisation":
        host = sim.pin(x.nbytes).view(torch.float32).view(2, WIDTH)
        host.copy_(x, non_blocking=True)
        return host.clone()
    result = x.cpu()
    if fault == "leak":
        LEAKED.extend(ring)
    return result


LEAKED: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def _no_grad_no_leak() -> Iterator[None]:
    with torch.no_grad():
        yield
    LEAKED.clear()


@dataclass(frozen=True)
class Caught:
    """How a fault shows: as a race with words from both sides, as wrong numbers in some order, as an error."""

    race: tuple[str, ...] = ()
    numbers: bool = False
    error: str = ""


FAULTS = {
    "no wait for the copy": Caught(race=("copy host to device on copy", "mm on compute reads"), numbers=True),
    "event recorded before the copy": Caught(race=("copy host to device on copy", "mm on compute"), numbers=True),
    "event recorded on the wrong stream": Caught(race=("copy host to device on copy", "mm on compute"), numbers=True),
    "no wait before reuse": Caught(race=("mm on compute reads", "copy host to device on copy 1 writes"), numbers=True),
    "waits for an event not recorded yet": Caught(race=("mm on compute reads", "copy host to device"), numbers=True),
    "prefetch one too deep": Caught(race=("mm on compute reads", "copy host to device"), numbers=True),
    "no wait for the allocation": Caught(race=("handing out memory on compute writes", "copy host"), numbers=True),
    "allocated for each layer on the copy stream": Caught(race=("on copy 1 writes", "mm on compute reads")),
    "staging buffer reused": Caught(race=("copy host to device on copy 1 reads", "copy_ on host writes"), numbers=True),
    "master edited while its copy is pending": Caught(race=("copy host to device", "mul_ on host writes")),
    "result read without a synchronisation": Caught(race=("copy device to host", "clone on host reads"), numbers=True),
    "another layer's bytes": Caught(numbers=True),
    "weight left on the host": Caught(error="Expected all tensors to be on the same device"),
}


@pytest.mark.parametrize(("order", "seed"), RUNS)
@pytest.mark.parametrize("slots", [2, 3])
def test_the_loop_without_a_fault_is_clean_and_right_under_every_order(order: str, seed: int, slots: int) -> None:
    """No false alarm, and memory goes back to where it was."""
    with SimulatedAccelerator(order=order, seed=seed) as sim:
        assert torch.equal(expected(), stream_layers(sim, slots=slots))
        sim.check()
        gc.collect()
        assert sim.live_bytes == 0


@pytest.mark.parametrize("fault", [fault for fault, caught in FAULTS.items() if caught.race])
def test_the_detector_names_both_sides_in_a_single_run(fault: str) -> None:
    """Whatever order the work happened to run in."""
    for order in ORDERS:
        with SimulatedAccelerator(order=order) as sim:
            stream_layers(sim, fault)
            with pytest.raises(RaceError, match="races on the simulated accelerator"):
                sim.check()
            texts = [str(race) for race in sim.races]
            assert any(all(word in text for word in FAULTS[fault].race) for text in texts), texts[:4]
            assert all("test_planted_faults.py:" in text for text in texts)


@pytest.mark.parametrize("fault", [fault for fault, caught in FAULTS.items() if caught.numbers])
def test_the_numbers_are_wrong_in_some_order(fault: str) -> None:
    """The second opinion: what the wrong order does to the result."""
    wrong = []
    for order, seed in RUNS:
        with SimulatedAccelerator(order=order, seed=seed) as sim:
            if not torch.equal(expected(), stream_layers(sim, fault)):
                wrong.append((order, seed))
    assert wrong


@pytest.mark.parametrize("fault", [fault for fault, caught in FAULTS.items() if caught.error])
def test_a_mixture_of_devices_raises_as_on_a_real_one(fault: str) -> None:
    """With the operation and the shapes."""
    with SimulatedAccelerator() as sim, pytest.raises(RuntimeError, match=FAULTS[fault].error):
        stream_layers(sim, fault)


def test_a_leak_shows_in_the_live_bytes() -> None:
    """What was taken is not given back."""
    with SimulatedAccelerator() as sim:
        stream_layers(sim, "leak")
        gc.collect()
        assert sim.live_bytes == 2 * WIDTH * WIDTH * 4


def test_one_slot_too_many_exceeds_the_capacity_that_the_right_loop_keeps() -> None:
    """torch's own error, with the figures."""
    with SimulatedAccelerator() as sim:
        stream_layers(sim)
        capacity = sim.peak_bytes
    with SimulatedAccelerator(capacity=capacity) as sim:
        assert torch.equal(expected(), stream_layers(sim))
    with (
        SimulatedAccelerator(capacity=capacity) as sim,
        pytest.raises(torch.OutOfMemoryError, match=f"capacity {capacity}"),
    ):
        stream_layers(sim, "one slot too many")


def test_at_least_twelve_faults_are_planted() -> None:
    """Those of the table, a leak, and a slot too many."""
    assert len(FAULTS) + 2 >= 12
