"""What musubi-tuner's training script takes: each flag is accepted or answered."""

from collections.abc import Iterator

from wangen.generator.lint.tools import musubi_specs
from wangen.generator.steps import Train
from wangen.generator.table import spellings


def verdicts() -> Iterator[tuple[str, str]]:
    """Each flag of its `wan_train_network.py` (v0.3.4) with what becomes of it here.

    >>> dict(verdicts())["sdpa"]
    '`--attention sdpa`'
    """
    known = {name: (option, constant) for name, option, constant in spellings(Train)}
    for name in musubi_specs("wan_train_network"):
        if name not in known:
            yield name, f"answered: {Train.elsewhere[name]}"
            continue
        option, constant = known[name]
        if constant is not None:
            yield name, f"`--{option.name} {constant}`"
        elif option.flag.help.startswith("accepted"):
            yield name, option.flag.help
        else:
            yield name, f"taken: {option.flag.help}"
