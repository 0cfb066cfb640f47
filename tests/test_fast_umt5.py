"""The streamed umT5 encoder against the official vectors and against transformers."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import published
import pytest
import torch
from parity import DIT, PROMPTS, T5, TOKENIZER, golden, max_abs, rel_rms
from safetensors.torch import save_file
from text_encoders import PLAIN, hugging_face_state, write_comfy_fp8, write_gguf, write_plain, write_shards
from tiny_weights import write_tokenizer

from wangen.generator.errors import WangenError
from wangen.runtime.fast.umt5 import PromptEncoder, load_prompt_encoder
from wangen.runtime.weights.text_encoder import load_plain_prompt_encoder, load_text_encoder
from wangen.runtime.weights.tokenizer import load_tokenizer

TEXTS = [*PROMPTS, "a red fox", "two crows on a fence, seen from below", "fox"]


def load(path: Path = T5, *, dtype: torch.dtype = torch.float32, fp8: bool = False) -> PromptEncoder:
    return load_prompt_encoder(path, None if path == T5 else TOKENIZER, dtype=dtype, fp8=fp8)


def as_library(path: Path, *, dtype: torch.dtype = torch.float32, fp8: bool = False) -> list[torch.Tensor]:
    """What transformers makes of the texts."""
    return load_plain_prompt_encoder(path, TOKENIZER, dtype=dtype, fp8=fp8).encode(TEXTS)


def assert_equal_to_rounding(found: list[torch.Tensor], wanted: list[torch.Tensor], limit: float = 2e-5) -> None:
    assert [x.shape for x in found] == [x.shape for x in wanted]
    assert max(max_abs(a, b) for a, b in zip(found, wanted, strict=True)) < limit


@pytest.mark.parametrize(
    ("dtype", "name", "measure", "limit"),
    [
        (torch.float32, "context", max_abs, 2e-5),
        (torch.bfloat16, "context_bf16", rel_rms, 3e-2),
        (torch.float16, "context", rel_rms, 3e-3),
    ],
)
def test_embeddings_equal_the_official_ones(dtype: torch.dtype, name: str, measure: Callable[..., float], limit: float):
    wanted = golden("t5")
    for i, output in enumerate(load(dtype=dtype).encode(PROMPTS)):
        assert output.dtype == dtype
        assert output.shape == wanted[f"{name}.{i}"].shape
        assert measure(output, wanted[f"{name}.{i}"]) < limit


@pytest.mark.parametrize("form", PLAIN)
def test_every_layout_gives_the_same_embeddings(tmp_path: Path, form: str):
    for i, output in enumerate(load(write_plain(tmp_path, form)).encode(PROMPTS)):
        assert max_abs(output, golden("t5")[f"context.{i}"]) < 2e-5


@pytest.mark.parametrize("place", ["text_encoder", "."])
def test_a_hugging_face_folder_is_read(tmp_path: Path, place: str):
    write_shards(tmp_path)
    for i, output in enumerate(load(tmp_path / place).encode(PROMPTS)):
        assert max_abs(output, golden("t5")[f"context.{i}"]) < 2e-5


@pytest.mark.parametrize("embedding", [False, True])
def test_comfyuis_scaled_8_bit_file_is_computed_as_what_it_stands_for(tmp_path: Path, embedding: bool):
    path = tmp_path / "t5.safetensors"
    write_comfy_fp8(path, embedding=embedding)
    encoder = load_prompt_encoder(path, None, dtype=torch.float32)  # with the tokenizer that it carries
    assert_equal_to_rounding(encoder.encode(TEXTS), as_library(path))


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0])
def test_gguf_is_computed_as_what_it_stands_for(tmp_path: Path, kind: gguf.GGMLQuantizationType):
    write_gguf(tmp_path / "t5.gguf", kind)
    assert_equal_to_rounding(load(tmp_path / "t5.gguf").encode(TEXTS), as_library(tmp_path / "t5.gguf"))


def test_matrices_that_are_not_stored_row_by_row_are_read(tmp_path: Path):
    state = torch.load(T5, weights_only=True)
    for name in ("token_embedding.weight", "blocks.0.ffn.fc1.weight", "blocks.0.attn.q.weight"):
        state[name] = state[name].T.contiguous().T
    torch.save(state, tmp_path / "t5.pth")
    for fp8 in (False, True):
        for one, other in zip(
            load(tmp_path / "t5.pth", fp8=fp8).encode(TEXTS), load(fp8=fp8).encode(TEXTS), strict=True
        ):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_rounds_as_the_library_path_does(dtype: torch.dtype):
    found = load(dtype=dtype, fp8=True).encode(TEXTS)
    wanted = as_library(T5, dtype=dtype, fp8=True)
    exact = load(dtype=dtype).encode(TEXTS)
    for one, other, plain in zip(found, wanted, exact, strict=True):
        assert rel_rms(one, other) < (1e-6 if dtype == torch.float32 else 3e-2)
        assert 1e-3 < rel_rms(one, plain) < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_cpu_an_embedding_does_not_depend_on_the_others(dtype: torch.dtype):
    encoder = load(dtype=dtype)
    together = encoder.encode(TEXTS)
    encoder.group_tokens = 90
    in_groups = encoder.encode(TEXTS[::-1])[::-1]
    alone = [encoder.encode([text])[0] for text in TEXTS]
    for a, b, c in zip(together, in_groups, alone, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("pack_tokens", [1, 60, 10_000])
def test_captions_that_are_packed_as_on_a_gpu_are_equal_to_rounding(pack_tokens: int):
    encoder = load()
    alone = encoder.encode(TEXTS)
    encoder.pack_tokens = pack_tokens
    assert_equal_to_rounding(encoder.encode(TEXTS), alone)


@torch.no_grad()
def test_every_length_equals_transformers_padded_to_512():
    tokenizer, model = load_tokenizer(TOKENIZER), load_text_encoder(T5, dtype=torch.float32)
    wanted_lengths = [1, 2, 9, 35, 78, 127, 128, 129, 300, 511, 512, 512]
    texts = [" ".join(["a"] * count) for count in (*(length - 1 for length in wanted_lengths[:-1]), 2000)]  # and </s>
    for text, length, found in zip(texts, wanted_lengths, load().encode(texts), strict=True):
        ids = [*tokenizer.encode(text).ids[: length - 1], 1]
        padded = torch.tensor([ids + [0] * (512 - length)])
        mask = torch.tensor([[1] * length + [0] * (512 - length)])
        assert found.shape[0] == length
        assert max_abs(found, model(input_ids=padded, attention_mask=mask).last_hidden_state[0, :length]) < 2e-5


def test_equal_prompts_are_computed_once_and_every_block_is_told():
    encoder = load()
    encoder.group_tokens = 1
    steps: list[tuple[int, int]] = []
    found = encoder.encode(["a fox", "", "  a  fox ", "a crow"], lambda *step: steps.append(step))
    assert found[0] is found[2]
    num_blocks = steps[0][1] // 3  # three texts, a group each
    assert steps == [(i + 1, 3 * num_blocks) for i in range(3 * num_blocks)]
    assert encoder.encode([]) == []


@pytest.mark.slow
def test_importing_and_encoding_need_neither_transformers_nor_diffusers():
    code = f"""
import sys
from pathlib import Path
import torch
from wangen.runtime.fast.umt5 import load_prompt_encoder
load_prompt_encoder(Path({str(T5)!r}), None, dtype=torch.float32).encode(["a fox"])
print([name for name in ("transformers", "diffusers", "accelerate", "sentencepiece") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tensors_that_do_not_fit_are_named_before_anything_is_computed(tmp_path: Path):
    path, state = tmp_path / "t5.safetensors", torch.load(T5, weights_only=True)
    changes = {
        "1 missing .*block.1.layer.1.DenseReluDense.wo": {"blocks.1.ffn.fc2.weight": None},
        "1 unexpected .*strange": {"blocks.1.strange.weight": torch.ones(1)},
        "1 of another shape .*final_layer_norm": {"norm.weight": torch.ones(3)},
        "1 of whole numbers": {"norm.weight": torch.ones(state["norm.weight"].shape, dtype=torch.int8)},
        "q.weight is missing": {"blocks.0.attn.q.weight": None},
        "2 buckets": {f"blocks.{i}.pos_embedding.embedding.weight": torch.ones(2, 4) for i in range(2)},
    }
    for words, change in changes.items():
        tensors = {name: value for name, value in (state | change).items() if value is not None}
        save_file(tensors, path)
        for loader in (load, load_text_encoder):
            with pytest.raises(WangenError, match=words):
                loader(path)
    with pytest.raises(WangenError, match="--dit"):
        load(DIT)


def test_a_tokenizer_of_other_weights_is_named(tmp_path: Path):
    state = hugging_face_state(torch.float32)
    state["shared.weight"] = state["shared.weight"][:20].clone()
    save_file(state, tmp_path / "t5.safetensors")
    with pytest.raises(WangenError, match="the embedding has 20 rows") as caught:
        load(tmp_path / "t5.safetensors").encode(PROMPTS)
    assert "--tokenizer" in str(caught.value)


def test_a_file_that_shrinks_while_it_is_used_is_named(tmp_path: Path):
    path = write_plain(tmp_path, "transformers")
    encoder = load(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(WangenError, match="early") as caught:
        encoder.encode(PROMPTS)
    assert str(path) in str(caught.value)


MEASURE = """
import json, torch
from pathlib import Path
from wangen.runtime.fast.umt5 import load_prompt_encoder
encoder = load_prompt_encoder(Path({path!r}), None, dtype=torch.{dtype}, fp8={fp8})
lengths = [len(embedding) for embedding in encoder.encode({texts!r})]
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([lengths, peak * 1024]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("dtype", "fp8", "counts"),
    [
        ("float32", False, (8, 34, 600, *[84] * 41)),
        ("bfloat16", False, (8, 34)),  # which many a processor computes slowly
        ("float32", True, (8, 34, 600)),
    ],
)
def test_the_whole_encoder_stays_within_its_memory(tmp_path: Path, dtype: str, fp8: bool, counts: tuple[int, ...]):
    """Two blocks of the real size, the whole vocabulary and (in float32) a full group; more blocks need no more."""
    words = [f"w{number}" for number in range(250_000)]
    vocabulary = write_tokenizer(tmp_path, [" ".join(words)])
    path = published.write_sparse(tmp_path / "t5.safetensors", published.umt5(vocabulary=vocabulary, num_layers=2))
    texts = [" ".join(words[i * 997 : i * 997 + count]) for i, count in enumerate(counts)]
    code = MEASURE.format(path=str(path), dtype=dtype, fp8=fp8, texts=texts)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lengths, peak_bytes = json.loads(done.stdout)
    assert lengths == [min(count + 1, 512) for count in counts]
    assert peak_bytes < 1.5e9
