"""Weights of another model, another task or the other expert: each is named, and the message says what was expected."""

import shutil
from pathlib import Path

import published
import pytest
from parity import VAE21, VAE22
from weight_files import I2V, LORA, T2V, T2V_SMALL, header_of, words_of

from wangen.generator.errors import WangenError
from wangen.generator.experts import expect_two_experts, same_weights, seem_swapped
from wangen.generator.headers import read_header
from wangen.generator.kinds import examine, expect, kind_of


def refusal(path: Path, kind: str, flag: str, task: str | None = None) -> str:
    with pytest.raises(WangenError) as caught:
        expect(path, kind, flag, task)
    return str(caught.value)


# ---- relatives and other models ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ("vace_blocks.0.before_proj.weight", "Wan VACE"),
        ("vace_patch_embedding.weight", "Wan VACE"),
        ("pose_patch_embedding.weight", "Wan 2.2 Animate"),
        ("face_adapter.fuser_blocks.0.k_norm.weight", "Wan 2.2 Animate"),
        ("motion_encoder.dec.direction.weight", "Wan 2.2 Animate"),
        ("casual_audio_encoder.encoder.final_linear.weight", "Wan 2.2 S2V"),
        ("audio_injector.injector.0.k.weight", "Wan 2.2 S2V"),
        ("control_adapter.conv.weight", "Wan Fun-Camera"),
        ("ref_conv.weight", "Wan Fun-Control"),
        ("audio_proj.audio_proj_glob_1.layer.bias", "HuMo"),
        ("audio_proj.proj1.weight", "MultiTalk"),
        ("proj_model.proj.weight", "FantasyTalking"),
        ("blocks.0.cam_encoder.weight", "ReCamMaster"),
        ("dwpose_embedding.0.weight", "UniAnimate"),
        ("fps_embedding.weight", "SkyReels-V2"),
        ("patch_embedding_pose.weight", "SCAIL"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_relatives_are_named(tmp_path: Path, extra: str, name: str, prefix: str):
    shapes = {prefix + key: shape for key, shape in {**T2V_SMALL, extra: (8, 8)}.items()}
    path = published.write_sparse(tmp_path / "a.safetensors", shapes)
    assert examine(path).kind == "wan-transformer-other"
    assert f"this is a {name}" in refusal(path, "wan-transformer-t2v", "--dit", "t2v-14B")


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"dim": 1536, "in_channels": 36, "image_branch": True}, "Wan 2.1 Fun-InP 1.3B"),
        ({"dim": 256, "in_channels": 48, "image_branch": True}, "Wan 2.1 Fun-Control"),
        ({"dim": 256, "in_channels": 52}, "Wan 2.2 Fun-Control"),
        ({"dim": 256, "in_channels": 77}, "77 input and 16 output channels"),
    ],
)
def test_relatives_are_told_by_their_channels(tmp_path: Path, sizes: dict[str, int], name: str):
    shapes = published.transformer(ffn_dim=64, num_layers=1, **sizes)  # type: ignore[arg-type]
    assert name in words_of(tmp_path, shapes)
    assert kind_of(header_of(shapes)) == "wan-transformer-other"


def test_an_added_part_without_the_transformer_is_named(tmp_path: Path):
    shapes = {"vace_patch_embedding.weight": (8, 96, 1, 2, 2), "blocks.0.x": (1,), "vace_blocks.0.y": (1,)}
    assert words_of(tmp_path, shapes) == "the Wan VACE part of a transformer"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["double_blocks.0.img_attn.qkv.weight", "img_in.weight"], "a Flux transformer"),
        (["txt_in.individual_token_refiner.blocks.0.norm1.weight", "double_blocks.0.x"], "a HunyuanVideo transformer"),
        (["transformer_blocks.0.img_mod.1.weight"], "a Qwen-Image transformer"),
        (["patchify_proj.weight", "transformer_blocks.0.attn1.to_q.weight"], "an LTX-Video transformer"),
        (["patch_embed.text_proj.weight"], "a CogVideoX transformer"),
        (["model.diffusion_model.input_blocks.0.0.weight"], "a Stable Diffusion UNet"),
        (["first_stage_model.encoder.down.0.block.0.norm1.weight"], "an image VAE"),
        (["encoder.down_blocks.0.resnets.0.norm1.weight"], "an image VAE"),
        (["encoder.down_blocks.0.resnets.0.conv1.conv.weight"], "another video VAE"),
        (["text_model.encoder.layers.0.self_attn.q_proj.weight"], "a CLIP text encoder"),
        (["visual.blocks.0.attn.qkv.weight", "model.layers.0.self_attn.q_proj.weight"], "a Qwen-VL language model"),
        (["blk.0.attn_q.weight", "token_embd.weight"], "a language model"),
        (["1.exp_avg", "1.exp_avg_sq", "2.step"], "the optimizer of a training state"),
        (["blocks.0.self_attn.q.weight", "blocks.0.self_attn.q.weight.absmax"], "quantised by bitsandbytes"),
        (["blocks.0.attn1.to_q.qweight", "blocks.0.attn1.to_q.wscales"], "quantised by SVDQuant"),
        (["patch_embedding.weight", "blocks.0.self_attn.q.weight_scale_2"], "quantised by NVFP4"),
        (["model.diffusion_model.a", "text_encoders.b", "first_stage_model.c"],
         "a checkpoint that holds the transformer, the VAE and the text encoder in one file"),
        (["lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"], "a LoRA for another model than Wan"),
        (["lycoris_single_transformer_blocks_0_attn_to_q.lora_up.weight"], "a LoRA for another model than Wan"),
        (["lora_unet_blocks_0_self_attn_q_proj.lora_up.weight"], "a LoRA for another model than Wan"),
        (["lora_unet_blocks_0_self_attn_q.hada_w1_a"], "a LoHa"),
        (["diffusion_model.blocks.0.ffn.0.lokr_w1"], "a LoKr"),
        (["diffusion_model.blocks.0.ffn.0.lora_A.weight", "diffusion_model.blocks.0.ffn.0.dora_scale"], "a DoRA"),
    ],
)  # fmt: skip
def test_other_models_are_named(tmp_path: Path, names: list[str], words: str):
    assert words in words_of(tmp_path, dict.fromkeys(names, (2, 2)))


def test_the_optimizer_of_another_trainer_is_named(tmp_path: Path):
    import torch

    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    assert "the optimizer of a training state" in refusal(tmp_path / "optimizer.bin", "lora", "--network_weights")


def test_an_unknown_file_is_told_by_its_tensors(tmp_path: Path):
    path = published.write_sparse(tmp_path / "a.safetensors", {"strange": (2,)})
    assert examine(path).kind == "unknown"
    assert "strange" in refusal(path, "wan-vae-2.1", "--vae")


# ---- what is said of a wrong file --------------------------------------------------------------------------------


def test_the_message_says_what_it_is_what_was_expected_and_what_takes_it():
    message = refusal(T2V, "wan-vae-2.1", "--vae")
    assert "this is a Wan text-to-video transformer (dim 256); --vae takes a Wan 2.1 VAE" in message
    assert "give a Wan 2.1 VAE; this file belongs to --dit" in message
    assert expect(T2V, "wan-transformer-t2v", "--dit").tensors
    assert "belongs to --network_weights" in refusal(LORA, "wan-transformer-t2v", "--dit")


def test_another_vae_names_its_task():
    message = refusal(VAE22, "wan-vae-2.1", "--vae", "t2v-14B")
    assert "this is a Wan 2.2 VAE; --vae of t2v-14B takes a Wan 2.1 VAE" in message
    assert "this file is for --task ti2v-5B" in message


def test_weights_of_another_task_name_it(tmp_path: Path):
    image = published.write_sparse(tmp_path / "i2v.safetensors", published.TRANSFORMERS["i2v-14B"])
    message = refusal(image, "wan-transformer-t2v", "--dit", "t2v-14B")
    assert "this is a Wan 2.1 image-to-video transformer (14B, dim 5120); --dit of t2v-14B takes a Wan text" in message
    assert "this file is for --task i2v-14B" in message
    small = published.write_sparse(tmp_path / "t2v.safetensors", published.TRANSFORMERS["t2v-1.3B"])
    message = refusal(small, "wan-transformer-t2v", "--dit", "t2v-14B")
    assert "(1.3B, dim 1536); --task t2v-14B takes a Wan text-to-video transformer (14B, dim 5120)" in message
    assert "this file is for --task t2v-1.3B" in message
    assert expect(small, "wan-transformer-t2v", "--dit", "t2v-1.3B")


def test_a_transformer_of_no_known_size_passes_for_any_task():
    assert expect(T2V, "wan-transformer-t2v", "--dit", "t2v-14B")


def test_one_of_several_kinds():
    kinds = ("wan-transformer-t2v", "wan-transformer-i2v")
    assert expect(I2V, kinds, "--dit")
    with pytest.raises(WangenError, match="--dit takes a Wan transformer"):
        expect(VAE21, kinds, "--dit")


# ---- two experts -------------------------------------------------------------------------------------------------


def write_transformer(path: Path, dtype: str, *, shift: float = 0.0, modulation: str = "head.modulation") -> Path:
    """A transformer whose body is zeros but for its head's modulation, rounded as PyTorch rounds."""
    import torch

    from wangen.runtime.dtypes import TORCH_DTYPES

    numbers = torch.tensor([(number % 97 - 48) / 16 * (1 + number / 1000) + shift for number in range(512)])
    rounded = numbers.to(TORCH_DTYPES[dtype])
    named = {"head.modulation": modulation}
    published.write_sparse(path, {named.get(name, name): shape for name, shape in T2V_SMALL.items()}, dtype)
    place = read_header(path).tensors[modulation].place
    assert place is not None
    with path.open("r+b") as file:
        file.seek(place.offset)
        file.write(bytes(rounded.view(torch.uint8).tolist()))
    return path


def test_one_expert_given_twice_is_seen_whatever_its_form(tmp_path: Path):
    first = write_transformer(tmp_path / "a.safetensors", "F32")
    assert same_weights(first, Path(shutil.copy(first, tmp_path / "copy.safetensors")))
    assert same_weights(first, write_transformer(tmp_path / "b.safetensors", "BF16"))
    assert same_weights(first, write_transformer(tmp_path / "c.safetensors", "F16"))
    assert same_weights(first, write_transformer(tmp_path / "d.safetensors", "F16", modulation="scale_shift_table"))
    small = write_transformer(tmp_path / "g.safetensors", "F8_E4M3")
    assert same_weights(first, small)
    assert same_weights(small, write_transformer(tmp_path / "h.safetensors", "F16"))
    assert not same_weights(small, write_transformer(tmp_path / "i.safetensors", "F16", shift=0.5))
    assert not same_weights(first, write_transformer(tmp_path / "e.safetensors", "F32", shift=0.05))
    assert not same_weights(first, write_transformer(tmp_path / "f.safetensors", "BF16", shift=0.05))


def test_two_experts_are_expected(tmp_path: Path):
    low = write_transformer(tmp_path / "low_noise.safetensors", "F32")
    again = write_transformer(tmp_path / "low_noise_fp16.safetensors", "F16")
    high = write_transformer(tmp_path / "high_noise.safetensors", "F16", shift=0.1)
    expect_two_experts(low, high)
    with pytest.raises(WangenError) as caught:
        expect_two_experts(low, again)
    message = str(caught.value)
    assert f"the same weights as {low}, given to both experts" in message
    assert "the file's name says low noise" in message
    assert "--dit takes the low-noise expert and --dit_high_noise the high-noise expert" in message
    assert seem_swapped(high, low)
    assert not seem_swapped(low, high)
    other = write_transformer(tmp_path / "a.safetensors", "F16", shift=0.2)
    assert not seem_swapped(low, other)
    assert not seem_swapped(other, high)
    assert seem_swapped(high, other)
    assert seem_swapped(other, low)
