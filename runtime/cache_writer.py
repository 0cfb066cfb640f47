"""Writing cache entries: judged, in groups, whole or not at all.

The way of an entry: its values are judged -> a temporary file in the cache folder -> with its group: fsync, rename,
fsync of the folder. A reader sees an entry complete or not at all, and what was committed survives a power cut.
"""

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from wangen.generator.errors import WangenError
from wangen.generator.files import replace, sync_folder
from wangen.runtime.cache import FORMAT, RECIPE_VERSIONS, Encoder, Recipe
from wangen.runtime.safetensors_file import serialize
from wangen.runtime.samples import make_folder

ABANDONED_S = 3600.0
"""A temporary file that nobody has written to for so long was left by a writer that was killed."""

_GROUP_FILES = 32
_GROUP_BYTES = 64 << 20
_GROUP_S = 5.0
_TEMPORARY = re.compile(r"\.[0-9a-f]{20}-[0-9a-f]{16}\.tmp")


class Writer:
    """Writes entries in groups: temporary files, one round of fsync, then renames.

    Use it as a context manager. A kill loses the group that is being gathered at most; an error or Ctrl-C commits
    what is whole. Call `commit_if_due` where a group may end: between the batches of an encoder whose results depend,
    in their last bits, on what it gets together, so that a killed run goes on with the same batches.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_written = 0
        self._pending: list[tuple[Path, Path]] = []
        self._bytes = 0
        self._since_s = time.monotonic()

    def __enter__(self) -> "Writer":
        make_folder(self.folder)
        for left in self.folder.glob(".*.tmp"):
            with suppress(OSError):
                if _TEMPORARY.fullmatch(left.name) and time.time() - left.stat().st_mtime > ABANDONED_S:
                    left.unlink()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.commit()

    def put(self, recipe: Recipe, encoder: Encoder, tensors: Mapping[str, torch.Tensor]) -> None:
        """Judge an entry and write its temporary file; it is there for good after the next commit.

        Raises:
            WangenError: a value is not finite, or all are zero; the disk is full or the folder cannot be written.
        """
        judge_values(recipe, encoder, tensors)
        payload = hashlib.sha256()
        for chunk in list(serialize(tensors, {}))[1:]:
            payload.update(chunk)
        metadata = {
            "format": FORMAT,
            "recipe_version": str(RECIPE_VERSIONS[recipe.kind]),
            "name": recipe.name,
            "content": json.dumps(recipe.content, sort_keys=True, ensure_ascii=False),
            "encoder": encoder.identity,
            "encoder_dtype": encoder.dtype,
            "payload": payload.hexdigest(),
        }
        # Process numbers repeat from machine to machine on a shared drive; random names do not.
        temporary = self.folder / f".{recipe.key(encoder)}-{secrets.token_hex(8)}.tmp"
        whole = False
        try:
            with temporary.open("xb") as file:
                for chunk in serialize(tensors, metadata):
                    self._bytes += file.write(chunk)
            whole = True
        except OSError as error:
            raise self._refused(error) from None
        finally:
            if not whole:  # a full disk, or Ctrl-C: half a file helps nobody
                _forget(temporary)
        self._pending.append((temporary, self.folder / recipe.file_name(encoder)))

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
            for temporary, _ in self._pending:
                if temporary.exists():  # moved already, when an earlier commit was interrupted
                    with temporary.open("rb+") as file:
                        os.fsync(file.fileno())
            for temporary, final in self._pending:
                if temporary.exists():
                    replace(temporary, final)
            if self._pending:
                sync_folder(self.folder)
        except OSError as error:
            for temporary, _ in self._pending:
                _forget(temporary)
            self._clear()
            raise self._refused(error) from None
        self.num_written += len(self._pending)
        self._clear()

    def _clear(self) -> None:
        self._pending, self._bytes, self._since_s = [], 0, time.monotonic()

    def _refused(self, error: OSError) -> WangenError:
        return WangenError(
            f"cannot write the cache entry: {error.strerror}",
            where=str(self.folder),
            cure="free space or fix the rights, then run the same line again: what was encoded stays",
        )


def judge_values(recipe: Recipe, encoder: Encoder, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse an entry that would train garbage.

    Raises:
        WangenError: not finite, or all zero; the item is named with the remedy.
    """
    flag = "--vae_dtype" if recipe.kind == "latent" else "--t5_dtype"
    cure = f"encode with {flag} float32"
    if encoder.dtype == "float32":
        cure = "the weights are probably damaged: download them again"
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():  # a mask may well be all false
            continue
        if not tensor.isfinite().all():
            raise WangenError(f"the {name} of {recipe.name} has values that are not finite", cure=cure)
        if not tensor.any():
            raise WangenError(f"the {name} of {recipe.name} is all zero", cure=cure)


def _forget(temporary: Path) -> None:
    with suppress(OSError):
        temporary.unlink()
