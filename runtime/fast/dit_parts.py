"""What both halves of a block by hand (`dit_by_hand`, `dit_token_wise`) are made of, outside autograd.

Letters in shapes: B items, T tokens of all of them, N tokens of one, D width of the model, H heads, L rows of text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wangen.runtime.fast.attention import Kernel, Stash
from wangen.runtime.fast.dit_norms import Moments, layer_norm, layer_norm_back, rms_rotary

ToParts = Callable[[Tensor], Sequence[Tensor]]
"""The gradient of attention's output, (B, H, N, D / H), to those of query, key and value."""


def needed(inputs: Tensor, images: Tensor | None) -> Tensor | None:
    """The inputs of layers, if their adapters' gradients need them: where there are low-rank images of them."""
    return None if images is None else inputs


def modulated(
    hidden: Tensor, scale: Tensor, shift: Tensor, eps: float, runs: Sequence[int]
) -> tuple[Tensor, list[Moments]]:
    """Adaptive layer norm, (T, D) -> (T, D), and the moments of each run; scale and shift (runs, D)."""
    pieces = [hidden] if len(runs) == 1 else hidden.split_with_sizes(list(runs))
    normed = [layer_norm(piece, scale[run], shift[run], eps) for run, piece in enumerate(pieces)]
    whole = normed[0][0] if len(normed) == 1 else torch.cat([piece for piece, _ in normed])
    return whole, [moments for _, moments in normed]


def modulated_back(
    gradient: Tensor, hidden: Tensor, moments: Sequence[Moments], scale: Tensor, runs: Sequence[int]
) -> Tensor:
    """The gradient of the tokens (T, D) that `modulated` took."""
    if len(moments) == 1:
        return layer_norm_back(gradient, hidden, moments[0], scale[0])
    parts = (one.split_with_sizes(list(runs)) for one in (gradient, hidden))
    return torch.cat([layer_norm_back(*piece) for piece in zip(*parts, moments, scale, strict=True)])


def rms(norm: nn.RMSNorm, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """RMS norm without positions, as `rms_rotary`."""
    assert norm.eps is not None
    return rms_rotary(inputs, norm.weight, None, norm.eps)


@dataclass(frozen=True)
class Attention:
    """Attention of so many items of equal length.

    Attributes:
        kernel: computes it.
        heads: H.
        items: B.
    """

    kernel: Kernel
    heads: int
    items: int

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        bias: Tensor | None = None,
        stash: Stash | None = None,
        keeps: bool,
    ) -> tuple[Tensor, ToParts | None]:
        """(T, D) and keys and values (T, D) or (B, L, D) -> (T, D), and its gradients' function, if it `keeps` that."""
        shape = (self.items, -1, self.heads, query.shape[-1] // self.heads)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in (query, key, value))
        to_parts = None
        if keeps:
            output, to_parts = self.kernel.apart(q, k, v, bias, stash)
        else:
            output = self.kernel(q, k, v, bias) if stash is None else self.kernel.kept(q, k, v, stash)
        return output.transpose(1, 2).reshape(query.shape), to_parts

    def back(self, to_parts: ToParts, gradient: Tensor) -> Sequence[Tensor]:
        """The gradient of the output (T, D) -> those of query, key and value, (B, N or L, H, D / H) each."""
        parts = to_parts(gradient.view(self.items, -1, self.heads, gradient.shape[-1] // self.heads).transpose(1, 2))
        return [part.transpose(1, 2) for part in parts]
