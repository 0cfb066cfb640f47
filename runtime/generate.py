"""`generate`: prompts and first frames -> videos and images, along diffusers' schedulers, with or without LoRAs.

The way: flags, with what `--from` and the model say -> which videos are not there yet -> their scenes (texts, first
frames) -> transformers, loaded once -> one video after the other, each written when it is done.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wangen import profiles
from wangen.generator.errors import many
from wangen.generator.generate_step import DEFAULT_TASK
from wangen.generator.sample_prompts import SamplePrompt
from wangen.generator.session import Report, with_flag
from wangen.generator.steps import Generate
from wangen.generator.tasks import require_supported
from wangen.generator.workspace import require_writable
from wangen.profiles import Model
from wangen.runtime.devices import choose_device
from wangen.runtime.models import family
from wangen.runtime.progress import progress
from wangen.runtime.sampling.options import files_of, names_file, prompts_of, require_files, resolved
from wangen.runtime.sampling.output import KEY, write_media
from wangen.runtime.sampling.repeat import compare, filled, identities, made_on, video_settings
from wangen.runtime.sampling.resume import place, place_numbered
from wangen.runtime.sampling.sampler import ExpertWeights, Lora, Request, Sampler, Settings, make_videos
from wangen.runtime.sampling.scenes import Encoders, make_scenes
from wangen.runtime.sampling.videos import Decoder

log = logging.getLogger("wangen")


@dataclass(frozen=True)
class Planned:
    """A video that is asked for.

    Attributes:
        prompt: with its seed and the sampler's settings.
        settings: what decides its pixels, as its file holds it.
        path: its file.
        is_done: that file is this very video, and is not made again.
        replaces: what is at `path` may go: the user named it, or it is this very video.
        name: the file without the number that other videos of that name make necessary.
    """

    prompt: SamplePrompt
    settings: Mapping[str, Any]
    path: Path
    is_done: bool
    replaces: bool
    name: Path

    def write(self, video: torch.Tensor, attention: str) -> "Planned":
        """Write its frames (3, T, H, W) in [-1, 1]; the file gets a number where another run has taken its name."""
        words = json.dumps({**self.settings, "attention": attention}, sort_keys=True)
        free = partial(place_numbered, path=self.name, settings=self.settings)
        written = write_media(self.path, video, self.prompt.fps, {KEY: words}, None if self.replaces else free)
        return replace(self, path=written)


def run(options: Generate) -> Report:
    """Sample every video that is asked for and is not there yet, and write it.

    Raises:
        UsageError: flags contradict each other or the model, a prompt file has mistakes.
        WangenError: a weight file is of another kind, a LoRA does not fit, the memory is full, a file cannot be
            written, or `--from` is given other weights.
    """
    options, told = filled(options)
    model = profiles.model(options.task or DEFAULT_TASK)
    require_supported(model, "sampling")
    device = choose_device(options.device)
    options = resolved(options, model, device)
    prompts = prompts_of(options, model)
    files = files_of(options, prompts)
    encoders = Encoders.of(options, plain=bool(options.plain))
    require_files(options, model, encoders)
    told_here = {**identities(options), **made_on(device.type)}
    settings = [{**video_settings(options, prompt), **told_here} for prompt in prompts]
    compare(options, told, told_here, settings[0])
    require_writable(files[0].parent)
    videos = [_placed(options, *each) for each in zip(prompts, settings, files, strict=True)]
    left = [video for video in videos if not video.is_done]
    num_kept = len(videos) - len(left)
    if num_kept:
        log.info("  %d of %d are there already (%s makes them again)", num_kept, len(videos),
                 with_flag("generate", "--fresh"))  # fmt: skip
    decoder = Decoder(
        family(model), encoders, device, "give --vae_cache_cpu or --vae_tile 256, or make a smaller video"
    )
    made, attention = _make(options, model, left, encoders, decoder, device) if left else ([], None)
    rest = iter(made)
    videos = [video if video.is_done else next(rest) for video in videos]
    return Report(
        folder=files[0].parent,
        summary=_summary(videos),
        inputs={name: getattr(options, name) for name in ("dit", "dit_high_noise", "vae", "t5", "clip", "lora_weight",
                                                          "lora_weight_high_noise")},
        counts={"videos": len(left), "kept": num_kept,
                "frames": sum(video.prompt.frames for video in left),
                "steps": sum(video.prompt.steps for video in left)},
        result={"file": videos[0].path, "files": [video.path for video in videos], "attention": attention,
                "dtype": options.dtype, "vae_dtype": decoder.dtype},
    )  # fmt: skip


def _placed(options: Generate, prompt: SamplePrompt, settings: Mapping[str, Any], file: Path) -> Planned:
    named = names_file(options.save_path)
    path, is_there = place(file, settings, numbered=not named)
    if path != file:
        log.info("  %s is another video: this one is %s", file, path.name)
    return Planned(prompt, settings, path, is_there and not options.fresh, named or is_there, file)


def _make(
    options: Generate, model: Model, videos: Sequence[Planned], encoders: Encoders, decoder: Decoder,
    device: torch.device,
) -> tuple[list[Planned], str]:  # fmt: skip
    """Sample videos and write each when it is done; returns them as written, and the attention kernel that ran."""
    kind, prompts = family(model), [video.prompt for video in videos]
    scenes = make_scenes(kind, model, prompts, encoders, device, "the prompts")
    sampler = Sampler(kind, model, _experts(options, model), _how(options), device)
    written = []
    with progress("sampling", sum(prompt.steps for prompt in prompts)) as advance:
        made = make_videos(map(Request, scenes), sampler, decoder, lambda _number: advance(1, ""))
        for video, planned in zip(made, videos, strict=True):
            written.append(planned.write(video.frames, sampler.attention))
            if len(videos) > 1 or written[-1].path != planned.path:
                log.info("  %s", written[-1].path)
    return written, sampler.attention


def _experts(options: Generate, model: Model) -> list[ExpertWeights]:
    low = zip(options.lora_weight, options.lora_multiplier, strict=True)
    experts = [ExpertWeights(options.dit, tuple(Lora(f"lora{n}", *lora) for n, lora in enumerate(low)))]
    if model.experts:
        assert options.dit_high_noise is not None, "refused before"
        high = zip(options.lora_weight_high_noise, options.lora_multiplier_high_noise, strict=True)
        loras = tuple(Lora(f"high{n}", *lora) for n, lora in enumerate(high))
        experts.append(ExpertWeights(options.dit_high_noise, loras, high_noise=True))
    return experts


def _how(options: Generate) -> Settings:
    assert options.dtype is not None, "resolved"
    return Settings(
        dtype=options.dtype,
        attention=options.attention or "auto",
        quantize=options.quantize or "none",
        blocks_to_swap=options.blocks_to_swap or 0,
        offload_inactive=options.offload_inactive_dit,
        compile=bool(options.compile),
        plain=bool(options.plain),
        boundary=options.timestep_boundary or 0.0,
        cure=_cure(options),
    )


def _cure(options: Generate) -> str:
    """What to do when the memory is full while a video is sampled: what is not done yet, cheapest first."""
    ways = []
    if options.quantize == "none":
        ways.append("--quantize int8 (or nf4)")
    if not options.plain:
        ways.append("a larger --blocks_to_swap" if options.blocks_to_swap else "--blocks_to_swap 20")
    return ", ".join(["give " + ways[0], *ways[1:], "a smaller --video_size or --video_length"]) if ways else (
        "give a smaller --video_size or --video_length")  # fmt: skip


def _summary(videos: Sequence[Planned]) -> str:
    sizes = [f"{many(one.frames, 'frame')} of {one.width}x{one.height}" for one in (video.prompt for video in videos)]
    if len(videos) == 1:
        return f"{videos[0].path} ({sizes[0]})"
    same = sizes[0] if len(set(sizes)) == 1 else "several sizes"
    return f"{len(videos)} videos in {videos[0].path.parent} ({same})"
