"""Held-out losses of the base and of every checkpoint at the same points; what was judged before is read again."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wangen.generator.files import write_text
from wangen.generator.lora_config import lora_identity
from wangen.runtime.cache import digest
from wangen.runtime.denoising import Velocity
from wangen.runtime.evaluation.tables import Candidate, joined, name_of
from wangen.runtime.loader import CachedSample
from wangen.runtime.progress import progress
from wangen.runtime.sampling.sampler import ExpertWeights, Lora, Sampler
from wangen.runtime.training.prepared import Prepared
from wangen.runtime.training.validation import Losses, measure, stratified_sigmas

LORAS_AT_ONCE = 8
"""In memory beside the base; more of them are judged by loading the base again."""

RECIPE = 1
"""Of what a stored loss depends on beside what its key says."""

Load = Callable[[Sequence[ExpertWeights]], Sampler]
Errors = Callable[[Velocity, Prepared], torch.Tensor]


@dataclass(frozen=True)
class Points:
    """Where a model is judged.

    Attributes:
        num_timesteps: in the range of each expert.
        boundary: the sigma between two experts; None of one transformer.
        seed: of the noise.
        condition_frames: first frames that are given clean (TI2V).
    """

    num_timesteps: int
    boundary: float | None
    seed: int
    condition_frames: int

    def sigmas(self, *, high_noise: bool) -> tuple[float, ...]:
        """Those of an expert, or of the only transformer."""
        if self.boundary is None:
            return stratified_sigmas(0.0, 1.0, self.num_timesteps)
        low, high = (self.boundary, 1.0) if high_noise else (0.0, self.boundary)
        return stratified_sigmas(low, high, self.num_timesteps)


class Judging:
    """Losses of models on sets of items.

    Args:
        load: makes a sampler of transformers with LoRAs.
        experts: the transformers; of two the high-noise one first.
        errors: the plain mean squared errors of one batch.
        points: where.
        facts: what decides a loss beside items and LoRA: digests of the weights, precision, versions of libraries.
        folder: keeps what was judged.
    """

    def __init__(
        self,
        load: Load,
        experts: Sequence[ExpertWeights],
        errors: Errors,
        points: Points,
        facts: Mapping[str, Any],
        folder: Path,
    ) -> None:
        self._load, self._experts, self._errors, self._points = load, experts, errors, points
        self._facts, self._folder = facts, folder

    def losses(
        self, candidates: Sequence[Candidate], sets: Mapping[str, Sequence[CachedSample]]
    ) -> dict[str, dict[str, Losses]]:
        """For each set the losses of `base` and of every candidate.

        Raises:
            WangenError: weights do not fit, memory or the disk is full; what was judged until then is kept.
        """
        everyone: list[Candidate | None] = [None, *candidates]
        found = {name: {name_of(who): self._known(who, items) for who in everyone} for name, items in sets.items()}
        left = [who for who in everyone if any(known[name_of(who)] is None for known in found.values())]
        todo = sum(len(items) for name, items in sets.items() for who in left if found[name][name_of(who)] is None)
        with progress("judging", todo * len(self._experts)) as advance:
            for start in range(0, len(left), LORAS_AT_ONCE):
                some = left[start : start + LORAS_AT_ONCE]
                sampler = self._load([self._wearing(expert, some) for expert in self._experts])
                for who in some:
                    for name, items in sets.items():
                        if found[name][name_of(who)] is None:
                            found[name][name_of(who)] = self._measure(sampler, who, items, lambda _: advance(1, ""))
                del sampler  # before the next one loads
        return {
            name: {who: losses for who, losses in each.items() if losses is not None} for name, each in found.items()
        }

    def _wearing(self, expert: ExpertWeights, some: Iterable[Candidate | None]) -> ExpertWeights:
        return replace(expert, loras=loras_of(some, high_noise=expert.high_noise))

    def _measure(
        self, sampler: Sampler, who: Candidate | None, items: Sequence[CachedSample], on_item: Callable[[str], None]
    ) -> Losses:
        sampler.switch(strengths_of(who))
        parts = []
        for expert, loaded in zip(self._experts, sampler.experts, strict=True):
            loaded.enter()
            judge = partial(self._errors, loaded.velocity)
            sigmas = self._points.sigmas(high_noise=expert.high_noise)
            given = self._points.condition_frames
            parts.append(measure(judge, items, sigmas, self._points.seed, condition_frames=given, on_item=on_item))
        losses = joined(parts)
        write_text(self._file(who, items), json.dumps(losses.as_facts()) + "\n")
        return losses

    def _known(self, who: Candidate | None, items: Sequence[CachedSample]) -> Losses | None:
        """What an earlier run has found, if it can be read."""
        with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
            losses = Losses.from_facts(json.loads(self._file(who, items).read_text(encoding="utf-8")))
            if len(losses.values) == len(items) and {len(row) for row in losses.values} == {len(losses.sigmas)}:
                return losses
        return None

    def _file(self, who: Candidate | None, items: Sequence[CachedSample]) -> Path:
        points = self._points
        about = {
            **self._facts,
            "recipe": RECIPE,
            "loras": [lora_identity(path) for path in (who.files if who else ())],
            "items": [[entry.key for entry in item.entries] for item in items],
            "points": [points.num_timesteps, points.boundary, points.seed, points.condition_frames],
        }
        return self._folder / f"{digest(about)}.json"


def loras_of(some: Iterable[Candidate | None], *, high_noise: bool) -> tuple[Lora, ...]:
    """The adapters of an expert, named by their candidates; a candidate without one for it leaves it as it is."""
    files = ((adapter_name(who), who.file_high_noise if high_noise else who.file) for who in some if who)
    return tuple(Lora(name, path) for name, path in files if path)


def strengths_of(who: Candidate | None) -> dict[str, float]:
    """What makes a sampler the candidate, or the base."""
    return {adapter_name(who): 1.0} if who else {}


def adapter_name(who: Candidate) -> str:
    """A candidate's name for peft, which takes no dots."""
    return f"lora-{digest(who.name)}"
