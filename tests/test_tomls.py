"""Dataset TOMLs: musubi-tuner's files are read, mistakes are answered with what to write."""

import logging
import string
from pathlib import Path, PureWindowsPath

import pytest
from helpers import write_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from wangen.generator.errors import UsageError, WangenError
from wangen.generator.tomls import DatasetEntry, load, read_dataset, write_dataset

BLOCK = '[[datasets]]\nimage_directory = "media"\ncache_directory = "cache"\n'
MANIFEST = '[[datasets]]\nimage_jsonl_file = "set.jsonl"\ncache_directory = "cache"\n'
CLIPS = '[[datasets]]\nvideo_directory = "media"\ncache_directory = "cache"\n'


def entries(folder: Path, text: str | bytes) -> tuple[DatasetEntry, ...]:
    write_tree(folder, {"d.toml": text})
    return read_dataset(folder / "d.toml")


def refusal(folder: Path, text: str | bytes) -> WangenError:
    with pytest.raises(WangenError) as caught:
        entries(folder, text)
    assert caught.value.exit_code == 2
    assert str(folder / "d.toml") in caught.value.where
    return caught.value


def test_a_switch_of_musubi_tuner_that_is_off_is_as_if_it_were_not_there(tmp_path):
    off = "qwen_image_edit_no_resize_control = false\nmultiple_target = false\n"
    assert entries(tmp_path, BLOCK + off) == entries(tmp_path, BLOCK)


def test_a_file_for_musubi_tuner_is_read(tmp_path):
    text = """
[general]
resolution = 256
caption_extension = ".caption"
batch_size = 2
num_repeats = 3
enable_bucket = true
bucket_no_upscale = true

[[datasets]]
image_directory = "/data/images"
cache_directory = "/data/cache"
batch_size = 4

[[datasets]]
video_directory = "/data/clips"
cache_directory = "/data/clip cache"
resolution = [832, 480]
target_frames = [17, 1, 17]
frame_extraction = "uniform"
frame_sample = 4
frame_stride = 2
max_frames = 65
source_fps = 30
"""
    images, clips = entries(tmp_path, text)
    assert images == DatasetEntry(
        directory=Path("/data/images"), media="image", cache_directory=Path("/data/cache"), resolution=(256, 256),
        caption_extension=".caption", batch_size=4, num_repeats=3, enable_bucket=True, bucket_no_upscale=True,
    )  # fmt: skip
    assert clips == DatasetEntry(
        directory=Path("/data/clips"), media="video", cache_directory=Path("/data/clip cache"), resolution=(832, 480),
        caption_extension=".caption", batch_size=2, num_repeats=3, enable_bucket=True, bucket_no_upscale=True,
        target_frames=(1, 17), frame_extraction="uniform", frame_sample=4, frame_stride=2, max_frames=65,
        source_fps=30.0,
    )  # fmt: skip


def test_the_cache_is_the_media_folder_unless_named(tmp_path):
    (entry,) = entries(tmp_path, '[[datasets]]\nimage_directory = "/data/images"')
    assert entry.cache_directory == entry.directory


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[genral]\nresolution = 1\n" + BLOCK, "did you mean general?"),
        (BLOCK + "batchsize = 1", "did you mean batch_size?"),
        ("[general]\nresolutoin = 1\n" + BLOCK, "did you mean resolution?"),
        (BLOCK + "zzz = 1", "known keys: background_color, batch_size"),
        ('[general]\ncache_directory = "x"\n' + BLOCK, "into each [[datasets]]"),
        ('[general]\ncontrol_directory = "x"\n' + BLOCK, "into each [[datasets]]"),
        (BLOCK + 'control_directory = "media"', "share the media folder"),
        (BLOCK + 'mask_directory = "media"', "share the media folder"),
        (BLOCK + 'control_dir = "x"', "did you mean control_directory?"),
        (BLOCK + "qwen_image_edit_no_resize_control = true", "cut as their target is"),
        (BLOCK + "qwen_image_edit_control_resolution = 512", "write control_resolution"),
        (BLOCK + "multiple_target = true", "not in this version"),
        (BLOCK + "skip_corrupted_cache = true", "caching encodes them again"),
        ('{"datasets": []}', "it is JSON: write TOML"),
        (BLOCK + 'multiple_captions = "yes"', "true or false"),
        (BLOCK + 'background_color = "white"', "a colour like #ffffff"),
        (BLOCK + "background_color = 0", "a colour like #ffffff"),
        (BLOCK + "fp_latent_window_size = 9", "belongs to FramePack"),
        ('[[datasets]]\nimage_jsonl_file = "x.jsonl"', "image_jsonl_file needs cache_directory"),
        (MANIFEST + 'control_directory = "x"', "write control_path into the lines"),
        (MANIFEST + 'mask_directory = "x"', "write mask_path into the lines"),
        (MANIFEST + "target_frames = [1]", "use video_jsonl_file"),
        (MANIFEST + 'image_directory = "x"', "names image_directory and image_jsonl_file"),
        (BLOCK + "target_frames = [1]", "use video_directory"),
        (BLOCK + 'video_directory = "x"', "names image_directory and video_directory"),
        ('[[datasets]]\ncache_directory = "x"', "a block names no media"),
        (BLOCK + 'resolution = "512"', "one whole number or [width, height]"),
        (BLOCK + "resolution = [1, 2, 3]", "one whole number or [width, height]"),
        (BLOCK + "resolution = true", "whole number above 0, got True"),
        (BLOCK + "resolution = 512512", "at most 16384 pixels a side"),
        (BLOCK + "resolution = [512, 0]", "whole number above 0, got 0"),
        (BLOCK + 'batch_size = "2"', "batch_size must be a whole number above 0, got '2'"),
        (BLOCK + "num_repeats = 1.5", "whole number above 0, got 1.5"),
        (BLOCK + "enable_bucket = 1", "true or false, got 1"),
        (BLOCK + 'caption_extension = "txt"', 'for example ".txt"'),
        (BLOCK + 'caption_extension = "."', 'for example ".txt"'),
        (BLOCK + 'caption_extension = "./x"', 'for example ".txt"'),
        (CLIPS + "target_frames = [80]", "write 77 or 81"),
        (CLIPS + "target_frames = 2", "write 1 or 5"),
        (CLIPS + "target_frames = []", "empty list"),
        (CLIPS + 'target_frames = ["17"]', "whole number above 0, got '17'"),
        (CLIPS, "for example target_frames = [81]"),
        (CLIPS + 'target_frames = [1]\nframe_extraction = "tail"', "one of head, chunk, slide, uniform, full"),
        (CLIPS + "target_frames = [1]\nsource_fps = 0", "number from 0.01 to 1000"),
        (CLIPS + "target_frames = [1]\nsource_fps = inf", "number from 0.01 to 1000"),
        (CLIPS + "target_frames = [1]\nsource_fps = 1e-9", "number from 0.01 to 1000"),
        ('[[datasets]]\nimage_directory = ""', "must be a path in quotes"),
        ("[[datasets]]\nimage_directory = 3", "must be a path in quotes"),
        ('[[datasets]]\nimage_directory = "C:\\temp"', "control character"),
        ('[datasets]\nimage_directory = "media"', "[[datasets]] in two pairs of brackets"),
        ("general = 3\n" + BLOCK, "one table"),
        ("datasets = [1]", "no [[datasets]] block"),
        ("", "do:    write [[datasets]] and below it"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_with_what_to_do(tmp_path, text, words):
    assert words in str(refusal(tmp_path, text))


def test_manifests_control_media_and_masks(tmp_path):
    text = """
[general]
multiple_captions = true
background_color = "#FA0"
[[datasets]]
image_directory = "/data/images"
control_directory = "/data/lines"
mask_directory = "/data/masks"
background_color = "#00FF7f"
[[datasets]]
video_jsonl_file = "/data/clips/set.jsonl"
cache_directory = "/data/cache"
target_frames = [17]
"""
    images, clips = entries(tmp_path, text)
    assert (images.control_directory, images.mask_directory) == (Path("/data/lines"), Path("/data/masks"))
    assert (images.manifest, images.multiple_captions, images.background_color) == (None, True, "#00ff7f")
    assert (clips.manifest, clips.directory) == (Path("/data/clips/set.jsonl"), Path("/data/clips"))
    assert (clips.media, clips.multiple_captions, clips.background_color) == ("video", True, "#ffaa00")
    assert images.folders == (Path("/data/images"), Path("/data/images"), Path("/data/lines"), Path("/data/masks"))


def test_folders_beside_relative_media_follow_them(tmp_path, monkeypatch):
    write_tree(tmp_path, {"toml/media/x": "", "toml/set.jsonl": "", "work/lines/x": ""})
    monkeypatch.chdir(tmp_path / "work")
    (images,) = entries(tmp_path / "toml", BLOCK + 'control_directory = "lines"\nmask_directory = "masks"')
    assert images.control_directory == tmp_path / "toml" / "lines"
    assert images.mask_directory == tmp_path / "toml" / "masks"
    (listed,) = entries(tmp_path / "toml", MANIFEST)
    assert (listed.manifest, listed.cache_directory) == (tmp_path / "toml" / "set.jsonl", tmp_path / "toml" / "cache")


def test_full_needs_no_target_frames(tmp_path):
    (entry,) = entries(tmp_path, CLIPS + 'frame_extraction = "full"')
    assert entry.frame_extraction == "full"


@pytest.mark.parametrize("path", [r"C:\Users\me\set", r"D:\AI", r"\\nas\share\x"])
def test_a_backslash_in_double_quotes_is_answered_with_the_line_to_write(tmp_path, path):
    error = refusal(tmp_path, f'[[datasets]]\r\nimage_directory = "{path}"\r\n')
    assert f"write image_directory = '{PureWindowsPath(path).as_posix()}'" in error.cure
    assert "line 2" in error.found


def test_other_toml_mistakes_name_the_line(tmp_path):
    error = refusal(tmp_path, BLOCK + "batch_size =\n")
    assert "line 4" in error.found
    assert "backslash" not in error.cure


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    plain = entries(tmp_path / "a", BLOCK)
    assert entries(tmp_path / "b", b"\xef\xbb\xbf" + BLOCK.replace("\n", "\r\n").encode()) == plain


def test_another_encoding_is_refused(tmp_path):
    assert refusal(tmp_path, BLOCK.encode("utf-16")).cure == "save it as UTF-8"


def test_a_value_of_thousands_of_characters_is_shortened(tmp_path):
    error = refusal(tmp_path, BLOCK + f'batch_size = "{"a b" * 2000}"\n')
    first, *_ = str(error).split("\n")
    assert first.startswith("batch_size must be a whole number above 0, got 'a ba b")
    assert first.endswith("ba b'")
    assert len(first) == 751


def test_missing_file(tmp_path):
    with pytest.raises(WangenError, match="cannot read the TOML file"):
        load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("there", "base", "words"),
    [
        (["work/media/x", "toml/media/x"], "", "start at the working folder {work}"),
        (["work/media/x"], "", "start at the working folder {work}"),
        (["toml/media/x"], "toml", "start at its own folder {toml}"),
        ([], "", "media: not in the working folder {work}, and not in the TOML's own {toml}"),
    ],
)
def test_relative_paths_start_at_the_working_folder_then_at_the_tomls(
    tmp_path, monkeypatch, caplog, there, base, words
):
    write_tree(tmp_path, dict.fromkeys(there, "x") | {"toml/d.toml": BLOCK, "work/x": ""})
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(logging.getLogger("wangen"), "propagate", True)
    caplog.set_level(logging.INFO, "wangen")
    (entry,) = read_dataset(tmp_path / "toml" / "d.toml")
    start = tmp_path / base if base else Path()
    assert (entry.directory, entry.cache_directory) == (start / "media", start / "cache")
    assert words.format(work=tmp_path / "work", toml=tmp_path / "toml") in caplog.text
    assert len(caplog.records) == 1


def test_a_relative_cache_of_absolute_media_is_looked_for_as_well(tmp_path, monkeypatch):
    write_tree(tmp_path, {"toml/cache/x": "", "work/x": ""})
    monkeypatch.chdir(tmp_path / "work")
    text = f"[[datasets]]\nimage_directory = '{(tmp_path / 'media').as_posix()}'\ncache_directory = 'cache'"
    assert entries(tmp_path / "toml", text)[0].cache_directory == tmp_path / "toml" / "cache"


def test_a_cache_folder_that_is_spelled_in_several_ways_is_one(tmp_path, monkeypatch):
    write_tree(tmp_path, {"cache/x": "", "media/x": ""})
    (tmp_path / "link").symlink_to("cache")
    monkeypatch.chdir(tmp_path)
    spellings = ["cache", "sub/../cache", "link", "../" + tmp_path.name + "/cache", (tmp_path / "cache").as_posix()]
    text = "".join(f"[[datasets]]\nimage_directory = 'media'\ncache_directory = '{one}'\n" for one in spellings)
    assert [entry.cache_directory for entry in entries(tmp_path, text)] == [Path("cache")] * len(spellings)


HOSTILE_PATHS = st.text(
    st.one_of(st.sampled_from(string.punctuation + " é日🦊"), st.characters(exclude_categories=("Cs", "Cc"))),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60)
@given(media=HOSTILE_PATHS, cache=HOSTILE_PATHS, resolution=st.tuples(st.integers(1, 4096), st.integers(1, 4096)))
def test_what_is_written_is_read_back(tmp_path_factory, media, cache, resolution):
    general = {"resolution": list(resolution), "caption_extension": ".txt", "enable_bucket": True}
    block = {"video_directory": f"/{media}", "cache_directory": f"/{cache}", "target_frames": [17]}
    text = write_dataset((block,), general, 'by "wangen"\nfor you')
    (entry,) = entries(tmp_path_factory.getbasetemp() / "drawn", text)
    assert (entry.directory, entry.cache_directory) == (Path(f"/{media}"), Path(f"/{cache}"))
    assert (entry.resolution, entry.target_frames, entry.enable_bucket) == (resolution, (17,), True)
    assert text.startswith('# by "wangen"\n# for you\n')


def test_blocks_are_chosen_by_resolution(tmp_path):
    block = "[[datasets]]\nimage_directory = 'm'\ncache_directory = 'c'\nresolution = "
    (tmp_path / "d.toml").write_text(f"{block}256\n{block}[832, 480]\n{block}[256, 256]\n", encoding="utf-8")

    def sizes(resolution):
        return [entry.resolution for entry in read_dataset(tmp_path / "d.toml", resolution)]

    assert sizes("all") == [(256, 256), (832, 480), (256, 256)]
    assert sizes("256") == [(256, 256), (256, 256)]
    assert sizes("832x480") == [(832, 480)]
    assert sizes("832x480,256") == sizes("all")
    for wrong, words in (("512", "it has 256, 832x480"), ("256,", "no resolution"), ("0", "no resolution")):
        with pytest.raises(UsageError) as caught:
            sizes(wrong)
        assert words in str(caught.value)
