"""The simulated accelerator is a device: it computes the CPU's bits, refuses CPU tensors, counts and limits memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sidestream
from sidestream.testing import pipelines, toys
from sidestream.testing.simulated import ORDERS, SimulatedAccelerator

MODES = [torch.no_grad, torch.inference_mode]


class Attention(nn.Module):
    """A block of a small language model: attention with a causal mask, and a gated feed-forward."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(11, width)
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.gate = nn.Linear(width, 2 * width)
        angles = torch.rand(5, width // heads // 2)
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        turned = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2)) * self.table
        q = torch.view_as_real(turned).flatten(-2)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        a, b = self.gate(x).chunk(2, -1)
        x = x + nn.functional.silu(a) * b
        x = torch.where(x > 0, x, x * 0.1).masked_fill(x.isnan(), 0.0)
        return torch.cat([x.mean(1), x.amax(1), x[:, -1]], -1)


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, stride=2),
        nn.Upsample(scale_factor=2.0), nn.ConvTranspose2d(8, 4, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "attention": (Attention, lambda: torch.arange(10).view(2, 5)),
    "convolutions": (_convolutions, lambda: torch.randn(2, 3, 8, 8)),
    "torch's transformer encoder": (_encoder, lambda: torch.randn(2, 4, 16)),
    "a toy pipeline's DiT": (lambda: toys.Denoiser(), lambda: torch.randn(2, 16)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES, ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", list(MODELS))
def test_modules_compute_the_bits_of_the_cpu(name: str, mode: Any, order: str) -> None:
    """Attention included; nothing of the model has to know."""
    build, make_input = MODELS[name]
    torch.manual_seed(0)
    model, x = build().eval(), make_input()
    inputs = (x, x) if name.startswith("a toy") else (x,)
    with mode():
        expected = model(*inputs)
        with SimulatedAccelerator(order=order) as sim:
            for block in model.modules():
                if hasattr(block, "calls"):
                    block.calls.zero_()
            model.to(sim.device)
            output = model(*(each.to(sim.device) for each in inputs))
            assert output.device == sim.device
            if name != "torch's transformer encoder":  # on the CPU a fused kernel of its own
                assert torch.equal(expected, output.cpu())
            else:
                torch.testing.assert_close(expected, output.cpu())
            sim.check()


@pytest.mark.parametrize("name", ["flux", "qwenimage", "sdxl", "wan"])
def test_whole_diffusers_pipelines_give_the_bits_of_the_cpu_with_and_without_offload(name: str) -> None:
    """Resident and offloaded alike, under a random order, without a race."""
    expected = pipelines.run(name, pipelines.build(name))
    with SimulatedAccelerator(order="random", seed=3) as sim, torch.no_grad():
        resident = pipelines.build(name).to(sim.device)
        assert torch.equal(expected, pipelines.run(name, resident))
        del resident
        gc.collect()
        pipe = pipelines.build(name)
        config = {"strategy": "model_level", "components": ["dit", "text_encoder", "vae"]}
        with sidestream.offload(pipe, config, device=sim.device) as backend:
            assert torch.equal(expected, pipelines.run(name, pipe))
            assert backend.report().moved_bytes > 0
            assert pipe.device == sim.device == backend.device
        sim.check()
        for module in pipe.components.values():
            if isinstance(module, nn.Module):
                assert {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} <= {"cpu"}


@pytest.fixture
def sim() -> Iterator[SimulatedAccelerator]:
    with SimulatedAccelerator() as opened, torch.no_grad():
        yield opened


MIXTURES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "linear": lambda here, there: nn.functional.linear(here, there),
    "add": lambda here, there: here + there,
    "in place": lambda here, there: here.add_(there),
    "cat": lambda here, there: torch.cat([here, there]),
    "where": lambda here, there: torch.where(here > 0, here, there),
    "embedding": lambda here, there: nn.functional.embedding(here.long() * 0, there),
    "attention": lambda here, there: nn.functional.scaled_dot_product_attention(here[None], there[None], here[None]),
    "layer_norm": lambda here, there: nn.functional.layer_norm(here, (3,), there[0]),
}


@pytest.mark.parametrize("name", list(MIXTURES))
def test_a_cpu_tensor_among_the_devices_raises_and_names_its_shape(sim: SimulatedAccelerator, name: str) -> None:
    """As on a real device; a number as a tensor without dimensions is allowed."""
    here, there = torch.ones(3, 3, device=sim.device), torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=r"same device, but found .* simdev:0 and cpu.*\((1, )?3"):
        MIXTURES[name](here, there)
    assert torch.equal(torch.full((3, 3), 3.0), (here + torch.tensor(2.0)).cpu())


def test_fresh_and_freed_memory_is_poison(sim: SimulatedAccelerator) -> None:
    """Whoever reads what nobody wrote gets NaN, also from memory that had a value."""
    first = torch.ones(64, device=sim.device)
    del first
    assert torch.empty(64, device=sim.device).cpu().isnan().all()
    assert torch.empty(64, dtype=torch.bfloat16, device=sim.device).cpu().isnan().all()


def test_memory_is_counted_live_at_worst_and_by_stream(sim: SimulatedAccelerator) -> None:
    """Bytes as asked for."""
    first = torch.empty(100, device=sim.device)
    copies = sim.new_stream()
    with sim.on(copies):
        second = torch.empty(50, device=sim.device)
    assert (sim.live_bytes, sim.peak_bytes) == (600, 600)
    assert sim.allocator.live_by_stream == {"compute": 400, "copy 1": 200}
    del first
    assert (sim.live_bytes, sim.peak_bytes) == (200, 600)
    second.record_stream(sim.machine.default)  # type: ignore[arg-type]
    del second
    assert sim.live_bytes == 0


def test_beyond_the_capacity_torchs_own_error_is_raised_and_the_device_stays_usable() -> None:
    """With the figures in it."""
    with SimulatedAccelerator(capacity=1000) as sim:
        kept = torch.ones(200, device=sim.device)
        with pytest.raises(torch.OutOfMemoryError, match="400 bytes asked, 800 in use, capacity 1000"):
            torch.ones(100, device=sim.device)
        assert kept.sum().item() == 200


def test_pinned_memory_has_a_budget_and_the_allocators_rounding() -> None:
    """A power of two for each request; given back with its last tensor, whichever that is."""
    with SimulatedAccelerator(pin_budget=5000) as sim:
        memory = sim.pin(3000)
        assert sim.pinned_bytes == 4096
        with pytest.raises(RuntimeError, match="cannot pin 1024 bytes more"):
            sim.pin(1000)
        view = memory[100:200].view(torch.float32)
        del memory
        assert sim.pinned_bytes == 4096
        del view
        assert sim.pinned_bytes == 0


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_from_pageable_memory_is_done_when_it_returns(sim: SimulatedAccelerator, pinned: bool) -> None:
    """So it cannot overlap, and the source may be written at once; from pinned memory neither holds."""
    source = (sim.pin(32) if pinned else torch.empty(32, dtype=torch.uint8)).view(torch.float32)
    source.fill_(1)
    target = torch.empty(8, device=sim.device)
    target.copy_(source, non_blocking=True)
    source.fill_(2)
    assert target.cpu().tolist() == [2.0 if pinned else 1.0] * 8
    assert bool(sim.races) is pinned


def test_an_event_that_was_never_recorded_waits_for_nothing(sim: SimulatedAccelerator) -> None:
    """And recording again moves it: a wait means the moment at which it was called."""
    from sidestream.testing.simulated import Event

    copies, event = sim.new_stream(), Event()
    sim.machine.wait(copies, event)
    assert not copies.queue
    sim.machine.record(event, sim.machine.default)
    sim.machine.wait(copies, event)
    assert len(copies.queue) == 1


def test_there_is_one_at_a_time_and_none_outside() -> None:
    """Its tensors mean nothing without it."""
    with SimulatedAccelerator() as sim:
        kept = torch.ones(2, device=sim.device)
        with pytest.raises(RuntimeError, match="one at a time"), SimulatedAccelerator():
            pass
    with pytest.raises(RuntimeError, match="no simulated accelerator is open"):
        kept + 1
    with SimulatedAccelerator() as sim:
        assert torch.ones(2, device=sim.device).sum().item() == 2


def test_results_that_the_host_needs_wait_for_the_stream(sim: SimulatedAccelerator) -> None:
    """Numbers, truth, shapes that depend on data."""
    x = torch.arange(6, device=sim.device).float()
    assert (x * 2).sum().item() == 30
    assert bool((x > 4).any())
    assert x[x > 3].tolist() == [4.0, 5.0]
    assert x.nonzero().shape == (5, 1)
    assert torch.equal(x, x.clone())
    assert x.to(torch.int64).cpu().dtype is torch.int64


def test_torch_knows_of_the_device_only_while_one_is_open() -> None:
    """So that nothing outside a simulation takes it for this machine's accelerator."""
    from sidestream.streaming.runtime import resolve_device

    real = torch.accelerator.is_available() and torch.accelerator.current_accelerator().type != "simdev"
    with SimulatedAccelerator() as sim:
        assert torch.accelerator.is_available()
        if not real:
            assert resolve_device(None).type == sim.device.type
    if not real:
        assert resolve_device(None) == torch.device("cpu")


@pytest.mark.parametrize("mode", MODES, ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_modules_compute_the_bits_of_the_cpu(kind: Any, mode: Any) -> None:
    """Taken apart by device they would need kernels of their own."""
    torch.manual_seed(0)
    model, x = kind(8, 8, num_layers=2), torch.randn(3, 2, 8)
    with mode(), SimulatedAccelerator() as sim:
        expected = model(x)[0]
        assert torch.equal(expected, model.to(sim.device)(x.to(sim.device))[0].cpu())


def test_a_weight_can_be_given_other_data_cast_and_viewed_in_inference_mode(sim: SimulatedAccelerator) -> None:
    """As modules do to themselves: `double()`, `to(memory_format=...)`, and unpacking a table."""
    model = nn.Conv2d(2, 3, 3).requires_grad_(False).to(sim.device)
    before = model.weight.cpu().clone()
    model.to(memory_format=torch.channels_last).double()  # type: ignore[call-overload]
    assert model.weight.dtype is torch.float64
    assert model.weight.stride() == (18, 1, 6, 2)
    assert torch.equal(before.double(), model.weight.cpu())
    with torch.inference_mode():
        first, _, third = model.bias
        assert (first + third).cpu().isfinite()
