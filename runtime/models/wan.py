"""Wan 2.1 text-to-video: what is particular to this family.

Letters in shapes: B batch, C channels, T frames of video, H and W pixels, F frames of latents, h and w latents.
"""

from collections.abc import Callable, Sequence

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)

from wangen.generator.errors import WangenError
from wangen.generator.steps import Generate
from wangen.runtime.randomness import generator_for
from wangen.runtime.weights import (
    encode_prompts,
    load_text_encoder,
    load_tokenizer,
    load_transformer,
    load_vae,
)

__all__ = [
    "decode_latents",
    "encode_prompts",
    "encode_video",
    "load_text_encoder",
    "load_tokenizer",
    "load_transformer",
    "load_vae",
    "predict_velocity",
    "sample_latents",
]

SPATIAL_STRIDE = 8
TEMPORAL_STRIDE = 4
TEXT_LENGTH = 512


@torch.no_grad()
def encode_video(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """The normalised latents of a video, as the official wrapper computes them: (mode - mean) / std.

    Args:
        vae: a Wan 2.1 VAE.
        video: (B, 3, T, H, W) in [-1, 1]; T = 4k + 1, H and W multiples of 8. An image is T = 1.

    Returns:
        (B, 16, F, h, w) in float32 on the VAE's device, where F = (T + 3) / 4, h = H / 8, w = W / 8.

    Raises:
        WangenError: the shape is another; the VAE itself would drop trailing frames or pixels without a word.
    """
    if video.ndim != 5 or video.shape[1] != 3:
        raise WangenError(f"a video of shape {tuple(video.shape)}, where (batch, 3, frames, height, width) belongs")
    num_frames, height_px, width_px = video.shape[2:]
    if num_frames % TEMPORAL_STRIDE != 1:
        raise WangenError(f"a video of {num_frames} frames; the Wan VAE takes 4k + 1 (1, 5, 9, …, 81)")
    if not height_px or height_px % SPATIAL_STRIDE or not width_px or width_px % SPATIAL_STRIDE:
        raise WangenError(f"a video of {width_px}x{height_px} pixels; both sides must be multiples of {SPATIAL_STRIDE}")
    mode = vae.encode(video.to(vae.device, vae.dtype)).latent_dist.mode()
    mean, std = _statistics(vae)
    latents: torch.Tensor = (mode.float() - mean) / std
    return latents


@torch.no_grad()
def decode_latents(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """The video of normalised latents, the inverse of `encode_video`.

    Args:
        vae: a Wan 2.1 VAE.
        latents: (B, 16, F, h, w), normalised.

    Returns:
        (B, 3, 4F - 3, 8h, 8w) in float32, clamped to [-1, 1].

    Raises:
        WangenError: the shape is another.
    """
    if latents.ndim != 5 or latents.shape[1] != vae.config.z_dim or 0 in latents.shape:
        raise WangenError(f"latents of shape {tuple(latents.shape)}, where (batch, 16, frames, height, width) belongs")
    mean, std = _statistics(vae)
    scaled = latents.to(vae.device, torch.float32) * std + mean
    video: torch.Tensor = vae.decode(scaled.to(vae.dtype)).sample
    return video.float().clamp(-1.0, 1.0)


def predict_velocity(
    transformer: WanTransformer3DModel,
    latents: torch.Tensor,
    timesteps: torch.Tensor,
    texts: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The velocity noise - clean that the model predicts.

    Args:
        transformer: from `load_transformer`, with or without adapters.
        latents: (B, 16, F, h, w), noisy.
        timesteps: (B,) in [0, 1000].
        texts: B embeddings (L, text_dim), padded here with zeros to 512 rows as the official code does.

    Returns:
        (B, 16, F, h, w) in the transformer's dtype.
    """
    velocity: torch.Tensor = transformer(
        hidden_states=latents.to(transformer.dtype),
        timestep=timesteps.to(latents.device),
        encoder_hidden_states=pad_texts(texts).to(latents.device, transformer.dtype),
        return_dict=False,
    )[0]
    return velocity


def pad_texts(texts: Sequence[torch.Tensor]) -> torch.Tensor:
    """B embeddings (L, dim) of different lengths -> (B, 512, dim), zeros behind each text.

    >>> pad_texts([torch.ones(3, 2), torch.ones(1, 2)]).sum(dim=(1, 2)).tolist()
    [6.0, 2.0]
    """
    padded = texts[0].new_zeros(len(texts), TEXT_LENGTH, texts[0].shape[1])
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return padded


@torch.no_grad()
def sample_latents(
    transformer: WanTransformer3DModel,
    vae: AutoencoderKLWan,
    options: Generate,
    texts: Sequence[torch.Tensor],
    on_step: Callable[[int], None] = lambda _number: None,
) -> torch.Tensor:
    """Denoise seeded noise with diffusers' own `WanPipeline`.

    Args:
        transformer: with the LoRAs applied.
        vae: only its sizes are used.
        options: size, length, steps, guidance, shift, sampler and seed.
        texts: the prompt's embedding (L, text_dim), and the negative prompt's when guidance is above 1.
        on_step: called after each step with how many are done.

    Returns:
        (1, 16, F, h, w) in float32, normalised.
    """
    height_px, width_px = options.video_size
    frames = (options.video_length - 1) // TEMPORAL_STRIDE + 1
    shape = (1, vae.config.z_dim, frames, height_px // SPATIAL_STRIDE, width_px // SPATIAL_STRIDE)
    noise = torch.randn(shape, generator=generator_for("sample", options.seed))
    pipeline = WanPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=_scheduler(options), transformer=transformer
    )
    pipeline.set_progress_bar_config(disable=True)

    def after(
        _pipeline: WanPipeline, number: int, _timestep: float, values: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        on_step(number + 1)
        return values

    result = pipeline(
        prompt_embeds=pad_texts(texts[:1]).to(transformer.device, transformer.dtype),
        negative_prompt_embeds=pad_texts(texts[1:]).to(transformer.device, transformer.dtype) if texts[1:] else None,
        height=height_px,
        width=width_px,
        num_frames=options.video_length,
        num_inference_steps=options.infer_steps,
        guidance_scale=options.guidance_scale,
        latents=noise.to(transformer.device),
        output_type="latent",
        callback_on_step_end=after,
    )
    latents: torch.Tensor = result.frames.float()
    return latents


def _scheduler(options: Generate) -> FlowMatchEulerDiscreteScheduler | UniPCMultistepScheduler:
    """The sampler with Wan's flow settings, as in the published pipelines."""
    if options.sample_solver == "euler":
        return FlowMatchEulerDiscreteScheduler(shift=options.flow_shift)
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=options.flow_shift
    )


def _statistics(vae: AutoencoderKLWan) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the latents by channel, each (1, 16, 1, 1, 1)."""
    values = torch.tensor([vae.config.latents_mean, vae.config.latents_std], dtype=torch.float32, device=vae.device)
    mean, std = values.reshape(2, 1, -1, 1, 1, 1)
    return mean, std
