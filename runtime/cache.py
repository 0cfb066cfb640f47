"""The embedding cache: one safetensors file per entry, identified by a key over everything that changes its bytes.

The name of an entry is `<stem>-<key>.<kind>.safetensors`; the key alone identifies, the stem is for people. The header
holds the recipe in words, the encoder, and a digest of the payload, so that an entry can be judged by itself. Torch is
imported only where tensors are read: judging works without it. `cache_writer` writes what is read here.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wangen.generator.errors import WangenError
from wangen.generator.formats.safetensors import read_safetensors

if TYPE_CHECKING:
    import torch

Kind = Literal["latent", "text_encoder_output"]
State = Literal["valid", "stale", "missing", "corrupt"]

RECIPE_VERSIONS: Mapping[Kind, int] = {"latent": 1, "text_encoder_output": 1}
"""Raised when the code that makes a kind's bytes changes them; a golden test guards it."""

FORMAT = "wangen-cache-1"
SUFFIX = ".safetensors"
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
    kind: Kind = "latent" if match["kind"] == "latent" else "text_encoder_output"
    try:
        meta = read_safetensors(path).metadata
        if meta.get("format") != FORMAT:
            return None
        content = dict(json.loads(meta["content"]))
        entry = Entry(
            path=path,
            kind=kind,
            key=match["key"],
            content_key=digest([kind, int(meta["recipe_version"]), content]),
            encoder=Encoder(meta["encoder"], meta["encoder_dtype"]),
            content=content,
            name=meta["name"],
            payload=meta["payload"],
            num_bytes=path.stat().st_size,
        )
        if digest([entry.content_key, entry.encoder.identity, entry.encoder.dtype]) != entry.key:
            raise CorruptEntryError("the header does not belong to the file name", where=str(path))
        if deep and payload_digest(path) != entry.payload:
            raise CorruptEntryError("the payload is not what was written", where=str(path))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptEntryError(f"the header is damaged ({error})", where=str(path)) from None
    except CorruptEntryError:
        raise
    except WangenError as error:
        raise CorruptEntryError(error.found, where=str(path)) from None
    except FileNotFoundError:  # removed since the folder was listed
        return None
    except OSError as error:
        raise CorruptEntryError(f"cannot be read: {error.strerror}", where=str(path)) from None
    return entry


def payload_digest(path: Path) -> str:
    """The SHA-256 of everything behind a safetensors header."""
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass
class Folder:
    """A cache folder: its entries, read from their headers once.

    Attributes:
        path: the folder; it may not exist yet.
        deep: judge payloads too.
        corrupt: key -> what is wrong with a file of that key; filled by `all_entries`.
    """

    path: Path
    deep: bool = False
    corrupt: dict[str, CorruptEntryError] = field(default_factory=dict)

    @cached_property
    def all_entries(self) -> list[Entry]:
        """Every good entry, in the order of the file names; after a renamed item two may have one key."""
        found: list[Entry] = []
        for path in sorted(self.path.glob("*" + SUFFIX)) if self.path.is_dir() else []:
            try:
                entry = read_entry(path, deep=self.deep)
            except CorruptEntryError as error:
                match = _NAME.fullmatch(path.name)
                self.corrupt[match["key"] if match else path.name] = error
                continue
            if entry:
                found.append(entry)
        return found

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The good entries by key."""
        return {entry.key: entry for entry in self.all_entries}

    @cached_property
    def _by_content(self) -> dict[str, Entry]:
        return {entry.content_key: entry for entry in self.all_entries}

    @cached_property
    def _by_item(self) -> dict[tuple[str, str], Entry]:
        return {(entry.kind, entry.name): entry for entry in self.all_entries}

    def judge(self, recipe: Recipe, encoder: Encoder | None) -> Verdict:
        """Whether the entry for this recipe is valid, stale, missing or corrupt.

        Args:
            recipe: what is needed.
            encoder: which encoder must have made it; None accepts any.
        """
        key = recipe.key(encoder) if encoder else ""
        entry = self.entries.get(key) if encoder else self._by_content.get(recipe.content_key)
        if entry:
            return Verdict("valid", entry=entry)
        if key in self.corrupt:
            return Verdict("corrupt", self.corrupt[key].found)
        older = self._by_content.get(recipe.content_key) or self._by_item.get((recipe.kind, recipe.name))
        if older:
            return Verdict("stale", difference(older, recipe, encoder), older)
        return Verdict("missing", "not encoded yet")


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


def _ascii(name: str) -> str:
    """At most 40 characters that every file system holds.

    >>> _ascii("Älter Hund:0+17.mp4")
    '_lter_Hund_0_17_mp4'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", name, flags=re.ASCII)[:40]
