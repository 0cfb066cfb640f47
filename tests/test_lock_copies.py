"""Locks that were copied with their folder, beside those that were not."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from wangen.generator import lock
from wangen.generator.errors import WangenError
from wangen.generator.lock import Owner, busy, hold, this_process


@pytest.fixture
def held(tmp_path: Path):
    """The lock of a live run."""
    path = tmp_path / "bundle" / "outputs" / "run.lock"
    with hold(path):
        yield path


def copied(path: Path) -> Path:
    """The same lock in a copy of the bundle."""
    bundle = path.parents[1]
    return shutil.copytree(bundle, bundle.with_name("copy"), symlinks=True) / path.relative_to(bundle)


def change(path: Path, **values: Any) -> None:
    """Write other values into a lock; None takes one away."""
    changed = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}), encoding="utf-8")


def require_busy(path: Path) -> None:
    assert busy(path)
    with pytest.raises(WangenError, match=f"process {os.getpid()} on"), hold(path):
        pass


def test_the_lock_in_a_copy_of_the_folder_is_free(held: Path):
    copy = copied(held)
    require_busy(held)
    assert busy(copy) is None
    with hold(copy):
        require_busy(copy)
        require_busy(held)
    assert not copy.exists()
    lock.require_own(held)


def test_a_copy_is_still_known_when_the_next_step_has_renewed_the_lock(held: Path):
    lock._renew(held, this_process())
    require_busy(held)
    assert busy(copied(held)) is None


@pytest.mark.skipif(os.name == "nt", reason="Windows moves no folder in which a file is open")
def test_a_folder_that_was_moved_is_no_copy(held: Path):
    moved = held.parents[1].rename(held.parents[2] / "moved") / "outputs" / "run.lock"
    require_busy(moved)
    moved.parents[1].rename(held.parents[1])


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_link_to_the_folder_is_no_copy(held: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(held.parent, target_is_directory=True)
    require_busy(tmp_path / "link" / "run.lock")


@pytest.mark.parametrize("inode", [0, 987654321])
def test_inodes_that_are_missing_or_made_up_anew_free_no_lock(held: Path, monkeypatch, inode: int):
    """As on FUSE and some network drives; 0 where there are none."""
    monkeypatch.setattr(lock, "_folder", lambda path: (inode, str(path.parent.resolve())))
    require_busy(held)
    if not inode:
        require_busy(copied(held))


@pytest.mark.parametrize("folder", [None, [0, "/elsewhere"], [1], "x", 7, [], [5, "/a", 6]])
def test_a_lock_of_an_earlier_version_or_one_without_inodes_stays_as_it_was(held: Path, folder: Any):
    copy = copied(held)
    change(copy, folder=folder)
    require_busy(copy)


def test_whether_a_lock_of_another_machine_is_a_copy_is_not_asked(held: Path):
    """It may give the same folder another number, and another path."""
    copy = copied(held)
    change(copy, host="elsewhere")
    assert busy(copy)
    with pytest.raises(WangenError, match="on elsewhere"), hold(copy):
        pass


def test_what_a_lock_says_of_its_folder_is_not_who_holds_it(held: Path):
    """Else one that is made again in a new folder would be another's."""
    assert Owner.parse(held.read_text()) == Owner.parse(this_process().text())
