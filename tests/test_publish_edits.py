"""What a user changes or owns is never lost by publishing, whatever is unlucky on the way."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from helpers import image_bytes, read_tree, write_tree

from wangen.generator import lock, workspace
from wangen.generator.cli import main
from wangen.generator.errors import WAS_STOPPED, WangenError
from wangen.generator.publish import layout, manifest

TOML = 'resolution = [64, 64]\nnum_frames = 17\nplatforms = ["linux"]\n'
LONG_AGO_NS = 10**18


def bmp(seed: int, size: tuple[int, int] = (200, 200)) -> bytes:
    """A picture whose size in bytes does not depend on what it shows."""
    return image_bytes(size, format="BMP", seed=seed)


@pytest.fixture
def place(tmp_path):
    tree: dict[str, bytes | str] = {"wangen.toml": TOML}
    for number, name in enumerate("ab"):
        tree |= {f"datasets/cats/{name}.bmp": bmp(number), f"datasets/cats/{name}.txt": f"cat {name}"}
    place = write_tree(tmp_path / "ws", tree)
    for path in dataset(place).iterdir():
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return place


def publish(place: Path, *words: str, name: str = "cats") -> int:
    return main(["publish", name, "--workspace", str(place), *words])


def clean(place: Path, *words: str) -> int:
    return main(["clean", "cats", "--workspace", str(place), *words])


def dataset(place: Path) -> Path:
    return place / "datasets" / "cats"


def root(place: Path, platform: str = "linux") -> Path:
    return place / "published" / platform


def media(place: Path) -> Path:
    return root(place) / "files/datasets/cats/64"


def save(path: Path, data: bytes) -> None:
    """Save as most editors do: another file, renamed."""
    other = path.with_name("another")
    other.write_bytes(data)
    other.replace(path)


def add(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


# ---- media and captions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["the source changes", "the source goes", "resize", "clean"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_picture_that_was_edited_in_the_bundle_stays_though_its_size_is_the_same(place, monkeypatch, then, copied):
    if copied:
        monkeypatch.setattr(os, "link", no_links)
    publish(place)
    mine, path = bmp(99), media(place) / "a.bmp"
    assert path.stat().st_size == len(mine)
    assert (path.stat().st_nlink == 1) == copied
    path.write_bytes(mine) if copied else save(path, mine)
    if then == "the source changes":
        (dataset(place) / "a.bmp").write_bytes(bmp(5, (80, 80)))
    elif then == "the source goes":
        for ending in ("bmp", "txt"):
            (dataset(place) / f"a.{ending}").unlink()
    if then == "clean":
        assert clean(place, "--bundle") == 0
    else:
        assert publish(place, *(["--resize"] if then == "resize" else [])) == 0
    assert path.read_bytes() == mine


def no_links(*_words: object, **_named: object) -> None:
    raise OSError(errno.EXDEV, "another file system")


def test_copies_that_nobody_edited_are_renewed(place, monkeypatch):
    monkeypatch.setattr(os, "link", no_links)
    publish(place)
    (dataset(place) / "a.bmp").write_bytes(bmp(5))
    for ending in ("bmp", "txt"):
        (dataset(place) / f"b.{ending}").unlink()
    assert publish(place) == 0
    assert (media(place) / "a.bmp").read_bytes() == bmp(5)
    assert not (media(place) / "b.bmp").exists()


@pytest.mark.parametrize("resize", [False, True])
def test_a_bundle_that_was_copied_is_still_ours(place, capsys, resize):
    (place / "wangen.toml").write_text(TOML.replace("[64, 64]", "[128, 128]"))
    for name in "ab":
        save(dataset(place) / f"{name}.bmp", bmp(ord(name), (900, 600)))
    publish(place, *(["--resize"] if resize else []))
    folder = media(place).with_name("128")
    copy_with_new_times(folder)
    save(folder / "b.bmp", (folder / "b.bmp").read_bytes()[:-1] + b"x")
    os.utime(folder / "b.bmp", ns=(LONG_AGO_NS, LONG_AGO_NS))  # else its time is that of the source
    before = {path: path.stat().st_ino for path in folder.iterdir() if path.name != manifest.NAME}
    capsys.readouterr()
    for again in (False, True):
        assert publish(place) == 0
        shown = capsys.readouterr().out
        assert "(3 same files" in shown
        assert shown.count("changed in the bundle") == 1
        assert {path: path.stat().st_ino for path in before} == before
        if not again:
            record = manifest.read(folder).files["a.bmp"]
            assert record.mtime_ns == (folder / "a.bmp").stat().st_mtime_ns  # next time it is not read again
    copy_with_new_times(folder)
    assert clean(place, "--bundle") == 0
    assert {path.name for path in folder.iterdir()} == {"b.bmp", manifest.NAME}


def copy_with_new_times(folder: Path) -> None:
    """As `cp -r` does; links become files of their own."""
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)
    for path in folder.iterdir():
        changed_ns = path.stat().st_mtime_ns - 10**10
        os.utime(path, ns=(changed_ns, changed_ns))


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_a_picture_whose_source_became_a_link_to_it_is_not_judged_by_itself(place):
    publish(place)
    save(media(place) / "a.bmp", bmp(99))
    shutil.copytree(dataset(place), place / "datasets" / "fewer", ignore=shutil.ignore_patterns("a.*"))
    shutil.rmtree(dataset(place))
    dataset(place).symlink_to(media(place))
    assert publish(place, "--source", str(place / "datasets" / "fewer")) == 0
    assert (media(place) / "a.bmp").read_bytes() == bmp(99)


def test_of_a_copied_bundle_without_its_originals_nothing_is_called_changed(place, capsys):
    publish(place)
    copy_with_new_times(media(place))
    shutil.rmtree(dataset(place))
    capsys.readouterr()
    assert clean(place, "--bundle") == 0
    shown = capsys.readouterr().out
    assert f"stays: files/datasets/cats/64/a.bmp (the only copy: {dataset(place) / 'a.bmp'} is gone)" in shown
    assert "changed in the bundle" not in shown
    assert (media(place) / "a.bmp").read_bytes() == bmp(0)


def test_an_original_that_was_edited_through_its_link_is_no_edit_of_the_bundle(place, capsys):
    publish(place)
    with (media(place) / "a.bmp").open("ab") as file:
        file.write(b"more")
    if not (media(place) / "a.bmp").samefile(dataset(place) / "a.bmp"):
        pytest.skip("no links here")
    assert clean(place, "--bundle") == 0
    assert not root(place).joinpath("files/datasets/cats/64").exists()
    assert (dataset(place) / "a.bmp").read_bytes().endswith(b"more")


def test_links_are_announced_once(place, capsys):
    words = "media are links to the originals"
    publish(place)
    assert words in capsys.readouterr().out
    publish(place)
    assert words not in capsys.readouterr().out


def test_a_bundle_that_is_its_own_source_keeps_captions_whose_media_are_away(place):
    publish(place)
    shutil.rmtree(dataset(place))
    assert publish(place, "--source", str(media(place))) == 0
    (media(place) / "a.bmp").rename(place / "a.bmp")
    assert publish(place) == 0
    assert (media(place) / "a.txt").read_text() == "cat a"


@pytest.mark.parametrize("record", [[3, 4], ["", -1, -1, ""], ["1 2", -1, LONG_AGO_NS, ""]])
def test_a_manifest_that_knows_nothing_of_a_file_gives_it_away_to_nobody(place, record):
    content = json.dumps({"format": manifest.FORMAT, "files": {"a.bmp": record, "mine.bmp": record}})
    write_tree(media(place), {"a.bmp": bmp(7), "mine.bmp": bmp(8), manifest.NAME: content})
    publish(place)
    assert clean(place, "--bundle") == 0
    assert (media(place) / "a.bmp").read_bytes() == bmp(7)
    assert (media(place) / "mine.bmp").read_bytes() == bmp(8)


def test_two_folders_are_never_published_as_one(place, capsys):
    for name in ("Red House", "red-house"):
        shutil.copytree(dataset(place), place / "datasets" / name)
    for name in ("Red House", "red-house"):
        assert publish(place, name=name) == 1
        assert "Red House and red-house would both be published as red_house" in capsys.readouterr().err
    assert publish(place, "--source", str(place / "datasets" / "red-house"), name="red_house") == 0


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
@pytest.mark.slow
def test_a_name_that_is_not_utf8_is_refused(place, capfd):
    name = os.fsdecode(b"caf\xe9")
    write_tree(dataset(place), {f"{name}.bmp": bmp(3), f"{name}.txt": "x"})
    words = [sys.executable, "-m", "wangen.runtime", "publish", "cats", "--workspace", str(place)]
    assert subprocess.run(words, check=False).returncode == 1
    assert ".bmp: the name is not UTF-8" in capfd.readouterr().err


# ---- scripts and TOML files --------------------------------------------------------------------------------------


def test_a_new_text_that_the_user_edited_stays(place, capsys):
    publish(place)
    edited = [root(place) / name for name in ("train_cats.sh", "setup_wangen.sh", "files/tomls/cats_linux.toml")]
    for path in edited:
        add(path, "\n# mine\n")
    (place / "wangen.toml").write_text(TOML + "[platform.linux]\nvenv = 'v'\n[dataset.cats]\nnum_repeats = 3\n")
    publish(place)
    new = [path.with_name(f"{path.name}.new") for path in edited]
    assert all(path.exists() for path in new)
    for path in new[1:]:
        add(path, "\n# mine, too\n")
    knob = new[0].read_text().replace("SEED='42'", "SEED='7'").replace("SEED=42", "SEED=7")
    assert knob != new[0].read_text()
    new[0].write_text(knob)
    before = [path.read_bytes() for path in (*edited, *new)]
    steps = "[steps.train]\nnetwork_dim = 8\n"
    (place / "wangen.toml").write_text(TOML + steps + "[platform.linux]\nvenv = 'w'\n[dataset.cats]\nnum_repeats = 4\n")
    capsys.readouterr()
    assert publish(place) == 0
    assert [path.read_bytes() for path in (*edited, *new)] == before
    shown = capsys.readouterr().out
    assert "train_cats.sh and train_cats.sh.new were edited by hand and stay; move train_cats.sh.new away" in shown
    assert shown.count("were edited by hand and stay;") == 3
    new[0].unlink()
    publish(place)
    assert b"NETWORK_DIM='8'" in new[0].read_bytes() or b"NETWORK_DIM=8" in new[0].read_bytes()


# ---- wangen.toml -------------------------------------------------------------------------------------------------

REMEMBERED = {
    "a new section": TOML,
    "no line end": TOML + "[steps.train]\nnetwork_dim = 8 # c",
    "comments": TOML + "# one\n[dataset.cats] # two\n# trigger\nnum_repeats = 2 # three\n# four\n",
    "CRLF": (TOML + "[dataset.cats]\nnum_repeats = 2\n[steps.train]\nnetwork_dim = 8\n").replace("\n", "\r\n"),
    "BOM": "\ufeff" + TOML + "[dataset.dogs]\nresize = true\n",
    "inline": TOML + "dataset = {cats = {num_repeats = 2}}\n",
    "inline, another": TOML + "[dataset]\ndogs = {num_repeats = 2} # x\n",
    "dotted": TOML + "dataset.cats.num_repeats = 2\ndataset.dogs.batch_size = 3\n",
    "dotted, another": TOML + "[dataset]\ndogs.num_repeats = 2\n",
    "dotted, another, in front": "dataset.dogs.num_repeats = 2\n" + TOML + "[steps.train]\nnetwork_dim = 8\n",
    "out of order": TOML + "[dataset.dogs]\nresize = true\n[steps.train]\nseed = 8\n[dataset.cats]\nbatch_size = 2\n",
    "quoted": TOML + "[\"dataset\".'cats']\nnum_repeats = 2\n",
    "empty": TOML + "[dataset]\n[dataset.cats]\n\n# below\n\n[steps.train]\nnetwork_dim = 8\n",
}


@pytest.mark.parametrize("name", REMEMBERED)
def test_choices_are_remembered_and_the_rest_stays(tmp_path, name):
    path, text = tmp_path / "wangen.toml", REMEMBERED[name]
    path.write_bytes(text.encode())
    wanted = tomllib.loads(text.removeprefix("\ufeff"))
    for choices in ({"trigger": "ohwx", "resolutions": ["64", "832x480"]}, {"resize": True}, {"trigger": "z"}):
        workspace.remember(tmp_path, "cats", choices)
        wanted.setdefault("dataset", {}).setdefault("cats", {}).update(choices)
        found = path.read_bytes().decode()
        assert tomllib.loads(found.removeprefix("\ufeff")) == wanted
        assert found.startswith("\ufeff") == text.startswith("\ufeff")
        workspace.read(tmp_path)
    assert all(comment in found for comment in text.splitlines() if comment.startswith("#"))


def test_a_toml_without_a_place_for_a_section_stays(place, capsys):
    text = TOML + "dataset = {dogs = {num_repeats = 2}}\n"
    (place / "wangen.toml").write_text(text)
    assert publish(place, "--trigger", "ohwx") == 2
    assert 'write there, for cats: trigger = "ohwx"' in capsys.readouterr().err
    assert (place / "wangen.toml").read_text() == text
    assert not root(place).exists()


@pytest.mark.skipif(os.name == "nt", reason="links and rights of POSIX")
def test_a_linked_toml_stays_a_link_and_keeps_its_rights(tmp_path, monkeypatch):
    real = write_tree(tmp_path, {"real.toml": TOML, "ws/datasets/x": ""}) / "real.toml"
    real.chmod(0o600)
    (tmp_path / "ws/wangen.toml").symlink_to(real)
    workspace.remember(tmp_path / "ws", "cats", {"trigger": "x"})
    assert (tmp_path / "ws/wangen.toml").is_symlink()
    assert workspace.read(tmp_path / "ws").dataset("cats").trigger == "x"
    assert real.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(WangenError, match="read-only"):
        workspace.remember(tmp_path / "ws", "cats", {"trigger": "y"})
    assert workspace.read(tmp_path / "ws").dataset("cats").trigger == "x"


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_init_follows_a_link(tmp_path):
    (tmp_path / "wangen.toml").symlink_to(tmp_path / "real.toml")
    assert main(["init", str(tmp_path)]) == 0
    assert (tmp_path / "wangen.toml").is_symlink()
    assert "platforms" in (tmp_path / "real.toml").read_text()


# ---- two at once -------------------------------------------------------------------------------------------------


def test_two_workspaces_do_not_publish_one_dataset_at_once(place, tmp_path, capsys):
    (place / "wangen.toml").write_text(TOML + f"[platform.linux]\nhost_root = '{tmp_path / 'AI'}'\n")
    shutil.copytree(place, tmp_path / "other")
    with layout.held([workspace.read(place).target("linux")], "cats"):
        for work in (publish, lambda other: clean(other, "--bundle")):
            assert work(tmp_path / "other") == 1
            assert "another run works on this dataset" in capsys.readouterr().err
        assert publish(tmp_path / "other", "--platform", "wsl") == 0
    assert publish(tmp_path / "other") == 0


def test_choices_of_two_publishes_at_once_are_both_remembered(place, monkeypatch):
    held = lock.hold(place / ".wangen/wangen.toml.lock")
    held.__enter__()

    def the_other_ends(_seconds: float) -> None:
        workspace.remember(place, "dogs", {"trigger": "theirs"})
        held.__exit__(None, None, None)

    monkeypatch.setattr(time, "sleep", the_other_ends)
    assert publish(place, "--trigger", "ours") == 0
    known = workspace.read(place)
    assert (known.dataset("cats").trigger, known.dataset("dogs").trigger) == ("ours", "theirs")


# ---- a disk that is full, and Ctrl-C -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"), [(OSError(errno.ENOSPC, "No space left on device"), 1), (KeyboardInterrupt(), WAS_STOPPED)]
)
def test_a_publish_that_fails_takes_back_what_it_added(place, monkeypatch, capsys, error, code):
    publish(place)
    before = read_tree(root(place))
    write_tree(dataset(place), {f"{number}.{end}": bmp(number) for number in range(20) for end in ("bmp", "txt")})
    for number in range(20):
        (dataset(place) / f"{number}.txt").write_text("more")
    (dataset(place) / "a.txt").write_text("another")
    real, num_links = os.link, 0

    def link(*words, **named):
        nonlocal num_links
        num_links += 1
        if num_links > 12:
            raise error
        return real(*words, **named)

    monkeypatch.setattr(os, "link", link)
    assert publish(place) == code
    assert num_links > 12
    found = read_tree(root(place))
    of_manifest = f"files/datasets/cats/64/{manifest.NAME}"
    assert {name: data for name, data in found.items() if name != of_manifest} == {
        name: data for name, data in before.items() if name != of_manifest
    }
    monkeypatch.undo()
    for number in range(20):
        for ending in ("bmp", "txt"):
            (dataset(place) / f"{number}.{ending}").unlink()
    (dataset(place) / "a.txt").write_text("cat a")
    assert publish(place) == 0
    assert read_tree(root(place)) == before
