"""Several processes under torchrun against one that does all batches by itself."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from edit_set import make_edit_set
from helpers import run_script
from safetensors.torch import load_file
from tiny import TinyRun
from tiny_weights import write_tiny_wan
from together import free_port, trained

from wangen.generator.cli import main
from wangen.generator.errors import WAS_STOPPED, UsageError
from wangen.generator.launch import COPIES, Launch, launch
from wangen.generator.steps import Train
from wangen.runtime.training import checkpoint
from wangen.runtime.training.parallel import require_parallel
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.throughput import Throughput

EXAMPLES = Path(__file__).parents[1] / "examples" / "dataset"


def torchrun(options: Train, processes: int, *more: str) -> list[str]:
    """The line that trains with so many processes on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *more,
            "-m", "wangen.runtime", *options.argv()]  # fmt: skip


def alone(options: Train) -> list[str]:
    return [sys.executable, "-m", "wangen.runtime", *options.argv()]


def run(line: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True, timeout=300
    )


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder) if "loss" in record]


def held_out(folder: Path) -> list[float]:
    return [record["validation"]["mean_adapter"] for record in records(folder) if "validation" in record]


# ---- who one is --------------------------------------------------------------------------------------------------


def test_torchrun_tells_who_one_is():
    told = {"WORLD_SIZE": "6", "RANK": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    assert launch(told, "linux") == Launch(rank=4, count=6, local_rank=1, local_count=3)
    assert launch({"WORLD_SIZE": "1", "RANK": "0"}, "win32") == Launch()


@pytest.mark.parametrize("name", COPIES)
def test_a_launch_that_would_train_copies_is_refused(name: str, monkeypatch, capsys, tmp_path: Path):
    with pytest.raises(UsageError, match=f"{name} is 4: so many processes"):
        launch({name: "4"}, "linux")
    assert launch({name: "1"}, "linux") == Launch()
    monkeypatch.setenv(name, "2")
    line = ["train", "--dataset_config", "a.toml", "--dit", "d", "--output_dir", str(tmp_path), "--output_name", "n"]
    assert main(line) == 2
    assert "each would train the whole run alone" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "told", [{"WORLD_SIZE": "two", "RANK": "0"}, {"WORLD_SIZE": "2", "RANK": "2"}, {"WORLD_SIZE": "0", "RANK": "0"}]
)
def test_numbers_that_are_none_are_refused(told: dict[str, str]):
    with pytest.raises(UsageError, match="are no numbers of processes"):
        launch(told, "linux")


def test_several_gpus_on_native_windows_are_refused_in_words():
    with pytest.raises(UsageError, match="more than one process on native Windows") as caught:
        launch({"WORLD_SIZE": "2", "RANK": "0"}, "win32")
    assert "WSL" in caught.value.cure


def test_shares_are_put_together_in_their_order(monkeypatch):
    items = list("abcde")
    shares = [Ranks(Launch(rank, 3)).own(items) for rank in range(3)]
    assert sorted(item for share in shares for item in share) == items
    one = Ranks(Launch(1, 3))
    monkeypatch.setattr(one, "gathered", lambda _own: shares)
    assert one.collected(shares[1]) == items


# ---- whole runs --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_together_train_what_one_does_alone(tiny_run: TinyRun, tmp_path: Path, processes: int):
    """Four have more processes than a step has batches: one of them has none."""
    options = tiny_run.options(tmp_path / "together", validation_items=1, validate_every_n_steps=2, ema_decay=0.9,
                               gradient_accumulation_steps=1)  # fmt: skip
    told = trained(options, processes)
    one = replace(options, output_dir=tmp_path / "alone", gradient_accumulation_steps=processes)
    trained(one, 1)
    assert losses(tmp_path / "together") == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)
    assert len(losses(tmp_path / "together")) == options.max_train_steps
    assert held_out(tmp_path / "together") == pytest.approx(held_out(tmp_path / "alone"), abs=1e-5)
    for name in ("lora.safetensors", "lora-ema.safetensors"):
        found, wanted = (load_file(tmp_path / folder / name) for folder in ("together", "alone"))
        assert max(float((found[key] - wanted[key]).abs().max()) for key in wanted) < 1e-5
    assert sorted(path.name for path in (tmp_path / "together").iterdir()) == sorted(
        path.name for path in (tmp_path / "alone").iterdir()
    )
    assert len(re.findall("processes share the", told)) == 1, "one of them shows for all"
    last = [record for record in records(tmp_path / "together") if "tokens_per_s" in record][-1]
    assert last["tokens_per_s_min"] <= last["tokens_per_s_max"] <= last["tokens_per_s"]
    assert 0 < last["communication_share_min"] <= last["communication_share"] <= last["communication_share_max"] < 1
    assert not any("communication_share" in record for record in records(tmp_path / "alone"))
    assert re.search(r"\d % for other processes", told)


@pytest.mark.slow
def test_no_step_takes_the_time_that_another_process_saves(tiny_run: TinyRun, tmp_path: Path, monkeypatch):
    """The second one's pause ends when the first has saved."""
    paused, save, ended = Throughput.paused, checkpoint.save, []

    def slow(*given: Any, **more: Any) -> Any:
        time.sleep(0.5)
        result = save(*given, **more)
        (tmp_path / f"saved-{len(ended)}").touch()
        return result

    @contextlib.contextmanager
    def noted(self: Throughput) -> Iterator[None]:
        with paused(self):
            yield
        (tmp_path / f"ended-{os.environ['RANK']}-{len(ended)}-{(tmp_path / f'saved-{len(ended)}').exists()}").touch()
        ended.append(1)

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(Throughput, "paused", noted)
    trained(tiny_run.options(tmp_path / "run", max_train_steps=5, save_state_every_n_steps=2), 2)
    found = sorted(path.name for path in tmp_path.glob("ended-*"))  # the last one looks at losses and saves nothing
    assert found == [f"ended-{rank}-{number}-{number < 2}" for rank in (0, 1) for number in (0, 1, 2)]


def kill_rank(launcher: subprocess.Popen[str], rank: int, how: signal.Signals) -> None:
    """Send a signal to one of the processes that a launcher has started."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (pid,) = (
        int(pid) for pid in children if f"RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text().split("LOCAL_")[-1]
    )
    os.kill(pid, how)


def started(line: Sequence[str], folder: Path, steps: int) -> subprocess.Popen[str]:
    """A launcher whose run has done so many steps."""
    launcher = subprocess.Popen(line, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
    file, ends = folder / "metrics.jsonl", time.monotonic() + 120
    while not file.is_file() or file.read_text().count("\n") < steps:
        assert time.monotonic() < ends
        assert launcher.poll() is None
        time.sleep(0.02)
    return launcher


@pytest.mark.slow
def test_a_dead_process_ends_the_job_and_the_next_start_goes_on_to_the_same_bytes(tiny_run: TinyRun, tmp_path: Path):
    options = tiny_run.options(tmp_path / "whole", max_train_steps=60, save_state_every_n_steps=10)
    assert run(torchrun(options, 2)).returncode == 0
    broken = replace(options, output_dir=tmp_path / "broken")
    launcher = started(torchrun(broken, 2), broken.output_dir, 25)
    kill_rank(launcher, 1, signal.SIGKILL)
    _, told = launcher.communicate(timeout=120)
    assert launcher.returncode != 0
    assert re.search(r"local_rank: 1.*-9|rank\s*:\s*1", told), told
    assert not (broken.output_dir / "lora.safetensors").is_file()
    done = run(torchrun(broken, 2))
    assert done.returncode == 0, done.stderr
    assert re.search(r"resuming at \d*[1-9]\d*", done.stderr)
    whole, parts = ((folder.output_dir / "lora.safetensors").read_bytes() for folder in (options, broken))
    assert whole == parts


@pytest.mark.slow
@pytest.mark.parametrize(("name", "folder"), [("tiny.log", "tiny"), ("tiny", "tiny-processes")])
def test_one_command_starts_a_process_for_each_gpu(tiny_run: TinyRun, tmp_path: Path, name: str, folder: str):
    """Here they are processes on the CPU."""
    options = tiny_run.options(tmp_path / "own", gpus="2", log_file=tmp_path / "logs" / name,
                               report_dir=tmp_path / "reports", lock=tmp_path / "run.lock")  # fmt: skip
    done = run(alone(options))
    assert done.returncode == 0, done.stderr
    assert len(re.findall("2 processes share", done.stdout + done.stderr)) == 1
    together = replace(options, output_dir=tmp_path / "torchrun", gpus="1", log_file=None, report_dir=None)
    assert run(torchrun(together, 2)).returncode == 0
    found, wanted = ((run.output_dir / "lora.safetensors").read_bytes() for run in (options, together))
    assert found == wanted
    assert json.loads((tmp_path / "reports" / "train.report.json").read_text())["ok"]
    assert (tmp_path / "logs" / name).read_text().count("2 processes share") == 1
    assert len(list((tmp_path / "logs" / folder).glob("*/attempt_0/*/stderr.log"))) == 2
    assert not (tmp_path / "run.lock").exists()


@pytest.mark.slow
def test_a_process_that_fails_is_named_with_its_log(tiny_run: TinyRun, tmp_path: Path):
    options = tiny_run.options(tmp_path, gpus="2", max_train_steps=5000, save_state_every_n_steps=5)
    launcher = started(alone(options), tmp_path, 10)
    kill_rank(launcher, 1, signal.SIGKILL)
    _, told = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    assert "process 1 of 2 was ended by SIGKILL" in told
    assert re.search(r"where: .*/1/stderr.log", told)
    launcher = started(alone(options), tmp_path, len(losses(tmp_path)) + 5)
    os.kill(launcher.pid, signal.SIGINT)
    _, told = launcher.communicate(timeout=120)
    assert launcher.returncode == WAS_STOPPED
    assert "Nothing saved is lost" in told or "stopped" in told


def test_more_gpus_than_there_are_and_no_numbers_are_refused(tiny_run: TinyRun, tmp_path: Path, monkeypatch, capsys):
    assert main(tiny_run.options(tmp_path, gpus="64", device=None).argv()) == 2
    assert "--gpus 64: this machine has" in capsys.readouterr().err
    assert main(tiny_run.options(tmp_path, gpus="two").argv()) == 2
    assert "--gpus 'two' is neither a number of GPUs nor auto" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(tiny_run.options(tmp_path, gpus="2").argv()) == 2
    assert "--gpus under torchrun" in capsys.readouterr().err
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "changes"), [
    (2, {"validation_items": 1, "validate_every_n_steps": 2, "ema_decay": 0.9, "quantize": "int8"}),
    (2, {"checkpointing": "selective", "gradient_checkpointing_cpu_offload": True, "network_dropout": 0.3,
         "pack": True}),
    (4, {"validation_items": 1, "validate_every_n_steps": 3}),
])  # fmt: skip
def test_weights_in_parts_change_no_byte(tiny_run: TinyRun, tmp_path: Path, processes: int, changes: dict[str, Any]):
    """Also where a step has fewer batches than there are processes: these go along with one that does not count."""
    options = tiny_run.options(tmp_path / "ddp", **changes)
    trained(options, processes)
    told = trained(replace(options, output_dir=tmp_path / "fsdp", parallel="fsdp"), processes)
    assert len(re.findall("are in parts", told)) == 1
    assert losses(tmp_path / "fsdp") == losses(tmp_path / "ddp")
    assert held_out(tmp_path / "fsdp") == held_out(tmp_path / "ddp")
    whole, found = ((tmp_path / way / "lora.safetensors").read_bytes() for way in ("ddp", "fsdp"))
    assert found == whole


@pytest.mark.slow
def test_weights_in_parts_within_each_of_two_machines(tiny_run: TinyRun, tmp_path: Path):
    """Of two processes each; samples are made on the way."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red square --w 32 --h 32 --f 1 --s 2\n", encoding="utf-8")
    more = {"sample_prompts": prompts, "vae": tiny_run.weights["vae"], "t5": tiny_run.weights["t5"]}
    options = tiny_run.options(tmp_path / "ddp", **more)
    trained(options, 4)
    trained(replace(options, output_dir=tmp_path / "hsdp", parallel="hsdp"), 4, on_each_machine=2)
    assert losses(tmp_path / "hsdp") == losses(tmp_path / "ddp")
    for name in ("lora.safetensors", "samples/lora-step00000006-1.png"):
        found, wanted = ((tmp_path / way / name).read_bytes() for way in ("hsdp", "ddp"))
        assert found == wanted


def test_parts_of_what_cannot_be_split_are_refused(tiny_run: TinyRun, tmp_path: Path):
    two = Launch(rank=0, count=2, local_count=2)
    for changes, launched, found in (
        ({"parallel": "fsdp"}, Launch(), "--parallel fsdp: this is one process"),
        ({"parallel": "hsdp"}, two, "--parallel hsdp splits within each machine, and this is one"),
        ({"parallel": "fsdp", "train_mode": "full", "optimizer_type": "Adafactor"}, two, "may look at them whole"),
        ({"parallel": "fsdp", "plain": True}, two, "--parallel fsdp and --plain"),
        ({"parallel": "fsdp", "blocks_to_swap": 1}, two, "--parallel fsdp and --blocks_to_swap"),
        ({"parallel": "fsdp", "checkpointing": "none"}, two, "--parallel fsdp and --checkpointing none"),
    ):
        with pytest.raises(UsageError, match=found):
            require_parallel(tiny_run.options(tmp_path, **changes), launched)
    require_parallel(tiny_run.options(tmp_path, parallel="ddp"), Launch())


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tiny_run: TinyRun, tmp_path: Path):
    options = tiny_run.options(tmp_path / "parts", max_train_steps=3)
    trained(options, 2)
    more = replace(options, max_train_steps=6, gradient_accumulation_steps=2)
    assert "resuming at 3" in trained(more, 1)
    trained(replace(more, output_dir=tmp_path / "whole"), 1)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


@pytest.mark.slow
def test_the_launcher_starts_a_broken_job_again_by_itself(tiny_run: TinyRun, tmp_path: Path):
    options = tiny_run.options(tmp_path / "whole", max_train_steps=60, save_state_every_n_steps=10)
    assert run(torchrun(options, 2)).returncode == 0
    broken = replace(options, output_dir=tmp_path / "broken")
    launcher = started(torchrun(broken, 2, "--max-restarts", "2"), broken.output_dir, 25)
    kill_rank(launcher, 0, signal.SIGKILL)
    _, told = launcher.communicate(timeout=180)
    assert launcher.returncode == 0, told
    assert re.search(r"resuming at \d*[1-9]\d*", told)
    whole, parts = ((folder.output_dir / "lora.safetensors").read_bytes() for folder in (options, broken))
    assert whole == parts


@pytest.mark.slow
def test_ctrl_c_stops_all_at_one_step_and_saves(tiny_run: TinyRun, tmp_path: Path):
    options = tiny_run.options(tmp_path, max_train_steps=5000)
    launcher = started(torchrun(options, 2), tmp_path, 10)
    launcher.send_signal(signal.SIGTERM)  # it hands it on to its processes
    _, told = launcher.communicate(timeout=120)
    assert launcher.returncode != 0
    assert "stopping after this step" in told
    assert list(tmp_path.glob("lora-state/*"))
    done = run(torchrun(replace(options, max_train_steps=len(losses(tmp_path)) + 2), 2))
    assert done.returncode == 0, done.stderr
    assert "resuming at" in done.stderr


@pytest.mark.slow
def test_two_launchers_of_one_process_each_are_two_processes(tiny_run: TinyRun, tmp_path: Path):
    """As on two machines."""
    options = tiny_run.options(tmp_path / "nodes")
    assert run_on_two_machines(options, 1) == [0, 0]
    together = replace(options, output_dir=tmp_path / "together")
    assert run(torchrun(together, 2)).returncode == 0
    found, wanted = ((folder.output_dir / "lora.safetensors").read_bytes() for folder in (options, together))
    assert found == wanted


def run_on_two_machines(options: Train, processes: int) -> list[int]:
    """The exit codes of two launchers that find each other, each of so many processes."""
    line = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(processes)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"),
        *("-m", "wangen.runtime", *options.argv()),
    ]
    machines = [subprocess.Popen(line, env={**os.environ, "OMP_NUM_THREADS": "1"}) for _ in range(2)]
    return [machine.wait(timeout=240) for machine in machines]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_edits_are_trained_together_as_alone(tiny_qwen, tmp_path: Path, processes: int):
    made = make_edit_set(tmp_path / "set", tiny_qwen, task="qwen-image-edit").fill()
    options = made.train(tmp_path / "ddp", caption_dropout=0.3, max_train_steps=4)
    trained(options, processes)
    trained(replace(options, output_dir=tmp_path / "alone", gradient_accumulation_steps=processes), 1)
    assert losses(tmp_path / "ddp") == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)
    for way, on_each_machine in (("fsdp", processes), ("hsdp", processes // 2)):
        trained(replace(options, output_dir=tmp_path / way, parallel=way), processes, on_each_machine=on_each_machine)
        found, wanted = ((tmp_path / folder / "edit.safetensors").read_bytes() for folder in (way, "ddp"))
        assert found == wanted


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the bundle is Linux's")
def test_a_platform_with_two_gpus_has_scripts_that_train_on_both(tmp_path: Path):
    (tmp_path / "wangen.toml").write_text(
        'model = "t2v-1.3B"\nresolution = [64, 64]\nnum_frames = 5\nplatforms = ["linux"]\n'
        '[steps.train]\nmax_train_steps = 6\nlog_with = ["none"]\ndevice = "cpu"\nmixed_precision = "no"\n'
    )
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "linux.toml").write_text(
        '[overrides.train]\ngpus = "2"\nmax_restarts = 1\n[overrides.cache_latents]\ngpus = "2"\ndevice = "cpu"\n',
        encoding="utf-8",
    )
    photos = tmp_path / "datasets" / "photos"
    photos.mkdir(parents=True)
    for name in ("cat", "coffee"):
        for ending in ("jpg", "txt"):
            (photos / f"{name}.{ending}").write_bytes((EXAMPLES / f"{name}.{ending}").read_bytes())
    assert main(["publish", "photos", "--workspace", str(tmp_path)]) == 0
    bundle = tmp_path / "published" / "linux"
    write_tiny_wan(bundle / "models", ["a cat"])
    shared = "2 processes share the 2 batches of each step"
    told = run_script(bundle, "train_photos.sh")
    assert shared in told
    assert "2 processes encode a part each" in told
    assert shared in (bundle / "logs" / "photos.log").read_text(encoding="utf-8")
    assert len(list((bundle / "logs" / "photos").glob("*/attempt_0/*/stdout.log"))) == 4, "of both steps"
    assert (bundle / "outputs" / "photos" / "photos.safetensors").is_file()
    assert (bundle / "outputs" / "photos" / "report.html").is_file()
    assert "already trained" in run_script(bundle, "train_photos.sh")
