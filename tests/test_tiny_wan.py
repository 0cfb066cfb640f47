"""The tiny Wan of the examples: its files are small and as written down, and it shows what captions say."""

import hashlib
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import nearest_colour

from wangen import examples, profiles
from wangen.generator import kinds
from wangen.generator.steps import Generate
from wangen.runtime import generate
from wangen.runtime.models import wan
from wangen.runtime.models.wan_vae import encode_video
from wangen.runtime.moving_shapes import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    SHAPES,
    caption_of,
    draw,
    look,
    random_scene,
    read_clip,
)
from wangen.runtime.sampling.options import prompts_of, resolved
from wangen.runtime.sampling.scenes import Scene
from wangen.runtime.sampling.videos import Expert, sample_latents

pytestmark = pytest.mark.slow

CPU, MODEL = torch.device("cpu"), profiles.model("t2v-1.3B")
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
    kinds.expect(DIT, "wan-transformer-t2v", "--dit")
    kinds.expect(VAE, "wan-vae-2.1", "--vae")
    kinds.expect(T5, "umt5-encoder", "--t5")


def drawn_clips() -> torch.Tensor:
    """A clip of every colour, of all shapes, backgrounds and motions."""
    scenes = []
    for number, colour in enumerate(COLOURS.values()):
        shape, background, motion = (
            SHAPES[number % 3],
            list(BACKGROUNDS.values())[number // 2],
            list(MOTIONS)[number % 5],
        )
        scenes.append(random_scene(shape, colour, background, motion, torch.Generator().manual_seed(number)))
    return draw(scenes, 17, (64, 64))[0]


def test_the_vae_gives_clips_back_through_latents_of_the_usual_scale():
    clips = drawn_clips()
    vae = wan.load_vae(VAE, dtype=torch.float32)
    latents = encode_video(vae, clips)
    assert latents.mean().abs() < 0.3
    assert 0.6 < latents.std() < 1.5
    error = wan.decode_latents(vae, latents) - (clips.float() / 127.5 - 1)
    assert 10 * math.log10(4 / error.square().mean().item()) > 25  # decibel


@pytest.fixture(scope="module")
def models() -> SimpleNamespace:
    return SimpleNamespace(
        transformer=wan.load_transformer(DIT, dtype=torch.float32),
        vae=wan.load_vae(VAE, dtype=torch.float32),
        prompts=wan.load_prompt_encoder(
            T5, None, dtype=torch.float32, device="cpu", fp8=False, plain=True, model=MODEL
        ),
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
    (asked,) = prompts_of(resolved(options(prompt, Path("a.mp4"), **changes), MODEL, CPU), MODEL)
    experts = [Expert(partial(wan.predict_velocity, models.transformer))]
    latents = sample_latents(wan, MODEL, experts, Scene(asked, texts), CPU, cure="")
    (video,) = wan.decode_latents(models.vae, latents)
    return look(((video + 1) * 127.5).round().clamp(0, 255).to(torch.uint8))


def sentences(number: int) -> tuple[str, str, str, str]:
    """Shape, colour, background and motion, so that all of each appear."""
    choices = (SHAPES, list(COLOURS), ("black", "white", "grey"), list(MOTIONS))
    shape, colour, background, motion = (words[number % len(words)] for words in choices)
    return shape, colour, background, motion


@pytest.mark.parametrize(("solver", "number"), [("unipc", 0), ("euler", 1)])
def test_a_generated_clip_shows_what_the_caption_says(models, solver, number):
    shape, colour, background, motion = sentences(number)
    found = seen(models, caption_of(shape, colour, background, motion), seed=number, sample_solver=solver)
    assert nearest_colour(found.colour, COLOURS) == colour
    assert nearest_colour(found.background, BACKGROUNDS) == background
    assert 0.03 < found.share < 0.3
    moved = found.path[-1] - found.path[0]
    assert (moved - 0.35 * torch.tensor(MOTIONS[motion])).norm() < 0.25, moved


def test_most_captions_come_true(models):
    """Thirty captions: nearly every colour, background and motion is right."""
    colours, backgrounds, motions = [], [], []
    for number in range(30):
        shape, colour, background, motion = sentences(number)
        found = seen(models, caption_of(shape, colour, background, motion), seed=100 + number)
        colours.append(nearest_colour(found.colour, COLOURS) == colour)
        backgrounds.append(nearest_colour(found.background, BACKGROUNDS) == background)
        moved = found.path[-1] - found.path[0]
        motions.append(bool((moved - 0.35 * torch.tensor(MOTIONS[motion])).norm() < 0.2))
    assert sum(colours) >= 27
    assert sum(backgrounds) >= 28
    assert sum(motions) >= 24


def test_the_generate_step_writes_what_the_caption_says(tmp_path):
    generate.run(options(caption_of("square", "blue", "white", "moves up"), tmp_path / "clip.mp4", seed=3))
    found = look(read_clip(tmp_path / "clip.mp4"))
    assert nearest_colour(found.colour, COLOURS) == "blue"
    assert nearest_colour(found.background, BACKGROUNDS) == "white"
