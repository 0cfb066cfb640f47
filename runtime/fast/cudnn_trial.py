"""Whether cuDNN's attention is right, asked for each shape that it is wanted for.

It is the fastest on Hopper, and was seen to be wrong there: a gradient was off by more than its size, of 40 tokens with
heads of 32 channels (H200, cuDNN 9.19, PyTorch 2.11, 2026-11-27), where FlashAttention's was right.
"""

import functools
import logging
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

log = logging.getLogger("wangen")

_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
_FLASH_FIRST = [
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH,
]  # fmt: skip

OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""What it is compared with: the first that runs."""

FAR = 0.05
"""Of the length of a tensor; two kernels in 16 bits are 0.01 apart at most."""

HEADS = 2
"""More than one, since what a kernel reads beyond the last token of one head belongs to the next."""


def cudnn_where_right(
    device: torch.device, dtype: torch.dtype, queries: int, keys: int, channels: int
) -> AbstractContextManager[None]:
    """While it runs SDPA prefers cuDNN, or FlashAttention where that is wrong; arguments of `is_right`."""
    right = is_right(device, dtype, queries, keys, channels)
    return sdpa_kernel(_CUDNN_FIRST if right else _FLASH_FIRST, set_priority=True)


@functools.cache
def is_right(device: torch.device, dtype: torch.dtype, queries: int, keys: int, channels: int) -> bool:
    """Whether cuDNN has the output and the gradients that another of SDPA's kernels has, on random numbers.

    Args:
        device: a GPU.
        dtype: of queries, keys and values.
        queries: how many.
        keys: how many.
        channels: of a head.
    """
    generator = torch.Generator(device).manual_seed(0)

    def drawn(rows: int) -> Tensor:
        """As a transformer has them: a view of (1, rows, heads, channels)."""
        shape = (1, rows, HEADS, channels)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).transpose(1, 2)

    tensors, slope = [drawn(queries), drawn(keys), drawn(keys)], drawn(queries)
    try:
        found = _results([SDPBackend.CUDNN_ATTENTION], tensors, slope)
        expected = _results(OTHERS, tensors, slope)
    except RuntimeError:  # one of them does not run here, or not in a fixed order
        return False
    right = not any(_far(*pair) for pair in zip(found, expected, strict=True))
    if not right:
        _tell(device)
    return right


@functools.cache  # once, for there may be many such shapes
def _tell(device: torch.device) -> None:
    log.warning("  cuDNN's attention is wrong on %s for some shapes; FlashAttention takes its place for them", device)


def _results(backends: list[SDPBackend], tensors: list[Tensor], slope: Tensor) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    with torch.enable_grad(), sdpa_kernel(backends):
        query, key, value = leaves
        output = functional.scaled_dot_product_attention(query, key, value)
        return [output.detach(), *torch.autograd.grad(output, leaves, slope)]


def _far(found: Tensor, expected: Tensor) -> bool:
    """Whether one is far from the other; NaN is."""
    return not (found.float() - expected.float()).norm() < FAR * expected.float().norm()
