"""`check_cache`: which entries are valid, stale, missing or corrupt. Needs no torch."""

import logging
from collections.abc import Sequence

from wangen import profiles
from wangen.generator.session import Report
from wangen.generator.steps import CheckCache
from wangen.runtime.cache import Encoder, Folder, Kind
from wangen.runtime.models import model_of_vae, text_encoder_identity, vae_identity
from wangen.runtime.needs import (
    ANY_MODEL,
    KINDS,
    count_states,
    expected_encoder,
    judge,
    listing,
    problem,
    vae_dtype,
)
from wangen.runtime.samples import Sample, by_cache_folder, read_samples

log = logging.getLogger("wangen")


def run(options: CheckCache) -> Report:
    """Judge every entry that training would need; fails unless all are valid.

    Without --vae the samples are cut as any profile says. That is right because of a profile only the frame rate and
    the bucket step count here; both go with the VAE's strides, which profiles that share a VAE share, and all
    that are trained in this version share one.

    Raises:
        WangenError: the dataset or a weight file cannot be read; it is open which encoder's entries training takes.
    """
    model = model_of_vae(options.vae) if options.vae else profiles.model(ANY_MODEL)
    samples = read_samples(options, model, trust_memo=not options.deep)
    folders = [Folder(path, deep=options.deep) for path in by_cache_folder(samples)]
    encoders = {kind: _encoder(options, folders, samples, kind) for kind in KINDS}
    needs = {kind: judge(folders, samples, kind, encoders[kind]) for kind in KINDS}
    counts = {kind: count_states(need.verdict for need in found) for kind, found in needs.items()}
    valid = [need.verdict.entry for found in needs.values() for need in found if need.verdict.state == "valid"]
    problems = [problem(need) for found in needs.values() for need in found if need.verdict.state != "valid"]
    if not problems:
        problems = [line for kind in KINDS for line in _others(options, folders, samples, kind, encoders[kind])]
    num_bytes = sum(entry.num_bytes for entry in valid if entry)
    _print(counts, problems)
    ending = "run cache_latents and cache_text again" if problems else "training finds all it needs"
    return Report(
        folder=options.dataset_config.parent,
        summary=f"{len(valid)} entries valid ({num_bytes / 1e6:.1f} MB), {len(problems)} not: {ending}",
        inputs={"dataset_config": options.dataset_config, "samples": len(samples)},
        counts={str(kind): tally for kind, tally in counts.items()},
        result={"problems": problems, "bytes": num_bytes},
        ok=not problems,
    )


def _encoder(options: CheckCache, folders: list[Folder], samples: list[Sample], kind: Kind) -> Encoder | None:
    """The encoder to judge against: what the flags name, and for the rest what training would take."""
    if kind == "latent":
        identity = vae_identity(options.vae, options.vae_tile) if options.vae else None
        dtype = vae_dtype(options.vae_dtype)
    else:
        identity = text_encoder_identity(options.t5, options.tokenizer, fp8=options.fp8_t5) if options.t5 else None
        dtype = options.t5_dtype
    return expected_encoder(folders, samples, kind, options.dataset_config, identity=identity, dtype=dtype)


def _others(
    options: CheckCache, folders: list[Folder], samples: list[Sample], kind: Kind, judged: Encoder | None
) -> list[str]:
    """One line when training would take entries of another encoder than was judged against."""
    taken = expected_encoder(folders, samples, kind, options.dataset_config)
    if taken == judged or taken is None or judged is None:
        return []
    return [
        f"every {kind} of {judged.identity[:8]} in {judged.dtype} is there, but training takes those of the last "
        f"caching run, {taken.identity[:8]} in {taken.dtype}"
    ]


def _print(counts: dict[Kind, dict[str, int]], problems: Sequence[str]) -> None:
    log.info("  %-22s %6s %6s %8s %8s", "kind", "valid", "stale", "missing", "corrupt")
    for kind, tally in counts.items():
        log.info("  %-22s %6d %6d %8d %8d", kind, *(tally[s] for s in ("valid", "stale", "missing", "corrupt")))
    for line in listing(problems):
        log.error("%s", line)
