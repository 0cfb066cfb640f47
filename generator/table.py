"""What a step and its flags are; the steps themselves stand in `steps.py`.

A flag is a field of a frozen dataclass. `options` takes a step's fields apart for the readers of the table: the click
command, the script line, the TOML, the docs.

Field types: `str`, `int`, `float`, `bool`, `Path`, a `Literal` of strings, `tuple[str, ...]` (and of float or int,
also of fixed length), each optionally `| None`.
"""

import dataclasses
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal, TypeVar

AnyStep = TypeVar("AnyStep", bound="Step")

REPORT = ".report.json"

SMOKE = "smoke"
"""The folder, below the one that a step is told, which a try writes to."""


@dataclass(frozen=True)
class Flag:
    """What the table knows of a flag beside its type and default.

    Attributes:
        help: one sentence for `--help` and the docs.
        pinned: scripts spell the flag out even at its default, because it changes the result.
        knob: scripts spell the flag out and offer its value, made of `[A-Za-z0-9.,+_-]`, in the block at their top.
        names: other spellings of the flag that take the same value.
        constants: other flags that take no value and stand for one value of this flag (`--sdpa`).
        values: other spellings of a value, in lower case.
        refused: values that other tools accept, with what to do instead.
        model_choices: the value is the name of a model profile.
    """

    help: str
    pinned: bool = False
    knob: bool = False
    names: tuple[str, ...] = ()
    constants: Mapping[str, str] = dataclasses.field(default_factory=dict)
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    model_choices: bool = False

    def meant(self, text: str) -> str:
        """The value that another spelling of it stands for, in any case; every other text as it is.

        >>> Flag("the optimizer", values={"adamw8bit": "AdamW8bit"}).meant("AdamW8Bit")
        'AdamW8bit'
        """
        return self.values.get(text.lower(), text)


def flag(help: str, default: Any = MISSING, **details: Any) -> Any:
    """A dataclass field that is a command-line flag; `details` are the attributes of `Flag`."""
    return field(default=default, metadata={"flag": Flag(help, **details)})


@dataclass(frozen=True, kw_only=True)
class Step:
    """What all steps share. A subclass docstring's first line is the step's help."""

    command: ClassVar[str]
    module: ClassVar[str]
    spellings: ClassVar[tuple[str, ...]] = ()
    elsewhere: ClassVar[Mapping[str, str]] = {}
    one_of: ClassVar[tuple[str, ...]] = ()
    """Flags that say the same thing in different ways: exactly one of them is given."""
    of_profile: ClassVar[tuple[str, ...]] = ()
    """Flags whose default a model profile may set, for its `--task`."""
    off_at_zero: ClassVar[tuple[str, ...]] = ()
    """Flags of which 0 says what they say when they are not given."""
    at_most_one: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of flags that contradict each other: one on the command line wins over the others of a `--config_file`."""

    config_file: Path | None = flag(
        "TOML file holding any of these flags, or, for train, the name of a shipped one; the command line wins", None
    )
    log_file: Path | None = flag("append plain log lines to this file", None)
    report_dir: Path | None = flag("folder for the step's report.json (default: beside what the step makes)", None)
    lock: Path | None = flag("lock file that admits one run at a time", None)

    def argv(self) -> list[str]:
        """The command line that parses back to an equal step: `[command, --flag, value, …]`.

        Values that are empty or begin with a dash are joined to their flag with `=`.

        >>> from wangen.generator.steps import Check
        >>> Check(dataset_config=Path("a.toml"), task="t2v-1.3B").argv()
        ['check', '--dataset_config', 'a.toml', '--resolution', 'all', '--task', 't2v-1.3B']
        """
        words = [self.command]
        for option in options(type(self)):
            words.extend(option.words(getattr(self, option.name)))
        return words

    def effective(self) -> "Step":
        """The step that runs: under `--smoke` a small one that leaves the results of the whole job alone.

        >>> from wangen.generator.steps import Train
        >>> Train(dataset_config=Path("a.toml"), dit=Path("d"), output_dir=Path("outputs"), output_name="cats",
        ...       smoke=True).effective().output_dir.as_posix()
        'outputs/smoke'
        """
        return dataclasses.replace(self, **self._smoke_changes()) if getattr(self, "smoke", False) else self

    @property
    def leads(self) -> bool:
        """Whether this process writes log and report and holds the lock; of several that work together one does."""
        return True

    @property
    def lock_file(self) -> Path | None:
        """The lock that this process holds while it leads."""
        return self.lock

    @property
    def waits(self) -> bool:
        """Whether it waits for another run that holds its lock, and is not refused."""
        return False

    @property
    def report_name(self) -> str:
        """What the file of the step's report is called."""
        return f"{self.command}{REPORT}"

    def _smoke_changes(self) -> dict[str, Any]:
        """The fields that are different under `--smoke`."""
        return {"report_dir": self.report_dir / SMOKE} if self.report_dir else {}


@dataclass(frozen=True)
class Option:
    """One flag of one step as its readers see it: a field with its type taken apart.

    Attributes:
        name: the field's name, which is the flag without its dashes.
        kind: the scalar type: `str`, `int`, `float`, `bool` or `Path`.
        choices: the allowed values; empty for any.
        length: None for a scalar, 0 for any number of values, else the exact number.
        optional: None is allowed.
        default: `dataclasses.MISSING` for a required flag.
        flag: the rest.
    """

    name: str
    kind: type
    choices: tuple[str, ...]
    length: int | None
    optional: bool
    default: Any
    flag: Flag

    @property
    def required(self) -> bool:
        """Whether the step cannot be made without this flag."""
        return self.default is MISSING

    def words(self, value: Any) -> list[str]:
        """The part of a command line that sets this flag to `value`; empty when nothing has to be said."""
        spelled_out = self.flag.pinned or self.flag.knob
        if value is None or (value == self.default and not spelled_out):
            return []
        if self.kind is bool:
            if value:
                return [f"--{self.name}"]
            return [f"--no_{self.name}"] if self.default is True or spelled_out else []
        if self.length is None:
            return joined(self.name, text_of(value))
        if self.length:
            return [f"--{self.name}", *map(text_of, value)]
        return [word for item in value for word in joined(self.name, text_of(item))]


def joined(name: str, value: str) -> list[str]:
    """A flag and its value as one or two words.

    >>> joined("prompt", "a cat"), joined("prompt", "-x")
    (['--prompt', 'a cat'], ['--prompt=-x'])
    """
    return [f"--{name}={value}"] if not value or value.startswith("-") else [f"--{name}", value]


def text_of(value: object) -> str:
    """A scalar as it stands on a command line; floats keep every digit and use no locale, a path is no ~ of a shell.

    >>> text_of(1e-4), text_of(16), text_of(2.0), text_of(PurePath("~"))
    ('0.0001', '16', '2.0', './~')
    """
    if isinstance(value, PurePath) and str(value).startswith("~"):
        return f"./{value}"
    return repr(value) if isinstance(value, float) else str(value)


_OPTIONS: dict[type[Step], tuple[Option, ...]] = {}


def options(step: type[Step]) -> tuple[Option, ...]:
    """The flags of a step in the table's order, the shared ones last.

    Raises:
        TypeError: a field has a type that the table does not know.
    """
    if step not in _OPTIONS:
        fields = [f for f in dataclasses.fields(step) if "flag" in f.metadata]
        shared = {f.name for f in dataclasses.fields(Step)}
        fields.sort(key=lambda f: f.name in shared)
        _OPTIONS[step] = tuple(_option(f) for f in fields)
    return _OPTIONS[step]


def _option(f: "dataclasses.Field[Any]") -> Option:
    annotation: Any = f.type
    optional = False
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        optional = True
        (annotation,) = [a for a in typing.get_args(annotation) if a is not types.NoneType]
    length = None
    if typing.get_origin(annotation) is tuple:
        inner = typing.get_args(annotation)
        length = 0 if inner[-1] is Ellipsis else len(inner)
        annotation = inner[0]
    choices: tuple[str, ...] = ()
    if typing.get_origin(annotation) is Literal:
        choices, annotation = typing.get_args(annotation), str
    if annotation not in (str, int, float, bool, Path):
        raise TypeError(f"field {f.name}: the table knows no type {f.type}")
    return Option(f.name, annotation, choices, length, optional, f.default, f.metadata["flag"])


def missing(step: type[Step], given: Collection[str]) -> list[str]:
    """The flags without which a step cannot be made and which are not among those that are given.

    >>> from wangen.generator.steps import CacheText
    >>> missing(CacheText, []), missing(CacheText, ["manifest", "t5"])
    (['--dataset_config or --manifest', '--t5'], [])
    """
    names = [f"--{option.name}" for option in options(step) if option.required and option.name not in given]
    if step.one_of and not any(name in given for name in step.one_of):
        names.insert(0, " or ".join(f"--{name}" for name in step.one_of))
    return names


def spellings(step: type[Step]) -> Iterator[tuple[str, Option, str | None]]:
    """Every accepted flag of a step: `(name without dashes, option, the constant it stands for or None)`."""
    for option in options(step):
        yield option.name, option, None
        for name in option.flag.names:
            yield name, option, None
        for name, value in option.flag.constants.items():
            yield name, option, value
