"""Running `wangen.runtime.doctor` in the scripts' Python: what fails or crashes there is a finding here, no more."""

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wangen.generator.doctor.facts import THIS, TOLD_WHY, Interpreter, Trial
from wangen.generator.errors import WangenError
from wangen.generator.interpreter import TOLD, ask, candidates, faults, installed, wanted_libraries
from wangen.generator.session import PACKAGES
from wangen.generator.target import Target, host_platform_name
from wangen.profiles import platform

MODULE = "wangen.runtime.doctor"
TRIALS = (
    "torch", "cards", "attention sdpa", "attention flash3", "attention flash", "attention xformers", "attention sage",
    "vae", "speed", "lock", "libraries", "video",
)  # fmt: skip
_WITHOUT_TORCH = ("video",)
_LIMIT_S = 180.0

_WINDOWS_CODES = {
    0xC0000005: "access violation", 0xC000001D: "illegal instruction", 0xC0000135: "a library (DLL) is missing",
    0xC0000139: "a library (DLL) of another version", 0xC0000142: "a library (DLL) does not start",
    0xC0000374: "heap corruption", 0xC0000409: "stack overrun",
}  # fmt: skip

_ABOUT = """
import json, os, sys
conda = os.path.isdir(os.path.join(sys.prefix, "conda-meta"))
print(json.dumps({"version": sys.version_info[:3], "bits": 64 if sys.maxsize > 2**32 else 32, "base": sys.base_prefix,
                  "own": conda or sys.prefix != sys.base_prefix}))
"""


def choose(target: Target | None, this: str, here: Path) -> tuple[Path, str, tuple[str, ...]]:
    """The Python to look at, why it is that one, and where else it was looked for.

    Args:
        target: platform of the workspace whose scripts would run here; None without one.
        this: the Python that runs now.
        here: the working folder, which may be a bundle's.
    """
    told = os.environ.get(TOLD)
    if told:
        return Path(told), TOLD_WHY, ()
    inside = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    looked = candidates(target) if target else []
    if not target and any(here.glob("setup_wangen.*")):
        looked = [here.joinpath(folder, *inside) for folder in platform(host_platform_name()).venv]
    for path in looked:
        if path.is_file():
            return path, "the bundle's scripts take it", ()
    active = os.environ.get("VIRTUAL_ENV")
    if active and Path(active, *inside).is_file():
        return Path(active, *inside), "VIRTUAL_ENV names it", tuple(map(str, looked))
    return Path(this), THIS, tuple(map(str, looked))


def interpreter(path: Path, why: str, looked: tuple[str, ...], accelerator: str) -> Interpreter:
    """What an interpreter is, and what it lacks of what wangen needs."""
    wanted = wanted_libraries()
    names = dict.fromkeys((*PACKAGES, *(need.name for need in wanted)))
    try:
        about, packages = ask(path, _ABOUT), installed(path, names)
    except WangenError as error:
        return Interpreter(path=str(path), why=why, starts=_short(error.found), looked=looked)
    return Interpreter(
        path=str(path), why=why, version=tuple(about["version"]), bits=about["bits"], base=about["base"],
        own=about["own"], packages=packages, faults=tuple(faults(wanted, packages, accelerator)), looked=looked,
    )  # fmt: skip


def run(python: str, names: Iterable[str] = TRIALS, limit_s: float = _LIMIT_S) -> dict[str, Trial]:
    """Make trials in an interpreter, in one process as long as none fails; trial -> what came of it.

    Without a PyTorch that starts, the trials that need it are left out.

    Args:
        python: the interpreter.
        names: of trials.
        limit_s: seconds that a process may take.
    """
    left, made = list(names), dict[str, Trial]()
    while left:
        results, failure = _run(python, left, limit_s)
        made |= {name: Trial(found=found) for name, found in results.items()}
        left = [name for name in left if name not in results]
        if left:
            made[left[0]] = failure
            no_torch = made.get("torch", Trial()).failed
            left = [name for name in left[1:] if not no_torch or name in _WITHOUT_TORCH]
    return made


def _run(python: str, names: Sequence[str], limit_s: float) -> tuple[dict[str, Mapping[str, Any]], Trial]:
    """The results of the trials that came to their end, in order, and how the next one failed."""
    try:
        done = subprocess.run([python, "-m", MODULE, *names], capture_output=True, stdin=subprocess.DEVNULL,
                              timeout=limit_s, check=False)  # fmt: skip
        output, errors, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        return _results(error.stdout or b""), Trial(crash=f"it was still at it after {limit_s:.0f} seconds")
    except OSError as error:
        return {}, Trial(error=f"it does not start: {error.strerror}")
    failure = Trial(error=_last_line(errors), crash="" if code in (0, 1) else how_it_ended(code))
    return _results(output), failure


def _results(output: bytes) -> dict[str, Mapping[str, Any]]:
    found = {}
    for line in output.decode("utf-8", "replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a process that was killed
            continue
        if isinstance(record, dict) and isinstance(record.get("found"), dict):
            found[str(record["trial"])] = record["found"]
    return found


def how_it_ended(code: int) -> str:
    """A process's exit code in words.

    >>> how_it_ended(-11), how_it_ended(0xC0000005), how_it_ended(3)
    ('signal SIGSEGV', 'exit code 0xC0000005, access violation', 'exit code 3')
    """
    if code < 0 and os.name != "nt":
        known = {each.value: each.name for each in signal.Signals}
        return f"signal {known.get(-code, -code)}"
    if code % 2**32 >= 0xC0000000:
        words = _WINDOWS_CODES.get(code % 2**32)
        return f"exit code 0x{code % 2**32:X}" + (f", {words}" if words else "")
    return f"exit code {code}"


def _last_line(errors: bytes) -> str:
    lines = [line for line in errors.decode("utf-8", "replace").splitlines() if line.strip()]
    return _short(lines[-1] if lines else "no message")


def _short(text: str) -> str:
    return " ".join(text.split())[:300]
