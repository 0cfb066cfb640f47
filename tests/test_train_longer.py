"""Runs that go on beyond their end, as another expert's or with nothing left to do; and runs that teach nothing."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import planned
from safetensors.torch import load_file, save_file
from tiny import TinyRun

from wangen import profiles
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.headers import read_header
from wangen.generator.steps import Train
from wangen.runtime import train
from wangen.runtime.training import checkpoint
from wangen.runtime.training.announcing import announce
from wangen.runtime.training.plan import make_plan
from wangen.runtime.training.watching import Watching


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def two(tiny_run: TinyRun, folder: Path, **changes: object) -> Train:
    """A run of two experts, of unlike weights."""
    high = folder / "weights" / "high.safetensors"
    if not high.exists():
        high.parent.mkdir(parents=True)
        save_file({name: 0.9 * value for name, value in load_file(tiny_run.weights["dit"]).items()}, high)
    given = {"task": "t2v-A14B", "dit_high_noise": high, "high_noise_share": 0.5, "max_train_steps": 4} | changes
    return tiny_run.options(folder, **given)


@pytest.mark.parametrize(
    "every", [{"save_every_n_steps": 2}, {"save_every_n_epochs": 1, "save_state": True, "ema_decay": 0.9}], ids=str
)
@pytest.mark.slow
def test_a_run_that_is_longer_now_has_the_files_of_one_that_was_as_long_from_the_start(tiny_run, tmp_path, every):
    straight, longer = (tiny_run.options(tmp_path / name, **every) for name in ("straight", "longer"))
    per_epoch = planned(tiny_run, tmp_path).steps_per_epoch
    ends = [per_epoch * 2, per_epoch * 3] if "save_every_n_epochs" in every else [4, 6]
    train.run(replace(straight, max_train_steps=ends[1]))
    for end in ends:
        train.run(replace(longer, max_train_steps=end))
    assert files(tmp_path / "longer") == files(tmp_path / "straight")
    states = [sorted(path.name for path in (options.output_dir / "lora-state").iterdir())
              for options in (straight, longer)]  # fmt: skip
    assert states[0] == states[1]


def test_a_state_of_both_experts_is_none_of_one(tiny_run, tmp_path):
    train.run(two(tiny_run, tmp_path))
    state = checkpoint.newest(tmp_path / "lora-state")
    alone = two(tiny_run, tmp_path, experts="high", high_noise_share=None, resume=state)
    alone = replace(alone, output_dir=tmp_path / "alone")
    for options in (alone, replace(alone, resume_changed=True)):
        with pytest.raises(UsageError) as error:
            train.run(options)
        assert error.value.found == "this training state is of both experts, and the high-noise expert would go on"
        assert error.value.where == str(state)
        assert error.value.cure.endswith("start from its LoRA with --network_weights_high_noise")


@pytest.mark.slow
def test_a_line_that_began_before_another_took_its_lora_does_not_write_over_that(tiny_run, tmp_path):
    low = two(tiny_run, tmp_path, experts="low", high_noise_share=None, max_train_steps=2)
    train.run(low)
    assert train.run(low).result["done_before"], "its own LoRA is there"
    train.run(two(tiny_run, tmp_path, fresh=True))
    before = files(tmp_path)
    for options in (low, replace(low, max_train_steps=3)):
        with pytest.raises(WangenError, match="a run of other experts has its LoRA under this name"):
            train.run(options)
    assert files(tmp_path) == before
    train.run(replace(low, fresh=True))
    assert read_header(tmp_path / "lora_low_noise.safetensors").metadata["ss_steps"] == "2"


def test_a_damaged_state_or_lora_of_other_experts_stops_nobody(tiny_run, tmp_path):
    low = two(tiny_run, tmp_path, experts="low", high_noise_share=None, max_train_steps=2)
    high = replace(low, experts="high")
    for options in (low, high):
        train.run(options)
    newest = checkpoint.newest(tmp_path / "lora_high_noise-state")
    assert newest
    file = next(newest.glob("adapter*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8] + b"\xff" * 8)
    lora = tmp_path / "lora_low_noise.safetensors"
    lora.write_bytes(lora.read_bytes()[:100])
    assert train.run(replace(low, max_train_steps=3)).result["steps_this_run"] == 1


def test_what_a_kill_left_of_earlier_states_goes_when_a_run_that_has_ended_is_started_again(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    newest = checkpoint.newest(tmp_path / "lora-state")
    assert newest
    for name in ("step-00000001", "step-00000002-old", ".staging-00000002"):
        (newest.parent / name).mkdir()
        (newest.parent / name / "adapter.safetensors").write_bytes(b"half")
    assert train.run(options).result["done_before"]
    assert [path for path in newest.parent.iterdir() if path.is_dir()] == [newest]


def test_a_run_that_goes_back_and_trains_nothing_leaves_the_newest_state(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=5, save_every_n_steps=2, save_state=True)
    train.run(options)
    states = tmp_path / "lora-state"
    before = sorted(path.name for path in states.iterdir())
    back = replace(options, resume=states / "step-00000002", max_train_steps=2)
    assert train.run(back).result["done_before"]
    assert sorted(path.name for path in states.iterdir()) == before


def test_advice_for_a_run_that_has_ended_can_be_followed(tiny_run, tmp_path, caplog):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    other = replace(options, learning_rate=5e-4)
    with pytest.raises(UsageError) as error:
        train.run(other)
    assert error.value.cure.endswith("; more steps and --resume_changed go on with the new")
    train.run(replace(other, resume_changed=True, max_train_steps=3))
    with pytest.raises(UsageError) as error:
        train.run(replace(other, dora=True, max_train_steps=4))
    assert "--resume_changed" not in error.value.cure
    caplog.clear()
    train.run(replace(other, dora=True, resume_changed=True))
    assert "nothing is trained or written" in caplog.text
    assert "more steps" not in caplog.text


def test_the_loss_by_timestep_of_two_experts_is_apart_and_told_at_an_end_within_an_epoch(tiny_run, tmp_path):
    options = two(tiny_run, tmp_path, max_train_steps=8, expert_turn_steps=2)
    per_epoch = planned(tiny_run, tmp_path).steps_per_epoch
    assert 8 % per_epoch
    train.run(options)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [line for line in lines if "loss_by_timestep" in line]
    assert {line["step"] for line in told} == {*range(per_epoch, 8, per_epoch), 8}
    low = {f"{100 * number}-{100 * (number + 1)}" for number in range(9)}
    for name, wanted in (("high_noise", {"800-900", "900-1000"}), ("low_noise", low)):
        bins = {each for line in told if line["expert"] == name for each in line["loss_by_timestep"]}
        assert bins
        assert bins <= wanted


def test_items_that_cannot_teach_anything_are_told(tiny_run, tmp_path, caplog):
    plan = planned(tiny_run, tmp_path)
    of_reg = [replace(one, sample=replace(one.sample, entry=replace(one.sample.entry, is_reg=True)))
              for one in plan.samples]  # fmt: skip
    nothing = replace(plan.options, prior_loss_weight=0.0)
    with pytest.raises(UsageError, match="every item is of a regularisation set: no loss would count"):
        make_plan(nothing, plan.model, of_reg, [])
    make_plan(nothing, plan.model, [*of_reg, plan.samples[0]], [])

    text = tiny_run.dataset_config.read_text()
    config = tiny_run.dataset_config.with_name("reg_beside.toml")
    config.write_text(text.replace("[[datasets]]", "[[datasets]]\nis_reg = true", 1))
    caplog.set_level(logging.WARNING, logger="wangen")
    train.run(tiny_run.options(tmp_path, dataset_config=config, prior_loss_weight=0.0, max_train_steps=6))
    assert caplog.text.count("teaches nothing: no loss of") == 1
    caplog.clear()
    watched = SimpleNamespace(_counts=True)
    for losses, times in (([0.0, 0.5], 0), ([0.0, 0.0], 1), ([0.0, 0.0], 1)):
        Watching._warn_of_nothing(watched, {"step": 3, "names": ["a", "b"], "losses": losses})  # type: ignore[arg-type]
        assert caplog.text.count("step 3 teaches nothing: no loss of a, b") == times


@pytest.mark.parametrize(("weight", "is_reg", "said"), [(0.5, False, True), (0.5, True, False), (1.0, False, False)])
def test_flags_that_the_items_leave_nothing_to_do_are_said(tmp_path, caplog, weight, is_reg, said):
    def item(frames: int) -> SimpleNamespace:
        entry = SimpleNamespace(is_reg=is_reg)
        return SimpleNamespace(sample=SimpleNamespace(entry=entry, count=frames), entries=[])

    options = Train(output_dir=tmp_path, output_name="n", prior_loss_weight=weight, condition_frames=5)
    plan = SimpleNamespace(options=options, experts=["one"], samples=list(map(item, (1, 5, 9))), steps_per_epoch=3,
                           batches_per_epoch=3)  # fmt: skip
    ranks = SimpleNamespace(count=1, in_step=False)
    announce(SimpleNamespace(plan=plan, trainees=[], ranks=ranks, is_sharded=False, step=0, num_steps=9))  # type: ignore[arg-type]
    assert ("--prior_loss_weight 0.5 is not used: no dataset says is_reg = true" in caplog.text) == said
    assert "--condition_frames 5: 1 clip is no longer than that; all but the end of it is given" in caplog.text


def test_a_first_loss_that_is_no_number_may_be_the_weights(tiny_run, tmp_path):
    tensors = load_file(tiny_run.weights["dit"])
    tensors["blocks.0.ffn.0.weight"][0, 0] = float("nan")
    save_file(tensors, broken := tmp_path / "broken.safetensors")
    with pytest.raises(WangenError, match="not finite at step 1") as error:
        train.run(tiny_run.options(tmp_path, dit=broken))
    assert error.value.cure.startswith("look at these items, and at --dit, which may be damaged; ")
    assert error.value.cure.endswith("lower --learning_rate, and start again")


def test_a_name_with_the_ending_of_a_file_is_refused(tiny_run, tmp_path):
    with pytest.raises(UsageError, match="has the ending of a file") as error:
        train.run(tiny_run.options(tmp_path, output_name="my lora.safetensors"))
    assert error.value.cure == "give 'my lora'"


def test_a_decay_of_a_share_that_is_less_than_a_step_is_none(tiny_run, tmp_path):
    given = {"lr_scheduler": "warmup_stable_decay", "max_train_steps": 2}
    train.run(tiny_run.options(tmp_path, lr_decay_steps="20%", **given))
    with pytest.raises(UsageError, match="needs --lr_decay_steps"):
        train.run(tiny_run.options(tmp_path, lr_decay_steps="0%", **given))


@pytest.mark.parametrize("words", [["-m", "wangen.runtime.train"], ["-mwangen.runtime.loader"]], ids=str)
def test_a_module_is_no_program(words):
    done = subprocess.run([sys.executable, *words, "--help"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "is no program\n  do:    python -m wangen.runtime STEP" in done.stderr


def test_timesteps_that_a_size_of_the_dataset_never_has_are_refused_before_the_first_step(tiny_run, tmp_path):
    """At the model's own size each expert gets some; at 64x64, 16 tokens, the high one does not."""
    options = two(tiny_run, tmp_path, timestep_sampling="flux_shift", sigmoid_scale=0.22)
    with pytest.raises(UsageError, match="practically never falls"):
        make_plan(replace(options, timestep_boundary=0.875), profiles.model("t2v-A14B"),
                  planned(tiny_run, tmp_path).samples, [])  # fmt: skip
