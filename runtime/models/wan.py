"""Wan 2.1 and 2.2: what is particular to this family.

Letters in shapes: B batch, C channels, T frames of video, H and W pixels, F frames of latents, h and w latents.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wangen.runtime.devices import set_attention
from wangen.runtime.models.inputs import WAN_TEXT_ROWS, require_width, with_condition
from wangen.runtime.models.plain import PlainModel

if TYPE_CHECKING:
    from wangen.profiles import Model
    from wangen.runtime.libraries import WanTransformer3DModel
    from wangen.runtime.memory.blocks import BlockWeights
    from wangen.runtime.models import LatentEncoder, PromptEncoder, VelocityModel
    from wangen.runtime.models.compute import Compute
    from wangen.runtime.models.inputs import Controls

_HOMES = {
    "decode_latents": "models.wan_vae",
    "encode_images": "weights.image_encoder",
    "guided": "denoising",
    "load_image_encoder": "weights.image_encoder",
    "load_transformer": "weights.transformer",
    "load_vae": "weights.vae",
    "original_tensor_name": "weights.transformer",
    "saved_tensors": "weights.transformer",
    "transformer_names": "weights.transformer",
}
"""What the contract asks for and other modules have. They import diffusers or transformers, which takes seconds: a
caching step that needs neither must not wait for them, so each is imported when it is asked for."""

PATCH = 2  # latent cells per token, in each direction


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(import_module(f"wangen.runtime.{_HOMES[name]}"), name)


def load_latent_encoder(path: Path, *, dtype: torch.dtype, device: Any, plain: bool) -> "LatentEncoder":
    """What `cache_latents` encodes with: the fast paths of `wangen.runtime.fast`, or diffusers' module.

    Raises:
        WangenError: the file is no Wan VAE.
    """
    if plain:
        from wangen.runtime.models.wan_vae import load_plain_vae_encoder

        return load_plain_vae_encoder(path, dtype=dtype, device=device)
    from wangen.runtime.fast.vae import load_vae_encoder

    return load_vae_encoder(path, dtype=dtype, device=device)


def load_prompt_encoder(
    path: Path, tokenizer: Path | None, *, dtype: torch.dtype, device: Any, fp8: bool, plain: bool, model: "Model"
) -> "PromptEncoder":
    """What `cache_text` encodes with: umT5 streamed block by block, or transformers' module as a whole.

    All models of the family encode alike, so `model` is not looked at.

    Raises:
        WangenError: the file is no umT5 encoder, or there is no tokenizer.
    """
    if plain:
        from wangen.runtime.weights.text_encoder import load_plain_prompt_encoder

        return load_plain_prompt_encoder(path, tokenizer, dtype=dtype, device=device, fp8=fp8)
    from wangen.runtime.fast.umt5 import load_prompt_encoder as load_streamed

    return load_streamed(path, tokenizer, dtype=dtype, device=device, fp8=fp8)


def predict_velocity(
    transformer: "WanTransformer3DModel",
    latents: torch.Tensor,
    timesteps: torch.Tensor,
    texts: Sequence[torch.Tensor],
    *,
    condition: torch.Tensor | None = None,
    image_tokens: torch.Tensor | None = None,
    controls: "Controls | None" = None,
) -> torch.Tensor:
    """The velocity noise - clean that the model predicts.

    Args:
        transformer: from `load_transformer`, with or without adapters.
        latents: (B, C, F, h, w), noisy; C is 16, or 48 for the 5B.
        timesteps: (B,) in [0, 1000], or (B, tokens) where frames differ: the 5B needs 0 for the tokens of a clean
            first frame (`timesteps_per_token`).
        texts: B embeddings (L, text_dim), padded here with zeros to 512 rows as the official code does.
        condition: of image-to-video, (B, 20, F, h, w): 4 channels of mask and 16 of the encoded image.
        image_tokens: of Wan 2.1 image-to-video, (B, 257, 1280) from `encode_images`. For first and last frame
            (2B, 257, 1280): both images of one item, then both of the next.
        controls: Wan takes none.

    Returns:
        (B, C, F, h, w) in the transformer's dtype.
    """
    assert controls is None, "not in this family"
    if image_tokens is not None:
        image_tokens = image_tokens.to(latents.device, transformer.dtype)
    require_width(texts, transformer.config.text_dim, "umT5-xxl")
    velocity: torch.Tensor = transformer(
        hidden_states=with_condition(latents, condition).to(transformer.dtype),
        timestep=timesteps.to(latents.device),
        encoder_hidden_states=pad_texts(texts).to(latents.device, transformer.dtype),
        encoder_hidden_states_image=image_tokens,
        return_dict=False,
    )[0]
    return velocity


def timesteps_per_token(timesteps: torch.Tensor, latents: torch.Tensor, clean_frames: Sequence[int]) -> torch.Tensor:
    """Timesteps (B,) -> (B, tokens), with 0 for the tokens of each item's first `clean_frames` latent frames.

    >>> timesteps_per_token(torch.tensor([500.0]), torch.zeros(1, 48, 2, 4, 2), [1])
    tensor([[  0.,   0., 500., 500.]])
    """
    frames, height, width = latents.shape[2:]
    tokens = (height // PATCH) * (width // PATCH)
    values = timesteps[:, None].repeat(1, frames * tokens)
    for row, number in zip(values, clean_frames, strict=True):
        row[: number * tokens] = 0
    return values


def velocity_model(
    transformer: "WanTransformer3DModel",
    compute: "Compute",
    *,
    device: torch.device,
    dtype: torch.dtype,
    swap: "BlockWeights | None" = None,
    backward: bool = True,
) -> "VelocityModel":
    """What velocities are predicted with: `FastWan`, or the library's forward with `compute.plain`.

    `backward` asks for an attention kernel that has a gradient.
    """
    if compute.plain:
        name = set_attention(transformer, compute.attention, device, dtype, backward=backward)
        return PlainModel(transformer, predict_velocity, compute, dtype, name)
    from wangen.runtime.fast.attention import choose_kernel
    from wangen.runtime.fast.dit import FastWan

    kernel = choose_kernel(compute.attention, device, dtype, backward=backward)
    return FastWan(transformer, compute, kernel, swap, dtype)


def pad_texts(texts: Sequence[torch.Tensor]) -> torch.Tensor:
    """B embeddings (L, dim) of different lengths -> (B, 512, dim), zeros behind each text.

    >>> pad_texts([torch.ones(3, 2), torch.ones(1, 2)]).sum(dim=(1, 2)).tolist()
    [6.0, 2.0]
    """
    padded = texts[0].new_zeros(len(texts), WAN_TEXT_ROWS, texts[0].shape[1])
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return padded
