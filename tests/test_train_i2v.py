"""Image-to-video: the condition and CLIP's view from the cache into the transformer, with and without CLIP."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_clip
from test_together_full import in_one, require_close
from together import trained

from wangen import profiles
from wangen.generator.cli import main
from wangen.generator.errors import WangenError
from wangen.generator.steps import CacheLatents, CacheText, CheckCache, Train
from wangen.runtime import cache_latents, cache_text, check_cache, train
from wangen.runtime.cache import load
from wangen.runtime.epochs import EpochSampler
from wangen.runtime.fast.dit import FastWan
from wangen.runtime.loader import cache_use, find_entries, read_batch
from wangen.runtime.models import family
from wangen.runtime.samples import read_samples

VECTORS = Path(__file__).parent / "vectors"
CLIP = VECTORS / "clip" / "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
MODEL = profiles.model("i2v-14B")
WAN = family(MODEL)


class Prompts:
    """Embeddings as wide as the tiny transformer takes them: the tiny umT5 is narrower."""

    def encode(self, prompts: list[str], _on_block: object) -> list[torch.Tensor]:
        return [torch.randn(3 + len(text) % 5, 4096, generator=torch.Generator().manual_seed(1)) for text in prompts]


def tokens(_encoder: object, images: torch.Tensor) -> torch.Tensor:
    """As many and as wide as those of ViT-H, which the transformer takes: those of the tiny CLIP are fewer."""
    means = images.mean(dim=(1, 2, 3)).view(-1, 1, 1)
    return torch.linspace(-1, 1, 1280).expand(len(images), 257, 1280) + means


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(WAN, "load_prompt_encoder", lambda *_words, **_names: Prompts())
    monkeypatch.setattr(WAN, "load_image_encoder", lambda *_words, **_names: None, raising=False)
    monkeypatch.setattr(WAN, "encode_images", tokens, raising=False)
    (tmp_path / "media").mkdir()
    make_clip(tmp_path / "media" / "a.mp4", num_frames=9, fps=16, size=(64, 48))
    (tmp_path / "media" / "a.txt").write_text("colours that move", encoding="utf-8")
    path = tmp_path / "i2v.toml"
    path.write_text(
        f"[[datasets]]\nvideo_directory = '{(tmp_path / 'media').as_posix()}'\nresolution = [64, 48]\n"
        f"cache_directory = '{(tmp_path / 'cache').as_posix()}'\ntarget_frames = [9]\n"
    )
    return path


def cache(config: Path, **changes: Any) -> None:
    vae = VECTORS / "vae21" / "Wan2.1_VAE.pth"
    step = CacheLatents(dataset_config=config, vae=vae, task="i2v-14B", vae_dtype="float32", device="cpu", **changes)
    cache_latents.run(step)
    t5 = VECTORS / "t5" / "models_t5_umt5-xxl-enc-bf16.pth"
    cache_text.run(CacheText(dataset_config=config, t5=t5, task="i2v-14B", t5_dtype="float32", device="cpu"))


def options(config: Path) -> Train:
    return Train(
        dataset_config=config, dit=VECTORS / "dit_i2v21" / "model.safetensors", task="i2v-14B",
        output_dir=config.parent / "out", output_name="lora", network_dim=2, network_alpha=2.0, learning_rate=1e-3,
        mixed_precision="no", max_train_steps=3, log_with=("none",), device="cpu",
    )  # fmt: skip


def the_batch(config: Path) -> Any:
    samples = find_entries(options(config), MODEL, read_samples(CheckCache(dataset_config=config), MODEL))
    return samples[0], read_batch(samples, EpochSampler(samples, 1).epoch(0)[0])


def test_the_condition_is_the_mask_and_the_encoded_first_frame(config: Path):
    cache(config, clip=CLIP, clip_dtype="float32")
    sample, batch = the_batch(config)
    assert batch.condition.shape == (1, 20, 3, 6, 8)
    assert batch.condition[:, :4, 0].eq(1).all()
    assert batch.condition[:, :4, 1:].eq(0).all()
    assert torch.equal(batch.condition[0, 4:], load(sample.image_latent)["latent"])
    # The first latent of the condition is that of the clip: both see the first frame alone.
    assert torch.allclose(batch.condition[0, 4:, 0], batch.latents[0, :, 0], atol=1e-5)
    assert torch.equal(batch.image_tokens[0], load(sample.clip)["clip"].float())


def test_auto_takes_the_views_of_the_clip_that_it_is_given_in_the_precision_that_they_have(config: Path):
    cache(config, clip=CLIP, clip_dtype="bfloat16")
    vae = VECTORS / "vae21" / "Wan2.1_VAE.pth"
    given = replace(options(config), cache_mode="auto", vae=vae, clip=CLIP)
    samples = read_samples(CheckCache(dataset_config=config), MODEL)
    assert cache_use(find_entries(given, MODEL, samples)).computed == 0


def test_training_sees_the_condition_and_the_view(config: Path, monkeypatch: pytest.MonkeyPatch):
    cache(config, clip=CLIP, clip_dtype="float32")
    seen = []
    predict = FastWan.__call__

    def watched(*words: Any, **names: Any) -> torch.Tensor:
        seen.append({name: value.shape for name, value in names.items()})
        return predict(*words, **names)

    monkeypatch.setattr(FastWan, "__call__", watched)
    report = train.run(options(config))
    assert report.counts["steps"] == 3
    assert seen == [{"condition": (1, 20, 3, 6, 8), "image_tokens": (1, 257, 1280)}] * 3


def test_without_clip_it_caches_and_trains_after_a_warning_each(config: Path, caplog: pytest.LogCaptureFixture):
    cache(config)
    assert [line for line in caplog.messages if "no --clip" in line]
    caplog.clear()
    report = train.run(options(config))
    assert [line for line in caplog.messages if "trains without its image branch" in line]
    assert torch.isfinite(torch.tensor(report.result["last_loss"]))
    _, batch = the_batch(config)
    assert batch.image_tokens is None


def test_clip_given_later_adds_only_its_views(config: Path, monkeypatch: pytest.MonkeyPatch):
    cache(config)
    before = {path.name for path in (config.parent / "cache").glob("*.safetensors")}
    monkeypatch.setattr(WAN, "load_latent_encoder", lambda *_words, **_names: pytest.fail("the VAE was loaded"))
    cache(config, clip=CLIP, clip_dtype="float32")
    added = {path.name for path in (config.parent / "cache").glob("*.safetensors")} - before
    assert len(added) == 1
    assert ".clip." in added.pop()


def test_a_clip_whose_view_is_missing_is_said_with_the_flag_that_makes_it(
    config: Path, caplog: pytest.LogCaptureFixture
):
    cache(config, clip=CLIP, clip_dtype="float32")
    caplog.clear()
    cache(config)
    assert [line for line in caplog.messages if "the cache holds CLIP's views" in line]
    for path in (config.parent / "cache").glob("*.clip.safetensors"):
        path.unlink()
    with pytest.raises(WangenError) as raised:
        train.run(options(config))
    assert "clip is missing" in raised.value.found
    assert "--clip CLIP_FILE" in raised.value.cure
    report = check_cache.run(CheckCache(dataset_config=config, task="i2v-14B"))
    assert not report.ok
    assert report.summary.endswith("run cache_latents again with --clip")
    assert main(["cache", "clear", str(config.parent / "cache"), "--kind", "clip", "--yes"]) == 0
    assert check_cache.run(CheckCache(dataset_config=config, task="i2v-14B")).ok, "now it trains without"


def test_clip_for_a_model_without_it_is_answered_and_ignored(config: Path, caplog: pytest.LogCaptureFixture):
    vae = VECTORS / "vae21" / "Wan2.1_VAE.pth"
    cache_latents.run(CacheLatents(dataset_config=config, vae=vae, task="i2v-A14B", clip=CLIP, device="cpu"))
    assert [line for line in caplog.messages if "i2v-A14B does not look at images through CLIP" in line]
    assert not list((config.parent / "cache").glob("*.clip.safetensors"))
    assert list((config.parent / "cache").glob("*.image_latent.safetensors"))


@pytest.mark.slow
def test_every_weight_is_trained_in_parts_with_the_image_branch(config: Path):
    """There is one item: the second process goes along with the first, and does not count.

    The tiny CLIP's tokens are nearly alike, so that the gradient of their keys is what rounding leaves (1e-8): with
    Adam's own epsilon that would be steps of full size.
    """
    cache(config, clip=CLIP, clip_dtype="float32")
    given = {"learning_rate": 1e-4, "optimizer_args": ("eps=1e-6",), "parallel": "fsdp"}
    parts = replace(options(config), train_mode="full", **given)
    trained(parts, 2)
    in_one(parts, config.parent / "alone", 2)
    require_close(parts.output_dir, config.parent / "alone", 3)
