"""Safetensors files."""

import json
import math
import struct
from pathlib import Path
from typing import Any

from wangen.generator.errors import WangenError
from wangen.generator.formats import DOWNLOAD_AGAIN, DTYPE_BITS, Header, Place, TensorInfo, truncated

MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer headers


def read_safetensors(path: Path) -> Header:
    """The header of one safetensors file, as strictly as the library reads it.

    Raises:
        WangenError: the header is malformed, or the file is not as long as its header says.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if length < 2 or length > MAX_HEADER_BYTES:
            found = f"its header would be {length} bytes long" if size_bytes else "it is empty"
            raise WangenError(f"not a safetensors file: {found}", where=str(path), cure=DOWNLOAD_AGAIN)
        if 8 + length > size_bytes:
            raise truncated(path, expected=f"more than {8 + length}", found=size_bytes)
        text = file.read(length)
    try:
        fields = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise WangenError(f"not a safetensors file: its header is no JSON ({error})", where=str(path)) from error
    if not isinstance(fields, dict):
        raise WangenError("not a safetensors file: its header is no JSON object", where=str(path))
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WangenError("the metadata of this safetensors file is not text", where=str(path))
    spans = {name: _span(path, name, value) for name, value in fields.items()}
    payload_bytes = _payload_bytes(path, {name: (begin, end) for name, (_, begin, end) in spans.items()})
    if 8 + length + payload_bytes > size_bytes:
        raise truncated(path, expected=str(8 + length + payload_bytes), found=size_bytes)
    if 8 + length + payload_bytes < size_bytes:
        surplus = size_bytes - 8 - length - payload_bytes
        raise WangenError(f"{surplus} bytes too many at the end", where=str(path), cure=DOWNLOAD_AGAIN)
    tensors = {
        name: TensorInfo(info.dtype, info.shape, Place(path, 8 + length + begin, end - begin))
        for name, (info, begin, end) in spans.items()
    }
    return Header(tensors, metadata, "safetensors")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def _span(path: Path, name: str, value: Any) -> tuple[TensorInfo, int, int]:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers = (*shape, begin, end)
    except (KeyError, TypeError, ValueError) as error:
        raise WangenError(f"the header entry of {name!r} is malformed", where=str(path)) from error
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
        raise WangenError(f"the header entry of {name!r} is malformed", where=str(path))
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise WangenError(f"{name!r} has the unknown dtype {dtype!r}", where=str(path))
    num_bits = math.prod(shape) * DTYPE_BITS[dtype]
    if num_bits != (end - begin) * 8:
        raise WangenError(
            f"{name!r} of {list(shape)} {dtype} needs {num_bits // 8} bytes, its header gives it {end - begin}",
            where=str(path),
        )
    return TensorInfo(dtype, shape), begin, end


def _payload_bytes(path: Path, spans: dict[str, tuple[int, int]]) -> int:
    """The end of the last tensor; overlaps and gaps are refused, as the library does."""
    position = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != position:
            raise WangenError(f"{name!r} begins at {begin}, where {position} was due", where=str(path))
        position = end
    return position
