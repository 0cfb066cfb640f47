"""What a decoder is, and how one that is not PyAV comes to the same frames as PyAV."""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

from wangen.generator.npz import is_npz
from wangen.generator.videos import aspect_of, flip_of, open_video
from wangen.runtime.decoders.pyav import PYAV
from wangen.runtime.decoders.stamps import Stamps, stamps_of
from wangen.runtime.numbered_frames import undecodable
from wangen.runtime.sources import FileState, state_of

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

log = logging.getLogger("wangen")

T = TypeVar("T")


class FrameDecoder(Protocol):
    """Gives the frames of videos, upright and in RGB. Several threads may ask it at once."""

    @property
    def name(self) -> str:
        """As `--decoder` calls it."""

    def shown(self, path: Path, span: range, fps: float, source_fps: float | None) -> Iterator["Image.Image"]:
        """The frames on screen at k / fps seconds after the first one, for each k of `span`; fewer where it ends.

        Args:
            path: the video, or `.npz`.
            span: ascending by 1, from 0 or later.
            fps: frames per second.
            source_fps: the video's frame rate, when its own time stamps are wrong.

        Raises:
            NotTakenError: this decoder leaves the file to PyAV.
            WangenError: the file cannot be decoded.
        """

    def numbered(self, path: Path, numbers: range) -> Iterator["Image.Image"]:
        """The frames of these numbers, from 0 as they are shown.

        Raises:
            NotTakenError: this decoder leaves the file to PyAV.
            WangenError: the file cannot be decoded, or has not all of them.
        """


class NotTakenError(Exception):
    """Why a decoder leaves a file to PyAV."""


class First(NamedTuple):
    """What the first frame says: its stamp in ticks, degrees to turn it by, most bits of a colour, if it is flipped,
    and the width of a pixel as a part of its height.
    """

    pts: int | None
    rotation: int
    bits: int
    flipped: bool = False
    aspect: float = 1.0


class ByNumber(ABC):
    """A decoder that is asked for frames by their numbers, which the packets' stamps and PyAV's rules say.

    Only what would give other frames or other colours is left to PyAV: containers without stamps, a first packet that
    gives no frame (an edit inside an open group of pictures), colours of more than 8 bits, which libraries convert
    differently, mirrored pictures, pixels that are not square, and a frame whose own stamp is not the one that was
    asked for.
    """

    name: ClassVar[str]
    errors: ClassVar[tuple[type[Exception], ...]] = (RuntimeError, IndexError, ValueError)
    """What the library raises for a file that it cannot take."""
    at_a_time: ClassVar[int] = 8
    """Frames that are in memory at once, whole."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._lock = Lock()

    @abstractmethod
    def decode(
        self, path: Path, stamps: Stamps, rotation: int, numbers: Sequence[int]
    ) -> Iterator[tuple[float, "np.ndarray[Any, np.dtype[np.uint8]]"]]:
        """For each number the stamp of the frame that came, in ticks, and its pixels: (H, W, 3) uint8, upright.

        Args:
            path: the video.
            stamps: of its frames.
            rotation: degrees by which the file says that its frames be turned, counter-clockwise.
            numbers: ascending, each once.

        Raises:
            NotTakenError: the file is not for this decoder.
            MemoryError: the memory is full.
        """

    def shown(self, path: Path, span: range, fps: float, source_fps: float | None) -> Iterator["Image.Image"]:
        """As `FrameDecoder.shown`."""
        if is_npz(path):
            return PYAV.shown(path, span, fps, source_fps)
        stamps, rotation = self._look(path)
        return self._pictures(path, stamps, rotation, stamps.shown(span, fps, source_fps))

    def numbered(self, path: Path, numbers: range) -> Iterator["Image.Image"]:
        """As `FrameDecoder.numbered`."""
        if is_npz(path):
            return PYAV.numbered(path, numbers)
        stamps, rotation = self._look(path)
        if numbers and numbers[-1] >= len(stamps.frames):
            return PYAV.numbered(path, numbers)  # says which is missing
        return self._pictures(path, stamps, rotation, numbers)

    def say(self, path: Path, reason: str) -> None:
        """Warn that a file is left to PyAV; once for each reason."""
        with self._lock:
            if reason in self._said:
                return
            self._said.add(reason)
        log.warning("  %s: not decoded by %s but by PyAV: %s; further files like it are not named",
                    path.name, self.name, reason)  # fmt: skip

    def _look(self, path: Path) -> tuple[Stamps, int]:
        """The stamps of a file that this decoder may take, and its rotation in degrees."""
        import av

        try:
            stamps = stamps_of(path)
            if not stamps.frames:
                raise NotTakenError("its container does not say when each frame is shown")
            first = _first(path, state_of(path))
        except (av.FFmpegError, OSError, ValueError) as error:
            raise undecodable(path, error) from None
        if first.pts != stamps.frames[0]:
            raise NotTakenError("its first packet gives no frame")
        if first.bits > 8:
            raise NotTakenError("its colours have more than 8 bits")
        if first.flipped:
            raise NotTakenError("its picture is to be mirrored")
        if first.aspect != 1.0:
            raise NotTakenError("its pixels are not square")
        return stamps, first.rotation

    def _pictures(self, path: Path, stamps: Stamps, rotation: int, numbers: Sequence[int]) -> Iterator["Image.Image"]:
        from PIL import Image

        times = Counter(numbers)
        try:
            for number, (stamp, pixels) in zip(times, self.decode(path, stamps, rotation, list(times)), strict=True):
                if abs(stamp - stamps.frames[number]) > 0.5:
                    raise NotTakenError("a frame came whose time stamp is another than asked for")
                yield from [Image.fromarray(pixels)] * times[number]
        except self.errors as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise NotTakenError(f"it fails with {reason!r}") from error


@lru_cache(maxsize=16)
def _first(path: Path, _state: FileState | None) -> First:
    """What the first frame of a file in this state says; a file without frames has none of 0 bits."""
    with open_video(path) as container:
        stream = container.streams.video[0]
        frame = next(container.decode(stream), None)
        if frame is None:
            return First(None, 0, 0)
        bits = max(component.bits for component in frame.format.components)
        return First(frame.pts, frame.rotation, bits, bool(flip_of(frame)), aspect_of(stream))


def decoded(decoder: FrameDecoder, path: Path, load: Callable[[FrameDecoder], T]) -> T:
    """What `load` makes of a decoder's frames; of a file that the decoder leaves to PyAV, of PyAV's.

    A file never has frames of two decoders.
    """
    try:
        return load(decoder)
    except NotTakenError as reason:
        if isinstance(decoder, ByNumber):
            decoder.say(path, str(reason))
        return load(PYAV)
