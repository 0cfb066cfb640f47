"""`wangen publish` as its user sees it: what was asked, what is remembered, and what is said."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from wangen.generator import cards, workspace
from wangen.generator.cards import Gpu
from wangen.generator.dataset_settings import DatasetSettings
from wangen.generator.errors import UsageError, WangenError, bytes_text, many, unreadable
from wangen.generator.lock import hold
from wangen.generator.paths import slugify
from wangen.generator.plan import gpus
from wangen.generator.progress import bar
from wangen.generator.publish import plan as publishing
from wangen.generator.publish.advice import preset_advice, prompts_advice
from wangen.generator.publish.alike import same_pictures
from wangen.generator.publish.folder import FolderPlan
from wangen.generator.publish.next_steps import say_next
from wangen.generator.publish.plan import BundlePlan, Plan
from wangen.generator.publish.source import Source, read_source
from wangen.generator.resolutions import parse_resolution, resolution_name
from wangen.generator.target import Target
from wangen.generator.tasks import require_supported
from wangen.generator.workspace import Workspace
from wangen.profiles import Model

_NUM_NAMES = 5
_NUM_KEPT = 20
_NUM_WAITS, _WAIT_S = 30, 0.1


@dataclass(frozen=True, kw_only=True)
class Request:
    """The words of a `wangen publish` command line.

    Attributes:
        name: the dataset.
        folder: the workspace; None: found from here.
        source: folder or jsonl of the dataset; None: as remembered, or `datasets/NAME`.
        footage: folder of long videos on the machine that trains, which its script cuts; None: as remembered.
        platforms: where to; empty for those of the workspace.
        model: model profile; None: as remembered, or the workspace's.
        resolutions: as people write them; empty: as remembered, or the model profile's.
        resize: publish smaller copies; None: as remembered.
        trigger: word for every caption; None: as remembered.
        dry_run: say what would be done and write nothing.
        only_scripts: make the scripts again and touch nothing else.
        fit: choose memory flags that fit a card; False takes the choice back; None leaves it.
        gpu: the card's name; None: this machine's.
        long_paths: Windows can open long paths there.
    """

    name: str
    folder: Path | None = None
    source: Path | None = None
    footage: str | None = None
    platforms: tuple[str, ...] = ()
    model: str | None = None
    resolutions: tuple[str, ...] = ()
    resize: bool | None = None
    trigger: str | None = None
    dry_run: bool = False
    only_scripts: bool = False
    fit: bool | None = None
    gpu: str | None = None
    long_paths: bool = False


def run(request: Request) -> int:
    """Publish a dataset and say what was done.

    Raises:
        WangenError: anything forbids it; nothing was written then.
    """
    if request.gpu is not None and not request.fit:
        raise UsageError(f"--gpu {request.gpu} is for --fit", cure="add --fit, or ask: wangen plan NAME --gpu CARD")
    if request.fit and request.dry_run:
        raise UsageError("--fit looks at what is published, and --dry_run publishes nothing", cure="leave one out")
    place = workspace.read(request.folder)
    # The shell completes `cats` to the folder that it finds.
    named = Path(request.name)
    request = replace(request, name=named.name) if len(named.parts) > 1 and named.is_dir() else request
    slug = slugify(request.name)
    lock = place.folder / publishing.STATE / f"{slug}.lock"
    with hold(None if request.dry_run else lock):  # what is planned must still be so when it is done
        _run(request, place, slug)
    return 0


def _run(request: Request, place: Workspace, slug: str) -> None:
    asked = _cards(request.gpu) if request.fit else []
    choices = _choices(request, place, slug)
    if request.only_scripts and choices:
        raise UsageError(f"--only_scripts leaves media and TOML as they are, which {', '.join(choices)} would change",
                         cure="leave one of them out")  # fmt: skip
    settings = replace(place.dataset(slug), **choices)
    place = replace(place, datasets={**place.datasets, slug: settings})
    model = place.profile(settings.model)
    require_supported(model, "publishing for")
    source = _source(request, place, slug, model)
    targets = place.targets_of(dict.fromkeys(request.platforms))
    plan = publishing.make_plan(place, targets, slug, model, source, only_scripts=request.only_scripts,
                                long_paths=request.long_paths)  # fmt: skip
    _say_source(request, slug, model, settings, source)
    clips = bool(settings.footage) or any(item.media == "video" for item in (source.items if source else ()))
    if clips and settings.resize:
        click.echo("  clips are taken as they are: --resize makes smaller copies of images only")
    pictures = source is not None and not (clips or request.fit)
    for line in preset_advice(place, targets, model, slug, clips=clips, pictures=pictures):
        click.echo(f"  {line}")
    for line in prompts_advice(place, targets, model):
        click.echo(f"  {line}")
    if request.dry_run:
        _say_plan(plan)
        return
    _remember(place, slug, choices)
    with bar("publishing", sum(len(folder.new) + len(folder.changed) for folder in plan.folders)) as advance:
        publishing.carry_out(plan, advance)
    for bundle in plan.bundles:
        _say_bundle(bundle, slug)
    _say_links(plan.folders)
    if request.fit:
        _fit(request, place, targets, model, slug, asked)
    say_next(place, targets, model, slug)


def _source(request: Request, place: Workspace, slug: str, model: Model) -> Source | None:
    """What lies in the dataset; None of footage, and where scripts alone are made.

    Raises:
        WangenError: there is no such dataset, it cannot be read, or something is asked for that footage has not.
    """
    settings = place.dataset(slug)
    if settings.footage:
        _refuse_media_choices(settings)
    if settings.footage or request.only_scripts:
        return None
    origin, memo = origin_of(place, slug), publishing.memo_path(place, slug)
    with bar("reading", None) as advance:
        return read_source(origin, model, memo=memo, keep_memo=not request.dry_run, advance=advance)


def _say_source(request: Request, slug: str, model: Model, settings: DatasetSettings, source: Source | None) -> None:
    """What is published, for what, and what is left out or shares a caption."""
    sizes = " and ".join(map(resolution_name, settings.sizes(model)))
    what = many(len(source.items), "item") if source else "scripts alone"
    if settings.footage and not request.only_scripts:
        what = f"the videos in {settings.footage}, cut by the script's first step,"
    verb = "would be published" if request.dry_run else "is published"
    click.echo(f"{request.name!r} {verb} as {slug}: {what} for {model.title} in {sizes}")
    for line in source.left_out if source else ():
        click.echo(f"  not taken: {line}")
    if source and (alike := same_pictures(source)):
        click.echo(f"  {alike}")
    shared = source.shared if source else ()
    for line in shared[:_NUM_NAMES]:
        click.echo(f"  {line}")
    if len(shared) > _NUM_NAMES:
        click.echo(f"  and {len(shared) - _NUM_NAMES} more share one")


def _cards(card: str | None) -> list[Gpu]:
    """The card of that name; without one those of this machine.

    Raises:
        WangenError: there is none.
    """
    found = gpus.seen() if card is None else [cards.card_named(card)]
    if not found:
        raise WangenError("no GPU is seen here", where="--fit", cure='name the one that trains: --gpu "RTX 4090"')
    return found


def _fit(
    request: Request, place: Workspace, targets: Sequence[Target], model: Model, slug: str, asked: Sequence[Gpu]
) -> None:
    """Choose memory flags for a card, remember them, and make the scripts again with them."""
    from wangen.generator.publish.fit import choose

    fit, words = choose(place, targets, model, slug, asked, here=request.gpu is None)
    settings = place.dataset(slug)
    if fit == settings.fit:
        click.echo(words)
    else:
        place = replace(place, datasets={**place.datasets, slug: replace(settings, fit=fit)})
        plan = publishing.make_plan(place, targets, slug, model, None, only_scripts=True,
                                    long_paths=request.long_paths)  # fmt: skip
        click.echo(words)
        _remember(place, slug, {"fit": fit})  # only what scripts can be made with
        publishing.carry_out(plan)
        for bundle in plan.bundles:
            _say_bundle(bundle, slug)


def _choices(request: Request, place: Workspace, slug: str) -> dict[str, Any]:
    """What the command line says otherwise than `wangen.toml`, as fields of `DatasetSettings`."""
    given: dict[str, Any] = {"model": request.model, "resize": request.resize, "trigger": request.trigger,
                             "footage": request.footage}  # fmt: skip
    trigger = request.trigger or ""
    if not trigger.isprintable() or trigger != trigger.strip():
        raise UsageError(f"{trigger!r} is no trigger word", where="--trigger", cure="give a word, or '' for none")
    if request.resolutions:
        sizes = [parse_resolution(text, "--resolution") for text in request.resolutions]
        given["resolutions"] = tuple(dict.fromkeys(sizes))
    if request.source:
        origin = request.source.absolute()
        inside = origin.is_relative_to(place.folder)
        given["source"] = origin.relative_to(place.folder).as_posix() if inside else str(origin)
    known = place.dataset(slug)
    changed = {key: value for key, value in given.items() if value is not None and value != getattr(known, key)}
    return {**changed, "fit": None} if request.fit is False and known.fit else changed


def _refuse_media_choices(settings: DatasetSettings) -> None:
    """Footage is not seen when it is published, so that nothing can be done with its files and captions.

    Raises:
        UsageError: something is asked for.
    """
    for name, cure in (("source", "keep one of the two; --footage '' takes it back"),
                       ("trigger", "put it into the captions, or into [steps.preprocess] prompt_template"),
                       ("resize", "clips are cut in the size that is published")):  # fmt: skip
        if getattr(settings, name):
            raise UsageError(f"a dataset of footage has no {name}", where=settings.footage, cure=cure)


def _remember(place: Workspace, slug: str, choices: Mapping[str, Any]) -> None:
    """Keep the choices for the next publish, and say so."""
    if not choices:
        return
    plain = dict(choices)
    if "resolutions" in plain:
        plain["resolutions"] = [resolution_name(size) for size in plain["resolutions"]]
    if fit := plain.get("fit"):
        plain["fit"] = fit.as_toml()
    lock = place.folder / publishing.STATE / f"{workspace.FILE}.lock"
    with ExitStack() as stack:
        for left in reversed(range(_NUM_WAITS)):  # the publish of another dataset may write it just now
            try:
                stack.enter_context(hold(lock))
                break
            except WangenError:
                if not left:
                    raise
                time.sleep(_WAIT_S)
        workspace.remember(place.folder, slug, plain)
    words = ", ".join(f"no {key}" if value is None else f"{key} = {value}" for key, value in plain.items())
    click.echo(f"  remembered in {workspace.FILE}, [dataset.{slug}]: {words}")


def origin_of(place: Workspace, slug: str) -> Path:
    """Where a dataset comes from: its `source`, or its folder in the workspace, whatever the spelling of its name.

    Raises:
        WangenError: there is no such folder, or several would be published under one slug.
    """
    if source := place.dataset(slug).source:
        return place.folder / source
    folder = place.folder / "datasets"
    others: dict[str, list[Path]] = {}
    for path in _folders_in(folder):
        others.setdefault(_slug(path.name), []).append(path)
    found = others.get(slug, [])
    if len(found) > 1:
        raise WangenError(f"{' and '.join(path.name for path in found)} would both be published as {slug}",
                          where=str(folder), cure="rename one, or give --source FOLDER")  # fmt: skip
    if found:
        return found[0]
    near = [others[other][0].name for other in get_close_matches(slug, others, n=3)]
    near_words = f"did you mean {' or '.join(near)}? Else " if near else ""
    raise WangenError("there is no such dataset", where=str(folder / slug),
                      cure=f"{near_words}put the media there, or give --source FOLDER")  # fmt: skip


def _folders_in(folder: Path) -> list[Path]:
    """The folders in one, by name; none where it is not there.

    Raises:
        WangenError: it cannot be listed.
    """
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder, error) from None


def _slug(name: str) -> str:
    try:
        return slugify(name)
    except WangenError:
        return ""


def _say_bundle(bundle: BundlePlan, slug: str) -> None:
    """What publishing did for one target."""
    counts = ", ".join(f"{number} {what}" for what, number in bundle.counts.items() if number)
    own = [text for text in bundle.texts if text.path.parent == bundle.target.folder]
    scripts = ", ".join(f"{text.path.name} changed" if text.state == "changed" else text.path.name for text in own)
    files = f"{counts} files; " if counts else ""
    click.echo(f"  {bundle.target.platform.name:8} {bundle.target.folder}  ({files}{scripts})")
    _say_kept(bundle, slug)


def _say_kept(bundle: BundlePlan, slug: str) -> None:
    """What the user has to know of one target beside the counts."""
    for text in bundle.texts:
        name = text.path.relative_to(bundle.target.folder).as_posix()
        if text.state == "kept":
            for line in text.broken:
                _hint(f"{name}: this line sets no knob (letters, digits and . _ , + - only): {line}")
            if text.stuck:
                cure = f"move {text.target.name} away to see the new text"
                _hint(f"{name} and {text.target.name} were edited by hand and stay; {cure}")
            else:
                what = "picture" if text.shared else "text"
                _hint(f"{name} was edited by hand and stays; the new {what} is {text.target.name}")
        elif text.knobs:
            values = ", ".join(f"{knob}={mine} (published: {ours})" for knob, (mine, ours) in text.knobs.items())
            _hint(f"{name} keeps your knobs: {values}")
    kept = [(folder, name) for folder in bundle.folders for name in folder.kept]
    for folder, name in kept[:_NUM_KEPT]:
        gone = "it is not in the dataset any more; remove it, or put its caption beside it"
        then = "remove it to have it published again" if name in folder.wanted else gone
        _hint(f"{folder.folder / name} was changed in the bundle and stays; {then}")
    if len(kept) > _NUM_KEPT:
        _hint(f"and {len(kept) - _NUM_KEPT} more files that were changed in the bundle")
    for name in bundle.left:
        command = f"wangen clean {slug} --bundle --caches --resolution {name}"
        _hint(f"{name}/ of an earlier publish stays; remove it with: {command}")
    for line in bundle.long_paths[:_NUM_NAMES]:
        _hint(f"may be too long for Windows, {line}")
    if len(bundle.long_paths) > _NUM_NAMES:
        _hint(f"and {len(bundle.long_paths) - _NUM_NAMES} more such paths: keep the folder it is copied to short")


def _hint(text: str) -> None:
    click.echo(f"           {text}")


def _say_plan(plan: Plan) -> None:
    """What a publish would do, with sizes."""
    for bundle in plan.bundles:
        click.echo(f"  {bundle.target.platform.name:8} {bundle.target.folder}")
        for state in ("new", "changed", "same", "kept"):
            texts = [text for text in bundle.texts if text.state == state]
            sizes = [len(text.data) for text in texts]
            _say_names(f"scripts and TOML {state}", [text.path.name for text in texts], sizes)
        for folder in bundle.folders:
            _say_folder(folder)
        _say_kept(bundle, plan.slug)
    click.echo("nothing was written: this was a dry run")


def _say_folder(folder: FolderPlan) -> None:
    name = folder.folder.name
    for what, names in (("new", folder.new), ("changed", folder.changed)):
        _say_names(f"{name}/ {what}", names, [folder.wanted[name].num_bytes for name in names])
    sizes = [(folder.folder / name).lstat().st_size for name in folder.gone]
    _say_names(f"{name}/ removed", folder.gone, sizes)
    _say_names(f"{name}/ kept as changed by hand", folder.kept, [0] * len(folder.kept))
    _hint(f"{name}/ same: {folder.num_same} files")


def _say_names(what: str, names: Sequence[str], sizes: Iterable[int]) -> None:
    if names:
        more = ", …" if len(names) > _NUM_NAMES else ""
        _hint(f"{what}: {len(names)} ({bytes_text(sum(sizes))}): {', '.join(sorted(names)[:_NUM_NAMES])}{more}")


def _say_links(folders: Iterable[FolderPlan]) -> None:
    """Who draws into a published image may draw into the original: say it when the first links are made."""
    if any(
        folder.wanted[name].text is None and folder.wanted[name].origin.samefile(folder.folder / name)
        for folder in folders
        for name in folder.new
    ):
        click.echo("  media are links to the originals, captions copies: edit the originals, then publish again")
