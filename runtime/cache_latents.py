"""`cache_latents`: images and clips -> VAE latents in the cache. Decides what to encode before anything is decoded."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen.generator.errors import WangenError
from wangen.generator.session import Report
from wangen.generator.steps import CacheLatents
from wangen.runtime.ahead import ahead
from wangen.runtime.cache import Encoder
from wangen.runtime.media import load_clip, load_image
from wangen.runtime.models import Family, family, model_of_vae, vae_identity
from wangen.runtime.needs import Need, fill, vae_dtype
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
    samples = read_samples(options, model, make_folders=True)
    encoder = _encoder(options)
    return fill(
        options, samples, "latent", encoder, lambda missing, _: _encode(options, family(model), encoder, missing)
    )


def _encoder(options: CacheLatents) -> Encoder:
    """The VAE's identity and precision. Torch is asked only when the precision depends on the device."""
    dtype = vae_dtype(options.vae_dtype, announce=True)
    if dtype is None:
        from wangen.runtime.devices import choose_device, choose_vae_dtype

        dtype = choose_vae_dtype(None, choose_device(options.device))
    return Encoder(vae_identity(options.vae, options.vae_tile), dtype)


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
    jobs = (partial(_frames, need.sample) for batch in batches for need in batch)
    with closing(ahead(jobs, options.num_workers)) as decoded:
        for batch in batches:
            frames = [next(decoded) for _ in batch]
            video = torch.from_numpy(np.stack(frames))  # (B, 3, T, H, W) uint8
            try:
                latents = kind.encode_video(vae, video, cache_cpu=options.vae_cache_cpu, tile_px=options.vae_tile)
            except torch.OutOfMemoryError:
                raise _out_of_memory(batch[0].sample) from None
            for need, latent in zip(batch, latents.to(getattr(torch, encoder.dtype)).cpu(), strict=True):
                writer.put(need.recipe, encoder, {"latent": latent.contiguous()})
                advance(1, need.sample.name)
            writer.commit_if_due()


def _out_of_memory(first: Sample) -> WangenError:
    return WangenError(
        f"out of memory encoding {first.name} ({first.count} frames of {first.size[0]}x{first.size[1]})",
        cure="use --batch_size 1, --vae_tile 256, a smaller resolution or fewer target_frames; what was encoded stays",
    )


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


def _frames(sample: Sample) -> Any:
    """(3, T, H, W) uint8."""
    if sample.item.media == "image":
        return load_image(sample.item.path, sample.size)
    return load_clip(
        sample.item.path, sample.size, sample.start, sample.count, sample.fps, sample.entry.source_fps
    )  # fmt: skip
