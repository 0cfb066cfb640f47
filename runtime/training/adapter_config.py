"""Which adapter is trained: what the flags say of it, which layers carry it, and what no adapter can have.

All of it is known from the flags and from the headers of files, before a model loads.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from itertools import repeat
from pathlib import Path
from statistics import mode

from wangen import profiles
from wangen.generator.adapter_parts import HADAMARD
from wangen.generator.adapter_settings import AdapterSettings, compiled, settings_of_flags
from wangen.generator.companions import sort_out
from wangen.generator.errors import UsageError
from wangen.generator.formats import Header, TensorInfo
from wangen.generator.lora_keys import module_name, original_name
from wangen.generator.steps import Train
from wangen.runtime.adapters import AdapterWeight, read_scales
from wangen.runtime.libraries import factorization

PRESETS = {
    "all": r".",
    "attention": r"\.attn[12]?\.",
    "self_attention": r"\.attn1\.",
    "cross_attention": r"\.attn2\.",
    "ffn": r"\.(ffn|(img|txt)_mlp)\.",
    "all_linear": r"blocks\.",
}
"""`--lora_targets` -> what a layer's name holds, of those that the model profile names; with `all_linear` of all.

In Qwen-Image's blocks text and picture look at both at once, so neither self- nor cross-attention is there alone.
"""

NUM_NEAREST = 3
_BLOCK = re.compile(r"^(transformer_)?blocks\.\d+\.")


def adapter_settings(options: Train, expert: str = "") -> AdapterSettings:
    """What the flags say of the adapter.

    Args:
        options: the flags.
        expert: `high_noise` starts from `--network_weights_high_noise`, everything else from `--network_weights`.

    Raises:
        UsageError: as for `settings_of_flags`, or there is no adapter to take the rank from.
        WangenError: with `--dim_from_weights` the file cannot be read.
    """
    found = settings_of_flags(options, expert)
    if options.dim_from_weights:
        if found.start is None:
            raise UsageError("--dim_from_weights takes rank and alpha from an adapter to start from",
                             cure=f"give {start_flag(expert)}, or leave it out")  # fmt: skip
        found = _with_ranks_of(found, found.start, start_flag(expert))
    return found


def merged(options: Train) -> list[tuple[Path, float]]:
    """The adapters of `--base_weights`, and how strongly each is added to the base."""
    return list(zip(options.base_weights, options.base_weights_multiplier or repeat(1.0), strict=False))


def start_flag(expert: str) -> str:
    """The flag of the adapter that an expert starts from."""
    return "--network_weights_high_noise" if expert == "high_noise" else "--network_weights"


def changeable_weights(header: Header) -> dict[str, TensorInfo]:
    """The weights of a transformer's file that an adapter can change, by the modules' names in diffusers."""
    named = {name.removesuffix(".weight"): info for name, info in sort_out(header).weights.items()
             if name.endswith(".weight")}  # fmt: skip
    return {module: info for name, info in named.items() if (module := module_name(name)) is not None}


def linear_modules(weights: Mapping[str, TensorInfo]) -> list[str]:
    """The linear layers among `changeable_weights`, by their names in diffusers, sorted."""
    return sorted(module for module, info in weights.items() if len(info.shape) == 2)


def factor_shapes(chosen: AdapterSettings, module: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the factors that peft makes for a linear layer of (rows, columns), by the names in `FACTORS`."""
    rank = chosen.ranks.get(module, chosen.rank)
    if chosen.kind == "lora":
        return {"down": (rank, columns), "up": (rows, rank)}
    if chosen.kind == "loha":
        return {name: (rows, rank) if name.endswith("a") else (rank, columns) for name in HADAMARD}
    tops, lefts = (factorization(size, chosen.factor) for size in (rows, columns))
    shapes: dict[str, tuple[int, ...]] = {}
    for number, (top, left) in enumerate(zip(tops, lefts, strict=True), 1):
        matrix = f"lokr_w{number}"
        if rank < max(top, left) / 2 and (number == 2 or chosen.decompose_both):
            shapes |= {f"{matrix}_a": (top, rank), f"{matrix}_b": (rank, left)}
        else:
            shapes[matrix] = (top, left)
    return shapes


def select_modules(names: Iterable[str], options: Train, model: profiles.Model, expert: str = "") -> list[str]:
    """The layers that get an adapter.

    Patterns are searched for in a layer's name in diffusers and in its official name; a layer is taken when one of the
    include patterns finds it, or none is given, and no exclude pattern does. Where `--network_args` has both kinds, its
    include patterns take back what its exclude patterns took, and restrict nothing, as in musubi-tuner.

    Args:
        names: the linear layers of the transformer, by their names in diffusers.
        options: `--lora_targets` and the patterns.
        model: whose layers usually get one.
        expert: as for `adapter_settings`.

    Returns:
        In the order given, at least one.

    Raises:
        UsageError: a pattern finds none of these layers, or together they leave none.
    """
    chosen = adapter_settings(options, expert)
    usual = re.compile(".*" if options.lora_targets == "all_linear" else model.lora_targets)
    preset = re.compile(PRESETS[options.lora_targets])
    listed = [name for name in names if usual.fullmatch(name) and preset.search(name)]
    if not listed:
        raise UsageError(f"no layer of this transformer is among the targets of --lora_targets {options.lora_targets}",
                         cure="give another, all for example, or the right --task")  # fmt: skip
    include = [_found_by(pattern, listed, "--include_patterns") for pattern in chosen.include]
    exclude = [_found_by(pattern, listed, "--exclude_patterns") for pattern in chosen.exclude]
    spared = [_found_by(pattern, listed, "--network_args include_patterns=") for pattern in chosen.spared]
    kept = set(listed).intersection(set().union(*include) if include else listed)
    kept -= set().union(*exclude) - set().union(*spared)
    if not kept:
        given = " and ".join([*(["--include_patterns"] if include else []), "--exclude_patterns"])
        raise UsageError(f"{given}: no layer is left to train", cure="leave --exclude_patterns out, or exclude less")
    return [name for name in listed if name in kept]


def _found_by(pattern: str, names: Sequence[str], flag: str) -> set[str]:
    """The names that a pattern finds; at least one."""
    wanted = compiled(pattern)
    found = {name for name in names if wanted.search(name) or wanted.search(original_name(name))}
    if found:
        return found
    short = dict.fromkeys(_BLOCK.sub("", form) for name in names for form in (name, original_name(name)))
    plain = re.sub(r"\\(.)", r"\1", pattern).replace(".*", "").strip("^$")
    nearest = get_close_matches(_BLOCK.sub("", plain), short, NUM_NEAREST, 0.0)
    raise UsageError(f"{flag} {pattern!r} finds no layer that would be trained",
                     cure=f"the nearest are {', '.join(nearest)}")  # fmt: skip


def same_factors(weight: AdapterWeight, chosen: AdapterSettings) -> str:
    """The cure for an adapter of the right rank whose factors have other sizes than those that are trained."""
    if weight.kind == "loha":
        return "start from a LoHa whose two products have one rank, or merge it (--base_weights) and train a new one"
    if "lokr_w1_a" in weight.factors and not chosen.decompose_both:
        return "give --network_args decompose_both=true, as it was trained with"
    return ("give the --network_dim and --lokr_factor that it was trained with; if they are given, it shared out the "
            "sizes in another way, and can be merged (--base_weights), not trained on")  # fmt: skip


@cache
def _scales_of(start: Path, flag: str) -> dict[str, tuple[int, float]]:
    """`read_scales`, once in a process: whoever removes the file does not stop the run that began with it."""
    return read_scales(start, flag)


def _with_ranks_of(found: AdapterSettings, start: Path, flag: str) -> AdapterSettings:
    """The settings with the ranks and alphas of an adapter's file."""
    scales = _scales_of(start, flag)
    if any(not rank for rank, _ in scales.values()):
        raise UsageError("--dim_from_weights: the whole matrices of this LoKr have no rank", where=str(start),
                         cure="give the --network_dim and --lokr_factor that it was trained with")  # fmt: skip
    ranks = {module: rank for module, (rank, _) in scales.items()}
    # What begins with a scale of nothing has the usual one from here on, and a first factor of zeros.
    alphas = {
        module: (scale or 1.0) * (math.sqrt(rank) if found.rslora else rank) for module, (rank, scale) in scales.items()
    }
    rank, alpha = (mode(each.values()) for each in (ranks, alphas))
    return replace(
        found,
        rank=int(rank),
        alpha=float(alpha),
        ranks={module: value for module, value in ranks.items() if value != rank},
        alphas={module: value for module, value in alphas.items() if value != alpha},
    )
