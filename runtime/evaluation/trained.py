"""What checkpoints were trained on, as far as their headers tell, and whether that is what they are judged by.

A header holds one digest of the whole training set, with the `--validation_items` and the seed that were held out of
it. Where the dataset that is judged by gives the same digest, it is known which of its files were trained on.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from wangen.generator.errors import UsageError, WangenError, many
from wangen.generator.headers import read_header
from wangen.generator.lora_config import lora_file
from wangen.generator.steps import Train
from wangen.profiles import Model
from wangen.runtime.evaluation.tables import sources_of
from wangen.runtime.loader import CachedSample, find_entries
from wangen.runtime.trained_on import fingerprints
from wangen.runtime.training.held_out import doubted, held_out
from wangen.runtime.training.plan import dataset_digest


def trained_sources(files: Iterable[Path], items: Sequence[CachedSample], training: Train, model: Model) -> set[str]:
    """The digests of those media files that one of the LoRAs was surely trained on.

    Args:
        files: LoRAs; of one without our header, or of another dataset, nothing is known.
        items: of the whole dataset, before anything is held out.
        training: the flags that the items were read with.
        model: the model profile.

    Raises:
        WangenError: a LoRA cannot be read.
    """
    found: set[str] = set()
    for part in _parts(files):
        with suppress(ValueError, TypeError, KeyError):  # it is no fingerprint of a training
            found |= _of_header(part, items, training, model)
    return found


def doubted_sources(
    files: Iterable[Path], judged: Sequence[CachedSample], items: Sequence[CachedSample], training: Train, model: Model
) -> set[str]:
    """The digests of those media files among the judged that one of the LoRAs may have been trained on.

    It tells of this dataset, since files of it were held out, but as it was then.

    Args:
        files: as for `trained_sources`.
        judged: of the items, what is judged by.
        items: likewise.
        training: likewise.
        model: likewise.

    Raises:
        WangenError: a LoRA cannot be read.
    """
    found: set[str] = set()
    for part in _parts(files):
        with suppress(ValueError, TypeError, KeyError):  # an older version's
            if not _of_header(part, items, training, model):
                found |= set(sources_of(doubted(judged, items, part)))
    return found


def _parts(files: Iterable[Path]) -> list[dict[str, Any]]:
    """What the headers say of all parts of the trainings, each once."""
    parts: list[dict[str, Any]] = []
    for file in files:
        told = fingerprints(read_header(lora_file(file)).metadata)
        parts += [part for part in told if part not in parts]
    return parts


def _of_header(
    fingerprint: Mapping[str, str], items: Sequence[CachedSample], training: Train, model: Model
) -> set[str]:
    """As `trained_sources`, of one header.

    Raises:
        ValueError, TypeError, KeyError: it is no fingerprint of a training.
    """
    dropout = float(fingerprint["caption_dropout"])
    count, seed = int(fingerprint["validation_items"]), int(fingerprint["seed"])
    with suppress(WangenError):  # the cache lacks the empty prompt, or there are not so many items: another dataset
        if dropout:
            with_empty = replace(training, caption_dropout=dropout)
            items = find_entries(with_empty, model, [item.sample for item in items])
        trained = held_out(items, count, seed, tell=False)[0]
        if dataset_digest(trained) == fingerprint["dataset"]:
            return set(sources_of(trained))
    return set()


def given_frames(files: Iterable[Path]) -> int | None:
    """The first frames of a clip that the LoRAs' last trainings were given, by their headers; None where none tells.

    Raises:
        UsageError: they differ.
        WangenError: a LoRA cannot be read.
    """
    found: dict[str, Path] = {}
    for file in files:
        told = fingerprints(read_header(lora_file(file)).metadata)
        if told and str(count := told[-1].get("condition_frames")).isdigit():
            found.setdefault(str(count), file)
    if len(found) > 1:
        ways = ", ".join(f"{file.name} with {count}" for count, file in found.items())
        raise UsageError(f"these LoRAs were trained with other --condition_frames than each other: {ways}",
                         cure="say with which to judge them all: --condition_frames N")  # fmt: skip
    return int(next(iter(found))) if found else None


def said_of(items: Sequence[CachedSample], trained: set[str], doubts: set[str]) -> list[str]:
    """The warning, where held-out items were trained on, or may have been.

    Args:
        items: that are judged by.
        trained: digests of files that were trained on.
        doubts: of files that may have been.
    """
    names = {item.sample.source.digest: item.sample.item.path.name for item in items}
    both = sorted(names[digest] for digest in names.keys() & trained)
    if not both and doubts:
        number = many(len(doubts), "file that is judged by", "files that are judged by")
        return [f"{number} may have been trained on, for the dataset has changed since: give --validation_items and "
                "--seed as in training, or a dataset that was not trained on"]  # fmt: skip
    if not both:
        return []
    if len(both) == len(names):
        files = "the file that is judged by was" if len(both) == 1 else f"all {len(both)} files that are judged by were"
        return [f"there is no held-out loss here: {files} trained on, and the ranking says only what is remembered; "
                "give --validation_items as in training, or a dataset that was not trained on"]  # fmt: skip
    number = many(len(both), "file that is judged by was", "files that are judged by were")
    return [f"{number} trained on as well, so that is no held-out loss: {', '.join(both[:3])}"]
