"""`cache_text`: captions -> text embeddings in the cache, each distinct caption once, trimmed to its own length."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen.generator.session import Report
from wangen.generator.steps import CacheText
from wangen.profiles import Model
from wangen.runtime.cache import TEXT_KINDS, Encoder, Kind, load
from wangen.runtime.cache.recipes import digest
from wangen.runtime.caching import fill
from wangen.runtime.media import open_image
from wangen.runtime.models import PromptEncoder, family, model_of_cache, text_encoder_identity
from wangen.runtime.needs import EntryWriter, Need, Waiting, Work, claimed
from wangen.runtime.progress import Advance, progress
from wangen.runtime.rocm import on_cpu
from wangen.runtime.room import require_room
from wangen.runtime.samples import Sample, read_samples

if TYPE_CHECKING:
    import torch
    from PIL import Image

log = logging.getLogger("wangen")

CPU_GROUP, GPU_GROUP = 48, 2048
GPU_GROUP_WITH_CONTROLS = 40
"""Their pictures are held in host memory meanwhile."""
MEMORY_CURE = "use --device cpu, or --batch_size 1 with --plain; what was encoded stays"


def run(options: CacheText) -> Report:
    """Encode the captions that are not in the cache, then remove entries that no item needs.

    A caption that several cache folders need is encoded once and written to each; each folder gets the empty prompt.

    Raises:
        WangenError: a caption is missing, the file is no such text encoder, values are not finite, the disk is full.
    """
    model = model_of_cache(options.task)
    samples = read_samples(options, model, make_folders=True)
    encoder = text_encoder(options)

    def encode_missing(work: Work) -> int:
        require_room(work.missing, work.encoders, model)
        return encode(options, encoder, work)

    return fill(options, samples, dict.fromkeys(TEXT_KINDS, encoder), encode_missing)


def text_encoder(options: CacheText) -> Encoder:
    """Which weights encode, and in which precision. Torch is asked only when that depends on the device.

    Raises:
        WangenError: the file is no text encoder of the model, or there is no tokenizer.
    """
    model = model_of_cache(options.task)
    return Encoder(
        text_encoder_identity(options.t5, options.tokenizer, fp8=options.fp8_t5, model=model), _dtype(options)
    )


def _dtype(options: CacheText) -> str:
    if options.t5_dtype or on_cpu(options.device):
        return options.t5_dtype or "float32"
    from wangen.runtime.devices import choose_device, choose_dtype

    return choose_dtype(None, choose_device(options.device, options.local_rank))


def encode(options: CacheText, encoder: Encoder, work: Work) -> int:
    """Write every missing entry, copying what another one has of the same text; returns how many were encoded.

    Args:
        options: of the step.
        encoder: which weights encode.
        work: what is missing.

    Raises:
        WangenError: values are not finite, memory or disk is full.
    """
    elsewhere = {_text_of(need): need.verdict.entry for need in work.valid}
    with ExitStack() as stack, progress("captions", len(work.missing)) as advance:
        paths = dict.fromkeys(need.folder.path for need in work.missing)
        writers: dict[Path, EntryWriter] = {path: stack.enter_context(work.open_writer(path)) for path in paths}
        left: list[Need] = []
        for need in work.missing:
            if entry := elsewhere.get(_text_of(need)):
                writers[need.folder.path].put(need.recipe, encoder, load(entry))
                writers[need.folder.path].commit_if_due()
                advance(1, "")
            else:
                left.append(need)
        texts = _Texts(options, encoder, writers, advance)
        waiting = Waiting()
        while left:
            left = texts.encode(left)
            if left:
                waiting.wait(left)
    return texts.num_encoded


class Embedder:
    """The text encoder of a caching step, loaded when it is first needed.

    Args:
        options: of the step.
        encoder: which weights encode.
    """

    def __init__(self, options: CacheText, encoder: Encoder) -> None:
        self._options, self._encoder = options, encoder

    def embed(
        self, needs: Sequence[Need], on_block: Callable[[int, int], None] = lambda done, total: None
    ) -> list[dict[str, Any]]:
        """The tensors of each need, whose captions go through the encoder together.

        Args:
            needs: of text kinds.
            on_block: told how many blocks are done, and of how many.

        Raises:
            WangenError: a control image cannot be decoded, or the memory is full.
        """
        from wangen.runtime.devices import enough_memory, exact

        captions = [str(need.recipe.content["caption"]) for need in needs]
        shown = {"pictures": [_control_pictures(need.sample) for need in needs]} if self._shows_controls else {}
        with enough_memory(f"encoding {len(captions)} captions", MEMORY_CURE), exact(self._encoder.dtype):
            embeddings = self._prompt_encoder.encode(captions, on_block, **shown)
        return [_entry(embedding) for embedding in embeddings]

    def embed_one(self, need: Need) -> dict[str, Any]:
        """The tensors of one need by itself."""
        return self.embed([need])[0]

    @property
    def group_size(self) -> int:
        """Captions that go through the encoder's blocks together, which are read anew for each group.

        A group is what a kill loses: on a CPU a caption takes seconds.
        """
        on_gpu = self._device.type != "cpu"
        if self._plain or (self._shows_controls and not on_gpu):
            return max(1, self._options.batch_size)
        if self._shows_controls:
            return GPU_GROUP_WITH_CONTROLS
        return GPU_GROUP if on_gpu else CPU_GROUP

    @property
    def _shows_controls(self) -> bool:
        """The text encoder sees the control images too."""
        return bool(self._model.prompt and self._model.prompt.picture)

    @cached_property
    def _model(self) -> Model:
        return model_of_cache(self._options.task)

    @property
    def _plain(self) -> bool:
        return self._options.plain or not self._options.stream_t5

    @cached_property
    def _device(self) -> "torch.device":
        from wangen.runtime.devices import choose_device

        return choose_device(self._options.device, self._options.local_rank)

    @cached_property
    def _prompt_encoder(self) -> PromptEncoder:
        from wangen.runtime.devices import DTYPES

        log.info("  text encoder in %s on %s", self._encoder.dtype, self._device)
        return family(self._model).load_prompt_encoder(
            self._options.t5, self._options.tokenizer, dtype=DTYPES[self._encoder.dtype], device=self._device,
            fp8=self._options.fp8_t5, plain=self._plain, model=self._model,
        )  # fmt: skip


class _Texts:
    """The encoding loop: captions are claimed in groups, encoded together, and written where they are missing."""

    def __init__(
        self, options: CacheText, encoder: Encoder, writers: Mapping[Path, EntryWriter], advance: Advance
    ) -> None:
        self.encoder = encoder
        self._embedder = Embedder(options, encoder)
        self.num_encoded = 0
        self._encoders: Mapping[Kind, Encoder] = dict.fromkeys(TEXT_KINDS, encoder)
        self._writers = writers
        self._advance = advance

    def encode(self, needs: Sequence[Need]) -> list[Need]:
        """Encode what no other process works on; returns what another one does."""
        theirs: list[Need] = []
        same: dict[tuple[int, str, str], list[Need]] = {}  # short captions first, so that a group's lengths are close
        for need in needs:
            caption = str(need.recipe.content["caption"])
            same.setdefault((len(caption), caption, _text_of(need)), []).append(need)
        mine = self._claimed((same[text] for text in sorted(same)), theirs)
        while group := list(islice(mine, self._embedder.group_size)):
            self._encode_group(group)
        return theirs

    def _claimed(self, captions: Iterable[list[Need]], theirs: list[Need]) -> Iterator[list[Need]]:
        """For each caption the needs that are now this process's; what others have claimed is put into `theirs`."""
        for needs in captions:
            mine = claimed(needs, self._writer_for, self._encoders, theirs, self._advance)
            if mine:
                yield mine

    def _writer_for(self, need: Need) -> EntryWriter:
        return self._writers[need.folder.path]

    def _encode_group(self, group: list[list[Need]]) -> None:
        tensors = self._embedder.embed(
            [needs[0] for needs in group], lambda done, total: self._advance(0, f"block {done} of {total}")
        )
        for needs, entry in zip(group, tensors, strict=True):
            for need in needs:
                self._writer_for(need).put(need.recipe, self.encoder, entry)
            self._advance(len(needs), "")
        self.num_encoded += len(group)
        for writer in self._writers.values():
            writer.commit()


def _text_of(need: Need) -> str:
    """What all entries have in common that hold the same embedding: an empty caption is the empty prompt."""
    return digest(need.recipe.content)


def _control_pictures(sample: Sample) -> "list[Image.Image]":
    """The control images of a sample as they are, upright and in RGB, for a text encoder that sees them.

    Raises:
        WangenError: one cannot be decoded, or is no longer the one whose digest the entry would hold.
    """
    pictures = [open_image(path, sample.entry.background_color) for path in sample.item.controls]
    for path, source in zip(sample.item.controls, sample.controls, strict=True):
        source.require_unchanged(path)
    return pictures


def _entry(embedding: "torch.Tensor") -> dict[str, Any]:
    """The tensors of a text entry: `embedding` (length, dim) and `mask` (length,), all true since it is trimmed."""
    import torch

    cpu = embedding.cpu().contiguous()
    return {"embedding": cpu, "mask": torch.ones(len(cpu), dtype=torch.bool)}
