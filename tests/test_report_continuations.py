"""What the page of a run says of continuations of held-out clips."""

import json
import random
from pathlib import Path

import pytest
from helpers import make_clip
from report_runs import HOSTILE, Page, continuation_line, page_of, spoiled, step_line, write_metrics

from wangen.runtime.report.continuing import continuation_charts, continuation_table
from wangen.runtime.report.media import media_of_run
from wangen.runtime.report.run_files import read_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that continued two clips at two steps, and sampled a prompt."""
    lines = [step_line(1), step_line(2), continuation_line(2), step_line(3), continuation_line(3, 22.0)]
    made = write_metrics(tmp_path / "run", lines)
    listed = []
    for step in (2, 3):
        for name in ("continuation-1", "continuation-2", "1"):
            file = make_clip(made / "samples" / f"cats-step{step:08d}-{name}.mp4", num_frames=9)
            told = {"continues": HOSTILE, "given_frames": 5} if "-" in name else {}
            listed.append({"file": file.name, "prompt": "a wave", "width": 64, "height": 48, **told})
    (made / "samples" / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in listed))
    return made


def test_curves_are_by_frame_at_the_last_step_and_by_step(folder):
    charts = {chart.key: chart for chart in continuation_charts(read_run(folder, None).records)}
    assert list(charts) == ["continued-psnr-frames", "continued-ssim-frames", "continued-psnr", "continued-ssim"]
    frames = {line.name: list(line.points) for line in charts["continued-psnr-frames"].lines}
    assert frames["continuation"] == [(5, 22.0), (6, 21.0), (7, 20.0), (8, 19.0)]
    assert frames["the VAE itself"] == [(frame, 30.0) for frame in range(5, 9)]
    assert frames["last given frame, repeated"] == [(frame, 15.0) for frame in range(5, 9)]
    steps = {line.name: list(line.points) for line in charts["continued-psnr"].lines}
    assert steps["continuation"] == [(2, 18.75), (3, 20.75)]
    assert (charts["continued-psnr"].unit, charts["continued-ssim"].unit) == ("dB", "")
    assert charts["continued-psnr-frames"].x_name == "frame"


def test_the_table_has_each_clip_and_all_together(folder):
    table = continuation_table(read_run(folder, None).records)
    assert table
    assert "at step 3" in table.caption
    assert [list(row) for row in table.rows] == [
        ["walk.mp4:0+9", "5", "20.50", "15.00", "30.00", "0.750", "0.500", "0.900"],
        ["wave.mp4:0+9", "5", "21.00", "15.00", "30.00", "0.750", "0.500", "0.900"],
        ["all clips", "", "20.75", "15.00", "30.00", "0.750", "0.500", "0.900"],
    ]
    assert table.head[2:] == ("PSNR", "repeated frame", "VAE", "SSIM", "repeated frame", "VAE")


def test_the_page_has_a_section_of_them_with_their_videos(folder):
    page = Page(page_of(folder))
    sections = [attributes["id"] for attributes in page.all("section")]
    assert sections[:4] == ["verdict", "training", "continuations", "samples"]
    blocks = [attributes["id"] for attributes in page.all("div") if "id" in attributes]
    ours = blocks[blocks.index("chart-continued-psnr-frames") : blocks.index("sample-1")]
    assert ours == ["chart-continued-psnr-frames", "chart-continued-ssim-frames", "chart-continued-psnr",
                    "chart-continued-ssim", "continued-1", "continuation-1", "continuation-2"]  # fmt: skip
    assert len(page.all("video")) == 6
    assert HOSTILE in page.text
    assert "continuation of 5 given frames" in page.text
    names = [path.name for path in media_of_run(read_run(folder, None))]
    assert len(names) == 6
    assert names[0].startswith("cats-step00000003")


def test_without_them_there_is_no_such_section(tmp_path):
    assert "Continuations" not in Page(page_of(write_metrics(tmp_path, [step_line(1)]))).text


def test_videos_alone_and_numbers_alone_are_shown(folder):
    (folder / "metrics.jsonl").write_text(json.dumps(step_line(3)) + "\n")
    assert "continuation of 5 given frames" in Page(page_of(folder)).text
    write_metrics(folder, [step_line(3), continuation_line(3)])
    for path in (folder / "samples").iterdir():
        path.unlink()
    text = Page(page_of(folder)).text
    assert "PSNR of each frame" in text
    assert "walk.mp4:0+9" in text


@pytest.mark.slow
def test_values_of_other_kinds_than_expected_never_stop_the_page(tmp_path):
    for seed in range(60):
        rng = random.Random(seed)
        lines = [step_line(1), spoiled(continuation_line(1), rng), spoiled(continuation_line(2), rng)]
        assert Page(page_of(write_metrics(tmp_path / str(seed), lines))).all("main"), seed
