"""What a file is, told by its tensors: layouts, sizes, relatives, other models; and what is said of a wrong one."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import published
import pytest

from wangen.generator.errors import WangenError
from wangen.generator.experts import expect_two_experts, same_weights, seem_swapped
from wangen.generator.formats import Header, TensorInfo
from wangen.generator.headers import read_header
from wangen.generator.kinds import KINDS, describe, examine, expect, kind_of
from wangen.generator.layouts import LAYOUTS, Layout

VECTORS = Path(__file__).parent / "vectors"
T2V = VECTORS / "dit_t2v21" / "model.safetensors"
I2V = VECTORS / "dit_i2v21" / "model.safetensors"
I2V22 = VECTORS / "dit_i2v22_a14b" / "model.safetensors"
TI2V = VECTORS / "dit_ti2v5b" / "model.safetensors"
VAE21 = VECTORS / "vae21" / "Wan2.1_VAE.pth"
VAE22 = VECTORS / "vae22" / "Wan2.2_VAE.pth"
T5 = VECTORS / "t5" / "models_t5_umt5-xxl-enc-bf16.pth"
CLIP = VECTORS / "clip" / "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
LORA = VECTORS / "lora_t2v21" / "lora_musubi.safetensors"

T2V_SMALL = published.transformer(dim=256, ffn_dim=512, num_layers=2)
I2V_SMALL = published.transformer(dim=256, ffn_dim=512, num_layers=2, in_channels=36, image_branch=True)
UMT5_SMALL = published.umt5(vocabulary=64, dim=32, attention_dim=32, ffn_dim=64, num_heads=4, num_layers=2)


def header_of(shapes: Mapping[str, tuple[int, ...]]) -> Header:
    return Header({name: TensorInfo("BF16", tuple(shape)) for name, shape in shapes.items()}, {}, "safetensors")


def words_of(tmp_path: Path, shapes: published.Shapes) -> str:
    return examine(published.write_sparse(tmp_path / "a.safetensors", shapes)).words


def refusal(path: Path, kind: str, flag: str, task: str | None = None) -> str:
    with pytest.raises(WangenError) as caught:
        expect(path, kind, flag, task)
    return str(caught.value)


def test_importing_it_needs_neither_torch_nor_numpy():
    code = (
        "import sys, wangen.generator.kinds as k, wangen.generator.experts; from pathlib import Path;"
        "k.examine(Path(sys.argv[1])); sys.exit(bool({'torch', 'numpy', 'safetensors'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(VAE21)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        (T2V, "wan-transformer-t2v", "a Wan text-to-video transformer (dim 256)"),
        (I2V, "wan-transformer-i2v", "a Wan 2.1 image-to-video transformer (dim 128)"),
        (I2V22, "wan-transformer-i2v-2.2", "a Wan 2.2 image-to-video transformer (dim 128)"),
        (TI2V, "wan-transformer-ti2v", "a Wan 2.2 text-and-image-to-video transformer (dim 128)"),
        (VAE21, "wan-vae-2.1", "a Wan 2.1 VAE"),
        (VAE22, "wan-vae-2.2", "a Wan 2.2 VAE"),
        (T5, "umt5-encoder", "a umT5 text encoder"),
        (CLIP, "open-clip", "a CLIP image encoder"),
        (LORA, "lora", "a LoRA for Wan"),
    ],
)
def test_files_are_identified_by_their_tensors(path: Path, kind: str, words: str):
    facts = examine(path)
    assert (facts.kind, facts.words) == (kind, words)
    assert kind == "lora" or facts.layout == "original"


def test_the_facts_of_a_small_file():
    facts = examine(T2V)
    assert facts.sizes == {
        "dim": 256, "in_channels": 16, "ffn_dim": 384, "num_layers": 2, "num_heads": 2, "out_channels": 16,
    }  # fmt: skip
    assert facts.profiles == ()
    assert facts.files == (T2V,)
    assert facts.num_bytes == T2V.stat().st_size
    assert facts.num_parameters * 2 == sum(facts.dtypes.values())
    assert examine(T5).sizes == {"dim": 64, "vocabulary": 512, "ffn_dim": 160, "num_layers": 3}
    assert examine(VAE22).sizes == {"dim": 6, "decoder_dim": 8, "latent_channels": 48}
    assert examine(CLIP).sizes == {"dim": 80, "patch": 14, "num_layers": 3}
    assert examine(LORA).metadata["ss_network_alpha"] == "2.0"


# ---- layouts -----------------------------------------------------------------------------------------------------


def diffusers_shapes(**config: object) -> published.Shapes:
    import torch
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(num_attention_heads=2, ffn_dim=512, num_layers=2, **config)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, "wan-transformer-t2v"),
        ({"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 256}, "wan-transformer-i2v"),
        (
            {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 256, "pos_embed_seq_len": 514},
            "wan-transformer-flf2v",
        ),
        ({"in_channels": 36}, "wan-transformer-i2v-2.2"),
        ({"in_channels": 48, "out_channels": 48}, "wan-transformer-ti2v"),
    ],
)
def test_transformers_in_diffusers_names(tmp_path: Path, config: dict[str, object], kind: str):
    facts = examine(published.write_sparse(tmp_path / "a.safetensors", diffusers_shapes(**config)))
    assert (facts.kind, facts.layout) == (kind, "diffusers")
    assert (facts.sizes["dim"], facts.sizes["ffn_dim"], facts.sizes["num_layers"]) == (256, 512, 2)


def test_vaes_in_diffusers_names(tmp_path: Path):
    import torch
    from diffusers import AutoencoderKLWan

    configs: dict[str, dict[str, object]] = {
        "wan-vae-2.1": {"base_dim": 8},
        "wan-vae-2.2": {"base_dim": 8, "z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12},
    }
    for kind, config in configs.items():
        with torch.device("meta"):
            model = AutoencoderKLWan(**config)
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        facts = examine(published.write_sparse(tmp_path / "a.safetensors", shapes))
        assert (facts.kind, facts.layout) == (kind, "diffusers")
        assert facts.sizes["latent_channels"] == (48 if kind == "wan-vae-2.2" else 16)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
@pytest.mark.parametrize("shapes", [T2V_SMALL, I2V_SMALL])
def test_prefixes_of_repacked_transformers(tmp_path: Path, shapes: published.Shapes, prefix: str):
    file = published.write_sparse(tmp_path / "a.safetensors", {prefix + name: shape for name, shape in shapes.items()})
    plain = examine(published.write_sparse(tmp_path / "b.safetensors", shapes))
    facts = examine(file)
    assert (facts.kind, facts.sizes, facts.num_parameters) == (plain.kind, plain.sizes, plain.num_parameters)


@pytest.mark.parametrize(
    ("shapes", "prefix", "kind"),
    [
        (published.vae21(8), "vae.", "wan-vae-2.1"),
        (published.vae21(8), "first_stage_model.", "wan-vae-2.1"),
        (published.vae22(6, 8), "vae.", "wan-vae-2.2"),
        (published.vae22(6, 8), "first_stage_model.", "wan-vae-2.2"),
        (UMT5_SMALL, "text_encoders.umt5xxl.transformer.", "umt5-encoder"),
        (UMT5_SMALL, "cond_stage_model.", "umt5-encoder"),
    ],
)
def test_prefixes_of_repacked_vaes_and_text_encoders(tmp_path: Path, shapes: published.Shapes, prefix: str, kind: str):
    file = published.write_sparse(tmp_path / "a.safetensors", {prefix + name: shape for name, shape in shapes.items()})
    plain = examine(published.write_sparse(tmp_path / "b.safetensors", shapes))
    facts = examine(file)
    assert facts.kind == plain.kind == kind
    assert (facts.layout, facts.sizes, facts.num_parameters) == ("original", plain.sizes, plain.num_parameters)
    assert facts.profiles == plain.profiles
    assert not facts.profiles, "its sizes are those of no published model"


HF_NAMES = {
    "token_embedding.weight": "shared.weight",
    "norm.weight": "encoder.final_layer_norm.weight",
    "norm1": "layer.0.layer_norm",
    "norm2": "layer.1.layer_norm",
    "attn.": "layer.0.SelfAttention.",
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
    "blocks.": "encoder.block.",
}
GGUF_NAMES = {
    "token_embedding.weight": "token_embd.weight",
    "norm.weight": "enc.output_norm.weight",
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
    "attn.": "attn_",
    "pos_embedding.embedding": "attn_rel_b",
    "ffn.gate.0": "ffn_gate",
    "ffn.fc1": "ffn_up",
    "ffn.fc2": "ffn_down",
    "blocks.": "enc.blk.",
}


def renamed(shapes: published.Shapes, names: Mapping[str, str]) -> published.Shapes:
    result = {}
    for name, shape in shapes.items():
        new = names.get(name, name)
        if new == name:
            for old, part in names.items():
                new = new.replace(old, part)
        result[new] = shape
    return result


@pytest.mark.parametrize(("layout", "names"), [("huggingface", HF_NAMES), ("gguf", GGUF_NAMES)])
def test_text_encoders_in_other_names(tmp_path: Path, layout: str, names: Mapping[str, str]):
    shapes = renamed(UMT5_SMALL, names)
    facts = examine(published.write_sparse(tmp_path / "a.safetensors", shapes))
    assert (facts.kind, facts.layout) == ("umt5-encoder", layout)
    assert facts.sizes == {"dim": 32, "vocabulary": 64, "ffn_dim": 64, "num_layers": 2}
    bare = {name.removeprefix("encoder."): shape for name, shape in shapes.items()}
    assert kind_of(header_of(bare)) == "umt5-encoder"
    one_bias = {name: shape for name, shape in shapes.items() if not ("1." in name and shape == (32, 4))}
    assert len(one_bias) == len(shapes) - 1
    assert "not umT5 (its layers share one position bias)" in words_of(tmp_path, one_bias)


def test_image_encoders_in_the_names_of_transformers(tmp_path: Path):
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModel

    for width, kind in ((80, "open-clip"), (1024, "other")):
        config = CLIPVisionConfig(hidden_size=width, num_hidden_layers=2, num_attention_heads=4, patch_size=14)
        with torch.device("meta"):
            model = CLIPVisionModel(config)
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        shapes = {name.removeprefix("vision_model."): shape for name, shape in shapes.items()}
        for prefix in ("", "vision_model."):
            named = {prefix + name: shape for name, shape in shapes.items()} | {"visual_projection.weight": (8, width)}
            facts = examine(published.write_sparse(tmp_path / "a.safetensors", named))
            assert facts.kind == kind
            if kind == "other":
                assert "ViT-L" in facts.words
            else:
                assert (facts.layout, facts.sizes["num_layers"]) == ("huggingface", 2)


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
        (["lora_unet_blocks_0_self_attn_q_proj.lora_up.weight"], "a LoRA for another model than Wan"),
        (["lora_unet_blocks_0_self_attn_q.hada_w1_a"], "a LoHa"),
        (["diffusion_model.blocks.0.ffn.0.lokr_w1"], "a LoKr"),
        (["diffusion_model.blocks.0.ffn.0.lora_A.weight", "diffusion_model.blocks.0.ffn.0.dora_scale"], "a DoRA"),
    ],
)  # fmt: skip
def test_other_models_are_named(tmp_path: Path, names: list[str], words: str):
    assert words in words_of(tmp_path, dict.fromkeys(names, (2, 2)))


@pytest.mark.parametrize(
    "name",
    [
        "lora_unet_blocks_0_self_attn_q.lora_down.weight",
        "lora_unet_blocks_12_cross_attn_k_img.lora_down.weight",
        "lora_unet_blocks_0_ffn_0.lora_up.weight",
        "diffusion_model.blocks.0.cross_attn.o.lora_A.weight",
        "transformer.blocks.0.attn1.to_out.0.lora_A.weight",
        "base_model.model.blocks.3.ffn.net.0.proj.lora_B.default.weight",
        "blocks.0.attn2.add_k_proj.lora_A.weight",
    ],
)
def test_loras_of_every_trainer_are_loras(name: str):
    assert kind_of(header_of({name: (4, 4)})) == "lora"


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


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 0, 0, 0, 0), (2**20, 2**20, 2**20)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.family} {layout.name}")
def test_absurd_shapes_are_judged_without_a_crash(layout: Layout, shape: tuple[int, ...]):
    named = dict.fromkeys([*layout.marks, *(name for name, _ in layout.sizes.values())], shape)
    assert kind_of(header_of(named)) in KINDS
    assert kind_of(header_of(dict.fromkeys(layout.marks, shape))) in KINDS


def test_every_kind_has_words():
    assert all(describe(kind).startswith(("a ", "an ", "another ", "weights ")) for kind in KINDS)


# ---- quantisation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"blocks.0.ffn.0.weight": ("F8_E4M3", (4, 4))}, "fp8_e4m3"),
        ({"blocks.0.ffn.0.weight": ("F8_E4M3", (4, 4)), "blocks.0.ffn.0.scale_weight": ("F32", ())}, "fp8_scaled"),
        ({"blocks.0.ffn.0.weight": ("F8_E4M3", (4, 4)), "blocks.0.ffn.0.weight_scale": ("F32", (4, 1))}, "fp8_scaled"),
        ({"a.weight": ("BF16", (8, 8)), "b.weight": ("F8_E4M3", (4, 4))}, ""),
    ],
)
def test_quantisation_is_that_of_most_weights(
    tmp_path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], expected: str
):
    facts = examine(published.write_sparse_mixed(tmp_path / "a.safetensors", tensors))
    assert facts.quantisation == expected
    assert facts.num_parameters == (16 if len(facts.dtypes) == 1 else 80)


def test_quantisation_of_gguf(tmp_path: Path):
    import gguf
    import numpy

    types = gguf.GGMLQuantizationType
    for kind, expected in ((types.Q8_0, "Q8_0 GGUF"), (types.F16, "")):
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "wan")
        for name, shape in T2V_SMALL.items():
            if len(shape) == 2 and kind == types.Q8_0:
                writer.add_tensor(name, gguf.quantize(numpy.zeros(shape, numpy.float32), kind), raw_dtype=kind)
            elif len(shape) == 5:  # as ComfyUI-GGUF writes what has more axes than the format knows
                writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
                writer.add_tensor(name, numpy.zeros((shape[0], 64), numpy.float16))
            else:
                writer.add_tensor(name, numpy.zeros(shape, numpy.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        facts = examine(tmp_path / "a.gguf")
        assert (facts.kind, facts.format, facts.layout) == ("wan-transformer-t2v", "gguf", "original")
        assert (facts.quantisation, facts.num_parameters) == (expected, published.num_elements(T2V_SMALL))


def test_a_marker_is_no_weight(tmp_path: Path):
    shapes = published.transformer(dim=256, ffn_dim=512, num_layers=1, in_channels=36, image_branch=True, num_images=2)
    facts = examine(published.write_sparse(tmp_path / "a.safetensors", shapes | {"model_type.Wan2_1-FLF2V-14B": (1,)}))
    assert facts.kind == "wan-transformer-flf2v"
    assert facts.num_parameters == published.num_elements(shapes)


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


def test_names_are_hints(tmp_path: Path):
    hints = {
        "Wan2.2-T2V-A14B-HighNoise-Q4_K_M.safetensors": "its name says high-noise expert",
        "wan2.2_t2v_low_noise_14B_fp16.safetensors": "its name says low-noise expert",
        "Wan2_2-T2V-A14B-LOW_bf16.safetensors": "its name says low-noise expert",
        "wan2.2_t2v_HIGH.safetensors": "its name says high-noise expert",
        "HighNoise/model.safetensors": "its name says high-noise expert",
        "Wan2.2-T2V-A14B-high/model.safetensors": "its name says high-noise expert",
        "lowvram_highlights.safetensors": "",
        "low_vram/wan2.1_t2v_14B.safetensors": "",
        "high/wan2.1_t2v_14B.safetensors": "",
        "wan2.1_t2v_14B_low_step.safetensors": "",
        "wan2.2_low_vram.safetensors": "",
        "wan2.2_lowvram_high_noise.safetensors": "its name says high-noise expert",
    }
    for name, hint in hints.items():
        assert examine(published.write_sparse(tmp_path / name, T2V_SMALL)).hint == hint, name
    assert "Qwen-Image" in examine(Path(shutil.copy(VAE21, tmp_path / "qwen_image_vae.pth"))).hint


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
    assert not seem_swapped(low, tmp_path / "a.safetensors")
