"""The steps of the table that show a run: the page of a report, and the same page while it trains."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from wangen.generator.errors import UsageError
from wangen.generator.table import SMOKE, Step, flag


@dataclass(frozen=True, kw_only=True)
class RunStep(Step):
    """What the steps that look at a run share."""

    output_dir: Path = flag("folder of the run: the --output_dir of its training")
    output_name: str | None = flag("which run of that folder, by --output_name (default: the newest)", None)
    dataset_config: Path | None = flag("the dataset's TOML (default: the one in the training's report)", None)
    manifest: Path | None = flag("the dataset's .jsonl, of a training with --manifest, in place of the TOML", None)

    @property
    def dataset(self) -> Path | None:
        """The TOML or the manifest; None takes the run's.

        Raises:
            UsageError: both are given.
        """
        if self.dataset_config and self.manifest:
            raise UsageError("--dataset_config and --manifest contradict each other", cure="give one of them")
        return self.dataset_config or self.manifest


@dataclass(frozen=True, kw_only=True)
class MakeReport(RunStep):
    """Make one HTML page of a run: verdict, curves, samples, evaluation, dataset, settings; it opens from disk."""

    command: ClassVar[str] = "report"
    module: ClassVar[str] = "wangen.runtime.report.make"

    smoke: bool = flag("the page of a try: of the folder smoke in the run's folder", False)
    save_path: Path | None = flag("the .html to write (default: report.html in the run's folder)", None)
    max_embed_mb: int = flag("megabytes of samples and videos that go into the page; further ones are linked", 64)

    def _smoke_changes(self) -> dict[str, Any]:
        return {**super()._smoke_changes(), "output_dir": self.output_dir / SMOKE}


@dataclass(frozen=True, kw_only=True)
class Watch(RunStep):
    """Show the page of a run in the browser while it trains: on this machine only, until Ctrl-C."""

    command: ClassVar[str] = "watch"
    module: ClassVar[str] = "wangen.runtime.report.live"

    port: int = flag("port on 127.0.0.1; 0 takes a free one", 0)
