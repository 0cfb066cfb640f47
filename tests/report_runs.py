"""Runs for the tests of the report: one that was trained, others written by hand or damaged; and their page as read."""

import json
import random
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from helpers import make_clip
from tiny import TinyRun

from wangen.generator.session import execute
from wangen.generator.steps import CheckCache, MakeReport
from wangen.runtime.evaluation_file import Evaluation, Memorisation, Row, ScoredCheckpoint, Video, write_evaluation
from wangen.runtime.report import make

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"quoted\" 'too'"

NO_TENSORS = b"\x02\0\0\0\0\0\0\0{}"
"""A .safetensors file in which nothing is."""

VIDEOS = ("base", "step 3", "step 6")


def train_run(tiny_run: TinyRun, folder: Path) -> Path:
    """Train six steps with held-out items and samples, check the cache, and write an evaluation by hand."""
    prompts = folder / "prompts.txt"
    prompts.parent.mkdir(parents=True, exist_ok=True)
    prompts.write_text(
        f"a red square --w 64 --h 64 --f 5 --s 1 --l 1\n{HOSTILE} --w 64 --h 64 --f 1 --s 1 --l 1\n", encoding="utf-8"
    )
    weights = {name: tiny_run.weights[name] for name in ("vae", "t5")}
    options = tiny_run.options(
        folder / "out", **weights, t5_dtype="float32", max_train_steps=6, validation_items=1, validation_timesteps=3,
        validate_every_n_steps=3, keep_best=True, save_every_n_steps=3, ema_decay=0.9, sample_prompts=prompts,
        sample_every_n_steps=3, sample_at_first=True, log_file=folder / "lora.log",
    )  # fmt: skip
    assert execute(options) == 0
    assert execute(CheckCache(dataset_config=tiny_run.dataset_config, report_dir=folder / "out")) == 0
    write_evaluation(evaluation("lora"), folder / "out" / "evaluation.json")
    for seed, name in enumerate(VIDEOS):
        make_clip(folder / "out" / "videos" / f"{name}.mp4", num_frames=48, seed=seed)
    return folder / "out"


def evaluation(run: str = "cats", **changes: Any) -> Evaluation:
    """Two checkpoints of a run, of which the later one is better; its videos lie in the folder videos."""
    found = Evaluation(
        mean_base=0.2,
        checkpoints=(
            ScoredCheckpoint("step 3", f"{run}-step00000003.safetensors", 0.19, -0.01, -0.03, 0.01, 2, 3),
            ScoredCheckpoint("step 6", f"{run}.safetensors", 0.17, -0.03, -0.05, -0.01, 1, 6),
        ),
        best="step 6",
        num_items=9,
        per_timestep=(Row("250", 0.3, {"step 3": 0.29, "step 6": 0.26}), Row("750", 0.1, {"step 3": 0.09})),
        per_activity=(Row("walking", 0.2, {"step 3": 0.19, "step 6": 0.17}, 4),),
        forgetting=(Row("landscapes", 0.15, {"step 3": 0.15, "step 6": 0.15}, 5),),
        videos=(
            Video("walking", HOSTILE, 42, {name: f"videos/{name}.mp4" for name in VIDEOS},
                  {"base": {"motion": 0.4}, "step 6": {"motion": 0.3, "PSNR": 21.25}}),
        ),
        memorisation=(Memorisation("step 6", "videos/step 6.mp4", "clip.mp4:0+5", 0.8, 0.9),),
    )  # fmt: skip
    return replace(found, **changes)


def step_line(step: int, **more: Any) -> dict[str, Any]:
    """A line of `metrics.jsonl`."""
    return {"step": step, "epoch": 0, "loss": 1.0 / step, "grad_norm": 0.1, "lr": 1e-4, "s_per_step": 0.5,
            "tokens_per_s": 4000.0, "data_wait_share": 0.01, "peak_memory_bytes": 9_000_000_000, "output_name": "cats",
            **more}  # fmt: skip


def validation_line(step: int, adapter: float, *, error: float | None = 0.002, expert: str = "") -> dict[str, Any]:
    """A validation against a base of 0.2."""
    rows = [{"timestep": 250.0, "base": 0.3, "adapter": adapter + 0.1, "ema": None}]
    told = {"rows": rows, "mean_base": 0.2, "mean_adapter": adapter, "mean_ema": None, "num_items": 8,
            "delta": adapter - 0.2, "standard_error": error, "num_better": 7}  # fmt: skip
    return {"step": step, "validation": told, "output_name": "cats", **({"expert": expert} if expert else {})}


def continuation_line(step: int, psnr: float = 20.0) -> dict[str, Any]:
    """Two continued clips, of which the second is a frame shorter; psnr is that of the first continued frame."""
    clips = [
        {"number": number, "name": f"{name}.mp4:0+9", "given_frames": 5,
         "model": {"psnr": [psnr - at for at in range(frames)], "ssim": [0.75] * frames},
         "vae": {"psnr": [30.0] * frames, "ssim": [0.9] * frames},
         "copy": {"psnr": [15.0] * frames, "ssim": [0.5] * frames}}
        for number, (name, frames) in enumerate((("walk", 4), ("wave", 3)), 1)
    ]  # fmt: skip
    means = {"model": {"psnr": psnr - 1.25, "ssim": 0.75}, "vae": {"psnr": 30.0, "ssim": 0.9},
             "copy": {"psnr": 15.0, "ssim": 0.5}}  # fmt: skip
    return {"step": step, "continuations": {"means": means, "clips": clips}, "output_name": "cats"}


def write_metrics(folder: Path, lines: list[dict[str, Any]], cut: str = "") -> Path:
    """Write `metrics.jsonl`, with a last line that is cut short; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + cut, encoding="utf-8")
    return folder


def page_of(folder: Path, **options: Any) -> str:
    """The page that `wangen report` makes."""
    report = make.run(MakeReport(output_dir=folder, **options))
    return Path(report.result["page"]).read_text(encoding="utf-8")


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._hidden = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self._hidden = tag in ("style", "script")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


JUNK = (None, True, -1, 1e308, "x", "</script>", [], [None], {}, {"a": {"b": []}})


def spoiled(value: Any, rng: random.Random) -> Any:
    """JSON in which a few values are something else."""
    if rng.random() < 0.08:
        return rng.choice(JUNK)
    if isinstance(value, dict):
        return {key: spoiled(part, rng) for key, part in value.items()}
    return [spoiled(part, rng) for part in value] if isinstance(value, list) else value
