"""Prompts with all their settings: what a file says, the model's own, and everything refused that cannot be."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from wangen.generator.dataset import read_facts
from wangen.generator.errors import UsageError, printable
from wangen.generator.files import is_file
from wangen.generator.generate_step import DEFAULTS
from wangen.generator.geometry import area_size
from wangen.generator.items import fewer_controls, wanted_controls
from wangen.generator.prompt_files import entries
from wangen.generator.toml_values import WHITE, color
from wangen.profiles import Model

log = logging.getLogger("wangen")

SAMPLERS: tuple[Literal["unipc", "dpm++", "euler"], ...] = ("unipc", "dpm++", "euler")
MAX_STEPS = 1000
MAX_SIDE_PX = 1 << 14
SIZE_480P = 832 * 480
MAX_FRAMES = (1 << 14) - 3  # 4n+1
MAX_SEED = 2**63 - 1

FLAGS = {"width": "--video_size", "height": "--video_size", "frame_count": "--video_length", "seed": "--seed",
         "sample_steps": "--infer_steps"}  # fmt: skip
"""The flags of `generate` that stand for what a prompt does not say."""


@dataclass(frozen=True, kw_only=True)
class SamplePrompt:
    """One video or image to make.

    Attributes:
        prompt: what to show; empty where a first frame says it.
        negative_prompt: what to avoid, where guidance is above 1.
        width: in pixels.
        height: in pixels.
        frames: 4n+1; one makes an image.
        fps: frames per second of the file.
        seed: of the initial noise.
        steps: of the sampler.
        shift: of its schedule.
        guidance: classifier-free guidance; of two experts that of the low-noise one.
        guidance_high_noise: of the high-noise expert.
        sampler: `unipc`, `dpm++` or `euler`.
        image: the first frame, of image-to-video.
        controls: the control images, of models that edit.
        background: the colour behind what is transparent in these pictures, as `#rrggbb`.
    """

    prompt: str
    negative_prompt: str
    width: int
    height: int
    frames: int
    fps: int
    seed: int
    steps: int
    shift: float
    guidance: float
    guidance_high_noise: float
    sampler: Literal["unipc", "dpm++", "euler"]
    image: Path | None = None
    controls: tuple[Path, ...] = ()
    background: str = WHITE

    @property
    def guided(self) -> bool:
        """Whether the negative prompt is asked."""
        return max(self.guidance, self.guidance_high_noise) > 1

    @property
    def shows_background(self) -> bool:
        """Whether there is a picture that another colour than white may shine through."""
        return self.background != WHITE and bool(self.image or self.controls)


def defaults_of(model: Model) -> dict[str, Any]:
    """What a prompt of this model is sampled with where nothing else is said, by the flags of `generate`.

    >>> from wangen import profiles
    >>> own = defaults_of(profiles.model("t2v-A14B"))
    >>> own["guidance_scale"], own["guidance_scale_high_noise"], own["infer_steps"], own["fps"]
    (3.0, 4.0, 40, 16)
    """
    high = model.experts.guidance_high_noise if model.experts else None
    own = {**DEFAULTS, "fps": model.fps, "guidance_scale_high_noise": high, "image_path": None,
           "control_image_path": (), "background_color": WHITE}  # fmt: skip
    if model.shift or model.shift_480p:
        own["flow_shift"] = None  # it depends on the size
    if model.condition == "controls":
        own["video_size"] = None  # that of the last control image
    return {**own, **model.defaults.get("generate", {})}


def read_prompts(
    path: Path,
    model: Model,
    seed: int,
    defaults: Mapping[str, Any] | None = None,
    *,
    flag: str = "--sample_prompts",
    tell: bool = True,
) -> list[SamplePrompt]:
    """The prompts of a file, with the model's own settings where the file says nothing.

    Args:
        path: `.txt`, `.toml` or `.json`, in UTF-8.
        model: its sizes decide which widths, heights and lengths can be, its defaults stand for what is not said.
        seed: where a prompt has none.
        defaults: what stands in place of the model's own settings, as `defaults_of` names them.
        flag: that the file was given to, for messages.
        tell: warn of options that decide nothing.

    Raises:
        UsageError: the file cannot be read or is empty, an option is unknown, a value cannot be, an image is missing;
            the message names the line or the entry.
    """
    defaults = defaults_of(model) if defaults is None else defaults
    found = list(entries(path, flag))
    if flag == "--prompt_file":  # in the files of musubi-tuner's generate scripts --g and --l are the same
        found = [(where, _without_g(values)) for where, values in found]
    prompts = [make_prompt(values, model, seed, defaults, where=where, folder=path.parent) for where, values in found]
    for (where, values), prompt in zip(found, prompts, strict=True) if tell else ():
        for line in _unread(values, model, prompt):
            log.warning("  %s: %s", where, line)
    if not prompts:
        raise UsageError("there is no prompt in this file", where=str(path), cure="write one prompt per line")
    return prompts


def _without_g(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with guidance under its one name."""
    others = {name: value for name, value in values.items() if name != "guidance_scale"}
    return {"cfg_scale": values["guidance_scale"], **others} if "guidance_scale" in values else others


def _unread(values: Mapping[str, Any], model: Model, prompt: SamplePrompt) -> list[str]:
    """A sentence for each option that decides nothing with this model, or beside the others."""
    guidances = {"guidance_scale": "--g is HunyuanVideo's embedded guidance"}
    if not model.experts:
        guidances["cfg_scale_high_noise"] = "--lh is the guidance of a high-noise expert"
    found = [f"{what}, which {model.title} has not: use --l" for name, what in guidances.items() if name in values]
    if min(prompt.guidance, prompt.guidance_high_noise) < 1:
        found.append("guidance below 1 is as 1: there is none")
    if "negative_prompt" in values and not prompt.guided:
        found.append("--n decides nothing without guidance: use --l above 1")
    return found


def make_prompt(
    values: Mapping[str, Any], model: Model, seed: int, defaults: Mapping[str, Any], *, where: str, folder: Path
) -> SamplePrompt:
    """A prompt from the values of a line or a table.

    Args:
        values: by the keys of `prompt_files.OPTIONS`, and `prompt`.
        model: as for `read_prompts`.
        seed: where the values have none.
        defaults: as `defaults_of` names them.
        where: the values come from, for messages.
        folder: that the path of an image may begin at, beside the working folder.

    Raises:
        UsageError: as `read_prompts`.
    """
    text = values.get("prompt", "")
    if not isinstance(text, str) or not (text.strip() or values.get("image_path", defaults["image_path"])):
        raise UsageError("there is no prompt before the options", where=where, cure="write what to show")
    step_px = model.spatial_stride * model.patch[1]
    controls = _controls(values, defaults["control_image_path"], model, where, folder)
    height, width = defaults["video_size"] or reversed(edited_size(controls[-1], model))
    height, width = (_side(values, name, side, step_px, where) for name, side in (("height", height), ("width", width)))
    shift = defaults["flow_shift"]
    if shift is None:
        shift = _shift(model, height, width, step_px)
    least_steps = 2 if model.shift else 1  # a schedule that is stretched to its end has two ends
    guidance = _number(values, "cfg_scale", defaults["guidance_scale"], where)
    high = defaults["guidance_scale_high_noise"]
    own_high = guidance if high is None or "cfg_scale" in values else high
    frames = _frames(values, defaults["video_length"], model, where)
    image = _image(values, defaults["image_path"], model, where, folder)
    if image and frames == 1 and model.condition == "text_or_image":
        raise UsageError(f"{_told(values, 'frame_count')} 1 leaves nothing to make behind the first frame", where=where,
                         cure="use 5 or more frames, or leave the picture out")  # fmt: skip
    return SamplePrompt(
        prompt=text.strip(),
        negative_prompt=_words(values, "negative_prompt", defaults["negative_prompt"], where),
        width=width,
        height=height,
        frames=frames,
        fps=defaults["fps"],
        seed=_integer(values, "seed", seed, where, 0, MAX_SEED),
        steps=_integer(values, "sample_steps", defaults["infer_steps"], where, least_steps, MAX_STEPS),
        shift=_number(values, "discrete_flow_shift", shift, where),
        guidance=guidance,
        guidance_high_noise=_number(values, "cfg_scale_high_noise", own_high, where),
        sampler=_sampler(values, defaults["sample_solver"], model, where),
        image=image,
        controls=controls,
        background=color(defaults["background_color"], "--background_color"),
    )


def _shift(model: Model, height: int, width: int, step_px: int) -> float:
    """The schedule's shift at a size in pixels, of models where it depends on it."""
    if model.shift:
        return model.shift.at((height // step_px) * (width // step_px))
    assert model.shift_480p is not None, "of other models it has a number"
    return model.shift_480p if height * width <= SIZE_480P else float(DEFAULTS["flow_shift"])


def _words(values: Mapping[str, Any], key: str, default: str, where: str) -> str:
    found = values.get(key, default)
    if not isinstance(found, str):
        raise UsageError(f"{key} {found!r} is no text", where=where, cure="write it in quotes, or leave it out")
    return found


def _told(values: Mapping[str, Any], key: str) -> str:
    """What was given: a key of a prompt's own, or else the flag that stands for all prompts."""
    return key if key in values else FLAGS.get(key, key)


def _integer(values: Mapping[str, Any], key: str, default: int, where: str, least: int, most: int) -> int:
    found = values.get(key, default)
    try:
        number = int(found)
        if isinstance(found, bool) or (isinstance(found, float) and number != found) or not least <= number <= most:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{_told(values, key)} {found!r} is no whole number from {least} to {most}", where=where,
                         cure=f"use for example {min(max(default, least), most)}") from None  # fmt: skip
    return number


def _number(values: Mapping[str, Any], key: str, default: float, where: str) -> float:
    found = values.get(key, default)
    try:
        number = float(found)
        if isinstance(found, bool) or not (math.isfinite(number) and number > 0):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UsageError(
            f"{key} {found!r} is no number above 0", where=where, cure=f"use for example {default:g}"
        ) from None
    return number


def _side(values: Mapping[str, Any], key: str, default: int, step_px: int, where: str) -> int:
    side = _integer(values, key, default, where, 1, MAX_SIDE_PX)
    if side % step_px:
        nearest = max(step_px, round(side / step_px) * step_px)
        raise UsageError(f"{key} {side} is no multiple of {step_px}", where=where, cure=f"use {nearest}")
    return side


def _frames(values: Mapping[str, Any], default: int, model: Model, where: str) -> int:
    frames, stride = _integer(values, "frame_count", default, where, 1, MAX_FRAMES), model.temporal_stride
    if frames != 1 and model.num_frames == 1:
        raise UsageError(
            f"{_told(values, 'frame_count')} {frames}: {model.name} makes pictures", where=where, cure="use 1"
        )
    if frames % stride != 1:
        nearest = max(1, round((frames - 1) / stride) * stride + 1)
        raise UsageError(f"frame_count {frames} is not {stride}n+1", where=where, cure=f"use {nearest}")
    return frames


def _sampler(values: Mapping[str, Any], default: str, model: Model, where: str) -> Literal["unipc", "dpm++", "euler"]:
    found = str(values.get("sample_sampler", default))
    if model.shift and found not in ("euler", "vanilla"):
        raise UsageError(f"{model.name} is sampled with euler, not {found}", where=where, cure="leave it out")
    for sampler in SAMPLERS:
        if {"vanilla": "euler"}.get(found, found) == sampler:
            return sampler
    raise UsageError(f"there is no sampler {found!r}", where=where, cure=f"use one of {', '.join(SAMPLERS)}")


def _image(values: Mapping[str, Any], default: Path | None, model: Model, where: str, folder: Path) -> Path | None:
    """The first frame: where the model needs one it must be there, where it takes none it must not."""
    if "end_image_path" in values:
        raise UsageError(f"{model.name} takes no last frame (--ei)", where=where, cure="leave it out")
    given = values.get("image_path", default)
    if given is None:
        if model.condition == "image":
            raise UsageError(f"{model.name} needs a first frame", where=where,
                             cure="give a picture: --image_path, or --i behind a prompt in a file")  # fmt: skip
        return None
    if model.condition in ("text", "controls"):
        cure = "leave it out" if model.condition == "text" else "a picture to edit is a --control_image_path, or --ci"
        raise UsageError(f"{model.name} takes no first frame (--i, --image_path)", where=where, cure=cure)
    picture = _picture(given, where, folder)
    read_facts(picture)  # it is one
    return picture


def _controls(
    values: Mapping[str, Any], default: Sequence[Path], model: Model, where: str, folder: Path
) -> tuple[Path, ...]:
    """The control images: as many as the model takes."""
    given = values.get("control_image_path", default)
    paths = [given] if isinstance(given, str | Path) else given
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | Path) for path in paths):
        raise UsageError(f"control_image_path {given!r} is neither a path nor a list of paths", where=where,
                         cure="write it in quotes, or leave it out")  # fmt: skip
    most = model.max_controls
    if paths and not most:
        raise UsageError("control images belong to other models (--ci, --control_image_path)", where=where,
                         cure="leave them out, or give --task qwen-image-edit-plus")  # fmt: skip
    if most and not 1 <= len(paths) <= most:
        give = "give a picture: --control_image_path, or --ci behind a prompt in a file"
        raise UsageError(f"{model.name} takes {wanted_controls(model)}, and {len(paths)} are given", where=where,
                         cure=fewer_controls(model) if paths else give)  # fmt: skip
    return tuple(_picture(path, where, folder) for path in paths)


def edited_size(control: Path, model: Model) -> tuple[int, int]:
    """The (width, height) that a picture is edited at: its own aspect ratio, at the model's area.

    Raises:
        WangenError: the picture cannot be read.
    """
    facts = read_facts(control)
    return area_size((facts.width, facts.height), model.resolution)


def _picture(given: Any, where: str, folder: Path) -> Path:
    places = [Path(str(given)), folder / str(given)]
    found = next((place for place in places if is_file(place)), None)
    if found is None:
        raise UsageError(f"there is no picture {printable(str(given))}", where=where,
                         cure=f"paths begin at the working folder or at {folder}")  # fmt: skip
    return found
