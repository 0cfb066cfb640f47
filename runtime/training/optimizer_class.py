"""`--optimizer_type` and `--optimizer_args`: which class with which arguments, and how it wants its parameters."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from wangen.generator.errors import UsageError
from wangen.generator.steps import Train
from wangen.generator.train_refusals import sets_its_rate
from wangen.generator.train_values import optimizer_arguments

EIGHT_BIT = ("bitsandbytes", "torchao")
"""Packages with an 8-bit AdamW, the better first: torchao's needs a compiler, and a minute to compile."""

MIN_EIGHT_BIT = 4096
"""Elements from which both packages quantise a state: small tensors gain nothing and lose precision."""


@dataclass(frozen=True)
class OptimizerClass:
    """An optimizer to be made.

    Attributes:
        cls: the class.
        arguments: beside parameters and learning rate.
        join_from: parameters of so many elements are handed over as one flat tensor; None hands each over by itself.
        takes_rate: whether the learning rate is ours; Adafactor can have its own.
        has_fused: whether `fused=True` suits, on the devices that have it.
    """

    cls: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    join_from: int | None = None
    takes_rate: bool = True
    has_fused: bool = False

    @property
    def name(self) -> str:
        """The package and the class."""
        return f"{self.cls.__module__.split('.')[0]}.{self.cls.__name__}"

    @property
    def is_eight_bit(self) -> bool:
        """Whether it is one of the 8-bit AdamWs."""
        return self.name in {f"{package}.AdamW8bit" for package in EIGHT_BIT}

    @property
    def is_by_element(self) -> bool:
        """Whether each element is treated alike, whatever tensor it is in: AdamW and Adam."""
        return self.join_from == 0

    def joins(self, numel: int) -> bool:
        """Whether a parameter of so many elements becomes part of the flat tensor."""
        return self.join_from is not None and numel >= self.join_from


def optimizer_class(options: Train) -> OptimizerClass:
    """What `--optimizer_type` and `--optimizer_args` ask for.

    Raises:
        UsageError: there is no such class, its package is missing, or the arguments are no key=value.
    """
    arguments = optimizer_arguments(options.optimizer_args)
    if options.optimizer_type.lower() == "adafactor":
        return _adafactor(arguments, own_rate=sets_its_rate(options))
    cls = _eight_bit() if options.optimizer_type.lower() == "adamw8bit" else _named(options.optimizer_type)
    if cls in (torch.optim.AdamW, torch.optim.Adam):
        chosen = {"fused", "foreach", "capturable", "differentiable"} & arguments.keys()
        if not chosen:
            cls = _without_compiler(cls)
        return OptimizerClass(cls, arguments, join_from=0, has_fused=not chosen)
    if OptimizerClass(cls, arguments).is_eight_bit:
        # Other blocks than the buffers are aligned to would mix the values of two parameters.
        return OptimizerClass(cls, arguments, join_from=None if "block_size" in arguments else MIN_EIGHT_BIT)
    return OptimizerClass(cls, arguments)


def _without_compiler(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """AdamW or Adam that does the same without loading torch's compiler, which takes longer than torch itself.

    Both load it to break a graph around a step that is being compiled, and to leave `add_param_group` out of one.
    """
    step = inspect.unwrap(cls.step)
    plain = {"step": torch.no_grad()(step), "add_param_group": inspect.unwrap(cls.add_param_group)}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__, **plain})


def _adafactor(arguments: dict[str, Any], *, own_rate: bool) -> OptimizerClass:
    """Adafactor of transformers, the one whose arguments are in circulation among LoRA trainers.

    torch.optim.Adafactor (a dotted path still gives it) has none of `scale_parameter`, `relative_step` and
    `warmup_init`, always scales by the size of a parameter (a LoRA's zero matrix would hardly move) and reads two norms
    of each parameter back from the device at every step. Without arguments the learning rate is the one that
    `--learning_rate` and the schedule give: transformers' defaults would ignore both.
    """
    from transformers.optimization import Adafactor

    if not own_rate:
        return OptimizerClass(Adafactor, {"scale_parameter": False, "relative_step": False, **arguments})
    return OptimizerClass(Adafactor, {**arguments, "relative_step": True}, takes_rate=False)


def _eight_bit() -> type[torch.optim.Optimizer]:
    for package in EIGHT_BIT:
        if find_spec(package) is not None:
            return _named(f"{package}.optim.AdamW8bit")
    raise UsageError(
        "--optimizer_type AdamW8bit needs bitsandbytes or torchao", cure="pip install bitsandbytes, or use AdamW"
    )


def _named(path: str) -> type[torch.optim.Optimizer]:
    """The class of that dotted path, or of torch.optim, there in any case: `sgd` is SGD."""
    module, _, name = path.rpartition(".")
    if not module:
        found = [value for key, value in vars(torch.optim).items() if key.lower() == name.lower()]
    else:
        found = [getattr(_imported(module, path), name, None)]
    classes = [value for value in found if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)]
    if not classes:
        is_other = any(value is not None for value in found)
        raise UsageError(
            f"{path} is no torch optimizer" if is_other else f"there is no optimizer {path}",
            cure="give AdamW, AdamW8bit, Adafactor, another class of torch.optim, or a dotted path",
        )
    return classes[0]


def _imported(module: str, path: str) -> ModuleType:
    try:
        return import_module(module)
    except (ImportError, TypeError) as error:  # a path that begins with a dot is a TypeError
        package = module.split(".")[0]
        missing = package and find_spec(package) is None
        cure = f"mend the path or that package: {error}"
        if missing:  # whoever has taken a name that is only mistyped would be installed
            cure = f"correct the path, or install the package {package} if that is what you mean"
        raise UsageError(f"there is no optimizer {path}", cure=cure) from None
