"""The work of a step against torch's own counter and against the published table; rates; one trace."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from wangen import profiles
from wangen.generator.cards import CARDS, peak_of_card
from wangen.generator.flops import NOTHING, StepFlops, forward_flops, step_flops
from wangen.generator.steps import Train
from wangen.profiles import TransformerSizes
from wangen.runtime.communication import CommunicationTime
from wangen.runtime.training.throughput import (
    Throughput,
    in_words,
    peak_memory_bytes,
    peak_tflops,
    profiled,
    sizes_of,
)
from wangen.runtime.training.watching import Watching

SIZES = TransformerSizes(dim=256, ffn_dim=1024, num_layers=3, num_heads=2, in_channels=16, out_channels=16)


def test_a_forward_pass_is_what_torch_counts_on_a_real_transformer():
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=128, ffn_dim=1024, num_layers=3, text_dim=64, in_channels=16,
            out_channels=16,
        )  # fmt: skip
        tokens = 2 * 24 * 24
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(
                hidden_states=torch.randn(1, 16, 2, 48, 48), timestep=torch.ones(1),
                encoder_hidden_states=torch.randn(1, 512, 64),
            )  # fmt: skip
    assert sizes_of(model.config) == SIZES
    outside = sum(
        2 * rows * a * b
        for rows, a, b in [(tokens, 64, 256), (tokens, 256, 64), (512, 64, 256), (512, 256, 256), (1, 256, 7 * 256)]
    )
    counted = counter.get_total_flops()
    assert sum(forward_flops(SIZES, tokens)) == pytest.approx(counted - outside, rel=2e-3)


# The published table: PFLOP of a step with and without full checkpointing, rank 32 on q, k, v, o
@pytest.mark.parametrize(
    ("task", "tokens", "none", "full", "selective"),
    [
        ("t2v-1.3B", 32760, 0.871, 1.155, 0.954),
        ("t2v-14B", 32760, 4.709, 6.393, 5.50),
        ("ti2v-5B", 27280, 1.458, 1.977, 1.70),
    ],
)
def test_a_step_is_the_published_table(task, tokens, none, full, selective):
    sizes = profiles.model(task).transformer
    adapter = sizes.num_layers * 8 * 32 * 2 * sizes.dim
    for mode, expected in (("none", none), ("full", full), ("selective", selective)):
        flops = step_flops(sizes, tokens, adapter_weights=adapter, checkpointing=mode)
        assert flops.done / 1e15 == pytest.approx(expected, rel=0.02), mode
        assert flops.model / 1e15 == pytest.approx(none, rel=0.02)


def test_free_blocks_compute_nothing_again_and_a_trained_base_needs_its_own_gradients():
    full, free = (step_flops(SIZES, 512, free_blocks=n) for n in (0, 3))
    assert free.done == free.model == full.model < full.done
    linear, texts, attention = forward_flops(SIZES, 512)
    trained = step_flops(SIZES, 512, checkpointing="none", train_base=True)
    assert trained.done == 3 * (linear + texts) + 3.5 * attention


def test_cards_are_known_by_name_and_laptops_are_not_taken_for_desktops():
    assert peak_of_card("NVIDIA H100 80GB HBM3") == 989
    assert peak_of_card("NVIDIA H100 PCIe") == 756
    assert peak_of_card("NVIDIA A100-SXM4-80GB") == 312
    assert peak_of_card("NVIDIA GeForce RTX 3090 Ti") == 80
    assert peak_of_card("NVIDIA L40S") == 362
    assert peak_of_card("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert peak_of_card("NVIDIA GeForce GTX 1080") is None
    assert peak_of_card("NVIDIA GeForce RTX 3080") == 59.5
    for variant in ("RTX 3090 D", "RTX 4090 D", "RTX 5080 SUPER"):
        assert peak_of_card(f"NVIDIA GeForce {variant}") is None
    assert all(peak_of_card(f"NVIDIA {name}") == card.tflops for name, card in CARDS.items())


def test_a_cpu_has_no_peak_unless_it_is_told():
    assert peak_tflops(torch.device("cpu")) is None
    assert peak_tflops(torch.device("cpu"), 2.5) == 2.5


def test_the_work_of_a_step_is_that_of_each_of_its_items():
    """Attention's work is no mean of sizes: of a clip and three pictures it would be half."""
    options = Train(dataset_config=Path("d"), dit=Path("d"), output_dir=Path("o"), output_name="o", task="t2v-1.3B",
                    learning_rate=1e-4, checkpointing="full")  # fmt: skip
    watching = SimpleNamespace(_sizes={"": (SIZES, 0)}, _options=options, _is_joint=False)
    sizes, texts = [32760, 256, 256, 1024], [60, 10, 10, 512]
    result = SimpleNamespace(expert="", names=list("abcd"), tokens=sizes, text_tokens=texts, image_tokens=0)
    work = Watching._work(watching, result)  # type: ignore[arg-type]
    each = [step_flops(SIZES, n, text_tokens=rows, whole_blocks=False) for n, rows in zip(sizes, texts, strict=True)]
    assert work.model == pytest.approx(sum(one.model for one in each))
    assert work.done == pytest.approx(sum(one.done for one in each))
    nobody = SimpleNamespace(expert="", names=[], tokens=[], text_tokens=[], image_tokens=0)
    assert Watching._work(watching, nobody) == NOTHING  # type: ignore[arg-type]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_rates_are_of_the_window_without_pauses_and_with_the_share_of_waiting():
    clock = Clock()
    throughput = Throughput(torch.device("cpu"), peak=1e-3, clock=clock)
    for _ in range(2):
        with throughput.waiting():
            clock.now += 0.5
        clock.now += 1.5
        throughput.count(samples=3, tokens=100, flops=StepFlops(1e9, 1.5e9))
    with throughput.paused():
        clock.now += 50
    rates = throughput.rates()
    assert rates.pop("peak_memory_bytes") > 1e6
    assert rates == pytest.approx(
        {
            "s_per_step": 2.0,
            "samples_per_s": 1.5,
            "tokens_per_s": 50.0,
            "data_wait_share": 0.25,
            "mfu": 0.5,
            "hfu": 0.75,
        }
    )
    clock.now += 50  # before the first step, or after the last one
    assert throughput.rates() == {}
    assert throughput.rates_so_far()["s_per_step"] == 2.0


def test_the_time_in_collectives_is_a_share_of_the_steps_and_not_of_pauses():
    clock = Clock()
    communication = CommunicationTime(clock)
    throughput = Throughput(torch.device("cpu"), clock=clock, communication=communication)
    for _ in range(2):
        clock.now += 1.5
        with communication.inside(torch.device("cpu")):
            clock.now += 0.5
        throughput.count(samples=1, tokens=1)
    with throughput.paused(), communication.inside(torch.device("cpu")):
        clock.now += 50
    assert throughput.rates()["communication_share"] == pytest.approx(0.25)
    assert throughput.rates_so_far()["communication_share"] == pytest.approx(0.25)
    clock.now += 1
    throughput.count(samples=1, tokens=1)
    assert throughput.rates()["communication_share"] == 0, "what was read is read once"


class Events:
    """A GPU's stream: what is recorded is there only when the stream was waited for."""

    def __init__(self) -> None:
        self.now_ms, self.waited_for = 0.0, False

    def event(self, *, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, stream: Events) -> None:
        self.stream = stream

    def record(self) -> None:
        self.at_ms = self.stream.now_ms

    def elapsed_time(self, later: "Event") -> float:
        assert self.stream.waited_for, "this waits for the GPU"
        return later.at_ms - self.at_ms


def test_on_a_gpu_events_are_read_only_when_the_numbers_are(monkeypatch):
    stream, clock = Events(), Clock()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    communication = CommunicationTime(clock)
    throughput = Throughput(torch.device("cpu"), clock=clock, communication=communication)
    with communication.inside(torch.device("cuda")):  # before the first step, and so forgotten
        stream.now_ms += 7
    assert throughput.rates() == {}
    for _ in range(3):
        with communication.inside(torch.device("cuda")):
            stream.now_ms += 250
        stream.now_ms += 750
        throughput.count(samples=1, tokens=1)
    clock.now += 3
    stream.waited_for = True
    assert throughput.rates()["communication_share"] == pytest.approx(0.25)


def test_a_process_that_is_alone_has_no_share_of_communication():
    clock = Clock()
    throughput = Throughput(torch.device("cpu"), clock=clock)
    clock.now += 1
    throughput.count(1, 1)
    assert "communication_share" not in throughput.rates()


def test_words_of_several_processes_say_how_long_they_waited_for_each_other():
    rates = {"s_per_step": 1.0, "samples_per_s": 1.0, "tokens_per_s": 1.0, "data_wait_share": 0.0}
    assert "other processes" not in in_words(rates)
    assert "12 % for other processes" in in_words(rates | {"communication_share": 0.12})


def test_without_a_known_peak_there_is_no_mfu():
    clock = Clock()
    throughput = Throughput(torch.device("cpu"), clock=clock)
    clock.now += 1
    throughput.count(1, 1, StepFlops(1.0, 1.0))
    assert not {"mfu", "hfu"} & throughput.rates().keys()


def test_the_peak_of_memory_is_that_of_this_process():
    before = peak_memory_bytes(torch.device("cpu"))
    held = torch.ones(40_000_000)
    assert peak_memory_bytes(torch.device("cpu")) >= max(before, held.nbytes)


def test_profiling_writes_one_trace_of_three_steps_and_changes_no_random_state(tmp_path):
    state = torch.get_rng_state()
    weight = torch.eye(8)
    with profiled(tmp_path) as next_step:
        for _ in range(8):
            with torch.profiler.record_function("one step"):
                weight = weight @ weight
            next_step()
    (path,) = (tmp_path / "trace").iterdir()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "one step" and event.get("cat") == "user_annotation" for event in events) == 3
    assert torch.equal(torch.get_rng_state(), state)


def test_a_run_that_is_too_short_says_that_there_is_no_trace(tmp_path, caplog):
    with profiled(tmp_path) as next_step:
        next_step()
    assert not (tmp_path / "trace").exists()
    assert "no trace" in caplog.text


def test_without_a_folder_nothing_is_profiled():
    with profiled(None) as next_step:
        next_step()


@pytest.mark.parametrize(("plain", "joint", "rows"), [(True, False, 512), (False, False, 60), (True, True, 60)])
def test_a_text_is_padded_in_the_librarys_own_wan_alone(plain: bool, joint: bool, rows: int):
    options = Train(dataset_config=Path("d"), dit=Path("d"), output_dir=Path("o"), output_name="o", task="t2v-1.3B",
                    checkpointing="full", checkpointing_free_blocks=1, plain=plain)  # fmt: skip
    watching = SimpleNamespace(_sizes={"": (SIZES, 50)}, _options=options, _is_joint=joint)
    result = SimpleNamespace(expert="", names=["a"], tokens=[256], text_tokens=[60], image_tokens=0)
    work = Watching._work(watching, result)  # type: ignore[arg-type]
    wanted = {"adapter_weights": 50, "free_blocks": 1, "joint": joint, "whole_blocks": plain}
    assert work == step_flops(SIZES, 256, text_tokens=rows, **wanted)


def test_what_is_computed_again_is_a_forward_pass_of_the_blocks_that_are():
    linear, texts, attention = forward_flops(SIZES, 1000, text_tokens=77)
    last = 2 * 256 * 1024 * 3

    def again(**more: Any) -> float:
        found = step_flops(SIZES, 1000, text_tokens=77, **more)
        return found.done - found.model

    assert again(checkpointing="none") == 0
    assert again() == pytest.approx(linear + texts + attention)
    assert again(checkpointing="selective") == pytest.approx(linear + texts)
    assert again(free_blocks=1) == pytest.approx(2 / 3 * again())
    assert again(free_blocks=3) == 0
    assert again(whole_blocks=False) == pytest.approx(again() - 1000 * last)
    joint = sum(forward_flops(SIZES, 1000, text_tokens=77, joint=True))
    assert again(joint=True, whole_blocks=False) == pytest.approx(joint - 1077 * last)


@pytest.mark.parametrize(("joint", "seen"), [(False, 2 * 1000), (True, 1000 + 77)])
def test_an_adapter_sees_the_picture_or_half_of_it_each_of_picture_and_text(joint: bool, seen: int):
    bare, own = (step_flops(SIZES, 1000, text_tokens=77, joint=joint, adapter_weights=size) for size in (0, 50))
    assert own.model - bare.model == 3 * 50 * seen
    assert own.done - bare.done == 4 * 50 * seen, "and once more where it is computed again"
