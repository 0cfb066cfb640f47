import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
from parity import DIT, T5, VAE21, VECTORS

from wangen.generator import headers
from wangen.generator.errors import WangenError

LORA = VECTORS / "lora_t2v21" / "lora_musubi.safetensors"
SHARDED = VECTORS / "dit_t2v21_e2e" / "sharded"
SHARD = SHARDED / "diffusion_pytorch_model-00002-of-00002.safetensors"
INDEX = "diffusion_pytorch_model.safetensors.index.json"


def write_safetensors(path: Path, fields: object, payload: bytes = b"") -> Path:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    return path


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple[int, ...] = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write_pth(path: Path, content: object, **records: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content if isinstance(content, bytes) else pickle.dumps(content, 2))
        for name, data in records.items():
            archive.writestr(f"archive/data/{name}", data)
    return path


def test_a_pth_is_read_in_full():
    header = headers.read_header(VAE21)
    assert header.format == "pth"
    assert header.tensors["encoder.conv1.weight"] == headers.TensorInfo("F32", (8, 3, 3, 3, 3))
    assert len(header.tensors) == 194
    assert headers.read_header(T5).tensors["token_embedding.weight"].dtype == "BF16"


def test_metadata_are_given():
    assert headers.read_header(LORA).metadata["ss_network_alpha"] == "2.0"


@pytest.mark.parametrize("length", [0, 5, 8, 100, 4000, 100_000, -1])
def test_a_safetensors_file_cut_short_is_told(tmp_path: Path, length: int):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(DIT.read_bytes()[:length])
    with pytest.raises(WangenError) as caught:
        headers.read_header(path)
    if length > 8:
        assert f"{path.stat().st_size} found" in str(caught.value)
    if length > 10_000 or length < 0:
        assert f"{DIT.stat().st_size} bytes expected" in str(caught.value)


@pytest.mark.parametrize("length", [0, 3, 100, 20_000, 2_000_000, -1, -30])
def test_a_pth_cut_short_is_told(tmp_path: Path, length: int):
    path = tmp_path / "cut.pth"
    path.write_bytes(VAE21.read_bytes()[:length])
    with pytest.raises(WangenError) as caught:
        headers.read_header(path)
    if length > 3 or length < 0:
        assert "incomplete" in str(caught.value)
        assert f"{path.stat().st_size} bytes found" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (b"[1]", "no JSON object"),
        (b"{ ", "no JSON"),
        (b'{"a": 1, "a": 1}', "occurs twice"),
        (b"[" * 100_000, "no JSON"),
        ({"__metadata__": {"a": 1}}, "not text"),
        ({"a": entry(dtype="F33")}, "unknown dtype"),
        ({"a": entry(shape=(3,))}, "needs 12 bytes"),
        ({"a": entry(shape=(-2,))}, "malformed"),
        ({"a": entry(offsets=(8, 16))}, "begins at 8"),
        ({"a": entry(), "b": entry()}, "begins at 0"),
        ({"a": entry(offsets=(0, 8, 9))}, "malformed"),
        ({"a": {}}, "malformed"),
        ({"a": None}, "malformed"),
        ({"a": entry(shape=(1,), offsets=(0, 4))}, "4 bytes too many"),
        ({"a": entry(shape=(2**40, 2**20), offsets=(0, 2**62))}, "cut short"),
        ({"a": entry(shape=(2**40, 2**40), offsets=(0, 2**82))}, "malformed"),
    ],
)
def test_malformed_headers_are_refused(tmp_path: Path, fields: object, message: str):
    path = write_safetensors(tmp_path / "bad.safetensors", fields, bytes(8))
    with pytest.raises(WangenError, match=message):
        headers.read_header(path)


@pytest.mark.parametrize("length", [2**63, 2**40, 100_000_001, 1])
def test_an_absurd_header_size_is_refused_without_reading_it(tmp_path: Path, length: int):
    path = tmp_path / "absurd.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" * 100)
    with pytest.raises(WangenError, match="header would be"):
        headers.read_header(path)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.target),))


@pytest.mark.parametrize("content", ["bomb", "in a dict"])
def test_code_in_a_pickle_is_named_and_not_executed(tmp_path: Path, content: str):
    made = tmp_path / "made-by-the-pickle"
    path = write_pth(tmp_path / "bad.pth", Bomb(made) if content == "bomb" else {"weight": Bomb(made)})
    with pytest.raises(WangenError, match=r"refused, not executed.*mkdir"):
        headers.read_header(path)
    assert not made.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"\x80\x02.",
        b"\x80\x02}q\x00.",
        [1, 2],
        {"a": 1},
        {1: 2},
        b"\x80\x02]q\x00(h\x00e.",
        b"(lp0\n0",
    ],
)
def test_a_pickle_without_tensors_is_refused(tmp_path: Path, content: object):
    with pytest.raises(WangenError, match="no state dict"):
        headers.read_header(write_pth(tmp_path / "bad.pth", content))


def test_a_header_as_long_as_a_pickle_begins_is_no_pickle(tmp_path: Path):
    text = json.dumps({"a": entry()}).encode().ljust(0x280)
    assert write_safetensors(tmp_path / "a.safetensors", text, bytes(8)).read_bytes()[:2] == b"\x80\x02"
    assert list(headers.read_header(tmp_path / "a.safetensors").tensors) == ["a"]


def test_a_compressed_pth_is_refused(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(100_000))
    with pytest.raises(WangenError, match="compressed"):
        headers.read_header(tmp_path / "a.pth")


def test_a_zip_without_weights_is_refused(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(WangenError, match=r"no data\.pkl"):
        headers.read_header(tmp_path / "a.pth")


def test_a_pth_that_lacks_a_record_is_refused(tmp_path: Path):
    with zipfile.ZipFile(VAE21) as source, zipfile.ZipFile(tmp_path / "a.pth", "w") as target:
        for info in source.infolist():
            if not info.filename.endswith("/data/7"):
                target.writestr(info, source.read(info))
    with pytest.raises(WangenError, match="missing or cut short"):
        headers.read_header(tmp_path / "a.pth")


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"GGUF\x03\x00\x00\x00", "GGUF"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "PyTorch before 1.6"),
        (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00", "a bare pickle"),
    ],
)
def test_what_people_give_by_mistake_is_named(tmp_path: Path, start: bytes, words: str):
    path = tmp_path / "weights.pth"
    path.write_bytes(start + bytes(200))
    with pytest.raises(WangenError, match=words):
        headers.read_header(path)


def test_a_missing_file_and_a_folder_are_told(tmp_path: Path):
    for read in (headers.read_header, headers.identity):
        with pytest.raises(WangenError, match="no such weight file"):
            read(tmp_path / "none.pth")
        with pytest.raises(WangenError, match="a folder without weights"):
            read(tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_told(tmp_path: Path):
    path = tmp_path / "a.pth"
    path.write_bytes(b"")
    path.chmod(0)
    with pytest.raises(WangenError, match="cannot be read"):
        headers.read_header(path)


def test_all_shards_are_found_from_any_of_them():
    first, second = sorted(SHARDED.glob("*.safetensors"))
    for path in (first, second, SHARDED / INDEX, SHARDED / "diffusion_pytorch_model.safetensors"):
        assert headers.shards(path) == [first, second]
        assert headers.read_header(path) == headers.read_header(first)
    whole = headers.read_header(VECTORS / "dit_t2v21_e2e" / "model.safetensors")
    assert headers.read_header(first).tensors == whole.tensors
    assert headers.shards(DIT) == [DIT]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SHARDED, tmp_path / "sharded"))


def test_a_missing_shard_is_named(sharded: Path):
    (sharded / SHARD.name).unlink()
    for name in (SHARD.name.replace("00002-of", "00001-of"), INDEX):
        with pytest.raises(WangenError, match="00002-of-00002"):
            headers.read_header(sharded / name)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..\\b", "C:b", "..", "", 7, "a\0b"]
)
def test_an_index_cannot_leave_its_folder(sharded: Path, name: object):
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WangenError, match="not a file beside it"):
        headers.read_header(sharded / INDEX)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": []}}']
)
def test_a_malformed_index_is_told(sharded: Path, text: str):
    (sharded / INDEX).write_text(text)
    with pytest.raises(WangenError, match="index"):
        headers.read_header(sharded / INDEX)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path):
    for number in (1, 2):
        write_safetensors(tmp_path / f"a-0000{number}-of-00002.safetensors", {"x": entry()}, bytes(8))
    with pytest.raises(WangenError, match="two shards"):
        headers.read_header(tmp_path / "a-00001-of-00002.safetensors")


def put(path: Path, source: Path = DIT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(source, path))


@pytest.mark.parametrize(
    "names",
    [
        ["diffusion_pytorch_model.safetensors"],
        ["diffusion_pytorch_model.fp16.safetensors"],
        ["model.safetensors", "model.fp16.safetensors"],
        ["anything.safetensors", "config.json", "readme.md"],
        ["model.safetensors", "pytorch_model.bin", "model.gguf"],
    ],
)
def test_a_folder_stands_for_the_weights_in_it(tmp_path: Path, names: list[str]):
    for name in names:
        put(tmp_path / name)
    assert headers.shards(tmp_path) == [tmp_path / names[0]]
    assert headers.read_header(tmp_path).tensors == headers.read_header(DIT).tensors
    assert headers.identity(tmp_path) == headers.identity(DIT)


def test_a_folder_stands_for_the_shards_in_it(sharded: Path):
    whole = sorted(sharded.glob("*.safetensors"))
    assert headers.shards(sharded) == whole
    (sharded / INDEX).unlink()
    assert headers.shards(sharded) == whole
    variant = [path.rename(path.with_name(path.name.replace("model-", "model.fp16-"))) for path in whole]
    assert headers.shards(sharded) == variant
    index = {"weight_map": {str(number): path.name for number, path in enumerate(variant)}}
    (sharded / "diffusion_pytorch_model.safetensors.index.fp16.json").write_text(json.dumps(index))
    assert headers.shards(sharded) == variant


def test_a_pickle_is_taken_where_there_is_nothing_else(tmp_path: Path):
    put(tmp_path / "pytorch_model.bin", VAE21)
    assert headers.read_header(tmp_path).format == "pth"
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(WangenError, match=r"several \.bin files"):
        headers.read_header(tmp_path)


def test_several_files_in_a_folder_are_named(tmp_path: Path):
    for name in ("a.safetensors", "b.safetensors"):
        put(tmp_path / name)
    with pytest.raises(WangenError, match=r"2 weight files: a\.safetensors, b\.safetensors"):
        headers.read_header(tmp_path)


def test_the_option_says_which_model_of_a_pipeline_is_meant(tmp_path: Path):
    (tmp_path / "model_index.json").write_text("{}")
    inside = {
        "--dit_high_noise": put(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"),
        "--dit": put(tmp_path / "transformer_2" / "diffusion_pytorch_model.safetensors"),
        "--t5": put(tmp_path / "text_encoder" / "model.safetensors"),
        "--vae": put(tmp_path / "vae" / "diffusion_pytorch_model.bin", VAE21),
    }
    for flag, path in inside.items():
        assert headers.shards(tmp_path, flag) == [path]
        assert headers.identity(tmp_path, flag) == headers.identity(path)
    with pytest.raises(WangenError, match="no image_encoder folder, only text_encoder, transformer, transf"):
        headers.shards(tmp_path, "--clip")
    with pytest.raises(WangenError, match="a folder of several models"):
        headers.shards(tmp_path)
    shutil.rmtree(tmp_path / "transformer_2")
    assert headers.shards(tmp_path, "--dit") == [inside["--dit_high_noise"]]


def test_an_expert_never_stands_in_for_the_other(tmp_path: Path):
    high = put(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    (tmp_path / "vae").mkdir()
    index: dict[str, object] = {
        "_class_name": "WanPipeline", "boundary_ratio": 0.875, "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"],
    }  # fmt: skip
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert headers.shards(tmp_path, "--dit_high_noise") == [high]
    with pytest.raises(WangenError, match=r"this pipeline has no transformer_2 folder, only transformer, vae"):
        headers.shards(tmp_path, "--dit")
    index["transformer_2"] = [None, None]  # the 5B, which is one model
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert headers.shards(tmp_path, "--dit") == [high]
    shutil.rmtree(tmp_path / "transformer")
    with pytest.raises(WangenError, match=r"this pipeline has no transformer folder, only vae"):
        headers.shards(tmp_path, "--dit")


@pytest.mark.parametrize("text", ["", "[]", "[" * 5000, '{"transformer": 1, "transformer": 2}'])
def test_a_malformed_list_of_a_pipelines_models_is_told(tmp_path: Path, text: str):
    put(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    (tmp_path / "model_index.json").write_text(text)
    with pytest.raises(WangenError, match="no list of a pipeline's models"):
        headers.shards(tmp_path, "--dit")


def test_a_repository_of_the_original_files(tmp_path: Path):
    low = put(tmp_path / "low_noise_model" / "diffusion_pytorch_model.safetensors")
    high = put(tmp_path / "high_noise_model" / "diffusion_pytorch_model.safetensors")
    vae, t5 = put(tmp_path / "Wan2.1_VAE.pth", VAE21), put(tmp_path / T5.name, T5)
    found = [headers.shards(tmp_path, flag) for flag in ("--dit", "--dit_high_noise", "--vae", "--t5")]
    assert found == [[low], [high], [vae], [t5]]


def test_identity_is_of_the_content(tmp_path: Path):
    for path in (DIT, VAE21):
        copy = Path(shutil.copy(path, tmp_path / f"renamed{path.suffix}"))
        assert headers.identity(copy) == headers.identity(path)
        assert len(headers.identity(path)) == 64
    assert headers.identity(DIT) != headers.identity(VECTORS / "dit_t2v21_e2e" / "model.safetensors")
    assert headers.identity(SHARD) == headers.identity(SHARDED / INDEX)


def test_identity_sees_another_weight(tmp_path: Path):
    changed = tmp_path / "a.safetensors"
    data = bytearray(DIT.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    assert headers.identity(changed) != headers.identity(DIT)
    with zipfile.ZipFile(VAE21) as source, zipfile.ZipFile(tmp_path / "a.pth", "w") as target:
        for info in source.infolist():
            content = bytearray(source.read(info))
            if info.filename.endswith("/data/7"):
                content[0] ^= 1
            target.writestr(info, bytes(content))
    assert headers.identity(tmp_path / "a.pth") != headers.identity(VAE21)


def test_identity_of_a_long_file_reads_a_part_of_it(tmp_path: Path):
    path = tmp_path / "long.safetensors"
    num_bytes = 300 * 2**20
    write_safetensors(path, {"a": entry("U8", (num_bytes,), (0, num_bytes))})
    start = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(start + num_bytes)
    before = headers.identity(path)
    for offset in (start, start + num_bytes - 1):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"\x01")
        assert headers.identity(path) != before
        before = headers.identity(path)
