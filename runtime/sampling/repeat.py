"""`--from FILE`: the settings inside a video or picture, and what of its making must be given again.

A file says everything that decides its pixels: pinned flags by name, and weights, LoRAs and the first frame by digests.
It holds no paths: what it was made with is given on the command line, and compared.
"""

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from wangen import profiles
from wangen.generator import headers
from wangen.generator.commands import convert
from wangen.generator.errors import UsageError, WangenError, printable
from wangen.generator.lora_config import lora_identity
from wangen.generator.sample_prompts import SamplePrompt
from wangen.generator.steps import Generate
from wangen.generator.table import options as flags_of
from wangen.generator.tokenizer_file import tokenizer_digest, tokenizer_of
from wangen.runtime.sampling.output import read_settings

log = logging.getLogger("wangen")

WEIGHTS = ("dit", "dit_high_noise", "vae", "t5", "clip")
LORAS = {"loras": "lora_weight", "loras_high_noise": "lora_weight_high_noise"}
MULTIPLIERS = {"lora_multiplier": "lora_weight", "lora_multiplier_high_noise": "lora_weight_high_noise"}
LIBRARIES = ("torch", "diffusers")
SHOWN_DIGITS = 16


def identities(options: Generate) -> dict[str, Any]:
    """Digests of what is given by path: `weights` by flag, `loras` and `loras_high_noise` in their order.

    Raises:
        WangenError: a file cannot be read.
    """
    given = {name: getattr(options, name) for name in WEIGHTS}
    weights = {name: headers.identity(path, f"--{name}") for name, path in given.items() if path is not None}
    model = profiles.model(options.task) if options.task else None
    weights["tokenizer"] = tokenizer_digest(tokenizer_of(options.t5, options.tokenizer, model))
    loras = {key: [lora_identity(path) for path in getattr(options, flag)] for key, flag in LORAS.items()}
    return {"weights": weights, **loras}


def made_on(device_type: str) -> dict[str, Any]:
    """What decides the last digits beside the settings: the kind of device, and the libraries' versions."""
    return {"device": device_type, "versions": {name: version(name) for name in LIBRARIES}}


def video_settings(options: Generate, prompt: SamplePrompt) -> dict[str, Any]:
    """The pinned flags of one video, by name, and the digests of its pictures.

    Args:
        options: with every default filled in.
        prompt: of this video.
    """
    own = {
        "prompt": prompt.prompt,
        "negative_prompt": prompt.negative_prompt,
        "video_size": (prompt.height, prompt.width),
        "video_length": prompt.frames,
        "fps": prompt.fps,
        "seed": prompt.seed,
        "infer_steps": prompt.steps,
        "flow_shift": prompt.shift,
        "guidance_scale": prompt.guidance,
        "guidance_scale_high_noise": prompt.guidance_high_noise if options.dit_high_noise else None,
        "sample_solver": prompt.sampler,
    }
    pinned = {option.name: getattr(options, option.name) for option in flags_of(Generate) if option.flag.pinned}
    controls = {"controls": list(map(_digest, prompt.controls))} if prompt.controls else {}
    del pinned["background_color"]
    behind = {"background_color": prompt.background} if prompt.shows_background else {}
    return {**pinned, **own, "image": _digest(prompt.image) if prompt.image else None, **controls, **behind}


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise WangenError(f"the picture cannot be read: {error.strerror}", where=str(path)) from None


def filled(options: Generate) -> tuple[Generate, Mapping[str, Any]]:
    """The options with what the file of `--from` says where they say nothing, and all that it says.

    Without `--from` the options as they are, and nothing.

    Raises:
        UsageError: the file cannot be read, or was not made by `generate`, or by a later version.
    """
    if options.repeat is None:
        return options, {}
    told, where = read_settings(options.repeat, "--from"), str(options.repeat)
    flags = {option.name: option for option in flags_of(Generate) if option.flag.pinned}
    _require_own(told, {*flags, "weights", *LORAS, "image", "controls", "device", "versions"}, where)
    taken = {}
    for name, option in flags.items():
        raw = told.get(name)
        stays = getattr(options, name) not in (None, ()) or (name == "prompt" and options.prompt_file)
        if raw in (None, []) or stays:
            continue
        value, flag = convert(option, raw, where), MULTIPLIERS.get(name)
        if flag is None or len(value) == len(getattr(options, flag)):
            taken[name] = value
    if options.guidance_scale is not None:  # given, it is both experts', as without --from
        taken.pop("guidance_scale_high_noise", None)
    return replace(options, **taken), told


def _require_own(told: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse settings that this step did not write, or a later version of it."""
    weights, loras = told.get("weights"), [told.get(key, []) for key in LORAS]
    if weights is None:
        raise UsageError("--from: this file was made while a LoRA was trained, by weights that no file holds",
                         where=where, cure="give its settings as flags: samples.jsonl beside it has them")  # fmt: skip
    if later := told.keys() - known:
        raise UsageError(f"--from: this version of wangen does not know the setting {printable(min(later))}",
                         where=where, cure="install the version that made the file, or a later one")  # fmt: skip
    loras.append(told.get("controls", []))
    lists = isinstance(weights, dict) and all(isinstance(one, list) for one in loras)
    digests = [*weights.values(), *chain.from_iterable(loras), told.get("image") or ""] if lists else [None]
    if not all(isinstance(digest, str) for digest in digests):
        raise UsageError("--from: the settings in this file are damaged", where=where,
                         cure="give the file as it was made")  # fmt: skip


def compare(options: Generate, told: Mapping[str, Any], found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """See that a file is repeated by what it was made with.

    Args:
        options: of the repetition.
        told: the file's settings; nothing is compared where there are none.
        found: the present `identities` and `made_on`.
        own: the present settings of the first video, with the digests of its pictures.

    Raises:
        WangenError: a weight, a LoRA or the first frame is another, and `--changed` is not given.
    """
    if not told:
        return
    changed = list(_differences(told, found))
    if options.prompt_file is None:
        if told.get("image") != own["image"]:
            changed.append(_changed("--image_path", told.get("image"), own["image"]))
        changed += _pairs("--control_image_path", told.get("controls", []), own.get("controls", []))
    if changed and not options.changed:
        listed = "\n".join(f"  - {line}" for line in changed)
        raise WangenError(f"--from: the file was made with others\n{listed}", where=str(options.repeat),
                          cure="give the same files, or --changed to take these")  # fmt: skip
    for line in changed:
        log.warning("  not as in the file: %s", line)
    for name in MULTIPLIERS:  # of a folder with both experts' LoRAs both are those of --lora_multiplier
        before, now = ([float(number) for number in each.get(name) or ()] for each in (told, own))
        if before != now:
            log.warning("  not as in the file: --%s %s, now %s", name, before, now)
    for key in ("device", "versions"):
        if told.get(key) != found[key]:
            log.warning("  made with %s %s, now %s: equal up to rounding", key, told.get(key), found[key])


def _differences(told: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Weights and LoRAs whose digests differ, in words."""
    before, now = dict(told["weights"]), found["weights"]
    changed = [
        _changed(f"--{name}", before.get(name), now.get(name))
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
    ]
    for key, flag in LORAS.items():
        changed += _pairs(f"--{flag}", told.get(key, []), found[key])
    return changed


def _pairs(flag: str, before: Sequence[str], now: Sequence[str]) -> list[str]:
    """The files of a flag, by their digests, that are others in one place of two lists or the other."""
    return [_changed(flag, *pair) for pair in zip_longest(before, now) if pair[0] != pair[1]]


def _changed(flag: str, before: str | None, now: str | None) -> str:
    words = [one[:SHOWN_DIGITS] if one else "none" for one in (before, now)]
    return f"{flag}: {words[0]} in the file, {words[1]} given"
