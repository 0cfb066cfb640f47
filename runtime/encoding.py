"""The encoding loop of `cache_latents`: batches are claimed, decoded in threads ahead, encoded, and written.

The way of an item: its missing entries -> claimed, so that no second process makes them too -> its frames, decoded once
for all kinds -> the encoders -> the writer, which judges the values.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen.generator.steps import CacheLatents
from wangen.profiles import Model
from wangen.runtime.ahead import ahead
from wangen.runtime.cache import Encoder, Kind, Recipe, load
from wangen.runtime.decoders.base import FrameDecoder
from wangen.runtime.decoders.choice import open_decoder
from wangen.runtime.media import control_frames, mask_frames, target_frames
from wangen.runtime.models import LatentEncoder, family
from wangen.runtime.needs import EntryWriter, Need, Waiting, Work, claimed
from wangen.runtime.progress import Advance, progress
from wangen.runtime.rocm import narrowed, num_workers
from wangen.runtime.samples import Sample

if TYPE_CHECKING:
    import torch

log = logging.getLogger("wangen")

TENSOR_NAMES: Mapping[Kind, str] = {"clip": "clip", "mask": "mask"}
"""What the tensor of an entry is called; `latent` in those of the other kinds."""

MEMORY_CURE = (
    "use --batch_size 1; if that is not enough --vae_cache_cpu; then --tile 256, which changes the latents a little; "
    "what was encoded stays"
)

Frames = dict[str, Any]
"""Decoded frames of one item, uint8 (C, T, H, W), by what they are: `target`, `control0` …, `mask`."""


@dataclass(frozen=True)
class Job:
    """All that is missing of one sample in one folder."""

    sample: Sample
    needs: tuple[Need, ...]

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds that are missing."""
        return frozenset(need.recipe.kind for need in self.needs)


def encode(options: CacheLatents, model: Model, clip: Path | None, work: Work) -> int:
    """Write every entry that is missing; returns how many this process computed.

    Args:
        options: of the step.
        model: what the cache is for.
        clip: the image encoder, when it is used.
        work: what is missing.

    Raises:
        WangenError: media cannot be decoded, values are not finite, memory or disk is full.
    """
    folders: dict[Path, list[Need]] = {}
    for need in work.missing:
        folders.setdefault(need.folder.path, []).append(need)
    models = Models(options, model, clip, work.encoders)
    computed = 0
    with progress("latents", len(work.missing)) as advance:
        for folder, needs in folders.items():
            with work.open_writer(folder) as writer:
                left = _copy_single_frames(work, needs, writer, advance)
                computed += len(needs) - len(left)
                waiting = Waiting()
                while left:
                    left, done = _encode_needs(options, models, left, writer, advance)
                    computed += done
                    if left:
                        writer.commit()  # another process may be waiting for what is still pending here
                        waiting.wait(left)
    return computed


def _copy_single_frames(work: Work, needs: Sequence[Need], writer: EntryWriter, advance: Advance) -> list[Need]:
    """Conditions of single images are their latents: those that are there are copied; returns what is left."""
    latents = {
        (need.folder.path, need.recipe.content_key): need.verdict.entry
        for need in work.valid
        if need.recipe.kind == "latent" and need.sample.count == 1
    }
    left = []
    for need in needs:
        single = need.recipe.kind == "image_latent" and need.sample.count == 1
        own = Recipe("latent", need.sample.latent_recipe(), "").content_key if single else ""
        entry = latents.get((need.folder.path, own))
        if entry is None:
            left.append(need)
        else:
            writer.put(need.recipe, work.encoders["image_latent"], {"latent": load(entry)["latent"]})
            writer.commit_if_due()
            advance(1, need.sample.name)
    return left


def _encode_needs(
    options: CacheLatents, models: "Models", needs: Sequence[Need], writer: EntryWriter, advance: Advance
) -> tuple[list[Need], int]:
    """Encode what no other process works on; returns what another one does, and how many entries were written."""
    theirs: list[Need] = []
    done = 0
    batches = _claimed(_batches(needs, options.batch_size), models, writer, theirs, advance)
    jobs = (partial(_decoded, batch, models.decoder) for batch in batches)
    with closing(ahead(jobs, num_workers(options.num_workers))) as decoded:
        for batch, frames in decoded:
            for need, tensors in models.encode(batch, frames):
                if need.recipe.kind == "mask" and (cells := float(tensors["mask"].sum())) < 1:
                    how, part = ("all but black", "next to nothing") if cells else ("all black", "nothing")
                    log.warning("  the mask of %s is %s: %s of it will count; white is what counts",
                                need.sample.name, how, part)  # fmt: skip
                writer.put(need.recipe, models.encoders[need.recipe.kind], tensors)
                done += 1
                advance(1, f"{need.sample.name}  {writer.num_bytes / 1e9:.2f} GB")
            writer.commit_if_due()
    return theirs, done


def _batches(needs: Iterable[Need], limit: int | None) -> Iterator[list[Job]]:
    """What is missing, by sample; samples of one shape and with the same kinds missing together."""
    by_sample: dict[int, list[Need]] = {}
    for need in needs:
        by_sample.setdefault(id(need.sample), []).append(need)
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for members in by_sample.values():
        job = Job(members[0].sample, tuple(members))
        size = max(1, limit or job.sample.entry.batch_size)
        controls = tuple(job.sample.control_size(number) for number in range(len(job.sample.controls)))
        groups.setdefault((*job.sample.size, job.sample.count, controls, job.kinds, size), []).append(job)
    for (*_, size), jobs in groups.items():
        rest = iter(jobs)
        while batch := list(islice(rest, size)):
            yield batch


def _claimed(
    batches: Iterable[list[Job]], models: "Models", writer: EntryWriter, theirs: list[Need], advance: Advance
) -> Iterator[list[Job]]:
    """The part of each batch that is now this process's; what others have claimed is put into `theirs`.

    Another process may get some kinds of an item: what is left of a batch is parted then, for one encode makes the
    same kinds of all its items.
    """
    for batch in batches:
        mine: dict[frozenset[Kind], list[Job]] = {}
        for job in batch:
            needs = claimed(job.needs, lambda _: writer, models.encoders, theirs, advance)
            if needs:
                part = Job(job.sample, tuple(needs))
                mine.setdefault(part.kinds, []).append(part)
        yield from mine.values()


def _decoded(batch: list[Job], decoder: FrameDecoder) -> tuple[list[Job], list[Frames]]:
    return batch, [_frames(job, decoder) for job in batch]


def _frames(job: Job, decoder: FrameDecoder) -> Frames:
    """Everything of a job that is decoded.

    Raises:
        WangenError: a file cannot be decoded, or is no longer the one whose digest the entries would hold.
    """
    sample, frames = job.sample, Frames()
    if job.kinds & {"latent", "image_latent", "clip"}:
        frames["target"] = target_frames(sample, first_only="latent" not in job.kinds, decoder=decoder)
    if "control_latent" in job.kinds:
        controls = range(len(sample.controls))
        frames |= {f"control{number}": control_frames(sample, number, decoder=decoder) for number in controls}
    if "mask" in job.kinds:
        frames["mask"] = mask_frames(sample)
    for path, source in sample.files():
        source.require_unchanged(path)
    return frames


class Models:
    """The encoders, each loaded when it is first needed, and what decodes for them.

    Raises:
        UsageError: the decoder cannot run here.
    """

    def __init__(
        self, options: CacheLatents, model: Model, clip: Path | None, encoders: Mapping[Kind, Encoder]
    ) -> None:
        self.options = options
        self.model = model
        self.clip = clip
        self.encoders = encoders
        self.decoder = open_decoder(options.decoder, options.device, options.local_rank)
        self._family = family(model)
        self._vaes: dict[str, LatentEncoder] = {}

    def encode(self, batch: list[Job], frames: list[Frames]) -> Iterator[tuple[Need, dict[str, "torch.Tensor"]]]:
        """The tensors of every need of a batch.

        Raises:
            WangenError: the memory is full.
        """
        from wangen.runtime.devices import enough_memory, exact

        sample = batch[0].sample
        what = f"encoding {sample.name} ({sample.count} frames of {sample.size[0]}x{sample.size[1]})"
        with enough_memory(what, MEMORY_CURE), exact(self.encoders["latent"].dtype):
            results = self._results(batch[0], frames)
        for number, job in enumerate(batch):
            for need in job.needs:
                tensor = results[_source(need)][number].contiguous()
                yield need, {TENSOR_NAMES.get(need.recipe.kind, "latent"): tensor}

    def encode_one(self, need: Need) -> dict[str, "torch.Tensor"]:
        """The tensors of one need by itself.

        Raises:
            WangenError: a source cannot be decoded, or the memory is full.
        """
        job = Job(need.sample, (need,))
        ((_, tensors),) = self.encode([job], [_frames(job, self.decoder)])
        return tensors

    def _results(self, first: Job, frames: list[Frames]) -> dict[str, "torch.Tensor"]:
        """For each kind of result (control media by number) a batch; all jobs miss what the first one does."""
        import numpy as np
        import torch

        results: dict[str, torch.Tensor] = {}
        videos = {name: torch.from_numpy(np.stack([each[name] for each in frames])) for name in frames[0]}
        names = [name for name in videos if name.startswith("control")]
        if "latent" in first.kinds:
            results["latent"] = self._latents(videos["target"], first)
        if "image_latent" in first.kinds:
            image = videos["target"][:, :, :1]
            single = results.get("latent") if first.sample.count == 1 else None
            results["image_latent"] = self._latents(image, first, first.sample.count) if single is None else single
        if "clip" in first.kinds:
            results["clip"] = self._views(videos["target"][:, :, 0])
        if "mask" in first.kinds:
            results["mask"] = shrink_mask(videos["mask"], self.model)
        return results | {name: self._latents(videos[name], first) for name in names}

    def _latents(self, video: "torch.Tensor", first: Job, condition_frames: int = 1) -> "torch.Tensor":
        """Latents of a video, or with more `condition_frames` than one the condition that an image is."""
        from wangen.runtime.devices import DTYPES, within_range

        def run(dtype: str) -> "torch.Tensor":
            vae = self._vae(dtype)
            if condition_frames == 1:
                return vae.encode(video, cache_cpu=self.options.vae_cache_cpu, tile_px=self.options.vae_tile)
            return vae.encode_condition(
                video, condition_frames, cache_cpu=self.options.vae_cache_cpu, tile_px=self.options.vae_tile
            )

        dtype = self.encoders["latent"].dtype
        return narrowed(within_range(run, dtype, first.sample.name).cpu(), DTYPES[dtype])

    def _vae(self, dtype: str) -> LatentEncoder:
        if dtype not in self._vaes:
            from wangen.runtime.devices import DTYPES, choose_device

            device = choose_device(self.options.device, self.options.local_rank)
            self._vaes[dtype] = self._family.load_latent_encoder(
                self.options.vae, dtype=DTYPES[dtype], device=device, plain=self.options.plain
            )
            log.info("  VAE in %s on %s", dtype, device)
        return self._vaes[dtype]

    def _views(self, images: "torch.Tensor") -> "torch.Tensor":
        """CLIP's tokens (B, 257, 1280) of images (B, 3, H, W) uint8."""
        tokens: torch.Tensor = self._family.encode_images(self._image_encoder, images.float() / 127.5 - 1)
        return tokens.cpu()

    @cached_property
    def _image_encoder(self) -> Any:
        from wangen.runtime.devices import DTYPES, choose_device

        assert self.clip is not None, "CLIP entries are needed only when it is given"
        device, dtype = choose_device(self.options.device, self.options.local_rank), self.encoders["clip"].dtype
        log.info("  CLIP in %s on %s", dtype, device)
        return self._family.load_image_encoder(self.clip, dtype=DTYPES[dtype], device=device)


def _source(need: Need) -> str:
    """Which result of a job is meant: the kind, and of several control media which one."""
    kind = need.recipe.kind
    if kind != "control_latent":
        return kind
    keys = [Recipe(kind, need.sample.control_recipe(n), "").content_key for n in range(len(need.sample.controls))]
    return f"control{keys.index(need.recipe.content_key)}"


def shrink_mask(masks: "torch.Tensor", model: Model) -> "torch.Tensor":
    """How much of each latent cell is masked in, (B, 1, F, h, w) in [0, 1].

    Args:
        masks: (B, 1, T, H, W) uint8, 255 for what counts; T = 4k + 1.
        model: its strides: the first frame alone makes a latent frame, then every four do.
    """
    import torch
    from torch.nn.functional import avg_pool3d

    cells = avg_pool3d(masks.float() / 255, (1, model.spatial_stride, model.spatial_stride))
    later = avg_pool3d(cells[:, :, 1:], (model.temporal_stride, 1, 1)) if cells.shape[2] > 1 else cells[:, :, 1:]
    return torch.cat([cells[:, :, :1], later], dim=2)
