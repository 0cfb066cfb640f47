"""Weights that stay as small in memory as they are in the file: 8-bit floats and GGUF's blocks.

A quantised layer holds the stored bytes and makes its weight anew in each forward pass, in the dtype of its input.
What is computed is `x @ dequantise(W).T`, never a product in 8 bits: the numbers are those of the dequantised model.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from wangen.generator.companions import Contents
from wangen.generator.errors import WangenError
from wangen.generator.formats import DTYPE_BITS, Header, TensorInfo
from wangen.generator.formats.gguf import BLOCKS
from wangen.generator.formats.raw import read_raw
from wangen.generator.formats.strict_json import parse_json
from wangen.runtime.dtypes import FLOAT8
from wangen.runtime.weights.reading import read_bytes, read_tensor
from wangen.runtime.weights.unpacking import unpacked

OTHER_TYPE = "get the file in another quantisation, or in fp16"

QUANTISATION = "_quantization_metadata"
"""The field of the metadata in which ComfyUI says how each layer is stored."""
COMFY_FORMATS = ("float8_e4m3fn", "float8_e5m2")
COMFY_KEYS = {"format", "full_precision_matrix_mult"}
"""What ComfyUI says of a layer, where that is 8-bit floats with a scale and nothing else."""


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
            stored: bytes as int8, of the whole weight or of some rows.
            scale: of 8-bit floats: one number, one per row (rows, 1), or one per block of a row (rows, blocks, 1).
            dtype: of the result.
        """
        if self.dtype not in FLOAT8:
            return self._shaped(_decode_gguf(self.dtype, stored)).to(dtype)
        weight = self._shaped(stored.view(FLOAT8[self.dtype]))
        if scale is None:
            return weight.to(dtype)
        out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        if unpacked(stored, scale, self.dtype, out):
            return out
        if scale.ndim == 3:
            rows, blocks = scale.shape[:2]
            return (weight.float().reshape(rows, blocks, -1) * scale).reshape(weight.shape).to(dtype)
        return (weight.float() * scale).to(dtype)

    def _shaped(self, numbers: torch.Tensor) -> torch.Tensor:
        """As many rows as there are numbers for: a part of the weight is decoded like the whole."""
        return numbers.reshape(-1, *self.shape[1:]) if self.shape else numbers.reshape(())


def is_quantized(info: TensorInfo) -> bool:
    """Whether a tensor is stored in 8-bit floats or in one of GGUF's types of blocks."""
    return info.dtype in FLOAT8 or info.dtype not in DTYPE_BITS


def read_coded(info: TensorInfo, device: torch.device | str) -> tuple[torch.Tensor, Coding]:
    """The stored bytes of a quantised matrix as int8, (rows, bytes per row), and how to decode them.

    Raises:
        WangenError: a type that cannot be decoded, rows that are no whole blocks, or the file cannot be read.
    """
    rows, columns = info.shape
    if info.dtype not in FLOAT8:
        block_size, _ = _block(info.dtype, info.file)
        if columns % block_size:
            raise WangenError(f"a weight of {info.shape} whose rows are no whole blocks of {info.dtype}",
                              where=info.file, cure=OTHER_TYPE)  # fmt: skip
    return read_bytes(info, device).view(torch.int8).reshape(rows, -1), Coding(info.dtype, info.shape)


def read_weight(
    info: TensorInfo,
    scale: TensorInfo | None,
    dtype: torch.dtype | None,
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
    if info.dtype not in FLOAT8:
        _block(info.dtype, info.file)
    factor = read_scale(info, scale, device)
    if torch.device(device).type == "meta":
        return torch.empty(info.shape, dtype=dtype, device=device)
    stored = read_bytes(info, device).view(torch.int8)
    return Coding(info.dtype, info.shape).decode(stored, factor, dtype)


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
    if value.numel() == rows == value.shape[0]:
        return value.reshape(rows, *[1] * (len(weight.shape) - 1))
    per_block = value.ndim == 3 and len(weight.shape) == 2 and value.shape[::2] == (rows, 1)
    if per_block and value.shape[1] and weight.shape[1] % value.shape[1] == 0:
        return value
    raise WangenError(f"a scale of shape {tuple(value.shape)} fits no weight of shape {weight.shape}",
                      where=scale.file, cure=OTHER_TYPE)  # fmt: skip


def refuse_other_forms(path: Path, header: Header, contents: Contents) -> None:
    """Refuse a file whose 8-bit weights mean something else than `scale * stored`, or whose scales have no weight.

    Raises:
        WangenError: which form it is.
    """
    for weight, companions in contents.companions.items():
        info = contents.weights.get(weight)
        if "scale" in companions and (info is None or info.dtype not in FLOAT8):
            found = f"a scale for {weight}, which " + ("is not there" if info is None else f"is stored as {info.dtype}")
            raise WangenError(found, where=str(path), cure=OTHER_TYPE)
        if "second_scale" in companions:
            raise WangenError(f"{weight} has two scales, which is not read", where=str(path), cure=OTHER_TYPE)
        if "format" in companions:
            _require_float8(path, _parsed(read_raw(companions["format"])))
    try:
        layers = parse_json(header.metadata.get(QUANTISATION, "{}").encode()).get("layers", {})
        forms = list(layers.values())
    except (ValueError, AttributeError) as error:
        raise WangenError("the metadata say that it is quantised, but not how", where=str(path),
                          cure=OTHER_TYPE) from error  # fmt: skip
    for form in forms:
        _require_float8(path, form)


def _parsed(text: bytes) -> Any:
    """What a JSON text says, or the beginning of a text that is none."""
    try:
        return parse_json(text)
    except ValueError:
        return text[:80]


def _require_float8(path: Path, form: Any) -> None:
    """Refuse a description of ComfyUI's that says more than 8-bit floats with a scale."""
    described = isinstance(form, dict) and form.get("format") in COMFY_FORMATS
    if not described or any(form[key] for key in form.keys() - COMFY_KEYS):
        raise WangenError(f"weights quantised as {form}, which is not read here", where=str(path), cure=OTHER_TYPE)


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as 8-bit floats with one scale per row: (rows, columns) float8_e4m3fn and (rows, 1) float32.

    >>> stored, scale = to_fp8(torch.tensor([[448.0, 1.0], [0.0, 0.0]]))
    >>> scale.tolist(), (stored.float() * scale).tolist()
    ([[1.0], [1.0]], [[448.0, 1.0], [0.0, 0.0]])
    """
    largest = weight.abs().amax(dim=1, keepdim=True).float()
    scale = torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale


class DequantizingLinear(nn.Linear):
    """A frozen linear layer whose weight is made anew when it is used, in the backward pass once more, and never kept.

    Args:
        base: the layer that it stands for; its bias and its weight are the subclass's to take over.
    """

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)  # Linear's own would make a weight of the full size
        self.in_features, self.out_features = base.in_features, base.out_features

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight (out_features, in_features) in a float dtype, each number rounded once."""
        raise NotImplementedError

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(…, in_features) -> (…, out_features) in the input's dtype, or in autocast's."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        output: torch.Tensor = _Product.apply(input, self)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _Product(torch.autograd.Function):
    """`input @ weight.T` that keeps the layer for the backward pass, and no tensor of it.

    So the numbers may be elsewhere in between, as block swap has it.
    """

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, layer: DequantizingLinear) -> Any:
        ctx.layer = layer
        return nn.functional.linear(input, layer.dequantized(input.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return gradient @ ctx.layer.dequantized(gradient.dtype), None


class QuantizedLinear(DequantizingLinear):
    """A linear layer that holds its weight as the file does.

    The bytes are kept as int8: transformers and diffusers cast activations to the dtype of some weights, and int8 is
    the one that they leave alone. The scale is kept as int32, so that no cast of the model rounds it.
    """

    scale: torch.Tensor | None

    def __init__(self, base: nn.Linear, stored: torch.Tensor, coding: Coding, scale: torch.Tensor | None) -> None:
        super().__init__(base)
        self.coding = coding
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.register_buffer("scale", None if scale is None else scale.view(torch.int32))
        self.bias = base.bias

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """As `DequantizingLinear`."""
        return self.coding.decode(self.weight, _as_float(self.scale), dtype)


def _as_float(scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale is None else scale.view(torch.float32)


class QuantizedEmbedding(nn.Module):
    """An embedding of which only the rows that are asked for are dequantised."""

    scale: torch.Tensor | None

    def __init__(self, stored: torch.Tensor, coding: Coding, scale: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.coding = coding
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.register_buffer("scale", None if scale is None else scale.view(torch.int32))
        self.dtype = dtype

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(…) ids -> (…, embedding_dim)."""
        ids = input.reshape(-1)
        scale = self.scale if self.scale is None or not self.scale.ndim else self.scale[ids]
        rows = self.coding.decode(self.weight[ids], _as_float(scale), self.dtype)
        return rows.reshape(*input.shape, -1)


def stored_layer(
    layer: nn.Linear | nn.Embedding,
    info: TensorInfo,
    scale: TensorInfo | None,
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> QuantizedLinear | QuantizedEmbedding:
    """The counterpart of a layer whose weight is stored quantised, and stays so.

    Args:
        layer: of the model that is filled.
        info: its weight in the file, for which `is_quantized` holds.
        scale: what accompanies it.
        dtype: what an embedding returns (None: bfloat16).
        device: where the bytes go.

    Raises:
        WangenError: as `read_coded` and `read_scale`.
    """
    stored, coding = read_coded(info, device)
    factor = read_scale(info, scale, device)
    if isinstance(layer, nn.Embedding):
        return QuantizedEmbedding(stored, coding, factor, dtype or torch.bfloat16)
    return QuantizedLinear(layer, stored, coding, factor)


def fp8_layer(layer: nn.Linear, info: TensorInfo, device: torch.device | str) -> QuantizedLinear:
    """The counterpart of a linear layer whose weight becomes 8-bit floats with a scale per row while it is read.

    Raises:
        WangenError: it cannot be read.
    """
    stored, scale = to_fp8(read_tensor(info, None, device))
    return QuantizedLinear(layer, stored.view(torch.int8), Coding("F8_E4M3", info.shape), scale)


def _gguf_type(dtype: str, file: str = "") -> Any:
    """GGUF's own name of a type that can be decoded. The library is imported here, since few files need it."""
    from diffusers.quantizers.gguf.utils import dequantize_functions

    for kind in dequantize_functions:
        if kind.name == dtype:
            return kind
    known = ", ".join(sorted(kind.name for kind in dequantize_functions))
    raise WangenError(
        f"weights of the GGUF type {dtype} cannot be decoded here", where=file, cure=f"get one of {known}"
    )


def _block(dtype: str, file: str = "") -> tuple[int, int]:
    """How many numbers and how many bytes a block of a GGUF type has; `file` is for the message.

    Raises:
        WangenError: a type that cannot be decoded.
    """
    return BLOCKS[_gguf_type(dtype, file).name]


def _decode_gguf(dtype: str, stored: torch.Tensor) -> torch.Tensor:
    """Bytes as int8 -> float32, flat."""
    from diffusers.quantizers.gguf.utils import dequantize_functions

    block_size, block_bytes = _block(dtype)
    blocks = stored.view(torch.uint8).reshape(-1, block_bytes)
    with contextlib.nullcontext() if torch.compiler.is_compiling() else _ConstantsOnce():
        numbers: torch.Tensor = dequantize_functions[_gguf_type(dtype)](blocks, block_size, block_bytes, torch.float32)
    return numbers.reshape(-1)


class _ConstantsOnce(TorchFunctionMode):
    """Makes a constant once for each device. diffusers' decoders make theirs in each call, and wait for the GPU."""

    _made: ClassVar[dict[tuple[str, str], torch.Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.tensor:
            return func(*args, **kwargs)
        key = repr(args), repr(sorted(kwargs.items()))
        if key not in self._made:
            self._made[key] = func(*args, **kwargs)
        return self._made[key]
