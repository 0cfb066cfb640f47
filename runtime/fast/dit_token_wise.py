"""The second half of a block of Wan by hand: attention to text and image, and feed forward.

What a token becomes here depends on no other token. So the tokens of long clips go through it in pieces, and its widest
tensors, those inside the feed-forward layer, are there for one piece at a time: forward, and when gradients are taken.

Letters in shapes: B items, T tokens of a piece, D width of the model, L rows of text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wangen.runtime.fast.attention import Kernel
from wangen.runtime.fast.dit_elementwise import Modulation
from wangen.runtime.fast.dit_functions import cast
from wangen.runtime.fast.dit_linear import Group
from wangen.runtime.fast.dit_norms import gated, gated_back, layer_norm, layer_norm_back, rms_rotary_back
from wangen.runtime.fast.dit_parts import Attention, modulated, modulated_back, needed, rms
from wangen.runtime.libraries import WanTransformerBlock

_aten = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """Tokens that go through the second half of a block together.

    Attributes:
        tokens: which, of those of all items.
        items: whose they are.
        times: the numbers of the runs that they lie in; a run shares a timestep.
        runs: how many of them lie in each.
        is_all: there is no other piece.
    """

    tokens: slice
    items: slice
    times: slice
    runs: tuple[int, ...]
    is_all: bool

    def of(self, tensor: Tensor, part: slice) -> Tensor:
        """What of a tensor is this piece's: rows of its `tokens`, `items` or `times`."""
        return tensor if self.is_all else tensor[part]


def cut(items: Sequence[int], runs: Sequence[int], count: int) -> tuple[Piece, ...]:
    """Tokens in so many pieces, or some more, each of whole items or of a part of one.

    Args:
        items: tokens of each item; the same number, but for one piece.
        runs: tokens of each run that shares a timestep; none goes over two items.
        count: of pieces.

    >>> [piece.tokens for piece in cut([40], [40], 3)]
    [slice(0, 14, None), slice(14, 28, None), slice(28, 40, None)]
    >>> [(piece.items, piece.times, piece.runs) for piece in cut([8, 8], [2, 6, 8], 4)][:2]
    [(slice(0, 1, None), slice(0, 2, None), (2, 2)), (slice(0, 1, None), slice(1, 2, None), (4,))]
    """
    num_items, length = len(items), items[0]
    if count == 1:
        return (Piece(slice(0, sum(items)), slice(0, num_items), slice(0, len(runs)), tuple(runs), is_all=True),)
    if count <= num_items:
        step = num_items // count * length
        starts = list(range(0, num_items * length, step))
    else:
        step = -(-length // -(-count // num_items))
        step += -step % (1 << max(0, step.bit_length() - 5))  # round numbers suit the products
        starts = [item * length + start for item in range(num_items) for start in range(0, length, step)]
    stops = [*starts[1:], num_items * length]
    return tuple(_piece(start, stop, length, runs) for start, stop in zip(starts, stops, strict=True))


def _piece(start: int, stop: int, length: int, runs: Sequence[int]) -> Piece:
    inside, first, at = [], 0, 0
    for run in runs:
        if at + run <= start:
            first += 1
        elif at < stop:
            inside.append(min(at + run, stop) - max(at, start))
        at += run
    items = slice(start // length, -(-stop // length))
    return Piece(slice(start, stop), items, slice(first, first + len(inside)), tuple(inside), is_all=False)


@dataclass(frozen=True)
class Other:
    """What tokens look at beside themselves: the text, or the image of Wan 2.1 image-to-video.

    Attributes:
        name: of the group of its keys' and values' layers.
        rows: (B, L, D)
        norm: of the keys.
        bias: (B, 1, 1, L) or None.
    """

    name: str
    rows: Tensor
    norm: nn.RMSNorm
    bias: Tensor | None


@dataclass
class Look:
    """Keys and values of one `Other`, which all pieces look at.

    Attributes:
        other: it.
        key: (B, L, D)
        value: (B, L, D)
        kept: what their gradients need: the rows (B L, D) and their low-rank images, if they do, the keys (B L, D)
            before their norm, and its reciprocal roots.
        slopes: the gradients of `key` and `value`, as far as pieces have been.
    """

    other: Other
    key: Tensor
    value: Tensor
    kept: tuple[Tensor | None, Tensor | None, Tensor, Tensor]
    slopes: tuple[Tensor, Tensor] | None = None

    def add(self, to_key: Tensor, to_value: Tensor, piece: Piece) -> None:
        """The gradients of keys and values of one piece, (items, L, H, D / H) each."""
        found = to_key.flatten(2), to_value.flatten(2)
        if piece.is_all:
            self.slopes = found
            return
        if self.slopes is None:
            zeros = torch.zeros(self.key.shape, device=self.key.device)
            self.slopes = zeros, zeros.clone()
        for total, more in zip(self.slopes, found, strict=True):
            total[piece.items] += more


class TokenWise:
    """The second half of one block for one step.

    Args:
        module: diffusers' block.
        groups: its linear layers by name, each name with one group.
        numbers: of the timesteps.
        others: what the tokens look at beside themselves.
        kernel: of attention.
        pieces: of all tokens.

    Attributes:
        pieces: the same.
    """

    def __init__(
        self,
        module: WanTransformerBlock,
        groups: Mapping[str, Group],
        numbers: Modulation,
        others: Sequence[Other],
        kernel: Kernel,
        pieces: Sequence[Piece],
    ) -> None:
        self._module = module
        self._groups = groups
        self._numbers = numbers
        self._others = others
        self._kernel = kernel
        self.pieces = pieces

    @property
    def looks_are_trained(self) -> bool:
        """Whether an adapter of attention to text or image is there."""
        names = ("query", *(one.name for one in self._others), "other_out")
        return any(self._groups[name].adapters.present for name in names)

    def looks(self) -> list[Look]:
        """Keys and values of text and image."""
        found = []
        for one in self._others:
            rows = one.rows.flatten(0, 1)
            (key, value), images = self._groups[one.name].run(rows)
            turned, root = rms(one.norm, key)
            shape = one.rows.shape
            kept = needed(rows, images), images, key, root
            found.append(Look(one, turned.view(shape), value.reshape(shape), kept))
        return found

    def looks_back(self, looks: Sequence[Look]) -> None:
        """The gradients of the adapters of keys and values; `add` was called for all pieces."""
        for look in looks:
            assert look.slopes is not None
            rows, images, key, root = look.kept
            to_key, to_value = (cast(slope, key.dtype).reshape(key.shape) for slope in look.slopes)
            to_key = rms_rotary_back(to_key, key, root, look.other.norm.weight, None)
            self._groups[look.other.name].back(rows, images, [to_key, to_value], has_gradient=False)

    def forward(
        self,
        hidden: Tensor,
        piece: Piece,
        looks: Sequence[Look],
        kept: list[Any] | None,
        *,
        valued: bool = True,
        has_gradient: bool = True,
        output: Tensor | None = None,
    ) -> Tensor:
        """(T, D) -> (T, D) of a piece.

        Args:
            hidden: of the piece.
            piece: which.
            looks: of all items.
            kept: what `back` needs is added to it, unless it is None.
            valued: the value is looked at, not its gradients alone; else it may be zeros.
            has_gradient: attention to text and image takes part in the backward pass.
            output: (T, D) to write to; None takes new memory.
        """
        hidden = self._look(hidden, piece, looks, kept if has_gradient else None)
        return self._feed_forward(hidden, piece, kept, valued=valued, output=output)

    def back(self, gradient: Tensor, piece: Piece, looks: Sequence[Look], kept: list[Any]) -> Tensor | None:
        """The gradient of a piece's input (T, D), or None where nothing was kept for it.

        What was kept is taken out of `kept`, and let go as soon as it has served.
        """
        gradient = self._feed_forward_back(gradient, piece, kept)
        return self._look_back(gradient, piece, looks, kept) if kept else None

    def _look(self, hidden: Tensor, piece: Piece, looks: Sequence[Look], kept: list[Any] | None) -> Tensor:
        """Attention to the text, and to the image."""
        attention, norm = self._attention(piece), self._module.norm2
        normed, moments = hidden, None
        if not isinstance(norm, nn.Identity):
            normed, moments = layer_norm(hidden, norm.weight, norm.bias, norm.eps)
        (query,), images = self._groups["query"].run(normed)
        turned, root = rms(self._module.attn2.norm_q, query)
        attended, to_parts = None, []
        for look in looks:
            bias = None if look.other.bias is None else piece.of(look.other.bias, piece.items)
            key, value = piece.of(look.key, piece.items), piece.of(look.value, piece.items)
            seen, back = attention(turned, key, value, bias=bias, keeps=kept is not None)
            attended = seen if attended is None else attended + seen
            to_parts.append(back)
        assert attended is not None
        (branch,), low = self._groups["other_out"].run(attended)
        if kept is not None:
            ours = needed(normed, images), images, query, root, to_parts, needed(attended, low), low
            kept.append((hidden, moments, *ours))
        return branch.add_(hidden)

    def _look_back(self, gradient: Tensor, piece: Piece, looks: Sequence[Look], kept: list[Any]) -> Tensor:
        hidden, moments, normed, images, query, root, to_parts, attended, low = kept.pop()
        attention, norm = self._attention(piece), self._module.norm2
        to_attended = self._groups["other_out"].back(attended, low, [gradient])
        assert to_attended is not None
        del attended
        to_turned = None
        for look in looks:
            to_query, to_key, to_value = attention.back(to_parts.pop(0), to_attended)
            look.add(to_key, to_value, piece)
            to_turned = to_query if to_turned is None else to_turned + to_query
        assert to_turned is not None
        del to_attended, to_query
        to_query = rms_rotary_back(to_turned.reshape(query.shape), query, root, self._module.attn2.norm_q.weight, None)
        del query, to_turned
        to_hidden = self._groups["query"].back(normed, images, [to_query])
        assert to_hidden is not None
        if moments is not None:
            to_hidden = layer_norm_back(to_hidden, hidden, moments, norm.weight)
        return to_hidden.add_(gradient)

    def _feed_forward(
        self, hidden: Tensor, piece: Piece, kept: list[Any] | None, *, valued: bool, output: Tensor | None
    ) -> Tensor:
        numbers = self._numbers
        parts = numbers.forward_scale, numbers.forward_shift, numbers.forward_gate
        scale, shift, gate = (piece.of(part, piece.times) for part in parts)
        normed, moments = modulated(hidden, scale, shift, self._module.norm3.eps, piece.runs)
        (widened,), images = self._groups["up"].run(normed)
        active = functional.gelu(widened, approximate="tanh")
        state = (hidden, moments, needed(normed, images), images, widened)
        if kept is None:
            del state, normed, widened
        (branch,), low = self._groups["down"].run(active, valued=valued)
        if kept is not None:
            kept.append((*state, needed(active, low), low))
        return gated(hidden, branch, gate, piece.runs, valued=valued, output=branch if output is None else output)

    def _feed_forward_back(self, gradient: Tensor, piece: Piece, kept: list[Any]) -> Tensor:
        hidden, moments, normed, images, widened, active, low = kept.pop()
        to_branch = gated_back(gradient, piece.of(self._numbers.forward_gate, piece.times), piece.runs)
        to_active = self._groups["down"].back(active, low, [to_branch])
        assert to_active is not None
        del active, to_branch
        to_widened = _aten.gelu_backward(to_active, widened, approximate="tanh")
        del to_active, widened
        to_normed = self._groups["up"].back(normed, images, [to_widened])
        assert to_normed is not None
        del normed, to_widened
        scale = piece.of(self._numbers.forward_scale, piece.times)
        return modulated_back(to_normed, hidden, moments, scale, piece.runs).add_(gradient)

    def _attention(self, piece: Piece) -> Attention:
        return Attention(self._kernel, self._module.attn2.heads, piece.items.stop - piece.items.start)
