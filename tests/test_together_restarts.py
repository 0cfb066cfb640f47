"""What a launcher starts again, what it says of it, and what it lets be."""

import signal
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest
from test_together import alone, kill_rank, losses, run, started
from tiny import TinyRun
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig

from wangen.generator.errors import WAS_STOPPED, WRONG_USAGE
from wangen.runtime.training import checkpoint, launcher

COUNTED = "import sys; open(sys.argv[1], 'a').write('started\\n'); sys.exit(int(sys.argv[2]))"


@pytest.mark.slow
@pytest.mark.parametrize(("code", "starts"), [(WRONG_USAGE, 1), (WAS_STOPPED, 1), (1, 3), (0, 1)])
def test_neither_a_wrong_line_nor_what_was_stopped_is_started_again(tmp_path: Path, caplog, code: int, starts: int):
    seen = tmp_path / "seen"
    with pytest.raises(ChildFailedError) if code else nullcontext() as failed:
        launcher.start(config(tmp_path, max_restarts=2), "-c", COUNTED, str(seen), str(code))
    if failed:
        said = launcher._failed(failed.value, 1, tmp_path, "run it again")
        assert said.cure == (
            "correct the line, as its words say" if code == WRONG_USAGE else "its log says why; run it again"
        )
        told = [record.getMessage().strip() for record in caplog.records if "all begin again" in record.getMessage()]
        again = "process 0 ended with exit code 1: all begin again from the last saved state (restart {} of 2)"
        assert told == [again.format(number) for number in range(1, starts)]
    assert seen.read_text().splitlines() == ["started"] * starts


@pytest.mark.slow
def test_processes_of_one_machine_need_no_name_for_it(tmp_path: Path, monkeypatch):
    """In a container its name may lead nowhere."""
    monkeypatch.setattr(socket, "getfqdn", lambda *_: "nowhere.invalid")
    launcher.start(config(tmp_path), "-c", COUNTED, str(tmp_path / "seen"), "0")
    assert (tmp_path / "seen").exists()


def config(folder: Path, max_restarts: int = 0) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=1, rdzv_backend="c10d", max_restarts=max_restarts,
        monitor_interval=0.1, logs_specs=DefaultLogsSpecs(str(folder)), **launcher.meeting_here(),
    )  # fmt: skip


@pytest.mark.slow
def test_where_one_process_is_told_to_stop_all_save_and_none_begins_again(tiny_run: TinyRun, tmp_path: Path):
    options = tiny_run.options(tmp_path, gpus="2", max_restarts=2, max_train_steps=5000)
    launcher_process = started(alone(options), tmp_path, 5)
    kill_rank(launcher_process, 1, signal.SIGTERM)
    _, told = launcher_process.communicate(timeout=120)
    assert launcher_process.returncode == WAS_STOPPED
    assert "begin again" not in told
    assert told.splitlines()[-1] == "train: stopped. Nothing saved is lost: run the same line again to go on."
    newest = checkpoint.newest(options.output_dir / "lora-state")
    assert newest
    assert newest.name == f"step-{len(losses(tmp_path)):08d}"


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_not_tried_again(tiny_run: TinyRun, tmp_path: Path):
    """The same steps from the same state would come to the same."""
    options = tiny_run.options(tmp_path, gpus="2", max_restarts=2, learning_rate=1e30, max_grad_norm=0.0)
    done = run(alone(options))
    assert done.returncode == WRONG_USAGE
    assert "is not finite at step" in done.stderr
    assert "begin again" not in done.stdout + done.stderr
    assert "correct the line, as its words say" in done.stderr
