"""The writer: what it refuses, and that entries are whole or absent whatever happens."""

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from cache_entries import ENCODER, LATENT, TEXT, put, recipes, states, tensors

from wangen.generator.errors import WangenError
from wangen.runtime.cache import Folder
from wangen.runtime.cache import writer as cache_writer
from wangen.runtime.cache.writer import Writer, judge_values

# Values


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (0.0, "all zero")]
)
def test_values_that_would_train_garbage_are_refused_with_the_remedy(tmp_path: Path, value: float, words: str):
    bad = {"latent": torch.full((2, 2), value)}
    with pytest.raises(WangenError, match=words) as raised, Writer(tmp_path) as writer:
        writer.put(LATENT, replace(ENCODER, dtype="bfloat16"), bad)
    assert LATENT.name in raised.value.found
    assert "--vae_dtype float32" in raised.value.cure
    with pytest.raises(WangenError) as raised:
        judge_values(TEXT, replace(ENCODER, dtype="float16"), bad)
    assert "--t5_dtype float32" in raised.value.cure
    with pytest.raises(WangenError) as raised:
        judge_values(LATENT, ENCODER, bad)
    assert "damaged" in raised.value.cure
    assert list(tmp_path.iterdir()) == []


def test_a_mask_may_hold_anything():
    tensors = {"embedding": torch.ones(2, 3), "mask": torch.zeros(2, dtype=torch.bool)}
    judge_values(TEXT, ENCODER, tensors)


# The writer


def test_an_error_commits_what_is_whole(tmp_path: Path):
    def interrupted() -> None:
        with Writer(tmp_path) as writer:
            for recipe in recipes(3):
                writer.put(recipe, ENCODER, tensors())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [states(tmp_path, recipe, deep=True) for recipe in recipes(3)] == ["valid"] * 3
    assert not list(tmp_path.glob(".*"))


def test_nothing_is_visible_before_the_commit_and_groups_are_bounded(tmp_path: Path):
    with Writer(tmp_path) as writer:
        for number, recipe in enumerate(recipes(40), 1):
            writer.put(recipe, ENCODER, tensors())
            writer.commit_if_due()
            assert len(list(tmp_path.glob("*.safetensors"))) == number // 32 * 32
    assert writer.num_written == 40


def test_a_file_is_synced_before_it_is_moved_and_the_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    fsync, move = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink() if sys.platform == "linux" else tmp_path / "x"
        calls.append("folder" if target == tmp_path else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", lambda self, target: (calls.append("move"), move(self, target))[1])
    put(tmp_path, *recipes(2))
    if sys.platform == "linux":
        assert calls == ["file", "file", "move", "move", "folder"]


@pytest.mark.parametrize("at", range(7))
def test_ctrl_c_inside_a_commit_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int):
    """The interrupt strikes before or after any of the calls; leaving the writer finishes the work."""
    count = iter(range(100))
    fsync, move = os.fsync, Path.replace

    def strike() -> None:
        if next(count) == at:
            raise KeyboardInterrupt

    def noted_move(self: Path, target: Path) -> Path:
        strike()
        moved = move(self, target)
        strike()
        return moved

    monkeypatch.setattr(os, "fsync", lambda descriptor: (strike(), fsync(descriptor))[1])
    monkeypatch.setattr(Path, "replace", noted_move)

    def interrupted() -> None:
        with Writer(tmp_path) as writer:
            for recipe in recipes(2):
                writer.put(recipe, ENCODER, tensors())
            writer.commit()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [states(tmp_path, recipe, deep=True) for recipe in recipes(2)] == ["valid"] * 2
    assert not list(tmp_path.glob(".*"))


def test_ctrl_c_inside_a_write_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> Any:
        yield b"half"
        raise KeyboardInterrupt

    def write() -> None:
        with Writer(tmp_path) as writer:
            writer.put(recipes(1)[0], ENCODER, tensors())
            calls = iter([cache_writer.serialize, interrupted])
            monkeypatch.setattr(cache_writer, "serialize", lambda *given: next(calls)(*given))
            writer.put(recipes(2)[1], ENCODER, tensors())

    with pytest.raises(KeyboardInterrupt):
        write()
    assert [file.suffix for file in tmp_path.iterdir()] == [".safetensors"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that was just opened
def test_ctrl_c_at_any_call_of_a_write_leaves_a_whole_entry_or_none(tmp_path: Path):
    """Python hears a signal around calls: it strikes at the begin and end of each, in turn, under `put`."""
    recipe, num_kept, num_struck = recipes(1)[0], 0, 0
    put = Writer.put.__code__

    def written(folder: Path, at: int) -> bool:
        inside = False

        def strike(frame: FrameType, event: str, _argument: object) -> None:
            nonlocal inside, at
            inside |= frame.f_code is put
            at -= inside
            if inside and at < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt
            inside &= (frame.f_code, event) != (put, "return")

        try:
            with Writer(folder) as writer:
                sys.setprofile(strike)
                writer.put(recipe, ENCODER, tensors())
                sys.setprofile(None)
        except KeyboardInterrupt:
            return False
        return True

    assert written(tmp_path / "calm", 1_000_000)  # what Python remembers of a first time is no part of it
    while not written(tmp_path / str(num_struck), num_struck):
        folder = tmp_path / str(num_struck)
        state = states(folder, recipe, deep=True)
        assert state in {"missing", "valid"}
        assert not list(folder.glob(".*"))
        num_kept += state == "valid"
        num_struck += 1
    assert num_struck > 100
    assert 0 < num_kept < 5


def test_left_temporary_files_go_after_an_hour_and_only_ours(tmp_path: Path):
    ours, young, foreign = f".{'a' * 20}-{'b' * 16}.tmp", f".{'c' * 20}-{'d' * 16}.tmp", ".document.tmp"
    for name in (ours, young, foreign):
        (tmp_path / name).write_bytes(b"half")
    for name in (ours, foreign):
        os.utime(tmp_path / name, (time.time() - 4000,) * 2)
    put(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {young, foreign}


def test_a_file_in_place_of_the_folder_is_one_message(tmp_path: Path):
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(WangenError, match="cannot make the cache folder") as raised:
        put(tmp_path / "cache", LATENT)
    assert raised.value.cure


def test_a_folder_that_vanishes_is_one_message(tmp_path: Path):
    def write() -> None:
        with Writer(tmp_path / "a") as writer:
            (tmp_path / "a").rmdir()
            writer.put(LATENT, ENCODER, tensors())

    with pytest.raises(WangenError, match="cannot write the cache entry"):
        write()


def test_a_full_disk_says_how_much_is_to_be_written_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Writer(tmp_path) as writer:
        assert writer.claim(LATENT, ENCODER) == "mine"
        writer.put(LATENT, ENCODER, tensors())
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(
            WangenError, match=r"No space left on device; \d+ bytes are to be written, .* are free"
        ) as raised:
            writer.commit()
        monkeypatch.undo()
        assert raised.value.where == str(tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert writer.claim(LATENT, ENCODER) == "mine"


def test_a_temporary_file_that_somebody_removed_is_no_entry_written(tmp_path: Path):
    with Writer(tmp_path) as writer:
        writer.put(LATENT, ENCODER, tensors())
        next(tmp_path.glob(".*.tmp")).unlink()
        with pytest.raises(WangenError, match="somebody removed its temporary file"):
            writer.commit()
    assert writer.num_written == 0


WRITE_ALL = """
import sys, pathlib, cache_entries as t
for _ in range(3):
    t.put(pathlib.Path(sys.argv[1]), *t.recipes(60))
"""


@pytest.mark.slow
def test_two_processes_may_write_one_folder_at_once(tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", WRITE_ALL, str(tmp_path)]
    running = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    folder = Folder(tmp_path, deep=True)
    assert len(folder.all_entries) == 60
    assert not folder.corrupt
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_writer_killed_at_any_moment_leaves_whole_entries(tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen([sys.executable, "-c", WRITE_ALL, str(tmp_path)], env=environment)
    while not list(tmp_path.glob("*.safetensors")) and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    folder = Folder(tmp_path, deep=True)
    assert folder.all_entries
    assert not folder.corrupt
