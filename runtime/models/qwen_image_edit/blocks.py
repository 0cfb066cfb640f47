"""One block of Qwen-Image's transformer on the weights of diffusers' module: joint attention, and two feed-forwards.

The tokens of all items' pictures lie in one row after the other, and behind them those of their texts: (T, D). Norms
and gates see the runs of tokens that share a timestep, linear layers the part that is theirs, attention the items. So
items of different sizes go through the model together, and nothing is padded.

Letters in shapes: B items, T tokens of all of them, D width of the model, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from torch import Tensor, nn
from torch.nn import functional

from wangen.runtime.fast.attention import Kernel, Stash
from wangen.runtime.fast.dit_elementwise import Elementwise
from wangen.runtime.fast.dit_linear import Layers
from wangen.runtime.fast.dit_shared import StepBlock
from wangen.runtime.models.compute import Tricks


@dataclass(frozen=True)
class Tokens:
    """How the tokens of a step divide.

    Attributes:
        pictures: tokens of each item's pictures, the target's before those of the control images.
        texts: tokens of each item's text.
        runs: tokens of each run that shares a timestep, of the pictures and then of the texts, one for each.
        times: for each run of the pictures the number of its timestep.
        picture_turns: complex numbers of the positions, (tokens of one item, channels of a head / 2) where items are
            alike, else (tokens of all, ...).
        text_turns: likewise of the texts.
    """

    pictures: tuple[int, ...]
    texts: tuple[int, ...]
    runs: tuple[int, ...]
    times: Tensor
    picture_turns: Tensor
    text_turns: Tensor

    def parts(self) -> list[tuple[int, int, int]]:
        """What attention takes at once: how many items, and for each the tokens of text and of pictures."""
        sizes = list(zip(self.texts, self.pictures, strict=True))
        if len(set(sizes)) == 1:
            return [(len(sizes), *sizes[0])]
        return [(1, *size) for size in sizes]


class Beside(NamedTuple):
    """What a block takes beside the tokens; it may have a gradient where something before the blocks is trained.

    Attributes:
        times: the timesteps' embedding behind its SiLU, (timesteps, D): one for each item, then that of clean images.
    """

    times: Tensor


def linears_of(block: QwenImageTransformerBlock) -> dict[str, list[nn.Module]]:
    """A block's linear layers by what they are called here, those together that share an input."""
    attention = block.attn
    return {
        "picture": [attention.to_q, attention.to_k, attention.to_v],
        "text": [attention.add_q_proj, attention.add_k_proj, attention.add_v_proj],
        "picture_numbers": [block.img_mod[1]],
        "text_numbers": [block.txt_mod[1]],
        "picture_out": [attention.to_out[0]],
        "text_out": [attention.to_add_out],
        "picture_up": [block.img_mlp.net[0].proj],
        "picture_down": [block.img_mlp.net[2]],
        "text_up": [block.txt_mlp.net[0].proj],
        "text_down": [block.txt_mlp.net[2]],
    }


class Block(StepBlock):
    """One block for one step.

    Args:
        block: diffusers' module.
        layers: its linear layers as they are in this step.
        times: of `Beside`.
        tokens: how the tokens divide.
        kernel: of attention.
        tricks: which short cuts are taken.
        elementwise: how norms and gates are computed.
        stash: where the output of attention is kept for the recomputation; None keeps nothing.
        swapped: its weights come and go.
    """

    def __init__(
        self,
        block: QwenImageTransformerBlock,
        layers: Layers,
        times: Tensor,
        tokens: Tokens,
        kernel: Kernel,
        tricks: Tricks,
        elementwise: Elementwise,
        stash: Stash | None = None,
        *,
        swapped: bool = False,
    ) -> None:
        super().__init__(block, linears_of(block), Beside(times), layers, kernel, tricks, elementwise, stash, swapped)
        self._block, self._tokens = block, tokens

    @property
    def trains_numbers(self) -> bool:
        """Whether its shifts, scales and gates get a gradient."""
        modules = (self._block.img_mod, self._block.txt_mod)
        return self.beside.times.requires_grad or any(
            parameter.requires_grad for module in modules for parameter in module.parameters()
        )

    def _run(self, hidden: Tensor, beside: Beside, *, valued: bool) -> Tensor:
        shift, scale, gate, forward_shift, forward_scale, forward_gate = self._numbers(beside.times).unbind(1)
        valued = valued or self.trains_numbers  # a gate that is trained looks at what it lets through
        runs, by = self._tokens.runs, self._elementwise
        normed = by.modulated(hidden, scale + 1, shift, self._block.img_norm1.eps, runs)
        hidden = by.gated(hidden, self._attention(normed), gate, runs, True)
        normed = by.modulated(hidden, forward_scale + 1, forward_shift, self._block.img_norm2.eps, runs)
        return by.gated(hidden, self._feed_forward(normed, valued=valued), forward_gate, runs, valued)

    def _numbers(self, times: Tensor) -> Tensor:
        """Shifts, scales and gates of every run, (runs, 6, D) in float32."""
        times = times.view_as(times)  # so that gradients add up block by block, recomputed or not
        pictures = self._linear("picture_numbers", times)[self._tokens.times]
        texts = self._linear("text_numbers", times[: len(self._tokens.texts)])
        return torch.cat([pictures, texts]).float().view(-1, 6, times.shape[1])

    def _attention(self, normed: Tensor) -> Tensor:
        attention, tokens = self._block.attn, self._tokens
        pictures, texts = self._streams(normed)
        of_pictures = self._turned("picture", pictures, attention.norm_q, attention.norm_k, tokens.picture_turns)
        of_texts = self._turned("text", texts, attention.norm_added_q, attention.norm_added_k, tokens.text_turns)
        texts, pictures = self._attend(of_texts, of_pictures)
        return torch.cat([self._linear("picture_out", pictures), self._linear("text_out", texts)])

    def _turned(
        self, stream: str, tokens: Tensor, query_norm: nn.RMSNorm, key_norm: nn.RMSNorm, turns: Tensor
    ) -> list[Tensor]:
        """Queries and keys, normed head by head and turned by their positions, and values: (tokens, D) each."""
        query, key, value = self._project(stream, tokens)
        rms = self._elementwise.rms
        assert query_norm.eps is not None
        assert key_norm.eps is not None
        query = rms(query, query_norm.weight, turns, query_norm.eps)
        return [query, rms(key, key_norm.weight, turns, key_norm.eps), value]

    def _attend(self, texts: Sequence[Tensor], pictures: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Queries, keys and values of both streams -> what each item's tokens found among all of its own."""
        parts = self._tokens.parts()
        text_parts = zip(
            *(one.split_with_sizes([items * length for items, length, _ in parts]) for one in texts), strict=True
        )
        picture_parts = zip(
            *(one.split_with_sizes([items * size for items, _, size in parts]) for one in pictures), strict=True
        )
        found = []
        for (items, *lengths), *streams in zip(parts, text_parts, picture_parts, strict=True):
            query, key, value = (
                torch.cat([one.reshape(items, length, -1) for one, length in zip(pair, lengths, strict=True)], dim=1)
                for pair in zip(*streams, strict=True)
            )
            attended = self._kernel_on(query, key, value, self._block.attn.heads)
            found.append([one.flatten(0, 1) for one in attended.split_with_sizes(lengths, 1)])
        if len(found) == 1:
            return found[0][0], found[0][1]
        return torch.cat([text for text, _ in found]), torch.cat([picture for _, picture in found])

    def _feed_forward(self, normed: Tensor, *, valued: bool) -> Tensor:
        outputs = []
        for stream, tokens in zip(("picture", "text"), self._streams(normed), strict=True):
            widened = functional.gelu(self._linear(f"{stream}_up", tokens), approximate="tanh")
            outputs.append(self._linear(f"{stream}_down", widened, valued=valued))
        return torch.cat(outputs)

    def _streams(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(T, D) -> the tokens of the pictures, and those of the texts."""
        pictures, texts = tokens.split_with_sizes([sum(self._tokens.pictures), sum(self._tokens.texts)])
        return pictures, texts
