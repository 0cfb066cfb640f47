"""Fixtures that several test files share."""

import pytest
import torch
from tiny import TinyRun, make_tiny_run

# The models are tiny: a second thread only waits for the first. Processes that tests start use all cores.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A cached tiny dataset; tests must not change it."""
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))
