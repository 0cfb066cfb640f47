"""Memory that a step frees serves the next one, on the CPU and on a GPU."""

import json
import os
import platform
import subprocess
import sys

import pytest

from wangen.runtime.memory import allocator

ROUNDS = """
import json, resource, sys
import torch
from wangen.runtime.memory.allocator import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "kept" else False
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2 << 20, dtype=torch.uint8) for _ in range(16)]
    del tensors
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps([kept, sum(faults[2:])]))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such choice")
def test_a_step_takes_again_what_the_last_one_freed():
    def faults(way: str) -> tuple[bool, int]:
        """Whether it is so, and the page faults of rounds that take 32 MiB and give them back, the first two aside."""
        words = [sys.executable, "-c", ROUNDS, way]
        found = subprocess.run(words, env=plain, capture_output=True, text=True, check=True)
        kept, number = json.loads(found.stdout)
        return kept, number

    # Else a small thing that glibc's threads hold back for themselves may keep the heap's end by chance.
    plain = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    kept, number = faults("kept")
    assert kept
    assert number < 0.1 * faults("as it is")[1]


# ---- on a GPU ----------------------------------------------------------------------------------------------------

MACHINES = {
    "linux": ("linux", "6.1.0-amd64", False, (), allocator.EXPANDABLE),
    "wsl": ("linux", "5.15.167.4-microsoft-standard-WSL2", False, (), allocator.WHOLE),
    "rocm": ("linux", "6.1.0-amd64", True, (), allocator.WHOLE),
    "jetson": ("linux", "5.15.148-tegra", False, ("/",), allocator.WHOLE),
    "windows": ("win32", "11", False, (), allocator.WHOLE),
}


@pytest.fixture
def settings(monkeypatch):
    """The variables that PyTorch reads, none of which is set."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", MACHINES)
def test_segments_stay_whole_by_what_the_machine_can(name, settings):
    system, release, rocm, boards, expected = MACHINES[name]
    settings.setattr(sys, "platform", system)
    settings.setattr(platform, "release", lambda: release)
    settings.setattr(allocator, "is_rocm", lambda: rocm)
    settings.setattr(allocator, "BOARDS", boards)
    allocator.prefer_whole_segments()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == expected


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_a_choice_of_the_user_stays(name, settings):
    settings.setenv(name, "backend:cudaMallocAsync")
    before = dict(os.environ)
    allocator.prefer_whole_segments()
    assert dict(os.environ) == before


def test_it_is_chosen_before_torch_is_loaded(settings):
    code = "import os, sys, wangen.runtime; print(os.environ['PYTORCH_CUDA_ALLOC_CONF'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    setting, torch_is_there = done.stdout.split()
    assert setting in (allocator.EXPANDABLE, allocator.WHOLE)
    assert torch_is_there == "False"
