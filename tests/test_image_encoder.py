from pathlib import Path

import pytest
import torch
from parity import CLIP, CLIP_HEADS, golden, max_abs, rel_rms
from safetensors.torch import save_file

from wangen.generator.errors import WangenError
from wangen.runtime.weights.image_encoder import clip_pixels, encode_images, load_image_encoder


def image(case: int) -> torch.Tensor:
    """(1, 3, H, W) in [-1, 1]."""
    return golden("clip")[f"case{case}.image_uint8"][None].float() / 127.5 - 1


@pytest.mark.parametrize("case", [0, 1])
def test_the_pixels_are_those_of_the_official_preprocessing(case: int):
    assert max_abs(clip_pixels(image(case), 56), golden("clip")[f"case{case}.pixel_values"]) < 1e-5


@pytest.mark.parametrize("case", [0, 1])
def test_the_tokens_equal_the_official_ones(case: int):
    encoder = load_image_encoder(CLIP, dtype=torch.float32, num_heads=CLIP_HEADS)
    assert max_abs(encode_images(encoder, image(case)), golden("clip")[f"case{case}.clip_fea"]) < 1e-4


def test_a_batch_equals_its_images_one_by_one():
    encoder = load_image_encoder(CLIP, dtype=torch.float32, num_heads=CLIP_HEADS)
    images = torch.cat([image(0), -image(0)])
    together = encode_images(encoder, images)
    alone = torch.cat([encode_images(encoder, one[None]) for one in images])
    assert max_abs(together, alone) < 1e-5


def test_the_stored_precision_is_kept_and_close():
    encoder = load_image_encoder(CLIP, num_heads=CLIP_HEADS)
    assert encoder.dtype == torch.float16
    encoder = load_image_encoder(CLIP, num_heads=CLIP_HEADS, dtype=torch.bfloat16)
    assert rel_rms(encode_images(encoder, image(0)), golden("clip")["case0.clip_fea"]) < 0.02


@pytest.mark.parametrize("prefix", ["", "vision_model."])
def test_the_names_of_transformers_and_comfyui_are_read(tmp_path: Path, prefix: str):
    encoder = load_image_encoder(CLIP, dtype=torch.float32, num_heads=CLIP_HEADS)
    state = {prefix + name: value for name, value in encoder.state_dict().items()}
    if prefix:  # as transformers 4 wrote it
        state["visual_projection.weight"] = torch.zeros(48, 80)
        state["vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    save_file(state, tmp_path / "clip_vision_h.safetensors")
    again = load_image_encoder(tmp_path / "clip_vision_h.safetensors", num_heads=CLIP_HEADS)
    assert max_abs(encode_images(again, image(1)), golden("clip")["case1.clip_fea"]) < 1e-4


@pytest.mark.parametrize("place", ["image_encoder", "."])
def test_a_folder_written_by_transformers_is_read(tmp_path: Path, place: str):
    encoder = load_image_encoder(CLIP, dtype=torch.float32, num_heads=CLIP_HEADS)
    encoder.save_pretrained(tmp_path / "image_encoder")
    (tmp_path / "model_index.json").write_text("{}")
    again = load_image_encoder(tmp_path / place, num_heads=CLIP_HEADS)
    assert max_abs(encode_images(again, image(0)), golden("clip")["case0.clip_fea"]) < 1e-4


@pytest.mark.parametrize("per_row", [False, True])
def test_8_bit_weights_keep_their_scales_when_queries_keys_and_values_are_taken_apart(tmp_path: Path, per_row: bool):
    state = torch.load(CLIP, weights_only=True)
    meant = dict(state)
    for name in [name for name in state if name.endswith(("to_qkv.weight", "mlp.0.weight"))]:
        weight = state[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 448 if per_row else weight.abs().max() / 448
        state[name] = (weight / scale).to(torch.float8_e4m3fn)
        state[name.removesuffix("weight") + "scale_weight"] = scale
        meant[name] = state[name].float() * scale
    save_file({name: value.contiguous() for name, value in state.items()}, tmp_path / "clip_fp8.safetensors")
    torch.save(meant, tmp_path / "plain.pth")
    found, plain = (
        encode_images(load_image_encoder(tmp_path / file, dtype=torch.float32, num_heads=CLIP_HEADS), image(0))
        for file in ("clip_fp8.safetensors", "plain.pth")
    )
    assert max_abs(found, plain) < 1e-5


def test_missing_blocks_are_named(tmp_path: Path):
    state = torch.load(CLIP, weights_only=True)
    state = {name: value for name, value in state.items() if not name.startswith("visual.transformer.1.")}
    torch.save(state, tmp_path / "clip.pth")
    with pytest.raises(WangenError, match="blocks are missing"):
        load_image_encoder(tmp_path / "clip.pth", num_heads=CLIP_HEADS)
