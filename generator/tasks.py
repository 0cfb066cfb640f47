"""What this version can do with which model profile; the weights of all of them load, whatever can be done."""

from typing import Literal

from wangen import profiles
from wangen.generator.errors import UsageError

Activity = Literal["caching for", "training", "sampling", "publishing for"]

_LAST_FRAME = "the first and the last frame as condition"
_FIRST_FRAME = "a first frame as condition"


def missing_feature(model: profiles.Model, doing: Activity) -> str:
    """What an activity with this model would need that this version lacks, in words; empty where it lacks nothing."""
    if model.condition == "first_and_last":
        return _LAST_FRAME
    if doing != "sampling":
        return ""
    if model.experts:
        return "two experts"
    if model.condition == "text_or_image":
        return "a timestep for each token"
    return _FIRST_FRAME if model.condition == "image" else ""


def require_supported(model: profiles.Model, doing: Activity) -> None:
    """Refuse a model that needs what this version lacks.

    Args:
        model: what `--task` names.
        doing: what a step is about to do.

    Raises:
        UsageError: what is lacking, and the tasks that are supported.
    """
    if missing := missing_feature(model, doing):
        raise UsageError(
            f"{doing} {model.name} is not in this version of wangen: it needs {missing}",
            cure=f"use one of {', '.join(supported(doing))}; its weights can be checked, identified and converted",
        )


def supported(doing: Activity = "training") -> list[str]:
    """The names of the profiles that this version does something with.

    >>> supported(), supported("sampling")
    (['i2v-14B', 'i2v-A14B', 't2v-1.3B', 't2v-14B', 't2v-A14B', 'ti2v-5B'], ['t2v-1.3B', 't2v-14B'])
    """
    return [name for name in profiles.model_names() if not missing_feature(profiles.model(name), doing)]
