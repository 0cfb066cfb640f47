"""At which times the frames of a clip are taken from a video whose own rate is nearly the model's, or a multiple of it.

For film of 24000/1001 frames per second the times k / 24 s creep along the borders of its frames, where the rounding of
a time stamp decides which one is on screen: some would come twice, and others never. So do those of stamps that were
rounded twice, as of an mkv copied into an mp4, or that a recorder took from a running clock.
"""

from collections.abc import Sequence
from typing import NamedTuple

NEAR = 0.002
"""Rates that differ by less are meant to be one: 1000/1001 of NTSC, and what recorders get wrong."""
MOST = 4
"""A video has at most so many frames for each of the model's, to be taken by its own rate."""
EXACT_S = 5e-7
"""Time stamps that differ by less are the same: this absorbs the rounding of floating point."""
COARSE_S = 0.002
"""A longer tick is the duration of a frame, and stamps in it are exact; a shorter one is a clock that rounds them."""


class Beat(NamedTuple):
    """How the frames of a video follow each other.

    Attributes:
        rate: frames per second; 0 where a frame is half a frame or more off its place, and of a single frame.
        on_clock: frame n is on screen n / r seconds after the first one, r being the nearest whole rate.
    """

    rate: float = 0.0
    on_clock: bool = True


def beat_of(times_s: Sequence[float], slack_s: float = EXACT_S) -> Beat:
    """The beat of frames with these times, ascending.

    Args:
        times_s: in seconds.
        slack_s: how much earlier than its time a frame may be shown.

    >>> beat_of([0.0, 0.042, 0.083, 0.125], 0.001), beat_of([0.0, 0.04, 0.2]).rate
    (Beat(rate=24.0, on_clock=True), 0.0)
    """
    if len(times_s) < 2 or times_s[-1] <= times_s[0]:
        return Beat()
    rate = (len(times_s) - 1) / (times_s[-1] - times_s[0])
    starts_s = [time_s - times_s[0] for time_s in times_s]
    if max(abs(start_s - number / rate) for number, start_s in enumerate(starts_s)) >= 0.5 / rate:
        return Beat()
    nominal = max(1, round(rate))
    in_time = all(start_s - slack_s <= number / nominal for number, start_s in enumerate(starts_s))
    stays = all(number / nominal < start_s - slack_s for number, start_s in enumerate(starts_s[1:]))
    return Beat(rate, in_time and stays)


def beat_of_packets(times: Sequence[int | None], tick_s: float, rate: float) -> Beat:
    """The beat of a video's frames.

    Args:
        times: of its packets, in ticks and in any order.
        tick_s: in seconds.
        rate: frames per second on average, as the file says it, by which frames without times come; or 0.
    """
    known = sorted(time for time in times if time is not None)
    if known or not rate:
        return beat_of([time * tick_s for time in known], slack(tick_s))
    return steady(rate, len(times))


def slack(tick_s: float) -> float:
    """How much earlier than its stamp a frame may be shown, in seconds.

    62 or 63 ms of a container that counts in milliseconds stand for the 62.5 ms of 16 frames per second, and no frame
    may come late because its stamp was rounded up.
    """
    return EXACT_S + (tick_s if tick_s < COARSE_S else 0.0)


def steady(rate: float, num_frames: int) -> Beat:
    """The beat of frames that follow each other at exactly this rate."""
    last, nominal = num_frames - 1, max(1, round(rate))
    in_time, stays = last / rate - EXACT_S <= last / nominal, (last - 1) / nominal < last / rate - EXACT_S
    return Beat(rate, last < 1 or (in_time and stays))


class Pace(NamedTuple):
    """Frame k of a clip is the one on screen at k / fps + within_s seconds."""

    fps: float
    within_s: float = 0.0


def pace_of(fps: float, rate: float) -> Pace:
    """At which times a clip's frames are taken, so that frames of a rate near the model's come one for one.

    Args:
        fps: the model's frames per second.
        rate: the video's, as `Beat` has it; 0 where its frames do not come evenly.

    >>> pace_of(24, 25.0), pace_of(30, 0.0)
    (Pace(fps=24, within_s=0.0), Pace(fps=30, within_s=0.0))
    >>> pace_of(24, 23.976).fps, pace_of(30, 59.94).fps
    (23.976, 29.97)
    """
    many = min(MOST, max(1, round(rate / fps)))
    return Pace(rate / many, 0.5 / rate) if abs(rate / (many * fps) - 1) < NEAR else Pace(fps)
