"""What `wangen doctor` knows of a machine. The checks see nothing else, so that a test can give any machine's facts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from wangen.generator.interpreter import TOLD, Fault
from wangen.generator.setup.hardware import Card, Hardware

Kind = Literal["linux", "wsl", "windows", "macos"]

THIS = "the Python that runs this"
"""Why an interpreter is looked at that no bundle and no variable names: no setup script made it."""
TOLD_WHY = f"{TOLD} names it"
"""Why one is looked at that the user chose."""


@dataclass(frozen=True, kw_only=True)
class System:
    """The operating system.

    Attributes:
        kind: what it is; a distribution in WSL is `wsl`.
        name: of system and release, for people.
        release: of the kernel.
        encoding: of file names in Python.
        code_page: of the console of Windows; None elsewhere, and without a console.
        long_paths: Windows lets programs open paths of 260 characters and more; None elsewhere.
        variables: environment variables that change what Python, CUDA or ROCm do.
        drivers: libraries of an NVIDIA driver that lie in a WSL distribution, where they do not belong.
        wsl_driver: WSL shows the driver of Windows.
        devices: device files of AMD's driver, and whether this user may use them.
        has_infiniband: there are InfiniBand or RoCE adapters.
    """

    kind: Kind = "linux"
    name: str = "Linux"
    release: str = ""
    encoding: str = "utf-8"
    code_page: int | None = None
    long_paths: bool | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    drivers: tuple[str, ...] = ()
    wsl_driver: bool = True
    devices: Mapping[str, bool] = field(default_factory=dict)
    has_infiniband: bool = False


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of the host, in bytes.

    Attributes:
        total: of the machine; 0 when the system does not say.
        available: now.
        swap: space of swap files; on Windows of the page file.
        limit: of the container or the job; None without one.
        locked: that a process may lock by `ulimit -l`; None where nothing limits it.
        shared: size of `/dev/shm`; None where there is none.
        processors: that this process may use.
    """

    total: int = 64 * 2**30
    available: int = 48 * 2**30
    swap: int = 8 * 2**30
    limit: int | None = None
    locked: int | None = None
    shared: int | None = 32 * 2**30
    processors: int = 8


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial of `wangen.runtime.doctor`.

    Attributes:
        found: what it found; empty when it failed.
        error: last line of what it said when it failed.
        crash: how the process ended, in words, when that was no error of Python's; empty otherwise.
    """

    found: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    crash: str = ""

    @property
    def failed(self) -> bool:
        """Whether it did not come to its end."""
        return bool(self.error or self.crash)


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """The Python that the scripts take.

    Attributes:
        path: where it is.
        why: it is this one, in words.
        starts: why it does not start; empty when it does.
        version: of Python, (major, minor, micro), where it says it.
        bits: 64 or 32.
        base: the folder of the Python that its environment is made of.
        own: it is an environment: what other programs install does not reach it.
        packages: package -> version, None where it lacks one.
        faults: what it lacks of what wangen needs.
        looked: where else the scripts would have found one, when this is not the one of the workspace.
    """

    path: str
    why: str = THIS
    starts: str = ""
    version: tuple[int, ...] = (3, 12, 0)
    bits: int = 64
    base: str = "/usr"
    own: bool = True
    packages: Mapping[str, str | None] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    looked: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Place:
    """A folder that wangen reads or writes.

    Attributes:
        what: it is, in words.
        path: the folder, or the nearest one above that exists.
        wanted: the folder as it is configured.
        as_target: the folder as its own machine writes it.
        platform: kind of that machine.
        fixed: the bundle has a configured root, so that its paths are known in full.
        writes: wangen writes there.
        file_system: its type, such as `ext4`; empty when unknown.
        mount: where it is mounted.
        options: of the mount.
        free: bytes; None when unknown.
        writable: this user may write there.
        cloud: the service that keeps it in the cloud; empty for none.
        write_rate: bytes per second; None when it was not measured.
        read_rate: the same for reading what the system does not hold in memory.
    """

    what: str
    path: Path
    wanted: Path
    as_target: str = ""
    platform: str = "linux"
    fixed: bool = False
    writes: bool = True
    file_system: str = ""
    mount: str = ""
    options: tuple[str, ...] = ()
    free: int | None = None
    writable: bool = True
    cloud: str = ""
    write_rate: float | None = None
    read_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that the checks see.

    Attributes:
        system: the operating system.
        memory: of the host.
        hardware: drivers and cards, by their tools.
        cards: each NVIDIA card.
        programs: what computes on the cards now: (name, bytes or None).
        python: the interpreter of the scripts.
        trials: trial -> what it found; those that were not made are missing.
        places: folders.
        shadows: files of the working folder that have the name of a library.
        workspace: why the workspace cannot be read: (found, where, cure); empty when it can, or there is none.
    """

    system: System
    memory: Memory
    hardware: Hardware
    cards: tuple[Card, ...] = ()
    programs: tuple[tuple[str, int | None], ...] = ()
    python: Interpreter
    trials: Mapping[str, Trial] = field(default_factory=dict)
    places: tuple[Place, ...] = ()
    shadows: tuple[str, ...] = ()
    workspace: tuple[str, ...] = ()
