"""`check` judges manifests, control media and masks as it judges folders."""

import json
from pathlib import Path

import pytest
from helpers import clip_bytes, image_bytes, write_tree

from wangen.generator.check import Examined, examine
from wangen.generator.steps import Check
from wangen.generator.tomls import read_dataset


def examined(toml: Path) -> Examined:
    return examine(Check(dataset_config=toml, task="t2v-1.3B"), read_dataset(toml))


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    """A block of images in a folder, and one of clips in a manifest, with control media and masks."""
    clip, image = clip_bytes(tmp_path, num_frames=12), image_bytes()
    line = {"video_path": "clips/b.mp4", "caption": ["a bee", "bees"], "control_path": "depth/b.mp4"}
    tree = {
        "media/a.jpg": image,
        "media/a.txt": "an ape",
        "lines/a_0.png": image,
        "lines/a_1.png": image,
        "masks/a.png": image,
        "clips/b.mp4": clip,
        "depth/b.mp4": clip,
        "clips/set.jsonl": json.dumps(line | {"video_path": "b.mp4", "control_path": "../depth/b.mp4"}),
        "d.toml": "[general]\nresolution = 64\n"
        "[[datasets]]\nimage_directory = '@/media'\ncache_directory = '@/cache'\n"
        "control_directory = '@/lines'\nmask_directory = '@/masks'\n"
        "[[datasets]]\nvideo_jsonl_file = '@/clips/set.jsonl'\ncache_directory = '@/clips'\ntarget_frames = [5]\n"
        "frame_extraction = 'chunk'\n",
    }
    tree["d.toml"] = str(tree["d.toml"]).replace("@", tmp_path.as_posix())
    return write_tree(tmp_path, tree) / "d.toml"


def test_sound_manifests_control_media_and_masks_pass(toml: Path):
    found = examined(toml)
    assert found.findings == ()
    assert (found.num_images, found.num_clips) == (1, 1)


def test_everything_that_is_wrong_is_found(toml: Path, tmp_path: Path):
    write_tree(tmp_path, {
        "media/b.jpg": image_bytes(), "media/b.txt": "a bee",
        "masks/a.png": image_bytes((64, 64), format="PNG"),
        "depth/b.mp4": clip_bytes(tmp_path, num_frames=6),
    })  # fmt: skip
    with (tmp_path / "clips/set.jsonl").open("a") as file:
        file.write("\n\n" + json.dumps({"video_path": "gone.mp4", "caption": "x"}))
    found = sorted(f"{Path(finding.where).name}: {finding.found}" for finding in examined(toml).findings)
    assert found == [
        "a.png: is 64x64, its picture 64x48: not the same shape",
        "b.jpg: has no control in " + str(tmp_path / "lines"),
        "b.mp4: has 6 frames at 16 fps, its clip uses 10",
        "set.jsonl: line 3: gone.mp4 is not there",
    ]


def test_a_control_image_that_cannot_be_read(toml: Path, tmp_path: Path):
    (tmp_path / "lines/a_1.png").write_bytes(b"x")
    found = examined(toml)
    assert [Path(finding.where).name for finding in found.findings] == ["a_1.png"]
    assert found.num_images == 0


def test_a_manifest_or_folder_that_is_not_there(toml: Path, tmp_path: Path):
    (tmp_path / "clips/set.jsonl").unlink()
    (tmp_path / "masks/a.png").unlink()
    (tmp_path / "masks").rmdir()
    found = {(Path(finding.where).name, finding.found) for finding in examined(toml).findings}
    assert found == {
        ("set.jsonl", "cannot read the manifest: No such file or directory"),
        ("masks", "cannot list the folder: No such file or directory"),
    }


def test_paths_of_another_system_are_named(tmp_path: Path):
    text = "[[datasets]]\nimage_directory = '@/m'\ncontrol_directory = 'C:/AI/lines'\ncache_directory = '@/c'\n"
    path = write_tree(tmp_path, {"d.toml": text.replace("@", tmp_path.as_posix())}) / "d.toml"
    (finding, *_) = examined(path).findings
    assert finding.where.endswith("C:/AI/lines")
    assert "a path of another system" in finding.found
