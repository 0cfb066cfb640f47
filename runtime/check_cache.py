"""`check_cache`: which entries are valid, stale, missing or corrupt. Needs no torch."""

import logging
from collections import Counter
from pathlib import Path

from wangen import profiles
from wangen.generator import headers
from wangen.generator.session import Report
from wangen.generator.steps import CheckCache
from wangen.runtime.cache import Encoder, Folder, Kind, Recipe, Verdict
from wangen.runtime.models import model_of_vae, text_encoder_identity
from wangen.runtime.samples import Sample, by_cache_folder, read_samples

log = logging.getLogger("wangen")


def recipes(samples: list[Sample], kind: Kind) -> list[Recipe]:
    """What the samples need of one kind; samples that share a caption share one recipe.

    The name of a caption's recipe is that of the first file that uses it.
    """
    if kind == "latent":
        return [Recipe("latent", sample.latent_recipe(), sample.name) for sample in samples]
    unique: dict[str, Recipe] = {}
    for sample in samples:
        recipe = Recipe("text_encoder_output", sample.text_recipe(), sample.item.path.name)
        unique.setdefault(recipe.content_key, recipe)
    return list(unique.values())


def encoders(options: CheckCache) -> dict[Kind, Encoder | None]:
    """The encoders to judge against, as far as the flags name them with their precision."""
    found: dict[Kind, Encoder | None] = {"latent": None, "text_encoder_output": None}
    if options.vae and options.vae_dtype:
        found["latent"] = Encoder(headers.identity(options.vae), options.vae_dtype)
    if options.t5 and options.t5_dtype:
        identity = text_encoder_identity(options.t5, options.tokenizer)
        found["text_encoder_output"] = Encoder(identity, options.t5_dtype)
    return found


def run(options: CheckCache) -> Report:
    """Judge every entry that training would need; fails unless all are valid.

    Raises:
        WangenError: the dataset or a weight file cannot be read.
    """
    model = model_of_vae(options.vae) if options.vae else profiles.model("t2v-14B")
    samples = read_samples(options.dataset_config, model, trust_memo=not options.deep)
    counts: dict[str, Counter[str]] = {}
    problems: list[str] = []
    num_bytes = 0
    for folder, members in by_cache_folder(samples).items():
        cache = Folder(folder, deep=options.deep)
        for kind, encoder in encoders(options).items():
            tally = counts.setdefault(kind, Counter(valid=0, stale=0, missing=0, corrupt=0))
            for recipe in recipes(members, kind):
                verdict = cache.judge(recipe, encoder)
                tally[verdict.state] += 1
                num_bytes += verdict.entry.num_bytes if verdict.state == "valid" and verdict.entry else 0
                problems += _problem(recipe, verdict)
    _print(counts, problems)
    step = "cache_latents and cache_text"
    verdict_line = f"run {step} again" if problems else "training finds all it needs"
    valid = sum(tally["valid"] for tally in counts.values())
    return Report(
        folder=_report_folder(options, samples),
        summary=f"{valid} entries valid ({num_bytes / 1e6:.1f} MB), {len(problems)} not: {verdict_line}",
        inputs={"dataset_config": options.dataset_config, "samples": len(samples)},
        counts={kind: dict(tally) for kind, tally in counts.items()},
        result={"problems": problems, "bytes": num_bytes},
        ok=not problems,
    )


def _problem(recipe: Recipe, verdict: Verdict) -> list[str]:
    return [] if verdict.state == "valid" else [f"{recipe.name}: {recipe.kind} is {verdict.state}, {verdict.reason}"]


def _print(counts: dict[str, Counter[str]], problems: list[str]) -> None:
    log.info("  %-22s %6s %6s %8s %8s", "kind", "valid", "stale", "missing", "corrupt")
    for kind, tally in counts.items():
        log.info("  %-22s %6d %6d %8d %8d", kind, *(tally[s] for s in ("valid", "stale", "missing", "corrupt")))
    for problem in problems[:20]:
        log.error("  - %s", problem)
    if len(problems) > 20:
        log.error("  … and %d more, all in the report", len(problems) - 20)


def _report_folder(options: CheckCache, samples: list[Sample]) -> Path:
    return samples[0].entry.cache_directory if samples else options.dataset_config.parent
