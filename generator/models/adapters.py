"""What a LoRA file says of itself: rank, modules, whose names it uses, and which transformers it could belong to."""

import math
import re
import struct
from collections import Counter
from dataclasses import dataclass

from wangen import profiles
from wangen.generator.errors import many
from wangen.generator.formats import Header, TensorInfo

LAYOUTS = {
    "lora_unet_": "kohya (musubi-tuner)",
    "base_model.model.": "peft",
    "model.diffusion_model.": "ComfyUI",
    "diffusion_model.": "ComfyUI",
    "transformer.": "diffusers",
}
"""The beginning of a tensor's name -> whose layout it is."""

_FACTOR = re.compile(r"(?P<module>.+?)\.lora_(?P<side>A|B|down|up)(\.default)?(\.weight)?")
_BLOCK = re.compile(r"(?:^|[._])blocks[._](\d+)[._]")
_QUERY = re.compile(r"self_attn[._]q|attn1[._]to_q")
_IMAGE = re.compile(r"[kv]_img|add_[kv]_proj")
_FORMATS = {"F64": "<d", "F32": "<f", "F16": "<e"}


@dataclass(frozen=True)
class Adapter:
    """The facts of a LoRA.

    Attributes:
        num_modules: how many layers it changes.
        ranks: rank -> number of modules.
        alphas: the alphas that are stored, each once; empty where they are not.
        layout: whose names its tensors have.
        num_blocks: transformer blocks that it changes.
        dim: width of the transformer it belongs to; 0 when the query layers are not among its modules.
        has_image_branch: it changes the layers for the CLIP features, which only Wan 2.1 I2V and FLF2V have.
        fits: the model profiles whose transformer has these sizes.
    """

    num_modules: int
    ranks: dict[int, int]
    alphas: tuple[float, ...]
    layout: str
    num_blocks: int
    dim: int
    has_image_branch: bool
    fits: tuple[str, ...]

    def lines(self) -> list[str]:
        """The facts for people, one a line."""
        ranks = ", ".join(map(str, sorted(self.ranks))) or "unknown"
        alphas = ", ".join(f"{alpha:g}" for alpha in self.alphas)
        image = " with the image branch" if self.has_image_branch else ""
        of = f"a transformer of {many(self.num_blocks, 'block')}{image}" + (f", {self.dim} wide" if self.dim else "")
        return [
            f"rank {ranks}, " + (f"alpha {alphas}" if alphas else "no alpha stored"),
            f"changes {many(self.num_modules, 'module')} of {of}",
            f"base: {', '.join(self.fits) or 'no model that is known'}",
        ]


def adapter_of(header: Header) -> Adapter:
    """The facts of a LoRA, from its header and, for the alphas, from a few bytes of its tensors."""
    downs: dict[str, TensorInfo] = {}
    modules: set[str] = set()
    for name, info in header.tensors.items():
        if match := _FACTOR.fullmatch(name):
            modules.add(match["module"])
            if match["side"] in ("A", "down"):
                downs[match["module"]] = info
    shapes = {name: info.shape for name, info in downs.items() if len(info.shape) >= 2}
    widths = {shape[1] for name, shape in shapes.items() if _QUERY.search(name)}
    dim = widths.pop() if len(widths) == 1 else 0
    blocks = {int(match[1]) for name in modules if (match := _BLOCK.search(name))}
    image = any(map(_IMAGE.search, modules))
    starts = Counter(_layout(name) for name in modules)
    return Adapter(
        num_modules=len(modules),
        ranks=dict(Counter(shape[0] for shape in shapes.values())),
        alphas=_alphas(header),
        layout=" and ".join(sorted(starts)),
        num_blocks=len(blocks),
        dim=dim,
        has_image_branch=image,
        fits=_fits(dim, max(blocks, default=-1) + 1, image),
    )


def _layout(name: str) -> str:
    return next((layout for start, layout in LAYOUTS.items() if name.startswith(start)), "names without prefix")


def _fits(dim: int, num_blocks: int, image: bool) -> tuple[str, ...]:
    """Profiles of this width that have these blocks; one without the image branch fits models that have it, too."""
    known = map(profiles.model, profiles.model_names())
    return tuple(
        model.name
        for model in known
        if model.transformer.dim == dim and num_blocks <= model.transformer.num_layers
        if not image or any(weights.flag == "clip" for weights in model.weights)
    )


def _alphas(header: Header) -> tuple[float, ...]:
    found = set()
    for name, info in header.tensors.items():
        if name.endswith(".alpha") and math.prod(info.shape) == 1 and (value := _scalar(info)) is not None:
            found.add(value)
    return tuple(sorted(found))


def _scalar(info: TensorInfo) -> float | None:
    """The one number of a tensor; None for a type that alphas do not have, and where it cannot be read."""
    if info.place is None or info.dtype not in (*_FORMATS, "BF16"):
        return None
    try:
        with info.place.file.open("rb") as file:
            file.seek(info.place.offset)
            data = file.read(info.place.num_bytes)
    except OSError:
        return None
    if info.dtype == "BF16":
        data, number_format = b"\0\0" + data, "<f"
    else:
        number_format = _FORMATS[info.dtype]
    if len(data) != struct.calcsize(number_format):
        return None
    value: float = struct.unpack(number_format, data)[0]
    return value
