"""Tensors of weight files into memory: one seek and one pass each, whatever the format, and never a second copy.

A header says where the bytes of a tensor lie. They are read straight into the tensor that stays; where dtype or
device change, through a buffer of a few mebibytes. Nothing is left mapped, nothing is unpickled.
"""

import threading
from pathlib import Path
from typing import BinaryIO

import torch

from wangen.generator.errors import WangenError, unreadable
from wangen.generator.formats import DOWNLOAD_AGAIN, Place, TensorInfo
from wangen.runtime.dtypes import TORCH_DTYPES

BUFFER_BYTES = 16 * 2**20
_OF_THREAD = threading.local()


def read_tensor(info: TensorInfo, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
    """One tensor of a file.

    Args:
        info: from a header that was read from the file.
        dtype: None keeps what is stored.
        device: where it goes; `meta` reads nothing.

    Raises:
        WangenError: the file is shorter than its header said, cannot be read, or stores no plain numbers.
    """
    place = _place(info)
    stored = TORCH_DTYPES.get(info.dtype)
    if stored is None:
        raise WangenError(f"weights stored as {info.dtype} cannot be read here", where=str(place.file),
                          cure="get the file in fp16, bf16, fp8 or one of GGUF's usual types")  # fmt: skip
    wanted, device = dtype or stored, torch.device(device)
    if device.type == "meta":
        return torch.empty(info.shape, dtype=wanted, device=device)
    if place.strides is not None:
        flat = torch.empty(place.num_bytes // stored.itemsize, dtype=wanted, device=device)
        _read_into(place, stored, flat)
        return flat.as_strided(info.shape, place.strides).contiguous()
    tensor = torch.empty(info.shape, dtype=wanted, device=device)
    _read_into(place, stored, tensor.view(-1))
    return tensor


def read_bytes(info: TensorInfo, device: torch.device | str = "cpu") -> torch.Tensor:
    """The stored bytes of one tensor, (num_bytes,) uint8, row by row.

    Raises:
        WangenError: as `read_tensor`.
    """
    place = _place(info)
    if place.strides is not None:  # plain numbers, for nothing else has strides
        return read_tensor(info, None, device).view(-1).view(torch.uint8)
    flat = torch.empty(place.num_bytes, dtype=torch.uint8, device=device)
    if flat.device.type != "meta":
        _read_into(place, torch.uint8, flat)
    return flat


def _place(info: TensorInfo) -> Place:
    assert info.place is not None, "a header that was made up has nothing to read"
    return info.place


def _read_into(place: Place, stored: torch.dtype, flat: torch.Tensor) -> None:
    """Fill a flat tensor of any dtype on any device with what is stored."""
    try:
        with place.file.open("rb", buffering=0) as file:
            file.seek(place.offset)
            if flat.dtype == stored and flat.device.type == "cpu":
                _fill(place.file, file, flat)
                return
            buffer = _buffer().view(stored)
            for begin in range(0, flat.numel(), len(buffer)):
                part = buffer[: flat.numel() - begin]
                _fill(place.file, file, part)
                flat[begin : begin + part.numel()].copy_(part)
    except OSError as error:
        raise unreadable(place.file, error) from error


def _buffer() -> torch.Tensor:
    """The buffer of this thread, (BUFFER_BYTES,) uint8. It is kept: one per tensor would leave holes in the heap."""
    if len(getattr(_OF_THREAD, "buffer", ())) != BUFFER_BYTES:
        _OF_THREAD.buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
    buffer: torch.Tensor = _OF_THREAD.buffer
    return buffer


def _fill(path: Path, file: BinaryIO, flat: torch.Tensor) -> None:
    """Read as many bytes as a flat tensor on the CPU has."""
    rest = flat.view(torch.uint8).numpy().data
    while len(rest):
        count = file.readinto(rest[: 2**30])  # type: ignore[attr-defined]  # a raw file has it
        if not count:
            raise WangenError(f"the file ends {len(rest)} bytes early", where=str(path), cure=DOWNLOAD_AGAIN)
        rest = rest[count:]
