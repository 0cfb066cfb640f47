"""Wine with a real CPython for Windows, which `setup_wine.sh` installs, and bundles published for it."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from shells.bundles import bundle, put, read_calls

from wangen.generator import knob_values
from wangen.generator.scripts import render

HERE = Path(__file__).resolve().parent
HOME = Path(os.environ.get("WANGEN_WINE", HERE.parents[1] / ".wine"))
READY = shutil.which("wine") is not None and (HOME / "python" / "python.exe").exists() and (HOME / "prefix").is_dir()
only_with_wine = pytest.mark.skipif(
    not READY, reason="no wine with a Windows Python here: run tests/shells/setup_wine.sh"
)
needs_wine = [pytest.mark.wine, only_with_wine]
# wine 8 expands a variable's value twice and looks for a program with a semicolon in its path piece by piece; so
# folders with % or ; are left to Windows itself. As words of a command line both are among the hostile ones.
FOLDER = "musubi (x86) & é日本 !x! ^y"


def windows(path: Path) -> str:
    """A Linux path as a Windows program sees it: wine's drive Z: is Linux's root."""
    return "Z:" + str(path).replace("/", "\\")


def linux(path: str) -> Path | None:
    """The file that a Windows path names; None on a drive that is not there."""
    return Path(path[2:].replace("\\", "/")) if path[:3].upper() in ("Z:\\", "Z:/") else None


_IDLE_S = 60
_last_use = float("-inf")


def environment() -> Mapping[str, str]:
    """The environment of wine, with its server running: else its services inherit the pipes of the first program.

    A server that was started here ends a minute after its last use, so that none is left behind.
    """
    global _last_use
    env = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "VIRTUAL_ENV", "PYTHONPATH")}
    env |= {
        "WINEPREFIX": str(HOME / "prefix"),
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "mscoree,mshtml=",
        "LC_ALL": "hi_IN.UTF-8",
    }
    if time.monotonic() - _last_use > _IDLE_S / 2:
        detached: dict[str, Any] = {"env": env, "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        detached["stderr"] = subprocess.DEVNULL
        subprocess.run(["wineserver", f"-p{_IDLE_S}"], check=False, **detached)
        subprocess.run(["wine", "cmd", "/c", "exit"], check=True, **detached)
    _last_use = time.monotonic()
    return env


def run(command: Sequence[str | Path], folder: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a Windows program. Its outputs are pipes: under wine 8 CPython dies when one is a regular file."""
    return subprocess.run(
        ["wine", *command],
        cwd=folder,
        env={**environment(), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
    )


# Rarely (in two of some thirty runs of the tests) wine 8's CreateProcess answers 1359, "Internal error", and starts
# nothing. A line that it cannot take is answered so every time.
START = """
import json, subprocess, sys

for line in json.load(open(sys.argv[1], encoding="utf-8")):
    for tries_left in (2, 1, 0):
        try:
            done = subprocess.run(line, cwd=sys.argv[2] or None, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT)
            break
        except OSError as error:
            if error.winerror != 1359 or not tries_left:
                raise
    print(json.dumps([done.returncode, done.stdout.decode("utf-8")]))
"""


class Library:
    """A folder for PYTHONPATH whose `wangen.runtime` records its calls, and what was recorded."""

    def __init__(self, folder: Path):
        self.folder, self.record = folder / "library", folder / "record.jsonl"
        runtime = self.folder / "wangen" / "runtime"
        runtime.mkdir(parents=True)
        (runtime / "__init__.py").touch()
        (runtime / "__main__.py").write_text(
            "import sys, recorder\nsys.exit(recorder.main(['-m', 'wangen.runtime', *sys.argv[1:]]))\n"
        )
        shutil.copy(HERE / "recorder.py", self.folder)
        (self.folder / "wangen" / "generator").mkdir()
        shutil.copy(knob_values.__file__, self.folder / "wangen" / "generator")

    @property
    def env(self) -> dict[str, str]:
        """What the recording Python needs."""
        return {"RECORDER_OUT": windows(self.record), "PYTHONPATH": windows(self.folder)}

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The recorded calls, oldest first."""
        return read_calls(self.record)

    def start(self, lines: Iterable[str], folder: str = "", **env: str) -> list[dict[str, Any]]:
        """Start programs by their raw command lines, as CreateProcess takes them; their codes and outputs."""
        (self.folder / "lines.json").write_text(json.dumps([*lines]), encoding="utf-8")
        (self.folder / "start.py").write_text(START)
        words = [windows(self.folder / "start.py"), windows(self.folder / "lines.json"), folder]
        done = run([HOME / "python" / "python.exe", *words], self.folder, self.env | env)
        assert done.returncode == 0, done.stderr
        return [dict(zip(("code", "output"), json.loads(line), strict=True)) for line in done.stdout.splitlines()]


class Site:
    """A published bundle with the Windows Python, whose steps are recorded."""

    def __init__(self, folder: Path, chosen: Iterable[Any] | None = None, **details: Any):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.library = Library(folder.parent)
        self.script = folder / "train_red_house.bat"
        put(self.script, render(bundle("bat", chosen, **details), "bat", "train"))

    def python(self, place: str = "venv") -> None:
        """Make a virtual environment, as far as the script sees one."""
        (self.folder / place).mkdir(parents=True)
        (self.folder / place / "Scripts").symlink_to(HOME / "python", target_is_directory=True)

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the script in its folder with further words and variables."""
        for _ in range(2):
            self.library.record.unlink(missing_ok=True)
            done = run(["cmd", "/c", self.script.name, *words], self.folder, self.library.env | env)
            # Rarely (once in some thousand starts) wine 8's cmd says this of a program that is there, or ends at once
            # and says nothing, where every way through a script of ours says something. What a script lets cmd take for
            # a program by mistake, and a script that breaks cmd, do so every time, and so the second time too.
            if done.stdout and "Can't recognize '" not in done.stderr:
                break
        return done

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The steps that the last run started."""
        return self.library.calls
