"""A module without memory, filled with the tensors of a checkpoint one by one."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from wangen.generator.companions import Contents, sort_out
from wangen.generator.errors import WangenError
from wangen.generator.formats import WHOLE, Header, Shapes, TensorInfo
from wangen.runtime.weights.quantized import (
    fp8_layer,
    is_quantized,
    read_weight,
    refuse_other_forms,
    stored_layer,
)

OTHER_FILE = "download the file again, or give the original, ComfyUI, GGUF or diffusers form of the model"

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Checkpoint:
    """A weight file whose tensors have got the names of a module.

    Attributes:
        path: for messages.
        contents: the tensors by the file's own names.
        names: the module's name -> the file's name.
    """

    path: Path
    contents: Contents
    names: Mapping[str, str]

    @property
    def shapes(self) -> Shapes:
        """By the module's names."""
        return {name: self.contents.weights[old].shape for name, old in self.names.items()}

    def position(self, item: tuple[str, str]) -> tuple[Path, int]:
        """Where a tensor lies, given its two names: in this order a disk is read from front to back."""
        place = self.contents.weights[item[1]].place
        return (place.file, place.offset) if place else (self.path, 0)

    def size(self, name: str, axis: int) -> int:
        """One size of one tensor, from which a configuration is derived.

        Raises:
            WangenError: there is no such tensor, it has fewer axes, or is empty.
        """
        old = self.names.get(name)
        shape = self.contents.weights[old].shape if old else None
        if shape is None or axis >= len(shape) or not shape[axis]:
            raise WangenError(f"the tensors do not fit the model: {name} is {shape or 'missing'}",
                              where=str(self.path), cure=OTHER_FILE)  # fmt: skip
        return shape[axis]

    def num_blocks(self, prefix: str) -> int:
        """How many blocks there are whose names begin with `prefix` and a number.

        Raises:
            WangenError: the numbers have holes.
        """
        pattern = re.compile(re.escape(prefix) + r"(\d{1,4})\.")
        numbers = {int(match[1]) for name in self.names if (match := pattern.match(name))}
        if numbers != set(range(len(numbers))):
            raise WangenError("the tensors do not fit the model: blocks are missing", where=str(self.path),
                              cure=OTHER_FILE)  # fmt: skip
        return len(numbers)


def open_checkpoint(path: Path, header: Header, rename: Callable[[Iterable[str]], Mapping[str, str]]) -> Checkpoint:
    """Give the tensors of a file the names of a module.

    Args:
        path: for messages.
        header: of the file.
        rename: file names without prefix -> module names; what it leaves out is not needed.

    Raises:
        WangenError: two tensors mean the same weight, or weights are quantised in a form that is not read.
    """
    contents = sort_out(header)
    refuse_other_forms(path, header, contents)
    names: dict[str, str] = {}
    for old, new in rename(contents.weights).items():
        if new in names:
            raise WangenError(f"two tensors of this file mean the same weight ({names[new]}, {old})", where=str(path))
        names[new] = old
    return Checkpoint(path, contents, names)


def build(path: Path, make: Callable[[], Model]) -> Model:
    """A module on the meta device; buffers that are counted out, as rotary frequencies are, have their values.

    Args:
        path: for messages.
        make: its constructor with a configuration derived from the tensors, which may be of any size.

    Raises:
        WangenError: there is no such model: a width that its heads do not divide, or the like.
    """
    try:
        with torch.device("meta"), _NoValues():
            return make()
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise WangenError(f"the tensors do not fit the model: {str(error)[:300]}", where=str(path),
                          cure=OTHER_FILE) from error  # fmt: skip


_STARTS = (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_)
"""What torch's own layers draw their first values with."""


class _NoValues(TorchFunctionMode):
    """A random start that nobody will see is neither drawn nor scaled, and counting is left to the CPU.

    All three on the meta device would make torch load its compiler, or sympy, which takes up to a second.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.div and args[0].is_meta:
            return args[0]
        named = dict(kwargs or {})
        if func in _STARTS and named["tensor"].is_meta:
            return named["tensor"]
        if func is torch.randn:
            func = torch.empty
        if func is torch.arange:
            named.setdefault("device", "cpu")
        return func(*args, **named)


def fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    device: torch.device | str,
    *,
    keep_float32: Iterable[str] = (),
    make_fp8: Iterable[str] = (),
    convert: Callable[[str, nn.Linear], nn.Linear] | None = None,
) -> None:
    """Put a checkpoint's tensors into a model on the meta device, and freeze it.

    Weights of linear layers and embeddings that are stored in 8 bits or in GGUF's blocks stay in that form.

    Args:
        model: built on the meta device.
        checkpoint: whose names are those of the model.
        dtype: None keeps what the file stores.
        device: where the tensors go; on `meta` only names and shapes are compared.
        keep_float32: parts of names whose tensors become float32 when a dtype is asked for.
        make_fp8: linear layers whose weights are stored as 8-bit floats with a scale per row, by names.
        convert: given the name of each linear layer and the layer as soon as its weight is read, returns the one to
            put in its place, or the same; its bias may not have been read yet.

    Raises:
        WangenError: missing, surplus or misshapen tensors, or the file cannot be read.
    """
    # Parameters by object: a tied weight is listed once, as the file stores it once.
    compare(checkpoint, {name: tuple(value.shape) for name, value in model.named_parameters()})
    kept, small = set(keep_float32), set(make_fp8)
    state: dict[str, torch.Tensor] = {}
    for name, old in sorted(checkpoint.names.items(), key=checkpoint.position):
        info = checkpoint.contents.weights[old]
        scale = checkpoint.contents.companions.get(old, {}).get("scale")
        wanted = torch.float32 if dtype is not None and kept & set(name.split(".")) else dtype
        layer = model.get_submodule(name.rpartition(".")[0]) if name.endswith(".weight") else model
        made = _in_few_bits(layer, info, scale, wanted, device, make_fp8=name.removesuffix(".weight") in small)
        if made is layer:
            weight = read_weight(info, scale, wanted, device)
            if convert and isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(weight)
            else:
                state[name] = weight
        if convert and isinstance(made, nn.Linear):
            made = _converted(convert, name, made, checkpoint)
        if made is not layer:
            _replace(model, layer, made)
    model.load_state_dict(state, strict=False, assign=True)
    model.to(device)
    model.eval().requires_grad_(False)
    unset = [name for name, value in [*model.named_parameters(), *model.named_buffers()] if value.is_meta]
    assert torch.device(device).type == "meta" or not unset, f"left on the meta device: {unset[:3]}"


def _converted(
    convert: Callable[[str, nn.Linear], nn.Linear], name: str, layer: nn.Linear, checkpoint: Checkpoint
) -> nn.Linear:
    """What is put in a layer's place; an error names its weight, as the file calls it."""
    try:
        return convert(name.removesuffix(".weight"), layer)
    except WangenError as error:
        raise WangenError(f"{checkpoint.names[name]}: {error.found}", where=str(checkpoint.path),
                          cure=error.cure) from None  # fmt: skip


def _in_few_bits(
    layer: nn.Module,
    info: TensorInfo,
    scale: TensorInfo | None,
    dtype: torch.dtype | None,
    device: torch.device | str,
    *,
    make_fp8: bool,
) -> nn.Module:
    """What stands for a layer whose weight stays as it is stored, or becomes 8-bit floats; else the layer, unread."""
    if isinstance(layer, nn.Linear | nn.Embedding) and is_quantized(info):
        return stored_layer(layer, info, scale, dtype, device)
    if isinstance(layer, nn.Linear) and make_fp8:
        return fp8_layer(layer, info, device)
    return layer


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put one module where another is, wherever that is: a tied embedding stands in two places."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            model.set_submodule(name, new)


def compare(checkpoint: Checkpoint, wanted: Shapes) -> None:
    """Refuse a checkpoint that is not exactly what a model has.

    Args:
        checkpoint: whose names are those of the model.
        wanted: the model's shapes.

    Raises:
        WangenError: missing, surplus or misshapen tensors, or whole numbers.
    """
    found, stored = checkpoint.shapes, checkpoint.contents.weights
    problems = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unexpected": sorted(found.keys() - wanted.keys()),
        "of another shape": sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name]),
        "of whole numbers": sorted(name for name, old in checkpoint.names.items() if stored[old].dtype in WHOLE),
    }
    words = [
        f"{len(names)} {problem} ({', '.join(names[:3])}{' …' if len(names) > 3 else ''})"
        for problem, names in problems.items()
        if names
    ]
    if words:
        raise WangenError("the tensors do not fit the model: " + "; ".join(words), where=str(checkpoint.path),
                          cure=OTHER_FILE)  # fmt: skip
