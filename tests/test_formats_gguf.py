import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from wangen.generator.errors import WangenError
from wangen.generator.formats import Place
from wangen.generator.formats.gguf import MAX_HEADER_BYTES, TYPES, read_gguf

RANDOM = np.random.default_rng(0)


def write(path: Path, fill: Callable[[gguf.GGUFWriter], object]) -> Path:
    writer = gguf.GGUFWriter(path, "wan")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weight(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def quantised(writer: gguf.GGUFWriter, name: str, kind: Type, values: np.ndarray) -> bytes:
    stored = gguf.quants.quantize(values, kind)
    writer.add_tensor(name, stored, raw_dtype=kind)
    return stored.tobytes()


def stored_bytes(place: Place | None) -> bytes:
    assert place is not None
    return place.file.read_bytes()[place.offset : place.offset + place.num_bytes]


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str = "a", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw(
    path: Path, *, fields: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (tensor(),), version: int = 3,
    counts: tuple[int, int] | None = None, payload: int = 32,
) -> Path:  # fmt: skip
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    header = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + b"".join(fields) + b"".join(tensors)
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(payload))
    return path


def test_the_table_of_types_is_the_librarys():
    known = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    common = known.keys() & TYPES.keys()  # each release of the library knows a few more
    assert len(common) >= 29
    assert {kind: known[kind] for kind in common} == {kind: TYPES[kind] for kind in common}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"])
def test_what_the_library_writes_is_found_in_its_place(tmp_path: Path, kind: str):
    expected: list[bytes] = []

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("first", weight(3))
        expected.append(quantised(writer, "blocks.0.weight", Type[kind], weight(6, 512)))
        writer.add_tensor("last", weight(2, 3, 4))

    header = read_gguf(write(tmp_path / "a.gguf", fill))
    assert header.format == "gguf"
    assert {name: (info.dtype, info.shape) for name, info in header.tensors.items()} == {
        "first": ("F32", (3,)),
        "blocks.0.weight": (kind, (6, 512)),
        "last": ("F32", (2, 3, 4)),
    }
    assert stored_bytes(header.tensors["blocks.0.weight"].place) == expected[0]


def test_all_that_the_library_reads_is_the_same_here(tmp_path: Path):
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(64)
        for number, kind in enumerate((Type.Q8_0, Type.F16, Type.Q5_1)):
            quantised(writer, f"tensor.{number}", kind, weight(number + 1, 64))

    path = write(tmp_path / "a.gguf", fill)
    read = {tensor.name: (tensor.data_offset, tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    found = {name: info.place for name, info in read_gguf(path).tensors.items()}
    assert {name: (place.offset, place.num_bytes) for name, place in found.items() if place} == read


def test_shapes_that_comfyui_flattened_are_restored(tmp_path: Path):
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_array("comfy.gguf.orig_shape.conv", [2, 8, 1, 4, 8])
        quantised(writer, "conv", Type.Q8_0, weight(2, 256))
        writer.add_tensor("patch_embedding.weight", weight(4, 3, 1, 2, 2))

    header = read_gguf(write(tmp_path / "a.gguf", fill))
    assert header.tensors["conv"].shape == (2, 8, 1, 4, 8)
    assert header.tensors["patch_embedding.weight"].shape == (4, 3, 1, 2, 2)


def test_scalars_become_metadata_and_a_tokenizer_is_passed_over(tmp_path: Path):
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list([f"▁token{number}" for number in range(256_384)])
        writer.add_token_scores([0.5] * 256_384)
        writer.add_array("nested", [[1, 2], [3]])
        writer.add_chat_template("x" * 10_000)
        writer.add_bool("tokenizer.ggml.add_space_prefix", True)
        writer.add_uint32("t5.block_count", 24)
        writer.add_float32("t5.epsilon", 0.5)
        writer.add_tensor("token_embd.weight", weight(2, 32))

    header = read_gguf(write(tmp_path / "a.gguf", fill))
    assert header.metadata == {
        "general.architecture": "wan",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.add_space_prefix": "True",
        "t5.block_count": "24",
        "t5.epsilon": "0.5",
    }
    assert list(header.tensors) == ["token_embd.weight"]


def test_a_file_cut_short_anywhere_says_what_was_expected(tmp_path: Path):
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_array("numbers", [1, 2, 3])
        writer.add_array("words", ["one", "two"])
        quantised(writer, "a", Type.Q8_0, weight(4, 64))
        writer.add_tensor("b", weight(16))

    whole = write(tmp_path / "whole.gguf", fill).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(4, len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(WangenError, match=rf"cut short: .* bytes expected, {length} found"):
            read_gguf(cut)
    with pytest.raises(WangenError, match=f"short: {len(whole)} bytes expected"):
        read_gguf(cut)


def test_version_2_is_read_and_others_are_named(tmp_path: Path):
    assert read_gguf(raw(tmp_path / "a.gguf", version=2)).tensors["a"].shape == (8,)
    for version, words in ((1, "version 1"), (4, "version 4"), (0, "version 0"), (3 << 24, "big endian")):
        with pytest.raises(WangenError, match=words):
            read_gguf(raw(tmp_path / "a.gguf", version=version))


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("would hold", {"counts": (2**63, 0)}),
        ("would hold", {"counts": (1, 2**40)}),
        ("no tensors", {"tensors": ()}),
        ("occurs twice", {"counts": (1, 9)}),
        ("bytes long", {"tensors": (struct.pack("<Q", 2**60) + b"a",)}),
        ("not a name", {"tensors": (tensor("a\x1b[31m"),)}),
        ("occurs twice", {"tensors": (tensor("a"), tensor("a", offset=32)), "payload": 64}),
        ("occurs twice", {"fields": (field("x", 0, b"1"), field("x", 0, b"1"))}),
        ("dimensions", {"tensors": (text("a") + struct.pack("<I", 2**31),)}),
        ("GGML type 99", {"tensors": (tensor(kind=99),)}),
        ("cannot be of shape", {"tensors": (tensor(dims=(31, 2), kind=8),)}),
        ("cannot be of shape", {"tensors": (tensor(dims=(2**64 - 1,)),)}),
        ("cannot be of shape", {"tensors": (tensor(offset=2**64 - 32),)}),
        ("cut short", {"tensors": (tensor(dims=(2**60, 2**60, 2**60)),)}),
        ("over each other", {"tensors": (tensor("a", (16,)), tensor("b", offset=32)), "payload": 64}),
        ("multiple of 32", {"tensors": (tensor(offset=4),), "payload": 64}),
        ("32 bytes too many", {"payload": 64}),
        ("power of two", {"fields": (field("general.alignment", 4, struct.pack("<I", 48)),)}),
        ("power of two", {"fields": (field("general.alignment", 4, struct.pack("<I", 0)),)}),
        ("power of two", {"fields": (field("general.alignment", 8, text("x")),)}),
        ("unknown type 13", {"fields": (field("x", 13, b""),)}),
        ("lists within lists", {"fields": (field("x", 9, struct.pack("<IQ", 9, 1) * 6),)}),
        ("more than", {"fields": (field("x", 9, struct.pack("<IQ", 8, 2**62)),)}),
        ("cut short", {"fields": (field("x", 9, struct.pack("<IQ", 0, 2**62)),)}),
        ("no shape", {"fields": (field("comfy.gguf.orig_shape.a", 4, b"1234"),)}),
        ("cannot be", {"fields": (field("comfy.gguf.orig_shape.a", 9, struct.pack("<IQii", 5, 2, 3, 3)),)}),
        ("cannot be", {"fields": (field("comfy.gguf.orig_shape.a", 9, struct.pack("<IQii", 5, 2, -2, -4)),)}),
    ],
)
def test_what_no_program_writes_is_refused(tmp_path: Path, words: str, changes: dict[str, object]):
    with pytest.raises(WangenError, match=words) as caught:
        read_gguf(raw(tmp_path / "bad.gguf", **changes))  # type: ignore[arg-type]
    assert caught.value.cure


def test_a_header_without_end_is_left_early(tmp_path: Path):
    path = raw(tmp_path / "a.gguf", fields=(field("x", 9, struct.pack("<IQ", 0, 2**40)),))
    with path.open("r+b") as file:
        file.truncate(2**41)
    with pytest.raises(WangenError, match=f"longer than {MAX_HEADER_BYTES}"):
        read_gguf(path)
