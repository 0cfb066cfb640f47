"""`evaluate` as a whole: what it finds is what the parts find, it goes on where it stopped, and it names the best."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import make_clip
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import TinyRun
from train_cases import Cases, make_cases

from wangen.generator.errors import UsageError, WangenError
from wangen.generator.header_keys import JUDGED_AT
from wangen.generator.steps import CacheLatents, CacheText, Evaluate, Generate
from wangen.runtime import cache_latents, cache_text, evaluate, generate, train
from wangen.runtime.evaluation import judging
from wangen.runtime.evaluation_file import BASE, read_evaluation

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder: a LoRA after 4 and after 8 steps, and the best by held-out loss."""
    folder = tmp_path_factory.mktemp("trained")
    train.run(tiny_run.options(folder, max_train_steps=8, save_every_n_steps=4, learning_rate=1e-2))
    return folder


def flags(tiny_run: TinyRun, loras: Path, output: Path, **changes) -> Evaluate:
    options = Evaluate(
        **tiny_run.weights,
        dataset_config=tiny_run.dataset_config,
        training_config=tiny_run.dataset_config,
        lora_weight=(loras,),
        task="t2v-1.3B",
        validation_timesteps=2,
        video_size=(64, 64),
        video_length=5,
        infer_steps=2,
        guidance_scale=1.0,
        num_prompts=2,
        device="cpu",
        output_dir=output,
    )
    return replace(options, **changes)


def fill(tiny_run: TinyRun, **dataset: Path) -> None:
    """Cache a dataset with the tiny weights."""
    weights = tiny_run.weights
    cache_latents.run(CacheLatents(**dataset, vae=weights["vae"], vae_dtype="float32", device="cpu"))
    cache_text.run(CacheText(**dataset, t5=weights["t5"], t5_dtype="float32", device="cpu"))


def test_it_finds_the_held_out_loss_that_training_finds(tiny_run, tmp_path):
    own_config, text = tmp_path / "with_regularisation.toml", tiny_run.dataset_config.read_text(encoding="utf-8")
    own_config.write_text(
        f"{text}\n[[datasets]]{text.rpartition('[[datasets]]')[2]}\nis_reg = true\n", encoding="utf-8"
    )
    options = tiny_run.options(
        tmp_path / "run", max_train_steps=4, learning_rate=1e-2, validation_config=own_config,
        validation_timesteps=3, validate_every_n_steps=4, seed=42,
    )  # fmt: skip
    train.run(options)
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    (_, own) = [line["validation"] for line in lines if "validation" in line]
    judged = flags(tiny_run, tmp_path / "run/lora.safetensors", tmp_path / "out", dataset_config=own_config)
    evaluate.run(replace(judged, validation_timesteps=3, num_videos=0))
    found = read_evaluation(tmp_path / "out/evaluation.json")
    assert found.mean_base == pytest.approx(own["mean_base"], rel=1e-5)
    assert found.winner.mean_loss == pytest.approx(own["mean_adapter"], rel=1e-4)
    assert [row.name for row in found.per_timestep] == [f"{row['timestep']:.1f}" for row in own["rows"]]
    assert found.num_items == own["num_items"]


def test_the_items_that_training_held_out_are_found_again(tiny_run, tmp_path):
    own = {"validation_items": 1, "validation_timesteps": 2, "seed": 7}
    train.run(tiny_run.options(tmp_path / "run", max_train_steps=4, validate_every_n_steps=4, **own))
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    (_, last) = [line["validation"] for line in lines if "validation" in line]
    many = 10**20  # more than a C long holds
    options = flags(tiny_run, tmp_path / "run", tmp_path / "out", training_config=None, num_prompts=many, **own)
    evaluate.run(options)
    found = read_evaluation(tmp_path / "out/evaluation.json")
    assert found.mean_base == pytest.approx(last["mean_base"], rel=1e-5)
    assert found.num_items == 1
    assert found.memorisation  # the rest was trained on
    evaluate.run(replace(options, training_config=tiny_run.dataset_config, output_dir=tmp_path / "told"))
    told = read_evaluation(tmp_path / "told/evaluation.json")
    assert (told.warnings, told.memorisation) == (found.warnings, found.memorisation), "the very same dataset"
    with pytest.raises(UsageError, match="leaves nothing of 3 items") as error:
        evaluate.run(replace(options, validation_items=3))
    assert "--validation_config" not in str(error.value), "a flag of training alone"


def test_a_picture_is_not_blamed_for_its_lack_of_motion(tiny_run, trained, tmp_path):
    for length, compared in ((1, False), (5, True)):
        options = flags(tiny_run, trained / "lora.safetensors", tmp_path / str(length), video_length=length)
        evaluate.run(replace(options, num_prompts=1))
        found = read_evaluation(tmp_path / str(length) / "evaluation.json")
        (video,) = found.videos
        assert ("motion_to_training" in video.signals[BASE]) == compared
        assert compared or not any("move" in warning for warning in found.warnings)


def test_items_that_the_checkpoints_were_trained_on_are_told_from_their_headers(tiny_run, tmp_path, caplog):
    def warnings(run: str, **changes) -> str:
        given = {"training_config": None, "num_videos": 0, "seed": 7, **changes}
        evaluate.run(flags(tiny_run, tmp_path / run / "lora.safetensors", tmp_path / "out", **given))
        return "\n".join(read_evaluation(tmp_path / "out/evaluation.json").warnings)

    for run, dropout in (("plain", 0.0), ("dropout", 0.5)):
        own = {"validation_items": 1, "seed": 7, "max_train_steps": 1, "caption_dropout": dropout}
        train.run(tiny_run.options(tmp_path / run, **own))
        assert "trained on" not in warnings(run, validation_items=1)
        assert "2 files that are judged by were trained on as well" in warnings(run)
        assert read_evaluation(tmp_path / "out/evaluation.json").num_trained == 2
        assert "trained on as well" in warnings(run, validation_items=2)
    assert "2 files that are judged by were trained on as well" in caplog.text
    train.run(tiny_run.options(tmp_path / "all", max_train_steps=1, seed=7))
    assert "all 3 files that are judged by were trained on" in warnings("all")
    assert "the file that is judged by was trained on" in warnings("all", validation_items=1)
    weights = load_file(tmp_path / "all/lora.safetensors")
    for metadata in ({}, {"wangen.fingerprint": "{"}, {"wangen.fingerprint": "[1]"}, {"wangen.fingerprint": "{}"}):
        save_file(weights, tmp_path / "all/lora.safetensors", metadata)
        assert "trained on" not in warnings("all")  # nobody knows


def test_all_checkpoints_of_a_run_are_ranked_and_the_best_is_filmed_beside_the_base(tiny_run, trained, tmp_path):
    report = evaluate.run(flags(tiny_run, trained, tmp_path))
    found = read_evaluation(tmp_path / "evaluation.json")
    assert {one.name for one in found.checkpoints} == {"lora-step00000004", "lora"}
    assert [one.step for one in sorted(found.checkpoints, key=lambda one: one.step)] == [4, 8]
    losses = [one.mean_loss for one in found.ranked]
    assert losses == sorted(losses)
    assert report.result["best"] == found.best == found.ranked[0].name
    assert len(found.videos) == 2
    for video in found.videos:
        assert set(video.files) == {BASE, found.best}
        base, own = (tmp_path / video.files[name] for name in (BASE, found.best))
        assert base.read_bytes() != own.read_bytes()
        assert video.signals[found.best]["psnr_to_base"] < 60
        assert video.signals[BASE].keys() | {"psnr_to_base", "ssim_to_base"} == video.signals[found.best].keys()
    assert {one.checkpoint for one in found.memorisation} == {found.best}
    assert any("only 3 files held out" in warning for warning in found.warnings)
    assert "all 3 files that are judged by were trained on" in found.warnings[0]


def test_paths_of_loras_hold_where_a_run_is_moved_to(tiny_run, trained, tmp_path, monkeypatch):
    loras = {"run/lora.safetensors": "lora.safetensors", "x/lora.safetensors": "../x/lora.safetensors"}
    for name, told in loras.items():
        (tmp_path / name).parent.mkdir()
        shutil.copyfile(trained / "lora.safetensors", tmp_path / name)
        report = evaluate.run(flags(tiny_run, tmp_path / name, tmp_path / "run", num_videos=0))
        assert read_evaluation(tmp_path / "run/evaluation.json").winner.file == told
        assert report.result["lora"] == tmp_path / name
    monkeypatch.chdir(trained.parent)
    elsewhere = Path(trained.name) / "lora.safetensors"
    evaluate.run(flags(tiny_run, elsewhere, tmp_path / "run", num_videos=0))
    found = read_evaluation(tmp_path / "run/evaluation.json").winner
    assert found.file == (trained / "lora.safetensors").as_posix()


def test_a_single_held_out_file_has_no_interval(tiny_run, trained, tmp_path):
    report = evaluate.run(flags(tiny_run, trained, tmp_path, num_videos=0, validation_items=1, training_config=None))
    assert "no interval, as a single file is held out" in report.summary
    found = read_evaluation(tmp_path / "evaluation.json")
    assert [(one.ci_low, one.ci_high) for one in found.checkpoints] == [(None, None)] * 2
    assert "only one file, or clips of one video, is held out: there is no interval" in " ".join(found.warnings)


def test_a_video_of_it_is_what_generate_makes_and_repeats(tiny_run, trained, tmp_path):
    evaluate.run(flags(tiny_run, trained / "lora.safetensors", tmp_path / "out", num_prompts=1))
    (video,) = read_evaluation(tmp_path / "out/evaluation.json").videos
    film = tmp_path / "out" / video.files["lora"]
    again = Generate(
        **tiny_run.weights, repeat=film, lora_weight=(trained,), save_path=tmp_path / "again.mp4", device="cpu",
    )  # fmt: skip
    generate.run(again)
    assert (tmp_path / "again.mp4").read_bytes() == film.read_bytes()


def test_what_is_done_is_not_done_again_and_the_result_is_the_same(tiny_run, trained, tmp_path, monkeypatch):
    options = flags(tiny_run, trained, tmp_path / "a")
    evaluate.run(options)
    whole = (tmp_path / "a/evaluation.json").read_bytes()
    measured = []
    own = judging.measure
    monkeypatch.setattr(judging, "measure", lambda *given, **named: measured.append(1) or own(*given, **named))
    assert evaluate.run(options).counts["videos"] == 0
    assert not measured
    assert (tmp_path / "a/evaluation.json").read_bytes() == whole
    next((tmp_path / "a/losses").iterdir()).write_text("{", encoding="utf-8")
    next((tmp_path / "a/videos").glob("*.mp4")).unlink()
    assert evaluate.run(options).counts["videos"] == 1
    assert len(measured) == 1
    assert (tmp_path / "a/evaluation.json").read_bytes() == whole
    torn = next((tmp_path / "a/videos").glob("*.mp4"))
    torn.write_bytes(torn.read_bytes()[:-100])
    assert evaluate.run(options).counts["videos"] == 1
    assert (tmp_path / "a/evaluation.json").read_bytes() == whole
    shutil.rmtree(tmp_path / "a/videos")
    assert evaluate.run(replace(options, infer_steps=1)).counts["videos"] == 4


@pytest.mark.parametrize("place", ["wangen.runtime.sampling.repeat.version", "wangen.runtime.evaluate.version"])
def test_other_versions_of_the_libraries_judge_anew(tiny_run, trained, tmp_path, monkeypatch, place):
    options = flags(tiny_run, trained / "lora.safetensors", tmp_path, num_videos=0)
    evaluate.run(options)
    before = set((tmp_path / "losses").iterdir())
    monkeypatch.setattr(place, lambda _name: "9.0")
    evaluate.run(options)
    assert len(set((tmp_path / "losses").iterdir()) - before) == len(before) == 2


def test_loras_of_more_runs_than_fit_into_memory_at_once_get_the_same_losses(tiny_run, trained, tmp_path, monkeypatch):
    evaluate.run(flags(tiny_run, trained, tmp_path / "a", num_videos=0))
    monkeypatch.setattr(judging, "LORAS_AT_ONCE", 1)
    evaluate.run(flags(tiny_run, trained, tmp_path / "b", num_videos=0))
    first, second = (read_evaluation(tmp_path / name / "evaluation.json") for name in "ab")
    assert [(one.name, one.mean_loss) for one in first.ranked] == [(one.name, one.mean_loss) for one in second.ranked]


def test_other_material_says_what_was_forgotten(tiny_run, trained, tmp_path):
    media = tmp_path / "other/media"
    media.mkdir(parents=True)
    make_clip(media / "walk.mp4", num_frames=8, fps=16, size=(64, 64))
    (media / "walk.txt").write_text("a red square on green", encoding="utf-8")
    config = tmp_path / "other/other.toml"
    text = f"""
[general]
resolution = [64, 64]
[[datasets]]
video_directory = "{media.as_posix()}"
cache_directory = "{(tmp_path / "other/cache").as_posix()}"
target_frames = [5]
"""
    config.write_text(text, encoding="utf-8")
    with pytest.raises(WangenError, match="cache"):
        evaluate.run(flags(tiny_run, trained, tmp_path / "out", forgetting_config=config, num_videos=0))
    fill(tiny_run, dataset_config=config)
    evaluate.run(flags(tiny_run, trained, tmp_path / "out", forgetting_config=config, num_videos=0))
    first, *rows = read_evaluation(tmp_path / "out/evaluation.json").forgetting
    assert (first.name, first.num_items) == ("other material", 1)
    assert set(first.losses) == {"lora", "lora-step00000004"}
    assert len(rows) == 2


def test_manifests_are_judged_by_with_their_labels_as_activities(tiny_run, trained, tmp_path):
    lines = {"train": [("a", "walk")], "val": [("b", "walk"), ("c", "run"), ("d", "walk")]}
    for number, (name, _) in enumerate(lines["train"] + lines["val"]):
        make_clip(tmp_path / f"{name}.mp4", num_frames=5, fps=16, size=(64, 64), seed=number)
    for name, clips in lines.items():
        rows = [{"file": f"{clip}.mp4", "prompt": f"clip {clip}", "label": label, "fps": 16, "frames": 5, "width": 64,
                 "height": 64} for clip, label in clips]  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        fill(tiny_run, manifest=tmp_path / f"{name}.jsonl")
    given = {"dataset_config": None, "manifest": tmp_path / "val.jsonl", "training_config": tmp_path / "train.jsonl"}
    evaluate.run(flags(tiny_run, trained / "lora.safetensors", tmp_path / "out", **given))
    found = read_evaluation(tmp_path / "out/evaluation.json")
    assert [(row.name, row.num_items) for row in found.per_activity] == [("run", 1), ("walk", 2)]
    assert [(video.activity, video.prompt) for video in found.videos] == [("walk", "clip b"), ("run", "clip c")]
    assert {one.nearest for one in found.memorisation} == {"a.mp4:0+5"}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return make_cases(tmp_path_factory.mktemp("cases"))


def test_two_experts_are_judged_in_pairs_each_in_its_own_range(cases, tmp_path):
    train.run(
        cases.options(tmp_path / "run", task="t2v-A14B", high_noise_share=0.5, max_train_steps=4, learning_rate=1e-2)
    )
    options = Evaluate(
        dataset_config=cases.folder / "rich.toml", lora_weight=(tmp_path / "run",), task="t2v-A14B",
        dit=cases.weights["dit"], dit_high_noise=cases.weights["high"], validation_timesteps=2, num_videos=0,
        device="cpu", output_dir=tmp_path / "out",
    )  # fmt: skip
    evaluate.run(options)
    found = read_evaluation(tmp_path / "out/evaluation.json")
    assert [float(row.name) for row in found.per_timestep] == pytest.approx([218.8, 656.2, 906.2, 968.8], abs=0.1)
    assert Path(found.winner.file).name == "lora_low_noise.safetensors"
    assert Path(found.winner.file_high_noise).name == "lora_high_noise.safetensors"
    low = replace(options, lora_weight=(tmp_path / "run/lora_low_noise.safetensors",), output_dir=tmp_path / "low",
                  lora_weight_high_noise=(tmp_path / "run/lora_high_noise.safetensors",))  # fmt: skip
    evaluate.run(low)
    assert read_evaluation(tmp_path / "low/evaluation.json").winner.mean_loss == found.winner.mean_loss
    (tmp_path / "run/lora_low_noise.safetensors").unlink()
    alone = []
    for name, weights in (("folder", tmp_path / "run"), ("file", tmp_path / "run/lora_high_noise.safetensors")):
        evaluate.run(replace(options, lora_weight=(weights,), output_dir=tmp_path / name))
        alone.append(read_evaluation(tmp_path / name / "evaluation.json"))
    assert alone[0].per_timestep == alone[1].per_timestep
    low_noise, high_noise = alone[0].per_timestep[:2], alone[0].per_timestep[2:]
    assert all(row.losses["lora_high_noise"] == row.base for row in low_noise), "by the base alone"
    assert [row.losses["lora_high_noise"] for row in high_noise] == [
        row.losses["lora"] for row in found.per_timestep[2:]
    ]
    assert (alone[0].winner.file, Path(alone[0].winner.file_high_noise).name) == ("", "lora_high_noise.safetensors")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"lora_weight": ()}, "needs --lora_weight"),
        ({"t5": None}, "videos need --t5"),
        ({"validation_timesteps": 0}, "--validation_timesteps must be at least 1"),
        ({"validation_timesteps": 1001}, "--validation_timesteps must be at most 1000, got 1001"),
        ({"video_length": 6}, "use 5"),
        ({"lora_weight_high_noise": (Path("x.safetensors"),)}, "one transformer"),
        ({"clip_model": Path("nowhere")}, "--clip_model"),
        ({"prompt_file": Path("nowhere.txt")}, "--prompt_file"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_loads(tiny_run, trained, tmp_path, changes, part):
    with pytest.raises((UsageError, WangenError), match=part):
        evaluate.run(flags(tiny_run, trained, tmp_path / "out", **changes))
    assert not (tmp_path / "out/losses").exists()


def test_loras_of_one_name_are_told_apart_by_their_folders_and_equal_ones_count_once(
    tiny_run, trained, tmp_path, caplog
):
    (tmp_path / "x").mkdir()
    shutil.copyfile(trained / "lora-step00000004.safetensors", tmp_path / "x/lora.safetensors")
    both = (trained / "lora.safetensors", tmp_path / "x/lora.safetensors")
    evaluate.run(flags(tiny_run, trained, tmp_path / "out", lora_weight=both, num_videos=0))
    found = read_evaluation(tmp_path / "out/evaluation.json")
    assert {one.name for one in found.checkpoints} == {f"{trained.name}-lora", "x-lora"}
    shutil.copyfile(trained / "lora.safetensors", tmp_path / "x/copy.safetensors")
    both = (trained / "lora.safetensors", tmp_path / "x/copy.safetensors")
    with caplog.at_level("INFO"):
        evaluate.run(flags(tiny_run, trained, tmp_path / "out", lora_weight=both, num_videos=0))
    assert "copy has the weights of lora" in caplog.text
    assert len(read_evaluation(tmp_path / "out/evaluation.json").checkpoints) == 1
    with safe_open(both[0], "pt") as file:
        header = {**file.metadata(), JUDGED_AT: "0123"}  # as of the best one, which is another file
    save_file(load_file(both[0]), both[1], header)
    caplog.clear()
    with caplog.at_level("INFO"):
        evaluate.run(flags(tiny_run, trained, tmp_path / "out", lora_weight=both, num_videos=0))
    assert "copy has the weights of lora" in caplog.text
    (tmp_path / "x/copy.safetensors").rename(tmp_path / "x/base.safetensors")
    with pytest.raises(UsageError, match="called base"):
        evaluate.run(flags(tiny_run, tmp_path / "x/base.safetensors", tmp_path / "out", num_videos=0))


def test_a_lora_whose_loss_is_no_number_is_left_out_and_the_others_are_judged(tiny_run, trained, tmp_path, caplog):
    weights = load_file(trained / "lora.safetensors")
    name = next(name for name in weights if "lora_B" in name)
    for bad in (tmp_path / "burst.safetensors", tmp_path / "alone.safetensors"):
        save_file({**weights, name: torch.full_like(weights[name], 1e38)}, bad)
    both = (trained / "lora.safetensors", tmp_path / "burst.safetensors")
    evaluate.run(flags(tiny_run, trained, tmp_path / "out", lora_weight=both, num_videos=0))
    assert [one.name for one in read_evaluation(tmp_path / "out/evaluation.json").checkpoints] == ["lora"]
    assert "burst is left out: its loss is not finite" in caplog.text
    with pytest.raises(WangenError, match="of all LoRAs are not finite"):
        evaluate.run(flags(tiny_run, tmp_path / "alone.safetensors", tmp_path / "out", num_videos=0))


def test_it_tells_a_lora_that_learned_from_shuffled_captions_and_from_an_untrained_one(tmp_path):
    """On the tiny Wan: colours that it never saw; the untrained LoRA is saved after a step at a rate of all but 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        import it_learns

    held_out = it_learns.dataset(tmp_path / "held-out", it_learns.NUM_HELD_OUT, first=it_learns.NUM_CLIPS)
    loras = tmp_path / "loras"
    loras.mkdir()
    right = it_learns.dataset(tmp_path / "right", it_learns.NUM_CLIPS)
    shutil.copytree(tmp_path / "right" / "cache", tmp_path / "shuffled" / "cache")  # the same clips, other captions
    shuffled = it_learns.dataset(tmp_path / "shuffled", it_learns.NUM_CLIPS, shuffled=True)
    for name, config, steps, rate in (("right", right, 120, 1.0), ("shuffled", shuffled, 120, 1.0),
                                      ("untrained", right, 1, 1e-6)):  # fmt: skip
        options = it_learns.training(config, None, tmp_path / name / "lora", steps)
        train.run(replace(options, learning_rate=rate * options.learning_rate, output_name=name))
        shutil.copyfile(tmp_path / name / "lora" / f"{name}.safetensors", loras / f"{name}.safetensors")
    options = Evaluate(
        dataset_config=held_out, lora_weight=tuple(sorted(loras.iterdir())), task=it_learns.TASK, dit=it_learns.DIT,
        vae=it_learns.VAE, t5=it_learns.T5, video_size=(64, 64), video_length=17, infer_steps=15, guidance_scale=3.0,
        num_prompts=3, videos_of="all", device="cpu", output_dir=tmp_path / "out",
    )  # fmt: skip
    evaluate.run(options)
    found = read_evaluation(tmp_path / "out/evaluation.json")
    own, other, untrained = found.ranked
    assert [one.name for one in found.ranked] == ["right", "shuffled", "untrained"]
    assert own.ci_high < 0
    assert abs(untrained.delta) < 1e-4 < abs(other.delta)
    assert own.mean_loss < 0.95 * other.mean_loss
    assert not any("cannot be told" in warning for warning in found.warnings)
    likeness = {
        name: min(video.signals[name]["ssim_to_base"] for video in found.videos) for name in ("right", "untrained")
    }
    assert likeness["untrained"] > 0.99 > 0.95 > likeness["right"]
