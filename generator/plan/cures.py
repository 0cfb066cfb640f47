"""What to change when a run does not fit its card: flags first, then smaller pictures or shorter clips."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from wangen.generator.memory import MemoryBudget, batches_of_a_pass, memory_plan, memory_settings
from wangen.generator.memory_changes import as_flag, fitting_flags, shared_out
from wangen.generator.plan.estimate import RunPlan, memory_tokens
from wangen.generator.plan.shapes import Shape
from wangen.generator.resolutions import resolution_name
from wangen.generator.small_steps import graphs_bytes
from wangen.generator.steps import Train


@dataclass(frozen=True)
class Cure:
    """What makes a run fit.

    Attributes:
        flags: all memory flags as they should be; None when no flags are enough.
        budget: memory that the run then takes.
        smaller: shapes that fit with the flags that take least, in place of the largest one.
    """

    flags: Mapping[str, Any] | None
    budget: MemoryBudget
    smaller: tuple[Shape, ...] = ()

    def changes(self, train: Train) -> list[str]:
        """The flags that differ from those of the run, as they are typed."""
        changed = {name: value for name, value in (self.flags or {}).items() if value != getattr(train, name)}
        return [as_flag(name, value) for name, value in changed.items()]


def find_cure(plan: RunPlan, fixed: Collection[str] = ()) -> Cure:
    """The flags that fit the plan's card, and where none do the shapes that would.

    Args:
        plan: of the run, with a card.
        fixed: flags that stay.
    """
    assert plan.usable is not None
    settings, rows, usable = plan.settings, plan.rows, plan.usable

    def budget(train: Train, tokens: int) -> MemoryBudget:
        chosen = replace(memory_settings(train, settings.shards), stored_bits=settings.stored_bits)
        return memory_plan(plan.model, chosen, tokens=tokens * batches_of_a_pass(train))

    def needed_for(tokens: int) -> Callable[[Train], int]:
        return lambda train: budget(train, tokens).device

    def spared(train: Train) -> int:
        return graphs_bytes(train, largest.tokens * batches_of_a_pass(train), plan.model.transformer.dim)

    train = shared_out(plan.train, settings.shards)
    largest = plan.shapes[0]
    flags = fitting_flags(train, plan.model, needed_for(largest.tokens), usable, fixed, spared)
    if flags is not None:
        return Cure(flags, budget(replace(plan.train, vram=None, **flags), largest.tokens))

    def fits(shape: Shape) -> bool:
        needed = needed_for(memory_tokens(shape, plan.model, rows))
        return fitting_flags(train, plan.model, needed, usable, fixed) is not None

    ways = (_one_at_a_time(largest.shape), _shorter(largest.shape), _narrower(largest.shape, plan.model.bucket_step))
    found = (next(filter(fits, way), None) for way in ways)
    return Cure(None, plan.budget, tuple(shape for shape in found if shape))


def _one_at_a_time(shape: Shape) -> Iterator[Shape]:
    if shape.batch_size > 1:
        yield replace(shape, batch_size=1)


def _shorter(shape: Shape) -> Iterator[Shape]:
    """Fewer frames, the most first; one batch at a time. A clip stays one: of a single frame it would be a picture."""
    yield from (replace(shape, num_frames=count, batch_size=1) for count in range(shape.num_frames - 4, 4, -4))


def _narrower(shape: Shape, step: int) -> Iterator[Shape]:
    """Smaller pictures of about this aspect ratio, the largest first; one batch at a time."""
    width, height = shape.size
    for across in range(width - step, 0, -step):
        down = max(step, round(across * height / width / step) * step)
        yield replace(shape, size=(across, down), batch_size=1)


def told(shape: Shape, instead_of: Shape) -> str:
    """How a user publishes a dataset in a smaller shape."""
    if shape.size != instead_of.size:
        return f"smaller pictures: --resolution {resolution_name(shape.size)}"
    if shape.num_frames != instead_of.num_frames:
        return f"shorter clips: num_frames = {shape.num_frames} in wangen.toml"
    return "one item at a time: batch_size = 1 in wangen.toml"
