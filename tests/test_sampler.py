"""The sampler that comparisons use: loaded once, its LoRAs switched between videos of paired seeds."""

import gc
from pathlib import Path

import pytest
import torch
from tiny_family import TinyTask, tiny_task
from torch.multiprocessing.reductions import StorageWeakRef

from wangen import profiles
from wangen.generator.errors import UsageError
from wangen.generator.sample_prompts import SamplePrompt
from wangen.runtime import train
from wangen.runtime.models import family
from wangen.runtime.sampling.sampler import ExpertWeights, Lora, Request, Sampler, Settings, make_videos
from wangen.runtime.sampling.scenes import Encoders, Scene, make_scenes
from wangen.runtime.sampling.videos import Decoder

CPU = torch.device("cpu")
PROMPT = SamplePrompt(
    prompt="a red square", negative_prompt="", width=64, height=64, frames=1, fps=16, seed=3, steps=3, shift=5.0,
    guidance=1.0, guidance_high_noise=1.0, sampler="unipc",
)  # fmt: skip


@pytest.fixture(scope="module")
def loras(tiny_run, tmp_path_factory) -> dict[str, Path]:
    files = {}
    for name, changes in {"first": {"seed": 1}, "second": {"seed": 2}, "dora": {"seed": 3, "dora": True}}.items():
        folder = tmp_path_factory.mktemp(name)
        train.run(tiny_run.options(folder, max_train_steps=2, learning_rate=1e-2, **changes))
        files[name] = folder / "lora.safetensors"
    return files


def scene_of(tiny: TinyTask) -> Scene:
    model = profiles.model(tiny.task)
    return make_scenes(family(model), model, [PROMPT], encoders_of(tiny), CPU, "the prompt")[0]


def encoders_of(tiny: TinyTask) -> Encoders:
    return Encoders(t5=tiny.weights["t5"], vae=tiny.weights["vae"])


def sampler_of(tiny: TinyTask, *loras: Lora, **changes) -> Sampler:
    model = profiles.model(tiny.task)
    experts = [ExpertWeights(tiny.weights["dit"], loras)]
    if model.experts:
        experts.append(ExpertWeights(tiny.weights["dit_high_noise"], loras, high_noise=True))
        changes.setdefault("boundary", model.experts.boundary)
    return Sampler(family(model), model, experts, Settings(dtype="float32", **changes), CPU)


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("t2v-1.3B", {}),
        pytest.param("t2v-1.3B", {"plain": True}, marks=pytest.mark.slow),
        pytest.param("t2v-A14B", {"blocks_to_swap": 1}, marks=pytest.mark.slow),
        pytest.param("t2v-1.3B", {"quantize": "int8", "blocks_to_swap": 2}, marks=pytest.mark.slow),
        pytest.param("t2v-A14B", {}, marks=pytest.mark.slow),
        pytest.param("t2v-A14B", {"plain": True}, marks=pytest.mark.slow),
        pytest.param("t2v-A14B", {"offload_inactive": False}, marks=pytest.mark.slow),
    ],
)
def test_switched_loras_give_what_each_gives_loaded_alone(tiny_run, loras, tmp_path, task, changes):
    tiny = tiny_task(task, tiny_run, tmp_path)
    scene = scene_of(tiny)
    base = sampler_of(tiny, **changes).latents(scene)
    alone = {name: sampler_of(tiny, Lora(name, loras[name]), **changes).latents(scene) for name in ("first", "dora")}
    sampler = sampler_of(tiny, *(Lora(name, path) for name, path in loras.items()), **changes)
    for name, latents in alone.items():
        assert torch.equal(sampler.latents(scene, {name: 1.0}), latents)
        assert torch.equal(sampler.latents(scene, {}), base)
        assert not torch.equal(latents, base)
    assert torch.equal(sampler.latents(scene, {"first": 0.0}), base)
    half = sampler.latents(scene, {"first": 0.5})
    assert not torch.equal(half, base)
    assert not torch.equal(half, alone["first"])
    both = sampler_of(tiny, Lora("a", loras["first"]), Lora("b", loras["second"], 0.5), **changes).latents(scene)
    assert torch.allclose(sampler.latents(scene, {"first": 1.0, "second": 0.5}), both, atol=1e-6)


def test_a_dora_adds_up_with_others_in_any_order(tiny_run, loras, tmp_path):
    """peft's scales what stands before it, too."""
    tiny, names = tiny_task("t2v-1.3B", tiny_run, tmp_path), ["first", "dora", "second"]
    scene, sampler = scene_of(tiny), sampler_of(tiny, *(Lora(name, loras[name]) for name in names))
    wanted = sampler.latents(scene, dict.fromkeys(names, 1.0))
    assert torch.allclose(sampler.latents(scene, dict.fromkeys(names[::-1], 1.0)), wanted, atol=1e-6)
    alone = [sampler.latents(scene, {name: 1.0}) for name in names]
    assert not any(torch.allclose(wanted, one, atol=1e-4) for one in alone)


@pytest.mark.parametrize("plain", [False, True])
def test_a_dora_adds_up_with_one_of_another_kind_in_any_order(tiny_run, loras, tmp_path, plain):
    """Adapters of other kinds lie above those that were put on before them."""
    train.run(tiny_run.options(tmp_path, max_train_steps=2, learning_rate=1e-2, network_module="lokr", lokr_factor=4))
    tiny = tiny_task("t2v-1.3B", tiny_run, tmp_path)
    scene, both = scene_of(tiny), [Lora("lokr", tmp_path / "lora.safetensors"), Lora("dora", loras["dora"])]
    one, other = (sampler_of(tiny, *order, plain=plain).latents(scene) for order in (both, both[::-1]))
    assert torch.equal(one, other)
    for lora in both:
        assert not torch.allclose(one, sampler_of(tiny, lora, plain=plain).latents(scene), atol=1e-4)


@pytest.mark.parametrize(("task", "changes"), [("t2v-1.3B", {}), ("t2v-A14B", {"blocks_to_swap": 1})])
def test_the_weights_go_with_the_sampler(tiny_run, loras, tmp_path, task, changes):
    """Before the next one loads, and not once Python looks for circles."""
    tiny = tiny_task(task, tiny_run, tmp_path)
    sampler = sampler_of(tiny, Lora("first", loras["first"]), **changes)
    sampler.latents(scene_of(tiny))
    weights = [StorageWeakRef(parameter.untyped_storage()) for loaded in sampler._loaded
               for parameter in loaded.place.transformer.parameters() if parameter.numel()]  # fmt: skip
    assert len(weights) > 20
    gc.collect()
    gc.disable()
    try:
        del sampler
        assert all(weight.expired() for weight in weights)
    finally:
        gc.enable()


def test_videos_come_one_by_one_as_pairs_of_a_seed(tiny_run, loras, tmp_path):
    tiny = tiny_task("t2v-1.3B", tiny_run, tmp_path)
    scene = scene_of(tiny)
    sampler = sampler_of(tiny, Lora("first", loras["first"]))
    decoder = Decoder(family(profiles.model(tiny.task)), encoders_of(tiny), CPU, "")
    steps: list[int] = []
    made = make_videos([Request(scene, {}), Request(scene)], sampler, decoder, steps.append)
    base = next(made)
    assert steps == [1, 2, 3]  # the second has not begun
    tuned = next(made)
    assert base.frames.shape == tuned.frames.shape == (3, 1, 64, 64)
    assert base.latents.shape == (1, 16, 1, 8, 8)
    assert not torch.equal(base.frames, tuned.frames)
    assert list(made) == []


def test_what_no_lora_can_do_is_refused(tiny_run, loras, tmp_path):
    tiny = tiny_task("t2v-1.3B", tiny_run, tmp_path)
    scene, sampler = scene_of(tiny), sampler_of(tiny, Lora("dora", loras["dora"]))
    with pytest.raises(ValueError, match="no LoRA called other"):
        sampler.latents(scene, {"other": 1.0})
    with pytest.raises(UsageError, match=r"a DoRA at strength 0\.5"):
        sampler.latents(scene, {"dora": 0.5})
    assert torch.equal(sampler.latents(scene, {"dora": 0.0}), sampler.latents(scene, {})), "0 switches it off"
