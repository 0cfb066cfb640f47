"""How one dataset is published: its section `[dataset.SLUG]` of `wangen.toml`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from wangen.generator import tomls
from wangen.generator.errors import UsageError
from wangen.generator.memory import PLAIN_MEMORY
from wangen.generator.paths import slugify
from wangen.generator.platforms import step_values
from wangen.generator.resolutions import parse_resolution
from wangen.generator.steps import Train
from wangen.generator.toml_values import whole_number
from wangen.profiles import Model


@dataclass(frozen=True)
class Fit:
    """What `publish --fit` chose.

    Attributes:
        card: what it was chosen for, in words.
        flags: the memory flags of training.
    """

    card: str
    flags: Mapping[str, Any]

    @classmethod
    def read(cls, value: Any, where: str) -> "Fit":
        """From the table `fit`.

        Raises:
            UsageError: it is no table, or has other keys or values than `publish --fit` writes.
        """
        if not isinstance(value, dict) or not isinstance(value.get("card", ""), str):
            raise UsageError(f"fit must be a table, as publish --fit writes it, got {value!r}", where=where,
                             cure="remove it and publish again with --fit")  # fmt: skip
        tomls.refuse_unknown(value, {"card", *PLAIN_MEMORY}, f"{where}, fit")
        flags = {name: given for name, given in value.items() if name != "card"}
        return cls(value.get("card", ""), step_values({Train.command: flags}, f"{where}, fit of [")[Train.command])

    def as_toml(self) -> dict[str, Any]:
        """As `wangen.toml` has it."""
        return {"card": self.card, **self.flags}


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """How one dataset is published: `[dataset.SLUG]`.

    Attributes:
        source: its folder or jsonl, absolute or relative to the workspace; None: `datasets/SLUG`.
        model: name of its model profile; None for the workspace's.
        resolutions: bucket areas as (width, height) in pixels; empty for the model profile's.
        resize: publish smaller copies of the images.
        trigger: word put in front of every caption; empty for none.
        batch_size: items per batch.
        num_repeats: how often an item stands in an epoch.
        is_reg: a regularisation set, whose loss counts `--prior_loss_weight`: for a TOML that names it beside others.
        footage: folder of long videos as the machine that trains writes it, or below the bundle's root, in place of a
            source: the script's first step cuts them into clips; empty for none.
        fit: memory flags of training that fit a card; None where none were chosen.
    """

    source: str | None = None
    model: str | None = None
    resolutions: tuple[tuple[int, int], ...] = ()
    resize: bool = False
    trigger: str = ""
    batch_size: int = 1
    num_repeats: int = 1
    is_reg: bool = False
    footage: str = ""
    fit: Fit | None = None

    def sizes(self, model: Model) -> tuple[tuple[int, int], ...]:
        """The resolutions that it is published in, as (width, height) in pixels."""
        return self.resolutions or (model.resolution,)


def read_settings(section: Any, name: str, file: Path) -> DatasetSettings:
    """The checked values of `[dataset.SLUG]`.

    Args:
        section: as it stands in the file.
        name: its slug.
        file: `wangen.toml`.

    Raises:
        UsageError: an unknown key, or a wrong value.
    """
    where = f"{file}, [dataset.{name}]"
    if not isinstance(section, dict):
        raise UsageError(f"dataset.{name} is no section", where=str(file), cure=f"write [dataset.{name}]")
    if slugify(name) != name:
        raise UsageError(f"{name!r} is no slug", where=str(file), cure=f"write [dataset.{slugify(name)}]")
    tomls.refuse_unknown(section, {field.name for field in fields(DatasetSettings)}, where)
    values = dict(section)
    for key in ("source", "model", "trigger", "footage"):
        if key in values and (not isinstance(values[key], str) or not values[key].isprintable()):
            raise UsageError(f"{key} must be a text in quotes, got {values[key]!r}", where=where)
    if (trigger := values.get("trigger", "")) != trigger.strip():
        raise UsageError(f"{trigger!r} is no trigger word", where=where, cure="take the spaces around it out")
    for key in ("resize", "is_reg"):
        if not isinstance(values.get(key, False), bool):
            raise UsageError(f"{key} must be true or false, got {values[key]!r}", where=where)
    for key in ("batch_size", "num_repeats"):
        if key in values:
            whole_number(key, values[key], where)
    if "resolutions" in values:
        raw = values["resolutions"]
        names = raw if isinstance(raw, list) else [raw]
        values["resolutions"] = tuple(dict.fromkeys(parse_resolution(str(size), where) for size in names))
    if "fit" in values:
        values["fit"] = Fit.read(values["fit"], where)
    return DatasetSettings(**values)
