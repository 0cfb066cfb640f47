"""A training run on random weights of any size and on any device, without a file: for benchmarks of the step."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from wangen.generator.layouts import HEAD_DIM
from wangen.generator.steps import Train
from wangen.generator.weight_counts import BOTH_IMAGES, CLIP_DIM, CLIP_TOKENS, FREQUENCIES, QWEN_TEXT_DIM, UMT5_DIM
from wangen.profiles import Model
from wangen.runtime.devices import set_precision
from wangen.runtime.fast import products
from wangen.runtime.loader import Batch
from wangen.runtime.memory.quantize import in_blocks
from wangen.runtime.models import Family, VelocityModel, family
from wangen.runtime.models.compute import Compute
from wangen.runtime.training.loading import load_trainee
from wangen.runtime.training.plan import ExpertPlan, Plan
from wangen.runtime.training.prepared import Prepared, pinned
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.refusals import resolved
from wangen.runtime.training.run import Run, Trainee

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Clip = tuple[int, int, int]
"""Width and height in pixels, frames."""

Draw = Callable[[torch.Size, torch.dtype, str], torch.Tensor]

TEXT_ROWS = 64
"""Of a long caption; the rest of 512 is padding."""

NO_WEIGHTS = Path(__file__)
"""A file that is there, where the trainer wants to be told one; nothing reads it."""


@contextmanager
def products_in_bfloat16() -> Iterator[None]:
    """In it runs on this processor compute in bfloat16 as they would on a GPU, also where float32 is faster here.

    Modes entered in it count operators and tensors of bfloat16; what multiplies the numbers is float32. A processor
    without AVX512 has no kernel for bfloat16: 11 s a product where float32 takes 0.1 s (AMD Zen 3).
    """
    with patch.object(products, "is_fast_in_bfloat16", lambda: True), _ProductsByFloat32():
        yield


class _ProductsByFloat32(TorchDispatchMode):
    """Multiplies matrices of bfloat16 in float32, and rounds what comes out."""

    products = frozenset(
        {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default,
         torch.ops.aten.bmm.default}
    )  # fmt: skip

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in self.products or args[0].dtype != torch.bfloat16:
            return function(*args, **kwargs)
        product = function(*tree_map_only(torch.Tensor, torch.Tensor.float, args), **kwargs)
        return args[0].copy_(product) if function is torch.ops.aten.addmm_.default else product.bfloat16()


def num_image_tokens(model: Model) -> int:
    """Tokens of CLIP that an item of this model brings along."""
    sees_images = any(weights.flag == "clip" for weights in model.weights)
    return sees_images * CLIP_TOKENS * (2 if model.condition == "first_and_last" else 1)


def options_of(model: Model, flags: Mapping[str, Any], device: torch.device) -> Train:
    """The flags of a run, with what presets and defaults say filled in."""
    given = {"network_dim": 32, "mixed_precision": "bf16", **flags}
    options = Train(
        dataset_config=NO_WEIGHTS, dit=NO_WEIGHTS, dit_high_noise=NO_WEIGHTS if model.experts else None,
        output_dir=NO_WEIGHTS.parent, output_name="speed", task=model.name,
        network_alpha=float(given["network_dim"]), **given,
    )  # fmt: skip
    return resolved(options, model, device)


def random_transformer(
    model: Model, dtype: torch.dtype, quantize: Any, device: torch.device, home: torch.device, draw: Draw | None = None
) -> Any:
    """A frozen transformer of a profile's sizes as the loader makes it, with random weights.

    Args:
        model: the profile.
        dtype: of what the loader does not keep in float32.
        quantize: form of the blocks' linear layers; None or `none` for none.
        device: where each layer is drawn and quantised.
        home: where it then stays.
        draw: makes a weight of a shape and dtype, by its name in its layer; the default draws.
    """
    transformer = _empty_wan(model) if model.prompt is None else _empty_qwen(model)
    in_float32 = set(transformer._keep_in_fp32_modules or ())
    generator = torch.Generator(device).manual_seed(0)
    convert = in_blocks(quantize or "none")
    for name, module in list(transformer.named_modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            wide = bool(in_float32 & {*name.split("."), key})
            stored = torch.float32 if wide else dtype
            if draw is None:
                value = _drawn(torch.empty(parameter.shape, dtype=stored, device=device), key, generator)
            else:
                value = draw(parameter.shape, stored, key)
            module.register_parameter(key, nn.Parameter(value, requires_grad=False))
        new = convert(name, module) if isinstance(module, nn.Linear) else module
        for parameter in new.parameters(recurse=False):
            parameter.data = parameter.data.to(home)
        if new is not module:
            transformer.set_submodule(name, new)
            module._parameters.clear()  # the list above still has it
    return transformer.eval()


def _empty_wan(model: Model) -> Any:
    """A Wan whose weights are on the meta device."""
    from diffusers import WanTransformer3DModel
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

    from wangen.runtime.weights.transformer import Timesteps, shield_from_autocast

    with torch.device("meta"):
        transformer = WanTransformer3DModel(**config_of(model))
    transformer.rope = WanRotaryPosEmbed(HEAD_DIM, transformer.config.patch_size, transformer.config.rope_max_seq_len)
    transformer.condition_embedder.timesteps_proj = Timesteps(FREQUENCIES)
    shield_from_autocast(transformer)
    return transformer


def _empty_qwen(model: Model) -> Any:
    """A Qwen-Image whose weights are on the meta device."""
    from diffusers import QwenImageTransformer2DModel
    from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope

    sizes = model.transformer
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel(num_layers=sizes.num_layers, num_attention_heads=sizes.num_heads)
    transformer.pos_embed = QwenEmbedRope(10000, list(transformer.config.axes_dims_rope), scale_rope=True)
    return transformer


def config_of(model: Model) -> dict[str, Any]:
    """What diffusers' transformer is made with."""
    sizes, image = model.transformer, num_image_tokens(model) > 0
    return {
        "patch_size": model.patch,
        "num_attention_heads": sizes.num_heads,
        "attention_head_dim": HEAD_DIM,
        "in_channels": sizes.in_channels,
        "out_channels": sizes.out_channels,
        "text_dim": UMT5_DIM,
        "freq_dim": FREQUENCIES,
        "ffn_dim": sizes.ffn_dim,
        "num_layers": sizes.num_layers,
        "image_dim": CLIP_DIM if image else None,
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
    """A batch as the reading threads hand it over; edits have one control image of their own size."""
    width, height, num_frames = clip
    frames = (num_frames - 1) // model.temporal_stride + 1
    step, draw = model.spatial_stride, torch.Generator().manual_seed(1)
    shape = (num_items, model.latent_channels, frames, height // step, width // step)
    latents, noise = (torch.randn(shape, generator=draw) for _ in range(2))
    given = model.transformer.in_channels - model.latent_channels
    rows, width_of_text = TEXT_ROWS, UMT5_DIM
    if model.prompt is not None:
        rows, width_of_text = TEXT_ROWS + min(1, model.max_controls) * model.prompt.picture_tokens, QWEN_TEXT_DIM
    condition = torch.randn(num_items, given, *shape[2:], generator=draw) if given else None
    images = num_items * num_image_tokens(model) // CLIP_TOKENS
    batch = Batch(
        latents=latents,
        texts=[0.1 * torch.randn(rows, width_of_text, generator=draw) for _ in range(num_items)],
        names=[f"item {number}" for number in range(num_items)],
        keys=[str(number) for number in range(num_items)],
        weights=torch.ones(num_items),
        condition=condition,
        image_tokens=torch.randn(images, CLIP_TOKENS, CLIP_DIM, generator=draw) if images else None,
        controls=[[latent] for latent in noise] if model.max_controls else None,
    )
    clean = 1 if model.condition == "text_or_image" and frames > 1 else 0
    keys = [(0, 0, key, 0) for key in batch.keys]
    prepared = Prepared(batch, keys, torch.full((num_items,), 0.5), noise, [clean] * num_items)
    return pinned(prepared) if device.type == "cuda" else prepared


def make_run(
    model: Model,
    flags: Mapping[str, Any],
    device: torch.device,
    *,
    cudnn: bool | None = None,
    draw: Draw | None = None,
    mesh: "DeviceMesh | None" = None,
    ranks: Ranks = Ranks(),  # noqa: B008 - of one process
) -> tuple[Run, Trainee]:
    """The run that a step belongs to, made by the trainer's own `load_trainee` of random weights.

    Args:
        model: the profile.
        flags: of the training step.
        device: where to train.
        cudnn: whether SDPA prefers cuDNN, told by hand; None leaves it to the trainer.
        draw: as of `random_transformer`.
        mesh: of the processes that hold parts of the blocks.
        ranks: the processes that train together.
    """
    options = options_of(model, flags, device)
    set_precision(deterministic=options.deterministic, tf32=options.cuda_allow_tf32)
    expert = ExpertPlan("", NO_WEIGHTS, None, 0.0, 1.0, 1.0, 1)
    plan = Plan(options, model, [], [], 1, (expert,), {})
    kind = cast(Family, RandomFamily(model, device, cudnn, draw))
    run = Run(plan, kind, device, [load_trainee(plan, expert, kind, device, None, mesh, ranks)], ranks)
    return run, run.activate(0)


class RandomFamily:
    """A model's family, but for its weights, which are random.

    Args:
        model: the profile.
        drawn_on: the device that draws and quantises the weights.
        cudnn: as of `make_run`.
        draw: as of `random_transformer`.
    """

    def __init__(self, model: Model, drawn_on: torch.device, cudnn: bool | None, draw: Draw | None) -> None:
        self._model, self._drawn_on, self._cudnn, self._family = model, drawn_on, cudnn, family(model)
        self._draw = draw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def load_transformer(
        self, _path: Path, *, dtype: torch.dtype, device: Any, quantize: Any, pack_on: Any = None
    ) -> Any:
        """As `Family.load_transformer`."""
        return random_transformer(self._model, dtype, quantize, self._drawn_on, torch.device(device), self._draw)

    def velocity_model(
        self, transformer: Any, compute: Compute, *, device: torch.device, dtype: torch.dtype, swap: Any = None
    ) -> VelocityModel:
        """As `Family.velocity_model`."""
        if self._cudnn is None:
            return self._family.velocity_model(transformer, compute, device=device, dtype=dtype, swap=swap)
        from wangen.runtime.fast.attention import choose_kernel
        from wangen.runtime.fast.dit import FastWan

        kernel = choose_kernel("sdpa", device, dtype)
        return FastWan(transformer, compute, replace(kernel, cudnn_first=self._cudnn), swap)
