"""`wangen report`: what the page says of a run, of parts of one, and of hostile texts; without a browser."""

import json
import math
import os
import random
import re
import subprocess
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from helpers import make_clip
from report_runs import HOSTILE, NO_TENSORS, evaluation, page_of, step_line, train_run, validation_line, write_metrics
from tiny import TinyRun

from wangen.generator.cli import main
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import MakeReport
from wangen.runtime.evaluation_file import Memorisation, Row, Video, read_evaluation, write_evaluation
from wangen.runtime.report import make
from wangen.runtime.report.charts import make_charts
from wangen.runtime.report.metrics_log import MetricsLog
from wangen.runtime.report.run_files import read_run
from wangen.runtime.report.verdict import judge

ROOT = Path(__file__).parent.parent


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._hidden = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self._hidden = tag in ("style", "script")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


def addresses(page: Page) -> list[str]:
    """Whatever a browser could fetch."""
    return [attributes[name] for _, attributes in page.tags for name in ("src", "href", "srcset", "action", "poster")
            if name in attributes and not attributes[name].startswith("#")]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tiny_run, tmp_path_factory.mktemp("report"))


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


# ---- what is missing or broken -----------------------------------------------------------------------------------


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


def test_a_page_of_numbers_alone_says_what_it_does_not_know(tmp_path):
    folder = write_metrics(tmp_path, [step_line(step) for step in range(1, 4)], cut='{"step": 4, "lo')
    page = Page(page_of(folder))
    for words in ("Nothing is known of how good this LoRA is", "the last line of metrics.jsonl is cut short",
                  "not evaluated yet", "No samples were made", "give --dataset_config", "3 steps",
                  "Training writes its settings when it ends"):  # fmt: skip
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


def test_of_two_runs_in_a_folder_the_newest_is_shown_and_the_other_named(tmp_path):
    folder = write_metrics(tmp_path, [step_line(1, output_name="dogs"), step_line(2), step_line(3)])
    assert "this folder also holds dogs" in Page(page_of(folder)).text
    assert Page(page_of(folder, output_name="dogs")).text.count("also holds cats") == 1


def two_runs(folder: Path, judged: str) -> Path:
    """The run old, which was reported and evaluated, and after it the run cats."""
    write_metrics(folder, [step_line(1, output_name="old"), step_line(1)])
    (folder / "train.report.json").write_text(json.dumps({
        "step": "train", "ok": True, "summary": "trained old",
        "settings": {"output_name": "old", "learning_rate": 0.5}}))  # fmt: skip
    found = evaluation()
    ours = tuple(replace(one, file=f"{judged}{one.file.removeprefix('cats')}") for one in found.checkpoints)
    write_evaluation(replace(found, checkpoints=ours), folder / "evaluation.json")
    return folder


@pytest.mark.parametrize("judged", ["old", "/data/cats/old", "..\\cats\\old", "D:\\cats\\old", "old_high_noise"])
def test_a_run_is_not_judged_by_the_evaluation_and_the_report_of_another(tmp_path, judged):
    folder = two_runs(tmp_path, judged)
    newest = Page(page_of(folder)).text
    assert "Nothing is known of how good this LoRA is" in newest
    assert "evaluation.json is left out" in newest
    assert "--learning_rate" not in newest
    older = Page(page_of(folder, output_name="old")).text
    assert "Use step 6" in older
    assert "evaluation.json is left out" not in older
    assert "--learning_rate" in older


@pytest.mark.parametrize("newer", ["metrics.jsonl", "cats.safetensors", None])
def test_an_evaluation_that_is_older_than_what_it_judged_is_warned_of(tmp_path, newer):
    folder = write_metrics(tmp_path, [step_line(1)])
    (folder / "cats.safetensors").write_bytes(NO_TENSORS)
    write_evaluation(evaluation(), folder / "evaluation.json")
    for path in folder.iterdir():
        seconds = 1e9 + (path.name == newer)
        os.utime(path, (seconds, seconds))
    text = Page(page_of(folder)).text
    assert text.count("evaluation.json is older than") == (newer is not None)
    assert newer is None or f"older than {newer}: training went on after it" in text


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


def test_numbers_that_are_not_finite_are_warned_of(tmp_path):
    lines = [step_line(step) for step in range(1, 30)]
    lines[4]["loss"], lines[20]["grad_norm"], lines[9]["data_wait_share"] = None, 50.0, 9.0
    text = Page(page_of(write_metrics(tmp_path, lines))).text
    for words in ("not finite at 1 step, first at step 5", "more than 20 times the usual", "waited for data"):
        assert words in text, words


def test_experts_that_were_trained_one_by_one_are_one_run(tmp_path):
    lines = [step_line(step, output_name=f"cats_{expert}", expert=expert, loss=step / parts)
             for expert, parts in (("high_noise", 1), ("low_noise", 2)) for step in (1, 2)]  # fmt: skip
    run = read_run(write_metrics(tmp_path, lines), "cats")
    assert (run.name, run.others, len(run.records)) == ("cats", (), 4)
    loss = next(chart for chart in make_charts(run.records) if chart.key == "loss")
    assert {line.name: list(line.points) for line in loss.lines} == {
        "high noise: loss": [(1, 1), (2, 2)], "low noise: loss": [(1, 0.5), (2, 1)]}  # fmt: skip


JUNK = (None, True, -1, 1e308, "x", "</script>", [], [None], {}, {"a": {"b": []}})


def spoiled(value: Any, rng: random.Random) -> Any:
    """JSON in which a few values are something else."""
    if rng.random() < 0.08:
        return rng.choice(JUNK)
    if isinstance(value, dict):
        return {key: spoiled(part, rng) for key, part in value.items()}
    return [spoiled(part, rng) for part in value] if isinstance(value, list) else value


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


def test_a_validation_without_numbers_is_no_verdict(tmp_path):
    line = validation_line(6, 0.1)
    line["validation"]["mean_adapter"] = None
    assert verdict_of(write_metrics(tmp_path, [step_line(6), line])).level == "unknown"


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


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 10**400], ids=["nan", "inf", "huge"])
def test_times_that_nobody_can_read_are_left_out(tmp_path, seconds):
    folder = write_metrics(tmp_path, [step_line(1)])
    report = {"step": "train", "ok": True, "settings": {"output_name": "cats"}, "timings": {"total_s": seconds},
              "result": {"speed": {"s_per_step": seconds}}}  # fmt: skip
    (folder / "train.report.json").write_text(json.dumps(report))
    assert "seconds per step" not in Page(page_of(folder)).text


# ---- the verdict -------------------------------------------------------------------------------------------------


def verdict_of(folder: Path):
    return judge(read_run(folder, None))


def test_by_validation_the_best_step_counts_and_a_rise_is_held_against_it(tmp_path):
    lines = [step_line(step) for step in range(1, 13)]
    lines += [validation_line(0, 0.2), validation_line(6, 0.15), validation_line(12, 0.17)]
    found = verdict_of(write_metrics(tmp_path, lines))
    assert found.level == "good"
    assert "0.15000 at step 6" in found.because[0]
    assert any("after step 6 the held-out loss rose" in line for line in found.against)
    assert "was not evaluated yet" in found.headline


def test_a_validation_that_is_not_finite_is_not_the_best_step(tmp_path):
    lines = [step_line(3), validation_line(1, math.nan), validation_line(2, 0.15), validation_line(3, 0.1)]
    found = verdict_of(write_metrics(tmp_path, lines))
    assert found.level == "good"
    assert "0.10000 at step 3" in found.because[0]


@pytest.mark.parametrize("line", [validation_line(6, 0.199), validation_line(6, 0.1, error=None)])
def test_a_difference_within_chance_is_none(tmp_path, line):
    assert verdict_of(write_metrics(tmp_path, [step_line(6), line])).level == "unsure"


def test_each_expert_is_judged_by_itself(tmp_path):
    lines = [step_line(1), validation_line(6, 0.1, expert="high_noise"), validation_line(6, 0.3, expert="low_noise")]
    found = verdict_of(write_metrics(tmp_path, lines))
    assert found.level == "unsure"
    assert found.because[0].startswith("high noise: ")
    assert found.because[1].startswith("low noise: ")


def test_an_evaluation_outweighs_the_held_out_loss(tmp_path):
    folder = write_metrics(tmp_path, [step_line(6), step_line(12), validation_line(12, 0.5)])
    found = judge(read_run(folder, None))
    assert found.level == "unsure"
    write_evaluation(evaluation(), folder / "evaluation.json")
    found = verdict_of(folder)
    assert (found.level, found.use) == ("good", ("cats.safetensors",))
    assert "0.17000 where the base has 0.20000: 15 % lower" in found.because[0]


def test_what_speaks_against_the_best_checkpoint_is_said(tmp_path):
    worse = evaluation(
        forgetting=(Row("landscapes", 0.15, {"step 6": 0.18}),),
        per_activity=(Row("running", 0.2, {"step 6": 0.21}),),
        memorisation=(Memorisation("step 6", "v.mp4", "clip.mp4:0+5", 0.01, 0.9, suspicious=True),),
        warnings=("too few items",),
    )
    write_evaluation(worse, tmp_path / "evaluation.json")
    found = verdict_of(tmp_path)
    assert found.level == "unsure"
    for words in (
        "landscapes",
        "20 % higher",
        "forgotten",
        "worse than the base at running",
        "clip.mp4:0+5",
        "too few",
    ):
        assert any(words in line for line in found.against), words


def test_a_lora_that_is_worse_than_the_base_is_not_recommended(tmp_path):
    bad = asdict(evaluation())
    for one in bad["checkpoints"]:
        one |= {"mean_loss": 0.3, "delta": 0.1, "ci_low": 0.05, "ci_high": 0.15}
    (tmp_path / "evaluation.json").write_text(json.dumps(bad))
    found = verdict_of(tmp_path)
    assert (found.level, found.use) == ("bad", ())
    assert "do not use" in found.headline


def test_a_single_held_out_file_tells_nothing_from_chance(tmp_path):
    one = evaluation()
    ours = tuple(replace(checkpoint, ci_low=None, ci_high=None) for checkpoint in one.checkpoints)
    write_evaluation(replace(one, checkpoints=ours, num_items=1), tmp_path / "evaluation.json")
    found = verdict_of(tmp_path)
    assert (found.level, found.use) == ("unsure", ("cats.safetensors",))
    assert "A single held-out file does not tell" in found.headline
    text = Page(page_of(tmp_path)).text
    assert "no interval, as a single file is held out" in text
    assert "none of one file" in text
    assert "interval +" not in text


def test_what_was_trained_on_is_no_proof(tmp_path):
    write_evaluation(evaluation(num_trained=4), tmp_path / "evaluation.json")
    found = verdict_of(tmp_path)
    assert found.level == "unsure"
    assert "it was trained on 4 of 9 items that it was judged by" in found.headline


@pytest.mark.parametrize("folder", ["", "../other/", "/data/cats/", "D:\\cats\\"])
def test_the_file_to_use_is_named_wherever_it_lay(tmp_path, folder):
    (tmp_path / "cats.safetensors").write_bytes(NO_TENSORS)
    one = evaluation()
    ours = tuple(replace(checkpoint, file=folder + checkpoint.file) for checkpoint in one.checkpoints)
    write_evaluation(replace(one, checkpoints=ours), tmp_path / "evaluation.json")
    assert verdict_of(tmp_path).use == ("cats.safetensors",)
    page = Page(page_of(tmp_path)).text
    assert "use this" in page
    assert "/data/cats/" not in page


# ---- evaluation.json ---------------------------------------------------------------------------------------------


def test_an_evaluation_reads_back_equal(tmp_path):
    write_evaluation(evaluation(), tmp_path / "evaluation.json")
    assert read_evaluation(tmp_path / "evaluation.json") == evaluation()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"best": "none"}, "not in its list"),
        ({"mean_base": True}, "mean_base has the value True"),
        ({"checkpoints": [{"name": "a"}]}, "checkpoints has no file"),
        ({"per_timestep": [{"name": "1", "base": 1, "losses": {"a": "b"}}]}, "losses has the value 'b'"),
        ({"videos": {}}, "videos has the value"),
        ({"mean_base": 10**400}, "mean_base has the value 1000"),
        ({"mean_base": float("nan")}, "mean_base has the value nan"),
        ({"num_items": 10**400}, "num_items has the value 1000"),
    ],
)
def test_a_wrong_evaluation_is_refused_in_words(tmp_path, change, found):
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps({**asdict(evaluation()), "of a newer version": 1, **change}))
    with pytest.raises(WangenError, match=found):
        read_evaluation(path)


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


def test_the_wheel_gets_the_template_the_style_and_the_script():
    from test_packaging import PROJECT

    patterns = PROJECT["tool"]["setuptools"]["package-data"]["wangen.runtime.report"]
    shipped = {path.name for pattern in patterns for path in (ROOT / "runtime" / "report").glob(pattern)}
    assert shipped == {"page.html.j2", "blocks.html.j2", "report.css", "report.js"}
