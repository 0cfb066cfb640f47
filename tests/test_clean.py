"""`wangen clean`: it shows what wangen wrote, removes what is named, and never anything else."""

import json
import os
import shutil
import struct
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from helpers import image_bytes, read_tree, write_tree

from wangen.generator.cli import main
from wangen.generator.errors import bytes_text
from wangen.generator.processes import here
from wangen.generator.setup.wheel import wheel_name

TOML = 'resolution = [64, 64]\nnum_frames = 17\nplatforms = ["linux"]\n'
KEY = "0123456789abcdef0123"


def tensors(**metadata: str) -> bytes:
    """A safetensors file with one number and free text fields."""
    header = {"__metadata__": metadata, "x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0"


ENTRY = tensors(format="wangen-cache-1")
LORA = tensors(**{"wangen.fingerprint": "{}"})
OURS = {
    "caches": {
        f"files/datasets/cats/64_cache/a_jpg-{KEY}.latent.safetensors": ENTRY,
        f"files/datasets/cats/64_cache/text-{KEY}.text_encoder_output.safetensors": ENTRY,
        "files/datasets/cats/64_cache/.wangen-sources.jsonl": b"",
        "files/datasets/cats/64_cache/.wangen-index.jsonl": b"",
        f"files/datasets/cats/64_cache/.claim-{KEY}": b"{}",
        f"files/datasets/cats/64_cache/.claim-{KEY}-0123456789abcdef": b"{}",
        f"files/datasets/cats/64_cache/.wangen-needs-{KEY}.latent.json": b"{}",
        f"files/datasets/cats/64_cache/.{KEY}-0123456789abcdef.tmp": b"half",
        f"files/datasets/cats/64_cache/.{KEY}-0123456789abcdef01234567.tmp": b"half",
        f"files/datasets/cats/64_cache/packs/{KEY}.tar": f"a-{KEY}.latent.safetensors".encode().ljust(1024, b"\0"),
        f"files/datasets/cats/64_cache/packs/{KEY}.index.safetensors": tensors(index='{"format": "wangen-pack-1"}'),
        f"files/datasets/cats/64_cache/packs/.{KEY}-0123456789abcdef01234567.tmp": b"half",
    },
    "checkpoints": {
        "outputs/cats/cats-state/newest": b"step-00000010",
        "outputs/cats/cats-state/begun_anew": b"",
        "outputs/cats/cats-state/step-00000010/state.json": b"{}",
        "outputs/cats/cats-state/step-00000010/adapter.safetensors": tensors(),
        "outputs/cats/cats-state/step-00000010/optimizer.safetensors": tensors(),
        "outputs/cats/cats-state/.staging-00000020/adapter.safetensors": b"half",
        "outputs/cats/cats-step00000010.safetensors": LORA,
        "outputs/cats/cats-000002-kohya.safetensors": LORA,
        "outputs/cats/smoke/cats-state/step-00000050/state.json": b"{}",
        "outputs/cats/cats-state/step-00000010/ema.safetensors": tensors(),
        "outputs/cats/cats-state/step-00000020/adapter_high_noise.safetensors": tensors(),
        "outputs/cats/cats-state/step-00000020/optimizer_low_noise.safetensors": tensors(),
        "outputs/cats/cats-state/step-00000030/parts/__0_0.distcp": b"x",
        "outputs/cats/cats-state/step-00000030/parts/__0_0.distcp.crc32": b"x",
        "outputs/cats/cats-state/step-00000030/parts/.metadata": b"x",
        "outputs/cats/cats_high_noise-step00000010.safetensors": LORA,
        "outputs/cats/cats_low_noise-000002-ema-kohya.safetensors": LORA,
    },
    "outputs": {
        "outputs/cats/cats.safetensors": LORA,
        "outputs/cats/cats-kohya.safetensors": LORA,
        "outputs/cats/smoke/cats.safetensors": LORA,
        "outputs/cats/cats-best.safetensors": LORA,
        "outputs/cats/cats-ema.safetensors": LORA,
        "outputs/cats/cats_high_noise.safetensors": LORA,
        "outputs/cats/cats_low_noise-best-diffusers.safetensors": LORA,
        "outputs/cats/cats-kept-step00000040-ema.safetensors": LORA,
        "outputs/cats/cats_high_noise-kept2-step00000040-kohya.safetensors": LORA,
        "outputs/cats/metrics.jsonl": b'{"step": 1, "loss": 0.5}\n',
        "outputs/cats/samples/cats-step00000010-1.mp4": b"x",
        "outputs/cats/samples/cats-step00000010-2.png": b"x",
        "outputs/cats/samples/cats-step00000010-continuation-1.mp4": b"x",
        "outputs/cats/samples/cats_low_noise-step00000010-1.mp4": b"x",
        "outputs/cats/samples/samples.jsonl": b'{"file": "cats-step00000010-1.mp4", "step": 10}\n',
        "outputs/cats/trace/steps-3-5.json.gz": b"x",
        "outputs/cats/cats-timesteps.svg": b"x",
        "outputs/cats/train.report.json": b'{"step": "train"}',
        "outputs/cats/train.begun.json": b'{"step": "train"}',
        "outputs/cats/cache_text-2-of-8.report.json": b'{"step": "cache_text"}',
        "outputs/cats/cache_text-3.report.json": b'{"step": "cache_text"}',
        "outputs/cats/smoke/train.report.json": b'{"step": "train"}',
        "outputs/cats/logs/ab12_3f/attempt_0/0/stderr.log": b"x",
        "outputs/cats/first_frames/0123456789abcdef0123.png": b"x",
        "outputs/cats/trace/.steps-3-5.json.gz.tmp.json.gz": b"x",
        "logs/cats/node1/ab12_3f/attempt_1/7/stdout.log": b"x",
        "logs/cats/ab12_3f/attempt_0/1/stderr.log": b"x",
        "outputs/cats/logs/cats/events.out.tfevents.1.host": b"x",
        "outputs/cats/logs/cats.wandb-run": b"1a2b3c4d",
        "outputs/cats/logs/cats_high_noise.mlflow-run": b"1a2b3c4d",
        "logs/cats.log": b"x",
    },
}
THEIRS = {
    f"files/datasets/cats/64_cache/mine-{KEY}.latent.safetensors": tensors(format="pt"),
    f"files/datasets/cats/64_cache/cut-{KEY}.latent.safetensors": ENTRY[:-30],
    "files/datasets/cats/64_cache/my_lora_wan.safetensors": tensors(),
    "files/datasets/cats/64_cache/notes.json": b"{}",
    f"files/datasets/cats/64_cache/packs/{KEY[::-1]}.tar": b"notes.txt".ljust(1024, b"\0"),
    f"files/datasets/cats/64_cache/packs/{KEY[::-1]}.index.safetensors": tensors(),
    "files/datasets/cats/64_cache/packs/mine.tar": f"a-{KEY}.latent.safetensors".encode(),
    "files/datasets/cats/64/mine.jpg": b"mine",
    "files/datasets/other/64/x.jpg": b"x",
    "outputs/cats/cats-mine.safetensors": LORA,
    "outputs/cats/cats_dog.safetensors": LORA,
    "outputs/cats/smoke/metrics.jsonl": b"mine",
    "outputs/cats/samples/sample.mp4": b"mine",
    "outputs/cats/trace/notes.json": b"mine",
    "outputs/cats/first_frames/mine.png": b"mine",
    "outputs/cats/logs/ab12_3f/attempt_0/0/notes.txt": b"mine",
    "logs/cats/notes.log": b"mine",
    "outputs/cats/cats-000001.safetensors": tensors(format="pt"),
    "outputs/cats/cats-state/step-00000010/notes.txt": b"mine",
    "outputs/cats/cats-state/mine/state.json": b"{}",
    "outputs/cats/check.report.json": b'{"step": "another"}',
    "outputs/cats/notes.txt": b"mine",
    "outputs/cats/logs/dogs.wandb-run": b"5e6f7a8b",
    "outputs/cats/sample.mp4": b"mine",
    "outputs/other/other.safetensors": LORA,
    "logs/other.log": b"x",
    "train_catsuit.sh": b"mine",
    "models/vae.pth": b"x",
}


@pytest.fixture
def place(tmp_path):
    """A published dataset."""
    tree = {"wangen.toml": TOML}
    for name in "ab":
        tree |= {f"datasets/cats/{name}.jpg": image_bytes(seed=ord(name)), f"datasets/cats/{name}.txt": f"cat {name}"}
    place = write_tree(tmp_path / "ws", tree)
    assert main(["publish", "cats", "--workspace", str(place)]) == 0
    return place


def root(place: Path) -> Path:
    return place / "published" / "linux"


def clean(place: Path, *words: str) -> int:
    return main(["clean", "cats", "--workspace", str(place), *words])


def names(place: Path) -> set[str]:
    return set(read_tree(root(place)))


def test_without_a_part_it_shows_and_removes_nothing(place, capsys):
    for files in OURS.values():
        write_tree(root(place), files)
    before = read_tree(place)
    capsys.readouterr()
    assert clean(place) == 0
    assert read_tree(place) == before
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if " files " in line}
    assert {part: int(row[1]) for part, row in rows.items()} == {
        "bundle": 10, "caches": 12, "checkpoints": 17, "outputs": 31,
    }  # fmt: skip
    assert " ".join(rows["outputs"][3:5]) == bytes_text(sum(map(len, OURS["outputs"].values())))


@pytest.mark.parametrize("part", OURS)
def test_each_part_removes_what_it_names_and_never_a_file_of_others(place, part):
    for files in (*OURS.values(), THEIRS):
        write_tree(root(place), files)
    before = read_tree(place)
    assert clean(place, f"--{part}") == 0
    gone = before.keys() - read_tree(place).keys()
    assert gone == {f"published/linux/{name}" for name in OURS[part]}
    assert {name: before[name] for name in before if name not in gone} == read_tree(place)


def test_the_bundle_goes_and_the_originals_stay(place):
    originals = read_tree(place / "datasets")
    for files in (*OURS.values(), THEIRS):
        write_tree(root(place), files)
    assert clean(place, "--bundle") == 0
    shared = {"setup_wangen.sh", f"files/{wheel_name(version('wangen'))}"}  # a script of another dataset is there
    assert names(place) == shared.union(*OURS.values(), THEIRS)
    assert read_tree(place / "datasets") == originals
    assert list((place / ".wangen").glob("*.json")) == []


def test_outputs_alone_are_removed_with_their_folders(place):
    assert clean(place, "--bundle", "--caches") == 0
    write_tree(root(place), OURS["outputs"])
    assert clean(place, "--outputs") == 0
    assert not root(place).exists()


def test_nothing_is_left_of_a_dataset_that_is_cleaned_whole(place):
    for files in OURS.values():
        write_tree(root(place), files)
    assert clean(place, *(f"--{part}" for part in ("bundle", *OURS))) == 0
    assert not root(place).exists()
    assert clean(place) == 1
    assert main(["publish", "cats", "--workspace", str(place)]) == 0


def test_what_the_user_changed_stays_and_is_shown(place, capsys):
    script, other = root(place) / "train_cats.sh", root(place) / "cache_cats.sh"
    script.write_bytes(script.read_bytes().replace(b"SEED=42", b"SEED=7").replace(b"SEED='42'", b"SEED='7'"))
    other.write_bytes(other.read_bytes() + b"echo mine\n")
    toml = root(place) / "files/tomls/cats_linux.toml"
    toml.write_bytes(toml.read_bytes().replace(b"num_repeats = 1", b"num_repeats = 5"))
    media = root(place) / "files/datasets/cats/64"
    (media / "a.txt").write_text("my cat")
    capsys.readouterr()
    assert clean(place, "--bundle") == 0
    shown = capsys.readouterr().out
    for words in (
        "train_cats.sh (you set SEED=7)",
        "cache_cats.sh (edited by hand)",
        "files/tomls/cats_linux.toml (edited by hand)",
        "files/datasets/cats/64/a.txt (changed in the bundle)",
    ):
        assert f"stays: {words}" in shown
    assert names(place) == {
        "train_cats.sh", "cache_cats.sh", "files/tomls/cats_linux.toml", "files/datasets/cats/64/a.txt",
        "files/datasets/cats/64/.wangen-published.json",
    }  # fmt: skip


def test_what_is_removed_already_is_not_listed(place, capsys):
    media = root(place) / "files/datasets/cats/64"
    write_tree(root(place), THEIRS)
    (media / "a.txt").write_text("my cat")
    assert clean(place, "--bundle") == 0
    capsys.readouterr()
    assert clean(place) == 0
    mine = "stays: files/datasets/cats/64/a.txt (changed in the bundle)"
    assert [line.strip() for line in capsys.readouterr().out.splitlines() if "/64/" in line] == [mine]
    assert clean(place, "--caches") == 0
    shown = capsys.readouterr().out
    assert mine not in shown
    assert f"stays: files/datasets/cats/64_cache/mine-{KEY}.latent.safetensors (no cache entry of ours" in shown
    assert clean(place, "--bundle") == 0
    shown = capsys.readouterr().out
    assert mine in shown
    assert "64_cache" not in shown
    (media / "a.txt").unlink()
    assert clean(place, "--bundle") == 0
    assert not (media / ".wangen-published.json").exists()


def test_empty_cache_folders_go_with_the_caches(place):
    assert clean(place, "--bundle") == 0
    assert (root(place) / "files/datasets/cats/64_cache").is_dir()
    assert clean(place, "--caches") == 0
    assert not (root(place) / "files").exists()


def test_the_only_copy_of_a_picture_stays(place, capsys):
    media = root(place) / "files/datasets/cats/64"
    keep = place / "keep.jpg"
    keep.hardlink_to(place / "datasets/cats/b.jpg")  # of b there is another name
    for name in ("a.jpg", "a.txt", "b.jpg"):
        (place / "datasets/cats" / name).unlink()
    assert clean(place, "--bundle") == 0
    assert {path.name for path in media.iterdir()} == {"a.jpg", "a.txt", ".wangen-published.json"}
    assert "a.jpg (the only copy: " in capsys.readouterr().out
    assert keep.read_bytes() == image_bytes(seed=ord("b"))


def test_of_several_links_to_a_picture_whose_original_is_gone_one_stays(place):
    assert main(["publish", "cats", "--workspace", str(place), "--resolution", "64", "--resolution", "128"]) == 0
    (place / "datasets/cats/a.jpg").unlink()
    assert clean(place, "--bundle") == 0
    left = list(root(place).rglob("a.jpg"))
    assert len(left) == 1
    assert left[0].read_bytes() == image_bytes(seed=ord("a"))


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_a_source_that_became_a_link_into_the_bundle_is_no_other_copy(place):
    media = root(place) / "files/datasets/cats/64"
    shutil.rmtree(place / "datasets/cats")
    (place / "datasets/cats").symlink_to(media)
    assert clean(place, "--bundle") == 0
    assert (media / "a.jpg").read_bytes() == image_bytes(seed=ord("a"))


@pytest.mark.parametrize("linked", [True, False])
def test_of_a_bundle_that_was_published_from_another_bundle_one_copy_stays(place, monkeypatch, linked):
    (place / "wangen.toml").write_text(TOML.replace('"linux"', '"linux", "wsl"'))
    shutil.rmtree(place / "datasets/cats")
    if not linked:
        monkeypatch.delattr(os, "link")
        monkeypatch.setattr(os, "link", no_links, raising=False)
    source = str(root(place) / "files/datasets/cats/64")
    assert main(["publish", "cats", "--workspace", str(place), "--platform", "wsl", "--source", source]) == 0
    assert clean(place, "--bundle") == 0
    left = list((place / "published").rglob("a.jpg"))
    assert left
    assert {path.read_bytes() for path in left} == {image_bytes(seed=ord("a"))}


def no_links(*_words: object, **_named: object) -> None:
    raise OSError(18, "another file system")


@pytest.mark.parametrize("section", ["host_root = '{0}/datasets/cats'", "host_root = '{0}'\ndatasets = 'datasets'"])
def test_a_bundle_that_lies_in_its_source_goes_and_the_originals_stay(place, section):
    assert clean(place, "--bundle") == 0
    before = read_tree(place / "datasets")
    (place / "wangen.toml").write_text(TOML + "[platform.linux]\n" + section.format(place))
    for words in ([], ["--resize"], ["--resolution", "96"]):
        assert main(["publish", "cats", "--workspace", str(place), *words]) == 0
    assert read_tree(place / "datasets") != before
    assert clean(place, "--bundle") == 0
    assert read_tree(place / "datasets") == before


def test_one_resolution_alone(place):
    assert main(["publish", "cats", "--workspace", str(place), "--resolution", "64", "--resolution", "128"]) == 0
    write_tree(root(place), OURS["caches"])
    before = names(place)
    assert clean(place, "--bundle", "--caches", "--resolution", "128") == 0
    assert before - names(place) == {name for name in before if "/128/" in name}
    assert not (root(place) / "files/datasets/cats/128_cache").exists()
    assert clean(place, "--caches", "--resolution", "64") == 0
    assert not names(place) & OURS["caches"].keys()


def test_a_resolution_that_the_scripts_still_name_is_to_be_published_again(place, capsys):
    words = ["--resolution", "64", "--resolution", "128"]
    assert main(["publish", "cats", "--workspace", str(place), *words]) == 0
    capsys.readouterr()
    assert clean(place, "--caches", "--resolution", "128") == 0
    assert "publish again" not in capsys.readouterr().out
    assert clean(place, "--bundle", "--resolution", "128") == 0
    again = "the scripts still name 128; publish again: wangen publish cats --resolution 64\n"
    assert again in capsys.readouterr().out
    assert main(["publish", "cats", "--workspace", str(place), "--resolution", "64"]) == 0
    capsys.readouterr()
    assert clean(place, "--bundle", "--resolution", "128") == 0
    assert "publish again" not in capsys.readouterr().out


def test_it_waits_for_a_run(place, capsys):
    me = psutil.Process()
    owner = [me.pid, me.create_time()]
    lock = root(place) / "outputs/cats/run.lock"
    lock.write_text(json.dumps({"host": here(), "run": owner, "step": owner}))
    before = read_tree(root(place))
    assert clean(place, "--bundle", "--outputs") == 1
    assert "another run works on this dataset" in capsys.readouterr().err
    assert read_tree(root(place)) == before
    assert clean(place) == 0


def test_platforms_and_shared_roots(place, capsys, tmp_path):
    shared = tmp_path / "AI"
    sections = f"[platform.windows]\nroot = 'C:\\AI'\nhost_root = '{shared}'\n"
    sections += f"[platform.wsl]\nroot = '/mnt/c/AI'\nhost_root = '{shared}'\n"
    (place / "wangen.toml").write_text(TOML.replace('"linux"', '"linux", "windows", "wsl"') + sections)
    assert main(["publish", "cats", "--workspace", str(place)]) == 0
    write_tree(shared, OURS["caches"])
    before = names(place)
    assert clean(place, "--platform", "windows", "--bundle") == 0
    assert names(place) == before
    assert set(read_tree(shared)) == {
        "train_cats.sh", "cache_cats.sh", "files/tomls/cats_wsl.toml", "setup_wangen.sh", "setup_wangen.bat",
        "setup_wangen.ps1", f"files/{wheel_name(version('wangen'))}", *OURS["caches"],
    }  # fmt: skip
    assert clean(place, "--bundle", "--caches") == 0
    assert read_tree(shared) == {}
    assert names(place) == set()
    assert shared.is_dir()  # a configured root is not ours


def test_a_dataset_that_is_not_there_gets_near_names(place, capsys):
    assert main(["clean", "cat", "--workspace", str(place)]) == 1
    assert "did you mean cats?" in capsys.readouterr().err
    write_tree(root(place), {"train_cats.sh.new": "", "train_dogs.sh.new": "", "train_of_thought.txt": ""})
    assert main(["clean", "zebra", "--workspace", str(place), "--bundle"]) == 1
    assert "known are: cats, dogs\n" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="a root that this host cannot see")
def test_targets_that_this_host_cannot_see_are_left_out(place, capsys):
    (place / "wangen.toml").write_text(
        TOML.replace('"linux"', '"linux", "windows"') + "[platform.windows]\nroot = 'C:\\AI'\n"
    )
    assert clean(place) == 0
    assert "windows  left out: this host cannot see" in capsys.readouterr().out
    assert clean(place, "--platform", "windows") == 2
