"""`cache_text`: captions -> umT5 embeddings in the cache, each distinct caption once, trimmed to its own length."""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen import profiles
from wangen.generator.errors import WangenError
from wangen.generator.session import Report
from wangen.generator.steps import CacheText
from wangen.runtime.cache import Encoder, Recipe, load
from wangen.runtime.models import family, text_encoder_identity
from wangen.runtime.needs import ANY_MODEL, Need, fill
from wangen.runtime.progress import progress
from wangen.runtime.samples import read_samples

if TYPE_CHECKING:
    from wangen.runtime.cache_writer import Writer

log = logging.getLogger("wangen")


def run(options: CacheText) -> Report:
    """Encode the captions that are not in the cache, then remove entries that no item needs.

    A caption that several cache folders need is encoded once and written to each.

    Raises:
        WangenError: a caption is missing, the file is no umT5, values are not finite, the disk is full.
    """
    samples = read_samples(options, profiles.model(ANY_MODEL), make_folders=True)
    encoder = Encoder(text_encoder_identity(options.t5, options.tokenizer, fp8=options.fp8_t5), _dtype(options))
    return fill(
        options, samples, "text_encoder_output", encoder, lambda missing, valid: _fill(options, encoder, missing, valid)
    )


def _dtype(options: CacheText) -> str:
    if options.t5_dtype:
        return options.t5_dtype
    from wangen.runtime.devices import choose_device, choose_dtype

    return choose_dtype(None, choose_device(options.device))


def _fill(options: CacheText, encoder: Encoder, missing: list[Need], valid: list[Need]) -> int:
    """Write every missing entry, copying from another folder where it is valid there; returns how many were encoded."""
    from wangen.runtime.cache_writer import Writer

    elsewhere = {need.recipe.content_key: need.verdict.entry for need in valid}
    wanted: dict[str, list[tuple[Recipe, Writer]]] = {}
    with ExitStack() as stack:
        paths = dict.fromkeys(need.folder.path for need in missing)
        writers: dict[Path, Writer] = {path: stack.enter_context(Writer(path)) for path in paths}
        for need in missing:
            writer = writers[need.folder.path]
            if entry := elsewhere.get(need.recipe.content_key):
                writer.put(need.recipe, encoder, load(entry))
                writer.commit_if_due()
            else:
                wanted.setdefault(need.recipe.content_key, []).append((need.recipe, writer))
        if wanted:
            _encode(options, encoder, list(wanted.values()))
    return len(wanted)


def _encode(options: CacheText, encoder: Encoder, wanted: "list[list[tuple[Recipe, Writer]]]") -> None:
    """Encode captions in batches of similar length; each element of `wanted` is one caption and where it is written."""
    import torch

    from wangen.runtime.devices import DTYPES, choose_device

    kind = family(profiles.model(ANY_MODEL))
    device = choose_device(options.device)
    tokenizer = kind.load_tokenizer(options.tokenizer or options.t5)
    text_encoder = kind.load_text_encoder(options.t5, dtype=DTYPES[encoder.dtype], device=device, fp8=options.fp8_t5)
    log.info("  text encoder in %s on %s", encoder.dtype, device)
    captions = {_caption(places): places for places in wanted}
    texts = sorted(captions, key=lambda text: (len(text), text))
    size = max(1, options.batch_size)
    with progress("captions", len(texts)) as advance:
        for first in range(0, len(texts), size):
            batch = texts[first : first + size]
            try:
                embeddings = kind.encode_prompts(text_encoder, tokenizer, batch)
            except torch.OutOfMemoryError:
                raise WangenError(
                    f"out of memory encoding {len(batch)} captions",
                    cure="use --batch_size 1 or --device cpu; what was encoded stays",
                ) from None
            used = {}
            for text, embedding in zip(batch, embeddings, strict=True):
                for recipe, writer in captions[text]:
                    writer.put(recipe, encoder, _entry(embedding))
                    used[writer.folder] = writer
            for writer in used.values():
                writer.commit_if_due()
            advance(len(batch), "")


def _caption(places: "list[tuple[Recipe, Writer]]") -> str:
    return str(places[0][0].content["caption"])


def _entry(embedding: Any) -> dict[str, Any]:
    """The tensors of a text entry: `embedding` (length, dim) and `mask` (length,), all true since it is trimmed."""
    import torch

    cpu = embedding.cpu().contiguous()
    return {"embedding": cpu, "mask": torch.ones(len(cpu), dtype=torch.bool)}
