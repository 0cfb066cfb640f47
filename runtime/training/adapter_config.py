"""Which adapter is trained: what the flags say of it, which layers carry it, and what no adapter can have.

All of it is known from the flags and from the headers of files, before a model loads.
"""

import ast
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from wangen import profiles
from wangen.generator.adapter_parts import HADAMARD
from wangen.generator.companions import sort_out
from wangen.generator.errors import UsageError
from wangen.generator.formats import Header, TensorInfo
from wangen.generator.lora_keys import AdapterKind, module_name, original_name
from wangen.generator.steps import Train
from wangen.runtime.libraries import factorization

PRESETS = {
    "all": r".",
    "attention": r"\.attn[12]?\.",
    "self_attention": r"\.attn1\.",
    "cross_attention": r"\.attn2\.",
    "ffn": r"\.(ffn|(img|txt)_mlp)\.",
}
"""`--lora_targets` -> what a layer's name holds, of those that the model profile names.

In Qwen-Image's blocks text and picture look at both at once, so neither self- nor cross-attention is there alone.
"""

NUM_NEAREST = 3
_BLOCK = re.compile(r"^(transformer_)?blocks\.\d+\.")
_PLAIN_ONLY = "only a LoRA has it"


@dataclass(frozen=True)
class Settings:
    """An adapter as it is trained.

    Attributes:
        kind: which product of factors.
        rank: their inner size.
        alpha: the numerator of the scale.
        dropout: on the adapter's input (LoRA).
        rank_dropout: share of the rows of the change that are left out of a step (LoHa, LoKr).
        module_dropout: share of the layers that are left out of a step (LoHa, LoKr).
        rslora: the scale is `alpha / sqrt(rank)`.
        dora: the rows of the changed weight have magnitudes of their own.
        factor: LoKr's `decompose_factor`.
        decompose_both: LoKr's first matrix is a product as well.
        include: patterns, one of which finds every layer.
        exclude: patterns, none of which finds a layer, unless one of `spared` does.
        spared: patterns whose layers are trained although `exclude` finds them.
        start: the adapter it starts from.
        ranks: module -> rank, where it is not `rank`.
        alphas: module -> alpha, where it is not `alpha`.
    """

    kind: AdapterKind
    rank: int
    alpha: float
    dropout: float = 0.0
    rank_dropout: float = 0.0
    module_dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    factor: int = -1
    decompose_both: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    start: Path | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    def scale(self, module: str) -> float:
        """What a module's product is multiplied with, as peft computes it."""
        rank, alpha = self.ranks.get(module, self.rank), self.alphas.get(module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    @property
    def draws(self) -> bool:
        """Whether a forward pass in training mode draws random numbers that change it."""
        return bool(self.dropout or self.rank_dropout or self.module_dropout)


def settings(options: Train, expert: str = "") -> Settings:
    """What the flags say of the adapter.

    Args:
        options: the flags.
        expert: `high_noise` starts from `--network_weights_high_noise`, everything else from `--network_weights`.

    Raises:
        UsageError: flags that contradict each other, or a `--network_args` that is not known.
        WangenError: with `--dim_from_weights` the file cannot be read.
    """
    start = options.network_weights_high_noise if expert == "high_noise" else options.network_weights
    found = Settings(
        kind=options.network_module,
        rank=options.network_dim,
        alpha=options.network_alpha,
        dropout=options.network_dropout,
        rslora=options.rslora,
        dora=options.dora,
        factor=options.lokr_factor,
        include=options.include_patterns,
        exclude=options.exclude_patterns,
        start=start,
    )
    found = replace(found, **_translated(options.network_args, found))
    _refuse(found)
    for pattern in (*found.include, *found.exclude, *found.spared):
        _compiled(pattern)
    if options.dim_from_weights:
        if start is None:
            raise UsageError("--dim_from_weights takes rank and alpha from an adapter to start from",
                             cure=f"give {start_flag(expert)}, or leave it out")  # fmt: skip
        found = _with_ranks_of(found, start)
    return found


def start_flag(expert: str) -> str:
    """The flag of the adapter that an expert starts from."""
    return "--network_weights_high_noise" if expert == "high_noise" else "--network_weights"


def loraplus_ratio(options: Train) -> float | None:
    """LoRA+'s ratio, from its own flag or from `--network_args`.

    Raises:
        UsageError: it is no number above 0, or both are given and differ, or the adapter has no B.
    """
    given = _arguments(options.network_args).get("loraplus_lr_ratio")
    ratio = options.loraplus_lr_ratio if given is None else _number("loraplus_lr_ratio", given)
    if None not in (given, options.loraplus_lr_ratio) and ratio != options.loraplus_lr_ratio:
        raise UsageError("--loraplus_lr_ratio and --network_args say different ratios", cure="give one of them")
    if ratio is not None and not (ratio > 0 and math.isfinite(ratio)):
        raise UsageError(f"--loraplus_lr_ratio must be above 0, got {ratio:g}")
    if ratio is not None and (options.network_module != "lora" or options.train_mode == "full"):
        raise UsageError("--loraplus_lr_ratio is for the B of a LoRA", cure="leave it out")
    return ratio


def changeable_weights(header: Header) -> dict[str, TensorInfo]:
    """The weights of a transformer's file that an adapter can change, by the modules' names in diffusers."""
    named = {name.removesuffix(".weight"): info for name, info in sort_out(header).weights.items()
             if name.endswith(".weight")}  # fmt: skip
    return {module: info for name, info in named.items() if (module := module_name(name)) is not None}


def linear_modules(header: Header) -> list[str]:
    """The linear layers of a transformer's file that an adapter can change, by their names in diffusers, sorted."""
    return sorted(module for module, info in changeable_weights(header).items() if len(info.shape) == 2)


def factor_shapes(chosen: Settings, module: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
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
        expert: as for `settings`.

    Returns:
        In the order given, at least one.

    Raises:
        UsageError: a pattern finds none of these layers, or together they leave none.
    """
    chosen = settings(options, expert)
    usual = re.compile(model.lora_targets)
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
        raise UsageError("--include_patterns and --exclude_patterns leave no layer to train",
                         cure="leave --exclude_patterns out, or exclude less")  # fmt: skip
    return [name for name in listed if name in kept]


def _found_by(pattern: str, names: Sequence[str], flag: str) -> set[str]:
    """The names that a pattern finds; at least one."""
    compiled = _compiled(pattern)
    found = {name for name in names if compiled.search(name) or compiled.search(original_name(name))}
    if found:
        return found
    short = dict.fromkeys(_BLOCK.sub("", form) for name in names for form in (name, original_name(name)))
    plain = re.sub(r"\\(.)", r"\1", pattern).replace(".*", "").strip("^$")
    nearest = get_close_matches(_BLOCK.sub("", plain), short, NUM_NEAREST, 0.0)
    raise UsageError(f"{flag} {pattern!r} finds no layer that would be trained",
                     cure=f"the nearest are {', '.join(nearest)}")  # fmt: skip


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # of a pattern that later Pythons read in another way
            return re.compile(pattern)
    except (re.error, FutureWarning) as error:
        raise UsageError(f"{pattern!r} is no regular expression: {error}", cure=r"write, for example, 'attn1\.to_q'"
                         ) from error  # fmt: skip


def _arguments(given: Sequence[str]) -> dict[str, str]:
    """`key=value` as musubi-tuner takes it."""
    pairs = [argument.partition("=") for argument in given]
    for (key, equals, _), argument in zip(pairs, given, strict=True):
        if not equals or not key:
            raise UsageError(f"--network_args {argument!r} is not key=value")
    return {key.strip(): value.strip() for key, _, value in pairs}


_REFUSED = {
    "conv_dim": "a transformer's convolution gets no adapter: leave it out",
    "conv_alpha": "a transformer's convolution gets no adapter: leave it out",
    "preset": "use --lora_targets",
    "algo": "use --network_module lora, loha or lokr",
}


def _translated(given: Sequence[str], found: Settings) -> dict[str, Any]:
    """What `--network_args` say, as fields of `Settings`."""
    fields: dict[str, Any] = {}
    arguments = _arguments(given)
    for key, value in arguments.items():
        if key == "include_patterns" and "exclude_patterns" in arguments:
            fields["spared"] = _patterns(key, value)
        elif key in ("include_patterns", "exclude_patterns"):
            name = key.removesuffix("_patterns")
            fields[name] = (*getattr(found, name), *_patterns(key, value))
        elif key in ("rank_dropout", "module_dropout"):
            fields[key] = _number(key, value)
        elif key in ("use_rslora", "use_dora", "decompose_both"):
            fields[key.removeprefix("use_")] = _boolean(key, value)
        elif key in ("factor", "lokr_factor"):
            fields["factor"] = _whole_number(key, value)
        elif key not in ("loraplus_lr_ratio", "verbose"):  # the log says how many layers are trained without it
            known = ("include_patterns", "exclude_patterns", "loraplus_lr_ratio", "rank_dropout", "module_dropout",
                     "use_rslora", "use_dora", "factor", "decompose_both")  # fmt: skip
            near = get_close_matches(key, known, 1)
            cure = _REFUSED.get(key) or (f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}")
            raise UsageError(f"--network_args {key}= is not known here", cure=cure)
    return fields


def _patterns(key: str, value: str) -> tuple[str, ...]:
    """A Python list of patterns, as musubi-tuner takes it, or one pattern."""
    if not value.startswith("["):
        return (value,)
    try:
        listed = ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        raise UsageError(f"--network_args {key}= holds no list of texts: {value}",
                         cure=rf"write {key}=[r'.*attn1.*'], or --{key}") from error  # fmt: skip
    if not all(isinstance(pattern, str) for pattern in listed):
        raise UsageError(f"--network_args {key}= holds no list of texts: {value}")
    return tuple(listed)


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"--network_args {key}={value} is no number") from None


def _whole_number(key: str, value: str) -> int:
    number = _number(key, value)
    if not number.is_integer():
        raise UsageError(f"--network_args {key}={value} is no whole number")
    return int(number)


def _boolean(key: str, value: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if value.lower() not in words:
        raise UsageError(f"--network_args {key}={value} is neither true nor false")
    return words[value.lower()]


def _refuse(found: Settings) -> None:
    """What no adapter can have.

    Raises:
        UsageError: it is asked for.
    """
    if found.rank < 1 or not (found.alpha > 0 and math.isfinite(found.alpha)):
        raise UsageError(f"--network_dim {found.rank} and --network_alpha {found.alpha:g} must be above 0")
    for name in ("dropout", "rank_dropout", "module_dropout"):
        if not 0 <= getattr(found, name) < 1:
            raise UsageError(f"{name} must be at least 0 and below 1, got {getattr(found, name):g}")
    if found.kind == "lora":
        if found.rank_dropout or found.module_dropout:
            raise UsageError("rank_dropout and module_dropout are LoHa's and LoKr's", cure="use --network_dropout")
    else:
        if found.dropout:
            raise UsageError(f"--network_dropout drops the adapter's input, and {_PLAIN_ONLY}",
                             cure="use --network_args rank_dropout=… or module_dropout=…")  # fmt: skip
        for name in ("rslora", "dora"):
            if getattr(found, name):
                raise UsageError(f"--{name} with --network_module {found.kind}: {_PLAIN_ONLY}", cure="leave one out")
    if found.kind != "lokr" and (found.factor != -1 or found.decompose_both):
        raise UsageError("--lokr_factor is LoKr's", cure="give --network_module lokr, or leave it out")
    if found.factor != -1 and found.factor < 1:
        raise UsageError(f"--lokr_factor must be -1 or above 0, got {found.factor}")


def _with_ranks_of(found: Settings, start: Path) -> Settings:
    """The settings with the ranks and alphas of an adapter's file."""
    from wangen.runtime.adapters import read_scales

    scales = read_scales(start)
    if any(not rank for rank, _ in scales.values()):
        raise UsageError("--dim_from_weights: the whole matrices of this LoKr have no rank", where=str(start),
                         cure="give the --network_dim and --lokr_factor that it was trained with")  # fmt: skip
    ranks = {module: rank for module, (rank, _) in scales.items()}
    alphas = {module: scale * (math.sqrt(rank) if found.rslora else rank) for module, (rank, scale) in scales.items()}
    rank, alpha = (max(set(each.values()), key=list(each.values()).count) for each in (ranks, alphas))
    return replace(
        found,
        rank=int(rank),
        alpha=float(alpha),
        ranks={module: value for module, value in ranks.items() if value != rank},
        alphas={module: value for module, value in alphas.items() if value != alpha},
    )
