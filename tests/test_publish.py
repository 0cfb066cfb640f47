"""`wangen publish`: the layout, whose files are linked and whose copied, and what is refused in which words."""

import os
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers import image_bytes, read_tree, write_tree
from red_house import NAME, SLUG, SMALL, dataset, media, publish

from wangen.generator import scripts
from wangen.generator.cli import main
from wangen.generator.publish import manifest
from wangen.generator.setup.wheel import wheel_name
from wangen.generator.tasks import supported
from wangen.generator.tomls import read_dataset

pytest_plugins = ("red_house_fixtures",)

SHELLS = {"linux": ["sh"], "wsl": ["sh"], "windows": ["bat", "ps1"]}
SUFFIX = {"linux": "linux", "wsl": "wsl", "windows": "win"}


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


def test_a_clip_beside_one_frame_in_wangen_toml_is_answered_with_that_line(place, capsys):
    (place / "wangen.toml").write_text("num_frames = 1\n")
    assert publish(place) == 1
    said = capsys.readouterr().err
    assert "walk.mp4: is or has a clip, and wangen.toml says num_frames = 1; write num_frames = 81, or take it" in said
    assert "makes pictures" not in said


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["publish", "nowhere"], 1, "there is no such dataset"),
        (["publish", "é日"], 0, None),
        (["publish", "日本"], 1, "no letter a-z"),
        (["publish", "日本"], 1, "do:    give a name with Latin letters or digits, and the media with --source FOLDER"),
        (["publish", "CON"], 1, "Windows reserves the name"),
        (["publish", "CON"], 1, "do:    give another name, and the media with --source FOLDER"),
        (["publish", NAME, "--platform", "amiga"], 2, "there is no platform 'amiga'"),
        (["publish", NAME, "--model", "t2v"], 2, "there is no model 't2v'"),
        (["publish", NAME, "--model", "t2v-14b"], 2, "did you mean t2v-14B? one of"),
        (["publish", NAME, "--source", "gone"], 1, "cannot list the folder"),
        (["publish", NAME, "--source", "gone"], 1, "do:    check the path: --source, or source in wangen.toml"),
        (["publish", NAME, "--model", "t2v-15b"], 2, f"one of {', '.join(supported())}"),
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


def test_pictures_that_are_there_twice_are_said_and_published(place, capsys):
    assert publish(place) == 0
    assert "the same picture" not in capsys.readouterr().out
    folder = dataset(place)
    for name, end in (("Front.JPG", b"1"), ("twin.jpg", b"1"), ("other.jpg", b"2")):
        (folder / name).write_bytes(image_bytes() + end)
        (folder / name).with_suffix(".txt").write_text("again")
    assert publish(place) == 0
    said = "the same picture under several names, each of which is trained: Front.JPG and twin.jpg\n"
    assert f"  {said}" in capsys.readouterr().out
    main(["check", NAME, "--workspace", str(place)])
    assert f"  note     {said}" in capsys.readouterr().out
    for name in "abc":
        (folder / f"{name}.jpg").write_bytes(image_bytes() + b"1")
        (folder / f"{name}.txt").write_text("again")
    assert publish(place, "--dry_run") == 0
    assert "is trained: Front.JPG and a.jpg and b.jpg and 2 more\n" in capsys.readouterr().out


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


def test_pictures_that_sample_prompts_name_are_told_until_they_are_in_the_bundle(place, capsys):
    toml = place / "wangen.toml"
    told = 'model = "i2v-14B"\n[steps.train]\nsample_prompts = "p.txt"\nsample_every_n_epochs = 1\n'
    toml.write_text(toml.read_text(encoding="utf-8") + told, encoding="utf-8")
    (place / "p.txt").write_text("A cat. --i a/first.png\nA dog. --i a/first.png\nA cow. --i /data/c.png\n")
    words = "next: put a/first.png, which the sample prompts name, into files/prompts in the bundle\n"
    assert publish(place, "--platform", "linux") == 0
    assert capsys.readouterr().out.count(words) == 1
    picture = place / "published" / "linux" / "files" / "prompts" / "a" / "first.png"
    picture.parent.mkdir(parents=True)
    picture.touch()
    assert publish(place, "--platform", "linux") == 0
    assert "which the sample prompts name" not in capsys.readouterr().out


def test_what_is_still_to_be_done(place, capsys):
    assert publish(place, "--platform", "linux") == 0
    shown = capsys.readouterr().out
    assert "next: put the weights to models/Wan2.1_VAE.pth in the bundle (linux)" in shown
    tokenizer = "next: put the tokenizer, the folder google/umt5-xxl, beside the text encoder"
    assert tokenizer in shown
    models = place / "published" / "linux" / "models"
    (models / "google" / "umt5-xxl").mkdir(parents=True)
    for name in ("Wan2.1_VAE.pth", "google/umt5-xxl/tokenizer.json"):
        (models / name).touch()
    assert publish(place, "--platform", "linux") == 0
    shown = capsys.readouterr().out
    assert "Wan2.1_VAE.pth" not in shown
    assert tokenizer not in shown


@pytest.mark.parametrize("models", ["D:\\models\\x", "\\\\nas\\x"])
def test_weights_in_a_folder_of_their_own_are_not_put_into_the_bundle(place, capsys, models):
    (place / "wangen.toml").write_text(SMALL + f"[platform.windows]\nmodels = '{models}'\n")
    assert publish(place, "--platform", "windows") == 0
    folder = models.replace("\\", "/")
    shown = capsys.readouterr().out
    assert f"next: put the weights to {folder}/Wan2.1_VAE.pth (windows, not seen from here)\n" in shown


@pytest.mark.skipif(os.name == "nt", reason="rights of POSIX")
@pytest.mark.parametrize(("umask", "text", "script"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_the_rights_of_what_is_written_follow_the_umask(place, umask, text, script):
    dataset(place)
    before = os.umask(umask)
    try:
        assert publish(place, "--platform", "linux") == 0
    finally:
        os.umask(before)
    written = [path for path in (place / "published/linux").rglob("*") if path.suffix in (".sh", ".toml", ".whl")]
    assert {path.suffix for path in written} == {".sh", ".toml", ".whl"}
    for path in written:
        assert path.stat().st_mode & 0o777 == (script if path.suffix == ".sh" else text), path
