"""A whole block of Wan's transformer as one function of autograd, its gradients written out.

What it computes are the functions of `dit_functions` and `dit_norms`, one after the other, as `dit_blocks.Block` does.
But autograd then looks at a block once, in place of a dozen times with each time's bookkeeping in Python, which is most
of a step of small pictures: for them the processor, not the GPU, is the limit. It serves blocks of which nothing is
trained but plain low-rank adapters, with frozen weights of any kind, resident or not.

Self attention is here; what follows it, and is done in pieces where there are many tokens, is in `dit_token_wise`.

Letters in shapes: B items, T tokens of all of them, N tokens of one, D width of the model, H heads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from wangen.runtime.fast.attention import Kernel, Stash
from wangen.runtime.fast.dit_elementwise import Modulation
from wangen.runtime.fast.dit_functions import anchor, apply
from wangen.runtime.fast.dit_linear import Group
from wangen.runtime.fast.dit_norms import Moments, gated, gated_back, rms_rotary, rms_rotary_back
from wangen.runtime.fast.dit_parts import Attention, modulated, modulated_back, needed
from wangen.runtime.fast.dit_token_wise import Look, TokenWise
from wangen.runtime.libraries import WanTransformerBlock


@dataclass
class Kept:
    """What a block keeps for its backward pass.

    Attributes:
        own: of self attention; nothing where nothing up to there has a gradient.
        looks: keys and values of text and image.
        pieces: of each piece of the second half.
    """

    own: list[Any] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    pieces: list[list[Any]] = field(default_factory=list)


class BlockByHand:
    """One block for one step.

    Args:
        module: diffusers' block.
        groups: its linear layers by name, each name with one group.
        numbers: of the timesteps.
        items: how many, all with as many tokens.
        runs: tokens of each run that shares a timestep.
        rotations: (N or T, channels of a head / 2) complex numbers of the positions, as `Tokens` has them.
        kernel: of attention.
        stash: where the output of self attention is kept for the recomputation; None keeps nothing.
        second: the half of the block after self attention.

    Attributes:
        trained: the adapters' weights.
    """

    def __init__(
        self,
        module: WanTransformerBlock,
        groups: Mapping[str, Group],
        numbers: Modulation,
        items: int,
        runs: Sequence[int],
        rotations: Tensor,
        kernel: Kernel,
        stash: Stash | None,
        second: TokenWise,
    ) -> None:
        self._module = module
        self._groups = groups
        self._numbers = numbers
        self._runs = runs
        self._rotations = rotations
        self._attention = Attention(kernel, module.attn1.heads, items)
        self._stash = stash
        self._second = second
        self.trained = [tensor for group in groups.values() for tensor in group.adapters.trained]

    def __call__(self, hidden: Tensor) -> Tensor:
        """(T, D) -> (T, D)."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (hidden, *self.trained)):
            output: Tensor = apply(_ByHand, anchor(hidden.device), hidden, self)
            return output
        return self.forward(hidden, None)

    def forward(self, hidden: Tensor, kept: Kept | None, *, has_gradient: bool = True) -> Tensor:
        """(T, D) -> (T, D). What `backward` needs is put into `kept`, unless that is None.

        That is nothing of those first parts of the block in which nothing is trained, if the input has no gradient.
        """
        second = self._second
        middle, looks, has_gradient = self._first(hidden, kept, has_gradient=has_gradient)
        output = None if len(second.pieces) == 1 else torch.empty_like(middle)
        for piece in second.pieces:
            of_piece: list[Any] | None = None if kept is None else []
            place = None if output is None else output[piece.tokens]
            part = second.forward(
                piece.of(middle, piece.tokens), piece, looks, of_piece, has_gradient=has_gradient, output=place
            )
            if kept is not None and of_piece is not None:
                kept.pieces.append(of_piece)
        return part if output is None else output

    def backward(self, gradient: Tensor, kept: Kept, *, has_gradient: bool) -> Tensor | None:
        """The gradient of the input (T, D), if it `has_gradient`. Those of the adapters are added to theirs.

        What was kept is taken out of `kept`, and let go as soon as it has served.
        """
        pieces = (kept.pieces.pop(0) for _ in self._second.pieces)
        return self._backward(gradient, kept, pieces, has_gradient=has_gradient)

    def recomputed_back(self, gradient: Tensor, hidden: Tensor, *, valued: bool, has_gradient: bool) -> Tensor | None:
        """From the input (T, D) and the output's gradient (T, D) that of the input, if it `has_gradient`.

        Each piece of the second half is computed again just before its gradients are. Those of the adapters are added
        to theirs.
        """
        kept = Kept()
        pieces = self._again(hidden, kept, valued=valued, has_gradient=has_gradient)
        return self._backward(gradient, kept, pieces, has_gradient=has_gradient)

    def _first(self, hidden: Tensor, kept: Kept | None, *, has_gradient: bool) -> tuple[Tensor, list[Look], bool]:
        """What comes before the second half: its input (T, D), what it looks at, and whether that has a gradient."""
        has_gradient = has_gradient or any(self._groups[name].adapters.present for name in ("own", "own_out"))
        middle = self._own(hidden, kept.own if kept is not None and has_gradient else None)
        looks = self._second.looks()
        if kept is not None:
            kept.looks = looks
        return middle, looks, has_gradient or self._second.looks_are_trained

    def _again(self, hidden: Tensor, kept: Kept, *, valued: bool, has_gradient: bool) -> Iterator[list[Any]]:
        """The forward pass once more; what each piece keeps, one after the other."""
        second = self._second
        middle, looks, has_gradient = self._first(hidden, kept, has_gradient=has_gradient)
        for piece in second.pieces:
            of_piece: list[Any] = []
            part = piece.of(middle, piece.tokens)
            second.forward(part, piece, looks, of_piece, valued=valued, has_gradient=has_gradient)
            yield of_piece

    def _backward(
        self, gradient: Tensor, kept: Kept, pieces: Iterator[list[Any]], *, has_gradient: bool
    ) -> Tensor | None:
        """As `backward`, with what each piece keeps coming when it is asked for."""
        second, to_middle = self._second, None
        for of_piece, piece in zip(pieces, second.pieces, strict=True):
            part = second.back(piece.of(gradient, piece.tokens), piece, kept.looks, of_piece)
            if part is None or piece.is_all:
                to_middle = part
                continue
            to_middle = torch.empty_like(gradient) if to_middle is None else to_middle
            to_middle[piece.tokens] = part
        if to_middle is None:
            return None
        del part
        second.looks_back(kept.looks)
        kept.looks.clear()
        return self._own_back(to_middle, kept.own, has_gradient=has_gradient) if kept.own else None

    def _own(self, hidden: Tensor, kept: list[Any] | None) -> Tensor:
        """Self attention."""
        own, numbers = self._module.attn1, self._numbers
        normed, moments = self._normed(hidden)
        (query, key, value), images = self._groups["own"].run(normed)
        both, weights = _pair(query, key), torch.stack([own.norm_q.weight, own.norm_k.weight])
        turned, roots = rms_rotary(both, weights, self._rotations, own.norm_q.eps)
        query, key = turned.chunk(2, 1)
        inputs = needed(normed, images) if len(self._second.pieces) == 1 else None  # of many tokens made again
        if kept is None or inputs is None:
            del normed
        attended, to_parts = self._attention(query, key, value, stash=self._stash, keeps=kept is not None)
        (branch,), low = self._groups["own_out"].run(attended)
        if kept is not None:
            ours = inputs, images, both, weights, roots, to_parts, needed(attended, low), low
            kept.append((hidden, moments, *ours))
        return gated(hidden, branch, numbers.gate, self._runs, output=branch)

    def _own_back(self, gradient: Tensor, kept: list[Any], *, has_gradient: bool) -> Tensor | None:
        hidden, moments, normed, images, both, weights, roots, to_parts, attended, low = kept.pop()
        numbers = self._numbers
        to_branch = gated_back(gradient, numbers.gate, self._runs)
        to_attended = self._groups["own_out"].back(attended, low, [to_branch])
        assert to_attended is not None
        del attended, to_branch
        to_query, to_key, to_value = self._attention.back(to_parts, to_attended)
        del to_parts, to_attended
        to_both = torch.stack([to_query, to_key], 2).view(both.shape)
        del to_query, to_key
        to_both = rms_rotary_back(to_both, both, roots, weights, self._rotations)
        del both
        if normed is None and images is not None:
            normed, _ = self._normed(hidden)
        slopes = [*to_both.chunk(2, 1), to_value.reshape(gradient.shape)]
        to_normed = self._groups["own"].back(normed, images, slopes, has_gradient=has_gradient)
        if to_normed is None:
            return None
        return modulated_back(to_normed, hidden, moments, numbers.scale, self._runs).add_(gradient)

    def _normed(self, hidden: Tensor) -> tuple[Tensor, list[Moments]]:
        """The input of self attention's layers, (T, D)."""
        numbers = self._numbers
        return modulated(hidden, numbers.scale, numbers.shift, self._module.norm1.eps, self._runs)


def _pair(left: Tensor, right: Tensor) -> Tensor:
    """Two tensors (T, D) as (T, 2 D), without a copy where they lie so."""
    width, stride = left.shape[1], left.stride()
    beside = right.data_ptr() == left.data_ptr() + width * left.element_size() and right.stride() == stride
    if beside and stride[0] >= 2 * width and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr():
        return left.as_strided((len(left), 2 * width), stride)
    return torch.cat([left, right], 1)


class _ByHand(torch.autograd.Function):
    """A block; what it keeps for its gradients lies beside autograd, which knows its input and output alone."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, hidden: Tensor, block: BlockByHand) -> Tensor:
        """(T, D) -> (T, D)."""
        ctx.block, ctx.kept = block, Kept()
        return block.forward(hidden, ctx.kept, has_gradient=ctx.needs_input_grad[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """(T, D) -> the gradient of the input."""
        return None, ctx.block.backward(gradient, ctx.kept, has_gradient=ctx.needs_input_grad[1]), None
