"""A trained run for the tests of its page; a test file asks for it with `pytest_plugins`."""

from pathlib import Path

import pytest
from report_runs import train_run
from tiny import TinyRun


@pytest.fixture(scope="session")
def trained(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps with all that a page shows of a run; tests write their pages, and nothing else, into it."""
    return train_run(tiny_run, tmp_path_factory.mktemp("report"))
