"""`--smoke`: a try of the whole job on a few items, which leaves the results of the whole job alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cached_bundle import Bundle, uncached, write_toml
from helpers import make_clip

from wangen import profiles
from wangen.generator.cli import main
from wangen.generator.errors import UsageError
from wangen.generator.steps import CheckCache, Train
from wangen.generator.train_refusals import refuse_flags
from wangen.runtime.samples import read_samples
from wangen.runtime.training import checkpoint
from wangen.runtime.training.refusals import refuse
from wangen.runtime.training.schedules import make_schedule

pytest_plugins = ("bundle_fixtures",)
MODEL = profiles.model("t2v-1.3B")


def train_line(bundle: Bundle, *more: str) -> list[str]:
    line = ["train", "--dataset_config", str(bundle.toml), "--dit", str(bundle.models["dit"]), "--task", "t2v-1.3B"]
    line += ["--output_dir", str(bundle.folder / "out"), "--output_name", "cats", "--network_dim", "2"]
    line += ["--network_alpha", "2", "--mixed_precision", "no", "--log_with", "none", "--device", "cpu"]
    return [*line, "--report_dir", str(bundle.folder / "out"), "--max_train_epochs", "1", *more]


def report(folder: Path) -> dict:
    return json.loads((folder / "train.report.json").read_text(encoding="utf-8"))


def test_at_most_eight_items_of_every_block_in_turn(unbroken, tmp_path):
    bundle = uncached(unbroken, tmp_path)
    for number in range(3):
        make_clip(tmp_path / "clips" / f"{number}.mp4", 9, seed=number + 1)
        (tmp_path / "clips" / f"{number}.txt").write_text("a clip", encoding="utf-8")
    write_toml(bundle, 32)
    samples = read_samples(CheckCache(dataset_config=bundle.toml, smoke=True), MODEL)
    names = [sample.item.path.name for sample in samples]
    assert names == ["000.png", "001.png", "002.png", "003.png", "004.png", "0.mp4", "1.mp4", "2.mp4"]
    assert len(read_samples(CheckCache(dataset_config=bundle.toml), MODEL)) == 73


@pytest.mark.slow
def test_a_try_of_a_whole_job_and_the_job_after_it(unbroken, tmp_path):
    bundle = uncached(unbroken, tmp_path)
    assert bundle.latents("--smoke")["computed"] == 8
    assert bundle.text("--smoke")["computed"] == 9  # with the empty prompt
    assert bundle.check("--smoke") == 0
    assert bundle.check() == 1
    assert main(train_line(bundle, "--smoke", "--save_every_n_epochs", "1")) == 0
    tried = bundle.folder / "out" / "smoke"
    assert (tried / "cats.safetensors").is_file()
    assert report(tried)["summary"].startswith("50 steps")
    assert [path.name for path in (bundle.folder / "out").iterdir()] == ["smoke"]
    # The whole job goes on from the entries that are there, and knows nothing of the try's training.
    assert bundle.latents()["from_cache"] == 8
    assert bundle.text()["from_cache"] == 9
    assert main(train_line(bundle)) == 0
    assert report(bundle.folder / "out")["summary"].startswith("70 steps")
    assert checkpoint.newest(bundle.folder / "out" / "cats-state")


def test_a_try_after_the_job_removes_nothing_and_starts_from_step_0(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, smoke=True, max_train_epochs=2)
    small = options.effective()
    assert isinstance(small, Train)
    assert (small.output_dir, small.max_train_steps, small.max_train_epochs) == (tmp_path / "smoke", 50, None)
    assert small.fresh
    assert tiny_run.options(tmp_path).effective() == tiny_run.options(tmp_path)


def test_caching_under_smoke_keeps_the_entries_of_the_others(unbroken, tmp_path):
    bundle = uncached(unbroken, tmp_path)
    bundle.latents()
    before = bundle.files()
    (bundle.photos / "000.txt").write_text("another picture", encoding="utf-8")
    assert bundle.latents("--smoke")["removed"] == 0
    assert bundle.files() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"resume": Path("x")},
        {"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": "100", "lr_decay_steps": "400"},
        {"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": "0.9", "lr_decay_steps": "1%"},
    ],
    ids=str,
)
def test_a_try_takes_the_line_of_a_whole_job(tiny_run, tmp_path, changes):
    small = tiny_run.options(tmp_path, smoke=True, max_train_steps=2000, **changes).effective()
    assert isinstance(small, Train)
    refuse(replace(small, quantize="none", checkpointing="none"), MODEL, torch.device("cpu"))
    for steps in (1, small.max_train_steps):  # one expert of two may have few
        make_schedule(small, steps)


def test_a_try_holds_fewer_items_out_and_gives_each_expert_a_step(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, smoke=True, validation_items=8, high_noise_share=0.001, sample_continuations=4)
    small = options.effective()
    assert small.sample_continuations == 1
    assert (small.validation_items, round(small.high_noise_share * 50)) == (4, 1)
    assert replace(options, validation_items=2, high_noise_share=0.5).effective().validation_items == 2


@pytest.mark.parametrize("changes", [{"lr_warmup_steps": "soon"}, {"lr_decay_steps": "0"}, {"lr_decay_steps": "nan"}])
def test_a_try_finds_what_is_wrong_with_a_schedule(tiny_run, tmp_path, changes):
    given = {"lr_scheduler": "warmup_stable_decay", "lr_decay_steps": "20", **changes}
    small = tiny_run.options(tmp_path, smoke=True, **given).effective()
    with pytest.raises(UsageError):
        refuse_flags(small)
