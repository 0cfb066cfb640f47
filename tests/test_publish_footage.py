"""Footage on the machine that trains: its script cuts it first, and nothing of it is published."""

import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import imageio_ffmpeg
import pytest
import tomlkit
from helpers import read_tree, run_script
from tiny_weights import write_tiny_wan

from wangen.generator import scripts, workspace
from wangen.generator.cli import main
from wangen.generator.errors import UsageError
from wangen.generator.footage import seen_from, video_of
from wangen.generator.prepare_steps import Preprocess
from wangen.runtime import preprocess
from wangen.runtime.evaluation_file import read_evaluation

BUNNY = Path(__file__).parents[1] / "examples/dataset/big-buck-bunny.mp4"
WORKSPACE = """
model = "t2v-1.3B"
resolution = [64, 64]
num_frames = 5
platforms = ["linux"]
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "wangen.toml").write_text(WORKSPACE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def edit(place: Path, more: str) -> None:
    path = place / "wangen.toml"
    path.write_text(path.read_text(encoding="utf-8") + more, encoding="utf-8")


def steps_of(script: Path) -> list:
    return [step for _, step in scripts.parsed_steps(script.read_bytes(), script.suffix[1:])]


def test_the_first_step_cuts_and_the_toml_names_its_manifest(place):
    assert main(["publish", "walks", "--footage", "/data/films", "--resolution", "64", "--resolution", "96x64"]) == 0
    bundle = place / "published" / "linux"
    train, caching = (steps_of(bundle / f"{name}_walks.sh") for name in ("train", "cache"))
    commands = [step.command for step in train]
    assert commands == ["preprocess", "check", "cache_latents", "cache_text", "check_cache", "train", "report"]
    assert [step.command for step in caching] == commands[:5]
    assert train[0] == caching[0] == Preprocess(
        videos=Path("/data/films"), output=Path("files/datasets/walks/clips"), task="t2v-1.3B", resolution="96x64",
        frames=5, val_share=0.0, log_file=Path("logs/walks.log"), report_dir=Path("outputs/walks"),
        lock=Path("outputs/walks/run.lock"),
    )  # fmt: skip
    blocks = tomlkit.parse((bundle / "files/tomls/walks_linux.toml").read_text(encoding="utf-8"))["datasets"]
    assert [block["video_jsonl_file"] for block in blocks] == ["files/datasets/walks/clips/train.jsonl"] * 2
    assert [block["cache_directory"] for block in blocks] == [
        "files/datasets/walks/64_cache", "files/datasets/walks/96x64_cache",
    ]  # fmt: skip
    before = read_tree(bundle)
    assert main(["publish", "walks"]) == 0, "it is remembered"
    assert read_tree(bundle) == before


@pytest.mark.parametrize(("words", "more", "found"), [
    (["--trigger", "ohwx"], "", "no trigger"),
    (["--resize"], "", "no resize"),
    (["--source", "photos"], "", "no source"),
    ([], "[steps.preprocess]\nframes = 9\n", "frames is not set here"),
    ([], "[steps.preprocess]\nvideos = '/x'\n", "videos is not set here"),
    (["--platform", "windows"], "", "windows cannot see the footage"),
    (["--model", "qwen-image"], "", "trains on pictures, not on clips"),
    (["--resolution", "960x540"], "", "--resolution 960x544"),
    (["--resolution", "256", "--resolution", "1280x720", "--model", "ti2v-5B"], "", "multiples of 32"),
])  # fmt: skip
def test_what_cannot_be_is_refused_and_nothing_is_written(place, capsys, words, more, found):
    edit(place, more)
    before = read_tree(place)
    assert main(["publish", "walks", "--footage", "/data/films", *words]) != 0
    assert found in capsys.readouterr().err
    assert {path: data for path, data in read_tree(place).items() if ".wangen" not in str(path)} == before


def test_each_platform_writes_the_folder_as_it_sees_it(place):
    edit(place, '[platform.wsl]\nautomount = "/windir/"\ndistro = "Ubuntu"\n')
    made = workspace.read(place)

    def seen(path: str, *names: str) -> list[str]:
        return [seen_from(path, made.target(name), made) for name in names]

    assert seen("C:/films/a b", "wsl", "windows") == ["/windir/c/films/a b", r"C:\films\a b"]
    assert seen("/windir/c/films", "wsl", "windows") == ["/windir/c/films", r"C:\films"]
    assert seen("/home/me", "linux", "windows") == ["/home/me", r"\\wsl.localhost\Ubuntu\home\me"]
    assert seen("raw/films", "linux", "wsl", "windows") == ["raw/films", "raw/films", r"raw\films"]
    assert seen(r"raw\films", "linux") == ["raw/films"]
    with pytest.raises(UsageError, match="linux cannot see the footage"):
        seen_from("C:/films", made.target("linux"), made)


@pytest.mark.parametrize("path", ["~/films", "$HOME/films", r"%USERPROFILE%\films", r"\films", "file:///films", "a\tb"])
@pytest.mark.parametrize("name", ["linux", "windows"])
def test_a_path_that_means_another_folder_elsewhere_is_no_folder_below_the_bundle(place, name, path):
    made = workspace.read(place)
    with pytest.raises(UsageError, match="cannot see the footage"):
        seen_from(path, made.target(name), made)


def test_labels_are_written_as_each_platform_sees_them(place):
    edit(place, "[steps.preprocess]\nlabels = 'C:\\films\\labels.csv'\n")
    assert main(["publish", "walks", "--footage", "C:/films", "--platform", "wsl", "--platform", "windows"]) == 0
    scripts = (place / "published").glob("*/train_walks.*")
    labels = {script.suffix: steps_of(script)[0].labels for script in scripts}
    windows = Path(r"C:\films\labels.csv")
    assert labels == {".sh": Path("/mnt/c/films/labels.csv"), ".bat": windows, ".ps1": windows}


def test_settings_of_the_step_reach_the_script_and_the_page_can_be_left_out(place):
    edit(place, '[steps.preprocess]\nkeep_all = true\nstride = 2\nlabels = "labels.csv"\n')
    path = place / "wangen.toml"
    path.write_text("report = false\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    assert main(["publish", "walks", "--footage", "films"]) == 0
    first, *others = steps_of(place / "published/linux/train_walks.sh")
    assert (first.keep_all, first.stride, first.labels, first.videos) == (True, 2, Path("labels.csv"), Path("films"))
    assert others[-1].command == "train"


def test_check_says_what_the_first_step_will_do_and_where_the_footage_is_not(place, capsys):
    assert main(["publish", "walks", "--footage", "films"]) == 0
    capsys.readouterr()
    main(["check", "walks"])
    said = capsys.readouterr().out
    assert "the folder of footage is not there" in said
    assert "not cut into clips yet" in said
    assert "train.jsonl" not in said
    (place / "published/linux/films").mkdir()
    main(["check", "walks"])
    assert "folder of footage" not in capsys.readouterr().out


def test_it_can_be_taken_back(place, capsys):
    assert main(["publish", "walks", "--footage", "films"]) == 0
    assert main(["publish", "walks", "--footage", ""]) != 0
    assert "there is no such dataset" in capsys.readouterr().err
    shutil.copytree(BUNNY.parent, place / "datasets" / "walks")
    for clip in (place / "datasets" / "walks").glob("*.mp4"):
        clip.unlink()
    assert main(["publish", "walks", "--footage", ""]) == 0
    assert steps_of(place / "published/linux/train_walks.sh")[0].command == "check"


@pytest.mark.slow
def test_clean_leaves_what_is_not_known_to_be_cut_and_what_was_edited(place):
    assert main(["publish", "walks", "--footage", "films"]) == 0
    shutil.copytree(BUNNY.parent, place / "published/linux/films", ignore=shutil.ignore_patterns("*.jpg"))
    folder = place / "published/linux/files/datasets/walks/clips"
    flags = {"videos": place / "published/linux/films", "output": folder, "resolution": "64x64", "frames": 5}
    assert preprocess.run(Preprocess(**flags, keep_all=True, task="t2v-1.3B")).ok
    cut = {path.name for path in (folder / "clips").iterdir()}
    own = folder / "clips" / "mine-0123abcd-000000.mp4"
    own.write_bytes(b"mine")
    (folder / "clips" / f".mine-{'0' * 24}.tmp").write_bytes(b"cut short")
    (folder / "train.jsonl").write_text("{}\n", encoding="utf-8")
    assert main(["clean", "walks", "--caches"]) == 0
    assert cut
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        "train.jsonl", f"clips/{own.name}",
    }  # fmt: skip


TRAINING = """
[steps.preprocess]
keep_all = true
[steps.train]
max_train_steps = 6
learning_rate = 1e-2
network_dim = 4
validation_items = 2
validation_timesteps = 2
log_with = ["none"]
[steps.evaluate]
validation_timesteps = 2
num_videos = 0
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the bundle is Linux's")
def test_one_script_goes_from_two_films_to_a_page_and_holds_one_film_out(place):
    edit(place, TRAINING)
    (place / "films").mkdir()
    for name, start in (("one", "0"), ("two", "1.5")):
        cut = ["-v", "error", "-ss", start, "-i", str(BUNNY), "-t", "1.5", "-an", str(place / f"films/{name}.mp4")]
        subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), *cut], check=True)
        (place / f"films/{name}.txt").write_text("a rabbit in a meadow", encoding="utf-8")
    assert main(["publish", "walks", "--footage", str(place / "films")]) == 0
    bundle = place / "published" / "linux"
    write_tiny_wan(bundle / "models", ["a rabbit in a meadow"])

    said = run_script(bundle, "train_walks.sh")
    clips = [json.loads(line)["file"] for line in
             (bundle / "files/datasets/walks/clips/train.jsonl").read_text(encoding="utf-8").splitlines()]  # fmt: skip
    films = Counter(video_of(Path(clip).name) for clip in clips)
    assert len(films) == 2
    assert min(films.values()) > 2
    unseen = [f"neither trained on nor judged: {number - 2} other clip" for number in films.values()]
    assert any(line in said for line in unseen)
    outputs = bundle / "outputs" / "walks"
    judged = read_evaluation(outputs / "evaluation.json")
    assert judged.num_items == 2
    assert judged.winner.ci_low is None, "clips of one film are no two witnesses"
    assert "a rabbit in a meadow" in (outputs / "report.html").read_text(encoding="utf-8")
    again = run_script(bundle, "train_walks.sh")
    assert "already trained" in again
    assert "0 clips cut" in again
    assert main(["clean", "walks", "--bundle", "--caches", "--checkpoints", "--outputs"]) == 0
    left = {path.relative_to(bundle).parts[0] for path in bundle.rglob("*") if path.is_file()}
    assert left == {"models"}
