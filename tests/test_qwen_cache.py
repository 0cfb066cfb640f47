"""The cache of edit models: what is in it, what its keys cover, and that it holds what the pipelines compute."""

import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_set import CAPTIONS, EditSet, make_edit_set
from helpers import read_tree
from PIL import Image
from tiny_qwen import TinyQwen, picture, pipeline_of, smaller

from wangen import profiles
from wangen.generator import cache_sizes
from wangen.generator.errors import UsageError, WangenError
from wangen.runtime import check_cache, room
from wangen.runtime.cache import CorruptEntryError, EmbeddingCache, Entry, Folder, Kind, load
from wangen.runtime.needs import Need
from wangen.runtime.samples import read_samples

PROFILE = profiles.model
TASKS = ("qwen-image", "qwen-image-edit", "qwen-image-edit-plus")


def entries(made: EditSet, kind: str) -> list[Entry]:
    return [entry for entry in Folder(made.folder / "cache", deep=True).all_entries if entry.kind == kind]


def embedding(made: EditSet, caption: str, *controls: Path) -> torch.Tensor:
    """The one embedding of a caption, shown these control images; none for any."""
    from wangen.runtime.sources import digest_file

    kind = "text_encoder_output" if caption else "empty_text_encoder_output"
    found = [
        entry for entry in entries(made, kind)
        if entry.content["caption"] == caption
        and (not controls or entry.content["controls"] == [digest_file(control) for control in controls])
    ]  # fmt: skip
    (entry,) = found
    tensors = load(entry)
    assert tensors["mask"].all()
    assert tensors["mask"].shape == tensors["embedding"].shape[:1]
    return tensors["embedding"]


@pytest.fixture(scope="module", autouse=True)
def small_pictures():
    """The text encoder is shown few tokens of a picture; with all of them it is in test_qwen_prompts.py."""
    with pytest.MonkeyPatch.context() as patch:
        smaller(patch, "qwen-image-edit")
        yield


@pytest.fixture(scope="module")
def edits(small_pictures, tiny_qwen: TinyQwen, tmp_path_factory: pytest.TempPathFactory) -> dict[str, EditSet]:
    """A filled dataset of each task; tests must not change them."""
    return {task: make_edit_set(tmp_path_factory.mktemp(task) / "set", tiny_qwen, task).fill() for task in TASKS}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_every_kind_is_there_once_for_all_that_it_depends_on(edits: dict[str, EditSet], task: str):
    made = edits[task]
    counts = {kind: len(entries(made, kind)) for kind in ("latent", "control_latent", "text_encoder_output",
                                                          "empty_text_encoder_output")}  # fmt: skip
    assert counts == {
        "qwen-image": {"latent": 3, "control_latent": 0, "text_encoder_output": 2, "empty_text_encoder_output": 1},
        "qwen-image-edit": {"latent": 3, "control_latent": 3, "text_encoder_output": 3, "empty_text_encoder_output": 3},
        "qwen-image-edit-plus": {
            "latent": 3, "control_latent": 4, "text_encoder_output": 3, "empty_text_encoder_output": 3,
        },
    }[task]  # fmt: skip
    report = check_cache.run(made.check)
    assert report.ok
    assert (made.latents()["computed"], made.texts()["computed"]) == (0, 0)


def test_one_prompt_and_two_control_images_are_two_embeddings_each_the_pipeline_s(edits: dict[str, EditSet]):
    made = edits["qwen-image-edit"]
    pipeline = pipeline_of("qwen-image-edit", made.tiny)
    found = []
    for stem in ("house", "hill"):
        control = made.folder / "controls" / f"{stem}.png"
        shown = pipeline.image_processor.resize(Image.open(control), 224, 320)
        for prompt in (CAPTIONS[stem], ""):
            wanted, _ = pipeline.encode_prompt(prompt, image=shown)
            found.append(embedding(made, prompt, control))
            assert torch.equal(found[-1], wanted[0])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[1], found[3])


def test_two_control_images_stand_in_one_prompt_in_their_order(edits: dict[str, EditSet]):
    made = edits["qwen-image-edit-plus"]
    pipeline = pipeline_of("qwen-image-edit-plus", made.tiny)
    pictures = [Image.open(made.folder / "controls" / f"lake_{number}.png") for number in (0, 1)]
    shown = [pipeline.image_processor.resize(one, *size) for one, size in zip(pictures, [(384, 384), (544, 256)],
                                                                            strict=True)]  # fmt: skip
    wanted, _ = pipeline.encode_prompt(CAPTIONS["lake"], image=shown)
    assert torch.equal(embedding(made, CAPTIONS["lake"]), wanted[0])


@pytest.mark.parametrize("area", [None, (128, 128)])
def test_control_latents_are_the_pipeline_s_at_the_size_that_is_asked_for(tiny_qwen: TinyQwen, tmp_path: Path, area):
    settings: dict[str, Any] = {} if area is None else {"control_resolution": list(area)}
    made = make_edit_set(tmp_path / "set", tiny_qwen, **settings)
    made.latents()
    pipeline = pipeline_of("qwen-image-edit", made.tiny)
    # 128x128 at 3:2 in multiples of 32; without an area of its own a control image is cut as its target is, to 80x48
    size = (160, 96) if area else (80, 48)
    control = Image.open(made.folder / "controls" / "house.png")
    if area is None:
        control = control.resize((80, 53), Image.Resampling.LANCZOS).crop((0, 2, 80, 50))
    image = pipeline.image_processor.preprocess(control, size[1], size[0]).unsqueeze(2)
    _, packed = pipeline.prepare_latents(image, 1, 16, *size[::-1], torch.float32, torch.device("cpu"), None)
    (entry,) = (entry for entry in entries(made, "control_latent") if entry.name == "house.png")
    assert (entry.content["width"], entry.content["height"]) == size
    latent = load(entry)["latent"]
    ours = pipeline._pack_latents(latent[None, :, 0], 1, 16, *latent.shape[2:])
    assert torch.allclose(ours, packed, atol=1e-5)


def test_the_six_names_of_edit_models_count_and_find_entries(edits: dict[str, EditSet], caplog):
    made = edits["qwen-image-edit-plus"]
    cache = EmbeddingCache(made.folder / "cache")
    counts = {"pixel_latent": 3, "control_latent": 4, "prompt_embed": 3, "prompt_embeds_mask": 3,
              "empty_prompt_embed": 3, "empty_prompt_embeds_mask": 3}  # fmt: skip
    assert counts.items() <= cache.get_cache_stats().items()
    with caplog.at_level("INFO", "wangen"):
        assert check_cache.run(made.check).result["by_name"] == counts
    assert "valid: pixel_latent 3, control_latent 4, prompt_embed 3, prompt_embeds_mask 3, empty_prompt" in caplog.text
    controls = [made.folder / "controls" / f"lake_{number}.png" for number in (0, 1)]
    for name, prompt in (("prompt_embed", CAPTIONS["lake"]), ("empty_prompt_embeds_mask", "")):
        found = cache.load_cache(name, cache.get_file_hash_for_prompt(controls, prompt))
        assert found is not None
        assert torch.equal(found["embedding"], embedding(made, prompt, *controls))
        assert found["mask"].shape == found["embedding"].shape[:1]
        assert cache.load_cache(name, cache.get_file_hash_for_prompt(controls[::-1], prompt)) is None
    alone = EmbeddingCache(edits["qwen-image"].folder / "cache")
    assert alone.cache_exists("prompt_embed", alone.get_file_hash_for_prompt(None, CAPTIONS["hill"], task="qwen-image"))
    assert "text_encoder_output" in alone.check_cache_exists(edits["qwen-image"].folder / "targets" / "hill.png")
    with pytest.raises(UsageError, match="there is no task 'qwen'"):
        alone.get_file_hash_for_prompt(None, "", task="qwen")
    target = cache.get_file_hash_for_image(made.folder / "targets" / "lake.png")
    assert cache.load_cache("pixel_latent", target)["latent"].shape[0] == 16
    assert cache.cache_exists("control_latent", cache.get_file_hash_for_image(controls[1]))
    with pytest.raises(UsageError, match="there is no kind 'pixels'"):
        cache.cache_exists("pixels", target)


# ---- what makes an entry stale ------------------------------------------------------------------------------------


def new_control(made: EditSet) -> None:
    picture((192, 128), 77).save(made.folder / "controls" / "house.png")


def new_prompt(made: EditSet) -> None:
    (made.folder / "targets" / "house.txt").write_text("make the sky red", encoding="utf-8")


def new_target(made: EditSet) -> None:
    picture((96, 64), 78).save(made.folder / "targets" / "house.png")


def new_area(made: EditSet) -> None:
    made.toml.write_text(made.toml.read_text().replace("[general]", "[general]\ncontrol_resolution = 128"))


def renamed(made: EditSet) -> None:
    for folder, suffix in (("targets", "png"), ("targets", "txt"), ("controls", "png")):
        (made.folder / folder / f"house.{suffix}").rename(made.folder / folder / f"cottage.{suffix}")


@pytest.mark.parametrize(
    ("change", "latents", "texts", "why"),
    [
        (new_control, 1, 2, "the control image changed"),  # its latent; the prompt and the empty prompt shown it
        (new_prompt, 0, 1, "the caption changed"),
        (new_target, 1, 0, "the file's content changed"),
        (new_area, 3, 0, "the size changed"),
        (renamed, 0, 0, ""),
    ],
)
def test_what_is_encoded_again_after_a_change(edits, tmp_path: Path, change, latents: int, texts: int, why: str):
    shutil.copytree(edits["qwen-image-edit"].folder, tmp_path / "set")
    made = EditSet(tmp_path / "set", edits["qwen-image-edit"].tiny, "qwen-image-edit")
    made.toml.write_text(made.toml.read_text().replace(edits["qwen-image-edit"].folder.as_posix(),
                                                       made.folder.as_posix()))  # fmt: skip
    change(made)
    report = check_cache.run(made.check)
    assert report.ok == (latents + texts == 0)
    assert sum(state["stale"] + state["missing"] for state in report.counts.values()) == latents + texts
    assert why in "\n".join(report.result["problems"])
    assert made.latents()["computed"] == latents
    assert made.texts()["computed"] == texts
    assert check_cache.run(made.check).ok


def test_another_template_of_the_same_text_encoder_has_embeddings_of_its_own(edits, tmp_path: Path):
    edit = edits["qwen-image-edit"]
    shutil.copytree(edit.folder, tmp_path / "set")
    made = EditSet(tmp_path / "set", edit.tiny, "qwen-image-edit-plus")
    made.toml.write_text(made.toml.read_text().replace(edit.folder.as_posix(), made.folder.as_posix()))
    assert made.latents()["computed"] == 0
    assert made.texts(keep_cache=True)["computed"] == 6
    assert EditSet(made.folder, made.tiny, "qwen-image-edit").texts(keep_cache=True)["computed"] == 0


def test_a_planted_pickle_and_a_torn_entry_are_no_entries(edits, tmp_path: Path):
    shutil.copytree(edits["qwen-image-edit"].folder / "cache", tmp_path / "cache")
    (path,) = (entry.path for entry in Folder(tmp_path / "cache").all_entries
               if entry.kind == "latent" and entry.name == "house.png")  # fmt: skip
    bomb = tmp_path / "cache" / path.name.replace("house", "bomb")
    torch.save({"latent": torch.ones(1)}, bomb)
    path.write_bytes(path.read_bytes()[:-8])
    folder = Folder(tmp_path / "cache", deep=True)
    assert bomb not in {entry.path for entry in folder.all_entries}
    assert path not in {entry.path for entry in folder.all_entries}
    with pytest.raises(CorruptEntryError):
        load(folder.all_entries[0]._replace(file=bomb.name))


# ---- what is refused ----------------------------------------------------------------------------------------------


def test_items_that_a_model_cannot_take_are_named_all_at_once(tiny_qwen: TinyQwen, tmp_path: Path):
    made = make_edit_set(tmp_path / "set", tiny_qwen, "qwen-image-edit-plus")
    edit = profiles.model("qwen-image-edit")
    with pytest.raises(
        WangenError, match=r"has 2 control images, and .* takes one(?s:.*)use --task qwen-image-edit-plus"
    ):
        read_samples(made.check, edit)
    made.toml.write_text("\n".join(line for line in made.toml.read_text().splitlines() if "control" not in line))
    with pytest.raises(WangenError, match=r"the dataset has 3 problems(?s:.*)has 0 control images"):
        read_samples(made.check, edit)


def test_clips_are_refused(tiny_qwen: TinyQwen, tmp_path: Path):
    from helpers import make_clip

    make_clip(tmp_path / "clips" / "walk.mp4", num_frames=5, fps=16, size=(32, 32))
    (tmp_path / "clips" / "walk.txt").write_text("a walk", encoding="utf-8")
    folder = tmp_path.as_posix()
    (tmp_path / "set.toml").write_text(
        f"[[datasets]]\nvideo_directory = '{folder}/clips'\ncache_directory = '{folder}/cache'\ntarget_frames = [5]\n"
    )
    made = EditSet(tmp_path, tiny_qwen, "qwen-image")
    with pytest.raises(WangenError, match="is or has a clip, and qwen-image makes pictures"):
        read_samples(made.check, profiles.model("qwen-image"))


@pytest.mark.slow
def test_both_steps_at_once_leave_what_one_after_the_other_leaves(tiny_qwen: TinyQwen, tmp_path: Path, monkeypatch):
    """Two real processes on one cache folder, in which one edit has gone and another has a new prompt meanwhile."""
    monkeypatch.setattr(profiles, "model", PROFILE)  # as the processes have it
    kept: list[dict[str, bytes]] = []
    for at_once in (False, True):
        made = make_edit_set(tmp_path / "set", tiny_qwen).fill()
        for path in (made.folder / "targets" / "hill.png", made.folder / "targets" / "hill.txt"):
            path.unlink()
        (made.folder / "targets" / "lake.txt").write_text("take both boats out", encoding="utf-8")
        (made.folder / "controls" / "house.png").write_bytes((made.folder / "controls" / "hill.png").read_bytes())
        common = ["--dataset_config", str(made.toml), "--task", made.task]
        lines = [
            ["cache_latents", *common, "--vae", str(tiny_qwen.single["vae"]), "--vae_device", "cpu",
             "--vae_dtype", "float32"],
            ["cache_text", *common, "--text_encoder", str(tiny_qwen.single["t5"]), "--text_encoder_device", "cpu",
             "--t5_dtype", "float32"],
        ]  # fmt: skip
        running: list[subprocess.Popen[bytes]] = []
        for line in lines:
            running.append(subprocess.Popen([sys.executable, "-m", "wangen.runtime", *line]))
            if not at_once:
                running[-1].wait()
        assert [process.wait() for process in running] == [0, 0]
        assert check_cache.run(made.check).ok
        counts = {kind: len(entries(made, kind)) for kind in ("latent", "control_latent", "text_encoder_output")}
        assert counts == {"latent": 2, "control_latent": 2, "text_encoder_output": 2}
        files = read_tree(made.folder / "cache")
        kept.append({name: data for name, data in files.items() if not name.endswith(("index.jsonl", "sources.jsonl"))})
        shutil.rmtree(made.folder)
    assert kept[0] == kept[1]
    assert not [name for name in kept[1] if name.endswith(".tmp") or ".claim" in name]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_encoded(
    tiny_qwen: TinyQwen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = make_edit_set(tmp_path / "set", tiny_qwen)
    usage = namedtuple("usage", "total used free")
    free = {"bytes": 200_000}
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9 - free["bytes"], free["bytes"]))
    monkeypatch.setattr(room, "ASKED_FROM_BYTES", 0)
    with pytest.raises(WangenError, match=r"6 entries need about .*, .* are free") as told:
        made.texts()
    assert "cache_directory on another disk" in told.value.cure
    free["bytes"] = 10_000
    with pytest.raises(WangenError, match=r"6 entries need about .*, .* are free"):
        made.latents()
    assert not list((made.folder / "cache").glob("*.safetensors"))
    free["bytes"] = 10**9
    made.fill()
    free["bytes"] = 10_000
    assert made.latents()["computed"] == 0  # what is there needs no room
    assert made.latents(recache=True)["computed"] == 6  # nor does what takes the place of a valid entry


@pytest.mark.slow
def test_the_room_that_is_asked_for_is_about_what_the_entries_take(
    tiny_qwen: TinyQwen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(profiles, "model", PROFILE)  # with all tokens of a picture
    monkeypatch.setattr(cache_sizes, "QWEN_TEXT_DIM", 256)  # of the tiny encoder
    asked: dict[Kind, int] = {}
    num_bytes = room._num_bytes

    def noted(need: Need, *words: Any) -> int:
        found = num_bytes(need, *words)
        asked[need.recipe.kind] = asked.get(need.recipe.kind, 0) + found
        return found

    monkeypatch.setattr(room, "_num_bytes", noted)
    made = make_edit_set(tmp_path / "set", tiny_qwen).fill()
    for kind in ("latent", "control_latent", "text_encoder_output", "empty_text_encoder_output"):
        held = sum(sum(tensor.nbytes for tensor in load(entry).values()) for entry in entries(made, kind))
        if "latent" in kind:
            assert asked[kind] == held
        else:  # rather less than more; the tiny tokenizer makes a token of each byte of the template
            assert 0.75 < asked[kind] / held <= 1
