"""What a source file holds: its digest and its facts, memoised so that unchanged files are not read again.

The memo is one file per cache folder. It only saves time: it may be deleted at any moment, and a file is hashed again
as soon as its size, times or inode differ, or when it is too young for its time stamp to be trusted.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from wangen.generator.dataset import MediaFacts, read_facts
from wangen.generator.errors import WangenError, read_cure
from wangen.runtime.rows import read_rows, write_rows

MEMO = ".wangen-sources.jsonl"
_FACTS = tuple(fact.name for fact in fields(MediaFacts))
TITLE = f"wangen-sources-2 {' '.join(_FACTS)}"
YOUNG_NS = 2_000_000_000
"""Time stamps of FAT and of network drives are this coarse."""

FileState = tuple[int, int, int, int]
"""Size in bytes and time of the last change to the content in ns; on POSIX also the change time in ns and the inode,
which no program can set back (elsewhere 0)."""


@dataclass(frozen=True, slots=True)
class Source:
    """A media file: the SHA-256 of its bytes, what its header says, and the state of the file before it was read."""

    digest: str
    facts: MediaFacts
    state: "FileState | None" = field(default=None, compare=False)

    def require_unchanged(self, path: Path) -> None:
        """Refuse a file whose content is no longer the one that the digest stands for.

        Args:
            path: the file, read to its end just before.

        Raises:
            WangenError: it changed, or it is gone.
        """
        if state_of(path) != self.state and digest_file(path) != self.digest:
            raise WangenError(
                "the file changed while it was being encoded",
                where=str(path),
                cure="run the same line again when nothing writes to it any more: what was encoded stays",
            )


def read_sources(
    paths: Sequence[Path], cache_folder: Path, *, trust_memo: bool = True
) -> tuple[dict[Path, Source], list[WangenError]]:
    """Digest and facts of each file, from the memo where it still holds, and what is wrong with the others.

    Args:
        paths: media files of one dataset.
        cache_folder: where the memo lives; it is not written when the folder does not exist yet.
        trust_memo: False reads every file again.
    """
    now_ns = time.time_ns()
    memo = _read_memo(cache_folder / MEMO)
    name_of = relative_names(cache_folder)
    states = {path: state_of(path) for path in paths}
    known = {path: _recall(memo, name_of(path), state) for path, state in states.items()} if trust_memo else {}
    changed = [path for path in states if known.get(path) is None]
    with ThreadPoolExecutor() as pool:
        read = dict(zip(changed, pool.map(_read, changed, map(states.get, changed)), strict=True))
    found = {path: known.get(path) or read[path] for path in states}
    sources = {path: source for path, source in found.items() if isinstance(source, Source)}
    news = {name_of(path): (state, sources[path]) for path in changed
            if path in sources and (state := states[path]) and is_settled(state, now_ns)}  # fmt: skip
    if any(memo.get(name) != value for name, value in news.items()) and cache_folder.is_dir():
        with suppress(OSError):  # a full disk or a read-only folder costs the time of hashing again, no more
            write_rows(cache_folder / MEMO, TITLE, _rows(memo | news))
    return sources, [error for error in found.values() if isinstance(error, WangenError)]


def relative_name(path: Path, folder: Path) -> str:
    """A path as seen from a folder, with forward slashes: it stays the same when both move together."""
    return relative_names(folder)(path)


def relative_names(folder: Path) -> Callable[[Path], str]:
    """`relative_name` for many paths; what their folders have in common is found out once."""
    known: dict[str, str] = {}

    def name_of(path: Path) -> str:
        parent, name = os.path.split(path)
        if parent not in known:
            try:
                known[parent] = Path(os.path.relpath(parent or ".", folder)).as_posix()
            except ValueError:  # another drive of Windows
                known[parent] = Path(parent).absolute().as_posix()
        return name if known[parent] == "." else f"{known[parent].rstrip('/')}/{name}"

    return name_of


def digest_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex.

    Raises:
        WangenError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WangenError(
            f"cannot be read: {error.strerror}", where=str(path), cure=f"{read_cure(error)} or take it out"
        ) from None


def state_of(file: "Path | os.DirEntry[str]") -> FileState | None:
    """What shows that a file changed; None when there is no file."""
    try:
        stat = file.stat()
    except OSError:  # reading it will say what is wrong
        return None
    posix = (stat.st_ctime_ns, stat.st_ino) if os.name == "posix" else (0, 0)
    return (stat.st_size, stat.st_mtime_ns, *posix)


def is_settled(state: FileState, now_ns: int) -> bool:
    """Whether any later change would show in the state: the file was not touched just before.

    Args:
        state: of the file.
        now_ns: when the state was read, or before.
    """
    return now_ns - max(state[1], state[2]) > YOUNG_NS


def _read(path: Path, state: FileState | None) -> Source | WangenError:
    try:
        return Source(digest_file(path), read_facts(path), state)
    except WangenError as error:
        return error


Memo = dict[str, tuple[FileState, Source]]


def _recall(memo: Memo, name: str, state: FileState | None) -> Source | None:
    found = memo.get(name)
    return found[1] if found and found[0] == state else None


def _read_memo(path: Path) -> Memo:
    return {
        name: (known, Source(digest, MediaFacts(*facts), known))
        for name, state, digest, *facts in read_rows(path, TITLE)
        if (known := cast(FileState, tuple(state)))
    }


def _rows(memo: Memo) -> Iterator[list[Any]]:
    for name, (state, source) in memo.items():
        yield [name, state, source.digest, *(getattr(source.facts, name) for name in _FACTS)]
