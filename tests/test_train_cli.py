"""Training as its users meet it: what is said before, while and after, and what a mistake is answered with."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TinyRun, state_folder
from train_cases import cut_off

from wangen.generator.errors import UsageError, WangenError
from wangen.generator.session import execute
from wangen.generator.steps import Train
from wangen.runtime import train
from wangen.runtime.training import checkpoint
from wangen.runtime.training.throughput import profiled


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "wangen")


@pytest.fixture(scope="module")
def experts(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights of two experts, named as they are in circulation."""
    folder, found = tmp_path_factory.mktemp("experts"), {}
    for name, factor in (("high", 0.9), ("low", 1.1)):
        found[name] = folder / f"wan2.2_t2v_{name}_noise_14B.safetensors"
        weights = load_file(tiny_run.weights["dit"])
        save_file({key: (factor * value.float()).to(value.dtype) for key, value in weights.items()}, found[name])
    return found


def both(tiny_run: TinyRun, files: dict[str, Path], folder: Path, **changes) -> Train:
    options = tiny_run.options(folder, task="t2v-A14B", dit=files["low"], dit_high_noise=files["high"])
    return replace(options, **changes)


@pytest.fixture(scope="module")
def lora(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    train.run(tiny_run.options(folder, max_train_steps=1))
    return folder / "lora.safetensors"


def test_the_log_says_what_trains_how_memory_is_saved_and_how_fast_it_was(tiny_run, tmp_path, caplog):
    report = train.run(tiny_run.options(tmp_path, max_train_steps=2, quantize="int8", blocks_to_swap=1))
    assert "parameters train (lora on 20 layers), float32" in caplog.text
    assert "memory: --quantize int8 --blocks_to_swap 1" in caplog.text
    assert "s/step" in caplog.text
    speed = report.result["speed"]
    assert speed["s_per_step"] > 0
    assert 0 <= speed["data_wait_share"] <= 1
    assert report.inputs["memory"]["blocks_to_swap"] == 1


@pytest.mark.parametrize(("accumulation", "words"), [
    (2, "the last step of each epoch has 1 of 2 batches: an epoch has 3"),
    (5, "each step has 3 of 5 batches: an epoch has 3"), (3, ""), (1, ""),
])  # fmt: skip
def test_an_epoch_that_the_accumulation_does_not_divide_is_told(tiny_run, tmp_path, caplog, accumulation, words):
    train.run(tiny_run.options(tmp_path, max_train_steps=1, gradient_accumulation_steps=accumulation))
    assert words in caplog.text
    assert ("batches: an epoch has" in caplog.text) == bool(words)


def test_a_plain_run_says_nothing_of_memory(tiny_run, tmp_path, caplog):
    train.run(tiny_run.options(tmp_path, max_train_steps=1))
    assert "memory: --" not in caplog.text


def test_a_run_that_was_killed_leaves_its_settings_until_it_ends(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=4, gradient_accumulation_steps=2, save_every_n_steps=2)
    cut_off(options, 3)
    begun = json.loads((tmp_path / "train.begun.json").read_text(encoding="utf-8"))
    assert execute(options) == 0
    report = json.loads((tmp_path / "train.report.json").read_text(encoding="utf-8"))
    for part in ("step", "settings", "versions", "inputs"):
        assert begun[part] == report[part]
    assert (begun["output_name"], begun["num_steps"]) == ("lora", 4)
    assert not (tmp_path / "train.begun.json").exists()
    (tmp_path / "train.begun.json").write_text("{}")  # as where the kill came between the last state and the report
    assert execute(options) == 0
    assert not (tmp_path / "train.begun.json").exists()


def test_the_report_of_a_finished_run_has_its_settings_and_validation(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=4, validation_items=1, keep_best=True)
    assert execute(options) == 0
    report = json.loads((tmp_path / "train.report.json").read_text(encoding="utf-8"))
    assert report["settings"]["learning_rate"] == options.learning_rate
    assert report["result"]["validation"][""]["num_items"] == 1
    assert (tmp_path / report["result"]["best"][""]["file"]).is_file()
    assert report["result"]["steps_this_run"] == 4
    assert report["timings"]["total_s"] > 0


def test_one_expert_after_the_other_in_one_folder_is_two_runs(tiny_run, experts, tmp_path):
    for name, steps in (("high", 2), ("low", 3), ("high", 4)):
        train.run(both(tiny_run, experts, tmp_path, experts=name, max_train_steps=steps))
    for name in ("high", "low"):
        assert (tmp_path / f"lora_{name}_noise.safetensors").is_file()
        assert checkpoint.newest(tmp_path / f"lora_{name}_noise-state") is not None
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [(line["expert"], line["step"]) for line in lines if "loss" in line]
    assert sorted(trained) == [("high_noise", n) for n in (1, 2, 3, 4)] + [("low_noise", n) for n in (1, 2, 3)]


def test_names_that_say_the_other_expert_are_warned_of(tiny_run, experts, tmp_path, caplog):
    swapped = both(tiny_run, experts, tmp_path, dit=experts["high"], dit_high_noise=experts["low"])
    train.run(replace(swapped, max_train_steps=2, high_noise_share=0.5))
    assert "--dit is wan2.2_t2v_high_noise_14B.safetensors: is it the high-noise expert?" in caplog.text
    assert "--dit_high_noise is wan2.2_t2v_low_noise_14B.safetensors" in caplog.text
    caplog.clear()
    train.run(both(tiny_run, experts, tmp_path / "right", max_train_steps=2, high_noise_share=0.5))
    assert "noise expert?" not in caplog.text


def test_musubi_tuners_way_to_train_the_high_noise_expert_alone_is_answered(tiny_run, experts, tmp_path):
    with pytest.raises(UsageError) as error:
        train.run(both(tiny_run, experts, tmp_path, dit=experts["high"], dit_high_noise=None))
    assert "give it to --dit_high_noise, with --experts high" in error.value.cure


@pytest.mark.parametrize("changes", [{"min_timestep": 875}, {"experts": "high"}])
def test_weights_of_the_high_noise_expert_in_the_other_flag_are_answered_whatever_they_are_called(
    tiny_run, experts, tmp_path, changes
):
    with pytest.raises(UsageError) as error:
        train.run(both(tiny_run, experts, tmp_path, dit_high_noise=None, **changes))
    assert "give its weights to --dit_high_noise, with --experts high" in error.value.cure


def test_of_timesteps_of_both_sides_one_expert_says_which_it_gets(tiny_run, experts, tmp_path, caplog):
    options = both(tiny_run, experts, tmp_path, experts="low", max_train_steps=1)
    train.run(replace(options, min_timestep=800, preserve_distribution_shape=True))
    assert "timesteps 800 to 875: " in caplog.text
    assert "the others from 800 to 1000 are the other expert's, and not trained" in caplog.text
    caplog.clear()
    train.run(replace(options, max_timestep=875, output_dir=tmp_path / "own"))
    assert "timesteps 0 to 875: " in caplog.text
    assert "other expert's" not in caplog.text


def test_an_expert_that_no_adapter_was_given_for_is_said_to_start_from_nothing(tiny_run, experts, tmp_path, caplog):
    train.run(both(tiny_run, experts, tmp_path / "low", experts="low", max_train_steps=1))
    assert "starts from nothing" not in caplog.text
    start = tmp_path / "low/lora_low_noise.safetensors"
    train.run(both(tiny_run, experts, tmp_path, network_weights=start, max_train_steps=2, high_noise_share=0.5))
    assert "the high-noise expert starts from nothing: its adapter would be --network_weights_high_noise" in caplog.text
    assert "the low-noise expert starts" not in caplog.text


def test_a_range_that_starves_an_expert_is_named(tiny_run, experts, tmp_path):
    with pytest.raises(UsageError, match="the low-noise expert would get none") as error:
        train.run(both(tiny_run, experts, tmp_path, min_timestep=900, max_train_steps=4))
    assert error.value.cure.startswith("give other --min_timestep and --max_timestep")
    narrowed = {"min_timestep": 100, "timestep_sampling": "sigmoid", "max_train_steps": 4}
    with pytest.raises(UsageError, match="the high-noise expert would get none") as error:
        train.run(both(tiny_run, experts, tmp_path, **narrowed))
    assert error.value.cure.startswith("give --high_noise_share")


def test_a_folder_that_is_no_state_is_answered_with_what_to_give(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=1)
    train.run(options)
    states = next(tmp_path.glob("*-state"))
    with pytest.raises(WangenError) as error:
        train.run(replace(options, output_dir=tmp_path / "other", resume=states))
    assert error.value.cure == "give one of the states in it: the newest is step-00000001"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "optimizer.bin").touch()
    with pytest.raises(WangenError) as error:
        train.run(replace(options, output_dir=tmp_path / "other", resume=tmp_path / "theirs"))
    assert "start from its LoRA with --network_weights" in error.value.cure


def test_an_adapter_that_is_not_used_or_is_the_other_experts_is_said(tiny_run, experts, tmp_path, caplog):
    train.run(both(tiny_run, experts, tmp_path / "low", experts="low", max_train_steps=1))
    start = tmp_path / "low/lora_low_noise.safetensors"
    high = both(tiny_run, experts, tmp_path / "high", experts="high", max_train_steps=1)
    train.run(replace(high, network_weights=start))
    assert "--network_weights is the low-noise expert's, which is not trained: it is not used" in caplog.text
    train.run(replace(high, output_dir=tmp_path / "other", network_weights_high_noise=start))
    assert f"--network_weights_high_noise {start} was trained for the low-noise expert" in caplog.text


def test_rows_of_a_validation_are_printed_at_the_end_of_the_run_alone(tiny_run, experts, tmp_path, caplog):
    options = both(tiny_run, experts, tmp_path, validation_items=1, max_train_steps=6, validate_every_n_steps=1)
    train.run(replace(options, high_noise_share=0.5))
    rows = [line for line in caplog.messages if "  t " in line]
    assert len(rows) == 2 * options.validation_timesteps


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network_dim": 8}, "this adapter has rank 4, and --network_dim is 8"),
        ({"network_module": "lokr"}, "this is a LoRA, and a LoKr is to be trained"),
    ],
)
def test_an_adapter_of_another_rank_or_kind_is_refused_before_the_model_loads(
    tiny_run, tmp_path, lora, changes, words, monkeypatch
):
    monkeypatch.setattr(train, "load_trainee", lambda *_words: pytest.fail("the model was loaded"))
    with pytest.raises(UsageError, match=words):
        train.run(tiny_run.options(tmp_path, network_weights=lora, **changes))


def test_more_blocks_to_swap_than_there_are_is_refused_before_the_model_loads(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "load_trainee", lambda *_words: pytest.fail("the model was loaded"))
    with pytest.raises(UsageError, match="only the 2 blocks that are recomputed") as error:
        train.run(tiny_run.options(tmp_path, blocks_to_swap=3))
    assert error.value.cure == "give 0 to 2"
    with pytest.raises(UsageError, match="only the 1 block that is recomputed"):
        train.run(tiny_run.options(tmp_path, blocks_to_swap=2, checkpointing_free_blocks=1))


def cut(state: Path) -> None:
    file = state / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def without_fingerprint(state: Path) -> None:
    file = state / checkpoint.MANIFEST
    manifest = json.loads(file.read_text(encoding="utf-8"))
    del manifest["fingerprint"], manifest["checksums"]
    file.write_text(json.dumps(manifest), encoding="utf-8")


def of_another_expert(state: Path) -> None:
    file = state / checkpoint.MANIFEST
    manifest = json.loads(file.read_text(encoding="utf-8"))
    manifest["experts"] = {"high_noise": manifest["experts"][""]}
    del manifest["checksums"]
    file.write_text(json.dumps(manifest), encoding="utf-8")


@pytest.mark.parametrize("spoil", [cut, without_fingerprint, of_another_expert])
def test_damaged_states_are_never_passed_over_without_a_word(tiny_run, tmp_path, caplog, spoil):
    options = tiny_run.options(tmp_path, max_train_steps=2, save_every_n_steps=1, save_state=True)
    train.run(options)
    first, last = sorted(state_folder(options).glob("step-*"))
    spoil(last)
    train.run(replace(options, max_train_steps=3))
    assert f"{last} is damaged" in caplog.text
    assert f"resuming at {1}" in caplog.text
    for state in state_folder(options).glob("step-*"):
        spoil(state)
    with pytest.raises(WangenError, match="these training states are damaged") as error:
        train.run(replace(options, max_train_steps=4))
    assert "--fresh" in error.value.cure
    assert first.is_dir(), "nothing was removed"
    train.run(replace(options, max_train_steps=4, fresh=True))


def test_a_full_memory_while_the_model_loads_is_one_message(tiny_run, tmp_path, monkeypatch):
    def full(*_words):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(train, "load_trainee", full)
    with pytest.raises(WangenError, match="out of memory loading the model") as error:
        train.run(tiny_run.options(tmp_path))
    assert "--quantize int8" in error.value.cure


def test_a_full_memory_in_a_validation_is_one_message_and_the_logs_of_an_earlier_run_stay_until_then(
    tiny_run, tmp_path, monkeypatch
):
    options = tiny_run.options(tmp_path, max_train_steps=1)
    train.run(options)
    before = (tmp_path / "metrics.jsonl").read_text()

    def full(*_words):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(train, "load_trainee", full)
        with pytest.raises(WangenError, match="out of memory loading the model"):
            train.run(replace(options, fresh=True))
    assert (tmp_path / "metrics.jsonl").read_text() == before
    monkeypatch.setattr(train.Watching, "look", full)
    with pytest.raises(WangenError, match="out of memory validating or sampling"):
        train.run(replace(options, fresh=True))


def test_a_trace_is_named_for_the_steps_that_it_has(tmp_path, caplog):
    with profiled(tmp_path / "short") as next_step:
        next_step()
        next_step()
    assert not (tmp_path / "short/trace").exists()
    assert "the run ended before step 3" in caplog.text
    for start in (0, 6):
        with profiled(tmp_path / "longer", start) as next_step:
            for _ in range(4):
                next_step()
    assert "trace of steps 3 to 4" in caplog.text
    assert sorted(path.name for path in tmp_path.glob("longer/trace/*")) == ["steps-3-4.json.gz", "steps-9-10.json.gz"]


@pytest.mark.parametrize("folder", ["a file", "under a file"])
def test_an_output_folder_that_cannot_be_made_is_one_message_and_exit_1(tiny_run, tmp_path, capsys, folder):
    (tmp_path / "file").write_text("x")
    place = tmp_path / ("file" if folder == "a file" else "file/out")
    assert execute(tiny_run.options(place)) == 1
    said = capsys.readouterr().err
    assert "cannot make the folder" in said
    assert "Traceback" not in said


def test_a_state_of_before_a_flag_was_there_goes_on_with_its_default(tiny_run, tmp_path):
    options = tiny_run.options(tmp_path, max_train_steps=1)
    train.run(options)
    (state,) = state_folder(options).glob("step-*")
    manifest = json.loads((state / checkpoint.MANIFEST).read_text(encoding="utf-8"))
    del manifest["fingerprint"]["noise_offset"], manifest["checksums"]
    (state / checkpoint.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(WangenError, match=r"noise_offset: 0\.0 -> 0\.1"):
        train.run(replace(options, max_train_steps=2, noise_offset=0.1))
    assert train.run(replace(options, max_train_steps=2)).counts["steps"] == 2


def test_the_only_item_cannot_be_held_out(tiny_run, tmp_path):
    with pytest.raises(UsageError, match="leaves nothing of 3 items") as error:
        train.run(tiny_run.options(tmp_path, validation_items=3))
    assert "--validation_config" in error.value.cure


def test_validating_on_what_is_trained_on_is_said(tiny_run, tmp_path, caplog):
    train.run(tiny_run.options(tmp_path, max_train_steps=1, validation_config=tiny_run.dataset_config))
    assert (
        "--validation_config has 3 items that are trained on as well, so that is no held-out loss: blue.png"
        in caplog.text
    )


def test_a_learning_rate_among_the_optimizers_arguments_is_answered_with_its_flag(tiny_run, tmp_path):
    with pytest.raises(UsageError) as error:
        train.run(tiny_run.options(tmp_path, optimizer_args=("lr=1",)))
    assert error.value.cure == "give --learning_rate"
