"""A transformer's blocks, whatever the family calls them."""

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
