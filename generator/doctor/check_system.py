"""The operating system and the host's memory."""

from collections.abc import Iterator

from wangen.generator.doctor.facts import Facts
from wangen.generator.doctor.findings import Finding, found
from wangen.generator.memory import GIB, gib_text

_UTF8 = 65001
_LEAST, _LEAST_WSL, _LEAST_FREE = 16 * GIB, 32 * GIB, 4 * GIB
_LEAST_SHARED = 2**29
_LEAST_PAGE_FILE, _AMPLE = 2 * GIB, 96 * GIB
"""Windows promises programs no more than memory and page file together, whatever they really touch."""


def check(facts: Facts) -> Iterator[Finding]:
    """All that is said of the system."""
    system = facts.system
    name = {"wsl": "WSL, ", "linux": "", "windows": "", "macos": ""}[system.kind] + system.name
    yield Finding("ok", "system", f"{name}, {facts.memory.processors} processors")
    if system.kind == "macos":
        yield found("macos", "this is macOS")
    if system.encoding not in ("utf-8", "utf8"):
        yield found("file-names", f"file names are written in {system.encoding}, not in UTF-8")
    if system.code_page not in (None, _UTF8):
        yield found("code-page", f"the console's code page is {system.code_page}")
    if system.long_paths is False:
        yield found("long-paths", "LongPathsEnabled is off")
    yield from _memory(facts)


def _memory(facts: Facts) -> Iterator[Finding]:
    memory, kind = facts.memory, facts.system.kind
    if not memory.total:
        yield Finding("ok", "memory", "the system does not say how much memory there is")
        return
    total = min(memory.total, memory.limit or memory.total)
    yield Finding("ok", "memory", f"{gib_text(memory.total)} of memory, {gib_text(memory.available)} of it free")
    if total < memory.total:
        yield found(
            "memory-limit", f"{gib_text(total)} of the machine's {gib_text(memory.total)} of memory may be used here"
        )
    if total < _LEAST:
        yield found("memory-low", f"{gib_text(total)} of memory")
    elif kind == "wsl" and total < _LEAST_WSL:
        yield found("wsl-memory", f"WSL has {gib_text(total)} of memory")
    if memory.available < _LEAST_FREE:
        yield found("memory-taken", f"{gib_text(memory.available)} of memory are free")
    if kind == "windows" and memory.swap < _LEAST_PAGE_FILE and memory.total + memory.swap < _AMPLE:
        yield found("page-file", f"the page file has {gib_text(memory.swap)}")
    num_cards = len(facts.cards) or len(facts.hardware.cards)
    if memory.shared is not None and memory.shared < _LEAST_SHARED and num_cards > 1:
        yield found("shared-memory", f"/dev/shm has {memory.shared // 2**20} MiB, for {num_cards} cards")
    if memory.locked is not None and memory.locked < GIB and facts.system.has_infiniband:
        yield found("locked-memory", f"a process may lock {memory.locked // 2**10} KiB of memory")
