"""The page of a run: sections of blocks of HTML, all in one file or exchanged one by one while it trains."""

import hashlib
import json
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from wangen.runtime.report.cautions import find_cautions
from wangen.runtime.report.charts import make_charts
from wangen.runtime.report.continuing import continuation_charts, continuation_table, continuations
from wangen.runtime.report.dataset import DatasetPart
from wangen.runtime.report.media import Media
from wangen.runtime.report.plotting import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from wangen.runtime.report.run_files import RunFiles, Sample
from wangen.runtime.report.tables import (
    cache_tables,
    evaluation_tables,
    lora_table,
    plan_numbers,
    provenance_tables,
    ranking_table,
    settings_tables,
    validation_tables,
)
from wangen.runtime.report.verdict import judge

if TYPE_CHECKING:
    from jinja2 import Environment

POLL_S = 3.0
_ASKED = ("prompt", "negative_prompt", "image", "controls", "continues", "given_frames", "width", "height", "frames",
          "fps", "seed", "sampler", "steps", "shift", "guidance", "guidance_high_noise")  # fmt: skip
"""What somebody decides of a sample."""


@dataclass(frozen=True)
class Block:
    """A piece of the page that is exchanged as a whole when it changes.

    Attributes:
        key: the element's id, unique on the page and no section's, of letters, digits and dashes.
        html: escaped and complete.
    """

    key: str
    html: str

    @cached_property
    def digest(self) -> str:
        """Changes with the block."""
        return hashlib.sha256(self.html.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True)
class Section:
    """A heading and the blocks below it.

    Attributes:
        key: the anchor.
        title: the heading.
        blocks: in their order.
        columns: how blocks stand side by side where there is room: `narrow`, `wide`, or empty for not at all.
    """

    key: str
    title: str
    blocks: Sequence[Block]
    columns: Literal["narrow", "wide", ""] = ""


@dataclass(frozen=True)
class Status:
    """Where the run is: a word for the style (waiting, running, quiet, finished, stopped) and a sentence."""

    word: str
    text: str


def make_sections(run: RunFiles, dataset: DatasetPart, media: Media) -> list[Section]:
    """Everything that is known of a run, as blocks."""
    cautions = find_cautions(run)
    verdict = judge(run)
    return [
        Section("verdict", "Verdict", [_block("answer", "verdict", verdict=verdict, num_cautions=len(cautions),
                                              files=lora_table(run, verdict.use))]),
        Section("training", "Training", list(_training(run)), "narrow"),
        *_continuations(run, media),
        Section("samples", "Samples over time", list(_samples(run, media)), "wide"),
        Section("evaluation", "Evaluation", list(_evaluation(run, media))),
        Section("dataset", "Dataset", list(_dataset(dataset))),
        Section("cache", "Cache", list(_tables("cache", cache_tables(run, dataset), "Nothing is known of the cache: "
                                               "run check_cache, or give --dataset_config or --manifest."))),
        Section("settings", "Settings and provenance", [
            *_tables("provenance", provenance_tables(run), "No step has written its report yet."),
            *_tables("flags", settings_tables(run), "Training has not written its settings yet."),
        ]),
        Section("warnings", "Warnings", [_block("cautions", "cautions", cautions=cautions, note=media.note())]),
    ]  # fmt: skip


def render(run: RunFiles, sections: Sequence[Section], status: Status | None = None) -> str:
    """The whole page.

    Args:
        run: names the page.
        sections: from `make_sections`.
        status: of a run that is shown live; None for a page that stands still.
    """
    style, script = _asset("report.css"), _asset("report.js")
    numbers = dict(plan_numbers(run))
    facts = [run.task, f"{numbers['steps']} steps" if "steps" in numbers else "", numbers.get("time of the steps", "")]
    return _environment().get_template("page.html.j2").render(
        run=run, sections=sections, status=status, style=style, script=script, poll_s=POLL_S,
        policy=policy(style, script), facts=[fact for fact in facts if fact],
    )  # fmt: skip


def policy(style: str, script: str) -> str:
    """A Content-Security-Policy: nothing runs but our script, and nothing comes from elsewhere."""
    hashes = [b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    here = "'self' data: file:"
    return (
        f"default-src 'none'; img-src {here}; media-src {here}; style-src 'sha256-{hashes[0]}'; "
        f"script-src 'sha256-{hashes[1]}'; connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def _training(run: RunFiles) -> Iterator[Block]:
    charts = make_charts(run.records, run.trained)
    for chart in charts:
        yield _block(f"chart-{chart.key}", "chart", chart=chart)
    if not charts:
        yield _block("no-charts", "nothing", text="There are no numbers yet: metrics.jsonl is missing or empty.")
    yield from _tables("validation", validation_tables(run), "")


def _continuations(run: RunFiles, media: Media) -> Iterator[Section]:
    """The section of continuations, where a run makes them."""
    clips = [sample for sample in run.samples if sample.continued]
    if not clips and not continuations(run.records):
        return
    table = continuation_table(run.records)
    blocks = [_block(f"chart-{chart.key}", "chart", chart=chart) for chart in continuation_charts(run.records)]
    blocks += _tables("continued", [table] if table else [], "")
    yield Section("continuations", "Continuations", [*blocks, *_over_time(clips, media)], "narrow")


def _samples(run: RunFiles, media: Media) -> Iterator[Block]:
    samples = [sample for sample in run.samples if not sample.continued]
    if not samples:
        yield _block("no-samples", "nothing", text="No samples were made while it trained.")
    yield from _over_time(samples, media)


def _over_time(samples: Sequence[Sample], media: Media) -> Iterator[Block]:
    """For each prompt or clip what was made of it with the same settings, to be looked through by step."""
    keys = Counter[str]()
    for group in _alike(samples):
        shown = [(sample, url) for sample in group if (url := media.url(sample.file))]
        if shown:
            last = shown[-1][0]
            what = "continuation" if last.continued else "sample"
            key = "-".join([what, *([last.expert.replace("_", "-")] if last.expert else []), str(last.number)])
            keys[key] += 1
            if keys[key] > 1:
                key += f"-settings-{keys[key]}"
            yield _block(key, "samples", shown=shown, title=_title(last), facts=sample_facts(last), what=what.title())


def _alike(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples of one prompt or clip with the same settings: a prompt file may have changed between two starts."""
    found: dict[tuple[str, int, str], list[Sample]] = {}
    for sample in samples:
        asked = json.dumps([sample.settings.get(name) for name in _ASKED], sort_keys=True)
        found.setdefault((sample.expert, sample.number, asked), []).append(sample)
    return list(found.values())


def _title(sample: Sample) -> str:
    if not sample.continued:
        return sample.prompt or f"Prompt {sample.number}"
    clip = str(sample.settings.get("continues", "")) or f"Clip {sample.number}"
    return f"{clip}: {sample.prompt}" if sample.prompt else clip


def sample_facts(sample: Sample) -> str:
    """The settings of a sample in a line."""
    told = sample.settings
    if not told:
        return ""
    given = f"source, the VAE's reconstruction, continuation of {told.get('given_frames')} given frames; "
    high = told.get("guidance_high_noise")
    guidance = f"guidance {high if sample.expert == 'high_noise' else told.get('guidance')}"
    if high is not None and not sample.expert:
        guidance += f" (high noise {high})"
    averaged = ", of the averaged weights (-ema)" if told.get("averaged_weights") else ""
    return (given if sample.continued else "") + (
        f"{told.get('width')}x{told.get('height')}, {told.get('frames')} frames at {told.get('fps')} fps, seed "
        f"{told.get('seed')}, {told.get('sampler')}, {told.get('steps')} steps, {guidance}{averaged}"
    )


def _evaluation(run: RunFiles, media: Media) -> Iterator[Block]:
    found = run.evaluation
    if found is None:
        told = "This run was not evaluated yet: run wangen evaluate with this folder as its --output_dir too."
        if run.trains_model:
            told = "wangen evaluate judges LoRAs; this run trained the model itself."
        elif run.judged_beside:
            told = (f"The evaluation in this folder judged {run.judged_beside} of another run, too: give each run a "
                    "folder, or give wangen evaluate --lora_weight the files of this one.")  # fmt: skip
        yield _block("no-evaluation", "nothing", text=told)
        return
    yield from _tables("ranking", [ranking_table(found)], "")
    for number, video in enumerate(found.videos, start=1):
        controls = {f"control image {place}": file for place, file in enumerate(video.controls, 1)}
        paths = {name: run.inside(file) for name, file in {**controls, **video.files}.items()}
        shown = [(name, path, url) for name, path in paths.items() if path and (url := media.url(path))]
        signals = list(dict.fromkeys(signal for values in video.signals.values() for signal in values))
        yield _block(f"video-{number}", "videos", video=video, shown=shown, signals=signals, best=found.best)
    yield from _tables("losses", evaluation_tables(found), "")


def _dataset(dataset: DatasetPart) -> Iterator[Block]:
    yield _block("dataset-facts", "dataset", dataset=dataset)
    for bucket in dataset.buckets:
        yield _block(f"bucket-{bucket.size}", "bucket", bucket=bucket)


def _tables(key: str, tables: Sequence[Any], otherwise: str) -> Iterator[Block]:
    for number, table in enumerate(tables, start=1):
        yield _block(f"{key}-{number}", "table", table=table)
    if not tables and otherwise:
        yield _block(f"no-{key}", "nothing", text=otherwise)


def _block(key: str, macro: str, **values: Any) -> Block:
    """What a macro of `blocks.html.j2` makes of values."""
    module = _environment().get_template("blocks.html.j2").module
    return Block(key, str(getattr(module, macro)(key=key, **values)))


@cache
def _asset(name: str) -> str:
    return files("wangen.runtime.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(WIDTH=WIDTH, HEIGHT=HEIGHT, LEFT=LEFT, RIGHT=RIGHT, TOP=TOP, BOTTOM=BOTTOM)
    return environment
