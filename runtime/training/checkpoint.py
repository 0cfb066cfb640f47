"""The training state on disk: adapter, optimizer and a few integers, staged in a folder, manifest last, one rename.

A state folder is complete when its manifest is there and every file it lists has its size; anything else is ignored
and cleaned up, so that a kill at any moment leaves the previous state in force.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wangen.generator.errors import WangenError
from wangen.generator.files import remove_tree, replace, sync_folder, write_text
from wangen.runtime.safetensors_file import write

MANIFEST = "state.json"
FORMAT = "wangen-state-1"


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands.

    Attributes:
        step: optimizer steps done.
        adapter: trainable weights by parameter name.
        optimizer: the optimizer's tensors: `<parameter number>.<name>`.
        numbers: the optimizer's plain numbers, by the same names, and those of its group as `group.<name>`.
        fingerprint: every setting and digest that decides the result.
        facts: small things to carry on: the first loss.
    """

    step: int
    adapter: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    numbers: Mapping[str, Any]
    fingerprint: Mapping[str, Any]
    facts: Mapping[str, Any]


def save(folder: Path, state: TrainingState, *, keep: bool = False) -> Path:
    """Write `<folder>/step-<number>` whole or not at all, and return it; `remove_others` spares one to keep.

    Raises:
        WangenError: the disk refused; earlier states are untouched.
    """
    final = folder / f"step-{state.step:08d}"
    staging = folder / f".staging-{state.step:08d}"
    try:
        _remove(staging)
        staging.mkdir(parents=True)
        write(staging / "adapter.safetensors", state.adapter, {})
        write(staging / "optimizer.safetensors", state.optimizer, {})
        manifest = {
            "format": FORMAT,
            "step": state.step,
            "files": {path.name: path.stat().st_size for path in sorted(staging.iterdir())},
            "numbers": state.numbers,
            "fingerprint": state.fingerprint,
            "facts": state.facts,
            "keep": keep,
        }
        write_text(staging / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
        sync_folder(staging)
        aside = folder / f"{final.name}-old"  # still a state that `newest` finds, should the next lines be cut short
        if final.exists():
            _remove(aside)
            replace(final, aside)
        replace(staging, final)
        sync_folder(folder)
        _remove(aside)
    except OSError as error:
        raise WangenError(
            f"cannot save the training state: {error.strerror}",
            where=str(folder),
            cure="free space, then run the same line again: it goes on from the last state",
        ) from None
    finally:
        _remove(staging)
    return final


def newest(folder: Path) -> Path | None:
    """The complete state with the most steps, or None."""
    paths = folder.glob("step-*") if folder.is_dir() else []
    steps = {path: manifest["step"] for path in paths if (manifest := _manifest(path)) is not None}
    return max(steps, key=lambda path: (steps[path], -len(path.name)), default=None)


def read(path: Path) -> TrainingState:
    """The state in a folder.

    Raises:
        WangenError: it is no complete state.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    manifest = _manifest(path)
    if manifest is None:
        raise WangenError(
            "this is no complete training state", where=str(path), cure="leave --resume out or give another"
        )
    try:  # read as bytes: a memory-mapped file could not be removed on Windows when the next state replaces it
        adapter, optimizer = (load((path / f"{name}.safetensors").read_bytes()) for name in ("adapter", "optimizer"))
    except (OSError, SafetensorError) as error:
        raise WangenError(
            f"the training state is damaged ({error})",
            where=str(path),
            cure="remove this folder: the run then goes on from an earlier state, or from step 0",
        ) from None
    return TrainingState(
        step=manifest["step"],
        adapter=adapter,
        optimizer=optimizer,
        numbers=manifest["numbers"],
        fingerprint=manifest["fingerprint"],
        facts=manifest["facts"],
    )


def remove_others(folder: Path, keep: set[Path]) -> None:
    """Remove the states of a folder except these and those that were saved to be kept."""
    spared = {path.resolve() for path in keep}
    for path in folder.glob("step-*"):
        manifest = _manifest(path)
        if path.resolve() not in spared and not (manifest and manifest.get("keep")):
            _remove(path)


def forget(folder: Path) -> None:
    """Remove every state of a run that starts afresh."""
    _remove(folder)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimizer's state as tensors and plain numbers, both named `<parameter number>.<name>`.

    Raises:
        WangenError: it keeps something else, so that it could not be resumed.
    """
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{name}"] = value
            elif isinstance(value, int | float | bool | None):
                numbers[f"{index}.{name}"] = value
            else:
                raise WangenError(f"{type(optimizer).__name__} keeps a {type(value).__name__}, which cannot be resumed",
                                  cure="choose another --optimizer_type")  # fmt: skip
    # Some optimizers count in their group (Prodigy's d, schedule-free's k); the learning rate follows the step.
    for name, value in optimizer.param_groups[0].items():
        if name != "lr" and isinstance(value, int | float | bool):
            numbers[f"group.{name}"] = value
    return tensors, numbers


def restore(
    parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, state: TrainingState, where: Path
) -> None:
    """Put a saved state into fresh parameters and a fresh optimizer over them.

    Raises:
        WangenError: the state is of an adapter of other modules or another rank.
    """
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    if shapes != {name: tensor.shape for name, tensor in state.adapter.items()}:
        raise WangenError("the training state is of an adapter with other modules or another rank", where=str(where),
                          cure="give the rank it was trained with, or --fresh")  # fmt: skip
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state.adapter[name])
    values: dict[int, dict[str, Any]] = {}
    group: dict[str, Any] = {}
    for name, value in {**state.optimizer, **state.numbers}.items():
        index, key = name.split(".", 1)
        (group if index == "group" else values.setdefault(int(index), {}))[key] = value
    groups = [{**old, **group} for old in optimizer.state_dict()["param_groups"]]
    optimizer.load_state_dict({"state": values, "param_groups": groups})


def _remove(folder: Path) -> None:
    """Remove a folder that nobody needs; one that cannot be removed costs only its room."""
    with suppress(OSError):
        remove_tree(folder)


def _manifest(path: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        whole = all((path / name).stat().st_size == size for name, size in manifest["files"].items())
        if manifest["format"] == FORMAT and whole and isinstance(manifest["step"], int):
            return dict(manifest)
    return None
