"""Which commit this wangen is: written into the package when it is built, or read from the clone that it runs in."""

import re
from pathlib import Path

FILE = Path(__file__).with_name("commit.txt")
"""Holds the commit in an installed package; `setup.py` writes it there."""

_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def commit() -> str:
    """The commit, 40 (or 64) hex digits; empty when nobody knows."""
    return _read(FILE) or commit_of_clone(FILE.parent.parent)


def commit_of_clone(folder: Path) -> str:
    """What a clone, or a work tree of one, has checked out; empty for any other folder. git itself is not needed."""
    git = folder / ".git"
    if (link := re.fullmatch(r"gitdir: (.+)", _text(git))) is not None:
        git = folder / link[1]
    head = _text(git / "HEAD")
    if not head.startswith("ref: "):
        return head if _COMMIT.fullmatch(head) else ""
    name = head.removeprefix("ref: ")
    common = git / (_text(git / "commondir") or ".")
    return next((found for place in (git, common) if (found := _read(place / name))), "") or _packed(common, name)


def _packed(git: Path, name: str) -> str:
    """The commit of a reference that git has moved into its list."""
    for line in _text(git / "packed-refs").splitlines():
        found, _, of = line.partition(" ")
        if of == name and _COMMIT.fullmatch(found):
            return found
    return ""


def _read(path: Path) -> str:
    text = _text(path)
    return text if _COMMIT.fullmatch(text) else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError, ValueError):
        return ""


def version_words() -> str:
    """The version of wangen, with its commit where it is known."""
    from importlib.metadata import version

    known = commit()
    return f"wangen {version('wangen')}" + (f" (commit {known[:12]})" if known else "")
