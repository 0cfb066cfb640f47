"""The steps of one dataset on one platform, with every value where it belongs.

A flag's value comes from the last of these that names it: the table's default, the model profile, the platform
profile, the accelerator's rule, `[steps.…]` of the workspace, and the paths of the bundle.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from wangen import profiles
from wangen.generator import slurm
from wangen.generator.after_training import after_training, as_trained, read_later, training_of
from wangen.generator.commands import build, on_top
from wangen.generator.dataset import name_fault
from wangen.generator.errors import UsageError
from wangen.generator.footage import CLIPS, cut_footage, seen_from
from wangen.generator.lock import RUN_LOCK
from wangen.generator.memory import PLAIN_MEMORY, memory_of
from wangen.generator.memory_presets import with_preset
from wangen.generator.paths import is_absolute_anywhere
from wangen.generator.prepare_steps import Preprocess
from wangen.generator.refusals import judged
from wangen.generator.resolutions import resolution_name
from wangen.generator.scripts import Bundle
from wangen.generator.step_parts import DEFAULT_EPOCHS
from wangen.generator.steps import (
    CacheLatents,
    CacheStep,
    CacheText,
    Check,
    CheckCache,
    Evaluate,
    Generate,
    MakeReport,
    Train,
)
from wangen.generator.table import Step, options
from wangen.generator.target import Target
from wangen.generator.unread_flags import ENCODE_FIRST
from wangen.generator.workspace import Workspace
from wangen.profiles import Download, Model, Weights

RUN: tuple[type[Step], ...] = (Check, CacheLatents, CacheText, CheckCache, Train)
"""The steps of every training script, in order."""

WHEN_ASKED: tuple[type[Step], ...] = (Generate, Evaluate)
"""Steps that follow where the workspace has a table of theirs, `[steps.evaluate]`; the report comes last."""

CACHE: tuple[type[Step], ...] = (Check, CacheLatents, CacheText, CheckCache)
"""The steps of a caching script, in order; where there is footage it is cut before."""

_OWNERS: tuple[tuple[type[Step], tuple[str, ...]], ...] = (
    (CacheLatents, ("vae", "vae_dtype", "vae_tile", "clip", "clip_dtype")),
    (CacheText, ("t5", "t5_dtype", "fp8_t5", "tokenizer")),
    (Train, ("dit", "dit_high_noise", "task", "output_dir", "output_name", "sample_prompts")),
)
"""What one step is told and others have to know."""

ENCODING = frozenset({"vae", "vae_dtype", "vae_cache_cpu", "clip", "t5", "t5_dtype", "fp8_t5", "tokenizer"})
"""Flags with which training encodes; a script's line has them where the steps before it have not encoded all."""

_DECODING = frozenset({"vae", "vae_dtype", "vae_cache_cpu"})

PROMPTS = "prompts"
"""The folder below `files` where sample prompts are published."""

AUTO = "auto"

DTYPES: Mapping[str, Mapping[str, Any]] = {
    "cuda": {"vae_dtype": "float16", "t5_dtype": "bfloat16", "clip_dtype": "float16", "num_workers": 4},
    "rocm": {"vae_dtype": "float32", "t5_dtype": "bfloat16", "clip_dtype": "float16", "num_workers": 1},
    "cpu": {"vae_dtype": "float32", "t5_dtype": "float32", "clip_dtype": "float32", "num_workers": 4},
}
"""By accelerator how the encoders work, where no profile says otherwise; as `devices` chooses for itself on cards from
compute capability 7 on (RTX 20). On older ones, which compute float16 slowly, it would take float32."""


def toml_name(slug: str, target: Target) -> str:
    """The file name of a dataset's TOML on a platform."""
    return f"{slug}_{target.platform.suffix}.toml"


def told_of_training(workspace: Workspace, target: Target, model: Model) -> dict[str, Any]:
    """What the profiles and the workspace say of training: flag -> value."""
    found: dict[str, Any] = {}
    for layer in _layers(workspace, target, model):
        found = on_top(found, _layer(layer, Train), Train.at_most_one)
    return found


def needed_weights(workspace: Workspace, target: Target, model: Model) -> list[Weights]:
    """The weight files that a bundle needs: of two experts one alone where `experts` says so."""
    chosen = told_of_training(workspace, target, model).get("experts")
    left_out = {"low": "dit_high_noise", "high": "dit"}.get(str(chosen))
    return [weights for weights in model.weights if not (model.experts and weights.flag == left_out)]


def unread(told: Mapping[str, Any]) -> frozenset[str]:
    """Flags of `ENCODING` that training with these others does not read: the steps before it have encoded all.

    >>> sorted(unread({"sample_continuations": 2})), sorted(unread({"cache_mode": "realtime"}))
    (['clip', 'fp8_t5', 't5', 't5_dtype', 'tokenizer'], [])
    """
    encodes = told.get("cache_mode", Train.cache_mode) != Train.cache_mode
    if encodes or any(told.get(name) for name in ("sample_prompts", *ENCODE_FIRST)):
        return frozenset()
    return ENCODING - _DECODING if "sample_continuations" in told else ENCODING


def prompts_file(workspace: Workspace, target: Target, model: Model) -> Path | None:
    """The file in the workspace that `sample_prompts` names; None without one, and for an absolute path, which is the
    target's own.
    """
    told: Any = told_of_training(workspace, target, model).get("sample_prompts")
    path = str(told) if told else ""
    if not path or is_absolute_anywhere(path):
        return None
    return workspace.folder / path


def prompts_name(slug: str, target: Target, file: Path) -> str:
    """The file name of a dataset's sample prompts on a platform, which have the ending of the workspace's file."""
    return f"{slug}_{target.platform.suffix}{file.suffix.lower()}"


def bundle_steps(workspace: Workspace, target: Target, model: Model, slug: str) -> tuple[Step, ...]:
    """Every step of the training script, its paths as the target writes them.

    Args:
        workspace: has the user's defaults, and how the dataset is published.
        target: where the scripts run.
        model: what is trained.
        slug: the dataset.

    Raises:
        WangenError: the workspace says of a step what cannot be.
    """
    workspace, settings = workspace.fitted(slug), workspace.dataset(slug)
    sizes = settings.sizes(model)
    paths = {**_paths(workspace, target, model, slug), "resolution": ",".join(map(resolution_name, sizes))}
    if prompts := prompts_file(workspace, target, model):
        paths["sample_prompts"] = target.path("files", PROMPTS, prompts_name(slug, target, prompts))
    asked = [kind for kind in WHEN_ASKED if kind.command in workspace.steps]
    last = [MakeReport] if workspace.report else []
    steps = tuple(_step(kind, workspace, target, model, paths) for kind in (*RUN, *asked, *last))
    if not settings.footage:
        return steps
    cut = cut_footage(settings.footage, workspace, target, model, sizes)
    places = {"output": target.path(target.roots["datasets"], slug, CLIPS)}
    return (_step(Preprocess, workspace, target, model, {**paths, **cut, **places}), *steps)


def script_bundles(target: Target, slug: str, steps: tuple[Step, ...]) -> dict[str, Bundle]:
    """What the scripts of a dataset run, by the first word of their names: `train` and `cache`.

    The first does not cache where none of its steps reads it: training with `--cache_mode realtime`.
    """
    caching = tuple(step for step in steps if isinstance(step, (Preprocess, *CACHE)))
    if not _reads_cache(steps):
        steps = tuple(step for step in steps if not isinstance(step, CacheStep | CheckCache))
    return {
        name: Bundle(
            platform=target.platform,
            slug=slug,
            root=target.root,
            venv=target.venv,
            steps=chosen,
            version=version("wangen"),
        )
        for name, chosen in (("train", steps), ("cache", caching))
    }


def _reads_cache(steps: Iterable[Step]) -> bool:
    """Whether a step reads what the caching steps before it make."""
    return any(
        isinstance(step, Evaluate) or (isinstance(step, Train) and step.cache_mode != "realtime") for step in steps
    )


def script_names(target: Target, slug: str) -> list[tuple[str, str]]:
    """The run scripts of a dataset: the name of the bundle of steps, and the file's name."""
    shells = [(name, shell) for name in ("train", "cache") for shell in target.platform.shells]
    if target.platform.kind == "slurm":
        shells.append(("train", slurm.ENDING))
    return [(name, f"{name}_{slug}.{shell}") for name, shell in shells]


def models_folder(target: Target) -> Path | None:
    """The models folder of a target as this host sees it, or None when it does not."""
    return target.reach(target.path(target.roots["models"]))


def models_below(target: Target) -> list[PurePosixPath]:
    """Every file below the models folder of a target, as `find_weights` takes them; none where it is not seen."""
    folder = models_folder(target)
    return list(files_below(folder)) if folder else []


def find_weights(target: Target, weights: Weights, found: Sequence[PurePosixPath] | None = None) -> str:
    """A weight file as the target writes it: the configured one, the first that is found, or where a download puts it.

    One that is configured without a folder may lie in any folder below that for models.
    A file is found by the end of its path; of several that are called so, it is the largest, which has lost least to
    quantising. Where a longer name of another weight file fits too, it is that one:
    `low_noise_model/diffusion_pytorch_model-00001-of-00006.safetensors` is an expert of Wan 2.2, in whatever folder,
    and not the transformer of Wan 2.1 whose shards are called the same; in a folder `Wan2.2-I2V-A14B` it is that
    model's expert.
    """
    models = target.roots["models"]
    found = models_below(target) if found is None else found
    folder = models_folder(target) or Path()

    def best(paths: Iterable[PurePosixPath]) -> str:
        return target.path(models, *max(paths, key=lambda path: _num_bytes(folder / path)).parts)

    if named := target.weights.get(weights.flag):
        below = [path for path in found if path.name == named]
        return best(below) if below and PurePosixPath(named) not in below else target.path(models, named)
    elsewhere = _all_names() - _names(weights)
    for name in weights.files:
        longer = {other for other in elsewhere if other.endswith(f"/{name}")}
        called = [path for path in found if is_called(path, name)]
        ours = [path for path in called if not any(is_called(path, other) for other in longer)]
        if ours:
            return best(ours)
    place = place_of(weights.downloads[0]) if weights.downloads else PurePosixPath(weights.files[0])
    return target.path(models, *place.parts)


def place_of(download: Download) -> PurePosixPath:
    """Where a downloaded file belongs, below the models folder: where `find_weights` finds it.

    That is directly there, as `publish` says it; but files that are called the same in many repositories stay in the
    folders that they have there, below one with the repository's name.
    """
    path = PurePosixPath(download.path)
    common = path.name.startswith(("diffusion_pytorch_model", "model.", "model-"))
    return PurePosixPath(PurePosixPath(download.repo).name, path) if common else PurePosixPath(path.name)


def files_below(folder: Path) -> Iterator[PurePosixPath]:
    """Every file below a folder, relative to it, in the order of names; folders that are links are followed once.

    Links that lead to no file are left out.
    """
    seen = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        status = Path(place).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders.sort()
        for path in sorted(Path(place, name) for name in files):
            if path.is_file():
                yield PurePosixPath(path.relative_to(folder).as_posix())


def is_called(path: PurePosixPath, name: str) -> bool:
    """Whether a path ends in a name, in which `*` stands for any part of a file's or folder's name.

    >>> is_called(PurePosixPath("a/b/wan-Q8_0.gguf"), "b/wan-*.gguf"), is_called(PurePosixPath("x-wan.pth"), "wan.pth")
    (True, False)
    """
    return _end(name).search(str(path)) is not None


@cache
def _end(name: str) -> re.Pattern[str]:
    return re.compile("(?:^|/)" + re.escape(name).replace(r"\*", "[^/]*") + "$")


def _num_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _names(weights: Weights) -> frozenset[str]:
    """The names of a weight file, also with the folder of each repository that has files in such a place."""
    repos = {
        f"{PurePosixPath(download.repo).name}/{name}"
        for download in weights.downloads
        for name in weights.files
        if PurePosixPath(name).parent == PurePosixPath(download.path).parent
    }
    return frozenset(repos.union(weights.files))


@cache
def _all_names() -> frozenset[str]:
    """The names of the weight files of all models."""
    models = map(profiles.model, profiles.model_names())
    return frozenset(name for model in models for weights in model.weights for name in _names(weights))


def _paths(workspace: Workspace, target: Target, model: Model, slug: str) -> dict[str, str]:
    """Values of the flags that are paths; a step takes those it has."""
    outputs, found = target.roots["outputs"], models_below(target)
    told = told_of_training(workspace, target, model)
    return {
        "dataset_config": target.path("files", "tomls", toml_name(slug, target)),
        "output_dir": target.path(outputs, slug),
        "output_name": slug,
        "report_dir": str(told.get("output_dir", target.path(outputs, slug))),
        "log_file": target.path(target.roots["logs"], f"{slug}.log"),
        "lock": target.path(outputs, slug, RUN_LOCK),
        "task": model.name,
        **{weights.flag: find_weights(target, weights, found) for weights in needed_weights(workspace, target, model)},
    }


def _step(kind: type[Step], workspace: Workspace, target: Target, model: Model, paths: Mapping[str, str]) -> Step:
    layers = _layers(workspace, target, model)
    values: dict[str, Any] = {**DTYPES[target.platform.accelerator], **paths}
    if "clip" not in paths:
        del values["clip_dtype"]
    if kind is Preprocess:  # its own default counts the cores there
        del values["num_workers"]
    if target.platform.kind == "slurm" and kind in (Check, CheckCache):
        del values["lock"]  # they change nothing, and would end the jobs of a chain that they meet
    for layer in layers:  # check and check_cache must judge what the other steps use
        for owner, names in _OWNERS:
            values |= {name: value for name, value in _layer(layer, owner).items() if name in names}
    if kind is Check:
        after = [workspace.steps.get(asked.command, {}) for asked in WHEN_ASKED]
        values["reads"] = read_later({**told_of_training(workspace, target, model), **paths}, after)
    if kind in WHEN_ASKED:
        told = told_of_training(workspace, target, model)
        held = {**_memory(model, told, paths), **told}
        values |= after_training(kind, workspace.steps[kind.command], held, model, paths, target)
        form = as_trained(model, workspace.dataset(paths["output_name"]).sizes(model))
        layers = (layers[0], {kind.command: form}, *layers[1:])  # it is the model's own that it takes the place of
    if kind is Train:
        told = told_of_training(workspace, target, model)
        values = {name: value for name, value in values.items() if name not in unread(told)}
        values |= _memory(model, told, paths)
    for layer in layers:
        values = on_top(values, _layer(layer, kind), kind.at_most_one)
    if "sample_prompts" in paths:
        values["sample_prompts"] = paths["sample_prompts"]
    if kind is Preprocess and "labels" in values:
        values["labels"] = seen_from(PurePath(values["labels"]).as_posix(), target, workspace)
    if values.get("vram") != AUTO:  # what it stands for is spelled out
        values.pop("vram", None)
    if kind is Train and not values.keys() & {"max_train_epochs", "max_train_steps"}:
        values["max_train_epochs"] = DEFAULT_EPOCHS
    if kind is Train and target.platform.kind == "windows":
        name = str(values["output_name"])
        if fault := name_fault(name):
            raise UsageError(f"--output_name {name!r}: {fault}", cure="give another one")
    known = {option.name for option in options(kind)}
    step = judged(build(kind, {name: value for name, value in values.items() if name in known}))
    return posix_paths(step) if os.name == "nt" and target.platform.kind != "windows" else step


def _layers(workspace: Workspace, target: Target, model: Model) -> tuple[Mapping[str, Mapping[str, Any]], ...]:
    """What says something of steps, by step and flag; the model's own first, what later ones say wins."""
    return model.defaults, target.platform.overrides, workspace.steps


def _memory(model: Model, told: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, Any]:
    """The flags of training that decide its memory, as `--vram` chooses them; with `auto` they are left to the card."""
    vram = told.get("vram")
    if vram in (None, AUTO):
        return {} if vram else dict(PLAIN_MEMORY)
    return memory_of(with_preset(training_of(told, paths), model, str(vram)))


def posix_paths(step: Step) -> Step:
    r"""The step with forward slashes in its paths, which a Windows host would write as `\` into a Linux script."""
    changed: dict[str, Any] = {}
    for option in options(type(step)):
        value = getattr(step, option.name)
        if isinstance(value, PurePath):
            changed[option.name] = PurePosixPath(value.as_posix())
        elif isinstance(value, tuple) and option.kind is Path:
            changed[option.name] = tuple(PurePosixPath(path.as_posix()) for path in value)
    return replace(step, **changed)


def _layer(layers: Mapping[str, Mapping[str, Any]], kind: type[Step]) -> dict[str, Any]:
    return dict(layers.get(kind.command, {}))
