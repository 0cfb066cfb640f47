"""Memory that a step on the CPU frees serves the next one."""

import json
import os
import platform
import subprocess
import sys

import pytest

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
