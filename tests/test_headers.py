import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from wangen.generator import headers
from wangen.generator.errors import WangenError

VECTORS = Path(__file__).parent / "vectors"
DIT = VECTORS / "dit_t2v21" / "model.safetensors"
VAE = VECTORS / "vae21" / "Wan2.1_VAE.pth"
T5 = VECTORS / "t5" / "models_t5_umt5-xxl-enc-bf16.pth"
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


def test_importing_it_needs_neither_torch_nor_numpy():
    code = (
        "import sys, wangen.generator.headers as h; from pathlib import Path; h.identify(Path(sys.argv[1]));"
        "sys.exit(bool({'torch', 'numpy', 'safetensors'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(VAE)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (DIT, "wan-transformer-t2v"),
        (SHARD, "wan-transformer-t2v"),
        (VAE, "wan-vae-2.1"),
        (T5, "umt5-encoder"),
        (LORA, "lora"),
    ],
)
def test_files_are_identified_by_their_tensors(path: Path, kind: str):
    assert headers.identify(path) == kind


@pytest.mark.parametrize(
    ("shapes", "kind"),
    [
        ({"patch_embedding.weight": [8, 36, 1, 2, 2], "img_emb.proj.0.weight": [4]}, "wan-transformer-i2v"),
        ({"patch_embedding.weight": [8, 36, 1, 2, 2]}, "wan-transformer-i2v-2.2"),
        ({"patch_embedding.weight": [8, 48, 1, 2, 2]}, "wan-transformer-ti2v"),
        ({"patch_embedding.weight": [8, 52, 1, 2, 2]}, "wan-transformer-other"),
        ({"patch_embedding.weight": [8, 16, 1, 2, 2], "vace_blocks.0.x": [1]}, "wan-transformer-other"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_the_variants_of_the_transformer_are_told_apart(shapes: dict[str, list[int]], kind: str, prefix: str):
    shapes = {**shapes, "blocks.0.self_attn.q.weight": [8, 8]}
    tensors = {prefix + name: headers.TensorInfo("F32", tuple(shape)) for name, shape in shapes.items()}
    assert headers.kind_of(headers.Header(tensors, {}, "safetensors")) == kind
    assert "transformer" in headers.describe(kind)


def test_a_pth_is_read_in_full():
    header = headers.read_header(VAE)
    assert header.format == "pth"
    assert header.tensors["encoder.conv1.weight"] == headers.TensorInfo("F32", (8, 3, 3, 3, 3))
    assert len(header.tensors) == 194
    assert headers.read_header(T5).tensors["token_embedding.weight"].dtype == "BF16"


def test_metadata_are_given():
    assert headers.read_header(LORA).metadata["ss_network_alpha"] == "2.0"


def test_a_file_given_to_the_wrong_flag_is_named_with_the_right_one():
    with pytest.raises(WangenError) as caught:
        headers.expect(DIT, "wan-vae-2.1", "--vae")
    message = str(caught.value)
    assert "this is a Wan text-to-video transformer; --vae takes a Wan 2.1 VAE" in message
    assert "--dit" in message
    assert headers.expect(DIT, "wan-transformer-t2v", "--dit").tensors


def test_an_unknown_file_is_told_by_its_tensors(tmp_path: Path):
    path = write_safetensors(tmp_path / "a.safetensors", {"strange": entry()}, bytes(8))
    assert headers.identify(path) == "unknown"
    with pytest.raises(WangenError, match="strange"):
        headers.expect(path, "wan-vae-2.1", "--vae")


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
    path.write_bytes(VAE.read_bytes()[:length])
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
        ({"a": entry(shape=(2**40, 2**40), offsets=(0, 2**82))}, "cut short"),
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
    with zipfile.ZipFile(VAE) as source, zipfile.ZipFile(tmp_path / "a.pth", "w") as target:
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
    for read in (headers.read_header, headers.identity, headers.identify):
        with pytest.raises(WangenError, match="no such weight file"):
            read(tmp_path / "none.pth")
        with pytest.raises(WangenError, match="a folder"):
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


def test_identity_is_of_the_content(tmp_path: Path):
    for path in (DIT, VAE):
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
    with zipfile.ZipFile(VAE) as source, zipfile.ZipFile(tmp_path / "a.pth", "w") as target:
        for info in source.infolist():
            content = bytearray(source.read(info))
            if info.filename.endswith("/data/7"):
                content[0] ^= 1
            target.writestr(info, bytes(content))
    assert headers.identity(tmp_path / "a.pth") != headers.identity(VAE)


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
