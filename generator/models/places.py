"""Where the weight files of a model are on this machine, and whether they are what their names say."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from wangen import profiles
from wangen.generator import workspace
from wangen.generator.bundle import find_weights, is_called, models_below, models_folder, place_of
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.kinds import Facts, examine, require
from wangen.generator.steps import CacheText
from wangen.generator.target import Target, host_platform_name, machine_of
from wangen.generator.tokenizer_file import home_of, tokenizer_of
from wangen.generator.workspace import Workspace
from wangen.profiles import Download, Model, Weights

State = Literal["there", "missing", "broken", "wrong", "unseen"]

INDEX = ".safetensors.index.json"
"""How the names of indexes end; one stands for its shards."""

TOKENIZER = "tokenizer"
"""The role that is no weight file: the tokenizer of the text encoder."""


@dataclass(frozen=True)
class Held:
    """What stands where a file of a model belongs.

    Attributes:
        role: the flag that takes it, or `tokenizer`.
        path: as this host sees it; where it would belong when it is missing; None when this host cannot see it.
        state: `broken` is a file that cannot be read or is not whole, `wrong` one that is something else.
        words: what is wrong, for people; empty when it is there or missing.
        num_bytes: its size on disk, with all its shards.
        cure: what to do about a file that is broken or wrong.
    """

    role: str
    path: Path | None
    state: State
    words: str = ""
    num_bytes: int = 0
    cure: str = ""


def here() -> Workspace | None:
    """The workspace at or above the working folder, or None.

    Raises:
        WangenError: its `wangen.toml` is wrong.
    """
    try:
        folder = workspace.find(Path())
    except UsageError:
        return None
    return workspace.read(folder)


def models_folders(given: Path | None, place: Workspace | None) -> list[Target]:
    """Whose models folders are meant: the given one, else that of the bundle in which this runs, else those of the
    workspace, else `models` here.

    Args:
        given: what `--dir` names.
        place: the workspace.

    Raises:
        UsageError: the workspace has no folder that this host can see.
    """
    if given or place is None:
        return [_plain((given or Path("models")).absolute())]
    targets: dict[Path | str, Target] = {}
    errors = []
    for name in _around(place) or place.platforms:
        try:
            target = place.target(name)
        except UsageError as error:
            errors.append(error)
        else:
            targets.setdefault(models_folder(target) or name, target)
    if not targets:
        raise errors[0]
    return list(targets.values())


def _around(place: Workspace) -> list[str]:
    """The platforms in whose folder this runs, in the workspace's list or not."""
    found = []
    for name in place.known_platforms:
        with suppress(UsageError):  # of another machine
            folder = place.target(name).folder
            if not place.folder.is_relative_to(folder) and Path.cwd().is_relative_to(folder):
                found.append(name)
    return found


def on_this_machine(targets: Sequence[Target]) -> list[Target]:
    """Those whose scripts can run here, or all when there is none."""
    return [target for target in targets if target.is_native] or [*targets]


class Shelf:
    """The models folder of a target, walked once. What was read of a file is remembered: roles share files.

    Attributes:
        target: whose folder it is.
        tokenizer: what the workspace gives as `--tokenizer`, as the target writes it.
    """

    def __init__(self, target: Target, place: Workspace | None = None) -> None:
        self.target = target
        self.tokenizer = named_tokenizer(target, place)
        self._found = models_below(target)
        self._facts: dict[tuple[Path, str], Facts | WangenError] = {}
        self._tokenizers: dict[Path, Held] = {}

    def is_named(self, role: str) -> bool:
        """Whether the workspace names the file of a role, so that no other is looked for."""
        return bool(self.tokenizer) if role == TOKENIZER else role in self.target.weights

    def to_fetch(self, weights: Weights, held: Held) -> Download | None:
        """What to fetch for a role; None where nobody offers it, or the workspace names a place to which none goes."""
        begun = from_hub(weights, held)
        if held.state != "missing" or not self.is_named(weights.flag):
            return begun or next(iter(weights.downloads), None)
        folder = models_folder(self.target)
        return begun if begun and folder and held.path == folder / place_of(begun) else None

    def look(self, model: Model) -> list[Held]:
        """What is there of everything that a model needs, and what is missing."""
        found = [self.look_at(model, weights) for weights in model.weights]
        return [*found, *(self.look_for_tokenizer(model, held) for held in found if held.role == "t5")]

    def look_at(self, model: Model, weights: Weights, without: Path | None = None) -> Held:
        """What one role of a model resolves to, as publishing resolves it, or would without one file."""
        folder = models_folder(self.target) or Path()
        found = [path for path in self._found if folder / path != without] if without else self._found
        path = self.target.reach(find_weights(self.target, weights, found))
        if path is None:
            return Held(weights.flag, None, "unseen", "another machine's, not seen from here")
        if not path.exists():
            return Held(weights.flag, path, "missing")
        flag = f"--{weights.flag}"
        facts = self._examine(path, flag)
        if isinstance(facts, WangenError):
            return Held(weights.flag, path, "broken", facts.found, path.stat().st_size, facts.cure)
        try:
            require(path, facts, weights.kind, flag, model.name)
        except WangenError as error:
            return Held(weights.flag, path, "wrong", error.found, facts.num_bytes, error.cure)
        return Held(weights.flag, path, "there", "", facts.num_bytes)

    def look_for_tokenizer(self, model: Model, t5: Held) -> Held:
        """What the tokenizer of a model's text encoder resolves to, as the steps find it."""
        if t5.path is None:
            return Held(TOKENIZER, None, "unseen", t5.words)
        if t5.path not in self._tokenizers:
            folder = models_folder(self.target) or t5.path.parent
            self._tokenizers[t5.path] = self._tokenizer_of(model, t5.path, folder)
        return self._tokenizers[t5.path]

    def _tokenizer_of(self, model: Model, t5: Path, folder: Path) -> Held:
        named = self.target.reach(self.tokenizer) if self.tokenizer else None
        if self.tokenizer and named is None:
            return Held(TOKENIZER, None, "unseen", "another machine's, not seen from here")
        try:
            path = tokenizer_of(t5 if t5.exists() else folder, named, model)
        except WangenError:
            return Held(TOKENIZER, named or folder / home_of(model), "missing")
        return Held(TOKENIZER, path, "there", "", path.stat().st_size)

    def _examine(self, path: Path, flag: str) -> Facts | WangenError:
        if (path, flag) not in self._facts:
            try:
                self._facts[path, flag] = examine(path, flag)
            except WangenError as error:
                self._facts[path, flag] = error
        return self._facts[path, flag]


def named_tokenizer(target: Target, place: Workspace | None) -> str:
    """What the workspace or the platform gives as `--tokenizer`; empty for none."""
    layers = [target.platform.overrides, place.steps if place else {}]
    given = [layer.get(CacheText.command, {}).get("tokenizer") for layer in layers]
    return str(given[1] or given[0] or "")


def from_hub(weights: Weights, held: Held) -> Download | None:
    """The download that a role's file is from, or is one shard of; None where it is from elsewhere."""
    if held.path is None:
        return None
    for download in weights.downloads:
        place = place_of(download)
        path = held.path.with_name(place.name) if place.name.endswith(INDEX) else held.path
        if is_called(PurePosixPath(path.as_posix()), str(place)):
            return download
    return None


def downloads_called(name: str) -> list[Download]:
    """What can be fetched by a name, which is the end of `owner/name/path`: the best for each place that it goes to."""
    found: dict[PurePosixPath, Download] = {}
    for model in map(profiles.model, profiles.model_names()):
        for weights in model.weights:
            for download in weights.downloads:
                if is_called(PurePosixPath(download.repo, download.path), name):
                    found.setdefault(place_of(download), download)
    return [*found.values()]


def known_model(name: str) -> Model:
    """The model profile of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in profiles.model_names():
        raise UsageError(f"there is no task {name!r}", cure=f"one of {', '.join(profiles.model_names())}")
    return profiles.model(name)


def _plain(folder: Path) -> Target:
    """A models folder that belongs to no workspace, as the target that it would be the models folder of."""
    platform = profiles.platform(host_platform_name())
    roots = dict.fromkeys(workspace.ROOTS, ".")
    return Target(platform, None, folder, roots, platform.venv, {}, machine_of(platform.kind))
