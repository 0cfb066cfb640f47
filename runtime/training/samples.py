"""The items of a run from the cache: those it trains on, and those it is only judged by."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wangen import profiles
from wangen.generator.errors import UsageError, many, some
from wangen.generator.manifests import is_manifest
from wangen.generator.steps import Train
from wangen.runtime.loader import CachedSample, find_entries
from wangen.runtime.samples import read_samples
from wangen.runtime.training.held_out import clip_key, held_out
from wangen.runtime.training.ranks import Ranks

log = logging.getLogger("wangen")


def read_training_samples(
    options: Train, model: profiles.Model, ranks: Ranks | None = None
) -> tuple[list[CachedSample], list[CachedSample]]:
    """What is trained on and what is held out; the cache has entries of all of it.

    Args:
        options: of training.
        model: what is trained.
        ranks: the processes that train together, who all call this; None for one alone.

    Raises:
        WangenError: entries are missing or stale.
        UsageError: nothing would be left to train on, or there is nothing to judge.
    """
    samples = find_entries(options, model, read_samples(options, model), ranks)
    if options.validation_config:
        other = on_other_dataset(options, options.validation_config)
        asked = [sample for sample in read_samples(other, model) if not sample.entry.is_reg]
        if not asked:
            raise UsageError("--validation_config has nothing but regularisation sets, which are never judged",
                             where=str(options.validation_config), cure="give a dataset of what is taught")  # fmt: skip
        judged = find_entries(other, model, asked, ranks)
        trained = set(map(clip_key, samples))
        both = {cached.sample.item.path.name for cached in judged if clip_key(cached) in trained}
        if both:
            log.warning("  --validation_config has %s trained on as well, so that is no held-out loss: %s",
                        many(len(both), "item that is", "items that are"), ", ".join(sorted(both)[:3]))  # fmt: skip
        return _as_drawn(samples, options), judged
    if not options.validation_items:
        return samples, []
    training, validation = held_out(samples, options.validation_items, options.seed)
    log.info("  held out: %s", some(sorted({cached.sample.item.path.name for cached in validation})))
    if unseen := len(samples) - len(training) - len(validation):
        log.info("  neither trained on nor judged: %s of what is held out", many(unseen, "other clip", "other clips"))
    return _as_drawn(training, options), validation


def _as_drawn(samples: Sequence[CachedSample], options: Train) -> list[CachedSample]:
    """What is trained on without the empty prompt where it is never drawn: a run's fingerprint names all entries."""
    return [cached if options.caption_dropout else replace(cached, empty=None) for cached in samples]


def on_other_dataset(options: Train, path: Path) -> Train:
    """The flags with a dataset beside the own one: a TOML has resolutions of its own, a manifest is cut as asked."""
    if is_manifest(path):
        return replace(options, dataset_config=None, manifest=path)
    return replace(options, dataset_config=path, manifest=None, resolution="all")
