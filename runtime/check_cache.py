"""`check_cache`: which entries are valid, stale, missing or corrupt. Needs no torch."""

import logging

from wangen import profiles
from wangen.generator import headers
from wangen.generator.session import Report
from wangen.generator.steps import CheckCache
from wangen.runtime.cache import Encoder, Folder, Kind
from wangen.runtime.models import model_of_vae, text_encoder_identity
from wangen.runtime.needs import Need, count_states, expected_encoder, judge
from wangen.runtime.samples import Sample, by_cache_folder, read_samples

log = logging.getLogger("wangen")

KINDS: tuple[Kind, ...] = ("latent", "text_encoder_output")


def run(options: CheckCache) -> Report:
    """Judge every entry that training would need; fails unless all are valid.

    Raises:
        WangenError: the dataset or a weight file cannot be read.
    """
    model = model_of_vae(options.vae) if options.vae else profiles.model("t2v-14B")
    samples = read_samples(options.dataset_config, model, trust_memo=not options.deep)
    folders = [Folder(path, deep=options.deep) for path in by_cache_folder(samples)]
    needs = {kind: judge(folders, samples, kind, _encoder(options, folders, samples, kind)) for kind in KINDS}
    counts = {kind: count_states(need.verdict for need in found) for kind, found in needs.items()}
    valid = [need.verdict.entry for found in needs.values() for need in found if need.verdict.state == "valid"]
    problems = [_problem(need) for found in needs.values() for need in found if need.verdict.state != "valid"]
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
    """The encoder to judge against: what the flags name, and for the rest what most entries were made with."""
    if kind == "latent":
        identity = headers.identity(options.vae) if options.vae else None
        return expected_encoder(folders, samples, kind, identity, options.vae_dtype)
    identity = text_encoder_identity(options.t5, options.tokenizer) if options.t5 else None
    return expected_encoder(folders, samples, kind, identity, options.t5_dtype)


def _problem(need: Need) -> str:
    return f"{need.recipe.name}: {need.recipe.kind} is {need.verdict.state}, {need.verdict.reason}"


def _print(counts: dict[Kind, dict[str, int]], problems: list[str]) -> None:
    log.info("  %-22s %6s %6s %8s %8s", "kind", "valid", "stale", "missing", "corrupt")
    for kind, tally in counts.items():
        log.info("  %-22s %6d %6d %8d %8d", kind, *(tally[s] for s in ("valid", "stale", "missing", "corrupt")))
    for problem in problems[:20]:
        log.error("  - %s", problem)
    if len(problems) > 20:
        log.error("  … and %d more, all in the report", len(problems) - 20)
