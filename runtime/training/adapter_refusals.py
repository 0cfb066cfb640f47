"""Adapters that a run cannot train, start from or merge, and weights that it cannot change: before a model loads."""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wangen import profiles
from wangen.generator.adapter_parts import WORDS
from wangen.generator.adapter_settings import AdapterSettings
from wangen.generator.errors import UsageError, many, some
from wangen.generator.formats import TensorInfo
from wangen.generator.kinds import expect
from wangen.generator.steps import Train
from wangen.runtime.adapters import Adapter, AdapterWeight, is_dora, read_adapter, without_numbers
from wangen.runtime.training.adapter_config import (
    PRESETS,
    adapter_settings,
    changeable_weights,
    factor_shapes,
    linear_modules,
    merged,
    same_factors,
    select_modules,
    start_flag,
)
from wangen.runtime.training.timesteps import HIGH, LOW
from wangen.runtime.weights.quantized import is_quantized

log = logging.getLogger("wangen")

_WIDER = "give --dit in 16 or 32 bits"


def require_adapter(options: Train, model: profiles.Model) -> None:
    """Refuse flags that no adapter can have, patterns that find no layer, and files that are none to begin with.

    Of the transformers that are trained only the headers are read, the adapters to start from and to merge whole.

    Raises:
        UsageError: flags that contradict each other, patterns that find no layer, or files that do not fit.
        WangenError: a file is of another kind.
    """
    bases = [_File.read(path, "--base_weights") for path in options.base_weights]
    _refuse_merged_doras(options, bases)
    for flag, expert in trained_transformers(options, model).items():
        dit: Path = getattr(options, flag)
        weights = changeable_weights(expect(dit, model.kind_of(flag), f"--{flag}", options.task))
        for base in bases:
            _require_mergeable(base, weights, f"--{flag}")
        if options.train_mode == "full":
            _refuse_stored_in_few_bits(weights, dit)
            continue
        modules = select_modules(linear_modules(weights), options, model, expert)
        chosen, sizes = adapter_settings(options, expert), {module: weights[module].shape for module in modules}
        if not options.dim_from_weights:
            _refuse_more_than_whole(chosen, sizes.values())
        if chosen.start:
            _require_start(_File.read(chosen.start, start_flag(expert)), chosen, sizes, f"--{flag}")


def trained_transformers(options: Train, model: profiles.Model) -> dict[str, str]:
    """The flags of the transformers that are trained -> the expert that each one is, empty where there is only one."""
    if model.experts is None:
        return {"dit": ""}
    found = {"low": ("dit", LOW), "high": ("dit_high_noise", HIGH)}
    return dict(pair for name, pair in found.items() if options.experts in ("both", name))


@dataclass(frozen=True)
class _File:
    """An adapter's file without its numbers: the factors are on the meta device."""

    path: Path
    flag: str
    adapter: Adapter
    dora: bool

    @classmethod
    def read(cls, path: Path, flag: str) -> "_File":
        """Read and judged whole, so that a damaged one is found before a model loads; only the shapes are kept."""
        adapter = read_adapter(path, flag)
        dora = is_dora(adapter)
        return cls(path, flag, {module: without_numbers(weight) for module, weight in adapter.items()}, dora)

    def refused(self, found: str, cure: str) -> UsageError:
        """The error that names this file."""
        return UsageError(found, where=str(self.path), cure=cure)


def _refuse_merged_doras(options: Train, bases: Sequence[_File]) -> None:
    given = options.base_weights_multiplier
    if len(given) not in (0, len(bases)) and (bases or set(given) != {1.0}):
        raise UsageError(f"{len(bases)} --base_weights and {len(given)} --base_weights_multiplier",
                         cure="give one multiplier for each, or none")  # fmt: skip
    for base, (_, multiplier) in zip(bases, merged(options), strict=True):
        if not base.dora:
            continue
        if multiplier != 1:
            raise base.refused(f"a DoRA at strength {multiplier:g}", "give it the strength 1: it scales whole weights")
        adapted = options.train_mode == "lora" and adapter_settings(replace(options, dim_from_weights=False)).dora
        if options.quantize not in (None, "none") or adapted:
            raise base.refused("a DoRA scales whole weights, and neither goes under another nor into a quantised base",
                               "give a plain LoRA to --base_weights")  # fmt: skip


def _require_mergeable(base: _File, weights: Mapping[str, TensorInfo], flag: str) -> None:
    """An adapter of `--base_weights` fits a transformer, whose weights take it."""
    fitting = {module: weight for module, weight in base.adapter.items() if module in weights}
    if not fitting:
        raise base.refused(f"nothing in this adapter fits {flag}", "give --base_weights an adapter of this model")
    _require_sizes(base, fitting, {module: weights[module].shape for module in fitting}, flag)
    held = next((module for module in fitting if is_quantized(weights[module])), None)
    if held:
        raise base.refused(f"{flag} holds {held} as {weights[held].dtype}, to which nothing can be added",
                           f"{_WIDER}, or merge with `wangen export --dit … --lora_weight …` first")  # fmt: skip


def _refuse_stored_in_few_bits(weights: Mapping[str, TensorInfo], dit: Path) -> None:
    for module, info in weights.items():
        if len(info.shape) == 2 and is_quantized(info):
            raise UsageError(f"this file holds {module} as {info.dtype}, and --train_mode full trains no such weights",
                             where=str(dit), cure=f"{_WIDER}, or train a LoRA")  # fmt: skip


def _refuse_more_than_whole(chosen: AdapterSettings, shapes: Collection[Sequence[int]]) -> None:
    """A LoRA's rank is no larger than that of the largest change it could be: a typing error, and much memory."""
    most = max(map(min, shapes))
    if chosen.kind == "lora" and chosen.rank > most:
        raise UsageError(f"--network_dim {chosen.rank}, where no layer's change can have a rank above {most}",
                         cure=f"give 8 to 128, or {most} at most")  # fmt: skip


def _require_start(start: _File, chosen: AdapterSettings, sizes: Mapping[str, Sequence[int]], flag: str) -> None:
    """An adapter to start from is of the kind and the sizes that are trained, in `sizes` by module."""
    fitting = {module: weight for module, weight in start.adapter.items() if module in sizes}
    if not fitting:
        raise start.refused("nothing in this adapter fits what is trained",
                            f"give {start.flag} an adapter of this model, or other targets")  # fmt: skip
    kind = next(iter(fitting.values())).kind
    if kind != chosen.kind:
        raise start.refused(f"this is a {WORDS[kind]}, and a {WORDS[chosen.kind]} is to be trained",
                            f"give --network_module {kind}, or {start.flag} another file")  # fmt: skip
    if start.dora and not chosen.dora:
        raise start.refused("this is a DoRA, and a LoRA is to be trained", "give --dora as well")
    _require_sizes(start, fitting, sizes, flag)
    other = {
        module: weight.rank
        for module, weight in fitting.items()
        if factor_shapes(chosen, module, *sizes[module])
        != {part: tuple(factor.shape) for part, factor in weight.factors.items()}
    }
    ranks = sorted({rank for rank in other.values() if rank} - {chosen.rank})
    if ranks:
        alone = len({weight.rank for weight in fitting.values()}) == 1
        raise start.refused(f"this adapter has rank {', '.join(map(str, ranks))}, and --network_dim is {chosen.rank}",
                            f"give --network_dim {ranks[0]}, or --dim_from_weights" if alone
                            else "give --dim_from_weights")  # fmt: skip
    if other:
        module = next(iter(other))
        raise start.refused(f"{module} of this {WORDS[kind]} has factors of other sizes",
                            same_factors(fitting[module], chosen))  # fmt: skip
    if left_out := [module for module in start.adapter if module not in sizes]:
        keep = "merge the file (--base_weights) in place of starting from it"
        if any(map(re.compile(PRESETS["all_linear"]).search, left_out)):
            keep = f"train them, too (--lora_targets all_linear: all of the blocks), or {keep}"
        log.warning("  %s %s: %s not trained here and left out, also of what is saved: %s; to keep them, %s",
                    start.flag, start.path, many(len(left_out), "layer"), some(left_out), keep)  # fmt: skip


def _require_sizes(
    file: _File, fitting: Mapping[str, AdapterWeight], sizes: Mapping[str, Sequence[int]], flag: str
) -> None:
    """The weights that an adapter changes have the transformer's sizes."""
    for module, weight in fitting.items():
        if weight.shape != tuple(sizes[module]):
            found, wanted = ("x".join(map(str, shape)) for shape in (weight.shape, sizes[module]))
            raise file.refused(f"this adapter is of a model of another size: {module} is {found} in it and {wanted} "
                               f"in {flag}", f"give {file.flag} an adapter of this model")  # fmt: skip
