"""What a source file holds: its digest and its facts, memoised so that unchanged files are not read again.

The memo is one JSON file per cache folder. It only saves time: it may be deleted at any moment, and a file is hashed
again as soon as its size, times or inode differ, or when it is too young for its time stamp to be trusted.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wangen.generator.dataset import MediaFacts, read_facts
from wangen.generator.errors import WangenError
from wangen.generator.session import write_text

MEMO = ".wangen-sources.json"
YOUNG_NS = 2_000_000_000
"""Time stamps of FAT and of network drives are this coarse."""


@dataclass(frozen=True)
class Source:
    """A media file: the SHA-256 of its bytes, and what its header says."""

    digest: str
    facts: MediaFacts


def read_sources(paths: Sequence[Path], cache_folder: Path, *, trust_memo: bool = True) -> dict[Path, Source]:
    """Digest and facts of each file, from the memo where it still holds.

    Args:
        paths: media files of one dataset.
        cache_folder: where the memo lives; it is not written when the folder does not exist yet.
        trust_memo: False reads every file again.

    Raises:
        WangenError: a file cannot be read.
    """
    memo_path = cache_folder / MEMO
    memo = _read_memo(memo_path) if trust_memo else {}
    states = {path: _state(path) for path in paths}
    found = {path: _recall(memo.get(path.name), states[path]) for path in paths}
    changed = [path for path, source in found.items() if source is None]
    with ThreadPoolExecutor() as pool:
        found.update(zip(changed, pool.map(_read, changed), strict=True))
    sources = {path: source for path, source in found.items() if source is not None}
    now_ns = time.time_ns()
    kept = {
        path.name: {"state": states[path], "digest": source.digest, **asdict(source.facts)}
        for path, source in sources.items()
        if now_ns - states[path][1] > YOUNG_NS
    }
    if kept != {name: memo.get(name) for name in kept} and cache_folder.is_dir() and os.access(cache_folder, os.W_OK):
        write_text(memo_path, json.dumps({**memo, **kept}, ensure_ascii=False))
    return sources


def digest_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WangenError(
            f"cannot be read: {error.strerror}", where=str(path), cure="fix its rights or take it out"
        ) from None


def _read(path: Path) -> Source:
    return Source(digest_file(path), read_facts(path))


def _state(path: Path) -> list[int]:
    """Size and times; on POSIX also the change time and the inode, which no program can set back."""
    stat = path.stat()
    posix = [stat.st_ctime_ns, stat.st_ino] if os.name == "posix" else []
    return [stat.st_size, stat.st_mtime_ns, *posix]


def _recall(record: dict[str, Any] | None, state: list[int]) -> Source | None:
    if record is None or record.get("state") != state:
        return None
    facts = MediaFacts(record["width"], record["height"], record["num_frames"], record["duration_s"])
    return Source(record["digest"], facts)


def _read_memo(path: Path) -> dict[str, dict[str, Any]]:
    try:
        memo = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memo if isinstance(memo, dict) else {}
