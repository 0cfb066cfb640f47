"""`--gpus` of the caching steps: processes that encode a part each, here on the CPU."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_together import alone, run
from tiny import TinyRun

from wangen.generator.cli import main
from wangen.generator.errors import UsageError
from wangen.generator.steps import CacheLatents, CacheText
from wangen.runtime.cache import Folder
from wangen.runtime.cache.reading import whole_bytes
from wangen.runtime.shards import Shard
from wangen.runtime.training import launcher


def steps(tiny_run: TinyRun, folder: Path, **changes: Any) -> list[CacheLatents | CacheText]:
    """Both steps on the tiny dataset, with a cache of their own."""
    text = tiny_run.dataset_config.read_text(encoding="utf-8")
    folder.mkdir(exist_ok=True)
    config = folder / "tiny.toml"
    config.write_text(text.replace((tiny_run.folder / "cache").as_posix(), (folder / "cache").as_posix()))
    common = {"dataset_config": config, "device": "cpu", "report_dir": folder / "reports", **changes}
    return [
        CacheLatents(vae=tiny_run.weights["vae"], vae_dtype="float32", **common),
        CacheText(t5=tiny_run.weights["t5"], t5_dtype="float32", **common),
    ]


def entries(folder: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in (folder / "cache").glob("*.safetensors")}
    assert found
    return found


@pytest.mark.slow
def test_processes_fill_the_cache_that_one_fills(tiny_run: TinyRun, tmp_path: Path):
    for step in steps(tiny_run, tmp_path / "one"):
        assert main(step.argv()) == 0
    for step in steps(tiny_run, tmp_path / "two", gpus="2", log_file=tmp_path / "logs" / "tiny.log"):
        done = run(alone(step))
        assert done.returncode == 0, done.stderr
        assert "2 processes encode a part each" in done.stdout + done.stderr
        report = json.loads((tmp_path / "two" / "reports" / f"{step.command}.report.json").read_text())
        assert report["counts"]["computed"] >= 2
        assert report["counts"]["from_cache"] == 0
        parts = [json.loads((tmp_path / "logs" / "tiny" / f"{step.command}-{number}.report.json").read_text())
                 for number in range(2)]  # fmt: skip
        assert [part["inputs"]["part"] for part in parts] == ["0/2", "1/2"]
        assert sum(part["counts"]["computed"] for part in parts) == report["counts"]["computed"]
    assert entries(tmp_path / "two") == entries(tmp_path / "one")
    again = run(alone(step))  # nothing is left to do: no process is started
    assert again.returncode == 0
    assert "part each" not in again.stdout + again.stderr
    done = run(alone(replace(step, recache=True)))
    assert done.returncode == 0, done.stderr
    assert "part each" in done.stdout + done.stderr
    assert entries(tmp_path / "two") == entries(tmp_path / "one")


@pytest.mark.slow
def test_processes_write_packs_of_their_own(tiny_run: TinyRun, tmp_path: Path):
    for step in steps(tiny_run, tmp_path / "packed", gpus="2", packed=True):
        done = run(alone(step))
        assert done.returncode == 0, done.stderr
    found = Folder(tmp_path / "packed" / "cache", deep=True)
    assert {entry.file: whole_bytes(entry) for entry in found.packs} == entries(tiny_run.folder)
    assert (found.files, found.damaged) == ([], {})


@pytest.mark.slow
def test_a_process_that_cannot_encode_is_named(tiny_run: TinyRun, tmp_path: Path):
    """What a part lacks is said once, with its log, and the exit code is the part's."""
    step = steps(tiny_run, tmp_path / "bad", gpus="2", batch_size=1)[0]
    broken = tmp_path / "vae.pth"
    broken.write_bytes(tiny_run.weights["vae"].read_bytes()[:-4000])
    done = run(alone(replace(step, vae=broken)))
    assert done.returncode == 1
    assert not list((tmp_path / "bad" / "cache").glob("*.safetensors"))
    told = done.stdout + done.stderr
    assert "vae.pth" in told
    assert "Traceback" not in told


def test_what_cannot_be_divided_is_refused(tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step = steps(tiny_run, tmp_path / "no")[0]
    for changes, found in (({"gpus": "two"}, "neither a number of GPUs nor auto"), ({"gpus": "0"}, "neither"),
                           ({"gpus": "2", "shard": "0/2"}, "both divide the work")):  # fmt: skip
        with pytest.raises(UsageError, match=found):
            _ = replace(step, **changes).starts_processes
    assert not step.starts_processes
    assert not replace(step, gpus="2", smoke=True).starts_processes
    assert replace(step, gpus="auto").starts_processes
    assert main(replace(step, gpus="64", device=None).argv()) == 2
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(UsageError, match="native Windows") as caught:
        _ = replace(step, gpus="2").starts_processes
    assert "--shard 0/2" in caught.value.cure


def test_in_a_task_of_an_array_the_parts_are_of_its_own_processes(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else each would take the array's part of the task, the same one."""
    step = steps(tiny_run, tmp_path / "own", gpus="2")[0]
    for name, value in {"ID": "3", "COUNT": "8", "MIN": "0", "STEP": "1"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    found: list[Shard] = []

    def run_part(part: CacheLatents, number: int, *_words: Any, **_how: Any) -> None:
        told = {"RANK": "1", "WORLD_SIZE": str(number)}
        found.append(Shard.parse(part.shard, {**os.environ, **told}))

    monkeypatch.setattr(launcher, "_run", run_part)
    launcher.encode_together(step)
    assert found == [Shard(1, 2)]


def test_each_part_takes_the_gpu_of_its_number(tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step = steps(tiny_run, tmp_path / "own", shard="auto")[0]
    assert step.local_rank == 0
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert step.local_rank == 1
    assert replace(step, shard=None).local_rank == 0, "training sets the GPU of its process by itself"
