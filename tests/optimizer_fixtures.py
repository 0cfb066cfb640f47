"""A package of optimizers that is there for a test only."""

import sys
from types import ModuleType

import pytest
from optimizers import ByHeart, Counting, Hoards, Replaces, ScheduleFree


@pytest.fixture
def dotted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package with optimizers of others, to be named by a dotted path."""
    module = ModuleType("others")
    for cls in (Counting, ScheduleFree, ByHeart, Replaces, Hoards):
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, "others", module)
    return module
