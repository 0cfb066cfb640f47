"""What a LoRA file says of itself: ranks, alphas, modules, whose names it uses, and which transformers it could be for.

No weight is read, only alphas, which are tensors of one number.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wangen import profiles
from wangen.generator.errors import many
from wangen.generator.formats import Header, TensorInfo
from wangen.generator.formats.raw import read_scalar
from wangen.generator.lora_config import Alphas, read_alphas
from wangen.generator.lora_keys import Part, foreign, layout_of, parse_key

_BLOCK = re.compile(r"blocks\.(?P<number>\d+)\.")
_QUERY = re.compile(r"blocks\.\d+\.attn[12]\.to_q")
_IMAGE = re.compile(r".+\.add_[kv]_proj|condition_embedder\.image_embedder\..+")


@dataclass(frozen=True)
class Group:
    """Modules of a LoRA with the same rank and alpha.

    Attributes:
        rank: the inner size of the factors; None where one is missing.
        alpha: as stored or configured; None where nothing says it, and the rank counts.
        modules: their names, with `*` for the block's number -> how many.
    """

    rank: int | None
    alpha: float | None
    modules: Mapping[str, int]


@dataclass(frozen=True)
class Adapter:
    """The facts of a LoRA.

    Attributes:
        layout: whose names its tensors have, as `lora_keys.layout_of` says it.
        groups: its modules.
        num_blocks: transformer blocks that it changes.
        dim: width of the transformer it belongs to; 0 when the query layers are not among its modules.
        has_image_branch: it changes the layers for the CLIP features, which only Wan 2.1 I2V and FLF2V have.
        fits: the model profiles whose transformer has these sizes.
        strange: the keys that no plain LoRA of a Wan transformer has.
    """

    layout: str
    groups: tuple[Group, ...]
    num_blocks: int
    dim: int
    has_image_branch: bool
    fits: tuple[str, ...]
    strange: tuple[str, ...]

    @property
    def num_modules(self) -> int:
        """How many layers it changes."""
        return sum(sum(group.modules.values()) for group in self.groups)

    @property
    def about_strange(self) -> str:
        """What the keys that are not understood make of the file."""
        return next(filter(None, map(foreign, self.strange)), "keys of an unknown kind")

    def lines(self) -> list[str]:
        """The facts for people, one a line."""
        ranks = ", ".join(map(str, sorted({group.rank for group in self.groups if group.rank}))) or "unknown"
        alphas = sorted({group.alpha for group in self.groups if group.alpha is not None})
        alpha = f"alpha {', '.join(f'{alpha:g}' for alpha in alphas)}" if alphas else "no alpha stored"
        image = " with the image branch" if self.has_image_branch else ""
        of = f"a transformer of {many(self.num_blocks, 'block')}{image}" + (f", {self.dim} wide" if self.dim else "")
        return [
            f"rank {ranks}, {alpha}",
            f"changes {many(self.num_modules, 'module')} of {of}",
            f"base: {', '.join(self.fits) or 'no model that is known'}",
            *([f"{many(len(self.strange), 'key')} not understood: {self.about_strange}"] if self.strange else []),
        ]

    def fields(self) -> dict[str, Any]:
        """The facts for programs."""
        strange = {"what": self.about_strange, "keys": len(self.strange), "such_as": self.strange[:3]}
        return {
            "layout": self.layout,
            "num_modules": self.num_modules,
            "num_blocks": self.num_blocks,
            "dim": self.dim,
            "image_branch": self.has_image_branch,
            "fits": self.fits,
            "adapters": [vars(group) for group in self.groups],
            **({"not_understood": strange} if self.strange else {}),
        }


def describe_lora(file: Path, header: Header) -> Adapter:
    """The facts of a LoRA.

    Args:
        file: where it is; the configuration that peft wrote beside it is read as well.
        header: of the file.

    Raises:
        WangenError: an alpha or the configuration cannot be read, or the latter is of more than a LoRA.
    """
    modules: dict[str, dict[Part, TensorInfo]] = {}
    strange: list[str] = []
    for key, info in header.tensors.items():
        if parsed := parse_key(key):
            modules.setdefault(parsed.module, {})[parsed.part] = info
        else:
            strange.append(key)
    # What a configuration says of another adapter than a LoRA is not needed to describe the file.
    alphas = Alphas() if strange else read_alphas(file, header.metadata, modules)
    shapes = {name: parts["down"].shape for name, parts in modules.items() if "down" in parts}
    widths = {shape[1] for name, shape in shapes.items() if _QUERY.fullmatch(name) and len(shape) > 1}
    dim = widths.pop() if len(widths) == 1 else 0
    blocks = {int(match["number"]) for name in modules if (match := _BLOCK.match(name))}
    image = any(map(_IMAGE.fullmatch, modules))
    return Adapter(
        layout=layout_of(header.tensors),
        groups=_groups(modules, alphas),
        num_blocks=len(blocks),
        dim=dim,
        has_image_branch=image,
        fits=_fits(dim, max(blocks, default=-1) + 1, image),
        strange=tuple(sorted(strange)),
    )


def _groups(modules: Mapping[str, Mapping[Part, TensorInfo]], alphas: Alphas) -> tuple[Group, ...]:
    found: dict[tuple[int | None, float | None], Counter[str]] = {}
    configured = alphas.default is not None or alphas.patterns
    for module, parts in modules.items():
        shape = parts["down"].shape if "down" in parts else ()
        rank = shape[0] if shape else None
        alpha = alphas.of(module, rank) if rank and configured else None
        if "alpha" in parts:
            alpha = read_scalar(parts["alpha"])
        name = _BLOCK.sub("blocks.*.", module, count=1)
        found.setdefault((rank, alpha), Counter())[name] += 1
    return tuple(Group(rank, alpha, dict(sorted(names.items()))) for (rank, alpha), names in found.items())


def _fits(dim: int, num_blocks: int, image: bool) -> tuple[str, ...]:
    """Profiles of this width that have these blocks; one without the image branch fits models that have it, too."""
    known = map(profiles.model, profiles.model_names())
    return tuple(
        model.name
        for model in known
        if model.transformer.dim == dim and num_blocks <= model.transformer.num_layers
        if not image or any(weights.flag == "clip" for weights in model.weights)
    )
