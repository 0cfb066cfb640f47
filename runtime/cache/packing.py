"""Moving entries into packs and out of them.

The way of an entry into a pack: it is read and its payload compared -> the pack is written beside its place, made
durable, and gets its index -> it is renamed -> only then the entry's file is removed. A kill leaves an entry twice at
worst, never not at all; the next call finishes. Packs of the same entries have the same name and the same bytes.
"""

import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from wangen.generator.errors import WangenError, bytes_text
from wangen.generator.files import replace, sync_folder
from wangen.runtime.cache.claims import PACKING, Claims
from wangen.runtime.cache.entries import CorruptEntryError, Entry, read_entry
from wangen.runtime.cache.folder import Folder
from wangen.runtime.cache.leftovers import sweep, temporary_name
from wangen.runtime.cache.pack_index import PackIndex
from wangen.runtime.cache.packs import (
    FOLDER,
    PACK_BYTES,
    PACK_ENTRIES,
    SUFFIX,
    Pack,
    Packs,
    index_path,
    look_at_packs,
    padded,
)
from wangen.runtime.cache.reading import whole_bytes
from wangen.runtime.cache.recipes import digest, file_name_of
from wangen.runtime.cache.removal import remove_entries, remove_pack, take_out
from wangen.runtime.progress import Advance, progress
from wangen.runtime.samples import make_folder

_SPARSE = 0.25
"""A pack of which such a part was removed is written anew."""


@dataclass
class Moved:
    """What was done.

    Attributes:
        num_entries: so many entries were moved.
        num_bytes: their size.
        damaged: name -> what is wrong with an entry that stayed where it is.
    """

    num_entries: int = 0
    num_bytes: int = 0
    damaged: dict[str, CorruptEntryError] = field(default_factory=dict)


def pack(folder: Path) -> Moved:
    """Put the entries of a cache folder into packs, and write small packs and those with gaps anew.

    Raises:
        WangenError: the disk refused; what was packed before stays packed, and no entry is lost.
    """
    with _in_words(folder), _alone(folder):
        looked = Folder(folder)
        merged = _to_merge(looked.packs.packs, len(looked.files))
        kept = Packs(folder, [pack for pack in looked.packs.packs if pack not in merged])
        moved = _into_packs(folder, looked.files, merged, kept)
        moved.damaged |= looked.damaged
    return moved


def fold(folder: Path, entries: Iterable[Entry]) -> Moved:
    """Put these entries, files of their own that no other process folds, into packs.

    Raises:
        WangenError: as `pack`.
    """
    with _in_words(folder):
        return _into_packs(folder, list(entries), [], look_at_packs(folder))


def unpack(folder: Path) -> Moved:
    """Make every packed entry a file of its own again; a pack that holds something damaged stays.

    Raises:
        WangenError: the disk refused; what is not unpacked yet is still in its pack.
    """
    moved = Moved()
    with _in_words(folder), _alone(folder):
        looked = look_at_packs(folder)
        moved.damaged |= looked.damaged
        with progress("unpack", len(looked)) as advance:
            for pack in looked.packs:
                damaged = _unpacked(pack, moved, advance)
                moved.damaged |= damaged
                if pack.is_whole and not damaged:
                    remove_pack(pack.path)
    return moved


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time packs or unpacks a whole folder.

    Raises:
        WangenError: another one does.
    """
    claims = Claims(folder)
    try:
        if not claims.take(PACKING):
            raise WangenError("another process packs or unpacks this cache", where=str(folder),
                              cure="wait for its end")  # fmt: skip
        for place in (folder, folder / FOLDER):
            sweep(place)
        yield
    finally:
        claims.close()


@contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    """What the disk refuses.

    Raises:
        WangenError: in place of Python's own error.
    """
    try:
        yield
    except OSError as error:
        raise WangenError(
            f"cannot write: {error.strerror}",
            where=str(folder),
            cure=f"free space ({bytes_text(PACK_BYTES)} are enough to go on) or fix the rights, then run the same line "
            "again: no entry is lost",
        ) from None


def _to_merge(packs: Sequence[Pack], num_files: int) -> list[Pack]:
    """The packs to write anew: those with gaps, and small ones where there is something to merge them with."""
    whole = [pack for pack in packs if pack.is_whole]
    sparse = [pack for pack in whole if pack.index.removed_bytes > _SPARSE * pack.index.pack_bytes]
    small = [pack for pack in whole if _is_small(pack) and pack not in sparse]
    return sparse + (small if len(small) + len(sparse) + bool(num_files) > 1 else [])


def _is_small(pack: Pack) -> bool:
    return pack.index.pack_bytes < PACK_BYTES // 2 and len(pack.index) < PACK_ENTRIES // 2


def _into_packs(folder: Path, files: Sequence[Entry], merged: Sequence[Pack], kept: Packs) -> Moved:
    """Write what there is in files and in packs to merge into new packs, then remove both.

    A file counts before what a pack has under its key, for it may be younger.
    """
    moved = Moved()
    twins = {file.key: twin for file in files if (twin := kept.find(file.key))}
    there = [file for file in files if file.key in twins and _same_bytes(file, twins[file.key])]
    remove_entries(there)  # a pack that was finished before a kill has them
    entries = {entry.key: entry for pack in merged for entry in pack if not kept.find(entry.key)}
    entries |= {file.key: file for file in files if file not in there}
    written: dict[str, str] = {}
    with progress("pack", len(entries)) as advance:
        for part in _parts(sorted(entries.values(), key=lambda entry: entry.key)):
            written |= _write_pack(folder, part, moved, advance)
            remove_entries(entry for entry in part if not entry.pack and entry.key in written)
    remove_entries(twin for key, twin in twins.items() if key in written)
    for pack in merged:
        if pack.name not in written.values():
            take_out(pack, written.keys() | {entry.key for entry in pack if kept.find(entry.key)})
    return moved


def _same_bytes(one: Entry, other: Entry) -> bool:
    """Whether two are good and equal."""
    with suppress(CorruptEntryError):
        return whole_bytes(one) == whole_bytes(other)
    return False


def _parts(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Entries in parts of the size of a pack."""
    part: list[Entry] = []
    num_bytes = 0
    for entry in entries:
        if part and (len(part) == PACK_ENTRIES or num_bytes + entry.num_bytes > PACK_BYTES):
            yield part
            part, num_bytes = [], 0
        part.append(entry)
        num_bytes += entry.num_bytes
    if part:
        yield part


def _write_pack(folder: Path, entries: Sequence[Entry], moved: Moved, advance: Advance) -> dict[str, str]:
    """Write a pack of all that is good of these entries, in this order; key -> the pack's name, of what is in it.

    Raises:
        OSError: the disk refused; nothing is left of the pack.
    """
    key = digest([entry.key for entry in entries])
    make_folder(folder / FOLDER)
    temporary, final = folder / FOLDER / temporary_name(key), folder / FOLDER / f"{key}{SUFFIX}"
    name = f"{FOLDER}/{final.name}"
    placed: list[Entry] = []
    try:
        with temporary.open("xb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for entry in entries:
                    try:
                        data = whole_bytes(entry)
                    except CorruptEntryError as error:
                        moved.damaged[str(entry.path.relative_to(folder))] = error
                        continue
                    member = tarfile.TarInfo(file_name_of(entry.kind, entry.name, entry.key))
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                    begin = tar.offset - padded(len(data))
                    placed.append(entry._replace(file=member.name, num_bytes=len(data), pack=name, offset=begin))
                    moved.num_bytes += len(data)
                    advance(1, entry.name)
            file.flush()
            os.fsync(file.fileno())
        if placed:
            PackIndex.of(placed, temporary.stat().st_size).write(index_path(final))
            replace(temporary, final)
            sync_folder(final.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    moved.num_entries += len(placed)
    return {entry.key: name for entry in placed}


def _unpacked(pack: Pack, moved: Moved, advance: Advance) -> dict[str, CorruptEntryError]:
    """Write the files of a pack; returns what is damaged. A good file that is there stays.

    Raises:
        OSError: the disk refused; what was written stays.
    """
    damaged: dict[str, CorruptEntryError] = {}
    written: list[Path] = []
    for entry in pack:
        path = pack.folder / entry.file
        try:
            if not _is_whole(path):
                temporary = pack.folder / temporary_name(entry.key)
                temporary.write_bytes(whole_bytes(entry))
                replace(temporary, path)
                written.append(path)
        except CorruptEntryError as error:
            damaged[f"{entry.pack}/{entry.file}"] = error
            continue
        moved.num_entries += 1
        moved.num_bytes += entry.num_bytes
        advance(1, entry.name)
    _make_durable(written)
    return damaged


def _is_whole(path: Path) -> bool:
    """Whether there is an entry in a file."""
    with suppress(CorruptEntryError):
        return read_entry(path, deep=True) is not None
    return False


def _make_durable(paths: Sequence[Path]) -> None:
    """See that files are on the disk, and their names: a call for each would take longer than writing them."""
    if hasattr(os, "sync"):
        os.sync()
        return
    for path in paths:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    for folder in {path.parent for path in paths}:
        sync_folder(folder)
