"""Windows -> clip files: each video is entered near its windows, and the frames are those that the analysis named."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen.generator.errors import WangenError
from wangen.generator.files import remove, write_whole
from wangen.generator.geometry import manner
from wangen.generator.videos import open_video
from wangen.runtime.decoders.pyav import as_watched, shown_frames
from wangen.runtime.media import fit
from wangen.runtime.preprocess.analysis import NO_STAMP, Tell
from wangen.runtime.preprocess.candidates import Footage, Window
from wangen.runtime.preprocess.form import Form, Place, write_clip

if TYPE_CHECKING:
    from wangen.runtime.clips import Frame

VERSION = 3
"""Raised when the same windows would give other bytes."""
JOB_FRAMES = 400
"""About so many frames are cut in one go: enough that entering the video costs little, few enough to share out."""
PREROLL_S = 2.0
"""A video is entered so long before what is wanted: the first frames after a seek may lack what they refer to."""


@dataclass(frozen=True)
class Job:
    """Clips of one video that are cut in one go.

    Attributes:
        footage: the video.
        starts: first frames of the clips, rising.
        names: of their files.
    """

    footage: Footage
    starts: tuple[int, ...]
    names: tuple[str, ...]


def clip_key(window: Window, form: Form) -> str:
    """What decides a clip's bytes, as a digest: content, frames, form, and the way of writing it."""
    crf = form.crf if form.format == "mp4" else None
    source = window.footage.source
    parts = [VERSION, source.digest, window.start, form.frames, form.fps, form.width, form.height, crf]
    unusual = manner(source.facts, form.fps)
    return sha256(json.dumps([*parts, unusual] if unusual else parts).encode()).hexdigest()


def is_made(window: Window, form: Form, place: Place) -> bool:
    """Whether a window's clip is there, whole and of this form: so its record says, and it has the recorded size."""
    name = window.name(form)
    try:
        record = json.loads(place.record(name).read_bytes())
        num_bytes = place.clip(name).stat().st_size
        return bool(record == {"key": clip_key(window, form), "bytes": num_bytes})
    except (OSError, ValueError, RecursionError):
        return False


def jobs_of(windows: Sequence[Window], form: Form) -> list[Job]:
    """The windows in groups of one video, by start; several prompts of the same frames are one clip."""
    jobs = []
    for _, members in groupby(windows, key=lambda window: window.footage.source.digest):
        unique = sorted({window.start: window for window in members}.values(), key=lambda window: window.start)
        group: list[Window] = []
        for window in unique:
            if group and window.end - group[0].start > max(JOB_FRAMES, form.frames):
                jobs.append(_job(group, form))
                group = []
            group.append(window)
        jobs.append(_job(group, form))
    return jobs


def _job(group: Sequence[Window], form: Form) -> Job:
    return Job(group[0].footage, tuple(window.start for window in group), tuple(window.name(form) for window in group))


def cut(job: Job, keys: Sequence[str], form: Form, place: Place, tell: Tell) -> int:
    """Write the clips of a job, each with its record, and return how many bytes they have.

    Raises:
        WangenError: the video cannot be decoded any more, or it changed while it was read.
        OSError: the disk refused.
    """
    footage, num_bytes, done = job.footage, 0, 0
    held: dict[int, Frame] = {}
    frames = _frames(footage, job.starts[0], job.starts[-1] + form.frames, form)
    for number, frame in enumerate(frames, job.starts[0]):
        held[number] = frame
        if number < job.starts[done] + form.frames - 1:
            continue
        start, path = job.starts[done], place.clip(job.names[done])
        _record(place, path.name, keys[done], None)  # so that a clip is known as ours from its first byte on
        clip = [held[index] for index in range(start, start + form.frames)]
        write_clip(path, clip, form)
        footage.source.require_unchanged(footage.video.path)
        size = path.stat().st_size
        _record(place, path.name, keys[done], size)
        num_bytes += size
        done += 1
        tell(1)
        first = job.starts[done] if done < len(job.starts) else number + 1
        held = {index: kept for index, kept in held.items() if index >= first}
    if done < len(job.starts):
        raise WangenError("ends before the frames that it had", where=str(footage.video.path),
                          cure="run the same line again when nothing writes to it any more")  # fmt: skip
    return num_bytes


def _record(place: Place, name: str, key: str, num_bytes: int | None) -> None:
    """Say what a clip is made of, and its size once it is whole.

    Raises:
        OSError: the disk refused, which is no fault of the video.
    """
    write_whole(place.record(name), [json.dumps({"key": key, "bytes": num_bytes}).encode()])


def _frames(footage: Footage, first: int, end: int, form: Form) -> Iterator["Frame"]:
    """Frames `first … end-1` of a video at the clips' rate, upright, of the clips' size: (H, W, 3) uint8."""
    import numpy as np

    last: Any = None
    for frame in _entered(footage, first, end, form.fps):
        if frame is not last:
            last, made = frame, np.asarray(fit(as_watched(frame, footage.aspect), (form.width, form.height)))
        yield made


def _entered(footage: Footage, first: int, end: int, fps: int) -> Iterator[Any]:
    """PyAV's frames `first … end-1`, from a place shortly before them; from the start where the file allows no other.

    A frame is known by its time stamp: whatever a seek led to, no other is taken for it.
    """
    stamps = footage.stamps[first:end].tolist()
    if NO_STAMP not in stamps:
        for frame in _by_stamp(footage.video.path, stamps):
            yield frame
            first += 1
    if first < end:
        yield from islice(shown_frames(footage.video.path, fps), first, end)


def _by_stamp(path: Path, stamps: Sequence[int]) -> Iterator[Any]:
    """PyAV's frames with these time stamps, which rise; ends early when one does not come whole after the seek.

    Of frames with one time stamp the last is meant: none of the others is ever on screen.
    """
    import av

    wanted = 0
    try:
        with open_video(path) as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            preroll = round(PREROLL_S / stream.time_base) if stream.time_base else 0
            container.seek(stamps[0] - preroll, stream=stream)
            for stamp, alike in groupby(container.decode(stream), key=lambda frame: frame.pts):
                frame = deque(alike, maxlen=1).pop()
                while wanted < len(stamps) and stamp == stamps[wanted]:
                    if frame.is_corrupt:
                        return
                    yield frame
                    wanted += 1
                if wanted == len(stamps) or (stamp is not None and stamp > stamps[wanted]):
                    return
    except (av.FFmpegError, OSError, ValueError):  # reading from the start will say what is wrong, if anything is
        return


def stale(windows: Sequence[Window], form: Form, place: Place) -> list[str]:
    """The names of clips of ours, whole or begun, that are none of these windows."""
    wanted = {window.name(form) for window in windows}
    ours = (record.name.removesuffix(".json") for record in sorted((place.records / "clips").glob("*.json")))
    return [name for name in ours if name not in wanted]


def tidy(windows: Sequence[Window], form: Form, place: Place) -> int:
    """Remove the clips of other settings, and what killed runs left half-written; returns how many clips.

    Only files that a record says are ours go.

    Raises:
        OSError: the disk refused.
    """
    gone = 0
    for name in stale(windows, form, place):
        gone += place.clip(name).is_file()
        remove(place.clip(name))
        remove(place.record(name))
    for folder in (place.clips, place.records, place.records / "clips", place.records / "videos", place.folder):
        for left in folder.glob(".*-" + "[0-9a-f]" * 24 + ".tmp"):
            remove(left)
    return gone
