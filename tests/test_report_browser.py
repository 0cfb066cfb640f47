"""The page of a run in headless Chromium: drawn, played, used by keyboard, on a phone, in the dark, without scripts."""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers import make_clip
from report_runs import HOSTILE, continuation_line, page_of, step_line, train_run, validation_line, write_metrics
from tiny import TinyRun

from wangen.generator.steps import Watch
from wangen.runtime.report.live import LiveRun
from wangen.runtime.report.server import LiveServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

PATIENCE_MS = 15_000


def wait(page: "Page", condition: str, tell: str = "null") -> None:
    """Until a JavaScript expression is true, else its failure and what ``tell`` is; playwright's own way is forbidden
    by the page's policy."""
    end = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < end, (condition, page.evaluate(tell))
        page.wait_for_timeout(20)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    api = pytest.importorskip("playwright.sync_api")
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium here: on Debian, apt-get install chromium")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run that was really trained."""
    folder = train_run(tiny_run, tmp_path_factory.mktemp("browser"))
    page_of(folder)
    return folder / "report.html"


@contextmanager
def opened(browser: "Browser", address: Path | str, *, linked: bool = False, **options: Any) -> "Iterator[Page]":
    """A page in a window of its own; at its end nothing may have been complained of, failed, or asked for elsewhere."""
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    wrong: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(f"dialog {dialog.message}"))
    page.on("requestfailed", lambda request: wrong.append(f"failed {request.url[:100]}"))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address.as_uri() if isinstance(address, Path) else address)
    yield page
    assert wrong == []
    if isinstance(address, Path) and not linked:
        assert [url[:60] for url in requests if not url.startswith(("data:", address.as_uri()))] == []
    context.close()


# ---- the page from disk ------------------------------------------------------------------------------------------


def test_charts_are_drawn_and_show_values_by_pointer_and_by_key(browser, report):
    with opened(browser, report) as page:
        sizes = page.eval_on_selector_all(
            ".plot svg", "all => all.map(svg => [svg.getBBox().width, svg.getBoundingClientRect().height])"
        )
        assert len(sizes) >= 9
        assert all(width > 200 and height > 100 for width, height in sizes)
        points = page.eval_on_selector(
            "#chart-loss .plot path.line", "path => path.getAttribute('d').split('L').length"
        )
        assert points == 6
        assert page.eval_on_selector("#chart-loss .plot path.line", "path => path.getTotalLength()") > 100
        tip = page.locator("#chart-loss .tip")
        assert not tip.is_visible()
        page.locator("#chart-loss .plot svg").hover()
        assert tip.inner_text().startswith("step ")
        page.locator("#chart-loss .plot").focus()
        page.keyboard.press("Home")
        assert tip.inner_text().startswith("step 1\nloss: ")
        page.keyboard.press("ArrowRight")
        assert tip.inner_text().startswith("step 2\n")
        page.keyboard.press("Escape")
        assert not tip.is_visible()
        assert page.locator("#chart-loss svg title").text_content() == "Training loss"
        page.locator("#chart-loss summary").click()
        assert page.locator("#chart-loss tbody tr").count() == 6


def times(page: "Page") -> list[float]:
    return page.eval_on_selector_all("#video-1 video", "all => all.map(video => video.currentTime)")


def test_the_videos_of_a_prompt_play_in_step(browser, report):
    with opened(browser, report) as page:
        row = page.locator("#video-1")
        row.scroll_into_view_if_needed()
        wait(page, "[...document.querySelectorAll('#video-1 video')].every(v => v.readyState >= 3)")
        assert times(page) == [0, 0, 0]
        row.get_by_role("button").focus()
        page.keyboard.press("Enter")
        named = "document.querySelector('#video-1 button').textContent"
        wait(page, f"document.querySelector('#video-1 video').currentTime > 0.5 && {named} === 'Pause'")
        played = times(page)
        assert max(played) - min(played) < 0.15
        page.keyboard.press("Space")
        wait(page, "[...document.querySelectorAll('#video-1 video')].every(v => v.paused && !v.seeking)")
        stopped = times(page)
        assert max(stopped) - min(stopped) < 0.02
        wait(page, f"{named} === 'Play'")
        row.get_by_role("slider").focus()
        page.keyboard.press("End")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        wait(page, "[...document.querySelectorAll('#video-1 video')].every(v => !v.seeking)")
        assert times(page) == pytest.approx([0.04] * 3, abs=0.005)
        assert row.get_by_role("slider").get_attribute("aria-valuetext") == "0.04 s"


def test_videos_that_are_linked_play_from_disk(browser, report):
    address = report.parent.parent / "linked page" / "report.html"
    page_of(report.parent, save_path=address, max_embed_mb=0)
    with opened(browser, address.resolve(), linked=True) as page:
        wait(page, "[...document.querySelectorAll('#video-1 video')].every(v => v.readyState >= 3)")
        assert page.locator("#video-1 video").first.get_attribute("src") == "../out/videos/base.mp4"
        page.locator("#video-1 button").click()
        wait(page, "document.querySelector('#video-1 video').currentTime > 0.2")


def test_samples_are_scrubbed_by_step(browser, report):
    with opened(browser, report) as page:
        block = page.locator("#sample-1")
        assert block.locator("figure:visible").count() == 1
        assert block.locator("output").inner_text() == "step 6"
        block.get_by_role("slider").focus()
        page.keyboard.press("ArrowLeft")
        assert block.locator("output").inner_text() == "step 3"
        assert block.locator("figure:visible figcaption").inner_text() == "step 3"
        page.keyboard.press("Home")
        assert block.get_by_role("slider").get_attribute("aria-valuetext") == "step 0"
        video = "document.querySelector('#sample-1 figure:not([hidden]) video')"
        page.evaluate(f"{video}.loop = true")  # else a busy machine may look at it after its end
        page.evaluate(
            "window.told = []; for (const name of ['play', 'playing', 'pause', 'seeked', 'ended', 'error'])"
            f" {video}.addEventListener(name, (event) => told.push([name, event.target.currentTime]))"
        )
        block.get_by_role("button").press("Enter")
        # The time may run before the event that names the button is delivered.
        named = "document.querySelector('#sample-1 button').textContent"
        wait(page, f"{video}.currentTime > 0 && {named} === 'Pause'", tell=f"[{named}, {video}.paused, told]")
        assert page.locator("#sample-2 figure:visible img").evaluate("image => image.naturalWidth") == 64
        assert not page.locator("#sample-2 button").is_visible()


def test_everything_is_reached_by_the_tab_key_and_seen_to_be(browser, report):
    with opened(browser, report) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        assert page.evaluate("document.activeElement.getBoundingClientRect().left >= 0")
        page.keyboard.press("Enter")
        wait(page, "location.hash === '#verdict'")
        controls = "a, button, input, summary, [tabindex='0']"
        wanted = page.eval_on_selector_all(controls, "all => all.filter(one => one.checkVisibility()).length")
        reached, hidden = set(), 0
        page.evaluate("document.querySelector('.skip').focus()")
        for _ in range(wanted + 60):
            name, ring = page.evaluate(
                "() => { const one = document.activeElement; one.dataset.n ??= String(Math.random());"
                " return [one.dataset.n, getComputedStyle(one).outlineStyle]; }"
            )
            reached.add(name)
            hidden += ring == "none"
            page.keyboard.press("Tab")
        assert len(reached) >= wanted
        assert hidden <= 2  # the body, where the round begins again


def test_on_a_phone_nothing_scrolls_sideways(browser, report):
    with opened(browser, report, viewport={"width": 360, "height": 740}) as page:
        page.eval_on_selector_all("details", "all => all.forEach(part => part.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        boxes = page.eval_on_selector_all(
            ".chart, article, .verdict, video, img", "all => all.map(one => one.getBoundingClientRect().right)"
        )
        assert max(boxes) <= 360
        assert page.locator("#chart-loss .plot svg").bounding_box()["width"] > 250


def colours(page: "Page") -> tuple[int, int]:
    """How light ground and text are, 0 to 765."""
    found = page.evaluate(
        "['backgroundColor', 'color'].map(name => getComputedStyle(document.body)[name].match(/\\d+/g).slice(0, 3)"
        ".reduce((sum, part) => sum + Number(part), 0))"
    )
    return found[0], found[1]


def test_light_and_dark_follow_the_reader(browser, report):
    with opened(browser, report, color_scheme="light") as page:
        ground, text = colours(page)
        assert ground > 600 > 300 > text
    with opened(browser, report, color_scheme="dark") as page:
        ground, text = colours(page)
        assert ground < 150 < 600 < text
        lines = page.eval_on_selector_all(".line", "all => all.map(one => getComputedStyle(one).stroke)")
        assert "none" not in lines


def test_without_scripts_all_tables_pictures_and_charts_are_there(browser, report):
    with opened(browser, report, java_script_enabled=False) as page:
        assert page.locator("#sample-1 figure:visible").count() == 3
        assert page.locator("#video-1 video[controls]").count() == 3
        assert not page.locator(".controls:visible").count()
        assert page.locator("#chart-loss .plot path.line").first.is_visible()
        for words in ("Use step 6", "a blue wall", "Ranking", "--learning_rate", HOSTILE):
            assert page.get_by_text(words).first.is_visible(), words
        page.locator("#chart-loss summary").click()
        assert page.locator("#chart-loss tbody tr").first.is_visible()


def test_hostile_texts_make_no_element(browser, report):
    with opened(browser, report) as page:
        assert page.locator("script").count() == 1
        assert page.locator("[onerror]").count() == 0
        assert HOSTILE in page.locator("#sample-2 h3").inner_text()


# ---- the page of a run that goes on ------------------------------------------------------------------------------


@contextmanager
def watched(folder: Path) -> Iterator[str]:
    with LiveServer(0, "token", LiveRun(Watch(output_dir=folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def append(folder: Path, line: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def sample(folder: Path, step: int) -> None:
    make_clip(folder / "samples" / f"cats-step{step:08d}-1.mp4", num_frames=64, seed=step)


def test_what_is_new_appears_and_what_the_reader_does_goes_on(browser, tmp_path):
    folder = write_metrics(tmp_path, [step_line(step) for step in range(1, 4)])
    sample(folder, 1)
    sample(folder, 3)
    with watched(folder) as url, opened(browser, url) as page:
        video = "document.querySelector('#sample-1 figure:not([hidden]) video')"
        wait(page, f"{video}.readyState >= 3")
        page.locator("#chart-loss summary").click()
        page.evaluate(f"{video}.loop = true")
        page.locator("#sample-1 button").click()
        wait(page, f"{video}.currentTime > 0.2")
        page.locator("#sample-1").scroll_into_view_if_needed()
        before = page.evaluate("scrollY")
        assert before > 0
        append(folder, step_line(4))
        append(folder, validation_line(4, 0.15))
        sample(folder, 4)
        page.get_by_text("Step 4: training.").wait_for()
        page.locator("#chart-held-out .plot svg").wait_for()
        assert page.locator("#chart-loss tbody tr").count() == 4
        assert page.locator("#chart-loss details").evaluate("part => part.open")
        # The sample plays on, and comes anew when it is left alone.
        assert page.locator("#sample-1 figure").count() == 2
        assert not page.evaluate(f"{video}.paused")
        assert page.locator("#sample-1").bounding_box()["y"] < page.viewport_size["height"]
        page.locator("#sample-1 button").click()
        page.locator("#verdict h2").click()
        page.evaluate("document.activeElement.blur()")
        wait(page, "document.querySelectorAll('#sample-1 figure').length === 3")
        assert page.locator("#sample-1 output").inner_text() == "step 4"
        report = {"step": "train", "ok": True, "summary": "4 steps", "settings": {"output_name": "cats"}}
        (folder / "train.report.json").write_text(json.dumps(report))
        page.get_by_text("Finished: 4 steps.").wait_for()


def test_a_section_that_is_new_appears(browser, tmp_path):
    folder = write_metrics(tmp_path, [step_line(1)])
    with watched(folder) as url, opened(browser, url) as page:
        page.get_by_text("Step 1: training.").wait_for()
        assert not page.locator("#continuations").count()
        append(folder, continuation_line(1))
        page.locator("#continuations #chart-continued-psnr .plot svg").wait_for()
        assert page.locator('nav a[href="#continuations"]').count() == 1
        append(folder, step_line(2))
        append(folder, continuation_line(2))
        page.get_by_text("Continuations at step 2").wait_for()


def test_it_says_when_the_server_has_ended(browser, tmp_path):
    folder = write_metrics(tmp_path, [step_line(1)])
    context = browser.new_context()
    page = context.new_page()
    with watched(folder) as url:
        page.goto(url)
        page.get_by_text("Step 1: training.").wait_for()
    page.get_by_text("wangen watch has ended").wait_for(timeout=PATIENCE_MS)
    assert page.locator("#chart-loss .plot svg").is_visible()
    context.close()


def test_the_live_page_on_a_phone_in_the_dark(browser, report):
    with (
        watched(report.parent) as url,
        opened(browser, url, viewport={"width": 360, "height": 740}, color_scheme="dark") as page,
    ):
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.locator("#status").inner_text() == "Finished: 6 steps."
        wait(page, "[...document.querySelectorAll('#video-1 video')].every(v => v.readyState >= 2)")
        page.locator("#video-1 button").click()
        wait(page, "document.querySelector('#video-1 video').currentTime > 0.2")
        played = times(page)
        assert max(played) - min(played) < 0.15
