"""Processes that train together: how many there are and which one this is, as torchrun tells each of them."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from wangen.generator.errors import UsageError, shortened

_TASKS, _NODES = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"
COPIES = (_TASKS, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""How other launchers say how many processes they started; none of them makes these find each other."""


@dataclass(frozen=True)
class Launch:
    """One of the processes that train together.

    Attributes:
        rank: its number, from 0.
        count: of all of them.
        local_rank: its number on its machine, which is that of its GPU.
        local_count: of those on its machine.
        job: what torchrun calls the job, however often it starts its processes again.
        restarts: how often it has.
        slurm_job: the number of the Slurm job that it is in, however often that is requeued.
        requeues: how often it was.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1
    job: str = ""
    restarts: int = 0
    slurm_job: str = ""
    requeues: int = 0

    def shards(self, parallel: str) -> int:
        """How many processes share out the frozen weights by this `--parallel`; 1 where each has all, as with `auto`.

        >>> launch = Launch(count=8, local_count=4)
        >>> [launch.shards(way) for way in ("fsdp", "hsdp", "ddp", "auto")]
        [8, 4, 1, 1]
        """
        return {"fsdp": self.count, "hsdp": self.local_count}.get(parallel, 1)

    @property
    def is_again(self) -> bool:
        """Whether this start repeats one of the same job."""
        return bool(self.restarts or self.requeues)


def launch(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Launch:
    """What this process is, from the environment that torchrun sets; alone where there is none.

    Raises:
        UsageError: another launcher started several processes that would each train alone, the numbers make no sense,
            or there are several on native Windows.

    >>> launch({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "linux")
    Launch(rank=3, count=4, local_rank=1, local_count=2, job='', restarts=0, slurm_job='', requeues=0)
    >>> launch({}, "linux") == Launch()
    True
    """
    slurm_job, requeues = environment.get("SLURM_JOB_ID", ""), _number(environment, "SLURM_RESTART_COUNT")
    if "WORLD_SIZE" not in environment:
        if machines(environment) > 1:
            raise _copies(_TASKS, environment[_TASKS])
        return Launch(slurm_job=slurm_job, requeues=requeues)
    words = [environment.get(name, "0") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    words.append(environment.get("LOCAL_WORLD_SIZE", words[1]))
    rank, count, local_rank, local_count = numbers = [
        int(word) if word.isdecimal() and len(word) < 10 else -1 for word in words
    ]
    job, restarts = environment.get("TORCHELASTIC_RUN_ID", ""), _number(environment, "TORCHELASTIC_RESTART_COUNT")
    found = Launch(rank, count, local_rank, local_count, job, restarts, slurm_job, requeues)
    if min(numbers) < 0 or found.rank >= found.count:
        raise UsageError(f"RANK {words[0]}, WORLD_SIZE {words[1]}, LOCAL_RANK {words[2]} are no numbers of processes",
                         cure="unset them, or start with torchrun, which sets them")  # fmt: skip
    if found.count > 1:
        require_together(platform)
    return found


def _number(environment: Mapping[str, str], name: str) -> int:
    word = environment.get(name, "0")
    return int(word) if _is_number(word) else 0


def _is_number(word: str) -> bool:
    return word.isdecimal() and len(word) < 10


def machines(environment: Mapping[str, str] = os.environ) -> int:
    """How many machines train together: those of a Slurm step with one task on each; 1 where there is no such step.

    Raises:
        UsageError: a launcher started several processes that would each train alone.

    >>> machines({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "PMI_SIZE": "2"}), machines({})
    (2, 1)
    """
    nodes = environment.get(_NODES, "1")
    if nodes != "1" and environment.get(_TASKS) == nodes:
        return int(nodes)
    for name in COPIES:
        number = environment.get(name, "1")
        if number != "1":
            raise _copies(name, number)
    return 1


def _copies(name: str, number: str) -> UsageError:
    return UsageError(
        f"{name} is {number}: so many processes were started, and each would train the whole run alone",
        cure="start one process per machine, and it `torchrun --nproc-per-node GPUS -m wangen.runtime …`; in Slurm "
        "`srun --ntasks-per-node=1` and `--gpus GPUS`",
    )


def asks_for_several(gpus: str) -> bool:
    """Whether `--gpus` asks for more than one process, or for as many as there are GPUs.

    Raises:
        UsageError: it is no number of them.
    """
    if gpus != "auto" and not (_is_number(gpus) and int(gpus)):
        raise UsageError(f"--gpus {shortened(gpus)!r} is neither a number of GPUs nor auto")
    return gpus != "1"


def require_together(platform: str) -> None:
    """Refuse several processes on native Windows.

    Raises:
        UsageError: this is it.
    """
    if platform == "win32":
        raise UsageError("more than one process on native Windows: PyTorch has no NCCL there",
                         cure="train on one GPU, or in WSL")  # fmt: skip
