"""The time model: what a schedule would take, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from sidestream.streaming.runtime import WaitMeter
from sidestream.testing.simulated import SimulatedAccelerator, SimulatedRuntime, TimeModel

LAYERS, WIDTH = 6, 64
BYTES = WIDTH * WIDTH * 4
#: Multiplying a batch of eight by one layer: operations.
WORK = 2 * 8 * WIDTH * WIDTH


def run(*, copy: float, compute: float, ahead: bool) -> tuple[float, float, float]:
    """Stream the layers with `copy` and `compute` seconds for each; return makespan, stall and bound in seconds."""
    model = TimeModel(bandwidth=BYTES / copy, rate=WORK / compute, elements=1e30, launch=0.0)
    with SimulatedAccelerator(model=model) as sim, torch.no_grad():
        runtime = SimulatedRuntime(sim.device, sim)
        stream, meter = runtime.new_stream(), WaitMeter()
        masters = [sim.pin(BYTES).view(torch.float32).view(WIDTH, WIDTH).fill_(0.1) for _ in range(LAYERS)]
        x = torch.ones(8, WIDTH, device=sim.device)
        buffers = [runtime.empty(BYTES) for _ in range(LAYERS)]
        start = sim.machine.makespan

        def fetch(layer: int) -> object:
            return runtime.copy(stream, [(buffers[layer], masters[layer].view(torch.uint8).view(-1))])

        pending = fetch(0)
        for layer in range(LAYERS):
            present = pending
            runtime.wait(present, meter)
            if ahead and layer + 1 < LAYERS:
                pending = fetch(layer + 1)
            x = x @ buffers[layer].view(torch.float32).view(WIDTH, WIDTH)
            if not ahead and layer + 1 < LAYERS:
                pending = fetch(layer + 1)
        sim.check()
        assert meter.seconds() == pytest.approx(sim.machine.stall)
        return sim.machine.makespan - start, sim.machine.stall, sim.machine.bound


@pytest.mark.parametrize(("copy", "compute"), [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0)])
def test_makespan_stall_and_bound_are_those_of_the_schedule(copy: float, compute: float) -> None:
    """One ahead: the first copy, then the slower of the two for each layer but the last, then the last to compute."""
    makespan, stall, bound = run(copy=copy, compute=compute, ahead=True)
    slower = max(copy, compute)
    assert makespan == pytest.approx(copy + (LAYERS - 1) * slower + compute)
    assert stall == pytest.approx(copy + (LAYERS - 1) * max(0.0, copy - compute))
    assert bound == pytest.approx(LAYERS * slower)


def test_a_schedule_without_overlap_takes_the_sum() -> None:
    """Each copy waits for the kernel before it: nothing is hidden."""
    makespan, stall, _ = run(copy=1.0, compute=2.0, ahead=False)
    assert makespan == pytest.approx(LAYERS * 3.0)
    assert stall == pytest.approx(LAYERS * 1.0)


def test_launching_costs_the_host() -> None:
    """A device faster than the host's launches waits for them."""
    model = TimeModel(launch=1e-3, elements=1e30, rate=1e30)
    with SimulatedAccelerator(model=model) as sim, torch.no_grad():
        x = torch.ones(4, device=sim.device)
        before = sim.machine.launches
        for _ in range(10):
            x = x + 1
        assert sim.machine.launches == before + 10
        assert sim.machine.makespan == pytest.approx(sim.machine.launches * 1e-3)


def test_the_order_of_execution_does_not_change_the_time() -> None:
    """Time is a matter of what was issued."""
    spans = []
    for order in ("lazy", "copy_first", "random"):
        with SimulatedAccelerator(order=order) as sim, torch.no_grad():
            x = torch.ones(32, 32, device=sim.device)
            (x @ x).sum().item()
            spans.append(sim.machine.makespan)
    assert len(set(spans)) == 1
