"""The environment that the run scripts use: made, given the right PyTorch and wangen's libraries, and tried out.

`setup_wangen.*` runs this straight from the bundle's wheel with any Python from 3.11 on, before anything is installed;
so it imports nothing but the standard library and what is in the wheel. Running it again repairs what is missing and
leaves the rest.
"""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wangen.generator.errors import WAS_STOPPED, WangenError
from wangen.generator.files import nearest_existing
from wangen.generator.setup.hardware import Hardware, Version, look
from wangen.generator.setup.installing import explain, run, say
from wangen.generator.setup.torch_choice import Build, Installed, Wanted, choose

_MORE = {"sh": "bash {}", "bat": "double-click {}", "ps1": "powershell -NoProfile -ExecutionPolicy Bypass -File {}"}

# Runs in the environment's Python. PyTorch is read, not imported: one that is half installed would end the probe.
_PROBE = """
import importlib.metadata as metadata, importlib.util as util, json, sys
def ask(name, question):
    try:
        return question(metadata.distribution(name)) or ""
    except (metadata.PackageNotFoundError, OSError):
        return ""
print(json.dumps({
    "python": sys.version_info[:3],
    "pip": util.find_spec("pip") is not None,
    "record": ask("wangen", lambda wangen: wangen.read_text("RECORD")),
    "torch": [ask("torch", lambda torch: torch.version),
              ask("torch", lambda torch: torch.locate_file("torch/version.py").read_text(encoding="utf-8"))],
}))
"""

# A tensor on the card shows what `is_available` does not: that this build has code for the card.
_TRIAL = """
import json, torch, wangen.runtime
card = ""
if torch.cuda.is_available():
    card = torch.cuda.get_device_name(0)
    torch.zeros(1, device="cuda").add_(1).item()
print(json.dumps({"torch": torch.__version__, "card": card}))
"""


@dataclass(frozen=True)
class Probe:
    """What an environment holds.

    Attributes:
        python: version of its Python, (major, minor, micro).
        pip: whether it has pip.
        record: the list of files of the wangen in it, with their digests; empty when there is none.
        torch: the PyTorch in it; None when there is none, or not a whole one.
    """

    python: tuple[int, ...]
    pip: bool
    record: str
    torch: Installed | None


def main(argv: Sequence[str] | None = None) -> int:
    """Make or renew the environment; returns the exit code: pip's own when pip failed."""
    options = _options(sys.argv[1:] if argv is None else argv)
    try:
        _set_up(options)
    except WangenError as error:
        sys.stderr.write(f"wangen: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("wangen: stopped. Run this script again to go on.\n")
        return WAS_STOPPED
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="setup_wangen", allow_abbrev=False, description=main.__doc__)
    parser.add_argument("wheel", type=Path, help="wangen's wheel")
    parser.add_argument("--venv", type=Path, action="append", required=True, help="where the environment may be")
    parser.add_argument("--kind", required=True, help="the platform's kind: windows, wsl, linux or slurm")
    parser.add_argument("--accelerator", required=True, choices=("cuda", "rocm", "cpu"))
    parser.add_argument("--build", type=Build.parse, action="append", required=True, metavar="TAG[=CUDA]")
    parser.add_argument("--shell", required=True, choices=tuple(_MORE), help="whose run scripts are named at the end")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="only print the commands")
    return parser.parse_args(argv)


def _set_up(options: argparse.Namespace) -> None:
    say(f"Python {platform.python_version()} ({sys.executable}) on {platform.platform()}, {platform.machine()}")
    if sys.maxsize < 2**32:
        raise WangenError("this Python is a 32-bit one, for which there is no PyTorch", where=sys.executable,
                          cure="install a 64-bit Python, or name one in WANGEN_PYTHON")  # fmt: skip
    hardware = look()
    for line in _seen(hardware, options.accelerator):
        say(line)
    own_index = os.environ.get("WANGEN_TORCH_INDEX", "")
    # What cannot work is said before an environment is made for it.
    wanted = choose(options.build, options.accelerator, options.kind, hardware, own_index)
    say(wanted.reason)
    python = _environment(options.venv, options.dry_run)
    probe = _probe(python)
    _torch(python, probe, wanted, _requirement(options.wheel), options.dry_run)
    _libraries(python, probe, options.wheel, options.dry_run)
    if options.dry_run:
        say("nothing was changed: --dry_run")
        return
    say(f"ready: {_trial(python, hardware, wanted)}. Next: {_next(options.shell)}")
    if os.environ.get("WANGEN_PYTHON", str(python)) != str(python):
        say("WANGEN_PYTHON is set: unset it, or the run scripts take that Python instead of this environment")


def _seen(hardware: Hardware, accelerator: str) -> list[str]:
    lines = []
    if hardware.driver:
        cuda = "{}.{}".format(*hardware.cuda) if hardware.cuda else "unknown"
        cards = ", ".join(hardware.cards) or "no card listed"
        lines.append(f"NVIDIA driver {hardware.driver} for CUDA up to {cuda}: {cards}")
    elif hardware.trouble:
        lines.append(f"the NVIDIA driver does not answer: {hardware.trouble}")
    elif accelerator == "cuda":
        lines.append("no NVIDIA driver (there is no nvidia-smi)")
    if hardware.amd:
        lines.append(f"AMD card: {hardware.amd}")
    elif accelerator == "rocm":
        lines.append("no AMD card was found by rocminfo, which is not there on every system")
    return lines


def _environment(folders: Sequence[Path], dry_run: bool) -> Path:
    """The Python of the environment, which is made when it is not there or does not start.

    Raises:
        WangenError: the folder holds something else, its Python is too old, or it cannot be made.
    """
    # One root can serve Windows and WSL: each has an environment of its own, which is nothing to the other.
    own = [folder for folder in folders if not _python_of(folder, foreign=True).exists()]
    if not own:
        raise WangenError("this folder holds the environment of another system", where=str(folders[0]),
                          cure="name another venv for this platform in wangen.toml, and publish again")  # fmt: skip
    folder = next((folder for folder in own if _python_of(folder).exists()), own[0])
    python = _python_of(folder)
    probe = _probe(python)
    if probe and probe.python < (3, 11):
        raise WangenError(f"the environment has Python {'.'.join(map(str, probe.python))}; wangen needs 3.11 or newer",
                          where=str(folder), cure="rename or delete this folder and run again")  # fmt: skip
    if probe and probe.pip:
        torch = f"PyTorch {probe.torch.version}" if probe.torch else "no PyTorch"
        say(f"environment {folder}: Python {'.'.join(map(str, probe.python))}, {torch}")
    elif probe:
        say(f"environment {folder} has no pip: it is added")
        _python([python, "-m", "ensurepip"], folder, dry_run)
    else:
        _make(folder, dry_run)
    return python


def _make(folder: Path, dry_run: bool) -> None:
    existing = nearest_existing(folder) or folder
    if not os.access(existing, os.W_OK):
        raise WangenError("the environment cannot be made here: the folder cannot be written", where=str(existing),
                          cure="fix its rights, or name another venv for this platform in wangen.toml")  # fmt: skip
    clear = []
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / "pyvenv.cfg").is_file():
            raise WangenError("this folder is no Python environment, and is not empty", where=str(folder),
                              cure="rename it, or name another venv for this platform in wangen.toml")  # fmt: skip
        # Its Python was removed or replaced, or making it was broken off: nothing in it can run any more.
        say(f"environment {folder} does not start: it is made anew")
        clear = ["--clear"]
    else:
        say(f"environment {folder}: it is made")
    _python([sys.executable, "-m", "venv", *clear, folder], folder, dry_run)


def _python(command: Sequence[str | Path], folder: Path, dry_run: bool) -> None:
    code, errors = run([str(word) for word in command], dry_run)
    if code:
        raise WangenError("the environment could not be made; Python's message stands above", where=str(folder),
                          cure=explain(errors) or "on Debian and Ubuntu a package of its own makes environments: sudo"
                          " apt install python{}.{}-venv; then run again".format(*sys.version_info),
                          exit_code=code)  # fmt: skip


def _python_of(folder: Path, *, foreign: bool = False) -> Path:
    """Where an environment of this system has its Python; of the other one, if `foreign`."""
    return folder.absolute() / ("Scripts/python.exe" if (os.name == "nt") != foreign else "bin/python")


def _probe(python: Path) -> Probe | None:
    """What the environment of that Python holds; None when it does not start."""
    if not python.exists():
        return None
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, stdin=subprocess.DEVNULL, check=False)
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError):
        return None
    return Probe(tuple(found["python"]), found["pip"], found["record"], Installed.read(*found["torch"]))


def _requirement(wheel: Path) -> str:
    """The PyTorch that wangen needs, as its wheel says: `torch>=2.9`."""
    found = re.search(r"^Requires-Dist: *(torch\b[^;\n]*)", _from_wheel(wheel, "METADATA"), re.MULTILINE)
    return found[1].strip() if found else "torch"


def _torch(python: Path, probe: Probe | None, wanted: Wanted, requirement: str, dry_run: bool) -> None:
    found = probe.torch if probe else None
    least = re.search(r">=\s*(\d+)\.(\d+)", requirement)
    minimum: Version = (int(least[1]), int(least[2])) if least else (0, 0)
    if found and (why := wanted.against(found, minimum)):
        say(f"PyTorch {found.version} is replaced: {why}")
    elif found:
        return
    # `--force-reinstall` also takes an older version, when the newest of the right build is one.
    words = [*(["--force-reinstall"] if found else []), *wanted.words, requirement.replace("torch", wanted.name, 1)]
    # Another index in the user's settings for pip must not win over the one that holds the right build.
    _pip(python, words, dry_run, {"PIP_EXTRA_INDEX_URL": wanted.index})


def _libraries(python: Path, probe: Probe | None, wheel: Path, dry_run: bool) -> None:
    """Install wangen itself and what its runtime needs, and leave PyTorch as it is."""
    # As an address, because pip reads the characters ; and [ of a path as parts of a requirement.
    address = wheel.absolute().as_uri()
    lines = {line for line in _from_wheel(wheel, "RECORD").splitlines() if not line.endswith(",,")}
    if not probe or not lines <= set(probe.record.splitlines()):
        # pip keeps an installed package of the same version, whatever is in it.
        _pip(python, ["--force-reinstall", "--no-deps", address], dry_run)
    after = None if dry_run else _probe(python)
    kept = [f"torch=={after.torch.version}"] if after and after.torch else []
    _pip(python, [f"wangen[runtime] @ {address}", *kept], dry_run)


def _from_wheel(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = (entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}"))
        return archive.read(entry).decode()


def _pip(python: Path, words: Sequence[str], dry_run: bool, more: Mapping[str, str] | None = None) -> None:
    code, errors = run([str(python), "-m", "pip", "install", "--disable-pip-version-check", *words], dry_run, more)
    if code:
        raise WangenError(f"pip failed with exit code {code}; its message stands above", where=shlex.join(words),
                          cure=explain(errors) or "mend that and run this script again: what is done is kept",
                          exit_code=code)  # fmt: skip


def _trial(python: Path, hardware: Hardware, wanted: Wanted) -> str:
    """PyTorch and the card that it works on.

    Raises:
        WangenError: PyTorch or wangen's runtime does not start, or sees no card where there is one.
    """
    done = subprocess.run([python, "-c", _TRIAL], capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        errors = done.stderr.decode("utf-8", "replace").strip()
        raise WangenError("PyTorch or wangen's runtime does not start: " + (errors.splitlines() or ["no message"])[-1],
                          where=str(python), cure=explain(errors) or "delete the environment's folder and run this"
                          " script again")  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["card"] and wanted.kind in ("cuda", "rocm"):
        if hardware.driver or hardware.amd:
            raise WangenError(f"PyTorch {found['torch']} is installed, and sees no card", where=str(python),
                              cure=_NO_CARD[wanted.kind])  # fmt: skip
        say("PyTorch sees no card on this machine")
    return f"PyTorch {found['torch']} on {found['card'] or 'the CPU'}"


_NO_CARD = {
    "cuda": "restart the machine if its driver was just installed, and see what nvidia-smi says and whether"
    " CUDA_VISIBLE_DEVICES hides the card",
    "rocm": "on Linux, add yourself to the groups that may use the card (sudo usermod -a -G render,video $LOGNAME) and"
    " log in again; docs/install.md names the cards and other indexes",
}


def _next(shell: str) -> str:
    scripts = sorted(Path.cwd().glob(f"train_*.{shell}"))
    return _MORE[shell].format(scripts[0].name) if scripts else "publish a dataset, and run its train script here"


if __name__ == "__main__":
    sys.exit(main())
