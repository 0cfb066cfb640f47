"""The index of a pack: of each entry where it lies and what `Entry` says of it, in columns that are mapped, not read.

It is a safetensors file beside the pack, and is never the truth: it counts only while the pack is as long as it says,
and is made anew from the headers in the pack otherwise. What it leaves out of a pack has been removed.

N entries; the text of each is its source and its name, one behind the other.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from wangen.generator.errors import WangenError
from wangen.generator.files import write_whole
from wangen.generator.formats.safetensors import read_safetensors
from wangen.runtime.cache.entries import Entry, payload_digest
from wangen.runtime.cache.recipes import KINDS, Encoder, Kind, file_name_of, item_digest

FORMAT = "wangen-pack-1"

_COLUMNS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "content_keys": ("u1", (10,)),
    "keys": ("u1", (10,)),
    "items": ("u1", (10,)),
    "encoders": ("<u2", ()),
    "kinds": ("u1", ()),
    "offsets": ("<i8", ()),
    "sizes": ("<i8", ()),
    "texts": ("u1", ()),
    "text_ends": ("<i8", ()),
    "source_lengths": ("<i4", ()),
}
"""Name -> type and shape of what it has of each entry (`texts`: of each byte of all texts)."""

_DTYPES = {"u1": "U8", "<u2": "U16", "<i4": "I32", "<i8": "I64"}
"""numpy's types -> those of safetensors."""

Column = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class PackIndex:
    """What is known of the entries of one pack.

    Attributes:
        columns: name -> (N, …) values.
        encoders: that made them, by the numbers in the column of that name.
        kinds: of which they are, likewise.
        pack_bytes: size of the pack that it describes.
        removed_bytes: of it, those of entries that count no more.
    """

    columns: Mapping[str, Column]
    encoders: Sequence[Encoder]
    kinds: Sequence[Kind]
    pack_bytes: int
    removed_bytes: int = 0

    @classmethod
    def of(cls, entries: Sequence[Entry], pack_bytes: int, removed_bytes: int = 0) -> "PackIndex":
        """The index of these entries, all in one pack."""
        encoders = list(dict.fromkeys(entry.encoder for entry in entries))
        numbers = {encoder: number for number, encoder in enumerate(encoders)}
        sources = [entry.source.encode("utf-8", "surrogatepass") for entry in entries]
        texts = [source + entry.name.encode("utf-8", "surrogatepass")
                 for source, entry in zip(sources, entries, strict=True)]  # fmt: skip
        values: Mapping[str, Any] = {
            "content_keys": _digits(entry.content_key for entry in entries),
            "keys": _digits(entry.key for entry in entries),
            "items": _digits(item_digest(entry.kind, entry.name) for entry in entries),
            "encoders": [numbers[entry.encoder] for entry in entries],
            "kinds": [KINDS.index(entry.kind) for entry in entries],
            "offsets": [entry.offset for entry in entries],
            "sizes": [entry.num_bytes for entry in entries],
            "texts": np.frombuffer(b"".join(texts), np.uint8),
            "text_ends": list(accumulate(map(len, texts))),
            "source_lengths": [len(source) for source in sources],
        }
        columns = {name: np.asarray(values[name], dtype).reshape(-1, *shape)
                   for name, (dtype, shape) in _COLUMNS.items()}  # fmt: skip
        return cls(columns, encoders, KINDS, pack_bytes, removed_bytes)

    @classmethod
    def read(cls, path: Path, pack_bytes: int) -> "PackIndex | None":
        """The index in a file; None when there is none that can be used.

        Args:
            path: of the index.
            pack_bytes: size of the pack now.
        """
        try:
            header = read_safetensors(path)
            facts = json.loads(header.metadata["index"])
            if (facts["format"], facts["pack_bytes"], facts["payload"]) != (FORMAT, pack_bytes, payload_digest(path)):
                return None
            columns = {}
            for name, (dtype, shape) in _COLUMNS.items():
                info = header.tensors[name]
                assert info.place is not None, "tensors that are read have a place"
                if info.dtype != _DTYPES[dtype] or info.shape[1:] != shape:
                    return None
                columns[name] = _mapped(path, np.dtype(dtype), info.place.offset, (info.shape[0], *shape))
            encoders = [Encoder(str(identity), str(dtype)) for identity, dtype in facts["encoders"]]
            kinds = [kind for name in facts["kinds"] for kind in KINDS if kind == name]
            index = cls(columns, encoders, kinds, pack_bytes, int(facts["removed_bytes"]))
            return index if len(kinds) == len(facts["kinds"]) and index._is_sound() else None
        except (OSError, WangenError, LookupError, TypeError, ValueError, OverflowError, RecursionError):
            return None

    def _is_sound(self) -> bool:
        """Whether no row leads out of the columns or out of the pack.

        Raises:
            UnicodeDecodeError: the texts are none.
        """
        columns = self.columns
        if {len(columns[name]) for name in columns if name != "texts"} != {len(self)}:
            return False
        texts, ends, sources = columns["texts"], columns["text_ends"], columns["source_lengths"]
        texts.tobytes().decode("utf-8", "surrogatepass")
        begins = np.concatenate([[0], ends])[:-1]
        middles = begins + sources
        cuts = np.concatenate([begins, middles])
        return bool(
            np.all((begins <= middles) & (middles <= ends) & (sources >= 0) & (ends <= len(texts)))
            and np.all(texts[cuts[cuts < len(texts)]] & 0xC0 != 0x80)  # none is within a letter
            and np.all((columns["encoders"] < len(self.encoders)) & (columns["kinds"] < len(self.kinds)))
            and np.all((columns["offsets"] >= 0) & (columns["sizes"] >= 0))
            and np.all(columns["offsets"] <= self.pack_bytes - columns["sizes"])
        )

    def write(self, path: Path) -> None:
        """Write the index, whole or not at all.

        Raises:
            OSError: the disk refused.
        """
        facts = {"format": FORMAT, "pack_bytes": self.pack_bytes, "removed_bytes": self.removed_bytes,
                 "kinds": list(self.kinds),
                 "encoders": [[each.identity, each.dtype] for each in self.encoders]}  # fmt: skip
        columns = {name: np.ascontiguousarray(column) for name, column in self.columns.items()}
        plain = save(columns)
        payload = memoryview(plain)[8 + int.from_bytes(plain[:8], "little") :]
        facts["payload"] = hashlib.sha256(payload).hexdigest()
        write_whole(path, [save(columns, {"index": json.dumps(facts, sort_keys=True)})])

    def __len__(self) -> int:
        return len(self.columns["offsets"])

    def entry(self, row: int, folder: Path, pack: str) -> Entry:
        """The entry of a row, of a pack in this folder."""
        begin = int(self.columns["text_ends"][row - 1]) if row else 0
        middle = begin + int(self.columns["source_lengths"][row])
        texts, end = self.columns["texts"], int(self.columns["text_ends"][row])
        source, name = (texts[first:last].tobytes().decode("utf-8", "surrogatepass")
                        for first, last in ((begin, middle), (middle, end)))  # fmt: skip
        kind, encoder = self.kinds[self.columns["kinds"][row]], self.encoders[self.columns["encoders"][row]]
        content_key, key = (self.columns[name][row].tobytes().hex() for name in ("content_keys", "keys"))
        return Entry(folder, file_name_of(kind, name, key), kind, key, content_key, encoder, source, name,
                     int(self.columns["sizes"][row]), pack, int(self.columns["offsets"][row]))  # fmt: skip

    def digests(self, column: str) -> Column:
        """(N,) the first 64 bits of what entries have in a column of 20 hex digits each."""
        return np.ascontiguousarray(self.columns[column][:, :8]).view(">u8")[:, 0].astype("<u8")


def _digits(texts: Iterable[str]) -> Column:
    """Texts of hex digits as bytes."""
    return np.frombuffer(bytes.fromhex("".join(texts)), np.uint8)


def _mapped(path: Path, dtype: "np.dtype[Any]", offset: int, shape: tuple[int, ...]) -> Column:
    """Values in a file, read when they are asked for; on Windows at once, for what is mapped cannot be replaced."""
    if 0 in shape:
        return np.zeros(shape, dtype)
    if os.name == "posix":
        return np.memmap(path, dtype, "r", offset, shape).view(np.ndarray)
    return np.fromfile(path, dtype, int(np.prod(shape)), offset=offset).reshape(shape)


class Directory:
    """Finds numbers by digests: those of the rows of several indexes, counted one behind the other.

    Args:
        columns: for each index (N,) 64 bits of every entry, as `PackIndex.digests` gives them.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        digests = np.concatenate(columns)
        self._numbers = np.argsort(digests, kind="stable")
        self._digests = digests[self._numbers]

    def numbers(self, digest: str) -> list[int]:
        """All numbers whose digest begins with the same 16 hex digits, ascending."""
        wanted = np.uint64(int(digest[:16], 16))
        first, end = (int(np.searchsorted(self._digests, wanted, side)) for side in ("left", "right"))
        return [int(number) for number in self._numbers[first:end]]
