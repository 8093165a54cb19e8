"""Train the digits pipeline from nothing on two CPU cores, or score the weights that are there.

`python train.py` trains the VAE, then text encoder and transformer, and writes `weights/`;
`python train.py --evaluate` draws 100 digits and lets a classifier read them.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, PixArtTransformer2DModel
from sklearn.svm import SVC
from torch import nn
from torch.nn import functional
from transformers import T5Config, T5EncoderModel

from data import INKS, Digits, build_tokenizer, colour, ink_table, load, prompts, vocabulary
from pipeline import DigitsPipeline

WEIGHTS = Path(__file__).parent / "weights"
BATCH = 64
LOG_EVERY = 100


def new_vae() -> AutoencoderKL:
    """Return an untrained VAE: picture (N, 3, 32, 32) <-> latents (N, 4, 8, 8)."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
        force_upcast=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def new_text_encoder() -> T5EncoderModel:
    """Return an untrained T5 encoder: tokens (N, 12) -> embeddings (N, 12, 64)."""
    return T5EncoderModel(
        T5Config(
            vocab_size=len(vocabulary()),
            d_model=64,
            d_kv=32,
            d_ff=768,
            num_layers=6,
            num_heads=8,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=2,
        )
    )


def new_transformer() -> PixArtTransformer2DModel:
    """Return a transformer of twelve equal blocks which, untrained, answers zero everywhere."""
    model = PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        num_layers=12,
        cross_attention_dim=96,
        attention_bias=True,
        sample_size=8,
        patch_size=2,
        caption_channels=64,
        use_additional_conditions=False,
    )
    silent = [model.adaln_single.linear, model.proj_out]
    silent += [block.attn2.to_out[0] for block in model.transformer_blocks]
    for layer in silent:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    for name, parameter in model.named_parameters():
        if name.endswith("scale_shift_table"):
            nn.init.zeros_(parameter)
    return model


def batches(count: int, steps: int) -> Iterator[torch.Tensor]:
    """Yield `steps` batches of picture numbers (BATCH,), each pass over the data in a new order."""
    order = torch.randperm(count)
    at = 0
    for _ in range(steps):
        if at + BATCH > count:
            order, at = torch.randperm(count), 0
        yield order[at : at + BATCH]
        at += BATCH


def train_vae(digits: Digits, steps: int) -> AutoencoderKL:
    """Train the VAE and set its scale and shift so that latents have mean 0 and deviation 1."""
    vae = new_vae().train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    named = ink_table()
    began, recent = time.perf_counter(), 0.0
    for step, chosen in enumerate(batches(len(digits.labels), steps), 1):
        # Arbitrary inks now and then keep the latent space smooth between the named ones.
        inks = named[torch.randint(len(named), (BATCH,))]
        inks = torch.where(torch.rand(BATCH, 1) < 0.3, torch.rand(BATCH, 3), inks)
        pictures = colour(digits.strokes[chosen], inks)
        posterior = vae.encode(pictures).latent_dist
        restored = vae.decode(posterior.sample()).sample
        divergence = posterior.kl().mean() / posterior.mean[0].numel()
        loss = (
            functional.mse_loss(restored, pictures) + 0.1 * functional.l1_loss(restored, pictures) + 1e-3 * divergence
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent = loss.item() if step == 1 else 0.98 * recent + 0.02 * loss.item()
        if step % LOG_EVERY == 0 or step == steps:
            report("vae", step, steps, recent, began)
    vae.eval()
    latents = encode(vae, digits)
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())
    return vae


def load_vae(folder: Path) -> AutoencoderKL:
    """Return the VAE in `folder`; unlike the one that diffusers loads, it forgets where that was."""
    stored = AutoencoderKL.from_pretrained(folder, local_files_only=True)
    vae = new_vae().eval()
    vae.load_state_dict(stored.state_dict())
    vae.register_to_config(scaling_factor=stored.config.scaling_factor, shift_factor=stored.config.shift_factor)
    return vae


@torch.no_grad()
def encode(vae: AutoencoderKL, digits: Digits) -> torch.Tensor:
    """Return the latents' means, as the VAE gives them: (inks, N, 4, 8, 8)."""
    per_ink = []
    for ink in ink_table():
        pictures = colour(digits.strokes, ink.expand(len(digits.strokes), 3))
        per_ink.append(torch.cat([vae.encode(part).latent_dist.mean for part in torch.split(pictures, 256)]))
    return torch.stack(per_ink)


def train_denoiser(digits: Digits, vae: AutoencoderKL, steps: int) -> tuple[T5EncoderModel, PixArtTransformer2DModel]:
    """Train text encoder and transformer together on rectified flow; return their moving averages."""
    models = nn.ModuleList([new_text_encoder(), new_transformer()]).train()
    averages = copy.deepcopy(models).eval().requires_grad_(False)
    encoder, transformer = models
    optimizer = torch.optim.AdamW(models.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))

    latents = (encode(vae, digits) - vae.config.shift_factor) * vae.config.scaling_factor
    tokenizer = build_tokenizer()
    texts = [text for ink in INKS for digit in range(10) for text in prompts(digit, ink)]
    tokens = tokenizer(["", *texts], padding="longest", return_tensors="pt")
    wordings = len(prompts(0, "red"))

    began, recent = time.perf_counter(), 0.0
    for step, chosen in enumerate(batches(len(digits.labels), steps), 1):
        inks = torch.randint(len(INKS), (BATCH,))
        # Spelled-out wordings come first in `prompts`; the square prefers them to the numerals.
        wording = (torch.rand(BATCH).square() * wordings).long()
        row = 1 + (inks * 10 + digits.labels[chosen]) * wordings + wording
        row = torch.where(torch.rand(BATCH) < 0.1, 0, row)  # no prompt, for guidance
        ids, mask = tokens.input_ids[row], tokens.attention_mask[row]

        clean = latents[inks, chosen]
        noise = torch.randn_like(clean)
        share = torch.sigmoid(torch.randn(BATCH))
        noisy = torch.lerp(clean, noise, share[:, None, None, None])
        flow = transformer(
            noisy,
            encoder_hidden_states=encoder(ids, attention_mask=mask)[0],
            encoder_attention_mask=mask,
            timestep=share * 1000,
            return_dict=False,
        )[0]
        loss = functional.mse_loss(flow, noise - clean)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(models.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        keep = min(0.999, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(averages.parameters()), list(models.parameters()), 1 - keep)
        recent = loss.item() if step == 1 else 0.98 * recent + 0.02 * loss.item()
        if step % LOG_EVERY == 0 or step == steps:
            report("denoiser", step, steps, recent, began)
    text_encoder, denoiser = averages
    return text_encoder, denoiser


def report(what: str, step: int, steps: int, loss: float, began: float) -> None:
    """Print the running loss and the seconds since `began`."""
    print(f"{what} {step}/{steps} loss {loss:.4f} {time.perf_counter() - began:.0f} s", flush=True)


def learning_rate(step: int, steps: int, warm_up: int = 100) -> float:
    """Return the factor on the learning rate: a linear rise, then a cosine down to 0.02."""
    if step < warm_up:
        return (step + 1) / warm_up
    done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return 0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2


def train(folder: Path, vae_steps: int, steps: int, seed: int, keep_vae: bool) -> None:
    """Train what is asked for and write the pipeline to `folder` as bfloat16 safetensors."""
    began = time.perf_counter()
    digits = load()
    torch.manual_seed(seed)
    if keep_vae:
        vae = load_vae(folder / "vae")
    else:
        torch.set_num_threads(2)
        vae = train_vae(digits, vae_steps)
        vae.to(torch.bfloat16).save_pretrained(folder / "vae")
        vae.to(torch.float32)  # the rounded weights are what the denoiser will be used with
    torch.set_num_threads(1)  # the transformer's matrices are too small to share
    torch.manual_seed(seed + 1)
    text_encoder, transformer = train_denoiser(digits, vae, steps)
    pipe = DigitsPipeline(
        tokenizer=build_tokenizer(),
        text_encoder=text_encoder,
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
    )
    pipe.to(dtype=torch.bfloat16)
    pipe.save_pretrained(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"wrote {folder}: {size} bytes, {time.perf_counter() - began:.0f} s in all")


def evaluate(folder: Path, seed: int, steps: int, guidance: float, dtype: torch.dtype) -> tuple[int, int]:
    """Draw 100 digits, ten of each; return how many a classifier reads right and how many inks are right.

    The classifier is a support vector machine fitted on the real digits, at 16x16 pixels in grey.
    """

    def features(grey: torch.Tensor) -> torch.Tensor:
        """(N, 1, 32, 32) in 0..1 -> (N, 256)."""
        return functional.avg_pool2d(grey, 2).flatten(1)

    digits = load()
    reader = SVC(C=10).fit(features(digits.strokes).numpy(), digits.labels.numpy())
    pipe = DigitsPipeline.from_folder(folder, dtype)
    names = list(INKS)
    wanted = [(value, (value + turn) % len(names)) for value in range(10) for turn in range(10)]
    pictures = pipe(
        [prompts(value, names[ink])[0] for value, ink in wanted],
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
        return_dict=False,
    )[0].float()
    read = reader.predict(features(pictures.amax(1, keepdim=True)).numpy())
    # The strongest tenth of each picture's pixels shows its ink without the edges.
    strength = pictures.sum(1).flatten(1)
    at = strength.topk(strength.shape[1] // 10).indices
    seen = pictures.flatten(2).gather(2, at[:, None].expand(-1, 3, -1)).mean(2)
    inks = torch.cdist(seen, ink_table()).argmin(1)
    right = sum(int(value == got) for (value, _), got in zip(wanted, read, strict=True))
    painted = sum(int(ink == got) for (_, ink), got in zip(wanted, inks.tolist(), strict=True))
    return right, painted


def main() -> None:
    """Read the command line and train or evaluate."""
    parser = argparse.ArgumentParser(description="Train or score the digits pipeline.")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="folder to write or to score")
    parser.add_argument("--vae-steps", type=int, default=1300)
    parser.add_argument("--steps", type=int, default=1800, help="steps of text encoder and transformer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-vae", action="store_true", help="do not train the VAE in --weights again")
    parser.add_argument("--evaluate", action="store_true", help="score the weights and train nothing")
    parser.add_argument("--sampling-steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--bfloat16", action="store_true", help="evaluate in bfloat16, not float32")
    options = parser.parse_args()
    if options.evaluate:
        dtype = torch.bfloat16 if options.bfloat16 else torch.float32
        right, painted = evaluate(options.weights, options.seed, options.sampling_steps, options.guidance, dtype)
        print(f"{right} of 100 digits read right, {painted} of 100 inks right")
        return
    train(options.weights, options.vae_steps, options.steps, options.seed, options.keep_vae)


if __name__ == "__main__":
    main()
