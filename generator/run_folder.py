"""The names of what a training run, and what judges it, leave in its output folder beside LoRAs."""

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

NEWEST = "newest"
"""The file that names the state that was saved last: one that is to be kept may be of more steps, of another line."""

ANEW = "begun_anew"
"""The file beside the states of an earlier run that says that a run begins anew over them, until that has saved one."""

LOGS = "logs"
"""The folder of the trackers' logs, and where no log file is named of each process's own."""

EVALUATION = "evaluation.json"

LOSSES = "losses"
"""The folder of what `evaluate` has measured, from which it goes on."""

FIRST_FRAMES = "first_frames"
"""The folder of pictures that its videos begin with."""

VIDEOS = "videos"

PAGE = "report.html"
