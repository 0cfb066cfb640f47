"""Training: it learns, its LoRA is everybody's, a resumed run ends with the same bytes, and it stops in words."""

import itertools
import json
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import digest
from runs import samples_of
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import TinyRun, fill_caches

from wangen import profiles
from wangen.generator.commands import parse
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.steps import Train, Watch
from wangen.generator.table import options as flags_of
from wangen.runtime import train
from wangen.runtime.adapter_layers import apply_adapter
from wangen.runtime.adapters import read_adapter
from wangen.runtime.epochs import EpochSampler
from wangen.runtime.fast.dit import FastWan
from wangen.runtime.flow import flow_loss, noised, velocity
from wangen.runtime.loader import Draw, read_batch
from wangen.runtime.lora import read_lora
from wangen.runtime.models import family
from wangen.runtime.randomness import generator_for
from wangen.runtime.training import step
from wangen.runtime.training.schedules import make_schedule

EXAMPLE = Path(__file__).parent.parent / "examples" / "dataset"
MODEL = profiles.model("t2v-1.3B")
WAN = family(MODEL)


def fixed_losses(tiny_run: TinyRun, lora: Path | None) -> dict[str, list[float]]:
    """The loss of each sample at fixed timesteps and noise, for the base or with a LoRA."""
    transformer = WAN.load_transformer(tiny_run.weights["dit"], dtype=torch.float32)
    if lora:
        apply_adapter(transformer, read_adapter(lora), name="trained")
    samples, losses = samples_of(tiny_run), {}
    for index, cached in enumerate(samples):
        batch = read_batch(samples, [Draw(index, 0)])
        noise = torch.randn(batch.latents.shape, generator=generator_for("fixed", cached.sample.name))
        row = losses[cached.sample.name] = []
        for sigma in torch.tensor([[0.2], [0.4], [0.6], [0.8], [0.95]]):
            with torch.no_grad():
                noisy = noised(batch.latents, noise, sigma)
                predicted = WAN.predict_velocity(transformer, noisy, 1000 * sigma, batch.texts)
            row.append(flow_loss(predicted, velocity(batch.latents, noise)).item())
    return losses


@pytest.mark.slow
def test_overfitting_a_photo_and_a_clip_lowers_the_loss_at_fixed_timesteps_and_noise(tmp_path):
    media = tmp_path / "media"
    media.mkdir()
    for name in ("cat.jpg", "cat.txt", "big-buck-bunny.mp4", "big-buck-bunny.txt"):
        shutil.copy(EXAMPLE / name, media)
    run = fill_caches(tmp_path, media, num_frames=17)
    train.run(
        run.options(tmp_path / "out", max_train_steps=120, learning_rate=3e-3, network_dim=16, network_alpha=16.0)
    )
    base, tuned = fixed_losses(run, None), fixed_losses(run, tmp_path / "out/lora.safetensors")
    assert len(base) == 2
    for name, row in base.items():
        assert all(after < before for before, after in zip(row, tuned[name], strict=True)), (name, row, tuned[name])
        assert sum(tuned[name]) < 0.7 * sum(row), (name, row, tuned[name])


def test_the_lora_is_in_the_comfyui_layout_and_its_header_holds_settings_and_no_time(tiny_run, tmp_path):
    train.run(tiny_run.options(tmp_path, max_train_steps=2, lora_layout=("comfyui", "kohya", "diffusers")))
    with safe_open(tmp_path / "lora.safetensors", "pt") as file:
        keys, header = set(file.keys()), file.metadata()
    assert "diffusion_model.blocks.0.self_attn.q.lora_A.weight" in keys
    assert len(keys) == 2 * 2 * 10  # blocks x (A, B) x (8 attention + 2 feed-forward linears)
    fingerprint = json.loads(header["wangen.fingerprint"])
    assert fingerprint["learning_rate"] == "0.001"
    words = {word for key in header for word in re.split(r"[._]", key)}
    assert not words & {"time", "date", "host", "path", "started", "finished", "id"}
    assert str(tmp_path) not in json.dumps(header)
    neutral = read_lora(tmp_path / "lora.safetensors")
    for layout in ("kohya", "diffusers"):
        other = read_lora(tmp_path / f"lora-{layout}.safetensors")
        assert other.keys() == neutral.keys()
        assert all(
            torch.equal(other[name].up * other[name].scale, neutral[name].up * neutral[name].scale) for name in other
        )


def test_the_log_offers_the_live_page_of_the_run(tiny_run, tmp_path, caplog):
    with caplog.at_level("INFO", "wangen"):
        train.run(tiny_run.options(tmp_path / "my run", max_train_steps=1))
        train.run(tiny_run.options(tmp_path / "my run", max_train_steps=1))
    (line,) = [text for text in caplog.messages if "live in a browser" in text]  # none where nothing is left to do
    words = shlex.split(line.split(": ", 1)[1])
    assert words[0] == sys.executable
    assert parse(Watch, words[4:]).output_dir == tmp_path / "my run"


def test_diffusers_loads_the_trained_lora_and_computes_the_same(tiny_run, tmp_path):
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    train.run(tiny_run.options(tmp_path, network_alpha=2.0))
    path = tmp_path / "lora.safetensors"
    ours = WAN.load_transformer(tiny_run.weights["dit"], dtype=torch.float32)
    apply_adapter(ours, read_adapter(path), name="trained")
    theirs = WAN.load_transformer(tiny_run.weights["dit"], dtype=torch.float32)
    base = WAN.load_transformer(tiny_run.weights["dit"], dtype=torch.float32)
    vae = WAN.load_vae(tiny_run.weights["vae"])
    pipeline = WanPipeline(
        tokenizer=None, text_encoder=None, vae=vae, transformer=theirs, scheduler=FlowMatchEulerDiscreteScheduler()
    )
    pipeline.load_lora_weights(str(path))
    latents = torch.randn(1, 16, 2, 8, 8, generator=generator_for("x"))
    text = [torch.randn(5, 64, generator=generator_for("t"))]
    with torch.no_grad():
        results = [WAN.predict_velocity(m, latents, torch.tensor([500.0]), text) for m in (ours, theirs, base)]
    assert (results[0] - results[1]).abs().max() < 1e-5
    assert (results[0] - results[2]).abs().max() > 1e-4


def test_a_run_cut_into_pieces_ends_with_the_same_bytes(tiny_run, tmp_path):
    whole = tiny_run.options(tmp_path / "whole", max_train_steps=7, network_dropout=0.2, gradient_accumulation_steps=2)
    train.run(whole)
    for steps in (2, 3, 7):
        report = train.run(replace(whole, output_dir=tmp_path / "cut", max_train_steps=steps))
    assert report.result["steps_this_run"] == 4
    assert digest(tmp_path / "cut/lora.safetensors") == digest(tmp_path / "whole/lora.safetensors")


def test_a_finished_run_is_not_trained_again_and_can_be_made_longer(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    before = digest(tmp_path / "lora.safetensors")
    assert train.run(options).result["done_before"]
    assert digest(tmp_path / "lora.safetensors") == before
    (tmp_path / "lora.safetensors").unlink()
    train.run(options)
    assert digest(tmp_path / "lora.safetensors") == before
    assert train.run(replace(options, max_train_steps=4)).result["steps_this_run"] == 2


def test_checkpointing_offload_and_reading_threads_change_no_byte(tiny_run, tmp_path):
    plain = tiny_run.options(tmp_path / "plain", checkpointing="none", max_data_loader_n_workers=0)
    train.run(plain)
    for name, changes in {
        "checkpointed": {"checkpointing": "full", "max_data_loader_n_workers": 3},
        "selective": {"checkpointing": "selective"},
        "free": {"checkpointing": "full", "checkpointing_free_blocks": 1},
        "swapped": {"checkpointing": "full", "blocks_to_swap": 1},
        "offloaded": {"checkpointing": "selective", "gradient_checkpointing_cpu_offload": True},
    }.items():
        train.run(replace(plain, output_dir=tmp_path / name, **changes))
        assert digest(tmp_path / name / "lora.safetensors") == digest(tmp_path / "plain/lora.safetensors"), name


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_a_step_that_leaves_all_adapters_out_trains_nothing(tiny_run, tmp_path, kind):
    """`module_dropout` may leave out all of a block or of the model, however blocks are computed."""
    common = {"network_module": kind, "network_args": ("module_dropout=0.6",), "include_patterns": (r"\.0\.ffn",)}
    ways = ({"checkpointing": "none"}, {"checkpointing": "full"}, {"checkpointing": "full", "blocks_to_swap": 1})
    found = []
    for number, way in enumerate(ways):
        folder = tmp_path / str(number)
        train.run(tiny_run.options(folder, max_train_steps=5, **common, **way))
        found.append(load_file(folder / "lora.safetensors"))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        norms = [line["grad_norm"] for line in lines if "grad_norm" in line]
        assert 0.0 in norms
        assert max(norms) > 0.0
    for name, wanted in found[0].items():
        assert all(torch.equal(other[name], wanted) for other in found[1:])


def test_the_passes_of_a_deterministic_run_are_held_to_a_fixed_order(tiny_run, tmp_path, monkeypatch):
    """Where PyTorch may merely warn, the gradient of its attention on CUDA adds up in any order."""
    seen, item_losses = [], step.item_losses

    def spy(*words):
        lenient = torch.is_deterministic_algorithms_warn_only_enabled()
        seen.append((torch.are_deterministic_algorithms_enabled(), lenient))
        losses, errors = item_losses(*words)
        losses.register_hook(lambda _: seen.append(torch.is_deterministic_algorithms_warn_only_enabled()))
        return losses, errors

    monkeypatch.setattr(step, "item_losses", spy)
    try:
        train.run(tiny_run.options(tmp_path / "out", max_train_steps=2, deterministic=True))
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [(True, False), False] * 2, "forward and backward"


def test_bf16_trains_close_to_float32(tiny_run, tmp_path):
    reports = [
        train.run(tiny_run.options(tmp_path / precision, mixed_precision=precision, max_train_steps=4))
        for precision in ("no", "bf16")
    ]
    full, half = (report.result["last_loss"] for report in reports)
    assert half == pytest.approx(full, rel=0.015)
    assert half != full


def test_changed_settings_stop_with_the_difference_and_two_ways_on(tiny_run, tmp_path, monkeypatch):
    options = tiny_run.options(tmp_path, max_train_steps=2)
    train.run(options)
    changed = replace(options, learning_rate=5e-4, max_train_steps=3)
    with pytest.raises(WangenError) as error:
        train.run(changed)
    assert "learning_rate: 0.001 -> 0.0005" in str(error.value)
    assert "--fresh" in str(error.value)
    assert "--resume_changed" in str(error.value)
    assert train.run(replace(changed, resume_changed=True)).result["steps_this_run"] == 1
    with monkeypatch.context() as context:
        context.setattr(train, "load_trainee", lambda *_words: pytest.fail("the model was loaded"))
        with pytest.raises(WangenError, match="another rank") as error:
            train.run(replace(changed, resume_changed=True, network_dim=8, max_train_steps=9))
    assert error.value.exit_code == 2
    assert train.run(replace(changed, fresh=True)).result["steps_this_run"] == 3


def test_network_weights_start_where_another_lora_ended(tiny_run, tmp_path):
    train.run(tiny_run.options(tmp_path / "one"))
    start = tmp_path / "one/lora.safetensors"
    train.run(tiny_run.options(tmp_path / "two", network_weights=start, max_train_steps=1, learning_rate=1e-12))
    one, two = read_lora(start), read_lora(tmp_path / "two/lora.safetensors")
    assert all(torch.allclose(one[name].up, two[name].up, atol=1e-9) for name in one)
    with pytest.raises(WangenError, match="give --network_dim 4"):
        train.run(tiny_run.options(tmp_path / "three", network_weights=start, network_dim=8))


def test_the_file_that_a_run_starts_from_is_read_once(tiny_run, tmp_path, monkeypatch):
    train.run(tiny_run.options(tmp_path / "one", network_alpha=2.0, max_train_steps=2, lora_layout=("kohya",)))
    start = (tmp_path / "one/lora.safetensors").rename(tmp_path / "start.safetensors")
    announce = train.announce
    monkeypatch.setattr(train, "announce", lambda run: (announce(run), start.unlink()))
    options = tiny_run.options(
        tmp_path / "two", network_weights=start, dim_from_weights=True, max_train_steps=2, save_every_n_steps=1
    )
    train.run(options)
    found = [path.name for path in sorted((tmp_path / "two").glob("*.safetensors"))]
    assert found == ["lora-step00000001.safetensors", "lora.safetensors"]


def test_a_non_finite_loss_stops_with_the_item_named(tiny_run, tmp_path):
    with pytest.raises(WangenError, match=r"not finite at step \d+, on (red|blue|clip)") as error:
        train.run(tiny_run.options(tmp_path, learning_rate=1e30, max_grad_norm=0.0, max_train_steps=20))
    assert "lower --learning_rate" in str(error.value)
    assert not (tmp_path / "lora.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"network_dim": 0}, "--network_dim must be above 0"),
        ({"min_timestep": 900, "max_timestep": 100}, "no range within 0 to 1000"),
        ({"network_dropout": 1.0}, "below 1"),
        ({"output_name": "a/b"}, "without folders"),
        ({"lr_warmup_steps": "soon"}, "--lr_warmup_steps"),
        ({"optimizer_type": "NoSuch"}, "there is no optimizer NoSuch"),
        ({"optimizer_args": ("weight_decay",)}, "key=value"),
        ({"optimizer_args": ("speed=3",)}, "speed"),
        ({"device": "cuda:9"}, "--device cuda:9"),
        ({"max_train_steps": 0}, "--max_train_steps must be above 0"),
        ({"max_train_epochs": -1}, "--max_train_epochs must be above 0"),
        ({"discrete_flow_shift": 0.0}, "--discrete_flow_shift must be above 0"),
        ({"max_grad_norm": float("nan")}, "--max_grad_norm must be 0 or above"),
        ({"lora_layout": ()}, "--lora_layout is empty"),
        ({"deterministic": True, "attention": "xformers"}, "--attention xformers adds up in no fixed order"),
        ({"fresh": True, "resume": Path("x")}, "contradict each other"),
    ],
)
def test_what_cannot_work_is_refused(tiny_run, tmp_path, changes, part):
    with pytest.raises(WangenError) as error:
        train.run(tiny_run.options(tmp_path, **changes))
    assert part in str(error.value)


@pytest.mark.parametrize(
    "changes", [{"optimizer_type": "NoSuch"}, {"lr_warmup_steps": "soon"}, {"optimizer_args": ("x",)}]
)
def test_typing_errors_are_found_before_the_transformer_is_read(tiny_run, tmp_path, changes, monkeypatch):
    monkeypatch.setattr(WAN, "load_transformer", lambda *_words, **_names: pytest.fail("the model was loaded"))
    with pytest.raises(UsageError):
        train.run(tiny_run.options(tmp_path, **changes))


def test_every_training_flag_is_pinned_or_known_to_be_harmless():
    """A flag that changes the result and is not pinned would let a resume mix two runs."""
    harmless = (
        "dataset_config manifest resolution smoke dit dit_high_noise experts expert_turn_steps offload_inactive_dit "
        "force_v2_1_time_embedding output_dir output_name network_weights network_weights_high_noise "
        "base_weights max_train_epochs max_train_steps show_timesteps vram blocks_to_swap "
        "block_swap_ring_size use_pinned_memory_for_block_swap block_swap_h2d_only checkpointing_free_blocks "
        "max_data_loader_n_workers persistent_data_loader_workers disable_numpy_memmap img_in_txt_in_offloading "
        "profile deterministic cuda_graphs "
        "peak_tflops device gpus parallel max_restarts cache_mode cache_latents cache_latents_to_disk vae vae_dtype "
        "vae_cache_cpu decoder "
        "vae_device text_encoder_device clip t5 tokenizer "
        "t5_dtype fp8_t5 validation_config validation_timesteps validate_every_n_steps keep_best "
        "sample_continuations continuation_guidance continuation_steps "
        "sample_prompts sample_every_n_steps sample_every_n_epochs sample_at_first logging_dir log_with "
        "log_tracker_name wandb_run_name save_every_n_epochs save_every_n_steps save_last_n_epochs "
        "save_last_n_steps keep_last save_state save_last_n_epochs_state save_last_n_steps_state "
        "save_state_on_train_end save_state_every_n_steps save_state_every_n_minutes async_save no_metadata "
        "training_comment metadata_title metadata_author metadata_description metadata_license metadata_tags "
        "resume fresh resume_changed config_file log_file report_dir lock"
    ).split()  # data and weights count by their digests, and a try is never resumed
    loose = [option.name for option in flags_of(Train) if not option.flag.pinned]
    assert sorted(loose) == sorted(harmless)


def test_a_number_of_steps_beside_epochs_is_said_to_be_unused(tiny_run, tmp_path, caplog):
    train.run(tiny_run.options(tmp_path, max_train_steps=2, max_train_epochs=1))
    assert any("--max_train_steps 2 is not used: --max_train_epochs 1" in text for text in caplog.messages)


def test_a_schedule_that_depends_on_the_length_refuses_another_length(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=2, lr_scheduler="cosine")
    train.run(options)
    with pytest.raises(WangenError, match="length of the schedule: 2 -> 4"):
        train.run(replace(options, max_train_steps=4))


def test_out_of_memory_is_one_message_with_the_batch_and_the_cure(tiny_run, tmp_path, monkeypatch):
    def full(*_words, **_names):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(FastWan, "__call__", full)  # no GPU here to fill for real
    with pytest.raises(WangenError, match=r"out of memory at step 1, on (red|blue|clip).* \(latents of \d") as error:
        train.run(tiny_run.options(tmp_path))
    assert "give --quantize int8" in str(error.value)


def test_a_missing_cache_stops_with_the_command_to_run(tiny_run, tmp_path):
    config = tmp_path / "other.toml"
    config.write_text(tiny_run.dataset_config.read_text().replace("/cache", "/elsewhere"))
    with pytest.raises(WangenError) as error:
        train.run(tiny_run.options(tmp_path, dataset_config=config))
    assert "the cache lacks 6 entries" in str(error.value)
    line = f"run wangen cache_latents --dataset_config {config} --task t2v-1.3B --vae VAE_FILE and wangen cache_text"
    assert line in str(error.value)


def test_schedules_are_functions_of_the_step(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, lr_scheduler="cosine", lr_warmup_steps="10%")
    factor = make_schedule(options, 100)
    assert [round(factor(step), 3) for step in (0, 5, 10, 55, 100)] == [0.0, 0.5, 1.0, 0.5, 0.0]
    assert make_schedule(replace(options, lr_scheduler="constant"), 100)(5) == 0.5
    assert make_schedule(replace(options, lr_scheduler="constant", lr_warmup_steps="0"), 100)(0) == 1.0
    with pytest.raises(UsageError):
        make_schedule(replace(options, lr_warmup_steps="200%"), 100)


def test_an_epoch_holds_every_sample_once_in_an_order_of_its_own(tiny_run):
    samples = samples_of(tiny_run)
    orders = [EpochSampler(samples, 1).epoch(epoch) for epoch in range(6)]
    for order in orders:
        assert sorted(draw.index for batch in order for draw in batch) == list(range(len(samples)))
    assert len({tuple(draw.index for batch in order for draw in batch) for order in orders}) > 1
    assert list(EpochSampler(samples, 1).epoch(3)) == list(orders[3])


def test_tensorboard_holds_the_loss_of_every_step(tiny_run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train.run(tiny_run.options(tmp_path, log_with=("tensorboard",), max_train_steps=3))
    events = EventAccumulator(str(tmp_path / "logs" / "lora"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]


def test_accumulating_batches_is_a_larger_batch(tiny_run, tmp_path):
    """Two pictures as one batch of 2 and as 2 batches of 1: the same gradient, so the same LoRA to rounding."""
    text = tiny_run.dataset_config.read_text()
    images = text[: text.rindex("[[datasets]]")]
    loras = []
    for size, accumulate in itertools.product((1, 2), (1, 2)):
        if size * accumulate == 2:
            config = tmp_path / f"batch{size}.toml"
            config.write_text(images.replace("enable_bucket = true", f"enable_bucket = true\nbatch_size = {size}"))
            folder = tmp_path / f"out{size}"
            options = tiny_run.options(folder, dataset_config=config, gradient_accumulation_steps=accumulate)
            train.run(replace(options, max_train_steps=3, optimizer_type="SGD", learning_rate=0.1))
            loras.append(read_lora(folder / "lora.safetensors"))
    first, second = loras
    for name in first:
        assert torch.allclose(first[name].up, second[name].up, atol=1e-6), name
        assert second[name].up.abs().max() > 0
