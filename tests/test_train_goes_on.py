"""What a run finds from before: other flags, another run's files, a half-written state, an end that was cut short."""

import gc
import json
import logging
import os
import re
import signal
import weakref
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from runs import make_run
from runs import options_of as run_options
from safetensors.torch import load_file, save_file
from tiny import TinyRun
from train_cases import at_step, measured, note_saves

from wangen.generator.steps import Train
from wangen.runtime import train
from wangen.runtime.lora_folder import saved_loras
from wangen.runtime.models.compute import Compute
from wangen.runtime.models.wan import velocity_model
from wangen.runtime.report.run_files import read_run
from wangen.runtime.training import checkpoint, saving
from wangen.runtime.training.saving import save_loras

pytest_plugins = ("optimizer_fixtures",)

TRUTH = {"validation_items": 1, "validation_timesteps": 2}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def validations(options: Train) -> list[dict]:
    lines = (options.output_dir / "metrics.jsonl").read_text().splitlines()
    return [line["validation"] for line in map(json.loads, lines) if "validation" in line]


def test_averages_that_are_asked_for_later_begin_at_the_weights_as_they_are(tiny_run, tmp_path, caplog):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    later = replace(options, max_train_steps=3, ema_decay=0.9, resume_changed=True, save_every_n_steps=2)
    train.run(later)
    stems = ["lora-ema", "lora-kept-step00000002", "lora"]
    assert names(tmp_path) == [f"{stem}.safetensors" for stem in stems], "what the second step left was of others"
    assert "no averages were kept so far: they begin now" in caplog.text
    weights, averages = (load_file(tmp_path / f"{name}.safetensors") for name in ("lora", "lora-ema"))
    assert all(torch.equal(averages[key], value) for key, value in weights.items()), "the first update copies"
    train.run(replace(options, max_train_steps=4, resume_changed=True))
    assert checkpoint.read(checkpoint.newest(tmp_path / "lora-state")).experts[""].ema == {}


def test_averages_that_began_later_go_on_with_their_own_count(tiny_run, tmp_path):
    averages = []
    for folder, ends in (("cut", (3, 5)), ("whole", (5,))):
        options = tiny_run.options(tmp_path / folder, max_train_steps=2)
        train.run(options)
        for end in ends:
            train.run(replace(options, max_train_steps=end, ema_decay=0.9, resume_changed=True))
        averages.append(load_file(tmp_path / folder / "lora-ema.safetensors"))
    assert all(torch.equal(averages[1][name], value) for name, value in averages[0].items())


def test_the_first_step_of_a_run_is_in_its_averages(tiny_run, tmp_path):
    train.run(tiny_run.options(tmp_path, max_train_steps=1, ema_decay=0.9))
    weights, averages = (load_file(tmp_path / f"{name}.safetensors") for name in ("lora", "lora-ema"))
    assert all(torch.equal(averages[name], value) for name, value in weights.items())


def test_an_optimizer_that_keeps_more_with_other_arguments_begins_its_averages_anew(tiny_run, tmp_path, caplog):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    changed = replace(options, max_train_steps=4, resume_changed=True)
    train.run(replace(changed, optimizer_args=("weight_decay=0.02",)))
    assert "anew" not in caplog.text
    train.run(replace(changed, max_train_steps=6, optimizer_args=("amsgrad=True",)))
    assert "torch.AdamW keeps more with other --optimizer_args: its averages start anew" in caplog.text
    assert (tmp_path / "lora.safetensors").is_file()


def test_a_schedule_free_run_that_ended_before_its_lora_was_written_writes_it_the_next_time(
    tiny_run, tmp_path, dotted: ModuleType, monkeypatch
):
    whole = tiny_run.options(tmp_path / "whole", max_train_steps=3, optimizer_type="others.ScheduleFree")
    train.run(whole)
    written = (tmp_path / "whole" / "lora.safetensors").read_bytes()
    cut = replace(whole, output_dir=tmp_path / "cut")
    with monkeypatch.context() as patch:
        patch.setattr(train, "save_loras", lambda _run: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train.run(cut)
    assert names(tmp_path / "cut") == []
    assert train.run(cut).result["done_before"]
    for folder in ("cut", "whole"):  # a second time finds it and leaves it
        train.run(replace(whole, output_dir=tmp_path / folder))
    one, other = (tmp_path / folder / "lora.safetensors" for folder in ("whole", "cut"))
    assert one.read_bytes() == other.read_bytes() == written


def test_the_averages_of_a_schedule_free_run_are_judged_as_they_are_saved(tiny_run, tmp_path, dotted: ModuleType):
    """Its own way to the weights to evaluate is for its own weights alone."""
    options = tiny_run.options(
        tmp_path, max_train_steps=3, optimizer_type="others.ScheduleFree", ema_decay=0.9, learning_rate=0.3, **TRUTH
    )
    train.run(options)
    seen = validations(options)[-1]
    start = tmp_path / "lora-ema.safetensors"
    judged = tiny_run.options(
        tmp_path / "again", max_train_steps=1, learning_rate=1e-12, network_weights=start, **TRUTH
    )
    train.run(replace(judged, validate_every_n_steps=1))
    assert validations(judged)[-1]["mean_adapter"] == pytest.approx(seen["mean_ema"], rel=1e-6)
    assert seen["mean_ema"] != pytest.approx(seen["mean_adapter"], rel=1e-5)


def test_the_best_of_a_schedule_free_run_is_judged_as_it_is_saved(tiny_run, tmp_path, dotted: ModuleType):
    options = tiny_run.options(
        tmp_path, max_train_steps=3, optimizer_type="others.ScheduleFree", learning_rate=0.3, keep_best=True, **TRUTH
    )
    best = train.run(replace(options, validate_every_n_steps=3)).result["best"][""]
    last, start = (tmp_path / f"{name}.safetensors" for name in ("lora", "lora-best"))
    assert all(torch.equal(load_file(last)[name], value) for name, value in load_file(start).items())
    judged = tiny_run.options(tmp_path / "again", max_train_steps=1, network_weights=start, **TRUTH)
    train.run(judged)
    assert validations(judged)[0]["mean_adapter"] == pytest.approx(best["loss"], rel=1e-6)


@pytest.mark.slow
def test_loras_of_an_earlier_run_are_neither_counted_nor_removed_by_a_fresh_one(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=9, save_every_n_steps=1, keep_last=2)
    train.run(options)
    assert names(tmp_path) == ["lora-step00000007.safetensors", "lora-step00000008.safetensors", "lora.safetensors"]
    train.run(replace(options, fresh=True, max_train_steps=5))
    assert names(tmp_path) == [
        *(f"lora-step0000000{step}.safetensors" for step in (3, 4, 7, 8)), "lora.safetensors"
    ]  # fmt: skip


def test_a_state_that_was_left_half_written_is_cleaned_up_whatever_its_step(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    left = tmp_path / "lora-state" / ".staging-00000001"
    left.mkdir(parents=True)
    (left / "adapter.safetensors").write_bytes(b"half")
    train.run(options)
    assert {path.name for path in (tmp_path / "lora-state").iterdir()} == {"step-00000002", checkpoint.NEWEST}


def test_the_base_of_full_fine_tuning_is_what_it_began_with_also_after_a_resume(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=3, train_mode="full", **TRUTH)
    train.run(options)
    more = replace(options, max_train_steps=5, validation_timesteps=3)
    train.run(more)
    fresh = replace(more, output_dir=tmp_path / "fresh", max_train_steps=1)
    train.run(fresh)
    assert validations(more)[-1]["mean_base"] == pytest.approx(validations(fresh)[0]["mean_base"], rel=1e-6)
    assert validations(more)[-1]["mean_adapter"] < validations(more)[-1]["mean_base"]


def test_another_base_is_judged_anew(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=1, **TRUTH)
    train.run(options)
    train.run(replace(options, max_train_steps=2, quantize="nf4", resume_changed=True))
    fresh = replace(options, output_dir=tmp_path / "fresh", quantize="nf4")
    train.run(fresh)
    assert validations(options)[-1]["mean_base"] == validations(fresh)[0]["mean_base"] != validations(options)[0]


def test_the_log_has_the_rates_of_the_optimizer_and_no_time_of_saving(tiny_run, tmp_path, monkeypatch):
    saved_in = note_saves(monkeypatch, saving)
    options = tiny_run.options(
        tmp_path, max_train_steps=3, loraplus_lr_ratio=16.0, scale_weight_norms=1e-6, save_state_every_n_steps=1
    )
    train.run(options)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [(line["lr"], line["lr_loraplus"]) for line in steps] == [(1e-3, 16e-3)] * 3
    assert all(line["keys_scaled"] > 0 for line in steps)
    assert saved_in == [True] * 3
    own = replace(options, output_name="own", optimizer_type="Adafactor", lr_scheduler="adafactor",
                  loraplus_lr_ratio=None)  # fmt: skip
    train.run(own)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["output_name"]: line.get("lr") for line in lines if "loss" in line} == {"lora": 1e-3, "own": None}


def test_the_best_is_chosen_anew_when_it_is_judged_at_other_points(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=2, keep_best=True, validate_every_n_steps=2, **TRUTH)
    train.run(options)
    state = checkpoint.newest(tmp_path / "lora-state")
    facts = json.loads((state / "state.json").read_text())
    facts["facts"]["best"][""]["loss"] = 0.0  # as good as nothing at other points can be
    (state / "state.json").write_text(json.dumps({**facts, "checksums": {}}))
    before = (tmp_path / "lora-best.safetensors").read_bytes()
    report = train.run(replace(options, max_train_steps=4, validation_timesteps=3))
    assert report.result["best"][""]["step"] == 4
    assert (tmp_path / "lora-kept-step00000002.safetensors").read_bytes() == before
    assert (tmp_path / "lora-best.safetensors").read_bytes() != before
    train.run(replace(options, max_train_steps=6, learning_rate=2e-3, mixed_precision="bf16", resume_changed=True))
    assert (tmp_path / "lora-kept2-step00000004.safetensors").is_file(), "the best of another precision"
    found = {one.path.stem: (one.run, one.step) for one in saved_loras(tmp_path)}
    assert found["lora-kept-step00000004"] == ("lora", 4)
    assert {lora.file.stem: lora.step for lora in read_run(tmp_path, None).loras}["lora-kept-step00000004"] == 4
    best = tmp_path / "lora-best.safetensors"
    taken = (tmp_path / "lora-kept-step00000006.safetensors").write_bytes(before)
    last = best.read_bytes()
    train.run(replace(options, max_train_steps=8, resume_changed=True))
    assert taken == (tmp_path / "lora-kept-step00000006.safetensors").stat().st_size
    assert (tmp_path / "lora-kept3-step00000006.safetensors").read_bytes() == last, "where the names were taken"
    assert {lora.file.stem: lora.step for lora in read_run(tmp_path, None).loras}["lora-kept3-step00000006"] == 6


@pytest.mark.parametrize("experts", [False, True])
def test_what_a_run_starts_from_is_judged_and_may_be_its_best(tiny_run, tmp_path, experts):
    options = tiny_run.options(tmp_path / "one", max_train_steps=2, learning_rate=1e-2, **TRUTH)
    train.run(options)
    other = {"task": "t2v-A14B", "dit_high_noise": tmp_path / "high.safetensors", "high_noise_share": 0.5,
             "expert_turn_steps": 1}  # fmt: skip
    high = {name: 0.9 * value.float() for name, value in load_file(tiny_run.weights["dit"]).items()}
    save_file(high, tmp_path / "high.safetensors")
    start = tmp_path / "one" / "lora.safetensors"
    worse = replace(options, output_dir=tmp_path / "two", network_weights=start, learning_rate=10.0,
                    validate_every_n_steps=2, keep_best=True, **other if experts else {})  # fmt: skip
    report = train.run(worse)
    lines = [line for line in measured(tmp_path / "two") if "validation" in line]
    low = [line["validation"] for line in lines if line.get("expert", "low_noise") == "low_noise"]
    assert low[0]["mean_adapter"] != low[0]["mean_base"]
    assert low[0]["mean_adapter"] < low[-1]["mean_adapter"]
    name, file = ("low_noise", "lora_low_noise-best") if experts else ("", "lora-best")
    assert report.result["best"][name] == {"loss": low[0]["mean_adapter"], "step": 0, "file": f"{file}.safetensors"}
    kept, begun = (load_file(path) for path in (tmp_path / "two" / f"{file}.safetensors", start))
    assert all(torch.equal(kept[key], value) for key, value in begun.items())
    if experts:
        assert lines[0]["expert"] == "high_noise"
        assert lines[0]["validation"]["mean_adapter"] == lines[0]["validation"]["mean_base"]


def test_the_end_of_a_run_is_validated_whatever_the_interval(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=3, validate_every_n_steps=2, **TRUTH)
    train.run(options)
    assert [line["step"] for line in measured(tmp_path) if "validation" in line] == [0, 2, 3]


def test_an_adapter_that_has_not_begun_is_never_the_best(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=2, learning_rate=10.0, keep_best=True, **TRUTH)
    report = train.run(replace(options, validate_every_n_steps=2))
    assert [seen["delta"] > 0 for seen in validations(options)] == [False, True], "it only got worse"
    assert report.result["best"][""]["step"] == 2


def test_the_best_of_a_line_that_begins_elsewhere_is_its_own(tiny_run, tmp_path):
    """The file of the line before lies in another folder, or is of what that line did later."""
    options = tiny_run.options(tmp_path / "one", max_train_steps=2, keep_best=True, validate_every_n_steps=2, **TRUTH)
    train.run(options)
    state = checkpoint.newest(tmp_path / "one" / "lora-state")
    facts = json.loads((state / "state.json").read_text())
    facts["facts"]["best"][""]["loss"] = 0.0
    (state / "state.json").write_text(json.dumps({**facts, "checksums": {}}))
    other = replace(options, output_dir=tmp_path / "two", resume=state, max_train_steps=4, save_every_n_steps=2)
    assert train.run(other).result["best"][""]["step"] == 4
    assert names(tmp_path / "two") == ["lora-best.safetensors", "lora.safetensors"]


def test_a_state_to_be_kept_stays_so_when_a_line_from_it_is_stopped_at_once(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=5, save_every_n_steps=2, save_state=True)
    train.run(options)
    state = tmp_path / "lora-state" / "step-00000002"
    manifest = (state / "state.json").read_bytes()
    assert json.loads(manifest)["keep"]
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 0, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(KeyboardInterrupt):
            train.run(replace(options, resume=state))
    assert (state / "state.json").read_bytes() == manifest


@pytest.mark.parametrize(
    "told", [{}, {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "5-0"}]
)
def test_a_fresh_run_goes_on_after_its_job_was_requeued(tiny_run, tmp_path, monkeypatch, told: dict[str, str]):
    for name, value in {"SLURM_JOB_ID": "5", **told}.items():
        monkeypatch.setenv(name, value)
    options = tiny_run.options(tmp_path, max_train_steps=3, fresh=True, save_every_n_steps=2, save_state=True)
    train.run(options)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    if "TORCHELASTIC_RUN_ID" in told:  # the agents of a requeued job meet under another name
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "5-1")
    assert train.run(options).result["done_before"]
    assert train.run(replace(options, max_train_steps=4)).result["steps_this_run"] == 1
    assert (tmp_path / "lora-state" / "step-00000002").is_dir(), "what is kept of it stays"
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    assert not train.run(options).result["done_before"]


def test_all_parameters_are_counted_where_they_are_parked_swapped_or_quantised(tiny_run, tmp_path, caplog):
    caplog.set_level(logging.INFO, "wangen")
    high = {name: 0.9 * value.float() for name, value in load_file(tiny_run.weights["dit"]).items()}
    save_file(high, tmp_path / "high.safetensors")
    experts = {"task": "t2v-A14B", "dit_high_noise": tmp_path / "high.safetensors", "high_noise_share": 0.5}
    changes = ({}, {"blocks_to_swap": 2}, {"quantize": "nf4"}, experts)
    for number, change in enumerate(changes):
        train.run(tiny_run.options(tmp_path / str(number), max_train_steps=2, **change))
    said = re.findall(r"([\d.]+ M of [\d.]+ M) parameters train", caplog.text)
    assert said == ["0.05 M of 2.27 M"] * 5


def test_an_expert_that_comes_back_takes_no_more_memory_than_it_has_weights(tiny_run: TinyRun, tmp_path: Path):
    """Weights that are one product lie side by side in what is brought back, not in another copy of them."""
    options = run_options(tiny_run, tmp_path, task="t2v-A14B", dit_high_noise=tiny_run.weights["dit"], plain=False)
    run = make_run(options)
    trainee = run.activate(0)
    run.activate(1)
    assert sum(storages(trainee.transformer).values()) == 0
    run.activate(0)
    before = storages(trainee.transformer)
    model = velocity_model(trainee.transformer, Compute(checkpointing="none"), device=run.device, dtype=torch.float32)
    model(torch.zeros(1, 16, 1, 8, 8), torch.tensor([500.0]), [torch.zeros(3, trainee.transformer.config.text_dim)])
    assert storages(trainee.transformer) == before


def test_an_expert_that_found_no_room_is_brought_back_when_it_is_asked_for_again(tiny_run, tmp_path, monkeypatch):
    run = make_run(run_options(tiny_run, tmp_path, task="t2v-A14B", dit_high_noise=tiny_run.weights["dit"]))
    trainee = run.activate(0)
    with monkeypatch.context() as patch:
        patch.setattr(run.trainees[1].place, "_start", lambda: (_ for _ in ()).throw(torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            run.activate(1)
    assert run.active is None
    assert sum(storages(trainee.transformer).values()) == 0
    for number in (0, 1):
        assert sum(storages(run.activate(number).transformer).values()) > 0


def storages(transformer: torch.nn.Module) -> dict[int, int]:
    """Bytes of each storage that a frozen weight lies in."""
    found = [value.untyped_storage() for value in transformer.parameters() if not value.requires_grad]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def test_save_loras_writes_the_averages_beside_the_weights(tiny_run: TinyRun, tmp_path: Path):
    run = make_run(run_options(tiny_run, tmp_path, ema_decay=0.9))
    assert [path.name for path in save_loras(run, "-x")] == ["lora-x.safetensors", "lora-x-ema.safetensors"]


def test_the_state_that_it_goes_on_from_leaves_the_memory(tiny_run: TinyRun, tmp_path: Path, monkeypatch):
    """Of full fine-tuning it is three times the weights."""
    options = tiny_run.options(tmp_path, max_train_steps=1)
    train.run(options)
    kept: list[weakref.ref[torch.Tensor]] = []
    left: list[int] = []
    real_load, real_train = checkpoint._load, train.train_to_end

    def load(path: Path, checksum: int | None) -> dict[str, torch.Tensor]:
        tensors = real_load(path, checksum)
        kept.extend(map(weakref.ref, tensors.values()))
        return tensors

    def watched(*words: Any) -> bool:
        gc.collect()
        left.append(sum(one() is not None for one in kept))
        return real_train(*words)

    monkeypatch.setattr(checkpoint, "_load", load)
    monkeypatch.setattr(train, "train_to_end", watched)
    train.run(replace(options, max_train_steps=2))
    assert kept
    assert left == [0]


@pytest.mark.parametrize("changes", [{"network_alpha": 1.0}, {"network_dim": 16}, {"network_module": "loha"}])
def test_what_is_finished_is_not_written_anew_by_other_settings(tiny_run, tmp_path, caplog, changes):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    before = (tmp_path / "lora.safetensors").read_bytes()
    train.run(replace(options, **changes, resume_changed=True))
    assert (tmp_path / "lora.safetensors").read_bytes() == before
    assert "nothing is trained or written" in caplog.text
