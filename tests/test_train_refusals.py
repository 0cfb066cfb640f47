"""Everything that can be refused is refused before a model loads."""

import shutil

import pytest

from wangen import profiles
from wangen.generator.errors import WangenError
from wangen.runtime import train
from wangen.runtime.models import family

WAN = family(profiles.model("t2v-1.3B"))


@pytest.fixture(autouse=True)
def _no_model_loads(monkeypatch):
    monkeypatch.setattr(WAN, "load_transformer", lambda *_words, **_names: pytest.fail("the model was loaded"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output_name": ""}, "--output_name"),
        ({"output_name": "a/b"}, "without folders"),
        ({"dit": None}, "train needs --dit"),
        ({"lora_layout": ()}, "--lora_layout is empty"),
        ({"keep_best": True}, "--keep_best needs a validation"),
        ({"validation_items": 3}, "leaves nothing of 3 items to train on"),
        ({"validation_items": -1}, "--validation_items must be 0 or above"),
        ({"ema_decay": 1.0}, "--ema_decay must be between 0 and 1"),
        ({"ema_decay": 0.9, "fresh": True, "resume": "x"}, "contradict"),
        ({"blocks_to_swap": 1, "checkpointing": "none"}, "--blocks_to_swap needs checkpointing"),
        ({"checkpointing": "none", "gradient_checkpointing_cpu_offload": True}, "it is switched off"),
        ({"plain": True, "checkpointing": "selective"}, "--plain knows no"),
        ({"plain": True, "blocks_to_swap": 1}, "--plain knows no"),
        ({"train_mode": "full", "quantize": "fp8"}, "none can be quantised"),
        ({"train_mode": "full", "blocks_to_swap": 1}, "none can be quantised or swapped"),
        ({"scale_weight_norms": 1.0, "network_module": "lokr"}, "is for LoRA alone"),
        ({"dit_high_noise": "dit"}, "has one transformer"),
        ({"high_noise_share": 0.5}, "has one transformer"),
        ({"experts": "low"}, "has one transformer"),
        ({"timestep_boundary": 0.9}, "has one transformer"),
        ({"condition_frames": 1}, "does not take given frames"),
        ({"sample_every_n_steps": 2}, "there are no prompts"),
        ({"sample_prompts": "prompts"}, "samples need --vae and --t5"),
        ({"log_with": ("none", "tensorboard")}, "stands alone"),
        ({"log_with": ("mlflow",)}, "pip install mlflow"),
        ({"weighting_scheme": "mode"}, "give --timestep_sampling sigma"),
        ({"min_timestep": 900, "max_timestep": 100}, "are no range"),
        ({"include_patterns": ("no_such_layer",)}, "no_such_layer"),
        ({"include_patterns": ("attn1(",)}, "attn1"),
        ({"network_args": ("conv_dim=4",)}, "conv_dim"),
        ({"base_weights_multiplier": (1.0,)}, "--base_weights"),
        ({"optimizer_type": "torch.optim.LBFGS"}, "LBFGS"),
        ({"optimizer_type": "Adafactor", "optimizer_args": ("speed=1",)}, "speed"),
        ({"lr_scheduler": "adafactor"}, "Adafactor"),
        ({"lr_warmup_steps": "150%"}, "--lr_warmup_steps"),
        ({"vram": "auto", "peak_tflops": 0.0}, "--peak_tflops must be above 0"),
        ({"caption_dropout": 1.5}, "--caption_dropout must be 0 to 1"),
    ],
)
def test_what_no_run_can_have_is_named(tiny_run, tmp_path, changes, words):
    files = {"dit": tiny_run.weights["dit"], "prompts": tmp_path / "prompts.txt", "x": tmp_path}
    given = {name: files.get(value, value) if isinstance(value, str) else value for name, value in changes.items()}
    with pytest.raises(WangenError) as error:
        train.run(tiny_run.options(tmp_path / "out", **given))
    assert words in str(error.value)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_disk_that_cannot_hold_the_checkpoints_is_refused(tiny_run, tmp_path, monkeypatch):
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    with pytest.raises(WangenError, match=r"the checkpoints need up to \d+\.\d [kM]B, and 1\.0 kB are free") as error:
        train.run(tiny_run.options(tmp_path))
    assert "lower --network_dim" in str(error.value)
