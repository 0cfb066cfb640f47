"""Raw videos of which nothing comes: what is said of one, and of a run that makes no clip at all."""

from pathlib import Path

import pytest
from footage import moving, prepare, reasons

from wangen.generator.errors import UsageError


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
