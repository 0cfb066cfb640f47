"""What the readers of the shells share: where they stand in a text, and the variables that were set up to there."""

import bisect
import re
from collections.abc import Iterable

from wangen.generator.lint.script import UNKNOWN, Command, Word

TEMPLATE = re.compile(r"\{\{[^{}\n]*\}\}|<[A-Za-z](?:[\w .:/\\-]*[\w.:/\\-])?>")
"""What somebody was to replace: `{{models}}`, `<your name>`. No shell reads it as it is meant."""


class Lines:
    """Line numbers of the positions in a text."""

    def __init__(self, text: str) -> None:
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def at(self, position: int) -> int:
        """The number, from 1, of the line that holds a position."""
        return bisect.bisect_right(self._starts, position)


Value = str | tuple[Word, ...]
"""What a variable holds: a text, or the words of an array."""


_MOST = 20_000
"""Characters or words of a variable: one that is made of itself again and again has no end."""


class Scope:
    """The variables that a script has set so far.

    Args:
        fold: names do not tell capitals from small letters.
        known: names that every machine sets.
    """

    def __init__(self, *, fold: bool, known: Iterable[str]) -> None:
        self._fold = fold
        self._known = {self._key(name) for name in known}
        self._values: dict[str, Value] = {}

    def set(self, name: str, value: Value, *, branch: bool = False) -> None:
        """Remember a value.

        In a `branch` an empty list stays empty, and so does an empty text that would become a flag: that is what the
        script does when it is just run.
        """
        if len(value) > _MOST:
            value = UNKNOWN
        before = self._values.get(self._key(name))
        if branch and (before == () or (before == "" and str(value).startswith("--"))):
            return
        self._values[self._key(name)] = value

    def put_back(self, name: str, value: Value | None) -> None:
        """Give a variable the value it had before; None for one that was not set."""
        self._values.pop(self._key(name), None)
        if value is not None:
            self._values[self._key(name)] = value

    def own(self, name: str) -> Value | None:
        """The value that the script itself set; None when it set none."""
        return self._values.get(self._key(name))

    def get(self, name: str) -> Value | None:
        """The value; `UNKNOWN` for a variable of the machine, None for one that nobody sets."""
        key = self._key(name)
        return self._values.get(key, UNKNOWN if key in self._known else None)

    def _key(self, name: str) -> str:
        return name.lower() if self._fold else name


class Reader:
    """A text read from front to back: where the reader stands, and the commands and variables found up to there.

    Args:
        text: of the script.
        fold: as of `Scope`.
        known: as of `Scope`.
    """

    def __init__(self, text: str, *, fold: bool, known: Iterable[str]) -> None:
        self.text = text
        self.position = 0
        self.lines = Lines(text)
        self.scope = Scope(fold=fold, known=known)
        self.commands: list[Command] = []
        self.functions: set[str] = set()
        self.depth = 0
        self.before = ""
        self.undefined: list[str] = []

    def template(self) -> re.Match[str] | None:
        """What begins here and was to be replaced by somebody."""
        return TEMPLATE.match(self.text, self.position)
