"""Commands of an installation: run with their own live output, and their failures explained."""

import os
import re
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence

from wangen.generator.errors import WangenError

# The first that matches wins: without a network pip also says that it found no version.
_CAUSES = (
    (
        r"No space left|Errno 28\b|not enough space|Disk quota exceeded",
        "the disk is full: PyTorch and its libraries need about 8 GB, and as much again in the folder for temporary"
        " files (TMPDIR, on Windows TEMP) while they are unpacked. Free some and run this script again",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError",
        "the connection is not trusted, as behind a proxy that reads along: set PIP_CERT to its certificate file",
    ),
    (
        r"NewConnectionError|ConnectionError|Failed to establish|Temporary failure in name|getaddrinfo failed"
        r"|Connection refused|ConnectTimeout|Read timed out|Network is unreachable|ProxyError|No route to host"
        r"|50\d Server",
        "the package index cannot be reached: see whether the network works, or whether a proxy is needed"
        " (HTTPS_PROXY), and run this script again. docs/install.md says how to install without a network",
    ),
    (
        r"No matching distribution found for torch\b",
        "there is no PyTorch for this Python and system in that index: Python 3.12 and 3.13 are the safest; name one in"
        " WANGEN_PYTHON, delete the environment's folder and run this script again",
    ),
    (
        r"WinError (5|32)\b|being used by another process|Access is denied",
        "a file is in use: end the training, ComfyUI or Python that uses this environment, and run this script again",
    ),
    (
        r"WinError (126|127)\b|DLL load failed|VCRUNTIME",
        "a library of Windows is missing: install the Visual C++ Redistributable (x64) from Microsoft and run this"
        " script again",
    ),
    (
        r"no kernel image is available",
        "this build of PyTorch has no code for the card: set WANGEN_TORCH_INDEX to another index (docs/install.md)",
    ),
    (r"externally-managed-environment", "name another Python in WANGEN_PYTHON: this one is not allowed to install"),
)


def say(text: str) -> None:
    """Print a line for the user, at once, so that it stands before what a command prints."""
    sys.stdout.write(f"wangen: {text}\n")
    sys.stdout.flush()


def run(command: Sequence[str], dry_run: bool, more: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command with its output live, or only print it; returns its exit code and the end of its error output.

    Args:
        command: the program and its arguments.
        dry_run: only print it.
        more: variables added to its environment.

    Raises:
        WangenError: the program cannot be started.
    """
    shown = subprocess.list2cmdline(command) if sys.platform == "win32" else shlex.join(command)
    say(f"{'would run' if dry_run else 'runs'}: {shown}")
    if dry_run:
        return 0, ""
    last: deque[str] = deque(maxlen=60)
    try:
        # Its output goes straight to the terminal, so that it shows its bars; what it says of errors is also read.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | (more or {})
        )
    except OSError as error:
        raise WangenError(f"cannot be started: {error.strerror}", where=command[0]) from error
    with process:
        for line in process.stderr or ():
            text = line.decode("utf-8", "replace")
            last.append(text)
            sys.stderr.write(text)
            sys.stderr.flush()
    return process.returncode, "".join(last)


def explain(errors: str) -> str:
    """What to do about the cause that an error output shows; empty when it shows none that is known."""
    return next((cure for pattern, cure in _CAUSES if re.search(pattern, errors)), "")
