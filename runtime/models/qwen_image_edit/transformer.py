"""Qwen-Image's transformer: checkpoints -> diffusers' `QwenImageTransformer2DModel`, and what it is called with.

Letters in shapes: B batch, C channels, h and w latents, N tokens of a picture, L tokens of text.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel

from wangen.generator.companions import CLEAN_CONTROLS
from wangen.generator.errors import WangenError
from wangen.generator.headers import has_clean_controls, read_header
from wangen.generator.kinds import expect
from wangen.generator.layouts import HEAD_DIM, QWEN_CELLS
from wangen.runtime.memory.quantize import Mode, in_blocks
from wangen.runtime.models.inputs import Controls, require_width
from wangen.runtime.weights.filling import Checkpoint, build, fill, open_checkpoint

log = logging.getLogger("wangen")

ROTARY_DIMS = (16, 56, 56)
"""How the width of a head is shared out to frame, height and width."""
SIDE = 2
"""Latent cells of a token, in each direction."""


def load_transformer(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quantize: Mode | Literal["none"] | None = None,
    pack_on: torch.device | None = None,
) -> QwenImageTransformer2DModel:
    """A transformer of Qwen-Image or its Edit models, frozen and in eval mode; its sizes are read from its tensors.

    Args:
        path: `.safetensors` (whole, any shard or the index), `.gguf`, or a diffusers folder; ComfyUI's names are those
            of diffusers, with a prefix or without.
        dtype: None keeps what the file stores, and a file that mixes precisions needs another to compute with. Linear
            weights that the file stores in 8 bits or in GGUF's blocks stay so in memory.
        device: where the weights go, tensor by tensor; `meta` compares names and shapes only.
        quantize: the form that the linear layers of the blocks get, each as soon as it is read (`memory.quantize`).
        pack_on: the device that quantises, where the weights stay on a slower one.

    Raises:
        WangenError: another kind of file, missing, surplus or misshapen tensors.
    """
    header = expect(path, "qwen-image-transformer", "--dit")
    checkpoint = open_checkpoint(path, header, transformer_names)
    clean = has_clean_controls(path, header)
    if not clean and "2511" in path.name and device != "meta":
        log.warning("  --dit %s: its name says 2511, but nothing in it or beside it does, and it is taken for 2509: "
                    "put transformer/config.json of Qwen/Qwen-Image-Edit-2511 into its folder, as config.json",
                    path)  # fmt: skip
    config = _config(checkpoint) | {"zero_cond_t": clean}
    model = build(path, lambda: QwenImageTransformer2DModel(**config))
    fill(model, checkpoint, dtype, device, convert=in_blocks(quantize, pack_on) if quantize else None)
    return model


def transformer_names(names: Iterable[str]) -> Mapping[str, str]:
    """File name -> diffusers name: all that have this model call its tensors alike."""
    return {name: name for name in names}


def original_tensor_name(name: str) -> str:
    """The official name of a transformer's tensor, which is that of diffusers."""
    return name


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The sizes of a transformer, read from its tensors.

    Raises:
        WangenError: a tensor that tells a size is missing, or the width is no multiple of the head's.
    """
    dim = checkpoint.size("img_in.weight", 0)
    if dim % HEAD_DIM:
        raise WangenError(f"a transformer {dim} wide: not a multiple of the head size {HEAD_DIM}",
                          where=str(checkpoint.path))  # fmt: skip
    return {
        "in_channels": checkpoint.size("img_in.weight", 1),
        "out_channels": checkpoint.size("proj_out.weight", 0) // QWEN_CELLS,
        "num_layers": checkpoint.num_blocks("transformer_blocks."),
        "attention_head_dim": HEAD_DIM,
        "num_attention_heads": dim // HEAD_DIM,
        "joint_attention_dim": checkpoint.size("txt_in.weight", 1),
        "axes_dims_rope": ROTARY_DIMS,
    }


def saved_tensors(parameters: Mapping[str, torch.Tensor], dit: Path) -> dict[str, torch.Tensor]:
    """A whole transformer by the names of its files, with ComfyUI's marker where it was trained from Edit 2511.

    Args:
        parameters: by their names in diffusers.
        dit: the file that it was trained from.

    Raises:
        WangenError: that file cannot be read.
    """
    marked = has_clean_controls(dit, read_header(dit, "--dit"))
    return {**parameters, CLEAN_CONTROLS: torch.zeros(0)} if marked else dict(parameters)


def predict_velocity(
    transformer: QwenImageTransformer2DModel,
    latents: torch.Tensor,
    timesteps: torch.Tensor,
    texts: Sequence[torch.Tensor],
    *,
    condition: torch.Tensor | None = None,
    image_tokens: torch.Tensor | None = None,
    controls: Controls | None = None,
) -> torch.Tensor:
    """The velocity noise - clean that the model predicts for the target's tokens.

    Items whose control images and texts have the same sizes go through the model together: it takes one set of
    positions for a batch. So nothing is padded and nothing masked.

    Args:
        transformer: from `load_transformer`, with or without adapters.
        latents: (B, C, 1, h, w), noisy.
        timesteps: (B,) in [0, 1000].
        texts: B embeddings (L, dim).
        condition: there is none in this family.
        image_tokens: there are none in this family.
        controls: for each item the latents of its control images, (C, 1, h, w) each, of any sizes.

    Returns:
        (B, C, 1, h, w) in the transformer's dtype.
    """
    assert condition is None, "not in this family"
    assert image_tokens is None, "not in this family"
    require_width(texts, transformer.config.joint_attention_dim, "Qwen2.5-VL 7B")
    given = controls or [()] * len(latents)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row, (text, pictures) in enumerate(zip(texts, given, strict=True)):
        groups.setdefault((len(text), *(picture.shape for picture in pictures)), []).append(row)
    parts = []
    for rows in groups.values():
        together = [torch.stack([given[row][number] for row in rows]) for number in range(len(given[rows[0]]))]
        text = torch.stack([texts[row] for row in rows])
        parts.append(_predicted(transformer, latents[rows], timesteps[rows], text, together))
    if len(parts) == 1:
        return parts[0]
    order = torch.tensor([row for rows in groups.values() for row in rows], device=latents.device)
    return torch.cat(parts)[order.argsort()]


def _predicted(
    transformer: QwenImageTransformer2DModel,
    latents: torch.Tensor,
    timesteps: torch.Tensor,
    texts: torch.Tensor,
    controls: Sequence[torch.Tensor],
) -> torch.Tensor:
    """One forward pass: latents (B, C, 1, h, w), texts (B, L, dim), and control images each (B, C, 1, h, w)."""
    device, dtype = latents.device, transformer.dtype
    pictures = [latents, *controls]
    shape = [(1, picture.shape[3] // SIDE, picture.shape[4] // SIDE) for picture in pictures]
    sigmas = timesteps.to(device) / 1000
    with _as_they_are(sigmas, transformer):
        tokens: torch.Tensor = transformer(
            hidden_states=torch.cat([pack(picture.to(device, dtype)) for picture in pictures], dim=1),
            timestep=sigmas,
            encoder_hidden_states=texts.to(device, dtype),
            img_shapes=[shape] * len(latents),
            return_dict=False,
        )[0]
    _, height, width = shape[0]
    return unpack(tokens[:, : height * width], height, width)


@contextlib.contextmanager
def _as_they_are(sigmas: torch.Tensor, transformer: QwenImageTransformer2DModel) -> Iterator[None]:
    """Let the library embed sigmas (B,) as they are.

    It rounds them to the tokens' dtype: in bfloat16 by up to 2 of the 1000 timesteps, a radian of the fastest sine.
    """

    def exact(_module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        rounded, *others = given
        clean = len(rounded) > len(sigmas)  # those of clean control images come behind
        return (torch.cat([sigmas, torch.zeros_like(sigmas)]) if clean else sigmas, *others)

    hook = transformer.time_text_embed.register_forward_pre_hook(exact)
    try:
        yield
    finally:
        hook.remove()


def guided(prompted: torch.Tensor, negative: torch.Tensor, scale: float) -> torch.Tensor:
    """Classifier-free guidance of velocities (B, C, 1, h, w), in which each token keeps the length it has prompted.

    As in the official pipelines, whose `true_cfg_scale` is the scale.
    """
    own, other = pack(prompted), pack(negative)
    mixed = other + scale * (own - other)
    mixed = mixed * (own.norm(dim=-1, keepdim=True) / mixed.norm(dim=-1, keepdim=True))
    return unpack(mixed, prompted.shape[3] // SIDE, prompted.shape[4] // SIDE)


def pack(latents: torch.Tensor) -> torch.Tensor:
    """(B, C, 1, h, w) -> tokens (B, N, 4C) of 2x2 cells.

    >>> pack(torch.arange(8.0).view(1, 1, 1, 2, 4)).tolist()
    [[[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]]
    """
    batch, channels, _, height, width = latents.shape
    cells = latents.reshape(batch, channels, height // SIDE, SIDE, width // SIDE, SIDE)
    return cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Tokens (B, height * width, 4C) -> (B, C, 1, h, w), the inverse of `pack`.

    >>> picture = torch.arange(24.0).view(1, 1, 1, 4, 6)
    >>> torch.equal(unpack(pack(picture), 2, 3), picture)
    True
    """
    cells = tokens.reshape(len(tokens), height, width, -1, SIDE, SIDE)
    return cells.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3).unsqueeze(2)
