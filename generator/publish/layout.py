"""Where the parts of a bundle lie, whether the file systems of its target can hold them, and who may write there."""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PureWindowsPath

from wangen.generator.dataset import Problem
from wangen.generator.errors import WangenError
from wangen.generator.lock import hold
from wangen.generator.publish import manifest
from wangen.generator.publish.beside import FOLDERS
from wangen.generator.resolutions import resolution_name
from wangen.generator.target import Target

WINDOWS_PATH = 260
"""A path of so many characters is too long for Windows, unless LongPathsEnabled is set and the program knows of it."""
BELOW_ROOT = 200
"""A bundle without a root goes who knows where: so many characters leave it little room."""
NAME_BYTES = 255

LOCK = "publish.lock"

_CACHE_ENTRY = "x" * 40 + "-" + "0" * 20 + ".text_encoder_output.safetensors"


def reach(target: Target, *parts: str) -> Path:
    """A folder of a bundle as this host sees it.

    Raises:
        WangenError: it does not.
    """
    text = target.path(*parts)
    path = target.reach(text)
    if path is None:
        raise WangenError(f"this host cannot see {text}", cure="publish on a machine that does, or leave that root out")
    return path


def published_folder(target: Target, slug: str) -> Path:
    """The folder with all media and caches of a dataset, as this host sees it."""
    return reach(target, target.roots["datasets"], slug)


def media_folder(target: Target, slug: str, size: tuple[int, int]) -> Path:
    """The media folder of one resolution, as this host sees it."""
    return reach(target, target.roots["datasets"], slug, resolution_name(size))


def beside_folder(target: Target, slug: str, name: str) -> Path:
    """The folder of the control images or the masks, which all resolutions share, as this host sees it."""
    return reach(target, target.roots["datasets"], slug, name)


def cache_folder(target: Target, slug: str, size: tuple[int, int]) -> Path:
    """The cache folder of one resolution, as this host sees it."""
    return reach(target, target.roots["datasets"], slug, f"{resolution_name(size)}_cache")


def output_folder(target: Target, slug: str) -> Path:
    """Where a dataset's LoRAs, checkpoints and reports go, as this host sees it."""
    return reach(target, target.roots["outputs"], slug)


@contextmanager
def held(targets: Iterable[Target], slug: str) -> Iterator[None]:
    """While the block runs, nobody else publishes or cleans this dataset there, from whatever workspace.

    Raises:
        WangenError: somebody does already, or a lock file cannot be written.
    """
    folders = (published_folder(target, slug) for target in targets)
    with ExitStack() as stack:
        for folder in dict.fromkeys(folder.resolve() for folder in folders):
            stack.enter_context(hold(folder / LOCK))
        yield


def published_resolutions(target: Target, slug: str) -> list[str]:
    """Names of the resolutions that were published for a dataset, asked for today or not."""
    folder = published_folder(target, slug)
    return sorted(path.parent.name for path in folder.glob(f"*/{manifest.NAME}") if path.parent.name not in FOLDERS)


def name_problems(target: Target, names: Iterable[str]) -> list[Problem]:
    """Published names that the target's file system cannot hold."""
    if target.platform.kind == "windows":
        return []  # names that Windows cannot hold are refused on every target
    lengths = ((name, len(os.fsencode(name))) for name in names)
    return [
        Problem(Path(name), f"the name has {length} bytes, Linux allows {NAME_BYTES}", "shorten it")
        for name, length in lengths
        if length > NAME_BYTES
    ]


def is_fixed(target: Target) -> bool:
    """Whether a target's paths are known in full: its bundle cannot be moved."""
    return PureWindowsPath(target.path(target.roots["datasets"])).is_absolute()


def long_paths(target: Target, slug: str, folder: str, names: Iterable[str]) -> list[str]:
    """Paths in one media folder of a Windows bundle that are too long, a line each; none for other targets.

    Of a bundle that can be moved the part below its root is judged.
    """
    if target.platform.kind != "windows":
        return []
    media = target.path(target.roots["datasets"], slug, folder)
    limit = WINDOWS_PATH - 1 if is_fixed(target) else BELOW_ROOT
    paths = [*(f"{media}\\{name}" for name in names), f"{media}_cache\\{_CACHE_ENTRY}"]
    lengths = ((path, len(path.encode("utf-16-le", "surrogatepass")) // 2) for path in paths)
    return [f"{length} characters: {path}" for path, length in lengths if length > limit]
