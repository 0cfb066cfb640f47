"""A folder of media with caption files -> items, or the list of everything that is wrong with it."""

import struct
import sys
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from wangen.generator.errors import WangenError
from wangen.generator.install import install_line
from wangen.generator.paths import windows_name_problem

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif"})
VIDEO_SUFFIXES = frozenset(
    {".mp4", ".webm", ".avi", ".mkv", ".mov", ".flv", ".wmv", ".m4v", ".mpg", ".mpeg"}
)  # fmt: skip

Media = Literal["image", "video"]

_DECODING = (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, struct.error, zlib.error, MemoryError)
"""What Pillow's decoders raise for malformed files."""


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


def scan(
    folder: Path, *, media: Media | None = None, caption_extension: str = ".txt", deep: bool = True
) -> tuple[list[Item], list[Problem]]:
    """The items of a folder and everything that is wrong with it, all at once.

    Args:
        folder: the media folder.
        media: only images or only videos; None for both.
        caption_extension: ending of the caption files.
        deep: open every file to see that it can be read; those that cannot are no items.

    Raises:
        WangenError: the folder cannot be listed, or the library that reads clips is not installed.
    """
    entries = list_folder(folder)
    problems = _name_problems(entries, media, caption_extension)
    kinds = {media} if media else {"image", "video"}
    paths = [entry for entry in entries if media_of(entry) in kinds and entry.is_file()]
    if not paths:
        problems.append(Problem(folder, f"holds no {media or 'image or video'} files", "put them here"))
    unreadable: dict[Path, Problem] = {}
    if deep:
        if any(media_of(path) == "video" for path in paths):
            require_av()
        with ThreadPoolExecutor() as pool:
            unreadable = {bad.path: bad for bad in pool.map(inspect, paths) if isinstance(bad, Problem)}
    captions = {folded(entry.name): entry for entry in reversed(entries)}
    items = []
    for path in paths:
        try:
            item = _item(path, caption_extension, captions)
        except BadItemError as bad:
            problems.append(bad.problem)
        else:
            items += [item] if path not in unreadable else []
    problems += unreadable.values()
    return items, sorted(problems, key=lambda problem: problem.path.name)


def read_facts(path: Path) -> MediaFacts:
    """Size and length of a media file without decoding it.

    Raises:
        WangenError: the file cannot be read as an image or a video.
    """
    return _image_facts(path) if media_of(path) == "image" else _video_facts(path)


class BadItemError(Exception):
    """A problem on its way out of a helper."""

    def __init__(self, path: Path, found: str, cure: str) -> None:
        self.problem = Problem(path, found, cure)


def list_folder(folder: Path) -> list[Path]:
    """What a folder holds, in the order of the names; hidden files are left out.

    Raises:
        WangenError: the folder cannot be listed.
    """
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise WangenError(
            f"cannot list the folder: {error.strerror}",
            where=str(folder),
            cure="check the path, or publish the dataset again",
        ) from None


def read_caption(path: Path) -> str:
    """The text of a caption file, stripped.

    Raises:
        FileNotFoundError: there is none.
        BadItemError: it is not UTF-8, cannot be read, or is empty.
    """
    try:
        caption = path.read_bytes().decode("utf-8-sig").strip()
    except FileNotFoundError:
        raise
    except UnicodeDecodeError:
        raise BadItemError(path, "is not UTF-8", "save it as UTF-8") from None
    except OSError as error:
        raise BadItemError(path, f"cannot be read: {error.strerror}", "fix its rights") from None
    if not caption:
        raise BadItemError(path, "is empty", "describe the picture in a sentence")
    return caption


def _item(path: Path, extension: str, entries: Mapping[str, Path]) -> Item:
    """The media file with its caption, whose name may differ in letter case (`A.JPG` and `A.TXT`)."""
    caption_path = path.with_suffix(extension)
    if not caption_path.is_file():
        caption_path = entries.get(folded(caption_path.name), caption_path)
    try:
        return Item(path, media_of(path) or "image", read_caption(caption_path), caption_path)
    except FileNotFoundError:
        raise BadItemError(path, "has no caption", f"write {caption_path.name} beside it") from None


def _name_problems(entries: Sequence[Path], media: Media | None, extension: str) -> list[Problem]:
    """Names that some system cannot hold, or takes for the name of another file; and links that lead nowhere."""
    problems, paths = [], []
    for path in entries:
        # `cat.jpg.` is no image by its ending; Windows and whoever wrote it think that it is.
        kind = media_of(path) or media_of(Path(path.name.rstrip(". ") or "-"))
        if kind is None or (media and kind != media) or path.is_dir():
            continue
        paths.append(path)
        problems += name_problem(path)
    return problems + same_names(paths, extension)


def name_problem(path: Path) -> list[Problem]:
    """What is wrong with the name of one file, if anything: no system must fail on it; or it is a link to nothing."""
    reason = windows_name_problem(path.name)
    if reason:
        return [Problem(path, f"Windows cannot hold this name ({reason})", "rename it")]
    if not _is_unicode(path.name):
        return [Problem(path, "the name is not UTF-8", "rename it")]
    if not path.exists():
        return [Problem(path, "is a link to a file that is not there", "replace it or take it out")]
    return []


def same_names(paths: Iterable[Path], extension: str = ".txt") -> list[Problem]:
    """Media that some system takes for one file when they lie in one folder, or whose captions it does.

    Two media of one stem may share a caption (`a.jpg`, `a.mp4`); `A.jpg` and `a.png` would share it on Windows.
    """
    problems, seen = [], dict[str, str]()
    for path in paths:
        for name in (path.name, path.with_suffix(extension).name):
            other = seen.setdefault(folded(name), name)
            if other != name:
                found = f"{other} and {name} differ in letter case or Unicode form only: one file on Windows or macOS"
                problems.append(Problem(path, found, "rename one of them"))
                break
    return problems


def folded(name: str) -> str:
    """A name as systems that ignore letter case and Unicode form compare it."""
    return unicodedata.normalize("NFC", name).casefold()


def _is_unicode(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def inspect(path: Path) -> "MediaFacts | Problem":
    """The facts of a media file that can be read to its end, or what is wrong with it."""
    try:
        facts = read_facts(path)
        if media_of(path) == "image":
            _decode_image(path)
    except WangenError as error:
        return Problem(path, error.found, "replace it or take it out")
    return facts


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
    except UnidentifiedImageError:
        found = "cannot be read as an image" if path.stat().st_size else "is empty (0 bytes)"
        raise WangenError(found, where=str(path)) from None
    except (*_DECODING, Image.DecompressionBombError) as error:
        raise WangenError(f"cannot be read as an image ({_short(error)})", where=str(path)) from None
    return MediaFacts(height, width, 1, 0.0) if turned else MediaFacts(width, height, 1, 0.0)


def _decode_image(path: Path) -> None:
    """Decode the pixels: a truncated file has a good header."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
    except _DECODING as error:
        raise WangenError(f"cannot be read as an image ({_short(error)})", where=str(path)) from None


def require_av() -> Any:
    """The library that reads clips.

    Raises:
        WangenError: it is not installed.
    """
    try:
        import av
    except ModuleNotFoundError:
        raise WangenError(
            "clips need the library av, which is not installed",
            where=sys.executable,
            cure=install_line(sys.executable),
        ) from None
    return av


def _video_facts(path: Path) -> MediaFacts:
    av = require_av()
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise WangenError("has no video stream", where=str(path))
            stream = container.streams.video[0]
            frame = next(container.decode(stream))
            width, height = (frame.height, frame.width) if frame.rotation % 180 else (frame.width, frame.height)
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            # AVI and raw streams have decoding times only; the last packet is the flush and holds no data; packets
            # to be discarded lie before an edit list's start, as in clips that were cut without encoding again.
            times = [
                (p.pts if p.pts is not None else p.dts, p.duration or 0)
                for p in container.demux(stream)
                if p.size and not p.is_discard
            ]
            time_base = float(stream.time_base or 0)
            rate = float(stream.average_rate or 0)
    except (av.FFmpegError, StopIteration, OSError) as error:
        raise WangenError(f"cannot be read as a video ({_short(error)})", where=str(path)) from None
    frame_s = 1 / rate if rate else 0.0
    known = [time for time in times if time[0] is not None]
    if not known:
        return MediaFacts(width, height, len(times), len(times) * frame_s)
    first, (last, last_duration) = min(known)[0], max(known)
    return MediaFacts(width, height, len(times), (last - first) * time_base + (last_duration * time_base or frame_s))


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].split(": '")[0]
