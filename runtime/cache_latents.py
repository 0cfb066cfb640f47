"""`cache_latents`: images and clips -> VAE latents in the cache. Decides what to encode before anything is decoded."""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen.generator import headers
from wangen.generator.errors import WangenError
from wangen.generator.session import Report
from wangen.generator.steps import CacheLatents
from wangen.runtime.cache import Encoder
from wangen.runtime.media import load_clip, load_image
from wangen.runtime.models import Family, family, model_of_vae
from wangen.runtime.needs import Need, fill
from wangen.runtime.progress import Advance, progress
from wangen.runtime.samples import Sample, read_samples

if TYPE_CHECKING:
    from wangen.runtime.cache_writer import Writer

log = logging.getLogger("wangen")


def run(options: CacheLatents) -> Report:
    """Encode what is not in the cache, then remove entries that no item needs.

    Raises:
        WangenError: a source cannot be read, the VAE is none, values are not finite, the disk is full.
    """
    model = model_of_vae(options.vae)
    samples = read_samples(options.dataset_config, model, make_folders=True)
    encoder = _encoder(options)
    return fill(
        options, samples, "latent", encoder, lambda missing, _: _encode(options, family(model), encoder, missing)
    )


def _encoder(options: CacheLatents) -> Encoder:
    """The VAE's identity and precision. Torch is asked only when the precision depends on the device."""
    dtype: str | None = options.vae_dtype
    if dtype != "float32":  # float32 is right on every device; anything else depends on it
        from wangen.runtime.devices import choose_device, choose_vae_dtype

        dtype = choose_vae_dtype(dtype, choose_device(options.device))
    return Encoder(headers.identity(options.vae), dtype)


def _encode(options: CacheLatents, kind: Family, encoder: Encoder, missing: list[Need]) -> int:
    """Encode everything that is missing; returns how many entries were written."""
    from wangen.runtime.cache_writer import Writer
    from wangen.runtime.devices import DTYPES, choose_device

    device = choose_device(options.device)
    vae = kind.load_vae(options.vae, dtype=DTYPES[encoder.dtype], device=device)
    log.info("  VAE in %s on %s", encoder.dtype, device)
    folders: dict[Path, list[Need]] = {}
    for need in missing:
        folders.setdefault(need.folder.path, []).append(need)
    with progress("latents", len(missing)) as advance:
        for folder, needs in folders.items():
            with Writer(folder) as writer:
                _encode_folder(options, kind, vae, encoder, needs, writer, advance)
    return len(missing)


def _encode_folder(
    options: CacheLatents,
    kind: Family,
    vae: Any,
    encoder: Encoder,
    needs: list[Need],
    writer: "Writer",
    advance: Advance,
) -> None:
    import numpy as np
    import torch

    batches = list(_batches(needs, options.batch_size))
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
        for need, latent in zip(batch, latents.to(getattr(torch, encoder.dtype)).cpu(), strict=True):
            writer.put(need.recipe, encoder, {"latent": latent.contiguous()})
            advance(1, need.sample.name)
        writer.commit_if_due()


def _batches(needs: Sequence[Need], limit: int | None) -> Iterator[list[Need]]:
    """Samples of one shape together, at most `limit` (default: the dataset's batch_size) at a time."""
    shapes: dict[tuple[int, ...], list[Need]] = {}
    for need in needs:
        sample = need.sample
        shapes.setdefault((*sample.size, sample.count, limit or sample.entry.batch_size), []).append(need)
    for (*_, size), members in shapes.items():
        rest = iter(members)
        while batch := list(islice(rest, size)):
            yield batch


def _decoded(batches: Sequence[list[Need]], num_workers: int) -> Iterator[tuple[list[Need], list[Any]]]:
    """Batches with their frames, decoded in threads, at most `num_workers` batches ahead."""
    waiting: list[tuple[list[Need], list[Future[Any]]]] = []
    rest = iter(batches)
    pool = ThreadPoolExecutor(num_workers)
    try:
        for batch in rest:
            waiting.append((batch, [pool.submit(_frames, need.sample) for need in batch]))
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
