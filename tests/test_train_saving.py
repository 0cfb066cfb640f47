"""What a run saves and when, what of it stays, and from which of its states the next run goes on."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import digest
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import state_folder

from wangen.generator.errors import WangenError
from wangen.generator.files import machine
from wangen.generator.steps import Train
from wangen.runtime import train
from wangen.runtime.training import checkpoint, saving
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.set_aside import set_other_epochs_aside
from wangen.runtime.training.step import StepResult
from wangen.runtime.training.watching import Watching


def left(folder):
    """The numbers of the LoRAs that lie there, and the steps of the states."""
    loras = sorted(path.stem.removeprefix("lora-") for path in folder.glob("lora-*.safetensors"))
    return loras, sorted(int(path.name[-8:]) for path in folder.glob("lora-state/step-*"))


def test_saving_keeps_what_was_asked_for(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path / "steps", max_train_steps=6, save_every_n_steps=1, save_last_n_steps=2)
    train.run(options)
    assert left(tmp_path / "steps") == (["step00000003", "step00000004", "step00000005"], [6])
    train.run(replace(options, output_dir=tmp_path / "states", save_state=True))
    assert left(tmp_path / "states") == (["step00000003", "step00000004", "step00000005"], [3, 4, 5, 6])
    train.run(replace(options, output_dir=tmp_path / "own", save_state=True, save_last_n_steps_state=100))
    assert left(tmp_path / "own") == (["step00000003", "step00000004", "step00000005"], [1, 2, 3, 4, 5, 6])


def test_another_run_s_lora_that_is_called_like_a_numbered_one_stays(tiny_run, tmp_path):
    train.run(tiny_run.options(tmp_path, max_train_steps=1, output_name="lora-step00000001"))
    other = (tmp_path / "lora-step00000001.safetensors").read_bytes()
    train.run(tiny_run.options(tmp_path, max_train_steps=6, save_every_n_steps=2, keep_last=1))
    left_there = sorted(path.stem for path in tmp_path.glob("*.safetensors"))
    assert left_there == ["lora", "lora-step00000001", "lora-step00000004"]
    assert (tmp_path / "lora-step00000001.safetensors").read_bytes() == other


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "loras", "states"), [
    ({"save_every_n_epochs": 1, "save_last_n_epochs": 1}, ["000004"], [12, 15]),
    ({"save_every_n_epochs": 2, "save_last_n_epochs": 1}, ["000004"], [12, 15]),
    ({"save_every_n_epochs": 1, "save_last_n_epochs": 2}, ["000003", "000004"], [9, 12, 15]),
    ({"save_every_n_epochs": 1, "save_last_n_epochs": 2, "save_last_n_epochs_state": 1}, ["000003", "000004"],
     [12, 15]),
    ({"save_every_n_epochs": 2, "save_last_n_epochs": 1, "save_every_n_steps": 5}, ["000004", "step00000005",
     "step00000010"], [5, 10, 12, 15]),
])  # fmt: skip
def test_epochs_that_are_kept_are_those_that_were_saved(tiny_run, tmp_path, flags, loras, states):
    """As in musubi-tuner, where `--save_every_n_epochs 5 --save_last_n_epochs 3` keeps three LoRAs."""
    options = tiny_run.options(tmp_path, max_train_steps=None, max_train_epochs=5, save_state=True, **flags)
    report = train.run(options)
    assert report.counts["steps"] == 15  # three samples of batch 1, five epochs
    assert left(tmp_path) == (loras, states)


@pytest.mark.parametrize(("seconds", "steps"), [(0.5, range(1, 40)), (6, range(1, 40, 5)), (60, [1, 30])])
def test_states_at_ends_of_short_epochs_take_a_tenth_of_the_time_at_most(monkeypatch, seconds, steps):
    """Epochs of one step of 15 seconds, a state that takes so many; after seven minutes there is one in any case."""
    now, saved = [0.0], []
    options = SimpleNamespace(save_every_n_steps=None, save_every_n_epochs=None, save_state=False,
                              save_state_every_n_steps=None, save_state_every_n_minutes=7.0)  # fmt: skip
    plan = SimpleNamespace(options=options, steps_per_epoch=1)
    run = SimpleNamespace(plan=plan, step=0, num_steps=100, facts={}, ranks=SimpleNamespace(is_first=True))

    def written(*_, **__):
        saved.append(run.step)
        now[0] += seconds

    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(saving, "save_state", written)
    due = saving.Saving(run)
    for run.step in range(1, 40):
        now[0] += 15.0
        if due.due():
            due.save()
    assert saved == [*steps]
    run.ranks.is_first = False
    assert not saving.Saving(run).due(), "the first process's clock decides for all"


def test_resume_takes_the_state_it_is_given(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=4, save_every_n_steps=1, save_state=True)
    train.run(options)
    final = digest(tmp_path / "lora.safetensors")
    report = train.run(replace(options, resume=state_folder(options) / "step-00000002"))
    assert report.result["steps_this_run"] == 2
    assert digest(tmp_path / "lora.safetensors") == final
    given = replace(options, resume=state_folder(options) / "step-00000003", max_train_steps=3)
    assert train.run(given).result["done_before"]
    assert left(tmp_path)[1] == [1, 2, 3, 4], "nothing was trained, and the end of the line is still there"


def test_a_line_with_resume_goes_on_from_what_it_has_saved_itself(tiny_run, tmp_path, monkeypatch):
    after = Watching.after

    def killed_at_5(self: Watching, result: StepResult) -> str:
        if result.step == 5:
            raise KeyboardInterrupt
        return after(self, result)

    options = tiny_run.options(tmp_path, max_train_steps=4, save_every_n_steps=1, save_state=True)
    train.run(options)
    states = state_folder(options)
    origin = states.rename(tmp_path / "origin") / "step-00000002"
    line = replace(options, resume=origin, max_train_steps=6)
    monkeypatch.setattr(Watching, "after", killed_at_5)
    with pytest.raises(KeyboardInterrupt):
        train.run(line)
    monkeypatch.undo()
    assert train.run(line).result["steps_this_run"] == 2
    assert train.run(line).result["done_before"]
    other = replace(line, resume=tmp_path / "origin" / "step-00000003")
    assert train.run(other).result["steps_this_run"] == 3


def test_what_goes_wrong_while_looking_costs_nothing_that_was_trained(tiny_run, tmp_path, monkeypatch):
    def refused(self: Watching, *_: object) -> bool:
        if self._run.step:
            raise WangenError("the disk is full")
        return True

    monkeypatch.setattr(Watching, "look", refused)
    options = tiny_run.options(tmp_path, max_train_steps=4, save_every_n_steps=2)
    with pytest.raises(WangenError, match="the disk is full"):
        train.run(options)
    assert (tmp_path / "lora-step00000002.safetensors").is_file()
    monkeypatch.undo()
    assert train.run(options).result["steps_this_run"] == 2


def test_a_look_at_an_epochs_end_at_which_no_state_was_due_costs_nothing_either(tiny_run, tmp_path, monkeypatch):
    def refused(self: Watching, *_: object) -> bool:
        if self._run.step == 3:
            raise WangenError("the disk is full")
        return True

    monkeypatch.setattr(Watching, "look", refused)
    monkeypatch.setattr(saving.Saving, "_state_due", lambda _self: False)
    with pytest.raises(WangenError, match="the disk is full"):
        train.run(tiny_run.options(tmp_path, max_train_steps=6))  # an epoch has three steps
    assert left(tmp_path) == ([], [3])


def test_saving_flags_take_effect_on_a_finished_run(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    report = train.run(replace(options, save_precision="bfloat16", lora_layout=("comfyui", "kohya")))
    assert report.result["done_before"]
    with safe_open(tmp_path / "lora.safetensors", "pt") as file:
        assert file.get_tensor("diffusion_model.blocks.0.self_attn.q.lora_A.weight").dtype == torch.bfloat16
    assert (tmp_path / "lora-kohya.safetensors").is_file()


def test_an_epoch_is_as_long_as_its_steps_where_the_last_loras_are_kept(tmp_path):
    """Of two batches each."""
    names = ["lora-000001", "lora-000002", "lora-000003", "lora-step00000003", "lora-step00000005", "lora-step00000007"]
    for name in names:
        (tmp_path / f"{name}.safetensors").write_bytes(b"x")
    options = Train(output_dir=tmp_path, output_name="lora", save_every_n_steps=1, save_every_n_epochs=1, keep_last=2)
    plan = SimpleNamespace(options=options, experts=[SimpleNamespace(suffix="")], steps_per_epoch=2,
                           batches_per_epoch=4)  # fmt: skip
    saving.drop_old_loras(plan, 6)
    kept = sorted(path.stem for path in tmp_path.iterdir())
    assert kept == ["lora-000003", "lora-step00000005", "lora-step00000007"], "the last is an earlier run's"


def test_limits_on_saved_loras_touch_no_other_file(tiny_run, tmp_path):
    mine = ["lora-step00000001-best.safetensors", "lora-000001 best.safetensors", "other-step00000001.safetensors"]
    for name in mine:
        (tmp_path / name).write_bytes(b"mine")
    train.run(tiny_run.options(tmp_path, max_train_steps=5, save_every_n_steps=1, save_last_n_steps=1))
    assert all((tmp_path / name).read_bytes() == b"mine" for name in mine)
    assert not (tmp_path / "lora-step00000002.safetensors").exists()


def test_epochs_and_steps_are_both_saved_when_both_are_asked_for(tiny_run, tmp_path):
    train.run(tiny_run.options(tmp_path, max_train_steps=7, save_every_n_steps=3, save_every_n_epochs=1))
    names = {path.name for path in tmp_path.glob("lora-*.safetensors")}
    assert names == {f"lora-{name}.safetensors" for name in ("step00000003", "step00000006", "000001", "000002")}


def test_the_state_that_resume_names_is_never_removed(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=3)
    train.run(options)
    given = replace(options, max_train_steps=5, resume=state_folder(options) / "step-00000003")
    for _ in range(2):
        assert train.run(given).counts["steps"] == 5
    assert (state_folder(options) / "step-00000003/state.json").is_file()


def test_a_state_cut_short_while_it_is_replaced_leaves_its_predecessor(tiny_run, tmp_path, monkeypatch):
    options = tiny_run.options(tmp_path, max_train_steps=3)
    train.run(options)
    folder = state_folder(options)
    state = checkpoint.read(checkpoint.newest(folder))
    monkeypatch.setattr(checkpoint, "sync_folder", lambda _folder: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(folder, state)
    assert checkpoint.read(checkpoint.newest(folder)).step == 3
    (folder / "step-00000009").mkdir()
    for text in ("{}", "[]", '{"files": 3}', "nonsense"):
        (folder / "step-00000009/state.json").write_text(text)
        assert checkpoint.newest(folder).name == "step-00000003"
    with (folder / "step-00000003/adapter.safetensors").open("ab") as file:
        file.write(b"x")
    assert checkpoint.newest(folder) is None, "of another size than it was saved with"


def test_a_state_saved_once_more_stays_kept_and_takes_away_what_a_kill_left(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=4, save_every_n_steps=2, save_state=True)
    train.run(options)
    folder = state_folder(options)
    left = folder / f".newest-{machine()}{2**31 - 1:08x}01234567.tmp"  # of a process that is no more
    left.write_text("step-")
    checkpoint.save(folder, checkpoint.read(folder / "step-00000002"))
    assert not left.exists()
    assert json.loads((folder / "step-00000002/state.json").read_text())["keep"]
    aside = (folder / "step-00000002").rename(folder / "step-00000002-old")  # a kill between the two renames
    checkpoint.save(folder, checkpoint.read(aside))
    assert json.loads((folder / "step-00000002/state.json").read_text())["keep"]


def state_at(step):
    """A small state of so many steps."""
    return checkpoint.TrainingState({"": checkpoint.ExpertState(step, {"a": torch.zeros(1)}, {}, {}, {})}, {}, {})


def test_a_state_is_the_newest_only_once_it_has_its_name(tmp_path, monkeypatch):
    """Beside one of more steps that another line has left to be kept."""
    checkpoint.save(tmp_path, state_at(9), keep=True)
    before = checkpoint.save(tmp_path, state_at(2))
    (tmp_path / ".staging-00000007").mkdir()  # of a kill: its room is needed now

    def full(*_paths: Path, long: bool) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(checkpoint, "replace", full)
    with pytest.raises(WangenError, match="cannot save the training state"):
        checkpoint.save(tmp_path, state_at(3))
    assert checkpoint.newest(tmp_path) == before
    assert not list(tmp_path.glob(".staging-*"))


def test_a_state_that_a_scanner_reads_waits_half_a_minute_for_its_name(tmp_path, monkeypatch):
    """Where the files in a folder are open, Windows does not rename it."""
    waited, read_for_s = [], 20.0
    real = Path.replace

    def refusing(path: Path, target: Path) -> Path:
        if path.is_dir() and sum(waited) < read_for_s:
            raise PermissionError(errno.EACCES, "Access is denied")
        return real(path, target)

    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr(Path, "replace", refusing)
    saved = checkpoint.save(tmp_path, state_at(3))
    assert checkpoint.newest(tmp_path) == saved
    waited.clear()
    read_for_s = 99.0
    with pytest.raises(WangenError, match="Access is denied"):
        checkpoint.save(tmp_path, state_at(4))
    assert sum(waited) == pytest.approx(31.05)
    assert checkpoint.newest(tmp_path) == saved


def test_of_a_state_and_the_one_that_it_took_the_place_of_the_later_counts(tmp_path):
    """A kill came before the old one was removed."""
    for step in range(1, 7):
        state = checkpoint.save(tmp_path, state_at(step))
        state.with_name(f"{state.name}-old").mkdir()
        for path in state.iterdir():
            (tmp_path / f"{state.name}-old" / path.name).write_bytes(path.read_bytes())
        assert checkpoint.newest(tmp_path) == state


def test_half_a_file_of_a_killed_run_goes_when_the_next_begins(tiny_run, tmp_path):
    dead, living = (f"-{machine()}{number:08x}01234567.tmp" for number in (2**31 - 1, os.getpid()))
    names = [f".x-step00000001.safetensors{dead}", f".metrics.jsonl{dead}", f".x.safetensors{living}", ".mine.tmp"]
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    train.run(tiny_run.options(tmp_path, max_train_steps=1))
    assert [(tmp_path / name).exists() for name in names] == [False, False, True, True]


@pytest.mark.parametrize("part", ["adapter", "optimizer"])
def test_a_byte_that_changed_in_a_state_is_named_with_the_way_on(tiny_run, tmp_path, part):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    damaged = state_folder(options) / f"step-00000002/{part}.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-7] + bytes([whole[-7] ^ 1]) + whole[-6:])
    words = rf"the training state is damaged \({part}.safetensors has other bytes than were saved\)"
    with pytest.raises(WangenError, match=words) as error:
        train.run(replace(options, max_train_steps=3))
    assert "remove this folder" in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["experts"][""].update(step=3),
        lambda manifest: manifest["facts"].update(first_loss=0.5),
        lambda manifest: manifest["fingerprint"].update(seed="7"),
        lambda manifest: manifest["checksums"].update({"adapter.safetensors": 1}),
    ],
)
def test_a_state_that_says_something_else_than_was_written_is_none(tiny_run, tmp_path, caplog, change):
    options = tiny_run.options(tmp_path, max_train_steps=4, save_every_n_steps=2, save_state=True)
    train.run(options)
    folder = state_folder(options)
    file = folder / "step-00000004" / "state.json"
    text = file.read_text()
    manifest = json.loads(text)
    change(manifest)
    file.write_text(json.dumps(manifest, indent=1, sort_keys=True))
    assert checkpoint.newest(folder).name == "step-00000002"
    with caplog.at_level("WARNING", "wangen"):
        checkpoint.require_own_format(folder)
    assert "step-00000004 is damaged or of another version: going on from step-00000002" in caplog.text
    file.write_text(json.dumps(json.loads(text)))
    assert checkpoint.newest(folder).name == "step-00000004", "other blanks, the same words"


def test_a_state_of_an_earlier_version_has_no_checksums(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    state = state_folder(options) / "step-00000002"
    manifest = json.loads((state / "state.json").read_text())
    del manifest["checksums"], manifest["in_parts"]
    (state / "state.json").write_text(json.dumps(manifest))
    assert checkpoint.read(state).step == 2
    damaged = state / "adapter.safetensors"
    damaged.write_bytes(b"\xff" * 200 + damaged.read_bytes()[200:])
    with pytest.raises(WangenError, match="the training state is damaged") as error:
        train.run(replace(options, max_train_steps=3))
    assert "remove this folder" in str(error.value)


def test_averages_of_shorter_epochs_are_set_aside_by_the_steps_of_the_run(tmp_path):
    def written(name, **told):
        usual = {"wangen.steps_per_epoch": "2", "ss_num_batches_per_epoch": "3", "ss_steps": "1"}
        given = {f"wangen.{key}": text for key, text in told.items()}
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors", usual | given)

    plan = SimpleNamespace(
        options=SimpleNamespace(output_dir=tmp_path, output_name="cats", fresh=False), steps_per_epoch=3,
        experts=[SimpleNamespace(suffix="_low_noise")], file=lambda _expert: tmp_path / "cats_low_noise.safetensors",
    )  # fmt: skip
    for layout in ("", "-kohya"):
        written(f"cats_low_noise-000001-ema{layout}", run_steps="4")
    written("cats_low_noise-000002-ema", run_steps="4", steps_per_epoch="3")
    written("cats_low_noise-kept-step00000004-ema-kohya")  # of an earlier time, in one layout
    set_other_epochs_aside(plan)
    assert sorted(path.stem.removeprefix("cats_low_noise-") for path in tmp_path.iterdir()) == [
        "000002-ema", "kept-step00000004-ema-kohya", "kept2-step00000004-ema", "kept2-step00000004-ema-kohya",
    ]  # fmt: skip
    written("cats_low_noise-000003", run_steps="6")
    plan.options.fresh = True
    set_other_epochs_aside(plan)
    assert (tmp_path / "cats_low_noise-000003.safetensors").is_file(), "--fresh writes over it"


def test_what_a_kill_left_unwritten_of_one_expert_is_missed_where_the_state_is_its_own(tmp_path):
    plan = SimpleNamespace(options=SimpleNamespace(save_every_n_steps=2, save_every_n_epochs=None), steps_per_epoch=9,
                           file=lambda expert, suffix: tmp_path / f"{expert}{suffix}")  # fmt: skip
    trainees = [SimpleNamespace(plan=name) for name in ("high", "low")]
    run = SimpleNamespace(plan=plan, step=4, saved_step=4, num_steps=9, facts={}, trainees=trainees, ranks=Ranks())
    found = []
    for name in ("high", "low"):
        found.append(saving.Saving(run).missed())
        (tmp_path / f"{name}-step00000004").touch()
    assert [*found, saving.Saving(run).missed()] == [True, True, False]
    run.step = 6
    assert not saving.Saving(run).missed(), "the state of it lies elsewhere"


def test_kept_states_of_later_steps_push_none_of_this_line_out(tmp_path):
    options = Train(output_dir=tmp_path, output_name="lora", save_every_n_steps=2, keep_last=2, save_state=True)
    plan = SimpleNamespace(options=options, steps_per_epoch=9)
    assert saving._staying(plan, 6, [2, 3, 4, 6, 8, 10]) == {3, 4, 6, 8, 10}, "nor does one of other flags go"
