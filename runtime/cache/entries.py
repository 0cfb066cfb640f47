"""Cache entries on disk: what their headers say, whether they are whole, and their tensors."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from wangen.generator.errors import WangenError, read_cure
from wangen.generator.formats.safetensors import read_safetensors
from wangen.runtime.cache.recipes import ENTRY_NAME, FORMAT, Encoder, Kind, digest, key_of, source_of

CURE = "run the cache step again"
REPAIR = "run check_cache --deep --repair, then the caching step again"

_PIECE_BYTES = 1 << 20

Span = tuple[int, int]
"""Where something begins in a file and how long it is, in bytes."""


class CorruptEntryError(WangenError):
    """A file that looks like an entry and is not a whole one."""


class UnreadableEntryError(CorruptEntryError):
    """A file that looks like an entry and that the system does not let us read; it may be good."""


class Entry(NamedTuple):
    """An entry on disk, as its header describes it; there may be very many in memory.

    Attributes:
        folder: the cache folder.
        file: its name there, or in its pack.
        kind: which kind of entry.
        key: identifies it.
        content_key: digest of what it is made of, without the encoder.
        encoder: which made it.
        source: SHA-256 of the media file or of the caption that it encodes.
        name: the item in words.
        num_bytes: size of the file.
        pack: the pack that holds it, as a path in the folder; empty for a file of its own.
        offset: where it begins in the pack, in bytes.
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
    pack: str = ""
    offset: int = 0

    @property
    def path(self) -> Path:
        """Where it is, for people; of a packed entry its name below that of the pack."""
        return self.folder / self.pack / self.file

    @property
    def held_by(self) -> Path:
        """The file that its bytes are in: its own, or the pack."""
        return self.folder / (self.pack or self.file)

    @property
    def span(self) -> Span | None:
        """Where it lies in its pack; None for a file of its own."""
        return (self.offset, self.num_bytes) if self.pack else None

    @property
    def content(self) -> Mapping[str, Any]:
        """What it is made of, read from the file now.

        Raises:
            CorruptEntryError: the file changed since it was judged.
        """
        try:
            header = read_safetensors(self.held_by, self.span).metadata
        except OSError as error:
            raise CorruptEntryError(f"the cache entry cannot be read ({error.strerror})", where=str(self.path),
                                    cure=CURE) from None  # fmt: skip
        except WangenError as error:
            raise CorruptEntryError(error.found, where=str(self.path), cure=CURE) from None
        content: Mapping[str, Any] = json.loads(header["content"])
        return content

    def read_bytes(self) -> bytes:
        """The whole file.

        Raises:
            OSError: it is gone, or the system does not let us read it.
        """
        with self.held_by.open("rb", buffering=0) as file:
            file.seek(self.offset)
            return file.read(self.num_bytes) if self.pack else file.read()


def read_entry(path: Path, *, deep: bool = False) -> Entry | None:
    """The entry in a file, or None for a file that is not ours.

    Args:
        path: a safetensors file.
        deep: also read the payload and compare its digest.

    Raises:
        CorruptEntryError: the name or format is ours but the file is truncated, altered or misnamed.
    """
    return _read(path.parent, path.name, "", None, deep)


def read_packed_entry(folder: Path, pack: str, file: str, span: Span, *, deep: bool) -> Entry | None:
    """The entry at a place in a pack, or None for what is not ours.

    Args:
        folder: the cache folder.
        pack: as a path in it.
        file: the entry's name.
        span: where it lies.
        deep: also read the payload and compare its digest.

    Raises:
        CorruptEntryError: as `read_entry`.
    """
    return _read(folder, file, pack, span, deep)


def _read(folder: Path, file: str, pack: str, span: Span | None, deep: bool) -> Entry | None:
    match = ENTRY_NAME.fullmatch(file)
    if match is None:
        return None
    path, held_by = folder / pack / file, folder / (pack or file)
    try:
        meta = read_safetensors(held_by, span).metadata
        if meta.get("format") != FORMAT:
            return None
        entry = _entry(folder, file, cast(Kind, match["kind"]), meta)
        offset, num_bytes = span or (0, held_by.stat().st_size)
        entry = entry._replace(pack=pack, offset=offset, num_bytes=num_bytes)
        if entry.key != match["key"]:
            raise CorruptEntryError("the header does not belong to the file name", where=str(path), cure=CURE)
        if deep and payload_digest(held_by, span) != meta["payload"]:
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
            f"cannot be read: {error.strerror}", where=str(path), cure=read_cure(error)
        ) from None
    return entry


def _entry(folder: Path, file: str, kind: Kind, meta: Mapping[str, str]) -> Entry:
    content = dict(json.loads(meta["content"]))
    encoder = Encoder(meta["encoder"], meta["encoder_dtype"])
    if "payload" not in meta:
        raise KeyError("payload")
    content_key = digest([kind, int(meta["recipe_version"]), content])
    key, source = key_of(content_key, encoder), source_of(content)
    return Entry(folder, file, kind, key, content_key, encoder, source, meta["name"], 0)


def described(kind: Kind, meta: Mapping[str, str]) -> tuple[str, str, Encoder]:
    """Key, content key and encoder of the entry of a kind that has these free text fields in its header.

    Raises:
        KeyError, TypeError, ValueError: they are not those of an entry.
    """
    entry = _entry(Path(), "", kind, meta)
    return entry.key, entry.content_key, entry.encoder


def payload_digest(path: Path, span: Span | None = None) -> str:
    """The SHA-256 of everything behind a safetensors header.

    Args:
        path: the file, or the one that holds it.
        span: where it lies in that one.
    """
    with path.open("rb") as file:
        start, num_bytes = span or (0, path.stat().st_size)
        file.seek(start)
        begin = 8 + int.from_bytes(file.read(8), "little")
        file.seek(start + begin)
        digest, left = hashlib.sha256(), num_bytes - begin
        while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
            digest.update(piece)
            left -= len(piece)
        return digest.hexdigest()
