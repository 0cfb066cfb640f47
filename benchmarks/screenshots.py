"""The pictures of docs/report.md: the page of a training on the tiny Wan that was judged, in headless Chromium.

python benchmarks/screenshots.py FOLDER IMAGES

Trains a LoRA for 200 steps on the three new colours of `it_learns.py`, with held-out clips, samples and an average,
judges it by the held-out clips, and photographs the page. Needs playwright, and Chromium on the PATH or in $CHROMIUM.
"""

import argparse
import os
import shutil
from dataclasses import replace
from pathlib import Path

from it_learns import DIT, NUM_CLIPS, NUM_FRAMES, NUM_HELD_OUT, SIDE_PX, T5, TASK, VAE, dataset, training
from playwright.sync_api import Browser, Page, sync_playwright

from wangen.generator.steps import Evaluate, MakeReport
from wangen.runtime import evaluate, train
from wangen.runtime.report import make

PROMPT = "a purple circle moves down on a black background"
STEPS = 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("images", type=Path)
    options = parser.parse_args()
    page = judged_run(options.folder.resolve())
    with sync_playwright() as playwright:
        program = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        photograph(browser, page, options.images)
        browser.close()


def judged_run(folder: Path) -> Path:
    """Train, judge, and return the page."""
    trained_on = dataset(folder / "colours", NUM_CLIPS)
    held_out = dataset(folder / "held-out", NUM_HELD_OUT, first=NUM_CLIPS)
    prompts = folder / "prompts.txt"
    prompts.write_text(f"{PROMPT} --w {SIDE_PX} --h {SIDE_PX} --f {NUM_FRAMES} --s 20 --l 3 --d 42\n", encoding="utf-8")
    output = folder / "run"
    flags = replace(
        training(trained_on, held_out, output, STEPS), output_name="colours", validate_every_n_steps=20, keep_best=True,
        ema_decay=0.95, save_every_n_steps=STEPS // 2, sample_prompts=prompts, sample_every_n_steps=STEPS // 4,
        sample_at_first=True, vae=VAE, vae_dtype="float32", t5=T5, t5_dtype="float32",
    )  # fmt: skip
    train.run(flags)
    evaluate.run(Evaluate(
        dataset_config=held_out, training_config=trained_on, lora_weight=(output,), task=TASK, dit=DIT, vae=VAE, t5=T5,
        prompt_file=prompts, videos_of="all", dtype="float32", vae_dtype="float32", t5_dtype="float32", device="cpu",
        output_dir=output,
    ))  # fmt: skip
    make.run(MakeReport(output_dir=output))
    return output / "report.html"


def photograph(browser: Browser, address: Path, images: Path) -> None:
    """Write the four pictures."""
    page = opened(browser, address, 1180, 1240)
    page.screenshot(path=images / "report.png")
    sample = page.locator("#sample-1")
    sample.scroll_into_view_if_needed()
    sample.screenshot(path=images / "report-samples.png")
    page = opened(browser, address, 952, 1000)
    page.locator("#video-1").scroll_into_view_if_needed()
    page.eval_on_selector(
        "#video-1 input", "one => { one.value = one.max / 2; one.dispatchEvent(new Event('input')); }"
    )
    page.wait_for_timeout(1000)
    top, bottom = page.evaluate(
        "[['#evaluation', 'top'], ['#video-1', 'bottom']].map("
        "([one, edge]) => scrollY + document.querySelector(one).getBoundingClientRect()[edge])"
    )
    shown = {"x": 0, "y": top, "width": 952, "height": bottom - top + 16}
    page.screenshot(path=images / "report-evaluation.png", full_page=True, clip=shown)
    page = opened(browser, address, 360, 740, scheme="dark")
    page.locator("#chart-loss").scroll_into_view_if_needed()
    page.screenshot(path=images / "report-phone-dark.png")


def opened(browser: Browser, address: Path, width: int, height: int, *, scheme: str = "light") -> Page:
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(address.as_uri())
    page.wait_for_timeout(1000)
    return page


if __name__ == "__main__":
    main()
