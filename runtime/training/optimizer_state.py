"""What an optimizer knows, as plain tensors and numbers by parameter name, and back: exact, whatever the layout.

An optimizer may see many parameters as one flat tensor (`wangen.runtime.training.flat`); its state is cut into the
parts of each parameter all the same. A part is called `<parameter>/<what>`, and `group.<number>/<what>` what a group
counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from wangen.generator.errors import WangenError
from wangen.runtime.training.flat import ALIGNMENT, OTHER_ADAPTER, Place

Values = dict[str, Any]
Plain = int | float | bool | str
NO_STATE = {"params", "lr"}
"""Of a group: the learning rate follows from the step."""


INNER = ("codes", "scale", "qmap", "signed")
"""What makes a quantised state of torchao."""


@dataclass(frozen=True)
class Leaf:
    """A tensor as the optimizer sees it.

    Attributes:
        parameter: the tensor.
        names: of the parameters in it.
        places: where they lie in it, when it is a flat buffer; None when it is the one parameter itself.
        group: number of the optimizer's group.
    """

    parameter: torch.nn.Parameter
    names: tuple[str, ...]
    places: tuple[Place, ...] | None
    group: int


def snapshot(optimizer: torch.optim.Optimizer) -> list[Values]:
    """What each group holds, to tell later what was counted there, as Prodigy counts its d and schedule-free its k."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else deepcopy(value)
            for key, value in group.items()
            if key not in NO_STATE
        }
        for group in optimizer.param_groups
    ]


def collect(
    optimizer: torch.optim.Optimizer, leaves: Sequence[Leaf], initial: Sequence[Values]
) -> tuple[dict[str, torch.Tensor], dict[str, Plain]]:
    """The state: tensors (views, where that is possible) and numbers by name.

    Args:
        optimizer: over the leaves.
        leaves: every tensor that it sees.
        initial: `snapshot` of the fresh optimizer. Settings that are as they were are no state: a run that goes on with
            other settings gets the new ones.

    Raises:
        WangenError: it keeps something else than tensors and numbers, so that it could not be resumed.
    """
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Plain] = {}

    def put(name: str, value: Any) -> None:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            tensors[name] = value.detach()
        elif isinstance(value, Plain):
            numbers[name] = value
        else:
            raise WangenError(
                f"{type(optimizer).__name__} keeps a {type(value).__name__}, which cannot be resumed",
                cure="choose another --optimizer_type",
            )

    for leaf in leaves:
        for key, value in _opened(optimizer.state.get(leaf.parameter, {})).items():
            for name, part in _parts(leaf, key, value):
                put(f"{name}/{key}", part)
    for number, (group, before) in enumerate(zip(optimizer.param_groups, initial, strict=True)):
        for key, value in group.items():
            if key not in NO_STATE and not (key in before and _same(value, before[key])):
                put(f"group.{number}/{key}", value)
    return tensors, numbers


def restore(
    optimizer: torch.optim.Optimizer, leaves: Sequence[Leaf], tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Plain], where: str,
) -> None:  # fmt: skip
    """Put a state from `collect` into a fresh optimizer, on the device of its parameters; nothing is shared with it.

    Raises:
        WangenError: it is the state of other parameters.
    """
    known: dict[str, Values] = {}
    for full_name, value in {**tensors, **numbers}.items():
        name, key = full_name.rsplit("/", 1)
        known.setdefault(name, {})[key] = value
    for leaf in leaves:
        parts = [known.get(name, {}) for name in leaf.names]
        keys = parts[0].keys()
        if any(part.keys() != keys for part in parts):
            raise WangenError("the optimizer's state is of other parameters", where=where, cure=OTHER_ADAPTER)
        if keys:
            joined = {key: _joined(leaf, key, [part[key] for part in parts], where) for key in keys}
            optimizer.state[leaf.parameter] = _placed(_closed(joined), leaf, optimizer.param_groups[leaf.group])
    for number, group in enumerate(optimizer.param_groups):
        group.update(known.get(f"group.{number}", {}))


def _placed(state: Mapping[str, Any], leaf: Leaf, group: Mapping[str, Any]) -> Values:
    """The state on the parameter's device; as torch has it, the count of steps stays unless a kernel reads it."""
    stays = set() if group.get("fused") or group.get("capturable") else {"step"}
    return {
        key: value.to(leaf.parameter.device) if isinstance(value, torch.Tensor) and key not in stays else value
        for key, value in state.items()
    }


def _same(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(before, torch.Tensor):
        return isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor) and torch.equal(value, before)
    return bool(value == before)


def _parts(leaf: Leaf, key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value of a leaf's state for each parameter in it."""
    for name, place in zip(leaf.names, leaf.places or (), strict=leaf.places is not None):
        if not isinstance(value, torch.Tensor) or _is_shared(key, value):
            yield name, value
        elif _is_by_block(key):
            yield name, value[place.start // ALIGNMENT : place.end // ALIGNMENT]
        elif value.is_floating_point():
            yield name, value[place.start : place.stop].view(place.shape)
        else:  # codes of an 8-bit optimizer: the padding shares its last block, so it is part of the state
            yield name, value[place.start : place.end]
    if leaf.places is None:
        yield leaf.names[0], value


def _joined(leaf: Leaf, key: str, values: Sequence[Any], where: str) -> Any:
    """The parts of a leaf's parameters as one value again, in memory of its own."""
    first = values[0]
    if not isinstance(first, torch.Tensor):
        return first
    if leaf.places is None or _is_shared(key, first):
        return first.clone()
    scale = ALIGNMENT if _is_by_block(key) else 1
    result = torch.zeros(leaf.parameter.numel() // scale, dtype=first.dtype)
    for place, value in zip(leaf.places, values, strict=True):
        stop = place.stop if scale == 1 and value.is_floating_point() else place.end
        if value.numel() != (stop - place.start) // scale:
            raise WangenError("the optimizer's state is of other shapes", where=where, cure=OTHER_ADAPTER)
        result[place.start // scale : stop // scale] = value.flatten()
    return result


def _is_by_block(key: str) -> bool:
    """Whether a state has one value per block: bitsandbytes calls it absmax1, torchao the scale of a state."""
    return key.startswith("absmax") or key.endswith(".scale")


def _is_shared(key: str, value: torch.Tensor) -> bool:
    """Whether a state is one for the whole leaf: the count of steps, an 8-bit optimizer's map from codes to values."""
    return value.dim() == 0 or "qmap" in key


def _opened(state: Mapping[str, Any]) -> Values:
    """The state of a leaf with torchao's quantised tensors as the tensors inside them."""
    values: Values = {}
    for key, value in state.items():
        if type(value).__name__ == "OptimState8bit":
            values |= {f"{key}.{inner}": getattr(value, inner) for inner in INNER}
        else:
            values[key] = value
    return values


def _closed(values: Mapping[str, Any]) -> Values:
    """The reverse of `_opened`."""
    state = {key: value for key, value in values.items() if "." not in key}
    for key in values:
        if key.endswith(".codes"):
            name = key.removesuffix(".codes")
            cls = import_module("torchao.optim.subclass_8bit").OptimState8bit
            state[name] = cls(*(values[f"{name}.{inner}"] for inner in INNER), dtype=torch.float32)
    return state
