"""The edge of every step: log, report, and one message with an exit code for whatever goes wrong."""

import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from helpers import image_bytes, write_tree

from wangen.generator.errors import WAS_STOPPED, UsageError, WangenError
from wangen.generator.session import Report, execute, with_flag, write_report
from wangen.generator.steps import Check
from wangen.generator.table import Step

DATASET = '[[datasets]]\nimage_directory = "media"\ncache_directory = "cache"\n'
posix = pytest.mark.skipif(os.name == "nt", reason="POSIX limits and signals")


class Probe(Check):
    """A step whose work a test gives: its module is this one."""

    command: ClassVar[str] = "probe"
    module: ClassVar[str] = "session_probe"


@pytest.fixture
def good(tmp_path, monkeypatch):
    """A check that finds nothing wrong, run in its folder."""
    write_tree(tmp_path, {"d.toml": DATASET, "media/a.jpg": image_bytes(), "media/a.txt": "an ape é"})
    monkeypatch.chdir(tmp_path)
    return Check(dataset_config=Path("d.toml"), task="t2v-1.3B", log_file=Path("logs/x.log"), report_dir=Path("out"))


@pytest.fixture
def probe(good, tmp_path, monkeypatch):
    """Makes a step run the given lines of Python."""

    def make(body: str) -> Step:
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        write_tree(tmp_path / "lib", {"session_probe.py": f"def run(options):\n{lines}"})
        monkeypatch.syspath_prepend(str(tmp_path / "lib"))
        monkeypatch.delitem(sys.modules, "session_probe", raising=False)
        return Probe(dataset_config=good.dataset_config, log_file=good.log_file, report_dir=good.report_dir)

    return make


def test_the_report(good, tmp_path):
    assert execute(good) == 0
    report = json.loads((tmp_path / "out" / "check.report.json").read_text(encoding="utf-8"))
    assert list(report) == [
        "step", "summary", "ok", "inputs", "settings", "counts", "result", "timings", "versions", "finished",
    ]  # fmt: skip
    assert (report["step"], report["ok"]) == ("check", True)
    assert report["inputs"] == {"dataset_config": "d.toml"}
    assert report["settings"]["task"] == "t2v-1.3B"
    assert report["settings"]["log_file"] == str(Path("logs/x.log"))
    assert report["settings"]["vae"] is None
    assert report["counts"] == {"images": 1, "clips": 0, "problems": 0}
    assert report["timings"]["total_s"] >= 0
    assert report["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"wangen", "pillow"} <= report["versions"].keys()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", report["finished"])


def test_the_log_has_time_and_level_and_the_terminal_plain_lines(good, tmp_path, capsys):
    (tmp_path / "media" / "a.txt").write_text("")
    assert execute(good) == 1
    shown = capsys.readouterr().err.splitlines()
    lines = (tmp_path / "logs" / "x.log").read_text(encoding="utf-8").splitlines()
    assert shown[0] == "check"
    assert [line.split(" ", 3)[3] for line in lines] == shown
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|ERROR) ", line) for line in lines)
    assert sum(" ERROR " in line for line in lines) == 1
    execute(good)
    assert len((tmp_path / "logs" / "x.log").read_text(encoding="utf-8").splitlines()) == 2 * len(lines)


def test_no_handler_stays_behind(good):
    before = list(logging.getLogger("wangen").handlers)
    execute(good)
    assert logging.getLogger("wangen").handlers == before


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("from wangen.generator.errors import WangenError\nraise WangenError('bad', cure='mend it')", 1, "mend it"),
        ("from wangen.generator.errors import UsageError\nraise UsageError('wrong flag')", 2, "wrong flag"),
        ("raise KeyboardInterrupt", WAS_STOPPED, "stopped. Nothing saved is lost: run the same line again"),
        ("import no_such_library", 1, '-m pip install ".[runtime]"'),
        ("import os\nraise OSError(28, os.strerror(28), 'file.x')", 1, "No space left on device"),
        ("raise PermissionError(13, 'Permission denied', 'file.x')", 1, "file.x"),
        ("raise MemoryError", 1, "the memory of this machine is full"),
    ],
)
def test_what_a_step_raises_becomes_one_message(probe, capsys, tmp_path, body, code, words):
    assert execute(probe(body)) == code
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.count("probe:") == 1
    assert "Traceback" not in shown
    assert words in (tmp_path / "logs" / "x.log").read_text(encoding="utf-8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "body", ["raise ZeroDivisionError", "import wangen.no_such", "raise FileNotFoundError(2, 'x')"]
)
def test_our_own_bugs_are_not_dressed_up(probe, body, tmp_path, capsys):
    """They are in the log file as on the terminal, and no earlier report says that all is well."""
    write_tree(tmp_path, {"out/probe.report.json": '{"ok": true}'})
    with pytest.raises((ZeroDivisionError, ModuleNotFoundError, FileNotFoundError)) as error:
        execute(probe(body))
    logged = (tmp_path / "logs" / "x.log").read_text(encoding="utf-8")
    assert "Traceback (most recent call last)" in logged
    assert error.type.__name__ in logged.splitlines()[-1]
    assert "Traceback" not in capsys.readouterr().err, "that is Python's to say, once"
    report = json.loads((tmp_path / "out/probe.report.json").read_text())
    assert report["ok"] is False
    assert error.type.__name__ in report["summary"]


def test_a_missing_library_at_import_gets_the_pip_line(good, tmp_path, monkeypatch, capsys):
    write_tree(tmp_path / "lib", {"session_probe.py": "import no_such_library\n"})
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.delitem(sys.modules, "session_probe", raising=False)
    assert execute(Probe(dataset_config=good.dataset_config)) == 1
    shown = capsys.readouterr().err
    assert "the library no_such_library is not installed" in shown
    assert f'in the folder of a wangen clone: "{sys.executable}" -m pip install ".[runtime]"' in shown


def test_the_report_of_what_another_run_works_on_stays(probe, tmp_path):
    write_tree(tmp_path, {"out/probe.report.json": '{"ok": true}'})
    (tmp_path / "lock").write_text("")
    body = "from pathlib import Path\nfrom wangen.generator.lock import hold\n"
    body += f"with hold(Path({str(tmp_path / 'lock')!r})):\n    pass"
    assert execute(probe(body)) == 1  # one that is just starting holds it
    assert (tmp_path / "out/probe.report.json").read_text() == '{"ok": true}'


def test_a_failed_step_leaves_its_report(probe, tmp_path):
    body = "from pathlib import Path\nfrom wangen.generator.session import Report\n"
    body += "return Report(Path('.'), 'half done', ok=False)"
    assert execute(probe(body)) == 1
    assert json.loads((tmp_path / "out" / "probe.report.json").read_text())["ok"] is False


def test_a_report_that_cannot_be_written_is_refused_before_the_work(probe, capsys):
    write_tree(Path(), {"file": "x"})
    step = replace(probe("raise AssertionError"), report_dir=Path("file", "below"))
    assert execute(step) == 1
    shown = capsys.readouterr().err
    assert f"cannot make the folder {Path('file', 'below')}" in shown
    assert "--report_dir" in shown
    assert "  do:    " in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("name", ["log_file", "lock"])
def test_where_nothing_can_be_written(good, capsys, name):
    write_tree(Path(), {"file": "x"})
    assert execute(replace(good, **{name: Path("file", "below")})) == 1
    shown = capsys.readouterr().err
    assert "cannot write" in shown
    assert str(Path("file", "below")) in shown
    assert "  do:    " in shown
    assert "Traceback" not in shown


def run_limited(step: Step, code: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; from wangen.generator.cli import main; {code}; sys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *step.argv()], capture_output=True, text=True, check=False)


@posix
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_under_the_log_is_said_once_and_the_step_goes_on(good, capsys, tmp_path):
    assert execute(replace(good, log_file=Path("/dev/full"))) == 0
    shown = capsys.readouterr().err
    assert shown.count("the log file cannot be written any more: No space left on device") == 1
    assert "Traceback" not in shown
    assert (tmp_path / "out" / "check.report.json").is_file()


@posix
def test_a_full_disk_under_the_report_is_one_message(good, tmp_path):
    done = run_limited(
        replace(good, log_file=None), "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (99, 99))"
    )
    assert done.returncode == 1
    assert "cannot write: File too large" in done.stderr
    assert "all good" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@posix
def test_a_full_disk_under_the_lock_leaves_no_lock(good, tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))"
    done = run_limited(replace(good, log_file=None, lock=Path("run.lock")), limit)
    assert (done.returncode, "cannot write the lock file" in done.stderr) == (1, True)
    assert not (tmp_path / "run.lock").exists()


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_real_process_with_one_message_and_frees_the_lock(good, tmp_path, number):
    code = (
        "import sys, time; from pathlib import Path; from wangen.generator import check, entry\n"
        "check.run = lambda step: (Path('begun').touch(), time.sleep(60))\n"
        "entry.entry()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, *replace(good, lock=Path("run.lock")).argv()],
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    until = time.time() + 20
    while not (tmp_path / "begun").is_file():
        assert time.time() < until
        time.sleep(0.02)
    assert (tmp_path / "run.lock").exists()
    process.send_signal(number)
    _, shown = process.communicate(timeout=20)
    assert process.returncode == WAS_STOPPED
    assert shown.splitlines() == ["check", "check: stopped. Nothing saved is lost: run the same line again to go on."]
    assert not (tmp_path / "run.lock").exists()


def test_signal_handlers_are_put_back(good):
    before = signal.getsignal(signal.SIGTERM)
    execute(good)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_step_can_run_in_another_thread(good):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(execute(good)))
    thread.start()
    thread.join()
    assert codes == [0]


def test_a_report_holds_what_json_does_not_know(tmp_path, good):
    report = Report(tmp_path, "s", inputs={"path": Path("a"), "error": {1: (Path("b"), None)}})
    report.result["name"] = os.fsdecode(b"caf\xe9") if os.name != "nt" else "x"
    path = write_report(replace(good, report_dir=None), report, 1.0)
    assert path == tmp_path / "check.report.json"
    content = json.loads(path.read_bytes())
    assert content["inputs"] == {"path": "a", "error": {"1": ["b", None]}}
    assert content["result"] == report.result


def test_a_number_that_is_none_is_null_in_the_report(tmp_path, good):
    report = Report(tmp_path, "s", result={"held out": {"loss": math.nan, "losses": (1.5, math.inf)}})
    text = write_report(replace(good, report_dir=None), report, 1.0).read_text(encoding="utf-8")
    found = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert found["result"] == {"held out": {"loss": None, "losses": [1.5, None]}}


def test_errors_say_fact_place_and_cure():
    assert str(UsageError("bad", where="x.toml", cure="mend it")) == "bad\n  where: x.toml\n  do:    mend it"
    assert (UsageError("bad").exit_code, WangenError("bad").exit_code) == (2, 1)


def test_in_a_job_of_slurm_the_line_that_submits_is_named(monkeypatch):
    monkeypatch.setenv("WANGEN_SCRIPT", "/data/train_cats.sh")
    monkeypatch.setenv("WANGEN_SUBMITTED_BY", "train_cats.sbatch")
    assert with_flag("train", "--fresh") == "train_cats.sbatch --fresh"
    assert (
        with_flag("train", "--gradient_accumulation_steps 2") == "train_cats.sh train --gradient_accumulation_steps 2"
    )
    assert with_flag("generate", "--fresh") == "train_cats.sh generate --fresh"


@pytest.mark.parametrize("flag", ["log_file", "report_dir"])
@pytest.mark.parametrize("by", ["name", "link"])
def test_a_log_and_a_report_are_not_written_into_what_a_step_reads(good, tmp_path, capsys, flag, by):
    """A log is appended: the first line would spoil a weight file."""
    weights = tmp_path / "out" / "check.report.json"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    if by == "link":
        (tmp_path / "other.safetensors").symlink_to(weights)
    given = {"vae": tmp_path / "other.safetensors" if by == "link" else weights, flag: weights}
    if flag == "report_dir":
        given[flag] = weights.parent
    assert execute(replace(good, **given)) == 2
    assert f"--{flag} would write into what --vae names" in capsys.readouterr().err
    assert weights.read_bytes() == b"weights"
