"""`--from`: a file repeats itself byte by byte, and says when it is given other weights than it was made with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_family import TinyTask, tiny_task

from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import Generate
from wangen.runtime import generate, train
from wangen.runtime.sampling.output import read_settings


@pytest.fixture(scope="module")
def loras(tiny_run, tmp_path_factory) -> tuple[Path, Path]:
    files = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp("lora")
        train.run(tiny_run.options(folder, max_train_steps=2, learning_rate=1e-2, seed=seed))
        files.append(folder / "lora.safetensors")
    return files[0], files[1]


def made(tiny: TinyTask, path: Path, **changes: Any) -> Generate:
    """Make a file with settings that are nobody's default."""
    options = Generate(
        **tiny.weights, task=tiny.task, prompt="a red square", negative_prompt="a blue wall", seed=7, infer_steps=3,
        video_size=(64, 64), video_length=5, guidance_scale=2.5, flow_shift=4.0, fps=9, image_path=tiny.image,
        save_path=path, device="cpu",
    )  # fmt: skip
    options = replace(options, **changes)
    generate.run(options)
    return options


def again(tiny: TinyTask, source: Path, path: Path, **changes: Any) -> Generate:
    """What a user types: the file, the weights, and where the copy goes."""
    options = Generate(**tiny.weights, repeat=source, image_path=tiny.image, save_path=path, device="cpu")
    return replace(options, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["t2v-1.3B", "i2v-14B", "t2v-A14B"])
def test_a_file_repeats_itself_byte_by_byte(tiny_run, loras, tmp_path, task):
    tiny = tiny_task(task, tiny_run, tmp_path / "weights")
    first, second = tmp_path / "a.mp4", tmp_path / "b.mp4"
    changes, given = {}, {}
    if task == "t2v-1.3B":
        changes = {"sample_solver": "euler", "quantize": "int8", "t5_dtype": "bfloat16"}
    if task == "t2v-A14B":
        given = {"lora_weight": loras, "lora_weight_high_noise": loras[1:]}
        changes = {**given, "lora_multiplier": (0.7, 1.1), "guidance_scale_high_noise": 1.5, "timestep_boundary": 0.8}
    made(tiny, first, **changes)
    generate.run(again(tiny, first, second, **given))
    assert second.read_bytes() == first.read_bytes()
    told = read_settings(first, "--from")
    assert (told["task"], told["fps"], told["guidance_scale"], told["seed"]) == (task, 9, 2.5, 7)
    assert str(tmp_path) not in str(told)


@pytest.fixture
def picture(tiny_run, loras, tmp_path) -> tuple[TinyTask, Path]:
    tiny = tiny_task("t2v-1.3B", tiny_run, tmp_path / "weights")
    made(tiny, tmp_path / "a.png", video_length=1, lora_weight=loras[:1], lora_multiplier=(0.5,))
    return tiny, tmp_path / "a.png"


def test_the_command_line_wins_over_the_file(picture, loras, tmp_path):
    tiny, source = picture
    copy = tmp_path / "b.png"
    generate.run(again(tiny, source, copy, lora_weight=loras[:1], seed=8, lora_multiplier=(0.25,)))
    told, before = (read_settings(path, "--from") for path in (copy, source))
    assert (told.pop("seed"), told.pop("lora_multiplier")) == (8, [0.25])
    assert (before.pop("seed"), before.pop("lora_multiplier")) == (7, [0.5])
    assert told == before


def test_other_weights_are_named_with_both_identities_and_taken_when_it_is_said(picture, loras, tmp_path, caplog):
    tiny, source = picture
    told = read_settings(source, "--from")
    options = again(tiny, source, tmp_path / "b.png", lora_weight=loras[1:])
    with pytest.raises(WangenError) as caught:
        generate.run(options)
    assert f"--lora_weight: {told['loras'][0][:16]} in the file, " in str(caught.value)
    with pytest.raises(WangenError, match="none given"):
        generate.run(again(tiny, source, tmp_path / "b.png"))
    assert not (tmp_path / "b.png").exists()
    generate.run(replace(options, changed=True))
    assert (tmp_path / "b.png").read_bytes() != source.read_bytes()
    assert read_settings(tmp_path / "b.png", "--from")["loras"] != told["loras"]
    assert "not as in the file: --lora_weight" in caplog.text


def test_another_first_frame_is_refused(tiny_run, tmp_path):
    tiny = tiny_task("ti2v-5B", tiny_run, tmp_path / "weights")
    made(tiny, tmp_path / "a.mp4", video_length=5, infer_steps=1)
    Image.new("RGB", (64, 64)).save(tmp_path / "black.png")
    with pytest.raises(WangenError, match=r"--image_path: [0-9a-f]{16} in the file, [0-9a-f]{16} given"):
        generate.run(again(tiny, tmp_path / "a.mp4", tmp_path / "b.mp4", image_path=tmp_path / "black.png"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (None, "holds no settings of wangen"),
        ("{", "holds no settings of wangen"),
        ('{"step": 3, "prompt": "a"}', "was made while a LoRA was trained"),
        ('{"weights": {}, "warp": 1}', "does not know the setting warp"),
        ('{"weights": {}, "seed": "x"}', "--seed takes a whole number"),
        ('{"weights": 3}', "the settings in this file are damaged"),
        ('{"weights": {"dit": 3}}', "the settings in this file are damaged"),
        ('{"weights": {}, "loras": "x"}', "the settings in this file are damaged"),
        ('{"weights": {}, "lora_multiplier": [[1]]}', "--lora_multiplier takes one value"),
    ],
)
def test_files_that_tell_nothing_are_refused(tiny_run, tmp_path, settings, words):
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    if settings is not None:
        info.add_itxt("wangen", settings)
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png", pnginfo=info)
    tiny = TinyTask("t2v-1.3B", tiny_run.weights, None)
    with pytest.raises(UsageError, match=words):
        generate.run(again(tiny, tmp_path / "a.png", tmp_path / "b.png"))


def test_a_file_that_is_none_is_refused(tiny_run, tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"no video")
    tiny = TinyTask("t2v-1.3B", tiny_run.weights, None)
    for name in ("a.mp4", "none.mp4", "none.png"):
        with pytest.raises(UsageError, match="--from cannot be read"):
            generate.run(again(tiny, tmp_path / name, tmp_path / "b.mp4"))


@pytest.mark.parametrize("link", [False, True])
def test_a_file_that_is_read_is_not_replaced(tiny_run, tmp_path, monkeypatch, link):
    tiny = tiny_task("i2v-14B", tiny_run, tmp_path / "weights")
    first, frame = tmp_path / "a.png", tmp_path / "frame.png"
    made(tiny, first, video_length=1)
    Image.new("RGB", (64, 64)).save(frame)
    before = first.read_bytes(), frame.read_bytes()
    monkeypatch.setattr(generate, "identities", lambda *_: pytest.fail("weights were read"))
    for flag, changes in (
        ("--from", {"save_path": first, "seed": 9}),
        ("--image_path", {"save_path": frame, "image_path": frame}),
    ):
        if link:
            changes["save_path"] = tmp_path / f"link{flag}.png"
            changes["save_path"].hardlink_to(first if flag == "--from" else frame)
        with pytest.raises(UsageError, match=f"--save_path is the file of {flag}, which would be replaced"):
            generate.run(again(tiny, first, tmp_path, **changes))
    assert (first.read_bytes(), frame.read_bytes()) == before
