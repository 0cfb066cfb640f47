"""The script for Slurm as it is published, and what it tells a Slurm that only writes down what it is told."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import image_bytes, read_tree, write_tree

from wangen.generator import scripts
from wangen.generator.cli import main

TOML = 'platforms = ["slurm"]\nresolution = [64, 64]\n'
TREE = {"datasets/cats/a.jpg": image_bytes(), "datasets/cats/a.txt": "a cat"}
SBATCH = '#!/bin/sh\nprintf \'%s\\n\' "$@" ... >>"$LOG"\nexpr "$(grep -c -x -F ... "$LOG")" + 40\n'
STEP = '#!/usr/bin/env bash\nprintf \'%s\\n\' "step $*" >>"$LOG"\nexit "${FAILS:-0}"\n'

pytestmark = pytest.mark.skipif(os.name == "nt", reason="bash")


def published(folder: Path, more: str = "", *words: str) -> Path:
    """The folder of a bundle that is published for Slurm."""
    place = write_tree(folder, {"wangen.toml": TOML + more, **TREE})
    assert main(["publish", "cats", "--workspace", str(place), *words]) == 0
    return place / "published" / "slurm"


def script(bundle: Path) -> Path:
    return bundle / "train_cats.sbatch"


def turn(bundle: Path, **knobs: str) -> None:
    for name, value in knobs.items():
        text, count = re.subn(rf"^{name}='.*'$", f"{name}='{value}'", script(bundle).read_text(), flags=re.MULTILINE)
        assert count == 1
        script(bundle).write_text(text)


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an sbatch writes the words of each call; the bundle's own steps write theirs there as well."""
    log = tmp_path / "told.txt"
    programs = write_tree(tmp_path / "bin", {"sbatch": SBATCH, "scancel": SBATCH, "squeue": "#!/bin/sh\n"})
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(log))
    return log


def run(bundle: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (bundle / "train_cats.sh").write_text(STEP)
    return subprocess.run(["bash", script(bundle), *words], capture_output=True, text=True, timeout=60)


def calls(log: Path) -> list[list[str]]:
    """The words of each call of sbatch, in order."""
    lines = log.read_text().splitlines() if log.exists() else []
    text = "\n".join(line for line in lines if not line.startswith("step "))
    return [call.split("\n") for call in text.removesuffix("...").strip("\n").split("\n...\n") if call]


@pytest.mark.parametrize("more", ["", "[steps.evaluate]\nnum_videos = 0\n[steps.train]\nvalidation_items = 2\n"])
def test_bash_and_its_linter_accept_the_script(tmp_path, more):
    name = '[platform.slurm]\nlogs = "it\'s $HOME `x` “a” 100% é"\n'
    bundle = published(tmp_path, name + more)
    subprocess.run(["bash", "-n", script(bundle)], check=True)
    assert os.access(script(bundle), os.X_OK)
    program = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([program, "-S", "warning", script(bundle)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_jobs_follow_each_other_with_what_the_knobs_say(tmp_path, pretended):
    bundle = published(tmp_path)
    turn(bundle, NODES="3", GPUS="8", CPUS="16", CACHE_TASKS="5", HOURS="12", PARTITION="a100", MEMORY="200G")
    done = run(bundle, "--account=me", "--exclude=n 7")
    assert (done.returncode, done.stderr) == (0, "")
    cache, check, train = calls(pretended)
    every = {"--parsable", f"--chdir={bundle}", "--time=720", "--cpus-per-task=16", "--partition=a100",
             "--mem=200G", "--account=me", "--exclude=n 7"}  # fmt: skip
    for call, job, stage in ((cache, "-cache", "cache"), (check, "-check", "check"), (train, "", "train")):
        assert every <= set(call)
        assert f"--job-name=train_cats{job}" in call
        assert call[-2:] == [str(script(bundle)), stage]
    assert {"--array=0-4", "--gres=gpu:1", f"--output={bundle}/logs/%x-%A_%a.log"} <= set(cache)
    assert not [word for word in cache if word.startswith("--dependency")]
    assert "--dependency=afterok:41" in check
    assert not [word for word in check if word.startswith("--gres")]
    assert {"--dependency=afterok:42", "--kill-on-invalid-dep=yes", f"--output={bundle}/logs/%x-%j.log"} <= set(train)
    assert {"--nodes=3", "--ntasks-per-node=1", "--gres=gpu:8"} <= set(train)
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@300"} <= set(train)
    assert "squeue --jobs=41,42,43; tail -n 3" in done.stdout
    assert "scancel 41 42 43" in done.stdout
    assert (bundle / "logs").is_dir(), "Slurm makes no folder for its logs"
    assert pretended.read_text().startswith("step check\n"), "it is judged before anything is submitted"


def test_each_job_runs_its_steps(tmp_path, pretended, monkeypatch):
    bundle = published(tmp_path)
    write_tree(tmp_path / "bin", {"srun": '#!/bin/sh\nprintf \'%s \' "step srun" "$@" >>"$LOG"\n'})
    (tmp_path / "bin" / "srun").chmod(0o755)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for stage in ("cache", "check", "train"):
        assert run(bundle, stage).returncode == 0
    lines = pretended.read_text().splitlines()
    assert lines[:3] == ["step cache_latents --shard auto", "step cache_text --shard auto", "step check_cache"]
    assert re.search(r"--ntasks-per-node=1 .*train_cats\.sh train --gpus 1 --max_restarts 2 step report$", lines[3])
    pretended.unlink()
    assert run(bundle).returncode == 0, "a job may submit the others"
    assert len(calls(pretended)) == 3


def test_a_try_is_one_small_job(tmp_path, pretended, monkeypatch):
    bundle = published(tmp_path)
    turn(bundle, NODES="3", GPUS="8", HOURS="12", PARTITION="a100")
    done = run(bundle, "smoke", "--account=me")
    assert (done.returncode, done.stderr) == (0, "")
    (call,) = calls(pretended)
    assert call[-2:] == [str(script(bundle)), "smoke"]
    assert {"--job-name=train_cats-smoke", "--ntasks=1", "--gres=gpu:1", "--account=me", "--partition=a100"} <= set(
        call
    )
    assert [word for word in call if word.startswith("--time=")][-1] == "--time=60", "Slurm takes the last one"
    assert not [word for word in call if word.startswith("--mem")], "the cluster's own"
    assert pretended.read_text().startswith("step check\n")
    assert f"squeue --jobs=41; tail -n 3 {bundle}/logs/train_cats-smoke*.log" in done.stdout
    pretended.unlink()
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    assert run(bundle, "smoke").returncode == 0
    assert pretended.read_text() == "step smoke\n"
    monkeypatch.setenv("FAILS", "3")
    assert run(bundle, "smoke").returncode == 3


def test_jobs_of_a_bundle_that_are_queued_or_run_are_named_and_none_come_beside_them(tmp_path, pretended, monkeypatch):
    bundle = published(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").symlink_to(bundle)
    queue = f"3 {tmp_path / 'elsewhere'}\n8 {bundle}\n8 {bundle}\n9 {tmp_path / 'linked'}\n"
    write_tree(
        tmp_path / "bin", {"squeue": f"#!/bin/sh\nprintf '%s\\n' \"$@\" >'{tmp_path}/asked'\ncat <<'END'\n{queue}END\n"}
    )
    for words in ((), ("smoke",)):
        done = run(bundle, *words)
        assert (done.returncode, done.stdout) == (1, "")
        assert "jobs of this script are queued or run: 8,9." in done.stderr
        assert "scancel 8 9; WANGEN_SUBMIT_AGAIN=1 submits all the same" in done.stderr
    assert not pretended.exists(), "nothing is judged or submitted"
    names = next(word for word in (tmp_path / "asked").read_text().split() if word.startswith("--name="))
    monkeypatch.setenv("WANGEN_SUBMIT_AGAIN", "1")
    assert run(bundle).returncode == 0
    jobs = {word for call in calls(pretended) for word in call if word.startswith("--job-name=")}
    assert {job.removeprefix("--job-name=") for job in jobs} <= set(names.removeprefix("--name=").split(","))
    monkeypatch.delenv("WANGEN_SUBMIT_AGAIN")
    write_tree(tmp_path / "bin", {"squeue": f"#!/bin/sh\necho '3 {tmp_path / 'elsewhere'}'\n"})
    assert run(bundle).returncode == 0
    write_tree(tmp_path / "bin", {"squeue": "#!/bin/sh\necho no controller >&2\nexit 1\n"})
    assert run(bundle).returncode == 0


def test_words_for_the_training_reach_it_and_no_sbatch(tmp_path, pretended, monkeypatch):
    bundle = published(tmp_path)
    assert run(bundle, "--fresh", "--account=me", "--resume_changed").returncode == 0
    for call, stage in zip(calls(pretended), ("cache", "check", "train"), strict=True):
        place = call.index(str(script(bundle)))
        assert "--account=me" in call[:place]
        assert call[place + 1 :] == [stage, "--fresh", "--resume_changed"]
        assert not {"--fresh", "--resume_changed"} & set(call[:place])
    pretended.unlink()
    write_tree(tmp_path / "bin", {"srun": '#!/bin/sh\nprintf \'%s \' "$@" "$WANGEN_SUBMITTED_BY" >>"$LOG"\n'})
    (tmp_path / "bin" / "srun").chmod(0o755)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for stage in ("cache", "check", "train"):
        assert run(bundle, stage, "--fresh").returncode == 0
    told = pretended.read_text()
    assert told.startswith("step cache_latents --shard auto\nstep cache_text --shard auto\nstep check_cache\n")
    assert "train_cats.sh train --gpus 1 --max_restarts 2 --fresh train_cats.sbatch step report" in told


def test_the_judges_of_a_chain_hold_no_lock_that_another_could_meet(tmp_path):
    bundle = published(tmp_path)
    locked = {
        words[0]: "--lock" in words for words in scripts.read_steps((bundle / "train_cats.sh").read_bytes(), "sh")
    }
    assert locked == {"check": False, "cache_latents": True, "cache_text": True, "check_cache": False, "train": True,
                      "report": True}  # fmt: skip


def test_footage_is_cut_in_a_job_before_the_others(tmp_path, pretended):
    bundle = published(tmp_path, "", "--footage", "/data/films")
    assert run(bundle).returncode == 0
    prepare, cache, _, _ = calls(pretended)
    assert prepare[-1] == "prepare"
    assert "--dependency=afterok:41" in cache
    assert "step" not in pretended.read_text()


def test_a_training_that_reads_no_cache_is_one_job(tmp_path, pretended):
    bundle = published(tmp_path / "a", '[steps.train]\ncache_mode = "realtime"\n')
    (knobs,) = re.findall(r"^for wg_knob in (.*); do$", script(bundle).read_text(), flags=re.MULTILINE)
    assert knobs == "NODES GPUS CPUS HOURS MAX_RESTARTS"
    assert run(bundle).returncode == 0
    assert [word for call in calls(pretended) for word in call if word.startswith("--job-name")] == [
        "--job-name=train_cats"
    ]


@pytest.mark.parametrize(
    ("line", "what"),
    [("NODES='1'", "is a number from 1 on"), ("PARTITION='default'", "may hold letters, digits and . _ , + - only")],
)
def test_a_knob_that_the_user_took_out_is_named(tmp_path, pretended, monkeypatch, line, what):
    """What the environment has under its name does not count."""
    bundle, name = published(tmp_path), line.partition("=")[0]
    text = script(bundle).read_text()
    assert line in text
    script(bundle).write_text(text.replace(line, ""))
    for value in ("3", ""):
        monkeypatch.setenv(name, value)
        done = run(bundle)
        assert (done.returncode, done.stderr) == (2, f"wangen: the knob {name} {what}\n")
    assert not pretended.exists()


def test_without_a_card_none_is_asked_for(tmp_path, pretended):
    place = write_tree(tmp_path, {"profiles/slurm.toml": 'accelerator = "cpu"\n'})
    assert run(published(place)).returncode == 0
    assert "--gres" not in pretended.read_text()


def test_what_cannot_be_submitted_is_said_once(tmp_path, pretended, monkeypatch):
    bundle = published(tmp_path)
    done = run(bundle, "train")
    assert done.returncode == 2
    assert "train is no option of sbatch" in done.stderr
    turn(bundle, NODES="two")
    done = run(bundle)
    assert (done.returncode, done.stderr) == (2, "wangen: the knob NODES is a number from 1 on\n")
    turn(bundle, NODES="2", HOURS="100000")
    done = run(bundle)
    assert (done.returncode, done.stderr) == (2, "wangen: the knob HOURS is no number above 99999\n")
    turn(bundle, HOURS="99999", MAX_RESTARTS="0")
    monkeypatch.setenv("FAILS", "3")
    assert run(bundle).returncode == 3
    assert calls(pretended) == []
    monkeypatch.delenv("FAILS")
    write_tree(tmp_path / "bin", {"sbatch": SBATCH + 'case "$*" in *check*) exit 1 ;; esac\n'})
    done = run(bundle)
    assert done.returncode == 1
    assert "sbatch refused the job train_cats-check" in done.stderr
    assert calls(pretended)[-1] == ["41"], "the job that was taken is ended"


def test_more_nodes_than_there_are_is_said(tmp_path, pretended):
    bundle = published(tmp_path)
    write_tree(tmp_path / "bin", {"sinfo": "#!/bin/sh\nprintf '2\\n1\\n'\n"})
    (tmp_path / "bin" / "sinfo").chmod(0o755)
    turn(bundle, NODES="3")
    assert run(bundle).stderr == ""
    turn(bundle, NODES="4")
    done = run(bundle)
    assert (done.returncode, done.stderr) == (
        0, "wangen: NODES is 4, and sinfo shows 3: the training may wait for ever (squeue says why)\n",
    )  # fmt: skip
    assert run(bundle, "smoke").stderr == "", "a try takes one"
    write_tree(tmp_path / "bin", {"sinfo": "#!/bin/sh\nexit 1\n"})
    assert run(bundle).stderr == ""


def test_a_machine_without_slurm_is_told_so(tmp_path, monkeypatch):
    bundle = published(tmp_path)
    programs = tmp_path / "few"
    programs.mkdir()
    for name in ("bash", "dirname", "env"):
        (programs / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(programs))
    done = run(bundle)
    assert done.returncode == 2
    assert done.stderr.startswith("wangen: sbatch was not found")
    assert done.stderr.count("\n") == 2


def test_knobs_stay_other_edits_are_left_alone_and_clean_takes_it(tmp_path, capsys):
    bundle = published(tmp_path)
    turn(bundle, NODES="4")
    assert main(["publish", "cats", "--workspace", str(tmp_path)]) == 0
    assert scripts.changed_knobs(script(bundle).read_bytes()) == {"NODES": ("4", "1")}
    assert scripts.untouched(script(bundle).read_bytes())
    assert main(["clean", "cats", "--workspace", str(tmp_path), "--bundle"]) == 0
    assert "you set NODES=4" in capsys.readouterr().out
    turn(bundle, NODES="1")
    script(bundle).write_text(script(bundle).read_text().replace("--requeue", "--no-requeue"))
    mine = script(bundle).read_bytes()
    published(tmp_path)
    assert script(bundle).read_bytes() == mine
    assert "--requeue" in (bundle / "train_cats.sbatch.new").read_text()
    script(bundle).unlink()
    assert main(["clean", "cats", "--workspace", str(tmp_path), "--bundle"]) == 0
    assert not [name for name in read_tree(bundle) if "sbatch" in name]


def test_gpus_and_restarts_begin_as_the_training_is_told(tmp_path):
    bundle = published(tmp_path, '[steps.train]\ngpus = "4"\nmax_restarts = 7\n')
    knobs = scripts.read_knobs(script(bundle).read_bytes())
    assert (knobs["GPUS"], knobs["MAX_RESTARTS"]) == ("4", "7")


def test_gpus_that_are_counted_by_the_machine_are_said_to_be_one(tmp_path):
    text = script(published(tmp_path, '[steps.train]\ngpus = "auto"\n')).read_text()
    assert (
        "GPUs of each of them, one process each; Slurm is asked for a number, which auto is not (published: 1)" in text
    )
