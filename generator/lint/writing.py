"""Rules about the text of a script: its bytes, continued lines, quotes, placeholders, paths of another system."""

import re
from collections.abc import Iterator

from wangen.generator.lint.kinds import Finding
from wangen.generator.lint.script import HERE, MARK, UNKNOWN, Script, Word, quoted
from wangen.generator.lint.tools import find
from wangen.generator.script_bytes import wrong_line_ends, wrong_mark

_MAX_LINE = 8191
_PLACEHOLDER = re.compile(
    r"(?:(?<=[=/\\ \"'])|\A)<[A-Za-z][\w .:/\\-]*[\w.:/\\-]>|\{\{[^{}\n]*\}\}"
    r"|(?<![A-Za-z0-9_])__[A-Z][A-Z0-9_]*__(?![A-Za-z0-9_])"
    r"|(?<![A-Za-z])YOUR[_ -][A-Z_]+|(?<![A-Za-z])your[_-][a-z_-]*(?:path|dir|folder|name|model|dataset|here)[a-z_-]*"
    r"|[/\\]?path[/\\]to[/\\][^\s\"']*|(?<![A-Za-z])(?:CHANGE|REPLACE)[_-]?(?:ME|THIS)|(?<![A-Za-z])PATH_TO_[A-Z_]+"
    r"|\A(?:\.\.\.|…)\Z|(?<![A-Za-z])[Xx]{4,}(?![A-Za-z])"
)
_TOKEN = re.compile(
    r"\$\{\w+\}|\A\$[A-Za-z_]\w*(?=[/\\])|(?<![$\w])\{[A-Za-z_]\w+\}|@[A-Za-z_]\w*@|%[A-Za-z_]\w*%"
    r"|(?:(?<=[/\\])|\A)\[[A-Z][A-Z0-9_]{2,}\](?=[/\\]|\Z)"
)
"""What other programs and shells replace; in a path or a name it was forgotten."""
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\[\w.$-]+\\")
_POSIX = re.compile(r"/(?:mnt|home|root|workspace|media|opt|usr|var|tmp|data|content|Users)/")
_SMART = re.compile("[“”„‘’‚‛«»]")


def file_bytes(script: Script) -> Iterator[Finding]:
    """Line ends, byte order marks, code pages."""
    data = script.data
    plain = any(
        ord(c) > 127 for call in script.calls for word in call.args for c in word.text if c not in HERE + UNKNOWN
    )
    if ends := wrong_line_ends(data, script.shell, script.path.name):
        jumps = re.search(rb"(?im)^\s*:[a-z]|\bgoto\b|call\s+:", data) is not None
        yield Finding("line-ends", *ends, "warning" if script.shell == "bat" and not jumps else None)
    if mark := wrong_mark(data, script.shell):
        yield Finding("bom", *mark, "warning" if script.shell == "ps1" and not plain else None)
    foreign = next((n for n, line in enumerate(script.lines, 1) if not line.isascii()), 0)
    if script.shell == "bat" and plain and not re.search(rb"(?i)chcp\s+65001", data):
        yield Finding("encoding", foreign or 1, "cmd reads letters outside ASCII in the machine's own code page",
                      "write chcp 65001 >nul in front of this line, and save the file as UTF-8")  # fmt: skip


def long_lines(script: Script) -> Iterator[Finding]:
    """Calls of a .bat file that cmd would cut off."""
    for call in script.calls if script.shell == "bat" else ():
        length = sum(len(word.text) + 3 for word in call.command.words)
        if length > _MAX_LINE:
            yield Finding("long-line", call.line, f"this command is about {length} characters long; cmd reads "
                          f"{_MAX_LINE}", "put flags into a --config_file")  # fmt: skip


def continuation(script: Script) -> Iterator[Finding]:
    """Lines that were meant to go on."""
    for command in script.orphans:
        yield _torn(script, command.line)
    for call in script.calls:
        for word in call.command.words:
            if "continued" in word.lost and not any(command.before == "" for command in script.orphans):
                yield Finding("continuation", word.line, "this line ends in ^, and an empty line follows",
                              "take the ^ off")  # fmt: skip


def _torn(script: Script, line: int) -> Finding:
    """Why the flags at the start of a line do not belong to the call above."""
    mark = MARK[script.shell]
    number = line - 1
    while number > 1 and not script.lines[number - 1].strip():
        number -= 1
    before = script.lines[number - 1]
    text = before.rstrip()
    if script.shell != "bat" and text.lstrip().startswith("#"):
        return Finding("continuation", number, "a remark ends the call above it, and the flags below it are lost",
                       "move the remark in front of the call")  # fmt: skip
    if text.endswith(mark) and text != before.rstrip("\r\n"):
        return Finding("continuation", number, f"a blank stands behind the {mark}, so that the line does not go on",
                       f"take the blank behind {mark} away")  # fmt: skip
    if text.endswith(mark) and number < line - 1:
        return Finding("continuation", number + 1, "an empty line ends the call, and the flags below it are lost",
                       "take the empty line away")  # fmt: skip
    if text[-1:] in ("\\", "`", "^") and text[-2:-1] in (" ", "\t", '"', ""):
        return Finding("continuation", number, f"{text[-1]} does not continue a line of a .{script.shell} file",
                       f"write {mark} in its place")  # fmt: skip
    return Finding("continuation", number, "this line does not go on, and the flags below it are lost",
                   f"end it with a blank and {mark}")  # fmt: skip


def words(script: Script) -> Iterator[Finding]:
    """What the shell makes of the words of a call."""
    told: set[str] = set()
    for call in script.calls:
        for word in (*call.launcher, *call.args):
            for name in word.undefined:
                if name not in told:
                    told.add(name)
                    yield _undefined(script, word.line, name)
            yield from _word(script, word)


def _word(script: Script, word: Word) -> Iterator[Finding]:
    line, text = word.line, word.text
    for lost in word.lost:
        if lost in ("continued", "a backslash"):
            continue
        kind, cure = ("delayed", "write DisableDelayedExpansion, and no cmd /v:on")
        if "(delayed" not in lost:
            kind, cure = "percent", "write %%"
        yield Finding(kind, line, f"cmd takes {lost} out of '{text}'", cure)
    placeholder = _PLACEHOLDER.search(text)
    if placeholder:
        yield Finding("placeholder", line, f"{placeholder[0]} was never replaced", "write your own value in its place")
    blank = "\u00a0" in text and text.startswith("--")
    if blank or (script.shell != "ps1" and _SMART.match(text)):
        mark = "a no-break space" if blank else "a typographic quote"
        yield Finding("smart-character", line, f"{mark} in '{text}' is no quote and no blank for the shell",
                      "write it again with the keyboard")  # fmt: skip
    if script.shell == "bat" and '"' in text:
        yield Finding("quoting", line, f"the program receives '{text}': a backslash stands before a quote, or "
                      "quotes stand inside quotes", 'take the last backslash away; write set "NAME=value"')  # fmt: skip
    if script.shell == "bat" and text.startswith("'"):
        yield Finding(
            "quoting", line, "cmd knows no single quotes: they become part of the word", "write double quotes"
        )
    if script.shell == "ps1" and text.endswith("\\") and any(c.isspace() for c in text):
        yield Finding("quoting", line, "Windows PowerShell 5.1 takes the backslash before the closing quote for an "
                      "escape and swallows the next word", "leave the last backslash out")  # fmt: skip


def _undefined(script: Script, line: int, name: str) -> Finding:
    if script.shell == "bat" and not re.fullmatch(r"\w+", name):
        return Finding("percent", line, f"cmd takes %{name}% for a variable", "write %% for each percent sign")
    spaced = re.compile(rf"(?i)^\s*(?:set\s+)?\$?{re.escape(name)}\s+=\s")
    place = next((n for n, text in enumerate(script.lines, 1) if script.shell != "ps1" and spaced.match(text)), 0)
    for command in script.commands:
        start = dict(command.assigned).get(name)
        if start is not None and not any(call.command is command for call in script.calls):
            rest = [word.text for word in command.words if word.text not in ("export", "declare", "local", "readonly")]
            found = f"the value of {name} ends in front of '{' '.join(rest)}', and line {line} gets none"
            return Finding("unquoted", command.line, found, f'quote the whole: {name}="{" ".join((start, *rest))}"')
    spelled = f"%{name}%" if script.shell == "bat" else f"${name}"
    if place:
        return Finding("undefined", line, f"{spelled} is never set: the blank before = in line {place} belongs to the "
                       "name", f"write no blanks around = in line {place}", "error")  # fmt: skip
    return Finding("undefined", line, f"{spelled} is never set in this script", "set it above, or write its value here")


def paths(script: Script) -> Iterator[Finding]:
    """Paths of another system, and `~` that nobody replaces."""
    unix_powershell = script.lines[:1] and script.lines[0].startswith("#!")
    for call in script.calls:
        for flag in call.flags:
            spec = find(call, flag.spelled.partition("=")[0])
            for word in flag.values if spec and spec.kind == "path" else ():
                yield from _path(script, word, bool(unix_powershell))
            for word in flag.values if spec and (spec.kind == "path" or spec.name == "output_name") else ():
                token = None if _PLACEHOLDER.search(word.text) else _TOKEN.search(word.text)
                if token:
                    yield Finding("placeholder", word.line, f"{token[0]} was never replaced: a .{script.shell} file "
                                  "does not read it", _replacement(script, token[0]))  # fmt: skip


def _replacement(script: Script, token: str) -> str:
    """What to write for a token: a variable of another shell in this one's spelling, else the value."""
    if token[0] in "%$":
        spelled = {"bat": "%{}%", "ps1": "$env:{}", "sh": "${}"}[script.shell].format(token.strip("%${}"))
        return f"write {spelled}, and set it above"
    return "write your own value in its place"


def _path(script: Script, word: Word, unix_powershell: bool) -> Iterator[Finding]:
    text = word.text
    if script.shell == "sh":
        raw = re.sub("[\"']", "", word.raw)
        drive = _WINDOWS.match(raw) or _WINDOWS.match(text)
        if drive and not (script.for_git_bash and "\\" not in raw):
            spelled = re.sub(r"\\(?=\s)", "", raw if _WINDOWS.match(raw) else text)
            mounted_path = quoted(f"/mnt/{spelled[0].lower()}" + re.sub(r"[\\/]+", "/", spelled[2:]))
            cure = f"in WSL write {mounted_path}" if spelled[1:2] == ":" else "write the mounted folder"
            yield Finding("foreign-path", word.line, f"{raw} is a Windows path in a .sh file", cure)
        elif word.lost:
            yield Finding("foreign-path", word.line, f"bash takes the backslashes out: the step receives {text}",
                          "write forward slashes")  # fmt: skip
        if text.startswith("~") and word.raw[:1] in "\"'=":
            yield Finding("home", word.line, "a quoted ~ stays as it is", f'write "$HOME{text[1:]}"')
    elif not unix_powershell and (_POSIX.match(text) or text.startswith("~")):
        mounted = re.match(r"/mnt/([a-z])/(.*)", text)
        cure = f"write {mounted[1].upper()}:\\" + mounted[2].replace("/", "\\") if mounted else "write the Windows path"
        kind = "home" if text.startswith("~") else "foreign-path"
        what = "nothing replaces ~ here" if kind == "home" else f"{text} is a Linux path in a .{script.shell} file"
        yield Finding(kind, word.line, what, cure)


RULES = (file_bytes, long_lines, continuation, words, paths)
