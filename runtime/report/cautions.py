"""What a person should know before trusting a run: what went wrong, what is missing, what looks odd."""

import math
from collections.abc import Iterator
from statistics import median

from wangen.generator.errors import many, printable
from wangen.generator.run_folder import EVALUATION, METRICS
from wangen.runtime.report.run_files import RunFiles, files_of
from wangen.runtime.report.step_reports import time_s

MAX_LINES = 40
_WAITING, _SPIKE = 0.1, 20.0
_TAIL_BYTES = 1 << 20


def find_cautions(run: RunFiles) -> list[str]:
    """Sentences, the gravest first."""
    return [*_failed(run), *run.problems, *_outdated(run), *_numbers(run), *_absent(run), *_logged(run)]


def _failed(run: RunFiles) -> Iterator[str]:
    for step, report in run.reports.items():
        if report.get("ok") is False:
            yield f"the step {step} failed: {report.get('summary', '')}"


def _numbers(run: RunFiles) -> Iterator[str]:
    missing = [record["step"] for record in run.records if "loss" in record and record["loss"] is None]
    if missing:
        yield f"the loss was not finite at {many(len(missing), 'step')}, first at step {missing[0]}"
    norms = [(record["step"], norm) for record in run.records
             if isinstance(norm := record.get("grad_norm"), float) and math.isfinite(norm)]  # fmt: skip
    usual = median(norm for _, norm in norms) if norms else 0.0
    spikes = [step for step, norm in norms if usual and norm > _SPIKE * usual]
    if spikes:
        yield f"the gradient's norm was more than {_SPIKE:g} times the usual at {many(len(spikes), 'step')}, " \
              f"first at step {spikes[0]}"  # fmt: skip
    waits = [(share, seconds) for record in run.records if isinstance(share := record.get("data_wait_share"), float)
             and isinstance(seconds := record.get("s_per_step"), float)]  # fmt: skip
    waited, all_seconds = sum(share * seconds for share, seconds in waits), sum(seconds for _, seconds in waits)
    if waited > _WAITING * all_seconds:
        yield f"training waited for data {waited / all_seconds:.0%} of the time: raise --max_data_loader_n_workers"


def _outdated(run: RunFiles) -> Iterator[str]:
    """What was written after the evaluation, of files that it rests on."""
    judged = files_of(run.evaluation) if run.evaluation else []
    written_last = [run.folder / METRICS] if run.wrote_last else []
    paths = [*written_last, *(lora.file for lora in run.loras if lora.file.name in judged)] if judged else []
    newer = [path.name for path in paths if time_s(path) > time_s(run.folder / EVALUATION)]
    if newer:
        yield f"{EVALUATION} is older than {', '.join(newer)}: training went on after it; run wangen evaluate again"


def _absent(run: RunFiles) -> Iterator[str]:
    if run.others:
        yield f"this folder also holds {', '.join(run.others)}; give --output_name to see another one"
    if not run.samples:
        yield "there are no samples: train with --sample_prompts to see what it makes"
    for record in run.evaluation.videos if run.evaluation else ():
        for name, file in record.files.items():
            if run.inside(file) is None:
                yield f"the evaluation names {file} ({name}), which is no picture or video inside this folder"


def _logged(run: RunFiles) -> Iterator[str]:
    """The warnings of the log file that training wrote, the last of each."""
    path = run.path_told("log_file")
    if path is None:
        return
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:  # the page is no place to judge rights of a log
        return
    found = dict.fromkeys(line.partition(" WARNING ")[2].strip() for line in text.splitlines() if " WARNING " in line)
    yield from (f"from the log: {printable(line)}" for line in [*found][-MAX_LINES:])
