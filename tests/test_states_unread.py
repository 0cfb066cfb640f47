"""A state of training of which the disk does not answer, for once or for good: nothing begins anew, nothing is lost."""

import errno
import itertools
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import state_folder

from wangen.generator.errors import WangenError
from wangen.runtime import train
from wangen.runtime.training import checkpoint


def refuse_reading(monkeypatch, of, number, times=None):
    """Let reading the files of which `of` is true fail; at these times alone, counted from 1."""
    read, count = Path.read_bytes, itertools.count(1)

    def refusing(path):
        if of(path) and (times is None or next(count) in times):
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refusing)


CURES = {errno.EACCES: "fix its rights", errno.EIO: "network drive answers", errno.EMFILE: "limit of open files"}


@pytest.mark.parametrize("number", CURES)
@pytest.mark.parametrize("file", ["state.json", "adapter.safetensors"])
def test_a_state_that_cannot_be_read_is_not_called_damaged(tiny_run, tmp_path, monkeypatch, file, number):
    """As of another user, or of a drive that does not answer; root may read all, so the refusal is made."""
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    refuse_reading(monkeypatch, lambda path: path.name == file, number)
    words = f"the training state cannot be read: {os.strerror(number)}"
    with pytest.raises(WangenError, match=words) as error:
        train.run(replace(options, max_train_steps=3))
    assert f"{CURES[number]}" in str(error.value)
    assert "--fresh" not in str(error.value)
    assert "remove" not in str(error.value)


@pytest.mark.parametrize("time", range(1, 6))
def test_a_state_whose_disk_does_not_answer_once_is_never_begun_again(tiny_run, tmp_path, monkeypatch, time, caplog):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    refuse_reading(monkeypatch, lambda path: path.name == "state.json", errno.EIO, {time})
    refused = False
    with suppress(WangenError):
        refused = True
        train.run(replace(options, max_train_steps=3))
        refused = False
    assert (state_folder(options) / "step-00000002").is_dir() == refused
    assert refused or "resuming at" in caplog.text


@pytest.mark.parametrize("time", range(1, 6))
def test_a_folder_of_states_that_cannot_be_listed_once_is_never_taken_for_empty(tiny_run, tmp_path, monkeypatch, time):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    listed, count = os.listdir, itertools.count(1)

    def refusing(path="."):
        if Path(path) == state_folder(options) and next(count) == time:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", refusing)
    refused = False
    with suppress(WangenError):
        refused = True
        train.run(replace(options, max_train_steps=3))
        refused = False
    begun = (tmp_path / "metrics.jsonl").read_text().count('"step": 1,')
    assert begun == 1
    assert (state_folder(options) / ("step-00000002" if refused else "step-00000003")).is_dir()


def test_a_fresh_run_takes_the_place_of_a_state_that_cannot_be_read(tiny_run, tmp_path, monkeypatch):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    old = state_folder(options) / "step-00000002" / "state.json"
    refuse_reading(monkeypatch, lambda path: path == old, errno.EIO)
    train.run(replace(options, fresh=True, max_train_steps=3))
    assert (state_folder(options) / "step-00000003").is_dir()


def test_a_state_to_be_kept_stays_when_it_cannot_be_read(tiny_run, tmp_path, monkeypatch):
    options = tiny_run.options(tmp_path, max_train_steps=8, save_every_n_steps=2, save_state=True)
    train.run(replace(options, max_train_steps=6))
    states = state_folder(options)
    begun = checkpoint.begin  # the first save of the second run: from there on the disk fails
    of = {states / "step-00000002" / "state.json"}
    monkeypatch.setattr(
        checkpoint, "begin", lambda staging: refuse_reading(monkeypatch, of.__contains__, errno.EIO) or begun(staging)
    )
    train.run(options)
    assert sorted(path.name for path in states.glob("step-*")) == [f"step-0000000{step}" for step in (2, 4, 6, 8)]
