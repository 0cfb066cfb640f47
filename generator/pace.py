"""At which times the frames of a clip are taken from a video whose own rate is nearly the model's, or a multiple of it.

For film of 24000/1001 frames per second the times k / 24 s creep along the borders of its frames, where the rounding of
a time stamp decides which one is on screen: some would come twice, and others never.
"""

from typing import NamedTuple

NEAR = 0.002
"""Rates that differ by less are meant to be one: 1000/1001 of NTSC, and what containers get wrong."""
SAME = 1e-4
"""Rates that differ by less are one."""
MOST = 4
"""A video has at most so many frames for each of the model's, to be taken by its own rate."""


class Pace(NamedTuple):
    """Frame k of a clip is the one on screen at k / fps + within_s seconds."""

    fps: float
    within_s: float = 0.0


def pace_of(fps: float, own: float) -> Pace:
    """At which times a clip's frames are taken, so that frames of a rate near the model's come one for one.

    Args:
        fps: the model's frames per second.
        own: the video's, on average; 0 where it is not known.

    >>> pace_of(24, 25.0), pace_of(24, 24.001)
    (Pace(fps=24, within_s=0.0), Pace(fps=24, within_s=0.0))
    >>> pace_of(24, 23.976).fps, pace_of(30, 59.94).fps
    (23.976, 29.97)
    """
    many = min(MOST, max(1, round(own / fps)))
    error = abs(own / (many * fps) - 1)
    return Pace(own / many, 0.5 / own) if SAME < error < NEAR else Pace(fps)
