from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel, WanTransformer3DModel
from helpers import every

from wangen import profiles
from wangen.generator import memory
from wangen.generator.errors import UsageError
from wangen.generator.memory import (
    GIB,
    PLAIN_MEMORY,
    MemoryBudget,
    MemorySettings,
    adapter_weights,
    block_bytes,
    memory_plan,
    memory_settings,
    outer_bytes,
    preset_flags,
    tokens_of,
    usable_bytes,
)
from wangen.generator.memory_presets import resolve_vram
from wangen.generator.steps import Train
from wangen.generator.table import options as flags_of
from wangen.profiles.reading import ProfileError
from wangen.runtime.devices import free_bytes
from wangen.runtime.memory.blocks import blocks_of
from wangen.runtime.memory.quantize import FORMS, quantize_blocks

NAMES = profiles.model_names()
MODELS = [profiles.model(name) for name in NAMES]
PRESETS = [(model, gib) for model in MODELS for gib in model.presets]
CPU = torch.device("cpu")


def short(name: str) -> profiles.Model:
    """A model with two blocks of the real size."""
    model = profiles.model(name)
    return replace(model, transformer=replace(model.transformer, num_layers=2))


def preset_plan(model: profiles.Model, preset: profiles.Preset) -> MemoryBudget:
    """The memory of a preset at the bucket and the rank that it is made for."""
    settings = MemorySettings(
        quantize=preset.quantize,
        blocks_to_swap=preset.blocks_to_swap,
        checkpointing=preset.checkpointing,
        free_blocks=preset.checkpointing_free_blocks,
        offload=preset.gradient_checkpointing_cpu_offload,
        rank=preset.network_dim,
    )
    return memory_plan(model, settings, tokens=tokens_of(model, preset.resolution, preset.num_frames))


def on_meta(model: profiles.Model, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """The real model without memory, in the dtypes that the loader gives it."""
    sizes, image = model.transformer, any(weights.flag == "clip" for weights in model.weights)
    if model.architecture == "qwen_image_edit":
        with torch.device("meta"):
            transformer = QwenImageTransformer2DModel(num_layers=sizes.num_layers)
        return transformer.requires_grad_(False).to(dtype)
    with torch.device("meta"):
        transformer = WanTransformer3DModel(
            num_attention_heads=sizes.num_heads,
            attention_head_dim=128,
            in_channels=sizes.in_channels,
            out_channels=sizes.out_channels,
            ffn_dim=sizes.ffn_dim,
            num_layers=sizes.num_layers,
            image_dim=1280 if image else None,
            added_kv_proj_dim=sizes.dim if image else None,
            pos_embed_seq_len=514 if model.condition == "first_and_last" else None,
        )
    kept = set(WanTransformer3DModel._keep_in_fp32_modules)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad = False
        parameter.data = parameter.data.to(torch.float32 if kept & set(name.split(".")) else dtype)
    return transformer


def stored(module: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


# ---- the formula -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [short(name) for name in NAMES], ids=lambda model: model.name)
def test_weights_are_counted_exactly(model):
    for dtype, wide in ((torch.bfloat16, 2), (torch.float32, 4)):
        transformer = on_meta(model, dtype)
        blocks = stored(blocks_of(transformer))
        assert block_bytes(model, MemorySettings(float32=wide == 4)) * model.transformer.num_layers == blocks
        assert outer_bytes(model, wide) == stored(transformer) - blocks


@pytest.mark.parametrize(("name", "layers"), [("i2v-14B", 12), ("qwen-image-edit", 14)])
@pytest.mark.parametrize("mode", every(3, FORMS, pytest.mark.slow))
def test_quantised_weights_are_counted_exactly(mode, name, layers):
    model = short(name)
    transformer = on_meta(model)
    assert quantize_blocks(transformer, mode) == layers * 2
    assert block_bytes(model, MemorySettings(quantize=mode)) * 2 == stored(blocks_of(transformer))
    assert memory.BITS[mode] == FORMS[mode].bits


@pytest.mark.parametrize("model", [short(name) for name in NAMES], ids=lambda model: model.name)
def test_adapters_are_counted_exactly(model):
    from peft import LoraConfig

    for modulation, targets in enumerate((model.lora_targets, rf"{model.lora_targets}|.*_mod\.1")):
        transformer = on_meta(model)
        transformer.add_adapter(LoraConfig(r=8, target_modules=targets))
        trained = sum(parameter.numel() for parameter in transformer.parameters() if parameter.requires_grad)
        assert adapter_weights(model, 8, modulation=bool(modulation)) == trained


def test_the_parts_of_a_run_whose_numbers_are_known():
    """Wan 2.1 14B, 81 frames of 832x480, as published tables have it: 28.6 GB of weights, 13.4 GB of block inputs."""
    model = profiles.model("t2v-14B")
    tokens = tokens_of(model, (832, 480), 81)
    assert tokens == 32760
    plan = memory_plan(model, MemorySettings(), tokens=tokens)
    assert plan.parts["weights that stay"] == pytest.approx(28.6e9, rel=0.01)
    assert plan.parts["kept for the backward pass"] == 40 * 32760 * 5120 * 2 == pytest.approx(13.4e9, rel=0.01)
    assert plan.parts["adapters, gradients, optimizer"] == pytest.approx(2.45e9 + 0.3e9, rel=0.01)
    assert plan.parts["one block's backward pass"] == 15 * 32760 * 5120 * 2
    compiled = memory_plan(model, MemorySettings(by_hand=False), tokens=tokens)
    assert 8 < compiled.parts["one block's backward pass"] / GIB < 8.6
    assert plan.host == 0
    assert plan.device == sum(plan.parts.values())


def test_each_setting_saves_what_it_says():
    model = profiles.model("t2v-14B")
    tokens, block = 7800, block_bytes(model, MemorySettings())
    start = MemorySettings()
    plain = memory_plan(model, start, tokens=tokens)

    def change(**values) -> int:
        return memory_plan(model, replace(start, **values), tokens=tokens).device - plain.device

    assert change(blocks_to_swap=10) == -8 * block
    assert change(blocks_to_swap=1) == 0, "the ring takes as much"
    assert change(quantize="int8") < change(quantize="none") == 0
    assert change(quantize="nf4") < change(quantize="fp8") == change(quantize="int8")
    assert change(offload=True) == -(40 - 3) * tokens * 5120 * 2
    assert change(checkpointing="selective") == 40 * tokens * (5120 * 2 + 40 * 4)
    assert change(free_blocks=1) > 3 * tokens * 5120 * 2, "what goes in pieces keeps less where it is recomputed"
    at_once = memory_plan(model, replace(start, by_hand=False), tokens=tokens).device
    one_free = memory_plan(model, replace(start, by_hand=False, free_blocks=1), tokens=tokens).device
    assert one_free == at_once - tokens * 5120 * 2, "the last block's own live set is there anyway"
    assert change(checkpointing="none") > 20 * change(checkpointing="selective") / 40 > 0
    assert change(moment_bytes=2) == -6 * adapter_weights(model, 32)
    offloaded = memory_plan(model, MemorySettings(blocks_to_swap=10, offload=True), tokens=tokens)
    assert offloaded.host == 10 * block + 40 * tokens * 5120 * 2


# ---- the presets -------------------------------------------------------------------------------------------------


def test_every_model_has_a_preset_for_every_card_of_the_flag():
    cards = {option.name: option.choices for option in flags_of(Train)}["vram"]
    for model in MODELS:
        assert {str(gib) for gib in model.presets} | {"auto"} == set(cards)


@pytest.mark.parametrize(("model", "gib"), PRESETS, ids=lambda value: getattr(value, "name", value))
def test_a_preset_fits_its_card_and_wastes_little_of_it(model, gib):
    preset = model.presets[gib]
    plan = preset_plan(model, preset)
    assert plan.device <= usable_bytes(gib * GIB)
    assert plan.host < (48 if model.experts else 32) * GIB
    if preset.blocks_to_swap > 2:
        fewer = replace(preset, blocks_to_swap=preset.blocks_to_swap - 1)
        assert preset_plan(model, fewer).device > usable_bytes(gib * GIB)
    assert preset.blocks_to_swap + preset.checkpointing_free_blocks <= model.transformer.num_layers
    assert preset.checkpointing != "none"
    assert preset.network_dim >= Train.network_dim, "who gives no rank has one that fits"
    assert all(side % model.bucket_step == 0 for side in preset.resolution)
    assert preset.num_frames % model.temporal_stride == 1
    names = {option.name: option for option in flags_of(Train)}
    flags = preset_flags(model, str(gib))
    assert flags.keys() <= names.keys()
    for name, value in flags.items():
        assert not names[name].choices or value in names[name].choices


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_larger_card_trains_at_least_as_much(model):
    plans = [model.presets[gib] for gib in sorted(model.presets)]
    sizes = [tokens_of(model, preset.resolution, preset.num_frames) for preset in plans]
    assert sizes == sorted(sizes)
    assert plans[-1].num_frames >= (49 if model.num_frames > 1 else 1)


@pytest.mark.parametrize(("model", "gib"), PRESETS, ids=lambda value: getattr(value, "name", value))
def test_the_documented_table_is_that_of_the_profiles(model, gib):
    preset, plan = model.presets[gib], preset_plan(model, model.presets[gib])
    free = f", {preset.checkpointing_free_blocks} free" if preset.checkpointing_free_blocks else ""
    cells = [
        model.name,
        gib,
        {"none": "bf16"}.get(preset.quantize, preset.quantize),
        f"{preset.blocks_to_swap} of {model.transformer.num_layers}",
        f"{preset.checkpointing}{free}",
        "yes" if preset.gradient_checkpointing_cpu_offload else "no",
        f"{preset.resolution[0]}x{preset.resolution[1]}x{preset.num_frames}",
        preset.network_dim,
        f"{plan.device / GIB:.1f}",
        f"{plan.host / GIB:.1f}",
    ]
    text = (Path(__file__).parent.parent / "docs" / "memory.md").read_text(encoding="utf-8")
    assert f"| {' | '.join(map(str, cells))} |\n" in text


OTHER_WAYS = {
    "lokr": {"network_module": "lokr"}, "dora": {"dora": True}, "dropout": {"network_dropout": 0.1},
    "compiled": {"compile": True}, "by argument": {"network_args": ("use_dora=True",)},
    "of rank 64": {"network_dim": 64}, "of LoHa with an average": {"network_module": "loha", "ema_decay": 0.99},
    "with free blocks": {"checkpointing_free_blocks": 5},
}  # fmt: skip


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_what_needs_more_than_a_preset_swaps_more_blocks_as_far_as_there_are(way):
    given = {name: value for name, value in OTHER_WAYS[way].items() if name in PLAIN_MEMORY}
    for model, gib in PRESETS:
        preset, options = model.presets[gib], train(task=model.name, vram=str(gib))
        flags = preset_flags(model, str(gib))
        assert memory_flags(resolve_vram(options, model, None)) == flags
        found = resolve_vram(replace(options, **OTHER_WAYS[way]), model, None)
        swapped = found.blocks_to_swap
        assert memory_flags(found) == flags | given | {"blocks_to_swap": swapped}
        rank = max(preset.network_dim, found.network_dim)
        tokens = tokens_of(model, preset.resolution, preset.num_frames)
        needed, of_fewer = (
            memory_plan(model, replace(memory_settings(found), rank=rank, blocks_to_swap=blocks), tokens=tokens).device
            for blocks in (swapped, swapped - 1)
        )
        most = model.transformer.num_layers - found.checkpointing_free_blocks
        assert needed <= usable_bytes(gib * GIB) or swapped == most
        assert swapped <= max(2, preset.blocks_to_swap) or of_fewer > usable_bytes(gib * GIB)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize(
    "way",
    [
        {},
        {"free_blocks": 2},
        {"checkpointing": "none"},
        {"by_hand": False},
        {"float32": True},
        {"checkpointing": "selective", "offload": True},
    ],
    ids=str,
)
def test_more_tokens_never_need_less_memory(model, way):
    """So what fits the largest batch of a run fits all, although more tokens may go in more pieces."""
    settings = MemorySettings(**way)
    needed = [memory_plan(model, settings, tokens=tokens).device for tokens in range(256, 80000, 397)]
    assert needed == sorted(needed)


def test_an_unknown_preset_or_key_is_refused():
    model = profiles.model("t2v-1.3B")
    with pytest.raises(UsageError, match=r"--vram 10: t2v-1.3B has no preset") as caught:
        preset_flags(model, "10")
    assert "there are: 8, 12, 16, 24" in str(caught.value)
    values = profiles.model_values("t2v-1.3B")
    with pytest.raises(ProfileError, match="unknown key 'swap'"):
        profiles.make_model("mine", values | {"presets": {"8": {"swap": 1}}})


def test_a_profile_takes_the_presets_of_the_one_it_is_based_on_card_by_card():
    values = profiles.model_values("t2v-1.3B")
    assert set(values["presets"]) == {"8", "12", "16", "24"}
    assert profiles.model("t2v-1.3B").presets[8] != profiles.model("t2v-14B").presets[8]
    without = {key: value for key, value in values.items() if key != "presets"}
    assert profiles.make_model("mine", without).presets == {}


# ---- from the flag to the other flags ----------------------------------------------------------------------------


def train(**changes) -> Train:
    return replace(
        Train(dataset_config=Path("a.toml"), dit=Path("d"), output_dir=Path("out"), output_name="x", task="t2v-14B"),
        **changes,
    )


def memory_flags(options: Train) -> dict[str, object]:
    return {name: getattr(options, name) for name in PLAIN_MEMORY}


T2V = profiles.model("t2v-14B")


def test_without_the_flag_nothing_is_quantised_or_swapped():
    assert memory_flags(resolve_vram(train(), T2V, None)) == PLAIN_MEMORY
    given = {"quantize": "fp8", "blocks_to_swap": 3, "checkpointing": "selective", "checkpointing_free_blocks": 2}
    assert memory_flags(resolve_vram(train(**given), T2V, None)) == {**PLAIN_MEMORY} | given


@pytest.mark.parametrize("gib", ["8", "12", "16", "24"])
def test_a_card_gives_the_flags_of_its_preset_and_given_ones_win(gib):
    flags = preset_flags(T2V, gib)
    assert memory_flags(resolve_vram(train(vram=gib), T2V, None)) == flags
    given = {"quantize": "nf4", "gradient_checkpointing_cpu_offload": False}
    found = memory_flags(resolve_vram(train(vram=gib, **given), T2V, None))
    assert found == flags | given | {"blocks_to_swap": found["blocks_to_swap"]}
    fixed = given | {"blocks_to_swap": 5}
    assert memory_flags(resolve_vram(train(vram=gib, **fixed), T2V, None)) == flags | fixed
    explicit = resolve_vram(train(**flags), T2V, None)
    assert memory_flags(explicit) == flags, "a script that carries the flags is the same run"


def test_what_other_flags_rule_out_is_left_away():
    full = memory_flags(resolve_vram(train(vram="12", train_mode="full"), T2V, None))
    assert full == preset_flags(T2V, "12") | {"quantize": "none", "blocks_to_swap": 0}
    plain = memory_flags(resolve_vram(train(vram="12", plain=True), T2V, None))
    assert (plain["quantize"], plain["blocks_to_swap"], plain["checkpointing_free_blocks"]) == ("int8", 0, 0)
    none = memory_flags(resolve_vram(train(vram="24", checkpointing="none"), T2V, None))
    assert none == {**PLAIN_MEMORY} | {"quantize": "int8", "checkpointing": "none"}
    all_swapped = resolve_vram(train(vram="24", blocks_to_swap=40), T2V, None)
    assert (all_swapped.blocks_to_swap, all_swapped.checkpointing_free_blocks) == (40, 0)


def test_what_other_flags_make_too_large_for_a_named_card_is_said(caplog):
    for gib in T2V.presets:
        resolve_vram(train(vram=str(gib)), T2V, None)
        resolve_vram(train(vram=str(gib), quantize="nf4"), T2V, None)
    assert caplog.text == ""
    for flags in ({"checkpointing": "none"}, {"train_mode": "full"}, {"plain": True}, {"network_dim": 512},
                  {"mixed_precision": "no", "blocks_to_swap": 6}):  # fmt: skip
        caplog.clear()
        options = resolve_vram(train(vram="24", **flags), T2V, None)
        (record,) = caplog.records
        tokens = tokens_of(T2V, (832, 480), 81)
        settings = memory_settings(options)
        needed = memory_plan(T2V, replace(settings, rank=max(32, settings.rank)), tokens=tokens).device
        assert f"clips of 832x480x81 need {needed / GIB:.1f} GiB of the 22.5 GiB that such a card" in record.message


@pytest.mark.parametrize(
    ("free_gib", "expected"),
    [(7.2, "8"), (11.5, "12"), (15.2, "16"), (22.6, "24"), (31.0, "24"), (78.0, None)],
)
def test_auto_takes_the_largest_preset_that_is_free(monkeypatch, free_gib, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * GIB), 96 * GIB))
    found = memory_flags(resolve_vram(train(vram="auto"), T2V, free_bytes(torch.device("cuda"))))
    roomy = {**PLAIN_MEMORY} | {"checkpointing": "selective", "checkpointing_free_blocks": 1}
    assert found == (preset_flags(T2V, expected) if expected else roomy)


def found_with(monkeypatch, free_gib: float, model=T2V, **flags) -> dict[str, object]:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * GIB) - GIB // 2, 96 * GIB))
    return memory_flags(resolve_vram(train(vram="auto", **flags), model, free_bytes(torch.device("cuda"))))


def test_auto_counts_the_flags_that_are_given(monkeypatch):
    small = profiles.model("t2v-1.3B")
    roomy = {**PLAIN_MEMORY} | {"checkpointing": "selective", "checkpointing_free_blocks": 1}
    assert found_with(monkeypatch, 15, small) == roomy
    assert found_with(monkeypatch, 15, small, mixed_precision="no") != roomy, "float32 takes 25.7 GiB"
    assert found_with(monkeypatch, 27, small, mixed_precision="no") == roomy
    with pytest.raises(UsageError, match=r"the smallest preset of t2v-14B needs 2\d\.\d GiB with"):
        found_with(monkeypatch, 16, quantize="none", blocks_to_swap=10, sample_prompts=Path("p.txt"))
    assert found_with(monkeypatch, 15.2) == preset_flags(T2V, "16")
    assert found_with(monkeypatch, 15.2, network_dim=64) == preset_flags(T2V, "12"), "a preset of rank 32"
    few = {"quantize": "nf4", "blocks_to_swap": 38}
    assert found_with(monkeypatch, 7.2, **few) == preset_flags(T2V, "8") | few
    with pytest.raises(UsageError, match=r"needs 7\.4"):
        found_with(monkeypatch, 7.2, cache_mode="realtime")
    quantised = found_with(monkeypatch, 55, quantize="int8")
    assert quantised == roomy | {"quantize": "int8"}, "enough for all blocks in 8 bits"
    assert found_with(monkeypatch, 55) == preset_flags(T2V, "24")


@pytest.mark.parametrize("free_blocks", [1, 20, 40, 41])
def test_free_blocks_that_are_given_are_not_swapped(free_blocks):
    found = resolve_vram(train(vram="16", checkpointing_free_blocks=free_blocks), T2V, None)
    assert found.checkpointing_free_blocks == free_blocks
    assert found.blocks_to_swap == max(0, min(38, 40 - free_blocks)), "with one free, 38 are enough"
    both = resolve_vram(train(vram="16", checkpointing_free_blocks=4, blocks_to_swap=40), T2V, None)
    assert both.blocks_to_swap == 40, "what is given is refused, not changed"


def test_auto_says_when_nothing_fits_and_takes_none_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 8 * GIB))
    free = free_bytes(torch.device("cuda"))
    with pytest.raises(UsageError, match=r"5\.5 GiB are free on the card, and the smallest preset of t2v-14B needs 7"):
        resolve_vram(train(vram="auto", sample_prompts=Path("p.txt")), T2V, free)
    assert memory_flags(resolve_vram(train(vram="auto"), T2V, None)) == PLAIN_MEMORY
