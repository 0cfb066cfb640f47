"""What a video shows, frame by frame: the signals of ffmpeg's filters, and small pictures.

The video is decoded once, at the clips' frame rate, by the rule that clips are cut by; the ffmpeg of imageio-ffmpeg
gets those frames, small and grey, through a pipe. So what is said of frame k is said of frame k of the clips, whatever
the video's own rate, time stamps and rotation are.
"""

import json
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

from wangen.generator.errors import WangenError
from wangen.generator.files import write_whole
from wangen.generator.npz import HEADERS
from wangen.runtime.decoders.pyav import as_watched, pixel_aspect, shown_frames

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    Floats = np.ndarray[Any, np.dtype[np.float32]]
    Stamps = np.ndarray[Any, np.dtype[np.int64]]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

VERSION = 2
"""Raised when the same video would be described otherwise: what older versions found out is found out again."""
SIDE_PX = 240
"""The shorter side of the frames that the filters see, at most."""
THUMB_PX = 16
PICTURE_PX = 160
"""The longer side of the pictures of the contact sheet."""
NO_STAMP = -1

_FILTERS = "scdet=threshold=100,blackframe=amount=0,blurdetect,metadata=mode=print:file=-"
_KEYS = {"lavfi.scd.score": "cut", "lavfi.scd.mafd": "change", "lavfi.blackframe.pblack": "black", "lavfi.blur": "blur"}


@dataclass(frozen=True)
class Analysis:
    """What is known of the N frames that a video has at the clips' rate.

    Attributes:
        stamps: (N,) int64: the presentation time stamp of the frame on screen, in the stream's ticks; `NO_STAMP`
            where the file has none.
        cut: (N,) scdet's score, 0 to 100: how suddenly the picture changed since the frame before.
        change: (N,) mean difference from the frame before, in percent of white.
        black: (N,) share of pixels that are nearly black, in percent.
        blur: (N,) blurdetect's mean width of edges, in pixels of the small frame; 0 where there are no edges.
        thumbs: (N, 16, 16) uint8, the frame in grey.
        pictures: JPEG of frames 0, `every`, 2 `every` …, upright.
        every: frames from one picture to the next.
        aspect: width of a stored pixel as a part of its height; 1 but for DVD, HDV and their like.
        size: (width, height) of the frames as they are watched.
    """

    stamps: "Stamps"
    cut: "Floats"
    change: "Floats"
    black: "Floats"
    blur: "Floats"
    thumbs: "Bytes"
    pictures: tuple[bytes, ...]
    every: int
    aspect: float
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.stamps)


class StoppedError(Exception):
    """The run was asked to stop while a video was read."""


Tell = Callable[[int], None]
"""Called with how many more frames are done; it may raise `StoppedError`."""


def find_ffmpeg() -> str:
    """The ffmpeg that imageio-ffmpeg brings, or that IMAGEIO_FFMPEG_EXE names; it has the filters that are used.

    Raises:
        WangenError: there is none, or it lacks a filter.
    """
    import imageio_ffmpeg

    cure = "install ffmpeg 5.1 or newer, and name it in the environment variable IMAGEIO_FFMPEG_EXE"
    try:
        ffmpeg = str(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError:
        found = "imageio-ffmpeg has no ffmpeg for this system"
        raise WangenError(found, where=str(imageio_ffmpeg.__file__), cure=cure) from None
    try:
        answer = subprocess.run([ffmpeg, "-hide_banner", "-filters"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise WangenError(f"ffmpeg cannot be run: {error.strerror}", where=ffmpeg, cure=cure) from None
    known = answer.stdout.split()
    if lacking := [name for name in ("scdet", "blackframe", "blurdetect", "metadata") if name not in known]:
        raise WangenError(f"this ffmpeg has no filter {', '.join(lacking)}", where=ffmpeg, cure=cure)
    return ffmpeg


def analyse(path: Path, fps: int, tell: Tell, limit: int | None = None) -> Analysis:
    """Read a video to its end, or its first `limit` frames at `fps`.

    Raises:
        WangenError: it cannot be decoded, or ffmpeg failed.
    """
    import numpy as np

    seen = _Seen(max(1, fps // 2), pixel_aspect(path))
    signals = _signals(seen.look(islice(shown_frames(path, fps), limit), tell), path)
    if len(signals) != len(seen.stamps):
        raise WangenError(
            f"ffmpeg described {len(signals)} of {len(seen.stamps)} frames",
            where=str(path),
            cure="free memory and run the same line again",
        )
    columns = {name: np.array([values.get(key, 0.0) for values in signals], np.float32) for key, name in _KEYS.items()}
    columns["blur"] = np.nan_to_num(columns["blur"])
    stamps, thumbs = np.array(seen.stamps, np.int64), np.stack(seen.thumbs)
    pictures = tuple(seen.pictures)
    return Analysis(
        stamps, **columns, thumbs=thumbs, pictures=pictures, every=seen.every, aspect=seen.aspect, size=seen.size
    )


class _Seen:
    """What is kept of a video's frames while they go by."""

    def __init__(self, every: int, aspect: float) -> None:
        self.every = every
        self.aspect = aspect
        self.size = (0, 0)
        self.stamps: list[int] = []
        self.thumbs: list[Bytes] = []
        self.pictures: list[bytes] = []

    def look(self, frames: Iterable[Any], tell: Tell) -> "Iterator[Bytes]":
        """Keep what is wanted of each frame, and hand it on small and grey, all in the size of the first."""
        last: Any = None
        grey: Bytes | None = None
        for number, frame in enumerate(frames):
            if grey is None or frame is not last:
                last, grey = frame, _grey(frame, None if grey is None else grey.shape)
                thumb = _thumb(grey)
            if number % self.every == 0:
                image = as_watched(frame, self.aspect)
                self.size = self.size if number else image.size
                self.pictures.append(_picture(image))
            self.stamps.append(NO_STAMP if frame.pts is None else frame.pts)
            self.thumbs.append(thumb)
            tell(1)
            yield grey


def _grey(frame: Any, shape: tuple[int, ...] | None) -> "Bytes":
    """A frame small and in grey, (h, w) uint8; of this shape, once that of the first frame is known."""
    if shape:
        height, width = shape
    else:
        scale = min(1.0, SIDE_PX / min(frame.width, frame.height))
        width, height = (max(2, round(side * scale / 2) * 2) for side in (frame.width, frame.height))
    small: Bytes = frame.reformat(width=width, height=height, format="gray", interpolation="AREA").to_ndarray()
    return small


def _thumb(grey: "Bytes") -> "Bytes":
    import numpy as np
    from PIL import Image

    return np.asarray(Image.fromarray(grey).resize((THUMB_PX, THUMB_PX), Image.Resampling.BOX))


def _picture(image: "Image.Image") -> bytes:
    """A frame as a small JPEG."""
    image.thumbnail((PICTURE_PX, PICTURE_PX), reducing_gap=2.0)
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=70)
    return buffer.getvalue()


def _signals(frames: "Iterator[Bytes]", path: Path) -> list[dict[str, float]]:
    """What ffmpeg's filters say of each of these grey frames, all of one size.

    Raises:
        WangenError: there is no frame, or ffmpeg failed.
    """
    import imageio_ffmpeg

    first = next(frames, None)
    if first is None:
        raise WangenError("has no frames", where=str(path), cure="replace it or take it out")
    height, width = first.shape
    reading = ["-f", "rawvideo", "-pix_fmt", "gray", "-s", f"{width}x{height}", "-i", "-"]
    quietly = ["-hide_banner", "-nostats", "-loglevel", "error", "-threads", "1", "-filter_threads", "1"]
    words = [imageio_ffmpeg.get_ffmpeg_exe(), *quietly, *reading, "-vf", _FILTERS, "-f", "null", "-"]
    lines: list[str] = []
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdin is not None
    assert process.stdout is not None
    out = process.stdout
    reader = threading.Thread(target=lambda: lines.extend(line.decode("utf-8", "replace") for line in out))
    reader.start()
    try:
        with process.stdin as pipe:
            pipe.write(first.tobytes())
            for frame in frames:
                pipe.write(frame.tobytes())
        code = process.wait()
    except BrokenPipeError:
        code = process.wait() or 1
    finally:
        process.kill()  # it has ended, or the video failed and nobody needs it
        process.wait()
        reader.join()
        out.close()
    if code:
        raise WangenError(
            f"ffmpeg failed: {''.join(lines[-1:]).strip()}",
            where=str(path),
            cure="free memory and run the same line again",
        )
    return _parsed(lines)


def _parsed(lines: list[str]) -> list[dict[str, float]]:
    """The signals of each frame from what `metadata=print` writes.

    >>> _parsed(["frame:0    pts:0  pts_time:0", "lavfi.scd.score=1.500", "lavfi.blur=7.0", "frame:1 pts:1"])
    [{'lavfi.scd.score': 1.5, 'lavfi.blur': 7.0}, {}]
    """
    found: list[dict[str, float]] = []
    for line in lines:
        key, _, value = line.strip().partition("=")
        if key.startswith("frame:"):
            found.append({})
        elif key in _KEYS and found:
            found[-1][key] = float(value)
    return found


def save(analysis: Analysis, path: Path, unusual: Mapping[str, float]) -> None:
    """Write what was found out, whole or not at all, readable without pickle.

    Args:
        analysis: of the video.
        path: of the file.
        unusual: how the video is read otherwise than others are, as `geometry.manner` says.

    Raises:
        OSError: the disk refused.
    """
    import numpy as np

    ends = np.cumsum([len(picture) for picture in analysis.pictures], dtype=np.int64)
    joined = np.frombuffer(b"".join(analysis.pictures), np.uint8)
    buffer = BytesIO()
    columns = {name: getattr(analysis, name) for name in (*_KEYS.values(), "stamps", "thumbs")}
    columns |= {name: np.array(getattr(analysis, name)) for name in ("every", "aspect", "size")}
    if unusual:
        columns["unusual"] = np.array(json.dumps(unusual))
    np.savez(buffer, version=VERSION, ends=ends, pictures=joined, **columns)
    write_whole(path, [buffer.getvalue()])


def load(path: Path, unusual: Mapping[str, float] | None = None) -> Analysis | None:
    """What was found out by an earlier run; None when there is none that can be used.

    Args:
        path: of the file.
        unusual: how the video must have been read, as for `save`; None takes any way.
    """
    import numpy as np

    try:
        with HEADERS, np.load(path, allow_pickle=False) as file:
            read = json.loads(str(file["unusual"])) if "unusual" in file else {}
            if int(file["version"]) != VERSION or unusual not in (None, read):
                return None
            joined, ends = file["pictures"].tobytes(), file["ends"].tolist()
            pictures = tuple(joined[start:end] for start, end in zip([0, *ends], ends, strict=False))
            columns = {name: file[name] for name in (*_KEYS.values(), "stamps", "thumbs")}
            width, height = file["size"].tolist()
            every, aspect = int(file["every"]), float(file["aspect"])
            return Analysis(**columns, pictures=pictures, every=every, aspect=aspect, size=(width, height))
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile):
        return None
