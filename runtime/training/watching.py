"""The truth while a run goes on: its numbers, held-out loss, samples, and what stops it.

A step's numbers are read later, several together, because reading waits for a GPU; always before anything is saved.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from wangen.generator.flops import NOTHING, StepFlops, step_flops
from wangen.generator.run_folder import METRICS, SAMPLES
from wangen.generator.run_names import BEST
from wangen.generator.sample_prompts import defaults_of, read_prompts
from wangen.runtime.cache import digest
from wangen.runtime.interrupt import Interrupt
from wangen.runtime.loader import background_of
from wangen.runtime.models.inputs import WAN_TEXT_ROWS
from wangen.runtime.training.adapter import disabled, replaced
from wangen.runtime.training.continuing import Continuing
from wangen.runtime.training.facts import (
    BEST_SO_FAR,
    BINS,
    CONTINUATIONS,
    FIRST_LOSS,
    LAST_LOSS,
    LOOKED,
    VALIDATION,
    VALIDATION_BASE,
)
from wangen.runtime.training.held_out import video_key
from wangen.runtime.training.loading import load_base
from wangen.runtime.training.metrics import Metrics, Pending, Record, TimestepBins
from wangen.runtime.training.not_finite import refuse_not_finite
from wangen.runtime.training.pace import Pace
from wangen.runtime.training.plan import Plan, dataset_digest
from wangen.runtime.training.prepared import Prepared
from wangen.runtime.training.ranks import Ranks
from wangen.runtime.training.run import Run, Trainee
from wangen.runtime.training.sampling import cut_samples, make_samples, samples_due, training_scenes
from wangen.runtime.training.saving import save_best
from wangen.runtime.training.step import StepResult, item_errors
from wangen.runtime.training.throughput import (
    Throughput,
    of_all,
    peak_tflops,
    profiled,
    sizes_of,
)
from wangen.runtime.training.trackers import Trackers, open_trackers
from wangen.runtime.training.validation import (
    Losses,
    Validation,
    compare,
    evaluating,
    is_better,
    measure,
    validation_sigmas,
)

log = logging.getLogger("wangen")


_SAMPLES = ("samples", "continuations")


class _BrokenOffError(Exception):
    """An interrupt came while something was made that a later start makes."""


class Watching:
    """What is looked at, logged and judged while a run goes on; a context manager around all of it."""

    def __init__(self, plan: Plan, device: torch.device, step: int, ranks: Ranks) -> None:
        """Encode the prompts of the samples and read what is continued, before the transformer loads.

        Args:
            plan: of the run.
            device: where it will train.
            step: where it begins.
            ranks: the processes that train together; the first of them writes.

        Raises:
            WangenError: the prompt file has mistakes, its weights are of another kind, or no clip can be continued.
        """
        self._plan, self._options, self._device, self._step = plan, plan.options, device, step
        self._ranks = ranks
        self._items = dataset_digest(plan.held_out)
        self._continuing = Continuing(plan, ranks)  # clips that are too short are refused before a prompt is encoded
        file = self._options.sample_prompts if ranks.is_first or ranks.in_step else None
        defaults = {**defaults_of(plan.model), "background_color": background_of(plan.samples)}
        prompts = read_prompts(file, plan.model, self._options.seed, defaults) if file else []
        self._scenes = training_scenes(plan.model, prompts, self._options, device)
        self._pending = Pending(device, ranks=ranks)
        self._bins = {expert.name: TimestepBins() for expert in plan.experts}
        peak = peak_tflops(device, self._options.peak_tflops)
        self._rates = Throughput(
            device, peak, communication=ranks.communication if ranks.count > 1 else None,
            pace=Pace(device, reads_cache=self._options.cache_mode == "cached"),
        )  # fmt: skip
        self._stack = contextlib.ExitStack()
        self._shown, self._counts = "", True

    def __enter__(self) -> "Watching":
        trace = self._options.output_dir if self._options.profile and self._ranks.is_first else None
        self._profile = self._stack.enter_context(profiled(trace, self._step, self._rates.paused))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def begin(self, run: Run, interrupt: Interrupt) -> bool:
        """Open the logs, which the run takes over from an earlier one, and look at the model before its first step.

        Args:
            run: with the weights where they were left.
            interrupt: breaks off what is looked at.

        Returns:
            False when it did; a later start looks at what was left.
        """
        self._run, self._interrupt = run, interrupt
        self._sizes = {
            trainee.plan.name: (
                sizes_of(trainee.transformer.config),
                trainee.num_trained if self._options.train_mode == "lora" else 0,
            )
            for trainee in run.trainees
        }
        names = [expert.name for expert in self._plan.experts]
        self._write: Callable[[Mapping[str, Any]], None] = lambda _record: None
        self._trackers = Trackers({})
        if self._ranks.is_first:
            metrics = Metrics(self._options.output_dir / METRICS, self._step, names, name=self._plan.name)
            self._write = self._stack.enter_context(metrics).log
            named = replace(self._options, output_name=self._plan.name)
            self._trackers = self._stack.enter_context(open_trackers(named, self._step))
            goes_on = run.step > 0 or LOOKED in run.facts
            cut_samples(self._options.output_dir / SAMPLES, self._plan.name, run.step, keep=goes_on)
        for name, bins in self._bins.items():
            bins.load(run.facts.get(BINS, {}).get(name))
        whole = self.look() if run.step == 0 or LOOKED in run.facts else True
        self._rates.rates()
        return whole

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Around reading a batch."""
        return self._rates.waiting()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Around what is no training: looking and saving."""
        return self._rates.paused()

    def after(self, result: StepResult) -> str:
        """Take note of a step; returns what the progress bar shows.

        Raises:
            WangenError: a loss or a gradient was not finite.
        """
        run = self._run
        self._rates.count(len(result.names), sum(result.tokens), self._work(result))
        self._profile()
        self._take(self._pending.add(vars(result)))
        if FIRST_LOSS not in run.facts:
            self.settle()
        return self._shown

    def settle(self) -> None:
        """Read every number that is still on the device.

        Raises:
            WangenError: a loss or a gradient was not finite.
        """
        self._take(self._pending.read())
        self._note_bins()

    def _note_bins(self) -> None:
        self._run.facts[BINS] = {name: bins.as_facts() for name, bins in self._bins.items()}

    def _work(self, result: StepResult) -> StepFlops:
        sizes, trained = self._sizes[result.expert]
        assert self._options.checkpointing is not None
        of_size = partial(
            step_flops, sizes, image_tokens=result.image_tokens, joint=self._is_joint, adapter_weights=trained,
            checkpointing=self._options.checkpointing, free_blocks=self._options.checkpointing_free_blocks or 0,
            train_base=self._options.train_mode == "full", whole_blocks=self._options.plain,
        )  # fmt: skip
        padded = self._options.plain and not self._is_joint
        texts = [WAN_TEXT_ROWS] * len(result.names) if padded else result.text_tokens
        alike = Counter(zip(result.tokens, texts, strict=True))  # attention's work is no mean of sizes
        return sum((of_size(n, text_tokens=rows) * count for (n, rows), count in alike.items()), NOTHING)

    @property
    def _is_joint(self) -> bool:
        """Text and picture are one sequence, so that texts are not padded either."""
        return self._plan.model.prompt is not None

    def _take(self, records: list[Record]) -> None:
        rates = of_all(self._ranks.gathered(self._rates.rates())) if records else {}
        for record in records:
            refuse_not_finite(record, self._run)
            self._warn_of_nothing(record)
            loss = sum(record["losses"]) / len(record["losses"])
            facts = self._run.facts
            facts.setdefault(FIRST_LOSS, loss)
            facts[LAST_LOSS] = loss
            self._bins[record["expert"]].add(record["sigmas"], record["errors"])
            values = {"loss": loss, "grad_norm": record["grad_norm"], **record["learning_rates"], **rates}
            if record["num_scaled"] is not None:
                values["keys_scaled"] = record["num_scaled"]
            line = {name: record[name] for name in ("step", "epoch", "expert") if record[name] != ""}
            self._write({**line, **values})
            self._trackers.log(record["step"], values, f"train{_group(record['expert'])}")
            self._shown = f"loss {loss:.4f}"

    def _warn_of_nothing(self, record: Mapping[str, Any]) -> None:
        """Say once that nothing of a step counts."""
        if self._counts and not any(record["losses"]):
            self._counts = False
            log.warning("  step %s teaches nothing: no loss of %s counts (its mask is black all over, or "
                        "--prior_loss_weight is 0)", record["step"], ", ".join(record["names"]))  # fmt: skip

    def speed(self) -> dict[str, float]:
        """The rates of this run so far, by the names of `metrics.jsonl`; empty before its first step."""
        return of_all(self._ranks.gathered(self._rates.rates_so_far()))

    def due(self) -> bool:
        """Whether something is to be looked at after this step."""
        return self._validation_due() or self._samples_due() or self._bins_due()

    def look(self, before_samples: Callable[[], None] | None = None) -> bool:
        """Validate and sample, where it is time, and log the loss by timestep at an epoch's end.

        Args:
            before_samples: is called once before them, when what was seen until then is among the run's facts.

        Returns:
            False when an interrupt came: what was done until then is among the run's facts, and not done again.
        """
        done: list[str] = self._run.facts.setdefault(LOOKED, [])
        try:
            for name, part in self._parts():
                if name not in done:
                    if before_samples and name in _SAMPLES:
                        before_samples()
                        before_samples = None
                    part()
                    done.append(name)
            del self._run.facts[LOOKED]
        except _BrokenOffError:
            pass
        return not self._ranks.any(LOOKED in self._run.facts)  # the first may be the only one that samples

    def _check(self) -> None:
        """Raise `_BrokenOffError` when there was an interrupt; all who are in step call it, and raise alike."""
        requested = self._interrupt.requested
        if self._ranks.any(requested) if self._ranks.in_step else requested:
            raise _BrokenOffError

    def _parts(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """What is looked at after this step, by names, in this order."""
        run = self._run
        if self._bins_due():
            yield "bins", self._log_bins
        if self._validation_due():
            for number, trainee in enumerate(run.trainees):
                yield f"validation {trainee.plan.name}", partial(self._validate, number)
        if self._samples_due():
            if self._scenes:
                yield "samples", partial(make_samples, run, self._scenes, check=self._check)
            if self._continuing.clips:
                yield "continuations", self._continue

    def _continue(self) -> None:
        """Continue the held-out clips, and log how near that comes to what was filmed."""
        found = self._continuing.make(self._run, self._check)
        if found is None:
            return
        record = found.as_record()
        self._write({"step": self._run.step, **record})
        self._trackers.log(self._run.step, found.numbers(), "continuations")
        log.info("  %s", found.line())
        self._run.facts[CONTINUATIONS] = record["continuations"]["means"]

    def _bins_due(self) -> bool:
        step = self._run.step
        return step > 0 and (step % self._plan.steps_per_epoch == 0 or step >= self._run.num_steps)

    def _log_bins(self) -> None:
        """Log what an epoch had so far; at the end of a run that is cut off in one, it may go on."""
        ended = self._run.step % self._plan.steps_per_epoch == 0
        for name, bins in self._bins.items():
            if means := bins.means():
                told = {"loss_by_timestep": means}
                self._write({"step": self._run.step, **({"expert": name} if name else {}), **told})
                self._trackers.log(self._run.step, told, f"train{_group(name)}")
            if ended:
                bins.clear()
        self._note_bins()

    def _samples_due(self) -> bool:
        step, plan = self._run.step, self._plan
        made = bool(self._scenes or self._continuing.clips)
        return made and samples_due(self._options, step, plan.steps_per_epoch, self._run.num_steps)

    def _validation_due(self) -> bool:
        if not self._plan.held_out:
            return False
        every = self._options.validate_every_n_steps or self._plan.steps_per_epoch
        return self._run.step % every == 0 or self._run.step >= self._run.num_steps

    def _validate(self, number: int) -> None:
        """Judge an expert by the held-out items, and keep it or its average when that is the best so far."""
        trainee = self._run.activate(number)
        facts, name = self._run.facts, trainee.plan.name
        bases = facts.setdefault(VALIDATION_BASE, {})
        with evaluating(trainee.transformer):
            judged, kept = self._judged(trainee), bases.get(name)
            known = Losses.from_facts(kept) if kept and kept.get("judged", judged) == judged else None
            points = self._measure(trainee) if self._is_changed(trainee) else None
            if known is None or (points and not known.same_points(points)):
                known = self._measure_base(trainee)
                bases[name] = known.as_facts() | {"judged": judged}
                facts.get(BEST_SO_FAR, {}).pop(name, None)  # it was judged at other points
            averaged = None
            if trainee.ema and trainee.step:
                averaged = self._measure(trainee, trainee.ema.weights())
        found = compare(known, points or known, list(map(video_key, self._plan.held_out)), averaged)
        self._write({"step": self._run.step, **({"expert": name} if name else {}), **found.as_record()})
        self._trackers.log(self._run.step, found.numbers(), f"validation{_group(name)}")
        for line in found.lines()[: None if self._run.step >= self._run.num_steps else 1]:
            log.info("  %s%s", f"{name.replace('_', '-')}: " if name else "", line)
        facts.setdefault(VALIDATION, {})[name] = found.as_record()["validation"]
        self._keep_best(trainee, found, judged)

    def _is_changed(self, trainee: Trainee) -> bool:
        """Whether an expert differs from its base: it was trained, or starts from an adapter."""
        return bool(trainee.step or trainee.plan.start)

    def _judged(self, trainee: Trainee) -> str:
        """A digest of what the losses of an expert are measured at."""
        sigmas = validation_sigmas(self._options, trainee.plan)
        return digest([self._items, self._options.condition_frames, list(sigmas), self._options.seed])

    def _measure(self, trainee: Trainee, weights: Mapping[str, torch.Tensor] = MappingProxyType({})) -> Losses:
        """The held-out losses of an expert, with these weights in place of its own."""
        options, plan = self._options, self._plan

        def judge(prepared: Prepared) -> torch.Tensor:
            self._check()
            return item_errors(self._run.kind, trainee.model, prepared, self._device)

        sigmas = validation_sigmas(options, trainee.plan)
        frames = options.condition_frames or 0
        own: Losses | None = None
        with (
            trainee.optimization.evaluating(),
            replaced(trainee.parameters, weights),
            contextlib.suppress(_BrokenOffError),
        ):
            own = measure(judge, self._ranks.own(plan.held_out), sigmas, options.seed, condition_frames=frames)
        if self._ranks.any(own is None) or own is None:
            raise _BrokenOffError
        count = self._ranks.num_own(plan.held_out)
        keys, values = self._ranks.collected(own.keys[:count]), self._ranks.collected(own.values[:count])
        return replace(own, keys=tuple(keys), values=tuple(values))

    def _measure_base(self, trainee: Trainee) -> Losses:
        """The held-out losses without what was trained; full fine-tuning has changed the weights, so it loads them."""
        if self._options.train_mode == "full" and trainee.step:
            loaded = load_base(self._plan, trainee.plan, self._run.kind, torch.device("cpu"))
            weights = dict(loaded.named_parameters())
            if trainee.sharded:
                weights = {name: trainee.sharded.own(name, value) for name, value in weights.items()}
            return self._measure(trainee, weights)
        with disabled(trainee.transformer):
            return self._measure(trainee)

    def _keep_best(self, trainee: Trainee, found: Validation, judged: str) -> None:
        if not self._options.keep_best or not self._is_changed(trainee):
            return
        best = self._run.facts.setdefault(BEST_SO_FAR, {})
        before = best.get(trainee.plan.name)
        better = is_better(found, before["loss"] if before else None)
        how = {"anew": before is None, "averaged": found.is_average_better}
        if better and save_best(self._run, trainee, judged, **how):
            file = self._plan.file(trainee.plan, BEST)
            best[trainee.plan.name] = {"loss": found.lowest, "step": self._run.step, "file": file.name}


def _group(expert: str) -> str:
    return f"_{expert}" if expert else ""
