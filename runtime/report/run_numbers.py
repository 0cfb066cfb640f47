"""The numbers of a run that may be shown to anybody: how it was set, how fast it was, how much memory it took.

No path, no name of a file, dataset or person: settings are taken from a list, and texts among them only where they are
single words. Needs no torch.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from wangen.generator.errors import UsageError, WangenError, bytes_text
from wangen.generator.resolutions import resolution_name
from wangen.generator.run_folder import METRICS
from wangen.generator.session import report_files
from wangen.generator.tomls import read_dataset
from wangen.runtime.report.metrics_log import MetricsLog, Record, num_steps, run_of
from wangen.runtime.report.step_reports import begun_in, mapping

SHOWN = (
    "task", "train_mode", "network_module", "network_dim", "lora_targets", "optimizer_type", "mixed_precision", "vram",
    "attention", "compile", "cuda_graphs", "plain", "split_attn", "pack", "gradient_accumulation_steps", "gpus",
    "parallel", "cache_mode", "max_data_loader_n_workers", "device", "smoke",
)  # fmt: skip
_MEMORY = (
    "quantize", "blocks_to_swap", "checkpointing", "checkpointing_free_blocks", "gradient_checkpointing_cpu_offload",
)  # fmt: skip
_WORD = re.compile(r"[A-Za-z0-9_.,+-]{1,40}")


def numbers(folder: Path) -> dict[str, str]:
    """What is said of a run: label -> text.

    Args:
        folder: its output folder.

    Raises:
        UsageError: there is no run in it.
    """
    records = _records(folder / METRICS)
    reports = report_files(folder, "train") if folder.is_dir() else []
    report = begun_in(folder, []) or (_json(reports[0]) if reports else {})
    if not records and not report:
        raise UsageError("this folder holds no run", where=str(folder),
                         cure=f"name the output folder of a training, in which {METRICS} lies")  # fmt: skip
    last = mapping(report, "settings").get("output_name") or (run_of(records[-1], "") if records else "")
    records = [record for record in records if run_of(record, last) == last]  # the folder may hold other runs
    made = {
        "settings": _settings(report),
        "dataset": _dataset(report),
        **_rates(records),
        "versions": _versions(report),
    }
    return {label: text for label, text in made.items() if text}


def _records(path: Path) -> Sequence[Record]:
    try:
        return MetricsLog(path).read()
    except OSError:
        return ()


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _settings(report: Mapping[str, Any]) -> str:
    settings, memory = mapping(report, "settings"), mapping(mapping(report, "inputs"), "memory")
    given = [(name, settings.get(name)) for name in SHOWN] + [(name, memory.get(name)) for name in _MEMORY]
    return " ".join(f"{name}={_word(value)}" for name, value in given if value not in (None, False, "", []))


def _word(value: object) -> str:
    """A setting that is a number or one word; another may be anything, a path among it."""
    text = str(value)
    return text if _WORD.fullmatch(text) else "…"


def _versions(report: Mapping[str, Any]) -> str:
    return " ".join(f"{_word(name)}={_word(value)}" for name, value in mapping(report, "versions").items())


def _dataset(report: Mapping[str, Any]) -> str:
    """The blocks of its TOML, as far as that is still there, and how many samples they had."""
    samples = mapping(report, "inputs").get("samples")
    words = [f"{samples} samples"] if isinstance(samples, int) else []
    told = mapping(report, "settings").get("dataset_config") or mapping(report, "settings").get("manifest")
    if isinstance(told, str):
        words += _blocks(Path(told))
    return "; ".join(words)


def _blocks(path: Path) -> Iterator[str]:
    try:
        entries = read_dataset(path, tell=False)
    except (WangenError, OSError):
        return
    for entry in entries:
        frames = ",".join(map(str, entry.target_frames)) if entry.media == "video" else "1"
        bucketed = " in buckets" if entry.enable_bucket else ""
        yield (f"{entry.media} {resolution_name(entry.resolution)}{bucketed}, frames {frames}, "
               f"batch {entry.batch_size}, repeats {entry.num_repeats}")  # fmt: skip


def _rates(records: Sequence[Record]) -> dict[str, str]:
    timed = [record for record in records if _numbers(record, "s_per_step") and _numbers(record, "tokens_per_s")]
    tokens = [record["s_per_step"] * record["tokens_per_s"] for record in timed]
    seconds = [record["s_per_step"] for record in timed]
    peak = max((record["peak_memory_bytes"] for record in records if _numbers(record, "peak_memory_bytes")), default=0)
    rows = {
        "steps": str(num_steps(records)),
        "s/step": f"{median(seconds):.4g} ({_spread(seconds)})" if seconds else "",
        "tokens/step": f"{median(tokens):.0f} ({_spread(tokens)})" if tokens else "",
    }
    for name in ("mfu", "hfu", "data_wait_share", "communication_share"):
        values = [record[name] for record in records if _numbers(record, name)]
        rows[name] = f"{median(values):.3g}" if values else ""
    return rows | {"peak memory": bytes_text(int(peak)) if peak else ""}


def _numbers(record: Record, name: str) -> bool:
    value = record.get(name)
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, {len(values)} readings"
