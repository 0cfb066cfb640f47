"""A block of a dataset TOML -> its items with their control media and masks, or what is wrong with them."""

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from wangen import profiles
from wangen.generator.dataset import (
    BadItemError,
    Item,
    Media,
    MediaFacts,
    Problem,
    folded,
    list_folder,
    media_of,
    scan,
    unreadable,
)
from wangen.generator.errors import many, printable
from wangen.generator.geometry import clip_fault, misfit
from wangen.generator.manifests import read_manifest
from wangen.generator.tomls import DatasetEntry
from wangen.profiles import Model

log = logging.getLogger("wangen")

_FOREIGN: Mapping[Media, tuple[str, ...]] = {
    "image": (".gif", ".heic", ".heif", ".jfif", ".jp2", ".jxl", ".tga", ".tif", ".tiff"),
    "video": (".3gp", ".gif", ".m2ts", ".mts", ".ogv", ".ts", ".vob"),
}
"""Endings of media that are not read: people take them for a part of the dataset."""
_SHOWN = 20

_NUMBERED = re.compile(r"(.+)_([0-9]{1,4})")


def read_items(entry: DatasetEntry, *, deep: bool = True) -> tuple[list[Item], list[Problem]]:
    """The items of a block, in the order of the file names or of the manifest's lines, and all that is wrong.

    Control media are found in `control_directory` by the media's stems: for an image `<stem>.*`, then `<stem>_0.*`,
    `<stem>_1.*` and so on (a file whose whole stem is another image's is that image's alone); for a clip one video or
    one still picture `<stem>.*`. A mask is one file `<stem>.*` of `mask_directory`. Letter case does not matter.

    Args:
        entry: the block.
        deep: open every file to see that it can be read; items with one that cannot be are left out.

    Raises:
        WangenError: a folder cannot be listed or the manifest not be read, or the library for clips is not installed.
    """
    if entry.manifest:
        items, problems = read_manifest(
            entry.manifest, entry.media, mixed=entry.mixed, multiple_captions=entry.multiple_captions
        )
        to_open = [path for item in items for path in (item.path, *item.companions)]
    else:
        items, problems = scan(
            entry.directory, media=entry.media, caption_extension=entry.caption_extension,
            multiple_captions=entry.multiple_captions, deep=deep,
        )  # fmt: skip
        _say_foreign(entry)
        items, missing = with_companions(items, entry)
        problems += missing
        to_open = [path for item in items for path in item.companions]
    bad_files = unreadable(to_open) if deep and to_open else {}
    items = [item for item in items if bad_files.keys().isdisjoint((item.path, *item.companions))]
    return items, [*problems, *bad_files.values()]


def unsuited(item: Item, model: Model) -> tuple[str, str] | None:
    """Why a model cannot be trained on an item, whatever its size and length, and the cure; None when it can.

    Args:
        item: with its control media.
        model: whether it makes pictures alone, and how many control images it takes.
    """
    most = model.max_controls
    if model.num_frames == 1 and "video" in map(media_of, (item.path, *item.companions)):
        if (usual := profiles.model(model.name).num_frames) > 1:
            cure = f"write num_frames = {usual}, or take it out"
            return "is or has a clip, and wangen.toml says num_frames = 1", cure
        return f"is or has a clip, and {model.name} makes pictures", "take it out"
    if model.condition == "controls" and not 1 <= len(item.controls) <= most:
        found = f"has {many(len(item.controls), 'control image')}, and {model.name} takes {wanted_controls(model)}"
        if item.controls:
            return found, fewer_controls(model)
        return found, "put them into control_directory of the dataset's TOML, or name them in a manifest's control_path"
    return None


def misfits(item: Item, entry: DatasetEntry, model: Model, facts_of: Callable[[Path], MediaFacts]) -> Iterator[Problem]:
    """Why a model cannot be trained on an item: its kind, a clip too short, control media and masks that do not fit.

    Args:
        item: with its companions.
        entry: the block it belongs to.
        model: that is to be trained.
        facts_of: gives the facts of a file; asked where something depends on them.
    """
    if wrong := unsuited(item, model):
        yield Problem(item.path, *wrong)
        return
    if item.media == "video" and (short := clip_fault(item, facts_of(item.path), entry, model.fps)):
        yield Problem(item.path, *short)
        return
    for path in item.companions:
        facts, still = facts_of(item.path), media_of(path) == "image"
        if wrong := misfit(facts, facts_of(path), entry, model.fps, still=still, mask=path == item.mask):
            yield Problem(path, *wrong)


def fewer_controls(model: Model) -> str:
    """What to do with more control images than a model takes."""
    return "take the others away" + (", or use --task qwen-image-edit-plus" if model.max_controls == 1 else "")


def wanted_controls(model: Model) -> str:
    """How many control images a model that edits takes, in words."""
    return "one control image" if model.max_controls == 1 else f"one to {model.max_controls} control images"


def _say_foreign(entry: DatasetEntry) -> None:
    """Name and count the files of a folder that look like media and are not read."""
    with os.scandir(entry.directory) as files:
        names = sorted(file.name for file in files if file.name.lower().endswith(_FOREIGN[entry.media]))
    if names:
        rest = f" … and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        log.warning("  left out of %s, their format is not read: %d (%s%s); save images as png or jpg, clips as mp4",
                    entry.directory.name, len(names), ", ".join(map(printable, names[:_SHOWN])), rest)  # fmt: skip


def with_companions(items: Sequence[Item], entry: DatasetEntry) -> tuple[list[Item], list[Problem]]:
    """The items with what the folders beside them hold, and those that lack something as problems.

    Args:
        items: of the block.
        entry: the block, which names the folders of control media and masks.

    Raises:
        WangenError: such a folder cannot be listed.
    """
    controls = entry.control_directory and _Companions(entry.control_directory, items, entry, numbered=True)
    masks = entry.mask_directory and _Companions(entry.mask_directory, items, entry, numbered=False)
    if not controls and not masks:
        return list(items), []
    found, problems = [], []
    for item in items:
        try:
            own_controls = controls.of(item, "control") if controls else ()
            own_masks = masks.of(item, "mask") if masks else ()
            found.append(replace(item, controls=own_controls, mask=own_masks[0] if own_masks else None))
        except BadItemError as bad:
            problems.append(bad.problem)
    return found, problems


def owner_of(path: Path, stems: Collection[str], *, numbered: bool) -> tuple[str, int]:
    """Whose a file beside the items is by its name: the item's stem, folded, and the file's number, -1 without one.

    >>> owner_of(Path("Lake_1.png"), {"lake"}, numbered=True), owner_of(Path("lake_1.png"), {"lake_1"}, numbered=True)
    (('lake', 1), ('lake_1', -1))

    Args:
        path: of the file.
        stems: those of all items, folded; a file that is called as one of them belongs to it.
        numbered: an item may have several, `lake_0.png` and `lake_1.png`.
    """
    stem = folded(path.stem)
    match = _NUMBERED.fullmatch(stem) if numbered and stem not in stems else None
    return (match[1], int(match[2])) if match else (stem, -1)


class _Companions:
    """The files of a folder by the items that they belong to."""

    def __init__(self, folder: Path, items: Iterable[Item], entry: DatasetEntry, *, numbered: bool) -> None:
        kinds: set[Media] = {"image"} if entry.media == "image" else {"image", "video"}
        self._folder = folder
        self._wanted = " or ".join(sorted(kinds))
        self._files: dict[str, dict[int, list[Path]]] = {}
        stems = {folded(item.path.stem) for item in items}
        for path in list_folder(folder):
            if media_of(path) not in kinds:
                continue
            stem, number = owner_of(path, stems, numbered=numbered and entry.media == "image")
            self._files.setdefault(stem, {}).setdefault(number, []).append(path)

    def of(self, item: Item, role: str) -> tuple[Path, ...]:
        """The files of an item, in their order.

        Raises:
            BadItemError: there is none, or two stand for one.
        """
        numbers = self._files.get(folded(item.path.stem))
        if not numbers:
            raise BadItemError(
                item.path, f"has no {role} in {self._folder}", f"put {item.path.stem}.* there: an {self._wanted}"
            )
        for paths in numbers.values():
            if len(paths) > 1:
                names = " and ".join(path.name for path in paths)
                raise BadItemError(item.path, f"has two files for one {role}: {names}", "keep one of them")
        return tuple(paths[0] for _, paths in sorted(numbers.items()))
