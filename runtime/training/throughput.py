"""How fast a run is: rates over a window, their share of what the card could do, and one trace."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wangen.generator.cards import peak_of_card
from wangen.generator.errors import bytes_text
from wangen.generator.files import replace
from wangen.generator.flops import NOTHING, StepFlops
from wangen.generator.run_folder import TRACES
from wangen.profiles import TransformerSizes
from wangen.runtime.communication import CommunicationTime
from wangen.runtime.training.pace import Pace

log = logging.getLogger("wangen")

PROFILED_STEPS = (3, 5)
PEAK = "peak_memory_bytes"
ADDED = ("samples_per_s", "tokens_per_s")
DIFFERING = (*ADDED, "data_wait_share", "communication_share", PEAK)
"""Rates that are not the same in all processes that train together."""


def sizes_of(config: Any) -> TransformerSizes:
    """The sizes in a diffusers transformer's config."""
    width = config.num_attention_heads * config.attention_head_dim
    return TransformerSizes(
        dim=width, ffn_dim=config.get("ffn_dim", 4 * width), num_layers=config.num_layers,
        num_heads=config.num_attention_heads, in_channels=config.in_channels, out_channels=config.out_channels,
    )  # fmt: skip


def peak_tflops(device: torch.device, told: float | None = None) -> float | None:
    """What the device could do at best in bfloat16, in TFLOP/s: as told, else by a known card's name, else None.

    Args:
        device: where the run computes.
        told: `--peak_tflops`.
    """
    if told is not None or device.type != "cuda":
        return told
    return peak_of_card(torch.cuda.get_device_name(device))


@dataclass
class _Work:
    """What was done in some time, and how long it took."""

    seconds: float = 0.0
    waited_s: float = 0.0
    paused_s: float = 0.0
    communicated_s: float = 0.0
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    flops: StepFlops = NOTHING

    def add(self, other: "_Work") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def rates(self, peak: float | None) -> dict[str, float]:
        if not self.steps or self.seconds <= 0:
            return {}
        rates = {
            "s_per_step": self.seconds / self.steps,
            "samples_per_s": self.samples / self.seconds,
            "tokens_per_s": self.tokens / self.seconds,
            "data_wait_share": self.waited_s / self.seconds,
        }
        if peak and self.flops.model:
            rates["mfu"] = self.flops.model / self.seconds / (peak * 1e12)
            rates["hfu"] = self.flops.done / self.seconds / (peak * 1e12)
        return rates


class Throughput:
    """Rates since the last reading: seconds, samples and tokens per step, MFU, and the shares of waiting.

    On a GPU read them right after its numbers were read: only then has it done what was asked of it.
    """

    def __init__(
        self,
        device: torch.device,
        peak: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        communication: CommunicationTime | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Begin to count.

        Args:
            device: whose memory is watched.
            peak: TFLOP/s from `peak_tflops`; None gives no MFU.
            clock: seconds.
            communication: where the steps' time inside collectives is summed up; None in a process that is alone.
            pace: gets what is read.
        """
        self._device, self._peak, self._clock, self._communication = device, peak, clock, communication
        self._pace = pace
        self._all = _Work()
        self._begin()

    def _begin(self) -> None:
        self._started, self._now = self._clock(), _Work()
        if self._communication:
            self._communication.forget()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around reading the next batch."""
        began = self._clock()
        try:
            yield
        finally:
            self._now.waited_s += self._clock() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no training: saving, validating, sampling."""
        began = self._clock()
        try:
            with self._communication.paused() if self._communication else contextlib.nullcontext():
                yield
        finally:
            self._now.paused_s += self._clock() - began

    def count(self, samples: int, tokens: int, flops: StepFlops | None = None) -> None:
        """One step is done."""
        self._now.add(_Work(steps=1, samples=samples, tokens=tokens, flops=flops or NOTHING))

    def rates(self) -> dict[str, float]:
        """The rates since the last call, by the names that `metrics.jsonl` has; empty when there was no step.

        `mfu` counts the work that the model needs, `hfu` all that was done, both over the card's peak.
        """
        self._now.seconds = self._clock() - self._started - self._now.paused_s
        if self._communication and self._now.steps:
            self._now.communicated_s = self._communication.read()
        rates = self._rates_of(self._now)
        if rates:
            self._all.add(self._now)
        if self._pace:
            now = self._now
            self._pace.add(now.steps, now.seconds - now.communicated_s, now.waited_s, now.flops.done or now.steps)
        self._begin()
        return rates

    def rates_so_far(self) -> dict[str, float]:
        """The same over all that was read until now; empty before the first step."""
        return self._rates_of(self._all)

    def _rates_of(self, work: _Work) -> dict[str, float]:
        rates = work.rates(self._peak)
        if not rates:
            return rates
        if self._communication:
            rates["communication_share"] = work.communicated_s / work.seconds
        memory = peak_memory_bytes(self._device)
        return rates if memory is None else rates | {PEAK: memory}


def of_all(rates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The rates of processes that train together as one, over equally many steps: what they did adds up, over the mean
    of their times; shares are of the times of all; the most memory is that of any.

    Beside it stand the least and the most of one process, of what may differ between them.

    >>> one = {"s_per_step": 1.0, "tokens_per_s": 8.0, "data_wait_share": 0.25}
    >>> two = {"s_per_step": 3.0, "tokens_per_s": 8.0, "data_wait_share": 0.75}
    >>> of_all([one]) == one
    True
    >>> all_ = of_all([one, two])
    >>> all_["s_per_step"], all_["tokens_per_s"], all_["data_wait_share"], all_["data_wait_share_max"]
    (2.0, 16.0, 0.625, 0.75)
    """
    if len(rates) == 1 or not rates[0]:
        return dict(rates[0])
    found = {"s_per_step": sum(own["s_per_step"] for own in rates) / len(rates)}
    for name in [each for each in rates[0] if each not in found]:
        known = [own for own in rates if name in own]
        values = [own[name] for own in known]
        times = [own["s_per_step"] for own in known]
        done = sum(value * time for value, time in zip(values, times, strict=True))
        found[name] = max(values) if name == PEAK else done / (found["s_per_step"] if name in ADDED else sum(times))
        if name in DIFFERING:
            found |= {f"{name}_min": min(values), f"{name}_max": max(values)}
    return found


def in_words(rates: Mapping[str, float]) -> str:
    """Rates for the log.

    >>> in_words({"s_per_step": 0.5, "samples_per_s": 2.0, "tokens_per_s": 4096.0, "data_wait_share": 0.014,
    ...           "mfu": 0.41, "peak_memory_bytes": 9_500_000_000})
    '0.5 s/step, 2 samples/s, 4096 tokens/s, MFU 41 %, 1 % of the time waiting for data, at most 9.5 GB of memory'
    """
    words = [f"{rates['s_per_step']:.3g} s/step, {rates['samples_per_s']:.3g} samples/s"]
    words.append(f"{rates['tokens_per_s']:.0f} tokens/s")
    if "mfu" in rates:
        words.append(f"MFU {rates['mfu']:.0%}".replace("%", " %"))
    words.append(f"{100 * rates['data_wait_share']:.0f} % of the time waiting for data")
    if "communication_share" in rates:
        words.append(f"{100 * rates['communication_share']:.0f} % for other processes")
    if PEAK in rates:
        words.append(f"at most {bytes_text(int(rates[PEAK]))} of memory")
    return ", ".join(words)


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory held so far: on a GPU what torch allocated there, else this process's own; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextlib.contextmanager
def profiled(
    folder: Path | None,
    start: int = 0,
    paused: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[Callable[[], None]]:
    """Write one torch trace of the third to the fifth step from here; the caller calls what this yields after each.

    Args:
        folder: `trace/steps-3-5.json.gz` is written into it, for chrome://tracing or https://ui.perfetto.dev, named by
            the run's steps, of a shorter run with its own last step; None profiles nothing.
        start: how many steps the run has done.
        paused: around what the profiler takes between two steps: starting it and writing may take many seconds.
    """
    if folder is None:
        yield lambda: None
        return
    first, last = PROFILED_STEPS
    done = 0

    def write(profiler: Any) -> None:
        if done < first:  # the profiler writes at its end as well, whatever it has
            return
        begun, ended = start + first, start + min(done, last)
        path = folder / TRACES / f"steps-{begun}-{ended}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp.json.gz")
        profiler.export_chrome_trace(str(temporary))
        replace(temporary, path)
        log.info("  trace of steps %d to %d: %s", begun, ended, path)

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=first - 2, warmup=1, active=last - first + 1, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write) as profiler:

        def after_step() -> None:
            nonlocal done
            done += 1
            with paused():
                profiler.step()

        yield after_step
    if done < first:
        log.warning("  --profile: the run ended before step %d, so there is no trace", start + first)
