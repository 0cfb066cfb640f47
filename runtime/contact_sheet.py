"""`--debug_mode`: a page with every sample as it will be encoded, its captions and its bucket. Needs no torch.

The pictures lie beside the page, in WebP without loss: each pixel of them is one that the encoder would get.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from wangen.generator.errors import WangenError, many, printable
from wangen.generator.files import write_text
from wangen.runtime.ahead import ahead
from wangen.runtime.decoders.base import FrameDecoder
from wangen.runtime.decoders.pyav import PYAV
from wangen.runtime.media import control_frames, mask_frames, target_frames
from wangen.runtime.samples import Sample, make_folder

if TYPE_CHECKING:
    from wangen.runtime.media import Frames

Mode = Literal["image", "video"]

MAX_SAMPLES = 500
"""More would make a page that no browser shows at ease."""
MAX_PIXELS = 1_000_000_000
"""Of all pictures and frames on a page: about 1 GB and two minutes."""

_THREADS = 2
"""Each holds the frames of one clip."""

_PICTURE = re.compile(r"[0-9]{4}-(target|mask|control[0-9]+)\.webp")

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { margin: 1.5rem; max-width: 110rem; }
h2 { margin-top: 2rem; border-bottom: 1px solid light-dark(#bbb, #555); }
.samples { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-start; }
article { background: light-dark(#f3f3f3, #262626); padding: .75rem; border-radius: 6px; max-width: 100%; }
.pictures { display: flex; flex-wrap: wrap; gap: .5rem; }
figure { margin: 0; } img { display: block; max-width: 100%; height: auto; }
figcaption, .facts, .more { color: light-dark(#555, #aaa); font-size: .85em; }
h3 { margin: .5rem 0 0; font-size: 1em; overflow-wrap: anywhere; }
ol { margin: .4rem 0 0; padding-left: 1.4rem; max-width: 60ch; } ol.single { list-style: none; padding: 0; }
li { white-space: pre-wrap; overflow-wrap: anywhere; } .error { color: light-dark(#b00020, #ff8a80); }
"""


@dataclass(frozen=True)
class _Picture:
    """A picture of a sample: its label, and its file or why there is none."""

    label: str
    file: str = ""
    error: str = ""


def write_sheet(samples: Sequence[Sample], mode: Mode, path: Path, decoder: FrameDecoder = PYAV) -> Path:
    """Write an HTML page of samples, grouped by bucket, and its pictures into the folder `<stem>_files` beside it.

    At most `MAX_SAMPLES` samples and `MAX_PIXELS` pixels are shown, of every bucket in turn; the rest is counted. A
    file that cannot be decoded has its message in the place of its picture.

    Args:
        samples: of the whole dataset.
        mode: `image` shows first frames, `video` whole clips at the model's frame rate.
        path: the page; an older one is replaced.
        decoder: of the clips.

    Returns:
        The page.

    Raises:
        WangenError: the page or its folder cannot be written.
    """
    folder = path.with_name(f"{path.stem}_files")
    make_folder(folder, "folder of the page", "give another --report_dir")
    for old in folder.iterdir():
        if _PICTURE.fullmatch(old.name):
            old.unlink()
    buckets: dict[tuple[int, int, int], list[Sample]] = {}
    for sample in samples:
        buckets.setdefault((*sample.size, sample.count), []).append(sample)
    chosen = _chosen(buckets.values(), mode)
    jobs = [partial(_draw, sample, mode, folder, number, decoder) for number, sample in enumerate(chosen, 1)]
    shown: dict[tuple[int, int, int], list[str]] = {}
    for sample, pictures in zip(chosen, ahead(jobs, _THREADS), strict=True):
        shown.setdefault((*sample.size, sample.count), []).append(_article(sample, pictures, folder.name))
    sections = [_section(bucket, members, shown.get(bucket, [])) for bucket, members in sorted(buckets.items())]
    write_text(path, _page(samples, len(buckets), len(chosen), sections))
    return path


def _chosen(buckets: Iterable[Sequence[Sample]], mode: Mode) -> list[Sample]:
    """The samples that are shown: of every bucket in turn, within the limits, at least one."""
    found: list[Sample] = []
    num_pixels = 0
    for sample in filter(None, chain.from_iterable(zip_longest(*buckets))):
        pictures = 1 + len(sample.item.companions)
        num_pixels += sample.size[0] * sample.size[1] * pictures * (sample.count if mode == "video" else 1)
        if found and (len(found) == MAX_SAMPLES or num_pixels > MAX_PIXELS):
            break
        found.append(sample)
    return found


def _draw(sample: Sample, mode: Mode, folder: Path, number: int, decoder: FrameDecoder) -> list[_Picture]:
    """Write the pictures of one sample: the target, its control media and its mask."""
    first_only = mode == "image"
    target = partial(target_frames, sample, first_only=first_only, decoder=decoder)
    sources: dict[str, Callable[[], Frames]] = {"target": target}
    controls = range(len(sample.item.controls))
    sources |= {f"control{i}": partial(control_frames, sample, i, decoder=decoder) for i in controls}
    sources |= {"mask": partial(mask_frames, sample)} if sample.item.mask else {}
    found = []
    for label, read in sources.items():
        name = f"{number:04}-{label}.webp"
        try:
            frames = read()
        except WangenError as error:
            found.append(_Picture(label, error=f"{Path(error.where).name}: {error.found}"))
            continue
        _save(frames[:, :1] if first_only else frames, sample.fps, folder / name)
        found.append(_Picture(label, name))
    return found


def _save(frames: "Frames", fps: int, path: Path) -> None:
    """(3 or 1, T, H, W) uint8 as WebP without loss; several frames play in a loop.

    Raises:
        WangenError: the file cannot be written.
    """
    import numpy as np
    from PIL import Image

    rows = frames[0] if len(frames) == 1 else frames.transpose(1, 2, 3, 0)  # (T, H, W) or (T, H, W, 3)
    first, *rest = (Image.fromarray(np.ascontiguousarray(frame)).convert("RGB") for frame in rows)
    ends_ms = [round(1000 * number / fps) for number in range(frames.shape[1] + 1)]
    durations_ms = [end - start for start, end in pairwise(ends_ms)]
    several = {"save_all": True, "append_images": rest, "duration": durations_ms, "loop": 0} if rest else {}
    try:
        first.save(path, "WEBP", lossless=True, method=0, quality=0, **several)
    except OSError as error:
        raise WangenError(f"cannot be written: {error}", where=str(path), cure="free space or fix the rights") from None


def _page(samples: Sequence[Sample], num_buckets: int, num_shown: int, sections: Iterable[str]) -> str:
    kinds = [many(sum(sample.item.media == media for sample in samples), what)
             for media, what in (("image", "image"), ("video", "clip window"))]  # fmt: skip
    captions = {caption for sample in samples for caption in sample.item.captions}
    totals = [many(len(samples), "sample"), *kinds, many(num_buckets, "bucket"), many(len(captions), "caption")]
    rest = len(samples) - num_shown
    more = f'<p class="more">The first {num_shown} are shown, of every bucket in turn … and {rest} more.</p>'
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n<title>What will be encoded</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>What will be encoded</h1>\n"
        f'<p class="totals">{", ".join(totals)}</p>\n{more if rest else ""}\n'
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def _section(bucket: tuple[int, int, int], members: Sequence[Sample], articles: Sequence[str]) -> str:
    width, height, count = bucket
    rest = len(members) - len(articles)
    more = f'<p class="more">… and {rest} more</p>' if rest else ""
    title = f"{width}x{height}x{count} <small>{many(len(members), 'sample')}</small>"
    return f'<section>\n<h2>{title}</h2>\n<div class="samples">\n' + "\n".join(articles) + f"\n</div>\n{more}</section>"


def _article(sample: Sample, pictures: Sequence[_Picture], folder: str) -> str:
    facts = sample.source.facts
    length = f", {facts.num_frames} frames in {facts.duration_s:.2f} s" if sample.item.media == "video" else ""
    captions = "".join(f"<li>{escape(_printable_lines(caption))}</li>" for caption in sample.item.captions)
    single = ' class="single"' if len(sample.item.captions) == 1 else ""
    drawn = "".join(_figure(picture, sample, folder) for picture in pictures)
    return (
        f'<article>\n<div class="pictures">{drawn}</div>\n<h3>{escape(printable(sample.name))}</h3>\n'
        f'<p class="facts">from {facts.width}x{facts.height}{length}</p>\n<ol{single}>{captions}</ol>\n</article>'
    )


def _printable_lines(text: str) -> str:
    r"""A text of anybody's for a page: what is neither a letter nor a line's end is spelled out.

    >>> print(_printable_lines("two\nlines\x00"))
    two
    lines\x00
    """
    return "\n".join(map(printable, text.split("\n")))


def _figure(picture: _Picture, sample: Sample, folder: str) -> str:
    label = f"<figcaption>{escape(picture.label)}</figcaption>"
    if picture.error:
        return f'<figure><p class="error">{escape(printable(picture.error))}</p>{label}</figure>'
    width, height = sample.size
    return (
        f'<figure><img src="{quote(folder)}/{picture.file}" width="{width}" height="{height}" loading="lazy" '
        f'alt="{escape(printable(sample.name))}">{label}</figure>'
    )
