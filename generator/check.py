"""All that can be known before a GPU starts: files, captions, weights, disk. Lists everything that is wrong at once."""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path, PurePosixPath

from wangen import profiles
from wangen.generator import experts, kinds
from wangen.generator.bundle import is_called
from wangen.generator.cache_sizes import Encoding, Texts, cached_bytes, encoding_of, sample_bytes
from wangen.generator.cautions import clip_cautions
from wangen.generator.dataset import MediaFacts, media_of, read_facts
from wangen.generator.edit_tasks import task_warning
from wangen.generator.errors import WangenError, many
from wangen.generator.files import full_disks, nearest_existing
from wangen.generator.finding import Finding
from wangen.generator.geometry import clip_frames, windows
from wangen.generator.items import misfits, read_items
from wangen.generator.lock import IN_SCRIPT
from wangen.generator.own_script import Placed, read_own_script
from wangen.generator.paths import is_foreign
from wangen.generator.publish import manifest
from wangen.generator.sample_prompts import read_prompts
from wangen.generator.session import Report
from wangen.generator.steps import CacheStep, Check, Train
from wangen.generator.table import Step
from wangen.generator.target import host_platform_name, machine_of
from wangen.generator.tokenizer_file import tokenizer_of
from wangen.generator.tomls import DatasetEntry, read_dataset
from wangen.generator.vae_twins import twin_warning
from wangen.profiles import Weights

log = logging.getLogger("wangen")

_NUM_NAMES = 3

UNSAID = Encoding(vae_dtype="float32", clip_dtype="float32")
"""How the cache is made where the caching steps leave that to the machine, at most."""

MUCH = 64 << 20
"""Bytes that are still to be cached, beside which the seconds that torch needs to load are nothing."""


def run(options: Check) -> Report:
    """Look at everything the other steps will need and list what is wrong.

    Raises:
        WangenError: the dataset TOML itself cannot be read.
    """
    entries = read_dataset(options.dataset, options.resolution)
    script = read_own_script()
    steps = script.steps
    seen = examine(without_idle(options, [step for _, step in steps]), entries, [step for _, step in steps])
    findings = [*script.findings, *_refused(steps, seen), *seen.findings]
    will_cache = any(isinstance(step, CacheStep) for _, step in steps)
    takes_long = sum(seen.to_cache.values()) > MUCH or any(_is_empty(entry.cache_directory) for entry in entries)
    if will_cache and not findings and takes_long:
        findings += _refused_later(steps, seen)
    for finding in findings:
        log.error("  - %s", finding)
    for warning in filter(None, (*script.warnings, *seen.warnings, *seen.cautions, _changes_since())):
        log.warning("  %s", warning)
    verdict = many(len(findings), "problem") if findings else "all good"
    return Report(
        folder=options.output_dir or options.dataset.parent,
        summary=f"{verdict}: {seen}",
        inputs={"dataset_config": options.dataset},
        counts={"images": seen.num_images, "clips": seen.num_clips, "problems": len(findings)},
        result={"problems": [str(finding) for finding in findings]},
        ok=not findings,
    )


def _changes_since() -> str:
    """That the dataset has changed since the script that runs this step was published, if it lies in its workspace."""
    if IN_SCRIPT not in os.environ:
        return ""
    from wangen.generator.originals import changes_since

    return changes_since(Path(os.environ[IN_SCRIPT]))


def without_idle(options: Check, steps: Iterable[Step | WangenError]) -> Check:
    """The options without the weights of an expert that no step of the script works with, as its knob EXPERTS says."""
    used = [step for step in steps if not isinstance(step, Check) and hasattr(step, "dit_high_noise")]
    trained = {step.experts if isinstance(step, Train) else "both" for step in used}
    if trained == {"low"}:
        return replace(options, dit_high_noise=None)
    return replace(options, dit=None) if trained == {"high"} else options


def _refused(steps: Iterable[Placed], seen: "Examined") -> Iterator[Finding]:
    """What the steps after this one would refuse by their flags alone: said now, not hours later."""
    for where, step in steps:
        if isinstance(step, WangenError):
            yield Finding(where, step.found, step.cure)
        elif isinstance(step, Train) and (fault := seen.leaves_nothing(step)):
            yield Finding(where, *fault)


def _refused_later(steps: Iterable[Placed], seen: "Examined") -> Iterator[Finding]:
    """What training would refuse after hours of caching, by headers of files, what is installed and the disk.

    It loads torch, which takes seconds: where most of a cache is there already, training says the same soon enough.
    """
    try:
        before_caching = import_module("wangen.runtime.training.before_caching")
    except ImportError:  # caching comes next, and says how it is installed
        return
    for where, step in steps:
        if isinstance(step, Train):
            try:
                before_caching.require_trainable(step, seen.num_batches - step.validation_items, seen.to_cache)
            except WangenError as error:
                yield Finding(where, error.found, error.cure)


def _is_empty(folder: Path) -> bool:
    try:
        return not any(folder.iterdir())
    except OSError:  # it is not there, or `_writable` names it
        return True


@dataclass(frozen=True)
class Examined:
    """What a dataset's blocks hold, and all that is wrong with them, the weights and the folders.

    `to_cache` has for each cache folder about the bytes that are not in it yet; `cautions` stop nothing.
    """

    num_images: int
    num_clips: int
    num_resolutions: int
    num_taught: int
    num_batches: int
    to_cache: Mapping[Path, int]
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
    cautions: tuple[str, ...]

    def leaves_nothing(self, options: Train) -> tuple[str, str] | None:
        """What is wrong, and what to do, when a training holds out as many items as there are at most."""
        if not 0 < self.num_taught <= options.validation_items:
            return None
        found = f"--validation_items {options.validation_items} leaves nothing of {many(self.num_taught, 'item')}"
        return f"{found} to train on", "give fewer, or a dataset of its own with --validation_config"

    def __str__(self) -> str:
        """The items in words."""
        each = f", those of {self.num_resolutions} resolutions together" if self.num_resolutions > 1 else ""
        return f"{many(self.num_images, 'image')} and {many(self.num_clips, 'clip')} with captions{each}"


def examine(options: Check, entries: Sequence[DatasetEntry], steps: Iterable[Step | WangenError] = ()) -> Examined:
    """Look at the blocks of a dataset and at the files and folders that the options name, as this host sees them.

    Args:
        options: of the step.
        entries: the blocks.
        steps: of the script that runs this one; they say how the cache is made.
    """
    encoding = encoding_of((step for step in steps if isinstance(step, Step)), UNSAID)
    model = profiles.model(options.task)
    texts = Texts(model, encoding)
    surveys = [_survey(entry, model, encoding, texts) for entry in entries]
    findings = [finding for survey in surveys for finding in survey.findings]
    to_cache = _to_cache(surveys)
    findings += [*_weights(options), *_read_later(options), *_folders(options, surveys), *_room(to_cache)]
    counts = {media: sum(s.num_items for s in surveys if s.entry.media == media) for media in ("image", "video")}
    # Blocks that share a folder find the same.
    num_resolutions = len({entry.resolution for entry in entries})
    told = (_swapped(options), twin_warning(options.vae, model), task_warning(options.dit, model))
    warnings = dict.fromkeys(filter(None, (*(_incomplete(entry.directory) for entry in entries), *told)))
    clips = {path: facts for survey in surveys for path, facts in survey.clips.items()}
    num_taught = sum(survey.num_samples for survey in surveys if not survey.entry.is_reg)
    num_batches = sum(each.num_samples * each.entry.num_repeats // each.entry.batch_size for each in surveys)
    return Examined(counts["image"], counts["video"], num_resolutions, num_taught, num_batches, to_cache,
                    tuple(dict.fromkeys(findings)), tuple(warnings), tuple(clip_cautions(clips)))  # fmt: skip


def _incomplete(folder: Path) -> str:
    """What publishing wrote into a media folder and is there no more, as after a copy that was broken off."""
    missing = sorted(name for name in manifest.read(folder).files if not (folder / name).exists())
    if not missing:
        return ""
    named = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
    return f"{folder}: {many(len(missing), 'published file')} not there ({named}); was the copying broken off?"


def _swapped(options: Check) -> str:
    """What the headers or names of two experts say, when it is the contrary of what they are given as."""
    low, high = options.dit, options.dit_high_noise
    with suppress(WangenError):  # a file that cannot be read is a finding of its own
        if low and high and experts.seem_swapped(low, high):
            return f"--dit is {low.name} and --dit_high_noise {high.name}: are they swapped? {experts.ORDER}"
    return ""


@dataclass
class _Survey:
    """What was found in a block of the TOML: items, their samples, about the bytes of their cache, problems, clips."""

    entry: DatasetEntry
    num_items: int = 0
    num_samples: int = 0
    cache_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    clips: dict[Path, MediaFacts] = field(default_factory=dict)


def _survey(entry: DatasetEntry, model: profiles.Model, encoding: Encoding, texts: Texts) -> _Survey:
    survey = _Survey(entry)
    for path in entry.folders:
        if is_foreign(path.as_posix(), machine_of(host_platform_name())):
            cure = "write the path as this machine sees it, or publish for this platform"
            survey.findings.append(Finding(str(path), "the TOML holds a path of another system", cure))
            return survey
    try:
        items, problems = read_items(entry)
    except WangenError as error:
        cure = error.cure or "publish the dataset again or mend the TOML"
        survey.findings.append(Finding(error.where or str(entry.directory), error.found, cure))
        return survey
    survey.num_items = len(items)
    survey.findings += [Finding(str(problem.path), problem.found, problem.cure) for problem in problems]
    facts_of = cache(read_facts)  # many lines of a manifest may name one video
    for item in items:
        if wrong := list(misfits(item, entry, model, facts_of)):
            survey.findings += [Finding(str(problem.path), problem.found, problem.cure) for problem in wrong]
            continue
        survey.clips |= {path: facts_of(path) for path in (item.path, *item.companions) if media_of(path) == "video"}
        clips = [(0, 1)]
        if item.media == "video":
            clips = windows(entry, clip_frames(item, facts_of(item.path), model.fps, entry.source_fps))
        survey.num_samples += len(clips)
        size, control = entry.resolution, entry.control_resolution
        survey.cache_bytes += sum(sample_bytes(item, size, count, model, encoding, control) for _, count in clips)
        survey.cache_bytes += texts.added_bytes(item, entry.cache_directory)
    return survey


def _folders(options: Check, surveys: list[_Survey]) -> Iterator[Finding]:
    """Caches and outputs: apart from the media, and writable."""
    for survey in surveys:
        cache, media = survey.entry.cache_directory, survey.entry.directory
        if cache.resolve() == media.resolve() and not survey.entry.manifest:
            yield Finding(str(cache), "cache and media share one folder", "set cache_directory to another")
        yield from _writable(cache, "the cache folder")
    if options.output_dir:
        yield from _writable(options.output_dir, "the output folder")


def _writable(folder: Path, name: str) -> Iterator[Finding]:
    existing = nearest_existing(folder)
    if existing is None:
        yield Finding(str(folder), f"{name} lies on a drive that is not there", "connect it or choose another folder")
    elif not existing.is_dir():
        yield Finding(str(folder), f"{name} cannot be made: {existing} is a file", "choose another folder")
    elif not os.access(existing, os.W_OK):
        yield Finding(str(folder), f"{name} cannot be written", "fix its rights or choose another")


def _to_cache(surveys: Iterable[_Survey]) -> dict[Path, int]:
    """For each cache folder about the bytes that are not in it yet."""
    need: Counter[Path] = Counter()
    for survey in surveys:
        need[survey.entry.cache_directory.resolve()] += survey.cache_bytes
    for folder in need:
        with suppress(OSError):  # a folder that cannot be read is named by `_writable`, or holds nothing that matters
            need[folder] -= cached_bytes(folder)
    return {folder: max(0, num_bytes) for folder, num_bytes in need.items()}


def _room(to_cache: Mapping[Path, int]) -> Iterator[Finding]:
    """Whether what is to be cached fits on its disks."""
    with suppress(OSError):  # a folder that cannot be looked at is named by `_writable`
        for folder, needed, free in full_disks(to_cache):
            found = f"{free / 1e9:.1f} GB free, the cache needs about {needed / 1e9:.1f} GB"
            yield Finding(str(folder), found, "free space")


def _weights(options: Check) -> Iterator[Finding]:
    model = profiles.model(options.task)
    roles = {weights.flag: weights for weights in model.weights}
    sound = set()
    for flag in profiles.WEIGHT_ROLES:
        path: Path | None = getattr(options, flag)
        if path is None:
            continue
        if flag not in roles:
            yield Finding(str(path), f"--{flag}: {options.task} has no such weights", f"leave --{flag} out")
            continue
        try:
            kinds.expect(path, roles[flag].kind, f"--{flag}", options.task)
            sound.add(flag)
        except WangenError as error:
            cure = error.cure if path.exists() else _how_to_get(path, roles[flag], options.task)
            yield Finding(error.where or str(path), f"{experts.flag_words(flag, model)}: {error.found}", cure)
    if sound >= {"dit", "dit_high_noise"} and options.dit and options.dit_high_noise:
        try:
            experts.expect_two_experts(options.dit, options.dit_high_noise)
        except WangenError as error:
            yield Finding(error.where, f"--dit_high_noise: {error.found}", error.cure)
    if options.tokenizer or "t5" in sound:
        try:
            tokenizer_of(options.t5 or Path(), options.tokenizer, profiles.model(options.task))
        except WangenError as error:
            yield Finding(error.where, error.found, error.cure)


def _read_later(options: Check) -> Iterator[Finding]:
    for path in options.reads:
        if not path.exists():
            yield Finding(str(path), "a later step reads it, and it is not there", "put it there, or leave it out")
    if options.sample_prompts:
        try:
            read_prompts(options.sample_prompts, profiles.model(options.task), 0, tell=False)
        except WangenError as error:
            yield Finding(error.where, error.found, error.cure)


def _how_to_get(path: Path, weights: Weights, task: str) -> str:
    """What to do about a file that is not there; one with a name of nobody's was named by the user."""
    source = f" (from {weights.downloads[0].address})" if weights.downloads else ""
    if not any(is_called(PurePosixPath(path.as_posix()), name) for name in weights.files):
        return f"put it there{source}, or mend its name in wangen.toml and publish again"
    fetch = (
        f" (from {weights.downloads[0].address}, or with: wangen models download {task})" if weights.downloads else ""
    )
    more = " … (all: wangen models list)" if len(weights.files) > _NUM_NAMES else ""
    return (
        f"put it there{fetch}, or publish again to have it "
        f"found elsewhere in models under one of its names: {', '.join(weights.files[:_NUM_NAMES])}{more} (where "
        "wangen.toml names the file, under that name alone)"
    )
