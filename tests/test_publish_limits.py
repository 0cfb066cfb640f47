"""What forbids publishing is said before anything is written: paths, names, a run under way, files in the way."""

import errno
import json
import os
import time
from pathlib import Path

import psutil
import pytest
from helpers import image_bytes, read_tree, write_tree

from wangen.generator import workspace
from wangen.generator.cli import main
from wangen.generator.processes import here
from wangen.generator.publish import deploy, layout, manifest, source

TOML = 'resolution = [64, 64]\nnum_frames = 17\nplatforms = ["linux"]\n'
WINDOWS = TOML.replace("linux", "windows")


@pytest.fixture
def place(tmp_path):
    tree = {"wangen.toml": TOML, "datasets/cats/a.jpg": image_bytes(), "datasets/cats/a.txt": "a cat"}
    return write_tree(tmp_path / "ws", tree)


def publish(place: Path, *words: str) -> int:
    return main(["publish", "cats", "--workspace", str(place), *words])


def root(place: Path, platform: str = "linux") -> Path:
    return place / "published" / platform


def media(place: Path) -> Path:
    return root(place) / "files" / "datasets" / "cats" / "64"


# ---- names and lengths -------------------------------------------------------------------------------------------


def windows_root(place: Path, length: int) -> str:
    """A root with which the longest path of the bundle, that of a cache entry, has `length` characters."""
    below = r"\files\datasets\cats\64_cache" + "\\" + "x" * 40 + "-" + "0" * 20 + ".text_encoder_output.safetensors"
    root = "C:\\" + "r" * (length - len(below) - 3)
    (place / "wangen.toml").write_text(
        WINDOWS + f"[platform.windows]\nroot = '{root}'\nhost_root = '{place / 'seen'}'\n"
    )
    return root


@pytest.mark.parametrize(("length", "code"), [(259, 0), (260, 1)])
def test_a_path_that_windows_cannot_open_is_listed_with_its_length(place, capsys, length, code):
    windows_root(place, length)
    assert publish(place) == code
    shown = capsys.readouterr().err
    assert ("windows: too long for Windows, 260 characters: C:\\rr" in shown) == bool(code)
    assert ("LongPathsEnabled" in shown) == bool(code)
    assert (place / "seen").exists() != bool(code)
    assert publish(place, "--long_paths") == 0


def test_every_path_that_is_too_long_is_listed(place, capsys):
    windows_root(place, 259)
    for stem in ("n" * 110, "é" * 115):
        write_tree(place / "datasets/cats", {f"{stem}.jpg": image_bytes(), f"{stem}.txt": "x"})
    assert publish(place) == 1
    shown = capsys.readouterr().err
    assert shown.count("too long for Windows") == 4
    assert not (place / "seen").exists()


def test_a_bundle_that_can_be_moved_is_warned_of_long_paths(place, capsys):
    (place / "wangen.toml").write_text(WINDOWS)
    for number in range(4):
        stem = str(number) * 190
        write_tree(place / "datasets/cats", {f"{stem}.jpg": image_bytes(), f"{stem}.txt": "x"})
    assert publish(place) == 0
    shown = capsys.readouterr().out
    assert shown.count("may be too long for Windows, 217 characters") == 5
    assert "and 3 more such paths" in shown


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot hold these names")
def test_all_names_that_cannot_be_published_are_said_at_once(place, capsys):
    jpeg = image_bytes()
    names = ("nul.jpg", "what?.jpg", "Cat.jpg", "cat.jpg", "\u00e9.jpg", "e\u0301.jpg", "bare.jpg")
    tree = dict.fromkeys(names, jpeg)
    tree |= {f"{Path(name).stem}.txt": "x" for name in names[:-1]}
    write_tree(place / "datasets/cats", tree)
    assert publish(place) == 1
    shown = capsys.readouterr().err
    for words in ("nul.jpg: Windows cannot hold", "what?.jpg: Windows cannot hold", "Cat.jpg and cat.jpg differ",
                  "Unicode form", "bare.jpg: has no caption"):  # fmt: skip
        assert words in shown
    assert not (place / "published").exists()


@pytest.mark.parametrize("kind", ["linux", "wsl", "windows"])
def test_a_name_of_too_many_bytes_is_refused_for_linux(tmp_path, kind):
    target = workspace.read(write_tree(tmp_path, {"wangen.toml": TOML})).target(kind)
    found = layout.name_problems(target, ["é" * 125 + ".jpg", "é" * 126 + ".jpg"])
    words = [] if kind == "windows" else ["the name has 256 bytes, Linux allows 255"]
    assert [problem.found for problem in found] == words


# ---- what is there already ---------------------------------------------------------------------------------------


def test_all_files_in_the_way_are_said_at_once_and_nothing_is_written(place, capsys):
    write_tree(media(place), {"a.jpg": "mine", "a.txt": "mine"})
    assert publish(place) == 1
    shown = capsys.readouterr().err
    assert shown.count("a file that wangen did not write is in the way") == 2
    assert read_tree(place / "published") == {
        "linux/files/datasets/cats/64/a.jpg": b"mine", "linux/files/datasets/cats/64/a.txt": b"mine",
    }  # fmt: skip


def test_a_caption_that_was_changed_in_the_bundle_stays(place, capsys):
    publish(place)
    (media(place) / "a.txt").write_text("I cat")
    assert (media(place) / "a.txt").stat().st_size == (place / "datasets/cats/a.txt").stat().st_size
    capsys.readouterr()
    assert publish(place) == 0
    assert "a.txt was changed in the bundle and stays" in capsys.readouterr().out  # the source says nothing new
    write_tree(place / "datasets/cats", {"b.jpg": image_bytes(seed=2), "b.txt": "x"})
    for _ in range(2):
        assert publish(place) == 0
        assert "a.txt was changed in the bundle and stays" in capsys.readouterr().out
        os.utime(media(place) / "a.txt", ns=(10**18, 10**18))  # the manifest was written again, long after the edit
    (media(place) / "a.txt").write_text("my cat")
    (place / "datasets/cats/a.txt").write_text("a tabby")
    for _ in range(2):
        assert publish(place) == 0
        assert (media(place) / "a.txt").read_text() == "my cat"
        assert "a.txt was changed in the bundle and stays" in capsys.readouterr().out
    (media(place) / "a.txt").unlink()
    publish(place)
    assert (media(place) / "a.txt").read_text() == "a tabby"


def test_a_picture_that_was_changed_in_the_bundle_stays_when_the_source_loses_it(place, capsys):
    write_tree(place / "datasets/cats", {"b.jpg": image_bytes(seed=2), "b.txt": "x"})
    publish(place)
    mine = image_bytes((90, 90))
    (media(place) / "b.jpg").unlink()
    (media(place) / "b.jpg").write_bytes(mine)
    for name in ("b.jpg", "b.txt"):
        (place / "datasets/cats" / name).unlink()
    assert publish(place) == 0
    assert (media(place) / "b.jpg").read_bytes() == mine
    assert not (media(place) / "b.txt").exists()
    assert "b.jpg was changed in the bundle and stays; it is not in the dataset any more" in capsys.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="needs names that differ in letter case")
def test_a_caption_that_was_changed_in_the_bundle_is_not_renamed_with_its_source(place):
    publish(place)
    (media(place) / "a.txt").write_text("my cat")
    for ending in ("jpg", "txt"):
        (place / "datasets/cats" / f"a.{ending}").rename(place / "datasets/cats" / f"A.{ending}")
    assert publish(place) == 0
    found = {name: data for name, data in read_tree(media(place)).items() if name.endswith(".txt")}
    assert found == {"a.txt": b"my cat", "A.txt": b"a cat"}


def test_a_bundle_of_another_version_is_taken_over(place):
    publish(place)
    before = read_tree(media(place))
    (media(place) / manifest.NAME).write_text(json.dumps({name: [3, 4] for name in ("a.jpg", "a.txt")}))
    assert publish(place) == 0
    assert read_tree(media(place)) == before


def test_the_users_own_folder_in_the_bundle_can_be_the_source(place):
    own = write_tree(
        media(place), {"x.jpg": image_bytes(), "x.txt": "\ufeffmine \n", "y.jpg": image_bytes(), "y.caption": "y"}
    )
    before = {path: path.stat().st_mtime_ns for path in own.iterdir()}
    for _ in range(2):
        assert publish(place, "--source", str(own)) == 0
        assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (own / "y.txt").read_text() == "y"


def test_a_line_that_sets_no_knob_is_named(place, capsys):
    publish(place)
    script = root(place) / "train_cats.sh"
    script.write_text(script.read_text().replace("SEED=42", "SEED=4 2").replace("SEED='42'", "SEED='4 2'"))
    assert publish(place) == 0
    shown = capsys.readouterr().out
    assert "train_cats.sh: this line sets no knob" in shown
    assert "train_cats.sh was edited by hand and stays" in shown


def test_litter_of_a_killed_publish_is_removed(place):
    publish(place)
    ours, others = f"{deploy.prefix('cats')}0123456789abcdef", f"{deploy.prefix('dogs')}0123456789abcdef"
    for folder in (root(place), root(place) / "files" / "tomls"):
        write_tree(folder, {ours: "half", others: "being written"})
    (media(place) / ".wangen-publish-0123456789abcdef").write_text("half")
    before = read_tree(root(place))
    publish(place)
    gone = {ours, f"files/tomls/{ours}", "files/datasets/cats/64/.wangen-publish-0123456789abcdef"}
    assert before.keys() - read_tree(root(place)).keys() == gone


# ---- a run under way ---------------------------------------------------------------------------------------------


def hold(place: Path) -> Path:
    """A lock as a run of this very process would hold it."""
    me = psutil.Process()
    owner = [me.pid, me.create_time()]
    path = root(place) / "outputs" / "cats" / "run.lock"
    path.write_text(json.dumps({"host": here(), "run": owner, "step": owner}))
    return path


def test_scripts_do_not_change_under_a_run(place, capsys):
    publish(place)
    lock = hold(place)
    (place / "datasets/cats/a.txt").write_text("changed")
    assert publish(place) == 0  # no script changes
    (place / "wangen.toml").write_text(TOML + "[steps.train]\nnetwork_dim = 8\n")
    before = read_tree(root(place))
    for words in ([], ["--only_scripts"]):
        assert publish(place, *words) == 1
        shown = capsys.readouterr().err
        assert "another run works on this dataset" in shown
        assert "its scripts would change under it" in shown
    assert read_tree(root(place)) == before
    lock.unlink()
    assert publish(place) == 0


def test_a_lock_of_a_dead_run_forbids_nothing(place):
    publish(place)
    lock = hold(place)
    dead = [2**22 + 1, time.time()]
    lock.write_text(json.dumps({"host": here(), "run": dead, "step": dead}))
    (place / "wangen.toml").write_text(TOML + "[steps.train]\nnetwork_dim = 8\n")
    assert publish(place) == 0


# ---- stumbles ----------------------------------------------------------------------------------------------------


def test_a_dataset_of_another_name_is_found_or_named(place, capsys):
    (place / "datasets" / "Jane's House").mkdir()
    (place / "datasets" / "cats").rename(place / "datasets" / "My Cats")
    assert publish(place) == 1
    assert "did you mean My Cats?" in capsys.readouterr().err
    assert main(["publish", "my_cats", "--workspace", str(place)]) == 0
    assert main(["publish", "zzz", "--workspace", str(place)]) == 1
    assert "put the media there, or give --source FOLDER" in capsys.readouterr().err


def test_a_remembered_source_and_model_are_used_again(place, tmp_path, capsys):
    (place / "datasets" / "cats").rename(tmp_path / "elsewhere")
    assert publish(place, "--source", str(tmp_path / "elsewhere"), "--model", "t2v-14B") == 0
    assert f"source = {tmp_path / 'elsewhere'}" in capsys.readouterr().out
    before = read_tree(root(place))
    assert publish(place) == 0
    assert "Wan 2.1 T2V 14B" in capsys.readouterr().out
    assert read_tree(root(place)) == before


@pytest.mark.parametrize("command", ["publish", "check"])
def test_media_that_cannot_be_looked_at_are_named(place, monkeypatch, capsys, command):
    """As on a network drive that does not answer, or where somebody has removed them since the folder was listed."""
    assert publish(place) == 0
    recall = source._Memo.recall

    def stale(memo, path):
        if path.name == "a.jpg":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return recall(memo, path)

    monkeypatch.setattr(source._Memo, "recall", stale)
    assert main([command, "cats", "--workspace", str(place)]) == 1
    said = "".join(capsys.readouterr())
    assert "a.jpg: cannot be read: Stale file handle; see whether the disk or network drive answers" in said
