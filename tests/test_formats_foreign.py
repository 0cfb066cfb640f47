import gzip
import io
import json
import pickle
import re
import shutil
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from wangen.generator.errors import WangenError
from wangen.generator.formats.one_file import read_file

VECTORS = Path(__file__).parent / "vectors"
DIT = VECTORS / "dit_t2v21" / "model.safetensors"


def tar_bytes() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(DIT, "model.safetensors")
    return buffer.getvalue()


def old_checkpoint() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def numpy_array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ones(3))
    return buffer.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5676070424\n"
FILES = {
    "Git LFS pointer": LFS,
    "a web page": b"\xef\xbb\xbf\n  <!DOCTYPE HTML>\n<html>",
    "an XML text": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "this is a text, not weights: 'Entry not found'": b"Entry not found\n",
    "a JSON text": b'{"error": "Repository not found"}',
    "PyTorch before 1.6": old_checkpoint(),
    "a bare pickle, which is not read": pickle.dumps({"a": 1}),
    "a NumPy array": numpy_array(),
    "an HDF5 file": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "an ONNX file": b"\x08\x07\x12\x07pytorch\x1a\x032.1" + bytes(100),
    "a TensorFlow Lite file": b"\x1c\x00\x00\x00TFL3" + bytes(100),
    "a msgpack file": b"\x81\xa6params\x82\xa5layer" + bytes(100),
    "before GGUF": b"tjgg\x01\x00\x00\x00" + bytes(100),
    "a packed archive": gzip.compress(b"weights"),
    "a tar archive": tar_bytes(),
    "an image": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "begins with zeros": bytes(100_000),
    "the file is empty": b"",
    "not a safetensors file": bytes(range(200, 256)),
}


@pytest.mark.parametrize("words", FILES)
def test_what_people_give_by_mistake_is_named_with_a_cure(tmp_path: Path, words: str):
    path = tmp_path / "wan.safetensors"
    path.write_bytes(FILES[words])
    with pytest.raises(WangenError, match=words) as caught:
        read_file(path)
    assert caught.value.cure
    assert caught.value.where == str(path)


@pytest.mark.parametrize("words", FILES)
def test_a_safetensors_file_whose_length_looks_like_something_else_is_read(tmp_path: Path, words: str):
    length = int.from_bytes(FILES[words][:2].ljust(2, b"\x01"), "little")
    text = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode().ljust(length)
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0")
    assert read_file(path).tensors["a"].shape == (1,)


@pytest.mark.parametrize("suffix", [".part", ".incomplete", ".crdownload", ".aria2"])
def test_a_download_that_has_not_ended_is_told_by_its_companion(tmp_path: Path, suffix: str):
    path = tmp_path / "wan.safetensors"
    path.write_bytes(DIT.read_bytes()[:5000])
    (tmp_path / f"wan.safetensors{suffix}").write_bytes(b"")
    with pytest.raises(WangenError, match=re.escape(f"wan.safetensors{suffix} beside it")) as caught:
        read_file(path)
    assert "let the download finish" in caught.value.cure


def test_a_complete_file_needs_no_companion_but_aria2_reserves_the_length(tmp_path: Path):
    path = Path(shutil.copy(DIT, tmp_path / "wan.safetensors"))
    (tmp_path / "wan.safetensors.part").write_bytes(b"")
    assert read_file(path).tensors
    (tmp_path / "wan.safetensors.aria2").write_bytes(b"")
    with pytest.raises(WangenError, match="full length and not yet its content"):
        read_file(path)


def test_a_name_as_long_as_names_may_be_is_no_obstacle(tmp_path: Path):
    path = Path(shutil.copy(DIT, tmp_path / ("a" * 243 + ".safetensors")))
    assert read_file(path).tensors
