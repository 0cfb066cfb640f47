"""The real models without their weights: identified by their tensors, and loaded strictly on the meta device."""

import json
import math
from pathlib import Path

import published
import pytest

from wangen import profiles
from wangen.generator.headers import read_header
from wangen.generator.kinds import examine, expect

VECTORS = Path(__file__).parent / "vectors"

# task -> kind, every profile that its shapes fit, billions of parameters
TRANSFORMERS = {
    "t2v-1.3B": ("wan-transformer-t2v", ("t2v-1.3B",), 1.42),
    "t2v-14B": ("wan-transformer-t2v", ("t2v-14B", "t2v-A14B"), 14.29),
    "i2v-14B": ("wan-transformer-i2v", ("i2v-14B",), 16.39),
    "flf2v-14B": ("wan-transformer-flf2v", ("flf2v-14B",), 16.40),
    "t2v-A14B": ("wan-transformer-t2v", ("t2v-14B", "t2v-A14B"), 14.29),
    "i2v-A14B": ("wan-transformer-i2v-2.2", ("i2v-A14B",), 14.29),
    "ti2v-5B": ("wan-transformer-ti2v", ("ti2v-5B",), 5.0),
}


@pytest.mark.parametrize(
    ("shapes", "file"),
    [
        (
            published.transformer(dim=256, ffn_dim=384, num_layers=2),
            "dit_t2v21/model.safetensors",
        ),
        (
            published.transformer(dim=128, ffn_dim=256, num_layers=2, in_channels=36, image_branch=True),
            "dit_i2v21/model.safetensors",
        ),
        (
            published.transformer(dim=128, ffn_dim=256, num_layers=2, in_channels=36),
            "dit_i2v22_a14b/model.safetensors",
        ),
        (
            published.transformer(dim=128, ffn_dim=256, num_layers=2, in_channels=48, out_channels=48),
            "dit_ti2v5b/model.safetensors",
        ),
        (published.vae21(8), "vae21/Wan2.1_VAE.pth"),
        (published.vae22(6, 8), "vae22/Wan2.2_VAE.pth"),
        (
            published.umt5(vocabulary=512, dim=64, attention_dim=96, ffn_dim=160, num_heads=6, num_layers=3),
            "t5/models_t5_umt5-xxl-enc-bf16.pth",
        ),
        (
            published.clip_visual(dim=80, num_layers=3, out_dim=48, image_px=56)
            | published.clip_textual(vocabulary=64, num_positions=18, dim=32, num_layers=1, out_dim=48),
            "clip/models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
        ),
    ],
)
def test_the_lists_are_those_of_the_official_code(shapes: published.Shapes, file: str):
    header = read_header(VECTORS / file)
    assert {name: info.shape for name, info in header.tensors.items()} == shapes


@pytest.mark.parametrize("task", TRANSFORMERS)
def test_a_real_transformer_is_identified(tmp_path: Path, task: str):
    kind, fitting, billions = TRANSFORMERS[task]
    path = published.write_sparse(tmp_path / "a.safetensors", published.TRANSFORMERS[task])
    facts = examine(path)
    assert (facts.kind, facts.profiles, facts.layout) == (kind, fitting, "original")
    assert facts.num_parameters / 1e9 == pytest.approx(billions, abs=0.005)
    assert facts.num_bytes == path.stat().st_size > facts.num_parameters * 2
    assert (facts.dtypes, facts.quantisation) == ({"BF16": 2 * facts.num_parameters}, "")
    assert vars(profiles.model(task).transformer).items() <= facts.sizes.items()
    assert expect(path, profiles.model(task).kind_of("dit"), "--dit", task).tensors.keys()


@pytest.mark.parametrize(
    ("shapes", "kind", "num_parameters"),
    [
        (published.vae21(), "wan-vae-2.1", 126_892_531),
        (published.vae22(), "wan-vae-2.2", 704_688_668),
        (published.umt5(), "umt5-encoder", 5_680_910_336),
        (published.clip_visual() | published.clip_textual(), "open-clip", 1_193_014_785),
        (published.clip_visual(), "open-clip", 632_076_800),
    ],
)
def test_the_other_real_models_are_identified(tmp_path: Path, shapes: published.Shapes, kind: str, num_parameters: int):
    facts = examine(published.write_sparse(tmp_path / "a.safetensors", shapes, "F16"))
    assert (facts.kind, facts.num_parameters) == (kind, num_parameters)
    tasks = [name for name in profiles.model_names() if kind in {w.kind for w in profiles.model(name).weights}]
    assert facts.profiles == tuple(tasks) != ()


def test_shards_and_folders_of_real_size(tmp_path: Path):
    shapes = published.TRANSFORMERS["t2v-A14B"]
    folder = published.write_sparse_shards(tmp_path / "low_noise_model", shapes, 6, dtype="F32")
    facts = examine(folder)
    assert len(facts.files) == 6
    assert facts.num_parameters == published.num_elements(shapes)
    assert facts.num_bytes > 57e9
    assert facts.hint == "its name says low-noise expert"
    for path in (facts.files[3], folder / "diffusion_pytorch_model.safetensors.index.json"):
        assert examine(path) == facts


def test_fp8_scaled_of_real_size(tmp_path: Path):
    shapes = published.TRANSFORMERS["t2v-14B"]
    path = published.write_sparse_mixed(tmp_path / "a.safetensors", published.fp8_scaled(shapes))
    facts = examine(path)
    assert (facts.kind, facts.quantisation, facts.profiles) == (
        "wan-transformer-t2v", "fp8_scaled", ("t2v-14B", "t2v-A14B"),
    )  # fmt: skip
    assert facts.num_parameters == published.num_elements(shapes)
    assert list(facts.dtypes) == ["F8_E4M3", "F16"]


# ---- loading -----------------------------------------------------------------------------------------------------


def num_parameters(module: object) -> int:
    return sum(parameter.numel() for parameter in module.parameters())  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("task", TRANSFORMERS)
def test_a_real_transformer_loads_strictly(tmp_path: Path, task: str):
    from wangen.runtime.weights.transformer import load_transformer

    shapes = published.TRANSFORMERS[task]
    model = load_transformer(published.write_sparse(tmp_path / "a.safetensors", shapes), device="meta")
    assert num_parameters(model) == published.num_elements(shapes)
    sizes = profiles.model(task).transformer
    assert (model.config.num_layers, model.config.ffn_dim) == (sizes.num_layers, sizes.ffn_dim)
    assert (model.config.in_channels, model.config.out_channels) == (sizes.in_channels, sizes.out_channels)


def test_a_tensor_too_few_or_too_many_is_seen(tmp_path: Path):
    from wangen.generator.errors import WangenError
    from wangen.runtime.weights.transformer import load_transformer

    shapes = published.TRANSFORMERS["ti2v-5B"]
    less = {name: shape for name, shape in shapes.items() if name != "blocks.29.ffn.2.bias"}
    with pytest.raises(WangenError, match=r"1 missing \(blocks.29.ffn.net.2.bias\)"):
        load_transformer(published.write_sparse(tmp_path / "less.safetensors", less), device="meta")
    more = shapes | {"blocks.29.extra.weight": (2, 2)}
    with pytest.raises(WangenError, match="1 unexpected"):
        load_transformer(published.write_sparse(tmp_path / "more.safetensors", more), device="meta")


@pytest.mark.parametrize("shapes", [published.vae21(), published.vae22()])
def test_the_real_vaes_load_strictly(tmp_path: Path, shapes: published.Shapes):
    from wangen.runtime.weights.vae import load_vae

    model = load_vae(published.write_sparse(tmp_path / "a.safetensors", shapes, "F32"), device="meta")
    assert num_parameters(model) == published.num_elements(shapes)


def test_the_real_text_encoder_loads_strictly(tmp_path: Path):
    from wangen.runtime.weights.text_encoder import load_text_encoder

    shapes = published.umt5()
    model = load_text_encoder(published.write_sparse(tmp_path / "a.safetensors", shapes), device="meta")
    assert num_parameters(model) == published.num_elements(shapes)


def test_the_real_image_encoder_loads_strictly_and_leaves_the_text_half_out(tmp_path: Path):
    from wangen.runtime.weights.image_encoder import load_image_encoder

    visual = published.clip_visual()
    path = published.write_sparse(tmp_path / "a.safetensors", visual | published.clip_textual(), "F16")
    model = load_image_encoder(path, device="meta")
    assert num_parameters(model) == published.num_elements(visual) - math.prod(visual["visual.head"])


def without(prefix: str, shapes: published.Shapes) -> published.Shapes:
    return {name.removeprefix(prefix): shape for name, shape in shapes.items()}


def test_encoders_are_identified_and_loaded_with_and_without_their_prefix(tmp_path: Path):
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

    from wangen.runtime.weights.image_encoder import load_image_encoder
    from wangen.runtime.weights.text_encoder import load_text_encoder

    sizes = {"hidden_size": 80, "intermediate_size": 320, "image_size": 56, "patch_size": 14}
    heads = {"num_layers": 2, "num_heads": 4, "d_kv": 8}
    with torch.device("meta"):
        t5 = UMT5EncoderModel(UMT5Config(**heads, vocab_size=64, d_model=32, d_ff=64, feed_forward_proj="gated-gelu"))
        clip = CLIPVisionModel(CLIPVisionConfig(num_hidden_layers=2, num_attention_heads=4, **sizes))
    names = {name: tuple(value.shape) for name, value in t5.named_parameters()}
    vision = without("vision_model.", {name: tuple(value.shape) for name, value in clip.named_parameters()})
    visual = published.clip_visual(dim=80, num_layers=2, out_dim=48, image_px=56)
    stack = without("encoder.", names)
    alone = {name.replace("shared", "embed_tokens"): shape for name, shape in stack.items()}
    for shapes in (names, stack, alone):
        path = published.write_sparse(tmp_path / "a.safetensors", shapes)
        assert examine(path).kind == "umt5-encoder"
        assert num_parameters(load_text_encoder(path, device="meta")) == num_parameters(t5)
    prefixed = {f"vision_model.{name}": shape for name, shape in vision.items()}
    for shapes in (visual, without("visual.", visual), vision, prefixed):
        path = published.write_sparse(tmp_path / "a.safetensors", shapes)
        assert examine(path).kind == "open-clip"
        model = load_image_encoder(path, device="meta", num_heads=4)
        assert num_parameters(model) == published.num_elements(visual) - 80 * 48


@pytest.mark.slow
def test_shards_fp8_and_a_diffusers_folder_load_strictly(tmp_path: Path):
    import torch
    from diffusers import WanTransformer3DModel

    from wangen.runtime.weights.transformer import load_transformer

    shapes = published.TRANSFORMERS["ti2v-5B"]
    paths = [
        published.write_sparse_shards(tmp_path / "Wan2.2-TI2V-5B", shapes, 3, dtype="F32"),
        published.write_sparse_mixed(tmp_path / "fp8.safetensors", published.fp8_scaled(shapes)),
    ]
    with torch.device("meta"):  # the configuration that Wan-AI/Wan2.2-TI2V-5B-Diffusers publishes
        model = WanTransformer3DModel(
            num_attention_heads=24, in_channels=48, out_channels=48, ffn_dim=14336, num_layers=30
        )
    named = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    pipeline = tmp_path / "Wan2.2-TI2V-5B-Diffusers"
    paths.append(published.write_sparse_shards(pipeline / "transformer", named, 3))
    (pipeline / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    for path in (*paths, pipeline):
        assert num_parameters(load_transformer(path, device="meta")) == published.num_elements(shapes), path
    assert examine(pipeline, "--dit").layout == "diffusers"
    assert examine(pipeline, "--dit").profiles == ("ti2v-5B",)


CONFIGURATIONS = {
    "t2v-14B": {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824, "in_channels": 16, "image_dim": None},
    "i2v-14B": {"in_channels": 36, "out_channels": 16, "image_dim": 1280, "added_kv_proj_dim": 5120,
                "pos_embed_seq_len": None},
    "flf2v-14B": {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120, "pos_embed_seq_len": 514},
    "i2v-A14B": {"in_channels": 36, "image_dim": None, "added_kv_proj_dim": None},
    "ti2v-5B": {"num_attention_heads": 24, "num_layers": 30, "in_channels": 48, "out_channels": 48, "text_dim": 4096},
    "qwen-image-edit": {"num_attention_heads": 24, "num_layers": 60, "in_channels": 64, "out_channels": 16,
                        "joint_attention_dim": 3584, "axes_dims_rope": [16, 56, 56], "zero_cond_t": False},
}  # fmt: skip
"""What the configurations of the models for diffusers differ in."""


@pytest.mark.slow
@pytest.mark.parametrize("task", CONFIGURATIONS)
def test_the_names_of_a_real_transformer_go_to_diffusers_and_back(tmp_path: Path, task: str):
    import diffusers
    import torch

    from wangen.generator.companions import sort_out
    from wangen.runtime.transformer_layout import KNOWN, in_layout

    def form_of(shapes: published.Shapes, layout, out: str):
        path = published.write_sparse(tmp_path / f"{layout}.safetensors", shapes)
        header = expect(path, KNOWN, "--dit")
        return in_layout(path, header, sort_out(header), layout, tmp_path / out, None)

    def shapes_of(form) -> published.Shapes:
        return {name: info.shape for name, info in form.header.tensors.items()}

    there = form_of(published.TRANSFORMERS[task], "diffusers", "transformer")
    config = json.loads(there.config)
    assert CONFIGURATIONS[task].items() <= config.items()
    with torch.device("meta"):
        model = getattr(diffusers, config["_class_name"]).from_config(config)
    assert shapes_of(there) == {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert shapes_of(form_of(shapes_of(there), "original", "back.safetensors")) == published.TRANSFORMERS[task]
