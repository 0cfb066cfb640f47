"""The workspace: what `wangen init` writes, what `wangen.toml` may say, and how each platform's paths come out."""

import re
import sys
from pathlib import Path, PureWindowsPath

import pytest
from helpers import require_rights, write_tree

from wangen import profiles
from wangen.generator import workspace
from wangen.generator.bundle import bundle_steps, find_weights, posix_paths
from wangen.generator.cli import main
from wangen.generator.dataset import Item
from wangen.generator.errors import UsageError
from wangen.generator.publish.texts import dataset_toml
from wangen.generator.steps import Train
from wangen.generator.target import Target, host_platform_name

EXAMPLE = re.compile(r"^# (\w+ = .*)$", re.MULTILINE)
IMAGE = Item(Path("a.jpg"), "image", ("x",), Path("a.txt"))
linux_host = pytest.mark.skipif(host_platform_name() != "linux", reason="what a Linux host sees")


def place(folder: Path, text: str) -> workspace.Workspace:
    return workspace.read(write_tree(folder, {"wangen.toml": text}))


def refusal(folder: Path, text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        place(folder, text)
    return caught.value


# ---- init --------------------------------------------------------------------------------------------------------


def test_init_makes_a_workspace_that_reads_as_the_defaults(tmp_path, capsys):
    assert main(["init", str(tmp_path / "new")]) == 0
    assert str(tmp_path / "new") in capsys.readouterr().out
    made = workspace.read(tmp_path / "new")
    assert (tmp_path / "new" / "datasets").is_dir()
    assert (made.model, made.resolution, made.num_frames) == ("t2v-1.3B", None, None)
    assert made.platforms == ("linux", "windows", "wsl")
    assert [target.folder for target in made.targets] == [
        tmp_path / "new" / "published" / name for name in made.platforms
    ]
    assert {target.root for target in made.targets} == {None}


def test_init_twice_keeps_edits(tmp_path):
    workspace.init(tmp_path)
    (tmp_path / "wangen.toml").write_text("num_frames = 17\n", encoding="utf-8")
    assert main(["init", str(tmp_path)]) == 0
    assert (tmp_path / "wangen.toml").read_text(encoding="utf-8") == "num_frames = 17\n"


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_init_where_a_file_is(tmp_path, name, capsys):
    write_tree(tmp_path, {"file": "x"})
    assert main(["init", str(tmp_path / name)]) == 1
    assert "cannot make the folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["C:", "a?", "new.", "new ", "con", "aux.d", "nul/below", "a\tb"])
def test_init_refuses_a_new_folder_that_windows_cannot_hold(tmp_path, name, capsys):
    assert main(["init", f"{tmp_path}/{name}"]) == 1
    shown = capsys.readouterr().err
    assert "Windows" in shown
    assert "do:    give another name" in shown
    assert list(tmp_path.iterdir()) == []


def test_every_example_line_is_accepted_without_its_hash(tmp_path):
    text = workspace.init(tmp_path).read_text(encoding="utf-8")
    examples = EXAMPLE.findall(text)
    assert {line.split(" = ")[0] for line in examples} == {
        "resolution", "num_frames", "root", "host_root", "models", "vae", "venv",
        "learning_rate", "network_dim", "max_train_epochs", "vram", "sample_prompts", "sample_every_n_epochs",
        "validation_items", "trigger", "resolutions", "resize", "source", "footage", "report",
    }  # fmt: skip
    for number in range(len(examples)):
        count = iter(range(len(examples)))
        place(tmp_path / str(number), EXAMPLE.sub(lambda m: m[1] if next(count) == number else m[0], text))  # noqa: B023
    everything = place(tmp_path / "all", EXAMPLE.sub(r"\1", text.replace("venv = ", "# venv = ", 1)))
    assert everything.sections["windows"]["root"] == r"C:\AI"
    assert everything.steps["train"] == {
        "learning_rate": 1e-4, "network_dim": 16, "max_train_epochs": 35, "vram": "12",
        "sample_prompts": Path("prompts.txt"), "sample_every_n_epochs": 5, "validation_items": 8,
    }  # fmt: skip
    assert everything.dataset("cats") == workspace.DatasetSettings(
        source="photos/cats", trigger="ohwx cat", resolutions=((512, 512), (832, 480)), resize=True,
        footage="/data/films",
    )  # fmt: skip


def test_a_new_workspace_names_no_path_of_this_machine(tmp_path):
    # Its bundles are copied to other machines, whose setup script would take the path for one of theirs.
    text = workspace.init(tmp_path).read_text(encoding="utf-8")
    assert [path for path in (sys.prefix, str(tmp_path), str(Path.home())) if path in text] == []
    assert workspace.read(tmp_path).target(host_platform_name()).venv == ("venv", ".venv")


def test_an_environment_is_a_path_of_its_platform(tmp_path):
    for platform, path, words in (
        ("linux", "~/venv", "~ means another folder"), ("windows", "%USERPROFILE%\\venv", "holds a variable"),
        ("wsl", "C:\\venv", "this is a Windows path"), ("windows", "/opt/venv", "names no drive"),
    ):  # fmt: skip
        assert words in str(refusal(tmp_path, f"[platform.{platform}]\nvenv = '{path}'\n"))
    found = place(tmp_path / "good", "[platform.windows]\nvenv = '../venv'\n")
    assert found.target("windows").venv[0] == "..\\venv"


def test_a_configuration_is_no_flag_of_a_workspace(tmp_path):
    assert "config_file is for the command line" in str(refusal(tmp_path, '[steps.train]\nconfig_file = "a.toml"\n'))


def test_the_workspace_is_found_from_below(tmp_path, monkeypatch):
    workspace.init(tmp_path)
    (tmp_path / "datasets" / "x").mkdir()
    monkeypatch.chdir(tmp_path / "datasets" / "x")
    assert workspace.find(Path()) == tmp_path
    with pytest.raises(UsageError, match=r"no wangen\.toml here or above"):
        workspace.find(Path(tmp_path.anchor))


# ---- what wangen.toml may say ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('modle = "x"', "did you mean model?"),
        ('model = "t2v"', "there is no model 't2v'"),
        ("model = [1]", "there is no model [1]"),
        ('platforms = ["amiga"]', "there is no platform 'amiga'"),
        ('platforms = "linux"', "must be a list of names"),
        ("platforms = []", "must be a list of names"),
        ("resolution = [832]", "one whole number or [width, height]"),
        ("num_frames = 80", "write 77 or 81"),
        ("num_frames = [17, 33]", "whole number above 0, got [17, 33]"),
        ('[platform.amiga]\nroot = "x"', "unknown key 'amiga'"),
        ("platform = 3", "write [platform.NAME]"),
        ("[platform]\nlinux = 3", "write [platform.linux]"),
        ("[platform.linux]\nrot = '/x'", "did you mean root?"),
        ("[platform.linux]\nroot = 3", "must be a path in quotes"),
        ("[platform.linux]\nroot = 'data'", "must be an absolute path"),
        ("[platform.linux]\nroot = '~/data'", "~ means another folder for every user"),
        ("[platform.linux]\nmodels = '$HOME/models'", "holds a variable"),
        (r"[platform.linux]" "\n" r"root = 'C:\AI'", "this is a Windows path"),
        ("[platform.windows]\nroot = 'C:AI'", r"write C:\AI"),
        (r"[platform.windows]" "\n" r"root = '\AI'", "names no drive"),
        ("[platform.windows]\nmodels = 'a<b'", "allows no <"),
        ("steps = 3", "write [steps.NAME]"),
        ("[steps]\ntrain = 3", "there is no step 'train'"),
        ("[steps.bake]\nx = 1", "one of check, cache_latents"),
        ("[steps.train]\nlearning_rat = 1", "did you mean --learning_rate?"),
        ("[steps.train]\nnetwork_dim = 'x'", "takes a whole number"),
        ("[steps.train]\nsdpa = 'yes'", "do:    write true or false"),
        ("[steps.train]\nsdpa = true\nxformers = true", "sdpa and xformers contradict each other"),
        ("[steps.train]\nmax_train_steps = 5\nmax-steps = 6", "max_train_steps and max-steps contradict each other"),
        ("[steps.train]\nmixed_precision = 'fp16'", "use bf16"),
    ],
)
def test_mistakes_in_the_file(tmp_path, text, words):
    error = refusal(tmp_path, text)
    assert words in str(error)
    assert "wangen.toml" in error.where


def test_a_folder_that_is_no_workspace(tmp_path):
    with pytest.raises(UsageError, match=r"no wangen\.toml here"):
        workspace.read(tmp_path)


def test_two_spellings_of_one_step_are_merged(tmp_path):
    made = place(tmp_path, "[steps.train]\nseed = 1\n[steps.wan_train_network]\nnetwork_dim = 8\n")
    assert made.steps == {"train": {"seed": 1, "network_dim": 8}}


def test_a_section_takes_every_spelling_that_the_command_line_takes(tmp_path):
    text = (
        "[steps.evaluate]\nsample_prompts = '/p.txt'\n[steps.train]\nsdpa = true\nno_gradient_checkpointing = false\n"
    )
    made = place(tmp_path, text + "xformers = false\nmax-train-steps = 5\nfp8_base = true\nfp8_scaled = true\n")
    assert made.steps == {
        "evaluate": {"prompt_file": Path("/p.txt")},
        "train": {"attention": "sdpa", "max_train_steps": 5, "quantize": "fp8"},
    }


def test_unknown_names_are_refused_when_asked_for(tmp_path):
    made = place(tmp_path, "")
    for ask in (lambda: made.target("amiga"), lambda: made.profile("t2v")):
        with pytest.raises(UsageError, match="there is no"):
            ask()


def test_a_platform_that_is_not_listed_can_be_asked_for(tmp_path):
    made = place(tmp_path, 'platforms = ["linux", "linux"]\n[platform.windows]\nmodels = "M:/models"')
    assert [target.platform.name for target in made.targets] == ["linux"]
    assert made.target("windows").roots["models"] == r"M:\models"


@linux_host
def test_a_root_out_of_sight_is_refused_only_where_it_is_used(tmp_path):
    made = place(tmp_path, "[platform.windows]\nroot = 'C:\\AI'\n")
    assert made.target("linux").folder == tmp_path / "published" / "linux"
    with pytest.raises(UsageError, match="this host cannot see") as caught:
        made.target("windows")
    assert "host_root" in caught.value.cure
    with pytest.raises(UsageError, match="no absolute path"):
        place(tmp_path / "b", "[platform.windows]\nhost_root = 'D:/AI'\n").target("windows")


def test_defaults_of_the_file_reach_the_profile(tmp_path):
    model = place(tmp_path, 'model = "t2v-14B"\nresolution = 512\nnum_frames = 17').profile()
    assert (model.name, model.resolution, model.num_frames) == ("t2v-14B", (512, 512), 17)
    assert profiles.model("t2v-14B").num_frames == 81


# ---- paths -------------------------------------------------------------------------------------------------------


def rooted(tmp_path: Path, platform: str, root: str, extra: str = "") -> Target:
    text = f"[platform.{platform}]\nroot = '{root}'\nhost_root = '{tmp_path / 'seen'}'\n{extra}"
    return place(tmp_path / "ws", text).target(platform)


@pytest.mark.parametrize(
    ("platform", "root", "path", "toml"),
    [
        ("linux", "/data/a i", "/data/a i/outputs/x", "/data/a i/files/datasets/x/832x480"),
        ("linux", "/odd\\name", "/odd\\name/outputs/x", "/odd\\name/files/datasets/x/832x480"),
        ("wsl", "/mnt/c/AI", "/mnt/c/AI/outputs/x", "/mnt/c/AI/files/datasets/x/832x480"),
        ("windows", "C:/AI/", r"C:\AI\outputs\x", "C:/AI/files/datasets/x/832x480"),
        ("windows", r"\\nas\share\x", r"\\nas\share\x\outputs\x", "//nas/share/x/files/datasets/x/832x480"),
        ("windows", "d:\\", r"D:\outputs\x", "D:/files/datasets/x/832x480"),
    ],
)
def test_a_root_makes_paths_absolute_in_the_targets_style(tmp_path, platform, root, path, toml):
    target = rooted(tmp_path, platform, root)
    made = workspace.read(tmp_path / "ws")
    assert target.path(target.roots["outputs"], "x") == path
    assert target.reach(path) == tmp_path / "seen" / "outputs" / "x"
    train = bundle_steps(made, target, made.profile(), "x")[-2]
    assert str(train.output_dir) == path
    assert f'image_directory = "{toml}"' in dataset_toml(
        target, made.profile(), "x", [IMAGE], made.dataset("x")
    ).replace("\\\\", "\\")


@linux_host
def test_a_windows_root_is_seen_through_host_root_in_any_spelling(tmp_path):
    target = rooted(tmp_path, "windows", r"C:\AI", "models = 'D:/models'")
    assert target.reach(r"c:\ai\Outputs") == tmp_path / "seen" / "Outputs"
    assert target.reach("C:/AI") == tmp_path / "seen"
    assert target.reach(r"D:\models\x") is None
    assert target.reach(r"C:\AI2") is None
    assert target.reach(r"logs\x.log") == tmp_path / "seen" / "logs" / "x.log"


def test_without_a_root_paths_are_relative(tmp_path):
    made = place(tmp_path, "")
    assert made.target("windows").path("outputs", "x") == r"outputs\x"
    assert made.target("linux").reach("outputs/x") == tmp_path / "published" / "linux" / "outputs" / "x"


def test_a_relative_workspace_is_made_absolute(tmp_path, monkeypatch):
    place(tmp_path / "ws", "")
    monkeypatch.chdir(tmp_path)
    assert workspace.read(Path("ws")).target("linux").folder == tmp_path / "ws" / "published" / "linux"


def test_posix_scripts_made_on_windows_have_forward_slashes():
    step = Train(
        dataset_config=PureWindowsPath("files/tomls/x.toml"), dit=PureWindowsPath("C:/AI/dit.safetensors"),
        output_dir=PureWindowsPath("/data/out"), output_name="x",
    )  # fmt: skip
    words = posix_paths(step).argv()
    assert words[1:9] == [
        "--dataset_config", "files/tomls/x.toml", "--resolution", "all", "--dit", "C:/AI/dit.safetensors",
        "--task", "t2v-14B",
    ]  # fmt: skip
    assert "/data/out" in words


# ---- models and steps --------------------------------------------------------------------------------------------


def test_models_are_found_in_the_models_folder_and_below(tmp_path):
    made = place(tmp_path, "")
    vae, t5, dit = profiles.model("t2v-1.3B").weights
    write_tree(
        tmp_path / "published",
        {
            "linux/models/vae/deep/wan_2.1_vae.safetensors": "x",
            "linux/models/a/wan2.1-t2v-1.3B.safetensors": "x",
            "linux/models/b/wan2.1_t2v_1.3B_fp16.safetensors": "x",
            "windows/models/sub/Wan2.1_VAE.pth": "x",
        },
    )
    linux, windows = made.target("linux"), made.target("windows")
    assert find_weights(linux, vae) == "models/vae/deep/wan_2.1_vae.safetensors"
    assert find_weights(linux, dit) == "models/b/wan2.1_t2v_1.3B_fp16.safetensors"
    assert find_weights(linux, t5) == "models/models_t5_umt5-xxl-enc-bf16.pth"
    assert find_weights(windows, vae) == r"models\sub\Wan2.1_VAE.pth"


def test_a_named_weight_wins(tmp_path):
    made = place(tmp_path, "[platform.windows]\nmodels = 'M:/w'\nvae = 'sub/my vae.pth'\nt5 = 'T:/t5.pth'\n")
    vae, t5, _ = profiles.model("t2v-1.3B").weights
    assert find_weights(made.target("windows"), vae) == r"M:\w\sub\my vae.pth"
    assert find_weights(made.target("windows"), t5) == r"T:\t5.pth"


def test_what_one_step_is_told_the_checks_know(tmp_path):
    text = """
[steps.cache_latents]
vae_dtype = "float32"
[steps.cache_text]
t5_dtype = "float32"
tokenizer = "/tok"
[steps.train]
dit = "/dit.safetensors"
max_train_steps = 5
[steps.check_cache]
deep = true
"""
    made = place(tmp_path, text)
    check, latents, _, cached, train, _ = bundle_steps(made, made.target("linux"), made.profile(), "x")
    assert (check.dit, check.tokenizer) == (Path("/dit.safetensors"), Path("/tok"))
    assert (cached.vae_dtype, cached.t5_dtype, cached.tokenizer, cached.deep) == (
        "float32", "float32", Path("/tok"), True,
    )  # fmt: skip
    assert latents.vae_dtype == "float32"
    assert (train.max_train_steps, train.max_train_epochs) == (5, None)


def test_without_a_length_a_run_has_the_default_epochs(tmp_path):
    made = place(tmp_path, "")
    assert bundle_steps(made, made.target("linux"), made.profile(), "x")[-2].max_train_epochs == 35


def test_an_unwritable_folder(tmp_path, capsys):
    require_rights(tmp_path)
    (tmp_path / "x").mkdir(mode=0o500)
    assert main(["init", str(tmp_path / "x")]) == 1
    assert "the folder cannot be written" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "x" / "y")]) == 1
    assert "cannot make the folder: Permission denied" in capsys.readouterr().err


# ---- datasets ----------------------------------------------------------------------------------------------------


def test_how_a_dataset_is_published(tmp_path):
    made = place(tmp_path, '[dataset.cats]\ntrigger = "ohwx"\nresolutions = [256, "832x480", "256"]\nnum_repeats = 4\n')
    settings = made.dataset("cats")
    assert (settings.trigger, settings.resolutions, settings.num_repeats) == ("ohwx", ((256, 256), (832, 480)), 4)
    assert made.dataset("dogs") == workspace.DatasetSettings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[dataset.cats]\ntriger = 'x'", "did you mean trigger?"),
        ("[dataset.cats]\nresolutions = ['big']", "write 512, or 832x480"),
        ("[dataset.cats]\nresize = 1", "resize must be true or false"),
        ("[dataset.cats]\nbatch_size = 0", "above 0"),
        ("[dataset.cats]\ntrigger = 3", "a text in quotes"),
        ("[dataset.'My Cats']\nresize = true", "write [dataset.my_cats]"),
    ],
)
def test_mistakes_in_a_datasets_section(tmp_path, text, words):
    assert words in str(refusal(tmp_path, text))


def test_choices_are_remembered_and_the_rest_of_the_file_stays(tmp_path):
    text = workspace.init(tmp_path).read_text(encoding="utf-8")
    workspace.remember(tmp_path, "cats", {"trigger": "ohwx"})
    workspace.remember(tmp_path, "dogs", {"resolutions": ["256", "832x480"], "resize": True})
    workspace.remember(tmp_path, "dogs", {"resize": False})
    made = workspace.read(tmp_path)
    assert made.dataset("cats").trigger == "ohwx"
    assert made.dataset("dogs") == workspace.DatasetSettings(resolutions=((256, 256), (832, 480)))
    lines = (tmp_path / "wangen.toml").read_text(encoding="utf-8").splitlines()
    assert [line for line in text.splitlines() if line not in lines] == []


def test_choices_are_not_written_into_a_broken_file(tmp_path):
    write_tree(tmp_path, {"wangen.toml": "model = "})
    with pytest.raises(UsageError):
        workspace.remember(tmp_path, "cats", {"trigger": "ohwx"})
    assert (tmp_path / "wangen.toml").read_text(encoding="utf-8") == "model = "
