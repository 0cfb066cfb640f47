"""Frozen products in what torch.compile makes, which by itself asks MKL for all of float32.

What the compiler makes of oneDNN's own operator wants weights that are constants of the graph. So there is one more,
which it leaves as it is.

Letters in shapes: T tokens, I inputs and O outputs of a linear layer.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wangen.runtime.fast.products import by_onednn, is_large


def compiled_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, *, onednn: bool) -> Tensor:
    """(T, I), frozen weight (O, I), bias (O,) -> (T, O); `onednn` is asked for it where the product is large."""
    if onednn and is_large(inputs, len(weight)):
        output: Tensor = _linear(inputs, weight, bias)
        return output
    return functional.linear(inputs, weight, bias)


@torch.library.custom_op(
    "wangen::linear",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor inputs, Tensor weight, Tensor? bias) -> Tensor",
)
def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return by_onednn(inputs, weight, bias)


@_linear.register_fake
def _shape(inputs: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
    return inputs.new_empty(len(inputs), len(weight))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _linear(gradient, ctx.saved_tensors[0].t(), None), None, None


_linear.register_autograd(_back, setup_context=_keep)
