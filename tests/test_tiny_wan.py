"""The tiny Wan of the examples: its files are small and as written down, and it shows what captions say."""

import hashlib
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wangen import examples
from wangen.generator import kinds
from wangen.generator.steps import Generate
from wangen.runtime import generate
from wangen.runtime.models import wan
from wangen.runtime.moving_shapes import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    SHAPES,
    caption_of,
    draw,
    look,
    nearest_colour,
    random_scene,
    read_clip,
)

HOME = Path(examples.__file__).parent / "tiny-wan"
DIT = HOME / "wan2.1_t2v_1.3B_bf16.safetensors"
VAE = HOME / "Wan2.1_VAE.pth"
T5 = HOME / "models_t5_umt5-xxl-enc-bf16.pth"


def test_the_files_are_those_written_down_and_weigh_at_most_10_mb():
    lines = (HOME / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    files = {path.relative_to(HOME).as_posix(): path for path in HOME.rglob("*") if path.is_file()}
    assert files.keys() - sums.keys() == {"SHA256SUMS", "README.md"}
    for name, digest in sums.items():
        assert hashlib.sha256(files[name].read_bytes()).hexdigest() == digest, name
    assert sum(path.stat().st_size for path in files.values()) <= 10_000_000


def test_the_files_are_what_their_names_say():
    assert kinds.kind_of(DIT) == "wan-transformer-t2v"
    assert kinds.kind_of(VAE) == "wan-vae-2.1"
    assert kinds.kind_of(T5) == "umt5-encoder"


def drawn_clips() -> torch.Tensor:
    scenes = [
        random_scene(shape, COLOURS[colour], BACKGROUNDS["grey"], motion, torch.Generator().manual_seed(number))
        for number, (shape, colour, motion) in enumerate(zip(SHAPES, COLOURS, MOTIONS, strict=False))
    ]
    return draw(scenes, 17, (64, 64))[0]


def test_the_vae_gives_clips_back_through_latents_of_the_usual_scale():
    clips = drawn_clips()
    vae = wan.load_vae(VAE, dtype=torch.float32)
    latents = wan.encode_video(vae, clips)
    assert latents.mean().abs() < 0.3
    assert 0.6 < latents.std() < 1.5
    error = wan.decode_latents(vae, latents) - (clips.float() / 127.5 - 1)
    assert 10 * math.log10(4 / error.square().mean().item()) > 25  # decibel


@pytest.fixture(scope="module")
def models() -> SimpleNamespace:
    return SimpleNamespace(
        transformer=wan.load_transformer(DIT, dtype=torch.float32),
        vae=wan.load_vae(VAE, dtype=torch.float32),
        prompts=wan.load_prompt_encoder(T5, None, dtype=torch.float32, device="cpu", fp8=False, plain=True),
    )


def options(prompt: str, path: Path, **changes) -> Generate:
    given = {
        "task": "t2v-1.3B",
        "dit": DIT,
        "vae": VAE,
        "t5": T5,
        "prompt": prompt,
        "video_size": (64, 64),
        "video_length": 17,
        "infer_steps": 20,
        "guidance_scale": 3.0,
        "save_path": path,
        "device": "cpu",
    }
    return Generate(**given | changes)


def seen(models: SimpleNamespace, prompt: str, **changes):
    texts = models.prompts.encode([prompt, ""])
    latents = wan.sample_latents(models.transformer, models.vae, options(prompt, Path("a.mp4"), **changes), texts)
    (video,) = wan.decode_latents(models.vae, latents)
    return look(((video + 1) * 127.5).round().clamp(0, 255).to(torch.uint8))


@pytest.mark.parametrize("solver", ["unipc", "euler"])
def test_generated_shapes_have_the_colour_of_the_caption(models, solver):
    right = []
    for number, colour in enumerate(COLOURS):
        background = ("black", "white", "grey")[number % 3]
        caption = caption_of(SHAPES[number % 3], colour, background, list(MOTIONS)[number % 5])
        found = seen(models, caption, seed=number, sample_solver=solver)
        right.append(nearest_colour(found.colour, COLOURS) == colour)
        assert nearest_colour(found.background, BACKGROUNDS) == background, caption
    assert sum(right) >= len(right) - 1, right


def test_generated_shapes_move_where_the_caption_says(models):
    for motion, (right, down) in MOTIONS.items():
        paths = [seen(models, caption_of("circle", "red", "black", motion), seed=seed).path for seed in range(2)]
        moved = torch.stack([path[-1] - path[0] for path in paths]).mean(dim=0)
        assert (moved - 0.35 * torch.tensor([right, down])).norm() < 0.2, (motion, moved)


def test_the_generate_step_writes_what_the_caption_says(tmp_path):
    generate.run(options(caption_of("square", "blue", "white", "moves up"), tmp_path / "clip.mp4", seed=3))
    found = look(read_clip(tmp_path / "clip.mp4"))
    assert nearest_colour(found.colour, COLOURS) == "blue"
    assert nearest_colour(found.background, BACKGROUNDS) == "white"
