"""Does a LoRA learn, and does it learn from the captions? On the tiny Wan, three colours that it has never seen.

python benchmarks/it_learns.py FOLDER [--steps 300] [--seeds 4]

Two LoRAs are trained on the same drawn clips of purple, pink and brown shapes by the product's own steps: one with the
right captions, one with captions shuffled so that each names another colour. Both are judged by the held-out loss at
fixed clips, timesteps and noise, with right captions, and by generated clips: the distance of the shape's mean colour
from the colour that the prompt names, in steps of sRGB, without a LoRA and with each. Prints a report in Markdown.
"""

import argparse
import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from wangen import examples
from wangen.generator.steps import CacheLatents, CacheText, Generate, Train
from wangen.runtime import cache_latents, cache_text, generate, train
from wangen.runtime import moving_shapes as shapes
from wangen.runtime.randomness import generator_for

TINY = Path(examples.__file__).parent / "tiny-wan"
DIT = TINY / "wan2.1_t2v_1.3B_bf16.safetensors"
VAE = TINY / "Wan2.1_VAE.pth"
T5 = TINY / "models_t5_umt5-xxl-enc-bf16.pth"
TASK = "t2v-1.3B"
COLOURS: dict[str, shapes.Colour] = {"purple": (140, 45, 190), "pink": (240, 130, 190), "brown": (120, 75, 40)}
SIDE_PX, NUM_FRAMES, BATCH = 64, 17, 4
NUM_CLIPS, NUM_HELD_OUT = 36, 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    held_out = dataset(options.folder / "held-out", NUM_HELD_OUT, first=NUM_CLIPS)
    losses: dict[str, Any] = {}
    loras: dict[str, tuple[Path, ...]] = {"base": ()}
    for name, shuffled in (("right captions", False), ("shuffled captions", True)):
        config = dataset(options.folder / name, NUM_CLIPS, shuffled=shuffled)
        output = options.folder / name / "lora"
        train.run(training(config, held_out, output, options.steps))
        lines = map(json.loads, (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        losses[name] = [line["validation"] for line in lines if "validation" in line][-1]
        loras[name] = (output / "lora.safetensors",)
    print(f"\n{date.today()}, torch {torch.__version__}: {options.steps} steps of {BATCH}, rank 16\n")
    report_losses(losses)
    report_colours(options.folder, loras, options.seeds)


def dataset(folder: Path, num_clips: int, *, first: int = 0, shuffled: bool = False) -> Path:
    """Draw clips in turn of each colour, cache them, and return the TOML; shuffled captions name the next colour."""
    media = folder / "clips"
    media.mkdir(parents=True, exist_ok=True)
    names = list(COLOURS)
    for number in range(first, first + num_clips):
        generator = generator_for("it learns", number)
        shape, background, motion = (
            options[int(torch.randint(len(options), (1,), generator=generator))]
            for options in (shapes.SHAPES, list(shapes.BACKGROUNDS), list(shapes.MOTIONS))
        )
        colour, named = names[number % 3], names[(number + shuffled * (1 + number // 3 % 2)) % 3]
        scene = shapes.random_scene(shape, COLOURS[colour], shapes.BACKGROUNDS[background], motion, generator)
        caption = shapes.caption_of(shape, named, background, motion)
        shapes.write_clips(media, {f"{number:03d}": (caption, scene)}, NUM_FRAMES, SIDE_PX)
    config = folder / "dataset.toml"
    config.write_text(
        f"""
[general]
resolution = [{SIDE_PX}, {SIDE_PX}]
batch_size = {BATCH}

[[datasets]]
video_directory = "{media.absolute().as_posix()}"
cache_directory = "{(folder / "cache").absolute().as_posix()}"
target_frames = [{NUM_FRAMES}]
""",
        encoding="utf-8",
    )
    cache_latents.run(CacheLatents(dataset_config=config, vae=VAE, vae_dtype="float32", device="cpu"))
    cache_text.run(CacheText(dataset_config=config, t5=T5, t5_dtype="float32", device="cpu"))
    return config


def training(config: Path, held_out: Path | None, output: Path, steps: int) -> Train:
    """The flags of both runs; None judges by nothing."""
    return Train(
        task=TASK,
        dataset_config=config,
        validation_config=held_out,
        validate_every_n_steps=steps,
        dit=DIT,
        output_dir=output,
        output_name="lora",
        learning_rate=1e-3,
        max_train_steps=steps,
        mixed_precision="no",
        log_with=("none",),
        device="cpu",
    )


def report_losses(losses: Mapping[str, Any]) -> None:
    """Held-out loss by timestep: base and both adapters."""
    print("| timestep | base | " + " | ".join(losses) + " |\n|---|---|" + "---|" * len(losses))
    found = list(losses.values())
    for rows in zip(*(validation["rows"] for validation in found), strict=True):
        cells = [f"{row['adapter']:.4f}" for row in rows]
        print(f"| {rows[0]['timestep']:.1f} | {rows[0]['base']:.4f} | {' | '.join(cells)} |")
    means = [f"{validation['mean_adapter']:.4f}" for validation in found]
    print(f"| all | {found[0]['mean_base']:.4f} | {' | '.join(means)} |\n")


def report_colours(folder: Path, loras: Mapping[str, tuple[Path, ...]], seeds: int) -> None:
    """The mean colour inside generated shapes, and its distance from the colour that the prompt names."""
    print("| prompt's colour | " + " | ".join(loras) + " |\n|---|" + "---|" * len(loras))
    distances: dict[str, list[float]] = {name: [] for name in loras}
    for colour, wanted in COLOURS.items():
        cells = []
        for name, files in loras.items():
            seen = [generated_colour(folder, name, files, colour, seed) for seed in range(seeds)]
            mean = torch.tensor(seen).mean(dim=0)
            found = [(torch.tensor(one) - torch.tensor(wanted)).norm().item() for one in seen]
            distances[name] += found
            red, green, blue = mean.round().int().tolist()
            cells.append(f"({red}, {green}, {blue}), {fmean(found):.0f} away")
        print(f"| {colour} {wanted} | {' | '.join(cells)} |")
    print("| mean distance | " + " | ".join(f"{fmean(found):.1f}" for found in distances.values()) + " |")


def generated_colour(
    folder: Path, name: str, loras: tuple[Path, ...], colour: str, seed: int
) -> tuple[float, float, float]:
    """Generate one clip with the product's step and look at it; where it shows no shape, the background's colour."""
    shape, background, motion = shapes.SHAPES[seed % 3], list(shapes.BACKGROUNDS)[seed % 3], "moves to the right"
    options = Generate(
        task=TASK,
        dit=DIT,
        vae=VAE,
        t5=T5,
        prompt=shapes.caption_of(shape, colour, background, motion),
        lora_weight=loras,
        video_size=(SIDE_PX, SIDE_PX),
        video_length=NUM_FRAMES,
        infer_steps=20,
        guidance_scale=3.0,
        seed=seed,
        save_path=folder / "generated" / name / f"{colour}-{seed}.mp4",
        device="cpu",
    )
    generate.run(options)
    seen = shapes.look(shapes.read_clip(options.save_path))
    return seen.colour if seen.share else seen.background


if __name__ == "__main__":
    main()
