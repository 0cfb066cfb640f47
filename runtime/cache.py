"""The embedding cache: one safetensors file per entry, identified by a key over everything that changes its bytes.

The name of an entry is `<stem>-<key>.<kind>.safetensors`; the key alone identifies, the stem is for people. The header
holds the recipe in words, the encoder, and a digest of the payload, so that an entry can be judged by itself. Torch is
imported only where tensors are read or written: judging works without it.
"""

import hashlib
import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wangen.generator.errors import WangenError
from wangen.generator.formats import read_safetensors

if TYPE_CHECKING:
    import torch

log = logging.getLogger("wangen")

Kind = Literal["latent", "text_encoder_output"]
State = Literal["valid", "stale", "missing", "corrupt"]

RECIPE_VERSIONS: Mapping[Kind, int] = {"latent": 1, "text_encoder_output": 1}
"""Raised when the code that makes a kind's bytes changes them; a golden test guards it."""

FORMAT = "wangen-cache-1"
SUFFIX = ".safetensors"
ABANDONED_S = 3600.0
_GROUP_FILES = 32
_GROUP_BYTES = 64 << 20
_NAME = re.compile(r"(?P<stem>.*)-(?P<key>[0-9a-f]{20})\.(?P<kind>[a-z_]+)\.safetensors")


def digest(value: object) -> str:
    """20 hex digits over a JSON value, whatever the order of its keys.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Encoder:
    """Which weights, in which precision, made an entry.

    Attributes:
        identity: digest of the weight file (and of the tokenizer), from `headers.identity`.
        dtype: precision it ran in: `float32`, `bfloat16`, `float16`.
    """

    identity: str
    dtype: str


@dataclass(frozen=True)
class Recipe:
    """What an entry is made of.

    Attributes:
        kind: which kind of entry.
        content: everything but the encoder that decides the bytes.
        name: the item in words; it is shown and begins the file name, but does not count.
    """

    kind: Kind
    content: Mapping[str, Any]
    name: str

    @cached_property
    def content_key(self) -> str:
        """Digest of the kind, its version and the content, without the encoder."""
        return digest([self.kind, RECIPE_VERSIONS[self.kind], self.content])

    def key(self, encoder: Encoder) -> str:
        """The key of the entry that this encoder makes."""
        return digest([self.content_key, encoder.identity, encoder.dtype])

    def file_name(self, encoder: Encoder) -> str:
        """The entry's file name; captions are shared between items, so their entries begin with `text`."""
        stem = "text" if self.kind == "text_encoder_output" else _ascii(self.name)
        return f"{stem}-{self.key(encoder)}.{self.kind}{SUFFIX}"


@dataclass(frozen=True)
class Entry:
    """An entry on disk, as its header describes it."""

    path: Path
    kind: Kind
    key: str
    content_key: str
    encoder: Encoder
    content: Mapping[str, Any]
    name: str
    payload: str
    num_bytes: int


@dataclass(frozen=True)
class Verdict:
    """The judge's word on what a recipe needs: a state, why, and the entry when there is one."""

    state: State
    reason: str = ""
    entry: Entry | None = None


class CorruptEntryError(WangenError):
    """A file that looks like an entry and is not a whole one."""


def read_entry(path: Path, *, deep: bool = False) -> Entry | None:
    """The entry in a file, or None for a file that is not ours.

    Args:
        path: a safetensors file.
        deep: also read the payload and compare its digest.

    Raises:
        CorruptEntryError: the name or format is ours but the file is truncated, altered or misnamed.
    """
    match = _NAME.fullmatch(path.name)
    if match is None or match["kind"] not in RECIPE_VERSIONS:
        return None
    try:
        header = read_safetensors(path)
        if header.metadata.get("format") != FORMAT:
            return None
        meta = header.metadata
        encoder = Encoder(meta["encoder"], meta["encoder_dtype"])
        content = json.loads(meta["content"])
        kind: Kind = "latent" if match["kind"] == "latent" else "text_encoder_output"
        content_key = digest([kind, int(meta["recipe_version"]), content])
        if digest([content_key, encoder.identity, encoder.dtype]) != match["key"]:
            raise CorruptEntryError("the header does not belong to the file name", where=str(path))
        if deep and payload_digest(path) != meta["payload"]:
            raise CorruptEntryError("the payload is not what was written", where=str(path))
    except (KeyError, ValueError) as error:
        raise CorruptEntryError(f"the header is damaged ({error})", where=str(path)) from None
    except CorruptEntryError:
        raise
    except WangenError as error:
        raise CorruptEntryError(error.found, where=str(path)) from None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorruptEntryError(f"cannot be read: {error.strerror}", where=str(path)) from None
    return Entry(path, kind, match["key"], content_key, encoder, content, meta["name"], meta["payload"],
                 path.stat().st_size)  # fmt: skip


def payload_digest(path: Path) -> str:
    """The SHA-256 of everything behind a safetensors header."""
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass
class Folder:
    """A cache folder: its entries by key, read from their headers once.

    Attributes:
        path: the folder; it may not exist yet.
        deep: judge payloads too.
    """

    path: Path
    deep: bool = False
    corrupt: dict[str, CorruptEntryError] = field(default_factory=dict)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Every good entry by key; damaged ones are collected in `corrupt`."""
        found: dict[str, Entry] = {}
        for path in sorted(self.path.glob("*" + SUFFIX)) if self.path.is_dir() else []:
            try:
                entry = read_entry(path, deep=self.deep)
            except CorruptEntryError as error:
                match = _NAME.fullmatch(path.name)
                self.corrupt[match["key"] if match else path.name] = error
                continue
            if entry:
                found[entry.key] = entry
        return found

    def judge(self, recipe: Recipe, encoder: Encoder | None) -> Verdict:
        """Whether the entry for this recipe is valid, stale, missing or corrupt.

        Args:
            recipe: what is needed.
            encoder: which encoder must have made it; None accepts any.
        """
        entries = self.entries
        if encoder is None:
            same = [entry for entry in entries.values() if entry.content_key == recipe.content_key]
            if same:
                newest = max(same, key=lambda entry: (entry.path.stat().st_mtime_ns, entry.key))
                return Verdict("valid", entry=newest)
        else:
            key = recipe.key(encoder)
            if key in entries:
                return Verdict("valid", entry=entries[key])
            if key in self.corrupt:
                return Verdict("corrupt", self.corrupt[key].found)
        relatives = [e for e in entries.values() if e.kind == recipe.kind and _same_item(e, recipe)]
        if relatives:
            return Verdict("stale", difference(relatives[0], recipe, encoder), relatives[0])
        return Verdict("missing", "not encoded yet")

    def prune(self, kind: Kind, needed: set[str]) -> int:
        """Remove entries of this kind whose key is not needed, and what a killed writer left; returns how many."""
        removed = 0
        for entry in list(self.entries.values()):
            if entry.kind == kind and entry.key not in needed:
                entry.path.unlink(missing_ok=True)
                removed += 1
        for temporary in self.path.glob(".*.tmp"):
            with suppress(OSError):
                if time.time() - temporary.stat().st_mtime > ABANDONED_S:
                    temporary.unlink()
        return removed


def difference(entry: Entry, recipe: Recipe, encoder: Encoder | None) -> str:
    """Why an entry is stale, in words."""
    words = {
        "source": "the file's content changed",
        "caption": "the caption changed",
        "resize": "the resizing recipe changed",
        "start": "the clip's first frame changed",
    }
    for name in recipe.content:
        old, new = entry.content.get(name), recipe.content[name]
        if old != new:
            return words.get(name, f"{name} changed from {old} to {new}")
    if encoder and entry.encoder.identity != encoder.identity:
        return (
            "encoded with another VAE" if recipe.kind == "latent" else "encoded with another text encoder or tokenizer"
        )
    if encoder and entry.encoder.dtype != encoder.dtype:
        return f"encoded in {entry.encoder.dtype}, wanted in {encoder.dtype}"
    return "made by an older version of the encoding code"


def load(entry: Entry) -> "dict[str, torch.Tensor]":
    """The tensors of an entry: `latent` (C, F, h, w), or `embedding` (length, dim) with `mask` (length,).

    Raises:
        CorruptEntryError: the file changed since it was judged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    try:  # read as bytes: nothing stays memory-mapped, which on Windows would forbid replacing the file
        tensors: dict[str, torch.Tensor] = from_bytes(entry.path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise CorruptEntryError(
            f"the cache entry cannot be read ({error})", where=str(entry.path), cure="run the cache step again"
        ) from None
    return tensors


class Writer:
    """Writes entries in groups: temporary files, one round of fsync, then renames.

    Use it as a context manager. What was committed survives a kill; an error or Ctrl-C commits what is whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_written = 0
        self._pending: list[tuple[Path, Path]] = []
        self._bytes = 0

    def __enter__(self) -> "Writer":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WangenError(f"cannot make the cache folder: {error.strerror}", where=str(self.folder)) from None
        return self

    def __exit__(self, *_exception: object) -> None:
        self.commit()

    def put(self, recipe: Recipe, encoder: Encoder, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Judge and write one entry; it is on disk for good after the next `commit`.

        Raises:
            WangenError: a value is not finite, or all are zero; the disk is full or the folder cannot be written.
        """
        from wangen.runtime.safetensors_file import serialize

        judge_values(recipe, tensors)
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
        final = self.folder / recipe.file_name(encoder)
        temporary = final.with_name(f".{final.stem[-60:]}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                for chunk in serialize(tensors, metadata):
                    self._bytes += file.write(chunk)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._refused(error) from None
        self._pending.append((temporary, final))
        if len(self._pending) >= _GROUP_FILES or self._bytes >= _GROUP_BYTES:
            self.commit()

    def commit(self) -> None:
        """Make every pending entry durable and visible.

        Raises:
            WangenError: the disk refused; entries committed before are safe.
        """
        from wangen.runtime.safetensors_file import replace, sync_folder

        pending, self._pending, self._bytes = self._pending, [], 0
        try:
            for temporary, _ in pending:
                with temporary.open("rb+") as file:
                    os.fsync(file.fileno())
            for temporary, final in pending:
                replace(temporary, final)
                self.num_written += 1
            if pending:
                sync_folder(self.folder)
        except OSError as error:
            for temporary, _ in pending:
                temporary.unlink(missing_ok=True)
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> WangenError:
        return WangenError(
            f"cannot write the cache entry: {error.strerror}",
            where=str(self.folder),
            cure="free space or fix the rights, then run the same line again: what was encoded stays",
        )


def judge_values(recipe: Recipe, tensors: "Mapping[str, torch.Tensor]") -> None:
    """Refuse an entry that would train garbage.

    Raises:
        WangenError: not finite, or all zero; the item is named with the remedy.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        cure = "encode with --vae_dtype float32" if recipe.kind == "latent" else "encode with --t5_dtype float32"
        if not tensor.isfinite().all():
            raise WangenError(f"the {name} of {recipe.name} has values that are not finite", cure=cure)
        if not tensor.any():
            raise WangenError(f"the {name} of {recipe.name} is all zero", cure=cure)


def count_states(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many verdicts there are of each state, all four named."""
    counts = {"valid": 0, "stale": 0, "missing": 0, "corrupt": 0}
    for verdict in verdicts:
        counts[verdict.state] += 1
    return counts


def count_reasons(verdicts: Iterable[Verdict], *, recache: bool) -> dict[str, int]:
    """Why entries had to be encoded: reason in words -> how many."""
    why = [verdict.reason or "--recache" for verdict in verdicts if recache or verdict.state != "valid"]
    return dict(Counter(why))


def _same_item(entry: Entry, recipe: Recipe) -> bool:
    return entry.name == recipe.name or entry.content.get("source", 0) == recipe.content.get("source", 1)


def _ascii(name: str) -> str:
    """At most 40 characters that every file system holds.

    >>> _ascii("Älter Hund:0+17.mp4")
    '_lter_Hund_0_17_mp4'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", name, flags=re.ASCII)[:40]
