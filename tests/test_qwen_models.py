"""Qwen-Image's models: weights of every layout in, latents and steps as in diffusers' pipelines; tiny random ones."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from safetensors.torch import load_file, save_file
from tiny_qwen import TinyQwen, make_transformer, picture, pipeline_of
from tokenizers import Tokenizer

from wangen import profiles
from wangen.generator.cli import main
from wangen.generator.errors import WangenError
from wangen.generator.headers import identity
from wangen.generator.kinds import examine
from wangen.runtime.models import family
from wangen.runtime.models.qwen_image_edit.text_encoder import load_text_encoder, load_tokenizer
from wangen.runtime.models.qwen_image_edit.transformer import load_transformer

QWEN = family(profiles.model("qwen-image-edit"))
CPU = torch.device("cpu")


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.float() for name, value in module.state_dict().items()}


def assert_same(found: torch.nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    own = state(found)
    assert own.keys() == wanted.keys()
    assert all(torch.equal(own[name], wanted[name].float()) for name in own)


# ---- weights -----------------------------------------------------------------------------------------------------


def test_files_are_told_by_their_tensors(tiny_qwen: TinyQwen):
    words = {"dit": "a Qwen-Image transformer (dim 256)", "vae": "a Wan 2.1 VAE", "t5": "a Qwen2.5-VL text encoder"}
    for flag, wanted in words.items():
        assert examine(tiny_qwen.folder, f"--{flag}").words == wanted
        assert examine(tiny_qwen.single[flag], f"--{flag}").words == wanted
    facts = examine(tiny_qwen.single["dit"])
    assert (facts.sizes["num_layers"], facts.sizes["num_heads"], facts.sizes["in_channels"]) == (2, 2, 16)


def test_the_folder_and_comfyuis_file_give_the_library_s_transformer(tiny_qwen: TinyQwen):
    wanted = make_transformer()
    for path in (tiny_qwen.folder, tiny_qwen.folder / "transformer", tiny_qwen.single["dit"]):
        found = load_transformer(path)
        assert_same(found, state(wanted))
        own, theirs = (
            {name: config[name] for name in config if name[0] != "_"} for config in (found.config, wanted.config)
        )
        assert own == theirs
        assert not any(parameter.requires_grad for parameter in found.parameters())


def test_an_fp8_file_keeps_its_weights_in_8_bits_and_computes_with_them(tiny_qwen: TinyQwen, tmp_path: Path):
    tensors = load_file(tiny_qwen.single["dit"])
    small = {name: value.to(torch.float8_e4m3fn) if value.dim() == 2 else value for name, value in tensors.items()}
    save_file(small, tmp_path / "qwen_image_edit_fp8_e4m3fn.safetensors")
    found = load_transformer(tmp_path / "qwen_image_edit_fp8_e4m3fn.safetensors", dtype=torch.float32)
    plain = make_transformer()
    rounded = {name: value.to(torch.float8_e4m3fn).float() if value.dim() == 2 else value
               for name, value in plain.state_dict().items()}  # fmt: skip
    plain.load_state_dict(rounded)
    latents, text = torch.randn(1, 16, 1, 4, 6), torch.randn(5, 256)
    with torch.no_grad():
        ours, theirs = (
            QWEN.predict_velocity(model, latents, torch.tensor([300.0]), [text]) for model in (found, plain)
        )
    assert torch.allclose(ours, theirs, atol=1e-5)
    held = sum(value.numel() * value.element_size() for value in [*found.parameters(), *found.buffers()])
    assert held < 0.5 * sum(value.numel() * value.element_size() for value in plain.parameters())


@pytest.mark.parametrize("told", ["marker", "config"])
def test_edit_2511_is_told_by_comfyuis_marker_or_the_configuration(tiny_qwen: TinyQwen, tmp_path: Path, told: str):
    wanted = make_transformer(zero_cond_t=True)
    if told == "config":
        wanted.save_pretrained(tmp_path)
        path = tmp_path
    else:
        path = tmp_path / "qwen_image_edit_2511_bf16.safetensors"
        marker = {"model.diffusion_model.__index_timestep_zero__": torch.tensor([])}
        save_file(load_file(tiny_qwen.single["dit"]) | marker, path)
    found = load_transformer(path)
    assert found.config.zero_cond_t
    assert not load_transformer(tiny_qwen.single["dit"]).config.zero_cond_t
    latents, text, control = torch.randn(1, 16, 1, 4, 6), torch.randn(5, 256), torch.randn(16, 1, 4, 4)
    with torch.no_grad():
        ours, theirs = (QWEN.predict_velocity(model, latents, torch.tensor([700.0]), [text], controls=[[control]])
                        for model in (found, wanted))  # fmt: skip
    assert torch.equal(ours, theirs)


def test_a_2511_by_its_name_alone_is_told(tiny_qwen: TinyQwen, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "qwen_image_edit_2511_Q8.safetensors"  # as some conversions are, whose marker got lost
    shutil.copy(tiny_qwen.single["dit"], path)
    with caplog.at_level(logging.WARNING):
        assert not load_transformer(path).config.zero_cond_t
    assert "its name says 2511" in caplog.text
    caplog.clear()
    (tmp_path / "config.json").write_text('{"zero_cond_t": true}', encoding="utf-8")  # what the warning asks for
    assert load_transformer(path).config.zero_cond_t
    assert not load_transformer(tiny_qwen.single["dit"]).config.zero_cond_t
    assert not caplog.records


def test_a_configuration_that_makes_a_2511_of_weights_makes_other_weights_of_them(tmp_path: Path):
    """So that a run does not go on, and no result is taken for its own, when it is put beside them."""
    plain, marked = tmp_path / "plain.safetensors", tmp_path / "marked.safetensors"
    weights = {name: value.contiguous() for name, value in make_transformer(size=1).state_dict().items()}
    save_file(weights, plain)
    save_file(weights | {"__index_timestep_zero__": torch.zeros(0)}, marked)
    before = {path: identity(path, "--dit") for path in (plain, marked)}
    (tmp_path / "config.json").write_text('{"zero_cond_t": false}', encoding="utf-8")
    assert {path: identity(path, "--dit") for path in (plain, marked)} == before
    (tmp_path / "config.json").write_text('{"zero_cond_t": true}', encoding="utf-8")
    assert identity(plain, "--dit") not in before.values()
    assert identity(marked, "--dit") == before[marked]  # it was one already
    assert identity(plain, "--vae") == before[plain]


def test_a_2511_that_is_merged_from_a_folder_stays_one(tmp_path: Path):
    make_transformer(zero_cond_t=True).save_pretrained(tmp_path / "transformer")
    name = "transformer_blocks.0.attn.to_q"
    low_rank = {"lora_A": torch.ones(1, 256), "lora_B": torch.ones(256, 1)}
    save_file(
        {f"diffusion_model.{name}.{part}.weight": value for part, value in low_rank.items()}, tmp_path / "l.safetensors"
    )
    lora, merged = str(tmp_path / "l.safetensors"), tmp_path / "merged.safetensors"
    assert (
        main(["export", "--dit", str(tmp_path / "transformer"), "--lora_weight", lora, "--save_path", str(merged)]) == 0
    )
    assert load_transformer(merged).config.zero_cond_t


def test_both_names_of_the_text_encoder_and_its_sizes(tiny_qwen: TinyQwen):
    from transformers import Qwen2_5_VLForConditionalGeneration

    wanted = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_qwen.folder / "text_encoder").model
    for path in (tiny_qwen.folder, tiny_qwen.single["t5"]):
        assert_same(load_text_encoder(path), state(wanted))


def test_a_scaled_fp8_text_encoder_stays_small_and_stands_for_its_numbers(tiny_qwen: TinyQwen, tmp_path: Path):
    tensors, wanted = load_file(tiny_qwen.single["t5"]), {}
    stored = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, value in tensors.items():
        stored[name] = wanted[name] = value
        if value.dim() == 2 and ".layers." in name:
            scale = value.abs().max() / 448
            stored[name] = (value / scale).to(torch.float8_e4m3fn)
            stored[name.replace(".weight", ".scale_weight")] = scale
            wanted[name] = stored[name].float() * scale
    for folder, content in (("scaled", stored), ("plain", wanted)):
        (tmp_path / folder).mkdir()
        save_file(content, tmp_path / folder / "qwen_2.5_vl_7b_fp8_scaled.safetensors")
    found, plain = (load_text_encoder(tmp_path / folder, dtype=torch.float32) for folder in ("scaled", "plain"))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours, theirs = (model(input_ids=ids).last_hidden_state for model in (found, plain))
    assert torch.allclose(ours, theirs, atol=1e-4)
    layer = found.language_model.layers[0].mlp.up_proj
    assert sum(value.numel() * value.element_size() for value in [*layer.parameters(), *layer.buffers()]) < 20_000
    in_8_bits = load_text_encoder(tiny_qwen.single["t5"], dtype=torch.float32, fp8=True)
    with torch.no_grad():
        near = in_8_bits(input_ids=ids).last_hidden_state
    whole = load_text_encoder(tiny_qwen.single["t5"])(input_ids=ids).last_hidden_state
    assert 0 < (near - whole).abs().mean() < 0.1 * whole.abs().mean()


def test_another_model_and_missing_tensors_are_refused(tiny_qwen: TinyQwen, tmp_path: Path):
    with pytest.raises(WangenError, match=r"this is a Qwen2\.5-VL text encoder; --dit takes a Qwen-Image transformer"):
        load_transformer(tiny_qwen.single["t5"])
    with pytest.raises(WangenError, match=r"takes a Qwen2\.5-VL text encoder"):
        load_text_encoder(tiny_qwen.single["dit"])
    tensors = load_file(tiny_qwen.single["dit"])
    del tensors["model.diffusion_model.transformer_blocks.1.attn.to_q.weight"]
    save_file(tensors, tmp_path / "part.safetensors")
    with pytest.raises(WangenError, match=r"1 missing \(transformer_blocks\.1\.attn\.to_q\.weight\)"):
        load_transformer(tmp_path / "part.safetensors")


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}', encoding="utf-8")
    with pytest.raises(WangenError, match=r"not Qwen2\.5-VL's tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


# ---- latents -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("single", [False, True])
def test_latents_are_those_of_the_pipeline_and_go_back_through_its_decoder(tiny_qwen, single: bool, plain: bool):
    pipeline = pipeline_of("qwen-image-edit", tiny_qwen)
    image = VaeImageProcessor(vae_scale_factor=16).preprocess(picture((96, 64)), 64, 96).unsqueeze(2)
    encoder = QWEN.load_latent_encoder(
        tiny_qwen.weights(single=single)["vae"], dtype=torch.float32, device=CPU, plain=plain
    )
    with torch.no_grad():
        theirs = pipeline._encode_vae_image(image, generator=None)
        ours = encoder.encode(image)
        assert torch.allclose(ours, theirs, atol=1e-5)
        mean, std = (torch.tensor(pipeline.vae.config[name]).view(1, 16, 1, 1, 1) for name in
                     ("latents_mean", "latents_std"))  # fmt: skip
        decoded = pipeline.vae.decode(theirs * std + mean, return_dict=False)[0].clamp(-1, 1)
    vae = QWEN.load_vae(tiny_qwen.weights(single=single)["vae"])
    assert torch.allclose(QWEN.decode_latents(vae, ours), decoded, atol=1e-4)


# ---- the transformer ---------------------------------------------------------------------------------------------


def test_one_step_is_the_pipeline_s_whatever_else_is_in_the_batch(tiny_qwen: TinyQwen):
    """Items with control images and texts of other sizes beside them are computed as if alone."""
    pipeline = pipeline_of("qwen-image-edit-plus", tiny_qwen)
    model = load_transformer(tiny_qwen.single["dit"])
    draw = torch.Generator().manual_seed(4)
    controls = [[torch.randn(16, 1, *size, generator=draw) for size in sizes]
                for sizes in ([(4, 6)], [(8, 4), (6, 6)], [(4, 6)], [])]  # fmt: skip
    texts = [torch.randn(length, 256, generator=draw) for length in (5, 9, 5, 3)]
    latents, times = torch.randn(4, 16, 1, 6, 4, generator=draw), torch.tensor([100.0, 500.0, 900.0, 250.0])
    with torch.no_grad():
        ours = QWEN.predict_velocity(model, latents, times, texts, controls=controls)
        for row in range(4):
            target = pipeline._pack_latents(latents[row : row + 1, :, 0], 1, 16, 6, 4)
            given = [pipeline._pack_latents(one[None, :, 0], 1, 16, *one.shape[2:]) for one in controls[row]]
            shapes = [(1, 3, 2), *((1, one.shape[2] // 2, one.shape[3] // 2) for one in controls[row])]
            tokens = pipeline.transformer(
                hidden_states=torch.cat([target, *given], dim=1), timestep=times[row : row + 1] / 1000,
                encoder_hidden_states=texts[row][None], img_shapes=[shapes], return_dict=False,
            )[0][:, : target.shape[1]]  # fmt: skip
            theirs = pipeline._unpack_latents(tokens, 48, 32, 8)
            assert torch.allclose(ours[row], theirs[0], atol=2e-6)


def test_the_tokenizer_stands_where_it_is_looked_for(tiny_qwen: TinyQwen):
    from wangen.generator.tokenizer_file import tokenizer_of

    model = profiles.model("qwen-image-edit")
    for weights in (tiny_qwen.folder / "text_encoder", tiny_qwen.single["t5"]):
        assert isinstance(load_tokenizer(tokenizer_of(weights, None, model)), Tokenizer)
    with pytest.raises(WangenError, match=r"no tokenizer here; looked for processor/tokenizer\.json") as caught:
        tokenizer_of(tiny_qwen.folder.parent.parent / "t5.safetensors", None, model)
    assert "wangen models download tokenizer --task qwen-image-edit;" in str(caught.value)  # without, it is umT5's
