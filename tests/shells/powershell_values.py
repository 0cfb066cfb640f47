"""PowerShell's words, truth, text and comparisons, as far as the .ps1 scripts use them, and what a run of one did."""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class OutsideError(Exception):
    """The script uses something that the model does not know."""


class Dashed(str):
    """A word of the script's command line that begins with a dash: PowerShell remembers that it was a parameter."""


@dataclass(frozen=True)
class Call:
    """A program that the script starts: `words` are its arguments, `env` the environment at that moment."""

    program: str
    words: tuple[str, ...]
    folder: str
    env: Mapping[str, str]


@dataclass
class Run:
    """What a script did: its exit code, the lines it showed, the programs it started, the environment it left."""

    code: int = 0
    lines: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    error: str = ""


def bound(word: str) -> Iterator[str]:
    r"""What `-File` makes of a word: one with a dash is a parameter, and what stands behind its colon is its value."""
    if not word.startswith("-"):
        yield word
        return
    name, _, value = word.partition(":")
    yield Dashed(name)
    if value:
        yield value


def truth(value: Any) -> bool:
    """What a condition makes of a value."""
    if isinstance(value, list):
        return truth(value[0]) if len(value) == 1 else bool(value)
    return bool(value)


def text(value: Any) -> str:
    """A value as a string holds it; a list with blanks between its items."""
    if isinstance(value, list):
        return " ".join(map(text, value))
    return "" if value is None else str(value)


def _scalars(same: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compare(left: Any, right: Any) -> bool:
        if type(left) not in (int, str, Dashed) or type(right) not in (int, str, Dashed):
            raise OutsideError(f"a comparison of {left!r} with {right!r}")
        # The right side becomes what the left one is.
        return same(left, int(right) if isinstance(left, int) else str(right))

    return compare


def _no_case(left: Any, right: Any) -> bool:
    return left.casefold() == right.casefold() if isinstance(left, str) else left == right


def _match(left: Any, pattern: Any) -> bool:
    return re.search(text(pattern).replace(r"\z", r"\Z"), text(left), re.IGNORECASE) is not None


COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "-eq": _scalars(_no_case),
    "-ne": _scalars(lambda left, right: not _no_case(left, right)),
    "-ceq": _scalars(operator.eq),
    "-gt": _scalars(operator.gt),
    "-lt": _scalars(operator.lt),
    "-match": _match,
    "-notmatch": lambda left, pattern: not _match(left, pattern),
    # As far as both languages read the pattern alike.
    "-replace": lambda left, change: re.sub(change[0], change[1].replace("$0", r"\g<0>"), text(left), flags=re.I),
    "-cnotcontains": lambda left, right: all(item != right for item in left),
}
