"""Reads a .bat file into commands: percent signs, carets, quotes, blocks, and the words as a Windows program gets them.

cmd works in two passes, and so does this reader: variables are replaced line by line first, then the text is parted
at operators. Nothing is run; branches and labels are read in the order of the text.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from wangen.generator.lint.reader import TEMPLATE, Scope
from wangen.generator.lint.script import HERE, UNKNOWN, Command, Word, base_name

KNOWN = re.findall(
    r"\S+",
    "PATH PATHEXT USERPROFILE USERNAME HOMEDRIVE HOMEPATH APPDATA LOCALAPPDATA PROGRAMFILES PROGRAMFILES(X86) "
    "PROGRAMDATA SYSTEMROOT SYSTEMDRIVE WINDIR TEMP TMP COMSPEC COMPUTERNAME OS CD DATE TIME RANDOM ERRORLEVEL "
    "CMDCMDLINE CMDEXTVERSION NUMBER_OF_PROCESSORS PROCESSOR_ARCHITECTURE VIRTUAL_ENV CONDA_PREFIX CUDA_PATH "
    "CUDA_VISIBLE_DEVICES HF_HOME HF_TOKEN PYTHONPATH WANGEN_PYTHON WANGEN_NO_PAUSE ONEDRIVE PUBLIC PROMPT",
)
_PERCENT = re.compile(
    r"%%(?:~[a-zA-Z]*)?(?P<loop>[a-zA-Z])|%%|%\*|%~[a-zA-Z]*[0-9]|%[0-9]|%(?P<name>[^%:\n]+)(?P<part>:[^%\n]*)?%|%"
)
_LOOP = re.compile(r"(?i)\bfor\s+(/f\s)?[^\n]*?%%([a-z])\s+in\b")
_CONDITION = re.compile(
    r"""\s*(?:/i\s+)?(?:not\s+)?(?:/i\s+)?
    (?:exist\s+(?:"[^"\n]*"|\S+)|defined\s+\S+|(?:errorlevel|cmdextversion)\s+\S+
      |(?:"[^"\n]*"|[^\s="])*\s*==\s*(?:"[^"\n]*"|[^\s("])*|(?:"[^"\n]*"|\S+)\s+(?:equ|neq|lss|leq|gtr|geq)\s+(?:"[^"\n]*"|\S+))\s*""",
    re.IGNORECASE | re.VERBOSE,
)
_FOR = re.compile(r"\s+[^\n]*?\bdo\b\s*", re.IGNORECASE)
_SET = re.compile(r'\s*(?:"([^="]+)=(.*)"[^"]*|([^="\s][^=]*)=(.*))', re.DOTALL)


class _Char(NamedTuple):
    """A character with its line; without text it marks what cmd took out there."""

    text: str
    line: int
    undefined: str = ""
    lost: str = ""


def read(text: str) -> tuple[list[Command], set[str]]:
    """The commands of a .bat file, and its labels."""
    reader = _Reader(text.split("\n"))
    while reader.next < len(reader.lines):
        reader.logical_line()
    return reader.commands, reader.labels


def _letters(splits: str | None, first: str) -> str:
    """The variables that a loop sets: one, and with `/f` perhaps those that follow in the alphabet."""
    return "".join(chr(ord(first) + more) for more in range(9 if splits else 1))


class _Reader:
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.next = 0
        self.scope = Scope(fold=True, known=KNOWN)
        self.commands: list[Command] = []
        self.labels: set[str] = set()
        self.depth = 0
        self.loops = {
            letter for line in lines for match in _LOOP.finditer(line) for letter in _letters(*match.groups())
        }
        """The variables of loops, which are told apart by capital and small letters."""
        self.delayed = False
        self.lost: dict[str, list[str]] = {}
        """What cmd took out of the value of a variable when it was set, by its name in small letters."""
        self.chars: list[_Char] = []
        self.position = 0

    def logical_line(self) -> None:
        """Read one line with those that a caret joins to it, as one or more commands."""
        first = self.lines[self.next].strip().lstrip("@").lstrip()
        if first.startswith(":") or re.match(r"(?i)rem\b", first):
            if first.startswith(":") and not first.startswith("::"):
                self.labels.add(first[1:].split()[0] if first[1:].split() else "")
            self.next += 1
            return
        self.chars, self.position = [], 0
        while self.next < len(self.lines):
            self.chars += self._expanded(self.lines[self.next], self.next + 1)
            self.next += 1
            if not self._ends_in_caret() or self.next >= len(self.lines):
                break
            if not self.lines[self.next].strip():
                self.next += 1  # an empty line ends the command all the same
                self.chars.append(_Char("", self.next, lost="continued"))
                break
        operator = ""
        while self.position < len(self.chars):
            operator = self._command(operator)

    def _ends_in_caret(self) -> bool:
        """Whether the line goes on, and if so, take the caret off."""
        quoted = False
        run = 0
        for char in self.chars:
            quoted ^= char.text == '"' and run % 2 == 0
            run = run + 1 if char.text == "^" and not quoted else 0
        if run % 2:
            self.chars.pop()
        return bool(run % 2)

    def _expanded(self, line: str, number: int) -> list[_Char]:
        """One line with the values of its variables."""
        found: list[_Char] = []
        end = 0
        for match in _PERCENT.finditer(line):
            found += [_Char(c, number) for c in line[end : match.start()]]
            found += self._variable(match, number)
            end = match.end()
        return found + [_Char(c, number) for c in line[end:]]

    def _variable(self, match: re.Match[str], number: int) -> list[_Char]:
        spelled, name = match[0], match["name"]
        if spelled == "%%":
            return [_Char("%", number)]
        if spelled.startswith("%%"):
            return [_Char(c, number) for c in (UNKNOWN if match["loop"] in self.loops else spelled[1:])]
        if spelled == "%":
            return [_Char("", number, lost=f"a single % in line {number}")]
        if name is None:
            text = HERE + "\\" if re.fullmatch(r"(?i)%~dp0", spelled) else UNKNOWN if "0" in spelled else ""
            return [_Char(c, number) for c in text] or [_Char("", number)]
        value = self.scope.get(name)
        if value is None:
            return [_Char("", number, undefined=name)]
        lost = [_Char("", number, lost=lost) for lost in self.lost.get(name.lower(), ())]
        return lost + [_Char(c, number) for c in (UNKNOWN if match["part"] else str(value))]

    def _command(self, before: str) -> str:
        """Read one command from the current place; returns the operator behind it."""
        self._skip(lambda c: c in " \t@,;=")
        rest = "".join(char.text or "\0" for char in self.chars[self.position : self.position + 4000])
        if rest.startswith("("):
            self.depth += 1
            self.position += 1
            return "("
        if rest.startswith(")"):
            self.depth = max(0, self.depth - 1)
            self.position += 1
            return ")"
        word = re.match(r"(?i)(if|else|for|call)(?=[\s(/]|$)", rest)
        keyword = word[1].lower() if word else ""
        if keyword == "if":
            self._condition(rest)
            return "if"
        if keyword == "else":
            self.position += 4
            return "else"
        if keyword == "for":
            match = _FOR.match(rest, 3)
            self.position += match.end() if match else len(rest)
            return "for"
        if keyword == "call":
            self.position += 4
        return self._simple(before, called=keyword == "call")

    def _condition(self, rest: str) -> None:
        match = _CONDITION.match(rest, 2)
        line = self._line(self.position)
        self.position += match.end() if match else 2
        self.commands.append(Command([Word("if", line)], line, line, depth=self.depth, condition=True))

    def _simple(self, before: str, *, called: bool) -> str:
        """Read a command without blocks and conditions, up to an operator outside quotes."""
        segment: list[_Char] = []
        quoted, operator, start = False, "", self.position
        while self.position < len(self.chars):
            char = self.chars[self.position]
            template = "" if quoted or char.text not in "{<" or not char.text else self._template()
            if template:
                segment.append(_Char(template, char.line))  # as one, so that its blanks part nothing
                self.position += len(template)
                continue
            self.position += 1
            if char.text == '"':
                quoted = not quoted
            elif char.text == "^" and not quoted:
                segment += self.chars[self.position : self.position + 1]
                self.position += 1
                continue
            elif char.text in ("&", "|") and not quoted:
                operator = char.text * (1 + self._is_next(char.text))
                self.position += len(operator) - 1
                break
            elif char.text == ")" and not quoted and self.depth:
                self.depth -= 1
                operator = ")"
                break
            elif char.text in ("<", ">") and not quoted:
                self._redirect(segment)
                continue
            segment.append(char)
        self._finish(segment, self._line(start), self._line(self.position - 1), before, operator, called)
        return operator

    def _template(self) -> str:
        text = "".join(char.text or "\0" for char in self.chars[self.position : self.position + 200])
        match = TEMPLATE.match(text)
        return match[0] if match else ""

    def _is_next(self, character: str) -> bool:
        return self.position < len(self.chars) and self.chars[self.position].text == character

    def _redirect(self, segment: list[_Char]) -> None:
        if segment and segment[-1].text.isdigit() and (len(segment) == 1 or segment[-2].text in (" ", "\t")):
            segment.pop()
        self._skip(lambda c: c in ">&")
        self._skip(lambda c: c in " \t")
        quoted = False

        def inside(character: str) -> bool:
            nonlocal quoted
            quoted ^= character == '"'
            return quoted or character not in " \t&|)<>"

        self._skip(inside)

    def _skip(self, wanted: Callable[[str], bool]) -> None:
        while self.position < len(self.chars) and wanted(self.chars[self.position].text):
            self.position += 1

    def _line(self, position: int) -> int:
        if not self.chars:
            return self.next
        return self.chars[max(0, min(position, len(self.chars) - 1))].line

    def _finish(self, segment: list[_Char], line: int, last: int, before: str, operator: str, called: bool) -> None:
        start = [word.text.lower() for word in _words(segment)]
        own_cmd = start[:1] and base_name(start[0]) == "cmd" and {"/v", "/v:on"} & set(start)
        if self.delayed or own_cmd:
            segment = self._late(segment)
        words = _words(segment)
        if not words:
            return
        name = words[0].text.lower()
        if own_cmd and any(UNKNOWN in word for word in start):
            self.delayed = True  # `cmd /v:on /c "%~f0"` runs this very file
        if name in ("cd", "chdir", "pushd"):
            words = _words(segment, builtin=True)
        elif name == "set":
            self._set("".join(char.text for char in segment).strip()[3:], [char.lost for char in segment if char.lost])
        elif name == "setlocal":
            for word in words[1:]:
                wish = word.text.lower()
                self.delayed = (self.delayed or wish == "enabledelayedexpansion") and wish != "disabledelayedexpansion"
        elif name == "endlocal":
            self.delayed = False
        before = before if before in ("&", "&&", "|", "||") else ""
        self.commands.append(Command(words, line, last, before, operator, self.depth, False, called))

    def _late(self, segment: list[_Char]) -> list[_Char]:
        """The delayed expansion: `!NAME!` becomes its value, and every other exclamation mark is gone."""
        text = "".join(char.text[:1] or "\0" for char in segment)
        found: list[_Char] = []
        end = 0
        for match in re.finditer(r"!([^!\n]+)!|!", text):
            line = segment[match.start()].line
            found += segment[end : match.start()]
            value = self.scope.get(match[1]) if match[1] else None
            if value is None:
                found.append(_Char("", line, lost=f"{match[0]} in line {line} (delayed expansion is on)"))
            else:
                found += [_Char(c, line) for c in str(value)]
            end = match.end()
        return found + segment[end:]

    def _set(self, text: str, lost: list[str]) -> None:
        if re.match(r"\s*/[ap]\b", text, re.IGNORECASE):
            name = re.match(r'\s*/[ap]\s+"?([^=\s"]+)', text, re.IGNORECASE)
            if name:
                self.scope.set(name[1], UNKNOWN)
            return
        match = _SET.fullmatch(text)
        if match:
            variable = match[1] or match[3]
            self.scope.set(variable, match[2] if match[1] else match[4], branch=True)
            self.lost[variable.lower()] = lost


class _Arguments:
    """Collects the arguments of a command: `current` is the open one, None between two."""

    def __init__(self) -> None:
        self.words: list[Word] = []
        self.current: list[str] | None = None
        self.line = 0
        self.undefined: list[str] = []
        self.lost: list[str] = []

    def add(self, text: str, line: int) -> None:
        """Append to the open argument, or open one."""
        if self.current is None:
            self.current, self.line = [], line
        self.current.append(text)

    def close(self) -> None:
        """End the open argument; what cmd took out between two arguments belongs to the one before."""
        undefined, lost = tuple(self.undefined), tuple(self.lost)
        if self.current is not None:
            self.words.append(Word("".join(self.current), self.line, "", undefined, lost))
        elif undefined:
            self.words.append(Word(UNKNOWN, self.line, "", undefined, lost))
        elif lost and self.words:
            before = self.words[-1]
            self.words[-1] = Word(before.text, before.line, "", before.undefined, (*before.lost, *lost))
        self.current, self.undefined, self.lost = None, [], []


def _words(segment: list[_Char], *, builtin: bool = False) -> list[Word]:
    """The arguments by the rules of Microsoft's C runtime: backslashes before a quote count in pairs.

    For cmd's own commands (`builtin`) they are nothing special.
    """
    found = _Arguments()
    quoted, run = False, 0
    for place, char in enumerate(segment):
        found.undefined += [char.undefined] * bool(char.undefined)
        found.lost += [char.lost] * bool(char.lost)
        found.line = char.line if found.current is None else found.line
        if char.text == '"':
            if run and found.current:
                del found.current[len(found.current) - (run + 1) // 2 :]
            twice = quoted and place + 1 < len(segment) and segment[place + 1].text == '"'
            literal = run % 2 or twice  # two quotes inside a quoted text are one, and the text goes on
            found.add('"' if literal else "", char.line)
            quoted ^= run % 2 == 0
            run = 0
        elif char.text and char.text in " \t" and not quoted:
            found.close()
            run = 0
        elif char.text:
            found.add(char.text, char.line)
            run = run + 1 if char.text == "\\" and not builtin else 0
    found.close()
    return found.words
