import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from parity import PROMPTS, T5, TOKENIZER, golden, max_abs, rel_rms
from safetensors.torch import save_file
from text_encoders import PLAIN, write_comfy_fp8, write_gguf, write_plain, write_shards

from wangen.generator.errors import WangenError
from wangen.runtime.prompts import clean_prompt
from wangen.runtime.weights.quantized import QuantizedEmbedding, QuantizedLinear
from wangen.runtime.weights.text_encoder import encode_prompts, load_text_encoder
from wangen.runtime.weights.tokenizer import load_tokenizer


def test_embeddings_equal_the_official_ones():
    wanted = golden("t5")
    tokenizer = load_tokenizer(T5)
    outputs = encode_prompts(load_text_encoder(T5, dtype=torch.float32), tokenizer, PROMPTS)
    for i, output in enumerate(outputs):
        assert output.shape == wanted[f"context.{i}"].shape
        assert max_abs(output, wanted[f"context.{i}"]) < 2e-5
    stored = encode_prompts(load_text_encoder(T5), tokenizer, PROMPTS)
    for i, output in enumerate(stored):
        assert output.dtype == torch.bfloat16
        assert rel_rms(output, wanted[f"context_bf16.{i}"]) < 3e-2


def test_the_batch_does_not_change_an_embedding():
    encoder, tokenizer = load_text_encoder(T5, dtype=torch.float32), load_tokenizer(T5)
    together = encode_prompts(encoder, tokenizer, PROMPTS)
    alone = [encode_prompts(encoder, tokenizer, [prompt])[0] for prompt in PROMPTS]
    assert max(max_abs(a, b) for a, b in zip(together, alone, strict=True)) < 2e-5
    assert encode_prompts(encoder, tokenizer, []) == []


def test_a_long_prompt_is_cut_and_keeps_its_end_and_that_is_said(caplog: pytest.LogCaptureFixture):
    encoder, tokenizer = load_text_encoder(T5, dtype=torch.float32), load_tokenizer(T5)
    long = " ".join(["fox"] * 2000)
    assert encode_prompts(encoder, tokenizer, ["a fox", long])[1].shape[0] == 512
    (message,) = caplog.messages
    assert "1 text longer than umT5's 512 tokens" in message
    assert "fox fox" in message


@pytest.mark.parametrize("place", [T5, TOKENIZER, TOKENIZER / "tokenizer.json", TOKENIZER / "spiece.model"])
def test_token_ids_are_the_official_ones(place: Path):
    wanted = golden("t5")
    tokenizer = load_tokenizer(place)
    for prompt, ids, mask in zip(PROMPTS, wanted["input_ids"], wanted["attention_mask"], strict=True):
        assert tokenizer.encode(clean_prompt(prompt)).ids == ids[: int(mask.sum())].tolist()


def test_both_forms_of_the_tokenizer_agree_on_hostile_texts():
    one = load_tokenizer(TOKENIZER / "tokenizer.json")
    other = load_tokenizer(TOKENIZER / "spiece.model")
    for text in ("", "  a  b ", "ﬁne — “quoted” … 狐狸 🦊", "</s> <pad> <unk>", "x" * 3000, "a\u0300 \u200b\ufeff z"):
        assert one.encode(text).ids == other.encode(text).ids


def test_the_tokenizer_is_found_beside_the_weights(tmp_path: Path):
    shutil.copy(T5, tmp_path / "t5.pth")
    with pytest.raises(WangenError) as caught:
        load_tokenizer(tmp_path / "t5.pth")
    assert "--tokenizer" in str(caught.value)
    assert "google/umt5-xxl/spiece.model" in str(caught.value)
    shutil.copy(TOKENIZER / "spiece.model", tmp_path)
    assert load_tokenizer(tmp_path / "t5.pth").encode("").ids == [1]


def test_the_tokenizer_of_t5_and_one_cut_short_are_refused(tmp_path: Path):
    text = (TOKENIZER / "tokenizer.json").read_text("utf-8")
    fields = json.loads(text)
    pieces = fields["model"]["vocab"]
    del pieces[2]  # T5 has no <s>, so that its <unk> comes one earlier
    fields["model"]["unk_id"] = 2
    fields["added_tokens"] = [token | {"id": min(token["id"], 2)} for token in fields["added_tokens"][:2]]
    t5 = json.dumps(fields)
    for broken in (text[: len(text) * 95 // 100], t5, text.replace('"Unigram"', '"BPE"'), '{"model": {"vocab": 3}}'):
        (tmp_path / "tokenizer.json").write_text(broken, encoding="utf-8")
        with pytest.raises(WangenError, match="not umT5's tokenizer"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "spiece.model"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).write_text("{}")
    with pytest.raises(WangenError, match=r"not (umT5's|a SentencePiece)"):
        load_tokenizer(tmp_path)


def embeddings(encoder: torch.nn.Module) -> list[torch.Tensor]:
    return encode_prompts(encoder, load_tokenizer(T5), PROMPTS)


@pytest.mark.parametrize("form", PLAIN)
def test_every_layout_gives_the_same_embeddings(tmp_path: Path, form: str):
    path = write_plain(tmp_path, form)
    for i, output in enumerate(embeddings(load_text_encoder(path, dtype=torch.float32))):
        assert max_abs(output, golden("t5")[f"context.{i}"]) < 2e-5


@pytest.mark.parametrize("place", ["text_encoder", "."])
def test_a_hugging_face_folder_is_read(tmp_path: Path, place: str):
    folder = write_shards(tmp_path)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    encoder = load_text_encoder(tmp_path / place, dtype=torch.float32)
    for i, output in enumerate(embeddings(encoder)):
        assert max_abs(output, golden("t5")[f"context.{i}"]) < 2e-5


def test_comfyuis_scaled_8_bit_file_stays_small_and_carries_its_tokenizer(tmp_path: Path):
    path = tmp_path / "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
    save_file(write_comfy_fp8(path), tmp_path / "plain.safetensors")
    encoder = load_text_encoder(path, dtype=torch.float32)
    assert isinstance(encoder.encoder.block[0].layer[0].SelfAttention.q, QuantizedLinear)
    tokenizer = load_tokenizer(path)
    plain = load_text_encoder(tmp_path / "plain.safetensors", dtype=torch.float32)
    found = encode_prompts(encoder, tokenizer, PROMPTS)
    for one, other in zip(found, embeddings(plain), strict=True):
        assert max_abs(one, other) < 1e-6
    for prompt, ids, mask in zip(PROMPTS, golden("t5")["input_ids"], golden("t5")["attention_mask"], strict=True):
        assert tokenizer.encode(clean_prompt(prompt)).ids == ids[: int(mask.sum())].tolist()


def test_gguf_text_encoders_stay_small_and_compute_as_what_they_stand_for(tmp_path: Path):
    meant = write_gguf(tmp_path / "t5.gguf", gguf.GGMLQuantizationType.Q8_0)
    save_file(meant, tmp_path / "plain.safetensors")
    encoder = load_text_encoder(tmp_path / "t5.gguf", dtype=torch.float32)
    assert isinstance(encoder.shared, QuantizedEmbedding)
    plain = load_text_encoder(tmp_path / "plain.safetensors", dtype=torch.float32)
    for one, other in zip(embeddings(encoder), embeddings(plain), strict=True):
        assert max_abs(one, other) < 1e-5


def test_fp8_halves_the_memory_and_stays_close():
    """Random weights lose more in eight bits than trained ones, whose activations repeat themselves."""
    encoder = load_text_encoder(T5, dtype=torch.bfloat16, fp8=True)
    layers = [module for module in encoder.modules() if isinstance(module, torch.nn.Linear)]
    assert all(isinstance(layer, QuantizedLinear) and layer.weight.itemsize == 1 for layer in layers)
    for i, output in enumerate(embeddings(encoder)):
        assert output.dtype == torch.bfloat16
        assert rel_rms(output, golden("t5")[f"context.{i}"]) < 0.1
