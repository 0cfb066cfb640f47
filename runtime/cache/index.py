"""What a cache folder holds: one look at its files, helped by an index that saves reading headers.

The index is never the truth. A file counts as known only while its size and times (on POSIX also its change time and
inode) are those of the moment its header was read; any other is read again, and the index is written anew when much of
it no longer fits. It may be deleted at any time.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wangen.generator.bulk import bulk
from wangen.generator.errors import WangenError, read_cure
from wangen.runtime.cache.entries import CorruptEntryError, Entry, read_entry
from wangen.runtime.cache.recipes import ENTRY_NAME, KINDS, SUFFIX, Encoder
from wangen.runtime.rows import read_rows, write_rows
from wangen.runtime.sources import FileState, is_settled, state_of

INDEX = ".wangen-index.jsonl"
TITLE = "wangen-index-1"

_KINDS = {kind: kind for kind in KINDS}
_MANY = 1000
_PART = 0.05
"""The index is written anew when so many entries, or such a part of them, were not in it: one line is quicker read."""


@dataclass
class Found:
    """What is in a cache folder.

    Attributes:
        entries: the good entries in the order of the file names.
        corrupt: file name -> what is wrong with it.
    """

    entries: list[Entry] = field(default_factory=list)
    corrupt: dict[str, CorruptEntryError] = field(default_factory=dict)


@bulk()
def look(folder: Path, *, deep: bool = False) -> Found:
    """Every entry of a folder, from the index where it still fits and from the headers where not.

    Args:
        folder: the cache folder; it may not exist.
        deep: read all headers and payloads, whatever the index says.

    Raises:
        WangenError: the folder cannot be listed.
    """
    now_ns = time.time_ns()
    states = _list(folder)
    known = {} if deep else _known(folder, states)
    found = Found()
    for name in sorted(states):
        entry = known.get(name)
        if entry is None:
            try:
                entry = read_entry(folder / name, deep=deep)
            except CorruptEntryError as error:
                found.corrupt[name] = error
        if entry:
            found.entries.append(entry)
    if not deep:
        settled = [entry for entry in found.entries if is_settled(states[entry.file], now_ns)]
        num_new = sum(entry.file not in known for entry in settled)
        if num_new > min(_MANY, _PART * len(settled)):
            write_index(folder, settled, states)
    return found


def write_index(folder: Path, entries: list[Entry], states: Mapping[str, FileState]) -> None:
    """Write the index; a full disk or a read-only folder costs the time of reading headers again, no more."""
    with suppress(OSError):
        write_rows(folder / INDEX, TITLE, _rows(entries, states))


def _rows(entries: list[Entry], states: Mapping[str, FileState]) -> Iterator[list[Any]]:
    numbers: dict[Encoder, int] = {}
    for entry in entries:
        encoder = entry.encoder
        if encoder not in numbers:
            numbers[encoder] = len(numbers)
            yield [numbers[encoder], encoder.identity, encoder.dtype]
        yield [entry.file, states[entry.file], entry.content_key, numbers[encoder], entry.source, entry.name]


def _known(folder: Path, states: Mapping[str, FileState]) -> dict[str, Entry]:
    """The entries by file name that the index describes as they are now."""
    known: dict[str, Entry] = {}
    encoders: dict[int, Encoder] = {}
    for row in read_rows(folder / INDEX, TITLE):
        if len(row) == 3:
            encoders[row[0]] = Encoder(row[1], row[2])
            continue
        file, state, content_key, number, source, name = row
        if states.get(file) != tuple(state) or number not in encoders:
            continue
        stem, kind, _ = file.rsplit(".", 2)
        known[file] = Entry(
            folder, file, _KINDS[kind], stem[-20:], content_key, encoders[number], source, name, state[0]
        )
    return known


def _list(folder: Path) -> dict[str, FileState]:
    """The files that are named like entries, with size and times."""
    try:
        with os.scandir(folder) as files:
            named = [file for file in files if file.name.endswith(SUFFIX) and ENTRY_NAME.fullmatch(file.name)]
            return {file.name: state for file in named if (state := state_of(file))}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise WangenError(f"cannot list the cache folder: {error.strerror}", where=str(folder),
                          cure=read_cure(error)) from None  # fmt: skip
