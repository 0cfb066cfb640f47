"""The dataset of a run as the trainer sees it: buckets, captions, pictures; and what its cache folders hold."""

import io
import statistics
from collections.abc import Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path

from wangen import profiles
from wangen.generator.errors import WangenError, many
from wangen.generator.files import is_file
from wangen.generator.session import missing_library
from wangen.generator.steps import CheckCache, Train
from wangen.runtime.ahead import ahead
from wangen.runtime.cache import KINDS, Folder
from wangen.runtime.media import target_frames
from wangen.runtime.report.media import data_uri
from wangen.runtime.report.run_files import DATASET_FLAGS, RunFiles
from wangen.runtime.samples import Sample, by_cache_folder, read_samples

MAX_SHOWN = 60
"""Pictures of a page, of every bucket in turn."""
_START = "paths that a bundle's TOML names start at the folder of its scripts: run this there"
_CURE = "give --dataset_config or --manifest"
_SIDE_PX = 192
_THREADS = 2


@dataclass(frozen=True)
class Picture:
    """The first frame of a sample, small.

    Attributes:
        name: of the sample.
        facts: where it comes from, in words.
        captions: its texts.
        url: a data: URI; empty when it cannot be decoded.
        error: why not.
    """

    name: str
    facts: str
    captions: tuple[str, ...]
    url: str = ""
    error: str = ""


@dataclass(frozen=True)
class Bucket:
    """Samples of one size.

    Attributes:
        size: `832x480x81`, width, height and frames.
        num_samples: in all.
        pictures: those that are shown.
    """

    size: str
    num_samples: int
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class DatasetPart:
    """What the page says of the dataset.

    Attributes:
        problem: why nothing is known of it; empty when all is well.
        facts: totals in words.
        buckets: by size.
        cache: rows of kind, encoder, dtype, number of entries and bytes.
    """

    problem: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    buckets: Sequence[Bucket] = ()
    cache: Sequence[tuple[str, str, str, int, int]] = ()


def look_at_dataset(run: RunFiles, dataset: Path | None) -> DatasetPart:
    """Read the dataset of a run, decode the first frames, and count the entries of its cache folders.

    Args:
        run: its report says the dataset, the task and the resolution where the flags do not.
        dataset: the TOML or the manifest; None takes the run's.

    Returns:
        What was found, or why there is nothing: the page is made without the dataset, too.
    """
    if dataset is None and not run.told(*DATASET_FLAGS):
        return DatasetPart(problem=f"no report of the run says yet which dataset it has: {_CURE}")
    start = Path() if dataset else run.start_of(*DATASET_FLAGS)
    config = dataset or Path(run.told(*DATASET_FLAGS))
    if start is None or not is_file(start / config):
        return DatasetPart(problem=f"the dataset is not there: {config}; {'check its path' if dataset else _CURE}")
    with chdir(start):  # where relative paths of a bundle's TOML start
        return _look(run, config)


def _look(run: RunFiles, config: Path) -> DatasetPart:
    options = CheckCache(
        dataset_config=config,
        resolution=run.told("resolution") or "all",
        smoke=run.settings.get("smoke") is True,
    )
    try:
        model = profiles.model(run.task if run.task in profiles.model_names() else Train.task)
        samples = read_samples(options, model)
        return DatasetPart(facts=_facts(config, samples), buckets=_buckets(samples), cache=_cache(samples))
    except ModuleNotFoundError as error:
        missing = missing_library(error)
        if not isinstance(missing, WangenError):
            raise
        return DatasetPart(problem=missing.found)
    except WangenError as error:
        return DatasetPart(problem=f"{error.found} ({_START})")


def _facts(config: Path, samples: Sequence[Sample]) -> dict[str, str]:
    captions = [caption for sample in samples for caption in sample.item.captions]
    words = sorted(len(caption.split()) for caption in captions)
    kinds = [many(number, what) for media, what in (("image", "image"), ("video", "clip window"))
             if (number := sum(sample.item.media == media for sample in samples))]  # fmt: skip
    return {
        "dataset": config.name,
        "samples": f"{len(samples)}: {', '.join(kinds)}",
        "captions": f"{len(set(captions))} different ones of {words[0]} to {words[-1]} words, "
        f"{statistics.median(words):g} at the median",
    }


def _buckets(samples: Sequence[Sample]) -> list[Bucket]:
    groups: dict[tuple[int, int, int], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((*sample.size, sample.count), []).append(sample)
    chosen = list(islice(filter(None, chain.from_iterable(zip_longest(*groups.values()))), MAX_SHOWN))
    drawn: dict[tuple[int, int, int], list[Picture]] = {}
    for sample, picture in zip(chosen, ahead([partial(_picture, sample) for sample in chosen], _THREADS), strict=True):
        drawn.setdefault((*sample.size, sample.count), []).append(picture)
    return [
        Bucket("x".join(map(str, size)), len(members), drawn.get(size, [])) for size, members in sorted(groups.items())
    ]


def _picture(sample: Sample) -> Picture:
    from PIL import Image

    source = sample.source.facts
    facts = f"from {source.width}x{source.height}"
    facts += f", {source.num_frames} frames in {source.duration_s:.2f} s" if sample.item.media == "video" else ""
    try:
        frames = target_frames(sample, first_only=True)
    except WangenError as error:
        return Picture(sample.name, facts, sample.item.captions, error=error.found)
    image = Image.fromarray(frames[:, 0].transpose(1, 2, 0).copy())
    image.thumbnail((_SIDE_PX, _SIDE_PX))
    stream = io.BytesIO()
    image.save(stream, "WEBP", quality=75, method=4)
    return Picture(sample.name, facts, sample.item.captions, data_uri(stream.getvalue(), "image/webp"))


def _cache(samples: Sequence[Sample]) -> list[tuple[str, str, str, int, int]]:
    groups: dict[tuple[str, str, str], list[int]] = {}
    for entry in chain.from_iterable(Folder(path).all_entries for path in by_cache_folder(samples)):
        groups.setdefault((entry.kind, entry.encoder.identity[:8], entry.encoder.dtype), []).append(entry.num_bytes)
    order = sorted(groups, key=lambda group: (KINDS.index(group[0]), group))
    return [(*group, len(groups[group]), sum(groups[group])) for group in order]
