"""What a run leaves behind, read with patience: what is missing or broken is said and never stops the page."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PureWindowsPath
from typing import Any

from wangen.generator.errors import UsageError, WangenError, many
from wangen.generator.files import is_file
from wangen.generator.formats.one_file import read_file
from wangen.generator.header_keys import AVERAGED, RUN_STEPS, TASK, TRAIN_MODE
from wangen.generator.run_folder import EVALUATION, METRICS, SAMPLE_LIST, SAMPLES
from wangen.generator.run_names import EXPERT_PART, LORA_PARTS, SAMPLE_PARTS
from wangen.runtime.evaluation_file import Evaluation, ScoredCheckpoint, read_evaluation
from wangen.runtime.report.metrics_log import MetricsLog, Record, num_steps, run_of
from wangen.runtime.report.step_reports import begun_in, mapping, reports_of, time_s

DATASET_FLAGS = ("dataset_config", "manifest")
"""Either of them says what a step's dataset is."""

MEDIA_SUFFIXES = {".mp4": "video/mp4", ".webm": "video/webm", ".png": "image/png", ".webp": "image/webp",
                  ".jpg": "image/jpeg"}  # fmt: skip
"""What the page shows of files that others made."""

_LAST_LINES = 100
"""So many lines say how fast it is."""

_LEVELS = 4
"""So many folders above the run's may be that of its script."""


@dataclass(frozen=True)
class LoraFile:
    """A file that training saved.

    Attributes:
        file: where it is.
        expert: `high_noise`, `low_noise`, or empty.
        step: optimizer steps, of two experts those of both together, by its name or its header; None when neither
            says it.
        what: `finished`, `best`, `on the way` or `set aside`, with `, average` for one of averaged weights.
        num_bytes: its size.
        metadata: of its header.
    """

    file: Path
    expert: str
    step: int | None
    what: str
    num_bytes: int
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class Sample:
    """A picture or clip that was sampled while the run trained.

    Attributes:
        file: where it is.
        step: of the run.
        number: of the prompt, counted from 1.
        expert: `high_noise` or `low_noise` of one that was trained alone, else empty.
        settings: its line of `samples.jsonl`; empty without one.
        continued: it continues a held-out clip, whose number it has.
    """

    file: Path
    step: int
    number: int
    expert: str
    settings: Mapping[str, Any]
    continued: bool = False

    @property
    def prompt(self) -> str:
        """What was asked for."""
        return str(self.settings.get("prompt", ""))


@dataclass(frozen=True)
class RunFiles:
    """A run as its folder shows it.

    Attributes:
        folder: the output folder, absolute.
        name: the run's; files and lines of others are left out.
        others: names of other runs in the folder.
        records: lines of `metrics.jsonl`.
        reports: step -> its `report.json`, of training only this run's: before its end what it said at its start.
        loras: saved files, by step and name.
        samples: by prompt or clip, and step.
        evaluation: of this run's LoRAs; None without one.
        judged_beside: a LoRA of another run that the folder's evaluation judged with this run's, and so is none of its.
        problems: what could not be read, in words.
        wrote_last: no other run began or wrote to `metrics.jsonl` after it.
    """

    folder: Path
    name: str
    others: tuple[str, ...] = ()
    records: Sequence[Record] = ()
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loras: Sequence[LoraFile] = ()
    samples: Sequence[Sample] = ()
    evaluation: Evaluation | None = None
    judged_beside: str = ""
    problems: Sequence[str] = ()
    wrote_last: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether there is no trace of a run."""
        return not (self.records or self.reports or self.loras or self.samples or self.evaluation)

    @property
    def trains_model(self) -> bool:
        """Whether the model itself is trained, not an adapter, as the settings or the newest file have it."""
        saved = self.loras[-1].metadata.get(TRAIN_MODE) if self.loras else None
        return (self.settings.get("train_mode") or saved) == "full"

    @property
    def trained(self) -> str:
        """A word for what is trained."""
        return "model" if self.trains_model else "LoRA"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The flags of training; empty where nothing says them."""
        return mapping(self.reports.get("train", {}), "settings")

    @property
    def result(self) -> Mapping[str, Any]:
        """What training says of itself at its end."""
        return mapping(self.reports.get("train", {}), "result")

    def told(self, *flags: str) -> str:
        """The first of flags that training was given, else the steps before it; empty when none says it."""
        steps = ("train", "check_cache", "cache_latents", "cache_text", "check")
        settings = [mapping(self.reports.get(step, {}), "settings") for step in steps]
        return next((str(value) for given in settings for flag in flags if (value := given.get(flag))), "")

    def path_told(self, *flags: str) -> Path | None:
        """The file that a flag names."""
        start = self.start_of(*flags)
        return start / self.told(*flags) if start else None

    def start_of(self, *flags: str) -> Path | None:
        """The folder that the path which a flag names starts at: this one, or a script's, which is one above the run's.

        None where no flag names a file that is there.
        """
        told = self.told(*flags)
        places = [Path(), *self.folder.parents[:_LEVELS]] if told else []
        return next((place for place in places if is_file(place / told)), None)

    @property
    def task(self) -> str:
        """The model profile; empty when nothing says it."""
        headers = (lora.metadata.get(TASK, "") for lora in self.loras)
        return next(filter(None, [*headers, self.told("task")]), "")

    @cached_property
    def num_steps(self) -> int:
        """Optimizer steps that are known of."""
        return num_steps(self.records) or max((lora.step or 0 for lora in self.loras), default=0)

    @cached_property
    def turn(self) -> tuple[int, Sequence[Record]]:
        """The steps that training has done, and its last lines; of experts one after the other, whose turn it is."""
        name = self.reports.get("train", {}).get("output_name", "")
        own = [record for record in self.records if record.get("output_name") == name]
        return num_steps(own), own[-_LAST_LINES:]

    def inside(self, name: str) -> Path | None:
        """A picture or video that a file of the run names; None of one that is not there or not inside the folder."""
        return _media(self.folder, name)


def read_run(folder: Path, name: str | None, metrics: MetricsLog | None = None) -> RunFiles:
    """All that is known of a run.

    Args:
        folder: its output folder.
        name: of the run; None takes the one that was trained last.
        metrics: a log that was read before, to read on.

    Raises:
        UsageError: there is no such folder, or no run of that name in it.
    """
    if not folder.is_dir():
        raise UsageError("no such folder", where=str(folder), cure="give the --output_dir of the training")
    folder, problems = folder.resolve(), list[str]()
    log = metrics or MetricsLog(folder / METRICS)
    records = _records(log, problems)
    reports = dict(reports_of(folder, problems))
    starts = [start for start in (begun_in(folder, problems), reports.get("train", {})) if start]
    trained = [str(mapping(start, "settings").get("output_name") or "") for start in starts]
    names = _names(records) or list(filter(None, trained[:1]))
    if starts and "begun" in starts[0] and trained[0]:
        names = [*(other for other in names if other != trained[0]), trained[0]]
    if name is not None and names and name not in names:
        raise UsageError(f"this folder has no run {name!r}", where=str(folder), cure=f"one of {', '.join(names)}")
    known = name or (names[-1] if names else next(iter(_names_of_files(folder)), ""))
    chosen = known or folder.name
    if own := [start for start, of in zip(starts, trained, strict=True) if of in ("", chosen)]:
        reports["train"] = own[0]
    else:
        reports.pop("train", None)
    evaluation, judged_beside = _evaluation(folder / EVALUATION, known, problems)
    found = RunFiles(
        folder=folder,
        name=chosen,
        others=tuple(other for other in names if other != chosen),
        records=[record for record in records if run_of(record, chosen) == chosen],
        reports=reports,
        loras=sorted(_loras(folder, chosen, problems), key=lambda lora: (lora.step or 0, lora.file.name)),
        samples=sorted(_samples(folder / SAMPLES, chosen, problems), key=_place),
        evaluation=evaluation,
        judged_beside=judged_beside,
        problems=problems,
        wrote_last=not names or names[-1] == chosen,
    )
    if name is not None and found.is_empty and (there := _names_of_files(folder)):
        raise UsageError(f"this folder has no run {name!r}", where=str(folder), cure=f"one of {', '.join(there)}")
    return found


def _media(folder: Path, name: str) -> Path | None:
    """A picture or video inside a folder, resolved; None of one that is not there or leads elsewhere."""
    try:
        path = (folder / name).resolve()
    except (OSError, ValueError, RuntimeError):  # too long a name, a zero byte, or a loop of links
        return None
    known = path.suffix.lower() in MEDIA_SUFFIXES and path.is_relative_to(folder)
    return path if known and is_file(path) else None


def _records(log: MetricsLog, problems: list[str]) -> list[Record]:
    try:
        records = log.read()
    except OSError as error:
        problems.append(f"{METRICS} cannot be read: {error.strerror}")
        return []
    if log.num_malformed:
        problems.append(f"{METRICS} has {many(log.num_malformed, 'line')} that cannot be read")
    if log.cut_short:
        problems.append(f"the last line of {METRICS} is cut short: it is being written, or the run was killed")
    return records


def _names(records: Sequence[Record]) -> list[str]:
    """The runs of a folder; the one that wrote last is the last one."""
    found = dict.fromkeys(run_of(record, "") for record in reversed(records) if "output_name" in record)
    return [*reversed(found)]


def _names_of_files(folder: Path) -> list[str]:
    """The names of runs of which only LoRAs or samples are left, the shortest first."""
    loras = {re.sub(f"{EXPERT_PART}{LORA_PARTS}$", "", path.stem) for path in folder.glob("*.safetensors")}
    samples = [re.fullmatch(f"(?P<run>.+?){SAMPLE_PARTS}", path.name) for path in folder.glob(f"{SAMPLES}/*")]
    names = loras or {match["run"] for match in samples if match}
    return sorted(names, key=lambda name: (len(name), name))


def _lora_names(name: str) -> re.Pattern[str]:
    """What the LoRAs of a run are called."""
    return re.compile(f"{re.escape(name)}{EXPERT_PART}{LORA_PARTS}\\.safetensors")


def _loras(folder: Path, name: str, problems: list[str]) -> Iterator[LoraFile]:
    pattern = _lora_names(name)
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None or not path.is_file():
            continue
        try:
            metadata = read_file(path).metadata
        except WangenError as error:
            problems.append(f"{path.name}: {error.found}")
            continue
        told = match["step"] or metadata.get(RUN_STEPS) or metadata.get("ss_steps", "")
        on_the_way = "set aside" if match["kept"] else "on the way" if match["step"] or match["epoch"] else "finished"
        what = "best" if match["best"] else on_the_way
        what += ", average" if match["average"] or AVERAGED in metadata else ""
        step = int(told) if told.isdecimal() else None
        yield LoraFile(path, match["expert"] or "", step, what, path.stat().st_size, metadata)


def _samples(folder: Path, name: str, problems: list[str]) -> Iterator[Sample]:
    if not folder.is_dir():
        return
    is_listed = is_file(folder / SAMPLE_LIST)
    lines, unlisted = dict(_sample_lines(folder / SAMPLE_LIST, problems)), 0
    pattern = re.compile(re.escape(name) + SAMPLE_PARTS)
    for path in folder.iterdir():
        if (match := pattern.fullmatch(path.name)) and (file := _media(folder.resolve(), path.name)):
            if is_listed and path.name not in lines:
                unlisted += time_s(path) < time_s(folder / SAMPLE_LIST)  # else it is of those that are being made
                continue
            expert = match["expert"] or ""
            settings, continued = lines.get(path.name, {}), bool(match["continued"])
            yield Sample(file, int(match["step"]), int(match["number"]), expert, settings, continued)
    for listed in sorted(lines):
        if pattern.fullmatch(listed) and not is_file(folder / listed):
            problems.append(f"{SAMPLES}/{listed} is in the list of samples, and the file is gone")
    if unlisted:
        problems.append(f"{many(unlisted, 'picture or video', 'pictures and videos')} in {SAMPLES} that the list of "
                        "samples has not, as of an earlier run of this name: not shown")  # fmt: skip


def _place(sample: Sample) -> tuple[str, bool, int, int]:
    """Where a sample stands among others."""
    return sample.expert, sample.continued, sample.number, sample.step


def _sample_lines(path: Path, problems: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, ValueError):
        problems.append(f"{SAMPLES}/{SAMPLE_LIST} cannot be read")
        return
    for line in text.splitlines():
        try:
            found = json.loads(line)
            yield str(found["file"]), found
        except (ValueError, KeyError, TypeError, RecursionError):
            problems.append(f"{SAMPLES}/{SAMPLE_LIST} has a line that cannot be read")


def _evaluation(path: Path, name: str, problems: list[str]) -> tuple[Evaluation | None, str]:
    """The evaluation, or a LoRA of another run that it judged as well; one without any run is taken as it is."""
    if not path.is_file():
        return None, ""
    try:
        found = read_evaluation(path)
    except WangenError as error:
        problems.append(f"{path.name}: {error.found}")
        return None, ""
    others = [file for file in files_of(found) if name and not _lora_names(name).fullmatch(file)]
    if others:
        problems.append(f"{path.name} is left out: {others[0]}, which it judged, is no LoRA of {name}")
        return None, others[0] if len(others) < len(files_of(found)) else ""
    return found, ""


def files_of(evaluation: Evaluation) -> list[str]:
    """The names of the files that were judged."""
    return [name for one in evaluation.checkpoints for name in file_names(one)]


def file_names(checkpoint: ScoredCheckpoint) -> tuple[str, ...]:
    """The names of a checkpoint's files, one for each expert; their folders are written as their system does it."""
    return tuple(PureWindowsPath(file).name for file in (checkpoint.file_high_noise, checkpoint.file) if file)
