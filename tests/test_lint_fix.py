"""`wangen lint --fix`: the bundle that does the same job, and what becomes of the files around it."""

import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from lint_samples import HEAD, OUT, SHELLS, call, encode, script
from shells import bundles
from shells.bash import RECORDER, needs_bash

from wangen.generator import lint, scripts
from wangen.generator.cli import main
from wangen.generator.commands import parse
from wangen.generator.errors import WangenError
from wangen.generator.lint.fix import fix
from wangen.generator.setup.wheel import wheel_name
from wangen.generator.signing import signed, unedited
from wangen.generator.steps import CacheLatents, CacheText, Check, CheckCache, Train, find_step
from wangen.generator.tomls import read_dataset

TOML = """# my cats
[general]
resolution = [832, 480]
caption_extension = "txt"   # text files
batch_size = 1

[[datasets]]
video_directory = "C:\\\\temp\\\\clips"
target_frames = [1, 80]
"""

WHEEL = f"files/{wheel_name(version('wangen'))}"


def put(folder: Path, shell: str, text: str) -> Path:
    """Write a script as its shell needs it."""
    path = folder / f"my_run.{shell}"
    path.write_bytes(encode(shell, text))
    return path


def steps_of(path: Path):
    """The steps of a script that was written, as the table's dataclasses."""
    lines = scripts.read_steps(path.read_bytes(), path.suffix[1:])
    return [parse(find_step(words[0]), words[1:]) for words in lines]


def test_the_flags_of_a_function_are_those_that_it_is_called_with(tmp_path, capsys):
    """Functions are written in any order; the training's body stands in front of the caching's."""
    latents, text = (call("sh", step, {}) for step in ("latents", "text"))
    named = "network_dim", "learning_rate", "network_module"
    train = call("sh", "train", dict.fromkeys(named, OUT)).rstrip()
    body = f'train() {{\n{train} \\\n  "$@"\n}}\ncache() {{\n{latents}{text}}}\n'
    use = "cache\ntrain --network_dim 64 --learning_rate 3e-5 --network_module networks.lora_wan\n"
    path = put(tmp_path, "sh", f"{HEAD['sh']}{body}{use}")
    assert lint.lint(lint.read(path)) == []
    assert main(["lint", "--fix", str(path)]) == 0
    trained = steps_of(tmp_path / "train_cats.sh")[-1]
    assert (trained.network_dim, trained.learning_rate) == (64, 3e-5)
    (tmp_path / "train_cats.sh").unlink()
    path = put(tmp_path, "sh", f"{HEAD['sh']}{body}{use}train --network_dim 8\n")
    capsys.readouterr()
    assert main(["lint", "--fix", str(path)]) == 1
    assert 'what "$@" stands for is known only when the script runs' in capsys.readouterr().err
    assert not (tmp_path / "train_cats.sh").exists()


@pytest.mark.parametrize("shell", SHELLS)
def test_the_bundle_does_the_same_job_and_lints_clean(shell, tmp_path, capsys):
    wrong = {"cache_latents": None, "network_alpha": "8", "sdpa": None, "one_frame": None, "t5": "@t5.pth"}
    path = put(tmp_path, shell, script(shell, latents={"skip_existing": None}, text={"batch_size": "4"}, train=wrong))
    before = path.read_bytes()
    assert main(["lint", "--fix", str(path)]) == 0
    out = capsys.readouterr().out
    made = tmp_path / f"train_cats.{shell}"
    assert f"written: train_cats.{shell}" in out
    assert "--one_frame: one-frame training" in out
    assert max(map(len, out.split("\n"))) <= 100
    assert path.read_bytes() == before
    assert lint.lint(lint.read(made)) == []
    steps = steps_of(made)
    assert [type(step) for step in steps] == [Check, CacheLatents, CacheText, CheckCache, Train]
    separator = "/" if shell == "sh" else "\\"
    root = "/ai" if shell == "sh" else "C:\\AI"
    check, latents, text, cache, train = steps
    assert {str(step.dataset_config) for step in steps} == {f"{root}{separator}cats.toml"}
    assert {str(step.vae) for step in (check, latents, cache)} == {f"{root}{separator}Wan2.1_VAE.pth"}
    assert str(text.t5).endswith("models_t5_umt5-xxl-enc-bf16.pth")
    assert text.batch_size == 4
    assert (train.network_dim, train.network_alpha, train.max_train_epochs) == (16, 8.0, 16)
    assert (train.attention, train.optimizer_type) == ("sdpa", "AdamW8bit")
    assert str(train.output_dir) == f"{root}{separator}out"
    assert train.output_name == "cats"


@pytest.mark.parametrize("shell", SHELLS)
def test_every_step_gets_the_log_the_lock_and_the_precision(shell, tmp_path):
    fix(lint.read(put(tmp_path, shell, script(shell, text={"t5": "@t5.pth"}))))
    separator, out = ("/", "/ai/out") if shell == "sh" else ("\\", "C:\\AI\\out")
    made = steps_of(tmp_path / f"train_cats.{shell}")
    assert {str(step.log_file) for step in made} == {f"logs{separator}cats.log"}
    assert {str(step.lock) for step in made} == {f"{out}{separator}run.lock"}
    assert {str(step.report_dir) for step in made} == {out}
    assert (made[1].vae_dtype, made[2].t5_dtype) == ("float16", "bfloat16")
    assert (made[3].vae_dtype, made[3].t5_dtype) == ("float16", "bfloat16")
    fix(lint.read(put(tmp_path, shell, script(shell, latents={"vae_dtype": "float32"}))))
    assert [step.vae_dtype for step in steps_of(tmp_path / f"train_cats.{shell}")[1:4:2]] == ["float32", "float32"]


@pytest.mark.parametrize(("shell", "head", "value", "whole"), [
    ("bat", "", "C:\\my own models\\Wan2.1_VAE.pth", "C:\\my own models\\Wan2.1_VAE.pth"),
    ("ps1", "", "C:\\my models\\Wan2.1_VAE.pth", "C:\\my models\\Wan2.1_VAE.pth"),
    ("sh", 'M="/my models"\n', "$M/Wan2.1_VAE.pth", "/my models/Wan2.1_VAE.pth"),
    ("sh", "", "/my models/Wan2.1_VAE.pth", "/my models/Wan2.1_VAE.pth"),
])  # fmt: skip
def test_a_torn_path_is_taken_as_the_whole_that_lint_suggests(shell, head, value, whole, tmp_path, capsys):
    text = script(shell, latents={"vae": value})
    first = text.index("python src")
    path = put(tmp_path, shell, text[:first] + head + text[first:])
    assert main(["lint", "--fix", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f'quote the whole: "{whole}"' in out
    assert f'--vae is the whole "{whole}"' in out
    assert {str(step.vae) for step in steps_of(tmp_path / f"train_cats.{shell}")[1:4:2]} == {whole}


def test_a_torn_path_behind_an_equals_sign_is_taken_as_a_whole(tmp_path):
    text = script("bat").replace('--vae "C:\\AI\\Wan2.1_VAE.pth"', "--vae=C:\\my models\\vae.pth")
    done = fix(lint.read(put(tmp_path, "bat", text)))
    assert 'is the whole "C:\\my models\\vae.pth"' in done.changed[0]
    assert str(steps_of(tmp_path / "train_cats.bat")[1].vae) == "C:\\my models\\vae.pth"


@pytest.mark.parametrize("flag", ["learning_rate 3e-4", "learning_rate=3e-4", "timestep_sampling shift"])
def test_a_stray_word_takes_no_number_and_no_choice_with_it(flag, tmp_path):
    name, value = re.split("[ =]", flag)
    text = re.sub(rf" --{name} \S+", "", script("sh"))
    path = put(tmp_path, "sh", text.replace("--gradient_checkpointing ", f"--{flag} extra --gradient_checkpointing "))
    read = lint.read(path)
    kinds = {finding.kind for finding in lint.lint(read)}
    assert "stray-word" in kinds
    assert "unquoted" not in kinds
    done = fix(read)
    assert any("'extra' belongs to no flag" in line for line in done.left_out)
    assert str(getattr(steps_of(tmp_path / "train_cats.sh")[-1], name)) in (value, "0.0003")


def test_of_a_key_that_stands_twice_the_last_value_is_taken(tmp_path):
    text = script("sh").replace("--gradient_checkpointing ", "--gradient_checkpointing --network_args verbose=True "
                                "loraplus_lr_ratio=4 loraplus_lr_ratio=8 ")  # fmt: skip
    done = fix(lint.read(put(tmp_path, "sh", text)))
    assert any("--network_args says a key twice" in line for line in done.changed)
    assert steps_of(tmp_path / "train_cats.sh")[-1].network_args == ("verbose=True", "loraplus_lr_ratio=8")


def test_words_that_belong_to_nothing_are_named(tmp_path):
    done = fix(lint.read(put(tmp_path, "sh", script("sh").replace(
        "--gradient_checkpointing ", "--gradient_checkpointing much "))))  # fmt: skip
    assert any("'much' belongs to no flag" in line for line in done.left_out)


def test_what_is_wrong_is_said_although_no_bundle_comes_of_it(tmp_path, capsys):
    path = put(tmp_path, "sh", script("sh", latents={"sdpa": None}, train={"task": "flf2v-14B"}))
    assert main(["lint", "--fix", str(path)]) == 1
    shown = capsys.readouterr()
    assert "my_run.sh:8: error: unknown-flag" in shown.out
    assert "training flf2v-14B is not in this version" in shown.err


def test_what_musubi_tuner_does_without_being_told_is_told(tmp_path):
    change = dict.fromkeys(("network_dim", "timestep_sampling", "discrete_flow_shift", "max_train_epochs"), OUT)
    fix(lint.read(put(tmp_path, "sh", script("sh", train=change))))
    train = steps_of(tmp_path / "train_cats.sh")[-1]
    assert (train.network_dim, train.network_alpha, train.max_train_steps) == (4, 1.0, 1600)
    assert (train.timestep_sampling, train.max_train_epochs) == ("uniform", None)


def test_refused_values_are_listed(tmp_path):
    done = fix(
        lint.read(
            put(tmp_path, "sh", script("sh", train={"network_module": "lycoris.kohya", "mixed_precision": "fp16"}))
        )
    )
    assert any("use lora, loha or lokr" in line for line in done.left_out)
    assert any("use bf16" in line for line in done.left_out)
    assert steps_of(tmp_path / "train_cats.sh")[-1].network_module == "lora"


@needs_bash
def test_the_new_sh_hands_over_what_was_meant(tmp_path):
    place = '/ai/it\'s a "$HOME" 100% {x}'
    quoted = "'" + place.replace("'", "'\\''") + "'"
    text = script("sh", train={"output_dir": quoted, "output_name": "'red house'"}).replace(
        "/ai/cats.toml", "sets/cats.toml"
    )
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "cats.toml").write_text(TOML.replace("C:\\\\temp", "/ai"))
    fix(lint.read(put(tmp_path, "sh", text)))
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{sys.executable} -IS\n" + RECORDER.read_text(encoding="utf-8"), encoding="utf-8")
    python.chmod(0o755)
    record = tmp_path / "record.jsonl"
    made = tmp_path / "train_red_house.sh"
    done = subprocess.run(["bash", made], capture_output=True, text=True, cwd="/",
                          env={"PATH": "/usr/bin:/bin", "RECORDER_OUT": str(record)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    calls = bundles.read_calls(record)
    assert [made["argv"][0] for made in calls] == ["check", "cache_latents", "cache_text", "check_cache", "train"]
    train = parse(Train, calls[-1]["argv"][1:])
    assert (str(train.output_dir), train.output_name, str(train.dit)) == (
        place,
        "red house",
        "/ai/wan2.1_t2v_14B_bf16.safetensors",
    )
    assert train.dataset_config == Path("sets/cats_wangen.toml")
    assert calls[-1]["cwd"] == str(tmp_path)
    assert train == steps_of(made)[-1]


@pytest.mark.parametrize(("told", "copied"), [("", True), ("source_fps = 24.0\n", False)])
def test_clips_keep_the_frames_that_musubi_tuner_takes(told, copied, tmp_path):
    """It takes all of a clip whose rate it is not told, and wangen those of the model's rate."""
    good = f'[[datasets]]\nvideo_directory = "clips"\ncache_directory = "cache"\ntarget_frames = [5]\n{told}'
    images = '[[datasets]]\nimage_directory = "pictures"\ncache_directory = "others"\n'
    (tmp_path / "cats.toml").write_text(f"[general]\nresolution = [832, 480]\n{good}{images}")
    config = {"dataset_config": "cats.toml"}
    done = fix(lint.read(put(tmp_path, "sh", script("sh", latents=config, text=config, train=config))))
    copy = tmp_path / "cats_wangen.toml"
    assert copy.exists() == copied
    assert any("source_fps is 16.0: all frames" in line for line in done.changed) == copied
    (train,) = (step for step in steps_of(tmp_path / "train_cats.sh") if isinstance(step, Train))
    entries = read_dataset(tmp_path / (copy.name if copied else "cats.toml"))
    assert [entry.source_fps for entry in entries] == [16.0 if copied else 24.0, None]
    assert train.dataset_config == Path(copy.name if copied else "cats.toml")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_toml_gets_a_mended_copy(shell, tmp_path):
    toml = tmp_path / "cats.toml"
    toml.write_text(TOML.replace("\\\\", "\\"))
    config = {"dataset_config": "cats.toml"}
    path = put(tmp_path, shell, script(shell, latents=config, text=config, train=config))
    done = fix(lint.read(path))
    copy = (tmp_path / "cats_wangen.toml").read_text()
    root = "/mnt/c" if shell == "sh" else "C:"
    assert f'video_directory = "{root}/temp/clips"' in copy
    assert f'cache_directory = "{root}/temp/clips_cache"' in copy
    assert "target_frames = [1, 77]" in copy
    assert 'caption_extension = ".txt"   # text files' in copy
    assert toml.read_text() == TOML.replace("\\\\", "\\")
    assert "cats.toml: target_frames is [1, 77]" in done.changed
    assert "source_fps = 16.0" in copy
    made = tmp_path / f"train_cats.{shell}"
    assert {str(step.dataset_config) for step in steps_of(made)} == {"cats_wangen.toml"}
    assert lint.lint(lint.read(made)) == []
    assert not any("looks for it" in line for line in done.left_out)


def test_a_copy_for_a_folder_of_another_machine_is_to_be_put_there(tmp_path):
    (tmp_path / "cats.toml").write_text(TOML)
    config = {"dataset_config": "cats.toml"}
    text = script("bat", latents=config, text=config, train=config).replace('cd /d "%~dp0"', "cd /d C:\\musubi-tuner")
    done = fix(lint.read(put(tmp_path, "bat", text)))
    assert "putting cats_wangen.toml to C:\\musubi-tuner\\, where the new script looks for it" in done.left_out


def test_files_of_the_user_stay(tmp_path, capsys):
    (tmp_path / "cats.toml").write_text(TOML.replace("C:\\\\temp", "/ai"))
    config = {"dataset_config": "cats.toml"}
    path = put(tmp_path, "sh", script("sh", latents=config, text=config, train=config))
    (tmp_path / "train_cats.sh").write_text("echo mine\n")
    mine = (
        TOML.replace("C:\\\\temp\\\\", "/ai/")
        .replace('"txt"', '".txt"')
        .replace("1, 80]", '81]\ncache_directory = "/c"')
    )
    (tmp_path / "cats_wangen.toml").write_text(mine)
    assert main(["lint", "--fix", str(path)]) == 0
    assert "is the user's own" in capsys.readouterr().out
    assert (tmp_path / "train_cats.sh").read_text() == "echo mine\n"
    assert (tmp_path / "cats_wangen.toml").read_text() == mine
    assert (tmp_path / "train_cats.sh.new").exists()
    assert (tmp_path / "cats_wangen.toml.new").exists()


def test_a_new_text_that_the_user_edited_stays(tmp_path, capsys):
    (tmp_path / "cats.toml").write_text(TOML.replace("C:\\\\temp", "/ai"))
    config = {"dataset_config": "cats.toml"}
    path = put(tmp_path, "sh", script("sh", latents=config, text=config, train=config))
    names = ("cats_wangen.toml", "train_cats.sh", "setup_wangen.sh")
    for ending in ("", ".new"):
        assert main(["lint", "--fix", str(path)]) == 0
        for name in names:
            made = tmp_path / f"{name}{ending}"
            made.write_text(made.read_text() + "\n# mine\n")
    for number, name in enumerate(names):
        assert main(["lint", "--fix", str(path)]) == 1
        assert f"{name} and {name}.new were edited by hand" in capsys.readouterr().err
        edited = [*names, *(f"{other}.new" for other in names[number:])]
        assert all((tmp_path / other).read_text().endswith("# mine\n") for other in edited)
        (tmp_path / f"{name}.new").unlink()
    assert main(["lint", "--fix", str(path)]) == 0


def test_the_mended_copy_can_be_mended_again(tmp_path):
    (tmp_path / "cats_wangen.toml").write_text(signed(TOML.replace("C:\\\\temp", "/ai")))
    config = {"dataset_config": "cats_wangen.toml"}
    fix(lint.read(put(tmp_path, "sh", script("sh", latents=config, text=config, train=config))))
    assert 'caption_extension = ".txt"' in (tmp_path / "cats_wangen.toml").read_text()
    assert unedited((tmp_path / "cats_wangen.toml").read_bytes())


def test_the_script_itself_is_never_its_own_target(tmp_path):
    path = put(tmp_path, "sh", script("sh")).rename(tmp_path / "train_cats.sh")
    before = path.read_bytes()
    fix(lint.read(path))
    assert path.read_bytes() == before
    assert (tmp_path / "train_cats_wangen.sh").exists()


def test_each_training_gets_a_bundle(tmp_path):
    text = script("sh") + call("sh", "train", {"output_name": "dogs", "seed": "7"})
    done = fix(lint.read(put(tmp_path, "sh", text)))
    assert done.written == ["train_cats.sh", "setup_wangen.sh", WHEEL, "train_dogs.sh"]
    assert [steps_of(path)[-1].seed for path in done.scripts] == [42, 7]


def test_a_script_that_only_caches_gets_a_caching_bundle(tmp_path):
    done = fix(lint.read(put(tmp_path, "bat", script("bat", train=OUT))))
    assert done.written == ["cache_my_run.bat", "setup_wangen.bat", WHEEL]
    kinds = [type(step) for step in steps_of(tmp_path / "cache_my_run.bat")]
    assert kinds == [Check, CacheLatents, CacheText, CheckCache]


def test_our_own_script_becomes_an_equal_one(tmp_path):
    steps = bundles.steps("m.bin")
    (tmp_path / "train_red_house.sh").write_bytes(scripts.render(bundles.bundle("sh", steps), "sh", "train"))
    fix(lint.read(tmp_path / "train_red_house.sh"))
    made = steps_of(tmp_path / "train_m_bin.sh")
    run = {"report_dir": Path("m.bin"), "log_file": Path("logs/m_bin.log"),
           "lock": Path("m.bin/run.lock")}  # fmt: skip
    assert [step.argv() for step in made[1:]] == [replace(step, **run).argv() for step in steps[1:]]


def test_paths_below_a_folder_move_along(tmp_path):
    text = script("sh", train={"dit": "models/dit.safetensors"}).replace(
        '"$(dirname "$0")"', '"$(dirname "$0")/musubi"'
    )
    fix(lint.read(put(tmp_path, "sh", text)))
    assert str(steps_of(tmp_path / "train_cats.sh")[-1].dit) == "musubi/models/dit.safetensors"


@pytest.mark.parametrize(("change", "found"), [
    ({"train": {"task": "flf2v-14B"}}, "training flf2v-14B is not in this version"),
    ({"train": {"dit": '"$HOME/x.safetensors"'}}, "known only when the script runs"),
    ({"latents": {"vae": "~/vae.pth"}}, "another folder for every user"),
    ({"latents": {"vae": "models\\vae.pth"}}, "takes a backslash out"),
    ({"latents": {"vae": "/my $NONE/vae.pth"}}, "known only when the script runs"),
])  # fmt: skip
def test_what_cannot_be_done_is_said_and_nothing_is_written(change, found, tmp_path):
    path = put(tmp_path, "sh", script("sh", **change))
    with pytest.raises(WangenError, match=found):
        fix(lint.read(path))
    assert [file.name for file in tmp_path.iterdir()] == ["my_run.sh"]


def test_a_toml_that_needs_its_owner_is_refused(tmp_path):
    block = '[[datasets]]\nimage_directory = "/ai/x"\ncache_directory = "/ai/c"\nmultiple_target = true\n'
    (tmp_path / "cats.toml").write_text(block)
    config = {"dataset_config": "cats.toml"}
    path = put(tmp_path, "sh", script("sh", latents=config, text=config, train=config))
    with pytest.raises(WangenError, match="cannot be mended"):
        fix(lint.read(path))
    assert not (tmp_path / "train_cats.sh").exists()
