"""The command lines of the two trainers, and a call's words read as its own trainer would read them.

wangen's flags come from the table of steps, musubi-tuner's from `profiles/tools/musubi_tuner.toml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from wangen.generator import commands
from wangen.generator.errors import WangenError, did_you_mean, one_of
from wangen.generator.lint.script import MORE, UNKNOWN, Call, Fault, Given, Word, is_flag
from wangen.generator.table import Option, Step, missing, spellings
from wangen.generator.unknown_flags import asks_for_nothing, unknown_flag
from wangen.profiles.foreign import musubi

MANY = -1


@dataclass(frozen=True)
class Spec:
    """What a flag takes.

    Attributes:
        name: the tool's own name of the flag.
        kind: `str`, `int`, `float` or `path`.
        count: number of values; `MANY` for any number.
        choices: the allowed values; empty for any.
        option: the flag of wangen's table; None for musubi-tuner.
        constant: the value that the flag stands for when it takes none.
    """

    name: str
    kind: str
    count: int
    choices: tuple[str, ...] = ()
    option: Option | None = None
    constant: str = ""


@cache
def musubi_specs(program: str) -> dict[str, Spec]:
    """The flags of one of musubi-tuner's scripts, by name.

    >>> musubi_specs("wan_train_network")["optimizer_args"]
    Spec(name='optimizer_args', kind='str', count=-1, choices=(), option=None, constant='')
    """
    return {name: _spec(name, kind) for name, kind in musubi()["steps"][program].items()}


def _spec(name: str, kind: str) -> Spec:
    if kind == "flag":
        return Spec(name, "str", 0)
    if "|" in kind:
        return Spec(name, "str", 1, tuple(kind.split("|")))
    count = MANY if kind.endswith("*") else int(kind[-1]) if kind[-1].isdigit() else 1
    return Spec(name, kind.rstrip("*0123456789"), count)


@cache
def own_specs(step: type[Step]) -> Mapping[str, Spec]:
    """The accepted spellings of the flags of a step of wangen."""
    found = {}
    for name, option, constant in spellings(step):
        if option.kind is bool:
            found[name] = Spec(option.name, "str", 0, option=option)
            found[f"no_{name}"] = Spec(option.name, "str", 0, option=option, constant="no")
        else:
            count = 0 if constant else 1 if option.length is None else option.length or MANY
            kind = "path" if option.kind is Path else option.kind.__name__
            found[name] = Spec(option.name, kind, count, option.choices, option, constant or "")
    return found


def find(call: Call, spelled: str) -> Spec | None:
    """The flag that a call's tool understands by this spelling; musubi-tuner takes unmistakable beginnings too."""
    name = spelled.lstrip("-")
    if call.tool == "wangen":
        return own_specs(call.step).get(name.replace("-", "_"))  # type: ignore[arg-type]  # a class has a hash
    specs = musubi_specs(call.program)
    begun = [spec for other, spec in specs.items() if other.startswith(name)]
    return specs.get(name) or (begun[0] if len(begun) == 1 else None)


def required(call: Call) -> list[str]:
    """Flags without which the call fails, sooner or later."""
    if call.tool == "wangen":
        return [words.removeprefix("--") for words in missing(call.step, [flag.name for flag in call.flags])]
    return list(musubi()["required"][call.program])


def read_flags(call: Call) -> None:
    """Fill a call's `flags`, `faults`, `stray` and `more` from its words."""
    position = 0
    while position < len(call.args):
        word = call.args[position]
        position += 1
        if MORE in word.text:
            call.more = True
        elif not is_flag(word):
            call.stray.append(word)
        else:
            position = _flag(call, word, position)


class Torn(NamedTuple):
    """A value with blanks that stands without quotes: its first word, and those that the shell made of the rest."""

    first: Word
    rest: tuple[Word, ...]

    def whole(self) -> Word:
        """The value as it was meant."""
        words = (self.first, *self.rest)
        undefined = tuple(name for word in words for name in word.undefined)
        lost = tuple(sign for word in words for sign in word.lost)
        return Word(" ".join(word.text for word in words), self.first.line, "", undefined, lost)


def torn_values(call: Call) -> list[Torn]:
    """The values of a call that the shell parted at their blanks."""
    found: list[Torn] = []
    before: Word | None = None
    for word in call.args:
        if not any(word is other for other in call.stray) or word.text[:1] in "–—^`":
            before = word
        elif found and before is found[-1].rest[-1] and before.line == word.line:
            found[-1] = Torn(found[-1].first, (*found[-1].rest, word))
            before = word
        elif before and before.line == word.line and _is_text(call, before):
            found.append(Torn(before, (word,)))
            before = word
        else:
            before = None
    return found


def _is_text(call: Call, word: Word) -> bool:
    """Whether a word is a value that may have blanks in it: a path or a text, no number and none of a choice."""
    for flag in call.flags:
        if any(word is value for value in flag.values) or word.text.startswith(f"{flag.spelled}="):
            spec = find(call, flag.spelled)
            return spec is None or (spec.kind in ("str", "path") and not spec.choices)
    return not word.text.startswith("--")


def add_config(call: Call, values: Mapping[str, Any]) -> None:
    """Take in what a `--config_file` says: sections are flattened, and the command line wins."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= value if isinstance(value, dict) else {key: value}
    line = call.line_of("config_file")
    for key, value in flat.items():
        spec = find(call, f"--{key}")
        if spec is None and call.tool == "wangen" and asks_for_nothing(call.step, key, value):
            continue
        if spec is None:
            call.faults.append(_unknown(call, f"--{key}", line))
        elif call.given(spec.name) is None and value is not False:
            items = value if isinstance(value, list) else [value]
            words = tuple(Word(str(item), line) for item in items) if spec.count else _constant(spec, line)
            call.flags.append(Given(spec.name, f"--{key}", words, line))


def _flag(call: Call, word: Word, position: int) -> int:
    """Read the flag at a word with its values; returns the position behind them."""
    spelled, equals, joined = word.text.partition("=")
    spec = find(call, spelled)
    inline = (Word(joined, word.line, word.raw, word.undefined, word.lost),) if equals else ()
    free = position
    while free < len(call.args) and not is_flag(call.args[free]) and MORE not in call.args[free].text:
        free += 1
    if spec is None:
        call.faults.append(_unknown(call, spelled, word.line))
        spec = find(call, spelled.replace("-", "_").replace("__", "--", 1))  # what was meant by dashes
    if spec is None:
        return free if free == position + 1 and not inline else position
    if spec.count == 0:
        if inline:
            call.faults.append(Fault("value", word.line, f"{spelled} takes no value", f"write {spelled} alone"))
        call.flags.append(Given(spec.name, spelled, _constant(spec, word.line), word.line))
        return position
    count = free - position if spec.count == MANY else min(spec.count, free - position)
    taken = inline if inline else tuple(call.args[position : position + count])
    call.flags.append(Given(spec.name, spelled, taken, word.line))
    call.faults += _values(spec, spelled, taken, word.line)
    return position if inline else position + count


def _constant(spec: Spec, line: int) -> tuple[Word, ...]:
    return (Word(spec.constant, line),) if spec.constant else ()


def _unknown(call: Call, spelled: str, line: int) -> Fault:
    """The answer to a flag that the step does not have."""
    if call.tool == "wangen":
        answer = unknown_flag(call.step, spelled)
        return Fault("unknown-flag", line, answer.found, answer.cure, spelled)
    name = spelled.lstrip("-").replace("-", "_")
    found = f"{call.program}.py has no flag {spelled}"
    if name in musubi_specs(call.program):
        sage = name == "sage_attn" and call.name == "train"
        cure = "write --sdpa, because sage attention is refused too" if sage else f"write --{name}"
        return Fault("dashes", line, f"{found}: musubi-tuner spells its flags with underscores", cure)
    return Fault("unknown-flag", line, found, _answer(call.program, name), spelled)


def _answer(program: str, name: str) -> str:
    """What to do about a flag that one of musubi-tuner's scripts does not have."""
    answers: Mapping[str, str] = musubi()["answers"].get(program, {})
    if name in answers:
        return answers[name]
    owners = [f"{other}.py" for other in musubi()["steps"] if name in musubi_specs(other)]
    if owners:
        return f"it belongs to {' and '.join(owners)}: take it off this line"
    return did_you_mean(name, musubi_specs(program), f"take it off; {program}.py --help lists the flags", form="--{}")


def _values(spec: Spec, spelled: str, values: tuple[Word, ...], line: int) -> list[Fault]:
    """What is wrong with the values of one flag."""
    if spec.count not in (MANY, len(values)):
        wanted = "a value" if spec.count == 1 else f"{spec.count} values"
        return [Fault("value", line, f"{spelled} needs {wanted}", f"write {wanted} behind {spelled}, or take it off")]
    known = [word for word in values if UNKNOWN not in word.text and not word.undefined]
    if spec.option:
        return [fault for word in known for fault in _own_value(spec, word)]
    return [fault for word in known for fault in _musubi_value(spec, spelled, word)]


def _own_value(spec: Spec, word: Word) -> list[Fault]:
    assert spec.option is not None
    option = spec.option
    one = Option(option.name, option.kind, option.choices, None, option.optional, option.default, option.flag)
    try:
        commands.convert(one, word.text)
    except WangenError as error:
        found, _, cure = error.found.partition(": ")
        return [Fault("value", word.line, found, error.cure or cure or "see --help")]
    return []


def _musubi_value(spec: Spec, spelled: str, word: Word) -> list[Fault]:
    if spec.choices and word.text not in spec.choices:
        found = f"{spelled} has no value '{word.text}'"
        return [Fault("value", word.line, found, one_of(word.text, spec.choices))]
    if spec.kind in ("int", "float"):
        try:
            int(word.text) if spec.kind == "int" else float(word.text)
        except ValueError:
            number = "a whole number" if spec.kind == "int" else "a number"
            cure = f"write {number}"
            if spec.name == "timestep_boundary":
                cure = "the trainer takes it in thousandths: write 875 for text-to-video, 900 for image-to-video"
            return [Fault("value", word.line, f"{spelled} takes {number}, got '{word.text}'", cure)]
    return []
