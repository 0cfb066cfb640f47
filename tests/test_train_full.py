"""`--train_mode full` as a whole run: what it begins with, and what no setting of adapters changes."""

from dataclasses import replace

import torch
from safetensors.torch import load_file

from wangen.generator.lora_keys import module_name
from wangen.runtime import train
from wangen.runtime.adapter_layers import change_of
from wangen.runtime.adapters import read_adapter


def test_sizes_of_an_adapter_are_no_reason_to_begin_again(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=1, train_mode="full")
    train.run(options)
    longer = replace(options, max_train_steps=2, network_dim=8, network_alpha=2.0)
    assert train.run(longer).result["steps_this_run"] == 1


def test_what_is_merged_first_is_not_rounded_to_the_file_s_16_bits(tiny_run, tmp_path):
    train.run(tiny_run.options(tmp_path / "lora", max_train_steps=2))
    lora = tmp_path / "lora/lora.safetensors"
    train.run(tiny_run.options(
        tmp_path / "full", train_mode="full", base_weights=(lora,), learning_rate=1e-30, max_train_steps=1,
        optimizer_args=("weight_decay=0",), save_precision="float32",
    ))  # fmt: skip
    base, merged = load_file(tiny_run.weights["dit"]), load_file(tmp_path / "full/lora.safetensors")
    names = {module_name(name.removesuffix(".weight")): name for name in base if name.endswith(".weight")}
    adapter = read_adapter(lora)
    assert adapter
    for module, weight in adapter.items():
        before, change = base[names[module]], change_of(weight)
        assert before.dtype == torch.bfloat16
        assert change.abs().max() > 0
        torch.testing.assert_close(merged[names[module]], before.float() + change, rtol=0, atol=1e-7)
