"""The README's lines do what it says. Its two install lines are run by `.ci/run`, which takes them from it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block_after(words: str) -> str:
    """The first code block behind these words."""
    found = re.search(r"```\w+\n(.*?)```", README[README.index(words) :], re.DOTALL)
    assert found
    return found[1]


def test_the_two_lines_are_one_line_each_and_use_the_constraints():
    for name, last in (("<!-- demo -->", "wangen demo"), ("<!-- test -->", "python -m pytest")):
        lines = block_after(name).splitlines()
        assert len(lines) == 1
        assert "-c constraints.txt" in lines[0]
        assert lines[0].endswith(last)


@pytest.mark.skipif(os.name == "nt", reason="the block is for bash")
def test_the_lines_for_an_own_dataset_publish_it(tmp_path):
    command = Path(sys.executable).with_name("wangen")
    if not command.exists():
        pytest.skip("the console script is not installed in this environment")
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("cat.jpg", "cat.txt", "Falcon Rocket.jpg", "Falcon Rocket.txt"):
        shutil.copy(ROOT / "examples" / "dataset" / name, photos)
    lines = [line for line in block_after("## Your own dataset").splitlines() if not line.startswith("source ")]
    lines.insert(len(lines) - 1, f"cp {photos}/* datasets/cats/")  # what the comment of the line above asks for
    result = subprocess.run(
        ["bash", "-ec", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}"},
    )
    assert result.returncode == 0, result.stderr
    for script in ("linux/train_cats.sh", "wsl/train_cats.sh", "windows/train_cats.bat", "windows/train_cats.ps1"):
        assert (tmp_path / "my-work/published" / script).is_file()
