"""Small models that hold everything a streaming strategy may stumble over. CPU, seeded, milliseconds to run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH = 16


class Block(nn.Module):
    """One residual block: direct parameters beside linears, a 0-dim scale, buffers of many kinds, two dtypes."""

    def __init__(self, width: int = WIDTH, hidden: int = 24) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.randn(2, width) / width**0.5)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.low = nn.Linear(width, width).to(torch.bfloat16)
        self.calls: torch.Tensor
        self.mask: torch.Tensor
        self.phase: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.rand(width) > 0.2)
        self.register_buffer("phase", torch.randn(width, dtype=torch.complex64), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, width)` to the same."""
        self.calls.add_(1)
        shift, scale = self.scale_shift_table
        hidden = self.norm(x) * (1 + scale) + shift
        hidden = self.down(torch.tanh(self.up(hidden))) * self.gain
        hidden = torch.where(self.mask, hidden, hidden * 0.5) + self.phase.real * self.phase.imag
        out: torch.Tensor = x + hidden + self.low(x.to(torch.bfloat16)).to(x.dtype)
        return out


class Denoiser(nn.Module):
    """A DiT: embedding, blocks (one transposed weight, one channels-last), a head tied to the embedding."""

    def __init__(self, *, blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.scale_table = nn.Parameter(torch.randn(width))
        self.embed = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(Block(width, 24 + 8 * index) for index in range(blocks))
        self.mix = nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Linear(width, width)
        self.turned.weight = nn.Parameter(torch.randn(width, width).t())
        self.head = nn.Linear(width, width)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, context: torch.Tensor, step: int = 0) -> torch.Tensor:
        """Map `(batch, width)` latents and `(batch, width)` context to a prediction of the latents' shape."""
        hidden = self.embed(x) * self.scale_table + context + step
        for block in self.blocks:
            hidden = block(hidden)
        side = self.mix(hidden[:, None, None, :]).sum((1, 2))
        out: torch.Tensor = self.head(self.turned(hidden) + side)
        return out


class TextEncoder(nn.Module):
    """An encoder with a tied embedding (two modules, one Parameter), entered by `forward` or `generate`."""

    def __init__(self, *, width: int = WIDTH, words: int = 32) -> None:
        super().__init__()
        self.shared = nn.Embedding(words, width)
        self.embed_tokens = nn.Embedding(words, width)
        self.embed_tokens.weight = self.shared.weight
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.logits = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map `(batch, length)` word numbers to `(batch, width)`."""
        hidden = self.embed_tokens(ids).mean(1)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden  # type: ignore[no-any-return]

    def generate(self, ids: torch.Tensor, count: int = 2) -> torch.Tensor:
        """Return `ids` with `count` more words, the likeliest each."""
        for _ in range(count):
            ids = torch.cat((ids, self.logits(self(ids)).argmax(-1, keepdim=True)), 1)
        return ids


class Vae(nn.Module):
    """Entered by `encode` and `decode`, never by `forward`; `decode` reads a parameter of the root itself."""

    def __init__(self, *, width: int = WIDTH) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, width)
        self.decoder = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.post_quant = nn.BatchNorm1d(width).train()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, width)` to latents of the same shape."""
        out: torch.Tensor = self.encoder(x)
        return out

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Map latents to `(batch, width)`."""
        out: torch.Tensor = self.decoder(self.post_quant(z) * self.scale)
        return out


class Pipeline(nn.Module):
    """A module pipeline: encodes a prompt, denoises in a few steps with one or two DiTs, decodes."""

    def __init__(self, *, second: bool = False, steps: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.text_encoder = TextEncoder(width=width)
        self.transformer = Denoiser(width=width)
        self.transformer_2 = Denoiser(blocks=2, width=width) if second else None
        self.vae = Vae(width=width)
        self.steps = steps
        self.width = width

    def forward(self, prompt: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        """Map `(batch, length)` word numbers to pictures `(batch, width)`."""
        return self.draw(prompt.to(next(self.transformer.parameters()).device), seed=seed)

    def draw(self, prompt: torch.Tensor, *, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Map word numbers to pictures of `dtype` (None: the default), on the device of the words."""
        generator = torch.Generator().manual_seed(seed)
        context = self.text_encoder(prompt)
        latents = torch.randn(len(prompt), self.width, generator=generator, dtype=dtype).to(prompt.device)
        for step in range(self.steps):
            late = self.transformer_2 is not None and step >= self.steps // 2
            model = self.transformer_2 if late and self.transformer_2 is not None else self.transformer
            latents = latents - model(latents, context, step) / (self.steps + step)
        out: torch.Tensor = self.vae.decode(latents)
        return out


def pipeline(*, seed: int = 0, **options: Any) -> Pipeline:
    """Return a :class:`Pipeline` with seeded weights, in eval mode but for its batch norm; disturbs no global state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Pipeline(**options)
    return model.requires_grad_(False)


def prompt(*, batch: int = 2, length: int = 5) -> torch.Tensor:
    """Return word numbers `(batch, length)` for a :class:`Pipeline`."""
    return torch.arange(batch * length).reshape(batch, length) % 32
