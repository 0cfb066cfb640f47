"""Flags of sampling and judging that are refused wherever they are read: by the steps, by what publishes and checks."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from wangen.generator.dataset import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from wangen.generator.errors import UsageError
from wangen.generator.experts import ORDER, choose_boundary
from wangen.generator.generate_step import SMOKE_SAMPLING_STEPS
from wangen.generator.run_folder import VIDEOS
from wangen.generator.steps import Evaluate, Generate
from wangen.generator.toml_values import color, is_clip_length
from wangen.generator.train_refusals import FLOAT32_MAX, MAX_VALIDATION_TIMESTEPS, choose_condition_frames, require_seed
from wangen.profiles import Model

MAX_SHIFT = 1e6

OTHER_MEDIA = (IMAGE_SUFFIXES | VIDEO_SUFFIXES | {".gif", ".apng"}) - {".mp4", ".png"}

TILE_STEP_PX = 64
MIN_TILE_PX = 128
TILES_PX = range(MIN_TILE_PX, 4096 + 1, TILE_STEP_PX)
"""The tiles that are tried where it is asked which a VAE worked in."""

LORA_FLAGS = (
    ("dit", "lora_weight", "lora_multiplier"),
    ("dit_high_noise", "lora_weight_high_noise", "lora_multiplier_high_noise"),
)  # fmt: skip
"""A transformer, its LoRAs and their strengths."""

HIGH_NOISE_FLAGS = (
    "dit_high_noise", "lora_weight_high_noise", "lora_multiplier_high_noise", "guidance_scale_high_noise",
)  # fmt: skip

"""The folder in which `evaluate` puts its videos."""


def refuse_sampling(options: Generate, model: Model) -> None:
    """Refuse flags of `generate` that cannot be on any machine.

    Args:
        options: as they were given.
        model: the model profile.

    Raises:
        UsageError: numbers out of range, or flags that contradict each other or the model.
    """
    _refuse_numbers(options, model)
    _refuse_parts(options, model)
    choose_boundary(options.timestep_boundary, model)
    if options.background_color is not None:
        color(options.background_color, "--background_color")
    if options.image_path and model.condition in ("text", "controls"):
        raise UsageError(f"{model.name} takes no first frame (--image_path)", cure="leave it out")
    if options.save_path.suffix.lower() in OTHER_MEDIA:
        raise UsageError(f"this version writes .mp4 and .png, not {options.save_path.suffix}",
                         cure="end --save_path in .mp4, or .png for one frame, or name a folder")  # fmt: skip


def refuse_judging(options: Evaluate, model: Model) -> None:
    """Refuse flags of `evaluate` that cannot be on any machine: its own, and those that it shares with `generate`.

    Raises:
        UsageError: as `refuse_sampling`; or videos have nothing that decodes them.
    """
    if not options.lora_weight:
        raise UsageError("evaluate needs --lora_weight", cure="name LoRA files, or the folder of a training run")
    for name, least in (("validation_timesteps", 1), ("num_prompts", 1), ("num_videos", 0), ("validation_items", 0)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name} must be at least {least}, got {getattr(options, name)}")
    if options.validation_timesteps > MAX_VALIDATION_TIMESTEPS:
        raise UsageError(f"--validation_timesteps must be at most {MAX_VALIDATION_TIMESTEPS}, "
                         f"got {options.validation_timesteps}")  # fmt: skip
    if options.num_videos and (options.vae is None or options.t5 is None):
        missing = "--vae" if options.vae is None else "--t5"
        raise UsageError(f"videos need {missing}", cure="give it, or --num_videos 0 to judge by losses alone")
    choose_condition_frames(options.condition_frames, model)
    refuse_sampling(as_generate(options), model)


def as_generate(options: Evaluate) -> Generate:
    """What `generate` is told where it has the same flags as `evaluate`; the LoRAs and prompts come later."""
    shared = {one.name for one in fields(Generate)} - {"lora_weight", "lora_weight_high_noise", "report_dir"}
    given: dict[str, Any] = {one.name: getattr(options, one.name) for one in fields(Evaluate) if one.name in shared}
    given |= {"vae": options.vae or Path(), "t5": options.t5 or Path(), "num_videos": max(1, options.num_videos)}
    if options.smoke:
        given |= {"infer_steps": SMOKE_SAMPLING_STEPS, "num_videos": 1}
    return Generate(**given, save_path=options.output_dir / VIDEOS)


def require_tile(tile: int) -> None:
    """Refuse a side of tiles that a VAE cannot work in; 0, the whole picture, passes.

    Raises:
        UsageError: it is no multiple of 64, or below 128 pixels.
    """
    if tile and (tile < MIN_TILE_PX or tile % TILE_STEP_PX):
        raise UsageError(
            f"--vae_tile {tile}: the VAE's tiles are multiples of {TILE_STEP_PX} from {MIN_TILE_PX} pixels",
            cure="256 is a good size: larger ones are more exact, smaller ones need less memory; 0 takes no tiles",
        )


def _refuse_numbers(options: Generate, model: Model) -> None:
    require_tile(options.vae_tile or 0)
    step = model.spatial_stride * model.patch[1]
    if options.video_size and any(side <= 0 or side % step for side in options.video_size):
        height, width = options.video_size
        near = [max(step, round(side / step) * step) for side in options.video_size]
        raise UsageError(f"--video_size {height} {width}: both must be multiples of {step}",
                         cure=f"use {near[0]} {near[1]}")  # fmt: skip
    frames = options.video_length
    if frames is not None and not is_clip_length(frames):
        raise UsageError(
            f"--video_length {frames}: must be 4n+1", cure=f"use {max(1, round((frames - 1) / 4) * 4 + 1)}"
        )
    for name in ("infer_steps", "fps", "num_videos"):
        if (number := getattr(options, name)) is not None and number < 1:
            raise UsageError(f"--{name} must be at least 1, got {number}")
    for name in ("flow_shift", "guidance_scale", "guidance_scale_high_noise"):
        if (value := getattr(options, name)) is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"--{name} must be above 0, got {value:g}", cure="a guidance of 1 switches it off")
    if options.flow_shift is not None and not 1 / MAX_SHIFT <= options.flow_shift <= MAX_SHIFT:
        raise UsageError(f"--flow_shift {options.flow_shift:g}: it is {1 / MAX_SHIFT:g} to {MAX_SHIFT:g}",
                         cure="Wan uses 3 to 12")  # fmt: skip
    if options.seed is not None:
        require_seed(options.seed)
    for _, flag, name in LORA_FLAGS:
        loras, strengths = getattr(options, flag), getattr(options, name)
        if strengths and len(strengths) != len(loras):
            raise UsageError(f"{len(loras)} --{flag} and {len(strengths)} --{name}",
                             cure="give one multiplier per LoRA, or none")  # fmt: skip
        for strength in strengths or ():
            if not abs(strength) <= FLOAT32_MAX:
                raise UsageError(f"--{name} {strength:g}: the model computes with numbers up to {FLOAT32_MAX:g}",
                                 cure="1 is the LoRA as it was trained")  # fmt: skip


def _refuse_parts(options: Generate, model: Model) -> None:
    """What belongs to models of another kind, or is missing for this one."""
    if model.experts is None:
        for name in HIGH_NOISE_FLAGS:
            if getattr(options, name):
                raise UsageError(f"--{name}: {model.name} has one transformer", cure="leave it out, or give its --task")
    elif options.dit_high_noise is None:
        raise UsageError(
            f"the high-noise expert of {model.name} has no weights", cure=f"give --dit_high_noise; {ORDER}"
        )
    if options.clip and not model.has_clip:
        raise UsageError(f"--clip: {model.name} has no image encoder", cure="leave it out")
    if options.changed and options.repeat is None:
        raise UsageError("--changed goes with --from", cure="leave it out")
