"""`evaluate`: checkpoints against the base, on what was not trained on: losses, paired videos, signals, a ranking.

The way: held-out items from the cache -> losses of the base and of every checkpoint at the same points -> the ranking
-> videos of the base and the best, from the same noise -> what their frames and latents show -> `evaluation.json`. Each
part that is done is kept and not done again.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from wangen import profiles
from wangen.generator import headers
from wangen.generator.errors import UsageError, WangenError, many
from wangen.generator.run_folder import EVALUATION, FIRST_FRAMES, LOSSES, VIDEOS
from wangen.generator.sample_prompts import SamplePrompt
from wangen.generator.sampling_refusals import as_generate, refuse_judging
from wangen.generator.session import Report
from wangen.generator.steps import Evaluate, Generate, Train
from wangen.generator.tasks import require_supported
from wangen.generator.workspace import require_writable
from wangen.profiles import Model
from wangen.runtime.cache import digest
from wangen.runtime.devices import DTYPES, choose_device, free_bytes
from wangen.runtime.evaluation.candidates import find_candidates
from wangen.runtime.evaluation.clip_score import ClipScore
from wangen.runtime.evaluation.judging import Judging, Points
from wangen.runtime.evaluation.nearest import TrainingClip, TrainingLatents
from wangen.runtime.evaluation.prompts import choose_prompts
from wangen.runtime.evaluation.tables import (
    Candidate,
    activity_of,
    by_activity,
    by_timestep,
    independent,
    mean,
    ranking,
    sources_of,
    whole,
)
from wangen.runtime.evaluation.trained import Seen, given_frames, said_of, seen_sources
from wangen.runtime.evaluation.videos import describe, make, plan_videos, usual_motion, with_loras
from wangen.runtime.evaluation.warnings import forgotten, warnings_of
from wangen.runtime.evaluation_file import BASE, Evaluation, Memorisation, Row, Video, write_evaluation
from wangen.runtime.fast.attention import choose_kernel
from wangen.runtime.loader import CachedSample, find_entries, latent_of
from wangen.runtime.models import Family, family
from wangen.runtime.samples import read_samples
from wangen.runtime.sampling.options import require_files, resolved
from wangen.runtime.sampling.repeat import made_on
from wangen.runtime.sampling.sampler import ExpertWeights, Sampler, Settings
from wangen.runtime.sampling.scenes import Encoders, make_scenes
from wangen.runtime.sampling.videos import Decoder
from wangen.runtime.training import refusals
from wangen.runtime.training.held_out import held_out
from wangen.runtime.training.samples import on_other_dataset
from wangen.runtime.training.step import item_errors
from wangen.runtime.training.validation import Losses

log = logging.getLogger("wangen")

SMOKE_TIMESTEPS, SMOKE_PROMPTS = 2, 1
NOT_TRAINED_ON = "a dataset that was not trained on, without --validation_items"


@dataclass(frozen=True)
class EvaluationPlan:
    """All that is known before a model loads.

    Attributes:
        options: the flags.
        sampling: what `generate` would be told, resolved; without LoRAs.
        model: the model profile.
        kind: its family.
        device: where to compute.
        points: where losses are measured.
        candidates: the checkpoints, in the order of their steps.
        held_out: items that were not trained on.
        forgetting: items outside of what was trained.
        training: items that were trained on.
        seen: which files were trained on, or may have been, also by what the checkpoints' headers tell.
        prompts: activities and prompts of the videos.
    """

    options: Evaluate
    sampling: Generate
    model: Model
    kind: Family
    device: torch.device
    points: Points
    candidates: Sequence[Candidate]
    held_out: Sequence[CachedSample]
    forgetting: Sequence[CachedSample]
    training: Sequence[CachedSample]
    seen: Seen
    prompts: Sequence[tuple[str, SamplePrompt]] = ()

    @property
    def experts(self) -> list[ExpertWeights]:
        """The transformers, without LoRAs."""
        low = ExpertWeights(self.options.dit)
        high = self.options.dit_high_noise
        return [low] if high is None else [ExpertWeights(high, high_noise=True), low]

    @property
    def encoders(self) -> Encoders:
        """The weights around them; only asked for videos."""
        return Encoders.of(self.options)

    def load(self, experts: Sequence[ExpertWeights]) -> Sampler:
        """Transformers with LoRAs, in memory."""
        own, sampling = self.options, self.sampling
        assert sampling.dtype is not None
        how = Settings(dtype=sampling.dtype, attention=own.attention, quantize=own.quantize,
                       blocks_to_swap=own.blocks_to_swap, boundary=sampling.timestep_boundary or 0.0,
                       cure="give --blocks_to_swap or --quantize, or fewer LoRAs")  # fmt: skip
        return Sampler(self.kind, self.model, experts, how, self.device)


def run(options: Evaluate) -> Report:
    """Judge checkpoints, and write `evaluation.json` and the videos into `--output_dir`.

    Raises:
        UsageError: flags contradict each other or the model.
        WangenError: the cache is incomplete, a file is of another kind, the memory or the disk is full.
    """
    plan = _plan(options)
    clip_score = ClipScore(options.clip_model, plan.device) if options.clip_model and options.num_videos else None
    found = _losses(plan)
    base, others = found["held out"].pop(BASE), found["held out"]
    groups = independent(plan.held_out)
    ranked = ranking(base, others, [one for one in plan.candidates if one.name in others], groups,
                     options.output_dir)  # fmt: skip
    videos, copies, made = _videos(plan, ranked[0].name, _training_latents(plan), clip_score)
    evaluation = Evaluation(
        mean_base=whole("", base, {}).base,
        checkpoints=tuple(ranked),
        best=ranked[0].name,
        num_items=len(base.keys),
        num_trained=sum(source in plan.seen.surely for source in sources_of(plan.held_out)),
        per_timestep=by_timestep(base, others),
        per_activity=_activities(plan, base, others),
        forgetting=_forgetting(found.get("forgetting")),
        videos=videos,
        memorisation=copies,
    )
    said = [*said_of(plan.held_out, plan.seen), *warnings_of(evaluation, base, others, groups)]
    if plan.forgetting:
        said += forgotten(ranked[0].name, found["forgetting"], independent(plan.forgetting))
    evaluation = replace(evaluation, warnings=tuple(said))
    write_evaluation(evaluation, options.output_dir / EVALUATION)
    return _report(plan, evaluation, made)


def _plan(options: Evaluate) -> EvaluationPlan:
    """Refuse what can be refused, and find all that is judged.

    Raises:
        UsageError: flags contradict each other or the model.
        WangenError: the cache is incomplete, or a file is of another kind.
    """
    model = profiles.model(options.task)
    require_supported(model, "sampling")
    device = choose_device(options.device)
    refuse_judging(options, model)
    sampling = resolved(as_generate(options), model, device)
    candidates = find_candidates(options.lora_weight, options.lora_weight_high_noise, experts=model.experts is not None)
    files = [file for candidate in candidates for file in candidate.files]
    if options.condition_frames is None and model.condition == "text_or_image":
        options = replace(options, condition_frames=given_frames(files))
    training = refusals.resolved(_as_training(options), model, free_bytes(device))
    require_writable(options.output_dir)
    boundary = training.timestep_boundary if model.experts else None
    items = find_entries(training, model, read_samples(training, model))
    rest: list[CachedSample] = []
    judged_by = [item for item in items if not item.sample.entry.is_reg]
    if not judged_by:
        raise UsageError("there is nothing to judge by but regularisation sets", where=str(options.dataset),
                         cure="give a dataset of what is taught")  # fmt: skip
    if options.validation_items:
        rest, judged_by = held_out(items, options.validation_items, options.seed, instead=NOT_TRAINED_ON)
    told = options.training_config
    if told and told.resolve() == options.dataset.resolve():  # it is read, and what is judged by may be held out of it
        rest = rest or items
    elif told:
        rest = _items(training, model, told, options.resolution)
    seen = seen_sources(files, judged_by, items, training, model)
    timesteps = SMOKE_TIMESTEPS if options.smoke else options.validation_timesteps
    plan = EvaluationPlan(
        options=options,
        sampling=sampling,
        model=model,
        kind=family(model),
        device=device,
        points=Points(timesteps, boundary, options.seed, training.condition_frames or 0),
        candidates=candidates,
        held_out=judged_by,
        forgetting=_items(training, model, options.forgetting_config),
        training=rest,
        seen=Seen({*sources_of(rest), *seen.surely}, set() if told else seen.perhaps),
    )
    encoders = plan.encoders if options.num_videos else None
    require_files(with_loras(sampling, candidates), model, encoders, together=False)
    if not options.num_videos:
        return plan
    limit = SMOKE_PROMPTS if options.smoke else options.num_prompts
    prompts = choose_prompts(sampling, model, plan.held_out, limit, options.output_dir / FIRST_FRAMES)
    return replace(plan, prompts=prompts[:SMOKE_PROMPTS] if options.smoke else prompts)


def _as_training(options: Evaluate) -> Train:
    """The flags by which the cache is read and the boundary is filled in, as training does it."""
    return Train(
        dataset_config=options.dataset_config, manifest=options.manifest, resolution=options.resolution,
        smoke=options.smoke, task=options.task, dit=options.dit, dit_high_noise=options.dit_high_noise,
        clip=options.clip, vae=options.vae, t5=options.t5, tokenizer=options.tokenizer, seed=options.seed,
        timestep_boundary=options.timestep_boundary,
        condition_frames=options.condition_frames, output_dir=options.output_dir, output_name="evaluation",
    )  # fmt: skip


def _items(training: Train, model: Model, other: Path | None, resolution: str = "all") -> list[CachedSample]:
    """The cached items of a dataset beside the own one, in some of its resolutions; none without one.

    Raises:
        WangenError: entries are missing or stale.
    """
    if other is None:
        return []
    options = replace(on_other_dataset(training, other), resolution=resolution)
    return find_entries(options, model, read_samples(options, model))


def _losses(plan: EvaluationPlan) -> dict[str, dict[str, Losses]]:
    """For each set of items the losses of the base and of every checkpoint that is not broken.

    Raises:
        WangenError: the base's losses are not finite, or those of no checkpoint are.
    """
    own = plan.options
    weights = {name: headers.identity(path, f"--{name}") for name in ("dit", "dit_high_noise")
               if (path := getattr(own, name)) is not None}  # fmt: skip
    dtype = plan.sampling.dtype
    assert dtype is not None
    kernel = choose_kernel(own.attention, plan.device, DTYPES[dtype], backward=False)
    facts = {**weights, "task": own.task, "dtype": dtype, "quantize": own.quantize,
             "attention": kernel.name, **made_on(plan.device.type), "peft": version("peft")}  # fmt: skip
    judging = Judging(
        plan.load,
        plan.experts,
        lambda model, prepared: item_errors(plan.kind, model, prepared, plan.device),
        plan.points,
        facts,
        own.output_dir / LOSSES,
    )
    sets = {"held out": plan.held_out, "forgetting": plan.forgetting}
    found = judging.losses(plan.candidates, {name: items for name, items in sets.items() if items})
    broken = {who for each in found.values() for who, losses in each.items() if not math.isfinite(mean(losses))}
    for who in sorted(broken):
        log.warning("  %s is left out: its loss is not finite", who)
    left = [one.name for one in plan.candidates if one.name not in broken]
    if BASE in broken or not left:
        raise WangenError(f"the losses of {BASE if BASE in broken else 'all LoRAs'} are not finite",
                          cure="give another --dtype, and look at the weights")  # fmt: skip
    return {name: {who: each[who] for who in (BASE, *left)} for name, each in found.items()}


def _activities(plan: EvaluationPlan, base: Losses, others: dict[str, Losses]) -> tuple[Row, ...]:
    """A row for each activity; none where every item has its own."""
    names = [activity_of(item) for item in plan.held_out]
    return by_activity(base, others, names) if len(set(names)) < len(names) else ()


def _forgetting(found: dict[str, Losses] | None) -> tuple[Row, ...]:
    if not found:
        return ()
    others = {name: losses for name, losses in found.items() if name != BASE}
    return (whole("other material", found[BASE], others), *(by_timestep(found[BASE], others)))


def _training_latents(plan: EvaluationPlan) -> TrainingLatents | None:
    """What videos are compared with."""
    if not plan.training or not plan.options.num_videos:
        return None
    clips = [
        TrainingClip(item.sample.name, item.sample.source.digest, partial(latent_of, item), item.latent.key)
        for item in plan.training
    ]
    return TrainingLatents(clips, digest(sorted(clip.key for clip in clips)))


def _videos(
    plan: EvaluationPlan, best: str, training: TrainingLatents | None, clip_score: ClipScore | None
) -> tuple[tuple[Video, ...], tuple[Memorisation, ...], int]:
    """The videos, what they show, and how many were made now."""
    own = plan.options
    if not own.num_videos:
        return (), (), 0
    shown = [one for one in plan.candidates if own.videos_of == "all" or one.name == best]
    jobs = plan_videos(plan.prompts, shown, plan.sampling, plan.device.type, own.output_dir / VIDEOS)
    encoders = plan.encoders
    decoder = Decoder(plan.kind, encoders, plan.device, "give --vae_cache_cpu or --vae_tile 256, or smaller videos")
    made = make(
        jobs,
        lambda some: make_scenes(plan.kind, plan.model, some, encoders, plan.device, "the prompts"),
        plan.load,
        plan.experts,
        decoder,
        training,
    )
    return *describe(jobs, own.output_dir, training, usual_motion(plan.training), clip_score), made


def _report(plan: EvaluationPlan, evaluation: Evaluation, made: int) -> Report:
    own, best = plan.options, evaluation.winner
    for line in evaluation.warnings:
        log.warning("  %s", line)
    interval = best.interval(evaluation.confidence)
    losses = f"held-out loss {best.mean_loss:.5f}, base {evaluation.mean_base:.5f} ({best.delta:+.5f}, {interval})"
    (lora,) = (one for one in plan.candidates if one.name == best.name)
    file = own.output_dir / EVALUATION
    return Report(
        folder=own.output_dir,
        summary=f"{best.name} is the best of {many(len(evaluation.checkpoints), 'checkpoint')}: {losses}: {file}",
        inputs={"dataset_config": own.dataset, "lora_weight": own.lora_weight, "dit": own.dit},
        counts={"items": evaluation.num_items, "checkpoints": len(evaluation.checkpoints), "videos": made},
        result={"file": file, "best": best.name, "lora": lora.file, "lora_high_noise": lora.file_high_noise},
    )
