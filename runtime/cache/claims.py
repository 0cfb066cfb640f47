"""Claim files: of several processes that fill one cache folder, one encodes each entry.

`.claim-<key>` names its owner and beats while the owner lives. A claim whose owner is dead is free at once on the same
machine, and after the lease on another one. It is never replaced or renamed, for then a second process that had found
it free could hit the claim that a first one had just made in its place. Instead every claim has a random id, and who
takes over the claim with id N makes the file `.claim-<key>-<N>`, which only one can; the last of such a chain holds the
entry. Releasing removes the chain from its beginning, and who has just made a claim looks whether the chain still leads
to it: so nobody holds on to a chain that has been released meanwhile.

What goes wrong nevertheless (a machine that sleeps longer than the lease) costs encoding an entry twice, never more:
entries are written whole, and equal.
"""

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from wangen.generator import lock
from wangen.generator.files import remove
from wangen.generator.lock import HEARTBEAT_S, Owner

CLAIM_NAME = re.compile(r"\.claim-(?P<key>[0-9a-f]{20})(-[0-9a-f]{16})?")

_REMOVAL = "0" * 20
"""Claimed in place of an entry's key by who decides what may be removed."""

_PACKING = "1" * 20
"""Claimed by who packs or unpacks a whole folder."""

_FOLDING = "2" * 8
"""How the keys begin that are claimed by those who move entries into packs beside each other."""

_POLL_S = 0.02

_HELD: set[str] = set()
"""Ids of the claims that this process holds: what else bears its name was left by a writer that was broken off."""


@dataclass(frozen=True)
class _Claim:
    """One claim file as it was read."""

    path: Path
    id: str
    owner: Owner | None
    age_s: float

    @property
    def successor(self) -> Path:
        """The file of who takes this claim over."""
        base = self.path.name[: len(".claim-") + 20]
        return self.path.with_name(f"{base}-{self.id}")

    @property
    def is_free(self) -> bool:
        """Whether its owner is gone."""
        if self.owner == _this_process(os.getpid()):
            return self.id not in _HELD
        return lock.is_free(self.owner, self.age_s)


class Claims:
    """The claims that one writer holds in one folder, with a thread that shows that it lives. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._chains: dict[str, Sequence[_Claim]] = {}
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._beat: threading.Thread | None = None

    def take(self, key: str) -> bool:
        """Claim an entry by its key; False when another live process or writer holds it.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._guard:
            if key in self._chains:
                return True
            chain = _take(self.folder, key)
            if chain is None:
                return False
            self._chains[key] = chain
            if self._beat is None:
                self._beat = threading.Thread(target=self._show_life, daemon=True)
                self._beat.start()
            return True

    def release(self, keys: Iterable[str]) -> None:
        """Give claims back; keys that are not held are passed over."""
        for key in keys:
            with self._guard:
                chain = self._chains.pop(key, None)
            if chain:
                _release(chain)

    def close(self) -> None:
        """Give everything back and end the thread."""
        self._stop.set()
        if self._beat:
            self._beat.join()
        self.release(list(self._chains))
        self._stop, self._beat = threading.Event(), None

    def _show_life(self) -> None:
        stop = self._stop
        while not stop.wait(HEARTBEAT_S):
            with self._guard:
                paths = [chain[-1].path for chain in self._chains.values()]
            for path in paths:
                with suppress(OSError):  # a network folder may be away for a moment; the work goes on
                    os.utime(path)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one process at a time say what it needs of a folder, or remove what nobody needs.

    So whoever says that it needs an entry and then finds it there will keep it.

    Raises:
        OSError: the folder cannot be written.
    """
    claims = Claims(folder)
    while not claims.take(_REMOVAL):
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        claims.close()


@contextmanager
def packing(folder: Path) -> Iterator[bool]:
    """Let one process at a time pack or unpack a whole folder, once those are done that are `folding`.

    Yields:
        Whether it is this one.

    Raises:
        OSError: the folder cannot be written.
    """
    claims = Claims(folder)
    try:
        mine = claims.take(_PACKING)
        while mine and any(_is_held(folder, path.name[7:27]) for path in folder.glob(f".claim-{_FOLDING}*")):
            time.sleep(_POLL_S)
        yield mine
    finally:
        claims.close()


@contextmanager
def folding(folder: Path) -> Iterator[bool]:
    """Let any number of processes move entries into packs, but none while one is `packing`.

    Both claim first and look for the other's claim then, so that one of them at least sees the other.

    Yields:
        Whether it may be done now.

    Raises:
        OSError: the folder cannot be written.
    """
    claims = Claims(folder)
    try:
        claims.take(_FOLDING + secrets.token_hex(6))
        yield not _is_held(folder, _PACKING)
    finally:
        claims.close()


def _is_held(folder: Path, key: str) -> bool:
    """Whether a live process has claimed this."""
    chain = _chain(folder, key)
    return bool(chain) and not chain[-1].is_free


def sweep_claims(folder: Path, names: Iterable[str]) -> int:
    """Remove claims whose owners are gone; returns how many files there were of such.

    Args:
        folder: the cache folder.
        names: what it holds; other files are passed over.
    """
    keys = {name: match["key"] for name in names if (match := CLAIM_NAME.fullmatch(name))}
    for key in set(keys.values()):
        with suppress(OSError):  # the next run tries again
            if chain := _take(folder, key):
                _release(chain)
    removed = 0
    for name, key in keys.items():
        with suppress(OSError):
            claim = _read(folder / name)  # one that no chain leads to was left by a kill between two removals
            if claim and claim.is_free and claim.path not in [link.path for link in _chain(folder, key)]:
                remove(claim.path)
            removed += not (folder / name).exists()
    return removed


def _take(folder: Path, key: str) -> Sequence[_Claim] | None:
    """The chain of claims with this process's own at its end, or None when another live one holds the entry."""
    chain = _chain(folder, key)
    if chain and not chain[-1].is_free:
        return None
    mine = _Claim(chain[-1].successor if chain else folder / f".claim-{key}", secrets.token_hex(8),
                  _this_process(os.getpid()), 0.0)  # fmt: skip
    _HELD.add(mine.id)
    taken = False
    try:
        if lock.create(mine.path, json.dumps({"id": mine.id} | asdict(_this_process(os.getpid())))):
            ids = [claim.id for claim in _chain(folder, key)]
            taken = ids == [*(claim.id for claim in chain), mine.id]
            if not taken:
                remove(mine.path)
    except PermissionError:
        if not mine.path.exists():  # else Windows is about to remove another's
            raise
    finally:
        if not taken:
            _HELD.discard(mine.id)
    return [*chain, mine] if taken else None


def _release(chain: Sequence[_Claim]) -> None:
    """Remove a chain that ends in a claim of ours, beginning with the file that all look for."""
    with suppress(OSError):  # what stays is free as soon as this process ends
        if not chain[-1].successor.exists():  # else another took it over, and it is theirs
            first = _read(chain[0].path)
            for claim in chain if first and first.id == chain[0].id else chain[1:]:
                remove(claim.path)
    _HELD.discard(chain[-1].id)


def _chain(folder: Path, key: str) -> list[_Claim]:
    """The claims on an entry, each taken over by the next; none when nobody has claimed it."""
    chain: list[_Claim] = []
    claim = _read(folder / f".claim-{key}")
    while claim:
        chain.append(claim)
        claim = _read(claim.successor)
    return chain


def _read(path: Path) -> _Claim | None:
    found = lock.read(path)
    if found is None:
        return None
    text, age_s = found
    id = sha256(path.name.encode()).hexdigest()[:16]  # of one that a kill left half-written
    with suppress(ValueError, RecursionError, TypeError, KeyError):
        id = re.fullmatch(r"[0-9a-f]{16}", json.loads(text)["id"])[0]  # type: ignore[index] # a TypeError
    return _Claim(path, id, Owner.parse(text), age_s)


@cache
def _this_process(pid: int) -> Owner:
    """The process with this number, our own, as an owner: a fork is another one."""
    return lock.this_process()
