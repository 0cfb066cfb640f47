"""`check` lists everything that is wrong at once, without a GPU and without torch."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import published
import pytest
from helpers import clip_bytes, image_bytes, require_rights, write_tree
from safetensors.torch import load_file, save_file
from shells.bundles import bundle, steps
from tiny_weights import write_tiny_wan

from wangen import profiles
from wangen.generator import scripts
from wangen.generator.cache_sizes import HEADER_BYTES, latent_bytes
from wangen.generator.check import examine, run
from wangen.generator.cli import main
from wangen.generator.steps import Check, Train
from wangen.generator.tomls import read_dataset

VECTORS = Path(__file__).parent / "vectors"


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """Tiny weights in the original formats; tests must not change them."""
    return write_tiny_wan(tmp_path_factory.mktemp("models"), ["a cat"])


@pytest.fixture(scope="session")
def clip(tmp_path_factory):
    return clip_bytes(tmp_path_factory.mktemp("clip"), num_frames=24)


@pytest.fixture
def good(tmp_path, clip, weights):
    """Options of a check that finds nothing."""
    config = """
[general]
resolution = [64, 64]
[[datasets]]
image_directory = "{0}/media"
cache_directory = "{0}/cache"
[[datasets]]
video_directory = "{0}/media"
cache_directory = "{0}/cache"
target_frames = [17]
"""
    tree = {
        "d.toml": config.format(tmp_path.as_posix()),
        "media/a.jpg": image_bytes(),
        "media/a.txt": "an ape",
        "media/b.mp4": clip,
        "media/b.txt": "a bee",
    }
    folder = write_tree(tmp_path, tree)
    return Check(dataset_config=folder / "d.toml", task="t2v-1.3B", output_dir=folder / "out", **weights)


def check(options: Check) -> tuple[int, dict[str, object]]:
    """Exit code through the command line, and the report."""
    code = main(options.argv())
    folder = options.output_dir or options.dataset_config.parent
    return code, json.loads((folder / "check.report.json").read_text(encoding="utf-8"))


def changed(options: Check, **values: object) -> Check:
    return replace(options, **values)  # type: ignore[arg-type]


def problems(options: Check) -> list[str]:
    report = run(options)
    assert report.ok == (not report.result["problems"])
    return list(report.result["problems"])


def test_nothing_wrong(good):
    code, report = check(good)
    assert (code, report["ok"], report["result"]) == (0, True, {"problems": []})
    assert report["counts"] == {"images": 1, "clips": 1, "problems": 0}
    assert "all good: 1 image and 1 clip with" in str(report["summary"])


def test_everything_wrong_at_once(good, tmp_path, capsys):
    write_tree(
        tmp_path / "media",
        {
            "uncaptioned.png": image_bytes(format="PNG"),
            "empty.jpg": image_bytes(),
            "empty.txt": "",
            "cut.jpg": image_bytes((200, 200))[:1000],
            "cut.txt": "x",
            "text.mp4": "no clip",
            "text.txt": "x",
            "short.mp4": clip_bytes(tmp_path, num_frames=9),
            "short.txt": "x",
            **({} if os.name == "nt" else {"a:b.jpg": image_bytes(), "a:b.txt": "x"}),
        },
    )
    shutil.copy(good.t5, tmp_path / "lonely.pth")
    code, report = check(changed(good, vae=good.dit, dit=tmp_path / "none.safetensors", t5=tmp_path / "lonely.pth"))
    shown = capsys.readouterr().err
    assert (code, report["ok"]) == (1, False)
    expected = [
        ("uncaptioned.png", "has no caption"),
        ("empty.txt", "is empty"),
        ("cut.jpg", "cannot be read as an image"),
        ("text.mp4", "cannot be read as a video"),
        ("short.mp4", "has 9 frames at 16 fps, 17 are needed"),
        ("none.safetensors", "no such weight file; put it there (from https:"),
        (good.dit.name, "--vae: this is a Wan text-to-video transformer"),
        ("", "no umT5 tokenizer here"),
    ]
    if os.name != "nt":
        expected.append(("a:b.jpg", "Windows cannot hold this name"))
    found = [str(problem) for problem in report["result"]["problems"]]  # type: ignore[index]
    for name, fact in expected:
        assert [name in problem and fact in problem for problem in found].count(True) == 1, (name, fact, found)
        assert fact in shown
    assert len(found) == len(expected)
    assert report["counts"]["problems"] == len(expected)  # type: ignore[index]


def test_weights_of_the_wrong_kind_name_the_flag_they_belong_to(good):
    (found,) = problems(changed(good, vae=good.dit))
    assert "--vae of t2v-1.3B takes a Wan 2.1 VAE" in found
    assert "this file belongs to --dit" in found
    found = problems(changed(good, vae=good.t5, t5=good.vae, dit=good.vae))
    assert [problem.count("this file belongs to --") for problem in found] == [1, 1, 1]


def test_weights_of_another_task_name_it(good, tmp_path):
    paths = {
        "dit": VECTORS / "dit_i2v21" / "model.safetensors",
        "vae": VECTORS / "vae22" / "Wan2.2_VAE.pth",
        "clip": VECTORS / "clip" / "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
    }
    vae, clip, dit = problems(changed(good, **paths))
    assert "--vae of t2v-1.3B takes a Wan 2.1 VAE; give a Wan 2.1 VAE; this file is for --task ti2v-5B" in vae
    assert "--clip: t2v-1.3B has no such weights; leave --clip out" in clip
    assert "this is a Wan 2.1 image-to-video transformer" in dit
    assert "this file is for --task flf2v-14B, i2v-14B" not in dit
    assert "this file is for --task i2v-14B" in dit
    assert problems(changed(good, task="i2v-14B", **(paths | {"vae": good.vae}))) == []
    real = published.write_sparse(tmp_path / "a.safetensors", published.TRANSFORMERS["t2v-1.3B"])
    (size,) = problems(changed(good, task="t2v-14B", dit=real))
    assert "this file is for --task t2v-1.3B" in size


def test_how_to_get_a_file_depends_on_whose_name_it_is(good, tmp_path):
    (known,) = problems(changed(good, vae=tmp_path / "vae/wan_2.1_vae.safetensors"))
    assert "with: wangen models download t2v-1.3B" in known
    assert "where wangen.toml names the file, under that name alone" in known
    first = ", ".join(profiles.model("t2v-1.3B").weights[0].files[:3])
    assert f"under one of its names: {first} … (all: wangen models list) (where" in known
    (own,) = problems(changed(good, vae=tmp_path / "my vae.pth"))
    assert "put it there" in own
    assert "mend its name in wangen.toml and publish again" in own
    assert "wangen models download" not in own


def test_two_experts(good, tmp_path, caplog):
    both = changed(good, task="t2v-A14B", dit_high_noise=Path(shutil.copy(good.dit, tmp_path / "copy.safetensors")))
    (found,) = problems(both)
    assert f"--dit_high_noise: the same weights as {good.dit}, given to both experts" in found
    other = write_tiny_wan(tmp_path / "other", ["a cat"], seed=1)["dit"]
    assert problems(changed(both, dit_high_noise=other)) == []
    swapped = {
        "dit": Path(shutil.copy(other, tmp_path / "high_noise.safetensors")),
        "dit_high_noise": Path(shutil.copy(good.dit, tmp_path / "low_noise.safetensors")),
    }
    with caplog.at_level("WARNING", logger="wangen"):
        assert problems(changed(both, **swapped)) == []
    assert "are they swapped?" in caplog.text


def test_of_two_experts_the_missing_one_is_named(good, tmp_path):
    both = changed(good, task="t2v-A14B", dit_high_noise=tmp_path / "wan2.2_t2v_high_noise_14B_fp16.safetensors")
    (found,) = problems(both)
    assert "--dit_high_noise (the high-noise expert): no such weight file" in found
    assert "wangen models download t2v-A14B" in found
    (found,) = problems(changed(both, dit=tmp_path / "no.safetensors", dit_high_noise=good.dit))
    assert "--dit (the low-noise expert): no such weight file" in found


@pytest.mark.parametrize(("experts", "missing"), [("high", []), ("low", ["dit"]), ("both", ["dit"])])
def test_of_the_expert_that_a_script_does_not_train_no_weights_are_asked_for(
    good, tmp_path, monkeypatch, experts, missing
):
    """As its knob EXPERTS says, whatever the script was published with."""
    high = tmp_path / "high_noise.safetensors"
    save_file({name: 0.5 * value for name, value in load_file(good.dit).items()}, high)
    both = changed(good, task="t2v-A14B", dit=tmp_path / "no.safetensors", dit_high_noise=high)
    training = Train(dataset_config=good.dataset_config, task="t2v-A14B", dit=both.dit, dit_high_noise=high,
                     output_dir=tmp_path / "out", output_name="cats", experts=experts)  # fmt: skip
    script = tmp_path / "train_cats.sh"
    script.write_bytes(scripts.render(bundle("sh", (both, training)), "sh", "train"))
    monkeypatch.setenv("WANGEN_SCRIPT", str(script))
    assert [f"--{flag} (" in found for flag, found in zip(missing, problems(both), strict=True)] == [True] * len(
        missing
    )


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"<!DOCTYPE html>"])
def test_weights_that_are_none(good, tmp_path, content):
    (tmp_path / "bad.safetensors").write_bytes(content)
    (found,) = problems(changed(good, dit=tmp_path / "bad.safetensors"))
    assert found.startswith(f"{tmp_path / 'bad.safetensors'}: --dit: ")


def test_a_tokenizer_that_is_given(good, tmp_path):
    shutil.copy(good.t5, tmp_path / "t5.pth")
    alone = changed(good, t5=tmp_path / "t5.pth")
    assert len(problems(alone)) == 1
    assert problems(changed(alone, tokenizer=good.t5.parent / "google" / "umt5-xxl")) == []
    (missing,) = problems(changed(good, tokenizer=good.t5.parent / "typo.json"))
    assert "--tokenizer: no such file or folder" in missing


def test_flags_left_out_are_not_checked(good):
    assert problems(changed(good, vae=None, t5=None, dit=None, output_dir=None)) == []


def test_cache_and_media_in_one_folder(good, tmp_path):
    config = tmp_path / "one.toml"
    config.write_text(f'[[datasets]]\nimage_directory = "{(tmp_path / "media").as_posix()}"\n')
    (found,) = problems(changed(good, dataset_config=config))
    assert "cache and media share one folder" in found


@pytest.mark.parametrize("media", ["gone", "d.toml"])
def test_a_media_folder_that_is_none(good, tmp_path, media):
    good.dataset_config.write_text(good.dataset_config.read_text().replace('/media"', f'/{media}"'))
    (found,) = problems(good)
    assert found.startswith(f"{tmp_path / media}: cannot list the folder")
    assert "publish the dataset again" in found


def test_an_empty_media_folder(good, tmp_path):
    shutil.rmtree(tmp_path / "media")
    (tmp_path / "media").mkdir()
    assert [problem.split(";")[0] for problem in problems(good)] == [
        f"{tmp_path / 'media'}: holds no image files",
        f"{tmp_path / 'media'}: holds no video files",
    ]


def test_folders_that_are_files(good, tmp_path):
    write_tree(tmp_path, {"cache": "x", "file": "x"})
    found = problems(changed(good, output_dir=tmp_path / "file" / "out"))
    assert len(found) == 2
    assert f"the cache folder cannot be made: {tmp_path / 'cache'} is a file" in found[0]
    assert f"the output folder cannot be made: {tmp_path / 'file'} is a file" in found[1]


def test_folders_without_rights(good, tmp_path):
    require_rights(tmp_path)
    for name in ("cache", "out"):
        (tmp_path / name).mkdir(mode=0o500)
    assert [problem.count("cannot be written") for problem in problems(good)] == [1, 1]


@pytest.mark.skipif(not os.access("/proc/version", os.R_OK), reason="needs a folder that nobody can write")
def test_a_read_only_file_system_is_reported_not_raised(good):
    """/proc lets root pass `access` and then refuses: the report cannot be written, which is one message."""
    assert main(changed(good, output_dir=Path("/proc/none")).argv()) == 1


@pytest.fixture
def small_disk(monkeypatch):
    """A disk with 4 KB free, by word of the system: a real one would need the rights to mount it."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9 - 4000, 4000))


def test_a_disk_with_too_little_room(good, tmp_path, small_disk):
    (found,) = problems(good)
    assert "GB free, the cache needs about" in found
    assert found.startswith(str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["x.safetensors", "packs/x.tar"])
def test_what_is_in_the_cache_already_needs_no_room(good, tmp_path, small_disk, name):
    (tmp_path / "cache" / "packs").mkdir(parents=True)
    with (tmp_path / "cache" / name).open("wb") as file:
        file.truncate(2**30)  # sparse
    assert problems(good) == []


@pytest.mark.parametrize(
    ("text", "code", "words"), [("[[datasets", 2, "not valid TOML"), (None, 1, "cannot read the TOML file")]
)
def test_a_toml_that_cannot_be_read(good, capsys, text, code, words):
    if text is None:
        good.dataset_config.unlink()
    else:
        good.dataset_config.write_text(text)
    assert main(good.argv()) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"'bf16'", b"'fp16'", "train: --mixed_precision fp16: use bf16"),
        (b"'0.0001'", b"'0,0001'", "train: --learning_rate takes a number, got '0,0001'"),
        (b"VALIDATION_ITEMS='0'", b"VALIDATION_ITEMS='99'", "train: --validation_items 99 leaves nothing of"),
        (b"NETWORK_DIM='16'", b"NETWORK_DIM='0'", "train: --network_dim must be above 0"),
        (b"SEED='42'\n", b"", "the knob SEED is not set; write it into the block"),
        (b"'42'", b"'4 2'", "no knob is set by \"SEED='4 2'\""),
        (b"--dit", b"--did", "train: train has no flag --did; did you mean --dit?"),
        (b"'eps=1e-6'", b"'eps'", "train: --optimizer_args takes key=value, got 'eps'"),
    ],
)
def test_what_a_later_step_of_the_script_would_refuse(good, tmp_path, monkeypatch, old, new, words):
    data = scripts.render(bundle("sh", steps("eps=1e-6")), "sh", "train")
    script = tmp_path / "train_red_house.sh"
    script.write_bytes(data)
    write_tree(tmp_path, {"cache/an.entry": ""})  # else training's weights would be looked at
    monkeypatch.setenv("WANGEN_SCRIPT", str(script))
    assert problems(good) == []
    script.write_bytes(data.replace(old, new))
    (problem,) = problems(good)
    assert f"train_red_house.sh{'' if 'knob' in words else ', '}" in problem
    assert words in problem


def test_a_script_that_only_its_shell_can_read(good, tmp_path, monkeypatch):
    script = tmp_path / "train.sh"
    script.write_bytes(scripts.render(bundle("sh"), "sh", "train").replace(b"--dit", b'--dit "$(pwd)"/x #'))
    monkeypatch.setenv("WANGEN_SCRIPT", str(script))
    assert problems(good) == []


def test_torch_is_not_imported(good):
    code = "import sys; from wangen.generator.cli import main; code = main(sys.argv[1:]); "
    code += "print(code, sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, *good.argv()], capture_output=True, text=True, check=True)
    assert done.stdout == "0 []\n"
    assert "all good" in done.stderr


def test_what_a_later_step_reads_has_to_be_there(good, tmp_path):
    (tmp_path / "run").mkdir()
    assert problems(changed(good, reads=(tmp_path / "run", good.vae))) == []
    (found,) = problems(changed(good, reads=(tmp_path / "run", tmp_path / "start.safetensors")))
    assert found.startswith(f"{tmp_path / 'start.safetensors'}: a later step reads it, and it is not there")


def test_a_text_that_many_items_share_needs_room_once(good, tmp_path):
    """As the step that encodes makes it; the empty prompt too."""
    entries = read_dataset(good.dataset, "all")
    before = examine(good, entries).to_cache
    for number in range(5):
        shutil.copy(tmp_path / "media" / "a.jpg", tmp_path / "media" / f"more{number}.jpg")
        shutil.copy(tmp_path / "media" / "a.txt", tmp_path / "media" / f"more{number}.txt")
    after = examine(good, entries).to_cache
    (folder,) = before
    added = after[folder] - before[folder]
    own = latent_bytes(profiles.model(good.task), (64, 64), 1, "float32")
    assert added == 5 * (own + HEADER_BYTES)
