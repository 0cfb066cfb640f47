"""What is missing from a run's folder, damaged in it or hostile is said on the page of the run, and never stops it."""

import json
import math
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from PIL import Image
from report_runs import Page, evaluation, page_of, spoiled, step_line, write_metrics
from safetensors.torch import save_file

from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import MakeReport
from wangen.runtime.evaluation_file import Video, write_evaluation
from wangen.runtime.report import make

pytest_plugins = ("report_fixtures",)


def test_a_folder_without_a_run_is_refused_and_gets_no_page(tmp_path):
    with pytest.raises(WangenError, match="no trace of a run"):
        make.run(MakeReport(output_dir=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"output_dir": Path("nowhere")}, "no such folder"),
        ({"output_name": "dogs"}, "no run 'dogs'"),
        ({"save_path": Path("page.safetensors")}, "an .html file"),
        ({"max_embed_mb": -1}, "0 or more"),
        ({"dataset_config": Path("a.toml"), "manifest": Path("a.jsonl")}, "contradict each other"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_written(tmp_path, changes, found):
    folder = write_metrics(tmp_path / "run", [step_line(1)])
    with pytest.raises(UsageError, match=found):
        make.run(MakeReport(**{"output_dir": folder, **changes}))
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_a_try_that_did_not_run_is_answered_with_the_try(tmp_path):
    folder = write_metrics(tmp_path / "run", [step_line(1)])
    with pytest.raises(UsageError, match="no try of a training is in this folder") as error:
        make.run(MakeReport(output_dir=folder, smoke=True).effective())
    assert (error.value.where, "--smoke first" in error.value.cure) == (str(folder), True)


@pytest.mark.parametrize("flag", ["dataset_config", "manifest"])
def test_a_dataset_that_is_given_and_not_there_is_said(tmp_path, caplog, flag):
    page_of(write_metrics(tmp_path / "run", [step_line(1)]))
    assert not caplog.text
    page_of(tmp_path / "run", **{flag: tmp_path / "gone.jsonl"})
    assert caplog.text.count(f"the dataset is not there: {tmp_path / 'gone.jsonl'}; check its path") == 1


def test_of_a_run_that_left_only_samples_there_is_a_page(tmp_path):
    (tmp_path / "samples").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "samples/cats-step00000010-1.png")
    assert "cats" in Page(page_of(tmp_path)).text
    with pytest.raises(UsageError, match="this folder has no run 'dogs'") as error:
        make.run(MakeReport(output_dir=tmp_path, output_name="dogs"))
    assert error.value.cure == "one of cats"


def test_a_lora_of_another_run_is_a_trace_of_that_one(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "cats-step00000010.safetensors")
    with pytest.raises(UsageError, match="this folder has no run 'dogs'") as error:
        make.run(MakeReport(output_dir=tmp_path, output_name="dogs"))
    assert error.value.cure == "one of cats"


def test_a_page_of_numbers_alone_says_what_it_does_not_know(tmp_path):
    folder = write_metrics(tmp_path, [step_line(step) for step in range(1, 4)], cut='{"step": 4, "lo')
    page = Page(page_of(folder))
    for words in ("Nothing is known of how good this LoRA is", "the last line of metrics.jsonl is cut short",
                  "not evaluated yet", "No samples were made", "give --dataset_config", "3 steps",
                  "Training has not written its settings yet"):  # fmt: skip
        assert words in page.text, words


def test_broken_files_are_named_and_do_not_stop_the_page(tmp_path):
    folder = write_metrics(tmp_path, [step_line(1)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('not json\n[1]\n{"no": "step"}\n')
    (folder / "train.report.json").write_text('{"step": "train", ')
    (folder / "evaluation.json").write_text('{"mean_base": "high"}')
    (folder / "cats.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    (folder / "samples").mkdir()
    (folder / "samples" / "samples.jsonl").write_text('{"file": "cats-step00000001-1.mp4"}\n{"fi')
    text = Page(page_of(folder)).text
    for words in ("metrics.jsonl has 3 lines that cannot be read", "train.report.json is no JSON", "evaluation.json:",
                  "cats.safetensors:", "the file is gone", "samples.jsonl has a line that cannot be read"):  # fmt: skip
        assert words in text, words


def test_numbers_that_are_not_finite_are_warned_of(tmp_path):
    lines = [step_line(step) for step in range(1, 30)]
    lines[4]["loss"], lines[20]["grad_norm"], lines[9]["data_wait_share"] = None, 50.0, 9.0
    lines[9]["s_per_step"] = 1.0
    text = Page(page_of(write_metrics(tmp_path, lines))).text
    for words in ("not finite at 1 step, first at step 5", "more than 20 times the usual", "waited for data"):
        assert words in text, words


def test_the_time_of_waiting_counts_not_the_steps_that_waited(tmp_path):
    """Pictures beside clips: many short steps that wait for half of their time are a moment of the whole."""
    lines = [step_line(step) for step in range(1, 11)]
    for number, line in enumerate(lines):
        line["s_per_step"], line["data_wait_share"] = (0.15, 0.5) if number % 2 else (8.0, 0.005)
    assert "waited for data" not in Page(page_of(write_metrics(tmp_path / "few", lines))).text
    for line in lines:
        line["data_wait_share"] = 0.25
    assert "waited for data 25%" in Page(page_of(write_metrics(tmp_path / "much", lines))).text


@pytest.mark.slow
def test_values_of_other_kinds_than_expected_never_stop_the_page(tmp_path, trained):
    """As a newer version, another program or a damaged disk may write them."""
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    reports = {path.name: json.loads(path.read_text()) for path in trained.glob("*.report.json")}
    for seed in range(40):
        rng = random.Random(seed)
        folder = write_metrics(tmp_path / str(seed), [spoiled(record, rng) for record in records])
        for name, report in reports.items():
            (folder / name).write_text(json.dumps(spoiled(report, rng)))
        (folder / "evaluation.json").write_text(json.dumps(spoiled(asdict(evaluation("lora")), rng)))
        (folder / "samples").mkdir()
        (folder / "samples" / "samples.jsonl").write_text(json.dumps(spoiled({"file": "lora-step00000001-1.png"}, rng)))
        (folder / "samples" / "lora-step00000001-1.png").write_bytes(b"no picture")
        assert Page(page_of(folder)).all("main"), seed


def test_files_outside_of_the_run_are_never_shown(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"\x89PNG secret")
    folder = write_metrics(tmp_path / "run", [step_line(1)])
    (folder / "samples").mkdir()
    (folder / "samples" / "cats-step00000001-1.png").symlink_to(secret)
    (folder / "samples" / "notes.txt").write_text("no picture")
    (folder / "samples" / "cats-step00000001-2.png").symlink_to("notes.txt")
    named = {"base": "../secret.png", "step 3": str(secret), "step 6": "metrics.jsonl"}
    write_evaluation(evaluation(videos=(Video("a", "b", 1, named),)), folder / "evaluation.json")
    page = Page(page_of(folder))
    assert not [image for image in page.all("img") if "src" in image]
    assert page.text.count("no picture or video inside this folder") == 3


@pytest.mark.parametrize("name", ["a\0.mp4", "loop.mp4", f"{'x' * 400}.mp4"])
def test_names_that_no_file_can_have_are_none(tmp_path, name):
    folder = write_metrics(tmp_path, [step_line(1), step_line(2, output_name="y" * 400)])
    (folder / "loop.mp4").symlink_to("loop.mp4")
    write_evaluation(evaluation(videos=(Video("a", "b", 1, {"base": name}),)), folder / "evaluation.json")
    settings = {"output_name": "cats", "dataset_config": name * 2, "log_file": name}
    (folder / "train.report.json").write_text(json.dumps({"step": "train", "ok": True, "settings": settings}))
    (folder / "samples").mkdir()
    listed = {"file": f"{'y' * 400}-step00000001-1.png"}
    (folder / "samples" / "samples.jsonl").write_text(json.dumps(listed))
    text = Page(page_of(folder, output_name="cats")).text
    assert "no picture or video inside this folder" in text
    assert "the dataset is not there" in text
    assert "the file is gone" in Page(page_of(folder)).text


def test_numbers_as_good_as_zero_are_drawn(tmp_path):
    lines = [step_line(1, loss=1e29), step_line(2, loss=1e-320, lr=5e-324, grad_norm=5e-324), step_line(3, lr=1e-320)]
    page = Page(page_of(write_metrics(tmp_path, lines)))
    assert "chart-grad-norm" in {attributes.get("id") for attributes in page.all("div")}


def test_numbers_of_a_run_are_of_all_its_starts_and_losses_of_each_expert(tmp_path):
    lines = [step_line(1, loss=2.0, expert="high"), step_line(2, loss=1.5, expert="high", s_per_step=1.5),
             step_line(1, loss=0.75, expert="low", tokens_per_s=1000.0, s_per_step=2.0)]  # fmt: skip
    folder = write_metrics(tmp_path, lines)
    last = {"first_loss": 2.0, "last_loss": 0.75, "seconds_training": 2.1, "speed": {"s_per_step": 2.0}}
    (folder / "train.report.json").write_text(json.dumps({"step": "train", "ok": True, "result": last}))
    text = Page(page_of(folder)).text
    for words in ("stephigh 2 to 1.5, low 0.75 to 0.75", "steps4.0 s", "step1.33", "second2500"):
        assert words in text
    (folder / "metrics.jsonl").unlink()
    text = Page(page_of(folder)).text
    assert all(words in text for words in ("step2 to 0.75", "steps2.1 s", "step2"))


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 10**400], ids=["nan", "inf", "huge"])
def test_times_that_nobody_can_read_are_left_out(tmp_path, seconds):
    folder = write_metrics(tmp_path, [step_line(1) | {"s_per_step": seconds}])
    report = {"step": "train", "ok": True, "settings": {"output_name": "cats"}, "timings": {"total_s": seconds}}
    (folder / "train.report.json").write_text(json.dumps(report))
    assert "seconds per step" not in Page(page_of(folder)).text
