"""The table itself: every reader sees the same flags."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wangen import profiles
from wangen.generator import reference
from wangen.generator.commands import convert, parse
from wangen.generator.entry import OVERVIEW
from wangen.generator.errors import UsageError
from wangen.generator.lint.tools import musubi_specs
from wangen.generator.steps import STEPS, CacheLatents, CacheText, Evaluate, Generate, Train, find_step
from wangen.generator.table import Option, Step, options, spellings

TRAIN = ["--dataset_config", "d.toml", "--dit", "m.safetensors", "--output_dir", "out", "--output_name", "cats"]


@pytest.mark.parametrize(
    ("step", "script"),
    [
        (CacheLatents, "wan_cache_latents"),
        (CacheText, "wan_cache_text_encoder_outputs"),
        (Train, "wan_train_network"),
        (Generate, "wan_generate_video"),
    ],
)
def test_every_flag_of_musubi_scripts_is_accepted_or_answered(step, script):
    known = {name for name, *_ in spellings(step)} | step.elsewhere.keys()
    assert [flag for flag in musubi_specs(script) if flag not in known] == []


@pytest.mark.parametrize("step", STEPS)
def test_a_flag_is_accepted_or_answered_never_both(step):
    names = [name for name, *_ in spellings(step)]
    assert len(names) == len(set(names))
    assert not set(names) & step.elsewhere.keys()
    spelled = [text for option in options(step) for text in option.flag.values]
    assert spelled == [text.lower() for text in spelled], "another spelling is looked for in lower case"


@pytest.mark.parametrize("step", STEPS)
def test_every_step_is_frozen_and_documented(step):
    assert step.__doc__
    assert dataclasses.fields(step)
    assert all(option.flag.help for option in options(step))
    for option in options(step):
        for value in option.flag.constants.values():
            assert value in option.choices if option.choices else convert(option, value) is not None


def values_for(option: Option) -> st.SearchStrategy:
    """Any value that the option's field can hold."""
    word = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
    scalar = {
        bool: st.booleans(),
        int: st.integers(-10, 10**6),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: word,
        Path: word.filter(bool).map(Path),
    }[option.kind]
    if option.flag.model_choices:
        scalar = st.sampled_from(profiles.model_names())
    if option.choices:
        scalar = st.sampled_from([choice for choice in option.choices if choice not in option.flag.refused])
    if option.kind is str and not option.choices and not option.flag.model_choices:
        scalar = scalar.filter(lambda text: text not in option.flag.values)
    if option.length is not None:
        size = option.length or None
        scalar = st.lists(scalar, min_size=size or 0, max_size=size or 3).map(tuple)
        if option.length == 0 and option.default != ():
            scalar = scalar.filter(bool)  # an empty list has no words, so that it means the default
    return st.none() | scalar if option.optional else scalar


def steps() -> st.SearchStrategy[Step]:
    """Any step with any values, but no config file (which would be read)."""

    def build(step: type[Step]) -> st.SearchStrategy[Step]:
        fields = {option.name: values_for(option) for option in options(step) if option.name != "config_file"}
        fields |= {name: fields[name].filter(lambda value: value != 0) for name in step.off_at_zero}
        if not step.one_of:
            return st.builds(step, **fields)
        named = {name: fields[name].filter(lambda value: value is not None) for name in step.one_of}
        return st.one_of([
            st.builds(step, **{**fields, **dict.fromkeys(step.one_of, st.none()), name: value})
            for name, value in named.items()
        ])  # fmt: skip

    return st.one_of([build(step) for step in STEPS])


@given(steps())
def test_argv_parses_back_to_an_equal_step(step):
    command, *words = step.argv()
    assert find_step(command) is type(step)
    assert parse(type(step), words) == step


def test_old_script_names_are_spellings_of_the_steps():
    assert find_step("wan_cache_latents.py") is CacheLatents
    assert find_step("wan-train-network") is Train
    assert find_step("wan_generate_video") is Generate


def test_dashes_constants_and_value_spellings_are_accepted():
    step = parse(Train, [*TRAIN, "--learning-rate", "2e-4", "--flash-attn", "--network_module", "networks.lora_wan"])
    assert (step.learning_rate, step.attention, step.network_module) == (2e-4, "flash", "lora")


def test_lists_are_read_as_people_write_them():
    step = parse(Train, [*TRAIN, "--optimizer_args", "weight_decay=0.1", "eps=1e-6", "--seed", "7"])
    assert (step.optimizer_args, step.seed) == (("weight_decay=0.1", "eps=1e-6"), 7)


@pytest.mark.parametrize("words", [["--optimizer_args", "--seed", "7"], ["--seed", "7", "--optimizer-args"]])
def test_a_list_that_an_empty_variable_left_is_left_out(words, caplog):
    step = parse(Train, [*TRAIN, *words])
    assert (step.optimizer_args, step.seed) == ((), 7)
    assert "has no value: it is left out" in caplog.text


@pytest.mark.parametrize(
    ("step", "words", "parts"),
    [
        (
            CacheLatents,
            ["--sdpa"],
            ["cache_latents has no flag --sdpa", "belongs to train and generate", "take it off"],
        ),
        (CacheText, ["--attention", "flash"], ["cache_text has no flag --attention", "take it off this line"]),
        (CacheLatents, ["--dataset_confg", "x"], ["did you mean --dataset_config?"]),
        (Train, ["--one_frame"], ["train has no flag --one_frame", "not in this version"]),
        (
            Train,
            [*TRAIN, "--no-vae-cache-cpu", "--one-frame", "--seed=3", "--rank=8", "--fp8-base", "--wobble", "x"],
            [
                "train has no flags --one_frame, --rank and --wobble",
                "--one_frame: one-frame training is not in"
                " this version of wangen; leave it out; --rank: the trainer calls it --network_dim; --wobble: wangen",
            ],
        ),
        (CacheLatents, ["--vae_chunk_size", "32"], ["it belongs to HunyuanVideo's VAE: take it off"]),
        (Train, ["--lora_weight", "a"], ["the trainer calls it --network_weights"]),
        (
            Train,
            ["--foo", "1", "--training_comment", "--pack is good", "--baar=2", "--", "--late"],
            ["train has no flags --foo and --baar\n", "--foo, --baar: wangen train --help lists the flags"],
        ),
        (Train, [*TRAIN, "--sdpa", "--flash_attn"], ["--sdpa and --flash_attn contradict each other"]),
        (Train, [*TRAIN, "--network_module", "lycoris.kohya"], ["use lora, loha or lokr"]),
        (Train, [*TRAIN, "--mixed_precision", "fp16"], ["use bf16"]),
        (Train, [*TRAIN, "--timestep_sampling", "krea2_shift"], ["made for another model", "use shift"]),
        (Train, [*TRAIN, "--task", "t2v-1.3b"], ["did you mean t2v-1.3B?"]),
        (Train, [*TRAIN, "--task", "t2i-14B"], ["use t2v-14B, with images"]),
        (CacheLatents, ["--dataset_config", "a", "--vae", "b", "--task", "i2v-14B-FC"], ["Fun-Control models are not"]),
        (Train, [*TRAIN, "--seed", "x"], ["--seed takes a whole number, got 'x'", "do:    write a whole number"]),
        (Train, [*TRAIN, "--output_dir", ""], ["--output_dir is empty", "give a path"]),
        (Train, [*TRAIN, "--sample_prompts", ""], ["--sample_prompts is empty", "leave it out"]),
        (Train, [], ["train needs --dataset_config or --manifest, --output_dir, --output_name"]),
        (Train, [*TRAIN, "--manifest", "m.jsonl"], ["--dataset_config and --manifest contradict each other"]),
        (Generate, ["--video_size", "480"], ["--video_size takes 2 values, got 480", "give height and width"]),
        (Generate, ["--video-size", "480", "--save_path", "x"], ["2 values, got 480", "give height and width"]),
        (Evaluate, ["--video_size", "--seed", "1"], ["--video_size takes 2 values, got none", "give height and width"]),
        (Train, [*TRAIN, "--dit", "--vae", "v"], ["--dit has no value: --vae follows", "give transformer weights"]),
        (Train, [*TRAIN, "--vae", "--output-dir=x"], ["--vae has no value: --output-dir=x follows"]),
        (
            Train,
            [*TRAIN, "--training_comment", "--fresh"],
            ["joined to it: --training_comment=--fresh"],
        ),
    ],
)
def test_a_wrong_line_is_answered_with_the_cure(step, words, parts):
    with pytest.raises(UsageError) as error:
        parse(step, words)
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert error.value.exit_code == 2


def test_a_flag_of_a_newer_script_is_answered_with_both_versions(monkeypatch):
    monkeypatch.setenv("WANGEN_SCRIPT_VERSION", "99.0")
    with pytest.raises(UsageError, match=r"made by wangen 99\.0, this machine has"):
        parse(Train, [*TRAIN, "--warp_drive"])


@pytest.mark.parametrize("task", profiles.model_names())
def test_flags_that_are_not_given_stand_as_the_model_profile_has_them(task, tmp_path):
    own = profiles.model(task).defaults.get("train", {})
    assert own.keys() <= set(Train.of_profile)
    bare = parse(Train, [*TRAIN, "--task", task])
    plain = Train(dataset_config=Path("d.toml"), dit=Path("m.safetensors"), output_dir=Path("out"), output_name="cats")
    assert bare == dataclasses.replace(plain, task=task, **own)
    (tmp_path / "a.toml").write_text(f'task = "{task}"\ndiscrete_flow_shift = 7\n', encoding="utf-8")
    told = parse(Train, [*TRAIN, "--config_file", str(tmp_path / "a.toml"), "--timestep_sampling", "sigmoid"])
    assert (told.discrete_flow_shift, told.timestep_sampling) == (7.0, "sigmoid")
    assert told.learning_rate == bare.learning_rate


def test_config_file_holds_the_same_flags_and_the_command_line_wins(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('[training]\nlearning_rate = 5e-5\nsdpa = true\noptimizer_args = ["a=1"]\n[more]\nseed = 3\n')
    step = parse(Train, [*TRAIN, "--config_file", str(config), "--seed", "4"])
    assert (step.learning_rate, step.attention, step.optimizer_args, step.seed) == (5e-5, "sdpa", ("a=1",), 4)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("lerning_rate = 1", "did you mean --learning_rate?"),
        ("seed = true", "--seed takes one value"),
        ("gradient_checkpointing = 1", "true or false"),
        ("one_frame = true", "not in this version"),
        ("a = ", "not valid TOML"),
    ],
)
def test_config_file_refuses_what_the_step_does_not_know(tmp_path, text, part):
    config = tmp_path / "run.toml"
    config.write_text(text)
    with pytest.raises(UsageError) as error:
        parse(Train, [*TRAIN, "--config_file", str(config)])
    assert part in str(error.value)
    assert str(config) in str(error.value)


def test_a_caching_step_refuses_attention_before_torch_is_imported(tmp_path):
    code = (
        "import sys; from wangen.generator.cli import main; "
        "rc = main(['cache_latents', '--sdpa', '--dataset_config', 'a', '--vae', 'b']); "
        "print(rc, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout.split() == ["2", "False"]
    assert "cache_latents has no flag --sdpa" in result.stderr


def test_the_pages_are_what_the_program_prints():
    update = "run: python -m wangen.generator.reference"
    assert Path(OVERVIEW).read_text(encoding="utf-8") == reference.overview(), update
    assert reference.FLAGS_PAGE.read_text(encoding="utf-8") == reference.flags_page(), update
    assert reference.MUSUBI_PAGE.read_text(encoding="utf-8") == reference.from_musubi_page(), update
