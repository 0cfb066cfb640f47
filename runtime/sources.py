"""What a source file holds: its digest and its facts, memoised so that unchanged files are not read again.

The memo is one JSON file per cache folder. It only saves time: it may be deleted at any moment, and a file is hashed
again as soon as its size, times or inode differ, or when it is too young for its time stamp to be trusted.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wangen.generator.dataset import MediaFacts, read_facts
from wangen.generator.errors import WangenError
from wangen.generator.files import write_text

MEMO = ".wangen-sources.json"
YOUNG_NS = 2_000_000_000
"""Time stamps of FAT and of network drives are this coarse."""


@dataclass(frozen=True)
class Source:
    """A media file: the SHA-256 of its bytes, and what its header says."""

    digest: str
    facts: MediaFacts


def read_sources(
    paths: Sequence[Path], cache_folder: Path, *, trust_memo: bool = True
) -> tuple[dict[Path, Source], list[WangenError]]:
    """Digest and facts of each file, from the memo where it still holds, and what is wrong with the others.

    Args:
        paths: media files of one dataset.
        cache_folder: where the memo lives; it is not written when the folder does not exist yet.
        trust_memo: False reads every file again.
    """
    memo_path = cache_folder / MEMO
    memo = _read_memo(memo_path) if trust_memo else {}
    states = {path: _state(path) for path in paths}
    found: dict[Path, Source | WangenError | None] = {
        path: _recall(memo.get(relative_name(path, cache_folder)), states[path]) for path in paths
    }
    changed = [path for path, source in found.items() if source is None]
    with ThreadPoolExecutor() as pool:
        found.update(zip(changed, pool.map(_read, changed), strict=True))
    sources = {path: source for path, source in found.items() if isinstance(source, Source)}
    now_ns = time.time_ns()
    kept = {
        relative_name(path, cache_folder): {"state": states[path], "digest": source.digest, **asdict(source.facts)}
        for path, source in sources.items()
        if _is_settled(states[path], now_ns)
    }
    if kept != {name: memo.get(name) for name in kept} and cache_folder.is_dir():
        with suppress(WangenError):  # a full disk or a read-only folder costs the time of hashing again, no more
            write_text(memo_path, json.dumps({**memo, **kept}, ensure_ascii=False))
    return sources, [error for error in found.values() if isinstance(error, WangenError)]


def relative_name(path: Path, folder: Path) -> str:
    """A path as seen from a folder, with forward slashes: it stays the same when both move together."""
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # another drive of Windows
        return path.absolute().as_posix()


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
            f"cannot be read: {error.strerror}", where=str(path), cure="fix its rights or take it out"
        ) from None


def _read(path: Path) -> Source | WangenError:
    try:
        return Source(digest_file(path), read_facts(path))
    except WangenError as error:
        return error


def _state(path: Path) -> list[int]:
    """Size and times; on POSIX also the change time and the inode, which no program can set back. Empty: no file."""
    try:
        stat = path.stat()
    except OSError:  # reading it will say what is wrong
        return []
    posix = [stat.st_ctime_ns, stat.st_ino] if os.name == "posix" else []
    return [stat.st_size, stat.st_mtime_ns, *posix]


def _is_settled(state: list[int], now_ns: int) -> bool:
    """Whether a later change would show in the state: the file was not touched just now."""
    return all(now_ns - time_ns > YOUNG_NS for time_ns in state[1:3])


def _recall(record: Any, state: list[int]) -> Source | None:
    if not isinstance(record, dict) or record.get("state") != state:
        return None
    digest, width, height, num_frames, duration_s = (
        record.get(name) for name in ("digest", "width", "height", "num_frames", "duration_s")
    )
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        return None
    if not (isinstance(width, int) and isinstance(height, int) and isinstance(num_frames, int)):
        return None
    return Source(digest, MediaFacts(width, height, num_frames, duration_s)) if isinstance(duration_s, float) else None


def _read_memo(path: Path) -> dict[str, Any]:
    try:
        memo = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return memo if isinstance(memo, dict) else {}
