"""Which items are put apart from what is trained on, to judge by them, and what is told of that to later trainings."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wangen.generator.errors import UsageError, many
from wangen.generator.footage import video_of
from wangen.generator.steps import Train
from wangen.runtime.loader import CachedSample
from wangen.runtime.randomness import seed_for
from wangen.runtime.trained_on import HELD_OUT, Part, untrained

log = logging.getLogger("wangen")

MOST_TOLD = 1000
"""Items that are held out and told of: some 20 kB of each header."""


def held_out(
    samples: Sequence[CachedSample],
    count: int,
    seed: int,
    *,
    tell: bool = True,
    instead: str = "a dataset of its own with --validation_config",
) -> tuple[list[CachedSample], list[CachedSample]]:
    """What is trained on, and what is only judged by: the samples of `count` media files, chosen by their content.

    All samples, resolutions and copies of a file are on one side, and all clips that were cut from one video or are
    frames of one: of clips whole videos are put apart, at least one is left, and `count` of their clips are judged. The
    files or videos with the lowest digests of (seed, content) are held out, so renaming changes nothing but where a
    clip's name says its video, and a new file moves at most one, where no clip is one of several of a video. A video is
    passed over where more than twice as many clips as are judged would be apart with it, and more than half of all.
    Regularisation sets stay in training.

    Args:
        samples: of the whole dataset.
        count: files, or clips of longer videos, that are judged.
        seed: of the choice.
        tell: warn when all clips are of one video, or of others than would leave enough to train on.
        instead: what else can be given, where nothing would be left.

    Raises:
        UsageError: nothing would be left to train on.
    """
    own = [sample for sample in samples if not sample.sample.entry.is_reg]
    videos = {clip_key(sample): video_key(sample) for sample in own}
    if count >= len(videos):
        raise UsageError(
            f"--validation_items {count} leaves nothing of {many(len(videos), 'item')} to train on",
            cure=f"give {max(1, len(videos) // 10)} or so, or {instead}" if len(videos) > 1 else f"give {instead}",
        )
    if len(set(videos.values())) == 1:
        if tell:
            log.warning("  all clips were cut from one video: those held out look like those that are trained on")
        videos = {clip: clip for clip in videos}
    unseen = _apart(videos, count, seed)
    if tell and len(unseen) < count:
        log.warning("  %s held out of %s asked for: whole videos are held out, and the next one would leave too little "
                    "to train on", many(len(unseen), "clip is", "clips are"), count)  # fmt: skip
    judged = set(unseen[:count])
    validation = [sample for sample in own if clip_key(sample) in judged]
    # A file that is held out may also be part of a regularisation set: it must not be seen there either.
    return [sample for sample in samples if clip_key(sample) not in unseen], validation


def _apart(videos: Mapping[str, str], count: int, seed: int) -> list[str]:
    """The clips of the videos that are put apart, in the order of their draws; `videos` is clip -> its video."""

    def draw(name: str) -> int:
        return _draw(seed, name)

    clips_of: dict[str, list[str]] = {}
    for clip, video in videos.items():
        clips_of.setdefault(video, []).append(clip)
    apart: list[str] = []
    most = min(max(2 * count, len(videos) // 2), len(videos) - 1)
    for video in sorted(clips_of, key=draw):
        if len(apart) < count and len(apart) + len(clips_of[video]) <= most:
            apart += clips_of[video]
    return sorted(apart, key=draw)


def as_told(judged: Sequence[CachedSample], trained: Sequence[CachedSample], options: Train) -> dict[str, Any]:
    """What a training tells later ones of the items that it holds out, as `trained_on.HELD_OUT` says.

    Args:
        judged: what `held_out` gave for it.
        trained: likewise.
        options: of the training.

    Returns:
        Nothing where nothing was put apart from the dataset, or so much that no header should carry it.
    """
    draws = sorted({_draw(options.seed, clip_key(sample)) for sample in judged})
    if not options.validation_items or len(draws) > MOST_TOLD:
        return {}
    return {"draws": draws, "lowest": _are_files((*judged, *trained))}


def doubted(judged: Iterable[CachedSample], everything: Sequence[CachedSample], part: Part) -> list[CachedSample]:
    """What may have been trained on in a part of a training on this very dataset, which has changed since.

    Args:
        judged: what is judged by now.
        everything: the dataset that it is of. Where nothing of it was held out in the part, it is another one.
        part: with `HELD_OUT`.

    Raises:
        KeyError, TypeError, ValueError: it is no such part.
    """
    seed = int(part["seed"])
    if set(part[HELD_OUT]["draws"]).isdisjoint(_draw(seed, clip_key(sample)) for sample in everything):
        return []
    unseen = untrained(part, lowest=_are_files(everything))
    return [one for one in judged if not unseen(_draw(seed, clip_key(one)))]


def _are_files(samples: Iterable[CachedSample]) -> bool:
    """Whether each is a file of its own and none is of a regularisation set."""
    return all(not one.sample.entry.is_reg and video_key(one) == one.sample.source.digest for one in samples)


def clip_key(sample: CachedSample) -> str:
    """What the samples of one clip have in common: of a file of its own its content, else also which frames it is."""
    digest, excerpt = sample.sample.source.digest, sample.sample.item.excerpt
    return f"{digest} {excerpt.first} {excerpt.step}" if excerpt else digest


def _draw(seed: int, name: str) -> int:
    return seed_for(seed, "held out", name)


def video_key(sample: CachedSample) -> str:
    """What the samples of one media file, and of the clips of one video, have in common."""
    return video_of(sample.sample.item.path.name) or sample.sample.source.digest
