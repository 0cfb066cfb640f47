"""Block swap for a library's own forward: hooks bring each block's weights before it computes and let them go after.

A block that is computed again in the backward pass keeps its weights until the block before it begins: by then its
gradients are done. That holds for checkpoints that run a block and its backward pass in one go (`recomputed`).
"""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from wangen.runtime.memory.swap import BlockSwap


class SwapHooks:
    """Lets `BlockSwap` follow a transformer's blocks through forward and backward passes.

    Args:
        transformer: whose blocks are in `swap`; what goes into them requires a gradient from now on where there are
            gradients, so that the first of them has a backward pass too.
        inputs: the names of the layers whose outputs go into the first block.
        swap: brings the weights.
    """

    def __init__(self, transformer: nn.Module, inputs: tuple[str, ...], swap: BlockSwap) -> None:
        self._swap = swap
        self._held: int | None = None
        for index, block in enumerate(swap.blocks):
            block.register_forward_pre_hook(lambda _block, _args, index=index: self._before(index))
            block.register_forward_hook(lambda _block, _args, _output, index=index: self._after(index))
        for name in inputs:
            transformer.get_submodule(name).register_forward_hook(_with_gradient)

    def _before(self, index: int) -> None:
        if self._held is not None:
            self._swap.leave(self._held, backward=True)
            self._held = None
        self._swap.enter(index, backward=torch.is_grad_enabled())

    def _after(self, index: int) -> None:
        if torch.is_grad_enabled():  # it is computed again: its backward pass comes now
            self._held = index
        else:
            self._swap.leave(index, backward=False)


def _with_gradient(_layer: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def recomputed(block: nn.Module, *args: Any) -> Any:
    """A block that keeps its inputs alone: its backward pass runs it again, and then goes through it, in one go."""
    return checkpoint(block, *args, use_reentrant=True)
