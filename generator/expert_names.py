"""Which of the two experts of Wan 2.2 a file is, by what its header notes or its name says: their tensors are alike."""

import re
from collections.abc import Mapping
from pathlib import Path

from wangen.generator.header_keys import EXPERT

_NOISE = re.compile(
    r"(?:(?<![A-Za-z])|(?=High|Low)|(?<=\d[A-Z])(?=high|low))"  # i2vHigh, 14Bhigh, but no Workflow
    r"(?P<which>(?i:high|low))(?:(?P<noise>[_ -]?(?i:noise))|(?![_ -]?(?i:vram|quality|res)))"
    r"(?:(?![A-Za-z])|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[a-z]))"  # HIGHfp8, but no Highland
)
"""A word of its own, by what is around it or by a change of case."""
_WAN_22 = re.compile(r"A14B|(?<!\d)2[._]2(?!\d)", re.IGNORECASE)


def noted_expert(metadata: Mapping[str, str]) -> str:
    """Which expert training noted in the header of what it made: `high`, `low`, or nothing."""
    noted = metadata.get(EXPERT, "").removesuffix("_noise")
    return noted if noted in ("low", "high") else ""


def expert_said(path: Path, metadata: Mapping[str, str]) -> str:
    """Which expert a transformer is by its header, else by its name: `high`, `low`, or nothing."""
    return noted_expert(metadata) or noise_of(path)


def noise_of(path: Path, *, has_two: bool = False) -> str:
    """Which expert of Wan 2.2 a file is by its name or its folder's: `high`, `low`, or nothing.

    The words say it with "noise", or in a name that says Wan 2.2, or where something else says that the model `has_two`
    experts: low_vram and high_quality are everywhere.

    >>> noise_of(Path("Wan2_2-T2V-A14B_HIGH_fp8_e4m3fn.safetensors")), noise_of(Path("low_noise_model/a.safetensors"))
    ('high', 'low')
    >>> names = ("smoothMix_i2vHigh", "T2VHighNoise", "x_14Bhigh", "a_HIGHfp8", "low_highland", "Workflow", "WorkFlow")
    >>> [noise_of(Path(name), has_two=True) for name in names]
    ['high', 'high', 'high', 'high', 'low', '', '']
    >>> noise_of(Path("low_mem/a.safetensors"), has_two=True)
    ''
    """
    for name in (path.name, path.parent.name):
        found = list(_NOISE.finditer(name))
        are_two = _WAN_22.search(name) or (has_two and name == path.name)  # a folder low_mem says nothing
        sure = [match for match in found if match["noise"]] or (found if are_two else [])
        if sure:
            return sure[0]["which"].lower()
    return ""
