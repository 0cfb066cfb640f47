"""The CLIP vision tower of Wan 2.1 image-to-video -> transformers' `CLIPVisionModel`.

Letters in shapes: B batch, H and W pixels, P patches.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

from wangen.generator.errors import WangenError
from wangen.generator.formats import Header, TensorInfo, rows
from wangen.generator.kinds import expect
from wangen.runtime.weights.filling import OTHER_FILE, build, fill, open_checkpoint

# Mean and standard deviation of CLIP's training pictures by channel, in [0, 1], as in openai/CLIP.
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)
NUM_HEADS = 16
"""Of ViT-H/14. The number of heads leaves no trace in the tensors."""
MAX_PATCHES = 10_000
"""ViT-H/14 has 256."""

# Names after the prefix that the official files and those of Hugging Face may have.
OFFICIAL_NAMES = {
    "cls_embedding": "embeddings.class_embedding",
    "pos_embedding": "embeddings.position_embedding.weight",
    "patch_embedding": "embeddings.patch_embedding",
    "pre_norm": "pre_layrnorm",
    "post_norm": "post_layernorm",
}
BLOCK_NAMES = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.proj": "self_attn.out_proj",
    "mlp.0": "mlp.fc1",
    "mlp.2": "mlp.fc2",
}
BLOCK = re.compile(r"transformer\.(?P<number>\d+)\.(?P<rest>.+)\.(?P<kind>weight|bias)")
NOT_NEEDED = ("textual.", "log_scale", "head", "visual_projection.", "text_model.", "text_projection.", "logit_scale")


def load_image_encoder(
    path: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", num_heads: int = NUM_HEADS
) -> CLIPVisionModel:
    """The vision tower of open-clip's xlm-roberta ViT-H/14, frozen and in eval mode.

    Args:
        path: `models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth` or its safetensors form (only `visual.*` is
            read), ComfyUI's `clip_vision_h.safetensors`, or the `image_encoder` folder of a pipeline.
        dtype: None keeps what the file stores (float16 in the official one).
        device: where the weights go; `meta` compares names and shapes only.
        num_heads: attention heads of a model that is not ViT-H.

    Raises:
        WangenError: another kind of file, missing, surplus or misshapen tensors.
    """
    header = expect(path, "open-clip", "--clip")
    checkpoint = open_checkpoint(path, split_attention(header), clip_names)
    patch = checkpoint.size("embeddings.patch_embedding.weight", 2)
    num_patches = checkpoint.size("embeddings.position_embedding.weight", 0) - 1
    hidden_size = checkpoint.size("embeddings.patch_embedding.weight", 0)
    if hidden_size % num_heads or num_patches > MAX_PATCHES:
        raise WangenError(f"a CLIP encoder {hidden_size} wide for {num_patches} patches, which is none of Wan's",
                          where=str(path), cure=OTHER_FILE)  # fmt: skip
    config = CLIPVisionConfig(
        hidden_size=hidden_size,
        intermediate_size=checkpoint.size("encoder.layers.0.mlp.fc1.weight", 0),
        num_hidden_layers=checkpoint.num_blocks("encoder.layers."),
        num_attention_heads=num_heads,
        image_size=patch * math.isqrt(max(0, num_patches)),
        patch_size=patch,
        hidden_act="gelu",
    )
    model = build(path, lambda: CLIPVisionModel(config))
    # Counted, not stored: on the meta device they would have no values.
    model.embeddings.position_ids = torch.arange(num_patches + 1)[None]
    fill(model, checkpoint, dtype, device)
    return model


@torch.no_grad()
def encode_images(image_encoder: CLIPVisionModel, images: torch.Tensor) -> torch.Tensor:
    """What Wan 2.1 sees of an image: the tokens before CLIP's last block, without the final norm.

    Args:
        image_encoder: from `load_image_encoder`.
        images: (B, 3, H, W) in [-1, 1], of any size.

    Returns:
        (B, 1 + P, hidden_size) in the encoder's dtype: the class token, then 16 x 16 patches for ViT-H.
    """
    pixels = clip_pixels(images, image_encoder.config.image_size).to(image_encoder.device, image_encoder.dtype)
    tokens: torch.Tensor = image_encoder(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
    return tokens


def clip_pixels(images: torch.Tensor, size_px: int) -> torch.Tensor:
    """Images as Wan's code gives them to CLIP: squeezed into a square, bicubic without antialiasing, normalised.

    transformers' `CLIPImageProcessor` crops and antialiases, which changes more than half of the result.

    Args:
        images: (B, 3, H, W) in [-1, 1].
        size_px: side of the square.

    Returns:
        (B, 3, size_px, size_px) in float32.
    """
    small = torch.nn.functional.interpolate(images.float(), size=(size_px, size_px), mode="bicubic")
    mean = torch.tensor(PIXEL_MEAN, device=small.device).view(1, 3, 1, 1)
    std = torch.tensor(PIXEL_STD, device=small.device).view(1, 3, 1, 1)
    return (small * 0.5 + 0.5 - mean) / std


def clip_names(names: Iterable[str]) -> Mapping[str, str]:
    """File name -> transformers name, for the official names (after `split_attention`) and those of transformers."""
    renamed = {}
    for name in names:
        bare = name.removeprefix("visual.").removeprefix("vision_model.")
        if bare.startswith(NOT_NEEDED) or bare.endswith("position_ids"):
            continue
        stem, _, kind = bare.rpartition(".")
        if bare in OFFICIAL_NAMES:
            renamed[name] = OFFICIAL_NAMES[bare]
        elif stem in OFFICIAL_NAMES:
            renamed[name] = f"{OFFICIAL_NAMES[stem]}.{kind}"
        elif match := BLOCK.fullmatch(bare):
            rest = BLOCK_NAMES.get(match["rest"], match["rest"])
            renamed[name] = f"encoder.layers.{match['number']}.{rest}.{match['kind']}"
        else:
            renamed[name] = bare
    return renamed


def split_attention(header: Header) -> Header:
    """The header with each `attn.to_qkv` taken apart into its three projections, and without leading axes of one.

    It tells other places of the same file: no tensor is read for it.
    """
    tensors: dict[str, TensorInfo] = {}
    for name, info in header.tensors.items():
        if ".attn.to_qkv." in name:
            num_rows = info.shape[0] // 3 if info.shape else 0
            # A scale may be one number for all rows, and a format is a text.
            shared = num_rows == 0 or (info.dtype == "U8" and not name.endswith((".weight", ".bias")))
            for number, part in enumerate("qkv"):
                new = name.replace("attn.to_qkv", f"self_attn.{part}_proj")
                tensors[new] = info if shared else rows(info, number * num_rows, (number + 1) * num_rows)
        elif name.endswith(("cls_embedding", "pos_embedding")):
            shape = info.shape[-1:] if name.endswith("cls_embedding") else info.shape[-2:]
            tensors[name] = replace(info, shape=shape)
        else:
            tensors[name] = info
    return replace(header, tensors=tensors)
