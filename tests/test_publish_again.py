"""Publishing again: only what changed is written, what others wrote and what the user edited stays."""

import json
from pathlib import Path

import pytest
from helpers import image_bytes, read_tree, write_tree
from red_house import SLUG, SMALL, dataset, media, publish, stamps

from wangen.generator import files, scripts
from wangen.generator.publish import manifest
from wangen.generator.tomls import read_dataset

pytest_plugins = ("red_house_fixtures",)


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


def test_a_new_text_with_the_users_knobs_is_made_again_when_publishing_changes(place, capsys):
    settings = (place / "wangen.toml").read_text()
    publish(place, "--platform", "linux")
    script = place / "published/linux" / f"train_{SLUG}.sh"
    script.write_text(script.read_text().replace("SEED='42'", "SEED='7'") + "\n# mine\n")
    for rank in (8, 4):
        (place / "wangen.toml").write_text(f"{settings}[steps.train]\nnetwork_dim = {rank}\n")
        capsys.readouterr()
        assert publish(place, "--platform", "linux") == 0
        assert f"the new text is {script.name}.new" in capsys.readouterr().out
        new = script.with_name(f"{script.name}.new").read_text()
        assert f"NETWORK_DIM='{rank}'" in new
        assert "SEED='7'" in new
