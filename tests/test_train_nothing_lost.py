"""Failures late in a run: what was trained is on disk, and a start after the cure goes on from there."""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import end_of, fork
from safetensors.torch import load_file
from tiny import TinyRun, state_folder

from wangen.generator.errors import WangenError
from wangen.generator.run_names import BEST
from wangen.generator.steps import Train
from wangen.runtime import train
from wangen.runtime.training import checkpoint, loop, prepared, saving, watching
from wangen.runtime.training.optim import Optimization
from wangen.runtime.training.trackers import Trackers

LAST = "lora.safetensors"


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """No state is due by the clock or at an epoch's end, as in a run whose epochs are long."""
    monkeypatch.setattr(saving.Saving, "_state_due", lambda _: False)


@pytest.fixture
def prompts(tiny_run: TinyRun, tmp_path: Path) -> dict[str, Any]:
    """Flags with which a picture is sampled at the end."""
    file = tmp_path / "prompts.txt"
    file.write_text("a red square --w 64 --h 64 --f 1 --s 2 --l 1\n")
    weights = {name: tiny_run.weights[name] for name in ("vae", "t5")}
    return {"sample_prompts": file, "t5_dtype": "float32", **weights}


def states(options: Train) -> list[int]:
    """The steps of the states that are there."""
    return sorted(int(path.name[5:]) for path in state_folder(options).glob("step-*"))


def before_step(patch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    """Do something before the step of that number, counted from 1."""
    real, count = loop.optimizer_step, 0

    def step(*words: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            action()
        return real(*words)

    patch.setattr(loop, "optimizer_step", step)


def raising(error: Exception) -> Callable[..., Any]:
    """What raises it, whatever it is given."""

    def fails(*_words: Any, **_names: Any) -> Any:
        raise error

    return fails


def refusing(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Let the system refuse to remove a file of that name, as Windows does while a program has it open."""
    real, asked = Path.unlink, list[str]()

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == name:
            asked.append(name)
            raise OSError(1, "Operation not permitted")
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    return asked


def test_an_old_lora_that_cannot_be_removed_stays_and_the_run_goes_on(tiny_run, tmp_path, monkeypatch, caplog):
    asked = refusing(monkeypatch, "lora-step00000002.safetensors")
    options = tiny_run.options(tmp_path / "out", max_train_steps=6, save_every_n_steps=2, keep_last=1)
    train.run(options)
    assert (options.output_dir / LAST).is_file()
    assert (options.output_dir / "lora-step00000002.safetensors").is_file()
    assert asked
    assert caplog.text.count("lora-step00000002.safetensors cannot be removed, and stays: Operation not permitted") == 1


def test_a_best_that_cannot_be_written_is_sought_on(tiny_run, tmp_path, monkeypatch, caplog):
    refused = WangenError("cannot write: Permission denied", where="lora-best.safetensors", cure="close it")
    real, tries = saving.save_trained, list[int]()

    def save(run: Any, trainee: Any, suffix: str, *words: Any, **how: Any) -> Any:
        if suffix == BEST:
            tries.append(run.step)
            if len(tries) == 1:
                raise refused
        return real(run, trainee, suffix, *words, **how)

    monkeypatch.setattr(saving, "save_trained", save)
    options = tiny_run.options(tmp_path / "out", validation_items=1, validate_every_n_steps=1, keep_best=True)
    train.run(options)
    assert "the best so far is not saved, and sought on: lora-best.safetensors: cannot write" in caplog.text
    assert tries[0] == 1
    assert len(tries) > 1, "the next better one"
    assert (options.output_dir / "lora-best.safetensors").is_file()
    assert (options.output_dir / LAST).is_file()


@pytest.mark.parametrize("which", ["lora-step00000004", "lora-step00000004-ema"])
def test_a_lora_that_cannot_be_written_does_not_cost_the_state(tiny_run, tmp_path, seldom, which):
    options = tiny_run.options(tmp_path / "out", max_train_steps=5, save_every_n_steps=4, ema_decay=0.9)
    real = saving.save_lora

    def save(plan: Any, expert: Any, parameters: Any, steps: Any, suffix: str = "", *words: Any, **how: Any) -> Any:
        if plan.file(expert, suffix).stem == which:
            raise WangenError("no such weight file")
        return real(plan, expert, parameters, steps, suffix, *words, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "save_lora", save)
        with pytest.raises(WangenError, match="no such weight file"):
            train.run(options)
    assert states(options) == [4]
    train.run(options)
    train.run(replace(options, output_dir=tmp_path / "whole"))
    names = {path.name for path in (tmp_path / "whole").glob("*.safetensors")}
    assert names == {path.name for path in options.output_dir.glob("*.safetensors")}
    assert len(names) == 4
    for name in names:
        assert (options.output_dir / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("how", ["out of memory", "stopped"])
def test_a_fresh_run_without_a_step_leaves_the_state_of_the_one_before(tiny_run, tmp_path, how, caplog):
    options = tiny_run.options(tmp_path / "out", max_train_steps=4)
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            train.run(options)
    assert states(options) == [2]
    begins = replace(options, fresh=True, network_dim=8, network_alpha=8.0)
    with pytest.MonkeyPatch.context() as patch:
        if how == "stopped":
            before_step(patch, 1, lambda: signal.raise_signal(signal.SIGINT))
        else:
            before_step(patch, 1, raising(torch.OutOfMemoryError("full")))
        with pytest.raises((WangenError, KeyboardInterrupt)):
            train.run(begins)
    assert states(options) == [2]
    said = "given --fresh and saved nothing: this one goes on with the run before"
    assert said not in caplog.text
    train.run(options)
    assert caplog.text.count(said) == 1
    train.run(replace(options, max_train_steps=5))
    assert caplog.text.count(said) == 1, "it is said once"
    train.run(replace(options, max_train_steps=4, fresh=True))
    train.run(replace(options, output_dir=tmp_path / "whole"))
    assert (options.output_dir / LAST).read_bytes() == (tmp_path / "whole" / LAST).read_bytes()


def test_a_fresh_run_takes_the_place_of_the_one_before_with_its_first_state(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path / "out", max_train_steps=6)
    train.run(options)
    begins = replace(options, fresh=True, network_dim=8, network_alpha=8.0)
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            train.run(begins)
    assert states(options) == [2]
    train.run(replace(begins, fresh=False))
    assert states(options) == [6]


def test_weights_that_an_optimizer_breaks_are_not_saved(tiny_run, tmp_path, monkeypatch):
    """Loss and gradient of that step are numbers."""
    options = tiny_run.options(tmp_path / "out", save_state_every_n_steps=1)
    real, count = Optimization.step, 0

    def step(optimization: Optimization, *words: Any) -> None:
        nonlocal count
        real(optimization, *words)
        count += 1
        if count == 4:
            optimization.flat.weights[0][7] = float("inf")

    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, 1, lambda: patch.setattr(Optimization, "step", step))
        with pytest.raises(WangenError, match="weights are not finite after step 4, and are not saved") as caught:
            train.run(options)
    assert f"the last good state is {state_folder(options) / 'step-00000003'}" in caught.value.found
    assert "--resume_changed to go on from that state" in caught.value.cure
    assert states(options) == [3]
    train.run(options)
    assert all(tensor.isfinite().all() for tensor in load_file(options.output_dir / LAST).values())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("no kernel for this shape")])
def test_a_step_that_fails_costs_no_step_before_it(tiny_run, tmp_path, seldom, caplog, error):
    caplog.set_level(logging.INFO, "wangen")
    options = tiny_run.options(tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, 4, raising(error))
        with pytest.raises((WangenError, RuntimeError)) as caught:
            train.run(options)
    assert states(options) == [3]
    assert "the training state of step 3 is saved" in caplog.text
    if isinstance(caught.value, WangenError):
        assert "out of memory at step 4" in caught.value.found
        assert "the last saved state stays" in caught.value.cure
    train.run(options)
    train.run(replace(options, output_dir=tmp_path / "whole"))
    assert (options.output_dir / LAST).read_bytes() == (tmp_path / "whole" / LAST).read_bytes()


def test_a_first_step_that_fails_leaves_the_states_of_the_folder(tiny_run, tmp_path):
    """They are another line's, where `--resume` names a state."""
    options, other = (tiny_run.options(tmp_path / name, max_train_steps=4) for name in ("out", "other"))
    for each in (options, other):
        with pytest.MonkeyPatch.context() as patch:
            before_step(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                train.run(each)
    before = {path: path.read_bytes() for path in state_folder(options).rglob("*.safetensors")}
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, 1, raising(torch.OutOfMemoryError("full")))
        with pytest.raises(WangenError, match="out of memory at step 3"):
            train.run(replace(options, resume=state_folder(other) / "step-00000002"))
    assert {path: path.read_bytes() for path in state_folder(options).rglob("*.safetensors")} == before


def test_nothing_is_saved_of_a_step_that_breaks_off_in_the_middle(tiny_run, tmp_path, seldom):
    """Some weights may have been changed, and others not."""
    options = tiny_run.options(tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        fails = raising(torch.OutOfMemoryError("full"))
        before_step(patch, 1, lambda: patch.setattr(Optimization, "step", fails))
        with pytest.raises(WangenError, match="out of memory at step 1") as caught:
            train.run(options)
    assert states(options) == []
    assert "saved state" not in caught.value.cure, "there is none"


@pytest.mark.parametrize("every", [2, 9])
def test_a_process_that_is_killed_while_it_samples_leaves_the_state(tiny_run, tmp_path, seldom, prompts, every):
    """In the middle of the run where a LoRA is due, and at its end."""
    options = tiny_run.options(tmp_path / "out", max_train_steps=4, save_every_n_steps=every,
                               sample_every_n_steps=every, validation_items=1, **prompts)  # fmt: skip

    def killed() -> int:
        watching.make_samples = lambda *_, check: os.kill(os.getpid(), signal.SIGKILL)
        train.run(options)
        return 0

    assert end_of(fork(killed)) == -signal.SIGKILL
    assert states(options) == [min(every, 4)]
    (options.output_dir / "lora-step00000002.safetensors").write_bytes(b"an earlier run's")
    train.run(options)
    if every == 9:  # it is none of this run's
        (options.output_dir / "lora-step00000002.safetensors").unlink()
    train.run(replace(options, output_dir=tmp_path / "whole"))
    names = {path.name for path in (tmp_path / "whole").rglob("*.*") if path.suffix in (".safetensors", ".png")}
    assert names == {path.name for path in options.output_dir.rglob("*.*") if path.suffix in (".safetensors", ".png")}
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert (options.output_dir / path.name).read_bytes() == path.read_bytes()
    steps = [json.loads(line)["step"] for line in (options.output_dir / "metrics.jsonl").read_text().splitlines()]
    whole = [json.loads(line)["step"] for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert steps == whole


def test_a_disk_that_does_not_answer_does_not_keep_a_stop_from_saving(tiny_run, tmp_path, seldom, monkeypatch):
    """A network drive is away, say: the run waits for a batch, and stands between two steps."""
    options = tiny_run.options(tmp_path / "out", max_train_steps=50, max_data_loader_n_workers=1)
    real, answers, count = prepared.read_batch, threading.Event(), 0
    saved_at: list[float] = []

    def read(*words: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
            answers.wait(60)
        return real(*words)

    def save(*words: Any, **names: Any) -> Any:
        saved_at.append(time.monotonic())
        answers.set()
        return checkpoint_save(*words, **names)

    checkpoint_save = checkpoint.save
    monkeypatch.setattr(prepared, "read_batch", read)
    monkeypatch.setattr(checkpoint, "save", save)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train.run(options)
    assert saved_at
    assert saved_at[0] - began < 50, "before the disk answered"
    assert states(options) == [3]


def test_the_finished_lora_is_there_before_the_logs_are_closed(tiny_run, tmp_path, monkeypatch):
    """That may wait for a network."""
    options = tiny_run.options(tmp_path / "out", max_train_steps=2)
    seen: list[bool] = []
    monkeypatch.setattr(Trackers, "finish", lambda _: seen.append((options.output_dir / LAST).is_file()))
    train.run(replace(options, log_with=("tensorboard",)))
    assert seen == [True]


@pytest.mark.parametrize("how", ["cannot be written", "cannot be made"])
def test_the_finished_lora_does_not_wait_for_the_last_samples(tiny_run, tmp_path, prompts, how, caplog):
    options = tiny_run.options(tmp_path / "out", max_train_steps=2, **prompts)
    options.output_dir.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        if how == "cannot be written":
            (options.output_dir / "samples").write_text("a file in their place")
            train.run(options)
            assert "sample 1 is left out" in caplog.text
        else:
            patch.setattr(watching, "make_samples", raising(RuntimeError("a sample's own fault")))
            with pytest.raises(RuntimeError, match="own fault"):
                train.run(options)
    assert (options.output_dir / LAST).is_file()
    assert states(options) == [2]
