"""What a training is refused for before its dataset is cached: by `check`, and by training that caches itself."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TinyRun

from wangen.generator.errors import UsageError, WangenError
from wangen.runtime import train
from wangen.runtime.training import before_caching

BROKEN = {
    "missing": ("1 missing", lambda state: state.pop("blocks.0.norm3.bias")),
    "more": ("1 unexpected", lambda state: state.update(other=torch.ones(3))),
    "another shape": ("1 of another shape", lambda state: state.update({"head.head.bias": torch.ones(3)})),
    "a form": ("stored as F8_E8M0", lambda state: state.update(
        {"blocks.0.ffn.0.weight": state["blocks.0.ffn.0.weight"].to(torch.float8_e8m0fnu)})),
    "a scale": ("a scale of shape", lambda state: state.update(
        {"blocks.0.ffn.0.weight": state["blocks.0.ffn.0.weight"].to(torch.float8_e4m3fn),
         "blocks.0.ffn.0.scale_weight": torch.ones(3)})),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_headers_say_is_refused_before_anything_is_cached(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
):
    words, change = BROKEN[case]
    given = tiny_run.options(tmp_path / "out", cache_mode="auto")
    assert given.dit is not None
    state = load_file(given.dit)
    change(state)
    save_file(state, tmp_path / "x.safetensors")
    options = replace(given, dit=tmp_path / "x.safetensors")
    before_caching.require_trainable(given, 3, {})
    with pytest.raises(WangenError, match=words) as refused:
        before_caching.require_trainable(options, 3, {})
    assert refused.value.where == str(options.dit)
    monkeypatch.setattr(train, "read_training_samples", lambda *_: pytest.fail("the dataset was read"))
    with pytest.raises(WangenError, match=words):
        train.run(options)
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer_args": ("foo=1",)}, "foo"),
        ({"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": "3", "lr_decay_steps": "3"}, "more than the run"),
    ],
)
def test_what_an_optimizer_or_a_short_schedule_refuses_is_told_before_anything_is_cached(
    tiny_run: TinyRun, tmp_path: Path, changes: dict[str, str], words: str
):
    options = replace(tiny_run.options(tmp_path), max_train_steps=2, device="cpu", **changes)
    with pytest.raises(UsageError, match=words):
        before_caching.require_trainable(options, 3, {})
    before_caching.require_trainable(replace(options, max_train_steps=9, optimizer_args=()), 3, {})
