"""Several resolutions of one dataset, smaller copies, several targets at one root, and what a dry run says."""

import io
import random
from pathlib import Path

import pytest
from helpers import clip_bytes, every, image_bytes, read_tree, write_tree
from PIL import Image

from wangen import profiles
from wangen.generator.cli import main
from wangen.generator.dataset import MediaFacts, read_facts
from wangen.generator.geometry import bucket_of
from wangen.generator.publish.resize import bake, smaller_size
from wangen.generator.tomls import DatasetEntry, read_dataset
from wangen.runtime.media import load_image

TOML = 'num_frames = 17\nplatforms = ["linux"]\n'
STEP = profiles.model("t2v-1.3B").bucket_step


@pytest.fixture
def place(tmp_path):
    tree = {
        "wangen.toml": TOML,
        "datasets/cats/big.jpg": image_bytes((800, 600)),
        "datasets/cats/big.txt": "a big cat",
        "datasets/cats/small.png": image_bytes((100, 90), format="PNG"),
        "datasets/cats/small.txt": "a small cat",
        "datasets/cats/walk.mp4": clip_bytes(tmp_path),
        "datasets/cats/walk.txt": "a cat walks",
    }
    return write_tree(tmp_path / "ws", tree)


def publish(place: Path, *words: str) -> int:
    return main(["publish", "cats", "--workspace", str(place), *words])


def root(place: Path, platform: str = "linux") -> Path:
    return place / "published" / platform


def data(place: Path, folder: str = "") -> Path:
    return root(place) / "files" / "datasets" / "cats" / folder


# ---- several resolutions -----------------------------------------------------------------------------------------


def test_each_resolution_has_its_folder_its_cache_and_its_blocks(place, monkeypatch):
    words = [word for size in ("256", "512", "832x480", "256") for word in ("--resolution", size)]
    assert publish(place, *words) == 0
    assert {path.name for path in data(place).iterdir()} == {
        "256", "256_cache", "512", "512_cache", "832x480", "832x480_cache",
    }  # fmt: skip
    for size in ("256", "512", "832x480"):
        assert read_tree(data(place, size)).keys() >= {"big.jpg", "big.txt", "walk.mp4"}
        assert list(data(place, f"{size}_cache").iterdir()) == []
        assert (data(place, size) / "big.jpg").samefile(place / "datasets/cats/big.jpg")
    monkeypatch.chdir(root(place))
    entries = read_dataset(Path("files/tomls/cats_linux.toml"))
    assert [(entry.media, entry.resolution) for entry in entries] == [
        (media, size) for size in ((256, 256), (512, 512), (832, 480)) for media in ("image", "video")
    ]
    assert len({entry.cache_directory for entry in entries}) == 3
    assert all(entry.cache_directory == Path(f"{entry.directory}_cache") for entry in entries)


def test_resolutions_are_remembered_and_old_ones_stay_until_they_are_cleaned(place, capsys):
    publish(place, "--resolution", "256", "--resolution", "512")
    before = read_tree(root(place))
    assert "[dataset.cats]: resolutions = ['256', '512']" in capsys.readouterr().out
    assert publish(place) == 0
    assert read_tree(root(place)) == before
    assert "stays; remove it" not in capsys.readouterr().out
    publish(place, "--resolution", "512")
    assert (data(place, "256") / "big.jpg").is_file()
    assert "256/ of an earlier publish stays; remove it with: wangen clean cats --bundle --caches --resolution 256" in (
        capsys.readouterr().out
    )
    toml = (root(place) / "files/tomls/cats_linux.toml").read_text()
    assert "cats/512" in toml
    assert "cats/256" not in toml


@pytest.mark.parametrize("size", ["", "0", "12x", "axb", "-5", "512,256", "20000", "512x16385"])
def test_a_resolution_that_is_none(place, capsys, size):
    assert publish(place, f"--resolution={size}") == 2
    assert ("at most 16384 pixels" if size.endswith(("20000", "16385")) else "is no resolution") in (
        capsys.readouterr().err
    )
    assert not root(place).exists()
    assert (place / "wangen.toml").read_text() == TOML


def test_a_resolution_that_a_toml_of_the_users_own_still_names_is_not_offered_for_removal(place, capsys):
    publish(place, "--resolution", "256", "--resolution", "512")
    toml = root(place) / "files/tomls/cats_linux.toml"
    toml.write_text("# mine\n" + toml.read_text())
    capsys.readouterr()
    publish(place, "--resolution", "256")
    said = capsys.readouterr().out
    assert "cats_linux.toml was edited by hand and stays" in said
    assert "512/ of an earlier publish" not in said
    assert main(["check", "cats", "--workspace", str(place)]) == 1
    assert "512/ of an earlier publish" not in capsys.readouterr().out
    toml.write_text(toml.read_text().replace("cats/512", "cats/256"))
    publish(place)
    assert "512/ of an earlier publish stays; remove it" in capsys.readouterr().out


# ---- smaller copies ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_resize_makes_smaller_copies_and_undoes_them(place, capsys):
    originals = read_tree(place / "datasets")
    assert publish(place, "--resolution", "256", "--resize") == 0
    assert "clips are taken as they are" in capsys.readouterr().out
    with Image.open(data(place, "256") / "big.jpg") as image:
        assert (image.format, image.size) == ("JPEG", (299, 224))
    for name in ("small.png", "walk.mp4"):  # never larger than the original
        assert (data(place, "256") / name).samefile(place / "datasets/cats" / name)
    before = {path: path.stat().st_mtime_ns for path in data(place, "256").iterdir()}
    publish(place)
    assert {path: path.stat().st_mtime_ns for path in data(place, "256").iterdir()} == before
    publish(place, "--no_resize")
    assert (data(place, "256") / "big.jpg").samefile(place / "datasets/cats/big.jpg")
    publish(place, "--resize")
    assert (data(place, "256") / "big.jpg").stat().st_size < len(originals["cats/big.jpg"])
    assert read_tree(place / "datasets") == originals


def test_resize_never_touches_the_bundle_it_is_given_as_source(place, capsys):
    publish(place, "--resolution", "256")
    before = read_tree(data(place))
    for option in (["--resize"], ["--trigger", "ohwx"]):
        assert publish(place, "--source", str(data(place, "256")), *option) == 1
        assert "would change the originals" in capsys.readouterr().err
    assert read_tree(data(place)) == before


def entry(resolution: tuple[int, int]) -> DatasetEntry:
    return DatasetEntry(
        directory=Path(), media="image", cache_directory=Path(), resolution=resolution, enable_bucket=True
    )


@pytest.mark.parametrize("resolution", [(256, 256), (512, 512), (832, 480)])
def test_a_smaller_copy_covers_the_same_bucket(resolution):
    draw = random.Random(7)
    num_smaller = 0
    for _ in range(400):
        width, height = draw.randint(16, 5000), draw.randint(16, 5000)
        size = smaller_size(width, height, resolution, STEP)
        if size is None:
            continue
        num_smaller += 1
        bucket = bucket_of(MediaFacts(width, height, 1, 0.0), entry(resolution), STEP)
        assert bucket_of(MediaFacts(*size, 1, 0.0), entry(resolution), STEP) == bucket
        assert bucket[0] <= size[0] < width
        assert bucket[1] <= size[1] < height
        assert min(size[0] - bucket[0], size[1] - bucket[1]) <= 2  # hardly ever more than it has to be
    assert num_smaller > 100


@pytest.mark.parametrize("orientation", every(4, [6, 1, 3, 8], pytest.mark.slow))
def test_the_runtime_sees_the_same_pixels_in_a_smaller_copy(tmp_path, orientation):
    path = write_tree(tmp_path, {"a.png": image_bytes((640, 400), format="PNG", orientation=orientation)}) / "a.png"
    facts = read_facts(path)
    size = smaller_size(facts.width, facts.height, (256, 256), STEP)
    bucket = bucket_of(facts, entry((256, 256)), STEP)
    copy = write_tree(tmp_path, {"copy.png": bake(path, size)}) / "copy.png"
    assert (load_image(copy, bucket) == load_image(path, bucket)).all()
    assert read_facts(copy) == MediaFacts(*size, 1, 0.0)


def picture(mode: str, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image = Image.open(io.BytesIO(image_bytes((400, 300), format="PNG"))).convert(mode)
    image.save(buffer, format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("mode", "format", "made"),
    [
        ("RGB", "JPEG", "RGB"), ("L", "JPEG", "L"), ("CMYK", "JPEG", "CMYK"), ("RGB", "PNG", "RGB"),
        ("RGBA", "PNG", "RGBA"),
        ("LA", "PNG", "LA"), ("L", "PNG", "L"), ("P", "PNG", "RGB"), ("1", "PNG", "L"), ("RGB", "BMP", "RGB"),
        ("RGB", "WEBP", "RGB"), ("I;16", "PNG", None), ("RGB", "TIFF", None), ("P", "GIF", None),
    ],
)  # fmt: skip
def test_formats_and_modes_of_smaller_copies(tmp_path, mode, format, made):
    path = write_tree(tmp_path, {"a.bin": picture(mode, format)}) / "a.bin"
    content = bake(path, (100, 75))
    if made is None:
        assert content is None
        return
    with Image.open(io.BytesIO(content)) as image:
        assert (image.format, image.mode, image.size) == (format, made, (100, 75))


def test_a_smaller_copy_keeps_the_colour_profile_and_drops_the_orientation(tmp_path):
    profile = b"\0" * 36 + b"acsp" + b"\0" * 88
    exif = Image.Exif()
    exif[0x0112] = 6
    path = write_tree(tmp_path, {"a.jpg": picture("RGB", "JPEG", icc_profile=profile, exif=exif)}) / "a.jpg"
    with Image.open(io.BytesIO(bake(path, (75, 100)))) as image:
        assert image.info["icc_profile"] == profile
        assert dict(image.getexif()) == {}
        assert image.layer[0][1:3] == (1, 1)  # colours are not halved
        assert image.layers == 3


def test_transparency_by_colour_stays(tmp_path):
    path = write_tree(tmp_path, {"a.png": picture("RGB", "PNG", transparency=(1, 2, 3))}) / "a.png"
    with Image.open(io.BytesIO(bake(path, (100, 75)))) as image:
        assert image.mode == "RGBA"


# ---- several targets ---------------------------------------------------------------------------------------------


def test_targets_at_one_root_share_media(place, tmp_path, capsys):
    shared = tmp_path / "AI"
    sections = f"[platform.windows]\nroot = 'C:\\AI'\nhost_root = '{shared}'\n"
    sections += f"[platform.wsl]\nroot = '/mnt/c/AI'\nhost_root = '{shared}'\n"
    (place / "wangen.toml").write_text(TOML.replace('"linux"', '"windows", "wsl"') + sections)
    assert publish(place, "--resolution", "256") == 0
    found = read_tree(shared)
    assert {"train_cats.bat", "train_cats.ps1", "train_cats.sh", "files/tomls/cats_win.toml"} < found.keys()
    assert 'image_directory = "C:/AI/files/datasets/cats/256"' in found["files/tomls/cats_win.toml"].decode()
    assert 'image_directory = "/mnt/c/AI/files/datasets/cats/256"' in found["files/tomls/cats_wsl.toml"].decode()
    assert publish(place) == 0
    assert read_tree(shared) == found
    capsys.readouterr()
    assert publish(place, "--platform", "wsl", "--platform", "linux") == 0


def test_targets_that_would_write_one_script_are_refused(place, tmp_path, capsys):
    sections = f"[platform.windows]\nhost_root = '{tmp_path / 'AI'}'\n"
    sections += f"[platform.windows-rocm]\nhost_root = '{tmp_path / 'AI'}'\n"
    (place / "wangen.toml").write_text(TOML.replace('"linux"', '"windows", "windows-rocm"') + sections)
    assert publish(place) == 2
    assert "windows and windows-rocm would both write train_cats.bat" in capsys.readouterr().err
    assert not (tmp_path / "AI").exists()
    assert publish(place, "--platform", "windows-rocm") == 0


# ---- a dry run, and scripts alone --------------------------------------------------------------------------------


def everything(place: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in place.rglob("*")
    }


def test_a_dry_run_says_all_and_writes_nothing(place, capsys):
    before = everything(place)
    assert publish(place, "--dry-run", "--resolution", "256", "--trigger", "ohwx") == 0
    assert everything(place) == before
    shown = capsys.readouterr().out
    assert "256/ new: 6 (" in shown
    assert "scripts and TOML new: 4 (" in shown
    assert "nothing was written: this was a dry run" in shown
    publish(place, "--resolution", "256")
    (place / "datasets/cats/big.txt").write_text("another caption")
    (place / "datasets/cats/small.png").unlink()
    (place / "datasets/cats/small.txt").unlink()
    script = root(place) / "train_cats.sh"
    script.write_text(script.read_text() + "echo mine\n")
    before = everything(place)
    capsys.readouterr()
    assert publish(place, "--dry_run") == 0
    assert everything(place) == before
    shown = capsys.readouterr().out
    assert "256/ changed: 1 (15 bytes): big.txt" in shown
    assert "256/ removed: 2 (" in shown
    assert "256/ same: 3 files" in shown
    assert "train_cats.sh was edited by hand and stays" in shown


def test_scripts_alone(place, capsys):
    assert publish(place, "--only_scripts") == 1
    assert "is not published for linux yet" in capsys.readouterr().err
    publish(place)
    (root(place) / "train_cats.sh").unlink()
    (place / "datasets/cats/big.txt").write_text("another caption")
    (place / "wangen.toml").write_text(TOML + "[steps.train]\nnetwork_dim = 8\n")
    before = read_tree(root(place))
    assert publish(place, "--only_scripts") == 0
    after = read_tree(root(place))
    assert {name for name in after if after[name] != before.get(name)} == {"train_cats.sh"}
    assert b"NETWORK_DIM='8'" in after["train_cats.sh"] or b"NETWORK_DIM=8" in after["train_cats.sh"]
