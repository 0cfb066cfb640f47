"""The optimizer of a run, from the flags: one interface, whichever class does the arithmetic."""

import contextlib
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from wangen import profiles
from wangen.generator.adapter_settings import settings_of_flags
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.session import with_flag
from wangen.generator.steps import Train
from wangen.runtime.training.flat import ALIGNMENT, FlatParameters
from wangen.runtime.training.optimizer_class import OptimizerClass, optimizer_class
from wangen.runtime.training.optimizer_state import Leaf, Plain, collect, restore, snapshot

log = logging.getLogger("wangen")

CLASS = "class"
ZERO_AT_START = ".lora_B."
"""The factor of a LoRA that peft starts at zero; LoRA+ is for LoRA alone."""

_SUFFIXES = ("", "_loraplus")
"""Of the names of what is logged, by group."""

_FAILURES = (Exception,)
"""Other people's classes raise what they like: an `ImportError` at the first step, errors of their own."""

_TRIAL_STEPS, _CUTS = 12, (3, 7)
"""Some keep counts that matter only at the fifth step."""


@runtime_checkable
class _ScheduleFree(Protocol):
    """A schedule-free optimizer: it trains other weights than those to evaluate, and must be told which to show."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class Parts(Protocol):
    """Parameters of which each of several processes holds a part."""

    @property
    def names(self) -> Collection[str]:
        """The names of those parameters, whose storage is read elsewhere, too: it stays where it is."""

    def over_all(self, own: torch.Tensor) -> torch.Tensor:
        """A number (), of this process's parts -> its sum over all parts, the same everywhere."""


class Optimization:
    """An optimizer over the trainable parameters of one model.

    A step is `zero_grad`, any number of backward passes, `clip`, `step`. The parameters become views of flat buffers
    (see `FlatParameters`), for every optimizer. AdamW, Adam and the 8-bit AdamW, which treat each element alike, also
    see those buffers as one tensor: one fused kernel instead of hundreds. Others see each parameter.

    Nothing here waits for the device, but what an optimizer does by itself (Prodigy reads sums, Adafactor with
    scale_parameter reads norms).

    Attributes:
        flat: the parameters and gradients.
        optimizer: the optimizer itself.
        name: of its class, with the package that it is from.
    """

    def __init__(
        self, options: Train, parameters: Mapping[str, torch.nn.Parameter], parts: Parts | None = None
    ) -> None:
        """Make the optimizer of `--optimizer_type` over parameters by name, trainable and in float32 on one device.

        Those that are split over processes need an optimizer that treats each element alike.

        Raises:
            UsageError: there is no such optimizer, its package is missing, an argument does not fit, or `LoRA+` finds
                nothing that starts at zero.
        """
        found = optimizer_class(options)
        assert parts is None or found.is_by_element
        self._options, self._parts = options, parts
        groups = _groups(parameters, options.loraplus_lr_ratio, found)
        self._logged: dict[str, float] = {}
        self._rates = [rate if found.takes_rate else None for rate in _rates(options, len(groups))]
        self.flat = FlatParameters(parameters, groups, parts.names if parts else ())
        self._leaves = _leaves(self.flat, groups, found)
        arguments = dict(found.arguments)
        if found.has_fused and self.flat.device.type in ("cpu", "cuda"):
            arguments["fused"] = True
        listed = [
            {"params": [leaf.parameter for leaf in self._leaves if leaf.group == number], "lr": rate}
            for number, rate in enumerate(self._rates)
        ]
        make: Callable[..., torch.optim.Optimizer] = found.cls
        try:
            self.optimizer = make(listed, lr=self._rates[0], **arguments)
        except _FAILURES as error:
            told = f" with {' '.join(options.optimizer_args)}" if options.optimizer_args else ""
            raise UsageError(f"{options.optimizer_type}{told}: {error}", where="--optimizer_type",
                             cure="choose another class, or other --optimizer_args") from None  # fmt: skip
        self.name = found.name
        if isinstance(self.optimizer, _ScheduleFree):
            self.optimizer.train()
        self._initial = snapshot(self.optimizer)
        # Prodigy and its like keep an estimate of that name; of torch's Adafactor it is an argument, and no such thing.
        self._estimates_rate = "d" not in inspect.signature(found.cls).parameters
        self._may_draw = not self.name.startswith("torch.")

    @property
    def is_schedule_free(self) -> bool:
        """Whether the weights that are trained are others than those to save, which `evaluating` gives."""
        return isinstance(self.optimizer, _ScheduleFree)

    def zero_grad(self) -> None:
        """Zero every gradient in place."""
        for gradient in self.flat.gradients:
            gradient.zero_()

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradient down to a norm, as `torch.nn.utils.clip_grad_norm_` does; 0 leaves it as it is.

        Returns:
            () the norm before, on the device.
        """
        norms = torch.stack([norm_of(gradient) for gradient in self.flat.gradients])
        if self._parts:
            joint, split = norms[: self.flat.num_joint], norms[self.flat.num_joint :]
            norms = torch.cat([joint, self._parts.over_all(split.square().sum()).sqrt()[None]])
        norm: torch.Tensor = torch.linalg.vector_norm(norms)
        if max_norm:
            factor = (max_norm / (norm + 1e-6)).clamp_(max=1)
            for gradient in self.flat.gradients:
                gradient.mul_(factor)
        return norm

    def step(self, factor: float, seed: int = 0) -> None:
        """One step.

        Args:
            factor: on the learning rate, as a schedule gives it.
            seed: of what the optimizer draws, if it does, so that a resumed run draws the same.
        """
        assert self.flat.is_attached(), "parameters or gradients were replaced, as moving a module does"
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            if rate is None:
                continue
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor
        self._logged = self._rates_now()
        with self._drawing_from(seed):
            self.optimizer.step()
        for group, suffix in zip(self.optimizer.param_groups, _SUFFIXES, strict=False):
            if isinstance(group.get("scheduled_lr"), float):  # schedule-free with a warm-up of its own
                self._logged[f"lr{suffix}"] = group["scheduled_lr"]

    @contextlib.contextmanager
    def _drawing_from(self, seed: int) -> Iterator[None]:
        """PyTorch's global generators begin with the seed; not for its own optimizers, which draw nothing."""
        if not self._may_draw:
            yield
            return
        with torch.random.fork_rng([self.flat.device] if self.flat.device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield

    def rates(self) -> dict[str, float]:
        """What to log: the learning rates of the last step, and how far Prodigy and its like had raised them for it."""
        return self._logged

    def _rates_now(self) -> dict[str, float]:
        logged = {}
        for group, suffix in zip(self.optimizer.param_groups, _SUFFIXES, strict=False):
            if group["lr"] is not None:
                logged[f"lr{suffix}"] = float(group["lr"])
                if self._estimates_rate and isinstance(group.get("d"), float):
                    logged[f"d*lr{suffix}"] = group["d"] * float(group["lr"])
        return logged

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within, the parameters are what is to be saved and sampled with; afterwards they are again as they were.

        Only schedule-free optimizers tell the two apart. Their own way back rounds, so the bytes are kept.
        """
        if not isinstance(self.optimizer, _ScheduleFree):
            yield
            return
        kept = [buffer.clone() for buffer in self.flat.weights]
        self.optimizer.eval()
        try:
            yield
        finally:
            self.optimizer.train()
            for buffer, before in zip(self.flat.weights, kept, strict=True):
                buffer.copy_(before)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Plain]]:
        """Everything the optimizer knows, as tensors (views of it, by `<parameter>/<what>`) and numbers.

        Raises:
            WangenError: it keeps something that is neither, so that it could not be resumed.
        """
        tensors, numbers = collect(self.optimizer, self._leaves, self._initial)
        return tensors, {**numbers, CLASS: self.name}

    def load(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Plain], where: str) -> None:
        """Go on from a saved state; the weights themselves are the caller's to restore, in place.

        Raises:
            WangenError: it is another optimizer's (with `--resume_changed` the new one starts afresh), or of other
                parameters.
        """
        saved = numbers.get(CLASS)
        if saved == self.name and self._options.resume_changed and not _same_kinds(self._options, tensors, numbers):
            log.warning("  %s keeps more with other --optimizer_args: its averages start anew", self.name)
        elif saved == self.name:
            restore(self.optimizer, self._leaves, tensors, {k: v for k, v in numbers.items() if k != CLASS}, where)
        elif self._options.resume_changed:
            log.warning("  the optimizer was %s and is %s: its averages start anew", saved, self.name)
        else:
            raise WangenError(
                f"the training state was made with the optimizer {saved}, here it is {self.name}",
                where=where,
                cure=f"install that package, or {with_flag('train', '--resume_changed')} to go on without its averages",
            )


def norm_of(numbers: torch.Tensor) -> torch.Tensor:
    """() the norm of (elements,), in pieces: adding 44 million squares in one go was 0.3 % off on a CPU.

    >>> round(float(norm_of(torch.ones(300 * 256 + 44))) ** 2)
    76844
    """
    while len(numbers) > ALIGNMENT:
        pieces = len(numbers) // ALIGNMENT * ALIGNMENT
        norms = torch.linalg.vector_norm(numbers[:pieces].view(-1, ALIGNMENT), dim=1)
        numbers = torch.cat([norms, numbers[pieces:]])
    norm: torch.Tensor = torch.linalg.vector_norm(numbers)
    return norm


def try_out(options: Train, device: torch.device) -> None:
    """Train small tensors of the kinds that the run has, with and without interruptions: an early refusal.

    The 8-bit optimizers are only made: torchao would compile for a minute.

    Raises:
        UsageError: the optimizer cannot be made, cannot stand beside other flags, cannot step, replaces the storage of
            its parameters, or does not go on from its saved state to the same bytes.
        WangenError: it keeps what cannot be saved.
    """
    whole = _small(options, device)
    if options.scale_weight_norms and whole.is_schedule_free:
        raise UsageError(f"--scale_weight_norms: {options.optimizer_type} averages weights that it does not shrink",
                         cure="leave one of them out")  # fmt: skip
    if optimizer_class(options).is_eight_bit:
        return
    _trial(whole, range(_TRIAL_STEPS))
    cut, step = _small(options, device), 0
    for end in (*_CUTS, _TRIAL_STEPS):
        _trial(cut, range(step, end))
        before, cut, step = cut, _small(options, device), end
        cut.flat.load(before.flat.views(before.flat.weights), "")
        cut.load(*before.state(), "")
    ends = zip(whole.flat.weights, cut.flat.weights, strict=True)  # a rate that ends in NaN ends so both times
    if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in ends):
        raise UsageError(f"{options.optimizer_type} cannot be resumed exactly: it keeps more than its state says",
                         cure="choose another class")  # fmt: skip


def _same_kinds(options: Train, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Plain]) -> bool:
    """Whether a saved state has all that these flags' optimizer keeps: `amsgrad=True` needs a maximum more."""
    if optimizer_class(options).is_eight_bit:
        return True
    tried = _small(options, torch.device("cpu"))
    _trial(tried, range(1))
    needed, found = (
        {name.rsplit("/", 1)[-1] for part in state for name in part} for state in (tried.state(), (tensors, numbers))
    )
    return needed <= found


def _small(options: Train, device: torch.device) -> Optimization:
    """Over two matrices that are not square, one as large as those whose state is kept in few bits, and what the run
    has beside: vectors, and of a whole transformer its table of modulations and, of Wan, its convolution.
    """
    shapes: dict[str, tuple[int, ...]] = {"small.lora_A.weight": (16, 256), "small.lora_B.weight": (20, 16)}
    if options.train_mode == "full" or settings_of_flags(options).dora:
        shapes["small.vector"] = (20,)
    if options.train_mode == "full":
        shapes["small.table"] = (1, 6, 8)
        if profiles.model(options.task).architecture == "wan":
            shapes["small.convolution"] = (8, 4, 1, 2, 2)
    generator = torch.Generator().manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(size, generator=generator).to(device))
                  for name, size in shapes.items()}  # fmt: skip
    return Optimization(options, parameters)


def _trial(optimization: Optimization, steps: range) -> None:
    """Steps with gradients that are drawn for each."""
    name = optimization.name
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for gradient in optimization.flat.views(optimization.flat.gradients).values():
            gradient.copy_(torch.randn(gradient.shape, generator=generator))
        try:
            optimization.step(1.0, step)
        except _FAILURES as error:
            raise UsageError(f"{name} cannot take a step: {error}", where="--optimizer_type",
                             cure="choose another class, or other --optimizer_args") from None  # fmt: skip
        if not optimization.flat.is_attached():
            raise UsageError(f"{name} replaces its parameters, which this trainer cannot follow",
                             cure="choose another class")  # fmt: skip


def _groups(
    parameters: Mapping[str, torch.nn.Parameter], ratio: float | None, found: OptimizerClass
) -> list[list[str]]:
    """Names by group; with LoRA+ what starts at zero is a second one. What is joined comes first in its group."""
    names = sorted(parameters, key=lambda name: (not found.joins(parameters[name].numel()), name))
    if ratio is None:
        return [names]
    second = [name for name in names if ZERO_AT_START in name]
    first = [name for name in names if ZERO_AT_START not in name]
    if not (first and second):
        raise UsageError("--loraplus_lr_ratio is for adapters: nothing here starts at zero", cure="leave it out")
    return [first, second]


def _rates(options: Train, num_groups: int) -> list[float]:
    """Learning rates by group; LoRA+ (Hayou, Ghosh, Yu 2024, arXiv:2402.12354) multiplies the second."""
    return [options.learning_rate, options.learning_rate * (options.loraplus_lr_ratio or 1)][:num_groups]


def _leaves(flat: FlatParameters, groups: Sequence[Sequence[str]], found: OptimizerClass) -> list[Leaf]:
    """The tensors that the optimizer is to see: in each group one flat tensor of all that is joined, and the others."""
    leaves = []
    for number, names in enumerate(groups):
        joined = tuple(
            name for name in names if found.joins(flat.parameters[name].numel()) and not flat.is_anchored(name)
        )
        if joined:
            places = tuple(flat.places[name] for name in joined)
            tensor = torch.nn.Parameter(flat.weights[number][: places[-1].end])
            tensor.grad = flat.gradients[number][: places[-1].end]
            leaves.append(Leaf(tensor, joined, places, number))
        leaves += [Leaf(flat.parameters[name], (name,), None, number) for name in names if name not in joined]
    return leaves
