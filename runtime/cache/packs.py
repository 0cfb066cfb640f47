"""Packs: many entries in one file, for caches too large for a file of each.

A pack is a plain tar of entry files, which any tar unpacks, in the folder `packs` of a cache folder; beside it lies its
index (`pack_index`). A pack is never changed: what is added comes into another, what is removed leaves the index, and
`packing` writes packs anew where that is worth it. So readers need no locks, and a pack is whole or not there.
"""

import re
import stat
import tarfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from wangen.generator.errors import WangenError, read_cure
from wangen.runtime.cache.entries import REPAIR, CorruptEntryError, Entry, UnreadableEntryError, read_packed_entry
from wangen.runtime.cache.recipes import Kind, item_digest

if TYPE_CHECKING:
    from wangen.runtime.cache.pack_index import Directory, PackIndex

FOLDER = "packs"
SUFFIX, INDEX_SUFFIX = ".tar", ".index.safetensors"
PACK_NAME = re.compile(r"[0-9a-f]{20}\.tar")
"""Of those that were made here; any other tar in the folder is read, too."""
PACK_BYTES = 1 << 30
"""A pack is closed when it has so many bytes of entries, …"""
PACK_ENTRIES = 1 << 14
"""… or so many entries."""

Problems = dict[str, CorruptEntryError]
"""Name, as a path in the cache folder -> what is wrong with an entry or a pack."""


@dataclass(frozen=True)
class Pack:
    """One pack.

    Attributes:
        folder: the cache folder.
        name: the pack as a path in it.
        index: its entries.
        is_whole: nothing else in it is damaged, or could not be read.
    """

    folder: Path
    name: str
    index: "PackIndex"
    is_whole: bool = True

    @property
    def path(self) -> Path:
        """The tar."""
        return self.folder / self.name

    def entry(self, row: int) -> Entry:
        """The entry of a row of the index."""
        return self.index.entry(row, self.folder, self.name)

    def __iter__(self) -> Iterator[Entry]:
        return map(self.entry, range(len(self.index)))


@dataclass(frozen=True)
class Packs:
    """The packs of a cache folder as one: an entry is found by bisection, without a list of all.

    Attributes:
        folder: the cache folder.
        packs: in the order of their names.
        damaged: in them; an entry without a good place in a pack is not among those of its pack.
        names: of all packs that were looked at, also of such that hold nothing.
    """

    folder: Path
    packs: Sequence[Pack] = ()
    damaged: Problems = field(default_factory=dict)
    names: AbstractSet[str] = frozenset()
    _directories: "dict[str, Directory]" = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return sum(len(pack.index) for pack in self.packs)

    def __iter__(self) -> Iterator[Entry]:
        for pack in self.packs:
            yield from pack

    def find(self, key: str) -> Entry | None:
        """The entry with this key; where several packs have it, that of the last one."""
        found = self.twins(key)
        return found[-1] if found else None

    def twins(self, key: str) -> list[Entry]:
        """All entries with this key, in the order of the packs; a kill may leave two."""
        return [entry for entry in self._found("keys", key) if entry.key == key]

    def with_content(self, content_key: str) -> list[Entry]:
        """The entries of this content, whoever made them."""
        return [entry for entry in self._found("content_keys", content_key) if entry.content_key == content_key]

    def of_item(self, kind: Kind, name: str) -> list[Entry]:
        """The entries of one kind of an item."""
        found = self._found("items", item_digest(kind, name))
        return [entry for entry in found if (entry.kind, entry.name) == (kind, name)]

    def _found(self, column: str, digest: str) -> list[Entry]:
        """The entries whose digests in a column begin as this one does."""
        if not self.packs:
            return []
        if column not in self._directories:
            from wangen.runtime.cache.pack_index import Directory

            self._directories[column] = Directory([pack.index.digests(column) for pack in self.packs])
        entries: list[Entry] = []
        for number in self._directories[column].numbers(digest):
            pack = bisect_right(self._ends, number)
            entries.append(self.packs[pack].entry(number - (self._ends[pack - 1] if pack else 0)))
        return entries

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(pack.index) for pack in self.packs))


def padded(num_bytes: int) -> int:
    """What so many bytes take in a tar, without the header before them."""
    return -(-num_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def index_path(pack: Path) -> Path:
    """Where the index of a pack lies."""
    return pack.with_name(pack.name.removesuffix(SUFFIX) + INDEX_SUFFIX)


def look_at_packs(folder: Path, *, deep: bool = False, before: Packs | None = None) -> Packs:
    """The packs of a cache folder, by their indexes; one that does not fit its pack is made anew.

    Those that are made meanwhile are among them, for what they hold may be from such that are gone meanwhile.

    Args:
        folder: the cache folder; it may not exist.
        deep: read every payload in the packs, whatever the indexes say.
        before: what was found a moment ago, and is not looked at again. Packs of it that are gone still count: their
            entries are elsewhere now, and `reading` finds them there.

    Raises:
        WangenError: the folder cannot be listed.
    """
    before = before or Packs(folder)
    packs, damaged, seen = list(before.packs), dict(before.damaged), set(before.names)
    while new := _names(folder) - seen:
        opened = [_open(folder, folder / FOLDER / name, damaged, deep) for name in sorted(new)]
        packs += [pack for pack in opened if pack and len(pack.index)]
        seen |= new
    return Packs(folder, sorted(packs, key=lambda pack: pack.name), damaged, seen)


def _names(folder: Path) -> set[str]:
    """The tars among the packs of a cache folder.

    Raises:
        WangenError: they cannot be listed.
    """
    try:
        return {path.name for path in (folder / FOLDER).iterdir() if path.name.endswith(SUFFIX)}
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        raise WangenError(f"cannot list the packs: {error.strerror}", where=str(folder / FOLDER),
                          cure=read_cure(error)) from None  # fmt: skip


def pack_at(folder: Path, name: str) -> Pack | None:
    """One pack as it is now; None when it is gone or holds nothing."""
    pack = _open(folder, folder / name, {}, deep=False)
    return pack if pack and len(pack.index) else None


def _open(folder: Path, path: Path, damaged: Problems, deep: bool) -> Pack | None:
    """A pack with what is good in it; what is not is noted."""
    from wangen.runtime.cache.pack_index import PackIndex

    name = f"{FOLDER}/{path.name}"
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        damaged[name] = _unreadable(path, error)
        return None
    if not stat.S_ISREG(state.st_mode):
        return None
    index = PackIndex.read(index_path(path), state.st_size)
    known = Pack(folder, name, index) if index else None
    if known and not deep:
        return known
    entries, problems = _judge(known) if known else ([], {})
    if not entries:
        entries, problems = _scan(folder, name, deep)
    damaged.update(problems)
    if known and list(known) == entries:
        return known
    made = PackIndex.of(entries, state.st_size, index.removed_bytes if index else 0)
    if not problems:
        with suppress(OSError):  # a read-only folder costs the time of reading the headers again
            made.write(index_path(path))
    return Pack(folder, name, made, not problems)


def _judge(pack: Pack) -> tuple[list[Entry], Problems]:
    """The good entries of a pack where its index says that they are, and what is wrong with the others."""
    entries: list[Entry] = []
    problems: Problems = {}
    for known in pack:
        try:
            entry = read_packed_entry(pack.folder, pack.name, known.file, (known.offset, known.num_bytes), deep=True)
            if entry is None:
                raise CorruptEntryError("it is no entry any more", where=str(known.path), cure=REPAIR)
            entries.append(entry)
        except CorruptEntryError as error:
            problems[f"{pack.name}/{known.file}"] = error
    return entries, problems


def _scan(folder: Path, name: str, deep: bool) -> tuple[list[Entry], Problems]:
    """The good entries of a pack in their order by the tar's own headers, and what is wrong with the rest."""
    entries: list[Entry] = []
    problems: Problems = {}
    path, end = folder / name, 0
    broken = CorruptEntryError("a part of the pack is damaged", where=str(path), cure=REPAIR)
    try:
        with tarfile.open(path, "r:", ignore_zeros=True) as tar:  # or it would end at the first damage, without a word
            for member in tar:
                if member.offset != end:
                    problems[name] = broken
                end = tar.offset
                if not member.isreg() or "/" in member.name or "\\" in member.name:
                    continue
                span = member.offset_data, member.size
                try:
                    entry = read_packed_entry(folder, name, member.name, span, deep=deep)
                except CorruptEntryError as error:
                    problems[f"{name}/{member.name}"] = error
                    continue
                entries += [entry] if entry else []
        if not _ends_at(path, end):
            problems[name] = broken
    except (tarfile.TarError, ValueError, OverflowError) as error:  # numbers that no file has
        problems[name] = CorruptEntryError(f"the pack is damaged ({error})", where=str(path), cure=REPAIR)
    except OSError as error:
        problems[name] = _unreadable(path, error)
    return entries, problems


def _ends_at(path: Path, end: int) -> bool:
    """Whether nothing but the zeros at the end of a tar is behind a place in it."""
    with path.open("rb") as file:
        file.seek(end)
        num_zeros = 0
        while part := file.read(1 << 20):
            if part.strip(b"\0"):
                return False
            num_zeros += len(part)
    return num_zeros >= tarfile.BLOCKSIZE


def _unreadable(path: Path, error: OSError) -> UnreadableEntryError:
    return UnreadableEntryError(f"cannot be read: {error.strerror}", where=str(path), cure=read_cure(error))
