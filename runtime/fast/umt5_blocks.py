"""A umT5 block as a function of its weights, for captions of any lengths without padding.

Its matrices come one after another, and each goes over all captions before the next is asked for: two of them are in
memory at a time, the one that is used and the one that is read.

Letters in shapes: N tokens of all captions one behind the other, D width, I width inside a half, H heads, d width of a
head, L tokens of one caption, K captions of one length.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

PARTS = (
    ("norm1", "attn.q"),
    ("attn.k",),
    ("attn.v",),
    ("pos_embedding.embedding", "attn.o"),
    ("norm2", "ffn.gate.0"),
    ("ffn.fc1",),
    ("ffn.fc2",),
)
"""The weights of a block by their official names, in the order in which `run_block` takes them."""

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


def run_block(hidden: torch.Tensor, packs: Sequence[Pack], num_heads: int, parts: Iterator[Weights]) -> None:
    """Put the captions through one block, in place.

    Args:
        hidden: (N, D).
        packs: which rows go through one matrix product.
        num_heads: H.
        parts: the next seven weights are this block's, as in `PARTS`.
    """
    part = next(parts)
    normed = normalize(hidden, packs, part["norm1"])
    query = _project(normed, packs, part["attn.q"])  # (N, I)
    key = _project(normed, packs, next(parts)["attn.k"])
    value = _project(normed, packs, next(parts)["attn.v"])
    part = next(parts)
    for pack in packs:
        rows = slice(pack.begin, pack.end)
        mixed = _attend(query[rows], key[rows], value[rows], pack, part["pos_embedding.embedding"], num_heads)
        _add(hidden[rows], functional.linear(mixed, part["attn.o"]))
    del query, key, value
    part = next(parts)
    normed = normalize(hidden, packs, part["norm2"])
    inner = _project(normed, packs, part["ffn.gate.0"])  # (N, I)
    part = next(parts)
    for pack in packs:
        rows = slice(pack.begin, pack.end)
        gate = functional.gelu(inner[rows], approximate="tanh")
        inner[rows] = gate.mul_(functional.linear(normed[rows], part["ffn.fc1"]))
    del normed
    part = next(parts)
    for pack in packs:
        rows = slice(pack.begin, pack.end)
        _add(hidden[rows], functional.linear(inner[rows], part["ffn.fc2"]))


def normalize(hidden: torch.Tensor, packs: Sequence[Pack], weight: torch.Tensor) -> torch.Tensor:
    """(N, D) -> (N, D), each row divided by its root mean square in float32 and rounded before it is scaled."""
    normed = torch.empty_like(hidden)
    for pack in packs:
        rows = hidden[pack.begin : pack.end]
        inverse = torch.rsqrt(rows.float().pow(2).mean(-1, keepdim=True) + EPSILON)
        normed[pack.begin : pack.end] = weight * (rows * inverse).to(weight.dtype)
    return normed


def _project(normed: torch.Tensor, packs: Sequence[Pack], weight: torch.Tensor) -> torch.Tensor:
    """(N, D) times the transpose of a matrix (I, D) -> (N, I)."""
    result = normed.new_empty(len(normed), len(weight))
    for pack in packs:
        result[pack.begin : pack.end] = functional.linear(normed[pack.begin : pack.end], weight)
    return result


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: Pack, table: torch.Tensor, num_heads: int
) -> torch.Tensor:
    """Attention of each caption of a pack to itself, (rows, I); the scores are not divided by sqrt(d)."""
    mixed = torch.empty_like(query)
    for rows, count, length in _parts(pack):
        q, k, v = (x[rows].view(count, length, num_heads, -1).transpose(1, 2) for x in (query, key, value))
        bias = position_bias(table, length).expand(count, -1, -1, -1)
        output = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)  # (K, H, L, d)
        mixed[rows] = output.transpose(1, 2).reshape(count * length, -1)
    return mixed


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
