"""What `wangen publish` says is still to be done."""

from collections.abc import Collection, Iterator
from pathlib import Path

import click

from wangen.generator.bundle import PROMPTS, find_weights, needed_weights, prompts_file
from wangen.generator.errors import WangenError
from wangen.generator.models.places import named_tokenizer
from wangen.generator.paths import is_absolute_anywhere
from wangen.generator.publish.prompt_pictures import named_pictures
from wangen.generator.target import Target
from wangen.generator.tokenizer_file import find_tokenizer, home_of
from wangen.generator.workspace import Workspace
from wangen.profiles import Model


def say_next(place: Workspace, targets: Collection[Target], model: Model, slug: str) -> None:
    """What is still to be done: the weights that are not there, and the script to run."""
    missing: dict[str, list[str]] = {}
    needed: dict[str, None] = {}
    lacks_tokenizer = False
    for target in targets:
        for weights in needed_weights(place, target, model):
            needed[weights.flag] = None
            path = find_weights(target, weights)
            seen = target.reach(path)
            if weights.flag == "t5" and seen is not None:
                lacks_tokenizer |= _lacks_tokenizer(place, target, model, seen)
            if seen is None or not seen.exists():
                name = target.platform.name if seen else f"{target.platform.name}, not seen from here"
                missing.setdefault(path.replace("\\", "/"), []).append(name)
    for path, names in missing.items():
        where = "" if is_absolute_anywhere(path) else " in the bundle"
        click.echo(f"next: put the weights to {path}{where} ({', '.join(names)})")
    if lacks_tokenizer:
        click.echo(f"next: put the tokenizer, the folder {home_of(model)}, beside the text encoder")
    if missing or lacks_tokenizer:
        # Of two experts one may be trained alone.
        all_of_it = needed.keys() == {weights.flag for weights in model.weights}
        words = model.name if all_of_it else f"{' '.join(needed)} tokenizer --task {model.name}"
        click.echo(f"      or fetch them with: wangen models download {words}")
        click.echo("      or say in wangen.toml, below [platform.NAME], where they are: models = 'C:/ComfyUI/models'")
        click.echo("      (found by their usual names in any folder there: wangen models list), then publish again")
    for picture in dict.fromkeys(name for target in targets for name in _pictures(place, target, model)):
        click.echo(f"next: put {picture}, which the sample prompts name, into files/{PROMPTS} in the bundle")
    click.echo(f"next: see what is missing with: wangen check {slug}    and run train_{slug} in the bundle")


def _pictures(place: Workspace, target: Target, model: Model) -> Iterator[str]:
    """The pictures with relative paths that a bundle's sample prompts name and that it has not, as they are written."""
    file, folders = prompts_file(place, target, model), (target.folder, target.folder / "files" / PROMPTS)
    for name in named_pictures(file) if file else ():
        if not any((folder / name).is_file() for folder in folders):
            yield name


def _lacks_tokenizer(place: Workspace, target: Target, model: Model, text_encoder: Path) -> bool:
    """Whether no tokenizer lies near a text encoder, and none is named."""
    if named_tokenizer(target, place):
        return False
    try:
        find_tokenizer(text_encoder, model)
    except WangenError:
        return True
    return False
