"""What `wangen lint --fix` makes of musubi-tuner's flags of memory, experts, timesteps and samples."""

from pathlib import Path

import pytest
from lint_samples import A14B, OUT, encode, script

from wangen.generator import lint, scripts
from wangen.generator.commands import parse
from wangen.generator.errors import UsageError
from wangen.generator.lint.fix import Fixed, fix
from wangen.generator.steps import Check, Train, find_step


def fixed(folder: Path, **train: object) -> tuple[Fixed, Check, Train]:
    """What became of a script with other flags of training: the report, and the first and last step of the bundle."""
    path = folder / "my_run.sh"
    path.write_bytes(encode("sh", script("sh", train=train)))
    done = fix(lint.read(path))
    made = folder / "train_cats.sh"
    assert lint.lint(lint.read(made)) == []
    steps = [parse(find_step(words[0]), words[1:]) for words in scripts.read_steps(made.read_bytes(), "sh")]
    assert isinstance(steps[0], Check)
    assert isinstance(steps[-1], Train)
    return done, steps[0], steps[-1]


@pytest.mark.parametrize(("flags", "wanted"), [
    ({}, ("none", 0, "full", False)),
    ({"fp8_base": None}, ("fp8", 0, "full", False)),
    ({"fp8_base": None, "fp8_scaled": None, "blocks_to_swap": "20"}, ("fp8", 20, "full", False)),
    ({"blocks_to_swap": "39", "block_swap_h2d_only": None}, ("none", 39, "full", False)),
    ({"gradient_checkpointing_cpu_offload": None}, ("none", 0, "full", True)),
    ({"gradient_checkpointing": OUT}, ("none", 0, "none", False)),
    ({"gradient_checkpointing": OUT, "blocks_to_swap": "20"}, ("none", 20, "full", False)),
    ({"gradient_checkpointing": OUT, "gradient_checkpointing_cpu_offload": None}, ("none", 0, "none", False)),
])  # fmt: skip
def test_memory_flags_are_spelled_out(tmp_path, flags, wanted):
    done, _, train = fixed(tmp_path, **flags)
    assert wanted == (
        train.quantize, train.blocks_to_swap, train.checkpointing, train.gradient_checkpointing_cpu_offload,
    )  # fmt: skip
    assert any("ignores it" in line for line in done.left_out) == (len(flags) == 2 and wanted[2:] == ("none", False))


def test_sage_attention_and_the_adapters_words_are_taken(tmp_path):
    _, _, train = fixed(tmp_path, sdpa=OUT, sage_attn=None, network_args="loraplus_lr_ratio=4")
    assert train.attention == "sage"
    assert train.network_args == ("loraplus_lr_ratio=4",)


@pytest.mark.parametrize(("flags", "words"), [
    ({"network_args": "rank_dropout=0.1"}, "LoHa's and LoKr's"),
    ({"network_args": "foo=3"}, "foo"),
    ({"timestep_sampling": OUT, "weighting_scheme": "mode", "mode_scale": "2.5"}, "--mode_scale must be"),
    ({"lr_scheduler": "warmup_stable_decay"}, "needs --lr_decay_steps"),
])  # fmt: skip
def test_a_training_that_would_be_refused_is_not_written(tmp_path, flags, words):
    with pytest.raises(UsageError, match=words):
        fixed(tmp_path, **flags)
    assert not list(tmp_path.glob("train_*"))


def test_an_alpha_of_zero_is_the_rank(tmp_path):
    _, _, train = fixed(tmp_path, network_dim="8", network_alpha="0")
    assert (train.network_dim, train.network_alpha) == (8, 8.0)


@pytest.mark.parametrize(("told", "floor"), [({}, 0.01), ({"lr_scheduler_min_lr_ratio": "0.2"}, 0.2)])
def test_rex_goes_down_as_far_as_it_did(tmp_path, told, floor):
    assert fixed(tmp_path, lr_scheduler="rex", **told)[2].lr_scheduler_min_lr_ratio == floor


def test_what_changes_nothing_is_left_out_of_the_bundle(tmp_path):
    done, _, train = fixed(tmp_path, img_in_txt_in_offloading=None)
    assert not train.img_in_txt_in_offloading
    assert any("--img_in_txt_in_offloading: it is HunyuanVideo's" in line for line in done.left_out)


def test_what_lycoris_is_told_goes_with_it(tmp_path):
    done, _, train = fixed(tmp_path, network_module="lycoris.kohya", network_args="algo=lokr")
    assert train.network_args == ()
    assert any("--network_args: they are LyCORIS's" in line for line in done.left_out)


@pytest.mark.parametrize(("given", "args", "scheduler"), [
    ({}, ("relative_step=True",), "constant"),
    ({"optimizer_args": "scale_parameter=False"}, ("scale_parameter=False", "relative_step=True"), "constant"),
    ({"optimizer_args": "relative_step=False"}, ("relative_step=False",), "cosine"),
])  # fmt: skip
def test_adafactor_sets_its_rate_where_it_did(tmp_path, given, args, scheduler):
    done, _, train = fixed(tmp_path, optimizer_type="adafactor", lr_scheduler="cosine", **given)
    assert (train.optimizer_args, train.lr_scheduler) == (args, scheduler)
    assert any("has its own" in line for line in done.left_out) == (scheduler == "constant")


def test_a_mode_that_is_not_here_takes_its_shift_along(tmp_path):
    _, _, train = fixed(tmp_path, timestep_sampling="flux2_shift", discrete_flow_shift=OUT)
    assert (train.timestep_sampling, train.discrete_flow_shift) == ("shift", 5.0)
    _, _, train = fixed(tmp_path, timestep_sampling="flux2_shift", discrete_flow_shift="3.0")
    assert train.discrete_flow_shift == 3.0


@pytest.mark.parametrize(("flags", "wanted"), [
    ({}, ("uniform", "none", 0.0)),
    ({"weighting_scheme": "logit_normal", "logit_mean": "0.5"}, ("logit_normal", "none", -0.5)),
    ({"weighting_scheme": "logit_normal", "logit_mean": "5e-1"}, ("logit_normal", "none", -0.5)),
    ({"weighting_scheme": "logit_normal", "logit_mean": "+0.5"}, ("logit_normal", "none", -0.5)),
    ({"weighting_scheme": "mode"}, ("sigma", "mode", 0.0)),
    ({"weighting_scheme": "cosmap"}, ("uniform", "cosmap", 0.0)),
    ({"timestep_sampling": "sigmoid", "weighting_scheme": "logit_normal"}, ("sigmoid", "none", 0.0)),
    ({"timestep_sampling": "logsnr", "logit_mean": "2"}, ("logsnr", "none", 2.0)),
])  # fmt: skip
def test_timesteps_are_drawn_as_they_were(tmp_path, flags, wanted):
    done, _, train = fixed(tmp_path, **{"timestep_sampling": OUT, "discrete_flow_shift": OUT} | flags)
    assert (train.timestep_sampling, train.weighting_scheme, train.logit_mean) == wanted
    assert any("ignores it" in line for line in done.left_out) == (wanted[0] == "sigmoid")


def test_a_range_of_timesteps_means_what_it_says(tmp_path):
    done, _, train = fixed(tmp_path, timestep_sampling=OUT, discrete_flow_shift=OUT, min_timestep="100")
    assert train.min_timestep == 100
    assert any("--min_timestep counts from the clean end" in line for line in done.changed)
    done, _, _ = fixed(tmp_path, min_timestep="100")
    assert not done.changed


def test_a_shape_that_sigma_does_not_keep_is_left_out(tmp_path):
    done, _, train = fixed(tmp_path, timestep_sampling=OUT, discrete_flow_shift=OUT, min_timestep="300",
                           preserve_distribution_shape=None)  # fmt: skip
    assert not train.preserve_distribution_shape
    assert any("--preserve_distribution_shape: musubi-tuner's" in line for line in done.left_out)


def test_both_experts_are_trained_and_checked(tmp_path):
    _, check, train = fixed(tmp_path, **A14B)
    assert (str(train.dit), str(train.dit_high_noise)) == ("/ai/t2v_low_noise_bf16.safetensors",
                                                            "/ai/t2v_high_noise_bf16.safetensors")  # fmt: skip
    assert (check.dit, check.dit_high_noise) == (train.dit, train.dit_high_noise)
    assert (train.experts, train.timestep_boundary, check.task) == ("both", 875.0, "t2v-A14B")


@pytest.mark.parametrize(("flags", "expert", "said"), [
    ({"min_timestep": "875"}, "high", False),
    ({"min_timestep": "0", "max_timestep": "875"}, "low", False),
    ({"dit": "@wan2.2_high_noise.safetensors"}, "high", True),
    ({"dit": "@wan2.2_t2v.safetensors"}, "low", True),
])  # fmt: skip
def test_one_expert_alone_is_told_by_its_timesteps_or_its_name(tmp_path, flags, expert, said):
    alone = A14B | {"dit": "@expert.safetensors", "dit_high_noise": OUT, "timestep_boundary": OUT}
    done, check, train = fixed(tmp_path, **alone | flags)
    assert train.experts == expert
    files = {"high": (None, train.dit_high_noise), "low": (train.dit, None)}[expert]
    assert (train.dit, train.dit_high_noise) == (check.dit, check.dit_high_noise) == files
    assert files != (None, None)
    assert any("expert alone is trained" in line for line in done.changed) == said
    _, _, train = fixed(tmp_path, **alone | flags, network_weights="@start.safetensors")
    starts = {"high": train.network_weights_high_noise, "low": train.network_weights}
    assert str(starts.pop(expert)) == "/ai/start.safetensors"
    assert list(starts.values()) == [None]


def test_a_script_that_names_no_transformer_is_translated_all_the_same(tmp_path):
    """What it lacks is said of the new script."""
    path = tmp_path / "my_run.sh"
    path.write_bytes(encode("sh", script("sh", train=A14B | {"dit": OUT})))
    fix(lint.read(path))
    (found,) = lint.lint(lint.read(tmp_path / "train_cats.sh"))
    assert (found.kind, "the low-noise expert of t2v-A14B has no weights" in found.found) == ("missing-flag", True)


def test_experts_that_are_swapped_by_their_names_are_exchanged(tmp_path):
    given = A14B | {"dit": A14B["dit_high_noise"], "dit_high_noise": A14B["dit"]}
    done, check, train = fixed(tmp_path, **given)
    assert ("low_noise" in str(train.dit), "high_noise" in str(train.dit_high_noise)) == (True, True)
    assert (check.dit, check.dit_high_noise) == (train.dit, train.dit_high_noise)
    assert any("the two experts were exchanged, by their names" in line for line in done.changed)


def test_one_adapter_that_both_experts_had_starts_both(tmp_path):
    done, _, train = fixed(tmp_path, **A14B, network_weights="@start.safetensors")
    assert str(train.network_weights) == str(train.network_weights_high_noise) == "/ai/start.safetensors"
    assert any("both experts start from --network_weights" in line for line in done.changed)


def test_samples_keep_the_encoders_on_the_line(tmp_path):
    given = {"sample_prompts": "prompts.txt", "sample_every_n_epochs": "1", "vae": "@Wan2.1_VAE.pth",
             "t5": "@models_t5_umt5-xxl-enc-bf16.pth"}  # fmt: skip
    _, _, train = fixed(tmp_path, **given)
    assert (str(train.sample_prompts), train.sample_every_n_epochs) == ("prompts.txt", 1)
    assert (str(train.vae), str(train.t5)) == ("/ai/Wan2.1_VAE.pth", "/ai/models_t5_umt5-xxl-enc-bf16.pth")


def test_without_prompts_training_encodes_nothing(tmp_path):
    done, check, train = fixed(tmp_path, vae="@Wan2.1_VAE.pth", sample_at_first=None, fp8_t5=None)
    assert [train.vae, train.t5, train.vae_dtype, train.t5_dtype, train.fp8_t5] == [None, None, None, None, False]
    assert not train.sample_at_first
    assert str(check.vae) == "/ai/Wan2.1_VAE.pth"
    assert [line.split(": ")[1] for line in done.left_out[:-1]] == ["--sample_at_first", "--fp8_t5"]  # then the TOML


def test_a_state_of_another_tool_is_not_resumed(tmp_path):
    done, _, train = fixed(tmp_path, resume="@state")
    assert train.resume is None
    assert any("--network_weights" in line for line in done.left_out)
