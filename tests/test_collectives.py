"""What processes send each other: counted in the trainer's own step, by formula, and over a real wire."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wangen import profiles
from wangen.generator.launch import Launch
from wangen.generator.memory import GIB, MemorySettings, adapter_weights, block_bytes, outer_bytes
from wangen.generator.weight_counts import weight_counts
from wangen.profiles import Model
from wangen.runtime.communication import CommunicationTime
from wangen.runtime.training.parallel import mesh_of
from wangen.runtime.training.ranks import Ranks

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("collectives")


@pytest.fixture(scope="module")
def counting(benchmarks) -> Any:
    return sys.modules["counted_step"]


@cache
def counted(counting: Any, way: str, processes: int, *, trains: str = "lora", tiny: bool = True) -> Any:
    case = counting.Case("t2v-1.3B", way, Launch(), {"train_mode": trains}, tiny)
    return counting.as_first_of(processes, lambda told: counting.counted_step(replace(case, launch=told)))


@pytest.fixture(scope="module")
def model(counting) -> Model:
    """The small one that is counted."""
    return counting.Case("t2v-1.3B", "ddp", Launch(), {}, True).model


def gathered(model: Model, parts: int) -> int:
    """Bytes of a block; its table of one row is filled up to a row for each part."""
    return block_bytes(model, MemorySettings()) + (parts - 1) * 6 * model.transformer.dim * 4


# ---- one process among fakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "processes", "parts"), [("ddp", 8, 0), ("fsdp", 8, 8), ("fsdp", 64, 64), ("hsdp", 64, 8)]
)
def test_a_step_sends_what_the_formulas_say(counting, model, way: str, processes: int, parts: int):
    found = counted(counting, way, processes)
    sums = counting.Collective("all-reduce", 4 * adapter_weights(model, 32), processes, processes // 8)
    wanted = {sums: 1}
    if parts:
        gathers = counting.Collective("all-gather", gathered(model, parts), parts, parts // 8)
        wanted[gathers] = 2 * model.transformer.num_layers  # forward, and again where it is recomputed
    assert found.collectives == wanted


def test_a_process_holds_a_part_of_what_is_frozen_and_all_that_trains(counting, model):
    whole, parts = (counted(counting, way, 8).held for way in ("ddp", "fsdp"))
    blocks = model.transformer.num_layers * block_bytes(model, MemorySettings())
    padded = model.transformer.num_layers * gathered(model, 8)
    assert whole["frozen weights"] - parts["frozen weights"] == blocks - padded // 8
    trained = 4 * adapter_weights(model, 32)
    for held in (whole, parts):
        assert held["trained weights"] == held["gradients"] == trained
        assert 2 * trained <= held["optimizer"] <= 2 * trained + 64  # and the numbers of steps


@pytest.mark.parametrize(("way", "processes"), [("fsdp", 8), ("hsdp", 64)])
def test_full_fine_tuning_gathers_in_bfloat16_and_adds_up_in_float32(counting, model, way: str, processes: int):
    """What lies outside the blocks is gathered once, in float32; vectors and small tables are whole."""
    found = counted(counting, way, processes, trains="full")
    layers, counts = model.transformer.num_layers, weight_counts(model)
    parts, machines = (8, 1) if way == "hsdp" else (processes, processes // 8)
    gathers = {one: number for one, number in found.collectives.items() if one.kind == "all-gather"}
    block = counting.Collective("all-gather", 2 * counts.block_linear, parts, machines)
    assert gathers.pop(block) == 2 * layers
    ((outer, once),) = gathers.items()
    assert once == 1
    assert counts.outer / 2 < outer.num_bytes / 4 < counts.outer + counts.outer_float32
    scattered = found.total(lambda one: one.num_bytes, "reduce-scatter")
    assert scattered == 4 * layers * counts.block_linear + outer.num_bytes
    between = sum(number * one.num_bytes for one, number in found.collectives.items()
                  if (one.kind, one.processes, one.machines) == ("all-reduce", 8, 8))  # fmt: skip
    assert between == (scattered / 8 if way == "hsdp" else 0), "each machine's parts meet those of the others"
    vectors = max(one.num_bytes for one in found.collectives if one.processes == processes and one.kind == "all-reduce")
    assert 0 < found.held["trained weights"] - scattered / parts <= vectors


def test_few_blocks_tell_what_all_of_them_send_and_hold(counting):
    case = counting.Case("t2v-1.3B", "hsdp", Launch(), {"train_mode": "full"}, True)
    few = counting.as_first_of(64, lambda told: counting.counted_in_few_blocks(replace(case, launch=told)))
    assert few == counted(counting, "hsdp", 64, trains="full")


@pytest.mark.parametrize("trains", ["lora", "full"])
def test_every_wait_of_a_step_is_in_the_time_of_communication(counting, model, trains: str):
    """A clock that ticks when it is asked counts them: each block twice, and the sum.

    Where all trains, also each block's gradients; what lies outside, twice in all, and what is still on its way; the
    norm.
    """

    def ticks(told: Launch) -> float:
        ranks = Ranks(told).marching()
        ranks.communication = CommunicationTime(iter(range(10_000)).__next__)
        mesh = mesh_of("fsdp", told, CPU)
        run, trainee = counting.make_run(model, {"train_mode": trains}, CPU, mesh=mesh, ranks=ranks)
        ranks.communication.forget()
        batch = counting.random_batch(model, counting.PICTURE, 1, CPU)
        counting.optimizer_step(run, trainee, counting.Group(0, [batch], 1, 8), 1.0, counting.Interrupt())
        return ranks.communication.read()

    layers = model.transformer.num_layers
    wanted = 2 * layers + 1 if trains == "lora" else 3 * layers + 5
    assert counting.as_first_of(8, ticks) == wanted


def test_collectives_of_both_interfaces_are_counted(counting):
    def calls(told: Launch) -> Any:
        own, all_ = torch.ones(4), torch.ones(32)
        with counting.Collectives() as found:
            dist.all_reduce(own)
            dist.group.WORLD._reduce_scatter_base(own, all_)
            name = dist.group.WORLD.group_name
            operations = torch.ops._c10d_functional
            operations.wait_tensor(operations.reduce_scatter_tensor(all_, "sum", 8, name))
            operations.wait_tensor(operations.all_gather_into_tensor(own, 8, name))
        return found.counts

    found = counting.as_first_of(8, calls)
    assert {(one.kind, one.num_bytes): number for one, number in found.items()} == {
        ("all-reduce", 16): 1,
        ("reduce-scatter", 128): 2,
        ("all-gather", 128): 1,
    }


def test_what_a_ring_sends_and_what_leaves_a_machine(counting):
    one = counting.Collective("all-reduce", 800, 64, 8)  # 64 processes in one ring
    assert one.sent == 2 * 63 / 64 * 800
    assert one.between_machines() == one.sent
    beside = counting.Collective("all-reduce", 100, 8, 8)  # of each machine one, and so eight such rings
    assert beside.between_machines() == 8 * 2 * 7 / 8 * 100
    assert counting.Collective("all-gather", 800, 8, 1).between_machines() == 0


def test_the_tables_are_made_again_of_what_was_written(benchmarks, tmp_path, monkeypatch, capsys):
    out = tmp_path / "counted.json"
    line = [
        "collectives.py",
        "--tiny",
        "--models",
        "t2v-14B",
        "--processes",
        "64",
        "--ways",
        "hsdp",
        "--trains",
        "LoRA",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", line)
    benchmarks.main()
    first = capsys.readouterr().out
    assert "| t2v-14B | LoRA | hsdp | 64 | 8: 0.0131 | - | 1: 0.00288 |" in first
    monkeypatch.setattr(sys, "argv", ["collectives.py", "--of", str(out)])
    benchmarks.main()
    assert capsys.readouterr().out == first


# ---- real ones ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("way", "trains"), [("ddp", "LoRA"), ("fsdp", "LoRA"), ("fsdp", "full")])
def test_real_processes_count_the_same_and_send_no_less(counting, benchmarks, way: str, trains: str):
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line += [
        str(ROOT / "benchmarks" / "collectives.py"),
        "--real",
        "--tiny",
        "--models",
        "t2v-1.3B",
        "--ways",
        way,
        "--trains",
        trains,
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=True)
    answer = json.loads(next(text for text in done.stdout.splitlines() if text.startswith("{")))
    (row,) = benchmarks.from_json(json.dumps(answer["rows"]))
    assert row.counted == counted(counting, way, 2, trains=trains.lower())
    assert 0 < answer["all_send"] <= answer["over_loopback"]


@pytest.mark.slow
def test_a_whole_transformer_sends_what_the_formulas_say(counting):
    found = counted(counting, "fsdp", 8, tiny=False)
    model = profiles.model("t2v-1.3B")
    gathers = counting.Collective("all-gather", gathered(model, 8), 8, 1)
    sums = counting.Collective("all-reduce", 4 * adapter_weights(model, 32), 8, 1)
    assert found.collectives == {gathers: 60, sums: 1}


# ---- docs/scale.md -----------------------------------------------------------------------------------------------


def rows_of(columns: str) -> list[list[str]]:
    """The cells of the table with these first columns."""
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    body = page[page.index(f"| {columns} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def numbers(cell: str) -> tuple[float, float]:
    """With 25 and with 50 GB/s between machines; one number counts for both."""
    values = [0.0 if part == "-" else float(part.rstrip(" %")) for part in cell.split(" / ")]
    return values[0], values[-1]


def formula_sent(task: str, trains: str, way: str, processes: int) -> float:
    """Bytes that a process sends: 8 a weight that trains in full, else the sum of the adapter's and the gathers."""
    model = profiles.model(task)
    parts = 8 if way == "hsdp" else processes
    if trains == "full":
        block = block_bytes(model, MemorySettings(float32=True))
        weights = (outer_bytes(model, 4) + model.transformer.num_layers * block) / 4
        between = 2 * 7 / 8 * 4 * weights / 8 if way == "hsdp" else 0
        return 8 * weights * (parts - 1) / parts + between
    sums = 2 * (processes - 1) / processes * 4 * adapter_weights(model, 32)
    gathers = 2 * model.transformer.num_layers * gathered(model, parts) * (parts - 1) / parts
    return sums + (gathers if way != "ddp" else 0)


SENT = rows_of("model | trains | way | processes")


@pytest.mark.parametrize("row", SENT, ids=lambda row: " ".join(row[:4]))
def test_the_page_says_what_is_sent_and_what_follows(benchmarks, row):
    task, trains, way, processes, sent, between, gathers, copies, sums, *rest = row
    wanted = formula_sent(task, trains, way, int(processes))
    assert float(sent) == pytest.approx(wanted / 1e9, rel=0.01)
    assert (between == "-") == (processes == "8")
    assert (copies == "-") == ((trains, way) != ("full", "hsdp"))
    whole = numbers(gathers)[0] + numbers(sums)[0]
    if processes == "8":
        assert whole == pytest.approx(wanted / 200e9, rel=0.03)
    elif way != "hsdp":
        assert whole == pytest.approx(float(between) / 25, rel=0.03)
    clips = (benchmarks.clip_of(task), benchmarks.IMAGE)
    for clip, computing, efficiency in zip(clips, rest[::2], rest[1::2], strict=True):
        seconds = benchmarks.computing_s(benchmarks.Row(task, trains, way, int(processes), None), clip)
        assert float(computing) == pytest.approx(seconds, rel=0.01)
        told = (numbers(gathers), numbers(copies), numbers(sums), numbers(efficiency))
        for gather, copy, add, share in zip(*told, strict=True):
            assert share == pytest.approx(100 * seconds / (max(seconds, gather, seconds / 4 + copy) + add), abs=1.5)


def test_the_page_leaves_out_only_what_no_card_holds(benchmarks):
    cases = {(task, trains, way, processes) for task in benchmarks.MODELS for trains in ("LoRA", "full")
             for way in benchmarks.WAYS for processes in ("8", "64") if (way, processes) != ("hsdp", "8")}  # fmt: skip
    missing = cases - {tuple(row[:4]) for row in SENT}
    assert missing == {(task, "full", "ddp", processes) for task in ("ti2v-5B", "t2v-14B") for processes in ("8", "64")}
    assert all(benchmarks.whole_bytes(task) > benchmarks.CARD_BYTES for task, *_ in missing)


@pytest.mark.parametrize("row", rows_of("model | trains | way, processes"), ids=lambda row: " ".join(row[:3]))
def test_the_page_says_what_a_process_holds(row):
    task, trains, ways, _frozen, trained, gradients, moments, *_rest, total = row
    model = profiles.model(task)
    weights: float = adapter_weights(model, 32)
    if trains == "full":
        layers, counts = model.transformer.num_layers, weight_counts(model)
        parts = 1 if "ddp" in ways else int(ways.split()[1].rstrip(","))
        whole = layers * (counts.block_rest + counts.block_float32)  # vectors and tables
        weights = whole + (layers * counts.block_linear + counts.outer + counts.outer_float32) / parts
    for cell in (trained, gradients):
        assert float(cell) == pytest.approx(4 * weights / GIB, rel=0.01, abs=0.006)
    assert float(moments) == pytest.approx(8 * weights / GIB, rel=0.01, abs=0.006)
    assert float(total) == pytest.approx(sum(numbers(cell)[0] for cell in row[3:-1]), abs=0.06)
