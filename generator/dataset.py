"""A folder of media with caption files -> items, or the list of everything that is wrong with it."""

import struct
import sys
import unicodedata
import zlib
from collections.abc import Mapping, Sequence
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
    entries = _entries(folder)
    problems = _name_problems(entries, media, caption_extension)
    kinds = {media} if media else {"image", "video"}
    paths = [entry for entry in entries if media_of(entry) in kinds and entry.is_file()]
    if not paths:
        problems.append(Problem(folder, f"holds no {media or 'image or video'} files", "put them here"))
    unreadable: dict[Path, Problem] = {}
    if deep:
        if any(media_of(path) == "video" for path in paths):
            _require_av()
        with ThreadPoolExecutor() as pool:
            unreadable = {problem.path: problem for problem in pool.map(_unreadable, paths) if problem}
    captions = {_folded(entry.name): entry for entry in reversed(entries)}
    items = []
    for path in paths:
        try:
            item = _item(path, caption_extension, captions)
        except _BadItemError as bad:
            problems.append(bad.problem)
        else:
            items += [item] if path not in unreadable else []
    problems += unreadable.values()
    return items, sorted(problems, key=lambda problem: problem.path.name)


def left_out(folder: Path, caption_extension: str = ".txt") -> list[str]:
    """What a dataset folder holds that is no item: other files, captions without media, sub-folders; a line each."""
    entries = _entries(folder)
    stems = {_folded(path.stem) for path in entries if media_of(path)}
    lines = []
    for path in entries:
        if path.is_dir():
            inside = sum(media_of(entry) is not None for entry in path.rglob("*"))
            lines += [f"{path.name}/ ({inside} media files; sub-folders are not read)"] if inside else []
        elif path.suffix.lower() == caption_extension:
            lines += [] if _folded(path.stem) in stems else [f"{path.name} (a caption without its image or video)"]
        elif media_of(path) is None:
            lines.append(f"{path.name} (read are: {', '.join(sorted(IMAGE_SUFFIXES | VIDEO_SUFFIXES))})")
    return lines


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


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise WangenError(
            f"cannot list the folder: {error.strerror}",
            where=str(folder),
            cure="check the path, or publish the dataset again",
        ) from None


def _item(path: Path, extension: str, entries: Mapping[str, Path]) -> Item:
    """The media file with its caption, whose name may differ in letter case (`A.JPG` and `A.TXT`)."""
    caption_path = path.with_suffix(extension)
    if not caption_path.is_file():
        caption_path = entries.get(_folded(caption_path.name), caption_path)
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


def _name_problems(entries: Sequence[Path], media: Media | None, extension: str) -> list[Problem]:
    """Names that some system cannot hold, or takes for the name of another file; and links that lead nowhere."""
    problems, seen = [], dict[str, str]()
    for path in entries:
        # `cat.jpg.` is no image by its ending; Windows and whoever wrote it think that it is.
        kind = media_of(path) or media_of(Path(path.name.rstrip(". ") or "-"))
        if kind is None or (media and kind != media) or path.is_dir():
            continue
        reason = windows_name_problem(path.name)
        if reason:
            problems.append(Problem(path, f"Windows cannot hold this name ({reason})", "rename it"))
        elif not _is_unicode(path.name):
            problems.append(Problem(path, "the name is not UTF-8", "rename it"))
        elif not path.exists():
            problems.append(Problem(path, "is a link to a file that is not there", "replace it or take it out"))
        caption = path.with_suffix(extension)
        # Two media of one stem may share a caption (`a.jpg`, `a.mp4`); `A.jpg` and `a.png` would share it on Windows.
        for name in (path.name, caption.name):
            other = seen.setdefault(_folded(name), name)
            if other != name:
                found = f"{other} and {name} differ in letter case or Unicode form only: one file on Windows or macOS"
                problems.append(Problem(path, found, "rename one of them"))
                break
    return problems


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _is_unicode(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


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


def _require_av() -> Any:
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
    av = _require_av()
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
