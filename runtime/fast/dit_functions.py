"""The transformer's hand-written gradients: frozen products with low-rank adapters, norms, gates.

Each function is exact and keeps less, or passes over its tensors less often, than the operations it stands for; the
library's own modules are the oracle in the tests. No frozen weight is ever saved for the backward pass: a weight that
is quantised or lives in host memory between its uses is asked for again.

Letters in shapes: T tokens of all items in one row after the other, I inputs and O outputs of a linear layer, R the sum
of the ranks of the adapters that share an input, D width of the model, H heads, N tokens of one item.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from wangen.runtime.fast.products import linear, linear_back


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
        to_products: a trained tensor in the dtype of the products, for use outside autograd.
    """

    down: Tensor
    up: Tensor
    scale: float
    to_products: Callable[[Tensor], Tensor]

    @property
    def down_cast(self) -> Tensor:
        """`down` in the dtype of the products."""
        return self.to_products(self.down)

    @property
    def up_cast(self) -> Tensor:
        """`up` in the dtype of the products."""
        return self.to_products(self.up)


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
        for (number, adapter), part in zip(self.present, self._of_each(images, 1), strict=True):
            outputs[number].addmm_(part, adapter.up_cast.t(), alpha=adapter.scale)

    def gradients(self, inputs: Tensor, images: Tensor, gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """What goes back to the low-rank images (T, R), and the gradients of each `down` and `up`.

        Args:
            inputs: (T, I)
            images: (T, R), inputs times the first halves.
            gradients: (T, O) for each layer, also for those without an adapter.
        """
        parts = [
            scaled_(linear_back(gradients[number], adapter.up_cast), adapter.scale) for number, adapter in self.present
        ]
        to_images = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        downs = self._of_each(linear_back(to_images.t(), inputs), 0)
        to_trained = []
        for (number, adapter), down, image in zip(self.present, downs, self._of_each(images, 1), strict=True):
            # This way round the product is up to twice as fast on the CPU.
            up = scaled_(linear_back(image.t(), gradients[number]), adapter.scale).t()
            to_trained += [cast(down, adapter.down.dtype), cast(up, adapter.up.dtype)]
        return to_images, to_trained

    def _of_each(self, joined: Tensor, dim: int) -> Sequence[Tensor]:
        """What of (R, …) or (T, R) is each adapter's."""
        return [joined] if len(self.ranks) == 1 else joined.split_with_sizes(self.ranks, dim)


def adapted(
    inputs: Tensor, frozen: FrozenProduct, adapters: Adapters, *, valued: bool
) -> tuple[Sequence[Tensor], Tensor | None]:
    """What linear layers that share an input make of it, and what their gradients need of that beside the input.

    Args:
        inputs: (T, I) of all layers.
        frozen: the layers.
        adapters: theirs; the first halves are one product.
        valued: the outputs are computed; else they are zeros, for whoever wants the gradients alone.

    Returns:
        For each layer (T, O), and the low-rank images (T, R) of the input, None without adapters.
    """
    factors = cast(inputs, frozen.dtype)
    images = linear(factors, adapters.down()) if adapters.present else None
    if not valued:
        return frozen.zeros(inputs), images
    if images is not None and adapters.num_layers == 1 and factors.itemsize < 4:
        # The smaller part first, so that less is rounded away.
        outputs = [frozen.plus(adapters.with_bias(images, frozen.bias()), factors)]
    else:
        outputs = frozen.outputs(factors)
        if images is not None:
            adapters.add(outputs, images)
    return [cast(output, inputs.dtype) for output in outputs], images


def adapted_back(
    inputs: Tensor | None,
    images: Tensor | None,
    frozen: FrozenProduct,
    adapters: Adapters,
    gradients: Sequence[Tensor],
    *,
    has_gradient: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """The gradients of what `adapted` took: of its input (T, I), if it `has_gradient`, and of `adapters.trained`.

    Args:
        inputs: (T, I); not needed without adapters.
        images: what `adapted` returned.
        frozen: the layers.
        adapters: theirs.
        gradients: (T, O) for each layer.
        has_gradient: that of the input is wanted.
    """
    slopes = [cast(gradient, frozen.dtype) for gradient in gradients]
    to_images, to_trained = None, list[Tensor]()
    if inputs is not None and images is not None:
        to_images, to_trained = adapters.gradients(cast(inputs, frozen.dtype), images, slopes)
    if not has_gradient:
        return None, to_trained
    total = frozen.input_gradient(slopes)
    if to_images is not None:
        total.addmm_(to_images, adapters.down())
    return cast(total, gradients[0].dtype), to_trained


class AdaptedLinears(torch.autograd.Function):
    """Frozen linear layers that share an input, each with a low-rank adapter or none.

    What goes back to the input is gathered in one tensor. Kept for the backward pass: the input and its low-rank
    images; without adapters nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, frozen: FrozenProduct, adapters: Adapters, valued: bool, *_trained: Tensor
    ) -> tuple[Tensor, ...]:
        """(T, I) -> for each layer (T, O); arguments as of `adapted`, and `adapters.trained` for autograd to see."""
        outputs, images = adapted(inputs, frozen, adapters, valued=valued)
        ctx.save_for_backward(*(() if images is None else (inputs, images)))
        ctx.frozen, ctx.adapters = frozen, adapters
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """For each layer (T, O) -> the gradients of the input and of the adapters."""
        inputs, images = ctx.saved_tensors or (None, None)
        to_input, to_trained = adapted_back(
            inputs, images, ctx.frozen, ctx.adapters, gradients, has_gradient=ctx.needs_input_grad[0]
        )
        return to_input, None, None, None, *to_trained


Moments = tuple[Tensor, Tensor]
"""Of a layer norm's tokens: means and reciprocal deviations, (T, 1) each."""


def layer_norm(tokens: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Moments]:
    """(T, D), weight and bias (D,) -> (T, D) in the tokens' dtype, and the tokens' moments.

    CUDA's kernel refuses half-precision tokens with a weight in float32: there they are made float32 for it.
    """
    wide = tokens if tokens.device.type == "cpu" else cast(tokens, weight.dtype)
    output, mean, reciprocal = torch.native_layer_norm(wide, wide.shape[-1:], weight, bias, eps)
    return cast(output, tokens.dtype), (mean, reciprocal)


def layer_norm_back(gradient: Tensor, tokens: Tensor, moments: Moments, weight: Tensor) -> Tensor:
    """The gradient of the tokens (T, D) that `layer_norm` took; its weight is frozen."""
    dtype = tokens.dtype
    if tokens.device.type != "cpu":
        gradient, tokens = cast(gradient, weight.dtype), cast(tokens, weight.dtype)
    to_tokens: Tensor = torch.ops.aten.native_layer_norm_backward(
        gradient, tokens, tokens.shape[-1:], *moments, weight, None, [True, False, False]
    )[0]
    return cast(to_tokens, dtype)


class MixedLayerNorm(torch.autograd.Function):
    """`layer_norm` with a frozen weight and bias. What is kept is the input as it came, not its copy in float32."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """(T, D) -> (T, D) in the input's dtype."""
        output, moments = layer_norm(inputs, weight, bias, eps)
        ctx.save_for_backward(inputs, *moments)
        ctx.weight = weight
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """(T, D) -> the gradient of the input."""
        inputs, *moments = ctx.saved_tensors
        return layer_norm_back(gradients[0], inputs, tuple(moments), ctx.weight), None, None, None


def rms_rotary(inputs: Tensor, weight: Tensor, table: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm over all heads or over each, and rotary position embedding, in float32 with one rounding at the end.

    RMS norm: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, y = x / sqrt(mean(x^2) + eps) * weight.
    Rotary embedding: Su et al. 2021, https://arxiv.org/abs/2104.09864, with pairs of neighbouring channels as complex
    numbers.

    Args:
        inputs: queries or keys, (T, D); rows may be apart.
        weight: (W,), frozen; W is D, or the channels of a head. Or (D / W, W), one for each part of the row.
        table: (N, channels of a head / 2), complex; N divides T. None leaves the positions out.
        eps: keeps the root from zero.

    Returns:
        (T, D), and the reciprocal roots (T, D / W, 1) in float32.
    """
    width = weight.shape[-1]
    wide = torch.unflatten(inputs.float(), 1, (-1, width))
    mean_square = torch.linalg.vector_norm(wide, dim=2, keepdim=True).square_().div_(width)
    reciprocal = mean_square.add_(eps).rsqrt_()
    normed = (wide * reciprocal).mul_(weight).flatten(1)
    if table is not None:
        _by_heads(normed, table).mul_(table[:, None])
    return cast(normed, inputs.dtype), reciprocal


def rms_rotary_back(
    gradient: Tensor, inputs: Tensor, reciprocal: Tensor, weight: Tensor, table: Tensor | None
) -> Tensor:
    """The gradient of the inputs (T, D) that `rms_rotary` took."""
    width = weight.shape[-1]
    turned = gradient.float().contiguous()
    if table is None:
        turned = torch.unflatten(turned, 1, (-1, width)) * weight
    else:
        back = _by_heads(turned, table) * table[:, None].conj()
        turned = torch.view_as_real(back).view(len(inputs), -1, width).mul_(weight)
    wide = torch.unflatten(inputs.float(), 1, (-1, width))
    along = torch.linalg.vecdot(turned, wide)[..., None].mul_(reciprocal.pow(3)).div_(width)
    return cast(turned.mul_(reciprocal).addcmul_(wide, along, value=-1).flatten(1), inputs.dtype)


class RmsRotary(torch.autograd.Function):
    """`rms_rotary` with a frozen weight."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, table: Tensor | None, eps: float) -> Tensor:
        """(T, D) -> (T, D)."""
        output, reciprocal = rms_rotary(inputs, weight, table, eps)
        ctx.save_for_backward(inputs, reciprocal)
        ctx.weight, ctx.table = weight, table
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """(T, D) -> the gradient of the input."""
        inputs, reciprocal = ctx.saved_tensors
        return rms_rotary_back(gradients[0], inputs, reciprocal, ctx.weight, ctx.table), None, None, None


def _by_heads(channels: Tensor, table: Tensor) -> Tensor:
    """(T, D) in float32 as the complex numbers (items, N, H, channels of a head / 2) that it consists of."""
    tokens, pairs = table.shape
    return torch.view_as_complex(channels.view(-1, tokens, channels.shape[1] // pairs // 2, pairs, 2))


def gated(
    residual: Tensor,
    branch: Tensor,
    gates: Tensor,
    runs: Sequence[int],
    *,
    valued: bool = True,
    output: Tensor | None = None,
) -> Tensor:
    """The residual plus gate times branch, in one pass and with one rounding.

    Args:
        residual: (T, D)
        branch: (T, D)
        gates: (runs, D) in float32.
        runs: tokens of each.
        valued: the output is computed; else it is zeros, for whoever wants the gradients alone.
        output: (T, D) to write to, which may be the branch; None takes new memory.
    """
    if not valued:
        return residual.new_zeros(()).expand_as(residual)
    output = torch.empty_like(residual) if output is None else output
    if len(runs) == 1:
        return torch.addcmul(residual, branch, gates[0], out=output)
    pieces = (part.split_with_sizes(list(runs)) for part in (residual, branch, output))
    for before, added, piece, gate in zip(*pieces, gates, strict=True):
        torch.addcmul(before, added, gate, out=piece)
    return output


def gated_back(gradient: Tensor, gates: Tensor, runs: Sequence[int]) -> Tensor:
    """The gradient of the branch (T, D) that `gated` took; the residual's is the gradient itself."""
    to_branch = torch.empty_like(gradient)
    if len(runs) == 1:
        return torch.mul(gradient, gates[0], out=to_branch)
    parts = (one.split_with_sizes(list(runs)) for one in (gradient, to_branch))
    for part, piece, gate in zip(*parts, gates, strict=True):
        torch.mul(part, gate, out=piece)
    return to_branch


class Gate(torch.autograd.Function):
    """`gated` with frozen gates; nothing is kept."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, branch: Tensor, gates: Tensor, runs: Sequence[int], valued: bool) -> Tensor:
        """(T, D), (T, D), gates (runs, D) in float32, tokens of each run -> (T, D)."""
        ctx.gates, ctx.runs = gates, runs
        return gated(residual, branch, gates, runs, valued=valued)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """(T, D) -> the same for the residual, and its product with the gates for the branch."""
        (gradient,) = gradients
        return gradient, gated_back(gradient, ctx.gates, ctx.runs), None, None, None
