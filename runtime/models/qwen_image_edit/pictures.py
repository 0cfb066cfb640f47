"""Control images as Qwen2.5-VL sees them: resized, normalised and cut into patches.

The same as the PIL form of transformers' image processor, which needs torchvision otherwise.
"""

import math
from typing import TYPE_CHECKING

import torch

from wangen.generator.geometry import area_size

if TYPE_CHECKING:
    from PIL.Image import Image

PATCH_PX = 14
MERGE = 2
"""Patches that become one token, in each direction."""
TIME_PATCH = 2
"""Frames of a patch; a picture stands for both."""
MIN_PIXELS, MAX_PIXELS = 3136, 12845056
"""Of a picture, from Qwen2.5-VL's preprocessor_config.json."""
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def seen_by_encoder(picture: "Image", area: tuple[int, int]) -> "Image":
    """A picture at the area that the pipelines show it to the text encoder in."""
    from PIL import Image

    return picture.resize(area_size(picture.size, area), Image.Resampling.LANCZOS)


def encoder_size(width: int, height: int) -> tuple[int, int]:
    """The nearest (width, height) that is whole merged patches and neither too large nor too small.

    >>> encoder_size(384, 384), encoder_size(1376, 768)
    ((392, 392), (1372, 756))
    """
    unit = PATCH_PX * MERGE
    sides = round(width / unit) * unit, round(height / unit) * unit
    if sides[0] * sides[1] > MAX_PIXELS:
        scale = math.sqrt(width * height / MAX_PIXELS)
        return tuple(max(unit, math.floor(side / scale / unit) * unit) for side in (width, height))  # type: ignore[return-value]
    if sides[0] * sides[1] < MIN_PIXELS:
        scale = math.sqrt(MIN_PIXELS / (width * height))
        return tuple(math.ceil(side * scale / unit) * unit for side in (width, height))  # type: ignore[return-value]
    return sides


def patches(picture: "Image") -> tuple[torch.Tensor, tuple[int, int]]:
    """A picture in RGB -> its patches (N, 3 * 2 * 14 * 14), those of a token side by side, and its (rows, columns)."""
    import numpy as np
    from PIL import Image

    resized = picture.resize(encoder_size(*picture.size), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255  # (3, H, W)
    pixels = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    rows, columns = pixels.shape[1] // PATCH_PX, pixels.shape[2] // PATCH_PX
    cut = pixels.reshape(3, rows // MERGE, MERGE, PATCH_PX, columns // MERGE, MERGE, PATCH_PX)
    ordered = cut.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    twice = ordered.expand(*ordered.shape[:5], TIME_PATCH, *ordered.shape[6:])
    return twice.reshape(rows * columns, -1), (rows, columns)
