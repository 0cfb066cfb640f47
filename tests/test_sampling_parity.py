"""What is sampled here, from a prompt to pixels, is what diffusers' own pipelines make of the same weights and seed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
)
from parity import max_abs
from PIL import Image
from tiny_family import TinyTask, tiny_task
from transformers import PreTrainedTokenizerFast

from wangen import profiles
from wangen.generator.generate_step import Generate
from wangen.generator.sample_prompts import SamplePrompt
from wangen.runtime.models import family
from wangen.runtime.sampling.options import prompts_of
from wangen.runtime.sampling.sampler import ExpertWeights, Request, Sampler, Settings, make_videos
from wangen.runtime.sampling.scenes import Encoders, make_scenes
from wangen.runtime.sampling.videos import Decoder
from wangen.runtime.weights.text_encoder import load_text_encoder

CPU = torch.device("cpu")
PROMPT, NEGATIVE = "a red square", "a blue wall"
TOLERANCE = 2e-5
"""Of pixels in [0, 1], in float32: 0.005 of a step of 8 bits. Measured: 5e-6 with --plain, 7e-6 on the fast path."""


class OfficialSteps(FlowMatchEulerDiscreteScheduler):
    """The library's Euler at the noise levels of `get_sampling_sigmas`, in Wan's own code."""

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        sigmas = [1 - step / num_inference_steps for step in range(num_inference_steps)]
        super().set_timesteps(sigmas=sigmas, device=device)


def scheduler_of(prompt: SamplePrompt) -> Any:
    if prompt.sampler == "euler":
        return OfficialSteps(shift=prompt.shift)
    kind = UniPCMultistepScheduler if prompt.sampler == "unipc" else DPMSolverMultistepScheduler
    return kind(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=prompt.shift)


def prompt_for(tiny: TinyTask, **changes: Any) -> SamplePrompt:
    options = Generate(
        **tiny.weights, task=tiny.task, prompt=PROMPT, negative_prompt=NEGATIVE, seed=11, video_size=(64, 64),
        video_length=5, infer_steps=4, guidance_scale=3.0, image_path=tiny.image, save_path=Path("a.mp4"),
    )  # fmt: skip
    if "dit_high_noise" in tiny.weights:
        options = replace(options, guidance_scale_high_noise=4.0)
    (prompt,) = prompts_of(replace(options, **changes), profiles.model(tiny.task))
    return prompt


def ours(tiny: TinyTask, prompt: SamplePrompt, *, plain: bool) -> tuple[torch.Tensor, Any]:
    """Frames (T, 3, H, W) in [0, 1], and the scene they were made of."""
    model = profiles.model(tiny.task)
    kind = family(model)
    around = {name: path for name, path in tiny.weights.items() if not name.startswith("dit")}
    encoders = Encoders(**around, plain=plain)
    scenes = make_scenes(kind, model, [prompt], encoders, CPU, "the prompt")
    experts = [ExpertWeights(tiny.weights["dit"])]
    if model.experts:
        experts.append(ExpertWeights(tiny.weights["dit_high_noise"], high_noise=True))
    boundary = model.experts.boundary if model.experts else 0.0
    sampler = Sampler(kind, model, experts, Settings(dtype="float32", plain=plain, boundary=boundary), CPU)
    (video,) = make_videos([Request(scenes[0])], sampler, Decoder(kind, encoders, CPU, ""))
    return (video.frames.transpose(0, 1) + 1) / 2, scenes[0]


def theirs(tiny: TinyTask, prompt: SamplePrompt, scene: Any) -> torch.Tensor:
    """Frames (T, 3, H, W) in [0, 1] of the library's pipeline, from the same prompt, first frame and seed."""
    model = profiles.model(tiny.task)
    kind = family(model)
    load = {"dtype": torch.float32}
    low = kind.load_transformer(tiny.weights["dit"], **load)
    parts = {
        "tokenizer": PreTrainedTokenizerFast(
            tokenizer_file=str(tiny.weights["t5"].parent / "google" / "umt5-xxl" / "tokenizer.json"),
            pad_token="<pad>",
            eos_token="</s>",
            unk_token="<unk>",
        ),
        "text_encoder": load_text_encoder(tiny.weights["t5"], **load),
        "vae": kind.load_vae(tiny.weights["vae"], **load),
        "scheduler": scheduler_of(prompt),
        "transformer": low,
    }
    guidance = {"guidance_scale": prompt.guidance}
    if model.experts:
        high = kind.load_transformer(tiny.weights["dit_high_noise"], **load)
        parts |= {"transformer": high, "transformer_2": low, "boundary_ratio": model.experts.boundary}
        guidance = {"guidance_scale": prompt.guidance_high_noise, "guidance_scale_2": prompt.guidance}
    more: dict[str, Any] = {}
    if prompt.image is None:
        pipeline = WanPipeline(**parts, expand_timesteps=model.condition == "text_or_image")
    else:
        pipeline = WanImageToVideoPipeline(**parts, expand_timesteps=model.condition == "text_or_image")
        pipeline.encode_image = lambda _image, _device: scene.given.image_tokens  # its own CLIP is of one size only
        with Image.open(prompt.image) as image:
            more["image"] = image.convert("RGB")
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline(
        prompt=prompt.prompt, negative_prompt=prompt.negative_prompt, height=prompt.height, width=prompt.width,
        num_frames=prompt.frames, num_inference_steps=prompt.steps, output_type="pt",
        generator=torch.Generator().manual_seed(prompt.seed), **guidance, **more,
    ).frames  # fmt: skip
    return frames[0]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' DPM++ with numpy 2
@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("t2v-1.3B", {"sample_solver": "dpm++", "flow_shift": 3.0}),
        pytest.param("t2v-A14B", {"infer_steps": 6}, marks=pytest.mark.slow),
        pytest.param("i2v-14B", {}, marks=pytest.mark.slow),
        pytest.param("ti2v-5B", {}, marks=pytest.mark.slow),
        pytest.param("t2v-1.3B", {}, marks=pytest.mark.slow),
        pytest.param("t2v-1.3B", {"sample_solver": "euler", "video_length": 1}, marks=pytest.mark.slow),
        pytest.param("t2v-1.3B", {"guidance_scale": 1.0}, marks=pytest.mark.slow),
        pytest.param("i2v-A14B", {"infer_steps": 6, "sample_solver": "dpm++"}, marks=pytest.mark.slow),
        pytest.param("ti2v-5B", {"image_path": None}, marks=pytest.mark.slow),
    ],
)
def test_from_prompt_to_pixels_it_is_the_librarys_pipeline(tiny_run, tmp_path, task, changes):
    tiny = tiny_task(task, tiny_run, tmp_path)
    prompt = prompt_for(tiny, **changes)
    plain, scene = ours(tiny, prompt, plain=True)
    expected = theirs(tiny, prompt, scene)
    assert plain.shape == expected.shape
    assert max_abs(plain, expected) < TOLERANCE
    assert max_abs(ours(tiny, prompt, plain=False)[0], expected) < TOLERANCE
    assert expected.std() > 0.05
