"""Whole runs by CUDA graphs leave the bytes of runs without; on a stand-in, which has no GPU to hide what it reads."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import stand_in_graphs
import torch
from tiny import TinyRun
from train_cases import Changes, contents, cut_off, measured

from wangen.generator.errors import WangenError
from wangen.runtime import train
from wangen.runtime.fast import graphs
from wangen.runtime.fast.dit import FastWan
from wangen.runtime.fast.graphs import Graphs


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_graphs.stand_in(monkeypatch)


TRUTHFUL: Changes = {
    "max_train_steps": 16, "gradient_accumulation_steps": 2, "ema_decay": 0.9, "validation_items": 1,
    "validate_every_n_steps": 7, "save_every_n_steps": 2, "checkpointing": "full",
}  # fmt: skip


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs on the CPU have graphs as if they were on a GPU; what passes were replayed."""
    replayed: list[str] = []

    def with_graphs(model: FastWan, *words: Any, **names: Any) -> None:
        real(model, *words, **names)
        model._graphs = Graphs(model._transformer)

    real, forward, backward = FastWan.__init__, graphs.Recorded.run, graphs.Recorded.back
    monkeypatch.setattr(FastWan, "__init__", with_graphs)
    monkeypatch.setattr(graphs.Recorded, "run", lambda *words: replayed.append("forward") or forward(*words))
    monkeypatch.setattr(graphs.Recorded, "back", lambda *words: replayed.append("backward") or backward(*words))
    return replayed


def test_a_run_with_graphs_leaves_the_bytes_of_one_without_and_goes_on_to_them(
    tiny_run: TinyRun, tmp_path: Path, replays: list[str], monkeypatch: pytest.MonkeyPatch
):
    options = tiny_run.options(tmp_path / "whole", **TRUTHFUL)
    train.run(options)
    assert len(replays) > 20
    assert replays == ["forward", "backward"] * (len(replays) // 2)
    cut = dataclasses.replace(options, output_dir=tmp_path / "cut")
    cut_off(cut, 11)
    train.run(cut)
    replays.clear()
    monkeypatch.setattr(Graphs, "_graph_for", lambda *_: None)
    without = dataclasses.replace(options, output_dir=tmp_path / "without")
    train.run(without)
    assert not replays
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole") == contents(tmp_path / "without")
    assert measured(tmp_path / "without") == measured(tmp_path / "whole")


def test_a_step_that_finds_no_memory_beside_graphs_is_done_without_them(
    tiny_run: TinyRun, tmp_path: Path, replays: list[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    options = tiny_run.options(tmp_path / "roomy", **TRUTHFUL)
    train.run(options)
    replays.clear()
    real = graphs._Replayed.backward

    def full(ctx: Any, gradient: torch.Tensor) -> Any:
        if len(replays) > 3:
            raise torch.OutOfMemoryError
        return real(ctx, gradient)

    monkeypatch.setattr(graphs._Replayed, "backward", staticmethod(full))
    train.run(dataclasses.replace(options, output_dir=tmp_path / "full"))
    assert len(replays) == 5
    assert caplog.text.count("too little memory is left beside them") == 1
    assert contents(tmp_path / "full") == contents(tmp_path / "roomy")


def test_a_step_that_finds_no_memory_without_graphs_is_an_error(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tried = []

    def full(*_words: Any, **_names: Any) -> None:
        tried.append(1)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(FastWan, "__call__", full)
    with pytest.raises(WangenError, match="out of memory at step 1"):
        train.run(tiny_run.options(tmp_path))
    assert len(tried) == 1
