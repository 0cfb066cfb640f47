"""A run's folder in place of a LoRA's file: which of the LoRAs there is meant. No torch is imported."""

import json
import logging
import re
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from wangen.generator.errors import WangenError
from wangen.generator.header_keys import EPOCH_STEPS, EXPERT, FINGERPRINT, RUN_STEPS
from wangen.generator.headers import read_header
from wangen.generator.kinds import kind_of
from wangen.generator.lora_config import ADAPTER_FILE, DIFFUSERS_FILE
from wangen.generator.run_folder import TRAIN_REPORT
from wangen.generator.run_names import BEST, EPOCH_PART, EXPERT_PART, EXPERTS, FORM_PART, LORA_PARTS, STEP_PART
from wangen.generator.step_parts import require_try

log = logging.getLogger("wangen")

_OTHER_EXPERTS = {
    "--lora_weight": "--lora_weight_high_noise",
    "--lora_weight_high_noise": "--lora_weight",
    "--network_weights": "--network_weights_high_noise",
    "--network_weights_high_noise": "--network_weights",
}
"""Flags for the LoRAs of one expert -> the other one's."""

_NAME = re.compile(rf"(?P<run>.+?){EXPERT_PART}{LORA_PARTS}")


def steps_of_epoch(metadata: Mapping[str, str]) -> str | None:
    """How many steps an epoch had, as a header says it: at first under the name of its batches."""
    return metadata.get(EPOCH_STEPS) or metadata.get("ss_num_batches_per_epoch")


def told_by(path: Path) -> Mapping[str, str]:
    """The text fields of a LoRA; none where it is not there, or damaged."""
    if path.is_file():
        with suppress(WangenError):
            return read_header(path).metadata
    return {}


def numbered(stem: str) -> re.Pattern[str]:
    """The file names of LoRAs that a run saves on its way, by `step` or `epoch`, averages and other layouts as well.

    >>> numbered("cats").fullmatch("cats-step00000020-ema.safetensors")["step"]
    '00000020'
    """
    return re.compile(rf"{re.escape(stem)}(?:{STEP_PART}|{EPOCH_PART}){FORM_PART}\.safetensors")


def written_by(stem: str) -> re.Pattern[str]:
    """The file names under which a run saves the LoRA of this stem: its last, its best, those on its way.

    >>> [bool(written_by("cats").fullmatch(f"cats{end}.safetensors")) for end in ("", "-best", "-kept2-step00000020")]
    [True, True, False]
    """
    return re.compile(rf"{re.escape(stem)}(?:{STEP_PART}|{EPOCH_PART}|{BEST})?{FORM_PART}\.safetensors")


@dataclass(frozen=True)
class SavedLora:
    """One saved LoRA of a run.

    Attributes:
        path: its file.
        run: the run's `--output_name`.
        expert: `high_noise`, `low_noise`, or empty where there is only one.
        step: optimizer steps that it has been trained for, of two experts its own; None where nothing says it.
        run_step: of two experts those of both together; else as above.
        epoch: the epoch after which it was saved, from its name, else the one that its header says; None as above.
        best: it had the lowest held-out loss when it was saved (`--keep_best`).
        finished: the run's last: neither a step nor an epoch nor `-best` stands in its name.
        average: the moving average of the weights (`--ema_decay`).
        kept: a later start set it aside.
        settings: that decided the result, as its header says them; empty where it does not.
    """

    path: Path
    run: str
    expert: str
    step: int | None
    run_step: int | None
    epoch: int | None
    best: bool
    finished: bool
    average: bool
    kept: bool
    settings: str

    @property
    def line(self) -> tuple[str, str]:
        """The run, and the expert: what has one finished LoRA and one best."""
        return self.run, self.expert


def find_lora(path: Path, flag: str, expert: str = "") -> Path:
    """The LoRA that a path means: a file itself, of a run's folder its best, or else its last.

    The best is the one that `train.report.json` or, where there is none, its name says; the last is the finished one,
    or else the one of the most steps. A folder that peft or diffusers wrote is left as it is.

    Args:
        path: a file, or a folder.
        flag: the flag that it was given to (`--lora_weight`).
        expert: `high_noise` or `low_noise`: whose LoRA is wanted, where the folder has one for each.

    Raises:
        UsageError: the folder of a try is not there.
        WangenError: the folder holds no LoRA for this, or those of several runs or experts; a file in it is damaged.
    """
    require_try(path, flag)
    if not _is_run(path):
        return path
    found = saved_loras(path)
    own = [one for one in found if one.expert == expert]
    fitting = own or [one for one in found if not one.expert or not expert]
    if not fitting:
        what = f"no LoRA of the {expert.replace('_', '-')} expert" if found else "no LoRA"
        other = _OTHER_EXPERTS.get(flag) if found else None
        cure = f"give it to {other}, whose LoRAs it holds" if other else "name the LoRA's file"
        raise WangenError(f"{flag}: this folder holds {what}", where=str(path), cure=cure)
    last_run = _last_run(path)
    chosen, why = _best_or_last(_of_one(fitting, last_run, path, flag), last_run)
    log.info("  %s %s: %s, %s%s", flag, path, chosen.path.name, why, _steps_in_words(chosen))
    return chosen.path


def _steps_in_words(chosen: SavedLora) -> str:
    """At which step it was saved, as the report counts them; of two experts with its own steps."""
    if chosen.step is None:
        return ""
    own = f", {chosen.step} of its own" if chosen.run_step != chosen.step else ""
    return f" (step {chosen.run_step}{own})"


def require_one_run(folder: Path, chosen: Container[Path]) -> None:
    """Refuse two experts' LoRAs of two runs, where one of these runs has both: they were not trained for each other.

    Args:
        folder: that was given for both; a file is left as it is.
        chosen: the LoRAs that `find_lora` found for the one and the other expert, among others.

    Raises:
        WangenError: they are of two runs.
    """
    found = saved_loras(folder) if _is_run(folder) else []
    taken = {one.run: one.path.name for one in found if one.path in chosen}
    trained = {expert: {one.run for one in found if one.expert == expert} for expert in EXPERTS}
    if len(taken) > 1 and any(all(run in runs for runs in trained.values()) for run in taken):
        files = " and ".join(taken.values())
        raise WangenError(f"this folder's LoRAs of the two experts would be of two runs: {files}", where=str(folder),
                          cure="name the LoRA's file of each expert")  # fmt: skip


def has_lora(path: Path, expert: str) -> bool:
    """Whether a path is a run's folder with a LoRA that is named by an expert, or by none; no file is opened."""
    names = (_NAME.fullmatch(file.stem) for file in path.glob("*.safetensors")) if _is_run(path) else ()
    return any((name["expert"] or "") == expert for name in names if name)


def _is_run(path: Path) -> bool:
    """Whether a path is a folder, but none that peft or diffusers wrote."""
    return path.is_dir() and not any((path / name).is_file() for name in (ADAPTER_FILE, DIFFUSERS_FILE))


def of_last_run(found: Sequence[SavedLora], folder: Path) -> list[SavedLora]:
    """Those of a folder's LoRAs that the run left which ended last, as far as that is known.

    A best that its report does not name is left out; one that was saved with other settings than the finished one is
    named and kept, since a run may have gone on with other settings.
    """
    found = _without_old_best(found, _last_run(folder))
    finished = {one.line: one.settings for one in found if one.finished}
    if other := [one.path.name for one in found if finished.get(one.line, one.settings) != one.settings]:
        log.warning("  %s: saved with other settings than the finished LoRA, by an earlier run or before a change",
                    ", ".join(other))  # fmt: skip
    return found


def saved_loras(folder: Path) -> list[SavedLora]:
    """All LoRAs of a folder, by run, expert and steps; a LoRA that was saved in several layouts counts once.

    Raises:
        WangenError: the folder cannot be read, or a file in it is damaged.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.match("[!.]*.safetensors") and path.is_file())
    except OSError as error:
        raise WangenError(f"the folder cannot be read: {error.strerror}", where=str(folder)) from None
    names = {path.stem for path in paths}
    found = [_checkpoint(path, names) for path in paths]
    return sorted((one for one in found if one), key=lambda one: (one.run, one.expert, _age(one), one.path.name))


def _checkpoint(path: Path, names: set[str]) -> SavedLora | None:
    """What a file is; None of one that is no adapter, or that is the copy of another in a further layout."""
    match = _NAME.fullmatch(path.stem)
    assert match, "any name fits"
    if match["layout"] and path.stem.removesuffix(match["layout"]) in names:
        return None
    header = read_header(path)
    if not kind_of(header).startswith("lora"):
        return None
    keys = ("ss_steps", "ss_epoch", RUN_STEPS)
    told = {key: int(value) for key in keys if (value := header.metadata.get(key, "")).isdecimal()}
    numbers = {key: int(match[key]) for key in ("step", "epoch") if match[key]}
    step = told.get("ss_steps", numbers.get("step"))
    return SavedLora(
        path=path,
        run=match["run"],
        expert=header.metadata.get(EXPERT, match["expert"] or ""),
        step=step,
        run_step=told.get(RUN_STEPS, step),
        epoch=numbers.get("epoch", told.get("ss_epoch")),
        best=bool(match["best"]),
        finished=not (numbers or match["best"]),
        average=bool(match["average"]),
        kept=bool(match["kept"]),
        settings=header.metadata.get(FINGERPRINT, ""),
    )


def _age(one: SavedLora) -> tuple[bool, int, int, bool]:
    """What sorts the LoRAs of a run from its first to its last; of equal ones what was trained comes last."""
    return one.finished, one.step or 0, one.epoch or 0, not one.average


@dataclass(frozen=True)
class _LastRun:
    """What `train.report.json` says of the run that ended last: names of its finished LoRAs, and of its best ones."""

    finished: frozenset[str] = frozenset()
    best: frozenset[str] = frozenset()


def _last_run(folder: Path) -> _LastRun:
    """The report of a folder; empty where there is none that can be read."""
    try:
        result = json.loads((folder / TRAIN_REPORT).read_bytes())["result"]
        best = [entry["file"] for entry in result.get("best", {}).values()]
        return _LastRun(*(frozenset(PureWindowsPath(name).name for name in names) for names in (result["loras"], best)))
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return _LastRun()


def _of_one(found: Sequence[SavedLora], last_run: _LastRun, folder: Path, flag: str) -> list[SavedLora]:
    """The LoRAs of one run and one expert: of several runs the one that ended last.

    Raises:
        WangenError: no report tells the runs apart, or the LoRAs are of two experts.
    """
    runs = {one.run for one in found}
    ended = {one.run for one in found if one.path.name in last_run.finished}
    if len(runs) > 1 and len(ended) != 1:
        raise WangenError(f"{flag}: this folder holds LoRAs of several runs: {', '.join(sorted(runs)[:4])}",
                          where=str(folder), cure="name the LoRA's file")  # fmt: skip
    kept = [one for one in found if one.run in (ended if len(runs) > 1 else runs)]
    if len({one.expert for one in kept}) > 1:
        raise WangenError(f"{flag}: this folder holds LoRAs of two experts", where=str(folder),
                          cure="name the file of the one that is meant")  # fmt: skip
    return kept


def _without_old_best(found: Sequence[SavedLora], last_run: _LastRun) -> list[SavedLora]:
    """Without a best that a report does not name, where it is the report of that run and expert: an earlier run's."""
    told = {one.line for one in found if one.path.name in last_run.finished}
    return [one for one in found if not (one.line in told and one.best and one.path.name not in last_run.best)]


def _best_or_last(found: Sequence[SavedLora], last_run: _LastRun) -> tuple[SavedLora, str]:
    """The LoRA that stands for a run, and what it is in words."""
    found = _without_old_best(found, last_run)
    if best := [one for one in found if one.best]:
        return best[0], "its best"
    return max(found, key=lambda one: (not one.kept, not one.average, _age(one))), "its last"
