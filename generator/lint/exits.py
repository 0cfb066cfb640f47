"""Rules about exit codes: a step must not start when the one before it failed."""

import re
from collections.abc import Iterator
from itertools import takewhile

from wangen.generator.lint.kinds import Finding
from wangen.generator.lint.script import Call, Command, Script

_IDLE = {
    "true", ":", "echo", "echo.", "printf", "ver", "rem", "pause", "sleep", "timeout", "date", "color", "title", "read",
    "type", "cat", "tput", "beep", "logger", "notify-send",
    "write-host", "write-output", "write-error", "write-warning", "read-host", "start-sleep",
}  # fmt: skip
"""Commands that do nothing about a failure but tell of it."""
_CODE = {"bat": r"(?i)errorlevel", "ps1": r"(?i)\$LASTEXITCODE|\$\?"}
"""How a script asks for the exit code of the command in front."""


def exit_codes(script: Script) -> Iterator[Finding]:
    """A step whose failure the next step does not see."""
    stops = _stops_by_itself(script)
    for number, call in enumerate(script.calls[:-1]):
        following = script.calls[number + 1]
        start = _position(script, call.command)
        between = script.commands[start + 1 : _position(script, following.command)]
        if _piped(script, call, between):
            yield Finding("pipe", call.command.last, "the pipe's exit code is that of its last program, so that a "
                          "failed step is not seen", ("write #!/bin/bash in line 1 and set -o pipefail "
                          "above" if _plain_sh(script) else "write set -o pipefail above")
                          if script.shell == "sh" else "let the step write its log itself")  # fmt: skip
        elif cure := _unseen(script, call, following, between, stops[0] < call.line < stops[1]):
            yield Finding("unchecked", call.line, f"when {call.program} fails, {following.program} (line "
                          f"{following.line}) runs all the same", cure)  # fmt: skip
        if script.shell == "bat":
            yield from _errorlevel(script, call, between)


def _position(script: Script, command: Command) -> int:
    return next(number for number, other in enumerate(script.commands) if other is command)


def _stops_by_itself(script: Script) -> tuple[int, float]:
    """The lines between which the shell itself stops at a failure."""
    pattern = {
        "sh": r"(?:^|[;&\s])set\s+(?:-\w*e\w*\b|-o\s+errexit|.*\s-e\b)|^#!.*\s-\w*e",
        "ps1": r"(?i)\$PSNativeCommandUseErrorActionPreference\s*=\s*\$true",
        "bat": r"(?!)",
    }[script.shell]
    begin = next((n for n, line in enumerate(script.lines, 1) if re.search(pattern, line)), 0)
    end = next((n for n, line in enumerate(script.lines, 1) if re.match(r"\s*set\s+\+e", line)), float("inf"))
    return (begin, end) if begin else (10**9, end)


def _unseen(script: Script, call: Call, following: Call, between: list[Command], stops: bool) -> str:
    """What to write so that a failure of the call is seen before the following one; empty when it is seen.

    `stops`: the shell stops by itself at a failure, where nothing asks for the exit code.
    """
    command = call.command
    if command.after == "&&" or command.words[0].text in script.functions:
        return ""  # a function of the script runs it and may look at its code
    if command.after == "||":
        leave = {"bat": "goto, or || exit /b 1", "ps1": "exit 1", "sh": "exit 1"}[script.shell]
        return "" if _acts(_alternative(command, between)) else f"write || {leave} in the place of what follows ||"
    if script.shell == "sh" and command.after == "&":
        waits = any(len(c.words) > 1 and c.words[0].text == "wait" for c in between)
        return "" if waits else "take the & off: the next step needs what this one makes"
    if command.condition:
        return "" if _condition_acts(script, command, following.command, between) else "write exit 1 in the branch"
    if stops or _asked(script, following.command, between):
        return ""
    return _cure(script, between)


def _acts(commands: list[Command]) -> bool:
    """Whether one of these commands may do something about a failure."""
    return any(not c.condition and (not c.words or c.words[0].text.lower() not in _IDLE) for c in commands)


def _alternative(command: Command, between: list[Command]) -> list[Command]:
    """What `||` starts: one command, or the block behind it."""
    if between and between[0].before == "(":
        inside = list(takewhile(lambda c: c.after != ")", between))
        return between[: len(inside) + 1]
    block = list(takewhile(lambda c: c.depth > command.depth, between))
    return block or between[:1]


def _condition_acts(script: Script, command: Command, following: Command, between: list[Command]) -> bool:
    """Whether a bash script that asks for a call's success with `if` stops, or goes on only after a success."""
    if script.shell != "sh" or not re.search(r"\b(?:el)?if\b", script.source(command)):
        return True  # `while` and `until` try again
    branch = list(takewhile(lambda c: c.depth >= command.depth and not _next_if(c, command), between))
    inside = len(branch) == len(between) and following.depth >= command.depth and not _next_if(following, command)
    return inside or _acts(branch)


def _next_if(command: Command, first: Command) -> bool:
    return command.condition and command.depth <= first.depth


def _asked(script: Script, following: Command, between: list[Command]) -> bool:
    """Whether a command behind the call reads its exit code and does something about it."""
    if script.shell == "sh":
        return bool(between) and "$?" in script.source(between[0])
    for number, command in enumerate(between):
        if not re.search(_CODE[script.shell], script.source(command)):
            continue
        if script.shell == "ps1" and "::Exit(" in "\n".join(script.lines[command.line - 1 : following.line]):
            return True  # a method is no command
        branch = _branch(command, between[number + 1 :]) if command.condition else [command]
        inside = command.condition and (following.depth > command.depth or following.line == command.line)
        if _acts(branch) or (inside and len(branch) == len(between) - number - 1):
            return True
    return False


def _branch(condition: Command, rest: list[Command]) -> list[Command]:
    """What an `if` of cmd or PowerShell starts: the block behind it, or the rest of its line."""
    block = list(takewhile(lambda c: c.depth > condition.depth, rest))
    return block or list(takewhile(lambda c: c.line <= condition.last, rest))


def _piped(script: Script, call: Call, between: list[Command]) -> bool:
    if call.command.after not in ("|", "|&") or script.shell == "ps1":
        return False
    lines = script.lines[: call.line]
    careful = any("pipefail" in line for line in lines) or any("PIPESTATUS" in script.source(c) for c in between)
    return not careful


def _errorlevel(script: Script, call: Call, between: list[Command]) -> Iterator[Finding]:
    for command in between:
        text = script.source(command)
        if re.search(r"(?i)\bif\s+errorlevel\s+1\b", text) and command.condition:
            yield Finding("errorlevel", command.line, "if errorlevel 1 is false for negative exit codes, which crashes "
                          "have", 'write if not "%ERRORLEVEL%"=="0"')  # fmt: skip
        if call.command.depth and command.depth >= call.command.depth and re.search(r"(?i)%errorlevel%", text):
            yield Finding("errorlevel", command.line, "inside ( ) cmd puts in %ERRORLEVEL% before the step runs",
                          "take the step out of the block, or write || behind it", "error")  # fmt: skip


def _cure(script: Script, between: list[Command]) -> str:
    if script.shell != "sh":
        asked = next((c for c in between if c.condition and re.search(_CODE[script.shell], script.source(c))), None)
        if asked:
            return f"write exit {'/b ' * (script.shell == 'bat')}1 in the branch of line {asked.line}"
    if script.shell == "bat":
        return 'write behind it: if not "%ERRORLEVEL%"=="0" exit /b %ERRORLEVEL%'
    if script.shell == "ps1":
        return "write behind it: if ($LASTEXITCODE -ne 0) { exit $LASTEXITCODE }"
    return (
        "write || exit 1 behind it"
        if _plain_sh(script)
        else "write set -euo pipefail at the top, or || exit 1 behind it"
    )


def _plain_sh(script: Script) -> bool:
    """Whether a script asks for `sh`, which on Debian and Ubuntu is dash and knows no pipefail."""
    return re.match(r"#!\s*(/usr)?/bin/(env\s+)?(da)?sh\b", script.lines[0]) is not None


RULES = (exit_codes,)
