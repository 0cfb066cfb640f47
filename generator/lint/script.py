"""What the linter knows of a script: its words with their lines, its commands, its calls of a trainer.

The three readers (`sh`, `bat`, `ps1`) make `Command`s; this module says what these are and decides
which of them are calls of musubi-tuner or wangen.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from wangen.generator.steps import find_step
from wangen.generator.table import Step

HERE = "\ufdd0"
"""Stands in a word for the script's own folder."""
UNKNOWN = "\ufdd1"
"""Stands in a word for a text that only the running script knows."""
MORE = "\ufdd2"
"""A word that stands for any number of words that only the running script knows."""

Shell = Literal["bat", "ps1", "sh"]
Tool = Literal["musubi-tuner", "wangen"]

MARK: Mapping[Shell, str] = {"bat": "^", "ps1": "`", "sh": "\\"}
"""What stands at the end of a line that goes on."""


@dataclass(frozen=True)
class Word:
    """One argument as the program receives it.

    Attributes:
        text: with the values of variables in their places; `HERE` and `UNKNOWN` where these are not to be had.
        line: number of the script's line, from 1.
        raw: as the script spells it; empty when the reader does not keep it.
        undefined: variables that the script uses here and never sets.
        lost: what the shell takes out of the text, in words.
    """

    text: str
    line: int
    raw: str = ""
    undefined: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


@dataclass
class Command:
    """One simple command of the script.

    Attributes:
        words: the program and its arguments, without redirections.
        line: its first line.
        last: its last line.
        before: the operator that joins it to the command in front, empty for a new line.
        after: the operator behind it, empty for a new line.
        depth: number of blocks around it.
        condition: it is what an `if` or `while` asks for.
        called: a .bat file starts it with `call`.
        assigned: what stands in front of it, `NAME=value program`, and is set for it alone: (name, value).
        function: the function in whose body it stands; empty outside. The readers of bash scripts alone say so.
    """

    words: list[Word]
    line: int
    last: int
    before: str = ""
    after: str = ""
    depth: int = 0
    condition: bool = False
    called: bool = False
    assigned: tuple[tuple[str, str], ...] = ()
    function: str = ""


@dataclass(frozen=True)
class Given:
    """One flag of a call.

    Attributes:
        name: the tool's own name of the flag.
        spelled: as the script writes it, with its dashes.
        values: what follows it.
        line: where it stands.
    """

    name: str
    spelled: str
    values: tuple[Word, ...]
    line: int


@dataclass(frozen=True)
class Fault:
    """Something wrong with one flag of a call: the kind of finding, where, what, and what to write instead.

    `unknown` is the flag when the step does not have it.
    """

    kind: str
    line: int
    found: str
    cure: str
    unknown: str = ""


@dataclass
class Call:
    """A command that runs a step of a trainer.

    Attributes:
        command: the whole command.
        tool: whose step it is; it decides what is right.
        step: the step of wangen's table that does the same work.
        program: the step's name as the tool knows it: `wan_train_network`, `train`.
        launcher: the words before the step.
        args: the words after the step; the readers of orphaned lines append to them.
        venv: the environment that was activated before, as the script writes it; empty for none.
        cwd: the folder that the script changed to before, `HERE` for its own; empty for none.
        flags: the flags that were understood; filled by `tools.read_flags`.
        more: the call takes words that cannot be read from the script.
        faults: what is wrong with single flags; filled by `tools.read_flags`.
        stray: words that belong to no flag; filled by `tools.read_flags`.
    """

    command: Command
    tool: Tool
    step: type[Step]
    program: str
    launcher: list[Word]
    args: list[Word]
    venv: str = ""
    cwd: str = ""
    flags: list[Given] = field(default_factory=list)
    more: bool = False
    faults: list[Fault] = field(default_factory=list)
    stray: list[Word] = field(default_factory=list)

    @property
    def line(self) -> int:
        """The first line of the call."""
        return self.command.line

    @property
    def name(self) -> str:
        """The step's name in wangen's table: `cache_latents`, `train` …"""
        return self.step.command

    def given(self, name: str) -> Given | None:
        """The flag of that name, the last one when it stands there twice."""
        return next((flag for flag in reversed(self.flags) if flag.name == name), None)

    def value(self, name: str) -> str | None:
        """The flag's value; None when it is not given or not known."""
        flag = self.given(name)
        if flag is None or not flag.values or UNKNOWN in flag.values[0].text:
            return None
        return flag.values[0].text

    def number(self, name: str, default: float) -> float:
        """The flag's value as a number, the default when it is not given or no number."""
        try:
            return float(self.value(name) or default)
        except ValueError:
            return default

    def line_of(self, name: str) -> int:
        """The flag's line, or the call's when the flag is not there."""
        flag = self.given(name)
        return flag.line if flag else self.line


@dataclass
class Script:
    """A script taken apart.

    Attributes:
        path: the file.
        shell: which shell reads it.
        data: its bytes.
        lines: its text by lines, without line ends.
        commands: all commands in the order of the text.
        calls: those that run a step.
        functions: names of functions that the script defines.
        foreign: calls of other scripts of musubi-tuner: (line, name).
        orphans: lines that were meant to belong to a call, as commands.
    """

    path: Path
    shell: Shell
    data: bytes
    lines: list[str]
    commands: list[Command] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    foreign: list[tuple[int, str]] = field(default_factory=list)
    orphans: list[Command] = field(default_factory=list)

    def source(self, command: Command) -> str:
        """The lines of a command as they stand in the file."""
        return "\n".join(self.lines[command.line - 1 : command.last])

    @cached_property
    def for_git_bash(self) -> bool:
        """Whether it is for the bash of Git for Windows: it names what only environments of Windows have."""
        return any(re.search(r"[/\\]Scripts[/\\]", line) for line in self.lines)

    def steps(self, name: str) -> list[Call]:
        """The calls of one step by its name in wangen's table."""
        return [call for call in self.calls if call.name == name]


def is_flag(word: Word) -> bool:
    """Whether a word is a flag and no value; negative numbers are values.

    >>> is_flag(Word("--sdpa", 1)), is_flag(Word("-0.5", 1))
    (True, False)
    """
    return re.match(r"--.|-[A-Za-z]", word.text) is not None


def quoted(text: str) -> str:
    """A text as a cure shows it: in quotes when it has a blank.

    >>> quoted("/my models"), quoted("/models")
    ('"/my models"', '/models')
    """
    return f'"{text}"' if any(c.isspace() for c in text) else text


MUSUBI = re.compile(r"(?:.*[/\\.])?(wan_(?:cache_latents|cache_text_encoder_outputs|train_network|generate_video))")
FOREIGN = {
    "cache_latents": "wan_cache_latents",
    "cache_text_encoder_outputs": "wan_cache_text_encoder_outputs",
    "hv_train_network": "wan_train_network",
    "hv_generate_video": "wan_generate_video",
}
"""HunyuanVideo's scripts, which people take for Wan's: their name -> the right one."""

_NO_CALL = set(
    re.findall(
        r"\S+",
        "echo echo. printf cat ls dir type test [ [[ grep sed cp copy xcopy robocopy move mv del rm git write-host "
        "write-output test-path pip pip3 chmod code notepad if title rem foreach for function where which",
    )
)


def base_name(path: str) -> str:
    r"""The last part of a path of any system, without `.py` and `.exe`.

    >>> base_name(r"C:\venv\Scripts\python.exe"), base_name("src/wan_train_network.py")
    ('python', 'wan_train_network')
    """
    return re.sub(r"\.(py|exe)$", "", re.split(r"[/\\]", path)[-1], flags=re.IGNORECASE)


def find_calls(script: Script) -> None:
    """Fill `calls` and `foreign` from the commands, with the environment and folder that each call finds."""
    venv = cwd = ""
    previous: Command | None = None
    for command in script.commands:
        call = call_of(command)
        torn = bool(script.calls) and previous in (script.calls[-1].command, *script.orphans[-1:])
        previous = command if command.words else previous
        if torn and command.words and is_flag(command.words[0]):
            script.orphans.append(command)
            script.calls[-1].args += command.words
            continue
        if call:
            call.venv, call.cwd = venv, cwd
            script.calls.append(call)
            continue
        if name := _foreign(command):
            script.foreign.append((command.line, name))
        venv = "" if _deactivates(command.words) else activated(command.words, script.shell) or venv
        cwd = _folder(command.words) or cwd
    for call in (call for call in script.calls if call.command.function):
        call.args = _with_given(script, call.args, (call.command.function,))


def _with_given(script: Script, words: list[Word], functions: tuple[str, ...]) -> list[Word]:
    """Words of a function's body with what it is given in the place of `"$@"`, where it is called once.

    Args:
        script: that calls it.
        words: of the body of the last function.
        functions: that function behind those that it calls.
    """
    uses = [command for command in script.commands if command.words and command.words[0].text == functions[-1]]
    shifted = _shifted(script, functions[-1])
    once = len(uses) == 1 and uses[0].function not in functions and shifted is not None
    if not once or not any(word.text == MORE for word in words):
        return words
    given = _with_given(script, uses[0].words[1:], (*functions, uses[0].function))[shifted:]
    return [one for word in words for one in (given if word.text == MORE and word.raw else [word])]


def _shifted(script: Script, function: str) -> int | None:
    """How many of its words a function takes off with `shift`; None when only the running script knows."""
    body = [command for command in script.commands if command.function == function]
    outermost = min((command.depth for command in body), default=0)
    number = 0
    for command in body:
        if command.words and command.words[0].text == "shift":
            count = command.words[1].text if len(command.words) > 1 else "1"
            if not count.isdecimal() or command.before in ("&&", "||") or command.depth > outermost:
                return None
            number += int(count)
    return number


def call_of(command: Command) -> Call | None:
    """The step that a command runs; None when it runs none."""
    words = command.words
    if not words or words[0].text.lower() in _NO_CALL:
        return None
    for place, word in enumerate(words):
        if base_name(word.text) in ("wangen", "wangen.runtime") and place + 1 < len(words):
            step = find_step(words[place + 1].text)
            if step is None:
                return None
            return Call(command, "wangen", step, step.command, words[: place + 1], words[place + 2 :])
        module = place > 0 and words[place - 1].text == "-m"
        match = MUSUBI.fullmatch(word.text if module else word.text.removesuffix(".py"))
        if match and (module or word.text.endswith(".py")):
            step = find_step(match[1])
            assert step is not None, "the table spells every one of these scripts"
            return Call(command, "musubi-tuner", step, match[1], words[:place], words[place + 1 :])
    return None


def activated(words: list[Word], shell: str) -> str:
    r"""The environment that a command activates, as the script writes its folder; empty for none.

    >>> activated([Word("source", 1), Word("/opt/venv/bin/activate", 1)], "sh")
    '/opt/venv'
    """
    texts = [word.text for word in words]
    if _conda(texts) and "activate" in texts[1:2]:
        return "conda:" + " ".join(texts[2:])
    if shell == "sh" and texts[:1] and texts[0] not in ("source", "."):
        return ""
    for text in texts[:2]:
        match = re.fullmatch(r"(?i)(.*?)[/\\]?(?:bin|scripts)[/\\]activate(?:\.bat|\.ps1|\.fish)?", text)
        if match:
            return match[1] or "."
    return ""


def _conda(texts: list[str]) -> bool:
    return bool(texts) and base_name(texts[0]).lower() in ("conda", "mamba", "micromamba")


def _deactivates(words: list[Word]) -> bool:
    texts = [word.text for word in words]
    alone = bool(texts) and base_name(texts[0]).lower().removesuffix(".bat") == "deactivate"
    return alone or (_conda(texts) and "deactivate" in texts[1:2])


def _folder(words: list[Word]) -> str:
    """The folder that a command changes to; empty for none."""
    if len(words) < 2 or words[0].text.lower() not in ("cd", "chdir", "pushd", "set-location", "push-location", "sl"):
        return ""
    rest = [word.text for word in words[1:] if word.text.lower() not in ("/d", "--", "-literalpath", "-path", "-p")]
    return rest[0] if rest else ""


def _foreign(command: Command) -> str:
    if not command.words or command.words[0].text.lower() in _NO_CALL:
        return ""
    for word in command.words[:8]:
        if word.text.endswith(".py") and base_name(word.text) in FOREIGN:
            return base_name(word.text)
    return ""
