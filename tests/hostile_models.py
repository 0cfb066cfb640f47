"""Checkpoints that are well-formed files and wrong models: seeded changes of names, shapes and dtypes.

Their payload is a hole in the file, so that a tensor may be said to be a terabyte.
"""

import json
import math
import random
import struct
from collections.abc import Callable, Iterator, Mapping

from hostile import Case

from wangen.generator.formats import DTYPE_BITS
from wangen.generator.formats.gguf import TYPES

Table = dict[str, tuple[str, list[int]]]
"""Name -> dtype and shape."""

MAX_ELEMENTS = 2**39  # in a file of at most 4 TiB, all of it a hole
SIZES = (0, 1, 2, 3, 7, 64, 128, 5120, 2**20, 2**31, 2**40)
COMPANIONS = ("scale_weight", "weight_scale", "scale_input", "comfy_quant", "weight_scale_2", "lora_A.weight", "alpha")


def variations(seeds: Mapping[str, Table], count: int, seed: int) -> Iterator[Case]:
    """`count` changed models, the same ones for the same seed; every twentieth is as it should be."""
    choice = random.Random(seed)
    names = sorted(seeds)
    made = 0
    while made < count:
        name = names[made % len(names)]
        table = {key: (dtype, list(shape)) for key, (dtype, shape) in seeds[name].items()}
        ways = [choice.choice(WAYS) for _ in range(choice.choice((1, 1, 2, 3)) if made % 20 else 0)]
        for way in ways:
            table = way(choice, table)
        if sum(math.prod(shape) for _, shape in table.values()) > MAX_ELEMENTS:
            continue
        write, ending = choice.choice(((safetensors, "safetensors"), (safetensors, "safetensors"), (gguf, "gguf")))
        header, num_bytes = write(choice, table)
        words = " and ".join(way.__name__ for way in ways) or "unchanged"
        file = f"a.{ending}"
        yield Case(f"model {made} ({name}, {words}, seed {seed})", {file: header}, lengths={file: num_bytes})
        made += 1


def safetensors(choice: random.Random, table: Table) -> tuple[bytes, int]:
    """The header of a safetensors file of these tensors, and the length of the file."""
    fields: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in table.items():
        begin, end = end, end + math.prod(shape) * DTYPE_BITS[dtype] // 8
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text, 8 + len(text) + end


def gguf(choice: random.Random, table: Table) -> tuple[bytes, int]:
    """The same as GGUF, with types by chance."""
    infos, end = b"", 0
    for name, (_, shape) in table.items():
        row = shape[-1] if shape else 1
        fitting = [kind for kind, (_, elements, _) in TYPES.items() if row % elements == 0]
        kind = choice.choice(fitting) if choice.random() < 0.1 else 8 if 8 in fitting and len(shape) == 2 else 0
        infos += struct.pack("<Q", len(name.encode())) + name.encode()
        infos += struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, end)
        _, elements, num_bytes = TYPES[kind]
        end += -(-math.prod(shape) // elements * num_bytes // 32) * 32
    header = b"GGUF" + struct.pack("<IQQ", 3, len(table), 0) + infos
    header += bytes(-len(header) % 32)
    return header, len(header) + end


def drop(choice: random.Random, table: Table) -> Table:
    """Without one tensor, or without all of one block or one sort."""
    name = choice.choice(list(table))
    part = choice.choice((name, *name.split(".")))
    kept = {key: info for key, info in table.items() if key != name and (part == name or part not in key.split("."))}
    return kept or table


def rename(choice: random.Random, table: Table) -> Table:
    """One name changed, often to a block of an absurd number."""
    name = choice.choice(list(table))
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    if numbers and choice.random() < 0.7:
        parts[choice.choice(numbers)] = choice.choice(("999", "123456789", "9" * 30, "00", "-1", "١", "1e9"))
    else:
        parts[choice.randrange(len(parts))] = choice.choice(("weight", "bias", "x", "", "0"))
    return {(".".join(parts) if key == name else key): info for key, info in table.items()}


def reshape(choice: random.Random, table: Table) -> Table:
    """One tensor of another shape."""
    name = choice.choice(list(table))
    dtype, shape = table[name]
    at = choice.randrange(max(1, len(shape)))
    shapes = (
        shape[::-1],
        [math.prod(shape)],
        [*shape, 1],
        [1, *shape],
        [],
        shape[:-1],
        [*shape[:at], choice.choice(SIZES), *shape[at + 1 :]],
        [*shape[:at], choice.choice(SIZES), *shape[at + 1 :]],
    )
    return {**table, name: (dtype, choice.choice(shapes))}


def resize(choice: random.Random, table: Table) -> Table:
    """One size changed wherever it occurs, as in a consistent model of another size."""
    sizes = sorted({size for _, shape in table.values() for size in shape}) or [1]
    old, new = choice.choice(sizes), choice.choice(SIZES)
    return {name: (dtype, [new if size == old else size for size in shape]) for name, (dtype, shape) in table.items()}


def retype(choice: random.Random, table: Table) -> Table:
    """One tensor or all of another dtype."""
    chosen, new = choice.choice(list(table)), choice.choice([name for name, bits in DTYPE_BITS.items() if bits >= 8])
    everywhere = choice.random() < 0.3
    return {name: (new if everywhere or name == chosen else dtype, shape) for name, (dtype, shape) in table.items()}


def accompany(choice: random.Random, table: Table) -> Table:
    """A scale, a marker or a tokenizer that fits nothing; the weight often in 8 bits."""
    name = choice.choice([name for name in table if name.endswith(".weight")] or list(table))
    shape = choice.choice(([], [1], [0], [7], [2**20], table[name][1], [1, 1], [*table[name][1][:1], 3, 1]))
    added = choice.choice((name.removesuffix("weight") + choice.choice(COMPANIONS), "scaled_fp8", "spiece_model"))
    dtype = choice.choice(("F32", "U8", "F8_E4M3", "I64"))
    coded = ("F8_E4M3", table[name][1]) if choice.random() < 0.5 else table[name]
    return {**table, name: coded, added: (dtype, shape)}


def prefix(choice: random.Random, table: Table) -> Table:
    """A prefix on all names, or a second tensor of the same name with one."""
    before = choice.choice(("model.diffusion_model.", "diffusion_model.", "vae.", "module.", "model."))
    if choice.random() < 0.5:
        return {before + name: info for name, info in table.items()}
    name = choice.choice(list(table))
    return {**table, before + name: table[name]}


WAYS: tuple[Callable[[random.Random, Table], Table], ...] = (
    drop, rename, reshape, reshape, resize, resize, retype, accompany, prefix,
)  # fmt: skip
