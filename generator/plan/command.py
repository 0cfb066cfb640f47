"""`wangen plan`: what a run needs, before it starts."""

from dataclasses import dataclass
from pathlib import Path

from wangen.generator import workspace
from wangen.generator.cards import Gpu, card_named
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.files import is_file
from wangen.generator.paths import slugify
from wangen.generator.plan import gpus, text
from wangen.generator.plan.planning import Planned, plan_script
from wangen.generator.plan.scripted import Scripted, published_script, read_script
from wangen.generator.quoting import QUOTES
from wangen.generator.target import Target


@dataclass(frozen=True, kw_only=True)
class Request:
    """The words of a `wangen plan` command line.

    Attributes:
        what: a dataset's name, or a script that wangen wrote.
        folder: the workspace; None: found from here.
        platform: the target of the workspace; None: the one that this machine is, else the first.
        gpu: name of a card; None: those of this machine.
        as_json: print one JSON object.
    """

    what: str
    folder: Path | None = None
    platform: str | None = None
    gpu: str | None = None
    as_json: bool = False


def run(request: Request) -> int:
    """Print the plan of a run; 1 when it does not fit its card.

    Raises:
        WangenError: nothing is published under that name, or it cannot be read.
    """
    found = make(request)
    print(text.as_json(found) if request.as_json else "\n".join(text.lines(found)))  # noqa: T201
    return int(found.plan.fits is False)


def make(request: Request) -> Planned:
    """The plan of what a request names.

    Raises:
        WangenError: as `run`.
    """
    script = _named_script(request) or _published(request)
    cards = [card_named(request.gpu)] if request.gpu is not None else _cards_for(script.target)
    smallest = min(cards, key=lambda one: one.memory, default=None)
    return plan_script(script, smallest, num_cards=len(cards), here=request.gpu is None)


def _named_script(request: Request) -> Scripted | None:
    """The script that a request names by its path; None where it names a dataset.

    Raises:
        WangenError: it is not there, is none of wangen's, or flags are given that are for a dataset.
    """
    path = Path(request.what)
    if not is_file(path):
        if path.suffix[1:] in QUOTES or (path.name != request.what and not path.is_dir()):
            raise UsageError("there is no such file", where=request.what, cure="name a train script, or a dataset "
                             "by its name alone")  # fmt: skip
        return None
    for flag, value in (("--platform", request.platform), ("--workspace", request.folder)):
        if value is not None:
            raise UsageError(f"{flag} is for a dataset's name, and this is a script", where=request.what,
                             cure="leave it out, or name the dataset")  # fmt: skip
    return read_script(path)


def _published(request: Request) -> Scripted:
    place = workspace.read(request.folder)
    slug = slugify(Path(request.what).name)
    targets = place.targets_of([request.platform] if request.platform else [])
    found = [(target, path) for target in targets if (path := published_script(target, slug))]
    if not found:
        raise WangenError(f"{request.what!r} is not published", where=", ".join(str(one.folder) for one in targets),
                          cure=f"wangen publish {slug}, or name a train script")  # fmt: skip
    target, path = min(found, key=lambda one: not one[0].is_native)
    return read_script(path, target)


def _cards_for(target: Target | None) -> list[Gpu]:
    """The cards of this machine, where the scripts run here and not on its processor alone."""
    if target and (not target.is_native or target.platform.accelerator == "cpu"):
        return []
    return gpus.seen()
