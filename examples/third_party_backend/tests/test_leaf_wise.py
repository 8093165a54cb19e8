"""What is particular to this strategy: one module at a time, and modules with habits of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import sidestream
from sidestream.streaming.pool import align
from sidestream.streaming.runtime import runtime_in_use
from sidestream.testing import toys
from sidestream.testing.portrait import portrait
from sidestream.testing.runtimes import WatchfulRuntime
from sidestream.testing.simulated import SimulatedAccelerator

WIDTH = 8


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def watched() -> Iterator[list[WatchfulRuntime]]:
    """The CPU with memory of its own, poisoned when freed, and late copies; what was opened is listed."""
    opened: list[WatchfulRuntime] = []

    def make(device: torch.device) -> WatchfulRuntime:
        opened.append(WatchfulRuntime(device, lazy=True, separate=True))
        return opened[-1]

    with runtime_in_use("cpu", make):
        yield opened


def seeded(make: Callable[[], nn.Module]) -> Any:
    """Return `make()` with the same weights each time, as a pipeline of one transformer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.ModuleDict({"transformer": make().eval().requires_grad_(False)})


class Listed(nn.Module):
    """Reads a list of parameters, which has no forward to be called."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, WIDTH)` to the same."""
        for scale in self.scales:
            x = self.inner(x) * scale
        return x


class Peeking(nn.Module):
    """Reads the weight of a module inside without calling that."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, WIDTH)` to the same."""
        mapped: torch.Tensor = self.first(x) @ self.table.weight
        return mapped


class Norming(nn.Module):
    """Weights that a pre-hook or a parametrization computes from others; the identity gives the very tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.old = torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.new = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.same = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.same, "weight", nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, WIDTH)` to the same."""
        mapped: torch.Tensor = self.same(self.spectral(self.new(self.old(x))))
        return mapped


def attention() -> nn.Module:
    """Return two encoder layers; each reads its children's weights without calling them."""
    return nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True) for _ in range(2)))


def tied() -> nn.Module:
    """Return a stack of which the first and the last layer have one weight."""
    stack = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    stack[2].weight = stack[0].weight
    return stack


def offload(pipe: Any, device: Any = "cpu", **options: Any) -> Any:
    """Offload with `leaf_wise` and these options of its own."""
    return sidestream.offload(pipe, {"strategy": "leaf_wise", "options": options}, device=device)


@pytest.mark.parametrize("make", [Listed, Norming, attention, tied, toys.Block], ids=lambda make: make.__name__)
@pytest.mark.parametrize("order", ["lazy", "copy_first"])
def test_whatever_a_forward_reads_is_on_the_device(make: Callable[[], nn.Module], order: Any) -> None:
    """A tensor that was left on the host raises on a device of its own; the bits are those of the resident model."""
    width = toys.WIDTH if make is toys.Block else WIDTH
    x = torch.randn(2, 3, width) if make is attention else torch.randn(2, width)
    with SimulatedAccelerator(order=order) as sim:
        reference, pipe = seeded(make), seeded(make)
        before = portrait(pipe)
        expected = reference.to(sim.device)["transformer"](x.to(sim.device)).cpu()
        with offload(pipe, sim.device) as backend:
            for _ in range(2):
                found = pipe["transformer"](x.to(sim.device)).cpu()
                if make is not toys.Block:  # it counts its calls
                    assert torch.equal(expected, found)
            assert backend.report().fetches >= 4
        assert before == portrait(pipe)
        sim.check()


def test_a_module_inside_one_that_moves_as_a_whole_can_be_called() -> None:
    """Its tensors belong to the module around it, which is entered first."""
    x = torch.randn(2, 3, WIDTH)
    with SimulatedAccelerator() as sim:
        pipe, reference = seeded(attention), seeded(attention)
        there = x.to(sim.device)
        expected = reference.to(sim.device)["transformer"][0].self_attn(there, there, there)[0].cpu()
        with offload(pipe, sim.device):
            assert torch.equal(expected, pipe["transformer"][0].self_attn(there, there, there)[0].cpu())


def test_classes_that_read_what_lies_inside_them_can_be_named() -> None:
    """Otherwise the device refuses, as with accelerate; nothing is computed wrongly."""
    x = torch.randn(2, WIDTH)
    with SimulatedAccelerator() as sim:
        pipe = seeded(Peeking)
        with offload(pipe, sim.device), pytest.raises(RuntimeError):
            pipe["transformer"](x.to(sim.device)).cpu()
        with offload(pipe, sim.device, whole=["Peeking"]):
            found = pipe["transformer"](x.to(sim.device)).cpu()
        assert torch.equal(seeded(Peeking).to(sim.device)["transformer"](x.to(sim.device)).cpu(), found)


def test_a_computed_weight_is_read_between_calls_from_the_host(watched: list[WatchfulRuntime]) -> None:
    """Nothing opens for a parametrization alone, so nobody gets a tensor of a device buffer that is freed."""
    pipe, reference = seeded(Norming), seeded(Norming)
    with offload(pipe) as backend:
        assert torch.equal(reference["transformer"].new.weight, pipe["transformer"].new.weight)
        assert pipe["transformer"].same.weight is pipe["transformer"].same.parametrizations.weight.original
        assert backend.report().fetches == 0


def test_one_module_at_a_time_is_on_the_device(watched: list[WatchfulRuntime]) -> None:
    """With the first parameter, which says where to compute; a tied weight is there with each of its modules."""
    pipe = nn.ModuleDict({"transformer": nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))}).requires_grad_(False)
    stack: Any = pipe["transformer"]
    stack[5].weight = stack[3].weight
    x = torch.randn(2, 64)
    expected = stack(x)
    with offload(pipe) as backend:
        assert torch.equal(expected, stack(x))
        report = backend.report()
        assert report.peak_device_bytes == 64 * 64 * 4 + align(64 * 64 * 4) + align(64 * 4)
        assert report.device_bytes == 64 * 64 * 4
        assert report.moved_bytes == 5 * 64 * 64 * 4 + 6 * 64 * 4
        assert [one.name for one in report.resident] == ["transformer.0.weight"]
        assert stack[5].weight is stack[3].weight
    assert stack[5].weight is stack[3].weight


def test_after_an_interrupt_nothing_is_left_on_the_device(watched: list[WatchfulRuntime]) -> None:
    """At once, not at the next call; wherever it strikes, in a module that was called directly, too."""
    pipe: Any = toys.pipeline()
    before, x = portrait(pipe), torch.ones(2, toys.WIDTH)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with offload(pipe) as backend:
        held, masters = backend.report().device_bytes, [*pipe.parameters()]
        for module in (pipe.transformer.blocks[1].norm, pipe.transformer.blocks[0], pipe.transformer.head):
            for register in (module.register_forward_hook, module.register_forward_pre_hook):
                hook = register(interrupt)
                for called, inputs in ((pipe.transformer, (x, x)), (pipe.transformer.blocks[1], (x,)), (module, (x,))):
                    try:
                        called(*inputs)
                    except KeyboardInterrupt:
                        assert backend.report().device_bytes == held
                        assert all(map(lambda one, other: one is other, masters, pipe.parameters()))
                hook.remove()
        assert torch.equal(toys.pipeline()(toys.prompt()), pipe(toys.prompt()))
    assert before == portrait(pipe)


def test_what_cannot_be_done_is_refused() -> None:
    """Gradients, a second owner, a forward that somebody else replaced, weights that are on the device."""
    pipe, x = toys.pipeline(), torch.ones(2, toys.WIDTH)
    before = portrait(pipe)
    with torch.enable_grad(), offload(pipe):
        with pytest.raises(sidestream.UnsupportedModelError, match="inference only"):
            pipe.transformer(x.clone().requires_grad_(), x)
        with pytest.raises(sidestream.BackendStateError, match="offloaded already"):
            sidestream.enable_offload(pipe, "leaf_wise", device="cpu")
    with pytest.raises(sidestream.ConfigError, match=r"options\.hole: .*whole"):
        sidestream.enable_offload(pipe, {"strategy": "leaf_wise", "options": {"hole": ["Block"]}}, device="cpu")
    pipe.transformer.head.__dict__["forward"] = pipe.transformer.head.forward
    with pytest.raises(sidestream.UnsupportedModelError, match=r"transformer\.head\.forward was replaced"):
        sidestream.enable_offload(pipe, "leaf_wise", device="cpu")
    del pipe.transformer.head.__dict__["forward"]
    assert before == portrait(pipe)
    with SimulatedAccelerator() as sim:
        there = pipe.to(sim.device)
        with pytest.raises(sidestream.UnsupportedModelError, match="cannot be offloaded: it is on simdev:0"):
            sidestream.enable_offload(there, "leaf_wise", device=sim.device)


@pytest.mark.parametrize("name", ["flux", "sdxl", "wan"])
@pytest.mark.parametrize("components", [None, ["dit", "text_encoder", "vae"]], ids=["default", "all"])
def test_whole_pipelines_give_the_same_bits(
    name: str, components: list[str] | None, watched: list[WatchfulRuntime]
) -> None:
    """Real ones, tiny; every parameter is the same object afterwards."""
    pytest.importorskip("diffusers")
    from sidestream.testing import pipelines

    pipe = pipelines.build(name)
    expected = [pipelines.run(name, pipe, seed=seed) for seed in (1, 2)]
    before = [portrait(module) for module in pipe.components.values() if isinstance(module, nn.Module)]
    with sidestream.offload(pipe, {"strategy": "leaf_wise", "components": components}, device="cpu") as backend:
        for seed, output in zip((1, 2), expected, strict=True):
            assert torch.equal(output, pipelines.run(name, pipe, seed=seed))
        report = backend.report()
    assert report.fetches > 100
    assert report.peak_device_bytes < report.host_bytes / 2
    assert before == [portrait(module) for module in pipe.components.values() if isinstance(module, nn.Module)]
    assert torch.equal(expected[0], pipelines.run(name, pipe, seed=1))
