"""A workspace with a dataset; a test file asks for it with `pytest_plugins` and imports nothing from here."""

from pathlib import Path

import pytest
from helpers import clip_bytes, image_bytes, write_tree
from red_house import NAME, SMALL


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return clip_bytes(tmp_path_factory.mktemp("clip"), num_frames=24)


@pytest.fixture
def place(tmp_path: Path, clip: bytes) -> Path:
    """A workspace with a dataset of two images and a clip."""
    tree = {
        "wangen.toml": SMALL,
        f"datasets/{NAME}/Front.JPG": image_bytes(),
        f"datasets/{NAME}/Front.txt": "the front",
        f"datasets/{NAME}/a b & c.png": image_bytes(format="PNG"),
        f"datasets/{NAME}/a b & c.txt": "the garden, é日本",
        f"datasets/{NAME}/walk.mp4": clip,
        f"datasets/{NAME}/walk.txt": "a walk around it",
    }
    return write_tree(tmp_path / "ws", tree)
