"""The tables of the page: settings, provenance, steps, cache, checkpoints and evaluation rows, as texts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wangen.generator.errors import bytes_text, duration_text
from wangen.generator.header_keys import FINGERPRINT, TRAIN_MODE
from wangen.generator.steps import Train
from wangen.generator.table import options
from wangen.runtime.evaluation_file import Evaluation, Memorisation, Row, ScoredCheckpoint
from wangen.runtime.lora_folder import steps_of_epoch
from wangen.runtime.report.charts import experts_of, rows_of, validations
from wangen.runtime.report.dataset import DatasetPart
from wangen.runtime.report.run_files import LoraFile, RunFiles
from wangen.runtime.report.step_reports import is_number, mapping

_LONG = 400


@dataclass(frozen=True)
class Table:
    """A table: a caption, the head, and rows of texts; `best` is the number of a row to stand out."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: int | None = None
    folded: bool = False


def settings_tables(run: RunFiles) -> list[Table]:
    """The flags of training: those that differ from their defaults, and all the others."""
    told = run.settings
    changed: list[tuple[str, str, str]] = []
    usual: list[tuple[str, str, str]] = []
    for option in options(Train):
        if option.name in told:
            default = list(option.default) if isinstance(option.default, tuple) else option.default
            row = (f"--{option.name}", text_of(told[option.name]), option.flag.help)
            (usual if told[option.name] == default else changed).append(row)
    head = ("flag", "value", "meaning")
    tables = [Table("Settings that were given or filled in", head, changed)] if changed else []
    return [*tables, *([Table("Settings at their defaults", head, usual, folded=True)] if usual else [])]


def provenance_tables(run: RunFiles) -> list[Table]:
    """What was run when with which versions on which data."""
    steps = [
        (step, "begun" if "begun" in report else "done" if report.get("ok") else "failed",
         str(report.get("summary", "")), _seconds(report), str(report.get("finished", "")))
        for step, report in run.reports.items()
    ]  # fmt: skip
    found = [Table("Steps", ("step", "", "what it says", "time", "finished"), steps)] if steps else []
    numbers = plan_numbers(run)
    found += [Table("The run in numbers", ("", ""), numbers)] if numbers else []
    if versions := mapping(run.reports.get("train", {}), "versions"):
        found.append(Table("Versions", ("package", "version"), [(str(k), str(v)) for k, v in versions.items()]))
    digests = _digests(run)
    found += [Table("Digests and what else decided the result", ("", ""), digests, folded=True)] if digests else []
    return found


def _seconds(report: Mapping[str, Any]) -> str:
    return _if_number(mapping(report, "timings").get("total_s"), duration_text) or ""


def plan_numbers(run: RunFiles) -> list[tuple[str, str]]:
    """What the run was: task, samples, steps, speed, memory; only what is known.

    Times and losses are those of all its starts, step by step; where no step is known, those of the last one's report.
    """
    report = run.reports.get("train", {})
    inputs, counts = mapping(report, "inputs"), mapping(report, "counts")
    speed = _speed(run)
    headers: Mapping[str, str] = next((lora.metadata for lora in reversed(run.loras)), {})
    found = {
        "task": run.task,
        "samples trained on": inputs.get("samples"),
        "steps": run.num_steps or counts.get("steps"),
        "steps in an epoch": steps_of_epoch(headers),
        "loss at the first and the last step": _losses_in_words(run),
        "time of the steps": _if_number(speed.get("seconds"), duration_text),
        "seconds per step": _if_number(speed.get("s_per_step"), "{:.3g}".format),
        "tokens per second": _if_number(speed.get("tokens_per_s"), "{:.0f}".format),
        "memory at most": _if_number(speed.get("peak_memory_bytes"), bytes_text),
    }
    return [(name, str(value)) for name, value in found.items() if value not in (None, "")]


def _speed(run: RunFiles) -> Mapping[str, Any]:
    """Seconds of all steps, and what is told of one."""
    timed = [record for record in run.records if all(map(is_number, map(record.get, ("s_per_step", "tokens_per_s"))))]
    if not timed:
        return {"seconds": run.result.get("seconds_training"), **mapping(run.result, "speed")}
    seconds = sum(float(record["s_per_step"]) for record in timed)
    tokens = sum(float(record["s_per_step"]) * float(record["tokens_per_s"]) for record in timed)
    looked = mapping(run.result, "speed")  # what was looked at after the last step may have taken more
    peaks = [peak for record in (*timed, looked) if is_number(peak := record.get("peak_memory_bytes"))]
    return {
        "seconds": seconds,
        "s_per_step": seconds / len(timed),
        "tokens_per_s": tokens / seconds if seconds else None,
        "peak_memory_bytes": max(peaks, default=None),
    }


def _losses_in_words(run: RunFiles) -> str:
    """The first and the last loss, of each expert."""
    found = []
    for expert in experts_of(run.records):
        ours = (record.get("loss") for record in run.records if record.get("expert", "") == expert)
        if losses := [loss for loss in ours if is_number(loss)]:
            found.append(f"{expert} {losses[0]:.4g} to {losses[-1]:.4g}".strip())
    first, last = run.result.get("first_loss"), run.result.get("last_loss")
    if not found and is_number(first) and is_number(last):
        return f"{first:.4g} to {last:.4g}"
    return ", ".join(found)


def _if_number(value: Any, as_text: Any) -> str | None:
    return as_text(value) if is_number(value) else None


def _digests(run: RunFiles) -> list[tuple[str, str]]:
    inputs = mapping(run.reports.get("train", {}), "inputs")
    if not inputs:  # while it trains, a saved file's header says it
        text = next((lora.metadata[FINGERPRINT] for lora in reversed(run.loras)
                     if FINGERPRINT in lora.metadata), "{}")  # fmt: skip
        try:
            inputs = mapping({"fingerprint": json.loads(text)}, "fingerprint")
        except (ValueError, RecursionError):
            return []
    return [(str(key), text_of(value)) for key, value in inputs.items() if value is not None]  # None decided nothing


def lora_table(run: RunFiles, use: Sequence[str]) -> Table | None:
    """The saved files, and which of them to use."""
    rows = [
        (lora.file.name, "" if lora.step is None else str(lora.step), lora.what, _network(lora),
         bytes_text(lora.num_bytes), "use this" if lora.file.name in use else "")
        for lora in run.loras
    ]  # fmt: skip
    best = next((number for number, lora in enumerate(run.loras) if lora.file.name in use), None)
    head = ("file", "step", "what", "adapter", "size", "")
    return Table("Saved files", head, rows, best) if rows else None


def _network(lora: LoraFile) -> str:
    kind = lora.metadata.get("ss_network_module", "").rpartition(".")[2].partition("_")[0]
    rank, alpha = lora.metadata.get("ss_network_dim"), lora.metadata.get("ss_network_alpha")
    return f"{kind}, rank {rank}, alpha {alpha}" if rank else lora.metadata.get(TRAIN_MODE, "")


def validation_tables(run: RunFiles) -> list[Table]:
    """The last validation of each expert, by timestep."""
    found = []
    for expert in experts_of(run.records):
        points = validations(run.records, expert)
        if points:
            step, told = points[-1]
            of = f" of the {expert.replace('_', '-')} expert" if expert else ""
            found.append(
                Table(f"Held-out loss{of} at step {step}", ("timestep", "base", run.trained, "difference", "average"),
                      [_validation_row(row) for row in rows_of(told)])
            )  # fmt: skip
    return found


def _validation_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    base, adapter, ema = row.get("base"), row.get("adapter"), row.get("ema")
    change = f"{adapter - base:+.5f}" if isinstance(base, float) and isinstance(adapter, float) else ""
    return f"{row['timestep']:g}", _loss(base), _loss(adapter), change, _loss(ema)


def _loss(value: Any) -> str:
    return f"{value:.5f}" if isinstance(value, float) else ""


def cache_tables(run: RunFiles, dataset: DatasetPart) -> list[Table]:
    """What `check_cache` found when it last ran, and what is in the folders now."""
    rows = mapping(run.reports.get("check_cache", {}), "result").get("datasets")
    columns = ("dataset", "kind", "valid", "stale", "missing", "corrupt", "coverage", "bytes")
    judged = [[str(row.get(column, "")) for column in columns[:6]]
              + [f"{row.get('coverage', 0)} %", _if_number(row.get("bytes"), bytes_text) or ""]
              for row in (rows if isinstance(rows, list) else []) if isinstance(row, dict)]  # fmt: skip
    found = [Table("Judged by check_cache", (*columns[:7], "size"), judged)] if judged else []
    held = [(kind, f"{identity} in {dtype}", str(number), bytes_text(size))
            for kind, identity, dtype, number, size in dataset.cache]  # fmt: skip
    return [*found, *([Table("In the cache folders", ("kind", "encoder", "entries", "size"), held)] if held else [])]


def ranking_table(found: Evaluation) -> Table:
    """The checkpoints, best first."""
    ranked = found.ranked
    rows = [
        (str(one.rank), one.name, "" if one.step is None else str(one.step), f"{one.mean_loss:.5f}",
         f"{one.delta:+.5f}", _interval(one), _judged(one))
        for one in ranked
    ]  # fmt: skip
    interval = f"{found.confidence:.0%} interval{', of all together' if len(ranked) > 1 else ''}"
    head = ("rank", "checkpoint", "step", "held-out loss", "less base", interval, "")
    best = next((number for number, one in enumerate(ranked) if one.name == found.best), None)
    return Table(f"Ranking; the base has {found.mean_base:.5f}", head, rows, best)


def _interval(one: ScoredCheckpoint) -> str:
    none = one.ci_low is None or one.ci_high is None
    return "none of one file" if none else f"{one.ci_low:+.5f} to {one.ci_high:+.5f}"


def _judged(one: ScoredCheckpoint) -> str:
    if one.ci_low is None:
        return "not known"
    return "better than base" if one.is_better else "worse than base" if one.is_worse else "within chance"


def evaluation_tables(found: Evaluation) -> list[Table]:
    """Losses by timestep, by activity and on what was not trained on, and what looks learned by heart."""
    tables = [
        _losses(caption, name, rows, found)
        for caption, name, rows in (
            ("Held-out loss by timestep", "timestep", found.per_timestep),
            ("Held-out loss by activity", "activity", found.per_activity),
            ("What was not trained on (a rise is forgetting)", "set", found.forgetting),
        )
        if rows
    ]
    copies = [_copy(one) for one in found.memorisation]
    head = ("checkpoint", "video", "nearest training clip", "distance", "the base's", "")
    return [*tables, *([Table("Nearest training clips", head, copies)] if copies else [])]


def _losses(caption: str, name: str, rows: Iterable[Row], found: Evaluation) -> Table:
    names = [checkpoint.name for checkpoint in found.ranked]
    shown = [
        (row.name, str(row.num_items or ""), f"{row.base:.5f}",
         *(f"{row.losses[one]:.5f} ({row.losses[one] - row.base:+.5f})" if one in row.losses else "" for one in names))
        for row in rows
    ]  # fmt: skip
    return Table(caption, (name, "items", "base", *names), shown)


def _copy(one: Memorisation) -> tuple[str, ...]:
    usual = "" if one.usual_distance is None else f"{one.usual_distance:.4g}"
    judged = "probably a copy" if one.suspicious else ""
    return one.checkpoint, one.video, one.nearest, f"{one.distance:.4g}", usual, judged


def text_of(value: Any) -> str:
    """A value of JSON on one line, cut where it is very long.

    >>> text_of(None), text_of(True), text_of(["a", "b"]), text_of("x" * 500)[-3:]
    ('', 'yes', 'a b', 'x …')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and all(isinstance(part, str | int | float) for part in value):
        value = " ".join(map(str, value))
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONG else f"{text[:_LONG]} …"
