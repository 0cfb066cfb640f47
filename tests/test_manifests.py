"""Items of manifests, and control media and masks of folders: found, or named with what is wrong."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import clip_bytes, image_bytes, write_tree

from wangen.generator.dataset import Item
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.items import read_items
from wangen.generator.manifests import MAX_TOLD, read_manifest
from wangen.generator.tomls import DatasetEntry, read_dataset

IMAGE = image_bytes()


def lines(*values: dict[str, Any] | str) -> str:
    return "\n".join(value if isinstance(value, str) else json.dumps(value) for value in values) + "\n"


def block(folder: Path, **changes: Any) -> DatasetEntry:
    values: dict[str, Any] = {"directory": folder / "media", "media": "image", "cache_directory": folder / "cache"}
    return DatasetEntry(**values | changes)


def told(entry: DatasetEntry, *, deep: bool = True) -> list[str]:
    return [str(problem) for problem in read_items(entry, deep=deep)[1]]


# Manifests


def test_lines_become_items_in_their_order(tmp_path):
    tree = dict.fromkeys(("z/cat.png", "a/cat.png", "line.PNG", "mask.png", "two.jpg"), IMAGE)
    manifest = lines(
        "\ufeff" + json.dumps({"image_path": "z/cat.png", "caption": " a cat\n", "seed": 3}),
        "",
        {"image_path": "a/cat.png", "caption": ["another", " a second caption "]},
        "   \r",
        {"image_path": str(tmp_path / "two.jpg"), "caption": "two\nlines"},
        {"image_path": "z/cat.png", "caption": "the same cat"},
    )
    path = write_tree(tmp_path, tree | {"set.jsonl": manifest}) / "set.jsonl"
    items, problems = read_manifest(path, "image")
    assert problems == []
    assert items == [
        Item(tmp_path / "z/cat.png", "image", ("a cat",), path),
        Item(tmp_path / "a/cat.png", "image", ("another", "a second caption"), path),
        Item(tmp_path / "two.jpg", "image", ("two\nlines",), path),
        Item(tmp_path / "z/cat.png", "image", ("the same cat",), path),
    ]
    split, _ = read_manifest(path, "image", multiple_captions=True)
    assert split[2].captions == ("two", "lines")


def test_control_media_and_masks_of_lines(tmp_path):
    line = {"image_path": "a.png", "caption": "x", "mask_path": "m.png", "control_path_10": "k.png"}
    line |= {"control_path_2": "c.png", "control_path": "l.png"}
    tree = dict.fromkeys(("a.png", "m.png", "c.png", "k.png", "l.png"), IMAGE) | {"set.jsonl": lines(line)}
    ((item,), problems) = read_manifest(write_tree(tmp_path, tree) / "set.jsonl", "image")
    assert problems == []
    assert [path.name for path in item.controls] == ["l.png", "c.png", "k.png"]
    assert (item.mask, len(item.companions)) == (tmp_path / "m.png", 4)


def test_paths_start_at_the_manifest_then_at_the_working_folder(tmp_path, monkeypatch):
    tree = dict.fromkeys(("set/both.png", "work/both.png", "work/pics/work.png"), IMAGE)
    names = ["both.png", "pics/work.png", "pics\\work.png"]
    tree |= {"set/set.jsonl": lines(*({"image_path": name, "caption": "x"} for name in names))}
    write_tree(tmp_path, tree)
    monkeypatch.chdir(tmp_path / "work")
    items, problems = read_manifest(tmp_path / "set/set.jsonl", "image")
    assert problems == []
    assert items[0].path == tmp_path / "set/both.png"
    assert [item.path.resolve() for item in items[1:]] == [tmp_path / "work/pics/work.png"] * 2


def test_everything_that_is_wrong_is_listed_at_once_with_its_line(tmp_path):
    good = {"image_path": "a.png", "caption": "x"}
    cases: list[tuple[dict[str, Any] | str, str]] = [
        ("{nonsense", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("7", "is no JSON object"),
        ({"caption": "x"}, 'has no image_path; write "image_path"'),
        ({"video_path": "b.mp4", "caption": "x"}, "has no image_path; use video_jsonl_file"),
        ({"image_path": "", "caption": "x"}, "image_path must be a path"),
        ({"image_path": 3, "caption": "x"}, "image_path must be a path, got 3"),
        ({"image_path": "gone.png", "caption": "x"}, "gone.png is not there"),
        ({"image_path": "a\0.png", "caption": "x"}, "is not there"),
        ({"image_path": ".", "caption": "x"}, ". is a folder; name a file in it"),
        ({"image_path": "b.mp4", "caption": "x"}, "b.mp4 is no image"),
        ({"image_path": "a.png"}, "has no caption"),
        ({"image_path": "a.png", "caption": []}, "has no caption"),
        ({"image_path": "a.png", "caption": " \n"}, "its caption is empty"),
        ({"image_path": "a.png", "caption": ["x", ""]}, "its caption is empty"),
        ({"image_path": "a.png", "caption": None}, "a text or a list of texts, got null"),
        ({"image_path": "a.png", "caption": ["x", 1]}, "a text or a list of texts"),
        (good | {"control_path": "gone.png"}, "gone.png is not there"),
        (good | {"mask_path": "b.mp4"}, "b.mp4 is no image"),
    ]
    manifest = lines(good, *(line for line, _ in cases))
    write_tree(tmp_path, {"a.png": IMAGE, "b.mp4": "x", "set.jsonl": manifest})
    items, problems = read_manifest(tmp_path / "set.jsonl", "image")
    assert [item.path.name for item in items] == ["a.png"]
    assert len(problems) == len(cases)
    for number, (problem, (_, words)) in enumerate(zip(problems, cases, strict=True), 2):
        assert str(problem).startswith(f"set.jsonl: line {number}: ")
        assert words in str(problem)


def test_lines_that_lack_what_others_have(tmp_path):
    first = {"image_path": "a.png", "caption": "x", "control_path": "a.png", "mask_path": "a.png"}
    manifest = lines("", first, {"image_path": "a.png", "caption": "y"}, first | {"control_path_1": "a.png"})
    _, problems = read_manifest(write_tree(tmp_path, {"a.png": IMAGE, "s.jsonl": manifest}) / "s.jsonl", "image")
    assert [problem.found for problem in problems] == [
        "line 3: has no control_path, other lines have one", "line 3: has no mask_path, other lines have one",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "words"), [("", "holds no lines"), ("\n \n", "holds no lines"), ('[\n{"a": 1},\n]', "one JSON list")]
)
def test_a_manifest_without_lines(tmp_path, content, words):
    _, (problem,) = read_manifest(write_tree(tmp_path, {"set.jsonl": content}) / "set.jsonl", "video")
    assert words in problem.found


def test_a_manifest_that_cannot_be_read(tmp_path):
    write_tree(tmp_path, {"latin.jsonl": "Stra\xdfe".encode("latin-1")})
    for name, words in (("none.jsonl", "cannot read the manifest"), ("latin.jsonl", "is not UTF-8")):
        with pytest.raises(WangenError, match=words) as caught:
            read_manifest(tmp_path / name, "image")
        assert caught.value.where == str(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("set.json", "rename it to set.jsonl"),
        ("set", "rename it to set.jsonl"),
        ("set.tar.gz", "as a .tar"),
        ("set.TGZ", "as a .tar"),
        ("", "give the .jsonl or the .toml in it"),
    ],
)
def test_what_is_not_called_like_a_manifest_is_answered_with_its_name(tmp_path, name, cure):
    if name:
        write_tree(tmp_path, {name: lines({"image_path": "a.png", "caption": "x"})})
    with pytest.raises(UsageError) as error:
        read_dataset(tmp_path / name)
    assert error.value.where == str(tmp_path / name)
    assert cure in error.value.cure


def test_broken_media_of_a_manifest_are_no_items(tmp_path):
    values = [{"image_path": f"{name}.png", "caption": "x", "mask_path": f"{name}_m.png"} for name in "abc"]
    tree = {"a.png": IMAGE, "b.png": IMAGE[:50], "c.png": IMAGE, "a_m.png": IMAGE, "b_m.png": IMAGE, "c_m.png": "x"}
    write_tree(tmp_path, tree | {"set.jsonl": lines(*values)})
    entry = block(tmp_path, manifest=tmp_path / "set.jsonl")
    items, problems = read_items(entry)
    assert [item.path.name for item in items] == ["a.png"]
    assert [problem.path.name for problem in problems] == ["b.png", "c_m.png"]
    assert len(read_items(entry, deep=False)[0]) == 3


def test_a_manifest_and_a_folder_give_the_same_items(tmp_path):
    tree = {f"media/{name}": IMAGE for name in ("a.jpg", "a.png", "B.PNG")}
    tree |= {"media/a.txt": "an ape\n", "media/B.TXT": "a bee"}
    tree |= {"set.jsonl": lines(*(
        {"image_path": f"media/{name}", "caption": caption}
        for name, caption in (("B.PNG", "a bee"), ("a.jpg", "an ape"), ("a.png", "an ape"))
    ))}  # fmt: skip
    write_tree(tmp_path, tree)
    listed, problems = read_items(block(tmp_path, manifest=tmp_path / "set.jsonl"))
    in_folder, more = read_items(block(tmp_path))
    assert problems + more == []
    assert [replace(item, caption_path=Path()) for item in in_folder] == [
        replace(item, caption_path=Path()) for item in listed
    ]


# Several captions


def test_lines_of_a_caption_file_can_be_captions_of_their_own(tmp_path):
    write_tree(tmp_path, {"media/a.png": IMAGE, "media/a.txt": "\ufeffone\r\n\r\n  two \n"})
    ((single,), _) = read_items(block(tmp_path))
    ((several,), _) = read_items(block(tmp_path, multiple_captions=True))
    assert single.captions == ("one\r\n\r\n  two",)
    assert (several.captions, several.caption) == (("one", "two"), "one")


# Control media and masks in folders


def folders(tmp_path: Path, files: dict[str, bytes], control: dict[str, bytes], **changes: Any) -> DatasetEntry:
    tree: dict[str, bytes | str] = {f"media/{name}": content for name, content in files.items()}
    tree |= {f"media/{Path(name).stem}.txt": "x" for name in files} | {f"control/{n}": c for n, c in control.items()}
    write_tree(tmp_path, tree)
    (tmp_path / "control").mkdir(exist_ok=True)
    return block(tmp_path, **{"control_directory": tmp_path / "control"} | changes)


def test_media_of_other_formats_are_named_and_counted(tmp_path, caplog):
    entry = folders(
        tmp_path, dict.fromkeys(("a.png", "b.GIF", "c.jxl", "c.txt.bak"), IMAGE), {}, control_directory=None
    )
    read_items(entry, deep=False)
    (message,) = caplog.messages
    assert "2 (b.GIF, c.jxl)" in message
    read_items(replace(entry, media="video"), deep=False)
    assert "1 (b.GIF)" in caplog.messages[1]


def test_control_images_by_stem_and_number(tmp_path):
    control = dict.fromkeys(("cat.webp", "cat_2.png", "cat_10.png", "dog_0.png", "cat_1.JPG", "other.png"), IMAGE)
    entry = folders(tmp_path, {"Cat.jpg": IMAGE, "cat_1.jpg": IMAGE, "dog.png": IMAGE}, control)
    items, problems = read_items(entry, deep=False)
    assert problems == []
    assert {item.path.name: [path.name for path in item.controls] for item in items} == {
        "Cat.jpg": ["cat.webp", "cat_2.png", "cat_10.png"],  # not cat_1, which is another image's
        "cat_1.jpg": ["cat_1.JPG"],
        "dog.png": ["dog_0.png"],
    }


def test_missing_and_doubled_control_media_are_named(tmp_path):
    control = dict.fromkeys(("b_1.png", "b_01.png", "c.png", "c.jpg", "d.mp4"), IMAGE)
    entry = folders(tmp_path, {f"{stem}.png": IMAGE for stem in "abcd"}, control)
    first, second, third, fourth = told(entry, deep=False)
    assert "a.png: has no control in" in first
    assert "b.png: has two files for one control: b_01.png and b_1.png" in second
    assert "c.png: has two files" in third
    assert "d.png: has no control" in fourth  # a clip is no control of an image
    assert read_items(entry, deep=False)[0] == []


def test_clips_have_clips_or_stills_beside_them(tmp_path):
    clip = clip_bytes(tmp_path, num_frames=5)
    entry = folders(
        tmp_path, {"a.mp4": clip, "b.mp4": clip}, {"a.MKV": clip, "b.png": IMAGE, "a_0.png": IMAGE},
        media="video", mask_directory=tmp_path / "control",
    )  # fmt: skip
    items, problems = read_items(entry)
    assert problems == []
    assert [[path.name for path in item.companions] for item in items] == [["a.MKV", "a.MKV"], ["b.png", "b.png"]]


def test_masks_by_stem_alone(tmp_path):
    write_tree(tmp_path, {"masks/a.png": IMAGE, "masks/b_0.png": IMAGE})
    entry = folders(tmp_path, {"a.jpg": IMAGE, "b.jpg": IMAGE}, {}, control_directory=None)
    items, problems = read_items(replace(entry, mask_directory=tmp_path / "masks"))
    assert [(item.path.name, item.mask) for item in items] == [("a.jpg", tmp_path / "masks/a.png")]
    assert [problem.path.name for problem in problems] == ["b.jpg"]
    assert "has no mask" in problems[0].found


def test_a_broken_control_image_takes_its_item_out(tmp_path):
    entry = folders(tmp_path, {"a.jpg": IMAGE, "b.jpg": IMAGE}, {"a.jpg": IMAGE, "b.jpg": IMAGE[:40]})
    items, (problem,) = read_items(entry)
    assert [item.path.name for item in items] == ["a.jpg"]
    assert problem.path == tmp_path / "control" / "b.jpg"


def test_a_control_folder_that_is_not_there(tmp_path):
    entry = folders(tmp_path, {"a.jpg": IMAGE}, {}, control_directory=tmp_path / "gone")
    with pytest.raises(WangenError, match="cannot list the folder") as caught:
        read_items(entry)
    assert caught.value.where == str(tmp_path / "gone")


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot hold this name")
def test_names_that_windows_cannot_hold(tmp_path):
    manifest = lines({"image_path": "a:b.png", "caption": "x"})
    _, (problem,) = read_manifest(write_tree(tmp_path, {"a:b.png": IMAGE, "s.jsonl": manifest}) / "s.jsonl", "image")
    assert "Windows cannot hold this name" in problem.found


def test_of_a_file_that_is_no_manifest_at_all_the_first_lines_are_told(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("no\n" * (MAX_TOLD + 7))
    items, problems = read_manifest(path)
    assert (items, len(problems)) == ([], MAX_TOLD + 1)
    assert "has 7 more lines like these" in str(problems[-1])
