"""The plan of a script: its flags, its weights and its dataset, measured on a card."""

import shutil
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path

from wangen import profiles
from wangen.generator import kinds
from wangen.generator.cache_sizes import Encoding, cached_bytes, encoding_of
from wangen.generator.cards import Gpu
from wangen.generator.errors import UsageError, WangenError, many
from wangen.generator.files import disk_of, nearest_existing
from wangen.generator.launch import Launch, asks_for_several
from wangen.generator.memory import LONG_TEXT, batches_of_a_pass, gib_text, tokens_beside
from wangen.generator.memory_presets import for_smaller_steps, require_fitting, resolve_vram
from wangen.generator.plan.cures import Cure, find_cure
from wangen.generator.plan.earlier import Measured, measured
from wangen.generator.plan.estimate import RunPlan, plan_run, tokens_of_a_step
from wangen.generator.plan.scripted import Scripted
from wangen.generator.plan.shapes import Shape, Survey, nominal, survey
from wangen.generator.run_length import goes_by_steps
from wangen.generator.seen import seen_entry
from wangen.generator.steps import CacheLatents, CacheText, Train
from wangen.generator.tomls import DatasetEntry, read_dataset
from wangen.generator.train_refusals import refuse_more_blocks
from wangen.profiles import Model, TransformerSizes

NOT_QUANTISED = 16.0
FEW_STEPS, USUAL_STEPS = 500, 1500
"""Of a LoRA: fewer than the first show little as a rule; the second is in the midst of common practice."""


@dataclass(frozen=True)
class Planned:
    """All that `wangen plan` says.

    Attributes:
        script: what is planned.
        survey: of its dataset.
        plan: of the run.
        cure: what makes it fit; None where it does, or where no card is known.
        earlier: what a run with the same flags took.
        cached: bytes that lie in the cache.
        free: bytes free where the cache and the output go; None where they are another machine's.
        here: the card is of this machine, so that its host memory is, too.
        notes: what else the user should know.
    """

    script: Scripted
    survey: Survey
    plan: RunPlan
    cure: Cure | None
    earlier: Measured | None
    cached: int
    free: tuple[int | None, int | None]
    here: bool
    notes: Sequence[str]


def plan_script(script: Scripted, gpu: Gpu | None, *, num_cards: int, here: bool) -> Planned:
    """The plan of a script, read in the folder that it runs in.

    Args:
        script: as it is read.
        gpu: what each of its processes computes on.
        num_cards: that there are.
        here: the card is of this machine.

    Raises:
        WangenError: its dataset or weights cannot be read.
    """
    with chdir(script.folder):
        return _plan_here(script, gpu, num_cards, here)


def _plan_here(script: Scripted, gpu: Gpu | None, num_cards: int, here: bool) -> Planned:
    train: Train | None = script.step(Train)
    notes: list[str] = []
    if train is None:
        raise UsageError("it trains nothing, so that there is nothing to plan", where=script.name,
                         cure="name the train script")  # fmt: skip
    model, bits = _weighed(train, profiles.model(train.task), notes)
    entries = _entries(script, train)
    found = _surveyed(script, train, entries, model, notes)
    if train.device == "cpu":
        gpu = None
        notes.append("it trains on the processor (device = cpu): neither its memory nor its time is estimated")
    elif gpu is None:
        notes.append('no GPU is seen here; name the one that trains: --gpu "RTX 4090", or --gpu 24GB')
    processes = _num_processes(train, num_cards)
    most = max((_most_tokens(shape, model) for shape in found.uses), default=0)
    train = _resolved(script, train, model, gpu, processes, most)
    refuse_more_blocks(train, model.transformer.num_layers)
    if gpu and here and processes > num_cards:
        notes.append(f"--gpus {processes}: this machine shows {many(num_cards, 'card')}")
    plan = plan_run(train, model, found, gpu, processes=processes, bits=bits)
    cure = find_cure(plan) if plan.fits is False else None
    if few := _few_steps(plan):
        notes.append(few)
    if gpu and plan.fits and gpu.free < plan.budget.device:
        notes.append(f"only {gib_text(gpu.free)} of the card are free now: close what uses it")
    earlier = measured(train, tokens_of_a_step(plan)) if here else None
    cached = sum(map(cached_bytes, {entry.cache_directory for entry in entries}))
    places = (entries[0].cache_directory if entries else None, train.output_dir)
    return Planned(script, found, plan, cure, earlier, cached, _free_of_both(*places), here, notes)


def _resolved(script: Scripted, train: Train, model: Model, gpu: Gpu | None, processes: int, most: int) -> Train:
    """The flags with `--vram` resolved for batches of so many tokens, with a cure that can be followed from here."""
    free = gpu.free if gpu else None
    try:
        shards = Launch(count=processes, local_count=processes).shards(train.parallel)
        resolved = resolve_vram(train, model, free, shards)
        if processes == 1:
            resolved = for_smaller_steps(resolved, train, model, most, free)
        require_fitting(resolved, train, model, most * batches_of_a_pass(train), free, shards)
        return resolved
    except UsageError as error:
        raise UsageError(error.found, where=script.name,
                         cure=f"wangen publish {script.slug} --fit chooses flags for the dataset's own shapes, which "
                         "may need less; or take a larger card") from error  # fmt: skip


def _most_tokens(shape: Shape, model: Model) -> int:
    """Of a full batch with captions as long as they may be: what training counts before it looks into texts."""
    controls = [shape.control_size or shape.size] * shape.num_controls
    return shape.batch_size * tokens_beside(model, shape.size, shape.num_frames, controls, LONG_TEXT)


def _num_processes(train: Train, num_cards: int) -> int:
    if not asks_for_several(train.gpus):
        return 1
    return max(1, num_cards) if train.gpus == "auto" else int(train.gpus)


def _weighed(train: Train, model: Model, notes: list[str]) -> tuple[Model, float]:
    """The model with the sizes that the weights themselves have, where these are here; and bits of a weight in them."""
    path = train.dit or train.dit_high_noise
    if path is None or not path.exists():
        notes.append(f"the weights are not here; counted as {model.title} in 16 bits")
        return model, NOT_QUANTISED
    try:
        facts = kinds.examine(path, "--dit")
        sizes = TransformerSizes(**{name: facts.sizes[name] for name in TransformerSizes.__dataclass_fields__})
    except (WangenError, KeyError) as error:
        why = error.found if isinstance(error, WangenError) else f"no {error} is found in it"
        notes.append(f"{path.name} is not understood ({why}); counted as {model.title} in 16 bits")
        return model, NOT_QUANTISED
    bits = 8 * facts.num_bytes / facts.num_parameters if facts.quantisation else NOT_QUANTISED
    return replace(model, transformer=sizes), min(bits, NOT_QUANTISED)


def _entries(script: Scripted, train: Train) -> list[DatasetEntry]:
    entries = read_dataset(train.dataset, train.resolution, tell=False)
    if script.target is None:
        return list(entries)
    return [seen for entry in entries if (seen := seen_entry(script.target, entry, script.elsewhere))]


def _surveyed(
    script: Scripted, train: Train, entries: Sequence[DatasetEntry], model: Model, notes: list[str]
) -> Survey:
    caching = [step for step in (script.step(CacheLatents), script.step(CacheText)) if step]
    text_encoder = next((step.t5 for step in caching if isinstance(step, CacheText)), None)
    encoding = encoding_of(caching, Encoding(text_width=_width_of(text_encoder)))
    if any(entry.manifest and not entry.manifest.exists() for entry in entries):
        notes.append("the footage is not cut into clips yet: numbers of clips, steps and hours are not known")
        return nominal(entries)
    found = survey(entries, model, encoding)
    if found.problems:
        notes.append(f"left out, see wangen check: {'; '.join(found.problems[:3])}"
                     + (f" and {len(found.problems) - 3} more" if len(found.problems) > 3 else ""))  # fmt: skip
    if not found.uses:
        raise WangenError("the dataset has no sample that can be trained on", where=str(train.dataset),
                          cure="wangen check names what is wrong")  # fmt: skip
    if train.cache_mode == "realtime":
        found.cache_bytes = 0  # it keeps nothing
    if train.validation_items:
        notes.append(f"with the {train.validation_items} held-out items counted as if they were trained on")
    elif found.exact and not train.validation_config and (few := min(8, (found.num_images + found.num_clips) // 10)):
        notes.append("nothing is held out, so that no loss shows which checkpoint is best; the knob VALIDATION_ITEMS, "
                     f"or validation_items = {few} below [steps.train] in wangen.toml")  # fmt: skip
    return found


def _few_steps(plan: RunPlan) -> str:
    """What is to be said where a LoRA's epochs are few steps, as the default's are on a small dataset."""
    train = plan.train
    if train.train_mode != "lora" or goes_by_steps(train) or not plan.num_steps or plan.num_steps >= FEW_STEPS:
        return ""
    epochs = -(-USUAL_STEPS // plan.steps_per_epoch)
    return f"{plan.num_steps} steps are few for a LoRA: MAX_TRAIN_EPOCHS {epochs} makes {epochs * plan.steps_per_epoch}"


def _width_of(text_encoder: Path | None) -> int | None:
    """Of the rows that a text encoder gives; None where it is not here, or not understood."""
    if text_encoder is None or not text_encoder.exists():
        return None
    try:
        return kinds.examine(text_encoder, "--t5").sizes.get("dim")
    except WangenError:
        return None


def _free_of_both(cache: Path | None, output: Path | None) -> tuple[int | None, int | None]:
    """Bytes free where the cache and the output go: of one disk one number, which may change at any moment."""
    free = _free(cache)
    is_one = cache is not None and output is not None and disk_of(cache) == disk_of(output)
    return free, free if is_one else _free(output)


def _free(folder: Path | None) -> int | None:
    """Bytes free on the disk that a folder lies on or will; None where there is no such disk here."""
    if folder is None:
        return None
    there = nearest_existing(folder)
    try:
        return shutil.disk_usage(there).free if there else None
    except OSError:
        return None
