"""What `wangen plan` computes, and which flags it chooses; and what is known of cards."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import make_image

from wangen import profiles
from wangen.generator import cards
from wangen.generator.cards import find_card, named
from wangen.generator.errors import UsageError
from wangen.generator.launch import Launch
from wangen.generator.memory import (
    GIB,
    MemoryBudget,
    MemorySettings,
    adapter_weights,
    block_bytes,
    memory_plan,
    outer_bytes,
    settings_of,
    tokens_of,
)
from wangen.generator.memory_changes import FASTEST, fitting_flags
from wangen.generator.memory_presets import resolve_vram
from wangen.generator.plan import gpus
from wangen.generator.plan.estimate import memory_tokens, plan_run
from wangen.generator.plan.shapes import Encoding, Shape, Survey, nominal, survey
from wangen.generator.steps import Train
from wangen.generator.tomls import read_dataset
from wangen.generator.train_refusals import refuse_memory, refuse_more_blocks
from wangen.runtime.training.parallel import require_parallel

BIG = profiles.model("t2v-14B")

# ---- choosing ------------------------------------------------------------------------------------------------------


def options(**changes: object) -> Train:
    made = Train(dataset_config=Path("a.toml"), output_dir=Path("o"), output_name="n", dit=Path("d"), network_dim=16)
    return replace(made, **changes)


@pytest.mark.parametrize("name", profiles.model_names())
@pytest.mark.parametrize("gib", [8, 12, 16, 24, 48, 80, 141])
@pytest.mark.parametrize("changes", [{}, {"plain": True}, {"train_mode": "full"}], ids=str)
def test_flags_that_are_chosen_fit_are_allowed_and_are_the_fastest_of_their_kind(name, gib, changes):
    model, usable = profiles.model(name), int(gib * GIB * 15 / 16)
    tokens = tokens_of(model, model.resolution, model.num_frames)

    def needed(train: Train) -> int:
        return memory_plan(model, settings_of(train), tokens=tokens).device

    start = options(**changes)
    flags = fitting_flags(start, model, needed, usable)
    if flags is None:
        least = {**FASTEST, "checkpointing": "full", "gradient_checkpointing_cpu_offload": True}
        least |= {} if changes else {"quantize": "nf4", "blocks_to_swap": model.transformer.num_layers - 1}
        assert needed(replace(start, **least)) > usable
        return
    chosen = replace(start, **flags)
    assert needed(chosen) <= usable
    refuse_memory(chosen)
    if chosen.blocks_to_swap:
        fewer = replace(chosen, blocks_to_swap=chosen.blocks_to_swap - 1, quantize=chosen.quantize)
        assert needed(fewer) > usable or chosen.quantize == "nf4"
    if chosen.checkpointing == "full":
        assert needed(replace(chosen, checkpointing="selective")) > usable or chosen.plain
    if chosen.quantize == "none" and chosen.checkpointing == "none":
        assert flags == dict(FASTEST)


def test_flags_that_are_fixed_stay():
    tokens = tokens_of(BIG, (832, 480), 81)

    def needed(train: Train) -> int:
        return memory_plan(BIG, settings_of(train), tokens=tokens).device

    flags = fitting_flags(options(quantize="none"), BIG, needed, 22 * GIB, {"quantize"})
    assert flags
    assert flags["quantize"] == "none"
    assert flags["blocks_to_swap"] > 20


@pytest.mark.parametrize("given", [
    {"blocks_to_swap": 20}, {"gradient_checkpointing_cpu_offload": True}, {"checkpointing": "none"},
    {"checkpointing": "none", "blocks_to_swap": 20}, {"checkpointing_free_blocks": 30, "blocks_to_swap": 3},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("gib", [8, 24, 80, 141])
def test_flags_that_are_fixed_are_joined_by_none_that_training_refuses_beside_them(given, gib):
    tokens = tokens_of(BIG, (832, 480), 17)

    def needed(train: Train) -> int:
        return memory_plan(BIG, settings_of(train), tokens=tokens).device

    flags = fitting_flags(options(**given), BIG, needed, gib * GIB, given.keys())
    assert flags or gib < 141 or len(given) == 2
    if flags:
        chosen = replace(options(), **flags)
        assert needed(chosen) <= gib * GIB
        refuse_memory(chosen)
        assert chosen.blocks_to_swap + chosen.checkpointing_free_blocks <= 40
        assert flags | given == flags


def test_several_processes_share_out_the_weights_where_one_card_is_too_small():
    shape = Shape((832, 480), 17)
    found = Survey()
    found.samples[shape] = found.uses[shape] = 10
    card = named("A100 40GB")
    small = options(checkpointing="full", quantize="none", blocks_to_swap=0)
    alone, four = (plan_run(small, BIG, found, card, processes=count) for count in (1, 4))
    assert (alone.settings.shards, four.settings.shards) == (1, 1), "a whole copy fits"
    clips = Shape((832, 480), 81)
    found.samples[clips] = found.uses[clips] = 2
    alone, four = (plan_run(small, BIG, found, card, processes=count) for count in (1, 4))
    assert alone.fits is False
    assert four.fits
    assert four.settings.shards == 4
    assert four.steps_per_epoch == 3
    assert alone.steps_per_epoch == 12
    copies = plan_run(replace(small, parallel="ddp"), BIG, found, card, processes=4)
    assert copies.budget == alone.budget


@pytest.mark.parametrize("parallel", ["fsdp", "hsdp"])
@pytest.mark.parametrize("vram", [*map(str, sorted(BIG.presets)), "auto"])
def test_processes_that_share_out_the_weights_swap_no_block_and_need_no_whole_copy(vram, parallel, caplog):
    given, free = options(task="t2v-14B", vram=vram, parallel=parallel), 10 * GIB
    found = resolve_vram(given, BIG, free, 8)
    assert found.blocks_to_swap == 0
    require_parallel(found, Launch(count=16, local_count=8))
    if vram == "auto":
        alone = resolve_vram(replace(given, parallel="ddp"), BIG, free)
        assert found.quantize in ("none", alone.quantize)
    warned = re.findall(r"need ([\d.]+) GiB", caplog.text)
    assert bool(warned) == (vram in ("8", "12")), "a smaller share of the blocks than were swapped"
    assert all(float(needed) < 12 for needed in warned), "no whole copy is counted"


def test_tokens_are_those_of_the_memory_formula():
    edit = profiles.model("qwen-image-edit")
    assert edit.prompt
    rows = edit.prompt.picture_tokens + 128
    assert memory_tokens(Shape((1024, 1024), 1, 1), edit, rows) == tokens_of(edit, (1024, 1024), 1)
    ti2v = profiles.model("ti2v-5B")
    assert memory_tokens(Shape((1280, 704), 121, batch_size=3), ti2v, 99) == 3 * tokens_of(ti2v, (1280, 704), 121)


def test_images_with_different_controls_share_a_batch_as_in_training():
    plus = profiles.model("qwen-image-edit-plus")
    found = Survey()
    for number, uses in ((1, 3), (2, 2), (3, 3)):
        shape = Shape((1024, 1024), 1, number, batch_size=4)
        found.samples[shape] = found.uses[shape] = uses
    assert plan_run(options(), plus, found, None).steps_per_epoch == 2


def test_control_images_have_the_tokens_of_their_own_resolution(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    edit = profiles.model("qwen-image-edit")
    for name, size in (("a.png", (512, 512)), ("c/a.png", (900, 900))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        make_image(tmp_path / name, size=size)
    (tmp_path / "a.txt").write_text("a cat", encoding="utf-8")
    (tmp_path / "a.toml").write_text(
        "[general]\nresolution = [512, 512]\ncontrol_resolution = [1024, 1024]\n"
        "[[datasets]]\nimage_directory = '.'\ncontrol_directory = 'c'\ncache_directory = 'k'\n",
        encoding="utf-8",
    )
    (shape,) = survey(read_dataset(tmp_path / "a.toml", "all"), edit, Encoding()).uses
    assert memory_tokens(shape, edit, 0) == 32 * 32 + 64 * 64


def test_a_survey_by_settings_has_one_sample_of_each_block(tmp_path: Path):
    make_image(tmp_path / "a.png")
    (tmp_path / "a.toml").write_text(
        "[general]\nresolution = [832, 480]\nbatch_size = 4\n"
        "[[datasets]]\nimage_directory = '.'\ncache_directory = 'c'\n",
        encoding="utf-8",
    )
    found = nominal(read_dataset(tmp_path / "a.toml", "all"))
    assert dict(found.uses) == {Shape((832, 480), 1, batch_size=4): 1}
    assert not found.exact


# ---- cards ---------------------------------------------------------------------------------------------------------


def test_every_known_card_is_found_by_its_own_name_and_as_it_is_named():
    for name, card in cards.CARDS.items():
        found = find_card(f"NVIDIA GeForce {name}")
        assert found
        assert found[0] == name
        for size in card.sizes:
            gpu = named(f"{name} {size}GB")
            assert gpu.memory == size * GIB
            assert named(gpu.as_named) == gpu


def test_a_name_that_says_too_little_is_refused():
    for text in ("RTX", "", "4090", "laptop RTX 4090", "GB"):
        with pytest.raises(UsageError):
            named(text)


@pytest.mark.parametrize(
    "text", ["", "No devices were found", "{", "[]", '{"card0": 3}', '{"card0": {}}',
                                  '{"card0": {"VRAM Total Memory (B)": "x"}}'],
)  # fmt: skip
def test_drivers_that_say_nothing_useful_mean_no_card(text):
    assert gpus.amd(text) == []


def test_cards_of_amd_are_read():
    text = (
        'WARNING: x\n{"card0": {"VRAM Total Memory (B)": "25753026560", "VRAM Total Used Memory (B)": "1000", '
        '"Card series": "Navi 31 [Radeon RX 7900 XTX]"}, "system": {}}'
    )
    (card,) = gpus.amd(text)
    assert (card.memory, card.free) == (25753026560, 25753025560)
    assert card.name.startswith("Navi 31")


# ---- the formula ---------------------------------------------------------------------------------------------------


def test_flags_and_processes_become_the_settings_of_the_formula():
    usual = settings_of(options())
    assert usual.by_hand
    assert not usual.all_resident
    assert settings_of(options(), 4).all_resident, "weights that are shared out stay"
    assert settings_of(options(offload_inactive_dit=False)).all_resident
    assert settings_of(options(ema_decay=0.9)).moment_bytes == usual.moment_bytes + 4
    assert settings_of(options(network_module="loha")).factors == 2 * usual.factors
    for changes in ({"dora": True}, {"network_dropout": 0.1}, {"network_module": "loha"}, {"pack": True},
                    {"plain": True}, {"compile": True}):  # fmt: skip
        assert not settings_of(options(**changes)).by_hand, changes


def test_of_two_experts_one_is_on_the_device_with_the_adapters_of_both():
    model, stays, trained = profiles.model("t2v-A14B"), "weights that stay", "adapters, gradients, optimizer"

    def plan(**changes: object) -> MemoryBudget:
        return memory_plan(model, replace(MemorySettings(), **changes), tokens=7800)

    one, both, resident = plan(one_expert=True), plan(), plan(all_resident=True)
    assert 2 * one.parts[stays] == 2 * both.parts[stays] == resident.parts[stays]
    assert 2 * one.parts[trained] == both.parts[trained] == 2 * adapter_weights(model, 32) * (4 + 4 + 8 + 2)
    assert plan(float32=True).parts[trained] == 2 * adapter_weights(model, 32) * (4 + 4 + 8), "no copy in half"
    weights = outer_bytes(model) + 40 * block_bytes(model, MemorySettings())
    assert (one.host, both.host, resident.host) == (0, 2 * weights, 0)
    assert plan(offload=True).host == 2 * weights + 40 * 7800 * 5120 * 2


def test_attention_in_a_fixed_order_adds_up_a_sum_for_each_share_of_the_processors():
    part, row = "one block's backward pass", 32760 * 5120 * 2
    usual, fixed = (memory_plan(BIG, MemorySettings(deterministic=fixed), tokens=32760).parts[part]
                    for fixed in (False, True))  # fmt: skip
    assert (usual, fixed) == (15 * row, (13 + 2 * 5) * row), "170 processors over 40 heads are 5"


def test_no_more_blocks_are_swapped_than_are_recomputed():
    given = options(checkpointing="full", checkpointing_free_blocks=5, blocks_to_swap=35)
    refuse_more_blocks(given, 40)
    with pytest.raises(UsageError, match="only the 35 blocks that are recomputed"):
        refuse_more_blocks(replace(given, blocks_to_swap=36), 40)
    with pytest.raises(UsageError, match="--plain knows no"):
        refuse_memory(options(plain=True, checkpointing="full", checkpointing_free_blocks=1))
