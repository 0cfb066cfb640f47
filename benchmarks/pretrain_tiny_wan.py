"""Makes the tiny Wan of `examples/tiny-wan`: a VAE, a text encoder and a transformer in Wan 2.1's own file formats.

python benchmarks/pretrain_tiny_wan.py FOLDER [--clips 2000] [--steps 5000] [--batch 16] [--seed 0]

Everything is trained from nothing on drawn clips of one coloured shape that moves over a plain background (one of six
colours, three shapes, three backgrounds, five motions). What is whose:

* the VAE: a loop of `tiny_vae.py` around diffusers' module, for the product trains no VAEs;
* the text encoder: random, and stays so. Its embeddings of different words differ, and the transformer learns them;
* the caches and the transformer: the product's own steps, as scripts call them: `cache_latents`, `cache_text`, and
  `train --train_mode full` with an average of the weights (`--ema_decay`).

About an hour on one CPU core. Each part that is done is kept: called again, the script goes on where it stopped. The
files to ship are in FOLDER/tiny-wan.
"""

import argparse
import hashlib
import itertools
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import tiny_vae
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

from wangen.generator.steps import CacheLatents, CacheText, Train
from wangen.runtime import cache_latents, cache_text, train
from wangen.runtime import moving_shapes as shapes
from wangen.runtime.randomness import generator_for
from wangen.runtime.safetensors_file import write
from wangen.runtime.weights.transformer import original_tensor_name

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from tiny_weights import TinySizes, random_weights, text_encoder_shapes, vae_shapes, write_tokenizer

VAE_DIM = 12
SIZES = TinySizes(dim=128, ffn_dim=512, num_layers=8)
SIDE_PX, NUM_FRAMES = 64, 17
WORDS = "purple pink brown turquoise star shape small large"
"""Words that no caption of the training has, so that a LoRA finds them as one token each."""

VAE_FILE = "Wan2.1_VAE.pth"
T5_FILE = "models_t5_umt5-xxl-enc-bf16.pth"
DIT_FILE = "wan2.1_t2v_1.3B_bf16.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clips", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shipped = options.folder / "tiny-wan"
    shipped.mkdir(parents=True, exist_ok=True)
    make_vae(options.folder, shipped / VAE_FILE, options.seed)
    make_text_encoder(shipped, options.seed)
    config = draw_dataset(options.folder, options.clips, options.batch, options.seed)
    common = {"dataset_config": config, "device": "cpu"}
    cache_latents.run(CacheLatents(vae=shipped / VAE_FILE, vae_dtype="float32", **common))
    cache_text.run(CacheText(t5=shipped / T5_FILE, t5_dtype="float32", **common))
    start = options.folder / "untrained.safetensors"
    if not start.is_file():
        write(start, initial_transformer(options.seed), {"format": "pt"})
    train.run(
        Train(
            task="t2v-1.3B",
            dit=start,
            output_dir=options.folder / "transformer",
            output_name="wan",
            train_mode="full",
            save_precision="bfloat16",
            mixed_precision="no",
            checkpointing="none",
            learning_rate=1.5e-3,
            lr_scheduler="cosine",
            lr_warmup_steps="100",
            optimizer_args=("betas=0.9,0.98",),
            max_train_steps=options.steps,
            timestep_sampling="shift",
            discrete_flow_shift=3.0,  # positions and motions are decided where noise is strong
            num_timestep_buckets=16,
            caption_dropout=0.1,
            ema_decay=0.995,
            save_state_every_n_minutes=10,
            log_with=("none",),
            seed=options.seed,
            **common,
        )
    )
    shutil.copyfile(options.folder / "transformer" / "wan-ema.safetensors", shipped / DIT_FILE)
    for path in sorted(path for path in shipped.rglob("*") if path.is_file()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{digest}  {path.relative_to(shipped).as_posix()}  {path.stat().st_size} bytes")


def make_vae(folder: Path, path: Path, seed: int) -> None:
    """Train the VAE, bring its latents to the scale that every loader expects, and write it in the original format."""
    if path.is_file():
        return
    vae = AutoencoderKLWan(base_dim=VAE_DIM)
    tiny_vae.train_vae(folder, vae, tiny_vae.STAGES, tiny_vae.random_clips, seed).requires_grad_(False)
    scenes = [scene for _, scene in itertools.islice(random_captions(seed), 64)]
    videos, _ = shapes.draw(scenes, NUM_FRAMES, (SIDE_PX, SIDE_PX))
    tiny_vae.match_statistics(vae, videos.float() / 127.5 - 1, most=5.0)
    torch.save(tiny_vae.original_weights(vae, vae_shapes(VAE_DIM), torch.float16), path)


def make_text_encoder(folder: Path, seed: int) -> None:
    """Write the random text encoder and a tokenizer that knows the captions' words."""
    captions = [shapes.caption_of(*words) for words in every_scene()]
    vocabulary = write_tokenizer(folder / "google" / "umt5-xxl", [*captions, WORDS])
    weights = random_weights(text_encoder_shapes(SIZES, vocabulary), seed, torch.bfloat16)
    torch.save(weights, folder / T5_FILE)


def every_scene() -> list[tuple[str, str, str, str]]:
    """Shape, colour, background and motion in every combination."""
    return list(itertools.product(shapes.SHAPES, shapes.COLOURS, shapes.BACKGROUNDS, shapes.MOTIONS))


def random_captions(seed: int) -> Iterator[tuple[str, shapes.Scene]]:
    """Captions with a scene each, without end: every combination once in a random order, then again."""
    scenes = every_scene()
    for number in itertools.count():
        round_, place = divmod(number, len(scenes))
        order = torch.randperm(len(scenes), generator=generator_for("tiny-wan order", seed, round_))
        shape, colour, background, motion = scenes[int(order[place])]
        generator = generator_for("tiny-wan scene", seed, number)
        jitter = (6 * torch.randn(3, generator=generator)).round().int().tolist()
        red, green, blue = (value + more for value, more in zip(shapes.COLOURS[colour], jitter, strict=True))
        srgb = (min(255, max(0, red)), min(255, max(0, green)), min(255, max(0, blue)))
        scene = shapes.random_scene(shape, srgb, shapes.BACKGROUNDS[background], motion, generator)
        yield shapes.caption_of(shape, colour, background, motion), scene


def draw_dataset(folder: Path, num_clips: int, batch: int, seed: int) -> Path:
    """Draw clips and stills of the same scenes with captions, and write the dataset's TOML, whose path is returned.

    A still has a fifth of a clip's tokens, so that four times as many go into a step: from them the transformer learns
    soonest that all tokens of a frame show one shape.
    """
    pairs = {f"{number:05d}": pair for number, pair in zip(range(num_clips), random_captions(seed), strict=False)}
    for name, num_frames in (("clips", NUM_FRAMES), ("stills", 1)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        shapes.write_clips(folder / name, pairs, num_frames, SIDE_PX)
    place = folder.absolute().as_posix()
    config = folder / "dataset.toml"
    config.write_text(
        f"""
[general]
resolution = [{SIDE_PX}, {SIDE_PX}]

[[datasets]]
video_directory = "{place}/clips"
cache_directory = "{place}/cache"
target_frames = [{NUM_FRAMES}]
batch_size = {batch}

[[datasets]]
image_directory = "{place}/stills"
cache_directory = "{place}/cache-of-stills"
batch_size = {4 * batch}
""",
        encoding="utf-8",
    )
    return config


@torch.no_grad()
def initial_transformer(seed: int, sizes: TinySizes = SIZES, channels: int = 16) -> dict[str, torch.Tensor]:
    """The weights that training starts from, under the official names.

    As in the official code (Xavier for the linear layers, zero for the head), but with open gates, and with louder
    queries and keys in the attention to the text: there ten words stand against five hundred rows of padding.
    """
    model = WanTransformer3DModel(
        num_attention_heads=sizes.dim // 128,
        attention_head_dim=128,
        in_channels=channels,
        out_channels=channels,
        text_dim=sizes.text_dim,
        freq_dim=256,
        ffn_dim=sizes.ffn_dim,
        num_layers=sizes.num_layers,
    )
    weights = {name: value.clone() for name, value in sorted(model.state_dict().items())}
    for name, value in weights.items():
        if name.endswith("norm_q.weight") or name.endswith("norm_k.weight"):
            value.fill_(2.0 if "attn2" in name else 1.0)
        elif name.endswith("norm2.weight"):
            value.fill_(1.0)
        elif name.endswith("scale_shift_table"):
            value.zero_()
            if name.startswith("blocks."):
                value[:, [2, 5]] = 0.7  # the gates of attention and feed-forward
        elif name.endswith("bias") or name.startswith("proj_out"):
            value.zero_()
        else:
            spread = 0.02 if "time_proj" in name else math.sqrt(2 / (value[0].numel() + value.shape[0]))
            quiet = 1 / math.sqrt(sizes.num_layers) if name.endswith(("to_out.0.weight", "net.2.weight")) else 1.0
            value.copy_(quiet * spread * torch.randn(value.shape, generator=generator_for("tiny-wan", seed, name)))
    return {original_tensor_name(name): value for name, value in weights.items()}


if __name__ == "__main__":
    main()
