"""A training run as it is known before a model loads: what is trained, on what, for how many steps."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from wangen import profiles
from wangen.generator import headers
from wangen.generator.errors import UsageError, many
from wangen.generator.lora_config import lora_identity
from wangen.generator.memory import SHORT_TEXT, batches_of_a_pass, tokens_beside
from wangen.generator.run_length import num_steps_of
from wangen.generator.steps import Train
from wangen.generator.table import options as flags_of
from wangen.runtime.cache import digest
from wangen.runtime.epochs import EpochSampler
from wangen.runtime.loader import CachedSample
from wangen.runtime.samples import Sample
from wangen.runtime.trained_on import DATA, HELD_OUT, Part, may_have_seen
from wangen.runtime.training.facts import ASPECTS, TOLD
from wangen.runtime.training.held_out import as_told
from wangen.runtime.training.schedules import depends_on_length, make_schedule
from wangen.runtime.training.timesteps import (
    HIGH,
    LEAST_SHARE,
    LOW,
    Sampler,
    expert_ranges,
    expert_shares,
    more_draws,
)

RECIPE = 2
"""Of what a step computes from its seeds; a state of another recipe would go on with other noise and timesteps."""

LEARNS_THE_SAME = {"save_precision", "lora_layout", "checkpointing", "gradient_checkpointing_cpu_offload"}
"""Pinned flags that do not change what is learned."""

SIZES_OF_ADAPTERS = {"network_dim", "network_alpha"}
"""Pinned flags that mean nothing where no adapter is trained."""
SHARE = "high_noise_share"
"""A pinned flag that decides no more than lengths where the schedule does not depend on them."""

MAX_STEPS = 10_000_000
"""Months of them; the plan has a number for each."""


@dataclass(frozen=True)
class ExpertPlan:
    """One transformer of a run; the models with two experts have two.

    Attributes:
        name: `high_noise`, `low_noise`, or empty where there is only one.
        dit: its weights.
        start: the adapter it starts from.
        low: lowest sigma that it is trained at.
        high: highest.
        share: of the drawn timesteps fall into that range.
        num_steps: optimizer steps in all.
    """

    name: str
    dit: Path
    start: Path | None
    low: float
    high: float
    share: float
    num_steps: int

    @property
    def flag(self) -> str:
        """The flag that its weights are given to."""
        return "--dit_high_noise" if self.name == HIGH else "--dit"

    @property
    def suffix(self) -> str:
        """What names it in a file's name."""
        return f"_{self.name}" if self.name else ""


@dataclass(frozen=True)
class Plan:
    """A run as it is known before a model loads.

    Attributes:
        options: the flags, with every default of the model filled in.
        model: the model profile.
        samples: what is trained on.
        held_out: what is only looked at in validation.
        steps_per_epoch: optimizer steps in an epoch.
        experts: what is trained; the high-noise expert first.
        fingerprint: settings and digests that decide the result.
        trained_before: other data that its weights were trained on, each as `told` gave it.
        batches_per_epoch: of all processes; the last step of an epoch may accumulate fewer of them.
        shards: processes that share out the frozen weights.
    """

    options: Train
    model: profiles.Model
    samples: Sequence[CachedSample]
    held_out: Sequence[CachedSample]
    steps_per_epoch: int
    experts: tuple[ExpertPlan, ...]
    fingerprint: Mapping[str, Any]
    trained_before: Sequence[Part] = ()
    batches_per_epoch: int = 0
    shards: int = 1

    @cached_property
    def told(self) -> Part:
        """What this part of a training leaves to know of its data."""
        held_out = as_told(self.held_out, self.samples, self.options)
        return {name: self.fingerprint.get(name) for name in DATA} | ({HELD_OUT: held_out} if held_out else {})

    @property
    def inputs(self) -> dict[str, Any]:
        """What a report says that it is made of."""
        held_out = sorted({cached.sample.item.path.name for cached in self.held_out})
        return {"samples": len(self.samples), "held_out": held_out, **self.fingerprint}

    @property
    def facts(self) -> dict[str, Any]:
        """What its states say of its data."""
        return {TOLD: self.told, ASPECTS: dataset_aspects(self.samples)}

    @property
    def may_have_seen(self) -> bool:
        """Whether what is held out may have been trained on before."""
        return bool(self.held_out) and may_have_seen(self.told, self.trained_before)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all experts together."""
        return sum(expert.num_steps for expert in self.experts)

    @property
    def most_tokens(self) -> int:
        """Tokens that a full batch of the largest samples carries through the blocks, its captions short."""
        return self.tokens_with(SHORT_TEXT)

    def tokens_of_a_pass(self, num_processes: int) -> int:
        """Those of all batches that go through the blocks together: `options` count all processes' batches as one's."""
        return self.most_tokens * max(1, batches_of_a_pass(self.options) // num_processes)

    def tokens_with(self, rows: int) -> int:
        """Those of one batch, with captions of so many rows, where text goes through the blocks as pictures do."""
        samples = (cached.sample for cached in self.samples)
        return max(sample.entry.batch_size * _tokens_of(sample, self.model, rows) for sample in samples)

    @property
    def name(self) -> str:
        """What the run's own files are named by: one expert alone has its own, so that the other can follow it."""
        return self.options.output_name + (self.experts[0].suffix if len(self.experts) == 1 else "")

    @property
    def states(self) -> Path:
        """The folder of training states."""
        return self.options.output_dir / f"{self.name}-state"

    def file(self, expert: ExpertPlan, suffix: str = "") -> Path:
        """An expert's finished LoRA, or with a suffix another of its files."""
        return self.options.output_dir / f"{self.options.output_name}{expert.suffix}{suffix}.safetensors"

    def num_left(self, done: Sequence[int]) -> int:
        """Optimizer steps to do; an expert may have done more than its own, as of a run that was to be longer.

        Args:
            done: the steps that each expert has done.
        """
        return sum(max(0, expert.num_steps - steps) for expert, steps in zip(self.experts, done, strict=True))

    def turns(self, done: Sequence[int]) -> list[int]:
        """For every step that is left the number of the expert that it trains.

        The experts take turns of `--expert_turn_steps`; next comes the one that is farthest behind its own end, so that
        all end together. A run that goes on where the same plan left off continues in the middle of a turn.

        Args:
            done: the steps that each expert has done.
        """
        whole = self._turns([0] * len(self.experts))
        past = whole[: sum(done)]
        if [past.count(number) for number in range(len(done))] == list(done):
            return whole[sum(done) :]
        return self._turns(list(done))  # the run got another length since

    def untrained_at(self, step: int) -> list[str]:
        """The experts whose first turn begins after a step of the run."""
        order = self._turns([0] * len(self.experts))[:step]
        return [expert.name for number, expert in enumerate(self.experts) if number not in order]

    def _turns(self, done: list[int]) -> list[int]:
        order: list[int] = []
        ends = [expert.num_steps for expert in self.experts]
        turn = self.options.expert_turn_steps if len(ends) > 1 else sum(ends)
        while any(n < end for n, end in zip(done, ends, strict=True)):
            progress = [n / end for n, end in zip(done, ends, strict=True)]
            number = progress.index(min(progress))
            steps = min(turn, ends[number] - done[number])
            order += [number] * steps
            done[number] += steps
        return order


def _tokens_of(sample: Sample, model: profiles.Model, rows: int) -> int:
    controls = [sample.control_size(number) or sample.size for number in range(len(sample.controls))]
    return tokens_beside(model, sample.size, sample.count, controls, rows)


def make_plan(
    options: Train, model: profiles.Model, samples: Sequence[CachedSample], held_out: Sequence[CachedSample]
) -> Plan:
    """The plan of a run whose flags have been judged and whose cache is complete.

    Raises:
        UsageError: an expert would get no step, the schedule's flags make none, there are too many, or no item counts.
    """
    batches = len(EpochSampler(samples, options.seed))
    per_epoch = math.ceil(batches / options.gradient_accumulation_steps)
    num_steps = num_steps_of(options, per_epoch)
    if num_steps > MAX_STEPS:
        raise UsageError(f"{num_steps} steps are more than a run can have",
                         cure=f"give --max_train_steps up to {MAX_STEPS}")  # fmt: skip
    if options.prior_loss_weight == 0 and all(cached.sample.entry.is_reg for cached in samples):
        raise UsageError("--prior_loss_weight 0, and every item is of a regularisation set: no loss would count",
                         cure="give a weight above 0, or a dataset without is_reg")  # fmt: skip
    sizes = count_tokens((cached.sample for cached in samples), model)
    experts = plan_experts(options, model, num_steps, sizes)
    for expert in experts:  # what cannot be drawn or scheduled is refused here
        sampler = Sampler(options, expert.low, expert.high, expert.name)
        for tokens in sizes:
            sampler.distribution(tokens)
        make_schedule(options, expert.num_steps)
    return Plan(options, model, samples, held_out, per_epoch, experts, _fingerprint(options, samples, experts),
                batches_per_epoch=batches)  # fmt: skip


def count_tokens(samples: Iterable[Sample], model: profiles.Model) -> Mapping[int, int]:
    """How many draws of an epoch have so many tokens in a frame: some ways of drawing timesteps depend on it."""
    cell = model.spatial_stride * model.patch[1], model.spatial_stride * model.patch[2]
    counts: Counter[int] = Counter()
    for sample in samples:
        width, height = sample.size
        counts[(height // cell[0]) * (width // cell[1])] += sample.entry.num_repeats
    return counts


def plan_experts(
    options: Train, model: profiles.Model, num_steps: int, tokens_per_frame: Mapping[int, int] | None = None
) -> tuple[ExpertPlan, ...]:
    """What is trained, with the steps that each expert gets.

    Of two experts each gets its share of the drawn timesteps, or `--high_noise_share`; one alone gets all the steps.

    Args:
        options: the flags, resolved.
        model: the model profile.
        num_steps: optimizer steps of all experts together.
        tokens_per_frame: how many draws have so many tokens in a frame, from `count_tokens`.

    Raises:
        UsageError: an expert of two would get no step.
    """
    if model.experts is None:
        assert options.dit is not None
        return (ExpertPlan("", options.dit, options.network_weights, 0.0, 1.0, 1.0, num_steps),)
    ranges = expert_ranges(options, model)
    natural = dict(zip((HIGH, LOW), expert_shares(options, ranges[LOW][1], tokens_per_frame), strict=True))
    share_high = natural[HIGH] if options.high_noise_share is None else options.high_noise_share
    steps_high = round(share_high * num_steps)
    both = options.experts == "both"
    steps = {HIGH: steps_high if both else num_steps, LOW: num_steps - steps_high if both else num_steps}
    if both and not all(steps.values()):
        starved = HIGH if steps[LOW] else LOW
        share = share_high if starved == HIGH else 1 - share_high
        raise _starved(options, starved, share, natural[starved], ranges[starved], num_steps)
    files = {HIGH: options.dit_high_noise, LOW: options.dit}
    starts = {HIGH: options.network_weights_high_noise, LOW: options.network_weights}
    wanted = [name for name in (HIGH, LOW) if both or name.startswith(options.experts)]
    experts = []
    for name in wanted:
        dit = files[name]
        assert dit is not None, name
        experts.append(ExpertPlan(name, dit, starts[name], *ranges[name], natural[name], steps[name]))
    return tuple(experts)


def _starved(
    options: Train, expert: str, share: float, natural: float, sigmas: tuple[float, float], num_steps: int
) -> UsageError:
    """What is said to an expert that would get no step: why, and what gives it one.

    Args:
        options: the flags, resolved.
        expert: its name.
        share: of the steps, its own.
        natural: share of the drawn timesteps that are its own.
        sigmas: its lowest and highest.
        num_steps: of both experts.
    """
    why = f"{100 * natural:.3g}% of the timesteps are its own"
    if natural < LEAST_SHARE:  # then no share of the steps would help
        ways = more_draws(options, *sigmas)
    else:
        found = ["--high_noise_share 0.5"] if num_steps > 1 else []
        found.append(f"--max_train_steps {math.floor(0.5 / share) + 1} or more")
        if options.high_noise_share is None:
            found.append("another --timestep_sampling")
        else:
            why = f"--high_noise_share {options.high_noise_share:g} leaves it {share:.2%} of them"
        ways = ", ".join(found)
    return UsageError(f"of {many(num_steps, 'step')} the {expert.replace('_', '-')} expert would get none ({why})",
                      cure=f"give {ways}, or train the other one alone with --experts")  # fmt: skip


def _fingerprint(options: Train, samples: Sequence[CachedSample], experts: Sequence[ExpertPlan]) -> dict[str, Any]:
    """Settings by flag name, and digests of data and weights. The length counts where the schedule depends on it."""
    unread = LEARNS_THE_SAME | (SIZES_OF_ADAPTERS if options.train_mode == "full" else set())
    pinned = [option.name for option in flags_of(Train) if option.flag.pinned and option.name not in unread]
    found: dict[str, Any] = {name: str(getattr(options, name)) for name in pinned}
    length = sum(expert.num_steps for expert in experts) if depends_on_length(options) else "any"
    found |= {"recipe": RECIPE, "length of the schedule": length, "dataset": dataset_digest(samples)}
    if options.num_timestep_buckets:
        found["strata"] = "counted over the run"  # once over each epoch
    found["base_weights"] = [lora_identity(path) for path in options.base_weights]
    if not reads_share(options, len(experts)):
        found[SHARE] = str(None)
    for expert in experts:
        found[f"dit{expert.suffix}"] = headers.identity(expert.dit, expert.flag)
        found[f"network_weights{expert.suffix}"] = lora_identity(expert.start) if expert.start else ""
    return found


def reads_share(options: Train, num_experts: int) -> bool:
    """Whether what is learned depends on `--high_noise_share`, beyond how many steps each expert gets."""
    return num_experts > 1 and depends_on_length(options)


def dataset_digest(samples: Sequence[CachedSample]) -> str:
    """What a fingerprint calls `dataset`: the names and entries of what is trained on, and how often it is."""
    data = [
        [s.sample.name, *(entry.key for entry in s.entries), s.sample.entry.num_repeats, s.sample.entry.batch_size,
         s.sample.entry.is_reg]
        for s in samples
    ]  # fmt: skip
    return digest(data)


def dataset_aspects(samples: Sequence[CachedSample]) -> dict[str, Any]:
    """What `dataset_digest` takes together, apart: by name a digest of each, and the number of the samples."""
    shown = [replace(s, texts=(), empty=None) for s in samples]
    asked = {
        "files": [[s.sample.name, s.sample.source.digest] for s in samples],
        "samples": [[s.sample.name, *(entry.key for entry in s.entries)] for s in shown],
        "captions": [[entry.key for entry in s.texts] for s in samples],
        "empty prompt": [s.empty and s.empty.key for s in samples],
        **{name: [getattr(s.sample.entry, name) for s in samples] for name in ("num_repeats", "batch_size", "is_reg")},
    }
    return {"number": len(samples)} | {name: digest(values) for name, values in asked.items()}
