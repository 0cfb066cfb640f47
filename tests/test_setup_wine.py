"""`setup_wangen.bat` under wine with a real CPython for Windows.

That Python has neither venv nor pip: stand-ins on PYTHONPATH make the environment and record what pip is asked for; pip
itself is used by tests/test_setup.py. There is no launcher `py` either, which only tests/test_setup_ps1.py has.
"""

import json
import shutil

import pytest
from shells.setup_bundles import publish
from shells.wine import FOLDER, HOME, Library, needs_wine, run, windows

pytestmark = needs_wine
PYTHON = windows(HOME / "python" / "python.exe")
EXPLORER = 'C:\\windows\\system32\\cmd.exe /c ""C:\\x.bat" "'
VENV = """\
import shutil, sys
from pathlib import Path
folder = Path(sys.argv[-1])
shutil.copytree(Path(sys.executable).parent, folder / "Scripts")
(folder / "pyvenv.cfg").touch()
"""
PIP = """\
import json, os, sys
from pathlib import Path
library = Path(__file__).parent.parent
with open(library / "pip.jsonl", "a", encoding="utf-8") as out:
    out.write(json.dumps({"argv": sys.argv[1:], "python": sys.executable}) + "\\n")
if os.environ.get("PIP_CODE"):
    sys.exit("ERROR: [WinError 5] Access is denied" if os.environ["PIP_CODE"] == "1" else int(os.environ["PIP_CODE"]))
if "--index-url" in sys.argv:
    (library / "torch").mkdir()
    (library / "torch" / "version.py").write_text("__version__ = '2.12.0+cpu'")
    (library / "torch" / "__init__.py").write_text(
        "from torch.version import __version__\\nclass cuda:\\n    is_available = staticmethod(lambda: False)\\n"
    )
    (library / "torch-2.12.0.dist-info").mkdir()
    (library / "torch-2.12.0.dist-info" / "METADATA").write_text("Name: torch\\nVersion: 2.12.0+cpu\\n")
"""


class Wine:
    """A bundle in a folder with a hostile name."""

    def __init__(self, folder, **details):
        self.folder = folder / FOLDER
        self.folder.mkdir()
        self.library = Library(folder).folder
        for name, text in (("venv", VENV), ("pip", PIP)):
            (self.library / name).mkdir()
            (self.library / name / "__init__.py").touch()
            (self.library / name / "__main__.py").write_text(text, encoding="utf-8")
        self.script = publish(self.folder, "bat", **details)

    def run(self, *words, python=PYTHON, **env):
        named = {"WANGEN_PYTHON": python} if python else {}
        given = {"PYTHONPATH": windows(self.library), **named}
        return run(["cmd", "/c", self.script.name, *words], self.folder, given | env)

    @property
    def asked(self):
        record = self.library / "pip.jsonl"
        return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()] if record.exists() else []


@pytest.fixture
def wine(tmp_path):
    return Wine(tmp_path)


def test_bat_makes_an_environment_and_uses_it_again(wine):
    done = wine.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wangen: ready: PyTorch 2.12.0+cpu on the CPU. Next: " in done.stdout
    python = windows(wine.folder / "venv" / "Scripts" / "python.exe")
    wheel = next((wine.folder / "files").iterdir())
    assert {call["python"] for call in wine.asked} == {python}
    torch, own, libraries = (call["argv"][2:] for call in wine.asked)
    assert torch == ["--index-url", "https://download.pytorch.org/whl/cpu", "torch>=2.9"]
    assert own == ["--force-reinstall", "--no-deps", own[2]]
    assert libraries == [f"wangen[runtime] @ {own[2]}", "torch==2.12.0+cpu"]
    assert own[2].startswith("file:///Z:/")
    assert own[2].endswith(wheel.name)
    (wine.folder / "train_cats.bat").touch()
    done = wine.run(python="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"wangen: Python 3.11.9 ({python})" in done.stdout
    assert "Next: double-click train_cats.bat" in done.stdout


def test_bat_ends_with_the_code_of_pip(wine):
    done = wine.run(PIP_CODE="7")
    assert (done.returncode, "the environment is not ready, exit code 7" in done.stdout) == (7, True)
    done = wine.run(PIP_CODE="1")
    assert (done.returncode, "a file is in use" in done.stderr) == (1, True)


def test_bat_holds_a_double_clicked_window_in_both_cases(wine):
    def last(*words, **env):
        return wine.run(*words, CMDCMDLINE=EXPLORER, **env).stdout.strip().splitlines()[-1]

    assert "wangen" not in last("--dry_run")
    assert "wangen" not in last("--dry_run", python="C:\\no & where.exe")
    assert "nothing was changed" in last("--dry_run", WANGEN_NO_PAUSE="1")


def test_bat_searches_a_python(wine):
    done = wine.run("--dry_run", python="")
    said = done.stdout + done.stderr
    assert (done.returncode, "no Python from 3.11 on was found" in done.stdout) == (1, True), said
    done = wine.run("--dry_run", python="C:\\no & where.exe")
    assert (done.returncode, "WANGEN_PYTHON names no Python from 3.11 on" in done.stdout) == (1, True)
    assert "\n  do:    unset it, or give the full path of a python.exe\n" in done.stdout
    done = wine.run("--dry_run", python="", WINEPATH=windows(HOME / "python"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wangen: Python 3.11.9" in done.stdout


def test_bat_without_its_root_or_wheel(tmp_path):
    root = tmp_path / "root & é"
    wine = Wine(tmp_path, root=windows(root), venv=(windows(tmp_path / "env") + "\\",))
    done = wine.run("--dry_run")
    assert (done.returncode, f'this folder is not there: "{windows(root)}"' in done.stdout) == (1, True)
    root.mkdir()
    done = wine.run("--dry_run")
    assert (done.returncode, "this file is not there" in done.stdout) == (1, True)
    shutil.copytree(wine.folder / "files", root / "files")
    done = wine.run("--dry_run")
    assert (done.returncode, f"environment {windows(tmp_path / 'env')}: it is made" in done.stdout) == (0, True)
