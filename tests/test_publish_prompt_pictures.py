"""Pictures that sample prompts name: published beside the prompts, known again, and never lost."""

from pathlib import Path

import pytest
from helpers import image_bytes, write_tree

from wangen.generator.cli import main
from wangen.generator.publish.texts import prompts_texts
from wangen.generator.workspace import read

TOML = 'model = "i2v-14B"\nplatforms = ["linux", "wsl"]\n[steps.train]\nsample_prompts = "told/p.txt"\n' \
       "sample_every_n_epochs = 1\n"  # fmt: skip
PROMPTS = "A cat. --i a/first.png\nA dog. --i second.png\nA cow. --i /data/c.png\n"
BOTH = {"a/first.png", "second.png"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A workspace whose prompts name a picture beside them, and one in the workspace."""
    tree = {"datasets/cats/x.jpg": image_bytes(), "datasets/cats/x.txt": "a cat", "wangen.toml": TOML,
            "told/p.txt": PROMPTS, "told/a/first.png": image_bytes(), "second.png": b"second"}  # fmt: skip
    return write_tree(tmp_path, tree)


def run(place: Path, *words: str) -> None:
    assert main([*words, "--workspace", str(place)]) == 0


def beside(place: Path, platform: str = "linux") -> Path:
    """The folder of published prompts."""
    return place / "published" / platform / "files" / "prompts"


def pictures(place: Path) -> set[str]:
    """What lies there but the prompts themselves."""
    folder = beside(place)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if not name.endswith(".txt")}


def test_they_are_published_beside_the_prompts(place: Path, capsys: pytest.CaptureFixture[str]):
    run(place, "publish", "cats")
    for platform in ("linux", "wsl"):
        assert (beside(place, platform) / "a/first.png").read_bytes() == image_bytes()
        assert (beside(place, platform) / "second.png").read_bytes() == b"second"
    assert "which the sample prompts name" not in capsys.readouterr().out
    workspace = read(place)
    assert [text.state for text in prompts_texts(workspace, workspace.target("linux"), workspace.profile(), "cats")] \
        == ["same", "same", "same"]  # fmt: skip


def test_a_new_picture_replaces_what_was_published_and_nothing_else(place: Path, capsys: pytest.CaptureFixture[str]):
    run(place, "publish", "cats")
    (place / "second.png").write_bytes(b"third")
    (place / "told/a/first.png").write_bytes(b"fourth")
    (beside(place) / "a/first.png").write_bytes(b"the user's")
    capsys.readouterr()
    for _ in range(2):
        run(place, "publish", "cats")
        assert "files/prompts/a/first.png was edited by hand and stays; the new picture is first.png.new" in (
            capsys.readouterr().out
        )
        assert (beside(place) / "second.png").read_bytes() == b"third"
        assert (beside(place) / "a/first.png").read_bytes() == b"the user's"
        assert (beside(place) / "a/first.png.new").read_bytes() == b"fourth"
    run(place, "clean", "cats", "--bundle")
    assert pictures(place) == {"a/first.png"}
    assert "changed in the bundle" in capsys.readouterr().out


def test_targets_at_one_place_share_them(place: Path):
    root = place / "there"
    text = TOML.replace('"linux"', '"windows"').replace(
        "[steps.train]",
        f"""[platform.windows]
root = 'C:\\AI'
host_root = '{root}'
[platform.wsl]
root = '/mnt/c/AI'
host_root = '{root}'
[steps.train]""",
    )
    (place / "wangen.toml").write_text(text)
    run(place, "publish", "cats")
    folder = next(root.rglob("second.png")).parent
    assert (folder / "a/first.png").read_bytes() == image_bytes()
    run(place, "clean", "cats", "--bundle")
    assert not folder.exists()


def test_what_is_named_no_more_or_by_another_dataset_too(place: Path, capsys: pytest.CaptureFixture[str]):
    write_tree(place, {"datasets/dogs/y.jpg": image_bytes(), "datasets/dogs/y.txt": "a dog"})
    run(place, "publish", "cats")
    (place / "told/p.txt").write_text("A cat. --i second.png\n")
    run(place, "publish", "cats")
    run(place, "publish", "dogs")
    assert pictures(place) == BOTH
    run(place, "clean", "cats", "--bundle")
    assert pictures(place) == {"second.png"}, "of the dogs"
    (place / "second.png").unlink()
    run(place, "clean", "dogs", "--bundle")
    assert pictures(place) == {"second.png"}
    assert f"the only copy: {place / 'second.png'} is gone or lies in the bundle" in capsys.readouterr().out


def test_prompts_that_the_user_edited_keep_their_pictures(place: Path):
    run(place, "publish", "cats")
    prompts = beside(place) / "cats_linux.txt"
    prompts.write_text(prompts.read_text().replace("A cat.", "A kitten."))
    run(place, "clean", "cats", "--bundle")
    assert pictures(place) == BOTH
    assert prompts.is_file()


@pytest.mark.parametrize("name", ["../out.png", "none.png"])
def test_a_picture_that_leads_out_or_is_not_there_is_named(place: Path, name: str, capsys: pytest.CaptureFixture[str]):
    (place / "out.png").write_bytes(b"out")
    (place / "told/p.txt").write_text(f"A cat. --i {name}\n")
    run(place, "publish", "cats")
    assert f"next: put {name}, which the sample prompts name" in capsys.readouterr().out
    assert pictures(place) == set()


def test_another_datasets_first_publish_knows_what_was_published(place: Path, capsys: pytest.CaptureFixture[str]):
    write_tree(place, {"datasets/dogs/y.jpg": image_bytes(), "datasets/dogs/y.txt": "a dog"})
    run(place, "publish", "cats")
    (place / "second.png").write_bytes(b"third")
    run(place, "publish", "dogs")
    assert (beside(place) / "second.png").read_bytes() == b"third"
    assert "edited by hand" not in capsys.readouterr().out


def test_beside_edited_prompts_new_pictures_go_on_arriving(place: Path, capsys: pytest.CaptureFixture[str]):
    run(place, "publish", "cats")
    prompts = beside(place) / "cats_linux.txt"
    prompts.write_text(prompts.read_text().replace("A cat.", "A kitten."))
    for content in (b"v2", b"v3", b"v4"):
        (place / "second.png").write_bytes(content)
        run(place, "publish", "cats")
        assert (beside(place) / "second.png").read_bytes() == content
    assert "second.png was edited" not in capsys.readouterr().out
    (place / "told/p.txt").write_text(prompts.read_text())  # with the notes in it
    (place / "second.png").write_bytes(b"v5")
    run(place, "publish", "cats")
    assert (beside(place) / "second.png").read_bytes() == b"v5"


@pytest.mark.parametrize("how", ["a link", "in the bundle", "prompts of the user"])
def test_the_only_copy_and_what_other_prompts_name_stay(place: Path, how: str):
    run(place, "publish", "cats")
    published = beside(place) / "second.png"
    if how == "a link":
        (place / "second.png").unlink()
        (place / "second.png").symlink_to(published)
    elif how == "in the bundle":
        (beside(place) / "own.txt").write_text("A cat. --i second.png\n")
        text = TOML.replace("told/p.txt", "published/linux/files/prompts/own.txt")
        (place / "wangen.toml").write_text(text)
        (place / "second.png").unlink()
    else:
        (beside(place) / "my.txt").write_text("A cow. --i second.png\n")
    run(place, "publish", "cats", "--platform", "linux")
    run(place, "clean", "cats", "--bundle")
    assert published.read_bytes() == b"second"


@pytest.mark.parametrize("text", ["A cat. --i cats_linux.txt\n", "A cat. --i empty.png\n"])
def test_what_is_no_picture_is_not_published(place: Path, text: str):
    write_tree(place, {"told/cats_linux.txt": "no picture", "empty.png": b""})
    (place / "told/p.txt").write_text(text)
    run(place, "publish", "cats")
    assert pictures(place) == set()
    assert "A cat." in (beside(place) / "cats_linux.txt").read_text()


def test_publishing_again_changes_nothing_beside_a_picture_of_the_user(place: Path):
    write_tree(beside(place), {"second.png": b"the user's"})
    run(place, "publish", "cats")
    prompts = (beside(place) / "cats_linux.txt").read_bytes()
    run(place, "publish", "cats")
    assert (beside(place) / "cats_linux.txt").read_bytes() == prompts
