"""Where the captions of a dataset stand before it is published: text files beside the media, or lines of a jsonl.

A jsonl names one media file and its caption on each line: `{"image_path": "a.jpg", "caption": "a cat"}`. Paths are
relative to the jsonl; `video_path` and `file_name`, and `text`, mean the same; other keys are ignored.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from wangen.generator.dataset import BadItemError, Item, Problem, folded, media_of, read_caption

CAPTION_SUFFIXES = (".txt", ".caption")
MANIFEST_SUFFIX = ".jsonl"

_MEDIA_KEYS = ("image_path", "video_path", "file_name")
_CAPTION_KEYS = ("caption", "text")


class Caption(NamedTuple):
    """A caption, the file it stands in, and that place in words."""

    text: str
    path: Path
    place: str


class CaptionFiles:
    """The caption files of a folder by the media they belong to; letter case does not matter."""

    def __init__(self, entries: Iterable[Path]) -> None:
        self._files = [path for path in entries if path.suffix.lower() in CAPTION_SUFFIXES]
        self._exact = {path.name: path for path in self._files}
        self._folded = {folded(path.name): path for path in reversed(self._files)}

    def of(self, media: Path) -> list[Caption]:
        """The captions of a media file.

        Raises:
            BadItemError: one of them cannot be read.
        """
        found = []
        for suffix in CAPTION_SUFFIXES:
            name = media.stem + suffix
            path = self._exact.get(name) or self._folded.get(folded(name))
            if path:
                found.append(Caption(read_caption(path), path, path.name))
        return found

    def orphans(self, media: Iterable[Path]) -> list[Path]:
        """The caption files of no media file."""
        stems = {folded(path.stem) for path in media}
        return [path for path in self._files if folded(path.stem) not in stems]


def read_manifest(path: Path) -> tuple[dict[Path, list[Caption]], list[Problem]]:
    """The media that a jsonl names, with their captions, and what is wrong with its lines; blank lines are fine."""
    found: dict[Path, list[Caption]] = {}
    problems = []
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        return {}, [Problem(path, "is not UTF-8", "save it as UTF-8")]
    except OSError as error:
        return {}, [Problem(path, f"cannot be read: {error.strerror}", "check the path and its rights")]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            media, text = _read_line(line)
        except ValueError as error:
            problems.append(Problem(path, f"line {number}: {error}", "mend this line"))
            continue
        named = Path(os.path.normpath(path.parent / media))
        if media_of(named) is None:
            problems.append(
                Problem(path, f"line {number}: {media} is no image or video by its ending", "mend the line")
            )
        elif not _is_file(named):
            problems.append(Problem(path, f"line {number}: {media} is not there", "mend the path or take the line out"))
        else:
            found.setdefault(named, []).append(Caption(text, path, f"{path.name} line {number}"))
    return found, problems


def choose(media: Path, captions: list[Caption]) -> Item:
    """The media file with its one caption, which may stand in several places.

    Raises:
        BadItemError: there is none, or they differ.
    """
    if not captions:
        raise BadItemError(media, "has no caption", f"write {media.stem}.txt beside it")
    if len({caption.text for caption in captions}) > 1:
        places = ", ".join(caption.place for caption in captions)
        raise BadItemError(media, f"has captions that differ: {places}", "keep one of them")
    return Item(media, media_of(media) or "image", (captions[0].text,), captions[0].path)


def with_trigger(caption: str, trigger: str) -> str:
    """The caption with the trigger word in front, unless it holds it as a word already.

    >>> with_trigger("a cat", "ohwx"), with_trigger("an ohwx cat", "ohwx"), with_trigger("ohwxes", "ohwx")
    ('ohwx, a cat', 'an ohwx cat', 'ohwx, ohwxes')
    """
    if not trigger or re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", caption):
        return caption
    return f"{trigger}, {caption}"


def _read_line(line: str) -> tuple[str, str]:
    """The media path and the caption of a line. Raises ValueError in words."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(values, dict):
        raise ValueError("is no JSON object")
    return _text(values, _MEDIA_KEYS), _text(values, _CAPTION_KEYS)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for any file
        return False


def _is_unicode(text: str) -> bool:
    """Whether a text can be written: JSON can hold half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(values: Mapping[str, object], keys: tuple[str, ...]) -> str:
    given = [key for key in keys if key in values]
    if len(given) != 1:
        raise ValueError(f"has {' and '.join(given)}, one is needed" if given else f"has no {' or '.join(keys)}")
    text = values[given[0]]
    if not isinstance(text, str) or not text.strip() or "\0" in text or not _is_unicode(text):
        raise ValueError(f"{given[0]} is empty or no text")
    return text.strip() if keys is _CAPTION_KEYS else text
