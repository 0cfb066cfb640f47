"""What wangen wrote for a dataset on a target, and removing it: never a file that it did not write.

A file is known by its manifest, its header or its digest, not by its name alone. Scripts and TOML files that the user
changed, and media whose original is gone, are shown and stay.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from wangen.generator import footage, scripts
from wangen.generator.bundle import PROMPTS, script_names
from wangen.generator.errors import WangenError
from wangen.generator.files import remove
from wangen.generator.publish import layout, manifest, prompt_pictures
from wangen.generator.publish.deploy import TEMPORARY, prefix
from wangen.generator.publish.inventory import Inventory, Part, entries_of
from wangen.generator.publish.manifest import Record
from wangen.generator.publish.prompt_pictures import PROMPT_ENDINGS, Note
from wangen.generator.publish.texts import beside, toml_file
from wangen.generator.publish.written import look_at_cache, look_at_clips, look_at_outputs, look_at_process_logs
from wangen.generator.setup.scripts import script_name
from wangen.generator.signing import unedited
from wangen.generator.table import SMOKE
from wangen.generator.target import Target


@dataclass
class _Seen:
    """What was looked at on the way from target to target: several may share a root, or links to one file.

    Attributes:
        scripts: where the dataset's run scripts are.
        datasets: the folders of its media folders: an original in one of those need not stay.
        prompts: where its sample prompts are.
        folders: those that count for an earlier target.
        links: (device, inode) -> how many of its names would be removed.
    """

    scripts: set[Path]
    datasets: set[Path]
    prompts: set[Path]
    folders: set[Path] = field(default_factory=set)
    links: Counter[tuple[int, int]] = field(default_factory=Counter)

    def first(self, folder: Path) -> bool:
        """Whether a folder was not looked at before."""
        key = folder.resolve()
        new = key not in self.folders
        self.folders.add(key)
        return new


def survey(targets: Iterable[Target], slug: str, resolutions: Iterable[str] = ()) -> list[Inventory]:
    """Look for everything that wangen wrote for a dataset, target by target; what they share counts for the first.

    Args:
        targets: where.
        slug: the dataset.
        resolutions: names of resolutions; only their media and caches are looked for then. Empty: everything.

    Raises:
        WangenError: this host cannot see a folder of a target, or cannot read a file of ours.
    """
    targets = list(targets)
    run_scripts = {path for target in targets for path in _run_scripts(target, slug)}
    datasets = {layout.published_folder(target, slug).resolve() for target in targets}
    prompts = {path for target in targets for path in _prompts(target, slug)}
    seen = _Seen(run_scripts, datasets, prompts)
    return [_survey(target, slug, set(resolutions), seen) for target in targets]


def _survey(target: Target, slug: str, wanted: set[str], seen: _Seen) -> Inventory:
    dataset, output = layout.published_folder(target, slug), layout.output_folder(target, slug)
    found = Inventory(target, slug, own=(dataset, output))
    if seen.first(dataset):
        for folder in (path for path in entries_of(dataset) if path.is_dir()):
            if wanted and folder.name.removesuffix("_cache") not in wanted:
                continue
            if folder.name == footage.CLIPS:
                look_at_clips(found, folder)
            elif folder.name.endswith("_cache"):
                look_at_cache(found, folder)
            else:
                _look_at_media(found, folder, seen)
    found.folders["bundle"].append(dataset)
    found.folders["caches"].append(dataset)
    if not wanted:
        _look_at_texts(found, seen)
        if seen.first(output):
            look_at_outputs(found, output / SMOKE)
            look_at_outputs(found, output)
        log = layout.reach(target, target.roots["logs"]) / f"{slug}.log"
        if seen.first(log.parent):
            found.files["outputs"] += [log] if log.is_file() else []
            found.files["outputs"] += look_at_process_logs(found, log.with_suffix(""))
            found.folders["outputs"].append(log.parent)
    return found


def clean(inventory: Inventory, part: Part) -> int:
    """Remove the files of a part; returns how many they were.

    Raises:
        WangenError: a file cannot be removed; what was removed before is gone.
    """
    for path in inventory.files[part]:
        try:
            remove(path)
        except OSError as error:
            cure = "close what uses it or fix the rights, then run the same line again"
            raise WangenError(f"cannot be removed: {error.strerror}", where=str(path), cure=cure) from None
    return len(inventory.files[part])


def remove_empty_folders(inventory: Inventory, parts: Iterable[Part]) -> None:
    """Remove the folders of parts that are empty, and the dataset's, which the lock of a clean may have made."""
    folders = [folder for part in parts for folder in inventory.folders[part]]
    for folder in (*folders, inventory.own[0]):
        _remove_empty(folder, inventory.target)


def known_slugs(target: Target) -> set[str]:
    """The datasets of which a target holds anything."""
    places = [layout.reach(target, target.roots[name]) for name in ("datasets", "outputs")]
    found = {path.name for place in places for path in entries_of(place) if path.is_dir()}
    names = (path.name.removesuffix(".new") for path in target.folder.glob("train_*.*"))
    shells = target.platform.shells
    return found | {Path(name).stem.removeprefix("train_") for name in names if Path(name).suffix[1:] in shells}


def _remove_empty(folder: Path, target: Target) -> None:
    """Remove a folder and those above it as long as they are empty, up to the root of the target."""
    top = target.folder.parent if target.root is None else target.folder
    while folder != top and top in folder.parents:
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:  # not empty, or in use: it costs nothing
            return
        folder = folder.parent


def _run_scripts(target: Target, slug: str) -> list[Path]:
    return [target.folder / file for _, file in script_names(target, slug)]


def _look_at_texts(found: Inventory, seen: _Seen) -> None:
    target, slug = found.target, found.slug
    for path in _run_scripts(target, slug):
        for file in (path, beside(path)):
            _judge_text(found, file, _script_edit)
    path = toml_file(target, slug)
    for file in (path, beside(path), *_prompts(target, slug)):
        _judge_text(found, file, lambda data: "" if unedited(data) else "edited by hand")
    prompts = target.folder / "files" / PROMPTS
    _look_at_pictures(found, prompts, seen)
    if not set(target.folder.glob("train_*.*")) - seen.scripts - set(map(beside, seen.scripts)):
        _look_at_setup(found, seen)  # the last dataset takes what all share
    for folder in (target.folder, path.parent, prompts):
        found.files["bundle"] += folder.glob(f"{prefix(slug)}*")
    found.folders["bundle"] += [path.parent, prompts]


def _prompts(target: Target, slug: str) -> list[Path]:
    """Where the sample prompts of a dataset may be, and new ones beside edited ones."""
    places = [toml_file(target, slug).with_suffix(ending).name for ending in PROMPT_ENDINGS]
    copies = [target.folder / "files" / PROMPTS / name for name in places]
    return [place for copy in copies for place in (copy, beside(copy))]


def _look_at_pictures(found: Inventory, folder: Path, seen: _Seen) -> None:
    """Pictures that the dataset's sample prompts name, and no prompts that stay."""
    notes: dict[str, list[Note]] = {}
    stay: set[str] = set()
    for path in prompt_pictures.prompts_in(folder):
        with suppress(OSError, WangenError):
            data = path.read_bytes()
            if path in seen.prompts and unedited(data):
                for name, note in prompt_pictures.read(data):
                    notes.setdefault(name, []).append(note)
            else:
                stay |= {name for name, _ in prompt_pictures.read(data)}
                stay |= {*prompt_pictures.named_pictures(path)}
    for name, own in notes.items():
        if name not in stay and seen.first(folder / name):
            for picture in (folder / name, beside(folder / name)):
                _judge_text(found, picture, partial(_picture_edit, own, folder.parent))
            found.folders["bundle"].append((folder / name).parent)


def _picture_edit(notes: Iterable[Note], files: Path, data: bytes) -> str:
    """Why a picture beside sample prompts is to stay, in words; empty where it may go.

    Args:
        notes: of what was published there.
        files: of the bundle, in which an original may be removed as well.
        data: of the picture.
    """
    note = next((note for note in notes if note.digest == manifest.digest_of(data)), None)
    if note is None:
        return "changed in the bundle"
    origin = Path(os.path.realpath(note.origin))  # it may lie in the bundle itself, or be a link into it
    stays = origin.is_file() and not origin.is_relative_to(os.path.realpath(files))
    return "" if stays else f"the only copy: {note.origin} is gone or lies in the bundle"


def _look_at_setup(found: Inventory, seen: _Seen) -> None:
    folder = found.target.folder
    for path in (folder / script_name(shell) for shell in found.target.platform.shells):
        for file in (path, beside(path)):
            _judge_text(found, file, _script_edit)
    if seen.first(folder / "files"):
        found.files["bundle"] += (folder / "files").glob("wangen-*-py3-none-any.whl")


def _judge_text(found: Inventory, path: Path, edit: Callable[[bytes], str]) -> None:
    try:
        reason = edit(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    if reason:
        found.kept["bundle"].append((path, reason))
    else:
        found.files["bundle"].append(path)


def _script_edit(data: bytes) -> str:
    """How a script differs from what wangen wrote, in words; empty when it does not."""
    if not scripts.untouched(data):
        return "edited by hand"
    changed = scripts.changed_knobs(data)
    return "you set " + ", ".join(f"{knob}={mine}" for knob, (mine, _) in changed.items()) if changed else ""


def _look_at_media(found: Inventory, folder: Path, seen: _Seen) -> None:
    """Files that the manifest names; of media whose original is gone, one copy stays."""
    known, entries = manifest.read(folder), entries_of(folder)
    names, kept = known.names(), found.kept["bundle"]
    num_kept = len(kept)
    for path in (path for path in entries if path.name in names):
        with suppress(FileNotFoundError):
            try:
                record = known.match(path)
            except WangenError as error:
                kept.append((path, error.found))
                continue
            last = record or known.files.get(path.name, Record())
            lost = last.origin and not last.is_caption and not Path(last.origin).is_file()
            if record and _spare(path, record, seen):
                found.files["bundle"].append(path)
            elif record or lost:
                kept.append((path, f"the only copy: {last.origin} is gone"))
            else:
                kept.append((path, "changed in the bundle"))
    notes = [path for path in entries if path.name.startswith(TEMPORARY)]
    if len(kept) == num_kept:  # else it is needed to know the others again
        notes += [path for path in (folder / manifest.NAME,) if path.is_file()]
    found.files["bundle"] += notes
    found.folders["bundle"].append(folder)


def _spare(path: Path, record: Record, seen: _Seen) -> bool:
    """Whether the content of a published file will be somewhere else, too."""
    origin = Path(os.path.realpath(record.origin))  # the source may have become a link into the bundle
    stat = path.stat()
    stays = bool(record.origin) and origin.is_file() and origin.parent.parent not in seen.datasets
    if not stays and seen.links[stat.st_dev, stat.st_ino] + 1 >= stat.st_nlink:
        return False
    seen.links[stat.st_dev, stat.st_ino] += 1
    return True


def total_bytes(paths: Iterable[Path]) -> int:
    """What files take; those that are gone take nothing."""
    total = 0
    for path in paths:
        with suppress(OSError):
            total += os.lstat(path).st_size
    return total
