"""A training step of ours against a loop of diffusers and peft alone (`plain_loop.py`), in turns, at a toy shape.

python benchmarks/train_step.py [--threads 2] [--steps 15] [--cases float32 checkpointed] [--cpu_time] [--compile]

38 million parameters, one picture of 256x256, a caption of 46 rows, rank 16 on ten linear layers of each of 8 blocks.
Both do the same: noise, timestep, velocity, loss, clipping, AdamW; `--compile` is for ours alone. Each loop has a
process of its own, as in use, and they take turns step by step. The least of the steps counts, beside the lower
quartile. On a busy machine `--threads 1 --cpu_time` gives ratios that hold: seconds of the processor instead of those
on the wall. The limits are those that this project set itself.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from plain_loop import Item, PlainLoop, toy_item, toy_model

from wangen.generator.steps import Train
from wangen.runtime.fast.attention import choose_kernel
from wangen.runtime.fast.dit import FastWan
from wangen.runtime.memory.allocator import keep_freed_memory
from wangen.runtime.models.compute import Compute
from wangen.runtime.training.optim import Optimization

CASES: dict[str, tuple[torch.dtype, bool, dict[str, Any], float]] = {
    "float32": (torch.float32, False, {"checkpointing": "none"}, 0.65),
    "checkpointed": (torch.float32, True, {"checkpointing": "full", "free_blocks": 1}, 0.57),
    "bfloat16": (torch.bfloat16, False, {"checkpointing": "none"}, 0.5),
    "bfloat16 checkpointed": (torch.bfloat16, True, {"checkpointing": "full", "free_blocks": 1}, 0.5),
}
"""dtype, whether the plain loop checkpoints, our way, and the limit of the ratio. The last block is free: what is alive
while it is computed is the peak anyway."""

WARM_UP = 2
"""Steps of each that are not counted."""


class OurLoop:
    """The product's parts of a step, on one item."""

    def __init__(self, model: Any, **ways: Any) -> None:
        keep_freed_memory()
        kernel = choose_kernel("auto", torch.device("cpu"), model.patch_embedding.weight.dtype)
        self.velocity = FastWan(model, Compute(**ways), kernel)
        parameters = {name: p for name, p in sorted(model.named_parameters()) if p.requires_grad}
        options = Train(dataset_config=Path("none"), dit=Path("none"), output_dir=Path("none"), output_name="none",
                        task="t2v-1.3B", learning_rate=1e-4)  # fmt: skip
        self.optimization = Optimization(options, parameters)
        self.generator = torch.Generator().manual_seed(2)

    def step(self, item: Item) -> None:
        """One optimizer step."""
        self.optimization.zero_grad()
        noise = torch.randn(item.latents.shape, generator=self.generator)
        sigma = torch.rand((), generator=self.generator)
        noisy = (1 - sigma) * item.latents + sigma * noise
        predicted = self.velocity(noisy, 1000 * sigma[None], [item.text])
        torch.nn.functional.mse_loss(predicted.float(), noise - item.latents).backward()
        self.optimization.clip(1.0)
        self.optimization.step(1.0)


def our_loop(case: str, *, compiled: bool) -> OurLoop:
    """Ours, for a case."""
    dtype, _, ways, _ = CASES[case]
    return OurLoop(toy_model(dtype), compile=compiled, **ways)


def plain_loop(case: str) -> PlainLoop:
    """The loop of diffusers and peft, for a case."""
    dtype, checkpointing, _, _ = CASES[case]
    return PlainLoop(toy_model(dtype), checkpointing=checkpointing, autocast=dtype == torch.bfloat16)


def serve(pipe: Connection, make: Callable[..., Any], given: dict[str, Any], threads: int, cpu_time: bool) -> None:
    """In a process of its own: a step for every word that comes, answered with its seconds."""
    torch.set_num_threads(threads)
    clock = time.process_time if cpu_time else time.perf_counter
    loop, item = make(**given), toy_item()
    while pipe.recv():
        start = clock()
        loop.step(item)
        pipe.send(clock() - start)


@contextmanager
def process(*arguments: Any) -> Iterator[Callable[[], float]]:
    """`serve` in a process of its own; what is yielded does one step and gives its seconds."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(there, *arguments), daemon=True)
    child.start()
    there.close()  # so that the end of the child is the end of the pipe

    def step() -> float:
        here.send("step")
        return float(here.recv())

    try:
        yield step
    finally:
        child.terminate()
        child.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--cpu_time", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    seconds = "processor seconds" if options.cpu_time else "seconds"
    print(f"{date.today()}, torch {torch.__version__}, {options.threads} threads, {seconds} per step, least (q1)")
    print("| case | diffusers + peft | ours | ratio | limit |\n|---|---|---|---|---|")
    how = options.threads, options.cpu_time
    for case in options.cases:
        with ExitStack() as stack:
            theirs = stack.enter_context(process(plain_loop, {"case": case}, *how))
            ours = stack.enter_context(process(our_loop, {"case": case, "compiled": options.compile}, *how))
            times = in_turns([theirs, ours], options.steps)
        (least, quartile), (our_least, our_quartile) = (least_and_quartile(each) for each in times)
        print(f"| {case} | {least:.3f} ({quartile:.3f}) | {our_least:.3f} ({our_quartile:.3f}) | "
              f"{our_least / least:.2f} ({our_quartile / quartile:.2f}) | {CASES[case][3]} |", flush=True)  # fmt: skip


def in_turns(steps: list[Callable[[], float]], num_steps: int) -> list[list[float]]:
    """The times of each kind of step, taken in turns."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(WARM_UP + num_steps):
        for step, taken in zip(steps, times, strict=True):
            taken.append(step())
    return [taken[WARM_UP:] for taken in times]


def least_and_quartile(times: list[float]) -> tuple[float, float]:
    """The minimum and the lower quartile."""
    ordered = sorted(times)
    return ordered[0], ordered[len(ordered) // 4]


if __name__ == "__main__":
    main()
