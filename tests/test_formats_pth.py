import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from wangen.generator.errors import WangenError
from wangen.generator.formats import Header, TensorInfo
from wangen.generator.formats.one_file import read_file
from wangen.generator.formats.pth import GLOBALS, read_pth

NAMES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
VAE = Path(__file__).parent / "vectors" / "vae21" / "Wan2.1_VAE.pth"


def save(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def value(info: TensorInfo) -> torch.Tensor:
    """What a tensor's place holds, read without PyTorch's own loader."""
    place, dtype = info.place, NAMES[info.dtype]
    assert place is not None
    with place.file.open("rb") as file:
        file.seek(place.offset)
        data = bytearray(file.read(place.num_bytes))
    if not data:
        return torch.empty(info.shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
    return flat.as_strided(info.shape, place.strides) if place.strides else flat.reshape(info.shape)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = left.contiguous(), right.contiguous()
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def zipped(path: Path, pickled: bytes, **records: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, data in records.items():
            archive.writestr(f"archive/{name.replace('__', '/')}", data)
    return path


def rewritten(source: Path, path: Path, **changes: bytes) -> Path:
    """A copy of a `.pth` with other contents of some records."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, changes.get(info.filename.split("/", 1)[1], old.read(info)))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_is_found_with_its_bytes(tmp_path: Path, name: str):
    tensor = torch.arange(48, dtype=torch.uint8).view(NAMES[name]).reshape(-1, 2)
    header = read_pth(save(tmp_path / "a.pth", {"first": torch.ones(3), "a": tensor}))
    assert (header.format, header.tensors["a"].dtype) == ("pth", name)
    assert same(value(header.tensors["a"]), tensor)


def test_views_of_one_storage_have_places_of_their_own(tmp_path: Path):
    base = torch.arange(60.0).reshape(3, 4, 5)
    content = {
        "whole": base,
        "row": base[1],
        "transposed": base.transpose(0, 2),
        "column": base[:, 2, 3],
        "every other": base[:, ::2],
        "tied": base,
        "one": base[2, 3, 4],
        "none": base[:, :0],
        "repeated": base[0, 0, :1].expand(4),
    }
    header = read_pth(save(tmp_path / "a.pth", content))
    for name, tensor in content.items():
        assert same(value(header.tensors[name]), tensor), name
    assert header.tensors["whole"].place == header.tensors["tied"].place
    assert header.tensors["transposed"].place.strides == (1, 5, 20)  # type: ignore[union-attr]
    assert header.tensors["row"].place.strides is None  # type: ignore[union-attr]


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path):
    path = save(tmp_path / "a.pth", {"bomb": torch.ones(1).expand(2**40)})
    with pytest.raises(WangenError, match="'bomb' repeats its numbers"):
        read_pth(path)


def test_a_small_file_that_stands_for_endless_weights_is_refused(tmp_path: Path):
    block = torch.zeros(1000, 1000)
    path = save(tmp_path / "bomb.pth", {f"blocks.{number}.weight": block for number in range(100)})
    assert path.stat().st_size < 5e6
    with pytest.raises(WangenError, match="share their numbers"):
        read_pth(path)


def test_tensors_that_are_not_what_is_stored_are_refused(tmp_path: Path):
    negative = torch.ones(4, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    with pytest.raises(WangenError, match="negative or conjugate"):
        read_pth(save(tmp_path / "negative.pth", {"a": negative}))
    with pytest.raises(WangenError, match="repeats its numbers"):
        read_pth(save(tmp_path / "wide.pth", {"a": torch.ones(3, 1).expand(3, 5)}))


def test_parameters_and_state_dicts_with_versions_are_read(tmp_path: Path):
    layer = torch.nn.Linear(2, 3)
    header = read_pth(save(tmp_path / "a.pth", layer.state_dict()))
    assert {name: info.shape for name, info in header.tensors.items()} == {"weight": (3, 2), "bias": (3,)}
    header = read_pth(save(tmp_path / "b.pth", dict(layer.named_parameters())))
    assert same(value(header.tensors["weight"]), layer.weight.detach())


@pytest.mark.parametrize("key", ["state_dict", "module", "model", "model_state_dict"])
def test_weights_within_what_a_training_program_saved_are_found(tmp_path: Path, key: str):
    content = {"epoch": 3, "loss": 0.5, "config": {"sizes": [1, 2, (3, None)]}, key: {"a": torch.ones(2)}}
    assert list(read_pth(save(tmp_path / "a.pth", content)).tensors) == ["a"]
    assert list(read_pth(save(tmp_path / "b.pth", {"model": {key: {"a": torch.ones(2)}}})).tensors) == ["a"]


def test_a_name_that_wraps_elsewhere_may_be_a_tensor(tmp_path: Path):
    assert list(read_pth(save(tmp_path / "a.pth", {"model": torch.ones(2)})).tensors) == ["model"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickles_is_read(tmp_path: Path, protocol: int):
    path = tmp_path / "a.pth"
    torch.save({"a": torch.ones(2), "b" * 300: torch.ones(3, 1)}, path, pickle_protocol=protocol)
    assert [info.shape for info in read_pth(path).tensors.values()] == [(2,), (3, 1)]


@pytest.mark.parametrize("fraction", [0.4, 0.9, 0.9999])
def test_a_file_cut_short_says_at_least_how_long_it_would_be(tmp_path: Path, fraction: float):
    whole = save(tmp_path / "whole.pth", {f"layer.{n}": torch.ones(1000, n + 1) for n in range(20)}).read_bytes()
    path = tmp_path / "cut.pth"
    path.write_bytes(whole[: int(len(whole) * fraction)])
    with pytest.raises(WangenError, match="incomplete") as caught:
        read_pth(path)
    words = caught.value.found
    assert f"{path.stat().st_size} bytes found" in words
    if fraction < 0.9999:
        expected = int(words.split("at least ")[1].split()[0])
        assert 0.95 * len(whole) < expected <= len(whole)


def test_a_file_cut_within_its_pickle_is_told_too(tmp_path: Path):
    path = tmp_path / "cut.pth"
    path.write_bytes(VAE.read_bytes()[:20_000])
    with pytest.raises(WangenError, match="incomplete or damaged: more than 20000 bytes expected, 20000 bytes found"):
        read_pth(path)


def test_code_is_named_even_in_a_file_cut_short(tmp_path: Path):
    path = zipped(tmp_path / "a.pth", pickle.dumps(os.system, 2), data__0=bytes(1000))
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(WangenError, match=r"refused, not executed: .*posix\.system|nt\.system"):
        read_pth(path)


@pytest.mark.parametrize("pickled", [b"cos\nsystem\n.", b"\x80\x04\x8c\x02os\x8c\x06system\x93.", b"(ios\nsystem\n."])
def test_every_way_to_name_a_function_is_refused_by_name(tmp_path: Path, pickled: bytes):
    with pytest.raises(WangenError, match=r"refused, not executed: this pickle wants os\.system"):
        read_pth(zipped(tmp_path / "a.pth", pickled))


def test_only_constructors_that_check_their_arguments_can_be_called(tmp_path: Path):
    for name in GLOBALS:
        module, _, attribute = name.rpartition(".")
        for arguments in (b")", b"]\x85", b"NNN\x87", b"\x8a\x08" + bytes(7) + b"\x7f\x85", b"(" + b"N" * 300 + b"t"):
            pickled = f"c{module}\n{attribute}\n".encode() + arguments + b"R."
            with pytest.raises(WangenError, match="no state dict"):
                read_pth(zipped(tmp_path / "a.pth", pickled))


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("missing or cut short", {"data/0": bytes(4)}),
        ("big-endian", {"byteorder": b"big"}),
    ],
)
def test_records_that_do_not_fit_are_told(tmp_path: Path, words: str, changes: dict[str, bytes]):
    source = save(tmp_path / "a.pth", {"a": torch.ones(8)})
    assert read_pth(rewritten(source, tmp_path / "same.pth")).tensors["a"].shape == (8,)
    with pytest.raises(WangenError, match=words):
        read_pth(rewritten(source, tmp_path / "b.pth", **changes))


def test_a_torchscript_archive_is_named(tmp_path: Path):
    path = zipped(tmp_path / "a.pt", pickle.dumps({}), **{"constants.pkl": b"", "code____torch__.py": b""})
    with pytest.raises(WangenError, match="TorchScript"):
        read_pth(path)


def test_a_zip_with_weights_inside_names_them(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("wan/model.safetensors", b"")
    with pytest.raises(WangenError, match=r"but 'wan/model\.safetensors'") as caught:
        read_file(tmp_path / "a.zip")
    assert "unpack" in caught.value.cure


@pytest.mark.parametrize("comment", [b"", b"a comment" * 1000])
def test_what_other_zip_programs_write_is_read(tmp_path: Path, comment: bytes):
    path = rewritten(VAE, tmp_path / "a.pth")
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = comment
    assert tensors_of(read_pth(path)) == tensors_of(read_pth(VAE))


def tensors_of(header: Header) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (info.dtype, info.shape) for name, info in header.tensors.items()}


def test_sizes_and_places_in_the_extra_field_are_read(tmp_path: Path):
    """Records behind 4 GiB have their offset there; here every number is put there."""
    data = save(tmp_path / "a.pth", {"a": torch.arange(8.0)}).read_bytes()
    end = data.rindex(b"PK\x05\x06")
    count, _, begin = struct.unpack_from("<HLL", data, end + 10)
    directory, position = b"", begin
    for _ in range(count):
        entry = bytearray(data[position : position + 46])
        packed, size, name, extra, _, _, _, _, offset = struct.unpack_from("<LLHHHHHLL", entry, 20)
        struct.pack_into("<LLHH", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF, name, 28 + 4)
        struct.pack_into("<L", entry, 42, 0xFFFFFFFF)
        wide = b"\x07\x00\x00\x00" + struct.pack("<HHQQQ", 1, 24, size, packed, offset)
        directory += bytes(entry) + data[position + 46 : position + 46 + name] + wide
        position += 46 + name + extra
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(directory), begin, 0)
    (tmp_path / "b.pth").write_bytes(data[:begin] + directory + last)
    assert same(value(read_pth(tmp_path / "b.pth").tensors["a"]), torch.arange(8.0))
