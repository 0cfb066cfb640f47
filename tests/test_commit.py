"""Which commit a clone has checked out, read without git."""

import subprocess
from pathlib import Path

import pytest

from wangen.generator import commit
from wangen.generator.commit import commit_of_clone

ONE = "1" * 40


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def clone(tmp_path):
    """A repository with one commit."""
    folder = tmp_path / "clone"
    folder.mkdir()
    try:
        git(folder, "init")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    git(folder, "commit", "--allow-empty", "-m", "one")
    return folder


def test_a_branch_and_a_detached_head(clone):
    head = git(clone, "rev-parse", "HEAD")
    assert commit_of_clone(clone) == head
    git(clone, "checkout", "--detach")
    assert commit_of_clone(clone) == head


def test_references_that_git_has_packed(clone):
    git(clone, "pack-refs", "--all")
    assert not (clone / ".git/refs/heads/main").exists()
    assert commit_of_clone(clone) == git(clone, "rev-parse", "HEAD")


def test_a_work_tree_of_its_own(clone):
    git(clone, "worktree", "add", "-b", "other", "../other")
    other = clone.parent / "other"
    git(other, "commit", "--allow-empty", "-m", "two")
    assert commit_of_clone(other) == git(other, "rev-parse", "HEAD") != commit_of_clone(clone)
    git(clone, "pack-refs", "--all")
    assert commit_of_clone(other) == git(other, "rev-parse", "HEAD")


@pytest.mark.parametrize("head", [None, b"", b"ref: refs/heads/none", b"\xff\xfe", b"ref: \x00", b"not a commit"])
def test_nothing_is_known_of_other_folders_and_broken_clones(tmp_path, head):
    if head is not None:
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git/HEAD").write_bytes(head)
    assert commit_of_clone(tmp_path) == ""


def test_what_the_build_wrote_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(commit, "FILE", tmp_path / "generator" / "commit.txt")
    assert commit.commit() == ""
    assert "commit" not in commit.version_words()
    commit.FILE.parent.mkdir()
    commit.FILE.write_text(ONE + "\n")
    assert commit.commit() == ONE
    assert commit.version_words().endswith(f" (commit {ONE[:12]})")
