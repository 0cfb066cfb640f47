"""The gradients of an edit LoRA by our fast path against diffusers' own forward with peft, interleaved.

python benchmarks/edit_step.py [--threads 2] [--steps 8] [--cases float32 checkpointed]

A Qwen-Image-Edit of 6 blocks, 384 wide, rank 16 on its twelve linear layers, a target and a control image of 512x512
(2048 tokens) and 300 rows of text; `mixed` are three edits of different sizes in one batch. Both do the same: forward
pass, loss, backward pass. The least of the interleaved steps counts, beside the lower quartile.
"""

import argparse
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from plain_loop import with_adapter
from train_step import in_turns, least_and_quartile

from wangen import profiles
from wangen.runtime.models import family
from wangen.runtime.models.compute import Compute
from wangen.runtime.models.inputs import Inputs

MODEL = profiles.model("qwen-image-edit")
TEXT_DIM = 384
CPU = torch.device("cpu")
CASES: dict[str, tuple[torch.dtype, str, str, int]] = {
    "float32": (torch.float32, "none", "none", 1),
    "checkpointed": (torch.float32, "full", "full", 1),
    "selective": (torch.float32, "full", "selective", 1),
    "mixed": (torch.float32, "none", "none", 3),
    "bfloat16": (torch.bfloat16, "none", "none", 1),
    "bfloat16 checkpointed": (torch.bfloat16, "full", "full", 1),
}
"""dtype, the library's checkpointing and ours, and the items of the batch."""


def toy_model(dtype: torch.dtype) -> Any:
    """A transformer with random weights, and an adapter in float32 on the linear layers of each block."""
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(num_layers=6, num_attention_heads=3, joint_attention_dim=TEXT_DIM)
    model.requires_grad_(False).to(dtype)
    return with_adapter(model, MODEL.lora_targets)


def toy_batch(dtype: torch.dtype, num_items: int) -> Inputs:
    """Edits; of several each has a control image and a text of its own size."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    sides = [64 - 16 * number for number in range(num_items)]
    return Inputs(
        normal(num_items, 16, 1, 64, 64),
        torch.full((num_items,), 500.0),
        [normal(300 - 50 * number, TEXT_DIM) for number in range(num_items)],
        controls=[[normal(16, 1, side, side)] for side in sides],
    )


def step_of(dtype: torch.dtype, compute: Compute, batch: Any) -> Callable[[], float]:
    """The forward and backward pass of a batch, which give their seconds."""
    model = toy_model(dtype)
    velocity = family(MODEL).velocity_model(model, compute, device=CPU, dtype=dtype)

    def step() -> float:
        start = time.perf_counter()
        predicted = velocity(batch.latents, batch.timesteps, batch.texts, **batch.given)
        predicted.float().square().mean().backward()
        return time.perf_counter() - start

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{date.today()}, torch {torch.__version__}, {options.threads} threads, seconds per step, least (q1)")
    print("| case | diffusers + peft | ours | ratio |\n|---|---|---|---|")
    for name in options.cases:
        dtype, theirs, ours, num_items = CASES[name]
        ways = Compute(plain=True, checkpointing=theirs), Compute(checkpointing=ours)
        batch = toy_batch(dtype, num_items)
        times = in_turns([step_of(dtype, way, batch) for way in ways], options.steps)
        (least, quartile), (our_least, our_quartile) = (least_and_quartile(each) for each in times)
        print(f"| {name} | {least:.3f} ({quartile:.3f}) | {our_least:.3f} ({our_quartile:.3f}) | "
              f"{our_least / least:.2f} ({our_quartile / quartile:.2f}) |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
