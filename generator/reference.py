"""The pages that the program prints about itself: the overview of `wangen --help`, and `docs/flags.md`.

`python -m wangen.generator.reference` writes both into a checkout; tests compare them with what the table says.
"""

from collections.abc import Iterator
from pathlib import Path

import click

from wangen.generator.cli import wangen
from wangen.generator.entry import OVERVIEW
from wangen.generator.steps import STEPS, Option, Step, options, text_of

FLAGS_PAGE = Path(__file__).parent.parent / "docs" / "flags.md"


def overview() -> str:
    """What `wangen --help` shows, 100 columns wide."""
    with click.Context(wangen, info_name="wangen", terminal_width=100) as context:
        return wangen.get_help(context) + "\n"


def flags_page() -> str:
    """`docs/flags.md`: every flag of every step."""
    lines = [
        "# Flags of every step",
        "",
        "Printed by `python -m wangen.generator.reference` from the table of steps (`generator/steps.py`).",
        "`wangen STEP …` and `python -m wangen.runtime STEP …` are the same. Dashes may stand for underscores, a flag",
        "that is true or false has a `--no_` form, and `--config_file FILE.toml` takes the same names as keys.",
    ]
    for step in STEPS:
        lines += ["", f"## {step.command}", "", (step.__doc__ or "").strip(), ""]
        if step.spellings:
            lines += [f"Also called {', '.join(f'`{name}`' for name in step.spellings)}.", ""]
        lines += ["| flag | takes | default | meaning |", "|---|---|---|---|", *_rows(step)]
        if step.elsewhere:
            lines += ["", "Flags of other tools, and what to do instead:", "", "| flag | answer |", "|---|---|"]
            lines += [f"| `--{name}` | {_cell(answer)} |" for name, answer in sorted(step.elsewhere.items())]
    return "\n".join(lines) + "\n"


def _rows(step: type[Step]) -> Iterator[str]:
    for option in options(step):
        names = [f"`--{name}`" for name in (option.name, *option.flag.names)]
        constants = [f"`--{name}` = {value}" for name, value in option.flag.constants.items()]
        spelled = [f"`{name}` = {value}" for name, value in option.flag.values.items() if name]
        also = f" ({', '.join(constants + spelled)})" if constants or spelled else ""
        knob = " Knob of the scripts." if option.flag.knob else ""
        yield f"| {', '.join(names)} | {_takes(option)} | {_default(option)} | {_cell(option.flag.help)}{also}.{knob} |"


def _takes(option: Option) -> str:
    if option.kind is bool:
        return "nothing"
    if option.flag.model_choices:
        return "a model profile"
    kind = {"str": "text", "int": "whole number", "float": "number", "Path": "path"}[option.kind.__name__]
    one = ", ".join(option.choices) if option.choices else kind
    return one if option.length is None else f"{option.length or 'any number'} x {one}"


def _default(option: Option) -> str:
    if option.required:
        return "**required**"
    if option.kind is bool:
        return "on" if option.default else "off"
    if option.default in (None, (), ""):
        return ""
    values = option.default if isinstance(option.default, tuple) else (option.default,)
    return f"`{' '.join(map(text_of, values))}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def write_pages() -> None:
    """Write the overview and the page of flags."""
    Path(OVERVIEW).write_text(overview(), encoding="utf-8", newline="\n")
    FLAGS_PAGE.parent.mkdir(exist_ok=True)
    FLAGS_PAGE.write_text(flags_page(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write_pages()
