"""What is judged: LoRA files, or all checkpoints of a training run's folder, those of two experts in pairs."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from wangen.generator.errors import UsageError, WangenError, many
from wangen.generator.header_keys import EXPERT, JUDGED_AT
from wangen.generator.headers import read_header
from wangen.generator.lora_config import ADAPTER_FILE, is_safetensors, lora_file, lora_identity
from wangen.generator.run_names import EXPERTS
from wangen.generator.step_parts import require_try
from wangen.runtime.evaluation.tables import Candidate
from wangen.runtime.evaluation_file import BASE
from wangen.runtime.lora_folder import SavedLora, of_last_run, saved_loras

log = logging.getLogger("wangen")

HIGH_NOISE, LOW_NOISE = EXPERTS
FLAG = "--lora_weight"


def find_candidates(files: Sequence[Path], high_noise: Sequence[Path], *, experts: bool) -> list[Candidate]:
    """The checkpoints to judge, in the order of their steps; those with equal weights count once.

    Args:
        files: LoRA files, or folders of training runs.
        high_noise: for files, the other expert's LoRA of each; empty for folders.
        experts: the model has two.

    Raises:
        UsageError: the flags do not fit together, or the folder of a try is not there.
        WangenError: a folder holds no LoRA, or a file is none.
    """
    if high_noise and not experts:
        raise UsageError("--lora_weight_high_noise: this model has one transformer", cure="leave it out")
    if high_noise and len(high_noise) != len(files):
        raise UsageError(f"{many(len(files), 'file')} in {FLAG} and {len(high_noise)} in --lora_weight_high_noise",
                         cure="give one for each, or a training run's folder")  # fmt: skip
    found: list[Candidate] = []
    for number, path in enumerate(files):
        require_try(path, FLAG)
        if path.is_dir() and not high_noise:
            found += _of_run(path, experts=experts)
        elif high_noise:
            found.append(Candidate(path.stem, None, path, high_noise[number]))
        else:
            found.append(_of_one(path.stem, None, path, _expert_of(path) if experts else ""))
    return _distinct(found)


def _of_run(folder: Path, *, experts: bool) -> list[Candidate]:
    """The checkpoints of a run's folder; of two experts those of which both were saved, or all of one alone.

    Raises:
        WangenError: there is none, or none that belong together.
    """
    checkpoints = of_last_run(saved_loras(folder), folder)
    if not checkpoints:
        raise WangenError(f"{FLAG}: this folder holds no LoRA", where=str(folder), cure="name the LoRA's file")
    if not experts:
        return [Candidate(one.path.stem, one.step, one.path) for one in checkpoints]
    pairs: dict[str, dict[str, SavedLora]] = {}
    for one in checkpoints:
        before, _, after = one.path.stem.rpartition(f"_{one.expert}")
        pairs.setdefault((before + after) if one.expert else one.path.stem, {})[one.expert] = one
    whole = {name: pair for name, pair in pairs.items() if set(EXPERTS) <= set(pair)}
    alone = [one for name, pair in pairs.items() if name not in whole for one in pair.values()]
    if not whole and len({one.expert for one in alone}) == 1:
        return [_of_one(one.path.stem, one.run_step, one.path, one.expert or LOW_NOISE) for one in alone]
    if not whole:
        raise WangenError(f"{FLAG}: none of these LoRAs of two experts belong together", where=str(folder),
                          cure="name files with --lora_weight and --lora_weight_high_noise")  # fmt: skip
    if alone:
        log.warning("  left out, without one of the other expert: %s", ", ".join(one.path.name for one in alone))
    return [_of_pair(name, pair) for name, pair in whole.items()]


def _of_one(name: str, step: int | None, file: Path, expert: str) -> Candidate:
    """The LoRA of one expert, or of the only transformer; where there are two the other works without one."""
    if expert:
        log.warning("  %s is judged with the %s expert's LoRA alone: the other works without one", name,
                    expert.replace("_", "-"))  # fmt: skip
    return Candidate(name, step, None, file) if expert == HIGH_NOISE else Candidate(name, step, file)


def _expert_of(file: Path) -> str:
    """The expert that a file's header names; the low-noise one where none does."""
    return read_header(lora_file(file)).metadata.get(EXPERT, LOW_NOISE)


def _of_pair(name: str, pair: Mapping[str, SavedLora]) -> Candidate:
    """Both experts' LoRAs of one moment; of their best, which may be of two, the step of the later one."""
    low, high = pair[LOW_NOISE], pair[HIGH_NOISE]
    steps = tuple(one.run_step for one in (high, low) if one.run_step is not None)
    known = len(steps) == len(EXPERTS)
    return Candidate(name, max(steps) if known else None, low.path, high.path, steps if known else ())


def _identity(path: Path) -> str:
    """What tells a LoRA from others: numbers and header, but for how it was judged, which only a best one says."""
    file = lora_file(path)
    if file.name == ADAPTER_FILE or not is_safetensors(file):
        return lora_identity(path)
    header = read_header(file)
    told = {key: value for key, value in header.metadata.items() if key != JUDGED_AT}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    with file.open("rb") as stream:
        for name, info in sorted(header.tensors.items()):
            assert info.place
            stream.seek(info.place.offset)
            digest.update(f"{name} {info.dtype} {info.shape}".encode() + stream.read(info.place.num_bytes))
    return digest.hexdigest()


def _distinct(found: Sequence[Candidate]) -> list[Candidate]:
    """Without those whose weights are another's: `-best` is a copy of what was saved at its step.

    Raises:
        UsageError: two have one name.
    """
    kept: dict[str, Candidate] = {}
    for one in found:
        first = kept.setdefault(" ".join(map(_identity, one.files)), one)
        if first is not one:
            log.info("  %s has the weights of %s, and is not judged again", one.name, first.name)
    stems = [one.name for one in kept.values()]
    found = [replace(one, name=f"{one.files[0].parent.name}-{one.name}") if stems.count(one.name) > 1 else one
             for one in kept.values()]  # fmt: skip  # runs of one name in several folders
    names = [one.name for one in found]
    if BASE in names:
        raise UsageError(f"a LoRA is called {BASE}, as the model without one is", cure="rename the file")
    if double := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two LoRAs are called {double[0]}", cure="rename one of the files")
    return sorted(found, key=lambda one: (one.step is None, one.step or 0))
