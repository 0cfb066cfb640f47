"""A transformer's blocks, whatever the family calls them, and when their weights are needed."""

from collections.abc import Collection
from typing import Protocol

from torch import nn

BLOCKS = ("blocks", "transformer_blocks")
"""What the list of blocks is called in Wan's and in Qwen-Image's transformer of diffusers."""


def blocks_of(transformer: nn.Module) -> nn.Module:
    """The module that holds a transformer's blocks, in their order.

    Raises:
        AttributeError: it has none under a known name.
    """
    return transformer.get_submodule(next((name for name in BLOCKS if hasattr(transformer, name)), BLOCKS[0]))


def in_a_block(name: str) -> bool:
    """Whether a layer's name is that of a layer of a block.

    >>> in_a_block("transformer_blocks.0.attn.to_q"), in_a_block("proj_out")
    (True, False)
    """
    return name.partition(".")[0] in BLOCKS


class BlockWeights(Protocol):
    """Weights that are on the device only around their use."""

    @property
    def swapped(self) -> Collection[int]:
        """The numbers of the blocks that it concerns."""

    def enter(self, index: int, *, backward: bool) -> None:
        """The block's weights are needed from now on, for its forward pass or for recomputation and backward pass."""

    def leave(self, index: int, *, backward: bool) -> None:
        """They are not needed any more."""
