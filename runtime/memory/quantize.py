"""The frozen base in 8 or 4 bits: blocks of 64 weights of one row share a scale.

What is computed is `x @ dequantise(W).T`, in the forward pass and once more in the backward pass, never a product in
few bits: the only error is the rounding of the weights, and adapters get the exact gradient of that model.

| form | bytes per weight | stored | error of a weight, of rms, normally distributed weights |
|---|---|---|---|
| fp8 | 1.031 | float8 e4m3 x scale | 2.6 % |
| int8 | 1.031 | -127 … 127 x scale | 0.6 % |
| nf4 | 0.531 | one of 16 quantiles of the normal distribution x scale | 9.1 % |

The scale is a bfloat16. Products of it with an 8-bit number are exact in float32, so a dequantised weight is rounded
once, to the dtype that is asked for.
"""

import math
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from wangen.generator.errors import WangenError
from wangen.runtime.memory.blocks import blocks_of, in_a_block
from wangen.runtime.weights.quantized import Coding, DequantizingLinear, QuantizedLinear
from wangen.runtime.weights.unpacking import INTEGER, unpacked, unpacked_pairs

Mode = Literal["fp8", "int8", "nf4"]
BLOCK = 64
"""Weights that share a scale, where a row has a multiple of them; else the largest power of two that divides it."""

FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
INT8_MAX = 127
CHUNK = 1 << 22
"""Weights that are worked on at once where that needs temporaries in float32."""

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The numbers of 4-bit NormalFloat: QLoRA (Dettmers et al. 2023), appendix E."""


class Packed(NamedTuple):
    """A quantised matrix.

    Attributes:
        numbers: int8 or uint8, (rows, bytes per row).
        scale: (rows, blocks per row), bfloat16.
    """

    numbers: torch.Tensor
    scale: torch.Tensor


def _blocks(weight: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in float32 as (rows, blocks, block) divided by its scales, and the scales (rows, blocks).

    Args:
        weight: (rows, columns).
        largest: what the largest absolute value of a block becomes, but for the rounding of its scale.

    Raises:
        WangenError: it holds NaN or infinity.
    """
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows, -1, math.gcd(columns, BLOCK))
    scale = (blocks.abs().amax(dim=2) / largest).to(torch.bfloat16)
    if not scale.is_meta and not bool(scale.isfinite().all()):
        raise WangenError("weights of the model are NaN or infinite; the file is damaged", cure="download it again")
    scale = scale.clamp_min(torch.finfo(torch.bfloat16).tiny)  # of a block of zeros: nothing is divided by 0
    return blocks / scale.float()[..., None], scale


def _pack_fp8(weight: torch.Tensor) -> Packed:
    numbers, scale = _blocks(weight, FLOAT8_MAX)
    return Packed(numbers.reshape(weight.shape).to(torch.float8_e4m3fn).view(torch.int8), scale)


def _pack_int8(weight: torch.Tensor) -> Packed:
    numbers, scale = _blocks(weight, INT8_MAX)
    return Packed(numbers.reshape(weight.shape).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale)


def _pack_nf4(weight: torch.Tensor) -> Packed:
    numbers, scale = _blocks(weight, 1.0)
    table = _nf4_numbers(weight.device)
    nearest = torch.bucketize(numbers.reshape(weight.shape), (table[1:] + table[:-1]) / 2, out_int32=True)
    nearest = nearest.to(torch.uint8)
    return Packed((nearest[:, ::2] << 4) | nearest[:, 1::2], scale)  # as bitsandbytes: the first in the high half


def _unpack_fp8(packed: Packed, out: torch.Tensor) -> None:
    if not unpacked(packed.numbers, packed.scale, "F8_E4M3", out):
        _scale(packed.numbers.view(torch.float8_e4m3fn), packed.scale, out)


def _unpack_int8(packed: Packed, out: torch.Tensor) -> None:
    if not unpacked(packed.numbers, packed.scale, INTEGER, out):
        _scale(packed.numbers, packed.scale, out)


def _scale(numbers: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Numbers that every dtype but float16 holds exactly, times the scale, which it holds too: rounded once."""
    exact = out if out.dtype != torch.float16 else torch.empty_like(out, dtype=torch.float32)
    exact.copy_(numbers)
    exact.view(*scale.shape, -1).mul_(scale.to(exact.dtype)[..., None])
    if exact is not out:
        out.copy_(exact)


def _unpack_nf4(packed: Packed, out: torch.Tensor) -> None:
    if unpacked_pairs(packed.numbers, packed.scale, _nf4_numbers(out.device), out):
        return
    functional = _bitsandbytes(out.device) if out.is_cuda and out.shape[1] % BLOCK == 0 else None
    if functional is not None:
        _unpack_with_bitsandbytes(functional, packed, out)
    else:
        _unpack_with_table(packed, out)


def _unpack_with_bitsandbytes(functional: Any, packed: Packed, out: torch.Tensor) -> None:
    state = functional.QuantState(
        absmax=packed.scale.float().reshape(-1), shape=out.shape, dtype=out.dtype, blocksize=BLOCK, quant_type="nf4",
        code=_nf4_numbers(out.device),
    )  # fmt: skip
    functional.dequantize_4bit(packed.numbers.reshape(-1, 1), state, out=out)


def _unpack_with_table(packed: Packed, out: torch.Tensor) -> None:
    rows, columns = out.shape
    pairs = _nf4_pairs(out.device)
    step = max(1, CHUNK // columns)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        values = pairs.index_select(0, packed.numbers[part].reshape(-1).int())
        scale = packed.scale[part].float()[..., None]
        out[part].view(*scale.shape[:2], -1).copy_(values.view(*scale.shape[:2], -1) * scale)


@cache  # one copy to a device, for which the host waits
def _nf4_numbers(device: torch.device) -> torch.Tensor:
    """`NF4` in float32."""
    return torch.tensor(NF4, device=device)


@cache
def _nf4_pairs(device: torch.device) -> torch.Tensor:
    """For each byte its two numbers: (256, 2) in float32."""
    table = _nf4_numbers(device)
    return torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)


@cache
def _bitsandbytes(device: torch.device) -> Any:
    """`bitsandbytes.functional`, whose kernel dequantises the same bytes in one pass, or None where it does not run.

    It is tried: without a library for this CUDA it is imported none the less, and fails when it is first used. On ROCm
    it is not asked: on cards with wavefronts of 64 it has no blocks as small as these.
    """
    if torch.version.hip:
        return None
    numbers = torch.arange(8 * BLOCK, device=device).to(torch.uint8).view(16, BLOCK // 2)
    packed = Packed(numbers, torch.ones(16, 1, device=device, dtype=torch.bfloat16))
    found, expected = (torch.zeros(16, BLOCK, device=device, dtype=torch.bfloat16) for _ in range(2))
    try:
        functional = import_module("bitsandbytes.functional")
        _unpack_with_bitsandbytes(functional, packed, found)
    except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError):  # each build in its own ways
        return None
    _unpack_with_table(packed, expected)
    return functional if torch.equal(found, expected) else None


class Form(NamedTuple):
    """How weights are packed and unpacked.

    Attributes:
        pack: (rows, columns) of floats -> `Packed`.
        unpack: writes the weights into a matrix of any float dtype.
        bits: per weight, with its share of the scale.
    """

    pack: Callable[[torch.Tensor], Packed]
    unpack: Callable[[Packed, torch.Tensor], None]
    bits: float


FORMS: dict[Mode, Form] = {
    "fp8": Form(_pack_fp8, _unpack_fp8, 8 + 16 / BLOCK),
    "int8": Form(_pack_int8, _unpack_int8, 8 + 16 / BLOCK),
    "nf4": Form(_pack_nf4, _unpack_nf4, 4 + 16 / BLOCK),
}


def pack(weight: torch.Tensor, mode: Mode) -> Packed:
    """A matrix in a form, some rows at a time.

    Raises:
        WangenError: it holds NaN or infinity.
    """
    step = max(1, CHUNK // weight.shape[1])
    parts = [FORMS[mode].pack(weight[first : first + step]) for first in range(0, len(weight), step)]
    return Packed(torch.cat([part.numbers for part in parts]), torch.cat([part.scale for part in parts]))


class QuantLinear(DequantizingLinear):
    """A linear layer of a block, in one of the forms or as the file has it.

    peft puts adapters around it as around any linear layer, and DoRA gets the numbers it needs. Numbers are stored as
    parameters of whole-number dtypes, which no cast of the model touches, and which block swap moves like any other.

    Attributes:
        mode: the form, or `stored` where the bytes are those of the model's file.
        coding: how those are decoded.
    """

    def __init__(
        self,
        layer: nn.Linear,
        mode: Mode | Literal["stored"],
        numbers: torch.Tensor,
        scale: torch.Tensor | None,
        coding: Coding | None = None,
    ) -> None:
        super().__init__(layer)
        self.mode, self.coding = mode, coding
        self.numbers = nn.Parameter(numbers, requires_grad=False)
        self.register_parameter("scale", None if scale is None else nn.Parameter(scale, requires_grad=False))
        self.bias = layer.bias

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight, were it plain: that of the bias."""
        return torch.bfloat16 if self.bias is None else self.bias.dtype

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Shape, dtype and device of the weight, for adapters that ask for them; its numbers are all NaN.

        Making them is `dequantized`, which takes time and memory. Writing into this one is an error.
        """
        nothing = torch.full((), math.nan, dtype=self.dtype, device=self.numbers.device)
        return nothing.expand(self.out_features, self.in_features)

    @property
    def W_q(self) -> torch.Tensor:  # noqa: N802
        """A name by which peft knows a layer whose weight it must ask for by `dequantize` (DoRA does)."""
        return self.numbers

    def dequantize(self) -> torch.Tensor:
        """The weight in its own dtype, as peft asks for it."""
        return self.dequantized(self.dtype)

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """As `DequantizingLinear`."""
        if self.mode == "stored":
            assert self.coding is not None
            scale = None if self.scale is None else self.scale.view(torch.float32)
            return self.coding.decode(self.numbers, scale, dtype)
        assert self.scale is not None
        out = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.numbers.device)
        FORMS[self.mode].unpack(Packed(self.numbers, self.scale.view(torch.bfloat16)), out)
        return out

    @torch.no_grad()
    def add_(self, change: torch.Tensor) -> None:
        """Add a matrix (out_features, in_features) to the weight for good, and round again.

        Bytes of a file become fp8.
        """
        sum_ = self.dequantized(torch.float32).add_(change.to(self.numbers.device, torch.float32))
        self.mode = "fp8" if self.mode == "stored" else self.mode
        numbers, scale = pack(sum_, self.mode)
        self.coding = None
        self.numbers = nn.Parameter(numbers, requires_grad=False)
        self.scale = nn.Parameter(scale.view(torch.int16), requires_grad=False)

    def extra_repr(self) -> str:
        """For `repr`: the sizes and the form."""
        return f"in_features={self.in_features}, out_features={self.out_features}, mode={self.mode}"


def quantized(layer: nn.Linear, mode: Mode | Literal["none"], pack_on: torch.device | None = None) -> nn.Linear:
    """The counterpart of a linear layer in a form; the layer itself where there is nothing to do.

    Bytes that come from a quantised file are kept where they are no more than the form has; with `none` always.

    Args:
        layer: with its weight; the bias is shared and stays as it is.
        mode: the form.
        pack_on: a device that packs faster than the one where the weight lies, and stays; None packs there.

    Raises:
        WangenError: the weight holds NaN or infinity.
    """
    if isinstance(layer, QuantLinear):
        return layer
    if isinstance(layer, QuantizedLinear):
        bits = layer.weight.numel() * 8 / (layer.in_features * layer.out_features)
        stored = QuantLinear(layer, "stored", layer.weight.detach(), layer.scale, layer.coding)
        if mode == "none" or bits <= FORMS[mode].bits:
            return stored
        weight = stored.dequantized(torch.float32)
    elif mode == "none":
        return layer
    else:
        weight = layer.weight.detach()
    numbers, scale = (part.to(weight.device) for part in pack(weight.to(pack_on or weight.device), mode))
    # As whole numbers, so that no cast of the model to another dtype rounds the scale.
    return QuantLinear(layer, mode, numbers, scale.view(torch.int16))


def quantize_blocks(transformer: nn.Module, mode: Mode | Literal["none"], pack_on: torch.device | None = None) -> int:
    """Replace the linear layers of a transformer's blocks by quantised ones, one at a time.

    Norms, embeddings, the text and time layers and the head stay: they are at most 3 % of a model, and rounding them
    costs more. So does the modulation where it is a table (Wan); where it is a third of a block (Qwen-Image) it is
    quantised. To quantise while loading, so that the whole model is never in memory, see `load_transformer`.

    Args:
        transformer: before adapters are added to it.
        mode: the form; `none` only takes over what the model's file stores in 8 bits or in GGUF's blocks.
        pack_on: as of `quantized`.

    Returns:
        How many layers are quantised now.

    Raises:
        WangenError: weights are NaN or infinite.
    """
    blocks = blocks_of(transformer)
    for name, layer in list(blocks.named_modules()):
        assert "lora_" not in name, "quantise before adapters are added"
        if isinstance(layer, nn.Linear):
            new = quantized(layer, mode, pack_on)
            if new is not layer:
                blocks.set_submodule(name, new)
    return sum(isinstance(layer, QuantLinear) for layer in blocks.modules())


def in_blocks(
    mode: Mode | Literal["none"], pack_on: torch.device | None = None
) -> Callable[[str, nn.Linear], nn.Linear]:
    """What `filling.fill` calls with every linear layer it has read: quantises those of the blocks."""
    return lambda name, layer: quantized(layer, mode, pack_on) if in_a_block(name) else layer
