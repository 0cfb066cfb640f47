"""Platform profiles: what the shipped ones say, and the user's own in the workspace."""

from pathlib import Path

import pytest
from helpers import write_tree

from wangen import profiles
from wangen.generator import platforms, scripts, workspace
from wangen.generator.bundle import bundle_steps
from wangen.generator.cli import main
from wangen.generator.errors import UsageError
from wangen.generator.steps import CacheLatents, CacheText, CheckCache
from wangen.profiles import TorchBuild


def refusal(folder, name, text):
    with pytest.raises(UsageError) as caught:
        platforms.load(write_tree(folder, {f"profiles/{name}.toml": text}))
    return caught.value


def steps_of(made, platform):
    steps = bundle_steps(made, made.target(platform), made.profile(), "cats")
    return {type(step): step for step in steps}


def test_the_shipped_platforms():
    assert profiles.platform_names() == ["linux", "linux-rocm", "slurm", "windows", "windows-rocm", "wsl"]
    kinds = {name: profiles.platform(name).kind for name in profiles.platform_names()}
    assert kinds == {
        "linux": "linux", "linux-rocm": "linux", "slurm": "slurm", "windows": "windows", "windows-rocm": "windows",
        "wsl": "wsl",
    }  # fmt: skip
    assert {profiles.platform(name).accelerator for name in profiles.platform_names() if "rocm" in name} == {"rocm"}


@pytest.mark.parametrize("name", profiles.platform_names())
def test_every_shipped_profile_passes_the_checks_of_a_users(tmp_path, name):
    from importlib.resources import files

    text = files("wangen.profiles").joinpath("platforms", f"{name}.toml").read_text(encoding="utf-8")
    loaded = platforms.load(write_tree(tmp_path, {f"profiles/my-{name}.toml": text}))
    assert vars(loaded[f"my-{name}"]) == vars(profiles.platform(name)) | {"name": f"my-{name}"}


@pytest.mark.parametrize("name", ["linux-rocm", "windows-rocm"])
def test_rocm_runs_the_vae_in_float32_and_the_scripts_say_why(tmp_path, name):
    workspace.init(tmp_path)
    made = workspace.read(tmp_path)
    steps = steps_of(made, name)
    assert (steps[CacheLatents].vae_dtype, steps[CheckCache].vae_dtype) == ("float32", "float32")
    assert steps[CacheText].t5_dtype == "bfloat16"
    target = made.target(name)
    bundle = scripts.Bundle(
        platform=target.platform, slug="cats", root=None, venv=target.venv, steps=tuple(steps.values()), version="1.0"
    )
    for shell in target.platform.shells:
        text = scripts.render(bundle, shell, "train").decode("utf-8-sig")
        head, _, _ = text.partition("<<< knobs")
        (note,) = [line for line in head.splitlines() if "(published: float32)" in line]
        assert "on ROCm a bfloat16 VAE gives all-zero or non-finite latents" in note


def test_a_profile_of_the_users_own(tmp_path):
    write_tree(tmp_path, {
        "wangen.toml": 'platforms = ["pod"]',
        "profiles/pod.toml": 'based_on = "linux"\nvenv = ["/opt/venv"]\n[overrides.train]\nnetwork_dim = 64\n',
    })  # fmt: skip
    made = workspace.read(tmp_path)
    (target,) = made.targets
    assert (target.platform.name, target.platform.kind, target.venv) == ("pod", "linux", ("/opt/venv",))
    assert target.folder == tmp_path / "published" / "pod"
    assert bundle_steps(made, target, made.profile(), "cats")[-2].network_dim == 64


def test_the_profile_of_the_docs(tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "platforms.md").read_text(encoding="utf-8")
    text = page.partition("```toml\n")[2].partition("```")[0]
    pod = platforms.load(write_tree(tmp_path, {"profiles/pod.toml": text}))["pod"]
    assert (pod.venv, pod.overrides["train"]) == (("/opt/venv",), {"attention": "flash"})
    assert pod.reasons == {"train.attention": "flash-attn is built into the image"}


def test_a_shipped_profile_overridden_in_part(tmp_path):
    text = '[[torch_builds]]\ntag = "https://wheels.example/simple"\n'
    loaded = platforms.load(write_tree(tmp_path, {"profiles/windows.toml": text}))["windows"]
    assert loaded.torch_builds == (TorchBuild(tag="https://wheels.example/simple"),)
    assert (loaded.kind, loaded.shells, loaded.suffix) == ("windows", ("bat", "ps1"), "win")
    assert profiles.platform("windows").torch_builds[0].tag != "https://wheels.example/simple"


def test_profiles_based_on_each_other(tmp_path):
    loaded = platforms.load(write_tree(tmp_path, {
        "profiles/a.toml": 'based_on = "b"\nsuffix = "a"', "profiles/b.toml": 'based_on = "wsl"\nvenv = ["env"]',
    }))["a"]  # fmt: skip
    assert (loaded.kind, loaded.suffix, loaded.venv) == ("wsl", "a", ("env",))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("pod", 'bassed_on = "linux"', "did you mean based_on?"),
        ("pod", 'based_on = "linuks"', "did you mean linux?"),
        ("pod", 'based_on = "pod"', "based on itself"),
        ("pod", 'kind = "linux"', "lacks shells, suffix"),
        ("pod", 'kind = "mac"', "one of windows, wsl, linux, slurm"),
        ("pod", 'accelerator = "tpu"', "one of cuda, rocm, cpu"),
        ("pod", 'shells = ["fish"]', "no template for the shell 'fish'"),
        ("pod", 'suffix = "a/b"', "a-z, 0-9 and _"),
        ("pod", 'venv = "venv"', "a list of texts"),
        ("pod", "[overrides.train]\nnetwork_dimm = 3", "did you mean --network_dim?"),
        ("pod", "[overrides.train]\nnetwork_dim = 'x'", "a whole number"),
        ("pod", "[overrides.bake]\nseed = 3", "there is no step 'bake'"),
        ("pod", '[reasons]\n"train.sed" = "x"', "did you mean train.seed?"),
        ("pod", '[[torch_builds]]\ntga = "cpu"', "did you mean tag?"),
        ("pod", '[[torch_builds]]\ntag = "cu128"\ndriver = "new"', "a CUDA version"),
        ("My Pod", 'based_on = "linux"', "rename the file"),
    ],
)
def test_mistakes_in_a_profile(tmp_path, name, text, words):
    error = refusal(tmp_path, name, text)
    assert words in str(error)
    assert f"{name}.toml" in str(error)


def test_two_profiles_based_on_each_other_in_a_circle(tmp_path):
    write_tree(tmp_path, {"profiles/a.toml": 'based_on = "b"'})
    assert "based on itself" in str(refusal(tmp_path, "b", 'based_on = "a"'))


def test_the_mistake_reaches_the_user(tmp_path, capsys):
    write_tree(tmp_path, {"wangen.toml": "", "profiles/pod.toml": 'based_on = "linux"\nshels = ["sh"]'})
    assert main(["publish", "cats", "--workspace", str(tmp_path)]) == 2
    assert "did you mean shells?" in capsys.readouterr().err
