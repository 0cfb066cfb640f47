"""What a training state on disk says of itself, read from its manifest.

A state folder is complete when its manifest is there as it was written and every file it lists has its size. That a
disk does not answer is another thing than that there is no state: then nothing may begin at step 0, and nothing be
removed.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from wangen.generator.errors import WangenError, read_cure

MANIFEST = "state.json"
FORMAT = "wangen-state-2"
IN_PARTS = "parts"
"""The folder of a state that several processes wrote, each its parts (`wangen.runtime.training.sharded_state`)."""

_PARTS = ("adapter", "optimizer", "ema")
_NOT_THERE = FileNotFoundError, NotADirectoryError

T = TypeVar("T")


def files_of(expert: str) -> dict[str, str]:
    """The names of the files of an expert's parts."""
    return {part: f"{part}_{expert}.safetensors" if expert else f"{part}.safetensors" for part in _PARTS}


def states_in(folder: Path) -> list[Path]:
    """The folders of states in a folder, by their names.

    Raises:
        WangenError: it is there and cannot be listed.
    """
    return sorted(folder / name for name in _asked(folder, _names, list[str]()) if name.startswith("step-"))


def read_manifest(path: Path) -> dict[str, Any] | None:
    """What a state says of itself; None of what is none.

    Raises:
        WangenError: it cannot be read.
    """
    with suppress(ValueError, RecursionError, LookupError, TypeError, AttributeError):
        manifest = json.loads(content_of(path / MANIFEST).decode())
        checksums = manifest.setdefault("checksums", {})
        as_written = checksums.get(MANIFEST) in (None, _checksum(manifest))  # states of earlier versions have none
        whole = all(_asked(path / name, _size, None) == size for name, size in manifest["files"].items())
        if manifest.setdefault("in_parts", False):
            parts = {f"{IN_PARTS}/.metadata"}
        else:
            parts = {file for name in manifest["experts"] for file in files_of(name).values()}
        told = all(isinstance(manifest[name], dict) for name in ("experts", "fingerprint", "facts", "checksums"))
        numbers = all(set(expert) == {"step", "numbers", "ema_updates"} for expert in manifest["experts"].values())
        whole = whole and as_written and parts <= set(manifest["files"])
        if manifest["format"] == FORMAT and whole and told and numbers:
            return dict(manifest) if isinstance(manifest["step"], int) else None
    return None


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """The text of a manifest, with a checksum of its own among those of its files."""
    plain = json.loads(json.dumps(manifest))  # with the keys that it is read with
    checksums = {**plain.get("checksums", {}), MANIFEST: _checksum(plain)}
    return json.dumps({**plain, "checksums": checksums}, indent=1, sort_keys=True)


def _checksum(manifest: Mapping[str, Any]) -> int:
    """The CRC-32 of all that a manifest says but this one."""
    others = {file: sum_ for file, sum_ in manifest.get("checksums", {}).items() if file != MANIFEST}
    return crc32(json.dumps({**manifest, "checksums": others}, sort_keys=True).encode())


def is_to_be_kept(path: Path) -> bool:
    """Whether a state was saved to be kept, or may have been as far as can be read."""
    try:
        return bool((read_manifest(path) or {}).get("keep"))
    except WangenError:
        return True


def content_of(path: Path) -> bytes:
    """A file of a state; empty where there is none.

    Raises:
        WangenError: it cannot be read.
    """
    return _asked(path, Path.read_bytes, b"")


def not_readable(path: Path, error: OSError) -> WangenError:
    """What to say of a state that belongs to somebody else, or of which the disk does not answer now."""
    return WangenError(f"the training state cannot be read: {error.strerror}", where=str(path),
                       cure=f"{read_cure(error)}, then run the same line again")  # fmt: skip


def _asked(path: Path, question: Callable[[Path], T], otherwise: T) -> T:
    """What the system says of a file; `otherwise` where there is none."""
    try:
        return question(path)
    except _NOT_THERE:
        return otherwise
    except OSError as error:
        raise not_readable(path, error) from None


def _names(folder: Path) -> list[str]:
    return os.listdir(folder)  # noqa: PTH208 - pathlib's glob takes a folder that cannot be listed for an empty one


def _size(path: Path) -> int:
    return path.stat().st_size
