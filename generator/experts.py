"""The two experts of a Wan 2.2 A14B model: the same shapes, so only their numbers tell them apart."""

import bisect
import math
import struct
from collections.abc import Sequence
from pathlib import Path

from wangen.generator.companions import strip_prefix
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.expert_names import expert_said, noise_of, noted_expert
from wangen.generator.formats import Header, TensorInfo
from wangen.generator.formats.raw import float8, read_numbers
from wangen.generator.headers import identity, read_header
from wangen.generator.lora_config import lora_file
from wangen.profiles import Model

# Small tensors that are stored unquantised, in the original names and in those of diffusers.
SMALL = (
    ("head.modulation", "scale_shift_table"),
    ("patch_embedding.bias", "patch_embedding.bias"),
    ("blocks.0.modulation", "blocks.0.scale_shift_table"),
    ("head.head.bias", "proj_out.bias"),
)
ORDER = "--dit takes the low-noise expert and --dit_high_noise the high-noise expert"

LEAST_TIMESTEP = 100
"""What is less is no boundary between two experts: their models have 875 and 900."""

_COMPARED = ("F32", "F16", "BF16", "F8_E4M3")
_EQUAL_SHARE = 0.8
"""Rounding twice on the way moves a few values by one step; other training moves most of them, by many steps."""


def flag_words(flag: str, model: Model) -> str:
    """A weight flag in words: of two experts with the one that it takes.

    >>> from wangen import profiles
    >>> flag_words("dit", profiles.model("t2v-A14B")), flag_words("dit", profiles.model("t2v-14B"))
    ('--dit (the low-noise expert)', '--dit')
    """
    expert = {"dit": "low-noise", "dit_high_noise": "high-noise"}.get(flag, "") if model.experts else ""
    return f"--{flag} (the {expert} expert)" if expert else f"--{flag}"


def choose_boundary(given: float | None, model: Model) -> float | None:
    """The sigma from which on, upwards, the high-noise expert works; None for a model with one transformer.

    Args:
        given: to `--timestep_boundary`, as 0.875 or 875; None takes the model's own.
        model: its profile.

    Raises:
        UsageError: the model has one transformer, or the number is none; what lies between a sigma and timestep 100 is
            taken for a mistyped one.

    >>> from wangen import profiles
    >>> choose_boundary(900, profiles.model("t2v-A14B")), choose_boundary(None, profiles.model("t2v-14B"))
    (0.9, None)
    """
    if model.experts is None:
        if given is not None:
            raise UsageError(f"--timestep_boundary: {model.name} has one transformer", cure="leave it out")
        return None
    boundary = model.experts.boundary if given is None else given
    if 1 < boundary < LEAST_TIMESTEP:
        raise UsageError(f"--timestep_boundary {given:g} is neither a sigma (0 to 1) nor a timestep ({LEAST_TIMESTEP} "
                         "to 1000)", cure=f"{model.name} is made for {model.experts.boundary:g}")  # fmt: skip
    boundary = boundary / 1000 if boundary > 1 else boundary
    if not 0 < boundary < 1:
        raise UsageError(f"--timestep_boundary {given:g} leaves one expert without timesteps",
                         cure=f"{model.name} is made for {model.experts.boundary:g}")  # fmt: skip
    return boundary


def same_weights(first: Path, second: Path) -> bool:
    """Whether two transformer files hold the same weights, in whatever precision, layout or format each is.

    Files of other bytes are compared by the small tensors that both hold unquantised, as rounded to bfloat16, or to
    8 bits where one is stored so. All of them must agree: to refuse two different experts would be worse than to
    overlook one given twice.

    Raises:
        WangenError: as `headers.read_header`.
    """
    if identity(first, "--dit") == identity(second, "--dit_high_noise"):
        return True
    headers = read_header(first, "--dit"), read_header(second, "--dit_high_noise")
    pairs = [tuple(_find(header, names) for header in headers) for names in SMALL]
    both = [(one, other) for one, other in pairs if one and other and one.shape == other.shape]
    return bool(both) and all(_same(one, other) for one, other in both)


def expect_two_experts(low: Path, high: Path) -> None:
    """Refuse one expert given twice.

    Args:
        low: the file given to `--dit`.
        high: the file given to `--dit_high_noise`.

    Raises:
        WangenError: both hold the same weights, or one cannot be read.
    """
    if same_weights(low, high):
        named = f"the file's name says {noise_of(high)} noise; " if noise_of(high) else ""
        raise WangenError(f"the same weights as {low}, given to both experts", where=str(high), cure=named + ORDER)


def seem_swapped(low: Path, high: Path) -> bool:
    """Whether a file is the other expert by what `expert_of` finds and the second does not gainsay it: a hint, no more.

    Raises:
        WangenError: as `headers.read_header`.
    """
    said = expert_of(low, "--dit"), expert_of(high, "--dit_high_noise")
    return said in (("high", "low"), ("high", ""), ("", "low"))


def expert_of(dit: Path, flag: str) -> str:
    """Which expert a transformer is, `low` or `high`: what training noted in its header, or its name says; or nothing.

    Raises:
        WangenError: as `headers.read_header`.
    """
    return expert_said(dit, read_header(dit, flag).metadata)


def lora_of_the_other(path: Path, flag: str, own: str) -> str:
    """A sentence where a LoRA's header says that it was trained for the other expert, or its name; else nothing.

    Args:
        path: the LoRA, as it was given.
        flag: that it was given to.
        own: the expert that it is to change, `low` or `high`.

    Raises:
        WangenError: as `headers.read_header`.
    """
    other = {"low": "high", "high": "low"}[own]
    noted = noted_expert(read_header(lora_file(path), flag).metadata)
    if noted == other:
        return f"{flag} {path} was trained for the {other}-noise expert"
    named = not noted and noise_of(Path(path.name)) == other  # a folder may say high and low
    return f"{flag} {path} is by its name for the {other}-noise expert" if named else ""


def _find(header: Header, names: Sequence[str]) -> TensorInfo | None:
    infos = (info for name, info in header.tensors.items() if strip_prefix(name) in names)
    return next((info for info in infos if info.dtype in _COMPARED and info.place and not info.place.strides), None)


def _same(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors agree as rounded to bfloat16, or to 8 bits where one of them is stored so."""
    first, second = read_numbers(one), read_numbers(other)
    if "F8_E4M3" in (one.dtype, other.dtype):
        grid = sorted({number for bits in range(256) if not math.isnan(number := float8(bits))})
        return _equal([_nearest(grid, number) for number in first], [_nearest(grid, number) for number in second])
    return _equal([_ordered(_to_bfloat16(number)) for number in first],
                  [_ordered(_to_bfloat16(number)) for number in second])  # fmt: skip


def _nearest(grid: Sequence[float], number: float) -> int:
    """The place in a sorted grid of the value nearest to a number.

    >>> [_nearest([0.0, 1.0, 2.0], number) for number in (-5.0, 0.4, 1.6, 9.0)]
    [0, 0, 2, 2]
    """
    after = min(bisect.bisect_left(grid, number), len(grid) - 1)
    return after - 1 if after and number - grid[after - 1] < grid[after] - number else after


def _to_bfloat16(number: float) -> int:
    """The bits of the nearest bfloat16, ties to even; infinity and NaN stay what they are.

    >>> hex(_to_bfloat16(1.0)), hex(_to_bfloat16(-3.14159))
    ('0x3f80', '0xc049')
    """
    bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return min((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, 0xFFFF)


def _ordered(bits: int) -> int:
    return -(bits & 0x7FFF) if bits & 0x8000 else bits


def _equal(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether all values are at most one step of bfloat16 apart, and most are equal."""
    steps = [abs(a - b) for a, b in zip(first, second, strict=True)]
    return bool(steps) and max(steps) <= 1 and steps.count(0) >= _EQUAL_SHARE * len(steps)
