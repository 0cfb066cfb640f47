"""Writing cache entries: judged, in groups, whole or not at all.

The way of an entry: it is claimed, where several processes work -> its values are judged -> a temporary file in the
cache folder -> with its group: fsync, rename, fsync of the folder. A reader sees an entry complete or not at all, and
what was committed survives a power cut.
"""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from wangen.generator.errors import WangenError, bytes_text
from wangen.generator.files import remove, replace, sync_folder
from wangen.runtime.cache import recipes
from wangen.runtime.cache.claims import CLAIM_NAME, Claims
from wangen.runtime.cache.entries import CorruptEntryError, read_entry
from wangen.runtime.cache.index import look
from wangen.runtime.cache.leftovers import sweep, temporary_name
from wangen.runtime.cache.packs import PACK_BYTES, PACK_ENTRIES
from wangen.runtime.cache.reading import packs_of
from wangen.runtime.cache.recipes import ENTRY_NAME, FORMAT, TEXT_KINDS, Encoder, Recipe
from wangen.runtime.rocm import is_rocm
from wangen.runtime.safetensors_file import serialize
from wangen.runtime.samples import make_folder

INDEX_FROM = 1000
"""So many new entries are worth bringing the index up to date at once."""

_GROUP_FILES = 32
_GROUP_BYTES = 64 << 20
_GROUP_S = 5.0
_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}

Claimed = Literal["mine", "theirs", "done"]


class _Pending(NamedTuple):
    """An entry that is written but not yet there."""

    temporary: Path
    final: Path
    key: str


class Writer:
    """Writes entries in groups: temporary files, one round of fsync, then renames.

    Use it as a context manager. A kill loses the group that is being gathered at most; an error or Ctrl-C commits
    what is whole. Call `commit_if_due` where a group may end: between the batches of an encoder whose results depend,
    in their last bits, on what it gets together, so that a killed run goes on with the same batches.
    """

    def __init__(self, folder: Path, *, again: bool = False, packed: bool = False) -> None:
        """Nothing is touched before the writer is entered.

        Args:
            folder: made when the writer is entered.
            again: entries that are there already are encoded anew: `claim` answers "done" only for younger ones, and
                what is written replaces the files that an item's earlier name gave its key.
            packed: move what was committed into packs, whenever there is enough for one and at the end.
        """
        self.folder = folder
        self.num_written = 0
        self.num_bytes = 0
        self._again, self._packed = again, packed
        self._begun_ns = time.time_ns()
        self._before: Mapping[str, list[str]] = {}
        self._claims = Claims(folder)
        self._pending: list[_Pending] = []
        self._bytes = 0
        self._since_s = time.monotonic()
        self._to_pack: list[Path] = []
        self._num_to_pack = self._bytes_to_pack = 0

    def __enter__(self) -> "Writer":
        make_folder(self.folder)
        sweep(self.folder)
        self._before = _names_by_key(self.folder) if self._again else {}
        return self

    def __exit__(self, *_exception: object) -> None:
        try:
            self.commit()
            self._pack()
        finally:
            self._claims.close()
        if self.num_written > INDEX_FROM:
            look(self.folder)  # leaves the index, so that the next step need not read all headers

    def claim(self, recipe: Recipe, encoder: Encoder) -> Claimed:
        """Ask for an entry before it is encoded, so that no second process encodes it too.

        Returns:
            "mine": this writer holds the claim until the commit of the entry, and the entry is not there;
            "theirs": another live process works on it: ask again later;
            "done": the entry is there meanwhile.

        Raises:
            WangenError: the disk is full or the folder cannot be written.
        """
        key = recipe.key(encoder)
        try:
            if not self._claims.take(key):
                return "theirs"
        except OSError as error:
            raise self._refused(error) from None
        if not self._is_done(recipe, encoder):
            return "mine"
        self._claims.release([key])
        return "done"

    def _is_done(self, recipe: Recipe, encoder: Encoder) -> bool:
        with suppress(CorruptEntryError, OSError):
            entry = read_entry(self.folder / recipe.file_name(encoder)) or packs_of(self.folder).find(
                recipe.key(encoder)
            )
            return entry is not None and (not self._again or entry.held_by.stat().st_mtime_ns > self._begun_ns)
        return False

    def put(self, recipe: Recipe, encoder: Encoder, tensors: Mapping[str, torch.Tensor]) -> None:
        """Judge an entry and write its temporary file; it is there for good after the next commit.

        Raises:
            WangenError: a value is not finite, or all are zero; the disk is full or the folder cannot be written.
        """
        judge_values(recipe, encoder, tensors)
        payload, num_bytes = hashlib.sha256(), 0
        for chunk in list(serialize(tensors, {}))[1:]:
            payload.update(chunk)
            num_bytes += len(chunk)
        metadata = {
            "format": FORMAT,
            "recipe_version": str(recipes.RECIPE_VERSIONS[recipe.kind]),
            "name": recipe.name,
            "source": recipe.source,
            "content": json.dumps(recipe.content, sort_keys=True, ensure_ascii=False),
            "encoder": encoder.identity,
            "encoder_dtype": encoder.dtype,
            "payload": payload.hexdigest(),
        }
        key = recipe.key(encoder)
        temporary = self.folder / temporary_name(key)
        pending = _Pending(temporary, self.folder / recipe.file_name(encoder), key)
        try:
            with temporary.open("xb") as file:
                for chunk in serialize(tensors, metadata):
                    self._bytes += file.write(chunk)
            self.num_bytes += temporary.stat().st_size
            self._pending.append(pending)
        except OSError as error:
            raise self._refused(error, num_bytes) from None
        finally:
            if pending not in self._pending[-1:]:  # a full disk, or Ctrl-C: half a file helps nobody
                _forget(temporary)

    def commit_if_due(self) -> None:
        """Commit when enough is pending, or when the last commit is some seconds ago.

        Raises:
            WangenError: as `commit`.
        """
        due = time.monotonic() - self._since_s >= _GROUP_S
        if due or len(self._pending) >= _GROUP_FILES or self._bytes >= _GROUP_BYTES:
            self.commit()

    def commit(self) -> None:
        """Make every pending entry durable and visible. Interrupted, it can be called again and finishes the work.

        Raises:
            WangenError: the disk refused; entries committed before are safe, the pending ones are dropped.
        """
        try:
            for temporary, final, _ in self._pending:
                if temporary.exists():
                    with temporary.open("rb+") as file:
                        os.fsync(file.fileno())
                elif not final.exists():  # else moved already, when an earlier commit was interrupted
                    raise FileNotFoundError(errno.ENOENT, "somebody removed its temporary file")
            for temporary, final, _ in self._pending:
                if temporary.exists():
                    replace(temporary, final)
            if self._pending:
                sync_folder(self.folder)
            for _, final, key in self._pending:
                self._remove_others(key, final)
        except OSError as error:
            for pending in self._pending:
                _forget(pending.temporary)
            num_bytes = self._bytes
            self._clear()
            raise self._refused(error, num_bytes) from None
        self.num_written += len(self._pending)
        self._to_pack += [pending.final for pending in self._pending]
        self._num_to_pack += len(self._pending)
        self._bytes_to_pack += self._bytes
        self._clear()
        if self._num_to_pack >= PACK_ENTRIES or self._bytes_to_pack >= PACK_BYTES:
            self._pack()

    def _remove_others(self, key: str, final: Path) -> None:
        """Remove the entries that an item's earlier name gave this key; one that is open on Windows stays."""
        for path in (self.folder / name for name in self._before.get(key, ())):
            with suppress(CorruptEntryError, OSError):
                if read_entry(path) and not path.samefile(final):  # names that differ in letter case may be one file's
                    remove(path)

    def _pack(self) -> None:
        """Move what was committed since the last time into packs, where it shall be so; what may not now waits.

        Raises:
            WangenError: the disk refused; the entries stay files of their own.
        """
        self._num_to_pack = self._bytes_to_pack = 0
        if self._packed and self._to_pack:
            from wangen.runtime.cache.packing import fold  # numpy

            if fold(self.folder, (entry for path in self._to_pack if (entry := read_entry(path)))) is None:
                return
        self._to_pack = []

    def _clear(self) -> None:
        keys = [pending.key for pending in self._pending]
        self._pending, self._bytes, self._since_s = [], 0, time.monotonic()
        self._claims.release(keys)

    def _refused(self, error: OSError, num_bytes: int = 0) -> WangenError:
        room = ""
        if error.errno in _FULL and num_bytes:
            room = f"; {bytes_text(num_bytes)} are to be written"
            with suppress(OSError):
                room += f", {bytes_text(shutil.disk_usage(self.folder).free)} are free"
        named = Path(os.fsdecode(error.filename or ""))  # a claim of another user's that nobody else may read
        return WangenError(
            f"cannot write the cache entry: {error.strerror}{room}",
            where=str(named if CLAIM_NAME.fullmatch(named.name) else self.folder),
            cure="free space or fix the rights, then run the same line again: what was encoded stays",
        )


def judge_values(recipe: Recipe, encoder: Encoder, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse an entry that would train garbage.

    Raises:
        WangenError: not finite, or all zero; the item is named with the remedy.
    """
    flag = "--clip_dtype" if recipe.kind == "clip" else "--t5_dtype" if recipe.kind in TEXT_KINDS else "--vae_dtype"
    if not tensors:
        raise WangenError(f"{recipe.name} has no tensors", cure="give at least one")
    cure = f"encode with {flag} float32"
    if encoder.dtype == "float32":
        cure = "the weights are probably damaged: download them again"
        if is_rocm():
            cure = f"encode with --device cpu: if that works this build of ROCm computes wrongly, otherwise {cure}"
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():  # a mask may well be all false
            continue
        if not tensor.isfinite().all():
            raise WangenError(f"the {name} of {recipe.name} has values that are not finite", cure=cure)
        if not tensor.any() and recipe.kind != "mask":
            raise WangenError(f"the {name} of {recipe.name} is all zero", cure=cure)


def _names_by_key(folder: Path) -> Mapping[str, list[str]]:
    """The names of the files that are named like entries, by the keys in them."""
    names: dict[str, list[str]] = {}
    with suppress(OSError):
        for path in folder.iterdir():
            if match := ENTRY_NAME.fullmatch(path.name):
                names.setdefault(match["key"], []).append(path.name)
    return names


def _forget(temporary: Path) -> None:
    with suppress(OSError):
        temporary.unlink()
