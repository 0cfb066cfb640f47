"""`wangen report`: the page of a run, hostile texts in it, its charts and their log; without a browser."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from helpers import make_clip
from PIL import Image
from report_runs import HOSTILE, Page, page_of, step_line, validation_line, write_metrics
from tiny import TinyRun

from wangen.generator.cli import main
from wangen.runtime import train
from wangen.runtime.report.charts import make_charts
from wangen.runtime.report.metrics_log import MetricsLog
from wangen.runtime.report.page import sample_facts
from wangen.runtime.report.run_files import Sample, read_run
from wangen.runtime.report.run_numbers import numbers
from wangen.runtime.report.tables import plan_numbers

ROOT = Path(__file__).parent.parent

pytest_plugins = ("report_fixtures",)


def addresses(page: Page) -> list[str]:
    """Whatever a browser could fetch."""
    return [attributes[name] for _, attributes in page.tags for name in ("src", "href", "srcset", "action", "poster")
            if name in attributes and not attributes[name].startswith("#")]  # fmt: skip


# ---- a run that was trained --------------------------------------------------------------------------------------


def test_a_page_of_a_trained_run_is_one_file_with_all_of_it(trained):
    page = Page(page_of(trained))
    assert all(address.startswith("data:") for address in addresses(page))
    assert len(page.all("script")) == 1
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {attributes["id"] for attributes in page.all("section")} == {
        "verdict", "training", "samples", "evaluation", "dataset", "cache", "settings", "warnings"}  # fmt: skip
    videos = [video for video in page.all("video") if video["src"].startswith("data:video/mp4;base64,")]
    assert len(videos) == 3 + 3  # a prompt at three steps, and the row of the evaluation
    assert {"chart-loss", "chart-held-out", "chart-timesteps", "chart-gains", "chart-bins", "chart-learning-rate",
            "chart-grad-norm", "chart-seconds", "chart-tokens", "chart-memory"} <= {
                attributes.get("id") for attributes in page.all("div")}  # fmt: skip
    for words in ("Use step 6", "lora.safetensors", "a blue wall", "64x64x5", "text_encoder_output", "--learning_rate",
                  "torch", "wangen", "walking", "forgetting", "step 0", "6 steps"):  # fmt: skip
        assert words in page.text, words


def test_the_same_run_gives_the_same_page(trained):
    assert page_of(trained) == page_of(trained)


def test_texts_of_anybody_stay_texts(trained):
    html = page_of(trained)
    page = Page(html)
    assert page.text.count(HOSTILE) >= 2  # the prompt of a sample and of an evaluated video
    assert not [attributes for _, attributes in page.tags if "onerror" in attributes]
    assert "<script>alert" not in html
    assert "default-src 'none'" in next(m["content"] for m in page.all("meta") if "http-equiv" in m)


def test_captions_and_names_of_files_stay_texts(tmp_path, trained, tiny_run: TinyRun):
    media = tmp_path / "media"
    media.mkdir()
    (media / "a&b 'i'.png").write_bytes((tiny_run.folder / "media" / "red.png").read_bytes())
    (media / "a&b 'i'.txt").write_text(HOSTILE, encoding="utf-8")
    config = tmp_path / "hostile.toml"
    config.write_text(f'[general]\nresolution = [64, 64]\n[[datasets]]\nimage_directory = "{media.as_posix()}"\n'
                      f'cache_directory = "{(tmp_path / "cache").as_posix()}"\n', encoding="utf-8")  # fmt: skip
    page = Page(page_of(trained, dataset_config=config, save_path=tmp_path / "page.html"))
    assert "a&b 'i'.png" in page.text
    assert page.text.count(HOSTILE) >= 3


def test_beyond_the_budget_files_are_linked_and_the_page_says_so(trained, tmp_path):
    page = Page(page_of(trained, max_embed_mb=0, save_path=trained.parent / "pages" / "report.html"))
    links = [video["src"] for video in page.all("video")]
    assert "../out/samples/lora-step00000006-1.mp4" in links
    assert all((trained.parent / "pages" / unquote(link)).is_file() for link in links)
    assert re.search(r"\d more are links .* at most 0 bytes \(--max_embed_mb\)", page.text)
    assert "more are links" not in Page(page_of(trained)).text


def test_it_needs_no_torch(trained, tmp_path):
    code = (
        "import sys\nfor name in ('torch', 'diffusers', 'transformers', 'peft'): sys.modules[name] = None\n"
        "from wangen.generator.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    words = ["report", "--output_dir", str(trained), "--save_path", str(tmp_path / "page.html")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "a blue wall" in Page((tmp_path / "page.html").read_text(encoding="utf-8")).text


def test_the_command_says_where_the_page_is_and_what_it_found(trained, capfd):
    assert main(["report", "--output_dir", str(trained), "--output_name", "lora"]) == 0
    said = capfd.readouterr().err
    assert str(trained / "report.html") in said
    assert "Use step 6" in said


# ---- which run, which dataset ------------------------------------------------------------------------------------


def test_of_two_runs_in_a_folder_the_newest_is_shown_and_the_other_named(tmp_path):
    folder = write_metrics(tmp_path, [step_line(1, output_name="dogs"), step_line(2), step_line(3)])
    assert "this folder also holds dogs" in Page(page_of(folder)).text
    assert Page(page_of(folder, output_name="dogs")).text.count("also holds cats") == 1


def test_a_run_on_a_manifest_has_its_dataset_and_its_cache(tmp_path):
    make_clip(tmp_path / "clips" / "a.mp4", num_frames=5)
    manifest = tmp_path / "train.jsonl"
    line = {"file": "clips/a.mp4", "prompt": "a wave", "frames": 5, "width": 64, "height": 48}
    manifest.write_text(json.dumps(line) + "\n")
    folder = write_metrics(tmp_path / "run", [step_line(1)])
    given = Page(page_of(folder, manifest=manifest)).text
    for step, settings in (("train", {"output_name": "cats", "dataset_config": None, "manifest": str(manifest)}),
                           ("check", {"dataset_config": "another.toml"})):  # fmt: skip
        (folder / f"{step}.report.json").write_text(json.dumps({"step": step, "ok": True, "settings": settings}))
    for text in (given, Page(page_of(folder)).text):
        assert "64x48x5" in text
        assert "a wave" in text
        assert "which dataset it has" not in text


def test_experts_that_were_trained_one_by_one_are_one_run(tmp_path):
    lines = [step_line(step, output_name=f"cats_{expert}", expert=expert, loss=step / parts)
             for expert, parts in (("high_noise", 1), ("low_noise", 2)) for step in (1, 2)]  # fmt: skip
    run = read_run(write_metrics(tmp_path, lines), "cats")
    assert (run.name, run.others, len(run.records)) == ("cats", (), 4)
    loss = next(chart for chart in make_charts(run.records) if chart.key == "loss")
    assert {line.name: list(line.points) for line in loss.lines} == {
        "high noise: loss": [(1, 1), (2, 2)], "low noise: loss": [(1, 0.5), (2, 1)]}  # fmt: skip
    told = dict(plan_numbers(run))
    assert (told["steps"], told["time of the steps"]) == ("4", f"{4 * lines[0]['s_per_step']:.1f} s")
    assert numbers(tmp_path)["steps"] == "4"


# ---- metrics.jsonl while it is written, and charts ---------------------------------------------------------------


def test_a_log_is_read_on_and_anew_when_it_was_replaced(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    assert log.read() == []
    write_metrics(tmp_path, [step_line(1)], cut='{"step": 2')
    assert [record["step"] for record in log.read()] == [1]
    assert log.cut_short
    with path.open("a") as file:
        file.write(', "loss": 0.5}\n')
    assert [record["step"] for record in log.read()] == [1, 2]
    assert not log.cut_short
    (tmp_path / "new").write_text(json.dumps(step_line(9)) + "\n")
    (tmp_path / "new").replace(path)
    assert [record["step"] for record in log.read()] == [9]


def test_a_log_that_was_written_anew_with_the_same_inode_is_read_anew(tmp_path):
    log = MetricsLog(write_metrics(tmp_path, [step_line(step) for step in range(1, 5)]) / "metrics.jsonl")
    log.read()
    inode = (tmp_path / "metrics.jsonl").stat().st_ino
    write_metrics(tmp_path, [step_line(step, loss=0.125 if step > 2 else 1 / step) for step in range(1, 9)])
    assert (tmp_path / "metrics.jsonl").stat().st_ino == inode
    assert log.read() == MetricsLog(tmp_path / "metrics.jsonl").read()
    assert log.records[2]["loss"] == 0.125


def test_the_wait_for_other_processes_is_drawn_where_there_are_any():
    alone = [step_line(step) for step in range(1, 4)]
    assert "communication" not in {chart.key for chart in make_charts(alone)}
    shares = {"communication_share": 0.1, "communication_share_min": 0.05, "communication_share_max": 0.25}
    charts = {chart.key: chart for chart in make_charts([step_line(step, **shares) for step in range(1, 4)])}
    drawn = {line.name: {y for _, y in line.points} for line in charts["communication"].lines}
    assert drawn == {"most of a process": {25.0}, "least": {5.0}}


def test_charts_keep_spikes_and_stay_small(tmp_path):
    lines = [step_line(step) for step in range(1, 20001)]
    lines[7777]["grad_norm"] = 123.0
    charts = {chart.key: chart for chart in make_charts(lines)}
    raw, smooth = charts["grad-norm"].drawn
    assert max(y for _, y in raw.points) == 123.0
    assert len(raw.points) <= 400
    assert max(y for _, y in smooth.points) < 1
    assert charts["grad-norm"].logarithmic
    assert len(charts["loss"].rows) <= 40
    assert all(tick.at == tick.at and 0 <= tick.at <= 360 for chart in charts.values() for tick in chart.x_ticks)


def test_a_table_says_where_a_value_is_from():
    lines = [{"step": step, "loss": step / 8, "expert": "low_noise" if step < 5 else "high_noise"} for step in range(9)]
    rows = {chart.key: chart for chart in make_charts(lines)}["loss"].rows
    assert rows[3] == ["3", "0.375", ""]
    assert rows[6] == ["6", "0.5 (at 4)", "0.75"]


def test_experts_that_were_trained_alone_have_charts_of_their_own():
    """One after the other in one folder; of both in one run the bins are of all samples."""
    lines = [{"step": 2, "expert": name, "loss_by_timestep": {"800-900": loss}}
             for name, loss in (("high_noise", 2.0), ("low_noise", 2.5))]  # fmt: skip
    charts = {chart.key: chart for chart in make_charts(lines)}
    assert [charts[f"bins-{name}-noise"].lines[0].points for name in ("high", "low")] == [[(2.0, 2.0)], [(2.0, 2.5)]]
    assert charts["bins-high-noise"].title == "Training loss by timestep, high-noise expert"
    together = make_charts([{key: value for key, value in line.items() if key != "expert"} for line in lines])
    assert [chart.key for chart in together] == ["bins"]


def test_every_learning_rate_has_a_line():
    """Two experts with Prodigy and LoRA+ have eight."""
    names = ("lr", "d*lr", "lr_loraplus", "d*lr_loraplus")
    lines = [{"step": step, "loss": 0.1, "expert": expert, **dict.fromkeys(names, 1e-4)}
             for step, expert in enumerate(("high_noise", "low_noise"), 1)]  # fmt: skip
    (chart,) = (chart for chart in make_charts(lines) if chart.key == "learning-rate")
    assert len({line.name for line in chart.lines}) == 8


def test_the_wheel_gets_the_template_the_style_and_the_script():
    from test_packaging import PROJECT

    patterns = PROJECT["tool"]["setuptools"]["package-data"]["wangen.runtime.report"]
    shipped = {path.name for pattern in patterns for path in (ROOT / "runtime" / "report").glob(pattern)}
    assert shipped == {"page.html.j2", "blocks.html.j2", "report.css", "report.js"}


def test_what_was_judged_by_other_items_is_no_part_of_the_chart(tmp_path):
    lines = [validation_line(step, 0.1) for step in (3, 6)] + [validation_line(step, 0.3) for step in (9, 12)]
    for line in lines[:2]:
        line["validation"]["mean_base"] = 0.15
    run = read_run(write_metrics(tmp_path, [step_line(12), *lines]), None)
    charts = {chart.key: chart for chart in make_charts(run.records)}
    assert [[x for x, _ in line.points] for line in charts["held-out"].lines] == [[9, 12], [9, 12]]
    assert "judged by other items or timesteps, before step 9, is left out" in charts["held-out"].note
    assert [x for x, _ in charts["gains"].lines[0].points] == [9, 12]
    whole = read_run(write_metrics(tmp_path, [step_line(12), *lines[2:]]), None)
    assert "left out" not in make_charts(whole.records)[1].note


def test_samples_of_a_run_that_was_begun_anew_are_not_shown_as_this_ones(tiny_run: TinyRun, tmp_path: Path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red square --w 64 --h 64 --f 1 --s 1 --l 1\n")
    weights = {name: tiny_run.weights[name] for name in ("vae", "t5")}
    options = tiny_run.options(
        tmp_path / "out", **weights, t5_dtype="float32", sample_prompts=prompts, max_train_steps=4,
        sample_every_n_steps=2, sample_at_first=True,
    )  # fmt: skip
    train.run(options)
    train.run(replace(options, fresh=True, max_train_steps=3, sample_every_n_steps=None, sample_at_first=False))
    run = read_run(tmp_path / "out", None)
    assert [sample.step for sample in run.samples] == [3]
    assert any("3 pictures and videos in samples that the list" in problem for problem in run.problems)
    assert len(list((tmp_path / "out" / "samples").glob("*.png"))) == 4, "nobody's pictures are removed"


def test_what_was_asked_for_differently_is_looked_through_by_itself(tmp_path: Path):
    """A prompt file may change between two starts."""
    folder = write_metrics(tmp_path, [{**step_line(step), "output_name": "lora"} for step in range(1, 7)])
    (folder / "samples").mkdir()
    asked = {2: ("a dog", 1), 4: ("a cat", 1), 5: ("a cat", 1), 6: ("a cat", 2)}
    lines = []
    for step, (prompt, seed) in asked.items():
        name = f"lora-step{step:08d}-1.png"
        Image.new("RGB", (8, 8)).save(folder / "samples" / name)
        lines.append({"file": name, "prompt": prompt, "seed": seed, "averaged_weights": step == 6, "sampler": "unipc"})
    (folder / "samples" / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Page(page_of(folder))
    blocks = [tag["id"] for _, tag in page.tags if tag.get("id", "").startswith("sample-")]
    assert blocks == ["sample-1", "sample-1-settings-2", "sample-1-settings-3"]
    assert page.text.count("of the averaged weights (-ema)") == 1


def test_a_sample_of_the_high_noise_expert_alone_has_its_guidance():
    told = {"experts": ["high_noise"], "guidance": 3.0, "guidance_high_noise": 4.0}
    assert "guidance 4.0" in sample_facts(Sample(Path("a.png"), 1, 1, "high_noise", told))
    assert "guidance 3.0 (high noise 4.0)" in sample_facts(Sample(Path("a.png"), 1, 1, "", told))
    assert sample_facts(Sample(Path("a.png"), 1, 1, "low_noise", told)).endswith("guidance 3.0")
