"""A training run on random weights of any size, on any device, without a file: what benchmarks of the step are made of."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wangen.generator.layouts import HEAD_DIM
from wangen.generator.memory import BOTH_IMAGES, FREQUENCIES, IMAGE_DIM, TEXT_DIM
from wangen.generator.steps import Train
from wangen.profiles import Model
from wangen.runtime.loader import Batch
from wangen.runtime.memory.quantize import in_blocks
from wangen.runtime.memory.swap import BlockSwap
from wangen.runtime.models import VelocityModel, family
from wangen.runtime.training.adapter import add_adapter
from wangen.runtime.training.loading import compute_of
from wangen.runtime.training.optim import Optimization
from wangen.runtime.training.plan import ExpertPlan, Plan
from wangen.runtime.training.prepared import Prepared, pinned
from wangen.runtime.training.refusals import resolved
from wangen.runtime.training.run import Run, Trainee

Clip = tuple[int, int, int]
"""Width and height in pixels, frames."""

TEXT_ROWS = 64
"""Of a long caption; the rest of 512 is padding."""

CLIP_TOKENS = 257


def has_image_branch(model: Model) -> bool:
    """Whether the model attends to what CLIP sees."""
    return any(weights.flag == "clip" for weights in model.weights)


def options_of(model: Model, flags: Mapping[str, Any], device: torch.device) -> Train:
    """The flags of a run, with what presets and defaults say filled in."""
    nowhere = Path("random")
    given = {"network_dim": 32, **flags}
    options = Train(
        dataset_config=nowhere, dit=nowhere, dit_high_noise=nowhere if model.experts else None, output_dir=nowhere,
        output_name="speed", task=model.name, mixed_precision="bf16", network_alpha=float(given["network_dim"]),
        **given,
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
    sizes, image = model.transformer, has_image_branch(model)
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


def random_batch(model: Model, clip: Clip, num_items: int, device: torch.device) -> Prepared:
    """A batch as the reading threads hand it over."""
    width, height, num_frames = clip
    frames = (num_frames - 1) // model.temporal_stride + 1
    step, draw = model.spatial_stride, torch.Generator().manual_seed(1)
    shape = (num_items, model.latent_channels, frames, height // step, width // step)
    latents, noise = (torch.randn(shape, generator=draw) for _ in range(2))
    given = model.transformer.in_channels - model.latent_channels
    condition = torch.randn(num_items, given, *shape[2:], generator=draw) if given else None
    images = num_items * (2 if model.condition == "first_and_last" else 1)
    sees_images = has_image_branch(model)
    batch = Batch(
        latents=latents,
        texts=[0.1 * torch.randn(TEXT_ROWS, TEXT_DIM, generator=draw) for _ in range(num_items)],
        names=[f"item {number}" for number in range(num_items)],
        keys=[str(number) for number in range(num_items)],
        weights=torch.ones(num_items),
        condition=condition,
        image_tokens=torch.randn(images, CLIP_TOKENS, IMAGE_DIM, generator=draw) if sees_images else None,
    )
    clean = 1 if model.condition == "text_or_image" and frames > 1 else 0
    keys = [(0, 0, key, 0) for key in batch.keys]
    prepared = Prepared(batch, keys, torch.full((num_items,), 0.5), noise, [clean] * num_items)
    return pinned(prepared) if device.type == "cuda" else prepared


def make_run(
    model: Model, flags: Mapping[str, Any], device: torch.device, *, cudnn: bool | None = None
) -> tuple[Run, Trainee]:
    """The run that a step belongs to: what `load_trainee` makes of files, made of random weights.

    Args:
        model: the profile.
        flags: of the training step.
        device: where to train.
        cudnn: whether SDPA prefers cuDNN, told by hand; None leaves it to the trainer.
    """
    options = options_of(model, flags, device)
    swapped = options.blocks_to_swap or 0
    home = torch.device("cpu") if swapped else device
    transformer = random_transformer(model, options.quantize or "none", device, home)
    parameters = add_adapter(transformer, options, model)
    for parameter in parameters.values():
        parameter.data = parameter.data.to(device)
    swap = BlockSwap(transformer, swapped, device, ring=options.block_swap_ring_size) if swapped else None
    compute, kind = compute_of(options), family(model)
    if cudnn is None:
        velocity = kind.velocity_model(transformer, compute, device=device, dtype=torch.bfloat16, swap=swap)
    else:
        velocity = _with_kernel(transformer, compute, device, cudnn)
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
