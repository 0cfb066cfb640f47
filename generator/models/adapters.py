"""What an adapter's file says of itself: kind, ranks, alphas, modules, whose names it uses, which transformers it fits.

No weight is read, only alphas, which are tensors of one number.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wangen import profiles
from wangen.generator.adapter_parts import (
    WORDS,
    adapter_modules,
    in_features_of,
    is_dora_of_parts,
    kind_of_parts,
    rank_of,
    unfit_adapter,
    unfit_lora,
)
from wangen.generator.errors import many
from wangen.generator.formats import Header, TensorInfo
from wangen.generator.formats.raw import read_scalar
from wangen.generator.lora_config import Alphas, read_alphas
from wangen.generator.lora_keys import layout_of

_BLOCK = re.compile(r"(?P<list>(?:transformer_)?blocks)\.(?P<number>\d+)\.")
_QUERY = re.compile(r"blocks\.\d+\.attn[12]\.to_q|transformer_blocks\.\d+\.attn\.to_q")
_IMAGE = re.compile(r"blocks\.\d+\.attn2\.add_[kv]_proj|condition_embedder\.image_embedder\..+")


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
class AdapterFacts:
    """The facts of a LoRA, DoRA, LoHa or LoKr.

    Attributes:
        kind: `LoRA`, `DoRA`, `LoHa` or `LoKr`.
        layout: whose names its tensors have, as `lora_keys.layout_of` says it.
        groups: its modules.
        num_blocks: transformer blocks that it changes.
        dim: width of the transformer it belongs to; 0 when the query layers are not among its modules.
        has_image_branch: it changes the layers for the CLIP features, which only Wan 2.1 I2V and FLF2V have.
        fits: the model profiles whose transformer has these sizes; none of a file that is refused.
        unfit: why the file is refused, as `unfit_lora` and `unfit_adapter` say it; empty for a LoRA that can be used.
    """

    kind: str
    layout: str
    groups: tuple[Group, ...]
    num_blocks: int
    dim: int
    has_image_branch: bool
    fits: tuple[str, ...]
    unfit: str

    @property
    def num_modules(self) -> int:
        """How many layers it changes."""
        return sum(sum(group.modules.values()) for group in self.groups)

    def lines(self) -> list[str]:
        """The facts for people, one a line."""
        ranks = ", ".join(map(str, sorted({group.rank for group in self.groups if group.rank}))) or "unknown"
        alphas = sorted({group.alpha for group in self.groups if group.alpha is not None})
        alpha = f"alpha {', '.join(f'{alpha:g}' for alpha in alphas)}" if alphas else "no alpha stored"
        image = " with the image branch" if self.has_image_branch else ""
        of = f"a transformer of {many(self.num_blocks, 'block')}{image}" + (f", {self.dim} wide" if self.dim else "")
        merging = [] if self.kind == "LoRA" or self.unfit else [
            "can be trained from, sampled with and converted; only a plain LoRA can be merged into a checkpoint"
        ]  # fmt: skip
        return [
            f"rank {ranks}, {alpha}",
            f"changes {many(self.num_modules, 'module')} of {of}",
            f"cannot be used: {self.unfit}"
            if self.unfit
            else f"base: {', '.join(self.fits) or 'no model that is known'}",
            *merging,
        ]

    def fields(self) -> dict[str, Any]:
        """The facts for programs."""
        return {
            "kind": self.kind,
            "layout": self.layout,
            "num_modules": self.num_modules,
            "num_blocks": self.num_blocks,
            "dim": self.dim,
            "image_branch": self.has_image_branch,
            "fits": self.fits,
            "adapters": [vars(group) for group in self.groups],
            **({"unfit": self.unfit} if self.unfit else {}),
        }


def describe_lora(file: Path, header: Header) -> AdapterFacts:
    """The facts of an adapter.

    Args:
        file: where it is; the configuration that peft wrote beside it is read as well.
        header: of the file.

    Raises:
        WangenError: an alpha or the configuration cannot be read, or the latter is of more than such an adapter.
    """
    modules = adapter_modules(header.tensors)
    parts = next(iter(modules.values()), {})
    kind, dora = kind_of_parts(parts), is_dora_of_parts(parts)
    plain = kind == "lora" and not dora
    problem = (unfit_lora if plain else unfit_adapter)(header.tensors)
    # What a configuration says of another adapter is not needed to describe the file.
    alphas = Alphas() if problem else read_alphas(file, header.metadata, modules, kind=kind, dora=dora)
    widths = {width for name, parts in modules.items() if _QUERY.fullmatch(name) and (width := in_features_of(parts))}
    dim = widths.pop() if len(widths) == 1 else 0
    blocks = {int(match["number"]) for name in modules if (match := _BLOCK.match(name))}
    image = any(map(_IMAGE.fullmatch, modules))
    return AdapterFacts(
        kind="DoRA" if dora else WORDS[kind],
        layout=layout_of(header.tensors),
        groups=_groups(modules, alphas),
        num_blocks=len(blocks),
        dim=dim,
        has_image_branch=image,
        fits=() if problem else _fits(dim, max(blocks, default=-1) + 1, image, modules),
        unfit=problem,
    )


def _groups(modules: Mapping[str, Mapping[str, TensorInfo]], alphas: Alphas) -> tuple[Group, ...]:
    found: dict[tuple[int | None, float | None], Counter[str]] = {}
    configured = alphas.default is not None or alphas.patterns
    for module, parts in modules.items():
        rank = rank_of(parts) or None
        alpha = alphas.of(module, rank) if rank and configured else None
        if "alpha" in parts and rank:
            alpha = read_scalar(parts["alpha"])
        name = _BLOCK.sub(r"\g<list>.*.", module, count=1)
        found.setdefault((rank, alpha), Counter())[name] += 1
    return tuple(Group(rank, alpha, dict(sorted(names.items()))) for (rank, alpha), names in found.items())


def _fits(dim: int, num_blocks: int, image: bool, modules: Iterable[str]) -> tuple[str, ...]:
    """Profiles of this width that have these blocks; one without the image branch fits models that have it, too."""
    known, listed = map(profiles.model, profiles.model_names()), list(modules)
    return tuple(
        model.name
        for model in known
        if any(re.fullmatch(model.lora_targets, module) for module in listed)
        if model.transformer.dim == dim and num_blocks <= model.transformer.num_layers
        if not image or model.has_clip
    )
