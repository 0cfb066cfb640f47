"""Does a world model learn? A tiny TI2V-5B sees a ball that the walls throw back, and goes on from five frames.

python benchmarks/world_model.py FOLDER [--vae FILE] [--clips 512] [--steps 4000] [--seed 0]

Everything is made here and trained from nothing. What is whose:

* the world: `bouncing_balls.py`, written as shards in the layout of the raw 1X World Model data;
* the VAE, of Wan 2.2's layout with few channels: a loop of `tiny_vae.py` around diffusers' module, for the product
  trains no VAEs. `--vae` takes one that was trained before;
* the text encoder: random; all clips have the empty prompt;
* manifests, cache, training, continuations of held-out clips and their quality: the product's own steps, `world_model`
  and `train --train_mode full --condition_frames 5`.

Prints PSNR in dB for each frame after the given ones, the mean over held-out clips: of the model before and after
training, of the last given frame repeated, and of the VAE alone, which is the most that a continuation can have; then
how far the ball is from where it was. Each part that is done is kept: called again, the script goes on where it
stopped.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import bouncing_balls
import pretrain_tiny_wan
import tiny_vae
import torch
from bouncing_balls import Flight, random_flight
from diffusers import AutoencoderKLWan

from wangen.generator.prepare_steps import WorldModel
from wangen.generator.steps import Train
from wangen.runtime import train, world_model
from wangen.runtime.moving_shapes import look, read_clip
from wangen.runtime.randomness import generator_for
from wangen.runtime.safetensors_file import write
from wangen.runtime.weights.vae_names import STATISTICS

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from published import vae22
from tiny_weights import TinySizes

VAE_DIMS = (6, 7)
"""Channels of the widest pictures in the encoder and in the decoder."""
STAGES = (
    tiny_vae.Stage(500, 16, (1,), 2e-3, 3e-4),
    tiny_vae.Stage(1400, 8, (5, 5, 5, 9), 1.5e-3, 1e-3),
)
CROP_PX, OUTSIDE_PX = 48, 6
"""Of the clips that the VAE sees; a ball's centre may be so far outside half-way."""
FASTEST_PASSING_PX = 4.5
SIZES = TinySizes(dim=256, ffn_dim=512, num_layers=4)
CHANNELS = 48
NUM_FRAMES, GIVEN_FRAMES = 17, 5
CLIPS_PER_SHARD = 32
HELD_OUT = 16
COLUMNS = ("untrained", "trained", "copy", "vae")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vae", type=Path)
    parser.add_argument("--clips", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    vae = options.vae or make_vae(options.folder, options.seed)
    report = learn(options.folder, vae, options.clips, options.steps, options.seed)
    print(table(report))
    model, copy = distances(options.folder / "transformer" / "samples", options.steps)
    print(f"the ball's centre, on average: model {model:.1f} px away, the last given frame repeated {copy:.1f} px")


def make_vae(folder: Path, seed: int) -> Path:
    """Train the VAE, bring its latents to the scale that every loader expects, and write it in the original format."""
    path = folder / "Wan2.2_VAE.pth"
    if path.is_file():
        return path
    encoder_dim, decoder_dim = VAE_DIMS
    vae = AutoencoderKLWan(
        base_dim=encoder_dim, decoder_base_dim=decoder_dim, z_dim=CHANNELS, is_residual=True, in_channels=12,
        out_channels=12, patch_size=2, scale_factor_spatial=16,
        **{name: list(values) for name, values in STATISTICS[CHANNELS].items()},
    )  # fmt: skip
    tiny_vae.train_vae(folder, vae, STAGES, passing_balls, seed).requires_grad_(False)
    flights = random_flights(64, "vae statistics", seed)
    videos, _ = bouncing_balls.draw(
        torch.stack([flight.path(NUM_FRAMES) for flight in flights]), bouncing_balls.SIDE_PX
    )
    tiny_vae.match_statistics(vae, videos.float() / 127.5 - 1, most=5.0)
    torch.save(tiny_vae.original_weights(vae, vae22(encoder_dim, decoder_dim), torch.float16), path)
    return path


def passing_balls(
    stage: tiny_vae.Stage, num_frames: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Small clips of balls that pass, some of them partly outside; as `tiny_vae.random_clips`."""
    drawn = torch.rand(stage.batch, 4, generator=generator)
    angle, speed_px = 2 * torch.pi * drawn[:, 2], FASTEST_PASSING_PX * drawn[:, 3]
    velocities = torch.stack([speed_px * angle.cos(), speed_px * angle.sin()], dim=1)
    middles = -OUTSIDE_PX + (CROP_PX + 2 * OUTSIDE_PX) * drawn[:, :2]
    time = torch.arange(num_frames) - (num_frames - 1) / 2
    paths = middles[:, None] + time[:, None] * velocities[:, None]
    videos, coverage = bouncing_balls.draw(paths, CROP_PX)
    return videos.float().div_(127.5).sub_(1), coverage


def learn(folder: Path, vae: Path, num_clips: int, num_steps: int, seed: int, **changes: Any) -> Sequence[Mapping]:
    """Make the data, train, and return the records of the continuations before and after training.

    Args:
        folder: for everything.
        vae: of Wan 2.2's layout.
        num_clips: to train on.
        num_steps: of the optimizer.
        seed: of world and training.
        changes: other flags of training.
    """
    pretrain_tiny_wan.make_text_encoder(folder, seed)
    config = make_dataset(folder, num_clips, seed)
    start = folder / "untrained.safetensors"
    if not start.is_file():
        write(start, pretrain_tiny_wan.initial_transformer(seed, SIZES, CHANNELS), {"format": "pt"})
    flags: dict[str, Any] = {
        "task": "ti2v-5B", "dataset_config": config, "validation_config": folder / "val.jsonl", "dit": start,
        "vae": vae, "vae_dtype": "float32", "t5": folder / pretrain_tiny_wan.T5_FILE, "t5_dtype": "float32",
        "cache_latents_to_disk": True, "output_dir": folder / "transformer", "output_name": "ball",
        "train_mode": "full", "condition_frames": GIVEN_FRAMES, "mixed_precision": "no", "checkpointing": "none",
        "learning_rate": 1e-3, "lr_scheduler": "cosine", "lr_warmup_steps": "100",
        "optimizer_args": ("betas=0.9,0.98",), "max_train_steps": num_steps, "timestep_sampling": "shift",
        "discrete_flow_shift": 3.0, "num_timestep_buckets": 16, "validate_every_n_steps": 500,
        "sample_continuations": HELD_OUT, "continuation_steps": 20, "sample_at_first": True,
        "sample_every_n_steps": 500,
        "log_with": ("none",), "device": "cpu", "seed": seed,
    }  # fmt: skip
    train.run(Train(**flags | changes))
    lines = (folder / "transformer" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [record for line in lines if "continuations" in (record := json.loads(line))]
    return [found[0]["continuations"], found[-1]["continuations"]]


def make_dataset(folder: Path, num_clips: int, seed: int) -> Path:
    """Write the shards of both splits, their manifests, and the TOML of the training split, whose path is returned."""
    for split, number in (("train", num_clips), ("val", HELD_OUT)):
        flights = random_flights(number, split, seed)
        shards = [flights[first : first + CLIPS_PER_SHARD] for first in range(0, number, CLIPS_PER_SHARD)]
        raw = folder / "raw" / f"{split}_v2.0_raw"
        if not (raw / "metadata.json").is_file():
            bouncing_balls.write_split(raw, shards, NUM_FRAMES)
        world_model.run(WorldModel(source=folder / "raw", output=folder, split=split, frames=NUM_FRAMES))
    config = folder / "dataset.toml"
    place = folder.absolute().as_posix()
    text = f"[[datasets]]\nmanifest = '{place}/train.jsonl'\ncache_directory = '{place}/train_cache'\nbatch_size = 8\n"
    config.write_text(text, encoding="utf-8")
    return config


def random_flights(number: int, name: str, seed: int) -> list[Flight]:
    """So many flights, each from a seed of its own."""
    return [random_flight(generator_for("bouncing balls", seed, name, index)) for index in range(number)]


def psnr_per_frame(before: Mapping, after: Mapping) -> dict[str, list[float]]:
    """PSNR in dB of each frame after the given ones, the mean over clips, by column."""
    places = ((before, "model"), (after, "model"), (after, "copy"), (after, "vae"))
    clips = [[clip[name]["psnr"] for clip in record["clips"]] for record, name in places]
    return {
        column: [fmean(frames) for frames in zip(*found, strict=True)]
        for column, found in zip(COLUMNS, clips, strict=True)
    }


def distances(samples: Path, step: int) -> tuple[float, float]:
    """How far the ball is from where it was, in pixels, the mean over clips and the frames after the given ones.

    Args:
        samples: folder of the clips, each with its source to the left and its continuation to the right.
        step: of the run.

    Returns:
        In the continuations (frames without a ball do not count), and in the last given frame repeated.
    """
    found: list[torch.Tensor] = []
    for number in range(1, HELD_OUT + 1):
        shown = read_clip(samples / f"ball-step{step:08d}-continuation-{number}.mp4").chunk(3, dim=3)
        source, continuation = (bouncing_balls.SIDE_PX * look(shown[place]).path for place in (0, 2))
        ways = torch.stack([continuation - source, source[GIVEN_FRAMES - 1] - source])
        found.append(ways.norm(dim=2)[:, GIVEN_FRAMES:])
    model, copy = torch.stack(found, dim=1).flatten(1).nanmean(dim=1).tolist()
    return model, copy


def table(records: Sequence[Mapping]) -> str:
    """The numbers in Markdown."""
    found = psnr_per_frame(*records)
    lines = [f"| frame | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for index in range(NUM_FRAMES - GIVEN_FRAMES):
        numbers = " | ".join(f"{found[column][index]:.1f}" for column in COLUMNS)
        lines.append(f"| {GIVEN_FRAMES + index} | {numbers} |")
    means = " | ".join(f"{fmean(found[column]):.2f}" for column in COLUMNS)
    return "\n".join([*lines, f"| mean | {means} |"])


if __name__ == "__main__":
    main()
