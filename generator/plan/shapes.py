"""A dataset as training meets it: which shapes there are, how often each is drawn, and what the cache will hold."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from wangen.generator.cache_sizes import Encoding, Texts, sample_bytes, text_rows
from wangen.generator.dataset import Item, MediaFacts, media_of, read_facts
from wangen.generator.errors import WangenError, many
from wangen.generator.geometry import area_size, bucket_of, clip_frames, windows
from wangen.generator.items import read_items
from wangen.generator.toml_values import longest_clip
from wangen.generator.tomls import DatasetEntry
from wangen.profiles import Model


@dataclass(frozen=True, order=True)
class Shape:
    """Samples that can share a batch.

    Attributes:
        size: (width, height) in pixels.
        num_frames: 4n+1; 1 of an image.
        num_controls: control images.
        batch_size: samples in a batch.
        control_size: (width, height) of the control images; None: that of the sample.
    """

    size: tuple[int, int]
    num_frames: int
    num_controls: int = 0
    batch_size: int = 1
    control_size: tuple[int, int] | None = None

    def __str__(self) -> str:
        """For people: 832x480x81, or 1024x1024x1 + 1 control; its batch size is left out."""
        controls = f" + {many(self.num_controls, 'control')}" if self.num_controls else ""
        return "x".join(map(str, (*self.size, self.num_frames))) + controls


@dataclass
class Survey:
    """A dataset's samples.

    Attributes:
        num_images: files, those of several resolutions once for each.
        num_clips: clips cut from files.
        samples: how many there are of each shape.
        uses: how many of each an epoch has: samples times `num_repeats`.
        cache_bytes: about what their entries take.
        text_rows: about the rows of all captions' embeddings, and the number of captions.
        problems: files that could not be looked at.
        exact: False where the files are not there yet and shapes are those of the settings.
    """

    num_images: int = 0
    num_clips: int = 0
    samples: Counter[Shape] = field(default_factory=Counter)
    uses: Counter[Shape] = field(default_factory=Counter)
    cache_bytes: int = 0
    text_rows: tuple[int, int] = (0, 0)
    problems: list[str] = field(default_factory=list)
    exact: bool = True

    @property
    def mean_rows(self) -> int:
        """About the rows of a caption."""
        rows, number = self.text_rows
        return -(-rows // number) if number else 0


def survey(entries: Iterable[DatasetEntry], model: Model, encoding: Encoding) -> Survey:
    """Look at every file of a dataset's blocks, without decoding any.

    Args:
        entries: the blocks of its TOML.
        model: what is trained.
        encoding: how the cache is made.

    Raises:
        WangenError: a folder or manifest cannot be read, or there is nothing in any.
    """
    found = Survey()
    facts_of = cache(read_facts)  # many lines of a manifest may name one video
    texts = Texts(model, encoding)
    rows = []
    for entry in entries:
        items, problems = read_items(entry, deep=False)
        found.problems += map(str, problems)
        for item in items:
            try:
                facts = facts_of(item.path)
            except WangenError as error:
                found.problems.append(f"{item.path.name}: {error.found}")
                continue
            for shape in _shapes(item, facts, entry, model):
                found.samples[shape] += 1
                found.uses[shape] += entry.num_repeats
                found.num_images += shape.num_frames == 1
                found.num_clips += shape.num_frames > 1
                found.cache_bytes += sample_bytes(
                    item, shape.size, shape.num_frames, model, encoding, shape.control_size
                )
            found.cache_bytes += texts.added_bytes(item, entry.cache_directory)
            rows += [text_rows(model, caption, len(item.controls)) for caption in item.captions]
    found.text_rows = sum(rows), len(rows)
    return found


def _shapes(item: Item, facts: MediaFacts, entry: DatasetEntry, model: Model) -> Iterator[Shape]:
    size = bucket_of(facts, entry, model.bucket_step)
    clips: Sequence[tuple[int, int]] = [(0, 1)]
    if item.media == "video":
        clips = windows(entry, clip_frames(item, facts, model.fps, entry.source_fps))
    own = entry.control_resolution if any(media_of(path) == "image" for path in item.controls) else None
    for _, count in clips:
        yield Shape(size, count, len(item.controls), entry.batch_size, own and area_size(size, own))


def nominal(entries: Iterable[DatasetEntry]) -> Survey:
    """The shapes that a dataset's settings ask for, where its files are not there yet: one sample of each."""
    found = Survey(exact=False)
    for entry in entries:
        longest = longest_clip(entry.max_frames) if entry.frame_extraction == "full" else max(entry.target_frames)
        frames = longest if entry.media == "video" else 1
        shape = Shape(entry.resolution, frames, batch_size=entry.batch_size)
        found.samples[shape] = found.uses[shape] = 1
    return found
