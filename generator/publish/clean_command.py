"""`wangen clean` as its user sees it: what is there, and what was removed."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

import click

from wangen.generator import workspace
from wangen.generator.errors import UsageError, WangenError, bytes_text
from wangen.generator.files import remove
from wangen.generator.lock import busy_run, hold
from wangen.generator.paths import slugify
from wangen.generator.publish import clean, layout
from wangen.generator.publish.inventory import PARTS, Inventory, Part
from wangen.generator.publish.plan import STATE, memo_path
from wangen.generator.publish.texts import toml_file
from wangen.generator.resolutions import parse_resolution, resolution_name
from wangen.generator.target import Target
from wangen.generator.workspace import Workspace

_NUM_KEPT = 20


def run(
    name: str, folder: Path | None, platforms: Sequence[str], resolutions: Sequence[str], parts: Sequence[Part]
) -> int:
    """Show what wangen wrote for a dataset, or remove the parts that are named.

    Args:
        name: the dataset.
        folder: the workspace; None: found from here.
        platforms: where; empty for all that this host can see.
        resolutions: only media and caches of these; empty for everything.
        parts: what to remove; empty: show only.

    Raises:
        WangenError: there is nothing of this dataset, a run is under way, or a file cannot be removed.
    """
    place = workspace.read(folder)
    slug = slugify(name)
    sizes = [resolution_name(parse_resolution(text, "--resolution")) for text in resolutions]
    targets = _targets(place, platforms)
    found = clean.survey(targets, slug, sizes)
    if all(inventory.empty for inventory in found):
        raise _unknown(place, targets, slug)
    if not parts:
        for inventory in found:
            _show(inventory)
        flags = " ".join(f"--{part}" for part in PARTS)
        click.echo(f"nothing was removed; remove what you name with: wangen clean {slug} {flags}")
        return 0
    with hold(place.folder / STATE / f"{slug}.lock"), layout.held(targets, slug):
        for target in targets:
            running = busy_run(layout.output_folder(target, slug))
            if running:
                raise running
        found = clean.survey(targets, slug, sizes)  # a publish may just have ended
        for inventory in found:
            _remove(inventory, parts)
        if "bundle" in parts and not platforms and not sizes:
            remove(memo_path(place, slug))
    for inventory in found:
        clean.remove_empty_folders(inventory, parts)
    if "bundle" in parts:
        _say_publish(targets, slug, platforms, sizes)
    return 0


def _targets(place: Workspace, platforms: Sequence[str]) -> list[Target]:
    """The targets that were named, or all that this host can see."""
    if platforms:
        return [place.target(name) for name in dict.fromkeys(platforms)]
    found = []
    for name in place.platforms:
        try:
            found.append(place.target(name))
        except UsageError as error:
            click.echo(f"  {name:8} left out: {error.found}")
    return found


def _unknown(place: Workspace, targets: Sequence[Target], slug: str) -> WangenError:
    known = sorted(set().union(*map(clean.known_slugs, targets)))
    near = get_close_matches(slug, known, n=3)
    words = f"did you mean {' or '.join(near)}?" if near else f"known are: {', '.join(known) or 'none'}"
    return WangenError(f"wangen wrote nothing for {slug!r}", where=str(place.folder), cure=words)


def _show(inventory: Inventory) -> None:
    click.echo(f"  {inventory.target.platform.name:8} {inventory.target.folder}")
    for part, words in PARTS.items():
        files = inventory.files[part]
        size = bytes_text(clean.total_bytes(files))
        click.echo(f"           {part:12} {len(files):6} files  {size:>10}  {words}")
    _say_kept(inventory, list(PARTS))


def _say_kept(inventory: Inventory, parts: Sequence[Part]) -> None:
    kept = [entry for part in parts for entry in inventory.kept[part]]
    top = inventory.target.folder
    for path, why in kept[:_NUM_KEPT]:
        name = path.relative_to(top) if path.is_relative_to(top) else path
        click.echo(f"           stays: {name.as_posix()} ({why})")
    if len(kept) > _NUM_KEPT:
        click.echo(f"           stay: {len(kept) - _NUM_KEPT} more files")


def _remove(inventory: Inventory, parts: Sequence[Part]) -> None:
    sizes = {part: bytes_text(clean.total_bytes(inventory.files[part])) for part in parts}
    click.echo(f"  {inventory.target.platform.name:8} {inventory.target.folder}")
    for part in parts:
        number = clean.clean(inventory, part)
        click.echo(f"           {part:12} {number:6} files removed  {sizes[part]:>10}")
    _say_kept(inventory, parts)


def _say_publish(targets: Iterable[Target], slug: str, platforms: Sequence[str], removed: Sequence[str]) -> None:
    """TOML files and scripts may name a resolution whose media were just removed: the next run would fail."""
    named, left = set(), set()
    for target in targets:
        path = toml_file(target, slug)
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        named |= {name for name in removed if f'/{name}"' in text}
        left |= {name for name in layout.published_resolutions(target, slug) if f'/{name}"' in text} - {*removed}
    if named:
        words = [f"--resolution {name}" for name in sorted(left)] + [f"--platform {name}" for name in platforms]
        click.echo(f"the scripts still name {' and '.join(sorted(named))}; publish again: "
                   + " ".join(["wangen publish", slug, *words]))  # fmt: skip
