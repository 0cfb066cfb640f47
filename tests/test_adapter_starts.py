"""Files to start from that say little, or something that cannot be: alphas of nothing, magnitudes, factors."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity import max_abs
from runs import CPU, planned
from safetensors.torch import load_file, save_file
from tiny import TinyRun
from trained import KINDS, MODEL, base_model, options_of, predicted, trained

from wangen.generator.errors import WangenError
from wangen.runtime import train
from wangen.runtime.lora import adapter_layers
from wangen.runtime.memory.quantize import quantize_blocks
from wangen.runtime.models import family
from wangen.runtime.training.adapter import add_adapter
from wangen.runtime.training.adapter_files import save
from wangen.runtime.training.adapter_refusals import require_adapter
from wangen.runtime.training.loading import load_base


@pytest.mark.parametrize("kind", ["lora", "rslora", "loha", "lokr"])
def test_ranks_are_taken_from_weights_that_change_nothing(tmp_path: Path, kind: str):
    """Their alpha is 0: training begins at the base, and can leave it."""
    options = options_of(tmp_path, lora_layout=("kohya",), **KINDS[kind])
    save(tmp_path / "a.safetensors", trained(options)[1], options, {})
    tensors = load_file(tmp_path / "a.safetensors")
    save_file({key: torch.zeros_like(value) if key.endswith("alpha") else value for key, value in tensors.items()},
              tmp_path / "b.safetensors")  # fmt: skip
    options = replace(options, network_weights=tmp_path / "b.safetensors", dim_from_weights=True)
    transformer = base_model()
    add_adapter(transformer, options, MODEL)
    assert max_abs(predicted(transformer), predicted(base_model())) < 2e-6
    assert all(layer.scaling["default"] > 0 for layer in adapter_layers(transformer).values())


def test_magnitudes_of_another_size_are_refused_by_the_header(tmp_path: Path):
    options = options_of(tmp_path, **KINDS["dora"])
    save(tmp_path / "a.safetensors", trained(options)[1], options, {})
    tensors = load_file(tmp_path / "a.safetensors")
    (key, *_) = (key for key in tensors if "dora_scale" in key)
    for number, wrong in enumerate((torch.ones(7, 1), torch.ones(1, len(tensors[key])), torch.ones(()))):
        file = tmp_path / f"{number}.safetensors"
        save_file({**tensors, key: wrong}, file)
        with pytest.raises(WangenError, match="DoRA's magnitudes are"):
            require_adapter(replace(options, network_weights=file), MODEL)


def test_a_lokr_in_more_factors_names_what_it_needs(tmp_path: Path):
    both = options_of(tmp_path, network_module="lokr", network_dim=2, network_args=("decompose_both=true",))
    save(tmp_path / "a.safetensors", add_adapter(base_model(), both, MODEL), both, {})
    start = replace(both, network_args=(), network_weights=tmp_path / "a.safetensors")
    with pytest.raises(WangenError, match="factors of other sizes") as error:
        require_adapter(start, MODEL)
    assert "decompose_both=true" in error.value.cure
    require_adapter(replace(start, network_args=both.network_args), MODEL)


def test_what_is_merged_into_the_base_is_quantised_once_and_after_that(tiny_run: TinyRun, tmp_path: Path):
    train.run(tiny_run.options(tmp_path, max_train_steps=2, learning_rate=0.05))
    bases = []
    for form in ("int8", "none"):
        plan = planned(tiny_run, tmp_path / form, base_weights=(tmp_path / "lora.safetensors",), quantize=form)
        bases.append(load_base(plan, plan.experts[0], family(MODEL), CPU))
    quantised, exact = bases
    quantize_blocks(exact, "int8", CPU)
    assert quantised.state_dict().keys() == exact.state_dict().keys()
    assert all(torch.equal(quantised.state_dict()[name], value) for name, value in exact.state_dict().items())
