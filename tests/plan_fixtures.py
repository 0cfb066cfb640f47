"""A published workspace for the tests of `wangen plan`; a test file asks for it with `pytest_plugins`."""

import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from helpers import tool
from kept import keep, put_back

from wangen.generator.cli import main

EXAMPLE = Path(str(files("wangen.examples"))) / "dataset"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_place: Path) -> Path:
    """A workspace of the 14B with three photos and a clip, published for two platforms."""
    for name in ("nvidia-smi", "rocm-smi"):  # whatever this machine has
        tool(monkeypatch, tmp_path, name, "exit 9")
    folder = put_back(kept_place)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def kept_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place") / "work"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder.parent)
        assert main(["init", "work"]) == 0
        text = (folder / "wangen.toml").read_text(encoding="utf-8").replace("t2v-1.3B", "t2v-14B", 1)
        text = text.replace('["linux", "windows", "wsl"]', '["linux", "windows"]\nnum_frames = 45')
        (folder / "wangen.toml").write_text(text, encoding="utf-8")
        shutil.copytree(EXAMPLE, folder / "datasets" / "cats")
        monkeypatch.chdir(folder)
        assert main(["publish", "cats"]) == 0
    return keep(folder)
