"""Files to start from that say little, or something that cannot be: alphas of nothing, magnitudes, factors."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fast_dit import adapted
from fast_dit import trained as trained_of
from parity import max_abs
from runs import CPU, planned
from safetensors.torch import load_file, save_file
from tiny import TinyRun
from tiny_qwen import TEXT_DIM, make_transformer
from trained import KINDS, MODEL, base_model, options_of, predicted, trained

from wangen import profiles
from wangen.generator.adapter_settings import AdapterSettings
from wangen.generator.errors import WangenError
from wangen.generator.headers import read_header
from wangen.generator.steps import Export
from wangen.runtime import export, train
from wangen.runtime.adapter_layers import apply_adapter
from wangen.runtime.adapters import read_adapter
from wangen.runtime.lora import adapter_layers, read_lora
from wangen.runtime.memory.quantize import quantize_blocks
from wangen.runtime.models import family
from wangen.runtime.models.qwen_image_edit.transformer import predict_velocity
from wangen.runtime.training import loading
from wangen.runtime.training.adapter import add_adapter
from wangen.runtime.training.adapter_config import select_modules
from wangen.runtime.training.adapter_files import _file_base, save
from wangen.runtime.training.adapter_refusals import require_adapter
from wangen.runtime.training.loading import load_base


@pytest.mark.parametrize("kind", ["lora", "rslora", "loha", "lokr"])
def test_ranks_are_taken_from_weights_that_change_nothing(tmp_path: Path, kind: str):
    """Their alpha is 0: training begins at the base, and can leave it."""
    options = options_of(tmp_path, lora_layout=("kohya",), **KINDS[kind])
    save(tmp_path / "a.safetensors", trained(options)[1], options, {})
    tensors = load_file(tmp_path / "a.safetensors")
    save_file({key: torch.zeros_like(value) if key.endswith("alpha") else value for key, value in tensors.items()},
              tmp_path / "b.safetensors")  # fmt: skip
    options = replace(options, network_weights=tmp_path / "b.safetensors", dim_from_weights=True)
    transformer = base_model()
    add_adapter(transformer, options, MODEL)
    assert max_abs(predicted(transformer), predicted(base_model())) < 2e-6
    assert all(layer.scaling["default"] > 0 for layer in adapter_layers(transformer).values())


@pytest.mark.parametrize("again", [None, "bfloat16", "float32"])
def test_a_file_in_float8_is_gone_on_with_from_factors_of_usual_sizes(tmp_path: Path, again: str | None):
    options = options_of(tmp_path)
    before, parameters = trained(options)
    save(tmp_path / "a.safetensors", parameters, options, {})
    flags = Export(
        lora_weight=(tmp_path / "a.safetensors",), save_path=tmp_path / "b.safetensors", dtype="float8_e4m3fn"
    )
    export.run(flags)
    start = tmp_path / "b.safetensors"
    if again:
        export.run(replace(flags, lora_weight=(start,), save_path=tmp_path / "c.safetensors", dtype=again))
        start = tmp_path / "c.safetensors"
    transformer = base_model()
    own = add_adapter(transformer, replace(options, network_weights=start), MODEL)
    away = predicted(before) - predicted(base_model())
    assert (predicted(transformer) - predicted(before)).norm() < 2**-3 * away.norm(), "float8 has three digits"
    assert all(found.detach().abs().max() < 8 * parameters[name].detach().abs().max() for name, found in own.items())


def test_large_factors_with_an_ordinary_scale_stay_as_they_are(tmp_path: Path):
    """As peft draws them with `init_lora_weights="gaussian"`; the scale is a quarter."""
    options = options_of(tmp_path, network_alpha=1.0, lora_layout=("kohya",))
    save(tmp_path / "a.safetensors", trained(options)[1], options, {})
    large = {key: 64 * value if "lora_down" in key else value
             for key, value in load_file(tmp_path / "a.safetensors").items()}  # fmt: skip
    save_file(large, tmp_path / "b.safetensors")
    own = add_adapter(base_model(), replace(options, network_weights=tmp_path / "b.safetensors"), MODEL)
    key = "blocks.0.attn1.to_q.lora_A.default.weight"
    assert torch.equal(own[key].detach(), large["lora_unet_blocks_0_self_attn_q.lora_down.weight"].float())


def test_a_file_in_float8_is_no_infinity_in_float16(tmp_path: Path):
    options = options_of(tmp_path)
    save(tmp_path / "a.safetensors", trained(options)[1], options, {})
    full = {name: replace(weight, factors={part: 2.0**10 * factor for part, factor in weight.factors.items()},
                          scale=weight.scale * 2.0**-20)
            for name, weight in read_adapter(tmp_path / "a.safetensors").items()}  # fmt: skip
    transformer = base_model()
    apply_adapter(transformer, full, name="one")
    for layer in adapter_layers(transformer).values():
        assert max(float(layer.lora_A["one"].weight.abs().max()), float(layer.lora_B["one"].weight.abs().max())) <= 8
    other = base_model()
    apply_adapter(other, read_adapter(tmp_path / "a.safetensors"), name="one")
    assert torch.equal(predicted(transformer), predicted(other))


@pytest.mark.parametrize("layout", ["comfyui", "diffusers", "kohya"])
def test_ranks_that_differ_are_told_to_older_versions_of_diffusers(tmp_path: Path, layout: str):
    options = options_of(tmp_path, network_alpha=2.0)
    save(tmp_path / "a.safetensors", trained(options)[1], options, {})
    one = "blocks.0.self_attn.q"
    mixed = {
        key: (value[:2] if "lora_A" in key else value[:, :2]).contiguous() if one in key else value
        for key, value in load_file(tmp_path / "a.safetensors").items()
    }
    save_file(mixed, tmp_path / "b.safetensors")
    options = replace(options, network_weights=tmp_path / "b.safetensors", dim_from_weights=True, lora_layout=(layout,))
    save(tmp_path / "c.safetensors", add_adapter(base_model(), options, MODEL), options, {})
    export.run(
        Export(lora_weight=(tmp_path / "b.safetensors",), save_path=tmp_path / "d.safetensors", layout=(layout,))
    )
    for name in "cd":
        told = json.loads(read_header(tmp_path / f"{name}.safetensors", "").metadata.get("lora_adapter_metadata", "{}"))
        found = told.get("transformer.r"), told.get("transformer.rank_pattern"), told.get("transformer.lora_alpha")
        assert found == ((None, None, None) if layout == "kohya" else (4, {"blocks.0.attn1.to_q": 2}, 4.0))
        assert read_lora(tmp_path / f"{name}.safetensors")["blocks.0.attn1.to_q"].rank == 2


def test_magnitudes_of_another_size_are_refused_by_the_header(tmp_path: Path):
    options = options_of(tmp_path, **KINDS["dora"])
    save(tmp_path / "a.safetensors", trained(options)[1], options, {})
    tensors = load_file(tmp_path / "a.safetensors")
    (key, *_) = (key for key in tensors if "dora_scale" in key)
    for number, wrong in enumerate((torch.ones(7, 1), torch.ones(1, len(tensors[key])), torch.ones(()))):
        file = tmp_path / f"{number}.safetensors"
        save_file({**tensors, key: wrong}, file)
        with pytest.raises(WangenError, match="DoRA's magnitudes are"):
            require_adapter(replace(options, network_weights=file), MODEL)


def test_a_lokr_in_more_factors_names_what_it_needs(tmp_path: Path):
    both = options_of(tmp_path, network_module="lokr", network_dim=2, network_args=("decompose_both=true",))
    save(tmp_path / "a.safetensors", add_adapter(base_model(), both, MODEL), both, {})
    start = replace(both, network_args=(), network_weights=tmp_path / "a.safetensors")
    with pytest.raises(WangenError, match="factors of other sizes") as error:
        require_adapter(start, MODEL)
    assert "decompose_both=true" in error.value.cure
    require_adapter(replace(start, network_args=both.network_args), MODEL)


def test_what_is_merged_into_the_base_is_quantised_once_and_after_that(tiny_run: TinyRun, tmp_path: Path):
    train.run(tiny_run.options(tmp_path, max_train_steps=2, learning_rate=0.05))
    bases = []
    for form in ("int8", "none"):
        plan = planned(tiny_run, tmp_path / form, base_weights=(tmp_path / "lora.safetensors",), quantize=form)
        bases.append(load_base(plan, plan.experts[0], family(MODEL), CPU))
    quantised, exact = bases
    quantize_blocks(exact, "int8", CPU)
    assert quantised.state_dict().keys() == exact.state_dict().keys()
    assert all(torch.equal(quantised.state_dict()[name], value) for name, value in exact.state_dict().items())


def test_a_module_of_another_rank_and_alpha_has_its_own_scale():
    for rslora, scales in ((False, [0.5, 0.5]), (True, [1.0, 2.0])):
        chosen = AdapterSettings("lora", 4, 2.0, rslora=rslora, ranks={"b": 16}, alphas={"b": 8.0})
        assert [chosen.scale(module) for module in "ab"] == scales


def test_weights_go_over_at_once_where_nothing_is_done_to_them_first(tmp_path: Path, monkeypatch):
    (tmp_path / "dit.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    monkeypatch.setattr(loading, "merge_base_weights", lambda *_words: None)
    monkeypatch.setattr(loading, "quantize_blocks", lambda *_words: None)
    gpu, usual, expert = torch.device("meta"), options_of(tmp_path), SimpleNamespace(
        dit=tmp_path / "dit.safetensors", flag="--dit"
    )  # fmt: skip

    def loaded(*, on_host: bool = False, experts: int = 1, **changes: object) -> tuple[object, object]:
        told: dict[str, object] = {}
        kind = SimpleNamespace(load_transformer=lambda _file, **given: told.update(given))
        plan = SimpleNamespace(options=replace(usual, **changes), experts=[expert] * experts)
        load_base(plan, expert, kind, gpu, on_host=on_host)  # type: ignore[arg-type]
        return told["device"], told["dtype"]

    merges = {"base_weights": (tmp_path / "a.safetensors",)}
    assert loaded() == (gpu, torch.bfloat16)
    for given in ({"on_host": True}, {"blocks_to_swap": 1}, {"experts": 2}, merges):
        assert loaded(**given)[0] == "cpu", given  # type: ignore[arg-type]
    assert loaded(train_mode="full")[1] is None, "as the file has it"
    assert loaded(train_mode="full", **merges)[1] == torch.float32, "a sum has more digits"


@pytest.mark.parametrize(
    ("targets", "taken"),
    [
        ("attention", ["attn.to_q"]), ("ffn", ["img_mlp.net.2"]), ("all", ["attn.to_q", "img_mlp.net.2"]),
        ("all_linear", ["attn.to_q", "img_mlp.net.2", "img_mod.1"]),
    ],
)  # fmt: skip
def test_targets_find_the_layers_of_blocks_in_which_text_and_picture_look_at_both(tmp_path: Path, targets, taken):
    names = [f"transformer_blocks.0.{layer}" for layer in ("attn.to_q", "img_mlp.net.2", "img_mod.1")] + ["img_in"]
    options = replace(options_of(tmp_path, lora_targets=targets), task="qwen-image")
    found = select_modules(names, options, profiles.model("qwen-image"))
    assert found == [f"transformer_blocks.0.{layer}" for layer in taken]


@pytest.mark.parametrize("layout", ["comfyui", "kohya", "diffusers"])
def test_an_adapter_on_every_linear_layer_of_qwen_image_is_read(tmp_path: Path, layout: str):
    second = make_transformer()
    linear = [name for name, module in second.named_modules() if isinstance(module, torch.nn.Linear)]
    first = adapted(make_transformer(), targets="|".join(linear))
    assert {"img_in", "norm_out.linear", "transformer_blocks.1.txt_mod.1"} < set(linear)
    options = options_of(tmp_path, lora_layout=(layout,), network_alpha=2.0)
    save(tmp_path / "a.safetensors", trained_of(first), options, {})
    adapter = read_adapter(tmp_path / "a.safetensors")
    assert sorted(adapter) == sorted(linear)
    assert apply_adapter(second, adapter, name="a") == []
    draw = torch.Generator().manual_seed(0)
    latents, text = torch.randn(1, 16, 1, 4, 4, generator=draw), torch.randn(3, TEXT_DIM, generator=draw)
    with torch.no_grad():
        outputs = [predict_velocity(model, latents, torch.tensor([500.0]), [text])
                   for model in (first, second, make_transformer())]  # fmt: skip
    assert max_abs(*outputs[:2]) < 1e-5 < 1e-2 < max_abs(*outputs[1:])


@pytest.mark.parametrize("prefix", ["lycoris_", "lora_transformer_"])
@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_other_trainers_prefixes_of_names_with_underscores_are_read(tmp_path: Path, kind: str, prefix: str):
    options = options_of(tmp_path, lora_layout=("kohya",), **KINDS[kind])
    save(tmp_path / "a.safetensors", trained(options)[1], options, {})
    tensors = load_file(tmp_path / "a.safetensors")
    save_file({key.replace("lora_unet_", prefix): value for key, value in tensors.items()},
              tmp_path / "b.safetensors")  # fmt: skip
    one, other = (read_adapter(tmp_path / f"{name}.safetensors") for name in "ab")
    assert one.keys() == other.keys()
    for module, weight in one.items():
        assert weight.scale == other[module].scale
        assert all(torch.equal(factor, other[module].factors[part]) for part, factor in weight.factors.items())


def test_a_dora_of_the_high_noise_expert_is_over_its_own_base(tmp_path: Path):
    usual, module = options_of(tmp_path), "blocks.0.attn1.to_q"
    assert usual.dit
    weights = {name: value.float() / 2 for name, value in load_file(usual.dit).items()}
    save_file(weights, tmp_path / "high.safetensors")
    options = replace(usual, dit_high_noise=tmp_path / "high.safetensors")
    high, low = (_file_base(options, expert)(module) for expert in ("high_noise", "low_noise"))
    assert torch.equal(2 * high, low)
