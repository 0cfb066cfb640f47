"""Fixtures around a `Bundle`; a test file asks for them with `pytest_plugins` and imports nothing from here."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from cached_bundle import CLIP, PHOTOS, Bundle, make_many, write_toml
from tiny_weights import write_tiny_wan


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """These models are too small for two threads, which on a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_tiny_wan(tmp_path_factory.mktemp("models"), ["a photo of a cat and a rocket", "red green blue"])


@pytest.fixture
def bundle(tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """Three photos and a clip of the example; the cat and the clip have one caption in common."""
    monkeypatch.setattr("wangen.runtime.sources.YOUNG_NS", 0)
    bundle = Bundle(tmp_path / "bundle", models)
    example = files("wangen.examples").joinpath("dataset")
    for folder, stem, suffix in (*(("photos", stem, ".jpg") for stem in PHOTOS), ("clips", CLIP, ".mp4")):
        (bundle.folder / folder).mkdir(parents=True, exist_ok=True)
        (bundle.folder / folder / f"{stem}{suffix}").write_bytes(example.joinpath(f"{stem}{suffix}").read_bytes())
        caption = "a cat" if stem in ("cat", CLIP) else f"a photo of {stem}"
        (bundle.folder / folder / f"{stem}.txt").write_text(caption + "\n", encoding="utf-8")
    write_toml(bundle)
    return bundle


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], one_thread: None) -> Bundle:
    """Seventy pictures, cached without a break; tests must not change it."""
    bundle = make_many(tmp_path_factory.mktemp("unbroken") / "bundle", models, 70)
    bundle.latents()
    bundle.text()
    return bundle
