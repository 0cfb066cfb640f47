"""`check_cache`: its verdicts, and that it judges what training takes."""

import importlib.metadata
from pathlib import Path

import pytest
from cached_bundle import Bundle, entry_files, uncached

from wangen import profiles
from wangen.generator.cli import main
from wangen.generator.errors import WangenError
from wangen.generator.steps import CheckCache
from wangen.runtime import cache_latents
from wangen.runtime.cache import Folder
from wangen.runtime.loader import find_entries
from wangen.runtime.needs import vae_dtype
from wangen.runtime.samples import read_samples
from wangen.runtime.tiny import write_tiny_wan

pytest_plugins = ("bundle_fixtures",)
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
    """Training takes the last run's encoder; a half-finished change of precision must not pass."""
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
    assert table(capsys.readouterr().err)["latent"] == [1, 2, 1, 0]


def both_precisions(bundle: Bundle) -> None:
    """Every text and every latent, the latents in float32 and, from the last run, in bfloat16."""
    bundle.text()
    bundle.latents()
    bundle.latents("--vae_dtype", "bfloat16", "--keep_cache")


def trained_dtypes(bundle: Bundle) -> set[str]:
    cached = find_entries(read_samples(CheckCache(dataset_config=bundle.toml), profiles.model("t2v-1.3B")), bundle.toml)
    return {sample.latent.encoder.dtype for sample in cached}


def test_training_takes_what_the_last_caching_run_made(bundle: Bundle):
    both_precisions(bundle)
    assert bundle.check("--vae_dtype", "bfloat16") == 0
    assert trained_dtypes(bundle) == {"bfloat16"}
    bundle.latents("--keep_cache")
    assert bundle.counts("cache_latents")["computed"] == 0
    assert bundle.check("--vae_dtype", "float32") == 0
    assert trained_dtypes(bundle) == {"float32"}


def test_entries_that_training_would_not_take_do_not_pass(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    both_precisions(bundle)
    capsys.readouterr()
    assert bundle.check("--vae_dtype", "float32") == 1
    message = capsys.readouterr().err
    assert table(message)["latent"] == [4, 0, 0, 0]
    assert "in float32 is there, but training takes those of the last caching run" in message


def test_two_encoders_without_a_claim_are_refused_with_the_cure(bundle: Bundle, capsys: pytest.CaptureFixture[str]):
    both_precisions(bundle)
    for claim in bundle.folder.rglob(".wangen-needs-*.latent.json"):
        claim.unlink()
    with pytest.raises(WangenError, match=r"[0-9a-f]{8} in bfloat16, [0-9a-f]{8} in float32") as raised:
        trained_dtypes(bundle)
    assert "run the caching step again without --keep_cache" in raised.value.cure
    capsys.readouterr()
    assert bundle.check() == bundle.check("--vae_dtype", "bfloat16") == 1
    assert capsys.readouterr().err.count("it is open which to take") == 2
    bundle.latents()
    assert bundle.check() == 0
    assert trained_dtypes(bundle) == {"float32"}


def test_a_run_that_was_killed_before_it_wrote_counts_as_the_last(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    bundle.text()
    bundle.latents()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_latents, "_encode", stop)
    assert main(bundle.latents_line("--vae_dtype", "bfloat16")) == 1
    with pytest.raises(WangenError, match="encoded in float32, wanted in bfloat16"):
        trained_dtypes(bundle)


def test_a_long_list_of_problems_is_cut(unbroken: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bundle = uncached(unbroken, tmp_path / "bundle")
    assert bundle.check() == 1
    message = capsys.readouterr().err
    assert message.count("not encoded yet") == 20
    assert "… and 120 more" in message
    with pytest.raises(WangenError, match="… and 120 more"):
        trained_dtypes(bundle)


# ROCm


def test_on_rocm_both_steps_mean_float32(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Scripts pass `--vae_dtype bfloat16` to both steps on every platform."""
    pretend_torch(monkeypatch, "2.9.1+rocm6.4")
    bundle.text()
    bundle.latents("--vae_dtype", "bfloat16")
    assert "ROCm: the VAE runs in float32; bfloat16 gives" in capsys.readouterr().err
    assert bundle.check("--vae_dtype", "bfloat16") == 0
    assert trained_dtypes(bundle) == {"float32"}
    bundle.latents()
    assert "ROCm" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "asked", "dtype"),
    [
        ("2.9.1+rocm6.4", "bfloat16", "float32"),
        ("2.9.1+rocm6.4", None, None),
        ("2.9.1+cu128", "bfloat16", "bfloat16"),
        ("2.9.1", "float16", "float16"),
        (None, "bfloat16", "bfloat16"),
    ],
)
def test_the_precision_of_the_vae_needs_no_torch(
    monkeypatch: pytest.MonkeyPatch, version: str | None, asked: str | None, dtype: str | None
):
    pretend_torch(monkeypatch, version)
    assert vae_dtype(asked) == dtype


def pretend_torch(monkeypatch: pytest.MonkeyPatch, installed: str | None) -> None:
    version = importlib.metadata.version

    def pretended(name: str) -> str:
        if name == "torch" and installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed if name == "torch" and installed else version(name)

    monkeypatch.setattr(importlib.metadata, "version", pretended)
