"""`wangen demo`: the main job from end to end on the embedded example, with tiny random weights.

The way: tiny checkpoints in Wan's own file formats -> a workspace -> publish -> the emitted script in its real shell
-> generate with the new LoRA. Every part is the product's own; run again, each says what it skipped.
"""

import json
import os
import subprocess
import sys
import time
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from wangen.generator import workspace
from wangen.generator.bundle import find_weights
from wangen.generator.dataset import media_of
from wangen.generator.errors import WangenError
from wangen.generator.files import write_text
from wangen.generator.publish import plan as publishing
from wangen.generator.publish.source import read_source
from wangen.generator.steps import Generate
from wangen.generator.target import Target, host_platform_name
from wangen.generator.workspace import FILE, Workspace
from wangen.profiles import Model

SLUG = "example"
PROMPT = "A tabby cat looks into the camera"

_TOML = """\
# The workspace of `wangen demo`: small sizes, so that two CPU cores train it in seconds.
model = "t2v-1.3B"
resolution = [128, 128]
num_frames = 17
platforms = ["{platform}"]

[steps.cache_latents]
vae_dtype = "float32"

[steps.cache_text]
t5_dtype = "float32"

[steps.train]
max_train_steps = 30
learning_rate = 2e-3
mixed_precision = "no"
save_every_n_steps = 10
"""


def run(folder: Path) -> int:
    """Run or resume the demo in `folder` and return the exit code of its first failing part.

    Raises:
        WangenError: the folder holds something else, or cannot be written.
    """
    started = time.monotonic()
    place = _workspace(folder.absolute())
    target, model = place.targets[0], place.profile()
    skipped = _make_weights(target, model, place)
    source = read_source(place.folder / "datasets" / SLUG, model)
    plan = publishing.make_plan(place, [target], SLUG, model, source)
    publishing.carry_out(plan)
    counts = ", ".join(f"{number} files {what}" for what, number in plan.bundles[0].counts.items())
    _say(f"published {len(source.items)} items: {counts}")
    code = _run_script(target)
    if code:
        return code
    outputs = target.folder / "outputs" / SLUG
    video, lora = outputs / "demo.mp4", outputs / f"{SLUG}.safetensors"
    skipped += _skipped_steps(outputs)
    if video.is_file() and video.stat().st_mtime >= lora.stat().st_mtime:
        skipped.append("generate")
    else:
        code = _generate(target, model, lora, video)
        if code:
            return code
    _table(target, lora, video, skipped, time.monotonic() - started)
    return 0


def _skipped_steps(outputs: Path) -> list[str]:
    """Which steps of the script found their work done."""
    reports = {step: _report(outputs / f"{step}.report.json") for step in ("cache_latents", "cache_text", "train")}
    skipped = [step for step in ("cache_latents", "cache_text") if not reports[step]["counts"]["computed"]]
    return [*skipped, *(["train"] if reports["train"]["result"]["done_before"] else [])]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the demo's own words, beside the steps' log


def _workspace(folder: Path) -> Workspace:
    """Make the workspace with a copy of the example, or open the one of an earlier run."""
    wanted = _TOML.format(platform=host_platform_name())
    marker = folder / FILE
    if folder.exists() and not (marker.is_file() and _is_demo(marker)) and (folder.is_file() or any(folder.iterdir())):
        raise WangenError("this is not a folder of an earlier demo", where=str(folder), cure="give --dir a new folder")
    if not marker.is_file():
        workspace.init(folder)
        write_text(marker, wanted)
    dataset = folder / "datasets" / SLUG
    dataset.mkdir(parents=True, exist_ok=True)
    with as_file(files("wangen.examples").joinpath("dataset")) as source:
        for path in sorted(source.iterdir()):
            copy = dataset / path.name
            if (media_of(path) or path.suffix == ".txt") and not copy.exists():
                copy.write_bytes(path.read_bytes())
    return workspace.read(folder)


def _is_demo(file: Path) -> bool:
    return file.read_text(encoding="utf-8", errors="replace").startswith(_TOML.splitlines()[0])


def _make_weights(target: Target, model: Model, place: Workspace) -> list[str]:
    """Write the tiny checkpoints; returns what was there already."""
    folder = target.folder / "models"
    if all((target.reach(find_weights(target, weights)) or folder / "-").is_file() for weights in model.weights):
        return ["making the tiny weights"]
    from wangen.runtime.tiny import write_tiny_wan

    captions = [path.read_text(encoding="utf-8") for path in sorted((place.folder / "datasets" / SLUG).glob("*.txt"))]
    write_tiny_wan(folder, captions)
    _say(f"made tiny random weights in Wan's own file formats: {folder}")
    return []


def _run_script(target: Target) -> int:
    """Run the emitted training script in this platform's own shell."""
    script = target.folder / f"train_{SLUG}.{'bat' if os.name == 'nt' else 'sh'}"
    command = ["cmd", "/c", script.name] if os.name == "nt" else ["bash", script.name]
    _say(f"running {' '.join(command)} in {target.folder}")
    return _call(command, target.folder)


def _call(command: list[str], folder: Path) -> int:
    """Run a command to its end and return its exit code; Ctrl-C reaches it too, and it answers for both."""
    environment = os.environ | {"WANGEN_PYTHON": sys.executable, "WANGEN_NO_PAUSE": "1"}
    with subprocess.Popen(command, cwd=folder, env=environment) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue


def _generate(target: Target, model: Model, lora: Path, video: Path) -> int:
    weights = {role.flag: target.reach(find_weights(target, role)) for role in model.weights}
    options = Generate(
        **weights,  # type: ignore[arg-type]
        task=model.name,
        prompt=PROMPT,
        lora_weight=(lora,),
        video_size=(128, 128),
        video_length=17,
        infer_steps=8,
        guidance_scale=1.0,
        save_path=video,
        log_file=target.folder / "logs" / f"{SLUG}.log",
    )
    command = [sys.executable, "-m", "wangen.runtime", *options.argv()]
    return _call(command, target.folder)


def _table(target: Target, lora: Path, video: Path, skipped: list[str], seconds: float) -> None:
    """The result on one screen, from the steps' own reports."""
    from rich.console import Console
    from rich.table import Table

    outputs = target.folder / "outputs" / SLUG
    table = Table(title="wangen demo", show_lines=False)
    for column in ("step", "what was made", "seconds"):
        table.add_column(column, overflow="fold", justify="right" if column == "seconds" else "left")
    for step in ("check", "cache_latents", "cache_text", "check_cache", "train", "generate"):
        report = _report(outputs / f"{step}.report.json")
        seconds_of_step = "skipped" if step in skipped else f"{report['timings']['total_s']:.1f}"
        table.add_row(step, report["summary"], seconds_of_step)
    result = _report(outputs / "train.report.json")["result"]
    console = Console()
    console.print(table)
    console.print(f"LoRA   {lora}", soft_wrap=True)
    console.print(f"clip   {video}", soft_wrap=True)
    console.print(f"loss   {result['first_loss']:.4f} at the first step, {result['last_loss']:.4f} at the last")
    console.print(f"time   {seconds:.0f} s in all" + (f"; skipped: {', '.join(skipped)}" if skipped else ""))
    console.print("The weights are tiny and random: the clip shows noise. Your own Wan weights show pictures.")


def _report(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
