"""The formats of weight files, read from their headers alone: safetensors, the zip form of `.pth`, GGUF.

Nothing in a file is executed, and no header can make a reader use more memory than it is long. Offsets, sizes and
shapes are checked against the file, so that a download cut short is found here and not in the middle of loading.
A header says where each tensor lies: reading one is one `seek` and one `readinto`, whatever the format.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from wangen.generator.errors import WangenError

WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".gguf")
"""How people's files of weights end; a folder is not called so."""

DOWNLOAD_AGAIN = "download or copy the file again"
MAX_DIMS = 64  # what PyTorch can index
MAX_SIZE = 2**63 - 1
MAX_NAME_CHARACTERS = 1000

# Bits per element, under the names that safetensors uses.
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
WHOLE = ("I8", "I16", "I32", "I64", "U8", "BOOL")
"""Dtypes that no weight is stored in: a quantisation that is not known here uses them."""

Shapes = Mapping[str, tuple[int, ...]]
"""A tensor's name -> its shape."""


@dataclass(frozen=True)
class Place:
    """Where the bytes of a tensor lie.

    Attributes:
        file: the file, which is one shard of a sharded checkpoint.
        offset: of its first byte, from the beginning of the file.
        num_bytes: how many they are.
        strides: in elements, where the tensor is not stored row by row (only in `.pth`).
    """

    file: Path
    offset: int
    num_bytes: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor.

    Attributes:
        dtype: the safetensors name (`F32`, `BF16`, …) whatever the format, or the GGUF name of a block-quantised type
            (`Q4_K`).
        shape: the sizes in elements, outermost first; empty for a scalar.
        place: where its bytes are; None only for a header that was made up.
    """

    dtype: str
    shape: tuple[int, ...]
    place: Place | None = field(default=None, compare=False, repr=False)

    @property
    def file(self) -> str:
        """The file's name for messages; empty where there is none."""
        return str(self.place.file) if self.place else ""


@dataclass(frozen=True)
class Header:
    """All that is known of a weight file without reading its weights.

    Attributes:
        tensors: the tensors by name, of all shards when the file is sharded.
        metadata: the free text fields of safetensors and the scalar fields of GGUF; empty for `.pth`.
        format: how the file is written.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    format: Literal["safetensors", "pth", "gguf"]


def rows(info: TensorInfo, begin: int, end: int) -> TensorInfo:
    """Some rows of a tensor, as if they were a tensor of their own.

    >>> place = Place(Path("a.safetensors"), 100, 24)
    >>> rows(TensorInfo("F32", (3, 2), place), 1, 3)
    TensorInfo(dtype='F32', shape=(2, 2))
    """
    shape = (end - begin, *info.shape[1:])
    if info.place is None:
        return TensorInfo(info.dtype, shape)
    if info.place.strides is not None:
        raise WangenError("a tensor that is not stored row by row cannot be taken apart", where=str(info.place.file))
    row_bytes = info.place.num_bytes // max(1, info.shape[0])
    place = Place(info.place.file, info.place.offset + begin * row_bytes, (end - begin) * row_bytes)
    return TensorInfo(info.dtype, shape, place)


def check_name(path: Path, name: str) -> None:
    """Refuse a name that no program gives: one that could not be shown in a message.

    Raises:
        WangenError: control characters, halves of characters, or more than `MAX_NAME_CHARACTERS`.
    """
    if not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
        raise WangenError(f"{quoted(name)} is not a name that programs give", where=str(path), cure=DOWNLOAD_AGAIN)


def quoted(text: str) -> str:
    r"""Text from a file as a message may show it: on one line, and short.

    >>> print(quoted("head\x1b"), quoted("a" * 100)[-5:])
    'head\x1b' aaa …
    """
    return repr(text) if len(text) <= 80 else repr(text[:80])[:-1] + " …"


def truncated(path: Path, *, expected: str, found: int) -> WangenError:
    """The error of a file that is shorter than its header says."""
    return WangenError(f"the file is cut short: {expected} bytes expected, {found} found", where=str(path),
                       cure=DOWNLOAD_AGAIN)  # fmt: skip
