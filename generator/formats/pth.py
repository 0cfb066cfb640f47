"""The zip form of `.pth`.

The pickle inside is read by a machine of our own (`pickled`) that knows the storage types, the constructors of tensors
and `OrderedDict`; any other global is an error that names it, and nothing is ever executed.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
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
)
from wangen.generator.formats.pickled import Constructor, MalformedError, RefusedError, read_pickle
from wangen.generator.formats.zip_records import LOCAL, NoDirectoryError, Record, content_begin, read_records

MAX_SHARING = 8  # how often every byte may be used: tied weights use a few twice
MAX_PICKLE_BYTES = 16 * 2**20  # the pickle of a 14B transformer is below 1 MiB
DATA = "data.pkl"
WRAPPERS = ("state_dict", "model_state_dict", "module", "model")
"""Where training programs keep the weights within what they save."""

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
    "ComplexFloatStorage": "C64",
}
# The dtypes without a storage type of their own: PyTorch saves their bytes untyped, and the dtype with the tensor.
UNTYPED_DTYPES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}


def read_pth(path: Path) -> Header:
    """The tensors of a `.pth` in PyTorch's zip form: a flat state dict, or one under a key of `WRAPPERS`.

    Raises:
        WangenError: the zip is cut short, the pickle holds code or something other than tensors.
    """
    try:
        records = read_records(path)
    except NoDirectoryError as error:
        raise _cut_short(path) from error
    root = _root(path, records)
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        begins = {
            name.removeprefix(root): content_begin(path, file, name, record, file_bytes)
            for name, record in records.items()
            if name.startswith((f"{root}data/", f"{root}{DATA}", f"{root}byteorder"))
        }
        file.seek(begins[DATA])
        tensors = _state_dict(path, _unpickle(path, file.read(records[root + DATA].num_bytes)))
        if "byteorder" in begins:
            file.seek(begins["byteorder"])
            if file.read(3) == b"big":
                raise WangenError("these weights were saved on a big-endian machine, which is not read",
                                  where=str(path), cure="save them again on a usual one")  # fmt: skip
    for name, tensor in tensors.items():
        _check(path, name, tensor, records.get(f"{root}data/{tensor.storage.record}"))
    found = {name: _placed(path, tensor, begins) for name, tensor in tensors.items()}
    if sum(info.place.num_bytes for info in found.values() if info.place) > MAX_SHARING * file_bytes:
        raise WangenError("its tensors share their numbers so often that they would fill the memory", where=str(path),
                          cure="get the weights from their official source")  # fmt: skip
    return Header(found, {}, "pth")


def directory_lines(path: Path) -> Iterator[bytes]:
    """Names, sizes and checksums of all records of a `.pth`, a line each.

    Raises:
        WangenError: as `read_pth`.
    """
    try:
        for name, record in read_records(path).items():
            yield f"{name} {record.num_bytes} {record.crc:08x}\n".encode("utf-8", "surrogatepass")
    except NoDirectoryError as error:
        raise _cut_short(path) from error


@dataclass(frozen=True)
class _StorageType:
    """dtype: None for bytes that the tensor gives a dtype."""

    dtype: str | None


@dataclass(frozen=True)
class _Dtype:
    name: str


@dataclass(frozen=True)
class _Storage:
    dtype: str | None
    record: str
    num_bytes: int


@dataclass(frozen=True)
class _StoredTensor:
    """offset and strides: in elements."""

    storage: _Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """How many elements of its storage a tensor reaches over, those before it included."""
        if 0 in self.shape:
            return 0
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1


def _load_storage(reference: Any) -> _Storage:
    """The reference to a storage: `("storage", type, record, device, number of elements)`."""
    if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
        raise MalformedError("a reference that is no storage")
    _, kind, record, _, size = reference
    if not isinstance(kind, _StorageType) or not isinstance(record, str):
        raise MalformedError("a storage without type or name")
    return _Storage(kind.dtype, record, _natural(size) * (DTYPE_BITS[kind.dtype] // 8 if kind.dtype else 1))


def _tensor_v2(storage: Any, offset: Any, shape: Any, strides: Any, *unused: Any) -> _StoredTensor:
    if len(unused) > 2 and unused[2]:  # behind requires_grad and hooks: what is done to the numbers when they are read
        raise MalformedError("a tensor stored as the negative or conjugate of its numbers")
    if not isinstance(storage, _Storage) or storage.dtype is None:
        raise MalformedError("a tensor without storage")
    if not isinstance(shape, tuple) or not isinstance(strides, tuple) or not len(shape) == len(strides) <= MAX_DIMS:
        raise MalformedError("a tensor without shape")
    sizes = tuple(map(_natural, shape))
    return _StoredTensor(storage, storage.dtype, _natural(offset), sizes, tuple(map(_natural, strides)))


def _tensor_v3(storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any,
               *_unused: Any) -> _StoredTensor:  # fmt: skip
    if not isinstance(storage, _Storage) or not isinstance(dtype, _Dtype):
        raise MalformedError("a tensor without storage or dtype")
    return _tensor_v2(replace(storage, dtype=dtype.name), offset, shape, strides)


def _parameter(tensor: Any, *_unused: Any) -> _StoredTensor:
    if not isinstance(tensor, _StoredTensor):
        raise MalformedError("a parameter that is no tensor")
    return tensor


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SIZE:
        raise MalformedError("something else where a size belongs")
    return value


GLOBALS: Mapping[str, Any] = {
    "collections.OrderedDict": Constructor(lambda: {}),
    "torch._utils._rebuild_tensor_v2": Constructor(_tensor_v2),
    "torch._utils._rebuild_tensor_v3": Constructor(_tensor_v3),
    "torch._utils._rebuild_parameter": Constructor(_parameter),
    "torch.storage.UntypedStorage": _StorageType(None),
    **{f"torch.{name}": _StorageType(dtype) for name, dtype in STORAGE_DTYPES.items()},
    **{f"torch.{name}": _Dtype(dtype) for name, dtype in UNTYPED_DTYPES.items()},
}
"""All that a pickle may name."""


@lru_cache(maxsize=4)
def _content(data: bytes) -> Any:
    """What a pickle holds, not to be changed: a step reads a file for what it is, for its digest and to load it."""
    return read_pickle(data, GLOBALS, _load_storage)[0]


def _unpickle(path: Path, data: bytes) -> Any:
    """What a pickle holds."""
    try:
        return _content(data)
    except RefusedError as error:
        raise _refused(path, error) from error
    except MalformedError as error:
        raise WangenError(f"the pickle inside is no state dict ({error})", where=str(path),
                          cure=DOWNLOAD_AGAIN) from error  # fmt: skip


def _refused(path: Path, error: RefusedError) -> WangenError:
    return WangenError(
        f"refused, not executed: this pickle wants {quoted(str(error))[1:-1]}, which weights do not need",
        where=str(path),
        cure="get the weights from their official source, best as .safetensors",
    )


def _root(path: Path, records: Mapping[str, Record]) -> str:
    """The folder within the zip that holds the weights, with its slash."""
    pickles = [name for name in records if name.count("/") == 1 and name.endswith(f"/{DATA}")]
    if len(pickles) == 1 and records[pickles[0]].num_bytes <= MAX_PICKLE_BYTES:
        root = pickles[0].removesuffix(DATA)
        if f"{root}constants.pkl" not in records:
            return root
        raise WangenError("this is a TorchScript archive: a program with its weights, which is not executed",
                          where=str(path), cure="get the weights alone, best as .safetensors")  # fmt: skip
    if len(pickles) == 1:
        raise WangenError(f"the pickle inside is {records[pickles[0]].num_bytes} bytes: refused", where=str(path))
    inside = [name for name in records if name.endswith((".safetensors", ".pth", ".gguf", ".npy"))]
    found = "this zip file holds no PyTorch weights (no data.pkl)"
    if inside:
        raise WangenError(f"{found}, but {quoted(inside[0])}", where=str(path), cure="unpack it, and give that file")
    raise WangenError(found, where=str(path), cure="give a weight file")


def _state_dict(path: Path, content: Any) -> dict[str, _StoredTensor]:
    """The tensors of a pickle by name."""
    for _ in range(2):
        if isinstance(content, dict) and not any(isinstance(value, _StoredTensor) for value in content.values()):
            content = next((content[key] for key in WRAPPERS if isinstance(content.get(key), dict)), content)
    if not isinstance(content, dict) or not content:
        raise WangenError("the pickle inside is no state dict", where=str(path), cure="give a weight file")
    if {"state", "param_groups"} <= content.keys():
        raise WangenError("this is the optimizer of a training state, not weights", where=str(path),
                          cure="give a weight file")  # fmt: skip
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, _StoredTensor):
            raise WangenError(f"the pickle inside is no state dict: {quoted(str(name))} is no tensor",
                              where=str(path), cure="give a weight file")  # fmt: skip
        check_name(path, name)
    return content


def _check(path: Path, name: str, tensor: _StoredTensor, record: Record | None) -> None:
    """A tensor lies within its storage, and the storage within the file."""
    if record is None or record.num_bytes != tensor.storage.num_bytes:
        raise WangenError(
            f"the weights of {quoted(name)} are missing or cut short", where=str(path), cure=DOWNLOAD_AGAIN
        )
    num_elements = record.num_bytes // (DTYPE_BITS[tensor.dtype] // 8)
    if tensor.extent > num_elements:
        raise WangenError(f"{quoted(name)} reaches beyond its storage", where=str(path), cure=DOWNLOAD_AGAIN)
    if math.prod(tensor.shape) > num_elements:
        raise WangenError(f"{quoted(name)} repeats its numbers, which is not read", where=str(path),
                          cure="save it again as tensor.contiguous()")  # fmt: skip


def _placed(path: Path, tensor: _StoredTensor, begins: Mapping[str, int]) -> TensorInfo:
    """What the rest of the program knows of a tensor: dtype, shape and where its bytes are."""
    element_bytes = DTYPE_BITS[tensor.dtype] // 8
    num_elements = tensor.extent - tensor.offset if 0 not in tensor.shape else 0
    row_by_row = tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape)))
    same = all(n == 1 or s == r for n, s, r in zip(tensor.shape, tensor.strides, row_by_row, strict=True))
    place = Place(
        path,
        begins[f"data/{tensor.storage.record}"] + tensor.offset * element_bytes,
        num_elements * element_bytes,
        None if same or 0 in tensor.shape else tensor.strides,
    )
    return TensorInfo(tensor.dtype, tensor.shape, place)


def _cut_short(path: Path) -> WangenError:
    """The error of a file without a directory: how long it would be, as far as its first record says it.

    PyTorch writes the pickle first and the storages behind it.
    """
    found = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LOCAL.size)
        name_bytes, extra_bytes = LOCAL.unpack(start)[1:] if len(start) == LOCAL.size else (0, 0)
        name = file.read(name_bytes)
        file.seek(LOCAL.size + name_bytes + extra_bytes)
        data = file.read(MAX_PICKLE_BYTES) if name.endswith(f"/{DATA}".encode()) else b""
    storages: dict[str, int] = {}

    def load(reference: Any) -> _Storage:
        storage = _load_storage(reference)
        storages[storage.record] = storage.num_bytes
        return storage

    expected = f"more than {found}"
    try:
        end = LOCAL.size + name_bytes + extra_bytes + read_pickle(data, GLOBALS, load)[1] + sum(storages.values())
        expected = f"at least {end}" if end > found else expected
    except RefusedError as error:
        return _refused(path, error)
    except MalformedError:
        pass  # cut within the pickle, or no weights at all: no more can be said
    return WangenError(
        f"this .pth is incomplete or damaged: {expected} bytes expected, {found} bytes found; it does not end with "
        "its directory",
        where=str(path),
        cure=DOWNLOAD_AGAIN,
    )
