"""A training step of ours against a loop of diffusers and peft alone (`plain_loop.py`), interleaved, at a toy shape.

python benchmarks/train_step.py [--threads 2] [--steps 15] [--cases float32 checkpointed] [--cpu_time] [--compile]

38 million parameters, one picture of 256x256, a caption of 46 rows, rank 16 on ten linear layers of each of 8 blocks.
Both do the same: noise, timestep, velocity, loss, clipping, AdamW; `--compile` is for ours alone. The least of the
interleaved steps counts, beside the lower quartile. On a busy machine `--threads 1 --cpu_time` gives ratios that hold:
seconds of the processor instead of those on the wall. The limits are those that this project set itself.
"""

import argparse
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from plain_loop import Item, PlainLoop, toy_item, toy_model

from wangen.generator.steps import Train
from wangen.runtime.fast.attention import choose_kernel
from wangen.runtime.fast.dit import FastWan
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


class OurLoop:
    """The product's parts of a step, on one item."""

    def __init__(self, model: Any, **ways: Any) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--cpu_time", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    seconds = "processor seconds" if options.cpu_time else "seconds"
    print(f"{date.today()}, torch {torch.__version__}, {options.threads} threads, {seconds} per step, least (q1)")
    print("| case | diffusers + peft | ours | ratio | limit |\n|---|---|---|---|---|")
    for name in options.cases:
        dtype, checkpointing, ways, limit = CASES[name]
        theirs = PlainLoop(toy_model(dtype), checkpointing=checkpointing, autocast=dtype == torch.bfloat16)
        ours = OurLoop(toy_model(dtype), compile=options.compile, **ways)
        times = interleaved([theirs.step, ours.step], toy_item(), options.steps, clock)
        (least, quartile), (our_least, our_quartile) = (least_and_quartile(each) for each in times)
        print(f"| {name} | {least:.3f} ({quartile:.3f}) | {our_least:.3f} ({our_quartile:.3f}) | "
              f"{our_least / least:.2f} ({our_quartile / quartile:.2f}) | {limit} |", flush=True)  # fmt: skip


def interleaved(
    steps: list[Callable[[Item], None]], item: Item, num_steps: int, clock: Callable[[], float]
) -> list[list[float]]:
    """The times of each kind of step, taken in turns, the first of each aside."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(num_steps + 1):
        for step, taken in zip(steps, times, strict=True):
            start = clock()
            step(item)
            taken.append(clock() - start)
    return [taken[1:] for taken in times]


def least_and_quartile(times: list[float]) -> tuple[float, float]:
    """The minimum and the lower quartile."""
    ordered = sorted(times)
    return ordered[0], ordered[len(ordered) // 4]


if __name__ == "__main__":
    main()
