"""`wangen publish`: the layout, what it touches and leaves alone, and scripts that say exactly what was meant."""

import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers import clip_bytes, image_bytes, read_tree, write_tree

from wangen.generator import files, scripts
from wangen.generator.cli import main
from wangen.generator.publish import manifest
from wangen.generator.setup.wheel import wheel_name
from wangen.generator.tomls import read_dataset

SMALL = 'resolution = [64, 64]\nnum_frames = 17\nplatforms = ["linux", "wsl", "windows"]\n'
SHELLS = {"linux": ["sh"], "wsl": ["sh"], "windows": ["bat", "ps1"]}
SUFFIX = {"linux": "linux", "wsl": "wsl", "windows": "win"}
NAME, SLUG = "Jane's Red House", "janes_red_house"


@pytest.fixture(scope="session")
def clip(tmp_path_factory):
    return clip_bytes(tmp_path_factory.mktemp("clip"), num_frames=24)


@pytest.fixture
def place(tmp_path, clip):
    """A workspace with a dataset of two images and a clip."""
    tree = {
        "wangen.toml": SMALL,
        f"datasets/{NAME}/Front.JPG": image_bytes(),
        f"datasets/{NAME}/Front.txt": "the front",
        f"datasets/{NAME}/a b & c.png": image_bytes(format="PNG"),
        f"datasets/{NAME}/a b & c.txt": "the garden, é日本",
        f"datasets/{NAME}/walk.mp4": clip,
        f"datasets/{NAME}/walk.txt": "a walk around it",
    }
    return write_tree(tmp_path / "ws", tree)


def dataset(place: Path) -> Path:
    return place / "datasets" / NAME


def publish(place: Path, *words: str) -> int:
    return main(["publish", NAME, "--workspace", str(place), *words])


def media(place: Path, platform: str = "linux") -> Path:
    return place / "published" / platform / "files" / "datasets" / SLUG / "64"


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in folder.rglob("*")
        if path.is_file()
    }


# ---- layout ------------------------------------------------------------------------------------------------------


def test_the_layout_for_three_platforms_at_once(place, capsys):
    originals = read_tree(dataset(place))
    assert publish(place) == 0
    for platform, shells in SHELLS.items():
        root = place / "published" / platform
        expected = {f"{kind}_{SLUG}.{shell}" for kind in ("train", "cache") for shell in shells}
        expected |= {f"setup_wangen.{shell}" for shell in shells} | {f"files/{wheel_name(version('wangen'))}"}
        expected |= {f"files/tomls/{SLUG}_{SUFFIX[platform]}.toml"}
        expected |= {f"files/datasets/{SLUG}/64/{name}" for name in (*originals, manifest.NAME)}
        found = read_tree(root)
        assert found.keys() == expected
        assert {name: found[f"files/datasets/{SLUG}/64/{name}"] for name in originals} == originals
        for folder in (f"files/datasets/{SLUG}/64_cache", f"outputs/{SLUG}", "logs"):
            assert (root / folder).is_dir()
    assert read_tree(dataset(place)) == originals
    shown = capsys.readouterr().out
    assert SLUG in shown
    assert "6 new" in shown


@pytest.mark.parametrize("platform", SHELLS)
def test_the_toml_is_relocatable_and_reads_back(place, platform, monkeypatch):
    publish(place, "--platform", platform)
    root = place / "published" / platform
    toml = root / "files" / "tomls" / f"{SLUG}_{SUFFIX[platform]}.toml"
    assert b"\\" not in toml.read_bytes()
    moved = place.parent / "moved somewhere"
    root.rename(moved)
    monkeypatch.chdir(moved)
    images, clips = read_dataset(moved / toml.relative_to(root))
    folder = Path("files", "datasets", SLUG)
    assert (images.directory, images.cache_directory) == (folder / "64", folder / "64_cache")
    assert (clips.directory, clips.cache_directory) == (folder / "64", folder / "64_cache")
    assert (images.media, clips.media, clips.target_frames) == ("image", "video", (17,))
    assert images.resolution == clips.resolution == (64, 64)
    assert images.directory.is_dir()


def test_media_are_links_and_captions_are_copies(place):
    publish(place, "--platform", "linux")
    assert (media(place) / "Front.JPG").samefile(dataset(place) / "Front.JPG")
    assert not (media(place) / "Front.txt").samefile(dataset(place) / "Front.txt")


def other_file_system() -> Path | None:
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else None


def test_media_are_copied_to_another_file_system(place):
    there = other_file_system()
    if there is None or there.stat().st_dev == place.stat().st_dev:
        pytest.skip("there is no second file system here")
    root = there / f"wangen-test-{os.getpid()}"
    try:
        (place / "wangen.toml").write_text(SMALL + f"[platform.linux]\nhost_root = '{root}'\n")
        assert publish(place, "--platform", "linux") == 0
        copy = root / "files" / "datasets" / SLUG / "64" / "Front.JPG"
        assert copy.read_bytes() == (dataset(place) / "Front.JPG").read_bytes()
        assert not copy.samefile(dataset(place) / "Front.JPG")
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_symbolic_links_are_followed(place):
    original = place / "elsewhere.jpg"
    (dataset(place) / "Front.JPG").rename(original)
    (dataset(place) / "Front.JPG").symlink_to(Path("..", "..", "elsewhere.jpg"))
    assert publish(place, "--platform", "linux") == 0
    published = media(place) / "Front.JPG"
    assert not published.is_symlink()
    assert published.read_bytes() == original.read_bytes()


def test_a_caption_gets_the_ending_that_the_toml_names(place):
    (dataset(place) / "Front.txt").rename(dataset(place) / "Front.TXT")
    publish(place, "--platform", "linux")
    assert (media(place) / "Front.txt").read_text() == "the front"


@pytest.mark.skipif(os.name == "nt", reason="too long for Windows' paths")
def test_names_as_long_as_the_file_system_allows(place):
    stem = "n" * 251
    write_tree(dataset(place), {f"{stem}.jpg": image_bytes(), f"{stem}.txt": "long"})
    assert publish(place, "--platform", "linux") == 0
    assert (media(place) / f"{stem}.jpg").is_file()


# ---- again -------------------------------------------------------------------------------------------------------


def test_publishing_again_writes_nothing(place, capsys):
    publish(place)
    before = stamps(place / "published")
    capsys.readouterr()
    assert publish(place) == 0
    assert stamps(place / "published") == before
    assert "(6 same files; " in capsys.readouterr().out


def test_an_edited_caption_renews_one_file(place):
    publish(place, "--platform", "linux")
    before = stamps(place / "published")
    (dataset(place) / "walk.txt").write_text("a long walk around it")
    publish(place, "--platform", "linux")
    after = stamps(place / "published")
    changed = {Path(name).name for name in after if after[name] != before[name]}
    assert changed == {"walk.txt", manifest.NAME}
    assert (media(place) / "walk.txt").read_text() == "a long walk around it"


def test_a_replaced_image_is_renewed_and_the_old_one_never_written_into(place):
    publish(place, "--platform", "linux")
    published = media(place) / "Front.JPG"
    old = published.read_bytes()
    (place / "keep.jpg").hardlink_to(published)
    source = dataset(place) / "Front.JPG"
    source.unlink()
    source.write_bytes(image_bytes(seed=5))
    publish(place, "--platform", "linux")
    assert published.read_bytes() == image_bytes(seed=5)
    assert (place / "keep.jpg").read_bytes() == old


def test_what_the_source_lost_is_removed_and_what_others_wrote_stays(place):
    publish(place, "--platform", "linux")
    write_tree(media(place), {"mine.jpg": "mine", "notes.txt": "mine"})
    for name in ("Front.JPG", "Front.txt"):
        (dataset(place) / name).unlink()
    publish(place, "--platform", "linux")
    assert read_tree(media(place)).keys() == {
        "a b & c.png", "a b & c.txt", "walk.mp4", "walk.txt", "mine.jpg", "notes.txt", manifest.NAME,
    }  # fmt: skip


def test_the_users_own_file_of_the_same_name_is_not_overwritten(place, capsys):
    write_tree(media(place), {"walk.txt": "mine"})
    assert publish(place, "--platform", "linux") == 1
    assert read_tree(media(place)) == {"walk.txt": b"mine"}
    shown = capsys.readouterr().err
    assert "a file that wangen did not write is in the way" in shown
    assert "walk.txt" in shown
    (media(place) / "walk.txt").unlink()
    assert publish(place, "--platform", "linux") == 0


def test_an_interrupted_publish_is_finished_by_the_next(place):
    publish(place, "--platform", "linux")
    states = json.loads((media(place) / manifest.NAME).read_text())
    unfinished = states["files"] | {"walk.txt": ["", -1, -1, ""]}
    (media(place) / manifest.NAME).write_text(json.dumps(states | {"files": unfinished}))
    (media(place) / "walk.txt").unlink()
    (media(place) / "walk.mp4").unlink()
    publish(place, "--platform", "linux")
    assert json.loads((media(place) / manifest.NAME).read_text()) == states
    assert (media(place) / "walk.mp4").is_file()
    assert (media(place) / "walk.txt").is_file()


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"../../x.txt": [1, 2]}', '{"..": [1, 2]}', '{"keep.sh": [1, 2]}'])
def test_a_foreign_manifest_removes_nothing_outside(place, text):
    publish(place, "--platform", "linux")
    write_tree(media(place), {"../../x.txt": "x", "keep.sh": "x", manifest.NAME: text})
    assert publish(place, "--platform", "linux") == 0
    assert (media(place) / ".." / ".." / "x.txt").is_file()
    assert (media(place) / "keep.sh").is_file()
    assert "walk.mp4" in (media(place) / manifest.NAME).read_text()


def test_publishing_a_bundle_onto_itself_changes_nothing(place):
    publish(place, "--platform", "linux")
    before = stamps(media(place))
    assert publish(place, "--platform", "linux", "--source", str(media(place))) == 0
    assert {name for name, stamp in stamps(media(place)).items() if stamp != before[name]} <= {manifest.NAME}
    assert stamps(dataset(place)).keys() == {
        "Front.JPG",
        "Front.txt",
        "a b & c.png",
        "a b & c.txt",
        "walk.mp4",
        "walk.txt",
    }


def test_a_renamed_source_changes_case(place):
    publish(place, "--platform", "linux")
    for ending in ("JPG", "txt"):
        (dataset(place) / f"Front.{ending}").rename(dataset(place) / f"front.{ending}")
    publish(place, "--platform", "linux")
    assert {name for name in read_tree(media(place)) if name.lower().startswith("front")} == {"front.JPG", "front.txt"}


@pytest.mark.parametrize("shell", ["sh", "bat", "ps1"])
def test_knobs_of_the_user_survive(place, shell):
    publish(place)
    script = place / "published" / ("linux" if shell == "sh" else "windows") / f"train_{SLUG}.{shell}"
    text = script.read_bytes()
    for old in (b"SEED='42'", b"SEED=42", b"SEED = '42'"):
        text = text.replace(old, old.replace(b"42", b"7"))
    assert text != script.read_bytes()
    script.write_bytes(text)
    (dataset(place) / "walk.txt").write_text("changed")
    (place / "wangen.toml").write_text(SMALL + "[steps.train]\nnetwork_dim = 8\n")
    assert publish(place) == 0
    knobs = scripts.read_knobs(script.read_bytes())
    assert (knobs["SEED"], knobs["NETWORK_DIM"]) == ("7", "8")


def test_another_edit_stays_and_is_announced(place, capsys):
    publish(place, "--platform", "linux")
    script = place / "published" / "linux" / f"train_{SLUG}.sh"
    script.write_text(script.read_text() + "echo mine\n")
    capsys.readouterr()
    assert publish(place, "--platform", "linux") == 0
    assert script.read_text().endswith("echo mine\n")
    assert (
        f"train_{SLUG}.sh was edited by hand and stays; the new text is train_{SLUG}.sh.new" in capsys.readouterr().out
    )
    assert script.with_name(script.name + ".new").is_file()


def toml_of(place: Path) -> Path:
    return place / "published" / "linux" / "files" / "tomls" / f"{SLUG}_linux.toml"


def test_an_edited_toml_stays_and_is_announced(place, capsys):
    publish(place, "--platform", "linux")
    toml = toml_of(place)
    made = toml.read_text()
    mine = made.replace("num_repeats = 1", "num_repeats = 10")
    assert mine != made
    toml.write_text(mine)
    capsys.readouterr()
    for _ in range(2):
        assert publish(place, "--platform", "linux") == 0
        assert toml.read_text() == mine
        assert toml.with_name(toml.name + ".new").read_text() == made
        assert f"files/tomls/{toml.name} was edited by hand and stays; the new text is" in capsys.readouterr().out
    assert {entry.num_repeats for entry in read_dataset(toml)} == {10}


def test_an_untouched_toml_is_renewed(place, capsys):
    publish(place, "--platform", "linux")
    toml = toml_of(place)
    toml.write_bytes(toml.read_bytes().replace(b"\n", b"\r\n"))  # line ends are the editor's
    (place / "wangen.toml").write_text(SMALL.replace("17", "13"))
    publish(place, "--platform", "linux")
    assert {entry.target_frames for entry in read_dataset(toml) if entry.media == "video"} == {(13,)}
    assert not toml.with_name(toml.name + ".new").exists()
    assert "edited by hand" not in capsys.readouterr().out


def test_a_toml_without_a_digest_counts_as_edited_unless_it_says_the_same(place, capsys):
    publish(place, "--platform", "linux")
    toml = toml_of(place)
    made = toml.read_text()
    old = "".join(line for line in made.splitlines(keepends=True) if "digest" not in line)
    assert old != made
    toml.write_text(old)
    publish(place, "--platform", "linux")
    assert toml.read_text() == made
    toml.write_text(old.replace("num_repeats = 1", "num_repeats = 2"))
    capsys.readouterr()
    publish(place, "--platform", "linux")
    assert "num_repeats = 2" in toml.read_text()
    assert toml.with_name(toml.name + ".new").read_text() == made
    assert "was edited by hand and stays" in capsys.readouterr().out


def test_files_that_a_scanner_holds_for_a_moment_are_published(place, monkeypatch):
    publish(place, "--platform", "linux")
    (dataset(place) / "walk.txt").write_text("renewed")
    (dataset(place) / "Front.JPG").unlink()
    (dataset(place) / "Front.txt").unlink()
    for name in ("replace", "unlink"):
        real, seen = getattr(Path, name), set[str]()

        def refusing(self: Path, *words: object, real=real, seen=seen, **named: object) -> object:
            if self.name not in seen:
                seen.add(self.name)
                raise PermissionError(13, "The process cannot access the file")
            return real(self, *words, **named)

        monkeypatch.setattr(Path, name, refusing)
    monkeypatch.setattr(files, "RETRY_PAUSES_S", (0.0, 0.0))
    assert publish(place, "--platform", "linux") == 0
    assert (media(place) / "walk.txt").read_text() == "renewed"
    assert "Front.JPG" not in read_tree(media(place))


# ---- refusals ----------------------------------------------------------------------------------------------------


def test_a_dataset_with_problems_publishes_nothing_and_lists_them_all(place, capsys):
    write_tree(dataset(place), {"walk.txt": " ", "bare.png": image_bytes(format="PNG"), "bad.mp4": "x", "bad.txt": "x"})
    assert publish(place) == 1
    shown = capsys.readouterr().err
    assert "3 problems; nothing was published" in shown
    for words in ("walk.txt: is empty", "bare.png: has no caption", "bad.mp4: cannot be read as a video"):
        assert words in shown
    assert not (place / "published").exists()


def test_a_short_clip_is_named_with_the_length_that_fits(place, capsys):
    (place / "wangen.toml").write_text("num_frames = 33\n")
    assert publish(place) == 1
    assert "walk.mp4: has 24 frames at 16 fps, 33 are needed; set num_frames = 21" in capsys.readouterr().err
    assert not (place / "published").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["publish", "nowhere"], 1, "there is no such dataset"),
        (["publish", "é日"], 0, None),
        (["publish", "日本"], 1, "no letter a-z"),
        (["publish", "CON"], 1, "Windows reserves the name"),
        (["publish", NAME, "--platform", "amiga"], 2, "there is no platform 'amiga'"),
        (["publish", NAME, "--model", "t2v"], 2, "there is no model 't2v'"),
        (["publish", NAME, "--source", "gone"], 1, "cannot list the folder"),
        (["publish"], 2, "NAME"),
    ],
)
def test_the_command_line(place, capsys, words, code, message):
    shutil.copytree(dataset(place), place / "datasets" / "é日")
    assert main([*words, "--workspace", str(place)]) == code
    shown = capsys.readouterr()
    assert message is None or message in shown.err
    assert (place / "published").exists() == (code == 0)


def test_source_model_and_platform_can_be_chosen(place, tmp_path):
    source = tmp_path / "other place"
    dataset(place).rename(source)
    assert (
        publish(place, "--source", str(source), "--model", "t2v-14B", "--platform", "wsl", "--platform", "linux") == 0
    )
    assert {path.name for path in (place / "published").iterdir()} == {"linux", "wsl"}
    lines = scripts.read_steps((place / "published" / "wsl" / f"train_{SLUG}.sh").read_bytes(), "sh")
    assert "t2v-14B" in lines[-2]
    assert len(read_tree(media(place, "wsl"))) == 7


@pytest.mark.skipif(os.name == "nt", reason="written for a POSIX host")
def test_a_target_that_cannot_be_written(place, capsys):
    (place / "wangen.toml").write_text(SMALL + "[platform.linux]\nhost_root = '/proc/nothing'\n")
    assert publish(place, "--platform", "linux") == 1
    assert "cannot make the folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [f"train_{SLUG}.sh", f"files/tomls/{SLUG}_linux.toml", f"files/datasets/{SLUG}/64/walk.mp4"]
)
def test_a_folder_where_a_file_belongs(place, capsys, name):
    write_tree(place / "published" / "linux", {f"{name}/x": "x"})
    assert publish(place, "--platform", "linux") == 1
    assert Path(name).name in capsys.readouterr().err


def test_a_root_whose_drive_is_not_there(place, capsys):
    gone = place.parent / "usb" / "ai"
    (place / "wangen.toml").write_text(f"{SMALL}\n[platform.linux]\nroot = '{gone}'\n", encoding="utf-8")
    assert publish(place, "--platform", "linux") == 1
    assert "the root of linux is not there, nor the folder above; connect its drive" in capsys.readouterr().err
    assert not gone.parent.exists()


def test_scripts_alone_cannot_have_other_resolutions(place, capsys):
    assert publish(place) == 0
    assert publish(place, "--only_scripts", "--resolution", "128") == 2
    assert "--only_scripts leaves media and TOML as they are, which resolutions would change" in capsys.readouterr().err
    assert "128" not in (place / "wangen.toml").read_text(encoding="utf-8")


def test_the_name_that_the_shell_completes(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert main(["publish", f"datasets/{NAME}/", "--platform", "linux"]) == 0
    assert "is published as janes_red_house" in capsys.readouterr().out


def test_what_is_still_to_be_done(place, capsys):
    assert publish(place, "--platform", "linux") == 0
    shown = capsys.readouterr().out
    assert "next: put the weights to models/Wan2.1_VAE.pth in the bundle (linux)" in shown
    models = place / "published" / "linux" / "models"
    models.mkdir()
    (models / "Wan2.1_VAE.pth").touch()
    assert publish(place, "--platform", "linux") == 0
    assert "Wan2.1_VAE.pth" not in capsys.readouterr().out


@pytest.mark.parametrize("models", ["D:\\models\\x", "\\\\nas\\x"])
def test_weights_in_a_folder_of_their_own_are_not_put_into_the_bundle(place, capsys, models):
    (place / "wangen.toml").write_text(SMALL + f"[platform.windows]\nmodels = '{models}'\n")
    assert publish(place, "--platform", "windows") == 0
    folder = models.replace("\\", "/")
    shown = capsys.readouterr().out
    assert f"next: put the weights to {folder}/Wan2.1_VAE.pth (windows, not seen from here)\n" in shown
