"""The texts of a bundle, scripts and TOML files: what publishing makes of them, and what it leaves to the user.

A text that the user edited stays, and the new one goes beside it as `.new`; values in a script's block of knobs are
carried over into the new script.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from wangen.generator import scripts, slurm
from wangen.generator.bundle import (
    PROMPTS,
    bundle_steps,
    prompts_file,
    prompts_name,
    script_bundles,
    script_names,
    toml_name,
)
from wangen.generator.dataset import CAPTION, Item
from wangen.generator.dataset_settings import DatasetSettings
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.footage import CLIPS, MANIFEST
from wangen.generator.paths import toml_path
from wangen.generator.publish import prompt_pictures
from wangen.generator.publish.beside import CONTROLS, MASKS
from wangen.generator.publish.manifest import digest_of
from wangen.generator.publish.prompt_pictures import PROMPT_ENDINGS, Note
from wangen.generator.resolutions import resolution_name
from wangen.generator.setup import scripts as setup_scripts
from wangen.generator.setup import wheel
from wangen.generator.signing import same_text, signed, unedited
from wangen.generator.target import Target
from wangen.generator.tomls import write_dataset
from wangen.generator.workspace import FILE, Workspace
from wangen.profiles import Model, Platform


@dataclass(frozen=True)
class Text:
    """A script or TOML file of a bundle.

    Attributes:
        path: where it belongs.
        data: what has to be written; empty when nothing has to.
        mode: permission bits.
        state: `kept` means that the user edited the file there, so that `data` goes beside it.
        knobs: knob -> (the user's value that stays, the published one).
        broken: lines in the block of knobs that set none, so that the script counts as edited.
        stuck: the user edited the file beside it, too, so that nothing is written.
        shared: targets at one place have it in common.
    """

    path: Path
    data: bytes
    mode: int
    state: Literal["new", "changed", "same", "kept"]
    knobs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    stuck: bool = False
    shared: bool = False

    @property
    def target(self) -> Path:
        """The file that is written."""
        return beside(self.path) if self.state == "kept" else self.path


def beside(path: Path) -> Path:
    """Where the new text goes when the user edited the old one."""
    return path.with_name(f"{path.name}.new")


def script_texts(workspace: Workspace, target: Target, model: Model, slug: str) -> list[Text]:
    """Every run script of a bundle on one target.

    Raises:
        WangenError: a shell cannot carry a path or text, or a script there cannot be read.
    """
    steps = bundle_steps(workspace, target, model, slug)
    bundles = script_bundles(target, slug, steps)
    return [script_text(target.folder / file, bundles[name], name) for name, file in script_names(target, slug)]


def setup_texts(target: Target) -> list[Text]:
    """The scripts that make a target's environment; all its datasets share them.

    Raises:
        WangenError: a shell cannot carry a path, a script there cannot be read, or wangen is no installed package.
    """
    return [
        setup_text(target.folder, target.platform, target.root, target.venv, shell) for shell in target.platform.shells
    ]


def setup_text(folder: Path, platform: Platform, root: str | None, venv: tuple[str, ...], shell: str) -> Text:
    """The setup script of a folder for one shell; the arguments are those of `setup.scripts.render`.

    Raises:
        WangenError: as `setup_texts`.
    """
    path = folder / setup_scripts.script_name(shell)
    data = setup_scripts.render(platform, root, venv, version("wangen"), shell)
    old = _read(path)
    if old is not None and old != data and not scripts.untouched(old):
        return _kept(path, data, _mode(shell), lambda there: _script_edited(there, {}))
    return _plain(path, old, data, _mode(shell))


def wheel_text(target: Target, data: bytes) -> Text:
    """The wheel of wangen that a target's setup script installs; `data` is its content.

    Raises:
        WangenError: the one there cannot be read.
    """
    path = target.folder / "files" / wheel.wheel_name(version("wangen"))
    return _plain(path, _read(path), data, 0o644)


def _signed_text(path: Path, text: str) -> Text:
    """A text with the line by which an edit is seen: it is replaced unless it was edited."""
    old = _read(path)
    if old and not unedited(old) and not same_text(old, text):
        return _kept(path, text.encode(), 0o644, lambda there: not unedited(there))
    return _plain(path, old, text.encode(), 0o644)


def _mode(shell: str) -> int:
    return 0o755 if shell in ("sh", slurm.ENDING) else 0o644


def _plain(path: Path, old: bytes | None, data: bytes, mode: int) -> Text:
    """A file that is always replaced."""
    if old == data:
        return Text(path, b"", mode, "same")
    return Text(path, data, mode, "new" if old is None else "changed")


def toml_file(target: Target, slug: str) -> Path:
    """Where the dataset's TOML of a bundle lies, as this host sees it."""
    return target.folder / "files" / "tomls" / toml_name(slug, target)


def toml_text(target: Target, model: Model, slug: str, items: Iterable[Item], settings: DatasetSettings) -> Text:
    """The dataset's TOML of a bundle on one target.

    Raises:
        WangenError: the one there cannot be read.
    """
    return _signed_text(toml_file(target, slug), dataset_toml(target, model, slug, items, settings))


def prompts_texts(workspace: Workspace, target: Target, model: Model, slug: str) -> list[Text]:
    """The sample prompts of a bundle on one target: a copy of the workspace's file, where `wangen.toml` names one.

    With it go the pictures that it names.

    Raises:
        UsageError: there is no such file, or it is no text that can be marked as published.
        WangenError: the one in the bundle, or a picture, cannot be read.
    """
    file = prompts_file(workspace, target, model)
    if file is None:
        return []
    where = f"{workspace.folder / FILE}, [steps.train] sample_prompts"
    if file.suffix.lower() not in PROMPT_ENDINGS:
        raise UsageError(f"{file.name} cannot be published: it has no place for the comment by which an edit is seen",
                         where=where, cure="write the prompts as .txt or .toml, or give the absolute path that the "
                         "target has")  # fmt: skip
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"there is no file {file}", where=where, cure="write it there: relative paths begin at "
                         "the workspace; an absolute path is the target's own") from None  # fmt: skip
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{file} cannot be read: {reason}", where=where, cure="mend it") from None
    # An option that none has is refused by the line of the workspace's own file.
    origins = prompt_pictures.origins(file, workspace.folder)
    path = target.folder / "files" / PROMPTS / prompts_name(slug, target, file)
    known = {other: [*prompt_pictures.read(_read(other) or b"")] for other in prompt_pictures.prompts_in(path.parent)}
    published = {(name, note.digest) for notes in known.values() for name, note in notes}
    # What these prompts no longer name is still theirs.
    old = [*known.get(path, ()), *known.get(beside(path), ())]
    notes = {name: note for name, note in old if (name, note.digest) == (name, _digest_at(path.parent / name))}
    pictures = []
    for name, origin in origins.items():
        data, place = _read(origin) or b"", path.parent / name
        notes[name] = Note(digest_of(data), str(origin))
        pictures.append(_picture(place, data, is_ours=(name, _digest_at(place)) in published))
    head = f"# sample prompts of {slug}, published from {file.name}\n{prompt_pictures.written(notes)}"
    return [_signed_text(path, signed(head + text)), *pictures]


def _picture(path: Path, data: bytes, *, is_ours: bool) -> Text:
    """A picture that prompts name; `is_ours`: what is there was published."""
    old = _read(path)
    if old is None or old == data or is_ours:
        return replace(_plain(path, old, data, 0o644), shared=True)
    return replace(_kept(path, data, 0o644, lambda _: False), shared=True)


def _digest_at(path: Path) -> str:
    """Of a picture; empty where there is none."""
    data = _read(path)
    return "" if data is None else digest_of(data)


def dataset_toml(target: Target, model: Model, slug: str, items: Iterable[Item], settings: DatasetSettings) -> str:
    """The dataset's TOML for a target: for each resolution a block for its images and one for its clips.

    Of footage there is the manifest that the script's first step writes, in place of a folder of clips.
    """
    listed = list(items)
    kinds = {"video"} if settings.footage else {item.media for item in listed}
    dataset = (target.roots["datasets"], slug)
    held = {"control_directory": CONTROLS} if any(item.controls for item in listed) else {}
    held |= {"mask_directory": MASKS} if any(item.mask for item in listed) else {}
    beside = {key: toml_path(target.path(*dataset, name), target.machine) for key, name in held.items()}
    general = {"caption_extension": CAPTION, "batch_size": settings.batch_size, "enable_bucket": True}
    blocks = []
    for size in settings.sizes(model):
        media = toml_path(target.path(*dataset, resolution_name(size)), target.machine)
        for kind in ("image", "video"):
            clip = {"target_frames": [model.num_frames], "frame_extraction": "head"} if kind == "video" else {}
            if settings.footage:
                lines = toml_path(target.path(*dataset, CLIPS, MANIFEST), target.machine)
                source = {f"{kind}_jsonl_file": lines}
            else:
                source = {f"{kind}_directory": media}
            block = {
                **source,
                "cache_directory": f"{media}_cache",
                "resolution": list(size),
                "num_repeats": settings.num_repeats,
                **({"is_reg": True} if settings.is_reg else {}),
                **beside,
                **clip,
            }
            blocks += [block] if kind in kinds else []
    comment = f"{slug} for {model.title}, written by wangen publish"
    if not target.root:
        comment += "; paths are relative to the folder of the scripts"
    return signed(write_dataset(tuple(blocks), general, comment))


def script_text(path: Path, bundle: scripts.Bundle, name: str) -> Text:
    """A run script; `name` is `train` or `cache`.

    Raises:
        WangenError: the shell cannot carry a path or text, or the script there cannot be read.
    """
    shell = path.suffix[1:]
    old = _read(path)
    if old is None:
        return _plain(path, None, scripts.render(bundle, shell, name), _mode(shell))
    data, stays = scripts.merge(old, bundle, shell, name)
    if stays and data != old:
        carried = scripts.read_knobs(data)
        text = _kept(path, data, _mode(shell), lambda there: _script_edited(there, carried))
        return replace(text, broken=tuple(scripts.invalid_knobs(old)))
    return replace(_plain(path, old, data, _mode(shell)), knobs=scripts.changed_knobs(data))


def _kept(path: Path, data: bytes, mode: int, edited: Callable[[bytes], bool]) -> Text:
    """A file that stays, with the new text beside it, unless the user `edited` an earlier one there."""
    there = _read(beside(path))
    stuck = there is not None and there != data and edited(there)
    return Text(path, b"" if stuck or there == data else data, mode, "kept", stuck=stuck)


def _script_edited(data: bytes, carried: Mapping[str, str]) -> bool:
    """Whether a script differs from what was published; not by the values `carried` over from the one beside it."""
    changed = scripts.changed_knobs(data).items()
    return not scripts.untouched(data) or any(carried.get(knob) != value for knob, (value, _) in changed)


def _read(path: Path) -> bytes | None:
    """The bytes of a file; None when there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WangenError(f"cannot be read: {error.strerror}", where=str(path),
                          cure="fix its rights, or move away what is in its place") from None  # fmt: skip
