"""Attention to few keys on a GPU: an item's queries in pieces, so that the whole card has work.

Shapes: B items, H heads, N queries, L keys, D channels of a head.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional


def num_pieces(query: Tensor, key: Tensor) -> int:
    """Into how many pieces the queries of each item go, for attention to few keys to use a whole GPU.

    PyTorch's memory-efficient kernel shares out its backward pass by items, heads and keys, 128 at a time: one text of
    67 keys and 12 heads keeps 12 of an H200's 132 processors busy.
    """
    if query.device.type != "cuda":
        return 1
    items, heads, length, _ = query.shape
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    wanted = 2 * processors // (items * heads * -(-key.shape[2] // 128))
    return _divisor(length, min(wanted, length // 256))


@functools.lru_cache(maxsize=1024)
def _divisor(number: int, most: int) -> int:
    """The largest divisor that is not above `most`, and at least 1."""
    return next((one for one in range(most, 1, -1) if number % one == 0), 1)


def in_pieces(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, pieces: int) -> Tensor:
    """PyTorch's attention with a bias, the queries of each item in pieces that are items of their own.

    Args:
        query: (B, H, N, D); N is a multiple of the pieces.
        key: (B, H, L, D)
        value: (B, H, L, D)
        bias: (B, 1, 1, L) or (1, 1, 1, L), added to the scores.
        pieces: as of `num_pieces`.

    Returns:
        (B, H, N, D)
    """
    if pieces == 1:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    items, heads, length, width = query.shape
    query = query.transpose(1, 2).reshape(items * pieces, length // pieces, heads, width).transpose(1, 2)
    bias = bias.expand(items, -1, -1, -1)
    key, value, bias = (one[:, None].expand(-1, pieces, *one.shape[1:]).flatten(0, 1) for one in (key, value, bias))
    output = functional.scaled_dot_product_attention(query, key.contiguous(), value.contiguous(), attn_mask=bias)
    return output.transpose(1, 2).reshape(items, length, heads, width).transpose(1, 2)
