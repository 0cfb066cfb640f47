"""Items -> the published layout: media, captions, caches, TOML files and scripts, for each target.

Everything is planned first: what is wrong is listed at once, before anything is written. Then media with new names are
added, all that replaces something is staged beside its place and renamed in one go, and what is needed no longer is
removed, so that an interrupted publish leaves the old state or the new one. Originals stay as they are.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from wangen.generator.dataset import Problem
from wangen.generator.dataset_settings import DatasetSettings
from wangen.generator.errors import UsageError, WangenError, many
from wangen.generator.files import unwritable
from wangen.generator.lock import busy_run
from wangen.generator.publish import deploy, layout
from wangen.generator.publish.folder import FolderPlan, make_folder_plan
from wangen.generator.publish.source import Advance, Source
from wangen.generator.publish.texts import (
    Text,
    prompts_texts,
    script_texts,
    setup_texts,
    toml_file,
    toml_text,
    wheel_text,
)
from wangen.generator.resolutions import resolution_name
from wangen.generator.setup.wheel import wheel_bytes
from wangen.generator.target import Target
from wangen.generator.workspace import Workspace, require_writable
from wangen.profiles import Model

STATE = ".wangen"
"""The folder of a workspace where publishing keeps what it remembers."""


@dataclass
class BundlePlan:
    """What publishing does for one target.

    Attributes:
        target: where.
        texts: its scripts and TOML files.
        folders: its media folders, one per resolution; targets at one root share them.
        empty: folders that it needs.
        left: names of resolutions that were published earlier and are not asked for any more.
        long_paths: paths that are, or may become, too long for Windows, a line each.
    """

    target: Target
    texts: list[Text]
    folders: list[FolderPlan] = field(default_factory=list)
    empty: list[Path] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    long_paths: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """How many media and captions are `new`, `changed`, `same` and `removed`."""
        return {
            "new": sum(len(folder.new) for folder in self.folders),
            "changed": sum(len(folder.changed) for folder in self.folders),
            "same": sum(folder.num_same for folder in self.folders),
            "removed": sum(len(folder.gone) for folder in self.folders),
        }


@dataclass(frozen=True)
class Plan:
    """A publish that can be carried out.

    Attributes:
        slug: the dataset.
        bundles: one for each target.
        wheels: what the setup scripts install; targets at one root share it.
    """

    slug: str
    bundles: list[BundlePlan]
    wheels: list[Text]

    @property
    def folders(self) -> list[FolderPlan]:
        """The media folders of all targets, each once."""
        return list({folder.folder: folder for bundle in self.bundles for folder in bundle.folders}.values())

    @property
    def texts(self) -> list[Text]:
        """The scripts and TOML files of all targets, and what they share, each once."""
        texts = [*(text for bundle in self.bundles for text in bundle.texts), *self.wheels]
        return list({text.path: text for text in texts}.values())


def memo_path(workspace: Workspace, slug: str) -> Path:
    """Where the facts of a dataset's media are remembered."""
    return workspace.folder / STATE / f"{slug}.media.json"


def make_plan(
    workspace: Workspace,
    targets: Sequence[Target],
    slug: str,
    model: Model,
    source: Source | None,
    *,
    only_scripts: bool = False,
    long_paths: bool = False,
) -> Plan:
    """Compare every target with what it shall hold; nothing is written.

    Args:
        workspace: has the defaults of a run, and how the dataset is published.
        targets: where to publish.
        slug: the dataset.
        model: what is trained.
        source: what is published; None where it is footage, or not on this machine: no media then, and a TOML for
            footage alone.
        only_scripts: the TOML stays as it is, too.
        long_paths: Windows can open long paths there.

    Raises:
        WangenError: a name, path or file forbids publishing; the message lists everything at once.
    """
    shared: dict[Path, FolderPlan] = {}
    makes_toml = source is not None or (bool(workspace.dataset(slug).footage) and not only_scripts)
    bundles = [_plan_bundle(workspace, target, slug, model, source, shared, makes_toml) for target in targets]
    _refuse_doubles(bundles)
    content = wheel_bytes()
    wheels = {text.path: text for text in (wheel_text(target, content) for target in targets)}
    plan = Plan(slug, bundles, list(wheels.values()))
    problems = [
        *(source.problems if source else ()),
        *(problem for folder in plan.folders for problem in folder.problems),
    ]
    for bundle in bundles:
        problems += _problems(bundle, slug, long_paths)
    if problems:
        raise _refusal(problems, str(source.origin if source else workspace.folder))
    return plan


def _plan_bundle(
    workspace: Workspace,
    target: Target,
    slug: str,
    model: Model,
    source: Source | None,
    shared: dict[Path, FolderPlan],
    makes_toml: bool,
) -> BundlePlan:
    """What publishing does for one target; `shared` holds the media folders of those before, and gets its own."""
    settings = workspace.dataset(slug)
    texts = [*script_texts(workspace, target, model, slug), *setup_texts(target)]
    texts += prompts_texts(workspace, target, model, slug)
    bundle = BundlePlan(target, texts)
    if makes_toml:
        texts.append(toml_text(target, model, slug, source.items if source else (), settings))
        _plan_folders(bundle, slug, model, source, settings, shared)
    elif not toml_file(target, slug).is_file():
        raise WangenError(f"{slug} is not published for {target.platform.name} yet", where=str(target.folder),
                          cure=f"wangen publish {slug}")  # fmt: skip
    return bundle


def _refusal(problems: Iterable[Problem], where: str) -> WangenError:
    """One error that lists everything that forbids publishing."""
    lines = list(dict.fromkeys(map(str, problems)))
    return WangenError(
        "\n".join([f"{many(len(lines), 'problem')}; nothing was published", *(f"  - {line}" for line in lines)]),
        where=where,
    )


def _plan_folders(
    bundle: BundlePlan,
    slug: str,
    model: Model,
    source: Source | None,
    settings: DatasetSettings,
    shared: dict[Path, FolderPlan],
) -> None:
    """Add the folders of a dataset to a bundle's plan; `shared` holds those of the targets before."""
    target, sizes = bundle.target, settings.sizes(model)
    for size in sizes:
        bundle.empty.append(layout.cache_folder(target, slug, size))
        names: Collection[str] = ()  # of footage the entries of the cache are the longest
        if source:
            folder = layout.media_folder(target, slug, size)
            key = folder.resolve()
            if key not in shared:
                shared[key] = make_folder_plan(folder, source, model, settings, size)
            bundle.folders.append(shared[key])
            names = shared[key].wanted
        bundle.long_paths += layout.long_paths(target, slug, resolution_name(size), names)
    for name, beside in (source.beside if source else {}).items():
        folder = layout.beside_folder(target, slug, name)
        key = folder.resolve()
        if key not in shared:  # as they are: the text encoder looks at control images at sizes of its own
            plain = replace(settings, resize=False, trigger="")
            shared[key] = make_folder_plan(folder, beside, model, plain, sizes[0])
        bundle.folders.append(shared[key])
        bundle.long_paths += layout.long_paths(target, slug, name, shared[key].wanted)
    bundle.empty += [layout.output_folder(target, slug), layout.reach(target, target.roots["logs"])]
    used = {resolution_name(size) for size in sizes}
    for text in bundle.texts:
        if text.state == "kept" and text.path.suffix == ".toml":  # it may name other folders
            used |= set(re.split(r"[\\/\"'\s]+", text.path.read_text(encoding="utf-8", errors="replace")))
    bundle.left = [name for name in layout.published_resolutions(target, slug) if name not in used]


def _refuse_doubles(bundles: Iterable[BundlePlan]) -> None:
    """Two targets at one place may share media, but not a script or a TOML file."""
    owners: dict[Path, str] = {}
    for bundle in bundles:
        for text in (text for text in bundle.texts if not text.shared):
            name = bundle.target.platform.name
            other = owners.setdefault(text.path.resolve(), name)
            if other != name:
                raise UsageError(
                    f"{other} and {name} would both write {text.path.name}",
                    where=str(text.path.parent),
                    cure="give them different roots in wangen.toml, or publish one with --platform",
                )


def _problems(bundle: BundlePlan, slug: str, long_paths: bool) -> list[Problem]:
    """What forbids publishing to this target."""
    target = bundle.target
    if target.root and not target.folder.exists() and not target.folder.parent.exists():
        cure = f"connect its drive, or make the folder: {target.folder}"
        return [Problem(target.folder, f"the root of {target.platform.name} is not there, nor the folder above", cure)]
    problems = layout.name_problems(target, {name for folder in bundle.folders for name in folder.wanted})
    folders = [target.folder, *(folder.folder for folder in bundle.folders), *bundle.empty]
    reasons = dict.fromkeys(filter(None, map(unwritable, folders)))
    problems += [Problem(target.folder, reason, "choose another or fix the rights") for reason in reasons]
    if layout.is_fixed(target) and not long_paths:
        cure = "take a shorter root, rename it, or set LongPathsEnabled on that machine and give --long_paths"
        where = Path(target.platform.name)
        problems += [Problem(where, f"too long for Windows, {line}", cure) for line in bundle.long_paths]
    if any(text.state == "changed" and not text.shared for text in bundle.texts):
        running = busy_run(layout.output_folder(target, slug))
        if running:
            found = f"{running.found}, and its scripts would change under it"
            problems.append(Problem(Path(running.where), found, running.cure))
    return problems


def carry_out(plan: Plan, advance: Advance = lambda _: None) -> None:
    """Publish.

    Args:
        plan: from `make_plan`.
        advance: told of each media file and caption that is written.

    Raises:
        WangenError: the disk refused, or another publish of this dataset is under way.
    """
    for folder in _folders(plan):
        require_writable(folder)
    with layout.held((bundle.target for bundle in plan.bundles), plan.slug):
        _remove_litter(plan)
        try:
            _write(plan, advance)
        except OSError as error:
            raise WangenError(f"cannot publish: {error.strerror or error}", where=str(error.filename or ""),
                              cure="free space or fix the rights, then publish again") from None  # fmt: skip
        finally:
            _remove_litter(plan)


def _folders(plan: Plan) -> list[Path]:
    """Every folder that publishing writes into, or makes and leaves empty."""
    found = [bundle.target.folder for bundle in plan.bundles]
    found += [folder.folder for folder in plan.folders]
    found += [folder for bundle in plan.bundles for folder in bundle.empty]
    return list(dict.fromkeys([*found, *(text.path.parent for text in plan.texts)]))


def _remove_litter(plan: Plan) -> None:
    """Remove temporary files, but not those of another dataset that is published just now."""
    for media in plan.folders:
        deploy.remove_litter(media.folder)
    for folder in dict.fromkeys(text.path.parent for text in plan.texts):
        deploy.remove_litter(folder, deploy.prefix(plan.slug))


def _write(plan: Plan, advance: Advance) -> None:
    """Every file in the order that an interruption harms least: see the head of this module."""
    staged = []
    beginnings = []
    for folder in plan.folders:
        changed = deploy.stage_changed(folder, advance)
        staged += changed
        beginnings.append(deploy.announce(folder, changed))
    deploy.commit([beginning for beginning in beginnings if beginning])
    begin = deploy.prefix(plan.slug)
    ready = False
    try:
        for folder in plan.folders:
            deploy.place_new(folder, advance)
        staged += [deploy.stage(text.target, [text.data], text.mode, begin) for text in plan.texts if text.data]
        ready = True
    finally:
        if not ready:
            for folder in plan.folders:
                deploy.take_back(folder)
    deploy.commit(staged)
    ends = [deploy.finish(folder) for folder in plan.folders]
    deploy.commit([end for end in ends if end])
