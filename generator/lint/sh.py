"""Reads a bash script into commands, as far as a linter needs it: quotes, variables, arrays, operators, here-documents.

Nothing is run. Functions and branches are read in the order of the text, so that the last value of a variable counts.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

from wangen.generator.lint.reader import Reader, Value
from wangen.generator.lint.script import HERE, MORE, UNKNOWN, Command, Word
from wangen.generator.lint.sh_text import (
    KNOWN,
    arithmetic,
    behind,
    changed,
    closing,
    given_text,
    join_fields,
    set_by,
    substituted,
    takes_in,
    unescaped,
)

KEYWORDS = {"if", "then", "elif", "else", "while", "until", "do", "!", "{", "}", "time", "exec", "nohup", "sudo", "env"}
_OPERATOR = re.compile(r"&&|\|\||;;|;|\|&?|&(?!>)|[()]")
_REDIRECT = re.compile(r"\d*(?:>>|>\||>&|>|<<<|<<-?|<&|<>|<)|&>>?")
_ASSIGN = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[[^\]\n]*\])?(\+?)=")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
_DEEPEST = 3
"""Texts within texts that are read."""
_ESCAPED = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_LIST = re.compile(r'"?\$(?:@|\{@\}|\{(?P<name>[A-Za-z_]\w*)\[@\](?:[-+][^}"]*|:-)?\})"?(?=[\s;|&)<>]|$)')
_OPTIONAL = re.compile(r'\$\{([A-Za-z_]\w*):?\+"\$\{?\1\}?"\}')
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9@*])(\[[@*]\])?(?:(:?[-=+])(.*))?", re.DOTALL)
_DECLARE = {"export", "declare", "local", "readonly", "typeset"}
_OPEN = {"if", "for", "while", "until", "case", "select", "{"}
_CLOSE = {"fi", "done", "esac", "}"}


def read(text: str) -> tuple[list[Command], set[str]]:
    """The commands of a bash script and the names of the functions it defines."""
    reader = _Reader(text)
    while reader.position < len(text):
        reader.command()
    return reader.commands, reader.functions


class _Reader(Reader):
    def __init__(self, text: str) -> None:
        super().__init__(text, fold=False, known=KNOWN)
        self.here_documents: list[str] = []
        self.lost = False
        self.assigned: dict[str, Value | None] = {}
        """The variables that the command sets, with their values before."""
        self.followed = False
        self.function = ""
        """The function that is being defined: its body comes next, or is open since the depth `body`."""
        self.body = 0
        self.level = 0
        """How many texts of `eval` and `bash -c` are around this one."""
        self.elsewhere = False
        """Another file was taken in, and may have set any variable."""
        self.positional: tuple[Word, ...] = ()

    def command(self) -> None:
        """Read up to the operator or line end that ends one command."""
        words: list[Word] = []
        operator = ""
        self.assigned, self.followed = {}, False
        self._blanks()
        start = self.position
        while self.position < len(self.text):
            self._blanks()
            if self._arithmetic(words):
                continue
            match = None if self.template() else _OPERATOR.match(self.text, self.position)
            if self.text.startswith("\n", self.position):
                self.position += 1
                self._skip_here_documents()
                break
            if match:
                operator = match[0]
                self.position = match.end()
                break
            if not self._redirect() and not self._assignment(words):
                words += self.word()
                self.followed |= bool(self.assigned)
                if words[:1] and words[0].raw == "function" and len(words) == 2:
                    self.function = words[1].text
        last = self.lines.at(max(start, self.position - 1))
        self._finish(words, self.lines.at(start), last, operator)

    def _blanks(self) -> None:
        """Skip blanks, continuations and a remark."""
        match = re.compile(r"(?:[ \t]|\\\n)*(?:#[^\n]*)?").match(self.text, self.position)
        self.position = match.end() if match else self.position

    def _arithmetic(self, words: list[Word]) -> bool:
        """Read `((…))`, a command or what follows `for` or `if`; what it sets is known to the running script alone."""
        inside = arithmetic(self.text, self.position)
        if not inside or any(word.text not in KEYWORDS | _OPEN for word in words):
            return False
        self._set_unknown(changed(inside))
        words.append(Word("((", self.lines.at(self.position), inside))
        self.position += len(inside)
        return True

    def _set_unknown(self, names: Iterable[str]) -> None:
        for name in names:
            self.scope.set(name, UNKNOWN)

    def _redirect(self) -> bool:
        if self.text.startswith(("<(", ">("), self.position):
            return False
        match = None if self.template() else _REDIRECT.match(self.text, self.position)
        if not match:
            return False
        self.position = match.end()
        self._blanks()
        before = self.position
        target = self.word()
        if match[0].lstrip("0123456789") in ("<<", "<<-") and target:
            self.here_documents.append(target[0].text)
        return self.position > before or bool(match[0])

    def _skip_here_documents(self) -> None:
        self.position = behind(self.text, self.position, self.here_documents)
        self.here_documents = []

    def _assignment(self, words: list[Word]) -> bool:
        """Read `NAME=value` or `NAME=(words)` where one can stand."""
        if words and words[0].text not in _DECLARE | KEYWORDS:
            return False
        match = _ASSIGN.match(self.text, self.position)
        if not match:
            return False
        name, plus = match.groups()
        self.position = match.end()
        value: Value
        if self.text.startswith("(", self.position):
            self.position += 1
            value = self._array()
        else:
            parts = self.word(split=False)
            value = parts[0].text if parts else ""
        if plus:
            value = self._longer(name, value)
        self.assigned.setdefault(name, self.scope.own(name))
        self.scope.set(name, value, branch=self.depth > 0)
        return True

    def _longer(self, name: str, more: Value) -> Value:
        """The value after `+=`; words added in a branch may be there or not."""
        old = self.scope.get(name) or ""
        if isinstance(old, str) and isinstance(more, str):
            return old + more
        old_words = old if isinstance(old, tuple) else (Word(old, 0),) * bool(old)
        more_words = more if isinstance(more, tuple) else (Word(more, self.lines.at(self.position - 1)),)
        return old_words + ((Word(MORE, more_words[0].line),) if self.depth and more_words else more_words)

    def _array(self) -> tuple[Word, ...]:
        words: list[Word] = []
        while self.position < len(self.text) and self.text[self.position] != ")":
            self._blanks()
            if self.text.startswith("\n", self.position):
                self.position += 1
            elif not self.text.startswith(")", self.position):
                before = self.position
                words += self.word()
                self.position = max(self.position, before + 1)
        self.position += 1
        return tuple(words)

    def word(self, *, split: bool = True) -> list[Word]:
        """The words that one piece of text without outer blanks becomes; `split`: variables part at their blanks."""
        start = self.position
        self.undefined = []
        self.lost = False
        if self.text.startswith(("<(", ">("), start):
            self.position = closing(self.text, start + 1)
            return [Word(UNKNOWN, self.lines.at(start), self.text[start : self.position])]
        if split and (whole := _LIST.match(self.text, start)):
            return self._list(whole)
        fields = [""]
        exists = False
        while self.position < len(self.text):
            character = self.text[self.position]
            template = self.template()
            if template:
                fields[-1] += template[0]
                self.position = template.end()
            elif character in " \t\n;&|()<>":
                break
            elif character in "'\"\\":
                exists = True
                self._quoted(character, fields)
            elif character in "$`":
                exists |= self._expand(fields, split)
            else:
                fields[-1] += character
                self.position += 1
        if self.position == start and self.position < len(self.text):
            self.position += 1  # nothing that a word can begin with: never stand still
            return []
        found = fields if exists or fields[0] else fields[1:]
        raw, line = self.text[start : self.position], self.lines.at(start)
        lost = ("a backslash",) * self.lost
        return [Word(text, line, raw, tuple(self.undefined), lost) for text in found] or self._nothing(raw, line)

    def _list(self, whole: re.Match[str]) -> list[Word]:
        """The words of `"${NAME[@]}"`; without the quotes each is parted at its blanks."""
        self.position = whole.end()
        value = self._lookup(whole["name"] or "@")
        line, undefined = self.lines.at(whole.start()), tuple(self.undefined)
        if isinstance(value, str):
            raw = whole[0] if value == MORE else ""
            return [Word(MORE if undefined else value, line, raw, undefined)]
        if whole[0].startswith('"'):
            return list(value)
        return [replace(word, text=part) for word in value for part in word.text.split()]

    def _expand(self, fields: list[str], split: bool) -> bool:
        """Append what begins with `$` or a back quote outside quotes; True when it is a word even if it is empty."""
        if optional := _OPTIONAL.match(self.text, self.position):
            value = self.scope.get(optional[1]) or ""  # `${X:+"$X"}`: quoted, or nothing at all
            fields[-1] += value if isinstance(value, str) else MORE
            self.position = optional.end()
            return bool(value)
        if escaped := _ESCAPED.match(self.text, self.position):
            fields[-1] += unescaped(escaped[1])
            self.position = escaped.end()
            return True
        if self.text.startswith('$"', self.position):
            self.position += 1
            return False
        value = self._dollar()
        parts = [word.text for word in value] if isinstance(value, tuple) else [value]
        join_fields(fields, [piece for part in parts for piece in part.split()] if split else [" ".join(parts)])
        return False

    def _nothing(self, raw: str, line: int) -> list[Word]:
        # An undefined variable that is not quoted leaves no word; the finding about it needs one.
        return [Word(UNKNOWN, line, raw, tuple(self.undefined))] if self.undefined else []

    def _quoted(self, character: str, fields: list[str]) -> None:
        self.position += 1
        if character == "\\":
            following = self.text[self.position : self.position + 1]
            self.lost |= following.isalnum()
            fields[-1] += "" if following == "\n" else following
            self.position += 1
        elif character == "'":
            end = self.text.find("'", self.position)
            end = len(self.text) if end < 0 else end
            fields[-1] += self.text[self.position : end]
            self.position = end + 1
        else:
            self._double(fields)

    def _double(self, fields: list[str]) -> None:
        while self.position < len(self.text) and self.text[self.position] != '"':
            character = self.text[self.position]
            if character == "\\" and self.text[self.position + 1 : self.position + 2] in ("$", "`", '"', "\\", "\n"):
                following = self.text[self.position + 1]
                fields[-1] += "" if following == "\n" else following
                self.position += 2
            elif character in "$`":
                value = self._dollar()
                join_fields(fields, [value] if isinstance(value, str) else [word.text for word in value])
            else:
                fields[-1] += character
                self.position += 1
        self.position += 1

    def _dollar(self) -> Value:
        """The value of what begins with `$` or a back quote here."""
        text, start = self.text, self.position
        if text[start] == "`":
            end = text.find("`", start + 1)
            self.position = len(text) if end < 0 else end + 1
            return substituted(text[start : self.position])
        following = text[start + 1 : start + 2]
        if following in ("(", "{"):
            self.position = closing(text, start + 1)
            inside = text[start + 2 : self.position - 1]
            return substituted(inside) if following == "(" else self._braced(inside)
        name = _NAME.match(text, start + 1)
        self.position = name.end() if name else start + 1
        return self._lookup(name[0]) if name else "$"

    def _braced(self, inside: str) -> Value:
        match = _BRACED.fullmatch(inside)
        if not match:
            return MORE if inside[:2] in ("@:", "*:") else UNKNOWN
        name, _, operator, default = match.groups()
        if operator in ("+", ":+"):
            value = self.scope.get(name)
            return "" if not value else value if default.strip('"') in (f"${name}", f"${{{name}}}") else MORE
        if operator and (name.isdigit() or self.scope.get(name) is None):
            value = default.strip("\"'") if "$" not in default else UNKNOWN
            if operator.endswith("="):
                self.scope.set(name, value)
            return value
        return self._lookup(name)

    def _lookup(self, name: str) -> Value:
        if name in ("@", "*"):
            return MORE if self.function else self.positional
        if not name[0].isalpha() and name[0] != "_":
            return HERE + "/script" if name == "0" else UNKNOWN
        value = self.scope.get(name)
        if value is None and (self.elsewhere or name.startswith("SLURM_")):
            return UNKNOWN
        if value is None:
            self.undefined.append(name)
            return ""
        return value

    def _finish(self, words: list[Word], line: int, last: int, operator: str) -> None:
        condition = False
        while words and words[0].text in KEYWORDS | _OPEN | _CLOSE | {"function"} and words[0].raw == words[0].text:
            keyword = words[0].text
            self._body(keyword)
            self.depth = max(0, self.depth + (keyword in _OPEN) - (keyword in _CLOSE))
            condition = condition or keyword in ("if", "elif", "while", "until", "!")
            if keyword in ("for", "select") and len(words) > 1:
                self.scope.set(words[1].text, UNKNOWN)
            if keyword == "function" and len(words) > 1:
                self._define(words[1].text)
                words = words[1:]
            words = [] if keyword in ("for", "case", "select") else words[1:]
        texts = [word.text for word in words]
        self._set_unknown(set_by(texts))
        self.elsewhere |= takes_in(texts)
        if words and words[0].text == "set" and not self.function:
            self._set_positional(words)
        if operator == "(" and len(words) == 1:
            self._define(words[0].text)
            words = []
        if words or self.assigned:
            alone = self._set_for(words)
            command = Command(words, line, last, self.before, operator, self.depth, condition, False, alone,
                              self.function)  # fmt: skip
            self.commands += self._inside(command) or [command]
            self.function = self.function if self.body else ""
        self.before = operator

    def _inside(self, command: Command) -> list[Command]:
        """The commands that `eval TEXT` or `bash -c TEXT` runs, each a command of the script in its lines."""
        front, text = given_text(command.words)
        if self.level > _DEEPEST or not re.search(r"wan_|wangen", text):
            return []
        reader = _Reader(text)
        reader.level = self.level + 1
        reader.scope, reader.positional, reader.elsewhere = self.scope, self.positional, self.elsewhere
        while reader.position < len(text):
            reader.command()
        self.functions |= reader.functions
        found = [
            replace(inner, words=front + [replace(word, line=command.line) for word in inner.words], line=command.line,
                    last=command.last, depth=command.depth + inner.depth, function=command.function,
                    condition=command.condition or inner.condition)
            for inner in reader.commands
        ]  # fmt: skip
        if found:
            found[0].before, found[-1].after = command.before, command.after
        return found

    def _define(self, name: str) -> None:
        self.functions.add(name)
        self.function = self.function if self.body else name

    def _body(self, keyword: str) -> None:
        """Note where the body of a function begins and ends; the depth is still that in front of the keyword."""
        if keyword == "{" and self.function and not self.body:
            self.body = self.depth + 1
        elif keyword == "}" and self.body == self.depth:
            self.function, self.body = "", 0

    def _set_positional(self, words: list[Word]) -> None:
        """Take over what `set -- WORDS` makes of `"$@"`."""
        marks = [place for place, word in enumerate(words) if word.text == "--"]
        if marks:
            self.positional = (*words[marks[0] + 1 :], *([Word(MORE, words[0].line)] if self.depth else []))

    def _set_for(self, words: list[Word]) -> tuple[tuple[str, str], ...]:
        """Take back what `NAME=value program` sets for the program alone; returns it.

        In `export NAME=/my models` the value ends too early as well, and nobody knows what was meant.
        """
        declares = bool(words) and words[0].text in _DECLARE
        path = any("/" in str(self.scope.own(name)) for name in self.assigned)
        if not words or (declares and not (self.followed and path)):
            return ()
        alone = tuple((name, str(self.scope.own(name) or "")) for name in self.assigned)
        for name, before in self.assigned.items():
            self.scope.put_back(name, before)
        return alone
