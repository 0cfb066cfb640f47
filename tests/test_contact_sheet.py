"""The page of `--debug_mode`: every sample as it will be encoded, parsed and decoded again."""

import json
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from helpers import make_clip, make_image
from PIL import Image

from wangen import profiles
from wangen.generator.errors import WangenError
from wangen.generator.steps import CheckCache
from wangen.runtime import contact_sheet
from wangen.runtime.contact_sheet import Mode, write_sheet
from wangen.runtime.media import control_frames, mask_frames, target_frames
from wangen.runtime.samples import Sample, read_samples

MODEL = profiles.model("t2v-1.3B")
VOID = {"meta", "img"}
HOSTILE = '<script>alert("x")</script> & a cat\nin two lines'


class Page(HTMLParser):
    """What a browser would make of a page: texts by tag, pictures, and that all tags are closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.images: list[dict[str, str]] = []
        self.sources = path.read_text(encoding="utf-8")
        self.feed(self.sources)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.images.append({name: value or "" for name, value in attrs})
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1], data.strip()))

    def text(self, tag: str) -> list[str]:
        return [text for found, text in self.texts if found == tag]

    def picture(self, number: int) -> np.ndarray:
        """(3, T, H, W) of a picture on the page."""
        with Image.open(self.path.parent / unquote(self.images[number]["src"])) as image:
            frames = []
            for index in range(getattr(image, "n_frames", 1)):
                image.seek(index)
                frames.append(np.asarray(image.convert("RGB")))
        return np.stack(frames).transpose(3, 0, 1, 2)


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    """An image with two control images and a mask; a clip with a control clip; in buckets."""
    make_image(tmp_path / "media/cat & 'mouse'.png", (200, 150), seed=1)
    for number in (0, 1):
        make_image(tmp_path / f"lines/{number}.png", (96, 96), seed=2 + number)
    Image.new("L", (200, 150), 130).save(tmp_path / "lines/mask.png")
    make_clip(tmp_path / "clips/walk.mp4", 12, size=(128, 64), seed=5)
    make_clip(tmp_path / "clips/depth.mp4", 12, size=(64, 64), seed=6)
    image = {"image_path": "media/cat & 'mouse'.png", "caption": [HOSTILE, "second"], "mask_path": "lines/mask.png"}
    image |= {f"control_path_{number}": f"lines/{number}.png" for number in (0, 1)}
    clip = {"video_path": "clips/walk.mp4", "caption": "a walk", "control_path": "clips/depth.mp4"}
    (tmp_path / "images.jsonl").write_text(json.dumps(image), encoding="utf-8")
    (tmp_path / "clips.jsonl").write_text(json.dumps(clip), encoding="utf-8")
    folder = tmp_path.as_posix()
    (tmp_path / "set.toml").write_text(
        "[general]\nresolution = [64, 64]\nenable_bucket = true\n"
        f"[[datasets]]\nimage_jsonl_file = '{folder}/images.jsonl'\ncache_directory = '{folder}/cache'\n"
        f"[[datasets]]\nvideo_jsonl_file = '{folder}/clips.jsonl'\ncache_directory = '{folder}/cache'\n"
        "target_frames = [5]\nframe_extraction = 'chunk'\n"
    )
    return read_samples(CheckCache(dataset_config=tmp_path / "set.toml"), MODEL)


def by_bucket(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: (sample.size, sample.count))


@pytest.mark.parametrize("mode", ["image", "video"])
def test_the_pictures_are_what_will_be_encoded(samples: list[Sample], tmp_path: Path, mode: Mode):
    page = Page(write_sheet(samples, mode, tmp_path / "out" / "a sheet.html"))
    wanted = [
        frames
        for sample in by_bucket(samples)
        for frames in (
            target_frames(sample),
            *(control_frames(sample, number) for number in range(len(sample.controls))),
            *([mask_frames(sample).repeat(3, axis=0)] if sample.mask else []),
        )
    ]
    assert len(page.images) == len(wanted) == 8
    for number, frames in enumerate(wanted):
        assert (page.picture(number) == (frames[:, :1] if mode == "image" else frames)).all()
        assert (int(page.images[number]["width"]), int(page.images[number]["height"])) == frames.shape[:1:-1]


def test_clips_play_at_the_models_frame_rate(samples: list[Sample], tmp_path: Path):
    page = Page(write_sheet(samples[1:], "video", tmp_path / "sheet.html"))
    with Image.open(tmp_path / unquote(page.images[0]["src"])) as image:
        durations = []
        for index in range(5):
            image.seek(index)
            image.load()
            durations.append(image.info["duration"])
    assert sum(durations) == round(5 * 1000 / 16)
    assert set(durations) <= {62, 63}


def test_captions_names_sizes_and_counts_are_said(samples: list[Sample], tmp_path: Path):
    page = Page(write_sheet(samples, "image", tmp_path / "sheet.html"))
    assert page.text("li") == [caption for sample in by_bucket(samples) for caption in sample.item.captions]
    assert HOSTILE in page.text("li")
    assert "script" not in page.tags
    assert set(page.text("h3")) == {"cat & 'mouse'.png", "walk.mp4:0+5", "walk.mp4:5+5"}
    image, clip = samples[:2]
    sizes = {f"{s.size[0]}x{s.size[1]}x{s.count}" for s in (image, clip)}
    assert set(page.text("h2")) == sizes
    assert sorted(page.text("small")) == ["1 sample", "2 samples"]
    facts = page.text("p")
    assert facts[0] == "3 samples, 1 image, 2 clip windows, 2 buckets, 3 captions"
    assert "from 200x150" in facts
    assert "from 128x64, 12 frames in 0.75 s" in facts
    assert {"target", "control0", "control1", "mask"} == set(page.text("figcaption"))


def test_nothing_is_loaded_from_elsewhere(samples: list[Sample], tmp_path: Path):
    page = Page(write_sheet(samples, "image", tmp_path / "sheet.html"))
    assert not {"link", "script", "iframe"} & set(page.tags)
    assert "://" not in page.sources
    assert "url(" not in page.sources
    assert all(image["src"].startswith("sheet_files/") for image in page.images)


def test_a_page_is_bounded_and_the_rest_is_counted(
    samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(contact_sheet, "MAX_SAMPLES", 4)
    page = Page(write_sheet([samples[1]] * 9 + [samples[0]], "image", tmp_path / "sheet.html"))
    assert len(page.text("h3")) == 4
    assert "cat & 'mouse'.png" in page.text("h3")  # every bucket is shown
    assert "The first 4 are shown, of every bucket in turn … and 6 more." in page.text("p")
    assert "… and 6 more" in page.text("p")
    assert sorted(page.text("small")) == ["1 sample", "9 samples"]
    monkeypatch.setattr(contact_sheet, "MAX_PIXELS", 1)
    assert len(Page(write_sheet(samples, "video", tmp_path / "sheet.html")).text("h3")) == 1


def test_pictures_of_an_older_page_go_and_other_files_stay(samples: list[Sample], tmp_path: Path):
    write_sheet(samples, "image", tmp_path / "sheet.html")
    (tmp_path / "sheet_files" / "mine.webp").write_bytes(b"x")
    page = Page(write_sheet(samples[1:2], "image", tmp_path / "sheet.html"))
    left = {path.name for path in (tmp_path / "sheet_files").iterdir()}
    assert left == {Path(image["src"]).name for image in page.images} | {"mine.webp"}


def test_a_file_that_cannot_be_decoded_has_its_message(samples: list[Sample], tmp_path: Path):
    samples[0].item.path.write_bytes(b"x")
    page = Page(write_sheet(samples, "image", tmp_path / "sheet.html"))
    assert len(page.images) == 7
    assert any("cat & 'mouse'.png: cannot be decoded" in text for text in page.text("p"))


def test_a_file_in_the_place_of_its_folder_is_named(samples: list[Sample], tmp_path: Path):
    (tmp_path / "sheet").write_text("mine")
    with pytest.raises(WangenError, match="cannot make the folder of the page") as raised:
        write_sheet(samples, "image", tmp_path / "sheet" / "index.html")
    assert "--report_dir" in raised.value.cure


def test_a_page_of_nothing(tmp_path: Path):
    page = Page(write_sheet([], "video", tmp_path / "sheet.html"))
    assert page.text("p") == ["0 samples, 0 images, 0 clip windows, 0 buckets, 0 captions"]
