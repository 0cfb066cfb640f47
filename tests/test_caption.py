"""`wangen caption`: a real model of transformers, tiny and random, over real media."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import clip_bytes, image_bytes, make_clip, make_image, write_tree
from tiny_vlm import write_tiny_vlm

from wangen.generator.caption_statistics import statistics_of
from wangen.generator.cli import main
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.manifests import read_manifest
from wangen.generator.steps import Caption
from wangen.runtime import caption
from wangen.runtime.media import load_clip, load_pictures
from wangen.runtime.vision_language import VisionLanguageModel

SHORT = {"max_new_tokens": 6, "frames": 3}


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vlm(tmp_path_factory.mktemp("vlm") / "tiny-llava")


@pytest.fixture
def media(tmp_path) -> Path:
    """Two pictures and a clip, one picture with a caption."""
    folder = tmp_path / "media"
    for name in ("cat.png", "dog.jpg"):
        make_image(folder / name, (64, 48))
    make_clip(folder / "walk.mp4", 24)
    write_tree(folder, {"dog.txt": "a dog by hand\n", "notes.md": "x"})
    return folder


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}


def test_what_has_no_caption_gets_one_and_the_rest_stays(media, vlm):
    options = Caption(dataset_dir=media, model=vlm, trigger_word="ohwx", **SHORT)
    report = caption.run(options)
    assert report.counts == {"written": 2, "kept": 1, "failed": 0, "without": 0}
    assert report.ok
    written = texts(media)
    assert list(written) == ["cat.txt", "dog.txt", "walk.txt"]
    assert written["dog.txt"] == "a dog by hand\n"
    for name in ("cat.txt", "walk.txt"):
        first, *words = written[name].rstrip("\n").split(" ")
        assert first == "ohwx,"
        assert len(words) == 6
        assert all(word.startswith("w") or word in ("USER", "ASSISTANT", ":") for word in words)
    assert report.result["number"] == 3
    before = {path: path.stat().st_mtime_ns for path in media.iterdir()}
    again = caption.run(replace(options, model=media / "no model"))  # nothing to do: it is not loaded
    assert again.counts == {"written": 0, "kept": 3, "failed": 0, "without": 0}
    assert {path: path.stat().st_mtime_ns for path in media.iterdir()} == before


def test_a_run_that_was_cut_off_ends_with_the_same_captions(media, vlm, tmp_path, monkeypatch):
    shutil.copytree(media, tmp_path / "whole")
    caption.run(Caption(dataset_dir=tmp_path / "whole", model=vlm, **SHORT))
    options = Caption(dataset_dir=media, model=vlm, **SHORT)
    describe = VisionLanguageModel.describe
    answered = []

    def once(*arguments):
        if answered:
            raise KeyboardInterrupt
        answered.append(arguments)
        return describe(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(VisionLanguageModel, "describe", once)
        with pytest.raises(KeyboardInterrupt):
            caption.run(options)
    assert list(texts(media)) == ["cat.txt", "dog.txt"]
    assert caption.run(options).counts["written"] == 1
    assert texts(media) == texts(tmp_path / "whole")


def test_the_answer_depends_on_picture_prompt_and_frames_alone(media, vlm):
    import torch

    model = VisionLanguageModel(vlm, torch.float32, torch.device("cpu"))
    cat, dog = (load_pictures(media / name, 1, 64) for name in ("cat.png", "dog.jpg"))
    clip = load_pictures(media / "walk.mp4", 3, 64)
    alone = [model.describe([seen], "w1 w2", 8)[0] for seen in (cat, dog, clip)]
    assert len(set(alone)) == 3
    assert model.describe([cat, dog, clip], "w1 w2", 8) == alone  # padded to one length
    assert model.describe([cat], "w3", 8) != alone[:1]
    assert model.describe([clip[:2]], "w1 w2", 8) != alone[2:]


def test_frames_come_from_the_middle_of_even_parts(tmp_path):
    path = make_clip(tmp_path / "a.mp4", 24, 16)
    every = load_clip(path, (64, 48), 0, 24, 16).transpose(1, 2, 3, 0)
    for count, numbers in ((1, [12]), (3, [4, 12, 20]), (48, sorted([*range(24)] * 2))):
        shown = [np.asarray(picture) for picture in load_pictures(path, count, 64)]
        assert len(shown) == len(numbers)
        assert all(np.array_equal(one, every[number]) for one, number in zip(shown, numbers, strict=True))
    assert load_pictures(path, 2, 32)[1].size == (32, 24)
    np.savez(tmp_path / "a.npz", frames=every, fps=16)
    assert np.array_equal(np.asarray(load_pictures(tmp_path / "a.npz", 1, 64)[0]), every[12])
    assert load_pictures(make_image(tmp_path / "a.jpg", (64, 48), orientation=6), 5, 64)[0].size == (48, 64)


def test_broken_media_are_listed_and_the_others_are_captioned(media, vlm, tmp_path, capsys):
    write_tree(media, {"broken.png": image_bytes()[:100], "broken.mp4": clip_bytes(tmp_path)[:300],
                       "blank.jpg": image_bytes(), "blank.txt": " \n"})  # fmt: skip
    words = ["caption", "--dataset_dir", str(media), "--model", str(vlm), "--max_new_tokens", "4", "--batch_size", "2"]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "2 captions written, 1 kept, 3 failed" in said
    for line in ("blank.txt: is empty; describe the picture", "broken.png: cannot be decoded", "broken.mp4: cannot"):
        assert line in said
    report = json.loads((media / "caption.report.json").read_text(encoding="utf-8"))
    assert (report["ok"], len(report["result"]["failed"])) == (False, 3)
    assert texts(media)["blank.txt"] == " \n"


def test_lines_of_a_manifest_without_a_caption_take_the_file_beside_the_media(media, vlm):
    lines = [{"file": "cat.png"}, {"file": "dog.jpg", "prompt": "a dog of the manifest"}, {"file": "walk.mp4"}]
    manifest = media / "set.jsonl"
    manifest.write_text("\n".join(map(json.dumps, lines)))
    _, problems = read_manifest(manifest)
    assert [problem.found for problem in problems] == ["line 1: has no caption", "line 3: has no caption"]
    report = caption.run(Caption(manifest=manifest, model=vlm, **SHORT))
    assert report.counts == {"written": 2, "kept": 1, "failed": 0, "without": 0}
    items, problems = read_manifest(manifest)
    assert problems == []
    assert [item.caption for item in items] == [
        texts(media)["cat.txt"].strip(), "a dog of the manifest", texts(media)["walk.txt"].strip(),
    ]  # fmt: skip
    assert [item.caption_path.name for item in items] == ["cat.txt", "set.jsonl", "walk.txt"]


def test_frames_of_a_longer_video_get_no_caption_that_is_for_all_of_it(media, vlm):
    lines = [{"file": "walk.mp4", "first_frame": 0, "frames": 5}, {"file": "cat.png"}]
    manifest = media / "set.jsonl"
    manifest.write_text("\n".join(map(json.dumps, lines)))
    report = caption.run(Caption(manifest=manifest, model=vlm, **SHORT))
    assert report.counts == {"written": 1, "kept": 0, "failed": 1, "without": 0}
    assert report.result["failed"] == ["set.jsonl: line 1: takes some frames of a video, and a caption beside it is "
                                       'for all of them; write "prompt" into the line']  # fmt: skip
    assert "walk.txt" not in texts(media)


def test_media_of_one_stem_share_a_caption(tmp_path, vlm):
    for name in ("a.jpg", "a.png"):
        make_image(tmp_path / name)
    for batch_size in (1, 2):
        report = caption.run(Caption(dataset_dir=tmp_path, model=vlm, batch_size=batch_size, **SHORT))
        assert report.counts["written"] == 1
        (tmp_path / "a.txt").unlink()


def test_a_report_needs_no_model_and_counts_what_repeats(tmp_path, capsys):
    captions = {name: f"A photo of a red {name}, seen from above." for name in ("cat", "dog", "cow", "hen")}
    captions |= {"same": "Nothing.", "too": "nothing", "long": " ".join(["word"] * 30)}
    for name, text in captions.items():
        make_image(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(text)
    make_image(tmp_path / "bare.png")
    assert main(["caption", "--dataset_dir", str(tmp_path), "--report_only"]) == 0
    said = capsys.readouterr().err
    assert "7 captions of 1 to 30 words, median 9" in said
    assert "in 4 of them: a photo of a red" in said
    assert "in 4 of them: seen from above" in said
    assert "the same caption: same.png, too.png" in said
    assert "0 captions written, 7 kept, 0 failed, 1 without a caption" in said
    assert not (tmp_path / "bare.txt").exists()


def test_a_phrase_is_told_of_once_and_never_the_trigger():
    named = {str(n): f"ohwx woman {word} in the sun" for n, word in enumerate(("sits", "runs", "sleeps"))}
    assert statistics_of(named, "ohwx woman").phrases == {"in the sun": 3}
    assert statistics_of({}).longest == 0
    counts = statistics_of({str(n): "one two three four" if n < 4 else "one two three" for n in range(8)}).phrases
    assert counts == {"one two three": 8, "one two three four": 4, "two three four": 4} or counts == {
        "one two three": 8, "one two three four": 4,
    }  # fmt: skip


def test_a_model_without_a_chat_template_gets_its_picture_tokens(media, tmp_path):
    folder = write_tiny_vlm(tmp_path / "plain", template=None)
    assert caption.run(Caption(dataset_dir=media, model=folder, **SHORT)).counts["written"] == 2


@pytest.mark.parametrize(
    ("template", "part"),
    [("{{ messages[0]['role'] + messages[0]['content'] }}", "chat template takes no pictures"),
     ("{{ messages[0]['role'] ~ messages[0]['content'] }}", "processor does not take these pictures")],
)  # fmt: skip
def test_a_model_whose_chat_template_is_for_text_alone_is_named(media, tmp_path, template, part):
    folder = write_tiny_vlm(tmp_path / "text", template=template)
    with pytest.raises(WangenError, match=part) as error:
        caption.run(Caption(dataset_dir=media, model=folder, **SHORT))
    assert error.value.where == str(folder)


@pytest.mark.slow
def test_what_is_no_such_model_is_refused_before_anything_is_written(media, vlm, tmp_path):
    write_tree(tmp_path, {"empty/readme.md": "x", "other/config.json": '{"model_type": "bert"}',
                          "text/config.json": "{"})  # fmt: skip
    shutil.copytree(vlm, tmp_path / "no weights", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(vlm, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    shutil.copytree(vlm, tmp_path / "foreign")
    config = json.loads((vlm / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModel": "mine.Mine"}}
    (tmp_path / "foreign" / "config.json").write_text(json.dumps(config))
    (tmp_path / "foreign" / "mine.py").write_text("raise SystemExit('executed')")
    for name in ("empty", "other", "text", "no weights", "cut", "foreign"):
        with pytest.raises(WangenError) as error:
            caption.run(Caption(dataset_dir=media, model=tmp_path / name, **SHORT))
        assert error.value.where == str(tmp_path / name)
        assert error.value.cure
    assert list(texts(media)) == ["dog.txt"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "m"], "caption needs --dataset_dir or --manifest"),
        (["--dataset_dir", "@"], "caption needs --model"),
        (["--dataset_dir", "@", "--report_only", "--frames", "0"], "--frames must be above 0, got 0"),
        (["--dataset_dir", "@", "--report_only", "--trigger_word", " x"], "' x' is no trigger word"),
        (["--dataset_dir", "@", "--report_only", "--prompt", " "], "--prompt is empty"),
    ],
)
def test_wrong_usage_is_answered_in_a_sentence(tmp_path, capsys, words, said):
    assert main(["caption", *(word.replace("@", str(tmp_path)) for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_media_and_one_that_is_not_there(tmp_path):
    for folder, words in ((tmp_path, "holds no image or video files"), (tmp_path / "none", "cannot list the folder")):
        with pytest.raises(WangenError, match=words):
            caption.run(Caption(dataset_dir=folder, report_only=True))
    with pytest.raises(UsageError, match="needs --model"):
        caption.run(Caption(dataset_dir=tmp_path))


def test_a_tokenizer_that_its_library_cannot_read_is_said(media, vlm, tmp_path, capsys):
    model = shutil.copytree(vlm, tmp_path / "vlm")
    tokenizer = model / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes()[:200])
    assert main(["caption", "--dataset_dir", str(media), "--model", str(model)]) == 1
    assert "cannot be loaded as a vision-language model" in capsys.readouterr().err
