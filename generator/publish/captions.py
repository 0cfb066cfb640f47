"""Where the captions of a dataset stand before it is published: text files beside the media, or lines of a jsonl.

How a jsonl is written says `generator/manifests.py`.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from wangen.generator import manifests
from wangen.generator.dataset import NO_CAPTION, BadItemError, Item, Problem, folded, media_of, read_caption
from wangen.generator.errors import WangenError

CAPTION_SUFFIXES = (".txt", ".caption")


class Caption(NamedTuple):
    """A caption, the file it stands in, and that place in words; with what its line of a jsonl names beside the media.

    Attributes:
        text: the caption.
        path: the file.
        place: the file's name, or a line of it.
        controls: control images, in their order.
        mask: the mask.
    """

    text: str
    path: Path
    place: str
    controls: tuple[Path, ...] = ()
    mask: Path | None = None

    @property
    def companions(self) -> tuple[Path, ...]:
        """All that its line names beside the media."""
        return (*self.controls, self.mask) if self.mask else self.controls


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
    try:
        items, problems = manifests.read_lines(path)
    except WangenError as error:
        return {}, [Problem(path, error.found, error.cure)]
    found: dict[Path, list[Caption]] = {}
    for number, item in items.items():
        place = f"{path.name} line {number}"
        if item.excerpt:
            found_here = f"line {number}: takes frames of a longer video, and a bundle holds whole files"
            problems.append(Problem(path, found_here, "give the manifest to the steps themselves, as --manifest"))
            break
        controls, mask = tuple(map(normal, item.controls)), item.mask and normal(item.mask)
        captions = [Caption(text, path, place, controls, mask) for text in item.captions]
        found.setdefault(normal(item.path), []).extend(captions)
    return found, problems


def normal(path: Path) -> Path:
    """A path without `.` and `..`, by its text alone: lines of a jsonl may spell one file in several ways."""
    return Path(os.path.normpath(path))


def choose(media: Path, captions: list[Caption]) -> Item:
    """The media file with its one caption, which may stand in several places, and what lines name beside it.

    Raises:
        BadItemError: there is none, or they differ.
    """
    if not captions:
        raise BadItemError(media, NO_CAPTION, f"write {media.stem}.txt beside it")
    if len({caption.text for caption in captions}) > 1:
        places = ", ".join(caption.place for caption in captions)
        raise BadItemError(media, f"has captions that differ: {places}", "keep one of them")
    for what, given in (
        ("control images", [(caption.controls, caption.place) for caption in captions if caption.controls]),
        ("masks", [((caption.mask,), caption.place) for caption in captions if caption.mask]),
    ):
        if len({files for files, _ in given}) > 1:
            places = ", ".join(dict.fromkeys(place for _, place in given))
            raise BadItemError(media, f"has {what} that differ: {places}", "keep one of them")
    controls = next((caption.controls for caption in captions if caption.controls), ())
    mask = next((caption.mask for caption in captions if caption.mask), None)
    return Item(media, media_of(media) or "image", (captions[0].text,), captions[0].path, controls, mask)


def with_trigger(caption: str, trigger: str) -> str:
    """The caption with the trigger word in front, unless it holds it as a word already.

    >>> with_trigger("a cat", "ohwx"), with_trigger("an ohwx cat", "ohwx"), with_trigger("ohwxes", "ohwx")
    ('ohwx, a cat', 'an ohwx cat', 'ohwx, ohwxes')
    """
    if not trigger or re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", caption):
        return caption
    return f"{trigger}, {caption}"
