"""One block of Wan's transformer on the weights of diffusers' module: self attention, cross attention, feed forward.

Tokens of all items lie in one row after the other, (T, D): linear layers see one long input, norms and gates the runs
of tokens that share a timestep, attention the items. So items of different sizes may be packed into one pass.

Letters in shapes: B items, T tokens of all of them, N tokens of one, D width of the model, H heads, L rows of text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from wangen.runtime.fast.attention import Kernel, Stash
from wangen.runtime.fast.dit_by_hand import BlockByHand
from wangen.runtime.fast.dit_elementwise import FUSED, Elementwise, Modulation
from wangen.runtime.fast.dit_linear import Layers, base_of, lay_side_by_side
from wangen.runtime.fast.dit_shared import StepBlock
from wangen.runtime.fast.dit_token_wise import Other, Piece, TokenWise
from wangen.runtime.libraries import WanTransformerBlock
from wangen.runtime.memory.swap import spread
from wangen.runtime.models.compute import Tricks


@dataclass(frozen=True)
class Tokens:
    """How the tokens of a step divide.

    Attributes:
        items: tokens of each item.
        runs: tokens of each run that shares a timestep, in order; no run goes over two items.
        rotations: (N, channels of a head / 2) complex numbers of the positions where items have one size, else (T, …).
        text: (B, L, D) projected rows of text.
        text_bias: (B, 1, 1, L) or None.
        images: (B, tokens, D) projected image tokens of Wan 2.1 image-to-video, or None.
        pieces: what of the tokens goes through the second half of a block together.
    """

    items: tuple[int, ...]
    runs: tuple[int, ...]
    rotations: Tensor
    text: Tensor
    text_bias: Tensor | None
    images: Tensor | None
    pieces: tuple[Piece, ...]

    def to(self, dtype: torch.dtype) -> "Tokens":
        """The same with what the layers read in another dtype."""
        return replace(self, text=self.text.to(dtype), images=None if self.images is None else self.images.to(dtype))

    @property
    def alike(self) -> bool:
        """Whether all items have the same number of tokens."""
        return len(set(self.items)) == 1


class Beside(NamedTuple):
    """What a block takes beside the tokens; it may have a gradient where something before the blocks is trained.

    Attributes:
        conditions: the timesteps' projection (runs, 6, D) in float32.
        text: (B, L, D) projected rows of text.
        images: (B, tokens, D) projected image tokens of Wan 2.1 image-to-video, or None.
    """

    conditions: Tensor
    text: Tensor
    images: Tensor | None


def linears_of(block: WanTransformerBlock) -> dict[str, list[nn.Module]]:
    """A block's linear layers by what they are called here, those together that share an input."""
    own, other = block.attn1, block.attn2
    image = {} if other.add_k_proj is None else {"image": [other.add_k_proj, other.add_v_proj]}
    return {
        "own": [own.to_q, own.to_k, own.to_v],
        "text": [other.to_k, other.to_v],
        **image,
        "own_out": [own.to_out[0]],
        "query": [other.to_q],
        "other_out": [other.to_out[0]],
        "up": [block.ffn.net[0].proj],
        "down": [block.ffn.net[2]],
    }


def lay_resident_groups(transformer: nn.Module, num_swapped: int, free_blocks: int = 0) -> None:
    """Lay together what shares an input in all blocks that stay on the device, before a copy for parking is made.

    Else they would be moved anew each time that an expert comes back, beside the buffer that they came in.

    Args:
        transformer: with its adapters.
        num_swapped: how many blocks `BlockSwap` will swap.
        free_blocks: so many of the last blocks are not among them.
    """
    blocks = list(transformer.get_submodule("blocks").children())
    swapped = spread(len(blocks) - free_blocks, num_swapped)
    for index, block in enumerate(blocks):
        if index not in swapped:
            for modules in linears_of(block).values():
                lay_side_by_side([base_of(module) for module in modules])


def modulation(block: WanTransformerBlock, conditions: Tensor) -> Modulation:
    """A block's own table plus the timesteps' projection (runs, 6, D) in float32."""
    shift, scale, gate, forward_shift, forward_scale, forward_gate = (block.scale_shift_table + conditions).unbind(1)
    return Modulation(shift, scale + 1, gate, forward_shift, forward_scale + 1, forward_gate)


class Block(StepBlock):
    """One block for one step.

    Args:
        block: diffusers' module.
        linears: of `linears_of`.
        layers: the linear layers as they are in this step.
        conditions: the timesteps' projection (runs, 6, D) in float32.
        tokens: how the tokens divide.
        kernel: of attention.
        tricks: which short cuts are taken.
        elementwise: how norms and gates are computed.
        stash: where the output of self attention is kept for the recomputation; None keeps nothing.
        swapped: its weights come and go.
    """

    def __init__(
        self,
        block: WanTransformerBlock,
        linears: Mapping[str, Sequence[nn.Module]],
        layers: Layers,
        conditions: Tensor,
        tokens: Tokens,
        kernel: Kernel,
        tricks: Tricks,
        elementwise: Elementwise,
        stash: Stash | None = None,
        *,
        swapped: bool = False,
    ) -> None:
        beside = Beside(conditions, tokens.text, tokens.images)
        super().__init__(block, linears, beside, layers, kernel, tricks, elementwise, stash, swapped)
        self._block, self._tokens = block, tokens

    @property
    def trains_numbers(self) -> bool:
        """Whether its shifts, scales and gates get a gradient."""
        return bool(self._block.scale_shift_table.requires_grad or self.beside.conditions.requires_grad)

    def _run(self, hidden: Tensor, beside: Beside, *, valued: bool) -> Tensor:
        numbers = modulation(self._block, beside.conditions)
        if self._is_for_hand(beside):
            return self._by_hand(numbers, beside)(hidden)
        valued = valued or self.trains_numbers  # a gate that is trained looks at what it lets through
        runs, by = self._tokens.runs, self._elementwise
        normed = by.modulated(hidden, numbers.scale, numbers.shift, self._block.norm1.eps, runs)
        hidden = by.gated(hidden, self._self_attention(normed), numbers.gate, runs, True)
        hidden = hidden + self._cross_attention(hidden, beside)
        normed = by.modulated(hidden, numbers.forward_scale, numbers.forward_shift, self._block.norm3.eps, runs)
        return by.gated(hidden, self._feed_forward(normed, valued=valued), numbers.forward_gate, runs, valued)

    def recomputed_back(self, gradient: Tensor, hidden: Tensor, *, has_gradient: bool) -> tuple[Tensor | None] | None:
        """As `StepBlock`."""
        if not self._is_for_hand(self.beside):
            return None
        by_hand = self._by_hand(modulation(self._block, self.beside.conditions), self.beside)
        valued = not self._tricks.short_recompute
        return (by_hand.recomputed_back(gradient, hidden, valued=valued, has_gradient=has_gradient),)

    def _is_for_hand(self, beside: Beside) -> bool:
        """Whether nothing but plain low-rank adapters is trained here, and the ways are taken that it stands for."""
        own, other, norm = self._block.attn1, self._block.attn2, self._block.norm2
        norms = [own.norm_q, own.norm_k, other.norm_q, other.norm_k, norm]
        norms += [] if beside.images is None else [other.norm_added_k]
        weights = [getattr(one, name, None) for one in norms for name in ("weight", "bias")]
        return (
            self._tricks.by_hand
            and self._elementwise is FUSED
            and self._tokens.alike
            and all(len(groups) == 1 and groups[0].is_plain for groups in self.groups.values())
            and not any(one is not None and one.requires_grad for one in (*beside, *weights))
            and not self.trains_numbers
        )

    def _by_hand(self, numbers: Modulation, beside: Beside) -> BlockByHand:
        other, tokens = self._block.attn2, self._tokens
        others = [Other("text", beside.text, other.norm_k, tokens.text_bias)]
        groups = {name: group for name, (group,) in self.groups.items()}
        if beside.images is not None:
            others.append(Other("image", beside.images, other.norm_added_k, None))
        else:
            groups.pop("image", None)  # Wan 2.1 image-to-video may be trained without
        second = TokenWise(self._block, groups, numbers, others, self._kernel, tokens.pieces)
        return BlockByHand(
            self._block, groups, numbers, len(tokens.items), tokens.runs, tokens.rotations, self._kernel, self._stash,
            second,
        )  # fmt: skip

    def _self_attention(self, normed: Tensor) -> Tensor:
        attention = self._block.attn1
        query, key, value = self._project("own", normed)
        rotations = self._tokens.rotations
        query, key = self._rms(attention.norm_q, query, rotations), self._rms(attention.norm_k, key, rotations)
        attended = self._attend(query, key, value, attention.heads)
        return self._linear("own_out", attended)

    def _cross_attention(self, hidden: Tensor, beside: Beside) -> Tensor:
        attention, norm = self._block.attn2, self._block.norm2
        by = self._elementwise
        normed = hidden if isinstance(norm, nn.Identity) else by.norm(hidden, norm.weight, norm.bias, norm.eps)
        query = self._rms(attention.norm_q, self._linear("query", normed), None)
        attended = self._look(query, beside.text, "text", attention.norm_k, self._tokens.text_bias)
        if beside.images is not None:
            attended = attended + self._look(query, beside.images, "image", attention.norm_added_k, None)
        return self._linear("other_out", attended)

    def _feed_forward(self, normed: Tensor, *, valued: bool) -> Tensor:
        widened = functional.gelu(self._linear("up", normed), approximate="tanh")
        return self._linear("down", widened, valued=valued)

    def _look(self, query: Tensor, others: Tensor, pair: str, norm: nn.RMSNorm, bias: Tensor | None) -> Tensor:
        """Attention of the tokens (T, D) to other tokens (B, L, D) of the same item."""
        key, value = self._project(pair, others.flatten(0, 1))
        key = self._rms(norm, key, None).view(others.shape)
        return self._attend(query, key, value.view(others.shape), self._block.attn2.heads, bias)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, heads: int, bias: Tensor | None = None) -> Tensor:
        """Attention of each item by itself: (T, D), with keys and values (T, D) or (B, L, D) -> (T, D)."""
        own = key.ndim == 2
        items = self._tokens.items
        if self._tokens.alike:
            shape = (len(items), items[0], -1)
            if own:
                key, value = key.reshape(shape), value.reshape(shape)
            return self._kernel_on(query.reshape(shape), key, value, heads, bias, own=own).flatten(0, 1)
        pieces = list(items)
        keys, values = (torch.split(part, pieces) if own else part.unbind(0) for part in (key, value))
        biases = [None] * len(items) if bias is None else torch.split(bias, 1)
        rows = zip(torch.split(query, pieces), keys, values, biases, strict=True)
        return torch.cat([self._kernel_on(q[None], k[None], v[None], heads, b, own=own)[0] for q, k, v, b in rows])

    def _rms(self, norm: nn.RMSNorm, inputs: Tensor, rotations: Tensor | None) -> Tensor:
        assert norm.eps is not None
        return self._elementwise.rms(inputs, norm.weight, rotations, norm.eps)
