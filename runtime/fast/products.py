"""Products outside autograd, and what this processor computes them in.

Letters in shapes: T tokens, I inputs and O outputs of a linear layer.
"""

import functools
import platform
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

LEAST_WORK = 1 << 23
"""T x I x O from which on oneDNN may be asked."""

NO_ACTIVATION: tuple[str, list[float], str] = ("none", [], "")
"""oneDNN's product can be followed by a function; this one is not."""


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What the blocks of a transformer in a dtype compute in: float32 on a CPU that is slow in bfloat16.

    Tokens are in it too: rounding them after every product took a sixth of a step; what is kept of them takes twice the
    memory. Not measured but read from what the processor says of itself: a resumed run must give the same bytes.
    """
    slow = dtype == torch.bfloat16 and device.type == "cpu" and not is_fast_in_bfloat16()
    return torch.float32 if slow else dtype


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, num_layers: int = 1) -> Tensor:
    """(T, I), weight (O, I), bias (O,) -> (T, O).

    Of the weights of several layers as one, one layer's size says who is asked: together or apart, the bits are the
    same.
    """
    if _is_for_onednn(inputs, weight.shape[0] // num_layers):
        return by_onednn(inputs, weight, bias)
    return functional.linear(inputs, weight, bias)


def by_onednn(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` by oneDNN."""
    output: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, *NO_ACTIVATION)
    return output


def linear_back(gradient: Tensor, weight: Tensor) -> Tensor:
    """(T, O) times a weight (O, I) -> (T, I)."""
    if _is_for_onednn(gradient, weight.shape[1]):
        return linear(gradient, weight.t())
    return gradient @ weight


def linear_onto(outputs: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """(T, O) plus the product of (T, I) with a weight (O, I); what it is added to may be overwritten."""
    if _is_for_onednn(inputs, weight.shape[0]):
        total: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, outputs, weight, None, "add")
        return total
    return outputs.addmm_(inputs, weight.t())


def add_product(total: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Add `scale` times the product of (M, K) and (K, N) to a total (M, N), which may be of a wider dtype."""
    # cuBLASLt may take a single row for a bias, which is no sum to add to; the trial has no such total.
    if total.dtype != left.dtype and 1 not in total.shape and adds_wider(total.device, left.dtype):
        torch.addmm(total, left, right, alpha=scale, out_dtype=total.dtype, out=total)
    else:
        total.add_(scaled_(linear_back(left, right), scale))


def scaled_(product: Tensor, scale: float) -> Tensor:
    """The product times a number, in place."""
    return product if scale == 1 else product.mul_(scale)


@functools.cache
def adds_wider(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of 16-bit numbers adds itself to a total in float32: one kernel, nothing rounded between.

    PyTorch has it for CUDA. It is tried once: 2.8 and 2.9 have the argument, but refuse this total.
    """
    return device.type == "cuda" and dtype.itemsize == 2 and is_sum_of_product(device, dtype)


def is_sum_of_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `torch.addmm` adds a product of 16-bit numbers to a total in float32, its rows or its columns dense."""
    left, right = torch.eye(16, dtype=dtype, device=device), torch.full((16, 32), 2.0, dtype=dtype, device=device)
    totals = [torch.ones(16, 32, device=device), torch.ones(32, 16, device=device).t()]
    try:
        for total in totals:
            torch.addmm(total, left, right, alpha=0.5, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return all(bool((total == 2).all()) for total in totals)


def _is_for_onednn(inputs: Tensor, num_outputs: int) -> bool:
    """Whether oneDNN is asked for the product of (T, I) and a weight (O, I) or (I, O), O being `num_outputs`.

    Its call takes 11 microseconds more, and it is slower in adding to what is there.
    """
    return is_large(inputs, num_outputs) and inputs.is_cpu and has_faster_onednn()


def is_large(inputs: Tensor, num_outputs: int) -> bool:
    """Whether a product of (T, I) in float32 is large enough for oneDNN."""
    return inputs.dtype == torch.float32 and inputs.numel() * num_outputs >= LEAST_WORK


@functools.cache
def has_faster_onednn() -> bool:
    """Whether oneDNN multiplies float32 faster than MKL, which PyTorch asks by itself: on AMD's with AVX512.

    MKL takes AVX2 there: 136 to 180 GFLOP/s on two cores (Zen 4), oneDNN 200 to 215, at every shape of a transformer
    block; 160 to 190 and 410 to 450 on Zen 5. On Intel's MKL is as fast as the processor.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    return torch._C._has_mkldnn and capability == "AVX512" and _is_of_amd()


@functools.cache
def is_fast_in_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 faster than float32: Intel's with AMX, AMD's with AVX512, Arm's.

    Intel's AVX512 form runs at half the rate of float32 (measured: 100 and 186 GFLOP/s on a core).
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return "amx_bf16" in _words() or (_is_of_amd() and "avx512_bf16" in _words())


def _is_of_amd() -> bool:
    return "AuthenticAMD" in _words() | set(platform.processor().split())  # the second is what Windows says


@functools.cache
def _words() -> frozenset[str]:
    """What Linux says of the processor, word by word."""
    about = Path("/proc/cpuinfo")
    return frozenset(about.read_text(encoding="utf-8").split() if about.is_file() else [])
