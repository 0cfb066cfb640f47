"""Whether the dataset that a bundle was published from has changed since, as far as this machine sees it."""

from contextlib import suppress
from pathlib import Path

from wangen.generator import workspace
from wangen.generator.bundle import script_names
from wangen.generator.dataset_settings import DatasetSettings
from wangen.generator.errors import WangenError, unreadable
from wangen.generator.publish.command import origin_of
from wangen.generator.publish.plan import BundlePlan, make_plan, memo_path
from wangen.generator.publish.source import Source, read_source
from wangen.generator.workspace import Workspace


def source_of(place: Workspace, slug: str, settings: DatasetSettings) -> Source | None:
    """What would be published now; None when the dataset is not on this machine.

    Raises:
        WangenError: it is there, and cannot be read.
    """
    if settings.footage:
        return None
    try:
        origin = origin_of(place, slug)
    except WangenError:
        return None
    try:
        origin.stat()  # exists() takes other errors for an absence
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(origin, error) from None
    return read_source(origin, place.profile(settings.model), memo=memo_path(place, slug), keep_memo=False)


def changes(bundle: BundlePlan, slug: str) -> str:
    """How many media and captions publishing would write or remove, and what to type; empty where it would none."""
    lost = sum(name in folder.known.files for folder in bundle.folders for name in folder.new)
    counts = bundle.counts | {"new": bundle.counts["new"] - lost, "same": 0}
    said = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    found = f"the dataset or its settings have changed since it was published ({said})"
    return f"{found}; publish again: wangen publish {slug}" if said else ""


def changes_since(script: Path) -> str:
    """`changes` of the dataset of a published script that lies in its workspace; empty where nobody can know."""
    folder, slug = script.resolve().parent, script.stem.partition("_")[2]
    home = folder.parent.parent
    if not (home / workspace.FILE).is_file():
        return ""
    with suppress(WangenError, OSError):  # of another place, or what publishing would refuse: it says so then
        place = workspace.read(home)
        target, settings = place.target(folder.name), place.dataset(slug)
        is_its = script.name in (name for _, name in script_names(target, slug))
        source = source_of(place, slug, settings) if is_its and target.folder.resolve() == folder else None
        if source is not None:
            (bundle,) = make_plan(place, [target], slug, place.profile(settings.model), source, long_paths=True).bundles
            return changes(bundle, slug)
    return ""
