"""A jsonl manifest -> items: one JSON object a line, for each image or clip. There is one form, read everywhere.

    {"file": "clips/walk.mp4", "prompt": "a walk", "fps": 16, "frames": 81, "width": 832, "height": 480}
    {"image_path": "cats/tom.png", "caption": "a cat", "control_path": "lines/tom.png", "mask_path": "masks/tom.png"}
    {"video_path": "walk.mp4", "caption": ["a walk", "somebody walks"]}
    {"file": "hours.mp4", "prompt": "", "first_frame": 5400, "frame_step": 2, "frames": 17}

The first is what `wangen preprocess` writes. The file is `file`, `image_path`, `video_path` or `file_name`, and what it
is says its ending; with `first_frame` or `frame_step` the clip is so many frames of it by their numbers, whose caption
may be empty; the caption is `caption`, `prompt` or `text`, or else stands in a `.txt` beside the file. Several
control images are `control_path_0`, `control_path_1` and so on; `label` is what `evaluate` calls the item's activity;
other keys are ignored. A relative path starts at the manifest's own folder, and where nothing lies there at the working
folder. Blank lines and a byte order mark are fine. Each line is an item of its own: a picture that two lines name is
trained on with both captions.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wangen.generator.dataset import (
    CAPTION,
    NO_CAPTION,
    BadItemError,
    Item,
    Media,
    Problem,
    media_of,
    name_fault,
    read_caption,
    split_captions,
)
from wangen.generator.errors import UsageError, WangenError, is_blank, printable
from wangen.generator.excerpts import Excerpt, read_excerpt
from wangen.generator.files import read_file, special

SUFFIXES = (".jsonl", ".ndjson")
MAX_TOLD = 1000
"""So many wrong lines are told one by one."""
PACKED = ".tar"
"""Of a tar of manifests, which counts as one that has the lines of all of them, in the tar's order."""

_FILE_KEYS = ("file", "image_path", "video_path", "file_name")
_CAPTION_KEYS = ("caption", "prompt", "text")
_CONTROL = re.compile(r"control_path(?:_([0-9]{1,4}))?")
_NAME_CHARACTERS = 400
_COMPRESSED = re.compile(r"\.(?:tar\.\w+|tgz|tbz2?|txz)$", re.IGNORECASE)
_NUM_BYTES = 1 << 20


@dataclass(frozen=True)
class Clips:
    """What a manifest says of all its images, or of all its clips, without a look at the files.

    Attributes:
        sizes: how many have which (width, height) in pixels; those that say it.
        frames: how many clips have so many frames; those that say it.
        number: of them all.
    """

    sizes: Counter[tuple[int, int]]
    frames: Counter[int]
    number: int


def is_jsonl(path: Path) -> bool:
    """Whether a file holds lines of JSON by its ending; letter case does not matter."""
    return path.suffix.lower() in SUFFIXES


def is_manifest(path: Path) -> bool:
    """Whether a file is a manifest, or a tar of manifests, by its ending; letter case does not matter."""
    return is_jsonl(path) or path.suffix.lower() == PACKED


def refuse_other_names(path: Path) -> None:
    """Refuse what was meant as a manifest and is not called like one, so that nobody is told to write TOML.

    Raises:
        UsageError: it is a folder, a compressed tar, or holds the lines of a manifest under another ending.
    """
    if path.is_dir():
        raise UsageError("the dataset is a file, and this is a folder", where=str(path),
                         cure="give the .jsonl or the .toml in it")  # fmt: skip
    if _COMPRESSED.search(path.name):
        raise UsageError("a tar of manifests is not compressed", where=str(path),
                         cure="make it again as a .tar: tar cf clips.tar *.jsonl")  # fmt: skip
    if special(path):  # whose first line would be waited for
        return
    try:
        with path.open("rb") as file:
            first = _object(file.readline(_NUM_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError, _LineError):  # whoever reads it says what is wrong
        return
    if not first.keys().isdisjoint(_FILE_KEYS):
        raise UsageError("these are the lines of a manifest, whose name ends in .jsonl", where=str(path),
                         cure=f"rename it to {path.stem.removesuffix('.jsonl')}.jsonl")  # fmt: skip


def read_manifest(
    path: Path, media: Media | None = None, *, mixed: bool = False, multiple_captions: bool = False
) -> tuple[list[Item], list[Problem]]:
    """The items of a manifest in the order of its lines, and everything that is wrong with it, by line.

    Args:
        path: the jsonl file.
        media: what its lines hold; None: both.
        mixed: lines of the other media are left to whoever asks for those, and are no mistake.
        multiple_captions: every line of a caption is a caption of its own.

    Raises:
        WangenError: the file cannot be read, or is no text in UTF-8.
    """
    numbered, problems = read_lines(path, None if mixed else media, multiple_captions=multiple_captions)
    wanted = {number: item for number, item in numbered.items() if media in (None, item.media)}
    return list(wanted.values()), problems + _uneven(wanted, path)


def read_lines(
    path: Path, media: Media | None = None, *, multiple_captions: bool = False, bare: bool = False
) -> tuple[dict[int, Item], list[Problem]]:
    """As `read_manifest`, each item by the number of its line, and without comparing the lines.

    With `bare` a line may lack a caption; its item has none then.
    """
    text = _text(path)
    if text.lstrip().startswith("["):
        return {}, [Problem(path, "is one JSON list", "write one object a line, without brackets and commas around")]
    items: dict[int, Item] = {}
    problems, num_bad = [], 0
    for number, line in _lines(text):
        try:
            items[number] = _item(_object(line), number, media, path, multiple=multiple_captions, bare=bare)
        except _LineError as bad:
            num_bad += 1
            if num_bad <= MAX_TOLD:
                problems.append(Problem(path, f"line {number}: {bad.found}", bad.cure))
    if num_bad > MAX_TOLD:
        problems.append(Problem(path, f"has {num_bad - MAX_TOLD} more lines like these", "is it a manifest at all?"))
    if not items and not problems:
        key = f"{media}_path" if media else "file"
        problems.append(Problem(path, "holds no lines", f'write {{"{key}": "…", "caption": "…"}} for each item'))
    return items, problems


def describe_manifest(path: Path) -> dict[Media, Clips]:
    """What a manifest says of its images and of its clips; what is wrong with it says `read_manifest`.

    Raises:
        WangenError: the file cannot be read, or is no text in UTF-8.
    """
    found: dict[Media, Clips] = {}
    for _, line in _lines(_text(path)):
        try:
            values = _object(line)
            media = media_of(str(_one_of(values, _FILE_KEYS)))
        except _LineError:
            continue
        if media:
            clips = found.setdefault(media, Clips(Counter(), Counter(), 0))
            found[media] = Clips(clips.sizes, clips.frames, clips.number + 1)
            width, height, frames = (_count(values, key) for key in ("width", "height", "frames"))
            clips.sizes.update([(width, height)] if width and height else [])
            clips.frames.update([frames] if frames else [])
    return found


class _LineError(Exception):
    """What is wrong with a line, on its way out."""

    def __init__(self, found: str, cure: str = "mend this line") -> None:
        self.found, self.cure = found, cure


def _text(path: Path) -> str:
    try:
        parts = _packed(path) if path.suffix.lower() == PACKED else [read_file(path)]
        return "\n".join(part.decode("utf-8-sig") for part in parts)
    except OSError as error:
        raise WangenError(f"cannot read the manifest: {error.strerror}", where=str(path),
                          cure="check its path") from None  # fmt: skip
    except UnicodeDecodeError:
        raise WangenError("the manifest is not UTF-8", where=str(path), cure="save it as UTF-8") from None


def _packed(path: Path) -> list[bytes]:
    """The manifests in a tar, in its order; other files in it are passed over."""
    import tarfile

    try:
        with tarfile.open(path, "r:") as tar:
            files = [tar.extractfile(member) for member in tar if member.isreg() and is_jsonl(Path(member.name))]
            parts = [file.read() for file in files if file]
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise WangenError(f"cannot read the tar of manifests: {error}", where=str(path),
                          cure="make it again: tar cf clips.tar *.jsonl, without compression") from None  # fmt: skip
    if not parts:
        raise WangenError("the tar holds no manifest", where=str(path), cure="put .jsonl files into it")
    return parts


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, counted from 1."""
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _object(line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _LineError(f"is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise _LineError("is no JSON object", 'write {"…": "…"}')
    return values


def _count(values: Mapping[str, Any], key: str) -> int:
    """A number above 0 that a line says; else 0."""
    number = values.get(key)
    return number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else 0


def _one_of(values: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """The value of the one of these keys that a line has; None where it has none, or null."""
    given = [key for key in keys if key in values]
    if len({json.dumps(values[key]) for key in given}) > 1:
        raise _LineError(f"has {' and '.join(given)}, one is needed")
    return values[given[0]] if given else None


def _item(
    values: Mapping[str, Any], number: int, media: Media | None, manifest: Path, *, multiple: bool, bare: bool
) -> Item:
    keys = _FILE_KEYS if media is None else ("file", f"{media}_path", "file_name")
    if not any(key in values for key in keys):
        raise _no_file(values, media)
    _one_of(values, keys)
    path = _file(values, next(key for key in keys if key in values), {media} if media else {"image", "video"}, manifest)
    found = media_of(path)
    assert found, "just judged by its ending"
    if fault := name_fault(path.name):
        raise _LineError(f"{printable(path.name)}: {fault}", "rename it")
    kinds: set[Media] = {"image"} if found == "image" else {"image", "video"}
    controls = sorted((int(match[1] or -1), name) for name in values if (match := _CONTROL.fullmatch(name)))
    excerpt = _excerpt(values, number, found)
    empty = excerpt is not None
    captions, origin = _captions(values, path, manifest, multiple=multiple, bare=bare, empty=empty)
    item = Item(
        path,
        found,
        captions,
        origin,
        tuple(_file(values, name, kinds, manifest) for _, name in controls),
        _file(values, "mask_path", kinds, manifest) if "mask_path" in values else None,
        str(values.get("label") or ""),
        excerpt,
    )
    if excerpt and any(media_of(companion) == "video" for companion in item.companions):
        raise _LineError(
            "takes frames of a longer video, and has a clip as its control or mask", "give a still picture"
        )
    return item


def _excerpt(values: Mapping[str, Any], number: int, media: Media) -> Excerpt | None:
    try:
        excerpt = read_excerpt(values, number)
    except ValueError as error:
        raise _LineError(str(error)) from None
    if excerpt and media == "image":
        raise _LineError("takes frames of an image", "take first_frame and frame_step out")
    return excerpt


def _no_file(values: Mapping[str, Any], media: Media | None) -> _LineError:
    if media is None:
        return _LineError("has no file", 'write "file": "…"')
    other = "image" if media == "video" else "video"
    cure = f"use {other}_jsonl_file" if f"{other}_path" in values else f'write "{media}_path": "…"'
    return _LineError(f"has no {media}_path", cure)


def _captions(
    values: Mapping[str, Any], path: Path, manifest: Path, *, multiple: bool, bare: bool, empty: bool
) -> tuple[tuple[str, ...], Path]:
    """The captions of a line, and where they stand: in the manifest, or else in the caption file beside the media.

    One that the line itself says may be empty with `empty`.
    """
    raw, origin = _one_of(values, _CAPTION_KEYS), manifest
    if not any(key in values for key in _CAPTION_KEYS):
        origin = path.with_suffix(CAPTION)
        try:
            raw = read_caption(origin)
        except FileNotFoundError:
            if bare:
                return (), manifest
            raise _LineError(NO_CAPTION, f'write "caption": "…", or {origin.name} beside the file') from None
        except BadItemError as bad:
            raise _LineError(f"{bad.problem.path.name} {bad.problem.found}", bad.problem.cure) from None
    texts: list[Any] = raw if isinstance(raw, list) else [raw]
    if not texts:
        raise _LineError(NO_CAPTION, 'write "caption": "…", or a list of them')
    if not all(isinstance(text, str) for text in texts):
        raise _LineError(f"caption must be a text or a list of texts, got {json.dumps(raw)[:40]}")
    if texts == [""] and empty:
        return ("",), origin
    if any(map(is_blank, texts)):
        raise _LineError("its caption is empty", "describe the picture in a sentence")
    if not all(_is_unicode(text) for text in texts):
        raise _LineError("its caption holds half a character")
    return tuple(caption for text in texts for caption in split_captions(text.strip(), multiple=multiple)), origin


def _is_unicode(text: str) -> bool:
    """Whether a text can be written: JSON can hold half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _file(values: Mapping[str, Any], key: str, kinds: set[Media], manifest: Path) -> Path:
    """The file that a line names, which is there and is of one of these kinds by its ending."""
    text = values[key]
    if not isinstance(text, str) or not text:
        raise _LineError(f"{key} must be a path, got {json.dumps(text)[:40]}")
    said = printable(text if len(text) < _NAME_CHARACTERS else text[:_NAME_CHARACTERS] + "…")
    # A manifest that was written on Windows: elsewhere its backslashes would be part of a name.
    for name in (text, text.replace("\\", "/")):
        for start in (manifest.parent, Path()):
            path = start / name
            if os.path.isfile(path):  # noqa: PTH113 (three times as fast as Path's, for 100,000 lines)
                if media_of(path) not in kinds:
                    raise _LineError(f"{said} is no {' or '.join(sorted(kinds))} by its ending")
                return path
            if os.path.isdir(path):  # noqa: PTH112 (as above)
                raise _LineError(f"{said} is a folder", "name a file in it, or take the line out")
    raise _LineError(f"{said} is not there", "mend the path or take the line out")


def _uneven(items: Mapping[int, Item], manifest: Path) -> list[Problem]:
    """Lines without the control media or the mask that other lines have: training takes them from all or from none."""
    problems = []
    controlled = any(item.controls for item in items.values())
    masked = any(item.mask for item in items.values())
    for number, item in items.items():
        if controlled and not item.controls:  # how many there are is the model's business
            problems.append(Problem(manifest, f"line {number}: has no control_path, other lines have one",
                                    "write it, or take it out of the others"))  # fmt: skip
        if masked and not item.mask:
            problems.append(Problem(manifest, f"line {number}: has no mask_path, other lines have one",
                                    "write it; a white picture masks nothing"))  # fmt: skip
    return problems
