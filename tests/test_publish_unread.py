"""A bad disk or a network drive that does not answer for a moment: publishing and cleaning take nothing for edited."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import image_bytes, read_tree, write_tree

from wangen.generator.cli import main


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A workspace with a published picture."""
    tree: dict[str, bytes | str] = {"wangen.toml": 'resolution = [64, 64]\nplatforms = ["linux"]\n'}
    place = write_tree(tmp_path, tree | {"datasets/cats/a.png": image_bytes(), "datasets/cats/a.txt": "a cat"})
    assert main(["publish", "cats", "--workspace", str(place)]) == 0
    return place


def refuse(monkeypatch: pytest.MonkeyPatch, function: str, refused: Callable[[Path], bool]) -> None:
    """Have a method of paths, or one of `os`, answer with an input/output error for some of them."""
    owner = Path if function == "read_bytes" else os
    real = getattr(owner, function)

    def asked(path: Any = ".", *rest: Any, **more: Any) -> Any:
        if refused(Path(path)):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(owner, function, asked)


def published(place: Path) -> Path:
    return place / "published/linux/files/datasets/cats/64"


def test_a_caption_that_cannot_be_read_in_the_bundle_is_not_called_edited(place, monkeypatch, capsys):
    (place / "datasets/cats/a.txt").write_text("a dog")
    before = read_tree(place / "published")
    own = published(place) / "a.txt"
    with monkeypatch.context() as patch:
        refuse(patch, "read_bytes", lambda path: path == own)
        assert main(["publish", "cats", "--workspace", str(place)]) == 1
    said = capsys.readouterr().err
    assert f"cannot be read: {os.strerror(errno.EIO)}\n  where: {own}" in said
    assert read_tree(place / "published") == before
    assert main(["publish", "cats", "--workspace", str(place)]) == 0
    assert own.read_text() == "a dog"


def test_clean_leaves_what_it_cannot_read_and_says_why(place, monkeypatch, capsys):
    own = published(place) / "a.txt"
    with monkeypatch.context() as patch:
        refuse(patch, "read_bytes", lambda path: path == own)
        main(["clean", "cats", "--workspace", str(place), "--bundle"])
    said = capsys.readouterr()
    assert f"cannot be read: {os.strerror(errno.EIO)}" in said.out + said.err
    assert own.exists()


def test_a_dataset_that_cannot_be_listed_is_not_called_absent(place, monkeypatch, capsys):
    folder = place / "datasets/cats"
    with monkeypatch.context() as patch:
        refuse(patch, "scandir", lambda path: path == folder)
        assert main(["check", "cats", "--workspace", str(place)]) == 1
    said = capsys.readouterr()
    assert "the dataset is not on this machine" not in said.out + said.err
    assert f"cannot list the folder: {os.strerror(errno.EIO)}" in said.out + said.err
