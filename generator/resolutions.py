"""Resolutions as people write them, and as they are named in folders, knobs and messages."""

import re

from wangen.generator.errors import UsageError
from wangen.generator.toml_values import MAX_SIDE


def parse_resolution(text: str, where: str = "") -> tuple[int, int]:
    """A resolution as people write it: `512` for a square, `832x480` for width and height in pixels.

    Raises:
        UsageError: it is neither, or too large.

    >>> parse_resolution("512"), parse_resolution("832x480")
    ((512, 512), (832, 480))
    """
    found = re.fullmatch(r"([1-9][0-9]{0,4})(?:[x*]([1-9][0-9]{0,4}))?", text.strip())
    if not found:
        raise UsageError(f"{text!r} is no resolution", where=where, cure="write 512, or 832x480 for width x height")
    size = int(found[1]), int(found[2] or found[1])
    if max(size) > MAX_SIDE:
        raise UsageError(f"{text!r}: a resolution has at most {MAX_SIDE} pixels a side", where=where)
    return size


def resolution_name(size: tuple[int, int]) -> str:
    """The name of a resolution in folders, knobs and messages.

    >>> resolution_name((512, 512)), resolution_name((832, 480))
    ('512', '832x480')
    """
    width, height = size
    return str(width) if width == height else f"{width}x{height}"
