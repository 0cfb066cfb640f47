"""What Ctrl-C does at moments that a signal rarely meets."""

import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from wangen.generator.stopping import stop


class Asking(str):
    """A module's name that is interrupted while the import machinery looks at it."""

    def rpartition(self, sep):
        stop(signal.SIGINT, sys._getframe())


def test_a_question_to_the_import_machinery_is_no_import():
    """diffusers asks a spec for its parent whenever a model's dtype is read: work is under way then, and is saved."""
    spec = ModuleSpec("x", None)
    spec.name = Asking("x.y")
    with pytest.raises(KeyboardInterrupt):
        assert spec.parent


def test_within_an_import_the_process_ends_with_one_message(tmp_path):
    (tmp_path / "slow.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    code = "import signal; from wangen.generator.stopping import stop; signal.signal(signal.SIGINT, stop); import slow"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "run the same line again" in ended.stderr
