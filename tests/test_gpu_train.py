"""The GPU benchmark runs without a GPU, in small sizes; the page about speed says what the code computes."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from diffusers import WanTransformer3DModel

from wangen import profiles
from wangen.generator.cards import CARDS
from wangen.generator.flops import step_flops
from wangen.generator.memory import GIB, MemorySettings, adapter_weights, block_bytes, outer_bytes, tokens_of
from wangen.generator.step_parts import Attention
from wangen.generator.train_values import Quantize
from wangen.runtime.memory.quantize import QuantLinear

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
PAGE = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def gpu_train() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("gpu_train")


@pytest.fixture(scope="module")
def random_run(gpu_train) -> Any:
    return sys.modules["random_run"]


# ---- the rows ----------------------------------------------------------------------------------------------------


def test_there_is_a_row_for_every_choice_and_the_flags_are_flags(gpu_train, random_run):
    rows = gpu_train.all_rows()
    flags = [row.flags for row in rows]
    assert {"sdpa", "flash", "flash3", "xformers", "sage"} == set(get_args(Attention)) - {"auto"}
    assert {f["attention"] for f in flags if "attention" in f} == set(get_args(Attention)) - {"auto"}
    assert {f["quantize"] for f in flags if "quantize" in f} == set(get_args(Quantize)) - {"none"}
    assert {f["checkpointing"] for f in flags if "checkpointing" in f} == {"none", "selective"}  # full is the default
    assert any(f.get("compile") for f in flags)
    assert any(f.get("plain") for f in flags)
    presets = {(row.task, row.flags["vram"]) for row in rows if row.group == "presets"}
    assert presets == {(name, str(gib)) for name in profiles.model_names() for gib in profiles.model(name).presets}
    for row in rows:
        random_run.options_of(profiles.model(row.task), row.flags, CPU)
    assert {row.group for row in rows if row.quick} == {row.group for row in rows}


ROWS = {
    "defaults": ("t2v-1.3B", {}),
    "the libraries' own": ("t2v-1.3B", {"plain": True}),
    "kept attention, offloaded": (
        "t2v-14B",
        {"checkpointing": "selective", "gradient_checkpointing_cpu_offload": True},
    ),
    "nothing recomputed": ("t2v-14B", {"checkpointing": "none"}),
    "quantised and swapped": ("t2v-14B", {"quantize": "int8", "blocks_to_swap": 40}),
    "a preset with images": ("flf2v-14B", {"vram": "24", "network_dim": 32}),
    "a preset of two experts": ("i2v-A14B", {"vram": "12", "network_dim": 16}),
    "a preset with clean frames": ("ti2v-5B", {"vram": "12", "network_dim": 32}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_measured_in_small(name, gpu_train):
    task, flags = ROWS[name]
    row = gpu_train.Row(group="test", task=task, clip=(832, 480, 81), flags=flags, batch=2)
    found = gpu_train.in_this_process(row, gpu_train.How(device=CPU, tiny=True, peak=1.0))
    assert 0 < found["s_per_step"] <= found["s_per_step_median"]
    assert found["tokens"] == 2 * 2 * 4 * 4  # items, latent frames, 4x4 tokens
    assert 0 < found["model_flops"] <= found["done_flops"]
    assert (found["model_flops"] == found["done_flops"]) == (flags.get("checkpointing") == "none")
    assert found["mfu"] == pytest.approx(found["model_flops"] / found["s_per_step"] / 1e12)
    assert 1 < found["loss"] < 10  # random weights, under which activations keep their size


@pytest.mark.slow
def test_edits_are_measured_in_small(gpu_train):
    row = gpu_train.Row(group="test", task="qwen-image-edit", clip=(1024, 1024, 1), batch=2,
                        flags={"vram": "24", "network_dim": 16})  # fmt: skip
    found = gpu_train.in_this_process(row, gpu_train.How(device=CPU, tiny=True, peak=1.0))
    assert found["tokens"] == 2 * 2 * 4 * 4  # items, the target and its control image, 4x4 tokens
    assert 0 < found["model_flops"] < found["done_flops"]
    assert 0.5 < found["loss"] < 10


@pytest.mark.slow
def test_choices_that_change_no_number_give_one_loss(gpu_train):
    def loss(**flags: Any) -> float:
        row = gpu_train.Row(group="test", task="t2v-14B", clip=(512, 512, 1), flags=flags)
        return gpu_train.measure(row, gpu_train.How(device=CPU, tiny=True))["loss"]

    plain = loss()
    assert loss(checkpointing="none") == loss(checkpointing="selective") == loss(blocks_to_swap=3) == plain
    assert plain != loss(quantize="nf4") == pytest.approx(plain, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("task", profiles.model_names())
def test_random_weights_are_as_many_and_as_wide_as_the_real_ones(task, random_run):
    """On the meta device in full size, where nothing has to be drawn."""
    model = profiles.model(task)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "normal_", lambda tensor, *_, **__: tensor)
        patch.setattr(torch, "Generator", lambda device: torch.default_generator)
        meta = torch.device("meta")
        found = random_run.random_transformer(model, torch.bfloat16, "none", meta, meta)
    held = sum(parameter.numel() * parameter.element_size() for parameter in found.parameters())
    assert held == outer_bytes(model) + model.transformer.num_layers * block_bytes(model, MemorySettings())


def test_a_quantised_model_is_quantised_in_its_blocks(gpu_train, random_run):
    _, model = gpu_train.shrunk(gpu_train.Row(group="test", task="i2v-14B", clip=(832, 480, 81)))
    found: WanTransformer3DModel = random_run.random_transformer(model, torch.bfloat16, "int8", CPU, CPU)
    names = {name for name, module in found.named_modules() if isinstance(module, QuantLinear)}
    linear = {name for name, module in found.named_modules() if isinstance(module, torch.nn.Linear)}
    assert names == {name for name in linear if name.startswith("blocks.")}
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in found.parameters())


# ---- the run over the rows ---------------------------------------------------------------------------------------


def test_a_row_that_fails_ends_nothing_and_is_in_the_table(gpu_train, tmp_path, monkeypatch, capsys):
    measured = {"attention": "sdpa", "s_per_step": 2.0, "s_per_step_median": 2.5, "tokens_per_s": 16380.0}
    measured |= {"mfu": 0.5, "limit_s": 1.5}
    answers = iter([{"device": "cpu"}, {"error": "does not fit: CUDA out of memory"}, *[measured] * 99])
    monkeypatch.setattr(gpu_train, "in_own_process", lambda *_: next(answers))
    gpu_train.main(["--device", "cpu", "--only", "attention", "--out", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    assert "does not fit: CUDA out of memory" in printed
    assert (
        "| --attention flash3 | sdpa, for flash3 does not run here | 2.000 | 2.500 | 16380 | 50 % | 1.500 |" in printed
    )
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["group"] for row in rows] == ["attention"] * 6
    assert "error" in rows[0]
    assert rows[1]["s_per_step"] == 2.0


def test_what_does_not_fit_is_an_answer(gpu_train, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(gpu_train, "measure", full)
    answer = gpu_train.in_this_process(gpu_train.all_rows()[0], gpu_train.How(device=CPU, tiny=True))
    assert answer == {"error": "does not fit: CUDA out of memory. Tried to allocate 2.00 GiB."}


def test_a_preset_is_held_to_its_card(gpu_train, monkeypatch):
    told = []
    card = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *arguments: told.append(arguments))
    for vram, device in ((12, "cuda"), (24, "cuda:1"), (96, "cuda")):
        gpu_train.hold_to(vram, torch.device(device))
    # 15/16 of the card, and half a GiB for CUDA itself
    assert told == [(pytest.approx(10.75 / 80), 0), (pytest.approx(22 / 80), 1), (1.0, 0)]


@pytest.mark.slow
def test_the_script_as_it_is_typed(gpu_train, tmp_path):
    out = tmp_path / "out.json"
    line = [sys.executable, str(ROOT / "benchmarks" / "gpu_train.py"), "--device", "cpu", "--tiny", "--quick"]
    line += ["--only", "swap,base", "--out", str(out)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280, check=True)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2
    assert all(row["s_per_step"] > 0 for row in rows)
    assert "| base | t2v-14B | 512x512x1 | --quantize int8 | sdpa |" in done.stdout


@pytest.mark.slow
def test_a_process_that_fails_or_ends_or_does_not_end_is_an_answer(gpu_train):
    how = gpu_train.How(device=CPU, tiny=True)
    broken = gpu_train.Row(group="test", task="t2v-14B", clip=(64, 64, 1), flags={"blocks_to_swap": 4, "plain": True})
    assert gpu_train.in_own_process(200, gpu_train.in_this_process, broken, how)["error"].startswith("RuntimeError: ")
    assert gpu_train.in_own_process(200, os._exit, 3) == {"error": "exit code 3"}
    assert gpu_train.in_own_process(200, gpu_train.in_this_process, None, how) == {"error": "exit code 1"}  # a mistake
    assert gpu_train.in_own_process(0.5, time.sleep, 100) == {"error": "not done after 0.5 s"}


# ---- docs/speed.md -----------------------------------------------------------------------------------------------


def rows_below(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading."""
    part = PAGE[PAGE.index(heading) :]
    lines = re.search(r"(?:^\|.*\n)+", part, re.MULTILINE)
    assert lines
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()][2:]


def sizes_in(cell: str) -> tuple[int, int, int]:
    width, height, frames = map(int, cell.split("x"))
    return width, height, frames


WORK = rows_below("## The work of a step")


@pytest.mark.parametrize("row", WORK, ids=lambda row: f"{row[0]} {row[1]}")
def test_the_page_says_the_work_that_the_log_counts(row):
    task, clip, tokens, none, selective, full, *limits = row
    model, size = profiles.model(task), sizes_in(clip)
    assert int(tokens.replace(",", "")) == tokens_of(model, size[:2], size[2])
    images = 257 if any(weights.flag == "clip" for weights in model.weights) else 0
    for mode, cell in (("none", none), ("selective", selective), ("full", full)):
        flops = step_flops(
            model.transformer, tokens_of(model, size[:2], size[2]), text_tokens=64, image_tokens=images,
            adapter_weights=adapter_weights(model, 32), checkpointing=mode,
        )  # fmt: skip
        assert float(cell) == pytest.approx(flops.done / 1e15, rel=0.01), mode
    for card, cell in zip(("H100", "RTX 4090", "RTX 3090"), limits, strict=True):
        assert float(cell) == pytest.approx(flops.done / (0.8e12 * CARDS[card].tflops), rel=0.02), card


PUBLISHED = {  # as it was agreed before the code: padded texts, an adapter on q, k, v and o, everything recomputed
    ("t2v-1.3B", "832x480x81"): 1.155,
    ("t2v-14B", "256x256x1"): 0.024,
    ("t2v-14B", "512x512x1"): 0.084,
    ("t2v-14B", "832x480x81"): 6.39,
    ("ti2v-5B", "1280x704x121"): 1.98,
}


@pytest.mark.parametrize("case", PUBLISHED, ids=" ".join)
def test_the_work_as_others_count_it_is_the_published_number(case):
    model, size = profiles.model(case[0]), sizes_in(case[1])
    adapter = model.transformer.num_layers * 8 * 32 * 2 * model.transformer.dim
    flops = step_flops(model.transformer, tokens_of(model, size[:2], size[2]), adapter_weights=adapter)
    assert flops.done / 1e15 == pytest.approx(PUBLISHED[case], rel=0.02)
    assert case in {(row[0], row[1]) for row in WORK}


def test_the_page_says_how_long_copies_of_swapped_blocks_take():
    for task, form, blocks, gigabytes, fast, slow in rows_below("## Block swap"):
        model = profiles.model(task)
        assert int(blocks) == model.transformer.num_layers
        copied = 2 * int(blocks) * block_bytes(model, MemorySettings(quantize={"bf16": "none"}.get(form, form))) / 1e9
        assert float(gigabytes) == pytest.approx(copied, rel=0.02)
        assert float(fast) == pytest.approx(copied / 25, rel=0.03)
        assert float(slow) == pytest.approx(copied / 12, rel=0.03)
