"""Media and captions -> the media folder of a bundle: what is to be done there, and doing it.

The way of a file: a hard link, or a temporary file that is renamed when it is whole. New names come first, then
everything that replaces something in one go (`publish` does that together with scripts and TOML files), then what the
dataset no longer has is removed. The manifest names every file before it is written.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from wangen.generator.dataset import Problem, folded
from wangen.generator.errors import WangenError
from wangen.generator.files import remove, replace, sync_folder
from wangen.generator.publish import manifest
from wangen.generator.publish.captions import with_trigger
from wangen.generator.publish.manifest import CAPTION, UNKNOWN, Manifest, Record
from wangen.generator.publish.resize import RECIPE, bake, smaller_size
from wangen.generator.publish.source import Advance, Source
from wangen.generator.workspace import DatasetSettings
from wangen.profiles import Model

TEMPORARY = ".wangen-publish-"
"""How the names of our temporary files begin; they are short, because names may be as long as allowed."""

_NUM_THREADS = 8

T = TypeVar("T")


class Wanted(NamedTuple):
    """A file that the media folder shall hold.

    Attributes:
        origin: the source.
        text: its content when it is a caption.
        size: (width, height) in pixels when it is a smaller copy.
        made_of: what it is made from, as in the manifest.
        num_bytes: of the source.
    """

    origin: Path
    text: bytes | None
    size: tuple[int, int] | None
    made_of: str
    num_bytes: int


class Staged(NamedTuple):
    """A whole temporary file and the name it will get."""

    temporary: Path
    final: Path


@dataclass
class FolderPlan:
    """What publishing has to do in one media folder.

    Attributes:
        folder: the media folder.
        wanted: file name -> what it shall be.
        known: the manifest.
        new: names that are not there.
        changed: names whose content is another one.
        kept: names whose content somebody changed in the bundle, so that it stays.
        gone: names that the dataset has no longer.
        renamed: (old, new) names that differ in letter case or Unicode form only.
        problems: what forbids it.
    """

    folder: Path
    wanted: dict[str, Wanted]
    known: Manifest
    new: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.new or self.changed or self.gone or self.renamed or self.known.before)

    @property
    def num_same(self) -> int:
        """How many files are as they shall be."""
        return len(self.wanted.keys() - {*self.new, *self.changed, *self.kept})


def make_plan(
    folder: Path, source: Source, model: Model, settings: DatasetSettings, size: tuple[int, int]
) -> FolderPlan:
    """Compare a media folder with what it shall hold; nothing is written.

    Args:
        folder: the media folder as this host sees it.
        source: the dataset.
        model: its bucket step counts for smaller copies.
        settings: trigger word, and whether smaller copies are made.
        size: the folder's resolution as (width, height) in pixels.

    Raises:
        WangenError: a source, the folder or its manifest cannot be read.
    """
    known = manifest.read(folder)
    plan = FolderPlan(folder, _wanted(source, model, settings, size), known)
    listing = _listing(folder)
    gone = [name for name in known.names() - plan.wanted.keys() if name in listing]
    by_fold = {folded(name): name for name in gone if known.match(folder / name)}
    own = _own_folders(folder, source)
    for name, wanted in plan.wanted.items():
        record, path = known.files.get(name), folder / name
        if wanted.origin.parent in own and wanted.origin.name == name:
            continue  # the original itself
        if name in listing:
            done = record and record.made_of == wanted.made_of and record.size != UNKNOWN
            if done and name not in known.before:
                continue
            _judge(plan, name, path, wanted)
        elif folded(name) in by_fold:
            plan.renamed.append((by_fold[folded(name)], name))
            plan.changed.append(name)
        elif listing and os.path.lexists(path):  # a name that differs in case only, on Windows
            plan.problems.append(_in_the_way(path))
        else:
            plan.new.append(name)
    moved = {old for old, _ in plan.renamed}
    for name in gone:
        if name not in moved:
            ours = known.match(folder / name) or _is_link(folder / name, source)
            (plan.gone if ours else plan.kept).append(name)
    if own and (settings.resize or settings.trigger):
        found = "the source is this bundle's own folder, where --resize and --trigger would change the originals"
        plan.problems.append(Problem(folder, found, "give the folder with the originals as --source"))
    return plan


def _own_folders(folder: Path, source: Source) -> set[Path]:
    """The folders of the source that are the media folder itself."""
    parents = {item.path.parent for item in source.items} | {item.caption_path.parent for item in source.items}
    return {parent for parent in parents if folder.is_dir() and parent.samefile(folder)}


def _judge(plan: FolderPlan, name: str, path: Path, wanted: Wanted) -> None:
    """A file of that name is there, and the manifest does not say that it is the wanted one."""
    if name not in plan.known.names():
        if _same_content(wanted, path):
            plan.changed.append(name)
        else:
            plan.problems.append(_in_the_way(path))
    elif plan.known.match(path) or _same_content(wanted, path):
        plan.changed.append(name)
    else:
        plan.kept.append(name)


def _is_link(path: Path, source: Source) -> bool:
    """Whether a file is another name of one of the originals, so that a change of it is theirs."""
    with suppress(OSError):
        stat = path.stat()
        if stat.st_nlink > 1:
            return any(path.samefile(item.path) for item in source.items)
    return False


def _in_the_way(path: Path) -> Problem:
    return Problem(path, "a file that wangen did not write is in the way", f"move it away from {path.parent}")


def _wanted(source: Source, model: Model, settings: DatasetSettings, size: tuple[int, int]) -> dict[str, Wanted]:
    """What is published, by its name in the bundle; a caption gets the ending that the TOML names."""
    found = {}
    for item in source.items:
        facts = source.facts[item.path]
        smaller = None
        if settings.resize and item.media == "image":
            smaller = smaller_size(facts.width, facts.height, size, model.bucket_step)
        num_bytes, mtime_ns = source.states[item.path]
        made_of = f"{num_bytes} {mtime_ns}"
        if smaller:
            made_of += f" {RECIPE} {smaller[0]}x{smaller[1]}"
        found[item.path.name] = Wanted(item.path, None, smaller, made_of, num_bytes)
        text = with_trigger(item.caption, settings.trigger).encode()
        name = item.path.stem + CAPTION
        found[name] = Wanted(item.caption_path, text, None, manifest.caption_record(text), len(text))
    return found


def _listing(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))  # noqa: PTH208 - names, not ten thousand paths
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise WangenError(f"cannot list the folder: {error.strerror}", where=str(folder), cure="fix its rights or "
                          "move away what is in its place") from None  # fmt: skip


def _same_content(wanted: Wanted, path: Path) -> bool:
    try:
        if wanted.text is not None:
            return path.read_bytes() == wanted.text
        if path.samefile(wanted.origin):
            return True  # a link, which may become a smaller copy: the original keeps its own name
        content = bake(wanted.origin, wanted.size) if wanted.size else None
        if content is not None:
            return path.read_bytes() == content
        return path.stat().st_size == wanted.num_bytes and path.read_bytes() == wanted.origin.read_bytes()
    except OSError:
        return False


def announce(plan: FolderPlan, staged: Iterable[Staged]) -> Staged | None:
    """The manifest of a publish that begins: what was, and what will be. None when there is nothing to do.

    Args:
        plan: of the folder.
        staged: the temporary files of what changes.
    """
    if plan.idle:
        return None
    known, sizes = plan.known, {final.name: temporary.stat().st_size for temporary, final in staged}
    names = {*plan.changed, *plan.gone, *(old for old, _ in plan.renamed)}
    before = {name: known.match(plan.folder / name) or Record() for name in names}
    files = {name: record for name, record in known.files.items() if name not in names}
    for name in (*plan.new, *plan.changed):
        wanted = plan.wanted[name]
        size = sizes.get(name, UNKNOWN if wanted.size else wanted.num_bytes)
        files[name] = Record(wanted.made_of, size, str(wanted.origin))
    return stage(plan.folder / manifest.NAME, [Manifest(files, before).text().encode()])


def place_new(plan: FolderPlan, advance: Advance) -> None:
    """Put the files with new names into the folder, each whole; captions first, so that no item lacks one.

    Raises:
        WangenError: the disk refused.
    """
    for old, new in plan.renamed:
        replace(plan.folder / old, plan.folder / new)
    for texts in (True, False):
        names = [name for name in plan.new if (plan.wanted[name].text is not None) == texts]
        _each(partial(_place, plan), names, advance)


def stage_changed(plan: FolderPlan, advance: Advance) -> list[Staged]:
    """Temporary files for those that replace another one.

    Raises:
        WangenError: the disk refused.
    """
    made = _each(lambda name: _stage_wanted(plan.wanted[name], plan.folder / name), plan.changed, advance)
    return [staged for staged in made if staged]


def finish(plan: FolderPlan) -> Staged | None:
    """Remove what the dataset no longer has; the manifest that holds from now on, or None when it holds already.

    Raises:
        WangenError: a file cannot be removed.
    """
    if plan.idle:
        return None
    for name in plan.gone:
        path = plan.folder / name
        try:
            remove(path)
        except OSError as error:
            raise WangenError(f"cannot remove what the dataset no longer has: {error.strerror}", where=str(path),
                              cure="remove it by hand") from None  # fmt: skip
    done = {*plan.new, *plan.changed}
    files = {name: record for name, record in plan.known.files.items() if name in plan.wanted or name in plan.kept}
    for name in done:
        wanted = plan.wanted[name]
        files[name] = Record(wanted.made_of, (plan.folder / name).stat().st_size, str(wanted.origin))
    return stage(plan.folder / manifest.NAME, [Manifest(files).text().encode()])


def stage(final: Path, chunks: Iterable[bytes], mode: int | None = None) -> Staged:
    """Write a temporary file beside `final`, durable and with its rights, to be renamed.

    Raises:
        OSError: the disk refused; the temporary file is gone.
    """
    temporary = final.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            temporary.chmod(mode)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return Staged(temporary, final)


def commit(staged: Sequence[Staged]) -> None:
    """Give staged files their names, one right after the other, and make the names durable.

    Raises:
        OSError: the disk refused.
    """
    for temporary, final in staged:
        replace(temporary, final)
    for temporary, _ in staged:
        remove(temporary)  # renaming a link onto another link of its own file leaves both
    for folder in dict.fromkeys(final.parent for _, final in staged):
        sync_folder(folder)


def remove_litter(folder: Path) -> None:
    """Remove temporary files of a publish that was killed."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError):
            path.unlink()


def _each(work: Callable[[str], T], names: Sequence[str], advance: Advance) -> list[T]:
    """Do something for each name in several threads; the first error ends it."""

    def one(name: str) -> T:
        try:
            done = work(name)
        except OSError as error:
            raise WangenError(f"cannot publish {name}: {error.strerror or error}", where=error.filename or "",
                              cure="free space or fix the rights, then publish again") from None  # fmt: skip
        advance(name)
        return done

    if len(names) < _NUM_THREADS:
        return [one(name) for name in names]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return list(pool.map(one, names))


def _place(plan: FolderPlan, name: str) -> None:
    wanted, final = plan.wanted[name], plan.folder / name
    if wanted.text is None and wanted.size is None and _linked(wanted.origin, final):
        return
    staged = _stage_wanted(wanted, final)
    if staged:
        replace(*staged)


def _stage_wanted(wanted: Wanted, final: Path) -> Staged | None:
    """A temporary file with what a name shall hold; None when it holds that already."""
    if wanted.text is not None:
        return stage(final, [wanted.text])
    content = bake(wanted.origin, wanted.size) if wanted.size else None
    if content is not None:
        return stage(final, [content])
    origin = wanted.origin.resolve()
    if final.exists() and not final.is_symlink() and final.samefile(origin):
        return None
    staged = Staged(final.with_name(f"{TEMPORARY}{secrets.token_hex(8)}"), final)
    if not _linked(origin, staged.temporary):
        _copy(origin, staged.temporary)
    return staged


def _linked(origin: Path, link: Path) -> bool:
    """Make a hard link; False on another file system, or on one without links."""
    try:
        os.link(origin.resolve() if origin.is_symlink() else origin, link)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        return False
    return True


def _copy(origin: Path, copy: Path) -> None:
    """Copy a file's bytes so that they survive a power cut."""
    shutil.copyfile(origin, copy)
    with copy.open("rb+") as file:
        os.fsync(file.fileno())
