"""Weights of 8 and 4 bits made floats on a GPU by Triton kernels of our own: PyTorch would take several passes."""

from functools import cache
from types import ModuleType

import torch

from wangen.runtime.dtypes import FLOAT8
from wangen.runtime.kernels import working

INTEGER = "int8"
"""The kind of whole numbers; that of floats is called as in a file's header."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unpacked(stored: torch.Tensor, scale: torch.Tensor, kind: str, out: torch.Tensor) -> bool:
    """Write stored numbers times their scales, computed in float32 and rounded once, if a kernel can.

    Args:
        stored: bytes as int8, as many as `out` has numbers: whole numbers or the bits of 8-bit floats, row by row.
        scale: one number, or in order those of so many equal runs of the numbers: rows, or blocks of a row.
        kind: `INTEGER`, `F8_E4M3` or `F8_E5M2`.
        out: contiguous; where they go.

    Returns:
        Whether that was done.
    """
    kernels = _kernels_for(out)
    if kernels is None or kind not in kernels.KINDS:
        return False
    kernels.unpack(stored, scale, kernels.KINDS[kind], out)
    return True


def unpacked_pairs(stored: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> bool:
    """The same of 4 bits.

    Args:
        stored: bytes as int8, half as many as `out` has numbers; of two numbers that in the upper half comes first.
        scale: in order those of so many equal runs of the numbers.
        table: the sixteen numbers, in float32.
        out: contiguous; where they go.

    Returns:
        Whether that was done.
    """
    kernels = _kernels_for(out)
    if kernels is None:
        return False
    kernels.unpack_pairs(stored, scale, table, out)
    return True


def _kernels_for(out: torch.Tensor) -> ModuleType | None:
    return _kernels_on(out.device) if out.is_cuda and out.dtype in _DTYPES else None


@cache
def _kernels_on(device: torch.device) -> ModuleType | None:
    return working("wangen.runtime.weights.unpack_kernels", device, _try, "weights of 8 and 4 bits")


def _try(kernels: ModuleType, device: torch.device) -> None:
    """Unpack every byte once, as each kind.

    Raises:
        ValueError: a number is something else than PyTorch's.
        RuntimeError, OSError ...: Triton's own, as where it finds no compiler.
    """
    stored = torch.arange(-128, 128, dtype=torch.int8).view(4, 64)
    scale = torch.tensor([1.0, 0.5, 3.0, 0.1]).to(torch.bfloat16)
    for kind, number in kernels.KINDS.items():
        out = torch.empty(4, 64, device=device)
        kernels.unpack(stored.to(device), scale.to(device), number, out)
        wide = (stored if kind == INTEGER else stored.view(FLOAT8[kind])).float()
        if not torch.equal(out.cpu().nan_to_num(7.0), (wide * scale.float()[:, None]).nan_to_num(7.0)):
            raise ValueError(f"weights stored as {kind} are wrong")
    table, both = torch.linspace(-1, 1, 16), torch.empty(4, 128, device=device)
    kernels.unpack_pairs(stored.to(device), scale.to(device), table.to(device), both)
    halves = torch.stack([stored >> 4, stored], 2).flatten(1) & 15
    if not torch.equal(both.cpu(), table[halves.int()] * scale.float()[:, None]):
        raise ValueError("weights stored in pairs are wrong")
