"""What this version can do with which model profile; the weights of all of them load, whatever can be done."""

from typing import Literal

from wangen import profiles
from wangen.generator.errors import UsageError

Activity = Literal["caching for", "training", "sampling", "publishing for"]

_LAST_FRAME = "the first and the last frame as condition"


def missing_feature(model: profiles.Model) -> str:
    """What working with this model would need that this version lacks, in words; empty where it lacks nothing."""
    return _LAST_FRAME if model.condition == "first_and_last" else ""


def require_supported(model: profiles.Model, doing: Activity) -> None:
    """Refuse a model that needs what this version lacks.

    Args:
        model: what `--task` names.
        doing: what a step is about to do.

    Raises:
        UsageError: what is lacking, and the tasks that are supported.
    """
    if missing := missing_feature(model):
        raise UsageError(
            f"{doing} {model.name} is not in this version of wangen: it needs {missing}",
            cure=f"use one of {', '.join(supported())}; its weights can be checked, identified and converted",
        )


def supported() -> list[str]:
    """The names of the profiles that this version does something with.

    >>> supported()
    ['i2v-14B', 'i2v-A14B', 'qwen-image', 'qwen-image-edit', 'qwen-image-edit-plus', 't2v-1.3B', 't2v-14B', \
't2v-A14B', 'ti2v-5B']
    """
    return [name for name in profiles.model_names() if not missing_feature(profiles.model(name))]
