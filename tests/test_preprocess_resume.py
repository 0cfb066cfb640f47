"""A run that ends early goes on, with the bytes of one that did not; changed flags make anew what they change."""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from footage import clips, decoded, prepare, waves, write_video
from helpers import read_tree
from killing import KILLED, forked

from wangen.generator.errors import WAS_STOPPED, UsageError, WangenError
from wangen.generator.processes import here
from wangen.runtime import preprocess
from wangen.runtime.preprocess import cutting
from wangen.runtime.preprocess.form import Form, Place
from wangen.runtime.preprocess.manifests import Outcome

pytestmark = pytest.mark.slow

VISIBLE = {"contact_sheet.html", "dropped.jsonl", "train.jsonl", "val.jsonl"}


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for seed in range(2):
        write_video(folder / f"{seed}.mp4", waves(30, seed=seed), 16)
    write_video(folder / "still.mp4", waves(20, seed=7, step=0), 16)
    return folder


@pytest.fixture(scope="module")
def whole(videos, tmp_path_factory) -> dict[str, bytes]:
    """What a run that nothing disturbed leaves."""
    output = tmp_path_factory.mktemp("whole")
    prepare(videos, output)
    return made(output)


def made(output: Path) -> dict[str, bytes]:
    """Everything that is compared: all but times (the report, the memo of sources)."""
    return {name: content for name, content in read_tree(output).items()
            if not name.endswith((".report.json", ".wangen-sources.jsonl"))}  # fmt: skip


def test_two_runs_give_the_same_bytes(videos, whole, tmp_path):
    prepare(videos, tmp_path, num_workers=1)
    assert made(tmp_path) == whole
    assert {name for name in whole if "/" not in name} == VISIBLE
    assert not [name for name in whole if name.endswith((".tmp", "lock"))]


def test_records_that_vanish_before_the_page_is_written_are_made_again(videos, whole, tmp_path, monkeypatch):
    write = preprocess.write_manifests

    def write_and_lose(outcome: Outcome, form: Form, place: Place, *rest: Path) -> None:
        write(outcome, form, place, *rest)
        shutil.rmtree(place.records / "videos")

    monkeypatch.setattr(preprocess, "write_manifests", write_and_lose)
    with pytest.raises(WangenError, match="the record of a video is gone"):
        prepare(videos, tmp_path)
    monkeypatch.undo()
    prepare(videos, tmp_path)
    assert made(tmp_path) == whole


def test_footage_that_is_gone_is_no_fault_of_a_finished_run_and_of_no_other(videos, tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="wangen")
    shutil.copytree(videos, tmp_path / "videos")
    prepare(tmp_path / "videos", tmp_path / "out")
    before = made(tmp_path / "out")
    shutil.rmtree(tmp_path / "videos")
    assert prepare(tmp_path / "videos", tmp_path / "out").ok
    assert "the footage is not there any more" in caplog.text
    assert made(tmp_path / "out") == before
    with pytest.raises(UsageError, match="no such folder of videos"):
        prepare(tmp_path / "videos", tmp_path / "out", crf=20)
    (tmp_path / "out" / "train.jsonl").unlink()
    with pytest.raises(UsageError, match="no such folder of videos"):
        prepare(tmp_path / "videos", tmp_path / "out")


def test_labels_that_were_edited_are_no_finished_run_s(videos, tmp_path):
    shutil.copytree(videos, tmp_path / "videos")
    table, output = tmp_path / "labels.csv", tmp_path / "out"
    names = sorted(path.name for path in videos.glob("*.mp4"))
    table.write_text("video,prompt\n" + "".join(f"{name},one of them\n" for name in names))
    assert prepare(tmp_path / "videos", output, labels=table).ok
    shutil.rmtree(tmp_path / "videos")
    assert prepare(tmp_path / "videos", output, labels=table).ok
    table.write_text(table.read_text().replace("one", "two"))
    with pytest.raises(UsageError, match="no such folder of videos"):
        prepare(tmp_path / "videos", output, labels=table)
    table.unlink()  # gone with the footage
    assert prepare(tmp_path / "videos", output, labels=table).ok


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_run_killed_anywhere_goes_on_to_the_same_bytes(videos, whole, tmp_path):
    def work(output: Path) -> int:
        return int(not prepare(videos, output, num_workers=1).ok)  # calls are counted in one thread

    code, calls = forked(lambda: work(tmp_path / "calls"), 0)
    assert code == 0
    for at in range(3, len(calls), len(calls) // 7):
        output = tmp_path / str(at)
        code, met = forked(lambda output=output, at=at: work(output), at)
        assert (code, len(met)) == (KILLED, at)
        prepare(videos, output)
        assert made(output) == whole, met[-1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_another_share_to_validate_with_never_leaves_a_mixed_pair(videos, tmp_path):
    def pair(output: Path) -> tuple[bytes, bytes] | None:
        """Both manifests, where both are there."""
        files = [output / name for name in ("train.jsonl", "val.jsonl")]
        return (files[0].read_bytes(), files[1].read_bytes()) if all(file.exists() for file in files) else None

    prepare(videos, tmp_path / "first", val_share=0.5)
    before = pair(tmp_path / "first")
    seed = next(seed for seed in range(50) if _held_out(videos, tmp_path / "seeds", seed) != before[1])
    other = {"val_share": 0.5, "seed": seed, "num_workers": 1}
    shutil.copytree(tmp_path / "first", tmp_path / "whole")
    code, calls = forked(lambda: int(not prepare(videos, tmp_path / "whole", **other).ok), 0)
    after = pair(tmp_path / "whole")
    assert code == 0
    assert before != after
    met = set()
    for at in range(len(calls) // 2, len(calls) + 1):  # the manifests come near the end
        output = shutil.copytree(tmp_path / "first", tmp_path / str(at))
        forked(lambda output=output: int(not prepare(videos, output, **other).ok), at)
        met.add(left := pair(output))
        if left is None:
            prepare(videos, output, **other)
            assert pair(output) == after
    assert met == {before, None, after}


def _held_out(videos: Path, output: Path, seed: int) -> bytes:
    prepare(videos, output, val_share=0.5, seed=seed)
    return (output / "val.jsonl").read_bytes()


def test_what_is_there_is_not_made_again(videos, whole, tmp_path):
    prepare(videos, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("clips/*")}
    kept, cut_short, gone = sorted(before)[:3]
    cut_short.write_bytes(cut_short.read_bytes()[:-10])
    gone.unlink()
    report = prepare(videos, tmp_path)
    assert report.counts["made"] == 2
    assert kept.stat().st_mtime_ns == before[kept]
    assert made(tmp_path) == whole


def test_changed_flags_are_said_and_nothing_stale_stays(videos, whole, tmp_path, caplog):
    prepare(videos, tmp_path)
    (tmp_path / "clips" / "my own.mp4").write_bytes(b"mine")
    with caplog.at_level(logging.INFO, logger="wangen"):
        prepare(videos, tmp_path, frames=13, crf=20)
    assert "changed since the last run: --frames 9 -> 13, --crf 12 -> 20" in caplog.text
    assert all(len(decoded(tmp_path / row["file"])) == 13 for row in clips(tmp_path))
    names = {path.name for path in (tmp_path / "clips").iterdir()}
    assert names == {row["file"].removeprefix("clips/") for row in clips(tmp_path)} | {"my own.mp4"}
    prepare(videos, tmp_path)
    assert {name: content for name, content in made(tmp_path).items() if name != "clips/my own.mp4"} == whole


def test_a_stopped_run_with_other_flags_leaves_no_manifest_that_is_untrue(videos, tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for flags in ({"frames": 13}, {"frames": 13, "stride": 9}):
        prepare(videos, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(cutting, "write_clip", stop)
            with pytest.raises(KeyboardInterrupt):
                prepare(videos, tmp_path, **flags)
        assert not (tmp_path / "train.jsonl").exists()
        assert not (tmp_path / "val.jsonl").exists()


def test_another_folder_of_videos_is_said_and_what_it_costs(videos, tmp_path, caplog):
    prepare(videos, tmp_path / "o")
    there = len(clips(tmp_path / "o"))
    write_video(tmp_path / "v" / "z.mp4", waves(30, seed=5), 16)
    with caplog.at_level(logging.INFO, logger="wangen"):
        prepare(tmp_path / "v", tmp_path / "o")
    assert f"changed since the last run: --videos {videos} -> {tmp_path / 'v'};" in caplog.text
    assert f"{there} clips of other videos or settings removed" in caplog.text


def test_a_changed_prompt_makes_no_clip_again(videos, tmp_path):
    prepare(videos, tmp_path)
    report = prepare(videos, tmp_path, default_prompt="another thing", val_share=0)
    assert report.counts["made"] == 0
    assert {row["prompt"] for row in clips(tmp_path)} == {"another thing"}


def test_an_edited_manifest_stays_and_stops_what_would_make_it_untrue(videos, whole, tmp_path, caplog):
    prepare(videos, tmp_path)
    train = tmp_path / "train.jsonl"
    train.write_bytes(mine := whole["train.jsonl"].splitlines(keepends=True)[0].replace(b"{", b'{"mine": 1, '))
    prepare(videos, tmp_path, default_prompt="another thing")
    assert train.read_bytes() == mine
    assert "train.jsonl was edited by hand and stays" in caplog.text
    before = read_tree(tmp_path / "clips")
    with pytest.raises(UsageError, match=r"train\.jsonl was edited by hand"):
        prepare(videos, tmp_path, frames=13)
    assert train.read_bytes() == mine
    assert read_tree(tmp_path / "clips") == before
    train.unlink()
    prepare(videos, tmp_path)
    assert made(tmp_path) == whole


def test_a_video_that_changes_while_it_is_cut_gives_no_clips(videos, tmp_path, monkeypatch):
    source = tmp_path / "v"
    source.mkdir()
    for path in videos.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    real = cutting.write_clip

    def write(path: Path, *words: object) -> None:
        real(path, *words)
        if path.name.startswith("1"):
            (source / "1.mp4").write_bytes(b"another")

    monkeypatch.setattr(cutting, "write_clip", write)
    report = prepare(source, tmp_path / "o")
    assert {row["source"] for row in clips(tmp_path / "o")} == {"0.mp4"}
    assert report.counts["problems"] == 1
    monkeypatch.undo()
    (source / "1.mp4").unlink()
    prepare(source, tmp_path / "o")
    assert {path.name[0] for path in (tmp_path / "o" / "clips").iterdir()} == {"0"}


def test_two_runs_at_once_are_refused(videos, tmp_path):
    lock = tmp_path / ".preprocess" / "lock"
    lock.parent.mkdir(parents=True)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        import json

        import psutil

        process = [other.pid, psutil.Process(other.pid).create_time()]
        lock.write_text(json.dumps({"host": here(), "run": process, "step": process}))
        with pytest.raises(WangenError):
            prepare(videos, tmp_path)
    finally:
        other.kill()
        other.wait()
    assert prepare(videos, tmp_path).ok


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_stops_soon_with_one_message(tmp_path):
    videos = tmp_path / "v"
    write_video(videos / "a.mp4", waves(1000), 16)  # many clips: all must not be done before the signal arrives
    words = ["preprocess", "--videos", str(videos), "--output", str(tmp_path / "o"), "--default_prompt", "x",
             "--resolution", "416x240", "--frames", "9", "--num_workers", "1"]  # fmt: skip
    run = subprocess.Popen([sys.executable, "-m", "wangen.runtime", *words], stderr=subprocess.PIPE, text=True)
    while run.poll() is None and not list((tmp_path / "o").glob("clips/*.mp4")):
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == WAS_STOPPED, said
    assert "stopped. Nothing saved is lost" in said
    assert "Traceback" not in said
    done = len(list((tmp_path / "o").glob("clips/[!.]*.mp4")))
    assert 0 < done < 1000 // 9


def test_a_record_that_the_disk_refuses_ends_the_step_and_drops_no_clip(videos, whole, tmp_path, monkeypatch):
    write = cutting.write_whole

    def full(path, content):
        if path.name.startswith("1-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(cutting, "write_whole", full)
        with pytest.raises(OSError, match="No space left"):
            prepare(videos, tmp_path, num_workers=1)
    prepare(videos, tmp_path, num_workers=1)
    assert made(tmp_path) == whole
