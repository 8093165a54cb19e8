"""Between calls everything tells the truth, and every edit lasts and takes effect at the next call."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sidestream.streaming.placement import answer_device, answer_no_more
from sidestream.testing import toys

ALL = {"dit", "text_encoder", "vae"}


def _in_place(pipe: toys.Pipeline) -> None:
    pipe.transformer.turned.weight.add_(0.25)


def _through_data(pipe: toys.Pipeline) -> None:
    pipe.transformer.blocks[1].up.weight.data += 0.25


def _doubled_through_data(pipe: toys.Pipeline) -> None:
    # Only the exponents change.
    pipe.transformer.blocks[1].up.weight.data.mul_(2)


def _new_data(pipe: toys.Pipeline) -> None:
    pipe.transformer.blocks[0].down.weight.data = torch.full_like(pipe.transformer.blocks[0].down.weight, 0.01)


def _numpy(pipe: toys.Pipeline) -> None:
    pipe.transformer.scale_table.numpy()[:] = 0.5


def _load(pipe: toys.Pipeline) -> None:
    pipe.transformer.load_state_dict(toys.pipeline(seed=8).transformer.state_dict())


def _load_by_assignment(pipe: toys.Pipeline) -> None:
    pipe.transformer.load_state_dict(toys.pipeline(seed=8).transformer.state_dict(), assign=True)


def _cast(pipe: toys.Pipeline) -> None:
    for module in (pipe.transformer, pipe.text_encoder, pipe.vae):
        module.double()
        for child in module.modules():
            if hasattr(child, "low"):
                child.low.bfloat16()


def _replaced_module(pipe: toys.Pipeline) -> None:
    pipe.transformer.blocks[2] = toys.pipeline(seed=9).transformer.blocks[2]


class _Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.full((2, base.in_features), 0.1, device=base.weight.device), requires_grad=False)
        self.b = nn.Parameter(torch.full((base.out_features, 2), 0.2, device=base.weight.device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def _adapter(pipe: toys.Pipeline) -> None:
    pipe.transformer.blocks[0].up = _Adapted(pipe.transformer.blocks[0].up)


def _late_parameter(pipe: toys.Pipeline) -> None:
    pipe.transformer.turned.register_parameter("late", nn.Parameter(torch.ones(16), requires_grad=False))
    pipe.transformer.turned.register_forward_hook(lambda module, args, out: out + module.late)


def _late_buffer(pipe: toys.Pipeline) -> None:
    pipe.transformer.turned.register_buffer("late", torch.ones(16), persistent=False)
    pipe.transformer.turned.register_forward_hook(lambda module, args, out: out + module.late)


def _no_bias(pipe: toys.Pipeline) -> None:
    pipe.transformer.turned.bias = None


def _buffer(pipe: toys.Pipeline) -> None:
    pipe.transformer.blocks[1].mask.logical_not_()


def _layout(pipe: toys.Pipeline) -> None:
    pipe.transformer.mix.to(memory_format=torch.contiguous_format)
    pipe.transformer.turned.weight.data = pipe.transformer.turned.weight.data.t()


def _buffer_made_in_forward(pipe: toys.Pipeline) -> None:
    def remember(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        if not hasattr(module, "seen"):
            module.register_buffer("seen", out.detach() * 0.5)
        return out + module.seen

    pipe.transformer.turned.register_forward_hook(remember)


def _inference_edit(pipe: toys.Pipeline) -> None:
    with torch.inference_mode():
        pipe.vae.scale.mul_(1.5)


EDITS: list[Callable[[toys.Pipeline], None]] = [
    _in_place,
    _through_data,
    _doubled_through_data,
    _new_data,
    _numpy,
    _load,
    _load_by_assignment,
    _cast,
    _replaced_module,
    _adapter,
    _late_parameter,
    _late_buffer,
    _no_bias,
    _buffer,
    _buffer_made_in_forward,
    _layout,
    _inference_edit,
]


@pytest.mark.parametrize("options", [{}, {"device_budget_gib": 1.0}], ids=["turns", "all stay"])
@pytest.mark.parametrize(
    ("pin", "separate"), [(True, False), (False, False), (True, True)], ids=["pinned", "pageable", "separate"]
)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_between_calls_takes_effect_at_the_next_call_and_lasts(
    start: Any, edit: Callable[[toys.Pipeline], None], pin: bool, separate: bool, options: dict[str, Any]
) -> None:
    """sgl-project/sglang#16737, huggingface/peft#1190: a merge had no effect, or vanished. `.data` moves no version."""
    pipe, reference = toys.pipeline(), toys.pipeline()
    backend, runtime = start(pipe, components=ALL, pin=pin, runtime={"separate": separate}, **options)
    for model in (pipe, reference):
        model(toys.prompt())
        if edit is _cast:
            model.text_encoder.register_forward_hook(lambda module, args, out: out.double())
        edit(model)

    def call(model: toys.Pipeline, seed: int) -> torch.Tensor:
        torch.set_default_dtype(torch.float64 if edit is _cast else torch.float32)
        try:
            return model(toys.prompt(), seed=seed)
        finally:
            torch.set_default_dtype(torch.float32)

    for seed in (1, 2):
        assert torch.equal(call(reference, seed), call(pipe, seed))
    assert backend.report().moved_bytes > 0
    backend.disable()
    for (name, value), (other, mine) in zip(reference.state_dict().items(), pipe.state_dict().items(), strict=True):
        assert name == other
        assert value.dtype == mine.dtype, name
        assert torch.equal(value, mine), name
    assert torch.equal(call(reference, 3), call(pipe, 3))
    assert runtime.ledger.device_bytes == runtime.ledger.pinned_bytes == 0


def test_refresh_takes_even_the_smallest_edit(start: Any) -> None:
    """One element through `.data` may slip between the samples of a component that stays on the device."""
    torch.manual_seed(0)
    model = nn.Linear(512, 512).requires_grad_(False)
    reference = nn.Linear(512, 512).requires_grad_(False)
    reference.load_state_dict(model.state_dict())
    backend, _ = start({"transformer": model})
    x = torch.randn(2, 512)
    model(x)
    for linear in (model, reference):
        linear.weight.data[100, 100] += 1
    backend.refresh()
    assert torch.equal(reference(x), model(x))


def test_between_calls_the_state_dict_is_the_plain_models(start: Any) -> None:
    """Keys, order, values, dtypes and host memory; also right after a request, while bytes are still on the device."""
    pipe, reference = toys.pipeline(), toys.pipeline()
    start(pipe, components=ALL, device_budget_gib=1.0)
    for seed in range(2):
        pipe(toys.prompt(), seed=seed)
        reference(toys.prompt(), seed=seed)
        state = pipe.state_dict()
        assert list(reference.state_dict()) == list(state)
        for name, value in reference.state_dict().items():
            assert torch.equal(value, state[name]), name
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in reference.named_parameters()]


def test_one_saved_weight_carries_its_own_bytes_only(start: Any) -> None:
    """Masters that were slices of one slab would drag the whole of it into every file."""
    pipe = toys.pipeline()
    _, runtime = start(pipe, components=ALL)
    assert runtime.ledger.pinned_bytes > 0
    for tensor in pipe.state_dict().values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    file = io.BytesIO()
    torch.save(pipe.transformer.turned.weight, file)
    assert file.tell() < 16 * 16 * 4 + 2000


def test_inside_a_forward_a_module_holds_device_copies_and_outside_its_masters(start: Any) -> None:
    """The masters are the user's own objects, all the time."""
    pipe = toys.pipeline()
    mine = pipe.transformer.turned.weight
    backend, _ = start(pipe)
    buffer = []
    unit = backend._units["transformer"]

    def look(module: nn.Module, args: Any) -> None:
        inside = unit.buffer.untyped_storage().data_ptr() <= module.weight.data_ptr()
        buffer.append((module.weight is not mine, inside, isinstance(module.weight, nn.Parameter)))

    pipe.transformer.turned.register_forward_pre_hook(look)
    pipe(toys.prompt())
    assert buffer == [(True, True, True)] * 3
    assert pipe.transformer.turned.weight is mine


class _Model(nn.Linear):
    @property
    def device(self) -> torch.device:
        """Answer as the libraries do: with the first parameter's."""
        return next(self.parameters()).device


def test_a_component_can_answer_with_the_device_that_computes() -> None:
    """huggingface/diffusers#4114 and others: noise was made on the host, since `.device` said so."""
    import copy
    import pickle

    model = _Model(2, 2)
    assert answer_device(model, torch.device("meta"))
    assert model.device == torch.device("meta")
    assert next(model.parameters()).device == torch.device("cpu")
    assert isinstance(model, _Model)
    assert type(model).__name__ == "_Model"
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is _Model
        assert twin.device == torch.device("cpu")
    answer_no_more(model)
    answer_no_more(model)
    assert type(model) is _Model
    assert not answer_device(model, torch.device("cpu"))
    assert not answer_device(nn.Linear(2, 2), torch.device("meta"))
