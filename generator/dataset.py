"""A folder of media with caption files -> items, or the list of everything that is wrong with it."""

import unicodedata
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from wangen.generator.errors import WangenError
from wangen.generator.paths import windows_name_problem

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif"})
VIDEO_SUFFIXES = frozenset(
    {".mp4", ".webm", ".avi", ".mkv", ".mov", ".flv", ".wmv", ".m4v", ".mpg", ".mpeg"}
)  # fmt: skip

Media = Literal["image", "video"]


@dataclass(frozen=True)
class MediaFacts:
    """What a media file is, from its header (image) or its packets (video).

    Attributes:
        width: pixels after rotation.
        height: pixels after rotation.
        num_frames: 1 for an image.
        duration_s: 0 for an image; else last frame's end minus first frame's start, in seconds.
    """

    width: int
    height: int
    num_frames: int
    duration_s: float


@dataclass(frozen=True)
class Item:
    """One image or video with its caption.

    Attributes:
        path: the media file.
        media: image or video.
        caption: its text, stripped.
        caption_path: where the text stands.
    """

    path: Path
    media: Media
    caption: str
    caption_path: Path


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the file, the fact and what to do."""

    path: Path
    found: str
    cure: str

    def __str__(self) -> str:
        """`file: fact; cure`."""
        return f"{self.path.name}: {self.found}; {self.cure}"


def media_of(path: Path) -> Media | None:
    """Whether a file name is that of an image, a video or neither; letter case does not matter.

    >>> media_of(Path("A.JPG")), media_of(Path("b.mp4")), media_of(Path("b.txt"))
    ('image', 'video', None)
    """
    suffix = path.suffix.lower()
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else None


def media_files(folder: Path, media: Media | None = None) -> list[Path]:
    """The media files of a folder (not of its sub-folders), sorted by name; hidden files are left out.

    Raises:
        WangenError: the folder is missing or cannot be listed.
    """
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise WangenError(f"cannot list the folder: {error.strerror}", where=str(folder)) from None
    kinds = {media} if media else {"image", "video"}
    return [entry for entry in entries if media_of(entry) in kinds and entry.is_file()]


def scan(
    folder: Path, *, media: Media | None = None, caption_extension: str = ".txt", deep: bool = True
) -> tuple[list[Item], list[Problem]]:
    """The items of a folder and everything that is wrong with it, all at once.

    Args:
        folder: the media folder.
        media: only images or only videos; None for both.
        caption_extension: ending of the caption files.
        deep: open every file to see that it can be read.

    Raises:
        WangenError: the folder cannot be listed.
    """
    paths = media_files(folder, media)
    problems = _name_problems(paths, caption_extension)
    if not paths:
        problems.append(Problem(folder, f"holds no {media or 'image or video'} files", "put them here"))
    items = []
    for path in paths:
        try:
            items.append(_item(path, caption_extension))
        except _BadItemError as bad:
            problems.append(bad.problem)
    if deep:
        with ThreadPoolExecutor() as pool:
            problems += [problem for problem in pool.map(_unreadable, paths) if problem]
    return items, sorted(problems, key=lambda problem: problem.path.name)


def read_facts(path: Path) -> MediaFacts:
    """Size and length of a media file without decoding it.

    Raises:
        WangenError: the file cannot be read as an image or a video.
    """
    return _image_facts(path) if media_of(path) == "image" else _video_facts(path)


class _BadItemError(Exception):
    """A problem on its way out of a helper."""

    def __init__(self, path: Path, found: str, cure: str) -> None:
        self.problem = Problem(path, found, cure)


def _item(path: Path, extension: str) -> Item:
    caption_path = path.with_suffix(extension)
    try:
        caption = caption_path.read_text(encoding="utf-8-sig").strip()
    except FileNotFoundError:
        raise _BadItemError(path, "has no caption", f"write {caption_path.name} beside it") from None
    except UnicodeDecodeError:
        raise _BadItemError(caption_path, "is not UTF-8", "save it as UTF-8") from None
    except OSError as error:
        raise _BadItemError(caption_path, f"cannot be read: {error.strerror}", "fix its rights") from None
    if not caption:
        raise _BadItemError(caption_path, "is empty", "describe the picture in a sentence")
    return Item(path, media_of(path) or "image", caption, caption_path)


def _name_problems(paths: Iterable[Path], extension: str) -> list[Problem]:
    """Names that Windows cannot hold, and names that differ only in letter case or Unicode form."""
    problems, seen = [], dict[str, str]()
    for path in paths:
        reason = windows_name_problem(path.name)
        if reason:
            problems.append(Problem(path, f"Windows cannot hold this name ({reason})", "rename it"))
        for name in (path.name, path.with_suffix(extension).name):
            folded = unicodedata.normalize("NFC", name).casefold()
            if seen.setdefault(folded, name) != name:
                problems.append(
                    Problem(path, f"{name} and {seen[folded]} are one name on Windows", "rename one of them")
                )
    return problems


def _unreadable(path: Path) -> Problem | None:
    try:
        read_facts(path)
        if media_of(path) == "image":
            _decode_image(path)
    except WangenError as error:
        return Problem(path, error.found, "replace it or take it out")
    return None


@cache
def _pillow() -> None:
    """Register what Pillow needs once, in whatever thread comes first."""
    from PIL import Image

    Image.init()


def _image_facts(path: Path) -> MediaFacts:
    from PIL import Image, UnidentifiedImageError

    _pillow()
    try:
        with Image.open(path) as image:
            width, height = image.size
            turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise WangenError(f"cannot be read as an image ({_short(error)})", where=str(path)) from None
    return MediaFacts(height, width, 1, 0.0) if turned else MediaFacts(width, height, 1, 0.0)


def _decode_image(path: Path) -> None:
    """Decode the pixels: a truncated file has a good header."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise WangenError(f"cannot be read as an image ({_short(error)})", where=str(path)) from None


def _video_facts(path: Path) -> MediaFacts:
    import av

    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise WangenError("has no video stream", where=str(path))
            stream = container.streams.video[0]
            frame = next(container.decode(stream))
            width, height = (frame.height, frame.width) if frame.rotation % 180 else (frame.width, frame.height)
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            packets = [(p.pts, p.duration or 0) for p in container.demux(stream) if p.pts is not None]
            time_base = float(stream.time_base or 0)
            rate = float(stream.average_rate or 0)
    except (av.FFmpegError, StopIteration, OSError) as error:
        raise WangenError(f"cannot be read as a video ({_short(error)})", where=str(path)) from None
    first, (last, last_duration) = min(packets)[0], max(packets)
    end_s = last_duration * time_base or (1 / rate if rate else 0.0)
    return MediaFacts(width, height, len(packets), (last - first) * time_base + end_s)


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].split(": '")[0]
