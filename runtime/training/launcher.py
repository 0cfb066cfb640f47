"""`--gpus`: the processes of one machine, started and watched by torch's elastic agent, as torchrun does."""

import logging
import os
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from wangen.generator.errors import UsageError, WangenError, many
from wangen.generator.session import Report
from wangen.generator.steps import Train
from wangen.runtime.training.process_logs import last_words, remove_old

log = logging.getLogger("wangen")

AUTO = "auto"
STOP_S = 1800
"""So long all have after Ctrl-C to end a step, a validation or samples, and to save; a second Ctrl-C waits for none."""


def train_together(options: Train) -> Report:
    """Train with one process for each GPU; the first shows, writes and saves for all, and each has a log of its own.

    Raises:
        UsageError: there are fewer GPUs.
        WangenError: a process failed, and `--max_restarts` did not help.
        KeyboardInterrupt: it was stopped.
    """
    number = num_processes(options)
    folder = (options.log_file.with_suffix("") if options.log_file else options.output_dir / "logs").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    remove_old(folder)
    logs = DefaultLogsSpecs(str(folder), redirects=Std.ALL, tee={0: Std.ALL}, local_ranks_filter={0})
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(STOP_S))  # LaunchConfig reads it
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=number, run_id=uuid.uuid4().hex[:8], rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=options.max_restarts, logs_specs=logs, log_line_prefix_template=" ",
    )  # fmt: skip
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
    try:
        elastic_launch(config, sys.executable)("-m", "wangen.runtime", *replace(options, gpus="1").argv())
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as error:
        raise _failed(error, number, folder) from None
    return Report(folder=None, summary=f"{many(number, 'process', 'processes')} are done, with logs in {folder}")


def num_processes(options: Train) -> int:
    """How many processes `--gpus` asks for.

    Raises:
        UsageError: there are not so many GPUs.
    """
    there = torch.cuda.device_count()
    if options.gpus == AUTO:
        return max(1, there)
    number = int(options.gpus)
    if options.device != "cpu" and number > there:
        raise UsageError(f"--gpus {number}: this machine has {many(there, 'GPU')}",
                         cure="give --gpus auto, which takes those that there are")  # fmt: skip
    return number


def _failed(error: ChildFailedError, number: int, folder: Path) -> WangenError:
    """The failure that came first, in words."""
    rank, failure = error.get_first_failure()
    how = (
        f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with exit code {failure.exitcode}"
    )
    files = sorted(folder.glob(f"*/attempt_*/{failure.local_rank}/stderr.log"), key=lambda path: path.stat().st_mtime)
    if files and failure.local_rank:  # the first is on the terminal already
        log.error("%s", last_words(files[-1]))
    return WangenError(
        f"process {rank} of {number} {how}",
        where=str(files[-1] if files else folder),
        cure="its log says why; the next start goes on from the last saved state, and with --max_restarts it does so "
        "by itself",
        exit_code=max(1, failure.exitcode),
    )
