"""What the videos of an evaluation show: the prompts of a file, or captions of held-out items, of every activity."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, zip_longest
from pathlib import Path

from wangen.generator.errors import UsageError
from wangen.generator.sample_prompts import SamplePrompt
from wangen.generator.steps import Generate
from wangen.profiles import Model
from wangen.runtime.evaluation.tables import activity_of
from wangen.runtime.loader import CachedSample, background_of
from wangen.runtime.media import target_frames
from wangen.runtime.samples import make_folder
from wangen.runtime.sampling.options import prompts_of


def choose_prompts(
    sampling: Generate, model: Model, items: Sequence[CachedSample], limit: int, folder: Path
) -> list[tuple[str, SamplePrompt]]:
    """Activities and prompts, each with as many seeds as `--num_videos`.

    Args:
        sampling: what `generate` would be told, resolved.
        model: of image-to-video takes the first frames of the items.
        items: held out; their captions are taken where there is no prompt file.
        limit: on how many captions.
        folder: where first frames are written.

    Raises:
        UsageError: a prompt asks for what cannot be.
    """
    if sampling.prompt_file:
        own = replace(sampling, background_color=background_of(items))
        return [(prompt.prompt, prompt) for prompt in prompts_of(own, model)]
    found, pictured = [], model.condition not in ("text", "controls")
    for item in islice(_by_turns(items, pictured), min(limit, len(items))):
        caption = item.sample.item.caption
        if not (caption or pictured):
            raise UsageError(f"the caption of {item.sample.name} is empty: it says no video",
                             cure="say what to show with --prompt_file, or give --num_videos 0")  # fmt: skip
        image = _first_frame(item, folder) if pictured else None
        controls = item.sample.item.controls if model.max_controls else ()
        own = replace(sampling, prompt=caption, image_path=image, control_image_path=controls,
                      background_color=item.sample.entry.background_color)  # fmt: skip
        found += [(activity_of(item), prompt) for prompt in prompts_of(own, model)]
    return found


def _by_turns(items: Sequence[CachedSample], pictured: bool = False) -> Iterator[CachedSample]:
    """One item of every caption, and of its control images, of every activity in turn.

    Of items that are `pictured`, shown by their first frames, and whose caption is empty each is another.
    """
    groups: dict[str, dict[tuple[str, ...], CachedSample]] = {}
    for item in items:
        asked = item.sample.item.caption, *(entry.content_key for entry in item.controls)
        if pictured and not item.sample.item.caption:
            asked = (item.key,)
        groups.setdefault(activity_of(item), {}).setdefault(asked, item)
    turns = zip_longest(*(group.values() for group in groups.values()))
    return filter(None, chain.from_iterable(turns))


def _first_frame(item: CachedSample, folder: Path) -> Path:
    """The first frame of a held-out clip, as a picture."""
    from PIL import Image

    make_folder(folder, "folder of first frames", "give another --output_dir")
    path = folder / f"{item.latent.key}.png"
    frame = target_frames(item.sample, first_only=True)[:, 0].transpose(1, 2, 0)
    Image.fromarray(frame).save(path)
    return path
