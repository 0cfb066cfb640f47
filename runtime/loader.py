"""Cached entries -> batches: which samples, in which order, and their tensors read ahead in threads."""

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from wangen.generator.errors import WangenError
from wangen.runtime.cache import Encoder, Entry, Folder, Kind, Recipe, Verdict, load
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
        names: B sample names.
        repeats: B repeat numbers.
    """

    latents: torch.Tensor
    texts: list[torch.Tensor]
    names: list[str]
    repeats: list[int]


def find_entries(samples: Sequence[Sample], dataset_config: Path) -> list[CachedSample]:
    """The cache entries of every sample, all latents from one VAE and all texts from one encoder.

    Raises:
        WangenError: entries are missing or stale; the message lists them with the commands to run.
    """
    recipes: dict[Kind, list[tuple[Folder, Recipe]]] = {"latent": [], "text_encoder_output": []}
    for folder_path, members in by_cache_folder(samples).items():
        folder = Folder(folder_path)
        for sample in members:
            recipes["latent"].append((folder, Recipe("latent", sample.latent_recipe(), sample.name)))
            recipes["text_encoder_output"].append(
                (folder, Recipe("text_encoder_output", sample.text_recipe(), sample.item.path.name))
            )
    found = {kind: _judge(needed) for kind, needed in recipes.items()}
    problems = [
        f"{recipe.name}: {kind} is {verdict.state}, {verdict.reason}"
        for kind, needed in recipes.items()
        for (_, recipe), verdict in zip(needed, found[kind], strict=True)
        if verdict.entry is None or verdict.state != "valid"
    ]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems[:20])
        more = f"\n  … and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise WangenError(
            f"the cache lacks {len(problems)} entries\n{listed}{more}",
            where=str(dataset_config),
            cure=f"run cache_latents and cache_text with --dataset_config {dataset_config}",
        )
    ordered = [sample for members in by_cache_folder(samples).values() for sample in members]
    pairs = zip(ordered, found["latent"], found["text_encoder_output"], strict=True)
    return [CachedSample(s, latent.entry, text.entry) for s, latent, text in pairs if latent.entry and text.entry]


def _judge(needed: Sequence[tuple[Folder, Recipe]]) -> list[Verdict]:
    """Verdicts by one encoder: the one that made most of what is needed, the newest of equals."""
    counts: dict[Encoder, tuple[int, int]] = {}
    wanted = {recipe.content_key for _, recipe in needed}
    for entry in {id(e): e for folder, _ in needed for e in folder.entries.values()}.values():
        if entry.content_key in wanted:
            number, newest_ns = counts.get(entry.encoder, (0, 0))
            counts[entry.encoder] = (number + 1, max(newest_ns, entry.path.stat().st_mtime_ns))
    encoder = max(counts, key=lambda e: (counts[e], e.identity, e.dtype)) if counts else None
    return [folder.judge(recipe, encoder) for folder, recipe in needed]


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
        repeats=[draw.repeat for draw in draws],
    )


def read_ahead(
    samples: Sequence[CachedSample], batches: Sequence[list[Draw]], num_workers: int
) -> Generator[Batch, None, None]:
    """The batches in order, read in threads and at most `num_workers` ahead; 0 reads in the caller's thread."""
    if num_workers <= 0:
        for draws in batches:
            yield read_batch(samples, draws)
        return
    waiting: deque[Future[Batch]] = deque()
    pool = ThreadPoolExecutor(num_workers)
    try:
        for draws in batches:
            waiting.append(pool.submit(read_batch, samples, draws))
            if len(waiting) > num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
