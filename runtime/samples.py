"""Dataset TOML -> samples: what is cached and trained on, one per image and one per clip window.

The caching steps, `check_cache` and `train` all build their samples here, so that they cannot disagree.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from wangen.generator.dataset import Item, Problem, scan
from wangen.generator.errors import WangenError
from wangen.generator.geometry import bucket_of, resampled_frames, too_short, windows
from wangen.generator.steps import SMOKE_ITEMS, CacheStep, CheckCache, Train
from wangen.generator.tomls import DatasetEntry, read_dataset
from wangen.profiles import Model
from wangen.runtime.sources import Source, read_sources

log = logging.getLogger("wangen")


@dataclass(frozen=True)
class Sample:
    """One thing to encode and train on.

    Attributes:
        item: the media file and its caption.
        entry: the block of the TOML it comes from.
        source: digest and facts of the file.
        start: first frame, counted at `fps`.
        count: number of frames, 4n+1.
        size: bucket as (width, height) in pixels.
        fps: frames per second of the model.
    """

    item: Item
    entry: DatasetEntry
    source: Source
    start: int
    count: int
    size: tuple[int, int]
    fps: int

    @property
    def name(self) -> str:
        """`cat.jpg`, or `walk.mp4:0+17` for frames 0 to 16 of a clip; two folders may hold the same."""
        suffix = f":{self.start}+{self.count}" if self.item.media == "video" else ""
        return self.item.path.name + suffix

    def latent_recipe(self) -> dict[str, Any]:
        """Everything but the encoder that decides the latent's bytes."""
        clip = {
            "start": self.start,
            "frames": self.count,
            "fps": self.fps,
            "source_fps": self.entry.source_fps,
        }  # fmt: skip
        return {
            "source": self.source.digest,
            "width": self.size[0],
            "height": self.size[1],
            "resize": "lanczos, cover, centre",
            **(clip if self.item.media == "video" else {"frames": 1}),
        }

    def text_recipe(self) -> dict[str, Any]:
        """Everything but the encoder that decides the embedding's bytes."""
        from wangen.runtime.prompts import clean_prompt

        return {"caption": clean_prompt(self.item.caption)}


def read_samples(
    options: CacheStep | CheckCache | Train, model: Model, *, trust_memo: bool = True, make_folders: bool = False
) -> list[Sample]:
    """The samples of a dataset, in the order of the TOML and of the file names.

    Args:
        options: name the dataset's TOML, the resolutions, and whether a few items will do (`--smoke`).
        model: its frame rate and bucket step count.
        trust_memo: False hashes every media file again.
        make_folders: make the cache folders first, so that they can hold what is found out here.

    Raises:
        WangenError: captions are missing or media cannot be read (all of them are named), nothing is left, or a
            cache folder cannot be made.
    """
    samples: list[Sample] = []
    problems: list[str] = []
    skipped: dict[int, set[str]] = {}
    for entry, items, found in _scans(options):
        if make_folders:
            make_folder(entry.cache_directory)
        sources, unreadable = read_sources([item.path for item in items], entry.cache_directory, trust_memo=trust_memo)
        problems += [str(problem) for problem in found]
        problems += [f"{Path(error.where).name}: {error.found}; replace it or take it out" for error in unreadable]
        for item in items:
            source = sources.get(item.path)
            if source is None:
                continue
            if item.media == "video" and (short := too_short(source.facts, entry, model.fps)):
                problems.append(f"{item.path.name}: {'; '.join(short)}")
                continue
            samples += _samples(item, entry, source, model)
            for count in _lengths_skipped(item, entry, source, model):
                skipped.setdefault(count, set()).add(source.digest)
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise WangenError(f"the dataset has problems:\n{listed}", where=str(options.dataset_config))
    if skipped:
        each = ", ".join(f"{len(digests)} for {count} frames" for count, digests in sorted(skipped.items()))
        num_clips = len(set().union(*skipped.values()))
        log.warning("  clips too short for some of the target_frames, used without these: %d (%s)", num_clips, each)
    return samples


def _scans(options: CacheStep | CheckCache | Train) -> list[tuple[DatasetEntry, list[Item], list[Problem]]]:
    """The blocks that are used, each with its items and with what is wrong in its folder.

    For a try the first items of every block in turn, so that clips are among them as well as every resolution.
    """
    scans = [
        (entry, *scan(entry.directory, media=entry.media, caption_extension=entry.caption_extension, deep=False))
        for entry in read_dataset(options.dataset_config, options.resolution)
    ]
    if not options.smoke:
        return scans
    turns = zip_longest(*([(number, item) for item in items] for number, (_, items, _) in enumerate(scans)))
    chosen = list(islice(filter(None, chain.from_iterable(turns)), SMOKE_ITEMS))
    return [
        (entry, [item for block, item in chosen if block == number], found)
        for number, (entry, _, found) in enumerate(scans)
    ]


def make_folder(folder: Path) -> None:
    """Make a cache folder and the folders above it.

    Raises:
        WangenError: there is a file in its place, or no right to make it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WangenError(
            f"cannot make the cache folder: {error.strerror}",
            where=str(folder),
            cure="fix the rights above it or choose another cache_directory in the dataset's TOML",
        ) from None


def _samples(item: Item, entry: DatasetEntry, source: Source, model: Model) -> list[Sample]:
    size = bucket_of(source.facts, entry, model.bucket_step)
    frames = resampled_frames(source.facts, model.fps, entry.source_fps) if item.media == "video" else 1
    clips: Sequence[tuple[int, int]] = windows(entry, frames) if item.media == "video" else [(0, 1)]
    return [Sample(item, entry, source, start, count, size, model.fps) for start, count in clips]


def _lengths_skipped(item: Item, entry: DatasetEntry, source: Source, model: Model) -> list[int]:
    """The target_frames that a clip is too short for."""
    if item.media == "image" or entry.frame_extraction == "full":
        return []
    frames = resampled_frames(source.facts, model.fps, entry.source_fps)
    return [count for count in entry.target_frames if count > frames]


def by_cache_folder(samples: Sequence[Sample]) -> Mapping[Path, list[Sample]]:
    """The samples grouped by the folder that holds their cache entries."""
    groups: dict[Path, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.entry.cache_directory, []).append(sample)
    return groups
