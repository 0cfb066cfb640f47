import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from wangen.generator.errors import WangenError
from wangen.runtime import safetensors_file, weights
from wangen.runtime.models.wan import decode_latents, encode_video
from wangen.runtime.prompts import clean_prompt

VECTORS = Path(__file__).parent / "vectors"
DIT = VECTORS / "dit_t2v21" / "model.safetensors"
E2E = VECTORS / "dit_t2v21_e2e"
SHARDS = sorted((E2E / "sharded").glob("*.safetensors"))
VAE = VECTORS / "vae21" / "Wan2.1_VAE.pth"
T5 = VECTORS / "t5" / "models_t5_umt5-xxl-enc-bf16.pth"
TOKENIZER = VECTORS / "t5" / "google" / "umt5-xxl"
LORA = VECTORS / "lora_t2v21" / "lora_musubi.safetensors"
PROMPTS = json.loads((VECTORS / "t5" / "meta.json").read_text("utf-8"))["prompts"]
CASES = [(DIT, 0), (DIT, 1), (E2E / "model.safetensors", 0), (SHARDS[0], 0), (SHARDS[1], 0)]


def run_transformer(model: torch.nn.Module, path: Path, case: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's output on a fixture's input, and the fixture's, both float32."""
    folder = path.parent.parent if path.parent.name == "sharded" else path.parent
    golden = load_file(folder / "golden.safetensors")
    contexts = [golden[key] for key in sorted(golden) if key.startswith(f"case{case}.context.")]
    padded = torch.stack([torch.nn.functional.pad(c, (0, 0, 0, 512 - len(c))) for c in contexts])
    dtype = model.dtype
    with torch.no_grad():
        output = model(
            hidden_states=golden[f"case{case}.latents"].to(dtype),
            timestep=golden[f"case{case}.timestep"],
            encoder_hidden_states=padded.to(dtype),
            return_dict=False,
        )[0]
    return output.float(), golden[f"case{case}.output"]


def max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max())


def rel_rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).pow(2).mean().sqrt() / b.float().pow(2).mean().sqrt())


@pytest.mark.parametrize(("path", "case"), CASES)
def test_the_transformer_equals_the_official_one(path: Path, case: int):
    model = weights.load_transformer(path, dtype=torch.float32)
    assert max_abs(*run_transformer(model, path, case)) < 2e-4


@pytest.mark.parametrize(("path", "case"), CASES[:3])
def test_the_transformer_in_bfloat16_is_close(path: Path, case: int):
    model = weights.load_transformer(path, dtype=torch.bfloat16)
    assert rel_rms(*run_transformer(model, path, case)) < 0.015
    assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert model.blocks[0].scale_shift_table.dtype == torch.float32
    assert model.condition_embedder.time_embedder.linear_1.weight.dtype == torch.float32


@pytest.mark.parametrize(("path", "case"), CASES[:3])
def test_under_autocast_as_in_training_it_is_close_and_the_time_embedding_stays_float32(path: Path, case: int):
    model = weights.load_transformer(path, dtype=torch.bfloat16)
    dtypes = set()
    model.condition_embedder.time_embedder.linear_1.register_forward_hook(lambda *call: dtypes.add(call[2].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert rel_rms(*run_transformer(model, path, case)) < 0.015
    assert dtypes == {torch.float32}


@pytest.mark.parametrize(("shielded", "dtypes"), [(False, {torch.float32, torch.bfloat16}), (True, {torch.bfloat16})])
def test_under_cudas_autocast_queries_keys_and_values_share_a_dtype(monkeypatch, shielded, dtypes):
    """Flash attention refuses a mixture, which CUDA's autocast makes at the norms. Fake tensors need no GPU."""
    from diffusers.models.transformers import transformer_wan
    from torch._subclasses.fake_tensor import FakeTensorMode

    seen = []
    monkeypatch.setattr(
        transformer_wan, "dispatch_attention_fn", lambda q, k, v, **_: seen.append({q.dtype, k.dtype, v.dtype}) or v
    )
    model = weights.load_transformer(DIT, dtype=torch.bfloat16)
    attention = model.blocks[0].attn1
    for norm in (attention.norm_q, attention.norm_k):
        del norm.forward  # the shield for the CPU, where the model was loaded to
    if shielded:
        weights.shield_from_autocast(model, torch.device("cuda"))
    with FakeTensorMode():
        for module in attention.modules():
            for name, value in list(module.named_parameters(recurse=False)):
                fake = torch.empty(value.shape, dtype=value.dtype, device="cuda")
                setattr(module, name, torch.nn.Parameter(fake, requires_grad=False))
        hidden = torch.empty(1, 4, 256, dtype=torch.bfloat16, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            attention(hidden)
        finally:
            torch.set_autocast_enabled("cuda", False)
    assert seen == [dtypes]


def test_without_a_dtype_the_stored_one_is_kept():
    model = weights.load_transformer(DIT)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert weights.load_vae(VAE).dtype == torch.float32


@pytest.mark.parametrize(
    ("load", "path"),
    [(weights.load_transformer, DIT), (weights.load_vae, VAE), (weights.load_text_encoder, T5)],
)
def test_models_are_frozen_whole_and_in_eval_mode(load, path: Path):
    model = load(path)
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model."])
def test_prefixes_are_understood(tmp_path: Path, prefix: str):
    path = tmp_path / "model.safetensors"
    safetensors_file.write(path, {prefix + name: value for name, value in load_file(DIT).items()}, {})
    loaded = weights.load_transformer(path).state_dict()
    wanted = weights.load_transformer(DIT).state_dict()
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)


def test_a_transformer_as_pth_and_a_vae_as_safetensors_are_read(tmp_path: Path):
    torch.save({"state_dict": load_file(DIT)}, tmp_path / "model.pth")
    model = weights.load_transformer(tmp_path / "model.pth", dtype=torch.float32)
    assert max_abs(*run_transformer(model, DIT, 0)) < 2e-4
    safetensors_file.write(tmp_path / "vae.safetensors", torch.load(VAE, weights_only=True), {})
    loaded = weights.load_vae(tmp_path / "vae.safetensors").state_dict()
    wanted = weights.load_vae(VAE).state_dict()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("case", [0, 1, 2])
def test_the_vae_equals_the_official_one(case: int):
    golden = load_file(VECTORS / "vae21" / "golden.safetensors")
    vae = weights.load_vae(VAE)
    video = golden[f"case{case}.video_uint8"][None].float() / 127.5 - 1
    latents = golden[f"case{case}.latents_normalized"]
    assert max_abs(encode_video(vae, video)[0], latents) < 1e-5
    decoded = decode_latents(vae, golden.get(f"case{case}.decode_input", latents)[None])
    assert max_abs(decoded[0], golden[f"case{case}.decoded"]) < 5e-5


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 3, 4, 16, 16), "4 frames"),
        ((1, 3, 5, 20, 16), "16x20 pixels"),
        ((1, 3, 5, 0, 16), "16x0 pixels"),
        ((3, 5, 16, 16), "shape"),
        ((1, 1, 5, 16, 16), "shape"),
    ],
)
def test_videos_that_the_vae_would_cut_are_refused(shape: tuple[int, ...], words: str):
    with pytest.raises(WangenError, match=words):
        encode_video(weights.load_vae(VAE), torch.zeros(shape))


def test_latents_of_a_wrong_shape_are_refused():
    with pytest.raises(WangenError, match="latents of shape"):
        decode_latents(weights.load_vae(VAE), torch.zeros(1, 8, 1, 4, 4))


def test_embeddings_equal_the_official_ones():
    golden = load_file(VECTORS / "t5" / "golden.safetensors")
    tokenizer = weights.load_tokenizer(T5)
    outputs = weights.encode_prompts(weights.load_text_encoder(T5, dtype=torch.float32), tokenizer, PROMPTS)
    for i, output in enumerate(outputs):
        assert output.shape == golden[f"context.{i}"].shape
        assert max_abs(output, golden[f"context.{i}"]) < 2e-5
    stored = weights.encode_prompts(weights.load_text_encoder(T5), tokenizer, PROMPTS)
    for i, output in enumerate(stored):
        assert output.dtype == torch.bfloat16
        assert rel_rms(output, golden[f"context_bf16.{i}"]) < 3e-2


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
    golden = load_file(VECTORS / "t5" / "golden.safetensors")
    tokenizer = weights.load_tokenizer(place)
    for prompt, ids, mask in zip(PROMPTS, golden["input_ids"], golden["attention_mask"], strict=True):
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


@pytest.mark.parametrize("name", ["tokenizer.json", "spiece.model"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).write_text("{}")
    with pytest.raises(WangenError, match="not a"):
        weights.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("load", "path", "words"),
    [
        (weights.load_vae, DIT, "--dit"),
        (weights.load_text_encoder, VAE, "--vae"),
        (weights.load_transformer, T5, "--t5"),
        (weights.load_transformer, LORA, "this is a LoRA"),
        (weights.load_vae, VECTORS, "a folder"),
        (weights.load_vae, VECTORS / "none.pth", "no such weight file"),
    ],
)
def test_a_wrong_file_is_named_with_its_own_flag(load, path: Path, words: str):
    with pytest.raises(WangenError) as caught:
        load(path)
    assert words in str(caught.value)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path):
    path, state = tmp_path / "model.safetensors", load_file(DIT)
    changes = {
        "1 missing": {**state, "blocks.1.ffn.2.bias": None},
        "1 unexpected": {**state, "blocks.1.strange.weight": torch.ones(1)},
        "1 of another shape": {**state, "blocks.1.ffn.2.bias": torch.ones(3)},
        "blocks are missing": {name.replace("blocks.1", "blocks.7"): value for name, value in state.items()},
        "not a multiple": {**state, "patch_embedding.weight": torch.ones(100, 16, 1, 2, 2)},
        "head.head.weight is missing": {**state, "head.head.weight": None},
        "the same weight": {**state, "diffusion_model.blocks.1.ffn.2.bias": torch.ones(256)},
    }
    for words, tensors in changes.items():
        safetensors_file.write(path, {name: value for name, value in tensors.items() if value is not None}, {})
        with pytest.raises(WangenError, match=words):
            weights.load_transformer(path)


def test_weights_in_8_bits_need_a_dtype(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    eight = {name: v.to(torch.float8_e4m3fn) if v.ndim == 2 else v for name, v in load_file(DIT).items()}
    safetensors_file.write(path, eight, {})
    with pytest.raises(WangenError, match="8 bits"):
        weights.load_transformer(path)
    model = weights.load_transformer(path, dtype=torch.bfloat16)
    assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.target),))


def test_a_pickle_with_code_is_refused_and_not_executed(tmp_path: Path):
    made = tmp_path / "made-by-the-pickle"
    with zipfile.ZipFile(tmp_path / "vae.pth", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"encoder.conv1.weight": Bomb(made)}, 2))
    for load in (weights.load_vae, weights.load_text_encoder, weights.load_transformer):
        with pytest.raises(WangenError, match="refused, not executed"):
            load(tmp_path / "vae.pth")
    assert not made.exists()


@pytest.mark.parametrize("path", [DIT, VAE])
def test_a_file_cut_short_is_refused(tmp_path: Path, path: Path):
    cut = tmp_path / path.name
    cut.write_bytes(path.read_bytes()[:-1000])
    load = weights.load_vae if path == VAE else weights.load_transformer
    with pytest.raises(WangenError, match=str(cut.stat().st_size)):
        load(cut)
