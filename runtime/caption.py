"""`caption`: a `.txt` beside every image and clip that has no caption, by a local vision-language model.

Torch is imported when there is something to caption: what the captions have in common is told without it.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from wangen.generator.caption_statistics import Statistics, statistics_of
from wangen.generator.dataset import CAPTION, BadItemError, Problem, list_folder, media_of
from wangen.generator.errors import UsageError, WangenError, many, printable
from wangen.generator.files import write_text
from wangen.generator.manifests import read_lines
from wangen.generator.npz import is_other_archive
from wangen.generator.publish.captions import CaptionFiles, with_trigger
from wangen.generator.session import Report
from wangen.generator.steps import Caption
from wangen.generator.workspace import require_writable
from wangen.runtime.media import load_pictures
from wangen.runtime.progress import progress

if TYPE_CHECKING:
    from PIL import Image

    from wangen.runtime.vision_language import VisionLanguageModel

log = logging.getLogger("wangen")

_SHOWN = 10
"""Phrases, groups and failures that the log names; the report has all of them."""


@dataclass
class _Dataset:
    """The media of a folder or a manifest.

    Attributes:
        place: the folder, or that of the manifest.
        captions: media -> its caption, of those that have one.
        bare: media without a caption.
        failed: what could not be read, and media that could not be captioned.
        written: how many captions are new.
    """

    place: Path
    captions: dict[Path, str] = field(default_factory=dict)
    bare: list[Path] = field(default_factory=list)
    failed: list[Problem] = field(default_factory=list)
    written: int = 0


def run(options: Caption) -> Report:
    """Caption what has no caption, and tell what all captions have in common.

    Media that cannot be read are listed and the others are captioned; the step fails in the end then.

    Raises:
        WangenError: there are no media, the model cannot be loaded, memory or the disk is full.
    """
    _refuse(options)
    dataset = _of_manifest(options.manifest) if options.manifest else _of_folder(options.dataset_dir or Path())
    if not dataset.captions and not dataset.bare and not dataset.failed:
        raise WangenError("holds no image or video files", where=str(dataset.place), cure="put them here")
    kept = len(dataset.captions)
    if dataset.bare and not options.report_only:
        _write_all(options, dataset)
    names = {_name(path, dataset.place): text for path, text in dataset.captions.items()}
    statistics = statistics_of(names, options.trigger_word)
    _tell(statistics, dataset.failed)
    without = f", {len(dataset.bare)} without a caption" if dataset.bare else ""
    return Report(
        folder=dataset.place,
        summary=f"{many(dataset.written, 'caption')} written, {kept} kept, {len(dataset.failed)} failed{without}",
        inputs={"dataset": options.manifest or options.dataset_dir, "model": options.model},
        counts={"written": dataset.written, "kept": kept, "failed": len(dataset.failed), "without": len(dataset.bare)},
        result={**asdict(statistics), "failed": list(map(str, dataset.failed))},
        ok=not dataset.failed,
    )


def _refuse(options: Caption) -> None:
    """Flags that no run can have."""
    for name in ("frames", "max_side", "max_new_tokens", "batch_size"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} must be above 0, got {getattr(options, name)}")
    if not options.prompt.strip():
        raise UsageError("--prompt is empty", cure="leave it out, or ask for a description")
    if not options.trigger_word.isprintable() or options.trigger_word != options.trigger_word.strip():
        raise UsageError(f"{options.trigger_word!r} is no trigger word", where="--trigger_word",
                         cure="give a word without blanks around it")  # fmt: skip
    if not options.model and not options.report_only:
        raise UsageError("caption needs --model", cure="give a model's folder, or --report_only")


def _of_folder(folder: Path) -> _Dataset:
    entries = list_folder(folder)
    files = CaptionFiles(entries)
    dataset = _Dataset(folder)
    for path in entries:
        if media_of(path) is None or not path.is_file() or is_other_archive(path):
            continue
        try:
            found = files.of(path)
        except BadItemError as bad:
            dataset.failed.append(bad.problem)
            continue
        if found:
            dataset.captions[path] = found[0].text
        else:
            dataset.bare.append(path)
    return dataset


def _of_manifest(manifest: Path) -> _Dataset:
    items, problems = read_lines(manifest, bare=True)
    captions = {item.path: item.caption for item in items.values() if item.captions}
    without = {number: item for number, item in items.items() if item.path not in captions}
    bare = dict.fromkeys(item.path for item in without.values() if not item.excerpt)
    problems += [
        Problem(manifest, f"line {number}: takes some frames of a video, and a caption beside it is for all of them",
                'write "prompt" into the line')
        for number, item in without.items() if item.excerpt
    ]  # fmt: skip
    return _Dataset(manifest.parent, captions, list(bare), problems)


def _write_all(options: Caption, dataset: _Dataset) -> None:
    """Caption the bare media; each caption is written as soon as it is there."""
    for folder in dict.fromkeys(path.parent for path in dataset.bare):
        require_writable(folder)
    model = _load(options)
    waiting, dataset.bare = dataset.bare, []
    with progress("captions", len(waiting)) as advance:
        for start in range(0, len(waiting), options.batch_size):
            batch = waiting[start : start + options.batch_size]
            texts = _describe(options, model, _pictures(options, batch, dataset.failed))
            for path, text in texts.items():
                _keep(path, text, options.trigger_word, dataset)
            advance(len(batch), printable(dataset.captions.get(batch[-1], batch[-1].name))[:60])


def _load(options: Caption) -> "VisionLanguageModel":
    import torch

    from wangen.runtime.devices import choose_device, choose_dtype, enough_memory
    from wangen.runtime.vision_language import VisionLanguageModel

    assert options.model, "refused without one"
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    with enough_memory("loading the model", "take a smaller model, --dtype bfloat16 or --device cpu"):
        model = VisionLanguageModel(options.model, getattr(torch, dtype), device)
    log.info("  %s in %s on %s", options.model.name, dtype, device)
    return model


def _pictures(options: Caption, paths: Iterable[Path], failed: list[Problem]) -> "dict[Path, list[Image.Image]]":
    """What the model sees of each file; those that cannot be decoded are listed instead."""
    found = {}
    for path in paths:
        if path.with_suffix(CAPTION).exists():  # of another file of this stem, or of somebody else since
            log.warning("  %s: %s is there by now and stays", path.name, path.with_suffix(CAPTION).name)
            continue
        try:
            found[path] = load_pictures(path, options.frames, options.max_side)
        except WangenError as error:
            failed.append(Problem(path, error.found, error.cure))
    return found


def _describe(
    options: Caption, model: "VisionLanguageModel", seen: "Mapping[Path, Sequence[Image.Image]]"
) -> dict[Path, str]:
    from wangen.runtime.devices import enough_memory

    if not seen:
        return {}
    with enough_memory(
        "captioning; what was written stays", "use --batch_size 1, a lower --max_side or fewer --frames"
    ):
        texts = model.describe(list(seen.values()), options.prompt, options.max_new_tokens)
    return dict(zip(seen, texts, strict=True))


def _keep(path: Path, text: str, trigger: str, dataset: _Dataset) -> None:
    """Write a caption, unless the model said nothing or another file of the batch has got this one."""
    target = path.with_suffix(CAPTION)
    if not text:
        dataset.failed.append(Problem(path, "the model says nothing", "give another --prompt, or write it"))
    elif not target.exists():
        caption = with_trigger(text, trigger)
        write_text(target, caption + "\n")
        dataset.captions[path] = caption
        dataset.written += 1


def _name(path: Path, place: Path) -> str:
    """A media file as seen from the dataset's folder, where it lies there."""
    return path.relative_to(place).as_posix() if path.is_relative_to(place) else path.as_posix()


def _tell(statistics: Statistics, failed: Sequence[Problem]) -> None:
    """The statistics and failures in the log, the first of each."""
    if statistics.number:
        log.info("  %s of %d to %d words, median %g", many(statistics.number, "caption"), statistics.shortest,
                 statistics.longest, statistics.median)  # fmt: skip
    for phrase, count in islice(statistics.phrases.items(), _SHOWN):
        log.info("    in %d of them: %s", count, printable(phrase))
    for names in statistics.equal[:_SHOWN]:
        rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        log.warning("    the same caption: %s%s", ", ".join(map(printable, names[:_SHOWN])), rest)
    for problem in failed[:_SHOWN]:
        log.error("  - %s", problem)
    if len(failed) > _SHOWN:
        log.error("  and %d more: see the report", len(failed) - _SHOWN)
