"""What checkpoints were trained on, as far as their headers tell, and whether that is what they are judged by.

A header holds one digest of the whole training set, with the `--validation_items` and the seed that were held out of
it. Where the dataset that is judged by gives the same digest, it is known which of its files were trained on.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from wangen.generator.errors import UsageError, WangenError, many
from wangen.generator.headers import read_header
from wangen.generator.lora_config import lora_file
from wangen.generator.steps import Train
from wangen.profiles import Model
from wangen.runtime.evaluation.tables import sources_of
from wangen.runtime.loader import CachedSample, find_entries
from wangen.runtime.trained_on import Part, fingerprints
from wangen.runtime.training.held_out import doubted, held_out
from wangen.runtime.training.plan import dataset_digest


class Seen(NamedTuple):
    """Digests of media files that LoRAs were surely trained on, and of those that they may have been."""

    surely: set[str]
    perhaps: set[str]


def seen_sources(
    files: Iterable[Path], judged: Sequence[CachedSample], items: Sequence[CachedSample], training: Train, model: Model
) -> Seen:
    """Which media files the LoRAs were trained on, and which of the judged they may have been.

    The latter where a LoRA tells of this dataset, since files of it were held out, but as it was then.

    Args:
        files: LoRAs; of one without our header, or of another dataset, nothing is known.
        judged: of the items, what is judged by.
        items: of the whole dataset, before anything is held out.
        training: the flags that the items were read with.
        model: the model profile.

    Raises:
        WangenError: a LoRA cannot be read.
    """
    seen, parts = Seen(set(), set()), list[Part]()
    for file in files:
        told = fingerprints(read_header(lora_file(file)).metadata)
        parts += [part for part in told if part not in parts]
    for part in parts:
        with suppress(ValueError, TypeError, KeyError):  # an older version's, or no fingerprint of a training
            if trained := _of_part(part, items, training, model):
                seen.surely.update(trained)
            else:
                seen.perhaps.update(sources_of(doubted(judged, items, part)))
    return seen


def _of_part(part: Part, items: Sequence[CachedSample], training: Train, model: Model) -> set[str]:
    """The digests of the files of a part's training; none where it was not of this dataset as it is.

    Raises:
        ValueError, TypeError, KeyError: it is no fingerprint of a training.
    """
    dropout = float(part["caption_dropout"])
    count, seed = int(part["validation_items"]), int(part["seed"])
    with suppress(WangenError):  # the cache lacks the empty prompt, or there are not so many items: another dataset
        if dropout:
            with_empty = replace(training, caption_dropout=dropout)
            items = find_entries(with_empty, model, [item.sample for item in items])
        trained = held_out(items, count, seed, tell=False)[0]
        if dataset_digest(trained) == part["dataset"]:
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


def said_of(items: Sequence[CachedSample], seen: Seen) -> list[str]:
    """The warning, where held-out items were trained on, or may have been.

    Args:
        items: that are judged by.
        seen: what was trained on, and which of the items may have been.
    """
    names = {item.sample.source.digest: item.sample.item.path.name for item in items}
    both = sorted(names[digest] for digest in names.keys() & seen.surely)
    if not both and seen.perhaps:
        number = many(len(seen.perhaps), "file that is judged by", "files that are judged by")
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
