"""Model profiles: what the shipped ones say, what is refused in them, and what this version trains."""

import re

import pytest
from helpers import write_tree

from wangen import profiles
from wangen.generator import workspace
from wangen.generator.cli import main
from wangen.generator.errors import UsageError
from wangen.generator.kinds import KINDS
from wangen.generator.steps import STEPS, Check, find_step
from wangen.generator.table import options
from wangen.generator.tasks import require_supported, supported

MODELS = [profiles.model(name) for name in profiles.model_names()]


def test_the_shipped_models():
    assert profiles.model_names() == [
        "flf2v-14B", "i2v-14B", "i2v-A14B", "t2v-1.3B", "t2v-14B", "t2v-A14B", "ti2v-5B",
    ]  # fmt: skip
    assert [model.fps for model in MODELS] == [16, 16, 16, 16, 16, 16, 24]
    assert {model.name: model.experts.boundary for model in MODELS if model.experts} == {
        "t2v-A14B": 0.875, "i2v-A14B": 0.9,
    }  # fmt: skip
    assert {model.name for model in MODELS if "clip" in {weights.flag for weights in model.weights}} == {
        "i2v-14B", "flf2v-14B",
    }  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_profile_agrees_with_itself_and_with_the_table(model):
    sizes = model.transformer
    assert sizes.dim == 128 * sizes.num_heads
    assert sizes.out_channels == model.latent_channels
    assert sizes.in_channels == {"image": 36, "first_and_last": 36}.get(model.condition, sizes.out_channels)
    assert (len({"dit_high_noise"} & {w.flag for w in model.weights}) == 1) == (model.experts is not None)
    assert all(side % model.bucket_step == 0 for side in model.resolution)
    assert model.bucket_step == model.spatial_stride * model.patch[1]
    assert model.num_frames % model.temporal_stride == 1
    assert model.latent_channels == (48 if model.kind_of("vae") == "wan-vae-2.2" else 16)
    re.compile(model.lora_targets)
    for step, values in model.defaults.items():
        kind = find_step(step)
        assert kind in STEPS
        assert values.keys() <= {option.name for option in options(kind)}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_weights_have_kinds_flags_and_places(model):
    assert model.weights
    for weights in model.weights:
        assert weights.flag in {option.name for option in options(Check)}
        words, flag = KINDS[weights.kind]
        assert words
        assert f"--{weights.flag}".startswith(flag)
        assert len(set(weights.files)) == len(weights.files)
        for download in weights.downloads:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", download.repo)
            assert download.path.endswith((".safetensors", ".pth", ".gguf", ".safetensors.index.json"))
            name = download.path.rpartition("/")[2]
            repo = download.repo.rpartition("/")[2]
            assert {name, download.path, f"{repo}/{download.path}"} & {*weights.files}
    assert {download.path.rpartition("/")[0] for download in model.tokenizer} == {"google/umt5-xxl"}


def test_no_file_name_means_two_different_models():
    owners: dict[str, set[tuple[str, str]]] = {}
    for model in MODELS:
        for weights in model.weights:
            for file in weights.files:
                sizes = str(model.transformer) if weights.flag.startswith("dit") else ""
                owners.setdefault(file, set()).add((weights.kind, f"{weights.flag} {sizes}"))
    twice = {file for file, found in owners.items() if len(found) > 1}
    assert {file for file in twice if "diffusion_pytorch_model" not in file} == set()


@pytest.mark.parametrize(
    "change",
    [
        {"titel": "x"},
        {"weights": {"vae": {"kind": "wan-vae-2.1", "files": [], "downloads": [], "url": "x"}}},
        {"weights": {"vae": {"kind": "wan-vae-2.1", "files": [], "downloads": [{"repo": "a/b", "file": "c"}]}}},
        {"transformer": {"dim": 1}},
        {"experts": {"boundary": 0.9, "guidance": 1}},
        {"tokenizer": [{"repo": "a/b"}]},
    ],
)
def test_an_unknown_or_missing_key_is_refused(change):
    values = profiles.model_values("t2v-14B")
    assert profiles.make_model("mine", values).title == "Wan 2.1 T2V 14B"
    with pytest.raises(TypeError):
        profiles.make_model("mine", values | change)


def test_a_profile_takes_from_the_one_it_is_based_on_what_it_does_not_say():
    small, big = profiles.model("t2v-1.3B"), profiles.model("t2v-14B")
    assert small.weights[:2] == big.weights[:2]
    assert small.weights[2] != big.weights[2]
    assert small.defaults == big.defaults
    assert small.transformer != big.transformer
    with pytest.raises(KeyError):
        profiles.model("t2v-2B")


# ---- what is trained ---------------------------------------------------------------------------------------------


def test_only_text_to_video_with_one_expert_is_trained():
    assert supported() == ["t2v-1.3B", "t2v-14B"]
    for model in MODELS:
        if model.name in supported():
            require_supported(model, "training")
            continue
        with pytest.raises(UsageError) as caught:
            require_supported(model, "training")
        assert f"training {model.name} is not in this version of wangen: it needs {model.missing_feature}" in str(
            caught.value
        )
        assert "use one of t2v-1.3B, t2v-14B" in str(caught.value)


def test_the_steps_refuse_the_other_tasks_before_they_read_anything(tmp_path, capsys):
    common = ["--dit", "none", "--task", "i2v-14B"]
    lines = {
        "training i2v-14B is": ["train", *common, "--dataset_config", str(tmp_path / "none.toml"), "--output_dir",
                                str(tmp_path / "out"), "--output_name", "x"],
        "sampling i2v-14B is": ["generate", *common, "--vae", "none", "--t5", "none", "--prompt", "a cat",
                                "--save_path", str(tmp_path / "a.mp4")],
    }  # fmt: skip
    for words, line in lines.items():
        assert main(line) == 2
        assert words in capsys.readouterr().err


def test_publishing_refuses_the_other_tasks(tmp_path, capsys, monkeypatch):
    write_tree(tmp_path, {"wangen.toml": 'model = "t2v-A14B"\n'})
    monkeypatch.chdir(tmp_path)
    assert workspace.read(tmp_path).profile().name == "t2v-A14B"
    assert main(["publish", "cats"]) == 2
    assert "publishing for t2v-A14B is not in this version of wangen: it needs two experts" in capsys.readouterr().err
    assert not (tmp_path / "published").exists()
