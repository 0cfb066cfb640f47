"""Everything about a training run's flags that can be judged before a model loads, from flags and headers."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wangen import profiles
from wangen.generator.adapter_settings import loraplus_ratio
from wangen.generator.edit_tasks import task_warning
from wangen.generator.errors import UsageError
from wangen.generator.experts import ORDER, choose_boundary, expect_two_experts, expert_of, lora_of_the_other
from wangen.generator.formats import Header
from wangen.generator.headers import num_blocks, read_header, shards
from wangen.generator.kinds import expect
from wangen.generator.launch import Launch
from wangen.generator.memory import LONG_TEXT
from wangen.generator.memory_presets import for_smaller_steps, require_fitting, resolve_vram
from wangen.generator.sample_prompts import MAX_STEPS, read_prompts
from wangen.generator.steps import Train
from wangen.generator.tasks import require_supported
from wangen.generator.train_refusals import choose_condition_frames, refuse_experts, refuse_flags, refuse_more_blocks
from wangen.generator.unread_flags import unread
from wangen.runtime.devices import require_compiler
from wangen.runtime.lora_folder import find_lora, has_lora, require_one_run, written_by
from wangen.runtime.models import expect_vae, family
from wangen.runtime.training.adapter_refusals import require_adapter, trained_transformers
from wangen.runtime.training.optim import try_out
from wangen.runtime.training.optimizer_class import optimizer_class
from wangen.runtime.training.plan import Plan
from wangen.runtime.training.schedules import make_schedule
from wangen.runtime.training.trackers import require_trackers

log = logging.getLogger("wangen")

MANY_STEPS = 10**9
ALONE = Launch()


def resolved(options: Train, model: profiles.Model, free: int | None, launch: Launch = ALONE) -> Train:
    """The flags with what the model, the card and the folders of earlier runs decide filled in.

    Args:
        options: as they were given.
        model: its profile.
        free: bytes of the card, as `devices.free_bytes` says before anything is done there.
        launch: how many processes train.

    Raises:
        UsageError: `--timestep_boundary`, `--condition_frames` or `--condition_dropout` is for other models, or is no
            such number; a folder given as a LoRA is this run's own.
        WangenError: such a folder has no LoRA that fits.
    """
    if options.cache_mode == "realtime":  # encoders work where training does, between its steps
        options = replace(options, max_data_loader_n_workers=0)
    options = resolve_vram(options, model, free, launch.shards(options.parallel))
    boundary = choose_boundary(options.timestep_boundary, model)
    frames = choose_condition_frames(options.condition_frames, model)
    if options.condition_dropout and not frames:
        raise UsageError("--condition_dropout: no draw of this run is given frames",
                         cure="leave it out, or give --condition_frames to a model that takes them")  # fmt: skip
    options = _with_loras_found(options, model)
    return replace(
        options, timestep_boundary=boundary, condition_frames=frames, loraplus_lr_ratio=loraplus_ratio(options)
    )


def _with_loras_found(options: Train, model: profiles.Model) -> Train:
    """The flags with the LoRA's file in place of each folder of a run.

    Raises:
        UsageError: a folder is the one that this run writes to, or a file one that it writes.
        WangenError: a folder has none that fits.
    """
    trained = ("high", "low") if options.experts == "both" else (options.experts,)
    only = f"{trained[0]}_noise" if model.experts and len(trained) == 1 else ""
    starts = {"network_weights_high_noise": "high", "network_weights": "low"} if model.experts else {
        "network_weights": ""
    }  # fmt: skip
    start = options.network_weights if model.experts and options.experts == "both" else None
    if start and options.network_weights_high_noise is None and has_lora(start, "high_noise"):
        options = replace(options, network_weights_high_noise=start)  # a run's folder has a LoRA of each
    stems = [f"{options.output_name}_{expert}_noise" for expert in trained] if model.experts else [options.output_name]
    found: dict[str, Any] = {}
    for name, expert in starts.items():
        path = getattr(options, name)
        if path and (not expert or expert in trained):
            _refuse_own(options, path, f"--{name}", stems)
            found[name] = find_lora(path, f"--{name}", f"{expert}_noise" if expert else "")
    if options.network_weights and options.network_weights == options.network_weights_high_noise:
        require_one_run(options.network_weights, found.values())
    for path in options.base_weights:
        _refuse_own(options, path, "--base_weights", stems)
    base_weights = tuple(find_lora(path, "--base_weights", only) for path in options.base_weights)
    return replace(options, **found, base_weights=base_weights)


def _refuse_own(options: Train, path: Path, flag: str, stems: Iterable[str]) -> None:
    """Refuse a start that changes on the way: this run's own folder, or a LoRA there that it writes over or drops."""
    place = options.output_dir.resolve()
    elsewhere = "elsewhere and name the copy, or give another --output_name or --output_dir"
    if path.is_dir() and path.resolve() == place:
        raise UsageError(f"{flag} is the folder that this run writes to: its best and its last change on the way",
                         where=str(path), cure=f"copy the LoRA {elsewhere}")  # fmt: skip
    if path.resolve().parent == place and any(written_by(stem).fullmatch(path.name) for stem in stems):
        raise UsageError(f"{flag} is a file that this run writes over or removes", where=str(path),
                         cure=f"copy it {elsewhere}")  # fmt: skip


def for_its_steps(plan: Plan, asked: Train, free: int | None, launch: Launch) -> Plan:
    """The plan, with other memory flags where `--vram` has a preset for larger steps than the dataset's.

    Args:
        plan: of the run.
        asked: the options as they were given.
        free: as `resolved` had it.
        launch: several processes keep the preset, for their cards and their ways to hold the model differ; so do
            weights that have not as many blocks as the model.

    Raises:
        UsageError: `--vram auto` found no preset that fits, and the dataset's largest batch does not, either.
    """
    if not asked.vram:
        return plan
    if launch.count == 1:
        found = for_smaller_steps(plan.options, asked, plan.model, plan.tokens_with(LONG_TEXT), free)
        files = (getattr(asked, name) for name in trained_transformers(asked, plan.model))
        layers = plan.model.transformer.num_layers
        if found != plan.options and all(num_blocks(read_header(file)) == layers for file in files):
            plan = replace(plan, options=found)
    tokens = plan.tokens_of_a_pass(launch.count)
    require_fitting(plan.options, asked, plan.model, tokens, free, launch.shards(asked.parallel))
    return plan


def refuse(options: Train, model: profiles.Model, device: torch.device) -> None:
    """Refuse flags that no run can have, and files that are not what they are given for.

    Args:
        options: as `resolved` gives them.
        model: the model profile.
        device: to train on.

    Raises:
        UsageError: numbers out of range, flags that contradict each other, or an optimizer that cannot be resumed.
        WangenError: a file is of another kind.
    """
    refuse_anywhere(options, model)
    if options.compile and not options.plain:
        require_compiler()
    try_out(options, device)
    if model.experts:
        _warn_of_the_other_expert(options)
    if warning := task_warning(options.dit, model):
        log.warning("  %s", warning)
    for line in unread(options):
        log.warning("  %s", line)


def refuse_anywhere(options: Train, model: profiles.Model) -> None:
    """Refuse what can be judged without the device.

    Args:
        options: as `resolved` gives them.
        model: the model profile.

    Raises:
        WangenError: as for `refuse`.
    """
    require_supported(model, "training")
    refuse_flags(options)
    refuse_experts(options, model)
    _refuse_samples(options, model)
    _refuse_continuations(options, model)
    make_schedule(options, MANY_STEPS)  # what it refuses of a run of any length
    optimizer_class(options)
    require_adapter(options, model)
    require_trackers(options)
    _expect_files(options, model)


def _refuse_samples(options: Train, model: profiles.Model) -> None:
    asked = options.sample_every_n_steps or options.sample_every_n_epochs or options.sample_at_first
    if options.sample_prompts is None:
        if asked and not options.sample_continuations:
            raise UsageError("samples are asked for and there are no prompts", cure="give --sample_prompts FILE.txt")
        return
    require_supported(model, "sampling")
    missing = [f"--{name}" for name in ("vae", "t5") if getattr(options, name) is None]
    if missing:
        raise UsageError(f"samples need {' and '.join(missing)}", cure="they encode the prompts and decode the samples")
    read_prompts(options.sample_prompts, model, options.seed, tell=False)


def _refuse_continuations(options: Train, model: profiles.Model) -> None:
    if not options.sample_continuations:
        if options.continuation_guidance != 1 or options.continuation_steps is not None:
            raise UsageError("--continuation_guidance and --continuation_steps: there are no clips to continue",
                             cure="give --sample_continuations, for example 4")  # fmt: skip
        return
    if model.condition != "text_or_image":
        raise UsageError(f"--sample_continuations: {model.name} does not take given frames this way",
                         cure="leave it out, or train ti2v-5B")  # fmt: skip
    lacking = {
        "--validation_items or --validation_config": options.validation_items or options.validation_config,
        "--condition_frames above 0": options.condition_frames,
        "--vae": options.vae,
    }
    if missing := [flag for flag, value in lacking.items() if not value]:
        raise UsageError(f"--sample_continuations needs {', '.join(missing)}",
                         cure="held-out clips are continued from their first frames, and decoded")  # fmt: skip
    if (options.continuation_steps or 1) > MAX_STEPS:
        raise UsageError(f"--continuation_steps must be at most {MAX_STEPS}, got {options.continuation_steps}")
    assert options.vae is not None
    expect_vae(options.vae, model)


def _expect_files(options: Train, model: profiles.Model) -> None:
    """The weights are what their flags say, read from the headers."""
    for name in trained_transformers(options, model):
        path, flag = getattr(options, name), f"--{name}"
        _refuse_blocks(options, expect(path, model.kind_of(name), flag, options.task))
        # Without memory: whether all tensors are there, in the model's shapes, and stored in forms that are read.
        family(model).load_transformer(shards(path, flag)[0], device="meta")
    if model.experts and options.experts == "both" and options.dit and options.dit_high_noise:
        expect_two_experts(options.dit, options.dit_high_noise)


def _refuse_blocks(options: Train, header: Header) -> None:
    """More blocks to swap than the file has blocks that are recomputed."""
    if number := num_blocks(header):
        refuse_more_blocks(options, number)


def _warn_of_the_other_expert(options: Train) -> None:
    """Say which file seems to be the other expert's, by its name or a LoRA's header, or is not used."""
    for path in options.base_weights:
        for own in ("low", "high"):
            warning = lora_of_the_other(path, "--base_weights", own)
            if warning and options.experts in ("both", own):
                log.warning("  %s, and is merged into the %s-noise one too", warning, own)
    starts = options.network_weights or options.network_weights_high_noise
    for own, other, dit, lora in (
        ("low", "high", "dit", "network_weights"),
        ("high", "low", "dit_high_noise", "network_weights_high_noise"),
    ):
        path, start = getattr(options, dit), getattr(options, lora)
        if options.experts == other:
            if start:
                log.warning("  --%s is the %s-noise expert's, which is not trained: it is not used", lora, own)
            continue
        if expert_of(path, f"--{dit}") == other:
            log.warning("  --%s is %s: is it the %s-noise expert? %s", dit, path.name, other, ORDER)
        if options.experts == "both" and starts and start is None:
            log.warning("  the %s-noise expert starts from nothing: its adapter would be --%s", own, lora)
        if start and (warning := lora_of_the_other(start, f"--{lora}", own)):
            log.warning("  %s", warning)
