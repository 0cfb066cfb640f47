"""Where captions come from when a dataset is published, and what is said when they do not fit."""

import json
from pathlib import Path

import pytest
from helpers import clip_bytes, image_bytes, read_tree, write_tree

from wangen import profiles
from wangen.generator.cli import main
from wangen.generator.publish.captions import with_trigger
from wangen.generator.publish.source import read_source

TOML = 'resolution = [64, 64]\nnum_frames = 17\nplatforms = ["linux"]\n'
MODEL = profiles.model("t2v-1.3B")
JPEG = image_bytes()


def line(**values: object) -> str:
    return json.dumps(values, ensure_ascii=False) + "\n"


def captions(origin: Path) -> dict[str, str]:
    return {item.path.name: item.caption for item in read_source(origin, MODEL).items}


def problems(origin: Path) -> list[str]:
    return list(dict.fromkeys(map(str, read_source(origin, MODEL).problems)))


def test_text_files_caption_files_and_lines_of_a_jsonl(tmp_path):
    tree = {
        "a.jpg": JPEG, "a.txt": "an ape",
        "b.jpg": JPEG, "b.caption": "a bee",
        "c.JPG": JPEG, "C.TXT": "a cat",
        "d.jpg": JPEG, "e.jpg": JPEG, "f.jpg": JPEG,
        "more.jsonl": "\ufeff" + line(image_path="d.jpg", caption=" a dog ") + "\n   \n"
        + line(file_name="./e.jpg", text="an eel", score=0.5) + "\r\n"
        + line(video_path="f.jpg", caption="Füße 🦊").strip(),
    }  # fmt: skip
    assert captions(write_tree(tmp_path, tree)) == {
        "a.jpg": "an ape", "b.jpg": "a bee", "c.JPG": "a cat", "d.jpg": "a dog", "e.jpg": "an eel", "f.jpg": "Füße 🦊",
    }  # fmt: skip


def test_a_caption_that_stands_in_several_places_must_be_one(tmp_path):
    tree = {
        "same.jpg": JPEG, "same.txt": "one", "same.caption": "one\n",
        "two.jpg": JPEG, "two.txt": "one", "two.caption": "another",
        "three.jpg": JPEG, "three.txt": "one",
        "all.jsonl": line(file_name="same.jpg", text="one") + line(file_name="three.jpg", text="third"),
    }  # fmt: skip
    assert problems(write_tree(tmp_path, tree)) == [
        "three.jpg: has captions that differ: three.txt, all.jsonl line 2; keep one of them",
        "two.jpg: has captions that differ: two.txt, two.caption; keep one of them",
    ]


def test_every_wrong_line_of_a_jsonl_is_named_at_once(tmp_path):
    lines = [
        line(image_path="a.jpg", caption="fine"), "{", "[1]\n", line(caption="no media"), line(image_path="a.jpg"),
        line(image_path="gone.jpg", caption="x"), line(image_path="notes.txt", caption="x"),
        line(image_path="a.jpg", caption=" "), line(image_path=3, caption="x"),
        line(image_path="a.jpg", file_name="b.jpg", caption="x"), "[" * 100_000,
        line(image_path="a" * 5000 + ".jpg", caption="x"), '{"file_name": "a.jpg", "text": "\\ud800"}',
    ]  # fmt: skip
    text = "".join(part if part.endswith("\n") else part + "\n" for part in lines)
    write_tree(tmp_path, {"a.jpg": JPEG, "bare.jpg": JPEG, "notes.txt": "x", "set.jsonl": text})
    found = problems(tmp_path)
    assert [text.split(";")[0].split(" (")[0] for text in found if "notes.txt;" not in text] == [
        "bare.jpg: has no caption",
        "set.jsonl: line 10: has image_path and file_name, one is needed",
        "set.jsonl: line 11: is not JSON",
        f"set.jsonl: line 12: {'a' * 400}… is not there",
        "set.jsonl: line 13: its caption holds half a character",
        "set.jsonl: line 2: is not JSON",
        "set.jsonl: line 3: is no JSON object",
        "set.jsonl: line 4: has no file",
        "set.jsonl: line 5: has no caption",
        "set.jsonl: line 6: gone.jpg is not there",
        "set.jsonl: line 7: notes.txt is no image or video by its ending",
        "set.jsonl: line 8: its caption is empty",
        "set.jsonl: line 9: image_path must be a path, got 3",
    ]


@pytest.mark.parametrize(("content", "words"), [("é".encode("latin-1"), "is not UTF-8"), (b"", "holds no lines")])
def test_a_jsonl_that_holds_nothing(tmp_path, content, words):
    assert words in problems(write_tree(tmp_path, {"set.jsonl": content}) / "set.jsonl")[0]


def test_the_captions_of_renamed_media_are_named_with_the_media(tmp_path):
    write_tree(tmp_path, {"eye.jpg": JPEG, "retina.txt": "an eye", "a.jpg": JPEG, "a.txt": "an ape"})
    assert problems(tmp_path) == [
        "eye.jpg: has no caption; write eye.txt beside it",
        f"{tmp_path.name}: holds captions without their image or video: retina.txt; rename the caption with its image",
    ]
    (tmp_path / "eye.txt").write_text("an eye")
    assert problems(tmp_path) == []


def test_captions_of_pictures_that_are_not_read_name_the_pictures(tmp_path):
    texts = {"page.txt": "a page", "cat.txt": "a cat"}
    write_tree(tmp_path, {"eye.jpg": JPEG, "page.tif": JPEG, "cat.jfif": JPEG, **texts})
    write_tree(tmp_path, {"owl.txt": "an owl", "owl.json": "{}"})
    assert problems(tmp_path) == [
        "cat.jfif: is of a kind that is not read; rename it to .jpg",
        "eye.jpg: has no caption; write eye.txt beside it",
        "page.tif: is of a kind that is not read; save it as .png or .mp4",
        f"{tmp_path.name}: holds captions without their image or video: owl.txt; rename the caption with its image",
    ]


def test_media_that_share_a_caption_are_said(tmp_path, capsys):
    dataset = {"cat.jpg": JPEG, "cat.png": JPEG, "cat.txt": "a cat", "dog.jpg": JPEG, "dog.txt": "a dog"}
    place = write_tree(tmp_path, {"wangen.toml": TOML})
    write_tree(place / "datasets" / "x", dataset)
    for words in (["--dry-run"], []):
        assert main(["publish", "x", "--workspace", str(place), *words]) == 0
        assert "  cat.jpg and cat.png share the caption cat.txt\n" in capsys.readouterr().out
    (place / "datasets/x/Cat.PNG").write_bytes(JPEG)
    if len(list((place / "datasets/x").iterdir())) > len(dataset):  # a disk that tells the names apart
        assert main(["publish", "x", "--workspace", str(place)]) == 1
        assert "differ in letter case" in capsys.readouterr().err


def test_a_jsonl_may_list_media_anywhere(tmp_path):
    text = line(image_path="one/a.jpg", caption="a") + line(image_path=str(tmp_path / "two" / "b.jpg"), caption="b")
    tree = {"sets/one/a.jpg": JPEG, "two/b.jpg": JPEG, "sets/list.jsonl": text, "sets/other.jpg": JPEG}
    write_tree(tmp_path, tree)
    source = read_source(tmp_path / "sets" / "list.jsonl", MODEL)
    assert [item.path for item in source.items] == [tmp_path / "sets/one/a.jpg", tmp_path / "two/b.jpg"]
    assert source.left_out == ["other.jpg (no line of list.jsonl names it)"]


def test_names_from_several_folders_must_not_become_one(tmp_path):
    text = line(image_path="one/a.jpg", caption="a") + line(image_path="two/a.jpg", caption="b")
    text += line(image_path="one/A.png", caption="c") + line(image_path="one/z.jpg", caption="d")
    text += line(image_path="two/z.png", caption="e") + line(image_path="two/q.jpg", caption="same")
    text += line(image_path="one/q.png", caption="same")
    names = {"one/a.jpg", "two/a.jpg", "one/z.jpg", "two/q.jpg"}
    tree = dict.fromkeys(names, JPEG)
    tree |= {name: image_bytes(format="PNG") for name in ("one/A.png", "two/z.png", "one/q.png")}
    found = problems(write_tree(tmp_path, tree | {"x.jsonl": text.encode()}) / "x.jsonl")
    assert [text.split("; ")[0] for text in found] == [
        "a.jpg: A.txt and a.txt differ in letter case or Unicode form only: one file on Windows or macOS",
        "a.jpg: one/ and two/ hold a file of this name",
        "a.jpg: shares the caption file a.txt with a.jpg, and their captions differ",
        "z.png: shares the caption file z.txt with z.jpg, and their captions differ",
    ]


def test_lines_may_name_media_below_the_folder(tmp_path):
    tree = {"metadata.jsonl": line(file_name="images/1.jpg", text="one"), "images/1.jpg": JPEG, "images/2.jpg": JPEG}
    source = read_source(write_tree(tmp_path, tree), MODEL)
    assert [item.path.name for item in source.items] == ["1.jpg"]
    assert source.left_out == ["images/ (1 media files; sub-folders are not read)"]


def test_what_is_no_item_is_named(tmp_path):
    tree = {
        "a.jpg": JPEG, "a.txt": "an ape", "b.HEIC": b"x", "orphan.txt": "nobody", "sub/c.jpg": JPEG,
        "empty/x.txt": "x", ".hidden": "x",
    }  # fmt: skip
    lines = read_source(write_tree(tmp_path, tree), MODEL).left_out
    assert [text.split(" (")[0] for text in lines] == ["b.HEIC", "orphan.txt", "sub/"]
    assert "1 media files; sub-folders are not read" in lines[2]
    (tmp_path / "a.jpg").unlink()
    assert problems(tmp_path)[0].startswith(f"{tmp_path.name}: holds no image or video files; it has a.txt (a caption")


# ---- the memo ----------------------------------------------------------------------------------------------------


def opened(monkeypatch) -> list[str]:
    from wangen.generator.publish import source

    names: list[str] = []
    real = source.inspect
    monkeypatch.setattr(source, "inspect", lambda path: (names.append(path.name), real(path))[1])
    monkeypatch.setattr(source, "COARSE_NS", -1)
    return names


def test_unchanged_media_are_not_opened_again(tmp_path, monkeypatch):
    folder = write_tree(tmp_path / "set", {"a.jpg": JPEG, "a.txt": "a", "b.jpg": JPEG, "b.txt": "b"})
    (folder / "c.mp4").write_bytes(clip_bytes(tmp_path, num_frames=100))
    (folder / "c.txt").write_text("c")
    names, memo = opened(monkeypatch), tmp_path / "memo.json"
    first = read_source(folder, MODEL, memo=memo)
    assert sorted(names) == ["a.jpg", "b.jpg", "c.mp4"]
    (folder / "b.jpg").write_bytes(image_bytes((32, 32)))
    names.clear()
    second = read_source(folder, MODEL, memo=memo)
    assert names == ["b.jpg"]
    assert second.facts[folder / "b.jpg"].width == 32
    assert second.facts[folder / "c.mp4"] == first.facts[folder / "c.mp4"]
    (folder / "a.jpg").write_bytes(b"broken")
    assert "a.jpg: cannot be read as an image" in problems(folder)[0]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 3}', '{"x": [1, 2]}', '{"PATH": [1, 2, 3, 4, 5, 6]}'])
def test_a_memo_that_is_none_is_not_believed(tmp_path, monkeypatch, text):
    folder = write_tree(tmp_path / "set", {"a.jpg": JPEG, "a.txt": "a"})
    names, memo = opened(monkeypatch), tmp_path / "memo.json"
    memo.write_text(text.replace("PATH", str(folder / "a.jpg")))
    assert read_source(folder, MODEL, memo=memo).facts[folder / "a.jpg"].width == 64
    assert names == ["a.jpg"]


def test_a_file_that_was_written_just_now_is_opened_again(tmp_path):
    folder, memo = write_tree(tmp_path / "set", {"a.jpg": JPEG, "a.txt": "a"}), tmp_path / "memo.json"
    read_source(folder, MODEL, memo=memo)
    assert not memo.exists()


# ---- the trigger word --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caption", "published"),
    [
        ("a cat", "ohwx cat, a cat"),
        ("a photo of ohwx cat.", "a photo of ohwx cat."),
        ("ohwx cats", "ohwx cat, ohwx cats"),
        ("Ohwx Cat", "ohwx cat, Ohwx Cat"),
        ("xohwx cat", "ohwx cat, xohwx cat"),
    ],
)
def test_a_trigger_word_is_added_once(caption, published):
    assert with_trigger(caption, "ohwx cat") == published
    assert with_trigger(published, "ohwx cat") == published
    assert with_trigger(caption, "") == caption


def test_a_trigger_with_signs_of_patterns():
    assert with_trigger("a cat", "c++ (x)") == "c++ (x), a cat"
    assert with_trigger("my c++ (x) cat", "c++ (x)") == "my c++ (x) cat"


def published(place: Path) -> dict[str, bytes]:
    tree = read_tree(place / "published" / "linux" / "files" / "datasets" / "cats" / "64")
    return {name: data for name, data in tree.items() if name.endswith(".txt")}


def test_the_trigger_is_remembered_and_originals_stay(tmp_path, capsys):
    tree = {"wangen.toml": "# mine\n" + TOML, "datasets/cats/a.jpg": JPEG, "datasets/cats/a.txt": "\ufeffa cat\n"}
    originals = read_tree(write_tree(tmp_path, tree) / "datasets")
    words = ["publish", "cats", "--workspace", str(tmp_path)]
    assert main([*words, "--trigger", "ohwx"]) == 0
    assert published(tmp_path) == {"a.txt": b"ohwx, a cat"}
    assert "remembered in wangen.toml, [dataset.cats]: trigger = ohwx" in capsys.readouterr().out
    assert (tmp_path / "wangen.toml").read_text().startswith("# mine\n")
    assert main(words) == 0
    assert published(tmp_path) == {"a.txt": b"ohwx, a cat"}
    assert "remembered in" not in capsys.readouterr().out
    assert main([*words, "--trigger", ""]) == 0
    assert published(tmp_path) == {"a.txt": b"a cat"}
    assert read_tree(tmp_path / "datasets") == originals


@pytest.mark.parametrize("trigger", [" ohwx", "a\nb", "\t"])
def test_a_trigger_that_is_none(tmp_path, capsys, trigger):
    write_tree(tmp_path, {"wangen.toml": TOML, "datasets/cats/a.jpg": JPEG, "datasets/cats/a.txt": "x"})
    assert main(["publish", "cats", "--workspace", str(tmp_path), "--trigger", trigger]) == 2
    assert "is no trigger word" in capsys.readouterr().err
    assert not (tmp_path / "published").exists()
