"""Whether the LoRA is good and which checkpoint to use: by an evaluation, else by held-out loss, else unknown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

from wangen.generator.errors import many
from wangen.runtime.evaluation_file import Evaluation, Row
from wangen.runtime.report.charts import comparable, experts_of, validations
from wangen.runtime.report.run_files import LoraFile, RunFiles, file_names
from wangen.runtime.report.step_reports import is_number
from wangen.runtime.trained_on import fingerprints, may_have_seen

Level = Literal["good", "unsure", "bad", "unknown"]

FORGOTTEN = 0.02
"""Share by which the loss on a set outside of the training may rise before it is held against a checkpoint."""


@dataclass(frozen=True)
class Verdict:
    """The answer, in plain words.

    Attributes:
        level: how good it is.
        headline: the answer in a sentence.
        use: file names of the LoRA to use, one for each expert; empty when nothing can be said.
        basis: what it rests on.
        because: what speaks for it.
        against: what speaks against it.
    """

    level: Level
    headline: str
    use: tuple[str, ...]
    basis: str
    because: tuple[str, ...]
    against: tuple[str, ...]


def judge(run: RunFiles) -> Verdict:
    """The verdict on a run."""
    if run.evaluation:
        return _as_it_is_now(_by_evaluation(run.evaluation), run, run.evaluation)
    judged = list(filter(None, (_judge_expert(run, expert) for expert in experts_of(run.records))))
    return _by_validation(judged, run) if judged else _unknown(run)


def _by_evaluation(found: Evaluation) -> Verdict:
    best = found.winner
    percent = _percent(best.mean_loss, found.mean_base)
    because = [
        f"held-out loss {best.mean_loss:.5f} where the base has {found.mean_base:.5f}: {percent}, {best.delta:+.5f}; "
        + best.interval(found.confidence)
        + (f", over {many(found.num_items, 'item')}" if found.num_items else "")
    ]
    lower = [row.name for row in found.per_timestep if row.losses.get(best.name, row.base) < row.base]
    if found.per_timestep:
        because.append(f"better than the base at {len(lower)} of {many(len(found.per_timestep), 'timestep')}")
    if len(found.checkpoints) > 1:
        because.append(f"first of {len(found.checkpoints)} checkpoints: {_order(found)}")
    copies = any(copy.suspicious and copy.checkpoint == best.name for copy in found.memorisation)
    level: Level = "unsure"
    if best.is_worse:
        level, headline = "bad", "Every checkpoint is worse than the base model: do not use this LoRA."
    elif found.num_trained:
        part = f"{found.num_trained} of {many(found.num_items, 'item')} that it was judged by"
        headline = f"How good it is, is not known: it was trained on {part}. First by these is {best.name}."
    elif best.ci_low is None:
        headline = f"A single held-out file does not tell the LoRA from chance; first by it is {best.name}."
    elif best.is_better and copies:
        headline = f"Better on items that it never saw, but it seems to copy training clips: look at {best.name} first."
    elif best.is_better:
        level = "good"
        headline = f"The LoRA has learned something that holds for items it never saw. Use {best.name}."
    else:
        headline = f"No checkpoint is clearly better than the base; the nearest to it is {best.name}."
    against = [*_against(found, best.name), *_later_is_worse(found)]
    use = file_names(best) if level != "bad" and best.mean_loss < found.mean_base else ()
    basis = f"the evaluation of {many(len(found.checkpoints), 'checkpoint')}"
    return Verdict(level, headline, use, basis, tuple(because), tuple(against))


def _as_it_is_now(verdict: Verdict, run: RunFiles, found: Evaluation) -> Verdict:
    """The verdict of an evaluation after which training may have gone on, and written the best LoRA anew."""
    best, judged = found.winner, [one.step for one in found.checkpoints if one.step is not None]
    files, now_of = file_names(best), {lora.file.name: lora.step for lora in run.loras}
    for name, step in zip(files, best.file_steps or (best.step,) * len(files), strict=False):
        now = now_of.get(name)
        if None not in (step, now) and step != now:
            headline = f"{best.name} was judged at step {step} and is of step {now} now: run wangen evaluate again."
            return replace(verdict, level="unsure", headline=headline, use=())
    last = max((lora.step or 0 for lora in run.loras), default=0)
    if judged and last > max(judged):
        on = f"training went on to step {last} since: what came after step {max(judged)} was not judged"
        return replace(verdict, against=(on, *verdict.against))
    return verdict


def _percent(value: float, base: float) -> str:
    change = 100 * (value - base) / base if base else 0.0
    return f"{abs(change):.2g} % {'lower' if change < 0 else 'higher'}"


def _order(found: Evaluation) -> str:
    names = [checkpoint.name for checkpoint in found.ranked]
    return ", ".join(names[:5]) + (f" … and {len(names) - 5} more" if len(names) > 5 else "")


def _against(found: Evaluation, best: str) -> list[str]:
    """What the evaluation itself holds against the best checkpoint."""
    against = [
        f"on {row.name}, which it was not trained on, its loss is {_percent(row.losses[best], row.base)} than the "
        "base's: it has forgotten some of what the base can"
        for row in found.forgetting
        if best in row.losses and row.losses[best] > row.base * (1 + FORGOTTEN)
    ]
    against += [f"worse than the base at timestep {name}" for name in _worse(found.per_timestep, best)]
    against += [f"worse than the base at {name}" for name in _worse(found.per_activity, best)]
    copies = [copy for copy in found.memorisation if copy.suspicious and copy.checkpoint == best]
    if copies:
        against.append(f"videos that nearly repeat a training clip: {len(copies)}, such as one of {copies[0].nearest}")
    return [*against, *found.warnings]


def _worse(rows: Sequence[Row], best: str) -> list[str]:
    return [row.name for row in rows if best in row.losses and row.losses[best] > row.base]


def _later_is_worse(found: Evaluation) -> list[str]:
    last = max((checkpoint.step or 0 for checkpoint in found.checkpoints), default=0)
    step = found.winner.step
    if step is None or step >= last:
        return []
    return [f"training beyond step {step} did not help: the checkpoints up to step {last} are worse"]


@dataclass(frozen=True)
class _Judged:
    """What the held-out loss says of one expert, or of the only transformer."""

    clearly_better: bool
    because: str
    against: tuple[str, ...]
    use: str


def _by_validation(judged: Sequence[_Judged], run: RunFiles) -> Verdict:
    better = all(one.clearly_better for one in judged)
    clearly = "better than the base" if better else "not clearly better than the base"
    against = [line for one in judged for line in one.against]
    if any(may_have_seen(told[-1], told[:-1]) for lora in run.loras if (told := fingerprints(lora.metadata))):
        against.append("what it is judged by may have been trained on: an earlier part of the run, or the LoRA that it "
                       "began from, had other data")  # fmt: skip
    yet, more = ("", "") if run.trains_model else ("; it was not evaluated yet", ", or run wangen evaluate")
    if run.judged_beside:
        yet = f"; the evaluation judged {run.judged_beside} of another run, too"
    against.append(f"a lower loss is not always the better picture: look at the samples{more}")
    return Verdict(
        level="good" if better else "unsure",
        headline=f"By held-out loss alone the {run.trained} is {clearly}{yet}.",
        use=tuple(one.use for one in judged if one.use),
        basis="the held-out loss of the training",
        because=tuple(one.because for one in judged),
        against=tuple(against),
    )


def _judge_expert(run: RunFiles, expert: str) -> _Judged | None:
    """The best step of an expert; None when there is no validation of what was trained."""
    points = validations(run.records, expert)
    trained = [
        (step, told)
        for step, told in points
        if is_number(told.get("mean_adapter")) and (step or told["mean_adapter"] != told.get("mean_base"))
    ]  # before the first step there is something to judge where the run began from a LoRA
    if not trained:
        return None
    trained = comparable(trained)
    step, told = min(trained, key=lambda point: point[1]["mean_adapter"])
    of = f"{expert.replace('_', ' ')}: " if expert else ""
    delta, error, against = told.get("delta"), told.get("standard_error"), []
    average = _lower_average(trained, told["mean_adapter"])
    kept = _kept_average(run.loras, expert, average.step) if average else None
    file = kept or _nearest_file(run.loras, expert, step)
    if step == 0 and not average:
        against.append(f"{of}training made the LoRA that it began from no better")
    if file and not kept and file.step != step:
        if step:
            against.append(
                f"{of}no file was kept of step {step}, the best one; {file.file.name} is of step {file.step}"
            )
        else:
            file = None
    if told["mean_adapter"] < trained[-1][1]["mean_adapter"]:
        against.append(f"{of}after step {step} the held-out loss rose: it began to learn by heart")
    if average and not kept:
        where = ": by that the file that ends in -ema is better" if average.step == trained[-1][0] else ""
        against.append(f"{of}the averaged weights of step {average.step} have {average.loss:.5f}, which is less{where}")
    if not is_number(error):
        against.append(f"{of}one held-out file, or clips of one video, is too few to tell a difference from chance")
    return _Judged(
        clearly_better=is_number(delta) and is_number(error) and delta < -_errors_apart(len(trained)) * error,
        because=of + _in_words(step, told) + (average.as_kept() if average and kept else ""),
        against=tuple(against),
        use=file.file.name if file else "",
    )


class _Average(NamedTuple):
    """Averaged weights that were judged: at which step, and their mean loss."""

    step: int
    loss: float

    def as_kept(self) -> str:
        """The end of a sentence, where they are what was kept."""
        return f"; {self.loss:.5f} by the averaged weights of step {self.step}, which the best file holds"


def _lower_average(trained: Sequence[tuple[int, Mapping[str, Any]]], loss: float) -> _Average | None:
    """The best averaged weights of all validations, if their loss is lower than this one."""
    averages = [_Average(step, value) for step, told in trained if is_number(value := told.get("mean_ema"))]
    lowest = min(averages, key=lambda average: average.loss, default=None)
    return lowest if lowest and lowest.loss < loss else None


def _kept_average(loras: Sequence[LoraFile], expert: str, step: int) -> LoraFile | None:
    """An expert's `-best` that holds the averaged weights of a step (`--keep_best` with `--ema_decay`)."""
    wanted = expert, "best, average", step
    return next((lora for lora in loras if (lora.expert, lora.what, lora.step) == wanted), None)


def _errors_apart(comparisons: int) -> float:
    """How many standard errors the best of so many validations must lie below the base not to be there by chance.

    As for one normal difference at 95 %, by Bonferroni's inequality.

    >>> round(_errors_apart(1), 2), round(_errors_apart(20), 2)
    (1.96, 3.02)
    """
    return NormalDist().inv_cdf(1 - 0.05 / 2 / comparisons)


def _in_words(step: int, told: Mapping[str, Any]) -> str:
    """A validation as a sentence, of what it has."""
    base, delta, error = (told.get(name) for name in ("mean_base", "delta", "standard_error"))
    num_better, num_items = told.get("num_better"), told.get("num_items")
    words = f"held-out loss {told['mean_adapter']:.5f} at step {step}"
    words += f", base {base:.5f}" if is_number(base) else ""
    words += f", difference {delta:+.5f}" if is_number(delta) else ""
    words += f" ± {error:.5f}" if is_number(error) else ""
    if isinstance(num_better, int) and isinstance(num_items, int):
        words += f", better at {num_better} of {many(num_items, 'item')}"
    return words


def _nearest_file(loras: Sequence[LoraFile], expert: str, step: int) -> LoraFile | None:
    """The file saved at this step, `-best` first, else of the nearest step; averages and other layouts last.

    What a later start set aside may be of another line, or of other settings: it comes behind all others.
    """
    known = [lora for lora in loras if lora.expert == expert and lora.step is not None]

    def rank(lora: LoraFile) -> tuple[bool, int, bool, bool, int]:
        distance, aside = abs((lora.step or 0) - step), "set aside" in lora.what
        return aside, distance, "average" in lora.what, lora.what != "best", len(lora.file.name)

    return min(known, key=rank, default=None)


def _unknown(run: RunFiles) -> Verdict:
    finished = [lora.file.name for lora in run.loras if lora.what == "finished"]
    headline = (
        f"Nothing is known of how good this {run.trained} is: it was neither evaluated nor judged by held-out items."
        if run.loras or run.records
        else "There is nothing to judge yet."
    )
    because = (f"the last one saved is {finished[-1]}",) if finished else ()
    more = "" if run.trains_model else " run wangen evaluate,"
    against = (
        f"a training loss does not tell a good {run.trained} from a bad one: look at the samples,{more} or train with "
        "--validation_items 8"
    )
    return Verdict("unknown", headline, (), "nothing yet", because, (against,))
