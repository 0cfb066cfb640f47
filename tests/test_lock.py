"""One run at a time, between real processes."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from wangen.generator import lock, processes
from wangen.generator.errors import WangenError
from wangen.generator.files import whose
from wangen.generator.lock import GAP_S, LEASE_S, Owner, hold

HOLD = """
import sys
from pathlib import Path
from wangen.generator.errors import WangenError
from wangen.generator.files import whose
from wangen.generator.lock import hold
try:
    with hold(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.readline()
except WangenError as error:
    print("refused", flush=True)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "outputs" / "run.lock"


@pytest.fixture
def holder(path):
    """Start a process that holds the lock until it is told to end; gives the function that starts one."""
    running = []

    def start(*before: str, **env: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*before, sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | env,
        )  # fmt: skip
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def write(path: Path, text: str, age_s: float = 0.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    then = time.time() - age_s
    os.utime(path, (then, then))


def here(pid: int, started: float | None = None) -> processes.Process:
    return processes.identity(psutil.Process(pid)) if started is None else (pid, started)


def owner(run: processes.Process, step: processes.Process | None = None, host: str | None = None) -> str:
    return Owner(host or processes.here(), run, step or run).text()


@pytest.fixture
def dead():
    process = subprocess.Popen([sys.executable, "-c", ""])
    identity = here(process.pid)
    process.wait()
    return identity


def test_held_while_the_block_runs_and_released_at_its_end(path):
    with hold(path):
        assert json.loads(path.read_text())["step"][0] == os.getpid()
    assert not path.exists()
    assert list(path.parent.iterdir()) == []


def test_released_when_the_block_fails(path):
    with pytest.raises(KeyboardInterrupt), hold(path):
        raise KeyboardInterrupt
    assert not path.exists()


def test_released_when_a_signal_comes_while_it_begins_to_beat(path, monkeypatch):
    def interrupted(thread):
        raise KeyboardInterrupt

    monkeypatch.setattr(lock.threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), hold(path):
        pytest.fail("it did not begin")
    assert not path.exists()


def test_no_lock_asked_for_locks_nothing(tmp_path):
    with hold(None):
        assert list(tmp_path.iterdir()) == []


def test_a_second_live_run_is_refused_and_the_first_named(path, holder):
    first = holder()
    with pytest.raises(WangenError) as caught, hold(path):
        pass
    assert f"process {first.pid} on {processes.here()}" in str(caught.value)
    assert str(path) in caught.value.where
    assert caught.value.cure == "wait for it to end or stop it"
    first.communicate("\n")
    assert first.returncode == 0
    with hold(path):
        pass


def test_who_waits_takes_the_lock_when_the_first_has_ended(path, holder, monkeypatch, caplog):
    first = holder()
    monkeypatch.setattr(lock.time, "sleep", lambda _: first.communicate("\n"))
    with caplog.at_level("INFO", logger="wangen"), hold(path, waits=True):
        assert json.loads(path.read_text())["step"][0] == os.getpid()
    assert caplog.messages[0].startswith(f"  waiting: another run works on this dataset: process {first.pid} on ")


def test_the_lock_of_a_killed_run_is_taken_over_at_once(path, holder):
    first = holder()
    first.kill()
    first.wait()
    assert path.exists()
    with hold(path):
        assert Owner.parse(path.read_text()).step[0] == os.getpid()
    assert list(path.parent.iterdir()) == []


def test_a_process_id_that_is_used_again_is_another_process(path):
    write(path, owner(here(os.getppid(), started=1.0)))
    with hold(path):
        pass


def test_of_many_that_want_it_exactly_one_gets_it(path, dead):
    write(path, owner(dead))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    first_words = [process.stdout.readline().strip() for process in processes]
    for process in processes:
        process.communicate("\n")
    assert sorted(first_words) == ["held"] + ["refused"] * 5
    assert sorted(process.returncode for process in processes) == [0, 1, 1, 1, 1, 1]
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(("age_s", "free"), [(LEASE_S - 60, False), (LEASE_S + 60, True)])
def test_another_machine_counts_as_gone_when_it_has_not_beaten_for_long(path, age_s, free):
    write(path, owner((1, 1.0), host="elsewhere"), age_s)
    if free:
        with hold(path):
            pass
    else:
        with pytest.raises(WangenError, match="on elsewhere, last sign of life"), hold(path):
            pass
    assert path.exists() != free


def test_a_sign_of_life_of_a_clock_that_is_ahead_is_told_as_such(path):
    write(path, owner((1, 1.0), host="elsewhere"), -1000)
    words = r"on elsewhere, last sign of life \d+ s ahead of this machine's clock"
    with pytest.raises(WangenError, match=words) as told, hold(path):
        pass
    assert told.value.cure == "wait for it to end or stop it; if it is dead, remove this file"


@pytest.mark.parametrize(
    "text",
    ["", '{"ho', '{"host": "x", "run": [1', '{"host": "h"}', '{"host": "h", "run": [], "step": 1}'],
)
def test_a_half_written_file_is_waited_for_a_moment_then_replaced(path, text):
    write(path, text)
    with pytest.raises(WangenError, match="just starting"), hold(path):
        pass
    write(path, text, age_s=60)
    with hold(path):
        pass
    assert not path.exists()


def test_nothing_but_zero_bytes_is_a_lock_that_a_power_loss_has_cut_off(path, dead):
    for length in (len(owner(dead)), 400):
        write(path, "\0" * length)
        with pytest.raises(WangenError, match="just starting"), hold(path):
            pass
        write(path, "\0" * length, age_s=60)
        assert lock.busy(path) is None
        with hold(path):
            pass
    assert not path.exists()
    write(path, "\0" * 100_000, age_s=60)
    with pytest.raises(WangenError, match="no lock is in the place of the lock"), hold(path):
        pass


@pytest.mark.parametrize("text", ["resolution = 512\n", "[]", "null", "\x00", "a caption", "\n"])
def test_a_file_of_the_users_is_no_lock_and_stays(path, text):
    write(path, text, age_s=1000)
    with pytest.raises(WangenError, match="no lock is in the place of the lock"), hold(path):
        pass
    assert path.read_text() == text


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_a_link_to_nowhere_is_no_lock_and_nobody_is_waited_for(tmp_path):
    (tmp_path / "run.lock").symlink_to("nowhere")
    with pytest.raises(WangenError, match="no lock is in the place of the lock"), hold(tmp_path / "run.lock"):
        pass
    assert (tmp_path / "run.lock").is_symlink()


@pytest.mark.parametrize("pid", [0, -1, 2**40, 2**70])
def test_no_process_has_such_an_id(path, pid):
    write(path, owner((pid, 1.0)))
    with hold(path):
        pass


def test_the_lock_beats(path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.02)
    with hold(path):
        os.utime(path, (1, 1))
        until = time.time() + 5
        while path.stat().st_mtime < 2 and time.time() < until:
            time.sleep(0.01)
        assert time.time() - path.stat().st_mtime < 5


def test_the_lock_of_another_does_not_beat_and_one_that_is_gone_is_made_again(path, dead, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.02)
    with hold(path):
        mine = path.read_text()
        path.unlink()
        until = time.time() + 5
        while not path.exists() and time.time() < until:
            time.sleep(0.01)
        assert path.read_text() == mine
        lock.require_own(path)
        write(path, owner(dead))
        os.utime(path, (1, 1))
        time.sleep(0.1)
        assert path.stat().st_mtime == 1
        with pytest.raises(WangenError, match="has taken this folder over"):
            lock.require_own(path)
    path.unlink()
    lock.require_own(path)


def test_another_runs_lock_is_not_removed_at_the_end(path, dead):
    with hold(path):
        write(path, owner(dead))
    assert path.exists()


def test_a_folder_that_cannot_be_made(path):
    write(path.parent.parent / "file", "x")
    with (
        pytest.raises(WangenError, match="cannot write the lock file") as caught,
        hold(path.parent.parent / "file" / "l"),
    ):
        pass
    assert caught.value.cure.startswith("a file bears the name of a folder above it: move the file away")


# ---- in a script -------------------------------------------------------------------------------------------------

needs_sh = pytest.mark.skipif(os.name == "nt", reason="runs a POSIX shell")


@needs_sh
def test_a_script_keeps_the_lock_between_its_steps_and_no_longer(path):
    step = f"'{sys.executable}' -c '{HOLD}' '{path}'"
    script = subprocess.Popen(
        ["sh", "-c", f"{step} && echo between && read pause && {step} && echo end"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=os.environ | {"WANGEN_SCRIPT": "1"},
    )  # fmt: skip
    assert script.stdin is not None
    assert script.stdout is not None
    try:
        for word in ("held", "between", "held"):
            assert script.stdout.readline() == f"{word}\n"
            assert Owner.parse(path.read_text()).run == here(script.pid)
            with pytest.raises(WangenError, match=f"process {script.pid} "), hold(path):
                pass
            script.stdin.write("\n")
        assert script.stdout.readline() == "end\n"
    finally:
        script.kill()
        script.communicate()
    with hold(path):
        pass


def test_a_script_run_inside_a_terminal_that_lives_on_frees_the_lock_after_a_while(path, dead):
    terminal = here(os.getppid())
    write(path, owner(terminal, step=dead), age_s=GAP_S - 30)
    with pytest.raises(WangenError, match=f"process {terminal[0]} "), hold(path):
        pass
    write(path, owner(terminal, step=dead), age_s=GAP_S + 30)
    with hold(path):
        pass


def test_a_step_whose_script_was_killed_holds_the_lock(path, dead):
    """It goes on unseen: a second one beside it would share the card, and throw away what it has not saved."""
    write(path, owner(dead, here(os.getpid())), 2 * GAP_S)
    with pytest.raises(WangenError, match=f"process {os.getpid()} on"), hold(path):
        pass


def test_a_step_that_lives_holds_the_lock_however_old_its_heartbeat(path):
    """A computer that slept."""
    terminal = here(os.getppid())
    write(path, owner(terminal), age_s=10_000)
    with pytest.raises(WangenError, match="10000 s ago"), hold(path):
        pass


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="the system says no time since it booted")
def test_a_clock_that_is_set_anew_frees_no_lock(path, monkeypatch):
    """As that of WSL after the machine has slept: all processes would have other start times."""
    with hold(path):
        real = psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: real(process) + 3600)
        with pytest.raises(WangenError, match="another run"), hold(path):
            pass


def test_a_lock_is_made_on_a_file_system_without_links(tmp_path, monkeypatch):
    def no_links(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no links")

    monkeypatch.setattr(os, "link", no_links)
    assert lock.create(tmp_path / "a.lock", "mine")
    assert not lock.create(tmp_path / "a.lock", "another")
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]
    assert (tmp_path / "a.lock").read_text() == "mine"


def test_what_was_left_by_who_was_killed_while_taking_the_lock_is_removed(path, dead):
    path.parent.mkdir()
    mine = path.with_name(f".{path.name}-{whose()}.tmp")
    left = path.with_name(mine.name.replace(f"{os.getpid():08x}", f"{dead[0]:08x}"))
    for file in (mine, left):
        file.write_text("half")
    with hold(path):
        assert mine.exists()
        assert not left.exists()


def test_a_folder_in_the_place_of_the_lock_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WangenError, match="cannot write the lock file: Is a directory") as caught, hold(Path()):
        pass
    assert caught.value.cure.startswith("a folder bears the name of the lock: move it away")
    assert list(tmp_path.iterdir()) == []
