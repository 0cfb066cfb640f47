"""Dataset TOML or manifest -> samples: what is cached and trained on, one per image and one per clip window.

The caching steps, `check_cache` and `train` all build their samples here, so that they cannot disagree.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from wangen.generator.bulk import bulk
from wangen.generator.dataset import NO_CAPTION, REPLACE, Item, Problem, media_of
from wangen.generator.errors import WangenError, many, printable
from wangen.generator.excerpts import FIRST, STEP
from wangen.generator.geometry import TOO_SHORT, area_size, bucket_of, clip_frames, manner, windows
from wangen.generator.items import misfits, read_items
from wangen.generator.step_parts import SMOKE_ITEMS
from wangen.generator.steps import CacheStep, CheckCache, Train
from wangen.generator.toml_values import FRAMES_PER_LATENT, WHITE
from wangen.generator.tomls import DatasetEntry, read_dataset
from wangen.profiles import Model, Prompt
from wangen.runtime.cache.recipes import digest
from wangen.runtime.sources import Source, read_sources

log = logging.getLogger("wangen")

_NAMED = 20
"""Clips that a warning names; more are counted."""

LANCZOS = "lanczos, cover, centre"
IN_SRGB = "to sRGB, by the profile"
LANCZOS_WHOLE = "lanczos, whole"
BILINEAR = "bilinear, cover, centre"
"""Of masks: Lanczos would draw lines of light and dark along their edges."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One thing to encode and train on.

    Attributes:
        item: the media file with its captions and what belongs to it.
        entry: the block of the TOML it comes from.
        source: digest and facts of the file.
        start: first frame, counted at `fps`; of an excerpt among its own frames.
        count: number of frames, 4n+1.
        size: bucket as (width, height) in pixels.
        fps: frames per second of the model.
        controls: digests and facts of the item's control media.
        mask: digest and facts of its mask.
        stride_frames: frames per latent frame after the first.
        stride_px: pixels per latent cell.
        prompt: how the text encoder is asked, where it is a language model.
    """

    item: Item
    entry: DatasetEntry
    source: Source
    start: int
    count: int
    size: tuple[int, int]
    fps: int
    controls: tuple[Source, ...] = ()
    mask: Source | None = None
    stride_frames: int = FRAMES_PER_LATENT
    stride_px: int = 8
    prompt: Prompt | None = None

    @property
    def name(self) -> str:
        """`cat.jpg`, or `walk.mp4:0+17` for frames 0 to 16 of a clip; two folders may hold the same.

        Of an excerpt its file's frames: `hours.mp4:5400+17x2` are 17 of them, every second one from 5400 on.
        """
        if excerpt := self.item.excerpt:
            step = f"x{excerpt.step}" if excerpt.step > 1 else ""
            return f"{self.item.path.name}:{excerpt.numbers(self.start)[0]}+{self.count}{step}"
        suffix = f":{self.start}+{self.count}" if self.item.media == "video" else ""
        return self.item.path.name + suffix

    def files(self) -> Iterator[tuple[Path, Source]]:
        """The media file, its controls and its mask, each with its digest and facts."""
        yield self.item.path, self.source
        yield from zip(self.item.controls, self.controls, strict=True)
        if self.item.mask and self.mask:
            yield self.item.mask, self.mask

    def latent_recipe(self) -> dict[str, Any]:
        """Everything but the encoder that decides the latent's bytes."""
        return self._cut(self.item.path, self.source, LANCZOS)

    def control_recipe(self, number: int) -> dict[str, Any]:
        """Everything but the encoder that decides the latent of control media `number`, counted from 0."""
        recipe = self._cut(self.item.controls[number], self.controls[number], LANCZOS)
        if size := self.control_size(number):
            recipe |= {"width": size[0], "height": size[1], "resize": LANCZOS_WHOLE}
        return recipe

    def control_size(self, number: int) -> tuple[int, int] | None:
        """The (width, height) of a control image of its own size, counted from 0; None where it is cut as the target.

        That is as the pipelines resize it: whole, at its own aspect ratio and the area of `control_resolution`.
        """
        area, facts = self.entry.control_resolution, self.controls[number].facts
        if area is None or media_of(self.item.controls[number]) != "image":
            return None
        return area_size((facts.width, facts.height), area)

    def image_recipe(self) -> dict[str, Any]:
        """Everything but the encoder that decides the latent of the image-to-video condition."""
        return {**self.latent_recipe(), "condition": "first frame, then grey"}

    def clip_recipe(self) -> dict[str, Any]:
        """Everything but the encoder that decides CLIP's tokens of the first frame, whatever the clip's length.

        At the start of a video the first frame is the same at every frame rate.
        """
        recipe = self._cut(self.item.path, self.source, LANCZOS)
        del recipe["frames"]
        recipe.pop(STEP, None)
        if recipe.get("start") == 0:
            del recipe["fps"]
        return recipe

    def mask_recipe(self) -> dict[str, Any]:
        """Everything that decides the mask's bytes. Raises ValueError when the item has none."""
        if self.item.mask is None or self.mask is None:
            raise ValueError(f"{self.name} has no mask")
        stride = {"stride_frames": self.stride_frames, "stride_px": self.stride_px}
        recipe = self._cut(self.item.mask, self.mask, BILINEAR) | stride
        recipe.pop("background", None)  # what is transparent in a mask does not count
        recipe.pop("colours", None)
        return recipe

    def text_recipes(self) -> list[dict[str, Any]]:
        """For each caption everything but the encoder that decides the embedding's bytes."""
        from wangen.runtime.prompts import text_of

        template = self.prompt is not None
        return [self._asked(text_of(caption, template=template)) for caption in self.item.captions]

    def empty_recipe(self) -> dict[str, Any]:
        """Everything but the encoder that decides the bytes of the empty prompt, which may be shown control images."""
        return self._asked("")

    def _asked(self, caption: str) -> dict[str, Any]:
        """A caption with what the text encoder is given beside it."""
        if self.prompt is None:
            return {"caption": caption}
        recipe: dict[str, Any] = {"caption": caption, "prompt": digest(asdict(self.prompt))}
        if self.prompt.picture:
            recipe["controls"] = [source.digest for source in self.controls]
            if any(source.facts.profiled for source in self.controls):
                recipe["colours"] = IN_SRGB
            if self.entry.background_color != WHITE and any(source.facts.transparent for source in self.controls):
                recipe["background"] = self.entry.background_color
        return recipe

    def _cut(self, path: Path, source: Source, resize: str) -> dict[str, Any]:
        """Which pixels of a file are used. A still picture stands for each frame of the clip that it belongs to."""
        still = media_of(path) == "image"
        recipe: dict[str, Any] = {
            "source": source.digest, "width": self.size[0], "height": self.size[1], "resize": resize,
        }  # fmt: skip
        excerpt, source_fps = self.item.excerpt, self.entry.source_fps
        if not still:
            numbered = excerpt is not None and path == self.item.path
            recipe |= manner(source.facts, None if numbered else self.fps, source_fps)
            if source.facts.aspect != 1.0:
                recipe["aspect"] = source.facts.aspect
        if not still and excerpt:
            return recipe | {FIRST: excerpt.numbers(self.start)[0], STEP: excerpt.step, "frames": self.count}
        if not still:
            return recipe | {"start": self.start, "frames": self.count, "fps": self.fps, "source_fps": source_fps}
        recipe["frames"] = self.count
        if source.facts.profiled:
            recipe["colours"] = IN_SRGB
        if self.entry.background_color != WHITE and source.facts.transparent:
            recipe["background"] = self.entry.background_color
        return recipe


@dataclass
class _Found:
    """What a dataset holds for a model.

    Attributes:
        samples: of the items that suit it.
        problems: what cannot be read, or is wrong for any model.
        misfits: what does not suit this one.
        skipped: by number of frames the clips too short for it, as digest -> name.
    """

    samples: list[Sample] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    misfits: list[Problem] = field(default_factory=list)
    skipped: dict[int, dict[str, str]] = field(default_factory=dict)


def read_samples(
    options: CacheStep | CheckCache | Train, model: Model, *, trust_memo: bool = True, make_folders: bool = False
) -> list[Sample]:
    """The samples of a dataset, in the order of the TOML and of the file names or the manifest's lines.

    Args:
        options: name the dataset's TOML, the resolutions, and whether a few items will do (`--smoke`).
        model: its frame rate, bucket step and latent strides count.
        trust_memo: False hashes every media file again.
        make_folders: make the cache folders first, so that they can hold what is found out here.

    Raises:
        WangenError: captions are missing or media cannot be read (all of them are named and counted), nothing is left,
            or a cache folder cannot be made.
    """
    found = _read(options, model, trust_memo=trust_memo, make_folders=make_folders)
    if problems := [*found.problems, *found.misfits]:
        raise _refused(problems, options.dataset)
    if found.skipped:
        _say_skipped(found.skipped)
    return found.samples


def suited_samples(options: CheckCache, model: Model) -> tuple[list[Sample], WangenError | None]:
    """The samples of the items that suit a model, and why the others do not.

    Raises:
        WangenError: as `read_samples`, for what does not depend on the model.
    """
    found = _read(options, model)
    if found.problems:
        raise _refused(found.problems, options.dataset)
    return found.samples, _refused(found.misfits, options.dataset) if found.misfits else None


@bulk()
def _read(
    options: CacheStep | CheckCache | Train, model: Model, *, trust_memo: bool = True, make_folders: bool = False
) -> _Found:
    read = _Found()
    for entry, items, problems in _scans(options):
        if make_folders:
            make_folder(entry.cache_directory)
        read.problems += problems
        files = list(dict.fromkeys(path for item in items for path in (item.path, *item.companions)))
        sources, unreadable = read_sources(files, entry.cache_directory, trust_memo=trust_memo)
        read.problems += [Problem(Path(error.where), error.found, error.cure or REPLACE) for error in unreadable]
        for item in items:
            if not all(path in sources for path in (item.path, *item.companions)):
                continue
            wrong = list(misfits(item, entry, model, lambda path: sources[path].facts))  # noqa: B023 - used at once
            read.misfits += wrong
            if wrong:
                continue
            read.samples += _samples(item, entry, sources, model)
            for count in _lengths_skipped(item, entry, sources[item.path], model):
                read.skipped.setdefault(count, {}).setdefault(sources[item.path].digest, item.path.name)
    return read


def _say_skipped(skipped: Mapping[int, Mapping[str, str]]) -> None:
    """Which clips are too short for some of the target_frames: the names of each length's, by their digests."""
    each = ", ".join(f"{len(clips)} for {count} frames" for count, clips in sorted(skipped.items()))
    num_clips = len(set().union(*skipped.values()))
    log.warning("  clips too short for some of the target_frames, used without these: %d (%s)", num_clips, each)
    for count, clips in sorted(skipped.items()):
        rest = f" … and {len(clips) - _NAMED} more" if len(clips) > _NAMED else ""
        names = ", ".join(map(printable, islice(clips.values(), _NAMED)))
        log.warning("    fewer than %d frames: %s%s", count, names, rest)


def _refused(problems: Sequence[Problem], dataset_config: Path) -> WangenError:
    """Everything that is wrong, each thing once, counted and named; blocks that share a folder find the same."""
    unique = list(dict.fromkeys(problems))
    tally = {
        "without a caption": sum(problem.found.endswith(NO_CAPTION) for problem in unique),
        "too short": sum(problem.found.endswith(TOO_SHORT) for problem in unique),
    }
    kinds = ", ".join(f"{number} {what}" for what, number in tally.items() if number)
    listed = "\n".join(f"  - {problem}" for problem in unique)
    counted = many(len(unique), "problem") + (f" ({kinds})" if kinds else "")
    return WangenError(f"the dataset has {counted}:\n{listed}", where=str(dataset_config))


def _scans(options: CacheStep | CheckCache | Train) -> list[tuple[DatasetEntry, list[Item], list[Problem]]]:
    """The blocks that are used, each with its items and with what is wrong in its folder.

    For a try the first items of every block in turn, so that clips are among them as well as every resolution.
    """
    scans = [(entry, *read_items(entry, deep=False)) for entry in read_dataset(options.dataset, options.resolution)]
    if not options.smoke:
        return scans
    turns = zip_longest(*([(number, item) for item in items] for number, (_, items, _) in enumerate(scans)))
    chosen = list(islice(filter(None, chain.from_iterable(turns)), SMOKE_ITEMS))
    return [
        (entry, [item for block, item in chosen if block == number], found)
        for number, (entry, _, found) in enumerate(scans)
    ]


def folders_left_out(options: CacheStep) -> set[Path]:
    """The cache folders of the blocks that `--resolution` leaves out; blocks that are used may share them."""
    entries = read_dataset(options.dataset, tell=False)
    used = read_dataset(options.dataset, options.resolution, tell=False)
    return {entry.cache_directory for entry in entries if entry not in used}


def make_folder(
    folder: Path, what: str = "cache folder", cure: str = "choose another cache_directory in the dataset's TOML"
) -> None:
    """Make a folder, of the cache or another, and the folders above it.

    Raises:
        WangenError: there is a file in its place, or no right to make it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WangenError(
            f"cannot make the {what}: {error.strerror}", where=str(folder), cure=f"fix the rights above it or {cure}"
        ) from None


def _samples(item: Item, entry: DatasetEntry, sources: Mapping[Path, Source], model: Model) -> list[Sample]:
    source = sources[item.path]
    size = bucket_of(source.facts, entry, model.bucket_step)
    clips: Sequence[tuple[int, int]] = [(0, 1)]
    if item.media == "video":
        clips = windows(entry, clip_frames(item, source.facts, model.fps, entry.source_fps))
    controls, mask = tuple(sources[path] for path in item.controls), sources[item.mask] if item.mask else None
    strides = (model.temporal_stride, model.spatial_stride)
    return [
        Sample(item, entry, source, start, count, size, model.fps, controls, mask, *strides, model.prompt)
        for start, count in clips
    ]


def _lengths_skipped(item: Item, entry: DatasetEntry, source: Source, model: Model) -> list[int]:
    """The target_frames that a clip is too short for."""
    if item.media == "image" or entry.frame_extraction == "full":
        return []
    frames = clip_frames(item, source.facts, model.fps, entry.source_fps)
    return [count for count in entry.target_frames if count > frames]


def by_cache_folder(samples: Sequence[Sample]) -> Mapping[Path, list[Sample]]:
    """The samples grouped by the folder that holds their cache entries."""
    groups: dict[Path, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.entry.cache_directory, []).append(sample)
    return groups
