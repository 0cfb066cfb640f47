"""Qwen-Image, Qwen-Image-Edit and Edit-Plus (2509, 2511): what is particular to this family.

Letters in shapes: B batch, C channels, T frames of video, H and W pixels, F frames of latents (1), h and w latents,
L tokens of text.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from wangen.runtime.devices import set_attention
from wangen.runtime.models.plain import PlainModel

if TYPE_CHECKING:
    from diffusers import QwenImageTransformer2DModel

    from wangen.runtime.memory.blocks import BlockWeights
    from wangen.runtime.models import VelocityModel
    from wangen.runtime.models.compute import Compute

log = logging.getLogger("wangen")

_HOMES = {
    "decode_latents": "wan_vae",
    "guided": "qwen_image_edit.transformer",
    "load_latent_encoder": "wan",
    "load_prompt_encoder": "qwen_image_edit.text_encoder",
    "load_transformer": "qwen_image_edit.transformer",
    "load_vae": "wan_vae",
    "original_tensor_name": "qwen_image_edit.transformer",
    "predict_velocity": "qwen_image_edit.transformer",
    "saved_tensors": "qwen_image_edit.transformer",
    "transformer_names": "qwen_image_edit.transformer",
}
"""What the contract asks for and other modules have; each is imported when it is asked for. The VAE has the layers of
Wan 2.1's, and its encoder is the same: so is the code."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(import_module(f"wangen.runtime.models.{_HOMES[name]}"), name)


def velocity_model(
    transformer: "QwenImageTransformer2DModel",
    compute: "Compute",
    *,
    device: torch.device,
    dtype: torch.dtype,
    swap: "BlockWeights | None" = None,
    backward: bool = True,
) -> "VelocityModel":
    """What velocities are predicted with: `FastQwen`, or the library's forward with `compute.plain`.

    `backward` asks for an attention kernel that has a gradient.
    """
    if compute.plain:
        from wangen.runtime.models.qwen_image_edit.transformer import predict_velocity

        name = set_attention(transformer, compute.attention, device, dtype, backward=backward)
        return PlainModel(transformer, predict_velocity, compute, dtype, name)
    from wangen.runtime.fast.attention import choose_kernel
    from wangen.runtime.models.qwen_image_edit.fast import FastQwen

    if compute.compile:
        log.info("--compile: of Qwen-Image's blocks norms, rotations and gates, none as a whole")
    kernel = choose_kernel(compute.attention, device, dtype, backward=backward)
    return FastQwen(transformer, compute, kernel, swap, dtype)
