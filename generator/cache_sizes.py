"""What cache entries take on the disk, before they are made: from sizes in pixels, frames and words."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from wangen.generator.dataset import Item
from wangen.generator.table import Step
from wangen.generator.weight_counts import CLIP_DIM, CLIP_TOKENS, QWEN_TEXT_DIM, UMT5_DIM
from wangen.profiles import Model

CLIP_NUMBERS = CLIP_TOKENS * CLIP_DIM
"""Of CLIP's view of a frame."""

UMT5_MAX_ROWS = 512
"""To which the libraries' own forward pass pads a text."""

HEADER_BYTES = 600
"""Of an entry's file beside its numbers: what was encoded, and how."""


@dataclass(frozen=True)
class Encoding:
    """How the cache is made.

    Attributes:
        vae_dtype: precision of latents.
        t5_dtype: precision of texts.
        clip_dtype: precision of CLIP's views.
        text_width: numbers of a row of a text's embedding; None for those of the model's own text encoder.
    """

    vae_dtype: str = "float16"
    t5_dtype: str = "bfloat16"
    clip_dtype: str = "float16"
    text_width: int | None = None


def encoding_of(steps: Iterable[Step], unsaid: Encoding) -> Encoding:
    """How the steps of a script make the cache; in a precision that none of them says as `unsaid` has it."""
    precisions = ("vae_dtype", "t5_dtype", "clip_dtype")
    said: dict[str, Any] = {name: flag for step in steps for name in precisions if (flag := getattr(step, name, ""))}
    return replace(unsaid, **said)


class Texts:
    """The texts of a dataset: each is encoded once for a cache folder, by models that are shown pictures once for each.

    The empty prompt is among them, which dropout and guidance ask for.
    """

    def __init__(self, model: Model, encoding: Encoding) -> None:
        self._model, self._encoding = model, encoding
        self._known: set[tuple[Path, str, Path | None]] = set()

    def added_bytes(self, item: Item, folder: Path) -> int:
        """About what the texts of one more item take in its cache folder."""
        shown = item.path if self._model.prompt and self._model.prompt.picture else None
        new = {(folder, caption, shown) for caption in (*item.captions, "")} - self._known
        self._known |= new
        encoding, controls = self._encoding, len(item.controls)
        each = (text_bytes(self._model, text, encoding.t5_dtype, controls, encoding.text_width) for _, text, _ in new)
        return sum(each) + HEADER_BYTES * len(new)


def tokens_of_words(text: str) -> int:
    """About how many tokens a caption becomes: four for three words.

    >>> tokens_of_words("a cat on a red sofa")
    9
    """
    return -(-4 * max(1, len(text.split())) // 3) + 1


def width_of(dtype: str) -> int:
    """Bytes of a number of a precision by its name: float32, or one of the 16-bit ones."""
    return 4 if dtype == "float32" else 2


def cells(model: Model, size: tuple[int, int], num_frames: int) -> int:
    """Latent cells of an image or a clip; `size` is (width, height) in pixels.

    >>> from wangen import profiles
    >>> cells(profiles.model("t2v-14B"), (832, 480), 81) == 21 * 104 * 60
    True
    """
    return prod(model.latent_size(size, num_frames))


def latent_bytes(model: Model, size: tuple[int, int], num_frames: int, dtype: str) -> int:
    """Of a latent, of a control image's or of a first frame's, which have the same shape."""
    return cells(model, size, num_frames) * model.latent_channels * width_of(dtype)


def mask_bytes(model: Model, size: tuple[int, int], num_frames: int) -> int:
    """Of a mask, a number in float32 for each latent cell."""
    return cells(model, size, num_frames) * width_of("float32")


def text_rows(model: Model, caption: str, num_controls: int) -> int:
    """About how many rows a caption's embedding has: a language model also sees control images."""
    rows = tokens_of_words(caption)
    if model.prompt is None:
        return min(rows, UMT5_MAX_ROWS)
    return rows + (model.prompt.picture_tokens * num_controls if model.prompt.picture else 0)


def text_bytes(model: Model, caption: str, dtype: str, num_controls: int, width: int | None = None) -> int:
    """About the bytes of a caption's embedding; `width` of its rows where it is not the model's own."""
    width = width or (UMT5_DIM if model.prompt is None else QWEN_TEXT_DIM)
    return text_rows(model, caption, num_controls) * width * width_of(dtype)


def sample_bytes(
    item: Item,
    size: tuple[int, int],
    num_frames: int,
    model: Model,
    encoding: Encoding,
    control_size: tuple[int, int] | None,
) -> int:
    """Of a sample's latents, conditions and mask; sizes are (width, height), None: the control images' is the same."""
    own = latent_bytes(model, size, num_frames, encoding.vae_dtype) + HEADER_BYTES
    control = latent_bytes(model, control_size or size, num_frames, encoding.vae_dtype) + HEADER_BYTES
    total = own * (2 if model.condition == "image" else 1) + control * len(item.controls)
    if model.has_clip:
        total += CLIP_NUMBERS * width_of(encoding.clip_dtype) + HEADER_BYTES
    return total + (mask_bytes(model, size, num_frames) + HEADER_BYTES if item.mask else 0)


def cached_bytes(folder: Path) -> int:
    """Of the entries in a cache folder and of its packs, as far as they can be looked at."""
    found = (path for pattern in ("*.safetensors", "packs/*.tar") for path in folder.glob(pattern))
    return sum(path.stat().st_size for path in found if path.is_file())
