"""What a dataset's samples need of the cache: recipes, the judge's verdicts, and who needs which entry.

The two caching steps, `check_cache` and the loader share this, so that they cannot disagree. Needs no torch.
"""

import hashlib
import importlib.metadata
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from wangen.generator.errors import WangenError
from wangen.generator.files import write_text
from wangen.generator.session import Report
from wangen.generator.steps import CacheStep
from wangen.runtime.cache import Encoder, Entry, Folder, Kind, Recipe, Verdict
from wangen.runtime.samples import Sample, by_cache_folder
from wangen.runtime.sources import relative_name

log = logging.getLogger("wangen")

KINDS: tuple[Kind, ...] = ("latent", "text_encoder_output")
"""What a text-to-video sample needs."""

ANY_MODEL = "t2v-14B"
"""Stands for every model that is trained, where a step does not depend on which: all share text encoder and VAE."""

_LISTED = 20


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


def recipe_of(sample: Sample, kind: Kind) -> Recipe:
    """The recipe of a sample's entry of one kind; a caption's is named after the media file."""
    if kind == "latent":
        return Recipe(kind, sample.latent_recipe(), sample.name)
    return Recipe(kind, sample.text_recipe(), sample.item.path.name)


def judge(folders: Iterable[Folder], samples: Sequence[Sample], kind: Kind, encoder: Encoder | None) -> list[Need]:
    """Everything the samples need of one kind, each entry once per folder, with the verdict on it.

    Args:
        folders: the cache folders of the samples.
        samples: of the whole dataset.
        kind: which kind of entry.
        encoder: which encoder must have made the entries; None accepts any.
    """
    by_path = {folder.path: folder for folder in folders}
    needs: list[Need] = []
    for path, members in by_cache_folder(samples).items():
        unique: dict[str, tuple[Sample, Recipe]] = {}
        for sample in members:
            recipe = recipe_of(sample, kind)
            unique.setdefault(recipe.content_key, (sample, recipe))
        folder = by_path[path]
        needs += [Need(sample, recipe, folder, folder.judge(recipe, encoder)) for sample, recipe in unique.values()]
    return needs


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


def is_rocm() -> bool:
    """Whether the torch that is installed is a ROCm build, told without importing it; False when there is none."""
    try:
        return "rocm" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


def vae_dtype(asked: str | None, *, announce: bool = False) -> str | None:
    """The precision that a VAE runs in when this one is asked for; None leaves it to the device.

    On ROCm it is float32 whatever is asked: a bfloat16 VAE gives all-zero or non-finite latents on some builds.

    Args:
        asked: the flag's value.
        announce: warn when it is not what was asked for.
    """
    dtype = "float32" if asked and is_rocm() else asked
    if announce and dtype != asked:
        log.warning("ROCm: the VAE runs in %s; %s gives zero or non-finite latents on some builds", dtype, asked)
    return dtype


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

    Where no run has left its claim, it is the one that made all entries which the samples need.

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
    claims = (Claim(folder, dataset_config, kind) for folder in folders)
    found = {claim.encoder for claim in claims if claim.encoder} or _makers(folders, samples, kind)
    possible = {Encoder(identity or encoder.identity, dtype or encoder.dtype) for encoder in found}
    if len(possible) > 1:
        what = "latents" if kind == "latent" else "text embeddings"
        makers = sorted(f"{encoder.identity[:8]} in {encoder.dtype}" for encoder in possible)
        raise WangenError(
            f"the {what} of this dataset come from {len(makers)} encoders, and it is open which to take: "
            + ", ".join(makers),
            where=str(dataset_config),
            cure="run the caching step again without --keep_cache",
        )
    return possible.pop() if possible else None


def _makers(folders: Iterable[Folder], samples: Sequence[Sample], kind: Kind) -> set[Encoder]:
    """The encoders of all entries that the samples could use."""
    wanted = {recipe_of(sample, kind).content_key for sample in samples}
    return {entry.encoder for folder in folders for entry in folder.all_entries if entry.content_key in wanted}


def fill(
    options: CacheStep,
    samples: Sequence[Sample],
    kind: Kind,
    encoder: Encoder,
    encode: Callable[[list[Need], list[Need]], int],
) -> Report:
    """Judge what the samples need, encode what is not valid, remove what they need no longer, and report.

    Args:
        options: of the caching step.
        samples: of the whole dataset.
        kind: the kind that the step makes.
        encoder: the encoder that the step uses.
        encode: gets the needs to fill and those that are valid; returns how many it computed.

    Raises:
        WangenError: whatever `encode` raises; the cache folder cannot be written.
    """
    folders = [Folder(path) for path in by_cache_folder(samples)]
    needs = judge(folders, samples, kind, encoder)
    again = options.recache or not options.skip_existing
    missing = [need for need in needs if again or need.verdict.state != "valid"]
    valid = [] if again else [need for need in needs if need.verdict.state == "valid"]
    keys = {folder.path: {need.recipe.key(encoder) for need in needs if need.folder is folder} for folder in folders}
    claims = {folder.path: Claim(folder, options.dataset_config, kind) for folder in folders}
    for path, claim in claims.items():
        claim.extend(keys[path], encoder)
    computed = encode(missing, valid) if missing else 0
    removed = 0 if options.keep_cache else sum(claim.reduce(keys[path], encoder) for path, claim in claims.items())
    what = "latents" if kind == "latent" else "captions"
    why = Counter(need.verdict.reason or "--recache" for need in missing)
    return Report(
        folder=options.dataset_config.parent,
        summary=f"{computed} {what} encoded, {len(valid)} already valid, {removed} unneeded removed",
        inputs={"dataset_config": options.dataset_config, "encoder": encoder.identity},
        counts={"computed": computed, "from_cache": len(valid), "removed": removed,
                "found": count_states(need.verdict for need in needs), "why": dict(why)},
        result={"dtype": encoder.dtype, "folders": [str(folder.path) for folder in folders]},
    )  # fmt: skip


def count_states(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many verdicts there are of each state, all four named."""
    found = Counter(verdict.state for verdict in verdicts)
    return {"valid": found["valid"], "stale": found["stale"], "missing": found["missing"], "corrupt": found["corrupt"]}


class Claim:
    """Which entries of a folder one dataset needs, and which encoder its last caching run used, kept beside them.

    An entry is removed only when the dataset that asks needed it before, needs it no longer, and no other dataset that
    uses the folder needs it. What nobody claims is never removed; a lost claim costs disk space, not entries. With
    --keep_cache the keys of several runs stay claimed: the encoder tells which of them are the last run's.
    """

    def __init__(self, folder: Folder, dataset_config: Path, kind: Kind) -> None:
        dataset = hashlib.sha256(relative_name(dataset_config, folder.path).encode()).hexdigest()[:20]
        self.folder = folder
        self.kind = kind
        self.path = folder.path / f".wangen-needs-{dataset}.{kind}.json"

    @property
    def encoder(self) -> Encoder | None:
        """The encoder of the last run, whether or not it came to its end; None when there is no claim."""
        return _read_claim(self.path).encoder

    def extend(self, keys: set[str], encoder: Encoder) -> None:
        """Claim these keys too: before anything is encoded, so that a killed run's entries are not forgotten.

        Raises:
            WangenError: the folder cannot be written.
        """
        self._write(_read_claim(self.path).keys | keys, encoder)

    def reduce(self, keys: set[str], encoder: Encoder) -> int:
        """Claim these keys alone and remove what nobody needs any more; returns how many entries were removed.

        Raises:
            WangenError: the folder cannot be written.
        """
        before = _read_claim(self.path).keys
        self._write(keys, encoder)
        pattern = f".wangen-needs-*.{self.kind}.json"
        claimed: set[str] = set().union(*(_read_claim(path).keys for path in self.folder.path.glob(pattern)))
        unneeded = [e for e in self.folder.all_entries if e.kind == self.kind and e.key in before - claimed]
        return sum(_remove(entry) for entry in [*unneeded, *self._twins(keys)])

    def _twins(self, keys: set[str]) -> list[Entry]:
        """Second files of one key, left when a renamed item was encoded again."""
        entries = self.folder.entries
        return [entry for entry in self.folder.all_entries if entry.key in keys and entries[entry.key] is not entry]

    def _write(self, keys: set[str], encoder: Encoder) -> None:
        if _read_claim(self.path) != _Claimed(keys, encoder):
            write_text(self.path, json.dumps({"encoder": asdict(encoder), "keys": sorted(keys)}))


@dataclass(frozen=True)
class _Claimed:
    """What a claim file holds."""

    keys: set[str] = field(default_factory=set)
    encoder: Encoder | None = None


def _read_claim(path: Path) -> _Claimed:
    """What is claimed; nothing when the file is missing or broken, for its keys only ever allow removing."""
    with suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
        claim = json.loads(path.read_text(encoding="utf-8"))
        encoder = Encoder(str(claim["encoder"]["identity"]), str(claim["encoder"]["dtype"]))
        return _Claimed({str(key) for key in claim["keys"]}, encoder)
    return _Claimed()


def _remove(entry: Entry) -> int:
    try:
        entry.path.unlink()
    except OSError:  # gone already, or open in another program on Windows: the next run tries again
        return 0
    return 1
