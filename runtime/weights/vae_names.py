"""The names and sizes of Wan's VAEs: every layout in circulation -> diffusers' `AutoencoderKLWan`.

Wan 2.1 numbers the layers of each half in one row (`encoder.downsamples.5`), Wan 2.2 by block and layer
(`encoder.downsamples.1.downsamples.2`); ComfyUI keeps both as they are. The shortcuts around the blocks of 2.2 average
and repeat, so they have no weights.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from math import isqrt
from typing import Any

from wangen.generator.errors import WangenError
from wangen.runtime.weights.filling import OTHER_FILE

VAES = ("wan-vae-2.1", "wan-vae-2.2")
"""The kinds of files that are read here."""

# Official `wan/modules/vae.py` (class WanVAE) and `vae2_2.py` (class Wan2_2_VAE).
# fmt: off
MEAN_21 = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
STD_21 = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)
MEAN_22 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)
STD_22 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)
# fmt: on
STATISTICS: Mapping[int, Mapping[str, tuple[float, ...]]] = {
    16: {"latents_mean": MEAN_21, "latents_std": STD_21},
    48: {"latents_mean": MEAN_22, "latents_std": STD_22},
}
"""Mean and standard deviation of the latents, by the number of their channels."""


def _flat_upsample(match: re.Match[str]) -> str:
    """The decoder of 2.1: three residual blocks and an upsampler, four times over in one row."""
    block, layer = divmod(int(match[1]), 4)
    return f"decoder.up_blocks.{block}." + ("upsamplers.0." if layer == 3 else f"resnets.{layer}.")


_RULES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"\.head\.0\.", ".norm_out."),
    (r"\.head\.2\.", ".conv_out."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.(down|up)samples\.(\d+)\.\1samples\.(\d+)\.(?=residual|shortcut)", r".\1_blocks.\2.resnets.\3."),
    (r"\.(down|up)samples\.(\d+)\.\1samples\.\d+\.", r".\1_blocks.\2.\1sampler."),
    (r"^encoder\.downsamples\.", "encoder.down_blocks."),
    (r"^decoder\.upsamples\.(\d{1,4})\.", _flat_upsample),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)


def vae_names(names: Iterable[str]) -> dict[str, str]:
    """File name -> diffusers name, for the original names of 2.1 and 2.2 and for those of diffusers itself.

    A name that belongs to no VAE stays as it is, so that the comparison with the model finds it.

    >>> vae_names(["decoder.upsamples.7.time_conv.bias"])
    {'decoder.upsamples.7.time_conv.bias': 'decoder.up_blocks.1.upsamplers.0.time_conv.bias'}
    """
    return {name: _diffusers_name(name) for name in names}


def _diffusers_name(name: str) -> str:
    for pattern, replacement in _RULES:
        name = re.sub(pattern, replacement, name)
    return name


def vae_config(shapes: Mapping[str, tuple[int, ...]], *, where: str = "") -> dict[str, Any]:
    """The configuration of `AutoencoderKLWan`, read from the shapes of its tensors.

    Args:
        shapes: by the names of diffusers.
        where: the file, for messages.

    Raises:
        WangenError: a tensor that tells a size is missing, or nothing is known about latents of this many channels.
    """

    def size(name: str, axis: int) -> int:
        shape = shapes.get(name, ())
        if axis >= len(shape):
            raise WangenError(f"the tensors do not fit a Wan VAE: {name} is {shape or 'missing'}",
                              where=where, cure=OTHER_FILE)  # fmt: skip
        return shape[axis]

    z_dim, in_channels = size("post_quant_conv.weight", 0), size("encoder.conv_in.weight", 1)
    patch = isqrt(in_channels // 3)
    if z_dim not in STATISTICS or in_channels != 3 * patch * patch:
        raise WangenError(
            f"a VAE of {z_dim} latent channels from {in_channels} channels of picture; Wan 2.1 has 16 from 3, "
            "Wan 2.2 48 from 12",
            where=where,
            cure=OTHER_FILE,
        )
    return {
        "base_dim": size("encoder.conv_in.weight", 0),
        "decoder_base_dim": size("decoder.conv_out.weight", 1),
        "z_dim": z_dim,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "attn_scales": [],
        "temperal_downsample": [False, True, True],
        "is_residual": "encoder.down_blocks.0.resnets.0.conv1.weight" in shapes,
        "in_channels": in_channels,
        "out_channels": size("decoder.conv_out.weight", 0),
        "patch_size": patch if patch > 1 else None,
        "scale_factor_temporal": 4,
        "scale_factor_spatial": 8 * patch,
        **{name: list(values) for name, values in STATISTICS[z_dim].items()},
    }
