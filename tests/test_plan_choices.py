"""What `wangen plan` computes, and which flags it chooses; and what is known of cards."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import make_image

from wangen import profiles
from wangen.generator import cards
from wangen.generator.cache_sizes import CLIP_NUMBERS, HEADER_BYTES, latent_bytes, text_bytes, text_rows
from wangen.generator.cards import card_named, find_card
from wangen.generator.errors import UsageError
from wangen.generator.launch import Launch
from wangen.generator.memory import (
    GIB,
    MemoryBudget,
    MemorySettings,
    adapter_weights,
    block_bytes,
    memory_plan,
    memory_settings,
    outer_bytes,
    tokens_of,
)
from wangen.generator.memory_changes import FASTEST, fitting_flags
from wangen.generator.memory_presets import resolve_vram
from wangen.generator.plan import gpus
from wangen.generator.plan.cures import find_cure
from wangen.generator.plan.earlier import _MATTERS, measured
from wangen.generator.plan.estimate import batch_seconds, memory_tokens, plan_run, shape_flops, tokens_of_a_step
from wangen.generator.plan.saves import most_bytes, num_kept, saved_bytes
from wangen.generator.plan.shapes import Encoding, Shape, Survey, nominal, survey
from wangen.generator.plan.text import _table
from wangen.generator.session import plain
from wangen.generator.steps import Train
from wangen.generator.table import options as flags_of
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
        return memory_plan(model, memory_settings(train), tokens=tokens).device

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
        return memory_plan(BIG, memory_settings(train), tokens=tokens).device

    flags = fitting_flags(options(quantize="none"), BIG, needed, 22 * GIB, {"quantize"})
    assert flags
    assert flags["quantize"] == "none"
    assert flags["blocks_to_swap"] > 20


def test_a_base_in_four_bits_brings_back_the_blocks_that_it_makes_room_for():
    def needed(train: Train) -> int:
        return memory_plan(BIG, memory_settings(train), tokens=32760).device

    least = {**FASTEST, "checkpointing": "full", "gradient_checkpointing_cpu_offload": True}
    given = options(block_swap_ring_size=6)
    room = needed(replace(given, **least | {"quantize": "int8", "blocks_to_swap": 40})) - 1
    flags = fitting_flags(given, BIG, needed, room)
    assert flags
    assert flags["quantize"] == "nf4"
    assert 0 < flags["blocks_to_swap"] < 39
    assert needed(replace(given, **flags | {"blocks_to_swap": flags["blocks_to_swap"] - 1})) > room


@pytest.mark.parametrize("given", [
    {"blocks_to_swap": 20}, {"gradient_checkpointing_cpu_offload": True}, {"checkpointing": "none"},
    {"checkpointing": "none", "blocks_to_swap": 20}, {"checkpointing_free_blocks": 30, "blocks_to_swap": 3},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("gib", [8, 24, 80, 141])
def test_flags_that_are_fixed_are_joined_by_none_that_training_refuses_beside_them(given, gib):
    tokens = tokens_of(BIG, (832, 480), 17)

    def needed(train: Train) -> int:
        return memory_plan(BIG, memory_settings(train), tokens=tokens).device

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
    card = card_named("A100 40GB")
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
    swaps = plan_run(replace(small, blocks_to_swap=1), BIG, found, card, processes=4)
    assert swaps.settings.shards == 1, "as the trainer has it: what is swapped is not shared out"
    stored = plan_run(small, BIG, found, card_named("RTX 4090"), bits=8.5)
    cure = find_cure(stored, {"quantize"})
    assert cure.flags
    cured = replace(memory_settings(replace(small, **cure.flags)), stored_bits=8.5)
    assert cure.budget == memory_plan(BIG, cured, tokens=32760), "the file's own bits count in what is proposed, too"


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


def two_shapes() -> Survey:
    """Eleven clips, four in a batch, and two pictures."""
    found = Survey()
    for shape, uses in ((Shape((832, 480), 81, batch_size=4), 11), (Shape((832, 480), 1), 2)):
        found.samples[shape] = found.uses[shape] = uses
    return found


def test_a_mean_step_takes_what_its_batches_do():
    card, train = card_named("H100 80GB"), options(gradient_accumulation_steps=2)
    found = plan_run(train, BIG, two_shapes(), card, processes=2)
    clips, pictures = found.shapes
    assert (clips.batches, pictures.batches, found.steps_per_epoch) == (3, 2, 2), "a batch that is not full is one"
    assert clips.seconds
    assert pictures.seconds
    wanted = [2 * (3 * clip + 2 * picture) / 5 for clip, picture in zip(clips.seconds, pictures.seconds, strict=True)]
    assert found.step_seconds == pytest.approx(wanted)
    assert found.flops.done == pytest.approx(2 * (3 * clips.flops.done + 2 * pictures.flops.done) / 5)
    assert tokens_of_a_step(found) == (1560, 2 * 2 * 4 * 32760), "a short step has one picture"
    row = list(_table(found))[1]
    assert f" {clips.flops.done / 1e12:,.3g} " in row, "also what is computed again"


def test_swapped_blocks_go_over_the_link_both_ways():
    """Forward and backward, each as long as the link takes."""
    card, settings = card_named("RTX 4090"), MemorySettings(blocks_to_swap=40)
    small = shape_flops(Shape((64, 64), 1), options(), BIG, 64)
    once = 40 * block_bytes(BIG, settings) / 25e9
    assert batch_seconds(small, card, settings, BIG) == pytest.approx((2 * once, 3 * once))


def test_only_a_whole_pass_pads_its_texts():
    shape = Shape((832, 480), 1)
    padded, short = (shape_flops(shape, options(plain=plain), BIG, 64).model for plain in (True, False))
    assert padded > short
    assert padded == shape_flops(shape, options(plain=True), BIG, 512).model


def test_what_an_earlier_run_measured_counts_where_nothing_else_decides_its_speed(tmp_path: Path):
    given, report = options(output_dir=tmp_path), tmp_path / "train.report.json"
    told = {option.name: plain(getattr(given, option.name)) for option in flags_of(Train)}

    def found(**changes: object) -> bool:
        speed = {"s_per_step": 2.0, "tokens_per_s": 1000.0}
        result = {"steps_this_run": 5, "speed": speed}
        report.write_text(json.dumps({"settings": told | changes, "result": result}), encoding="utf-8")
        return measured(given, (1900, 2100)) is not None

    assert found()
    assert measured(given, (2100, 2200)) is measured(given, (1800, 1900)) is None, "of another dataset"
    assert found(learning_rate=0.5)
    assert not [name for name in _MATTERS if found(**{name: "other"})]
    assert {"network_args", "network_dropout", "blocks_to_swap", "pack", "gpus", "parallel"} <= {*_MATTERS}
    for way in ({"lr_warmup_steps": 5}, {"save_every_n_steps": 5}, {"sample_at_first": True}, {"seed": 5}):
        assert found(**way)
    for way in ({"optimizer_type": "Adafactor"}, {"ema_decay": 0.9}, {"cuda_graphs": False}, {"split_attn": True},
                {"exclude_patterns": ["x"]}, {"offload_inactive_dit": False}, {"rslora": True}):  # fmt: skip
        assert not found(**way), way


def test_what_is_saved_on_the_way_takes_at_most_what_its_flags_keep():
    given = options(save_every_n_steps=10, keep_last=2, save_state=True, keep_best=True, ema_decay=0.9,
                    lora_layout=("comfyui", "kohya"), save_precision="bfloat16")  # fmt: skip
    assert saved_bytes(given, 10) == (10 * (4 + 8 + 4), 10 * 2 * 2 * 2)
    assert num_kept(given, 20, 100) == (3, 3), "the oldest goes after the newest came"
    assert num_kept(replace(given, save_last_n_steps_state=1000), 20, 100) == (3, 9), "states have their own"
    assert num_kept(replace(given, save_state=False), 20, 100) == (3, 0)
    assert most_bytes(given, 20, 100, (1000, 1)) == (2 + 3) * 1000 + (2 + 1 + 3)


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


def test_a_text_that_two_items_share_counts_twice_in_the_mean_and_lies_there_once(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, words in (("a", "a cat"), ("b", "a cat"), ("c", "a cat with a hat that sits on a wall")):
        make_image(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(words, encoding="utf-8")
    (tmp_path / "a.toml").write_text(
        "[general]\nnum_repeats = 3\n[[datasets]]\nimage_directory = '.'\ncache_directory = 'k'\n", encoding="utf-8"
    )
    found = survey(read_dataset(tmp_path / "a.toml", "all"), BIG, Encoding())
    rows = [text_rows(BIG, words, 0) for words in ("a cat", "a cat with a hat that sits on a wall")]
    assert found.text_rows == (2 * rows[0] + rows[1], 3)
    assert found.mean_rows == -(-found.text_rows[0] // 3)
    ((uses, samples),) = zip(found.uses.values(), found.samples.values(), strict=True)
    assert (uses, samples) == (9, 3)
    (size,) = {shape.size for shape in found.uses}
    own, clip = latent_bytes(BIG, size, 1, "float16") + HEADER_BYTES, 2 * CLIP_NUMBERS + HEADER_BYTES
    image = survey(read_dataset(tmp_path / "a.toml", "all"), profiles.model("i2v-14B"), Encoding())
    assert image.cache_bytes - found.cache_bytes == 3 * (own + clip), "a condition is as large as a latent"
    texts = [text_bytes(BIG, words, "bfloat16", 0) for words in ("", "a cat", "a cat with a hat that sits on a wall")]
    assert found.cache_bytes == 3 * own + sum(texts) + 3 * HEADER_BYTES, "the empty prompt is an entry, too"


def test_a_survey_by_settings_has_one_sample_of_each_block(tmp_path: Path):
    make_image(tmp_path / "a.png")
    (tmp_path / "a.toml").write_text(
        "[general]\nresolution = [832, 480]\nbatch_size = 4\n"
        "[[datasets]]\nimage_directory = '.'\ncache_directory = 'c'\n"
        "[[datasets]]\nvideo_directory = '.'\ncache_directory = 'v'\ntarget_frames = [17, 81, 33]\n",
        encoding="utf-8",
    )
    found = nominal(read_dataset(tmp_path / "a.toml", "all"))
    assert dict(found.uses) == {Shape((832, 480), frames, batch_size=4): 1 for frames in (1, 81)}, "the longest"
    assert not found.exact
    (tmp_path / "a.toml").write_text(
        "[general]\nresolution = [832, 480]\n[[datasets]]\nvideo_directory = '.'\ncache_directory = 'v'\n"
        "frame_extraction = 'full'\nmax_frames = 83\n",
        encoding="utf-8",
    )
    assert dict(nominal(read_dataset(tmp_path / "a.toml", "all")).uses) == {Shape((832, 480), 81): 1}


# ---- cards ---------------------------------------------------------------------------------------------------------


def test_every_known_card_is_found_by_its_own_name_and_as_it_is_named():
    for name, card in cards.CARDS.items():
        found = find_card(f"NVIDIA GeForce {name}")
        assert found
        assert found[0] == name
        for size in card.sizes:
            gpu = card_named(f"{name} {size}GB")
            assert gpu.memory == size * GIB
            assert card_named(gpu.as_named) == gpu


def test_a_name_that_says_too_little_is_refused():
    for text in ("RTX", "", "4090", "laptop RTX 4090", "GB"):
        with pytest.raises(UsageError):
            card_named(text)


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
    usual = memory_settings(options())
    assert usual.by_hand
    assert not usual.all_resident
    assert memory_settings(options(), 4).all_resident, "weights that are shared out stay"
    assert memory_settings(options(offload_inactive_dit=False)).all_resident
    assert memory_settings(options(ema_decay=0.9)).moment_bytes == usual.moment_bytes + 4
    assert memory_settings(options(network_module="loha")).factors == 2 * usual.factors
    for changes in ({"dora": True}, {"network_dropout": 0.1}, {"network_module": "loha"}, {"pack": True},
                    {"plain": True}, {"compile": True}):  # fmt: skip
        assert not memory_settings(options(**changes)).by_hand, changes


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
    refuse_more_blocks(options(checkpointing="full", checkpointing_free_blocks=40), 40)
    with pytest.raises(UsageError, match="only the 35 blocks that are recomputed"):
        refuse_more_blocks(replace(given, blocks_to_swap=36), 40)
    with pytest.raises(UsageError, match="--plain knows no"):
        refuse_memory(options(plain=True, checkpointing="full", checkpointing_free_blocks=1))
