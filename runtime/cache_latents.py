"""`cache_latents`: images and clips -> VAE latents in the cache. Decides what to encode before anything is decoded."""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from wangen.generator import headers
from wangen.generator.errors import WangenError
from wangen.generator.session import Report
from wangen.generator.steps import CacheLatents
from wangen.runtime.cache import Encoder, Folder, Recipe, Verdict, Writer, count_reasons, count_states
from wangen.runtime.media import load_clip, load_image
from wangen.runtime.models import Family, family, model_of_vae
from wangen.runtime.progress import Advance, progress
from wangen.runtime.samples import Sample, by_cache_folder, read_samples

log = logging.getLogger("wangen")


@dataclass(frozen=True)
class Work:
    """A sample whose latent has to be encoded."""

    sample: Sample
    recipe: Recipe


def run(options: CacheLatents) -> Report:
    """Encode what is not in the cache, then remove entries that no item needs.

    Raises:
        WangenError: a source cannot be read, the VAE is none, values are not finite, the disk is full.
    """
    headers.expect(options.vae, _vae_kind(options.vae), "vae")
    model = model_of_vae(options.vae)
    samples = read_samples(options.dataset_config, model)
    encoder = _encoder(options)
    folders = {folder: Folder(folder) for folder in by_cache_folder(samples)}
    verdicts: list[Verdict] = []
    work: dict[Path, list[Work]] = {}
    needed: dict[Path, set[str]] = {}
    for folder, members in by_cache_folder(samples).items():
        for sample in members:
            recipe = Recipe("latent", sample.latent_recipe(), sample.name)
            verdict = folders[folder].judge(recipe, encoder)
            verdicts.append(verdict)
            key = recipe.key(encoder)
            if (verdict.state != "valid" or options.recache) and key not in needed.setdefault(folder, set()):
                work.setdefault(folder, []).append(Work(sample, recipe))
            needed.setdefault(folder, set()).add(key)
    computed = _encode(options, family(model), encoder, work) if work else 0
    removed = 0 if options.keep_cache else sum(folders[f].prune("latent", keys) for f, keys in needed.items())
    counts = count_states(verdicts)
    reused = len(verdicts) - sum(map(len, work.values()))
    return Report(
        folder=options.dataset_config.parent,
        summary=f"{computed} latents encoded, {reused} already valid, {removed} unneeded removed",
        inputs={"dataset_config": options.dataset_config, "vae": options.vae, "vae_identity": encoder.identity},
        counts={"computed": computed, "from_cache": reused, "removed": removed, "found": counts,
                "why": count_reasons(verdicts, recache=options.recache)},
        result={"dtype": encoder.dtype, "folders": [str(folder) for folder in folders]},
    )  # fmt: skip


def _vae_kind(path: Path) -> str:
    kind = headers.identify(path)
    return kind if kind.startswith("wan-vae") else "wan-vae-2.1"


def _encoder(options: CacheLatents) -> Encoder:
    """The VAE's identity and precision. Torch is asked only when the precision depends on the device."""
    dtype: str | None = options.vae_dtype
    if dtype != "float32":  # float32 is right on every device; anything else depends on it
        from wangen.runtime.devices import choose_device, choose_vae_dtype

        dtype = choose_vae_dtype(dtype, choose_device(options.device))
    return Encoder(headers.identity(options.vae), dtype)


def _encode(options: CacheLatents, kind: Family, encoder: Encoder, work: dict[Path, list[Work]]) -> int:
    """Encode everything in `work`; returns how many entries were written."""
    from wangen.runtime.devices import DTYPES, choose_device

    device = choose_device(options.device)
    vae = kind.load_vae(options.vae, dtype=DTYPES[encoder.dtype], device=device)
    log.info("  VAE in %s on %s", encoder.dtype, device)
    written = 0
    total = sum(map(len, work.values()))
    with progress("latents", total) as advance:
        for folder, items in work.items():
            with Writer(folder) as writer:
                _encode_folder(options, kind, vae, encoder, items, writer, advance)
            written += writer.num_written
    return written


def _encode_folder(
    options: CacheLatents, kind: Family, vae: Any, encoder: Encoder, items: list[Work], writer: Writer, advance: Advance
) -> None:
    import numpy as np
    import torch

    batches = list(_batches(items, options.batch_size))
    for batch, frames in _decoded(batches, max(1, options.num_workers)):
        video = torch.from_numpy(np.stack(frames)).to(vae.device)  # (B, 3, T, H, W) uint8
        try:
            latents = kind.encode_video(vae, video.to(torch.float32) / 127.5 - 1)
        except torch.OutOfMemoryError:
            first = batch[0].sample
            raise WangenError(
                f"out of memory encoding {first.name} ({first.count} frames of {first.size[0]}x{first.size[1]})",
                cure="use --batch_size 1, a smaller resolution or fewer target_frames; what was encoded stays",
            ) from None
        for work, latent in zip(batch, latents.to(getattr(torch, encoder.dtype)).cpu(), strict=True):
            writer.put(work.recipe, encoder, {"latent": latent.contiguous()})
            advance(1, work.sample.name)


def _batches(items: Sequence[Work], limit: int | None) -> Iterator[list[Work]]:
    """Samples of one shape together, at most `limit` (default: the dataset's batch_size) at a time."""
    shapes: dict[tuple[int, ...], list[Work]] = {}
    for work in items:
        sample = work.sample
        shapes.setdefault((*sample.size, sample.count, limit or sample.entry.batch_size), []).append(work)
    for (*_, size), members in shapes.items():
        rest = iter(members)
        while batch := list(islice(rest, size)):
            yield batch


def _decoded(batches: Sequence[list[Work]], num_workers: int) -> Iterator[tuple[list[Work], list[Any]]]:
    """Batches with their frames, decoded in threads, at most `num_workers` batches ahead."""
    waiting: list[tuple[list[Work], list[Future[Any]]]] = []
    rest = iter(batches)
    pool = ThreadPoolExecutor(num_workers)
    try:
        for batch in rest:
            waiting.append((batch, [pool.submit(_frames, work.sample) for work in batch]))
            if len(waiting) > num_workers:
                first, futures = waiting.pop(0)
                yield first, [future.result() for future in futures]
        for batch, futures in waiting:
            yield batch, [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)


def _frames(sample: Sample) -> Any:
    """(3, T, H, W) uint8."""
    if sample.item.media == "image":
        return load_image(sample.item.path, sample.size)
    return load_clip(
        sample.item.path, sample.size, sample.start, sample.count, sample.fps, sample.entry.source_fps
    )  # fmt: skip
