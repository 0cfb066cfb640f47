"""Which frames of a longer video a clip is, by their numbers: what a manifest's line says of a clip that is no file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FIRST, STEP, COUNT = "first_frame", "frame_step", "frames"
"""Keys of a manifest's line; the last one is every clip's."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Frames `first`, `first + step`, … of a video, `count` of them, numbered from 0 in the order they are shown.

    They are taken as they are, whatever their times: nothing is resampled to the model's frame rate.
    """

    first: int
    step: int
    count: int
    line: int = field(default=0, compare=False, repr=False)
    """Of the manifest that says so, counted from 1, for messages."""

    def numbers(self, start: int = 0, count: int | None = None) -> range:
        """The numbers in the file of `count` frames from frame `start` of the clip on, by default of all.

        >>> list(Excerpt(100, 2, 5).numbers()), list(Excerpt(100, 2, 5).numbers(1, 2))
        ([100, 102, 104, 106, 108], [102, 104])
        """
        number = self.count - start if count is None else count
        first = self.first + start * self.step
        return range(first, first + (number - 1) * self.step + 1, self.step)

    def fault(self, num_frames: int) -> tuple[str, str] | None:
        """What is wrong when the file has `num_frames` frames, and the cure; None when all are there.

        >>> Excerpt(100, 2, 5, line=3).fault(108)
        ('line 3 of the manifest takes frame 108, and the last one is 107', 'make the manifest again, or mend the line')
        """
        last = self.numbers()[-1]
        if last < num_frames:
            return None
        found = f"line {self.line} of the manifest takes frame {last}, and the last one is {num_frames - 1}"
        return found, "make the manifest again, or mend the line"


def read_excerpt(values: Mapping[str, Any], line: int) -> Excerpt | None:
    """The excerpt that a line of this number names; None where its clip is the whole file.

    Raises:
        ValueError: one of the three is no whole number, too small, or missing.

    >>> read_excerpt({"first_frame": 7, "frames": 5}, 1), read_excerpt({"frames": 5}, 1)
    (Excerpt(first=7, step=1, count=5), None)
    """
    if FIRST not in values and STEP not in values:
        return None
    given = {FIRST: values.get(FIRST, 0), STEP: values.get(STEP, 1), COUNT: values.get(COUNT)}
    for key, value in given.items():
        least = 0 if key == FIRST else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{key} must be a whole number from {least} on, got {str(value)[:40]}")
    return Excerpt(given[FIRST], given[STEP], given[COUNT], line)
