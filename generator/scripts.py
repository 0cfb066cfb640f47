"""A platform and its steps become the text of a run script; a script on disk is read back and replaced with care.

The block of knobs belongs to the user: a value changed there is kept when the script is made again. Any other edit
is seen by a digest in the script's head, and then the script stays and the new text goes beside it as `.new`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from wangen.generator import quoting, slurm
from wangen.generator.commands import parse
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.knob_values import VALUE
from wangen.generator.knobs import Knob, made_of
from wangen.generator.quoting import Word
from wangen.generator.refusals import judged
from wangen.generator.script_text import (
    decode,
    is_sealed,
    places,
    published_knobs,
    seal,
    settings,
    shell_of,
    template,
    with_remarks,
)
from wangen.generator.setup.wheel import wheel_name
from wangen.generator.step_parts import SMOKE_ITEMS, SMOKE_STEPS
from wangen.generator.steps import Train, find_step
from wangen.generator.table import SMOKE, Step, options, text_of
from wangen.profiles import Platform

# cmd cuts a line at 8191 characters and runs the rest as a command of its own.
BAT_LINE_LENGTH = 8000
_PATH_RESERVE = 260
_VERSION = re.compile(r"[A-Za-z0-9.+-]+")
_SLUG = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What the scripts of one dataset on one platform share.

    Attributes:
        platform: the profile.
        slug: the dataset's name in file names.
        root: folder the steps run in, as the target writes it; None: the folder that holds the script.
        venv: folders searched for the virtual environment, relative to the root or absolute, as the target writes them.
        steps: what the script runs, in order; their paths are the target's text.
        version: the version of wangen that makes the script.
    """

    platform: Platform
    slug: str
    root: str | None
    venv: tuple[str, ...]
    steps: tuple[Step, ...]
    version: str


class _Line(NamedTuple):
    """A step as the templates see it; `smokes`: the word `smoke` adds a flag to its command line."""

    name: str
    lines: list[str]
    smokes: bool


def render(bundle: Bundle, shell: str, name: str, knobs: Mapping[str, str] | None = None) -> bytes:
    """The bytes of the script `<name>_<slug>.<shell>`.

    Args:
        bundle: what to run, where.
        shell: `sh`, `bat` or `ps1`, or `sbatch` for the script that submits those steps to Slurm.
        name: `train` or `cache`; the script runs the bundle's steps, whatever its name.
        knobs: values that replace those of the steps, by variable name.

    Raises:
        WangenError: the shell cannot carry a path or text, or `knobs` names no knob of this script.
    """
    ending, shell = shell, "sh" if shell == slurm.ENDING else shell
    _check(bundle, shell)
    published, variables = _knobs(bundle, ending)
    values = {knob.name: knob.value for knob in published} | dict(knobs or {})
    for knob, value in values.items():
        if knob not in {known.name for known in published} or not VALUE.fullmatch(value):
            raise WangenError(f"{knob}={value} is no knob of this script, or no value for one", where=bundle.slug)
    smoke = SMOKE if any(isinstance(step, Train) for step in bundle.steps) else ""
    context = places(bundle.root, bundle.venv, shell) | {
        "script": f"{name}_{bundle.slug}.{ending}",
        "stem": f"{name}_{bundle.slug}",
        "slug": bundle.slug,
        "version": bundle.version,
        "platform": bundle.platform.name,
        "wheel": wheel_name(bundle.version),
        "digest": "0" * 32,
        "knobs": [knob._replace(value=values[knob.name]) for knob in published],
        "names": list(dict.fromkeys(step.command for step in bundle.steps)),
        "steps": [
            _Line(step.command, _lines(step, shell, variables), bool(smoke) and _smokes(step)) for step in bundle.steps
        ],
        "smoke": smoke,
        "smoke_flag": f"--{SMOKE}",
        "smoke_words": f"a try: {SMOKE_STEPS} steps on at most {SMOKE_ITEMS} items into outputs/{bundle.slug}/{SMOKE}",
    }
    if ending == slurm.ENDING:
        context |= slurm.stages(bundle.platform, bundle.steps)
    text = template("run", ending).render(context)
    if shell == "bat":
        _check_line_lengths(text, values)
    return seal(text, shell)


def read_knobs(data: bytes) -> dict[str, str]:
    """The values in a script's block of knobs, by variable name; empty when there is no block."""
    text = decode(data)
    return {knob["name"].upper(): knob["value"] for _, knob in settings(text, shell_of(text)) if knob}


def read_steps(data: bytes, shell: str) -> list[list[str]]:
    """The steps' command lines with the knobs' values in place, each beginning with the step's command name.

    Raises:
        WangenError: a line cannot be read, or uses a knob that is not set.
    """
    knobs = read_knobs(data)

    def value(name: str) -> str:
        if name not in knobs:
            raise WangenError(f"the script uses {name}, which its block of knobs does not set", cure="publish it again")
        return knobs[name]

    return quoting.commands(decode(data), shell, value)


def parsed_steps(data: bytes, shell: str) -> Iterator[tuple[str, Step | WangenError]]:
    """Every line of a script as its step's own parser reads it: the step's name, and the step or what is wrong.

    Raises:
        WangenError: the script cannot be read.
    """
    yield from parsed(read_steps(data, shell))


def parsed(lines: Iterable[list[str]]) -> Iterator[tuple[str, Step | WangenError]]:
    """As `parsed_steps`, of command lines that are read already."""
    for command, *words in lines:
        kind = find_step(command)
        try:
            if kind is None:
                raise UsageError(f"there is no step {command!r}", cure="publish it again")
            yield command, judged(parse(kind, words))
        except WangenError as error:
            yield command, error


def marked_steps(data: bytes, shell: str) -> list[list[str]]:
    r"""As `read_steps`, with `\0` and the name of a knob in the place of its value, whether it is set or not.

    Raises:
        WangenError: a line cannot be read.
    """
    return quoting.commands(decode(data), shell, "\0{}".format)  # which no word of a script holds


def untouched(data: bytes) -> bool:
    """Whether nothing but values in the block of knobs differs from what wangen wrote."""
    try:
        text = decode(data)
    except WangenError:
        return False
    shell = shell_of(text)
    return is_sealed(text, shell) and not invalid_knobs(data)


def invalid_knobs(data: bytes) -> list[str]:
    """The lines in a script's block of knobs that set no knob: a value with other characters, a forgotten quote.

    Such a line makes `untouched` false and its value is not read. Empty for a file that wangen cannot read at all.
    """
    try:
        text = decode(data)
    except WangenError:
        return []
    pairs = settings(text, shell_of(text))
    return [line.strip() for line, setting in pairs if setting is None]


def changed_knobs(data: bytes) -> dict[str, tuple[str, str]]:
    """The knobs of a script that the user changed: name -> (the user's value, the published one)."""
    published = published_knobs(data)
    values = read_knobs(data)
    return {knob: (value, published[knob]) for knob, value in values.items() if published.get(knob, value) != value}


def merge(old: bytes, bundle: Bundle, shell: str, name: str) -> tuple[bytes, bool]:
    """The script made anew with the values that the user changed in `old`, and whether `old` has to stay.

    A value is the user's when it differs from the one published in `old`, so a new default reaches every script
    whose user did not touch that knob. It goes with the flag of the step: a knob has another name once a second step
    has that flag. `old` has to stay when it was edited elsewhere, or when a knob that the user changed does not exist
    any more and not every step that has such a flag has its value now.
    """
    knobs, variables = _knobs(bundle, shell)
    changed: dict[str, str] = {}
    before: dict[tuple[str, str], str] = {}
    with suppress(WangenError):  # who edits a script may write what only its shell can read
        changed = {knob: value for knob, (value, _) in changed_knobs(old).items()}
        before = _variables(old, shell) if variables else {}
    kept = {knob.name: changed[knob.name] for knob in knobs if knob.name in changed}
    gone, carried = changed.keys() - kept.keys(), set[str]()
    for knob in knobs:
        earlier = {before[use] for use, variable in variables.items() if variable == knob.name and use in before}
        if earlier & gone and len(values := {changed.get(variable) for variable in earlier}) == 1:
            kept[knob.name] = str(values.pop())
            carried |= earlier
    lost = any(_values(bundle, knob) != {changed[knob]} for knob in gone - carried)
    made, stays = render(bundle, shell, name, kept), not untouched(old) or lost
    return made if stays else with_remarks(made, old), stays


def _variables(data: bytes, shell: str) -> dict[tuple[str, str], str]:
    """The variable of each `(command, flag)` of a script.

    Raises:
        WangenError: a line cannot be read.
    """
    found = {}
    for command, *words in marked_steps(data, shell):
        for before, word in pairwise(["", *words]):
            flag, mark, knob = word.partition("\0")
            if mark:
                found[command, (flag.rstrip("=") or before).removeprefix("--")] = knob
    return found


def _values(bundle: Bundle, knob: str) -> set[str]:
    """What the steps that have the flag of a knob give it."""
    return {text_of(getattr(step, knob.lower())) for step in bundle.steps if hasattr(step, knob.lower())}


def _knobs(bundle: Bundle, shell: str) -> tuple[list[Knob], dict[tuple[str, str], str]]:
    """As `made_of`; a script for Slurm has the cluster's knobs and leaves the steps' to the script that it runs."""
    return (slurm.knobs(bundle.steps), {}) if shell == slurm.ENDING else made_of(bundle.platform, bundle.steps)


def _check(bundle: Bundle, shell: str) -> None:
    if shell not in quoting.QUOTES:
        raise WangenError(f"no template for the shell {shell}", cure=f"known: {', '.join(quoting.QUOTES)}")
    if not _SLUG.fullmatch(bundle.slug) or not _VERSION.fullmatch(bundle.version) or not bundle.steps:
        raise WangenError("a script needs a slug of a-z, 0-9 and _, a version and steps", where=repr(bundle.slug))


def _smokes(step: Step) -> bool:
    return any(option.name == SMOKE for option in options(type(step)))


def _words(step: Step, variables: Mapping[tuple[str, str], str]) -> Iterator[Word]:
    yield Word(step.command)
    for option in options(type(step)):
        words = option.words(getattr(step, option.name))
        variable = variables.get((step.command, option.name))
        if variable is None:
            yield from map(Word, words)
        elif len(words) == 1:
            yield Word(f"--{option.name}=", variable)
        else:
            yield from (Word(words[0]), Word("", variable))


def _lines(step: Step, shell: str, variables: Mapping[tuple[str, str], str]) -> list[str]:
    quote = quoting.QUOTES[shell]
    between = ", " if shell == "ps1" else " "
    return [between.join(map(quote, group)) for group in quoting.groups(list(_words(step, variables)))]


def _check_line_lengths(text: str, knobs: Mapping[str, str]) -> None:
    # The interpreter's path is not known here; 260 characters are the most that Windows usually allows.
    for line in re.sub(r"\^\n", "", text).split("\n"):
        expanded = re.sub(r"%(\w+)%", lambda m: knobs.get(m[1], " " * _PATH_RESERVE if m[1] == "WG_PY" else m[0]), line)
        length = max(len(line), len(expanded.encode("utf-16-le")) // 2)
        if length > BAT_LINE_LENGTH:
            raise WangenError(
                f"a line of the .bat script would be {length} characters long; cmd reads {BAT_LINE_LENGTH} safely",
                where=line[:80],
                cure="shorten the prompt or the paths, or use the .ps1 script",
            )
