"""What musubi-tuner's trainer does, in the terms of wangen's training step, where the flags alone do not say it.

Some flags mean something only together, some are ignored there and refused here, and what is not said has other
defaults. Flags that are dealt with are taken off the call.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from wangen import profiles
from wangen.generator.bundle import ENCODING
from wangen.generator.lint.experts import expert_of
from wangen.generator.lint.script import Call, Given, Word
from wangen.generator.memory import PLAIN_MEMORY
from wangen.generator.table import text_of
from wangen.generator.train_values import optimizer_arguments
from wangen.profiles.foreign import musubi

Say = Callable[[str], None]
"""Takes a line for the user."""

_DENSITIES = ("logit_normal", "mode")
_INTERVALS = ("sample_every_n_steps", "sample_every_n_epochs", "sample_at_first")
_NO_PROMPTS = "it is for samples, and there are no --sample_prompts"
_STATE = "no state of musubi-tuner can be resumed: give the LoRA that was saved with it as --network_weights"
_BOUNDARY_SLACK = 50
"""Thousandths by which the timesteps of one expert may pass the boundary: people round it."""


def training_values(call: Call, changed: Say, left_out: Say) -> dict[str, Any]:
    """Raw values by field of `Train`, for what the flags of the call do not say in wangen's words.

    Args:
        call: of musubi-tuner's trainer; the flags that are dealt with are taken off it.
        changed: told of what the bundle says otherwise.
        left_out: told of what the bundle does not do.
    """
    values = dict(musubi()["defaults"][call.program])
    if call.given("max_train_epochs"):
        values.pop("max_train_steps", None)
    _drop(call, ("resume",), _STATE, left_out)
    _drop(call, ("img_in_txt_in_offloading",), "it is HunyuanVideo's", left_out)
    for name in ("optimizer_args", "network_args"):
        _keep_last(call, name, changed)
    if (call.value("network_module") or "").startswith("lycoris"):
        _drop(call, ("network_args",), "they are LyCORIS's", left_out)
    if call.value("network_alpha") and not call.number("network_alpha", 1.0):
        _take(call, "network_alpha")
        values["network_alpha"] = text_of(call.number("network_dim", float(values.get("network_dim", 4))))
    if call.given("sample_prompts") is None:
        _drop(call, (*_INTERVALS, *sorted(ENCODING - {"vae", "t5"})), _NO_PROMPTS, left_out)
    _adafactor(call, left_out)
    if call.value("lr_scheduler") == "rex":
        values["lr_scheduler_min_lr_ratio"] = "0.01"
    return values | _timesteps(call, changed, left_out) | _memory(call, left_out) | _one_expert(call, changed)


def _adafactor(call: Call, left_out: Say) -> None:
    """There it sets the learning rate itself unless `relative_step` is said to be false, and takes its own schedule."""
    if (call.value("optimizer_type") or "").lower() != "adafactor":
        return
    given = call.given("optimizer_args")
    told = [value.text for value in given.values] if given else []
    if not any(text.startswith("relative_step=") for text in told):
        line, told = call.line_of("optimizer_type"), [*told, "relative_step=True"]
        words = (*(given.values if given else ()), Word("relative_step=True", line))
        _take(call, "optimizer_args")
        call.flags.append(Given("optimizer_args", "--optimizer_args", words, line))
    if optimizer_arguments(told).get("relative_step"):
        _drop(call, ("lr_scheduler",), "Adafactor with relative_step=True has its own", left_out)


def _keep_last(call: Call, name: str, changed: Say) -> None:
    """Of a key=value that stands twice the last one counts in musubi-tuner; training here refuses it."""
    for number, flag in enumerate(call.flags):
        if flag.name != name:
            continue
        kept = {value.text.partition("=")[0]: value for value in flag.values}
        if len(kept) < len(flag.values):
            call.flags[number] = replace(flag, values=tuple(kept.values()))
            changed(f"line {flag.line}: {flag.spelled} says a key twice: its last value is taken, as musubi-tuner does")


def _timesteps(call: Call, changed: Say, left_out: Say) -> dict[str, Any]:
    """The sampling mode; there its default, sigma, draws as `--weighting_scheme` says and turns the draw round.

    A uniform draw and that of `mode` are symmetrical, so that only the mean of a logit-normal one changes its sign.
    """
    mode, scheme = call.value("timestep_sampling") or "sigma", call.value("weighting_scheme")
    if mode != "sigma":
        if scheme in _DENSITIES:
            _drop(call, ("weighting_scheme",), f"musubi-tuner's sampling mode {mode} ignores it", left_out)
        return {}
    _take(call, "timestep_sampling")
    _drop(call, ("preserve_distribution_shape",), "musubi-tuner's sampling mode sigma ignores it", left_out)
    for name in ("min_timestep", "max_timestep"):
        if flag := call.given(name):
            changed(f"line {flag.line}: --{name} counts from the clean end, as it says; musubi-tuner's sampling mode "
                    "sigma counts from the noisy one")  # fmt: skip
    if scheme == "mode":
        return {"timestep_sampling": "sigma"}
    if scheme != "logit_normal":
        return {"timestep_sampling": "uniform"}
    _take(call, "weighting_scheme")
    mean = call.number("logit_mean", 0.0)
    if not mean:
        return {"timestep_sampling": "logit_normal"}
    changed(f"line {call.line_of('logit_mean')}: --logit_mean {-mean:g} is what {mean:g} is in musubi-tuner's sampling "
            "mode sigma, which turns the draw round")  # fmt: skip
    _take(call, "logit_mean")
    return {"timestep_sampling": "logit_normal", "logit_mean": text_of(-mean)}


def _memory(call: Call, left_out: Say) -> dict[str, Any]:
    """What saves memory; wangen checkpoints unless it is told not to, and swapping needs it."""
    if call.given("gradient_checkpointing"):
        return dict(PLAIN_MEMORY)
    _drop(call, ("gradient_checkpointing_cpu_offload",), "musubi-tuner ignores it without --gradient_checkpointing",
          left_out)  # fmt: skip
    return {**PLAIN_MEMORY, "checkpointing": "full" if call.given("blocks_to_swap") else "none"}


def _one_expert(call: Call, changed: Say) -> dict[str, Any]:
    """The expert that a lone `--dit` is: by the timesteps that it is trained on, else by its name."""
    task = call.value("task") or ""
    model = profiles.model(task) if task in profiles.model_names() else None
    flag, start = call.given("dit"), call.given("network_weights")
    if model is None or model.experts is None or flag is None:
        return {}
    if call.given("dit_high_noise"):
        if (expert_of(call, "dit"), expert_of(call, "dit_high_noise")) == ("high", "low"):
            other = {"dit": "dit_high_noise", "dit_high_noise": "dit"}
            call.flags = [replace(given, name=other.get(given.name, given.name)) for given in call.flags]
            changed(f"line {flag.line}: the two experts were exchanged, by their names")
        if start:
            call.flags.append(replace(start, name="network_weights_high_noise"))
            changed(f"line {start.line}: both experts start from {start.spelled}, each an adapter of its own")
        return {}
    boundary = model.experts.boundary * 1000
    low, high = call.number("min_timestep", 0), call.number("max_timestep", 1000)
    is_high = low >= boundary - _BOUNDARY_SLACK
    if not is_high and high > boundary + _BOUNDARY_SLACK:
        is_high = expert_of(call, "dit") == "high"
        which = "high" if is_high else "low"
        changed(f"line {call.line}: the {which}-noise expert alone is trained, on its own timesteps")
    if is_high:
        call.flags = [
            replace(given, name=f"{given.name}_high_noise") if given.name in ("dit", "network_weights") else given
            for given in call.flags
        ]
    return {"experts": "high" if is_high else "low"}


def _take(call: Call, name: str) -> None:
    call.flags = [flag for flag in call.flags if flag.name != name]


def _drop(call: Call, names: tuple[str, ...], why: str, left_out: Say) -> None:
    """Take flags off a call, and say why."""
    for flag in call.flags:
        if flag.name in names:
            left_out(f"line {flag.line}: {flag.spelled}: {why}")
    call.flags = [flag for flag in call.flags if flag.name not in names]
