"""What a dataset's samples need of the cache: recipes, the judge's verdicts, and who needs which entry.

The two caching steps, `check_cache` and the loader share this, so that they cannot disagree. Needs no torch.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self

from wangen.generator.bulk import bulk
from wangen.generator.errors import WangenError, many
from wangen.generator.vae_twins import vae_of
from wangen.profiles import Model
from wangen.runtime.cache import TEXT_KINDS, Encoder, Folder, Kind, Recipe, Verdict
from wangen.runtime.cache.needed import DatasetNeeds
from wangen.runtime.cache.reading import num_channels
from wangen.runtime.samples import Sample, by_cache_folder

if TYPE_CHECKING:
    import torch

log = logging.getLogger("wangen")

WORDS: Mapping[Kind, str] = {
    "latent": "latents",
    "control_latent": "control latents",
    "image_latent": "first-frame conditions",
    "clip": "CLIP views",
    "mask": "masks",
    "text_encoder_output": "text embeddings",
    "empty_text_encoder_output": "empty prompts",
}

_LISTED = 20

POLL_S = 1.0
"""How often to look whether another process has finished what it claimed."""


def latent_kinds(model: Model, *, clip: bool) -> tuple[Kind, ...]:
    """What `cache_latents` makes for a model; control and masks only where the dataset has them.

    Args:
        model: the profile.
        clip: an image encoder is given.
    """
    condition: tuple[Kind, ...] = ("image_latent",) if model.condition == "image" else ()
    views: tuple[Kind, ...] = ("clip",) if clip and model.has_clip else ()
    return ("latent", *condition, *views, "control_latent", "mask")


@dataclass(frozen=True)
class Need:
    """One entry that a dataset needs in one cache folder.

    Attributes:
        sample: the first sample that needs it; samples of equal content or caption share an entry.
        recipe: what the entry is made of.
        folder: where it belongs.
        verdict: whether it is there.
    """

    sample: Sample
    recipe: Recipe
    folder: Folder
    verdict: Verdict


def step_for(kind: Kind) -> str:
    """The caching step that makes a kind."""
    return "cache_text" if kind in TEXT_KINDS else "cache_latents"


def recipes_of(sample: Sample, kind: Kind) -> list[Recipe]:
    """The recipes of a sample's entries of one kind: several captions or control media give several."""
    match kind:
        case "latent":
            contents = [sample.latent_recipe()]
        case "control_latent":
            contents = [sample.control_recipe(number) for number in range(len(sample.controls))]
        case "image_latent":
            contents = [sample.image_recipe()]
        case "clip":
            contents = [sample.clip_recipe()]
        case "mask":
            contents = [sample.mask_recipe()] if sample.mask else []
        case "text_encoder_output":
            return [Recipe(kind, content, sample.item.path.name) for content in sample.text_recipes()]
        case "empty_text_encoder_output":
            return [Recipe(kind, sample.empty_recipe(), "the empty prompt")]
    return [Recipe(kind, content, sample.name) for content in contents]


@bulk()
def judge(folders: Iterable[Folder], samples: Sequence[Sample], kind: Kind, encoder: Encoder | None) -> list[Need]:
    """Everything the samples need of one kind, each entry once per folder, with the verdict on it.

    Args:
        folders: the cache folders of the samples.
        samples: of the whole dataset.
        kind: which kind of entry.
        encoder: which encoder must have made the entries; None accepts any.
    """
    wants = wanted(folders, samples, kind)
    return [Need(sample, recipe, folder, folder.judge(recipe, encoder)) for sample, recipe, folder in wants]


@bulk()
def wanted(folders: Iterable[Folder], samples: Sequence[Sample], kind: Kind) -> list[tuple[Sample, Recipe, Folder]]:
    """What `judge` judges; the folders are not looked at."""
    by_path = {folder.path: folder for folder in folders}
    wants: list[tuple[Sample, Recipe, Folder]] = []
    for path, members in by_cache_folder(samples).items():
        unique: dict[str, tuple[Sample, Recipe]] = {}
        for sample in members:
            for recipe in recipes_of(sample, kind):
                unique.setdefault(recipe.content_key, (sample, recipe))
        wants += [(sample, recipe, by_path[path]) for sample, recipe in unique.values()]
    return wants


def foreign_latents(needs: Iterable[Need], model: Model, dataset_config: Path) -> str:
    """What is wrong when valid latents are of another model's VAE; empty when they are not.

    One entry speaks for all, since one encoder made them. Of the two VAEs with the same tensors the caching run has
    noted whose it was.
    """
    latents = [need for need in needs if need.verdict.entry and need.recipe.kind == "latent"]
    for entry in (need.verdict.entry for need in latents[:1]):
        if entry and (found := num_channels(entry)) != model.latent_channels:
            return (f"the latents have {found} channels, where {model.name} takes {model.latent_channels}: the last "
                    "caching run was with another model's VAE")  # fmt: skip
    own = vae_of(model)
    for folder in {need.folder.path: need.folder for need in latents}.values() if own else ():
        if (whose := DatasetNeeds(folder, dataset_config, "latent").vae) and whose != own:
            return f"the latents are of {whose}'s VAE by the last caching run, where {model.name} takes {own}'s"
    return ""


def problem(need: Need) -> str:
    """A verdict that is not valid, as one line."""
    return f"{need.recipe.name}: {need.recipe.kind} is {need.verdict.state}, {need.verdict.reason}"


def listing(problems: Sequence[str]) -> list[str]:
    """Problems as indented lines: the first twenty, and how many more there are.

    >>> listing(["a", "b"])
    ['  - a', '  - b']
    """
    lines = [f"  - {problem}" for problem in problems[:_LISTED]]
    return [*lines, f"  … and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else lines


def expected_encoder(
    folders: Iterable[Folder],
    samples: Sequence[Sample],
    kind: Kind,
    dataset_config: Path,
    *,
    identity: str | None = None,
    dtype: str | None = None,
) -> Encoder | None:
    """The one encoder that must have made all entries: that of the dataset's last caching run, as far as it is open.

    Where no run is on record, it is the one that made all entries which the samples need.

    Args:
        folders: the cache folders of the samples.
        samples: of the whole dataset.
        kind: which kind of entry.
        dataset_config: the dataset's TOML.
        identity: the weights, when they are given.
        dtype: the precision, when it is given.

    Returns:
        None when nothing that the samples need is there and the flags do not say it all.

    Raises:
        WangenError: two encoders made entries and nothing says which to take.
    """
    if identity and dtype:
        return Encoder(identity, dtype)
    folders = list(folders)
    if not identity and kind in ("image_latent", "control_latent"):  # one VAE makes all that a batch holds
        latents = expected_encoder(folders, samples, "latent", dataset_config)
        identity = latents.identity if latents else None
    found = encoders_before(folders, samples, kind, dataset_config)
    possible = {Encoder(identity or encoder.identity, dtype or encoder.dtype) for encoder in found}
    if len(possible) > 1:
        makers = sorted(f"{encoder.identity[:8]} in {encoder.dtype}" for encoder in possible)
        raise WangenError(
            f"the {WORDS[kind]} of this dataset come from {len(makers)} encoders, and it is open which to take: "
            + ", ".join(makers),
            where=str(dataset_config),
            cure="run the caching step again without --keep_cache",
        )
    return possible.pop() if possible else None


def encoders_before(
    folders: Sequence[Folder], samples: Sequence[Sample], kind: Kind, dataset_config: Path
) -> set[Encoder]:
    """The encoders of the dataset's last caching runs; where none is on record, those of the entries that are there.

    Args:
        folders: the cache folders of the samples.
        samples: of the whole dataset.
        kind: which kind of entry.
        dataset_config: the dataset's TOML.
    """
    told = [DatasetNeeds(folder, dataset_config, kind).encoder for folder in folders]  # each is read once
    return {encoder for encoder in told if encoder} or _makers(folders, samples, kind)


def _makers(folders: Iterable[Folder], samples: Sequence[Sample], kind: Kind) -> set[Encoder]:
    """The encoders of all entries that the samples could use."""
    needed = {recipe.content_key for sample in samples for recipe in recipes_of(sample, kind)}
    return {entry.encoder for folder in folders for entry in folder.all_entries if entry.content_key in needed}


class EntryWriter(Protocol):
    """Where the encoding loops put entries: a cache folder's writer, or memory."""

    num_bytes: int

    def __enter__(self) -> "Self": ...

    def __exit__(self, *_exception: object) -> None: ...

    def claim(self, recipe: Recipe, encoder: Encoder) -> Literal["mine", "theirs", "done"]:
        """Whether this process shall make the entry, another one does, or it is there."""

    def put(self, recipe: Recipe, encoder: Encoder, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Judge an entry's values and take it."""

    def commit(self) -> None:
        """Make everything that was put visible for good."""

    def commit_if_due(self) -> None:
        """`commit`, when enough was put or some time has passed."""


OpenWriter = Callable[[Path], EntryWriter]


def writer_of(folder: Path, *, again: bool, packed: bool) -> EntryWriter:
    """The writer of a cache folder; it imports torch.

    Args:
        folder: the cache folder.
        again: what is there is written anew.
        packed: what is written is moved into packs.
    """
    from wangen.runtime.cache.writer import Writer

    return Writer(folder, again=again, packed=packed)


class Waiting:
    """Waits for another process, and says once that it does."""

    def __init__(self) -> None:
        self._said = False

    def say(self, left: Sequence[Need]) -> None:
        """Log it the first time."""
        if not self._said:
            what = f"{many(len(left), 'entry', 'entries')}, {left[0].recipe.name} first"
            log.info("  waiting for another process that works on %s; if it hangs, end it, and this one goes on", what)
        self._said = True

    def wait(self, left: Sequence[Need]) -> None:
        """Let a moment pass before what is left is asked for again."""
        self.say(left)
        time.sleep(POLL_S)


def claimed(
    needs: Iterable[Need],
    writer_for: Callable[[Need], EntryWriter],
    encoders: Mapping[Kind, Encoder],
    theirs: list[Need],
    advance: Callable[[int, str], None],
) -> list[Need]:
    """The needs that are now this process's to fill; those that another one works on are put into `theirs`.

    Args:
        needs: what is missing.
        writer_for: the writer of a need's folder.
        encoders: of every kind.
        theirs: grows.
        advance: the progress, told of entries that are there meanwhile.
    """
    mine = []
    for need in needs:
        word = writer_for(need).claim(need.recipe, encoders[need.recipe.kind])
        if word == "mine":
            mine.append(need)
        elif word == "theirs":
            theirs.append(need)
        else:
            advance(1, f"{need.recipe.name} came from another process")
    return mine


@dataclass(frozen=True)
class Work:
    """What a caching step has to do.

    Attributes:
        encoders: of every kind that the step makes.
        missing: the needs to fill.
        valid: the needs that are filled.
        open_writer: where entries go.
    """

    encoders: Mapping[Kind, Encoder]
    missing: Sequence[Need]
    valid: Sequence[Need]
    open_writer: OpenWriter


def count_states(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many verdicts there are of each state, all four named."""
    found = Counter(verdict.state for verdict in verdicts)
    return {"valid": found["valid"], "stale": found["stale"], "missing": found["missing"], "corrupt": found["corrupt"]}
