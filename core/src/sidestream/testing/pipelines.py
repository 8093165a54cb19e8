"""Tiny diffusers pipelines with random weights: the real classes, built in code, nothing downloaded.

    pipe = build("flux")
    image = run("flux", pipe)  # (1, 3, 32, 32), float32, 0..1

Each keeps what makes its model special to whoever moves weights about:

- `flux`: two lists of blocks of unequal size; CLIP and T5 encoders.
- `hunyuan_video`: two lists and a third nested in the text refiner; a Llama encoder with rotary buffers.
- `ltx`: tables that belong to no leaf module; a VAE whose `latents_mean` the pipeline reads by itself.
- `qwenimage`: complex tensors held as plain attributes; a vision tower never entered, a head without effect.
- `sd3`: blocks with and without dual attention, a persistent position buffer; three encoders.
- `sdxl`: a UNet, its transformer blocks nested in down, mid and up blocks; two encoders.
- `wan`: tables at the root and in each block, rotary buffers outside the state dict, UMT5.
- `wan22`: two such transformers, one after the other, with the same names inside.

Their T5 and UMT5 encoders tie two embeddings to one parameter. Text is read character by character, so a
prompt needs no vocabulary; about 60 characters of it are read. Needs diffusers and transformers 5.
"""

from __future__ import annotations

import importlib.util
import string
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

_LIBRARIES = {"diffusers": "diffusers", "transformers": "transformers>=5"}
"""The packages that `build` imports, and what to ask pip for."""

_PROMPT_TOKENS = 64
"""How many tokens of a prompt the T5, UMT5 and Llama encoders get, padding included. CLIP gets 77."""

_TEXT_PIECES = ("\N{LOWER ONE EIGHTH BLOCK}", *sorted(set(string.printable) - set(string.whitespace)))
"""What T5 and Llama tokenizers split text into here: the mark they write for a space, and visible ASCII."""


class _Recipe(NamedTuple):
    """How to build one pipeline with weights yet to be drawn, and what to call it with besides the prompt."""

    assemble: Callable[[], Any]
    arguments: Mapping[str, Any]


def build(name: str, *, seed: int = 0) -> DiffusionPipeline:
    """Build the pipeline `name` on the CPU in float32, in eval mode, its weights drawn from `seed`.

    The same seed gives the same weights whatever was drawn before, and no global generator moves.

    Raises:
        ValueError: no pipeline has that name.
        ImportError: diffusers or transformers is not installed.
    """
    recipe = _recipe(name)
    missing = [package for package in _LIBRARIES if importlib.util.find_spec(package) is None]
    if missing:
        wanted = " ".join(f"'{_LIBRARIES[package]}'" for package in missing)
        raise ImportError(f"the pipeline {name!r} needs {' and '.join(missing)}: pip install {wanted}")
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        pipe = recipe.assemble()
        for component, module in pipe.components.items():
            if isinstance(module, torch.nn.Module):
                _draw_weights(module, zlib.crc32(f"{seed}/{component}".encode()))
                module.eval()
    return pipe


def run(
    name: str, pipe: DiffusionPipeline, *, seed: int = 1, steps: int = 3, prompt: str = "a red seven"
) -> torch.Tensor:
    """Run all of `pipe`, a pipeline `name`, from prompt to picture, and return the picture on the CPU.

    Args:
        name: what `build` was called with: it sets the size and how the pipeline is called.
        pipe: the pipeline, wherever its weights are by now.
        seed: of the starting noise, drawn on the CPU.
        steps: of denoising; `wan22` needs two to enter both transformers.
        prompt: what to show.

    Returns:
        Float32, 0..1: (1, 3, height, width) for a picture, (1, frames, 3, height, width) for a film.

    Raises:
        ValueError: no pipeline has that name.
    """
    recipe = _recipe(name)
    import torch

    pipe.set_progress_bar_config(disable=True)
    (output,) = pipe(
        prompt=prompt,
        num_inference_steps=steps,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="pt",
        return_dict=False,
        **recipe.arguments,
    )
    picture: torch.Tensor = output.detach().to("cpu", torch.float32)
    return picture


def _recipe(name: str) -> _Recipe:
    try:
        return _RECIPES[name]
    except KeyError:
        raise ValueError(f"unknown pipeline {name!r}; known: {', '.join(PIPELINES)}") from None


def _draw_weights(module: torch.nn.Module, seed: int) -> None:
    """Draw each parameter anew, so that none is without effect: many models start with zeros in their gates.

    Matrices get a gain of about one; vectors stay close to where they start, which is one for a scale.
    """
    import torch

    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.squeeze().dim() <= 1:
                start = 1.0 if bool((parameter == 1).all()) else 0.0
                parameter.copy_(start + 0.1 * noise)
            else:
                inputs_per_output = parameter[0].numel()
                parameter.copy_(noise * inputs_per_output**-0.5)


# Encoders and their tokenizers


def _byte_alphabet() -> list[str]:
    """The 256 characters by which byte-level tokenizers write the 256 bytes, in a fixed order."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    alphabet = _byte_alphabet()
    pieces = [*alphabet, *(letter + "</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer({piece: index for index, piece in enumerate(pieces)}, [], model_max_length=77)


def _clip(width: int, pooled_width: int | None = None) -> Any:
    """A CLIP text encoder of 3 layers; with a projection of the pooled state if `pooled_width` is given."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = _clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=pooled_width or width,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=77,
        hidden_act="gelu",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config) if pooled_width is None else CLIPTextModelWithProjection(config)


def _t5_tokenizer() -> Any:
    from transformers import T5Tokenizer

    pieces = ["<pad>", "</s>", "<unk>", *_TEXT_PIECES]
    return T5Tokenizer([(piece, -1.0) for piece in pieces], extra_ids=0, model_max_length=_PROMPT_TOKENS)


def _t5(width: int, *, multilingual: bool = False) -> Any:
    """A T5 encoder of 3 layers, or a UMT5 encoder with its larger vocabulary; `shared` is the embedding."""
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    config_class, model_class = (UMT5Config, UMT5EncoderModel) if multilingual else (T5Config, T5EncoderModel)
    config = config_class(
        vocab_size=512 if multilingual else 128,
        d_model=width,
        d_kv=8,
        d_ff=2 * width,
        num_layers=3,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=32,
        feed_forward_proj="gated-gelu",
    )
    return model_class(config)


def _qwen_tokenizer() -> Any:
    from transformers import Qwen2Tokenizer

    pieces = [*_byte_alphabet(), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return Qwen2Tokenizer(
        {piece: index for index, piece in enumerate(pieces)},
        [],
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )


def _qwen_vl(width: int) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = _qwen_tokenizer()
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer) + 4,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
            "bos_token_id": tokenizer.eos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": width,
            "fullatt_block_indexes": [1],
        },
        vision_start_token_id=len(tokenizer),
        vision_end_token_id=len(tokenizer) + 1,
        image_token_id=len(tokenizer) + 2,
        video_token_id=len(tokenizer) + 3,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _llama_tokenizer() -> Any:
    from transformers import LlamaTokenizerFast

    spelled_bytes = (f"<0x{byte:02X}>" for byte in range(256))
    pieces = ["<unk>", "<s>", "</s>", "<pad>", *spelled_bytes, *_TEXT_PIECES]
    return LlamaTokenizerFast(
        {piece: index for index, piece in enumerate(pieces)}, [], pad_token="<pad>", padding_side="right"
    )


def _llama(width: int) -> Any:
    """A Llama of 5 layers. HunyuanVideo reads the state before the last two, so three of them count."""
    from transformers import LlamaConfig, LlamaModel

    tokenizer = _llama_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaModel(config)


# Pipelines


def _image_vae(latent_channels: int, **config: Any) -> Any:
    """An AutoencoderKL of three stages: a latent is a quarter as high and wide as its picture."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=latent_channels,
        sample_size=32,
        **config,
    )


def _flux() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=_image_vae(4, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=_clip(32),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_t5(32),
        tokenizer_2=_t5_tokenizer(),
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=3,
            num_single_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def _hunyuan_video() -> Any:
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )

    return HunyuanVideoPipeline(
        text_encoder=_llama(32),
        tokenizer=_llama_tokenizer(),
        transformer=HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=3,
            num_single_layers=4,
            num_refiner_layers=2,
            patch_size=2,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=32,
            pooled_projection_dim=16,
            rope_axes_dim=(4, 6, 6),
        ),
        vae=AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=_clip(16),
        tokenizer_2=_clip_tokenizer(),
    )


def _ltx() -> Any:
    import torch
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )
    vae.latents_mean.copy_(torch.linspace(-0.5, 0.5, 8))  # its defaults, 0 and 1, would have no effect
    vae.latents_std.copy_(torch.linspace(0.8, 1.2, 8))
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1),
        vae=vae,
        text_encoder=_t5(32),
        tokenizer=_t5_tokenizer(),
        transformer=LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            num_layers=3,
            caption_channels=32,
        ),
    )


def _qwenimage() -> Any:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02),
        vae=AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 1, 2, 2], num_res_blocks=1),
        text_encoder=_qwen_vl(32),
        tokenizer=_qwen_tokenizer(),
        transformer=QwenImageTransformer2DModel(
            in_channels=64,
            out_channels=16,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def _sd3() -> Any:
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=48,
            caption_projection_dim=32,
            pooled_projection_dim=40,
            out_channels=4,
            pos_embed_max_size=12,
            dual_attention_layers=(0, 1),
            qk_norm="rms_norm",
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_image_vae(4, scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=_clip(16, pooled_width=16),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_clip(24, pooled_width=24),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=_t5(48),
        tokenizer_3=_t5_tokenizer(),
    )


def _sdxl() -> Any:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    return StableDiffusionXLPipeline(
        vae=_image_vae(4, scaling_factor=0.13025),
        text_encoder=_clip(16),
        text_encoder_2=_clip(24, pooled_width=24),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        unet=UNet2DConditionModel(
            sample_size=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(16, 32, 48),
            layers_per_block=1,
            transformer_layers_per_block=(1, 2, 3),
            attention_head_dim=(2, 4, 6),
            cross_attention_dim=40,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 24,
            norm_num_groups=8,
        ),
        scheduler=EulerDiscreteScheduler(
            beta_schedule="scaled_linear",
            beta_start=0.00085,
            beta_end=0.012,
            steps_offset=1,
            timestep_spacing="leading",
        ),
        add_watermarker=False,
    )


def _wan_transformer() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=32,
        freq_dim=32,
        ffn_dim=48,
        num_layers=3,
        rope_max_seq_len=32,
    )


def _wan(**more: Any) -> Any:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

    return WanPipeline(
        tokenizer=_t5_tokenizer(),
        text_encoder=_t5(32, multilingual=True),
        vae=AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 2, 2], num_res_blocks=1),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=_wan_transformer(),
        **more,
    )


def _wan22() -> Any:
    return _wan(transformer_2=_wan_transformer(), boundary_ratio=0.875)


_RECIPES: Mapping[str, _Recipe] = MappingProxyType(
    {
        "flux": _Recipe(_flux, {"height": 32, "width": 32, "max_sequence_length": _PROMPT_TOKENS}),
        "hunyuan_video": _Recipe(
            _hunyuan_video,
            {
                "height": 32,
                "width": 32,
                "num_frames": 9,
                "max_sequence_length": _PROMPT_TOKENS,
                # the stock template has more characters than are read, before the prompt begins
                "prompt_template": {"template": "Describe: {}", "crop_start": len("_Describe:_")},
            },
        ),
        "ltx": _Recipe(_ltx, {"height": 64, "width": 64, "num_frames": 9, "max_sequence_length": _PROMPT_TOKENS}),
        "qwenimage": _Recipe(_qwenimage, {"height": 32, "width": 32, "negative_prompt": "blurred"}),
        "sd3": _Recipe(_sd3, {"height": 32, "width": 32, "max_sequence_length": _PROMPT_TOKENS}),
        "sdxl": _Recipe(_sdxl, {"height": 32, "width": 32, "negative_prompt": "blurred"}),
        "wan": _Recipe(_wan, {"height": 32, "width": 32, "num_frames": 9, "max_sequence_length": _PROMPT_TOKENS}),
        "wan22": _Recipe(_wan22, {"height": 32, "width": 32, "num_frames": 9, "max_sequence_length": _PROMPT_TOKENS}),
    }
)

PIPELINES: tuple[str, ...] = tuple(sorted(_RECIPES))
"""The names that `build` and `run` know."""
