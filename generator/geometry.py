"""Which pixels and frames of an item are used: buckets and clip windows, one rule for caching and training."""

from collections.abc import Mapping
from functools import cache
from math import isqrt, sqrt

from wangen.generator.dataset import Item, MediaFacts
from wangen.generator.pace import pace_of, steady
from wangen.generator.toml_values import longest_clip
from wangen.generator.tomls import DatasetEntry


@cache
def buckets(resolution: tuple[int, int], step: int) -> tuple[tuple[int, int], ...]:
    """Every (width, height) of about this area whose sides are multiples of `step`, both orientations.

    >>> (832, 480) in buckets((832, 480), 16), len(buckets((256, 256), 16))
    (True, 17)
    """
    area = resolution[0] * resolution[1]
    side = isqrt(area)
    found = set()
    for width in range(max(step, side // 2 // step * step), side + step, step):
        height = area // width // step * step
        if height:
            found |= {(width, height), (height, width)}
    return tuple(sorted(found)) or ((step, step),)


def bucket_of(facts: MediaFacts, entry: DatasetEntry, step: int) -> tuple[int, int]:
    """The (width, height) an item is resized and cropped to.

    With buckets on, the one whose aspect ratio is nearest, as a ratio: 2:1 is as far from 1:1 as 1:2 is.
    """
    area = entry.resolution[0] * entry.resolution[1]
    if not entry.enable_bucket:
        return _floor(entry.resolution, step)
    if entry.bucket_no_upscale and facts.width * facts.height <= area:
        return _floor((facts.width, facts.height), step)

    def stretch(size: tuple[int, int]) -> float:
        """How far from the item's aspect ratio, 1 being equal; swapping all widths and heights changes nothing."""
        across, down = size[0] * facts.height, size[1] * facts.width
        return max(across, down) / min(across, down)

    # The last two settle ties: the shorter side first, so that a turned item gets the turned bucket.
    return min(buckets(entry.resolution, step), key=lambda size: (stretch(size), -size[0] * size[1], min(size), size))


AREA_STEP = 32
"""Sides of pictures at an area of their own are multiples of it, as in the pipelines of Qwen-Image-Edit, in pixels."""


def area_size(size: tuple[int, int], area: tuple[int, int]) -> tuple[int, int]:
    """The (width, height) of about this area whose aspect ratio is nearest to that of `size`.

    >>> area_size((1920, 1080), (1024, 1024)), area_size((500, 500), (384, 384))
    ((1376, 768), (384, 384))
    """
    width = sqrt(area[0] * area[1] * (size[0] / size[1]))
    height = width / (size[0] / size[1])
    sides = (max(AREA_STEP, round(side / AREA_STEP) * AREA_STEP) for side in (width, height))
    return next(sides), next(sides)


def _floor(size: tuple[int, int], step: int) -> tuple[int, int]:
    return max(step, size[0] // step * step), max(step, size[1] // step * step)


def nearest_size(size: tuple[int, int], step: int) -> tuple[int, int]:
    """The size nearest to another whose sides are multiples of a step, in pixels.

    >>> nearest_size((960, 540), 16), nearest_size((5, 480), 32)
    ((960, 544), (32, 480))
    """
    width, height = (max(step, round(side / step) * step) for side in size)
    return width, height


def resampled_frames(facts: MediaFacts, fps: int, source_fps: float | None = None) -> int:
    """How many frames a video has at `fps` frames per second, played at its own speed; all, where that is its rate.

    The nearest number: containers that count in milliseconds round their durations up or down.

    Args:
        facts: from the file.
        fps: the model's frame rate.
        source_fps: the video's frame rate, when the container's own times are wrong.

    >>> resampled_frames(MediaFacts(64, 48, 17, 1.062), fps=16)
    17
    """
    pace = pace_of(fps, source_fps or facts.rate)
    rate = source_fps or (facts.rate if pace.within_s else 0.0)
    duration_s = facts.num_frames / rate if rate else facts.duration_s
    return max(1, int(duration_s * pace.fps + 0.5))


def manner(facts: MediaFacts, fps: int | None, source_fps: float | None = None) -> Mapping[str, float]:
    """What else decides which pixels a clip has, for recipes and records; empty but of unusual videos.

    Args:
        facts: of the video.
        fps: the model's frame rate; None where frames are taken by number.
        source_fps: the video's frame rate, when the container's own times are wrong.

    >>> film = MediaFacts(64, 48, 24, 1.001, rate=23.976, on_clock=False)
    >>> manner(MediaFacts(64, 48, 24, 1.0, rate=24.0), 24), manner(film, 24)
    ({}, {'pace': 23.976})
    """
    found: dict[str, float] = {}
    on_clock = steady(source_fps, facts.num_frames).on_clock if source_fps else facts.on_clock
    if fps is not None and not on_clock and (pace := pace_of(fps, source_fps or facts.rate)).within_s:
        found["pace"] = round(pace.fps, 6)
    if facts.mirrored:
        found["mirrored"] = True
    return found


def clip_frames(item: Item, facts: MediaFacts, fps: int, source_fps: float | None) -> int:
    """How many frames an item's clip has: those that its line takes of a longer video, else as `resampled_frames`.

    Args:
        item: a video.
        facts: of its file.
        fps: the model's frame rate.
        source_fps: the video's frame rate, when the container's own times are wrong.
    """
    return item.excerpt.count if item.excerpt else resampled_frames(facts, fps, source_fps)


def windows(entry: DatasetEntry, num_frames: int) -> list[tuple[int, int]]:
    """The (start, count) clips taken from a video of `num_frames` frames, as `frame_extraction` says.

    >>> from pathlib import Path
    >>> entry = DatasetEntry(directory=Path(), media="video", cache_directory=Path(), target_frames=(5,),
    ...                      frame_extraction="chunk")
    >>> windows(entry, 12)
    [(0, 5), (5, 5)]
    """
    if entry.frame_extraction == "full":
        return [(0, longest_clip(min(num_frames, entry.max_frames)))]
    found: list[tuple[int, int]] = []
    for count in entry.target_frames:
        last = num_frames - count
        if last < 0:
            continue
        match entry.frame_extraction:
            case "head":
                starts = [0]
            case "chunk":
                starts = list(range(0, last + 1, count))
            case "slide":
                starts = list(range(0, last + 1, entry.frame_stride))
            case "uniform":
                gaps = max(1, entry.frame_sample - 1)
                starts = sorted({last * number // gaps for number in range(entry.frame_sample)})
        found += [(start, count) for start in starts]
    return found


TOO_SHORT = " are needed"
"""Ends what is said of a clip that is too short."""


def too_short(facts: MediaFacts, target: DatasetEntry | int, fps: int) -> tuple[str, str] | None:
    """What is wrong with a video of which no clip can be cut, and the cure; None when one can.

    Args:
        facts: of the video.
        target: the block it belongs to, or the clip length in frames that it will be published for.
        fps: the model's frame rate.

    >>> too_short(MediaFacts(64, 48, 24, 1.5), 33, fps=16)
    ('has 24 frames at 16 fps, 33 are needed', 'set num_frames = 21 in wangen.toml or take it out')
    """
    if isinstance(target, int):
        frames, needed, setting = resampled_frames(facts, fps), target, "num_frames = {} in wangen.toml"
        fits = frames >= needed
    else:
        frames, needed = resampled_frames(facts, fps, target.source_fps), min(target.target_frames)
        place = "a TOML whose block names this manifest" if target.mixed else "the dataset's TOML"
        setting, fits = f"target_frames = [{{}}] in {place}", bool(windows(target, frames))
    if fits:
        return None
    cure = f"set {setting.format(longest_clip(frames))}"
    if not isinstance(target, int) and facts.num_frames >= needed:  # at their own rate, which a manifest's lines count
        if target.mixed:
            cure = f"make the clips at {fps} fps, {cure}"
        elif target.source_fps is None:
            cure += f", source_fps = {fps:.1f} to take every frame whatever its time,"
    return f"has {frames} frames at {fps} fps, {needed}{TOO_SHORT}", f"{cure} or take it out"


def clip_fault(item: Item, facts: MediaFacts, entry: DatasetEntry, fps: int) -> tuple[str, str] | None:
    """Why no clip can be cut from an item, and the cure; None when one can.

    Args:
        item: a video.
        facts: of its file.
        entry: the block it belongs to.
        fps: the model's frame rate.
    """
    if item.excerpt is None:
        return too_short(facts, entry, fps)
    if fault := item.excerpt.fault(facts.num_frames):
        return fault
    if windows(entry, item.excerpt.count):
        return None
    taken = f"line {item.excerpt.line} of the manifest takes {item.excerpt.count} frames"
    found = f"{taken}, {min(entry.target_frames)}{TOO_SHORT}"
    return found, "lower target_frames, or make the manifest again with more"


SAME_SHAPE = 0.02
"""Aspect ratios that differ by less are those of one picture saved in two sizes."""


def misfit(
    facts: MediaFacts, companion: MediaFacts, entry: DatasetEntry, fps: int, *, still: bool, mask: bool
) -> tuple[str, str] | None:
    """What is wrong with a control or mask for its item, and the cure; None when it fits.

    Args:
        facts: of the item.
        companion: of the control or mask.
        entry: the block of both.
        fps: the model's frame rate.
        still: the companion is an image, which stands for every frame.
        mask: it is a mask: of another shape than its picture it would cover other parts.

    >>> from pathlib import Path
    >>> entry = DatasetEntry(directory=Path(), media="image", cache_directory=Path())
    >>> misfit(MediaFacts(64, 48, 1, 0), MediaFacts(64, 64, 1, 0), entry, 16, still=True, mask=True)
    ('is 64x64, its picture 64x48: not the same shape', 'draw it over the picture itself')
    """
    across, down = facts.width * companion.height, facts.height * companion.width
    if mask and abs(across - down) > SAME_SHAPE * down:
        sizes = f"is {companion.width}x{companion.height}, its picture {facts.width}x{facts.height}"
        return f"{sizes}: not the same shape", "draw it over the picture itself"
    if still or entry.media == "image":
        return None
    clips = windows(entry, resampled_frames(facts, fps, entry.source_fps))
    frames, needed = resampled_frames(companion, fps, entry.source_fps), max(map(sum, clips), default=0)
    if frames >= needed:
        return None
    return f"has {frames} frames at {fps} fps, its clip uses {needed}", "replace it or shorten target_frames"
