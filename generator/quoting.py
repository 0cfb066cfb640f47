r"""How each shell writes the words of a command line, and how they are read back.

A word is a text that ends, perhaps, in the value of a knob: `--seed`, `C:\data`, `%SEED%`, `--seed=%SEED%`.
What a shell cannot carry is refused when the script is made, not when it runs.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from wangen.generator.errors import WangenError

# PowerShell takes the typographic single quotes for plain ones.
_PS_QUOTES = "'‘’‚‛"
_SH_PLAIN = re.compile(r"-{0,2}[A-Za-z0-9_][A-Za-z0-9_.-]*=?")
_SH_PIECE = re.compile(r"""'([^']*)'|(\\)'|"\$(\w+)"|([A-Za-z0-9_.=-]+)""")
_BAT_PIECE = re.compile(r"%%|%(\w+)%")
_PS_PIECE = re.compile(rf"'((?:[^{_PS_QUOTES}]|[{_PS_QUOTES}]{{2}})*)'|\$(\w+)")

CALLS = {
    "sh": re.compile(r'^  (?:wg_step )?"\$WG_PY" -m wangen\.runtime(?= )', re.MULTILINE),
    "bat": re.compile(r'^"%WG_PY%" -m wangen\.runtime(?= )', re.MULTILINE),
    "ps1": re.compile(r"^    \$WgArgv = @\((?=\n)", re.MULTILINE),
}


@dataclass(frozen=True)
class Word:
    """One argument: `text`, followed by the value of the knob when there is one."""

    text: str
    knob: str = ""


def refuse_control(text: str, shell: str, *, allowed: str = "") -> None:
    """Refuse control characters other than `allowed`, and text that UTF-8 cannot hold.

    Raises:
        WangenError: there is one.
    """
    bad = [c for c in text if (ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF) and c not in allowed]
    if bad:
        raise _refused(text, shell, f"the character {bad[0]!r}", "take it out of the path or text")


def sh_word(word: Word) -> str:
    r"""A word for bash.

    >>> print(sh_word(Word("it's")), sh_word(Word("--seed=", "SEED")))
    'it'\''s' --seed="$SEED"
    """
    # bash carries every character but NUL; a lone surrogate is no character of a UTF-8 file.
    refuse_control(word.text, "sh", allowed="".join(map(chr, [*range(1, 32), 127])))
    plain = _SH_PLAIN.fullmatch(word.text) or (not word.text and word.knob)
    text = word.text if plain else "'" + word.text.replace("'", "'\\''") + "'"
    return f'{text}"${word.knob}"' if word.knob else text


def bat_inside(text: str) -> str:
    """A text as it stands between double quotes in a .bat file, for cmd's own commands.

    Raises:
        WangenError: the text holds what no .bat file can carry.

    >>> bat_inside("100% & (x86)")
    '100%% & (x86)'
    """
    refuse_control(text, "bat", allowed="\t")
    if '"' in text:
        raise _refused(text, "bat", "a double quote", "leave it out, or use a single quote")
    return text.replace("%", "%%")


def bat_word(word: Word) -> str:
    r"""A word for a program that a .bat file starts.

    >>> print(bat_word(Word("C:\\dir\\")), bat_word(Word("--seed=", "SEED")))
    "C:\dir\\" "--seed=%SEED%"
    """
    inside = bat_inside(word.text)
    if word.knob:
        return f'"{inside}%{word.knob}%"'
    # A program reads backslashes before the closing quote in pairs.
    return f'"{inside}{trailing_backslashes(inside)}"'


def ps1_literal(text: str) -> str:
    """A text as PowerShell's single-quoted literal.

    >>> ps1_literal("Jane's")
    "'Jane''s'"
    """
    refuse_control(text, "ps1", allowed="\t")
    return "'" + re.sub(f"[{_PS_QUOTES}]", lambda quote: quote[0] * 2, text) + "'"


def ps1_word(word: Word) -> str:
    """A word for a program that PowerShell 5.1 or later starts.

    Raises:
        WangenError: Windows PowerShell 5.1 would hand on something else.

    >>> ps1_word(Word("--seed=", "SEED"))
    "('--seed=' + $SEED)"
    """
    text = word.text
    if word.knob:
        return f"({ps1_literal(text)} + ${word.knob})" if text else f"${word.knob}"
    if '"' in text:
        raise _refused(text, "ps1", "a double quote", "leave it out, or use a single quote")
    if not text or text == "--%":
        raise _refused(text, "ps1", "this word", "leave the option out")
    # U+180E was a blank when .NET Framework was made, on which Windows PowerShell runs.
    blank = any(c.isspace() or c == "\u180e" for c in text)
    if blank and text.endswith("\\"):
        raise _refused(text, "ps1", "a path with a blank that ends in a backslash", "leave the last backslash out")
    if not blank and re.match(r"~(?:[/\\]|\Z)", text):
        # PowerShell 7.5 and later do so with a word that comes from a variable and has no blank.
        raise _refused(text, "ps1", "a word that PowerShell takes for the home folder", "write the folder's full path")
    return ps1_literal(text)


def trailing_backslashes(text: str) -> str:
    """The run of backslashes at the end of a text."""
    return text[len(text.rstrip("\\")) :]


def commands(text: str, shell: str, knob: Callable[[str], str]) -> list[list[str]]:
    """The argument lists of the steps of a script, in order, with the values of the knobs in their places.

    Args:
        text: the script, with LF at the line ends.
        shell: `sh`, `bat` or `ps1`.
        knob: gives the value of a variable, by its name.

    Raises:
        WangenError: a step's line cannot be read, or `knob` raised it.
    """
    found = []
    start = CALLS[shell].search(text)
    while start:
        # The search goes on behind the words, because a text among them may look like a step's first line.
        words, end = _READERS[shell](text, start.end(), knob)
        if not words:
            raise _unreadable(text, start.end())
        found.append(words)
        start = CALLS[shell].search(text, end)
    return found


def _refused(text: str, shell: str, what: str, cure: str) -> WangenError:
    shown = text if len(text) <= 120 else text[:119] + "…"
    return WangenError(f"a .{shell} script cannot carry {what}", where=ascii(shown)[1:-1], cure=cure)


def _unreadable(text: str, position: int) -> WangenError:
    line = text.count("\n", 0, position) + 1
    return WangenError("this step's words cannot be read", where=f"line {line} of the script", cure="publish it again")


def _read_sh(text: str, position: int, knob: Callable[[str], str]) -> tuple[list[str], int]:
    words: list[str] = []
    open_word = False
    # The user's further words, and what happens on failure, are no part of the step's own line.
    while not text.startswith(("||", '"$@"'), position):
        gap = re.compile(r"[ \t]+|\\\n").match(text, position)
        piece = None if gap else _SH_PIECE.match(text, position)
        if gap:
            open_word, position = False, gap.end()
            continue
        if not piece:
            if text[position : position + 1] in ("\n", ""):
                break
            raise _unreadable(text, position)
        quoted, escaped, name, plain = piece.groups()
        part = knob(name) if name else "'" if escaped else plain if quoted is None else quoted
        if open_word:
            words[-1] += part
        else:
            words.append(part)
        open_word, position = True, piece.end()
    return words, position


def _read_bat(text: str, position: int, knob: Callable[[str], str]) -> tuple[list[str], int]:
    end = position
    while True:
        stop = text.find("\n", end)
        stop = len(text) if stop < 0 else stop
        if not text[:stop].endswith("^"):
            break
        end = stop + 1
    words = []
    for inside in re.findall(r'"([^"]*)"', text[position:stop]):
        run = trailing_backslashes(inside)
        half = inside[: len(inside) - len(run) // 2]
        words.append(_BAT_PIECE.sub(lambda m: knob(m[1]) if m[1] else "%", half))
    return words, stop


def _read_ps1(text: str, position: int, knob: Callable[[str], str]) -> tuple[list[str], int]:
    words: list[str] = []
    join = False
    while True:
        # Between the words: commas and line ends, `(` and `)` around a sum, ` + ` inside it, and the last `)`.
        gap = re.compile(r"[,\s]*\(?").match(text, position)
        position = gap.end() if gap else position
        piece = _PS_PIECE.match(text, position)
        if not piece:
            if not text.startswith(")", position):
                raise _unreadable(text, position)
            return words, position + 1
        quoted, name = piece.groups()
        part = knob(name) if name else re.sub(f"([{_PS_QUOTES}])[{_PS_QUOTES}]", r"\1", quoted)
        if join:
            words[-1] += part
        else:
            words.append(part)
        position = piece.end()
        if join and text.startswith(")", position):
            position += 1
        join = text.startswith(" + ", position)
        position += 3 * join


QUOTES: Mapping[str, Callable[[Word], str]] = {"sh": sh_word, "bat": bat_word, "ps1": ps1_word}
_READERS: Mapping[str, Callable[[str, int, Callable[[str], str]], tuple[list[str], int]]] = {
    "sh": _read_sh,
    "bat": _read_bat,
    "ps1": _read_ps1,
}


def groups(words: list[Word]) -> Iterator[list[Word]]:
    """The words of one script line each: a flag with its value, or the step's name.

    >>> [[w.text for w in group] for group in groups([Word("train"), Word("--seed"), Word("1"), Word("--deep")])]
    [['train'], ['--seed', '1'], ['--deep']]
    """
    group: list[Word] = []
    for word in words:
        if group and word.text.startswith("--"):
            yield group
            group = []
        group.append(word)
    if group:
        yield group
