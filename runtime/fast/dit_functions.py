"""The transformer's hand-written gradients: frozen products with low-rank adapters, norms, gates.

Each function is exact and keeps less, or passes over its tensors less often, than the operations it stands for; the
library's own modules are the oracle in the tests. No frozen weight is ever saved for the backward pass: a weight that
is quantised or lives in host memory between its uses is asked for again.

Letters in shapes: T tokens of all items in one row after the other, I inputs and O outputs of a linear layer, R the sum
of the ranks of the adapters that share an input, D width of the model, H heads, N tokens of one item.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """An autograd function's result; PyTorch leaves `apply` untyped."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype. Asked first, because `to` costs microseconds even where it has nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def scaled_(product: Tensor, scale: float) -> Tensor:
    """The product times an adapter's scale, in place."""
    return product if scale == 1 else product.mul_(scale)


class FrozenProduct(Protocol):
    """One frozen linear layer, or several that share their input; all tensors here are in the products' own dtype."""

    @property
    def dtype(self) -> torch.dtype:
        """What products are computed in; the tokens may be in another."""

    def outputs(self, inputs: Tensor) -> list[Tensor]:
        """(T, I) -> for each layer (T, O), with its bias."""

    def plus(self, outputs: Tensor, inputs: Tensor) -> Tensor:
        """(T, O) plus inputs (T, I) times the weight of the one layer; what it is added to may be overwritten."""

    def bias(self) -> Tensor | None:
        """The bias (O,) of the one layer."""

    def zeros(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """(T, I) -> in place of each layer's output (T, O) zeros, which take no memory."""

    def input_gradient(self, gradients: Sequence[Tensor]) -> Tensor:
        """For each layer (T, O) -> (T, I), the sum of the products with the weights."""


@dataclass(frozen=True)
class LowRank:
    """One layer's adapter: its weight changes by `scale * up @ down`.

    Attributes:
        down: (R, I), trained.
        up: (O, R), trained.
        scale: alpha / rank, or alpha / sqrt(rank) of rank-stabilised adapters.
        down_cast: `down` in the dtype of the products.
        up_cast: `up` likewise.
    """

    down: Tensor
    up: Tensor
    scale: float
    down_cast: Tensor
    up_cast: Tensor


class Adapters:
    """The adapters of layers that share an input.

    Args:
        each: for each layer its adapter or None.

    Attributes:
        num_layers: of all layers.
        present: numbers of the layers that have one, and the adapters.
        ranks: theirs.
        trained: `down` and `up` of each, one after the other.
    """

    def __init__(self, each: Sequence[LowRank | None]) -> None:
        self.num_layers = len(each)
        self.present = [(number, adapter) for number, adapter in enumerate(each) if adapter is not None]
        self.ranks = [adapter.down.shape[0] for _, adapter in self.present]
        self.trained = [tensor for _, adapter in self.present for tensor in (adapter.down, adapter.up)]

    def down(self) -> Tensor:
        """The first halves one below the other, (R, I)."""
        halves = [adapter.down_cast for _, adapter in self.present]
        return halves[0] if len(halves) == 1 else torch.cat(halves)

    def with_bias(self, images: Tensor, bias: Tensor | None) -> Tensor:
        """What the one layer's adapter makes of the low-rank images (T, R), with a bias (O,): (T, O)."""
        ((_, adapter),) = self.present
        start = images.new_zeros(()) if bias is None else bias
        return torch.addmm(start, images, adapter.up_cast.t(), alpha=adapter.scale)

    def add(self, outputs: Sequence[Tensor], images: Tensor) -> None:
        """Add to the outputs (T, O) of each layer what its adapter makes of the low-rank images (T, R)."""
        parts = images.split_with_sizes(self.ranks, 1)
        for (number, adapter), part in zip(self.present, parts, strict=True):
            outputs[number].addmm_(part, adapter.up_cast.t(), alpha=adapter.scale)

    def gradients(self, inputs: Tensor, images: Tensor, gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """What goes back to the low-rank images (T, R), and the gradients of each `down` and `up`.

        Args:
            inputs: (T, I)
            images: (T, R), inputs times the first halves.
            gradients: (T, O) for each layer, also for those without an adapter.
        """
        parts = [
            scaled_(torch.mm(gradients[number], adapter.up_cast), adapter.scale) for number, adapter in self.present
        ]
        to_images = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        downs = (to_images.t() @ inputs).split_with_sizes(self.ranks)
        to_trained = []
        for (number, adapter), down, image in zip(
            self.present, downs, images.split_with_sizes(self.ranks, 1), strict=True
        ):
            # This way round the product is up to twice as fast on the CPU.
            up = scaled_(torch.mm(image.t(), gradients[number]), adapter.scale).t()
            to_trained += [cast(down, adapter.down.dtype), cast(up, adapter.up.dtype)]
        return to_images, to_trained


class AdaptedLinears(torch.autograd.Function):
    """Frozen linear layers that share an input, each with a low-rank adapter or none.

    The first halves of the adapters are one product, and so is their gradient; what goes back to the input is gathered
    in one tensor. Kept for the backward pass: the input and its low-rank images.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, frozen: FrozenProduct, adapters: Adapters, valued: bool, *_trained: Tensor
    ) -> tuple[Tensor, ...]:
        """(T, I) -> for each layer (T, O).

        Args:
            ctx: autograd's.
            inputs: of all layers.
            frozen: the layers.
            adapters: theirs.
            valued: the outputs are computed; else they are zeros, for whoever wants the gradients alone.
            _trained: `adapters.trained`, for autograd to see.
        """
        factors = cast(inputs, frozen.dtype)
        images = factors @ adapters.down().t()
        ctx.save_for_backward(inputs, images)
        ctx.frozen, ctx.adapters = frozen, adapters
        if not valued:
            return frozen.zeros(inputs)
        if adapters.num_layers == 1 and factors.itemsize < 4:  # the smaller part first, so that less is rounded away
            outputs = [frozen.plus(adapters.with_bias(images, frozen.bias()), factors)]
        else:
            outputs = frozen.outputs(factors)
            adapters.add(outputs, images)
        return tuple(cast(output, inputs.dtype) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """For each layer (T, O) -> the gradients of the input and of the adapters."""
        inputs, images = ctx.saved_tensors
        dtype = ctx.frozen.dtype
        slopes = [cast(gradient, dtype) for gradient in gradients]
        to_images, to_trained = ctx.adapters.gradients(cast(inputs, dtype), images, slopes)
        to_input = None
        if ctx.needs_input_grad[0]:
            total = ctx.frozen.input_gradient(slopes).addmm_(to_images, ctx.adapters.down())
            to_input = cast(total, inputs.dtype)
        return to_input, None, None, None, *to_trained


class FrozenLinears(torch.autograd.Function):
    """Frozen linear layers without adapters; keeps nothing for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, frozen: FrozenProduct, valued: bool) -> tuple[Tensor, ...]:
        """(T, I) -> for each layer (T, O); `valued` as in `AdaptedLinears`."""
        ctx.frozen, ctx.dtype = frozen, inputs.dtype
        if not valued:
            return frozen.zeros(inputs)
        return tuple(cast(output, inputs.dtype) for output in frozen.outputs(cast(inputs, frozen.dtype)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """For each layer (T, O) -> (T, I)."""
        if not ctx.needs_input_grad[0]:
            return None, None, None
        slopes = [cast(gradient, ctx.frozen.dtype) for gradient in gradients]
        return cast(ctx.frozen.input_gradient(slopes), ctx.dtype), None, None


class MixedLayerNorm(torch.autograd.Function):
    """Layer norm of a half-precision input with a frozen weight and bias in float32, which CUDA's kernel refuses.

    What is kept is the input as it came, not its copy in float32.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """(T, D) -> (T, D) in the input's dtype."""
        wide = inputs.float()
        output, mean, reciprocal = torch.native_layer_norm(wide, wide.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(inputs, mean, reciprocal)
        ctx.weight = weight
        return output.to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """(T, D) -> the gradient of the input."""
        inputs, mean, reciprocal = ctx.saved_tensors
        to_inputs = torch.ops.aten.native_layer_norm_backward(
            gradients[0].float(), inputs.float(), inputs.shape[-1:], mean, reciprocal, ctx.weight, None,
            [True, False, False],
        )[0]  # fmt: skip
        return to_inputs.to(inputs.dtype), None, None, None


class RmsRotary(torch.autograd.Function):
    """RMS norm over all heads or over each, and rotary position embedding, in float32 with one rounding at the end.

    RMS norm: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, y = x / sqrt(mean(x^2) + eps) * weight.
    Rotary embedding: Su et al. 2021, https://arxiv.org/abs/2104.09864, with pairs of neighbouring channels as complex
    numbers.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, table: Tensor | None, eps: float) -> Tensor:
        """(T, D) -> (T, D).

        Args:
            ctx: autograd's.
            inputs: queries or keys; rows may be apart.
            weight: (W,), frozen; W is D, or the channels of a head.
            table: (N, channels of a head / 2), complex; N divides T. None leaves the positions out.
            eps: keeps the root from zero.
        """
        width = len(weight)
        wide = torch.unflatten(inputs.float(), 1, (-1, width))
        mean_square = torch.linalg.vector_norm(wide, dim=2, keepdim=True).square_().div_(width)
        reciprocal = mean_square.add_(eps).rsqrt_()
        normed = (wide * reciprocal).mul_(weight).flatten(1)
        ctx.save_for_backward(inputs, reciprocal)
        ctx.weight, ctx.table = weight, table
        if table is not None:
            _by_heads(normed, table).mul_(table[:, None])
        return cast(normed, inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """(T, D) -> the gradient of the input."""
        inputs, reciprocal = ctx.saved_tensors
        width = len(ctx.weight)
        turned = gradients[0].float().contiguous()
        if ctx.table is None:
            turned = torch.unflatten(turned, 1, (-1, width)) * ctx.weight
        else:
            back = _by_heads(turned, ctx.table) * ctx.table[:, None].conj()
            turned = torch.view_as_real(back).view(len(inputs), -1, width).mul_(ctx.weight)
        wide = torch.unflatten(inputs.float(), 1, (-1, width))
        along = torch.linalg.vecdot(turned, wide)[..., None].mul_(reciprocal.pow(3)).div_(width)
        to_inputs = turned.mul_(reciprocal).addcmul_(wide, along, value=-1).flatten(1)
        return cast(to_inputs, inputs.dtype), None, None, None


def _by_heads(channels: Tensor, table: Tensor) -> Tensor:
    """(T, D) in float32 as the complex numbers (items, N, H, channels of a head / 2) that it consists of."""
    tokens, pairs = table.shape
    return torch.view_as_complex(channels.view(-1, tokens, channels.shape[1] // pairs // 2, pairs, 2))


class Gate(torch.autograd.Function):
    """residual + gate * branch, in one pass and with one rounding; the gates are frozen and nothing is kept."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, branch: Tensor, gates: Tensor, runs: Sequence[int], valued: bool) -> Tensor:
        """(T, D), (T, D), gates (runs, D) in float32, tokens of each run -> (T, D); `valued` as in `AdaptedLinears`."""
        ctx.gates, ctx.runs = gates, list(runs)
        if not valued:
            return residual.new_zeros(()).expand_as(residual)
        output = torch.empty_like(residual)
        if len(runs) == 1:
            return torch.addcmul(residual, branch, gates[0], out=output)
        pieces = (part.split_with_sizes(ctx.runs) for part in (residual, branch, output))
        for before, added, piece, gate in zip(*pieces, gates, strict=True):
            torch.addcmul(before, added, gate, out=piece)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """(T, D) -> the same for the residual, and its product with the gates for the branch."""
        (gradient,) = gradients
        to_branch = torch.empty_like(gradient)
        if len(ctx.runs) == 1:
            return gradient, torch.mul(gradient, ctx.gates[0], out=to_branch), None, None, None
        for part, piece, gate in zip(
            gradient.split_with_sizes(ctx.runs), to_branch.split_with_sizes(ctx.runs), ctx.gates, strict=True
        ):
            torch.mul(part, gate, out=piece)
        return gradient, to_branch, None, None, None
