"""`evaluate` reads the cache as it is: that its weights are others than those that made it is said."""

import pytest
import torch
from test_evaluate import flags
from tiny import TinyRun

from wangen.runtime import evaluate, train

pytestmark = pytest.mark.slow


def test_a_vae_that_did_not_make_the_cache_is_said(tiny_run: TinyRun, tmp_path, caplog):
    """The losses are of its latents, the videos of the VAE that is given."""
    train.run(tiny_run.options(tmp_path / "run", max_train_steps=1))
    other = tmp_path / "Wan2.1_VAE.pth"
    tensors = torch.load(tiny_run.weights["vae"], weights_only=True)
    torch.save({name: 1.01 * tensor for name, tensor in tensors.items()}, other)
    caplog.clear()
    for vae, number in ((tiny_run.weights["vae"], 0), (other, 1)):
        given = {"vae": vae, "num_videos": 0, "training_config": None}
        evaluate.run(flags(tiny_run, tmp_path / "run/lora.safetensors", tmp_path / "out", **given))
        assert caplog.text.count("the latents in the cache are of another VAE than --vae") == number


def test_the_dataset_is_read_once_where_it_is_also_named_as_what_was_trained(tiny_run: TinyRun, tmp_path, monkeypatch):
    train.run(tiny_run.options(tmp_path / "run", max_train_steps=1))
    read, read_samples = [], evaluate.read_samples
    monkeypatch.setattr(evaluate, "read_samples", lambda *given: read.append(given) or read_samples(*given))
    evaluate.run(flags(tiny_run, tmp_path / "run/lora.safetensors", tmp_path / "out", num_videos=0))
    assert len(read) == 1
