"""Adapters of every kind that is trained here, read from files of every layout: LoRA, DoRA, LoHa and LoKr.

In between stands one neutral form, a dictionary from the module's name in diffusers to its `AdapterWeight`. Plain
LoRAs have a narrower one of their own, `lora.Lora`, which is all that converting and merging files take.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from wangen.generator.adapter_parts import (
    FACTORS,
    INNER,
    MAGNITUDES,
    Parts,
    adapter_modules,
    is_dora_of_parts,
    kind_of_parts,
    rank_of,
    unfit_adapter,
)
from wangen.generator.errors import WangenError
from wangen.generator.formats import Header, TensorInfo
from wangen.generator.header_keys import DORA_NORM
from wangen.generator.kinds import expect
from wangen.generator.lora_config import Alphas, lora_file, read_alphas
from wangen.generator.lora_keys import AdapterKind
from wangen.runtime.lora import Lora, LoraWeight, read_alpha
from wangen.runtime.weights.reading import read_tensor


@dataclass(frozen=True)
class AdapterWeight:
    """The change of one linear layer.

    Attributes:
        kind: which product of the factors it is.
        factors: by the names in `FACTORS`, each a matrix.
        scale: what the product is multiplied with.
        magnitude: of a DoRA, (out_features,): what the rows of the changed weight are scaled to. None: they are not.
        over_base: the magnitude is divided by the norms of the base's rows instead of the changed weight's, which is
            what ComfyUI does.
    """

    kind: AdapterKind
    factors: Mapping[str, torch.Tensor]
    scale: float
    magnitude: torch.Tensor | None = None
    over_base: bool = False

    @property
    def rank(self) -> int:
        """The inner size of the factors; 0 for a LoKr of two whole matrices."""
        return next((self.factors[name].shape[0] for name in INNER[self.kind] if name in self.factors), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight that it changes."""
        if self.kind == "lora":
            return (self.factors["up"].shape[0], *self.factors["down"].shape[1:])
        if self.kind == "loha":
            return self.factors["hada_w1_a"].shape[0], self.factors["hada_w1_b"].shape[1]
        (left, top), (right, bottom) = (_whole_shape(self.factors, f"lokr_w{number}") for number in (1, 2))
        return left * right, top * bottom


Adapter = dict[str, AdapterWeight]


_TINY_SCALE = 2.0**-12
"""Below it a scale makes up for factors that fill the range of float8; alpha / rank is not as small."""


def with_smaller(weight: AdapterWeight, sizes: Mapping[str, float]) -> AdapterWeight:
    """The same change by factors whose largest numbers are about as large as `sizes` says, if a tiny scale allows it.

    Files in float8 fill its range, and have scales of billionths. The power of two by which a factor is divided here
    goes over to the scale, up to 1: nothing is rounded.

    >>> factors = {"down": torch.full((1, 4), 448.0), "up": torch.ones(4, 1)}
    >>> found = with_smaller(AdapterWeight("lora", factors, 2**-20), {"down": 0.5})
    >>> found.factors["down"][0, 0].item(), found.scale == 2**-10
    (0.4375, True)
    """
    if not 0 < weight.scale < _TINY_SCALE:
        return weight
    factors, scale = dict(weight.factors), weight.scale
    for part, size in sizes.items():
        factor = factors[part] if factors[part].itemsize >= 4 else factors[part].float()
        largest = float(factor.abs().max())
        if size < largest < math.inf:
            by = 2.0 ** max(0, min(round(math.log2(largest / size)), round(-math.log2(scale))))
            factors[part], scale = factor / by, scale * by
    return replace(weight, factors=factors, scale=scale)


def without_numbers(weight: AdapterWeight) -> AdapterWeight:
    """The same change with factors on the meta device, which have shapes and hold nothing; without a magnitude."""
    return replace(weight, factors={name: factor.to("meta") for name, factor in weight.factors.items()}, magnitude=None)


def is_dora(adapter: Mapping[str, AdapterWeight]) -> bool:
    """Whether it scales the rows of what it changes."""
    return any(weight.magnitude is not None for weight in adapter.values())


def read_adapter(path: Path, flag: str = "--network_weights") -> Adapter:
    """A LoRA, DoRA, LoHa or LoKr of the ComfyUI, kohya/musubi, diffusers or peft layout, told apart key by key.

    Args:
        path: the file, or a folder that peft or diffusers wrote.
        flag: the flag it was given to, for messages.

    Returns:
        Module name in diffusers -> its weights, on the CPU in the file's dtype. All are of one kind.

    Raises:
        WangenError: another kind of file, keys that are not understood, factors that do not fit each other, numbers
            that are not finite.
    """
    file, header, modules, alphas = _read_header(path, flag)
    over_base = header.metadata.get(DORA_NORM) == "base"
    adapter = {name: _weight(file, name, modules[name], alphas, over_base) for name in sorted(modules)}
    for name, weight in adapter.items():
        tensors = [*weight.factors.values(), *([] if weight.magnitude is None else [weight.magnitude])]
        if not all(bool(tensor.float().isfinite().all()) for tensor in tensors):
            raise WangenError(f"this adapter holds NaN or infinity in {name}; it is damaged", where=str(file),
                              cure="take an earlier one of the same training, or download it again")  # fmt: skip
    return adapter


def read_scales(path: Path, flag: str) -> dict[str, tuple[int, float]]:
    """Module name in diffusers -> rank and scale of an adapter, of which only the alphas are read.

    Args:
        path: as of `read_adapter`.
        flag: likewise.

    Raises:
        WangenError: as `read_adapter`.
    """
    file, _, modules, alphas = _read_header(path, flag)
    found: dict[str, tuple[int, float]] = {}
    for module, parts in sorted(modules.items()):
        rank = rank_of(parts)
        found[module] = rank, _scale(file, module, parts, rank, alphas)
    return found


def _read_header(path: Path, flag: str) -> tuple[Path, Header, dict[str, dict[str, TensorInfo]], Alphas]:
    """The file of an adapter, its header, its tensors by module and part, and the alphas beside them."""
    file = lora_file(path)
    header = expect(file, ("lora", "lora-other"), flag)
    if problem := unfit_adapter(header.tensors):
        raise WangenError(
            problem, where=str(file), cure="give a LoRA, DoRA, LoHa or LoKr of a Wan or Qwen-Image transformer"
        )
    modules = adapter_modules(header.tensors)
    kind = kind_of_parts(next(iter(modules.values())))
    dora = any(map(is_dora_of_parts, modules.values()))
    return file, header, modules, read_alphas(file, header.metadata, modules, kind=kind, dora=dora)


def plain_lora(adapter: Mapping[str, AdapterWeight]) -> Lora | None:
    """The narrower form of a plain LoRA; None of another kind, and of a DoRA."""
    if any(weight.kind != "lora" or weight.magnitude is not None for weight in adapter.values()):
        return None
    return {
        name: LoraWeight(weight.factors["down"], weight.factors["up"], weight.scale * weight.rank)
        for name, weight in adapter.items()
    }


def _weight(file: Path, module: str, parts: Parts, alphas: Alphas, over_base: bool) -> AdapterWeight:
    kind = kind_of_parts(parts)
    read = {part: read_tensor(info) for part, info in parts.items()}
    factors = {name: read[name] for name in FACTORS[kind] if name in read}
    scale = _scale(file, module, parts, rank_of(parts), alphas)
    magnitude = next((read[name].reshape(-1) for name in MAGNITUDES if name in read), None)
    return AdapterWeight(kind, factors, scale, magnitude, over_base and "dora_scale" in parts)


def _scale(file: Path, module: str, parts: Parts, rank: int, alphas: Alphas) -> float:
    """What a module's product is multiplied with; of a LoKr of whole matrices an alpha in the file says nothing."""
    if not rank:
        configured = alphas.rank_of(module) if alphas.default is not None else None
        return alphas.of(module, configured) / configured if configured else 1.0
    return read_alpha(file, module, parts.get("alpha"), alphas, rank) / rank


def _whole_shape(factors: Mapping[str, torch.Tensor], name: str) -> tuple[int, int]:
    """The size of a LoKr's matrix, whether it is whole or in two factors."""
    if name in factors:
        rows, columns = factors[name].shape
        return rows, columns
    return factors[f"{name}_a"].shape[0], factors[f"{name}_b"].shape[1]
