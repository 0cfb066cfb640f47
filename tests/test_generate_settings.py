"""What decides the pixels of a video, as its file holds it: taken from flags, compared, and found again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_generate_resume import no_model, options_for

from wangen import profiles
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import Generate
from wangen.runtime import generate, train
from wangen.runtime.sampling import repeat
from wangen.runtime.sampling.options import prompts_of, resolved
from wangen.runtime.sampling.output import read_frames, read_settings
from wangen.runtime.sampling.resume import is_made

CPU = torch.device("cpu")
AGAIN = Generate(dit=Path("d"), vae=Path("v"), t5=Path("t"), save_path=Path("b.mp4"), repeat=Path("a.mp4"))
A, B, C = (letter * 64 for letter in "abc")


@pytest.fixture(scope="module")
def doras(tiny_run, tmp_path_factory) -> tuple[Path, ...]:
    folders = [tmp_path_factory.mktemp("dora") for _ in range(2)]
    for seed, folder in enumerate(folders):
        train.run(tiny_run.options(folder, max_train_steps=1, learning_rate=1e-2, seed=seed, dora=True))
    return tuple(folder / "lora.safetensors" for folder in folders)


def test_a_file_that_is_wider_than_high_is_found_again_by_its_size_and_kernel(tiny_run, tmp_path, monkeypatch):
    options = options_for(tiny_run, tmp_path, video_size=(48, 80), attention="sdpa")
    path = generate.run(options).result["file"]
    assert read_frames(path).shape[:3] == (1, 48, 80)
    no_model(monkeypatch)
    assert generate.run(options).counts["kept"] == 1
    settings = read_settings(path, "--from")
    assert is_made(path, settings | {"attention": "auto"})
    assert not is_made(path, settings | {"attention": "flash"}), "another kernel that was asked for"


def compared(told: dict, own: dict, **changes) -> list[str]:
    """The lines of `compare` on a file that differs in its pictures alone."""
    options = replace(AGAIN, **changes)
    found = {"weights": {}, "loras": [], "loras_high_noise": [], "device": "cpu", "versions": {}}
    try:
        repeat.compare(options, found | told, found, {"image": None} | own)
    except WangenError as error:
        return error.found.splitlines()[1:]
    return []


def test_of_several_control_images_the_one_that_is_another_is_named():
    both = {"controls": [A, B]}
    assert compared(both, both) == []
    assert compared(both, {"controls": [A, C]}) == [
        f"  - --control_image_path: {B[:16]} in the file, {C[:16]} given"]  # fmt: skip
    assert compared(both, {"controls": [A]}) == [f"  - --control_image_path: {B[:16]} in the file, none given"]
    assert compared(both, {"controls": [A, C]}, prompt_file=Path("p.txt")) == [], "the prompts have their own"
    assert compared({"image": A}, {"image": B}) == [f"  - --image_path: {A[:16]} in the file, {B[:16]} given"]
    assert compared({"image": A}, {"image": B}, prompt_file=Path("p.txt")) == []


@pytest.mark.parametrize(("now", "said"), [((0.5,), False), ((0.25,), True)])
def test_another_strength_than_in_the_file_is_said(caplog, now, said):
    assert compared({"lora_multiplier": [0.5]}, {"lora_multiplier": now}) == []
    assert ("not as in the file: --lora_multiplier [0.5], now [0.25]" in caplog.text) == said


def test_guidance_that_is_given_is_that_of_both_experts(tiny_run, monkeypatch):
    told = {"weights": {}, "guidance_scale": 3.0, "guidance_scale_high_noise": 4.0}
    monkeypatch.setattr(repeat, "read_settings", lambda *_: told)
    options, _ = repeat.filled(replace(AGAIN, guidance_scale=2.0))
    assert (options.guidance_scale, options.guidance_scale_high_noise) == (2.0, None)
    options, _ = repeat.filled(AGAIN)
    assert (options.guidance_scale, options.guidance_scale_high_noise) == (3.0, 4.0)
    model = profiles.model("t2v-A14B")
    options = options_for(tiny_run, Path("a.png"), task=model.name, dit_high_noise=tiny_run.weights["dit"],
                          guidance_scale=3.0, guidance_scale_high_noise=4.0)  # fmt: skip
    (prompt,) = prompts_of(resolved(options, model, CPU), model)
    assert (prompt.guidance, prompt.guidance_high_noise) == (3.0, 4.0)


def test_less_than_no_block_cannot_be_swapped(tiny_run, tmp_path):
    with pytest.raises(UsageError, match="blocks_to_swap"):
        generate.run(options_for(tiny_run, tmp_path, blocks_to_swap=-1))


def test_two_doras_are_no_sum_and_one_at_nothing_is_the_base(tiny_run, doras, tmp_path, caplog):
    words = "each of 2 DoRAs scales whole weights"
    generate.run(options_for(tiny_run, tmp_path / "one.png", lora_weight=doras, lora_multiplier=(1.0, 0.0)))
    assert words not in caplog.text
    options = options_for(tiny_run, tmp_path / "two.png", lora_weight=doras)
    generate.run(options)
    assert words in caplog.text
    for name, changes in (("base", {}), ("none", {"lora_weight": doras[:1], "lora_multiplier": (0.0,)})):
        generate.run(replace(options, **{"lora_weight": (), "save_path": tmp_path / f"{name}.png"} | changes))
    frames = {path.stem: read_frames(path) for path in tmp_path.glob("*.png")}
    assert (frames["none"] == frames["base"]).all()
    assert (frames["two"] != frames["one"]).any()
