"""What a machine has for PyTorch: its drivers and cards, as their own tools tell it.

The standard library alone: the setup scripts run this before anything is installed.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

# WSL keeps the tool of the Windows driver here, which is not on the PATH of every shell.
_WSL_TOOLS = "/usr/lib/wsl/lib"
_TOOL_TIMEOUT_S = 60
# From driver 610 on the table says "KMD Version" and "CUDA UMD Version".
_DRIVER = re.compile(r"(?:Driver|KMD) Version: *([0-9.]+)")
_CUDA = re.compile(r"CUDA (?:UMD )?Version: *(\d+)\.(\d+)")
_CARD = re.compile(r"(.*\S) *, *(\d+)\.(\d+)")

_FIELDS = (
    "name", "compute_cap", "memory.total", "memory.used", "driver_model.current", "pcie.link.width.current",
    "pcie.link.width.max",
)  # fmt: skip

Version = tuple[int, int]


@dataclass(frozen=True)
class Card:
    """One NVIDIA card; None and empty stand for what its driver does not say.

    Attributes:
        name: the product's.
        capability: compute capability.
        total: bytes of its memory.
        used: bytes of it that are taken.
        model: driver model on Windows, `WDDM` or `TCC`.
        lanes: PCI Express lanes that it uses.
        max_lanes: that it has.
    """

    name: str
    capability: Version | None = None
    total: int | None = None
    used: int | None = None
    model: str = ""
    lanes: int | None = None
    max_lanes: int | None = None


@dataclass(frozen=True)
class Hardware:
    """Drivers and cards.

    Attributes:
        driver: version of the NVIDIA driver; empty when none answers.
        cuda: highest CUDA version that it offers; None when it does not say.
        cards: names of the NVIDIA cards.
        capability: compute capability of the best of them; None when the driver does not say.
        amd: what shows an AMD card, such as its architectures `gfx1100`; empty when nothing does.
        trouble: what the NVIDIA driver's tool said when it failed.
    """

    driver: str = ""
    cuda: Version | None = None
    cards: tuple[str, ...] = ()
    capability: Version | None = None
    amd: str = ""
    trouble: str = ""


def look() -> Hardware:
    """Ask `nvidia-smi` and `rocminfo`, as far as they are there."""
    code, text = ask("nvidia-smi")
    if code is None:
        return Hardware(amd=_amd())
    driver, cuda = _DRIVER.search(text), _CUDA.search(text)
    if code != 0 or not driver:
        return Hardware(amd=_amd(), trouble=" ".join(text.split())[:200])
    listed = ask("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")[1]
    cards = [found for line in listed.splitlines() if (found := _CARD.fullmatch(line.strip()))]
    return Hardware(
        driver=driver[1],
        cuda=(int(cuda[1]), int(cuda[2])) if cuda else None,
        cards=tuple(card[1] for card in cards),
        capability=max(((int(card[2]), int(card[3])) for card in cards), default=None),
        amd=_amd(),
    )


def cards() -> tuple[Card, ...]:
    """Each NVIDIA card, as far as its driver tells."""
    text = ask("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")[1]
    return tuple(card for line in text.splitlines() if (card := _card(line)))


def programs() -> tuple[tuple[str, int | None], ...]:
    """What computes on the NVIDIA cards: name of the program, and bytes where the driver tells them."""
    words = ("--query-compute-apps=process_name,used_memory", "--format=csv,noheader,nounits")
    code, text = ask("nvidia-smi", *words)
    rows = [line.rpartition(",") for line in text.splitlines() if "," in line] if code == 0 else []
    return tuple((re.split(r"[/\\]", name.strip())[-1], _mebibytes(used)) for name, _, used in rows)


def _card(line: str) -> Card | None:
    """A line of `nvidia-smi --query-gpu`.

    >>> _card("NVIDIA GeForce RTX 4090, 8.9, 24564, 1024, [N/A], 8, 16").max_lanes
    16
    """
    values = [value.strip() for value in line.rsplit(",", len(_FIELDS) - 1)]
    if len(values) != len(_FIELDS):
        return None
    name, capability, total, used, model, lanes, most = values
    found = re.fullmatch(r"(\d+)\.(\d+)", capability)
    return Card(
        name=name,
        capability=(int(found[1]), int(found[2])) if found else None,
        total=_mebibytes(total),
        used=_mebibytes(used),
        model=model if model.isalpha() else "",
        lanes=int(lanes) if lanes.isdecimal() else None,
        max_lanes=int(most) if most.isdecimal() else None,
    )


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.strip().isdecimal() else None


def _amd() -> str:
    found = sorted(set(re.findall(r"^\s*Name:\s+(gfx[0-9a-f]+)\s*$", ask("rocminfo")[1], re.MULTILINE)))
    return ", ".join(found) or ("/dev/kfd" if Path("/dev/kfd").exists() else "")


def ask(tool: str, *words: str) -> tuple[int | None, str]:
    """Exit code and output of a tool, 1 for one that does not come to its end; None when it cannot be started."""
    program = shutil.which(tool) or shutil.which(tool, path=_WSL_TOOLS)
    if program is None:
        return None, ""
    try:
        done = subprocess.run(
            [program, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TOOL_TIMEOUT_S,
            env=os.environ | {"LC_ALL": "C"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"{tool} gave no answer within {_TOOL_TIMEOUT_S} seconds"
    except OSError:
        return None, ""
    return done.returncode, done.stdout.decode("utf-8", "replace")
