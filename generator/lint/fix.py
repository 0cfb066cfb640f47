"""`wangen lint --fix`: the bundle of wangen that does the job of an existing script, written beside it.

The values come from the script's own flags and go through the table of steps, so that they are checked; what this
version of wangen has no place for is listed and left out. The script itself, and the TOML it names, stay as they are.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from wangen import profiles
from wangen.generator import commands, scripts
from wangen.generator.bundle import DTYPES, posix_paths, unread
from wangen.generator.errors import WangenError, write_cure
from wangen.generator.files import write_whole
from wangen.generator.lint import toml_fix
from wangen.generator.lint.script import HERE, MORE, UNKNOWN, Call, Given, Script, quoted
from wangen.generator.lint.toml import locate
from wangen.generator.lint.tools import torn_values
from wangen.generator.lint.translate import training_values
from wangen.generator.lock import RUN_LOCK
from wangen.generator.paths import slugify
from wangen.generator.publish.texts import script_text, setup_text
from wangen.generator.refusals import judged
from wangen.generator.setup.wheel import write_wheel
from wangen.generator.steps import CacheLatents, CacheText, Check, CheckCache, Generate, Train
from wangen.generator.table import Option, Step, missing, options, spellings
from wangen.generator.tasks import require_supported
from wangen.generator.unknown_flags import unknown_flag

_ORDER: tuple[type[Step], ...] = (Check, CacheLatents, CacheText, CheckCache, Train, Generate)
_SHARED = (
    *("dataset_config", "vae", "vae_dtype", "vae_tile", "t5", "t5_dtype", "fp8_t5", "tokenizer", "clip", "dit"),
    *("dit_high_noise", "task", "output_dir"),
)
"""What one step of the script is told and others of the bundle need as well."""
_RUN_FILES = ("output_name", "output_dir", "report_dir", "log_file", "lock")


@dataclass
class Fixed:
    """What `fix` did.

    Attributes:
        written: files that were written, by name.
        kept: scripts of that name that the user wrote or changed; the new text lies beside them as `.new`.
        changed: what a corrected TOML says instead, and values that were taken as wholes.
        left_out: what the bundle does not do, in words.
        scripts: the scripts that were made.
    """

    written: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    scripts: list[Path] = field(default_factory=list)


def fix(script: Script) -> Fixed:
    """Write a bundle for each training of a script, or for its caching when it does not train.

    Raises:
        WangenError: a path is set only when the script runs, the task or the TOML is not in this version, no training
            can have its flags, or a file cannot be written.
    """
    result = Fixed()
    trainings: list[Call | None] = [*script.steps("train")] or [None]
    made = [_bundle(script, training, result) for training in trainings]
    slugs: set[str] = set()
    for name, slug, steps in made:
        while slug in slugs or (script.path.parent / f"{name}_{slug}.{script.shell}") == script.path:
            slug += "_wangen"
        slugs.add(slug)
        _write(script, name, slug, steps, result)
    result.left_out = list(dict.fromkeys(result.left_out))
    return result


def _write(script: Script, name: str, slug: str, steps: tuple[Step, ...], result: Fixed) -> None:
    """Write the run script, and what it names when the machine has no wangen: the setup script and wangen's wheel."""
    platform = profiles.platform(_platform(script, steps))
    bundle = scripts.Bundle(platform=platform, slug=slug, root=None, venv=_venv(script, platform.venv), steps=steps,
                            version=version("wangen"))  # fmt: skip
    folder = script.path.parent
    run = script_text(folder / f"{name}_{slug}.{script.shell}", bundle, name)
    texts = [run, setup_text(folder, platform, None, bundle.venv, script.shell)]
    for text in texts:
        if text.stuck:
            raise WangenError(f"{text.path.name} and {text.target.name} were edited by hand", where=str(folder),
                              cure=f"move {text.target.name} away, then run lint --fix again")  # fmt: skip
    try:
        for text in texts:
            if text.data:
                write_whole(text.target, [text.data], mode=text.mode)
        wheel = write_wheel(folder / "files").relative_to(folder).as_posix()
    except OSError as error:
        raise WangenError(f"cannot write the script: {error.strerror}", where=str(error.filename or run.path),
                          cure=write_cure(error)) from None  # fmt: skip
    result.scripts.append(run.target)
    kept = [text.path.name for text in texts if text.state == "kept"]
    result.kept += [made for made in kept if made not in result.kept]
    written = [*(text.path.name for text in texts if text.state != "kept"), wheel]
    result.written += [made for made in written if made not in result.written]


def _platform(script: Script, steps: Iterable[Step]) -> str:
    if script.shell != "sh":
        return "windows"
    words = [word for step in steps for word in step.argv()]
    return "wsl" if any(re.match(r"/mnt/[a-z]/", word) for word in words) else "linux"


def _venv(script: Script, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Where the bundle looks for Python: the script's environment when wangen runs in it already."""
    own = next((call for call in script.calls if call.tool == "wangen" and call.venv), None)
    if own is None or UNKNOWN in own.venv or own.venv.startswith("conda:"):
        return usual
    return tuple(dict.fromkeys((_from_folder(own, own.venv), *usual)))


def _bundle(script: Script, training: Call | None, result: Fixed) -> tuple[str, str, tuple[Step, ...]]:
    """The name, the slug and the steps of one bundle."""
    toml = training.value("dataset_config") if training else None
    calls: dict[type[Step], Call] = {}
    for kind in _ORDER:
        found = [call for call in script.steps(kind.command) if call.name != "train" or call is training]
        same = [call for call in found if call.value("dataset_config") == toml]
        if found:
            calls[kind] = (same or found)[0]
    values = {kind: _values(script, call, result) for kind, call in calls.items()}
    shared = _shared(values)
    whole = {kind for kind, call in calls.items() if call.tool == "wangen"}
    mended = _dataset(script, [*([training] if training else []), *calls.values()], result)
    for kind in values:
        values[kind] |= mended
    shared |= mended
    slug = _slug(script, values.get(Train, {}).get("output_name"))
    shared = {**_usual(script, slug, shared), **shared}
    name = "train" if training else "cache"
    steps = []
    for kind in _ORDER:
        step = _step(kind, values, _run_files(shared) if kind in whole else shared, result)
        if step is not None and not (kind is Train and training is None):
            steps.append(step if kind in whole else judged(step, has_weights=False))
    return name, slug, tuple(steps)


def _values(script: Script, call: Call, result: Fixed) -> dict[str, Any]:
    """The raw values of a call in the terms of wangen's table."""
    known = {name: (option, constant) for name, option, constant in spellings(call.step)}
    if unread_word := next((word for word in call.args if MORE in word.text and word.raw), None):
        raise WangenError(f"what {unread_word.raw} stands for is known only when the script runs",
                          where=f"{script.path.name}:{unread_word.line}",
                          cure="write its words in full in the script, then run lint --fix again")  # fmt: skip
    _mend_torn(call, result)
    found: dict[str, Any] = {}
    if call.tool != "wangen" and call.step is Train:
        found = training_values(call, result.changed.append, result.left_out.append)
    for fault in call.faults:
        if fault.unknown:
            answer = unknown_flag(call.step, fault.unknown)
            result.left_out.append(f"line {fault.line}: {fault.unknown}: {answer.cure or answer.found}")
    for flag in call.flags:
        entry = known.get(flag.name)
        if entry is None:
            answer = unknown_flag(call.step, flag.name)
            result.left_out.append(f"line {flag.line}: {flag.spelled}: {answer.cure or answer.found}")
            continue
        option, constant = entry
        raw = constant if constant is not None else _raw(call, option, flag)
        try:
            value = commands.convert(option, raw)
            if option.flag.model_choices:
                require_supported(profiles.model(value), "training")
        except WangenError as error:
            if option.flag.model_choices:
                where = f"{script.path.name}:{flag.line}"
                raise WangenError(error.found, where=where, cure=error.cure) from None
            result.left_out.append(f"line {flag.line}: {error.found}{'; ' + error.cure if error.cure else ''}")
            found.pop(option.name, None)
            if option.name == "timestep_sampling" and not call.given("discrete_flow_shift"):
                found.pop("discrete_flow_shift", None)  # that of another mode
            continue
        again = call.tool == "wangen" and option.length == 0  # wangen collects, musubi-tuner takes the last
        found[option.name] = [*found.get(option.name, []), *raw] if again else raw
    return found


def _mend_torn(call: Call, result: Fixed) -> None:
    """Take values that the shell parted at their blanks as wholes, and name the words that are left over."""
    for torn in torn_values(call):
        for place, flag in enumerate(call.flags):
            last = flag.values[-1] if flag.values else None
            joined = last is not None and torn.first.text == f"{flag.spelled}={last.text}"
            if last is None or flag.line != torn.first.line or not (last is torn.first or joined):
                continue
            whole = torn.whole()
            whole = replace(whole, text=whole.text.removeprefix(f"{flag.spelled}=")) if joined else whole
            call.flags[place] = replace(flag, values=(*flag.values[:-1], whole))
            call.stray = [word for word in call.stray if not any(word is part for part in torn.rest)]
            result.changed.append(f"line {flag.line}: {flag.spelled} is the whole {quoted(whole.text)}, which stood "
                                  "there without quotes")  # fmt: skip
            break
    for word in call.stray:
        if UNKNOWN not in word.text:
            result.left_out.append(f"line {word.line}: '{word.text}' belongs to no flag")


def _raw(call: Call, option: Option, flag: Given) -> Any:
    """The value of one flag as `commands.convert` takes it; paths start at the script's folder."""
    if option.kind is bool:
        return not (flag.values and flag.values[0].text == "no")
    if any(UNKNOWN in word.text or word.undefined for word in flag.values):
        raise WangenError(f"the value of {flag.spelled} is known only when the script runs", where=f"line {flag.line}",
                          cure="write it in full in the script, then run lint --fix again")  # fmt: skip
    lost = next((lost for word in flag.values for lost in word.lost if lost != "continued"), "")
    if lost:
        raise WangenError(f"the shell takes {lost} out of the value of {flag.spelled}", where=f"line {flag.line}",
                          cure="mend the script as lint says, then run lint --fix again")  # fmt: skip
    texts = [word.text for word in flag.values]
    if option.kind is Path:
        texts = [_from_folder(call, text) for text in texts]
    return texts if option.length is not None else texts[0] if texts else ""


def _from_folder(call: Call, text: str) -> str:
    r"""A path of a call as it is written from the script's folder: `HERE\x` is `x`; `x` below a `cd` moves along."""
    if text.startswith("~"):
        raise WangenError("~ means another folder for every user", where=text, cure="write the path in full")
    absolute = re.match(r"[A-Za-z]:|[\\/]", text) is not None
    if not absolute and not text.startswith(HERE) and call.cwd:
        if UNKNOWN in call.cwd or call.cwd.startswith("~"):
            raise WangenError("the folder of this relative path is known only when the script runs", where=text,
                              cure="write the path in full in the script")  # fmt: skip
        text = f"{call.cwd.rstrip('/' + chr(92))}/{text}"
        text = text if "\\" not in text else text.replace("/", "\\")
    text = re.sub(rf"^(?:{HERE}[\\/]*(?:\.(?=$|[\\/]))?[\\/]*)+", "", text)
    bare = text.rstrip("\\/")
    return bare + "\\" if re.fullmatch("[A-Za-z]:", bare) else bare or ("/" if text else ".")


def _shared(values: Mapping[type[Step], Mapping[str, Any]]) -> dict[str, Any]:
    """What other steps are told, for the steps that are not told it: caching first, then training."""
    found: dict[str, Any] = {}
    kinds: tuple[type[Step], ...] = (CacheLatents, CacheText, Train, Check, CheckCache, Generate)
    for kind in kinds:
        for name in _SHARED:
            if name in values.get(kind, {}):
                found.setdefault(name, values[kind][name])
    if "task" in found:
        roles = {weights.flag for weights in profiles.model(found["task"]).weights}
        found = {name: value for name, value in found.items() if name in roles or name not in profiles.WEIGHT_ROLES}
    return found


def _usual(script: Script, slug: str, shared: Mapping[str, Any]) -> dict[str, Any]:
    """What `wangen publish` tells every step: the folder of the run, its log, its lock, the precision on CUDA."""
    separator = "/" if script.shell == "sh" else "\\"
    folder = str(shared.get("output_dir", separator.join(("outputs", slug))))
    return {
        "output_name": slug,
        "output_dir": folder,
        "report_dir": folder,
        "log_file": separator.join(("logs", f"{slug}.log")),
        "lock": _inside(folder, RUN_LOCK),
        "vae_dtype": DTYPES["cuda"]["vae_dtype"],
        "t5_dtype": DTYPES["cuda"]["t5_dtype"],
    }


def _run_files(shared: Mapping[str, Any]) -> dict[str, Any]:
    return {name: shared[name] for name in _RUN_FILES}


def _dataset(script: Script, calls: Iterable[Call], result: Fixed) -> dict[str, Any]:
    """The dataset TOML: the script's own, or a mended copy beside it."""
    for call in calls:
        flag = call.given("dataset_config")
        if flag is None or not flag.values:
            continue
        text = flag.values[0].text
        path = locate(script, call, text)
        if path is None:
            result.left_out.append(f"line {flag.line}: the TOML cannot be seen from here, and was not looked at")
            return {}
        copy = toml_fix.mend(script, call, path)
        if copy is None:
            return {}
        (result.kept if copy.kept else result.written).append(copy.path.name)
        result.changed += copy.changes
        folder = re.sub(r"[^\\/]*$", "", _from_folder(call, text))
        name = folder + copy.path.name
        if locate(script, call, name) is None:  # the folder that the script changes to is another machine's
            result.left_out.append(f"putting {copy.path.name} to {folder}, where the new script looks for it")
        return {"dataset_config": name}
    return {}


def _slug(script: Script, name: object) -> str:
    for text in (name, script.path.stem):
        try:
            return slugify(str(text)) if text else slugify(script.path.stem)
        except WangenError:
            continue
    return "lora"


def _step(
    kind: type[Step], values: Mapping[type[Step], Mapping[str, Any]], shared: Mapping[str, Any], result: Fixed
) -> Step | None:
    """One step of the bundle; None when the script says too little for it."""
    known = {option.name for option in options(kind)}
    wanted = {name: value for name, value in shared.items() if name in known}
    wanted |= {name: value for name, value in values.get(kind, {}).items() if name in known}
    if kind is Train:
        left_off = unread(wanted)
        wanted = {name: value for name, value in wanted.items() if name not in left_off}
    lacking = [words.removeprefix("--") for words in missing(kind, wanted)]
    if kind is Generate and kind not in values:
        return None
    if lacking:
        if kind in values or kind in (CacheLatents, CacheText):
            result.left_out.append(f"{kind.command} is left out: the script names no {' and no '.join(lacking)}")
        return None
    return posix_paths(commands.build(kind, wanted))


def _inside(folder: str, name: str) -> str:
    return f"{folder}\\{name}" if "\\" in folder else f"{folder}/{name}"
