"""A package of optimizers that is there for a test only."""

import sys
from types import ModuleType

import pytest
from optimizers import OTHERS


@pytest.fixture
def dotted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package with optimizers of others, to be named by a dotted path."""
    module = ModuleType("others")
    for cls in OTHERS:
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, "others", module)
    return module
