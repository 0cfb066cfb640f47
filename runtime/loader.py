"""Cached entries -> batches: which samples, in which order, and their tensors."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from wangen.generator.bulk import bulk
from wangen.generator.errors import WangenError, many
from wangen.generator.steps import Train
from wangen.generator.toml_values import WHITE
from wangen.profiles import Model
from wangen.runtime.cache import NO_ENCODER, TEXT_KINDS, Encoder, Entry, Folder, Kind, load
from wangen.runtime.needs import (
    Need,
    expected_encoder,
    foreign_latents,
    judge,
    listing,
    problem,
    recipes_of,
    step_for,
)
from wangen.runtime.on_the_fly import (
    Live,
    command_line,
    encode_missing,
    encodes,
    given_encoders,
    live_entries,
    say_others,
)
from wangen.runtime.samples import Sample, by_cache_folder
from wangen.runtime.shared_encoding import Held, Place, place_of
from wangen.runtime.training.ranks import Ranks

log = logging.getLogger("wangen")

MASK_CHANNELS = 4
"""Channels of the condition that say which latent frames are given."""


AnyEntry = Entry | Held | Live
"""Of the cache, kept in memory, or encoded whenever it is read."""


@dataclass(frozen=True)
class CachedSample:
    """A sample with its entries; those that the model or the dataset does not ask for are None.

    Attributes:
        sample: what was encoded.
        latent: its latent.
        texts: the embeddings of its captions, one or more.
        empty: the empty prompt, where it is drawn or is what guidance leads away from.
        image_latent: the condition on its first frame.
        clip: CLIP's view of it.
        mask: which latent cells count in the loss.
        controls: the latents of its control images, of models that edit.
        twin: how many samples before it have the same latent: other captions or control images of one picture.
    """

    sample: Sample
    latent: AnyEntry
    texts: tuple[AnyEntry, ...]
    empty: AnyEntry | None = None
    image_latent: AnyEntry | None = None
    clip: AnyEntry | None = None
    mask: AnyEntry | None = None
    controls: tuple[AnyEntry, ...] = ()
    twin: int = 0

    @property
    def key(self) -> str:
        """What seeds the noise, timestep and caption of its draws: the latent's content, with a number if shared."""
        return f"{self.latent.content_key} {self.twin}" if self.twin else self.latent.content_key

    @property
    def entries(self) -> list[AnyEntry]:
        """All that there are."""
        found = (self.latent, *self.texts, self.empty, self.image_latent, self.clip, self.mask, *self.controls)
        return [entry for entry in found if entry is not None]


@dataclass(frozen=True)
class Draw:
    """One use of a sample in an epoch: which sample, which of its repeats, and which caption (-1: the empty one).

    `position` counts the uses from the first epoch on, in the order in which they come.
    """

    index: int
    repeat: int
    caption: int = 0
    position: int = 0


@dataclass(frozen=True)
class Batch:
    """What one forward pass gets.

    Attributes:
        latents: (B, C, F, h, w) clean latents in float32.
        texts: B embeddings (L, dim).
        names: B sample names, for messages: two files may have the same.
        keys: B keys of the samples, which identify them wherever their files lie.
        weights: (B,) how much each item's loss counts: less, or more, for those of regularisation sets.
        condition: (B, 4 + C, F, h, w) of image-to-video: which latent frames are given, and the encoded first frame.
        image_tokens: (B, N, dim) CLIP's view of the first frame.
        loss_mask: (B, 1, F, h, w) in [0, 1]: how much each latent cell counts.
        controls: for each item the latents of its control images, (C, F, h, w) each.
    """

    latents: torch.Tensor
    texts: list[torch.Tensor]
    names: list[str]
    keys: list[str]
    weights: torch.Tensor
    condition: torch.Tensor | None = None
    image_tokens: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    controls: list[list[torch.Tensor]] | None = None


def find_entries(
    options: Train, model: Model, samples: Sequence[Sample], ranks: Ranks | None = None
) -> list[CachedSample]:
    """The cache entries of every sample, each kind from one encoder.

    With `--cache_mode auto`, `--cache_latents` or `--cache_latents_to_disk` what the cache lacks is encoded first, and
    what it has of other weights than those that are given; with `--cache_mode realtime` no entry is looked at.

    Args:
        options: of training.
        model: what is trained.
        samples: of the whole dataset.
        ranks: the processes that share the encoding, who all call this; None for one alone.

    Raises:
        WangenError: entries are missing or stale, the message lists them with the commands to run; or it is open
            which of two encoders' entries to take.
    """
    folders = [Folder(path) for path in by_cache_folder(samples)]
    kinds = _kinds(options, model, samples, folders)
    if options.cache_mode == "realtime":
        live = live_entries(options, model, samples, kinds)
        return _told_apart(_cached(sample, kinds, live) for sample in samples)
    encoders = _encoders(options, model, samples, kinds, folders)
    needs = _judged(samples, encoders, folders)
    held: dict[Place, Held] = {}
    ranks, lacking = ranks or Ranks(), _bad(needs)
    if encodes(options) and ranks.any(bool(lacking)):  # all of them, or none: they exchange what they make
        held = encode_missing(options, model, samples, kinds, lacking, ranks)
        if options.cache_latents_to_disk:
            folders = [Folder(folder.path) for folder in folders]
            needs = _judged(samples, _encoders(options, model, samples, kinds, folders), folders)
    bad = [need for need in _bad(needs) if place_of(need) not in held]
    if bad:
        raise _lacking(options, bad)
    if foreign := foreign_latents((need for need in needs if place_of(need) not in held), model, options.dataset):
        raise WangenError(foreign, where=str(options.dataset), cure=f"run cache_latents with --task {model.name}")
    entries = {place_of(need): held.get(place_of(need)) or need.verdict.entry for need in needs}
    with bulk():
        return _told_apart(_cached(sample, kinds, entries) for sample in samples)


def _told_apart(samples: Iterable[CachedSample]) -> list[CachedSample]:
    """The samples, those of one latent with a number each: they would get one noise and timestep in every epoch."""
    before: Counter[str] = Counter()
    found = []
    for cached in samples:
        key = cached.latent.content_key
        found.append(replace(cached, twin=before[key]) if before[key] else cached)
        before[key] += 1
    return found


def _kinds(options: Train, model: Model, samples: Sequence[Sample], folders: Sequence[Folder]) -> list[Kind]:
    """What this training run reads."""
    kinds: list[Kind] = ["latent", "text_encoder_output"]
    if options.caption_dropout or (options.sample_continuations and options.continuation_guidance > 1):
        kinds.append("empty_text_encoder_output")
    if model.condition == "image":
        kinds.append("image_latent")
    if model.has_clip:
        live = options.cache_mode == "realtime"
        if options.clip or (not live and expected_encoder(folders, samples, "clip", options.dataset)):
            kinds.append("clip")
        else:
            log.warning("  the cache holds no CLIP views: %s trains without its image branch", model.name)
    if any(sample.mask for sample in samples):
        kinds.append("mask")
    if model.condition == "controls":
        kinds.append("control_latent")
    elif any(sample.controls for sample in samples):
        log.warning("  %s takes no control media: those of the dataset are not used", model.name)
    return kinds


def _encoders(
    options: Train, model: Model, samples: Sequence[Sample], kinds: Iterable[Kind], folders: Sequence[Folder]
) -> dict[Kind, Encoder | None]:
    """What must have made the entries of each kind: what is given where training may encode, else the last encoder."""
    made_by: dict[Kind, Encoder | None] = {"mask": NO_ENCODER}
    if encodes(options):
        made_by |= given_encoders(options, model, samples)
    for kind in kinds:
        if kind not in made_by:
            made_by[kind] = expected_encoder(folders, samples, kind, options.dataset)
    if not encodes(options):
        say_others(options, model, made_by)
    return {kind: made_by[kind] for kind in kinds}


@bulk()
def _judged(
    samples: Sequence[Sample], encoders: Mapping[Kind, Encoder | None], folders: Sequence[Folder]
) -> list[Need]:
    return [need for kind, encoder in encoders.items() for need in judge(folders, samples, kind, encoder)]


def _bad(needs: Iterable[Need]) -> list[Need]:
    return [need for need in needs if need.verdict.state != "valid"]


def _lacking(options: Train, bad: Sequence[Need]) -> WangenError:
    steps = dict.fromkeys(step_for(need.recipe.kind) for need in bad)
    needed = ["clip"] if any(need.recipe.kind == "clip" for need in bad) else []
    lines = [command_line(step, options, needed=needed) for step in steps]
    return WangenError(
        "\n".join([f"the cache lacks {many(len(bad), 'entry', 'entries')}", *listing([problem(need) for need in bad])]),
        where=str(options.dataset),
        cure=f"run {' and '.join(lines)} (or let training encode: --cache_latents_to_disk --vae … --t5 …)",
    )


class CacheUse(NamedTuple):
    """Where the entries of a run come from; equal content and equal captions share theirs.

    Attributes:
        from_cache: so many are read from the cache.
        computed: so many are encoded by the run itself.
    """

    from_cache: int
    computed: int

    def mode(self, asked_for: str) -> str:
        """`cached` or, where some are encoded, `realtime` if `--cache_mode` asks for that, else `mixed`."""
        return "cached" if not self.computed else "realtime" if asked_for == "realtime" else "mixed"

    @property
    def share(self) -> float:
        """How many of all are from the cache, 0 to 1."""
        return self.from_cache / max(1, self.from_cache + self.computed)


def cache_use(samples: Sequence[CachedSample]) -> CacheUse:
    """Where the entries of these samples come from."""
    entries = {entry.key: entry for cached in samples for entry in cached.entries}
    from_cache = sum(isinstance(entry, Entry) for entry in entries.values())
    return CacheUse(from_cache, len(entries) - from_cache)


def _cached(sample: Sample, kinds: Sequence[Kind], entries: Mapping[Place, AnyEntry | None]) -> CachedSample:
    found: dict[str, list[AnyEntry]] = {}
    for kind in kinds:
        for recipe in recipes_of(sample, kind):
            entry = entries[sample.entry.cache_directory, recipe.content_key]
            assert entry is not None, sample.name  # every verdict was valid
            found.setdefault(kind, []).append(entry)
    (latent,), texts = found["latent"], found["text_encoder_output"]
    single: dict[str, Any] = {
        name: found[kind][0]
        for name, kind in (("empty", TEXT_KINDS[1]), ("image_latent",) * 2, ("clip",) * 2, ("mask",) * 2)
        if kind in found
    }
    return CachedSample(sample, latent, tuple(texts), controls=tuple(found.get("control_latent", ())), **single)


def background_of(samples: Iterable[CachedSample]) -> str:
    """The colour behind what is transparent in the pictures of a dataset, `#rrggbb`; white where its blocks differ."""
    colors = {cached.sample.entry.background_color for cached in samples}
    return colors.pop() if len(colors) == 1 else WHITE


def latent_of(cached: CachedSample) -> torch.Tensor:
    """What is learned, (C, F, h, w) in float32, from the cache.

    Raises:
        CorruptEntryError: the entry was damaged since it was judged.
    """
    return _tensors(cached.latent)["latent"].float()


def read_batch(samples: Sequence[CachedSample], draws: Sequence[Draw], prior_loss_weight: float = 1.0) -> Batch:
    """The tensors of one batch, from the cache; the losses of regularisation sets count `prior_loss_weight`.

    Raises:
        CorruptEntryError: an entry was damaged since it was judged.
    """
    chosen = [samples[draw.index] for draw in draws]
    latents = torch.stack([latent_of(cached) for cached in chosen])
    return Batch(
        latents=latents,
        texts=[_text(cached, draw) for cached, draw in zip(chosen, draws, strict=True)],
        names=[cached.sample.name for cached in chosen],
        keys=[cached.key for cached in chosen],
        weights=torch.tensor([prior_loss_weight if cached.sample.entry.is_reg else 1.0 for cached in chosen]),
        condition=_condition(chosen),
        image_tokens=_stacked([cached.clip for cached in chosen], "clip"),
        loss_mask=_loss_mask(chosen, latents),
        controls=_controls(chosen),
    )


def _controls(chosen: Sequence[CachedSample]) -> list[list[torch.Tensor]] | None:
    if not any(cached.controls for cached in chosen):
        return None
    return [[_tensors(entry)["latent"].float() for entry in cached.controls] for cached in chosen]


def _text(cached: CachedSample, draw: Draw) -> torch.Tensor:
    entry = cached.empty if draw.caption < 0 else cached.texts[draw.caption]
    assert entry is not None, "the empty prompt is read whenever it can be drawn"
    return _tensors(entry)["embedding"]


def _tensors(entry: AnyEntry) -> Mapping[str, torch.Tensor]:
    return load(entry) if isinstance(entry, Entry) else entry.tensors


def _stacked(entries: Sequence[AnyEntry | None], name: str) -> torch.Tensor | None:
    """One tensor of every entry as a batch in float32; None when there are no entries: all have one, or none has."""
    found = [_tensors(entry)[name].float() for entry in entries if entry is not None]
    return torch.stack(found) if found else None


def _condition(chosen: Sequence[CachedSample]) -> torch.Tensor | None:
    images = _stacked([cached.image_latent for cached in chosen], "latent")
    return None if images is None else first_frame_condition(images)


def first_frame_condition(images: torch.Tensor) -> torch.Tensor:
    """What image-to-video is given, as in the official code: 1 for the first latent frame, then the encoded image.

    Args:
        images: (B, C, F, h, w) from `LatentEncoder.encode_condition`.

    Returns:
        (B, 4 + C, F, h, w).
    """
    given = torch.zeros(len(images), MASK_CHANNELS, *images.shape[2:])
    given[:, :, 0] = 1
    return torch.cat([given, images], dim=1)


def _loss_mask(chosen: Sequence[CachedSample], latents: torch.Tensor) -> torch.Tensor | None:
    """How much each latent cell counts; all of it where an item has no mask."""
    if not any(cached.mask for cached in chosen):
        return None
    masks = torch.ones(len(latents), 1, *latents.shape[2:])
    for row, cached in zip(masks, chosen, strict=True):
        if cached.mask is not None:
            row.copy_(_tensors(cached.mask)["mask"])
    return masks
