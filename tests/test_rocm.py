"""The rules of ROCm. Such a build is simulated by `torch.version.hip`: none can be installed where the tests run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cached_bundle import Bundle

from wangen.generator.cli import main
from wangen.runtime import rocm
from wangen.runtime.devices import choose_dtype, choose_vae_dtype

pytest_plugins = ("bundle_fixtures",)


@pytest.fixture
def hip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")


def test_the_vae_is_always_float32_and_one_thread_decodes(hip, caplog: pytest.LogCaptureFixture):
    assert choose_vae_dtype(None, torch.device("cuda")) == "float32"
    assert choose_vae_dtype("bfloat16", torch.device("cuda")) == "float32"
    assert "ROCm: the VAE runs in float32; bfloat16 gives zero or non-finite latents" in caplog.text
    assert choose_dtype(None, torch.device("cuda")) == "bfloat16"
    assert (rocm.num_workers(None), rocm.num_workers(3)) == (1, 3)


def test_elsewhere_nothing_changes():
    assert not rocm.is_rocm()
    assert rocm.vae_dtype("bfloat16") == "bfloat16"
    assert rocm.vae_dtype(None) is None
    assert rocm.num_workers(None) == 4


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("cuda = None\nhip: Optional[str] = '7.2.1'", "True False"),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None", "False False"),
        ("cuda = None\nhip: Optional[str] = None", "False True"),
    ],
)
def test_the_build_is_told_without_importing_torch(tmp_path: Path, lines: str, expected: str):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch" / "version.py").write_text(f"{lines}\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from wangen.runtime.rocm import is_rocm, on_cpu; "
        "assert on_cpu('cpu') and not on_cpu('cuda:1'); print(is_rocm(), on_cpu(None))"
    )
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == expected


def test_values_are_clamped_before_they_are_converted():
    values = torch.tensor([1.5, -1e6, 7e4, float("nan")])
    narrow = rocm.narrowed(values, torch.float16)
    assert narrow.dtype == torch.float16
    assert narrow[:3].tolist() == [1.5, -65504.0, 65504.0]
    assert narrow[3].isnan()


@pytest.mark.parametrize(("value", "words"), [(0.0, "is all zero"), (float("nan"), "not finite")])
def test_a_latent_that_is_all_zero_or_not_finite_names_the_item_and_the_remedy(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: float, words: str
):
    def broken(_self: object, video: torch.Tensor, **_memory: object) -> torch.Tensor:
        return torch.full((len(video), 16, 1, 8, 8), value)

    monkeypatch.setattr("wangen.runtime.fast.vae.VaeEncoder.encode", broken)
    assert main(bundle.latents_line("--vae_dtype", "bfloat16")) == 1
    message = capsys.readouterr().err
    assert words in message
    assert "astronaut.jpg" in message
    assert "--vae_dtype float32" in message
    assert not list(bundle.folder.rglob("*.safetensors"))
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert main(bundle.latents_line("--vae_dtype", "bfloat16")) == 1
    message = capsys.readouterr().err
    assert words in message
    assert "encode with --device cpu" in message  # in float32 it was already
