"""What speaks against the best checkpoint, in sentences."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from wangen.generator.errors import many
from wangen.runtime.evaluation.tables import difference
from wangen.runtime.evaluation_file import BASE, Evaluation, Video
from wangen.runtime.training.validation import Losses

FEW_FILES = 5
COLLAPSED = 0.5
"""A share of frames above which a clip is called frozen or black, where the base's is not."""
LESS_MOTION, MORE_FLICKER = 0.5, 2.0


def warnings_of(
    evaluation: Evaluation, base: Losses, others: Mapping[str, Losses], groups: Sequence[str]
) -> Iterator[str]:
    """Sentences for people, the gravest first.

    Args:
        evaluation: without warnings.
        base: its held-out losses.
        others: those of the checkpoints.
        groups: of each held-out item its file or the video that it was cut from, as `independent` gives them.
    """
    best = evaluation.winner
    found = difference(base, others[best.name], groups, comparisons=len(evaluation.checkpoints))
    if found.is_higher:
        yield f"no checkpoint is better than the base: {best.name}, the best, has a higher held-out loss"
    elif found.low is None:
        yield "only one file, or clips of one video, is held out: there is no interval, and the ranking may be chance"
    elif not found.is_lower:
        yield f"{best.name}, the best, cannot be told from the base: the interval of the difference holds 0"
    if len(evaluation.checkpoints) > 1:
        second = evaluation.ranked[1]
        if not difference(others[best.name], others[second.name], groups).is_higher:
            yield f"{best.name} cannot be told from {second.name}: look at the videos of both"
    if 1 < len(set(groups)) < FEW_FILES:
        number = many(len(set(groups)), "file")
        yield f"only {number} held out (clips of one video are one): the ranking may be chance"
    yield from _of_videos(best.name, evaluation.videos)
    copies = [one for one in evaluation.memorisation if one.checkpoint == best.name and one.suspicious]
    if copies:
        number = many(len(copies), "video")
        yield f"{number} of {best.name} all but copied from training clips, for example {copies[0].nearest}"


def forgotten(best: str, losses: Mapping[str, Losses], groups: Sequence[str]) -> Iterator[str]:
    """Whether the best checkpoint has a higher loss on what was not trained than the base.

    Args:
        best: its name.
        losses: on that material, with the base's.
        groups: of each of its items the like.
    """
    if difference(losses[BASE], losses[best], groups).is_higher:
        yield f"{best} has forgotten: its loss on other material is higher than the base's"


def _of_videos(best: str, videos: Sequence[Video]) -> Iterator[str]:
    """Collapse, lost motion and flicker, against the base."""
    pairs = [(one.signals[BASE], one.signals[best]) for one in videos if {BASE, best} <= one.signals.keys()]
    for name in ("frozen", "black"):
        bad = sum(own[name] > COLLAPSED >= base[name] for base, own in pairs)
        if bad:
            yield f"{many(bad, 'video')} of {best} {'is' if bad == 1 else 'are'} {name} where the base's is not"
    lively = [own["motion_to_training"] for _, own in pairs if "motion_to_training" in own]
    if lively and median(lively) < LESS_MOTION:
        yield f"videos of {best} move less than half as much as the training clips"
    moving = [(base["motion"], own["motion"]) for base, own in pairs if base["motion"] > 0]
    if moving and median(own / base for base, own in moving) < LESS_MOTION:
        yield f"videos of {best} move less than half as much as the base's"
    flickering = [(base["flicker"], own["flicker"]) for base, own in pairs if base["flicker"] > 0]
    if flickering and median(own / base for base, own in flickering) > MORE_FLICKER:
        yield f"videos of {best} flicker more than twice as much as the base's"
