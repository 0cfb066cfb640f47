"""LoRAs of Wan and Qwen-Image: files of every layout in and out; `adapter_layers` applies them.

In between stands one neutral form, a dictionary from the module's name in diffusers to its `LoraWeight`. The change
that a LoRA makes to a weight is `multiplier * alpha / rank * up @ down`. `merge.py` adds it to a checkpoint for good.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from wangen.generator.adapter_parts import PLAIN_LORA, Parts, adapter_modules, unfit_adapter, unfit_lora
from wangen.generator.errors import WangenError
from wangen.generator.formats import DOWNLOAD_AGAIN, TensorInfo
from wangen.generator.kinds import expect, judge
from wangen.generator.lora_config import (
    DIFFUSERS_METADATA,
    DIFFUSERS_PREFIX,
    Alphas,
    config_fields,
    lora_file,
    read_alphas,
)
from wangen.generator.lora_keys import Layout, is_of_qwen, module_names
from wangen.runtime.libraries import BaseTunerLayer
from wangen.runtime.weights.reading import read_tensor


@dataclass(frozen=True)
class LoraWeight:
    """The low-rank change of one linear layer, or of the patch embedding, which is a convolution.

    Attributes:
        down: (rank, in_features), of a convolution (rank, in_channels, *kernel).
        up: (out_features, rank), of a convolution (out_channels, rank, 1, 1, 1).
        alpha: the numerator of the scale `alpha / rank`.
    """

    down: torch.Tensor
    up: torch.Tensor
    alpha: float

    @property
    def rank(self) -> int:
        """The inner size of the two factors."""
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        """What `up @ down` is multiplied with."""
        return self.alpha / self.rank

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that it changes."""
        return (self.up.shape[0], *self.down.shape[1:])


Lora = dict[str, LoraWeight]


def read_lora(path: Path) -> Lora:
    """A LoRA file of the ComfyUI, kohya/musubi, diffusers or peft layout, told apart key by key.

    Args:
        path: the file, or a folder that peft or diffusers wrote.

    Returns:
        Module name in diffusers (`blocks.0.attn1.to_q`) -> its weights, on the CPU in the file's dtype. Where no
        alpha is stored, it is what peft's configuration or the diffusers metadata say, or the rank.

    Raises:
        WangenError: not a LoRA, or one that holds keys that are not understood (LoHa, LoKr, DoRA, whole-weight
            differences, another model), or a damaged one: half a LoRA is worse than none.
    """
    file = lora_file(path)
    header = expect(file, ("lora", "lora-other"), "--lora_weight")
    if (judged := judge(header)).kind == "lora-other" and not unfit_adapter(header.tensors):
        raise WangenError(f"this is {judged.words}, and only plain LoRAs can be merged into a checkpoint",
                          where=str(file), cure="generate takes it as it is; or give a plain LoRA")  # fmt: skip
    if problem := unfit_lora(header.tensors):
        raise WangenError(problem, where=str(file), cure=f"give {PLAIN_LORA}")
    modules = adapter_modules(header.tensors)
    alphas = read_alphas(file, header.metadata, modules)
    lora = {module: _weight(file, module, modules[module], alphas) for module in sorted(modules)}
    for module, weight in lora.items():  # after all are read: in between, it would scatter them over the memory
        if not all(math.isfinite(_largest(factor)) for factor in (weight.down, weight.up)):
            raise WangenError(f"this LoRA holds NaN or infinity in {module}; it is damaged", where=str(file),
                              cure="take an earlier one of the same training, or download it again")  # fmt: skip
    return lora


def as_stored(lora: Mapping[str, LoraWeight], layout: Layout, dtype: torch.dtype | None) -> Lora:
    """A LoRA with the numbers that its file will hold.

    Kohya files carry alpha. In the other layouts the scale is multiplied into `up`, so that every reader, those that
    know `.alpha` beside `lora_A` and those that do not, finds the same change of the weights. Scales that are powers
    of two (alpha 16, rank 32) lose nothing by it: see `_with_scale`. Only float8 has too small a range for that: see
    `_fill_float8`; what comes from float8 gets factors of usual sizes again in every layout.

    Raises:
        WangenError: a number that the dtype cannot hold.
    """
    float8 = torch.float8_e4m3fn
    eight = dtype == float8 or (dtype is None and any(weight.up.dtype == float8 for weight in lora.values()))
    keeps = layout == "kohya" and not any(weight.down.itemsize == 1 for weight in lora.values())
    exact = _fill_float8(lora) if eight else lora if keeps else _folded(lora, dtype)
    return {
        name: LoraWeight(
            cast(exact[name].down, dtype or weight.down.dtype, name),
            cast(exact[name].up, dtype or weight.up.dtype, name),
            exact[name].alpha,
        )
        for name, weight in lora.items()
    }


def name_tensors(stored: Mapping[str, LoraWeight], layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of a file from what `as_stored` gave; alpha is written where the layout has it and it says something.

    Raises:
        WangenError: a module that no transformer has.
    """
    tensors: dict[str, torch.Tensor] = {}
    qwen = is_of_qwen(stored)
    for module, weight in stored.items():
        try:
            down, up, alpha = module_names(layout, module, qwen=qwen)
        except KeyError as error:
            raise WangenError(f"{module} is no module of a Wan or Qwen-Image transformer") from error
        tensors[down], tensors[up] = weight.down, weight.up
        if layout == "kohya" or (layout == "comfyui" and weight.alpha != weight.rank):
            tensors[alpha] = torch.tensor(weight.alpha, dtype=torch.float32)
    return tensors


def cast(tensor: torch.Tensor, dtype: torch.dtype, name: str, where: str = "") -> torch.Tensor:
    """A tensor in another dtype, each number rounded once.

    Args:
        tensor: what to round.
        dtype: the dtype to round to.
        name: of the tensor, for the message.
        where: the file it came from, for the message.

    Raises:
        WangenError: a number is too large for it, or was not finite before.
    """
    largest = _largest(tensor)
    if not math.isfinite(largest):
        raise WangenError(f"{name} holds NaN or infinity; the file is damaged", where=where, cure=DOWNLOAD_AGAIN)
    if largest > torch.finfo(dtype).max:  # float8 has no infinity and would take its largest number instead
        raise WangenError(f"{name} holds numbers that {str(dtype).removeprefix('torch.')} cannot hold", where=where,
                          cure="choose bfloat16 or float32")  # fmt: skip
    return tensor.to(dtype)


def _largest(tensor: torch.Tensor) -> float:
    """The largest absolute value; NaN when one is among the numbers."""
    plain = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    return max(map(abs, map(float, plain.aminmax()))) if plain.numel() else 0.0


def lora_fields(lora: Mapping[str, LoraWeight]) -> dict[str, Any]:
    """The fields of the `LoraConfig` of a LoRA that is not empty."""
    return config_fields(
        {module: weight.rank for module, weight in lora.items()},
        {module: weight.alpha for module, weight in lora.items()},
    )


def described(lora: Mapping[str, LoraWeight]) -> dict[str, str]:
    """What diffusers reads of a file's header."""
    own = {DIFFUSERS_PREFIX + key: value for key, value in lora_fields(lora).items()}
    return {DIFFUSERS_METADATA: json.dumps(own, sort_keys=True)}


def needs_description(stored: Mapping[str, LoraWeight], layout: Layout) -> bool:
    """Whether diffusers before 0.40 would take ranks that differ for scales; in kohya's layout all have alphas."""
    folded = all(weight.alpha == weight.rank for weight in stored.values())
    return layout != "kohya" and folded and len({weight.rank for weight in stored.values()}) > 1


class Sized(Protocol):
    """What changes a weight of a certain shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that it changes."""


def require_size(name: str, weight: Sized, shape: Sequence[int], where: str = "") -> None:
    """See that an adapter's factors make a change of a weight's shape.

    Raises:
        WangenError: they do not.
    """
    if weight.shape != tuple(shape):
        found, wanted = ("x".join(map(str, sizes)) for sizes in (weight.shape, shape))
        raise WangenError(
            f"this LoRA is for a model of another size: {name} is {found} in it and {wanted} in the transformer",
            where=where,
            cure="use it with the model it was trained on",
        )


def match_modules(transformer: torch.nn.Module, lora: Mapping[str, Sized]) -> tuple[list[str], list[str]]:
    """The names of an adapter that the model has, their sizes compared, and those that it lacks.

    Raises:
        WangenError: nothing matches, or the sizes are those of another model.
    """
    modules = dict(transformer.named_modules())
    fitting = [name for name in lora if name in modules]
    for name in fitting:
        layer = base_layer(modules[name])
        # A quantised layer has no weight of its own shape.
        linear = isinstance(layer, torch.nn.Linear)
        require_size(name, lora[name], (layer.out_features, layer.in_features) if linear else layer.weight.shape)
    if not fitting:
        raise nothing_matches(lora)
    return fitting, [name for name in lora if name not in modules]


def base_layer(module: torch.nn.Module) -> Any:
    """The layer under adapters; the module itself where it has none."""
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def nothing_matches(modules: Iterable[str], where: str = "") -> WangenError:
    """The error of a LoRA for quite another model, from the names of what it changes."""
    return WangenError(
        f"nothing in this LoRA matches the model; it changes {', '.join(list(modules)[:3])} …", where=where
    )


def adapter_layers(transformer: torch.nn.Module) -> dict[str, BaseTunerLayer]:
    """The layers that carry adapters of any kind, by module name."""
    return {name: layer for name, layer in transformer.named_modules() if isinstance(layer, BaseTunerLayer)}


def _weight(path: Path, module: str, parts: Parts, alphas: Alphas) -> LoraWeight:
    down, up = read_tensor(parts["down"]), read_tensor(parts["up"])
    return LoraWeight(down, up, read_alpha(path, module, parts.get("alpha"), alphas, down.shape[0]))


def read_alpha(path: Path, module: str, stored: TensorInfo | None, alphas: Alphas, rank: int) -> float:
    """The alpha of a module: what the file holds, else what is said beside it.

    Args:
        path: the file, for the message.
        module: whose alpha it is.
        stored: a tensor of any shape with one element; None where the file has none.
        alphas: what is said beside it.
        rank: of the module.

    Raises:
        WangenError: the tensor holds more numbers than one, none, or one that is not finite.
    """
    tensor = read_tensor(stored) if stored else torch.tensor(alphas.of(module, rank), dtype=torch.float64)
    alpha = float(tensor.double().sum()) if tensor.numel() == 1 else math.nan
    if not math.isfinite(alpha):
        raise WangenError(f"the alpha of {module} is not a number", where=str(path))
    return alpha


def _folded(lora: Mapping[str, LoraWeight], dtype: torch.dtype | None) -> Lora:
    """The same change with alpha = rank; where the scale was not 1, `up` is float64. `dtype` as in `as_stored`."""
    return {name: weight if weight.scale == 1.0 else _with_scale(weight, dtype) for name, weight in lora.items()}


def _with_scale(weight: LoraWeight, dtype: torch.dtype | None) -> LoraWeight:
    """The same change with the scale in `up`.

    For float16, below whose 6e-5 numbers lose digits, and from float8, whose whole range is filled, a power of two goes
    over from `down`, so that the largest numbers of both are about as large: it is exact, and each is as far from that
    end as it can be.
    """
    down, up = weight.down, weight.up.double() * weight.scale
    if (dtype or weight.up.dtype) == torch.float16 or down.itemsize == 1:
        sizes = _largest(down), _largest(up)
        if all(0 < size < math.inf for size in sizes):
            shift = 2.0 ** round(math.log2(sizes[0] / sizes[1]) / 2)
            down, up = down.double() / shift, up * shift
    return LoraWeight(down, up, float(weight.rank))


def _fill_float8(lora: Mapping[str, LoraWeight]) -> Lora:
    """The same change with factors that use the range of float8, whose smallest number is 0.002.

    A trained LoRA's numbers lie below 0.02, where float8 has next to no digits. Both factors are multiplied by powers
    of two, which is exact, and alpha is divided by them.
    """

    def exponent(tensors: Iterable[torch.Tensor]) -> int:
        largest = max(float(tensor.float().abs().max()) for tensor in tensors)
        return math.floor(math.log2(torch.finfo(torch.float8_e4m3fn).max / largest)) if 0 < largest < math.inf else 0

    down_by = 2.0 ** exponent(weight.down for weight in lora.values())
    up_by = 2.0 ** exponent(weight.up for weight in lora.values())
    return {
        name: LoraWeight(weight.down.float() * down_by, weight.up.float() * up_by, weight.alpha / down_by / up_by)
        for name, weight in lora.items()
    }
