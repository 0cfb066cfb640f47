"""Training where weights are given that did not make the cache: `auto` makes their entries, `cached` says it."""

import logging
import shutil
from pathlib import Path

import pytest
from edit_set import EditSet, make_edit_set
from safetensors.torch import load_file, save_file
from tiny_qwen import TinyQwen

from wangen import profiles
from wangen.generator.errors import UsageError, WangenError
from wangen.runtime.loader import CachedSample, cache_use, find_entries
from wangen.runtime.samples import read_samples

pytestmark = pytest.mark.slow

TASK = "qwen-image-edit"
ENCODED_BY_OTHERS = "encoded with another text encoder or tokenizer"


@pytest.fixture(scope="module")
def edits(tiny_qwen: TinyQwen, tmp_path_factory: pytest.TempPathFactory) -> EditSet:
    """A filled dataset; tests must not change it."""
    return make_edit_set(tmp_path_factory.mktemp("edits") / "set", tiny_qwen, TASK).fill()


@pytest.fixture(scope="module")
def others(tiny_qwen: TinyQwen, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A text encoder and a VAE with other values."""
    folder = tmp_path_factory.mktemp("others")
    shutil.copytree(tiny_qwen.single["t5"].parent / "processor", folder / "processor")
    made = {flag: folder / tiny_qwen.single[flag].name for flag in ("t5", "vae")}
    for flag, path in made.items():
        save_file({name: value * 0.9 for name, value in load_file(tiny_qwen.single[flag]).items()}, path)
    return made


def copy_of(edits: EditSet, folder: Path) -> EditSet:
    shutil.copytree(edits.folder, folder)
    made = EditSet(folder, edits.tiny, edits.task)
    made.toml.write_text(made.toml.read_text().replace(edits.folder.as_posix(), folder.as_posix()))
    return made


def found(made: EditSet, folder: Path, **changes) -> list[CachedSample]:
    model = profiles.model(made.task)
    return find_entries(made.train(folder, caption_dropout=0.3, **changes), model, read_samples(made.check, model))


def embedding(cached: CachedSample):
    entry = cached.texts[0]
    return entry.tensors["embedding"] if hasattr(entry, "tensors") else load_file(entry.path)["embedding"]


def test_auto_makes_the_embeddings_of_the_text_encoder_that_it_is_given(edits, others, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "wangen"):
        taken = found(edits, tmp_path, cache_mode="auto", t5=others["t5"])
    assert cache_use(taken) == (6, 6)  # latents of targets and control images; prompts and empty prompts
    for kind in ("text_encoder_output", "empty_text_encoder_output"):
        assert f"3 to encode, {kind}: {ENCODED_BY_OTHERS}" in caplog.text
    live = found(edits, tmp_path, cache_mode="realtime", t5=others["t5"], vae=edits.tiny.single["vae"],
                 t5_dtype="float32", vae_dtype="float32")  # fmt: skip
    assert all(embedding(one).equal(embedding(two)) for one, two in zip(taken, live, strict=True))
    assert cache_use(found(edits, tmp_path, cache_mode="auto", **edits.tiny.single)) == (12, 0)


def test_auto_makes_only_the_entries_that_the_given_encoder_did_not_make(edits, others, tmp_path):
    made = copy_of(edits, tmp_path / "set")
    made.texts(t5=others["t5"], keep_cache=True)
    (made.folder / "targets" / "lake.txt").write_text("drain the lake", encoding="utf-8")
    made.texts(keep_cache=True)
    taken = found(made, tmp_path, cache_mode="auto", t5=others["t5"])
    assert cache_use(taken).computed == 1
    assert [hasattr(cached.texts[0], "tensors") for cached in taken] == [
        cached.sample.name == "lake.png" for cached in taken
    ]


@pytest.mark.parametrize(
    ("changes", "computed"),
    [({"t5_dtype": "bfloat16"}, 6), ({"t5_dtype": "float32"}, 0), ({"fp8_t5": True}, 6)],
)
def test_the_precision_that_is_asked_for_counts_and_else_that_of_the_cache(edits, tmp_path, changes, computed):
    taken = found(edits, tmp_path, cache_mode="auto", t5=edits.tiny.single["t5"], **changes)
    assert cache_use(taken).computed == computed


def test_auto_to_disk_leaves_the_new_embeddings_in_the_cache(edits, others, tmp_path):
    made = copy_of(edits, tmp_path / "set")
    given = {"cache_mode": "auto", "t5": others["t5"]}
    found(made, tmp_path, cache_latents_to_disk=True, **given)
    assert cache_use(found(made, tmp_path, **given)) == (12, 0)


def test_latents_that_a_vae_made_in_tiles_are_its_own(edits, others, tmp_path):
    made = copy_of(edits, tmp_path / "set")
    made.latents(vae_tile=128)
    assert cache_use(found(made, tmp_path, cache_mode="auto", vae=made.tiny.single["vae"])).computed == 0
    assert cache_use(found(made, tmp_path, cache_mode="auto", vae=others["vae"])).computed == 6


@pytest.mark.parametrize(("flag", "step"), [("vae", "cache_latents"), ("t5", "cache_text")])
def test_cached_trains_on_what_is_there_and_says_that_it_is_not_of_the_given_weights(
    edits, others, tmp_path, caplog, flag, step
):
    assert cache_use(found(edits, tmp_path, **edits.tiny.single, fp8_t5=True)).computed == 0
    assert not caplog.text
    assert cache_use(found(edits, tmp_path, **{flag: others[flag]})).computed == 0
    (line,) = caplog.messages
    assert f"--{flag} {others[flag]}, and are taken as they are: run {step} with it first" in line


def test_auto_without_weights_is_cached(edits, tmp_path):
    assert cache_use(found(edits, tmp_path, cache_mode="auto")) == (12, 0)
    made = copy_of(edits, tmp_path / "set")
    next(made.folder.glob("cache/lake*.latent.safetensors")).unlink()
    told = []
    for mode in ("cached", "auto"):
        with pytest.raises(WangenError, match="the cache lacks 1 entry") as error:
            found(made, tmp_path, cache_mode=mode)
        told.append(str(error.value))
    assert told[0] == told[1]
    with pytest.raises(UsageError, match="--cache_mode auto needs --vae"):
        found(made, tmp_path, cache_mode="auto", t5=made.tiny.single["t5"])
