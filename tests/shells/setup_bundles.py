"""Bundles with a setup script and wangen's wheel, for its tests."""

from pathlib import Path
from typing import Any

from shells.bundles import put

from wangen.generator.setup import scripts as setup_scripts
from wangen.generator.setup.wheel import write_wheel
from wangen.profiles import platform


def publish(folder: Path, shell: str, **details: Any) -> Path:
    """Write the setup script for a shell, and the wheel; returns the script."""
    write_wheel(folder / "files")
    given = {"platform": platform("linux" if shell == "sh" else "windows"), "root": None, "venv": ("venv", ".venv")}
    data = setup_scripts.render(**given | details, version="0.1.0", shell=shell)
    put(folder / setup_scripts.script_name(shell), data)
    return folder / setup_scripts.script_name(shell)
