"""A local hub with one large file; a test file asks for it with `pytest_plugins` and imports nothing from here."""

from collections.abc import Iterator

import pytest
from hub_files import LARGE, T5_FP8
from local_hub import Hub, running


@pytest.fixture
def large() -> Iterator[Hub]:
    """A hub that holds the large file."""
    with running({T5_FP8: LARGE}) as hub:
        yield hub
