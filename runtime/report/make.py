"""`report`: one HTML page of a run, which opens from disk, asks nothing of any network and works without scripts."""

import logging

from wangen.generator.errors import UsageError, WangenError, bytes_text
from wangen.generator.files import write_text
from wangen.generator.run_folder import PAGE
from wangen.generator.session import Report
from wangen.generator.step_parts import require_try
from wangen.generator.steps import MakeReport
from wangen.runtime.report.dataset import look_at_dataset
from wangen.runtime.report.media import InPage, media_of_run
from wangen.runtime.report.page import make_sections, render
from wangen.runtime.report.run_files import read_run
from wangen.runtime.report.verdict import judge

log = logging.getLogger("wangen")


def run(options: MakeReport) -> Report:
    """Write the page, whole or not at all.

    Raises:
        UsageError: the page's name does not end in .html, the budget is negative, two datasets are given, or there is
            no such folder or run.
        WangenError: the folder has no trace of a run, or the page cannot be written.
    """
    page = (options.save_path or options.output_dir / PAGE).absolute()
    if page.suffix.lower() not in (".html", ".htm"):
        raise UsageError("the page is an .html file", where=str(page), cure="give --save_path report.html")
    if options.max_embed_mb < 0:
        raise UsageError(f"--max_embed_mb is 0 or more, got {options.max_embed_mb}")
    dataset_file = options.dataset
    require_try(options.output_dir, "--output_dir")
    found = read_run(options.output_dir, options.output_name)
    if found.is_empty:
        raise WangenError("this folder has no trace of a run: no metrics.jsonl, report, LoRA or samples",
                          where=str(found.folder), cure="give the --output_dir of the training")  # fmt: skip
    for problem in found.problems:  # they stand on the page as well
        log.warning("  %s", problem)
    dataset = look_at_dataset(found, dataset_file)
    if dataset_file and dataset.problem:
        log.warning("  %s", dataset.problem)
    media = InPage(page, options.max_embed_mb * 10**6, media_of_run(found))
    write_text(page, render(found, make_sections(found, dataset, media)))
    verdict = judge(found)
    return Report(
        folder=None,
        summary=f"{page} ({bytes_text(page.stat().st_size)}): {verdict.headline}",
        inputs={"output_dir": found.folder, "output_name": found.name},
        result={"page": page, "verdict": verdict.level, "use": verdict.use},
    )
