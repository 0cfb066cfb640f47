"""Weights of 8 and 4 bits made floats on a GPU, by one Triton kernel for each form: all is read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

KINDS = {"int8": 0, "F8_E4M3": 1, "F8_E5M2": 2}
"""What a byte is: a whole number, or a float with so many bits of exponent and of mantissa."""

BLOCK = 2048
"""Weights of one program: 16 bytes for each of its threads to read."""


@triton.jit
def _unpack(stored, scales, output, number, PER_SCALE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < number
    byte = tl.load(stored + place, mask=inside, other=0)
    if KIND == 0:
        weight = byte.to(tl.float32)
    elif KIND == 1:  # the bits of a half-precision float that is 2^8 smaller; not every card converts them itself
        bits = byte.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        weight = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        weight = tl.where((bits & 0x7F) == 0x7F, float("nan"), weight)
    else:  # the upper half of a half-precision float
        weight = (byte.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    if PER_SCALE == 0:
        weight *= tl.load(scales).to(tl.float32)
    else:
        weight *= tl.load(scales + place // PER_SCALE, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + place, weight.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _unpack_pairs(stored, scales, table, output, number, PER_SCALE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < number
    pair = tl.load(stored + place, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + place // PER_SCALE, mask=inside, other=0.0).to(tl.float32)
    one = tl.load(table + ((pair >> 4) & 15)) * scale
    other = tl.load(table + (pair & 15)) * scale
    places = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    both = tl.reshape(tl.join(one, other), (2 * BLOCK,))
    tl.store(output + places, both.to(output.dtype.element_ty), mask=places < 2 * number)


def unpack_pairs(stored: Tensor, scale: Tensor, table: Tensor, out: Tensor) -> None:
    """As `unpack`, of bytes that are two numbers of a table each: that in the upper half comes first.

    Args:
        stored: of int8 or uint8, half as many as `out` has numbers.
        scale: as many as there are equal runs of the numbers, in float32 or bfloat16.
        table: (16,) in float32.
        out: contiguous, of float32, float16 or bfloat16.
    """
    number = stored.numel()
    with torch.cuda.device_of(out):
        _unpack_pairs[triton.cdiv(number, BLOCK // 2),](
            stored.contiguous(), scale.contiguous(), table, out, number, PER_SCALE=number // scale.numel(),
            BLOCK=BLOCK // 2, num_warps=4,
        )  # fmt: skip


def unpack(stored: Tensor, scale: Tensor, kind: int, out: Tensor) -> None:
    """Write bytes times their scales: computed in float32 and rounded once.

    Args:
        stored: of int8, as many as `out` has numbers.
        scale: one number, or as many as there are equal runs of the numbers, in float32 or bfloat16.
        kind: what a byte is, of `KINDS`.
        out: contiguous, of float32, float16 or bfloat16.
    """
    number = out.numel()
    per_scale = number // scale.numel() if scale.numel() > 1 else 0
    with torch.cuda.device_of(out):
        _unpack[triton.cdiv(number, BLOCK),](
            stored.contiguous(), scale.contiguous(), out, number, PER_SCALE=per_scale, KIND=kind, BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
