"""Training edits from the cache, from half a cache, and in real time: seconds a step, and memory.

python benchmarks/edit_modes.py [--sizes 192 288 384] [--steps 6] [--rounds 2] [--threads 2] [--arithmetic]

First what is measured: the commands `cache_latents`, `cache_text` and `train` on random small models and drawn
pictures, each run a process of its own, the modes in turns. Of all steps but each run's first the least counts, as
`metrics.jsonl` has it. Beside it stand the processor's seconds of a step, which hold on a busy machine with
`--threads 1`: those of a whole run less those of a run of one step. Memory is the most that a process had resident.

The small models keep the proportions of the real ones in FLOPs. All lengths are 3/8 of the real ones: Edit-Plus shows
a control image to its text encoder at 384x384, where Edit has 1024x1024, so that 192, 288 and 384 pixels stand for Edit
at 512, 768 and 1024. Both then have as many tokens of text per token of picture; the transformer (33 M weights, 6
blocks, 384 wide) has attention and linear layers in about the real proportion, and the encoders are so wide that each
takes about its real share of a step's work. The table has both ratios. Weights are in about the real proportion too:
Qwen2.5-VL has 0.38 of the transformer's, here 0.31.

Then what is not measured: the same ratios for the real sizes, by counting (`edit_work.py`), and the bytes of weights.
`--arithmetic` prints this alone.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from wangen.generator.steps import CacheLatents, CacheText, Train
from wangen.generator.table import Step

TASK, STANDS_FOR = "qwen-image-edit-plus", "qwen-image-edit"
SHRUNK = 3 / 8
Mode = Literal["cached", "auto", "realtime"]
MODES: tuple[Mode, ...] = ("cached", "auto", "realtime")
PROMPTS = tuple(
    f"{what}, keep the person in the foreground, the colour of the light and the shadows on the ground as they are, "
    "and do not change the frame"
    for what in ("make the sky green", "take the boat away", "turn the house into a castle", "let it snow")
)
REAL_SIDES = (512, 768, 1024, 1328)


@dataclass
class Found:
    """What the runs of one mode at one size gave.

    Attributes:
        seconds: of every step but each run's first.
        processor_s: of each whole run.
        short_s: the same of each run of one step.
        peak_bytes: of each whole run.
        losses: of the last run, by step.
    """

    seconds: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    short_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[192, 288, 384], help="sides, multiples of 16")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--arithmetic", action="store_true")
    options = parser.parse_args()
    print(f"{date.today()}, {options.threads} threads, {options.rounds} runs of {options.steps} steps each")
    if not options.arithmetic:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), options.sizes, options.steps, options.rounds)
        print(measured_table(found, options.steps))
    print(f"\nBy arithmetic, {STANDS_FOR} with one control image, one item, full checkpointing:\n\n{real_table()}")
    print(f"\n{agreement()}")
    print(f"\nBytes of weights, GB:\n\n{weights_table()}")


# ---- measured ----------------------------------------------------------------------------------------------------


def measure(folder: Path, sizes: list[int], steps: int, rounds: int) -> dict[int, dict[Mode, Found]]:
    """Run all modes at all sizes, in turns.

    Args:
        folder: for models and datasets.
        sizes: sides of the targets.
        steps: of a run.
        rounds: runs of each.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as other:  # this process stays small: see `run`
        other.submit(prepare, folder, sizes).result()
    for size in sizes:
        fill_caches(folder, folder / str(size))
    found = {size: {mode: Found() for mode in MODES} for size in sizes}
    for number in range(rounds):
        for size in sizes:
            for mode in MODES:
                trained(folder, folder / str(size), mode, steps, number, found[size][mode])
                print(f"{size} {mode}: least {min(found[size][mode].seconds):.3f} s", file=sys.stderr, flush=True)
        for size in sizes:  # the modes differ in nothing but where the entries come from
            first, *others = (found[size][mode].losses for mode in MODES)
            worst = max(abs(a - b) / a for other in others for a, b in zip(first, other, strict=True))
            assert worst < 1e-4, f"the losses differ by {worst:.1e} at {size}"
    return found


def prepare(folder: Path, sizes: list[int]) -> None:
    """Write the models, and a dataset for each size."""
    from random_qwen import SMALL, write_models

    write_models(folder / "models", SMALL, TASK, PROMPTS)
    for size in sizes:
        write_dataset(folder / str(size), size)


def write_dataset(folder: Path, size: int) -> None:
    """Pictures with prompts and control images: all of them with two caches, half of them with the second."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for name in ("targets", "controls", "half"):
        (folder / name).mkdir(parents=True)
    for number, prompt in enumerate(PROMPTS):
        homes = ["targets", "half"] if number < len(PROMPTS) // 2 else ["targets"]
        target, control = (
            Image.fromarray(draw.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((size, size)) for _ in range(2)
        )
        control.save(folder / "controls" / f"{number}.png")
        for home in homes:
            target.save(folder / home / f"{number}.png")
            (folder / home / f"{number}.txt").write_text(prompt, encoding="utf-8")
    for toml, images, cache in (("cached", "targets", "cache"), ("auto", "targets", "half_cache"),
                                ("half", "half", "half_cache")):  # fmt: skip
        lines = ["[general]", f"resolution = [{size}, {size}]", "batch_size = 1", "[[datasets]]"]
        paths = {"image_directory": images, "control_directory": "controls", "cache_directory": cache}
        lines += [f"{key} = '{(folder / name).as_posix()}'" for key, name in paths.items()]
        (folder / f"{toml}.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def fill_caches(folder: Path, dataset: Path) -> None:
    """Fill the whole cache, and the one for half of the items."""
    models = folder / "models"
    for name in ("cached", "half"):
        toml = dataset / f"{name}.toml"
        run(CacheLatents(dataset_config=toml, task=TASK, vae=models, device="cpu"))
        run(CacheText(dataset_config=toml, task=TASK, t5=models, device="cpu"))


def trained(folder: Path, dataset: Path, mode: Mode, steps: int, number: int, found: Found) -> None:
    """Train for one step and for all, each in a process of its own, and add what it took."""
    models, output = folder / "models", dataset / f"{mode}{number}"
    encoders = None if mode == "cached" else models
    options = Train(
        dataset_config=dataset / ("auto.toml" if mode == "auto" else "cached.toml"), dit=models, vae=encoders,
        t5=encoders, task=TASK, output_dir=output, output_name="edit", cache_mode=mode, max_train_steps=steps,
        mixed_precision="no", checkpointing="full", timestep_sampling="qwen_shift", log_with=("none",), device="cpu",
    )  # fmt: skip
    short = run(replace(options, output_dir=dataset / f"{mode}{number}_short", max_train_steps=1))
    whole = run(options)
    found.short_s.append(short.ru_utime + short.ru_stime)
    found.processor_s.append(whole.ru_utime + whole.ru_stime)
    found.peak_bytes.append(whole.ru_maxrss * 1024)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    records: list[dict[str, Any]] = [line for line in lines if "s_per_step" in line]
    assert len(records) == steps, output
    found.seconds += [record["s_per_step"] for record in records[1:]]
    found.losses = [record["loss"] for record in records]


def run(step: Step) -> resource.struct_rusage:
    """Run a step as its script does; returns what its process took.

    A child's peak of memory begins with its parent's, which is why this process loads no model and no torch before.
    """
    line = [sys.executable, "-m", "wangen.runtime", *step.argv()]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(line, stdout=said, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{' '.join(line)}\n{said.read().decode()}")
    assert usage.ru_maxrss > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage


def measured_table(found: dict[int, dict[Mode, Found]], steps: int) -> str:
    """Seconds of a step, memory, and the ratios that counting predicts."""
    from edit_work import work_of
    from random_qwen import REAL, SMALL

    lines = ["| side | stands for | mode | s/step, least | against cached | processor s/step | against cached | "
             "by counting, here (real) | peak, MB | against cached |", "|" + "---|" * 10]  # fmt: skip
    for size, modes in found.items():
        real = round(size / SHRUNK)
        counted, expected = work_of(SMALL, TASK, size).ratio(), work_of(REAL, STANDS_FOR, real).ratio()
        base = _least(modes["cached"], steps)
        for mode, each in modes.items():
            step, processor, peak = _least(each, steps)
            ratios = f"{counted:.2f} ({expected:.2f})" if mode == "realtime" else "1"
            cells = [str(size), str(real), mode, f"{step:.3f}", f"{step / base[0]:.2f}", f"{processor:.3f}"]
            cells += [f"{processor / base[1]:.2f}", ratios, f"{peak / 1e6:.0f}", f"{peak / base[2]:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _least(found: Found, steps: int) -> tuple[float, float, int]:
    """Seconds of a step, processor's seconds of a step, and peak in bytes."""
    processor = (min(found.processor_s) - min(found.short_s)) / (steps - 1)
    return min(found.seconds), processor, min(found.peak_bytes)


# ---- by arithmetic -----------------------------------------------------------------------------------------------


def real_table() -> str:
    """The work of the real sizes, and the ratio if all runs at one rate, or the encoders at a third of it."""
    from edit_work import work_of
    from random_qwen import REAL

    lines = ["| model | side | tokens, picture + text | step, TFLOP | VAE twice | vision | language | ratio | "
             "without checkpointing | encoders three times slower |", "|" + "---|" * 10]  # fmt: skip
    for task in (STANDS_FOR, TASK):
        for side in REAL_SIDES:
            work = work_of(REAL, task, side)
            parts = [f"{flops / 1e12:.1f}" for flops in (work.step.done, work.vae, work.vision, work.language)]
            ratios = [work.ratio(), work.ratio(checkpointing=False), work.ratio(slower=3)]
            cells = [task, str(side), "{} + {}".format(*work.tokens), *parts, *(f"{ratio:.2f}" for ratio in ratios)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def agreement() -> str:
    """A forward pass by counting and by the formula that the table's steps are made of."""
    from edit_work import transformer_forward_flops, transformer_sizes
    from random_qwen import REAL

    from wangen.generator.flops import forward_flops

    tokens = 2 * (1024 // 16) ** 2, 512
    formula = sum(forward_flops(transformer_sizes(REAL), tokens[0], text_tokens=tokens[1], joint=True))
    found = transformer_forward_flops(REAL, *tokens)
    return (
        f"A forward pass of {tokens[0]} + {tokens[1]} tokens: {found:.4g} FLOP counted, {formula:.4g} by the formula."
    )


def weights_table() -> str:
    """What is resident in each mode, by the forms that weights may have."""
    from edit_work import weights_of
    from random_qwen import REAL

    number = weights_of(REAL)
    small_text = number.text_linear + 2 * (number.text - number.text_linear)
    lines = ["| transformer | text encoder | cached | real-time | cached less by |", "|---|---|---|---|---|"]
    for form, bits in (("bf16", 16), ("8 bits", 8), ("4 bits", 4)):
        for text_form, text in (("bf16", 2 * number.text), ("`--fp8_t5`", small_text)):
            base = number.transformer * bits / 8
            live = base + text + 2 * number.vae
            lines.append(f"| {form} | {text_form} | {base / 1e9:.1f} | {live / 1e9:.1f} | {1 - base / live:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
