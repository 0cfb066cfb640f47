"""`check_cache`: its verdicts, and that it judges what training takes."""

from pathlib import Path

import pytest
from cached_bundle import Bundle, entry_files

from wangen.generator.cli import main
from wangen.runtime.cache import Folder
from wangen.runtime.tiny import write_tiny_wan

pytest_plugins = ("cached_bundle",)
pytestmark = pytest.mark.usefixtures("one_thread")


def table(message: str) -> dict[str, list[int]]:
    """Kind -> numbers of valid, stale, missing and corrupt entries, from the printed table."""
    rows = [line.split() for line in message.splitlines() if line.startswith(("  latent ", "  text_encoder"))]
    return {row[0]: [int(number) for number in row[1:]] for row in rows}


def test_check_cache_prints_what_is_missing_stale_and_corrupt(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    assert bundle.check() == 1
    assert table(capsys.readouterr().err) == {"latent": [0, 0, 4, 0], "text_encoder_output": [0, 0, 4, 0]}
    bundle.latents()
    bundle.text()
    capsys.readouterr()
    assert bundle.check("--deep") == 0
    assert table(capsys.readouterr().err) == {"latent": [4, 0, 0, 0], "text_encoder_output": [4, 0, 0, 0]}

    (bundle.photos / "coffee.txt").write_text("a cup", encoding="utf-8")
    latents = [path for path in entry_files(bundle.folder) if ".latent." in path.name]
    latents[0].write_bytes(latents[0].read_bytes()[:-5])
    latents[1].unlink()
    flipped = bytearray(latents[2].read_bytes())
    flipped[-2] ^= 4
    latents[2].write_bytes(flipped)
    assert bundle.check() == 1
    message = capsys.readouterr().err
    assert table(message) == {"latent": [2, 0, 1, 1], "text_encoder_output": [3, 1, 0, 0]}
    assert "coffee.jpg: text_encoder_output is stale, the caption changed" in message
    assert bundle.check("--deep") == 1
    assert table(capsys.readouterr().err)["latent"] == [1, 0, 1, 2]
    bundle.latents()
    bundle.text()
    assert bundle.check("--deep") == 1  # the step itself judges headers alone and kept the flipped payload
    bundle.latents("--recache")
    assert bundle.check("--deep") == 0


def test_check_cache_judges_by_the_weights_it_is_given(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bundle.latents()
    bundle.text()
    other = write_tiny_wan(tmp_path / "other", ["x"], seed=9)
    assert bundle.check("--vae", str(bundle.models["vae"]), "--t5", str(bundle.models["t5"])) == 0
    assert bundle.check("--vae", str(other["vae"])) == 1
    assert "encoded with another VAE" in capsys.readouterr().err
    assert bundle.check("--t5", str(other["t5"])) == 1
    assert "another text encoder or tokenizer" in capsys.readouterr().err
    assert bundle.check("--vae_dtype", "bfloat16") == 1
    assert "encoded in float32, wanted in bfloat16" in capsys.readouterr().err


def test_entries_of_two_precisions_are_not_all_it_needs(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    """Training takes one encoder's entries; a half-finished change of precision must not pass."""
    bundle.latents()
    entry_files(bundle.folder / "clips_cache")[0].unlink()
    bundle.text()
    assert main([*bundle.latents_line("--keep_cache")[:-2], "bfloat16", "--keep_cache"]) == 0
    for path in entry_files(bundle.folder / "clips_cache"):
        if ".latent." in path.name:
            path.unlink()
    for entry in Folder(bundle.folder / "photos_cache").all_entries:
        if entry.kind == "latent" and (entry.encoder.dtype == "float32") == (entry.name == "cat.jpg"):
            entry.path.unlink()
    capsys.readouterr()
    assert bundle.check() == 1
    assert table(capsys.readouterr().err)["latent"] == [2, 1, 1, 0]
