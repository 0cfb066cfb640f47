"""Model profiles: what the shipped ones say, what is refused in them, and what this version trains."""

import re
import shutil
from pathlib import PurePosixPath

import pytest
from helpers import image_bytes, write_tree
from published import TRANSFORMERS

from wangen import profiles
from wangen.generator import workspace
from wangen.generator.bundle import is_called
from wangen.generator.cli import main
from wangen.generator.errors import UsageError
from wangen.generator.kinds import KINDS
from wangen.generator.steps import STEPS, Check, find_step
from wangen.generator.table import options
from wangen.generator.tasks import Activity, missing_feature, require_supported, supported
from wangen.profiles import reading
from wangen.profiles.reading import ProfileError

MODELS = [profiles.model(name) for name in profiles.model_names()]


def test_the_shipped_models():
    assert profiles.model_names() == [
        "flf2v-14B", "i2v-14B", "i2v-A14B", "qwen-image", "qwen-image-edit", "qwen-image-edit-plus", "t2v-1.3B",
        "t2v-14B", "t2v-A14B", "ti2v-5B",
    ]  # fmt: skip
    assert [model.fps for model in MODELS] == [16, 16, 16, 1, 1, 1, 16, 16, 16, 24]
    assert {model.name: model.max_controls for model in MODELS if model.condition == "controls"} == {
        "qwen-image-edit": 1, "qwen-image-edit-plus": 3,
    }  # fmt: skip
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
            place = PurePosixPath(download.repo.rpartition("/")[2], download.path)
            assert any(is_called(place, name) for name in weights.files)
    home = "google/umt5-xxl" if model.kind_of("t5") == "umt5-encoder" else "processor"
    assert {download.path.rpartition("/")[0] for download in model.tokenizer} == {home}


def test_no_file_name_means_two_different_models():
    owners: dict[str, set[tuple[str, str]]] = {}
    for model in MODELS:
        for weights in model.weights:
            for file in weights.files:
                sizes = str(model.transformer) if weights.flag.startswith("dit") else ""
                owners.setdefault(file, set()).add((weights.kind, f"{weights.flag} {sizes}"))
    twice = {file for file, found in owners.items() if len(found) > 1}
    assert {file for file in twice if "diffusion_pytorch_model" not in file} == set()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_lora_adapts_as_many_layers_as_those_of_other_trainers(model):
    from wangen.generator.lora_keys import module_name

    matrices = [name for name, shape in TRANSFORMERS[model.name].items() if len(shape) == 2 and "weight" in name]
    layers = filter(None, (module_name(name.removesuffix(".weight")) for name in matrices))
    adapted = [layer for layer in layers if re.fullmatch(model.lora_targets, layer)]
    qwen = dict.fromkeys(("qwen-image", "qwen-image-edit", "qwen-image-edit-plus"), 720)
    expected = {"t2v-1.3B": 300, "ti2v-5B": 300, "i2v-14B": 480, "flf2v-14B": 480, **qwen}
    assert len(adapted) == expected.get(model.name, 400)
    assert all(layer.startswith(("blocks.", "transformer_blocks.")) for layer in adapted)


@pytest.mark.parametrize(
    ("name", "users"),
    [
        ("wan_2.1_vae.safetensors", "vae: flf2v-14B i2v-14B i2v-A14B t2v-1.3B t2v-14B t2v-A14B"),
        ("Wan2.1_VAE.pth", "vae: flf2v-14B i2v-14B i2v-A14B t2v-1.3B t2v-14B t2v-A14B"),
        ("Wan2.2_VAE.pth", "vae: ti2v-5B"),
        ("umt5-xxl-enc-bf16.safetensors", "t5: flf2v-14B i2v-14B i2v-A14B t2v-1.3B t2v-14B t2v-A14B ti2v-5B"),
        ("models_t5_umt5-xxl-enc-bf16.pth", "t5: flf2v-14B i2v-14B i2v-A14B t2v-1.3B t2v-14B t2v-A14B ti2v-5B"),
        ("umt5-xxl-encoder-Q3_K_S.gguf", "t5: flf2v-14B i2v-14B i2v-A14B t2v-1.3B t2v-14B t2v-A14B ti2v-5B"),
        ("clip_model.safetensors", "clip: flf2v-14B i2v-14B"),
        ("Wan-2.2-T2V-Low-Noise-BF16.safetensors", "dit: t2v-A14B"),
        ("wan2.2_t2v_high_noise_14B_fp16.safetensors", "dit_high_noise: t2v-A14B"),
        ("Wan2_1-T2V-14B_fp8_e4m3fn_scaled_KJ.safetensors", "dit: t2v-14B"),
        ("Wan2_1-T2V-14B_fp8_e5m2_scaled_KJ.safetensors", "dit: t2v-14B"),
        ("Wan2_1-I2V-14B-480p_fp8_e5m2_scaled_KJ.safetensors", "dit: i2v-14B"),
        ("Wan2_1-I2V-14B-720p_fp8_e4m3fn_scaled_KJ.safetensors", "dit: i2v-14B"),
        ("Wan2_1-FLF2V-14B-720P_fp8_e4m3fn.safetensors", "dit: flf2v-14B"),
        ("Wan2_2-I2V-A14B-LOW_fp8_e5m2_scaled_KJ.safetensors", "dit: i2v-A14B"),
        ("Wan2_2-T2V-A14B_HIGH_fp8_e4m3fn_scaled_KJ.safetensors", "dit_high_noise: t2v-A14B"),
        ("Wan2_2-T2V-A14B-HIGH_fp8_e5m2_scaled_KJ.safetensors", "dit_high_noise: t2v-A14B"),
        ("Wan2_2-TI2V-5B_fp8_e5m2_scaled_KJ.safetensors", "dit: ti2v-5B"),
        ("Wan2.2-I2V-A14B-HighNoise-Q2_K.gguf", "dit_high_noise: i2v-A14B"),
        ("qwen_image_fp8_e4m3fn.safetensors", "dit: qwen-image"),
        ("qwen_image_edit_bf16.safetensors", "dit: qwen-image-edit"),
        ("qwen_image_edit_2509_fp8_e4m3fn.safetensors", "dit: qwen-image-edit-plus"),
        ("qwen_image_edit_2511_bf16.safetensors", "dit: qwen-image-edit-plus"),
        ("qwen_image_vae.safetensors", "vae: qwen-image qwen-image-edit qwen-image-edit-plus"),
        ("qwen_2.5_vl_7b_fp8_scaled.safetensors", "t5: qwen-image qwen-image-edit qwen-image-edit-plus"),
        ("Wan2_1-T2V-14B-Phantom_fp8_e5m2_scaled_KJ.safetensors", ""),
        ("Wan2_2-Animate-14B_fp8_e4m3fn_scaled_KJ.safetensors", ""),
    ],
)
def test_the_names_in_circulation_are_known(name, users):
    found: dict[str, list[str]] = {}
    for model in MODELS:
        for weights in model.weights:
            if any(is_called(PurePosixPath(name), known) for known in weights.files):
                found.setdefault(weights.flag, []).append(model.name)
    assert ", ".join(f"{flag}: {' '.join(tasks)}" for flag, tasks in found.items()) == users


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
    with pytest.raises(ProfileError):
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


@pytest.mark.parametrize("doing", ["training", "sampling", "caching for", "publishing for"])
def test_what_cannot_be_done_with_a_model_is_said_with_what_it_lacks(doing: Activity):
    names = [name for name in profiles.model_names() if name != "flf2v-14B"]
    assert supported() == names
    for model in MODELS:
        if model.name in names:
            require_supported(model, doing)
            continue
        with pytest.raises(UsageError) as caught:
            require_supported(model, doing)
        missing = missing_feature(model)
        assert missing
        assert f"{doing} {model.name} is not in this version of wangen: it needs {missing}" in str(caught.value)
        assert f"use one of {', '.join(names)}" in str(caught.value)


def test_the_steps_refuse_the_other_tasks_before_they_read_anything(tmp_path, capsys):
    common = ["--dit", "none", "--task", "flf2v-14B"]
    lines = {
        "training flf2v-14B is": ["train", *common, "--dataset_config", str(tmp_path / "none.toml"), "--output_dir",
                                str(tmp_path / "out"), "--output_name", "x"],
        "sampling flf2v-14B is": ["generate", *common, "--vae", "none", "--t5", "none", "--prompt", "a cat",
                                "--save_path", str(tmp_path / "a.mp4")],
    }  # fmt: skip
    for words, line in lines.items():
        assert main(line) == 2
        assert words in capsys.readouterr().err


def test_publishing_refuses_the_other_tasks(tmp_path, capsys, monkeypatch):
    write_tree(tmp_path, {"wangen.toml": 'model = "flf2v-14B"\n'})
    monkeypatch.chdir(tmp_path)
    assert workspace.read(tmp_path).profile().name == "flf2v-14B"
    assert main(["publish", "cats"]) == 2
    found = capsys.readouterr().err
    assert "publishing for flf2v-14B is not in this version of wangen: it needs the first and the last frame" in found
    assert not (tmp_path / "published").exists()


CLAY = """based_on = "t2v-1.3B"
title = "Clay"
[weights.dit]
kind = "wan-transformer-t2v"
files = ["clay.safetensors"]
"""


@pytest.fixture
def clay(tmp_path, monkeypatch):
    """A profile of one's own beside the shipped ones; gives the function that writes it."""
    folder = tmp_path / "profiles"
    shutil.copytree(reading.path("models", "").parent.parent, folder)
    monkeypatch.setattr(reading, "path", lambda kind, name: folder / kind / f"{name}.toml")
    profiles.model.cache_clear()
    yield lambda text: write_tree(folder, {"models/clay.toml": text})
    profiles.model.cache_clear()


def test_a_profile_of_ones_own_needs_no_download(clay, tmp_path, capsys):
    clay(CLAY)
    assert profiles.model("clay").kind_of("dit") == "wan-transformer-t2v"
    assert main(["models", "list", "--task", "clay", "--dir", str(tmp_path)]) == 0
    assert "clay.safetensors" in capsys.readouterr().out
    place = write_tree(
        tmp_path / "place", {"wangen.toml": "", "datasets/cats/a.jpg": image_bytes(), "datasets/cats/a.txt": "c"}
    )
    assert main(["publish", "cats", "--workspace", str(place), "--model", "clay", "--resolution", "64"]) == 0
    assert "models/clay.safetensors" in next(place.glob("published/*/train_cats.sh")).read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["models", "download", "dit", "--task", "clay", "--dir", str(tmp_path), "--dry_run"]) == 1
    assert "is offered nowhere for download" in capsys.readouterr().err


@pytest.mark.parametrize(("old", "new", "where", "words"), [
    ('"t2v-1.3B"', '"t2v-1.4B"', ", based_on", ["no model 't2v-1.4B'", "one of clay, "]),
    ('"t2v-1.3B"', '"clay"', "", ["based on itself", "name another based_on"]),
    ('"t2v-1.3B"', "3", ", based_on", ["no model 3"]),
    ('based_on = "t2v-1.3B"\n', "", "", ["is missing", "based_on"]),
    ('"Clay"', "Clay", "", ["not valid TOML", "mend the file"]),
    ("title", "titel", "", ["unknown key 'titel'", "did you mean title?"]),
    ('"Clay"', "3", ", title", ["a text in quotes belongs here, got 3"]),
    ('"Clay"', '"Clay"\nfps = true', ", fps", ["a whole number belongs here"]),
    ('"Clay"', '"Clay"\nresolution = [480]', ", resolution", ["a list of 2", "[480]"]),
    ('"Clay"', '"Clay"\nresolution = [480, 490]', "", ["480 x 490", "multiples of 16"]),
    ('"Clay"', '"Clay"\ncondition = "texts"', ", condition", ["'texts'", "first_and_last"]),
    ("[weights.dit]", "[weights]\ndit = 3\n[x]", ", weights.dit", ["a table belongs here"]),
    ('"Clay"', '"Clay"\n[presets.big]\nnum_frames = 5', ", presets", ["a whole number", "'big'"]),
    ('"Clay"', '"Clay"\n[transformer]\ndim = 1', ", transformer", ["ffn_dim is missing"]),
    ("weights.dit", "weights.dti", ", weights.dti, flag", ["'dti'", "dit_high_noise"]),
    ("wan-transformer-t2v", "wan-transformer", ", weights.dit, kind", ["'wan-transformer'", "wan-transformer-t2v"]),
    ('"clay.safetensors"', '"my clay.safetensors"', ", weights.dit", ["without blanks"]),
    ('"clay.safetensors"', '"clay*.safetensors"', ", weights.dit", ["no whole name"]),
    ('["clay.safetensors"]', '"clay.safetensors"', ", weights.dit, files", ["a list belongs here"]),
    ('["clay.safetensors"]', '["c.pth"]\ndownloads = [{ repo = "a/b" }]', ", weights.dit, downloads",
     ["path is missing"]),
])  # fmt: skip
def test_what_is_wrong_in_a_profile_of_ones_own_is_said(old, new, where, words, clay, tmp_path, capsys):
    clay(CLAY.replace(old, new))
    assert main(["models", "list", "--dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"models/clay.toml{where}\n" in said.replace("\\", "/")
    assert all(word in said for word in words), said
    assert "  do:    " in said
