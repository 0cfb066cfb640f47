"""What several steps of the table share: value types, sentences of their help, and the flags of the dataset."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from wangen.generator.errors import UsageError
from wangen.generator.formats import WEIGHT_SUFFIXES
from wangen.generator.table import SMOKE, Step, flag

Attention = Literal["auto", "sdpa", "flash", "flash3", "xformers", "sage"]
Dtype = Literal["float32", "bfloat16", "float16"]
Decoder = Literal["auto", "pyav", "torchcodec", "pynvvideocodec"]
ExportDtype = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "fp8_scaled"]

DTYPE_VALUES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16"}
DEFAULT_EPOCHS = 35
SMOKE_STEPS = 50
SMOKE_ITEMS = 8

_TASKS = "use --task qwen-image, qwen-image-edit or qwen-image-edit-plus (2509, 2511)"
MODEL_VERSION = dict.fromkeys(("model_version", "edit", "edit_plus"), _TASKS)
"""How musubi-tuner names the models of Qwen-Image, and what to use instead."""
_FUN_CONTROL = "Fun-Control models are not in this version of wangen: their input is wider"
OTHER_MODELS = {
    "t2i-14B": "use t2v-14B, with images",
    **dict.fromkeys(("t2v-1.3B-FC", "t2v-14B-FC", "i2v-14B-FC"), _FUN_CONTROL),
}
"""musubi-tuner's names of models that no profile has, and what to do."""
_BY_INDUCTOR = "use --compile alone: blocks are compiled by inductor"
_BY_SHAPE = "use --compile alone: each shape gets a graph of its own"
COMPILES = {
    "compile_backend": _BY_INDUCTOR,
    "compile_mode": f"{_BY_INDUCTOR} in its default mode",
    "compile_dynamic": _BY_SHAPE,
    "compile_cache_size_limit": _BY_SHAPE,
    "compile_fullgraph": "use --compile alone: a block is one graph wherever it can be",
}
"""musubi-tuner's choices beside `--compile`, and what to use instead."""
LATER = "is not in this version of wangen; leave it out"
TRY = f"try the job: at most {SMOKE_ITEMS} items"
DIT = "transformer weights: .safetensors (any shard, fp8 too), .pth, .gguf or a diffusers folder"
VAE = "VAE weights: Wan2.1_VAE.pth, Wan2.2_VAE.pth, qwen_image_vae.safetensors, .safetensors or a diffusers folder"
T5 = "text encoder weights, umT5 or Qwen2.5-VL: .pth, .safetensors (ComfyUI fp8 too), .gguf or a folder"
TEXT_ENCODER = ("text_encoder",)
"""What the flag of the text encoder is also called."""
TOKENIZER = "tokenizer folder or file (default: found beside or inside the text encoder's weights)"
CLIP = "CLIP image encoder weights (Wan 2.1 I2V): .pth, .safetensors or a folder"
CACHE_TASK = (
    "model profile that the cache is for (default: t2v-14B; where a --vae is given, text-to-video with it, and "
    "image-to-video where cache_latents has --i2v or --clip)"
)
DECODER = (
    "what decodes clips, to the same frames: pyav, torchcodec or (on an NVIDIA GPU) pynvvideocodec, which are to be "
    "installed beside wangen; auto is torchcodec on a GPU where it loads, else pyav"
)
VAE_CACHE = "keep what the VAE remembers of earlier frames in host memory: slower, the same latents"
FP8_T5 = "hold the text encoder in 8 bits: half the memory of bfloat16, and embeddings that differ a little"


def of_try(lora: Path) -> Path:
    """Where a try finds a LoRA: a file as it is named, of a training run's folder the one that a try has made.

    >>> of_try(Path("outputs/wan2.1_cats")).as_posix(), of_try(Path("Cats.SAFETENSORS")).as_posix()
    ('outputs/wan2.1_cats/smoke', 'Cats.SAFETENSORS')
    """
    return lora if lora.suffix.lower() in WEIGHT_SUFFIXES else lora / SMOKE


def require_try(path: Path, flag: str) -> None:
    """See that the folder of a try is there, where one is named in the folder of a run.

    Raises:
        UsageError: it is not.
    """
    if path.name == SMOKE and path.parent.is_dir() and not path.exists():
        raise UsageError(f"{flag}: no try of a training is in this folder", where=str(path.parent),
                         cure="run train with --smoke first")  # fmt: skip


def vae_tile(default: int | None = 0) -> Any:
    """The flag of the VAE's tiles, the same for every step that has one; None for a default leaves it open."""
    return flag(
        "let the VAE work in overlapping squares of this many pixels, a multiple of 64 from 128 on: less memory, not "
        "quite the same latents; 0 takes the picture whole",
        default, pinned=True, names=("tile", "vae_spatial_tile_sample_min_size"), constants={"vae_tiling": "256"},
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DatasetStep(Step):
    """What all steps that read a dataset share."""

    one_of: ClassVar[tuple[str, ...]] = ("dataset_config", "manifest")

    dataset_config: Path | None = flag("the dataset's TOML file", None)
    manifest: Path | None = flag(
        "a .jsonl of clips and captions, as `wangen preprocess` writes it, or a .tar of such, in place of the TOML; "
        "clips keep their size unless --resolution names others",
        None,
    )
    resolution: str = flag("which resolutions of the TOML to use: all, or for example 256,832x480", "all", knob=True)

    @property
    def dataset(self) -> Path:
        """The file that says what the dataset is: its TOML or its manifest."""
        named = self.dataset_config or self.manifest
        assert named is not None, "the command line, and whoever makes a step, gives one of the two"
        return named
