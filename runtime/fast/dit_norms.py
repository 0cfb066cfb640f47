"""The transformer's norms, rotations and gates with their gradients, each in few passes over its tensors.

On a GPU with Triton each is one kernel (`dit_kernels`); else PyTorch's operations. Each keeps what came in, and of its
results no more than a number for each token.

Letters in shapes: T tokens of all items, N tokens of one, D width of the model, H heads.
"""

import functools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from wangen.runtime.fast.dit_functions import cast
from wangen.runtime.kernels import working

MOST_ROWS = 4096
"""Of long clips PyTorch's operations take so many tokens at a time for norms and rotations: the copies in float32 would
be half of what a block needs."""

Moments = tuple[Tensor, Tensor]
"""Of a layer norm's tokens: means and reciprocal deviations, (T, 1) each."""


def kernels_for(tokens: Tensor) -> ModuleType | None:
    """`dit_kernels`, if they run where the tokens are."""
    return None if tokens.is_cpu or tokens.dtype == torch.float64 else kernels_on(tokens.device)


@functools.cache
def kernels_on(device: torch.device) -> ModuleType | None:
    """`dit_kernels`, if they run on a device and give what PyTorch gives."""
    return working("wangen.runtime.fast.dit_kernels", device, _try, "norms and gates")


def _try(kernels: ModuleType, device: torch.device) -> None:
    """Run each kernel once.

    Raises:
        ValueError: a norm is something else than PyTorch's, or a number is not finite.
        RuntimeError, OSError ...: Triton's own, as where it finds no compiler.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, weight = (torch.randn(shape, generator=generator).to(device) for shape in ((2, 48), (48,)))
    normed, *moments = kernels.layer_norm(tokens, weight, weight, 1e-6)
    if not torch.allclose(normed, torch.native_layer_norm(tokens, [48], weight, weight, 1e-6)[0], atol=1e-3):
        raise ValueError("a norm is wrong")
    table = torch.view_as_complex(tokens[:, :16].reshape(2, 8, 2))
    turned, roots = kernels.rms_rotary(tokens, weight, table, 1e-6)
    slopes = kernels.layer_norm_back(normed, tokens, *moments, weight)
    slopes += kernels.rms_rotary_back(turned, tokens, roots, weight, table)
    kernels.gated(tokens, slopes, weight, slopes)
    if not slopes.isfinite().all():
        raise ValueError("a number is not finite")


def layer_norm(tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Moments]:
    """(T, D), weight and bias (D,) -> (T, D) in the tokens' dtype, and the tokens' moments.

    PyTorch's kernel for CUDA refuses half-precision tokens with a weight in float32: they are made float32 for it.
    """
    kernels = kernels_for(tokens)
    if kernels is not None:
        found: tuple[Tensor, Tensor, Tensor] = kernels.layer_norm(tokens, weight, bias, eps)
        return found[0], found[1:]
    if len(tokens) <= MOST_ROWS:
        return _layer_norm(tokens, weight, bias, eps)
    normed, parts = torch.empty_like(tokens), []
    for rows, _ in _in_parts(len(tokens), None):
        normed[rows], moments = _layer_norm(tokens[rows], weight, bias, eps)
        parts.append(moments)
    means, reciprocals = (torch.cat(one) for one in zip(*parts, strict=True))
    return normed, (means, reciprocals)


def _layer_norm(tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Moments]:
    wide = tokens if tokens.is_cpu else cast(tokens, weight.dtype)
    output, mean, reciprocal = torch.native_layer_norm(wide, wide.shape[-1:], weight, bias, eps)
    return cast(output, tokens.dtype), (mean, reciprocal)


def layer_norm_back(gradient: Tensor, tokens: Tensor, moments: Moments, weight: Tensor) -> Tensor:
    """The gradient of the tokens (T, D) that `layer_norm` took; its weight is frozen."""
    kernels = kernels_for(tokens)
    if kernels is not None:
        slope: Tensor = kernels.layer_norm_back(gradient, tokens, *moments, weight)
        return slope
    if len(tokens) <= MOST_ROWS:
        return _layer_norm_back(gradient, tokens, moments, weight)
    slopes, (means, reciprocals) = torch.empty_like(tokens), moments
    for rows, _ in _in_parts(len(tokens), None):
        slopes[rows] = _layer_norm_back(gradient[rows], tokens[rows], (means[rows], reciprocals[rows]), weight)
    return slopes


def _layer_norm_back(gradient: Tensor, tokens: Tensor, moments: Moments, weight: Tensor) -> Tensor:
    dtype = tokens.dtype
    if not tokens.is_cpu:
        gradient, tokens = cast(gradient, weight.dtype), cast(tokens, weight.dtype)
    to_tokens: Tensor = torch.ops.aten.native_layer_norm_backward(
        gradient, tokens, tokens.shape[-1:], *moments, weight, None, [True, False, False]
    )[0]
    return cast(to_tokens, dtype)


class MixedLayerNorm(torch.autograd.Function):
    """`layer_norm` with a frozen weight and bias. What is kept is the input as it came, not its copy in float32."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """(T, D) -> (T, D) in the input's dtype."""
        output, moments = layer_norm(inputs, weight, bias, eps)
        ctx.save_for_backward(inputs, *moments)
        ctx.weight = weight
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """(T, D) -> the gradient of the input."""
        inputs, *moments = ctx.saved_tensors
        return layer_norm_back(gradients[0], inputs, tuple(moments), ctx.weight), None, None, None


def rms_rotary(inputs: Tensor, weight: Tensor, table: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm over all heads or over each, and rotary position embedding, in float32 with one rounding at the end.

    RMS norm: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, y = x / sqrt(mean(x^2) + eps) * weight.
    Rotary embedding: Su et al. 2021, https://arxiv.org/abs/2104.09864, with pairs of neighbouring channels as complex
    numbers.

    Args:
        inputs: queries or keys, (T, D); rows may be apart.
        weight: (W,), frozen; W is D, or the channels of a head. Or (D / W, W), one for each part of the row.
        table: (N, channels of a head / 2), complex; N divides T. None leaves the positions out.
        eps: keeps the root from zero.

    Returns:
        (T, D), and the reciprocal roots (T, D / W, 1) in float32.
    """
    kernels = kernels_for(inputs)
    if kernels is not None:
        found: tuple[Tensor, Tensor] = kernels.rms_rotary(inputs, weight, table, eps)
        return found
    if len(inputs) > MOST_ROWS:
        output, roots = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device), []
        for rows, angles in _in_parts(len(inputs), table):
            output[rows], root = _rms_rotary(inputs[rows], weight, angles, eps)
            roots.append(root)
        return output, torch.cat(roots)
    return _rms_rotary(inputs, weight, table, eps)


def _rms_rotary(inputs: Tensor, weight: Tensor, table: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    width = weight.shape[-1]
    wide = torch.unflatten(inputs.float(), 1, (-1, width))
    mean_square = torch.linalg.vector_norm(wide, dim=2, keepdim=True).square_().div_(width)
    reciprocal = mean_square.add_(eps).rsqrt_()
    normed = (wide * reciprocal).mul_(weight).flatten(1)
    if table is not None:
        _by_heads(normed, table).mul_(table[:, None])
    return cast(normed, inputs.dtype), reciprocal


def rms_rotary_back(
    gradient: Tensor, inputs: Tensor, reciprocal: Tensor, weight: Tensor, table: Tensor | None
) -> Tensor:
    """The gradient of the inputs (T, D) that `rms_rotary` took."""
    kernels = kernels_for(inputs)
    if kernels is not None:
        slope: Tensor = kernels.rms_rotary_back(gradient, inputs, reciprocal, weight, table)
        return slope
    if len(inputs) > MOST_ROWS:
        slopes = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
        for rows, angles in _in_parts(len(inputs), table):
            slopes[rows] = _rms_rotary_back(gradient[rows], inputs[rows], reciprocal[rows], weight, angles)
        return slopes
    return _rms_rotary_back(gradient, inputs, reciprocal, weight, table)


def _rms_rotary_back(
    gradient: Tensor, inputs: Tensor, reciprocal: Tensor, weight: Tensor, table: Tensor | None
) -> Tensor:
    width = weight.shape[-1]
    turned = gradient.float().contiguous()
    if table is None:
        turned = torch.unflatten(turned, 1, (-1, width)) * weight
    else:
        back = _by_heads(turned, table) * table[:, None].conj()
        turned = torch.view_as_real(back).view(len(inputs), -1, width).mul_(weight)
    wide = torch.unflatten(inputs.float(), 1, (-1, width))
    along = torch.linalg.vecdot(turned, wide)[..., None].mul_(reciprocal.pow(3)).div_(width)
    return cast(turned.mul_(reciprocal).addcmul_(wide, along, value=-1).flatten(1), inputs.dtype)


def _in_parts(num_rows: int, table: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    """At most `MOST_ROWS` tokens at a time, of one item, and their part of the positions' table (N, …)."""
    length = num_rows if table is None else len(table)
    for item in range(0, num_rows, length):
        for start in range(0, length, MOST_ROWS):
            stop = min(start + MOST_ROWS, length)
            yield slice(item + start, item + stop), None if table is None else table[start:stop]


class RmsRotary(torch.autograd.Function):
    """`rms_rotary` with a frozen weight."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, table: Tensor | None, eps: float) -> Tensor:
        """(T, D) -> (T, D)."""
        output, reciprocal = rms_rotary(inputs, weight, table, eps)
        ctx.save_for_backward(inputs, reciprocal)
        ctx.weight, ctx.table = weight, table
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """(T, D) -> the gradient of the input."""
        inputs, reciprocal = ctx.saved_tensors
        return rms_rotary_back(gradients[0], inputs, reciprocal, ctx.weight, ctx.table), None, None, None


def _by_heads(channels: Tensor, table: Tensor) -> Tensor:
    """(T, D) in float32 as the complex numbers (items, N, H, channels of a head / 2) that it consists of."""
    tokens, pairs = table.shape
    return torch.view_as_complex(channels.view(-1, tokens, channels.shape[1] // pairs // 2, pairs, 2))


def gated(
    residual: Tensor,
    branch: Tensor,
    gates: Tensor,
    runs: Sequence[int],
    *,
    valued: bool = True,
    output: Tensor | None = None,
) -> Tensor:
    """The residual plus gate times branch, in one pass and with one rounding.

    Args:
        residual: (T, D)
        branch: (T, D)
        gates: (runs, D) in float32.
        runs: tokens of each.
        valued: the output is computed; else it is zeros, for whoever wants the gradients alone.
        output: (T, D) to write to, which may be the branch; None takes new memory.
    """
    if not valued:
        return residual.new_zeros(()).expand_as(residual)
    output = torch.empty_like(residual) if output is None else output
    _by_run(residual, branch, gates, runs, output)
    return output


def gated_back(gradient: Tensor, gates: Tensor, runs: Sequence[int]) -> Tensor:
    """The gradient of the branch (T, D) that `gated` took; the residual's is the gradient itself."""
    to_branch = torch.empty_like(gradient)
    _by_run(None, gradient, gates, runs, to_branch)
    return to_branch


def _by_run(residual: Tensor | None, branch: Tensor, gates: Tensor, runs: Sequence[int], output: Tensor) -> None:
    """Write gate times branch to the output, plus the residual if there is one; all (T, D)."""
    if len(runs) == 1:
        _gate(residual, branch, gates[0], output)
        return
    parts = [None if one is None else one.split_with_sizes(list(runs)) for one in (residual, branch, output)]
    before, pieces, outputs = parts
    assert pieces is not None
    assert outputs is not None
    for run, gate in enumerate(gates):
        _gate(None if before is None else before[run], pieces[run], gate, outputs[run])


def _gate(residual: Tensor | None, branch: Tensor, gate: Tensor, output: Tensor) -> None:
    kernels = kernels_for(branch)
    if kernels is not None and output.is_contiguous():
        kernels.gated(residual, branch, gate, output)
    elif residual is None:
        torch.mul(branch, gate, out=output)
    else:
        torch.addcmul(residual, branch, gate, out=output)


class Gate(torch.autograd.Function):
    """`gated` with frozen gates; nothing is kept."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, branch: Tensor, gates: Tensor, runs: Sequence[int], valued: bool) -> Tensor:
        """(T, D), (T, D), gates (runs, D) in float32, tokens of each run -> (T, D)."""
        ctx.gates, ctx.runs = gates, runs
        return gated(residual, branch, gates, runs, valued=valued)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """(T, D) -> the same for the residual, and its product with the gates for the branch."""
        (gradient,) = gradients
        return gradient, gated_back(gradient, ctx.gates, ctx.runs), None, None, None
