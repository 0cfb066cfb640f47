"""What lies beside the items of a dataset that is published: control images of models that edit, and masks.

They stand in folders inside the dataset's, named as the pictures they belong to, or in the lines of a jsonl, wherever
they are and whatever they are called. In the bundle each kind has one folder, which all resolutions share.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from wangen.generator.dataset import Item, Problem, folded
from wangen.generator.items import owner_of, wanted_controls, with_companions
from wangen.generator.tomls import DatasetEntry
from wangen.profiles import Model

CONTROLS, MASKS = "controls", "masks"
"""The folders of a dataset, and of its bundle, that hold the control images and the masks."""
FOLDERS = (CONTROLS, MASKS)

Named = list[tuple[str, Path]]
"""Files by the names that they get in a folder of the bundle."""


def with_beside(origin: Path, items: Sequence[Item], model: Model) -> tuple[list[Item], list[Problem], list[str]]:
    """The items with their control images and masks, and what is wrong with these.

    Args:
        origin: the dataset's folder, or its jsonl, whose lines name them.
        items: with what lines of a jsonl name.
        model: whether it takes control images.

    Returns:
        The items, the problems, and what is named and not taken, a line each.

    Raises:
        WangenError: a folder cannot be listed.
    """
    found, problems, left_out = list(items), list[Problem](), list[str]()
    if model.condition == "controls":
        found, problems = _with_controls(origin, items, model)
    elif unused := sum(len(item.controls) for item in items):
        found = [replace(item, controls=()) for item in items]
        left_out = [f"{unused} control images of the jsonl ({model.name} takes none)"]
    found, missing = _with_masks(origin, found)
    return found, [*problems, *missing], left_out


def _with_controls(origin: Path, items: Sequence[Item], model: Model) -> tuple[list[Item], list[Problem]]:
    bare = [item for item in items if not item.controls]
    folder = origin / CONTROLS
    if bare and folder.is_dir():
        return _from_folder(items, bare, DatasetEntry(
            directory=origin, media="image", cache_directory=origin, control_directory=folder
        ))  # fmt: skip
    if len(bare) < len(items):
        found = f"has no control image, and {model.name} takes {wanted_controls(model)}"
        stills = [item for item in bare if item.media == "image"]
        return list(items), [Problem(item.path, found, "write control_path into its line") for item in stills]
    cure = f"put them into a folder {CONTROLS} inside the dataset's folder, named as the pictures that they become"
    cure = "write control_path into its lines" if origin.is_file() else f"{cure}, or name them in a jsonl"
    missing = Problem(origin, f"{model.name} edits pictures, and there are no control images", cure)
    return list(items), [missing] if items else []


def _with_masks(origin: Path, items: Sequence[Item]) -> tuple[list[Item], list[Problem]]:
    bare = [item for item in items if not item.mask]
    folder = origin / MASKS
    if not bare or not folder.is_dir():
        cure = "write its mask_path; a white picture masks nothing"
        lacking = bare if len(bare) < len(items) else []
        return list(items), [Problem(item.path, "has no mask, and others have one", cure) for item in lacking]
    found, problems = list(items), list[Problem]()
    for media in sorted({item.media for item in bare}):  # as the blocks of the bundle's TOML will find them
        entry = DatasetEntry(directory=origin, media=media, cache_directory=origin, mask_directory=folder)
        found, missing = _from_folder(found, [item for item in bare if item.media == media], entry)
        problems += missing
    return found, problems


def _from_folder(items: Iterable[Item], bare: Sequence[Item], entry: DatasetEntry) -> tuple[list[Item], list[Problem]]:
    """The items, the bare ones with what the folder of an entry has for them, or left out with a problem."""
    found, problems = with_companions(bare, entry)
    new = {item.path: item for item in found}
    lost = {item.path for item in bare} - new.keys()
    return [_joined(item, new.get(item.path, item)) for item in items if item.path not in lost], problems


def _joined(item: Item, new: Item) -> Item:
    return replace(item, controls=new.controls or item.controls, mask=new.mask or item.mask)


def taken_folders(items: Iterable[Item], origin: Path) -> set[str]:
    """Which of the folders inside the dataset's hold something that is published."""
    parents = {path.parent for item in items for path in item.companions}
    return {name for name in FOLDERS if origin / name in parents}


def in_bundle(items: Sequence[Item], origin: Path) -> tuple[dict[str, Named], list[Problem]]:
    """The control images and masks by the folder of the bundle that they go into, each with its name there.

    What a dataset's own folder holds for a picture keeps its name; what a jsonl names is called as the picture that it
    belongs to.

    Args:
        items: of the dataset.
        origin: its folder.

    Returns:
        The files, and pictures whose files would have one name.
    """
    found: dict[str, Named] = {}
    problems: list[Problem] = []
    pictures = {folded(item.path.stem) for item in items}
    for folder in FOLDERS:
        owners: dict[str, tuple[Item, tuple[Path, ...]]] = {}
        for item in items:
            files = _files(item, folder)
            own = folded(item.path.stem)
            other, theirs = owners.setdefault(own, (item, files))
            if files != theirs:
                clash = f"would share what is in {folder}/ of the bundle with {other.path.name}, and has other files"
                problems.append(Problem(item.path, clash, "rename one of them"))
            named = dict(_named(item, files, origin / folder, pictures))
            for name in (name for name in named if folded(Path(name).stem) in pictures - {own}):
                clash = f"{named[name].name} would be {name} in {folder}/ of the bundle, as that of another picture"
                problems.append(Problem(item.path, clash, "rename one of the pictures"))
            if other is item:
                found.setdefault(folder, []).extend(named.items())
    return {folder: named for folder, named in found.items() if named}, problems


def _files(item: Item, folder: str) -> tuple[Path, ...]:
    if folder == CONTROLS:
        return item.controls
    return (item.mask,) if item.mask else ()


def _named(item: Item, files: Sequence[Path], folder: Path, pictures: set[str]) -> Iterator[tuple[str, Path]]:
    """The name that each of an item's files gets; `pictures` are the stems of all items, folded.

    Its own it keeps where a look into the folder would find the same files for the item, in the same order.
    """
    numbered = folder.name == CONTROLS and item.media == "image"
    owners = [owner_of(path, pictures, numbered=numbered) for path in files]
    in_order = owners == sorted(set(owners)) and {stem for stem, _ in owners} <= {folded(item.path.stem)}
    keep = in_order and all(path.parent == folder for path in files)
    for number, path in enumerate(files):
        stem = item.path.stem if len(files) == 1 else f"{item.path.stem}_{number}"
        yield (path.name if keep else stem + path.suffix), path
