"""`--gpus`: the processes of a machine, started and watched by torch's elastic agent, as torchrun does.

Where a step of Slurm runs this on several machines, one task on each, their agents find each other at the first one.
"""

import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from wangen.generator.errors import WAS_STOPPED, WRONG_USAGE, UsageError, WangenError, many
from wangen.generator.launch import machines
from wangen.generator.run_folder import LOGS
from wangen.generator.session import Report
from wangen.generator.steps import CacheStep, Train
from wangen.generator.train_refusals import refuse_flags
from wangen.runtime.interrupt import hears_hangup
from wangen.runtime.shards import ARRAY
from wangen.runtime.training.agent import PATIENCE, Agent, end_of
from wangen.runtime.training.process_logs import last_words, remove_old

log = logging.getLogger("wangen")

AUTO = "auto"
MASTER = "WANGEN_MASTER_ADDR"
"""The environment variable that says where the first machine is reached, if not by the name that Slurm has for it."""
KILL = 9
"""The number of the signal that leaves a process no time for a word; Windows has no name for it."""
STOP_S = 300
"""So long all have after Ctrl-C to end a step, a validation or samples, and to save; a second Ctrl-C ends that.

Where a process is lost, torch gives others that hang on its GPU's messages 30 seconds.
"""


def train_together(options: Train) -> Report:
    """Train with one process for each GPU; the first shows, writes and saves for all, and each has a log of its own.

    Raises:
        UsageError: there are fewer GPUs, a launcher started copies, or no run can have these flags.
        WangenError: a process failed, and `--max_restarts` did not help, or machines did not find each other.
        KeyboardInterrupt: it was stopped, or one of its processes was.
    """
    refuse_flags(options)
    number, num_nodes = num_processes(options), machines()
    folder = (_beside(options.log_file) if options.log_file else options.output_dir / LOGS).absolute()
    meeting = meeting_here()
    if num_nodes > 1:
        meeting, folder = slurm_meeting(os.environ), folder / os.environ["SLURMD_NODENAME"]
    # The values of a configuration are in the other flags.
    own, restarts = replace(options, gpus="1", max_restarts=0, config_file=None), options.max_restarts
    try:
        _run(own, number, folder, min_nodes=num_nodes, max_nodes=num_nodes, max_restarts=restarts, **meeting)
    except ChildFailedError as error:
        cure = "the next start goes on from the last saved state, if there is one"
        more = f"; {many(restarts, 'restart')} did not help" if restarts else ", with --max_restarts by itself"
        raise _failed(error, number * num_nodes, folder, cure + more) from None
    except (RendezvousError, torch.distributed.DistNetworkError) as error:
        raise WangenError(f"the {many(num_nodes, 'machine')} did not find each other, or lost each other: {error}",
                          where=meeting["rdzv_endpoint"], cure=f"set {MASTER} to a name or address of the first "
                          "machine that the others reach, and see what the log of each says") from None  # fmt: skip
    done = many(number * num_nodes, "process", "processes")
    return Report(folder=None, summary=f"{done} are done, with logs in {folder}")


def _beside(log_file: Path) -> Path:
    """The folder for the processes' own logs: `cats.log` has `cats`, a file without an ending one that is called so."""
    return log_file.with_suffix("") if log_file.suffix else log_file.with_name(f"{log_file.name}-processes")


def encode_together(options: CacheStep) -> None:
    """Encode what is missing with one process for each GPU, a part each, while this one holds the lock of the step.

    Raises:
        UsageError: there are fewer GPUs.
        WangenError: a process failed; what the others have encoded stays.
        KeyboardInterrupt: it was stopped, or one of its processes was.
    """
    number = num_processes(options)
    folder = _beside(options.log_file) if options.log_file else (options.report_dir or options.dataset.parent)
    folder = (folder if options.log_file else folder / LOGS).absolute()
    log.info("  %s encode a part each, with logs in %s", many(number, "process", "processes"), folder)
    part = replace(options, gpus="1", shard="auto", log_file=None, lock=None, report_dir=folder, config_file=None)
    for name in [name for name in os.environ if name.startswith(ARRAY)]:
        del os.environ[name]  # an array's tasks have other work: the parts are of this one's
    try:
        _run(part, number, folder, min_nodes=1, max_nodes=1, max_restarts=0, **meeting_here())
    except ChildFailedError as error:
        cure = "the next start encodes what is missing"
        raise _failed(error, number, folder, cure) from None


def _run(step: Train | CacheStep, number: int, folder: Path, **how: Any) -> None:
    """Run a step in so many processes of this machine; the first one's words are shown, and all are in the folder.

    Raises:
        ChildFailedError: one failed for the last time.
        KeyboardInterrupt: this process was told to stop, or one of those that it started.
        RendezvousError, DistNetworkError: machines do not reach each other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_old(folder)
    logs = DefaultLogsSpecs(str(folder), redirects=Std.ALL, tee={0: Std.ALL}, local_ranks_filter={0})
    os.environ.setdefault(PATIENCE, str(STOP_S))  # LaunchConfig reads it
    config = LaunchConfig(
        nproc_per_node=number, rdzv_backend="c10d", logs_specs=logs, log_line_prefix_template=" ", **how
    )
    if not hears_hangup():
        config.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"  # else nohup would not keep the processes
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK") or os.cpu_count() or 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // number)))
    try:
        start(config, "-m", "wangen.runtime", *step.argv())
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as error:
        if error.get_first_failure()[1].exitcode == WAS_STOPPED:
            raise KeyboardInterrupt from None
        raise


def start(config: LaunchConfig, *words: str) -> None:
    """Run Python with these words in every process, again as often as `config` says, and wait for all of them.

    Raises:
        ChildFailedError: one failed for the last time, or with the exit code of wrong usage.
        SignalException: this process was told to stop.
        RendezvousError, DistNetworkError: machines do not reach each other.
    """
    api.LocalElasticAgent = Agent  # type: ignore[attr-defined,assignment]  # elastic_launch can be told of no other
    elastic_launch(config, sys.executable)(*words)


def meeting_here() -> dict[str, Any]:
    """Where the processes of this machine alone meet, as `LaunchConfig` takes it.

    Its own name is not asked for: in a container it may lead nowhere.
    """
    return {"run_id": uuid.uuid4().hex[:8], "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}


def slurm_meeting(environment: Mapping[str, str]) -> dict[str, Any]:
    """Where and under which name the agents of a Slurm step meet, as `LaunchConfig` takes it.

    The first machine of the step keeps the place. A job that was requeued meets under another name.

    Raises:
        WangenError: Slurm does not say which machine is the first.
    """
    job, is_host = environment["SLURM_JOB_ID"], environment.get("SLURM_NODEID") == "0"
    told = environment.get(MASTER)
    head = told or _first_host(environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"])
    return {
        "run_id": f"{job}-{environment.get('SLURM_RESTART_COUNT', '0')}",
        "rdzv_endpoint": f"{head}:{10_000 + int(job) % 50_000}",
        "rdzv_configs": {"is_host": str(is_host).lower()},
        "local_addr": told if is_host else None,
    }


def _first_host(nodes: str) -> str:
    line = ["scontrol", "show", "hostnames", nodes]
    try:
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise WangenError(f"`{' '.join(line)}` does not say which machine is the first",
                          cure=f"set {MASTER} to its name or address") from None  # fmt: skip


def num_processes(options: Train | CacheStep) -> int:
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


def _failed(error: ChildFailedError, number: int, folder: Path, cure: str) -> WangenError:
    """The failure that came first, in words."""
    rank, failure = error.get_first_failure()
    why = "Linux does that when memory runs out" if failure.exitcode == -KILL else "its log says why"
    files = sorted(folder.glob(f"*/attempt_*/{failure.local_rank}/stderr.log"), key=lambda path: path.stat().st_mtime)
    if files and failure.local_rank:  # the first is on the terminal already
        log.error("%s", last_words(files[-1]))
    return WangenError(
        f"process {rank} of {number} {end_of(failure)}",
        where=str(files[-1] if files else folder),
        cure="correct the line, as its words say" if failure.exitcode == WRONG_USAGE else f"{why}; {cure}",
        exit_code=max(1, failure.exitcode),
    )
