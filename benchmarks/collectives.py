"""What the processes of a training step send each other, and what each of them holds: counted, no GPU is needed.

python benchmarks/collectives.py --out counted.json     # the tables of docs/scale.md, half an hour
python benchmarks/collectives.py --of counted.json      # the tables again
python benchmarks/collectives.py --tiny                 # small sizes, to see that it runs
torchrun --nproc-per-node 2 benchmarks/collectives.py --real --tiny    # real ones: what goes over loopback, beside it

This process is the first of 8 or 64, on machines of 8; the others are torch's fake process group, in which nothing
arrives and nobody is waited for. `optimizer_step` runs with all that belongs to it on a transformer of full size, and
every operation of torch.distributed in it is counted with its bytes (`counted_step.py`). Times are computed of that.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from counted_step import (
    PER_MACHINE,
    Case,
    Collective,
    Counted,
    as_first_of,
    counted_in_few_blocks,
    counted_step,
    over_loopback,
)
from gpu_train import REACHED, TI2V_VIDEO, VIDEO
from random_run import TEXT_ROWS, Clip

from wangen import profiles
from wangen.generator.cards import CARDS
from wangen.generator.flops import step_flops
from wangen.generator.launch import Launch, launch
from wangen.generator.memory import GIB, MemorySettings, adapter_weights, memory_plan, tokens_of
from wangen.runtime.training.parallel import Way

MODELS = ("t2v-1.3B", "ti2v-5B", "t2v-14B")
WAYS: tuple[Way, ...] = ("ddp", "fsdp", "hsdp")
PROCESSES = (8, 64)
RANK = 32
TRAINS: Mapping[str, Mapping[str, Any]] = {
    "LoRA": {"network_dim": RANK},
    "LoRA on int8": {"network_dim": RANK, "quantize": "int8"},
    "full": {"train_mode": "full"},
}
"""What is trained, and its flags."""
IMAGE: Clip = (512, 512, 1)
PICTURE: Clip = (1024, 1024, 1)
INSIDE_BYTES_PER_S = 200e9
"""Of a process to the others of its machine, each way: about what NVLink of an H100 gives a ring."""
BETWEEN_BYTES_PER_S = (25e9, 50e9)
"""Of a machine to another, each way: 200 and 400 Gbit/s."""
HIDDEN = ("gathers", "copies", "sums")
"""Gathering and scattering go on beside all computing, what machines that are copies add up beside the backward pass,
and other sums beside nothing."""
BACKWARD = 0.75
"""Of the computing of a pass in which all is recomputed."""
KINDS_SHOWN = ("all-gather", "reduce-scatter", "all-reduce")
HELD = ("frozen", "trained", "gradients", "AdamW")
CARD, CARD_BYTES = "H100", 80e9


class Row(NamedTuple):
    """A case and what was counted in it.

    Attributes:
        task: the model profile.
        trains: LoRA or full.
        way: how the processes hold the model.
        processes: of all machines.
        counted: what was found.
    """

    task: str
    trains: str
    way: Way
    processes: int
    counted: Counted

    @property
    def named(self) -> list[str]:
        """Its first columns."""
        return [self.task, self.trains, self.way, str(self.processes)]


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Count every case, one after the other; not where a process would have to hold more than its card."""
    for task, trains, processes, way in product(options.models, options.trains, options.processes, options.ways):
        alone = way == "hsdp" and processes <= PER_MACHINE
        if not alone and (trains != "full" or way != "ddp" or options.tiny or whole_bytes(task) < CARD_BYTES):
            case = Case(task, way, Launch(), TRAINS[trains], options.tiny)
            yield Row(task, trains, way, processes, as_first_of(processes, partial(count, case)))


def count(case: Case, told: Launch) -> Counted:
    """Of all blocks of a Wan in one go where they can lie on the same zeros: masters and quantised weights cannot."""
    whole = case.flags == TRAINS["LoRA"] and case.model.prompt is None
    step = counted_step if whole else counted_in_few_blocks
    return step(replace(case, launch=told))


def whole_bytes(task: str) -> int:
    """What full fine-tuning of a picture takes where each process holds everything."""
    model = profiles.model(task)
    return memory_plan(model, MemorySettings(whole=True), tokens=tokens_of(model, IMAGE[:2], IMAGE[2])).device


# ---- tables ------------------------------------------------------------------------------------------------------


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    body = [f"| {' | '.join(cells)} |" for cells in (columns, *lines)]
    return "\n".join([body[0], "|" + "---|" * len(columns), *body[1:]])


def volume_table(found: Sequence[Row]) -> str:
    """Bytes by collective: how many a step has, and their gigabytes together."""
    columns = ("model", "trains", "way", "processes", *(f"{kind}s: GB" for kind in KINDS_SHOWN))
    lines = []
    for row in found:
        numbers = [row.counted.total(lambda _: 1, kind) for kind in KINDS_SHOWN]
        wholes = [row.counted.total(lambda one: one.num_bytes, kind) for kind in KINDS_SHOWN]
        cells = [
            f"{number:.0f}: {_gigabytes(whole)}" if number else "-"
            for number, whole in zip(numbers, wholes, strict=True)
        ]
        lines.append([*row.named, *cells])
    return table(columns, lines)


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g}"


def compute_table(found: Sequence[Row]) -> str:
    """What is sent, and its time against that of what is computed: of a clip, and of a picture."""
    columns = ("model", "trains", "way", "processes", "each sends, GB", "a machine sends, GB",
               *(f"{which}, s" for which in HIDDEN), "a clip, s", "efficiency", "512x512x1, s",
               "efficiency")  # fmt: skip
    lines = []
    for row in found:
        gathers, copies, sums = ([seconds(row, wire, which) for wire in BETWEEN_BYTES_PER_S] for which in HIDDEN)
        between = row.counted.total(Collective.between_machines)
        cells = [_gigabytes(row.counted.total(lambda one: one.sent)), _gigabytes(between) if between else "-"]
        cells += [_both(gathers), _both(copies), _both(sums)]
        for clip in (clip_of(row.task), IMAGE):
            computing = computing_s(row, clip)
            shares = [
                computing / (max(computing, gather, (1 - BACKWARD) * computing + copy) + add)
                for gather, copy, add in zip(gathers, copies, sums, strict=True)
            ]
            cells += [f"{computing:.3g}", _both(shares, percent=True)]
        lines.append([*row.named, *cells])
    return table(columns, lines)


def _both(values: Sequence[float], *, percent: bool = False) -> str:
    """For each wire; one number where they are the same."""
    texts = [f"{100 * value:.0f} %" if percent else f"{value:.2g}" if value else "-" for value in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def clip_of(task: str) -> Clip:
    """The clip, or picture, that a model is made for."""
    if profiles.model(task).num_frames == 1:
        return PICTURE
    return TI2V_VIDEO if task == "ti2v-5B" else VIDEO


def seconds(row: Row, between_bytes_per_s: float, which: str) -> float:
    """What is beside all computing, beside the backward pass, or beside nothing, as `HIDDEN` has it."""

    def of(one: Collective) -> float:
        if hidden_as(one) != which:
            return 0.0
        return max(one.sent / INSIDE_BYTES_PER_S, one.between_machines() / between_bytes_per_s)

    return row.counted.total(of)


def hidden_as(one: Collective) -> str:
    """Which of `HIDDEN`: of `hsdp`, machines that are copies of each other add up with one process of each."""
    if one.kind != "all-reduce":
        return "gathers"
    return "copies" if one.processes == one.machines else "sums"


def computing_s(row: Row, clip: Clip) -> float:
    """The least that a step of one item takes on the card: its work at what large products were seen to reach."""
    model, full = profiles.model(row.task), row.trains == "full"
    joint = model.prompt is not None  # the text is among the tokens
    work = step_flops(model.transformer, tokens_of(model, clip[:2], clip[2]), text_tokens=0 if joint else TEXT_ROWS,
                      joint=joint, adapter_weights=0 if full else adapter_weights(model, RANK), checkpointing="full",
                      train_base=full)  # fmt: skip
    return work.done / (REACHED * CARDS[CARD].tflops * 1e12)


def memory_table(found: Sequence[Row]) -> str:
    """GiB of a process: what it keeps is counted, what comes and goes in the step of a clip is computed."""
    columns = ("model", "trains", "way, processes", *HELD, "gathered", "of the pass", "all")
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in found:
        sizes = [*row.counted.held.values(), gathered_bytes(row), pass_bytes(row)]
        cells = [f"{size / GIB:.2f}" if size else "-" for size in sizes]
        line = (row.task, row.trains, *cells, f"{sum(sizes) / GIB:.1f}")
        alike.setdefault(line, []).append(f"{row.way} {row.processes}")
    return table(columns, [[*line[:2], ", ".join(ways), *line[2:]] for line, ways in alike.items()])


def gathered_bytes(row: Row) -> int:
    """Of what is there whole at a time: the block that computes and the next.

    Where all trains also what lies outside the blocks, its gradients, and those of one block as they come (in bfloat16)
    and as they are sent (in float32).
    """
    gathers = {one.num_bytes: count for one, count in row.counted.collectives.items() if one.kind == "all-gather"}
    outer = sum(size for size, count in gathers.items() if count == 1)
    block = max((size for size, count in gathers.items() if count > 1), default=0)
    return 5 * block + 2 * outer if row.trains == "full" else 2 * block


def pass_bytes(row: Row) -> int:
    """What the pass of a video keeps and needs, by the formula of the presets, with its reserve."""
    model, clip = profiles.model(row.task), clip_of(row.task)
    settings = MemorySettings(rank=0, by_hand=row.trains != "full")
    parts = memory_plan(model, settings, tokens=tokens_of(model, clip[:2], clip[2])).parts
    in_bfloat16 = 0 if row.trains == "full" and row.way != "ddp" else row.counted.held["trained weights"] // 2
    return sum(size for name, size in parts.items() if name != "weights that stay") + in_bfloat16


# ---- the command line --------------------------------------------------------------------------------------------


def as_json(found: Sequence[Row]) -> str:
    """What was counted, for `--of`."""
    plain = [
        row._asdict() | {
            "counted": {"collectives": [[asdict(one), count] for one, count in row.counted.collectives.items()],
                        "held": dict(row.counted.held)}
        }
        for row in found
    ]  # fmt: skip
    return json.dumps(plain, indent=1)


def from_json(text: str) -> list[Row]:
    """What `as_json` wrote."""
    return [
        Row(**row | {"counted": Counted({Collective(**one): count for one, count in row["counted"]["collectives"]},
                                        row["counted"]["held"])})
        for row in json.loads(text)
    ]  # fmt: skip


def among_real_processes(options: argparse.Namespace) -> None:
    """One of several processes of torchrun: the first prints what is counted, and what went over loopback meanwhile."""
    told = launch()
    dist.init_process_group("gloo")
    wire: list[int] = []
    case = Case(options.models[0], options.ways[0], told, TRAINS[options.trains[0]], options.tiny)
    found = counted_step(case, around=lambda step: wire.append(over_loopback(step)))
    dist.destroy_process_group()
    if told.rank == 0:
        sent = found.total(lambda one: one.sent)
        row = Row(case.task, options.trains[0], case.way, told.count, found)
        answer: dict[str, Any] = {"rows": json.loads(as_json([row])), "all_send": sent * told.count}
        print(json.dumps(answer | {"over_loopback": wire[0]}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=profiles.model_names(), default=MODELS)
    parser.add_argument("--trains", nargs="+", choices=TRAINS, default=("LoRA", "full"))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--processes", nargs="+", type=int, default=PROCESSES)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--real", action="store_true", help="this is one of several processes of torchrun")
    parser.add_argument("--out", type=Path, help="JSON of what was counted")
    parser.add_argument("--of", type=Path, help="make the tables of such a file")
    options = parser.parse_args()
    if options.real:
        among_real_processes(options)
        return
    found = []
    for row in from_json(options.of.read_text(encoding="utf-8")) if options.of else rows(options):
        found.append(row)
        if options.out:
            options.out.write_text(as_json(found), encoding="utf-8")
    print(f"{date.today()}, torch {torch.__version__}, fake process group, no GPU")
    for text in (volume_table(found), compute_table(found), memory_table(found)):
        print(f"\n{text}")


if __name__ == "__main__":
    main()
