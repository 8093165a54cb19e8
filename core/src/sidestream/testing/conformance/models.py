"""Small pipelines for the kit, and what may be done to one between two calls.

All that they create in a forward is on the device of their inputs; none asks a parameter where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from sidestream.testing import toys

WIDTH = toys.WIDTH


class Pipeline(toys.Pipeline):
    """Text encoder, one or two DiTs, VAE: ties, odd strides, two dtypes, buffers of many kinds, uneven blocks."""

    dtype = torch.float32

    def forward(self, prompt: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        """Map `(batch, length)` word numbers to pictures `(batch, width)`, on the device of the words."""
        return self.draw(prompt, seed=seed, dtype=self.dtype)


class Wanderer(toys.Denoiser):
    """A DiT that is told the order of its blocks: some skipped, some repeated."""

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, step: int = 0, order: Sequence[int] = (0, 1, 2)
    ) -> torch.Tensor:
        """Map `(batch, width)` to the same through the blocks of `order`."""
        hidden = self.embed(x) * self.scale_table + context + step
        for index in order:
            hidden = self.blocks[index](hidden)
        out: torch.Tensor = self.head(self.turned(hidden))
        return out


class Answering(toys.Denoiser):
    """A DiT that answers for its device as the libraries' do: with the first parameter's."""

    @property
    def device(self) -> torch.device:
        """Where the first parameter is."""
        return next(self.parameters()).device


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass `x` through all blocks."""
        for block in self.blocks:
            x = block(x)
        return x


class Lone(nn.Module):
    """A pipeline of one DiT."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the DiT."""
        return self.transformer(*args, **kwargs)


class Recurrent(nn.Module):
    """A block around a recurrent module, which computes from a list of its weights of its own."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(length, batch, width)` to the same."""
        out: torch.Tensor = self.cell(x)[0]
        return out


class Cabinet(nn.Module):
    """A block that holds a buffer of every dtype, with odd sizes, a 0-dim one and an empty one."""

    DTYPES = (
        torch.uint8, torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool, torch.int16,
        torch.int64, torch.float64, torch.float16,
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        for index, dtype in enumerate(self.DTYPES):
            self.register_buffer(f"b{index}", (torch.rand(2 * index + 1) * 9).to(dtype))
        self.register_buffer("scalar", torch.tensor(3.5))
        self.register_buffer("empty", torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to `x` what the bytes of all buffers sum up to."""
        x = x * self.weight
        for buffer in self.buffers():
            if buffer.numel():
                x = x + buffer.reshape(-1).view(torch.uint8).to(torch.float32).sum() / 1024
        return x


def _seeded(make: Callable[[], nn.Module], seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().requires_grad_(False)


def pipeline(*, seed: int = 0, second: bool = True, steps: int = 2) -> Pipeline:
    """Return a :class:`Pipeline`, two DiTs unless told otherwise; equal seeds give equal weights."""
    made: Pipeline = _seeded(lambda: Pipeline(second=second, steps=steps), seed)
    return made


def small(*, seed: int = 0) -> Pipeline:
    """Return a :class:`Pipeline` with one DiT that is called once."""
    return pipeline(seed=seed, second=False, steps=1)


def lone(*blocks: Callable[[], nn.Module], seed: int = 0) -> Lone:
    """Return a pipeline of one DiT with these blocks."""
    made: Lone = _seeded(lambda: Lone(Stack([block() for block in blocks])), seed)
    return made


def of(kind: type[nn.Module], *, seed: int = 0) -> Lone:
    """Return a pipeline of one DiT of this class."""
    made: Lone = _seeded(lambda: Lone(kind()), seed)
    return made


def heavy() -> Lone:
    """Return a pipeline of 108 MiB in three tensors, each too large for the host allocator's heap."""
    blocks = []
    for _ in range(3):
        block = nn.Linear(3072, 3072, bias=False, device="meta", dtype=torch.float32)
        block.weight = nn.Parameter(torch.full((3072, 3072), 1e-4), requires_grad=False)
        blocks.append(block)
    return Lone(Stack(blocks))


def words() -> torch.Tensor:
    """Return word numbers for a :class:`Pipeline`, on the host."""
    return toys.prompt()


# --- What a user does between two calls -------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear with a low-rank addition, as adapters are."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        device = base.weight.device
        self.a = nn.Parameter(torch.full((2, base.in_features), 0.1).to(device), requires_grad=False)
        self.b = nn.Parameter(torch.full((base.out_features, 2), 0.2).to(device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(..., in)` to `(..., out)`."""
        out: torch.Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return out


def _add_in_place(pipe: Pipeline, other: Pipeline) -> None:
    pipe.transformer.turned.weight.add_(0.25)


def _add_through_data(pipe: Pipeline, other: Pipeline) -> None:
    block: Any = pipe.transformer.blocks[1]
    block.up.weight.data += 0.25


def _give_other_data(pipe: Pipeline, other: Pipeline) -> None:
    block: Any = pipe.transformer.blocks[0]
    weight = block.down.weight
    weight.data = torch.full_like(weight, 0.01)


def _write_with_numpy(pipe: Pipeline, other: Pipeline) -> None:
    block: Any = pipe.transformer.blocks[0]
    weight = block.down.weight
    if weight.device.type == "cpu":
        weight.numpy()[:] = 0.5
    else:
        weight.fill_(0.5)


def _load(pipe: Pipeline, other: Pipeline) -> None:
    pipe.load_state_dict(other.state_dict())


def _load_by_assignment(pipe: Pipeline, other: Pipeline) -> None:
    pipe.transformer.load_state_dict(other.transformer.state_dict(), assign=True)


def _cast(pipe: Pipeline, other: Pipeline) -> None:
    pipe.double()
    pipe.dtype = torch.float64
    for module in pipe.modules():
        if isinstance(module, toys.Block):
            module.low.bfloat16()


def _replace_module(pipe: Pipeline, other: Pipeline) -> None:
    pipe.transformer.blocks[2] = other.transformer.blocks[2]


def _replace_parameter(pipe: Pipeline, other: Pipeline) -> None:
    pipe.transformer.turned.weight = nn.Parameter(other.transformer.turned.weight.detach(), requires_grad=False)


def _add_adapter(pipe: Pipeline, other: Pipeline) -> None:
    block: Any = pipe.transformer.blocks[0]
    block.up = Adapted(block.up)


def _add_and_remove_adapter(pipe: Pipeline, other: Pipeline) -> None:
    block: Any = pipe.transformer.blocks[0]
    base = block.up
    block.up = Adapted(base)
    base.weight.data += block.up.b @ block.up.a  # merged
    block.up = base


def _add_parameter(pipe: Pipeline, other: Pipeline) -> None:
    turned = pipe.transformer.turned
    late = torch.ones(WIDTH).to(turned.weight.device)
    turned.register_parameter("late", nn.Parameter(late, requires_grad=False))
    turned.register_forward_hook(_add_late)


def _add_buffer(pipe: Pipeline, other: Pipeline) -> None:
    turned = pipe.transformer.turned
    turned.register_buffer("late", torch.ones(WIDTH).to(turned.weight.device), persistent=False)
    turned.register_forward_hook(_add_late)


def _add_late(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    late: Any = module.late
    added: torch.Tensor = out + late
    return added


def _drop_bias(pipe: Pipeline, other: Pipeline) -> None:
    turned: Any = pipe.transformer.turned
    turned.bias = None


def _change_buffer(pipe: Pipeline, other: Pipeline) -> None:
    mask: Any = pipe.transformer.blocks[1].mask
    mask.logical_not_()


def _make_buffer_in_forward(pipe: Pipeline, other: Pipeline) -> None:
    pipe.transformer.turned.register_forward_hook(_remember)


def _remember(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    if not hasattr(module, "late"):
        module.register_buffer("late", out.detach() * 0.5)
    return _add_late(module, args, out)


def _change_layout(pipe: Pipeline, other: Pipeline) -> None:
    pipe.transformer.mix.to(memory_format=torch.contiguous_format)
    pipe.transformer.turned.weight.data = pipe.transformer.turned.weight.data.t()


def _edit_in_inference_mode(pipe: Pipeline, other: Pipeline) -> None:
    with torch.inference_mode():
        pipe.transformer.turned.bias.mul_(1.5)


#: Those that give a parameter other data under its own name.
ASSIGN_DATA = frozenset({"cast", "change_layout", "give_other_data"})

#: By name: called with a pipeline and another one, of other weights and on the same device.
EDITS: dict[str, Callable[[Pipeline, Pipeline], None]] = {
    edit.__name__.strip("_"): edit
    for edit in (
        _add_in_place,
        _add_through_data,
        _give_other_data,
        _write_with_numpy,
        _load,
        _load_by_assignment,
        _cast,
        _replace_module,
        _replace_parameter,
        _add_adapter,
        _add_and_remove_adapter,
        _add_parameter,
        _add_buffer,
        _drop_bias,
        _change_buffer,
        _make_buffer_in_forward,
        _change_layout,
        _edit_in_inference_mode,
    )
}
