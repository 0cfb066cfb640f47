import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline
from fake_gpu import Memory
from parity import VAE21, VAE22, golden, max_abs, rel_rms

from wangen.generator.errors import UsageError, WangenError
from wangen.runtime import safetensors_file
from wangen.runtime.fast.vae import VaeEncoder, load_vae_encoder
from wangen.runtime.models.wan_vae import PlainVaeEncoder, load_plain_vae_encoder
from wangen.runtime.weights.vae import load_vae
from wangen.runtime.weights.vae_names import vae_names

FILES = {"2.1": VAE21, "2.2": VAE22}
both = pytest.mark.parametrize("version", FILES)


@cache
def fast(version: str) -> VaeEncoder:
    return load_vae_encoder(FILES[version], dtype=torch.float32)


@cache
def plain(version: str) -> PlainVaeEncoder:
    return load_plain_vae_encoder(FILES[version], dtype=torch.float32)


def clip(num_frames: int, height: int = 32, width: int = 16, batch: int = 1) -> torch.Tensor:
    """Noise on colours that move, in [-1, 1]; other clips where any size differs."""
    generator = torch.Generator().manual_seed(num_frames * 1000 + height + batch)
    noise = torch.rand(batch, 3, num_frames, height, width, generator=generator) - 0.5
    colours = torch.rand(batch, 3, num_frames, 1, 1, generator=generator) - 0.5
    return noise + colours


def with_grey(images: torch.Tensor, num_frames: int) -> torch.Tensor:
    grey = torch.zeros(*images.shape[:2], num_frames - 1, *images.shape[3:])
    return torch.cat([images, grey], dim=2)


@both
def test_latents_equal_the_official_ones(version: str):
    tensors = golden(FILES[version].parent.name)
    for case in range(3):
        latents = fast(version).encode(tensors[f"case{case}.video_uint8"][None])
        assert max_abs(latents, tensors[f"case{case}.latents_normalized"][None]) < 1e-5


@both
@pytest.mark.parametrize("num_frames", [1, 5, 17, 33, 81])
def test_latents_equal_those_of_diffusers(version: str, num_frames: int):
    video = clip(num_frames, batch=2 if num_frames < 33 else 1)
    latents = fast(version).encode(video)
    assert latents.dtype == torch.float32
    wanted = plain(version).encode(video)
    assert latents.shape == wanted.shape
    assert max_abs(latents, wanted) < 1e-5


@both
def test_chunks_for_large_pictures_and_for_gpus_give_the_same(version: str, monkeypatch: pytest.MonkeyPatch):
    video = clip(21)
    wanted = plain(version).encode(video)
    for sizes in [(2, 8), (8, 16), (4, 4)]:
        monkeypatch.setattr(VaeEncoder, "_chunk_sizes", lambda _self, _pixels, sizes=sizes: sizes)
        assert max_abs(fast(version).encode(video), wanted) < 1e-5


@both
def test_convolutions_over_time_as_gpus_compute_them_give_the_same(version: str):
    encoder = load_vae_encoder(FILES[version], dtype=torch.float64)
    for num_frames in (1, 5, 21):
        assert max_abs(encoder.encode(clip(num_frames)), plain(version).encode(clip(num_frames))) < 1e-5
    if version == "2.1":
        wanted = plain(version).encode_condition(clip(1), 49)
        assert max_abs(encoder.encode_condition(clip(1), 49), wanted) < 1e-5


@both
@pytest.mark.parametrize("layout", ["ComfyUI", "diffusers"])
def test_every_layout_gives_the_same_bits(tmp_path: Path, version: str, layout: str):
    original = torch.load(FILES[version], weights_only=True)
    prefixed = {f"first_stage_model.{name}": tensor for name, tensor in original.items()}
    renamed = {new: original[old] for old, new in vae_names(original).items()}
    safetensors_file.write(tmp_path / "vae.safetensors", prefixed if layout == "ComfyUI" else renamed, {})
    encoder = load_vae_encoder(tmp_path / "vae.safetensors", dtype=torch.float32)
    assert torch.equal(encoder.encode(clip(5)), fast(version).encode(clip(5)))


@both
def test_half_precision_gives_float32_close_to_the_exact(version: str):
    encoder = load_vae_encoder(FILES[version], dtype=torch.bfloat16)
    for num_frames in (1, 9):
        latents = encoder.encode(clip(num_frames))
        assert latents.dtype == torch.float32
        assert rel_rms(latents, fast(version).encode(clip(num_frames))) < 0.03
    if version == "2.1":
        condition = encoder.encode_condition(clip(1), 33)
        assert rel_rms(condition, fast(version).encode_condition(clip(1), 33)) < 0.03


@both
def test_bytes_are_the_same_as_floats(version: str):
    video = (clip(5) * 127 + 128).to(torch.uint8)
    floats = video.float() / 127.5 - 1
    assert torch.equal(fast(version).encode(video), fast(version).encode(floats))
    if version == "2.1":
        conditions = [fast(version).encode_condition(images[:, :, :1], 9) for images in (video, floats)]
        assert torch.equal(*conditions)


@both
def test_on_a_cpu_the_batch_does_not_change_a_bit_of_an_item(version: str):
    video = clip(5, batch=3)
    alone = [fast(version).encode(item[None]) for item in video]
    assert torch.equal(fast(version).encode(video), torch.cat(alone))


@both
def test_on_a_gpu_a_batch_in_one_call_gives_the_same(version: str, monkeypatch: pytest.MonkeyPatch):
    encoder = load_vae_encoder(FILES[version], dtype=torch.float32)
    video = clip(9, batch=3)
    parts = [list(encoder._means(part, 9, False)) for part in (video, *video.split(1))]
    together, *alone = (torch.cat(part, dim=2) for part in parts)
    assert max_abs(together, torch.cat(alone)) < 1e-5


@both
def test_what_is_remembered_in_host_memory_changes_no_bit(version: str):
    assert torch.equal(fast(version).encode(clip(9), cache_cpu=True), fast(version).encode(clip(9)))
    if version == "2.1":
        wanted = fast(version).encode_condition(clip(1), 33)
        assert torch.equal(fast(version).encode_condition(clip(1), 33, cache_cpu=True), wanted)


@both
def test_tiles_equal_those_of_the_plain_path(version: str):
    video = clip(5, 16, 144)
    latents = fast(version).encode(video, tile_px=128)
    assert max_abs(latents, plain(version).encode(video, tile_px=128)) < 1e-5
    assert max_abs(latents, fast(version).encode(video)) > 1e-3


@pytest.mark.parametrize("num_frames", [1, 5, 17, 49, 81, 161])
def test_a_condition_equals_the_latents_of_image_and_grey(num_frames: int):
    images = clip(1, 16, 24, batch=2 if num_frames < 49 else 1)
    condition = fast("2.1").encode_condition(images, num_frames)
    wanted = plain("2.1").encode(with_grey(images, num_frames))
    assert condition.shape == wanted.shape
    assert max_abs(condition, wanted) < 1e-5
    if num_frames < 49:
        assert torch.equal(plain("2.1").encode_condition(images, num_frames), wanted)


def test_conditions_in_other_chunks_in_tiles_and_in_host_memory(monkeypatch: pytest.MonkeyPatch):
    images = clip(1, 16, 24)
    wanted = plain("2.1").encode(with_grey(images, 41))
    for sizes in [(2, 8), (8, 16), (16, 16), (4, 4), (2, 4)]:
        monkeypatch.setattr(VaeEncoder, "_chunk_sizes", lambda _self, _pixels, sizes=sizes: sizes)
        assert max_abs(fast("2.1").encode_condition(images, 41), wanted) < 1e-5
    images = clip(1, 16, 144)
    tiled = fast("2.1").encode_condition(images, 9, tile_px=128, cache_cpu=True)
    assert max_abs(tiled, plain("2.1").encode_condition(images, 9, tile_px=128)) < 1e-5


def test_conditions_of_several_sizes_do_not_mix():
    encoder = load_vae_encoder(VAE21, dtype=torch.float32)
    images = [clip(1, 32, 48), clip(1, 48, 32), clip(1, 32, 48).flip(-1)]
    found = [encoder.encode_condition(image, 33) for image in images]
    for image, condition in zip(images, found, strict=True):
        fresh = load_vae_encoder(VAE21, dtype=torch.float32)
        assert torch.equal(fresh.encode_condition(image, 33), condition)


@pytest.mark.parametrize("num_frames", [5, 33])
def test_a_condition_equals_what_the_pipeline_of_diffusers_builds(num_frames: int):
    vae, images = plain("2.1").vae, clip(1, 32, 48)
    pipeline = WanImageToVideoPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler()
    )
    with torch.no_grad():
        _, condition = pipeline.prepare_latents(
            images[:, :, 0], 1, height=32, width=48, num_frames=num_frames, dtype=torch.float32, device="cpu",
            generator=None, latents=torch.zeros(1),
        )  # fmt: skip
    assert max_abs(fast("2.1").encode_condition(images, num_frames), condition[:, 4:]) < 1e-5


def peak_bytes(version: str, num_frames: int, *, condition: bool = False) -> int:
    """The most that lives while a clip or a condition is encoded, the clip included and weights aside."""
    encoder, video = fast(version), clip(1 if condition else num_frames)
    encode = (lambda: encoder.encode_condition(video, num_frames)) if condition else (lambda: encoder.encode(video))
    encode()  # reads the weights
    with Memory("cpu") as memory:
        encode()
    return memory.peak_bytes


@pytest.mark.slow
@both
def test_memory_is_bounded_however_long_the_clip(version: str):
    longer = 32 * clip(1)[0].nbytes
    latents = 8 * fast(version).encode(clip(1)).nbytes
    assert peak_bytes(version, 81) - peak_bytes(version, 49) == longer + latents
    assert 3 * peak_bytes(version, 1) < peak_bytes(version, 17)
    if version == "2.1":
        condition = peak_bytes(version, 81, condition=True)
        assert condition - peak_bytes(version, 49, condition=True) == latents
        assert condition < peak_bytes(version, 81)


@both
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 3, 4, 16, 16), "4 frames"),
        ((1, 3, 5, 20, 16), "16x20 pixels"),
        ((3, 5, 16, 16), "shape"),
        ((0, 3, 5, 16, 16), "shape"),
        ((1, 12, 5, 16, 16), r"\(batch, 3, frames"),
    ],
)
def test_videos_that_the_vae_would_cut_are_refused(version: str, shape: tuple[int, ...], words: str):
    with pytest.raises(WangenError, match=words):
        fast(version).encode(torch.zeros(shape))


@pytest.mark.parametrize("make", [fast, plain])
@pytest.mark.parametrize(
    ("frames", "num_frames", "words"),
    [(1, 8, "8 frames"), (5, 9, "shape"), (1, 0, "0 frames"), (1, -3, "-3 frames")],
)
def test_conditions_of_wrong_lengths_are_refused(make, frames: int, num_frames: int, words: str):
    with pytest.raises(WangenError, match=words):
        make("2.1").encode_condition(torch.zeros(1, 3, frames, 16, 16), num_frames)


def test_what_else_cannot_be_encoded_is_refused():
    with pytest.raises(WangenError, match=r"Wan 2\.2 has no image-to-video condition"):
        fast("2.2").encode_condition(torch.zeros(1, 3, 1, 16, 16), 5)
    with pytest.raises(UsageError, match="vae_tile 100"):
        fast("2.1").encode(torch.zeros(1, 3, 1, 16, 16), tile_px=100)
    with pytest.raises(WangenError, match=r"torch\.int64"):
        fast("2.1").encode(torch.zeros(1, 3, 1, 16, 16, dtype=torch.int64))


@both
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("encoder.conv_out.bias"), r"1 missing \(encoder\.conv_out\.bias\)"),
        (lambda tensors: tensors.pop("quant_conv.weight"), r"1 missing \(quant_conv\.weight\)"),
        (lambda tensors: tensors.update({"encoder.more": torch.zeros(1)}), r"1 unexpected \(encoder\.more\)"),
        (
            lambda tensors: tensors.update({"encoder.norm_out.gamma": torch.zeros(3, 1, 1, 1)}),
            r"1 of another shape \(encoder\.norm_out\.gamma\)",
        ),
    ],
    ids=["missing", "no quant_conv", "surplus", "misshapen"],
)
def test_a_damaged_encoder_is_refused_before_it_works(tmp_path: Path, version: str, change, words: str):
    tensors = dict(load_vae(FILES[version]).state_dict())
    change(tensors)
    path = tmp_path / "vae.safetensors"
    safetensors_file.write(path, tensors, {})
    with pytest.raises(WangenError, match=words) as caught:
        load_vae_encoder(path, dtype=torch.float32)
    assert caught.value.where == str(path)


def test_a_file_that_changes_while_it_is_used_is_noticed(tmp_path: Path):
    path = tmp_path / "Wan2.1_VAE.pth"
    path.write_bytes(VAE21.read_bytes())
    encoder = load_vae_encoder(path, dtype=torch.float32)
    encoder.encode(clip(1))
    os.utime(path, ns=(1, 1))
    encoder.encode(clip(1))  # has all that it needs
    with pytest.raises(WangenError, match="changed while it was in use"):
        encoder.encode(clip(5))
    path.unlink()
    with pytest.raises(WangenError, match="cannot be read"):
        encoder.encode(clip(5))


@pytest.mark.slow
def test_the_heavy_libraries_are_not_imported():
    code = f"""
import sys, torch
from pathlib import Path
from wangen.runtime.fast.vae import load_vae_encoder
encoder = load_vae_encoder(Path({str(VAE21)!r}), dtype=torch.float32)
encoder.encode(torch.zeros(1, 3, 5, 16, 16))
encoder.encode_condition(torch.zeros(1, 3, 1, 16, 16), 9)
heavy = {{"diffusers", "transformers", "accelerate", "peft"}}
print(sorted(heavy & {{name.partition(".")[0] for name in sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
