"""Which checkpoint the page of a run tells to use, and why: by validation and by evaluation; and `evaluation.json`."""

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from report_runs import NO_TENSORS, Page, evaluation, page_of, step_line, validation_line, write_metrics
from safetensors.torch import save_file

from wangen.generator.errors import WangenError
from wangen.runtime.evaluation_file import Memorisation, Row, read_evaluation, write_evaluation
from wangen.runtime.report.run_files import read_run
from wangen.runtime.report.verdict import judge


def verdict_of(folder: Path):
    return judge(read_run(folder, None))


def test_a_validation_without_numbers_is_no_verdict(tmp_path):
    line = validation_line(6, 0.1)
    line["validation"]["mean_adapter"] = None
    assert verdict_of(write_metrics(tmp_path, [step_line(6), line])).level == "unknown"


def test_by_validation_the_best_step_counts_and_a_rise_is_held_against_it(tmp_path):
    lines = [step_line(step) for step in range(1, 13)]
    lines += [validation_line(0, 0.2), validation_line(6, 0.15), validation_line(12, 0.17)]
    found = verdict_of(write_metrics(tmp_path, lines))
    assert found.level == "good"
    assert "0.15000 at step 6" in found.because[0]
    assert any("after step 6 the held-out loss rose" in line for line in found.against)
    assert "was not evaluated yet" in found.headline


def test_a_loss_that_stayed_the_same_did_not_rise(tmp_path):
    """As of an expert that was judged once more though only the other one was trained in between."""
    lines = [step_line(step) for step in range(1, 13)]
    lines += [validation_line(0, 0.2), validation_line(6, 0.15), validation_line(12, 0.15)]
    assert not any("rose" in line for line in verdict_of(write_metrics(tmp_path, lines)).against)


def test_a_validation_that_is_not_finite_is_not_the_best_step(tmp_path):
    lines = [step_line(3), validation_line(1, math.nan), validation_line(2, 0.15), validation_line(3, 0.1)]
    found = verdict_of(write_metrics(tmp_path, lines))
    assert found.level == "good"
    assert "0.10000 at step 3" in found.because[0]


@pytest.mark.parametrize("line", [validation_line(6, 0.199), validation_line(6, 0.1, error=None)])
def test_a_difference_within_chance_is_none(tmp_path, line):
    assert verdict_of(write_metrics(tmp_path, [step_line(6), line])).level == "unsure"


def test_the_best_of_many_validations_has_to_be_better_by_more(tmp_path):
    """Of one, 2.5 standard errors are clear; the lowest of twenty lies there by chance."""
    one = [step_line(6), validation_line(6, 0.195)]
    assert verdict_of(write_metrics(tmp_path / "one", one)).level == "good"
    many = [step_line(20), *(validation_line(step, 0.199) for step in range(1, 20)), validation_line(20, 0.195)]
    assert verdict_of(write_metrics(tmp_path / "many", many)).level == "unsure"


def test_each_expert_is_judged_by_itself(tmp_path):
    lines = [step_line(1), validation_line(6, 0.1, expert="high_noise"), validation_line(6, 0.3, expert="low_noise")]
    found = verdict_of(write_metrics(tmp_path, lines))
    assert found.level == "unsure"
    assert found.because[0].startswith("high noise: ")
    assert found.because[1].startswith("low noise: ")


def test_only_what_was_judged_as_the_last_validation_is_compared(tmp_path):
    """Other held-out items or timesteps, of which the base has another loss as well."""
    lines = [step_line(9), validation_line(3, 0.05), validation_line(6, 0.15), validation_line(9, 0.14)]
    lines[1]["validation"]["mean_base"] = 0.09
    found = verdict_of(write_metrics(tmp_path, lines))
    assert "0.14000 at step 9" in found.because[0]
    assert not any("rose" in line for line in found.against)


def test_a_run_that_made_the_lora_it_began_from_worse_is_said(tmp_path):
    lines = [step_line(1), validation_line(0, 0.1), validation_line(1, 0.15)]
    write_metrics(tmp_path, lines)
    save_file({"a": torch.zeros(1)}, tmp_path / "cats.safetensors", {"ss_steps": "1"})
    found = verdict_of(tmp_path)
    assert found.use == ()
    assert "training made the LoRA that it began from no better" in found.against
    save_file({"a": torch.zeros(1)}, tmp_path / "cats-best.safetensors", {"ss_steps": "0"})
    assert verdict_of(tmp_path).use == ("cats-best.safetensors",)


def test_of_two_experts_a_file_is_found_by_the_step_of_the_run(tmp_path):
    """`ss_steps` are the expert's own; what is saved under no number says the run's in its header."""
    lines = [validation_line(step, loss, expert="high_noise") for step, loss in ((5, 0.1), (10, 0.3))]
    write_metrics(tmp_path, lines)
    for name, header in (
        ("cats_high_noise-step00000005", {"ss_steps": "3"}),
        ("cats_high_noise-step00000010", {"ss_steps": "5"}),
        ("cats_high_noise", {"ss_steps": "6", "wangen.run_steps": "12"}),
    ):
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors", header)
    found = verdict_of(tmp_path)
    assert found.use == ("cats_high_noise-step00000005.safetensors",)
    assert not any("no file was kept" in line for line in found.against)
    lines[0]["step"] = 12
    assert verdict_of(write_metrics(tmp_path, lines)).use == ("cats_high_noise.safetensors",)


def test_an_evaluation_outweighs_the_held_out_loss(tmp_path):
    folder = write_metrics(tmp_path, [step_line(6), step_line(12), validation_line(12, 0.5)])
    found = judge(read_run(folder, None))
    assert found.level == "unsure"
    write_evaluation(evaluation(), folder / "evaluation.json")
    found = verdict_of(folder)
    assert (found.level, found.use) == ("good", ("cats.safetensors",))
    assert "0.17000 where the base has 0.20000: 15 % lower" in found.because[0]


@pytest.mark.parametrize(("name", "step", "level"), [("cats.safetensors", 6, "good"), ("cats.safetensors", 9, "unsure"),
                                                     ("cats-step00000009.safetensors", 9, "good")])  # fmt: skip
def test_an_evaluation_tells_of_the_files_as_they_were(tmp_path, name, step, level):
    """Training went on, and wrote what was judged anew, or something beside it."""
    folder = write_metrics(tmp_path, [step_line(6), step_line(9)])
    write_evaluation(evaluation(), folder / "evaluation.json")
    save_file({"a": torch.zeros(1)}, folder / name, {"ss_steps": str(step)})
    found = verdict_of(folder)
    assert (found.level, found.use) == (level, ("cats.safetensors",) if level == "good" else ())
    went_on = "training went on to step 9 since: what came after step 6 was not judged"
    assert (went_on in found.against) == ("step" in name)
    assert ("step 6 was judged at step 6 and is of step 9 now: run wangen evaluate" in found.headline) != (
        level == "good"
    )


@pytest.mark.parametrize(("low", "level"), [(4, "good"), (5, "unsure")])
def test_of_two_experts_an_evaluation_tells_of_both_files_as_they_were(tmp_path, low, level):
    """The best of each was saved at a step of its own; the low-noise expert's file may have been written anew."""
    folder = write_metrics(tmp_path, [{**step_line(9), "expert": "low_noise"}])
    names = ("cats_high_noise.safetensors", "cats_low_noise.safetensors")
    last = replace(evaluation().checkpoints[1], file=names[1], file_high_noise=names[0], file_steps=(6, 4))
    write_evaluation(evaluation(checkpoints=(evaluation().checkpoints[0], last)), folder / "evaluation.json")
    for name, steps in zip(names, (6, low), strict=True):
        save_file({"a": torch.zeros(1)}, folder / name, {"ss_steps": "2", "wangen.run_steps": str(steps)})
    found = verdict_of(folder)
    assert (found.level, bool(found.use)) == (level, level == "good")
    assert ("step 6 was judged at step 4 and is of step 5 now" in found.headline) == (level == "unsure")


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


def test_what_is_not_lower_than_the_base_is_not_to_be_used(tmp_path):
    """Though the interval of its difference holds 0."""
    one = evaluation()
    ours = tuple(replace(found, mean_loss=0.21, delta=0.01, ci_low=-0.01, ci_high=0.03) for found in one.checkpoints)
    write_evaluation(replace(one, checkpoints=ours), tmp_path / "evaluation.json")
    found = verdict_of(tmp_path)
    assert (found.level, found.use) == ("unsure", ())
    assert not any("did not help" in line for line in found.against), "the best is the last"
    write_evaluation(replace(one, best="step 3"), tmp_path / "evaluation.json")
    assert any("training beyond step 3 did not help" in line for line in verdict_of(tmp_path).against)


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


# ---- which evaluation counts -------------------------------------------------------------------------------------


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


def test_a_run_that_was_judged_beside_another_is_told_so(tmp_path):
    folder = write_metrics(tmp_path, [step_line(6), validation_line(0, 0.2), validation_line(6, 0.15)])
    found = evaluation()
    first, *rest = found.checkpoints
    both = replace(found, checkpoints=(replace(first, file="old.safetensors"), *rest))
    write_evaluation(both, folder / "evaluation.json")
    page = Page(page_of(folder)).text
    assert "the evaluation judged old.safetensors of another run, too" in page
    assert "give each run a folder" in page
    assert "not evaluated yet" not in page


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


def test_the_page_of_a_whole_model_does_not_speak_of_a_lora(tmp_path):
    write_metrics(tmp_path, [step_line(6), validation_line(3, 0.18), validation_line(6, 0.15)])
    name = step_line(6)["output_name"]
    for mode, word in (("lora", "LoRA"), ("full", "model")):
        report = {"step": "train", "settings": {"output_name": name, "train_mode": mode}}
        (tmp_path / "train.report.json").write_text(json.dumps(report), encoding="utf-8")
        text = Page(page_of(tmp_path)).text
        assert f"By held-out loss alone the {word} is better than the base" in text
        assert f"{word} less base at each timestep" in text
        assert ("run wangen evaluate" in text) == (mode == "lora")


@pytest.mark.parametrize(("average", "is_said"), [(0.14, True), (0.16, False), (None, False)])
def test_an_average_that_is_better_than_the_best_is_said(tmp_path, average, is_said):
    lines = [validation_line(3, 0.15), validation_line(6, 0.17)]
    lines[-1]["validation"]["mean_ema"] = average
    found = verdict_of(write_metrics(tmp_path, [step_line(6), *lines]))
    assert any("averaged weights of step 6 have 0.14000" in line for line in found.against) is is_said


@pytest.mark.parametrize("averaged", [True, False])
def test_a_best_of_averaged_weights_is_the_one_to_use(tmp_path, averaged):
    lines = [validation_line(3, 0.15), validation_line(6, 0.17)]
    lines[-1]["validation"]["mean_ema"] = 0.14
    folder = write_metrics(tmp_path, [step_line(6), *lines])
    header = {"ss_steps": "6"} | ({"wangen.averaged": "0.9"} if averaged else {})
    save_file({}, folder / "cats-best.safetensors", header)
    save_file({}, folder / "cats-step00000003.safetensors", {"ss_steps": "3"})
    found = verdict_of(folder)
    assert found.use == (("cats-best.safetensors",) if averaged else ("cats-step00000003.safetensors",))
    told = "0.14000 by the averaged weights of step 6, which the best file holds"
    assert (told in found.because[0]) is averaged
    assert any("averaged weights of step 6" in line for line in found.against) is not averaged
    assert not any("no file was kept" in line for line in found.against)
