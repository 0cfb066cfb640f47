"""`wangen cache`: what is in a cache folder, and removing it. Needs no torch."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from wangen import profiles
from wangen.generator.errors import UsageError, WangenError, bytes_text, many
from wangen.generator.files import remove
from wangen.generator.manifests import is_manifest
from wangen.generator.steps import CheckCache
from wangen.generator.tasks import supported
from wangen.generator.tomls import read_dataset
from wangen.profiles import Model
from wangen.runtime.cache import KINDS, Entry, Folder, Kind
from wangen.runtime.cache.api import known_kind, remove_all
from wangen.runtime.cache.entries import UnreadableEntryError
from wangen.runtime.cache.index import INDEX
from wangen.runtime.cache.leftovers import is_of_kind, remove_damaged
from wangen.runtime.cache.needed import DatasetNeeds, needed_keys, orphans
from wangen.runtime.needs import listing, recipes_of
from wangen.runtime.samples import Sample, by_cache_folder, suited_samples


def stats(place: Path) -> int:
    """Print counts and bytes by kind and encoder, and the ages of the oldest and the newest entry.

    Args:
        place: a cache folder, or a dataset's TOML or manifest for all of its folders.

    Raises:
        WangenError: there is no such folder, or the TOML cannot be read.
    """
    for folder in folders_of(place):
        click.echo(f"{folder.path}:")
        entries = folder.all_entries
        _show(entries)
        if packs := folder.packs.packs:
            removed = sum(pack.index.removed_bytes for pack in packs)
            rest = f"; {bytes_text(removed)} of removed ones wait for `wangen cache pack`" if removed else ""
            click.echo(f"  {len(folder.packs)} of them in {many(len(packs), 'pack')}{rest}")
        for name, error in folder.damaged.items():
            state = "unreadable" if isinstance(error, UnreadableEntryError) else "corrupt"
            click.echo(f"  {state}: {name}: {error.found}")
        times = [time_s for entry in entries if (time_s := _time_s(entry))]
        if times:
            click.echo(f"  oldest {_date(min(times))}, newest {_date(max(times))}")
    return 0


def clear(place: Path, kind: str | None, *, yes: bool) -> int:
    """Show all entries, or those of one kind, also damaged ones, and remove them when the user agrees.

    Args:
        place: a cache folder, or a dataset's TOML or manifest for all of its folders.
        kind: only these.
        yes: do not ask.

    Raises:
        UsageError: there is no such kind.
        WangenError: there is no such folder, or an entry cannot be removed; or some cannot be read, and stay.
    """
    wanted = known_kind(kind) if kind else None
    folders = folders_of(place)
    damaged = [f"{name}: {error.found}" for folder in folders for name, error in folder.damaged.items()
               if is_of_kind(name, wanted) and not isinstance(error, UnreadableEntryError)
               and not (wanted and name in folder.packs.damaged)]  # fmt: skip
    code = _remove(folders, lambda entry: wanted in (None, entry.kind), yes=yes, damaged=damaged,
                   remove_those=lambda: sum(remove_damaged(folder, wanted) for folder in folders))  # fmt: skip
    if code == 0 and wanted in (None, "clip"):
        for claim in (path for folder in folders for path in folder.path.glob(".wangen-needs-*.clip.json")):
            claim.unlink(missing_ok=True)  # or training would go on asking for a view of every clip
    left = [error for folder in folders for name, error in folder.damaged.items() if is_of_kind(name, wanted)]
    if code == 0 and left:
        lines = listing([f"{error.where}: {error.found}" for error in left])
        raise WangenError("\n".join(["some entries cannot be removed:", *lines]), cure=left[0].cure)
    return code


def prune(dataset_config: Path, *, yes: bool) -> int:
    """Show the entries that no item needs any more, and remove them when the user agrees.

    Kept is what the dataset's items need for any model (of the encoder that its last caching run used), and what any
    other dataset needs that uses the same folders, as long as its TOML is there.

    Args:
        dataset_config: the TOML.
        yes: do not ask.

    Raises:
        WangenError: the dataset cannot be read, or an entry cannot be removed.
    """
    folders = folders_of(dataset_config)
    samples = _all_samples(dataset_config)
    gone = {path: dataset for folder in folders for path, dataset in orphans(folder.path).items()}
    for dataset in dict.fromkeys(gone.values()):
        click.echo(f"its TOML is gone, so it needs nothing any more: {dataset}")
    needed = {
        (folder.path, kind): _Needed(folder, dataset_config, kind, samples, gone)
        for folder in folders for kind in KINDS
    }  # fmt: skip
    return _remove(folders, lambda entry: entry not in needed[entry.folder, entry.kind], yes=yes)


class _Needed:
    """What one folder must keep of one kind."""

    def __init__(
        self, folder: Folder, dataset_config: Path, kind: Kind, samples: Iterable[Sample], gone: Iterable[Path]
    ) -> None:
        needs = DatasetNeeds(folder, dataset_config, kind)
        members = by_cache_folder(list(samples)).get(folder.path, [])
        self._encoder = needs.encoder
        self._others = needed_keys(folder.path, kind, but=[needs.path, *gone])
        self._content_keys = {recipe.content_key for sample in members for recipe in recipes_of(sample, kind)}

    def __contains__(self, entry: Entry) -> bool:
        if entry.key in self._others:
            return True
        return entry.content_key in self._content_keys and self._encoder in (None, entry.encoder)


def _all_samples(dataset_config: Path) -> list[Sample]:
    """The samples as every model cuts them and asks for them: buckets, frame rates, strides and templates differ.

    An item that does not suit a model has none of it.

    Raises:
        WangenError: something cannot be read, or there is no model that the whole dataset suits.
    """
    models: dict[tuple[Any, ...], Model] = {}
    for model in map(profiles.model, supported()):
        strides = model.bucket_step, model.spatial_stride, model.temporal_stride
        models.setdefault((model.fps, *strides, model.prompt), model)
    samples: list[Sample] = []
    refused: list[WangenError] = []
    for model in models.values():
        suited, misfits = suited_samples(CheckCache(dataset_config=dataset_config), model)
        samples += suited
        refused += [misfits] if misfits else []
    if len(refused) == len(models):
        raise refused[0]
    return samples


def _remove(
    folders: Sequence[Folder], chosen: Callable[[Entry], bool], *, yes: bool,
    damaged: Sequence[str] = (), remove_those: Callable[[], int] = lambda: 0,
) -> int:  # fmt: skip
    found = [entry for folder in folders for entry in folder.all_entries if chosen(entry)]
    if not found and not damaged:
        click.echo("there is nothing to remove")
        return 0
    for folder in folders:
        entries = [entry for entry in found if entry.folder == folder.path]
        if entries:
            click.echo(f"{folder.path}:")
            _show(entries)
    for line in (f"damaged, {many(len(damaged), 'entry', 'entries')}:", *listing(damaged)) if damaged else ():
        click.echo(line)
    if not yes and not _agreed(f"remove {many(len(found) + len(damaged), 'entry', 'entries')}?"):
        click.echo("nothing was removed")
        return 1
    number = remove_those() + len(found)  # first: nothing is taken out of a pack that has damage
    remove_all(found)
    for folder in folders:
        with suppress(OSError):  # most of it is gone; it comes back by itself
            remove(folder.path / INDEX)
    click.echo(f"removed {many(number, 'entry', 'entries')}, {bytes_text(sum(entry.num_bytes for entry in found))}")
    return 0


def _agreed(question: str) -> bool:
    """The user's answer.

    Raises:
        UsageError: there is nobody to ask.
    """
    try:
        return click.confirm(question)
    except click.Abort:
        if sys.stdin.isatty():  # Ctrl-C
            raise
        click.echo()
        raise UsageError("there is nobody to ask", cure="give --yes to remove without a question") from None


def folders_of(place: Path) -> list[Folder]:
    """The cache folders that are meant by a folder, or by a dataset's TOML or manifest.

    Raises:
        WangenError: there is no such folder, or the dataset cannot be read.
    """
    if place.is_dir():
        return [Folder(place)]
    if place.suffix.lower() != ".toml" and not is_manifest(place):
        raise UsageError("no folder and no dataset's TOML or manifest", where=str(place),
                         cure="name a cache folder, such as datasets/cats/512_cache, or the TOML")  # fmt: skip
    return [Folder(path) for path in dict.fromkeys(entry.cache_directory for entry in read_dataset(place))]


def _show(entries: Iterable[Entry]) -> None:
    """One line for each kind and encoder."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for entry in entries:
        encoder = entry.encoder
        groups.setdefault((entry.kind, encoder.identity[:8], encoder.dtype), []).append(entry.num_bytes)
    for (kind, identity, dtype), sizes in sorted(groups.items(), key=lambda group: KINDS.index(group[0][0])):
        click.echo(f"  {kind:<26}{len(sizes):>8} {bytes_text(sum(sizes)):>12}   by {identity} in {dtype}")
    if not groups:
        click.echo("  no entries")


def _time_s(entry: Entry) -> float:
    """When it was written, in seconds since 1970; 0 when it is gone."""
    with suppress(OSError):
        return entry.held_by.stat().st_mtime
    return 0.0


def _date(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))
