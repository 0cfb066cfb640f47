"""Files -> frames: decoding, resizing, and resampling clips to the model's frame rate.

Shapes: C channels (3, or 1 of a mask), T frames, H height, W width, in pixels; values are uint8 until a step scales
them. Everything here may be called from several threads at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen.generator.colours import in_srgb
from wangen.generator.dataset import media_of, read_facts
from wangen.generator.errors import WangenError, many
from wangen.generator.manifests import read_manifest
from wangen.generator.pictures import DECODING_ERRORS, open_picture
from wangen.generator.toml_values import WHITE
from wangen.runtime.decoders.base import FrameDecoder, decoded
from wangen.runtime.decoders.pyav import PYAV, as_watched, pixel_aspect, shown_at, timed
from wangen.runtime.numbered_frames import numbered_frames, undecodable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image

    from wangen.runtime.samples import Sample

    Frames = np.ndarray[Any, np.dtype[np.uint8]]


def target_frames(sample: "Sample", *, first_only: bool = False, decoder: FrameDecoder = PYAV) -> "Frames":
    """What is encoded of a sample: (3, T, H, W) uint8, T = 1 of an image; `first_only` gives the first frame alone.

    Args:
        sample: which frames of which file.
        first_only: T = 1 of a clip as well.
        decoder: of its file, if it is a video.

    Raises:
        WangenError: the file cannot be decoded or has fewer frames.
    """
    return _cut(sample.item.path, sample, 1 if first_only else sample.count, decoder)


def control_frames(sample: "Sample", number: int, *, decoder: FrameDecoder = PYAV) -> "Frames":
    """What is encoded of control media `number`, counted from 0: (3, T, H, W) uint8.

    Cut as the target is, or with a `control_resolution` whole and at a size of its own. A still picture stands for
    every frame.

    Raises:
        WangenError: the file cannot be decoded or has fewer frames.
    """
    path, size = sample.item.controls[number], sample.control_size(number)
    if size is None:
        return _cut(path, sample, sample.count, decoder)
    with _enough_memory(path, size, 1):
        return load_image(path, size, sample.entry.background_color, whole=True)


def mask_frames(sample: "Sample") -> "Frames":
    """The mask of a sample: (1, T, H, W) uint8, 255 where the item counts, cut as the target is.

    Resized bilinearly, and what is transparent counts as black. A still picture stands for every frame. PyAV decodes
    masks, whatever decodes the rest: no weights make their entries, and so nothing in their keys would tell.

    Raises:
        ValueError: the sample has no mask.
        WangenError: the file cannot be decoded or has fewer frames.
    """
    if sample.item.mask is None:
        raise ValueError(f"{sample.name} has no mask")
    return _cut(sample.item.mask, sample, sample.count, PYAV, grey=True)


def _cut(path: Path, sample: "Sample", count: int, decoder: FrameDecoder, *, grey: bool = False) -> "Frames":
    """Frames of a file of the sample: (3, T, H, W) uint8, or (1, T, H, W) in grey."""
    with _enough_memory(path, sample.size, count):
        if media_of(path) == "image":
            frame = load_image(path, sample.size, sample.entry.background_color, grey=grey)
            return frame.repeat(count, axis=1)
        if (excerpt := sample.item.excerpt) and path == sample.item.path:
            return load_numbered(path, sample.size, excerpt.numbers(sample.start, count), decoder)
        return load_clip(
            path, sample.size, sample.start, count, sample.fps, sample.entry.source_fps, decoder=decoder, grey=grey
        )


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
        grey: as a mask: (1, 1, H, W), transparency over black, whatever its profile, resized bilinearly.
        whole: resized to `size` with nothing cropped, for sizes of nearly the same aspect ratio.

    Raises:
        WangenError: the file cannot be decoded.
    """
    import numpy as np
    from PIL import Image

    if whole:
        resized = open_image(path, background).resize(size, Image.Resampling.LANCZOS)
        return np.asarray(resized).transpose(2, 0, 1)[:, None]
    image = open_image(path, "#000000" if grey else background, as_stored=grey)
    frame = np.asarray(fit(image, size, grey=grey))
    return frame[None, None] if grey else frame.transpose(2, 0, 1)[:, None]


def open_image(path: Path, background: str = WHITE, *, as_stored: bool = False) -> "Image.Image":
    """An image upright and in RGB; the first of an animation.

    Args:
        path: the image.
        background: the colour behind what is transparent, as `#rrggbb`.
        as_stored: its numbers, whatever its colour profile says; else they are brought to sRGB.

    Raises:
        WangenError: the file cannot be decoded.
    """
    from PIL import Image, ImageOps

    try:
        with open_picture(path) as image:
            upright = ImageOps.exif_transpose(image)
            return _rgb(upright if as_stored else in_srgb(upright), background)
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
    decoder: FrameDecoder = PYAV,
    grey: bool = False,
) -> "Frames":
    """Frames `start … start+count-1` at `fps` frames per second as (3, T, H, W) uint8.

    Frame k is the one on screen at k / fps seconds after the first, by presentation time stamp; of a video whose rate
    is nearly `fps`, frame k itself.

    Args:
        path: the video.
        size: (width, height) in pixels that each frame covers and is cropped to.
        start: first frame, counted at `fps`.
        count: number of frames.
        fps: the model's frame rate.
        source_fps: the video's frame rate, when its own time stamps are wrong.
        decoder: of the video.
        grey: as a mask: (1, T, H, W), resized bilinearly.

    Raises:
        WangenError: the file cannot be decoded or has fewer frames.
    """
    import numpy as np

    def load(by: FrameDecoder) -> list[Any]:
        shown = by.shown(path, range(start, start + count), fps, source_fps)
        return [np.asarray(fit(frame, size, grey=grey)) for frame in shown]

    frames = decoded(decoder, path, load)
    if len(frames) != count:
        raise WangenError(
            f"too short: frames {start} to {start + count - 1} at {fps:g} fps are needed, it ends before frame "
            f"{start + len(frames)}",
            where=str(path),
            cure="shorten target_frames, replace the file or take it out",
        )
    stacked = np.stack(frames)
    return stacked[None] if grey else stacked.transpose(3, 0, 1, 2)


def load_numbered(path: Path, size: tuple[int, int], numbers: range, decoder: FrameDecoder = PYAV) -> "Frames":
    """The frames of a video that have these numbers, counted from 0 as they are shown, as (3, T, H, W) uint8.

    Args:
        path: the video.
        size: (width, height) in pixels that each frame covers and is cropped to.
        numbers: T of them, ascending.
        decoder: of the video.

    Raises:
        WangenError: the file cannot be decoded or has not all of them.
    """
    import numpy as np

    def load(by: FrameDecoder) -> list[Any]:
        return [np.asarray(fit(frame, size)) for frame in by.numbered(path, numbers)]

    frames = decoded(decoder, path, load)
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
        facts = read_facts(path)
        times_s = [(n + 0.5) * facts.duration_s / count for n in range(count)]
        pictures = [as_watched(frame, facts.aspect) for frame in shown_at(path, times_s)]
    for picture in pictures:
        picture.thumbnail((max_side, max_side))
    return pictures


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


class ClipDataset:
    """The clips of a manifest, for `torch.utils.data.DataLoader` and its workers.

    Give the loader `multiprocessing_context="spawn"`: with PyAV 19 a forked worker hangs once its parent opened a clip.

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
        found: Iterator[Any] = (frame for _, frame, _ in timed(item.path, None) if frame is not None)
        if excerpt := item.excerpt:
            found = numbered_frames(item.path, excerpt.numbers(0, min(self.frames, excerpt.count)))
        aspect = pixel_aspect(item.path)
        watched = (as_watched(frame, aspect) for frame in islice(found, self.frames))
        frames = [np.asarray(fit(picture, (width, height))) for picture in watched]
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
