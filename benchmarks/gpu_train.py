"""How fast a training step is on this card, and what it takes: full-size transformers with random weights, no files.

python benchmarks/gpu_train.py --quick                  # ten minutes: the cases, and one of each choice
python benchmarks/gpu_train.py --out speed.json         # everything, an hour or two
python benchmarks/gpu_train.py --only presets --models t2v-14B
python benchmarks/gpu_train.py --device cpu --tiny      # small sizes, to see that it runs

Each row is a process of its own, so that one that does not fit, or fails, ends nothing but itself. What is timed is
`optimizer_step`, the trainer's own: batch to the device, forward, backward, clipping, AdamW; a batch is always there.
Of the warm steps the minimum and the median are given, the GPU's own time from the end of one to the end of the next;
memory is the most that those steps held, without what loading took. The `presets` rows run with
`torch.cuda.set_per_process_memory_fraction` at what the preset may take of its card. Prints a table in Markdown and
writes the same as JSON.
"""

import argparse
import json
import logging
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from random_run import Clip, make_run, num_image_tokens, random_batch

from wangen import profiles
from wangen.generator.errors import WangenError
from wangen.generator.flops import step_flops
from wangen.generator.memory import GIB, usable_bytes
from wangen.profiles import Model
from wangen.runtime.devices import CONTEXT_BYTES
from wangen.runtime.interrupt import Interrupt
from wangen.runtime.loader import Batch
from wangen.runtime.training.prepared import Group
from wangen.runtime.training.run import Run
from wangen.runtime.training.step import num_tokens, optimizer_step
from wangen.runtime.training.throughput import peak_tflops

VIDEO = (832, 480, 81)
TI2V_VIDEO = (1280, 704, 121)
REACHED = 0.8
"""Of a card's peak: an H100 that multiplies large matrices was measured at 790 of 989 TFLOP/s."""
WARM_UP = 3
MIN_STEPS, MAX_STEPS = 3, 30
TINY = {"dim": 256, "ffn_dim": 512, "num_layers": 4, "num_heads": 2}
PROCESSES = multiprocessing.get_context("spawn")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        group: what it is compared within.
        task: the model profile.
        clip: width and height in pixels, frames.
        flags: of the training step, by name.
        batch: items in a step.
        cudnn: whether SDPA prefers cuDNN, told by hand; None leaves it to the trainer.
        quick: also in the short run.
    """

    group: str
    task: str
    clip: Clip
    flags: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    cudnn: bool | None = None
    quick: bool = False

    def how(self) -> str:
        """Its flags as they are typed, and what has no flag."""
        words = [f"--{name} {value}" for name, value in self.flags.items() if not isinstance(value, bool)]
        words += [f"--{'' if value else 'no_'}{name}" for name, value in self.flags.items() if isinstance(value, bool)]
        words += [f"batch {self.batch}"] if self.batch > 1 else []
        words += [] if self.cudnn is None else ["cuDNN first" if self.cudnn else "cuDNN last"]
        return " ".join(words) or "defaults"


def all_rows() -> list[Row]:
    """Every row, in the order of the table."""
    return [*case_rows(), *choice_rows(), *preset_rows()]


def case_rows() -> Iterator[Row]:
    """The published cases, by the trainer's defaults and by the libraries' own forward."""
    image = (512, 512, 1)
    yield Row(group="cases", task="t2v-1.3B", clip=VIDEO, quick=True)
    yield Row(group="cases", task="t2v-1.3B", clip=VIDEO, flags={"plain": True}, quick=True)
    yield Row(group="cases", task="t2v-1.3B", clip=image, quick=True)
    yield Row(group="cases", task="t2v-14B", clip=(256, 256, 1), quick=True)
    yield Row(group="cases", task="t2v-14B", clip=(256, 256, 1), batch=4)
    yield Row(group="cases", task="t2v-14B", clip=image, quick=True)
    yield Row(group="cases", task="t2v-14B", clip=image, batch=4)
    yield Row(group="cases", task="t2v-14B", clip=image, flags={"plain": True})
    yield Row(group="cases", task="t2v-14B", clip=VIDEO)
    yield Row(group="cases", task="i2v-14B", clip=VIDEO)
    yield Row(group="cases", task="ti2v-5B", clip=TI2V_VIDEO, quick=True)


def choice_rows() -> Iterator[Row]:
    """Each choice that changes speed or memory, against the cases."""
    image = (512, 512, 1)
    for cudnn in (True, False):
        yield Row(group="attention", task="t2v-1.3B", clip=VIDEO, flags={"attention": "sdpa"}, cudnn=cudnn, quick=True)
    for kernel in ("flash", "flash3", "xformers", "sage"):
        yield Row(group="attention", task="t2v-1.3B", clip=VIDEO, flags={"attention": kernel})
    for task, clip in (("t2v-1.3B", image), ("t2v-14B", (256, 256, 1)), ("t2v-14B", image)):
        yield Row(group="graphs", task=task, clip=clip, flags={"cuda_graphs": False}, quick=task == "t2v-1.3B")
    yield Row(group="graphs", task="qwen-image-edit", clip=image)
    yield Row(group="graphs", task="qwen-image-edit", clip=image, flags={"cuda_graphs": False})
    for task, clip in (("t2v-1.3B", VIDEO), ("t2v-14B", image)):
        yield Row(group="compile", task=task, clip=clip, flags={"compile": True}, quick=clip == VIDEO)
    selective = {"checkpointing": "selective"}
    yield Row(group="checkpointing", task="t2v-1.3B", clip=VIDEO, flags=selective, quick=True)
    offloaded = {**selective, "gradient_checkpointing_cpu_offload": True}
    yield Row(group="checkpointing", task="t2v-1.3B", clip=VIDEO, flags=offloaded)
    yield Row(group="checkpointing", task="ti2v-5B", clip=TI2V_VIDEO, flags=selective)
    yield Row(group="checkpointing", task="t2v-14B", clip=VIDEO, flags=selective)
    yield Row(group="checkpointing", task="t2v-14B", clip=image, flags=selective)
    yield Row(group="checkpointing", task="t2v-14B", clip=image, flags={"checkpointing": "none"}, quick=True)
    for form in ("fp8", "int8", "nf4"):
        flags = {"quantize": form}
        yield Row(group="base", task="t2v-14B", clip=image, flags=flags, quick=form == "int8")
    yield Row(group="base", task="t2v-14B", clip=VIDEO, flags={"quantize": "int8"})
    for swapped in (20, 40):
        yield Row(group="swap", task="t2v-14B", clip=image, flags={"blocks_to_swap": swapped}, quick=swapped == 20)
        yield Row(group="swap", task="t2v-14B", clip=VIDEO, flags={"blocks_to_swap": swapped})
    yield Row(group="swap", task="t2v-14B", clip=VIDEO, flags={"quantize": "int8", "blocks_to_swap": 40})


def preset_rows() -> Iterator[Row]:
    """Every preset of every model at the bucket and the rank that it is made for."""
    for task in profiles.model_names():
        for gib, preset in sorted(profiles.model(task).presets.items()):
            flags = {"vram": str(gib), "network_dim": preset.network_dim}
            clip = (*preset.resolution, preset.num_frames)
            quick = (task, gib) in {("t2v-1.3B", 8), ("t2v-14B", 16)}
            yield Row(group="presets", task=task, clip=clip, flags=flags, quick=quick)


def shrunk(row: Row) -> tuple[Row, Model]:
    """The same row and its model in sizes for a CPU."""
    model = profiles.model(row.task)
    layers = TINY["num_layers"]
    presets = {
        gib: replace(p, blocks_to_swap=min(p.blocks_to_swap, layers - min(1, p.checkpointing_free_blocks)),
                     checkpointing_free_blocks=min(p.checkpointing_free_blocks, 1))
        for gib, p in model.presets.items()
    }  # fmt: skip
    model = replace(model, transformer=replace(model.transformer, **TINY), presets=presets)
    side = 4 * model.spatial_stride * model.patch[1]
    flags = dict(row.flags)
    if "blocks_to_swap" in flags:
        flags["blocks_to_swap"] = min(flags["blocks_to_swap"], layers)
    return replace(row, clip=(side, side, min(row.clip[2], 5)), flags={**flags, "network_dim": 4}), model


@dataclass(frozen=True, kw_only=True)
class How:
    """How a row is measured.

    Attributes:
        device: where.
        tiny: in sizes for a CPU.
        peak: dense bfloat16 TFLOP/s of a card that is not known.
        seconds: about how long the timed steps take together.
    """

    device: torch.device
    tiny: bool = False
    peak: float | None = None
    seconds: float = 30.0


def measure(row: Row, how: How) -> dict[str, Any]:
    """Make the run of a row and time its steps.

    Raises:
        torch.OutOfMemoryError: it does not fit, or not into what its preset may take.
    """
    device = how.device
    row, model = shrunk(row) if how.tiny else (row, profiles.model(row.task))
    if device.type == "cuda" and "vram" in row.flags:
        hold_to(int(row.flags["vram"]), device)
    began = time.perf_counter()
    run, trainee = make_run(model, row.flags, device, cudnn=row.cudnn)
    loading = {}
    if device.type == "cuda":
        loading = {"loading_peak_bytes": torch.cuda.max_memory_allocated(device)}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    prepared = random_batch(model, row.clip, row.batch, device)
    group = Group(0, [prepared], 1, row.batch)
    result = optimizer_step(run, trainee, group, 1.0, Interrupt())
    assert result is not None
    loss = float(result.losses.mean())
    first_s = time.perf_counter() - began
    seconds = _times(lambda: optimizer_step(run, trainee, group, 1.0, Interrupt()), how)
    found = {"attention": trainee.model.attention, "loss": loss, "until_first_step_s": first_s, "steps": len(seconds)}
    found |= {"s_per_step": min(seconds), "s_per_step_median": statistics.median(seconds)}
    if device.type == "cuda":
        found |= loading | {
            "peak_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device),
        }
    return found | _work(row, model, run, prepared.batch, min(seconds), peak_tflops(device, how.peak))


def hold_to(vram_gib: int, device: torch.device) -> None:
    """Let PyTorch take no more of the card than a run may on a card of that size, CUDA's own part aside."""
    index = device.index or 0  # the call below wants a number
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (usable_bytes(vram_gib * GIB) - CONTEXT_BYTES) / total), index)


def _times(step: Callable[[], object], how: How) -> list[float]:
    """Seconds of warm steps."""
    warm_up = 0
    began = time.perf_counter()
    while not warm_up or (warm_up < WARM_UP and time.perf_counter() - began < how.seconds / 2):
        step()
        warm_up += 1
        if how.device.type == "cuda":
            torch.cuda.synchronize(how.device)
    each = (time.perf_counter() - began) / warm_up
    number = MIN_STEPS if how.tiny else max(MIN_STEPS, min(MAX_STEPS, int(how.seconds / each)))
    if how.device.type != "cuda":
        marks = [time.perf_counter(), *((step(), time.perf_counter())[1] for _ in range(number))]
        return [end - start for start, end in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(how.device)
    return [start.elapsed_time(end) / 1000 for start, end in pairwise(events)]


def _work(row: Row, model: Model, run: Run, batch: Batch, seconds: float, peak: float | None) -> dict[str, Any]:
    """Tokens and FLOPs of a step, and what they mean in the time it took."""
    options = run.plan.options
    tokens, joint = num_tokens(batch, model.patch)[0], model.prompt is not None
    flops = step_flops(
        model.transformer, tokens, text_tokens=512 if options.plain and not joint else len(batch.texts[0]),
        image_tokens=num_image_tokens(model), joint=joint,
        adapter_weights=sum(parameter.numel() for parameter in run.trainees[0].parameters.values()),
        checkpointing=options.checkpointing or "full", free_blocks=options.checkpointing_free_blocks or 0,
    )  # fmt: skip
    work = {"tokens": row.batch * tokens, "model_flops": row.batch * flops.model, "done_flops": row.batch * flops.done}
    work["tokens_per_s"] = work["tokens"] / seconds
    if peak:
        work["mfu"] = work["model_flops"] / seconds / (peak * 1e12)
        work["limit_s"] = work["done_flops"] / (REACHED * peak * 1e12)
    return work


def in_own_process(timeout_s: float, function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What a function answers in a process of its own; that it ends or does not end is an `error`, in one line."""
    answers, answer = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_answer, args=(answer, function, arguments))
    process.start()
    answer.close()
    try:
        found: dict[str, Any] = (
            answers.recv() if answers.poll(timeout_s) else {"error": f"not done after {timeout_s:g} s"}
        )
        process.kill()  # it has said all: giving back locked memory takes seconds
    except EOFError:
        found = {}
    process.join()
    return found or {"error": f"exit code {process.exitcode}"}


def _answer(answer: Connection, function: Callable[..., dict[str, Any]], arguments: Sequence[Any]) -> None:
    answer.send(function(*arguments))


def in_this_process(row: Row, how: How) -> dict[str, Any]:
    """Measure a row here; what does not fit, or fails, is an `error`."""
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wangen").addHandler(handler)
    try:
        return {**measure(row, how), "warnings": warned}
    except torch.OutOfMemoryError as error:
        return {"error": "does not fit: " + str(error).splitlines()[0][:160]}
    except (RuntimeError, WangenError) as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {(str(error).strip() or 'no words').splitlines()[0][:160]}"}
    finally:
        logging.getLogger("wangen").removeHandler(handler)


def about(device: torch.device) -> dict[str, Any]:
    """The name of a device, if it is there."""
    if device.type != "cuda":
        return {"device": "cpu"}
    if not torch.cuda.is_available():
        return {
            "error": "no GPU that PyTorch sees; on a CPU only --device cpu --tiny, which shows that everything runs"
        }
    return {"device": torch.cuda.get_device_name(device)}


COLUMNS = ("group", "model", "clip", "flags", "attention", "s/step", "median", "tokens/s", "MFU", "limit s", "GiB",
           "reserved")  # fmt: skip


def table(results: Sequence[tuple[Row, Mapping[str, Any]]]) -> str:
    """The results in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for row, found in results:
        start = [row.group, row.task, f"{row.clip[0]}x{row.clip[1]}x{row.clip[2]}", row.how()]
        if "error" in found:
            cells = [*start, found["error"], *[""] * (len(COLUMNS) - len(start) - 1)]
        else:
            rates = [f"{found['s_per_step']:.3f}", f"{found['s_per_step_median']:.3f}", f"{found['tokens_per_s']:.0f}"]
            shares = [f"{100 * found['mfu']:.0f} %", f"{found['limit_s']:.3f}"] if "mfu" in found else ["", ""]
            memory = [f"{found[key] / GIB:.1f}" if key in found else "" for key in ("peak_bytes", "reserved_bytes")]
            cells = [*start, _kernel(row, found["attention"]), *rates, *shares, *memory]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _kernel(row: Row, used: str) -> str:
    """The attention kernel that ran, and whether another was asked for."""
    wanted = row.flags.get("attention", "auto")
    return used if wanted in ("auto", used) else f"{used}, for {wanted} does not run here"


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    """The rows that were asked for."""
    rows = [row for row in all_rows() if row.quick or not options.quick]
    rows = [row for row in rows if not options.only or row.group in options.only.split(",")]
    return [row for row in rows if not options.models or row.task in options.models.split(",")]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--quick", action="store_true", help="the rows of a ten-minute run")
    parser.add_argument(
        "--only", default="", help="groups: cases,attention,graphs,compile,checkpointing,base,swap,presets"
    )
    parser.add_argument("--models", default="", help="model profiles, separated by commas")
    parser.add_argument("--peak_tflops", type=float, help="dense bfloat16 peak of a card that is not known")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a row")
    parser.add_argument("--out", type=Path, default=Path("gpu_train.json"))
    parser.add_argument("--list", action="store_true", help="only say the rows")
    parser.add_argument("--seconds", type=float, default=30.0, help="that the timed steps of a row take together")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    rows = chosen_rows(options)
    if options.list:
        print("\n".join(f"{row.group:14} {row.task:10} {row.clip} {row.how()}" for row in rows))
        return
    how = How(device=torch.device(options.device), tiny=options.tiny, peak=options.peak_tflops, seconds=options.seconds)
    machine = in_own_process(options.timeout, about, how.device)
    if "error" in machine:
        raise SystemExit(machine["error"])
    machine |= {"torch": torch.__version__, "tiny": options.tiny}
    results: list[tuple[Row, dict[str, Any]]] = []
    for number, row in enumerate(rows, 1):
        results.append((row, in_own_process(options.timeout, in_this_process, row, how)))
        print(f"{number}/{len(rows)}", *table(results[-1:]).splitlines()[2:], file=sys.stderr, flush=True)
        lines = [{**asdict(row), **found} for row, found in results]
        options.out.write_text(json.dumps({**machine, "rows": lines}, indent=1) + "\n", encoding="utf-8")
    print(f"{machine['device']}, torch {torch.__version__}\n\n{table(results)}")


if __name__ == "__main__":
    main()
