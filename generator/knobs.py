"""The knobs of a script: settings of its steps that the user may change in the block at its top.

Each is a shell variable with a remark above it. Settings that several steps share with one value have one variable.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from wangen.generator.errors import WangenError
from wangen.generator.knob_values import VALUE
from wangen.generator.table import Option, Step, options, text_of
from wangen.profiles import Platform

# A remark stands unquoted in a .bat file, where & and % mean something; it is plain ASCII where it can be.
_SPELLED = {"…": "...", "’": "'", "&": "and", "%": " percent"}
_UNSAFE = re.compile(r"[^\w .,;:()/_+='-]")


class Knob(NamedTuple):
    """A variable in the block of knobs, with the value that wangen gives it and the remark above it."""

    name: str
    value: str
    note: str


def made_of(platform: Platform, steps: tuple[Step, ...]) -> tuple[list[Knob], dict[tuple[str, str], str]]:
    """The knobs, and the variable of each `(command, flag)`; those of the last step first: people turn them most.

    Raises:
        WangenError: two steps of one kind want different values.
    """
    uses: dict[str, list[tuple[Step, Option, str]]] = {}
    for step in steps:
        for option in options(type(step)):
            value = getattr(step, option.name)
            if _is_knob(option, value) and not _is_settled(step, option.name):
                uses.setdefault(option.name, []).append((step, option, text_of(value)))
    order = dict.fromkeys(option.name for step in reversed(steps) for option in options(type(step)))
    knobs: dict[str, Knob] = {}
    variables = {}
    for field, entries in ((field, uses[field]) for field in order if field in uses):
        users = [step for step, _, _ in entries]
        shared = len({value for _, _, value in entries}) == 1 and _means_all(users, field, steps)
        for step, option, value in entries:
            variable = field.upper() if shared else f"{field}_{step.command}".upper()
            commands = [user.command for user in users] if shared else [step.command]
            note = _note(commands, option, value, _reason(platform, commands, field, value))
            if knobs.setdefault(variable, Knob(variable, value, note)).value != value:
                raise WangenError(f"two steps {step.command} want different values of {field}", where=variable)
            variables[step.command, field] = variable
    return list(knobs.values()), variables


def _is_knob(option: Option, value: Any) -> bool:
    # What the command line does not spell out needs no variable, and a free text is no value for one.
    scalar = option.flag.knob and option.length is None and option.kind is not bool
    return bool(scalar and option.words(value) and VALUE.fullmatch(text_of(value)))


def _is_settled(step: Step, field: str) -> bool:
    """Whether no other value could be: of two experts one alone has weights in the script."""
    return field == "experts" and None in (getattr(step, "dit", None), getattr(step, "dit_high_noise", None))


def _means_all(users: Iterable[Step], field: str, steps: tuple[Step, ...]) -> bool:
    """Whether a variable named after the field alone tells the truth.

    Not when it belongs to one step while others have that field too: BATCH_SIZE would be taken for every step's.
    """
    owners = {step.command for step in steps if any(option.name == field for option in options(type(step)))}
    return len({step.command for step in users}) > 1 or len(owners) == 1


def _reason(platform: Platform, commands: Iterable[str], field: str, value: str) -> str:
    """Why the platform wants this value for one of the commands; empty when it has no reason or wants another value."""
    for command in commands:
        wanted = platform.overrides.get(command, {}).get(field, value)
        reason = platform.reasons.get(f"{command}.{field}", "")
        if reason and text_of(wanted) == value:
            return reason
    return ""


def _note(commands: Iterable[str], option: Option, value: str, why: str) -> str:
    usable = [choice for choice in option.choices if choice not in option.flag.refused]
    choices = f"; one of {', '.join(usable)}" if usable else ""
    text = option.flag.help + choices + (f". {value} because {why}" if why else "")
    for sign, spelled in _SPELLED.items():
        text = text.replace(sign, spelled)
    text = _UNSAFE.sub("", " ".join(text.split()))
    return f"{', '.join(commands)}: {text} (published: {value})"
