"""The training state on disk: weights, optimizer, averages and facts, staged in a folder, manifest last, one rename.

A state folder is complete when its manifest is there and every file it lists has its size; anything else is ignored
and cleaned up, so that a kill at any moment leaves the previous state in force. Bytes that changed since are found by
their checksum when the state is read.
"""

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zlib import crc32

import torch

from wangen.generator.errors import WangenError, write_cure
from wangen.generator.files import remove_left, remove_tree, replace, sync_folder, write_text, write_whole
from wangen.generator.run_folder import ANEW, NEWEST
from wangen.runtime.safetensors_file import serialize
from wangen.runtime.training.state_manifest import (
    FORMAT,
    IN_PARTS,
    MANIFEST,
    content_of,
    files_of,
    is_to_be_kept,
    manifest_text,
    read_manifest,
    states_in,
)

log = logging.getLogger("wangen")


@dataclass(frozen=True)
class ExpertState:
    """Where one transformer of a run stands.

    Attributes:
        step: optimizer steps it has done.
        adapter: trainable weights by parameter name.
        optimizer: the optimizer's tensors.
        numbers: its plain numbers.
        ema: the averages by parameter name; empty when none are kept.
        ema_updates: how often they were updated.
        in_parts: the folder from which its tensors are still to be read, if it is of a state in parts.
    """

    step: int
    adapter: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    numbers: Mapping[str, Any]
    ema: Mapping[str, torch.Tensor]
    ema_updates: int = 0
    in_parts: Path | None = None


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands.

    Attributes:
        experts: by the expert's name, which is empty where there is one transformer.
        fingerprint: every setting and digest that decides the result.
        facts: small things to carry on: the first loss, the best validation.
        folder: where it was read, if it was.
    """

    experts: Mapping[str, ExpertState]
    fingerprint: Mapping[str, Any]
    facts: Mapping[str, Any]
    folder: Path | None = None

    @property
    def step(self) -> int:
        """Optimizer steps done, of all experts together."""
        return sum(expert.step for expert in self.experts.values())


def save(folder: Path, state: TrainingState, *, keep: bool = False) -> Path:
    """Write `<folder>/step-<number>` whole or not at all, and return it; `remove_others` spares one to keep.

    Raises:
        WangenError: the disk refused; earlier states are untouched.
    """
    staging = staging_of(folder, state.step)
    try:
        with disk(folder):
            begin(staging)
            checksums = {
                file: _write(staging / file, getattr(expert, part))
                for name, expert in state.experts.items()
                for part, file in files_of(name).items()
            }
            return complete(staging, {**manifest_of(state, keep=keep), "checksums": checksums})
    finally:
        _remove(staging)


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write tensors to a file, and return the CRC-32 of its bytes."""
    checksum = 0

    def summed() -> Iterator[bytes | memoryview]:
        nonlocal checksum
        for chunk in serialize(tensors, {}):
            checksum = crc32(chunk, checksum)
            yield chunk

    write_whole(path, summed())  # its errors of the disk are told as those of the state
    return checksum


@contextmanager
def disk(folder: Path) -> Iterator[None]:
    """Around writing a state into a folder of states.

    Raises:
        WangenError: the disk refused.
    """
    try:
        yield
    except OSError as error:
        raise cannot_save(folder, error.strerror, write_cure(error)) from None


def cannot_save(folder: Path, reason: str | None, cure: str = "free space") -> WangenError:
    """What to say when a state cannot be written into a folder of states."""
    return WangenError(
        f"cannot save the training state: {reason}",
        where=str(folder),
        cure=f"{cure}, then run the same line again: it goes on from the last state",
    )


def damaged(state: Path, reason: object) -> WangenError:
    """What to say of a state whose tensors cannot be read."""
    return WangenError(
        f"the training state is damaged ({reason})",
        where=str(state),
        cure="remove this folder: the run then goes on from an earlier state, or from step 0",
    )


def staging_of(folder: Path, step: int) -> Path:
    """Where the state of a step is put together, in the folder of states."""
    return folder / f".staging-{step:08d}"


def begin(staging: Path) -> None:
    """Make an empty folder to put a state together; what was left half written beside it needs its room no more."""
    for path in staging.parent.glob(".staging-*"):
        _remove(path)
    staging.mkdir(parents=True)


def manifest_of(state: TrainingState, *, keep: bool, in_parts: bool = False) -> dict[str, Any]:
    """What a state is, as JSON, but for its files."""
    return {
        "format": FORMAT,
        "step": state.step,
        "experts": {
            name: {"step": expert.step, "numbers": expert.numbers, "ema_updates": expert.ema_updates}
            for name, expert in state.experts.items()
        },
        "fingerprint": state.fingerprint,
        "facts": copy.deepcopy(state.facts),  # the run's own go on while the state is written
        "keep": keep,
        "in_parts": in_parts,
    }


def complete(staging: Path, manifest: Mapping[str, Any]) -> Path:
    """Give a state whose files are all there its manifest, and then its name, which is returned."""
    folder, final = staging.parent, staging.parent / f"step-{manifest['step']:08d}"
    aside = folder / _aside(final.name)  # still a state that `newest` finds, should the last lines be cut short
    if any(is_to_be_kept(path) for path in (final, aside)):
        manifest = {**manifest, "keep": True}  # the same step once more, with what an interrupt had left undone
    files = (path for path in sorted(staging.rglob("*")) if path.is_file())
    sizes = {path.relative_to(staging).as_posix(): path.stat().st_size for path in files}
    write_text(staging / MANIFEST, manifest_text({**manifest, "files": sizes}))
    for place in (staging, *(path for path in staging.rglob("*") if path.is_dir())):
        sync_folder(place)
    if final.exists():
        _remove(aside)
        replace(final, aside, long=True)
    replace(staging, final, long=True)
    remove_left(folder / NEWEST)
    with suppress(OSError):
        (folder / ANEW).unlink()
    write_text(folder / NEWEST, final.name)
    _remove(aside)
    return final


def _aside(name: str) -> str:
    """What a state is called while another of its step takes its place."""
    return f"{name}-old"


def newest(folder: Path, facts: Mapping[str, Any] = MappingProxyType({})) -> Path | None:
    """The complete state that was saved last, else the one with the most steps, of those that have these facts.

    Raises:
        WangenError: what a state says of itself cannot be read: it may be the one.
    """
    found = ((path, manifest) for path in states_in(folder) if (manifest := read_manifest(path)) is not None)
    steps = {path: manifest["step"] for path, manifest in found if facts.items() <= manifest["facts"].items()}
    last = _named(folder)
    return max(steps, key=lambda path: (path.name in (last, _aside(last)), steps[path], -len(path.name)), default=None)


def experts_of(path: Path) -> tuple[Collection[str], Mapping[str, Any]]:
    """The names of the experts of a state, and its fingerprint: no tensor is read."""
    manifest = read_manifest(path) or {}
    return manifest.get("experts", {}).keys(), manifest.get("fingerprint", {})


def _named(folder: Path) -> str:
    """The state that was saved last, by its name; empty where nothing says it.

    Raises:
        WangenError: it cannot be read.
    """
    with suppress(ValueError):
        return content_of(folder / NEWEST).decode().strip()
    return ""


def require_own_format(folder: Path) -> None:
    """Refuse a folder whose states are all damaged or of another version of wangen; one that passes over some says so.

    A kill never leaves a state that is not whole: it has its name only after everything is in it.

    Raises:
        WangenError: going on would begin at step 0 without a word.
    """
    last = newest(folder)
    if last:
        named = _named(folder)  # of a run that began again at an earlier step it is not the one of the most steps
        for path in states_in(folder):
            if (path.name > last.name or path.name == named) and read_manifest(path) is None:
                log.warning("  %s is damaged or of another version: going on from %s", path, last.name)
        return
    states = states_in(folder)
    for path in states:
        with suppress(ValueError, RecursionError, LookupError, TypeError):
            found = json.loads(content_of(path / MANIFEST).decode())["format"]
            if found != FORMAT:
                raise WangenError(
                    f"these training states are of the format {found}, this version reads {FORMAT}",
                    where=str(folder),
                    cure="train with the version that made them, or begin again with --fresh",
                )
    if states:
        raise WangenError("these training states are damaged: files are missing or not as they were written",
                          where=str(folder), cure="copy them here again, or begin again with --fresh")  # fmt: skip


def identity(path: Path) -> str:
    """What tells a state from every other, 16 hex digits; empty of a folder that is none, which `read` refuses.

    Raises:
        WangenError: it cannot be read.
    """
    content = content_of(path / MANIFEST)
    return hashlib.sha256(content).hexdigest()[:16] if content else ""


def read(path: Path) -> TrainingState:
    """The state in a folder; the tensors of one in parts are left there.

    Raises:
        WangenError: it is no complete state, it is damaged, or it cannot be read.
    """
    manifest = read_manifest(path)
    if manifest is None:
        raise WangenError("this is no complete training state", where=str(path), cure=_instead_of(path))
    experts = {}
    for name, numbers in manifest["experts"].items():
        if manifest["in_parts"]:
            experts[name] = ExpertState(adapter={}, optimizer={}, ema={}, in_parts=path / IN_PARTS, **numbers)
            continue
        adapter, optimizer, ema = (
            _load(path / file, manifest["checksums"].get(file)) for file in files_of(name).values()
        )
        experts[name] = ExpertState(adapter=adapter, optimizer=optimizer, ema=ema, **numbers)
    return TrainingState(experts, manifest["fingerprint"], manifest["facts"], path)


def _instead_of(path: Path) -> str:
    """What to do where a folder was given to `--resume` that is no state."""
    if state := newest(path):
        return f"give one of the states in it: the newest is {state.name}"
    if (path / "optimizer.bin").is_file():  # as accelerate saves it
        return "a state of another trainer cannot be read: start from its LoRA with --network_weights"
    return "leave --resume out or give another"


def _load(path: Path, checksum: int | None) -> dict[str, torch.Tensor]:
    """The tensors of a file, read as bytes: a mapped file could not be removed on Windows when the next replaces it.

    States of earlier versions have no checksum.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    content = content_of(path)
    if not content:
        raise damaged(path.parent, f"{path.name} is missing or empty")
    if checksum is not None and crc32(content) != checksum:
        raise damaged(path.parent, f"{path.name} has other bytes than were saved")
    try:
        tensors: dict[str, torch.Tensor] = load(content)
        return tensors
    except SafetensorError as error:
        raise damaged(path.parent, error) from None


def remove_others(folder: Path, keep: set[Path], staying: Callable[[list[int]], set[int]]) -> None:
    """Remove the states of a folder except these and, of those that were saved to be kept, those of steps that stay.

    What a killed run left half written goes as well: it may have been at a step that is never saved again. A state of
    which it cannot be read whether it is to be kept stays.
    """
    spared = {path.resolve() for path in keep}
    for path in folder.glob(".staging-*"):
        _remove(path)
    manifests = {}
    with suppress(WangenError):
        for path in states_in(folder):
            with suppress(WangenError):
                manifests[path] = read_manifest(path) or {}
    kept = {path: manifest["step"] for path, manifest in manifests.items() if manifest.get("keep")}
    stay = staying(sorted(set(kept.values())))
    for path in manifests:
        if path.resolve() not in spared and kept.get(path) not in stay:
            _remove(path)


def newest_known(folder: Path) -> Path | None:
    """As `newest`, for a message about something else: None also where it cannot be read."""
    with suppress(WangenError):
        return newest(folder)
    return None


def mark_begun_anew(folder: Path) -> None:
    """Note beside the states of an earlier run that one begins anew, which leaves them until it has saved its own."""
    with suppress(WangenError):  # it is an aid: what cannot be read or written now is told where it matters
        if states_in(folder):
            write_text(folder / ANEW, "")


def take_mark(folder: Path) -> bool:
    """Whether the run that began last, over the states of an earlier one, has saved none; this is told once."""
    try:
        (folder / ANEW).unlink()
    except OSError:
        return False
    return True


def forget(folder: Path) -> None:
    """Remove every state of a run that starts afresh."""
    _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder that nobody needs; one that cannot be removed costs only its room."""
    with suppress(OSError):
        remove_tree(folder)
