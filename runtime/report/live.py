"""`watch`: the page of a run while it trains, at an address of this machine that only its reader knows."""

import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from wangen.generator import lock
from wangen.generator.errors import UsageError, WangenError, duration_text, many
from wangen.generator.files import is_file
from wangen.generator.run_folder import BEGUN, METRICS, SAMPLES, TRAIN_REPORT
from wangen.generator.session import Report
from wangen.generator.steps import Watch
from wangen.runtime.report.dataset import DatasetPart, look_at_dataset
from wangen.runtime.report.media import Served
from wangen.runtime.report.metrics_log import MetricsLog
from wangen.runtime.report.page import Section, Status, make_sections, render
from wangen.runtime.report.run_files import (
    DATASET_FLAGS,
    RunFiles,
    read_run,
)
from wangen.runtime.report.server import LiveServer
from wangen.runtime.report.step_reports import is_number, mapping, time_s

log = logging.getLogger("wangen")

QUIET_S = 60.0
"""So long without a new line is nothing yet, however fast the steps are."""
QUIET_STEPS = 30
"""So many steps' time without a new line is: on a GPU ten are written at once, and samples take their time."""

_MANY = 10**9
"""What is no less was not written by us."""

QUICK_S, RESTS = 0.5, 10
"""Looking that takes longer, at a very long run, is followed by a rest so many times as long: training goes first."""


class LiveRun:
    """A run as its folder shows it now; read again only when a file changed. Safe for several threads."""

    def __init__(self, options: Watch) -> None:
        """Read the run once, with its dataset, which stays as it is until training is started again.

        Raises:
            UsageError: no such folder, no such run in it, or two datasets are given.
        """
        self._options, self._dataset_file = options, options.dataset
        self._folder = options.output_dir.resolve()
        self._log = MetricsLog(self._folder / METRICS)
        self._lock, self._media = threading.Lock(), Served()
        self._dataset: DatasetPart | None = None
        self._begun: object = None
        self._mark: tuple[Any, ...] | None = None
        self._next_s = 0.0
        self._read()

    def _read(self) -> None:
        """Look at the files, and make the blocks anew where any of them changed."""
        signature, started_s = tuple(_signature(self._folder)), time.monotonic()
        if signature != self._mark and started_s >= self._next_s:
            self.run = read_run(self._folder, self._options.output_name, self._log)
            begun = self.run.reports.get("train", {}).get("begun", self._begun)
            is_known_now = self._dataset and self._dataset.problem and self.run.told(*DATASET_FLAGS)
            if self._dataset is None or is_known_now or begun != self._begun:  # a start may follow changes of it
                self._dataset, self._begun = look_at_dataset(self.run, self._dataset_file), begun
            self._sections = make_sections(self.run, self._dataset, self._media)
            self._mark = signature
            took_s = time.monotonic() - started_s
            self._next_s = started_s + (RESTS * took_s if took_s > QUICK_S else 0.0)
        self._status = status_of(self.run, time.time())

    def page(self) -> str:
        """The whole page."""
        with self._lock:
            self._read()
            return render(self.run, self._sections, self._status)

    def state(self) -> tuple[str, object]:
        """A mark of all blocks and of the status, and both for the page's script."""
        with self._lock:
            self._read()
            return _mark(self._sections, self._status), {
                "status": vars(self._status),
                "sections": [
                    {"key": section.key, "blocks": [
                        {"key": block.key, "digest": block.digest, "html": block.html} for block in section.blocks]}
                    for section in self._sections
                ],
            }  # fmt: skip

    def file(self, key: str) -> Path | None:
        """A picture or video that the page holds; None where a link or something else has taken its place."""
        path = self._media.files.get(key)
        return path if path and is_file(path) and path.resolve() == path else None


def _mark(sections: list[Section], status: Status) -> str:
    import hashlib

    text = " ".join(block.key + block.digest for section in sections for block in section.blocks)
    return hashlib.sha256(f"{text} {status}".encode()).hexdigest()[:32]


def _signature(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Names, sizes and times of the files of a run; training states are no part of the page."""
    for place in (folder, folder / SAMPLES):
        with suppress(OSError):
            for path in sorted(place.iterdir()):
                with suppress(OSError):  # removed meanwhile
                    stat = path.stat()
                    if path.is_file() and path.name != lock.RUN_LOCK:
                        yield path.name, stat.st_size, stat.st_mtime_ns


def status_of(run: RunFiles, now_s: float) -> Status:
    """Where a run is.

    Args:
        run: as it was read.
        now_s: seconds since 1970.
    """
    written_s, reported_s = time_s(run.folder / METRICS), time_s(run.folder / TRAIN_REPORT)
    told = run.reports.get("train", {})
    has_begun = "begun" in told
    is_last = reported_s >= written_s or mapping(told, "counts").get("steps") == run.num_steps  # as in a copy
    if is_last and told and not has_begun:
        if told.get("ok"):
            return Status("finished", f"Finished: {run.num_steps} steps.")
        return Status("stopped", f"Failed: {told.get('summary', '')}")
    if not (run.records or has_begun):
        return Status("waiting", "Nothing has been trained yet.")
    if not run.wrote_last and any(lora.what == "finished" for lora in run.loras):
        return Status("finished", f"Finished: {run.num_steps} steps.")
    held = _is_held(run.folder / lock.RUN_LOCK)
    begun_s = time_s(run.folder / BEGUN) if has_begun else 0.0
    age_s, (step, rest) = now_s - max(written_s, begun_s), _where(run, told)
    if held is False:
        return Status("stopped", f"{step}: it stopped before its end. Run the same line again to go on.")
    if age_s > max(QUIET_S, QUIET_STEPS * _seconds_per_step(run)):
        ago = duration_text(60 * (age_s // 60))
        doing = "it may be saving, validating or sampling" if held else "it stalled or stopped, or it is sampling"
        return Status("quiet", f"{step}: nothing new for {ago}; {doing}.")
    return Status("running", f"{step}: training{rest}.")


def _where(run: RunFiles, told: Mapping[str, Any]) -> tuple[str, str]:
    """The step, of how many where it is told, and words for the time that the others take.

    Of experts that are trained one after the other these are those of the one whose turn it is.
    """
    name, total = str(told.get("output_name", "")), told.get("num_steps")
    if not is_number(total) or total > _MANY:
        return f"Step {run.num_steps}", ""
    expert = name.removeprefix(run.name).strip("_").replace("_", "-")
    done, last = run.turn
    rates = [rate for record in last if is_number(rate := record.get("s_per_step")) and 0 < rate < _MANY]
    left_s = (total - done) * fmean(rates) if rates else 0.0
    step = f"{expert}, step {done} of {total}" if expert else f"Step {done} of {total}"
    return step, f"; the steps that are left take about {duration_text(left_s)}" if left_s > 0 else ""


def _is_held(path: Path) -> bool | None:
    """Whether a live run holds the folder's lock; None when there is no such file, which says nothing."""
    try:
        return lock.busy(path) is not None if path.is_file() else None
    except OSError:
        return None


def _seconds_per_step(run: RunFiles) -> float:
    told = next((rate for record in reversed(run.records) if isinstance(rate := record.get("s_per_step"), float)), 0.0)
    return told


def run(options: Watch) -> Report:
    """Serve until Ctrl-C, which is the good end of it.

    Raises:
        UsageError: no such folder or run, or the port is none.
        WangenError: the port is taken.
    """
    if not 0 <= options.port <= 65535:
        raise UsageError(f"--port is 0 to 65535, got {options.port}")
    shown = LiveRun(options)
    try:
        server = LiveServer(options.port, secrets.token_urlsafe(24), shown)
    except OSError as error:
        raise WangenError(f"port {options.port} cannot be used: {error.strerror}", where="--port",
                          cure="give another one, or 0 for a free one") from None  # fmt: skip
    with server:
        log.info("  open %s", server.url)
        log.info("  on this machine only, and only with this address; Ctrl-C ends it")
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)
    steps = many(shown.run.num_steps, "step")
    return Report(folder=None, summary=f"ended; {shown.run.name} has {steps}")
