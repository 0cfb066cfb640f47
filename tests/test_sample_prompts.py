"""Prompt files: what musubi-tuner's mean, in three formats, and what is refused with its line."""

import json

import pytest
from PIL import Image

from wangen import profiles
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.sample_prompts import read_prompts

T2V, A14B, TI2V, I2V = (profiles.model(name) for name in ("t2v-1.3B", "t2v-A14B", "ti2v-5B", "i2v-14B"))

LINE = "A cat walks. --w 832 --h 480 --f 17 --d 7 --s 12 --fs 3.5 --l 4.5 --n blurry, dark --ss euler"
TABLE = {
    "prompt": "A cat walks.", "width": 832, "height": 480, "frame_count": 17, "seed": 7, "sample_steps": 12,
    "discrete_flow_shift": 3.5, "cfg_scale": 4.5, "negative_prompt": "blurry, dark", "sample_sampler": "euler",
}  # fmt: skip


def write(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_line_and_a_table_in_json_and_toml_mean_the_same(tmp_path):
    shared = {key: value for key, value in TABLE.items() if key != "prompt"}
    toml = "[prompt]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in shared.items())
    files = [
        write(tmp_path, "a.txt", f"# a comment\n\n{LINE}\n"),
        write(tmp_path, "a.json", json.dumps([TABLE])),
        write(tmp_path, "b.json", json.dumps([LINE])),
        write(tmp_path, "a.toml", f'{toml}[[prompt.subset]]\nprompt = "A cat walks."\n'),
    ]
    prompts = [read_prompts(path, T2V, 42) for path in files]
    assert all(found == prompts[0] for found in prompts)
    (prompt,) = prompts[0]
    assert (prompt.width, prompt.height, prompt.frames, prompt.seed, prompt.steps) == (832, 480, 17, 7, 12)
    assert (prompt.shift, prompt.guidance, prompt.negative_prompt) == (3.5, 4.5, "blurry, dark")
    assert (prompt.sampler, prompt.fps) == ("euler", 16)


def test_what_a_prompt_does_not_say_is_the_models_own(tmp_path):
    path = write(tmp_path, "a.txt", "A cat\nA dog --l 2\nA cow --l 2 --lh 3\n")
    cat, dog, cow = read_prompts(path, A14B, 42)
    assert (cat.width, cat.height, cat.frames, cat.steps, cat.shift, cat.seed) == (832, 480, 81, 40, 12.0, 42)
    assert (cat.guidance, cat.guidance_high_noise) == (3.0, 4.0)
    assert (dog.guidance, dog.guidance_high_noise) == (2.0, 2.0)
    assert (cow.guidance, cow.guidance_high_noise) == (2.0, 3.0)
    (five,) = read_prompts(write(tmp_path, "b.txt", "A cat"), TI2V, 1)
    assert (five.width, five.height, five.frames, five.fps) == (1280, 704, 121, 24)


def test_in_the_files_of_generate_two_options_are_guidance(tmp_path, caplog):
    """musubi-tuner's generate scripts take --g for --l; its training takes --g for what HunyuanVideo has."""
    path = write(tmp_path, "a.txt", "A cat --g 2.5\nA dog --g 2 --l 3\n")
    assert [one.guidance for one in read_prompts(path, T2V, 42, flag="--prompt_file")] == [2.5, 3.0]
    assert not caplog.text
    assert [one.guidance for one in read_prompts(path, T2V, 42)] == [5.0, 3.0]
    assert caplog.text.count("--g is HunyuanVideo's embedded guidance") == 2


def test_any_blank_stands_between_an_option_and_its_value(tmp_path):
    (found,) = read_prompts(write(tmp_path, "a.txt", "A cat\t--w\t832 --h\u00a0480 --n  blurry"), T2V, 42)
    assert (found.width, found.height, found.negative_prompt, found.prompt) == (832, 480, "blurry", "A cat")


@pytest.mark.parametrize(("sizes", "shift"), [("", 3.0), ("--w 480 --h 832", 3.0), ("--w 1280 --h 720", 5.0),
                                              ("--w 1280 --h 720 --fs 4", 4.0)])  # fmt: skip
def test_the_shift_of_image_to_video_depends_on_the_size(tmp_path, sizes, shift):
    Image.new("RGB", (8, 8)).save(tmp_path / "i.png")
    line = f"A cat --i {(tmp_path / 'i.png').as_posix()} {sizes}"
    assert read_prompts(write(tmp_path, "a.txt", line), I2V, 42)[0].shift == shift
    assert read_prompts(write(tmp_path, "b.txt", f"A cat {sizes}"), T2V, 42)[0].shift == (4.0 if shift == 4 else 5.0)


def test_a_subset_wins_over_what_all_share(tmp_path):
    path = write(
        tmp_path,
        "a.toml",
        """
[prompt]
width = 64
height = 64
sample_steps = 3
[[prompt.subset]]
prompt = "one"
[[prompt.subset]]
prompt = "two"
sample_steps = 5
""",
    )
    assert [(prompt.prompt, prompt.steps) for prompt in read_prompts(path, T2V, 1)] == [("one", 3), ("two", 5)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("A cat --w 830", "width 830 is no multiple of 16.*line 2.*use 832"),
        ("A cat --f 80", "frame_count 80 is not 4n[+]1.*use 81"),
        ("A cat --x 3", "--x is no option of a prompt.*line 2.*--w --h"),
        ("A cat --w", "--w has no value"),
        ("A cat --w 64 --w 80", "--w is given twice"),
        ("A cat --s 0", "sample_steps '0' is no whole number from 1 to 1000"),
        ("A cat --d -1", "seed '-1' is no whole number"),
        ("A cat --d 1.5", "seed '1.5' is no whole number"),
        ("A cat --l nan", "cfg_scale 'nan' is no number above 0"),
        ("A cat --fs 0", "discrete_flow_shift '0' is no number above 0"),
        ("A cat --ss dpm", "there is no sampler 'dpm'.*unipc, dpm[+][+], euler"),
        ("A cat --i cat.png", "t2v-1.3B takes no first frame"),
        ("A cat --ei cat.png", "takes no last frame"),
        ("A cat --cn walk.mp4", "--cn: control videos"),
        ("--w 64", "no prompt before the options"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line_and_the_cure(tmp_path, line, words):
    path = write(tmp_path, "a.txt", f"A fine prompt\n{line}\n")
    with pytest.raises(UsageError, match="(?s)" + words) as caught:
        read_prompts(path, T2V, 42)
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "# nothing\n", "no prompt in this file"),
        ("a.csv", "A cat", "takes .txt, .toml or .json, not .csv"),
        ("a.json", "{", "this is no JSON"),
        ("a.json", '[{"prompt": "A", "seed": 1, "seed": 2}]', "this is no JSON: a name occurs twice"),
        ("a.json", "{}", "a .json of prompts is a list"),
        ("a.json", "[3]", "neither a line nor a table.*entry 1"),
        ("a.json", '[{"prompt": "A", "widht": 64}]', "widht is no key of a prompt.*did you mean width"),
        ("a.json", '[{"prompt": "A", "seed": true}]', "seed True is no whole number"),
        ("a.toml", "width = 3", "has a .prompt. table"),
        ("a.toml", "[prompt]\nwidth = 64\n[[prompt.subset]]\n", "no prompt before the options.*prompt.subset 1"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path, name, text, words):
    with pytest.raises(UsageError, match="(?s)" + words):
        read_prompts(write(tmp_path, name, text), T2V, 42)


def test_a_file_that_is_missing_or_not_utf8_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt", T2V, 42)
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_prompts(tmp_path / "a.txt", T2V, 42)


def test_the_5b_has_sizes_of_32_and_may_have_a_first_frame(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png")
    path = write(tmp_path, "a.txt", "A cat --w 64 --h 64 --i cat.png\n")
    assert read_prompts(path, TI2V, 42)[0].image == tmp_path / "cat.png"  # beside the prompt file
    with pytest.raises(UsageError, match="width 80 is no multiple of 32"):
        read_prompts(write(tmp_path, "b.txt", "A cat --w 80"), TI2V, 42)
    with pytest.raises(UsageError, match="frame_count 1 leaves nothing to make behind the first frame"):
        read_prompts(write(tmp_path, "c.txt", "A cat --f 1 --i cat.png"), TI2V, 42)
    assert read_prompts(write(tmp_path, "d.txt", "A cat --f 1"), TI2V, 42)[0].frames == 1


def test_a_first_frame_may_stand_without_words(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "first.png")
    (prompt,) = read_prompts(write(tmp_path, "a.txt", "--i first.png --w 64 --h 64 --f 5\n"), TI2V, 42)
    assert (prompt.prompt, prompt.image) == ("", tmp_path / "first.png")
    with pytest.raises(UsageError, match="there is no prompt"):
        read_prompts(write(tmp_path, "b.txt", "--w 64 --h 64 --f 5\n"), TI2V, 42)


def test_image_to_video_needs_its_first_frame(tmp_path):
    with pytest.raises(UsageError, match="needs a first frame"):
        read_prompts(write(tmp_path, "a.txt", "A cat"), I2V, 42)
    with pytest.raises(UsageError, match=r"there is no picture cat\.png"):
        read_prompts(write(tmp_path, "a.txt", "A cat --i cat.png"), I2V, 42)
    (tmp_path / "cat.png").write_bytes(b"half")
    with pytest.raises(WangenError, match="cannot be read as an image"):
        read_prompts(write(tmp_path, "a.txt", "A cat --i cat.png"), I2V, 42)


def test_guidance_that_a_model_has_not_is_answered_with_the_option_that_is_meant(tmp_path, caplog):
    for model in (T2V, profiles.model("qwen-image")):
        for option in ("--g", "--lh"):
            caplog.clear()
            file = write(tmp_path, "a.txt", f"A cat {option} 6")
            read_prompts(file, model, 42, tell=False)
            assert caplog.text == ""
            read_prompts(file, model, 42)
            assert f"{option} is" in caplog.text
            assert f"which {model.title} has not: use --l" in caplog.text
    caplog.clear()
    read_prompts(write(tmp_path, "a.txt", "A cat --lh 6"), profiles.model("t2v-A14B"), 42)
    assert caplog.text == ""


def test_a_file_of_notepad_an_indented_comment_and_options_in_capitals_are_read(tmp_path):
    text = "\ufeffA cat. --W 480 --Ss euler\n   # a dog, later\n\t\n"
    (found,) = read_prompts(write(tmp_path, "a.txt", text), T2V, 42)
    assert (found.prompt, found.width, found.sampler) == ("A cat.", 480, "euler")


def test_a_line_ends_where_a_line_ends(tmp_path):
    text = "A cat sits\u2028on a\x0b sofa\x85. --f 5\r\nA dog. --f 5\rA cow. --f 5"
    prompts = read_prompts(write(tmp_path, "a.txt", text), T2V, 42)
    assert [prompt.prompt for prompt in prompts] == ["A cat sits\u2028on a\x0b sofa\x85.", "A dog.", "A cow."]


@pytest.mark.parametrize("seed", [2**53 + 1, 2**63 - 1])
def test_every_seed_up_to_the_largest_is_taken(tmp_path, seed):
    files = (
        write(tmp_path, "a.txt", f"A cat. --d {seed}"),
        write(tmp_path, "a.json", json.dumps([{"prompt": "A cat.", "seed": seed}])),
    )
    assert [read_prompts(file, T2V, 42)[0].seed for file in files] == [seed, seed]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"negative_prompt": None}, "negative_prompt None is no text"),
        ({"negative_prompt": ["dark"]}, "is no text"),
        ({"control_image_path": None}, "neither a path nor a list of paths"),
        ({"control_image_path": 5}, "neither a path nor a list of paths"),
        ({"control_image_path": [5]}, "neither a path nor a list of paths"),
        ({"cfg_scale": 10**400}, "is no number above 0"),
        ({"seed": 0.5}, "is no whole number"),
    ],
)
def test_values_of_another_kind_are_refused(tmp_path, values, words):
    path = write(tmp_path, "a.json", json.dumps([{"prompt": "A cat.", **values}]))
    with pytest.raises(UsageError, match=words):
        read_prompts(path, T2V, 42)


def test_a_picture_whose_name_is_too_long_for_a_file_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="there is no picture xxx"):
        read_prompts(write(tmp_path, "a.txt", f"A cat. --i {'x' * 300}"), I2V, 42)
