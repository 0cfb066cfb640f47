"""The transformer's hand-written gradients: frozen products with low-rank adapters.

Each function is exact and keeps less, or passes over its tensors less often, than the operations it stands for; the
library's own modules are the oracle in the tests. No frozen weight is ever saved for the backward pass: a weight that
is quantised or lives in host memory between its uses is asked for again.

Letters in shapes: T tokens of all items in one row after the other, I inputs and O outputs of a linear layer, R the sum
of the ranks of the adapters that share an input.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wangen.runtime.fast.products import add_product, linear, linear_back, linear_onto, scaled_
from wangen.runtime.memory.quantize import QuantLinear


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """An autograd function's result; PyTorch leaves `apply` untyped."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


@functools.cache
def anchor(device: torch.device) -> Tensor:
    """A tensor of nothing that requires a gradient.

    What takes it has a gradient, also where nothing of it has one but parameters that autograd is not told of.
    """
    return torch.empty(0, device=device, requires_grad=True)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype. Asked first, because `to` costs microseconds even where it has nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def weight_of(layer: nn.Linear, dtype: torch.dtype) -> Tensor:
    """The weight (O, I) of a linear layer in `dtype`, dequantised if the layer holds it so, outside autograd."""
    if isinstance(layer, QuantLinear):
        return layer.dequantized(dtype)
    weight = layer._parameters["weight"]  # quicker than asking for the attribute
    assert weight is not None
    return cast(weight, dtype)


class Frozen:
    """Frozen linear layers that share an input: their products, forward and back.

    The weights are read when they are used, so that they may be elsewhere in between. Where the layers' weights lie
    side by side in one storage (`dit_linear.lay_side_by_side`), they are one product.
    """

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self.layers = tuple(layers)
        self.dtype = dtype
        self._are_joined: bool | None = None  # not known yet

    def outputs(self, inputs: Tensor) -> list[Tensor]:
        """(T, I) -> for each layer (T, O), with its bias."""
        joined = self.joined()
        if joined is None:
            return [
                linear(inputs, weight_of(layer, self.dtype), _cast(layer.bias, self.dtype)) for layer in self.layers
            ]
        weight, bias = joined
        product = linear(inputs, cast(weight, self.dtype), cast(bias, self.dtype), num_layers=len(self.layers))
        return list(product.split_with_sizes([layer.out_features for layer in self.layers], 1))

    def plus(self, outputs: Tensor, inputs: Tensor) -> Tensor:
        """(T, O) plus inputs (T, I) times the weight of the one layer; what it is added to may be overwritten."""
        (layer,) = self.layers
        return linear_onto(outputs, inputs, weight_of(layer, self.dtype))

    def zeros(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """(T, I) -> in place of each layer's output (T, O) zeros, which take no memory."""
        zero = inputs.new_zeros(())
        return tuple(zero.expand(len(inputs), layer.out_features) for layer in self.layers)

    def input_gradient(self, gradients: Sequence[Tensor]) -> Tensor:
        """For each layer (T, O) -> (T, I), the sum of the products with the weights."""
        total = linear_back(gradients[0], weight_of(self.layers[0], self.dtype))
        for gradient, layer in zip(gradients[1:], self.layers[1:], strict=True):
            total = linear_onto(total, gradient, weight_of(layer, self.dtype).t())
        return total

    def bias(self) -> Tensor | None:
        """The bias (O,) of the one layer."""
        (layer,) = self.layers
        return _cast(layer.bias, self.dtype)

    def joined(self) -> tuple[Tensor, Tensor] | None:
        """Weight and bias of all layers as one, without a copy; None where they do not lie side by side."""
        if self._are_joined is None:
            self._are_joined = self._lie_side_by_side()
        if not self._are_joined:
            return None
        # Made anew for each use: held, they would keep weights on the device that are parked elsewhere.
        first, num_rows = self.layers[0], sum(layer.out_features for layer in self.layers)
        return _from_here(first.weight, num_rows), _from_here(first.bias, num_rows)

    def _lie_side_by_side(self) -> bool:
        if len(self.layers) == 1 or any(isinstance(layer, QuantLinear) for layer in self.layers):
            return False
        return all(are_side_by_side([getattr(layer, name) for layer in self.layers]) for name in ("weight", "bias"))


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else cast(bias, dtype)


def are_side_by_side(tensors: Sequence[Tensor | None]) -> bool:
    """Whether tensors (n_i, ...) follow each other in one storage."""
    first = tensors[0]
    if first is None:
        return False
    expected = first.data_ptr()
    for tensor in tensors:
        if tensor is None or not tensor.is_contiguous() or tensor.dtype != first.dtype or tensor.data_ptr() != expected:
            return False
        expected += tensor.nbytes
    # Else they are neighbours, but of different storages.
    return expected <= first.untyped_storage().data_ptr() + first.untyped_storage().nbytes()


def _from_here(first: Tensor, num_rows: int) -> Tensor:
    """So many rows of a storage, (num_rows, ...), that begin with those of a tensor in it."""
    return first.detach().as_strided((num_rows, *first.shape[1:]), first.stride(), first.storage_offset())


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
        num_layers: how many layers share the input.
        present: numbers of the layers that have one, and the adapters.
        trained: `down` and `up` of each, one after the other.
    """

    def __init__(self, each: Sequence[LowRank | None]) -> None:
        self.num_layers = len(each)
        self.present = [(number, adapter) for number, adapter in enumerate(each) if adapter is not None]
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

    def back(self, inputs: Tensor, images: Tensor, gradients: Sequence[Tensor], totals: Sequence[Tensor]) -> Tensor:
        """What goes back to the low-rank images (T, R). The gradients of `trained` are added to their totals.

        Args:
            inputs: (T, I)
            images: (T, R), inputs times the first halves.
            gradients: (T, O) for each layer, also for those without an adapter.
            totals: of each of `trained`, in its shape and dtype.
        """
        parts = [
            scaled_(linear_back(gradients[number], adapter.up_cast), adapter.scale) for number, adapter in self.present
        ]
        to_images = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        downs, ups = totals[::2], totals[1::2]
        if len(downs) == 1:
            add_product(downs[0], to_images.t(), inputs)
        else:
            for total, down in zip(downs, self._of_each(linear_back(to_images.t(), inputs), 0), strict=True):
                total.add_(down)
        for total, (number, adapter), image in zip(ups, self.present, self._of_each(images, 1), strict=True):
            # This way round the product is up to twice as fast on the CPU.
            add_product(total.t(), image.t(), gradients[number], adapter.scale)
        return to_images

    def _of_each(self, joined: Tensor, dim: int) -> Sequence[Tensor]:
        """What of (R, …) or (T, R) is each adapter's."""
        if len(self.present) == 1:
            return [joined]
        # Read when it is used: frozen ones of a swapped block have no rows before they come.
        return joined.split_with_sizes([adapter.down.shape[0] for _, adapter in self.present], dim)


def adapted(
    inputs: Tensor, frozen: Frozen, adapters: Adapters, *, valued: bool
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
    frozen: Frozen,
    adapters: Adapters,
    gradients: Sequence[Tensor],
    totals: Sequence[Tensor],
    *,
    has_gradient: bool,
) -> Tensor | None:
    """The gradient of the input (T, I) that `adapted` took, if it `has_gradient`.

    Args:
        inputs: (T, I); not needed without adapters.
        images: what `adapted` returned.
        frozen: the layers.
        adapters: theirs.
        gradients: (T, O) for each layer.
        totals: the gradients of `adapters.trained` are added to them.
        has_gradient: that of the input is wanted.
    """
    slopes = [cast(gradient, frozen.dtype) for gradient in gradients]
    to_images = None
    if inputs is not None and images is not None:
        to_images = adapters.back(cast(inputs, frozen.dtype), images, slopes, totals)
    if not has_gradient:
        return None
    total = frozen.input_gradient(slopes)
    if to_images is not None:
        total.addmm_(to_images, adapters.down())
    return cast(total, gradients[0].dtype)


class AdaptedLinears(torch.autograd.Function):
    """Frozen linear layers that share an input, each with a low-rank adapter or none.

    What goes back to the input is gathered in one tensor. Kept for the backward pass: the input and its low-rank
    images; without adapters nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, frozen: Frozen, adapters: Adapters, valued: bool, *_trained: Tensor
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
        totals = [torch.zeros_like(tensor) for tensor in ctx.adapters.trained]
        to_input = adapted_back(
            inputs, images, ctx.frozen, ctx.adapters, gradients, totals, has_gradient=ctx.needs_input_grad[0]
        )
        return to_input, None, None, None, *totals
