"""Samples on the way: prompts encoded once before the transformer loads, then videos at intervals, with all settings.

Nothing of a run changes by sampling: noise comes from generators of its own, modes and weights are put back.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wangen.generator.errors import WangenError, in_line
from wangen.generator.files import remove_left, write_text
from wangen.generator.run_folder import SAMPLE_LIST, SAMPLES
from wangen.generator.run_names import sample_name
from wangen.generator.sample_prompts import SamplePrompt
from wangen.generator.steps import Train
from wangen.profiles import Model
from wangen.runtime.denoising import flow_scheduler
from wangen.runtime.models import family
from wangen.runtime.progress import progress
from wangen.runtime.sampling.output import KEY, write_media
from wangen.runtime.sampling.scenes import Encoders, Scene, make_scenes
from wangen.runtime.sampling.videos import Decoder, Expert, sample_latents
from wangen.runtime.training.adapter import replaced
from wangen.runtime.training.adapter_config import merged
from wangen.runtime.training.run import Run
from wangen.runtime.training.timesteps import HIGH
from wangen.runtime.training.validation import evaluating

log = logging.getLogger("wangen")

_CURE = "use a smaller --w, --h or --f in the prompt file"
_COMFYUI_SAMPLERS: Mapping[str, str] = {"unipc": "uni_pc", "dpm++": "dpmpp_2m", "euler": "euler"}


def training_scenes(model: Model, prompts: Sequence[SamplePrompt], options: Train, device: torch.device) -> list[Scene]:
    """Encode prompts and first frames; call it before the transformer loads. The encoders are gone when it returns.

    Args:
        model: its profile.
        prompts: from `sample_prompts.read_prompts`; without one nothing loads.
        options: the weights: `--t5`, `--vae`, and `--clip` where the model looks through it.
        device: where to encode.

    Raises:
        WangenError: a file is of another kind, or the memory is full.
    """
    if not prompts:
        return []
    encoders = Encoders.of(options)
    encoders.require(model)
    if model.experts and options.experts != "both":
        log.warning("  samples are made by the %s-noise expert alone, all the way: look at %s only", options.experts,
                    "shapes and motion" if options.experts == "high" else "details")  # fmt: skip
    return make_scenes(family(model), model, prompts, encoders, device, "the prompts of the samples")


def samples_due(options: Train, step: int, steps_per_epoch: int, num_steps: int) -> bool:
    """Whether samples are made after this step: every so many steps or epochs, and always after the last one.

    Args:
        options: what is sampled, and the intervals.
        step: steps done; 0 is before the first, where `--sample_at_first` decides.
        steps_per_epoch: optimizer steps.
        num_steps: of the whole run.
    """
    if options.sample_prompts is None and not options.sample_continuations:
        return False
    if step == 0:
        return options.sample_at_first
    every = (options.sample_every_n_steps or 0, (options.sample_every_n_epochs or 0) * steps_per_epoch)
    return step == num_steps or any(number and step % number == 0 for number in every)


def make_samples(run: Run, scenes: Sequence[Scene], *, check: Callable[[], None] = lambda: None) -> list[Path]:
    """Sample every scene with the trainees as they are, and write the files and a line for each in `samples.jsonl`.

    Averages are sampled with where they are kept. A sample that does not fit into memory or is not finite is left out
    with a warning: training goes on. Not where each process holds a part of the weights.

    Args:
        run: of which everything stays as it is, but for where idle experts lie.
        scenes: from `training_scenes`.
        check: called after every step of a sampler, by all processes where each holds a part of the weights, and
            elsewhere before every chunk that is decoded, too; it may raise.

    Returns:
        The files that were written.

    Raises:
        WangenError: a sample cannot be made, where the weights are in parts.
    """
    latents = sampled(run, scenes, check, what="sample", cure=_CURE)
    if not run.ranks.is_first:  # they went along, since the weights are in parts
        return []
    settings = {number: sample_settings(run, scenes[number - 1].prompt) for number in latents}
    written = _decoded(run, latents, settings, own_check(run, check))
    list_samples(run.plan.options.output_dir / SAMPLES, {path.name: settings[n] for n, path in written.items()})
    return list(written.values())


def sampled(
    run: Run, scenes: Sequence[Scene], check: Callable[[], None], *, what: str, cure: str
) -> dict[int, torch.Tensor]:
    """The latents of every scene by its number, counted from 1, with the trainees as they are or with their averages.

    One that does not fit into memory or is not finite is left out with a warning; not where each process holds a part
    of the weights.

    Args:
        run: of which everything stays as it is, but for where idle experts lie.
        scenes: what to make.
        check: called after every step of a sampler; it may raise.
        what: one of them is called in messages.
        cure: what to do when the memory is full.

    Returns:
        (1, C, F, h, w) each, in float32 on the CPU.

    Raises:
        WangenError: one cannot be made, where the weights are in parts.
    """
    latents: dict[int, torch.Tensor] = {}

    def on_step(_done: int) -> None:
        advance(1, "")
        check()

    with ExitStack() as stack, progress(f"{what}s", sum(scene.prompt.steps for scene in scenes)) as advance:
        for trainee in run.trainees:
            stack.enter_context(evaluating(trainee.transformer))
            stack.enter_context(trainee.optimization.evaluating())
            if trainee.ema:
                stack.enter_context(replaced(trainee.parameters, trainee.ema.weights()))
        for number, scene in enumerate(scenes, start=1):
            try:
                latents[number] = _sampled(run, scene, cure, on_step)
            except WangenError as error:
                if run.ranks.in_step:  # the others are in the middle of it, and wait for this process's weights
                    raise
                log.warning("  %s %d is left out: %s", what, number, in_line(error))
    return latents


def own_check(run: Run, check: Callable[[], None]) -> Callable[[], None]:
    """The check for what the first process does alone: none where all processes have to make it together."""
    return (lambda: None) if run.ranks.in_step else check


def _sampled(run: Run, scene: Scene, cure: str, on_step: Callable[[int], None]) -> torch.Tensor:
    experts = [
        Expert(trainee.model, trainee.plan.name == HIGH, partial(run.activate, index))
        for index, trainee in enumerate(run.trainees)
    ]
    boundary = _boundary(run) if len(experts) > 1 else 0.0
    return sample_latents(
        run.kind, run.plan.model, experts, scene, run.device, boundary=boundary, cure=cure, on_step=on_step
    )


def _boundary(run: Run) -> float:
    """The sigma from which on, upwards, the high-noise expert works."""
    boundary = run.plan.options.timestep_boundary
    assert boundary is not None, "filled in for models with two experts"
    return boundary


def _decoded(
    run: Run,
    latents: Mapping[int, torch.Tensor],
    settings: Mapping[int, Mapping[str, Any]],
    check: Callable[[], None],
) -> dict[int, Path]:
    """Decode and write each sample with its settings; the VAE is in memory only here."""
    options, written = run.plan.options, dict[int, Path]()
    if not latents:
        return written
    decoder = Decoder(run.kind, Encoders.of(options), run.device, "use --vae_cache_cpu, or a smaller sample")
    for number, part in latents.items():
        ending = "png" if settings[number]["frames"] == 1 else "mp4"
        path = options.output_dir / SAMPLES / sample_name(run.plan.name, run.step, number, ending)
        try:
            video = decoder.decode(part, check)
            write_media(path, video, settings[number]["fps"],
                        {KEY: json.dumps(settings[number], sort_keys=True)})  # fmt: skip
        except WangenError as error:
            log.warning("  sample %d is left out: %s", number, in_line(error))
            continue
        written[number] = path
    del decoder
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    return written


def sample_settings(run: Run, prompt: SamplePrompt) -> dict[str, Any]:
    """All that decides a sample, in our words and in ComfyUI's."""
    shift = run.plan.model.shift
    scheduler = flow_scheduler(prompt.sampler, prompt.shift, shift.terminal if shift else None)
    scheduler.set_timesteps(prompt.steps)
    sigmas = [round(sigma, 6) for sigma in scheduler.sigmas.tolist()]
    boundary = _boundary(run) if run.plan.model.experts else None
    both = boundary is not None and len(run.trainees) > 1
    merged_into = _merged(run.plan.options)
    high_alone = [trainee.plan.name for trainee in run.trainees] == [HIGH]
    steps_high = sum(step >= 1000 * boundary for step in scheduler.timesteps.tolist()) if both and boundary else 0
    return {
        "task": run.plan.model.name,
        "step": run.step,
        "experts": [trainee.plan.name for trainee in run.trainees if trainee.plan.name],
        "averaged_weights": any(trainee.ema for trainee in run.trainees),
        "prompt": prompt.prompt,
        "negative_prompt": prompt.negative_prompt if prompt.guided else "",
        "image": prompt.image.name if prompt.image else "",
        **({"controls": [path.name for path in prompt.controls]} if prompt.controls else {}),
        **({"background_color": prompt.background} if prompt.shows_background else {}),
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
        **merged_into,
        "sigmas": sigmas,
        "comfyui": {
            "sampler_name": _COMFYUI_SAMPLERS[prompt.sampler],
            "scheduler": "simple",
            "shift": prompt.shift,
            "steps": prompt.steps,
            "cfg": max(1.0, prompt.guidance_high_noise if high_alone else prompt.guidance),
            "noise_seed": prompt.seed,
            "strength_model": 1.0,
            **merged_into,
            **({"cfg_high_noise": max(1.0, prompt.guidance_high_noise)} if both else {}),
            **({"steps_high_noise": steps_high} if both else {}),
        },
    }


def _merged(options: Train) -> dict[str, Any]:
    """The LoRAs that a run has merged into its model, each with its strength, where there are any."""
    found = [{"file": path.name, "strength": strength} for path, strength in merged(options)]
    return {"base_weights": found} if found else {}


def cut_samples(folder: Path, name: str, step: int, *, keep: bool) -> None:
    """Take the samples of later steps off the list, as of a run that `--fresh` begins anew; their files stay.

    Args:
        folder: of samples.
        name: of the run.
        step: at which it begins.
        keep: samples of this very step are its own, since it goes on.
    """
    path = folder / SAMPLE_LIST
    pattern = re.compile(re.escape(name) + r"-step(\d+)-.*", re.DOTALL)

    def stays(file: str) -> bool:
        found = pattern.fullmatch(file)
        return not found or int(found[1]) < step + keep

    try:
        if path.is_file():
            write_text(path, "".join(f"{line}\n" for line in _lines(path, stays)))
    except (WangenError, OSError) as error:
        log.warning("  the list of samples: %s", in_line(error))


def list_samples(folder: Path, made: Mapping[str, Mapping[str, Any]]) -> None:
    """Add a line for each file to `samples.jsonl`; a file that was made anew after a resume has one line.

    Where it cannot be written there is a warning: a run does not end for it.
    """
    if not made:
        return
    try:
        _list(folder, made)
    except (WangenError, OSError) as error:
        log.warning("  the list of samples: %s", in_line(error))


def _list(folder: Path, made: Mapping[str, Mapping[str, Any]]) -> None:
    path = folder / SAMPLE_LIST
    kept = _lines(path, lambda file: file not in made)
    new = [json.dumps({"file": name, **settings}, sort_keys=True) for name, settings in made.items()]
    remove_left(path)
    write_text(path, "\n".join([*kept, *new]) + "\n")


def _lines(path: Path, stays: Callable[[str], bool]) -> list[str]:
    """The lines of a list of samples whose files stay, without those that cannot be read."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            if stays(json.loads(line)["file"]):
                kept.append(line)
        except (ValueError, RecursionError, KeyError, TypeError):  # a line that was cut short
            continue
    return kept
