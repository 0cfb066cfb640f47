"""Samples from a dataset's TOML, and batches of them from the cache."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cached_bundle import Bundle
from helpers import make_clip, make_image

from wangen import profiles
from wangen.generator.errors import WangenError
from wangen.generator.steps import CheckCache, Train
from wangen.runtime.loader import CachedSample, Draw, background_of, cache_use, find_entries, read_batch
from wangen.runtime.media import target_frames
from wangen.runtime.samples import Sample, read_samples
from wangen.runtime.training import samples as training

pytest_plugins = ("bundle_fixtures",)
MODEL = profiles.model("t2v-1.3B")


def clips(folder: Path, target_frames: str, **lengths: int) -> Path:
    """A dataset of clips with these numbers of frames."""
    for seed, (stem, num_frames) in enumerate(lengths.items(), 1):
        make_clip(folder / "clips" / f"{stem}.mp4", num_frames, seed=seed)
        (folder / "clips" / f"{stem}.txt").write_text("a clip")
    toml = folder / "set.toml"
    toml.write_text(
        f"[general]\nresolution = [64, 64]\n[[datasets]]\nvideo_directory = '{(folder / 'clips').as_posix()}'\n"
        f"cache_directory = '{(folder / 'cache').as_posix()}'\n{target_frames}\n"
    )
    return toml


def names(samples: list[Sample]) -> list[str]:
    return [sample.name for sample in samples]


def test_lengths_that_clips_are_too_short_for_are_said_with_the_clips(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    toml = clips(tmp_path, "target_frames = [5, 9, 17]", long=20, middle=12, short=6)
    with caplog.at_level(logging.INFO, "wangen"):
        samples = read_samples(CheckCache(dataset_config=toml), MODEL)
    assert len(samples) == 6
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    total, nine, seventeen = (message.strip() for message in caplog.messages)
    assert "2 (1 for 9 frames, 2 for 17 frames)" in total
    assert nine == "fewer than 9 frames: short.mp4"
    assert seventeen == "fewer than 17 frames: middle.mp4, short.mp4"


def test_nothing_is_said_when_all_lengths_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    toml = clips(tmp_path, "target_frames = [5, 9]", long=9)
    full = clips(tmp_path / "full", "target_frames = [5, 81]\nframe_extraction = 'full'", long=20)
    with caplog.at_level(logging.INFO, "wangen"):
        assert names(read_samples(CheckCache(dataset_config=toml), MODEL)) == ["long.mp4:0+5", "long.mp4:0+9"]
        assert names(read_samples(CheckCache(dataset_config=full), MODEL)) == ["long.mp4:0+17"]
    assert not caplog.records


def test_a_clip_too_short_for_every_length_is_named_with_the_cure(tmp_path: Path):
    toml = clips(tmp_path, "target_frames = [33, 17]", long=20, short=6)
    with pytest.raises(WangenError) as raised:
        read_samples(CheckCache(dataset_config=toml), MODEL)
    assert "short.mp4: has 6 frames at 16 fps, 17 are needed; set target_frames = [5]" in raised.value.found
    assert "long.mp4" not in raised.value.found


def test_full_memory_is_one_message_with_the_file_and_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (sample,) = read_samples(CheckCache(dataset_config=clips(tmp_path, "target_frames = [5]", long=20)), MODEL)

    def full(*_words: object, **_names: object) -> None:
        raise MemoryError

    monkeypatch.setattr("wangen.runtime.media.fit", full)
    with pytest.raises(WangenError, match="out of memory decoding 5 frames of 64x64") as raised:
        target_frames(sample)
    assert raised.value.where.endswith("long.mp4")
    assert "--num_workers 0" in raised.value.cure


@pytest.fixture
def twins(tmp_path: Path, models: dict[str, Path]) -> Bundle:
    """Two folders with a cat.png each, of other pictures, and a copy of one of them; all have one caption."""
    bundle = Bundle(tmp_path, models)
    blocks = ["[general]\nresolution = [32, 32]\n"]
    for name, seed in (("256", 1), ("512", 2)):
        make_image(tmp_path / name / "cat.png", (32, 32), seed=seed)
        (tmp_path / name / "cat.txt").write_text("a cat")
        folder, cache = (tmp_path / name).as_posix(), (tmp_path / "cache").as_posix()
        blocks.append(f"[[datasets]]\nimage_directory = '{folder}'\ncache_directory = '{cache}'\n")
    make_image(tmp_path / "256" / "copy.png", (32, 32), seed=1)
    (tmp_path / "256" / "copy.txt").write_text("a cat")
    bundle.toml.write_text("".join(blocks))
    bundle.latents()
    bundle.text()
    return bundle


def cached(bundle: Bundle) -> list[CachedSample]:
    options = Train(dataset_config=bundle.toml, dit=bundle.folder / "dit", output_dir=bundle.folder, output_name="x")
    return find_entries(options, MODEL, read_samples(options, MODEL))


def test_files_of_one_name_and_copies_have_keys_of_their_own(twins: Bundle):
    samples = cached(twins)
    batch = read_batch(samples, [Draw(index, 0) for index in range(3)])
    assert batch.names == ["cat.png", "copy.png", "cat.png"]
    first, copied, other = (cached.latent.content_key for cached in samples)
    assert first == copied != other
    assert batch.keys == [first, f"{copied} 1", other]


def test_entries_that_samples_share_are_counted_once(twins: Bundle):
    samples = cached(twins)
    assert len(samples) == 3
    assert cache_use(samples) == (3, 0)  # two pictures and a caption
    assert cache_use(samples[:1]) == (2, 0)
    assert (cache_use([]).mode("auto"), cache_use([]).share) == ("cached", 0)


@pytest.mark.parametrize(("colors", "found"), [(["#102030"] * 2, "#102030"), (["#102030", "#000000"], "#ffffff")])
def test_pictures_of_blocks_that_differ_have_no_background_of_their_own(colors: list[str], found: str):
    samples = [SimpleNamespace(sample=SimpleNamespace(entry=SimpleNamespace(background_color=one))) for one in colors]
    assert background_of(samples) == found  # type: ignore[arg-type]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_empty_prompt_is_trained_on_where_it_is_drawn_alone(tmp_path: Path, monkeypatch, dropout: float):
    """Guidance of continuations reads it of what is held out; a fingerprint names all entries that are trained on."""
    asked: list[tuple[object, ...]] = []

    def of(name: str, *, is_reg: bool = False) -> Any:
        return SimpleNamespace(entry=SimpleNamespace(is_reg=is_reg), item=SimpleNamespace(path=Path(name)))

    def find(options: Train, _model: object, some: list[Any], _ranks: object) -> list[CachedSample]:
        asked.append((options.dataset_config, options.resolution, [one.item.path.name for one in some]))
        return [CachedSample(one, latent=None, texts=(), empty="empty") for one in some]  # type: ignore[arg-type]

    taught = [of("a"), of("b", is_reg=True)]
    monkeypatch.setattr(training, "read_samples", lambda *_words: taught)
    monkeypatch.setattr(training, "find_entries", find)
    monkeypatch.setattr(training, "clip_key", id)
    options = Train(output_dir=tmp_path, output_name="n", dataset_config=Path("a.toml"), resolution="832x480",
                    validation_config=Path("v.toml"), caption_dropout=dropout)  # fmt: skip
    trained, judged = training.read_training_samples(options, MODEL)
    assert [one.empty for one in trained] == ["empty" if dropout else None] * 2
    assert [one.empty for one in judged] == ["empty"]
    assert asked == [(Path("a.toml"), "832x480", ["a", "b"]), (Path("v.toml"), "all", ["a"])]


def test_a_text_that_two_samples_share_is_one_entry_of_a_run():
    latents, text = [SimpleNamespace(key=key) for key in "ab"], SimpleNamespace(key="c")
    samples: Any = [CachedSample(None, latent, (text,)) for latent in latents]  # type: ignore[arg-type]
    assert cache_use(samples) == (0, 3)
    assert [cache_use(samples).mode(asked) for asked in ("realtime", "auto")] == ["realtime", "mixed"]
