"""Processes that end themselves, without a word, at the k-th call that changes the file system."""

import gc
import io
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

CALLS = ("replace", "rename", "link", "unlink", "mkdir", "rmdir", "fsync", "utime", "open")
KILLED = -signal.SIGKILL if hasattr(signal, "SIGKILL") else 1
PLACES = {
    r"\.claim-.*": "claim",
    r"\.wangen-needs-.*": "needs",
    r"\.wangen-index.*": "index",
    r"\.wangen-sources.*": "memo",
    r".*\.report\.json": "report",
    r".*\.safetensors": "entry",
    r"\.[0-9a-f]{20}-.*\.tmp": "half entry",
}
"""What the files of a cache folder are; the temporary file of a note counts as the note."""


class Killer:
    """Ends the process at call `at` of those that change the file system; a write is cut in half before.

    A call that only reads is not counted: to die there is to die before the next one that is.
    """

    def __init__(self, at: int, say: Callable[[str], object]) -> None:
        self.count = 0
        self.at = at
        self.say = say
        self._lock = threading.Lock()  # threads count together

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        io.open = self._wrapped("io.open", io.open)

    def met(self, call: str, place: object, die_with: Callable[[], object] = lambda: None) -> None:
        """Count a call; when it is the one, do a part of it and die."""
        with self._lock:
            self.count += 1
            self.say(f"{call} {_what(place)}\n")
            if self.count == self.at:
                die_with()
                os.kill(os.getpid(), signal.SIGKILL)

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            if name == "open" and not words[1] & (os.O_WRONLY | os.O_RDWR):  # as for the fsync of a folder
                return real(*words, **named)
            if name == "io.open":
                mode = words[1] if len(words) > 1 else named.get("mode", "r")
                if not set(mode) & set("wxa+"):
                    return real(*words, **named)
            self.met(name, words[0])
            made = real(*words, **named)
            return _Halved(made, self, words[0]) if name == "io.open" else made

        return call


class _Halved:
    """A file whose `write` counts as a call too."""

    def __init__(self, file: Any, killer: Killer, place: object) -> None:
        self._file, self._killer, self._place = file, killer, place

    def write(self, data: Any) -> int:
        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._killer.met("write", self._place, half)
        written: int = self._file.write(data)
        return written

    def __enter__(self) -> "_Halved":
        return self

    def __exit__(self, *_exception: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _what(place: object) -> str:
    """What a path or an open file is, in a word."""
    if isinstance(place, int):
        place = _path_of(place)
    name = Path(str(place)).name
    name = re.sub(r"^\.(\.wangen-.*|\.claim-.*|[a-z_]+\.report\.json)-[0-9a-f]{16,24}\.tmp$", r"\1", name)
    return next((what for pattern, what in PLACES.items() if re.fullmatch(pattern, name)), "folder")


def _path_of(descriptor: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""


def forked(work: Callable[[], int], at: int) -> tuple[int, list[str]]:
    """Do some work in a forked process that is killed at call `at`; 0: it is not.

    Returns:
        Its exit code (`KILLED`), and the calls it met, the last one of which killed it.
    """
    reader, writer = os.pipe()
    say = os.write

    def watched() -> int:
        Killer(at, lambda line: say(writer, line.encode())).install()
        return work()

    child = fork(watched)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        calls = pipe.read().splitlines()
    return end_of(child), calls


def beside(works: Sequence[Callable[[], int]]) -> list[int]:
    """Begin with all works at one moment, each in a forked process of its own; returns their exit codes."""
    gate, latch = os.pipe()

    def at_once(work: Callable[[], int]) -> int:
        os.close(latch)
        os.read(gate, 1)
        return work()

    children = [fork(partial(at_once, work)) for work in works]
    os.close(latch)
    os.close(gate)
    return [end_of(child) for child in children]


def fork(work: Callable[[], int]) -> int:
    """Begin some work in a process of its own, which says nothing; returns its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process with threads: none is in use
        child = os.fork()
    if child:
        return child
    code = 99
    gc.freeze()  # garbage of the parent with threads of its own would wait for them, and abort
    if compiler := sys.modules.get("torch._inductor.async_compile"):
        compiler.AsyncCompile.pool.cache_clear()  # its threads stay with the parent, and would be waited for
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(torch.get_num_threads())  # makes its pool anew: of two threads that do so, one may fail
    try:
        with Path(os.devnull).open("w") as silence:
            sys.stdout = sys.stderr = silence
            code = work()
    finally:
        os._exit(code)


def end_of(child: int) -> int:
    """Wait for a forked process; returns its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
