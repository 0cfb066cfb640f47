"""A full memory while training, and a gradient that is no number: one message, with what was in it and what to do."""

import re
from collections.abc import Collection
from dataclasses import replace
from itertools import islice
from math import inf
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
from wangen.runtime.training.not_finite import refuse_not_finite
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

    def changes(
        options: Train, _model: Model, needed: Needed, _available: int | None, fixed: Collection[str]
    ) -> list[str]:
        assert set(fixed) == {"blocks_to_swap", "gradient_checkpointing_cpu_offload"}, "they take the host's memory"
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
    found, used = error.value.found.split("; ")
    assert found == f"out of memory at step 1, on {clip} (latents of 2x8x8)", "the largest of them"
    assert re.fullmatch(r"\d+\.\d GiB of the host's \d+\.\d were in use", used)
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


FULL = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes.")


def test_where_the_host_is_full_nothing_more_is_put_there(tiny_run: TinyRun, tmp_path: Path):
    """The file has two blocks, the model thirty; on a CPU what is swapped lies in the same memory."""
    plan = planned(tiny_run, tmp_path, checkpointing="none")
    with pytest.raises(WangenError) as error, out_of_memory.enough_memory_for(plan, CPU, "loading"):
        raise FULL
    assert re.fullmatch(r"out of memory loading; \d+\.\d GiB of the host's \d+\.\d were in use", error.value.found)
    assert error.value.cure == "give --quantize int8"


@pytest.mark.parametrize(
    ("flags", "cure"),
    [
        ({}, "close other programs"),
        ({"blocks_to_swap": 1, "gradient_checkpointing_cpu_offload": True},
         "close other programs or give --blocks_to_swap less than 1 or give --no_gradient_checkpointing_cpu_offload"),
    ],
)  # fmt: skip
def test_beside_a_gpu_less_is_put_there(tiny_run: TinyRun, tmp_path: Path, flags, cure):
    plan = planned(tiny_run, tmp_path, **flags)
    with pytest.raises(WangenError) as error, out_of_memory.enough_memory_for(plan, torch.device("cuda"), "loading"):
        raise FULL
    assert error.value.cure == cure


def test_no_more_blocks_are_to_be_swapped_than_the_file_has(tiny_run: TinyRun, tmp_path: Path, monkeypatch):
    plan, seen = planned(tiny_run, tmp_path), []
    monkeypatch.setattr(out_of_memory, "cheapest_changes", lambda _options, model, *_: seen.append(model) or ["--a"])
    out_of_memory._changes(plan, 16, 16, CPU, ())
    assert [model.transformer.num_layers for model in seen] == [2]


def test_a_gradient_that_is_no_number_is_told_with_the_timesteps(tiny_run: TinyRun, tmp_path: Path):
    run = Run(planned(tiny_run, tmp_path), None, CPU, [], Ranks())  # type: ignore[arg-type]
    record = {"step": 3, "names": ["a.png", "b.png"], "sigmas": [0.5, 0.889], "losses": [1.0, 2.0], "grad_norm": inf}
    with pytest.raises(WangenError) as error:
        refuse_not_finite(record, run)
    named = "a.png at timestep 500, b.png at timestep 889"
    assert error.value.found == f"the gradient is not finite at step 3, on {named}; no state was saved yet"
