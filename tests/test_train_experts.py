"""Two experts in one run: two LoRAs, each exactly what it would be alone."""

import json
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import TinyRun
from train_cases import at_step, cut_off

from wangen import profiles
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import Train
from wangen.runtime import train
from wangen.runtime.training.plan import Plan, count_tokens, plan_experts
from wangen.runtime.training.refusals import resolved

CPU = torch.device("cpu")
A14B = profiles.model("t2v-A14B")


@pytest.fixture(scope="module")
def high(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a second expert: those of the first, turned a little."""
    path = tmp_path_factory.mktemp("high") / "wan2.2_t2v_high_noise_14B.safetensors"
    weights = load_file(tiny_run.weights["dit"])
    save_file({name: (0.9 * value.float()).to(value.dtype) for name, value in weights.items()}, path)
    return path


def both(tiny_run: TinyRun, high: Path, folder: Path, **changes) -> Train:
    options = tiny_run.options(folder, task="t2v-A14B", dit_high_noise=high, max_train_steps=6, high_noise_share=0.5)
    return replace(options, **{"expert_turn_steps": 2, **changes})


def test_two_experts_give_two_loras_each_as_if_it_had_been_trained_alone(tiny_run, high, tmp_path):
    schedule = {"lr_scheduler": "cosine"}  # over each expert's own steps
    report = train.run(both(tiny_run, high, tmp_path / "both", **schedule))
    files = [tmp_path / "both" / f"lora_{name}.safetensors" for name in ("high_noise", "low_noise")]
    assert report.result["loras"] == files
    assert all(file.is_file() for file in files)
    assert not (tmp_path / "both/lora.safetensors").exists()
    for name, turn in (("high", 1), ("low", 3)):
        alone = both(tiny_run, high, tmp_path / name, experts=name, **schedule)
        train.run(replace(alone, max_train_steps=3, expert_turn_steps=turn, high_noise_share=None))
        file = f"lora_{name}_noise.safetensors"
        ours, theirs = load_file(tmp_path / "both" / file), load_file(tmp_path / name / file)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    with safe_open(files[0], "pt") as header:
        assert header.metadata()["wangen.expert"] == "high_noise"


def test_the_experts_take_turns_and_draw_only_their_own_timesteps(tiny_run, high, tmp_path):
    train.run(both(tiny_run, high, tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    order = [line["expert"] for line in lines if "loss" in line]
    assert order == ["high_noise", "high_noise", "low_noise", "low_noise", "high_noise", "low_noise"]


def test_a_run_of_two_experts_goes_on_in_the_middle_of_a_turn(tiny_run, high, tmp_path):
    whole = both(tiny_run, high, tmp_path / "whole")
    train.run(whole)
    parted = replace(whole, output_dir=tmp_path / "parted")
    for steps in (1, 3, 6):
        train.run(replace(parted, max_train_steps=6) if steps == 6 else _stopped(parted, steps))
    for name in ("lora_high_noise", "lora_low_noise"):
        one, other = (tmp_path / folder / f"{name}.safetensors" for folder in ("whole", "parted"))
        assert one.read_bytes() == other.read_bytes()


def test_a_share_that_a_lone_expert_does_not_read_is_no_other_setting(tiny_run, high, tmp_path):
    alone = both(tiny_run, high, tmp_path, max_train_steps=2, experts="high")
    train.run(alone)
    assert train.run(replace(alone, max_train_steps=3, high_noise_share=0.3)).counts["steps"] == 3
    state = next((tmp_path / "lora_high_noise-state").glob("step-*/state.json"))
    told = json.loads(state.read_text())
    told["fingerprint"]["high_noise_share"] = "0.3"  # as an earlier version wrote it, without a sum of this file
    del told["checksums"]["state.json"]
    state.write_text(json.dumps(told))
    assert train.run(replace(alone, max_train_steps=4)).counts["steps"] == 4


def test_a_shortened_run_is_done_when_each_expert_has_its_own_steps(tiny_run, high, tmp_path):
    options = both(tiny_run, high, tmp_path, max_train_steps=40, expert_turn_steps=9, save_state_every_n_steps=1)
    cut_off(options, 9)
    shorter = replace(options, max_train_steps=12)
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 4, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            train.run(shorter)
    train.run(shorter)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    order = [line["expert"] for line in lines if "loss" in line]
    assert order == ["high_noise"] * 9 + ["low_noise"] * 6


@pytest.mark.parametrize("order", [("both", "high"), ("low", "both")])
@pytest.mark.slow
def test_other_experts_do_not_write_over_what_is_there(tiny_run, high, tmp_path, order):
    first, second = (both(tiny_run, high, tmp_path, experts=experts, high_noise_share=None) for experts in order)
    train.run(first)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    with pytest.raises(WangenError, match="a run of other experts has its LoRA under this name") as caught:
        train.run(second)
    assert "another --output_name; --fresh" in caught.value.cure
    assert {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")} == before
    train.run(replace(second, output_name="other"))
    train.run(replace(second, fresh=True))


def test_one_expert_after_the_other_goes_under_one_name(tiny_run, high, tmp_path):
    for experts in ("high", "low"):
        train.run(both(tiny_run, high, tmp_path, experts=experts, high_noise_share=None))
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "lora_high_noise.safetensors", "lora_low_noise.safetensors",
    ]  # fmt: skip


def test_repeats_count_in_an_experts_share(tiny_run, high, tmp_path):
    given = both(tiny_run, high, tmp_path, high_noise_share=None, timestep_sampling="flux_shift")
    options = resolved(given, A14B, None)
    small, large = (SimpleNamespace(size=(side, side), entry=SimpleNamespace(num_repeats=1)) for side in (256, 1024))
    large.entry.num_repeats = 99
    often = plan_experts(options, A14B, 1000, count_tokens([small, *[large] * 99], A14B))
    for one in (small, large):
        one.entry.num_repeats = 1
    assert often != plan_experts(options, A14B, 1000, count_tokens([small, large], A14B))
    assert often == plan_experts(options, A14B, 1000, count_tokens([small, *[large] * 99 * 99], A14B))


def _stopped(options: Train, steps: int) -> Train:
    """The same run, ended early: the length may change where the schedule does not depend on it."""
    return replace(options, max_train_steps=min(steps * 2, 6))


@pytest.mark.parametrize(("given", "boundary"), [(None, 0.875), (875, 0.875), (0.9, 0.9), (900, 0.9)])
def test_the_boundary_is_the_models_or_given_in_either_unit(tiny_run, high, tmp_path, given, boundary):
    options = resolved(both(tiny_run, high, tmp_path, timestep_boundary=given), A14B, None)
    first, second = plan_experts(options, A14B, 100)
    assert (first.name, first.low, first.high) == ("high_noise", boundary, 1.0)
    assert (second.name, second.low, second.high) == ("low_noise", 0.0, boundary)


def test_each_expert_gets_the_steps_of_its_share_of_the_timesteps(tiny_run, high, tmp_path):
    options = both(tiny_run, high, tmp_path, timestep_sampling="uniform")
    natural = resolved(replace(options, high_noise_share=None), A14B, None)
    assert [expert.num_steps for expert in plan_experts(natural, A14B, 1000)] == [125, 875]
    wanted = resolved(replace(options, high_noise_share=0.3), A14B, None)
    assert [expert.num_steps for expert in plan_experts(wanted, A14B, 1000)] == [300, 700]


def test_the_plan_says_the_shares_and_warns_of_an_expert_that_starves(tiny_run, high, tmp_path, caplog):
    caplog.set_level(logging.INFO, "wangen")
    options = both(tiny_run, high, tmp_path, timestep_sampling="sigmoid", max_train_steps=60)
    train.run(replace(options, high_noise_share=None, max_train_steps=40))
    assert "high-noise expert, 0." in caplog.text
    assert "timesteps 875 to 1000: 2.6 % of the drawn ones, 1 of 40 steps" in caplog.text
    assert "the high-noise expert gets 2.5 % of the samples" in caplog.text


def test_the_plan_of_a_run_that_goes_on_with_other_shares_counts_what_is_done(tiny_run, high, tmp_path, caplog):
    options = both(tiny_run, high, tmp_path, high_noise_share=0.5, max_train_steps=4)
    train.run(options)
    caplog.set_level(logging.INFO, "wangen")
    train.run(replace(options, high_noise_share=0.25, resume_changed=True))
    assert "of the drawn ones, 2 of 5 steps" in caplog.text
    assert "of the drawn ones, 3 of 5 steps" in caplog.text


def test_other_shares_are_other_lengths_where_the_schedule_does_not_depend_on_them(tiny_run, high, tmp_path):
    options = both(tiny_run, high, tmp_path / "a", high_noise_share=0.5, max_train_steps=4)
    train.run(options)
    train.run(replace(options, high_noise_share=0.6, max_train_steps=6))
    whole = both(tiny_run, high, tmp_path / "b", high_noise_share=0.6, max_train_steps=6)
    train.run(whole)
    for name in ("lora_high_noise.safetensors", "lora_low_noise.safetensors"):
        one, other = load_file(tmp_path / "a" / name), load_file(tmp_path / "b" / name)
        assert all(torch.equal(one[key], other[key]) for key in one)
    train.run(replace(options, output_dir=tmp_path / "c", lr_scheduler="cosine"))
    with pytest.raises(UsageError, match="high_noise_share"):
        train.run(replace(options, output_dir=tmp_path / "c", lr_scheduler="cosine", high_noise_share=0.6))


def test_loras_that_are_saved_before_an_experts_first_turn_are_announced(tiny_run, high, tmp_path, caplog):
    options = both(tiny_run, high, tmp_path / "a", high_noise_share=0.5, max_train_steps=8, expert_turn_steps=4)
    train.run(replace(options, save_every_n_steps=3))
    words = "the LoRAs that are saved at step 3 come before the low-noise expert's first turn, and its own is untrained"
    assert f"{words}: give --expert_turn_steps 1, or save less often" in caplog.text
    untrained = load_file(tmp_path / "a/lora_low_noise-step00000003.safetensors")
    assert not any(value.any() for name, value in untrained.items() if "lora_B" in name)
    for folder, changes in (("b", {"expert_turn_steps": 1}), ("c", {"save_every_n_steps": 5})):
        caplog.clear()
        given = {"save_every_n_steps": 3, **changes, "output_dir": tmp_path / folder}
        train.run(replace(options, **given))
        assert "first turn" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dit_high_noise": None}, "the high-noise expert of t2v-A14B has no weights"),
        ({"dit": None}, "the low-noise expert of t2v-A14B has no weights"),
        ({"timestep_boundary": 0.0}, "leaves one expert without timesteps"),
        ({"timestep_boundary": 1.5}, "is neither a sigma"),
        ({"high_noise_share": 1.0}, "--high_noise_share must be between 0 and 1"),
        ({"high_noise_share": None, "timestep_sampling": "logsnr"}, "the high-noise expert would get none"),
        ({"task": "t2v-14B"}, "has one transformer"),
    ],
)
def test_what_two_experts_cannot_do_is_refused_before_anything_is_read(tiny_run, high, tmp_path, changes, words):
    with pytest.raises(UsageError, match=words):
        train.run(both(tiny_run, high, tmp_path, **{"timestep_boundary": 0.875, **changes}))


def test_one_expert_given_twice_is_refused(tiny_run, tmp_path):
    with pytest.raises(WangenError, match="the same weights"):
        train.run(both(tiny_run, tiny_run.weights["dit"], tmp_path))


def test_a_run_that_goes_on_takes_the_turns_that_were_left(tiny_run, high, tmp_path):
    options = resolved(both(tiny_run, high, tmp_path, high_noise_share=0.4, expert_turn_steps=3), A14B, None)
    plan = Plan(options, A14B, [], [], 1, plan_experts(options, A14B, 20), {})
    whole = plan.turns([0, 0])
    for past in range(len(whole) + 1):
        assert plan.turns([whole[:past].count(number) for number in (0, 1)]) == whole[past:]


def test_of_the_expert_that_is_not_trained_no_file_is_looked_for_or_guarded(tiny_run, high, tmp_path):
    other = tmp_path / "lora_high_noise.safetensors"
    train.run(both(tiny_run, high, tmp_path, experts="high", high_noise_share=None, max_train_steps=1))
    alone = both(tiny_run, high, tmp_path, experts="low", high_noise_share=None)
    assert resolved(replace(alone, network_weights_high_noise=tmp_path / "none"), A14B, None)
    assert resolved(replace(alone, base_weights=(other,)), A14B, None).base_weights == (other,)
    with pytest.raises(UsageError, match="a file that this run writes over"):
        resolved(replace(alone, base_weights=(other,), experts="both"), A14B, None)


def test_timesteps_of_the_high_noise_expert_alone_tell_whose_weights_are_missing(tiny_run, high, tmp_path):
    for least, told in ((875, True), (874, False)):
        options = both(tiny_run, high, tmp_path, dit_high_noise=None, min_timestep=least, timestep_boundary=0.875)
        with pytest.raises(UsageError, match="the high-noise expert of t2v-A14B has no weights") as error:
            train.run(options)
        assert error.value.cure.endswith("--dit is the other's") is told
