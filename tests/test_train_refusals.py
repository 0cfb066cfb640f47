"""Everything that can be refused is refused before a model loads."""

import contextlib
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import planned
from safetensors.torch import load_file, save_file
from tiny import TinyRun

from wangen import profiles
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.experts import choose_boundary
from wangen.generator.plan.saves import most_bytes, saved_bytes
from wangen.generator.steps import Train
from wangen.generator.train_refusals import refuse_flags
from wangen.runtime import train
from wangen.runtime.models import family
from wangen.runtime.training.adapter import add_adapter
from wangen.runtime.training.adapter_files import save
from wangen.runtime.training.loading import SMALL_FILES_BYTES, room_needed
from wangen.runtime.training.refusals import resolved
from wangen.runtime.weights.transformer import load_transformer

MODEL = profiles.model("t2v-1.3B")
WAN = family(MODEL)
ADAPTERS = {
    "lora": {}, "rank 8": {"network_dim": 8}, "dora": {"dora": True}, "loha": {"network_module": "loha"},
    "lokr": {"network_module": "lokr", "lokr_factor": 8},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_model_loads(monkeypatch):
    """But on the meta device, where its names and shapes are compared, and nothing of it is read."""

    def load(*_words: object, device: object = "cpu", **_names: object) -> None:
        if device != "meta":
            pytest.fail("the model was loaded")

    monkeypatch.setattr(WAN, "load_transformer", load)


@pytest.fixture(scope="module")
def files(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of the tiny transformer, one of another model's size, and the transformer in 8 bits and turned."""
    folder = tmp_path_factory.mktemp("files")
    found = {name: folder / f"{name}.safetensors" for name in (*ADAPTERS, "small", "fp8", "high")}
    for name, changes in ADAPTERS.items():
        options = tiny_run.options(folder, **changes)
        parameters = add_adapter(load_transformer(tiny_run.weights["dit"]), options, MODEL)
        save(found[name], parameters, options, {"wangen.expert": "high_noise"})
    halves = {key: value[:, ::2] if "lora_A" in key else value[::2] for key, value in load_file(found["lora"]).items()}
    save_file({key: value.contiguous() for key, value in halves.items()}, found["small"])
    weights = load_file(tiny_run.weights["dit"])
    save_file({key: 0.9 * value for key, value in weights.items()}, found["high"])
    wide = {key for key, value in weights.items() if key.startswith("blocks.") and value.ndim == 2}
    save_file({key: value.to(torch.float8_e4m3fn) if key in wide else value for key, value in weights.items()},
              found["fp8"])  # fmt: skip
    return {**found, **tiny_run.weights}


def with_files(files: dict[str, Path], changes: dict) -> dict:
    """Flags whose files are told by name."""
    one = {"dit", "dit_high_noise", "network_weights", "network_weights_high_noise"}
    given = {name: files[value] if name in one and value else value for name, value in changes.items()}
    return given | ({"base_weights": tuple(files[name] for name in changes["base_weights"])}
                    if "base_weights" in changes else {})  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network_weights": "dora"}, "this is a DoRA, and a LoRA is to be trained: give --dora as well"),
        ({"network_weights": "rank 8"}, "has rank 8, and --network_dim is 4: give --network_dim 8"),
        ({"network_weights": "loha", "network_module": "loha", "network_dim": 8}, "has rank 4, and --network_dim is 8"),
        ({"network_weights": "lokr", "network_module": "lokr"}, "that it was trained with"),
        ({"network_weights": "small"}, "is 128x128 in it and 256x256 in --dit"),
        ({"base_weights": ("small",)}, "is 128x128 in it and 256x256 in --dit"),
        ({"base_weights": ("dora",), "base_weights_multiplier": (0.5,)}, "a DoRA at strength 0.5"),
        ({"base_weights": ("lora",), "dit": "fp8"}, "as F8_E4M3, to which nothing can be added"),
        ({"train_mode": "full", "dit": "fp8"}, "trains no such weights: give --dit in 16 or 32 bits, or train a LoRA"),
    ],
)
def test_files_that_do_not_fit_what_is_trained_are_named(tiny_run, tmp_path, files, changes, words):
    with pytest.raises(UsageError) as error:
        train.run(tiny_run.options(tmp_path, **with_files(files, changes)))
    assert words in f"{error.value.found}: {error.value.cure}"
    assert error.value.where.endswith(".safetensors")


def test_a_rank_above_that_of_every_whole_change_is_refused(tiny_run, tmp_path, files):
    with pytest.raises(UsageError, match="--network_dim 257, where no layer's change can have a rank above 256"):
        train.run(tiny_run.options(tmp_path, network_dim=257))
    for changes in ({"network_dim": 256}, {"network_dim": 257, "network_module": "lokr"}):
        with pytest.raises(pytest.fail.Exception, match="the model was loaded"):
            train.run(tiny_run.options(tmp_path, **changes))


@pytest.mark.parametrize("flag", ["network_weights", "base_weights"])
def test_an_adapter_that_holds_nan_is_refused_before_a_model_loads(tiny_run, tmp_path, files, flag):
    tensors = load_file(files["lora"])
    name = sorted(tensors)[3]
    tensors[name][0, 0] = torch.nan
    save_file(tensors, broken := tmp_path / "broken.safetensors")
    with pytest.raises(WangenError, match="this adapter holds NaN or infinity in blocks") as error:
        train.run(tiny_run.options(tmp_path, **{flag: (broken,) if flag == "base_weights" else broken}))
    assert error.value.where == str(broken)


@pytest.mark.parametrize("name", ADAPTERS)
def test_files_that_fit_reach_the_model(tiny_run, tmp_path, files, name):
    given = tiny_run.options(tmp_path, network_weights=files[name], **ADAPTERS[name])
    with pytest.raises(pytest.fail.Exception, match="the model was loaded"):
        train.run(given)
    with pytest.raises(pytest.fail.Exception, match="the model was loaded"):
        train.run(tiny_run.options(tmp_path, base_weights=(files[name],)))


def two(tiny_run: TinyRun, files: dict[str, Path], folder: Path, **changes) -> Train:
    given = {"task": "t2v-A14B", "dit_high_noise": "high", **changes}
    return tiny_run.options(folder, **with_files(files, given))


@pytest.mark.parametrize(
    "changes",
    [
        {"experts": "high", "dim_from_weights": True, "network_weights_high_noise": "rank 8"},
        {"experts": "high", "dit": None, "dim_from_weights": True, "network_weights_high_noise": "rank 8",
         "base_weights": ("lora",)},
        {"experts": "high", "network_weights": "rank 8"},
        {"experts": "low", "network_weights_high_noise": "rank 8"},
        {"experts": "low", "dim_from_weights": True, "network_weights": "rank 8"},
    ],
)  # fmt: skip
def test_files_of_the_expert_that_is_not_trained_are_not_judged(tiny_run, tmp_path, files, changes):
    with pytest.raises(pytest.fail.Exception, match="the model was loaded"):
        train.run(two(tiny_run, files, tmp_path, **changes))


def test_a_missing_file_of_the_expert_that_is_not_trained_is_not_asked_for(tiny_run, tmp_path, files):
    options = replace(two(tiny_run, files, tmp_path, experts="low"), dit_high_noise=tmp_path / "none.safetensors")
    with pytest.raises(pytest.fail.Exception, match="the model was loaded"):
        train.run(options)


def test_the_cure_names_the_flag_of_the_expert(tiny_run, tmp_path, files):
    with pytest.raises(UsageError) as error:
        train.run(two(tiny_run, files, tmp_path, dim_from_weights=True, network_weights="rank 8"))
    assert "give --network_weights_high_noise" in error.value.cure
    wrong = replace(two(tiny_run, files, tmp_path, dim_from_weights=True), network_weights=files["rank 8"],
                    network_weights_high_noise=tiny_run.weights["vae"])  # fmt: skip
    with pytest.raises(WangenError, match="--network_weights_high_noise takes a LoRA"):
        train.run(wrong)


def test_a_lora_of_one_expert_that_is_merged_into_the_other_is_said(tiny_run, tmp_path, files, caplog):
    caplog.set_level(logging.INFO, "wangen")
    for experts, times in (("both", 1), ("low", 1), ("high", 0)):
        caplog.clear()
        with pytest.raises(pytest.fail.Exception, match="the model was loaded"):
            train.run(two(tiny_run, files, tmp_path, experts=experts, base_weights=("lora",)))
        assert caplog.text.count("was trained for the high-noise expert, and is merged into the low-noise one") == times


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr_scheduler": "warmup_stable_decay"}, "needs --lr_decay_steps"),
        ({"lr_scheduler": "adafactor"}, "Adafactor's own"),
        (
            {"optimizer_type": "adafactor", "optimizer_args": ("relative_step=True",), "lr_scheduler": "cosine"},
            "sets the learning rate itself",
        ),
        ({"lr_warmup_steps": "abc"}, "takes steps"),
        ({"lr_scheduler_min_lr_ratio": 2.0}, "--lr_scheduler_min_lr_ratio must be 0 to 1"),
        ({"lr_scheduler": "inverse_sqrt", "lr_scheduler_timescale": 0}, "--lr_scheduler_timescale must be above 0"),
        ({"sample_prompts": "a cat --zz 3"}, "--zz"),
    ],
)
def test_mistakes_of_schedules_and_prompts_are_told_before_the_dataset_is_read(
    tiny_run, tmp_path, monkeypatch, changes, words
):
    monkeypatch.setattr(train, "read_training_samples", lambda *_words: pytest.fail("the dataset was read"))
    if "sample_prompts" in changes:
        (tmp_path / "prompts.txt").write_text(changes["sample_prompts"], encoding="utf-8")
        changes = {"sample_prompts": tmp_path / "prompts.txt", **tiny_run.weights}
    with pytest.raises(UsageError) as error:
        train.run(tiny_run.options(tmp_path / "out", cache_latents=True, **changes))
    assert words in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_targets": "ffn"}, {"include_patterns": ("attn1",)}, {"exclude_patterns": ("attn1",)}, {"dora": True},
        {"rslora": True}, {"network_dropout": 0.5}, {"network_module": "lokr"}, {"loraplus_lr_ratio": 4.0},
        {"network_args": ("use_dora=True",)}, {"lora_layout": ("kohya",)}, {"dim_from_weights": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_training_every_weight_would_ignore_is_refused(tiny_run, tmp_path, changes):
    with pytest.raises(UsageError) as error:
        train.run(tiny_run.options(tmp_path, train_mode="full", **changes))
    assert all(f"--{name}" in error.value.found for name in changes)


def test_every_weight_trains_with_the_flags_that_scripts_spell_out(tiny_run, tmp_path):
    plain = {"network_dim": 16, "network_alpha": 8.0, "checkpointing": "selective", "checkpointing_free_blocks": 1}
    with pytest.raises(pytest.fail.Exception, match="the model was loaded"):
        train.run(tiny_run.options(tmp_path, train_mode="full", **plain))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output_name": ""}, "--output_name"),
        ({"output_name": "a/b"}, "without folders"),
        ({"output_name": ".."}, "without folders"),
        ({"output_name": " "}, "without folders"),
        ({"output_name": "é" * 81}, "longer than 160 bytes"),
        ({"dit": None}, "train needs --dit"),
        ({"lora_layout": ()}, "--lora_layout is empty"),
        ({"lora_layout": ("kohya", "comfyui", "kohya")}, "names one twice"),
        ({"keep_best": True}, "--keep_best needs a validation"),
        ({"validation_items": 3}, "leaves nothing of 3 items to train on"),
        ({"validation_items": -1}, "--validation_items must be 0 or above"),
        ({"ema_decay": 1.0}, "--ema_decay must be between 0 and 1"),
        ({"ema_decay": 0.9, "fresh": True, "resume": "x"}, "contradict"),
        ({"blocks_to_swap": 1, "checkpointing": "none"}, "--blocks_to_swap needs checkpointing"),
        ({"checkpointing": "none", "gradient_checkpointing_cpu_offload": True}, "it is switched off"),
        ({"plain": True, "checkpointing": "selective"}, "--plain knows no"),
        ({"plain": True, "attention": "sage"}, "the kernel of --attention sage has no gradient of its own"),
        ({"plain": True, "blocks_to_swap": 1}, "--plain knows no"),
        ({"train_mode": "full", "quantize": "fp8"}, "none can be quantised"),
        ({"train_mode": "full", "blocks_to_swap": 1}, "none can be quantised or swapped"),
        ({"scale_weight_norms": 1.0, "network_module": "lokr"}, "is for LoRA alone"),
        ({"dit_high_noise": "dit"}, "has one transformer"),
        ({"high_noise_share": 0.5}, "has one transformer"),
        ({"experts": "low"}, "has one transformer"),
        ({"timestep_boundary": 0.9}, "has one transformer"),
        ({"condition_frames": 1}, "does not take given frames"),
        ({"condition_dropout": 0.5}, "no draw of this run is given frames"),
        ({"sample_every_n_steps": 2}, "there are no prompts"),
        ({"sample_prompts": "prompts"}, "samples need --vae and --t5"),
        ({"sample_continuations": -1}, "--sample_continuations must be 0 or above"),
        ({"sample_continuations": 2}, "does not take given frames"),
        ({"continuation_steps": 3}, "there are no clips to continue"),
        ({"continuation_guidance": 3.0}, "there are no clips to continue"),
        ({"continuation_guidance": 0.0}, "--continuation_guidance must be above 0"),
        ({"log_with": ("none", "tensorboard")}, "stands alone"),
        ({"log_with": ("mlflow",)}, "pip install mlflow"),
        ({"weighting_scheme": "mode"}, "give --timestep_sampling sigma"),
        ({"min_timestep": 900, "max_timestep": 100}, "are no range"),
        ({"include_patterns": ("no_such_layer",)}, "no_such_layer"),
        ({"include_patterns": ("attn1(",)}, "attn1"),
        ({"include_patterns": ("",)}, "an empty pattern"),
        ({"network_args": ("algo=lokr",)}, "use --network_module"),
        ({"network_alpha": 0.0}, "give the rank, --network_alpha 4, which 0 means in musubi-tuner"),
        ({"lr_scheduler": "polynomial", "lr_scheduler_power": -1.0}, "--lr_scheduler_power must be above 0"),
        ({"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": 0}, "_num_cycles must be above 0"),
        ({"lr_scheduler": "inverse_sqrt", "lr_scheduler_timescale": -1}, "leave it out for the warm-up's steps"),
        ({"optimizer_args": ("weight_decay",)}, "takes key=value"),
        ({"optimizer_args": ("weight_decay=0.1", "weight_decay=0.5")}, "gives weight_decay twice"),
        ({"base_weights_multiplier": (0.5,)}, "--base_weights"),
        ({"optimizer_type": "torch.optim.LBFGS"}, "LBFGS"),
        ({"optimizer_type": "Adafactor", "optimizer_args": ("speed=1",)}, "speed"),
        ({"lr_scheduler": "adafactor"}, "Adafactor"),
        ({"lr_warmup_steps": "150%"}, "--lr_warmup_steps"),
        ({"vram": "auto", "peak_tflops": 0.0}, "--peak_tflops must be above 0"),
        ({"caption_dropout": 1.5}, "--caption_dropout must be 0 to 1"),
    ],
)
def test_what_no_run_can_have_is_named(tiny_run, tmp_path, changes, words):
    files = {"dit": tiny_run.weights["dit"], "prompts": tmp_path / "prompts.txt", "x": tmp_path}
    given = {name: files.get(value, value) if isinstance(value, str) else value for name, value in changes.items()}
    with pytest.raises(WangenError) as error:
        train.run(tiny_run.options(tmp_path / "out", **given))
    assert words in str(error.value)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_goes_together_in_some_runs_is_refused_in_others_alone():
    usual = Train(output_dir=Path("o"), output_name="n", dit=Path("d"))
    adafactor = {"optimizer_type": "Adafactor", "optimizer_args": ("relative_step=true",)}
    for changes, words in (
        ({"keep_best": True, "validation_config": Path("v.toml")}, ""),
        ({"keep_best": True, "validation_items": 2}, ""),
        ({"validation_items": 2, "validation_config": Path("v.toml")}, "contradict each other"),
        ({"deterministic": True, "attention": "xformers"}, "adds up in no fixed order"),
        ({"deterministic": True}, ""), ({"attention": "xformers"}, ""),
        (adafactor, ""), ({**adafactor, "loraplus_lr_ratio": 4.0}, "no schedule and no LoRA"),
        ({"cache_mode": "realtime", "cache_latents": True}, "keeps nothing"),
        ({"weighting_scheme": "logit_normal"}, "give --timestep_sampling sigma"),
        ({"lr_warmup_steps": "100%"}, ""), ({"lr_warmup_steps": "101%"}, "outside the run"),
    ):  # fmt: skip
        with contextlib.nullcontext() if not words else pytest.raises(UsageError, match=words):
            refuse_flags(replace(usual, **changes))
    with pytest.raises(UsageError, match="leaves one expert without timesteps"):
        choose_boundary(1.0, profiles.model("t2v-A14B"))
    ti2v = profiles.model("ti2v-5B")
    for frames, found in ((None, 1), (0, 0), (5, 5)):
        assert resolved(replace(usual, condition_frames=frames), ti2v, None).condition_frames == found
    for frames in (2, 3, 4, -3):
        with pytest.raises(UsageError, match=r"must be 4n\+1"):
            resolved(replace(usual, condition_frames=frames), ti2v, None)


def test_a_disk_that_cannot_hold_the_checkpoints_is_refused(tiny_run, tmp_path, monkeypatch):
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    with pytest.raises(WangenError, match=r"the checkpoints need up to \d+\.\d [kM]B, and 1\.0 kB are free") as error:
        train.run(tiny_run.options(tmp_path))
    assert error.value.cure == "free space, lower --network_dim, or give another --output_dir"
    for keep_last, fewer in ((None, True), (3, True), (1, False)):
        with pytest.raises(WangenError, match="the checkpoints need up to") as error:
            train.run(tiny_run.options(tmp_path, save_every_n_steps=1, keep_last=keep_last))
        assert ("lower --network_dim, keep fewer (--keep_last), or" in error.value.cure) == fewer


def test_the_room_is_that_of_every_number_that_trains_less_what_lies_there(tiny_run, tmp_path):
    plan = planned(tiny_run, tmp_path, dora=True, keep_best=True, validation_items=1)
    options = plan.options
    parameters = add_adapter(load_transformer(tiny_run.weights["dit"]), options, MODEL)
    sizes = saved_bytes(options, sum(value.numel() for value in parameters.values()))
    needed = SMALL_FILES_BYTES + most_bytes(options, plan.steps_per_epoch, plan.num_steps, sizes)
    assert room_needed(plan) == needed
    (plan.states / "step-00000001").mkdir(parents=True)
    for name in ("lora", "lora-step00000001", "lora-state/step-00000001/adapter", "loras", "lora-big"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"x" * 1000)
    assert room_needed(plan) == needed - 3000, "another run's stay"


ROOM = {
    **ADAPTERS, "averages": {"ema_decay": 0.9}, "full": {"train_mode": "full", "ema_decay": 0.9},
    "layouts": {"lora_layout": ("comfyui", "kohya")}, "rank of a file": {"dim_from_weights": True, "network_dim": 1},
    "all on the way": {"save_every_n_steps": 1, "save_every_n_epochs": 1, "save_state": True},
    "some on the way": {"save_every_n_steps": 1, "save_last_n_steps": 2, "save_state": True,
                        "save_last_n_steps_state": 2},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ROOM)
def test_the_room_that_is_asked_for_holds_what_a_run_leaves_there(tiny_run, tmp_path, files, name, monkeypatch):
    monkeypatch.undo()  # here the model loads
    asked = []
    monkeypatch.setattr(train, "require_room_to_save", lambda plan: asked.append(room_needed(plan)))
    start = {"network_weights": files["rank 8"]} if name == "rank of a file" else {}
    options = tiny_run.options(tmp_path, max_train_steps=4, **start, **ROOM[name])
    train.run(options)
    left = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert left <= asked[0] <= SMALL_FILES_BYTES + 3 * left
    if name == "all on the way":
        train.run(replace(options, max_train_steps=5))
        assert asked[1] < asked[0] - left / 2


def test_a_preset_for_more_blocks_than_the_weights_have_is_named(tiny_run, tmp_path):
    with pytest.raises(UsageError) as error:
        train.run(tiny_run.options(tmp_path, vram="12", task="t2v-14B"))
    assert "beside --vram 12, which is made for weights of more blocks" in error.value.cure
