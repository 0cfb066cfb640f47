"""`--decoder` in the steps: entries say who decoded them, PyAV's keep the keys that they had, and nothing is mixed."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stand_in_decoders import StandIn
from tiny import TinyRun

from wangen import profiles
from wangen.generator import headers
from wangen.generator.cli import main
from wangen.generator.errors import UsageError
from wangen.generator.steps import CacheLatents, CheckCache, Train
from wangen.runtime import cache_latents, encoding, train
from wangen.runtime.cache import decoded_by
from wangen.runtime.decoders import choice
from wangen.runtime.loader import find_entries
from wangen.runtime.models import family, vae_identity, way_of
from wangen.runtime.on_the_fly import command_line
from wangen.runtime.samples import read_samples

MODEL = profiles.model("t2v-1.3B")
WAN = family(MODEL)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torchcodec is PyAV with other colours, so that its entries are others."""
    choice.open_decoder.cache_clear()
    monkeypatch.setitem(choice._BESIDE, "torchcodec", StandIn)
    yield
    choice.open_decoder.cache_clear()


def config(run: TinyRun, folder: Path) -> Path:
    """The dataset's TOML with cache folders of their own."""
    path = folder / "tiny.toml"
    text = run.dataset_config.read_text(encoding="utf-8")
    path.write_text(text.replace((run.folder / "cache").as_posix(), (folder / "cache").as_posix()), encoding="utf-8")
    return path


def step(run: TinyRun, folder: Path, decoder: str | None, **changes: Any) -> CacheLatents:
    made = CacheLatents(dataset_config=config(run, folder), vae=run.weights["vae"], vae_dtype="float32", device="cpu")
    return replace(made, decoder=decoder, **changes)


def entries(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("cache/*.latent.safetensors")}


def options(run: TinyRun, folder: Path, out: str = "out", **changes: Any) -> Train:
    given = {"vae": run.weights["vae"], "t5": run.weights["t5"], "vae_dtype": "float32", "t5_dtype": "float32"}
    return run.options(folder / out, **given | {"dataset_config": config(run, folder)} | changes)


def test_pyav_by_name_makes_the_entries_that_it_made_before_there_was_a_choice(tiny_run: TinyRun, tmp_path: Path):
    before = {path.name: path.read_bytes() for path in (tiny_run.folder / "cache").glob("*.latent.safetensors")}
    cache_latents.run(step(tiny_run, tmp_path, "pyav"))
    assert entries(tmp_path) == before
    vae = tiny_run.weights["vae"]
    assert vae_identity(vae, 0, "pyav") == vae_identity(vae) == headers.identity(vae, "--vae")
    assert way_of(vae, {vae_identity(vae)}) == (0, "pyav")
    assert way_of(vae, {"0" * 20, vae_identity(vae, 256, "torchcodec")}) == (256, "torchcodec")
    assert way_of(vae, {decoded_by("another", "torchcodec")}) is None


@pytest.mark.usefixtures("stand_in")
def test_entries_of_another_decoder_are_others_and_nothing_is_mixed(
    tiny_run: TinyRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    cache_latents.run(step(tiny_run, tmp_path, None))
    by_pyav = entries(tmp_path)
    report = cache_latents.run(step(tiny_run, tmp_path, "torchcodec", keep_cache=True))
    assert report.counts["computed"] == 3
    assert "3 to encode, latent: decoded by pyav, wanted by torchcodec" in caplog.text
    added = {name: data for name, data in entries(tmp_path).items() if name not in by_pyav}
    assert len(added) == 3
    assert not {name for name in added if name.startswith("clip")} & by_pyav.keys()
    assert cache_latents.run(step(tiny_run, tmp_path, "torchcodec")).counts["computed"] == 0
    assert entries(tmp_path) == added, "PyAV's are needed no longer"
    assert cache_latents.run(step(tiny_run, tmp_path, None)).counts["computed"] == 3
    assert entries(tmp_path) == by_pyav


@pytest.mark.usefixtures("stand_in")
def test_check_cache_and_training_take_the_decoder_of_the_entries(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert main(step(tiny_run, tmp_path, "torchcodec").argv()) == 0
    checked = ["check_cache", "--dataset_config", str(config(tiny_run, tmp_path)), "--task", "t2v-1.3B"]
    text = ["cache_text", *checked[1:], "--t5", str(tiny_run.weights["t5"]), "--device", "cpu"]
    assert main(text) == 0
    assert main([*checked, "--vae", str(tiny_run.weights["vae"])]) == 0
    assert main(checked) == 0
    monkeypatch.setattr(WAN, "load_latent_encoder", lambda *_words, **_names: pytest.fail("the VAE was loaded"))
    given = options(tiny_run, tmp_path, cache_mode="auto")
    samples = read_samples(CheckCache(dataset_config=given.dataset_config), MODEL)
    found = find_entries(given, MODEL, samples)
    assert [type(cached.latent).__name__ for cached in found] == ["Entry"] * 3
    assert "--decoder torchcodec" in command_line("cache_latents", run_without(given))


def run_without(given: Train) -> Train:
    """Training by the cache alone, which is told what to run when something is missing."""
    return replace(given, cache_mode="cached", vae=None, t5=None)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.slow
def test_training_goes_on_with_the_decoder_of_the_entries_or_with_the_one_it_is_given(
    tiny_run: TinyRun, tmp_path: Path
):
    cache_latents.run(step(tiny_run, tmp_path, "torchcodec"))
    whole = entries(tmp_path)
    clip = next(path for path in tmp_path.glob("cache/clip*.latent.safetensors"))
    clip.unlink()
    train.run(options(tiny_run, tmp_path, cache_latents_to_disk=True, max_train_steps=1))
    assert entries(tmp_path) == whole
    train.run(options(tiny_run, tmp_path, cache_latents_to_disk=True, max_train_steps=1, decoder="pyav",
                      out="other"))  # fmt: skip
    by_pyav = {path.name for path in (tiny_run.folder / "cache").glob("*.latent.safetensors")}
    assert entries(tmp_path).keys() == whole.keys() | by_pyav


@pytest.mark.usefixtures("stand_in")
def test_realtime_decodes_by_the_decoder_it_is_given(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    used = []
    real = encoding.target_frames

    def target_frames(sample: Any, **words: Any) -> Any:
        used.append(words["decoder"].name)
        return real(sample, **words)

    monkeypatch.setattr(encoding, "target_frames", target_frames)
    train.run(options(tiny_run, tmp_path, cache_mode="realtime", max_train_steps=3, decoder="torchcodec"))
    assert set(used) == {"torchcodec"}
    train.run(options(tiny_run, tmp_path, cache_mode="realtime", max_train_steps=3, out="other"))
    assert set(used) == {"torchcodec", "pyav"}


def test_a_decoder_that_cannot_run_is_refused_before_anything_is_encoded(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(WAN, "load_latent_encoder", lambda *_words, **_names: pytest.fail("the VAE was loaded"))
    with pytest.raises(UsageError, match="--decoder pynvvideocodec needs an NVIDIA GPU"):
        cache_latents.run(step(tiny_run, tmp_path, "pynvvideocodec"))
    assert main(step(tiny_run, tmp_path, "pynvvideocodec").argv()) != 0
    assert "give --decoder pyav" in capsys.readouterr().err
    assert not entries(tmp_path)
