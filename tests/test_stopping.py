"""What Ctrl-C does at moments that a signal rarely meets."""

import logging
import os
import signal
import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec

import pytest

from wangen.generator.early import STOPPED
from wangen.generator.errors import WAS_STOPPED
from wangen.generator.stopping import stop
from wangen.runtime.interrupt import Interrupt


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


class Lock:
    """As rich's of a terminal: who holds it and asks again waits for ever."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def emit(self, _record: logging.LogRecord) -> None:
        assert self.lock.acquire(timeout=20), "the signal's handler waits for what it interrupted"
        self.lock.release()


def test_a_signal_that_comes_while_the_terminal_is_written_to_waits_for_nothing():
    terminal, said = Lock(), threading.Event()
    handler = logging.Handler()
    words = []
    handler.emit = lambda record: (terminal.emit(record), words.append(record.getMessage()), said.set())
    log = logging.getLogger("wangen")
    log.addHandler(handler)
    try:
        with Interrupt() as interrupt:
            with terminal.lock:
                signal.raise_signal(signal.SIGTERM)
                assert interrupt.requested
                assert not said.is_set()
            assert said.wait(20)
    finally:
        log.removeHandler(handler)
    assert ["stopping after this step" in line for line in words] == [True]


@pytest.mark.skipif(not hasattr(signal, "SIGXCPU"), reason="Windows has no SIGXCPU")
def test_the_end_of_the_processors_time_is_a_stop():
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGXCPU)
    assert interrupt.requested


def test_within_an_import_the_process_ends_though_nobody_can_be_told(tmp_path):
    (tmp_path / "slow.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    code = "import signal; from wangen.generator.stopping import stop; signal.signal(signal.SIGINT, stop)\n"
    code += "import os; os.close(2)\ntry:\n    import slow\nexcept BaseException:\n    os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == WAS_STOPPED


def test_closed_standard_streams_are_not_the_next_files_that_are_opened(tmp_path):
    (tmp_path / "d.toml").write_text("")
    code = "from wangen.generator import entry; import os; entry._fill_streams(); "
    code += "print(open('d.toml').fileno(), file=open('told.txt', 'w'))"
    done = subprocess.run(["bash", "-c", f'"$0" -c "{code}" <&- >&- 2>&-', sys.executable], cwd=tmp_path)
    assert done.returncode == 0
    assert int((tmp_path / "told.txt").read_text()) > 2


def test_within_an_import_the_process_ends_with_one_message(tmp_path):
    (tmp_path / "slow.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    code = "import signal; from wangen.generator.stopping import stop; signal.signal(signal.SIGINT, stop); import slow"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (WAS_STOPPED, 1)
    assert "run the same line again" in ended.stderr


AT_MOMENT = """
import os, signal, sys
def at(event, args):
    if moment in (event, *map(str, args[:1])) or (event == "exec" and args[0].co_filename.endswith(moment)):
        signal.raise_signal(int(os.environ["NUMBER"]))
moment = os.environ["MOMENT"]
sys.addaudithook(at)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows starts another Python in a virtual environment")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["wangen.runtime.memory", "wangen.generator.target", "wangen.profiles", "click",
                                    "runtime/memory/allocator.py", "runtime/__main__.py", "click.core"])  # fmt: skip
def test_a_stop_while_a_step_is_starting_is_one_message(tmp_path, moment, number):
    """Also between imports, where nothing that is broken off catches it."""
    (tmp_path / "sitecustomize.py").write_text(AT_MOMENT)
    ended = subprocess.run(
        [sys.executable, "-m", "wangen.runtime", "train", "--help"], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "MOMENT": moment, "NUMBER": str(int(number))},
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (WAS_STOPPED, f"wangen: {STOPPED}\n")


STOPS_TWICE = """
import atexit, os, signal
from wangen.generator import cli, entry
class Late:
    def __del__(self, kill=os.kill, own=os.getpid()):
        kill(own, 15)
def stopped():
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        return 130
cli.main = stopped
if os.environ["MOMENT"] == "last":
    late = Late()
else:
    atexit.register(signal.raise_signal, signal.SIGTERM)
entry.entry()
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM from outside")
@pytest.mark.parametrize("moment", ["first", "last"])
def test_a_second_sigterm_while_the_process_ends_changes_no_exit_code(moment):
    """As of a group that is told as a whole and by its launcher; and outside of a step it is heard, too."""
    line = [sys.executable, "-c", STOPS_TWICE, "plan"]
    assert subprocess.run(line, env=os.environ | {"MOMENT": moment}).returncode == WAS_STOPPED


def test_who_imports_the_runtime_keeps_a_ctrl_c_of_their_own(tmp_path):
    code = "import signal, wangen.runtime; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import wangen.runtime\n")
    (tmp_path / "package" / "__main__.py").write_text("import mine\n")
    for words in (["mine.py"], ["-m", "mine"], ["-m", "package"]):
        assert subprocess.run([sys.executable, *words], cwd=tmp_path).returncode == 0
