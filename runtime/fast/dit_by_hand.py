"""A whole block of Wan's transformer as one function of autograd, its gradients written out.

What it computes are the functions of `dit_functions` and `dit_norms`, one after the other, as `dit_blocks.Block` does.
But autograd then looks at a block once, in place of a dozen times with each time's bookkeeping in Python, which is most
of a step of small pictures: for them the processor, not the GPU, is the limit. It serves blocks of which nothing is
trained but plain low-rank adapters, with frozen weights of any kind, resident or not.

Letters in shapes: B items, T tokens of all of them, N tokens of one, D width of the model, H heads, L rows of text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from wangen.runtime.fast.attention import Kernel, Stash
from wangen.runtime.fast.dit_elementwise import Modulation
from wangen.runtime.fast.dit_functions import apply, cast_like
from wangen.runtime.fast.dit_linear import Group
from wangen.runtime.fast.dit_norms import (
    Moments,
    gated,
    gated_back,
    layer_norm,
    layer_norm_back,
    rms_rotary,
    rms_rotary_back,
)
from wangen.runtime.libraries import WanTransformerBlock

_aten = torch.ops.aten

Trained = dict[str, list[Tensor]]
"""The gradients of adapters by the name of their group, in the order of `Adapters.trained`."""


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


class BlockByHand:
    """One block for one step.

    Args:
        module: diffusers' block.
        groups: its linear layers by name, each name with one group.
        numbers: of the timesteps.
        items: how many, all with as many tokens.
        runs: tokens of each run that shares a timestep.
        rotations: (N, channels of a head / 2) complex numbers of the positions.
        others: what the tokens look at beside themselves.
        kernel: of attention.
        stash: where the output of self attention is kept for the recomputation; None keeps nothing.

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
        others: Sequence[Other],
        kernel: Kernel,
        stash: Stash | None,
    ) -> None:
        self._module = module
        self._groups = groups
        self._numbers = numbers
        self._items = items
        self._runs = runs
        self._rotations = rotations
        self._others = others
        self._kernel = kernel
        self._stash = stash
        self.trained = [tensor for group in groups.values() for tensor in group.adapters.trained]

    def __call__(self, hidden: Tensor, *, valued: bool) -> Tensor:
        """(T, D) -> (T, D); where its value is not looked at, but for its gradients, it may be zeros."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (hidden, *self.trained)):
            output: Tensor = apply(_ByHand, hidden, self, valued, *self.trained)
            return output
        return self.forward(hidden, None, valued=valued)

    def forward(self, hidden: Tensor, kept: list[Any] | None, *, valued: bool, has_gradient: bool = True) -> Tensor:
        """(T, D) -> (T, D). What `backward` needs is added to `kept`, unless that is None.

        That is nothing of those first parts of the block in which nothing is trained, if the input has no gradient.
        """
        others = [one.name for one in self._others]
        for part, names in ((self._own, ["own", "own_out"]), (self._other, ["query", *others, "other_out"])):
            has_gradient = has_gradient or any(self._groups[name].adapters.present for name in names)
            hidden = part(hidden, kept if has_gradient else None)
        return self._forward(hidden, kept, valued=valued)

    def backward(self, gradient: Tensor, kept: list[Any], *, has_gradient: bool) -> tuple[Tensor | None, list[Tensor]]:
        """The gradients of the input (T, D), if it `has_gradient`, and of all adapters.

        What was kept is taken out of `kept`, and let go as soon as it has served.
        """
        trained: Trained = {}
        to_hidden = None
        gradient = self._forward_back(gradient, kept, trained)
        if kept:
            gradient = self._other_back(gradient, kept, trained)
        if kept:
            to_hidden = self._own_back(gradient, kept, trained, has_gradient=has_gradient)
        return to_hidden, [tensor for name in self._groups for tensor in trained.get(name, [])]

    def recomputed_back(self, gradient: Tensor, hidden: Tensor, *, valued: bool, has_gradient: bool) -> Tensor | None:
        """From the input (T, D) and the output's gradient (T, D) that of the input, if it `has_gradient`.

        Those of the adapters are added to theirs here: autograd would make a copy in float32 of each, and take as long
        again to hand it on.
        """
        kept: list[Any] = []
        self.forward(hidden, kept, valued=valued, has_gradient=has_gradient)
        to_hidden, to_trained = self.backward(gradient, kept, has_gradient=has_gradient)
        for tensor, slope in zip(self.trained, to_trained, strict=True):
            if not tensor.requires_grad:
                continue
            if tensor.grad is None:
                tensor.grad = torch.empty_like(tensor).copy_(slope)
            else:
                tensor.grad.add_(slope)
        return to_hidden

    def _own(self, hidden: Tensor, kept: list[Any] | None) -> Tensor:
        """Self attention."""
        own, numbers = self._module.attn1, self._numbers
        normed, moments = self._modulated(hidden, numbers.scale, numbers.shift, self._module.norm1.eps)
        (query, key, value), images = self._groups["own"].run(normed)
        both, weights = _pair(query, key), torch.stack([own.norm_q.weight, own.norm_k.weight])
        turned, roots = rms_rotary(both, weights, self._rotations, own.norm_q.eps)
        query, key = turned.chunk(2, 1)
        attended, to_parts = self._attend(query, key, value, own.heads, None, self._stash, keeps=kept is not None)
        (branch,), low = self._groups["own_out"].run(attended)
        if kept is not None:
            ours = _needed(normed, images), images, both, weights, roots, to_parts, _needed(attended, low), low
            kept.append((hidden, moments, *ours))
        return gated(hidden, branch, numbers.gate, self._runs, output=branch)

    def _own_back(self, gradient: Tensor, kept: list[Any], trained: Trained, *, has_gradient: bool) -> Tensor | None:
        hidden, moments, normed, images, both, weights, roots, to_parts, attended, low = kept.pop()
        own, numbers = self._module.attn1, self._numbers
        to_branch = gated_back(gradient, numbers.gate, self._runs)
        to_attended, trained["own_out"] = self._groups["own_out"].back(attended, low, [to_branch])
        assert to_attended is not None
        del attended, to_branch
        to_query, to_key, to_value = self._parts(to_parts, to_attended, own.heads)
        del to_parts, to_attended
        to_both = torch.stack([to_query, to_key], 2).view(both.shape)
        del to_query, to_key
        to_both = rms_rotary_back(to_both, both, roots, weights, self._rotations)
        del both
        to_normed, trained["own"] = self._groups["own"].back(
            normed, images, [*to_both.chunk(2, 1), to_value.reshape(gradient.shape)], has_gradient=has_gradient
        )
        if to_normed is None:
            return None
        return self._modulated_back(to_normed, hidden, moments, numbers.scale).add_(gradient)

    def _other(self, hidden: Tensor, kept: list[Any] | None) -> Tensor:
        """Attention to the text, and to the image."""
        other, norm = self._module.attn2, self._module.norm2
        normed, moments = hidden, None
        if not isinstance(norm, nn.Identity):
            normed, moments = layer_norm(hidden, norm.weight, norm.bias, norm.eps)
        (query,), images = self._groups["query"].run(normed)
        turned, root = self._rms(other.norm_q, query, None)
        attended, looks = None, []
        for one in self._others:
            rows = one.rows.flatten(0, 1)
            (key, value), low = self._groups[one.name].run(rows)
            turned_key, key_root = self._rms(one.norm, key, None)
            seen, to_parts = self._attend(
                turned, turned_key.view_as(one.rows), value.view(one.rows.shape), other.heads, one.bias, None,
                keeps=kept is not None,
            )  # fmt: skip
            attended = seen if attended is None else attended + seen
            looks.append((_needed(rows, low), low, key, key_root, to_parts))
        assert attended is not None
        (branch,), low = self._groups["other_out"].run(attended)
        if kept is not None:
            kept.append(
                (hidden, moments, _needed(normed, images), images, query, root, looks, _needed(attended, low), low)
            )
        return branch.add_(hidden)

    def _other_back(self, gradient: Tensor, kept: list[Any], trained: Trained) -> Tensor:
        hidden, moments, normed, images, query, root, looks, attended, low = kept.pop()
        other, norm = self._module.attn2, self._module.norm2
        to_attended, trained["other_out"] = self._groups["other_out"].back(attended, low, [gradient])
        assert to_attended is not None
        del attended
        to_turned = None
        for one, (rows, low_rows, key, key_root, to_parts) in zip(self._others, looks, strict=True):
            to_query, to_key, to_value = self._parts(to_parts, to_attended, other.heads)
            to_key = rms_rotary_back(to_key.reshape(key.shape), key, key_root, one.norm.weight, None)
            slopes = [to_key, to_value.reshape(key.shape)]
            _, trained[one.name] = self._groups[one.name].back(rows, low_rows, slopes, has_gradient=False)
            to_turned = to_query if to_turned is None else to_turned + to_query
        assert to_turned is not None
        del looks, to_parts, to_attended
        to_query = rms_rotary_back(to_turned.reshape(query.shape), query, root, other.norm_q.weight, None)
        del query, to_turned
        to_hidden, trained["query"] = self._groups["query"].back(normed, images, [to_query])
        assert to_hidden is not None
        if moments is not None:
            to_hidden = layer_norm_back(to_hidden, hidden, moments, norm.weight)
        return to_hidden.add_(gradient)

    def _forward(self, hidden: Tensor, kept: list[Any] | None, *, valued: bool) -> Tensor:
        """Feed forward."""
        numbers = self._numbers
        normed, moments = self._modulated(hidden, numbers.forward_scale, numbers.forward_shift, self._module.norm3.eps)
        (widened,), images = self._groups["up"].run(normed)
        active = functional.gelu(widened, approximate="tanh")
        state = (hidden, moments, _needed(normed, images), images, widened)
        if kept is None:
            del state, normed, widened
        (branch,), low = self._groups["down"].run(active, valued=valued)
        if kept is not None:
            kept.append((*state, _needed(active, low), low))
        return gated(hidden, branch, numbers.forward_gate, self._runs, valued=valued, output=branch)

    def _forward_back(self, gradient: Tensor, kept: list[Any], trained: Trained) -> Tensor:
        hidden, moments, normed, images, widened, active, low = kept.pop()
        numbers = self._numbers
        to_branch = gated_back(gradient, numbers.forward_gate, self._runs)
        to_active, trained["down"] = self._groups["down"].back(active, low, [to_branch])
        del active, to_branch
        to_widened = _aten.gelu_backward(to_active, widened, approximate="tanh")
        del to_active, widened
        to_normed, trained["up"] = self._groups["up"].back(normed, images, [to_widened])
        assert to_normed is not None
        del normed, to_widened
        return self._modulated_back(to_normed, hidden, moments, numbers.forward_scale).add_(gradient)

    def _modulated(self, hidden: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, list[Moments]]:
        """Adaptive layer norm, (T, D) -> (T, D), and the moments of each run."""
        pieces = [hidden] if len(self._runs) == 1 else hidden.split_with_sizes(list(self._runs))
        normed = [layer_norm(piece, scale[run], shift[run], eps) for run, piece in enumerate(pieces)]
        whole = normed[0][0] if len(normed) == 1 else torch.cat([piece for piece, _ in normed])
        return whole, [moments for _, moments in normed]

    def _modulated_back(self, gradient: Tensor, hidden: Tensor, moments: list[Moments], scale: Tensor) -> Tensor:
        if len(moments) == 1:
            return layer_norm_back(gradient, hidden, moments[0], scale[0])
        parts = (one.split_with_sizes(list(self._runs)) for one in (gradient, hidden))
        return torch.cat([layer_norm_back(*piece) for piece in zip(*parts, moments, scale, strict=True)])

    def _rms(self, norm: nn.RMSNorm, inputs: Tensor, rotations: Tensor | None) -> tuple[Tensor, Tensor]:
        assert norm.eps is not None
        return rms_rotary(inputs, norm.weight, rotations, norm.eps)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        heads: int,
        bias: Tensor | None,
        stash: Stash | None,
        *,
        keeps: bool,
    ) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor]] | None]:
        """(T, D) and keys and values (T, D) or (B, L, D) -> (T, D), and its gradients' function, if it `keeps` that."""
        shape = (self._items, -1, heads, query.shape[-1] // heads)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in (query, key, value))
        to_parts = None
        if keeps:
            output, to_parts = self._kernel.apart(q, k, v, bias, stash)
        else:
            output = self._kernel(q, k, v, bias) if stash is None else self._kernel.kept(q, k, v, stash)
        return output.transpose(1, 2).reshape(query.shape), to_parts

    def _parts(self, to_parts: Callable[[Tensor], Sequence[Tensor]], gradient: Tensor, heads: int) -> Sequence[Tensor]:
        """The gradient of attention's output (T, D) -> those of query, key and value, (B, N or L, H, D / H) each."""
        parts = to_parts(gradient.view(self._items, -1, heads, gradient.shape[-1] // heads).transpose(1, 2))
        return [part.transpose(1, 2) for part in parts]


def _needed(inputs: Tensor, images: Tensor | None) -> Tensor | None:
    """The inputs of layers, if their adapters' gradients need them: where there are low-rank images of them."""
    return None if images is None else inputs


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
    def forward(ctx: Any, hidden: Tensor, block: BlockByHand, valued: bool, *_trained: Tensor) -> Tensor:
        """(T, D) -> (T, D); the adapters' weights are there for autograd to see."""
        ctx.block, ctx.kept = block, []
        return block.forward(hidden, ctx.kept, valued=valued, has_gradient=ctx.needs_input_grad[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """(T, D) -> the gradients of the input and of the adapters."""
        to_hidden, to_trained = ctx.block.backward(gradient, ctx.kept, has_gradient=ctx.needs_input_grad[0])
        return to_hidden, None, None, *cast_like(to_trained, ctx.block.trained)
