"""Experiment logs through accelerate's trackers: TensorBoard, and wandb or mlflow when asked. They never stop a run."""

import logging
import math
import netrc
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from wangen.generator.errors import UsageError
from wangen.generator.files import write_whole
from wangen.generator.run_folder import LOGS
from wangen.generator.steps import Train

log = logging.getLogger("wangen")

PROJECT = "wangen"
_LAUNCHED = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""By these accelerate finds out that there are several processes."""
_WANDB_HOST = "https://api.wandb.ai"
_ALONE = ("wandb", "mlflow")
"""Packages that accelerate imports whole, which needs more packages of theirs; TensorBoard comes with torch."""
_NO_NAME = re.compile(r"[^\w./: -]")
"""What mlflow refuses in the name of a number, as the * of Prodigy's d*lr, and with it all numbers of the step."""
_FAILURES = (Exception,)
"""Other people's packages raise what they like, and a log never stops a run."""


def require_trackers(options: Train) -> None:
    """Refuse logs that cannot be kept, before a model loads.

    Raises:
        UsageError: `none` beside others, a package that is missing or does not load, or wandb without a key where it
            would ask for one.
    """
    if "none" in options.log_with and len(set(options.log_with)) > 1:
        raise UsageError("--log_with none stands alone", cure="leave none or the others out")
    for name in options.log_with:
        if name != "none" and find_spec(name) is None:
            raise UsageError(f"--log_with {name} needs a package that is not installed", cure=f"pip install {name}")
        if name in _ALONE:
            try:
                import_module(name)
            except _FAILURES as error:
                raise UsageError(f"--log_with {name}: the package does not load: {error}",
                                 cure=f"pip install --force-reinstall {name}, or leave it out") from None  # fmt: skip
    if "wandb" in options.log_with and not _wandb_has_key():
        raise UsageError("wandb has no key on this machine",
                         cure="set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline")  # fmt: skip


def _wandb_has_key() -> bool:
    """Whether wandb runs without asking: a key in the environment or in netrc, or a mode that needs none."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE", "online") != "online":
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", _WANDB_HOST)).hostname or ""
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(path)).authenticators(host):
                return True
    return False


class Trackers:
    """The experiment logs of a run; one that fails is dropped with a warning."""

    def __init__(self, trackers: Mapping[str, Any]) -> None:
        """Take started trackers of accelerate's by name."""
        self._trackers = dict(trackers)

    def log(self, step: int, values: Mapping[str, Any], group: str = "train") -> None:
        """Log numbers of a step, as `<group>/<name>`; tables of numbers one level deeper, what is no number not at all.

        Args:
            step: of the run: every curve has this axis.
            values: by name.
            group: `train`, `validation`, with the expert's name behind it where there are two.
        """
        numbers = dict(_flat(f"{group}/", values))
        for name, tracker in list(self._trackers.items()):
            _carefully(name, partial(tracker.log, numbers, step=step), self._drop)

    def finish(self) -> None:
        """Close the logs."""
        for name, tracker in list(self._trackers.items()):
            _carefully(name, tracker.finish, self._drop)

    def _drop(self, name: str) -> None:
        del self._trackers[name]


@contextmanager
def open_trackers(options: Train, step: int) -> Iterator[Trackers]:
    """The logs that `--log_with` asks for, open while the block runs.

    A run that resumes goes on in the same log; what TensorBoard has of later steps is hidden.

    Args:
        options: `--log_with`, `--logging_dir`, `--log_tracker_name`, `--wandb_run_name`.
        step: of the run, where it begins.
    """
    names = [name for name in dict.fromkeys(options.log_with) if name != "none"]
    if names:
        _tell_accelerate()
    with _tensorboard_s_thread():
        started = {name: _carefully(name, partial(_START[name], options, step), lambda _name: None) for name in names}
        logs = Trackers({name: tracker for name, tracker in started.items() if tracker is not None})
        try:
            yield logs
        finally:
            logs.finish()


@contextmanager
def _tensorboard_s_thread() -> Iterator[None]:
    """Let the thread in which TensorBoard writes end without a traceback where the disk refuses."""
    before = threading.excepthook

    def hook(found: threading.ExceptHookArgs) -> None:
        is_theirs = type(found.thread).__module__.startswith("tensorboard")
        if not (is_theirs and isinstance(found.exc_value, OSError)):  # who writes next gets it, and says so
            before(found)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def _tell_accelerate() -> None:
    """Its trackers ask whether this is the first process. Only that one opens them: nothing is said of others.

    Left to look for itself, it would ask GPUs and launchers, which may be none of its, and raise where it does not know
    them.
    """
    from accelerate import PartialState

    hidden = {name: os.environ.pop(name) for name in _LAUNCHED if name in os.environ}
    try:
        PartialState(cpu=True)
    finally:
        os.environ |= hidden


def _folder(options: Train) -> Path:
    folder = options.logging_dir or options.output_dir / LOGS
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _name(options: Train) -> str:
    """The run's name in its log folder: where a run of another output folder has that, the folder's name is added.

    So two runs of one name in one `--logging_dir` do not hide each other's curves.
    """
    if options.logging_dir is None:
        return options.output_name
    own, name = options.output_dir.resolve(), options.output_name
    for other in chain((name, f"{name}-{own.name}"), (f"{name}-{own.name}-{number}" for number in count(2))):
        owner = _folder(options) / f"{other}.folder"
        with suppress(FileExistsError), owner.open("x", encoding="utf-8") as file:
            file.write(str(own))
        if owner.read_text(encoding="utf-8") == str(own):
            break
    return other


def _tensorboard(options: Train, step: int) -> Any:
    from accelerate.tracking import TensorBoardTracker

    name = _name(options)
    tracker = TensorBoardTracker(name, logging_dir=str(_folder(options)), purge_step=step and step + 1)
    tracker.start()
    return tracker


def _wandb(options: Train, step: int) -> Any:
    from accelerate.tracking import WandBTracker

    run_id = _remembered(options, "wandb", step) or secrets.token_hex(4)
    tracker = WandBTracker(
        options.log_tracker_name or PROJECT, name=options.wandb_run_name or options.output_name,
        dir=str(_folder(options)), id=run_id, resume="allow",
    )  # fmt: skip
    tracker.start()
    _remember(options, "wandb", run_id)
    return tracker


def _mlflow(options: Train, step: int) -> Any:
    from accelerate.tracking import MLflowTracker

    run_id = _remembered(options, "mlflow", step)
    tracker = MLflowTracker(options.log_tracker_name or PROJECT, run_id=run_id, run_name=options.output_name)
    tracker.start()
    _remember(options, "mlflow", tracker.active_run.info.run_id)
    return _Mlflow(tracker, run_id)


class _Mlflow:
    """accelerate's tracker, with names that mlflow takes, and without what a run that goes on has logged before.

    mlflow keeps both numbers of a step that is done once more, and equal they are: a state goes on exactly.
    """

    def __init__(self, tracker: Any, goes_on: str | None) -> None:
        self._tracker, self._goes_on = tracker, goes_on
        self._logged: dict[str, int] = {}

    def log(self, values: Mapping[str, float], step: int) -> None:
        named = {_NO_NAME.sub("_", name): value for name, value in values.items()}
        new = {name: value for name, value in named.items() if step > self._last(name)}
        if new:
            self._tracker.log(new, step=step)

    def _last(self, name: str) -> int:
        """The last step of a number that the log had when this run went on; -1 where there is none."""
        if self._goes_on and name not in self._logged:
            from mlflow import MlflowClient  # type: ignore[import-not-found,unused-ignore]

            history = MlflowClient().get_metric_history(self._goes_on, name)
            self._logged[name] = max((metric.step for metric in history), default=-1)
        return self._logged.get(name, -1)

    def finish(self) -> None:
        self._tracker.finish()


_START: Mapping[str, Callable[[Train, int], Any]] = {
    "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow,
}  # fmt: skip


def _memo(options: Train, name: str) -> Path:
    return _folder(options) / f"{_name(options)}.{name}-run"


def _remembered(options: Train, name: str, step: int) -> str | None:
    """The log's run of this run so far; None for one that starts from the beginning."""
    with suppress(OSError, UnicodeDecodeError):
        if step:
            return _memo(options, name).read_text(encoding="utf-8").strip() or None
    return None


def _remember(options: Train, name: str, run_id: str) -> None:
    write_whole(_memo(options, name), [run_id.encode()])


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}/", value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}{name}", value


def _carefully(name: str, action: Callable[[], Any], drop: Callable[[str], None]) -> Any:
    """Do it; when the log refuses, say so once and go on without that log."""
    try:
        return action()
    except _FAILURES as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        log.warning("  %s stopped logging: %s; metrics.jsonl goes on", name, reason)
        drop(name)
        return None
