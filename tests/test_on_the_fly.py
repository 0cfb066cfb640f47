"""Training that encodes what the cache lacks, in memory or to disk; captions that are drawn; masks that count."""

import logging
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny import CAPTIONS, TinyRun, make_tiny_run
from tiny_weights import write_tiny_wan

from wangen import profiles
from wangen.generator.cli import main
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import CacheLatents, CacheText, CheckCache, Train
from wangen.runtime import cache_latents, cache_text, train
from wangen.runtime.cache import Folder
from wangen.runtime.epochs import EpochSampler
from wangen.runtime.loader import CachedSample, find_entries, read_batch
from wangen.runtime.models import family
from wangen.runtime.on_the_fly import command_line
from wangen.runtime.samples import read_samples

MODEL = profiles.model("t2v-1.3B")
WAN = family(MODEL)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("fly"))


def without_cache(run: TinyRun, folder: Path) -> Path:
    """The dataset's TOML with a cache folder of its own, which is empty."""
    config = folder / "fly.toml"
    text = run.dataset_config.read_text(encoding="utf-8")
    config.write_text(text.replace((run.folder / "cache").as_posix(), (folder / "cache").as_posix()), encoding="utf-8")
    return config


def options(run: TinyRun, folder: Path, **changes: Any) -> Train:
    given = {"vae": run.weights["vae"], "t5": run.weights["t5"], "vae_dtype": "float32", "t5_dtype": "float32"}
    return run.options(folder / "out", **given | changes)


def found(run: TinyRun, given: Train) -> list[CachedSample]:
    return find_entries(given, MODEL, read_samples(CheckCache(dataset_config=given.dataset_config), MODEL))


def test_what_the_cache_lacks_is_encoded_in_memory_and_trains_to_the_same_bytes(run: TinyRun, tmp_path: Path):
    trained = train.run(run.options(tmp_path / "cached"))
    config = without_cache(run, tmp_path)
    report = train.run(options(run, tmp_path, dataset_config=config, cache_latents=True))
    assert Path(report.result["lora"]).read_bytes() == Path(trained.result["lora"]).read_bytes()
    assert not list(tmp_path.rglob("*.latent.safetensors"))
    assert not list(tmp_path.rglob("*.text_encoder_output.safetensors"))


def test_to_disk_the_entries_stay_and_are_those_of_the_caching_steps(
    run: TinyRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = without_cache(run, tmp_path)
    with caplog.at_level(logging.INFO, "wangen"):
        train.run(options(run, tmp_path, dataset_config=config, cache_latents_to_disk=True, max_train_steps=1))
    assert caplog.text.count(" to encode, latent: ") == caplog.text.count(" to encode, text") == 1
    made = {path.name: path.read_bytes() for path in (tmp_path / "cache").glob("*.safetensors")}
    cached = {path.name: path.read_bytes() for path in (run.folder / "cache").glob("*.safetensors")}
    assert made == cached
    train.run(run.options(tmp_path / "again", dataset_config=config, max_train_steps=1))


@pytest.mark.parametrize("how", ["cache_latents", "cache_latents_to_disk", "realtime"])
def test_clips_that_are_not_taken_as_people_see_them_are_named_once(
    run: TinyRun, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cache_latents, "clip_cautions", lambda facts: [f"seen: {len(facts)}"])
    how_given = {"cache_mode": how} if how == "realtime" else {how: True}
    given = options(run, tmp_path, dataset_config=without_cache(run, tmp_path), **how_given)
    num_files = len({cached.sample.item.path for cached in found(run, given)})
    assert caplog.text.count(f"seen: {num_files}") == 1
    caplog.clear()
    found(run, run.options(tmp_path / "cached"))
    assert "seen" not in caplog.text


def test_only_what_is_missing_is_encoded(run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = without_cache(run, tmp_path)
    cache_latents.run(CacheLatents(dataset_config=config, vae=run.weights["vae"], vae_dtype="float32", device="cpu"))
    monkeypatch.setattr(WAN, "load_latent_encoder", lambda *_words, **_names: pytest.fail("the VAE was loaded"))
    samples = found(run, options(run, tmp_path, dataset_config=config, cache_latents=True))
    assert len(samples) == 3
    assert [type(cached.latent).__name__ for cached in samples] == ["Entry"] * 3
    assert [type(cached.texts[0]).__name__ for cached in samples] == ["Held"] * 3


@pytest.mark.parametrize("asks", ["cache_latents", "cache_latents_to_disk"])
@pytest.mark.parametrize("flag", ["vae", "t5"])
def test_without_the_weights_to_encode_with_it_says_which_flag_before_it_encodes(
    run: TinyRun, tmp_path: Path, flag: str, asks: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(WAN, "load_latent_encoder", lambda *_words, **_names: pytest.fail("the VAE was loaded"))
    given = options(run, tmp_path, dataset_config=without_cache(run, tmp_path), **{asks: True, flag: None})
    with pytest.raises(UsageError, match=f"--{asks} needs --{flag}"):
        train.run(given)


def test_a_vae_of_another_model_is_refused_and_a_clip_is_not_needed(run: TinyRun, tmp_path: Path):
    config = without_cache(run, tmp_path)
    vae22 = Path(__file__).parent / "vectors" / "vae22" / "Wan2.2_VAE.pth"
    with pytest.raises(WangenError, match=r"--vae") as error:
        train.run(options(run, tmp_path, dataset_config=config, cache_latents=True, vae=vae22))
    assert "Wan2.2_VAE.pth" in str(error.value)
    assert len(found(run, options(run, tmp_path, dataset_config=config, cache_latents=True, clip=tmp_path / "no"))) == 3


def test_other_weights_make_everything_anew_and_nothing_of_two_encoders_is_mixed(run: TinyRun, tmp_path: Path):
    others = write_tiny_wan(tmp_path / "others", CAPTIONS.values(), seed=1)
    config = without_cache(run, tmp_path)
    cache_latents.run(CacheLatents(dataset_config=config, vae=run.weights["vae"], vae_dtype="float32", device="cpu"))
    cache_text.run(CacheText(dataset_config=config, t5=run.weights["t5"], t5_dtype="float32", device="cpu"))
    min((tmp_path / "cache").glob("*.text_encoder_output.safetensors")).unlink()
    given = options(
        run,
        tmp_path,
        dataset_config=config,
        cache_latents=True,
        vae=others["vae"],
        t5=others["t5"],
        caption_dropout=0.5,
    )
    made = [[type(entry).__name__ for entry in cached.entries] for cached in found(run, given)]
    assert made == [["Held", "Held", "Held"]] * 3, "latents and the empty prompt are valid but of the other encoders"


def test_the_command_to_run_makes_entries_as_the_last_run_did(run: TinyRun, tmp_path: Path):
    shutil.copytree(run.folder / "models", tmp_path / "my models")
    config = without_cache(run, tmp_path)
    vae, t5 = (tmp_path / "my models" / run.weights[role].name for role in ("vae", "t5"))
    tokenizer = (tmp_path / "my models" / "google").rename(tmp_path / "tokens") / "umt5-xxl"
    latents = ["--vae", str(vae), "--vae_dtype", "bfloat16", "--tile", "128"]
    texts = ["--t5", str(t5), "--tokenizer", str(tokenizer), "--t5_dtype", "float32", "--fp8_t5"]
    for step, words in (("cache_latents", latents), ("cache_text", texts)):
        assert main([step, "--dataset_config", str(config), *words]) == 0
    made = {path.name: path.read_bytes() for path in (tmp_path / "cache").glob("*.safetensors")}
    for path in (tmp_path / "cache").glob("*.safetensors"):
        path.unlink()
    given = run.options(tmp_path / "out", dataset_config=config)
    with pytest.raises(WangenError, match="the cache lacks 6 entries"):
        train.run(given)
    for step in ("cache_latents", "cache_text"):
        line = shlex.split(command_line(step, given))
        assert line[:2] == ["wangen", step]
        assert main(line[1:]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache").glob("*.safetensors")} == made
    edits = replace(given, task="qwen-image")  # whose text encoder is another
    assert " --t5 T5_FILE" in command_line("cache_text", edits)
    vae.unlink()
    assert " --vae VAE_FILE" in command_line("cache_latents", given)


def test_a_stale_entry_is_never_trained_on(run: TinyRun, tmp_path: Path):
    shutil.copytree(run.folder / "media", tmp_path / "media")
    shutil.copytree(run.folder / "cache", tmp_path / "cache")
    config = tmp_path / "moved.toml"
    config.write_text(run.dataset_config.read_text().replace(run.folder.as_posix(), tmp_path.as_posix()))
    assert len(found(run, run.options(tmp_path / "out", dataset_config=config))) == 3
    (tmp_path / "media" / "red.txt").write_text("a red circle", encoding="utf-8")
    with pytest.raises(WangenError, match=r"red.png: text_encoder_output is stale, the caption changed"):
        train.run(run.options(tmp_path / "out", dataset_config=config))


# Captions


@pytest.fixture(scope="module")
def captions(run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> list[CachedSample]:
    """One picture with three captions."""
    folder = tmp_path_factory.mktemp("captions")
    (folder / "media").mkdir()
    Image.new("RGB", (64, 64), "red").save(folder / "media" / "a.png")
    (folder / "media" / "a.txt").write_text("a red square\n\na red wall\na blue wall\n", encoding="utf-8")
    config = folder / "many.toml"
    config.write_text(
        f"[[datasets]]\nimage_directory = '{(folder / 'media').as_posix()}'\nnum_repeats = 400\n"
        f"cache_directory = '{(folder / 'cache').as_posix()}'\nresolution = 64\nmultiple_captions = true\n"
    )
    cache_latents.run(CacheLatents(dataset_config=config, vae=run.weights["vae"], vae_dtype="float32", device="cpu"))
    cache_text.run(CacheText(dataset_config=config, t5=run.weights["t5"], t5_dtype="float32", device="cpu"))
    texts = [entry for entry in Folder(folder / "cache").all_entries if entry.kind == "text_encoder_output"]
    assert len(texts) == 3
    return found(run, run.options(folder / "out", dataset_config=config, caption_dropout=0.25))


def test_every_draw_takes_one_of_the_captions_and_a_share_the_empty_prompt(captions: list[CachedSample]):
    draws = [draw for batch in EpochSampler(captions, 1, 0.25).epoch(0) for draw in batch]
    counts = [sum(draw.caption == number for draw in draws) for number in (-1, 0, 1, 2)]
    assert sum(counts) == 400
    assert all(70 <= count <= 130 for count in counts)
    assert draws == [draw for batch in EpochSampler(captions, 1, 0.25).epoch(0) for draw in batch]
    assert draws != [draw for batch in EpochSampler(captions, 1, 0.25).epoch(1) for draw in batch]


def test_the_text_of_a_batch_is_the_one_that_was_drawn(captions: list[CachedSample]):
    batches = EpochSampler(captions, 1, 0.25).epoch(0)
    lengths = set()
    for (draw,) in batches[:40]:
        (text,) = read_batch(captions, [draw]).texts
        lengths.add((draw.caption, len(text)))
    empty = [length for caption, length in lengths if caption == -1]
    assert empty == [1]  # the end of the text alone
    assert len(lengths) == 4


def test_dropping_captions_needs_the_empty_prompt(run: TinyRun, tmp_path: Path):
    config = without_cache(run, tmp_path)
    given = options(run, tmp_path, dataset_config=config, cache_latents=True, caption_dropout=0.5)
    assert all(cached.empty is not None for cached in found(run, given))
    with pytest.raises(UsageError, match="--caption_dropout must be 0 to 1"):
        train.run(replace(given, caption_dropout=1.5))


# Masks


def test_a_mask_is_cached_at_the_latents_size_and_cells_outside_do_not_count(run: TinyRun, tmp_path: Path):
    for name in ("media", "masks"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (64, 64), "red").save(tmp_path / "media" / "a.png")
    (tmp_path / "media" / "a.txt").write_text("a red square", encoding="utf-8")
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (0, 0, 32, 64))
    mask.save(tmp_path / "masks" / "a.png")
    config = tmp_path / "masked.toml"
    config.write_text(
        f"[[datasets]]\nimage_directory = '{(tmp_path / 'media').as_posix()}'\nresolution = 64\n"
        f"cache_directory = '{(tmp_path / 'cache').as_posix()}'\nmask_directory = '{(tmp_path / 'masks').as_posix()}'\n"
    )
    given = options(run, tmp_path, dataset_config=config, cache_latents=True)
    samples = found(run, given)
    batch = read_batch(samples, EpochSampler(samples, 1).epoch(0)[0])
    assert batch.loss_mask is not None
    assert batch.loss_mask.shape == (1, 1, 1, 8, 8)
    assert batch.loss_mask[..., :4].eq(1).all()
    assert batch.loss_mask[..., 4:].eq(0).all()
    assert train.run(replace(given, max_train_steps=1)).counts["steps"] == 1
