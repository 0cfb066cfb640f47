"""Which of its kernels PyTorch's SDPA asks first, and how the gradient is laid out that goes back through them.

cuDNN is the fastest on Hopper. PyTorch keeps its plan of a backward pass by the sizes and strides of query, key and
value alone (2.11; https://github.com/pytorch/pytorch/pull/141147 lets the output's gradient have strides of its own):
a gradient that is laid out otherwise than the first one was then is read wrongly, without a word. Seen on an H200 with
cuDNN 9.19: off by 1.4 times its length, for all sizes. So here it is always laid out as the output.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
_EFFICIENT_FIRST = [
    SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


def cudnn_first() -> AbstractContextManager[None]:
    """While it runs SDPA prefers cuDNN; what cannot run is passed over."""
    return sdpa_kernel(_CUDNN_FIRST, set_priority=True)


def efficient_first(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU the memory-efficient kernel comes first, for which `num_pieces` cuts: newer PyTorch asks cuDNN first."""
    return sdpa_kernel(_EFFICIENT_FIRST, set_priority=True) if device.type == "cuda" else nullcontext()


def with_gradient_like_it(output: Tensor) -> Tensor:
    """The output itself, whose gradient will reach the kernel laid out as the output is."""
    if output.is_cuda and output.requires_grad and not torch.compiler.is_compiling():
        strides = output.stride()
        output.register_hook(lambda gradient: laid_out(gradient, strides))  # type: ignore[no-untyped-call]
    return output


def laid_out(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The same numbers with these strides; those of dimensions of size 1 do not count."""
    steps = zip(gradient.shape, gradient.stride(), strides, strict=True)
    if all(size == 1 or found == wanted for size, found, wanted in steps):
        return gradient
    return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
