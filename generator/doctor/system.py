"""Looking at the operating system, the memory and the environment variables. Nothing is changed."""

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from wangen.generator.doctor.facts import Kind, Memory, System
from wangen.generator.target import host_platform_name

VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION",
    "CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "WANGEN_PYTHON",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "OMP_NUM_THREADS",
)  # fmt: skip
"""What is looked at; no other variable is read, as it may hold a secret."""

_WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")
_LINUX_DRIVERS = ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/usr/lib64/libcuda.so.1")
_NO_LIMIT = 2**60
"""A limit from here on is none: the first version of control groups writes a number near 2^63."""


def look() -> System:
    """The operating system that this runs on."""
    kind: Kind = "macos" if sys.platform == "darwin" else host_platform_name()
    code_page, long_paths = _windows()
    return System(
        kind=kind,
        name=f"{platform.system()} {platform.release()} ({platform.machine()})",
        release=platform.release(),
        encoding=sys.getfilesystemencoding().lower(),
        code_page=code_page,
        long_paths=long_paths,
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        drivers=tuple(path for path in _LINUX_DRIVERS if kind == "wsl" and Path(path).exists()),
        wsl_driver=kind != "wsl" or _WSL_DRIVER.exists(),
        devices={str(path): os.access(path, os.R_OK | os.W_OK) for path in _amd_devices()},
        has_infiniband=any(_names(Path("/sys/class/infiniband"))),
    )


def _amd_devices() -> Iterator[Path]:
    """`/dev/kfd`, which AMD's driver alone has, and what renders beside it."""
    kfd = Path("/dev/kfd")
    if kfd.exists():
        yield kfd
        yield from sorted(path for path in _names(Path("/dev/dri")) if path.name.startswith("renderD"))


def _names(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _windows() -> tuple[int | None, bool | None]:
    """Code page of the console, and whether long paths are allowed; both None elsewhere."""
    if sys.platform == "win32":
        import ctypes

        return ctypes.windll.kernel32.GetConsoleOutputCP() or None, _lets_long_paths()
    return None, None


def _lets_long_paths() -> bool:
    if sys.platform == "win32":
        import winreg

        key = r"SYSTEM\CurrentControlSet\Control\FileSystem"
        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as opened:
                return bool(winreg.QueryValueEx(opened, "LongPathsEnabled")[0] == 1)
        except OSError:
            return False
    return True


def look_at_memory() -> Memory:
    """The memory of the host, and what limits it."""
    total = available = swap = 0
    with suppress(OSError, RuntimeError, KeyError):  # a container may hide it
        found = psutil.virtual_memory()
        total, available = found.total, found.available
        swap = psutil.swap_memory().total
    shared = Path("/dev/shm")
    return Memory(
        total=total,
        available=available,
        swap=swap,
        limit=memory_limit(),
        locked=_locked(),
        shared=psutil.disk_usage(str(shared)).total if shared.is_dir() else None,
        processors=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
    )


def _locked() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def memory_limit(root: Path = Path("/")) -> int | None:
    """The least limit of the control groups that this process is in, in bytes; None without one.

    Args:
        root: of the file system, with `proc/self/cgroup` and `sys/fs/cgroup` below.
    """
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        group = base / name.strip("/")
        for folder in (group, *group.parents):  # in a container the name may be the host's: its own is at the base
            if folder == base or base in folder.parents:
                text = _read(folder / file).strip()
                limits += [int(text)] if text.isdecimal() else []
    least = min(limits, default=_NO_LIMIT)
    return least if least < _NO_LIMIT else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
