"""LoRAs applied to a transformer, and files of every world read."""

from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from loras import (
    LAYOUTS,
    LORAS,
    apply_lora,
    every_module,
    model_of,
    output,
    same_change,
    set_strength,
    to_layout,
    wanted,
)
from parity import max_abs
from safetensors.torch import load_file

from wangen.generator.errors import WangenError
from wangen.runtime import safetensors_file
from wangen.runtime.lora import LoraWeight, as_stored, read_lora

T2V = LORAS["t2v21"]


def test_the_fixtures_are_of_both_kinds():
    assert list(LORAS) == ["i2v21", "t2v21"]


@pytest.mark.parametrize(("name", "case"), [("t2v21", 0), ("t2v21", 1), ("i2v21", 0)])
def test_an_applied_lora_equals_the_official_sum_at_every_strength(name: str, case: int):
    model = model_of(name)
    assert apply_lora(model, read_lora(LORAS[name]), 1.0, name="one") == []
    assert max_abs(output(model, name, case), wanted(name, case, 1.0)) < 2e-4
    set_strength(model, "one", 0.6)
    assert max_abs(output(model, name, case), wanted(name, case, 0.6)) < 2e-4
    set_strength(model, "one", 0.0)
    assert max_abs(output(model, name, case), wanted(name, case, 0)) < 2e-4
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_several_loras_add_up_each_with_its_strength():
    model, lora = model_of("t2v21"), read_lora(T2V)
    apply_lora(model, lora, 0.35, name="one")
    apply_lora(model, lora, 0.25, name="two")
    assert max_abs(output(model, "t2v21", 1), wanted("t2v21", 1, 0.6)) < 2e-4
    set_strength(model, "two", 0.65)
    assert max_abs(output(model, "t2v21", 1), wanted("t2v21", 1, 1.0)) < 2e-4
    with pytest.raises(WangenError, match="two LoRAs called one"):
        apply_lora(model, lora, name="one")


def test_ranks_and_alphas_may_differ_from_module_to_module():
    lora = read_lora(T2V)
    mixed = {}
    for number, (name, weight) in enumerate(lora.items()):
        extra = torch.zeros(number % 3, weight.down.shape[1])
        down, up = (
            torch.cat([weight.down, extra]),
            torch.cat([weight.up, extra.new_ones(len(weight.up), len(extra))], 1),
        )
        factor = 1.0 + number % 2
        mixed[name] = LoraWeight(down, up / factor, weight.scale * factor * len(down))
    model = model_of("t2v21")
    apply_lora(model, mixed, name="mixed")
    assert max_abs(output(model, "t2v21", 0), wanted("t2v21", 0, 1.0)) < 2e-4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LORAS)
def test_every_layout_is_read_back_as_the_same_change(tmp_path: Path, name: str, layout: str):
    """The fixtures' scale is 1/2, so that nothing is lost; so it is with other ranks and alphas that are such."""
    for lora in (read_lora(LORAS[name]), every_module(name, scales=(1.0, 0.5, 4.0))):
        path = tmp_path / "lora.safetensors"
        safetensors_file.write(path, to_layout(lora, layout), {})
        same_change(read_lora(path), lora, 0.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scale_that_is_no_power_of_two_costs_one_rounding(tmp_path: Path, layout: str):
    lora = every_module("i2v21", scales=(1.0, 0.3, 5 / 3))
    path = tmp_path / "lora.safetensors"
    safetensors_file.write(path, to_layout(lora, layout), {})
    again = read_lora(path)
    for name, weight in again.items():
        exact = lora[name].up.double() * lora[name].scale
        error = (weight.up.double() * weight.scale - exact).abs()
        assert bool((error <= exact.abs() * 2**-23).all()), name
        assert torch.equal(weight.down, lora[name].down)
    same_change(again, lora, 1e-7 if layout == "kohya" else 1e-6)  # alpha itself is stored in float32


@pytest.mark.parametrize("name", LORAS)
def test_the_kohya_layout_is_byte_for_byte_what_was_read(name: str):
    written, original = to_layout(read_lora(LORAS[name]), "kohya"), load_file(LORAS[name])
    assert written.keys() == original.keys()
    assert all(torch.equal(written[key], original[key]) for key in original)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["comfyui", "kohya", "diffusers"])
@pytest.mark.parametrize(("name", "part"), [("t2v21", ""), ("i2v21", ""), ("t2v21", ".attn1."), ("i2v21", ".attn2.")])
def test_diffusers_own_loader_gives_the_same_output(tmp_path: Path, name: str, layout: str, part: str):
    lora = {module: weight for module, weight in read_lora(LORAS[name]).items() if part in module}
    safetensors_file.write(tmp_path / "lora.safetensors", to_layout(lora, layout), {})
    pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=FlowMatchEulerDiscreteScheduler(),
                           transformer=model_of(name))  # fmt: skip
    if part and layout == "kohya":  # its importer wants every module of every block; ours takes what is there
        with pytest.raises(KeyError):
            pipeline.load_lora_weights(str(tmp_path), weight_name="lora.safetensors", local_files_only=True)
        same_change(read_lora(tmp_path / "lora.safetensors"), lora, 0.0)
        return
    pipeline.load_lora_weights(str(tmp_path), weight_name="lora.safetensors", local_files_only=True)
    model = model_of(name)
    apply_lora(model, lora, name="own")
    assert max_abs(output(pipeline.transformer, name, 0), output(model, name, 0)) < 2e-5
    if not part:
        assert max_abs(output(pipeline.transformer, name, 0), wanted(name, 0, 1.0)) < 2e-4


@pytest.mark.parametrize("layout", ["comfyui", "diffusers"])
def test_diffusers_own_loader_reads_modules_outside_the_blocks(tmp_path: Path, layout: str):
    lora = every_module("i2v21", scales=(1.0,), ranks=(4,))
    lora.pop("patch_embedding")  # a convolution, which diffusers' importer of ComfyUI keys does not know
    safetensors_file.write(tmp_path / "lora.safetensors", to_layout(lora, layout), {})
    pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=FlowMatchEulerDiscreteScheduler(),
                           transformer=model_of("i2v21"))  # fmt: skip
    pipeline.load_lora_weights(str(tmp_path), weight_name="lora.safetensors", local_files_only=True)
    model = model_of("i2v21")
    assert apply_lora(model, lora, name="own") == []
    changed = output(model, "i2v21", 0)
    assert max_abs(output(pipeline.transformer, "i2v21", 0), changed) < 2e-5
    assert max_abs(changed, wanted("i2v21", 0, 0)) > 1e-2


def test_an_alpha_beside_comfyui_keys_counts(tmp_path: Path):
    lora = read_lora(T2V)
    tensors = to_layout({name: LoraWeight(w.down, w.up, w.rank) for name, w in lora.items()}, "comfyui")
    for name in [name for name in tensors if "lora_A" in name]:
        tensors[name.replace("lora_A.weight", "alpha")] = torch.tensor(2.0)
    safetensors_file.write(tmp_path / "lora.safetensors", tensors, {})
    same_change(read_lora(tmp_path / "lora.safetensors"), lora, 0.0)


@pytest.mark.parametrize(
    ("stem", "down", "up"),
    [
        ("base_model.model.blocks.0.attn1.to_q", ".lora_A.weight", ".lora_B.weight"),
        ("base_model.model.diffusion_model.blocks.0.self_attn.q", ".lora_A.weight", ".lora_B.weight"),
        ("blocks.0.self_attn.q", ".lora_A.default.weight", ".lora_B.default.weight"),
        ("diffusion_model.blocks.0.self_attn.q", ".lora_down.weight", ".lora_up.weight"),
        ("lora_unet_blocks_0_attn1_to_q", ".lora_down.weight", ".lora_up.weight"),
        ("lora_unet__blocks_0_self_attn_q", ".lora_down.weight", ".lora_up.weight"),
    ],
)
def test_the_names_of_other_trainers_are_understood(tmp_path: Path, stem: str, down: str, up: str):
    tensors = {stem + down: torch.ones(2, 256), stem + up: torch.ones(256, 2)}
    safetensors_file.write(tmp_path / "lora.safetensors", tensors, {})
    assert list(read_lora(tmp_path / "lora.safetensors")) == ["blocks.0.attn1.to_q"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("diffusion_model.blocks.0.norm3.diff", "differences of whole weights or biases"),
        ("diffusion_model.blocks.0.self_attn.q.diff_b", "differences of whole weights or biases"),
        ("lora_unet_blocks_0_self_attn_q.hada_w1_a", "LoHa"),
        ("lora_unet_blocks_0_self_attn_q.lokr_w1", "LoKr"),
        ("lora_unet_blocks_0_self_attn_q.dora_scale", "DoRA"),
        ("base_model.model.blocks.0.attn1.to_q.lora_magnitude_vector.weight", "DoRA"),
        ("transformer.blocks.0.attn1.to_q.lora_B.bias", "with biases"),
        ("lora_unet_patch_embedding.lora_mid.weight", "three factors"),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight", "text encoder"),
        ("text_encoder.layers.0.lora_A.weight", "text encoder"),
        ("lora_unet_double_blocks_0_img_attn_proj.lora_down.weight", "another model than Wan"),
        ("lora_unet_blocks_0_self_attn_q.lora_down.weight.bad", "1 of 61 keys is not understood"),
    ],
)
def test_keys_that_make_a_file_more_than_a_lora_are_named_and_refused(tmp_path: Path, key: str, words: str):
    safetensors_file.write(tmp_path / "lora.safetensors", {**load_file(T2V), key: torch.ones(2, 2)}, {})
    with pytest.raises(WangenError, match=words):
        read_lora(tmp_path / "lora.safetensors")


def test_two_keys_for_one_factor_are_refused(tmp_path: Path):
    again = {"diffusion_model.blocks.0.self_attn.q.lora_A.weight": torch.ones(4, 256)}
    safetensors_file.write(tmp_path / "lora.safetensors", {**load_file(T2V), **again}, {})
    with pytest.raises(WangenError, match=r"two keys of this LoRA are the down of blocks\.0\.attn1\.to_q"):
        read_lora(tmp_path / "lora.safetensors")


def test_a_lora_of_nothing_in_the_model_is_refused():
    lora = {"blocks.99.attn1.to_q": LoraWeight(torch.ones(2, 256), torch.ones(256, 2), 2.0)}
    with pytest.raises(WangenError, match=r"blocks\.99\.attn1\.to_q"):
        apply_lora(model_of("t2v21"), lora, name="a")


def test_modules_that_the_model_lacks_are_reported():
    lora = {**read_lora(T2V), "blocks.0.attn2.add_k_proj": LoraWeight(torch.ones(2, 256), torch.ones(256, 2), 2.0)}
    model = model_of("t2v21")
    assert apply_lora(model, lora, name="a") == ["blocks.0.attn2.add_k_proj"]
    assert max_abs(output(model, "t2v21", 0), wanted("t2v21", 0, 1.0)) < 2e-4


def test_a_lora_of_another_size_is_refused():
    lora = {"blocks.0.attn1.to_q": LoraWeight(torch.ones(2, 128), torch.ones(128, 2), 2.0)}
    with pytest.raises(WangenError, match="128x128 in it and 256x256"):
        apply_lora(model_of("t2v21"), lora, name="a")


def test_a_model_given_as_a_lora_is_named():
    dit = T2V.parent.parent / "dit_t2v21" / "model.safetensors"
    with pytest.raises(WangenError, match=r"this is a Wan text-to-video transformer.*; --lora_weight takes a LoRA"):
        read_lora(dit)


@pytest.mark.parametrize("change", ["half", "ranks", "alpha", "alphas", "axes"])
def test_damaged_loras_are_refused(tmp_path: Path, change: str):
    tensors, stem = load_file(T2V), "lora_unet_blocks_0_ffn_0"
    if change == "half":
        del tensors[f"{stem}.lora_up.weight"]
    elif change == "ranks":
        tensors[f"{stem}.lora_up.weight"] = torch.ones(384, 3)
    elif change == "axes":
        tensors[f"{stem}.lora_up.weight"] = torch.ones(384, 4, 1, 1)
    else:
        tensors[f"{stem}.alpha"] = torch.tensor(float("nan")) if change == "alpha" else torch.ones(2)
    safetensors_file.write(tmp_path / "lora.safetensors", tensors, {})
    with pytest.raises(WangenError, match=r"blocks\.0\.ffn\.net\.0\.proj"):
        read_lora(tmp_path / "lora.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_a_lora_that_changes_nothing_yet_has_every_layout_and_dtype(layout: str, dtype: torch.dtype):
    lora = {"blocks.0.attn1.to_q": LoraWeight(torch.ones(2, 4), torch.zeros(4, 2), 1.0)}
    (stored,) = as_stored(lora, layout, dtype).values()
    assert not stored.up.float().any()
    assert stored.down.float().all()


def test_float8_is_filled_up_to_its_largest_number_and_left_for_another_dtype():
    """1.75 times a power of two becomes 448 itself; out of float8 the scale is in the factors again."""
    lora = {"blocks.0.attn1.to_q": LoraWeight(torch.full((2, 4), 1.75 * 2**-9), torch.full((4, 2), 2**-12), 1.0)}
    eight = as_stored(lora, "kohya", torch.float8_e4m3fn)
    (stored,) = eight.values()
    assert stored.down.float().max() == 448
    assert torch.equal(stored.scale * stored.up.float() @ stored.down.float(), torch.full((4, 4), 1.75 * 2**-21))
    for layout in ("comfyui", "diffusers", "kohya"):
        (again,) = as_stored(eight, layout, torch.bfloat16).values()
        assert again.alpha == again.rank, "diffusers' layout has no place for another"
        assert again.down.max() < 1, "of a usual size, which float16 can multiply"
        same_change({"a": again}, {"a": stored}, 0.0)
