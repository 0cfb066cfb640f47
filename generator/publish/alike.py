"""Pictures of a dataset that are there more than once: they are said, as it may not be meant."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from wangen.generator.publish.source import Source

_NUM_SHOWN = 3
_HEAD_BYTES = 1 << 16


def same_pictures(source: Source) -> str:
    """Which pictures hold the same bytes, in words; empty where none do. Only those of one size are read."""
    groups = [[item.path for item in source.items if item.media == "image"]]
    for key in (lambda path: path.stat().st_size, lambda path: _digest(path, _HEAD_BYTES), _digest):
        groups = [alike for group in groups for alike in _grouped(group, key)]
    if not groups:
        return ""
    named = _first([_first([path.name for path in group], " and ", " and") for group in groups], "; ", "; and")
    return f"the same picture under several names, each of which is trained: {named}"


def _first(texts: Sequence[str], between: str, last: str) -> str:
    """The first of several, and how many there are more."""
    shown = between.join(texts[:_NUM_SHOWN])
    return f"{shown}{last} {len(texts) - _NUM_SHOWN} more" if len(texts) > _NUM_SHOWN else shown


def _grouped(paths: Iterable[Path], key: Callable[[Path], Hashable]) -> list[list[Path]]:
    """Those that have a key in common; a file that is gone or cannot be read is in no group."""
    found: dict[Hashable, list[Path]] = {}
    for path in paths:
        try:
            found.setdefault(key(path), []).append(path)
        except OSError:
            continue
    return [group for group in found.values() if len(group) > 1]


def _digest(path: Path, num_bytes: int = -1) -> bytes:
    with path.open("rb") as file:
        return sha256(file.read(num_bytes)).digest()
