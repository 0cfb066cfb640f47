"""diffusers and peft load without what training never touches, and nothing is missing for whoever asks later."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wangen.runtime.lean import HOLLOW, Name, _StandIn

WITHOUT = ("transformers", "scipy", "sympy", "gguf", "torch._dynamo", *HOLLOW)


def run(code: str, *words: str) -> str:
    """What a new Python prints; it must end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_trainer_loads_no_library_that_it_does_not_use():
    loaded = run("import sys; import wangen.runtime.train; print(*sys.modules)").split()
    assert {"peft", "diffusers", "wangen.runtime.train"} <= set(loaded)
    torch_itself = run("import sys; import torch; print(*sys.modules)").split()  # from 2.15 on it loads sympy
    assert not set(WITHOUT) & set(loaded) - set(torch_itself)


LATER = """
import sys, torch
from wangen.runtime.libraries import LoraConfig, WanTransformer3DModel
import diffusers, peft, transformers
from diffusers.models.transformers import FluxTransformer2DModel
from diffusers.quantizers import DiffusersAutoQuantizer
import diffusers.models.transformers.transformer_wan as file
assert diffusers.WanTransformer3DModel is file.WanTransformer3DModel is WanTransformer3DModel
assert DiffusersAutoQuantizer.__module__ == "diffusers.quantizers.auto"
model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(r=2, target_modules=["0"]))
assert model(torch.ones(1, 4)).shape == (1, 4)
config = transformers.UMT5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
encoder = transformers.UMT5EncoderModel(config)
assert isinstance(encoder, peft.tuners.tuners_utils.PreTrainedModel)
assert not isinstance(model, peft.tuners.tuners_utils.PreTrainedModel)
from torch.distributed.tensor import DTensor
assert torch.distributed.tensor.DTensor is DTensor
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)))
from importlib.util import find_spec
if find_spec("scipy"):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_beta_sigmas=True)
    scheduler.set_timesteps(4)
    assert "scipy.stats" in sys.modules and len(scheduler.sigmas) == 5
print(transformers.__name__, transformers.__spec__.origin)
"""


@pytest.mark.slow
def test_whoever_asks_later_gets_the_whole_libraries():
    shown = run(LATER)
    assert "tensor([2.])" in shown
    assert "transformers/__init__.py" in shown.replace(os.sep, "/")


REFUSED = """
import sys
from importlib import metadata
version = metadata.version
def once(name):
    if name == "transformers":
        metadata.version = version
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = once
from wangen.runtime.libraries import LoraConfig, WanTransformer3DModel
assert metadata.version is version
print(*sys.modules)
"""


@pytest.mark.slow
def test_libraries_that_do_not_bear_it_are_loaded_whole():
    loaded = run(REFUSED).split()
    assert {"transformers", "diffusers.models.transformers.transformer_wan", "peft"} <= set(loaded)


TRAIN = """
import sys
if sys.argv[1] == "whole":
    import transformers, diffusers.models.transformers, peft
from wangen.generator.cli import main
code = main(sys.argv[2:])
print("transformers" in sys.modules)
sys.exit(code)
"""


@pytest.mark.slow
def test_a_run_ends_with_the_same_bytes_lean_or_whole(tiny_run, tmp_path: Path):
    outputs = []
    for way in ("lean", "whole"):
        line = [
            "train", "--dataset_config", tiny_run.dataset_config, "--task", "t2v-1.3B",
            "--dit", tiny_run.weights["dit"],
            "--output_dir", tmp_path / way, "--output_name", "lora", "--network_dim", "4", "--max_train_steps", "3",
            "--device", "cpu", "--validation_items", "1",
        ]  # fmt: skip
        assert run(TRAIN, way, *map(str, line)).strip() == str(way == "whole")
        outputs.append((tmp_path / way / "lora.safetensors").read_bytes())
    assert outputs[0] == outputs[1]


def test_while_it_is_postponed_a_name_is_neither_called_nor_looked_into(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "later", _StandIn("later"))
    name = sys.modules["later"].Model
    assert not isinstance(3, name)
    assert not hasattr(name, "config")
    with pytest.raises(ImportError, match="is called while it is postponed"):
        name()


def test_a_name_is_fetched_when_it_is_used_and_not_before():
    name = Name("colorsys", "rgb_to_hsv")
    sys.modules.pop("colorsys", None)
    assert not isinstance(name, int)
    assert not isinstance(3, Name("colorsys", "Colour"))
    assert "colorsys" not in sys.modules
    assert name(1.0, 0.0, 0.0) == (0.0, 1.0, 1.0)
    assert "colorsys" in sys.modules

    class Child(Name("colorsys", "Base"), int):
        """It stands among the bases and leaves none behind."""

    assert Child.__bases__ == (int,)
    assert (Name("colorsys", "Base") | None) is Any
