import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from fake_gpu import GPU, fake_gpu
from PIL import Image
from safetensors.torch import load_file

from wangen.generator.errors import WangenError
from wangen.runtime import safetensors_file
from wangen.runtime.models.wan_vae import decode_latents, encode_video
from wangen.runtime.weights.vae import load_vae
from wangen.runtime.weights.vae_names import vae_config, vae_names

VECTORS = Path(__file__).parent / "vectors"
FILES = {"2.1": VECTORS / "vae21" / "Wan2.1_VAE.pth", "2.2": VECTORS / "vae22" / "Wan2.2_VAE.pth"}
PHOTO = Path(__file__).parent.parent / "examples" / "dataset" / "coffee.jpg"
STRIDES = {"2.1": 8, "2.2": 16}
both = pytest.mark.parametrize("version", FILES)


@cache
def load(version: str) -> AutoencoderKLWan:
    return load_vae(FILES[version])


@cache
def golden(version: str) -> dict[str, torch.Tensor]:
    return load_file(FILES[version].with_name("golden.safetensors"))


def case(version: str, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bytes of a video, its normalised latents, latents to decode and their video, each as a batch of one."""
    tensors = golden(version)
    latents = tensors[f"case{number}.latents_normalized"]
    to_decode = tensors.get(f"case{number}.decode_input", latents)
    return (
        tensors[f"case{number}.video_uint8"][None],
        latents[None],
        to_decode[None],
        tensors[f"case{number}.decoded"][None],
    )


def photo(width: int, height: int, num_frames: int = 1) -> torch.Tensor:
    """A photograph as bytes; further frames drift to the right."""
    with Image.open(PHOTO) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    frames = [pixels.roll(-3 * i, dims=2)[:, :height, :width] for i in range(num_frames)]
    return torch.stack(frames, dim=1)[None].contiguous()


def max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@both
@pytest.mark.parametrize("number", [0, 1, 2])
def test_latents_and_videos_equal_the_official_ones(version: str, number: int):
    video, latents, to_decode, decoded = case(version, number)
    assert max_abs(encode_video(load(version), video.float() / 127.5 - 1), latents) < 1e-5
    assert max_abs(decode_latents(load(version), to_decode), decoded) < 5e-5


@both
def test_mean_and_deviation_of_the_latents_are_the_official_ones(version: str):
    assert max_abs(torch.tensor(load(version).config.latents_mean), golden(version)["mean"]) < 1e-6
    assert max_abs(torch.tensor(load(version).config.latents_std), golden(version)["std"]) < 1e-6


@both
def test_every_tensor_of_the_file_has_its_place(version: str):
    names = vae_names(torch.load(FILES[version], weights_only=True))
    assert len(set(names.values())) == len(names)
    assert set(names.values()) == set(load(version).state_dict())


@both
@pytest.mark.parametrize("layout", ["original", "ComfyUI", "diffusers"])
def test_every_layout_gives_the_same_model(tmp_path: Path, version: str, layout: str):
    wanted = load(version).state_dict()
    original = torch.load(FILES[version], weights_only=True)
    prefixed = {f"first_stage_model.{name}": tensor for name, tensor in original.items()}
    tensors = {"original": original, "ComfyUI": prefixed, "diffusers": wanted}[layout]
    safetensors_file.write(tmp_path / "vae.safetensors", tensors, {})
    model = load_vae(tmp_path / "vae.safetensors")
    assert model.config == load(version).config
    assert model.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("published", "millions"),
    [
        ({"base_dim": 96, "z_dim": 16}, 127),
        (
            {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12,
             "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "scale_factor_temporal": 4},
            705,
        ),
    ],
)  # fmt: skip
def test_the_published_sizes_are_read_from_the_tensors(published: dict[str, object], millions: int):
    with torch.device("meta"):
        model = AutoencoderKLWan(**published)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    config = vae_config(shapes)
    assert {name: config[name] for name in published} == published
    assert config["patch_size"] == published.get("patch_size")
    with torch.device("meta"):
        again = AutoencoderKLWan(**config).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in again.items()} == shapes
    assert round(sum(map(math.prod, shapes.values())) / 1e6) == millions


def test_what_is_no_wan_vae_is_refused():
    shapes = {name: tuple(tensor.shape) for name, tensor in load("2.1").state_dict().items()}
    with pytest.raises(WangenError, match=r"post_quant_conv\.weight is missing") as caught:
        vae_config({"encoder.conv_in.weight": (96, 3, 3, 3, 3)}, where="vae.pth")
    assert caught.value.where == "vae.pth"
    with pytest.raises(WangenError, match=r"decoder\.conv_out\.weight is \(3,\)"):
        vae_config({**shapes, "decoder.conv_out.weight": (3,)})
    with pytest.raises(WangenError, match="4 latent channels from 3"):
        vae_config({**shapes, "post_quant_conv.weight": (4, 4, 1, 1, 1)})
    with pytest.raises(WangenError, match="16 latent channels from 4"):
        vae_config({**shapes, "encoder.conv_in.weight": (96, 4, 3, 3, 3)})
    assert vae_names(["blocks.0.ffn.0.weight"]) == {"blocks.0.ffn.0.weight": "blocks.0.ffn.0.weight"}


@both
def test_the_batch_does_not_change_an_item(version: str):
    video = torch.cat([case(version, 0)[0], case(version, 0)[0].flip(-1), photo(64, 48, 9)])
    together = encode_video(load(version), video)
    assert together.dtype == torch.float32
    assert max_abs(together, torch.cat([encode_video(load(version), item[None]) for item in video])) < 1e-5
    decoded = decode_latents(load(version), together)
    assert max_abs(decoded, torch.cat([decode_latents(load(version), item[None]) for item in together])) < 1e-5


@both
def test_bytes_are_the_same_as_floats(version: str):
    video = case(version, 0)[0]
    assert torch.equal(encode_video(load(version), video), encode_video(load(version), video.float() / 127.5 - 1))


@both
@pytest.mark.parametrize(("tile_px", "width"), [(0, 48), (128, 144)])
def test_later_frames_do_not_change_earlier_ones(version: str, tile_px: int, width: int):
    video = photo(width, 32, 9)
    long = encode_video(load(version), video, tile_px=tile_px)
    assert torch.equal(encode_video(load(version), video[:, :, :5], tile_px=tile_px), long[:, :, :2])
    decoded = decode_latents(load(version), long, tile_px=tile_px)
    assert decoded.shape == video.shape
    assert torch.equal(decode_latents(load(version), long[:, :, :2], tile_px=tile_px), decoded[:, :, :5])


@both
def test_a_half_precision_vae_gives_float32_close_to_the_exact(version: str):
    vae = load_vae(FILES[version], dtype=torch.bfloat16)
    video, latents, to_decode, decoded = case(version, 0)
    found = encode_video(vae, video)
    assert found.dtype == torch.float32
    assert (found - latents).pow(2).mean().sqrt() < 0.03 * latents.pow(2).mean().sqrt()
    video = decode_latents(vae, to_decode)
    assert video.dtype == torch.float32
    assert (video - decoded).pow(2).mean().sqrt() < 0.03 * decoded.pow(2).mean().sqrt()


@both
@pytest.mark.parametrize(("tile_px", "width"), [(0, 48), (128, 144)])
def test_the_cache_in_host_memory_changes_no_bit(version: str, tile_px: int, width: int):
    video = photo(width, 32, 9)
    latents = encode_video(load(version), video, tile_px=tile_px)
    assert torch.equal(encode_video(load(version), video, tile_px=tile_px, cache_cpu=True), latents)
    decoded = decode_latents(load(version), latents, tile_px=tile_px)
    assert torch.equal(decode_latents(load(version), latents, tile_px=tile_px, cache_cpu=True), decoded)


def watch_cache(half: torch.nn.Module) -> list[set[str]]:
    """Where the feature cache's tensors rest after each chunk, filled in while the encoder or decoder works."""
    seen: list[set[str]] = []

    def look(_module: object, _args: object, kwargs: dict[str, list], _output: object) -> None:
        resting = list.__iter__(kwargs["feat_cache"])
        seen.append({entry.device.type for entry in resting if isinstance(entry, torch.Tensor)})

    half.register_forward_hook(look, with_kwargs=True)
    return seen


def device_bytes(version: str, num_frames: int, work: str, **options: object) -> int:
    """The most that a GPU holds, weights aside, while a video of 176x144 in host memory is encoded or decoded."""
    vae = load_vae(FILES[version])
    caches = watch_cache(vae.encoder if work == "encode" else vae.decoder)
    with fake_gpu(vae) as memory:
        if work == "encode":
            encode_video(vae, torch.empty(1, 3, num_frames, 144, 176, dtype=torch.uint8), **options)
        else:
            stride = STRIDES[version]
            shape = (1, vae.config.z_dim, (num_frames + 3) // 4, 144 // stride, 176 // stride)
            assert decode_latents(vae, torch.empty(shape), **options).device.type == "cpu"
    assert caches
    assert all(places == {"cpu" if options.get("cache_cpu") else GPU} for places in caches)
    return memory.peak_bytes


@pytest.mark.slow
@both
@pytest.mark.parametrize("work", ["encode", "decode"])
def test_the_device_holds_one_chunk_however_long_the_video(version: str, work: str):
    short, long = (device_bytes(version, num_frames, work) for num_frames in (9, 21))
    latents = 3 * (144 // STRIDES[version]) * (176 // STRIDES[version]) * load(version).config.z_dim * 4
    assert long - short == (latents if work == "encode" else 0)


@pytest.mark.slow
@both
@pytest.mark.parametrize("work", ["encode", "decode"])
def test_the_cache_in_host_memory_and_tiles_spare_the_device(version: str, work: str):
    plain = device_bytes(version, 5, work)
    assert device_bytes(version, 5, work, cache_cpu=True) < 0.85 * plain
    assert device_bytes(version, 5, work, tile_px=128) < 0.75 * plain


@both
def test_a_picture_no_larger_than_a_tile_is_taken_whole(version: str):
    video = photo(128, 96, 5)
    latents = encode_video(load(version), video)
    assert torch.equal(encode_video(load(version), video, tile_px=128), latents)
    assert torch.equal(decode_latents(load(version), latents, tile_px=128), decode_latents(load(version), latents))


@both
def test_tiles_equal_those_of_diffusers(version: str):
    """Side by side, up to the thin rest at the end, of which diffusers makes a tile of its own."""
    vae, video = load_vae(FILES[version]), photo(224, 48, 5)
    patch = vae.config.patch_size or 1
    mean, std = (torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    # What diffusers takes for pixels when it encodes are patches.
    vae.enable_tiling(128 // patch, 128 // patch, 96 // patch, 96 // patch)
    with torch.no_grad():
        wanted = (vae.encode(video.float() / 127.5 - 1).latent_dist.mode() - mean) / std
    latents = encode_video(vae, video, tile_px=128)
    assert max_abs(encode_video(vae, video), latents) > 0.01
    assert max_abs(latents[..., : 192 // STRIDES[version]], wanted[..., : 192 // STRIDES[version]]) < 1e-5
    vae.enable_tiling(128, 128, 96, 96)
    with torch.no_grad():
        decoded = vae.decode(latents * std + mean).sample
    # Diffusers blends patches, this pixels: at the first pixel of each patch the shares are equal.
    assert max_abs(decode_latents(vae, latents, tile_px=128)[..., :192:patch], decoded[..., :192:patch]) < 5e-5


@both
@pytest.mark.slow
def test_tiles_come_close_to_the_whole_picture(version: str):
    video = photo(256, 192)
    latents = encode_video(load(version), video)
    decoded = decode_latents(load(version), latents)
    tiled = encode_video(load(version), video, tile_px=192)
    assert 0 < (tiled - latents).pow(2).mean().sqrt() < 0.1 * latents.std()
    tiled = decode_latents(load(version), latents, tile_px=192)
    assert 0 < (tiled - decoded).pow(2).mean().sqrt() < 0.1 * decoded.std()


@both
@pytest.mark.parametrize("tile_px", [-64, 64, 200])
def test_sizes_of_tiles_that_do_not_fit_are_refused(version: str, tile_px: int):
    with pytest.raises(WangenError, match=f"vae_tile {tile_px}: .* multiples of 64 from 128"):
        encode_video(load(version), torch.zeros(1, 3, 1, 16, 16), tile_px=tile_px)
    with pytest.raises(WangenError, match=f"vae_tile {tile_px}"):
        decode_latents(load(version), torch.zeros(1, load(version).config.z_dim, 1, 1, 1), tile_px=tile_px)


@pytest.mark.parametrize(
    ("version", "shape", "words"),
    [
        ("2.1", (1, 3, 4, 16, 16), "4 frames; the Wan VAE takes 4k"),
        ("2.1", (1, 3, 0, 16, 16), "0 frames"),
        ("2.1", (1, 3, 5, 20, 16), "16x20 pixels; both sides must be multiples of 8"),
        ("2.1", (1, 3, 5, 0, 16), "16x0 pixels"),
        ("2.2", (1, 3, 5, 16, 24), "24x16 pixels; both sides must be multiples of 16"),
        ("2.1", (3, 5, 16, 16), "shape"),
        ("2.1", (1, 1, 5, 16, 16), r"\(batch, 3, frames, height, width\)"),
        ("2.2", (1, 12, 5, 16, 16), r"\(batch, 3, frames, height, width\)"),
        ("2.1", (0, 3, 5, 16, 16), "shape"),
    ],
)
def test_videos_that_the_vae_would_cut_are_refused(version: str, shape: tuple[int, ...], words: str):
    with pytest.raises(WangenError, match=words):
        encode_video(load(version), torch.zeros(shape))


def test_a_video_of_integers_other_than_bytes_is_refused():
    with pytest.raises(WangenError, match=r"torch\.int64"):
        encode_video(load("2.1"), torch.zeros(1, 3, 1, 16, 16, dtype=torch.int64))


@pytest.mark.parametrize(
    ("version", "shape", "words"),
    [
        ("2.1", (1, 48, 1, 4, 4), r"\(batch, 16, frames"),
        ("2.2", (1, 16, 1, 4, 4), r"\(batch, 48, frames"),
        ("2.1", (16, 1, 4, 4), "latents of shape"),
        ("2.1", (1, 16, 0, 4, 4), "latents of shape"),
    ],
)
def test_latents_of_a_wrong_shape_are_refused(version: str, shape: tuple[int, ...], words: str):
    with pytest.raises(WangenError, match=words):
        decode_latents(load(version), torch.zeros(shape))
