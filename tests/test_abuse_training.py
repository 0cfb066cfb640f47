"""Two trainings that want one output folder: the second is refused in words, and no dead one is in the way."""

import json
import os
import shutil
import socket
import time
from pathlib import Path

import psutil
import pytest
from killing import KILLED, beside, end_of, fork, forked
from tiny import TinyRun

from wangen.generator.errors import WAS_STOPPED
from wangen.generator.lock import LEASE_S, Owner, this_process
from wangen.generator.processes import here
from wangen.generator.session import execute
from wangen.runtime.training import loop

DEAD = (os.getpid(), 1.0)
"""A process that had this one's number long ago."""


def lora(folder: Path) -> bytes:
    return (folder / "lora.safetensors").read_bytes()


def lock_of(folder: Path, owner: Owner, age_s: float = 0.0) -> Path:
    folder.mkdir()
    path = folder / "run.lock"
    path.write_text(owner.text())
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_folder_in_which_another_run_trains_is_refused_and_stays_as_it_is(tiny_run: TinyRun, tmp_path, capsys):
    options = tiny_run.options(tmp_path / "out", max_train_steps=1)
    path = lock_of(tmp_path / "out", this_process())
    text = path.read_text()
    assert execute(options) == 1
    said = capsys.readouterr().err
    assert f"another run trains into this folder: process {os.getpid()} on {here()}" in said
    assert f"  where: {path}" in said
    assert "  do:    wait for it to end or stop it" in said
    assert [each.name for each in path.parent.iterdir()] == ["run.lock"]
    assert path.read_text() == text


def test_the_locks_of_dead_runs_are_in_nobodys_way_and_none_is_left(tiny_run: TinyRun, tmp_path):
    path = lock_of(tmp_path / "out", Owner(here(), DEAD, DEAD))
    assert execute(tiny_run.options(tmp_path / "out", max_train_steps=1)) == 0
    assert not path.exists()


@pytest.mark.parametrize("place", ["out/run.lock", "linked/run.lock", "elsewhere.lock"])
def test_the_lock_of_a_script_and_that_of_the_folder_do_not_exclude_each_other(
    tiny_run: TinyRun, tmp_path, monkeypatch, place
):
    monkeypatch.setenv("WANGEN_SCRIPT", "train.sh")
    (tmp_path / "linked").symlink_to("out")
    (tmp_path / "out").mkdir()
    options = tiny_run.options(tmp_path / "out", max_train_steps=1, lock=tmp_path / place)
    assert execute(options) == 0
    assert list((tmp_path / "out").glob("*.lock")) == ([] if place == "elsewhere.lock" else [tmp_path / "out/run.lock"])


@pytest.mark.slow
def test_a_job_that_is_started_again_waits_for_the_lock_of_its_other_machine(tiny_run: TinyRun, tmp_path, monkeypatch):
    """A machine that died can say nothing: its lock is free when it has not beaten for a while."""
    options = tiny_run.options(tmp_path / "out", max_train_steps=1)
    lock_of(tmp_path / "out", Owner("elsewhere", DEAD, DEAD), LEASE_S - 1)
    assert execute(options) == 1
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert execute(options) == 0


def test_of_two_that_begin_at_one_moment_one_trains_and_the_other_is_refused(tiny_run: TinyRun, tmp_path):
    options = tiny_run.options(tmp_path / "out", max_train_steps=3)
    alone = tiny_run.options(tmp_path / "alone", max_train_steps=3)
    codes = beside([lambda: execute(options), lambda: execute(options)])
    assert sorted(codes) == [0, 1]
    assert execute(alone) == 0
    assert lora(options.output_dir) == lora(alone.output_dir)


def test_after_kill_9_the_next_run_goes_on_at_once(tiny_run: TinyRun, tmp_path):
    options = tiny_run.options(tmp_path / "out", max_train_steps=3, save_state_every_n_steps=1)
    code, _ = forked(lambda: execute(options), 25)
    assert code == KILLED
    assert (options.output_dir / "run.lock").is_file()
    assert execute(options) == 0
    assert sorted(path.name for path in options.output_dir.glob("run*.lock")) == []


@pytest.mark.parametrize("at", [2, 3])
def test_a_run_that_stood_still_while_another_took_over_writes_nothing_more(
    tiny_run: TinyRun, tmp_path, monkeypatch, capsys, at
):
    """As after the suspension of a machine for longer than a lock lasts: at a state on the way, and at the end."""
    options = tiny_run.options(
        tmp_path / "out", max_train_steps=3, save_state_every_n_steps=2, validation_items=1, validation_timesteps=1,
        validate_every_n_steps=at, keep_best=True, report_dir=tmp_path / "out",
    )  # fmt: skip
    theirs = {options.output_dir / name: name.encode() for name in ("lora-best.safetensors", "train.report.json")}
    other = Owner("elsewhere", DEAD, DEAD).text()
    step = loop.optimizer_step

    def taken_over(run, *words):
        if run.step == at - 1:
            (options.output_dir / "run.lock").write_text(other)
            (options.output_dir / "lora.safetensors").write_bytes(b"the other's")
            for path, content in theirs.items():
                path.write_bytes(content)
        return step(run, *words)

    monkeypatch.setattr(loop, "optimizer_step", taken_over)
    assert execute(options) == 1
    assert f"process {DEAD[0]} on elsewhere has taken this folder over" in capsys.readouterr().err
    assert lora(options.output_dir) == b"the other's"
    assert {path: path.read_bytes() for path in theirs} == theirs
    assert [path.name for path in (options.output_dir / "lora-state").glob("step-*")] == ["step-00000002"] * (at == 3)
    assert (options.output_dir / "run.lock").read_text() == other


def test_another_name_of_the_machine_is_no_other_run(tiny_run: TinyRun, tmp_path, monkeypatch):
    """As where a laptop gets another one from a network."""
    options = tiny_run.options(tmp_path / "out", max_train_steps=2, save_state_every_n_steps=1)
    step = loop.optimizer_step

    def renamed(run, *words):
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        return step(run, *words)

    monkeypatch.setattr(loop, "optimizer_step", renamed)
    assert execute(options) == 0
    assert lora(options.output_dir)


def test_the_curves_go_on_in_a_new_file_where_somebody_removed_the_folder(tiny_run: TinyRun, tmp_path, monkeypatch):
    options = tiny_run.options(tmp_path / "out", max_train_steps=3)
    step = loop.optimizer_step

    def removed(run, *words):
        if run.step == 1:
            shutil.rmtree(options.output_dir)
        return step(run, *words)

    monkeypatch.setattr(loop, "optimizer_step", removed)
    assert execute(options) == 0
    lines = map(json.loads, (options.output_dir / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "loss" in line] == [2, 3]
    assert lora(options.output_dir)


def test_show_timesteps_needs_no_lock(tiny_run: TinyRun, tmp_path):
    lock_of(tmp_path / "out", this_process())
    assert execute(tiny_run.options(tmp_path / "out", show_timesteps="console")) == 0


def test_a_process_that_trains_is_seen_from_outside(tiny_run: TinyRun, tmp_path):
    """What `clean`, `publish` and the live page look at."""
    options = tiny_run.options(tmp_path / "out", max_train_steps=100_000)
    child = fork(lambda: execute(options))
    path, until_s = options.output_dir / "run.lock", time.monotonic() + 20
    while not (options.output_dir / "metrics.jsonl").is_file():  # within an import SIGTERM ends it where it is
        assert time.monotonic() < until_s
        time.sleep(0.01)
    owner = Owner.parse(path.read_text())
    psutil.Process(child).terminate()
    assert end_of(child) == WAS_STOPPED
    assert owner
    assert owner.step[0] == child
    assert not path.exists()


@pytest.mark.parametrize("flag", ["max_train_steps", "max_train_epochs"])
def test_more_steps_than_a_run_can_have_are_refused(tiny_run: TinyRun, tmp_path, flag, capsys):
    assert execute(tiny_run.options(tmp_path / "out", **{flag: 2**31})) == 2
    assert "are more than a run can have" in capsys.readouterr().err
