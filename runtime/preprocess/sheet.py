"""The contact sheet: one HTML file with pictures of every clip and of what was dropped, and why. Opens from disk."""

from base64 import b64encode
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from pathlib import Path

from wangen.generator.errors import WangenError, many, printable
from wangen.generator.files import write_text
from wangen.runtime.preprocess.analysis import load
from wangen.runtime.preprocess.candidates import Window, reason_counts
from wangen.runtime.preprocess.form import Form, Place
from wangen.runtime.preprocess.manifests import Outcome

MAX_SHOWN = 400
"""Clips, and as many of those dropped: about 8 MB each. A larger page opens slowly."""
NUM_PICTURES = 3

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { margin: 1.5rem auto; padding: 0 1rem; max-width: 90rem; }
h1 { margin-bottom: .2rem; } h2 { margin-top: 2.2rem; border-bottom: 1px solid light-dark(#bbb, #555); }
.clips { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); gap: 1rem; }
article { background: light-dark(#f3f3f3, #262626); padding: .75rem; border-radius: 6px; min-width: 0; }
.strip { display: flex; gap: 3px; } .strip img { flex: 1; min-width: 0; height: 7rem; object-fit: contain; }
h3 { margin: .5rem 0 0; font-size: .95em; overflow-wrap: anywhere; }
p { margin: .3rem 0; overflow-wrap: anywhere; } .facts, .more { color: light-dark(#555, #aaa); font-size: .85em; }
.why { color: light-dark(#a3001b, #ff8a80); } a { color: inherit; }
nav a { margin-right: 1rem; }
"""

_UNITS = {"freeze_s": " s", "motion": " %"}
_NAMES = {"freeze_s": "freeze"}


def write_sheet(outcome: Outcome, form: Form, place: Place) -> None:
    """Write `contact_sheet.html` into the output folder.

    At most `MAX_SHOWN` of each kind are shown, evenly chosen; the rest is counted.

    Raises:
        WangenError: the page cannot be written, or the record of a video is gone.
    """
    parts = [
        ("train", "Training", outcome.train),
        ("val", "Validation", outcome.val),
        ("dropped", "Left out", outcome.dropped),
    ]
    sections = [_section(key, title, windows, form, place) for key, title, windows in parts if windows]
    links = "".join(f'<a href="#{key}">{title} ({len(windows)})</a>' for key, title, windows in parts if windows)
    write_text(
        place.folder / "contact_sheet.html",
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>Clips</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>Clips</h1>\n"
        f"<p>{many(len(outcome.train) + len(outcome.val), 'clip')} of {form.words()}</p>\n<nav>{links}</nav>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n",
    )


def _section(key: str, title: str, windows: Sequence[Window], form: Form, place: Place) -> str:
    step = max(1, -(-len(windows) // MAX_SHOWN))
    shown = windows[::step]
    more = f'<p class="more">Every {step}th of {len(windows)} is shown.</p>\n' if step > 1 else ""
    counts = ", ".join(f"{kind} {number}" for kind, number in reason_counts(windows).items())
    why = f'<p class="more">{escape(counts)}</p>\n' if key == "dropped" else ""
    articles = "\n".join(_article(window, key, form, place) for window in shown)
    return f'<section id="{key}">\n<h2>{title}</h2>\n{more}{why}<div class="clips">\n{articles}\n</div>\n</section>'


def _article(window: Window, key: str, form: Form, place: Place) -> str:
    pace = window.footage.pace(form.fps)
    times = f"{window.start / pace:.2f} to {window.end / pace:.2f} s"
    title = f"{escape(printable(window.footage.video.name))}, {times}"
    if key != "dropped":
        title = f'<a href="clips/{window.name(form)}">{title}</a>'
    signals = [f"{_NAMES.get(name, name)} {value:.3g}{_UNITS.get(name, '')}" for name, value in window.signals.items()]
    why = "".join(f'<p class="why">{escape(reason)}</p>' for reason in window.reasons)
    prompt = "\n".join(map(printable, window.prompt.split("\n")))
    return (
        f'<article>\n<div class="strip">{_strip(window, form, place)}</div>\n<h3>{title}</h3>\n'
        f'<p>{escape(prompt)}</p>\n{why}<p class="facts">{" · ".join(signals)}</p>\n</article>'
    )


def _strip(window: Window, form: Form, place: Place) -> str:
    """Pictures from the beginning, the middle and the end of a window; in a very short one the nearest there is."""
    pictures, every = _pictures(place.analysis(window.footage.source.digest, form.fps))
    first, last = -(-window.start // every), max(0, window.end - 1) // every
    first = min(first, last)
    chosen = sorted({first + round((last - first) * part / (NUM_PICTURES - 1)) for part in range(NUM_PICTURES)})
    return "".join(
        f'<img src="data:image/jpeg;base64,{b64encode(pictures[number]).decode()}" loading="lazy" '
        f'alt="at {number * every / window.footage.pace(form.fps):.1f} s">'
        for number in chosen
    )


@lru_cache(maxsize=1)
def _pictures(path: Path) -> tuple[tuple[bytes, ...], int]:
    """The pictures of a video and how many frames lie from one to the next; windows come video by video.

    Raises:
        WangenError: the video's record was taken away or damaged since the video was watched.
    """
    analysis = load(path)
    if analysis is None:
        raise WangenError("the record of a video is gone or damaged, though this run has seen it whole",
                          where=str(path), cure="run the same line again: it watches the video anew")  # fmt: skip
    return analysis.pictures, analysis.every
