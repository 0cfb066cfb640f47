"""Alphas that stand beside a LoRA's tensors: in peft's `adapter_config.json`, in the metadata of diffusers.

Both hold the fields of a `LoraConfig`: `r` and `lora_alpha` for most modules, `rank_pattern` and `alpha_pattern` for
the others.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from wangen.generator.adapter_parts import WORDS
from wangen.generator.errors import WangenError, unreadable
from wangen.generator.headers import identity
from wangen.generator.lora_keys import AdapterKind, original_name, without_prefix

Number = TypeVar("Number", int, float)

ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
DIFFUSERS_METADATA = "lora_adapter_metadata"
DIFFUSERS_PREFIX = "transformer."
STALE = ("modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")
"""Metadata that are digests of a file's tensors, and untrue of any other's."""

MAX_CONFIG_BYTES = 16 * 2**20

UNSUPPORTED = {
    "use_dora": "DoRA, whose magnitudes depend on the base weights",
    "lora_bias": "biases of its own",
    "fan_in_fan_out": "transposed weights",
    "modules_to_save": "whole modules",
    "trainable_token_indices": "token embeddings",
    "target_parameters": "parameters that are no layers",
    "layer_replication": "blocks of a model that were repeated",
    "use_qalora": "averages of the inputs before its matrices (QALoRA)",
    "use_bdlora": "matrices of separate blocks (BD-LoRA)",
    "alora_invocation_tokens": "an effect from certain tokens on (aLoRA)",
    "arrow_config": "a choice between adapters (Arrow)",
}
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights`, or how they begin, with which peft takes the adapter's first product from the base:
the file alone does not say how it changes a model."""
# A pattern is a regular expression; those in circulation are plain names, and only they are taken. A number alone
# would be one layer in the official names and another in those of diffusers.
PLAIN_PATTERN = re.compile(r"(?=.*[A-Za-z])(?P<anchor>\^?)(?P<name>(?:[\w-]|\\?\.)+)\$?")


@dataclass(frozen=True)
class Alphas:
    """What is known of the alphas of modules whose tensors do not tell.

    Attributes:
        default: the alpha of all modules that no pattern names; None: the rank.
        patterns: the end of a module's name, or `^` and the whole of it, as diffusers or the official code call it ->
            alpha. The first that fits counts.
        rank_stabilized: the scale is `alpha / sqrt(rank)`.
        rank: the configured rank of most modules, which the tensors of a LoKr do not always tell; None: not known.
        ranks: of the others, by patterns as those of the alphas; read of a LoKr alone.
    """

    default: float | None = None
    patterns: Mapping[str, float] = field(default_factory=dict)
    rank_stabilized: bool = False
    rank: int | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)

    def rank_of(self, module: str) -> int | None:
        """The configured rank of a module."""
        return _named(self.ranks, module, self.rank)

    def of(self, module: str, rank: int) -> float:
        """The alpha for which `alpha / rank` is the module's scale."""
        alpha = _named(self.patterns, module, self.default)
        if alpha is None:
            return float(rank)
        return alpha * rank**0.5 if self.rank_stabilized else alpha


def lora_file(path: Path) -> Path:
    """The file that holds a LoRA's tensors: itself, or the one in a folder that peft or diffusers wrote.

    Raises:
        WangenError: a folder without such a file.
    """
    if not path.is_dir():
        return path
    for name in (ADAPTER_FILE, DIFFUSERS_FILE):
        if (path / name).is_file():
            return path / name
    raise WangenError(f"this folder holds neither {ADAPTER_FILE} nor {DIFFUSERS_FILE}", where=str(path),
                      cure="name the LoRA's file")  # fmt: skip


def lora_identity(path: Path) -> str:
    """A digest of a LoRA, given as a file or as a folder: of its file, and of the configuration that is read with it.

    Raises:
        WangenError: as `lora_file` and `headers.identity`.
    """
    file = lora_file(path)
    found = identity(file)
    config = _config_of(file)
    return hashlib.sha256(found.encode() + _content(config)).hexdigest() if config else found


def is_safetensors(path: Path) -> bool:
    """Whether a path to write names a file, and no folder."""
    return path.suffix.lower() == ".safetensors"


def read_alphas(
    file: Path, metadata: Mapping[str, str], modules: Collection[str], *, kind: AdapterKind = "lora", dora: bool = False
) -> Alphas:
    """The alphas beside an adapter's tensors: of the `adapter_config.json` there, else of the file's metadata.

    Args:
        file: the adapter's file.
        metadata: of its header.
        modules: all that it changes, by their names in diffusers.
        kind: what its tensors are.
        dora: they hold a DoRA's magnitudes.

    Raises:
        WangenError: what stands there is malformed, of an adapter that is more than a LoRA, or of another one.
    """
    config = _config_of(file)
    fields = _load(config) if config else _of_metadata(file, metadata)
    alphas = _alphas(fields, str(config or file), kind, dora)
    for pattern in alphas.patterns:
        if not any(_fits(pattern, module) for module in modules):
            raise WangenError(f"the alpha_pattern {pattern!r} names no module of this LoRA", where=str(config or file),
                              cure="take it out, or write the module's name as the LoRA's file does")  # fmt: skip
    return alphas


def _named(patterns: Mapping[str, Number], module: str, default: Number | None) -> Number | None:
    """The number of the first pattern that means a module."""
    return next((number for pattern, number in patterns.items() if _fits(pattern, module)), default)


def _fits(pattern: str, module: str) -> bool:
    """Whether a pattern of `Alphas` means a module, in either of its names."""
    return any(pattern == f"^{name}" or f".{name}".endswith(f".{pattern}") for name in (module, original_name(module)))


def _config_of(file: Path) -> Path | None:
    """The configuration that peft wrote beside a LoRA's file, if that is so."""
    config = file.with_name(CONFIG_FILE)
    return config if file.name == ADAPTER_FILE and config.is_file() else None


def _of_metadata(file: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a `LoraConfig` that diffusers writes into a file's header."""
    try:
        fields = json.loads(metadata.get(DIFFUSERS_METADATA, "{}"))
    except (ValueError, RecursionError) as error:
        raise WangenError(f"the adapter metadata of this LoRA are no JSON ({error})", where=str(file)) from error
    if not isinstance(fields, dict):
        raise WangenError("the adapter metadata of this LoRA are no JSON object", where=str(file))
    return {key.removeprefix(DIFFUSERS_PREFIX): value for key, value in fields.items()
            if key.startswith(DIFFUSERS_PREFIX)}  # fmt: skip


def config_fields(ranks: Mapping[str, int], alphas: Mapping[str, float]) -> dict[str, Any]:
    """The fields of a `LoraConfig` that describe modules with these ranks and alphas (both by module, not empty).

    >>> config_fields({"a": 4, "b": 4, "c": 8}, {"a": 4.0, "b": 4.0, "c": 8.0})["rank_pattern"]
    {'c': 8}
    """
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return {
        "r": int(rank),
        "lora_alpha": alpha,
        "rank_pattern": {module: value for module, value in ranks.items() if value != rank},
        "alpha_pattern": {module: value for module, value in alphas.items() if value != alpha},
        "target_modules": sorted(ranks),
    }


def config_text(fields: Mapping[str, Any]) -> str:
    """An `adapter_config.json` that peft reads."""
    head = {"peft_type": "LORA", "task_type": None, "base_model_name_or_path": None, "inference_mode": True}
    return json.dumps({**head, **fields}, indent=2, sort_keys=True) + "\n"


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise WangenError("this is too long for an adapter's configuration", where=str(path))
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def _load(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(_content(path))
    except (ValueError, RecursionError) as error:
        raise WangenError(f"no JSON ({error})", where=str(path)) from error
    if not isinstance(fields, dict):
        raise WangenError("no JSON object", where=str(path))
    return fields


def _alphas(fields: Mapping[str, Any], where: str, kind: AdapterKind, dora: bool) -> Alphas:
    configured = fields.get("peft_type", kind.upper())
    if configured != kind.upper():
        raise WangenError(f"this adapter is a {configured}, not a {WORDS[kind]}", where=where)
    for name, words in UNSUPPORTED.items():
        if fields.get(name) and not (dora and name == "use_dora"):
            raise WangenError(f"this LoRA has {words} ({name}), which is not supported", where=where)
    began = fields.get("init_lora_weights")
    if isinstance(began, str) and began.lower().startswith(CHANGES_BASE):
        raise WangenError(f"this LoRA began by changing the base, which it does not hold (init_lora_weights {began})",
                          where=where, cure="save it with peft's path_initial_model_for_weight_conversion, which makes "
                          "a plain LoRA of it")  # fmt: skip
    alphas, ranks = fields.get("alpha_pattern") or {}, (fields.get("rank_pattern") or {}) if kind == "lokr" else {}
    default, rank = fields.get("lora_alpha" if kind == "lora" else "alpha"), fields.get("r")
    try:
        alphas = {str(key): float(value) for key, value in alphas.items()}
        ranks = {str(key): int(value) for key, value in ranks.items()}
        default, rank = None if default is None else float(default), None if rank is None else int(rank)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise WangenError(f"the alphas of this LoRA are malformed ({error})", where=where) from error
    return Alphas(default, _plain(alphas, "alpha", where), bool(fields.get("use_rslora")), rank,
                  _plain(ranks, "rank", where))  # fmt: skip


def _plain(patterns: Mapping[str, Number], what: str, where: str) -> dict[str, Number]:
    """Patterns as `Alphas` has them."""
    plain: dict[str, Number] = {}
    for key, number in patterns.items():
        match = PLAIN_PATTERN.fullmatch(key)
        if match is None:
            raise WangenError(f"the {what}_pattern {key!r} is not the plain name of a module", where=where,
                              cure=f"write one {what} per module")  # fmt: skip
        plain.setdefault(match["anchor"] + without_prefix(match["name"].replace("\\", "")), number)
    return plain
