"""What training would refuse after hours of caching is said by the first step of its script."""

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from shells.bundles import bundle
from tiny import TinyRun

from wangen.generator import check, scripts
from wangen.generator.check import run
from wangen.generator.steps import CacheLatents, Check

FACTORS = {f"diffusion_model.blocks.0.self_attn.q.lora_{half}.weight": shape
           for half, shape in (("A", (2, 256)), ("B", (256, 2)))}  # fmt: skip


@pytest.fixture
def found(tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The problems of a check in a script that caches and trains with some flags."""
    text = tiny_run.dataset_config.read_text(encoding="utf-8")
    config, script = tmp_path / "tiny.toml", tmp_path / "train_tiny.sh"
    config.write_text(text.replace((tiny_run.folder / "cache").as_posix(), (tmp_path / "cache").as_posix()))
    monkeypatch.setenv("WANGEN_SCRIPT", str(script))
    check = Check(dataset_config=config, task="t2v-1.3B", **tiny_run.weights)

    def problems(*, caches: bool = True, **changes: Any) -> list[str]:
        latents = CacheLatents(dataset_config=config, vae=tiny_run.weights["vae"])
        steps = (check, *([latents] if caches else []), tiny_run.options(tmp_path / "out", **changes))
        script.write_bytes(scripts.render(bundle("sh", steps), "sh", "train"))
        return run(check).result["problems"]

    return problems


def write_lora(folder: Path) -> Path:
    """A LoRA of rank 2."""
    save_file({name: torch.ones(shape) for name, shape in FACTORS.items()}, folder / "start.safetensors")
    return folder / "start.safetensors"


def test_nothing_is_wrong(found):
    assert found() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"include_patterns": ("atn1",)}, "--include_patterns 'atn1' finds no layer that would be trained"),
        ({"optimizer_type": "nowhere.Adam"}, "nowhere"),
        ({"blocks_to_swap": 30}, "--blocks_to_swap"),
        ({"network_weights": "start"}, "rank 2"),
        ({"sample_every_n_steps": 2}, "samples are asked for and there are no prompts"),
    ],
)
def test_what_training_would_refuse_is_found_before_the_first_caching(found, tmp_path, changes, words):
    if "network_weights" in changes:
        changes = {"network_weights": write_lora(tmp_path)}
    (problem,) = found(**changes)
    assert problem.startswith("train_tiny.sh, train: ")
    assert words in problem


@pytest.mark.parametrize(("epochs", "refused"), [(None, True), (1000, False)])
def test_a_schedule_is_judged_by_the_length_that_the_run_will_have(found, epochs, refused):
    """Epochs win over steps, and with them the dataset decides."""
    problems = found(max_train_steps=60, max_train_epochs=epochs, lr_warmup_steps=50, lr_decay_steps=50,
                     lr_scheduler="warmup_stable_decay")  # fmt: skip
    assert ["a warm-up of 50" in problem for problem in problems] == [True] * refused


@pytest.mark.parametrize("why", ["there is a cache", "nothing is cached"])
def test_where_training_is_near_it_speaks_for_itself(found, tmp_path, why):
    """It takes seconds to load what knows."""
    if why == "there is a cache":
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "an.entry").touch()
    assert found(include_patterns=("atn1",), caches=why == "there is a cache") == []


def test_most_of_a_cache_that_is_still_to_be_made_is_as_none(found, tmp_path, monkeypatch):
    """Caching that was broken off, or a dataset that has grown."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "an.entry").touch()
    monkeypatch.setattr(check, "sample_bytes", lambda *_: check.MUCH)
    (problem,) = found(include_patterns=("atn1",))
    assert "'atn1' finds no layer" in problem


@pytest.mark.parametrize(("free", "changes", "words"), [
    (4000, {"save_every_n_steps": 1}, "the checkpoints need up to"), (10**8, {}, ""),
    (10**8, {"max_train_steps": 10**6, "save_every_n_steps": 1}, "100.0 MB are free"),
    (10**8, {"max_train_steps": 10**6, "save_every_n_steps": 1, "keep_last": 2}, ""),
])  # fmt: skip
def test_a_disk_that_cannot_hold_the_checkpoints(found, tmp_path, monkeypatch, free, changes, words):
    usage = namedtuple("usage", "total used free")
    here = shutil.disk_usage
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - free, free)
                        if Path(path) == tmp_path else here(path))  # fmt: skip
    problems = found(**changes)
    assert [words in problem and "keep fewer (--keep_last)" in problem for problem in problems] == [True] * bool(words)
    assert not (tmp_path / "out").exists()


def test_the_card_is_not_asked(found):
    """Caching may run on a machine without the card that training has."""
    assert found(vram="auto") == []
    assert found(vram="24", compile=True, quantize="fp8") == []


def test_the_checkpoints_and_the_cache_share_a_disk(found, tmp_path, monkeypatch):
    """Either fits alone. A disk that is full, by word of the system: a real one would need the rights to mount it."""
    usage, free = namedtuple("usage", "total used free"), 3_100_000_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12 - free, free))
    monkeypatch.setattr(check, "sample_bytes", lambda *_: 10**9)
    assert found() == [], "three pictures, and a small LoRA"
    many = {"max_train_steps": 10**6, "save_every_n_steps": 1, "keep_last": 2000}
    (problem,) = found(**many)
    assert "the checkpoints need up to" in problem
    assert "the cache 3.0 GB, and 3.1 GB are free" in problem
    monkeypatch.setattr(check, "sample_bytes", lambda *_: 10**5)
    assert found(**many) == []
    free = 2_900_000_000
    monkeypatch.setattr(check, "sample_bytes", lambda *_: 10**9)
    (problem,) = found()
    assert "2.9 GB free, the cache needs about 3.0 GB" in problem
