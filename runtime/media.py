"""Files -> frames: decoding, resizing, and resampling clips to the model's frame rate.

Shapes: C channels (3), T frames, H height, W width, in pixels; values are uint8 until a step scales them to [-1, 1].
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen.generator.errors import WangenError

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    Frames = np.ndarray[Any, np.dtype[np.uint8]]

EXACT_S = 5e-7
"""Time stamps that differ by less are the same: this absorbs the rounding of floating point."""
COARSE_S = 0.002
"""A longer tick is the duration of a frame, and stamps in it are exact; a shorter one is a clock that rounds them."""


def load_image(path: Path, size: tuple[int, int]) -> "Frames":
    """An image as (3, 1, H, W) uint8, upright, transparency over white, covering `size` and cropped at the centre.

    Raises:
        WangenError: the file cannot be decoded.
    """
    import numpy as np
    from PIL import Image, ImageOps

    Image.init()  # before any thread opens a file: Pillow's own lazy registration is not safe between threads
    try:
        with Image.open(path) as image:
            frame = fit(_rgb(ImageOps.exif_transpose(image)), size)
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        struct.error,
        zlib.error,
        Image.DecompressionBombError,
    ) as error:
        raise _undecodable(path, error) from None
    return np.asarray(frame).transpose(2, 0, 1)[:, None]


def load_clip(
    path: Path, size: tuple[int, int], start: int, count: int, fps: int, source_fps: float | None = None
) -> "Frames":
    """Frames `start … start+count-1` at `fps` frames per second as (3, T, H, W) uint8.

    Frame k is the one on screen at k / fps seconds after the first, by presentation time stamp.

    Args:
        path: the video.
        size: (width, height) in pixels that each frame covers and is cropped to.
        start: first frame, counted at `fps`.
        count: number of frames.
        fps: the model's frame rate.
        source_fps: the video's frame rate, when its own time stamps are wrong.

    Raises:
        WangenError: the file cannot be decoded or has fewer frames.
    """
    import numpy as np

    frames = [np.asarray(fit(frame, size)) for frame in _resampled(path, start, count, fps, source_fps)]
    if len(frames) != count:
        raise WangenError(
            f"too short: frames {start} to {start + count - 1} at {fps} fps are needed, it ends before frame "
            f"{start + len(frames)}",
            where=str(path),
            cure="shorten target_frames, replace the file or take it out",
        )
    return np.stack(frames).transpose(3, 0, 1, 2)


def fit(image: "Image.Image", size: tuple[int, int]) -> "Image.Image":
    """Resize with Lanczos to cover (width, height), then crop the centre.

    >>> from PIL import Image
    >>> fit(Image.new("RGB", (300, 100)), (64, 48)).size
    (64, 48)
    """
    from PIL import Image

    if image.size == size:
        return image
    scale = max(size[0] / image.width, size[1] / image.height)
    width, height = max(size[0], round(image.width * scale)), max(size[1], round(image.height * scale))
    image = image.resize((width, height), Image.Resampling.LANCZOS)
    left, top = (width - size[0]) // 2, (height - size[1]) // 2
    return image.crop((left, top, left + size[0], top + size[1]))


def _rgb(image: "Image.Image") -> "Image.Image":
    """Any mode of Pillow's in RGB, 8 bits: transparency over white, 16 bits scaled (Pillow by itself would clip)."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int32).clip(0, 65535)
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _resampled(path: Path, start: int, count: int, fps: int, source_fps: float | None) -> Iterator["Image.Image"]:
    """The frames on screen at k / fps for k in start … start+count-1; fewer when the video ends before."""
    held: Any = None
    wanted = 0
    for time_s, frame in _timed(path, source_fps):
        while held is not None and wanted < start + count and wanted / fps < time_s:
            if wanted >= start:
                yield _upright(held)
            wanted += 1
        held = frame
        if wanted >= start + count:
            return


def _timed(path: Path, source_fps: float | None) -> Iterator[tuple[float, Any]]:
    """Each frame with the seconds from the first one to it, and at last (the end, None).

    The seconds are the earliest that the stamps allow: 62 or 63 ms of a container that counts in milliseconds stand
    for the 62.5 ms of 16 frames per second, and no frame may come late because its stamp was rounded up.
    """
    import av

    first_s = time_s = 0.0
    length_s = 1 / (source_fps or 25.0)
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise WangenError("has no video stream", where=str(path), cure="replace it or take it out")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            tick_s = float(stream.time_base or 0)
            slack_s = EXACT_S + (tick_s if tick_s < COARSE_S and not source_fps else 0.0)
            rate = source_fps or float(stream.average_rate or 25)
            number = -1
            for number, frame in enumerate(container.decode(stream)):
                # A stream without stamps (some AVI files) plays at its stated rate.
                time_s = number / rate if source_fps or frame.time is None else frame.time
                length_s = 1 / rate if source_fps or not frame.duration else frame.duration * tick_s
                first_s = time_s if number == 0 else first_s
                yield max(0.0, time_s - first_s - slack_s), frame
            if number >= 0:
                yield time_s - first_s + length_s - slack_s, None
    except (av.FFmpegError, OSError, ValueError) as error:
        raise _undecodable(path, error) from None


def _upright(frame: Any) -> "Image.Image":
    image: Image.Image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


def _undecodable(path: Path, error: BaseException) -> WangenError:
    return WangenError(f"cannot be decoded: {error}", where=str(path), cure="replace it or take it out")
