"""Trains tiny VAEs from nothing, of Wan 2.1's or Wan 2.2's layout with few channels, on drawn clips.

Called by `pretrain_tiny_wan.py` (drawn shapes, 2.1) and `world_model.py` (bouncing balls, 2.2). This loop is its own:
the product trains transformers, no VAEs. The network is diffusers' `AutoencoderKLWan`; names and statistics are the
product's.

Three stages, each cheap where the next would be dear: single frames; the same weights widened to clips, in which every
frame of a group of four starts as a copy of the last; then the decoder alone, while the latents stay what they are. The
loss is |x - y| + (x - y)^2 + beta KL.

Letters in shapes: B batch, T frames of video, H and W pixels, F frames of latents, h and w latents.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify

from wangen.runtime import moving_shapes
from wangen.runtime.randomness import generator_for
from wangen.runtime.weights.vae_names import STATISTICS, vae_names


@dataclass(frozen=True)
class Stage:
    """One part of the training.

    Attributes:
        steps: of the optimizer.
        batch: clips per step.
        num_frames: of the clips of one step after another, in turn.
        learning_rate: the highest; it warms up and then follows a cosine.
        beta: weight of the KL term at the end, to which it grows; None trains the decoder alone.
        vivid_share: share of scenes of any colour; the others have the colours of the captions (`random_clips`).
    """

    steps: int
    batch: int
    num_frames: tuple[int, ...]
    learning_rate: float
    beta: float | None
    vivid_share: float = 1.0


DrawClips = Callable[[Stage, int, torch.Generator], tuple[torch.Tensor, torch.Tensor]]
"""What draws the clips of a step, as `random_clips` does."""
STAGES = (
    Stage(1600, 16, (1,), 1.5e-3, 5e-4, 1.0),
    Stage(100, 8, (5, 5, 5, 9), 3e-4, 1e-3, 1.0),
    Stage(600, 8, (5, 5, 9), 5e-4, None, 0.5),
)
CROP_PX = 32


def train_vae(
    folder: Path, vae: AutoencoderKLWan, stages: Sequence[Stage], draw_clips: DrawClips, seed: int
) -> AutoencoderKLWan:
    """Train through all stages; each leaves a file in `folder`, from which a later call goes on.

    Args:
        folder: for the files and the log.
        vae: whose weights are drawn anew.
        stages: the first of single frames, the others of clips.
        draw_clips: of a stage and a number of frames.
        seed: of weights and clips.
    """
    _initialise(vae, seed)
    for number, stage in enumerate(stages):
        done = folder / f"vae-stage{number}.pt"
        if number == 1:
            widen_to_clips(vae)
        if done.is_file():
            vae.load_state_dict(torch.load(done, weights_only=True))
            continue
        _train(vae, stage, draw_clips, generator_for("tiny-vae", seed, number), folder / "vae.log")
        torch.save(vae.state_dict(), done)
    return vae


@torch.no_grad()
def _initialise(vae: AutoencoderKLWan, seed: int) -> None:
    """Convolutions that keep a single frame's scale, quiet residual branches, and a posterior of little noise.

    Only the last of a causal kernel's three time slices sees a single frame. The library's own start stays at the mean
    colour for hundreds of steps.
    """
    for name, layer in vae.named_modules():
        if not isinstance(layer, torch.nn.Conv2d | torch.nn.Conv3d):
            continue
        weight = layer.weight
        taps = weight[:, :, -1] if weight.ndim == 5 else weight
        weight.zero_()
        draw = torch.randn(taps.shape, generator=generator_for("tiny-vae", seed, name))
        branch = 0.3 if "resnets" in name and name.endswith("conv2") else 0.1 if name.endswith("proj") else 1.0
        taps.copy_(branch * draw / math.sqrt(taps[0].numel()))
        if layer.bias is not None:
            layer.bias.zero_()
    vae.quant_conv.bias[vae.config.z_dim :] = -6.0
    vae.quant_conv.weight[vae.config.z_dim :] *= 0.1


@torch.no_grad()
def widen_to_clips(vae: AutoencoderKLWan) -> None:
    """Make a VAE of single frames one of clips that copies the last frame of each group of four.

    The kernels' earlier time slices become zero, and the layers that halve and double time the identity.
    """
    for name, layer in vae.named_modules():
        if not isinstance(layer, WanCausalConv3d) or layer.weight.shape[2] != 3:
            continue
        layer.weight[:, :, :-1] = 0
        if name.endswith("time_conv"):
            outputs, inputs = layer.weight.shape[:2]
            layer.weight[:, :, -1, 0, 0] = torch.eye(inputs).repeat(outputs // inputs, 1)
            layer.bias.zero_()


def _train(vae: AutoencoderKLWan, stage: Stage, draw_clips: DrawClips, generator: torch.Generator, log: Path) -> None:
    vae.requires_grad_(True)
    if stage.beta is None:
        vae.encoder.requires_grad_(False)
        vae.quant_conv.requires_grad_(False)
    parameters = [parameter for parameter in vae.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=stage.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    started, errors = time.monotonic(), []
    for step in range(1, stage.steps + 1):
        share = step / stage.steps
        for group in optimizer.param_groups:
            group["lr"] = (
                stage.learning_rate * min(1.0, step / 50) * (0.03 + 0.97 * (1 + math.cos(math.pi * share)) / 2)
            )
        num_frames = stage.num_frames[step % len(stage.num_frames)]
        clips, coverage = draw_clips(stage, num_frames, generator)
        posterior = vae.encode(clips).latent_dist
        error = decoded(vae, posterior.sample(generator)) - clips
        loss = (error.abs() * (1 + coverage)).mean() + error.square().mean()
        if stage.beta is not None:
            divergence = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
            loss = loss + stage.beta * min(1.0, 1.6 * share) * divergence
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        errors.append(error.square().mean().item())
        if step % 20 == 0:
            line = f"{stage.num_frames} step {step} psnr {10 * math.log10(4 / fmean(errors)):.2f} dB"
            errors.clear()
            with log.open("a", encoding="utf-8") as file:
                print(f"{line}, {time.monotonic() - started:.0f} s", file=file)


def decoded(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """The library's decoding without its clamp to [-1, 1], which would stop gradients.

    Args:
        vae: of z channels and a spatial stride s.
        latents: (B, z, F, h, w), not normalised.

    Returns:
        (B, 3, 4F - 3, s h, s w).
    """
    vae.clear_cache()
    hidden = vae.post_quant_conv(latents)
    chunks = []
    for index in range(hidden.shape[2]):
        vae._conv_idx = [0]
        frame = hidden[:, :, index : index + 1]
        chunks.append(vae.decoder(frame, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, first_chunk=index == 0))
    vae.clear_cache()
    video = torch.cat(chunks, dim=2)
    return unpatchify(video, vae.config.patch_size) if vae.config.patch_size else video


def random_clips(stage: Stage, num_frames: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Small clips of shapes, some of them partly outside, in more colours than the captions can say.

    Args:
        stage: says how many and how colourful.
        num_frames: T.
        generator: of the scenes.

    Returns:
        (B, 3, T, H, W) in [-1, 1], and the share of each pixel that the shape covers, (B, 1, T, H, W).
    """
    scenes = [_random_scene(stage.vivid_share, num_frames, generator) for _ in range(stage.batch)]
    videos, coverage = moving_shapes.draw(scenes, num_frames, (CROP_PX, CROP_PX))
    return videos.float().div_(127.5).sub_(1), coverage


def _random_scene(vivid_share: float, num_frames: int, generator: torch.Generator) -> moving_shapes.Scene:
    x, y, radius, speed, vivid, strong, plain, grey = torch.rand(8, generator=generator).tolist()
    colour, background = torch.rand(2, 3, generator=generator)
    if strong < 0.5:  # away from the middle: near the corners of the cube of colours
        colour = 0.5 + (colour - 0.5).sign() * (0.25 + (colour - 0.5).abs() / 2)
    if plain < 0.6:
        background = torch.full((3,), grey)
    if vivid >= vivid_share:
        colour = _drawn(list(moving_shapes.COLOURS.values()), generator)
        background = _drawn(list(moving_shapes.BACKGROUNDS.values()), generator)
    direction = list(moving_shapes.MOTIONS.values())[_below(len(moving_shapes.MOTIONS), generator)]
    pixels = (0.8 + 2.7 * speed) * (num_frames - 1)
    return moving_shapes.Scene(
        shape=moving_shapes.SHAPES[_below(3, generator)],
        colour=_srgb(colour),
        background=_srgb(background),
        centre=(1.1 * x - 0.05, 1.1 * y - 0.05),
        radius=(7 + 9 * radius) / CROP_PX,
        travel=(direction[0] * pixels / CROP_PX, direction[1] * pixels / CROP_PX),
    )


def _below(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (1,), generator=generator))


def _drawn(colours: Sequence[moving_shapes.Colour], generator: torch.Generator) -> torch.Tensor:
    return torch.tensor(colours[_below(len(colours), generator)]) / 255


def _srgb(values: torch.Tensor) -> moving_shapes.Colour:
    red, green, blue = values.mul(255).round().int().tolist()
    return red, green, blue


@torch.no_grad()
def match_statistics(vae: AutoencoderKLWan, clips: torch.Tensor, *, most: float) -> None:
    """Turn the outermost 1x1x1 convolutions so that latents get the mean and deviation that every loader divides by.

    What is decoded does not change. The original format stores no statistics: they are constants of Wan's VAE.

    Args:
        vae: trained.
        clips: (B, 3, T, H, W) in [-1, 1], of what the transformer will see.
        most: a channel is made at most so much stronger; one that says nothing stays quiet.
    """
    z = vae.config.z_dim
    mode = vae.encode(clips).latent_dist.mode()
    mean, std = mode.mean(dim=(0, 2, 3, 4)), mode.std(dim=(0, 2, 3, 4))
    gain = torch.tensor(STATISTICS[z]["latents_std"]) * (1 / std).clamp(max=most)
    shift = torch.tensor(STATISTICS[z]["latents_mean"]) - gain * mean  # new = gain * old + shift
    quant, post = vae.quant_conv, vae.post_quant_conv
    quant.weight[:z] *= gain.view(-1, 1, 1, 1, 1)
    quant.bias[:z] = gain * quant.bias[:z] + shift
    quant.bias[z:] += 2 * gain.log()
    post.weight /= gain.view(1, -1, 1, 1, 1)
    post.bias -= (post.weight[:, :, 0, 0, 0] * shift).sum(dim=1)


def original_weights(vae: AutoencoderKLWan, names: Iterable[str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights under the names of Wan's own file, in its order.

    Args:
        vae: trained.
        names: of the file.
        dtype: of the file.
    """
    weights = vae.state_dict()
    return {name: weights[new].to(dtype).clone() for name, new in vae_names(names).items()}
