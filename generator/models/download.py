"""`wangen models download`: fetch what a task needs and this machine lacks, and nothing else."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import click

from wangen import profiles
from wangen.generator.bundle import files_below, is_called, models_folder, place_of
from wangen.generator.errors import UsageError, WangenError, bytes_text, did_you_mean, many
from wangen.generator.headers import index_names
from wangen.generator.lock import busy, hold
from wangen.generator.models import hub
from wangen.generator.models.hub import Remote
from wangen.generator.models.places import (
    INDEX,
    TOKENIZER,
    Held,
    Shelf,
    downloads_called,
    from_hub,
    here,
    known_model,
    models_folders,
    on_this_machine,
)
from wangen.generator.progress import byte_bar
from wangen.profiles import Download, Model, Weights

LOCK = ".wangen-download.lock"


@dataclass(frozen=True)
class Wish:
    """One thing that was asked for and is not there, or may not be.

    Attributes:
        name: a role with its task, `tokenizer` or `file`, as it is said.
        downloads: what it consists of.
        look: says afterwards whether it is found where it is needed; None for a file that was named by itself.
    """

    name: str
    downloads: tuple[Download, ...]
    look: Callable[[Shelf], Held] | None = None


def run(words: Sequence[str], task: str | None, folder: Path | None, dry_run: bool) -> int:
    """Fetch what the words ask for and what is not there.

    Args:
        words: tasks, roles, `tokenizer` or names of files; none: everything the workspace's model needs.
        task: the task of the roles; None: the workspace's model.
        folder: the models folder; None: that of the workspace for this machine, or `models` here.
        dry_run: say what would be fetched.

    Raises:
        WangenError: something cannot be fetched, or a file that is there is in its way. What was fetched stays, and
            what was begun is gone on with by the next run.
    """
    place = here()
    target = on_this_machine(models_folders(folder, place))[0]
    where = models_folder(target)
    if where is None:
        raise UsageError("this host cannot see the models folder", where=target.path(target.roots["models"]),
                         cure="set host_root in wangen.toml, or give --dir")  # fmt: skip
    if where.exists() and not where.is_dir():
        raise WangenError("this is a file, not a models folder", where=str(where), cure="give another --dir")
    shelved = None if folder else place
    wishes = list(_wishes(words, task or (place.model if place else None), Shelf(target, shelved)))
    if not wishes:
        click.echo("everything is there")
        return 0
    for wish in wishes:
        for download in wish.downloads:
            shards = " and its shards" if download.path.endswith(INDEX) else ""
            click.echo(f"wanted: {wish.name}: {download.repo}/{download.path}{shards}")
    _refuse_second(where)
    missing = [pair for wish in wishes for pair in _missing(wish, where)]
    _say_plan(missing, where)
    if dry_run or not missing:
        click.echo("nothing was fetched: this was a dry run" if dry_run else "everything is there")
        return 0
    with hold(where / LOCK):
        missing = [(remote, path) for remote, path in missing if not path.exists()]  # another run may have ended now
        for number, (remote, path) in enumerate(missing, 1):
            _fetch(remote, path, f"{number}/{len(missing)}")
    filled = Shelf(target, shelved)
    for wish in wishes:
        _require_found(wish, filled)
    click.echo("everything is there now")
    return 0


def _wishes(words: Sequence[str], task: str | None, shelf: Shelf) -> Iterator[Wish]:
    """What the words mean, without what is there already."""
    if not words and task is None:
        raise UsageError("what is to be fetched?", cure=f"name a task ({', '.join(profiles.model_names())}), a role "
                         "with --task, a file that has a + in `wangen models list`, or tokenizer")  # fmt: skip
    seen: set[tuple[Download, ...]] = set()
    for word in words or [task or ""]:
        for wish in _wish(word, task, shelf):
            if wish.downloads not in seen:
                seen.add(wish.downloads)
                yield wish


def _wish(word: str, task: str | None, shelf: Shelf) -> Iterator[Wish]:
    role = word.replace("-", "_")
    if word in profiles.model_names():
        model = profiles.model(word)
        for weights in model.weights:
            yield from _role(shelf, model, weights)
        yield from _tokenizer(shelf, model)
    elif role == TOKENIZER:  # without a task the first one's, which is that of all Wan models
        yield from _tokenizer(shelf, known_model(task or profiles.model_names()[0]), whole=True)
    elif role in _roles():
        if task is None:
            raise UsageError(f"{role} of which task?", cure=f"give --task, one of {', '.join(_roles()[role])}")
        model = known_model(task)
        chosen = [weights for weights in model.weights if weights.flag == role]
        if not chosen:
            raise UsageError(f"{task} takes no {role}", cure=f"it takes {', '.join(w.flag for w in model.weights)}")
        yield from _role(shelf, model, chosen[0])
    else:
        yield Wish("file", (_named(word),))


def _role(shelf: Shelf, model: Model, weights: Weights) -> Iterator[Wish]:
    """A role of a model, unless its file is there and whole."""
    held = shelf.look_at(model, weights)
    name = f"{weights.flag} of {model.name}"
    if held.state == "there":
        click.echo(f"there: {name}: {held.path} ({bytes_text(held.num_bytes)})")
        return
    if held.state == "wrong" or (held.state == "broken" and from_hub(weights, held) is None):
        raise WangenError(f"in the place of {name}: {held.words}", where=str(held.path),
                          cure="move it away, then run the same line again")  # fmt: skip
    if not weights.downloads:
        raise WangenError(f"{name} is offered nowhere for download", where=str(held.path),
                          cure=f"put it there, or below the models folder under one of its names: "
                          f"{', '.join(weights.files)}")  # fmt: skip
    download = shelf.to_fetch(weights, held)
    if download is None:
        raise WangenError(f"wangen.toml names a file for {weights.flag} that is not there", where=str(held.path),
                          cure="put it there, or mend that line")  # fmt: skip
    yield Wish(name, (download,), lambda filled: filled.look_at(model, weights))


def _tokenizer(shelf: Shelf, model: Model, *, whole: bool = False) -> Iterator[Wish]:
    """The tokenizer, unless it is found; asked for by name, unless all its files are in the models folder."""

    def look(shelf: Shelf) -> Held:
        (t5,) = (shelf.look_at(model, weights) for weights in model.weights if weights.flag == "t5")
        return shelf.look_for_tokenizer(model, t5)

    folder = models_folder(shelf.target)
    if whole and folder:
        there = all((folder / download.path).is_file() for download in model.tokenizer)
        path: Path | None = folder / Path(model.tokenizer[0].path).parent
    else:
        held = look(shelf)
        there, path = held.state == "there", held.path
    if there:
        click.echo(f"there: {TOKENIZER}: {path}")
    elif not whole and shelf.is_named(TOKENIZER):
        raise WangenError("wangen.toml names a tokenizer that is not there", where=str(path),
                          cure="put it there, or mend that line; it can be fetched with: wangen models download "
                          f"tokenizer --task {model.name}")  # fmt: skip
    else:
        yield Wish(TOKENIZER, model.tokenizer, None if shelf.is_named(TOKENIZER) else look)


def _named(word: str) -> Download:
    """The download of a file that is named by itself."""
    called = downloads_called(word)
    if len(called) == 1:
        return called[0]
    if called:
        cure = f"name one of {', '.join(f'{download.repo}/{download.path}' for download in called)}"
        raise UsageError(f"{word!r} is the name of {len(called)} different files", cure=cure)
    models = map(profiles.model, profiles.model_names())
    files = [download.path for model in models for weights in model.weights for download in weights.downloads]
    names = [*profiles.model_names(), *_roles(), TOKENIZER, *(PurePosixPath(path).name for path in files)]
    cure = did_you_mean(word, names, "name one that has a + in `wangen models list`")
    raise UsageError(f"{word!r} is no task, role or file that can be fetched", cure=cure)


def _roles() -> dict[str, list[str]]:
    """Every role with the tasks that have it."""
    found: dict[str, list[str]] = {}
    for model in map(profiles.model, profiles.model_names()):
        for weights in model.weights:
            found.setdefault(weights.flag, []).append(model.name)
    return found


def _missing(wish: Wish, folder: Path) -> Iterator[tuple[Remote, Path]]:
    """The files of a wish that are not there, as the hub describes them, with their final paths.

    Raises:
        WangenError: the hub does not give one, or another file is in its place.
    """
    for remote, path in _files(wish, folder):
        if not path.exists() and not path.is_symlink():  # a link to a disk that is not there stays as it is
            yield remote, path
            continue
        with byte_bar(path.name, remote.num_bytes) as advance:
            found = hub.differs(path, remote, advance)
        if found:
            raise WangenError(f"this is not the hub's {remote.download.path}: {found}", where=str(path),
                              cure="move it away, then run the same line again")  # fmt: skip
        click.echo(f"there: {path} ({bytes_text(remote.num_bytes)}, compared with the hub's checksum)")


def _files(wish: Wish, folder: Path) -> Iterator[tuple[Remote, Path]]:
    """The files of a wish; an index comes after the shards that it names, so that it is there when they are."""
    for download in wish.downloads:
        path = folder / (download.path if wish.name == TOKENIZER else _place(download, folder))
        remote = hub.look_up(download)
        if path.name.endswith(INDEX):
            for name in _shards(remote):
                shard = replace(download, path=str(PurePosixPath(download.path).with_name(name)))
                yield hub.look_up(shard), path.with_name(name)
        yield remote, path


def _shards(index: Remote) -> list[str]:
    """The names of the shards that an index on the hub names."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, index.name)
        hub.fetch(index, path, lambda _doing, _done: None, click.echo)
        return index_names(path)


def _place(download: Download, folder: Path) -> PurePosixPath:
    """Where a file belongs below the models folder: where it, or one of its shards, is already, in whatever folder."""
    place = place_of(download)
    for name in (str(place), str(place).replace(INDEX, "-*-of-*.safetensors")):
        called = [path for path in files_below(folder) if is_called(path, name)]
        if called and not (folder / place).exists():
            return called[0].with_name(place.name)
    return place


def _say_plan(missing: Sequence[tuple[Remote, Path]], folder: Path) -> None:
    """What is to be fetched from where, and whether there is room for it.

    Raises:
        WangenError: there is not.
    """
    if not missing:
        return
    begun = 0
    for remote, path in missing:
        part = remote.partial(path)
        done = part.stat().st_size if part.is_file() else 0
        begun += done
        words = f", {bytes_text(done)} of it are here" if done else ""
        click.echo(f"to fetch: {remote.download.repo}/{remote.download.path} ({bytes_text(remote.num_bytes)}{words})")
        click.echo(f"      to: {path}")
    needed, free = sum(remote.num_bytes for remote, _ in missing) - begun, hub.free_bytes(folder)
    click.echo(f"{many(len(missing), 'file')}, {bytes_text(needed)} to fetch, {bytes_text(free)} free")
    if needed > free:
        raise WangenError(f"{bytes_text(needed)} are to be fetched, {bytes_text(free)} are free", where=str(folder),
                          cure="free space, or give another --dir")  # fmt: skip


def _refuse_second(folder: Path) -> None:
    """Only one download into a folder at a time."""
    if other := busy(folder / LOCK):
        raise WangenError("another download into this folder is under way", where=other.where, cure=other.cure)


def _fetch(remote: Remote, path: Path, number: str) -> None:
    click.echo(f"{number} {remote.name} ({bytes_text(remote.num_bytes)}) …")
    with byte_bar(f"{number} {remote.name}", remote.num_bytes) as advance:
        hub.fetch(remote, path, advance, click.echo)
    compared = "size and checksum are" if remote.checksum else "size is"
    click.echo(f"{number} there: {path} ({compared} the hub's)")


def _require_found(wish: Wish, filled: Shelf) -> None:
    """What was fetched must be what the steps find now."""
    held = wish.look(filled) if wish.look else None
    if held and held.state != "there":
        raise WangenError(f"{wish.name} was fetched, but another file is found before it: {held.words or held.state}",
                          where=str(held.path), cure="move that one away")  # fmt: skip
