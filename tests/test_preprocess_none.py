"""Raw videos of which nothing comes: what is said of one, of a run that makes no clip, and what clips cost."""

import errno
import os
from pathlib import Path

import pytest
from footage import moving, prepare, reasons
from helpers import read_tree

from wangen.generator.errors import UsageError, WangenError


def test_a_video_that_cannot_be_read_is_named_with_its_folder(tmp_path, caplog):
    videos = moving(tmp_path / "v", "dogs/a.mp4", "cats/b.mp4")
    (videos / "cats" / "a.mp4").write_bytes(b"no video")
    prepare(videos, tmp_path / "o", frames=25)
    assert reasons(tmp_path / "o") == {"cats/a.mp4": ["problem"]}
    assert any(line.startswith("  cats/a.mp4: ") for line in caplog.messages)


@pytest.mark.parametrize(("flags", "found", "cure"), [
    ({"min_motion": 90.0}, "for 1 of 1 window: motion: only", "give a lower --min_motion"),
    ({"frames": 49}, "for 1 of 1 window: short: the shot has", "give fewer --frames"),
])  # fmt: skip
def test_that_no_clip_comes_of_it_is_said_with_the_commonest_reason(flags, found, cure, tmp_path, caplog):
    report = prepare(moving(tmp_path / "v", "a.mp4"), tmp_path / "o", **{"frames": 25, **flags})
    assert not report.ok
    assert report.summary.startswith("0 clips to train on")
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert found in said
    assert f"do:    {cure}" in said


@pytest.mark.parametrize(("flags", "found", "cure"), [
    ({"frames": 1}, "--frames 1 is a picture", "--frames 5 or more"),
    ({"frames": 3}, "--frames 3: Wan", "--frames 5 or 9"),
    ({"task": "qwen-image", "frames": None}, "Qwen-Image makes pictures", "a model that makes videos"),
])  # fmt: skip
def test_pictures_are_refused(flags, found, cure, tmp_path):
    with pytest.raises(UsageError, match=found) as caught:
        prepare(moving(tmp_path / "v", "a.mp4"), tmp_path / "o", **flags)
    assert cure in caught.value.cure


def test_a_folder_of_videos_that_is_not_there_is_named_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no such folder of videos") as caught:
        prepare(Path("footage"), tmp_path / "o")
    assert caught.value.where == str(tmp_path / "footage")
    assert caught.value.cure.startswith("put the videos there")


@pytest.mark.parametrize("broken", ["caption", "video"])
def test_what_cannot_be_read_this_time_costs_no_clip(broken, tmp_path):
    videos = moving(tmp_path / "v", "circle 1.mp4", "b.mp4")
    prepare(videos, tmp_path / "o", val_share=0.5)
    before = read_tree(tmp_path / "o")
    if broken == "caption":
        (videos / "circle 1.txt").mkdir()
    else:
        (videos / "circle 1.mp4").write_bytes(b"no video")
    with pytest.raises(WangenError, match=r"clips? of an earlier run would be removed") as caught:
        prepare(videos, tmp_path / "o", val_share=0.5)
    assert Path(caught.value.where).stem == "circle 1"
    assert read_tree(tmp_path / "o") == before
    if broken == "caption":
        (videos / "circle 1.txt").rmdir()
        prepare(videos, tmp_path / "o", val_share=0.5)
        assert names(tmp_path / "o") == {"circle_1", "b"}
    (videos / "circle 1.mp4").unlink()
    prepare(videos, tmp_path / "o")
    assert names(tmp_path / "o") == {"b"}


def test_a_video_whose_prompt_was_taken_away_gives_its_clips_up(tmp_path):
    videos = moving(tmp_path / "v", "a.mp4", "b.mp4")
    for name in ("a", "b"):
        (videos / f"{name}.txt").write_text("a thing")
    prepare(videos, tmp_path / "o", default_prompt=None)
    (videos / "a.txt").unlink()
    assert prepare(videos, tmp_path / "o", default_prompt=None).ok
    assert names(tmp_path / "o") == {"b"}


def test_a_labelled_video_that_does_not_answer_is_not_taken_for_absent(tmp_path, monkeypatch):
    videos = moving(tmp_path / "v", "a.mp4", "b.mp4")
    table = tmp_path / "labels.csv"
    table.write_text("video,prompt\na.mp4,one\nb.mp4,two\n")
    prepare(videos, tmp_path / "o", labels=table)
    before, stat = read_tree(tmp_path / "o"), Path.stat

    def silent(path: Path, **words: bool) -> os.stat_result:
        if path.name == "a.mp4":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, **words)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", silent)
        with pytest.raises(WangenError, match="cannot be read: Input/output error"):
            prepare(videos, tmp_path / "o", labels=table)
    assert read_tree(tmp_path / "o") == before


def names(output: Path) -> set[str]:
    """The videos that there are clips of."""
    return {path.name.rsplit("-", 2)[0] for path in (output / "clips").iterdir()}
