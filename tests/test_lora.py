import json
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from safetensors.torch import load_file

from wangen.generator.errors import WangenError
from wangen.runtime import safetensors_file
from wangen.runtime.lora import LoraWeight, apply_lora, merge_lora, read_lora, set_multiplier, to_layout
from wangen.runtime.weights import load_transformer

VECTORS = Path(__file__).parent / "vectors"
DIT = VECTORS / "dit_t2v21" / "model.safetensors"
LORA = VECTORS / "lora_t2v21" / "lora_musubi.safetensors"
LAYOUTS = ("comfyui", "kohya", "diffusers")


def run(model: torch.nn.Module, case: int) -> torch.Tensor:
    golden = load_file(DIT.with_name("golden.safetensors"))
    contexts = [golden[key].float() for key in sorted(golden) if key.startswith(f"case{case}.context.")]
    padded = torch.stack([torch.nn.functional.pad(c, (0, 0, 0, 512 - len(c))) for c in contexts])
    with torch.no_grad():
        return model(
            hidden_states=golden[f"case{case}.latents"],
            timestep=golden[f"case{case}.timestep"],
            encoder_hidden_states=padded,
            return_dict=False,
        )[0]


def wanted(case: int, multiplier: float) -> torch.Tensor:
    if multiplier == 0:
        return load_file(DIT.with_name("golden.safetensors"))[f"case{case}.output"]
    return load_file(LORA.with_name("golden.safetensors"))[f"case{case}.output_mult{multiplier}"]


def base() -> torch.nn.Module:
    return load_transformer(DIT, dtype=torch.float32)


def deltas(lora: dict[str, LoraWeight]) -> dict[str, torch.Tensor]:
    return {name: weight.scale * weight.up @ weight.down for name, weight in lora.items()}


def max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("case", [0, 1])
def test_an_applied_lora_equals_the_official_sum_at_every_strength(case: int):
    model = base()
    assert apply_lora(model, read_lora(LORA), 1.0, name="one") == []
    assert max_abs(run(model, case), wanted(case, 1.0)) < 2e-4
    set_multiplier(model, "one", 0.6)
    assert max_abs(run(model, case), wanted(case, 0.6)) < 2e-4
    set_multiplier(model, "one", 0.0)
    assert max_abs(run(model, case), wanted(case, 0)) < 2e-4
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("multiplier", [1.0, 0.6])
def test_a_merged_lora_equals_the_official_sum(multiplier: float):
    model = base()
    assert merge_lora(model, read_lora(LORA), multiplier) == []
    assert max_abs(run(model, 0), wanted(0, multiplier)) < 2e-4
    assert max_abs(run(base(), 0), wanted(0, 0)) < 2e-4, "the file itself must not change"


def test_several_loras_add_up_each_with_its_strength():
    model, lora = base(), read_lora(LORA)
    apply_lora(model, lora, 0.35, name="one")
    apply_lora(model, lora, 0.25, name="two")
    assert max_abs(run(model, 1), wanted(1, 0.6)) < 2e-4
    set_multiplier(model, "two", 0.65)
    assert max_abs(run(model, 1), wanted(1, 1.0)) < 2e-4
    with pytest.raises(WangenError, match="two LoRAs called one"):
        apply_lora(model, lora, name="one")


def test_ranks_and_alphas_may_differ_from_module_to_module():
    lora = read_lora(LORA)
    mixed = {}
    for number, (name, weight) in enumerate(lora.items()):
        extra = torch.zeros(number % 3, weight.down.shape[1])
        down, up = (
            torch.cat([weight.down, extra]),
            torch.cat([weight.up, extra.new_ones(len(weight.up), len(extra))], 1),
        )
        factor = 1.0 + number % 2
        mixed[name] = LoraWeight(down, up / factor, weight.scale * factor * len(down))
    model = base()
    apply_lora(model, mixed, name="mixed")
    assert max_abs(run(model, 0), wanted(0, 1.0)) < 2e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_back_as_the_same_change(tmp_path: Path, layout: str):
    lora = read_lora(LORA)
    path = tmp_path / "lora.safetensors"
    safetensors_file.write(path, to_layout(lora, layout), {})
    again = read_lora(path)
    assert again.keys() == lora.keys()
    assert all(torch.equal(a, b) for a, b in zip(deltas(again).values(), deltas(lora).values(), strict=True))


def test_the_kohya_layout_is_byte_for_byte_what_was_read():
    written, original = to_layout(read_lora(LORA), "kohya"), load_file(LORA)
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention_only", [False, True])
def test_diffusers_own_loader_gives_the_same_output(tmp_path: Path, layout: str, attention_only: bool):
    lora = read_lora(LORA)
    if attention_only:
        lora = {name: weight for name, weight in lora.items() if ".attn1." in name}
    if attention_only and layout == "kohya":
        pytest.skip("the importer of diffusers raises KeyError on attention-only kohya files")
    safetensors_file.write(tmp_path / "lora.safetensors", to_layout(lora, layout), {})
    pipeline = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=FlowMatchEulerDiscreteScheduler(), transformer=base()
    )
    pipeline.load_lora_weights(str(tmp_path), weight_name="lora.safetensors", local_files_only=True)
    model = base()
    apply_lora(model, lora, name="own")
    assert max_abs(run(pipeline.transformer, 0), run(model, 0)) < 2e-5
    if not attention_only:
        assert max_abs(run(pipeline.transformer, 0), wanted(0, 1.0)) < 2e-4


def test_an_alpha_beside_comfyui_keys_counts(tmp_path: Path):
    lora = read_lora(LORA)
    tensors = to_layout({name: LoraWeight(w.down, w.up, w.rank) for name, w in lora.items()}, "comfyui")
    for name in [name for name in tensors if "lora_A" in name]:
        tensors[name.replace("lora_A.weight", "alpha")] = torch.tensor(2.0)
    safetensors_file.write(tmp_path / "lora.safetensors", tensors, {})
    again = deltas(read_lora(tmp_path / "lora.safetensors"))
    assert all(torch.equal(again[name], delta) for name, delta in deltas(lora).items())


def test_the_alpha_of_diffusers_stands_in_its_metadata(tmp_path: Path):
    plain = {name: LoraWeight(w.down, w.up, w.rank) for name, w in read_lora(LORA).items()}
    fields = {"transformer.r": 4, "transformer.lora_alpha": 2, "transformer.alpha_pattern": {"ffn.net.2": 8}}
    metadata = {"lora_adapter_metadata": json.dumps(fields)}
    safetensors_file.write(tmp_path / "lora.safetensors", to_layout(plain, "diffusers"), metadata)
    alphas = {name: weight.alpha for name, weight in read_lora(tmp_path / "lora.safetensors").items()}
    assert alphas["blocks.0.attn1.to_q"] == 2
    assert alphas["blocks.1.ffn.net.2"] == 8


@pytest.mark.parametrize(
    ("stem", "down", "up"),
    [
        ("base_model.model.blocks.0.attn1.to_q", ".lora_A.weight", ".lora_B.weight"),
        ("blocks.0.self_attn.q", ".lora_A.default.weight", ".lora_B.default.weight"),
        ("diffusion_model.blocks.0.self_attn.q", ".lora_down.weight", ".lora_up.weight"),
        ("lora_unet_blocks_0_attn1_to_q", ".lora_down.weight", ".lora_up.weight"),
    ],
)
def test_the_names_of_other_trainers_are_understood(tmp_path: Path, stem: str, down: str, up: str):
    tensors = {stem + down: torch.ones(2, 256), stem + up: torch.ones(256, 2)}
    safetensors_file.write(tmp_path / "lora.safetensors", tensors, {})
    assert list(read_lora(tmp_path / "lora.safetensors")) == ["blocks.0.attn1.to_q"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("diffusion_model.blocks.0.norm3.diff", "not understood"),
        ("lora_unet_blocks_0_self_attn_q.hada_w1_a", "hada_w1_a"),
        ("lora_unet_double_blocks_0_img_attn_proj.lora_down.weight", "double_blocks"),
        ("lora_unet_blocks_0_self_attn_q.lora_down.weight.bad", "not understood"),
    ],
)
def test_keys_that_are_not_understood_are_named(tmp_path: Path, key: str, words: str):
    safetensors_file.write(tmp_path / "lora.safetensors", {**load_file(LORA), key: torch.ones(2, 2)}, {})
    with pytest.raises(WangenError, match=words):
        read_lora(tmp_path / "lora.safetensors")


def test_a_lora_of_nothing_in_the_model_is_refused():
    lora = {"blocks.99.attn1.to_q": LoraWeight(torch.ones(2, 256), torch.ones(256, 2), 2.0)}
    for use in (lambda: apply_lora(base(), lora, name="a"), lambda: merge_lora(base(), lora)):
        with pytest.raises(WangenError, match=r"blocks\.99\.attn1\.to_q"):
            use()


def test_modules_that_the_model_lacks_are_reported():
    lora = {**read_lora(LORA), "blocks.0.attn2.add_k_proj": LoraWeight(torch.ones(2, 256), torch.ones(256, 2), 2.0)}
    model = base()
    assert apply_lora(model, lora, name="a") == ["blocks.0.attn2.add_k_proj"]
    assert max_abs(run(model, 0), wanted(0, 1.0)) < 2e-4


def test_a_lora_of_another_size_is_refused():
    lora = {"blocks.0.attn1.to_q": LoraWeight(torch.ones(2, 128), torch.ones(128, 2), 2.0)}
    with pytest.raises(WangenError, match="128x128 in it and 256x256"):
        apply_lora(base(), lora, name="a")


def test_a_model_given_as_a_lora_is_named():
    with pytest.raises(WangenError, match="this is a Wan text-to-video transformer; --lora_weight takes a LoRA"):
        read_lora(DIT)


@pytest.mark.parametrize("change", ["half", "ranks", "alpha"])
def test_damaged_loras_are_refused(tmp_path: Path, change: str):
    tensors, stem = load_file(LORA), "lora_unet_blocks_0_ffn_0"
    if change == "half":
        del tensors[f"{stem}.lora_up.weight"]
    elif change == "ranks":
        tensors[f"{stem}.lora_up.weight"] = torch.ones(384, 3)
    else:
        tensors[f"{stem}.alpha"] = torch.tensor(float("nan"))
    safetensors_file.write(tmp_path / "lora.safetensors", tensors, {})
    with pytest.raises(WangenError, match=r"blocks\.0\.ffn\.net\.0\.proj"):
        read_lora(tmp_path / "lora.safetensors")
