"""Pictures whose embedded profile says that their numbers are not sRGB's colours, as in photos of many telephones."""

from functools import lru_cache
from io import BytesIO
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image
    from PIL.ImageCms import ImageCmsTransform

SAME_LEVELS = 2
"""A profile that changes no colour by more levels, of 255, is that of sRGB: there are many, and rounding differs."""
_SPACES = {"RGB": "RGB ", "CMYK": "CMYK", "L": "GRAY"}


def is_profiled(image: "Image.Image") -> bool:
    """Whether a picture's profile says other colours than its numbers are in sRGB; a broken profile says nothing."""
    return _transform_of(image) is not None


def in_srgb(image: "Image.Image") -> "Image.Image":
    """A picture in sRGB, as its profile says; the picture itself where that changes nothing."""
    from PIL import ImageCms

    transform = _transform_of(image)
    if transform is None:
        return image
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    converted = ImageCms.applyTransform(image.convert(_colours_of(image)), transform)
    assert converted is not None
    if alpha is not None:
        converted.putalpha(alpha)
    return converted


def _colours_of(image: "Image.Image") -> str:
    """The mode of a picture's colours alone; empty for one that no profile is about."""
    modes = {"RGBA": "RGB", "RGBX": "RGB", "P": "RGB", "PA": "RGB", "LA": "L"}
    mode = modes.get(image.mode, image.mode)
    return mode if mode in _SPACES else ""


def _transform_of(image: "Image.Image") -> "ImageCmsTransform | None":
    profile, mode = image.info.get("icc_profile"), _colours_of(image)
    return _to_srgb(profile, mode) if profile and mode else None


@lru_cache(maxsize=64)
def _to_srgb(profile: bytes, mode: str) -> "ImageCmsTransform | None":
    """What brings colours of a profile to sRGB; None where they are there, or the profile is of no use."""
    from PIL import Image, ImageChops, ImageCms, features

    if not features.check("littlecms2"):
        return None
    try:
        opened = ImageCms.ImageCmsProfile(BytesIO(profile))
        if opened.profile.xcolor_space != _SPACES[mode]:
            return None
        transform = ImageCms.buildTransform(
            opened, ImageCms.createProfile("sRGB"), mode, "RGB", ImageCms.Intent.RELATIVE_COLORIMETRIC,
            ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )  # fmt: skip
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
    levels = bytes(level for colour in product(range(0, 256, 51), repeat=len(mode)) for level in colour)
    probe = Image.frombytes(mode, (len(levels) // len(mode), 1), levels)
    shown = ImageCms.applyTransform(probe, transform)
    assert shown is not None
    differences = ImageChops.difference(shown, probe.convert("RGB")).tobytes()
    return transform if max(differences) > SAME_LEVELS else None
