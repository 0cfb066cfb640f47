"""The LoRA that is being trained: added with peft, initialised from the seed, saved in the layouts that people load."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig

from wangen.generator.errors import WangenError
from wangen.generator.steps import Train
from wangen.runtime.lora import Lora, LoraWeight, read_lora, to_layout
from wangen.runtime.randomness import generator_for
from wangen.runtime.safetensors_file import serialize, write_chunks

NAME = "default"


def add_lora(transformer: WanTransformer3DModel, options: Train, targets: str) -> dict[str, torch.nn.Parameter]:
    """Add a trainable LoRA in float32 to a frozen transformer.

    `lora_A` is drawn as peft does (Kaiming uniform, a = sqrt 5), each module from its own seeded generator; `lora_B` is
    zero, so that training starts at the base model.

    Args:
        transformer: the frozen model.
        options: rank, alpha, dropout, seed and, if given, the weights to start from.
        targets: regular expression over module names, from the model profile.

    Returns:
        The trainable parameters by name, sorted.

    Raises:
        WangenError: no module matches, or the LoRA to start from does not fit.
    """
    config = LoraConfig(
        r=options.network_dim,
        lora_alpha=options.network_alpha,
        lora_dropout=options.network_dropout,
        target_modules=targets,
        init_lora_weights=False,
    )
    transformer.add_adapter(config, adapter_name=NAME)
    parameters = {name: p for name, p in sorted(transformer.named_parameters()) if p.requires_grad}
    if not parameters:
        raise WangenError("no module of this transformer matches the LoRA targets", cure="give the right --task")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.data = parameter.data.float()
            if ".lora_A." in name:
                bound = 1 / math.sqrt(parameter.shape[1])  # Kaiming uniform with a = sqrt 5
                start = torch.rand(parameter.shape, generator=generator_for(options.seed, "lora", name))
                parameter.copy_((2 * start - 1) * bound)
            else:
                parameter.zero_()
    if options.network_weights:
        _start_from(transformer, parameters, read_lora(options.network_weights, "--network_weights"), options)
    return parameters


def as_lora(parameters: Mapping[str, torch.Tensor], alpha: float) -> Lora:
    """The adapter's parameters, of a model in memory or of a training state, by module."""
    down, up = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"
    modules = sorted(name.removesuffix(down) for name in parameters if name.endswith(down))
    return {
        name: LoraWeight(parameters[name + down].detach().cpu(), parameters[name + up].detach().cpu(), alpha)
        for name in modules
    }


def save_lora(path: Path, lora: Lora, options: Train, metadata: Mapping[str, str]) -> list[Path]:
    """Write the LoRA in every layout asked for: the first under `path`, the others with the layout as a suffix.

    Raises:
        WangenError: the disk refused; an earlier file of that name is untouched.
    """
    dtype: torch.dtype = getattr(torch, options.save_precision)
    written = []
    for number, layout in enumerate(options.lora_layout):
        target = path if number == 0 else path.with_name(f"{path.stem}-{layout}{path.suffix}")
        content = b"".join(serialize(to_layout(lora, layout, dtype), metadata))
        if not (target.is_file() and target.read_bytes() == content):  # the same LoRA keeps its time stamp
            write_chunks(target, [content])
        written.append(target)
    return written


def metadata(options: Train, *, step: int, fingerprint: Mapping[str, Any]) -> dict[str, str]:
    """A LoRA's header: what was trained on which data with which settings; no time, host or path."""
    comment = {"ss_training_comment": options.training_comment} if options.training_comment else {}
    return {
        "format": "pt",
        "wangen.fingerprint": json.dumps(fingerprint, sort_keys=True),
        "ss_base_model_version": "wan",
        "ss_network_module": "networks.lora_wan",
        "ss_network_dim": str(options.network_dim),
        "ss_network_alpha": str(options.network_alpha),
        "ss_learning_rate": str(options.learning_rate),
        "ss_steps": str(step),
        "ss_seed": str(options.seed),
        **comment,
    }


def _start_from(
    transformer: WanTransformer3DModel, parameters: Mapping[str, torch.nn.Parameter], lora: Lora, options: Train
) -> None:
    """Copy a LoRA into the adapter, scaled so that it begins with the same change of the weights."""
    where = str(options.network_weights)
    fitting = {name: weight for name, weight in lora.items() if f"{name}.lora_A.{NAME}.weight" in parameters}
    if not fitting:
        raise WangenError("nothing in this LoRA fits the model", where=where, cure="give a LoRA of this model")
    ours = options.network_alpha / options.network_dim
    for name, weight in fitting.items():
        down, up = (parameters[f"{name}.lora_{side}.{NAME}.weight"] for side in "AB")
        if down.shape != weight.down.shape or up.shape != weight.up.shape:
            other_rank = weight.rank != options.network_dim
            raise WangenError(
                f"{name}: this LoRA is {tuple(weight.down.shape)}, the adapter is {tuple(down.shape)}",
                where=where,
                cure=f"give --network_dim {weight.rank}" if other_rank else "give a LoRA of this model, not of another",
            )
        with torch.no_grad():
            down.copy_(weight.down)
            up.copy_(weight.up.float() * (weight.scale / ours))
