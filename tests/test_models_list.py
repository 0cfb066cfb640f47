"""`wangen models list` and `where`: what is known, what was found, and what is missing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import write_tree
from published import TRANSFORMERS, write_sparse, write_sparse_shards

from wangen import profiles
from wangen.generator import workspace
from wangen.generator.bundle import find_weights, place_of
from wangen.generator.cli import main
from wangen.generator.models.places import downloads_called, models_folders

VECTORS = Path(__file__).parent / "vectors"
MODELS = [profiles.model(name) for name in profiles.model_names()]
ROLES = [(model, weights) for model in MODELS for weights in model.weights]


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A models folder with a VAE and a text encoder, as ComfyUI sorts them, in the working folder."""
    monkeypatch.chdir(tmp_path)
    folder = write_tree(tmp_path / "models", {"vae/Wan2.1_VAE.pth": (VECTORS / "vae21/Wan2.1_VAE.pth").read_bytes()})
    (folder / "text_encoders").mkdir()
    shutil.copy(VECTORS / "t5/models_t5_umt5-xxl-enc-bf16.pth", folder / "text_encoders")
    shutil.copytree(VECTORS / "t5/google", folder / "google")
    return folder


def test_list_shows_every_task_with_what_is_found_and_missing(models, capsys):
    assert main(["models", "list"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.split("\n\n")[0].splitlines()]
    assert rows[0] == ["task", "role", "size", "file"]
    assert ["t2v-1.3B", "vae", "3.8", "MB", "vae/Wan2.1_VAE.pth"] in rows
    assert ["t2v-1.3B", "dit", "missing"] in rows
    assert ["t2v-1.3B", "tokenizer", "344.0", "kB", "google/umt5-xxl/tokenizer.json"] in rows
    assert ["ti2v-5B", "vae", "missing"] in rows
    assert {tuple(row[:2]) for row in rows[1:]} == {
        *((model.name, weights.flag) for model, weights in ROLES),
        *((model.name, "tokenizer") for model in MODELS),
    }
    assert f"searched: {models}" in shown


def test_a_table_in_a_pipe_tears_no_name_and_leaves_none_out(models, capsys):
    assert main(["models", "list"]) == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {name for _, weights in ROLES for name in weights.files} <= {*words}


def test_list_of_one_task_as_json(models, capsys):
    assert main(["models", "list", "--task", "t2v-1.3B", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (task,) = shown["tasks"]
    roles = {role["role"]: role for role in task["roles"]}
    assert shown["folders"] == [str(models)]
    assert roles["vae"]["found"] == [
        {"folder": str(models), "path": str(models / "vae/Wan2.1_VAE.pth"), "state": "there", "words": "",
         "num_bytes": (models / "vae/Wan2.1_VAE.pth").stat().st_size}
    ]  # fmt: skip
    assert roles["dit"]["found"][0]["state"] == "missing"
    assert "wan2.1_t2v_1.3B_fp16.safetensors" in roles["dit"]["names"]
    assert "Wan-AI/Wan2.1-T2V-14B/Wan2.1_VAE.pth" in roles["vae"]["downloads"]


def test_a_broken_file_and_one_of_another_kind_are_said_to_be_so(models, capsys):
    whole = (VECTORS / "dit_t2v21/model.safetensors").read_bytes()
    (models / "wan2.1_t2v_1.3B_bf16.safetensors").write_bytes(whole[:1000])
    shutil.copy(VECTORS / "vae21/Wan2.1_VAE.pth", models / "Wan2.2_VAE.pth")
    assert main(["models", "list"]) == 0
    shown = capsys.readouterr().out
    assert "wan2.1_t2v_1.3B_bf16.safetensors  (broken: the file is cut short" in shown
    assert "Wan2.2_VAE.pth  (wrong: this is a Wan 2.1 VAE" in shown
    assert main(["models", "where", "ti2v-5B"]) == 1
    assert "(wrong: this is a Wan 2.1 VAE" in capsys.readouterr().out


def test_where_fails_while_something_is_missing(models, capsys):
    assert main(["models", "where", "t2v-1.3B"]) == 1
    shown = capsys.readouterr().out
    assert f"missing: {models / 'wan2.1_t2v_1.3B_bf16.safetensors'}" in shown
    assert "wangen models download dit --task t2v-1.3B" in shown
    assert f"searched: {models} and every folder below" in shown
    shutil.copy(VECTORS / "dit_t2v21/model.safetensors", models / "wan2.1_t2v_1.3B_fp16.safetensors")
    assert main(["models", "where", "t2v-1.3B"]) == 0
    shown = capsys.readouterr().out
    for name in (
        "vae/Wan2.1_VAE.pth", "text_encoders/models_t5_umt5-xxl-enc-bf16.pth",
        "google/umt5-xxl/tokenizer.json", "wan2.1_t2v_1.3B_fp16.safetensors",
    ):  # fmt: skip
        assert str(models / name) in shown


def test_of_several_files_under_one_name_the_largest_is_taken(tmp_path):
    (target,) = models_folders(tmp_path, None)
    dit = profiles.model("t2v-14B").weights[-1]
    assert dit.flag == "dit"
    write_tree(tmp_path, {"a/wan2.1-t2v-14b-Q4_K_M.gguf": "4" * 40, "b/wan2.1-t2v-14b-Q8_0.gguf": "8" * 80})
    write_tree(tmp_path, {"b/wan2.1-t2v-14b-Q8_0.gguf.part": "8" * 99, "wan2.1-t2v-14b-x/y.gguf": "9" * 99})
    assert tmp_path / find_weights(target, dit) == tmp_path / "b/wan2.1-t2v-14b-Q8_0.gguf"
    write_tree(tmp_path, {"c/wan2.1_t2v_14B_fp8_scaled.safetensors": "8" * 10})
    assert tmp_path / find_weights(target, dit) == tmp_path / "c/wan2.1_t2v_14B_fp8_scaled.safetensors"


def test_list_reads_each_file_and_folder_once_and_not_for_every_task(models):
    code = (
        "import sys\n"
        "seen = []\n"
        "sys.addaudithook(lambda event, args: seen.append((event, str(args[0]))) if args else None)\n"
        "from wangen.generator.cli import main\n"
        "main(['models', 'list'])\n"
        "opened = [path for event, path in seen if event == 'open']\n"
        "walked = [path for event, path in seen if event == 'os.scandir']\n"
        "count = lambda paths, end: sum(path.endswith(end) for path in paths)\n"
        "print(count(opened, 'enc-bf16.pth'), count(opened, 'Wan2.1_VAE.pth'), count(walked, 'text_encoders'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=models.parent)
    t5, vae, folder = map(int, done.stdout.splitlines()[-1].split())
    assert folder == 1
    assert 0 < t5 <= 4
    assert 0 < vae <= 4


def test_where_is_a_file(models, capsys):
    assert main(["models", "where", "Wan2.1_VAE.pth"]) == 0
    shown = capsys.readouterr().out
    assert str(models / "vae/Wan2.1_VAE.pth") in shown
    assert "--vae of t2v-1.3B" in shown
    assert main(["models", "where", "wan_2.1_vae.safetensors"]) == 1
    assert "wan_2.1_vae.safetensors: missing" in capsys.readouterr().out
    assert main(["models", "where", "wan2.1-t2v-14b-Q3_K_S.gguf"]) == 1
    assert "taken by: --dit of t2v-14B\n" in capsys.readouterr().out
    assert main(["models", "where", "nothing.bin"]) == 2
    assert "is no task" in capsys.readouterr().err


def test_a_folder_that_is_given(models, tmp_path, monkeypatch, capsys):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["models", "where", "t2v-1.3B", "--dir", "../models"]) == 1
    assert str(models / "vae/Wan2.1_VAE.pth").replace("/models", "/elsewhere/../models") in capsys.readouterr().out
    assert main(["models", "list"]) == 0
    assert "0 files found" in capsys.readouterr().out


def test_the_folders_of_a_workspace(tmp_path, monkeypatch, capsys):
    text = 'platforms = ["linux", "windows"]\n[platform.windows]\nroot = \'C:\\AI\'\nhost_root = "{host}"\n'
    write_tree(tmp_path, {"wangen.toml": text.format(host=(tmp_path / "ai").as_posix()), "datasets/.keep": ""})
    write_tree(tmp_path, {"ai/models/Wan2.1_VAE.pth": (VECTORS / "vae21/Wan2.1_VAE.pth").read_bytes()})
    monkeypatch.chdir(tmp_path / "datasets")
    assert main(["models", "list", "--task", "t2v-1.3B"]) == 0
    shown = capsys.readouterr().out
    assert "linux: missing; windows: Wan2.1_VAE.pth" in shown
    assert f"searched: {tmp_path / 'published/linux/models'}" in shown
    assert f"searched: {tmp_path / 'ai/models'}" in shown


def test_in_a_bundle_its_own_folder_is_meant(tmp_path, monkeypatch):
    (tmp_path / "wangen.toml").write_text('platforms = ["linux"]\n')
    place = workspace.read(tmp_path)
    for name in ("linux-rocm", "linux"):  # the first is not in the list: it was published once, by its name
        (tmp_path / "published" / name / "venv").mkdir(parents=True)
        for folder in (tmp_path / "published" / name, tmp_path / "published" / name / "venv"):
            monkeypatch.chdir(folder)
            assert [target.platform.name for target in models_folders(None, place)] == [name]
    monkeypatch.chdir(tmp_path)
    assert [target.platform.name for target in models_folders(None, place)] == ["linux"]


def test_a_link_to_a_folder_is_followed_once(models, tmp_path, capsys):
    try:
        (models / "again").symlink_to(models, target_is_directory=True)
        (models / "disk").symlink_to(tmp_path / "disk", target_is_directory=True)
    except OSError:
        pytest.skip("no links can be made here")
    write_tree(
        tmp_path / "disk", {"wan2.1_t2v_1.3B_bf16.safetensors": (VECTORS / "dit_t2v21/model.safetensors").read_bytes()}
    )
    assert main(["models", "where", "t2v-1.3B"]) == 0
    assert str(models / "disk/wan2.1_t2v_1.3B_bf16.safetensors") in capsys.readouterr().out


@pytest.mark.parametrize(("model", "weights"), ROLES, ids=lambda each: getattr(each, "name", getattr(each, "flag", "")))
def test_what_a_download_puts_in_place_is_what_its_role_finds(tmp_path, model, weights):
    """Also where the downloads of every other role lie there: shards of many models are called the same."""
    (target,) = models_folders(tmp_path, None)
    others = [download for _, role in ROLES for download in role.downloads if role.files != weights.files]
    write_tree(tmp_path, {str(place_of(download)): "" for download in others})
    assert not (tmp_path / find_weights(target, weights)).exists()
    assert find_weights(target, weights) == target.path(*place_of(weights.downloads[0]).parts)
    for download in weights.downloads:
        path = tmp_path / place_of(download)
        write_tree(tmp_path, {str(place_of(download)): ""})
        assert tmp_path / find_weights(target, weights) == path
        path.unlink()


def test_a_low_noise_expert_is_not_taken_for_wan_2_1(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for expert in ("low", "high"):
        write_sparse_shards(tmp_path / f"models/Wan2.2-T2V-A14B/{expert}_noise_model", TRANSFORMERS["t2v-A14B"], 6)
    assert main(["models", "where", "diffusion_pytorch_model-00001-of-00006.safetensors"]) == 0
    capsys.readouterr()
    main(["models", "list"])
    words = map(str.split, capsys.readouterr().out.splitlines())
    rows = [[*row[:2], row[-1]] for row in words if row]
    index = "diffusion_pytorch_model.safetensors.index.json"
    assert ["t2v-14B", "dit", "missing"] in rows
    assert ["t2v-A14B", "dit", f"Wan2.2-T2V-A14B/low_noise_model/{index}"] in rows
    assert ["t2v-A14B", "dit_high_noise", f"Wan2.2-T2V-A14B/high_noise_model/{index}"] in rows


def test_the_size_of_another_model_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_sparse(tmp_path / "models/wan2.1_t2v_1.3B_bf16.safetensors", TRANSFORMERS["t2v-14B"])
    assert main(["models", "where", "t2v-1.3B"]) == 1
    shown = capsys.readouterr().out
    assert "wrong" in shown
    assert "14B" in shown


def named(folder: Path, text: str) -> None:
    """Make a workspace here whose models folder is this one, with these lines for its one platform."""
    platform = "windows" if os.name == "nt" else "linux"
    lines = f"platforms = ['{platform}']\n[platform.{platform}]\nmodels = '{folder.as_posix()}'\n{text}\n"
    write_tree(folder.parent, {"wangen.toml": lines, "datasets/.keep": ""})


def test_a_name_in_the_workspace_without_a_folder_is_searched_for(models, capsys):
    (models / "vae/Wan2.1_VAE.pth").rename(models / "vae/my.pth")
    named(models, "vae = 'my.pth'")
    main(["models", "where", "t2v-1.3B"])
    assert f"vae             {models / 'vae/my.pth'}" in capsys.readouterr().out
    shutil.copy(models / "vae/my.pth", models)
    main(["models", "where", "t2v-1.3B"])
    assert f"vae             {models / 'my.pth'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "fetched"), [("my.pth", False), ("Wan2.1_VAE.pth", True), ("x/Wan2.1_VAE.pth", False)]
)
def test_a_file_that_the_workspace_names_and_that_is_missing(models, capsys, name, fetched):
    (models / "vae/Wan2.1_VAE.pth").unlink()
    (models / "wan_2.1_vae.safetensors").write_bytes(b"not looked at")
    named(models, f"vae = '{name}'")
    assert main(["models", "where", "t2v-1.3B"]) == 1
    shown = capsys.readouterr().out.partition("t5 ")[0]
    assert f"missing: {models / name}" in shown
    assert "wangen.toml names this" in shown
    assert "any of these names" not in shown
    assert ("wangen models download vae" in shown) == fetched


def test_a_link_that_leads_to_nothing_hides_no_file(models, capsys):
    good = (models / "vae/Wan2.1_VAE.pth").rename(models / "wan_2.1_vae.safetensors")
    try:
        (models / "vae/Wan2.1_VAE.pth").symlink_to(models / "gone.pth")
    except OSError:
        pytest.skip("no links can be made here")
    main(["models", "where", "t2v-1.3B"])
    assert f"vae             {good}" in capsys.readouterr().out


def test_of_a_broken_file_it_is_said_what_to_do_and_which_comes_next(models, capsys):
    good = models / "vae/wan_2.1_vae.safetensors"
    shutil.copy(models / "vae/Wan2.1_VAE.pth", good)
    (models / "vae/Wan2.1_VAE.pth").write_bytes(b"junk")
    assert main(["models", "where", "t2v-1.3B"]) == 1
    assert f"if it is moved away, this is taken: {good}" in capsys.readouterr().out
    good.unlink()
    assert main(["models", "where", "t2v-1.3B"]) == 1
    assert "or move it away and fetch it with: wangen models download vae --task t2v-1.3B" in capsys.readouterr().out


def test_the_tokenizer_that_the_workspace_names(models, tmp_path, capsys):
    shutil.move(models / "google/umt5-xxl", tmp_path / "mine")
    steps = f"[steps.cache_text]\ntokenizer = '{(tmp_path / 'mine').as_posix()}'"
    named(models, steps)
    main(["models", "where", "t2v-1.3B"])
    assert f"tokenizer       {tmp_path / 'mine/tokenizer.json'}" in capsys.readouterr().out
    named(models, steps.replace("mine", "gone"))
    main(["models", "where", "t2v-1.3B"])
    shown = capsys.readouterr().out
    assert f"missing: {tmp_path / 'gone'}\n" in shown
    assert "wangen.toml names this" in shown


def test_a_path_to_a_file_that_is_there_belongs_to_identify(models, capsys):
    write_tree(models.parent, {"mine/a.safetensors": "x"})
    assert main(["models", "where", "./mine/a.safetensors"]) == 2
    assert "wangen models identify ./mine/a.safetensors" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="Windows sees its own drives")
def test_a_folder_of_another_machine_was_not_searched(tmp_path, monkeypatch, capsys):
    text = "platforms = ['windows']\n[platform.windows]\nmodels = 'D:/models'\n"
    write_tree(tmp_path, {"wangen.toml": text, "datasets/.keep": ""})
    monkeypatch.chdir(tmp_path)
    assert main(["models", "where", "t2v-1.3B"]) == 1
    shown = capsys.readouterr().out
    assert "not seen from here" in shown
    assert "searched" not in shown


def test_a_folder_that_is_given_must_be_there(models, capsys):
    for words, found in (("typo", "there is no such folder"), ("models/vae/Wan2.1_VAE.pth", "this is a file")):
        for command in (["list"], ["where", "t2v-1.3B"]):
            assert main(["models", *command, "--dir", words]) == 1
            assert found in capsys.readouterr().err
    assert main(["models", "download", "vae", "--task", "t2v-1.3B", "--dir", words]) == 1
    assert found in capsys.readouterr().err


def test_on_a_narrow_terminal_no_name_is_torn(models, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["models", "list"]) == 0
    shown = capsys.readouterr().out.replace(",", " ")
    assert {name for _, weights in ROLES for name in weights.files} <= {*shown.split()}
    assert max(map(len, shown.split("best first")[1].split("searched")[0].splitlines())) < 80


def test_a_name_with_a_plus_can_be_fetched_by_it(models, capsys):
    assert main(["models", "list"]) == 0
    shown = capsys.readouterr().out
    assert "Wan2.1_VAE.pth +," in shown
    assert "Wan2.1_VAE.safetensors," in shown
    names = [words.strip(" +") for words in shown.replace("\n", ",").split(",") if words.endswith(" +")]
    assert len(names) > 20
    assert {len(downloads_called(name)) for name in names} == {1}


def test_help_fits_a_narrow_terminal_and_says_what_the_words_mean(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    main(["models"])
    assert "...\n" not in capsys.readouterr().out.partition("Commands:")[2]
    assert main(["models", "download", "--help"]) == 0
    shown = capsys.readouterr().out
    assert ", ".join(profiles.WEIGHT_ROLES) in shown
    assert ", ".join(profiles.model_names()) in shown


def test_unknown_words(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["models", "list", "--task", "t9v"]) == 2
    assert "there is no task 't9v'" in capsys.readouterr().err
    assert main(["models", "lsit"]) == 2
    assert "did you mean list?" in capsys.readouterr().err
    assert main(["models"]) == 0
    assert "identify" in capsys.readouterr().out
