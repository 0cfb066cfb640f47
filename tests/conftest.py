"""Fixtures that several test files share."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import TinyRun, make_tiny_run

# The models are tiny: a second thread only waits for the first. Processes that tests start use all cores.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A cached tiny dataset; tests must not change it."""
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for the trials; in memory, where there is such a place, because it is quicker."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path_factory.mktemp("kills")
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="wangen-test-") as folder:
        yield Path(folder)
