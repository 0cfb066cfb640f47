"""The names of what a training run leaves in its output folder beside LoRAs and states."""

from wangen.generator.table import REPORT

METRICS = "metrics.jsonl"
"""A line of JSON for every step and every validation."""

SAMPLES = "samples"
"""The folder of samples and continuations."""

SAMPLE_LIST = "samples.jsonl"
"""In that folder: the settings of each."""

TRACES = "trace"
"""The folder of `--profile`'s trace."""

TRAIN_REPORT = f"train{REPORT}"

BEGUN = "train.begun.json"
"""What a start of training says of itself before its first step; removed at the run's end, where the report follows."""
