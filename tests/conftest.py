"""Fixtures that several test files share."""

import pytest
from tiny import TinyRun, make_tiny_run


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A cached tiny dataset; tests must not change it."""
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))
