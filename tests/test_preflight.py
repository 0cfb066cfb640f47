"""`wangen check SLUG`: the published scripts, what they name, and the environment, on every target."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers import clip_bytes, image_bytes, write_tree
from kept import keep, put_back
from test_cautions import clip as clip_in_hdr
from tiny_weights import write_tiny_wan

from wangen.generator import pictures
from wangen.generator import target as targets
from wangen.generator.cli import main
from wangen.generator.pictures import open_picture
from wangen.generator.target import host_platform_name

HERE = host_platform_name()
pytestmark = pytest.mark.skipif(os.name == "nt", reason="the workspaces of these tests are those of a Linux host")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_tiny_wan(tmp_path_factory.mktemp("models"), ["a cat"])


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return clip_bytes(tmp_path_factory.mktemp("clip"), num_frames=24)


@pytest.fixture
def site(kept_site, monkeypatch):
    """A published dataset whose weights are there, and an environment: the one that runs the tests."""
    folder = put_back(kept_site)
    monkeypatch.setenv("WANGEN_PYTHON", sys.executable)
    monkeypatch.chdir(folder)  # `check` changes the working folder, this puts it back
    return folder / "ws"


@pytest.fixture(scope="module")
def kept_site(tmp_path_factory, clip, weights):
    folder = tmp_path_factory.mktemp("site")
    write_tree(folder, {
        "ws/wangen.toml": f'resolution = [64, 64]\nnum_frames = 17\nplatforms = ["{HERE}", "windows"]\n',
        "ws/datasets/Red House/a.jpg": image_bytes(),
        "ws/datasets/Red House/a.txt": "an ape",
        "ws/datasets/Red House/b.mp4": clip,
        "ws/datasets/Red House/b.txt": "a bee",
    })  # fmt: skip
    for platform in (HERE, "windows"):
        shutil.copytree(weights["vae"].parent, folder / "ws" / "published" / platform / "models" / "deeper")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        publish()
    return keep(folder)


def publish():
    assert main(["publish", "Red House", "--workspace", "ws"]) == 0


def check(capsys, code, *more):
    """The lines that are shown for this exit code, those of the step's log at the end."""
    folder = Path.cwd()
    assert main(["check", "Red House", "--workspace", str(folder / "ws"), *more]) == code
    os.chdir(folder)
    shown = capsys.readouterr()
    return shown.out + shown.err


def script(site, platform=HERE, shell="sh"):
    return site / "published" / platform / f"train_red_house.{shell}"


def change(path, old, new):
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def test_all_is_well(site, capsys):
    shown = check(capsys, 0)
    assert "problem" not in shown.replace("0 problems", "")
    assert "up to date: train_red_house.sh, cache_red_house.sh, setup_wangen.sh, red_house_" in shown
    assert "up to date: train_red_house.bat, train_red_house.ps1, cache_red_house.bat" in shown
    assert "all steps agree" in shown
    assert f"Python {sys.executable} has wangen" in shown
    assert shown.count("1 image and 1 clip with captions") == 2
    assert list((site / "published" / HERE / "outputs" / "red_house").iterdir()) == []


def test_clips_that_are_not_taken_as_people_see_them_are_a_note(site, capsys, tmp_path):
    clip_in_hdr(site / "datasets/Red House/b.mp4", transfer=18)
    publish()
    assert check(capsys, 0).count("note     1 clip is in HDR (b.mp4)") == 2


def test_a_picture_that_several_bundles_link_to_is_decoded_once(site, capsys, monkeypatch):
    (site / "datasets/Red House/c.jpg").write_bytes(image_bytes())
    (site / "datasets/Red House/c.txt").write_text("a cow")
    publish()
    decoded = []
    monkeypatch.setattr(pictures, "open_picture", lambda path: decoded.append(path.name) or open_picture(path))
    check(capsys, 0)
    assert decoded.count("c.jpg") == 1
    cut = site / "published/windows/files/datasets/red_house/64/c.jpg"
    content = cut.read_bytes()
    cut.unlink()
    cut.write_bytes(content[:-200])
    assert "c.jpg: cannot be read as an image" in check(capsys, 1), "another file of that name is looked at"


def test_one_platform_only(site, capsys):
    assert "train_red_house.sh" not in check(capsys, 0, "--platform", "windows")


def test_a_dataset_that_is_not_published(site, capsys):
    assert main(["check", "Blue House", "--workspace", "ws"]) == 1
    assert "is not published" in capsys.readouterr().err


def test_weights_that_are_not_there_or_of_another_kind(site, capsys, weights):
    models = site / "published" / "windows" / "models" / "deeper"
    (models / weights["vae"].name).write_bytes(weights["t5"].read_bytes())
    (models / weights["dit"].name).unlink()
    shown = check(capsys, 1, "--platform", "windows")
    assert "--vae: a umT5 text encoder" in shown or "--vae:" in shown
    assert "--dit: models/deeper/" in shown  # the bundle may be on its way to the machine that has it
    (site / "published" / HERE / "models" / "deeper" / weights["dit"].name).unlink()
    assert "--dit: no such weight file" in check(capsys, 1, "--platform", HERE)


def test_scripts_older_than_the_workspace(site, capsys):
    toml = site / "wangen.toml"
    toml.write_text(toml.read_text() + "[steps.train]\nnetwork_dim = 64\n", encoding="utf-8")
    shown = check(capsys, 1)
    assert "train_red_house.sh: not what publishing writes now; publish again: wangen publish red_house" in shown
    assert "up to date: cache_red_house.sh" in shown
    publish()
    check(capsys, 0)


def test_scripts_of_another_version(site, capsys, monkeypatch):
    for module in ("bundle", "preflight", "publish.texts"):
        monkeypatch.setattr(f"wangen.generator.{module}.version", lambda name: "9.9.9")
    shown = check(capsys, 1, "--platform", "windows")
    assert "made by wangen" in shown
    assert "this is 9.9.9; publish again: wangen publish red_house" in shown


def test_the_users_knobs_and_edits_are_no_problem(site, capsys):
    change(script(site, "windows", "bat"), b"NETWORK_DIM=16", b"NETWORK_DIM=8")
    change(script(site, "windows", "ps1"), b"Set-StrictMode", b"# mine\r\nSet-StrictMode")
    shown = check(capsys, 0, "--platform", "windows")
    assert "train_red_house.bat is up to date, with your NETWORK_DIM=8 (published: 16)" in shown
    assert "train_red_house.ps1 was edited by hand" in shown
    toml = site / "wangen.toml"
    toml.write_text(toml.read_text() + "[steps.train]\nlearning_rate = 0.5\n", encoding="utf-8")
    change(script(site, "windows", "ps1"), b"made by wangen 0.1.0", b"made by wangen 0.0.9")
    shown = check(capsys, 1, "--platform", "windows")
    assert "train_red_house.ps1: made by wangen 0.0.9, this is 0.1.0" in shown
    assert "train_red_house.ps1, train: --learning_rate 0.0001; published now: 0.5" in shown


def test_a_knob_that_no_shell_can_carry(site, capsys):
    change(script(site, "windows", "bat"), b'"NETWORK_DIM=16"', b'"NETWORK_DIM=1 6"')
    assert 'set "NETWORK_DIM=1 6"' in check(capsys, 1, "--platform", "windows")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"--network_alpha", b"--network_alpa", "did you mean --network_alpha?"),
        (b"NETWORK_DIM=16", b"NETWORK_DIM=big", "--network_dim takes a whole number"),
        (b"NETWORK_DIM=16", b"NETWORK_DIM=0", "--network_dim must be above 0"),
        (b"MAX_TRAIN_EPOCHS=35", b"MAX_TRAIN_EPOCHS=0", "--max_train_epochs must be above 0"),
        (b'"--min_timestep" "0"', b'"--min_timestep" "1000"', "no range within 0 to 1000"),
        (b"BLOCKS_TO_SWAP=0", b"BLOCKS_TO_SWAP=99", "--blocks_to_swap 99"),
        (b'"--min_timestep" "0"', b'"--fresh" "--resume" "a" "--min_timestep" "0"', "--fresh and --resume contradict"),
    ],
)
def test_a_flag_that_the_step_refuses(site, capsys, old, new, words):
    change(script(site, "windows", "bat"), old, new)
    shown = check(capsys, 1, "--platform", "windows")
    assert "train_red_house.bat, train: " in shown
    assert words in shown


def test_more_held_out_than_there_is(site, capsys):
    change(script(site, "windows", "bat"), b"VALIDATION_ITEMS=0", b"VALIDATION_ITEMS=2")
    assert "--validation_items 2 leaves nothing of 2 items" in check(capsys, 1, "--platform", "windows")


def test_steps_that_name_different_files(site, capsys):
    change(script(site), b"VAE_DTYPE='float16'", b"VAE_DTYPE='float32'")
    shown = check(capsys, 1, "--platform", HERE)
    assert "the steps do not agree on --vae_dtype: float32 in train_red_house.sh" in shown
    assert "float16 in cache_red_house.sh cache_latents; give all of them one value, in both scripts" in shown


def test_an_environment_that_is_not_there(site, capsys, monkeypatch):
    monkeypatch.delenv("WANGEN_PYTHON")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    shown = check(capsys, 1, "--platform", HERE)
    assert "no Python environment" in shown
    assert "run setup_wangen.sh" in shown


def test_an_environment_that_lacks_libraries(site, capsys, monkeypatch, tmp_path):
    bare = tmp_path / "bare" / "bin" / "python"
    bare.parent.mkdir(parents=True)
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setenv("WANGEN_PYTHON", str(bare))
    shown = check(capsys, 1, "--platform", HERE)
    missing = [line for line in shown.splitlines() if "not installed" in line]
    assert len(missing) == 1, "one line for all: after a setup that failed there are dozens"
    assert "torch, transformers" in missing[0]
    assert missing[0].endswith("; run setup_wangen.sh")
    bare.write_text("#!/bin/sh\nexit 3\n")
    assert "does not run" in check(capsys, 1, "--platform", HERE)


def test_a_resolution_of_its_own_for_training_is_no_problem(site, capsys):
    change(script(site), b"RESOLUTION='64'", b"RESOLUTION='all'")
    check(capsys, 0, "--platform", HERE)


def test_what_another_machine_has_is_marked(site, capsys):
    toml = site / "wangen.toml"
    with toml.open("a", encoding="utf-8") as file:
        file.write("[platform.windows]\nroot = 'C:\\AI'\nmodels = 'D:\\models'\nhost_root = '")
        file.write(f"{site / 'share'}'\n")
    publish()
    shown = check(capsys, 0, "--platform", "windows")
    assert r"D:\models\Wan2.1_VAE.pth: another machine's, not seen from here" in shown
    assert "1 image and 1 clip with captions" in shown
    (site / "share" / "files" / "datasets" / "red_house" / "64" / "a.txt").write_text("")
    shown = check(capsys, 1, "--platform", "windows")
    assert "a.txt: is empty" in shown


def test_from_wsl_for_wsl_and_windows_at_once(site, capsys, monkeypatch, tmp_path):
    drives = tmp_path / "windir"
    (drives / "c").mkdir(parents=True)
    conf = tmp_path / "wsl.conf"
    conf.write_text(f"[automount]\nroot = {drives}\n")
    monkeypatch.setattr(targets, "WSL_CONF", conf)
    monkeypatch.setattr(targets, "host_platform_name", lambda: "wsl")
    (site / "wangen.toml").write_text(
        'resolution = [64, 64]\nnum_frames = 17\nplatforms = ["windows", "wsl"]\n'
        f"[platform.windows]\nroot = 'C:\\AI'\n[platform.wsl]\nroot = '{drives}/c/AI'\n",
        encoding="utf-8",
    )
    publish()
    root = drives / "c" / "AI"
    names = {path.name for path in root.iterdir() if path.name.startswith("train")}
    assert names == {"train_red_house.bat", "train_red_house.ps1", "train_red_house.sh"}
    tomls = {path.name: path.read_text(encoding="utf-8") for path in (root / "files" / "tomls").iterdir()}
    assert 'image_directory = "C:/AI/files/datasets/red_house/64"' in tomls["red_house_win.toml"]
    assert f'image_directory = "{root}/files/datasets/red_house/64"' in tomls["red_house_wsl.toml"]
    shown = check(capsys, 1)
    assert "up to date: train_red_house.bat" in shown
    assert f"{root / 'models' / 'Wan2.1_VAE.pth'}: --vae: no such weight file" in shown


def test_what_the_dataset_has_and_the_bundle_has_not(site, capsys):
    media = site / "datasets" / "Red House"
    write_tree(media, {"c.jpg": image_bytes(seed=3), "c.txt": "a cow", "a.txt": "another ape"})
    shown = check(capsys, 0, "--platform", "windows")
    said = "the dataset or its settings have changed since it was published (2 new, 1 changed)"
    said += "; publish again: wangen publish red_house"
    assert said in shown
    (media / "c.txt").unlink()
    shown = check(capsys, 0, "--platform", "windows")
    assert "it could not be published again" in shown
    assert "c.jpg: has no caption" in shown
    shutil.rmtree(media)
    assert "the dataset is not on this machine" in check(capsys, 0, "--platform", "windows")


def test_files_of_the_bundle_that_are_gone_or_edited(site, capsys):
    bundle = site / "published" / "windows"
    (bundle / "setup_wangen.ps1").unlink()
    change(bundle / "files" / "tomls" / "red_house_win.toml", b"num_repeats = 1", b"num_repeats = 5")
    shown = check(capsys, 1, "--platform", "windows")
    assert "setup_wangen.ps1 is not there; publish again: wangen publish red_house" in shown
    assert "files/tomls/red_house_win.toml was edited by hand and stays as it is" in shown


def test_a_bundle_whose_copy_was_broken_off(site, capsys):
    media = site / "published" / HERE / "files" / "datasets" / "red_house" / "64"
    (media / "a.jpg").unlink()
    (media / "a.txt").unlink()
    shown = check(capsys, 1, "--platform", HERE)
    assert "2 published files not there (a.jpg, a.txt); was the copying broken off?" in shown


def test_a_picture_that_the_bundle_lost(site, capsys):
    (site / "published" / "windows" / "files" / "datasets" / "red_house" / "64" / "a.jpg").unlink()
    shown = check(capsys, 1, "--platform", "windows")
    assert "1 published file not there (a.jpg)" in shown
    assert "the dataset has changed" not in shown


def test_a_toml_with_paths_of_another_system(site, capsys):
    change(site / "published" / HERE / "files" / "tomls" / f"red_house_{HERE}.toml",
           b'image_directory = "files', b'image_directory = "C:/files')  # fmt: skip
    shown = check(capsys, 1, "--platform", HERE)
    assert "C:/files/datasets/red_house/64: the TOML holds a path of another system" in shown


def test_a_script_that_is_gone(site, capsys):
    script(site).unlink()
    assert "train_red_house.sh is not there; publish again" in check(capsys, 1, "--platform", HERE)


def test_a_caption_that_was_edited_in_the_bundle(site, capsys):
    media = site / "published" / "windows" / "files" / "datasets" / "red_house" / "64"
    (media / "a.txt").write_text("mine", encoding="utf-8")
    assert "changed in the bundle, so that publishing leaves them: a.txt" in check(capsys, 0, "--platform", "windows")


def test_of_two_experts_the_missing_one_is_named(site, capsys, weights):
    """Here as a problem; on a platform that this is not, where its weights may lie already, as a note."""
    toml = site / "wangen.toml"
    toml.write_text(toml.read_text() + 'model = "t2v-A14B"\n')
    models = site / "published" / HERE / "models"
    shutil.copy(weights["dit"], models / "wan2.2_t2v_low_noise_14B_fp16.safetensors")
    publish()
    capsys.readouterr()
    shown = check(capsys, 1)
    assert "--dit_high_noise (the high-noise expert): no such weight file" in shown
    assert "--dit (the low-noise expert): no such weight file" not in shown
    assert "--dit_high_noise (the high-noise expert): models/wan2.2_t2v_high_noise" in shown
    assert "has to lie there on that machine" in shown
    for script in (site / "published").rglob("train_*"):  # a knob says it as well
        script.write_bytes(re.sub(rb"(EXPERTS\W+)both", rb"\1low", script.read_bytes()))
    assert "high_noise" not in check(capsys, 0)
    toml.write_text(toml.read_text() + '[steps.train]\nexperts = "low"\n')
    publish()
    capsys.readouterr()
    assert "high_noise" not in check(capsys, 0)
