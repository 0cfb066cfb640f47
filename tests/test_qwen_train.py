"""Training edit LoRAs on cached entries: the step is the pipelines' mathematics, and a run resumes to equal bytes."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from edit_set import SIZES, EditSet, make_edit_set
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_qwen import SHORT, TinyQwen, pipeline_of, smaller

from wangen import profiles
from wangen.generator.cli import main
from wangen.generator.errors import UsageError
from wangen.runtime import train
from wangen.runtime.adapter_layers import apply_adapter
from wangen.runtime.adapters import read_adapter
from wangen.runtime.cache import Folder
from wangen.runtime.loader import Draw, find_entries, read_batch
from wangen.runtime.models import family, qwen_image_edit
from wangen.runtime.models.compute import Compute
from wangen.runtime.samples import read_samples
from wangen.runtime.training.plan import ExpertPlan, Plan
from wangen.runtime.training.prepared import prepare
from wangen.runtime.training.refusals import resolved
from wangen.runtime.training.step import item_losses, num_tokens
from wangen.runtime.training.timesteps import Sampler

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TASKS = ("qwen-image", "qwen-image-edit", "qwen-image-edit-plus")


@pytest.fixture(scope="module", autouse=True)
def short_prompts():
    """Embeddings of few tokens, for which training asks no more; of all of them see test_qwen_prompts.py."""
    with pytest.MonkeyPatch.context() as patch:
        for task in TASKS:
            smaller(patch, task, **SHORT)
        yield


@pytest.fixture(scope="module")
def edits(short_prompts, tiny_qwen: TinyQwen, tmp_path_factory: pytest.TempPathFactory) -> dict[str, EditSet]:
    """A filled dataset of each task; tests must not change them."""
    return {task: make_edit_set(tmp_path_factory.mktemp(task) / "set", tiny_qwen, task).fill() for task in TASKS}


def samples_of(made: EditSet, options):
    model = profiles.model(made.task)
    return find_entries(options, model, read_samples(made.check, model))


def run(made: EditSet, folder: Path, **changes) -> dict[str, torch.Tensor]:
    options = made.train(folder, **changes)
    train.run(options)
    return load_file(folder / "edit.safetensors")


# ---- the step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_the_loss_of_an_item_is_noise_less_latents_on_the_target_tokens_of_the_pipeline_s_call(edits, tmp_path, task):
    made, model = edits[task], profiles.model(task)
    options = resolved(made.train(tmp_path), model, None)
    samples = samples_of(made, options)
    pipeline, kind = pipeline_of(task, made.tiny), family(model)
    plan = Plan(options, model, [], [], 1, (ExpertPlan("", options.dit, None, 0.0, 1.0, 1.0, 1),), {})
    velocity = kind.velocity_model(pipeline.transformer, Compute(checkpointing="none", plain=True), device=CPU,
                                   dtype=torch.float32)  # fmt: skip
    for index, cached in enumerate(samples):
        batch = read_batch(samples, [Draw(index, 0)])
        prepared = prepare(plan, batch, [Draw(index, 0)], 0, Sampler(options))
        with torch.no_grad():
            (loss,), _ = item_losses(kind, velocity, [prepared], options, CPU)
        height, width = batch.latents.shape[3:]
        clean, noise = (pipeline._pack_latents(value[:, :, 0], 1, 16, height, width)
                        for value in (batch.latents, prepared.noise))  # fmt: skip
        controls = batch.controls[0] if batch.controls else []
        given = [pipeline._pack_latents(one[None, :, 0], 1, 16, *one.shape[2:]) for one in controls]
        shapes = [(1, height // 2, width // 2), *((1, one.shape[2] // 2, one.shape[3] // 2) for one in controls)]
        sigma = prepared.sigmas
        with torch.no_grad():
            tokens = pipeline.transformer(
                hidden_states=torch.cat([(1 - sigma) * clean + sigma * noise, *given], dim=1), timestep=sigma,
                encoder_hidden_states=batch.texts[0][None], img_shapes=[shapes], return_dict=False,
            )[0][:, : clean.shape[1]]  # fmt: skip
        assert torch.allclose(loss, torch.nn.functional.mse_loss(tokens, noise - clean), rtol=1e-5)
        assert len(controls) == {"qwen-image": 0, "qwen-image-edit": 1}.get(
            task, 1 + (cached.sample.name == "lake.png")
        )
        assert sum(num_tokens(batch, model.patch)) == sum(height * width for _, height, width in shapes)


def test_a_batch_of_edits_with_control_images_of_other_sizes_gives_the_losses_of_each_alone(tiny_qwen, tmp_path):
    made = make_edit_set(tmp_path / "set", tiny_qwen, "qwen-image-edit-plus", batch_size=3, enable_bucket=False,
                         control_resolution=[96, 96]).fill()  # fmt: skip
    model = profiles.model(made.task)
    options = resolved(made.train(tmp_path / "out"), model, None)
    samples, kind = samples_of(made, options), family(model)
    plan = Plan(options, model, [], [], 1, (ExpertPlan("", options.dit, None, 0.0, 1.0, 1.0, 1),), {})
    transformer = kind.load_transformer(options.dit, dtype=torch.float32)
    velocity = kind.velocity_model(transformer, Compute(checkpointing="none", plain=True), device=CPU,
                                   dtype=torch.float32)  # fmt: skip

    def losses(draws):
        prepared = prepare(plan, read_batch(samples, draws), draws, 0, Sampler(options))
        with torch.no_grad():
            return item_losses(kind, velocity, [prepared], options, CPU)[0]

    draws = [Draw(index, 0, position=index) for index in range(3)]
    shapes = [[tuple(one.shape) for one in row] for row in read_batch(samples, draws).controls]
    assert len({tuple(row) for row in shapes}) == 2  # one item has two control images
    assert torch.allclose(losses(draws), torch.cat([losses([draw]) for draw in draws]), rtol=1e-5)


def test_nothing_outside_a_mask_counts(tiny_qwen, tmp_path):
    from PIL import Image

    made = make_edit_set(tmp_path / "set", tiny_qwen)
    (made.folder / "masks").mkdir()
    for stem in ("house", "lake", "hill"):
        size = SIZES[stem]
        mask = Image.new("L", size)
        mask.paste(255, (0, 0, size[0] // 2, size[1]))
        mask.save(made.folder / "masks" / f"{stem}.png")
    made.toml.write_text(made.toml.read_text() + f"mask_directory = '{(made.folder / 'masks').as_posix()}'\n")
    made.fill()
    model = profiles.model(made.task)
    samples = samples_of(made, made.train(tmp_path))
    options = resolved(made.train(tmp_path), model, None)
    plan = Plan(options, model, [], [], 1, (ExpertPlan("", options.dit, None, 0.0, 1.0, 1.0, 1),), {})
    prepared = prepare(plan, read_batch(samples, [Draw(0, 0)]), [Draw(0, 0)], 0, Sampler(options))

    def predicted(change: float):
        wrong = prepared.noise - prepared.batch.latents + 1
        wrong[..., wrong.shape[-1] // 2 + 1 :] += change  # the cell where the mask ends counts in part
        return lambda *given, **named: wrong

    seen, unseen = (item_losses(family(model), predicted(change), [prepared], options, CPU)[0] for change in (0.0, 9.0))
    assert torch.equal(seen, unseen)
    assert torch.allclose(seen, torch.ones(1))


def test_dropped_captions_are_the_empty_prompts_shown_the_same_control_images(edits, tmp_path):
    made = edits["qwen-image-edit"]
    options = made.train(tmp_path, caption_dropout=0.5)
    samples = samples_of(made, options)
    dropped = [read_batch(samples, [Draw(index, 0, -1)]).texts[0] for index in range(3)]
    assert [cached.empty.content["caption"] for cached in samples] == ["", "", ""]
    assert [cached.empty.content["controls"] for cached in samples] == [
        [source.digest for source in cached.sample.controls] for cached in samples
    ]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(dropped, 2))


# ---- whole runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_training_changes_every_target_layer_and_is_read_back(edits, tmp_path, task):
    made = edits[task]
    found = run(made, tmp_path, max_train_steps=4, caption_dropout=0.3, checkpointing="full")
    modules = {name.removeprefix("diffusion_model.").rpartition(".lora_")[0] for name in found}
    assert len(modules) == 2 * 12
    assert all(value.abs().max() > 0 for name, value in found.items() if "lora_B" in name and ".1." not in name)
    with safe_open(tmp_path / "edit.safetensors", "pt") as file:
        header = file.metadata()
    base = "qwen_image" if task == "qwen-image" else "qwen_image_edit"
    assert (header["ss_base_model_version"], header["ss_network_module"]) == (base, "networks.lora_qwen_image")
    assert header["wangen.task"] == task


def test_a_run_that_was_stopped_ends_with_the_same_bytes(edits, tmp_path):
    made = edits["qwen-image-edit-plus"]
    run(made, tmp_path / "whole", caption_dropout=0.3)
    run(made, tmp_path / "parts", caption_dropout=0.3, max_train_steps=3)
    run(made, tmp_path / "parts", caption_dropout=0.3)
    whole, parts = ((tmp_path / name / "edit.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_checkpointing_and_gradient_accumulation_change_no_number(edits, tmp_path):
    made = edits["qwen-image-edit"]
    plain = run(made, tmp_path / "a", checkpointing="none", max_train_steps=3)
    again = run(made, tmp_path / "b", checkpointing="full", max_train_steps=3)
    assert all(torch.allclose(plain[name], again[name], atol=1e-6) for name in plain)


@pytest.mark.parametrize("mode", ["int8", "nf4"])
def test_a_quantised_base_is_trained_on(edits, tmp_path, mode):
    found = run(edits["qwen-image-edit"], tmp_path, quantize=mode, max_train_steps=2)
    assert all(torch.isfinite(value).all() for value in found.values())


@pytest.mark.parametrize("clean", [False, True])
def test_a_whole_transformer_is_saved_so_that_it_loads_again_as_what_it_was(edits, tmp_path, clean):
    made, path = edits["qwen-image-edit-plus"], tmp_path / "dit.safetensors"
    marker = {"model.diffusion_model.__index_timestep_zero__": torch.tensor([])} if clean else {}
    save_file(load_file(made.tiny.single["dit"]) | marker, path)
    train.run(made.train(tmp_path / "out", dit=path, train_mode="full", max_train_steps=1, learning_rate=1e-4))
    kind, trained = family(profiles.model(made.task)), tmp_path / "out" / "edit.safetensors"
    before, after = kind.load_transformer(path), kind.load_transformer(trained)
    assert before.config.zero_cond_t == after.config.zero_cond_t == clean
    states = before.state_dict(), after.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(not torch.equal(states[0][name], states[1][name]) for name in states[0] if name.endswith("to_q.weight"))
    folder = tmp_path / "transformer"
    assert main(["export", "--dit", str(trained), "--layout", "diffusers", "--save_path", str(folder)]) == 0
    theirs = QwenImageTransformer2DModel.from_pretrained(folder)
    assert theirs.config["zero_cond_t"] is clean
    assert all(torch.equal(value, states[1][name]) for name, value in theirs.state_dict().items())


def test_a_lora_merged_into_the_checkpoint_is_the_lora_beside_it(edits, tmp_path):
    made, path = edits["qwen-image-edit"], tmp_path / "dit.safetensors"
    save_file(load_file(made.tiny.single["dit"]) | {"__index_timestep_zero__": torch.tensor([])}, path)
    run(made, tmp_path / "out", dit=path, learning_rate=0.02)
    lora, merged = tmp_path / "out" / "edit.safetensors", tmp_path / "merged.safetensors"
    line = ["export", "--dit", str(path), "--lora_weight", str(lora), "--save_path", str(merged)]
    kind, outputs = family(profiles.model(made.task)), []
    for dtype in ([], ["--dtype", "float32"]):
        assert main([*line, *dtype]) == 0
        models = kind.load_transformer(path, dtype=torch.float32), kind.load_transformer(merged, dtype=torch.float32)
        apply_adapter(models[0], read_adapter(lora), name="beside")
        assert models[1].config.zero_cond_t
        draw = torch.Generator().manual_seed(0)
        given = (
            torch.randn(1, 16, 1, 4, 4, generator=draw),
            torch.tensor([500.0]),
            [torch.randn(3, 256, generator=draw)],
        )
        with torch.no_grad():
            outputs = [kind.predict_velocity(model, *given) for model in models]
        assert torch.allclose(*outputs, atol=1e-5)


def test_training_lowers_the_loss_of_one_edit(edits, tmp_path):
    made = edits["qwen-image-edit"]
    options = made.train(tmp_path, max_train_steps=40, learning_rate=5e-3, network_dim=8, network_alpha=8.0)
    report = train.run(replace(options, timestep_sampling="uniform", min_timestep=500, max_timestep=501))
    assert report.result["last_loss"] < 0.8 * report.result["first_loss"]


@pytest.mark.parametrize(
    ("targets", "modules"), [("all", 12), ("all_linear", 14), ("attention", 8), ("ffn", 4)],
)  # fmt: skip
def test_the_presets_of_targets(edits, tmp_path, targets, modules):
    found = run(edits["qwen-image-edit"], tmp_path, lora_targets=targets, max_train_steps=1)
    assert len({name.rpartition(".lora_")[0] for name in found}) == 2 * modules


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_other_layouts_are_loaded_by_the_pipeline_and_change_it_alike(edits, tmp_path, layout):
    """ComfyUI's and kohya's names go through diffusers' own converter."""
    made = edits["qwen-image-edit"]
    run(made, tmp_path, lora_layout=("comfyui", layout), lora_targets="all_linear", max_train_steps=2)
    outputs = []
    for name in ("edit.safetensors", f"edit-{layout}.safetensors"):
        pipeline = pipeline_of("qwen-image-edit", made.tiny)
        pipeline.load_lora_weights(str(tmp_path / name))
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            outputs.append(pipeline.transformer(
                hidden_states=torch.randn(1, 4, 64, generator=draw), timestep=torch.tensor([0.5]),
                encoder_hidden_states=torch.randn(1, 3, 256, generator=draw), img_shapes=[[(1, 2, 2)]],
                return_dict=False,
            )[0])  # fmt: skip
    pipeline = pipeline_of("qwen-image-edit", made.tiny)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        base = pipeline.transformer(
            hidden_states=torch.randn(1, 4, 64, generator=draw), timestep=torch.tensor([0.5]),
            encoder_hidden_states=torch.randn(1, 3, 256, generator=draw), img_shapes=[[(1, 2, 2)]], return_dict=False,
        )[0]  # fmt: skip
    assert torch.allclose(*outputs, atol=1e-5)
    assert (outputs[0] - base).abs().max() > 1e-4


# ---- where the entries come from ---------------------------------------------------------------------------------


def losses_of(made: EditSet, folder: Path, **changes) -> tuple[list[float], dict]:
    """The loss of every step, and what the report says."""
    report = train.run(made.train(folder, max_train_steps=5, caption_dropout=0.3, **changes))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]
    assert len(losses) == 5
    return losses, {**report.result, **report.counts}


@pytest.mark.parametrize("task", TASKS)
def test_cached_realtime_and_mixed_training_have_the_same_losses_and_end_with_the_same_bytes(edits, tmp_path, task):
    shutil.copytree(edits[task].folder, tmp_path / "set")
    made = EditSet(tmp_path / "set", edits[task].tiny, task)
    made.toml.write_text(made.toml.read_text().replace(edits[task].folder.as_posix(), made.folder.as_posix()))
    weights = {"vae": made.tiny.single["vae"], "t5": made.tiny.single["t5"], "vae_dtype": "float32",
               "t5_dtype": "float32"}  # fmt: skip
    cached, report = losses_of(made, tmp_path / "cached")
    assert (report["cache_mode"], report["share_from_cache"], report["computed"]) == ("cached", 1.0, 0)
    entries = [entry for entry in Folder(made.folder / "cache").all_entries if entry.name != "hill.png"]
    removed = [entry for entry in entries if entry.kind in ("latent", "text_encoder_output")][:3]
    for entry in removed:
        entry.path.unlink()
    mixed, report = losses_of(made, tmp_path / "mixed", cache_mode="auto", **weights)
    assert (report["cache_mode"], report["computed"]) == ("mixed", 3)
    assert report["share_from_cache"] == pytest.approx(report["from_cache"] / (report["from_cache"] + 3), abs=1e-4)
    shutil.rmtree(made.folder / "cache")
    live, report = losses_of(made, tmp_path / "live", cache_mode="realtime", **weights)
    assert (report["cache_mode"], report["share_from_cache"], report["from_cache"]) == ("realtime", 0.0, 0)
    assert cached == mixed == live
    digests = {(tmp_path / name / "edit.safetensors").read_bytes() for name in ("cached", "mixed", "live")}
    assert len(digests) == 1
    assert not list(made.folder.rglob("*.safetensors"))


def test_a_run_that_began_on_the_cache_goes_on_without_it(edits, tmp_path):
    made = edits["qwen-image-edit"]
    run(made, tmp_path / "whole", lora_targets="all_linear")
    run(made, tmp_path / "parts", lora_targets="all_linear", max_train_steps=3)
    run(made, tmp_path / "parts", lora_targets="all_linear", cache_mode="realtime", vae=made.tiny.single["vae"],
        t5=made.tiny.single["t5"])  # fmt: skip
    whole, parts = ((tmp_path / name / "edit.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_cached_training_loads_no_encoder_and_the_others_ask_for_their_weights(edits, tmp_path, monkeypatch):
    made = edits["qwen-image-edit"]
    for name in ("load_latent_encoder", "load_prompt_encoder", "load_vae"):
        monkeypatch.setattr(qwen_image_edit, name, None, raising=False)
    run(made, tmp_path / "a", max_train_steps=1)
    with pytest.raises(UsageError, match="--cache_mode realtime needs --vae"):
        run(made, tmp_path / "b", cache_mode="realtime")
    with pytest.raises(UsageError, match="realtime keeps nothing"):
        run(made, tmp_path / "b", cache_mode="realtime", cache_latents=True)


@pytest.mark.parametrize(
    ("alike", "swapping"),
    [
        ({}, [
            {"blocks_to_swap": 1},
            {"blocks_to_swap": 2},
            {"blocks_to_swap": 2, "gradient_checkpointing_cpu_offload": True},
            {"blocks_to_swap": 1, "checkpointing": "selective", "gradient_checkpointing_cpu_offload": True},
        ]),
        ({"quantize": "int8"}, [{"blocks_to_swap": 1}]),
        ({"network_dropout": 0.3}, [{"blocks_to_swap": 2}]),
        ({"lora_targets": "all_linear", "quantize": "int8"}, [{"blocks_to_swap": 2, "checkpointing": "selective"}]),
    ],
)  # fmt: skip
def test_swapped_blocks_change_no_byte(edits, tmp_path, alike, swapping):
    """With a validation between the steps, which looks at the blocks without gradients."""
    made = edits["qwen-image-edit-plus"]
    more = {"validation_items": 1, "validate_every_n_steps": 2, "max_train_steps": 3, "caption_dropout": 0.3, **alike}
    run(made, tmp_path / "plain", **more)
    for number, changes in enumerate(swapping):
        run(made, tmp_path / str(number), **more, **changes)
        found, wanted = ((tmp_path / name / "edit.safetensors").read_bytes() for name in (str(number), "plain"))
        assert found == wanted, changes


def test_a_run_for_a_small_card_ends_with_the_bytes_of_any_other(edits, tmp_path):
    """What `--vram` stands for; only the quantised base changes numbers."""
    made = edits["qwen-image-edit-plus"]
    run(made, tmp_path / "a", quantize="int8", checkpointing="full", blocks_to_swap=0, max_train_steps=3)
    run(made, tmp_path / "b", vram="8", blocks_to_swap=1, max_train_steps=3)
    assert (tmp_path / "a/edit.safetensors").read_bytes() == (tmp_path / "b/edit.safetensors").read_bytes()


@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own ways
def test_compiled_training_has_the_losses_of_any_other(edits, tmp_path):
    made = edits["qwen-image-edit-plus"]
    plain, compiled = (losses_of(made, tmp_path / str(one), compile=one)[0] for one in (False, True))
    assert compiled == pytest.approx(plain, rel=1e-4)


def test_the_librarys_own_forward_and_the_fast_path_have_the_same_losses(edits, tmp_path):
    made = edits["qwen-image-edit-plus"]
    fast, plain = (losses_of(made, tmp_path / str(one), plain=one)[0] for one in (False, True))
    assert fast == pytest.approx(plain, rel=1e-4)


def test_more_blocks_than_there_are_cannot_be_swapped(edits, tmp_path):
    with pytest.raises(UsageError, match="only the 2 blocks that are recomputed"):
        train.run(edits["qwen-image-edit"].train(tmp_path, blocks_to_swap=3))
    with pytest.raises(UsageError, match="--plain knows no block swap"):
        train.run(edits["qwen-image-edit"].train(tmp_path, blocks_to_swap=1, plain=True))
