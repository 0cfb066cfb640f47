"""The cache of clips of raw 1X data: each text and each clip encoded once, whatever manifest names it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import TinyRun
from tiny_family import TinyTask, tiny_task
from world_model_shards import write_split

from wangen import profiles
from wangen.generator.prepare_steps import WorldModel
from wangen.generator.session import Report
from wangen.generator.steps import CacheLatents, CacheText, Train
from wangen.runtime import cache_latents, cache_text, train, world_model
from wangen.runtime.loader import Draw, read_batch
from wangen.runtime.models import family
from wangen.runtime.training.samples import read_training_samples

MODEL = profiles.model("ti2v-5B")
WAN = family(MODEL)
NUM_CLIPS = 4


@pytest.fixture(scope="module")
def tiny(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> TinyTask:
    return tiny_task("ti2v-5B", tiny_run, tmp_path_factory.mktemp("5b"))


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_split(tmp_path / "raw", [[(0, 14), (1, 5)], [(2, 5)]])


def manifest(raw: Path, folder: Path, **flags: Any) -> Path:
    """Clips of 5 frames: of 14 frames in a row those from 0 and 5, and one of each other segment."""
    world_model.run(WorldModel(source=raw, output=folder, **{"frames": 5} | flags))
    return folder / "train.jsonl"


@dataclass
class Encoded:
    """What went through the encoders since the test began."""

    prompts: list[str] = field(default_factory=list)
    num_clips: int = 0


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoded]:
    """Counts beside the real encoders."""
    found = Encoded()
    load_prompts, load_latents = WAN.load_prompt_encoder, WAN.load_latent_encoder

    def prompt_encoder(*words: Any, **names: Any) -> Any:
        encoder = load_prompts(*words, **names)
        encode = encoder.encode

        def counting(prompts: list[str], *more: Any) -> list[torch.Tensor]:
            found.prompts += prompts
            return encode(prompts, *more)

        monkeypatch.setattr(encoder, "encode", counting, raising=False)
        return encoder

    def latent_encoder(*words: Any, **names: Any) -> Any:
        encoder = load_latents(*words, **names)
        encode = encoder.encode

        def counting(video: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
            found.num_clips += len(video)
            return encode(video, *more, **named)

        monkeypatch.setattr(encoder, "encode", counting, raising=False)
        return encoder

    monkeypatch.setattr(WAN, "load_prompt_encoder", prompt_encoder)
    monkeypatch.setattr(WAN, "load_latent_encoder", latent_encoder)
    return found


def cache(tiny: TinyTask, **dataset: Path) -> tuple[Report, Report]:
    """Both caching steps over a manifest or a TOML."""
    step: dict[str, Any] = {**dataset, "task": "ti2v-5B", "device": "cpu"}
    latents = cache_latents.run(CacheLatents(vae=tiny.weights["vae"], vae_dtype="float32", **step))
    return latents, cache_text.run(CacheText(t5=tiny.weights["t5"], t5_dtype="float32", **step))


def names(folder: Path, kind: str) -> list[str]:
    return sorted(path.name for path in folder.glob(f"*.{kind}.safetensors"))


def options(tiny: TinyTask, manifest: Path, output: Path, **changes: Any) -> Train:
    given: dict[str, Any] = {
        "manifest": manifest, "task": "ti2v-5B", "dit": tiny.weights["dit"], "output_dir": output,
        "output_name": "robot", "network_dim": 4, "network_alpha": 4.0, "learning_rate": 1e-3, "mixed_precision": "no",
        "max_train_steps": 4, "condition_frames": 1, "condition_dropout": 0.25, "caption_dropout": 0.25,
        "log_with": ("none",), "device": "cpu",
    }  # fmt: skip
    return Train(**given | changes)


def test_one_text_for_all_clips_and_each_clip_once(tiny, raw, tmp_path, encoded):
    path = manifest(raw, tmp_path)
    cache(tiny, manifest=path)
    assert encoded.num_clips == len(names(tmp_path / "train_cache", "latent")) == NUM_CLIPS
    assert len(names(tmp_path / "train_cache", "text_encoder_output")) == 1
    assert len(names(tmp_path / "train_cache", "empty_text_encoder_output")) == 1
    assert encoded.prompts == [""]
    latents, texts = cache(tiny, manifest=path)
    assert (encoded.num_clips, encoded.prompts) == (NUM_CLIPS, [""]), "all was there"
    assert latents.counts["computed"] == texts.counts["computed"] == 0


def test_the_empty_caption_is_the_empty_prompt_that_is_there(tiny, raw, tmp_path, encoded):
    path = manifest(raw, tmp_path, caption="a robot")
    cache(tiny, manifest=path)
    assert encoded.prompts == ["", "a robot"]
    manifest(raw, tmp_path, overwrite=True)
    cache(tiny, manifest=path)
    assert encoded.prompts == ["", "a robot"]
    (own,) = (tmp_path / "train_cache").glob("*.text_encoder_output.safetensors")
    (empty,) = (tmp_path / "train_cache").glob("*.empty_text_encoder_output.safetensors")
    assert {name: tensor.tolist() for name, tensor in load_file(own).items()} == {
        name: tensor.tolist() for name, tensor in load_file(empty).items()
    }


def test_the_same_frames_in_another_manifest_are_not_encoded_again(tiny, raw, tmp_path, encoded):
    """Another stride: clips from 0, 1 … 9 of the first segment, of which two are known."""
    first, second = manifest(raw, tmp_path / "a"), manifest(raw, tmp_path / "b", stride=1, caption="a robot")
    config = tmp_path / "both.toml"
    config.write_text(
        f"[[datasets]]\nmanifest = '{first.as_posix()}'\ncache_directory = '{(tmp_path / 'cache').as_posix()}'\n"
    )
    cache(tiny, dataset_config=config)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.latent.safetensors")}
    assert encoded.num_clips == len(before) == NUM_CLIPS
    config.write_text(config.read_text().replace(first.as_posix(), second.as_posix()))
    cache(tiny, dataset_config=config)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.latent.safetensors")}
    assert encoded.num_clips == len(after) == NUM_CLIPS + 8
    assert after.items() >= before.items()
    assert encoded.prompts == ["", "a robot"]


def test_a_caption_of_its_own_goes_with_each_clip(tiny, raw, tmp_path, encoded):
    path = manifest(raw, tmp_path)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    captions = ["it turns left", "", "it stops", "it turns left"]
    rows = [row | {"prompt": caption} for row, caption in zip(rows, captions, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    cache(tiny, manifest=path)
    assert sorted(encoded.prompts) == ["", "it stops", "it turns left"]
    assert len(names(tmp_path / "train_cache", "text_encoder_output")) == 3
    samples, _ = read_training_samples(options(tiny, path, tmp_path / "out"), MODEL)
    texts = read_batch(samples, [Draw(number, 0) for number in range(NUM_CLIPS)]).texts
    assert torch.equal(texts[0], texts[3])
    assert len({text.numpy().tobytes() for text in texts}) == 3
    (dropped,) = read_batch(samples, [Draw(0, 0, caption=-1)]).texts
    assert torch.equal(dropped, texts[1])


@pytest.mark.slow
def test_encoding_at_each_draw_has_the_losses_and_the_bytes_of_the_cache(tiny, raw, tmp_path):
    """No tolerance: the same encoders make the same latents."""
    path = manifest(raw, tmp_path)
    cache(tiny, manifest=path)
    losses, weights = {}, {}
    encoders = {"vae": tiny.weights["vae"], "t5": tiny.weights["t5"], "vae_dtype": "float32", "t5_dtype": "float32"}
    cached = options(tiny, path, tmp_path / "cached")
    for run in (cached, replace(cached, output_dir=tmp_path / "live", cache_mode="realtime", **encoders)):
        report = train.run(run)
        mode = report.result["cache_mode"]
        lines = (run.output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses[mode] = [loss for line in lines if (loss := json.loads(line).get("loss"))]
        weights[mode] = (run.output_dir / "robot.safetensors").read_bytes()
    assert len(losses["cached"]) == 4
    assert losses["cached"] == losses["realtime"]
    assert weights["cached"] == weights["realtime"]
