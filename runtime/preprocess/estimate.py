"""How many clips there may be, how large they are and how long it takes: said and compared with the disk beforehand."""

import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from wangen.generator.errors import WangenError, bytes_text, duration_text, many
from wangen.generator.files import nearest_existing
from wangen.runtime.decoders.pyav import shown_frames, upright
from wangen.runtime.media import fit
from wangen.runtime.preprocess.analysis import analyse
from wangen.runtime.preprocess.form import Form, Place, write_clip
from wangen.runtime.preprocess.videos import Known, Video

PROBE_FRAMES = 32
"""Of a video that are read and written on trial: half a second to two seconds of work."""
TRIALS = 3
"""So many videos are tried, until one can be read."""
SPARE_BYTES = 200_000_000
"""That stay free on the disk."""
PICTURE_BYTES_S = 10_000
"""What is kept of a second of a video for the contact sheet and the next run, about."""


@dataclass(frozen=True)
class Estimate:
    """What a run costs at most: every window is kept.

    Attributes:
        footage_s: seconds of video.
        clips: how many, if no cut lies in the way and nothing is dropped.
        bytes_per_clip: size of a clip.
        num_bytes: on the disk.
        seconds: how long it takes.
    """

    footage_s: float
    clips: int
    bytes_per_clip: int
    num_bytes: int
    seconds: float

    def words(self, form: Form) -> str:
        """For people."""
        most = f"at most {many(self.clips, 'clip')} of {form.words()}, {bytes_text(self.bytes_per_clip)} each"
        cost = f"{bytes_text(self.num_bytes)} in all, about {duration_text(self.seconds)}"
        return f"{duration_text(self.footage_s)} of video: {most}, {cost}"


@dataclass(frozen=True)
class _Trial:
    """What a few frames of a video cost: seconds and bytes, for each frame."""

    reading_s: float
    cutting_s: float
    num_bytes: float


def estimate(videos: Sequence[Known], form: Form, num_workers: int) -> Estimate:
    """Measure a few frames of a video and reckon what all of them take.

    Args:
        videos: all that will be worked on; at least one.
        form: of the clips.
        num_workers: how many are worked on at a time.
    """
    lengths = [(item.video, item.source.facts, math.ceil(item.source.facts.duration_s * form.fps)) for item in videos]
    frames = sum(count for *_, count in lengths)
    clips = sum(_windows(count, video, form) for video, _, count in lengths)
    # The one with most pixels takes the longest: the estimate should rather be too long.
    largest = sorted(lengths, key=lambda length: (-length[1].width * length[1].height, length[0].name))[:TRIALS]
    trials = (_try(video.path, form) for video, *_ in largest)
    trial = next(filter(None, trials), _Trial(0.0, 0.0, 0.0))
    per_clip = form.npz_bytes if form.format == "npz" else round(trial.num_bytes * form.frames)
    workers = min(num_workers, os.cpu_count() or 1)
    work_s = frames * trial.reading_s + clips * form.frames * trial.cutting_s
    kept = clips * per_clip + round(PICTURE_BYTES_S * frames / form.fps)
    return Estimate(frames / form.fps, clips, per_clip, kept, work_s / workers)


def _windows(count: int, video: Video, form: Form) -> int:
    """How many windows a video of so many frames has at most."""
    spans = []
    for segment in video.segments:
        end = count if segment.end_s is None else min(count, int(segment.end_s * form.fps))
        spans.append(max(0, end - int(segment.start_s * form.fps)))
    return sum((span - form.frames) // form.stride + 1 for span in spans if span >= form.frames)


def _try(path: Path, form: Form) -> _Trial | None:
    """Read and write the first frames of a video, and see what it takes; None where it cannot be read."""
    try:
        started = time.monotonic()
        count = len(analyse(path, form.fps, lambda _: None, PROBE_FRAMES))
        read = time.monotonic()
        frames = [np.asarray(fit(upright(frame), (form.width, form.height)))
                  for frame in islice(shown_frames(path, form.fps), count)]  # fmt: skip
        with TemporaryDirectory(prefix="wangen-") as folder:
            target = Path(folder) / f"trial.{form.format}"
            write_clip(target, frames, form)
            size = target.stat().st_size
    except WangenError:  # a broken video: what is wrong is said when it is its turn
        return None
    return _Trial((read - started) / count, (time.monotonic() - read) / count, size / count)


def require_space(needed: Estimate, form: Form, place: Place) -> None:
    """Refuse a run that would fill the disk, with the numbers.

    What the folder holds already counts as there: those clips are not written again.

    Raises:
        WangenError: not enough is free.
    """
    there = sum(path.stat().st_size for path in place.clips.glob(f"*.{form.format}")) if place.clips.is_dir() else 0
    missing = needed.num_bytes - there + SPARE_BYTES
    free = shutil.disk_usage(nearest_existing(place.folder) or place.folder).free
    if missing > free:
        smaller = "--format mp4, " if form.format == "npz" else "a higher --crf, "
        raise WangenError(
            f"{many(needed.clips, 'clip')} may need {bytes_text(missing)} ({bytes_text(needed.bytes_per_clip)} each, "
            f"{bytes_text(SPARE_BYTES)} stay free), {bytes_text(free)} are free",
            where=str(place.folder),
            cure=f"free space, or give {smaller}a longer --stride or another --output",
        )
