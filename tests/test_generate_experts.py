"""`generate` with the LoRAs of two experts: which a run's folder means, and what is said of those that do not fit."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_generate import options_for

from wangen import profiles
from wangen.generator.errors import WangenError
from wangen.generator.lora_config import lora_identity
from wangen.runtime import generate, train
from wangen.runtime.sampling.options import resolved
from wangen.runtime.sampling.sampler import Sampler

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lora(tiny_run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    train.run(tiny_run.options(folder, max_train_steps=1))
    return folder / "lora.safetensors"


@pytest.fixture
def high(tiny_run, tmp_path) -> Path:
    """The other expert's weights: those of the first, halved."""
    path = tmp_path / "high_noise.safetensors"
    save_file({name: value / 2 for name, value in load_file(tiny_run.weights["dit"]).items()}, path)
    return path


@pytest.fixture
def far_enough(monkeypatch):
    """Nothing is sampled: what is said before is all that counts."""

    def stop(*_words):
        raise WangenError("far enough")

    monkeypatch.setattr(generate, "make_scenes", stop)


def test_a_runs_folder_gives_each_expert_its_lora(tiny_run, lora, tmp_path):
    both, low = tmp_path / "both", tmp_path / "low"
    for file in (both / "a_low_noise", both / "a_high_noise", low / "b_low_noise"):
        file.parent.mkdir(exist_ok=True)
        save_file(load_file(lora), file.with_suffix(".safetensors"))
    given = options_for(tiny_run, Path("a.mp4"), task="t2v-A14B", dit_high_noise=Path("high"), lora_weight=(low, both),
                        lora_multiplier=(0.5, 0.75))  # fmt: skip
    found = resolved(given, profiles.model("t2v-A14B"), CPU)
    assert [path.stem for path in found.lora_weight] == ["b_low_noise", "a_low_noise"]
    assert [path.stem for path in found.lora_weight_high_noise] == ["a_high_noise"]
    assert found.lora_multiplier_high_noise == (0.75,)
    told = resolved(replace(given, lora_weight_high_noise=(lora,)), profiles.model("t2v-A14B"), CPU)
    assert (told.lora_weight_high_noise, told.lora_multiplier_high_noise) == ((lora,), (1.0,))
    save_file(load_file(lora), both / "b_low_noise.safetensors")
    (both / "train.report.json").write_text('{"result": {"loras": ["b_low_noise.safetensors"]}}')
    with pytest.raises(WangenError, match=r"would be of two runs: a_high_noise.*and b_low_noise"):
        resolved(given, profiles.model("t2v-A14B"), CPU)


@pytest.mark.parametrize(("trained", "other"), [("low_noise", "high_noise"), ("high_noise", "low_noise")])
def test_a_folder_for_both_may_have_one_experts_lora(tiny_run, lora, tmp_path, caplog, trained, other):
    """As a script gives it, whose knob EXPERTS was turned."""
    folder = tmp_path / "run"
    folder.mkdir()
    save_file(load_file(lora), folder / f"a_{trained}.safetensors")
    given = options_for(tiny_run, Path("a.mp4"), task="t2v-A14B", dit_high_noise=Path("high"), lora_weight=(folder,),
                        lora_weight_high_noise=(lora, folder), lora_multiplier_high_noise=(0.5, 0.25))  # fmt: skip
    found = resolved(given, profiles.model("t2v-A14B"), CPU)
    stems = {"low_noise": [path.stem for path in found.lora_weight],
             "high_noise": [path.stem for path in found.lora_weight_high_noise]}  # fmt: skip
    if trained == "high_noise":
        assert stems == {"low_noise": [], "high_noise": ["lora", "a_high_noise"]}
    else:
        assert stems == {"low_noise": ["a_low_noise"], "high_noise": ["lora"]}
    assert found.lora_multiplier_high_noise == ((0.5, 0.25) if trained == "high_noise" else (0.5,))
    words = f"holds a LoRA of the {trained} expert alone: the {other} one stays as it is".replace("_", "-")
    assert words in caplog.text.replace(str(folder), "")
    caplog.clear()
    save_file(load_file(lora), folder / "b.safetensors")  # named for none, and so for either
    with suppress(WangenError):  # it is another run
        resolved(given, profiles.model("t2v-A14B"), CPU)
    assert "alone" not in caplog.text


@pytest.mark.usefixtures("far_enough")
def test_a_lora_of_the_other_expert_is_said(tiny_run, lora, tmp_path, caplog):
    for name, own, told in (
        ("a", "high_noise", "was trained for the high"), ("b_high_noise", None, "is by its name for the high"),
        ("c_high_noise", "low_noise", ""),
    ):  # fmt: skip
        caplog.clear()
        save_file(load_file(lora), file := tmp_path / f"{name}.safetensors", {"wangen.expert": own} if own else None)
        with pytest.raises(WangenError, match="far enough"):
            generate.run(options_for(tiny_run, tmp_path / "a.mp4", lora_weight=(file,)))
        assert (told in caplog.text, "high-noise expert" in caplog.text) == (True, bool(told))


@pytest.mark.usefixtures("far_enough")
def test_one_expert_given_twice_is_refused_and_names_that_are_swapped_are_said(tiny_run, high, tmp_path, caplog):
    dit = tiny_run.weights["dit"]
    given = options_for(tiny_run, tmp_path / "a.mp4", task="t2v-A14B", dit_high_noise=dit)
    with pytest.raises(WangenError, match=r"the same weights as .*, given to both experts"):
        generate.run(given)
    low = tmp_path / "low_noise.safetensors"
    save_file(load_file(dit), low)
    files = {}
    for name, noted in (("a", "low_noise"), ("b", "high_noise")):  # as `wangen export` merges them
        files[noted] = tmp_path / f"{name}.safetensors"
        save_file(load_file(low if name == "a" else high), files[noted], {"wangen.expert": noted})
    noted_low, noted_high = files.values()
    for one, other, swapped in (
        (low, high, False), (high, low, True), (dit, low, False), (noted_high, noted_low, True),
        (noted_low, noted_high, False),
    ):  # fmt: skip
        caplog.clear()
        with pytest.raises(WangenError, match="far enough" if one != dit else "the same weights"):
            generate.run(replace(given, dit=one, dit_high_noise=other))
        assert ("--dit and --dit_high_noise seem swapped by their names or headers" in caplog.text) == swapped


def test_transformers_that_take_turns_leave_room_for_the_vae(tiny_run, high, tmp_path, monkeypatch):
    """Parked are both when the frames are decoded, and neither of a run with one transformer."""
    parked: list[list[bool]] = []
    rest = Sampler.rest

    def then_look(sampler):
        rest(sampler)
        parked.append([loaded.place.parked for loaded in sampler._loaded])

    monkeypatch.setattr(Sampler, "rest", then_look)
    picture = {"video_length": 1, "infer_steps": 2}
    given = options_for(tiny_run, tmp_path / "a.png", **picture)
    generate.run(given)
    generate.run(replace(given, task="t2v-A14B", dit_high_noise=high, save_path=tmp_path / "b.png"))
    assert parked == [[False], [True, True]]


@pytest.mark.usefixtures("far_enough")
def test_another_boundary_than_that_of_the_training_is_said(tiny_run, lora, high, tmp_path, caplog):
    for number, text in enumerate(("0.9", "0.875", "None")):
        told = {"wangen.fingerprint": json.dumps({"timestep_boundary": text})}
        save_file(load_file(lora), tmp_path / f"{number}.safetensors", told)
    loras = tuple(tmp_path / f"{number}.safetensors" for number in (0, 1, 2, 0))
    given = options_for(tiny_run, tmp_path / "a.mp4", task="t2v-A14B", dit_high_noise=high, lora_weight=loras)
    for changes, times in (({}, 1), ({"timestep_boundary": 900.0}, 1), ({"lora_weight": loras[:1]}, 1),
                           ({"lora_weight": loras[1:3]}, 0)):  # fmt: skip
        caplog.clear()
        with pytest.raises(WangenError, match="far enough"):
            generate.run(replace(given, **changes))
        assert caplog.text.count("was trained with --timestep_boundary") == times
    caplog.clear()
    with pytest.raises(WangenError, match="far enough"):
        generate.run(given)
    assert "0.safetensors was trained with --timestep_boundary 0.9, and is used with 0.875" in caplog.text


@pytest.mark.usefixtures("far_enough")
def test_loras_that_the_base_of_the_training_had_merged_in_are_missed(tiny_run, lora, tmp_path, caplog):
    base, trained, other = (tmp_path / f"{name}.safetensors" for name in ("base", "trained", "other"))
    save_file(load_file(lora), base, {"note": "base"})
    for path, told in ((trained, [lora_identity(base)]), (other, {"abc": [{}]})):
        save_file(load_file(lora), path, {"wangen.fingerprint": json.dumps({"base_weights": told})})
    given = options_for(tiny_run, tmp_path / "a.mp4")
    for loras, times in (((trained,), 1), ((trained, base), 0), ((base,), 0), ((other,), 0)):
        caplog.clear()
        with pytest.raises(WangenError, match="far enough"):
            generate.run(replace(given, lora_weight=loras))
        assert caplog.text.count("trained.safetensors was trained with 1 other LoRA merged into its base") == times
    save_file(load_file(lora), trained, {"wangen.fingerprint": json.dumps({"base_weights": [lora_identity(base)],
                                                                            "dora": "True"})})  # fmt: skip
    with pytest.raises(WangenError, match="far enough"):
        generate.run(replace(given, lora_weight=(trained, base)))
    assert "a --dit into which they are not merged" in caplog.text, "a DoRA is put on before the other"
