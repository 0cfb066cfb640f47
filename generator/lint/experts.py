"""Rules about what is trained: task, weights, timesteps, and the two experts of Wan 2.2."""

import math
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from wangen import profiles
from wangen.generator.expert_names import noise_of
from wangen.generator.kinds import KINDS
from wangen.generator.lint.kinds import Finding, Severity
from wangen.generator.lint.script import Call, Script

_BOUNDARY = {"t2v-A14B": 875, "i2v-A14B": 900}
_STARVED = 0.05
_USES_SHIFT = ("shift",)
_GENERIC = re.compile(r"diffusion_pytorch_model|model[.-]")
"""How names begin, in small letters, that say nothing: libraries give them to every model."""


def weights(script: Script) -> Iterator[Finding]:
    """Weight files that the tool cannot read or the model cannot use, by their names."""
    tasks = {task for call in script.calls if call.tool == "wangen" and (task := call.value("task"))}
    large = tasks == {"ti2v-5B"}
    for call in script.calls:
        for flag in call.flags:
            if flag.values and flag.name in profiles.WEIGHT_ROLES:
                name = re.split(r"[/\\]", flag.values[0].text)[-1].lower()
                found, cure = _vae(name, large) if flag.name == "vae" else _weight(call, flag.name, name)
                if not found:
                    found, cure = _of_another(call, flag.name, name)
                if found:
                    yield Finding("weights", flag.line, f"{flag.spelled}: {found}", cure)


def _vae(name: str, large: bool) -> tuple[str, str]:
    """What is wrong with a VAE by its name; `large`: every call is for TI2V-5B, which has one of its own."""
    if large and re.search(r"wan_?2[._]?1.*vae", name):
        return "TI2V-5B has a VAE of its own", "give Wan2.2_VAE.pth"
    if not large and re.search(r"wan_?2[._]?2.*vae", name):
        return "the VAE of Wan 2.2 belongs to the 5B model alone", "give Wan2.1_VAE.pth; the A14B models use it too"
    return "", ""


def _weight(call: Call, flag: str, name: str) -> tuple[str, str]:
    if name.endswith(".gguf") and call.tool == "musubi-tuner":
        return "GGUF files are not read", "give the .safetensors weights"
    if flag == "t5" and call.tool == "musubi-tuner" and re.search(r"umt5[-_]xxl[-_]fp(8|16)", name):
        return "this text encoder has ComfyUI's key names", "give models_t5_umt5-xxl-enc-bf16.pth"
    if flag.startswith("dit") and call.tool == "musubi-tuner":
        if name.endswith((".pth", ".pt", ".bin")):
            return "the transformer is read from .safetensors only", "give the .safetensors weights"
        if "fp8_scaled" in name or "fp8-scaled" in name or "scaled_fp8" in name:
            return "ComfyUI's fp8_scaled weights are never accepted", "give bf16 or fp16 weights and add --fp8_scaled"
    return "", ""


def _of_another(call: Call, flag: str, name: str) -> tuple[str, str]:
    """What is wrong with weights that by their name are of another model, or of another part of it."""
    models = [profiles.model(model) for model in profiles.model_names()]
    owners = [(model, weights) for model in models for weights in model.weights if _is_named(name, weights)]
    task = call.value("task") or ("t2v-14B" if (call.tool, call.name) == ("musubi-tuner", "train") else "")
    takers = [(model, weights) for model in models for weights in model.weights if weights.flag == flag]
    asked = [taker for taker in takers if taker[0].name == task] if _known(call, "task") else []
    fits = {_identity(*taker) for taker in asked or takers}
    if not owners or fits & {_identity(*owner) for owner in owners}:
        return "", ""
    owner, weights = owners[0]
    whose = f" of {owner.name}, and the task is {task}" if asked and weights.flag.startswith("dit") else ""
    best = next((taker[1] for taker in asked or takers if taker[0].name == "t2v-14B"), (asked or takers)[0][1])
    return f"by its name this is {KINDS[weights.kind][0]}{whose}", f"give {best.files[0]}"


def _is_named(name: str, weights: profiles.Weights) -> bool:
    patterns = (file.rpartition("/")[2].lower() for file in weights.files)
    return any(fnmatchcase(name, pattern) for pattern in patterns if not _GENERIC.match(pattern))


def _identity(model: profiles.Model, weights: profiles.Weights) -> tuple[str, profiles.TransformerSizes | None]:
    """What weights have to be, whatever flag takes them: experts and models of one make can stand for each other."""
    return weights.kind, model.transformer if weights.flag.startswith("dit") else None


def conditioning(script: Script) -> Iterator[Finding]:
    """What image-to-video needs in the cache, and what text-to-video does not."""
    trainings = [call for call in script.steps("train") if call.tool == "musubi-tuner"]
    tasks = {call.value("task") or "t2v-14B" for call in trainings if not call.more and _known(call, "task")}
    images = {task for task in tasks if task.startswith(("i2v", "flf2v"))}
    for call in script.steps("cache_latents"):
        if call.tool != "musubi-tuner" or not tasks:
            continue
        has = {flag.name for flag in call.flags}
        if images and not has & {"i2v", "clip"} and not call.more:
            yield Finding("i2v", call.line, f"--task {min(images)} trains on the first frame, which is cached only "
                          "with --i2v", "add --i2v to this line")  # fmt: skip
        if images & {"i2v-14B", "flf2v-14B"} and "clip" not in has and not call.more:
            yield Finding("i2v", call.line, f"--task {min(images)} (Wan 2.1) needs the image encoder",
                          "add --clip PATH of models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth")  # fmt: skip
        if "clip" in has and any("A14B" in task for task in tasks):
            yield Finding("clip", call.line_of("clip"), "the A14B models of Wan 2.2 have no image encoder: --clip "
                          "belongs to Wan 2.1 image-to-video", "take --clip off; for i2v-A14B write --i2v")  # fmt: skip
        elif has & {"i2v", "clip"} and not images:
            spelled = "i2v" if "i2v" in has else "clip"
            yield Finding("i2v", call.line_of(spelled), f"--{spelled} caches first frames, which --task "
                          f"{min(tasks)} does not use", "take it off", "warning")  # fmt: skip
    for call in trainings:
        if call.given("clip") and "A14B" in (call.value("task") or ""):
            yield Finding("clip", call.line_of("clip"), "the A14B models of Wan 2.2 have no image encoder",
                          "take --clip off")  # fmt: skip
        if (call.value("task") or "").startswith("flf2v"):
            yield Finding("i2v", call.line_of("task"), "flf2v-14B cannot be trained on clips: the cache holds first "
                          "frames only", "train i2v-14B")  # fmt: skip


def timesteps(script: Script) -> Iterator[Finding]:
    """Sampling modes that invert the range, ignore the shift or never reach what should be trained."""
    for call in script.steps("train"):
        low, high = call.number("min_timestep", 0), call.number("max_timestep", 1000)
        if low >= high:
            yield Finding("timesteps", call.line_of("min_timestep"), f"--min_timestep {low:g} is not below "
                          f"--max_timestep {high:g}", "exchange them")  # fmt: skip
        if call.tool == "musubi-tuner" and not call.more and _known(call, "timestep_sampling"):
            yield from _sampling(call)


def _sampling(call: Call) -> Iterator[Finding]:
    mode = call.value("timestep_sampling") or "sigma"
    scheme = call.value("weighting_scheme") or "none"
    bounded = [name for name in ("min_timestep", "max_timestep") if call.given(name)]
    line = call.line_of("timestep_sampling")
    if mode == "sigma" and bounded:
        yield Finding("timesteps", call.line_of(bounded[0]), f"the sampling mode sigma inverts --{bounded[0]}: what is "
                      "meant for the noisy end trains the clean one", "write --timestep_sampling shift")  # fmt: skip
    if call.given("discrete_flow_shift") and mode not in _USES_SHIFT:
        spelled = "sigma, the default," if call.given("timestep_sampling") is None else mode
        yield Finding("shift", call.line_of("discrete_flow_shift"), f"the sampling mode {spelled} ignores "
                      "--discrete_flow_shift", "write --timestep_sampling shift, or take the shift off")  # fmt: skip
    if mode == "shift" and call.given("discrete_flow_shift") is None:
        yield Finding("shift", line, "--timestep_sampling shift without --discrete_flow_shift is a shift of 1, which "
                      "is none", "write --discrete_flow_shift 5 (12 for the experts of A14B)")  # fmt: skip
    if scheme in ("logit_normal", "mode") and mode != "sigma":
        yield Finding("shift", call.line_of("weighting_scheme"), f"--weighting_scheme {scheme} works with the "
                      f"sampling mode sigma only, not with {mode}", "take it off")  # fmt: skip


def experts(script: Script) -> Iterator[Finding]:
    """The two transformers of Wan 2.2: each must be trained on its own range of timesteps."""
    for call in script.steps("train"):
        if call.tool != "musubi-tuner" or call.more or not _known(call, "task"):
            continue
        task = call.value("task") or "t2v-14B"
        if call.given("dit_high_noise"):
            yield from _both(call, task)
        elif task in _BOUNDARY:
            yield from _one(call, _BOUNDARY[task])


def _both(call: Call, task: str) -> Iterator[Finding]:
    line = call.line_of("dit_high_noise")
    if task not in _BOUNDARY:
        yield Finding("experts", line, f"--dit_high_noise belongs to the A14B models, the task is {task}",
                      "write --task t2v-A14B or i2v-A14B")  # fmt: skip
        return
    yield from swapped(call)
    boundary = call.number("timestep_boundary", _BOUNDARY[task])
    boundary = boundary / 1000 if boundary > 1 else boundary
    share = noisy_share(call, boundary)
    if share is not None and share < _STARVED:
        mode, cure = call.value("timestep_sampling") or "sigma", "take --max_timestep off"
        if call.number("max_timestep", 1000) > 1000 * boundary:
            cure = "write --timestep_sampling shift --discrete_flow_shift 12 (70 %), or 5 (37 %)"
        yield Finding("starved", call.line_of("timestep_sampling"), f"with the sampling mode {mode} "
                      f"{100 * share:.2g} % of the steps train the high-noise expert: it stays untrained",
                      cure)  # fmt: skip
    if call.given("num_timestep_buckets"):
        yield Finding("experts", call.line_of("num_timestep_buckets"), "--num_timestep_buckets is not respected "
                      "with two experts", "take it off", "warning")  # fmt: skip


def swapped(call: Call, grave: Severity | None = None) -> Iterator[Finding]:
    """Both experts by the names of their files: exchanged, or one of them given twice."""
    named = expert_of(call, "dit"), expert_of(call, "dit_high_noise")
    line = call.line_of("dit_high_noise")
    if named[0] and named[0] == named[1]:
        yield Finding("experts", line, f"by their names both are weights of the {named[0]}-noise expert",
                      "give the low-noise transformer to --dit, the other one to --dit_high_noise", grave)  # fmt: skip
    elif named[0] == "high" or named[1] == "low":
        yield Finding("experts", line, "--dit takes the low-noise transformer and --dit_high_noise the other one",
                      "exchange them", grave)  # fmt: skip


def _one(call: Call, boundary: int) -> Iterator[Finding]:
    """One expert alone: `min_timestep` and `max_timestep` must keep it in its range."""
    expert = expert_of(call, "dit")
    low, high = call.number("min_timestep", 0), call.number("max_timestep", 1000)
    line = call.line_of("min_timestep") if call.given("min_timestep") else call.line_of("max_timestep")
    wanted = {
        "high": f"--min_timestep {boundary} --max_timestep 1000",
        "low": f"--min_timestep 0 --max_timestep {boundary}",
    }
    if not call.given("min_timestep") and not call.given("max_timestep"):
        which = f"write {wanted[expert]}" if expert else f"for the low-noise expert write {wanted['low']}"
        yield Finding("experts", call.line, "one expert of Wan 2.2 is trained on the timesteps of both",
                      which, "warning")  # fmt: skip
        return
    inside = {"high": low >= boundary - 50, "low": high <= boundary + 50}
    if expert and not inside[expert]:
        yield Finding("experts", line, f"by their name these are weights of the {expert}-noise expert, trained on "
                      f"timesteps {low:g} to {high:g}", f"write {wanted[expert]}")  # fmt: skip


def expert_of(call: Call, flag: str) -> str:
    """Which expert a weight file is by its name or its folder's: `high`, `low` or nothing."""
    return noise_of(Path((call.value(flag) or "").replace("\\", "/")), has_two=True)


def _known(call: Call, name: str) -> bool:
    """Whether the flag is left out, or its value can be read from the script."""
    return call.given(name) is None or call.value(name) is not None


def noisy_share(call: Call, boundary: float) -> float | None:
    """The share of steps with a sigma at or above `boundary`, by musubi-tuner's formulas; None for other modes."""
    low, high = (call.number(name, default) / 1000 for name, default in (("min_timestep", 0), ("max_timestep", 1000)))
    if (low, high) == (0, 1):
        return _drawn_above(call, boundary)
    if low >= high or (call.value("timestep_sampling") or "sigma") == "sigma":  # it inverts them, which is said
        return None
    if not call.given("preserve_distribution_shape"):
        return _drawn_above(call, min(max((boundary - low) / (high - low), 0), 1))
    above, least, most = (_drawn_above(call, min(max(sigma, low), high)) for sigma in (boundary, low, high))
    if above is None or least is None or most is None or least == most:
        return None
    return (above - most) / (least - most)


def _drawn_above(call: Call, boundary: float) -> float | None:
    """Likewise, of what is drawn before it is squeezed or cut."""
    if not 0 < boundary < 1:
        return 1.0 if boundary <= 0 else 0.0
    mode = call.value("timestep_sampling") or "sigma"
    scheme = call.value("weighting_scheme") or "none"
    logit = math.log(boundary / (1 - boundary))
    mean, deviation = call.number("logit_mean", 0), call.number("logit_std", 1) or 1.0
    scale = call.number("sigmoid_scale", 1) or 1.0
    if mode == "uniform" or (mode == "sigma" and scheme != "logit_normal"):
        return 1 - boundary
    if mode == "sigma":  # drawn sigmoid(N(mean, std)) and turned round
        return _above((logit + mean) / deviation)
    if mode == "sigmoid":
        return _above(logit / scale)
    if mode == "shift":
        return _above((logit - math.log(max(call.number("discrete_flow_shift", 1), 1e-6))) / scale)
    if mode == "logsnr":  # sigma = sigmoid(-l / 2), so that large sigmas are small l
        return 1 - _above((-2 * logit - mean) / deviation)
    return None


def _above(z: float) -> float:
    """The probability that a standard normal draw is above z."""
    return 0.5 * math.erfc(z / math.sqrt(2))


RULES = (weights, conditioning, timesteps, experts)
