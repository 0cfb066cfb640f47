"""`wangen cache`: what it shows, and that it removes nothing but entries that are not needed."""

import errno
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cache_entries import CONTENT, ENCODER, LATENT, TEXT, put
from cached_bundle import Bundle, entry_files, write_toml
from click.testing import CliRunner
from helpers import make_clip, make_image

from wangen.generator.cli import main, wangen
from wangen.runtime import cache_tools
from wangen.runtime.cache import EmbeddingCache, Recipe
from wangen.runtime.cache.index import INDEX

pytest_plugins = ("bundle_fixtures",)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two latents, a text and a LoRA of the user's."""
    cache = tmp_path / "cache"
    put(cache, LATENT, Recipe("latent", CONTENT | {"width": 128}, "dog.jpg"), TEXT)
    (cache / "my_wan.safetensors").write_bytes(b"theirs")
    return cache


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_stats_count_by_kind_and_encoder(folder: Path, capsys: pytest.CaptureFixture[str]):
    for path in folder.glob("*.safetensors"):
        os.utime(path, (1.7e9, 1.7e9))
    (folder / LATENT.file_name(ENCODER)).with_name(f"cut-{'ab' * 10}.clip.safetensors").write_bytes(b"cut")
    assert main(["cache", "stats", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder}:"
    assert lines[1].split()[:2] == ["latent", "2"]
    assert lines[1].endswith("by abababab in float32")
    assert lines[2].split()[:2] == ["text_encoder_output", "1"]
    assert lines[3].startswith(f"  corrupt: cut-{'ab' * 10}.clip.safetensors: ")
    assert lines[4].startswith("  oldest 2023-11-1")


def test_clear_asks_and_removes_only_entries(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    before = names(folder)
    refused = CliRunner().invoke(wangen, ["cache", "clear", str(folder)], input="n\n")
    assert "remove 3 entries?" in refused.output
    assert "nothing was removed" in refused.output
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["cache", "clear", str(folder)]) == 2
    assert "give --yes" in capsys.readouterr().err
    assert names(folder) == before
    assert main(["cache", "clear", str(folder), "--kind", "latent", "--yes"]) == 0
    assert "removed 2 entries" in capsys.readouterr().out
    assert names(folder) == {"my_wan.safetensors", TEXT.file_name(ENCODER)}
    agreed = CliRunner().invoke(wangen, ["cache", "clear", str(folder)], input="y\n")
    assert "removed 1 entry" in agreed.output
    assert names(folder) == {"my_wan.safetensors"}
    assert main(["cache", "clear", str(folder), "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_what_is_wrong_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["cache", "clear", str(folder), "--kind", "latents", "--yes"]) == 2
    assert "there is no kind 'latents'" in capsys.readouterr().err
    assert main(["cache", "stats", str(tmp_path / "none")]) == 2
    assert "no folder and no dataset's TOML" in capsys.readouterr().err
    assert main(["cache", "prune", str(tmp_path / "none.toml")]) == 1
    assert main(["cache", "stat", str(folder)]) == 2
    assert "did you mean stats?" in capsys.readouterr().err
    assert main(["cache"]) == 0
    assert "prune" in capsys.readouterr().out


def test_it_needs_no_torch(folder: Path):
    code = ("import sys; from wangen.generator.cli import main; "
            "code = main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)")  # fmt: skip
    command = [sys.executable, "-c", code, "cache", "clear", str(folder), "--yes"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert names(folder) == {"my_wan.safetensors"}


def test_prune_keeps_what_any_dataset_needs(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    """An item of this dataset goes and nobody cached since; another dataset in the same folder has items of its own."""
    other = Bundle(bundle.folder / "other", bundle.models)
    make_image(other.photos / "red.png", (64, 64), seed=5)
    (other.photos / "red.txt").write_text("a red thing")
    write_toml(other, clips=False)
    other.toml.write_text(other.toml.read_text().replace(f"{other.folder.as_posix()}/photos_cache",
                                                         f"{bundle.folder.as_posix()}/photos_cache"))  # fmt: skip
    for each in (bundle, other):
        each.latents("--task", "i2v-14B")
        each.text()
    kept = bundle.files()
    assert main(["cache", "prune", str(bundle.toml), "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert bundle.files() == kept

    cache = bundle.folder / "photos_cache"
    EmbeddingCache(cache).save_cache("clip", "ab" * 32, {"clip": torch.ones(2)})
    bundle.latents("--keep_cache", "--vae_dtype", "bfloat16")
    bundle.latents("--keep_cache", "--task", "i2v-14B")
    lora = cache / "my_wan.safetensors"
    lora.write_bytes(b"theirs")
    (bundle.photos / "coffee.jpg").unlink()
    (bundle.photos / "coffee.txt").unlink()
    assert main(["cache", "prune", str(bundle.toml), "--yes"]) == 0
    gone = kept.keys() - bundle.files().keys()
    assert {Path(name).name.split("-")[0] for name in gone} == {"coffee_jpg", "text"}
    assert len(gone) == 3
    assert bundle.files().keys() == (kept.keys() - gone) | {"photos_cache/my_wan.safetensors"}
    assert lora.read_bytes() == b"theirs"
    assert bundle.check("--task", "i2v-14B") == other.check("--task", "i2v-14B") == 0


def test_a_dataset_whose_toml_was_renamed_keeps_nothing_alive(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    write_toml(bundle, clips=False)
    bundle.text()
    bundle.toml = bundle.toml.rename(bundle.folder / "renamed.toml")
    bundle.text()
    (bundle.photos / "coffee.txt").write_text("a cup", encoding="utf-8")
    assert bundle.text()["removed"] == 0, "for the step alone another dataset claims it"
    assert len(entry_files(bundle.folder)) == 5
    assert main(["cache", "prune", str(bundle.toml), "--yes"]) == 0
    assert "its TOML is gone, so it needs nothing any more: ../set.toml" in capsys.readouterr().out
    assert len(entry_files(bundle.folder)) == 4
    assert bundle.text()["from_cache"] == 4


@pytest.mark.parametrize("broken", [b"", b"{", b"[]"])
def test_what_another_dataset_needs_must_be_known(bundle: Bundle, capsys: pytest.CaptureFixture[str], broken: bytes):
    """Its claim is damaged: prune removes nothing, caching goes on, and the other's caching step mends it."""
    write_toml(bundle, clips=False)
    other = Bundle(bundle.folder, bundle.models)
    other.toml = shutil.copy(bundle.toml, bundle.folder / "other.toml")
    other.text()
    claim = next(bundle.folder.rglob(".wangen-needs-*.text_encoder_output.json"))
    bundle.text()
    (bundle.photos / "coffee.txt").write_text("a cup", encoding="utf-8")
    claim.write_bytes(broken)
    before = entry_files(bundle.folder)
    capsys.readouterr()
    assert main(["cache", "prune", str(bundle.toml), "--yes"]) == 1
    said = capsys.readouterr().err
    assert str(claim) in said
    assert "run the caching step of that dataset again" in said
    assert entry_files(bundle.folder) == before
    assert (bundle.text()["computed"], len(entry_files(bundle.folder))) == (1, len(before) + 1)
    assert capsys.readouterr().err.count("what is not needed any more stays") == 1
    other.text()
    assert main(["cache", "prune", str(bundle.toml), "--yes"]) == 0
    assert len(entry_files(bundle.folder)) == len(before)


@pytest.mark.parametrize(("name", "number"), [("big-buck-bunny.txt", 1), ("set.toml", 2)])
def test_what_cannot_be_read_this_time_is_not_pruned(
    bundle: Bundle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, number: int
):
    bundle.latents()
    before, reads, read_bytes = bundle.files(), [], Path.read_bytes

    def flaky(path: Path) -> bytes:
        reads.extend([path] if path.name == name else [])
        if path.name == name and len(reads) == number:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read_bytes(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", flaky)
        assert main(["cache", "prune", str(bundle.toml), "--yes"]) == 1
    assert "Input/output error" in capsys.readouterr().err
    assert bundle.files() == before


def test_a_clip_that_does_not_suit_a_model_costs_the_others_nothing(bundle: Bundle):
    """At 16 frames per second it is too short, at the 24 of TI2V-5B it is not."""
    bundle.latents()
    before = bundle.files()
    make_clip(bundle.folder / "clips" / "short.mp4", num_frames=6, fps=24)
    (bundle.folder / "clips" / "short.txt").write_text("a blink", encoding="utf-8")
    assert main(["cache", "prune", str(bundle.toml), "--yes"]) == 0
    assert bundle.files() == before


def test_clear_of_a_dataset_clears_its_folders(bundle: Bundle):
    bundle.latents()
    bundle.text()
    assert main(["cache", "clear", str(bundle.toml), "--kind", "text_encoder_output", "--yes"]) == 0
    assert {path.name.split(".")[-2] for path in entry_files(bundle.folder)} == {"latent", "empty_text_encoder_output"}
    assert main(["cache", "clear", str(bundle.toml), "--yes"]) == 0
    assert entry_files(bundle.folder) == []
    assert not list(bundle.folder.rglob(INDEX))


def test_clear_removes_what_is_damaged_and_names_what_cannot_be_read(folder: Path, capsys: pytest.CaptureFixture[str]):
    cut, clip = (folder / f"cut-{'ab' * 10}.{kind}.safetensors" for kind in ("latent", "clip"))
    for path in (cut, clip):
        path.write_bytes(b"cut")
    unread = folder / f"dir-{'cd' * 10}.latent.safetensors"
    unread.mkdir()
    assert main(["cache", "stats", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"  corrupt: {cut.name}: " in said
    assert f"  unreadable: {unread.name}: cannot be read: " in said
    assert main(["cache", "clear", str(folder), "--kind", "latent", "--yes"]) == 1
    said = capsys.readouterr()
    assert "removed 3 entries" in said.out
    assert cut.name in said.out
    assert f"{unread}: cannot be read: " in said.err
    assert names(folder) == {"my_wan.safetensors", TEXT.file_name(ENCODER), clip.name, unread.name}
    assert main(["cache", "clear", str(folder), "--yes"]) == 1
    assert names(folder) == {"my_wan.safetensors", unread.name}
    unread.rmdir()
    assert main(["cache", "clear", str(folder), "--yes"]) == 0


def test_a_machine_without_memory_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def full(_: Path) -> int:
        raise MemoryError

    monkeypatch.setattr(cache_tools, "stats", full)
    assert main(["cache", "stats", str(folder)]) == 1
    assert capsys.readouterr().err.startswith("wangen: the memory of this machine is full\n")
