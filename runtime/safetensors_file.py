"""The one writer of safetensors files: same content, same bytes; and a file is whole or absent.

The library writes its metadata in an order that changes from process to process; LoRAs, checkpoints and cache entries
are compared by their bytes, so all of them are written here.
"""

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wangen.generator.errors import UsageError, WangenError, bytes_text
from wangen.generator.files import write_whole
from wangen.generator.kinds import Facts, examine
from wangen.runtime.dtypes import DTYPE_NAMES


@dataclass(frozen=True)
class Later:
    """A tensor that is made when its turn to be written comes, so that a file may be larger than the memory.

    Attributes:
        dtype: of what `make` returns.
        shape: of what `make` returns.
        make: called once for each writing.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """What it takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


Tensors = Mapping[str, torch.Tensor] | Mapping[str, Later] | Mapping[str, torch.Tensor | Later]


def write(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file so that a crash leaves the old file or the new one, never half of one.

    Args:
        path: the file to make or replace; its folder must exist.
        tensors: what to store, on any device and with any strides, or how to make it.
        metadata: free text fields.

    Raises:
        WangenError: a dtype that the format lacks, or the disk refused (full, no right to write, no such folder).
    """
    try:
        write_whole(Path(path), serialize(tensors, metadata))
    except OSError as error:
        raise WangenError(
            f"cannot write: {error.strerror or error}",
            where=str(path),
            cure="check the free space and the right to write in this folder",
        ) from error


def write_if_other(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """As `write`, but a file that holds just these bytes keeps its time stamp; it is read as far as it does."""
    if path.is_file():
        with path.open("rb") as file:
            same = all(file.read(len(chunk)) == bytes(chunk) for chunk in serialize(tensors, metadata))
            if same and not file.read(1):
                return
    write(path, tensors, metadata)


def serialize(tensors: Tensors, metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: the header first, then the tensors, made and handed out one by one.

    Larger elements come first, then the order of names, so that every tensor is aligned to its own element; within
    one dtype that is the order of names.

    Raises:
        WangenError: a dtype that the format lacks, or a name or metadata value that is no text.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {}
    position = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in DTYPE_NAMES:
            raise WangenError(f"{name} is {tensor.dtype}, which safetensors files cannot hold here")
        if name == "__metadata__":
            raise WangenError("a tensor cannot be called __metadata__")
        end = position + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()):
        raise WangenError("the metadata of a safetensors file must be text")
    if metadata:
        header["__metadata__"] = dict(metadata)
    return _chunks(header, [tensors[name] for name in names])


def require_space(path: Path, num_bytes: int) -> None:
    """See that a file of this size fits on the disk beside what is there.

    Raises:
        WangenError: it does not.
    """
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes:
        raise WangenError(
            f"the new file takes {bytes_text(num_bytes)} and {bytes_text(free)} are free",
            where=str(path.parent),
            cure="free space or give another --save_path",
        )


def require_free(path: Path, read: Iterable[Path], ours: Callable[[Facts], bool], overwrite: bool) -> None:
    """See that a file may be written: nothing is there, or what the same command makes.

    Args:
        path: the file.
        read: files that must stay whatever is said.
        ours: whether a weight file that is there is of the kind that is made.
        overwrite: any other file may be replaced, too.

    Raises:
        UsageError: it may not.
    """
    if not path.exists():
        return
    if any(file.exists() and path.samefile(file) for file in read):
        raise UsageError("--save_path is the file that is read", where=str(path), cure="give another --save_path")
    if path.is_dir():
        raise UsageError("a folder has the name of the file to write", where=str(path), cure="give another --save_path")
    if overwrite:
        return
    try:
        facts = examine(path)
    except WangenError:
        words = "a file of another kind"
    else:
        if ours(facts):
            return
        words = facts.words
    raise UsageError(f"{words} is there and would be replaced", where=str(path),
                     cure="give another --save_path, or --overwrite as well")  # fmt: skip


def _chunks(header: Mapping[str, Any], tensors: Iterable[torch.Tensor | Later]) -> Iterator[bytes | memoryview]:
    text = json.dumps(header, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants its data to begin at a multiple of eight
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors:
        yield _bytes_of(tensor)
        if isinstance(tensor, Later):
            yield b""  # the caller lets go of this tensor before the next one is made


def _bytes_of(tensor: torch.Tensor | Later) -> memoryview:
    made = tensor.make() if isinstance(tensor, Later) else tensor
    assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape), "made otherwise than announced"
    flat = made.detach().to("cpu").contiguous().reshape(-1)
    content: memoryview = flat.view(torch.uint8).numpy().data
    return content
