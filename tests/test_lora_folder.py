"""A run's folder given as a LoRA: its best, else its last; what fits nothing is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from loras import every_module, write

from wangen import profiles
from wangen.generator.cli import main
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.lora_config import lora_identity
from wangen.generator.run_names import EXPERTS
from wangen.generator.steps import Train
from wangen.runtime import train
from wangen.runtime.evaluation.candidates import find_candidates
from wangen.runtime.lora_folder import find_lora, of_last_run, require_one_run, saved_loras
from wangen.runtime.training.refusals import resolved

FLAG = "--lora_weight"
MODEL = profiles.model("t2v-A14B")


@pytest.fixture(scope="module")
def lora():
    return dict(list(every_module("t2v21", scales=(1.0,), ranks=(2,)).items())[:1])


@pytest.fixture
def folder(tmp_path, lora):
    """A function that makes LoRAs in a folder: `name=steps`, None writes no metadata."""

    def make(*names: str, **steps: int | None) -> Path:
        for name in names:
            write(tmp_path / f"{name}.safetensors", lora, "comfyui")
        for name, number in steps.items():
            header = {} if number is None else {"ss_steps": str(number), "ss_epoch": str(-(-number // 10))}
            write(tmp_path / f"{name}.safetensors", lora, "comfyui", header)
        return tmp_path

    return make


def report(folder: Path, loras: list[str], best: list[str]) -> None:
    result = {"loras": loras, "best": {str(n): {"file": name, "step": 1} for n, name in enumerate(best)}}
    (folder / "train.report.json").write_text(json.dumps({"result": result}))


def chosen(folder: Path, expert: str = "") -> str:
    return find_lora(folder, FLAG, expert).name


def test_without_a_best_it_is_the_finished_one_and_before_that_the_one_of_the_most_steps(folder, caplog):
    caplog.set_level("INFO", logger="wangen")
    made = folder(**{"cats-step00000005": 5, "cats-000001": 10, "cats-step00000012": 12, "cats-step00000012-ema": 12})
    assert chosen(made) == "cats-step00000012.safetensors"
    assert caplog.messages == [f"  {FLAG} {made}: cats-step00000012.safetensors, its last (step 12)"]
    assert len(of_last_run(saved_loras(made), made)) == 4
    assert len(caplog.messages) == 1, "with none that is finished there are no other settings"
    folder(cats=15)
    assert chosen(made) == "cats.safetensors"


def test_what_a_later_start_set_aside_is_not_its_last(folder):
    made = folder(**{"cats-kept-step00000500": 500, "cats-step00000100": 100, "cats-step00000100-ema": 100})
    assert chosen(made) == "cats-step00000100.safetensors"
    assert {one.path.stem: one.kept for one in saved_loras(made)} == {
        "cats-kept-step00000500": True, "cats-step00000100": False, "cats-step00000100-ema": False
    }  # fmt: skip
    (made / "cats-step00000100.safetensors").unlink()
    (made / "cats-step00000100-ema.safetensors").unlink()
    assert chosen(made) == "cats-kept-step00000500.safetensors"


def test_names_alone_tell_when_the_headers_say_nothing(folder):
    made = folder("cats-000002", "cats-000010")
    assert chosen(made) == "cats-000010.safetensors"
    folder("cats-step00000900", "cats-step00001000")
    assert chosen(made) == "cats-step00001000.safetensors"


def test_the_best_wins_unless_the_report_of_the_run_knows_of_none(folder):
    made = folder(**{"cats": 20, "cats-best": 12})
    assert chosen(made) == "cats-best.safetensors"
    report(made, [r"C:\AI\outputs\cats.safetensors"], ["cats-best.safetensors"])
    assert chosen(made) == "cats-best.safetensors"
    report(made, [str(made / "cats.safetensors")], [])  # trained anew without --keep_best
    assert chosen(made) == "cats.safetensors"


def test_what_is_judged_of_a_folder_is_what_its_last_run_left(folder, lora, caplog):
    made = folder(**{"cats-best": 12})
    settings = {"cats-step00000010": "{1}", "cats-step00000020": "{2}", "cats": "{2}", "cats-ema": "{1}"}
    for name, told in settings.items():
        write(made / f"{name}.safetensors", lora, "comfyui", {"wangen.fingerprint": told})
    everything = saved_loras(made)
    assert of_last_run(everything, made) == everything
    assert "cats-step00000010.safetensors, cats-best.safetensors, cats-ema.safetensors: saved with" in caplog.text
    report(made, ["cats.safetensors"], [])
    assert [one.path.stem for one in of_last_run(everything, made)] == [
        one.path.stem for one in everything if not one.best
    ]


def test_a_report_says_nothing_of_another_run_or_expert(folder, lora, caplog):
    made = folder("dogs-best", "dogs", "cats_low_noise-best")
    for name, settings in {"cats_low_noise": "{1}", "cats_high_noise": "{2}", "cats_high_noise-best": "{2}"}.items():
        write(made / f"{name}.safetensors", lora, "comfyui", {"wangen.fingerprint": settings})
    report(made, ["cats_high_noise.safetensors"], ["cats_high_noise-best.safetensors"])
    everything = saved_loras(made)
    assert of_last_run(everything, made) == everything
    assert not any("cats_high_noise" in message for message in caplog.messages), "another expert, no earlier run"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"result": {"loras": 5}}', '{"result": {"best": [1]}}'])
def test_a_report_that_says_nothing_is_as_good_as_none(folder, text):
    made = folder(**{"cats": 20, "cats-best": 12})
    (made / "train.report.json").write_text(text)
    assert chosen(made) == "cats-best.safetensors"


def test_of_two_experts_each_has_its_own(folder):
    made = folder("cats_high_noise-best", cats_high_noise=6, cats_low_noise=4)
    assert chosen(made, "high_noise") == "cats_high_noise-best.safetensors"
    assert chosen(made, "low_noise") == "cats_low_noise.safetensors"
    with pytest.raises(WangenError, match="LoRAs of two experts"):
        chosen(made)
    (made / "cats_low_noise.safetensors").unlink()
    with pytest.raises(WangenError, match=r"(?s)no LoRA of the low-noise expert.*--lora_weight_high_noise, whose"):
        chosen(made, "low_noise")


def test_of_several_runs_the_last_one_that_ended_counts(folder):
    made = folder(**{"cats": 20, "dogs": 30, "dogs-best": 10})
    with pytest.raises(WangenError, match="several runs: cats, dogs"):
        chosen(made)
    report(made, ["cats.safetensors"], [])
    assert chosen(made) == "cats.safetensors"


def test_the_loras_of_two_experts_are_of_one_run_where_a_run_has_both(folder):
    made = folder("cats_high_noise", "cats_low_noise", "dogs_low_noise")
    report(made, ["dogs_low_noise.safetensors"], [])  # what was trained last
    found = [find_lora(made, FLAG, expert) for expert in EXPERTS]
    assert [path.name for path in found] == ["cats_high_noise.safetensors", "dogs_low_noise.safetensors"]
    with pytest.raises(WangenError, match=r"would be of two runs: cats_high_noise.*and dogs_low_noise"):
        require_one_run(made, found)
    for path in made.glob("cats_low_noise*"):
        path.unlink()
    require_one_run(made, found)  # each was trained alone
    require_one_run(found[0], found)
    start = {"network_weights": made, "network_weights_high_noise": made, "output_dir": made / "other"}
    weights = {"task": MODEL.name, "dit": Path("low"), "dit_high_noise": Path("high"), "output_name": "lora"}
    options = resolved(Train(**weights, **start), MODEL, None)
    assert options.network_weights_high_noise == found[0]
    assert resolved(replace(options, network_weights=made, network_weights_high_noise=None), MODEL, None) == options
    alone = resolved(
        replace(options, network_weights=made, network_weights_high_noise=None, experts="low"), MODEL, None
    )
    assert alone.network_weights_high_noise is None
    folder("cats_low_noise")
    with pytest.raises(WangenError, match="would be of two runs"):
        resolved(Train(**weights, **start), MODEL, None)


def test_a_folder_without_a_lora_is_refused_and_a_damaged_one_named(tmp_path, folder):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(WangenError, match=f"{FLAG}: this folder holds no LoRA"):
        chosen(tmp_path)
    (tmp_path / "cats.safetensors").write_bytes(b"12")
    with pytest.raises(WangenError) as error:
        chosen(tmp_path)
    assert error.value.where.endswith("cats.safetensors")


def test_the_folder_of_a_try_that_did_not_run_is_answered_with_the_try(folder):
    made = folder("cats")
    with pytest.raises(UsageError, match=f"{FLAG}: no try of a training is in this folder") as error:
        find_lora(made / "smoke", FLAG)
    assert (error.value.where, "--smoke first" in error.value.cure) == (str(made), True)
    with pytest.raises(UsageError, match="no try of a training"):
        find_candidates([made / "smoke"], [], experts=False)
    assert find_lora(made / "gone/smoke", FLAG) == made / "gone/smoke"  # the reader says that it is not there


def test_files_and_folders_of_peft_and_diffusers_stay_as_they_are(tmp_path, folder, lora):
    made = folder("cats", "adapter_model")
    assert find_lora(made, FLAG) == made
    assert find_lora(made / "cats.safetensors", FLAG) == made / "cats.safetensors"
    assert find_lora(made / "none", FLAG) == made / "none"


def test_all_loras_of_a_run_are_listed_from_the_first_to_the_last(folder, lora):
    made = folder(**{"cats": 20, "cats-best": 12, "cats-step00000012": 12, "cats-000001": 10, "cats-000001-ema": 10,
                     "dogs": None})  # fmt: skip
    write(made / "cats-kohya.safetensors", lora, "kohya")
    write(made / "dogs-step00000007-diffusers.safetensors", lora, "diffusers")
    found = [(one.path.stem, one.run, one.step, one.epoch) for one in saved_loras(made)]
    assert found == [
        ("cats-000001-ema", "cats", 10, 1),
        ("cats-000001", "cats", 10, 1),
        ("cats-best", "cats", 12, 2),
        ("cats-step00000012", "cats", 12, 2),
        ("cats", "cats", 20, 2),
        ("dogs-step00000007-diffusers", "dogs", 7, None),
        ("dogs", "dogs", None, None),
    ]
    flags = {one.path.stem: (one.best, one.average, one.finished) for one in saved_loras(made)}
    assert flags["cats-best"] == (True, False, False)
    assert flags["cats-000001-ema"] == (False, True, False)
    assert flags["cats"] == (False, False, True)


@pytest.mark.slow
def test_training_starts_from_the_best_of_an_earlier_run_and_not_from_its_own_folder(tiny_run, tmp_path, capsys):
    first = tiny_run.options(
        tmp_path / "first", max_train_steps=4, save_every_n_steps=1, validation_items=1, validation_timesteps=1,
        keep_best=True, validate_every_n_steps=2,
    )  # fmt: skip
    train.run(first)
    best = first.output_dir / "lora-best.safetensors"
    found = [one.path.stem for one in saved_loras(first.output_dir) if not one.best]
    assert found == ["lora-step00000001", "lora-step00000002", "lora-step00000003", "lora"]
    second = replace(first, output_dir=tmp_path / "second", max_train_steps=1, network_weights=first.output_dir)
    assert train.run(second).inputs["network_weights"] == lora_identity(best)
    with pytest.raises(UsageError, match="the folder that this run writes to"):
        train.run(replace(first, network_weights=first.output_dir))
    for name in ("lora", "lora-best", "lora-step00000002"):
        file = first.output_dir / f"{name}.safetensors"
        for start in ({"network_weights": file}, {"base_weights": (file,)}):
            with pytest.raises(UsageError, match="a file that this run writes over or removes"):
                train.run(replace(first, fresh=True, **start))
    assert main(["export", FLAG, str(first.output_dir), "--save_path", str(tmp_path / "out.safetensors")]) == 0
    assert "lora-best.safetensors, its best" in capsys.readouterr().err
    train.run(replace(first, network_weights=best, output_name="another", max_train_steps=1, keep_best=False))


def test_of_two_experts_both_counts_of_steps_are_told(tmp_path, lora, caplog):
    caplog.set_level("INFO", logger="wangen")
    header = {"ss_steps": "12", "wangen.run_steps": "40", "wangen.expert": "high_noise"}
    write(tmp_path / "cats_high_noise.safetensors", lora, "comfyui", header)
    assert chosen(tmp_path, "high_noise") == "cats_high_noise.safetensors"
    assert caplog.messages[0].endswith("its last (step 40, 12 of its own)")


def test_a_folder_of_two_experts_that_is_merged_says_nothing_where_both_are_trained(folder, tmp_path):
    made = folder("cats_high_noise", "cats_low_noise")
    options = Train(task="t2v-A14B", output_dir=tmp_path / "out", output_name="n", base_weights=(made,))
    for expert in ("high", "low"):
        (path,) = resolved(replace(options, experts=expert), MODEL, None).base_weights
        assert path.name == f"cats_{expert}_noise.safetensors"
    with pytest.raises(WangenError, match="LoRAs of two experts"):
        resolved(options, MODEL, None)
