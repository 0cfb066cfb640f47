"""What makes which cache entries stale, and what must not: every change alone, against entries that were all valid."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cached_bundle import CLIP, Bundle, write_toml
from PIL import Image
from tiny_weights import write_tiny_wan

from wangen.generator.cli import main
from wangen.generator.steps import CacheLatents, CacheText
from wangen.runtime import cache
from wangen.runtime.cache import TEXT_KINDS, Folder
from wangen.runtime.cache_latents import latent_encoders
from wangen.runtime.cache_text import text_encoder
from wangen.runtime.models import model_of_cache
from wangen.runtime.needs import judge
from wangen.runtime.samples import by_cache_folder, read_samples

pytest_plugins = ("bundle_fixtures",)
pytestmark = pytest.mark.usefixtures("one_thread")

CLIP_WEIGHTS = Path(__file__).parent / "vectors" / "clip" / "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
WINDOW = f"{CLIP}.mp4:0+5"
PHOTO_NAMES = ("astronaut.jpg", "cat.jpg", "coffee.jpg")
IMAGES = {f"{kind} {name}" for kind in ("latent", "image_latent", "clip") for name in PHOTO_NAMES}
CLIPS = {f"{kind} {WINDOW}" for kind in ("latent", "image_latent", "clip")}
TEXTS = {f"text_encoder_output {name}" for name in (*PHOTO_NAMES, f"{CLIP}.mp4")}
EMPTY = {"empty_text_encoder_output the empty prompt"}
EVERYTHING = IMAGES | CLIPS | TEXTS | EMPTY


@dataclass
class Dataset:
    """A cached dataset, and the flags that it is judged with."""

    bundle: Bundle
    latents: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, Any] = field(default_factory=dict)

    def step(self) -> CacheLatents:
        flags = {"task": "i2v-14B", "clip": CLIP_WEIGHTS, "vae_dtype": "float32",
                 "clip_dtype": "float32", "vae": self.bundle.models["vae"], **self.latents}  # fmt: skip
        return CacheLatents(dataset_config=self.bundle.toml, device="cpu", **flags)

    def text_step(self) -> CacheText:
        flags = {"task": "i2v-14B", "t5": self.bundle.models["t5"], "t5_dtype": "float32", **self.texts}
        return CacheText(dataset_config=self.bundle.toml, device="cpu", **flags)

    def make(self) -> None:
        assert main(self.step().argv()) == 0
        assert main(self.text_step().argv()) == 0

    def verdicts(self) -> dict[str, tuple[str, str]]:
        """`kind name` -> the state of what is needed, and why."""
        options = self.step()
        model = model_of_cache(options.task, vae=options.vae)
        samples = read_samples(options, model)
        encoders = dict(latent_encoders(options, model, options.clip))
        encoders |= dict.fromkeys(TEXT_KINDS, text_encoder(self.text_step()))
        folders = [Folder(path) for path in by_cache_folder(samples)]
        found = {}
        for kind, encoder in encoders.items():
            for need in judge(folders, samples, kind, encoder):
                verdict = need.verdict
                found[f"{kind} {need.recipe.name}"] = (verdict.state, verdict.reason)
        return found

    def edit(self, text: str, new: str) -> None:
        toml = self.bundle.toml.read_text(encoding="utf-8")
        assert text in toml
        self.bundle.toml.write_text(toml.replace(text, new), encoding="utf-8")


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Bundle:
    """Three photos and a clip, with all that image-to-video needs; tests work on copies."""
    from importlib.resources import files

    bundle = Bundle(tmp_path_factory.mktemp("matrix") / "bundle", models)
    example = files("wangen.examples").joinpath("dataset")
    for folder, name in (*(("photos", name) for name in PHOTO_NAMES), ("clips", f"{CLIP}.mp4")):
        (bundle.folder / folder).mkdir(parents=True, exist_ok=True)
        (bundle.folder / folder / name).write_bytes(example.joinpath(name).read_bytes())
        stem = name.rpartition(".")[0]
        (bundle.folder / folder / f"{stem}.txt").write_text(f"a photo of {stem}", encoding="utf-8")
    relative_toml(bundle)
    Dataset(bundle).make()
    return bundle


def relative_toml(bundle: Bundle) -> None:
    write_toml(bundle)
    text = bundle.toml.read_text(encoding="utf-8").replace(f"{bundle.folder.as_posix()}/", "")
    bundle.toml.write_text(text, encoding="utf-8")


@pytest.fixture
def dataset(cached: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    monkeypatch.setattr("wangen.runtime.sources.YOUNG_NS", 0)
    copy = Bundle(tmp_path / "bundle", cached.models)
    shutil.copytree(cached.folder, copy.folder)
    found = Dataset(copy)
    assert {name: state for name, (state, _) in found.verdicts().items()} == dict.fromkeys(EVERYTHING, "valid")
    return found


# What must make entries stale


def other_pixels(dataset: Dataset) -> None:
    """The same name, size in pixels, size in bytes and time, but another picture."""
    path = dataset.bundle.photos / "cat.jpg"
    before = path.stat()
    with Image.open(path) as image:
        image.rotate(180).save(path, quality=60)
    data = path.read_bytes()
    path.write_bytes(data[: before.st_size].ljust(before.st_size, b"\0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def other_caption(dataset: Dataset) -> None:
    (dataset.bundle.photos / "cat.txt").write_text("a dog after all", encoding="utf-8")


def other_resolution(dataset: Dataset) -> None:
    dataset.edit("resolution = [64, 64]", "resolution = [96, 96]")


def other_crop(dataset: Dataset) -> None:
    dataset.edit("enable_bucket = true", "enable_bucket = false")


def other_window(dataset: Dataset) -> None:
    dataset.edit("target_frames = [5]", "target_frames = [9]")


def other_source_fps(dataset: Dataset) -> None:
    dataset.edit("target_frames = [5]", "target_frames = [5]\nsource_fps = 12")


def other_vae(dataset: Dataset) -> None:
    dataset.latents["vae"] = write_tiny_wan(dataset.bundle.folder / "other", ["x"], seed=9)["vae"]


def other_vae_tile(dataset: Dataset) -> None:
    dataset.latents["vae_tile"] = 128


def other_t5(dataset: Dataset) -> None:
    dataset.texts["t5"] = write_tiny_wan(dataset.bundle.folder / "other", ["x"], seed=9)["t5"]


def other_vae_dtype(dataset: Dataset) -> None:
    dataset.latents["vae_dtype"] = "bfloat16"


def other_t5_dtype(dataset: Dataset) -> None:
    dataset.texts["t5_dtype"] = "bfloat16"


def other_clip_dtype(dataset: Dataset) -> None:
    dataset.latents["clip_dtype"] = "float16"


CHANGES: list[tuple[Callable[[Dataset], None], set[str], str]] = [
    (other_pixels, {f"{kind} cat.jpg" for kind in ("latent", "image_latent", "clip")}, "the file's content changed"),
    (other_caption, {"text_encoder_output cat.jpg"}, "the caption changed"),
    (other_resolution, IMAGES | CLIPS, "size changed"),
    (other_source_fps, CLIPS, "source_fps"),
    (other_vae, {name for name in IMAGES | CLIPS if not name.startswith("clip ")}, "another VAE"),
    (other_vae_tile, {name for name in IMAGES | CLIPS if not name.startswith("clip ")}, "another VAE"),
    (other_vae_dtype, {name for name in IMAGES | CLIPS if not name.startswith("clip ")}, "bfloat16"),
    (other_t5, TEXTS | EMPTY, "another text encoder"),
    (other_t5_dtype, TEXTS | EMPTY, "bfloat16"),
    (other_clip_dtype, {name for name in IMAGES | CLIPS if name.startswith("clip ")}, "float16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "stale", "reason"), CHANGES, ids=[change.__name__ for change, *_ in CHANGES])
def test_a_change_makes_exactly_what_depends_on_it_stale(
    dataset: Dataset, change: Callable[[Dataset], None], stale: set[str], reason: str
):
    change(dataset)
    verdicts = dataset.verdicts()
    assert verdicts.keys() == EVERYTHING
    assert {name for name, (state, _) in verdicts.items() if state != "valid"} == stale
    assert {verdicts[name][0] for name in stale} == {"stale"}
    assert all(reason in verdicts[name][1] for name in stale), {verdicts[name][1] for name in stale}
    dataset.make()
    assert {state for state, _ in dataset.verdicts().values()} == {"valid"}


def test_another_crop_changes_the_items_that_it_crops_otherwise(dataset: Dataset):
    def sizes() -> dict[str, tuple[int, int]]:
        options = dataset.step()
        samples = read_samples(options, model_of_cache(options.task, vae=options.vae))
        return {sample.name: sample.size for sample in samples}

    before = sizes()
    other_crop(dataset)
    cropped = {name for name, size in sizes().items() if size != before[name]}
    assert cropped
    verdicts = dataset.verdicts()
    stale = {name for name, (state, _) in verdicts.items() if state != "valid"}
    assert stale == {f"{kind} {name}" for kind in ("latent", "image_latent", "clip") for name in cropped}


def test_a_longer_window_needs_new_latents_and_keeps_the_view_of_the_first_frame(dataset: Dataset):
    other_window(dataset)
    verdicts = dataset.verdicts()
    longer = WINDOW.replace("0+5", "0+9")
    invalid = {name for name, (state, _) in verdicts.items() if state != "valid"}
    assert invalid == {f"latent {longer}", f"image_latent {longer}"}
    assert [state for name, (state, _) in verdicts.items() if name.startswith(f"clip {CLIP}")] == ["valid"]


@pytest.mark.parametrize("kind", ["latent", "image_latent", "clip", "text_encoder_output", "empty_text_encoder_output"])
def test_a_new_recipe_version_makes_its_kind_stale_and_no_other(
    dataset: Dataset, kind: str, monkeypatch: pytest.MonkeyPatch
):
    versions = {name: version + (name == kind) for name, version in cache.RECIPE_VERSIONS.items()}
    monkeypatch.setattr("wangen.runtime.cache.recipes.RECIPE_VERSIONS", versions)
    verdicts = dataset.verdicts()
    assert {name for name, (state, _) in verdicts.items() if state != "valid"} == {
        name for name in EVERYTHING if name.startswith(f"{kind} ")
    }
    assert {verdicts[name][1] for name in EVERYTHING if name.startswith(f"{kind} ")} == {
        "made by an older version of the encoding code"
    }


@pytest.mark.slow
def test_text_to_video_uses_the_entries_of_image_to_video_and_image_to_video_adds_only_its_own(
    models: dict[str, Path], dataset: Dataset
):
    for path in dataset.bundle.folder.rglob("*.safetensors"):
        if ".image_latent." in path.name or ".clip." in path.name:
            path.unlink()
    before = dataset.bundle.files()
    for task, clip, invalid in (
        ("t2v-14B", None, set()),
        ("i2v-14B", None, {name for name in IMAGES | CLIPS if name.startswith("image_latent ")}),
        ("i2v-14B", CLIP_WEIGHTS, {name for name in IMAGES | CLIPS if name.startswith("clip ")}),
    ):
        dataset.latents |= {"task": task, "clip": clip}
        verdicts = dataset.verdicts()
        assert {name for name, (state, _) in verdicts.items() if state == "missing"} == invalid
        assert {state for name, (state, _) in verdicts.items() if name not in invalid} == {"valid"}
        dataset.make()
    after = dataset.bundle.files()
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 8


# What must not matter


def moved(dataset: Dataset) -> None:
    folder = dataset.bundle.folder
    new = folder.with_name("elsewhere") / "deeper"
    new.parent.mkdir()
    folder.rename(new)
    dataset.bundle = Bundle(new, dataset.bundle.models)


def renamed_parent(dataset: Dataset) -> None:
    dataset.bundle.photos.rename(dataset.bundle.folder / "pictures")
    dataset.edit("image_directory = 'photos'", "image_directory = 'pictures'")


def renamed_file(dataset: Dataset) -> None:
    for path in sorted(dataset.bundle.photos.glob("cat.*")):
        path.rename(path.with_stem("Katze"))


def touched(dataset: Dataset) -> None:
    for path in dataset.bundle.folder.rglob("*"):
        os.utime(path, ns=(1, 1))


def backslashes(dataset: Dataset) -> None:
    """The memo and the index as a Windows machine would have written them."""
    for path in dataset.bundle.folder.rglob(".wangen-*"):
        path.write_bytes(path.read_bytes().replace(b"../photos/", b"..\\\\photos\\\\"))


def other_machine(dataset: Dataset) -> None:
    """The folder without what only saves time there, and with new inodes."""
    folder = dataset.bundle.folder
    quick = shutil.ignore_patterns(".wangen-sources*", ".wangen-index*")
    shutil.copytree(folder, folder.with_name("copy"), ignore=quick)
    dataset.bundle = Bundle(folder.with_name("copy"), dataset.bundle.models)


def other_name_of_weights(dataset: Dataset) -> None:
    dataset.latents["vae"] = dataset.bundle.folder / "renamed_vae.pth"
    shutil.copy(dataset.bundle.models["vae"], dataset.latents["vae"])


def same_caption_elsewhere(dataset: Dataset) -> None:
    """A fourth picture with the cat's caption: its latents are new, its text is there."""
    shutil.copy(dataset.bundle.photos / "cat.txt", dataset.bundle.photos / "kitten.txt")
    Image.new("RGB", (64, 64), "red").save(dataset.bundle.photos / "kitten.png")


@pytest.mark.parametrize(
    "change", [moved, renamed_parent, renamed_file, touched, backslashes, other_machine, other_name_of_weights]
)
def test_what_changes_no_byte_of_an_entry_makes_none_stale(
    dataset: Dataset, change: Callable[[Dataset], None], monkeypatch: pytest.MonkeyPatch
):
    change(dataset)
    assert {state for state, _ in dataset.verdicts().values()} == {"valid"}
    before = dataset.bundle.files()
    dataset.make()
    assert dataset.bundle.files() == before


def test_the_caption_of_another_item_is_not_encoded_again(dataset: Dataset):
    same_caption_elsewhere(dataset)
    verdicts = dataset.verdicts()
    invalid = {name for name, (state, _) in verdicts.items() if state != "valid"}
    assert invalid == {f"{kind} kitten.png" for kind in ("latent", "image_latent", "clip")}


def test_the_same_captions_in_another_dataset_give_the_same_entries(dataset: Dataset, tmp_path: Path):
    other = Bundle(tmp_path / "second", dataset.bundle.models)
    other.photos.mkdir(parents=True)
    Image.new("RGB", (80, 48), "blue").save(other.photos / "new.png")
    shutil.copy(dataset.bundle.photos / "cat.txt", other.photos / "new.txt")
    write_toml(other, clips=False)
    second = replace(dataset, bundle=other)
    second.make()
    first = {name.rpartition("/")[2]: data for name, data in dataset.bundle.files().items() if "photos" in name}
    new = {name.rpartition("/")[2]: data for name, data in other.files().items()}
    texts = {name for name in new if "text_encoder_output" in name}
    assert len(texts) == 2  # the caption, and the empty prompt
    assert texts <= first.keys()
