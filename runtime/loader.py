"""Cached entries -> batches: which samples, in which order, and their tensors read ahead in threads."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from wangen.generator.errors import WangenError
from wangen.runtime.ahead import ahead
from wangen.runtime.cache import Entry, Folder, load
from wangen.runtime.needs import KINDS, expected_encoder, judge, listing, problem, recipe_of
from wangen.runtime.randomness import generator_for
from wangen.runtime.samples import Sample, by_cache_folder


@dataclass(frozen=True)
class CachedSample:
    """A sample with its two entries."""

    sample: Sample
    latent: Entry
    text: Entry


@dataclass(frozen=True)
class Draw:
    """One use of a sample in an epoch: which sample, and which of its repeats."""

    index: int
    repeat: int


@dataclass(frozen=True)
class Batch:
    """What one forward pass gets.

    Attributes:
        latents: (B, C, F, h, w) clean latents in float32.
        texts: B embeddings (L, dim).
        names: B sample names, for messages: two files may have the same.
        keys: B content keys of the latents, which identify the samples wherever their files lie.
        repeats: B repeat numbers.
    """

    latents: torch.Tensor
    texts: list[torch.Tensor]
    names: list[str]
    keys: list[str]
    repeats: list[int]


def find_entries(samples: Sequence[Sample], dataset_config: Path) -> list[CachedSample]:
    """The cache entries of every sample, all latents from one VAE and all texts from one encoder.

    Raises:
        WangenError: entries are missing or stale, the message lists them with the commands to run; or it is open
            which of two encoders' entries to take.
    """
    folders = [Folder(path) for path in by_cache_folder(samples)]
    encoders = {kind: expected_encoder(folders, samples, kind, dataset_config) for kind in KINDS}
    needs = {kind: judge(folders, samples, kind, encoders[kind]) for kind in KINDS}
    bad = [need for kind in KINDS for need in needs[kind] if need.verdict.state != "valid"]
    if bad:
        raise WangenError(
            "\n".join([f"the cache lacks {len(bad)} entries", *listing([problem(need) for need in bad])]),
            where=str(dataset_config),
            cure=f"run cache_latents and cache_text with --dataset_config {dataset_config}",
        )
    entries = {
        (need.folder.path, need.recipe.content_key): need.verdict.entry for kind in KINDS for need in needs[kind]
    }
    return [_cached(sample, entries) for sample in samples]


def num_entries(samples: Sequence[CachedSample]) -> int:
    """How many cache entries the samples have together; equal content and equal captions share theirs."""
    return len({entry.path for cached in samples for entry in (cached.latent, cached.text)})


def _cached(sample: Sample, entries: Mapping[tuple[Path, str], Entry | None]) -> CachedSample:
    latent, text = (entries[sample.entry.cache_directory, recipe_of(sample, kind).content_key] for kind in KINDS)
    assert latent is not None, sample.name  # every verdict was valid
    assert text is not None, sample.name
    return CachedSample(sample, latent, text)


def epoch_batches(samples: Sequence[CachedSample], seed: int, epoch: int) -> list[list[Draw]]:
    """The batches of an epoch: samples of one shape together, both samples and batches in seeded order."""
    shapes: dict[tuple[int, ...], list[Draw]] = {}
    for index, cached in enumerate(samples):
        entry = cached.sample.entry
        shape: tuple[int, ...] = (*cached.sample.size, cached.sample.count, entry.batch_size)
        shapes.setdefault(shape, []).extend(Draw(index, repeat) for repeat in range(entry.num_repeats))
    batches = []
    for shape, draws in sorted(shapes.items()):
        order = torch.randperm(len(draws), generator=generator_for(seed, "samples", epoch, *shape)).tolist()
        shuffled = [draws[position] for position in order]
        batches += [shuffled[first : first + shape[-1]] for first in range(0, len(shuffled), shape[-1])]
    order = torch.randperm(len(batches), generator=generator_for(seed, "batches", epoch)).tolist()
    return [batches[position] for position in order]


def read_batch(samples: Sequence[CachedSample], draws: Sequence[Draw]) -> Batch:
    """The tensors of one batch, from the cache.

    Raises:
        CorruptEntryError: an entry was damaged since it was judged.
    """
    chosen = [samples[draw.index] for draw in draws]
    return Batch(
        latents=torch.stack([load(cached.latent)["latent"].float() for cached in chosen]),
        texts=[load(cached.text)["embedding"] for cached in chosen],
        names=[cached.sample.name for cached in chosen],
        keys=[cached.latent.content_key for cached in chosen],
        repeats=[draw.repeat for draw in draws],
    )


def read_ahead(
    samples: Sequence[CachedSample], batches: Sequence[list[Draw]], num_workers: int
) -> Generator[Batch, None, None]:
    """The batches in order, read in threads and at most `num_workers` ahead; 0 reads in the caller's thread."""
    return ahead((partial(read_batch, samples, draws) for draws in batches), num_workers)
