"""Samples on the way: prompts encoded once before the transformer loads, then videos at intervals, with all settings.

Nothing of a run changes by sampling: noise comes from generators of its own, modes and weights are put back.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wangen.generator.errors import WangenError
from wangen.generator.files import write_text
from wangen.generator.kinds import expect
from wangen.generator.steps import Train
from wangen.profiles import Model
from wangen.runtime.denoising import Given, Stage, denoise, flow_scheduler, initial_noise
from wangen.runtime.devices import (
    DTYPES,
    choose_clip_dtype,
    choose_decoder_dtype,
    choose_dtype,
    choose_vae_dtype,
    enough_memory,
    exact,
)
from wangen.runtime.generate import write_media
from wangen.runtime.loader import MASK_CHANNELS
from wangen.runtime.media import load_image
from wangen.runtime.models import Family
from wangen.runtime.progress import progress
from wangen.runtime.prompts import clean_prompt
from wangen.runtime.training.run import Run, Trainee
from wangen.runtime.training.sample_prompts import SamplePrompt
from wangen.runtime.training.timesteps import HIGH
from wangen.runtime.training.validation import evaluating

log = logging.getLogger("wangen")

FOLDER, LIST = "samples", "samples.jsonl"
_CURE = "use a smaller --w, --h or --f in the prompt file"
_COMFYUI_SAMPLERS: Mapping[str, str] = {"unipc": "uni_pc", "euler": "euler"}

Averages = Callable[[Trainee], AbstractContextManager[Any]]
"""While the context lasts a trainee has its averages for weights."""


@dataclass(frozen=True)
class Scene:
    """A prompt made ready, on the CPU.

    Attributes:
        prompt: with the sampler's settings.
        texts: its embedding (L, dim), and with guidance the negative prompt's.
        given: its first frame, as the model takes it.
    """

    prompt: SamplePrompt
    texts: list[torch.Tensor]
    given: Given


def make_scenes(
    kind: Family, model: Model, prompts: Sequence[SamplePrompt], options: Train, device: torch.device
) -> list[Scene]:
    """Encode prompts and first frames; call it before the transformer loads. The encoders are gone when it returns.

    Args:
        kind: the model's family.
        model: its profile.
        prompts: from `sample_prompts.read_prompts`.
        options: the weights: `--t5`, `--vae`, and `--clip` where the model looks through it.
        device: where to encode.

    Raises:
        WangenError: a file is of another kind, or the memory is full.
    """
    for flag in ("t5", "vae"):
        expect(getattr(options, flag), model.kind_of(flag), f"--{flag}", options.task)
    if model.experts and options.experts != "both":
        log.warning("  samples are made by the %s-noise expert alone, all the way: look at shapes and motion (high) or "
                    "details (low) only", options.experts)  # fmt: skip
    texts = _embeddings(kind, prompts, options, device)
    scenes = [
        Scene(prompt, [texts[clean_prompt(word)] for word in _words(prompt)], Given()) for prompt in prompts
    ]  # fmt: skip
    if any(prompt.image for prompt in prompts):
        frames = {prompt: _first_frame(prompt) for prompt in prompts if prompt.image}
        views = _views(kind, model, frames, options, device)
        latents = _conditions(kind, model, frames, options, device)
        scenes = [
            replace(scene, given=replace(latents[scene.prompt], image_tokens=views.get(scene.prompt)))
            if scene.prompt in latents
            else scene
            for scene in scenes
        ]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return scenes


def _words(prompt: SamplePrompt) -> list[str]:
    """The prompt, and the negative prompt where it is asked."""
    return [prompt.prompt, *([prompt.negative_prompt] if prompt.guided else [])]


def _embeddings(
    kind: Family, prompts: Sequence[SamplePrompt], options: Train, device: torch.device
) -> dict[str, torch.Tensor]:
    """The embedding of every distinct text, as the caching step encodes it."""
    assert options.t5 is not None
    distinct = list(dict.fromkeys(clean_prompt(word) for prompt in prompts for word in _words(prompt)))
    dtype = choose_dtype(options.t5_dtype, device)
    with enough_memory("encoding the prompts of the samples", "use --fp8_t5"), exact(dtype):
        encoder = kind.load_prompt_encoder(
            options.t5, options.tokenizer, dtype=DTYPES[dtype], device=device, fp8=options.fp8_t5, plain=False
        )
        return dict(zip(distinct, encoder.encode(distinct, lambda _done, _total: None), strict=True))


def _first_frame(prompt: SamplePrompt) -> torch.Tensor:
    """(1, 3, 1, H, W) uint8, cut to the size that is sampled."""
    assert prompt.image is not None
    return torch.from_numpy(load_image(prompt.image, (prompt.width, prompt.height)).copy())[None]


def _views(
    kind: Family, model: Model, frames: Mapping[SamplePrompt, torch.Tensor], options: Train, device: torch.device
) -> dict[SamplePrompt, torch.Tensor]:
    """CLIP's view of every first frame, for models that look through it when its weights are given."""
    if not any(weights.flag == "clip" for weights in model.weights):
        return {}
    if options.clip is None:
        log.warning("  no --clip: samples of %s are made without its image branch", model.name)
        return {}
    dtype = choose_clip_dtype(None, device)
    with enough_memory("encoding first frames with CLIP", _CURE), exact(dtype):
        encoder = kind.load_image_encoder(options.clip, dtype=DTYPES[dtype], device=device)
        return {
            prompt: kind.encode_images(encoder, frame[:, :, 0].float() / 127.5 - 1).cpu()
            for prompt, frame in frames.items()
        }


def _conditions(
    kind: Family, model: Model, frames: Mapping[SamplePrompt, torch.Tensor], options: Train, device: torch.device
) -> dict[SamplePrompt, Given]:
    """Every first frame as latents: as the condition of image-to-video, or as the clean frame of the 5B."""
    assert options.vae is not None
    dtype = choose_vae_dtype(options.vae_dtype, device)
    found = {}
    with enough_memory("encoding first frames", _CURE), exact(dtype):
        encoder = kind.load_latent_encoder(options.vae, dtype=DTYPES[dtype], device=device, plain=False)
        for prompt, frame in frames.items():
            if model.condition == "text_or_image":
                found[prompt] = Given(clean=encoder.encode(frame, cache_cpu=options.vae_cache_cpu).cpu())
                continue
            latents = encoder.encode_condition(frame, prompt.frames, cache_cpu=options.vae_cache_cpu).cpu()
            mask = torch.zeros(1, MASK_CHANNELS, *latents.shape[2:])
            mask[:, :, 0] = 1
            found[prompt] = Given(condition=torch.cat([mask, latents], dim=1))
    return found


def samples_due(options: Train, step: int, steps_per_epoch: int, num_steps: int) -> bool:
    """Whether samples are made after this step: every so many steps or epochs, and always after the last one.

    Args:
        options: `--sample_prompts` and the intervals.
        step: steps done; 0 is before the first, where `--sample_at_first` decides.
        steps_per_epoch: optimizer steps.
        num_steps: of the whole run.
    """
    if options.sample_prompts is None:
        return False
    if step == 0:
        return options.sample_at_first
    every = (options.sample_every_n_steps or 0, (options.sample_every_n_epochs or 0) * steps_per_epoch)
    return step == num_steps or any(number and step % number == 0 for number in every)


def make_samples(run: Run, scenes: Sequence[Scene], *, averages: Averages | None = None) -> list[Path]:
    """Sample every scene with the trainees as they are, and write the files and a line for each in `samples.jsonl`.

    A sample that does not fit into memory or is not finite is left out with a warning: training goes on.

    Args:
        run: of which everything stays as it is, but for where idle experts lie.
        scenes: from `make_scenes`.
        averages: where averages are kept, how to sample with them.

    Returns:
        The files that were written.
    """
    averaged = [trainee for trainee in run.trainees if averages and trainee.ema]
    latents: dict[int, torch.Tensor] = {}
    with ExitStack() as stack, progress("samples", sum(scene.prompt.steps for scene in scenes)) as advance:
        for trainee in run.trainees:
            stack.enter_context(evaluating(trainee.transformer))
            stack.enter_context(trainee.optimization.evaluating())
        for trainee in averaged:
            assert averages is not None
            stack.enter_context(averages(trainee))
        for number, scene in enumerate(scenes, start=1):
            made = _sampled(run, scene, number, lambda _done: advance(1, ""))
            if made is not None:
                latents[number] = made
    settings = {number: _settings(run, scenes[number - 1].prompt, averaged=bool(averaged)) for number in latents}
    written = _decoded(run, latents, settings)
    _list_samples(run.plan.options.output_dir / FOLDER, {path.name: settings[n] for n, path in written.items()})
    return list(written.values())


def _sampled(run: Run, scene: Scene, number: int, on_step: Callable[[int], None]) -> torch.Tensor | None:
    """The latents of a scene on the CPU; None when it cannot be made."""
    prompt, model = scene.prompt, run.plan.model
    frames = (prompt.frames - 1) // model.temporal_stride + 1
    sides = (prompt.height // model.spatial_stride, prompt.width // model.spatial_stride)
    noise = initial_noise((1, model.latent_channels, frames, *sides), prompt.seed)
    what = f"sampling {prompt.frames} frames of {prompt.width}x{prompt.height}"
    try:
        with enough_memory(what, _CURE):
            latents = denoise(
                _stages(run, prompt),
                noise.to(run.device),
                flow_scheduler(prompt.sampler, prompt.shift),
                prompt.steps,
                [text.to(run.device) for text in scene.texts],
                given=scene.given.to(run.device),
                per_token=run.kind.timesteps_per_token,
                on_step=on_step,
            ).cpu()
    except WangenError as error:
        log.warning("  sample %d is left out: %s; %s", number, error.found, error.cure)
        return None
    if not latents.isfinite().all():
        log.warning("  sample %d is left out: its latents are not finite", number)
        return None
    return latents


def _stages(run: Run, prompt: SamplePrompt) -> list[Stage]:
    """The trainees in the order of their work; one expert alone goes the whole way."""
    stages = []
    for number, trainee in enumerate(run.trainees):
        high = trainee.plan.name == HIGH
        lowest = 1000 * _boundary(run) if high and len(run.trainees) > 1 else 0.0
        guidance = prompt.guidance_high_noise if high else prompt.guidance
        stages.append(Stage(trainee.model, guidance, lowest, partial(run.activate, number)))
    return sorted(stages, key=lambda stage: -stage.lowest_timestep)


def _boundary(run: Run) -> float:
    """The sigma from which on, upwards, the high-noise expert works."""
    boundary = run.plan.options.timestep_boundary
    assert boundary is not None, "filled in for models with two experts"
    return boundary


def _decoded(
    run: Run, latents: Mapping[int, torch.Tensor], settings: Mapping[int, Mapping[str, Any]]
) -> dict[int, Path]:
    """Decode and write each sample with its settings; the VAE is in memory only here."""
    options, written = run.plan.options, dict[int, Path]()
    if not latents:
        return written
    assert options.vae is not None, "refused before"
    dtype = choose_decoder_dtype(options.vae_dtype, run.device)
    with exact(dtype):
        try:
            with enough_memory("loading the VAE", _CURE):
                vae = run.kind.load_vae(options.vae, dtype=DTYPES[dtype], device=run.device)
        except WangenError as error:
            log.warning("  the samples are left out: %s; %s", error.found, error.cure)
            return written
        for number, part in latents.items():
            ending = "png" if settings[number]["frames"] == 1 else "mp4"
            name = f"{run.plan.name}-step{run.step:08d}-{number}.{ending}"
            try:
                with enough_memory("decoding a sample", "use --vae_cache_cpu, or a smaller sample"):
                    (video,) = run.kind.decode_latents(vae, part, cache_cpu=options.vae_cache_cpu)
            except WangenError as error:
                log.warning("  sample %d is left out: %s; %s", number, error.found, error.cure)
                continue
            written[number] = options.output_dir / FOLDER / name
            words = {"wangen": json.dumps(settings[number], sort_keys=True)}
            write_media(written[number], video, settings[number]["fps"], words)
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    return written


def _settings(run: Run, prompt: SamplePrompt, *, averaged: bool) -> dict[str, Any]:
    """All that decides the sample, in our words and in ComfyUI's."""
    scheduler = flow_scheduler(prompt.sampler, prompt.shift)
    scheduler.set_timesteps(prompt.steps)
    sigmas = [round(sigma, 6) for sigma in scheduler.sigmas.tolist()]
    boundary = _boundary(run) if run.plan.model.experts else None
    both = boundary is not None and len(run.trainees) > 1
    steps_high = sum(step >= 1000 * boundary for step in scheduler.timesteps.tolist()) if both and boundary else 0
    return {
        "task": run.plan.model.name,
        "step": run.step,
        "experts": [trainee.plan.name for trainee in run.trainees if trainee.plan.name],
        "averaged_weights": averaged,
        "prompt": prompt.prompt,
        "negative_prompt": prompt.negative_prompt if prompt.guided else "",
        "image": prompt.image.name if prompt.image else "",
        "width": prompt.width,
        "height": prompt.height,
        "frames": prompt.frames,
        "fps": prompt.fps,
        "seed": prompt.seed,
        "sampler": prompt.sampler,
        "steps": prompt.steps,
        "shift": prompt.shift,
        "guidance": prompt.guidance,
        "guidance_high_noise": prompt.guidance_high_noise if boundary is not None else None,
        "boundary": boundary,
        "lora_strength": 1.0,
        "sigmas": sigmas,
        "comfyui": {
            "sampler_name": _COMFYUI_SAMPLERS[prompt.sampler],
            "scheduler": "simple",
            "shift": prompt.shift,
            "steps": prompt.steps,
            "cfg": prompt.guidance,
            "noise_seed": prompt.seed,
            "strength_model": 1.0,
            **({"cfg_high_noise": prompt.guidance_high_noise, "steps_high_noise": steps_high} if both else {}),
        },
    }


def _list_samples(folder: Path, made: Mapping[str, Mapping[str, Any]]) -> None:
    """Add a line for each file to `samples.jsonl`; a file that was made anew after a resume has one line."""
    if not made:
        return
    path = folder / LIST
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            if json.loads(line)["file"] not in made:
                kept.append(line)
        except (ValueError, KeyError, TypeError):  # a line that was cut short
            continue
    new = [json.dumps({"file": name, **settings}, sort_keys=True) for name, settings in made.items()]
    write_text(path, "\n".join([*kept, *new]) + "\n")
