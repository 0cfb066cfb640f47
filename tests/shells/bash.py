"""Bundles whose .sh scripts run in bash with a recording Python."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from shells.bundles import bundle, put, read_calls

from wangen.generator.scripts import render

RECORDER = Path(__file__).parent / "recorder.py"
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


class Site:
    """A published bundle."""

    def __init__(self, folder: Path, chosen: Iterable[Any], **details: Any):
        self.folder, self.record = folder, folder / "record.jsonl"
        self.script = folder / "train_red_house.sh"
        put(self.script, render(bundle("sh", chosen, **details), "sh", "train"))

    def python(self, place: str) -> Path:
        """Make a recording Python at that place in the bundle's folder."""
        program = self.folder / place
        program.parent.mkdir(parents=True)
        program.write_text(f"#!{sys.executable} -IS\n" + RECORDER.read_text(encoding="utf-8"), encoding="utf-8")
        program.chmod(0o755)
        return program

    def run(self, *words: str, cwd: str = "/", **env: str) -> subprocess.CompletedProcess[str]:
        """Run the script with further words and variables."""
        env = {"PATH": os.environ["PATH"], "RECORDER_OUT": str(self.record)} | env
        self.record.unlink(missing_ok=True)
        return subprocess.run(["bash", self.script, *words], capture_output=True, text=True, env=env, cwd=cwd)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The steps that the last run started."""
        return read_calls(self.record)
