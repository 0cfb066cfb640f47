"""The published script for Slurm, on a real Slurm of two nodes on this machine, from pictures to a LoRA."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import image_bytes, write_tree
from safetensors.torch import load_file
from slurm_cluster import Cluster, cluster, missing
from tiny_weights import write_tiny_wan

from wangen.generator.cli import main

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        bool(missing()),
        reason=f"{', '.join(missing())}: not installed (as root on Debian: apt-get install slurm-wlm munge)",
    ),
]

CAPTIONS = [f"a {word} wall" for word in ("red", "blue", "green", "black", "white", "yellow")]
WORKSPACE = """
model = "t2v-1.3B"
resolution = [64, 64]
num_frames = 5
platforms = ["cluster"]

[steps.train]
max_train_steps = 120
save_state_every_n_steps = 5
learning_rate = 1e-2
network_dim = 4
mixed_precision = "no"
log_with = ["none"]
"""
PROFILE = 'based_on = "slurm"\naccelerator = "cpu"\n[overrides.train]\ndevice = "cpu"\n'
KNOBS = {"NODES": "2", "CPUS": "1", "CACHE_TASKS": "2", "HOURS": "1"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm") / "cluster") as made:
        made.environment |= {"WANGEN_PYTHON": sys.executable, "WANGEN_MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        yield made


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with weights and without caches; tests copy it, for it may be moved."""
    place = tmp_path_factory.mktemp("published") / "it's a folder"
    tree = {f"datasets/walls/{number}.jpg": image_bytes((64, 64), seed=number) for number in range(len(CAPTIONS))}
    texts = {f"datasets/walls/{number}.txt": caption for number, caption in enumerate(CAPTIONS)}
    write_tree(place, {"wangen.toml": WORKSPACE, "profiles/cluster.toml": PROFILE, **tree, **texts})
    assert main(["publish", "walls", "--workspace", str(place)]) == 0
    bundle = place / "published" / "cluster"
    write_tiny_wan(bundle / "models", CAPTIONS)
    return bundle


def copied(published: Path, to: Path, **knobs: str) -> Path:
    """A bundle of one's own, with knobs turned in its script for Slurm."""
    shutil.copytree(published, to)
    script = to / "train_walls.sbatch"
    text = script.read_text(encoding="utf-8")
    for name, value in {**KNOBS, **knobs}.items():
        text, count = re.subn(rf"^{name}='.*'$", f"{name}='{value}'", text, flags=re.MULTILINE)
        assert count == 1
    script.write_text(text, encoding="utf-8")
    return to


def submit(slurm: Cluster, bundle: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", bundle / "train_walls.sbatch", *words], env=slurm.environment | more,
                          capture_output=True, text=True, timeout=120)  # fmt: skip


def submitted(slurm: Cluster, bundle: Path, *words: str, **more: str) -> list[str]:
    """Submit a bundle's jobs; their numbers."""
    done = submit(slurm, bundle, *words, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    status, end = re.search(r"squeue --jobs=([\d,]+); tail", done.stdout), re.search(r"scancel ([\d ]+)$", done.stdout)
    assert status
    assert end
    assert status[1].split(",") == end[1].split()
    return end[1].split()


def said(bundle: Path) -> str:
    """All that the jobs of a bundle have printed."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted((bundle / "logs").glob("train_walls*.log")))


def steps_done(bundle: Path) -> int:
    file = bundle / "outputs" / "walls" / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return sum("loss" in json.loads(line) for line in lines)


def lora(bundle: Path) -> Path:
    return bundle / "outputs" / "walls" / "walls.safetensors"


@pytest.fixture(scope="module")
def whole(slurm: Cluster, published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose jobs ran to their end without a break."""
    bundle = copied(published, tmp_path_factory.mktemp("whole") / "two words")
    jobs = submitted(slurm, bundle)
    assert len(jobs) == 3
    ended = slurm.wait(jobs[-1], "COMPLETED", "FAILED", "CANCELLED")
    assert ended["JobState"] == "COMPLETED", said(bundle)
    assert ended["NodeList"] == "n[1-2]"
    return bundle


def test_one_line_caches_on_an_array_and_trains_on_two_nodes(whole: Path):
    text = said(whole)
    parts = [path.read_text() for path in sorted((whole / "logs").glob("train_walls-cache-*_[01].log"))]
    assert len(parts) == 2
    made = [int(number) for part in parts for number in re.findall(r"cache_latents: (\d+) entries encoded", part)]
    assert len(made) == 2, parts
    assert sum(made) == len(CAPTIONS)
    assert min(made) > 0
    assert text.count("2 processes share") == 1
    assert load_file(lora(whole))
    assert {path.name for path in (whole / "logs" / "walls").iterdir()} == {"n1", "n2"}
    assert (whole / "outputs" / "walls" / "report.html").is_file()
    assert not list((whole / "outputs" / "walls").glob("*.lock"))
    for step in ("cache_latents", "cache_text"):
        reports = [whole / "outputs" / "walls" / f"{step}-{part}.report.json" for part in (0, 1)]
        assert all(report.is_file() for report in reports)


def test_a_try_is_one_job_that_leaves_the_results_of_the_whole_alone(slurm: Cluster, published: Path, tmp_path: Path):
    bundle = copied(published, tmp_path / "tried")
    (job,) = submitted(slurm, bundle, "smoke")
    assert slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")["JobState"] == "COMPLETED", said(bundle)
    assert "train_walls (smoke) finished." in said(bundle)
    assert load_file(bundle / "outputs" / "walls" / "smoke" / "walls.safetensors")
    assert not lora(bundle).exists()


def again(whole: Path, to: Path, **knobs: str) -> Path:
    """The bundle with its caches, before any training."""
    bundle = copied(whole, to, **knobs)
    shutil.rmtree(bundle / "outputs")
    shutil.rmtree(bundle / "logs")
    return bundle


def train_until(slurm: Cluster, bundle: Path, steps: int) -> str:
    """Submit a bundle's jobs and wait until so many steps are trained; the number of the training's job."""
    job = submitted(slurm, bundle)[-1]
    ends = time.monotonic() + 120
    while steps_done(bundle) < steps:
        assert time.monotonic() < ends, said(bundle)
        assert slurm.job(job)["JobState"] in ("PENDING", "RUNNING"), said(bundle)
        time.sleep(0.05)
    return job


def test_a_job_that_is_near_its_time_limit_when_its_training_begins_is_queued_again(
    slurm: Cluster, whole: Path, tmp_path: Path
):
    """Python hears of no signal yet: one that nobody heard would let the training run into the limit."""
    bundle = again(whole, tmp_path / "young")
    job = submitted(slurm, bundle)[-1]
    ends = time.monotonic() + 120
    while not re.search(r"step \d of \d: train", said(bundle)):
        assert time.monotonic() < ends, said(bundle)
        time.sleep(0.01)
    slurm.say("scancel", "--signal=USR1", "--batch", job)
    ended = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    text = said(bundle)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), text
    assert "Mend it" not in text
    assert lora(bundle).read_bytes() == lora(whole).read_bytes()


def test_near_its_time_limit_a_job_saves_is_queued_again_and_ends_with_the_same_bytes(
    slurm: Cluster, whole: Path, tmp_path: Path
):
    bundle = again(whole, tmp_path / "limited")
    job = train_until(slurm, bundle, 12)
    slurm.say("scancel", "--signal=USR1", "--batch", job)  # as Slurm does it 300 s before the limit
    ends = time.monotonic() + 60
    while slurm.job(job)["Restarts"] != "1":
        assert time.monotonic() < ends, said(bundle)
        time.sleep(0.2)
    assert steps_done(bundle) < 120
    ended = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    text = said(bundle)
    assert ended["JobState"] == "COMPLETED", text
    assert text.count("the time limit is near") == 1
    assert text.count("stopping after this step; the training state is saved") >= 1
    assert re.search(r"resuming at \d*[1-9]\d*", text)
    assert "wangen: stopped. Nothing saved is lost" in text
    assert "Mend it" not in text, "nothing is to be mended"
    assert lora(bundle).read_bytes() == lora(whole).read_bytes()


def pids_on(node: str, job: str, what: str) -> list[int]:
    """Processes of a job on a node whose command line holds a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if {f"SLURMD_NODENAME={node}".encode(), f"SLURM_JOB_ID={job}".encode()} <= {*environment} and what in line:
            found.append(int(folder.name))
    return found


def test_a_process_that_dies_on_one_node_is_started_again_with_those_of_the_other(
    slurm: Cluster, whole: Path, tmp_path: Path
):
    bundle = again(whole, tmp_path / "restarted")
    job = train_until(slurm, bundle, 12)
    workers = [pid for pid in pids_on("n2", job, "-m wangen.runtime train") if b"\0WORLD_SIZE=2\0" in environ(pid)]
    assert len(workers) == 1
    os.kill(workers[0], signal.SIGKILL)
    ended = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    text = said(bundle)
    assert ended["JobState"] == "COMPLETED", text
    assert ended["Restarts"] == "0"
    assert re.search(r"resuming at \d*[1-9]\d*", text)
    assert lora(bundle).read_bytes() == lora(whole).read_bytes()


def environ(pid: int) -> bytes:
    return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()


def test_a_node_that_is_lost_ends_the_job_in_words_and_the_next_goes_on(slurm: Cluster, whole: Path, tmp_path: Path):
    bundle = again(whole, tmp_path / "lost", MAX_RESTARTS="0")
    job = train_until(slurm, bundle, 12)
    for pid in pids_on("n2", job, "wangen.runtime train"):
        os.kill(pid, signal.SIGKILL)
    ended = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    text = said(bundle)
    assert ended["JobState"] == "FAILED", text
    assert ended["ExitCode"] != "0:0"
    assert "step train was killed (exit code 137)" in text
    assert re.search(r"n2: task 1: Exited with exit code 137", text)
    assert "the training failed" in text
    assert not lora(bundle).exists()
    assert slurm.wait(submitted(slurm, bundle)[-1], "COMPLETED", "FAILED", "CANCELLED")["JobState"] == "COMPLETED"
    assert lora(bundle).read_bytes() == lora(whole).read_bytes()


def test_jobs_behind_one_that_failed_are_taken_off_the_queue(slurm: Cluster, published: Path, tmp_path: Path):
    bundle = copied(published, tmp_path / "failing")
    (bundle / "train_walls.sh").write_text('[ "$1" = check ]\n', encoding="utf-8")
    jobs = submitted(slurm, bundle)
    states = [slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")["JobState"] for job in jobs]
    assert states == ["FAILED", "CANCELLED", "CANCELLED"]


def test_jobs_submitted_twice_are_refused_once_and_else_do_not_end_each_other(
    slurm: Cluster, published: Path, tmp_path: Path
):
    bundle = copied(published, tmp_path / "twice")
    first = submitted(slurm, bundle, "--fresh")
    done = submit(slurm, bundle)
    assert done.returncode == 1
    assert "wangen: jobs of this script are queued or run: " in done.stderr
    assert set(re.search(r"scancel ([\d ]+);", done.stderr)[1].split()) == set(first)  # type: ignore[index]
    second = submitted(slurm, bundle, WANGEN_SUBMIT_AGAIN="1")
    ended = [slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")["JobState"] for job in (*first, *second)]
    assert [*ended[:2], *ended[3:5]] == ["COMPLETED"] * 4, said(bundle)
    assert "COMPLETED" in (ended[2], ended[5]), "one of two trainings at once may be refused, not both"
    assert load_file(lora(bundle))
