"""The whole way on real footage: raw video, clips, bundle, the emitted script, the evaluation, the page."""

import json
import os
import shutil
from pathlib import Path

import pytest
from helpers import run_script
from tiny_weights import write_tiny_wan

from wangen.generator.cli import main
from wangen.generator.prepare_steps import Preprocess
from wangen.runtime import preprocess
from wangen.runtime.evaluation_file import read_evaluation

BUNNY = Path(__file__).parents[1] / "examples/dataset/big-buck-bunny.mp4"
WORKSPACE = """
model = "t2v-1.3B"
resolution = [64, 64]
num_frames = 5
platforms = ["linux"]

[steps.train]
max_train_steps = 12
max_train_epochs = 3
save_every_n_epochs = 1
learning_rate = 1e-2
network_dim = 4
validation_items = 2
validation_timesteps = 2
log_with = ["none"]

[steps.evaluate]
validation_timesteps = 2
infer_steps = 2
guidance_scale = 1.0
num_prompts = 1
video_size = [64, 64]
video_length = 5
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the bundle is Linux's")
def test_from_raw_video_to_a_judged_lora(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    shutil.copyfile(BUNNY, raw / "bunny.mp4")
    (raw / "bunny.txt").write_text("a rabbit in a meadow", encoding="utf-8")
    clips = tmp_path / "clips"
    found = preprocess.run(
        Preprocess(videos=raw, output=clips, resolution="64x64", frames=5, task="t2v-1.3B", keep_all=True)
    )
    assert found.ok
    rows = [json.loads(line) for line in (clips / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 3
    (tmp_path / "wangen.toml").write_text(WORKSPACE, encoding="utf-8")
    assert main(["publish", "bunny", "--workspace", str(tmp_path), "--source", str(clips / "train.jsonl")]) == 0
    bundle = tmp_path / "published" / "linux"
    write_tiny_wan(bundle / "models", ["a rabbit in a meadow"])
    said = run_script(bundle, "train_bunny.sh")
    outputs = bundle / "outputs" / "bunny"
    judged = read_evaluation(outputs / "evaluation.json")
    assert {one.name for one in judged.checkpoints} == {"bunny-000001", "bunny-000002", "bunny"}
    assert judged.winner.mean_loss < judged.mean_base
    assert judged.num_items == 2
    page = outputs / "report.html"
    assert str(page.name) in said
    text = page.read_text(encoding="utf-8")
    assert judged.best in text
    assert "a rabbit in a meadow" in text
    assert text.count("data:video/mp4;base64,") >= 2
    assert "already trained" in run_script(bundle, "train_bunny.sh")
