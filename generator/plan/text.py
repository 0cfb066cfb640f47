"""A plan as people read it, and as JSON."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import psutil

from wangen.generator.errors import bytes_text, many
from wangen.generator.memory import GIB, gib_text
from wangen.generator.plan.cures import told
from wangen.generator.plan.estimate import RunPlan, Seconds
from wangen.generator.plan.planning import Planned
from wangen.generator.plan.saves import most_bytes

FORMAT = 1
"""Of the JSON: it counts up when a key changes its meaning or goes."""

_SHOWN = 8


def lines(planned: Planned) -> Iterator[str]:
    """The plan for the terminal."""
    plan, survey = planned.plan, planned.survey
    yield f"{planned.script.name}: {plan.model.title}, {_way(plan)}"
    yield f"  card      {_card(planned)}"
    yield f"  dataset   {_dataset(planned)}"
    yield ""
    yield from _table(plan)
    yield ""
    yield from _memory(planned)
    yield ""
    yield f"  disk      {_disk(planned)}"
    yield f"  time      {_time(planned)}"
    for note in planned.notes:
        yield f"  note      {note}"
    if not survey.exact:
        yield "  note      memory is for the largest shape that the settings ask for"
    yield from _verdict(planned)


def _way(plan: RunPlan) -> str:
    train = plan.train
    what = "every weight" if train.train_mode == "full" else f"{train.network_module}, rank {train.network_dim}"
    several = f", {plan.processes} processes" if plan.processes > 1 else ""
    return what + several + (" that share out the weights" if plan.settings.shards > 1 else "")


def _card(planned: Planned) -> str:
    gpu = planned.plan.gpu
    if gpu is None:
        return "none is known"
    free = f", {gib_text(gpu.free)} of it free now" if planned.here and gpu.free < gpu.memory else ""
    speed = f", {gpu.card.tflops:g} TFLOP/s in bfloat16" if gpu.card else ", of unknown speed"
    return f"{gpu}{free}{speed}"


def _dataset(planned: Planned) -> str:
    plan, survey = planned.plan, planned.survey
    if not survey.exact:
        return "not there yet"
    what = " and ".join(filter(None, (
        many(survey.num_images, "image") if survey.num_images else "",
        many(survey.num_clips, "clip") if survey.num_clips else "",
    )))  # fmt: skip
    steps = f"{many(plan.steps_per_epoch, 'step')} an epoch, {many(plan.num_steps or 0, 'step')} in all"
    return f"{what} in {many(len(plan.shapes), 'bucket')}; {steps}"


def _table(plan: RunPlan) -> Iterator[str]:
    """The shapes, those that need most memory first."""
    rows = [("bucket", "samples", "batch", "tokens", "TFLOP", "seconds")]
    for one in plan.shapes[:_SHOWN]:
        rows.append((str(one.shape), str(one.samples), str(one.shape.batch_size), f"{one.tokens:,}",
                     f"{one.flops.done / 1e12:,.3g}", _range(one.seconds)))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first = row[0].ljust(widths[0])
        yield "  " + "  ".join([first, *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
    if len(plan.shapes) > _SHOWN:
        yield f"  and {len(plan.shapes) - _SHOWN} smaller buckets"


def _memory(planned: Planned) -> Iterator[str]:
    plan = planned.plan
    yield f"  memory of the card, for a batch of {plan.shapes[0].shape}:"
    parts = {name: size for name, size in plan.budget.parts.items() if size}
    for name, size in [*parts.items(), ("together", plan.budget.device)]:
        yield f"    {name:32} {size / GIB:7.2f} GiB"
    if plan.usable is not None:
        yield f"    {'that a run may take of it':32} {plan.usable / GIB:7.2f} GiB"
    if plan.budget.host or planned.here:
        has = f" of {psutil.virtual_memory().total / GIB:.1f}" if planned.here else ""
        yield f"    {'in host memory':32} {plan.budget.host / GIB:7.2f} GiB{has}"
    if planned.earlier and planned.earlier.peak_memory and plan.gpu:
        yield f"    {'measured by the earlier run':32} {planned.earlier.peak_memory / GIB:7.2f} GiB"


def _disk(planned: Planned) -> str:
    plan, (cache_free, output_free) = planned.plan, planned.free
    there = f", {bytes_text(planned.cached)} of it there" if planned.cached else ""
    cache = f"cache about {bytes_text(plan.cache_bytes)}{there}" if planned.survey.exact else "cache not known"
    most = most_bytes(plan.train, plan.steps_per_epoch or 1, plan.num_steps or 1, plan.state_bytes)
    saved = f"checkpoints up to {bytes_text(most)}"
    free = [bytes_text(number) for number in dict.fromkeys((cache_free, output_free)) if number is not None]
    return f"{cache}, {saved}" + (f"; {' and '.join(free)} free" if free else "")


def _time(planned: Planned) -> str:
    plan, earlier = planned.plan, planned.earlier
    if earlier:
        total = f", {_hours((plan.num_steps * earlier.seconds_per_step,) * 2)} in all" if plan.num_steps else ""
        return f"{earlier.seconds_per_step:.3g} s a step, measured over {earlier.steps} in {earlier.folder}{total}"
    seconds = plan.step_seconds
    if seconds is None:
        return "not known for this card; a try (the word smoke behind the script) measures it"
    total = f", {_hours((plan.num_steps * seconds[0], plan.num_steps * seconds[1]))} in all" if plan.num_steps else ""
    return f"{_range(seconds)} s a step{total}, without caching, validation and samples; an estimate"


def _verdict(planned: Planned) -> Iterator[str]:
    plan, cure = planned.plan, planned.cure
    if plan.fits is None:
        return
    if cure is None:
        assert plan.usable is not None
        yield f"it fits, with {gib_text(plan.usable - plan.budget.device)} left"
        yield from _host(planned, plan.budget.host)
        return
    yield "it does not fit"
    if cure.flags is not None:
        yield f"  do:    {' '.join(cure.changes(plan.train))}   ({gib_text(cure.budget.device)})"
        card = "" if planned.here or plan.gpu is None else f' --gpu "{plan.gpu.as_named}"'
        name = planned.script.slug if planned.script.target else "NAME"  # a script alone may be a renamed copy
        yield f"         wangen publish {name} --fit{card} writes them into the scripts"
    for shape in cure.smaller:
        yield f"  do:    {told(shape, plan.shapes[0].shape)}, then plan again"
    if cure.flags is None and not cure.smaller:
        yield "  do:    train a smaller model, or on a larger card"
    yield from _host(planned, cure.budget.host)


def _host(planned: Planned, needed: int) -> Iterator[str]:
    """Where this machine's own memory is too small for what waits in it."""
    host = psutil.virtual_memory().total
    if planned.here and needed > host:
        yield f"  note:  {gib_text(needed)} of host memory are needed, this machine has {host / GIB:.1f}"


def _range(seconds: Seconds | None) -> str:
    """Seconds, from good to usual.

    >>> _range((0.61, 1.22)), _range((48.1, 96.2)), _range((0.0481, 0.0962)), _range(None)
    ('0.61 to 1.2', '48 to 96', '0.048 to 0.096', '?')
    """
    if seconds is None:
        return "?"
    low, high = (f"{value:.2g}" if value < 100 else f"{value:.0f}" for value in seconds)
    return low if low == high else f"{low} to {high}"


def _hours(seconds: Seconds) -> str:
    """A time for people.

    >>> _hours((3000.0, 6000.0)), _hours((40000.0, 80000.0)), _hours((50.0, 50.0))
    ('50 to 100 minutes', '11 to 22 hours', '1 minute')
    """
    unit, divisor = ("hours", 3600) if seconds[0] > 2 * 3600 else ("minutes", 60)
    low, high = (max(1, round(value / divisor)) for value in seconds)
    if low == high:
        return f"{low} {unit if low > 1 else unit[:-1]}"
    return f"{low} to {high} {unit}"


def as_json(planned: Planned) -> str:
    """The plan as one JSON object; sizes in bytes, times in seconds, ranges as [good, usual]."""
    plan, survey, gpu = planned.plan, planned.survey, planned.plan.gpu
    found: dict[str, Any] = {
        "format": FORMAT,
        "script": planned.script.name,
        "task": plan.model.name,
        "gpu": None if gpu is None else {
            "name": gpu.name, "memory": gpu.memory, "free": gpu.free, "tflops": gpu.card and gpu.card.tflops,
        },
        "processes": plan.processes,
        "shards": plan.settings.shards,
        "images": survey.num_images,
        "clips": survey.num_clips,
        "exact": survey.exact,
        "buckets": list(_buckets(plan)),
        "steps_per_epoch": plan.steps_per_epoch,
        "steps": plan.num_steps,
        "flops_per_step": {"model": plan.flops.model, "done": plan.flops.done},
        "memory": {
            "parts": dict(plan.budget.parts), "device": plan.budget.device, "host": plan.budget.host,
            "usable": plan.usable,
        },
        "fits": plan.fits,
        "disk": {
            "cache": plan.cache_bytes, "cached": planned.cached, "state": plan.state_bytes[0],
            "file": plan.state_bytes[1], "cache_free": planned.free[0], "output_free": planned.free[1],
        },
        "seconds_per_step": plan.step_seconds,
        "measured": None if planned.earlier is None else {
            "seconds_per_step": planned.earlier.seconds_per_step, "peak_memory": planned.earlier.peak_memory,
            "steps": planned.earlier.steps,
        },
        "changes": None if planned.cure is None else {
            "flags": planned.cure.flags and dict(planned.cure.flags),
            "smaller": [told(shape, plan.shapes[0].shape) for shape in planned.cure.smaller],
        },
        "notes": list(planned.notes),
    }  # fmt: skip
    return json.dumps(found, indent=2)


def _buckets(plan: RunPlan) -> Iterable[dict[str, Any]]:
    for one in plan.shapes:
        yield {
            "size": list(one.shape.size), "frames": one.shape.num_frames, "controls": one.shape.num_controls,
            "batch_size": one.shape.batch_size, "samples": one.samples, "batches": one.batches, "tokens": one.tokens,
            "flops": {"model": one.flops.model, "done": one.flops.done}, "seconds": one.seconds,
        }  # fmt: skip
