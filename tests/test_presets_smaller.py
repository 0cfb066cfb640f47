"""`--vram` where a dataset has smaller pictures or shorter clips than the preset is made for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import clip_bytes, every, image_bytes, write_tree
from safetensors.torch import load_file
from tiny import TinyRun

from wangen import profiles
from wangen.generator import scripts, workspace
from wangen.generator.cards import named
from wangen.generator.cli import main
from wangen.generator.commands import parse
from wangen.generator.launch import Launch
from wangen.generator.memory import GIB, memory_of, memory_plan, preset_flags, settings_of, tokens_of, usable_bytes
from wangen.generator.memory_changes import fitting_flags
from wangen.generator.memory_presets import for_smaller_steps, resolve_vram
from wangen.generator.plan.planning import plan_script
from wangen.generator.plan.scripted import read_script
from wangen.generator.small_steps import GRAPHS_BYTES, graphs_bytes, replays
from wangen.generator.steps import Train, find_step
from wangen.generator.train_refusals import refuse_memory, refuse_more_blocks
from wangen.profiles import Model
from wangen.runtime import train
from wangen.runtime.training import refusals
from wangen.runtime.training.plan import make_plan
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
    return memory_plan(model, settings_of(options), tokens=tokens).device


@pytest.mark.parametrize(("resolution", "num_frames"), CLIPS)
@pytest.mark.parametrize(("model", "gib"), every(3, PRESETS, pytest.mark.slow))
def test_as_little_is_swapped_parked_and_recomputed_as_there_is_room_for(model, gib, resolution, num_frames):
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
    assert needed(found, model, tokens) <= usable
    assert found.blocks_to_swap <= preset.blocks_to_swap
    if found.blocks_to_swap:
        fewer = replace(found, blocks_to_swap=found.blocks_to_swap - 1)
        assert needed(fewer, model, tokens) > usable
    elif found.checkpointing == "none":
        assert replays(found)
    elif found.checkpointing_free_blocks < layers:
        more = replace(found, checkpointing_free_blocks=found.checkpointing_free_blocks + 1)
        assert needed(more, model, tokens) + graphs_bytes(more, tokens, model.transformer.dim) > usable


def test_pictures_on_small_cards_have_what_graphs_go_with():
    tokens = tokens_of(SMALL, (512, 512), 1)
    for gib in SMALL.presets:
        given = asked(SMALL, str(gib), network_dim=32)
        preset = resolve_vram(given, SMALL, None)
        assert memory_of(for_smaller_steps(preset, given, SMALL, tokens)) == {
            **memory_of(preset), "checkpointing": "none", "checkpointing_free_blocks": 0,
            "gradient_checkpointing_cpu_offload": False,
        }  # fmt: skip
    assert not replays(resolve_vram(asked(SMALL, "8"), SMALL, None))


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


def test_a_batch_of_several_and_packed_batches_are_counted():
    given = asked(SMALL, "8", network_dim=32, pack=True, gradient_accumulation_steps=4)
    preset, tokens = resolve_vram(given, SMALL, None), tokens_of(SMALL, (512, 512), 1)
    packed = for_smaller_steps(preset, given, SMALL, tokens)
    assert needed(packed, SMALL, 4 * tokens) <= usable_bytes(8 * GIB)
    alone = for_smaller_steps(replace(preset, pack=False), given, SMALL, tokens)
    assert (alone.checkpointing, packed.checkpointing) == ("none", "selective")
    assert packed.pack


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


def test_training_looks_at_the_dataset(tiny_run: TinyRun, tmp_path):
    given = {"max_train_steps": 2, "task": "t2v-1.3B", "mixed_precision": "bf16"}
    report = train.run(tiny_run.options(tmp_path / "a", **given, vram="12"))
    memory = report.inputs["memory"]
    preset = preset_flags(SMALL, "12")
    assert preset["checkpointing"] == "selective"
    assert memory == {**preset, "checkpointing": "none", "checkpointing_free_blocks": 0,
                      "gradient_checkpointing_cpu_offload": False}  # fmt: skip
    plain = train.run(tiny_run.options(tmp_path / "b", **given))
    assert plain.inputs["memory"]["checkpointing"] == "full"
    tensors = [load_file(tmp_path / name / "lora.safetensors") for name in "ab"]
    assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[1])


def test_several_processes_keep_the_preset(tiny_run: TinyRun, tmp_path):
    given = tiny_run.options(tmp_path, vram="8", task="t2v-1.3B")
    options = refusals.resolved(given, SMALL, CPU)
    plan = make_plan(options, SMALL, *read_training_samples(options, SMALL, Ranks()))
    assert refusals.for_its_steps(plan, given, CPU, Launch(count=2, local_count=2)) is plan
    assert refusals.for_its_steps(plan, given, CPU, Launch()).options.checkpointing == "none"


HEAD = 'platforms = ["linux"]\nmodel = "t2v-1.3B"\nresolution = [512, 512]\nnum_frames = 17\n'


def publish(folder: Path, text: str, *words: str, **files: bytes) -> Train:
    """The training of a dataset that is published for Linux with that text in `wangen.toml`."""
    media = {f"datasets/x/{name.replace('_', '.')}": content for name, content in files.items()}
    captions = {f"datasets/x/{name.partition('_')[0]}.txt": "a caption" for name in files}
    write_tree(folder, {"wangen.toml": HEAD + text, **media, **captions})
    assert main(["publish", "x", "--workspace", str(folder), *words]) == 0
    path = script(folder)
    (line,) = [words for words in scripts.read_steps(path.read_bytes(), "sh") if words[0] == "train"]
    found = parse(find_step(line[0]), line[1:])
    assert isinstance(found, Train)
    return found


def script(folder: Path) -> Path:
    return workspace.read(folder).target("linux").folder / "train_x.sh"


def test_scripts_of_pictures_have_less_of_the_preset_than_those_of_clips(tmp_path):
    told = '[steps.train]\nvram = "8"\nnetwork_dim = 32\n'
    pictures = publish(tmp_path, told, a_png=image_bytes())
    assert memory_of(pictures)["checkpointing"] == "none"
    assert memory_of(publish(tmp_path, told, "--only_scripts")) == memory_of(pictures)
    with_clip = publish(tmp_path, told, b_mp4=clip_bytes(tmp_path))
    assert memory_of(with_clip) == preset_flags(SMALL, "8")
    assert memory_of(publish(tmp_path, told, "--only_scripts")) == memory_of(with_clip)


@pytest.mark.parametrize(("told", "kept"), [
    ('[steps.train]\nvram = "8"\ngpus = "2"\n', preset_flags(SMALL, "8")),
    ('[steps.train]\nvram = "8"\n[dataset.x]\nbatch_size = 40\n', preset_flags(SMALL, "8")),
    ('[steps.train]\nvram = "8"\ncheckpointing = "full"\n', {"checkpointing": "full"}),
    ('[steps.train]\nvram = "auto"\n', {"checkpointing": None, "quantize": None}),
])  # fmt: skip
def test_what_keeps_more_of_it(tmp_path, told, kept):
    found = memory_of(publish(tmp_path, told, a_png=image_bytes()))
    assert {name: found[name] for name in kept} == kept


def test_a_plan_of_a_script_that_looks_at_its_card_says_what_training_will_take(tmp_path):
    publish(tmp_path, '[steps.train]\nvram = "auto"\n', a_png=image_bytes())
    target = workspace.read(tmp_path).target("linux")
    planned = plan_script(read_script(script(tmp_path), target), named("8GB"), num_cards=1, here=False)
    assert planned.plan.train.checkpointing == "none"
    assert planned.plan.fits
