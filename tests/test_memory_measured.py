"""What a step of the fast path really holds, counted tensor by tensor, against the formula that the presets use."""

from dataclasses import replace

import pytest
import torch
from diffusers import QwenImageTransformer2DModel, WanTransformer3DModel
from live import Live
from peft import LoraConfig

from wangen import profiles
from wangen.generator import memory
from wangen.generator.weight_counts import weight_counts
from wangen.runtime.fast.attention import choose_kernel
from wangen.runtime.fast.dit import FastWan
from wangen.runtime.memory.quantize import quantize_blocks
from wangen.runtime.models.compute import Compute
from wangen.runtime.models.qwen_image_edit.fast import FastQwen

CPU = torch.device("cpu")
DIM, FFN, RANK, SIDE = 256, 1024, 4, 48
TOKENS = (SIDE // 2) ** 2
ROW = TOKENS * DIM * 4  # one tensor N x d in float32


def make_wan(num_layers: int):
    """A transformer, and the latents and texts of a step."""
    model = WanTransformer3DModel(
        num_attention_heads=DIM // 128, attention_head_dim=128, in_channels=16, out_channels=16, text_dim=32,
        freq_dim=32, ffn_dim=FFN, num_layers=num_layers,
    )  # fmt: skip
    return model, torch.randn(1, 16, 1, SIDE, SIDE), {}


def make_qwen(num_layers: int):
    """Of its tokens half are a control image's; four belong to the text."""
    model = QwenImageTransformer2DModel(num_layers=num_layers, num_attention_heads=DIM // 128, joint_attention_dim=32)
    half = torch.randn(1, 16, 1, SIDE, SIDE // 2)
    return model, half, {"controls": [[half[0]]]}


FAMILIES = {"t2v-1.3B": (make_wan, FastWan), "qwen-image-edit": (make_qwen, FastQwen)}


def kept_tensors(name: str, *, modulation: bool = False) -> int:
    return weight_counts(profiles.model(name), modulation=modulation).kept_tensors


def peak_rows(name: str, num_layers: int, mode: str = "none", more_targets: str = "-", **changes) -> float:
    """The most that lives beside weights and gradients during a step, in tensors of N x d."""
    torch.manual_seed(0)
    make, fast = FAMILIES[name]
    model, latents, given = make(num_layers)
    model.requires_grad_(False)
    quantize_blocks(model, mode)
    targets = f"{profiles.model(name).lora_targets}|{more_targets}"
    model.add_adapter(LoraConfig(r=RANK, target_modules=targets))
    velocity = fast(model.train(), Compute(**changes), choose_kernel("sdpa", CPU, torch.float32))

    def step() -> None:
        velocity(latents, torch.tensor([500.0]), [torch.ones(4, 32)], **given).square().mean().backward()

    step()  # gradients and tables are there from now on
    live = Live([*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)])
    with live:
        step()
    return live.peak / ROW


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_a_block_keeps_what_the_formula_says(name, checkpointing):
    per_block = {"none": kept_tensors(name) + 2 * FFN / DIM, "full": 1.0,
                 "selective": 2.0 + 4 * (DIM // 128) * TOKENS / ROW}[checkpointing]  # fmt: skip
    few, many = (peak_rows(name, layers, checkpointing=checkpointing) for layers in (2, 5))
    measured = (many - few) / 3
    assert 0.85 * per_block < measured < 1.03 * per_block


@pytest.mark.slow
def test_gates_that_are_trained_keep_what_they_let_through():
    name, targets = "qwen-image-edit", r".*_mod\.1"
    few, many = (peak_rows(name, layers, more_targets=targets, checkpointing="none") for layers in (2, 5))
    per_block = kept_tensors(name, modulation=True) + 2 * FFN / DIM
    assert 0.93 * per_block < (many - few) / 3 < 1.03 * per_block
    formula = per_block + 2 * FFN / DIM
    assert 0.9 * formula < peak_rows(name, 2, more_targets=targets) - 2 < formula + 2


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_live_set_of_a_block_is_below_the_formula_and_near_it(name):
    formula = kept_tensors(name) + 4 * FFN / DIM
    measured = peak_rows(name, 2) - 2
    assert 0.8 * formula < measured < formula + 2  # beside it: the first block's input and the loss's gradient
    assert peak_rows(name, 2, free_blocks=1) <= measured + 2 + 0.01, "the last block is free to keep everything"


def in_pieces(monkeypatch, count: int) -> None:
    """The tokens of these tests go in so many pieces, at most in as many as make self attention the larger part: 5."""
    monkeypatch.setattr(memory, "PIECE_NUMBERS", TOKENS * (10 * DIM + (8 * DIM + 4 * FFN) // count))
    assert memory.num_token_pieces(TOKENS, DIM, FFN) == count


@pytest.mark.slow
@pytest.mark.parametrize("free_blocks", [0, 1])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_in_pieces_it_is_a_smaller_live_set_as_the_formula_says(count, free_blocks, monkeypatch):
    """The blocks' inputs are counted apart, as what is kept."""
    in_pieces(monkeypatch, count)
    model = profiles.model("t2v-1.3B")
    here = replace(model, transformer=replace(model.transformer, dim=DIM, ffn_dim=FFN, num_layers=2))
    settings = memory.MemorySettings(float32=True, free_blocks=free_blocks)
    formula = memory.memory_plan(here, settings, tokens=TOKENS).parts["one block's backward pass"] / ROW
    measured = peak_rows("t2v-1.3B", 2, free_blocks=free_blocks) - (2 - free_blocks)
    assert formula < 0.95 * (kept_tensors("t2v-1.3B") + 4 * FFN / DIM)
    assert 0.85 * formula < measured < formula + 0.5  # beside it: texts, tables of positions, the latents


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 5])
def test_a_block_that_is_not_recomputed_keeps_no_more_in_pieces(count, monkeypatch):
    in_pieces(monkeypatch, count)
    few, many = (peak_rows("t2v-1.3B", layers, checkpointing="none") for layers in (2, 5))
    per_block = kept_tensors("t2v-1.3B") - 1 + 2 * FFN / DIM
    assert 0.85 * per_block < (many - few) / 3 < 1.03 * per_block


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_quantised_base_adds_one_dequantised_product(name):
    more = (peak_rows(name, 2, mode="int8") - peak_rows(name, 2)) * ROW
    model = profiles.model(name)
    here = replace(model, transformer=replace(model.transformer, dim=DIM, ffn_dim=FFN))
    assert 0 < more <= 1.1 * weight_counts(here).largest_product * 4
