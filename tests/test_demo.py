"""`wangen demo`: the main job end to end, in its real shell, and what happens when it is run again or moved."""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import nearest_colour

from wangen.runtime.demo import SRGB
from wangen.runtime.moving_shapes import BACKGROUNDS, look, read_clip

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="drives bash; on Windows the demo uses cmd")]


def demo(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "wangen.runtime", "demo", "--dir", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={key: value for key, value in os.environ.items() if not key.startswith("WANGEN")},
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "wangen demo é"
    result = demo(folder)
    assert result.returncode == 0, result.stderr
    (root,) = (folder / "published").iterdir()
    return root


TOLD = """
import signal, sys, time
def told(*_):
    sys.exit(7)
signal.signal(signal.SIGTERM, told)
print("begun", flush=True)
time.sleep(60)
"""


def test_a_kill_of_the_demo_ends_what_it_runs(tmp_path):
    code = f"import sys; from pathlib import Path; from wangen.runtime import demo\nfolder = Path({str(tmp_path)!r})\n"
    code += f"sys.exit(demo._call([sys.executable, '-c', {TOLD!r}], folder))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        assert process.wait(30) == 7


def reports(root: Path) -> dict:
    return {
        path.name.removesuffix(".report.json"): json.loads(path.read_text(encoding="utf-8"))
        for path in (root / "outputs/example").glob("*.report.json")
    }


def test_the_demo_makes_a_lora_and_a_clip(finished):
    made = reports(finished)
    assert made.keys() == {"check", "cache_latents", "cache_text", "check_cache", "train", "report", "generate"}
    assert all(report["ok"] for report in made.values())
    assert made["cache_latents"]["counts"]["computed"] == 12
    assert made["cache_text"]["counts"]["computed"] == 13  # with the empty prompt
    assert made["train"]["counts"]["steps"] == 80
    assert made["train"]["counts"]["from_cache"] == 24
    assert made["train"]["versions"]["torch"]
    assert read_clip(finished / "outputs/example/demo.mp4").shape == (3, 17, 64, 64)
    log = (finished / "logs/example.log").read_text(encoding="utf-8")
    for step in made:
        assert f"INFO {step}\n" in log


def test_the_lora_teaches_the_new_colour(finished):
    outputs = finished / "outputs/example"
    taught, untaught = (look(read_clip(outputs / name)) for name in ("demo.mp4", "without LoRA/demo.mp4"))
    assert math.dist(taught.colour, SRGB) < 70
    assert math.dist(untaught.colour, SRGB) > 100
    assert nearest_colour(taught.background, BACKGROUNDS) == "grey"


def test_running_it_again_resumes_and_says_what_it_skipped(finished):
    lora = finished / "outputs/example/example.safetensors"
    before = hashlib.sha256(lora.read_bytes()).hexdigest()
    result = demo(finished.parent.parent)
    assert result.returncode == 0, result.stderr
    assert "0 entries encoded, 12 already valid" in result.stderr
    assert "already trained, 80 steps" in result.stderr
    shown = " ".join(result.stdout.split())
    assert "skipped: copying the tiny Wan, cache_latents, cache_text, train, generate" in shown
    assert hashlib.sha256(lora.read_bytes()).hexdigest() == before


def test_a_moved_bundle_still_runs_and_encodes_nothing_again(finished, tmp_path):
    moved = tmp_path / "elsewhere (2)"
    shutil.copytree(finished, moved)
    (moved / "outputs/example/example.safetensors").unlink()
    result = subprocess.run(
        ["bash", str(moved / "train_example.sh")],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=os.environ | {"WANGEN_PYTHON": sys.executable},
    )
    assert result.returncode == 0, result.stderr
    made = reports(moved)
    assert made["cache_latents"]["counts"]["computed"] == 0
    assert made["cache_text"]["counts"]["computed"] == 0
    original, again = (root / "outputs/example/example.safetensors" for root in (finished, moved))
    assert original.read_bytes() == again.read_bytes()


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("mine")
    result = demo(tmp_path)
    assert result.returncode == 1
    assert "this is not a folder of an earlier demo" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_workspace_of_the_users_own_and_a_file_are_left_alone(tmp_path):
    (tmp_path / "wangen.toml").write_text("# mine\n")
    for folder in (tmp_path, tmp_path / "wangen.toml"):
        result = demo(folder)
        assert result.returncode == 1
        assert "give --dir a new folder" in result.stderr
        assert "Traceback" not in result.stderr
    assert (tmp_path / "wangen.toml").read_text() == "# mine\n"
