"""Videos and pictures in files, with the settings that made them inside, whole or not at all."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wangen.generator.errors import UsageError, WangenError, write_cure
from wangen.generator.files import remove_left, replace, temporary_beside
from wangen.generator.pictures import open_picture
from wangen.generator.videos import open_video
from wangen.runtime.clips import encode

if TYPE_CHECKING:
    import numpy as np

    Frames = np.ndarray[Any, np.dtype[np.uint8]]

KEY = "wangen"
"""The field of a file's metadata that holds the settings, as JSON."""

X264 = {"crf": "18", "threads": "1", "x264-params": "cpu-independent=1"}
"""For bytes that depend on nothing but the frames: x264's fast paths read beyond the picture's edge, so that the same
frames of 80x64 gave other bytes in a tenth of the runs; `cpu-independent` switches them off, and one thread keeps the
order."""


def write_media(
    path: Path,
    video: torch.Tensor,
    fps: int,
    metadata: Mapping[str, str],
    place: Callable[[Path], Path] | None = None,
) -> Path:
    """Write frames as an h264 mp4, or a single one as png, whole or not at all.

    Args:
        path: `.mp4` or `.png`.
        video: (3, T, H, W) in [-1, 1].
        fps: frames per second.
        metadata: texts stored in the file.
        place: moves the whole file from its temporary name to where it belongs; None: over what is at `path`.

    Returns:
        The file's name.

    Raises:
        WangenError: the disk refused, or the encoder did.
    """
    return write_frames(path, pixels_of(video), fps, metadata, place)


def pixels_of(video: torch.Tensor) -> "Frames":
    """(3, T, H, W) in [-1, 1] -> (T, H, W, 3) uint8."""
    found: Frames = (
        ((video.float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 3, 0).numpy()
    )
    return found


def write_frames(
    path: Path,
    frames: "Frames",
    fps: int,
    metadata: Mapping[str, str],
    place: Callable[[Path], Path] | None = None,
) -> Path:
    """As `write_media`, of frames (T, H, W, 3) uint8.

    Raises:
        WangenError: the disk refused, or the encoder did.
    """
    temporary = temporary_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left(path)
        if path.suffix.lower() == ".png":
            _write_png(temporary, frames[0], metadata)
        else:
            encode(temporary, frames, fps, X264, metadata=metadata)
        if place:
            return place(temporary)
        replace(temporary, path)
    except OSError as error:
        raise WangenError(f"cannot write: {error.strerror}", where=str(path), cure=write_cure(error)) from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    return path


def _write_png(path: Path, frame: Any, metadata: Mapping[str, str]) -> None:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for key, value in metadata.items():
        info.add_itxt(key, value)
    Image.fromarray(frame).save(path, "PNG", pnginfo=info)


def read_settings(path: Path, flag: str) -> dict[str, Any]:
    """The settings inside a file that was made here.

    Args:
        path: `.mp4` or `.png`.
        flag: that it was given to, for messages.

    Raises:
        UsageError: the file cannot be read, or holds none.
    """
    import av

    try:
        if path.suffix.lower() == ".png":
            with open_picture(path) as image:
                text = str(image.info.get(KEY, ""))
        else:
            with av.open(str(path)) as container:
                text = container.metadata.get(KEY, "")
    except (OSError, av.FFmpegError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} cannot be read: {getattr(error, 'strerror', None) or error}", where=str(path),
                         cure="give an .mp4 or .png that wangen generate made") from None  # fmt: skip
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise UsageError(f"{flag}: this file holds no settings of wangen", where=str(path),
                         cure="give the file as it was made: converting a video drops them")  # fmt: skip
    return settings


def read_frames(path: Path) -> "Frames":
    """The frames of an mp4 or png, (T, H, W, 3) uint8.

    Raises:
        WangenError: it cannot be decoded.
    """
    import av
    import numpy as np

    try:
        if path.suffix.lower() == ".png":
            with open_picture(path) as image:
                return np.asarray(image.convert("RGB"))[None]
        with open_video(path) as container:
            return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    except (av.FFmpegError, OSError, ValueError, IndexError) as error:  # the last: no picture in the container
        raise WangenError(f"cannot be decoded: {error}", where=str(path), cure="delete it and run again") from None
