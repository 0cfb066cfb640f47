"""Moving entries into packs and out of them.

The way of an entry into a pack: it is read and its payload compared -> the pack is written beside its place, made
durable, and gets its index -> it is renamed -> only then the entry's file is removed. A kill leaves an entry twice at
worst, never not at all; the next call finishes. A pack's name is a digest of what is in it: packs of the same name
have the same bytes.
"""

import io
import logging
import os
import tarfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from wangen.generator.errors import WangenError, bytes_text
from wangen.generator.files import remove, replace, sync_folder
from wangen.runtime.cache.claims import folding, packing
from wangen.runtime.cache.entries import CorruptEntryError, Entry, read_entry
from wangen.runtime.cache.folder import Folder
from wangen.runtime.cache.leftovers import sweep, temporary_name
from wangen.runtime.cache.pack_index import PackIndex
from wangen.runtime.cache.packs import (
    FOLDER,
    INDEX_SUFFIX,
    PACK_BYTES,
    PACK_ENTRIES,
    SUFFIX,
    Pack,
    Packs,
    index_path,
    look_at_packs,
    padded,
)
from wangen.runtime.cache.reading import header_of, whole_bytes
from wangen.runtime.cache.recipes import digest, file_name_of
from wangen.runtime.cache.removal import remove_entries, remove_pack, take_out
from wangen.runtime.progress import Advance, progress
from wangen.runtime.samples import make_folder
from wangen.runtime.sources import FileState, state_of

log = logging.getLogger("wangen")

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


def fold(folder: Path, entries: Iterable[Entry]) -> Moved | None:
    """Put these entries, files of their own, into packs; None and nothing done while another process packs or unpacks.

    Several processes may fold at a time.

    Raises:
        WangenError: as `pack`.
    """
    with _in_words(folder), folding(folder) as may:
        if may:
            return _into_packs(folder, list(entries), [], look_at_packs(folder))
    log.info("  another process packs or unpacks %s: what is new there stays in files for now", folder)
    return None


def fold_files(entries: Iterable[Entry | None]) -> None:
    """Fold those entries of any folders that are files of their own: an earlier run was killed, or kept them so.

    Raises:
        WangenError: as `pack`.
    """
    files: defaultdict[Path, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry and not entry.pack:
            files[entry.folder].append(entry)
    for folder, members in files.items():
        fold(folder, members)


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
            for pack in reversed(looked.packs):  # as `Packs.find` chooses where two have an entry
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
    with packing(folder) as mine:
        if not mine:
            raise WangenError("another process packs or unpacks this cache", where=str(folder),
                              cure="wait for its end")  # fmt: skip
        for place in (folder, folder / FOLDER):
            sweep(place)
        for index in (folder / FOLDER).glob(f"*{INDEX_SUFFIX}"):  # a kill came between it and its pack
            if not index.with_name(index.name.removesuffix(INDEX_SUFFIX) + SUFFIX).exists():
                remove(index)
        yield


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

    A file counts before what packs have under its key, for it may be younger; so they lose theirs before it goes.
    """
    moved = Moved()
    before = Packs(folder, [*kept.packs, *merged])
    rest: list[Entry] = []
    for file in files:
        state = state_of(file.path)
        same = next((twin for twin in reversed(kept.twins(file.key)) if _same_bytes(file, twin)), None)
        if same:  # a pack that was finished before a kill has it
            _leave({file: state}, before, [same.pack])
        else:
            rest.append(file)
    there = {entry.key for pack in merged for entry in pack if any(map(_is_good, kept.twins(entry.key)))}
    entries = {entry.key: entry for pack in merged for entry in pack if entry.key not in there}
    entries |= {file.key: file for file in rest}
    written: dict[str, str] = {}
    with progress("pack", len(entries)) as advance:
        for part in _parts(sorted(entries.values(), key=lambda entry: (entry.name, entry.key))):
            states = {entry: state_of(entry.path) for entry in part if not entry.pack}
            written |= _write_pack(folder, part, moved, advance)
            done = {file: state for file, state in states.items() if file.key in written}
            _leave(done, before, written.values())
    for pack in merged:
        if pack.name not in written.values():
            take_out(pack, written.keys() | there)
    return moved


def _leave(files: Mapping[Entry, FileState | None], packs: Packs, but: Collection[str]) -> None:
    """Remove files that are in packs by now, and before each what other packs have under its key.

    Args:
        files: with their states before they were read: one that was written again since stays.
        packs: as they were before.
        but: names of the packs that have them now.
    """
    twins = [twin for file in files for twin in packs.twins(file.key) if twin.pack not in but]
    stuck = {twin.key for twin in remove_entries(twins)}
    remove_entries(file for file, state in files.items() if file.key not in stuck and state_of(file.path) == state)


def _is_good(entry: Entry) -> bool:
    """Whether all of an entry can be read."""
    with suppress(CorruptEntryError):
        return bool(whole_bytes(entry))
    return False


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
        OSError: the disk refused; of the pack at most an index is left, which counts for nothing without it.
    """
    make_folder(folder / FOLDER)
    temporary = folder / FOLDER / temporary_name(digest([entry.key for entry in entries]))
    placed: list[Entry] = []
    headers: list[tuple[str, str]] = []
    times_ns: list[int] = []
    try:
        with temporary.open("xb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for entry in entries:
                    times_ns += [state[1]] if (state := state_of(entry.held_by)) else []
                    try:
                        data = whole_bytes(entry)
                    except CorruptEntryError as error:
                        moved.damaged[str(entry.path.relative_to(folder))] = error
                        continue
                    member = tarfile.TarInfo(file_name_of(entry.kind, entry.name, entry.key))
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                    begin = tar.offset - padded(len(data))
                    placed.append(entry._replace(file=member.name, num_bytes=len(data), offset=begin))
                    headers.append((member.name, sha256(header_of(data)).hexdigest()))
                    moved.num_bytes += len(data)
                    advance(1, entry.name)
            file.flush()
            os.fsync(file.fileno())
        name = f"{FOLDER}/{digest(headers)}{SUFFIX}"
        final = folder / name
        if placed:
            PackIndex.of(placed, temporary.stat().st_size).write(index_path(final))
            _date_back(temporary, times_ns)
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
    times_ns = [state[1]] if (state := state_of(pack.path)) else []
    for entry in pack:
        path = pack.folder / entry.file
        temporary = pack.folder / temporary_name(entry.key)
        try:
            if not _is_whole(path):
                temporary.write_bytes(whole_bytes(entry))
                _date_back(temporary, times_ns)
                replace(temporary, path)
                written.append(path)
        except OSError:
            with suppress(OSError):  # half a file helps nobody
                temporary.unlink(missing_ok=True)
            raise
        except CorruptEntryError as error:
            damaged[f"{entry.pack}/{entry.file}"] = error
            continue
        moved.num_entries += 1
        moved.num_bytes += entry.num_bytes
        advance(1, entry.name)
    _make_durable(written)
    return damaged


def _date_back(path: Path, times_ns: Sequence[int]) -> None:
    """Give a file the earliest of these times, or a `--recache` at work would take what only moved for encoded anew."""
    if times_ns:
        os.utime(path, ns=(min(times_ns), min(times_ns)))


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
