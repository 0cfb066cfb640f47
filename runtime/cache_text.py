"""`cache_text`: captions -> umT5 embeddings in the cache, each distinct caption once, trimmed to its own length."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from wangen import profiles
from wangen.generator import headers
from wangen.generator.errors import WangenError
from wangen.generator.session import Report
from wangen.generator.steps import CacheText
from wangen.runtime.cache import Encoder, Folder, Recipe, Verdict, Writer, count_reasons, count_states, load
from wangen.runtime.check_cache import recipes
from wangen.runtime.models import family, text_encoder_identity
from wangen.runtime.progress import progress
from wangen.runtime.samples import by_cache_folder, read_samples

log = logging.getLogger("wangen")


def run(options: CacheText) -> Report:
    """Encode the captions that are not in the cache, then remove entries that no item needs.

    A caption that several cache folders need is encoded once and written to each.

    Raises:
        WangenError: a caption is missing, the file is no umT5, values are not finite, the disk is full.
    """
    headers.expect(options.t5, "umt5-encoder", "t5")
    samples = read_samples(options.dataset_config, profiles.model("t2v-14B"))
    encoder = Encoder(text_encoder_identity(options.t5, options.tokenizer), _dtype(options))
    folders = {folder: Folder(folder) for folder in by_cache_folder(samples)}
    needed = {folder: recipes(members, "text_encoder_output") for folder, members in by_cache_folder(samples).items()}
    verdicts = [
        (folder, recipe, folders[folder].judge(recipe, encoder)) for folder in folders for recipe in needed[folder]
    ]
    missing = [(folder, recipe) for folder, recipe, verdict in verdicts if options.recache or verdict.state != "valid"]
    valid = {
        recipe.content_key: verdict
        for _, recipe, verdict in verdicts
        if verdict.state == "valid" and not options.recache
    }
    computed = _fill(options, encoder, missing, valid) if missing else 0
    keys = {folder: {recipe.key(encoder) for recipe in needed[folder]} for folder in folders}
    removed = 0 if options.keep_cache else sum(folders[f].prune("text_encoder_output", keys[f]) for f in folders)
    states = [verdict for *_, verdict in verdicts]
    reused = len(verdicts) - len(missing)
    return Report(
        folder=options.dataset_config.parent,
        summary=f"{computed} captions encoded, {reused} already valid, {removed} unneeded removed",
        inputs={"dataset_config": options.dataset_config, "t5": options.t5, "t5_identity": encoder.identity},
        counts={"computed": computed, "from_cache": reused, "removed": removed, "found": count_states(states),
                "why": count_reasons(states, recache=options.recache)},
        result={"dtype": encoder.dtype, "folders": [str(folder) for folder in folders]},
    )  # fmt: skip


def _dtype(options: CacheText) -> str:
    if options.t5_dtype:
        return options.t5_dtype
    from wangen.runtime.devices import choose_device, choose_dtype

    return choose_dtype(None, choose_device(options.device))


def _fill(
    options: CacheText, encoder: Encoder, missing: list[tuple[Path, Recipe]], valid: Mapping[str, Verdict]
) -> int:
    """Write every missing entry, copying from another folder where it is valid there; returns how many were encoded."""
    wanted: dict[str, list[Path]] = {}
    by_content = {recipe.content_key: recipe for _, recipe in missing}
    for folder, recipe in missing:
        wanted.setdefault(recipe.content_key, []).append(folder)
    with ExitStack() as stack:
        writers = {folder: stack.enter_context(Writer(folder)) for folder, _ in missing}
        for key in wanted.keys() & valid.keys():
            entry = valid[key].entry
            for folder in wanted[key] if entry else []:
                writers[folder].put(by_content[key], encoder, load(entry))  # type: ignore[arg-type]
        texts = [by_content[key] for key in wanted if key not in valid]
        if texts:
            _encode(options, encoder, texts, {key: [writers[f] for f in folders] for key, folders in wanted.items()})
    return len(texts)


def _encode(options: CacheText, encoder: Encoder, texts: list[Recipe], writers: Mapping[str, list[Writer]]) -> None:
    """Encode captions in batches of similar length."""
    import torch

    from wangen.runtime.devices import DTYPES, choose_device

    kind = family(profiles.model("t2v-14B"))
    device = choose_device(options.device)
    tokenizer = kind.load_tokenizer(options.tokenizer or options.t5)
    text_encoder = kind.load_text_encoder(options.t5, dtype=DTYPES[encoder.dtype], device=device)
    log.info("  text encoder in %s on %s", encoder.dtype, device)
    texts = sorted(texts, key=lambda recipe: len(recipe.content["caption"]))
    size = max(1, options.batch_size)
    with progress("captions", len(texts)) as advance:
        for first in range(0, len(texts), size):
            batch = texts[first : first + size]
            try:
                embeddings = kind.encode_prompts(
                    text_encoder, tokenizer, [recipe.content["caption"] for recipe in batch]
                )
            except torch.OutOfMemoryError:
                raise WangenError(
                    f"out of memory encoding {len(batch)} captions",
                    cure="use --batch_size 1 or --device cpu; what was encoded stays",
                ) from None
            for recipe, embedding in zip(batch, embeddings, strict=True):
                tensors = _entry(embedding)
                for writer in writers[recipe.content_key]:
                    writer.put(recipe, encoder, tensors)
            advance(len(batch), "")


def _entry(embedding: Any) -> dict[str, Any]:
    """The tensors of a text entry: `embedding` (length, dim) and `mask` (length,), all true since it is trimmed."""
    import torch

    cpu = embedding.cpu().contiguous()
    return {"embedding": cpu, "mask": torch.ones(len(cpu), dtype=torch.bool)}
