"""A line that is run again, or that goes on from a state where another did: what it takes up, and what it says."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import digest, write_tree
from train_cases import PowerCutError, cut_off

from wangen import profiles
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.headers import read_header
from wangen.generator.steps import Train
from wangen.runtime import train
from wangen.runtime.evaluation.trained import seen_sources
from wangen.runtime.loader import find_entries
from wangen.runtime.report.run_files import read_run
from wangen.runtime.report.verdict import judge
from wangen.runtime.samples import read_samples
from wangen.runtime.training import checkpoint, prepared, saving
from wangen.runtime.training.checkpoint import ExpertState, TrainingState
from wangen.runtime.training.facts import BEFORE, BEST_SO_FAR, VALIDATION, VALIDATION_BASE
from wangen.runtime.training.resuming import changed_settings, compared, not_looked_at


def fail(*_words, **_names):
    raise PowerCutError


MODEL = profiles.model("t2v-1.3B")
TIMES = {"steps_this_run": 2, "seconds_training": 1.0}


def test_resuming_from_a_folder_with_other_settings_begins_there(tiny_run, tmp_path, caplog):
    options = tiny_run.options(tmp_path, max_train_steps=4, save_every_n_steps=2, save_state=True)
    train.run(options)
    state = tmp_path / "lora-state" / "step-00000002"
    again = replace(options, resume=state)
    assert train.run(again).result["steps_this_run"] == 2
    other = replace(again, learning_rate=2e-3, resume_changed=True)
    assert train.run(other).result["steps_this_run"] == 2, "not nothing, where the line before ended"
    assert train.run(replace(other, max_train_steps=5)).result["steps_this_run"] == 1, "and then where it ended"
    train.run(replace(again, max_train_steps=2, learning_rate=3e-3, resume_changed=True))
    assert "or start again with --fresh in place of --resume" in caplog.text


def begun_again(options: Train, step: int, num_steps: int) -> Train:
    """The flags of a line that began at a kept state of another one, and was trained to its end."""
    train.run(options)
    again = replace(options, resume=options.output_dir / "lora-state" / f"step-{step:08d}", max_train_steps=num_steps)
    train.run(again)
    return again


def states_of(folder: Path) -> list[int]:
    """The steps of the states of a run."""
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "lora-state").glob("step-*"))


def test_what_was_saved_last_counts_and_not_a_kept_state_of_another_line(tiny_run, tmp_path, caplog):
    again = begun_again(tiny_run.options(tmp_path, max_train_steps=6, save_every_n_steps=2, save_state=True), 2, 3)
    written = (tmp_path / "lora.safetensors").read_bytes()
    report = train.run(replace(again, resume=None))
    assert (report.result["done_before"], report.counts["steps"]) == (True, 3)
    assert (tmp_path / "lora.safetensors").read_bytes() == written
    assert "damaged" not in caplog.text
    (tmp_path / "lora-state" / checkpoint.NEWEST).unlink()  # as of states of earlier versions
    assert train.run(replace(again, resume=None, max_train_steps=4)).counts["steps"] == 4
    assert checkpoint.newest(tmp_path / "lora-state").name == "step-00000004"


def test_a_line_that_is_run_again_at_its_end_says_what_it_does_not_make(tiny_run, tmp_path, caplog):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    speed = train.run(options).result["speed"]
    again = train.run(options)
    assert (again.result["done_before"], caplog.text) == (True, "")
    told = {"inputs": {"memory": again.inputs["memory"]}, "result": {**TIMES, "speed": speed}}
    (tmp_path / "train.report.json").write_text(json.dumps(told))
    assert train.run(options).result["speed"] == speed
    assert "speed" not in train.run(replace(options, checkpointing="selective")).result, "it was measured without"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red square --w 64 --h 64 --f 1 --s 2\n")
    weights = {"vae": tiny_run.weights["vae"], "t5": tiny_run.weights["t5"]}
    train.run(replace(options, sample_prompts=prompts, **weights, validation_config=tiny_run.dataset_config))
    assert "came to its end without a validation: wangen evaluate makes one" in caplog.text
    assert "came to its end without samples: wangen generate --prompt_file makes them" in caplog.text


def test_samples_of_a_run_with_brackets_in_its_name_are_found(tmp_path):
    name = "cats[v2]"
    write_tree(tmp_path, {f"samples/{name}-step00000010-1.png": ""})
    options = SimpleNamespace(output_dir=tmp_path, sample_prompts=tmp_path / "prompts.txt")
    plan = SimpleNamespace(held_out=[], options=options, name=name)
    assert not_looked_at(plan, SimpleNamespace(facts={}, step=10)) == []


def test_an_interrupted_run_with_other_settings_and_fewer_steps_is_no_run_that_ended(tiny_run, tmp_path, caplog):
    options = tiny_run.options(tmp_path, max_train_steps=9, save_state_every_n_steps=2)
    cut_off(options, 4)
    fewer = replace(options, max_train_steps=3, learning_rate=2e-3, resume_changed=True)
    with pytest.raises(UsageError, match=r"stands at step 4, .* and 3 are wanted; its LoRA is not there"):
        train.run(fewer)
    assert train.run(replace(options, max_train_steps=3)).result["done_before"]
    assert (tmp_path / "lora.safetensors").is_file()
    assert train.run(fewer).result["done_before"], "now it is there"


@pytest.mark.parametrize("name", ["lora", "cats-240901", "cats-best"])
def test_the_average_of_an_earlier_end_is_none_of_the_last(tiny_run, tmp_path, caplog, name):
    options = tiny_run.options(tmp_path, max_train_steps=2, ema_decay=0.9, lora_layout=("comfyui", "kohya"))
    options = replace(options, output_name=name)
    train.run(options)
    average = (tmp_path / f"{name}-ema.safetensors").read_bytes()
    last = replace(options, max_train_steps=3, ema_decay=None, lora_layout=("comfyui",), resume_changed=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "save_loras", fail)
        with pytest.raises(PowerCutError):
            train.run(last)  # at its end, before what it writes
    assert train.run(last).result["done_before"]
    names = sorted(path.name for path in tmp_path.glob("*-ema*"))
    assert names == [f"{name}-kept-step00000002-ema{layout}.safetensors" for layout in ("-kohya", "")]
    assert (tmp_path / names[1]).read_bytes() == average
    assert f"{name}-ema.safetensors is the average of an earlier end of the run: it is {name}-kept" in caplog.text


def test_the_finished_lora_of_an_earlier_end_by_other_settings_is_kept(tiny_run, tmp_path, caplog):
    options = tiny_run.options(tmp_path, max_train_steps=2, lr_scheduler="linear", lora_layout=("comfyui", "kohya"))
    train.run(options)
    finished = {layout: (tmp_path / f"lora{layout}.safetensors").read_bytes() for layout in ("", "-kohya")}
    more = replace(options, max_train_steps=3, resume_changed=True)
    for _ in range(2):  # the second start finds the state of its own settings
        train.run(more)
        kept = {path.name: path.read_bytes() for path in tmp_path.glob("lora-kept*")}
        assert kept == {f"lora-kept-step00000002{layout}.safetensors": data for layout, data in finished.items()}
    assert read_header(tmp_path / "lora.safetensors").metadata["ss_steps"] == "3"
    assert "lora.safetensors is of an earlier end of the run, by other settings: it is lora-kept-step" in caplog.text
    train.run(replace(more, max_train_steps=4, resume_changed=False, lr_scheduler="constant", fresh=True))
    assert len(list(tmp_path.glob("lora-kept*"))) == 2, "--fresh keeps nothing of what it begins anew"


def test_another_adapter_is_no_change_that_a_state_can_go_on_with(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=1)
    train.run(options)
    for changes, ways in (
        ({"network_dim": 8}, False), ({"network_args": ("use_dora=true",)}, False),
        ({"network_args": ("exclude_patterns=['attn2']",)}, False),
        ({"network_args": ("loraplus_lr_ratio=4",)}, True), ({"learning_rate": 2e-3}, True),
    ):  # fmt: skip
        with pytest.raises(UsageError) as error:
            train.run(replace(options, max_train_steps=2, **changes))
        assert "starts again from step 0" in error.value.cure
        assert ("--resume_changed" in error.value.cure) is ways


@pytest.mark.slow
def test_loras_of_shorter_epochs_are_not_written_over(tiny_run, tmp_path, caplog):
    options = tiny_run.options(tmp_path, max_train_epochs=3, save_every_n_epochs=1, gradient_accumulation_steps=2)
    train.run(options)
    ends = [(tmp_path / f"lora{end}.safetensors").read_bytes() for end in ("-000001", "-000002", "")]
    longer = replace(options, max_train_epochs=5, gradient_accumulation_steps=1, resume_changed=True)
    before = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "load_trainee", fail)
        with pytest.raises(PowerCutError):
            train.run(longer)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == before, "nothing is renamed before it trains"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "save_state", fail)
        with pytest.raises(PowerCutError):
            train.run(longer)  # with the first LoRA of a new epoch, before its state
    train.run(replace(longer, keep_last=1, save_every_n_steps=4, save_last_n_steps=1))
    assert "is named by an epoch of 2, and an epoch has 3 steps now: it is lora-kept-step0" in caplog.text
    names = sorted(path.name for path in tmp_path.glob("lora-*.safetensors"))
    kept = [name for name in names if "kept" in name]
    assert kept == [f"lora-kept-step0000000{step}.safetensors" for step in (2, 4, 6)]
    assert [(tmp_path / name).read_bytes() for name in kept] == ends
    assert [name for name in names if name not in kept] == ["lora-000004.safetensors", "lora-step00000012.safetensors"]
    caplog.clear()
    train.run(replace(longer, max_train_epochs=6))
    assert "is named by an epoch" not in caplog.text


def test_a_run_whose_states_are_gone_says_what_it_writes_over(tiny_run, tmp_path, caplog):
    options = tiny_run.options(tmp_path, max_train_steps=1)
    train.run(options)
    shutil.rmtree(tmp_path / "lora-state")
    train.run(replace(options, fresh=True))
    assert "no training state" not in caplog.text
    shutil.rmtree(tmp_path / "lora-state")
    train.run(options)
    assert "beginning at step 0, and lora.safetensors of an earlier run will be written over" in caplog.text
    shutil.rmtree(tmp_path / "lora-state")
    (tmp_path / "lora.safetensors").rename(tmp_path / "lora-step00000004.safetensors")  # of a run that was killed
    train.run(options)
    assert "and lora-step00000004.safetensors of an earlier run will be written over" in caplog.text


def test_what_cannot_be_read_costs_no_step_that_was_trained(tiny_run, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "wangen")
    options = tiny_run.options(tmp_path, max_train_steps=5, max_data_loader_n_workers=0)
    train.run(replace(options, output_dir=tmp_path / "whole"))
    reads, read = [], prepared.read_batch

    def gone_at_fifth(*arguments):
        reads.append(None)
        if len(reads) == 5:
            raise WangenError("the network drive is gone")
        return read(*arguments)

    monkeypatch.setattr(prepared, "read_batch", gone_at_fifth)
    with pytest.raises(WangenError, match="the network drive is gone"):
        train.run(options)
    assert states_of(tmp_path) == [4]
    assert "the training state of step 4 is saved" in caplog.text
    assert train.run(options).result["steps_this_run"] == 1
    assert digest(tmp_path / "lora.safetensors") == digest(tmp_path / "whole" / "lora.safetensors")


def test_a_best_that_was_taken_away_is_told_at_the_end(tiny_run, tmp_path, monkeypatch, caplog):
    options = tiny_run.options(tmp_path, max_train_steps=2, validation_items=1, validate_every_n_steps=1,
                               keep_best=True)  # fmt: skip
    validate, best = train.Watching._validate, tmp_path / "lora-best.safetensors"

    def taken(self, number):
        validate(self, number)
        best.unlink(missing_ok=True)

    train.run(options)
    assert best.is_file()
    assert "is not there any more" not in caplog.text
    monkeypatch.setattr(train.Watching, "_validate", taken)
    train.run(replace(options, fresh=True))
    assert "lora-best.safetensors, the best so far, saved at step" in caplog.text


def test_a_damaged_state_that_was_saved_last_is_named_whatever_its_step(tiny_run, tmp_path, caplog):
    """As of a run that began again at an earlier step, of which the line before had more."""
    again = begun_again(tiny_run.options(tmp_path, max_train_steps=8, save_every_n_steps=2, save_state=True), 2, 5)
    last = tmp_path / "lora-state" / "step-00000005"
    (last / "adapter.safetensors").write_bytes(b"cut")
    train.run(replace(again, max_train_steps=6))
    assert f"{last} is damaged or of another version: going on from step-0000000" in caplog.text


@pytest.mark.slow
def test_kept_states_go_with_their_loras(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=9, save_every_n_steps=2, keep_last=2, save_state=True)
    train.run(options)
    assert states_of(tmp_path) == [6, 8, 9]
    assert len(list(tmp_path.glob("lora-step*.safetensors"))) == 2
    begun_again(options, 6, 7)
    assert states_of(tmp_path) == [6, 7, 8], "one of a later step neither counts nor goes"
    own = replace(options, output_dir=tmp_path / "own", save_last_n_steps_state=4)
    train.run(own)
    assert states_of(tmp_path / "own") == [4, 6, 8, 9]


@pytest.mark.slow
def test_what_is_held_out_in_the_middle_of_a_run_may_have_been_trained_on(tiny_run, tmp_path, caplog):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    train.run(replace(options, max_train_steps=3, resume_changed=True, validation_items=1))
    assert "what is held out now may have been trained on before" in caplog.text
    caplog.clear()
    last = replace(options, max_train_steps=4, validation_items=1)
    train.run(last)
    assert "what is held out now may have been trained on before" in caplog.text, "still, at each start"
    lora = tmp_path / "lora.safetensors"
    (told,) = json.loads(read_header(lora).metadata["wangen.trained_before"])
    assert told["validation_items"] == "0"
    items = find_entries(last, MODEL, read_samples(last, MODEL))
    everything = {item.sample.source.digest for item in items}
    assert seen_sources([lora], items, items, last, MODEL).surely == everything, "also what the last part held out"
    against = judge(read_run(tmp_path, None)).against
    assert any("may have been trained on: an earlier part" in line for line in against)

    caplog.clear()
    train.run(replace(last, output_dir=tmp_path / "from", network_weights=lora))
    assert "may have been trained on before, in an earlier part of the run or by the LoRA" in caplog.text
    started = tmp_path / "from" / "lora.safetensors"
    assert json.loads(read_header(started).metadata["wangen.trained_before"]) == [told]
    again = started.read_bytes()
    assert train.run(replace(last, output_dir=tmp_path / "from", network_weights=lora)).result["done_before"]
    assert started.read_bytes() == again


def test_a_validation_whose_base_was_forgotten_is_none(tmp_path):
    options = SimpleNamespace(keep_best=True, output_dir=tmp_path, sample_prompts=None)
    plan = SimpleNamespace(held_out=["a"], options=options, name="cats")
    (line,) = not_looked_at(plan, SimpleNamespace(facts={VALIDATION_BASE: {}}, step=3))
    assert line.endswith("wangen evaluate makes one, and there is no best of it")
    assert not_looked_at(plan, SimpleNamespace(facts={VALIDATION: {}}, step=3)) == []


@pytest.mark.parametrize("change", ["dataset", "validation_items", "dit", "base_weights", "quantize", "seed"])
def test_what_another_part_was_trained_on_and_judged_by_is_told_of_all_parts(change):
    """Of each part once, and not of the data that there is now; of another base no loss counts any more."""
    same = {"validation_items": "0", "seed": "42", "caption_dropout": "0.0"}
    first, second, now = ({"dataset": digits, **same} for digits in "abc")
    state = TrainingState({"": ExpertState(3, {}, {}, {}, {})}, second,
                          {BEFORE: [first, now], VALIDATION_BASE: {"": 1}, BEST_SO_FAR: {"": 2}})  # fmt: skip
    plan = SimpleNamespace(experts=[SimpleNamespace(name="")], options=SimpleNamespace(resume_changed=True),
                           fingerprint=now)  # fmt: skip
    facts = compared(plan, state, {change: "1 -> 2"}, 1).facts
    assert facts[BEFORE] == ([first, second] if change in ("dataset", "validation_items") else [first, now])
    is_other_base = change in ("dit", "base_weights", "quantize")
    assert (facts[VALIDATION_BASE], facts[BEST_SO_FAR]) == (({}, {}) if is_other_base else ({"": 1}, {"": 2}))


@pytest.mark.parametrize(
    ("kind", "words", "same"),
    [("lokr", "factor=8", False), ("lokr", "decompose_both=true", False), ("lora", "use_dora=true", False),
     ("lora", "include_patterns=attn1", False), ("lora", "exclude_patterns=attn1", False),
     ("loha", "rank_dropout=0.1", True), ("lokr", "module_dropout=0.1", True)],
)  # fmt: skip
def test_arguments_of_an_adapter_that_train_other_weights_leave_no_way_on(kind, words, same):
    options = Train(output_dir=Path("o"), output_name="n", network_module=kind, network_args=(words,))
    plan = SimpleNamespace(experts=[SimpleNamespace(name="")], options=options, states=Path("s"), fingerprint={},
                           num_left=lambda _done: True)  # fmt: skip
    state = TrainingState({"": ExpertState(3, {}, {}, {}, {})}, {"network_args": "()"}, {})
    with pytest.raises(UsageError) as error:
        compared(plan, state, {"network_args": "another"}, 1)
    assert ("--resume_changed goes on with the new" in error.value.cure) == same


def test_layers_that_are_spared_from_what_is_left_out_leave_no_way_on():
    words = ("exclude_patterns=attn", "include_patterns=attn1")
    options = Train(output_dir=Path("o"), output_name="n", network_args=words)
    plan = SimpleNamespace(experts=[SimpleNamespace(name="")], options=options, states=Path("s"), fingerprint={},
                           num_left=lambda _done: True)  # fmt: skip
    state = TrainingState({"": ExpertState(3, {}, {}, {}, {})}, {"network_args": str(words[:1])}, {})
    with pytest.raises(UsageError) as error:
        compared(plan, state, {"network_args": "another"}, 1)
    assert "--resume_changed" not in error.value.cure


@pytest.mark.parametrize(("processes", "advice"), [
    (2, "--gradient_accumulation_steps 2 with 2 processes makes steps of 4 batches, as before"),
    (3, "start as many processes as before, or a number that divides the 4 batches of its steps"),
])  # fmt: skip
def test_other_processes_are_told_how_they_make_the_same_steps_if_they_can(processes, advice):
    options = Train(output_dir=Path("o"), output_name="n")
    plan = SimpleNamespace(experts=[SimpleNamespace(name="")], options=options, states=Path("s"), fingerprint={},
                           num_left=lambda _done: True)  # fmt: skip
    state = TrainingState({"": ExpertState(3, {}, {}, {}, {})}, {"gradient_accumulation_steps": "4"}, {})
    with pytest.raises(UsageError) as error:
        compared(plan, state, {"gradient_accumulation_steps": "4 -> 3"}, processes)
    assert advice in error.value.cure
    assert ("makes steps of 4 batches, as before" in error.value.cure) == (processes == 2)


def test_a_flag_that_the_version_of_a_state_did_not_have_was_at_its_default():
    for offset, changed in (("0.0", {}), ("0.1", {"noise_offset": "0.0 -> 0.1"})):
        plan = SimpleNamespace(experts=(), options=Train(output_dir=Path("o"), output_name="n"),
                               fingerprint={"dataset": "a", "noise_offset": offset})  # fmt: skip
        assert changed_settings(plan, TrainingState({}, {"dataset": "a"}, {})) == changed


def test_what_is_written_of_a_finished_state_says_the_steps_of_each_expert_and_of_the_run(monkeypatch):
    written: list[object] = []
    monkeypatch.setattr(
        saving, "save_lora", lambda _plan, expert, *told, **how: written.append((expert.name, *told, *how)) or []
    )
    monkeypatch.setattr(saving, "set_old_average_aside", lambda _plan, expert: written.append(expert.name))
    experts = {"high_noise": ExpertState(2, {}, {}, {}, {"a": 1}), "low_noise": ExpertState(3, {}, {}, {}, {})}
    plan = SimpleNamespace(experts=[SimpleNamespace(name=name) for name in experts])
    saving.save_state_as_loras(plan, TrainingState(experts, {}, {}))
    assert written == [("high_noise", {}, (2, 5)), ("high_noise", {"a": 1}, (2, 5), "-ema", "averaged"),
                       ("low_noise", {}, (3, 5)), "low_noise"]  # fmt: skip
