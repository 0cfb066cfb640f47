"""Raw videos -> clips and manifests: what is kept, what is left out and why, and what a user's mistakes lead to."""

import json
import logging
import shutil
import sys
from collections import namedtuple
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from footage import BUNNY, EXAMPLE, clips, decoded, moving, prepare, reasons, rows, waves, write_video
from helpers import read_tree
from PIL import Image, ImageFilter

from wangen.generator.cli import main
from wangen.generator.errors import UsageError, WangenError
from wangen.runtime.preprocess.candidates import held_out

BLACK = [np.zeros((48, 64, 3), np.uint8)]
KEYS = ("file prompt source source_digest start_s end_s fps frames width height signals").split()


def pan(picture: str, count: int, start: int = 0) -> list[np.ndarray]:
    """A photo of the example over which the camera moves to the right."""
    with Image.open(EXAMPLE / picture) as image:
        return [np.asarray(image.convert("RGB").resize((480, 320)).crop((x, 20, x + 320, 260)).resize((160, 120)))
                for x in range(start, start + 2 * count, 2)]  # fmt: skip


def test_no_clip_crosses_a_cut(tmp_path):
    scenes = pan("coffee.jpg", 40), pan("astronaut.jpg", 20), pan("gravel.jpg", 37)
    write_video(tmp_path / "v" / "a.mp4", [*chain(*scenes)], 16)
    prepare(tmp_path / "v", tmp_path / "o", stride=4, val_share=0)
    spans = [(round(row["start_s"] * 16), round(row["end_s"] * 16)) for row in clips(tmp_path / "o")]
    wanted = [(start, start + 9) for first, end in ((0, 40), (40, 60), (60, 97)) for start in range(first, end - 8, 4)]
    assert spans == wanted
    assert all(row["signals"]["cut"] < 10 for row in clips(tmp_path / "o"))


def test_the_manifest_says_where_each_clip_comes_from(tmp_path):
    (tmp_path / "v" / "in").mkdir(parents=True)
    shutil.copy(BUNNY, tmp_path / "v" / "in" / "Bunny, älter.mp4")
    (tmp_path / "v" / "in" / "Bunny, älter.txt").write_text("a rabbit", encoding="utf-8")
    before = read_tree(tmp_path / "v")
    report = prepare(tmp_path / "v", tmp_path / "o", resolution="96x64", frames=21)
    assert read_tree(tmp_path / "v") == before
    train = rows(tmp_path / "o" / "train.jsonl")
    assert [list(row) for row in train] == [KEYS, KEYS]
    assert {row["file"] for row in train} == {f"clips/{name}" for name in read_tree(tmp_path / "o" / "clips")}
    assert [(row["prompt"], row["source"], row["start_s"], row["end_s"]) for row in train] == [
        ("a rabbit", "in/Bunny, älter.mp4", 0.0, 1.3125), ("a rabbit", "in/Bunny, älter.mp4", 1.3125, 2.625),
    ]  # fmt: skip
    assert [(row["fps"], row["frames"], row["width"], row["height"]) for row in train] == [(16, 21, 96, 64)] * 2
    assert decoded(tmp_path / "o" / train[0]["file"], (96, 64)).shape == (21, 64, 96, 3)
    assert (tmp_path / "o" / "val.jsonl").read_text() == ""
    assert (report.ok, report.counts["train"], report.counts["problems"]) == (True, 2, 0)


@pytest.mark.slow
def test_what_is_no_good_is_left_out_with_the_reason(tmp_path):
    videos = tmp_path / "v"
    bunny = decoded(BUNNY, (480, 270))[:50:2]
    blurred = [np.asarray(Image.fromarray(frame).filter(ImageFilter.GaussianBlur(9))) for frame in bunny]
    write_video(videos / "good.mp4", bunny, 16)
    write_video(videos / "smear.mp4", blurred, 16)
    write_video(videos / "frozen.mp4", [*waves(5), *waves(1) * 20, *waves(5)], 16)
    write_video(videos / "still.mp4", waves(25, step=0, seed=3), 16)
    write_video(videos / "dark.mp4", [*BLACK * 20, *waves(9, seed=4)], 16)
    write_video(videos / "brief.mp4", waves(20, seed=5), 16)
    limits = {"frames": 25, "cut_threshold": 60, "max_blur": 11}
    prepare(videos, tmp_path / "o", **limits)
    assert [row["source"] for row in clips(tmp_path / "o")] == ["good.mp4"]
    assert reasons(tmp_path / "o") == {
        "brief.mp4": ["short"], "dark.mp4": ["freeze", "black"], "frozen.mp4": ["freeze"], "smear.mp4": ["blur"],
        "still.mp4": ["freeze", "motion"],
    }  # fmt: skip
    frozen = next(row for row in rows(tmp_path / "o" / "dropped.jsonl") if row["source"] == "frozen.mp4")
    assert frozen["signals"]["freeze_s"] == pytest.approx(20 / 16, abs=1 / 16)
    prepare(videos, tmp_path / "o", keep_all=True, **limits)
    assert {row["source"] for row in clips(tmp_path / "o")} == {path.name for path in videos.iterdir()} - {"brief.mp4"}
    assert reasons(tmp_path / "o") == {"brief.mp4": ["short"]}
    loose = {"max_freeze": 9, "max_black": 1, "max_blur": 99, "min_motion": 0}
    prepare(videos, tmp_path / "o", **limits | loose)
    assert reasons(tmp_path / "o") == {"brief.mp4": ["short"]}


@pytest.mark.slow
def test_copies_are_left_out_and_a_fixed_camera_s_clips_are_not(tmp_path):
    videos = tmp_path / "v"
    bunny = decoded(BUNNY, (480, 270))
    write_video(videos / "a.mp4", bunny[:60:2], 16)
    small = [np.asarray(Image.fromarray(frame).resize((320, 180))) for frame in bunny[:60:2]]
    write_video(videos / "b smaller.mp4", small, 16, crf=30)
    shutil.copy(videos / "a.mp4", videos / "c same.mp4")
    square = []
    for number in range(40):  # somebody who covers 1 % of the picture walks in one place, then in another
        frame = bunny[0].copy()
        x = 30 + 3 * number if number < 20 else 420 - 3 * number
        frame[120:170, x : x + 24] = 160
        square.append(frame)
    write_video(videos / "square.mp4", square, 16)
    report = prepare(videos, tmp_path / "o", frames=17, stride=20, val_share=0, cut_threshold=50)
    assert [row["source"] for row in clips(tmp_path / "o")] == ["a.mp4", "square.mp4", "square.mp4"]
    assert reasons(tmp_path / "o") == {"b smaller.mp4": ["copy"], "c same.mp4": ["copy"]}
    assert report.counts["copies"] == 1
    dropped = rows(tmp_path / "o" / "dropped.jsonl")
    assert clips(tmp_path / "o")[0]["file"].removeprefix("clips/") in dropped[0]["reasons"][0]
    assert dropped[1]["reasons"] == ["copy: the same file as a.mp4"]
    prepare(videos, tmp_path / "o", frames=17, stride=20, val_share=0, cut_threshold=50, min_difference=0)
    assert reasons(tmp_path / "o") == {"c same.mp4": ["copy"]}


def test_prompts_come_from_captions_folders_and_the_default(tmp_path):
    videos = moving(tmp_path / "v", "a.mp4", "big_dogs/b.mp4", "big_dogs/c.mp4", "d.mp4")
    (videos / "a.txt").write_text("a wave\n", encoding="utf-8")
    (videos / "big_dogs" / "c.txt").write_text("its own", encoding="utf-8")
    flags = {"frames": 29, "prompt_template": "a video of {label}"}
    prepare(videos, tmp_path / "o", default_prompt="things", **flags)
    prompts = {row["source"]: row["prompt"] for row in clips(tmp_path / "o")}
    assert prompts == {"a.mp4": "a wave", "big_dogs/b.mp4": "a video of big dogs", "big_dogs/c.mp4": "its own",
                       "d.mp4": "things"}  # fmt: skip
    report = prepare(videos, tmp_path / "o", default_prompt=None, **flags)
    assert len(clips(tmp_path / "o")) == 3
    assert (report.ok, report.counts["problems"], reasons(tmp_path / "o")) == (True, 1, {"d.mp4": ["problem"]})


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_says_which_parts_show_what(tmp_path, kind):
    videos = moving(tmp_path / "v", "a.mp4", "in/b.mp4", "c.mp4")
    lines = [
        {"video": "a.mp4", "start_s": 0.25, "end_s": 1.0, "prompt": "", "label": "jumping"},
        {"video": "a.mp4", "start_s": 1.0, "end_s": "", "prompt": 'says "hi", and\nwaves', "label": ""},
        {"video": "in\\b.mp4", "start_s": "", "end_s": "", "prompt": "", "label": "running"},
        {"video": "gone.mp4", "start_s": "", "end_s": "", "prompt": "x", "label": ""},
        {"video": "a.mp4", "start_s": 2, "end_s": 1, "prompt": "x", "label": ""},
    ]
    table = tmp_path / f"labels.{kind}"
    if kind == "csv":
        import csv

        with table.open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, lines[0])
            writer.writeheader()
            writer.writerows(lines)
    else:
        table.write_text("".join(json.dumps(line) + "\n" for line in lines) + "no json\n", encoding="utf-8")
    report = prepare(videos, tmp_path / "o", labels=table, prompt_template="{label} people", frames=9, val_share=0)
    found = [(row["source"], row["start_s"], row["prompt"]) for row in rows(tmp_path / "o" / "train.jsonl")]
    assert found == [
        ("a.mp4", 0.25, "jumping people"), ("a.mp4", 1.0, 'says "hi", and\nwaves'),
        *(("in/b.mp4", start * 9 / 16, "running people") for start in range(3)),
    ]  # fmt: skip
    assert report.counts["problems"] == (2 if kind == "csv" else 3)


def labelled(folder: Path, table: str, text: str, **flags: object) -> tuple[list[tuple[str, float, str]], list[str]]:
    """What a table of labels makes of two videos of 2 s: the clips, and why what is not among them is not."""
    videos = moving(folder / "v", "a.mp4", "b.mp4")
    path = folder / table
    path.write_bytes(text.replace("@", str(videos)).encode())
    prepare(videos, folder / "o", labels=path, **({"frames": 25, "val_share": 0} | flags))
    found = [(row["source"], row["start_s"], row["prompt"]) for row in rows(folder / "o" / "train.jsonl")]
    return found, [reason for row in rows(folder / "o" / "dropped.jsonl") for reason in row["reasons"]]


@pytest.mark.parametrize(
    "text", ["\ufeffvideo;prompt\na.mp4;walk, then sit\n", "Video\tPrompt \r\na.mp4\twalk, then sit\r\n",
             'PATH, Prompt\na.mp4,"walk, then sit"\n']
)  # fmt: skip
def test_a_table_may_be_of_any_spreadsheet(tmp_path, text):
    assert labelled(tmp_path, "l.csv", text) == ([("a.mp4", 0.0, "walk, then sit")], [])


def test_a_line_with_more_columns_than_the_table_is_a_problem(tmp_path):
    found, reasons = labelled(tmp_path, "l.csv", "video,prompt\na.mp4,walk, then sit\nb.mp4,run\n")
    assert found == [("b.mp4", 0.0, "run")]
    assert [reason[:54] for reason in reasons] == ["problem: line 2: has more columns than the first line:"]


def test_a_part_beyond_the_end_is_left_out_and_said(tmp_path):
    lines = "video,prompt,start_s,end_s\na.mp4,walk,0,\nb.mp4,run,2000,4000\na.mp4,sit,0.01,0.02\n"
    found, reasons = labelled(tmp_path, "l.csv", lines)
    assert found == [("a.mp4", 0.0, "walk")]
    assert sorted(reasons) == ["outside: no frame from 0.01 s to 0.02 s, the video has 2 s",
                               "outside: no frame from 2000 s to 4000 s, the video has 2 s"]  # fmt: skip


def test_a_video_may_be_named_in_many_ways(tmp_path):
    lines = "video,prompt,start_s,end_s\na.mp4,walk,0,0.6\n@/a.mp4,run,0.6,1.2\n../v/./a.mp4,sit,1.2,2\n"
    found, reasons = labelled(tmp_path, "l.csv", lines, frames=9)
    assert (found, reasons) == ([("a.mp4", 0.0, "walk"), ("a.mp4", 0.625, "run"), ("a.mp4", 1.25, "sit")], [])


def test_lines_of_jsonl_end_where_json_says(tmp_path):
    text = '{"video": "a.mp4", "prompt": "walk\u2028then\u0085sit"}\r\n[1]\n{"video"\n'
    found, reasons = labelled(tmp_path, "l.jsonl", text)
    assert found == [("a.mp4", 0.0, "walk\u2028then\u0085sit")]
    assert reasons == ["problem: line 2: is no JSON object", "problem: line 3: is not JSON"]


def test_a_line_that_cannot_be_is_one_problem(tmp_path):
    bad = [
        {"video": "c.npz", "prompt": "x"}, {"video": "a.mp4", "prompt": "x", "start_s": 10**400},
        {"video": "a.mp4", "prompt": "x", "end_s": 1e300}, {"video": "x" * 300, "prompt": "x"},
        {"video": "a.mp4", "prompt": "walk \ud83d"}, {"video": "b.mp4", "prompt": "run"},
    ]  # fmt: skip
    (tmp_path / "v").mkdir()
    np.savez(tmp_path / "v" / "c.npz", frames=np.zeros((30, 48, 64, 3), np.uint8), fps=16)
    found, reasons = labelled(tmp_path, "l.jsonl", "".join(json.dumps(line) + "\n" for line in bad))
    assert found == [("b.mp4", 0.0, "run")]
    assert [reason.removeprefix("problem: ") for reason in reasons] == [
        "line 1: c.npz is no video", f"line 2: start_s is '1{'0' * 99}', no number of seconds",
        "line 3: end_s is '1e+300', no number of seconds", f"line 4: {'x' * 100}… is not there",
        "line 5: its prompt holds half a character",
    ]  # fmt: skip


def test_a_folder_whose_name_says_nothing_is_no_class(tmp_path):
    videos = moving(tmp_path / "v", "___/a.mp4", "_dogs/b.mp4")
    prepare(videos, tmp_path / "o", frames=25, default_prompt=None)
    assert [row["prompt"] for row in clips(tmp_path / "o")] == ["dogs"]
    assert reasons(tmp_path / "o") == {"___/a.mp4": ["problem"]}


def test_validation_is_of_other_videos(tmp_path):
    videos = moving(tmp_path / "v", *(f"{name}.mp4" for name in "abcde"))
    prepare(videos, tmp_path / "o", val_share=0.4, seed=7)
    train, val = (rows(tmp_path / "o" / f"{name}.jsonl") for name in ("train", "val"))
    sides = [{row["source"] for row in side} for side in (train, val)]
    assert (len(sides[0]), len(sides[1]), sides[0] & sides[1]) == (3, 2, set())
    for path in videos.iterdir():
        path.rename(path.with_stem(f"z{path.stem}"))
    prepare(videos, tmp_path / "p", val_share=0.4, seed=7)
    assert {row["source"] for row in rows(tmp_path / "p" / "val.jsonl")} == {f"z{name}" for name in sides[1]}
    digests = [f"{number:064x}" for number in range(40)]
    assert len({frozenset(held_out(digests, 0.1, seed)) for seed in range(9)}) > 5


def test_broken_videos_are_listed_and_the_others_go_on(tmp_path, caplog):
    videos = moving(tmp_path / "v", "good.mp4", "half.mp4")
    (videos / "text.mp4").write_text("no video", encoding="utf-8")
    (videos / "empty.mov").write_bytes(b"")
    whole = (videos / "half.mp4").read_bytes()
    (videos / "half.mp4").write_bytes(whole[: len(whole) // 2])
    report = prepare(videos, tmp_path / "o")
    assert {row["source"] for row in clips(tmp_path / "o")} == {"good.mp4"}
    assert report.ok
    assert reasons(tmp_path / "o") == {name: ["problem"] for name in ("empty.mov", "half.mp4", "text.mp4")}
    (videos / "good.mp4").unlink()
    words = ["preprocess", "--videos", str(videos), "--output", str(tmp_path / "p"), "--default_prompt", "x"]
    assert main(words) == 1
    assert not list((tmp_path / "p" / "clips").iterdir())


def test_a_video_that_breaks_in_its_middle_gives_no_clips(tmp_path):
    videos = moving(tmp_path / "v", "good.mp4")
    path = write_video(videos / "torn.mkv", waves(100, (160, 128)), 16, format="matroska", crf=0)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :][:2000] = bytes(2000)
    del content[len(content) * 3 // 4 :]
    path.write_bytes(content)
    report = prepare(videos, tmp_path / "o")
    sources = {row["source"] for row in clips(tmp_path / "o")}
    assert "good.mp4" in sources
    for row in clips(tmp_path / "o"):  # whatever could be decoded is whole
        assert len(decoded(tmp_path / "o" / row["file"])) == 9
    assert report.ok


def test_nothing_starts_on_a_disk_that_is_too_small(tmp_path, monkeypatch):
    videos = moving(tmp_path / "v", "a.mp4")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, 200_000_000))
    with pytest.raises(WangenError, match=r"3 clips may need 200\.3 MB \(83\.9 kB each.*200\.0 MB are free") as error:
        prepare(videos, tmp_path / "o", format="npz")
    assert "--format mp4" in error.value.cure
    assert read_tree(tmp_path / "o" / "clips") == {}


def test_a_dry_run_says_what_it_costs_and_writes_nothing(tmp_path, capsys):
    videos = moving(tmp_path / "v", "a.mp4")
    words = ["--output", str(tmp_path / "o"), "--default_prompt", "x", "--frames", "25", "--format", "npz"]
    assert main(["preprocess", "--videos", str(videos), *words, "--dry_run"]) == 0
    said = capsys.readouterr().err
    assert "at most 1 clip of 25 frames of 832x480 at 16 fps, 30.0 MB each" in said
    assert "nothing was written" in said
    assert not (tmp_path / "o").exists()


def test_no_more_clips_are_made_than_were_announced(tmp_path, caplog):
    write_video(tmp_path / "v" / "a.mp4", waves(38), 25)  # 24.3 frames at 16 fps: the 25th is on screen for a moment
    with caplog.at_level(logging.INFO, logger="wangen"):
        report = prepare(tmp_path / "v", tmp_path / "o", frames=5, keep_all=True)
    assert report.counts["made"] == 5
    assert "at most 5 clips of 5 frames" in caplog.text


def test_many_problems_of_a_dry_run_are_not_looked_for_in_a_file_that_is_not_written(tmp_path, capsys):
    videos = moving(tmp_path / "v", "a.mp4")
    for number in range(25):
        (videos / f"{number}.mp4").write_bytes(b"no video")
    words = ["--videos", str(videos), "--output", str(tmp_path / "o"), "--default_prompt", "x", "--frames", "25"]
    assert main(["preprocess", *words, "--dry_run"]) == 0
    said = capsys.readouterr().err
    assert "… and 5 more" in said
    assert "see dropped.jsonl" not in said
    assert not (tmp_path / "o").exists()


def test_folders_that_are_links_are_followed_once(tmp_path):
    videos = moving(tmp_path / "v", "a.mp4")
    write_video(tmp_path / "elsewhere" / "b.mp4", waves(32, seed=5), 16)
    (videos / "more").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere/back").symlink_to(videos, target_is_directory=True)
    (videos / "twice").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    report = prepare(videos, tmp_path / "o")
    assert list(report.inputs["videos"]) == ["a.mp4", "more/b.mp4"]
    assert report.counts["copies"] == 0


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"frames": 80}, "--frames 77 or 81"),
        ({"resolution": "830x480"}, "--resolution 832x480"),
        ({"resolution": "wide"}, "is no resolution"),
        ({"val_share": 1.0}, "--val_share is 1"),
        ({"stride": 0}, "--stride is 0"),
        ({"crf": 60}, "from 0 to 51"),
        ({"prompt_template": "a {labl}"}, "has no {label}"),
        ({"default_prompt": " "}, "--default_prompt is empty"),
        ({"default_prompt": "a \ud83d"}, "--default_prompt holds half a character"),
        ({"labels": Path("none.csv")}, "cannot read the labels"),
        ({"videos": Path("nowhere")}, "no such folder of videos"),
    ],
)
def test_wrong_flags_are_answered_before_anything_starts(tmp_path, flags, part):
    videos = moving(tmp_path / "v", "a.mp4")
    with pytest.raises(UsageError) as error:
        prepare(**({"videos": videos, "output": tmp_path / "o"} | flags))
    assert part in str(error.value)
    assert not (tmp_path / "o").exists()


def test_an_ffmpeg_that_cannot_do_it_is_named_before_anything_starts(tmp_path, monkeypatch):
    videos = moving(tmp_path / "v", "a.mp4")
    for program, part in ((sys.executable, "has no filter scdet"), (tmp_path / "none", "cannot be run")):
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
        with pytest.raises(WangenError, match=part) as error:
            prepare(videos, tmp_path / "o")
        assert error.value.where == str(program)
    assert not (tmp_path / "o").exists()


def test_manifests_of_somebody_else_are_not_written_over(tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "val.jsonl").write_text("mine")
    with pytest.raises(UsageError, match=r"val\.jsonl is there already, and this step did not write it"):
        prepare(moving(tmp_path / "v", "a.mp4"), tmp_path / "o")
    assert read_tree(tmp_path / "o") == {"val.jsonl": b"mine"}


def test_the_folder_of_videos_is_not_written_into(tmp_path):
    with pytest.raises(UsageError, match="the output would lie in the folder of videos"):
        prepare(moving(tmp_path / "v", "a.mp4"), tmp_path / "v" / "clips")
    (tmp_path / "none").mkdir()
    with pytest.raises(WangenError, match="no video is in this folder"):
        prepare(tmp_path / "none", tmp_path / "o")


def test_the_contact_sheet_needs_nothing_but_itself(tmp_path):
    videos = moving(tmp_path / "v", "a.mp4", "b & <b>.mp4")
    write_video(videos / "still.mp4", waves(32, seed=9, step=0), 16)
    (videos / "a.txt").write_text("<script>alert(1)</script>", encoding="utf-8")
    prepare(videos, tmp_path / "o", frames=29)
    page = (tmp_path / "o" / "contact_sheet.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "http" not in page
    assert "b &amp; &lt;b&gt;.mp4" in page
    assert page.count('src="data:image/jpeg;base64,') == page.count("<img") == 9
    assert page.count("<article>") == 3
    assert "motion: only" in page
    for row in clips(tmp_path / "o"):
        assert f'href="{row["file"]}"' in page
