"""Lines that nobody should type, and what becomes of them: the real `main`, each time in a process of its own."""

import faulthandler
import io
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from killing import fork

from wangen.generator.cli import main
from wangen.generator.errors import WAS_STOPPED

CRASHED = 99
"""The exit code of a line that ended in an error which nobody has put into words."""
LIMIT_S = 30.0
"""So long a line may take at most; the work itself takes a second or two."""
MEMORY_BYTES = 6 * 2**30
"""So much more may a line reserve than its process has at the beginning: /dev/zero fills more."""
SERVES, SERVED, SERVES_S = "watch", b"Ctrl-C ends it", 8.0
"""The command that goes on until Ctrl-C, and gets that a moment after it has said so, or after so many seconds."""
NETWORK = "NETWORK"
"""What a line says that wants to reach another machine."""


@dataclass(frozen=True)
class Outcome:
    """What a line has come to.

    Attributes:
        code: exit code; negative: a signal, None: it hung and was killed.
        said: all that it printed.
    """

    code: int | None
    said: str

    @property
    def fault(self) -> str:
        """What is wrong with it, in a word or two; empty when nothing is."""
        if self.code is None:
            return "hangs"
        if "Traceback" in self.said or self.code == CRASHED:
            return f"traceback: {self.said.strip().splitlines()[-1:]}"
        if NETWORK in self.said:
            return "opens a connection"
        if self.code not in (0, 1, 2, WAS_STOPPED):
            return f"exit code {self.code}"
        told = [line for line in self.said.splitlines() if ": " in line]
        return "fails without a word" if self.code and not told else ""


def run(words: Sequence[str], folder: Path, before: Callable[[], object] = lambda: None,
        limit_s: float = LIMIT_S) -> Outcome:  # fmt: skip
    """Run `wangen` with these words, without input, with a socket guard and not more memory than there is.

    Args:
        words: without the program's name.
        folder: the working folder.
        before: what the process does before.
        limit_s: so long it may take.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    child = fork(lambda: _child(words, folder, writer, before))
    os.close(writer)
    said: list[bytes] = []
    code = _end_of(child, reader, said, limit_s, serves=SERVES in words[:1])
    os.close(reader)
    return Outcome(code, b"".join(said).decode("utf-8", "replace"))


def _child(words: Sequence[str], folder: Path, output: int, before: Callable[[], object]) -> int:
    """An error that `main` lets through is printed as the interpreter would print it."""
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = io.TextIOWrapper(
            io.FileIO(number, "w", closefd=False), "utf-8", "backslashreplace", write_through=True
        )
        setattr(sys, name, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()
    _limit_memory()
    _guard_network()
    before()
    try:
        return main(words)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return CRASHED


def _limit_memory() -> None:
    status = Path("/proc/self/status")
    if status.is_file():
        size = next(line for line in status.read_text().splitlines() if line.startswith("VmSize"))
        limit = int(size.split()[1]) * 1024 + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _guard_network() -> None:
    """Say it when a connection to another machine is wanted, or its address asked for, and refuse it."""

    def guard(name: str, place: int) -> None:
        real = getattr(socket.socket, name, None) or getattr(socket, name)

        def guarded(*given: Any, **named: Any) -> Any:
            wanted = given[place]
            host = wanted[0] if isinstance(wanted, tuple) else wanted
            named_host = isinstance(wanted, tuple) or name == "getaddrinfo"  # else a socket of this machine's
            if named_host and str(host) not in ("127.0.0.1", "localhost", "::1", "None", ""):
                sys.stderr.write(f"{NETWORK} {host}\n")
                raise OSError(f"no network in this test: {host}")
            return real(*given, **named)

        setattr(socket if name == "getaddrinfo" else socket.socket, name, guarded)

    guard("connect", 1)
    guard("connect_ex", 1)
    guard("getaddrinfo", 0)


def _end_of(child: int, reader: int, said: list[bytes], limit_s: float, *, serves: bool) -> int | None:
    """The exit code of a child, which gets Ctrl-C if it `serves`, and is killed at the limit; what it says is read."""
    begun_s, pause_s = time.monotonic(), 0.002
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        with suppress(BlockingIOError):
            while data := os.read(reader, 2**16):
                said.append(data)
        if done:
            return os.waitstatus_to_exitcode(status)
        passed_s = time.monotonic() - begun_s
        if passed_s > limit_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        if serves and (SERVED in b"".join(said) or passed_s > SERVES_S):
            serves = False
            time.sleep(0.1)
            os.kill(child, signal.SIGINT)
        time.sleep(pause_s)
        pause_s = min(0.05, pause_s * 1.5)


def digests(folder: Path) -> dict[str, str]:
    """What every file below a folder is: its SHA-256, a link's target; pipes and devices by their kind."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = os.fsencode(path.relative_to(folder)).hex()
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file():
            found[name] = sha256(path.read_bytes()).hexdigest()
        elif not path.is_dir():
            found[name] = oct(path.stat().st_mode)
    return found


def sources(folder: Path) -> dict[str, str]:
    """Media, captions and weights of a dataset: caching may change its own folder, and reports lie beside."""
    report = os.fsencode(".report.json").hex()
    found = {}
    for name in ("media", "models"):
        found.update({f"{name} {file}": digest for file, digest in digests(folder / name).items()
                      if not file.endswith(report)})  # fmt: skip
    return found
