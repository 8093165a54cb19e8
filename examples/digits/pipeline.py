"""A text-to-image pipeline of stock diffusers and transformers parts, small enough for any machine."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any, cast

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    PixArtTransformer2DModel,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from data import PROMPT_TOKENS

StepCallback = Callable[[DiffusionPipeline, int, torch.Tensor, dict[str, torch.Tensor]], Any]
"""Called after each denoising step with the pipeline, the step's number, its timestep and the latents."""

PHASES = ("text_encoder", "transformer", "vae")
"""The components in the order in which a call uses them."""


class DigitsPipeline(DiffusionPipeline):  # type: ignore[misc]  # diffusers carries no types
    """Prompt -> T5 encoder -> PixArt transformer, flow matching -> VAE decoder -> a 32x32 picture."""

    model_cpu_offload_seq = "text_encoder->transformer->vae"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        text_encoder: T5EncoderModel,
        transformer: PixArtTransformer2DModel,
        vae: AutoencoderKL,
        scheduler: FlowMatchEulerDiscreteScheduler,
    ) -> None:
        super().__init__()
        self.register_modules(
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            transformer=transformer,
            vae=vae,
            scheduler=scheduler,
        )
        self.image_processor = VaeImageProcessor()

    @classmethod
    def from_folder(cls, folder: str | PathLike[str], dtype: torch.dtype = torch.float32) -> DigitsPipeline:
        """Load the pipeline from a diffusers folder; its weights are cast to `dtype`."""
        return cast(DigitsPipeline, cls.from_pretrained(folder, dtype=dtype, local_files_only=True))

    def encode_prompt(self, prompt: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode N prompts: embeddings (N, 12, 64) and mask (N, 12), 1 where a token stands."""
        tokens = self.tokenizer(
            prompt, padding="max_length", truncation=True, max_length=PROMPT_TOKENS, return_tensors="pt"
        )
        ids = tokens.input_ids.to(self._execution_device)
        mask = tokens.attention_mask.to(self._execution_device)
        return self.text_encoder(ids, attention_mask=mask)[0], mask

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        *,
        num_inference_steps: int = 25,
        guidance_scale: float = 2.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        on_phase: Callable[[str], None] | None = None,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Draw one picture per prompt.

        `guidance_scale` above 1 also runs the empty prompt and steers away from it. `output_type` is
        "pil", "np", "pt" (N, 3, 32, 32 in 0..1) or "raw": the decoder's own floats, near -1..1, not clipped.
        `on_phase` hears the name in `PHASES` of each component just before it is first used.
        """
        enter = on_phase or (lambda _name: None)
        batch = [prompt] if isinstance(prompt, str) else list(prompt)
        guided = guidance_scale > 1
        enter("text_encoder")
        text, mask = self.encode_prompt([""] * len(batch) + batch if guided else batch)

        config = self.transformer.config
        shape = (len(batch), config.in_channels, config.sample_size, config.sample_size)
        latents = randn_tensor(shape, generator=generator, device=self._execution_device, dtype=text.dtype)
        self.scheduler.set_timesteps(num_inference_steps, device=self._execution_device)

        enter("transformer")
        with self.progress_bar(total=num_inference_steps) as bar:
            for step, time in enumerate(self.scheduler.timesteps):
                noisy = torch.cat([latents, latents]) if guided else latents
                flow = self.transformer(
                    noisy,
                    encoder_hidden_states=text,
                    encoder_attention_mask=mask,
                    timestep=time.expand(len(noisy)),
                    return_dict=False,
                )[0]
                if guided:
                    plain, steered = flow.chunk(2)
                    flow = plain + guidance_scale * (steered - plain)
                latents = self.scheduler.step(flow, time, latents, return_dict=False)[0]
                if callback_on_step_end is not None:
                    callback_on_step_end(self, step, time, {"latents": latents})
                bar.update()

        enter("vae")
        vae = self.vae.config
        pictures = self.vae.decode(latents / vae.scaling_factor + vae.shift_factor, return_dict=False)[0]
        if output_type != "raw":
            pictures = self.image_processor.postprocess(pictures, output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=pictures) if return_dict else (pictures,)
