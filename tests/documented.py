"""The code blocks of README.md, CONTRIBUTING.md and docs/, what the comments above them say, and their lines.

A comment on the line before a block says what becomes of it:

    <!-- in: PLACE -->              run it in a new copy of a place (documented_places.py); `PLACE, slow` is a slow test
    <!-- not run: REASON -->        it cannot run here; its `wangen` lines are parsed all the same
    <!-- swap: OLD => NEW: REASON -->   run it with these words in the place of those
    <!-- output -->                 a text block: what the block before it printed
    <!-- exactly -->                the output is shown whole, to the letter
    <!-- file: NAME -->             a file that the next blocks use

Blocks that follow one with `in:` on a page run in the same shell, as a reader types them: folders and variables stay.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHELLS = {"bash", "bat", "powershell", "console"}
CODE = SHELLS | {"python", "diff", "toml", "json"}
PLAIN = {"text", "mermaid"}
KEYS = ("in", "not run", "swap", "output", "exactly", "file")
_FENCE = re.compile(r"^( *)```([\w-]*)\s*$")
_COMMENT = re.compile(rf"^ *<!-- ({'|'.join(KEYS)})(?:: (.*))? -->$")
PLACEHOLDER = "…"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: path from the root.
        line: of its fence, from 1.
        language: behind the fence.
        text: without the fence and its indentation.
        says: the comments above it, key -> values.
    """

    page: str
    line: int
    language: str
    text: str
    says: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def place(self) -> str:
        """The place that it begins in; '' for none of its own."""
        return self.says["in"][0].split(",")[0].strip() if "in" in self.says else ""

    @property
    def is_run(self) -> bool:
        """Whether a shell or Python shall run it."""
        return self.language in SHELLS | {"python", "diff"} and not self.says.keys() & {"not run", "file"}


@dataclass(frozen=True)
class Session:
    """Blocks that one shell runs one after the other, with the outputs that pages show."""

    place: str
    slow: bool
    blocks: list[Block]

    def __str__(self) -> str:
        return str(self.blocks[0])


def pages() -> list[Path]:
    """All pages that are read."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page.

    Raises:
        AssertionError: a block without an end.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    found: list[Block] = []
    number = 0
    while number < len(lines):
        if opened := _FENCE.match(lines[number]):
            end = number + 1
            while end < len(lines) and lines[end].strip() != "```":
                end += 1
            assert end < len(lines), f"{name}:{number + 1}: this block has no end"
            indent = len(opened[1])
            text = "\n".join(line[indent:] for line in lines[number + 1 : end]) + "\n"
            found.append(Block(name, number + 1, opened[2], text, _comments(lines[:number])))
            number = end
        number += 1
    return found


def _comments(above: Sequence[str]) -> dict[str, list[str]]:
    says: dict[str, list[str]] = {}
    for line in reversed(above):
        comment = _COMMENT.match(line)
        if not comment:
            break
        says.setdefault(comment[1], []).insert(0, comment[2] or "")
    return says


def all_blocks() -> list[Block]:
    """The blocks of all pages."""
    return [block for page in pages() for block in blocks_of(page)]


def sessions() -> list[Session]:
    """What is run: each block with `in:`, and those that follow it on its page."""
    made: list[Session] = []
    for page in pages():
        current: Session | None = None
        for block in blocks_of(page):
            if block.place:
                current = Session(block.place, block.says["in"][0].endswith(", slow"), [block])
                made.append(current)
            elif current and (block.is_run or block.says.keys() & {"output", "file"}):
                current.blocks.append(block)
    return made


def homeless() -> list[Block]:
    """Blocks that shall run, and follow none that names a place."""
    run = {str(block) for session in sessions() for block in session.blocks}
    return [block for block in all_blocks() if block.is_run and str(block) not in run]


def commands(text: str) -> list[str]:
    """The lines of a console block that are typed; all lines of another."""
    return [line[2:] for line in text.splitlines() if line.startswith("$ ")]


def inline_code(page: Path) -> Iterator[tuple[int, str]]:
    """What stands in backticks outside of blocks, with its line."""
    inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if _FENCE.match(line) or line.strip() == "```":
            inside = not inside
        elif not inside:
            for code in re.findall(r"`([^`]+)`", line):
                yield number, code.replace(r"\|", "|")


def wangen_lines(text: str, windows: bool = False) -> list[list[str]]:
    """The words behind each `wangen` (or `-m wangen.runtime`) of a shell text.

    >>> wangen_lines("cd a && .venv/bin/wangen train --task x  # all of it")
    [['train', '--task', 'x']]
    """
    text = re.sub(r"\\\n|\^\n", " ", text)
    text = text.replace("\\", "/") if windows else text
    found: list[list[str]] = []
    for line in text.splitlines():
        command: list[str] = []
        for word in [*_words(line.removeprefix("$ ")), ";"]:
            if not set(word) <= set(";&|()<>"):
                command.append(word)
                continue
            found += _called(command)
            command = []
    return found


def _called(command: list[str]) -> list[list[str]]:
    """The words for wangen of one simple command, in which others may start it."""
    if "wangen.runtime" in command:
        return [command[command.index("wangen.runtime") + 1 :]]
    if command and command[0].rsplit("/", 1)[-1] in ("wangen", "wangen.exe"):
        return [command[1:]]
    if command[:2] == ["docker", "run"] and "--entrypoint" not in command:
        return [command[command.index("wangen") + 1 :]]
    return []


def _words(line: str) -> list[str]:
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    reader.commenters = "#"
    try:
        return list(reader)
    except ValueError:  # a quote that is an apostrophe of prose
        return line.split()


def counts() -> str:
    """How many code blocks of the pages are run, parsed or read, as docs/README.md says it."""
    blocks = [block for block in all_blocks() if block.language in CODE]
    run = [block for session in sessions() for block in session.blocks if block.is_run]
    swapped = [block for block in run if "swap" in block.says]
    not_run = [block for block in blocks if "not run" in block.says]
    read = [block for block in blocks if block.language in ("toml", "json")]
    words = [code for page in pages() for _, code in inline_code(page) if code.startswith("wangen ")]
    return (
        f"Of {len(blocks)} blocks of code on these pages {len(run)} are run by the tests, {len(swapped)} of them with "
        f"words changed for a machine without a GPU or network; {len(read)} are read as TOML or JSON, and "
        f"{len(not_run)} say in a comment why they are not run; {len(words)} commands in sentences are parsed."
    )


def write_counts() -> None:
    """Bring the numbers in docs/README.md up to date."""
    index = ROOT / "docs" / "README.md"
    text = index.read_text(encoding="utf-8")
    index.write_text(re.sub(r"(?:Of \d+ blocks of code .*|COUNTS)\n", counts() + "\n", text), encoding="utf-8")


if __name__ == "__main__":
    write_counts()
