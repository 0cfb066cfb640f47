"""diffusers and peft without what this project never takes from them: loaded when this module is.

Four fifths of the time of importing `WanTransformer3DModel` and `LoraConfig` go into transformers, scipy, requests, the
compiler of torch, sixty other transformers of diffusers and its quantizers, none of which a training run touches. While
the two libraries are loaded here,

- `POSTPONED` and `HOLLOW` packages are not loaded: a name that is taken from them is a stand-in, which fetches the real
  one when it is called or looked into, so that nothing is missing, only later; the files within a hollow package are
  loaded one by one, as they are asked for;
- `torch._dynamo` seems to be absent, which diffusers answers by leaving its blocks unmarked for the compiler, and
  `torch.compiler.disable` is torch's own variant that loads the compiler at the first call; `torch.distributed.tensor`,
  which peft takes for granted because the compiler loads it, is a stand-in.

Afterwards everything is as it was: an `import transformers` gives the whole library. Where a version of a library does
not bear it, both are loaded in the ordinary way. Modules that use the two take them from `wangen.runtime.libraries`.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch._compile import _disable_dynamo

LOADED = ("peft", "diffusers.models.transformers.transformer_wan")
POSTPONED = ("transformers", "scipy", "requests")
HOLLOW = ("diffusers.models.transformers", "diffusers.quantizers")
ABSENT = "torch._dynamo"
DISTRIBUTED = "torch.distributed.tensor"


_NEEDS_MORE = (AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError, TypeError,
               ValueError)  # fmt: skip
"""What a version of a library may raise that needs more; loaded whole, it says itself what else is wrong."""


def _within(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


class Name:
    """A name of a module that is not loaded: the real one is fetched when it is used.

    A class that has it among its bases does without; nothing is an instance of it before its module is loaded.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    @property
    def _is_postponed(self) -> bool:
        return isinstance(sys.modules.get(self._module), _StandIn)

    def _fetch(self) -> Any:
        return getattr(import_module(self._module), self._name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the real one.

        Raises:
            ImportError: it is still postponed.
        """
        if self._is_postponed:
            raise ImportError(f"{self._module}.{self._name} is called while it is postponed")
        return self._fetch()(*given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._is_postponed:
            raise AttributeError(name)
        return getattr(self._fetch(), name)

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, instance: object) -> bool:
        return self.__subclasscheck__(type(instance))

    def __subclasscheck__(self, cls: type) -> bool:
        return self._module in sys.modules and not self._is_postponed and issubclass(cls, self._fetch())

    def __or__(self, _other: object) -> Any:
        return Any

    __ror__ = __or__


class _StandIn(ModuleType):
    """A module of which every name is postponed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(self.__name__, name)


class _Postponing(MetaPathFinder, Loader):
    """Finds stand-ins for what is postponed or hollow, and nothing for what is absent."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name == ABSENT:
            raise ModuleNotFoundError(name, name=name)
        if name not in HOLLOW and not _within(name, POSTPONED):
            return None
        spec = ModuleSpec(name, self, is_package=True)
        if name in (*HOLLOW, *POSTPONED):
            real = PathFinder.find_spec(name, path)
            if real is None:  # it is not installed
                return None
            spec.submodule_search_locations = real.submodule_search_locations if name in HOLLOW else []
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        if spec.name in POSTPONED:
            module.__dict__["__version__"] = metadata.version(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in has no code."""


@contextmanager
def lean() -> Iterator[None]:
    """While the block runs, the libraries that it imports go without the packages named above."""
    finder = _Postponing()
    sys.meta_path.insert(0, finder)
    try:
        with patch.object(torch.compiler, "disable", _disable_dynamo):
            yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if isinstance(module, _StandIn):
                del sys.modules[name]
                package, _, part = name.rpartition(".")
                vars(sys.modules.get(package, module)).pop(part, None)


def load() -> None:
    """Load the libraries, lean where nobody has loaded a part of them before."""
    known = set(sys.modules)
    if any(_within(name, ("diffusers", "peft", *POSTPONED, ABSENT)) for name in known):
        return
    try:
        with lean():
            for name in LOADED:
                import_module(name)
        if DISTRIBUTED not in sys.modules:
            vars(torch.distributed).setdefault("tensor", _StandIn(DISTRIBUTED))
    except _NEEDS_MORE:  # the next import of the library loads all that it wants
        for name in set(sys.modules) - known:
            if _within(name, ("diffusers", "peft", "accelerate")):
                del sys.modules[name]


load()
