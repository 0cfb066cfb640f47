"""What a dataset's samples need of the cache: recipes, the judge's verdicts, and who needs which entry.

The two caching steps and `check_cache` share this, so that they cannot disagree. Needs no torch.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from wangen.generator.session import Report, write_text
from wangen.generator.steps import CacheStep
from wangen.runtime.cache import Encoder, Entry, Folder, Kind, Recipe, Verdict
from wangen.runtime.samples import Sample, by_cache_folder
from wangen.runtime.sources import relative_name


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


def expected_encoder(
    folders: Iterable[Folder], samples: Sequence[Sample], kind: Kind, identity: str | None, dtype: str | None
) -> Encoder | None:
    """The one encoder that must have made all entries, where the flags leave it open: that of most of them.

    Args:
        folders: the cache folders of the samples.
        samples: of the whole dataset.
        kind: which kind of entry.
        identity: the weights, when they are given.
        dtype: the precision, when it is given.

    Returns:
        None when nothing that the samples need is there and the flags do not say it all.
    """
    wanted = {recipe_of(sample, kind).content_key for sample in samples}
    made = [entry.encoder for folder in folders for entry in folder.all_entries if entry.content_key in wanted]
    if not made:
        return Encoder(identity, dtype) if identity and dtype else None
    fitting = [e for e in made if identity in (None, e.identity) and dtype in (None, e.dtype)]
    counts = Counter(fitting or made)
    most = max(counts, key=lambda encoder: (counts[encoder], encoder.identity, encoder.dtype))
    return Encoder(identity or most.identity, dtype or most.dtype)


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
    missing = [need for need in needs if options.recache or need.verdict.state != "valid"]
    valid = [] if options.recache else [need for need in needs if need.verdict.state == "valid"]
    keys = {folder.path: {need.recipe.key(encoder) for need in needs if need.folder is folder} for folder in folders}
    claims = {folder.path: Claim(folder, options.dataset_config, kind) for folder in folders}
    for path, claim in claims.items():
        claim.extend(keys[path])
    computed = encode(missing, valid) if missing else 0
    removed = 0 if options.keep_cache else sum(claim.reduce(keys[path]) for path, claim in claims.items())
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
    """Which entries of a folder one dataset needs, kept beside them.

    An entry is removed only when the dataset that asks needed it before, needs it no longer, and no other dataset that
    uses the folder needs it. What nobody claims is never removed; a lost claim costs disk space, not entries.
    """

    def __init__(self, folder: Folder, dataset_config: Path, kind: Kind) -> None:
        dataset = hashlib.sha256(relative_name(dataset_config, folder.path).encode()).hexdigest()[:20]
        self.folder = folder
        self.kind = kind
        self.path = folder.path / f".wangen-needs-{dataset}.{kind}.json"

    def extend(self, keys: set[str]) -> None:
        """Claim these keys too: before anything is encoded, so that a killed run's entries are not forgotten.

        Raises:
            WangenError: the folder cannot be written.
        """
        self._write(_read_keys(self.path) | keys)

    def reduce(self, keys: set[str]) -> int:
        """Claim these keys alone and remove what nobody needs any more; returns how many entries were removed.

        Raises:
            WangenError: the folder cannot be written.
        """
        before = _read_keys(self.path)
        self._write(keys)
        pattern = f".wangen-needs-*.{self.kind}.json"
        claimed: set[str] = set().union(*(_read_keys(path) for path in self.folder.path.glob(pattern)))
        unneeded = [e for e in self.folder.all_entries if e.kind == self.kind and e.key in before - claimed]
        return sum(_remove(entry) for entry in [*unneeded, *self._twins(keys)])

    def _twins(self, keys: set[str]) -> list[Entry]:
        """Second files of one key, left when a renamed item was encoded again."""
        entries = self.folder.entries
        return [entry for entry in self.folder.all_entries if entry.key in keys and entries[entry.key] is not entry]

    def _write(self, keys: set[str]) -> None:
        if _read_keys(self.path) != keys:
            write_text(self.path, json.dumps(sorted(keys)))


def _read_keys(path: Path) -> set[str]:
    """The claimed keys; none when the file is missing or broken, for it only ever allows removing."""
    with suppress(OSError, ValueError, RecursionError):
        keys = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(keys, list):
            return {key for key in keys if isinstance(key, str)}
    return set()


def _remove(entry: Entry) -> int:
    try:
        entry.path.unlink()
    except OSError:  # gone already, or open in another program on Windows: the next run tries again
        return 0
    return 1
