"""Where the umT5 tokenizer is found."""

import shutil
from pathlib import Path

import pytest
from helpers import write_tree

from wangen import profiles
from wangen.generator.errors import WangenError
from wangen.generator.tokenizer_file import find_tokenizer, tokenizer_of

GOOGLE = Path(__file__).parent / "vectors/t5/google"
T5 = GOOGLE.parent / "models_t5_umt5-xxl-enc-bf16.pth"


@pytest.mark.parametrize("t5", ["t5.pth", "text_encoders/t5.safetensors", "text_encoders/wan/t5.gguf"])
def test_one_tokenizer_serves_a_models_folder_and_two_levels_below(tmp_path, t5):
    write_tree(tmp_path, {f"models/{t5}": b""})
    shutil.copytree(GOOGLE, tmp_path / "models/google")
    assert find_tokenizer(tmp_path / "models" / t5) == tmp_path / "models/google/umt5-xxl/tokenizer.json"


def test_not_from_further_above_and_nothing_else_than_its_folder(tmp_path):
    write_tree(
        tmp_path,
        {"models/a/b/c/t5.pth": T5.read_bytes(), "models/a/b/tokenizer.json": "{}", "models/a/spiece.model": b""},
    )
    shutil.copytree(GOOGLE, tmp_path / "models/google")
    with pytest.raises(WangenError) as caught:
        find_tokenizer(tmp_path / "models/a/b/c/t5.pth")
    assert "wangen models download tokenizer" in str(caught.value)
    assert "2 folders above" in str(caught.value)


def test_qwen_s_tokenizer_is_no_sentencepiece_model(tmp_path):
    model = profiles.model("qwen-image-edit")
    write_tree(tmp_path, {"spiece.model": b"umT5's"})
    with pytest.raises(WangenError, match=r"looked for processor/tokenizer\.json, tokenizer\.json, and in") as caught:
        find_tokenizer(tmp_path / "qwen_2.5_vl_7b.safetensors", model)
    assert "wangen models download tokenizer --task qwen-image-edit" in str(caught.value)
    with pytest.raises(WangenError, match=r"name the processor folder or its tokenizer\.json$"):
        tokenizer_of(tmp_path / "qwen_2.5_vl_7b.safetensors", tmp_path / "none", model)


def test_what_lies_beside_the_weights_comes_first(tmp_path):
    write_tree(tmp_path, {"models/text_encoders/t5.pth": b"", "models/text_encoders/spiece.model": b"x"})
    shutil.copytree(GOOGLE, tmp_path / "models/google")
    assert find_tokenizer(tmp_path / "models/text_encoders/t5.pth").name == "spiece.model"


def test_a_diffusers_pipeline_has_its_own(tmp_path):
    write_tree(
        tmp_path,
        {
            "model_index.json": "{}",
            "text_encoder/model.safetensors.index.json": "{}",
            "tokenizer/tokenizer.json": "{}",
        },
    )
    for t5 in (tmp_path, tmp_path / "text_encoder", tmp_path / "text_encoder/model.safetensors.index.json"):
        assert find_tokenizer(t5) == tmp_path / "tokenizer/tokenizer.json"


def test_one_that_is_given(tmp_path):
    write_tree(tmp_path, {"t5.pth": b"", "tok/tokenizer.json": "{}", "empty/x": b""})
    shutil.copytree(GOOGLE, tmp_path / "google")
    for given in (tmp_path / "tok", tmp_path / "tok/tokenizer.json"):
        assert tokenizer_of(tmp_path / "t5.pth", given) == tmp_path / "tok/tokenizer.json"
    for given, words in ((tmp_path / "empty", "this is no tokenizer"), (tmp_path / "none", "no such file or folder")):
        with pytest.raises(WangenError, match=words):
            tokenizer_of(tmp_path / "t5.pth", given)
