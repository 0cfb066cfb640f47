"""The zip form of `.pth`.

The pickle inside is read by an unpickler that knows ten storage types, the tensor constructor and `OrderedDict`; any
other global is an error that names it.
"""

import collections
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from wangen.generator.errors import WangenError
from wangen.generator.formats import DOWNLOAD_AGAIN, DTYPE_BITS, Header, Place, TensorInfo

MAX_PICKLE_BYTES = 64 * 2**20  # the pickle of a 14B transformer is below 1 MiB
LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip record: the lengths of its name and of its extra field

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
            root = pickles[0].removesuffix("data.pkl")
            tensors = _state_dict(path, content, root, sizes)
            begins = _begins(path, archive, root)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise WangenError(
            f"this .pth is incomplete or damaged: {path.stat().st_size} bytes found, but not the zip directory that "
            f"belongs at its end ({error})",
            where=str(path),
            cure=DOWNLOAD_AGAIN,
        ) from error
    return Header({name: _placed(path, tensor, begins) for name, tensor in tensors.items()}, {}, "pth")


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


def _state_dict(path: Path, content: Any, root: str, sizes: dict[str, int]) -> dict[str, _StoredTensor]:
    """The tensors of a pickle, each checked against the record that holds its elements."""
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not content:
        raise WangenError("the pickle inside is no state dict", where=str(path))
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, _StoredTensor):
            raise WangenError(f"the pickle inside is no state dict: {name!r} is no tensor", where=str(path))
        stored = tensor.storage
        found = sizes.get(f"{root}data/{stored.record}")
        if found != stored.num_elements * DTYPE_BITS[stored.dtype] // 8:
            raise WangenError(f"the weights of {name} are missing or cut short", where=str(path), cure=DOWNLOAD_AGAIN)
        if len(tensor.shape) != len(tensor.strides) or _extent(tensor) > stored.num_elements:
            raise WangenError(f"{name} reaches beyond its storage", where=str(path), cure=DOWNLOAD_AGAIN)
    return content


def _extent(tensor: _StoredTensor) -> int:
    """How many elements of its storage a tensor reaches over, those before it included."""
    if 0 in tensor.shape:
        return 0
    return tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True)) + 1


def _begins(path: Path, archive: zipfile.ZipFile, root: str) -> dict[str, int]:
    """Where the bytes of each storage begin in the file: behind the record's own header, whose length varies."""
    begins: dict[str, int] = {}
    with path.open("rb") as file:
        for info in archive.infolist():
            if not info.filename.startswith(f"{root}data/"):
                continue
            file.seek(info.header_offset)
            local = file.read(LOCAL_HEADER.size)
            if len(local) < LOCAL_HEADER.size or not local.startswith(b"PK\x03\x04"):
                raise WangenError(f"the record {info.filename} is not where the directory says", where=str(path),
                                  cure=DOWNLOAD_AGAIN)  # fmt: skip
            name_bytes, extra_bytes = LOCAL_HEADER.unpack(local)
            begins[info.filename.removeprefix(f"{root}data/")] = (
                info.header_offset + LOCAL_HEADER.size + name_bytes + extra_bytes
            )
    return begins


def _placed(path: Path, tensor: _StoredTensor, begins: Mapping[str, int]) -> TensorInfo:
    """What the rest of the program knows of a tensor: dtype, shape and where its bytes are."""
    element_bytes = DTYPE_BITS[tensor.storage.dtype] // 8
    num_elements = _extent(tensor) - tensor.offset if 0 not in tensor.shape else 0
    row_by_row = tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape)))
    same = all(n == 1 or s == r for n, s, r in zip(tensor.shape, tensor.strides, row_by_row, strict=True))
    place = Place(
        path,
        begins[tensor.storage.record] + tensor.offset * element_bytes,
        num_elements * element_bytes,
        None if same or 0 in tensor.shape else tensor.strides,
    )
    return TensorInfo(tensor.storage.dtype, tensor.shape, place)
