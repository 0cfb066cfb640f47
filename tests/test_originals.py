"""A script's first step says that the originals have changed since: what it trains on are copies and links."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from helpers import image_bytes, write_tree

from wangen.generator.cli import main
from wangen.generator.originals import changes_since

TOML = 'resolution = [64, 64]\nnum_frames = 17\nplatforms = ["linux"]\n'
SAID = "the dataset or its settings have changed since it was published ({}); publish again: wangen publish cats"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    pictures = {f"datasets/cats/{name}.png": image_bytes(seed=seed) for seed, name in enumerate("ab")}
    captions = {f"datasets/cats/{name}.txt": f"a cat {name}" for name in "ab"}
    place = write_tree(tmp_path / "ws", {"wangen.toml": TOML, **pictures, **captions})
    assert main(["publish", "cats", "--workspace", str(place)]) == 0
    return place


def script(place: Path) -> Path:
    return place / "published/linux/train_cats.sh"


def test_what_was_not_touched_is_not_spoken_of(place):
    assert changes_since(script(place)) == ""


def test_each_change_of_the_originals_is_counted(place):
    folder = place / "datasets/cats"
    (folder / "a.txt").write_text("a cat that looks left")
    assert changes_since(script(place)) == SAID.format("1 changed")
    (folder / "new.png").write_bytes(image_bytes(seed=7))  # as an editor saves: another file under the same name
    (folder / "new.png").replace(folder / "b.png")
    write_tree(folder, {"c.png": image_bytes(seed=9), "c.txt": "a third"})
    assert changes_since(script(place)) == SAID.format("2 new, 2 changed")


def test_the_check_of_a_script_warns_and_its_verdict_stays(place, monkeypatch, capsys):
    monkeypatch.setenv("WANGEN_SCRIPT", str(script(place)))
    monkeypatch.chdir(place / "published/linux")
    (toml,) = (place / "published/linux").rglob("cats*.toml")
    words = ["check", "--dataset_config", str(toml), "--task", "t2v-1.3B"]
    verdict = main(words)  # there are no weights for its other steps
    assert "changed since" not in capsys.readouterr().err
    (place / "datasets/cats/a.txt").write_text("another")
    assert main(words) == verdict
    assert SAID.format("1 changed") in capsys.readouterr().err


def test_originals_on_a_drive_that_does_not_answer_stop_no_training(place, monkeypatch):
    listed = os.scandir

    def stale(path="."):
        if Path(path) == place / "datasets/cats":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", stale)
    monkeypatch.setattr(os, "listdir", lambda path=".": [entry.name for entry in stale(path)])
    assert changes_since(script(place)) == ""


@pytest.mark.parametrize("what", ["bundle", "originals", "settings"])
def test_where_nobody_can_know_nothing_is_said(place, tmp_path, what):
    (place / "datasets/cats/a.txt").write_text("another")
    at = script(place)
    if what == "bundle":  # on another machine
        at = shutil.copytree(at.parent, tmp_path / "elsewhere") / at.name
    elif what == "originals":
        shutil.rmtree(place / "datasets")
    else:
        (place / "wangen.toml").write_text("resolution = 'x'\n")
    assert changes_since(at) == ""
