"""The trained adapter in files: every kind in every layout, so that every reader computes what was trained.

| kind | ComfyUI and kohya | diffusers |
|---|---|---|
| LoRA, rsLoRA | `lora_A`/`lora_B` with the scale in B; kohya: `lora_down`/`lora_up` with alpha | with the scale in B |
| DoRA | as LoRA, and `dora_scale` (out, 1) | and `lora_magnitude_vector.weight` |
| LoHa, LoKr | `hada_w1_a` …, `lokr_w1` … and `alpha` | the same with the scale in the first factor |

ComfyUI divides a DoRA's `dora_scale` by the norms of the *base's* rows (`weight_decompose` in its
`comfy/weight_adapter/base.py`), where the paper, peft and LyCORIS divide by those of the changed weight. So its layouts
get `magnitude * |W| / |W + change|`, and the header says so (`wangen.dora_norm`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from wangen.generator.companions import sort_out
from wangen.generator.header_keys import DORA_NORM
from wangen.generator.headers import read_header
from wangen.generator.lora_keys import Layout, adapter_key, is_of_qwen, module_name
from wangen.generator.steps import Train
from wangen.runtime.adapter_layers import change_of, parts_of
from wangen.runtime.adapters import Adapter, AdapterWeight, is_dora, plain_lora, read_adapter
from wangen.runtime.lora import as_stored, cast, described, name_tensors, needs_description
from wangen.runtime.safetensors_file import write_if_other
from wangen.runtime.training.adapter import FIRST_FACTORS
from wangen.runtime.training.adapter_config import adapter_settings, merged
from wangen.runtime.weights.quantized import read_weight

BaseWeight = Callable[[str], torch.Tensor]
"""The frozen weight (out_features, in_features) under a module, in float32."""


def as_adapter(parameters: Mapping[str, torch.Tensor], options: Train, expert: str = "") -> Adapter:
    """The neutral form of a trained adapter's parameters, of a model in memory or of a training state.

    Args:
        parameters: by name, as `adapter.add_adapter` gives them.
        options: the flags it was trained with.
        expert: as for `add_adapter`.
    """
    chosen = adapter_settings(options, expert)
    adapter: Adapter = {}
    for module, parts in parts_of(parameters).items():
        held = {part: tensor.detach().float().cpu() for part, tensor in parts.items()}
        magnitude = held.pop("magnitude", None)
        adapter[module] = AdapterWeight(chosen.kind, held, chosen.scale(module), magnitude)
    return adapter


def save(
    path: Path,
    parameters: Mapping[str, torch.Tensor],
    options: Train,
    metadata: Mapping[str, str],
    *,
    expert: str = "",
) -> list[Path]:
    """Write an adapter in every layout asked for: the first under `path`, the others with the layout as a suffix.

    Args:
        path: the file of the first layout.
        parameters: by name, as `adapter.add_adapter` gives them, or other values for them.
        options: the flags it was trained with; `--lora_layout` and `--save_precision` say what is written.
        metadata: the header's text fields.
        expert: as for `add_adapter`.

    Returns:
        The files, in the order of the layouts.

    Raises:
        WangenError: the disk refused (an earlier file of that name is untouched), a number that the precision cannot
            hold, or the model's file, whose weights a DoRA's file for ComfyUI needs, cannot be read.
    """
    dtype: torch.dtype = getattr(torch, options.save_precision)
    adapter = as_adapter(parameters, options, expert)
    lora, written = plain_lora(adapter), []
    for number, layout in enumerate(options.lora_layout):
        target = path if number == 0 else path.with_name(f"{path.stem}-{layout}{path.suffix}")
        header, stored = dict(metadata), adapter
        if has_dora_scale(adapter, layout):
            stored = _over_base(adapter, _file_base(options, expert))
            header[DORA_NORM] = "base"
        if lora is None:
            tensors = name_adapter(stored, layout, dtype)
        else:
            rounded = as_stored(lora, layout, dtype)
            tensors = name_tensors(rounded, layout)
            header |= described(rounded) if needs_description(rounded, layout) else {}
        write_if_other(target, tensors, header)
        written.append(target)
    return written


def has_dora_scale(adapter: Mapping[str, AdapterWeight], layout: Layout) -> bool:
    """Whether a layout's file has `dora_scale`, which ComfyUI reads."""
    return layout in ("comfyui", "kohya") and is_dora(adapter)


def name_adapter(adapter: Adapter, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a DoRA's, LoHa's or LoKr's file, ready for `safetensors_file.write`.

    Args:
        adapter: the neutral form; a DoRA's magnitudes as the layout has them.
        layout: whose keys to write.
        dtype: of all tensors but the alphas and a DoRA's magnitudes, which are float32.

    Raises:
        KeyError: a module that no transformer has.
        WangenError: a number that the dtype cannot hold.
    """
    tensors: dict[str, torch.Tensor] = {}
    key = partial(adapter_key, layout, qwen=is_of_qwen(adapter))
    for module, weight in adapter.items():
        stored, alpha = _scaled(weight, layout)
        for part, factor in stored.items():
            tensors[key(module, part)] = cast(factor, dtype, f"{module} {part}")
        if alpha is not None:
            tensors[key(module, "alpha")] = torch.tensor(alpha, dtype=torch.float32)
        if weight.magnitude is not None and layout in ("comfyui", "kohya"):
            tensors[key(module, "dora_scale")] = weight.magnitude.float()[:, None]
        elif weight.magnitude is not None:
            tensors[key(module, "magnitude")] = weight.magnitude.float()
    return tensors


def _scaled(weight: AdapterWeight, layout: Layout) -> tuple[Mapping[str, torch.Tensor], float | None]:
    """A weight's factors as a layout stores them, and its alpha, where that is stored.

    Of a LoKr of whole matrices no reader agrees what an alpha would mean; its scale is in the first.
    """
    carries = {"kohya": True, "comfyui": weight.kind != "lora"}.get(layout, False)
    if carries and weight.rank:
        return weight.factors, weight.scale * weight.rank
    if weight.scale == 1.0:
        return weight.factors, None
    first = next(name for name in FIRST_FACTORS[weight.kind] if name in weight.factors)
    return {**weight.factors, first: weight.factors[first].double() * weight.scale}, None


def _over_base(adapter: Adapter, base: BaseWeight) -> Adapter:
    """A DoRA whose magnitudes are over the norms of the base's rows."""
    changed: Adapter = {}
    for module, weight in adapter.items():
        assert weight.magnitude is not None
        frozen = base(module).double().cpu()
        change = weight.scale * (weight.factors["up"].double() @ weight.factors["down"].double())
        ratio = torch.linalg.vector_norm(frozen, dim=1) / torch.linalg.vector_norm(frozen + change, dim=1)
        magnitude = (weight.magnitude.double() * ratio).float()
        changed[module] = AdapterWeight(weight.kind, weight.factors, weight.scale, magnitude, over_base=True)
    return changed


def _file_base(options: Train, expert: str) -> BaseWeight:
    """The frozen weights as the model's file has them, with `--base_weights` added; each is read when it is asked for.

    Raises:
        WangenError: a file cannot be read.
    """
    dit = options.dit_high_noise if expert == "high_noise" else options.dit
    assert dit is not None
    contents = sort_out(read_header(dit, "--dit"))
    names = {module_name(name.removesuffix(".weight")): name for name in contents.weights if name.endswith(".weight")}
    added = [(read_adapter(path, "--base_weights"), multiplier) for path, multiplier in merged(options)]

    def read(module: str) -> torch.Tensor:
        name = names[module]
        scale = contents.companions.get(name, {}).get("scale")
        weight = read_weight(contents.weights[name], scale, torch.float32)
        for adapter, multiplier in added:
            if module in adapter:
                weight += multiplier * change_of(adapter[module])
        return weight

    return read
