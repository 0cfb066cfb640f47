"""Smaller copies of images for `publish --resize`: as small as the runtime can use without a visible difference.

The runtime scales an image with Lanczos until it covers its bucket, then crops. The copy is that image before the
crop, so that the runtime finds the same bucket, need not scale, and crops the same.
"""

import io
from functools import cache
from pathlib import Path
from typing import Any

from wangen.generator.dataset import MediaFacts
from wangen.generator.geometry import bucket_of
from wangen.generator.pictures import open_picture
from wangen.generator.tomls import DatasetEntry

RECIPE = "lanczos-1"
"""Raised when the copies' bytes change on purpose; copies of an older recipe are made again."""

_SAVING: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 95, "subsampling": 0},
    "PNG": {},
    "WEBP": {"lossless": True, "exact": True},
    "BMP": {},
    "AVIF": {"quality": 95, "subsampling": "4:4:4"},
}
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")
"""8 bits per channel; of other images no smaller copy is made."""

_GROWTH_PX = 64


@cache
def smaller_size(width: int, height: int, resolution: tuple[int, int], step: int) -> tuple[int, int] | None:
    """The smallest (width, height) in pixels that covers an image's bucket and leads to that same bucket.

    Args:
        width: of the upright image.
        height: of the upright image.
        resolution: bucket area as (width, height).
        step: buckets are multiples of this.

    Returns:
        None when the image is not larger than that, or no smaller size has the same bucket.

    >>> smaller_size(4000, 3000, (256, 256), 16), smaller_size(200, 200, (256, 256), 16)
    ((299, 224), None)
    """
    entry = DatasetEntry(
        directory=Path(), media="image", cache_directory=Path(), resolution=resolution, enable_bucket=True
    )
    bucket = bucket_of(MediaFacts(width, height, 1, 0.0), entry, step)
    for growth in range(_GROWTH_PX):  # rounding to whole pixels may tip a picture into the next bucket
        scale = max((bucket[0] + growth) / width, (bucket[1] + growth) / height)
        size = max(bucket[0], round(width * scale)), max(bucket[1], round(height * scale))
        if size[0] >= width or size[1] >= height:
            return None
        if bucket_of(MediaFacts(*size, 1, 0.0), entry, step) == bucket:
            return size
    return None


def bake(path: Path, size: tuple[int, int]) -> bytes | None:
    """An image scaled to (width, height), upright, in its own format with its colour profile.

    Returns:
        None for an image whose format or depth cannot be written back; it has to be taken as it is.

    Raises:
        OSError: it cannot be decoded.
    """
    from PIL import Image, ImageOps

    with open_picture(path) as image:
        name = "JPEG" if image.format == "MPO" else image.format or ""
        if name not in _SAVING or name not in Image.SAVE or image.mode not in _MODES:
            return None
        profile = image.info.get("icc_profile")
        upright = ImageOps.exif_transpose(image)
        if upright.has_transparency_data and upright.mode not in ("LA", "RGBA"):
            upright = upright.convert("RGBA")
        elif upright.mode in ("1", "P", "PA"):
            upright = upright.convert("L" if upright.mode == "1" else "RGB")
        small = upright.resize(size, Image.Resampling.LANCZOS)
    small.info.clear()
    buffer = io.BytesIO()
    small.save(buffer, name, icc_profile=profile, **_SAVING[name])
    return buffer.getvalue()
