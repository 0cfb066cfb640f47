"""Frames of a video by their numbers, from 0 in the order they are shown, without decoding all that lies before.

A long mp4, mov, mkv or webm is entered at the keyframe before the first frame that is wanted; which frame is which say
the time stamps of its packets (`decoders/stamps.py`). In other containers frames are counted from the start.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen.generator.errors import WangenError
from wangen.generator.npz import is_npz, read_npz
from wangen.generator.videos import open_video
from wangen.runtime.decoders.stamps import Stamps, stamps_of

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class StoredFrame:
    """Pixels (H, W, 3) uint8 in place of a frame of PyAV's."""

    pixels: Any
    rotation: int = 0

    @property
    def side_data(self) -> Mapping[str, Any]:
        """Nothing is said beside the pixels."""
        return {}

    def to_image(self) -> "Image.Image":
        """The picture in RGB."""
        from PIL import Image

        return Image.fromarray(self.pixels)


def numbered_frames(path: Path, numbers: range) -> Iterator[Any]:
    """PyAV's frames of these numbers, in their order.

    Args:
        path: the video, or `.npz`.
        numbers: ascending, not below 0.

    Raises:
        WangenError: the file cannot be decoded, or has not all of them; the frames before the fault have come by then.
    """
    number_found = 0
    for frame in _stored(path, numbers) if is_npz(path) else _decoded(path, numbers):
        yield frame
        number_found += 1
    if number_found < len(numbers):
        raise WangenError(f"frame {numbers[number_found]} cannot be read", where=str(path),
                          cure="copy the file again, or take out the lines that name it")  # fmt: skip


def undecodable(path: Path, error: BaseException) -> WangenError:
    """What is said of a media file that no decoder takes."""
    return WangenError(f"cannot be decoded: {error}", where=str(path), cure="replace it or take it out")


def _stored(path: Path, numbers: range) -> Iterator[StoredFrame]:
    frames, _ = read_npz(path)
    return map(StoredFrame, frames[numbers.start : numbers.stop : numbers.step])


def _decoded(path: Path, numbers: range) -> Iterator[Any]:
    """The frames, until one is missing."""
    import av

    try:
        stamps = stamps_of(path)
        if not stamps.frames:
            yield from _counted(path, numbers)
            return
        wanted = [stamps.frames[number] for number in numbers if number < len(stamps.frames)]
        position = 0
        for frame in _from_keyframe(path, stamps, wanted[0]) if wanted else ():
            if frame.pts is None or frame.pts > wanted[position]:
                return
            if frame.pts == wanted[position]:
                yield frame
                position += 1
                if position == len(wanted):
                    return
    except (av.FFmpegError, OSError, ValueError) as error:
        raise undecodable(path, error) from None


def _from_keyframe(path: Path, stamps: Stamps, wanted: int) -> Iterator[Any]:
    """Frames from the keyframe before a time on, or from the file's start where its container enters it too late."""
    before = bisect_right(stamps.keys, wanted) - 1
    for ticks in ([stamps.keys[before]] if before > 0 else []) + [None]:
        with open_video(path) as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            if ticks is not None:
                container.seek(ticks, stream=stream)
            frames = container.decode(stream)
            first = next(frames, None)
            if ticks is None or (first is not None and first.pts is not None and first.pts <= ticks):
                if first is not None:
                    yield first
                yield from frames
                return


def _counted(path: Path, numbers: range) -> Iterator[Any]:
    with open_video(path) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        for number, frame in enumerate(container.decode(stream)):
            if number in numbers:
                yield frame
            if number == numbers[-1]:
                return
