"""Flags that a step does not have: whose they are, and what to do."""

import os
from collections.abc import Iterable

from wangen.generator.errors import UsageError, did_you_mean
from wangen.generator.steps import STEPS
from wangen.generator.table import Step, spellings

SCRIPT_VERSION = "WANGEN_SCRIPT_VERSION"
"""Emitted scripts set this environment variable to the version that made them."""


def unknown_flag(step: type[Step], word: str) -> UsageError:
    """The answer to a flag that this step does not have: whose it is, or the nearest one, and what to do."""
    return unknown_flags(step, [word])


def unknown_flags(step: type[Step], words: Iterable[str]) -> UsageError:
    """The answer to all flags of a line, or keys of a file, that this step does not have."""
    from importlib.metadata import version

    names = dict.fromkeys(word.lstrip("-").replace("-", "_") for word in words)
    *others, last = names
    found = f"{step.command} has no flag --{last}"
    if others:
        found = f"{step.command} has no flags {', '.join(f'--{name}' for name in others)} and --{last}"
    script = os.environ.get(SCRIPT_VERSION)
    here = version("wangen")
    if script and script != here:
        found += f" (this script was made by wangen {script}, this machine has {here})"
        return UsageError(found, cure="install the script's version, or publish again with this one")
    cures: dict[str, list[str]] = {}
    for name in names:
        cures.setdefault(_instead(step, name), []).append(f"--{name}")
    if not others:
        return UsageError(found, cure=next(iter(cures)))
    return UsageError(found, cure="; ".join(f"{', '.join(flags)}: {cure}" for cure, flags in cures.items()))


def _instead(step: type[Step], name: str) -> str:
    """What to do in place of a flag that a step does not have."""
    from wangen.profiles.foreign import musubi

    if name in step.elsewhere:
        return step.elsewhere[name]
    answers = musubi()["answers"]
    if said := next((answers[program][name] for program in step.spellings if name in answers.get(program, {})), ""):
        return str(said)
    owners = [other.command for other in STEPS if any(name == spelling for spelling, *_ in spellings(other))]
    if owners:
        return f"--{name} belongs to {' and '.join(owners)}: take it off this line"
    known = [spelling for spelling, *_ in spellings(step)]
    return did_you_mean(name, known, f"wangen {step.command} --help lists the flags", form="--{}", cutoff=0.65)


def asks_for_nothing(step: type[Step], name: str, raw: object) -> bool:
    """Whether a key of a settings file is another tool's flag, with a value that it has without being given."""
    off = raw is False or raw == [] or (isinstance(raw, str) and raw.lower() in ("", "no", "none"))
    return off and name in step.elsewhere
