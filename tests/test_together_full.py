"""Full fine-tuning with weights in parts: against one process, its states, and what breaks it off."""

import errno
import json
import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from edit_set import make_edit_set
from safetensors.torch import load_file
from test_together import held_out, kill_rank, losses, started, torchrun
from tiny import TinyRun
from together import together, trained
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from train_cases import EXPERTS, make_cases, make_ti2v

from wangen.generator.errors import WangenError
from wangen.generator.steps import Train
from wangen.runtime import communication, train
from wangen.runtime.communication import CommunicationTime
from wangen.runtime.memory.swap import BlockSwap
from wangen.runtime.models import wan
from wangen.runtime.models.compute import Compute
from wangen.runtime.training import checkpoint, sampling
from wangen.runtime.training.full import trainable_parameters
from wangen.runtime.training.optim import Optimization
from wangen.runtime.training.sharded import ShardedWeights
from wangen.runtime.training.sharded_state import read

CPU = torch.device("cpu")
WHOLE: dict[str, Any] = {"train_mode": "full", "learning_rate": 1e-4}
LOOKED_AT: dict[str, Any] = {"ema_decay": 0.9, "validation_items": 1, "validate_every_n_steps": 2}


def bytes_of(folder: Path) -> dict[str, bytes]:
    """The trained files."""
    found = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert found, folder
    return found


def require_close(folder: Path, other: Path, steps: int) -> None:
    """Losses, held-out losses and all weights are the same but for rounding."""
    assert len(losses(folder)) == steps
    assert losses(folder) == pytest.approx(losses(other), abs=1e-5)
    assert held_out(folder) == pytest.approx(held_out(other), abs=1e-5)
    names = [path.name for path in other.glob("*.safetensors")]
    assert sorted(names) == sorted(path.name for path in folder.glob("*.safetensors"))
    for name in names:
        found, wanted = load_file(folder / name), load_file(other / name)
        assert found.keys() == wanted.keys()
        assert max(float((found[key] - wanted[key]).abs().max()) for key in wanted) < 1e-5


def in_one(options: Train, folder: Path, processes: int) -> Path:
    """Train in one process what so many would, and return the folder."""
    trained(replace(options, output_dir=folder, parallel="auto", gradient_accumulation_steps=processes), 1)
    return folder


# ---- the numbers -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "changes"), [
    (2, {**LOOKED_AT, "checkpointing": "selective", "gradient_checkpointing_cpu_offload": True, "keep_best": True,
         "compile": True}),
    (3, {"checkpointing_free_blocks": 1, "pack": True}),
    (4, {"save_every_n_steps": 3}),
])  # fmt: skip
def test_weights_in_parts_train_what_one_process_does(
    tiny_run: TinyRun, tmp_path: Path, processes: int, changes: dict[str, Any]
):
    """Three processes cannot split every matrix evenly; four have more processes than a step has batches."""
    options = tiny_run.options(tmp_path / "parts", parallel="fsdp", **WHOLE, **changes)
    told = trained(options, processes)
    assert told.count("the optimizer's state are in parts") == 1
    require_close(tmp_path / "parts", in_one(options, tmp_path / "alone", processes), 6)


@pytest.mark.slow
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_without_clipping_two_processes_leave_the_bytes_of_data_parallel(
    tiny_run: TinyRun, tmp_path: Path, mixed_precision: str
):
    """The norm of the gradient, which clips, is the one number that is added up in another order."""
    options = tiny_run.options(tmp_path / "ddp", max_grad_norm=0.0, mixed_precision=mixed_precision, **WHOLE,
                               **LOOKED_AT)  # fmt: skip
    trained(options, 2)
    trained(replace(options, output_dir=tmp_path / "fsdp", parallel="fsdp"), 2)
    assert losses(tmp_path / "fsdp") == losses(tmp_path / "ddp")
    assert held_out(tmp_path / "fsdp") == held_out(tmp_path / "ddp")
    assert bytes_of(tmp_path / "fsdp") == bytes_of(tmp_path / "ddp")


@pytest.mark.slow
def test_two_machines_that_are_copies_of_each_other(tiny_run: TinyRun, tmp_path: Path):
    """Of two processes each; samples are made on the way."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red square --w 32 --h 32 --f 1 --s 2\n", encoding="utf-8")
    more = {"sample_prompts": prompts, "vae": tiny_run.weights["vae"], "t5": tiny_run.weights["t5"]}
    options = tiny_run.options(tmp_path / "hsdp", parallel="hsdp", **WHOLE, **LOOKED_AT, **more)
    trained(options, 4, on_each_machine=2)
    require_close(tmp_path / "hsdp", in_one(options, tmp_path / "alone", 4), 6)
    assert (tmp_path / "hsdp" / "samples" / "lora-step00000006-1.png").is_file()


@pytest.mark.slow
def test_machines_add_up_once_a_step_however_many_passes_it_has(tiny_run: TinyRun, tmp_path: Path):
    """Two machines of one process each, three passes in a step of each."""
    text = tiny_run.dataset_config.read_text(encoding="utf-8")
    more = tmp_path / "more.toml"
    more.write_text(text.replace("enable_bucket = true", "enable_bucket = true\nnum_repeats = 4"), encoding="utf-8")
    options = tiny_run.options(tmp_path / "hsdp", dataset_config=more, parallel="hsdp", gradient_accumulation_steps=3,
                               max_train_steps=3, **WHOLE)  # fmt: skip
    told = trained(options, 2, on_each_machine=1)
    assert "2 processes share the 6 batches of each step" in told
    require_close(tmp_path / "hsdp", in_one(options, tmp_path / "alone", 6), 3)


def edits(tmp_path: Path, request: pytest.FixtureRequest) -> Train:
    made = make_edit_set(tmp_path / "set", request.getfixturevalue("tiny_qwen"), task="qwen-image-edit").fill()
    return made.train(tmp_path / "parts", max_train_steps=3)


def experts(tmp_path: Path, _request: pytest.FixtureRequest) -> Train:
    return make_cases(tmp_path / "set").options(tmp_path / "parts", **EXPERTS)


def given_frames(tmp_path: Path, _request: pytest.FixtureRequest) -> Train:
    return make_ti2v(tmp_path / "set").options(tmp_path / "parts", task="ti2v-5B", condition_frames=1)


@pytest.mark.slow
@pytest.mark.parametrize("make", [edits, experts, given_frames])
def test_every_kind_of_model_is_trained_in_parts(
    tmp_path: Path, request: pytest.FixtureRequest, make: Callable[[Path, pytest.FixtureRequest], Train]
):
    """Qwen-Image-Edit, the two experts of A14B, and TI2V-5B with clean first frames."""
    options = replace(make(tmp_path, request), parallel="fsdp", **WHOLE)
    trained(options, 2)
    require_close(tmp_path / "parts", in_one(options, tmp_path / "alone", 2), options.max_train_steps)


@pytest.mark.slow
@pytest.mark.parametrize("crowded", [False, True])
def test_where_the_memory_cannot_hold_all_copies_they_load_in_turns(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, crowded: bool
):
    """Also one of a machine that has less memory than the other."""
    real = train.load_trainee

    def slowly(*words: Any) -> Any:
        with (tmp_path / f"{os.environ['RANK']}.txt").open("a") as file:
            file.write(f"{time.monotonic()}\n")
            time.sleep(0.5)
            file.write(f"{time.monotonic()}\n")
        return real(*words)

    monkeypatch.setattr(train, "load_trainee", slowly)
    few = SimpleNamespace(available=1)
    whole = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: few if crowded and os.environ["RANK"] == "2" else whole)
    options = tiny_run.options(tmp_path / "out", parallel="fsdp", max_train_steps=1, **WHOLE)
    trained(options, 3)
    times = [list(map(float, (tmp_path / f"{rank}.txt").read_text().split())) for rank in range(3)]
    in_turns = all(before[1] <= after[0] for before, after in pairwise(times))
    assert in_turns == crowded


@pytest.mark.slow
def test_a_sample_that_one_process_cannot_make_ends_all_with_a_reason(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = sampling.sample_latents

    def fails(*words: Any, **named: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise WangenError("out of memory", cure="make them smaller")
        return real(*words, **named)

    monkeypatch.setattr(sampling, "sample_latents", fails)
    monkeypatch.setattr(communication, "GRACE_S", 0.5)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red square --w 32 --h 32 --f 1 --s 2\n", encoding="utf-8")
    options = tiny_run.options(tmp_path / "out", parallel="fsdp", max_train_steps=4, save_state_every_n_steps=1,
                               sample_prompts=prompts, vae=tiny_run.weights["vae"], t5=tiny_run.weights["t5"],
                               sample_every_n_steps=2, **WHOLE)  # fmt: skip
    done = together(options, 2)
    assert done.codes == [1, 1], done.told
    assert "out of memory" in done.told
    assert "Traceback" not in done.told
    assert checkpoint.newest(tmp_path / "out" / "lora-state") == tmp_path / "out" / "lora-state" / "step-00000001"


# ---- states ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True])
def test_a_killed_run_ends_with_the_bytes_of_one_that_was_not(tiny_run: TinyRun, tmp_path: Path, *, async_save: bool):
    options = tiny_run.options(tmp_path / "whole", parallel="fsdp", max_train_steps=15, save_state_every_n_steps=3,
                               async_save=async_save, save_state_every_n_minutes=60.0, ema_decay=0.9,
                               **WHOLE)  # fmt: skip
    trained(options, 2)
    broken = replace(options, output_dir=tmp_path / "broken")
    launcher = started(torchrun(broken, 2, "--max-restarts", "2"), broken.output_dir, 9)
    kill_rank(launcher, 1, signal.SIGKILL)
    _, told = launcher.communicate(timeout=180)
    assert launcher.returncode == 0, told
    assert "resuming at" in told
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "broken")
    assert not list((tmp_path / "broken" / "lora-state").glob(".staging-*"))


@pytest.mark.slow
def test_a_state_goes_on_in_any_number_of_processes(tiny_run: TinyRun, tmp_path: Path):
    options = tiny_run.options(tmp_path / "begun", parallel="fsdp", max_train_steps=3, ema_decay=0.9, **WHOLE)
    trained(replace(options, gradient_accumulation_steps=2), 2)
    (state,) = (tmp_path / "begun" / "lora-state").glob("step-*")
    files = [f"__{rank}_0.distcp{of}" for rank in range(2) for of in ("", ".crc32")]
    assert sorted(path.name for path in (state / "parts").iterdir()) == [".metadata", *files]
    more = replace(options, max_train_steps=6, resume=state)
    whole = in_one(replace(more, resume=None), tmp_path / "whole", 4)
    told = trained(replace(more, output_dir=tmp_path / "four"), 4)
    assert "resuming at 3" in told
    one = in_one(replace(more, output_dir=tmp_path / "one"), tmp_path / "one", 4)
    copies = replace(more, output_dir=tmp_path / "copies", parallel="ddp", gradient_accumulation_steps=2)
    trained(copies, 2)
    for folder in (tmp_path / "four", one, copies.output_dir):
        assert losses(folder) == pytest.approx(losses(whole)[3:], abs=1e-5)
        found, wanted = load_file(folder / "lora-ema.safetensors"), load_file(whole / "lora-ema.safetensors")
        assert max(float((found[key] - wanted[key]).abs().max()) for key in wanted) < 1e-5
    # And the other way: what one process saved goes on in parts; the finished run is saved anew in another precision.
    (state,) = (one / "lora-state").glob("step-*")
    parts = replace(more, output_dir=tmp_path / "back", resume=state, max_train_steps=7, gradient_accumulation_steps=2)
    assert "resuming at 6" in trained(parts, 2)
    before = load_file(tmp_path / "back" / "lora.safetensors")
    told = trained(replace(parts, resume=None, save_precision="bfloat16"), 2)
    assert "already trained, 7 steps" in told
    after = load_file(tmp_path / "back" / "lora.safetensors")
    assert all(torch.equal(value.bfloat16(), after[name]) for name, value in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk_of_one_process_ends_all_and_keeps_the_last_state(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, async_save: bool
):
    real, written = FileSystemWriter.write_data, []

    def fails(self: FileSystemWriter, *words: Any) -> Any:
        written.append(1)
        if os.environ["RANK"] == "1" and len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, *words)

    monkeypatch.setattr(FileSystemWriter, "write_data", fails)
    monkeypatch.setattr(communication, "GRACE_S", 0.5)
    options = tiny_run.options(tmp_path / "out", parallel="fsdp", save_state_every_n_steps=1, async_save=async_save,
                               **WHOLE)  # fmt: skip
    done = together(options, 2)
    assert done.codes == [1, 1], done.told
    assert "cannot save the training state: process 1: [Errno 28] No space left on device" in done.told
    assert "Traceback" not in done.told
    states = tmp_path / "out" / "lora-state"
    assert checkpoint.newest(states) == states / "step-00000002"


# ---- one process, whose part is the whole ------------------------------------------------------------------------


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def transformer_of(tiny_run: TinyRun) -> Any:
    return wan.load_transformer(tiny_run.weights["dit"], dtype=None, device="cpu")


def test_gradients_gather_in_the_parts_and_outside_the_blocks(tiny_run: TinyRun, tmp_path: Path, mesh):
    """Two passes of a step give what the transformer's own backward pass gives."""
    options = tiny_run.options(tmp_path, **WHOLE)
    weights = ShardedWeights(transformer_of(tiny_run), mesh, CPU, CommunicationTime(), torch.float32)
    optimization = Optimization(options, weights.parameters, weights)
    whole = transformer_of(tiny_run)
    wanted = Optimization(options, trainable_parameters(whole))
    split = wan.velocity_model(weights.transformer, Compute(), device=CPU, dtype=torch.float32, swap=weights)
    models = weights.gathering(split), wan.velocity_model(whole, Compute(), device=CPU, dtype=torch.float32)
    BlockSwap(weights.transformer, 0, CPU)  # as a run does it: moving a module keeps the parts where they are
    generator = torch.Generator().manual_seed(0)
    latents = [torch.randn(1, 16, 1, 8, 8, generator=generator) for _ in range(2)]
    text = [torch.randn(3, whole.config.text_dim, generator=generator)]
    for model in models:
        for one in latents:
            model(one, torch.tensor([500.0]), text).square().mean().backward()
    weights.add_up()
    found, right = (each.flat.views(each.flat.gradients) for each in (optimization, wanted))
    assert found.keys() == right.keys()
    assert len(weights.names) > len(found) / 3
    assert all(bool(right[name].any()) for name in weights.names)
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
    assert float(optimization.clip(0.1)) == pytest.approx(float(wanted.clip(0.1)), rel=1e-5)
    optimization.step(1.0)
    wanted.step(1.0)
    gathered = dict(weights.gathered(weights.parameters))
    for name, value in wanted.flat.parameters.items():
        torch.testing.assert_close(gathered[name], value.detach(), rtol=0, atol=2e-5)
        assert torch.equal(weights.own(name, gathered[name]), weights.parameters[name])


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("read",)


class _Reaching:
    def __reduce__(self) -> Any:
        return getattr, (torch.Size, "__init__")


def test_a_damaged_or_hostile_index_is_refused(tiny_run: TinyRun, tmp_path: Path, capsys):
    """Its state is then one more that cannot be read; what it names is never called."""
    state = tmp_path / "lora-state" / "step-00000001"
    (state / "parts").mkdir(parents=True)
    index = state / "parts" / ".metadata"
    bad = {pickle.dumps(_Evil()): "it names builtins.print", pickle.dumps(_Reaching()): "it asks for __init__ of",
           b"x": "damaged", b"": "damaged"}  # fmt: skip
    for content, found in bad.items():
        index.write_bytes(content)
        manifest = {
            "format": checkpoint.FORMAT, "step": 1, "in_parts": True, "keep": False, "fingerprint": {}, "facts": {},
            "experts": {"": {"step": 1, "numbers": {}, "ema_updates": 0}},
            "files": {"parts/.metadata": len(content)},
        }  # fmt: skip
        (state / checkpoint.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        newest = checkpoint.newest(state.parent)
        assert newest == state
        with pytest.raises(WangenError, match=found) as caught:
            read(checkpoint.read(newest).experts[""], "", None)
        assert caught.value.where == str(state)
    assert "read" not in capsys.readouterr().out
    index.unlink()
    assert checkpoint.newest(state.parent) is None


@pytest.mark.slow
def test_what_goes_on_writing_is_said_by_a_flag(tiny_run: TinyRun, tmp_path: Path):
    """`--async_save` changes nothing of a run whose weights are whole."""
    options = tiny_run.options(tmp_path / "one", max_train_steps=2, save_state_every_n_steps=1)
    train.run(options)
    train.run(replace(options, output_dir=tmp_path / "two", async_save=True))
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
