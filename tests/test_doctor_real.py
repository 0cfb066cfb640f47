"""`wangen doctor --real`: the numbers that help, and nothing that says who or where somebody is."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_machines import CUDA, RTX, failed, machine
from helpers import write_tree

from wangen.generator import doctor
from wangen.generator.cli import main
from wangen.generator.doctor import examine
from wangen.generator.doctor.facts import Interpreter, Trial
from wangen.generator.doctor.real import block
from wangen.generator.errors import UsageError
from wangen.generator.interpreter import Fault
from wangen.runtime.report.run_numbers import numbers

SECRET = "ann"
HOME = Path("/home/ann/annas-cats")


def private_machine():
    """A machine with a user's name wherever one can stand."""
    facts = machine(
        system={
            "release": "6.8.0-45-ann",
            "name": "Linux ann",
            "variables": {"PYTHONPATH": str(HOME), "LD_LIBRARY_PATH": f"{HOME}/cuda", "WANGEN_PYTHON": str(HOME)},
        },
        trials={
            "torch": Trial(found=CUDA | {"executable": str(HOME / "python"), "cudnn": 91002}),
            **failed("libraries", f"OSError: {HOME}/lib.so: cannot open"),
            **failed("attention sage", f"{HOME}/sage.so", "signal SIGSEGV"),
        },
        place={"path": HOME, "wanted": HOME, "mount": str(HOME), "free": 10, "what": "bundle for linux"},
        cards=(replace(RTX, used=20 * 2**30),),
        programs=(("ann.exe", 2**30),),
        workspace=(f"{HOME}/wangen.toml is wrong", str(HOME), ""),
    )
    interpreter = Interpreter(
        path=str(HOME / "python"), why=str(HOME), base=str(HOME), looked=(str(HOME),),
        packages={"torch": "2.9.1+cu128"}, faults=(Fault("problem", f"{HOME} lacks av", str(HOME)),),
    )  # fmt: skip
    return replace(facts, python=interpreter)


def write_run(folder, **settings):
    """A finished run of somebody whose name is in every path."""
    report = {
        "summary": f"6 steps: {HOME}/ann.safetensors",
        "inputs": {"samples": 12, "dit": str(HOME), "memory": {"quantize": "nf4", "blocks_to_swap": 20}},
        "settings": {
            "task": "t2v-14B", "network_dim": 32, "network_module": str(HOME / "module.py"), "dit": str(HOME),
            "dataset_config": str(folder / "ann.toml"), "output_name": "ann", "wandb_run_name": "ann", "compile": False,
            "attention": "sdpa\nann", **settings,
        },
        "result": {"lora": str(HOME)},
        "versions": {"python": "3.12.7", "torch": "2.9.1+cu128"},
    }  # fmt: skip
    rates = [(7.0, 4096, 0.2), (6.0, 4096, 0.4), (6.5, 4096, 0.3)]
    lines = [
        {"step": 10 * number, "s_per_step": seconds, "tokens_per_s": tokens / seconds, "mfu": mfu,
         "peak_memory_bytes": 21_000_000_000 + number, "data_wait_share": 0.01, "output_name": "ann"}
        for number, (seconds, tokens, mfu) in enumerate(rates, 1)
    ]  # fmt: skip
    toml = f'[[datasets]]\nimage_directory = "{HOME}"\nresolution = [512, 512]\nbatch_size = 2\nenable_bucket = true\n'
    return write_tree(folder, {
        "train.report.json": json.dumps(report),
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 40, "s_per',
        "ann.toml": toml + f'cache_directory = "{HOME}"\n',
    })  # fmt: skip


def test_a_block_names_nobody_and_no_folder(tmp_path):
    facts = private_machine()
    shown = block(facts, examine(facts), numbers(write_run(tmp_path / "ann")))
    assert SECRET not in shown.lower()
    assert "/" not in shown.replace("/step", "").replace("TFLOP/s", "").replace("MB/s", "")
    assert str(tmp_path) not in shown


def test_other_runs_of_the_folder_are_not_counted(tmp_path):
    folder = write_run(tmp_path)
    wanted, metrics = numbers(folder), folder / "metrics.jsonl"
    other = {"step": 90, "s_per_step": 100.0, "tokens_per_s": 1.0, "output_name": "bob"}
    metrics.write_text(json.dumps(other) + "\n" + metrics.read_text(encoding="utf-8"), encoding="utf-8")
    assert numbers(folder) == wanted


def test_what_helps_is_in_it(tmp_path):
    facts = private_machine()
    shown = block(facts, examine(facts), numbers(write_run(tmp_path)))
    lines = dict(line.split(":", 1) for line in shown.splitlines() if ":" in line)
    rows = {label.strip(): text.strip() for label, text in lines.items()}
    assert rows["card"].startswith("NVIDIA GeForce RTX 4090, 24.0 GiB, 20.0 GiB taken")
    assert rows["driver"] == "NVIDIA 570.86.10, CUDA up to 12.8"
    assert rows["torch"] == "2.9.1+cu128, CUDA 12.8, HIP None, cuDNN 91002"
    assert rows["attention"] == "sdpa=runs flash3=no flash=no xformers=no sage=crashes"
    assert "attention-crash (problem)" in rows["found"]
    assert rows["steps"] == "30"
    assert rows["s/step"] == "6.5 (6 to 7, 3 readings)"
    assert rows["tokens/step"] == "4096 (4096 to 4096, 3 readings)"
    assert rows["mfu"] == "0.3"
    assert rows["peak memory"] == "21.0 GB"
    assert rows["dataset"] == "12 samples; image 512 in buckets, frames 1, batch 2, repeats 1"
    assert rows["settings"] == "task=t2v-14B network_module=… network_dim=32 attention=… quantize=nf4 blocks_to_swap=20"


@pytest.mark.parametrize(
    "tree",
    [
        {"metrics.jsonl": '{"step": 1, "s_per_step": "fast", "tokens_per_s": null}\n[]\nnonsense\n'},
        {"train.report.json": "[1, 2]", "metrics.jsonl": '{"step": 1}\n'},
        {"train.report.json": '{"settings": 3, "inputs": [], "versions": "x", "step": "train"}'},
    ],
)
def test_a_run_with_broken_files_is_told_as_far_as_it_can_be_read(tmp_path, tree):
    assert isinstance(numbers(write_tree(tmp_path, tree)), dict)


def test_a_folder_without_a_run_is_wrong_usage(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="holds no run"):
            numbers(folder)


def test_the_command_prints_the_block_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gather", lambda folder: private_machine())
    assert main(["doctor", "--real"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("```\nwangen 0.1")
    assert "run:" not in shown
    assert main(["doctor", "--real", str(write_run(tmp_path / "cats"))]) == 0
    assert "\nrun:\n" in capsys.readouterr().out
    assert main(["doctor", "--real", "--json"]) == 2
    assert main(["doctor", "--real", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
