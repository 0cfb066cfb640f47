"""Shots, the windows in them, what is measured of each, and which are kept.

A window is `frames` frames of a video at the clips' rate that no cut lies in. Everything here is arithmetic on what
`analysis` found out.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from wangen.generator.footage import clip_name
from wangen.generator.pace import pace_of
from wangen.generator.prepare_steps import Preprocess
from wangen.runtime.preprocess.analysis import THUMB_PX, Analysis
from wangen.runtime.preprocess.form import Form
from wangen.runtime.preprocess.videos import Segment, Video
from wangen.runtime.sources import Source

if TYPE_CHECKING:
    import numpy as np

    from wangen.runtime.preprocess.analysis import Floats, Stamps

    Thumbs = np.ndarray[Any, np.dtype[np.int16]]

STILL = 0.02
"""Percent of white: a frame that differs less from the one before shows the same picture. ffmpeg's freezedetect draws
the line at 0.1 (-60 dB), where somebody small who walks before a fixed camera would stand still."""
BLACK = 98.0
"""Percent of nearly black pixels from which on a frame is black, as in ffmpeg's blackdetect."""
NUM_THUMBS = 5
"""Of a clip, when it is compared with others."""
SLACK = 1e-6
"""Of a time in frames: absorbs the rounding of floating point."""


@dataclass(frozen=True)
class Footage:
    """A video that can be used.

    Attributes:
        video: the file and what is said of it.
        source: what it holds.
        stamps: (N,) int64: the time stamp of each of its frames at the clips' rate, as in `Analysis`.
        aspect: of its pixels, as there.
    """

    video: Video
    source: Source
    stamps: "Stamps"
    aspect: float

    def pace(self, fps: int) -> float:
        """How many of its frames at the clips' rate a second of it has."""
        return pace_of(fps, self.source.facts.rate).fps


@dataclass(frozen=True)
class Window:
    """A piece of a video that may become a clip.

    Attributes:
        footage: the video.
        prompt: its text.
        start: first frame, at the clips' rate.
        frames: how many; fewer than a clip's in a shot that is too short.
        signals: what was measured, by name.
        thumbs: some of its frames in grey, small, one behind the other; empty in a shot that is too short.
        reasons: why it is no good; empty when it is.
    """

    footage: Footage
    prompt: str
    start: int
    frames: int
    signals: dict[str, float]
    thumbs: "Thumbs" = field(compare=False, repr=False)
    reasons: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """The frame after the last one."""
        return self.start + self.frames

    def name(self, form: Form) -> str:
        """The clip's file name: the same for the same frames of the same content."""
        return clip_name(self.footage.video.path.stem, self.footage.source.digest, self.start, form.format)


def find_windows(footage: Footage, analysis: Analysis, form: Form, options: Preprocess) -> list[Window]:
    """The windows of a video, measured and judged by themselves, by start; shots that are too short are among them."""
    import numpy as np

    picks = np.linspace(0, form.frames - 1, min(NUM_THUMBS, form.frames)).round().astype(int)
    found: list[Window] = []
    pace = footage.pace(form.fps)
    for segment in dict.fromkeys(footage.video.segments):
        shots = list(_shots(analysis, segment, pace, options.cut_threshold))
        if not shots:
            found.append(_outside(footage, segment, pace))
        for first, end in shots:
            if end - first < form.frames:
                reason = f"short: the shot has {end - first} frames, a clip {form.frames}"
                none = np.empty(0, np.int16)
                found.append(Window(footage, segment.prompt, first, end - first, {}, none, (reason,)))
            for start in range(first, end - form.frames + 1, form.stride):
                signals = _measured(analysis, start, form)
                thumbs = analysis.thumbs[start + picks].reshape(-1).astype(np.int16)
                faults = _faults(signals, options)
                found.append(Window(footage, segment.prompt, start, form.frames, signals, thumbs, faults))
    return sorted(found, key=lambda window: (window.start, window.frames, window.prompt))


def _outside(footage: Footage, segment: Segment, fps: float) -> Window:
    """What stands for a segment in which no frame lies."""
    import numpy as np

    length = len(footage.stamps)
    end = "its end" if segment.end_s is None else f"{segment.end_s:g} s"
    reason = f"outside: no frame from {segment.start_s:g} s to {end}, the video has {length / fps:g} s"
    start = min(length, math.ceil(segment.start_s * fps - SLACK))
    return Window(footage, segment.prompt, start, 0, {}, np.empty(0, np.int16), (reason,))


def _shots(analysis: Analysis, segment: Segment, fps: float, threshold: float) -> Iterator[tuple[int, int]]:
    """(first frame, frame after the last) of each shot within a segment."""
    first = min(len(analysis), math.ceil(segment.start_s * fps - SLACK))
    end = len(analysis)
    if segment.end_s is not None:
        end = min(end, math.floor(segment.end_s * fps + SLACK))
    cuts = [k for k in (analysis.cut >= threshold).nonzero()[0].tolist() if first < k < end]
    yield from ((start, stop) for start, stop in pairwise([first, *cuts, end]) if stop > start)


def _measured(analysis: Analysis, start: int, form: Form) -> dict[str, float]:
    """The signals of a window. Changes count within it: that of its first frame belongs to the one before."""
    end = start + form.frames
    change = analysis.change[start + 1 : end]
    width, height = analysis.size
    scale = max(form.width / width, form.height / height)
    visible = form.width * form.height / (width * height * scale * scale)
    values = {
        "cut": max(analysis.cut[start + 1 : end].tolist(), default=0.0),
        "freeze_s": _longest_still(change) / form.fps,
        "black": float((analysis.black[start:end] >= BLACK).mean()),
        "blur": float(analysis.blur[start:end].mean(dtype="float64")),
        "motion": float(change.mean(dtype="float64")) if len(change) else 0.0,
        "visible": visible,
    }
    return {name: round(value, 4) for name, value in values.items()}


def _longest_still(change: "Floats") -> int:
    """How many steps from frame to frame the picture stands still at most, one after another."""
    longest = run = 0
    for still in (change < STILL).tolist():
        run = run + 1 if still else 0
        longest = max(longest, run)
    return longest


def _faults(signals: dict[str, float], options: Preprocess) -> tuple[str, ...]:
    """What is wrong with a window by its own signals, in words."""
    faults = []
    if signals["freeze_s"] > options.max_freeze:
        faults.append(f"freeze: the picture stands still for {signals['freeze_s']:g} s")
    if signals["black"] > options.max_black:
        faults.append(f"black: {signals['black']:.0%} of its frames")
    if signals["blur"] > options.max_blur:
        faults.append(f"blur: {signals['blur']:g}")
    if signals["motion"] < options.min_motion:
        faults.append(f"motion: only {signals['motion']:g} % of white from frame to frame")
    return tuple(faults)


def drop_copies(windows: Sequence[Window], form: Form, options: Preprocess) -> list[Window]:
    """The windows with those marked that look like an earlier good one everywhere; in their order.

    What counts is the part that differs most: another moment before the same fixed camera differs a lot in a small
    part, the same moment in another size or quality a little everywhere.

    Windows of one video that share frames are not compared: they overlap because `--stride` or the labels say so.
    """
    import numpy as np

    seen: list[Window] = []
    size = max((len(window.thumbs) for window in windows), default=0)
    thumbs = np.empty((len(windows), size), np.int16)
    quarters = np.empty((len(windows), size // (THUMB_PX // 2) ** 2))
    found = []
    for window in windows:
        mine = window.thumbs
        if not len(mine):
            found.append(window)
            continue
        # A mean cannot differ more than the part that differs most: few others are left to compare with.
        rough = mine.reshape(-1, 2, THUMB_PX // 2, 2, THUMB_PX // 2).mean(axis=(2, 4)).reshape(-1)
        near = (np.abs(quarters[: len(seen)] - rough).max(axis=1) < options.min_difference).nonzero()[0]
        near = np.array([other for other in near.tolist() if not _overlap(window, seen[other])], int)
        differences = np.abs(thumbs[near] - mine).max(axis=1)
        if len(differences) and differences.min() < options.min_difference:
            nearest = int(differences.argmin())
            window = _copy(window, seen[int(near[nearest])], int(differences[nearest]), form)
        if not window.reasons:
            thumbs[len(seen)], quarters[len(seen)] = mine, rough
            seen.append(window)
        found.append(window)
    return found


def _overlap(one: Window, other: Window) -> bool:
    """Whether two windows share frames."""
    same = one.footage.source.digest == other.footage.source.digest
    return same and one.start < other.end and other.start < one.end


def _copy(window: Window, first: Window, difference: int, form: Form) -> Window:
    """The window, marked as a copy of an earlier one."""
    reason = f"copy: nowhere more than {difference} grey levels from {first.name(form)}"
    signals = window.signals | {"difference": float(difference)}
    return replace(window, signals=signals, reasons=(*window.reasons, reason))


def reason_counts(windows: Sequence[Window]) -> dict[str, int]:
    """How many windows each kind of reason speaks against, most first."""
    kinds = Counter(reason.partition(":")[0] for window in windows for reason in window.reasons)
    return dict(sorted(kinds.items(), key=lambda kind: (-kind[1], kind[0])))


def held_out(digests: Sequence[str], share: float, seed: int) -> set[str]:
    """The contents whose clips go to validation: drawn by a hash of seed and content, so that names do not count.

    At least one of several, and never all; of one video none, because training would be left without.

    >>> len(held_out([f"{n:064x}" for n in range(20)], 0.1, 42)), held_out(["a"], 0.5, 0), len(held_out("ab", 0.01, 0))
    (2, set(), 1)
    """
    from hashlib import sha256

    unique = set(digests)
    if share == 0 or len(unique) < 2:
        return set()
    drawn = sorted(unique, key=lambda digest: sha256(f"{seed}:{digest}".encode()).digest())
    return set(drawn[: min(len(drawn) - 1, max(1, round(share * len(drawn))))])
