"""Reads a PowerShell script into commands: strings, variables, arrays, splatting, blocks.

Nothing is run. What is more than a text, a variable, a sum or a list of these counts as unknown; branches are read in
the order of the text.
"""

import re

from wangen.generator.lint.reader import Reader, Value
from wangen.generator.lint.script import HERE, MORE, UNKNOWN, Command, Word

KNOWN = re.findall(
    r"\S+",
    "true false null args _ PSItem input PWD HOME PSScriptRoot PSCommandPath MyInvocation LASTEXITCODE ? Error "
    "Host PROFILE PSVersionTable PID PSHOME IsWindows IsLinux OFS matches ErrorActionPreference "
    "PSBoundParameters",
)
_QUOTES = "'‘’‚‛"
_DOUBLES = '"“”„'
_BLANK = re.compile(r"(?:[ \t\r\u00a0]|`\n|<#.*?(?:#>|\Z))+", re.DOTALL)
_COMMENT = re.compile(r"#[^\n]*")
_VARIABLE = re.compile(r"\$(?:\{([^}\n]*)\}|((?:[A-Za-z]+:)?[A-Za-z_]\w*|[?_$^]))")
_ASSIGN = re.compile(r"(?:\[[\w.\[\], ]+\][ \t]*)*\$(?:\{([^}\n]*)\}|((?:[A-Za-z]+:)?[A-Za-z_]\w*))[ \t]*(\+?)=(?!=)")
_ADD = re.compile(r"(?:\[void\][ \t]*)?\$(\w+)\.Add(?:Range)?\(", re.IGNORECASE)
_CAST = re.compile(r"\[[\w.]+(?:\[\])?\][ \t]*")
_HERE_STRING = re.compile(r"(?<![^\s=(,+])@([\"'])[ \t]*\n(?:(.*?)\n)?\1@", re.DOTALL)
_REDIRECT = re.compile(r"(?:[\d*]?>>?(?:&\d)?)[ \t]*")
_KEYWORD = re.compile(
    r"(if|elseif|else|while|foreach|for|switch|param|function|try|catch|finally|do|until|begin|process|end|trap)\b",
    re.IGNORECASE,
)
_OPERATOR = re.compile(r"&&|\|\||[|;}{]|\n")


def read(text: str) -> tuple[list[Command], set[str]]:
    """The commands of a PowerShell script, and the names of the functions it defines."""
    text = _HERE_STRING.sub(_plain_string, text)
    reader = _Reader(text, fold=True, known=KNOWN)
    while reader.position < len(text):
        reader.statement()
    return reader.commands, reader.functions


def _plain_string(here_string: re.Match[str]) -> str:
    """A here-string, in which quotes and brackets are letters, as a string of as many lines without them."""
    return "'" + re.sub(r"[^\w\s]", ".", here_string[0]) + "'"


class _Reader(Reader):
    def statement(self) -> None:
        """Read one statement or one mark between statements."""
        self._blanks()
        text, start = self.text, self.position
        mark = None if self.template() else _OPERATOR.match(text, start)
        if mark:
            self.depth = max(0, self.depth + (mark[0] == "{") - (mark[0] == "}"))
            self.before = mark[0] if mark[0] in ("&&", "||", "|") else ""
            self.position = mark.end()
            return
        if keyword := _KEYWORD.match(text, start):
            self._keyword(keyword)
        elif match := _ASSIGN.match(text, start):
            self._assign(match)
        elif match := _ADD.match(text, start):
            self.position = match.end()
            self._append(match[1], self._given())
            self._skip_expression()
        elif text[start : start + 1] in ("$", "[", "(", "@") and not re.match(r"[$@]\w+[ \t]*[\"'-]", text[start:]):
            self._skip_expression()
        else:
            self._command()
        if self.position == start:
            self.position += 1

    def _given(self) -> Value:
        """The words between the brackets of `.Add()` and `.AddRange()`."""
        cast = _CAST.match(self.text, self.position)
        self.position = cast.end() if cast else self.position
        self.position += 2 * self.text.startswith("@(", self.position)
        words = self._list(")")
        known = self.text.startswith(")", self.position) and [word.text for word in words] != [UNKNOWN]
        return words if known else UNKNOWN

    def _keyword(self, match: re.Match[str]) -> None:
        self.position = match.end()
        word, line = match[1].lower(), self.lines.at(match.start())
        if word == "function":
            name = re.compile(r"[ \t]*([\w-]+)").match(self.text, self.position)
            if name:
                self.functions.add(name[1])
                self.position = name.end()
        self._blanks()
        if self.text.startswith("(", self.position):
            end = _closing(self.text, self.position)
            inside = self.text[self.position : end]
            if word in ("param", "foreach"):
                names = re.findall(r"\$(\w+)", inside)
                for name in names if word == "param" else names[:1]:
                    self.scope.set(name, UNKNOWN)
            self.position = end
        if word in ("if", "elseif", "while", "switch"):
            self.commands.append(Command([Word("if", line)], line, self.lines.at(self.position), depth=self.depth,
                                         condition=True))  # fmt: skip

    def _assign(self, match: re.Match[str]) -> None:
        name = match[1] or match[2]
        self.position = match.end()
        line = self.lines.at(match.start())
        self._blanks()
        before = self.position
        if re.compile(r"[&.][ \t]|(?:python|accelerate|uv)\b").match(self.text, before):
            self.scope.set(name, UNKNOWN)
            self._command()
            return
        value = self._value()
        if match[3]:
            self._append(name, value)
        else:
            self.scope.set(name, value, branch=self.depth > 0)
        self.commands.append(Command([], line, self.lines.at(self.position - 1), depth=self.depth))

    def _append(self, name: str, more: Value) -> None:
        """The array after `+=` or `.Add()`; words added in a branch may be there or not."""
        old = self.scope.get(name) or ()
        if isinstance(old, str) and old != UNKNOWN and isinstance(more, str):
            self.scope.set(name, old + more)
            return
        line = self.lines.at(self.position)
        words = more if isinstance(more, tuple) else (Word(MORE if more == UNKNOWN else more, line),)
        before = old if isinstance(old, tuple) else ()
        self.scope.set(name, before + ((Word(MORE, line),) if self.depth else words))

    def _value(self) -> Value:
        """What an assignment gives; the position is behind it."""
        text, start = self.text, self.position
        if text.startswith("@(", start):
            self.position += 2
            value: Value = self._list(")")
            self.position += 1
        else:
            words = self._list("\n")
            value = words if len(words) > 1 else words[0].text if words else ""
        self._blanks()
        if text[self.position : self.position + 1] not in ("", "\n", ";", "}"):
            self._skip_expression()  # an operator or a method that is not read here
            return UNKNOWN
        return value

    def _list(self, end: str) -> tuple[Word, ...]:
        """Items up to `end`, parted by commas and, inside brackets, by line ends and semicolons."""
        words: list[Word] = []
        while self.position < len(self.text):
            self._blanks()
            character = self.text[self.position : self.position + 1]
            if character in ("", end) or (end == "\n" and character in (";", "}", "|")):
                break
            if character in ("\n", ",", ";"):
                self.position += 1
                if character == "," and end == "\n":
                    self._blanks(newlines=True)
                continue
            before = self.position
            item = self._item()
            if self.position == before:
                break
            words += item
            self._blanks()
            if end == "\n" and self.text[self.position : self.position + 1] not in (",",):
                break
        return tuple(words)

    def _item(self) -> list[Word]:
        """One item of a list: a text, a number, a variable, or a sum in brackets."""
        start, line = self.position, self.lines.at(self.position)
        character = self.text[start]
        self.undefined = []
        if self.text.startswith(("@(", "$("), start) or character == "(":
            self.position = _closing(self.text, self.text.index("(", start))
            parts: Value = self._sum(start + 1, self.position - 1) if character == "(" else UNKNOWN
        elif character in _QUOTES + _DOUBLES:
            parts = self._string()
        elif character == "$":
            parts = self._dollar()
        elif number := re.compile(r"[-+]?[\d.]+(?:[eE][-+]?\d+)?(?![\w\\/:])").match(self.text, start):
            self.position = number.end()
            parts = number[0]
        elif start and (join := re.compile(r"Join-Path[ \t]+", re.IGNORECASE).match(self.text, start)):
            self.position = join.end()
            parts = self._joined()
        else:
            return []
        return list(parts) if isinstance(parts, tuple) else [Word(parts, line, "", tuple(self.undefined))]

    def _joined(self) -> str:
        one = self._item()
        self._blanks()
        two = self._item() if self.position < len(self.text) else []
        return f"{one[0].text}\\{two[0].text}" if one and two else UNKNOWN

    def _sum(self, start: int, end: int) -> Value:
        r"""The value of `'a' + $B` between two positions; `Join-Path` and the script's folder are known as well."""
        inside = self.text[start:end]
        if re.search(r"Split-Path.*MyInvocation|PSCommandPath", inside):
            return HERE
        keep, self.position = self.position, start
        total = ""
        while True:
            self._blanks(newlines=True)
            item = self._item() if self.position < end else []
            if not item:
                total = UNKNOWN
                break
            total += item[0].text
            self._blanks(newlines=True)
            if self.position >= end or not self.text.startswith("+", self.position):
                total = total if self.position >= end else UNKNOWN
                break
            self.position += 1
        self.position = keep
        return total

    def _command(self) -> None:
        """Read a program or cmdlet with its arguments, up to an operator or the end of the line."""
        start = self.position
        called = re.compile(r"[&.][ \t]+").match(self.text, start)
        self.position = called.end() if called else start
        words: list[Word] = []
        operator = ""
        while self.position < len(self.text):
            self._blanks()
            mark = None if self.template() else _OPERATOR.match(self.text, self.position)
            if mark and mark[0] != "{":
                operator = mark[0].strip()
                break
            if broken := re.compile(r"`[ \t]+(?=\n)").match(self.text, self.position):
                self.position = broken.end()  # the backtick takes the blank, and the line ends here
                continue
            if redirect := _REDIRECT.match(self.text, self.position):
                self.position = redirect.end()
                if "&" not in redirect[0]:
                    self._argument()
                continue
            before = self.position
            words += self._argument()
            if words and words[-1].raw == "--%":  # from here on PowerShell changes nothing
                words.pop()
            self.position = max(self.position, before + 1)
        last = self.lines.at(max(start, self.position - 1))
        if words:
            self.commands.append(Command(words, self.lines.at(start), last, self.before, operator, self.depth))
        self.before = ""

    def _argument(self) -> list[Word]:
        """One argument of a command; several when it is splatted."""
        start, line = self.position, self.lines.at(self.position)
        if splat := re.compile(r"@(\w+)(?=[\s;|})]|$)").match(self.text, start):
            self.position = splat.end()
            value = self.scope.get(splat[1])
            return list(value) if isinstance(value, tuple) else [Word(value or MORE, line)]
        self.undefined = []
        text = ""
        while self.position < len(self.text):
            character = self.text[self.position]
            if template := self.template():
                text += template[0]
                self.position = template.end()
            elif character in " \t\n\r\u00a0;|" or (character in ")}" and not text):
                break
            elif character in _QUOTES + _DOUBLES:
                text += self._string()
            elif character in "({" or self.text.startswith("@(", self.position):
                begin = self.position
                self.position = _closing(self.text, self.text.index(character if character != "@" else "(", begin))
                inner = self._sum(begin + 1, self.position - 1) if character == "(" else UNKNOWN
                text += inner if isinstance(inner, str) else UNKNOWN
            elif character == "$" and _VARIABLE.match(self.text, self.position):
                value = self._dollar()
                if isinstance(value, tuple) and not text:
                    return list(value)
                text += value if isinstance(value, str) else UNKNOWN
            elif character == "`":
                text += self.text[self.position + 1 : self.position + 2]
                self.position += 2
            else:
                text += character
                self.position += 1
        return [Word(text, line, self.text[start : self.position], tuple(self.undefined))]

    def _string(self) -> str:
        quote = self.text[self.position]
        family = _QUOTES if quote in _QUOTES else _DOUBLES
        self.position += 1
        found = ""
        while self.position < len(self.text):
            character = self.text[self.position]
            if character in family:
                if self.text[self.position + 1 : self.position + 2] not in (*family,):
                    self.position += 1
                    break
                found += character
                self.position += 2
            elif family == _DOUBLES and character == "`":
                found += self.text[self.position + 1 : self.position + 2]
                self.position += 2
            elif family == _DOUBLES and character == "$" and self.text[self.position + 1 : self.position + 2] == "(":
                self.position = _closing(self.text, self.position + 1)
                found += UNKNOWN
            elif family == _DOUBLES and character == "$" and _VARIABLE.match(self.text, self.position):
                value = self._dollar(member=False)
                found += value if isinstance(value, str) else " ".join(word.text for word in value)
            else:
                found += character
                self.position += 1
        return found

    def _dollar(self, *, member: bool = True) -> Value:
        """The value of the variable here."""
        match = _VARIABLE.match(self.text, self.position)
        if not match:
            self.position += 1
            return "$"
        self.position = match.end()
        name = match[1] or match[2] or ""
        if member and self._member():
            return UNKNOWN
        if name.lower() == "psscriptroot":
            return HERE
        value = self.scope.get(name)
        if value is not None:
            return value
        if ":" in name:
            return UNKNOWN  # $env:… comes from the machine
        self.undefined.append(name)
        return ""

    def _member(self) -> bool:
        """Skip `.Name`, `[0]` and `.Method(…)` behind a variable; False when there is none."""
        start = self.position
        while access := re.compile(r"[.\[][A-Za-z0-9_(\[][^\s,;()]*").match(self.text, self.position):
            self.position = access.end()
            if self.text.startswith("(", self.position):
                self.position = _closing(self.text, self.position)
        return self.position > start

    def _skip_expression(self) -> None:
        """Go to the end of a statement that is not read."""
        while self.position < len(self.text) and self.text[self.position] not in "\n;}":
            character = self.text[self.position]
            if character in "({":
                self.position = _closing(self.text, self.position)
            elif character in _QUOTES + _DOUBLES:
                self._string()
            elif character == "`":
                self.position += 2
            elif character == "#":
                match = _COMMENT.match(self.text, self.position)
                self.position = match.end() if match else self.position + 1
            else:
                self.position += 1

    def _blanks(self, *, newlines: bool = False) -> None:
        while True:
            match = _BLANK.match(self.text, self.position) or _COMMENT.match(self.text, self.position)
            if not match and newlines and self.text.startswith("\n", self.position):
                self.position += 1
            elif match:
                self.position = match.end()
            else:
                return


def _closing(text: str, start: int) -> int:
    """The position behind the bracket that closes the one at `start`."""
    opening = text[start]
    closing = {"(": ")", "{": "}"}[opening]
    depth, position = 0, start
    while position < len(text):
        character = text[position]
        if character == "`":
            position += 1
        elif character in _QUOTES + _DOUBLES:
            family = _QUOTES if character in _QUOTES else _DOUBLES
            position += 1
            while position < len(text) and text[position] not in family:
                position += 1 + (family == _DOUBLES and text[position] == "`")
        elif character == opening:
            depth += 1
        elif character == closing:
            depth -= 1
            if not depth:
                return position + 1
        position += 1
    return len(text)
