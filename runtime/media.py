"""Files -> frames: decoding, resizing, and resampling clips to the model's frame rate.

Shapes: C channels (3), T frames, H height, W width, in pixels; values are uint8 until a step scales them to [-1, 1].
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen.generator.errors import WangenError

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    Frames = np.ndarray[Any, np.dtype[np.uint8]]


def load_image(path: Path, size: tuple[int, int]) -> "Frames":
    """An image as (3, 1, H, W) uint8, upright, transparency over white, covering `size` and cropped at the centre.

    Raises:
        WangenError: the file cannot be decoded.
    """
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            frame = fit(_over_white(upright), size)
    except (OSError, SyntaxError, ValueError) as error:
        raise WangenError(f"cannot be decoded: {error}", where=str(path), cure="replace it or take it out") from None
    return np.asarray(frame).transpose(2, 0, 1)[:, None]


def load_clip(
    path: Path, size: tuple[int, int], start: int, count: int, fps: int, source_fps: float | None = None
) -> "Frames":
    """Frames `start … start+count-1` at `fps` frames per second as (3, T, H, W) uint8.

    Frame k is the one on screen at k / fps seconds after the first, by presentation time stamp.

    Raises:
        WangenError: the file cannot be decoded or has fewer frames.
    """
    import numpy as np

    frames = [np.asarray(fit(frame, size)) for frame in _resampled(path, start + count, fps, source_fps, start)]
    if len(frames) != count:
        raise WangenError(f"has {start + len(frames)} frames at {fps} fps, {start + count} are needed", where=str(path))
    return np.stack(frames).transpose(3, 0, 1, 2)


def fit(image: "Image.Image", size: tuple[int, int]) -> "Image.Image":
    """Resize with Lanczos to cover (width, height), then crop the centre. RGB out."""
    from PIL import Image

    image = image.convert("RGB")
    if image.size == size:
        return image
    scale = max(size[0] / image.width, size[1] / image.height)
    width, height = max(size[0], round(image.width * scale)), max(size[1], round(image.height * scale))
    image = image.resize((width, height), Image.Resampling.LANCZOS)
    left, top = (width - size[0]) // 2, (height - size[1]) // 2
    return image.crop((left, top, left + size[0], top + size[1]))


def _over_white(image: "Image.Image") -> "Image.Image":
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _resampled(path: Path, num_frames: int, fps: int, source_fps: float | None, start: int) -> Iterator["Image.Image"]:
    """The frames on screen at k / fps for k in start … num_frames-1; each is held until the next one's time."""
    import av

    wanted = 0
    held: av.VideoFrame | None = None
    first_s = 0.0
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            for number, frame in enumerate(container.decode(stream)):
                time_s = number / source_fps if source_fps else (frame.time or 0.0)
                if held is None:
                    first_s = time_s
                # the half microsecond absorbs the rounding of time bases
                while held is not None and wanted < num_frames and first_s + wanted / fps < time_s - 5e-7:
                    if wanted >= start:
                        yield _upright(held)
                    wanted += 1
                held = frame
                if wanted >= num_frames:
                    return
            while held is not None and wanted < num_frames:
                if wanted >= start:
                    yield _upright(held)
                wanted += 1
    except (av.FFmpegError, OSError) as error:
        raise WangenError(f"cannot be decoded: {error}", where=str(path), cure="replace it or take it out") from None


def _upright(frame: Any) -> "Image.Image":
    image: Image.Image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image
