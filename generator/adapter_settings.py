"""What the flags say of the adapter that is trained, without a look at any file."""

import ast
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wangen.generator.errors import UsageError, did_you_mean
from wangen.generator.lora_keys import AdapterKind
from wangen.generator.steps import Train

CONVOLUTIONS = ("conv_dim", "conv_alpha")
"""Of `--network_args`: for layers that none of these transformers' blocks has, in musubi-tuner as here."""

_PLAIN_ONLY = "only a LoRA has it"


@dataclass(frozen=True)
class AdapterSettings:
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


def settings_of_flags(options: Train, expert: str = "") -> AdapterSettings:
    """What the flags say of the adapter; of `--dim_from_weights` the file has the rest.

    Args:
        options: the flags.
        expert: `high_noise` starts from `--network_weights_high_noise`, everything else from `--network_weights`.

    Raises:
        UsageError: flags that contradict each other, a `--network_args` that is not known, or a pattern that is none.
    """
    found = AdapterSettings(
        kind=options.network_module,
        rank=options.network_dim,
        alpha=options.network_alpha,
        dropout=options.network_dropout,
        rslora=options.rslora,
        dora=options.dora,
        factor=options.lokr_factor,
        include=options.include_patterns,
        exclude=options.exclude_patterns,
        start=options.network_weights_high_noise if expert == "high_noise" else options.network_weights,
    )
    found = replace(found, **_translated(options.network_args, found))
    _refuse(found)
    for pattern in (*found.include, *found.exclude, *found.spared):
        compiled(pattern)
    return found


def loraplus_ratio(options: Train) -> float | None:
    """LoRA+'s ratio, from its own flag or from `--network_args`.

    Raises:
        UsageError: it is no number above 0, or both are given and differ, or the adapter has no B.
    """
    given = network_arguments(options.network_args).get("loraplus_lr_ratio")
    ratio = options.loraplus_lr_ratio if given is None else _number("loraplus_lr_ratio", given)
    if None not in (given, options.loraplus_lr_ratio) and ratio != options.loraplus_lr_ratio:
        raise UsageError("--loraplus_lr_ratio and --network_args say different ratios", cure="give one of them")
    if ratio is not None and not (ratio > 0 and math.isfinite(ratio)):
        raise UsageError(f"--loraplus_lr_ratio must be above 0, got {ratio:g}")
    if ratio is not None and (options.network_module != "lora" or options.train_mode == "full"):
        raise UsageError("--loraplus_lr_ratio is for the B of a LoRA", cure="leave it out")
    return ratio


def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern of a layer's name.

    Raises:
        UsageError: it is no regular expression.
    """
    if not pattern:
        raise UsageError("an empty pattern finds every layer", cure="leave the flag out")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # of a pattern that later Pythons read in another way
            return re.compile(pattern)
    except (re.error, FutureWarning) as error:
        raise UsageError(f"{pattern!r} is no regular expression: {error}", cure=r"write, for example, 'attn1\.to_q'"
                         ) from error  # fmt: skip


def network_arguments(given: Sequence[str]) -> dict[str, str]:
    """`key=value` as musubi-tuner takes it.

    Raises:
        UsageError: one is not.
    """
    found: dict[str, str] = {}
    for argument in given:
        key, equals, value = (part.strip() for part in argument.partition("="))
        if not equals or not key:
            raise UsageError(f"--network_args {argument!r} is not key=value")
        if found.setdefault(key, value) != value:
            raise UsageError(f"--network_args gives {key} twice: {found[key]} and {value}",
                             cure=f"give one; several patterns are a list: {key}=['…', '…']" if "patterns" in key
                             else "give one of them")  # fmt: skip
    return found


_REFUSED = {
    "preset": "use --lora_targets",
    "algo": "use --network_module lora, loha or lokr",
}


def _translated(given: Sequence[str], found: AdapterSettings) -> dict[str, Any]:
    """What `--network_args` say, as fields of `AdapterSettings`."""
    fields: dict[str, Any] = {}
    arguments = network_arguments(given)
    for key, value in arguments.items():
        if key == "include_patterns" and "exclude_patterns" in arguments:
            fields["spared"] = _patterns(key, value)
        elif key in ("include_patterns", "exclude_patterns"):
            name = key.removesuffix("_patterns")
            fields[name] = (*getattr(found, name), *_patterns(key, value))
        elif key in ("rank_dropout", "module_dropout"):
            fields[key] = _number(key, value)
        elif key in ("use_rslora", "use_dora", "decompose_both"):
            name = key.removeprefix("use_")
            fields[name] = _boolean(key, value)
            _require_alike(f"--{name}", getattr(found, name), False, fields[name], key)
        elif key in ("factor", "lokr_factor"):
            fields["factor"] = _whole_number(key, value)
            _require_alike("--lokr_factor", found.factor, AdapterSettings.factor, fields["factor"], key)
        elif key not in ("loraplus_lr_ratio", "verbose", *CONVOLUTIONS):  # the log says how many layers are trained
            known = ("include_patterns", "exclude_patterns", "loraplus_lr_ratio", "rank_dropout", "module_dropout",
                     "use_rslora", "use_dora", "factor", "decompose_both")  # fmt: skip
            cure = _REFUSED.get(key) or did_you_mean(key, known, f"known are {', '.join(known)}")
            raise UsageError(f"--network_args {key}= is not known here", cure=cure)
    return fields


def _require_alike(flag: str, given: object, usual: object, told: object, key: str) -> None:
    """A flag that is given and its key among `--network_args` say the same."""
    if usual != given != told:
        raise UsageError(f"{flag} and --network_args {key}={told} contradict each other", cure="give one of them")


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


def _refuse(found: AdapterSettings) -> None:
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
