"""Attention kernels of training: one choice by name, a gradient under each, outputs that checkpointing can keep.

Shapes: B items, H heads, N queries, L keys, D channels of a head.
"""

import contextlib
import functools
import importlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from wangen.runtime.fast.attention_backends import cudnn_first, efficient_first, with_gradient_like_it
from wangen.runtime.fast.attention_operators import (
    ForwardOnly,
    Function,
    Gradients,
    Operator,
    attend,
    held,
    operator_for,
)
from wangen.runtime.fast.attention_pieces import in_pieces, num_pieces
from wangen.runtime.fast.attention_stash import Stash

__all__ = [
    "KERNEL_FAILURES", "MODULES", "PACKAGES", "Kernel", "Stash", "choose_kernel", "pad_biases", "try_kernel",
    "warn_of_another",
]  # fmt: skip

log = logging.getLogger("wangen")

KERNEL_FAILURES = (
    ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError,
)  # fmt: skip
"""A package built for another PyTorch fails with any of these, some kernels with a bare assert."""

PACKAGES = {"flash": "flash-attn", "flash3": "flash-attn-3", "xformers": "xformers", "sage": "sageattention"}
"""The pip package of each kernel that PyTorch does not bring."""

MODULES = {"flash": "flash_attn", "flash3": "flash_attn_interface", "xformers": "xformers", "sage": "sageattention"}
"""What is imported of each of these packages."""

_AUTO = ("flash3", "flash")
"""What `auto` tries before SDPA; never sage, whose output is an approximation."""


@dataclass(frozen=True)
class Kernel:
    """An attention kernel, differentiable in query, key and value.

    Attributes:
        name: sdpa, flash, flash3, xformers or sage.
        function: the package's own; None for sdpa.
        has_gradient: `function` is differentiable by itself.
        cudnn_first: SDPA prefers cuDNN to FlashAttention.
        pad_copies: keys that stand for the collapsed padding of a text, an argument of `pad_biases`: 1 where a bias is
            taken in float32, 3 where it is rounded to 16 bits.
        widens: SDPA computes bfloat16 in float32: on NVIDIA's cards before Ampere none of its kernels takes bfloat16,
            and its plain matrix products would keep all scores, N x N for each head.
        split: one item of the batch after the other.
    """

    name: str
    function: Function | None = None
    has_gradient: bool = True
    cudnn_first: bool = False
    pad_copies: int = 1
    widens: bool = False
    split: bool = False

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        """softmax(q k^T / sqrt(D) + bias) v.

        Args:
            query: (B, H, N, D)
            key: (B, H, L, D)
            value: (B, H, L, D)
            bias: (B, 1, 1, L), added to the scores, without a gradient. It goes through SDPA whatever the kernel is:
                most kernels take none.

        Returns:
            (B, H, N, D) in the query's dtype, as a rule a view of (B, N, H, D).
        """
        if self.split and len(query) > 1:
            return _join(
                [self(query[n], key[n], value[n], None if bias is None else bias[n]) for n in _each_item(query)]
            )
        if bias is not None or self.function is None:
            return self._sdpa(query, key, value, bias)
        if self.has_gradient:
            return self.function(query, key, value)
        return attend(query, key, value, ForwardOnly(self.function, self._sdpa))

    def kept(self, query: Tensor, key: Tensor, value: Tensor, stash: Stash) -> Tensor:
        """The same, inside a checkpointed region: its recomputation finds the output in the stash.

        The packages' kernels do not all hand out what their backward pass needs, so in place of flash, flash3 and
        xformers it is SDPA that computes. Where SDPA would use plain matrix products (odd head sizes on CUDA), nothing
        is kept, and everything is computed again.

        Args:
            query: (B, H, N, D)
            key: (B, H, N, D)
            value: (B, H, N, D)
            stash: of this region and this step.

        Returns:
            (B, H, N, D); equal, byte by byte, with the kernel's own call under sdpa and sage.
        """
        if self.split and len(query) > 1:
            return _join([self.kept(query[n], key[n], value[n], stash) for n in _each_item(query)])
        if self.function is not None and not self.has_gradient:
            return attend(query, key, value, ForwardOnly(self.function, self._sdpa), stash)
        dtype, (query, key, value) = query.dtype, self._widened(query, key, value)
        with self.priority():
            operator = operator_for(query, key, value)
        output = self(query, key, value) if operator is None else attend(query, key, value, operator, stash)
        return output.to(dtype)

    def apart(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, stash: Stash | None = None
    ) -> tuple[Tensor, Callable[[Tensor], Gradients]]:
        """The same outside autograd, for whoever hands gradients on by himself.

        Args:
            query: (B, H, N, D)
            key: (B, H, L, D)
            value: (B, H, L, D)
            bias: as of the kernel's call; not beside a stash.
            stash: as of `kept`; None keeps nothing for a recomputation.

        Returns:
            (B, H, N, D), and what makes of its gradient those of query, key and value.
        """
        operator = self._operator_on_cpu(query, key, value, bias)
        if operator is not None:
            kept = held(query, key, value, operator, stash)
            assert kept[0] is not None
            return kept[0], lambda gradient: operator.backward(gradient, query, key, value, kept)
        query, key, value = (part.detach().requires_grad_() for part in (query, key, value))
        with torch.enable_grad():
            output = self(query, key, value, bias) if stash is None else self.kept(query, key, value, stash)

        def gradients(gradient: Tensor) -> Gradients:
            to_query, to_key, to_value = torch.autograd.grad(output, (query, key, value), gradient)
            return to_query, to_key, to_value

        return output.detach(), gradients

    def _operator_on_cpu(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Operator | None:
        """What a call comes to on the CPU, where nothing of it is left to others."""
        if query.device.type != "cpu" or self.function is not None or (self.split and len(query) > 1):
            return None
        return operator_for(query, key, value, bias)

    def priority(self) -> contextlib.AbstractContextManager[None]:
        """While it runs SDPA prefers one of its kernels; what cannot run is passed over."""
        return cudnn_first() if self.cudnn_first else contextlib.nullcontext()

    def by_item(self) -> "Kernel":
        """The same kernel, one item of the batch after the other: `--split_attn`."""
        return replace(self, split=True)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype, (query, key, value) = query.dtype, self._widened(query, key, value)
        operator = operator_for(query, key, value, bias) if query.device.type == "cpu" else None
        if operator is not None:
            output = attend(query, key, value, operator)
        elif bias is not None:  # the memory-efficient kernel is the one for training with a bias, and wants its dtype
            with efficient_first(query.device):
                output = in_pieces(query, key, value, bias.to(query.dtype), num_pieces(query, key))
        else:
            with self.priority():
                output = with_gradient_like_it(functional.scaled_dot_product_attention(query, key, value))
        return output.to(dtype)

    def _widened(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (query.float(), key.float(), value.float()) if self.widens else (query, key, value)


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, *, backward: bool = True) -> Kernel:
    """The kernel for a value of `--attention`, after a trial on small tensors.

    Args:
        name: auto, sdpa, flash, flash3, xformers or sage. auto is the first of flash3, flash and sdpa that runs here,
            on Hopper of flash3 and sdpa. For any other that does not run, auto's choice takes its place, and one
            warning says what to install.
        device: where it will run.
        dtype: of queries, keys and values; the packages' kernels know no float32.
        backward: the trial asks for gradients of query, key and value as well.
    """
    return _choose(name, device, dtype, backward)


def pad_biases(num_rows: int, num_copies: int) -> tuple[float, ...]:
    """The biases of the keys that stand together for many equal ones: their exponentials add up to `num_rows`.

    n equal keys with equal values act as one whose score has log n added. Rounded to bfloat16, log n may be off by
    1.6 % of n. So where biases are rounded, several keys share the sum, each with a bias that is a bfloat16 number: the
    largest that leaves the rest positive. Up to 512, two are then off by at most 0.05 %, three by 0.0007 %.

    Args:
        num_rows: the equal keys, n. For 0 each bias is -inf.
        num_copies: the keys that stand for them. For 1 the bias is log n itself.

    >>> [round(bias, 4) for bias in pad_biases(466, 1)]
    [6.1442]
    >>> pad_biases(466, 3)
    (6.125, 2.171875, -2.53125)
    """
    if num_copies == 1:
        return (_log(num_rows),)
    rest, biases = float(num_rows), []
    for _ in range(num_copies):
        biases.append(_bfloat16_below(_log(rest)))
        rest -= math.exp(biases[-1])
    return tuple(biases)


def _log(number: float) -> float:
    return math.log(number) if number > 0 else -math.inf


def _bfloat16_below(number: float) -> float:
    """The largest bfloat16 number that is not above; it has 8 binary digits."""
    if math.isinf(number):
        return number
    digits, exponent = math.frexp(number)
    return math.ldexp(math.floor(digits * 256), exponent - 8)


@functools.cache  # one trial and one warning in a process, however many transformers ask
def _choose(name: str, device: torch.device, dtype: torch.dtype, backward: bool) -> Kernel:
    sdpa, reason = _make("sdpa", device, dtype), ""
    # PyTorch's cuDNN is 1.4 times as fast as FlashAttention 2 there: a step of 2.25 and 3.14 s (H200, 32,760 tokens).
    faster = [kernel for kernel in _AUTO if not (sdpa.cudnn_first and kernel == "flash")]
    for candidate in {"auto": faster, "sdpa": []}.get(name, [name]):
        kernel, reason = try_kernel(candidate, device, dtype, backward=backward)
        if kernel:
            return kernel
    if name in ("auto", "sdpa"):
        return sdpa
    chosen = _choose("auto", device, dtype, backward)
    warn_of_another(name, reason, chosen.name)
    return chosen


def warn_of_another(name: str, reason: str, chosen: str) -> None:
    """Say that a kernel takes the place of the one that was asked for, and what would have to be installed."""
    log.warning("attention kernel %s does not run here (%s): %s takes its place; %s needs a GPU and "
                "`pip install %s`", name, reason, chosen, name, PACKAGES[name])  # fmt: skip


def try_kernel(
    name: str, device: torch.device, dtype: torch.dtype, *, backward: bool = True
) -> tuple[Kernel | None, str]:
    """A kernel after its trial on small tensors, or None and why it does not run here.

    Args:
        name: sdpa, flash, flash3, xformers or sage.
        device: where it will run.
        dtype: of queries, keys and values.
        backward: the trial asks for gradients of query, key and value as well.
    """
    try:
        kernel = _make(name, device, dtype)
        _try(kernel, device, dtype, backward=backward)
    except KERNEL_FAILURES as error:
        return None, str(error).splitlines()[0] if str(error) else type(error).__name__
    return kernel, ""


def _make(name: str, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel of that name, untried.

    Raises:
        ImportError, OSError: its package is missing or cannot be loaded.
    """
    rounded = device.type != "cpu" and dtype not in (torch.float32, torch.float64)
    nvidia = device.type == "cuda" and torch.version.hip is None
    capability = torch.cuda.get_device_capability(device) if nvidia else None
    kernel = Kernel(
        name,
        # Measured by others on Hopper only; elsewhere PyTorch's own order stays.
        cudnn_first=capability == (9, 0),
        pad_copies=3 if rounded else 1,
        widens=capability is not None and capability < (8, 0) and dtype == torch.bfloat16,
    )
    if name == "sdpa":
        return kernel
    return replace(kernel, function=_FUNCTIONS[name](), has_gradient=name != "sage")


def _try(kernel: Kernel, device: torch.device, dtype: torch.dtype, *, backward: bool) -> None:
    """Run a kernel once and compare it with SDPA.

    Raises:
        ValueError: its output or a gradient is not attention's, or there is no gradient.
        RuntimeError, TypeError ...: of its own.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, 128, 2, 128, generator=generator).to(device, dtype).transpose(1, 2).requires_grad_(backward)
        for _ in range(3)
    ]
    found, exact = kernel(*inputs), Kernel("sdpa")(*inputs)
    if _far(found, exact):
        raise ValueError("its output is wrong")
    if not backward:
        return
    if not found.requires_grad:
        raise ValueError("it gives no gradient")
    slopes = [
        torch.autograd.grad(output.float().square().sum(), inputs, allow_unused=True) for output in (found, exact)
    ]
    for slope, right in zip(*slopes, strict=True):
        if slope is None or not slope.any():
            raise ValueError("it gives no gradient")
        if _far(slope, right):
            raise ValueError("its gradient is wrong")


def _far(found: Tensor, exact: Tensor) -> bool:
    """Whether two results are not the same attention. Sage's 8 bits are off by some percent; NaN is far."""
    return not (found - exact).detach().float().norm() < 0.2 * exact.detach().float().norm()


def _each_item(tensor: Tensor) -> list[slice]:
    return [slice(number, number + 1) for number in range(len(tensor))]


def _join(outputs: list[Tensor]) -> Tensor:
    """Items (1, H, N, D) as (B, H, N, D), again a view of (B, N, H, D)."""
    return torch.cat([output.transpose(1, 2) for output in outputs]).transpose(1, 2)


def _flash() -> Function:
    """FlashAttention 2, on (B, N, H, D)."""
    return _dao(MODULES["flash"])


def _flash3() -> Function:
    """FlashAttention 3, for Hopper, on (B, N, H, D)."""
    return _dao(MODULES["flash3"])


def _dao(module: str) -> Function:
    """Both packages' function. Unless asked, its backward pass adds in whatever order the blocks finish."""
    function = importlib.import_module(module).flash_attn_func

    def output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        order = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
        result: Tensor | tuple[Tensor, ...] = function(query, key, value, **order)
        return result[0] if isinstance(result, tuple) else result  # the first versions of 3 add the logsumexp

    return _transposed(output)


def _xformers() -> Function:
    return _transposed(importlib.import_module("xformers.ops").memory_efficient_attention)


def _sage() -> Function:
    """SageAttention, on (B, H, N, D); no gradient passes through it."""
    function = importlib.import_module(MODULES["sage"]).sageattn

    def output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result: Tensor = function(query, key, value, tensor_layout="HND", is_causal=False)
        return result

    return output


def _transposed(function: Callable[..., Tensor]) -> Function:
    def output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return function(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(1, 2)

    return output


_FUNCTIONS = {"flash": _flash, "flash3": _flash3, "xformers": _xformers, "sage": _sage}
