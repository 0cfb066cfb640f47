"""How fast a training step is on this card, and what it takes: full-size transformers with random weights, no files.

python benchmarks/gpu_train.py --quick                  # ten minutes: the cases, and one of each choice
python benchmarks/gpu_train.py --out speed.json         # everything, an hour or two
python benchmarks/gpu_train.py --only presets --models t2v-14B
python benchmarks/gpu_train.py --device cpu --tiny      # small sizes, to see that it runs

Each row is a process of its own, so that one that does not fit, or fails, ends nothing but itself. What is timed is
`optimizer_step`, the trainer's own: batch to the device, forward, backward, clipping, AdamW; a batch is always there.
Of the warm steps the minimum and the median are given, the GPU's own time from the end of one to the end of the next.
The `presets` rows run with `torch.cuda.set_per_process_memory_fraction` at what the preset may take of its card.
Prints a table in Markdown and writes the same as JSON.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wangen import profiles
from wangen.generator.layouts import HEAD_DIM
from wangen.generator.memory import BOTH_IMAGES, FREQUENCIES, GIB, IMAGE_DIM, TEXT_DIM, tokens_of, usable_bytes
from wangen.generator.steps import Train
from wangen.profiles import Model, TransformerSizes
from wangen.runtime.interrupt import Interrupt
from wangen.runtime.loader import Batch
from wangen.runtime.memory.presets import CONTEXT_BYTES
from wangen.runtime.memory.quantize import in_blocks
from wangen.runtime.memory.swap import BlockSwap
from wangen.runtime.models import VelocityModel, family
from wangen.runtime.training.adapter import add_adapter
from wangen.runtime.training.loading import compute_of
from wangen.runtime.training.optim import Optimization
from wangen.runtime.training.plan import ExpertPlan, Plan
from wangen.runtime.training.prepared import Group, Prepared, pinned
from wangen.runtime.training.refusals import resolved
from wangen.runtime.training.run import Run, Trainee
from wangen.runtime.training.step import optimizer_step
from wangen.runtime.training.throughput import peak_tflops, step_flops

VIDEO = (832, 480, 81)
TI2V_VIDEO = (1280, 704, 121)
TEXT_ROWS = 64  # of a long caption; the rest of 512 is padding
CLIP_TOKENS = 257
REACHED = 0.8
"""Of a card's peak: an H100 that multiplies large matrices was measured at 790 of 989 TFLOP/s."""
WARM_UP = 3
MIN_STEPS, MAX_STEPS = 3, 30
TIMED_S = 30.0
TINY = {"dim": 256, "ffn_dim": 512, "num_layers": 4, "num_heads": 2}


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
    clip: tuple[int, int, int]
    flags: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    cudnn: bool | None = None
    quick: bool = False

    def how(self) -> str:
        """Its flags as they are typed, and what has no flag."""
        words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in self.flags.items()]
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
    presets = {gib: replace(p, blocks_to_swap=min(p.blocks_to_swap, layers)) for gib, p in model.presets.items()}
    model = replace(model, transformer=replace(model.transformer, **TINY), presets=presets)
    side = 4 * model.spatial_stride * model.patch[1]
    flags = dict(row.flags)
    if "blocks_to_swap" in flags:
        flags["blocks_to_swap"] = min(flags["blocks_to_swap"], layers)
    return replace(row, clip=(side, side, min(row.clip[2], 5)), flags={**flags, "network_dim": 4}), model


def options_of(row: Row, model: Model, device: torch.device) -> Train:
    """The flags of a run, with what presets and defaults say filled in."""
    nowhere = Path("random")
    given = {"network_dim": 32, **row.flags}
    options = Train(
        dataset_config=nowhere, dit=nowhere, dit_high_noise=nowhere if model.experts else None, output_dir=nowhere,
        output_name="speed", task=model.name, network_alpha=float(given["network_dim"]), mixed_precision="bf16", **given,
    )  # fmt: skip
    return resolved(options, model, device)


def random_transformer(model: Model, quantize: str, device: torch.device, home: torch.device) -> Any:
    """A frozen transformer of a profile's sizes as the loader makes it, with random weights.

    Args:
        model: the profile.
        quantize: form of the blocks' linear layers.
        device: where each layer is drawn and quantised.
        home: where it then stays.
    """
    from diffusers import WanTransformer3DModel
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

    from wangen.runtime.weights.transformer import Timesteps, shield_from_autocast

    with torch.device("meta"):
        transformer = WanTransformer3DModel(**config_of(model))
    transformer.rope = WanRotaryPosEmbed(HEAD_DIM, transformer.config.patch_size, transformer.config.rope_max_seq_len)
    transformer.condition_embedder.timesteps_proj = Timesteps(FREQUENCIES)
    in_float32 = set(WanTransformer3DModel._keep_in_fp32_modules)
    generator = torch.Generator(device).manual_seed(0)
    convert = in_blocks(quantize)  # type: ignore[arg-type]
    for name, module in list(transformer.named_modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            wide = bool(in_float32 & {*name.split("."), key})
            value = torch.empty(parameter.shape, dtype=torch.float32 if wide else torch.bfloat16, device=device)
            module.register_parameter(key, nn.Parameter(_drawn(value, key, generator), requires_grad=False))
        new = convert(name, module) if isinstance(module, nn.Linear) else module
        for parameter in new.parameters(recurse=False):
            parameter.data = parameter.data.to(home)
        if new is not module:
            transformer.set_submodule(name, new)
    shield_from_autocast(transformer)
    return transformer.eval()


def config_of(model: Model) -> dict[str, Any]:
    """What diffusers' transformer is made with."""
    sizes, image = model.transformer, any(weights.flag == "clip" for weights in model.weights)
    return {
        "patch_size": model.patch,
        "num_attention_heads": sizes.num_heads,
        "attention_head_dim": HEAD_DIM,
        "in_channels": sizes.in_channels,
        "out_channels": sizes.out_channels,
        "text_dim": TEXT_DIM,
        "freq_dim": FREQUENCIES,
        "ffn_dim": sizes.ffn_dim,
        "num_layers": sizes.num_layers,
        "image_dim": IMAGE_DIM if image else None,
        "added_kv_proj_dim": sizes.dim if image else None,
        "pos_embed_seq_len": BOTH_IMAGES if model.condition == "first_and_last" else None,
    }


def _drawn(value: torch.Tensor, key: str, generator: torch.Generator) -> torch.Tensor:
    """Numbers under which activations keep their size: 1 for norms, 0 for biases, else normal over the fan in."""
    if value.ndim == 1:
        return value.fill_(1.0 if key == "weight" else 0.0)
    fan_in = math.prod(value.shape[1:]) if key == "weight" else value.shape[-1]
    return value.normal_(0.0, 1 / math.sqrt(fan_in), generator=generator)


def random_batch(model: Model, row: Row, device: torch.device) -> Prepared:
    """A batch as the reading threads hand it over."""
    width, height, num_frames = row.clip
    frames = (num_frames - 1) // model.temporal_stride + 1
    step, draw = model.spatial_stride, torch.Generator().manual_seed(1)
    shape = (row.batch, model.latent_channels, frames, height // step, width // step)
    latents, noise = (torch.randn(shape, generator=draw) for _ in range(2))
    given = model.transformer.in_channels - model.latent_channels
    condition = torch.randn(row.batch, given, *shape[2:], generator=draw) if given else None
    images = row.batch * (2 if model.condition == "first_and_last" else 1)
    clip = any(weights.flag == "clip" for weights in model.weights)
    batch = Batch(
        latents=latents,
        texts=[0.1 * torch.randn(TEXT_ROWS, TEXT_DIM, generator=draw) for _ in range(row.batch)],
        names=[f"item {number}" for number in range(row.batch)],
        keys=[str(number) for number in range(row.batch)],
        weights=torch.ones(row.batch),
        condition=condition,
        image_tokens=torch.randn(images, CLIP_TOKENS, IMAGE_DIM, generator=draw) if clip else None,
    )
    clean = 1 if model.condition == "text_or_image" and frames > 1 else 0
    keys = [(0, 0, key, 0) for key in batch.keys]
    prepared = Prepared(batch, keys, torch.full((row.batch,), 0.5), noise, [clean] * row.batch)
    return pinned(prepared) if device.type == "cuda" else prepared


def make_run(row: Row, model: Model, device: torch.device) -> tuple[Run, Trainee]:
    """The run that a step belongs to: what `load_trainee` makes of files, made of random weights."""
    options = options_of(row, model, device)
    swapped = options.blocks_to_swap or 0
    home = torch.device("cpu") if swapped else device
    transformer = random_transformer(model, options.quantize or "none", device, home)
    parameters = add_adapter(transformer, options, model)
    for parameter in parameters.values():
        parameter.data = parameter.data.to(device)
    swap = BlockSwap(transformer, swapped, device, ring=options.block_swap_ring_size) if swapped else None
    compute, kind = compute_of(options), family(model)
    if row.cudnn is None:
        velocity = kind.velocity_model(transformer, compute, device=device, dtype=torch.bfloat16, swap=swap)
    else:
        velocity = _with_kernel(transformer, compute, device, row.cudnn)
    expert = ExpertPlan("", Path("random"), None, 0.0, 1.0, 1.0, 1)
    trainee = Trainee(expert, transformer, velocity, parameters, Optimization(options, parameters))
    run = Run(Plan(options, model, [], [], 1, (expert,), {}), kind, device, [trainee])
    return run, run.activate(0)


def _with_kernel(transformer: Any, compute: Any, device: torch.device, cudnn: bool) -> VelocityModel:
    """SDPA with or without its preference for cuDNN, whatever the card."""
    from wangen.runtime.fast.attention import choose_kernel
    from wangen.runtime.fast.dit import FastWan

    kernel = choose_kernel("sdpa", device, torch.bfloat16)
    return FastWan(transformer, compute, replace(kernel, cudnn_first=cudnn))


def measure(row: Row, device: torch.device, *, tiny: bool = False, peak: float | None = None) -> dict[str, Any]:
    """Make the run of a row and time its steps.

    Raises:
        torch.OutOfMemoryError: it does not fit, or not into what its preset may take.
    """
    row, model = shrunk(row) if tiny else (row, profiles.model(row.task))
    if device.type == "cuda" and "vram" in row.flags:
        limit = usable_bytes(int(row.flags["vram"])) - CONTEXT_BYTES
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    began = time.perf_counter()
    run, trainee = make_run(row, model, device)
    group = Group(0, [random_batch(model, row, device)])
    result = optimizer_step(run, trainee, group, 1.0, Interrupt())
    assert result is not None
    loss = float(result.losses.mean())
    first_s = time.perf_counter() - began
    seconds = _times(lambda: optimizer_step(run, trainee, group, 1.0, Interrupt()), device, tiny)
    found = {"attention": trainee.model.attention, "loss": loss, "until_first_step_s": first_s, "steps": len(seconds)}
    found |= {"s_per_step": min(seconds), "s_per_step_median": statistics.median(seconds)}
    if device.type == "cuda":
        found |= {
            "peak_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device),
        }
    return found | _work(row, model, run, min(seconds), peak_tflops(device, peak))


def _times(step: Callable[[], object], device: torch.device, tiny: bool) -> list[float]:
    """Seconds of warm steps, as many as half a minute holds."""
    began = time.perf_counter()
    warm_up = 1 if tiny else WARM_UP
    for _ in range(warm_up):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    each = (time.perf_counter() - began) / warm_up
    number = MIN_STEPS if tiny else max(MIN_STEPS, min(MAX_STEPS, int(TIMED_S / each)))
    if device.type != "cuda":
        marks = [time.perf_counter(), *((step(), time.perf_counter())[1] for _ in range(number))]
        return [end - start for start, end in zip(marks, marks[1:], strict=False)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1000 for start, end in zip(events, events[1:], strict=False)]


def _work(row: Row, model: Model, run: Run, seconds: float, peak: float | None) -> dict[str, Any]:
    """Tokens and FLOPs of a step, and what they mean in the time it took."""
    options = run.plan.options
    tokens = tokens_of(model, row.clip[:2], row.clip[2])
    clip = any(weights.flag == "clip" for weights in model.weights)
    flops = step_flops(
        model.transformer, tokens, text_tokens=512 if options.plain else TEXT_ROWS,
        image_tokens=CLIP_TOKENS if clip else 0,
        adapter_weights=sum(parameter.numel() for parameter in run.trainees[0].parameters.values()),
        checkpointing=options.checkpointing or "full", free_blocks=options.checkpointing_free_blocks or 0,
    )  # fmt: skip
    work = {"tokens": row.batch * tokens, "model_flops": row.batch * flops.model, "done_flops": row.batch * flops.done}
    work["tokens_per_s"] = work["tokens"] / seconds
    if peak:
        work["mfu"] = work["model_flops"] / seconds / (peak * 1e12)
        work["limit_s"] = work["done_flops"] / (REACHED * peak * 1e12)
    return work


def in_own_process(row: Row, told: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Measure a row in a process of its own; a failure is an `error`, in one line."""
    line = [sys.executable, __file__, "--row", json.dumps(asdict(row)), *told]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_s:g} s"}
    answers = [text for text in done.stdout.splitlines() if text.startswith("{")]
    if done.returncode or not answers:
        words = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        return {"error": f"exit code {done.returncode}: {words[-1][:200]}"}
    return {**json.loads(answers[-1]), "warnings": [text for text in done.stderr.splitlines() if "attention" in text]}


def in_this_process(row: Row, device: torch.device, *, tiny: bool, peak: float | None) -> dict[str, Any]:
    """Measure a row here; what does not fit is an `error`."""
    try:
        return measure(row, device, tiny=tiny, peak=peak)
    except torch.OutOfMemoryError as error:
        return {"error": "does not fit: " + str(error).splitlines()[0][:160]}


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
            cells = [*start, found["attention"], *rates, *shares, *memory]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
    parser.add_argument("--only", default="", help="groups: cases,attention,compile,checkpointing,base,swap,presets")
    parser.add_argument("--models", default="", help="model profiles, separated by commas")
    parser.add_argument("--peak_tflops", type=float, help="dense bfloat16 peak of a card that is not known")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a row")
    parser.add_argument("--out", type=Path, default=Path("gpu_train.json"))
    parser.add_argument("--list", action="store_true", help="only say the rows")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    device = torch.device(options.device)
    if options.row:
        values = json.loads(options.row)
        row = Row(**{**values, "clip": tuple(values["clip"])})
        print(json.dumps(in_this_process(row, device, tiny=options.tiny, peak=options.peak_tflops)))
        return
    rows = chosen_rows(options)
    if options.list:
        print("\n".join(f"{row.group:14} {row.task:10} {row.clip} {row.how()}" for row in rows))
        return
    told = ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    told += ["--peak_tflops", str(options.peak_tflops)] if options.peak_tflops else []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    results: list[tuple[Row, dict[str, Any]]] = []
    for number, row in enumerate(rows, 1):
        results.append((row, in_own_process(row, told, options.timeout)))
        print(f"{number}/{len(rows)}", *table(results[-1:]).splitlines()[2:], file=sys.stderr, flush=True)
        lines = [{**asdict(row), **found} for row, found in results]
        about = {"device": name, "torch": torch.__version__, "tiny": options.tiny, "rows": lines}
        options.out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    print(f"{name}, torch {torch.__version__}\n\n{table(results)}")


if __name__ == "__main__":
    main()
