"""`wangen check SLUG`: all that can be known of a published dataset before a GPU starts, for each of its targets.

The check step judges files with explicit paths; here its flags are taken from the published scripts, and what only
the workspace knows is looked at too: whether the scripts are those that publishing would write now, whether their
lines agree with each other and with the table, which paths are another machine's, and the Python environment.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from wangen import profiles
from wangen.generator import scripts
from wangen.generator.bundle import script_names
from wangen.generator.check import examine, without_idle
from wangen.generator.errors import WangenError
from wangen.generator.experts import flag_words
from wangen.generator.interpreter import candidates, faults, installed, wanted_libraries
from wangen.generator.originals import changes, source_of
from wangen.generator.prepare_steps import Preprocess
from wangen.generator.publish.alike import same_pictures
from wangen.generator.publish.plan import BundlePlan, Plan, make_plan
from wangen.generator.publish.source import Source
from wangen.generator.publish.texts import Text, toml_file
from wangen.generator.quoting import QUOTES
from wangen.generator.seen import seen_entry, seen_step
from wangen.generator.steps import Check, Train
from wangen.generator.table import Step, options
from wangen.generator.target import Target
from wangen.generator.tasks import require_supported
from wangen.generator.tomls import read_dataset
from wangen.generator.workspace import Workspace

Level = Literal["ok", "note", "problem"]

_AGREED = (
    "dataset_config", "task", "vae", "t5", "tokenizer", "clip", "vae_dtype", "vae_tile", "t5_dtype", "fp8_t5",
    "clip_dtype", "dit", "dit_high_noise",
)  # fmt: skip
"""Flags that no two lines of one bundle may set to different values."""

_MADE_BY = re.compile(rb"made by wangen ([A-Za-z0-9.+-]+)")


@dataclass(frozen=True)
class Line:
    """One thing that was looked at.

    Attributes:
        level: `problem` makes the check fail; a `note` is worth knowing.
        text: what was found, where, and what to do.
    """

    level: Level
    text: str

    def __str__(self) -> str:
        """The level in a column of its own, and the text."""
        return f"  {self.level:8} {self.text}"


class _Script(NamedTuple):
    """A published script, with its steps as their real parser reads them."""

    name: str
    steps: list[Step]


def is_published(target: Target, slug: str) -> bool:
    """Whether the target has a script or the TOML of this dataset."""
    names = (file for _, file in script_names(target, slug))
    return any(path.is_file() for path in (toml_file(target, slug), *(target.folder / name for name in names)))


def look(workspace: Workspace, target: Target, slug: str) -> Iterator[Line]:
    """Everything about one target's bundle that can be known from here; the working folder must be the bundle's.

    Raises:
        WangenError: the workspace's settings are wrong, or a published file cannot be read.
    """
    settings = workspace.dataset(slug)
    source = source_of(workspace, slug, settings)
    lines, plan = _plan(workspace, target, slug, source)
    yield from lines
    (bundle,) = plan.bundles
    texts = [*bundle.texts, *plan.wheels]
    for text in texts:
        yield from _currency(text, target, slug)
    same = [text.path.name for text in texts if text.state == "same" and not text.knobs]
    if same:
        yield Line("ok", f"up to date: {', '.join(same)}")
    if not settings.footage:
        yield from _media(bundle, source, slug)
    found = []
    for text in bundle.texts:
        shell = text.path.suffix[1:]
        if shell in QUOTES and not text.path.name.startswith("setup") and text.path.is_file():
            found.append(script := _Script(text.path.name, []))
            yield from _flags(script, text.path.read_bytes(), shell)
            yield from _behind(script, text, shell)
    yield from _agreement(found)
    yield from environment(target)
    checks = [step for script in found for step in script.steps if isinstance(step, Check)]
    cuts = [step for script in found for step in script.steps if isinstance(step, Preprocess)]
    if cuts:
        yield from _footage(target, cuts[0])
    if checks:
        trainings = [step for script in found for step in script.steps if isinstance(step, Train)]
        options = without_idle(checks[0], [step for script in found for step in script.steps])
        yield from _files(target, options, trainings[:1], uncut=bool(cuts))


def _plan(workspace: Workspace, target: Target, slug: str, source: Source | None) -> tuple[list[Line], Plan]:
    """What publishing would do, and what forbids it; then what it would do with the scripts alone."""
    settings = workspace.dataset(slug)
    model = workspace.profile(settings.model)
    require_supported(model, "publishing for")
    try:
        return [], make_plan(workspace, [target], slug, model, source, long_paths=True)
    except WangenError as error:
        if source is None and not settings.footage:
            raise
        return [Line("note", f"it could not be published again: {error}")], make_plan(
            workspace, [target], slug, model, None, only_scripts=True
        )


def _footage(target: Target, options: Preprocess) -> Iterator[Line]:
    """Whether the videos are there that the first step cuts."""
    seen = target.reach(str(options.videos))
    if seen is None:
        yield Line("note", f"{options.videos}: another machine's, not seen from here")
    elif not seen.is_dir():
        here = target.is_native or target.root
        yield Line("problem" if here else "note", f"{seen}: the folder of footage is not there; put the videos into it")


def _files(target: Target, options: Check, trainings: Sequence[Train], *, uncut: bool) -> Iterator[Line]:
    """What the check step would find, as far as this host sees the files.

    A path on another machine is named and left alone; so are weights that a bundle for another machine lacks here, and
    a manifest that is not there where a step before this one makes it (`uncut`).
    """
    elsewhere: list[str] = []
    seen = seen_step(target, options, elsewhere)
    try:
        blocks = read_dataset(seen.dataset, options.resolution)
    except WangenError as error:
        yield Line("problem", str(error))
        return
    entries = [entry for block in blocks if (entry := seen_entry(target, block, elsewhere))]
    for path in dict.fromkeys(elsewhere):
        yield Line("note", f"{path}: another machine's, not seen from here")
    if uncut and any(entry.manifest and not entry.manifest.exists() for entry in entries):
        yield Line("note", "the footage is not cut into clips yet: the script's first step does that")
        entries = []
    left_out: dict[str, Any] = {}
    if not target.is_native and not target.root:
        for flag in profiles.WEIGHT_ROLES:
            path = getattr(seen, flag)
            if path and not path.exists():
                words = flag_words(flag, profiles.model(options.task))
                yield Line("note", f"{words}: {path.relative_to(target.folder)} has to lie there on that machine")
                left_out[flag] = None
        left_out["sample_prompts"] = None  # they may name pictures of that machine
        left_out["reads"] = tuple(path for path in seen.reads if path.exists())
        read = (*seen.reads, seen.sample_prompts) if seen.sample_prompts else seen.reads
        for file in (file for file in read if not file.exists()):
            name = file.relative_to(target.folder) if file.is_relative_to(target.folder) else file
            yield Line("note", f"{name} has to lie there on that machine")
    found = examine(replace(seen, **left_out), entries)
    for problem in (*found.warnings, *found.findings):
        yield Line("problem", str(problem))
    for caution in found.cautions:
        yield Line("note", caution)
    for fault in filter(None, map(found.leaves_nothing, trainings if entries else ())):
        yield Line("problem", "; ".join(fault))
    yield Line("note" if found.findings or found.warnings else "ok", f"{found}")


def _currency(text: Text, target: Target, slug: str) -> Iterator[Line]:
    """Whether a script, TOML file or wheel is the one that publishing would write now."""
    name = text.path.relative_to(target.folder).as_posix()
    again = f"publish again: wangen publish {slug}"
    if text.broken:
        yield Line("problem", f"{name}: a knob holds letters, digits and . _ , + - only: {text.broken[0]}")
    elif text.state == "kept":
        beside = (
            f"the new text is {text.target.name}" if text.target.is_file() else "publishing puts its text beside it"
        )
        yield Line("note", f"{name} was edited by hand and stays as it is; {beside}")
    elif text.state == "new":
        yield Line("problem", f"{name} is not there; {again}")
    elif text.state == "changed":
        yield Line("problem", f"{name}: {_other_version(text) or 'not what publishing writes now'}; {again}")
    elif text.knobs:
        mine = ", ".join(f"{knob}={value} (published: {ours})" for knob, (value, ours) in text.knobs.items())
        yield Line("ok", f"{name} is up to date, with your {mine}")


def _other_version(text: Text) -> str:
    """Which other version of wangen made the script on disk, in words; empty when it was this one, or nobody knows."""
    made, here = _MADE_BY.search(text.path.read_bytes()), version("wangen")
    return f"made by wangen {made[1].decode()}, this is {here}" if made and made[1].decode() != here else ""


def _media(bundle: BundlePlan, source: Source | None, slug: str) -> Iterator[Line]:
    """Whether the published media are those of the dataset."""
    if source is None:
        yield Line("note", "the dataset is not on this machine, so that what is published is not compared with it")
        return
    if found := changes(bundle, slug):
        yield Line("note", found)
    if alike := same_pictures(source):
        yield Line("note", alike)
    kept = [name for folder in bundle.folders for name in folder.kept]
    if kept:
        yield Line("note", f"changed in the bundle, so that publishing leaves them: {', '.join(kept[:5])}"
                   + (f" and {len(kept) - 5} more" if len(kept) > 5 else ""))  # fmt: skip
    for name in bundle.left:
        yield Line("note", f"{name}/ of an earlier publish is still there, and no step uses it")


def _flags(script: _Script, data: bytes, shell: str) -> Iterator[Line]:
    """Read every line with the step's own parser; the steps are added to the script."""
    try:
        for command, step in scripts.parsed_steps(data, shell):
            if isinstance(step, WangenError):
                yield Line("problem", f"{script.name}, {command}: {step}")
            else:
                script.steps.append(step)
    except WangenError as error:
        yield Line("problem", f"{script.name}: {error}")


def _behind(script: _Script, text: Text, shell: str) -> Iterator[Line]:
    """What an edited script says otherwise than publishing would write now, which may be its user's wish."""
    if text.state != "kept":
        return
    new = text.data or (text.target.read_bytes() if text.target.is_file() else b"")
    if words := _other_version(text):
        yield Line("note", f"{script.name}: {words}")
    fresh = {command: step for command, step in scripts.parsed_steps(new, shell) if isinstance(step, Step)}
    for step in script.steps:
        now = fresh.get(step.command, step)
        for option in options(type(step)):
            mine, ours = getattr(step, option.name), getattr(now, option.name)
            if mine != ours:
                yield Line("note", f"{script.name}, {step.command}: --{option.name} {mine}; published now: {ours}")


def _agreement(found: Iterable[_Script]) -> Iterator[Line]:
    """Lines that name different files or settings where all have to mean the same."""
    values: dict[str, dict[str, list[str]]] = {}
    for script in found:
        for step in script.steps:
            for name in _AGREED:
                value = getattr(step, name, None)
                if value is not None:
                    values.setdefault(name, {}).setdefault(str(value), []).append(f"{script.name} {step.command}")
    different = {name: given for name, given in values.items() if len(given) > 1}
    for name, given in different.items():
        said = "; ".join(f"{value} in {places[0]}" for value, places in given.items())
        yield Line("problem", f"the steps do not agree on --{name}: {said}; give all of them one value, in both "
                   "scripts")  # fmt: skip
    if values and not different:
        yield Line("ok", "all steps agree on the TOML, the VAE, the text encoder and the transformer")


def environment(target: Target) -> Iterator[Line]:
    """The Python that the scripts of a target would take, and what is installed in it."""
    looked = candidates(target)
    python = next((path for path in looked if path.is_file()), None)
    if python is None:
        places = ", ".join(map(str, looked)) or ", ".join(target.venv)
        level: Level = "problem" if target.is_native else "note"
        yield Line(level, f"no Python environment; looked for {places}; run setup_wangen.{target.platform.shells[0]}")
    elif not target.is_native:
        yield Line("ok", f"Python {python}: another platform's, so that what is in it is not looked at")
    else:
        yield from _packages(python, target.platform.accelerator, target.platform.shells[0])


def _packages(python: Path, accelerator: str, shell: str) -> Iterator[Line]:
    """What an interpreter has of the libraries that the runtime needs."""
    wanted = wanted_libraries()
    try:
        found = installed(python, ("wangen", *(need.name for need in wanted)))
    except WangenError as error:
        yield Line("problem", f"{error.found}; {error.cure}")
        return
    wrong = list(faults(wanted, found, accelerator))
    missing = [fault.missing for fault in wrong if fault.missing]
    if missing:
        yield Line("problem", f"not installed: {', '.join(missing)}; run setup_wangen.{shell}")
    for fault in (fault for fault in wrong if not fault.missing):
        yield Line(fault.level, f"{fault.what}; {fault.cure}")
    if not any(fault.level == "problem" for fault in wrong):
        yield Line(
            "ok", f"Python {python} has wangen {found['wangen']}, torch {found['torch']} and the other libraries"
        )
