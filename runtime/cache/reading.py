"""The bytes and tensors of cache entries, wherever they lie."""

import hashlib
import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from wangen.runtime.cache.entries import CURE, REPAIR, CorruptEntryError, Entry, described
from wangen.runtime.cache.packs import FOLDER, Packs, look_at_packs

if TYPE_CHECKING:
    import torch


def load(entry: Entry) -> "dict[str, torch.Tensor]":
    """The tensors of an entry: `latent` (C, F, h, w), `clip` (257, 1280), or `embedding` (L, dim) with `mask` (L,).

    Raises:
        CorruptEntryError: the file changed since it was judged, or its payload is not what was written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    data = _read(entry)
    try:
        tensors: dict[str, torch.Tensor] = from_bytes(data)
    except SafetensorError as error:
        raise _unreadable(entry, error) from None
    _verify(entry, data)
    return tensors


def whole_bytes(entry: Entry) -> bytes:
    """The bytes of an entry's file.

    Raises:
        CorruptEntryError: as `load`.
    """
    data = _read(entry)
    _verify(entry, data)
    return data


def _read(entry: Entry) -> bytes:
    """The bytes of an entry, also where it was packed or unpacked, or its pack written anew, since it was judged.

    They are read and not mapped: what is mapped cannot be replaced on Windows.
    """
    try:
        return entry.read_bytes()
    except OSError as error:
        for look in (packs_of, look_at_packs):
            for moved in (look(entry.folder).find(entry.key), entry._replace(pack="", offset=0)):
                with suppress(OSError):
                    if moved:
                        return moved.read_bytes()
        raise _unreadable(entry, error) from None


def num_channels(entry: Entry) -> int:
    """The channels of a latent's entry, as its header says them.

    Raises:
        CorruptEntryError: the file changed since it was judged.
    """
    tensors = json.loads(header_of(_read(entry)))
    return next(int(told["shape"][0]) for name, told in tensors.items() if name != "__metadata__")


def packs_of(folder: Path) -> Packs:
    """The packs of a cache folder, looked at again when names in it have changed: many entries move at a time."""
    with suppress(OSError):
        return _packs_then(folder, (folder / FOLDER).stat().st_mtime_ns)
    return Packs(folder)


@lru_cache(maxsize=4)
def _packs_then(folder: Path, _changed_ns: int) -> Packs:
    return look_at_packs(folder)


def header_of(data: bytes) -> bytes:
    """The safetensors header of an entry, with the digest of its payload in it: of good entries it says all bytes."""
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def _verify(entry: Entry, data: bytes) -> None:
    text = header_of(data)
    begin = 8 + len(text)
    try:
        header = json.loads(text)["__metadata__"]
        payload, found = header["payload"], described(entry.kind, header)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(entry, error) from None
    if hashlib.sha256(memoryview(data)[begin:]).hexdigest() != payload:
        raise CorruptEntryError("the payload is not what was written", where=str(entry.path), cure=REPAIR)
    if found != (entry.key, entry.content_key, entry.encoder):
        raise CorruptEntryError("another entry is in its place", where=str(entry.path), cure=REPAIR)


def _unreadable(entry: Entry, error: Exception) -> CorruptEntryError:
    return CorruptEntryError(f"the cache entry cannot be read ({error})", where=str(entry.path), cure=CURE)
