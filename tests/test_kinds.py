"""What a file is, told by its tensors: kind, layout, sizes, quantisation; and what its name hints at."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import published
import pytest
from parity import CLIP, T5, VAE21, VAE22
from weight_files import I2V, I2V22, I2V_SMALL, LORA, T2V, T2V_SMALL, TI2V, UMT5_SMALL, header_of, words_of

from wangen.generator.kinds import KINDS, describe, examine, kind_of
from wangen.generator.layouts import LAYOUTS, Layout


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


# ---- every kind --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "lora_unet_blocks_0_self_attn_q.lora_down.weight",
        "lora_unet_blocks_12_cross_attn_k_img.lora_down.weight",
        "lora_unet_blocks_0_ffn_0.lora_up.weight",
        "lycoris_blocks_0_attn1_to_q.lora_up.weight",
        "lycoris_transformer_blocks_0_attn_to_q.lora_up.weight",
        "lora_transformer_transformer_blocks_0_img_mod_1.lora_up.weight",
        "diffusion_model.blocks.0.cross_attn.o.lora_A.weight",
        "transformer.blocks.0.attn1.to_out.0.lora_A.weight",
        "base_model.model.blocks.3.ffn.net.0.proj.lora_B.default.weight",
        "blocks.0.attn2.add_k_proj.lora_A.weight",
    ],
)
def test_loras_of_every_trainer_are_loras(name: str):
    assert kind_of(header_of({name: (4, 4)})) == "lora"


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


# ---- names of files ----------------------------------------------------------------------------------------------


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
