"""What a block computes number by number: norms with modulation, RMS norm with rotation, gates.

There are three ways to the same numbers: operation by operation as diffusers does, few passes with hand-written
gradients, and kernels that torch.compile makes, which leave no intermediate result in memory. All compute in float32
and round to the dtype of the tokens.

Letters in shapes: T tokens, N tokens of one item, D width of the model.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wangen.runtime.fast.dit_functions import apply
from wangen.runtime.fast.dit_norms import Gate, MixedLayerNorm, RmsRotary
from wangen.runtime.models.compute import Compute

log = logging.getLogger("wangen")

TWICE_ROOT = 2 * math.sqrt(2 / math.pi)
"""Of GELU: 0.5 (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3), https://arxiv.org/abs/1606.08415."""

BACKEND = "inductor"
"""Of torch.compile: what makes kernels of its graphs. Tests take a quicker one."""


Gated = Callable[[Tensor, Tensor, Tensor, Sequence[int], bool], Tensor]


@dataclass(frozen=True)
class Elementwise:
    """One way of computing.

    Attributes:
        norm: tokens (T, D), weight and bias (D,) in float32, eps -> layer norm (T, D).
        rms: queries or keys (T, D), weight (W,), table (N, channels of a head / 2) of complex numbers or None, eps ->
            RMS norm and the rotation of each head's pairs by position. W is D for one norm over all heads, or the
            channels of a head for one of each.
        gated: residual (T, D), branch (T, D), gates (runs, D) in float32, tokens of each run, and whether the value is
            looked at, not the gradients alone -> residual + gate * branch.
    """

    norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rms: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    gated: Gated

    def modulated(self, tokens: Tensor, scale: Tensor, shift: Tensor, eps: float, runs: Sequence[int]) -> Tensor:
        """Adaptive layer norm, (T, D) -> (T, D): norm(x) * scale + shift, both (runs, D), scale with its 1 added."""
        pieces = torch.split(tokens, list(runs)) if len(runs) > 1 else [tokens]
        parts = [self.norm(piece, scale[run], shift[run], eps) for run, piece in enumerate(pieces)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Modulation(NamedTuple):
    """What the timesteps make of norms and gates in one block: (runs, D) in float32 each; scales with their 1 added."""

    shift: Tensor
    scale: Tensor
    gate: Tensor
    forward_shift: Tensor
    forward_scale: Tensor
    forward_gate: Tensor


def _norm(tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    normed = functional.layer_norm(tokens.float(), tokens.shape[-1:], eps=eps)
    return (normed * weight + bias).to(tokens.dtype)


def _fused_norm(tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """One kernel; where it refuses mixed dtypes (on CUDA), at least nothing in float32 is kept."""
    if tokens.device.type == "cpu" or tokens.dtype == weight.dtype:
        return functional.layer_norm(tokens, tokens.shape[-1:], weight, bias, eps)
    if weight.requires_grad:
        return _norm(tokens, weight, bias, eps)
    output: Tensor = apply(MixedLayerNorm, tokens, weight, bias, eps)
    return output


def _rms(inputs: Tensor, weight: Tensor, table: Tensor | None, eps: float) -> Tensor:
    real = None if table is None else torch.view_as_real(table)
    return real_rms(inputs, weight, real, eps)


def real_rms(inputs: Tensor, weight: Tensor, table: Tensor | None, eps: float) -> Tensor:
    """`PLAIN.rms` with the table as (N, channels of a head / 2, 2), cosines and sines."""
    wide = torch.unflatten(inputs.float(), 1, (-1, len(weight)))
    normed = (wide * torch.rsqrt(wide.square().mean(dim=2, keepdim=True) + eps) * weight.float()).flatten(1)
    if table is None:
        return normed.to(inputs.dtype)
    tokens, pairs, _ = table.shape
    one, other = normed.view(-1, tokens, normed.shape[1] // pairs // 2, pairs, 2).unbind(-1)
    cosine, sine = table[:, None].unbind(-1)
    turned = torch.stack([one * cosine - other * sine, one * sine + other * cosine], dim=-1)
    return turned.view(inputs.shape).to(inputs.dtype)


def compiled_gelu(inputs: Tensor) -> Tensor:
    """GELU in tanh's approximation, as x * sigmoid(2 u): the compiler's sigmoid is faster than its tanh."""
    wide = inputs.float()
    return (wide * torch.sigmoid(wide * (TWICE_ROOT + 0.044715 * TWICE_ROOT * wide * wide))).to(inputs.dtype)


def _fused_rms(inputs: Tensor, weight: Tensor, table: Tensor | None, eps: float) -> Tensor:
    if weight.requires_grad:
        return _rms(inputs, weight, table, eps)
    output: Tensor = apply(RmsRotary, inputs, weight, table, eps)
    return output


def _gated_run(residual: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    return (residual.float() + branch.float() * gate).to(residual.dtype)


def _by_run(run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Gated:
    """A gate for one run of tokens made one for all."""

    def gated(residual: Tensor, branch: Tensor, gates: Tensor, runs: Sequence[int], _valued: bool) -> Tensor:
        if len(runs) == 1:
            return run(residual, branch, gates[0])
        pieces = zip(torch.split(residual, list(runs)), torch.split(branch, list(runs)), gates, strict=True)
        return torch.cat([run(*piece) for piece in pieces])

    return gated


def _fused_gated(residual: Tensor, branch: Tensor, gates: Tensor, runs: Sequence[int], valued: bool) -> Tensor:
    if gates.requires_grad:
        return PLAIN.gated(residual, branch, gates, runs, valued)
    output: Tensor = apply(Gate, residual, branch, gates, runs, valued)
    return output


PLAIN = Elementwise(_norm, _rms, _by_run(_gated_run))
FUSED = Elementwise(_fused_norm, _fused_rms, _fused_gated)


def elementwise_of(compute: Compute, device: torch.device) -> Elementwise:
    """The way that a step computes."""
    if compute.compile:
        return compiled(device)
    return FUSED if compute.tricks.fused_norms else PLAIN


@functools.cache
def compiled(device: torch.device) -> Elementwise:
    """Kernels by torch.compile; `FUSED`, with one warning, where this machine cannot make them.

    For blocks that `dit_compiled` cannot take as a whole: adapters of any kind and swapped or quantised weights stay as
    they are, and the few kernels serve all blocks. The number of tokens is left open: all buckets share them.
    """
    norm, rms, gate = (_compiled(part) for part in (_norm, real_rms, _gated_run))

    def open_norm(tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return norm(_open(tokens), weight, bias, eps)

    def open_rms(inputs: Tensor, weight: Tensor, table: Tensor | None, eps: float) -> Tensor:
        return rms(_open(inputs), weight, None if table is None else _open(torch.view_as_real(table)), eps)

    def open_gate(residual: Tensor, branch: Tensor, gate_of_run: Tensor) -> Tensor:
        return gate(_open(residual), _open(branch), gate_of_run)

    from torch._dynamo.exc import TorchDynamoException  # here: it loads the whole compiler

    try:
        open_norm(torch.zeros(2, 8, device=device), torch.ones(8, device=device), torch.zeros(8, device=device), 1e-6)
    except (TorchDynamoException, RuntimeError, OSError) as error:
        log.warning("--compile: torch.compile does not run here (%s), so it is left out; it needs a C++ compiler, and "
                    "Triton on a GPU", failure(error))  # fmt: skip
        return FUSED
    return Elementwise(open_norm, open_rms, _by_run(open_gate))


def _compiled(part: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function by torch.compile, compiled apart for each kind of call, so that no kind comes too late.

    Gradient mode, what requires a gradient and strides all make variants: more of them than `separately_compiled` says
    there may be, in training and validation together.
    """

    @functools.cache
    def of_kind(*_kind: object) -> Callable[..., Tensor]:
        return separately_compiled(part)

    def call(*inputs: Tensor | float | None) -> Tensor:
        kinds = [(one.requires_grad, one.stride()) if isinstance(one, Tensor) else one for one in inputs]
        return of_kind(torch.is_grad_enabled(), *kinds)(*inputs)

    return call


def separately_compiled(
    function: Callable[..., Tensor], *, fullgraph: bool = False, dynamic: bool | None = None
) -> Callable[..., Tensor]:
    """A copy of a function by torch.compile, which has variants of its own.

    Of one code object the compiler makes 8 variants, and then runs it uncompiled for good.
    """
    assert isinstance(function, FunctionType)
    name, defaults = function.__name__, function.__defaults__
    copy = FunctionType(function.__code__.replace(), function.__globals__, name, defaults, function.__closure__)
    compiled_copy: Callable[..., Tensor] = torch.compile(copy, fullgraph=fullgraph, dynamic=dynamic, backend=BACKEND)
    return compiled_copy


def failure(error: Exception) -> str:
    """What a failure of the compiler says, in one line; it may have packed up the failure of another."""
    return str(getattr(error, "inner_exception", error)).strip().splitlines()[0]


def _open(tokens: Tensor) -> Tensor:
    """The tensor, whose number of rows the compiler shall not take for a constant."""
    torch._dynamo.maybe_mark_dynamic(tokens, 0)
    return tokens
