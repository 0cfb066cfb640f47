"""Norms, rotations and gates on a GPU: one Triton kernel each, in place of up to a dozen of PyTorch's.

They read and write each tensor once, compute in float32 and round once, as the functions of `dit_norms` that call
them. A kernel runs on the current device: each call makes that the tensors' own.

Letters in shapes: T tokens of all items, N tokens of one, D width of the model, W width of a norm: D, or the channels
of a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 2048
"""Of narrow norms so many numbers make a program: one of 128 would be done before it is started."""


@triton.jit
def _layer_norm(tokens, weight, bias, output, means, reciprocals, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(tokens + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / width
    centred = tl.where(inside, x - mean, 0.0)
    reciprocal = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * width + columns, centred * reciprocal * scale + shift, mask=inside)
    tl.store(means + row, mean)
    tl.store(reciprocals + row, reciprocal)


@triton.jit
def _layer_norm_back(gradient, tokens, means, reciprocals, weight, output, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(tokens + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    slope *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    reciprocal = tl.load(reciprocals + row)
    normed = tl.where(inside, (x - tl.load(means + row)) * reciprocal, 0.0)
    level = tl.sum(slope, 0) / width
    along = tl.sum(slope * normed, 0) / width
    tl.store(output + row * width + columns, (slope - level - normed * along) * reciprocal, mask=inside)


@triton.jit
def _turned(channels, angles, width, pairs, sign, PARTS: tl.constexpr, HALF: tl.constexpr):
    """Pairs of neighbours turned by a position's angles, given as cosines and sines in turn; back if the sign is -1."""
    pair = tl.arange(0, HALF)
    inside = pair < width // 2
    cosine = tl.load(angles + pair % pairs * 2, mask=inside, other=0.0)[None, :]
    sine = tl.load(angles + pair % pairs * 2 + 1, mask=inside, other=0.0)[None, :] * sign
    one, other = tl.split(tl.reshape(channels, (PARTS, HALF, 2)))
    return tl.reshape(tl.join(one * cosine - other * sine, one * sine + other * cosine), (PARTS, 2 * HALF))


@triton.jit
def _rms_rotary(
    inputs, weight, table, output, reciprocals, width, parts, weights, stride, period, pairs, eps,
    ROTATES: tl.constexpr, PARTS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    columns = tl.arange(0, 2 * HALF)[None, :]
    place, inside = part[:, None] * width + columns, (part[:, None] < parts) & (columns < width)
    x = tl.load(inputs + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    reciprocal = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    scale = tl.load(weight + (part[:, None] % weights) * width + columns, mask=inside, other=0.0).to(tl.float32)
    y = x * reciprocal[:, None] * scale
    if ROTATES:
        y = _turned(y, table + (row % period) * pairs * 2, width, pairs, 1.0, PARTS, HALF)
    tl.store(output + row * parts * width + place, y, mask=inside)
    tl.store(reciprocals + row * parts + part, reciprocal, mask=part < parts)


@triton.jit
def _rms_rotary_back(
    gradient, inputs, reciprocals, weight, table, output, width, parts, weights, stride, period, pairs,
    ROTATES: tl.constexpr, PARTS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    columns = tl.arange(0, 2 * HALF)[None, :]
    place, inside = part[:, None] * width + columns, (part[:, None] < parts) & (columns < width)
    slope = tl.load(gradient + row * parts * width + place, mask=inside, other=0.0).to(tl.float32)
    if ROTATES:
        slope = _turned(slope, table + (row % period) * pairs * 2, width, pairs, -1.0, PARTS, HALF)
    slope *= tl.load(weight + (part[:, None] % weights) * width + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(inputs + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    reciprocal = tl.load(reciprocals + row * parts + part, mask=part < parts, other=0.0)
    along = tl.sum(slope * x, 1) * reciprocal * reciprocal * reciprocal / width
    y = slope * reciprocal[:, None] - x * along[:, None]
    tl.store(output + row * parts * width + place, y, mask=inside)


@triton.jit
def _gated(residual, branch, gate, output, width, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    y = tl.load(branch + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    y *= tl.load(gate + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        y += tl.load(residual + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * width + columns, y, mask=inside)


def layer_norm(tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(T, D), weight and bias (D,) -> (T, D) in the tokens' dtype; means and reciprocal deviations, (T, 1) each."""
    rows, width = tokens.shape
    tokens, weight, bias = tokens.contiguous(), weight.contiguous(), bias.contiguous()
    output = torch.empty_like(tokens)
    means, reciprocals = tokens.new_empty(2, rows, 1, dtype=torch.float32)
    block = _power_of_2(width)
    with torch.cuda.device_of(tokens):
        _layer_norm[rows,](tokens, weight, bias, output, means, reciprocals, width, eps, BLOCK=block, **_warps(block))
    return output, means, reciprocals


def layer_norm_back(gradient: Tensor, tokens: Tensor, means: Tensor, reciprocals: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the tokens (T, D) that `layer_norm` took."""
    rows, width = tokens.shape
    gradient, tokens, weight = gradient.contiguous(), tokens.contiguous(), weight.contiguous()
    output, block = torch.empty_like(tokens), _power_of_2(width)
    with torch.cuda.device_of(tokens):
        _layer_norm_back[rows,](
            gradient, tokens, means, reciprocals, weight, output, width, BLOCK=block, **_warps(block)
        )
    return output


def rms_rotary(inputs: Tensor, weight: Tensor, table: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """As `dit_norms.rms_rotary`."""
    inputs, weight = _rows(inputs), weight.contiguous()
    grid, parts, numbers, tile = _sizes(inputs, weight, table)
    output = inputs.new_empty(inputs.shape)
    reciprocals = inputs.new_empty((len(inputs), parts, 1), dtype=torch.float32)
    with torch.cuda.device_of(inputs):
        _rms_rotary[grid](
            inputs, weight, _real(table, inputs), output, reciprocals, *numbers, eps, ROTATES=table is not None, **tile
        )
    return output, reciprocals


def rms_rotary_back(
    gradient: Tensor, inputs: Tensor, reciprocals: Tensor, weight: Tensor, table: Tensor | None
) -> Tensor:
    """As `dit_norms.rms_rotary_back`."""
    inputs, weight = _rows(inputs), weight.contiguous()
    grid, _, numbers, tile = _sizes(inputs, weight, table)
    output = inputs.new_empty(inputs.shape)
    with torch.cuda.device_of(inputs):
        _rms_rotary_back[grid](
            gradient.contiguous(), inputs, reciprocals, weight, _real(table, inputs), output, *numbers,
            ROTATES=table is not None, **tile,
        )  # fmt: skip
    return output


def gated(residual: Tensor | None, branch: Tensor, gate: Tensor, output: Tensor) -> None:
    """Write gate (D,) times branch (T, D), plus the residual (T, D) if there is one, to a contiguous output."""
    rows, width = branch.shape
    block = min(1024, _power_of_2(width))
    grid = rows, triton.cdiv(width, block)
    adds = residual is not None
    first = branch if residual is None else residual.contiguous()
    with torch.cuda.device_of(branch):
        _gated[grid](first, branch.contiguous(), gate.contiguous(), output, width, ADDS=adds, BLOCK=block, num_warps=4)


def _rows(inputs: Tensor) -> Tensor:
    """The same numbers, each row without gaps; rows may be apart."""
    return inputs if inputs.stride(1) == 1 else inputs.contiguous()


def _sizes(
    inputs: Tensor, weight: Tensor, table: Tensor | None
) -> tuple[tuple[int, int], int, tuple[int, ...], dict[str, int]]:
    """The programs, parts of a row with a norm each, the kernels' numbers, and what a program looks at: one part, or
    several narrow ones, such as heads, in one row.
    """
    width = weight.shape[-1]
    parts, columns = inputs.shape[1] // width, _power_of_2(width)
    period, pairs = (1, 1) if table is None else table.shape
    numbers = (width, parts, weight.numel() // width, inputs.stride(0), period, pairs)
    together = max(1, min(_power_of_2(parts), NUMBERS // columns))
    grid = len(inputs), triton.cdiv(parts, together)
    return grid, parts, numbers, {"PARTS": together, "HALF": columns // 2, **_warps(together * columns)}


def _real(table: Tensor | None, inputs: Tensor) -> Tensor:
    """Cosines and sines in turn, (N, channels of a head); something else that is not read where there is no table."""
    return inputs if table is None else torch.view_as_real(table).flatten(1).contiguous()


def _power_of_2(width: int) -> int:
    """The least that is not smaller, and at least 2."""
    power: int = triton.next_power_of_2(max(2, width))
    return power


def _warps(block: int) -> dict[str, int]:
    """512 columns for each group of 32 threads."""
    return {"num_warps": max(1, min(16, block // 512))}
