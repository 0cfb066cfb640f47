"""What the script for Slurm, `train_<slug>.sbatch`, adds to the script whose single steps it runs as jobs.

Jobs follow each other: what has to be there first, an array that caches, the judge of the cache (neither where nothing
reads the cache), the training with what comes after it. The cluster's own words (account, constraint) are no knobs:
they are typed, or stand in the environment.
"""

from collections.abc import Sequence
from typing import Any

from wangen.generator.knobs import Knob
from wangen.generator.quoting import Word, sh_word
from wangen.generator.session import HANDED_ON, SUBMITTED_BY
from wangen.generator.steps import CacheStep, Check, CheckCache, Train
from wangen.generator.table import Step
from wangen.profiles import Platform

ENDING = "sbatch"


def knobs(steps: Sequence[Step]) -> list[Knob]:
    """The knobs of the script, whatever its steps are; GPUs and restarts begin as the training step is told."""
    train = next(step for step in steps if isinstance(step, Train))
    unsaid = "; Slurm is asked for a number, which auto is not" if train.gpus == "auto" else ""
    values = {
        "NODES": ("1", "nodes that train together"),
        "GPUS": ("1" if train.gpus == "auto" else train.gpus, f"GPUs of each of them, one process each{unsaid}"),
        "CPUS": ("8", "processor cores of each node"),
        "CACHE_TASKS": ("4", "tasks that cache side by side, one GPU each"),
        "HOURS": ("24", "time limit of each job in hours; training stops before it, saves, and is queued again"),
        "MAX_RESTARTS": (str(train.max_restarts or 2), "how often processes that failed are started again in a job"),
        "MEMORY": ("default", "host memory of each node, as 200G; default is the cluster's own, often little"),
        "PARTITION": ("default", "the partition; default is the cluster's own"),
    }
    if not any(isinstance(step, CacheStep) for step in steps):
        del values["CACHE_TASKS"]
    return [Knob(name, value, f"{note} (published: {value})") for name, (value, note) in values.items()]


def stages(platform: Platform, steps: Sequence[Step]) -> dict[str, Any]:
    """What the template needs beside what every script has: the steps of each job, in order, and what it asks for."""
    names = [step.command for step in steps]
    caching = [step.command for step in steps if isinstance(step, CacheStep)]
    end = names.index(Train.command)
    start = names.index(caching[0]) if caching else end
    before, quick = names[:start], names[:start] == [Check.command]
    train = next(step for step in steps if isinstance(step, Train))
    logs = sh_word(Word(str(train.log_file.parent if train.log_file else train.output_dir)))
    return {
        "at_once": before if quick else [],
        "prepare": [] if quick else before,
        "caching": caching,
        "check": [CheckCache.command] if CheckCache.command in names[start:end] else [],
        "after": names[end + 1 :],
        "part_words": "--shard auto",
        "train_words": 'train --gpus "$GPUS" --max_restarts "$MAX_RESTARTS"',
        "handed_on": HANDED_ON,
        "submitted_by": SUBMITTED_BY,
        "gpu": platform.accelerator != "cpu",
        "logs": logs,
        "shown_logs": " ".join(logs.split("\n")),  # in a remark, which ends with the line
    }
