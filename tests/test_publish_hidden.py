"""Changes that neither size nor time tells: swapped names, edits that keep both, a workspace that was copied."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from helpers import image_bytes, write_tree

from wangen.generator.cli import main
from wangen.generator.publish import manifest

TOML = 'resolution = [64, 64]\nnum_frames = 17\nplatforms = ["linux"]\n'
NOON_NS = 1_767_268_800 * 10**9


def bitmap(size: tuple[int, int] = (64, 64), seed: int = 0) -> bytes:
    """A picture without compression: two of one size have as many bytes."""
    return image_bytes(size, format="BMP", seed=seed)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two pictures of one size and one time, as an archive leaves them."""
    tree = {"wangen.toml": TOML, **{f"datasets/cats/{name}.txt": name for name in ("red", "blue")}}
    made = write_tree(tmp_path / "ws", tree)
    for seed, name in enumerate(("red", "blue")):
        put(made, name, bitmap(seed=seed))
    return made


@pytest.fixture(params=["links", "copies"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How media come into the bundle."""
    if request.param == "copies":
        monkeypatch.setattr(os, "link", no_links)
    return str(request.param)


def no_links(*_words: object, **_names: object) -> None:
    raise OSError(errno.EXDEV, "another file system")


def source(place: Path, name: str) -> Path:
    return place / "datasets" / "cats" / f"{name}.bmp"


def put(place: Path, name: str, data: bytes) -> None:
    """Write a source file in place, at noon."""
    source(place, name).write_bytes(data)
    os.utime(source(place, name), ns=(NOON_NS, NOON_NS))


def swap(place: Path) -> None:
    source(place, "red").rename(place / "t")
    source(place, "blue").rename(source(place, "red"))
    (place / "t").rename(source(place, "blue"))


def publish(place: Path, *words: str) -> int:
    return main(["publish", "cats", "--workspace", str(place), *words])


def media(place: Path, size: str = "64") -> Path:
    return place / "published" / "linux" / "files" / "datasets" / "cats" / size


def published(place: Path, name: str) -> bytes:
    return (media(place) / f"{name}.bmp").read_bytes()


def test_names_that_were_swapped(place: Path, way: str):
    assert publish(place) == 0
    swap(place)
    assert publish(place) == 0
    assert [published(place, name) for name in ("red", "blue")] == [bitmap(seed=1), bitmap(seed=0)]
    assert (media(place) / "red.bmp").samefile(source(place, "red")) == (way == "links")


def test_another_file_in_its_place(place: Path, way: str):
    assert publish(place) == 0
    (place / "new").write_bytes(bitmap(seed=7))
    os.utime(place / "new", ns=(NOON_NS, NOON_NS))
    (place / "new").replace(source(place, "red"))
    assert publish(place) == 0
    assert published(place, "red") == bitmap(seed=7)


def test_an_edit_in_place(place: Path, way: str):
    assert publish(place) == 0
    put(place, "red", bitmap(seed=7))
    assert publish(place) == 0
    assert published(place, "red") == bitmap(seed=7)


def test_smaller_copies_of_swapped_pictures(place: Path):
    for seed, name in enumerate(("red", "blue")):
        put(place, name, bitmap((256, 256), seed))
    assert publish(place, "--resize") == 0
    before = {name: published(place, name) for name in ("red", "blue")}
    assert len(before["red"]) < len(bitmap((256, 256)))
    swap(place)
    assert publish(place, "--resize") == 0
    assert [published(place, name) for name in ("red", "blue")] == [before["blue"], before["red"]]


def test_smaller_copies_of_swapped_pictures_of_other_shapes(place: Path):
    """What is remembered of their width and height is the other one's."""
    put(place, "red", bitmap((96, 64)))
    put(place, "blue", bitmap((64, 96)))
    assert publish(place, "--resize") == 0
    before = {name: published(place, name) for name in ("red", "blue")}
    swap(place)
    assert publish(place, "--resize") == 0
    assert [published(place, name) for name in ("red", "blue")] == [before["blue"], before["red"]]


def test_what_only_looks_changed_is_looked_at_once(place: Path, way: str, monkeypatch: pytest.MonkeyPatch):
    """Rights, or a link more, change a file's change time, too."""
    assert publish(place) == 0
    looked, real = [], manifest.media_digest
    monkeypatch.setattr(manifest, "media_digest", lambda path: looked.append(path.name) or real(path))
    for wanted in (["red.bmp"] if way == "copies" else []), []:
        if wanted:
            source(place, "red").chmod(0o600)
        looked.clear()
        assert publish(place) == 0
        assert {*looked} == {*wanted}
    assert published(place, "red") == bitmap(seed=0)


def test_names_that_were_swapped_before_one_was_edited_in_place(place: Path, capsys: pytest.CaptureFixture[str]):
    """The bundle's old name is a link to what has another name now."""
    assert publish(place) == 0
    swap(place)
    source(place, "blue").write_bytes(bitmap((80, 80), 5))
    capsys.readouterr()
    assert publish(place) == 0
    assert "was changed in the bundle" not in capsys.readouterr().out
    assert [published(place, name) for name in ("red", "blue")] == [bitmap(seed=1), bitmap((80, 80), 5)]


@pytest.mark.parametrize("resize", [False, True])
def test_a_copied_workspace_whose_first_one_is_gone(place: Path, tmp_path: Path, capsys, resize):
    """Plain copies have other times, and nothing else tells that nobody has changed them."""
    words = ["--resize"] if resize else []
    put(place, "red", bitmap((256, 256)))
    assert publish(place, *words) == 0
    there = tmp_path / "there"
    shutil.copytree(place, there, copy_function=shutil.copyfile)
    shutil.rmtree(place)
    for path in media(there).iterdir():
        os.utime(path, ns=(NOON_NS + 10**12, NOON_NS + 10**12))
    source(there, "red").write_bytes(bitmap((80, 80), 5))
    for ending in ("bmp", "txt"):
        source(there, "blue").with_suffix(f".{ending}").unlink()
    capsys.readouterr()
    assert publish(there, *words) == 0
    assert "was changed in the bundle" not in capsys.readouterr().out
    assert {path.name for path in media(there).iterdir()} == {"red.bmp", "red.txt", manifest.NAME}
    assert resize or published(there, "red") == bitmap((80, 80), 5)


def test_a_file_that_was_edited_in_the_bundle_stays_for_all_that(place: Path, way: str, capsys):
    assert publish(place) == 0
    edited = media(place) / "red.bmp"
    edited.unlink()
    edited.write_bytes(bitmap(seed=9))
    swap(place)
    capsys.readouterr()
    assert publish(place) == 0
    assert "red.bmp was changed in the bundle and stays" in capsys.readouterr().out
    assert [published(place, name) for name in ("red", "blue")] == [bitmap(seed=9), bitmap(seed=0)]


def test_a_large_file_is_known_by_its_size_and_16_places(tmp_path: Path):
    size = 2 * manifest._NUM_PLACES * manifest._PLACE_BYTES
    data = bytearray(size)
    digests = set()
    for at in (None, 0, (size - manifest._PLACE_BYTES) * 7 // 15, size - 1):
        digests.add(put_digest(tmp_path / "a", bytes(data if at is None else data[:at] + b"x" + data[at + 1 :])))
    digests.add(put_digest(tmp_path / "a", bytes(size + 1)))
    assert len(digests) == 5
    found = [bytes(size // 2), bytes(size // 2 - 12345) + b"x" + bytes(12344)]
    assert len({put_digest(tmp_path / "a", data) for data in found}) == 2


def put_digest(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return manifest.media_digest(path)


# ---- what the manifest does not say ------------------------------------------------------------------------------


def records(place: Path) -> dict[str, list[object]]:
    """What the manifest says of each picture."""
    found: dict[str, list[object]] = json.loads((media(place) / manifest.NAME).read_text())["files"]
    return {name: record for name, record in found.items() if name.endswith(".bmp")}


def rewrite(place: Path, num_fields: int) -> None:
    """Leave so many fields of each record, as an earlier version or a publish that was interrupted does."""
    content = json.loads((media(place) / manifest.NAME).read_text())
    told = {name: record[:num_fields] for name, record in content["files"].items()}
    (media(place) / manifest.NAME).write_text(json.dumps(content | {"files": told}))


@pytest.mark.parametrize("num_fields", [4, 5])
def test_a_shorter_record_is_completed(place: Path, way: str, num_fields: int):
    assert publish(place) == 0
    whole = records(place)
    rewrite(place, num_fields)
    assert publish(place) == 0
    assert records(place) == whole
    rewrite(place, num_fields)
    put(place, "red", bitmap((80, 80), 5))
    assert publish(place) == 0
    assert published(place, "red") == bitmap((80, 80), 5)


def test_a_copied_workspace_of_shorter_records_holds_what_it_shall(place: Path, tmp_path: Path, way: str, capsys):
    assert publish(place) == 0
    rewrite(place, 4)
    place.rename(tmp_path / "there")
    for path in media(tmp_path / "there").glob("*.bmp"):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    capsys.readouterr()
    assert publish(tmp_path / "there") == 0
    assert "was changed in the bundle" not in capsys.readouterr().out


def test_a_copy_of_another_size_and_the_same_time_was_edited(place: Path, capsys):
    assert publish(place) == 0
    edited = media(place) / "red.bmp"
    edited.unlink()
    edited.write_bytes(bitmap((48, 48)))
    os.utime(edited, ns=(NOON_NS, NOON_NS))
    for size in ((64, 64), (80, 80)):
        put(place, "red", bitmap(size))
        capsys.readouterr()
        assert publish(place) == 0
        assert "red.bmp was changed in the bundle and stays" in capsys.readouterr().out
        assert edited.read_bytes() == bitmap((48, 48))


def test_a_smaller_copy_whose_time_is_another_is_not_made_anew(place: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Another version of Pillow would make other bytes of it."""
    put(place, "red", bitmap((256, 256)))
    assert publish(place, "--resize") == 0
    before = published(place, "red")
    os.utime(media(place) / "red.bmp", ns=(NOON_NS + 10**12, NOON_NS + 10**12))
    monkeypatch.setattr("wangen.generator.publish.folder.bake", lambda *_: b"other bytes")
    capsys.readouterr()
    assert publish(place, "--resize") == 0
    assert "was changed in the bundle" not in capsys.readouterr().out
    assert published(place, "red") == before


def test_what_somebody_put_into_the_bundle_may_be_what_is_wanted(place: Path, way: str, capsys):
    assert publish(place) == 0
    new = bitmap((80, 80), 5)
    (media(place) / "red.bmp").unlink()
    (media(place) / "red.bmp").write_bytes(new)
    put(place, "red", new)
    capsys.readouterr()
    assert publish(place) == 0
    assert "was changed in the bundle" not in capsys.readouterr().out
    put(place, "red", bitmap((96, 96), 6))
    assert publish(place) == 0
    assert published(place, "red") == bitmap((96, 96), 6)


@pytest.mark.parametrize("interrupted", [False, True])
def test_names_that_were_swapped_where_no_digest_is_known(place: Path, way: str, monkeypatch, interrupted: bool):
    if interrupted:
        with monkeypatch.context() as patch:
            patch.setattr("wangen.generator.publish.deploy.finish", lambda _plan: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                publish(place)
    else:
        assert publish(place) == 0
        rewrite(place, 4)
    swap(place)
    assert publish(place) == 0
    assert [published(place, name) for name in ("red", "blue")] == [bitmap(seed=1), bitmap(seed=0)]


def test_a_picture_that_was_turned_in_place(place: Path):
    put(place, "red", bitmap((128, 96)))
    assert publish(place, "--resize") == 0
    before = published(place, "red")
    put(place, "red", bitmap((96, 128)))
    assert publish(place, "--resize") == 0
    write_tree(place, {"datasets/cats/new.bmp": bitmap((96, 128)), "datasets/cats/new.txt": "new"})
    assert publish(place, "--resize") == 0
    assert before != published(place, "red") == published(place, "new")


@pytest.mark.parametrize("then", ["the source changes", "the source goes"])
def test_a_copy_that_was_edited_in_the_bundle_with_its_time_kept_stays(place: Path, monkeypatch, then: str):
    monkeypatch.setattr(os, "link", no_links)
    assert publish(place) == 0
    edited = media(place) / "red.bmp"
    edited.write_bytes(bitmap(seed=9))
    os.utime(edited, ns=(NOON_NS, NOON_NS))
    if then == "the source changes":
        put(place, "red", bitmap((80, 80), 5))
    else:
        for ending in ("bmp", "txt"):
            source(place, "red").with_suffix(f".{ending}").unlink()
    assert publish(place) == 0
    assert edited.read_bytes() == bitmap(seed=9)


def test_links_whose_names_were_swapped_in_the_bundle_are_said(place: Path, capsys: pytest.CaptureFixture[str]):
    assert publish(place) == 0
    red, blue = media(place) / "red.bmp", media(place) / "blue.bmp"
    red.rename(place / "t")
    blue.rename(red)
    (place / "t").rename(blue)
    capsys.readouterr()
    assert publish(place) == 0
    assert "blue.bmp was changed in the bundle and stays" in capsys.readouterr().out
