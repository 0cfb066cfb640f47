"""The memory flags of training that a published script has, as `vram` in `wangen.toml` chooses them."""

from collections.abc import Mapping
from typing import Any

from wangen.generator.commands import build
from wangen.generator.launch import asks_for_several
from wangen.generator.memory import PLAIN_MEMORY, memory_of
from wangen.generator.memory_presets import for_smaller_steps, with_preset
from wangen.generator.steps import Train
from wangen.generator.table import options
from wangen.profiles import Model

AUTO = "auto"
"""`vram` that is left to the machine that trains."""


def memory_flags(
    model: Model, told: Mapping[str, Any], paths: Mapping[str, str], tokens: int | None = None
) -> dict[str, Any]:
    """The flags, all of them; with `auto` none, for they are left to the card.

    Args:
        model: what is trained.
        told: what the workspace says of training.
        paths: the other flags that a script has.
        tokens: of the largest batch, where it is known and may be smaller than what the preset is made for.
    """
    vram = told.get("vram")
    if vram in (None, AUTO):
        return {} if vram else dict(PLAIN_MEMORY)
    names = {option.name for option in options(Train)}
    train = build(Train, {name: value for name, value in {**paths, **told}.items() if name in names})
    assert isinstance(train, Train)
    found = with_preset(train, model, str(vram))
    if tokens and not asks_for_several(train.gpus):
        found = for_smaller_steps(found, train, model, tokens)
    return memory_of(found)
