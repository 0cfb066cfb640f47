"""`wangen check`: the step with explicit flags, or a published dataset by its name."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from wangen.generator.commands import StepCommand, given
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import Check


def execute(step: Any) -> int:
    """Run a step; imported late, so that help stays quick."""
    from wangen.generator.session import execute as run

    return run(step)


def _check_slug(name: str, folder: Path | None, platforms: Sequence[str]) -> int:
    """`wangen check NAME`: every published target, as far as this machine sees it."""
    from wangen.generator import preflight, workspace
    from wangen.generator.paths import slugify
    from wangen.generator.pictures import decoding_once

    place = workspace.read(folder)
    slug = slugify(name)
    targets = place.targets_of(platforms)
    published = [target for target in targets if preflight.is_published(target, slug)]
    if not published:
        raise WangenError(f"{name!r} is not published", where=", ".join(str(target.folder) for target in targets),
                          cure=f"wangen publish {slug}")  # fmt: skip
    failed = False
    with decoding_once():
        for target in published:
            click.echo(f"{slug} on {target.platform.name}: {target.folder}")
            os.chdir(target.folder)
            for line in preflight.look(place, target, slug):
                click.echo(line)
                failed |= line.level == "problem"
    return int(failed)


class CheckCommand(StepCommand):
    """The check step, which can also be called with a dataset's name inside a workspace."""

    def __init__(self) -> None:
        super().__init__(Check, execute)
        self.params += [
            click.Argument(["slug"], metavar="[NAME]", required=False),
            click.Option(["--workspace"], type=click.Path(path_type=Path), help="with NAME: the workspace"),
            click.Option(
                ["--platform", "platforms"], multiple=True, help="with NAME: this platform only; can be repeated"
            ),
        ]

    def invoke(self, ctx: click.Context) -> Any:
        """With a SLUG the flags are filled in from the workspace."""
        if ctx.params["slug"]:
            extra = sorted(given(self.step, ctx.params))
            if extra:
                raise UsageError(f"check NAME takes its flags from the published script, not --{extra[0]}",
                                 cure="leave the flags out, or leave the name out and give all flags")  # fmt: skip
            return _check_slug(*(ctx.params[name] for name in ("slug", "workspace", "platforms")))
        return super().invoke(ctx)
