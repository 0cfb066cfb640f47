"""The tensors of a LoRA, DoRA, LoHa or LoKr by module and part, and why they are no such adapter.

Only names and shapes are looked at. A LoRA's change of a weight is up @ down, a LoHa's (w1_a @ w1_b) * (w2_a @ w2_b), a
LoKr's the Kronecker product of w1 and w2, each of them there whole or as `_a @ _b`. A DoRA is a LoRA with a magnitude
for each output.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from wangen.generator.errors import many
from wangen.generator.formats import WHOLE, TensorInfo
from wangen.generator.lora_keys import AdapterKey, AdapterKind, foreign, parse_adapter_key, parse_lora_key

WORDS: dict[AdapterKind, str] = {"lora": "LoRA", "loha": "LoHa", "lokr": "LoKr"}
HADAMARD = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
KRONECKER = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
FACTORS: dict[AdapterKind, tuple[str, ...]] = {"lora": ("down", "up"), "loha": HADAMARD, "lokr": KRONECKER}
"""The parts of each kind; of a LoKr's two matrices each is there whole or as `_a` and `_b`."""
INNER: dict[AdapterKind, tuple[str, ...]] = {"lora": ("down",), "loha": ("hada_w1_b",),
                                             "lokr": ("lokr_w2_b", "lokr_w1_b")}  # fmt: skip
"""The parts whose first size is the rank and whose second the inputs, where they are there."""
MAGNITUDES = ("magnitude", "dora_scale")

PLAIN_LORA = "a plain LoRA (down and up matrices) of a Wan or Qwen-Image transformer"

Parts = Mapping[str, TensorInfo]


def adapter_modules(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """The tensors of an adapter by module, as diffusers calls it, and part; keys of something else are left out."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for key, info in tensors.items():
        if parsed := parse_adapter_key(key):
            modules.setdefault(parsed.module, {})[parsed.part] = info
    return modules


def unfit_lora(tensors: Mapping[str, TensorInfo]) -> str:
    """Why a file is no plain LoRA of a Wan transformer, in words; empty when it is one.

    Half a LoRA is worse than none: one key that is not understood is enough.
    """
    if words := not_understood(tensors, parse_lora_key):
        return words
    keys: dict[AdapterKey | None, str] = {}
    for key in tensors:
        if (first := keys.setdefault(parsed := parse_lora_key(key), key)) != key and parsed:
            return f"two keys of this LoRA are the {parsed.part} of {parsed.module}: {first} and {key}"
    for module, parts in adapter_modules(tensors).items():
        if not {"down", "up"} <= parts.keys():
            return f"{module} has only {' and '.join(sorted(parts))} in this LoRA"
        down, up = parts["down"].shape, parts["up"].shape
        if not are_factors(down, up):
            return f"the matrices of {module} do not fit each other: {down} and {up}"
        if words := of_whole_numbers(parts.items()):
            return f"{module}: {words}"
    return ""


def unfit_adapter(tensors: Mapping[str, TensorInfo]) -> str:
    """Why a file is no adapter of a Wan transformer that is read here, in words; empty when it is one.

    One key that is not understood is enough: half an adapter is worse than none.
    """
    if words := not_understood(tensors, parse_adapter_key):
        return words
    counts = Counter(key for key in map(parse_adapter_key, tensors) if key)
    if twice := next((key for key, number in counts.items() if number > 1), None):
        return f"two keys of this adapter are the {twice.part} of {twice.module}"
    modules = adapter_modules(tensors)
    for module, parts in modules.items():
        if problem := unfit_parts(parts):
            return f"{module}: {problem}"
    if len({(kind_of_parts(parts), is_dora_of_parts(parts)) for parts in modules.values()}) > 1:
        return "this adapter is of another kind from layer to layer"
    return ""


def not_understood(keys: Collection[str], parse: Callable[[str], object]) -> str:
    """Which of a file's keys `parse` makes nothing of, in words; empty when it understands all."""
    strange = sorted(key for key in keys if parse(key) is None)
    if not strange:
        return ""
    words = next(filter(None, map(foreign, strange)), "")
    return (
        (f"this is {words}; " if words else "")
        + f"{len(strange)} of {many(len(keys), 'key')} {'is' if len(strange) == 1 else 'are'} not understood, "
        + f"such as {', '.join(strange[:3])}"
    )


def are_factors(down: Sequence[int], up: Sequence[int]) -> bool:
    """Whether matrices of these shapes are the two of a LoRA: of a linear layer, or of a convolution over patches."""
    linear = len(down) == len(up) == 2 or (len(down) == len(up) == 5 and math.prod(up[2:]) == 1)
    return linear and down[0] == up[1] and down[0] > 0


def kind_of_parts(parts: Collection[str]) -> AdapterKind:
    """Of which kind a module with these parts is.

    >>> kind_of_parts(["alpha", "lokr_w1", "lokr_w2"])
    'lokr'
    """
    if any(name in HADAMARD for name in parts):
        return "loha"
    return "lokr" if any(name in KRONECKER for name in parts) else "lora"


def is_dora_of_parts(parts: Collection[str]) -> bool:
    """Whether a module with these parts has a DoRA's magnitudes."""
    return any(name in MAGNITUDES for name in parts)


def rank_of(parts: Parts) -> int:
    """The inner size of a module's factors; 0 for a LoKr of two whole matrices, and where the factor is missing."""
    inner = INNER[kind_of_parts(parts)]
    return next((parts[name].shape[0] for name in inner if name in parts and parts[name].shape), 0)


def in_features_of(parts: Parts) -> int:
    """The inputs of the layer that a module changes; 0 where its tensors do not tell."""
    kind = kind_of_parts(parts)
    if kind != "lokr":
        return next((_columns(parts[name]) for name in INNER[kind] if name in parts), 0)
    sides = [next((_columns(parts[name]) for name in (matrix, f"{matrix}_b") if name in parts), 0)
             for matrix in ("lokr_w1", "lokr_w2")]  # fmt: skip
    return sides[0] * sides[1]


def unfit_parts(parts: Parts) -> str:
    """Why a module's tensors are no adapter, in words; empty when they are one."""
    kind = kind_of_parts(parts)
    there = set(parts) - {"alpha", *MAGNITUDES}
    if there - set(FACTORS[kind]) or not _complete(kind, there):
        return f"only {' and '.join(sorted(there)) or 'an alpha'} of a {WORDS[kind]} is there"
    if words := of_whole_numbers(parts.items()):
        return words
    shapes = {name: parts[name].shape for name in there}
    if kind != "lora" and is_dora_of_parts(parts):
        return f"a {WORDS[kind]} with the magnitudes of a DoRA, which is not read"
    if kind == "lora":
        down, up = shapes["down"], shapes["up"]
        if not are_factors(down, up):
            return f"the matrices do not fit each other: {down} and {up}"
        magnitudes = [tuple(parts[name].shape) for name in MAGNITUDES if name in parts]
        wrong = [shape for shape in magnitudes if math.prod(shape) != up[0] or shape[:-1] == (1,)]
        return f"the DoRA's magnitudes are {wrong[0]}, not one of each of {up[0]} outputs" if wrong else ""
    if any(len(shape) != 2 for shape in shapes.values()):
        return "a factor is no matrix (of a convolution, which is not read)"
    inner = [name.removesuffix("_a") for name in there if name.endswith("_a")]
    if any(shapes[f"{name}_a"][1] != shapes[f"{name}_b"][0] for name in inner):
        return f"the factors do not fit each other: {shapes}"
    sizes = {(shapes[f"{name}_a"][0], shapes[f"{name}_b"][1]) for name in inner}
    return f"the two products differ in size: {sizes}" if kind == "loha" and len(sizes) > 1 else ""


def of_whole_numbers(parts: Iterable[tuple[str, TensorInfo]]) -> str:
    """Which factor among a module's parts is stored in whole numbers, in words; empty where none is."""
    for name, info in parts:
        if name != "alpha" and info.dtype in WHOLE:
            return f"its {name} is stored in whole numbers ({info.dtype}), as in a quantised form that is not read"
    return ""


def _complete(kind: AdapterKind, there: set[str]) -> bool:
    """Whether every factor of the kind is there."""
    if kind != "lokr":
        return there == set(FACTORS[kind])
    return all(
        {part for part in there if part.startswith(name)} in ({name}, {f"{name}_a", f"{name}_b"})
        for name in ("lokr_w1", "lokr_w2")
    )


def _columns(info: TensorInfo) -> int:
    return info.shape[1] if len(info.shape) > 1 else 0
