"""The media folder of a bundle becomes what its plan says.

The way of a file: a hard link, or a temporary file that is renamed when it is whole. New names come first, then
everything that replaces something in one go (`publish` does that together with scripts and TOML files), then what the
dataset no longer has is removed. The manifest names every file before it is written.
"""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from wangen.generator.errors import WangenError
from wangen.generator.files import naming, remove, replace, set_rights, sync_folder, write_new
from wangen.generator.publish import manifest
from wangen.generator.publish.folder import FolderPlan, Wanted
from wangen.generator.publish.manifest import UNKNOWN, FileState, Manifest, Record
from wangen.generator.publish.resize import bake
from wangen.generator.publish.source import Advance

TEMPORARY = ".wangen-publish-"
"""How the names of our temporary files begin."""

_NUM_THREADS = 8

T = TypeVar("T")


class Staged(NamedTuple):
    """A whole temporary file and the name it will get."""

    temporary: Path
    final: Path


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
        files[name] = Record(wanted.made_of, size, wanted.mtime_ns, str(wanted.origin))
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


def take_back(plan: FolderPlan) -> None:
    """Remove what `place_new` put there: a publish that fails must not fill the disk for the next one."""
    for path in plan.placed:
        with suppress(OSError):
            remove(path)


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
    done = [*dict.fromkeys((*plan.new, *plan.changed, *plan.copied))]
    kept = {*plan.kept}
    files = {name: record for name, record in plan.known.files.items() if name in plan.wanted or name in kept}
    for name in kept & files.keys():
        if files[name].is_caption:  # from now on it is older than the manifest, and shall be looked at all the same
            files[name] = files[name]._replace(size=UNKNOWN)
    files |= zip(done, _each(partial(_record, plan), done, lambda _: None), strict=True)
    return stage(plan.folder / manifest.NAME, [Manifest(files).text().encode()])


def _record(plan: FolderPlan, name: str) -> Record:
    """What the manifest says of a file that is as it shall be."""
    wanted, path = plan.wanted[name], plan.folder / name
    stat, origin = path.stat(), str(wanted.origin)
    if wanted.state is None:
        return Record(wanted.made_of, stat.st_size, UNKNOWN, origin)
    digest = manifest.media_digest(path)
    source_digest = manifest.media_digest(wanted.origin) if wanted.size else digest
    is_link = FileState.of(stat).node == wanted.state.node
    source_file = "" if is_link else wanted.state.file
    return Record(wanted.made_of, stat.st_size, stat.st_mtime_ns, origin, digest, source_digest, source_file)


def prefix(slug: str) -> str:
    """How the names of a dataset's temporary files begin in folders that datasets share; short, whatever the slug."""
    return f"{TEMPORARY}{hashlib.sha256(slug.encode()).hexdigest()[:8]}-"


def _temporary(final: Path, begin: str = TEMPORARY) -> Path:
    return final.with_name(f"{begin}{secrets.token_hex(8)}")


def stage(final: Path, chunks: Iterable[bytes], mode: int | None = None, begin: str = TEMPORARY) -> Staged:
    """Write a temporary file beside `final`, durable and with its rights, to be renamed.

    Args:
        final: the name that it will get.
        chunks: its content.
        mode: permission bits; those that the umask takes from a new file are taken from them.
        begin: how the name of the temporary file begins.

    Raises:
        OSError: the disk refused; the temporary file is gone.
    """
    staged = Staged(_temporary(final, begin), final)
    with naming(final):
        write_new(staged.temporary, chunks, None)
    if mode is not None:
        made = staged.temporary.stat().st_mode
        set_rights(staged.temporary, mode & (made | (made & 0o444) >> 2))
    return staged


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


def remove_litter(folder: Path, begin: str = TEMPORARY) -> None:
    """Remove temporary files of a publish that was killed; `begin` is how their names begin."""
    for path in folder.glob(f"{begin}*"):
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
    if wanted.text is not None or wanted.size is not None or not _linked(wanted.origin, final):
        staged = _stage_wanted(wanted, final)
        if staged is None:
            return
        replace(*staged)
    plan.placed.append(final)


def _stage_wanted(wanted: Wanted, final: Path) -> Staged | None:
    """A temporary file with what a name shall hold; None when it holds that already."""
    if wanted.text is not None:
        return stage(final, [wanted.text])
    content = bake(wanted.origin, wanted.size) if wanted.size else None
    if content is not None:
        staged = stage(final, [content])
    else:
        origin = wanted.origin.resolve()
        if final.exists() and not final.is_symlink() and final.samefile(origin):
            return None
        staged = Staged(_temporary(final), final)
        if _linked(origin, staged.temporary):
            return staged
        _copy(origin, staged.temporary)
    with suppress(OSError):  # by its source's time an unchanged copy is known, even after an interruption
        os.utime(staged.temporary, ns=(wanted.mtime_ns, wanted.mtime_ns))
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
