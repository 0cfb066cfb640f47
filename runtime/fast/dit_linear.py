"""The transformer's linear layers as peft leaves them: which are plain frozen products with a low-rank adapter.

Letters in shapes: T tokens, I inputs and O outputs of a layer, R rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional

from wangen.runtime.fast.dit_functions import (
    AdaptedLinears,
    AdapterBefore,
    Adapters,
    FrozenLinears,
    LowRank,
    ProductAfter,
    apply,
)
from wangen.runtime.memory.quantize import QuantLinear


def weight_of(layer: nn.Linear, dtype: torch.dtype) -> Tensor:
    """The weight (O, I) of a linear layer in `dtype`, dequantised if the layer holds it so."""
    if isinstance(layer, QuantLinear):
        return layer.dequantized(dtype)
    return layer.weight.detach().to(dtype)


class Frozen:
    """Frozen linear layers that share an input: their products, forward and back.

    The weights are read when they are used, so that they may be elsewhere in between. Where the layers' weights lie
    side by side in one storage (`lay_side_by_side`), they are one product.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = tuple(layers)
        self._found: tuple[Tensor, Tensor] | None = None

    def outputs(self, inputs: Tensor) -> list[Tensor]:
        """(T, I) -> for each layer (T, O), with its bias."""
        joined = self._joined(inputs.dtype)
        if joined is None:
            return [
                functional.linear(inputs, weight_of(layer, inputs.dtype), _cast(layer.bias, inputs.dtype))
                for layer in self.layers
            ]
        product = functional.linear(inputs, *joined)
        return list(torch.split(product, [layer.out_features for layer in self.layers], dim=1))

    def add_to(self, outputs: Tensor, inputs: Tensor) -> None:
        """Add inputs (T, I) times the weight of the one layer, without its bias, to (T, O)."""
        (layer,) = self.layers
        outputs.addmm_(inputs, weight_of(layer, inputs.dtype).t())

    def input_gradient(self, gradients: Sequence[Tensor]) -> Tensor:
        """For each layer (T, O) -> (T, I), the sum of the products with the weights."""
        total = gradients[0] @ weight_of(self.layers[0], gradients[0].dtype)
        for gradient, layer in zip(gradients[1:], self.layers[1:], strict=True):
            total.addmm_(gradient, weight_of(layer, gradient.dtype))
        return total

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias (O,) of the one layer."""
        (layer,) = self.layers
        return _cast(layer.bias, dtype)

    def _joined(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Weight and bias of all layers as one, without a copy; None where they do not lie side by side."""
        if self._found is not None:
            return self._found
        if len(self.layers) == 1 or any(isinstance(layer, QuantLinear) for layer in self.layers):
            return None
        weight = _side_by_side([layer.weight for layer in self.layers])
        bias = _side_by_side([layer.bias for layer in self.layers])
        if weight is not None and bias is not None and weight.dtype == dtype:
            self._found = weight, bias.to(dtype)
        return self._found


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.detach().to(dtype)


def _side_by_side(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Tensors (n_i, ...) that follow each other in one storage, as (sum n_i, ...); None where they do not."""
    first = tensors[0]
    if first is None:
        return None
    expected, rows = first.data_ptr(), 0
    for tensor in tensors:
        if tensor is None or not tensor.is_contiguous() or tensor.dtype != first.dtype:
            return None
        if tensor.data_ptr() != expected or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        expected, rows = expected + tensor.numel() * tensor.element_size(), rows + tensor.shape[0]
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def lay_side_by_side(layers: Sequence[nn.Linear]) -> None:
    """Move the weights and biases of layers into one storage each, of which they become parts, unless they are already.

    Nothing else changes: names, values, saving. Layers whose weights are of different kinds are left as they are.
    """
    if any(type(layer) is not nn.Linear for layer in layers):
        return
    for name in ("weight", "bias"):
        parameters = [getattr(layer, name) for layer in layers]
        if not all(_may_move(parameter, parameters[0]) for parameter in parameters):
            return
        if _side_by_side(parameters) is None:
            joined = torch.cat([parameter.detach() for parameter in parameters])
            for parameter, part in zip(parameters, torch.split(joined, [len(p) for p in parameters]), strict=True):
                parameter.data = part


def _may_move(parameter: Tensor | None, first: Tensor | None) -> bool:
    return (
        parameter is not None
        and first is not None
        and not parameter.requires_grad
        and parameter.is_floating_point()
        and (parameter.dtype, parameter.device) == (first.dtype, first.device)
        and parameter.untyped_storage().size() > 0
        and parameter.shape[1:] == first.shape[1:]
    )


@dataclass(frozen=True)
class Layer:
    """One linear layer for one step.

    Attributes:
        module: the layer, or peft's layer around it.
        base: the frozen layer; None where only the module's own forward can compute it.
        adapter: the low-rank adapter that is active; None without one.
    """

    module: nn.Module
    base: nn.Linear | None
    adapter: LowRank | None


class Group:
    """Linear layers that share an input, for one step.

    Args:
        layers: one or more.
        autocast: what the modules' own forward computes in, where that is needed; None for no autocast.
    """

    def __init__(self, layers: Sequence[Layer], autocast: torch.dtype | None) -> None:
        self._layers = layers
        self._autocast = autocast
        bases = [layer.base for layer in layers if layer.base is not None]
        self._frozen = Frozen(bases) if len(bases) == len(layers) else None
        self._adapters = Adapters([layer.adapter for layer in layers])

    @property
    def is_plain(self) -> bool:
        """Whether no module's own forward is needed."""
        return self._frozen is not None

    def __call__(self, inputs: Tensor) -> list[Tensor]:
        """(T, I) -> for each layer (T, O), in as few products as can be."""
        if self._frozen is None:
            return [self._own(layer, inputs) for layer in self._layers]
        if not self._adapters.present:
            return list(apply(FrozenLinears, inputs, self._frozen))
        return list(apply(AdaptedLinears, inputs, self._frozen, self._adapters, *self._adapters.trained))

    def adapter_first(self, inputs: Tensor) -> Tensor:
        """Of the one layer the same, with what the backward pass needs kept before the frozen product."""
        if self._frozen is None or not self._adapters.present:
            return self(inputs)[0]
        adapted = apply(AdapterBefore, inputs, self._frozen, self._adapters, *self._adapters.trained)
        output: Tensor = apply(ProductAfter, adapted, inputs.detach(), self._frozen)
        return output

    def _own(self, layer: Layer, inputs: Tensor) -> Tensor:
        """What the module itself makes of (T, I), unless it is a plain layer beside others that are not."""
        if layer.base is not None:
            return Group([layer], self._autocast)(inputs)[0]
        with torch.autocast(inputs.device.type, self._autocast, enabled=self._autocast is not None):
            output: Tensor = layer.module(inputs)
        return output.to(inputs.dtype)


class Layers:
    """A transformer's linear layers as they are now: adapters may have been switched off since the last step.

    Args:
        dtype: of the computation.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._whole: dict[int, Tensor] = {}

    def group(self, modules: Sequence[nn.Module]) -> Group:
        """Layers that share an input."""
        layers = [self._layer(module) for module in modules]
        return Group(layers, None if self._dtype == torch.float32 else self._dtype)

    def _layer(self, module: nn.Module) -> Layer:
        base, names = _base_and_adapters(module)
        if base is None or len(names) > 1:
            return Layer(module, None, None)
        return Layer(module, base, self._low_rank(module, names[0]) if names else None)

    def _low_rank(self, module: nn.Module, name: str) -> LowRank:
        assert isinstance(module, LoraLinear)
        down, up = module.lora_A[name].weight, module.lora_B[name].weight
        return LowRank(down, up, float(module.scaling[name]), self._cast(down), self._cast(up))

    def _cast(self, trained: Tensor) -> Tensor:
        """A parameter in the dtype of the computation. Parameters that share a storage are cast in one go."""
        if trained.dtype == self._dtype:
            return trained.detach()
        storage = trained.untyped_storage()
        whole = self._whole.get(storage.data_ptr())
        if whole is None:
            flat = torch.empty(0, dtype=trained.dtype, device=trained.device).set_(storage)
            whole = self._whole[storage.data_ptr()] = flat.to(self._dtype)
        return whole.as_strided(trained.shape, trained.stride(), trained.storage_offset())


def _base_and_adapters(module: nn.Module) -> tuple[nn.Linear | None, list[str]]:
    """The frozen layer and the names of its active low-rank adapters; None where it is anything else than that."""
    if not isinstance(module, LoraLinear):
        return _frozen(module), []
    base = _frozen(module.base_layer)
    if base is None:
        return None, []
    if module.disable_adapters:
        return (None if module.merged else base), []
    names = [] if module.merged else [name for name in module.active_adapters if name in module.lora_A]
    plain = all(_is_plain(module, name) for name in names)
    return (base if plain else None), names


def _frozen(layer: nn.Module) -> nn.Linear | None:
    """The layer, if it is a linear one whose weight can be had and is not trained."""
    if not isinstance(layer, nn.Linear) or any(parameter.requires_grad for parameter in layer.parameters()):
        return None
    return layer if type(layer) is nn.Linear or isinstance(layer, QuantLinear) else None


def _is_plain(module: LoraLinear, name: str) -> bool:
    """Whether an adapter is `scale * up @ down` and nothing more."""
    dropout = module.lora_dropout[name]
    drops = isinstance(dropout, nn.Dropout) and dropout.p > 0 and dropout.training
    return not (drops or name in module.lora_variant or module.lora_bias.get(name, False))
