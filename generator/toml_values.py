"""Single values of a dataset TOML: read strictly, with what to write instead."""

import re
from typing import Any, Literal, get_args

from wangen.generator.errors import UsageError

MOST = 1_000_000
"""Of repeats, frames, pixels and what else is counted: an epoch has a number for each of its samples."""

FRAMES_PER_LATENT = 4
"""Of every model's VAE, behind the first frame, which has a latent frame of its own."""

WHITE = "#ffffff"
FrameExtraction = Literal["head", "chunk", "slide", "uniform", "full"]
EXTRACTIONS: tuple[str, ...] = get_args(FrameExtraction)
MAX_SIDE = 16384
"""Of a resolution, in pixels: no model comes near it, and a slip of the finger would fill the memory."""


def read_value(key: str, raw: Any, default: Any, where: str) -> Any:
    """One value of a block, checked and brought to the type of its default.

    Raises:
        UsageError: it does not fit.
    """
    if key in ("resolution", "control_resolution"):
        return sizes(key, raw, where)
    if key == "target_frames":
        return frames(key, raw, where)
    if key == "source_fps":
        if isinstance(raw, int | float) and not isinstance(raw, bool) and 0.01 <= raw <= 1000:
            return float(raw)
        raise UsageError(f"source_fps must be a number from 0.01 to 1000, got {raw!r}", where=where)
    if key == "frame_extraction" and raw not in EXTRACTIONS:
        raise UsageError(f"frame_extraction has no value {raw!r}", where=where, cure=f"one of {', '.join(EXTRACTIONS)}")
    if key == "caption_extension" and not (isinstance(raw, str) and re.fullmatch(r"\.[^/\\]*[^/\\. ]", raw)):
        raise UsageError(f"caption_extension must be a dot and letters, got {raw!r}", where=where,
                         cure='for example ".txt"')  # fmt: skip
    if key == "background_color":
        return color(raw, where)
    if isinstance(default, bool) and not isinstance(raw, bool):
        raise UsageError(f"{key} must be true or false, got {raw!r}", where=where)
    if isinstance(default, int) and not isinstance(default, bool):
        return whole_number(key, raw, where)
    return raw


def color(raw: Any, where: str) -> str:
    """A colour as `#rrggbb` in small letters; `#rgb` is short for it.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(raw, str) or not re.fullmatch(r"#([0-9a-fA-F]{3}){1,2}", raw):
        raise UsageError(f"background_color must be a colour like {WHITE}, got {raw!r}", where=where,
                         cure=f'for example background_color = "{WHITE}"')  # fmt: skip
    digits = raw[1:].lower()
    return "#" + ("".join(digit * 2 for digit in digits) if len(digits) == 3 else digits)


def whole_number(key: str, raw: Any, where: str) -> int:
    """A count.

    Raises:
        UsageError: it is no whole number above 0, or more than anything is counted in.
    """
    if not isinstance(raw, int) or isinstance(raw, bool) or raw < 1:
        raise UsageError(f"{key} must be a whole number above 0, got {raw!r}", where=where)
    if raw > MOST:
        raise UsageError(f"{key} must be at most {MOST}, got {raw}", where=where, cure="give a smaller number")
    return raw


def sizes(key: str, raw: Any, where: str) -> tuple[int, int]:
    """A resolution: one number for a square, or [width, height].

    Raises:
        UsageError: it is neither, or larger than any picture.
    """
    sides = raw if isinstance(raw, list) and len(raw) == 2 else [raw, raw]
    if not all(isinstance(side, int) for side in sides):
        raise UsageError(f"{key} must be one whole number or [width, height], got {raw!r}", where=where)
    width, height = (whole_number(key, side, where) for side in sides)
    if max(width, height) > MAX_SIDE:
        raise UsageError(f"{key} must be at most {MAX_SIDE} pixels a side, got {raw!r}", where=where,
                         cure="write 512, or [832, 480]")  # fmt: skip
    return width, height


def is_clip_length(frames: int) -> bool:
    """Whether a clip can have so many frames: 4n+1, as each latent frame but the first stands for four."""
    return frames > 0 and frames % FRAMES_PER_LATENT == 1


def longest_clip(frames: int) -> int:
    """The longest clip that can be taken of so many frames.

    >>> longest_clip(84), longest_clip(0)
    (81, 1)
    """
    return max(1, (frames - 1) // FRAMES_PER_LATENT * FRAMES_PER_LATENT + 1)


def frames(key: str, raw: Any, where: str) -> tuple[int, ...]:
    """Clip lengths in frames, sorted, each 4n+1: one number or a list.

    Raises:
        UsageError: one of them is not 4n+1; the message names those beside it.
    """
    numbers = raw if isinstance(raw, list) else [raw]
    found = sorted({whole_number(key, number, where) for number in numbers})
    if not found:
        raise UsageError(f"{key} is an empty list", where=where, cure=f"for example {key} = [81]")
    wrong = [number for number in found if not is_clip_length(number)]
    if wrong:
        shorter = longest_clip(wrong[0])
        raise UsageError(f"{key} must be 4n+1 (1, 5, … 81), got {wrong[0]}", where=where,
                         cure=f"write {shorter} or {shorter + FRAMES_PER_LATENT}")  # fmt: skip
    return tuple(found)
