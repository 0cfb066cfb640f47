"""The table's command-line reader: a step becomes a click command, its words become a step again.

The way of a value: words or a `--config_file` TOML -> raw values -> `convert` -> the frozen dataclass. Command line
and TOML meet in `build`, so both know the same flags, the same spellings and the same messages.
"""

import inspect
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import click

from wangen.generator.errors import UsageError, did_you_mean, one_of
from wangen.generator.plain_command import PlainCommand
from wangen.generator.step_parts import OTHER_MODELS
from wangen.generator.steps import STEPS
from wangen.generator.table import Option, Step, missing, options, spellings
from wangen.generator.unknown_flags import asks_for_nothing, unknown_flags

log = logging.getLogger("wangen")

S = TypeVar("S", bound=Step)


class StepCommand(PlainCommand):
    """A click command made from the table. Its callback gets the step, not loose values."""

    def __init__(self, step: type[Step], execute: Callable[[Any], int]) -> None:
        help_text = (inspect.getdoc(step) or "").split("\n\n")[0]
        super().__init__(
            step.command,
            params=[parameter for option in options(step) for parameter in _parameters(step, option)],
            help=help_text,
            short_help=help_text,
            context_settings={"token_normalize_func": lambda word: word.replace("-", "_"), "max_content_width": 110},
        )
        self.step = step
        self.execute = execute

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse words; an unknown flag is answered in the table's words."""
        cure = f"wangen {self.step.command} --help lists the flags"
        if args and not args[0].startswith("-"):  # perhaps a path that lacks its flag
            first = next(option.name for option in options(self.step) if option.kind is Path)
            cure = f"for example --{first} {args[0]}; {cure}"
        try:
            if not ctx.resilient_parsing:
                args = _repeat_lists(self.step, args)
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise unknown_flags(self.step, [error.option_name, *self._unknown(args)]) from None
        except click.UsageError as error:
            raise UsageError(error.format_message(), cure=cure) from None

    def _unknown(self, args: Sequence[str]) -> list[str]:
        """Flags that this command does not have, of those that it has without their values."""
        known = {name: parameter for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        found: list[str] = []
        words = takewhile(lambda word: word != "--", args)
        for word in words:
            name, equals, _ = word.partition("=")
            parameter = known.get("--" + name[2:].replace("-", "_"))
            if parameter is None and word.startswith("--") and name != "--help":
                found.append(name)
            elif isinstance(parameter, click.Option) and word.startswith("--") and not (equals or parameter.is_flag):
                for _ in range(parameter.nargs):
                    next(words, None)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        """Build the step from what was given and hand it on."""
        return self.execute(build(self.step, given(self.step, ctx.params)))


def parse(step: type[S], words: Sequence[str]) -> S:
    """The step that these words (without the step's name) describe.

    Raises:
        UsageError: an unknown flag, a wrong or missing value.

    >>> from wangen.generator.steps import CheckCache
    >>> parse(CheckCache, ["--dataset-config", "a.toml"]).dataset_config
    PosixPath('a.toml')
    """
    made: list[S] = []
    command = StepCommand(step, lambda options: made.append(options) or 0)  # type: ignore[func-returns-value]
    with command.make_context(step.command, list(words)) as ctx:
        command.invoke(ctx)
    return made[0]


def given(step: type[Step], params: Mapping[str, Any]) -> dict[str, Any]:
    """What the command line said, by field name; constants (`--sdpa`) become values.

    Raises:
        UsageError: one flag was given two different values through its constants.
    """
    values: dict[str, Any] = {}
    for option in options(step):
        found = {} if params.get(option.name) in (None, ()) else {f"--{option.name}": params[option.name]}
        for name, value in option.flag.constants.items():
            if params.get(f"{option.name}__{name}"):
                found[f"--{name}"] = value
        if len({option.flag.meant(str(value)) for value in found.values()}) > 1:
            raise UsageError(f"{' and '.join(found)} contradict each other", cure="give one of them")
        if found:
            values[option.name] = next(iter(found.values()))
    return values


def build(step: type[Step], values: Mapping[str, Any]) -> Step:
    """The dataclass from raw values, with those of its `config_file` beneath them, and the model profile's undermost.

    Raises:
        UsageError: a wrong value, an unknown key in the file, a required flag missing, or two that say the same.
    """
    made = {option.name: convert(option, values[option.name]) for option in options(step) if option.name in values}
    if made.get("config_file"):
        beneath = _read_config(step, made["config_file"])
        made = on_top(beneath, made, (step.one_of, *step.at_most_one))
    made = _of_profile(step, made) | made
    made = {name: value for name, value in made.items() if value != 0 or name not in step.off_at_zero}
    if lacking := missing(step, made):
        raise UsageError(f"{step.command} needs {', '.join(lacking)}", cure=f"wangen {step.command} --help")
    if len(twice := [name for name in step.one_of if name in made]) > 1:
        where = "" if twice[0] in values else str(made["config_file"])  # what is given takes the place of all there
        raise UsageError(f"{' and '.join(f'--{name}' for name in twice)} contradict each other", where=where,
                         cure="give one of them")  # fmt: skip
    return step(**made)


def on_top(beneath: Mapping[str, Any], values: Mapping[str, Any], groups: Iterable[Sequence[str]]) -> dict[str, Any]:
    """Values over others: they take the place of the same flags, and of those that would contradict them.

    Args:
        beneath: flag -> value.
        values: the same.
        groups: flags of which one alone may be given.

    >>> on_top({"max_train_epochs": 3, "seed": 1}, {"max_train_steps": 9}, [("max_train_epochs", "max_train_steps")])
    {'seed': 1, 'max_train_steps': 9}
    """
    said = {name for group in groups if any(name in values for name in group) for name in group}
    return {name: value for name, value in beneath.items() if name not in said} | dict(values)


def _of_profile(step: type[Step], made: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that the model profile has for the step's flags."""
    if not step.of_profile:
        return {}
    from wangen import profiles

    found = {option.name: option for option in options(step)}
    model = profiles.model(made.get("task", found["task"].default))
    own = model.defaults.get(step.command, {})
    steps = {one.command for one in STEPS}
    if unknown := sorted(model.defaults.keys() - steps) or sorted(own.keys() - found.keys()):
        raise UsageError(f"the model profile {model.name} has defaults of {unknown[0]!r}: no such step or flag",
                         cure=did_you_mean(unknown[0], steps | found.keys(), "take them out of its file"))  # fmt: skip
    return {name: convert(found[name], value) for name, value in own.items()}


def convert(option: Option, raw: Any, where: str = "") -> Any:
    """One raw value (words of the command line, or a TOML value) as the field's type.

    Raises:
        UsageError: the value does not fit; the message names the flag and what it takes.
    """
    if option.length is None:
        return _scalar(option, raw, where)
    items = raw if isinstance(raw, list | tuple) else [raw]
    if not items and option.default:  # no line can say it
        usual = " ".join(map(str, option.default))
        raise UsageError(f"--{option.name} is empty", where=where, cure=f"leave it out for {usual}")
    if option.length and len(items) != option.length:
        raise UsageError(f"--{option.name} takes {option.length} values, got {len(items)}", where=where,
                         cure=f"write {option.length} of them")  # fmt: skip
    return tuple(_scalar(option, item, where) for item in items)


def _parameters(step: type[Step], option: Option) -> list[click.Option]:
    """The click options of one field: the flag with its other names, and one hidden flag per constant."""
    names = [f"--{name}" for name in (option.name, *option.flag.names)]
    if option.kind is bool:
        switch = f"{names[0]}/--no_{option.name}"
        main = click.Option([switch, *names[1:], option.name], default=None, help=_help(step, option))
    else:
        many = option.length == 0
        main = click.Option(
            [*names, option.name],
            help=_help(step, option),
            metavar=_metavar(option),
            multiple=many,
            nargs=option.length or 1,
            default=None,
            shell_complete=_completes(option),
        )
    constants = [
        click.Option([f"--{name}", f"{option.name}__{name}"], is_flag=True, hidden=True)
        for name in option.flag.constants
    ]
    return [main, *constants]


def _completes(option: Option) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    """What a shell proposes for a flag's value: its values, or files."""

    def proposed(_ctx: click.Context, _parameter: click.Parameter, begun: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        if option.kind is Path:
            return [CompletionItem(begun, type="file")]
        return [choice for choice in _offered(option) if choice.startswith(begun)]

    return proposed


def _help(step: type[Step], option: Option) -> str:
    if option.required:
        return f"{option.flag.help}  [required]"
    if option.default in (None, (), "") or option.kind is bool:
        return option.flag.help
    default = " ".join(map(str, option.default)) if isinstance(option.default, tuple) else option.default
    own = ", or the model's own" if option.name in step.of_profile else ""
    return f"{option.flag.help}  [default: {default}{own}]"


def _metavar(option: Option) -> str:
    if option.choices:
        return "|".join(option.choices)
    word = {str: "TEXT", int: "N", float: "X", Path: "PATH"}[option.kind]
    return " ".join([word] * (option.length or 1))


def _repeat_lists(step: type[Step], words: Sequence[str]) -> list[str]:
    """`--lora_weight a b` as people write it -> `--lora_weight a --lora_weight b` as click reads it.

    A list without a value, which a variable that is empty leaves, is left out with a warning.
    """
    lists = {name for name, option, _ in spellings(step) if option.length == 0}
    result: list[str] = []
    current, waits = "", False  # the list that the words belong to, and whether it has none yet
    for word in [*words, "--"]:
        if word.startswith("--"):
            if waits:
                log.warning("%s has no value: it is left out", result.pop())
            name = word[2:].replace("-", "_")
            current = name if name in lists else ""
            waits = bool(current)
            result.append(word)
        else:
            result += [word] if waits or not current else [f"--{current}", word]
            waits = False
    return result[:-1]


def _read_config(step: type[Step], path: Path) -> dict[str, Any]:
    """The values of a `--config_file`. Sections are flattened; keys are flags, known spellings included."""
    from wangen.generator.configs import find_config
    from wangen.generator.tomls import load

    path = find_config(path)
    flat: dict[str, Any] = {}
    for section, content in load(path).items():
        for key, value in (content if isinstance(content, dict) else {section: content}).items():
            if flat.setdefault(key, value) != value:
                raise UsageError(f"{key} stands there twice, as {flat[key]} and {value}", where=str(path),
                                 cure="leave one of them out")  # fmt: skip
    found = from_toml(step, flat, f"{path}, key")
    if "config_file" in found:
        raise UsageError("a configuration names another one", where=str(path), cure="write its keys here")
    return found


def from_toml(step: type[Step], keys: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Flags that stand in a TOML file, by field name; a key is any spelling that the command line takes.

    Args:
        step: whose flags.
        keys: spelling -> raw value.
        where: they stand, for messages; the key follows.

    Raises:
        UsageError: there is no such flag, the value does not fit, or two keys give a flag two values.
    """
    known = {name: (option, constant) for name, option, constant in spellings(step)}
    values: dict[str, Any] = {}
    keys_of: dict[str, str] = {}
    unknown = [
        key
        for key, raw in keys.items()
        if (name := key.replace("-", "_")) not in known and not asks_for_nothing(step, name, raw)
    ]
    if unknown:
        answer = unknown_flags(step, unknown)
        raise UsageError(answer.found, where=f"{where} {', '.join(unknown)}", cure=answer.cure)
    for key, raw in keys.items():
        name, place = key.replace("-", "_"), f"{where} {key}"
        if name not in known:
            continue
        option, constant = known[name]
        if constant is not None and not isinstance(raw, bool):
            raise UsageError(f"--{name} is true or false, got {raw!r}", where=place, cure="write true or false")
        if constant is not None:
            raw = constant if raw else option.flag.constants.get(f"no_{name}")
        if raw is None:  # a constant that is false and has no opposite says nothing
            continue
        value = convert(option, raw, place)
        if values.setdefault(option.name, value) != value:
            raise UsageError(f"{keys_of[option.name]} and {key} contradict each other", where=place,
                             cure="give one of them")  # fmt: skip
        keys_of[option.name] = key
    return values


def _scalar(option: Option, raw: Any, where: str) -> Any:
    if option.kind is bool:
        if isinstance(raw, bool):
            return raw
        raise UsageError(f"--{option.name} is true or false, got {raw!r}", where=where, cure="write true or false")
    if isinstance(raw, bool | dict | list):
        raise UsageError(f"--{option.name} takes one value, got {raw!r}", where=where, cure="write one value")
    text = option.flag.meant(str(raw))
    if option.kind is Path and not text:  # it would be the folder that one happens to be in
        raise UsageError(f"--{option.name} is empty", where=where,
                         cure="give a path" if option.required else "leave it out, or give a path")  # fmt: skip
    if option.kind is Path and re.match(r"~[^/\\]*[/\\]|~$", text):  # no shell has made a folder of it
        raise UsageError(f"--{option.name} {text}: ~ is not known here", where=where,
                         cure="write the folder out, as /home/you/…; one that is called so is ./~…")  # fmt: skip
    if "\0" in text:
        raise UsageError(f"--{option.name} holds a NUL character", where=where, cure="take it out")
    if option.kind is str and not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UsageError(f"--{option.name} is no text in UTF-8", where=where, cure="type it anew")
    refused = OTHER_MODELS if option.flag.model_choices else option.flag.refused
    if text in refused:
        raise UsageError(f"--{option.name} {raw}: {refused[text]}", where=where)
    choices = _choices(option)
    if choices and text not in choices:
        raise UsageError(f"--{option.name} has no value {raw!r}", where=where, cure=one_of(text, _offered(option)))
    try:
        value = option.kind(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError
        return value
    except ValueError:
        word = {int: "a whole number", float: "a number"}[option.kind]
        raise UsageError(f"--{option.name} takes {word}, got {raw!r}", where=where, cure=f"write {word}") from None


def _choices(option: Option) -> tuple[str, ...]:
    """The allowed values; the names of the model profiles are read only when one was given."""
    if not option.flag.model_choices:
        return option.choices
    from wangen import profiles

    return tuple(profiles.model_names())


def _offered(option: Option) -> tuple[str, ...]:
    """The values that are proposed: of the models those that this version does something with."""
    from wangen.generator.tasks import supported

    return tuple(supported()) if option.flag.model_choices else option.choices
