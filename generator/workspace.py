"""The workspace: one folder with `wangen.toml` and `datasets/`, and the places it publishes to.

`wangen.toml` says which platforms to publish for, their roots as that machine writes them, and the defaults of a run.
Until a root is set, a platform is published to `published/<platform>/` as a bundle that can be moved as it is.
"""

import os
import stat
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from wangen import profiles
from wangen.generator import platforms, tomls
from wangen.generator.dataset_settings import DatasetSettings, read_settings
from wangen.generator.errors import UsageError, WangenError, one_of
from wangen.generator.files import write_text, write_whole
from wangen.generator.paths import PathError, new_folder_problem, translate
from wangen.generator.steps import Train
from wangen.generator.target import Target, from_here, machine_of
from wangen.generator.tasks import supported
from wangen.generator.toml_values import frames, sizes, whole_number

FILE = "wangen.toml"
DEFAULT_MODEL = "t2v-1.3B"
DEFAULT_PLATFORMS = ("linux", "windows", "wsl")
ROOTS = {"models": "models", "datasets": "files/datasets", "outputs": "outputs", "logs": "logs"}
"""Folders below the root, and what they are called unless `wangen.toml` says otherwise."""

_KEYS = {"model", "resolution", "num_frames", "platforms", "platform", "report", "steps", "dataset"}

_TEMPLATE = """\
# The settings of this wangen workspace. Lines that begin with # are examples; take the # away to use one.

model = "{model}"            # wangen publish --model NAME chooses another: {models}
# resolution = [832, 480]    # bucket area as [width, height]; the default is the model profile's
# num_frames = 81            # clip length in frames at the model's rate, 4n+1; the default is the model profile's
platforms = [{platforms}]
# All platforms: {all_platforms}; yours go into profiles/NAME.toml
# report = false             # scripts end with the training, without the page of the run

# Where each platform's files live, as that machine writes the path. Without a root the bundle goes to
# published/<platform>/ here; it can be moved or copied to another machine as it is.
{sections}
# Settings of a run, by step; every flag of `wangen STEP --help` can stand here.
[steps.train]
# learning_rate = 1e-4
# network_dim = 16
# max_train_epochs = 35
# vram = "12"                # gigabytes of the card: 8, 12, 16 or 24 puts the model's preset into the scripts, "auto"
                             # leaves it to the machine that trains
# sample_prompts = "prompts.txt"    # a file in this folder, .txt or .toml; it is published with the scripts
# sample_every_n_epochs = 5
# validation_items = 8       # held out: the page of the run shows their loss
# With a table [steps.generate] (prompt) or [steps.evaluate] (needs validation_items) these steps follow in the scripts.

# How one dataset is published, by its slug; the options of wangen publish are remembered here.
[dataset.cats]
# trigger = "ohwx cat"       # put in front of every caption
# resolutions = ["512", "832x480"]
# resize = true              # publish smaller copies of the images
# wangen publish cats --fit writes here which memory flags fit the card
# source = "photos/cats"     # also: model, batch_size, num_repeats, is_reg
# footage = "/data/films"    # long videos on the machine that trains, instead: its script cuts them into clips first
"""

_SECTION = """
[platform.{name}]
# root = '{root}'    # with a root, all paths are absolute
# host_root = '{host_root}'    # how this computer reaches that root
# models = '{models}'    # also: datasets, outputs, logs
# vae = 'Wan2.1_VAE.pth'    # a file in the models folder, where the usual names do not fit; also: t5, dit
# venv = 'venv'    # the Python environment: a folder beside the scripts, or an absolute path of that machine
"""


@dataclass(frozen=True)
class Workspace:
    """A workspace as its `wangen.toml` describes it.

    Attributes:
        folder: where it lives.
        model: name of the default model profile.
        resolution: bucket area as (width, height) in pixels, where it differs from the model profile's.
        num_frames: clip length in frames, where it differs from the model profile's.
        platforms: names of the platforms to publish for.
        known_platforms: every platform profile by name, the user's among them.
        sections: platform -> what `wangen.toml` says of it, already checked.
        steps: step -> flag -> value: the user's defaults, already checked against the table.
        datasets: slug -> how that dataset is published.
        report: scripts end with the page of the run.
    """

    folder: Path
    model: str
    resolution: tuple[int, int] | None
    num_frames: int | None
    platforms: tuple[str, ...]
    known_platforms: Mapping[str, profiles.Platform]
    sections: Mapping[str, Mapping[str, str]]
    steps: Mapping[str, Mapping[str, Any]]
    datasets: Mapping[str, DatasetSettings]
    report: bool = True

    def dataset(self, slug: str) -> DatasetSettings:
        """How a dataset is published: its section `[dataset.SLUG]`, or the defaults."""
        return self.datasets.get(slug, DatasetSettings())

    def fitted(self, slug: str) -> "Workspace":
        """The workspace with the memory flags that `publish --fit` chose for a dataset, below those of `[steps.train]`.

        They stand in place of what `vram` says there.
        """
        fit = self.dataset(slug).fit
        if not fit:
            return self
        told = {name: value for name, value in self.steps.get(Train.command, {}).items() if name != "vram"}
        return replace(self, steps={**self.steps, Train.command: {**fit.flags, **told}})

    def profile(self, name: str | None = None) -> profiles.Model:
        """The model profile of that name (default: the workspace's), with the workspace's resolution and clip length.

        Raises:
            UsageError: there is no such model.
        """
        chosen = name or self.model
        if chosen not in profiles.model_names():
            raise UsageError(f"there is no model {chosen!r}", cure=one_of(str(chosen), supported()))
        model = profiles.model(chosen)
        makes_clips = model.num_frames > 1
        frames = self.num_frames if self.num_frames and makes_clips else model.num_frames
        return replace(model, resolution=self.resolution or model.resolution, num_frames=frames)

    @property
    def targets(self) -> tuple[Target, ...]:
        """The platforms to publish for. Raises UsageError when this host cannot see the root of one."""
        return self.targets_of(self.platforms)

    def targets_of(self, names: Collection[str]) -> tuple[Target, ...]:
        """The platforms of these names, or where none is named those to publish for. Raises as `target`."""
        return tuple(self.target(name) for name in names or self.platforms)

    def target(self, name: str) -> Target:
        """The target of that platform, listed in `platforms` or not.

        Raises:
            UsageError: there is no such platform, or this host cannot see its root.
        """
        if name not in self.known_platforms:
            raise UsageError(f"there is no platform {name!r}", cure=one_of(name, self.known_platforms, cutoff=0.4))
        platform, section = self.known_platforms[name], self.sections.get(name, {})
        return Target(
            platform=platform,
            root=section.get("root"),
            folder=self._host_root(platform, section),
            roots={key: section.get(key, default) for key, default in ROOTS.items()},
            venv=(*([section["venv"]] if "venv" in section else []), *platform.venv),
            weights={role: section[role] for role in profiles.WEIGHT_ROLES if role in section},
            machine=machine_of(platform.kind, section),
        )

    def _host_root(self, platform: profiles.Platform, section: Mapping[str, str]) -> Path:
        where = f"{self.folder / FILE}, [platform.{platform.name}]"
        if "host_root" in section:
            path = Path(section["host_root"]).expanduser()
            if not path.is_absolute():
                raise UsageError(f"host_root is no absolute path of this computer: {path}", where=where,
                                 cure="write it as this computer sees it")  # fmt: skip
            return path
        if "root" not in section:
            return self.folder / "published" / platform.name
        seen = from_here(section["root"], machine_of(platform.kind, section), platform.kind)
        if seen is None:
            raise UsageError(f"this host cannot see {section['root']}", where=where,
                             cure="set host_root to how it is reached from here")  # fmt: skip
        return seen


def init(folder: Path, model: str = DEFAULT_MODEL) -> Path:
    """Make a workspace: `wangen.toml` and `datasets/`. An existing one stays as it is.

    Returns:
        The path of `wangen.toml`.

    Raises:
        WangenError: the folder cannot be made or written, or Windows cannot hold its name.
    """
    if wrong := new_folder_problem(folder):
        raise WangenError(wrong, where=str(folder), cure="give another name: its scripts are for Windows, too")
    require_writable(folder)
    require_writable(folder / "datasets")
    path = folder / FILE
    if not path.exists():
        text = _TEMPLATE.format(
            model=model,
            models=", ".join(supported()),
            platforms=", ".join(f'"{name}"' for name in DEFAULT_PLATFORMS),
            all_platforms=", ".join(profiles.platform_names()),
            sections="".join(_example(name) for name in DEFAULT_PLATFORMS),
        )
        write_text(path.resolve(), text)
    return path


def find(start: Path) -> Path:
    """The workspace folder at or above `start`.

    Raises:
        UsageError: there is none.
    """
    for folder in (start.absolute(), *start.absolute().parents):
        if (folder / FILE).is_file():
            return folder
    raise UsageError(f"no {FILE} here or above", where=str(start), cure="make a workspace with: wangen init")


def read(folder: Path | None) -> Workspace:
    """The workspace of a folder; None: the one at or above the working folder.

    Raises:
        WangenError: no `wangen.toml`, an unknown key, a wrong value.
    """
    folder = (folder or find(Path())).absolute()
    path = folder / FILE
    if not path.is_file():
        raise UsageError(f"no {FILE} here", where=str(folder), cure=f"make a workspace with: wangen init {folder}")
    values = tomls.load(path)
    tomls.refuse_unknown(values, _KEYS, str(path))
    known_platforms = platforms.load(folder)
    sections = _table(values, "platform", path)
    tomls.refuse_unknown(sections, set(known_platforms), f"{path}, [platform.…]")
    names = values.get("platforms", list(DEFAULT_PLATFORMS))
    if not isinstance(names, list) or not names:
        raise UsageError(f"platforms must be a list of names, got {names!r}", where=str(path),
                         cure='for example platforms = ["linux"]')  # fmt: skip
    for what, known, offered, given in (
        ("model", profiles.model_names(), supported(), [values.get("model", DEFAULT_MODEL)]),
        ("platform", known_platforms, known_platforms, names),
    ):
        if unknown := [name for name in given if name not in known]:
            cure = f"one of {', '.join(offered)}"
            raise UsageError(f"there is no {what} {unknown[0]!r}", where=str(path), cure=cure)
    if not isinstance(values.get("report", True), bool):
        raise UsageError(f"report must be true or false, got {values['report']!r}", where=str(path))
    return Workspace(
        folder=folder,
        model=values.get("model", DEFAULT_MODEL),
        resolution=sizes("resolution", values["resolution"], str(path)) if "resolution" in values else None,
        num_frames=_num_frames(values["num_frames"], str(path)) if "num_frames" in values else None,
        platforms=tuple(dict.fromkeys(names)),
        known_platforms=known_platforms,
        sections={name: _section(sections[name], known_platforms[name], path) for name in sections},
        steps=platforms.step_values(_table(values, "steps", path), f"{path}, [steps."),
        datasets={name: read_settings(table, name, path) for name, table in _table(values, "dataset", path).items()},
        report=values.get("report", True),
    )


def remember(folder: Path, slug: str, choices: Mapping[str, Any]) -> None:
    """Write choices of a publish into `[dataset.SLUG]` of `wangen.toml`, where the next publish finds them.

    The rest of the file stays as the user wrote it: a new section goes to its end.

    Args:
        folder: the workspace.
        slug: the dataset.
        choices: fields of `DatasetSettings`, as TOML holds them; resolutions as names. None removes a field.

    Raises:
        WangenError: the file cannot be read or written, or has no place for a section.
    """
    import tomlkit

    path = (folder / FILE).resolve()  # it may be a link into the user's own collection
    wanted = tomls.load(path)
    known = wanted.setdefault("dataset", {})
    gone = {key for key, value in choices.items() if value is None}
    kept = {
        key: _inline(value) if isinstance(value, dict) else value for key, value in choices.items() if key not in gone
    }
    text, lines = path.read_bytes().decode(), tomlkit.dumps(kept)
    if slug in known:
        mark = "\ufeff" if text.startswith("\ufeff") else ""
        document: Any = tomlkit.parse(text.removeprefix(mark))
        document["dataset"][slug].update(kept)
        for key in gone:
            document["dataset"][slug].pop(key, None)
        text = mark + tomlkit.dumps(document)
    else:
        text += "\n" if text.endswith("\n") else "\n\n"
        text += f"[dataset.{slug}]\n{lines}"
    known[slug] = {key: value for key, value in (known.get(slug, {}) | kept).items() if key not in gone}
    cure = f"write there, for {slug}: {', '.join(lines.splitlines())}"
    if not _says(text, wanted):
        raise UsageError(f"there is no place for [dataset.{slug}] in it", where=str(path), cure=cure)
    if not os.access(path, os.W_OK):
        raise WangenError("the file is read-only", where=str(path), cure=cure)
    try:
        write_whole(path, [text.encode()], mode=stat.S_IMODE(path.stat().st_mode))
    except OSError as error:
        raise WangenError(f"cannot write: {error.strerror}", where=str(path), cure=cure) from None


def _inline(table: Mapping[str, Any]) -> Any:
    """A table on one line."""
    import tomlkit

    inline = tomlkit.inline_table()
    inline.update(table)
    return inline


def _says(text: str, values: Mapping[str, Any]) -> bool:
    """Whether a TOML text holds these values: what tomlkit makes of dotted keys is not always right."""
    try:
        return tomllib.loads(text.removeprefix("\ufeff")) == values
    except tomllib.TOMLDecodeError:
        return False


def _num_frames(raw: Any, where: str) -> int:
    return frames("num_frames", whole_number("num_frames", raw, where), where)[0]


def _table(values: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    table = values.get(key, {})
    if not isinstance(table, dict):
        raise UsageError(f"{key} is no section", where=str(path), cure=f"write [{key}.NAME] and its keys below")
    return table


def _example(name: str) -> str:
    kind = profiles.platform(name).kind
    root = r"C:\AI" if kind == "windows" else "/mnt/c/AI" if kind == "wsl" else "/data/ai"
    host_root = {"linux": "/mnt/share/ai", "wsl": r"\\wsl.localhost\Ubuntu\mnt\c\AI"}.get(kind, "/mnt/c/AI")
    models = rf"{root}\models" if kind == "windows" else f"{root}/models"
    return _SECTION.format(name=name, root=root, host_root=host_root, models=models)


def _section(section: Any, platform: profiles.Platform, file: Path) -> dict[str, str]:
    """The checked values of `[platform.NAME]`; roots are absolute paths that the platform can hold."""
    name, kind = platform.name, platform.kind
    where = f"{file}, [platform.{name}]"
    if not isinstance(section, dict):
        raise UsageError(f"platform.{name} is no section", where=str(file), cure=f"write [platform.{name}]")
    own = {"distro", "automount"} if kind == "wsl" else set()
    tomls.refuse_unknown(section, {"root", "host_root", "venv", *profiles.WEIGHT_ROLES, *ROOTS, *own}, where)
    machine = machine_of(kind)
    checked = {}
    for key, value in section.items():
        if not isinstance(value, str) or not value:
            raise UsageError(f"{key} must be a path in quotes, got {value!r}", where=where)
        try:
            checked[key] = value if key in ("host_root", "distro") else translate(value, machine, machine)
        except PathError as error:
            raise UsageError(f"{key}: {error.found}", where=f"{where}: {value}", cure=error.cure) from None
    pure = PureWindowsPath if kind == "windows" else PurePosixPath
    if "root" in checked and not pure(checked["root"]).is_absolute():
        example = r"C:\AI" if kind == "windows" else "/data/ai"
        raise UsageError(f"root must be an absolute path, got {section['root']!r}", where=where,
                         cure=f"for example root = '{example}'; without a root the bundle can be moved")  # fmt: skip
    return checked


def require_writable(folder: Path) -> None:
    """Make the folder and see that it can be written.

    Raises:
        WangenError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WangenError(
            f"cannot make the folder: {error.strerror}", where=str(folder), cure="choose another or fix the rights"
        ) from None
    if not os.access(folder, os.W_OK):
        raise WangenError("the folder cannot be written", where=str(folder), cure="fix its rights or choose another")
