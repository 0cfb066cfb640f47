"""The two formats of weight files, read from their headers alone: safetensors and the zip form of `.pth`.

Nothing in a file is executed. The pickle inside a `.pth` is read by an unpickler that knows nine storage types, the
tensor constructor and `OrderedDict`; any other global is an error that names it. Offsets, sizes and shapes are
checked against the file, so that a download cut short is found here and not in the middle of loading.
"""

import collections
import json
import math
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from wangen.generator.errors import WangenError

MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer headers
MAX_PICKLE_BYTES = 64 * 2**20  # the pickle of a 14B transformer is below 1 MiB

# Bits per element, under the names that safetensors uses.
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

STORAGE_DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}

DOWNLOAD_AGAIN = "download or copy the file again"


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor.

    Attributes:
        dtype: the safetensors name (`F32`, `BF16`, …), for `.pth` files too.
        shape: the sizes, outermost first; empty for a scalar.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """All that is known of a weight file without reading its weights.

    Attributes:
        tensors: the tensors by name, of all shards when the file is sharded.
        metadata: the free text fields of safetensors; empty for `.pth`.
        format: how the file is written.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    format: Literal["safetensors", "pth"]


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
            raise _truncated(path, expected=f"more than {8 + length}", found=size_bytes)
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
        raise _truncated(path, expected=str(8 + length + payload_bytes), found=size_bytes)
    if 8 + length + payload_bytes < size_bytes:
        surplus = size_bytes - 8 - length - payload_bytes
        raise WangenError(f"{surplus} bytes too many at the end", where=str(path), cure=DOWNLOAD_AGAIN)
    return Header({name: info for name, (info, _, _) in spans.items()}, metadata, "safetensors")


def read_pth(path: Path) -> Header:
    """The tensors of a `.pth` in PyTorch's zip form: a flat state dict, or one under the key `state_dict`.

    Raises:
        WangenError: the zip is cut short, the pickle holds code or something other than tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise WangenError("this zip file is compressed; PyTorch weights never are", where=str(path))
            pickles = [name for name in sizes if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise WangenError("this zip file holds no PyTorch weights (no data.pkl)", where=str(path))
            if sizes[pickles[0]] > MAX_PICKLE_BYTES:
                raise WangenError(f"the pickle inside is {sizes[pickles[0]]} bytes: refused", where=str(path))
            with archive.open(pickles[0]) as file:
                content = _unpickle(path, _TensorUnpickler(cast(Any, file)))
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise WangenError(
            f"this .pth is incomplete or damaged: {path.stat().st_size} bytes found, but not the zip directory that "
            f"belongs at its end ({error})",
            where=str(path),
            cure=DOWNLOAD_AGAIN,
        ) from error
    root = pickles[0].removesuffix("data.pkl")
    return Header(_state_dict(path, content, root, sizes), {}, "pth")


@dataclass(frozen=True)
class _Storage:
    dtype: str
    record: str
    num_elements: int


@dataclass(frozen=True)
class _StoredTensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Refused(pickle.UnpicklingError):
    """A global that weights have no need of."""


class _TensorUnpickler(pickle.Unpickler):
    """Reads a state dict without its weights; every global outside the short list is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a global of the pickle."""
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if module == "torch" and name in STORAGE_DTYPES:
            return _storage_type(STORAGE_DTYPES[name])
        raise _Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        """The reference to a storage: `("storage", type, record, device, number of elements)`."""
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], _StorageType):
            raise pickle.UnpicklingError("a reference that is no storage")
        return _Storage(pid[1].dtype, str(pid[2]), _natural(pid[4]))


@dataclass(frozen=True)
class _StorageType:
    dtype: str


_storage_type: Callable[[str], _StorageType] = _StorageType


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_unused: Any) -> _StoredTensor:
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise pickle.UnpicklingError("a tensor without storage or shape")
    return _StoredTensor(storage, _natural(offset), tuple(map(_natural, shape)), tuple(map(_natural, strides)))


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise pickle.UnpicklingError(f"{value!r} where a size belongs")
    return value


def _unpickle(path: Path, unpickler: pickle.Unpickler) -> Any:
    try:
        return unpickler.load()
    except _Refused as error:
        raise WangenError(
            f"refused, not executed: this pickle wants {error}, which weights do not need",
            where=str(path),
            cure="get the weights from their official source, best as .safetensors",
        ) from error
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        raise WangenError(f"the pickle inside is no state dict ({error})", where=str(path)) from error


def _state_dict(path: Path, content: Any, root: str, sizes: dict[str, int]) -> dict[str, TensorInfo]:
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not content:
        raise WangenError("the pickle inside is no state dict", where=str(path))
    tensors: dict[str, TensorInfo] = {}
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, _StoredTensor):
            raise WangenError(f"the pickle inside is no state dict: {name!r} is no tensor", where=str(path))
        stored = tensor.storage
        found = sizes.get(f"{root}data/{stored.record}")
        if found != stored.num_elements * DTYPE_BITS[stored.dtype] // 8:
            raise WangenError(f"the weights of {name} are missing or cut short", where=str(path), cure=DOWNLOAD_AGAIN)
        extent = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=False)) + 1
        if len(tensor.shape) != len(tensor.strides) or (0 not in tensor.shape and extent > stored.num_elements):
            raise WangenError(f"{name} reaches beyond its storage", where=str(path), cure=DOWNLOAD_AGAIN)
        tensors[name] = TensorInfo(stored.dtype, tensor.shape)
    return tensors


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


def _truncated(path: Path, *, expected: str, found: int) -> WangenError:
    return WangenError(f"the file is cut short: {expected} bytes expected, {found} found", where=str(path),
                       cure=DOWNLOAD_AGAIN)  # fmt: skip
