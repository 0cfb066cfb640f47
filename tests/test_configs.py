"""The configurations that ship with wangen: what they say arrives, and one command with tiny weights trains by them."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import make_image
from safetensors import safe_open
from test_steps import TRAIN
from tiny import TinyRun
from tiny_family import TinyTask, tiny_task
from world_model_shards import write_split

from wangen import profiles
from wangen.generator import lint
from wangen.generator.cli import main
from wangen.generator.commands import parse
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import CacheLatents, Train
from wangen.generator.tomls import load
from wangen.runtime.training import launcher

pytestmark = pytest.mark.slow

NAMES = ("captioned-images", "world-model")
NOW = [
    "--device",
    "cpu",
    "--no_compile",
    "--max_train_steps",
    "2",
    "--validate_every_n_steps",
    "2",
    "--log_with",
    "none",
]
"""What a test asks otherwise: a moment's run on the CPU."""


def values_of(name: str) -> dict[str, Any]:
    """All keys of a shipped configuration."""
    found: dict[str, Any] = {}
    for key, value in load(profiles.config_files()[name]).items():
        new = value if isinstance(value, dict) else {key: value}
        assert not found.keys() & new.keys(), "a key stands twice"
        found |= new
    return found


def test_these_ship_and_every_value_has_its_reason():
    assert tuple(profiles.config_files()) == NAMES
    for path in profiles.config_files().values():
        for line in path.read_text(encoding="utf-8").splitlines():
            assert " = " not in line or "#" in line or line.startswith("task"), line


@pytest.mark.parametrize("name", NAMES)
def test_every_value_lands_where_it_says(name):
    step = parse(Train, [*TRAIN, "--config_file", name])
    assert {key: getattr(step, key) for key in values_of(name)} == values_of(name)
    usual = parse(Train, TRAIN)
    assert {key for key in vars(step) if getattr(step, key) != getattr(usual, key)} <= values_of(name).keys() | {
        "config_file"
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_no_flag_has_is_refused(name, tmp_path):
    changed = tmp_path / "mine.toml"
    text = profiles.config_files()[name].read_text(encoding="utf-8")
    changed.write_text(text.replace("caption_dropout", "caption_dropuot"), encoding="utf-8")
    with pytest.raises(UsageError) as error:
        parse(Train, [*TRAIN, "--config_file", str(changed)])
    assert "did you mean --caption_dropout?" in str(error.value)
    with pytest.raises(UsageError, match="cache_latents has no flag"):
        parse(CacheLatents, ["--manifest", "m.jsonl", "--vae", "v", "--config_file", name])


def test_a_key_that_stands_twice_is_refused(tmp_path):
    """In two sections, of which each is read as if it were none."""
    twice = tmp_path / "mine.toml"
    for text in ("[a]\nseed = 1\n[b]\nseed = 2\n", "seed = 1\n[a]\nseed = 2\n"):
        twice.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match="seed stands there twice, as 1 and 2"):
            parse(Train, [*TRAIN, "--config_file", str(twice)])
    twice.write_text("[a]\nseed = 2\n[b]\nseed = 2\n", encoding="utf-8")
    assert parse(Train, [*TRAIN, "--config_file", str(twice)]).seed == 2


def test_a_file_that_names_a_toml_and_a_manifest_is_named(tmp_path):
    file, words = tmp_path / "mine.toml", ["--output_dir", "o", "--output_name", "n", "--dit", "d", "--vae", "v"]
    file.write_text('dataset_config = "d.toml"\nmanifest = "m.jsonl"\n', encoding="utf-8")
    with pytest.raises(UsageError, match="--dataset_config and --manifest contradict each other") as error:
        parse(Train, [*words, "--config_file", str(file)])
    assert error.value.where == str(file)
    assert parse(Train, [*words, "--config_file", str(file), "--manifest", "a.jsonl"]).dataset_config is None


def test_steps_on_the_command_line_win_over_epochs_in_the_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("max_train_epochs = 2\n", encoding="utf-8")
    found = parse(Train, [*TRAIN, "--config_file", str(file), "--max_train_steps", "3"])
    assert (found.max_train_steps, found.max_train_epochs) == (3, None)


def test_a_name_that_does_not_ship_lists_those_that_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        parse(Train, [*TRAIN, "--config_file", "world_model"])
    assert "none of that name ships with wangen" in error.value.found
    assert error.value.cure == "give a path, or one of captioned-images, world-model"
    for path in ("world-model.toml", str(tmp_path / "world-model")):
        with pytest.raises(WangenError, match="cannot read the TOML file") as missing:
            parse(Train, [*TRAIN, "--config_file", path])
        assert missing.value.cure == "check the path"


def test_a_file_of_the_name_wins_and_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "world-model").write_text("seed = 9\n")
    assert parse(Train, [*TRAIN, "--config_file", "world-model"]).seed == 9
    (tmp_path / "captioned-images").mkdir()
    assert parse(Train, [*TRAIN, "--config_file", "captioned-images"]).network_dim == 32


def test_what_is_held_out_on_the_command_line_wins_over_the_configuration(tmp_path):
    words = [*TRAIN, "--config_file", "captioned-images"]
    assert parse(Train, words).validation_items == 4
    step = parse(Train, [*words, "--val_manifest", "val.jsonl"])
    assert (step.validation_items, step.validation_config) == (0, Path("val.jsonl"))
    config = tmp_path / "mine.toml"
    config.write_text('val_manifest = "val.jsonl"\n')
    step = parse(Train, [*TRAIN, "--config_file", str(config), "--validation_items", "2"])
    assert (step.validation_items, step.validation_config) == (2, None)


def test_a_script_that_takes_a_shipped_configuration_is_judged_by_it(tmp_path):
    script = tmp_path / "run.sh"
    line = "wangen train --config_file world-model --manifest m.jsonl --dit wan2.2_ti2v_5B_bf16.safetensors"
    script.write_text(f"#!/bin/bash\nset -e\n{line}\n")
    (call,) = lint.read(script).calls
    assert call.value("train_mode") == "full"
    assert not call.more


def start_by(patch: pytest.MonkeyPatch, start: Any) -> None:
    """Let this take the place of starting processes."""
    for name in ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        patch.setenv(name, "1")  # what the launcher would set for good
    patch.setattr(launcher, "start", start)


def test_the_processes_of_a_run_are_told_what_the_configuration_and_the_command_line_say(tmp_path, monkeypatch):
    config = tmp_path / "mine.toml"
    config.write_text('gpus = "auto"\nasync_save = true\ncompile = true\nseed = 3\n')
    step = parse(Train, [*TRAIN, "--config_file", str(config), "--no_async_save", "--output_dir", str(tmp_path)])
    told: list[str] = []
    start_by(monkeypatch, lambda _config, *words: told.extend(words))
    launcher.train_together(step)
    assert told[:3] == ["-m", "wangen.runtime", "train"]
    own = parse(Train, told[3:])
    assert own == replace(step, gpus="1", config_file=None)
    assert (own.async_save, own.compile, own.seed) == (False, True, 3)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_processes_under_nohup_outlive_their_terminal_as_well(tmp_path, monkeypatch):
    """torch's launcher would take the signal and end them."""
    step = parse(Train, [*TRAIN, "--gpus", "auto", "--output_dir", str(tmp_path)])
    found: list[bool] = []
    start_by(monkeypatch, lambda config, *_: found.append("SIGHUP" in config.signals_to_handle))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup themselves
    try:
        launcher.train_together(step)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        launcher.train_together(step)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert found == [True, False]


# One command


@pytest.fixture(scope="module")
def tiny(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> TinyTask:
    return tiny_task("ti2v-5B", tiny_run, tmp_path_factory.mktemp("5b"))


def train(tiny: TinyTask, name: str, manifest: Path, output: Path, *words: str) -> list[dict[str, Any]]:
    """Run the one command; the lines of `metrics.jsonl`."""
    weights = [word for role in ("dit", "vae", "t5") for word in (f"--{role}", str(tiny.weights[role]))]
    line = ["train", "--config_file", name, "--manifest", str(manifest), *weights, "--output_dir", str(output)]
    assert main([*line, "--output_name", "mine", *NOW, *words]) == 0
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def entries(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifests of both splits of raw data, three clips of 9 frames and one."""
    folder = tmp_path_factory.mktemp("clips")
    write_split(folder / "raw" / "train_v2.0_raw", [[(0, 19)], [(1, 9)]])
    write_split(folder / "raw" / "val_v2.0_raw", [[(0, 9)]], flat=True)
    for split in ("train", "val"):
        line = ["world_model", "--source", str(folder / "raw"), "--output", str(folder), "--split", split]
        assert main([*line, "--frames", "9"]) == 0
    return folder


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_the_world_model_caches_and_trains_by_one_command(tiny, clips, tmp_path, mode):
    words = [] if mode == "full" else ["--train_mode", "lora", "--learning_rate", "1e-4", "--network_dim", "4"]
    words += ["--val_manifest", str(clips / "val.jsonl")]
    lines = train(tiny, "world-model", clips / "train.jsonl", tmp_path, *words)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert any("validation" in line for line in lines)
    (continued,) = (line["continuations"] for line in lines if "continuations" in line)
    assert len(continued["clips"]) == 1
    with safe_open(tmp_path / "mine.safetensors", "pt") as file:
        names = set(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert ("head.head.weight" in names) == (mode == "full")
    assert any("lora" in name for name in names) == (mode == "lora")
    before = entries(clips / "train_cache") | entries(clips / "val_cache")
    assert sum(".latent." in name for name in before) == 4
    train(tiny, "world-model", clips / "train.jsonl", tmp_path / "again", *words)
    assert entries(clips / "train_cache") | entries(clips / "val_cache") == before


def test_captioned_images_cache_and_train_by_one_command(tiny, tmp_path):
    rows = []
    for number in range(6):
        make_image(tmp_path / "pictures" / f"{number}.png", (64, 64), seed=number + 1)
        rows.append({"image_path": f"pictures/{number}.png", "prompt": "a red square on green" if number % 2 else
                     "a blue wall", "width": 64, "height": 64})  # fmt: skip
    manifest = tmp_path / "train.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lines = train(tiny, "captioned-images", manifest, tmp_path / "out")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    found = entries(tmp_path / "train_cache")
    assert sum(".latent." in name for name in found) == 6
    assert sum(".text_encoder_output." in name for name in found) == 2
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == {
        "mine.safetensors",
        "mine-best.safetensors",
    }


def test_the_ending_of_a_file_may_be_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.2.toml").write_text("seed = 7\n", encoding="utf-8")
    for path in ("mine.2", "mine.2.toml", str(tmp_path / "mine.2")):
        assert parse(Train, [*TRAIN, "--config_file", path]).seed == 7


def test_a_number_that_is_0_where_a_flag_is_off_is_not_given(tmp_path):
    names = ("save_last_n_epochs", "save_last_n_steps_state", "scale_weight_norms", "lr_scheduler_timescale")
    (tmp_path / "a.toml").write_text("".join(f"{name} = 0\n" for name in names), encoding="utf-8")
    made = parse(Train, [*TRAIN, "--config_file", str(tmp_path / "a.toml"), "--save_last_n_steps", "0"])
    assert [getattr(made, name) for name in (*names, "save_last_n_steps")] == [None] * 5
    assert parse(Train, [*TRAIN, "--lr_warmup_steps", "0", "--seed", "0"]).seed == 0


def test_all_keys_that_no_flag_has_are_named_at_once(tmp_path):
    (tmp_path / "a.toml").write_text("one_frame = true\nseed = 1\nlog_config = true\n", encoding="utf-8")
    with pytest.raises(UsageError) as error:
        parse(Train, [*TRAIN, "--config_file", str(tmp_path / "a.toml")])
    assert error.value.found == "train has no flags --one_frame and --log_config"
    assert error.value.where == f"{tmp_path / 'a.toml'}, key one_frame, log_config"
    assert "--log_config: leave it out" in error.value.cure


def test_a_switch_of_another_trainer_that_is_off_asks_for_nothing(tmp_path):
    text = "dynamo_dynamic = false\nwandb_api_key = ''\nhuggingface_token = ''\nnetwork_dim = 9\n"
    text += "dynamo_backend = 'NO'\nlr_scheduler_args = []\n"
    (tmp_path / "a.toml").write_text(text)
    words = [*TRAIN, "--config_file", str(tmp_path / "a.toml")]
    assert parse(Train, words).network_dim == 9
    (tmp_path / "a.toml").write_text(text.replace("''", "'secret'", 1))
    with pytest.raises(UsageError) as error:
        parse(Train, words)
    assert "set WANDB_API_KEY" in error.value.cure
    assert "secret" not in str(error.value)
