"""Caches of machines that share no disk: copied into one folder they are one cache, which is checked and trained on."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import TinyRun

from wangen.generator import session
from wangen.generator.cli import main
from wangen.runtime import train
from wangen.runtime.cache.index import INDEX
from wangen.runtime.report.run_files import read_run


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wangen.runtime.sources.YOUNG_NS", 0)  # else no index would be written of files so young
    monkeypatch.setattr(session, "_versions", dict)  # of the libraries: reading them takes long


def with_cache(run: TinyRun, folder: Path) -> TinyRun:
    """The same dataset with its cache in a folder, as it is on another machine."""
    folder.mkdir(exist_ok=True)
    text = run.dataset_config.read_text(encoding="utf-8")
    made = replace(run, folder=folder, dataset_config=folder / "tiny.toml")
    made.dataset_config.write_text(text.replace(f"{run.folder.as_posix()}/cache", f"{folder.as_posix()}/cache"))
    return made


def step(run: TinyRun, command: str, *words: str) -> int:
    weights = {"cache_latents": "vae", "cache_text": "t5"}
    more = []
    if part := weights.get(command):
        more = [f"--{part}", str(run.weights[part]), f"--{part}_dtype", "float32", "--device", "cpu"]
    return main([command, "--dataset_config", str(run.dataset_config), *more, *words])


def cached(run: TinyRun, *words: str) -> TinyRun:
    assert [step(run, command, *words) for command in ("cache_latents", "cache_text")] == [0, 0]
    step(run, "check_cache")  # leaves the index
    return run


def entries(run: TinyRun) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run.folder / "cache").glob("*.safetensors")}


@pytest.mark.slow
def test_halves_that_were_copied_together_are_the_whole(tiny_run: TinyRun, tmp_path: Path):
    """One with the times of its files and one without, as `cp -p` and `cp` do it."""
    halves = [cached(with_cache(tiny_run, tmp_path / f"half{part}"), "--shard", f"{part}/2") for part in (0, 1)]
    assert all((half.folder / "cache" / INDEX).is_file() for half in halves)
    assert [step(half, "check_cache") for half in halves] == [1, 1], "each lacks what the other has"
    merged = with_cache(tiny_run, tmp_path / "merged")
    for half, how in zip(halves, (shutil.copy2, shutil.copyfile), strict=True):
        shutil.copytree(half.folder / "cache", merged.folder / "cache", dirs_exist_ok=True, copy_function=how)
    assert entries(merged) == entries(tiny_run) == entries(halves[0]) | entries(halves[1])
    assert step(merged, "check_cache", "--deep") == 0
    losses = []
    for run in (tiny_run, merged):
        report = train.run(run.options(run.folder / "out" if run is merged else tmp_path / "out", max_train_steps=2))
        losses.append((report.result["first_loss"], report.result["last_loss"], report.counts["computed"]))
    assert losses[0] == losses[1]
    assert losses[1][2] == 0


def test_what_both_have_is_the_same_and_is_there_once(tiny_run: TinyRun, tmp_path: Path):
    halves = [cached(with_cache(tiny_run, tmp_path / name), *words)
              for name, words in (("half", ("--shard", "0/2")), ("whole", ()))]  # fmt: skip
    half, whole = halves
    before = entries(whole)
    shutil.copytree(half.folder / "cache", whole.folder / "cache", dirs_exist_ok=True)
    assert entries(whole) == before == entries(tiny_run)
    assert step(whole, "check_cache", "--deep") == 0
    assert step(whole, "cache_latents") == 0
    report = json.loads((whole.folder / "cache_latents.report.json").read_text(encoding="utf-8"))
    assert (report["counts"]["computed"], report["counts"]["removed"]) == (0, 0)


# ---- what the parts say of themselves ----------------------------------------------------------------------------


def test_parts_have_reports_of_their_own_which_are_shown_as_one(tiny_run: TinyRun, tmp_path: Path, monkeypatch):
    run, out = with_cache(tiny_run, tmp_path), tmp_path / "out"
    step(run, "cache_latents", "--report_dir", str(out))  # of the whole, and older
    shutil.rmtree(run.folder / "cache")
    assert step(run, "cache_latents", "--report_dir", str(out), "--shard", "0/2") == 0
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    assert step(run, "cache_latents", "--report_dir", str(out), "--shard", "auto") == 0
    names = ["cache_latents-0-of-2.report.json", "cache_latents-1.report.json", "cache_latents.report.json"]
    assert sorted(path.name for path in out.glob("*.json")) == names
    report = read_run(out, "lora").reports["cache_latents"]
    assert (report["ok"], report["summary"]) == (True, "2 of 2 parts: 3 entries encoded")
    shutil.rmtree(run.folder / "cache")
    (out / "cache_latents-9-of-10.report.json").write_bytes((out / names[0]).read_bytes().replace(b"0/2", b"9/10"))
    assert read_run(out, "lora").reports["cache_latents"]["inputs"]["part"] == "9/10"
    assert step(run, "cache_latents", "--report_dir", str(out)) == 0
    assert "3 entries encoded, 0 already valid" in read_run(out, "lora").reports["cache_latents"]["summary"]


def test_a_part_that_failed_is_seen(tiny_run: TinyRun, tmp_path: Path):
    run, out = with_cache(tiny_run, tmp_path), tmp_path / "out"
    for part in (0, 1):
        assert step(run, "cache_latents", "--report_dir", str(out), "--shard", f"{part}/2") == 0
    assert step(run, "cache_latents", "--report_dir", str(out), "--shard", "0/2", "--batch_size", "0") == 2
    assert step(run, "cache_latents", "--report_dir", str(out), "--shard", "1/2") == 0
    report = read_run(out, "lora").reports["cache_latents"]
    assert not report["ok"]
    assert "--batch_size must be 1 or more" in report["summary"]
