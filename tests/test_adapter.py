"""The adapter that is trained: every kind begins at the base, learns everywhere, and goes where patterns say."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fast_dit import fast, inputs_of
from fast_dit import trained as trained_parameters
from helpers import every
from loras import LAYOUTS, LORAS, output, set_strength, to_layout, wanted
from parity import DITS, max_abs
from peft import LoKrConfig, get_peft_model
from trained import KINDS, MODEL, base_model, options_of, predicted, trained

from wangen import profiles
from wangen.generator.adapter_settings import loraplus_ratio
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.headers import read_header
from wangen.generator.steps import Train
from wangen.generator.train_refusals import refuse_flags
from wangen.runtime import safetensors_file
from wangen.runtime.adapter_layers import apply_adapter, base_weight, merge_adapter
from wangen.runtime.adapters import read_adapter
from wangen.runtime.lora import adapter_layers, read_lora
from wangen.runtime.memory.quantize import quantize_blocks
from wangen.runtime.training.adapter import add_adapter, disabled, merge_base_weights, replaced
from wangen.runtime.training.adapter_config import (
    adapter_settings,
    changeable_weights,
    linear_modules,
    select_modules,
)
from wangen.runtime.training.adapter_files import save
from wangen.runtime.training.adapter_refusals import require_adapter
from wangen.runtime.weights.transformer import load_transformer

LAYERS = linear_modules(changeable_weights(read_header(DITS["dit_t2v21"])))


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_changes_nothing_and_leaves_global_randomness_alone(tmp_path: Path, kind: str):
    transformer = base_model()
    before, state = predicted(transformer), torch.get_rng_state()
    parameters = add_adapter(transformer, options_of(tmp_path, **KINDS[kind]), MODEL)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(predicted(transformer), before)
    assert list(parameters) == sorted(parameters)
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}
    assert len(adapter_layers(transformer)) == 2 * 10
    trainable = {name for name, parameter in transformer.named_parameters() if parameter.requires_grad}
    assert trainable == set(parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_an_adapter_gets_a_gradient_and_no_other_does(tmp_path: Path, kind: str):
    transformer, parameters = trained(options_of(tmp_path, **KINDS[kind]))
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 16, 1, 8, 8, generator=generator)
    text = torch.randn(1, 5, transformer.config.text_dim, generator=generator)
    transformer(hidden, torch.tensor([500.0]), text, return_dict=False)[0].square().mean().backward()
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert 0 < float(parameter.grad.abs().max()) < float("inf"), name
    assert all(p.grad is None for name, p in transformer.named_parameters() if name not in parameters)


@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr"])
def test_the_first_values_are_a_function_of_seed_and_expert_alone(tmp_path: Path, kind: str):
    options = options_of(tmp_path, **KINDS[kind])

    def values(seed: int, expert: str = "") -> dict[str, torch.Tensor]:
        torch.manual_seed(len(expert) + seed)
        return add_adapter(base_model(), replace(options, seed=seed), MODEL, expert)

    first, again, other, high = values(1), values(1), values(2), values(1, "high_noise")
    assert all(torch.equal(first[name], again[name]) for name in first)
    random = [name for name in first if "magnitude" not in name and bool(first[name].any())]
    assert len(random) >= 20
    assert not any(torch.equal(first[name], other[name]) or torch.equal(first[name], high[name]) for name in random)


@pytest.mark.parametrize("kind", ["dora", "loha", "lokr"])
@pytest.mark.parametrize("mode", ["int8", "nf4"])
def test_every_kind_begins_at_a_quantised_base_as_well(tmp_path: Path, kind: str, mode: str):
    transformer = base_model()
    quantize_blocks(transformer, mode)
    before = predicted(transformer)
    add_adapter(transformer, options_of(tmp_path, **KINDS[kind]), MODEL)
    assert torch.equal(predicted(transformer), before)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({}, r"blocks\.\d+\.(attn[12]\.to_(q|k|v|out\.0)|ffn\.net\.(0\.proj|2))"),
        ({"lora_targets": "attention"}, r"blocks\.\d+\.attn[12]\..*"),
        ({"lora_targets": "self_attention"}, r"blocks\.\d+\.attn1\..*"),
        ({"lora_targets": "cross_attention"}, r"blocks\.\d+\.attn2\..*"),
        ({"lora_targets": "ffn"}, r"blocks\.\d+\.ffn\..*"),
        ({"include_patterns": (r"attn1\.to_q", r"ffn")}, r"blocks\.\d+\.(attn1\.to_q|ffn\..*)"),
        ({"exclude_patterns": (r"^blocks\.0\.",)}, r"blocks\.1\..*"),
        ({"include_patterns": ("attn1",), "exclude_patterns": ("to_out",)}, r"blocks\.\d+\.attn1\.to_[qkv]"),
        ({"include_patterns": (r"self_attn\.[qk]$",)}, r"blocks\.\d+\.attn1\.to_[qk]"),
        ({"network_args": (r"include_patterns=['.*cross_attn.*']",)}, r"blocks\.\d+\.attn2\..*"),
        ({"network_args": (r"exclude_patterns=[r'.*attn.*']",), "exclude_patterns": (r"net\.2",)},
         r"blocks\.\d+\.ffn\.net\.0\.proj"),
        ({"network_args": (r"exclude_patterns=[r'.*']", r"include_patterns=[r'.*self_attn.*']", "verbose=True")},
         r"blocks\.\d+\.attn1\..*"),
        ({"network_args": (r"include_patterns=[r'.*blocks\.1\..*']", r"exclude_patterns=[r'.*ffn.*']")},
         r"blocks\.(\d+\.attn[12]|1)\..*"),
    ],
)  # fmt: skip
def test_targets_and_patterns_restrict_what_is_trained(tmp_path: Path, changes: dict, pattern: str):
    options = options_of(tmp_path, **changes)
    usual = [name for name in LAYERS if re.fullmatch(MODEL.lora_targets, name)]
    expected = [name for name in usual if re.fullmatch(pattern, name)]
    assert 0 < len(expected) <= 20
    assert select_modules(LAYERS, options, MODEL) == expected
    transformer = base_model()
    add_adapter(transformer, options, MODEL)
    assert sorted(adapter_layers(transformer)) == sorted(expected)
    require_adapter(options, MODEL)


def test_the_image_branch_of_a_wan_21_i2v_model_is_trained_too(tmp_path: Path):
    layers = linear_modules(changeable_weights(read_header(DITS["dit_i2v21"])))
    chosen = select_modules(layers, options_of(tmp_path), profiles.model("i2v-14B"))
    assert "blocks.0.attn2.add_k_proj" in chosen
    assert not any("embedder" in name or name == "proj_out" for name in chosen)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"include_patterns": (r"attn3\.to_q",)}, r"finds no layer.*the nearest are attn1\.to_q|attn2\.to_q"),
        ({"exclude_patterns": ("selfattn.q",)}, r"finds no layer.*self_attn\.q"),
        (
            {"include_patterns": ("ffn",), "exclude_patterns": ("ffn",)},
            "--include_patterns and --exclude_patterns: no layer is left",
        ),
        ({"lora_targets": "ffn", "include_patterns": ("attn1",)}, "finds no layer"),
        ({"include_patterns": ("(",)}, "no regular expression"),
        ({"include_patterns": ("[[",)}, "no regular expression"),
        ({"network_args": ("loraplus_lr_ration=4",)}, "not known here.*did you mean loraplus_lr_ratio"),
        ({"network_args": ("verbose",)}, "not key=value"),
        ({"network_args": ("include_patterns=[1]",)}, "no list of texts"),
        ({"network_args": ("include_patterns=attn1", "include_patterns=attn2")}, "include_patterns twice.*are a list"),
        ({"network_args": ("use_dora=false",), "dora": True}, "--dora and --network_args use_dora=False contradict"),
        ({"network_args": ("use_rslora=0",), "rslora": True}, "--rslora and .* contradict"),
        ({"network_module": "lokr", "network_args": ("factor=8",), "lokr_factor": 4}, "--lokr_factor and .*factor=8"),
        ({"network_args": ("rank_dropout=0.1",)}, "use --network_dropout"),
        ({"network_args": ("use_dora=perhaps",)}, "neither true nor false"),
        ({"network_args": ("loraplus_lr_ratio=4",), "loraplus_lr_ratio": 8.0}, "different ratios"),
        ({"network_module": "lokr", "loraplus_lr_ratio": 8.0}, "the B of a LoRA"),
        ({"network_module": "loha", "network_dropout": 0.1}, "rank_dropout"),
        ({"network_module": "loha", "dora": True}, "--dora with --network_module loha"),
        ({"network_module": "lokr", "rslora": True}, "--rslora with --network_module lokr"),
        ({"lokr_factor": 8}, "--lokr_factor is LoKr's"),
        ({"network_module": "lokr", "lokr_factor": 0}, "-1 or above 0"),
        ({"network_module": "lokr", "network_args": ("factor=4.9",)}, "factor=4.9 is no whole number"),
        ({"network_module": "lokr", "network_args": ("factor=nan",)}, "factor=nan is no whole number"),
        ({"dim_from_weights": True}, "--network_weights"),
        ({"network_dim": 0}, "above 0"),
        ({"base_weights": (LORAS["t2v21"],), "base_weights_multiplier": (1.0, 0.5)}, "one multiplier for each"),
    ],
)
def test_what_no_adapter_can_have_is_refused_before_a_model_loads(tmp_path: Path, changes: dict, words: str):
    def refuse(options: Train) -> None:
        refuse_flags(options)
        require_adapter(options, MODEL)

    with pytest.raises(UsageError) as error:
        refuse(options_of(tmp_path, **changes))
    assert re.search(words, f"{error.value.found}; {error.value.cure}")


def test_network_args_of_musubi_tuner_mean_what_its_flags_do(tmp_path: Path):
    given = ("loraplus_lr_ratio=4", "use_dora=True", "use_rslora=1")
    options = options_of(tmp_path, network_args=given)
    assert loraplus_ratio(options) == 4
    chosen = adapter_settings(options)
    assert (chosen.dora, chosen.rslora, chosen.draws) == (True, True, False)
    convolutions = options_of(tmp_path, network_args=("conv_dim=4", "conv_alpha=1"))
    assert adapter_settings(convolutions) == adapter_settings(options_of(tmp_path))
    kronecker = adapter_settings(
        options_of(tmp_path, network_module="lokr", network_args=("factor=8", "rank_dropout=0.25"))
    )
    assert (kronecker.factor, kronecker.rank_dropout, kronecker.draws) == (8, 0.25, True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", every(3, ["lora", "rslora", "dora"], pytest.mark.slow))
def test_training_goes_on_from_a_lora_of_any_layout(tmp_path: Path, layout: str, kind: str):
    safetensors_file.write(tmp_path / "a.safetensors", to_layout(read_lora(LORAS["t2v21"]), layout), {})
    options = options_of(tmp_path, network_weights=tmp_path / "a.safetensors", **KINDS[kind])
    require_adapter(options, MODEL)
    transformer = base_model()
    add_adapter(transformer, options, MODEL)
    assert max_abs(output(transformer, "t2v21", 0), wanted("t2v21", 0, 1.0)) < 2e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", every(3, ["comfyui", "kohya", "diffusers"], pytest.mark.slow))
def test_training_goes_on_from_what_was_trained_before(tmp_path: Path, kind: str, layout: str):
    options = options_of(tmp_path, lora_layout=(layout,), **KINDS[kind])
    before, parameters = trained(options)
    save(tmp_path / "a.safetensors", parameters, options, {})
    # Another alpha: the change of the weights is what counts.
    options = replace(options, network_weights=tmp_path / "a.safetensors", network_alpha=2 * options.network_alpha)
    transformer = base_model()
    add_adapter(transformer, options, MODEL)
    assert max_abs(predicted(transformer), predicted(before)) < 2e-5


@pytest.mark.parametrize("kind", ["lora", "rslora", "loha", "lokr"])
def test_rank_and_alpha_come_from_the_weights_when_asked(tmp_path: Path, kind: str):
    options = options_of(tmp_path, lora_layout=("kohya",), **KINDS[kind])
    before, parameters = trained(options)
    save(tmp_path / "a.safetensors", parameters, options, {})
    weights = tmp_path / "a.safetensors"
    options = replace(options, network_weights=weights, network_dim=99, network_alpha=7.0, dim_from_weights=True)
    chosen = adapter_settings(options)
    assert (chosen.rank, round(chosen.alpha, 5)) == (4, 2.0)
    transformer = base_model()
    again = add_adapter(transformer, options, MODEL)
    assert {name: p.shape for name, p in again.items()} == {name: p.shape for name, p in parameters.items()}
    assert max_abs(predicted(transformer), predicted(before)) < 2e-5


def test_ranks_that_differ_from_layer_to_layer_are_taken_over(tmp_path: Path):
    lora = read_lora(LORAS["t2v21"])
    name = "blocks.1.attn2.to_k"
    wide = replace(lora[name], down=lora[name].down.repeat(2, 1), up=lora[name].up.repeat(1, 2), alpha=3.0)
    safetensors_file.write(tmp_path / "a.safetensors", to_layout({**lora, name: wide}, "kohya"), {})
    options = options_of(tmp_path, network_weights=tmp_path / "a.safetensors", dim_from_weights=True)
    transformer = base_model()
    parameters = add_adapter(transformer, options, MODEL)
    assert parameters[f"{name}.lora_A.default.weight"].shape[0] == 2 * lora[name].rank
    assert adapter_settings(options).scale(name) == pytest.approx(3.0 / (2 * lora[name].rank))
    assert adapter_layers(transformer)[name].scaling["default"] == pytest.approx(adapter_settings(options).scale(name))


def test_a_start_that_fits_in_part_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "wangen")
    options = options_of(tmp_path, network_weights=LORAS["t2v21"], include_patterns=("attn1",))
    require_adapter(options, MODEL)
    assert re.search("12 layers not trained here and left out, also of what is saved: blocks.0.attn2.to_k", caplog.text)
    assert "train them, too (--lora_targets all_linear: all of the blocks), or merge the file" in caplog.text
    parameters = add_adapter(base_model(), options, MODEL)
    assert "8 layers of 8 start from" in caplog.text
    assert all(bool(p.any()) for p in parameters.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network_dim": 8}, "give --network_dim 4, or --dim_from_weights"),
        ({"network_module": "loha"}, "this is a LoRA, and a LoHa is to be trained.*--network_module lora"),
        ({"network_weights": LORAS["i2v21"].parent.parent / "dit_i2v21" / "model.safetensors"}, "takes a LoRA"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(tmp_path: Path, changes: dict, words: str):
    options = options_of(tmp_path, **{"network_weights": LORAS["t2v21"], **changes})
    with pytest.raises(WangenError) as error:
        require_adapter(options, MODEL)
    assert re.search(words, f"{error.value.found}; {error.value.cure}")


def test_a_start_of_which_nothing_is_trained_is_refused(tmp_path: Path):
    lora = {name: weight for name, weight in read_lora(LORAS["t2v21"]).items() if "attn2" in name}
    safetensors_file.write(tmp_path / "a.safetensors", to_layout(lora, "comfyui"), {})
    options = options_of(tmp_path, network_weights=tmp_path / "a.safetensors", lora_targets="ffn")
    with pytest.raises(WangenError, match="nothing in this adapter fits"):
        require_adapter(options, MODEL)


def test_a_dora_is_no_start_for_a_lora(tmp_path: Path):
    options = options_of(tmp_path, **KINDS["dora"])
    save(tmp_path / "a.safetensors", trained(options)[1], options, {})
    with pytest.raises(WangenError, match="this is a DoRA"):
        require_adapter(options_of(tmp_path, network_weights=tmp_path / "a.safetensors"), MODEL)


def test_each_expert_starts_from_its_own_weights(tmp_path: Path):
    options = options_of(tmp_path, network_weights_high_noise=LORAS["t2v21"])
    high, low = (base_model(), base_model())
    add_adapter(high, options, MODEL, "high_noise")
    add_adapter(low, options, MODEL, "low_noise")
    assert max_abs(output(high, "t2v21", 0), wanted("t2v21", 0, 1.0)) < 2e-4
    assert max_abs(output(low, "t2v21", 0), wanted("t2v21", 0, 0)) < 2e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_seen_while_the_adapter_is_disabled(tmp_path: Path, kind: str):
    transformer, parameters = trained(options_of(tmp_path, **KINDS[kind]))
    adapted, base = predicted(transformer), predicted(base_model())
    assert max_abs(adapted, base) > 1e-3
    with disabled(transformer):
        assert torch.equal(predicted(transformer), base)
    assert torch.equal(predicted(transformer), adapted)
    assert {n for n, p in transformer.named_parameters() if p.requires_grad} == set(parameters)


def test_parameters_have_other_values_for_a_while_in_the_same_storage(tmp_path: Path):
    transformer, parameters = trained(options_of(tmp_path))
    adapted, base = predicted(transformer), predicted(base_model())
    places = [parameter.data_ptr() for parameter in parameters.values()]
    own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    zeros = {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name, parameter in parameters.items()}
    with replaced(parameters, zeros):
        assert torch.equal(predicted(transformer), base)
        assert [parameter.data_ptr() for parameter in parameters.values()] == places
    assert all(torch.equal(parameters[name], value) for name, value in own.items())
    assert torch.equal(predicted(transformer), adapted)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_any_kind_is_merged_as_it_is_applied(tmp_path: Path, kind: str):
    options = options_of(tmp_path, **KINDS[kind])
    before, parameters = trained(options)
    save(tmp_path / "a.safetensors", parameters, options, {})
    merged = base_model()
    merge_base_weights(merged, options_of(tmp_path, base_weights=(tmp_path / "a.safetensors",)))
    assert not adapter_layers(merged)
    assert not hasattr(merged, "peft_config")
    assert max_abs(predicted(merged), predicted(before)) < 2e-5
    applied = base_model()
    apply_adapter(applied, read_adapter(tmp_path / "a.safetensors"), name="a")
    assert max_abs(predicted(applied), predicted(before)) < 2e-5
    add_adapter(merged, options_of(tmp_path), MODEL)  # and is trained on as if it had always been so


def test_merging_into_bfloat16_rounds_the_exact_sum_once():
    transformer = load_transformer(DITS["dit_t2v21"], dtype=torch.bfloat16)
    lora = read_lora(LORAS["t2v21"])
    before = {name: base_weight(transformer.get_submodule(name)) for name in lora}
    merge_adapter(transformer, read_adapter(LORAS["t2v21"]), 0.6)
    for name, part in lora.items():
        exact = before[name].double() + 0.6 * part.scale * (part.up.double() @ part.down.double())
        found = transformer.get_submodule(name).weight
        assert found.dtype == torch.bfloat16
        allowed = exact.abs() * 2**-8 * 1.001 + before[name].double().abs() * 2**-23  # where both nearly cancel
        assert bool(((found.double() - exact).abs() <= allowed).all()), name


def test_merging_into_quantised_layers_quantises_the_sum_again():
    transformer, plain = base_model(), base_model()
    quantize_blocks(transformer, "int8")
    name = "blocks.1.attn1.to_q"
    before = base_weight(transformer.get_submodule(name))
    adapter = read_adapter(LORAS["t2v21"])
    merge_adapter(transformer, adapter)
    merge_adapter(plain, adapter)
    change = base_weight(plain.get_submodule(name)) - base_weight(base_model().get_submodule(name))
    error = (base_weight(transformer.get_submodule(name)) - before - change).abs().max()
    assert float(error) < 0.02 * float(before.abs().max())
    assert float(change.abs().max()) > 5 * float(error)


@pytest.mark.parametrize("order", [("lora", "lokr"), ("lokr", "lora"), ("loha", "lokr")])
def test_adapters_of_different_kinds_add_up(tmp_path: Path, order: tuple[str, str]):
    applied, merged = base_model(), base_model()
    for kind in order:
        options = options_of(tmp_path, **KINDS[kind])
        save(tmp_path / f"{kind}.safetensors", trained(options)[1], options, {})
        adapter = read_adapter(tmp_path / f"{kind}.safetensors")
        apply_adapter(applied, adapter, name=kind)
        set_strength(applied, kind, 0.5)
        merge_adapter(merged, adapter, 0.5)
    found = predicted(applied)
    assert max_abs(found, predicted(merged)) < 2e-5
    assert max_abs(found, predicted(base_model())) > 1e-3
    inputs = inputs_of("dit_t2v21")
    with torch.no_grad():
        assert max_abs(inputs(fast(applied)), inputs(fast(merged))) < 2e-5


@pytest.mark.parametrize("rank", [2, 8])
def test_a_lokrs_rank_pattern_decides_the_strength_of_whole_matrices(tmp_path: Path, rank: int):
    model = base_model()
    config = LoKrConfig(r=4, alpha=3, target_modules=["to_q", "to_v"], rank_pattern={"to_q": rank})
    peft_model = get_peft_model(model, config)
    for parameter in trained_parameters(peft_model).values():
        torch.nn.init.normal_(parameter, std=0.05)
    peft_model.save_pretrained(tmp_path)
    ours = base_model()
    merge_adapter(ours, read_adapter(tmp_path))
    assert max_abs(predicted(ours), predicted(peft_model.merge_and_unload())) < 2e-5
    whole = [weight for weight in read_adapter(tmp_path).values() if not weight.rank]
    assert bool(whole) == (rank == 8)


def test_a_dora_has_no_other_strength_than_one(tmp_path: Path):
    options = options_of(tmp_path, **KINDS["dora"])
    save(tmp_path / "a.safetensors", trained(options)[1], options, {})
    with pytest.raises(UsageError, match=r"a DoRA at strength 0\.5"):
        merge_adapter(base_model(), read_adapter(tmp_path / "a.safetensors"), 0.5)
