"""GGUF files, versions 2 and 3, little endian.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A header holds typed fields, then the list of
tensors, then padding; a tokenizer's lists of texts are skipped, since they are longer than all the rest.
"""

import math
import struct
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from wangen.generator.errors import WangenError
from wangen.generator.formats import DOWNLOAD_AGAIN, MAX_SIZE, Header, Place, TensorInfo, check_name, quoted, truncated

MAGIC = b"GGUF"
SHAPE_FIELD = "comfy.gguf.orig_shape."
"""ComfyUI-GGUF stores a tensor whose rows are no whole blocks as rows of 256, and its shape in a field of this name."""

MAX_HEADER_BYTES = 100_000_000  # umT5's tokenizer makes 6 MB
MAX_FIELDS = 10_000
MAX_TENSORS = 100_000
MAX_ELEMENTS_ONE_BY_ONE = 2_000_000  # texts within lists: umT5 has 256 384
MAX_DEPTH = 4  # of lists within lists
MAX_DIMS = 8  # the library writes 4, ComfyUI-GGUF 5
MAX_NAME_BYTES = 1000
MAX_TEXT_BYTES = 4096  # longer texts are no metadata but templates and tables
WINDOW_BYTES = 2**20

# GGUF's number of a value type -> how struct reads it; texts and lists have no fixed size.
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
TEXT, LIST, INT32 = 8, 9, 5

# GGML's number of a tensor type -> its name, elements per block, bytes per block (ggml.h, ggml-common.h).
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
BLOCKS = {name: (num_elements, num_bytes) for name, num_elements, num_bytes in TYPES.values()}
"""The same by name: elements and bytes of a block."""


def read_gguf(path: Path) -> Header:
    """The header of a GGUF file: tensors with their shapes outermost first, and the scalar fields as text.

    Raises:
        WangenError: another version or byte order, malformed, or shorter than its header says.
    """
    with path.open("rb") as file:
        cursor = _Cursor(path, file)
        num_tensors, num_fields = _counts(cursor)
        metadata, shapes = _fields(cursor, num_fields)
        stored = _tensors(cursor, num_tensors)
        alignment = _alignment(cursor, metadata)
        begin = -(-cursor.position // alignment) * alignment
    tensors = {
        name: TensorInfo(info.dtype, _original(path, name, info.shape, shapes), Place(path, begin + offset, num_bytes))
        for name, (info, offset, num_bytes) in stored.items()
    }
    _check_places(path, tensors, cursor.size_bytes, alignment)
    return Header(tensors, metadata, "gguf")


class _Cursor:
    """Reads a file front to back through a window, so that nothing is allocated that the file does not hold."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.size_bytes = path.stat().st_size
        self.position = 0
        self.elements_left = MAX_ELEMENTS_ONE_BY_ONE
        self._window = b""
        self._window_begin = 0

    def take(self, num_bytes: int) -> bytes:
        """The next bytes."""
        begin = self.position - self._window_begin
        if not 0 <= begin <= len(self._window) - num_bytes:
            self.file.seek(self.position)
            self._window, self._window_begin, begin = self.file.read(max(num_bytes, WINDOW_BYTES)), self.position, 0
        self.skip(num_bytes)
        return self._window[begin : begin + num_bytes]

    def skip(self, num_bytes: int) -> None:
        """Go on, within the file and within what a header may be long."""
        self.position += num_bytes
        if self.position > self.size_bytes:
            raise truncated(self.path, expected=f"more than {self.position}", found=self.size_bytes)
        if self.position > MAX_HEADER_BYTES:
            raise self.malformed(f"its header is longer than {MAX_HEADER_BYTES} bytes")

    def number(self, layout: str) -> int:
        """One number of a struct layout."""
        value: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def text(self, what: str) -> str:
        """A name: short and printable."""
        num_bytes = self.number("<Q")
        if num_bytes > MAX_NAME_BYTES:
            raise self.malformed(f"{what} is {num_bytes} bytes long")
        name = self.take(num_bytes).decode("utf-8", "backslashreplace")
        check_name(self.path, name)
        return name

    def malformed(self, why: str) -> WangenError:
        """The error of a header that no program writes."""
        return WangenError(f"malformed GGUF: {why}", where=str(self.path), cure=DOWNLOAD_AGAIN)


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """How many tensors and fields follow; the version is checked before."""
    magic, version = cursor.take(4), cursor.number("<I")
    if magic != MAGIC:
        raise cursor.malformed("it does not begin with GGUF")
    if version & 0xFFFF == 0 and version:
        raise WangenError("this GGUF file is big endian, which is not read", where=str(cursor.path),
                          cure="get the little-endian file, which is the usual one")  # fmt: skip
    if version not in (2, 3):
        raise WangenError(f"this GGUF file is of version {version}; 2 and 3 are read", where=str(cursor.path),
                          cure="get the file in a current version")  # fmt: skip
    num_tensors, num_fields = cursor.number("<Q"), cursor.number("<Q")
    if num_tensors > MAX_TENSORS or num_fields > MAX_FIELDS:
        raise cursor.malformed(f"it would hold {num_tensors} tensors and {num_fields} fields")
    if not num_tensors:
        raise cursor.malformed("it holds no tensors")
    return num_tensors, num_fields


def _fields(cursor: _Cursor, count: int) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """The scalar fields as text, and the shapes that fields of lists of numbers give to tensors."""
    metadata: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    seen: set[str] = set()
    for _ in range(count):
        name, kind = cursor.text("the name of a field"), cursor.number("<I")
        if name in seen:
            raise cursor.malformed(f"the field {quoted(name)} occurs twice")
        seen.add(name)
        if name.startswith(SHAPE_FIELD):
            shapes[name.removeprefix(SHAPE_FIELD)] = _shape(cursor, name, kind)
        elif kind == TEXT:
            num_bytes = cursor.number("<Q")
            if num_bytes <= MAX_TEXT_BYTES:
                metadata[name] = cursor.take(num_bytes).decode("utf-8", "replace")
            else:
                cursor.skip(num_bytes)
        elif kind in SCALARS:
            metadata[name] = str(cursor.number(SCALARS[kind]))
        else:
            _skip(cursor, kind, 0)
    return metadata, shapes


def _shape(cursor: _Cursor, name: str, kind: int) -> tuple[int, ...]:
    if kind != LIST or cursor.number("<I") != INT32 or (num_dims := cursor.number("<Q")) > MAX_DIMS:
        raise cursor.malformed(f"the field {quoted(name)} is no shape")
    return tuple(cursor.number("<i") for _ in range(num_dims))


def _skip(cursor: _Cursor, kind: int, depth: int) -> None:
    """Pass over a value of any type; lists of numbers in one step."""
    if kind == TEXT:
        cursor.skip(cursor.number("<Q"))
    elif kind in SCALARS:
        cursor.skip(struct.calcsize(SCALARS[kind]))
    elif kind == LIST and depth < MAX_DEPTH:
        element, count = cursor.number("<I"), cursor.number("<Q")
        if element in SCALARS:
            cursor.skip(count * struct.calcsize(SCALARS[element]))
            return
        cursor.elements_left -= count
        if cursor.elements_left < 0:
            raise cursor.malformed(f"its lists hold more than {MAX_ELEMENTS_ONE_BY_ONE} texts")
        for _ in range(count):
            _skip(cursor, element, depth + 1)
    else:
        raise cursor.malformed(f"a value of the unknown type {kind}" if kind != LIST else "lists within lists")


def _tensors(cursor: _Cursor, count: int) -> dict[str, tuple[TensorInfo, int, int]]:
    """Name -> the tensor as stored, its offset within the payload, its bytes."""
    tensors: dict[str, tuple[TensorInfo, int, int]] = {}
    for _ in range(count):
        name, num_dims = cursor.text("the name of a tensor"), cursor.number("<I")
        if name in tensors:
            raise cursor.malformed(f"the tensor {quoted(name)} occurs twice")
        if num_dims > MAX_DIMS:
            raise cursor.malformed(f"{quoted(name)} has {num_dims} dimensions")
        dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims))
        kind, offset = cursor.number("<I"), cursor.number("<Q")
        if kind not in TYPES:
            raise WangenError(f"{quoted(name)} is of the GGML type {kind}, which is unknown here",
                              where=str(cursor.path), cure="get the file in another quantisation")  # fmt: skip
        dtype, block_elements, block_bytes = TYPES[kind]
        if max((*dims, offset)) > MAX_SIZE or (dims[0] if dims else 1) % block_elements:
            raise cursor.malformed(f"{quoted(name)} cannot be of shape {list(reversed(dims))} in {dtype}")
        num_bytes = math.prod(dims) // block_elements * block_bytes
        tensors[name] = TensorInfo(dtype, tuple(reversed(dims))), offset, num_bytes
    return tensors


def _alignment(cursor: _Cursor, metadata: dict[str, str]) -> int:
    text = metadata.get("general.alignment", "32")
    alignment = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if alignment <= 0 or alignment & (alignment - 1):
        raise cursor.malformed(f"its alignment is {quoted(text)}, which is no power of two")
    return alignment


def _original(path: Path, name: str, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    original = shapes.get(name, shape)
    if min(original, default=1) < 0 or math.prod(original) != math.prod(shape):
        raise WangenError(f"malformed GGUF: {quoted(name)} is stored as {list(shape)}, which cannot be "
                          f"{list(original)}", where=str(path), cure=DOWNLOAD_AGAIN)  # fmt: skip
    return original


def _check_places(path: Path, tensors: dict[str, TensorInfo], size_bytes: int, alignment: int) -> None:
    """Every tensor lies aligned within the file, none over another, and little follows the last."""
    places = sorted((info.place.offset, info.place.num_bytes, name) for name, info in tensors.items() if info.place)
    for (begin, num_bytes, name), (following, _, other) in pairwise(places):
        if begin + num_bytes > following:
            raise WangenError(f"malformed GGUF: {quoted(name)} and {quoted(other)} lie over each other",
                              where=str(path), cure=DOWNLOAD_AGAIN)  # fmt: skip
    if unaligned := [name for begin, _, name in places if begin % alignment]:
        raise WangenError(f"malformed GGUF: {quoted(unaligned[0])} does not lie at a multiple of {alignment} bytes",
                          where=str(path), cure=DOWNLOAD_AGAIN)  # fmt: skip
    end = max(begin + num_bytes for begin, num_bytes, _ in places)
    if end > size_bytes:
        raise truncated(path, expected=str(end), found=size_bytes)
    if size_bytes - end >= alignment:
        raise WangenError(f"{size_bytes - end} bytes too many at the end", where=str(path), cure=DOWNLOAD_AGAIN)
