"""The edge of every step: log, lock, report, and errors turned into one message and an exit code.

The way of a step: options -> `execute` -> the step's `run(options)` -> `Report` -> `<step>.report.json`.
"""

import json
import logging
import math
import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from wangen.generator.bulk import bulk
from wangen.generator.early import STOPPED
from wangen.generator.errors import WAS_STOPPED, TakenOverError, UsageError, WangenError, in_words
from wangen.generator.files import remove_left, special, unwritable, write_text
from wangen.generator.install import install_line
from wangen.generator.lock import IN_SCRIPT
from wangen.generator.stopping import stop
from wangen.generator.table import REPORT, Step, options

log = logging.getLogger("wangen")

PACKAGES = ("wangen", "torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "av", "pillow")


@dataclass
class Report:
    """What a step leaves behind.

    Attributes:
        folder: where `<step>.report.json` goes unless `--report_dir` says otherwise; None: nowhere.
        summary: one line for people.
        inputs: what was read, with digests where they are known.
        counts: how many things were made, reused or left out, and why.
        result: what came out: paths, losses.
        ok: False makes the step fail after the report is written.
    """

    folder: Path | None
    summary: str
    inputs: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    ok: bool = True


SUBMITTED_BY = "WANGEN_SUBMITTED_BY"
"""The script that submitted the training's job, for Slurm."""
HANDED_ON = ("--fresh", "--resume_changed")
"""What that script hands on to the training."""


class _Console(logging.StreamHandler[IO[str]]):
    """Writes to the present `sys.stderr`, so that a live progress bar can take it over."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> IO[str]:  # type: ignore[override]
        return sys.stderr


class _File(logging.FileHandler):
    """The log file: a full disk is said once on the terminal, and the step goes on without the file."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Called while the error of a write is being handled."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.failed:
            self.failed = True
            with suppress(OSError):  # the terminal may be gone, too
                print(f"the log file cannot be written any more: {error.strerror} ({self.baseFilename})",  # noqa: T201
                      file=sys.stderr)  # fmt: skip

    def close(self) -> None:
        """Close the file; what a full disk did not take is lost, as `handleError` has said."""
        with suppress(OSError):
            super().close()


def execute(step: Step) -> int:
    """Run a step and return its exit code: 0 done, 1 failed, 2 wrong usage, 130 stopped.

    Ctrl-C and SIGTERM end a step with one message; what it has saved stays.
    """
    step = step.effective()
    try:
        _require_files(step)
        with _logging(step.log_file, shows=step.leads), _terminable():
            log.info("%s", step.command)
            return _guarded(step)
    except WangenError as error:  # a path is none that can be read, or the log file itself cannot be opened
        print(f"{step.command}: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code


def _require_files(step: Step) -> None:
    """Refuse what would be waited for, or read, without end, and a place that is none; a log may go to a device.

    Raises:
        UsageError: a flag names a pipe, a socket or a device.
        FileNotFoundError: the working folder is gone, in which libraries look for modules at any moment.
    """
    Path.cwd()
    for option in options(type(step)):
        value = getattr(step, option.name)
        for path in value if isinstance(value, tuple) else [value]:
            found = special(path) if isinstance(path, Path) else ""
            if found and (option.name, found) != ("log_file", "a device"):
                raise UsageError(f"--{option.name} is {found}, neither a file nor a folder", where=str(path),
                                 cure="give a file or a folder; save what a program writes first")  # fmt: skip
            if isinstance(path, Path) and option.name not in _OWN:
                _require_apart(step, option.name, path)


_OWN = ("log_file", "lock", "report_dir")
"""Flags of what every step writes beside its work."""


def _require_apart(step: Step, name: str, path: Path) -> None:
    """Refuse a log or a report that would be written into a file that the step reads or makes.

    Raises:
        UsageError: it would.
    """
    report = step.report_dir / step.report_name if step.report_dir else None
    for own, flag in ((step.log_file, "--log_file"), (report, "--report_dir")):
        if own and (path.absolute() == own.absolute() or _same_file(own, path)):
            raise UsageError(f"{flag} would write into what --{name} names", where=str(own), cure="give another one")


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one is not there
        return False


def _guarded(step: Step) -> int:
    with ExitStack() as stack:
        stack.push(partial(_note_unforeseen, step))
        return _in_words(step)


def _in_words(step: Step) -> int:
    """Run a step; what is known to go wrong becomes one message and an exit code."""
    try:
        return _run(step)
    except WangenError as error:
        log.error("%s: %s", step.command, error)
        if not isinstance(error, TakenOverError):
            _note_failure(step, error.found)
        return error.exit_code
    except (OSError, MemoryError) as error:
        failure = in_words(error)
        if failure is None:
            raise
        log.error("%s: %s", step.command, failure)
        _note_failure(step, failure.found)
        return failure.exit_code
    except KeyboardInterrupt:
        # The same line again would start from step 0 once more; a try always does.
        fresh = " (without --fresh)" if getattr(step, "fresh", False) and not getattr(step, "smoke", False) else ""
        log.error("%s: %s%s", step.command, STOPPED, fresh)
        return WAS_STOPPED


def _note_unforeseen(step: Step, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
    """Write a mistake, ours or a library's, into the log file, too: Python shows it on the terminal alone."""
    if kind is None or not isinstance(error, Exception):
        return
    words = "%s: ended by an error that nobody has foreseen"
    record = log.makeRecord(log.name, logging.CRITICAL, __file__, 0, words, (step.command,), (kind, error, trace))
    for handler in log.handlers:
        if isinstance(handler, _File):
            handler.handle(record)
    _note_failure(step, f"{kind.__name__}: {error}")


def _note_failure(step: Step, found: str) -> None:
    """Replace an earlier run's report, which would say that all is well; an error here must not hide the first."""
    with suppress(WangenError, OSError):
        if step.leads and step.report_dir and (step.report_dir / step.report_name).is_file():
            write_report(step, Report(folder=step.report_dir, summary=f"failed: {found}", ok=False), 0.0)


def _run(step: Step) -> int:
    from wangen.generator.lock import hold

    started = time.monotonic()
    with hold(step.lock_file if step.leads else None, waits=step.waits):
        if step.leads and step.report_dir and (found := unwritable(step.report_dir)):
            raise WangenError(found, where="--report_dir", cure="fix its rights or give another folder")
        try:
            with bulk():
                module = import_module(step.module)
            report: Report = module.run(step)
        except ModuleNotFoundError as error:
            raise missing_library(error) from None
        seconds = round(time.monotonic() - started, 3)
        log.info("%s: %s (%.1f s)", step.command, report.summary, seconds)
        if step.leads and (step.report_dir or report.folder):
            write_report(step, report, seconds)
    return 0 if report.ok else 1


def with_flag(step: str, flag: str) -> str:
    """What to type to run a step with one more flag: the line of the script that runs it, or the flag alone.

    >>> os.environ["WANGEN_SCRIPT"] = "/data/train_cats.sh"
    >>> with_flag("train", "--fresh")
    'train_cats.sh train --fresh'
    >>> del os.environ["WANGEN_SCRIPT"]
    >>> with_flag("train", "--fresh")
    '--fresh'
    """
    submits = os.environ.get(SUBMITTED_BY)
    if submits and step == "train" and flag in HANDED_ON:
        return f"{submits} {flag}"
    script = os.environ.get(IN_SCRIPT)
    return f"{Path(script).name} {step} {flag}" if script else flag


def missing_library(error: ModuleNotFoundError) -> Exception:
    """A library that is not installed in words; a module of our own that is missing is our bug."""
    if not error.name or error.name.split(".")[0] == "wangen":
        return error
    setup = "run the script setup_wangen beside this one" if IN_SCRIPT in os.environ else install_line(sys.executable)
    return WangenError(f"the library {error.name} is not installed", where=sys.executable, cure=setup)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the step as Ctrl-C does; only the main thread can be told of signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write_report(step: Step, report: Report, seconds: float) -> Path:
    """Write the report into `--report_dir` or else the report's folder, and return its path.

    Raises:
        WangenError: the folder cannot be written.
    """
    content = {
        "step": step.command,
        "summary": report.summary,
        "ok": report.ok,
        "inputs": report.inputs,
        "settings": _settings(step),
        "counts": report.counts,
        "result": report.result,
        "timings": {"total_s": seconds},
        "versions": _versions(),
        "finished": _now(),
    }
    folder = step.report_dir or report.folder
    assert folder is not None, "the caller has asked for a folder"
    path = folder / step.report_name
    _write(path, content)
    return path


def write_beginning(step: Step, path: Path, inputs: Mapping[str, Any], **facts: Any) -> None:
    """Write what a step says of itself before it has done anything, as its report will say it, and other facts.

    Raises:
        WangenError: it cannot be written.
    """
    about = {"step": step.command, "begun": _now(), "inputs": inputs, "settings": _settings(step)}
    _write(path, about | {"versions": _versions()} | facts)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    remove_left(path)
    write_text(path, json.dumps(plain(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _settings(step: Step) -> dict[str, Any]:
    return {option.name: plain(getattr(step, option.name)) for option in options(type(step))}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def report_name(command: str) -> str:
    """The pattern of a step's report files: of the whole, and of the parts of its work (`--shard`)."""
    return rf"{command}(-\d+(-of-\d+)?)?{re.escape(REPORT)}"


def report_files(folder: Path, command: str) -> list[Path]:
    """The reports of a step in a folder, the newest first."""
    named = re.compile(report_name(command))
    found = [path for path in folder.glob(f"{command}*{REPORT}") if named.fullmatch(path.name) and path.is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def plain(value: Any) -> Any:
    """A value as JSON, and so a report, has it; JSON has no number that is not finite."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else plain(asdict(value))


@cache
def _versions() -> Mapping[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@contextmanager
def _logging(file: Path | None, *, shows: bool) -> Iterator[None]:
    """Send the log to the terminal and, with time and level, to `file`; unless it `shows`, warnings to the terminal."""
    handlers: list[logging.Handler] = [_Console()]
    handlers[0].setFormatter(logging.Formatter("%(message)s"))
    if file and shows:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(_File(file, encoding="utf-8", errors="backslashreplace"))
        except OSError as error:
            raise WangenError(f"cannot write the log: {error.strerror}", where=str(file),
                              cure="fix its rights or give another --log_file") from None  # fmt: skip
        handlers[1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level, propagate = log.level, log.propagate
    log.setLevel(logging.INFO if shows else logging.WARNING)
    log.propagate = False
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    finally:
        log.propagate = propagate
        log.setLevel(level)
        for handler in handlers:
            log.removeHandler(handler)
            if handler is not handlers[0]:
                handler.close()
