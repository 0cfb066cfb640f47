"""The setup scripts as files: their bytes, and what happens to an edited one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shells.setup_bundles import publish

from wangen.generator import scripts
from wangen.generator.publish.texts import setup_text
from wangen.profiles import platform


@pytest.mark.parametrize("shell", ["sh", "bat", "ps1"])
def test_an_edited_script_is_kept(tmp_path, shell):
    script = publish(tmp_path, shell)
    data = script.read_bytes()
    assert scripts.untouched(data)
    again = (tmp_path, platform("linux" if shell == "sh" else "windows"), None, ("venv", ".venv"), shell)
    assert setup_text(*again).state == "same"
    script.write_bytes(data.replace(b"wangen: this f", b"wangen: THIS f", 1))
    made = setup_text(*again)
    assert (made.state, made.data, made.target.name) == ("kept", data, f"{script.name}.new")


def test_the_bytes_that_windows_needs(tmp_path):
    for shell, start in (("bat", b"@echo off\r\n"), ("ps1", b"\xef\xbb\xbf# setup_wangen.ps1")):
        data = publish(tmp_path, shell).read_bytes()
        assert data.startswith(start)
        assert data.count(b"\n") == data.count(b"\r\n")


@pytest.mark.parametrize("root", [None, "/data/it's $HOME `x` “a” é日本"])
def test_shellcheck_accepts_the_bash_script(tmp_path, root):
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    script = publish(tmp_path, "sh", root=root, venv=("venv", "/opt/a b/venv"))
    done = subprocess.run([shellcheck, "-S", "warning", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
