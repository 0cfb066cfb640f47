import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from wangen.generator import files
from wangen.generator.errors import WangenError
from wangen.generator.headers import read_header
from wangen.runtime import safetensors_file
from wangen.runtime.safetensors_file import Later


def tensors() -> dict[str, torch.Tensor]:
    return {
        "z": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
        "b": torch.tensor([True, False, True]),
        "half": torch.linspace(-1, 1, 5).to(torch.float16),
        "brain": torch.linspace(-1, 1, 7).to(torch.bfloat16),
        "long": torch.tensor([[1, -2]]),
        "byte": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "grad": torch.ones(2, requires_grad=True),
    }


def test_the_library_reads_what_was_written(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    safetensors_file.write(path, tensors(), {"b": "ü", "a": "1"})
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"a": "1", "b": "ü"}
        assert set(opened.keys()) == set(tensors())
        for name, tensor in tensors().items():
            read = opened.get_tensor(name)
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor.detach())
    assert read_header(path).metadata == {"a": "1", "b": "ü"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_the_bytes_depend_on_the_content_alone(tmp_path: Path):
    metadata = {"b": "2", "a": "1", "c": "3"}
    first = b"".join(safetensors_file.serialize(tensors(), metadata))
    backwards = dict(reversed(tensors().items()))
    assert b"".join(safetensors_file.serialize(backwards, dict(reversed(metadata.items())))) == first
    assert int.from_bytes(first[:8], "little") % 8 == 0
    assert first[:200].index(b'"a":"1"') < first[:200].index(b'"b":"2"') < first[:200].index(b'"c":"3"')


def test_tensors_may_be_made_when_their_turn_comes(tmp_path: Path):
    made: list[str] = []

    def later(name: str, tensor: torch.Tensor) -> Later:
        return Later(tensor.dtype, tuple(tensor.shape), lambda: made.append(name) or tensor)  # type: ignore[func-returns-value]

    lazily = {name: later(name, tensor) for name, tensor in tensors().items()}
    chunks = safetensors_file.serialize(lazily, {"a": "1"})
    next(chunks)
    assert made == [], "the header needs no tensor"
    next(chunks)
    assert len(made) == 1
    safetensors_file.write(tmp_path / "later", lazily, {"a": "1"})
    safetensors_file.write(tmp_path / "now", tensors(), {"a": "1"})
    assert (tmp_path / "later").read_bytes() == (tmp_path / "now").read_bytes()
    assert lazily["brain"].num_bytes == 14


def test_names_are_in_order_within_a_dtype():
    chunks = list(safetensors_file.serialize({"b": torch.ones(1), "a": torch.zeros(1)}, {}))
    assert b"".join(chunks[1:]) == bytes(4) + b"\x00\x00\x80\x3f"


def test_a_file_without_tensors_or_metadata_is_readable(tmp_path: Path):
    safetensors_file.write(tmp_path / "a.safetensors", {}, {})
    with safe_open(tmp_path / "a.safetensors", framework="pt") as opened:
        assert list(opened.keys()) == []


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    safetensors_file.write(path, {"a": torch.ones(2)}, {})
    old = path.read_bytes()

    def full() -> torch.Tensor:
        raise OSError(28, "No space left on device")

    with pytest.raises(WangenError, match="No space left"):
        safetensors_file.write(path, {"b": Later(torch.float32, (2,), full), "a": torch.ones(2)}, {})
    assert path.read_bytes() == old
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_file_that_is_open_elsewhere_for_a_moment_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replace, refusals = Path.replace, iter([True, True])

    def refusing(self: Path, target: Path) -> Path:
        if next(refusals, False):
            raise PermissionError(13, "The process cannot access the file")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refusing)
    monkeypatch.setattr(files, "RETRY_PAUSES_S", (0.0, 0.0, 0.0))
    safetensors_file.write(tmp_path / "a.safetensors", {"a": torch.ones(2)}, {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.skipif(os.name != "posix", reason="POSIX permission bits")
def test_the_file_has_the_rights_of_any_new_file(tmp_path: Path):
    safetensors_file.write(tmp_path / "a.safetensors", {"a": torch.ones(2)}, {})
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_the_format_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path):
    for bad in ({"a": torch.ones(2, dtype=torch.complex64)}, {"__metadata__": torch.ones(1)}):
        with pytest.raises(WangenError):
            safetensors_file.write(tmp_path / "a.safetensors", bad, {})
    with pytest.raises(WangenError, match="must be text"):
        safetensors_file.write(tmp_path / "a.safetensors", {}, {"a": 1})
    with pytest.raises(WangenError, match="cannot write"):
        safetensors_file.write(tmp_path / "missing" / "a.safetensors", {}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_another_process_writes_the_same_bytes(tmp_path: Path):
    code = (
        "import sys, torch; from pathlib import Path; from wangen.runtime import safetensors_file as f;"
        "f.write(Path(sys.argv[1]), {'b': torch.ones(2), 'a': torch.zeros(3)}, {'y': '1', 'x': '2', 'w': '3'})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "other")], check=True)
    safetensors_file.write(tmp_path / "own", {"a": torch.zeros(3), "b": torch.ones(2)}, {"w": "3", "x": "2", "y": "1"})
    assert (tmp_path / "own").read_bytes() == (tmp_path / "other").read_bytes()
