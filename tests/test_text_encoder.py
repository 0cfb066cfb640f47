import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from parity import PROMPTS, T5, TOKENIZER, golden, max_abs, rel_rms
from safetensors.torch import save_file

from wangen.generator.errors import WangenError
from wangen.runtime import weights
from wangen.runtime.prompts import clean_prompt
from wangen.runtime.weights.quantized import QuantizedEmbedding, QuantizedLinear
from wangen.runtime.weights.text_encoder import GGUF_NAMES


def test_embeddings_equal_the_official_ones():
    wanted = golden("t5")
    tokenizer = weights.load_tokenizer(T5)
    outputs = weights.encode_prompts(weights.load_text_encoder(T5, dtype=torch.float32), tokenizer, PROMPTS)
    for i, output in enumerate(outputs):
        assert output.shape == wanted[f"context.{i}"].shape
        assert max_abs(output, wanted[f"context.{i}"]) < 2e-5
    stored = weights.encode_prompts(weights.load_text_encoder(T5), tokenizer, PROMPTS)
    for i, output in enumerate(stored):
        assert output.dtype == torch.bfloat16
        assert rel_rms(output, wanted[f"context_bf16.{i}"]) < 3e-2


def test_the_batch_does_not_change_an_embedding():
    encoder, tokenizer = weights.load_text_encoder(T5, dtype=torch.float32), weights.load_tokenizer(T5)
    together = weights.encode_prompts(encoder, tokenizer, PROMPTS)
    alone = [weights.encode_prompts(encoder, tokenizer, [prompt])[0] for prompt in PROMPTS]
    assert max(max_abs(a, b) for a, b in zip(together, alone, strict=True)) < 2e-5
    assert weights.encode_prompts(encoder, tokenizer, []) == []


def test_a_long_prompt_is_cut_and_keeps_its_end():
    encoder, tokenizer = weights.load_text_encoder(T5, dtype=torch.float32), weights.load_tokenizer(T5)
    long = " ".join(["fox"] * 2000)
    assert weights.encode_prompts(encoder, tokenizer, [long])[0].shape[0] == 512


@pytest.mark.parametrize("place", [T5, TOKENIZER, TOKENIZER / "tokenizer.json", TOKENIZER / "spiece.model"])
def test_token_ids_are_the_official_ones(place: Path):
    wanted = golden("t5")
    tokenizer = weights.load_tokenizer(place)
    for prompt, ids, mask in zip(PROMPTS, wanted["input_ids"], wanted["attention_mask"], strict=True):
        assert tokenizer.encode(clean_prompt(prompt)).ids == ids[: int(mask.sum())].tolist()


def test_both_forms_of_the_tokenizer_agree_on_hostile_texts():
    one = weights.load_tokenizer(TOKENIZER / "tokenizer.json")
    other = weights.load_tokenizer(TOKENIZER / "spiece.model")
    for text in ("", "  a  b ", "ﬁne — “quoted” … 狐狸 🦊", "</s> <pad> <unk>", "x" * 3000, "a\u0300 \u200b\ufeff z"):
        assert one.encode(text).ids == other.encode(text).ids


def test_the_tokenizer_is_found_beside_the_weights(tmp_path: Path):
    shutil.copy(T5, tmp_path / "t5.pth")
    with pytest.raises(WangenError) as caught:
        weights.load_tokenizer(tmp_path / "t5.pth")
    assert "--tokenizer" in str(caught.value)
    assert "google/umt5-xxl/spiece.model" in str(caught.value)
    shutil.copy(TOKENIZER / "spiece.model", tmp_path)
    assert weights.load_tokenizer(tmp_path / "t5.pth").encode("").ids == [1]


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
            weights.load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "spiece.model"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).write_text("{}")
    with pytest.raises(WangenError, match=r"not (umT5's|a SentencePiece)"):
        weights.load_tokenizer(tmp_path)


def embeddings(encoder: torch.nn.Module) -> list[torch.Tensor]:
    return weights.encode_prompts(encoder, weights.load_tokenizer(T5), PROMPTS)


def hugging_face_state(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The fixture under the names of transformers and ComfyUI."""
    state = weights.load_text_encoder(T5, dtype=dtype).state_dict()
    return {name: value.contiguous() for name, value in state.items() if name != "encoder.embed_tokens.weight"}


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType) -> dict[str, torch.Tensor]:
    """The fixture under the names of llama.cpp; returns the weights that it stands for, by transformers' names."""
    outer = {"shared": "token_embd", "encoder.final_layer_norm": "enc.output_norm"}
    inner = {value: key for key, value in GGUF_NAMES.items()}
    meant = {}
    writer = gguf.GGUFWriter(path, "t5encoder")
    for name, value in hugging_face_state(torch.float32).items():
        stem = name.removesuffix(".weight")
        if stem in outer:
            new = outer[stem]
        else:
            _, _, number, rest = stem.split(".", 3)
            new = f"enc.blk.{number}.{inner[rest]}"
        numbers = value.numpy()
        if value.ndim == 2 and "attn_rel_b" not in new:
            stored = gguf.quants.quantize(numbers, kind)
            meant[name] = torch.from_numpy(gguf.quants.dequantize(stored, kind))
            writer.add_tensor(f"{new}.weight", stored, raw_dtype=kind)
        else:
            meant[name] = value
            writer.add_tensor(f"{new}.weight", numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


@pytest.mark.parametrize("form", ["pth", "safetensors", "transformers", "tied", "whole"])
def test_every_layout_gives_the_same_embeddings(tmp_path: Path, form: str):
    path = tmp_path / "t5.safetensors"
    if form == "pth":
        path = T5
    elif form == "safetensors":  # Kijai's
        save_file(torch.load(T5, weights_only=True), path)
    else:
        state = hugging_face_state(torch.float32)
        if form == "tied":
            state["encoder.embed_tokens.weight"] = state["shared.weight"].clone()
        if form == "whole":
            state["decoder.block.0.layer.0.SelfAttention.q.weight"] = torch.zeros(4, 4)
            state["lm_head.weight"] = torch.zeros(4, 4)
        save_file(state, path)
    for i, output in enumerate(embeddings(weights.load_text_encoder(path, dtype=torch.float32))):
        assert max_abs(output, golden("t5")[f"context.{i}"]) < 2e-5


@pytest.mark.parametrize("place", ["text_encoder", "."])
def test_a_hugging_face_folder_is_read(tmp_path: Path, place: str):
    weights.load_text_encoder(T5, dtype=torch.float32).save_pretrained(tmp_path / "text_encoder", max_shard_size="50KB")
    assert len(list((tmp_path / "text_encoder").glob("model-*.safetensors"))) > 1
    (tmp_path / "model_index.json").write_text("{}")
    encoder = weights.load_text_encoder(tmp_path / place, dtype=torch.float32)
    for i, output in enumerate(embeddings(encoder)):
        assert max_abs(output, golden("t5")[f"context.{i}"]) < 2e-5


def test_comfyuis_scaled_8_bit_file_stays_small_and_carries_its_tokenizer(tmp_path: Path):
    tensors: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, value in hugging_face_state(torch.float32).items():
        tensors[name] = meant[name] = value
        if value.ndim == 2 and "SelfAttention" in name and "bias" not in name:
            scale = value.abs().max() / 448
            tensors[name] = (value / scale).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + "scale_weight"] = scale
            meant[name] = tensors[name].float() * scale
    spiece = (TOKENIZER / "spiece.model").read_bytes()
    tensors |= {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}
    tensors |= {"spiece_model": torch.frombuffer(bytearray(spiece), dtype=torch.uint8)}
    path = tmp_path / "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
    save_file(tensors, path)
    save_file(meant, tmp_path / "plain.safetensors")
    encoder = weights.load_text_encoder(path, dtype=torch.float32)
    assert isinstance(encoder.encoder.block[0].layer[0].SelfAttention.q, QuantizedLinear)
    tokenizer = weights.load_tokenizer(path)
    plain = weights.load_text_encoder(tmp_path / "plain.safetensors", dtype=torch.float32)
    found = weights.encode_prompts(encoder, tokenizer, PROMPTS)
    for one, other in zip(found, embeddings(plain), strict=True):
        assert max_abs(one, other) < 1e-6
    for prompt, ids, mask in zip(PROMPTS, golden("t5")["input_ids"], golden("t5")["attention_mask"], strict=True):
        assert tokenizer.encode(clean_prompt(prompt)).ids == ids[: int(mask.sum())].tolist()


def test_gguf_text_encoders_stay_small_and_compute_as_what_they_stand_for(tmp_path: Path):
    meant = write_gguf(tmp_path / "t5.gguf", gguf.GGMLQuantizationType.Q8_0)
    save_file(meant, tmp_path / "plain.safetensors")
    encoder = weights.load_text_encoder(tmp_path / "t5.gguf", dtype=torch.float32)
    assert isinstance(encoder.shared, QuantizedEmbedding)
    plain = weights.load_text_encoder(tmp_path / "plain.safetensors", dtype=torch.float32)
    for one, other in zip(embeddings(encoder), embeddings(plain), strict=True):
        assert max_abs(one, other) < 1e-5


def test_fp8_halves_the_memory_and_stays_close():
    """Random weights lose more in eight bits than trained ones, whose activations repeat themselves."""
    encoder = weights.load_text_encoder(T5, dtype=torch.bfloat16, fp8=True)
    layers = [module for module in encoder.modules() if isinstance(module, torch.nn.Linear)]
    assert all(isinstance(layer, QuantizedLinear) and layer.weight.itemsize == 1 for layer in layers)
    for i, output in enumerate(embeddings(encoder)):
        assert output.dtype == torch.bfloat16
        assert rel_rms(output, golden("t5")[f"context.{i}"]) < 0.1
