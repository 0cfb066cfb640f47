"""Wan VAEs in every layout -> diffusers' `AutoencoderKLWan`."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from wangen.generator.kinds import expect
from wangen.runtime.weights.filling import build, fill, open_checkpoint
from wangen.runtime.weights.vae_names import VAES, vae_config, vae_names


def load_vae(path: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> AutoencoderKLWan:
    """A Wan 2.1 or 2.2 VAE, frozen and in eval mode; which one is read from its tensors.

    Args:
        path: `Wan2.1_VAE.pth`, `Wan2.2_VAE.pth`, their safetensors forms, or a diffusers folder; in the original
            names, with ComfyUI's prefixes or without, or in those of diffusers.
        dtype: None keeps what the file stores (float32 in the official ones).
        device: where the weights go; `meta` compares names and shapes only.

    Raises:
        WangenError: another kind of file, missing, surplus or misshapen tensors.
    """
    header = expect(path, VAES, "--vae")
    checkpoint = open_checkpoint(path, header, vae_names)
    config = vae_config(checkpoint.shapes, where=str(path))
    model = build(path, lambda: AutoencoderKLWan(**config))
    fill(model, checkpoint, dtype, device)
    return model
