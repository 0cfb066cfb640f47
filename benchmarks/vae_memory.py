"""The most that a GPU would hold while a full-size VAE works, weights aside: counted on fake tensors, without a GPU.

python benchmarks/vae_memory.py

It counts living tensors; the workspaces of the convolutions come on top.
"""

import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from diffusers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from fake_gpu import fake_gpu

from wangen.runtime.models.wan_vae import decode_latents, encode_video
from wangen.runtime.weights.vae_names import MEAN_22, STD_22

SIZES = {"2.1": (480, 832), "2.2": (704, 1280)}
OPTIONS = {"plain": {}, "--vae_cache_cpu": {"cache_cpu": True}, "--vae_tile 256": {"tile_px": 256}}


def main() -> None:
    logging.set_verbosity_error()
    for version, (height, width) in SIZES.items():
        for frames in (17, 81):
            for work in ("encode", "decode"):
                peaks = [f"{name} {_peak(version, frames, height, width, work, options)}"
                         for name, options in OPTIONS.items()]  # fmt: skip
                print(f"{version} {width}x{height} {frames} frames {work}, MiB: {', '.join(peaks)}", flush=True)


def _peak(version: str, frames: int, height: int, width: int, work: str, options: dict[str, object]) -> int:
    """Mebibytes."""
    vae = _vae(version)
    stride = vae.config.scale_factor_spatial
    with fake_gpu(vae) as memory:
        if work == "encode":
            encode_video(vae, torch.empty(1, 3, frames, height, width, dtype=torch.uint8), **options)
        else:
            shape = (1, vae.config.z_dim, (frames + 3) // 4, height // stride, width // stride)
            decode_latents(vae, torch.empty(shape), **options)
    return round(memory.peak_bytes / 2**20)


def _vae(version: str) -> AutoencoderKLWan:
    large = {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12,
             "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": MEAN_22,
             "latents_std": STD_22}  # fmt: skip
    with torch.device("meta"):
        return AutoencoderKLWan(**(large if version == "2.2" else {})).to(torch.bfloat16).eval()


if __name__ == "__main__":
    main()
