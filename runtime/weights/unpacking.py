"""Weights of 8 bits made floats on a GPU by a kernel of our own, where Triton runs: PyTorch takes several passes."""

from functools import cache
from types import ModuleType

import torch

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
    kernels = _kernels_on(out.device) if out.is_cuda and out.dtype in _DTYPES else None
    if kernels is None or kind not in kernels.KINDS:
        return False
    kernels.unpack(stored, scale, kernels.KINDS[kind], out)
    return True


@cache
def _kernels_on(device: torch.device) -> ModuleType | None:
    return working("wangen.runtime.weights.unpack_kernels", device, _try, "weights of 8 bits")


def _try(kernels: ModuleType, device: torch.device) -> None:
    """Unpack every byte once, as each kind.

    Raises:
        ValueError: a number is something else than PyTorch's.
        RuntimeError, OSError ...: Triton's own, as where it finds no compiler.
    """
    stored = torch.arange(-128, 128, dtype=torch.int8).view(4, 64)
    scale = torch.tensor([1.0, 0.5, 3.0, 0.1]).to(torch.bfloat16)
    floats = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
    for kind, number in kernels.KINDS.items():
        out = torch.empty(4, 64, device=device)
        kernels.unpack(stored.to(device), scale.to(device), number, out)
        wide = (stored if kind == INTEGER else stored.view(floats[kind])).float()
        if not torch.equal(out.cpu().nan_to_num(7.0), (wide * scale.float()[:, None]).nan_to_num(7.0)):
            raise ValueError(f"weights stored as {kind} are wrong")
