"""metrics.jsonl survives kills and resumes, numbers are read late and together, and the loss has timesteps."""

import errno
import json
import math
import os
import signal
from contextlib import contextmanager

import pytest
import torch
from tiny import TinyRun

from wangen.generator.errors import WangenError
from wangen.runtime import train
from wangen.runtime.training.metrics import Metrics, Pending, TimestepBins


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_line_per_record_is_in_the_file_at_once(tmp_path):
    path = tmp_path / "out" / "metrics.jsonl"
    with Metrics(path, 0) as metrics:
        metrics.log({"step": 1, "loss": 0.5, "loss_by_timestep": {"0-100": 1.0}})
        assert lines(path) == [{"step": 1, "loss": 0.5, "loss_by_timestep": {"0-100": 1.0}}]
        metrics.log({"step": 2, "loss": math.nan, "grad_norm": math.inf})
    assert lines(path)[1] == {"step": 2, "loss": None, "grad_norm": None}


def test_a_resumed_run_writes_later_lines_anew_and_drops_a_torn_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, 0) as metrics:
        for step in range(1, 8):
            metrics.log({"step": step, "run": "first"})
        metrics.log({"step": 3, "validation": {"mean_adapter": 1.0}})
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    with Metrics(path, 3) as metrics:
        metrics.log({"step": 4, "run": "second"})
    assert [(line["step"], line.get("run", "validation")) for line in lines(path)] == [
        (1, "first"), (2, "first"), (3, "first"), (3, "validation"), (4, "second"),
    ]  # fmt: skip


def test_runs_of_other_names_keep_their_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for name, last in (("a", 3), ("b", 2)):
        with Metrics(path, 0, name=name) as metrics:
            for step in range(1, last + 1):
                metrics.log({"step": step})
    with Metrics(path, 2, name="a") as metrics:
        metrics.log({"step": 3})
    assert [(line["output_name"], line["step"]) for line in lines(path)] == [
        ("a", 1), ("a", 2), ("b", 1), ("b", 2), ("a", 3),
    ]  # fmt: skip


def test_a_run_from_the_beginning_starts_a_new_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "validation": {}}\n{"step": 1}\n')
    Metrics(path, 0).close()
    assert path.read_text() == ""


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WangenError, match="cannot write"):
        Metrics(tmp_path / "file" / "metrics.jsonl", 0)


@contextmanager
def disk_of(size):
    """As long as this lasts no file can be larger than so many bytes: the disk takes a part of a line, then none."""
    resource = pytest.importorskip("resource")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_lines_that_the_disk_does_not_take_wait_for_it(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, 0) as metrics:
        metrics.log({"step": 1})
        with disk_of(path.stat().st_size + 5):
            for step in (2, 3, 4):
                metrics.log({"step": step})
            assert path.read_text() == '{"step": 1}\n{"ste'
        metrics.log({"step": 5})
        assert lines(path) == [{"step": step} for step in range(1, 6)]
        assert caplog.text.count("cannot write") == 1
        with disk_of(path.stat().st_size):
            metrics.log({"step": 6})
            metrics.log({"step": 7})
            metrics.close()
    assert caplog.text.count("File too large; its lines wait until the disk takes them") == 2
    assert f"the last 2 lines of {path} cannot be written: File too large" in caplog.text
    assert len(lines(path)) == 5


def test_a_drive_that_goes_and_comes_back_gets_every_line(tmp_path, monkeypatch, caplog):
    """As a network drive does: its path is gone, then it is there, and what was open stays dead."""
    path = tmp_path / "drive" / "metrics.jsonl"
    with Metrics(path, 0) as metrics:
        metrics.log({"step": 1})
        away = path.parent.rename(tmp_path / "away")
        (tmp_path / "drive").write_text("no folder can be made here")
        metrics.log({"step": 2})
        metrics.log({"step": 3})
        (tmp_path / "drive").unlink()
        away.rename(path.parent)
        metrics.log({"step": 4})
        with monkeypatch.context() as patch:
            patch.setattr(metrics, "_file", Dead())
            metrics.log({"step": 5})
        metrics.log({"step": 6})
    assert lines(path) == [{"step": step} for step in range(1, 7)]
    assert caplog.text.count("its lines wait until the disk takes them") == 2


class Dead:
    """A file of a drive that was away."""

    def write(self, _):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def fileno(self):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def close(self):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_file_that_is_removed_amid_a_line_begins_with_a_whole_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, 0) as metrics:
        metrics.log({"step": 1})
        with disk_of(path.stat().st_size + 5):
            metrics.log({"step": 2})
        path.unlink()
        metrics.log({"step": 3})
    assert lines(path) == [{"step": 2}, {"step": 3}]


def test_a_line_that_another_run_wrote_meanwhile_stays_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, 0) as metrics:
        with disk_of(5):
            metrics.log({"step": 1})
        with path.open("a") as file:
            file.write('\n{"step": 7}\n')
        metrics.log({"step": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()[1:] if line] == [
        {"step": 7}, {"step": 1}, {"step": 2},
    ]  # fmt: skip


def test_bins_hold_each_loss_at_its_timestep_and_nothing_that_is_not_finite():
    bins = TimestepBins()
    bins.add([0.0, 0.099, 0.1, 0.999, 1.0], [1.0, 3.0, 5.0, 7.0, 9.0])
    bins.add([0.5], [math.nan])
    assert bins.means() == {"0-100": 2.0, "100-200": 5.0, "900-1000": 8.0}
    bins.clear()
    assert bins.means() == {}


def test_pending_records_are_read_together_in_their_order():
    pending = Pending(torch.device("cpu"), every=3)
    records = [
        {"step": step, "loss": torch.tensor(step / 2), "losses": torch.arange(step).float(), "lr": 1e-4}
        for step in (1, 2, 3)
    ]
    assert pending.add(records[0]) == []
    assert pending.add(records[1]) == []
    read = pending.add(records[2])
    assert [(r["step"], r["loss"], r["losses"], r["lr"]) for r in read] == [
        (1, 0.5, [0.0], 1e-4), (2, 1.0, [0.0, 1.0], 1e-4), (3, 1.5, [0.0, 1.0, 2.0], 1e-4),
    ]  # fmt: skip
    assert pending.read() == []


def test_pending_waits_on_a_gpu_only_and_gives_all_that_waits_before_something_is_saved():
    assert Pending(torch.device("cpu")).add({"loss": torch.tensor(1.0)}) == [{"loss": 1.0}]
    late = Pending(torch.device("cuda"))
    assert late.add({"loss": torch.tensor(1.0)}) == []
    assert late.read() == [{"loss": 1.0}]


def test_a_record_keeps_the_numbers_of_its_step_although_the_graph_goes_on():
    pending = Pending(torch.device("cpu"), every=2)
    weight = torch.ones((), requires_grad=True)
    pending.add({"loss": weight * 2})
    (first, second) = pending.add({"loss": (weight * 3).double()})
    assert (first["loss"], second["loss"]) == (2.0, 3.0)


def test_the_loss_by_timestep_is_plain_whatever_is_weighted(tiny_run: TinyRun, tmp_path):
    found = []
    for scheme in ("none", "sigma_sqrt"):
        train.run(tiny_run.options(tmp_path / scheme, max_train_steps=1, weighting_scheme=scheme))
        found.append(lines(tmp_path / scheme / "metrics.jsonl"))
    plain, weighted = ([line["loss_by_timestep"] for line in run if "loss_by_timestep" in line] for run in found)
    assert plain == weighted
    assert found[0][0]["loss"] != found[1][0]["loss"]


@pytest.mark.slow
def test_the_loss_by_timestep_of_an_epoch_goes_on_where_a_run_was_cut(tiny_run: TinyRun, tmp_path):
    found = []
    for name, ends in (("whole", (6,)), ("cut", (4, 5, 6))):  # of three steps an epoch
        for end in ends:
            train.run(tiny_run.options(tmp_path / name, max_train_steps=end))
        found.append([line for line in lines(tmp_path / name / "metrics.jsonl") if "loss_by_timestep" in line])
    assert found[0][-1]["step"] == 6
    assert found[0][-1] == found[1][-1]
