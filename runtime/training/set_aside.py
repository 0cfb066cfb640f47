"""LoRAs that a run would write over, or that would pass for its own: they are named `NAME-kept-step00000040`.

Which these are, and of which step, the files' headers say, so that a run that is killed on the way finds again what an
uninterrupted one has left. Nothing is set aside where there is no header (`--no_metadata`), and with `--fresh`.
"""

import json
import logging
import re
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path

from wangen.generator.errors import many
from wangen.generator.files import replace
from wangen.generator.header_keys import AVERAGED, FINGERPRINT, JUDGED_AT, RUN_STEPS
from wangen.generator.run_names import AVERAGE, BEST, EPOCH_PART, KEPT, LAYOUTS, at_step
from wangen.runtime.lora_folder import steps_of_epoch, told_by
from wangen.runtime.training.plan import ExpertPlan, Plan

log = logging.getLogger("wangen")


def set_old_best_aside(plan: Plan, expert: ExpertPlan, judged_at: str) -> None:
    """Keep an expert's best that is of other settings, or was judged at other points, from the next one.

    Args:
        plan: of the run.
        expert: whose best it is.
        judged_at: a digest of the points at which the next one was judged.

    Raises:
        OSError: the disk refused.
    """
    path = plan.file(expert, BEST)
    told = told_by(path)
    own = json.dumps(plan.fingerprint, sort_keys=True), judged_at
    if (told.get(FINGERPRINT), told.get(JUDGED_AT)) != own:
        _set_aside(plan, expert, path, told, "was the best by other held-out items, timesteps or settings")


def set_old_average_aside(plan: Plan, expert: ExpertPlan) -> None:
    """Keep the average of an earlier end of a run from passing for that of the last one, which has none.

    Raises:
        OSError: the disk refused.
    """
    path = plan.file(expert, AVERAGE)
    _set_aside(plan, expert, path, told_by(path), "is the average of an earlier end of the run")


def set_other_ends_aside(plan: Plan) -> None:
    """Keep the finished LoRAs of an earlier end, by other settings, from those that the run is to leave.

    Raises:
        OSError: the disk refused.
    """
    own = json.dumps(plan.fingerprint, sort_keys=True)
    for expert in plan.experts:
        told = told_by(path := plan.file(expert))
        if told.get(FINGERPRINT) != own:
            _set_aside(plan, expert, path, told, "is of an earlier end of the run, by other settings")
            set_old_average_aside(plan, expert)


def set_other_epochs_aside(plan: Plan) -> None:
    """Keep LoRAs that are named by epochs of another length from those of the same names that are still to come.

    Raises:
        OSError: the disk refused.
    """
    if not plan.options.output_dir.is_dir():
        return
    for expert in plan.experts:
        name = re.compile(rf"{re.escape(plan.file(expert).stem)}{EPOCH_PART}({AVERAGE})?\.safetensors")
        for path in sorted(filter(lambda path: name.fullmatch(path.name), plan.options.output_dir.iterdir())):
            told = told_by(path)
            before = steps_of_epoch(told) or ""
            if before.isdecimal() and int(before) != plan.steps_per_epoch:
                now = many(plan.steps_per_epoch, "step")
                _set_aside(plan, expert, path, told, f"is named by an epoch of {before}, and an epoch has {now} now")


def _set_aside(plan: Plan, expert: ExpertPlan, path: Path, told: Mapping[str, str], why: str) -> None:
    """Name an expert's file, in other layouts as well, by the step in its header; an earlier one keeps its name."""
    step = told.get(RUN_STEPS) or told.get("ss_steps", "")
    if plan.options.fresh or not step.isdecimal():
        return
    average = AVERAGE if AVERAGED in told or path.stem.endswith(AVERAGE) else ""  # a best may be one, too
    stem = plan.file(expert).stem
    found = {layout: file for layout in ("", *(f"-{layout}" for layout in LAYOUTS))
             if (file := path.with_stem(path.stem + layout)).is_file()}  # fmt: skip
    for number in chain([""], map(str, count(2))):
        kept = {
            layout: path.with_stem(f"{stem}{KEPT}{number}{at_step(int(step))}{average}{layout}") for layout in found
        }
        if not any(file.exists() for file in kept.values()):
            break
    for layout, before in found.items():
        replace(before, kept[layout])
        log.warning("  %s %s: it is %s now", before.name, why, kept[layout].name)
