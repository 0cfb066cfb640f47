"""A folder with a pack, for the tests of packs."""

from pathlib import Path

import pytest
from cache_entries import put, recipes

from wangen.runtime.cache.packing import pack


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Five latents in a pack."""
    put(tmp_path, *recipes(5))
    pack(tmp_path)
    return tmp_path
