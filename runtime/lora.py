"""LoRAs of Wan transformers: files of every layout in and out, applied as peft adapters or merged.

In between stands one neutral form, a dictionary from the module's name in diffusers to its `LoraWeight`. The change
that a LoRA makes to a weight is `multiplier * alpha / rank * up @ down`.
"""

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from peft.tuners.lora import LoraLayer

from wangen.generator.errors import WangenError
from wangen.generator.headers import expect
from wangen.runtime.lora_keys import Layout, module_names, parse_key
from wangen.runtime.weights import read_tensors


@dataclass(frozen=True)
class LoraWeight:
    """The low-rank change of one linear layer.

    Attributes:
        down: (rank, in_features).
        up: (out_features, rank).
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


Lora = dict[str, LoraWeight]


def read_lora(path: Path, flag: str = "--lora_weight") -> Lora:
    """A LoRA file of the ComfyUI, kohya/musubi, diffusers or peft layout, told apart key by key.

    Args:
        path: the file.
        flag: the flag it was given to, for messages.

    Returns:
        Module name in diffusers (`blocks.0.attn1.to_q`) -> its weights, on the CPU in the file's dtype. Where no
        alpha is stored, it is what the diffusers metadata say, or the rank.

    Raises:
        WangenError: not a LoRA, or one that holds keys that are not understood (LoHa, LoKr, DoRA, whole-weight
            differences, another model): half a LoRA is worse than none.
    """
    header = expect(path, "lora", flag)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    strange: list[str] = []
    for key, tensor in read_tensors(path, header):
        if parsed := parse_key(key):
            # A copy: a mapped file could not be replaced on Windows while the LoRA is in use.
            parts.setdefault(parsed.module, {})[parsed.part] = tensor.clone()
        else:
            strange.append(key)
    if strange:
        raise WangenError(
            f"{len(strange)} of {len(header.tensors)} keys of this LoRA are not understood, "
            f"such as {', '.join(sorted(strange)[:3])}",
            where=str(path),
            cure="give a plain LoRA (down and up matrices) of a Wan transformer",
        )
    alphas = _diffusers_alphas(header.metadata)
    return {module: _weight(path, module, parts[module], alphas) for module in sorted(parts)}


def to_layout(lora: Mapping[str, LoraWeight], layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of a LoRA file, ready for `safetensors_file.write`.

    Kohya files carry alpha. In the two others the scale is multiplied into `up`: then every reader, those that know
    `.alpha` beside `lora_A` and those that do not, finds the same change of the weights. Scales that are powers of
    two (alpha 16, rank 32) lose nothing by it.

    Args:
        lora: the neutral form.
        layout: whose keys to write.

    Raises:
        WangenError: a module that the Wan transformer does not have.
    """
    tensors: dict[str, torch.Tensor] = {}
    for module, weight in lora.items():
        try:
            down, up, alpha = module_names(layout, module)
        except KeyError as error:
            raise WangenError(f"{module} is no module of a Wan transformer") from error
        tensors[down] = weight.down
        if layout == "kohya":
            tensors[up] = weight.up
            tensors[alpha] = torch.tensor(weight.alpha, dtype=torch.float32)
        elif weight.scale == 1.0:
            tensors[up] = weight.up
        else:
            tensors[up] = (weight.up.float() * weight.scale).to(weight.up.dtype)
    return tensors


def apply_lora(
    transformer: WanTransformer3DModel, lora: Mapping[str, LoraWeight], multiplier: float = 1.0, *, name: str
) -> list[str]:
    """Add a LoRA to a transformer as a frozen, active peft adapter beside those already there.

    Args:
        transformer: the model; its own weights stay as they are.
        lora: the neutral form.
        multiplier: strength; 1 is as trained. `set_multiplier` changes it later.
        name: the adapter's name, unique within the model, without dots.

    Returns:
        The modules of the LoRA that this model does not have (an I2V LoRA on a T2V model), for the caller to tell.

    Raises:
        WangenError: nothing matches, the sizes are those of another model, or the name is taken.
    """
    if name in getattr(transformer, "peft_config", {}):
        raise WangenError(f"two LoRAs called {name}", cure="give each LoRA once")
    fitting, left_out = _match(transformer, lora)
    ranks = {module: lora[module].rank for module in fitting}
    alphas = {module: lora[module].alpha for module in fitting}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(fitting),
        rank_pattern={re.escape(module): value for module, value in ranks.items() if value != rank},
        alpha_pattern={re.escape(module): value for module, value in alphas.items() if value != alpha},
        init_lora_weights=False,
        inference_mode=True,
    )
    with warnings.catch_warnings():
        # A second adapter on one model is meant here.
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        transformer.add_adapter(config, adapter_name=name)
    for module in fitting:
        layer = transformer.get_submodule(module)
        with torch.no_grad():
            layer.lora_A[name].weight.copy_(lora[module].down)
            layer.lora_B[name].weight.copy_(lora[module].up)
    set_multiplier(transformer, name, multiplier)
    # diffusers activates the newest adapter alone; here all of them add up.
    for layer in _lora_layers(transformer):
        layer.set_adapter(list(transformer.peft_config))
    transformer.requires_grad_(False)
    return left_out


def set_multiplier(transformer: WanTransformer3DModel, name: str, multiplier: float) -> None:
    """Set the strength of one applied LoRA; 1 is as trained, 0 switches it off."""
    for layer in _lora_layers(transformer):
        layer.set_scale(name, multiplier)


@torch.no_grad()
def merge_lora(
    transformer: WanTransformer3DModel, lora: Mapping[str, LoraWeight], multiplier: float = 1.0
) -> list[str]:
    """Add a LoRA's change to the weights themselves, computed in float32 and rounded once to their dtype.

    Args:
        transformer: the model that is changed; applied adapters stay applied.
        lora: the neutral form.
        multiplier: strength; 1 is as trained.

    Returns:
        The modules of the LoRA that this model does not have.

    Raises:
        WangenError: nothing matches, or the sizes are those of another model.
    """
    fitting, left_out = _match(transformer, lora)
    for module, linear in fitting.items():
        base, weight = linear.weight, lora[module]
        change = weight.up.to(base.device, torch.float32) @ weight.down.to(base.device, torch.float32)
        # A new tensor rather than an addition in place: the old one may be a mapping of the file.
        base.data = (base.float() + multiplier * weight.scale * change).to(base.dtype)
    return left_out


def _match(
    transformer: WanTransformer3DModel, lora: Mapping[str, LoraWeight]
) -> tuple[dict[str, torch.nn.Linear], list[str]]:
    """The linear layers that a LoRA changes, and the names that the model lacks."""
    modules = dict(transformer.named_modules())
    fitting: dict[str, torch.nn.Linear] = {}
    for name, weight in lora.items():
        module = modules.get(name)
        if module is None:
            continue
        linear = module.get_base_layer() if isinstance(module, LoraLayer) else module
        wanted = (linear.out_features, linear.in_features)
        found = (weight.up.shape[0], weight.down.shape[1])
        if found != wanted:
            raise WangenError(
                f"this LoRA is for a model of another size: {name} is {found[0]}x{found[1]} in it and "
                f"{wanted[0]}x{wanted[1]} in the transformer",
                cure="use it with the model it was trained on",
            )
        fitting[name] = linear
    if not fitting:
        raise WangenError(f"nothing in this LoRA matches the model; it changes {', '.join(list(lora)[:3])} …")
    return fitting, [name for name in lora if name not in fitting]


def _lora_layers(transformer: WanTransformer3DModel) -> list[LoraLayer]:
    return [module for module in transformer.modules() if isinstance(module, LoraLayer)]


def _weight(path: Path, module: str, parts: Mapping[str, torch.Tensor], alphas: Mapping[str, float]) -> LoraWeight:
    if "down" not in parts or "up" not in parts:
        raise WangenError(f"{module} has only {' and '.join(sorted(parts))} in this LoRA", where=str(path))
    down, up = parts["down"], parts["up"]
    if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1] or not down.shape[0]:
        raise WangenError(
            f"the matrices of {module} do not fit each other: {tuple(down.shape)} and {tuple(up.shape)}",
            where=str(path),
        )
    if "alpha" not in parts:
        return LoraWeight(down, up, _pattern(alphas, module, down.shape[0]))
    alpha = float(parts["alpha"].float().sum()) if parts["alpha"].numel() == 1 else math.nan
    if not math.isfinite(alpha):
        raise WangenError(f"the alpha of {module} is not a number", where=str(path))
    return LoraWeight(down, up, alpha)


def _diffusers_alphas(metadata: Mapping[str, str]) -> dict[str, float]:
    """Alpha by module name or end of name from the metadata that diffusers writes; under "" for all others."""
    try:
        fields: Any = json.loads(metadata.get("lora_adapter_metadata", "{}"))
        alphas = {str(key): float(value) for key, value in fields.get("transformer.alpha_pattern", {}).items()}
        if "transformer.lora_alpha" in fields:
            alphas[""] = float(fields["transformer.lora_alpha"])
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WangenError(f"the adapter metadata of this LoRA are malformed ({error})") from error
    if fields.get("transformer.use_rslora") or fields.get("transformer.use_dora"):
        raise WangenError("this LoRA was made with rsLoRA or DoRA, which are not supported")
    return alphas


def _pattern(alphas: Mapping[str, float], module: str, rank: int) -> float:
    for end, alpha in alphas.items():
        if end and (module == end or module.endswith(f".{end}")):
            return alpha
    return alphas.get("", float(rank))
