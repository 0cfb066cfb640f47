"""Encoding inside `train`: what the cache lacks is made before the first step, or all of it whenever it is read."""

import json
import logging
import os
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wangen import profiles
from wangen.generator import headers
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.lock import IN_SCRIPT
from wangen.generator.session import report_files
from wangen.generator.steps import CacheLatents, CacheText, Train
from wangen.generator.table import joined
from wangen.profiles import Model
from wangen.runtime import cache_latents, cache_text, encoding
from wangen.runtime.cache import TEXT_KINDS, Encoder, Folder, Kind, Recipe, Verdict, decoded_by
from wangen.runtime.cache.words import encoder_words
from wangen.runtime.decoders.choice import decoder_name
from wangen.runtime.decoders.pyav import PYAV
from wangen.runtime.models import expect_vae, model_of_cache, text_encoder_identity, vae_identity, way_of
from wangen.runtime.needs import (
    WORDS,
    Need,
    Work,
    encoders_before,
    expected_encoder,
    judge,
    wanted,
)
from wangen.runtime.samples import Sample, by_cache_folder
from wangen.runtime.shared_encoding import Held, Place, exchange, place_of, share_of
from wangen.runtime.training.ranks import Ranks

if TYPE_CHECKING:
    import torch

log = logging.getLogger("wangen")

NOT_LOOKED_FOR = Verdict("missing", "it is encoded whenever it is drawn")


@dataclass(frozen=True)
class Live:
    """An entry that is encoded whenever it is read, and never kept."""

    key: str
    content_key: str
    path: Path
    encode: "Callable[[], Mapping[str, torch.Tensor]]"

    @property
    def tensors(self) -> "Mapping[str, torch.Tensor]":
        """What the cache would hold; an encoder is loaded when it is first asked.

        Raises:
            WangenError: a source cannot be decoded, the memory is full, or values are not finite.
        """
        return self.encode()


@dataclass
class MemoryWriter:
    """Stands where a cache writer does and keeps the entries in memory; values are judged all the same."""

    folder: Path
    held: dict[Place, Held]
    num_bytes: int = 0

    def __enter__(self) -> "MemoryWriter":
        return self

    def __exit__(self, *_exception: object) -> None:
        """Nothing has to be closed."""

    def claim(self, _recipe: Recipe, _encoder: Encoder) -> Literal["mine"]:
        """Memory is this process's own."""
        return "mine"

    def put(self, recipe: Recipe, encoder: Encoder, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Keep an entry.

        Raises:
            WangenError: a value is not finite, or all are zero.
        """
        from wangen.runtime.cache.writer import judge_values

        judge_values(recipe, encoder, tensors)
        path = self.folder / recipe.file_name(encoder)
        self.held[self.folder, recipe.content_key] = Held(recipe.key(encoder), recipe.content_key, path, tensors)
        self.num_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def commit(self) -> None:
        """Nothing is pending."""

    def commit_if_due(self) -> None:
        """Nothing is pending."""


def encodes(options: Train) -> bool:
    """Whether training makes what the cache lacks; in mode `auto` it does so where it is given weights."""
    given = options.cache_mode == "auto" and (options.vae is not None or options.t5 is not None)
    return given or options.cache_latents or options.cache_latents_to_disk


def given_encoders(options: Train, model: Model, samples: Sequence[Sample]) -> dict[Kind, Encoder]:
    """What the weights that training is given would make each kind with: entries of another encoder are stale.

    What a flag leaves open (the precision, the tiles of the VAE) is as in the entries that are there.

    Returns:
        Nothing of a kind whose weights are not given: its entries are those of the last caching run.

    Raises:
        WangenError: a file is of another kind, or cannot be read.
    """
    found: dict[Kind, Encoder] = {}
    if options.vae:
        expect_vae(options.vae, model)
        step = _latents_step(options, model, samples)
        found |= cache_latents.latent_encoders(step, model, options.clip if model.has_clip else None)
    if options.t5:
        found |= dict.fromkeys(TEXT_KINDS, cache_text.text_encoder(_text_step(options, model, samples)))
    return found


def say_others(options: Train, model: Model, made_by: Mapping[Kind, Encoder | None]) -> None:
    """Warn where weights that are given, such as those of samples, are not those that made the cache.

    Args:
        options: of a training, or what is read as it is, that takes the cache as it is.
        model: what is trained.
        made_by: the encoder of each kind's entries.
    """
    judged: tuple[tuple[str, str, Kind], ...] = (
        ("vae", "cache_latents", "latent"),
        ("t5", "cache_text", TEXT_KINDS[0]),
    )
    for flag, step, kind in judged:
        path, encoder = getattr(options, flag), made_by.get(kind)
        with suppress(WangenError):  # where nothing is made with them, it is of no account that they cannot be read
            if path and encoder and not _is_of(options, model, flag, path, encoder.identity):
                log.warning("  the %s in the cache are of another %s than --%s %s, and are taken as they are: run %s "
                            "with it first, or train with --cache_mode auto", WORDS[kind], encoder_words(kind), flag,
                            path, step)  # fmt: skip


def _is_of(options: Train, model: Model, flag: str, path: Path, identity: str) -> bool:
    """Whether weights have this identity, rounded or not, in any tiles, by any decoder: samples may be made apart."""
    if flag == "vae":
        return way_of(path, {identity}) is not None
    forms = (text_encoder_identity(path, options.tokenizer, fp8=fp8, model=model) for fp8 in (False, True))
    return identity in forms


def encode_missing(
    options: Train, model: Model, samples: Sequence[Sample], read: Iterable[Kind], lacking: Sequence[Need], ranks: Ranks
) -> dict[Place, Held]:
    """Make the entries that the cache lacks, or has of other weights: on disk, or in memory, which are returned.

    Args:
        options: of training.
        model: what is trained.
        samples: of the whole dataset.
        read: all kinds that training reads.
        lacking: what is not valid.
        ranks: the processes that share the work; all of them have to come here.

    Raises:
        UsageError: no weights are given to make them with.
        WangenError: encoding fails.
    """
    lacks_text = [need.recipe.kind in TEXT_KINDS for need in lacking]
    step = _latents_step(options, model, samples) if False in lacks_text else None
    # What is wrong with the second shows before the first encodes anything.
    text_step = _text_step(options, model, samples) if True in lacks_text else None
    if not options.cache_latents_to_disk:
        for reason, count in Counter(f"{need.recipe.kind}: {need.verdict.reason}" for need in lacking).most_common():
            log.info("  %d to encode, %s", count, reason)
        return _in_memory(step, text_step, model, samples, set(read), ranks)
    if step:
        log.info("  %s", cache_latents.run(step).summary)
    if text_step:
        log.info("  %s", cache_text.run(text_step).summary)
    return {}


def _in_memory(
    step: CacheLatents | None,
    text_step: CacheText | None,
    model: Model,
    samples: Sequence[Sample],
    read: set[Kind],
    ranks: Ranks,
) -> dict[Place, Held]:
    """What is missing, of which this process encodes its share; a step that has nothing to do is None."""
    held: dict[Place, Held] = {}
    jobs: list[tuple[Work, Callable[[Work], int]]] = []
    if step:
        cache_latents.say_cautions(samples)
        clip = cache_latents.chosen_clip(step, model, samples)
        encoders = cache_latents.latent_encoders(step, model, clip)
        needed = {kind: encoder for kind, encoder in encoders.items() if kind in read}
        jobs.append((_work(samples, needed, held), partial(encoding.encode, step, model, clip)))
    if text_step:
        encoder = cache_text.text_encoder(text_step)
        work = _work(samples, dict.fromkeys((kind for kind in TEXT_KINDS if kind in read), encoder), held)
        jobs.append((work, partial(cache_text.encode, text_step, encoder)))
    for work, encode in jobs:
        encode(replace(work, missing=share_of(work.missing, ranks)))
    exchange(held, ranks)
    for work, encode in jobs:
        if left := [need for need in work.missing if place_of(need) not in held]:  # only this process sees it missing
            encode(replace(work, missing=left))
    return held


def live_entries(options: Train, model: Model, samples: Sequence[Sample], read: Iterable[Kind]) -> dict[Place, Live]:
    """An entry for everything that training reads, encoded when it is read by the code of the caching steps.

    Raises:
        UsageError: no weights are given.
        WangenError: they are of another kind.
    """
    step, text_step = _latents_step(options, model, samples), _text_step(options, model, samples)
    expect_vae(step.vae, model)
    cache_latents.say_cautions(samples)
    clip = cache_latents.chosen_clip(step, model, samples)
    encoder = cache_text.text_encoder(text_step)
    encoders = {**cache_latents.latent_encoders(step, model, clip), **dict.fromkeys(TEXT_KINDS, encoder)}
    pictures, texts = encoding.Models(step, model, clip, encoders), cache_text.Embedder(text_step, encoder)
    folders = [Folder(path) for path in by_cache_folder(samples)]
    found: dict[Place, Live] = {}
    for kind in read:
        make = texts.embed_one if kind in TEXT_KINDS else pictures.encode_one
        for sample, recipe, folder in wanted(folders, samples, kind):
            need = Need(sample, recipe, folder, NOT_LOOKED_FOR)
            path = folder.path / recipe.file_name(encoders[kind])
            found[folder.path, recipe.content_key] = Live(
                recipe.key(encoders[kind]), recipe.content_key, path, partial(_judged, make, need, encoders[kind])
            )
    return found


def _judged(
    make: "Callable[[Need], Mapping[str, torch.Tensor]]", need: Need, encoder: Encoder
) -> "Mapping[str, torch.Tensor]":
    """What an encoder makes of a need.

    Raises:
        WangenError: a value is not finite, or all are zero.
    """
    from wangen.runtime.cache.writer import judge_values

    tensors = make(need)
    judge_values(need.recipe, encoder, tensors)
    return tensors


def _work(samples: Sequence[Sample], encoders: Mapping[Kind, Encoder], held: dict[Place, Held]) -> Work:
    folders = [Folder(path) for path in by_cache_folder(samples)]
    needs = [need for kind, encoder in encoders.items() for need in judge(folders, samples, kind, encoder)]
    missing = [need for need in needs if need.verdict.state != "valid"]
    valid = [need for need in needs if need.verdict.state == "valid"]
    return Work(encoders, missing, valid, lambda folder: MemoryWriter(folder, held))


def _latents_step(options: Train, model: Model, samples: Sequence[Sample]) -> CacheLatents:
    """The caching step with what the training step says of it."""
    if options.vae is None:
        raise UsageError(f"{_asked_by(options)} needs --vae to encode what the cache lacks", cure="give --vae")
    tile, before = _way_before(options, samples, options.vae)
    device = options.vae_device or options.device
    decoder = decoder_name(options.decoder or before, device)
    dtype = options.vae_dtype or _dtype_before(options, samples, "latent", vae_identity(options.vae, tile, decoder))
    clip = options.clip if model.has_clip else None
    viewed = decoded_by(headers.identity(clip, "--clip"), decoder) if clip else ""
    clip_dtype = _dtype_before(options, samples, "clip", viewed) if clip else None
    return CacheLatents(
        dataset_config=options.dataset_config, manifest=options.manifest,
        resolution=options.resolution, smoke=options.smoke, task=options.task,
        vae=options.vae, vae_dtype=dtype, vae_tile=tile, vae_cache_cpu=options.vae_cache_cpu,  # type: ignore[arg-type]
        clip=options.clip, clip_dtype=clip_dtype,  # type: ignore[arg-type]
        decoder=None if decoder == PYAV.name else decoder, device=device, keep_cache=True,  # type: ignore[arg-type]
    )  # fmt: skip


def _text_step(options: Train, model: Model, samples: Sequence[Sample]) -> CacheText:
    if options.t5 is None:
        raise UsageError(f"{_asked_by(options)} needs --t5 to encode the captions that the cache lacks",
                         cure="give --t5")  # fmt: skip
    identity = text_encoder_identity(options.t5, options.tokenizer, fp8=options.fp8_t5, model=model)
    dtype = options.t5_dtype or _dtype_before(options, samples, "text_encoder_output", identity)
    # A language model would be read anew for each item that is drawn; whole, it gives the same embeddings.
    whole = options.cache_mode == "realtime" and model.prompt is not None
    return CacheText(
        dataset_config=options.dataset_config, manifest=options.manifest,
        resolution=options.resolution, smoke=options.smoke, task=options.task,
        t5=options.t5, tokenizer=options.tokenizer, t5_dtype=dtype, fp8_t5=options.fp8_t5,  # type: ignore[arg-type]
        device=options.text_encoder_device or options.device, keep_cache=True, stream_t5=not whole,
    )  # fmt: skip


def _asked_by(options: Train) -> str:
    """The flag for whose sake something is encoded."""
    if options.cache_mode != "cached":
        return f"--cache_mode {options.cache_mode}"
    return "--cache_latents" if options.cache_latents else "--cache_latents_to_disk"


def _dtype_before(options: Train, samples: Sequence[Sample], kind: Kind, identity: str) -> str | None:
    """The precision of the entries that are there already, so that what is added fits them."""
    if options.cache_mode == "realtime":  # it looks at no entries
        return None
    folders = [Folder(path) for path in by_cache_folder(samples)]
    encoder = expected_encoder(folders, samples, kind, options.dataset, identity=identity)
    return encoder.dtype if encoder else None


def _way_before(options: Train, samples: Sequence[Sample], vae: Path) -> tuple[int, str]:
    """In which tiles, 0 for none, and by which decoder this VAE made the latents that are there, if it did."""
    usual = (0, PYAV.name)
    if options.cache_mode == "realtime":  # it looks at no entries
        return usual
    folders = [Folder(path) for path in by_cache_folder(samples)]
    before = {encoder.identity for encoder in encoders_before(folders, samples, "latent", options.dataset)}
    return way_of(vae, before) or usual


_SAID: Mapping[str, tuple[str, ...]] = {
    "cache_latents": ("vae", "vae_dtype", "vae_tile", "decoder", "clip", "clip_dtype"),
    "cache_text": ("t5", "tokenizer", "t5_dtype", "fp8_t5"),
}
"""The flags of a caching step that decide its entries' encoder."""

_WEIGHTS = ("vae", "clip", "t5", "tokenizer")


def command_line(step: str, options: Train, *, needed: Iterable[str] = ()) -> str:
    """What to type to run a caching step: the script's line, the line that ran it before, or one to fill in.

    Args:
        step: `cache_latents` or `cache_text`.
        options: of training.
        needed: flags that must be there whatever ran before, beside the weights of the step itself.
    """
    if script := os.environ.get(IN_SCRIPT):
        return f"{Path(script).name} {step}"
    named = "--manifest" if options.manifest else "--dataset_config"
    words = ["wangen", step, named, str(options.dataset), "--task", options.task]
    if options.resolution != "all":
        words += ["--resolution", options.resolution]
    words += ["--smoke"] if options.smoke else []
    before = _settings_before(step, options)
    for flag in _SAID[step]:
        value = getattr(options, flag, None) or before.get(flag)
        if value:
            words += [f"--{flag}"] if value is True else joined(flag, str(value))
        elif flag in ("vae", "t5", *needed):
            words += [f"--{flag}", f"{flag.upper()}_FILE"]
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def _settings_before(step: str, options: Train) -> dict[str, Any]:
    """The settings in the report that the step left beside the dataset.

    Without files that are not there now, and without any of another family of models: they are no weights of this one.
    """
    folder = options.report_dir or options.dataset.parent
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError, IndexError, WangenError):
        settings = dict(json.loads(report_files(folder, step)[0].read_text(encoding="utf-8"))["settings"])
        before = model_of_cache(settings.get("task"))
        related = before.architecture == profiles.model(options.task).architecture
        gone = [flag for flag in _WEIGHTS if settings.get(flag) and not (related and Path(settings[flag]).exists())]
        return {flag: value for flag, value in settings.items() if flag not in gone}
    return {}
