"""`wangen lint`: the dataset TOML that a call names, judged by the tool of that call."""

import pytest
from lint_samples import expect, findings, script

GOOD = """[general]
resolution = [832, 480]
caption_extension = ".txt"
batch_size = 1
enable_bucket = true

[[datasets]]
video_directory = "@/clips"
cache_directory = "@/clips_cache"
target_frames = [1, 33, 81]
frame_extraction = "head"
source_fps = 30.0
"""
ROOTS = {"sh": "/ai", "bat": "C:/AI", "ps1": "C:/AI"}

# shell, tool, what of the good TOML is replaced, with what, kind, the line that holds this, words
CASES = [
    ("bat", "musubi", '"@/clips"', '"C:\\temp\\clips"', "toml-slashes", "video_directory", ["tab", "C:/temp/clips"]),
    ("bat", "musubi", '"@/clips"', '"C:\\Users\\me"', "toml-slashes", "video_directory", ["C:/Users/me"]),
    ("bat", "musubi", '"@/clips"', "'C:\\AI/clips'", "toml-slashes", "video_directory", ["mixes"]),
    ("sh", "musubi", '"@/clips"', "'clips\\cats'", "toml-slashes", "video_directory", ["clips/cats"]),
    ("sh", "musubi", "batch_size", "batchsize", "toml-key", "batchsize", ["did you mean batch_size?"]),
    ("sh", "wangen", "batch_size", "batchsize", "toml-key", "batchsize", ["did you mean batch_size?"]),
    ("sh", "musubi", "[[datasets]]", "foo = 1\n\n[[datasets]]", "toml-key", "foo", ["'foo'"]),
    ("sh", "musubi", "[general]", "seed = 1\n[general]", "toml-key", "seed", ["outside"]),
    ("sh", "wangen", "[[datasets]]\nvideo_directory", "[[datasets]]\nmultiple_target = true\nvideo_directory",
     "toml-key", "multiple_target", ["not in this version"]),
    ("sh", "musubi", "enable_bucket", 'cache_directory = "/c"\nenable_bucket', "toml-key", "cache_directory = \"/c\"",
     ["each [[datasets]]"]),
    ("sh", "musubi", "video_directory", 'image_directory = "/i"\nvideo_directory', "toml-key",
     "video_directory", ["both"]),
    ("sh", "musubi", "video_directory", "num_repeats = 1 #", "toml-key", "[[datasets]]", ["no folder"]),
    ("sh", "musubi", "video_directory", "image_directory", "toml-key", "target_frames", ["blocks of videos"]),
    ("sh", "musubi", "30.0", "30", "toml-value", "source_fps", ["30.0"]),
    ("sh", "musubi", "33, 81", "33, 80", "toml-value", "target_frames", ["4n+1", "rounds it down"]),
    ("sh", "wangen", "33, 81", "33, 80", "toml-value", "target_frames", ["4n+1", "write 77"]),
    ("sh", "musubi", "target_frames = [1, 33, 81]\n", "", "toml-value", "[[datasets]]", ["one frame"]),
    ("sh", "musubi", '"head"', '"middle"', "toml-value", "frame_extraction", ["head, chunk"]),
    ("sh", "musubi", '"head"', '"uniform"', "toml-value", "frame_extraction", ["frame_sample"]),
    ("sh", "musubi", "batch_size = 1\nenable_bucket = true", "batch_size = 2", "toml-value", "batch_size", ["buckets"]),
    ("sh", "musubi", 'caption_extension = ".txt"\n', "", "toml-caption", "[[datasets]]", ["finds no caption"]),
    ("sh", "musubi", '".txt"', '"txt"', "toml-caption", "caption_extension", ['".txt"']),
    ("sh", "musubi", 'cache_directory = "@/clips_cache"\n', "", "toml-cache", "[[datasets]]", ["among the media"]),
    ("sh", "wangen", "clips_cache", "clips", "toml-cache", "cache_directory", ["share one folder"]),
    ("sh", "musubi", "clips_cache", "clips[1]", "toml-cache", "cache_directory", ["brackets"]),
    ("sh", "musubi", "source_fps = 30.0\n", 'source_fps = 30.0\n[[datasets]]\nimage_directory = "/i"\n'
     'cache_directory = "@/clips_cache" # two\n', "toml-cache", "# two", ["another block"]),
    ("sh", "musubi", '"@/clips"', '"C:/AI/clips"', "toml-path", "video_directory", ["/mnt/c/AI/clips"]),
    ("bat", "musubi", '"@/clips"', '"/mnt/c/AI/clips"', "toml-path", "video_directory", ["Linux path"]),
    ("bat", "musubi", '"@/clips"', '"/data/clips"', "toml-path", "video_directory", ["Linux path"]),
    ("ps1", "musubi", '"@/clips"', '"/clips"', "toml-path", "video_directory", ["Linux path"]),
    ("sh", "musubi", '"@/clips"', '"~/clips"', "toml-path", "video_directory", ["~"]),
    ("sh", "musubi", "[[datasets]]", "[[dataset]]", "toml", 1, ["no [[datasets]]"]),
    ("sh", "musubi", "batch_size = 1", "batch_size = ", "toml", "batch_size", ["no TOML"]),
    ("sh", "wangen", "[832, 480]", '"big"', "toml", 1, ["resolution"]),
]  # fmt: skip


def run_of(shell: str, tool: str) -> str:
    """A script whose steps read `sets/cats.toml` beside it."""
    if tool == "wangen":
        return "wangen check_cache --dataset_config sets/cats.toml\n"
    config = {"dataset_config": "sets/cats.toml"}
    return script(shell, latents=config, text=config, train=config)


def put(folder, text, shell="sh"):
    (folder / "sets").mkdir(exist_ok=True)
    (folder / "sets" / "cats.toml").write_text(text.replace("@", ROOTS[shell]), encoding="utf-8")


@pytest.mark.parametrize(("shell", "tool", "old", "new", "kind", "at", "words"), CASES)
def test_a_fault_in_the_toml_is_named_with_its_line(tmp_path, shell, tool, old, new, kind, at, words):
    assert old in GOOD
    text = GOOD.replace(old, new, 1).replace("@", ROOTS[shell])
    put(tmp_path, text, shell)
    number = at if isinstance(at, int) else text[: text.index(at)].count("\n") + 1
    finding = expect(shell, run_of(shell, tool), kind, number, *words, folder=tmp_path)
    assert finding.file == "sets/cats.toml"


@pytest.mark.parametrize("shell", ["sh", "bat", "ps1"])
def test_a_good_toml_has_no_findings(tmp_path, shell):
    put(tmp_path, GOOD, shell)
    assert findings(shell, run_of(shell, "musubi"), tmp_path) == []
    assert {f.file for f in findings(shell, run_of(shell, "wangen"), tmp_path)} <= {""}


def test_relative_folders_are_looked_for_where_the_step_runs(tmp_path):
    (tmp_path / "sets" / "clips").mkdir(parents=True)
    put(tmp_path, GOOD.replace("@/clips", "clips", 1))
    expect("sh", run_of("sh", "musubi"), "toml-path", 8, "beside the TOML", folder=tmp_path)
    (tmp_path / "clips").mkdir()
    assert findings("sh", run_of("sh", "musubi"), tmp_path) == []


def test_one_cache_for_two_blocks_is_right_for_wangen(tmp_path):
    put(tmp_path, GOOD + '[[datasets]]\nimage_directory = "@/i"\ncache_directory = "@/clips_cache"\n')
    assert not [f for f in findings("sh", run_of("sh", "wangen"), tmp_path) if f.file]


def test_the_toml_is_found_through_the_folder_that_the_script_changes_to(tmp_path):
    (tmp_path / "data").mkdir()
    put(tmp_path / "data", GOOD.replace("30.0", "30"))
    text = run_of("sh", "musubi").replace('"$(dirname "$0")"', '"$(dirname "$0")/data"')
    assert {(f.kind, f.file) for f in findings("sh", text, tmp_path)} == {("toml-value", "data/sets/cats.toml")}


def test_a_switch_that_is_off_is_right_for_wangen(tmp_path):
    put(tmp_path, GOOD.replace("[[datasets]]\n", "[[datasets]]\nmultiple_target = false\n", 1))
    assert not [f for f in findings("sh", run_of("sh", "wangen"), tmp_path) if f.file]


def test_manifests_are_wangens_alone(tmp_path):
    block = GOOD[: GOOD.index("video_directory")] + 'manifest = "@/clips/train.jsonl"\n'
    put(tmp_path, block)
    assert not [f for f in findings("sh", run_of("sh", "wangen"), tmp_path) if f.file]
    assert {f.kind for f in findings("sh", run_of("sh", "musubi"), tmp_path)} == {"toml-key", "toml-cache"}
    given = [f for f in findings("sh", "wangen check_cache --manifest train.jsonl\n", tmp_path) if not f.file]
    assert not [f for f in given if f.kind == "missing-flag"]
    (none,) = [f for f in findings("sh", "wangen check_cache\n", tmp_path) if f.kind == "missing-flag"]
    assert none.found == "check_cache needs --dataset_config or --manifest"
