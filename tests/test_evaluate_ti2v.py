"""`evaluate` of TI2V-5B: judged with the first frames that its LoRAs were trained with."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from train_cases import make_ti2v

from wangen import profiles
from wangen.generator.errors import UsageError
from wangen.generator.header_keys import FINGERPRINT
from wangen.generator.steps import Evaluate, Generate
from wangen.runtime import evaluate, train
from wangen.runtime.evaluation import prompts
from wangen.runtime.evaluation.tables import by_activity
from wangen.runtime.evaluation.trained import given_frames
from wangen.runtime.evaluation_file import read_evaluation
from wangen.runtime.training.validation import Losses


def lora(path: Path, **fingerprint: str) -> Path:
    """A file with nothing but a header that says how it was trained."""
    told = {FINGERPRINT: json.dumps(fingerprint)} if fingerprint else None
    save_file({"blocks.0.lora_A.weight": torch.zeros(1, 1)}, path, told)
    return path


def test_the_headers_tell_the_first_frames(tmp_path):
    five, again = (lora(tmp_path / f"{name}.safetensors", condition_frames="5") for name in ("five", "again"))
    assert given_frames([five, again, lora(tmp_path / "foreign.safetensors")]) == 5
    assert given_frames([lora(tmp_path / "none.safetensors", condition_frames="0")]) == 0
    assert given_frames([lora(tmp_path / "odd.safetensors", condition_frames="a few")]) is None
    with pytest.raises(UsageError, match=r"five\.safetensors with 5, other\.safetensors with 1") as refused:
        given_frames([five, lora(tmp_path / "other.safetensors", condition_frames="1")])
    assert "--condition_frames N" in refused.value.cure


def test_each_clip_without_a_caption_is_shown_by_its_first_frame(tmp_path, monkeypatch):
    """As all clips of the raw world-model data are."""
    picture = tmp_path / "first.png"
    Image.new("RGB", (64, 64)).save(picture)
    monkeypatch.setattr(prompts, "_first_frame", lambda _item, _folder: picture)
    told = SimpleNamespace(caption="", label="", controls=())
    items = [
        SimpleNamespace(key=key, controls=(), sample=SimpleNamespace(
            name=key, item=told, entry=SimpleNamespace(background_color="#ffffff"))) for key in ("a", "b")
    ]  # fmt: skip
    sampling = Generate(dit=tmp_path, vae=tmp_path, t5=tmp_path, save_path=tmp_path, seed=1, video_size=(64, 64))
    found = prompts.choose_prompts(sampling, profiles.model("ti2v-5B"), items, 8, tmp_path)  # type: ignore[arg-type]
    assert [(activity, one.prompt, one.image) for activity, one in found] == [("", "", picture)] * 2
    with pytest.raises(UsageError, match="the caption of a is empty"):
        prompts.choose_prompts(sampling, profiles.model("t2v-1.3B"), items, 8, tmp_path)  # type: ignore[arg-type]


def test_clips_without_label_and_caption_make_no_row_of_an_activity():
    losses = Losses(("a", "b", "c"), (0.5,), 1, ((1.0,), (2.0,), (4.0,)))
    assert [(row.name, row.base) for row in by_activity(losses, {"x": losses}, ["", "run", ""])] == [("run", 2.0)]


@pytest.mark.slow
def test_the_loss_is_that_of_the_training(tmp_path):
    cases = make_ti2v(tmp_path)
    config = tmp_path / "rich.toml"
    options = cases.options(
        tmp_path / "out", task="ti2v-5B", condition_frames=5, max_train_steps=1, validation_config=config,
        validation_timesteps=2, validate_every_n_steps=1, seed=42,
    )  # fmt: skip
    train.run(options)
    lines = map(json.loads, (tmp_path / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    own = [line["validation"]["mean_base"] for line in lines if "validation" in line][-1]
    judge = Evaluate(
        **cases.weights, dataset_config=config, lora_weight=(tmp_path / "out",), task="ti2v-5B", num_videos=0,
        validation_timesteps=2, device="cpu", output_dir=tmp_path / "judged",
    )  # fmt: skip
    evaluate.run(judge)
    assert read_evaluation(tmp_path / "judged/evaluation.json").mean_base == pytest.approx(own, rel=1e-5)
    evaluate.run(Evaluate(**{**vars(judge), "condition_frames": 1}))
    assert read_evaluation(tmp_path / "judged/evaluation.json").mean_base != pytest.approx(own, rel=1e-3)
