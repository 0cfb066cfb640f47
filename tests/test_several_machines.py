"""Machines of a Slurm step that train together: who joins whom, a stop that arrives twice, locks that parts hold."""

import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from wangen.generator import lock, processes
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.launch import Launch, launch, machines
from wangen.generator.lock import busy_run, create, hold, this_process
from wangen.generator.steps import CacheLatents, Train
from wangen.runtime import interrupt
from wangen.runtime.interrupt import ECHO_S, Interrupt
from wangen.runtime.training import launcher
from wangen.runtime.training.launcher import slurm_meeting

TRAIN = Train(dataset_config=Path("a.toml"), dit=Path("d"), output_dir=Path("o"), output_name="n", device="cpu")
STEP = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "3", "PMI_SIZE": "3"}
JOB = {"SLURM_JOB_ID": "123456", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[03-05]"}


# ---- who joins whom ----------------------------------------------------------------------------------------------


def test_one_task_on_each_node_joins_and_copies_are_refused():
    assert machines(STEP) == 3
    assert machines({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}) == 1
    for wrong in (STEP | {"SLURM_STEP_NUM_TASKS": "6"}, {"SLURM_STEP_NUM_TASKS": "2"}):
        with pytest.raises(UsageError, match="so many processes were started") as caught:
            machines(wrong)
        assert "srun --ntasks-per-node=1" in caught.value.cure
    with pytest.raises(UsageError, match="so many processes were started"):
        launch(STEP, "linux")  # a step that starts none, as under --smoke


@pytest.mark.parametrize("gpus", ["1", "2", "auto"])
def test_a_step_on_several_machines_starts_processes(gpus, monkeypatch):
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    options = replace(TRAIN, gpus=gpus)
    assert options.starts_processes
    assert not options.leads
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "6")
    with pytest.raises(UsageError, match="SLURM_STEP_NUM_TASKS is 6"):
        _ = options.starts_processes


def test_a_process_that_was_started_starts_none(monkeypatch):
    for name, value in (STEP | {"WORLD_SIZE": "6", "RANK": "4", "LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    assert not TRAIN.starts_processes
    assert launch() == Launch(rank=4, count=6, local_rank=1, local_count=6)


def test_all_meet_at_the_first_node(monkeypatch):
    told = JOB | {"SLURM_RESTART_COUNT": "2", "WANGEN_MASTER_ADDR": "10.0.0.3"}
    one = slurm_meeting(told)
    assert (one["run_id"], one["rdzv_endpoint"]) == ("123456-2", "10.0.0.3:33456")
    assert (one["rdzv_configs"], one["local_addr"]) == ({"is_host": "false"}, None)
    first = slurm_meeting(told | {"SLURM_NODEID": "0"})
    assert (first["rdzv_configs"], first["local_addr"]) == ({"is_host": "true"}, "10.0.0.3")
    assert {**first, "rdzv_configs": 0, "local_addr": 0} == {**one, "rdzv_configs": 0, "local_addr": 0}
    asked = []
    monkeypatch.setattr(launcher, "_first_host", lambda nodes: asked.append(nodes) or "gpu03")
    found = slurm_meeting(JOB | {"SLURM_NODEID": "0"})
    assert (found["run_id"], found["rdzv_endpoint"], found["local_addr"]) == ("123456-0", "gpu03:33456", None)
    assert asked == ["gpu[03-05]"]


def test_the_first_node_is_the_first_that_scontrol_names(tmp_path, monkeypatch):
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$*" = "show hostnames gpu[03-05]" ] && printf "gpu03\\ngpu04\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert slurm_meeting(JOB)["rdzv_endpoint"] == "gpu03:33456"
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WangenError, match="does not say which machine") as caught:
        slurm_meeting(JOB)
    assert "WANGEN_MASTER_ADDR" in caught.value.cure


def test_machines_that_do_not_find_each_other_are_told_what_to_do(tmp_path, monkeypatch):
    def launch(*_words: str) -> None:
        raise RendezvousTimeoutError("nobody came")

    for name, value in (STEP | JOB | {"SLURMD_NODENAME": "gpu04", "WANGEN_MASTER_ADDR": "10.0.0.3"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which it sets for those that it starts
    monkeypatch.setattr(launcher, "elastic_launch", lambda *_: launch)
    with pytest.raises(WangenError, match=r"the 3 machines did not find each other, or .*: nobody came") as caught:
        launcher.train_together(replace(TRAIN, output_dir=tmp_path))
    assert caught.value.where == "10.0.0.3:33456"
    assert "WANGEN_MASTER_ADDR" in caught.value.cure
    assert (tmp_path / "logs" / "gpu04").is_dir()


# ---- a stop that arrives twice -----------------------------------------------------------------------------------


def test_an_echo_of_a_stop_is_none_and_a_later_one_stops_at_once(monkeypatch):
    now = 100.0
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now)
    with Interrupt() as asked:
        signal.raise_signal(signal.SIGTERM)
        now += ECHO_S - 0.1
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert asked.requested
        now += 0.2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


# ---- locks -------------------------------------------------------------------------------------------------------


def test_parts_of_the_caching_have_locks_of_their_own(monkeypatch):
    options = CacheLatents(dataset_config=Path("a.toml"), vae=Path("v"), lock=Path("outputs/run.lock"))
    assert options.lock_file == Path("outputs/run.lock")
    assert replace(options, shard="2/8").lock_file == Path("outputs/run-2-of-8.lock")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert replace(options, shard="auto").lock_file == Path("outputs/run-3.lock")
    assert [replace(options, shard=shard).waits for shard in (None, "2/8", "auto")] == [False, False, True]
    assert replace(options, shard="auto", lock=None).lock_file is None


@pytest.mark.parametrize("name", ["run.lock", "run-3.lock", "run-2-of-8.lock"])
def test_a_part_at_work_keeps_others_from_the_folder(tmp_path, name):
    assert busy_run(tmp_path) is None
    create(tmp_path / name, this_process().text())
    assert "another run works" in str(busy_run(tmp_path))


def test_two_containers_of_one_name_do_not_know_each_others_processes(tmp_path, monkeypatch):
    """As with `docker run --network=host`: the other's process ids are not there, or are of something else."""
    place = tmp_path / "run.lock"
    monkeypatch.setenv("WANGEN_SCRIPT", "/x/train_x.sh")
    for module in (lock, processes):
        monkeypatch.setattr(module, "container", lambda: "container pid:[2]")
    dead = replace(this_process(), run=(2**22 + 1, 1.0), step=(2**22 + 1, 1.0))
    create(place, dead.text())
    with hold(place):
        assert "container pid:[2]" in place.read_text()
    assert not place.exists(), "the next container could not see that this script has ended"
    create(place, dead.text())
    for module in (lock, processes):
        monkeypatch.setattr(module, "container", lambda: "container pid:[3]")
    with pytest.raises(WangenError, match=r"another run works .* container pid:\[2\]"), hold(place):
        pass


def test_process_ids_of_no_container_need_no_word(monkeypatch):
    monkeypatch.setattr(processes.os, "readlink", lambda _: processes.NO_CONTAINER)
    assert processes.here() == socket.gethostname()
    monkeypatch.setattr(processes.os, "readlink", lambda _: "pid:[4026532201]")
    assert processes.here() == f"{socket.gethostname()}, container pid:[4026532201]"


def test_a_job_leaves_no_lock_for_the_next_which_may_run_on_another_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("WANGEN_SCRIPT", "/x/train_x.sh")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for module in (lock, processes):
        monkeypatch.setattr(module, "container", lambda: "")
    with hold(tmp_path / "script.lock"):
        pass
    assert (tmp_path / "script.lock").exists()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with hold(tmp_path / "job.lock"):
        assert (tmp_path / "job.lock").exists()
    assert not (tmp_path / "job.lock").exists()
