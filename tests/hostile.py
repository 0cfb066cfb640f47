"""Weight files that wish to do harm: made by hand, and made of good ones by seeded mutation. Needs no torch."""

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

INDEX = "a.safetensors.index.json"


@dataclass(frozen=True)
class Case:
    """Some files; the first is the one that a user gives. Links: name -> target. Lengths: of files that are longer."""

    name: str
    files: Mapping[str, bytes]
    links: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)


def safetensors(header: object, payload: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def entry(shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def pth(pickled: bytes, **records: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, data in records.items():
            archive.writestr(f"archive/data/{name}", data)
    return buffer.getvalue()


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"


def stored(shape: bytes = b"K\x04\x85", strides: bytes = b"K\x01\x85", offset: bytes = b"K\x00") -> bytes:
    """The pickle of one tensor of four numbers in record 0; sizes are given as opcodes."""
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + offset + shape + strides + b"\x89}tR"


def named(value: bytes) -> bytes:
    return b"\x80\x02}X\x01\x00\x00\x00a" + value + b"s."


def long(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(data)) + data


def pickles(canary: Path) -> dict[str, bytes]:
    """Pickles that execute, reserve, multiply, recurse or lie, by what they do."""
    return executing(canary) | swelling() | lying()


def executing(canary: Path) -> dict[str, bytes]:
    """Pickles that would make the file `canary`, or run something else."""
    command = f"touch {canary}".encode()
    text = b"X" + struct.pack("<I", len(command)) + command
    evaluated = f"open({str(canary)!r}, 'w')".encode()
    return {
        "os.system": b"cos\nsystem\n" + text + b"\x85R.",
        "os.system as a weight": named(b"cos\nsystem\n" + text + b"\x85R"),
        "eval": b"cbuiltins\neval\nX" + struct.pack("<I", len(evaluated)) + evaluated + b"\x85R.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + text + b"\x85R.",
        "INST": b"(" + text + b"ios\nsystem\n.",
        "OBJ": b"(cos\nsystem\n" + text + b"o.",
        "NEWOBJ": b"csubprocess\nPopen\n" + text + b"\x85\x81.",
        "EXT": b"\x82\x01.",
        "getattr over an allowed one": b"\x80\x04\x8c\x0ctorch._utils\x8c\x1b_rebuild_tensor_v2.__globals\x93.",
        "BUILD on a constructor": b"ctorch._utils\n_rebuild_tensor_v2\n}X\x01\x00\x00\x00aK\x01sb.",
        "BUILD on a tensor": named(stored() + b"}X\x05\x00\x00\x00shapeX\x01\x00\x00\x00xsb"),
    }


def swelling() -> dict[str, bytes]:
    """Pickles that reserve, multiply or recurse."""
    twice = [(b"h" + bytes([n]) + b"h" + bytes([n]), b"q" + bytes([n + 1]) + b"0") for n in range(80)]
    tuples = b")q\x000" + b"".join(both + b"\x86" + keep for both, keep in twice) + b"h\x50"
    lists = b"]q\x000" + b"".join(b"](" + both + b"e" + keep for both, keep in twice) + b"h\x50"
    ordered = b"ccollections\nOrderedDict\n"
    items = b"](" + b"K\x01K\x02\x86" * 5000 + b"eq\x000"
    colliding = b"".join(long(n * (2**61 - 1)) + b"K\x01" for n in range(1, 20_000))
    return {
        "memo of 2**31 places": named(stored() + b"r\xff\xff\xff\x7f"),
        "shared tuples as a key": b"}" + tuples + b"K\x01s.",
        "shared tuples as a weight": named(tuples),
        "shared lists as a weight": named(lists),
        "a deep tuple as a key": b"})" + b"\x85" * 200_000 + b"K\x01s.",
        "a deep tuple as a weight": named(b")" + b"\x85" * 200_000),
        "deep lists": named(b"]" * 300_000 + b"a" * 299_999),
        "a list within itself": b"\x80\x02]q\x00(h\x00e.",
        "a dict within itself": b"\x80\x02}q\x00X\x05\x00\x00\x00modelh\x00s.",
        "copies of a long list": named(items + (ordered + b"h\x00\x85R0") * 5000 + b"N"),
        "keys that collide": b"}(" + colliding + b"u.",
        "a million marks": b"(" * 499_000 + b".",
        "a million dicts": b"}" * 499_000 + b".",
        "more parts than allowed": b"}0" * 300_000 + b".",
        "a number of 10 MB": named(long(1 << 80_000_000)),
        "a number of 10 MB as a size": named(stored(long(1 << 80_000_000) + b"\x85")),
        "a decimal number without end": named(b"L" + b"9" * 100_000 + b"L\n"),
        "a text of 2**62 bytes": named(b"\x8d" + struct.pack("<Q", 2**62)),
        "bytes of 2**62": named(b"\x8e" + struct.pack("<Q", 2**62)),
        "a bytearray of 2**62": named(b"\x96" + struct.pack("<Q", 2**62)),
        "a frame of 2**63": b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"}.",
        "a million dimensions": named(stored(b"(" + b"K\x01" * 400_000 + b"t", b"(" + b"K\x01" * 400_000 + b"t")),
    }


def lying() -> dict[str, bytes]:
    """Pickles of a tensor whose sizes, place or name cannot be, and of nothing; and a good one."""
    return {
        "a negative size": named(stored(b"J\xff\xff\xff\xff\x85")),
        "a negative offset": named(stored(offset=b"J\xff\xff\xff\xff")),
        "a negative stride": named(stored(strides=b"J\xff\xff\xff\xff\x85")),
        "a size of 2**62": named(stored(long(2**62) + b"\x85")),
        "sizes whose product is 0": named(stored(long(2**62) + b"K\x00\x86", b"K\x01K\x01\x86")),
        "a stride of 2**62": named(stored(strides=long(2**62) + b"\x85")),
        "2**60 copies by a stride of 0": named(stored(long(2**60) + b"\x85", b"K\x00\x85")),
        "an offset behind the end": named(stored(offset=long(2**40))),
        "a float as a size": named(stored(b"G\x7f\xf0\x00\x00\x00\x00\x00\x00\x85")),
        "a storage that is a list": named(b"ctorch._utils\n_rebuild_tensor_v2\n(]K\x00K\x04\x85K\x01\x85\x89}tR"),
        "a storage in a record elsewhere": named(stored()).replace(b"\x01\x00\x00\x000X", b"\x05\x00\x00\x00../xyX"),
        "a name with escapes": b"\x80\x02}X\x08\x00\x00\x00\x1b[31mred" + stored() + b"s.",
        "a name of half a character": b"\x80\x02}X\x03\x00\x00\x00\xed\xa0\x80" + stored() + b"s.",
        "a name of 10 MB": b"\x80\x02}X" + struct.pack("<I", 10**7) + b"a" * 10**7 + stored() + b"s.",
        "a global of 10 MB": b"c" + b"a" * 10**7 + b"\nb\n.",
        "nothing": b"",
        "only the end": b".",
        "a good one": named(stored()),
    }  # fmt: skip


def zips() -> dict[str, bytes]:
    """Zip files whose directory lies."""
    good = pth(named(stored()), **{"0": bytes(16)})
    end, entry_at, local = good.rindex(b"PK\x05\x06"), good.index(b"PK\x01\x02"), good.index(b"PK\x03\x04", 10)

    def patched(position: int, layout: str, *numbers: int) -> bytes:
        data = bytearray(good)
        struct.pack_into(layout, data, position, *numbers)
        return bytes(data)

    zip64 = struct.pack("<4s28xQQQ", b"PK\x06\x06", 2**60, 2**62, 2**61)
    locator = struct.pack("<4s4xQ4x", b"PK\x06\x07", end)
    doubled = io.BytesIO()
    with zipfile.ZipFile(doubled, "w") as archive:
        for name in ("archive/data.pkl", "archive/data/0", "archive/data/1"):
            archive.writestr(name, named(stored()) if name.endswith("pkl") else bytes(16))
    many = struct.pack("<4s24xH14xL", b"PK\x01\x02", 0, 0)
    return {
        "a good one": good,
        "a million records": good[:end] + many * 65_535 + struct.pack("<4s4xHHLL2x", b"PK\x05\x06", 65_535, 65_535,
                                                                     46 * 65_535, end),
        "2**60 records": good[:end] + zip64 + locator + good[end:],
        "a locator to nowhere": good[:end] + struct.pack("<4s4xQ4x", b"PK\x06\x07", 2**63) + good[end:],
        "a directory behind the end": patched(end + 16, "<L", 2**32 - 2),
        "a directory of 4 GB": patched(end + 12, "<L", 2**32 - 2),
        "more records than there are": patched(end + 10, "<H", 60_000),
        "an encrypted record": patched(entry_at + 8, "<H", 1),
        "a compressed record": patched(entry_at + 10, "<H", 8),
        "a record of 4 GB": patched(entry_at + 20, "<LL", 2**32 - 2, 2**32 - 2),
        "a record whose size is nowhere": patched(entry_at + 20, "<LL", 2**32 - 1, 2**32 - 1),
        "a record behind the end": patched(entry_at + 42, "<L", 2**32 - 2),
        "a record in the middle of another": patched(entry_at + 42, "<L", 11),
        "a local name of 64 KB": patched(local + 26, "<HH", 65_535, 65_535),
        "a name in broken UTF-8": good.replace(b"archive/data/0", b"archive\xff\xfe\xfd/\xed\xa0\xb0")[:],
        "the same name twice": doubled.getvalue().replace(b"archive/data/1", b"archive/data/0"),
        "a path": good.replace(b"archive/data.pkl", b"../.././data.pkl"),
        "two directories": good + good[end:],
        "only an end": good[end:].rjust(100, b"\0").replace(b"\0\0\0\0", b"PK\x03\x04", 1),
    }  # fmt: skip


def headers() -> dict[str, bytes]:
    """Safetensors headers that lie, nest or swell."""
    good = {"a": entry()}
    big = "9" * 4000
    return {
        "a good one": safetensors(good, bytes(8)),
        "deep lists": safetensors(b'{"a":' + b"[" * 2_000_000, bytes(8)),
        "deep dicts": safetensors(b'{"a":' * 500_000, bytes(8)),
        "deep metadata": safetensors(b'{"__metadata__":' + b'{"a":' * 100_000 + b"}" * 100_001),
        "10 million empty lists": safetensors(b'{"a":[' + b"[]," * 10_000_000 + b"[]]}"),
        "10 million sizes": safetensors(b'{"a":{"dtype":"U8","data_offsets":[0,0],"shape":[' + b"9," * 10**7 + b"0]}}"),
        "65 sizes": safetensors({"a": entry([1] * 65, [0, 4])}, bytes(4)),
        "a million sizes": safetensors({"a": entry([2] * 900_000, [0, 4])}, bytes(4)),
        "huge sizes": safetensors(f'{{"a":{{"dtype":"F32","shape":[{big},{big}],"data_offsets":[0,8]}}}}'.encode()),
        "huge offsets": safetensors(f'{{"a":{{"dtype":"F32","shape":[2],"data_offsets":[{big},{big}8]}}}}'.encode()),
        "a number of 100 000 digits": safetensors(b'{"a":' + b"9" * 100_000 + b"}"),
        "an infinite size": safetensors(b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}'),
        "NaN": safetensors(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}'),
        "negative offsets": safetensors({"a": entry(offsets=[-8, 0])}, bytes(8)),
        "an offset before the other": safetensors({"a": entry(offsets=[8, 0])}, bytes(8)),
        "offsets of text": safetensors({"a": entry(offsets="08")}, bytes(8)),
        "a dtype that is a list": safetensors({"a": entry(dtype=[["F32"]])}, bytes(8)),
        "a dtype of 1 MB": safetensors({"a": entry(dtype="F" * 10**6)}, bytes(8)),
        "a name of half a character": safetensors(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", bytes(8)),
        "a name with escapes": safetensors({"\x1b[31m": entry()}, bytes(8)),
        "a name of 1 MB": safetensors({"a" * 10**6: entry()}, bytes(8)),
        "a name twice": safetensors(b'{"a":{},"a":{}}'),
        "a name twice within": safetensors(b'{"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}'),
        "metadata of numbers": safetensors({"__metadata__": {"a": 1}, **good}, bytes(8)),
        "UTF-16": safetensors(json.dumps(good).encode("utf-16"), bytes(8)),
        "broken UTF-8": safetensors(b'{"\xff":{}}'),
        "NUL": safetensors(b"{\0}"),
        "a header of 2**63": struct.pack("<Q", 2**63) + b"{}",
        "a header of 2**64 - 1": struct.pack("<Q", 2**64 - 1) + b"{}",
        "a header longer than the file": struct.pack("<Q", 99_999_999) + b"{}",
        "20 000 empty tensors in one place": safetensors({str(n): entry([0], [0, 0]) for n in range(20_000)}),
    }


NAMES = (
    *("../a.safetensors", "/etc/passwd", "..", ".", "", "a/b", "..\\b", "C:b", "C:\\b", "\\\\host\\b", "a\0b", "~"),
    *("a.safetensors:stream", "NUL", "loop", "folder", "\ud800", "a" * 5000, INDEX, 7, None, ["a"], {"a": 1}),
)


def indexes() -> Iterator[Case]:
    """Indexes of shards that point elsewhere."""
    shard = safetensors({"a": entry()}, bytes(8))
    links = {"loop": "loop2", "loop2": "loop", "folder": ".", "dangling": "nowhere"}
    for name in NAMES:
        files = {INDEX: json.dumps({"weight_map": {"a": name}}).encode(), "b.safetensors": shard}
        yield Case(f"index: {str(name)[:20]!r}", files, links)
    texts = {
        "deep": b'{"weight_map":' + b"[" * 1_000_000,
        "a name twice": b'{"weight_map":{"a":"b.safetensors","a":"../b"}}',
        "20 000 names": json.dumps({"weight_map": {str(n): f"{n}.safetensors" for n in range(20_000)}}).encode(),
        "10 million lists": b'{"weight_map":[' + b"[]," * 10_000_000 + b"[]]}",
        "a number": b'{"weight_map":' + b"9" * 100_000 + b"}",
        "mixed": b'{"weight_map":{"a":"b.safetensors","b":3}}',
        "zeros": bytes(10_000),
    }
    for name, text in texts.items():
        yield Case(f"index: {name}", {INDEX: text, "b.safetensors": shard}, links)
    for name in ("loop", "dangling"):
        yield Case(f"link: {name}", {}, {"a.safetensors": name, **links})
    yield Case("index: a link to itself", {}, {INDEX: INDEX})
    yield Case("a shard among 99 999", {"a-00001-of-99999.safetensors": shard})
    yield Case("a shard among none", {"a-00001-of-00000.safetensors": shard})


def ggufs() -> dict[str, bytes]:
    """GGUF headers that lie; the mutations do the rest."""
    start = b"GGUF\x03\x00\x00\x00"
    one, kind = struct.pack("<QQ", 1, 1), struct.pack("<Q", 1) + b"x"
    nested = kind + struct.pack("<I", 9)
    return {
        "2**64 tensors": start + struct.pack("<QQ", 2**64 - 1, 0),
        "2**64 fields": start + struct.pack("<QQ", 1, 2**64 - 1),
        "a name of 2**64": start + one + struct.pack("<Q", 2**64 - 1) + bytes(100),
        "a text of 2**63": start + one + kind + struct.pack("<IQ", 8, 2**63) + bytes(100),
        "2**62 texts": start + one + nested + struct.pack("<IQ", 8, 2**62) + bytes(100),
        "2**62 lists": start + one + nested + struct.pack("<IQ", 9, 2**62) + bytes(100),
        "deep lists": start + one + nested + struct.pack("<IQ", 9, 1) * 100_000,
        "2**62 numbers": start + one + nested + struct.pack("<IQ", 12, 2**62) + bytes(100),
        "5 million empty texts": start + one + nested + struct.pack("<IQ", 8, 5 * 10**6) + bytes(40 * 10**6),
        "500 000 empty texts": start + one + nested + struct.pack("<IQ", 8, 500_000) + bytes(4 * 10**6),
        "2**32 dimensions": start + struct.pack("<QQ", 1, 0) + kind + struct.pack("<I", 2**32 - 1) + bytes(100),
    }


def by_hand(canary: Path) -> Iterator[Case]:
    """All cases made by hand."""
    for name, data in headers().items():
        yield Case(f"safetensors: {name}", {"a.safetensors": data})
    for name, data in pickles(canary).items():
        yield Case(f"pickle: {name}", {"a.pth": pth(data, **{"0": bytes(16)})})
        if len(data) < 100_000:
            yield Case(f"pickle, cut: {name}", {"a.pth": pth(data)[: 46 + len(data)]})
    for name, data in zips().items():
        yield Case(f"zip: {name}", {"a.pth": data})
    for name, data in ggufs().items():
        yield Case(f"gguf: {name}", {"a.gguf": data})
    yield from indexes()


EXTREMES = [0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
VALUES = [-1, 0, 2**31, 2**63, 2**70, 1.5, "x", "", None, True, [], {}, [[]], [2**40] * 3, {"dtype": "F32"}, "F8_E4M3"]
PIECES = [
    b"\x80\x02", b"}", b"]", b")", b"(", b"t", b"\x85", b"\x86", b"\x87", b"R", b"b", b"s", b"u", b"a", b"e", b"q\x00",
    b"h\x00", b"q\x01", b"h\x01", b"0", b"1", b"2", b"N", b"\x88", b"Q", b"K\x00", b"K\x04", b"\x8a\x01\xff", b"\x94",
    b"X\x07\x00\x00\x00storage", b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x00a", b"ctorch\nFloatStorage\n", b"l", b"d",
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._utils\n_rebuild_tensor_v3\n", b"ctorch\nfloat8_e4m3fn\n",
    b"ctorch._utils\n_rebuild_parameter\n", b"ccollections\nOrderedDict\n", b"ctorch.storage\nUntypedStorage\n",
    STORAGE, stored(),
    b"X\x05\x00\x00\x00model", b".", b"cos\nsystem\n", b"\x93", b"\x81", b"P0\n", b"I01\n", b"S'a'\n",
]  # fmt: skip


def mutated(seeds: Mapping[str, bytes], count: int, seed: int) -> Iterator[Case]:
    """`count` mutations of good files, the same ones for the same seed.

    The files whose names begin with an m are shards of one checkpoint and their index, and stay together.
    """
    choice = random.Random(seed)
    names = sorted(seeds)
    for number in range(count):
        name = names[number % len(names)]
        ways = (*WAYS.get(Path(name).suffix, ()), _bytes)
        way = ways[number // len(names) % len(ways)]
        data = way(choice, seeds[name])
        others = {other: seeds[other] for other in names if other != name and {name[0], other[0]} == {"m"}}
        yield Case(f"mutation {number} of {name} ({way.__name__}, seed {seed})", {name: data, **others})


def _bytes(choice: random.Random, data: bytes) -> bytes:
    """Changes of bytes, mostly near the beginning and the end, where the structure is."""
    for _ in range(choice.choice((1, 1, 1, 3))):
        reach = choice.choice((100, 1000, len(data)))
        at = choice.randrange(max(1, min(reach, len(data))))
        at = len(data) - at if choice.random() < 0.3 else at
        number = choice.choice(EXTREMES)
        width = choice.choice((2, 4, 8))
        some = choice.randrange(64)
        head, tail = data[:at], data[at:]
        match choice.choice(("flip", "number", "cut", "delete", "repeat", "zeros", "insert", "extend")):
            case "flip":
                data = head + bytes(byte ^ 1 << choice.randrange(8) for byte in tail[:1]) + tail[1:]
            case "number":
                data = head + number.to_bytes(8, "little")[:width] + tail[width:]
            case "cut":
                data = head
            case "delete":
                data = head + tail[some:]
            case "repeat":
                data = head + tail[:some] * choice.choice((2, 3, 100)) + tail[some:]
            case "zeros":
                data = head + bytes(some) + tail[some:]
            case "insert":
                data = head + choice.randbytes(some) + tail
            case "extend":
                data += head
    return data


def _json(choice: random.Random, data: bytes) -> bytes:
    """Changes of the values of a safetensors header or an index, which stays JSON."""
    framed = data[8:9] == b"{"
    length = int.from_bytes(data[:8], "little") if framed else len(data)
    fields = json.loads(data[8 : 8 + length] if framed else data)
    table = fields if framed else fields["weight_map"]
    name = choice.choice(list(table))
    if isinstance(table[name], dict) and choice.random() < 0.8:
        key = choice.choice(list(table[name]))
        if isinstance(table[name][key], list) and table[name][key] and choice.random() < 0.7:
            table[name][key][choice.randrange(len(table[name][key]))] = choice.choice(VALUES)
        else:
            table[name][key] = choice.choice(VALUES)
    else:
        table[choice.choice((name, "__metadata__", "b"))] = choice.choice([*VALUES, *NAMES])
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :] if framed else text


def _pickle(choice: random.Random, data: bytes) -> bytes:
    """Changes within the pickle, in a zip that stays whole; sometimes opcodes by chance."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in records if name.endswith("data.pkl"))
    if choice.random() < 0.3:
        records[name] = b"".join(choice.choices(PIECES, k=choice.randrange(40))) + b"."
    else:
        at, piece = choice.randrange(len(records[name])), choice.choice(PIECES)
        records[name] = records[name][:at] + piece + records[name][at + choice.choice((0, 1, len(piece))) :]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for record, content in records.items():
            archive.writestr(record, content)
    return buffer.getvalue()


WAYS: dict[str, tuple[Callable[[random.Random, bytes], bytes], ...]] = {
    ".safetensors": (_json,),
    ".json": (_json,),
    ".pth": (_pickle, _pickle),
}
