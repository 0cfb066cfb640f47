"""What processes that train together have to decide alike, or they would wait for each other for ever."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import together as forked
import torch
from parity import VAE22
from test_together import losses
from tiny import TinyRun
from together import together, trained
from train_cases import TI2V, make_cases, make_ti2v

from wangen import profiles
from wangen.generator.errors import WRONG_USAGE, UsageError, WangenError
from wangen.generator.launch import Launch
from wangen.generator.memory import memory_plan, memory_settings
from wangen.generator.steps import Train
from wangen.runtime.training import loading, parallel, ranks
from wangen.runtime.training.plan import Plan

BIG = profiles.model("t2v-14B")


class Told(ranks.Ranks):
    """The first process, which is told what all of them say."""

    def __init__(self, launch: Launch, *answers: list[Any]) -> None:
        super().__init__(launch)
        self.answers, self.meetings = list(answers), 0

    def gathered(self, _value: Any) -> list[Any]:
        return self.answers.pop(0)

    def meet(self) -> None:
        self.meetings += 1


@pytest.mark.slow
def test_a_given_frame_of_one_process_lets_none_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a picture no frame is given, so one process could pack where the other cannot, and would gather once."""
    monkeypatch.setattr(forked, "TIMEOUT_S", 60.0)
    cases = make_ti2v(tmp_path / "set")
    options = cases.options(
        tmp_path / "parts", dataset_config=cases.config("single", TI2V.replace("batch_size = 2", "batch_size = 1")),
        task="ti2v-5B",
        condition_frames=1, condition_dropout=0.5, pack=True, parallel="fsdp", gradient_accumulation_steps=2,
        max_train_steps=6,
    )  # fmt: skip
    trained(options, 2)
    one = replace(options, output_dir=tmp_path / "one", parallel="auto", gradient_accumulation_steps=4)
    trained(one, 1)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


@pytest.mark.slow
def test_what_is_dropped_of_a_packed_step_is_the_same_where_one_process_has_a_batch_less(tmp_path: Path):
    """An epoch of five batches for two processes: what is there for the other's sake alone is part of no sequence."""
    cases = make_cases(tmp_path / "set")
    for way in ("ddp", "fsdp"):
        options = cases.options(tmp_path / way, parallel=way, gradient_accumulation_steps=4, max_train_steps=2,
                                pack=True, network_dropout=0.3)  # fmt: skip
        trained(options, 2)
    assert losses(tmp_path / "fsdp") == losses(tmp_path / "ddp")
    assert (tmp_path / "fsdp/lora.safetensors").read_bytes() == (tmp_path / "ddp/lora.safetensors").read_bytes()


@pytest.mark.slow
def test_samples_of_the_first_alone_keep_all_at_the_same_step(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """At steps where nothing is saved, judged or ends an epoch: only the first knows of the prompts."""
    monkeypatch.setattr(forked, "TIMEOUT_S", 60.0)
    prompts, config = tmp_path / "prompts.txt", tmp_path / "more.toml"
    prompts.write_text("a red square --w 32 --h 32 --f 1 --s 2\n", encoding="utf-8")
    text = tiny_run.dataset_config.read_text(encoding="utf-8")
    config.write_text(text.replace("[[datasets]]", "[[datasets]]\nnum_repeats = 4", 1), encoding="utf-8")
    options = tiny_run.options(tmp_path / "out", dataset_config=config, max_train_steps=4, sample_every_n_steps=1,
                               sample_prompts=prompts, vae=tiny_run.weights["vae"],
                               t5=tiny_run.weights["t5"])  # fmt: skip
    trained(options, 2)
    assert len(losses(tmp_path / "out")) == 4
    assert len(list((tmp_path / "out" / "samples").glob("*.png"))) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("way", "train_mode"), [("ddp", "lora"), ("fsdp", "lora"), ("fsdp", "full")])
def test_continuations_are_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, train_mode: str
):
    """The first process alone makes them, or all go along where each holds a part of the weights."""
    monkeypatch.setattr(forked, "TIMEOUT_S", 120.0)
    options = make_ti2v(tmp_path / "set").options(
        tmp_path / "two", task="ti2v-5B", condition_frames=5, validation_items=1, validation_timesteps=1,
        sample_continuations=1, continuation_steps=2, continuation_guidance=2.0, vae=VAE22, vae_dtype="float32",
        sample_every_n_steps=1, max_train_steps=3, learning_rate=1e-4, parallel=way, train_mode=train_mode,
    )  # fmt: skip
    trained(options, 2)
    one = replace(options, output_dir=tmp_path / "one", parallel="auto", gradient_accumulation_steps=2)
    trained(one, 1)
    found, wanted = (continued(folder) for folder in (tmp_path / "two", tmp_path / "one"))
    assert len(found) == len(wanted) == 3
    assert found == [pytest.approx(numbers, abs=0.01) for numbers in wanted]
    assert len(list((tmp_path / "two" / "samples").glob("*-continuation-1.mp4"))) == 3


def continued(folder: Path) -> list[list[float]]:
    """PSNR and SSIM of every continued frame, for each time."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clips = [line["continuations"]["clips"] for line in lines if "continuations" in line]
    return [[number for clip in one for values in clip["model"].values() for number in values] for one in clips]


@pytest.mark.slow
def test_another_number_of_processes_is_told_how_to_make_the_same_steps(tiny_run: TinyRun, tmp_path: Path):
    options = tiny_run.options(tmp_path, max_train_steps=2, gradient_accumulation_steps=4)
    trained(options, 1)
    less = together(replace(options, gradient_accumulation_steps=2), 1)
    assert less.codes == [WRONG_USAGE]
    assert "--gradient_accumulation_steps 4 with 1 process makes steps of 4 batches" in less.told
    two = replace(options, max_train_steps=3)
    done = together(two, 2)
    assert done.codes == [WRONG_USAGE] * 2
    assert "--gradient_accumulation_steps 2 with 2 processes makes steps of 4 batches" in done.told
    trained(replace(two, gradient_accumulation_steps=2), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "named"), [
    ({"parallel": "fsdp"}, {"parallel": "ddp"}, "samples or settings that differ from those of process 0: parallel\n"),
    ({"parallel": "fsdp", "sample_prompts": "prompts.txt"}, {"parallel": "fsdp"},
     "samples or settings that differ from those of process 0: --sample_prompts\n"),
    ({}, {"output_dir": "elsewhere"}, "sees output folders that differ from those of process 0: --output_dir\n"),
])  # fmt: skip
def test_lines_that_would_wait_for_each_other_for_ever_are_refused(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first, second, named
):
    monkeypatch.setattr(forked, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(ranks, "SEEN_S", 1.0)
    (tmp_path / "prompts.txt").write_text("a red square --w 32 --h 32 --f 1 --s 2\n", encoding="utf-8")

    def line(changes):
        places = {name: tmp_path / value for name, value in changes.items() if name != "parallel"}
        return replace(tiny_run.options(tmp_path / "out", max_train_steps=2, vae=tiny_run.weights["vae"],
                                        t5=tiny_run.weights["t5"]), **{**changes, **places})  # fmt: skip

    done = together(line(first), 2, others=line(second))
    assert done.codes == [WRONG_USAGE] * 2
    assert named in done.told
    assert "Traceback" not in done.told
    assert not list((tmp_path / "out").glob(".shared-*"))


def test_machines_of_different_size_share_no_parts_within_each(tiny_run: TinyRun, tmp_path: Path):
    done = together(tiny_run.options(tmp_path, parallel="hsdp"), 3, on_each_machine=2)
    assert done.codes == [WRONG_USAGE] * 3
    assert "these have 1 and 2 processes" in done.told
    assert "give --parallel fsdp" in done.told


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "way"), [(2, "fsdp"), (3, "fsdp"), (4, "hsdp")])
def test_the_fullest_card_decides_how_all_hold_the_model(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, way: str
):
    """Of two machines; the last of which may have one card less."""
    monkeypatch.setattr(forked, "TIMEOUT_S", 60.0)
    alike = tiny_run.options(tmp_path / "alike")
    trained(alike, processes)
    monkeypatch.setattr(parallel, "free_bytes", lambda _device: 1 if os.environ["RANK"] == "1" else 2**40)
    on_each = 2 if processes > 2 else 0
    told = trained(replace(alike, output_dir=tmp_path / "auto"), processes, on_each_machine=on_each)
    assert f"--parallel auto: {way}" in told
    assert losses(tmp_path / "auto") == losses(tmp_path / "alike")
    none = replace(alike, output_dir=tmp_path / "none", checkpointing="none")
    refused = together(none, processes, on_each_machine=on_each)
    assert refused.codes == [WRONG_USAGE] * processes
    assert "in parts it does not go together with --checkpointing none" in refused.told


def test_weights_are_shared_out_where_the_card_with_least_free_holds_no_whole_copy():
    options = Train(output_dir=Path("o"), output_name="n", task="t2v-14B", checkpointing="full", parallel="auto")

    picture = SimpleNamespace(size=(832, 480), count=1, controls=[], entry=SimpleNamespace(batch_size=1))

    def way(local: list[int], free: list[int | None], **changes: Any) -> str:
        samples: Any = [SimpleNamespace(sample=picture)]
        plan = Plan(replace(options, **changes), BIG, samples, [], 1, (), {})
        told = Told(Launch(count=4, local_count=local[0]), local, free)
        return parallel.chosen_way(plan, told, torch.device("cpu"))  # type: ignore[arg-type]

    once, twice = (memory_plan(BIG, memory_settings(options), tokens=1560 * times).device for times in (1, 2))
    assert way([2] * 4, [once] * 4) == "ddp"
    assert way([2] * 4, [2 * once, once, once - 1, once]) == "hsdp"
    assert way([4] * 4, [once - 1] * 4) == way([3, 3, 3, 1], [once - 1] * 4) == "fsdp", "machines are not alike"
    assert way([2] * 4, [None, 1, 1, 1]) == "ddp", "of one card nothing is known"
    assert way([2] * 4, [twice] * 4, pack=True, gradient_accumulation_steps=8) == "ddp", "each packs two of the eight"
    assert way([2] * 4, [twice - 1] * 4, pack=True, gradient_accumulation_steps=8) == "hsdp"
    assert way([2] * 4, [1] * 4, blocks_to_swap=1) == way([2] * 4, [1] * 4, plain=True) == "ddp"
    with pytest.raises(UsageError, match="these have 1 and 3 processes"):
        way([3, 3, 3, 1], [1] * 4, parallel="hsdp")
    parallel.require_parallel(replace(options, parallel="hsdp"), Launch(count=2, local_count=1))
    with pytest.raises(UsageError, match="within each machine, and this is one"):
        parallel.require_parallel(replace(options, parallel="hsdp"), Launch(count=2, local_count=2))


def test_the_processes_of_this_machine_read_in_turns_what_its_memory_cannot_hold_at_once(tmp_path, monkeypatch):
    dit = tmp_path / "dit.safetensors"
    dit.write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    experts = [SimpleNamespace(dit=dit, flag="--dit")]

    def is_crowded(available: int, **changes: Any) -> bool:
        options = SimpleNamespace(**{"train_mode": "lora", "base_weights": (), **changes})
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available))
        plan = SimpleNamespace(experts=experts, options=options)
        return loading.is_crowded(plan, Launch(count=4, local_count=2))  # type: ignore[arg-type]

    wide = {"train_mode": "full", "base_weights": (dit,)}
    assert [is_crowded(size) for size in (19, 20)] == [True, False]
    assert [is_crowded(size, **wide) for size in (39, 40)] == [True, False], "in float32 where LoRAs are merged"
    first = Told(Launch(count=4, local_count=1), [1, 3, 3, 3])
    with first.one_at_a_time():
        assert first.meetings == 0
    assert first.meetings == 3, "as many turns as the largest machine needs"


def test_what_one_process_alone_has_differs_from_the_others():
    for other in ({"a": 1}, {"a": 1, "b": 3}, {"a": 1, "b": 2, "c": 0}):
        names = "c" if "c" in other else "b"
        with pytest.raises(WangenError, match=f"process 1 of 2 sees settings that differ .* process 0: {names}\n"):
            Told(Launch(count=2), [{"a": 1, "b": 2}, other]).require_same("settings", {})
