"""Safetensors files."""

import math
import struct
from pathlib import Path
from typing import Any

from wangen.generator.errors import WangenError
from wangen.generator.formats import (
    DOWNLOAD_AGAIN,
    DTYPE_BITS,
    MAX_DIMS,
    MAX_SIZE,
    Header,
    Place,
    TensorInfo,
    check_name,
    quoted,
    truncated,
)
from wangen.generator.formats.strict_json import parse_json

MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer headers


def read_safetensors(path: Path, span: tuple[int, int] | None = None) -> Header:
    """The header of one safetensors file, as strictly as the library reads it.

    Args:
        path: the file, or one that holds it.
        span: where it begins in that one, and how long it is, in bytes.

    Raises:
        WangenError: the header is malformed, or the file is not as long as its header says.
    """
    start, size_bytes = span or (0, path.stat().st_size)
    with path.open("rb") as file:
        file.seek(start)
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if length < 2 or length > MAX_HEADER_BYTES:
            found = f"its header would be {length} bytes long" if size_bytes else "it is empty"
            raise WangenError(f"not a safetensors file: {found}", where=str(path), cure=DOWNLOAD_AGAIN)
        if 8 + length > size_bytes:
            raise truncated(path, expected=f"more than {8 + length}", found=size_bytes)
        text = file.read(length)
    fields = _json(path, text)
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WangenError("the metadata of this safetensors file is not text", where=str(path), cure=DOWNLOAD_AGAIN)
    spans = {name: _span(path, name, value) for name, value in fields.items()}
    payload_bytes = _payload_bytes(path, {name: (begin, end) for name, (_, begin, end) in spans.items()})
    if 8 + length + payload_bytes > size_bytes:
        raise truncated(path, expected=str(8 + length + payload_bytes), found=size_bytes)
    if 8 + length + payload_bytes < size_bytes:
        surplus = size_bytes - 8 - length - payload_bytes
        raise WangenError(f"{surplus} bytes too many at the end", where=str(path), cure=DOWNLOAD_AGAIN)
    tensors = {
        name: TensorInfo(info.dtype, info.shape, Place(path, start + 8 + length + begin, end - begin))
        for name, (info, begin, end) in spans.items()
    }
    return Header(tensors, metadata, "safetensors")


def _json(path: Path, text: bytes) -> dict[str, Any]:
    """The header's JSON object."""
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise WangenError(f"not a safetensors file: its header is no JSON ({error})", where=str(path),
                          cure=DOWNLOAD_AGAIN) from error  # fmt: skip
    if not isinstance(fields, dict):
        raise WangenError("not a safetensors file: its header is no JSON object", where=str(path), cure=DOWNLOAD_AGAIN)
    return fields


def _span(path: Path, name: str, value: Any) -> tuple[TensorInfo, int, int]:
    check_name(path, name)
    malformed = WangenError(f"the header entry of {quoted(name)} is malformed", where=str(path), cure=DOWNLOAD_AGAIN)
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise malformed from error
    if len(shape) > MAX_DIMS or not all(
        isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MAX_SIZE
        for number in (*shape, begin, end)
    ):
        raise malformed
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise WangenError(f"{quoted(name)} has the unknown dtype {quoted(str(dtype))}", where=str(path))
    num_bits = math.prod(shape) * DTYPE_BITS[dtype]
    if num_bits != (end - begin) * 8:
        raise WangenError(
            f"{quoted(name)} of {list(shape)} {dtype} needs {num_bits // 8} bytes, its header gives it {end - begin}",
            where=str(path),
            cure=DOWNLOAD_AGAIN,
        )
    return TensorInfo(dtype, shape), begin, end


def _payload_bytes(path: Path, spans: dict[str, tuple[int, int]]) -> int:
    """The end of the last tensor; overlaps and gaps are refused, as the library does."""
    position = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != position:
            raise WangenError(f"{quoted(name)} begins at {begin}, where {position} was due", where=str(path),
                              cure=DOWNLOAD_AGAIN)  # fmt: skip
        position = end
    return position
