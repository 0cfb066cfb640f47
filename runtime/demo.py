"""`wangen demo`: the main job from end to end with the tiny Wan of the examples, which learns a new colour.

The way: tiny checkpoints in Wan's own file formats -> a workspace with drawn clips of purple shapes -> publish -> the
emitted script in its real shell -> generate without and with the new LoRA. The tiny Wan has never seen purple. Every
part is the product's own; run again, each says what it skipped.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import distributions
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from wangen.generator import workspace
from wangen.generator.bundle import find_weights
from wangen.generator.errors import WangenError
from wangen.generator.files import write_text
from wangen.generator.install import install_line
from wangen.generator.interpreter import wanted_libraries
from wangen.generator.publish import plan as publishing
from wangen.generator.publish.source import read_source
from wangen.generator.run_folder import TRAIN_REPORT
from wangen.generator.steps import Generate
from wangen.generator.target import Target, host_platform_name
from wangen.generator.workspace import FILE, Workspace
from wangen.profiles import Model

SLUG = "example"
COLOUR = "purple"
SRGB = (140, 45, 190)
PROMPT = f"a {COLOUR} triangle moves to the right on a grey background"
"""Of a shape that the dataset does not show in this colour."""

SIDE_PX, NUM_FRAMES = 64, 17

_TOML = """\
# The workspace of `wangen demo`: small sizes, so that two CPU cores train it in seconds.
model = "t2v-1.3B"
resolution = [64, 64]
num_frames = 17
platforms = ["{platform}"]

[steps.cache_latents]
vae_dtype = "float32"

[steps.cache_text]
t5_dtype = "float32"

[steps.train]
max_train_steps = 80
learning_rate = 3e-3
mixed_precision = "no"
checkpointing = "none"
save_every_n_steps = 40
"""


def run(folder: Path) -> int:
    """Run or resume the demo in `folder` and return the exit code of its first failing part.

    Raises:
        WangenError: a library is missing, the folder holds something else, or it cannot be written.
    """
    started = time.monotonic()
    _require_libraries()
    place = _workspace(folder.absolute())
    target, model = place.targets[0], place.profile()
    skipped = _copy_weights(target, model)
    source = read_source(place.folder / "datasets" / SLUG, model)
    plan = publishing.make_plan(place, [target], SLUG, model, source)
    publishing.carry_out(plan)
    counts = ", ".join(f"{number} files {what}" for what, number in plan.bundles[0].counts.items())
    _say(f"published {len(source.items)} items: {counts}")
    code = _run_script(target)
    if code:
        return code
    outputs = target.folder / "outputs" / SLUG
    lora = outputs / f"{SLUG}.safetensors"
    skipped += _skipped_steps(outputs)
    videos = {outputs / "demo.mp4": (lora,), outputs / "without LoRA" / "demo.mp4": ()}
    missing = {
        video: loras
        for video, loras in videos.items()
        if not video.is_file() or (loras and video.stat().st_mtime < lora.stat().st_mtime)
    }
    skipped += [] if missing else ["generate"]
    for video, loras in missing.items():
        if code := _generate(target, model, loras, video):
            return code
    _table(target, lora, list(videos), skipped, time.monotonic() - started)
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
    _draw_dataset(folder / "datasets" / SLUG)
    return workspace.read(folder)


def _draw_dataset(folder: Path) -> None:
    """Circles and squares of the new colour, eight clips and four pictures; what is there already stays."""
    from wangen.runtime.moving_shapes import BACKGROUNDS, MOTIONS, caption_of, random_scene, write_clips
    from wangen.runtime.randomness import generator_for

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(12):
        shape, background = ("circle", "square")[number % 2], list(BACKGROUNDS)[number % 3]
        motion = list(MOTIONS)[number // 2 % 4] if number < 8 else "stands still"
        scene = random_scene(shape, SRGB, BACKGROUNDS[background], motion, generator_for("demo", number))
        caption = caption_of(shape, COLOUR, background, motion)
        name = f"{shape} {number + 1}"
        write_clips(folder, {name: (caption, scene)}, NUM_FRAMES if number < 8 else 1, 2 * SIDE_PX)


def _require_libraries() -> None:
    """Find out before anything is made: an environment may have PyTorch alone.

    Raises:
        WangenError: the runtime is not installed whole.
    """
    missing = [need.name for need in wanted_libraries() if not any(distributions(name=need.name))]
    if missing:
        names = ", ".join(missing)
        raise WangenError(f"not installed: {names}", where=sys.executable, cure=install_line(sys.executable))


def _is_demo(file: Path) -> bool:
    return file.read_text(encoding="utf-8", errors="replace").startswith(_TOML.splitlines()[0])


def _copy_weights(target: Target, model: Model) -> list[str]:
    """Put the tiny Wan where the scripts look for weights; returns what was there already.

    Raises:
        WangenError: this installation is without it.
    """
    folder = target.folder / "models"
    if all((target.reach(find_weights(target, weights)) or folder / "-").is_file() for weights in model.weights):
        return ["copying the tiny Wan"]
    with as_file(files("wangen.examples").joinpath("tiny-wan")) as source:
        if not source.is_dir():
            raise WangenError("this installation came with a bundle, without the tiny Wan", where=str(source),
                              cure="install wangen from its clone to run the demo")  # fmt: skip
        shutil.copytree(source, folder, dirs_exist_ok=True)
    _say(f"copied the tiny Wan, in Wan's own file formats: {folder}")
    return []


def _run_script(target: Target) -> int:
    """Run the emitted training script in this platform's own shell."""
    script = target.folder / f"train_{SLUG}.{'bat' if os.name == 'nt' else 'sh'}"
    command = ["cmd", "/c", script.name] if os.name == "nt" else ["bash", script.name]
    _say(f"running {' '.join(command)} in {target.folder}")
    return _call(command, target.folder)


def _call(command: list[str], folder: Path) -> int:
    """Run a command to its end and return its exit code; Ctrl-C reaches it too, and it answers for both.

    A kill of this process is handed on to it: else it would go on alone.
    """
    environment = os.environ | {"WANGEN_PYTHON": sys.executable, "WANGEN_NO_PAUSE": "1"}
    # At these sizes threads wait for each other longer than they compute, and far longer on a busy machine.
    environment.setdefault("OMP_NUM_THREADS", "1")
    with subprocess.Popen(command, cwd=folder, env=environment) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            while True:
                with suppress(KeyboardInterrupt):
                    return process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


def _generate(target: Target, model: Model, loras: tuple[Path, ...], video: Path) -> int:
    weights = {role.flag: target.reach(find_weights(target, role)) for role in model.weights}
    options = Generate(
        **weights,  # type: ignore[arg-type]
        task=model.name,
        prompt=PROMPT,
        lora_weight=loras,
        video_size=(SIDE_PX, SIDE_PX),
        video_length=NUM_FRAMES,
        infer_steps=20,
        guidance_scale=3.0,
        seed=1,
        save_path=video,
        log_file=target.folder / "logs" / f"{SLUG}.log",
    )
    command = [sys.executable, "-m", "wangen.runtime", *options.argv()]
    return _call(command, target.folder)


def _table(target: Target, lora: Path, videos: list[Path], skipped: list[str], seconds: float) -> None:
    """The result on one screen, from the steps' own reports and the clips."""
    from rich.console import Console
    from rich.table import Table

    outputs = target.folder / "outputs" / SLUG
    table = Table(title="wangen demo", show_lines=False)
    for column in ("step", "what was made", "seconds"):
        table.add_column(column, overflow="fold", justify="right" if column == "seconds" else "left")
    for step in ("check", "cache_latents", "cache_text", "check_cache", "train", "report", "generate"):
        report = _report(outputs / f"{step}.report.json")
        seconds_of_step = "skipped" if step in skipped else f"{report['timings']['total_s']:.1f}"
        table.add_row(step, report["summary"], seconds_of_step)
    result = _report(outputs / TRAIN_REPORT)["result"]
    console = Console()
    console.print(table)
    console.print(f"LoRA     {lora}", soft_wrap=True)
    console.print(f"page     {outputs / 'report.html'}", soft_wrap=True)
    for label, video in zip(("clip", "without"), videos, strict=True):
        console.print(f"{label:7}  {video}", soft_wrap=True)
    console.print(f"loss     {result['first_loss']:.4f} at the first step, {result['last_loss']:.4f} at the last")
    _tell_colours(console, videos)
    console.print(f"time     {seconds:.0f} s in all" + (f"; skipped: {', '.join(skipped)}" if skipped else ""))


def _tell_colours(console: Any, videos: list[Path]) -> None:
    """The mean colour of the shape that both clips show, as a patch of it and in numbers."""
    from wangen.runtime.moving_shapes import look, read_clip

    def shown(colour: tuple[float, float, float]) -> str:
        red, green, blue = map(round, colour)
        return f"[on rgb({red},{green},{blue})]    [/] ({red}, {green}, {blue})"

    taught, untaught = (look(read_clip(video)) for video in videos)
    before = shown(untaught.colour) if untaught.share else "it shows no shape"
    after = shown(taught.colour) if taught.share else "it shows no shape"
    console.print(f"{COLOUR:7}  {shown(SRGB)} was drawn; with the LoRA {after}; without {before}", soft_wrap=True)


def _report(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
