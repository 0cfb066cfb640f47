"""What goes wrong in one of several processes: who is blamed, in which words, what is saved, and what stays behind."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from runs import planned
from test_together import alone, losses, run, started, torchrun
from tiny import TinyRun
from torch.distributed.launcher.api import LaunchConfig

from wangen.generator.errors import WRONG_USAGE, UsageError, WangenError
from wangen.generator.launch import Launch, launch
from wangen.runtime import communication, devices, train
from wangen.runtime.progress import progress
from wangen.runtime.training import checkpoint, launcher, process_logs, ranks
from wangen.runtime.training.process_logs import KEPT_STARTS, last_words, remove_old
from wangen.runtime.training.ranks import Ranks, agreed_name, joined
from wangen.runtime.training.run import Run
from wangen.runtime.training.saving import Saving

CPU = torch.device("cpu")
SECOND = Ranks(Launch(1, 2, 1))


# ---- small parts -------------------------------------------------------------------------------------------------


def test_only_the_first_says_that_it_is_time_to_save(tiny_run: TinyRun, tmp_path: Path, monkeypatch):
    """Only it saves, so another's clock would say so at every step from then on, and each reads the GPU's numbers."""
    plan = planned(tiny_run, tmp_path, max_train_steps=100, save_state_every_n_minutes=1.0)
    run = Run(plan, None, CPU, [SimpleNamespace(step=1)])  # type: ignore[arg-type, list-item]
    for own, wanted in ((Ranks(), True), (SECOND, False)):
        run.ranks = own
        saving = Saving(run)
        monkeypatch.setattr(saving, "_saved_at", time.monotonic() - 61)
        assert saving.due() is wanted


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.own_gpu(torch.device("cuda"), 1) == torch.device("cuda", 1)
    for one in ("cuda:0", "cuda:1"):
        with pytest.raises(UsageError, match=f"--device {one}: all processes of this machine"):
            devices.own_gpu(torch.device(one), 1)
    with pytest.raises(UsageError, match="process 2 of this machine, counted from 0, has no GPU: there are 2"):
        devices.own_gpu(torch.device("cuda"), 2)


@pytest.mark.parametrize(("device", "number"), [("cuda", 0), ("cuda:1", 1)])
def test_what_names_no_gpu_is_done_on_the_own_one(monkeypatch, device: str, number: int):
    """Pinning, Triton's kernels and the encoders' `cuda` would all take the machine's first."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(ranks, "new_store", lambda: (None, number, 2))
    monkeypatch.setattr(ranks.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(ranks.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(Ranks, "any", lambda *_: False)
    with joined(Launch(number, 2, number), torch.device(device)):
        pass
    assert chosen == [number]


def test_processes_that_are_not_told_where_to_meet_say_so(monkeypatch: pytest.MonkeyPatch):
    """As where a cluster's own variables say how many there are."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with (
        pytest.raises(UsageError, match="WORLD_SIZE is 2, but not set: MASTER_PORT, by which"),
        joined(Launch(1, 2, 1), CPU),
    ):
        raise AssertionError


CUT_OFF = """
import atexit, os, sys
import torch
from wangen.generator.errors import WangenError
from wangen.generator.launch import Launch
from wangen.runtime.training import ranks

class Threads:
    def __del__(self, end=os.abort):
        end()

ranks.new_store = lambda: (None, 1, 2)
ranks.dist.init_process_group = lambda *_, **__: None
with ranks.joined(Launch(1, 2, 1), torch.device("cpu")):
    atexit.register(print, "cleaned up")
    threads = Threads()
    {what}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "code", "words"),
    [("raise WangenError('a number', exit_code=7)", 7, "a number"), ("sys.nothing()", 1, "has no attribute 'nothing'")],
)
def test_threads_of_a_group_do_not_change_the_exit_code_of_a_failure(what: str, code: int, words: str):
    """gloo's call `std::terminate` when the interpreter ends amid a collective, one time in some dozens."""
    done = subprocess.run([sys.executable, "-c", CUT_OFF.format(what=what)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "cleaned up\n")
    assert words in done.stderr


def test_all_take_the_memory_flags_of_the_card_with_least_free(tiny_run: TinyRun, tmp_path: Path, monkeypatch):
    options = tiny_run.options(tmp_path, vram="auto", blocks_to_swap=0, quantize="none")
    others = [(30, {"blocks_to_swap": 0, "quantize": "none"}), (20, {"blocks_to_swap": 10, "quantize": "int8"})]
    monkeypatch.setattr(SECOND, "gathered", lambda _own: others)
    found = train.alike(options, None, SECOND)
    assert (found.blocks_to_swap, found.quantize) == (10, "int8")
    assert train.alike(replace(options, vram=None), None, SECOND).blocks_to_swap == 0


def test_a_lost_process_is_said_in_one_line_and_waited_for(monkeypatch):
    """The launcher blames whom it sees end first: that must not be one that only noticed."""
    words = "[/build/gloo/pair.cc:5] Connection closed by peer [::1]:2. This is typically caused by a crash. Good luck!"

    def closed(*_: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(communication, "GRACE_S", 0.2)
    monkeypatch.setattr(ranks.dist, "all_gather_object", closed)
    began, before = time.monotonic(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(WangenError, match=r"has lost the others \(Connection closed by peer \[::1\]:2\)"):
        SECOND.gathered(1)
    assert time.monotonic() - began >= 0.2
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_fault_is_not_taken_for_a_lost_process(monkeypatch):
    def wrong(*_: object) -> None:
        raise RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")

    monkeypatch.setattr(ranks.dist, "all_gather_object", wrong)
    with pytest.raises(RuntimeError, match="The size of tensor a"):
        SECOND.gathered(1)


def test_processes_that_are_started_again_do_not_find_dead_ones():
    store, names = torch.distributed.HashStore(), []
    for _ in range(3):  # the store keeps what earlier starts have left
        with ThreadPoolExecutor() as threads:
            started_ones = [threads.submit(agreed_name, store, number, 3) for number in (0, 1, 2)]
        (name,) = {one.result(timeout=20) for one in started_ones}
        names.append(name)
    assert len(set(names)) == 3


def test_what_differs_between_processes_is_named(monkeypatch):
    first, second = {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 0}
    monkeypatch.setattr(SECOND, "gathered", lambda _own: [first, second])
    with pytest.raises(WangenError, match=r"sees settings that differ from those of process 0: b, c\n"):
        SECOND.require_same("settings", second)
    monkeypatch.setattr(SECOND, "gathered", lambda _own: [first, dict(first)])
    SECOND.require_same("settings", first)


@pytest.mark.parametrize(("count", "code"), [(1, 1), (2, WRONG_USAGE)])
@pytest.mark.parametrize("flag", ["dit", "network_weights"])
def test_files_of_another_kind_are_no_reason_to_start_again(tiny_run, tmp_path: Path, monkeypatch, count, code, flag):
    monkeypatch.setattr(train, "launch", lambda: Launch(0, count, 0))
    monkeypatch.setattr(train, "joined", lambda launched, _: nullcontext(Ranks(launched)))
    with pytest.raises(WangenError) as error:
        train.run(tiny_run.options(tmp_path / "out", **{flag: {"dit": tiny_run.weights["vae"]}.get(flag, tmp_path)}))
    assert error.value.exit_code == code


def test_a_launcher_waits_for_what_saves(tiny_run: TinyRun, tmp_path: Path, monkeypatch):
    """torch's own half minute is shorter than samples take, or a long step."""
    configs: list[LaunchConfig] = []
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    monkeypatch.setattr(launcher, "elastic_launch", lambda config, _: configs.append(config) or (lambda *_: None))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "environ", dict(os.environ))
        launcher.train_together(tiny_run.options(tmp_path, gpus="2"))
    assert getattr(configs[0], "shutdown_timeout", launcher.STOP_S) == launcher.STOP_S, "older ones of torch have none"


def test_a_bar_is_of_the_process_that_shows(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(logging.getLogger("wangen"), "level", logging.WARNING)
    logging.getLogger("wangen").manager._clear_cache()  # type: ignore[attr-defined]
    with progress("train", 2) as advance:
        advance(2, "")
    logging.getLogger("wangen").manager._clear_cache()  # type: ignore[attr-defined]
    assert capsys.readouterr().err == ""


def test_logs_of_the_last_starts_stay(tmp_path: Path):
    for number in range(KEPT_STARTS + 3):
        file = tmp_path / f"{number:08x}_x" / "attempt_0" / "1" / "stderr.log"
        file.parent.mkdir(parents=True)
        file.write_text(f"line {number}\n" * 50)
        for path in (file, file.parents[2]):
            os.utime(path, (number, number))
    (tmp_path / "my_own").mkdir()
    remove_old(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["my_own", *(f"{number:08x}_x" for number in range(3, KEPT_STARTS + 3))]
    )
    assert last_words(file).splitlines() == [f"  | line {KEPT_STARTS + 2}"] * process_logs.LAST_LINES
    assert last_words(tmp_path / "none") == ""


def test_a_launcher_says_which_job_it_is_and_how_often_it_was_started():
    told = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "7",
            "TORCHELASTIC_RESTART_COUNT": "2", "SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "1"}  # fmt: skip
    assert launch(told, "linux") == Launch(1, 2, 1, 2, job="7", restarts=2, slurm_job="5", requeues=1)


# ---- whole runs --------------------------------------------------------------------------------------------------

FAULTS = """
import os, sys
if os.environ.get("RANK") == "{rank}" and "wangen.runtime" in sys.orig_argv:
    import time
    import torch
    from wangen.generator.errors import WangenError
    from wangen.runtime import train
    from wangen.runtime.training import loop
    {fault}
"""


def faulty(folder: Path, rank: int, fault: str) -> dict[str, str]:
    """The environment in which one process has a fault: Python runs this module at its start."""
    folder.mkdir(exist_ok=True)
    text = FAULTS.format(rank=rank, fault=fault.replace("\n", "\n    "))
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


AT_STEP_3 = """
real = loop.optimizer_step
def step(run, *rest):
    if run.step == 3{also}:
        {how}
    return real(run, *rest)
loop.optimizer_step = step
"""


def left(folder: Path) -> list[str]:
    """The command lines of processes that still work on a folder."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("def unread(*_): raise WangenError('an entry cannot be read')\ntrain.read_training_samples = unread",
         "train: an entry cannot be read"),
        (AT_STEP_3.format(also="", how="raise torch.OutOfMemoryError"), "train: out of memory at step 4"),
        (AT_STEP_3.format(also="", how="raise ValueError('our bug')"), "[rank1]: ValueError: our bug"),
    ],
)  # fmt: skip
def test_what_another_process_dies_of_stands_on_the_terminal(tiny_run: TinyRun, tmp_path: Path, fault: str, words: str):
    options = tiny_run.options(tmp_path / "out", gpus="2")
    done = run(alone(options), **faulty(tmp_path / "fault", 1, fault))
    assert done.returncode == 1
    assert f"  | {words}" in done.stderr
    assert "process 1 of 2 ended with exit code 1" in done.stderr
    assert "Traceback" not in done.stderr.replace("  | Traceback", "")
    assert not left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("train.find_state = lambda *_: None", 1, "process 1 of 2 sees training states that differ"),
        ("from dataclasses import replace\nreal = train.make_plan\n"
         "train.make_plan = lambda options, *rest: real(replace(options, max_train_steps=9), *rest)", WRONG_USAGE,
         "process 1 of 2 sees samples or settings that differ from those of process 0: max_train_steps\n"),
    ],
)  # fmt: skip
def test_processes_that_would_wait_for_each_other_in_vain_are_refused(
    tiny_run: TinyRun, tmp_path: Path, fault: str, code: int, words: str
):
    """A machine that sees no state of a run that is done, or was given another number of steps."""
    options = tiny_run.options(tmp_path / "out", gpus="2")
    assert run(alone(replace(options, gpus="1", gradient_accumulation_steps=2))).returncode == 0
    done = run(alone(options), **faulty(tmp_path / "fault", 1, fault))
    assert done.returncode == code
    assert words in done.stderr


@pytest.mark.slow
def test_a_fresh_run_goes_on_when_its_launcher_starts_it_again(tiny_run: TinyRun, tmp_path: Path):
    options = tiny_run.options(tmp_path / "out", gpus="2", max_restarts=1, fresh=True, save_state_every_n_steps=1)
    assert run(alone(replace(options, gpus="1"))).returncode == 0, "an earlier run, which --fresh is to forget"
    once = " and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    fault = AT_STEP_3.format(also=once, how="raise ValueError('our bug')")
    done = run(alone(options), **faulty(tmp_path / "fault", 1, fault))
    assert done.returncode == 0, done.stderr
    assert "resuming at 3" in done.stdout + done.stderr
    assert len(losses(tmp_path / "out")) == options.max_train_steps
    anew = run(alone(options))
    assert anew.returncode == 0
    assert "resuming" not in anew.stdout + anew.stderr


@pytest.mark.slow
def test_a_stop_leaves_the_first_the_time_to_save(tiny_run: TinyRun, tmp_path: Path):
    """All are told to stop, as Slurm does it: were one to end before the state is on disk, the launcher would stop the
    first a second time, in the middle of saving."""
    options = tiny_run.options(tmp_path / "out", max_train_steps=5000)
    slow = "real = loop.save_state\ndef save(*rest):\n    time.sleep(6)\n    real(*rest)\nloop.save_state = save\n"
    slow += "loop.Saving.due = lambda _: False"  # nothing was saved before
    job = started_with(torchrun(options, 2), options.output_dir, 5, faulty(tmp_path / "fault", 0, slow))
    for worker in psutil.Process(job.pid).children():
        worker.send_signal(signal.SIGTERM)
    _, told = job.communicate(timeout=120)
    assert job.returncode != 0
    newest = checkpoint.newest(options.output_dir / "lora-state")
    assert newest, told
    assert int(re.sub(r"\D", "", newest.name)) == len(losses(options.output_dir))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that the one which started it is gone")
def test_the_processes_of_a_killed_launcher_save_and_end(tiny_run: TinyRun, tmp_path: Path):
    """Else they would train on, unwatched, and hold the output folder against the next start."""
    options = tiny_run.options(tmp_path / "out", gpus="2", max_train_steps=400)
    job = started_with(alone(options), options.output_dir, 5, {})
    job.kill()
    job.communicate(timeout=60)
    ends = time.monotonic() + 60
    while left(options.output_dir):
        assert time.monotonic() < ends
        time.sleep(0.1)
    newest = checkpoint.newest(options.output_dir / "lora-state")
    assert newest
    done_steps = int(re.sub(r"\D", "", newest.name))
    assert done_steps == len(losses(options.output_dir)) < 400
    again = run(alone(replace(options, max_train_steps=done_steps + 3)))
    assert again.returncode == 0, again.stderr
    assert f"resuming at {done_steps}" in again.stdout + again.stderr


def started_with(line: Sequence[str], folder: Path, steps: int, environment: dict[str, str]) -> subprocess.Popen[str]:
    """As `started`, in another environment."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        return started(line, folder, steps)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
