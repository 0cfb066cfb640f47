"""Which model profiles this version trains, samples and publishes for; the weights of the others load all the same."""

from wangen import profiles
from wangen.generator.errors import UsageError


def require_supported(model: profiles.Model, doing: str) -> None:
    """Refuse a model whose training needs what this version lacks.

    Args:
        model: what `--task` names.
        doing: the verb of the step: `training`, `sampling`, `publishing for`.

    Raises:
        UsageError: what is lacking, and the tasks that are supported.
    """
    if model.missing_feature:
        raise UsageError(
            f"{doing} {model.name} is not in this version of wangen: it needs {model.missing_feature}",
            cure=f"use one of {', '.join(supported())}; its weights can be checked, identified and converted",
        )


def supported() -> list[str]:
    """The names of the profiles that this version trains, samples and publishes for.

    >>> supported()
    ['t2v-1.3B', 't2v-14B']
    """
    return [name for name in profiles.model_names() if not profiles.model(name).missing_feature]
