"""A published script as a plan reads it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wangen.generator import scripts
from wangen.generator.bundle import script_names
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.files import naming
from wangen.generator.quoting import QUOTES
from wangen.generator.seen import seen_step
from wangen.generator.steps import Train
from wangen.generator.table import Step
from wangen.generator.target import Target, host_platform_name


@dataclass(frozen=True)
class Scripted:
    """A published script, its steps as this host sees their paths.

    Attributes:
        name: of the script.
        folder: where it runs.
        steps: what it does.
        target: of the workspace; None for a script alone.
        elsewhere: paths that another machine has.
    """

    name: str
    folder: Path
    steps: Sequence[Step]
    target: Target | None
    elsewhere: list[str]

    @property
    def slug(self) -> str:
        """Of its dataset."""
        return Path(self.name).stem.removeprefix("train_")

    def without_preset(self) -> "Scripted":
        """The script with no `--vram`, which the flags of `publish --fit` replace."""
        return replace(self, steps=[replace(s, vram=None) if isinstance(s, Train) else s for s in self.steps])

    def step(self, kind: type[Step]) -> Any:
        """The first step of a kind; None where there is none."""
        return next((step for step in self.steps if isinstance(step, kind)), None)


def read_script(path: Path, target: Target | None = None) -> Scripted:
    """A script that wangen wrote, its steps as this host sees their paths.

    Raises:
        WangenError: it is none, or a line of it cannot be read.
    """
    shell = path.suffix[1:]
    if shell not in QUOTES:
        raise UsageError("this is no script of wangen's that runs steps", where=str(path),
                         cure="name a dataset, or its train script (.sh, .bat, .ps1)")  # fmt: skip
    if target is None and shell in ("bat", "ps1") and host_platform_name() != "windows":
        raise UsageError(f"this script is for Windows, and this is {host_platform_name()}", where=str(path),
                         cure="ask in its workspace: wangen plan NAME --platform windows")  # fmt: skip
    with naming(path):
        data = path.read_bytes()
    steps, elsewhere = [], list[str]()
    if wrong := scripts.invalid_knobs(data):
        raise UsageError(f"no knob is set by {wrong[0]!r}", where=str(path), cure="write letters, digits and . _ , + - "
                         "as its value")  # fmt: skip
    for command, step in scripts.parsed_steps(data, shell):
        if isinstance(step, WangenError):
            raise WangenError(f"{command}: {step.found}", where=str(path), cure=step.cure, exit_code=step.exit_code)
        steps.append(seen_step(target, step, elsewhere) if target else step)
    if not steps:
        raise UsageError("no step of wangen's is in it", where=str(path), cure="name the train script")
    return Scripted(path.name, target.folder if target else path.absolute().parent, steps, target, elsewhere)


def published_script(target: Target, slug: str) -> Path | None:
    """The training script of a dataset on a target, as this host sees it; None when it is not published there."""
    files = (target.folder / file for name, file in script_names(target, slug) if name == "train")
    return next((path for path in files if path.suffix[1:] in QUOTES and path.is_file()), None)
