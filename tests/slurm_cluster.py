"""A real Slurm of two nodes on this machine: its own keys, ports and folders, and only its own processes are ended."""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])

CONF = """
ClusterName=tiny
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=1,bf_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=n1,n2 Default=YES
"""


def missing() -> list[str]:
    """The programs of Slurm and munge that are not installed here."""
    return [name for name in PROGRAMS if not shutil.which(name, path=_PATH)]


class Cluster:
    """A Slurm that runs.

    Attributes:
        environment: what a process needs to talk to it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}

    def say(self, *words: str) -> str:
        """Run a command of Slurm; what it prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: `JobState`, `ExitCode`, `Restarts`, `NodeList` …"""
        return dict(re.findall(r"(\w+)=(\S*)", self.say("scontrol", "show", "job", "-o", number).split("\n")[0]))

    def wait(self, number: str, *states: str, limit_s: float = 150) -> dict[str, str]:
        """Wait until a job is in one of the states; what Slurm knows of it then."""
        ends = time.monotonic() + limit_s
        while (found := self.job(number))["JobState"] not in states:
            assert time.monotonic() < ends, (found, self.say("squeue"))
            time.sleep(0.3)
        return found


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start it, and stop it at the end of the block."""
    folder.mkdir(parents=True)
    made, started = Cluster(folder), []
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(
        CONF.format(folder=folder, host=socket.gethostname(), user=getpass.getuser(), ports=_free_ports(3))
    )
    munged = ["munged", "--force", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    try:
        for line, pid_file in (
            (munged, "munge.pid"),
            (["slurmctld"], "slurmctld.pid"),
            (["slurmd", "-N", "n1"], "slurmd.n1.pid"),
            (["slurmd", "-N", "n2"], "slurmd.n2.pid"),
        ):
            made.say(*line)
            started.append(_read_pid(folder / pid_file))
        ends = time.monotonic() + 60
        while made.say("sinfo", "--noheader", "--format=%T").split() != ["idle"]:
            assert time.monotonic() < ends, made.say("sinfo")
            time.sleep(0.2)
        yield made
    finally:
        with suppress(AssertionError):  # what a test left running ends before those that watch it
            made.say("scancel", f"--user={getpass.getuser()}")
            ends = time.monotonic() + 60
            while made.say("squeue", "--noheader").strip() and time.monotonic() < ends:
                time.sleep(0.5)
        for pid in reversed(started):
            _end(pid)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _read_pid(path: Path) -> int:
    ends = time.monotonic() + 30
    while not (path.is_file() and path.read_text().strip()):
        assert time.monotonic() < ends, f"{path} was not written"
        time.sleep(0.05)
    return int(path.read_text())


def _end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        ends = time.monotonic() + 20
        while time.monotonic() < ends:
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
