"""How far `wangen plan` is from what a step really computes and holds, configuration by configuration.

python benchmarks/plan_accuracy.py             # blocks of the real width, a few of them; half an hour on two cores
python benchmarks/plan_accuracy.py --quick     # narrow blocks, two minutes

Needs no GPU: the trainer's `optimizer_step` runs on random weights on the CPU, torch's counter adds up its products,
and every storage that an operator makes is followed until it is gone. Attention is in neither number of products: the
counter does not know the CPU's kernel for many keys. What the plan calls reserve (context, workspaces, fragments) does
not exist on a CPU; what a block swap or an offload keeps in host memory counts on both sides, since here both are the
host's.
"""

import argparse
import math
import sys
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

import torch
from random_run import TEXT_ROWS, Clip, make_run, products_in_bfloat16, random_batch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, addmm_flop

from wangen import profiles
from wangen.generator.flops import FLASH_BACKWARD, forward_flops
from wangen.generator.memory import RESERVE, memory_plan, memory_settings
from wangen.generator.plan.estimate import memory_tokens, shape_flops
from wangen.generator.plan.shapes import Shape
from wangen.generator.weight_counts import CLIP_TOKENS
from wangen.profiles import Model
from wangen.runtime.interrupt import Interrupt
from wangen.runtime.training.prepared import Group
from wangen.runtime.training.step import optimizer_step

CPU = torch.device("cpu")

BY_BATCH = torch.ops.aten.bmm, torch.ops.aten.baddbmm
"""The products of attention to few keys."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration.

    Attributes:
        task: the model profile.
        layers: blocks.
        clip: width, height, frames.
        flags: of training, beside float32 or bf16.
        batch: items.
        width: of the model in heads of 128; 0 for the real one.
    """

    task: str
    layers: int = 3
    clip: Clip = (512, 512, 1)
    flags: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    width: int = 0

    @property
    def model(self) -> Model:
        """The profile in this case's size."""
        model = profiles.model(self.task)
        sizes = replace(model.transformer, num_layers=self.layers)
        if self.width:
            dim = 128 * self.width
            sizes = replace(sizes, dim=dim, num_heads=self.width, ffn_dim=4 * dim)
        return replace(model, transformer=sizes)

    @property
    def shape(self) -> Shape:
        """What the plan calls its clip."""
        controls = min(1, self.model.max_controls)
        return Shape(self.clip[:2], self.clip[2], controls, self.batch)

    def __str__(self) -> str:
        flags = " ".join(f"{name} {value}" for name, value in self.flags.items())
        return f"{flags or 'defaults'}{f', batch {self.batch}' if self.batch > 1 else ''}"


@dataclass(frozen=True)
class Found:
    """What was counted, and what the plan says: products in FLOPs, memory in bytes."""

    flops: float
    planned_flops: float
    memory: int
    planned_memory: int


class Live(TorchDispatchMode):
    """Adds up the storages that operators make, and takes away those that are gone."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._take(leaf)
        self.peak = max(self.peak, self.now)
        return result

    def _take(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._seen:
            self._seen.add(storage)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, num_bytes: int) -> None:
        self.now -= num_bytes


def measure(case: Case) -> Found:
    """Run the second step of a case, and compare."""
    torch.set_num_threads(1)
    ways = {torch.ops.aten.addmm_: _in_place, torch.ops.mkldnn._linear_pointwise: _by_onednn}
    counter = FlopCounterMode(display=False, custom_mapping=ways)
    with products_in_bfloat16(), Live() as live:
        run, trainee = make_run(case.model, case.flags, CPU)
        group = Group(0, [random_batch(case.model, case.clip, case.batch, CPU)], 1, case.batch)
        optimizer_step(run, trainee, group, 1.0, Interrupt())  # from now on gradients, moments and tables are there
        live.peak = live.now
        with counter:
            optimizer_step(run, trainee, group, 1.0, Interrupt())
    counts = counter.get_flop_counts()["Global"].items()
    options, model, shape = run.plan.options, case.model, case.shape
    rows = len(group.batches[0].batch.texts[0])
    budget = memory_plan(model, memory_settings(options), tokens=memory_tokens(shape, model, rows))
    return Found(
        flops=float(sum(number for name, number in counts if "attention" not in str(name) and name not in BY_BATCH)),
        planned_flops=_products(case, options, rows),
        memory=live.peak,
        planned_memory=budget.device + budget.host - RESERVE,
    )


def _in_place(total: Any, one: Any, other: Any, *_: Any, **__: Any) -> int:
    return int(addmm_flop(total, one, other))


def _by_onednn(inputs: Any, *_: Any, out_shape: Any = (), **__: Any) -> int:
    return 2 * math.prod(out_shape) * int(inputs[-1])


def _products(case: Case, options: Any, rows: int) -> float:
    """The work that the plan gives a batch, without attention."""
    model, shape = case.model, case.shape
    flops = shape_flops(shape, options, model, rows)
    tokens = memory_tokens(replace(shape, batch_size=1), model, 0)
    clip = CLIP_TOKENS if model.has_clip else 0
    attention = forward_flops(model.transformer, tokens, text_tokens=rows, image_tokens=clip,
                              joint=model.prompt is not None)[2]  # fmt: skip
    again = options.checkpointing == "full"
    covered = (case.layers - (options.checkpointing_free_blocks or 0)) / case.layers if again else 0.0
    return flops.done - case.batch * attention * (1 + FLASH_BACKWARD + covered)


def cases(*, quick: bool) -> Iterator[Case]:
    """Every model with the defaults, and every choice on two of them."""
    width = 2 if quick else 0
    clips = {"ti2v-5B": (512, 512, 5), "t2v-1.3B": (256, 256, 17)}
    for task in ("t2v-1.3B", "i2v-14B", "ti2v-5B", "qwen-image", "qwen-image-edit"):
        side = (256, 256, 1) if "qwen" in task or "14B" in task else (512, 512, 1)
        yield Case(task=task, width=width, clip=clips.get(task, side))
    choices: list[dict[str, Any]] = [
        {"checkpointing": "none"}, {"checkpointing": "selective"}, {"checkpointing_free_blocks": 2},
        {"quantize": "int8"}, {"quantize": "nf4"}, {"blocks_to_swap": 3},
        {"gradient_checkpointing_cpu_offload": True}, {"network_dim": 128}, {"optimizer_type": "Adafactor"},
        {"ema_decay": 0.99}, {"train_mode": "full"},
    ]  # fmt: skip
    for flags in choices:
        for task in ("t2v-1.3B", "qwen-image"):
            if "train_mode" in flags and "qwen" in task and not quick:
                continue  # 20 GB
            clip = (256, 256, 1) if "qwen" in task else clips["t2v-1.3B"]
            yield Case(task=task, width=width, layers=4, clip=clip, flags=flags)
    yield Case(task="t2v-1.3B", width=width, clip=(256, 256, 5), batch=3)
    if not quick:  # enough tokens to go in pieces; in float32, since these are many products
        for flags in ({}, {"checkpointing_free_blocks": 1}):
            yield Case(task="t2v-14B", layers=2, clip=(832, 480, 13), flags={"mixed_precision": "no", **flags})


def table(found: list[tuple[Case, Found]]) -> str:
    """The results in Markdown."""
    lines = ["| model | blocks | clip | flags | TFLOP counted | planned | GB held | planned |", "|" + "---|" * 8]
    for case, one in found:
        flops, memory = one.planned_flops / one.flops - 1, one.planned_memory / one.memory - 1
        clip = "x".join(map(str, case.clip))
        lines.append(f"| {case.task} | {case.layers} | {clip} | {case} | {one.flops / 1e12:.3g} | {100 * flops:+.1f} % "
                     f"| {one.memory / 1e9:.2f} | {100 * memory:+.1f} % |")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="narrow blocks")
    options = parser.parse_args()
    found = []
    for case in cases(quick=options.quick):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # a process each: nothing is left over
            found.append((case, pool.submit(measure, case).result()))
        print(table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(f"torch {torch.__version__}, {TEXT_ROWS} tokens of text\n\n{table(found)}")


if __name__ == "__main__":
    main()
