"""The transformer's linear layers as peft leaves them: which are plain frozen products with a low-rank adapter.

Letters in shapes: T tokens, I inputs and O outputs of a layer, R rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from wangen.runtime.fast.dit_functions import (
    AdaptedLinears,
    Adapters,
    Frozen,
    LowRank,
    adapted,
    adapted_back,
    apply,
    are_side_by_side,
    cast,
)
from wangen.runtime.fast.products import product_dtype
from wangen.runtime.libraries import LoraLinear
from wangen.runtime.memory.quantize import QuantLinear


def _total(trained: Tensor) -> Tensor:
    """The gradient that a tensor has so far; one that takes none has zeros that nobody reads."""
    if not trained.requires_grad:
        return torch.zeros_like(trained)
    if trained.grad is None:
        trained.grad = torch.zeros_like(trained)
    return trained.grad


def base_of(module: nn.Module) -> nn.Linear:
    """A linear layer, out of peft's around it: adapters of several kinds are one around the other."""
    while not isinstance(module, nn.Linear):
        module = module.get_submodule("base_layer")
    return module


def lay_side_by_side(layers: Sequence[nn.Linear]) -> None:
    """Move the weights and biases of layers into one storage each, of which they become parts, unless they are already.

    Nothing else changes: names, values, saving. Layers whose weights are of different kinds are left as they are.
    """
    if len(layers) == 1 or any(type(layer) is not nn.Linear for layer in layers):
        return
    for name in ("weight", "bias"):
        found = [layer._parameters[name] for layer in layers]  # quicker than asking for the attribute
        parameters = [parameter for parameter in found if parameter is not None]
        if len(parameters) != len(layers) or are_side_by_side(parameters):
            continue
        if all(_may_move(part, parameters[0]) for part in parameters):
            joined = torch.cat([parameter.detach() for parameter in parameters])
            for parameter, part in zip(parameters, joined.split_with_sizes([len(p) for p in parameters]), strict=True):
                parameter.data = part


def _may_move(parameter: Tensor, first: Tensor) -> bool:
    return (
        not parameter.requires_grad
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
        base: the frozen layer; None where there is none: the layer itself is trained, or its adapter of another kind.
        adapter: the low-rank adapter that is active; None without one.
    """

    module: nn.Module
    base: nn.Linear | None
    adapter: LowRank | None


class Group:
    """Linear layers that share an input, for one step.

    Args:
        layers: one or more.
        own_dtype: what the modules' own forward computes in, where it is needed.
        dtype: what is computed in else, and that of the tokens.

    Attributes:
        frozen: their products; None where a module's own forward is needed.
        adapters: of those layers that have one.
    """

    def __init__(self, layers: Sequence[Layer], own_dtype: torch.dtype, dtype: torch.dtype) -> None:
        self._layers = layers
        self._dtypes = own_dtype, dtype
        bases = [layer.base for layer in layers if layer.base is not None]
        self.frozen = Frozen(bases, dtype) if len(bases) == len(layers) else None
        self.adapters = Adapters([layer.adapter for layer in layers])

    @property
    def is_plain(self) -> bool:
        """Whether no module's own forward is needed."""
        return self.frozen is not None

    def __call__(self, inputs: Tensor, *, valued: bool = True) -> list[Tensor]:
        """(T, I) -> for each layer (T, O), in as few products as can be.

        Args:
            inputs: of all layers.
            valued: the outputs are looked at; else they may be zeros, and have the right gradients all the same.
        """
        if self.frozen is None:
            return [self._own(layer, inputs) for layer in self._layers]
        return list(apply(AdaptedLinears, inputs, self.frozen, self.adapters, valued, *self.adapters.trained))

    def run(self, inputs: Tensor, *, valued: bool = True) -> tuple[Sequence[Tensor], Tensor | None]:
        """The same outside autograd, where it `is_plain`: the outputs, and what `back` needs beside the inputs."""
        assert self.frozen is not None
        return adapted(inputs, self.frozen, self.adapters, valued=valued)

    def back(
        self, inputs: Tensor | None, images: Tensor | None, gradients: Sequence[Tensor], *, has_gradient: bool = True
    ) -> Tensor | None:
        """The gradient of the inputs (T, I) that `run` took, if it `has_gradient`.

        Those of the adapters are added to theirs here: autograd would make a copy in float32 of each, and take as long
        again to hand it on.
        """
        assert self.frozen is not None
        totals = [_total(tensor) for tensor in self.adapters.trained]
        return adapted_back(inputs, images, self.frozen, self.adapters, gradients, totals, has_gradient=has_gradient)

    def _own(self, layer: Layer, inputs: Tensor) -> Tensor:
        """What one layer makes of (T, I) without the others: a plain one, a trained one, or by its own forward."""
        if layer.base is not None:
            return Group([layer], *self._dtypes)(inputs)[0]
        own_dtype, dtype = self._dtypes
        if type(layer.module) is nn.Linear:
            weight, bias = layer.module.weight, layer.module.bias
            return functional.linear(inputs, cast(weight, dtype), None if bias is None else cast(bias, dtype))
        with torch.autocast(inputs.device.type, own_dtype, enabled=own_dtype != torch.float32):
            output: Tensor = layer.module(inputs.to(own_dtype))
        return output.to(inputs.dtype)


class Layers:
    """A transformer's linear layers as they are in a step: adapters may have been switched off since the last one.

    Args:
        own_dtype: what the transformer would compute in by itself.
        device: where they are.

    Attributes:
        dtype: what tokens and products are in.
    """

    _whole: ClassVar[dict[tuple[int, torch.dtype], Tensor]] = {}
    """The trained weights of the step in the dtype of its products. There is one for all transformers, so that none of
    an expert that waits for its turn stays on the device."""

    def __init__(self, own_dtype: torch.dtype, device: torch.device) -> None:
        self._own_dtype = own_dtype
        self.dtype = product_dtype(own_dtype, device)
        self._groups: dict[tuple[nn.Module, ...], tuple[object, Group]] = {}

    def begin(self) -> None:
        """A step begins: the trained weights are not what they were."""
        self._whole.clear()

    def group(self, modules: Sequence[nn.Module], *, resident: bool = True) -> Group:
        """Layers that share an input; looked at again only where something of them has changed since the last step.

        Args:
            modules: themselves.
            resident: their weights stay on the device, and are laid together if there are several.
        """
        key, state = tuple(modules), [_state(module) for module in modules]
        before, group = self._groups.get(key, (None, None))
        if group is None or before != state:
            if resident and len(modules) > 1:
                lay_side_by_side([base_of(module) for module in modules])
                state = [_state(module) for module in modules]
            group = Group([self._layer(module) for module in modules], self._own_dtype, self.dtype)
            self._groups[key] = state, group
        return group

    def _layer(self, module: nn.Module) -> Layer:
        base, names = _base_and_adapters(module)
        if base is None or len(names) > 1:
            return Layer(module, None, None)
        return Layer(module, base, self._low_rank(module, names[0]) if names else None)

    def _low_rank(self, module: nn.Module, name: str) -> LowRank:
        assert isinstance(module, LoraLinear)
        down, up = module.lora_A[name].weight, module.lora_B[name].weight
        # A method of this object would be a circle, and the weights would stay until Python looks for those.
        return LowRank(down, up, float(module.scaling[name]), partial(self._cast, self.dtype))

    @classmethod
    def _cast(cls, dtype: torch.dtype, trained: Tensor) -> Tensor:
        """A parameter in the dtype of the products. Parameters that share a storage are cast in one go."""
        if trained.dtype == dtype:
            return trained
        storage = trained.untyped_storage()
        key = storage.data_ptr(), dtype
        whole = cls._whole.get(key)
        if whole is None:
            flat = torch.empty(0, dtype=trained.dtype, device=trained.device).set_(storage)
            whole = cls._whole[key] = flat.to(dtype)
        return whole.as_strided(trained.shape, trained.stride(), trained.storage_offset())


def _state(module: nn.Module) -> object:
    """All that may change of a layer from step to step, as what can be compared."""
    if not isinstance(module, LoraLinear):
        return _places(module)
    parts: dict[str, Any] = module._modules  # quicker than asking for attributes, which was half of this
    downs, ups, dropouts = (parts[name]._modules for name in ("lora_A", "lora_B", "lora_dropout"))
    adapters = [
        (name, *map(id, (downs[name]._parameters["weight"], ups[name]._parameters["weight"])), drops(dropouts[name]),
         module.scaling[name])
        for name in module.active_adapters
        if name in downs
    ]  # fmt: skip
    return _places(parts["base_layer"]), adapters, module.disable_adapters, module.merged


def _places(layer: nn.Module) -> list[tuple[int, bool]]:
    """Where the parameters of a layer lie, and whether they are trained."""
    return [(one.data_ptr(), one.requires_grad) for one in layer._parameters.values() if one is not None]


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
    if not (type(layer) is nn.Linear or isinstance(layer, QuantLinear)):
        return None
    trained = (parameter for parameter in layer._parameters.values() if parameter is not None)  # quicker than asking
    return None if any(parameter.requires_grad for parameter in trained) else layer


def _is_plain(module: LoraLinear, name: str) -> bool:
    """Whether an adapter is `scale * up @ down` and nothing more."""
    other = name in module.lora_variant or module.lora_bias.get(name, False)
    return not (other or drops(module.lora_dropout[name]))


def drops(dropout: nn.Module) -> bool:
    """Whether a layer of peft's `lora_dropout` lets numbers drop out now; it may be an identity."""
    return isinstance(dropout, nn.Dropout) and dropout.p > 0 and dropout.training
