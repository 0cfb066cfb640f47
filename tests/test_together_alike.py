"""What processes that train together have to decide alike, or they would wait for each other for ever."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import together as forked
from parity import VAE22
from test_together import losses
from tiny import TinyRun
from together import together, trained
from train_cases import TI2V, make_ti2v

from wangen.generator.errors import WRONG_USAGE
from wangen.runtime.training import parallel, ranks


@pytest.mark.slow
def test_a_given_frame_of_one_process_lets_none_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a picture no frame is given, so one process could pack where the other cannot, and would gather once."""
    monkeypatch.setattr(forked, "TIMEOUT_S", 60.0)
    cases = make_ti2v(tmp_path / "set")
    options = cases.options(
        tmp_path / "parts", dataset_config=cases.config("single", TI2V.replace("batch_size = 2", "batch_size = 1")),
        task="ti2v-5B",
        condition_frames=1, condition_dropout=0.5, pack=True, parallel="fsdp", gradient_accumulation_steps=2,
        max_train_steps=6,
    )  # fmt: skip
    trained(options, 2)
    one = replace(options, output_dir=tmp_path / "one", parallel="auto", gradient_accumulation_steps=4)
    trained(one, 1)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


@pytest.mark.slow
def test_samples_of_the_first_alone_keep_all_at_the_same_step(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """At steps where nothing is saved, judged or ends an epoch: only the first knows of the prompts."""
    monkeypatch.setattr(forked, "TIMEOUT_S", 60.0)
    prompts, config = tmp_path / "prompts.txt", tmp_path / "more.toml"
    prompts.write_text("a red square --w 32 --h 32 --f 1 --s 2\n", encoding="utf-8")
    text = tiny_run.dataset_config.read_text(encoding="utf-8")
    config.write_text(text.replace("[[datasets]]", "[[datasets]]\nnum_repeats = 4", 1), encoding="utf-8")
    options = tiny_run.options(tmp_path / "out", dataset_config=config, max_train_steps=4, sample_every_n_steps=1,
                               sample_prompts=prompts, vae=tiny_run.weights["vae"],
                               t5=tiny_run.weights["t5"])  # fmt: skip
    trained(options, 2)
    assert len(losses(tmp_path / "out")) == 4
    assert len(list((tmp_path / "out" / "samples").glob("*.png"))) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("way", "train_mode"), [("ddp", "lora"), ("fsdp", "lora"), ("fsdp", "full")])
def test_continuations_are_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, train_mode: str
):
    """The first process alone makes them, or all go along where each holds a part of the weights."""
    monkeypatch.setattr(forked, "TIMEOUT_S", 120.0)
    options = make_ti2v(tmp_path / "set").options(
        tmp_path / "two", task="ti2v-5B", condition_frames=5, validation_items=1, validation_timesteps=1,
        sample_continuations=1, continuation_steps=2, continuation_guidance=2.0, vae=VAE22, vae_dtype="float32",
        sample_every_n_steps=1, max_train_steps=3, learning_rate=1e-4, parallel=way, train_mode=train_mode,
    )  # fmt: skip
    trained(options, 2)
    one = replace(options, output_dir=tmp_path / "one", parallel="auto", gradient_accumulation_steps=2)
    trained(one, 1)
    found, wanted = (continued(folder) for folder in (tmp_path / "two", tmp_path / "one"))
    assert len(found) == len(wanted) == 3
    assert found == [pytest.approx(numbers, abs=0.01) for numbers in wanted]
    assert len(list((tmp_path / "two" / "samples").glob("*-continuation-1.mp4"))) == 3


def continued(folder: Path) -> list[list[float]]:
    """PSNR and SSIM of every continued frame, for each time."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clips = [line["continuations"]["clips"] for line in lines if "continuations" in line]
    return [[number for clip in one for values in clip["model"].values() for number in values] for one in clips]


def test_another_number_of_processes_is_told_how_to_make_the_same_steps(tiny_run: TinyRun, tmp_path: Path):
    options = tiny_run.options(tmp_path, max_train_steps=2, gradient_accumulation_steps=4)
    trained(options, 1)
    less = together(replace(options, gradient_accumulation_steps=2), 1)
    assert less.codes == [WRONG_USAGE]
    assert "--gradient_accumulation_steps 4 with 1 process makes steps of 4 batches" in less.told
    two = replace(options, max_train_steps=3)
    done = together(two, 2)
    assert done.codes == [WRONG_USAGE] * 2
    assert "--gradient_accumulation_steps 2 with 2 processes makes steps of 4 batches" in done.told
    trained(replace(two, gradient_accumulation_steps=2), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "named"), [
    ({"parallel": "fsdp"}, {"parallel": "ddp"}, "samples or settings that differ from those of process 0: parallel\n"),
    ({"parallel": "fsdp", "sample_prompts": "prompts.txt"}, {"parallel": "fsdp"},
     "samples or settings that differ from those of process 0: --sample_prompts\n"),
    ({}, {"output_dir": "elsewhere"}, "sees output folders that differ from those of process 0: --output_dir\n"),
])  # fmt: skip
def test_lines_that_would_wait_for_each_other_for_ever_are_refused(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first, second, named
):
    monkeypatch.setattr(forked, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(ranks, "SEEN_S", 1.0)
    (tmp_path / "prompts.txt").write_text("a red square --w 32 --h 32 --f 1 --s 2\n", encoding="utf-8")

    def line(changes):
        places = {name: tmp_path / value for name, value in changes.items() if name != "parallel"}
        return replace(tiny_run.options(tmp_path / "out", max_train_steps=2, vae=tiny_run.weights["vae"],
                                        t5=tiny_run.weights["t5"]), **{**changes, **places})  # fmt: skip

    done = together(line(first), 2, others=line(second))
    assert done.codes == [WRONG_USAGE] * 2
    assert named in done.told
    assert "Traceback" not in done.told
    assert not list((tmp_path / "out").glob(".shared-*"))


def test_machines_of_different_size_share_no_parts_within_each(tiny_run: TinyRun, tmp_path: Path):
    done = together(tiny_run.options(tmp_path, parallel="hsdp"), 3, on_each_machine=2)
    assert done.codes == [WRONG_USAGE] * 3
    assert "these have 1 and 2 processes" in done.told
    assert "give --parallel fsdp" in done.told


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "way"), [(2, "fsdp"), (3, "fsdp"), (4, "hsdp")])
def test_the_fullest_card_decides_how_all_hold_the_model(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, way: str
):
    """Of two machines; the last of which may have one card less."""
    monkeypatch.setattr(forked, "TIMEOUT_S", 60.0)
    alike = tiny_run.options(tmp_path / "alike")
    trained(alike, processes)
    monkeypatch.setattr(parallel, "free_bytes", lambda _device: 1 if os.environ["RANK"] == "1" else 2**40)
    on_each = 2 if processes > 2 else 0
    told = trained(replace(alike, output_dir=tmp_path / "auto"), processes, on_each_machine=on_each)
    assert f"--parallel auto: {way}" in told
    assert losses(tmp_path / "auto") == losses(tmp_path / "alike")
    none = replace(alike, output_dir=tmp_path / "none", checkpointing="none")
    refused = together(none, processes, on_each_machine=on_each)
    assert refused.codes == [WRONG_USAGE] * processes
    assert "in parts it does not go together with --checkpointing none" in refused.told
