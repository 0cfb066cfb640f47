"""`wangen publish --fit`: memory flags for a card, found from what was just published, kept with the dataset."""

from collections.abc import Sequence

from wangen.generator.bundle import told_of_training
from wangen.generator.cards import Gpu
from wangen.generator.dataset_settings import Fit
from wangen.generator.errors import WangenError
from wangen.generator.memory import gib_text
from wangen.generator.memory_changes import FASTEST
from wangen.generator.plan.cures import find_cure, told
from wangen.generator.plan.planning import plan_script
from wangen.generator.plan.scripted import published_script, read_script
from wangen.generator.target import Target
from wangen.generator.workspace import Workspace
from wangen.profiles import Model


def choose(
    place: Workspace, targets: Sequence[Target], model: Model, slug: str, cards: Sequence[Gpu], *, here: bool
) -> tuple[Fit, str]:
    """The memory flags that fit the smallest card and cost the least time, and a sentence about them.

    Args:
        place: the workspace.
        targets: where the dataset is published; what it has for this machine is planned, else the first.
        model: what is trained.
        slug: the dataset.
        cards: of which it trains on all, or on one that was named.
        here: they are this machine's.

    Raises:
        WangenError: nothing makes the dataset fit it.
    """
    target = min(targets, key=lambda one: not one.is_native)
    script = published_script(target, slug)
    if script is None:
        raise WangenError("its script is not there", where=str(target.folder), cure=f"wangen publish {slug}")
    gpu = min(cards, key=lambda one: one.memory)
    unfitted = read_script(script, target).without_preset()
    plan = plan_script(unfitted, gpu, num_cards=len(cards), here=here).plan
    fixed = told_of_training(place, target, model).keys() & {*FASTEST, "pack"}
    found, largest = find_cure(plan, fixed), plan.shapes[0].shape
    if found.flags is None:
        before = place.dataset(slug).fit
        kept = f"keep those for {before.card}" if before else "are published without"
        raise WangenError(
            f"{largest} does not fit {gpu} by any memory flags; the scripts {kept}", where=slug,
            cure="; or ".join(told(one, largest) for one in found.smaller) or "train a smaller model",
        )  # fmt: skip
    flags = {name: value for name, value in found.flags.items() if name not in fixed}
    return Fit(str(gpu), flags), f"fitted to {gpu}: about {gib_text(found.budget.device)} of it"
