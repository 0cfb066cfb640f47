"""A pytest plugin: every step computes on a stand-in for a GPU (`stand_in_gpu.cpp`), under the device name "cuda".

PYTHONPATH=tests python -m pytest -p stand_in_gpu …

No GPU is needed, and none is touched: the CPU computes the numbers. `torch.cuda` answers as on an RTX 4090, and what
PyTorch checks of devices is checked: tensors that meet, generators, storages. Fresh memory holds NaN, and a copy on a
side stream comes when it is waited for, so that whoever does not wait computes with NaN; one that does not wait itself
for what the main stream does with its memory is refused. Processes that tests start compute on the CPU, unless they
fork. Needs g++ and a PyTorch without CUDA, and has to be loaded before torch is.
"""

import atexit
import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wangen.generator.memory import GIB

NOT_HERE = {
    "test_devices.py::test_a_device_that_is_not_there_is_named": "it is there",
    "test_generate.py::test_ways_to_save_memory_show_the_same_picture": "GPUs decode in bfloat16",
    "test_sampling.py::test_a_sample_of_an_untrained_adapter_is_what_generate_makes": "GPUs decode in bfloat16",
    "test_qwen_cache.py::test_one_prompt_and_two_control_images": "to the byte what the CPU's attention gives",
    "test_qwen_cache.py::test_two_control_images_stand_in_one_prompt": "to the byte what the CPU's attention gives",
    "test_cache_steps_faults.py::test_a_disk_that_is_full_at_any_moment": "it forks",
    "test_cache_steps_i2v.py::test_a_batch_of_which_another_process_makes": "it forks",
    "test_train_nothing_lost.py::test_a_process_that_is_killed_while_it_samples": "it forks",
}
"""The beginnings of names of tests that mean the CPU, and why."""

SOURCE = Path(__file__).with_suffix(".cpp")
BUILT = SOURCE.parent / ".built"


def built() -> Path:
    """The library, compiled for this PyTorch if it is not there yet; about 10 s."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    if (torch / "lib/libtorch_cuda.so").exists():
        raise pytest.UsageError("stand_in_gpu takes CUDA's place: install a PyTorch without CUDA")
    version = (torch / "version.py").read_bytes()
    path = BUILT / f"stand-in-gpu-{sha256(SOURCE.read_bytes() + version).hexdigest()[:16]}.so"
    if not path.exists():
        BUILT.mkdir(exist_ok=True)
        include = torch / "include"
        words = ["g++", "-shared", "-fPIC", "-std=c++20", "-O1", "-w", f"-I{include}"]
        words += [f"-I{include}/torch/csrc/api/include", str(SOURCE), f"-L{torch}/lib", "-ltorch_cpu", "-lc10"]
        half = path.with_suffix(f".{os.getpid()}")
        subprocess.run([*words, "-o", str(half)], check=True)
        half.replace(path)
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return path


assert "torch" not in sys.modules, "PyTorch asks once for the GPU, when it is imported"
_lane = ctypes.CDLL(str(built()), mode=ctypes.RTLD_GLOBAL)
_lane.stand_in_mark.restype = ctypes.c_int64
_lane.stand_in_run_until.argtypes = [ctypes.c_int64]
_lane.stand_in_now.restype = ctypes.c_int64
_lane.stand_in_beside.argtypes = [ctypes.c_bool, ctypes.c_int64]

import stand_in_graphs  # noqa: E402
import torch  # noqa: E402

atexit.register(time.sleep, 0.2)  # the backward pass's thread still lets go of its tensors, and may not outlive Python
_here = threading.local()


class Stream(torch.Stream):
    """One that computes at once, or, beside it, copies when it is waited for."""

    _waited_for = 0

    def __new__(cls, *_words: Any, **_named: Any) -> "Stream":
        return super().__new__(cls, torch.device("cuda", 0))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        if self is _main:
            event.synchronize()
            return
        self._waited_for = max(self._waited_for, event._now)
        _enter(_current())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        if self is not _main:
            _synchronize()


class Event:
    """Knows how many copies had been asked for when it was recorded, or, of the main stream, its operations."""

    def __init__(self, **_named: Any) -> None:
        self._mark, self._now, self._time_s = 0, 0, 0.0

    def record(self, stream: Stream | None = None) -> None:
        is_main = (stream or _current()) is _main
        self._mark = 0 if is_main else _lane.stand_in_mark()
        self._now = _lane.stand_in_now() if is_main else 0
        self._time_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _current()).wait_event(self)

    def synchronize(self) -> None:
        _lane.stand_in_run_until(self._mark)

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, later: "Event") -> float:
        return 1000 * (later._time_s - self._time_s)


_main = Stream()


def _current(_device: Any = None) -> Stream:
    return getattr(_here, "stream", _main)


def _synchronize(_device: Any = None) -> None:
    _lane.stand_in_run_until(_lane.stand_in_mark())


@contextmanager
def _on(stream: Stream | None) -> Iterator[None]:
    before = _current()
    _enter(stream or before)
    try:
        yield
    finally:
        _enter(before)


def _enter(stream: Stream) -> None:
    _here.stream = stream
    _lane.stand_in_beside(stream is not _main, stream._waited_for)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_words, **_named: value


_CARD = SimpleNamespace(
    name="NVIDIA GeForce RTX 4090", total_memory=24 * GIB, major=8, minor=9, multi_processor_count=128
)
_ANSWERS = {
    "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "_exchange_device": 0,
    "_maybe_exchange_device": 0, "get_device_name": _CARD.name, "get_device_capability": (8, 9),
    "get_device_properties": _CARD, "get_arch_list": ["sm_89"], "is_bf16_supported": True,
    "mem_get_info": (22 * GIB, 24 * GIB), "memory_allocated": GIB, "max_memory_allocated": GIB, "memory_reserved": GIB,
    "max_memory_reserved": GIB, "memory_stats": {}, "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "cudart": SimpleNamespace(cudaHostRegister=_always(0), cudaHostUnregister=_always(None)), "default_stream": _main,
    "get_per_process_memory_fraction": 1.0,
}  # fmt: skip
for _name, _value in _ANSWERS.items():
    setattr(torch.cuda, _name, _always(_value))
for _name in ("_lazy_init", "set_device", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed",
              "manual_seed_all", "set_rng_state", "set_per_process_memory_fraction"):  # fmt: skip
    setattr(torch.cuda, _name, _always(None))  # a function each: the compiler has a table of them
for _name, _value in {"Stream": Stream, "Event": Event, "stream": _on, "current_stream": _current,
                      "synchronize": _synchronize, "CUDAGraph": stand_in_graphs.Graph,
                      "graph": stand_in_graphs.recording, "graph_pool_handle": object, "set_stream": _enter,
                      "default_generators": (stand_in_graphs.Generator(),),
                      }.items():  # fmt: skip
    setattr(torch.cuda, _name, _value)

from wangen.runtime import devices  # noqa: E402

_choose_device = devices.choose_device


def _choose(name: str | None, number: int = 0) -> torch.device:
    return _choose_device("cuda:0" if name in (None, "cpu") else name, number)


devices.choose_device = _choose


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what means the CPU."""
    for item in items:
        for name, reason in NOT_HERE.items():
            if item.nodeid.split("/")[-1].startswith(name):
                item.add_marker(pytest.mark.skip(reason=reason))
