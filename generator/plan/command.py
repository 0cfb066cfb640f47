"""`wangen plan`: which script is meant, what it reads, which card it is for, and the plan of it."""

import shutil
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wangen import profiles
from wangen.generator import kinds, scripts, workspace
from wangen.generator.bundle import script_names
from wangen.generator.cards import Gpu, named
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.launch import asks_for_several
from wangen.generator.memory import GIB
from wangen.generator.memory_presets import resolve_vram
from wangen.generator.paths import slugify
from wangen.generator.plan import gpus, text
from wangen.generator.plan.cures import Cure, find_cure
from wangen.generator.plan.earlier import Measured, measured
from wangen.generator.plan.estimate import RunPlan, plan_run, tokens_of_a_step
from wangen.generator.plan.shapes import Encoding, Survey, nominal, survey
from wangen.generator.quoting import QUOTES
from wangen.generator.seen import seen_entry, seen_step
from wangen.generator.steps import CacheLatents, CacheText, Train
from wangen.generator.table import Step
from wangen.generator.target import Target, host_platform_name
from wangen.generator.tomls import DatasetEntry, read_dataset
from wangen.generator.train_numbers import refuse_more_blocks, refuse_not_above_zero
from wangen.profiles import Model, TransformerSizes

NOT_QUANTISED = 16.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """The words of a `wangen plan` command line.

    Attributes:
        what: a dataset's name, or a script that wangen wrote.
        folder: the workspace; None: found from here.
        platform: the target of the workspace; None: the one that this machine is, else the first.
        gpu: name of a card; None: those of this machine.
        as_json: print one JSON object.
    """

    what: str
    folder: Path | None = None
    platform: str | None = None
    gpu: str | None = None
    as_json: bool = False


@dataclass(frozen=True)
class Scripted:
    """A published script, its steps as this host sees their paths.

    Attributes:
        name: of the script.
        folder: where it runs.
        steps: what it does.
        target: of the workspace; None for a script alone.
        elsewhere: paths that another machine has.
    """

    name: str
    folder: Path
    steps: Sequence[Step]
    target: Target | None
    elsewhere: list[str]

    @property
    def slug(self) -> str:
        """Of its dataset."""
        return Path(self.name).stem.removeprefix("train_")

    def without_preset(self) -> "Scripted":
        """The script with no `--vram`, which the flags of `publish --fit` replace."""
        return replace(self, steps=[replace(s, vram=None) if isinstance(s, Train) else s for s in self.steps])

    def step(self, kind: type[Step]) -> Any:
        """The first step of a kind; None where there is none."""
        return next((step for step in self.steps if isinstance(step, kind)), None)


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


def run(request: Request) -> int:
    """Print the plan of a run; 1 when it does not fit its card.

    Raises:
        WangenError: nothing is published under that name, or it cannot be read.
    """
    found = make(request)
    print(text.as_json(found) if request.as_json else "\n".join(text.lines(found)))  # noqa: T201
    return int(found.plan.fits is False)


def make(request: Request) -> Planned:
    """The plan of what a request names.

    Raises:
        WangenError: as `run`.
    """
    named_file = Path(request.what)
    script = read_script(named_file) if _is_file(named_file) else _published(request)
    cards = [named(request.gpu)] if request.gpu is not None else _cards_for(script.target)
    smallest = min(cards, key=lambda one: one.memory, default=None)
    return plan_script(script, smallest, num_cards=len(cards), here=request.gpu is None)


def plan_script(script: Scripted, gpu: Gpu | None, *, num_cards: int = 1, here: bool = True) -> Planned:
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
    if gpu is None:
        notes.append('no GPU is seen here; name the one that trains: --gpu "RTX 4090", or --gpu 24GB')
    refuse_not_above_zero(train)
    train = _resolved(script, train, model, gpu)
    refuse_more_blocks(train, model.transformer.num_layers)
    processes = _num_processes(train, num_cards)
    plan = plan_run(train, model, found, gpu, processes=processes, bits=bits)
    cure = find_cure(plan) if plan.fits is False else None
    if gpu and plan.fits and gpu.free < plan.budget.device:
        notes.append(f"only {gpu.free / GIB:.1f} GiB of the card are free now: close what uses it")
    earlier = measured(train, tokens_of_a_step(plan)) if here else None
    cached = sum(_num_bytes(entry.cache_directory) for entry in {one.cache_directory: one for one in entries}.values())
    places = (entries[0].cache_directory if entries else None, train.output_dir)
    free = tuple(_free(place) for place in places)
    return Planned(script, found, plan, cure, earlier, cached, (free[0], free[1]), here, notes)


def _resolved(script: Scripted, train: Train, model: Model, gpu: Gpu | None) -> Train:
    """The flags with `--vram` resolved, with a cure that can be followed from here."""
    try:
        return resolve_vram(train, model, gpu.free if gpu else None)
    except UsageError as error:
        raise UsageError(error.found, where=script.name,
                         cure=f"wangen publish {script.slug} --fit chooses flags for the dataset's own shapes, which "
                         "may need less; or take a larger card") from error  # fmt: skip


def read_script(path: Path, target: Target | None = None) -> Scripted:
    """A script that wangen wrote, its steps as this host sees their paths.

    Raises:
        WangenError: it is none, or a line of it cannot be read.
    """
    shell = path.suffix[1:]
    if shell not in QUOTES:
        raise UsageError("this is no script of wangen's that runs steps", where=str(path),
                         cure="name a dataset, or its train script (.sh, .bat, .ps1)")  # fmt: skip
    if target is None and shell in ("bat", "ps1") and host_platform_name() != "windows":
        raise UsageError(f"this script is for Windows, and this is {host_platform_name()}", where=str(path),
                         cure="ask in its workspace: wangen plan NAME --platform windows")  # fmt: skip
    steps, elsewhere = [], list[str]()
    for command, step in scripts.parsed_steps(path.read_bytes(), shell):
        if isinstance(step, WangenError):
            raise WangenError(f"{command}: {step.found}", where=str(path), cure=step.cure, exit_code=step.exit_code)
        steps.append(seen_step(target, step, elsewhere) if target else step)
    if not steps:
        raise UsageError("no step of wangen's is in it", where=str(path), cure="name the train script")
    return Scripted(path.name, target.folder if target else path.absolute().parent, steps, target, elsewhere)


def published_script(target: Target, slug: str) -> Path | None:
    """The training script of a dataset on a target, as this host sees it; None when it is not published there."""
    files = (target.folder / file for name, file in script_names(target, slug) if name == "train")
    return next((path for path in files if path.suffix[1:] in QUOTES and path.is_file()), None)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # longer than a name can be, or in a folder that is closed
        return False


def _published(request: Request) -> Scripted:
    place = workspace.read(request.folder or workspace.find(Path()))
    slug = slugify(Path(request.what).name)
    targets = [place.target(request.platform)] if request.platform else list(place.targets)
    found = [(target, path) for target in targets if (path := published_script(target, slug))]
    if not found:
        raise WangenError(f"{request.what!r} is not published", where=", ".join(str(one.folder) for one in targets),
                          cure=f"wangen publish {slug}, or name a train script")  # fmt: skip
    target, path = min(found, key=lambda one: not one[0].is_native)
    return read_script(path, target)


def _cards_for(target: Target | None) -> list[Gpu]:
    """The cards of this machine, where the scripts run here and not on its processor alone."""
    if target and (not target.is_native or target.platform.accelerator == "cpu"):
        return []
    return gpus.seen()


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
    latents, texts = script.step(CacheLatents), script.step(CacheText)
    encoding = Encoding(
        vae_dtype=getattr(latents, "vae_dtype", None) or "float16",
        t5_dtype=getattr(texts, "t5_dtype", None) or "bfloat16",
        clip_dtype=getattr(latents, "clip_dtype", None) or "float16",
        empty_prompt=bool(train.caption_dropout or train.validation_items or train.sample_continuations),
        text_width=_width_of(getattr(texts, "t5", None)),
    )
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
    if train.validation_items:
        notes.append(f"with the {train.validation_items} held-out items counted as if they were trained on")
    return found


def _width_of(text_encoder: Path | None) -> int | None:
    """Of the rows that a text encoder gives; None where it is not here, or not understood."""
    if text_encoder is None or not text_encoder.exists():
        return None
    try:
        return kinds.examine(text_encoder, "--t5").sizes.get("dim")
    except WangenError:
        return None


def _num_bytes(folder: Path) -> int:
    """Of the cache entries and packs in a folder."""
    if not folder.is_dir():
        return 0
    files = (path for path in folder.iterdir() if path.suffix in (".safetensors", ".tar") and path.is_file())
    return sum(path.stat().st_size for path in files)


def _free(folder: Path | None) -> int | None:
    """Bytes free on the disk that a folder lies on or will; None where there is no such disk here."""
    if folder is None:
        return None
    there = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), None)
    try:
        return shutil.disk_usage(there).free if there else None
    except OSError:
        return None
