"""Tensors that are more than a tensor: wrapper subclasses, Parameter subclasses, views, DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sidestream import UnsupportedModelError


class Scaled(torch.Tensor):
    """A wrapper subclass: int8 values and a scale for each row; computes by unpacking."""

    values: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)
        made.values, made.scale = values, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["values"], inner["scale"])

    def plain(self) -> torch.Tensor:
        return self.values.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        plain = [arg.plain() if isinstance(arg, Scaled) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


class Sealed(Scaled):
    """The same without a way to take it apart."""

    __tensor_flatten__ = None


class Tagged(nn.Parameter):
    """A Parameter subclass that carries an attribute."""

    quant_type: str


def scaled_linear(seed: int = 0) -> nn.Linear:
    """Return a linear with a :class:`Scaled` weight."""
    torch.manual_seed(seed)
    linear = nn.Linear(8, 8)
    values, scale = torch.randint(-100, 100, (8, 8), dtype=torch.int8), torch.rand(8, 1)
    linear.weight = nn.Parameter(Scaled(values, scale), requires_grad=False)
    return linear


def addresses(tensor: Any) -> set[int]:
    """Return where the inner tensors of a :class:`Scaled` lie."""
    return {tensor.values.data_ptr(), tensor.scale.data_ptr()}


@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
def test_both_inner_tensors_of_a_wrapper_subclass_move_and_come_back(start: Any, pin: bool) -> None:
    """huggingface/diffusers#13276, #13751, accelerate#3332: only the outer shell moved."""
    model, reference = (
        nn.Sequential(scaled_linear(), scaled_linear(1)),
        nn.Sequential(scaled_linear(), scaled_linear(1)),
    )
    x = torch.randn(2, 8)
    expected = reference(x)
    weight, home = model[0].weight, addresses(model[0].weight)
    backend, runtime = start({"transformer": model}, pin=pin)
    inside: list[set[int]] = []
    model[0].register_forward_pre_hook(lambda module, args: inside.append(addresses(module.weight)))
    assert torch.equal(expected, model(x))
    assert not inside[0] & (home | addresses(weight)), "an inner tensor stayed on the host"
    assert model[0].weight is weight
    component = backend.report().components[0]
    assert component.streamed_bytes == 2 * (64 + 32 + 32)
    backend.disable()
    assert model[0].weight is weight
    assert type(weight) is type(reference[0].weight)
    assert torch.equal(weight.values, reference[0].weight.values)
    assert torch.equal(expected, model(x))
    assert runtime.ledger.device_bytes == 0


def test_a_wrapper_that_cannot_be_taken_apart_stays_and_is_named_or_refused(start: Any) -> None:
    """By default it is left where it is; selected by name it is an error."""
    linear = scaled_linear()
    inner: Any = linear.weight
    linear.weight = nn.Parameter(Sealed(inner.values, inner.scale), requires_grad=False)
    backend, _ = start({"transformer": linear})
    notes = {note.name: note.reason for note in backend.report().resident}
    assert "__tensor_flatten__" in notes["transformer.weight"]
    linear(torch.randn(2, 8))
    backend.disable()
    with pytest.raises(UnsupportedModelError, match=r"transformer\.weight cannot be offloaded.*Sealed"):
        start({"transformer": linear}, components={"dit"})


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao_linears_give_the_same_bits(start: Any, kind: str) -> None:
    """pytorch/ao weights are wrapper subclasses of several layers."""
    torchao = pytest.importorskip("torchao.quantization")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        torchao.quantize_(model, getattr(torchao, kind)())
        models.append(model.requires_grad_(False))
    x = torch.randn(4, 64)
    backend, _ = start({"transformer": models[0]})
    for _ in range(2):
        assert torch.equal(models[1](x), models[0](x))
    assert backend.report().components[0].streamed_bytes > 2 * 64 * 64
    backend.disable()
    assert torch.equal(models[1](x), models[0](x))


def test_a_parameter_subclass_keeps_class_and_attributes_on_the_device(start: Any) -> None:
    """huggingface/diffusers#14691: rebuilt from its data alone it lost what it was."""
    model = nn.Linear(4, 4)
    tagged = Tagged(torch.randn(4, 4), requires_grad=False)
    tagged.quant_type = "q4"
    model.weight = tagged
    model.bias.requires_grad_(False)
    seen: list[tuple[type, str]] = []
    model.register_forward_pre_hook(lambda module, args: seen.append((type(module.weight), module.weight.quant_type)))
    _, runtime = start({"transformer": model})
    model(torch.randn(1, 4))
    assert seen == [(Tagged, "q4")]
    assert model.weight is tagged
    assert runtime.copied > 0


def _slice(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.randn(8, 16)[:, ::2], requires_grad=False)


def _expanded(model: nn.Linear) -> None:
    model.bias = nn.Parameter(torch.randn(1).expand(8), requires_grad=False)


def _overlapping(model: nn.Linear) -> None:
    model.register_buffer("turned", model.weight.data.t())


@pytest.mark.parametrize("change", [_slice, _expanded, _overlapping])
def test_layouts_that_no_image_can_hold_stay_and_are_named_or_refused(start: Any, change: Any) -> None:
    """Slices, expanded tensors, and two tensors over one memory."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8).requires_grad_(False)
    change(model)
    x = torch.randn(2, 8)
    expected = model(x)
    backend, _ = start({"transformer": model})
    assert torch.equal(expected, model(x))
    report = backend.report()
    assert any("densely" in note.reason or "shares memory" in note.reason for note in report.resident)
    assert report.components[0].resident_bytes > 0
    backend.disable()
    assert torch.equal(expected, model(x))
    with pytest.raises(UnsupportedModelError, match="cannot be offloaded"):
        start({"transformer": model}, components={"dit"})


def test_every_dtype_and_emptiness_travels(start: Any) -> None:
    """Misaligned packing: [u8 x 3, f32, bf16 x 5, c64, f8 x 7, bool, 0-dim, empty] at multiples of 256."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            for index, dtype in enumerate(
                [torch.uint8, torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool,
                 torch.int16, torch.uint16, torch.int64, torch.float64]
            ):  # fmt: skip
                value = (torch.rand(2 * index + 1) * 9).to(dtype)
                self.register_buffer(f"b{index}", value)
            self.register_buffer("scalar", torch.tensor(3.5))
            self.register_buffer("empty", torch.empty(0, 4))

        def forward(self) -> list[torch.Tensor]:
            self.seen = [tensor.data_ptr() for tensor in self.buffers() if tensor.nbytes]
            return [tensor.clone() for tensor in self.buffers()]

    model, reference = Mixed(), Mixed()
    backend, _ = start({"transformer": model})
    buffers = [unit.buffer for unit in backend._units.values()]
    assert buffers == [None]
    for mine, plain in zip(model(), reference(), strict=True):
        assert mine.dtype == plain.dtype
        assert mine.shape == plain.shape
        assert mine.reshape(-1).view(torch.uint8).equal(plain.reshape(-1).view(torch.uint8))
    base = backend._units["transformer"].buffer.data_ptr()
    assert all((address - base) % 256 == 0 for address in model.seen)


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_dtensor_is_refused_by_name(start: Any) -> None:
    """vllm-project/vllm-omni#1888, #2021: a sharded parameter was taken for a plain one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Linear(8, 8).requires_grad_(False)
    mesh = init_device_mesh("cpu", (1,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Shard(0)]), requires_grad=False)
    for components in (None, {"dit"}):
        with pytest.raises(UnsupportedModelError, match=r"transformer\.weight.*DTensor"):
            start({"transformer": model}, components=components)
