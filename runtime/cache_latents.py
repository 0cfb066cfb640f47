"""`cache_latents`: images and clips -> latents, conditions and views in the cache.

What to encode is decided before anything is decoded, and torch is imported only when there is something to do.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from wangen.generator import headers, kinds
from wangen.generator.cautions import clip_cautions
from wangen.generator.session import Report
from wangen.generator.steps import CacheLatents
from wangen.profiles import Model
from wangen.runtime.cache import NO_ENCODER, Encoder, Folder, Kind, decoded_by
from wangen.runtime.cache.needed import DatasetNeeds
from wangen.runtime.caching import fill
from wangen.runtime.decoders.choice import decoder_name, open_decoder
from wangen.runtime.models import model_of_cache, vae_identity
from wangen.runtime.needs import Work, latent_kinds
from wangen.runtime.rocm import on_cpu, vae_dtype
from wangen.runtime.room import require_room
from wangen.runtime.samples import Sample, by_cache_folder, read_samples

log = logging.getLogger("wangen")


def run(options: CacheLatents) -> Report:
    """Encode what is not in the cache, then remove entries that no item needs.

    Raises:
        WangenError: a source cannot be read, weights are of another kind, values are not finite, the disk is full.
    """
    model = model_of_cache(options.task, vae=options.vae, i2v=options.i2v or _implies_i2v(options))
    samples = read_samples(options, model, make_folders=not options.debug_mode)
    say_cautions(samples)
    if options.debug_mode:
        return _contact_sheet(options, samples)
    clip = chosen_clip(options, model, samples)
    encoders = latent_encoders(options, model, clip)

    from wangen.runtime import encoding  # it imports torch where it encodes, not here

    def encode(work: Work) -> int:
        require_room(work.missing, work.encoders, model)
        return encoding.encode(options, model, clip, work)

    return fill(options, samples, encoders, encode)


def say_cautions(samples: Sequence[Sample]) -> None:
    """Say which clips are not encoded as people see them, and what to do about it."""
    for caution in clip_cautions({path: source.facts for sample in samples for path, source in sample.files()}):
        log.warning("  %s", caution)


def _implies_i2v(options: CacheLatents) -> bool:
    """In scripts of other tools `--clip` alone means image-to-video."""
    return options.task is None and options.clip is not None


def chosen_clip(options: CacheLatents, model: Model, samples: Sequence[Sample]) -> Path | None:
    """The image encoder to use, with a word on one that is not used or not there.

    Raises:
        WangenError: the file is no such image encoder.
    """
    if options.clip and not model.has_clip:
        log.warning("  --clip: %s does not look at images through CLIP, so the file is not used", model.name)
        return None
    if options.clip:
        kinds.expect(options.clip, model.kind_of("clip"), "--clip", model.name)
    elif model.has_clip and _has_views(options, samples):
        log.warning("  no --clip: the cache holds CLIP's views of this dataset, and training will want one of every "
                    "clip; give --clip again where some are missing or stale, as check_cache says")  # fmt: skip
    elif model.has_clip:
        log.warning("  no --clip: %s is cached without CLIP's view of the first frame, and will train without its "
                    "image branch; give --clip later and only that is added", model.name)  # fmt: skip
    if model.condition == "image" and any(sample.count == 1 for sample in samples):
        log.warning("  single images with %s: the condition is the very image that is to be made, so nothing is "
                    "learned from them; use clips", model.name)  # fmt: skip
    return options.clip


def _has_views(options: CacheLatents, samples: Sequence[Sample]) -> bool:
    """Whether an earlier run had `--clip`, so that training takes the image branch."""
    folders = map(Folder, by_cache_folder(samples))
    return any(DatasetNeeds(folder, options.dataset, "clip").encoder for folder in folders)


def latent_encoders(options: CacheLatents, model: Model, clip: Path | None) -> Mapping[Kind, Encoder]:
    """What makes each kind, and in which precision. Torch is asked only when that depends on the device.

    Raises:
        UsageError: `--decoder auto`, and no such device as `--device` says.
        WangenError: a weight file cannot be read.
    """
    decoder = decoder_name(options.decoder, options.device, options.local_rank)
    vae = Encoder(vae_identity(options.vae, options.vae_tile, decoder), _vae_dtype(options))
    made_by: dict[Kind, Encoder] = dict.fromkeys(latent_kinds(model, clip=clip is not None), vae)
    made_by["mask"] = NO_ENCODER
    if clip:
        made_by["clip"] = Encoder(decoded_by(headers.identity(clip, "--clip"), decoder), _clip_dtype(options))
    return made_by


def _vae_dtype(options: CacheLatents) -> str:
    dtype = vae_dtype(options.vae_dtype, announce=True) or ("float32" if on_cpu(options.device) else None)
    if dtype is None:
        from wangen.runtime.devices import choose_device, choose_vae_dtype

        dtype = choose_vae_dtype(None, choose_device(options.device, options.local_rank))
    return dtype


def _clip_dtype(options: CacheLatents) -> str:
    if options.clip_dtype or on_cpu(options.device):
        return options.clip_dtype or "float32"
    from wangen.runtime.devices import choose_clip_dtype, choose_device

    return choose_clip_dtype(choose_device(options.device, options.local_rank))


def _contact_sheet(options: CacheLatents, samples: list[Sample]) -> Report:
    """What `--debug_mode` asks for, in place of encoding."""
    from wangen.runtime.contact_sheet import write_sheet

    assert options.debug_mode
    folder = options.report_dir or options.dataset.parent
    decoder = open_decoder(options.decoder, options.device, options.local_rank)
    path = write_sheet(samples, options.debug_mode, folder / f"{options.dataset.stem}_sheet" / "index.html", decoder)
    return Report(
        folder=folder,
        summary=f"nothing encoded; open {path}",
        inputs={"dataset_config": options.dataset, "samples": len(samples)},
        result={"sheet": path},
    )
