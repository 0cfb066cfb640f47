"""Cache entries on disk: what their headers say, whether they are whole, and their tensors."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from wangen.generator.errors import WangenError
from wangen.generator.formats.safetensors import read_safetensors
from wangen.runtime.cache.recipes import ENTRY_NAME, FORMAT, Encoder, Kind, digest, key_of, source_of

if TYPE_CHECKING:
    import torch

CURE = "run the cache step again"
REPAIR = "run check_cache --deep --repair, then the caching step again"


class CorruptEntryError(WangenError):
    """A file that looks like an entry and is not a whole one."""


class UnreadableEntryError(CorruptEntryError):
    """A file that looks like an entry and that the system does not let us read; it may be good."""


class Entry(NamedTuple):
    """An entry on disk, as its header describes it; there may be very many in memory.

    Attributes:
        folder: the cache folder.
        file: its name there.
        kind: which kind of entry.
        key: identifies it.
        content_key: digest of what it is made of, without the encoder.
        encoder: which made it.
        source: SHA-256 of the media file or of the caption that it encodes.
        name: the item in words.
        num_bytes: size of the file.
    """

    folder: Path
    file: str
    kind: Kind
    key: str
    content_key: str
    encoder: Encoder
    source: str
    name: str
    num_bytes: int

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / self.file

    @property
    def content(self) -> Mapping[str, Any]:
        """What it is made of, read from the file now.

        Raises:
            CorruptEntryError: the file changed since it was judged.
        """
        content: Mapping[str, Any] = json.loads(self._header()["content"])
        return content

    @property
    def payload(self) -> str:
        """SHA-256 of the payload as it was written, in hex, read from the header now.

        Raises:
            CorruptEntryError: the file changed since it was judged.
        """
        return self._header()["payload"]

    def _header(self) -> Mapping[str, str]:
        try:
            header = read_safetensors(self.path).metadata
        except OSError as error:
            raise CorruptEntryError(f"the cache entry cannot be read ({error.strerror})", where=str(self.path),
                                    cure=CURE) from None  # fmt: skip
        except WangenError as error:
            raise CorruptEntryError(error.found, where=str(self.path), cure=CURE) from None
        return header


def read_entry(path: Path, *, deep: bool = False) -> Entry | None:
    """The entry in a file, or None for a file that is not ours.

    Args:
        path: a safetensors file.
        deep: also read the payload and compare its digest.

    Raises:
        CorruptEntryError: the name or format is ours but the file is truncated, altered or misnamed.
    """
    match = ENTRY_NAME.fullmatch(path.name)
    if match is None:
        return None
    try:
        meta = read_safetensors(path).metadata
        if meta.get("format") != FORMAT:
            return None
        entry = _entry(path, cast(Kind, match["kind"]), meta)
        if key_of(entry.content_key, entry.encoder) != match["key"]:
            raise CorruptEntryError("the header does not belong to the file name", where=str(path), cure=CURE)
        if deep and payload_digest(path) != meta["payload"]:
            raise CorruptEntryError("the payload is not what was written", where=str(path), cure=CURE)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptEntryError(f"the header is damaged ({error})", where=str(path), cure=CURE) from None
    except CorruptEntryError:
        raise
    except WangenError as error:
        raise CorruptEntryError(error.found, where=str(path), cure=CURE) from None
    except FileNotFoundError:  # removed since the folder was listed
        return None
    except OSError as error:
        raise UnreadableEntryError(
            f"cannot be read: {error.strerror}", where=str(path), cure="fix its rights"
        ) from None
    return entry


def _entry(path: Path, kind: Kind, meta: Mapping[str, str]) -> Entry:
    content = dict(json.loads(meta["content"]))
    encoder = Encoder(meta["encoder"], meta["encoder_dtype"])
    content_key = digest([kind, int(meta["recipe_version"]), content])
    if "payload" not in meta:
        raise KeyError("payload")
    key, source, num_bytes = key_of(content_key, encoder), source_of(content), path.stat().st_size
    return Entry(path.parent, path.name, kind, key, content_key, encoder, source, meta["name"], num_bytes)


def payload_digest(path: Path) -> str:
    """The SHA-256 of everything behind a safetensors header."""
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(entry: Entry) -> "dict[str, torch.Tensor]":
    """The tensors of an entry: `latent` (C, F, h, w), `clip` (257, 1280), or `embedding` (L, dim) with `mask` (L,).

    Raises:
        CorruptEntryError: the file changed since it was judged, or its payload is not what was written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    try:  # read as bytes: nothing stays memory-mapped, which on Windows would forbid replacing the file
        data = entry.path.read_bytes()
        tensors: dict[str, torch.Tensor] = from_bytes(data)
    except (OSError, SafetensorError) as error:
        raise CorruptEntryError(f"the cache entry cannot be read ({error})", where=str(entry.path), cure=CURE) from None
    begin = 8 + int.from_bytes(data[:8], "little")
    written = json.loads(data[8:begin]).get("__metadata__", {}).get("payload")  # the library has parsed it already
    if hashlib.sha256(memoryview(data)[begin:]).hexdigest() != written:
        raise CorruptEntryError("the payload is not what was written", where=str(entry.path), cure=REPAIR)
    return tensors
