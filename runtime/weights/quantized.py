"""Weights that stay as small in memory as they are in the file: 8-bit floats and GGUF's blocks.

A quantised layer holds the stored bytes and makes its weight anew in each forward pass, in the dtype of its input.
What is computed is `x @ dequantise(W).T`, never a product in 8 bits: the numbers are those of the dequantised model.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wangen.generator.errors import WangenError
from wangen.generator.formats import TensorInfo
from wangen.runtime.weights.reading import TORCH_DTYPES, read_bytes, read_tensor

OTHER_TYPE = "get the file in another quantisation, or in fp16"

FP8_MAX = 448.0
"""Largest number of float8_e4m3fn."""

FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@dataclass(frozen=True)
class Coding:
    """How stored bytes become numbers.

    Attributes:
        dtype: the header's name: `F8_E4M3`, `F8_E5M2` or a GGUF type such as `Q4_K`.
        shape: of the weight, in elements.
    """

    dtype: str
    shape: tuple[int, ...]

    def decode(self, stored: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """The weight in `dtype`, computed in float32 and rounded once.

        Args:
            stored: bytes as int8, (rows, bytes per row).
            scale: of 8-bit floats: one number, one per row (rows, 1), or one per block of a row (rows, blocks, 1).
            dtype: of the result.
        """
        if self.dtype not in FLOAT8:
            return _decode_gguf(self.dtype, stored).reshape(-1, *self.shape[1:]).to(dtype)
        weight = stored.view(FLOAT8[self.dtype]).reshape(-1, *self.shape[1:])
        if scale is None:
            return weight.to(dtype)
        if scale.ndim == 3:
            rows, blocks = scale.shape[:2]
            return (weight.float().reshape(rows, blocks, -1) * scale).reshape(weight.shape).to(dtype)
        return (weight.float() * scale).to(dtype)


def is_quantized(info: TensorInfo) -> bool:
    """Whether a tensor is stored in a form that nothing can be computed with as it is."""
    return info.dtype not in TORCH_DTYPES or info.dtype in FLOAT8


def read_coded(info: TensorInfo, device: torch.device | str = "cpu") -> tuple[torch.Tensor, Coding]:
    """The stored bytes of a quantised tensor as int8, (rows, bytes per row), and how to decode them.

    Raises:
        WangenError: a type that cannot be decoded, or the file cannot be read.
    """
    if info.dtype not in FLOAT8:
        _gguf_type(info.dtype)
    rows = info.shape[0] if len(info.shape) > 1 else 1
    stored = read_bytes(info, device).view(torch.int8)
    if not rows or stored.numel() % rows:
        raise WangenError(f"a weight of {info.shape} whose rows are no whole blocks of {info.dtype}", cure=OTHER_TYPE)
    return stored.reshape(rows, -1), Coding(info.dtype, info.shape)


def read_weight(
    info: TensorInfo,
    scale: TensorInfo | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A tensor as plain numbers, dequantised where it is stored in another form.

    Args:
        info: from a header.
        scale: the scale that accompanies an 8-bit weight, from `companions.sort_out`.
        dtype: None keeps what is stored, and makes bfloat16 of what is quantised.
        device: where it goes.

    Raises:
        WangenError: it cannot be read or decoded.
    """
    if not is_quantized(info):
        return read_tensor(info, dtype, device)
    dtype = dtype or torch.bfloat16
    if torch.device(device).type == "meta":
        return torch.empty(info.shape, dtype=dtype, device=device)
    stored, coding = read_coded(info, device)
    return coding.decode(stored, read_scale(info, scale, device), dtype)


def read_scale(weight: TensorInfo, scale: TensorInfo | None, device: torch.device | str) -> torch.Tensor | None:
    """The scale of a weight in float32, shaped so that it multiplies rows or blocks of rows.

    Raises:
        WangenError: its shape fits no way of scaling this weight.
    """
    if scale is None:
        return None
    value = read_tensor(scale, torch.float32, device)
    rows = weight.shape[0] if weight.shape else 1
    if value.numel() == 1:
        return value.reshape(())
    if value.numel() == rows:
        return value.reshape(rows, *[1] * (len(weight.shape) - 1))
    per_block = value.ndim == 3 and len(weight.shape) == 2 and value.shape[::2] == (rows, 1)
    if per_block and value.shape[1] and weight.shape[1] % value.shape[1] == 0:
        return value
    raise WangenError(f"a scale of shape {tuple(value.shape)} fits no weight of shape {weight.shape}",
                      where=str(scale.place.file) if scale.place else "")  # fmt: skip


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as 8-bit floats with one scale per row: (rows, columns) float8_e4m3fn and (rows, 1) float32.

    >>> stored, scale = to_fp8(torch.tensor([[448.0, 1.0], [0.0, 0.0]]))
    >>> scale.tolist(), (stored.float() * scale).tolist()
    ([[1.0], [1.0]], [[448.0, 1.0], [0.0, 0.0]])
    """
    largest = weight.abs().amax(dim=1, keepdim=True).float()
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is dequantised when it is used.

    The bytes are kept as int8: transformers and diffusers cast activations to the dtype of some weights, and int8 is
    the one that they leave alone.
    """

    scale: torch.Tensor | None

    def __init__(self, base: nn.Linear, stored: torch.Tensor, coding: Coding, scale: torch.Tensor | None) -> None:
        nn.Module.__init__(self)  # Linear's own would make a weight of the full size
        self.in_features, self.out_features = base.in_features, base.out_features
        self.coding = coding
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = base.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(…, in_features) -> (…, out_features) in the input's dtype."""
        weight = self.coding.decode(self.weight, self.scale, input.dtype)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return nn.functional.linear(input, weight, bias)


class QuantizedEmbedding(nn.Module):
    """An embedding of which only the rows that are asked for are dequantised."""

    scale: torch.Tensor | None

    def __init__(self, stored: torch.Tensor, coding: Coding, scale: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.coding = coding
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.register_buffer("scale", scale)
        self.dtype = dtype

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(…) ids -> (…, embedding_dim)."""
        ids = input.reshape(-1)
        scale = self.scale if self.scale is None or not self.scale.ndim else self.scale[ids]
        rows = self.coding.decode(self.weight[ids], scale, self.dtype)
        return rows.reshape(*input.shape, -1)


def quantized_layer(
    layer: nn.Linear | nn.Embedding,
    stored: torch.Tensor,
    coding: Coding,
    scale: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> QuantizedLinear | QuantizedEmbedding:
    """The quantised counterpart of a layer; `dtype` is what an embedding returns (None: bfloat16)."""
    if isinstance(layer, nn.Embedding):
        return QuantizedEmbedding(stored, coding, scale, dtype or torch.bfloat16)
    return QuantizedLinear(layer, stored, coding, scale)


def _gguf_type(dtype: str) -> Any:
    """GGUF's own name of a type that can be decoded. The library is imported here, since few files need it."""
    from diffusers.quantizers.gguf.utils import dequantize_functions

    for kind in dequantize_functions:
        if kind.name == dtype:
            return kind
    known = ", ".join(sorted(kind.name for kind in dequantize_functions))
    raise WangenError(f"weights of the GGUF type {dtype} cannot be decoded here", cure=f"get one of {known}")


def _decode_gguf(dtype: str, stored: torch.Tensor) -> torch.Tensor:
    """(rows, bytes per row) int8 -> float32, flat."""
    from diffusers.quantizers.gguf.utils import dequantize_functions
    from gguf import GGML_QUANT_SIZES

    kind = _gguf_type(dtype)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = stored.view(torch.uint8).reshape(-1, block_bytes)
    numbers: torch.Tensor = dequantize_functions[kind](blocks, block_size, block_bytes, torch.float32)
    return numbers.reshape(-1)
