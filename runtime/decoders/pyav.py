"""Decoding by PyAV, whose way of picking frames the other decoders follow."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen.generator.errors import WangenError
from wangen.generator.npz import is_npz, read_npz
from wangen.generator.pace import EXACT_S, pace_of, slack
from wangen.generator.videos import aspect_of, flip_of, open_video, square_size
from wangen.runtime.decoders.stamps import beat, ticks_as_shown
from wangen.runtime.numbered_frames import StoredFrame, numbered_frames, undecodable
from wangen.runtime.sources import FileState, state_of

if TYPE_CHECKING:
    from PIL import Image


class PyAV:
    """Takes every file; each frame is decoded and converted on the CPU."""

    name = "pyav"

    def shown(self, path: Path, span: range, fps: float, source_fps: float | None) -> Iterator["Image.Image"]:
        """As `FrameDecoder.shown`."""
        aspect = pixel_aspect(path)
        frames = islice(shown_frames(path, fps, source_fps), span.start, span.stop)
        return (as_watched(frame, aspect) for frame in frames)

    def numbered(self, path: Path, numbers: range) -> Iterator["Image.Image"]:
        """As `FrameDecoder.numbered`."""
        aspect = pixel_aspect(path)
        return (as_watched(frame, aspect) for frame in numbered_frames(path, numbers))


PYAV = PyAV()


def shown_frames(path: Path, fps: float, source_fps: float | None = None) -> Iterator[Any]:
    """PyAV's frame on screen at k / fps seconds after the first one, for k = 0, 1, … to the video's end.

    Of a video whose rate is nearly `fps`, the times are those of `pace_of`. A frame that is on screen for several k
    comes so many times, as one object.

    Raises:
        WangenError: the file cannot be decoded; the frames before the fault have come by then.
    """
    held: Any = None
    wanted = 0
    before_s = 0.0
    for time_s, frame, rate in timed(path, source_fps):
        pace, until_s = pace_of(fps, rate), time_s
        if frame is None and pace.within_s:  # what a file says of its last frame's length is often wrong
            until_s = before_s + 1 / rate
        within_s = 0.0 if frame is None else pace.within_s
        while held is not None and wanted / pace.fps + within_s < until_s:
            yield held
            wanted += 1
        held, before_s = frame, time_s


def timed(path: Path, source_fps: float | None) -> Iterator[tuple[float, Any, float]]:
    """Each frame with the seconds from the first one to it and the rate of `beat`, and at last (the end, None, rate).

    The seconds are the earliest that the stamps allow, as `slack` says.
    """
    if is_npz(path):
        yield from _timed_npz(path, source_fps)
        return
    import av

    first_s = time_s = 0.0
    length_s = 1 / (source_fps or 25.0)
    try:
        with open_video(path) as container:
            if not container.streams.video:
                raise WangenError("has no video stream", where=str(path), cure="replace it or take it out")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            tick_s = float(stream.time_base or 0)
            slack_s = slack(0.0 if source_fps else tick_s)
            own = source_fps or beat(path).rate
            rate = source_fps or float(stream.average_rate or 25)
            ticks = ticks_as_shown(path, container)
            number = -1
            for number, frame in enumerate(container.decode(stream)):
                frame.pts = None if ticks else frame.pts
                shown_s = ticks[min(number, len(ticks) - 1)] * tick_s if ticks else frame.time
                # A stream without stamps (some AVI files) plays at its stated rate.
                time_s = number / rate if source_fps or shown_s is None else shown_s
                length_s = 1 / rate if source_fps or not frame.duration else frame.duration * tick_s
                first_s = time_s if number == 0 else first_s
                yield max(0.0, time_s - first_s - slack_s), frame, own
            if number >= 0:
                yield time_s - first_s + length_s - slack_s, None, own
    except (av.FFmpegError, OSError, ValueError) as error:
        raise undecodable(path, error) from None


def _timed_npz(path: Path, source_fps: float | None) -> Iterator[tuple[float, Any, float]]:
    """As `timed`: the frames of a `.npz`, whose frame k is on screen from k / fps on."""
    frames, facts = read_npz(path)
    fps = source_fps or facts.fps
    for number, pixels in enumerate(frames):
        yield max(0.0, number / fps - EXACT_S), StoredFrame(pixels), fps
    yield len(frames) / fps - EXACT_S, None, fps


def upright(frame: Any) -> "Image.Image":
    """PyAV's frame in RGB, turned and mirrored as the file says."""
    from PIL.Image import Transpose

    image: Image.Image = frame.to_image()
    if flip := flip_of(frame):
        return image.transpose(Transpose[flip])
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


def as_watched(frame: Any, aspect: float) -> "Image.Image":
    """PyAV's frame in RGB, upright, with square pixels.

    Args:
        frame: with its stored pixels.
        aspect: of these, as `pixel_aspect` says.
    """
    image = upright(frame)
    if aspect == 1.0:
        return image
    from PIL.Image import Resampling

    return image.resize(square_size(image.size, frame.rotation, aspect), Resampling.LANCZOS)


def pixel_aspect(path: Path) -> float:
    """As `aspect_of`, of a video; 1 where it cannot be read."""
    return 1.0 if is_npz(path) else _pixel_aspect(path, state_of(path))


@lru_cache(maxsize=1024)
def _pixel_aspect(path: Path, _state: FileState | None) -> float:
    """That of a file in this state."""
    import av

    try:
        with open_video(path) as container:
            return aspect_of(container.streams.video[0]) if container.streams.video else 1.0
    except (av.FFmpegError, OSError, ValueError):  # decoding will say what is wrong
        return 1.0


def shown_at(path: Path, times_s: Sequence[float]) -> Iterator[Any]:
    """The frame on screen at each of these times, which ascend; after the end it is the last one."""
    held: Any = None
    wanted = 0
    for time_s, frame, _ in timed(path, None):
        while held is not None and wanted < len(times_s) and times_s[wanted] < time_s:
            yield held
            wanted += 1
        if wanted == len(times_s):
            return
        held = held if frame is None else frame
    yield from [held] * (len(times_s) - wanted)
