"""A folder of media with captions becomes items, or the list of everything that is wrong with it."""

import errno
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from helpers import clip_bytes, image_bytes, make_clip, make_image, write_tree
from PIL import Image

from wangen.generator.dataset import BadItemError, MediaFacts, Problem, inspect, read_caption, read_facts, scan
from wangen.generator.errors import WangenError

posix_names = pytest.mark.skipif(os.name == "nt", reason="Windows cannot hold these names")


def problems_of(folder: Path, **options: object) -> list[str]:
    return [str(problem) for problem in scan(folder, **options)[1]]  # type: ignore[arg-type]


def test_images_and_clips_become_items_with_their_captions(tmp_path):
    tree = {
        "b.PNG": image_bytes(format="PNG"),
        "b.txt": "a bee\n",
        "A.JPG": image_bytes(),
        "A.txt": "\ufeff  an ape  ",
        "c.Mp4": clip_bytes(tmp_path),
        "c.txt": "ein Übergang 日本 🦊",
        "notes.md": "no caption",
        ".hidden.jpg": "x",
        "sub/deep.jpg": "x",
    }
    items, problems = scan(write_tree(tmp_path / "set", tree))
    assert problems == []
    assert [(item.path.name, item.media, item.caption) for item in items] == [
        ("A.JPG", "image", "an ape"),
        ("b.PNG", "image", "a bee"),
        ("c.Mp4", "video", "ein Übergang 日本 🦊"),
    ]
    assert all(item.caption_path.read_text(encoding="utf-8-sig").strip() == item.caption for item in items)


def test_one_kind_of_media_and_another_caption_ending(tmp_path):
    tree = {"a.jpg": image_bytes(), "a.caption": "one", "b.mp4": clip_bytes(tmp_path), "b.caption": "two"}
    folder = write_tree(tmp_path / "set", tree)
    images, problems = scan(folder, media="image", caption_extension=".caption")
    clips, _ = scan(folder, media="video", caption_extension=".caption")
    assert (problems, [i.caption for i in images], [c.caption for c in clips]) == ([], ["one"], ["two"])


def test_captions_of_another_ending_are_named_with_the_setting(tmp_path):
    write_tree(tmp_path, {"a.jpg": image_bytes(), "a.txt": "an ape", "b.jpg": image_bytes()})
    problems = [str(problem) for problem in scan(tmp_path, caption_extension=".cap")[1]]
    assert problems == [
        'a.jpg: has no caption; a.txt is there: say caption_extension = ".txt"',
        "b.jpg: has no caption; write b.cap beside it",
    ]


def test_a_caption_whose_name_differs_in_case_is_found(tmp_path):
    items, problems = scan(write_tree(tmp_path, {"DSC1.JPG": image_bytes(), "DSC1.TXT": "from a camera"}))
    assert (problems, items[0].caption) == ([], "from a camera")


@pytest.mark.parametrize(("orientation", "size"), [(1, (64, 48)), (3, (64, 48)), (6, (48, 64)), (8, (48, 64))])
def test_size_is_that_of_the_upright_picture(tmp_path, orientation, size):
    facts = read_facts(make_image(tmp_path / "a.jpg", (64, 48), orientation=orientation))
    assert facts == MediaFacts(*size, 1, 0.0)


@pytest.mark.slow
def test_an_avif_that_is_damaged_anywhere_in_its_header_is_no_traceback(tmp_path):
    path, still = tmp_path / "a.avif", Image.new("RGB", (16, 16), "red")
    still.save(path, save_all=True, append_images=[still.rotate(90)])
    whole = path.read_bytes()
    bad = []
    for place in range(whole.index(b"mdat")):
        path.write_bytes(whole[:place] + bytes(4) + whole[place + 4 :])
        bad += [place] if isinstance(inspect(path), Problem) else []
    assert len(bad) > 50


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_facts_of_a_clip(tmp_path, name):
    facts = read_facts(make_clip(tmp_path / name, num_frames=20, fps=8, size=(96, 64)))
    assert (facts.width, facts.height, facts.num_frames) == (96, 64, 20)
    assert facts.duration_s == pytest.approx(2.5, abs=0.01)


def test_a_clip_without_presentation_times_has_a_length(tmp_path):
    path = tmp_path / "a.avi"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(10))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(10):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), number * 20, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    facts = read_facts(path)
    assert (facts.num_frames, facts.duration_s) == (10, pytest.approx(1.0))


def test_everything_that_is_wrong_is_listed_at_once(tmp_path):
    jpeg = image_bytes((200, 200))
    tree = {
        "fine.jpg": jpeg,
        "fine.txt": "fine",
        "uncaptioned.jpg": jpeg,
        "empty.jpg": jpeg,
        "empty.txt": " \n",
        "invisible.jpg": jpeg,
        "invisible.txt": "\u200b \u2060\n",
        "latin.jpg": jpeg,
        "latin.txt": "Stra\xdfe".encode("latin-1"),
        "utf16.jpg": jpeg,
        "utf16.txt": "from Notepad".encode("utf-16"),
        "truncated.jpg": jpeg[: len(jpeg) // 2],
        "truncated.txt": "its header is fine",
        "zero.png": b"",
        "zero.txt": "nothing",
        "broken.mp4": clip_bytes(tmp_path)[:200],
        "broken.txt": "cut short",
        "text.mp4": "this is a text\n" * 50,
        "text.txt": "not a clip",
        "odd.png": b"\x89PNG\r\n\x1a\n" + b"\0" * 100,
        "odd.txt": "broken inside",
    }
    items, problems = scan(write_tree(tmp_path / "set", tree))
    assert [item.path.name for item in items] == ["fine.jpg"]
    found = {problem.path.name: problem.found for problem in problems}
    assert found.keys() == {
        "uncaptioned.jpg", "empty.txt", "invisible.txt", "latin.txt", "utf16.txt", "truncated.jpg", "zero.png",
        "broken.mp4", "text.mp4", "odd.png",
    }  # fmt: skip
    assert found["uncaptioned.jpg"] == "has no caption"
    assert found["empty.txt"] == found["invisible.txt"] == "is empty"
    assert found["latin.txt"] == found["utf16.txt"] == "is not UTF-8"
    assert "truncated" in found["truncated.jpg"]
    assert found["zero.png"] == "is empty (0 bytes)"
    assert found["text.mp4"].startswith("cannot be read as a video")
    assert all(problem.cure for problem in problems)
    assert not any(str(tmp_path) in str(problem) for problem in problems)


@pytest.mark.parametrize(
    ("start", "kind"),
    [(b"\0\0\0\x18ftypheic", "HEIC"), (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"), (b"\xff\x0a\xfa", "JPEG XL"),
     (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"), (b"8BPS\0\1", "a file of Photoshop")],
)  # fmt: skip
def test_a_picture_of_another_format_under_a_known_name_is_told_what_it_is(tmp_path: Path, start: bytes, kind: str):
    path = write_tree(tmp_path, {"a.jpg": start + bytes(200)}) / "a.jpg"
    with pytest.raises(WangenError) as caught:
        read_facts(path)
    assert caught.value.found == f"cannot be read as an image (it is {kind}: save it as PNG or JPEG)"


def test_a_picture_of_too_many_pixels_is_to_be_made_smaller(tmp_path: Path):
    Image.new("1", (20000, 9500)).save(tmp_path / "a.png")
    with pytest.raises(WangenError, match="has more than 178 million pixels: make it smaller"):
        read_facts(tmp_path / "a.png")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_an_mp4_that_broke_off_before_its_index_is_told_so(tmp_path: Path, share: float):
    whole = clip_bytes(tmp_path)
    path = write_tree(tmp_path, {"a.mp4": whole[: int(len(whole) * share)]}) / "a.mp4"
    with pytest.raises(WangenError, match="its end, where an mp4 has its index, is missing"):
        read_facts(path)


def test_an_empty_clip_and_one_that_is_no_mp4(tmp_path: Path):
    tree = write_tree(
        tmp_path, {"a.mp4": b"", "b.mp4": b"x" * 500, "c.mp4": b"\0\0\0\x08ftyp\0\0\0\x08moov" + bytes(99)}
    )
    assert inspect(tree / "a.mp4").found == "is empty (0 bytes)"
    for name in ("b.mp4", "c.mp4"):
        assert inspect(tree / name).found.startswith("cannot be read as a video ([Errno ")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_a_caption_in_utf_16_without_its_mark_is_no_text(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("a cat".encode(encoding))
    with pytest.raises(BadItemError, match="is not UTF-8"):
        read_caption(tmp_path / "a.txt")


@posix_names
def test_names_that_windows_cannot_hold(tmp_path):
    names = ["a:b.jpg", "nul.png", "what?.jpg", "dot.jpg.", "blank.jpg ", "con .jpeg"]
    tree = {name: image_bytes(format="PNG" if name == "nul.png" else "JPEG") for name in names}
    tree |= {f"{Path(name).stem}.txt": "x" for name in names[:3]} | {"con .txt": "x"}
    problems = scan(write_tree(tmp_path, tree))[1]
    assert {problem.path.name for problem in problems} == set(names)
    assert all(problem.found.startswith("Windows cannot hold this name") for problem in problems)


@posix_names
@pytest.mark.parametrize(
    ("names", "collide"),
    [
        (("Cat.jpg", "cat.jpg"), True),
        (("cat.jpg", "cat.JPG"), True),
        (("Cat.jpg", "cat.png"), True),  # one caption on Windows
        (("\u00e9.jpg", "e\u0301.jpg"), True),
        (("cat.jpg", "cat.png"), False),  # they share cat.txt on every system
        (("cat.jpg", "cats.jpg"), False),
    ],
)
def test_names_that_some_system_takes_for_one(tmp_path, names, collide):
    tree = {name: image_bytes(format="PNG" if name.endswith("png") else "JPEG") for name in names}
    write_tree(tmp_path, tree | {f"{Path(name).stem}.txt": "x" for name in names})
    if sum(path.suffix != ".txt" for path in tmp_path.iterdir()) < 2:
        pytest.skip("this file system does not tell them apart either")
    problems = problems_of(tmp_path)
    assert len(problems) == collide
    assert all(Path(name).stem in problem for name in names for problem in problems)


@posix_names
def test_a_name_that_is_not_utf8(tmp_path):
    name = os.fsdecode(b"caf\xe9.jpg")
    try:
        write_tree(tmp_path, {name: image_bytes(), os.fsdecode(b"caf\xe9.txt"): "x"})
    except OSError:
        pytest.skip("this file system holds UTF-8 names only")
    assert [problem.found for problem in scan(tmp_path)[1]] == ["the name is not UTF-8"]


def test_a_picture_that_the_disk_does_not_give_is_not_to_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "a.jpg").write_bytes(b"no picture")
    assert str(inspect(tmp_path / "a.jpg")) == "a.jpg: cannot be read as an image; replace it or take it out"

    def broken(_path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("wangen.generator.dataset.open_picture", broken)
    assert str(inspect(tmp_path / "a.jpg")) == "a.jpg: cannot be read as an image ([Errno 5] Input/output error); " \
        "see whether the disk or network drive answers"  # fmt: skip


@posix_names
def test_links(tmp_path):
    write_tree(tmp_path / "elsewhere", {"a.jpg": image_bytes()})
    folder = write_tree(tmp_path / "set", {"good.txt": "x", "lost.txt": "x"})
    (folder / "good.jpg").symlink_to("../elsewhere/a.jpg")
    (folder / "lost.jpg").symlink_to("../elsewhere/gone.jpg")
    items, problems = scan(folder)
    assert [item.path.name for item in items] == ["good.jpg"]
    assert [str(problem) for problem in problems] == [
        "lost.jpg: is a link to a file that is not there; replace it or take it out"
    ]


def test_a_caption_that_is_a_folder(tmp_path):
    write_tree(tmp_path, {"a.jpg": image_bytes(), "a.txt/x": "x"})
    assert len(problems_of(tmp_path)) == 1


def test_an_empty_folder_is_a_problem(tmp_path):
    (tmp_path / ".DS_Store").write_bytes(b"x")
    items, problems = scan(tmp_path)
    assert (items, [problem.found for problem in problems]) == ([], ["holds no image or video files"])
    assert "holds no video files" in problems_of(tmp_path, media="video")[0]


@pytest.mark.parametrize("place", ["missing", "file.txt"])
def test_a_folder_that_is_none(tmp_path, place):
    write_tree(tmp_path, {"file.txt": "x"})
    with pytest.raises(WangenError, match="cannot list the folder") as caught:
        scan(tmp_path / place)
    assert caught.value.where == str(tmp_path / place)


def test_shallow_scan_opens_no_media(tmp_path):
    items, problems = scan(write_tree(tmp_path, {"a.jpg": "no picture", "a.txt": "x"}), deep=False)
    assert (len(items), problems) == (1, [])


def test_without_the_library_for_clips_the_install_line_is_given(tmp_path, monkeypatch):
    write_tree(tmp_path, {"walk.mp4": "x", "walk.txt": "a walk"})
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(WangenError, match="clips need the library av") as caught:
        scan(tmp_path)
    assert caught.value.cure == f'in the folder of a wangen clone: "{sys.executable}" -m pip install ".[runtime]"'


@pytest.mark.parametrize(
    "content", [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\xd7\xcd\xc6\x9a" + bytes(90)]
)
def test_a_picture_that_is_a_program_is_handed_to_no_interpreter(tmp_path, monkeypatch, content):
    """Pillow would start Ghostscript, by what the file holds, not by its name."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program is started"))
    write_tree(tmp_path, {"a.png": content, "a.txt": "a cat"})
    (problem,) = problems_of(tmp_path)
    assert "cannot be read as an image" in problem
    assert "Ghostscript" not in problem
