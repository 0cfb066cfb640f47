"""Torch's dtypes by the names that the headers of weight files use, and the dtype that a module computes in."""

import torch
from torch import nn

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What is missing here is no number that a model could compute with."""

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

FLOAT8 = {name: dtype for name, dtype in TORCH_DTYPES.items() if name.startswith("F8_")}


def float_dtype(module: nn.Module) -> torch.dtype:
    """That of a module's first parameter of floats; of a layer stored in few bits that of its bias, or else float32.

    >>> float_dtype(nn.Linear(1, 1, dtype=torch.bfloat16))
    torch.bfloat16
    """
    found = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    return next(found, torch.float32)
