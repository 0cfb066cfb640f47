"""The two halves of a umT5 block as functions of their weights, for captions of any lengths without padding.

Each half adds to the hidden states in place. Letters in shapes: N tokens of all captions one behind the other, D width,
H heads, d width of a head, L tokens of one caption, K captions of one length.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

ATTENTION = ("norm1", "attn.q", "attn.k", "attn.v", "attn.o", "pos_embedding.embedding")
FEED_FORWARD = ("norm2", "ffn.gate.0", "ffn.fc1", "ffn.fc2")
"""The weights of each half by their official names."""

EPSILON = 1e-6
MAX_DISTANCE = 128
"""Tokens that lie farther apart than this share one bucket."""

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Pack:
    """Captions whose tokens go through one matrix product.

    Attributes:
        begin: the first row of theirs in the hidden states.
        runs: (K, L): how many captions of which length follow each other.
    """

    begin: int
    runs: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """The row behind their last."""
        return self.begin + sum(count * length for count, length in self.runs)


def make_packs(lengths: Sequence[int], max_tokens: int) -> list[Pack]:
    """Captions in their order, put together to packs of at most `max_tokens`; 0 makes a pack of each.

    >>> make_packs([2, 3, 3, 4], 8)
    [Pack(begin=0, runs=((1, 2), (2, 3))), Pack(begin=8, runs=((1, 4),))]
    """
    packs: list[Pack] = []
    begin, runs = 0, dict[int, int]()
    for i, length in enumerate(lengths):
        runs[length] = runs.get(length, 0) + 1
        pack = Pack(begin, tuple((count, of) for of, count in runs.items()))
        if i + 1 == len(lengths) or pack.end - begin + lengths[i + 1] > max_tokens:
            packs.append(pack)
            begin, runs = pack.end, {}
    return packs


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(N, D) -> (N, D), each row divided by its root mean square in float32 and rounded before it is scaled."""
    inverse = torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + EPSILON)
    return weight * (hidden * inverse).to(weight.dtype)


def add_attention(hidden: torch.Tensor, packs: Iterable[Pack], weights: Weights, num_heads: int) -> None:
    """Add each caption's attention to its own tokens, (N, D) in place; scores are not divided by sqrt(d)."""
    table = weights["pos_embedding.embedding"]
    for pack in packs:
        rows = hidden[pack.begin : pack.end]
        normed = rms_norm(rows, weights["norm1"])
        query, key, value = (functional.linear(normed, weights[f"attn.{part}"]) for part in "qkv")
        mixed = torch.empty_like(query)
        for part, count, length in _parts(pack):
            q, k, v = (x[part].view(count, length, num_heads, -1).transpose(1, 2) for x in (query, key, value))
            bias = position_bias(table, length).expand(count, -1, -1, -1)
            output = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)  # (K, H, L, d)
            mixed[part] = output.transpose(1, 2).reshape(count * length, -1)
        _add(rows, functional.linear(mixed, weights["attn.o"]))


def add_feed_forward(hidden: torch.Tensor, packs: Iterable[Pack], weights: Weights) -> None:
    """Add the gated feed forward half to every token, (N, D) in place."""
    for pack in packs:
        rows = hidden[pack.begin : pack.end]
        normed = rms_norm(rows, weights["norm2"])
        gate = functional.gelu(functional.linear(normed, weights["ffn.gate.0"]), approximate="tanh")
        inner = gate.mul_(functional.linear(normed, weights["ffn.fc1"]))
        _add(rows, functional.linear(inner, weights["ffn.fc2"]))


def _parts(pack: Pack) -> Iterator[tuple[slice, int, int]]:
    """The rows within a pack of each run, its K and its L."""
    begin = 0
    for count, length in pack.runs:
        yield slice(begin, begin + count * length), count, length
        begin += count * length


def _add(rows: torch.Tensor, more: torch.Tensor) -> None:
    """Add in place; in float16 what has become infinite is brought back, as transformers does."""
    rows += more
    if rows.dtype == torch.float16:
        largest = torch.finfo(rows.dtype).max
        rows.clamp_(-largest, largest)


def position_bias(table: torch.Tensor, length: int) -> torch.Tensor:
    """What is added to the scores of a caption of `length` tokens.

    Args:
        table: (buckets, H), of one block.
        length: L.

    Returns:
        (H, L, L) by head, query and key.
    """
    by_distance = table[position_buckets(length, len(table)).to(table.device)].T  # (H, 2 L - 1), from 1 - L to L - 1
    return by_distance.unfold(1, length, 1).flip(1)


def position_buckets(length: int, num_buckets: int) -> torch.Tensor:
    """The bucket of each distance (key - query) from 1 - length to length - 1, as T5 has them (arXiv:1910.10683).

    Half of the buckets are for keys that come later. In each half, half of them are for single distances; the others
    grow as the logarithm up to `MAX_DISTANCE`.

    >>> position_buckets(4, 8).tolist()
    [2, 2, 1, 0, 5, 6, 6]
    """
    distance = torch.arange(1 - length, length)
    half = num_buckets // 2
    exact = half // 2
    later = (distance > 0) * half
    distance = distance.abs()
    far = torch.log(distance.float() / exact) / math.log(MAX_DISTANCE / exact) * (half - exact)
    grown = (exact + far.clamp_min(0).long()).clamp_max(half - 1)
    return later + torch.where(distance < exact, distance, grown)
