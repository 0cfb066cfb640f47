"""The tensors of a checkpoint that are no weights: scales of 8-bit weights, markers, a tokenizer carried along.

    ComfyUI, Kijai     X.weight (fp8)  X.scale_weight  [X.scale_input]          and one scaled_fp8 for the whole file
    ComfyUI, later     X.weight (fp8)  X.weight_scale  [X.input_scale]  X.comfy_quant (its format, as JSON)
    musubi-tuner       X.weight (fp8)  X.scale_weight of one number, one per row, or one per block of a row

The weight itself is `scale * stored`. Scales of the activations belong to matrix products in 8 bits, which are not
used here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from wangen.generator.errors import WangenError
from wangen.generator.formats import Header, TensorInfo

TRANSFORMER_PREFIX = "model.diffusion_model."
PREFIXES = (
    TRANSFORMER_PREFIX,
    "diffusion_model.",
    "first_stage_model.",
    "vae.",
    "text_encoders.umt5xxl.transformer.",
    "text_encoders.umt5xxl.",
    "cond_stage_model.",
)
"""What repacked files put before every name."""

# The end of a companion's name -> its role; `X.` stands for `X.weight`.
ROLES = {
    "scale_weight": "scale",
    "weight_scale": "scale",
    "scale_input": "input_scale",
    "input_scale": "input_scale",
    "comfy_quant": "format",
    "weight_scale_2": "second_scale",
}
CLEAN_CONTROLS = "__index_timestep_zero__"
"""The tensor by which ComfyUI's files of Qwen-Image-Edit 2511 say that control images have timestep 0."""
MARKERS = ("scaled_fp8", "model_type.", CLEAN_CONTROLS)
"""The beginnings of names whose tensors only mark a file: as 8-bit, or as the one of several models."""
CARRIED_TOKENIZER = "spiece_model"


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint by what they are.

    Attributes:
        weights: by the name without prefix.
        companions: weight name -> role -> tensor.
        tokenizer: a SentencePiece model that the file carries as bytes, or None.
        names: weight name -> the file's own name.
        scale_names: weight name -> the file's own name of its scale.
    """

    weights: Mapping[str, TensorInfo]
    companions: Mapping[str, Mapping[str, TensorInfo]]
    tokenizer: TensorInfo | None
    names: Mapping[str, str]
    scale_names: Mapping[str, str]


def sort_out(header: Header) -> Contents:
    """Tell weights from what accompanies them.

    Raises:
        WangenError: two tensors mean the same: they differ in their prefix, or in how a scale is spelled.
    """
    weights: dict[str, TensorInfo] = {}
    companions: dict[str, dict[str, TensorInfo]] = {}
    names: dict[str, str] = {}
    scale_names: dict[str, str] = {}
    tokenizer = None
    for name, info in header.tensors.items():
        bare = strip_prefix(name)
        stem, _, end = bare.rpartition(".")
        if end in ROLES and stem:
            companions.setdefault(f"{stem}.weight", {})[ROLES[end]] = info
            if ROLES[end] == "scale" and scale_names.setdefault(f"{stem}.weight", name) != name:
                raise _twice(f"scale of {stem}.weight", scale_names[f"{stem}.weight"], name, info)
        elif bare == CARRIED_TOKENIZER and info.dtype == "U8":
            tokenizer = info
        elif not bare.startswith(MARKERS):
            if bare in weights:
                raise _twice("weight", names[bare], name, info)
            weights[bare] = info
            names[bare] = name
    return Contents(weights, companions, tokenizer, names, scale_names)


def _twice(what: str, first: str, second: str, info: TensorInfo) -> WangenError:
    return WangenError(f"two tensors of this file mean the same {what} ({first} and {second})",
                       where=info.file,
                       cure="get the file in another form: this one was put together from two")  # fmt: skip


def strip_prefix(name: str) -> str:
    """A tensor's name without the prefix of a repacked file.

    >>> strip_prefix("model.diffusion_model.head.head.bias")
    'head.head.bias'
    """
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name
