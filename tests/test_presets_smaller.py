"""`--vram` where a dataset has smaller pictures or shorter clips than the preset is made for."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import clip_bytes, every, image_bytes, write_tree
from safetensors.torch import load_file
from tiny import TinyRun

from wangen import profiles
from wangen.generator import workspace
from wangen.generator.cards import card_named
from wangen.generator.cli import main
from wangen.generator.errors import UsageError
from wangen.generator.launch import Launch
from wangen.generator.memory import GIB, memory_of, memory_plan, memory_settings, preset_flags, tokens_of, usable_bytes
from wangen.generator.memory_changes import fitting_flags
from wangen.generator.memory_presets import for_smaller_steps, require_fitting, resolve_vram
from wangen.generator.plan.planning import plan_script
from wangen.generator.plan.scripted import read_script
from wangen.generator.small_steps import GRAPHS_BYTES, graphs_bytes, replays
from wangen.generator.steps import Train
from wangen.generator.train_refusals import refuse_memory, refuse_more_blocks
from wangen.profiles import Model
from wangen.runtime import train
from wangen.runtime.training import refusals
from wangen.runtime.training.plan import Plan, make_plan
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.samples import read_training_samples

T2V, SMALL = profiles.model("t2v-14B"), profiles.model("t2v-1.3B")
CPU = torch.device("cpu")
PRESETS = [
    (model, gib) for name in profiles.model_names() for model in (profiles.model(name),) for gib in model.presets
]
CLIPS = [((256, 256), 1), ((512, 512), 1), ((1024, 1024), 1), ((832, 480), 17)]


def asked(model: Model, vram: str, **flags: object) -> Train:
    return Train(output_dir=Path("o"), output_name="n", task=model.name, vram=vram, **flags)


def needed(options: Train, model: Model, tokens: int) -> int:
    return memory_plan(model, memory_settings(options), tokens=tokens).device


@pytest.mark.parametrize(("resolution", "num_frames"), CLIPS)
@pytest.mark.parametrize(("model", "gib"), every(3, PRESETS, pytest.mark.slow))
def test_less_is_swapped_parked_and_recomputed_and_nothing_more(model, gib, resolution, num_frames):
    given, usable = asked(model, str(gib)), usable_bytes(gib * GIB)
    preset, layers = resolve_vram(given, model, None), model.transformer.num_layers
    tokens = tokens_of(model, resolution, num_frames if model.num_frames > 1 else 1)
    found = for_smaller_steps(preset, given, model, tokens)
    made_for = model.presets[gib]
    if tokens >= tokens_of(model, made_for.resolution, made_for.num_frames):
        assert found == preset
        return
    assert replace(found, **memory_of(preset)) == preset
    assert found.quantize == preset.quantize
    refuse_memory(found)
    refuse_more_blocks(found, layers)
    assert found.blocks_to_swap <= preset.blocks_to_swap
    assert found.gradient_checkpointing_cpu_offload <= preset.gradient_checkpointing_cpu_offload
    order = ["full", "selective", "none"]
    assert order.index(found.checkpointing) >= order.index(preset.checkpointing)
    if found != preset:
        assert room(found, model, tokens) <= usable
    if found.checkpointing != "none":
        assert found.checkpointing_free_blocks >= preset.checkpointing_free_blocks
        if found.checkpointing_free_blocks + found.blocks_to_swap < layers:
            more = replace(found, checkpointing_free_blocks=found.checkpointing_free_blocks + 1)
            assert room(more, model, tokens) > usable
    if found.blocks_to_swap and found.blocks_to_swap < preset.blocks_to_swap:
        as_parked = memory_of(preset) | {"blocks_to_swap": found.blocks_to_swap - 1}
        assert room(replace(found, **as_parked), model, tokens) > usable


def room(options: Train, model: Model, tokens: int) -> int:
    return needed(options, model, tokens) + graphs_bytes(options, tokens, model.transformer.dim)


def test_pictures_on_small_cards_have_what_graphs_go_with():
    tokens = tokens_of(SMALL, (512, 512), 1)
    for gib in SMALL.presets:
        given = asked(SMALL, str(gib), network_dim=32)
        preset = resolve_vram(given, SMALL, None)
        found = for_smaller_steps(preset, given, SMALL, tokens)
        assert replays(found)
        assert found.checkpointing == ("selective" if gib == 8 else "none")
    assert not replays(resolve_vram(asked(SMALL, "8"), SMALL, None))


@pytest.mark.parametrize("told", [
    {"cache_mode": "realtime"}, {"sample_prompts": Path("p.txt")}, {"sample_continuations": 1},
    {"validation_config": Path("v.toml")},
], ids=str)  # fmt: skip
def test_where_others_take_their_turn_on_the_card_the_preset_stays(told):
    given = asked(T2V, "24", **told)
    preset = resolve_vram(given, T2V, None)
    assert for_smaller_steps(preset, given, T2V, 1024) == preset


@pytest.mark.parametrize("flags", [
    {"blocks_to_swap": 7}, {"gradient_checkpointing_cpu_offload": True}, {"checkpointing": "full"},
    {"checkpointing_free_blocks": 3}, {"quantize": "none"}, {"train_mode": "full"}, {"plain": True},
], ids=str)  # fmt: skip
def test_flags_that_are_given_stay(flags):
    given = asked(T2V, "24", **flags)
    found = for_smaller_steps(resolve_vram(given, T2V, None), given, T2V, tokens_of(T2V, (512, 512), 1))
    assert {name: getattr(found, name) for name in flags} == flags
    refuse_memory(found)


def test_auto_looks_at_what_is_free():
    tokens = tokens_of(T2V, (512, 512), 1)
    given = asked(T2V, "auto")
    for gib, swaps in ((6.5, True), (20, False)):
        free = int(gib * GIB)
        preset = resolve_vram(given, T2V, max(free, int(7.5 * GIB)))
        found = for_smaller_steps(preset, given, T2V, tokens, free)
        assert bool(found.blocks_to_swap) == swaps
        assert needed(found, T2V, tokens) <= free
        assert found.quantize == "int8"
        assert for_smaller_steps(preset, given, T2V, tokens, None) == preset
        assert for_smaller_steps(preset, given, T2V, 32760, free) == preset
        assert for_smaller_steps(preset, given, T2V, tokens, GIB) == preset, "nothing fits there: the preset may try"
    plain = replace(given, vram=None)
    assert for_smaller_steps(plain, plain, T2V, tokens, 20 * GIB) == plain


def test_where_no_preset_fits_auto_takes_the_smallest_for_a_dataset_that_does():
    given, free = asked(T2V, "auto"), int(5.5 * GIB)
    preset, pictures = resolve_vram(given, T2V, free), tokens_of(T2V, (512, 512), 1)
    assert memory_of(preset) == preset_flags(T2V, "8")
    found = for_smaller_steps(preset, given, T2V, pictures, free)
    assert needed(found, T2V, pictures) <= free
    require_fitting(found, given, T2V, pictures, free)
    with pytest.raises(UsageError, match=r"5\.5 GiB are .* the dataset's largest batch of 32760 tokens needs 10\.1 "):
        require_fitting(for_smaller_steps(preset, given, T2V, 32760, free), given, T2V, 32760, free)
    for other, room_left in ((asked(T2V, "8"), free), (given, None), (given, int(7.5 * GIB))):
        require_fitting(preset, other, T2V, 32760, room_left)


def test_packed_batches_are_counted():
    given = asked(SMALL, "8", network_dim=32, pack=True, gradient_accumulation_steps=4)
    preset, tokens = resolve_vram(given, SMALL, None), tokens_of(SMALL, (512, 512), 1)
    packed = for_smaller_steps(preset, given, SMALL, tokens)
    more = replace(packed, checkpointing_free_blocks=packed.checkpointing_free_blocks + 1)
    assert room(packed, SMALL, 4 * tokens) <= usable_bytes(8 * GIB) < room(more, SMALL, 4 * tokens)
    assert packed.pack


def test_control_images_count_at_their_own_size():
    edit = profiles.model("qwen-image-edit")
    for own, wanted in (((1024, 1024), 1024 + 4096 + 1337 + 512), (None, 2 * 1024 + 1337 + 512)):
        sample = SimpleNamespace(size=(512, 512), count=1, controls=["c.png"], entry=SimpleNamespace(batch_size=2),
                                 control_size=lambda _, own=own: own)  # fmt: skip
        plan = Plan(asked(edit, "24"), edit, [SimpleNamespace(sample=sample)], [], 1, (), {})
        assert plan.tokens_with(512) == 2 * wanted
        assert plan.most_tokens == 2 * (wanted - 512 + 128)


# ---- blocks that are not computed again ---------------------------------------------------------------------------


def test_room_that_is_left_goes_to_blocks_that_are_not_computed_again():
    tokens = tokens_of(T2V, (512, 512), 1)
    options = replace(asked(T2V, "24"), vram=None)

    def of(train: Train) -> int:
        return needed(train, T2V, tokens)

    room = int(22.5 * GIB)
    flags = fitting_flags(options, T2V, of, room)
    assert flags
    chosen = replace(options, **flags)
    assert (chosen.quantize, chosen.checkpointing, chosen.blocks_to_swap) == ("int8", "selective", 0)
    free = chosen.checkpointing_free_blocks
    assert 10 < free < 40
    assert of(chosen) <= room < of(replace(chosen, checkpointing_free_blocks=free + 1))
    spared = fitting_flags(options, T2V, of, room, (), lambda _: 2 * GIB)
    assert spared
    fewer = spared["checkpointing_free_blocks"]
    assert of(replace(options, **spared)) <= room - 2 * GIB < of(replace(chosen, checkpointing_free_blocks=fewer + 1))
    no_room = fitting_flags(options, T2V, of, room, (), lambda _: 20 * GIB)
    assert no_room
    assert no_room["checkpointing_free_blocks"] == 1, "what fits is not given back"
    held = fitting_flags(replace(options, checkpointing_free_blocks=2), T2V, of, room, {"checkpointing_free_blocks"})
    assert held
    assert held["checkpointing_free_blocks"] == 2


def test_room_for_graphs_is_left_where_small_steps_of_an_unquantised_base_are_replayed():
    options = replace(asked(T2V, "24"), vram=None, checkpointing="full", quantize="none")
    assert graphs_bytes(options, 1024, 5120) == GRAPHS_BYTES
    for changes, tokens in (
        ({"quantize": "int8"}, 1024), ({"blocks_to_swap": 1}, 1024), ({"cuda_graphs": False}, 1024), ({}, 4096),
    ):  # fmt: skip
        assert graphs_bytes(replace(options, **changes), tokens, 5120) == 0


# ---- training, plans, scripts -------------------------------------------------------------------------------------


def test_training_looks_at_the_dataset(tiny_run: TinyRun, tmp_path, monkeypatch):
    given = {"max_train_steps": 2, "task": "t2v-1.3B", "mixed_precision": "bf16"}
    preset = preset_flags(SMALL, "12")
    kept = train.run(tiny_run.options(tmp_path / "kept", **given, vram="12"))
    assert kept.inputs["memory"] == preset, "the file has two blocks of the model's thirty"
    monkeypatch.setattr(refusals, "num_blocks", lambda _: 30)
    report = train.run(tiny_run.options(tmp_path / "a", **given, vram="12"))
    assert report.inputs["memory"] == {**preset, "checkpointing": "none", "checkpointing_free_blocks": 0,
                                       "gradient_checkpointing_cpu_offload": False}  # fmt: skip
    plain = train.run(tiny_run.options(tmp_path / "b", **given))
    assert plain.inputs["memory"]["checkpointing"] == "full"
    tensors = [load_file(tmp_path / name / "lora.safetensors") for name in "ab"]
    assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[1])


def test_several_processes_keep_the_preset_and_others_look_at_the_dataset(tiny_run: TinyRun, tmp_path, monkeypatch):
    given = tiny_run.options(tmp_path, vram="8", task="t2v-1.3B", mixed_precision="bf16")
    options = refusals.resolved(given, SMALL, None)
    plan = make_plan(options, SMALL, *read_training_samples(options, SMALL, Ranks()))
    assert refusals.for_its_steps(plan, given, None, Launch(count=2, local_count=2)) is plan
    monkeypatch.setattr(refusals, "num_blocks", lambda _: 30)
    assert refusals.for_its_steps(plan, given, None, Launch()).options.gradient_checkpointing_cpu_offload is False
    assert refusals.for_its_steps(plan, given, None, Launch(count=2, local_count=2)) is plan


@pytest.mark.parametrize("count", [1, 2])
def test_what_auto_puts_off_is_refused_once_the_dataset_is_read(count, tiny_run: TinyRun, tmp_path, monkeypatch):
    given = tiny_run.options(tmp_path, vram="auto", task="t2v-1.3B", mixed_precision="bf16")
    launch = Launch(count=count, local_count=count)
    options = refusals.resolved(given, SMALL, GIB)
    plan = make_plan(options, SMALL, *read_training_samples(options, SMALL, Ranks()))
    with pytest.raises(UsageError, match=r"1\.0 GiB are free on the card, and the dataset's largest batch"):
        refusals.for_its_steps(plan, given, GIB, launch)
    assert refusals.for_its_steps(plan, given, 5 * GIB, launch) is plan


@pytest.mark.parametrize("flags", [{}, {"pack": True}])
def test_of_several_processes_each_is_counted_by_itself(flags, tiny_run: TinyRun, tmp_path):
    given = tiny_run.options(tmp_path, vram="auto", task="t2v-14B", gradient_accumulation_steps=8, **flags)
    options = refusals.resolved(given, T2V, 6 * GIB)
    plan = make_plan(options, T2V, *read_training_samples(options, T2V, Ranks()))
    picture = SimpleNamespace(size=(512, 512), count=1, controls=[], entry=SimpleNamespace(batch_size=1))
    plan = replace(plan, samples=[SimpleNamespace(sample=picture)])
    assert refusals.for_its_steps(plan, given, 6 * GIB, Launch(count=8, local_count=8)) is plan


HEAD = 'platforms = ["linux"]\nmodel = "t2v-1.3B"\nresolution = [512, 512]\nnum_frames = 17\n'


def publish(folder: Path, text: str, *words: str, **files: bytes) -> None:
    media = {f"datasets/x/{name.replace('_', '.')}": content for name, content in files.items()}
    captions = {f"datasets/x/{name.partition('_')[0]}.txt": "a caption" for name in files}
    write_tree(folder, {"wangen.toml": HEAD + text, **media, **captions})
    assert main(["publish", "x", "--workspace", str(folder), *words]) == 0


TOLD = '[steps.train]\nvram = "8"\nnetwork_dim = 32\n'
FASTER = "faster: wangen publish x --fit --gpu 8GB"


def test_publishing_pictures_says_which_flags_are_faster(tmp_path, capsys):
    publish(tmp_path, TOLD, a_png=image_bytes())
    assert capsys.readouterr().out.count(FASTER) == 1
    publish(tmp_path, TOLD, "--fit", "--gpu", "8GB")
    publish(tmp_path, TOLD, b_mp4=clip_bytes(tmp_path))
    assert FASTER not in capsys.readouterr().out


@pytest.mark.parametrize("told", [
    TOLD + 'gpus = "2"\n', TOLD + "[dataset.x]\nbatch_size = 40\n", TOLD + 'sample_prompts = "p.txt"\n',
    '[steps.train]\nvram = "auto"\n', "",
])  # fmt: skip
def test_who_keeps_the_preset_hears_nothing_of_it(tmp_path, told, capsys):
    (tmp_path / "p.txt").write_text("a prompt", encoding="utf-8")
    publish(tmp_path, told, a_png=image_bytes())
    assert "faster:" not in capsys.readouterr().out


def test_a_plan_of_a_script_that_looks_at_its_card_says_what_training_will_take(tmp_path):
    publish(tmp_path, '[steps.train]\nvram = "auto"\n', a_png=image_bytes())
    target = workspace.read(tmp_path).target("linux")
    script = read_script(target.folder / "train_x.sh", target)
    planned = plan_script(script, card_named("12GB"), num_cards=1, here=False)
    assert planned.plan.train.checkpointing == "none"
    assert planned.plan.fits
