"""Trained adapters in files: every reader computes what was trained, and the header says what that is and no more."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from helpers import every
from loras import LORAS, output
from parity import DIT, DITS, max_abs
from safetensors import safe_open
from safetensors.torch import load_file
from test_lora_described import drawn
from trained import KINDS, MODEL, base_model, options_of, predicted, trained

from wangen import profiles
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.header_keys import DORA_NORM
from wangen.generator.steps import Train
from wangen.runtime import safetensors_file
from wangen.runtime.adapter_layers import apply_adapter, base_weight
from wangen.runtime.adapters import read_adapter
from wangen.runtime.lora import adapter_layers, read_lora
from wangen.runtime.training import full
from wangen.runtime.training.adapter import add_adapter, merge_base_weights
from wangen.runtime.training.adapter_files import as_adapter, save
from wangen.runtime.training.adapter_refusals import require_adapter
from wangen.runtime.training.metadata import metadata
from wangen.runtime.training.plan import Plan
from wangen.runtime.weights.transformer import load_transformer, saved_tensors, transformer_names

LAYOUTS = ("comfyui", "kohya", "diffusers")
STEMS = {
    "comfyui": "diffusion_model.blocks.1.self_attn.q",
    "kohya": "lora_unet_blocks_1_self_attn_q",
    "diffusers": "transformer.blocks.1.attn1.to_q",
}
MODULE = "blocks.1.attn1.to_q"
FINGERPRINT = {"dataset": "0" * 20, "dit": "1" * 64}


def saved(folder: Path, kind: str, layout: str, **changes: Any) -> tuple[Any, Path]:
    """A trained transformer, and the file of its adapter."""
    options = options_of(folder, lora_layout=(layout,), **KINDS[kind], **changes)
    transformer, parameters = trained(options)
    (path,) = save(folder / "lora.safetensors", parameters, options, {})
    return transformer, path


def changed_weight(transformer: Any, module: str) -> torch.Tensor:
    """The weight that a layer computes with, as peft merges it; the base is left as it was."""
    layer = adapter_layers(transformer)[module]
    before = layer.get_base_layer().weight.data.clone()
    layer.merge()
    after = layer.get_base_layer().weight.data
    layer.get_base_layer().weight.data, layer.merged_adapters = before, []
    return after


def as_comfyui_computes(tensors: Mapping[str, torch.Tensor], stem: str, base: torch.Tensor) -> torch.Tensor:
    """The weight that ComfyUI makes of a base and a file, in float64.

    Source: `comfy/weight_adapter/lora.py`, `loha.py`, `lokr.py` and `weight_decompose` in `base.py`, version 0.3.77.
    """
    parts = {name.removeprefix(f"{stem}."): value.double() for name, value in tensors.items() if name.startswith(stem)}
    alpha = parts.get("alpha")
    if "hada_w1_a" in parts:
        change = (parts["hada_w1_a"] @ parts["hada_w1_b"]) * (parts["hada_w2_a"] @ parts["hada_w2_b"])
        rank = parts["hada_w1_b"].shape[0]
    elif any(name.startswith("lokr") for name in parts):
        first, second = (
            parts[f"lokr_w{n}"] if f"lokr_w{n}" in parts else parts[f"lokr_w{n}_a"] @ parts[f"lokr_w{n}_b"]
            for n in (1, 2)
        )
        change = torch.kron(first, second)
        inner = parts.get("lokr_w2_b", parts.get("lokr_w1_b"))
        rank, alpha = (inner.shape[0], alpha) if inner is not None else (1, None)
    else:
        down = parts["lora_A.weight"] if "lora_A.weight" in parts else parts["lora_down.weight"]
        up = parts["lora_B.weight"] if "lora_B.weight" in parts else parts["lora_up.weight"]
        change, rank = up @ down, down.shape[0]
    weight = base.double() + change * (1.0 if alpha is None else float(alpha) / rank)
    if "dora_scale" in parts:
        norm = base.double().norm(dim=1, keepdim=True) + torch.finfo(torch.float32).eps
        weight = weight * (parts["dora_scale"] / norm)
    return weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["comfyui", "kohya"])
def test_comfyui_computes_the_weights_that_were_trained(tmp_path: Path, kind: str, layout: str):
    transformer, path = saved(tmp_path, kind, layout)
    tensors = load_file(path)
    base, exact = base_weight(transformer.get_submodule(MODULE)).clone(), changed_weight(transformer, MODULE)
    found = as_comfyui_computes(tensors, STEMS[layout], base)
    step = float((exact - base).abs().max())
    assert step > 1e-3
    assert max_abs(found, exact) <= 1e-5 * step + 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", every(2, LAYOUTS, pytest.mark.slow))
def test_what_is_read_back_changes_the_weights_as_peft_does(tmp_path: Path, kind: str, layout: str):
    transformer, path = saved(tmp_path, kind, layout)
    fresh = base_model()
    assert apply_adapter(fresh, read_adapter(path), name="read") == []
    assert len(adapter_layers(fresh)) == 20
    for module in (MODULE, "blocks.0.ffn.net.2", "blocks.0.attn2.to_out.0"):
        exact = changed_weight(transformer, module)
        step = float((exact - base_weight(transformer.get_submodule(module))).abs().max())
        assert max_abs(changed_weight(fresh, module), exact) <= 1e-5 * step + 1e-6, module
    assert max_abs(predicted(fresh), predicted(transformer)) < 2e-5


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "lokr of four"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scale_that_is_a_power_of_two_loses_no_bit(tmp_path: Path, kind: str, layout: str):
    transformer, path = saved(tmp_path, kind, layout)
    fresh = base_model()
    apply_adapter(fresh, read_adapter(path), name="read")
    found, trained_layer = adapter_layers(fresh)[MODULE], adapter_layers(transformer)[MODULE]
    assert torch.equal(found.get_delta_weight("read"), trained_layer.get_delta_weight("default"))


@pytest.mark.parametrize(
    ("kind", "layout", "ends"),
    [
        ("lora", "comfyui", {"lora_A.weight", "lora_B.weight"}),
        ("rslora", "kohya", {"lora_down.weight", "lora_up.weight", "alpha"}),
        ("dora", "comfyui", {"lora_A.weight", "lora_B.weight", "dora_scale"}),
        ("dora", "diffusers", {"lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight"}),
        ("loha", "comfyui", {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "alpha"}),
        ("lokr", "comfyui", {"lokr_w1", "lokr_w2_a", "lokr_w2_b", "alpha"}),
        ("lokr", "kohya", {"lokr_w1", "lokr_w2_a", "lokr_w2_b", "alpha"}),
        ("lokr", "diffusers", {"lokr_w1", "lokr_w2_a", "lokr_w2_b"}),
        ("lokr of four", "comfyui", {"lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "alpha"}),
        ("lokr of whole matrices", "comfyui", {"lokr_w1", "lokr_w2"}),
    ],
)
def test_keys_are_those_that_readers_know(tmp_path: Path, kind: str, layout: str, ends: set[str]):
    _, path = saved(tmp_path, kind, layout)
    tensors = load_file(path)
    stem = f"{STEMS[layout]}."
    assert {name.removeprefix(stem) for name in tensors if name.startswith(stem)} == ends
    assert len(tensors) == 20 * len(ends)
    if "dora_scale" in ends:
        assert tensors[f"{stem}dora_scale"].shape == (256, 1)


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_diffusers_own_pipeline_computes_what_was_trained(tmp_path: Path, kind: str):
    transformer, path = saved(tmp_path, kind, "diffusers")
    pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=FlowMatchEulerDiscreteScheduler(),
                           transformer=base_model())  # fmt: skip
    pipeline.load_lora_weights(str(tmp_path), weight_name=path.name, local_files_only=True)
    assert max_abs(predicted(pipeline.transformer), predicted(transformer)) < 2e-5


@pytest.mark.parametrize("kind", ["lokr", "lokr of whole matrices"])
def test_diffusers_own_model_loads_a_lokr(tmp_path: Path, kind: str):
    transformer, path = saved(tmp_path, kind, "diffusers")
    theirs = base_model()
    theirs.load_lora_adapter(load_file(path), prefix="transformer")
    assert max_abs(predicted(theirs), predicted(transformer)) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_is_written_at_once_and_the_same_adapter_keeps_its_files(tmp_path: Path, kind: str):
    options = options_of(tmp_path, lora_layout=LAYOUTS, **KINDS[kind])
    transformer, parameters = trained(options)
    files = save(tmp_path / "a.safetensors", parameters, options, {"format": "pt"})
    assert [file.name for file in files] == ["a.safetensors", "a-kohya.safetensors", "a-diffusers.safetensors"]
    times = [file.stat().st_mtime_ns for file in files]
    state = {name: parameter.detach().clone() for name, parameter in parameters.items()}  # as a training state has them
    assert save(tmp_path / "a.safetensors", state, options, {"format": "pt"}) == files
    if kind != "dora":  # which reads the base from its file, in bfloat16, where there is no model
        assert [file.stat().st_mtime_ns for file in files] == times
    expected = predicted(transformer)
    for file in files:
        fresh = base_model()
        apply_adapter(fresh, read_adapter(file), name="read")
        assert max_abs(predicted(fresh), expected) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_rounded_once_to_the_precision_asked_for(tmp_path: Path, kind: str):
    transformer, path = saved(tmp_path, kind, "comfyui", save_precision="bfloat16")
    tensors = load_file(path)
    wide = {name for name, value in tensors.items() if value.dtype != torch.bfloat16}
    assert all(name.endswith((".alpha", ".dora_scale")) for name in wide)
    exact = as_adapter(dict(transformer.named_parameters()), options_of(tmp_path, **KINDS[kind]))[MODULE]
    found = read_adapter(path)[MODULE]
    for part, factor in found.factors.items():
        ratio = exact.scale / found.scale if part in ("up", "lokr_w1") else 1.0
        assert bool(((factor.double() - ratio * exact.factors[part].double()).abs()
                     <= 2**-8 * (ratio * exact.factors[part].double()).abs()).all()), part  # fmt: skip


def test_a_dora_of_another_trainer_is_over_the_norms_of_the_changed_weight(tmp_path: Path):
    """As the paper and LyCORIS have it; our own files say that theirs are over the base's, as ComfyUI has it."""
    options = options_of(tmp_path, **KINDS["dora"])
    transformer, parameters = trained(options)
    save(tmp_path / "a.safetensors", parameters, options, {})
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {DORA_NORM: "base"}
    tensors = load_file(tmp_path / "a.safetensors")
    for module, weight in as_adapter(parameters, options).items():
        assert weight.magnitude is not None
        (key,) = [k for k in tensors if k.endswith("dora_scale") and read_module(k) == module]
        tensors[key] = weight.magnitude[:, None]
    safetensors_file.write(tmp_path / "b.safetensors", tensors, {})
    fresh = base_model()
    apply_adapter(fresh, read_adapter(tmp_path / "b.safetensors"), name="read")
    assert max_abs(predicted(fresh), predicted(transformer)) < 2e-5


def read_module(key: str) -> str:
    from wangen.generator.lora_keys import parse_adapter_key

    parsed = parse_adapter_key(key)
    assert parsed is not None
    return parsed.module


@pytest.mark.parametrize("case", ["half", "factors", "mixed", "nan", "dora loha", "strange", "convolution", "twice"])
def test_a_file_that_is_not_understood_whole_is_refused(tmp_path: Path, case: str):
    kind = "loha" if case == "dora loha" else "lokr"
    _, path = saved(tmp_path, kind, "comfyui")
    tensors, stem = load_file(path), STEMS["comfyui"]
    words = "blocks.1.attn1.to_q"
    if case == "half":
        del tensors[f"{stem}.lokr_w2_b"]
    elif case == "factors":
        tensors[f"{stem}.lokr_w2_b"] = torch.ones(5, 16)
    elif case == "mixed":
        tensors = {**tensors, "diffusion_model.blocks.0.cross_attn.k_img.lora_A.weight": torch.ones(2, 256),
                   "diffusion_model.blocks.0.cross_attn.k_img.lora_B.weight": torch.ones(256, 2)}  # fmt: skip
        words = "another kind from layer to layer"
    elif case == "nan":
        tensors[f"{stem}.lokr_w1"][0, 0] = float("nan")
    elif case == "dora loha":
        tensors[f"{stem}.dora_scale"] = torch.ones(256, 1)
    elif case == "strange":
        tensors[f"{stem}.lokr_t2"] = torch.ones(2, 2)
        words = "this is a LoKr; 1 of 81 keys is not understood"
    elif case == "convolution":
        tensors[f"{stem}.lokr_w1"] = torch.ones(16, 16, 1, 1)
    else:
        tensors["lora_unet_blocks_1_self_attn_q.lokr_w1"] = torch.ones(16, 16)
    safetensors_file.write(path, tensors, {})
    with pytest.raises(WangenError, match=re.escape(words)):
        read_adapter(path)


def test_a_model_given_as_an_adapter_is_named():
    with pytest.raises(WangenError, match="this is a Wan text-to-video transformer"):
        read_adapter(DIT)


def test_a_plain_lora_is_read_alike_by_both_readers():
    lora, adapter = read_lora(LORAS["t2v21"]), read_adapter(LORAS["t2v21"])
    assert adapter.keys() == lora.keys()
    for name, weight in lora.items():
        assert torch.equal(adapter[name].factors["up"], weight.up)
        assert (adapter[name].scale, adapter[name].rank, adapter[name].shape) == (
            weight.scale,
            weight.rank,
            weight.shape,
        )


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_peft_own_folder_is_read(tmp_path: Path, kind: str):
    options = options_of(tmp_path, **KINDS[kind])
    transformer, parameters = trained(options)
    names = {f"base_model.model.{name.removesuffix('.default')}": value.detach() for name, value in parameters.items()}
    safetensors_file.write(tmp_path / "adapter_model.safetensors", names, {})
    config = {"peft_type": kind.upper(), "r": 4, "alpha": 2, "target_modules": "all"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    fresh = base_model()
    apply_adapter(fresh, read_adapter(tmp_path), name="read")
    assert max_abs(predicted(fresh), predicted(transformer)) < 2e-5
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "LORA"}), encoding="utf-8")
    with pytest.raises(WangenError, match="this adapter is a LORA"):
        read_adapter(tmp_path)


def plan_of(options: Train) -> Plan:
    """Of seven items in epochs of four steps."""
    return Plan(options, profiles.model(options.task), [drawn(1)] * 7, [], 4, (), FINGERPRINT, batches_per_epoch=7)


def test_the_header_says_what_was_trained_and_nothing_of_time_or_place(tmp_path: Path):
    options = options_of(
        tmp_path, network_dim=8, rslora=True, metadata_title="Cats", metadata_tags="cat, film", optimizer_type="AdamW",
        optimizer_args=("weight_decay=0.01",), training_comment="third try", timestep_sampling="shift",
    )  # fmt: skip
    found = metadata(plan_of(options), "high_noise", step=30, run_step=41)
    expected = {
        "ss_network_module": "networks.lora_wan", "ss_network_dim": "8", "ss_network_args": '{"use_rslora": "True"}',
        "ss_learning_rate": "0.0001", "ss_optimizer": "AdamW(weight_decay=0.01)", "ss_timestep_sampling": "shift",
        "ss_discrete_flow_shift": "5.0", "ss_steps": "30", "ss_epoch": "8", "ss_num_train_items": "7",
        "ss_training_comment": "third try", "modelspec.title": "Cats", "modelspec.tags": "cat, film",
        "wangen.expert": "high_noise", "wangen.task": "t2v-1.3B", "ss_num_batches_per_epoch": "7",
        "wangen.steps_per_epoch": "4", "wangen.run_steps": "41",
    }  # fmt: skip
    assert expected.items() <= found.items()
    assert json.loads(found["wangen.fingerprint"]) == FINGERPRINT
    assert not [key for key in found if re.search("_at$|time$|date|host|path|session|hash|output", key)]
    assert str(tmp_path) not in json.dumps(found)
    assert all(isinstance(value, str) for value in found.values())


def test_without_metadata_what_is_needed_to_use_the_file_stays_and_what_is_said_of_it(tmp_path: Path):
    options = options_of(tmp_path, no_metadata=True, metadata_title="Cats", training_comment="third try")
    found = metadata(plan_of(options), "low_noise", step=30, run_step=41)
    assert set(found) == {"format", "wangen.format", "ss_base_model_version", "wangen.task", "wangen.expert",
                          "ss_network_module", "ss_network_dim", "ss_network_alpha", "modelspec.title",
                          "modelspec.sai_model_spec"}  # fmt: skip


@pytest.mark.parametrize("name", ["dit_t2v21", "dit_i2v21"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_full_fine_tuning_trains_every_weight_and_saves_them_under_the_official_names(
    tmp_path: Path, name: str, precision: str
):
    transformer = load_transformer(DITS[name], dtype=torch.bfloat16)
    parameters = full.trainable_parameters(transformer)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in transformer.parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter += 0.01
    options = options_of(tmp_path, train_mode="full", save_precision=precision)
    tensors = saved_tensors(parameters, DITS[name])

    def header(step: int) -> dict[str, str]:
        return metadata(plan_of(options), "", step=step, run_step=step)

    (path,) = full.save(tmp_path / "a.safetensors", tensors, options, header(1))
    found, original = load_file(path), load_file(DITS[name])
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in original.items()}
    for old, new in transformer_names(original).items():
        assert torch.equal(found[old], parameters[new].detach().to(getattr(torch, precision))), old
    reloaded = load_transformer(path, dtype=torch.float32)
    if precision == "float32":
        case = name.removeprefix("dit_")
        assert max_abs(output(reloaded, case, 0), output(transformer, case, 0)) < 2e-5
    before = path.stat().st_mtime_ns
    for step in (1, 2):
        full.save(path, tensors, options, header(step))
        assert (path.stat().st_mtime_ns == before) == (step == 1)


def test_quantised_weights_cannot_be_trained_as_a_whole():
    from wangen.runtime.memory.quantize import quantize_blocks

    transformer = base_model()
    quantize_blocks(transformer, "int8")
    with pytest.raises(WangenError, match=r"blocks\.0\.attn1\.to_q is quantised"):
        full.trainable_parameters(transformer)


@pytest.mark.parametrize("other", ["lora", "loha", "lokr", "lokr of four"])
def test_a_dora_on_a_merged_base_is_saved_with_the_norms_of_that(tmp_path: Path, other: str):
    before = options_of(tmp_path, **KINDS[other])
    save(tmp_path / "base.safetensors", trained(before)[1], before, {})
    options = options_of(
        tmp_path, base_weights=(tmp_path / "base.safetensors",), base_weights_multiplier=(2.0,), **KINDS["dora"]
    )
    transformer = base_model()
    merge_base_weights(transformer, options)
    parameters = add_adapter(transformer, options, MODEL)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter += 0.02
    save(tmp_path / "dora.safetensors", parameters, options, {})
    tensors = load_file(tmp_path / "dora.safetensors")
    base, exact = base_weight(transformer.get_submodule(MODULE)).clone(), changed_weight(transformer, MODULE)
    assert max_abs(as_comfyui_computes(tensors, STEMS["comfyui"], base), exact) < 1e-5
    plain = {name: p.detach() for name, p in parameters.items()}
    save(tmp_path / "unmerged.safetensors", plain, replace(options, base_weights=(), base_weights_multiplier=()), {})
    unmerged = load_file(tmp_path / "unmerged.safetensors")
    assert max(max_abs(tensors[key], unmerged[key]) for key in tensors) > 1e-4


@pytest.mark.parametrize("changes", [KINDS["dora"], {"quantize": "int8"}])
def test_a_merged_dora_allows_neither_another_on_top_nor_a_quantised_base(tmp_path: Path, changes: dict):
    options = options_of(tmp_path, **KINDS["dora"])
    save(tmp_path / "a.safetensors", trained(options)[1], options, {})
    require_adapter(options_of(tmp_path, base_weights=(tmp_path / "a.safetensors",)), MODEL)
    with pytest.raises(UsageError, match="a DoRA scales whole weights"):
        require_adapter(options_of(tmp_path, base_weights=(tmp_path / "a.safetensors",), **changes), MODEL)
