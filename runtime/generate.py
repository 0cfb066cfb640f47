"""`generate`: prompt -> video or image, with diffusers' sampler on original checkpoints and LoRAs."""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from wangen import profiles
from wangen.generator import headers, kinds
from wangen.generator.dataset import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.files import replace
from wangen.generator.lora_config import lora_identity
from wangen.generator.session import Report
from wangen.generator.steps import Generate
from wangen.generator.table import options as flags_of
from wangen.generator.tasks import require_supported
from wangen.generator.tokenizer_file import tokenizer_of
from wangen.generator.workspace import require_writable
from wangen.runtime.adapter_layers import apply_adapter
from wangen.runtime.adapters import read_adapter, read_scales
from wangen.runtime.devices import DTYPES, choose_decoder_dtype, choose_device, choose_dtype, set_attention
from wangen.runtime.models import Family, family, require_tile
from wangen.runtime.progress import progress

log = logging.getLogger("wangen")

OTHER_MEDIA = (IMAGE_SUFFIXES | VIDEO_SUFFIXES | {".gif", ".apng"}) - {".mp4", ".png"}
X264 = {"crf": "18", "threads": "1", "x264-params": "cpu-independent=1"}


def run(options: Generate) -> Report:
    """Sample one video or image and write it.

    Raises:
        WangenError: a weight file is of another kind, a LoRA does not fit, the file cannot be written.
    """
    _refuse(options)
    model = profiles.model(options.task)
    require_supported(model, "sampling")
    path = _file(options)
    require_writable(path.parent)
    for flag in ("dit", "vae", "t5"):
        kinds.expect(getattr(options, flag), model.kind_of(flag), f"--{flag}", options.task)
    for weight in options.lora_weight:
        read_scales(weight, "--lora_weight")
    settings = json.dumps(_settings(options), sort_keys=True)  # a file that cannot be read is named before sampling
    kind = family(model)
    device = choose_device(options.device)
    texts = _texts(kind, options, device)
    dtype = DTYPES[choose_dtype(options.dtype, device)]
    transformer = kind.load_transformer(options.dit, dtype=dtype, device=device)
    kernel = set_attention(transformer, options.attention, device, dtype, backward=False)
    _apply_loras(transformer, options)
    vae_dtype = choose_decoder_dtype(options.vae_dtype, device)
    vae = kind.load_vae(options.vae, dtype=DTYPES[vae_dtype], device=device)
    try:
        with progress("sampling", options.infer_steps) as advance:
            latents = kind.sample_latents(transformer, vae, options, texts, lambda _number: advance(1, ""))
        if not latents.isfinite().all():
            raise WangenError(
                "the sampled latents are not finite", cure="look at --dit and --lora_weight; try --dtype float32"
            )
        # (3, T, H, W) in [-1, 1]
        (video,) = kind.decode_latents(vae, latents, cache_cpu=options.vae_cache_cpu, tile_px=options.vae_tile)
    except torch.OutOfMemoryError:
        raise WangenError(
            f"out of memory sampling {options.video_length} frames of {options.video_size[1]}x{options.video_size[0]}",
            cure="use a smaller --video_size, fewer frames (--video_length) or --guidance_scale 1",
        ) from None
    write_media(path, video, options.fps, {"wangen": settings})
    frames, (height, width) = options.video_length, options.video_size
    return Report(
        folder=path.parent,
        summary=f"{path} ({frames} frame{'s' if frames > 1 else ''} of {width}x{height})",
        inputs={"dit": options.dit, "vae": options.vae, "t5": options.t5, "lora_weight": options.lora_weight},
        counts={"frames": frames, "steps": options.infer_steps},
        result={"file": path, "attention": kernel, "dtype": str(dtype), "vae_dtype": vae_dtype},
    )


def _refuse(options: Generate) -> None:
    """Everything that can be refused before a model loads."""
    require_tile(options.vae_tile)
    if any(side <= 0 or side % 16 for side in options.video_size):
        height, width = options.video_size
        raise UsageError(f"--video_size {height} {width}: both must be multiples of 16",
                         cure=f"use {max(16, round(height / 16) * 16)} {max(16, round(width / 16) * 16)}")  # fmt: skip
    if options.video_length < 1 or options.video_length % 4 != 1:
        raise UsageError(f"--video_length {options.video_length}: must be 4n+1",
                         cure=f"use {max(1, round((options.video_length - 1) / 4) * 4 + 1)}")  # fmt: skip
    if options.lora_multiplier and len(options.lora_multiplier) != len(options.lora_weight):
        numbers = f"{len(options.lora_weight)} --lora_weight and {len(options.lora_multiplier)} --lora_multiplier"
        raise UsageError(numbers, cure="give one multiplier per LoRA, or none")
    if options.infer_steps < 1 or options.fps < 1:
        raise UsageError("--infer_steps and --fps must be at least 1")
    if options.save_path.suffix.lower() in OTHER_MEDIA:
        raise UsageError(f"this version writes .mp4 and .png, not {options.save_path.suffix}",
                         cure="end --save_path in .mp4, or .png for one frame, or name a folder")  # fmt: skip
    if options.save_path.suffix.lower() == ".png" and options.video_length != 1:
        raise UsageError("a .png holds one frame", cure="give --video_length 1 or save to .mp4")


def _file(options: Generate) -> Path:
    """The file to write; in a folder it is named by the seed, with a number when that name is taken."""
    if options.save_path.suffix.lower() in (".mp4", ".png"):
        return options.save_path
    ending = "png" if options.video_length == 1 else "mp4"
    names = (f"seed-{options.seed}{number}.{ending}" for number in ("", *(f"-{n}" for n in range(2, 10**6))))
    return next(path for name in names if not (path := options.save_path / name).exists())


def _settings(options: Generate) -> dict[str, Any]:
    """What decides the pixels: settings by name, and the weights by their identity, not by their paths."""
    settings = {option.name: getattr(options, option.name) for option in flags_of(Generate) if option.flag.pinned}
    return {
        **settings,
        "prompt": options.prompt,
        "lora_multiplier": options.lora_multiplier,
        "weights": {name: headers.identity(getattr(options, name), f"--{name}") for name in ("dit", "vae", "t5")},
        "loras": [lora_identity(path) for path in options.lora_weight],
    }


def _texts(kind: Family, options: Generate, device: torch.device) -> list[torch.Tensor]:
    """Embeddings of the prompt and, with guidance, of the negative prompt; the encoder is released again."""
    tokenizer = kind.load_tokenizer(tokenizer_of(options.t5, options.tokenizer))
    encoder = kind.load_text_encoder(
        options.t5, dtype=DTYPES[choose_dtype(None, device)], device=device, fp8=options.fp8_t5
    )
    prompts = [options.prompt, options.negative_prompt] if options.guidance_scale > 1 else [options.prompt]
    return [kind.encode_prompts(encoder, tokenizer, [prompt])[0] for prompt in prompts]


def _apply_loras(transformer: Any, options: Generate) -> None:
    multipliers = options.lora_multiplier or (1.0,) * len(options.lora_weight)
    for number, (path, multiplier) in enumerate(zip(options.lora_weight, multipliers, strict=True)):
        left_out = apply_adapter(transformer, read_adapter(path, "--lora_weight"), multiplier, name=f"lora{number}")
        log.info("  LoRA %s at %g", path.name, multiplier)
        if left_out:
            log.warning("  %s: %d modules are not in this model and were left out", path.name, len(left_out))


def write_media(path: Path, video: torch.Tensor, fps: int, metadata: Mapping[str, str]) -> None:
    """Write frames as an h264 mp4, or a single one as png, whole or not at all.

    Args:
        path: `.mp4` or `.png`.
        video: (3, T, H, W) in [-1, 1].
        fps: frames per second.
        metadata: texts stored in the file.

    Raises:
        WangenError: the disk refused.
    """
    frames = ((video.float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 3, 0).numpy()
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".png":
            _write_png(temporary, frames[0], metadata)
        else:
            _write_mp4(temporary, frames, fps, metadata)
        replace(temporary, path)
    except OSError as error:
        raise WangenError(
            f"cannot write: {error.strerror}", where=str(path), cure="free space or fix the rights"
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def _write_png(path: Path, frame: Any, metadata: Mapping[str, str]) -> None:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for key, value in metadata.items():
        info.add_itxt(key, value)
    Image.fromarray(frame).save(path, pnginfo=info)


def _write_mp4(path: Path, frames: Any, fps: int, metadata: Mapping[str, str]) -> None:
    """h264, 4:2:0, in bytes that depend on nothing but the frames.

    x264's fast paths read beyond the picture's edge, so that the same frames of 80x64 gave other bytes in a tenth of
    the runs; `cpu-independent` switches them off, and one thread keeps the order.
    """
    import av

    with av.open(str(path), "w", options={"movflags": "use_metadata_tags"}) as container:
        container.metadata.update(metadata)
        stream = container.add_stream("libx264", rate=Fraction(fps), options=X264)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
