"""The caching step for other tasks: control media, the 5B's VAE, conditions of single images, and what it says."""

import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_bundle import Bundle, entry_files
from helpers import make_clip, make_image

from wangen import profiles
from wangen.generator.cli import main
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import CacheLatents, Train
from wangen.runtime import cache_latents
from wangen.runtime.cache import Entry, Folder, load
from wangen.runtime.cache.claims import Claims
from wangen.runtime.loader import find_entries
from wangen.runtime.models import model_of_cache, wan
from wangen.runtime.samples import read_samples

pytest_plugins = ("bundle_fixtures",)
pytestmark = pytest.mark.usefixtures("one_thread")

VECTORS = Path(__file__).parent / "vectors"
VAE22 = VECTORS / "vae22" / "Wan2.2_VAE.pth"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A picture and a clip, each with a control beside it."""
    for name in ("photos", "photo_controls", "clips", "clip_controls"):
        (tmp_path / name).mkdir()
    make_image(tmp_path / "photos" / "a.png", (64, 64), seed=1)
    make_image(tmp_path / "photo_controls" / "a.png", (64, 64), seed=2)
    make_clip(tmp_path / "clips" / "b.mp4", num_frames=9, fps=16, size=(64, 64))
    make_clip(tmp_path / "clip_controls" / "b.mp4", num_frames=12, fps=16, size=(64, 64))
    for name in ("photos/a.txt", "clips/b.txt"):
        (tmp_path / name).write_text("something", encoding="utf-8")
    return tmp_path


def step(
    folder: Path, models: dict[str, Path], *, frames: int = 5, control: bool = True, **changes: Any
) -> CacheLatents:
    blocks = ""
    for media, name in (("image", "photo"), ("video", "clip")):
        blocks += f"[[datasets]]\n{media}_directory = '{(folder / name).as_posix()}s'\n"
        blocks += f"cache_directory = '{folder.as_posix()}/{name}s_cache'\nresolution = 64\n"
        blocks += f"control_directory = '{(folder / name).as_posix()}_controls'\n" if control else ""
        blocks += f"target_frames = [{frames}]\n" if media == "video" else ""
    config = folder / "set.toml"
    config.write_text(blocks, encoding="utf-8")
    return replace(CacheLatents(dataset_config=config, vae=models["vae"], vae_dtype="float32", device="cpu"), **changes)


def entries(folder: Path) -> dict[str, Entry]:
    found = [entry for path in folder.glob("*_cache") for entry in Folder(path, deep=True).all_entries]
    return {f"{entry.kind} {entry.name}": entry for entry in found}


def test_control_media_are_encoded_beside_their_targets_and_judged_apart(folder: Path, models: dict[str, Path]):
    report = cache_latents.run(step(folder, models))
    assert report.counts["computed"] == 4
    found = entries(folder)
    assert found.keys() == {
        f"{kind} {name}" for kind in ("latent", "control_latent") for name in ("a.png", "b.mp4:0+5")
    }
    for name in ("a.png", "b.mp4:0+5"):
        target, control = (load(found[f"{kind} {name}"])["latent"] for kind in ("latent", "control_latent"))
        assert target.shape == control.shape
        assert torch.equal(target, control) == (name != "a.png")  # the two drawn clips begin alike
    make_image(folder / "photo_controls" / "a.png", (64, 64), seed=3)
    again = cache_latents.run(step(folder, models))
    assert (again.counts["computed"], again.counts["from_cache"]) == (1, 3)
    assert list(again.counts["why"]) == ["control_latent: the file's content changed"]


def test_the_latent_of_a_control_is_that_of_the_same_picture_as_a_target(folder: Path, models: dict[str, Path]):
    (folder / "photo_controls" / "a.png").write_bytes((folder / "photos" / "a.png").read_bytes())
    cache_latents.run(step(folder, models))
    found = entries(folder)
    target, control = (load(found[f"{kind} a.png"])["latent"] for kind in ("latent", "control_latent"))
    assert torch.equal(target, control)


def test_the_5b_has_the_22_vae_its_frame_rate_and_buckets_of_32(folder: Path, models: dict[str, Path]):
    given = step(folder, models, control=False, vae=VAE22)
    cache_latents.run(given)
    found = entries(folder)
    assert found.keys() == {"latent a.png", "latent b.mp4:0+5"}
    assert load(found["latent a.png"])["latent"].shape == (48, 1, 4, 4)
    assert load(found["latent b.mp4:0+5"])["latent"].shape == (48, 2, 4, 4)
    assert found["latent b.mp4:0+5"].content["fps"] == 24
    text = given.dataset_config.read_text(encoding="utf-8").replace(
        "resolution = 64", "resolution = 80\nenable_bucket = true"
    )
    given.dataset_config.write_text(text, encoding="utf-8")
    sizes = {sample.size for sample in read_samples(given, model_of_cache(None, vae=VAE22))}
    assert all(side % 32 == 0 for size in sizes for side in size)
    assert cache_latents.run(replace(given, task="ti2v-5B", i2v=True)).counts["computed"] == 2, "it has no condition"


def test_the_condition_of_a_single_image_is_its_latent_and_never_encoded(
    folder: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    cache_latents.run(step(folder, models, control=False, task="t2v-14B"))
    (folder / "clips" / "b.mp4").unlink()
    (folder / "clips" / "b.txt").unlink()
    config = step(folder, models, control=False, task="i2v-A14B").dataset_config
    config.write_text(config.read_text(encoding="utf-8").partition("[[datasets]]\nvideo")[0], encoding="utf-8")
    monkeypatch.setattr(wan, "load_latent_encoder", lambda *_words, **_names: pytest.fail("the VAE was loaded"))
    given = CacheLatents(dataset_config=config, vae=models["vae"], vae_dtype="float32", device="cpu", task="i2v-A14B")
    assert cache_latents.run(given).counts["computed"] == 1
    found = entries(folder)
    assert torch.equal(load(found["latent a.png"])["latent"], load(found["image_latent a.png"])["latent"])
    assert [line for line in caplog.messages if "the condition is the very image" in line]


@pytest.mark.parametrize(
    ("flags", "task"), [({}, "t2v-14B"), ({"i2v": True}, "i2v-14B"), ({"clip": Path("c")}, "i2v-14B")]
)
def test_without_a_task_the_flags_and_the_vae_tell_it(models: dict[str, Path], flags: dict[str, Any], task: str):
    i2v = bool(flags)
    assert model_of_cache(None, vae=models["vae"], i2v=i2v).name == task
    assert model_of_cache(None, vae=VAE22, i2v=i2v).name == "ti2v-5B"


def test_a_task_that_contradicts_the_flags_or_the_vae_is_refused(models: dict[str, Path]):
    with pytest.raises(UsageError, match="t2v-14B has no first frame"):
        model_of_cache("t2v-14B", vae=models["vae"], i2v=True)
    with pytest.raises(WangenError, match=r"Wan 2\.2 VAE"):
        model_of_cache("i2v-14B", vae=VAE22)
    with pytest.raises(UsageError, match="the first and the last frame"):
        model_of_cache("flf2v-14B")


def test_out_of_memory_is_one_message_with_the_remedies_in_order_and_what_was_encoded_stays(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from wangen.runtime.fast.vae import VaeEncoder

    encode = VaeEncoder.encode

    def full(self: VaeEncoder, video: torch.Tensor, **memory: Any) -> torch.Tensor:
        if video.shape[2] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")  # no GPU here to fill for real
        return encode(self, video, **memory)

    monkeypatch.setattr(VaeEncoder, "encode", full)
    assert main(bundle.latents_line()) == 1
    message = capsys.readouterr().err
    assert "out of memory encoding big-buck-bunny.mp4:0+5 (5 frames of " in message
    assert message.index("--batch_size 1") < message.index("--vae_cache_cpu") < message.index("--tile 256")
    assert message.count("out of memory") == 1
    assert len(entry_files(bundle.folder)) == 3


@pytest.mark.slow
def test_a_latent_that_leaves_float16_is_encoded_in_float32(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from wangen.runtime.fast.vae import VaeEncoder

    encode = VaeEncoder.encode

    def overflowing(self: VaeEncoder, video: torch.Tensor, **memory: Any) -> torch.Tensor:
        latents = encode(self, video, **memory)
        return latents * math.inf if self.dtype == torch.float16 else latents

    monkeypatch.setattr(VaeEncoder, "encode", overflowing)
    options = CacheLatents(
        dataset_config=bundle.toml, vae=bundle.models["vae"], vae_dtype="float16", device="cpu", num_workers=0
    )
    cache_latents.run(options)
    assert [line for line in caplog.messages if "cat.jpg leaves the range of float16" in line]
    for entry in bundle.entries().values():
        latent = load(entry)["latent"]
        assert latent.dtype == torch.float16
        assert latent.isfinite().all()
        assert entry.encoder.dtype == "float16"


@pytest.mark.parametrize("mode", ["image", "video"])
def test_debug_mode_writes_a_contact_sheet_and_encodes_nothing(
    bundle: Bundle, mode: str, capsys: pytest.CaptureFixture[str]
):
    assert main(bundle.latents_line("--debug_mode", mode)) == 0
    page = bundle.toml.parent / "set_sheet" / "index.html"
    assert "open " in capsys.readouterr().err
    text = page.read_text(encoding="utf-8")
    assert all(name in text for name in ("astronaut.jpg", "cat.jpg", "coffee.jpg", "big-buck-bunny.mp4"))
    assert not entry_files(bundle.folder)


@pytest.mark.slow
def test_a_batch_of_which_another_process_makes_some_kinds_is_parted(folder: Path, models: dict[str, Path]):
    for number in range(3):
        make_clip(folder / "clips" / f"c{number}.mp4", num_frames=9, fps=16, size=(64, 64))
        (folder / "clips" / f"c{number}.txt").write_text(f"clip {number}", encoding="utf-8")
    for path in (folder / "clips").glob("c*.mp4"):  # equal frames in files that differ
        path.write_bytes(path.read_bytes() + path.stem.encode())
    given = step(folder, models, control=False, task="i2v-A14B", batch_size=4)
    cache_latents.run(given)
    whole = {path.name: path.read_bytes() for path in (folder / "clips_cache").glob("*.safetensors")}
    for path in (folder / "clips_cache").glob("c1*.image_latent.*"):
        key = path.name.rsplit(".", 2)[0][-20:]
    for path in (folder / "clips_cache").glob("*.safetensors"):
        path.unlink()
    other = Claims(folder / "clips_cache")
    assert other.take(key)
    threading.Timer(1.5, other.close).start()
    assert cache_latents.run(given).counts["computed"] == 8
    assert {path.name: path.read_bytes() for path in (folder / "clips_cache").glob("*.safetensors")} == whole


@pytest.mark.slow
def test_the_library_gives_the_same_entries_to_rounding(folder: Path, models: dict[str, Path]):
    given = step(folder, models, task="i2v-A14B", frames=9)
    cache_latents.run(given)
    fast = {name: load(entry)["latent"] for name, entry in entries(folder).items()}
    cache_latents.run(replace(given, plain=True, recache=True))
    plain = {name: load(entry)["latent"] for name, entry in entries(folder).items()}
    assert plain.keys() == fast.keys()
    assert len(plain) == 6
    for name, latent in plain.items():
        assert (latent - fast[name]).abs().max() <= 2e-5 * latent.abs().max(), name


def test_progress_says_how_many_bytes(bundle: Bundle, tmp_path: Path):
    bundle.latents("--log_file", str(tmp_path / "log.txt"))
    assert "4/4" in (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert "GB" in (tmp_path / "log.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_shards_of_a_dataset_are_disjoint_and_together_whole(bundle: Bundle):
    for index in range(3):
        assert main(bundle.latents_line("--shard", f"{index}/3")) == 0
        assert main(bundle.text_line("--shard", f"{index}/3")) == 0
    assert bundle.check("--deep") == 0
    assert bundle.latents()["computed"] == bundle.text()["computed"] == 0


def test_a_shard_that_is_none_is_refused(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    for text in ("4/4", "a", "1", "-1/3"):
        assert main(bundle.latents_line(f"--shard={text}")) == 2
        assert "is no part of a whole" in capsys.readouterr().err
    assert main(bundle.latents_line("--shard", "auto")) == 2
    assert "SLURM_ARRAY_TASK_ID" in capsys.readouterr().err


def test_conditions_of_another_vae_than_the_latents_are_stale(
    folder: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    cache_latents.run(step(folder, models, control=False, task="i2v-A14B"))
    given = step(folder, models, control=False, task="t2v-14B", vae=VECTORS / "vae21" / "Wan2.1_VAE.pth")
    cache_latents.run(given)
    assert main(["check_cache", "--dataset_config", str(given.dataset_config), "--task", "i2v-A14B"]) == 1
    assert "2 first-frame conditions stale: encoded with another VAE" in capsys.readouterr().err
    with pytest.raises(WangenError, match="image_latent is stale, encoded with another VAE"):
        find_entries(
            Train(dataset_config=given.dataset_config, dit=folder, task="i2v-A14B", output_dir=folder, output_name="a"),
            profiles.model("i2v-A14B"), read_samples(given, profiles.model("i2v-A14B")),
        )  # fmt: skip
