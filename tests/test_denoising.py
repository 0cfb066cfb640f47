"""Sampling equals diffusers' own pipelines: one transformer and two experts, with and without a first frame."""

from functools import partial
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
)
from helpers import every
from parity import DITS, VAE21, VAE22, golden, max_abs

from wangen import profiles
from wangen.runtime.denoising import Given, Stage, denoise, flow_scheduler, initial_noise
from wangen.runtime.models import family
from wangen.runtime.models.wan_vae import encode_video

WAN = family(profiles.model("t2v-14B"))
STEPS, SHIFT, GUIDANCE, GUIDANCE_HIGH, BOUNDARY = 4, 5.0, 3.0, 4.0, 0.875


def texts() -> list[torch.Tensor]:
    found = golden("dit_t2v21")
    return [found[key] for key in sorted(found) if ".context." in key][:2]


def padded(text: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(text, (0, 0, 0, 512 - len(text)))[None]


def load(name: str, scale: float = 1.0) -> torch.nn.Module:
    model = WAN.load_transformer(DITS[name], dtype=torch.float32)
    with torch.no_grad():
        model.proj_out.weight.mul_(scale)
    return model


class OfficialSteps(FlowMatchEulerDiscreteScheduler):
    """The library's Euler at the noise levels of `get_sampling_sigmas`, in Wan's own code."""

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        sigmas = [1 - step / num_inference_steps for step in range(num_inference_steps)]
        super().set_timesteps(sigmas=sigmas, device=device)


def theirs(solver: str) -> Any:
    if solver == "euler":
        return OfficialSteps(shift=SHIFT)
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=SHIFT
    )


def ask(pipeline: Any, noise: torch.Tensor, size: tuple[int, int], frames: int, **more: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    prompt, negative = texts()
    return pipeline(
        prompt_embeds=padded(prompt), negative_prompt_embeds=padded(negative), height=size[0], width=size[1],
        num_frames=frames, num_inference_steps=STEPS, latents=noise.clone(), output_type="latent", **more,
    ).frames  # fmt: skip


def stages(low: torch.nn.Module, high: torch.nn.Module | None = None) -> list[Stage]:
    only = Stage(partial(WAN.predict_velocity, low), GUIDANCE)
    if high is None:
        return [only]
    return [Stage(partial(WAN.predict_velocity, high), GUIDANCE_HIGH, 1000 * BOUNDARY), only]


@pytest.mark.parametrize("solver", every(2, ["unipc", "euler"], pytest.mark.slow))
def test_text_to_video_is_that_of_the_library_with_one_transformer_and_with_two(solver):
    low, high = load("dit_t2v21"), load("dit_t2v21", 0.5)
    vae = WAN.load_vae(VAE21)
    noise = initial_noise((1, 16, 2, 8, 8), 3)
    one = WanPipeline(tokenizer=None, text_encoder=None, vae=vae, scheduler=theirs(solver), transformer=low)
    two = WanPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=theirs(solver), transformer=high, transformer_2=low,
        boundary_ratio=BOUNDARY,
    )  # fmt: skip
    ours_one = denoise(stages(low), noise, flow_scheduler(solver, SHIFT), STEPS, texts())
    ours_two = denoise(stages(low, high), noise, flow_scheduler(solver, SHIFT), STEPS, texts())
    assert torch.equal(ours_one, ask(one, noise, (64, 64), 5, guidance_scale=GUIDANCE))
    expected = ask(two, noise, (64, 64), 5, guidance_scale=GUIDANCE_HIGH, guidance_scale_2=GUIDANCE)
    assert torch.equal(ours_two, expected)
    assert max_abs(ours_one, ours_two) > 1e-3


@pytest.mark.parametrize(("steps", "shift"), [(20, 5.0), (4, 3.0), (1, 12.0)])
def test_euler_is_shifted_once(steps, shift):
    scheduler = flow_scheduler("euler", shift)
    scheduler.set_timesteps(steps)
    even = [1 - step / steps for step in range(steps)]
    sigmas = torch.tensor([shift * sigma / (1 + (shift - 1) * sigma) for sigma in even])
    assert torch.allclose(scheduler.sigmas, torch.cat([sigmas, torch.zeros(1)]), atol=1e-6)
    assert torch.allclose(scheduler.timesteps, 1000 * sigmas, atol=1e-3)


def condition_of(vae: AutoencoderKLWan, image: torch.Tensor, frames: int) -> torch.Tensor:
    video = torch.cat([image[:, :, None], image.new_zeros(1, 3, frames - 1, *image.shape[2:])], dim=2)
    latents = encode_video(vae, video)
    mask = torch.zeros(1, 4, *latents.shape[2:])
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dit_i2v21", "dit_i2v22_a14b"])
def test_image_to_video_is_that_of_the_library(name):
    low, high = load(name), load(name, 0.5) if name == "dit_i2v22_a14b" else None
    vae = WAN.load_vae(VAE21)
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    noise = initial_noise((1, 16, 2, 8, 8), 3)
    tokens = golden("dit_i2v21")["case0.clip_fea"][:1] if name == "dit_i2v21" else None
    experts = {"transformer": high, "transformer_2": low, "boundary_ratio": BOUNDARY} if high else {"transformer": low}
    pipeline = WanImageToVideoPipeline(tokenizer=None, text_encoder=None, vae=vae, scheduler=theirs("unipc"), **experts)
    more = {"guidance_scale_2": GUIDANCE, "guidance_scale": GUIDANCE_HIGH} if high else {"guidance_scale": GUIDANCE}
    pipeline.encode_image = lambda _image, _device: tokens  # it refuses ready tokens beside an image
    expected = ask(pipeline, noise, (64, 64), 5, image=image, **more)
    given = Given(condition=condition_of(vae, 2 * image - 1, 5), image_tokens=tokens)
    ours = denoise(stages(low, high), noise, flow_scheduler("unipc", SHIFT), STEPS, texts(), given=given)
    assert max_abs(ours, expected) < 2e-4
    assert max_abs(denoise(stages(low, high), noise, flow_scheduler("unipc", SHIFT), STEPS, texts(), given=Given(
        condition=condition_of(vae, 1 - 2 * image, 5), image_tokens=tokens)), expected) > 1e-2  # fmt: skip


def test_the_5b_keeps_its_clean_first_frame_as_the_library_does():
    model, vae = load("dit_ti2v5b"), WAN.load_vae(VAE22)
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    noise = initial_noise((1, 48, 2, 4, 4), 3)
    pipeline = WanImageToVideoPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=theirs("unipc"), transformer=model, expand_timesteps=True
    )
    expected = ask(pipeline, noise, (64, 64), 5, image=image, guidance_scale=GUIDANCE)
    clean = encode_video(vae, (2 * image - 1)[:, :, None])
    ours = denoise(
        stages(model), noise, flow_scheduler("unipc", SHIFT), STEPS, texts(), given=Given(clean=clean),
        per_token=WAN.timesteps_per_token,
    )  # fmt: skip
    assert max_abs(ours, expected) < 2e-4
    assert torch.equal(ours[:, :, :1], clean)


def test_without_guidance_the_negative_prompt_is_not_asked_and_each_expert_enters_once():
    entered, asked = [], []

    def velocity(name: str, latents: torch.Tensor, *_rest: Any, **_more: Any) -> torch.Tensor:
        asked.append(name)
        return latents

    parts = [
        Stage(partial(velocity, "high"), 1.0, 900.0, lambda: entered.append("high")),
        Stage(partial(velocity, "low"), 2.0, 0.0, lambda: entered.append("low")),
    ]
    done: list[int] = []
    result = denoise(
        parts, initial_noise((1, 1, 1, 2, 2), 1), flow_scheduler("euler", SHIFT), 4, texts(), on_step=done.append
    )
    timesteps = flow_scheduler("euler", SHIFT)
    timesteps.set_timesteps(4)
    num_high = sum(timestep >= 900 for timestep in timesteps.timesteps.tolist())
    assert entered == ["high", "low"]
    assert asked == ["high"] * num_high + ["low", "low"] * (4 - num_high)
    assert done == [1, 2, 3, 4]
    assert result.dtype == torch.float32


def test_noise_is_torchs_own_of_the_seed_and_leaves_the_global_state_alone():
    before = torch.get_rng_state()
    noise = initial_noise((1, 16, 2, 4, 4), 123)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(123)  # what ComfyUI does
        assert torch.equal(noise, torch.randn(1, 16, 2, 4, 4))


def test_the_high_noise_expert_works_at_the_boundary_itself():
    asked: list[str] = []

    def velocity(name: str, latents: torch.Tensor, *_rest: Any, **_more: Any) -> torch.Tensor:
        asked.append(name)
        return latents

    scheduler = flow_scheduler("euler", 1.0)  # 1000, 750, 500, 250
    parts = [Stage(partial(velocity, "high"), 1.0, 750.0), Stage(partial(velocity, "low"), 1.0)]
    denoise(parts, initial_noise((1, 1, 1, 2, 2), 1), scheduler, 4, texts())
    assert scheduler.timesteps.tolist() == [1000, 750, 500, 250]
    assert asked == ["high", "high", "low", "low"]


@pytest.mark.parametrize("guides", [True, False])
def test_frames_that_guide_are_noised_for_the_negative_prompt(guides: bool):
    """As dropout of the condition trains it: there the first frame is noise like the others, at their timestep."""
    asked: list[tuple[torch.Tensor, torch.Tensor]] = []

    def velocity(latents: torch.Tensor, timesteps: torch.Tensor, *_rest: Any, **_more: Any) -> torch.Tensor:
        asked.append((latents.clone(), timesteps))
        return torch.zeros_like(latents)

    noise, clean = initial_noise((1, 4, 2, 2, 2), 1), torch.full((1, 4, 1, 2, 2), 3.0)
    denoise(
        [Stage(velocity, 2.0)], noise, flow_scheduler("euler", 1.0), 2, texts(),
        given=Given(clean=clean, guides=guides),
        per_token=WAN.timesteps_per_token,
    )  # fmt: skip
    for sigma, (prompted, negative) in zip((1.0, 0.5), (asked[:2], asked[2:]), strict=True):
        assert torch.equal(prompted[0][:, :, :1], clean)
        assert prompted[1].tolist() == [[0.0, 1000 * sigma]]
        first = sigma * noise[:, :, :1] + (1 - sigma) * clean if guides else clean
        assert max_abs(negative[0][:, :, :1], first) < 1e-6
        assert negative[1].tolist() == ([1000 * sigma] if guides else [[0.0, 1000 * sigma]])
