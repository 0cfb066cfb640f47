"""A folder of media with caption files -> items, or the list of everything that is wrong with it."""

import os
import unicodedata
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wangen.generator import pictures, videos
from wangen.generator.colours import is_profiled
from wangen.generator.errors import WangenError, is_blank, read_cure
from wangen.generator.excerpts import Excerpt
from wangen.generator.files import read_file
from wangen.generator.install import require_library
from wangen.generator.npz import SUFFIX, is_npz, is_other_archive, read_npz_facts
from wangen.generator.pace import beat_of_packets, steady
from wangen.generator.paths import windows_name_problem
from wangen.generator.pictures import DECODING_ERRORS, no_image, open_picture, short
from wangen.generator.videos import HDR, aspect_of, flip_of, is_transparent, open_video, packet_times, square_size

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif"})
VIDEO_SUFFIXES = frozenset({".mp4", ".webm", ".avi", ".mkv", ".mov", ".flv", ".wmv", ".m4v", ".mpg", ".mpeg", SUFFIX})

Media = Literal["image", "video"]

CAPTION = ".txt"
"""How the names of caption files end."""
NO_CAPTION, REPLACE = "has no caption", "replace it or take it out"
_AGAIN = "check the path, or publish the dataset again"
_Entries = list[os.DirEntry[str]]


@dataclass(frozen=True)
class MediaFacts:
    """What a media file is, from its header (image) or its packets (video).

    Attributes:
        width: pixels after rotation, square ones.
        height: pixels after rotation, square ones.
        num_frames: 1 for an image.
        duration_s: 0 for an image; else last frame's end minus first frame's start, in seconds.
        transparent: an image that may be transparent somewhere, or a video that is.
        rate: frames per second of a video, by its stamps; 0 where they do not come evenly.
        mirrored: a video whose file says that its picture be mirrored.
        aspect: width of a video's stored pixel as a part of its height.
        profiled: an image whose colour profile says other colours than sRGB's.
        on_clock: a video's frames are on screen when its nearest whole rate says so.
        hdr: a video for screens of high dynamic range.
        interlaced: a video of half pictures, one of even and one of odd lines.
    """

    width: int
    height: int
    num_frames: int
    duration_s: float
    transparent: bool = False
    rate: float = 0.0
    mirrored: bool = False
    aspect: float = 1.0
    profiled: bool = False
    on_clock: bool = True
    hdr: bool = False
    interlaced: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """One image or video with its captions, and what belongs to it.

    Attributes:
        path: the media file.
        media: image or video.
        captions: one or more texts, stripped, none of them empty but of an excerpt's.
        caption_path: where they stand: a caption file, or a manifest.
        controls: its control images or videos, in their order.
        mask: a grey picture or clip, white where the item counts.
        label: of what it shows, from a manifest; may be empty.
        excerpt: which frames of a longer video the clip is, from a manifest; None for the whole file.
    """

    path: Path
    media: Media
    captions: tuple[str, ...]
    caption_path: Path
    controls: tuple[Path, ...] = ()
    mask: Path | None = None
    label: str = ""
    excerpt: Excerpt | None = None

    @property
    def caption(self) -> str:
        """The first of the captions."""
        return self.captions[0]

    @property
    def companions(self) -> tuple[Path, ...]:
        """The files beside the media file that it needs: its control media and its mask."""
        return (*self.controls, self.mask) if self.mask else self.controls


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the file, the fact and what to do."""

    path: Path
    found: str
    cure: str

    def __str__(self) -> str:
        """`file: fact; cure`, or what of it is known.

        >>> str(Problem(Path("a.mp4"), "cannot be read", ""))
        'a.mp4: cannot be read'
        """
        return "; ".join(filter(None, (f"{self.path.name}: {self.found}", self.cure)))


def media_of(path: Path | str) -> Media | None:
    """Whether a file name is that of an image, a video or neither; letter case does not matter.

    >>> media_of(Path("A.JPG")), media_of(Path("b.mp4")), media_of(Path("b.txt"))
    ('image', 'video', None)
    """
    name = path if isinstance(path, str) else path.name
    suffix = name[max(name.rfind("."), 1) :].lower()
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else None


def scan(
    folder: Path, *, media: Media | None = None, caption_extension: str = CAPTION, multiple_captions: bool = False,
    deep: bool = True,
) -> tuple[list[Item], list[Problem]]:  # fmt: skip
    """The items of a folder and everything that is wrong with it, all at once.

    Args:
        folder: the media folder.
        media: only images or only videos; None for both.
        caption_extension: ending of the caption files.
        multiple_captions: every line of a caption file is a caption of its own.
        deep: open every file to see that it can be read; those that cannot are no items.

    Raises:
        WangenError: the folder cannot be listed, or the library that reads clips is not installed.
    """
    entries = [entry for entry in _listing(folder) if not is_other_archive(entry)]
    problems = _name_problems(folder, entries, media, caption_extension)
    kinds = {media} if media else {"image", "video"}
    found = [(e.name, kind) for e in entries if (kind := media_of(e.name)) in kinds and e.is_file()]
    if not found:
        problems.append(Problem(folder, f"holds no {media or 'image or video'} files", "put them here"))
    find, names = _CaptionNames(entries, caption_extension), {entry.name for entry in entries}
    items = []
    for name, kind in found:
        path, caption_path = folder / name, folder / find(name)
        try:
            captions = split_captions(read_caption(caption_path), multiple=multiple_captions)
        except FileNotFoundError:
            usual = path.with_suffix(CAPTION).name
            cure = f'{usual} is there: say caption_extension = "{CAPTION}"' if usual in names else ""
            problems.append(Problem(path, NO_CAPTION, cure or f"write {caption_path.name} beside it"))
        except BadItemError as bad:
            problems.append(bad.problem)
        else:
            items.append(Item(path, kind or "image", captions, caption_path))
    if deep:
        bad_files = unreadable([folder / name for name, _ in found])
        items = [item for item in items if item.path not in bad_files]
        problems += bad_files.values()
    return items, sorted(problems, key=lambda problem: problem.path.name)


def unreadable(paths: Iterable[Path]) -> dict[Path, Problem]:
    """Those of the media files that cannot be read to their end, with what is wrong; each file is opened once.

    Raises:
        WangenError: the library that reads clips is not installed.
    """
    unique = list(dict.fromkeys(paths))
    if any(media_of(path) == "video" for path in unique):
        require_library("av")
    with ThreadPoolExecutor() as pool:
        return {bad.path: bad for bad in pool.map(inspect, unique) if isinstance(bad, Problem)}


def read_facts(path: Path) -> MediaFacts:
    """Size and length of a media file without decoding it.

    Raises:
        WangenError: the file cannot be read as an image or a video.
    """
    if is_npz(path):
        clip = read_npz_facts(path)
        on_clock = steady(clip.fps, num_frames := clip.num_frames).on_clock
        return MediaFacts(clip.width, clip.height, num_frames, num_frames / clip.fps, rate=clip.fps, on_clock=on_clock)
    return _image_facts(path) if media_of(path) == "image" else _video_facts(path)


class BadItemError(Exception):
    """A problem on its way out of a helper."""

    def __init__(self, path: Path, found: str, cure: str) -> None:
        self.problem = Problem(path, found, cure)


def list_folder(folder: Path, cure: str = _AGAIN) -> list[Path]:
    """What a folder holds, in the order of the names; hidden files are left out.

    Raises:
        WangenError: the folder cannot be listed; then `cure` is what can be done.
    """
    return [folder / entry.name for entry in _listing(folder, cure)]


def _listing(folder: Path, cure: str = _AGAIN) -> _Entries:
    """As `list_folder`: what the system says of each entry with its name need not be asked for again."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise WangenError(f"cannot list the folder: {error.strerror}", where=str(folder), cure=cure) from None


def read_caption(path: Path) -> str:
    """The text of a caption file, stripped.

    Raises:
        FileNotFoundError: there is none.
        BadItemError: it is not UTF-8, cannot be read, or is empty.
    """
    try:
        caption = read_file(path).decode("utf-8-sig").strip()
    except FileNotFoundError:
        raise
    except UnicodeDecodeError:
        raise BadItemError(path, "is not UTF-8", "save it as UTF-8") from None
    except OSError as error:
        raise BadItemError(path, f"cannot be read: {error.strerror}", read_cure(error)) from None
    if "\0" in caption:  # what UTF-16 without its mark looks like
        raise BadItemError(path, "is not UTF-8", "save it as UTF-8")
    if is_blank(caption):
        raise BadItemError(path, "is empty", "describe the picture in a sentence")
    return caption


def split_captions(text: str, *, multiple: bool) -> tuple[str, ...]:
    r"""The captions that a text holds, which is not empty: itself, or each of its lines.

    >>> split_captions("a cat\r\n\n a red cat", multiple=True)
    ('a cat', 'a red cat')
    """
    return tuple(line.strip() for line in text.split("\n") if not is_blank(line)) if multiple else (text,)


class _CaptionNames:
    """The name of each media file's caption file, which may differ in letter case (`A.JPG` and `A.TXT`)."""

    def __init__(self, entries: _Entries, extension: str) -> None:
        self._names = {entry.name for entry in entries}
        self._extension = extension
        self._folded: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        wanted = name[: name.rindex(".")] + self._extension
        if wanted in self._names:
            return wanted
        self._folded = self._folded or {folded(found): found for found in sorted(self._names, reverse=True)}
        return self._folded.get(folded(wanted), wanted)


def _name_problems(folder: Path, entries: _Entries, media: Media | None, extension: str) -> list[Problem]:
    """Names that some system cannot hold, or takes for the name of another file; and links that lead nowhere."""
    problems, names = [], []
    for entry in entries:
        name = entry.name
        # `cat.jpg.` is no image by its ending; Windows and whoever wrote it think that it is.
        kind = media_of(name) or (media_of(name.rstrip(". ")) if name[-1] in ". " else None)
        if kind is None or (media and kind != media) or entry.is_dir():
            continue
        names.append(name)
        if entry.is_symlink() or name_fault(name):
            problems += name_problem(folder / name)
    return problems + [Problem(folder / name, *words) for name, words in _collisions(names, extension)]


def name_problem(path: Path) -> list[Problem]:
    """What is wrong with the name of one file, if anything: no system must fail on it; or it is a link to nothing."""
    if fault := name_fault(path.name):
        return [Problem(path, fault, "rename it")]
    if not path.exists():
        return [Problem(path, "is a link to a file that is not there", REPLACE)]
    return []


def same_names(paths: Iterable[Path]) -> list[Problem]:
    """Media that some system takes for one file when they lie in one folder, or whose captions it does.

    Two media of one stem may share a caption (`a.jpg`, `a.mp4`); `A.jpg` and `a.png` would share it on Windows.
    """
    by_name = {path.name: path for path in paths}
    return [Problem(by_name[name], *words) for name, words in _collisions(by_name, CAPTION)]


def _collisions(names: Iterable[str], extension: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Those of the file names that collide with an earlier one, with the fact and the cure."""
    seen = dict[str, str]()
    for name in names:
        for own in (name, name[: name.rindex(".")] + extension):
            other = seen.setdefault(folded(own), own)
            if other != own:
                found = f"{other} and {own} differ in letter case or Unicode form only: one file on Windows or macOS"
                yield name, (found, "rename one of them")
                break


def folded(name: str) -> str:
    """A name as systems that ignore letter case and Unicode form compare it."""
    return unicodedata.normalize("NFC", name).casefold()


def name_fault(name: str) -> str:
    """Why some system cannot hold a name, in words; empty where all can."""
    if reason := windows_name_problem(name):
        return f"Windows cannot hold this name ({reason})"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "the name is not UTF-8"
    return ""


def inspect(path: Path) -> "MediaFacts | Problem":
    """The facts of a media file that can be read to its end, or what is wrong with it."""
    try:
        facts = read_facts(path)
        if media_of(path) == "image":
            pictures.decode(path)
    except WangenError as error:
        return Problem(path, error.found, error.cure or REPLACE)
    return facts


def _image_facts(path: Path) -> MediaFacts:
    from PIL import Image, UnidentifiedImageError

    try:
        with open_picture(path) as image:
            width, height = image.size
            # Of a TIFF, Pillow says the size as it is turned.
            turned = image.format != "TIFF" and image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
            transparent, profiled = image.has_transparency_data, is_profiled(image)
    except UnidentifiedImageError:
        raise WangenError(pictures.fault_of(path), where=str(path)) from None
    except Image.DecompressionBombError:
        raise WangenError("has more than 178 million pixels: make it smaller", where=str(path)) from None
    except DECODING_ERRORS as error:
        raise no_image(path, error) from None
    return MediaFacts(*((height, width) if turned else (width, height)), 1, 0.0, transparent, profiled=profiled)


def _video_facts(path: Path) -> MediaFacts:
    av = require_library("av")
    try:
        with open_video(path) as container:
            if not container.streams.video:
                raise WangenError(videos.fault_of(path, "has no video stream"), where=str(path))
            stream = container.streams.video[0]
            frame = next(container.decode(stream))
            width, height = (frame.height, frame.width) if frame.rotation % 180 else (frame.width, frame.height)
            mirrored, aspect = bool(flip_of(frame)), aspect_of(stream)
            width, height = square_size((width, height), frame.rotation, aspect)
            transparent, hdr, interlaced = is_transparent(stream, frame), frame.color_trc in HDR, frame.interlaced_frame
        times, time_base, rate = packet_times(path)
    except (av.FFmpegError, StopIteration, OSError) as error:
        found = videos.fault_of(path, f"cannot be read as a video ({short(error)})")
        raise WangenError(found, where=str(path)) from None
    duration_s = len(times) / rate if rate else 0.0
    if known := [(time, ticks) for time, ticks in times if time is not None]:
        first, (last, last_duration) = min(known)[0], max(known)
        duration_s = (last - first) * time_base + (last_duration * time_base or (1 / rate if rate else 0.0))
    own, on_clock = beat_of_packets([time for time, _ in times], time_base, rate)
    return MediaFacts(width, height, len(times), duration_s, transparent, own, mirrored, aspect,
                      on_clock=on_clock, hdr=hdr, interlaced=interlaced)  # fmt: skip
