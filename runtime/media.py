"""Files -> frames: decoding, resizing, and resampling clips to the model's frame rate.

Shapes: C channels (3, or 1 of a mask), T frames, H height, W width, in pixels; values are uint8 until a step scales
them. Everything here may be called from several threads at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen.generator.dataset import DECODING_ERRORS, media_of, read_facts
from wangen.generator.errors import WangenError, many
from wangen.generator.manifests import read_manifest
from wangen.generator.npz import is_npz, read_npz
from wangen.generator.toml_values import WHITE
from wangen.runtime.numbered_frames import StoredFrame, numbered_frames, undecodable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image

    from wangen.runtime.samples import Sample

    Frames = np.ndarray[Any, np.dtype[np.uint8]]

EXACT_S = 5e-7
"""Time stamps that differ by less are the same: this absorbs the rounding of floating point."""
COARSE_S = 0.002
"""A longer tick is the duration of a frame, and stamps in it are exact; a shorter one is a clock that rounds them."""


def target_frames(sample: "Sample", *, first_only: bool = False) -> "Frames":
    """What is encoded of a sample: (3, T, H, W) uint8, T = 1 of an image; `first_only` gives the first frame alone.

    Raises:
        WangenError: the file cannot be decoded or has fewer frames.
    """
    return _cut(sample.item.path, sample, 1 if first_only else sample.count)


def control_frames(sample: "Sample", number: int) -> "Frames":
    """What is encoded of control media `number`, counted from 0: (3, T, H, W) uint8.

    Cut as the target is, or with a `control_resolution` whole and at a size of its own. A still picture stands for
    every frame.

    Raises:
        WangenError: the file cannot be decoded or has fewer frames.
    """
    path, size = sample.item.controls[number], sample.control_size(number)
    if size is None:
        return _cut(path, sample, sample.count)
    with _enough_memory(path, size, 1):
        return load_image(path, size, sample.entry.background_color, whole=True)


def mask_frames(sample: "Sample") -> "Frames":
    """The mask of a sample: (1, T, H, W) uint8, 255 where the item counts, cut as the target is.

    Resized bilinearly, and what is transparent counts as black. A still picture stands for every frame.

    Raises:
        ValueError: the sample has no mask.
        WangenError: the file cannot be decoded or has fewer frames.
    """
    if sample.item.mask is None:
        raise ValueError(f"{sample.name} has no mask")
    return _cut(sample.item.mask, sample, sample.count, grey=True)


def _cut(path: Path, sample: "Sample", count: int, *, grey: bool = False) -> "Frames":
    """Frames of a file of the sample: (3, T, H, W) uint8, or (1, T, H, W) in grey."""
    with _enough_memory(path, sample.size, count):
        if media_of(path) == "image":
            frame = load_image(path, sample.size, sample.entry.background_color, grey=grey)
            return frame.repeat(count, axis=1)
        if (excerpt := sample.item.excerpt) and path == sample.item.path:
            return load_numbered(path, sample.size, excerpt.numbers(sample.start, count))
        return load_clip(path, sample.size, sample.start, count, sample.fps, sample.entry.source_fps, grey=grey)


@contextmanager
def _enough_memory(path: Path, size: tuple[int, int], count: int) -> Iterator[None]:
    """Say what was being decoded when the memory is full.

    Raises:
        WangenError: in place of Python's own error.
    """
    try:
        yield
    except MemoryError:
        raise WangenError(
            f"out of memory decoding {many(count, 'frame')} of {size[0]}x{size[1]}",
            where=str(path),
            cure="use --num_workers 0 and --batch_size 1, or a lower resolution or fewer target_frames",
        ) from None


def load_image(
    path: Path, size: tuple[int, int], background: str = WHITE, *, grey: bool = False, whole: bool = False
) -> "Frames":
    """An image as (3, 1, H, W) uint8, upright, covering `size`, cropped at the centre; the first of an animation.

    Args:
        path: the image.
        size: (width, height) in pixels that it covers and is cropped to.
        background: the colour behind what is transparent, as `#rrggbb`.
        grey: as a mask: (1, 1, H, W), transparency over black, resized bilinearly.
        whole: resized to `size` with nothing cropped, for sizes of nearly the same aspect ratio.

    Raises:
        WangenError: the file cannot be decoded.
    """
    import numpy as np
    from PIL import Image

    if whole:
        resized = open_image(path, background).resize(size, Image.Resampling.LANCZOS)
        return np.asarray(resized).transpose(2, 0, 1)[:, None]
    frame = np.asarray(fit(open_image(path, "#000000" if grey else background), size, grey=grey))
    return frame[None, None] if grey else frame.transpose(2, 0, 1)[:, None]


def open_image(path: Path, background: str = WHITE) -> "Image.Image":
    """An image upright and in RGB; the first of an animation.

    Args:
        path: the image.
        background: the colour behind what is transparent, as `#rrggbb`.

    Raises:
        WangenError: the file cannot be decoded.
    """
    from PIL import Image, ImageOps

    Image.init()  # before any thread opens a file: Pillow's own lazy registration is not safe between threads
    try:
        with Image.open(path) as image:
            return _rgb(ImageOps.exif_transpose(image), background)
    except (*DECODING_ERRORS, Image.DecompressionBombError) as error:
        raise undecodable(path, error) from None


def load_clip(
    path: Path,
    size: tuple[int, int],
    start: int,
    count: int,
    fps: float,
    source_fps: float | None = None,
    *,
    grey: bool = False,
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
        grey: as a mask: (1, T, H, W), resized bilinearly.

    Raises:
        WangenError: the file cannot be decoded or has fewer frames.
    """
    import numpy as np

    frames = [np.asarray(fit(frame, size, grey=grey)) for frame in _resampled(path, start, count, fps, source_fps)]
    if len(frames) != count:
        raise WangenError(
            f"too short: frames {start} to {start + count - 1} at {fps:g} fps are needed, it ends before frame "
            f"{start + len(frames)}",
            where=str(path),
            cure="shorten target_frames, replace the file or take it out",
        )
    stacked = np.stack(frames)
    return stacked[None] if grey else stacked.transpose(3, 0, 1, 2)


def load_numbered(path: Path, size: tuple[int, int], numbers: range) -> "Frames":
    """The frames of a video that have these numbers, counted from 0 as they are shown, as (3, T, H, W) uint8.

    Args:
        path: the video.
        size: (width, height) in pixels that each frame covers and is cropped to.
        numbers: T of them, ascending.

    Raises:
        WangenError: the file cannot be decoded or has not all of them.
    """
    import numpy as np

    frames = [np.asarray(fit(upright(frame), size)) for frame in numbered_frames(path, numbers)]
    return np.stack(frames).transpose(3, 0, 1, 2)


def load_pictures(path: Path, count: int, max_side: int) -> "list[Image.Image]":
    """What shows a media file whole, upright and in RGB: an image itself, of a clip `count` frames.

    The clip is taken apart into `count` parts of the same length, and from each comes what is on screen in its middle.

    Args:
        path: the image or clip.
        count: frames of a clip, at least 1.
        max_side: pictures are reduced to this many pixels on their longer side.

    Raises:
        WangenError: the file cannot be decoded.
    """
    if media_of(path) == "image":
        pictures = [open_image(path, WHITE)]
    else:
        part_s = read_facts(path).duration_s / count
        pictures = [upright(frame) for frame in _shown_at(path, [(n + 0.5) * part_s for n in range(count)])]
    for picture in pictures:
        picture.thumbnail((max_side, max_side))
    return pictures


def _shown_at(path: Path, times_s: Sequence[float]) -> Iterator[Any]:
    """The frame on screen at each of these times, which ascend; after the end it is the last one."""
    held: Any = None
    wanted = 0
    for time_s, frame in _timed(path, None):
        while held is not None and wanted < len(times_s) and times_s[wanted] < time_s:
            yield held
            wanted += 1
        if wanted == len(times_s):
            return
        held = held if frame is None else frame
    yield from [held] * (len(times_s) - wanted)


def fit(image: "Image.Image", size: tuple[int, int], *, grey: bool = False) -> "Image.Image":
    """Resize with Lanczos to cover (width, height), then crop the centre; a mask in grey is resized bilinearly.

    >>> from PIL import Image
    >>> fit(Image.new("RGB", (300, 100)), (64, 48)).size
    (64, 48)
    """
    from PIL import Image

    image = image.convert("L") if grey else image
    if image.size == size:
        return image
    scale = max(size[0] / image.width, size[1] / image.height)
    width, height = max(size[0], round(image.width * scale)), max(size[1], round(image.height * scale))
    image = image.resize((width, height), Image.Resampling.BILINEAR if grey else Image.Resampling.LANCZOS)
    left, top = (width - size[0]) // 2, (height - size[1]) // 2
    return image.crop((left, top, left + size[0], top + size[1]))


def _rgb(image: "Image.Image", background: str) -> "Image.Image":
    """Any mode of Pillow's in RGB, 8 bits: nothing transparent, 16 bits scaled (Pillow by itself would clip)."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int32).clip(0, 65535)
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, background), rgba).convert("RGB")


def _resampled(path: Path, start: int, count: int, fps: float, source_fps: float | None) -> Iterator["Image.Image"]:
    """The frames on screen at k / fps for k in start … start+count-1; fewer when the video ends before."""
    return map(upright, islice(shown_frames(path, fps, source_fps), start, start + count))


def shown_frames(path: Path, fps: float, source_fps: float | None = None) -> Iterator[Any]:
    """PyAV's frame on screen at k / fps seconds after the first one, for k = 0, 1, … to the video's end.

    A frame that is on screen for several k comes so many times, as one object.

    Raises:
        WangenError: the file cannot be decoded; the frames before the fault have come by then.
    """
    held: Any = None
    wanted = 0
    for time_s, frame in _timed(path, source_fps):
        while held is not None and wanted / fps < time_s:
            yield held
            wanted += 1
        held = frame


def _timed(path: Path, source_fps: float | None) -> Iterator[tuple[float, Any]]:
    """Each frame with the seconds from the first one to it, and at last (the end, None).

    The seconds are the earliest that the stamps allow: 62 or 63 ms of a container that counts in milliseconds stand
    for the 62.5 ms of 16 frames per second, and no frame may come late because its stamp was rounded up.
    """
    if is_npz(path):
        yield from _timed_npz(path, source_fps)
        return
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
        raise undecodable(path, error) from None


def _timed_npz(path: Path, source_fps: float | None) -> Iterator[tuple[float, Any]]:
    """As `_timed`: the frames of a `.npz`, whose frame k is on screen from k / fps on."""
    frames, facts = read_npz(path)
    fps = source_fps or facts.fps
    for number, pixels in enumerate(frames):
        yield max(0.0, number / fps - EXACT_S), StoredFrame(pixels)
    yield len(frames) / fps - EXACT_S, None


def upright(frame: Any) -> "Image.Image":
    """PyAV's frame as it is watched: in RGB, turned as the file says."""
    image: Image.Image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


class ClipDataset:
    """The clips of a manifest, for `torch.utils.data.DataLoader` and its workers.

    Item n is that of the n-th line: `frames`, float32 (T, 3, H, W) in [-1, 1], and `prompt`, a text. Frame k is frame k
    of the file, or of those that the line takes of it, whatever the time stamps say; another size is covered and
    cropped at the centre.

    Args:
        manifest: the jsonl, as `wangen preprocess` writes it.
        frames: T, the first so many of each clip.
        size: (H, W) in pixels.

    Raises:
        WangenError: the manifest cannot be read, or has mistakes.
    """

    def __init__(self, manifest: "Path | str", *, frames: int = 81, size: tuple[int, int] = (480, 832)) -> None:
        self.frames = frames
        self.size = size
        self._items, problems = read_manifest(Path(manifest), "video")
        if problems:
            first, *others = problems
            more = f", and {many(len(others), 'more problem')}" if others else ""
            raise WangenError(f"{first.found}{more}", where=str(manifest), cure=first.cure)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> "dict[str, torch.Tensor | str]":
        """The item of a line; raises WangenError when its file cannot be read or has fewer frames."""
        import numpy as np
        import torch

        item, (height, width) = self._items[index], self.size
        decoded: Iterator[Any] = (frame for _, frame in _timed(item.path, None) if frame is not None)
        if excerpt := item.excerpt:
            decoded = numbered_frames(item.path, excerpt.numbers(0, min(self.frames, excerpt.count)))
        frames = [np.asarray(fit(upright(frame), (width, height))) for frame in islice(decoded, self.frames)]
        if len(frames) < self.frames:
            raise WangenError(f"has {many(len(frames), 'frame')}, {self.frames} are asked for",
                              where=str(item.path), cure="ask for fewer, or cut longer clips")  # fmt: skip
        pixels = torch.from_numpy(np.stack(frames).transpose(0, 3, 1, 2).astype(np.float32))
        return {"frames": pixels.div_(127.5).sub_(1.0), "prompt": item.caption}


def collate_fn(items: "Sequence[Mapping[str, torch.Tensor | str]]") -> "dict[str, torch.Tensor | list[str]]":
    """Items of a `ClipDataset` as a batch: `frames` (B, T, 3, H, W) in [-1, 1], and `prompts`, a list of B texts."""
    import torch

    frames = [item["frames"] for item in items]
    return {
        "frames": torch.stack([clip for clip in frames if isinstance(clip, torch.Tensor)]),
        "prompts": [str(item["prompt"]) for item in items],
    }
