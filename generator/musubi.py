"""What musubi-tuner's scripts take: each flag is accepted or answered."""

from collections.abc import Iterator

from wangen.generator.lint.tools import musubi_specs
from wangen.generator.table import Step, spellings


def verdicts(step: type[Step]) -> Iterator[tuple[str, str]]:
    """Each flag of the script (v0.3.4) whose name is the step's first spelling, with what becomes of it here.

    >>> from wangen.generator.steps import Train
    >>> dict(verdicts(Train))["sdpa"]
    '`--attention sdpa`'
    """
    known = {name: (option, constant) for name, option, constant in spellings(step)}
    for name in musubi_specs(step.spellings[0]):
        if name not in known:
            yield name, f"answered: {step.elsewhere[name]}"
            continue
        option, constant = known[name]
        if constant is not None:
            yield name, f"`--{option.name} {constant}`"
        elif option.flag.help.startswith("accepted"):
            yield name, option.flag.help
        else:
            yield name, f"taken: {option.flag.help}"
