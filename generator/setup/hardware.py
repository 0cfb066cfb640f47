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

Version = tuple[int, int]


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
    code, text = _ask("nvidia-smi")
    if code is None:
        return Hardware(amd=_amd())
    driver, cuda = _DRIVER.search(text), _CUDA.search(text)
    if code != 0 or not driver:
        return Hardware(amd=_amd(), trouble=" ".join(text.split())[:200])
    listed = _ask("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")[1]
    cards = [found for line in listed.splitlines() if (found := _CARD.fullmatch(line.strip()))]
    return Hardware(
        driver=driver[1],
        cuda=(int(cuda[1]), int(cuda[2])) if cuda else None,
        cards=tuple(card[1] for card in cards),
        capability=max(((int(card[2]), int(card[3])) for card in cards), default=None),
        amd=_amd(),
    )


def _amd() -> str:
    found = sorted(set(re.findall(r"^\s*Name:\s+(gfx[0-9a-f]+)\s*$", _ask("rocminfo")[1], re.MULTILINE)))
    return ", ".join(found) or ("/dev/kfd" if Path("/dev/kfd").exists() else "")


def _ask(tool: str, *words: str) -> tuple[int | None, str]:
    """Exit code and output of a tool; None for a tool that is not there or cannot be started."""
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
    except (OSError, subprocess.TimeoutExpired):
        return None, ""
    return done.returncode, done.stdout.decode("utf-8", "replace")
