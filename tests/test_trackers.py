"""Experiment logs: refused early when they cannot be kept, and never a reason for a run to stop."""

import errno
import os
import sys
import time
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from accelerate import PartialState
from tiny import TinyRun

from wangen.generator.errors import UsageError
from wangen.runtime.training import trackers
from wangen.runtime.training.trackers import Trackers, open_trackers, require_trackers


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_every_number_by_its_step_and_a_resumed_run_replaces_later_ones(tiny_run: TinyRun, tmp_path):
    options = tiny_run.options(tmp_path, log_with=("tensorboard",))
    with open_trackers(options, 0) as logs:
        for step in (1, 2, 3):
            logs.log(step, {"loss": float(step), "loss_by_timestep": {"0-100": 0.5}, "expert": "low", "gone": None})
        logs.log(3, {"adapter": 0.25}, "validation")
    with open_trackers(options, 2) as logs:
        logs.log(3, {"loss": 30.0})
    found = scalars(tmp_path / "logs" / "lora")
    assert found["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert found["train/loss_by_timestep/0-100"] == [(1, 0.5), (2, 0.5)]
    assert "train/expert" not in found


def test_a_run_that_begins_anew_replaces_all_of_an_earlier_one(tiny_run: TinyRun, tmp_path):
    """Also what was judged before its first step."""
    options = tiny_run.options(tmp_path, log_with=("tensorboard",))
    for loss in (1.0, 2.0):
        with open_trackers(options, 0) as logs:
            logs.log(0, {"base": loss}, "validation")
            logs.log(1, {"loss": loss})
    found = scalars(tmp_path / "logs" / "lora")
    assert (found["validation/base"], found["train/loss"]) == ([(0, 2.0)], [(1, 2.0)])


def test_what_a_launcher_or_a_card_says_stops_no_log(tiny_run: TinyRun, tmp_path, monkeypatch):
    """A rank without a number of processes, and a card of which accelerate wants to know its driver."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setattr("accelerate.state.check_cuda_p2p_ib_support", lambda: pytest.fail("a card was asked"))
    with open_trackers(tiny_run.options(tmp_path, log_with=("tensorboard",)), 0) as logs:
        logs.log(1, {"loss": 1.0})
    assert scalars(tmp_path / "logs" / "lora")["train/loss"] == [(1, 1.0)]
    assert os.environ["LOCAL_RANK"] == "1"


def test_the_folder_of_the_log_is_chosen(tiny_run: TinyRun, tmp_path):
    with open_trackers(tiny_run.options(tmp_path, log_with=("tensorboard",), logging_dir=tmp_path / "x"), 0) as logs:
        logs.log(1, {"loss": 1.0})
    assert scalars(tmp_path / "x" / "lora")
    assert not (tmp_path / "logs").exists()


def test_runs_of_one_name_in_one_folder_do_not_hide_each_other(tiny_run: TinyRun, tmp_path):
    given = [("a", 1.0), ("b", 2.0), ("deep/b", 3.0)]
    for folder, loss in given:
        options = tiny_run.options(tmp_path / folder, log_with=("tensorboard",), logging_dir=tmp_path / "logs")
        with open_trackers(options, 0) as logs:
            logs.log(1, {"loss": loss})
    found = {name: scalars(tmp_path / "logs" / name)["train/loss"] for name in ("lora", "lora-b", "lora-b-2")}
    assert found == {"lora": [(1, 1.0)], "lora-b": [(1, 2.0)], "lora-b-2": [(1, 3.0)]}
    again = tiny_run.options(tmp_path / "b", logging_dir=tmp_path / "logs")
    assert trackers._name(again) == "lora-b", "what a run is called stays"
    (tmp_path / "link").symlink_to(tmp_path / "b")
    assert trackers._name(replace(again, output_dir=tmp_path / "link")) == "lora-b", "however it is spelled"
    assert replace(again, smoke=True).effective().logging_dir == tmp_path / "logs" / "smoke"


def test_without_a_log_nothing_is_written(tiny_run: TinyRun, tmp_path):
    with open_trackers(tiny_run.options(tmp_path, log_with=("none",)), 0) as logs:
        logs.log(1, {"loss": 1.0})
    assert not list(tmp_path.iterdir())


class Mlflow:
    """As much of mlflow as accelerate's tracker uses; it fails from a step on."""

    def __init__(self, fails_at=99):
        self.fails_at = fails_at
        self.started, self.logged = [], []
        self.module = ModuleType("mlflow")
        self.module.search_experiments = lambda filter_string: []
        self.module.create_experiment = lambda **_names: "1"
        self.module.start_run = self.start
        self.module.log_metrics = self.log
        self.module.end_run = lambda: None
        self.module.MlflowClient = lambda: SimpleNamespace(get_metric_history=self.history)

    def start(self, run_id=None, **names):
        self.started.append((run_id, names["run_name"]))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "new-run"))

    def history(self, run_id, name):
        return [SimpleNamespace(step=step) for step, metrics in self.logged if name in metrics]

    def log(self, metrics, step):
        if step >= self.fails_at:
            raise ConnectionError("the server is gone\nand more")
        self.logged.append((step, metrics))


def test_a_log_that_fails_is_dropped_with_one_warning_and_the_others_go_on(tiny_run, tmp_path, monkeypatch, caplog):
    mlflow = Mlflow(fails_at=2)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow.module)
    with open_trackers(tiny_run.options(tmp_path, log_with=("mlflow", "tensorboard")), 0) as logs:
        for step in (1, 2, 3, 4):
            logs.log(step, {"loss": float(step)})
    assert mlflow.logged == [(1, {"train/loss": 1.0})]
    assert [record.getMessage() for record in caplog.records if "stopped logging" in record.getMessage()] == [
        "  mlflow stopped logging: the server is gone; metrics.jsonl goes on"
    ]
    assert len(scalars(tmp_path / "logs" / "lora")["train/loss"]) == 4


def test_names_that_mlflow_refuses_are_others_there(tiny_run, tmp_path, monkeypatch):
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow.module)
    with open_trackers(tiny_run.options(tmp_path, log_with=("mlflow", "tensorboard")), 0) as logs:
        logs.log(1, {"d*lr": 1.0, "timestep_0062.5": 2.0})
    assert mlflow.logged == [(1, {"train/d_lr": 1.0, "train/timestep_0062.5": 2.0})]
    assert "train/d*lr" in scalars(tmp_path / "logs" / "lora")


def test_what_mlflow_has_of_a_step_that_is_done_once_more_is_not_logged_twice(tiny_run, tmp_path, monkeypatch):
    """A kill came after the state was saved."""
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow.module)
    options = tiny_run.options(tmp_path, log_with=("mlflow",))
    with open_trackers(options, 0) as logs:
        for step in (1, 2, 3):
            logs.log(step, {"loss": float(step)})
    with open_trackers(options, 1) as logs:
        for step in (2, 3, 4):
            logs.log(step, {"loss": float(step)})
        logs.log(3, {"held_out": 0.5})  # this was not reached
    assert [(step, *metrics) for step, metrics in mlflow.logged] == [
        (1, "train/loss"), (2, "train/loss"), (3, "train/loss"), (4, "train/loss"), (3, "train/held_out"),
    ]  # fmt: skip


def test_tensorboards_thread_ends_with_one_line_where_the_disk_refuses(tiny_run, tmp_path, monkeypatch, caplog, capsys):
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_trackers(tiny_run.options(tmp_path, log_with=("tensorboard",)), 0) as logs:
        monkeypatch.setattr(RecordWriter, "write", full)
        for step in range(1, 5):
            logs.log(step, {"loss": 1.0})
    said = [record.getMessage() for record in caplog.records if "stopped logging" in record.getMessage()]
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert "Traceback" not in capsys.readouterr().err


def test_a_disk_that_refuses_tensorboard_from_the_start_shows_no_traceback(tiny_run, tmp_path, monkeypatch, capsys):
    real = open

    def full(path, *words, **how):
        if "tfevents" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *words, **how)

    monkeypatch.setattr("builtins.open", full)
    with open_trackers(tiny_run.options(tmp_path, log_with=("tensorboard",)), 0) as logs:
        for step in range(1, 40):
            logs.log(step, {"loss": 1.0})
            time.sleep(0.01)  # its thread writes meanwhile
    assert "Traceback" not in capsys.readouterr().err


def test_a_log_that_cannot_start_is_left_out(tiny_run, tmp_path, monkeypatch, caplog):
    mlflow = Mlflow()
    mlflow.module.start_run = lambda **_names: (_ for _ in ()).throw(ConnectionError("no route"))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow.module)
    with open_trackers(tiny_run.options(tmp_path, log_with=("mlflow",)), 0) as logs:
        logs.log(1, {"loss": 1.0})
    assert "no route" in caplog.text


def test_a_resumed_run_goes_on_in_the_same_run_of_the_log_and_a_fresh_one_does_not(tiny_run, tmp_path, monkeypatch):
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow.module)
    options = tiny_run.options(tmp_path, log_with=("mlflow",))
    for step in (0, 5, 0):
        with open_trackers(options, step) as logs:
            logs.log(step + 1, {"loss": 1.0})
    assert [run_id for run_id, _ in mlflow.started] == [None, "new-run", None]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_install_line(tiny_run: TinyRun, tmp_path, monkeypatch, name):
    monkeypatch.setattr(trackers, "find_spec", lambda package: None if package == name else object())
    with pytest.raises(UsageError, match=f"pip install {name}"):
        require_trackers(tiny_run.options(tmp_path, log_with=("tensorboard", name)))


def test_a_package_that_does_not_load_is_named_before_a_model_loads(tiny_run: TinyRun, tmp_path, monkeypatch):
    (tmp_path / "site" / "mlflow").mkdir(parents=True)
    (tmp_path / "site" / "mlflow" / "__init__.py").write_text("import a_package_of_theirs\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(UsageError, match="does not load: No module named 'a_package_of_theirs'") as caught:
        require_trackers(tiny_run.options(tmp_path, log_with=("tensorboard", "mlflow")))
    assert "pip install --force-reinstall mlflow" in caught.value.cure


@pytest.mark.parametrize("error", [TypeError("theirs"), ImportError("protobuf"), KeyError("run")])
def test_whatever_a_log_raises_the_run_goes_on(tiny_run, tmp_path, caplog, error):
    def fails(*_words, **_names):
        raise error

    logs = Trackers({"log": SimpleNamespace(log=fails, finish=fails), "end": SimpleNamespace(log=print, finish=fails)})
    logs.log(1, {"loss": 1.0})
    logs.finish()
    assert caplog.text.count("stopped logging") == 2


def test_none_stands_alone(tiny_run: TinyRun, tmp_path):
    require_trackers(tiny_run.options(tmp_path, log_with=("none",)))
    with pytest.raises(UsageError, match="stands alone"):
        require_trackers(tiny_run.options(tmp_path, log_with=("none", "tensorboard")))


def test_wandb_must_not_have_to_ask_for_its_key(tiny_run: TinyRun, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda _package: object())
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))  # the package is not installed here
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))
    options = tiny_run.options(tmp_path, log_with=("wandb",))
    with pytest.raises(UsageError, match="WANDB_API_KEY, run `wandb login`"):
        require_trackers(options)
    file.write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    file.chmod(0o600)
    require_trackers(options)
    monkeypatch.setenv("WANDB_BASE_URL", "https://own.example/x")
    with pytest.raises(UsageError, match="no key"):
        require_trackers(options)
    monkeypatch.setenv("WANDB_MODE", "offline")
    require_trackers(options)
