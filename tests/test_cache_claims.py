"""Claims on entries, between writers, threads and real processes."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from cache_entries import ENCODER, LATENT, TEXT, put, recipes, states, tensors

from wangen.generator.errors import WangenError
from wangen.generator.files import ABANDONED_S
from wangen.generator.lock import LEASE_S, START_S, Owner
from wangen.generator.processes import here, identity
from wangen.runtime.cache import Folder, claims
from wangen.runtime.cache.claims import Claims
from wangen.runtime.cache.leftovers import sweep, temporary_name
from wangen.runtime.cache.writer import Writer

KEY = LATENT.key(ENCODER)
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture(scope="module")
def dead() -> tuple[int, float]:
    """A process that has ended: its number and start."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = psutil.Process(process.pid).create_time()
    process.communicate(b"\n")
    return process.pid, started


def write_claim(path: Path, process: tuple[int, float], host: str | None = None, age_s: float = 0.0) -> str:
    """A claim of another process; returns its id."""
    path.parent.mkdir(parents=True, exist_ok=True)
    id = os.urandom(8).hex()
    path.write_text(json.dumps({"id": id} | asdict(Owner(host or here(), process, process))))
    os.utime(path, (time.time() - age_s,) * 2)
    return id


def parent() -> tuple[int, float]:
    """Some other process that lives."""
    return os.getppid(), psutil.Process(os.getppid()).create_time()


def hidden(folder: Path) -> set[str]:
    return {path.name for path in folder.glob(".*")}


def ask(folder: Path) -> str:
    with Writer(folder) as writer:
        return writer.claim(LATENT, ENCODER)


# One writer


def test_a_claim_is_held_until_the_commit_of_its_entry(tmp_path: Path):
    with Writer(tmp_path) as writer:
        assert writer.claim(LATENT, ENCODER) == writer.claim(LATENT, ENCODER) == "mine"
        assert writer.claim(TEXT, ENCODER) == "mine"
        assert hidden(tmp_path) == {f".claim-{KEY}", f".claim-{TEXT.key(ENCODER)}"}
        assert ask(tmp_path) == "theirs"
        writer.put(LATENT, ENCODER, tensors())
        assert ask(tmp_path) == "theirs"
        writer.commit()
        assert hidden(tmp_path) == {f".claim-{TEXT.key(ENCODER)}"}
        assert ask(tmp_path) == "done"
    assert hidden(tmp_path) == set()
    assert writer.num_bytes == (tmp_path / LATENT.file_name(ENCODER)).stat().st_size


def test_leaving_by_an_error_gives_all_back(tmp_path: Path):
    def fail() -> None:
        with Writer(tmp_path) as writer:
            assert writer.claim(LATENT, ENCODER) == "mine"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert hidden(tmp_path) == set()
    assert ask(tmp_path) == "mine"


def test_a_damaged_entry_is_not_done(tmp_path: Path):
    (path,) = put(tmp_path, LATENT)
    path.write_bytes(path.read_bytes()[:-1])
    assert ask(tmp_path) == "mine"


def test_encoding_again_passes_over_only_what_is_newer(tmp_path: Path):
    (path,) = put(tmp_path, LATENT)
    os.utime(path, (1e9, 1e9))
    with Writer(tmp_path, again=True) as writer:
        assert writer.claim(LATENT, ENCODER) == "mine"
    with Writer(tmp_path, again=True) as writer:
        put(tmp_path, LATENT)
        assert writer.claim(LATENT, ENCODER) == "done"


def test_a_read_only_folder_is_one_message(tmp_path: Path):
    def claim() -> None:
        with Writer(tmp_path / "cache") as writer:
            (tmp_path / "cache").rmdir()
            writer.claim(LATENT, ENCODER)

    with pytest.raises(WangenError, match="cannot write the cache entry"):
        claim()


def test_a_claim_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    claim = tmp_path / f".claim-{LATENT.key(ENCODER)}"
    claim.write_text("of another user")
    read = Path.read_text

    def denied(path: Path, *words: object, **named: object) -> str:
        if path == claim:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path, *words, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", denied)
    with Writer(tmp_path) as writer, pytest.raises(WangenError, match="Permission denied") as error:
        writer.claim(LATENT, ENCODER)
    assert error.value.where == str(claim)


# Who holds it


def test_a_live_process_holds_its_claim_whatever_its_age(tmp_path: Path):
    write_claim(tmp_path / f".claim-{KEY}", parent(), age_s=10 * LEASE_S)
    assert ask(tmp_path) == "theirs"
    assert hidden(tmp_path) == {f".claim-{KEY}"}


def test_a_dead_process_is_taken_over_from_at_once_and_leaves_nothing(tmp_path: Path, dead: Any):
    write_claim(tmp_path / f".claim-{KEY}", dead)
    claimant = Claims(tmp_path)
    assert claimant.take(KEY)
    assert not Claims(tmp_path).take(KEY)
    claimant.close()
    assert hidden(tmp_path) == set()


def test_a_process_number_that_is_used_again_holds_nothing(tmp_path: Path):
    write_claim(tmp_path / f".claim-{KEY}", (os.getppid(), 1.0))
    assert ask(tmp_path) == "mine"


def test_what_this_process_left_behind_is_free(tmp_path: Path):
    """A writer that was broken off without being left, as in a notebook."""
    me = psutil.Process()
    write_claim(tmp_path / f".claim-{KEY}", identity(me))
    assert ask(tmp_path) == "mine"


@pytest.mark.parametrize(("age_s", "word"), [(LEASE_S - 60, "theirs"), (LEASE_S + 60, "mine")])
def test_another_machine_has_a_lease(tmp_path: Path, age_s: float, word: str):
    write_claim(tmp_path / f".claim-{KEY}", (1, 1.0), host="elsewhere", age_s=age_s)
    assert ask(tmp_path) == word


@pytest.mark.parametrize("text", ["", "{", '{"id": 3}', '{"id": "../../x", "host": 1}', "[]"])
def test_a_half_written_claim_counts_for_a_moment(tmp_path: Path, text: str):
    path = tmp_path / f".claim-{KEY}"
    path.write_text(text)
    assert ask(tmp_path) == "theirs"
    os.utime(path, (time.time() - START_S - 1,) * 2)
    assert ask(tmp_path) == "mine"
    assert hidden(tmp_path) == set()


def test_claims_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(claims, "HEARTBEAT_S", 0.01)
    claimant = Claims(tmp_path)
    claimant.take(KEY)
    path = tmp_path / f".claim-{KEY}"
    os.utime(path, (1e9, 1e9))
    while path.stat().st_mtime < 1e9 + 1:
        time.sleep(0.01)
    claimant.close()
    assert not path.exists()


# Taking over


def test_of_two_that_found_it_free_one_gets_it(tmp_path: Path, dead: Any, monkeypatch: pytest.MonkeyPatch):
    """The second one takes it whole between the first one's look and its own claim."""
    write_claim(tmp_path / f".claim-{KEY}", dead)
    first, second = Claims(tmp_path), Claims(tmp_path)
    create = claims.lock.create
    results = []

    def slow(path: Path, text: str) -> bool:
        monkeypatch.setattr(claims.lock, "create", create)
        results.append(second.take(KEY))
        return create(path, text)

    monkeypatch.setattr(claims.lock, "create", slow)
    results.append(first.take(KEY))
    assert results == [True, False]
    second.close()
    assert hidden(tmp_path) == set()


def test_who_takes_over_a_chain_that_was_released_meanwhile_gets_nothing(
    tmp_path: Path, dead: Any, monkeypatch: pytest.MonkeyPatch
):
    """Else a third process, which finds no claim, and this one would both hold it."""
    write_claim(tmp_path / f".claim-{KEY}", dead)
    first, second, third = Claims(tmp_path), Claims(tmp_path), Claims(tmp_path)
    create = claims.lock.create

    def slow(path: Path, text: str) -> bool:
        monkeypatch.setattr(claims.lock, "create", create)
        assert second.take(KEY)
        second.close()
        assert third.take(KEY)
        return create(path, text)

    monkeypatch.setattr(claims.lock, "create", slow)
    assert not first.take(KEY)
    assert hidden(tmp_path) == {f".claim-{KEY}"}
    third.close()


def test_who_was_taken_over_removes_nothing_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine slept longer than its lease."""
    slept, taker = Claims(tmp_path), Claims(tmp_path)
    slept.take(KEY)
    monkeypatch.setattr(claims.lock, "is_free", lambda *_: True)
    monkeypatch.setattr(claims, "_HELD", set())
    assert taker.take(KEY)
    before = hidden(tmp_path)
    assert len(before) == 2
    slept.close()
    assert hidden(tmp_path) == before
    taker.close()
    assert hidden(tmp_path) == set()


def test_a_chain_of_the_dead_goes_with_the_next_claim(tmp_path: Path, dead: Any):
    id = write_claim(tmp_path / f".claim-{KEY}", dead)
    for _ in range(3):
        id = write_claim(tmp_path / f".claim-{KEY}-{id}", dead)
    assert len(hidden(tmp_path)) == 4
    assert ask(tmp_path) == "mine"
    assert hidden(tmp_path) == set()


# What the dead leave


def test_what_dead_writers_left_is_removed_and_only_that(tmp_path: Path, dead: Any):
    other = recipes(2)[1].key(ENCODER)
    write_claim(tmp_path / f".claim-{KEY}", dead)
    write_claim(tmp_path / f".claim-{KEY}-{'a' * 16}", dead)  # no chain leads to it
    write_claim(tmp_path / f".claim-{other}", parent())
    mine = temporary_name(KEY)
    left = mine.replace(f"{os.getpid():08x}", f"{dead[0]:08x}")
    elsewhere = f".{KEY}-{'0' * 16}{'1' * 8}.tmp"
    claims_left = [left.replace(KEY, f".claim-{KEY}"), left.replace(KEY, f".claim-{KEY}-{'a' * 16}")]
    reports_left = [left.replace(KEY, f"cache_{part}.report.json") for part in ("latents-3", "text-2-of-8", "text")]
    for name in (mine, left, *claims_left, *reports_left, elsewhere, ".document.tmp", ".claim-mine"):
        (tmp_path / name).write_bytes(b"half")
    assert sweep(tmp_path) == 8
    stays = {f".claim-{other}", mine, elsewhere, ".document.tmp", ".claim-mine"}
    assert hidden(tmp_path) == stays
    for name in stays:
        os.utime(tmp_path / name, (time.time() - ABANDONED_S - 9,) * 2)
    assert sweep(tmp_path) == 2
    assert hidden(tmp_path) == {f".claim-{other}", ".document.tmp", ".claim-mine"}
    assert sweep(tmp_path / "none") == 0


# Real processes

SHARE = """
import sys, time, pathlib, cache_entries as t
from wangen.runtime.cache.writer import Writer
wait_s = float(sys.argv[2])
with Writer(pathlib.Path(sys.argv[1])) as writer:
    todo = t.recipes(40)
    while todo:
        theirs = []
        for recipe in todo:
            word = writer.claim(recipe, t.ENCODER)
            if word == "mine":
                print(recipe.name, flush=True)
                time.sleep(wait_s)
                writer.put(recipe, t.ENCODER, t.tensors())
                writer.commit()
            elif word == "theirs":
                theirs.append(recipe)
        todo = theirs
        time.sleep(0.01)
"""


def start(folder: Path, wait_s: float = 0.002) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SHARE, str(folder), str(wait_s)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_share_the_work_and_none_is_done_twice(tmp_path: Path, dead: Any):
    for recipe in recipes(40)[:10]:
        write_claim(tmp_path / f".claim-{recipe.key(ENCODER)}", dead)
    running = [start(tmp_path) for _ in range(3)]
    done = Counter(line for process in running for line in process.communicate(timeout=90)[0].split())
    assert [process.returncode for process in running] == [0, 0, 0]
    assert done == Counter(recipe.name for recipe in recipes(40))
    assert len(Folder(tmp_path, deep=True).all_entries) == 40
    assert hidden(tmp_path) == set()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_what_a_killed_process_held_is_taken_over_and_no_more_is_done_twice(tmp_path: Path):
    first = start(tmp_path, 0.02)
    assert first.stdout
    begun = [first.stdout.readline().strip() for _ in range(5)]
    first.send_signal(signal.SIGKILL)
    begun += first.communicate()[0].split()
    kept = {recipe.name for recipe in recipes(40) if states(tmp_path, recipe) == "valid"}
    assert len(kept) >= len(begun) - 1
    second = start(tmp_path, 0.0)
    assert set(second.communicate(timeout=60)[0].split()) == {recipe.name for recipe in recipes(40)} - kept
    assert second.returncode == 0
    assert len(Folder(tmp_path, deep=True).all_entries) == 40
    assert hidden(tmp_path) == set()
