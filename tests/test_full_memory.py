"""A full memory while training: one message, with changes for all that was in it."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import planned
from tiny import TinyRun

from wangen.generator.errors import WangenError
from wangen.generator.launch import Launch
from wangen.generator.memory import MemoryBudget, MemorySettings
from wangen.generator.memory_changes import Needed
from wangen.generator.steps import Train
from wangen.profiles import Model, model
from wangen.runtime.loader import Batch
from wangen.runtime.training import out_of_memory
from wangen.runtime.training.prepared import Group, groups
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.run import Run

CPU = torch.device("cpu")
SECOND = Ranks(Launch(1, 2, 1))


def test_a_full_memory_of_a_process_without_a_batch_is_said(tiny_run: TinyRun, tmp_path: Path):
    run = Run(planned(tiny_run, tmp_path), None, CPU, [], SECOND)  # type: ignore[arg-type]
    group = Group(0, [], 0, 2)
    with pytest.raises(WangenError, match="at step 1"), out_of_memory.enough_memory_for_steps(run, group):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("pack", [False, True])
def test_the_changes_are_for_all_that_a_pass_holds(tiny_run: TinyRun, tmp_path: Path, monkeypatch, pack):
    """Two pictures of 16 tokens and a clip of 32; packed they go through a step together."""
    plan = planned(tiny_run, tmp_path, pack=pack, gradient_accumulation_steps=3)
    (group,) = islice(groups(plan, plan.experts[0], 0, Ranks(), pin=False), 1)
    asked: list[int] = []

    def changes(options: Train, _model: Model, needed: Needed, _available: int | None) -> list[str]:
        needed(options)
        return ["--a"]

    def of_tokens(_model: Model, _settings: MemorySettings, *, tokens: int) -> MemoryBudget:
        asked.append(tokens)
        return MemoryBudget({}, 0)

    monkeypatch.setattr(out_of_memory, "cheapest_changes", changes)
    monkeypatch.setattr(out_of_memory, "memory_plan", of_tokens)
    run = Run(plan, None, CPU, [SimpleNamespace(step=0)])  # type: ignore[arg-type, list-item]
    with pytest.raises(WangenError, match="give --a") as error, out_of_memory.enough_memory_for_steps(run, group):
        raise torch.OutOfMemoryError
    (clip,) = [one.batch.names[0] for one in group.batches if one.noise.shape[2] > 1]
    assert error.value.found == f"out of memory at step 1, on {clip} (latents of 2x8x8)", "the largest of them"
    twice = [replace(one, sample=replace(one.sample, entry=replace(one.sample.entry, batch_size=2)))
             for one in plan.samples]  # fmt: skip
    for samples in (plan.samples, twice):
        with (
            pytest.raises(WangenError),
            out_of_memory.enough_memory_for(replace(plan, samples=samples), CPU, "loading"),
        ):
            raise torch.OutOfMemoryError
    assert asked == ([64, 32, 64] if pack else [32, 32, 64])


@pytest.mark.parametrize(("name", "tokens"), [("t2v-1.3B", 16), ("qwen-image", 16 + 7)])
def test_rows_of_text_count_where_they_go_through_the_blocks(name: str, tokens: int):
    batch = Batch(torch.zeros(1, 16, 1, 8, 8), [torch.zeros(7, 3)], ["a"], ["a"], torch.ones(1))
    assert out_of_memory._tokens_of(batch, model(name)) == tokens
