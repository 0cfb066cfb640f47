"""`setup_wangen.ps1`, run by a model of PowerShell: none can be installed where the tests run."""

import pytest
from shells.setup_bundles import publish
from shells.wine import windows

from wangen.generator.setup import scripts as setup_scripts

pytest.importorskip("tree_sitter_pwsh", reason="tree-sitter-pwsh is not installed")

from shells import powershell

ROOT = "musubi (x86) & é日本 [x]"


class PowerShell:
    """A bundle whose programs are modelled: `known` says which switch of which program is a fitting Python."""

    def __init__(self, folder, monkeypatch, **details):
        self.folder = folder / ROOT
        self.folder.mkdir()
        self.tools = folder / "tools"
        self.tools.mkdir()
        self.known, self.code = set(), 0
        self.line = "powershell -File x.ps1"
        self.script = publish(self.folder, "ps1", **details)

        def get_command(machine, option, name, *rest):
            assert (option, *rest) == (
                "-Name", "-CommandType", "Application", "-TotalCount", 1, "-ErrorAction", "SilentlyContinue"
            )  # fmt: skip
            return windows(self.tools / name) if (self.tools / name).exists() else None

        monkeypatch.setattr(powershell._Machine, "_do_get_command", get_command, raising=False)

    def program(self, path, *switches):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.known |= {(windows(path), switch) for switch in switches or ("-c",)}
        return windows(path)

    def run(self, *words, **env):
        def start(call):
            if call.words[-1].startswith("import sys; sys.exit("):
                return 0 if (call.program, call.words[0]) in self.known else 103
            if self.code is None:
                raise OSError("this program cannot run")
            return self.code

        return powershell.execute(self.script, words, start=start, env=env, line=self.line)


@pytest.fixture
def ps1(tmp_path, monkeypatch):
    return PowerShell(tmp_path, monkeypatch)


def test_ps1_hands_over_to_the_wheel(ps1):
    python = ps1.program(ps1.tools / "python.exe")
    done = ps1.run("--dry_run", PYTHONUTF8="0")
    assert (done.code, done.error) == (0, "")
    call = done.calls[-1]
    root = windows(ps1.folder)
    assert call.program == python
    assert call.words == (
        "-c", setup_scripts._CODE, f"{root}\\files\\{next((ps1.folder / 'files').iterdir()).name}",
        "--kind", "windows", "--accelerator", "cuda",
        "--build", "cu130=13.0", "--build", "cu128=12.8", "--build", "cu126=12.0", "--shell", "ps1",
        "--venv", f"{root}\\venv", "--venv", f"{root}\\.venv", "--dry_run",
    )  # fmt: skip
    assert (call.folder, call.env["PYTHONUTF8"], call.env["PYTHONSAFEPATH"]) == (root, "1", "1")
    assert done.env == {"PYTHONUTF8": "0"}


def test_ps1_ends_with_the_code_of_the_installation(ps1):
    ps1.program(ps1.tools / "python.exe")
    ps1.code = 7
    done = ps1.run()
    assert (done.code, done.lines) == (7, ["wangen: the environment is not ready (exit code 7)."])


def test_ps1_knows_an_installation_that_was_never_started(ps1):
    # The code of the program before, which was 0, stays.
    ps1.program(ps1.tools / "python.exe")
    ps1.code = None
    done = ps1.run()
    assert (done.code, done.lines[0]) == (1, "this program cannot run")


@pytest.mark.parametrize("code", [0, 7])
def test_ps1_keeps_a_window_that_explorer_opened(ps1, code):
    ps1.line = "powershell -Command if(1) { Set-ExecutionPolicy -Scope Process Bypass }; & 'x'"
    ps1.code = code
    done = ps1.run()
    assert (done.code, done.lines) == (code, ["Press Enter to close this window"])
    assert [call.words[-2:] for call in done.calls] == [("-File", windows(ps1.script))]


def test_ps1_searches_a_python(ps1):
    assert ps1.run().lines[0] == "wangen: no Python from 3.11 on was found."
    (ps1.tools / "python.exe").touch()  # the link to the Microsoft Store
    assert ps1.run().code == 1
    launcher = ps1.program(ps1.tools / "py.exe", "-3.11", "-3")
    call = ps1.run().calls[-1]
    assert (call.program, call.words[0]) == (launcher, "-3.11")
    own = ps1.program(ps1.folder / ".venv" / "Scripts" / "python.exe")
    assert ps1.run().calls[-1].program == own
    named = ps1.program(ps1.folder / "other.exe")
    assert ps1.run(WANGEN_PYTHON=named).calls[-1].program == named
    done = ps1.run(WANGEN_PYTHON="Z:\\no.exe")
    assert (done.code, done.lines) == (
        1,
        [
            "wangen: WANGEN_PYTHON names no Python from 3.11 on: Z:\\no.exe",
            "  do:    unset it, or give the full path of a python.exe",
        ],
    )


def test_ps1_without_its_root_or_wheel(tmp_path, monkeypatch):
    ps1 = PowerShell(tmp_path, monkeypatch, root=windows(tmp_path / "it's"))
    assert ps1.run().lines[0] == f"wangen: this folder is not there: {windows(tmp_path)}\\it's"
    (tmp_path / "it's").mkdir()
    done = ps1.run()
    assert (done.code, done.lines[0].startswith("wangen: this file is not there: ")) == (1, True)
