"""The sampling step of the table: what is shown, by which weights, how, and where the files go."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from wangen.generator.step_parts import (
    CLIP,
    COMPILES,
    DIT,
    DTYPE_VALUES,
    FP8_T5,
    LATER,
    MODEL_VERSION,
    T5,
    TEXT_ENCODER,
    TOKENIZER,
    VAE,
    VAE_CACHE,
    Attention,
    Dtype,
    of_try,
    vae_tile,
)
from wangen.generator.table import SMOKE, Step, flag
from wangen.generator.toml_values import WHITE
from wangen.generator.train_values import Quantize

DEFAULTS: Mapping[str, Any] = {
    "negative_prompt": "", "video_size": (256, 256), "video_length": 81, "infer_steps": 50, "guidance_scale": 5.0,
    "flow_shift": 5.0, "sample_solver": "unipc",
}  # fmt: skip
"""What a video is made with where neither a flag, nor a file, nor the model's profile says it."""

DEFAULT_SEED = 42
DEFAULT_TASK = "t2v-14B"
SMOKE_SAMPLING_STEPS = 4

_MODELS = "(default: the model's)"
_SKIPS = f"skip-layer guidance {LATER}"
_EXPERT = "of the high-noise expert (Wan 2.2 A14B)"


@dataclass(frozen=True, kw_only=True)
class Generate(Step):
    """Sample videos or images from prompts, first frames and pictures to edit, with or without LoRAs.

    What changes the result and is not said comes from the file of `--from`, else from the model's profile.
    """

    command: ClassVar[str] = "generate"
    module: ClassVar[str] = "wangen.runtime.generate"
    spellings: ClassVar[tuple[str, ...]] = (
        "wan_generate_video", "wan_generate_video.py", "qwen_image_generate_image", "qwen_image_generate_image.py",
    )  # fmt: skip
    elsewhere: ClassVar[Mapping[str, str]] = {
        **MODEL_VERSION,
        "output_type": "the ending of --save_path decides: .mp4 for a video, .png for one frame",
        "end_image_path": f"first and last frame {LATER}",
        "one_frame_inference": f"one-frame sampling {LATER}",
        "video_path": f"video-to-video {LATER}",
        "control_path": "control videos belong to Fun-Control models: leave it out",
        "latent_path": "latents are decoded as they are made: leave it out",
        "save_merged_model": "use wangen export --dit … --lora_weight … --save_path …",
        "interactive": "use --prompt_file with one prompt per line: the models load once",
        "lazy_loading": "an expert waits in host memory until its steps come: leave it out",
        "fp8_fast": "products are never rounded to 8 bits: use --fp8_scaled",
        "no_metadata": "the settings in a file are what --from repeats it by: leave it out",
        "compile_args": COMPILES["compile_backend"],
        **COMPILES,
        "ckpt_dir": "give the files: --dit, --vae, --t5, and --clip for Wan 2.1 image-to-video",
        "disable_numpy_memmap": "weights are read without numpy: leave it out",
        "control_image_mask_path": "the control images of one-frame sampling have masks there: leave it out",
        **dict.fromkeys(("include_patterns", "exclude_patterns"), "every layer of a LoRA is used: leave it out"),
        "lycoris": "LoHa and LoKr files are known by what they hold: give them to --lora_weight",
        "trim_tail_frames": "give a smaller --video_length",
        **dict.fromkeys(("cfg_skip_mode", "cfg_apply_ratio"), "every step has its guidance: leave it out"),
        **dict.fromkeys(("slg_layers", "slg_scale", "slg_start", "slg_end", "slg_mode"), _SKIPS),
    }

    smoke: bool = flag(f"try the job: one video of every prompt in {SMOKE_SAMPLING_STEPS} steps, with what a try has "
                       "trained, into the folder smoke beside --save_path", False)  # fmt: skip

    # What is shown.
    prompt: str | None = flag("what to show", None, pinned=True)
    prompt_file: Path | None = flag(
        "a file of prompts, .txt (a prompt per line, then --w --h --f --d --s …), .toml or .json, as of training's "
        "--sample_prompts; what a prompt does not say is as the flags say", None, names=("from_file",),
    )  # fmt: skip
    repeat: Path | None = flag(
        "an .mp4 or .png that this step made: repeat it exactly; flags that are given win", None, names=("from",)
    )
    changed: bool = flag("with --from: take other weights, LoRAs or another first frame than the file was made with",
                         False)  # fmt: skip
    negative_prompt: str | None = flag("what to avoid, where guidance is above 1 (default: none)", None, pinned=True)
    image_path: Path | None = flag("the first frame, for image-to-video and TI2V-5B", None)
    control_image_path: tuple[Path, ...] = flag("the pictures to edit, for qwen-image-edit one, for -plus up to three",
                                                ())  # fmt: skip
    background_color: str | None = flag(
        "the colour behind what is transparent in the first frame or the pictures to edit, as in the dataset's TOML "
        f"(default: {WHITE})", None, pinned=True,
    )  # fmt: skip
    task: str | None = flag("model profile (default: t2v-14B)", None, pinned=True, model_choices=True)
    seed: int | None = flag(
        f"seed of the initial noise, which is always drawn on the CPU (default: {DEFAULT_SEED})", None, pinned=True
    )
    num_videos: int = flag("so many videos of every prompt, with the seeds seed, seed + 1, …", 1)

    # Weights.
    dit: Path = flag(f"{DIT}; of two experts the one for low noise")
    dit_high_noise: Path | None = flag(f"weights {_EXPERT}", None)
    vae: Path = flag(VAE)
    t5: Path = flag(T5, names=TEXT_ENCODER)
    tokenizer: Path | None = flag(TOKENIZER, None)
    clip: Path | None = flag(CLIP, None)
    lora_weight: tuple[Path, ...] = flag(
        "LoRAs (ComfyUI, kohya, diffusers or peft layout); of two experts those of the low-noise one. A training run's "
        "folder means its best LoRA, or else its last", (), names=("lora_weights",),
    )  # fmt: skip
    lora_multiplier: tuple[float, ...] = flag("strength of each LoRA (default: 1)", (), pinned=True)
    lora_weight_high_noise: tuple[Path, ...] = flag(f"LoRAs {_EXPERT}", ())
    lora_multiplier_high_noise: tuple[float, ...] = flag("strength of each of them (default: 1)", (), pinned=True)

    # How it is sampled.
    video_size: tuple[int, int] | None = flag(
        "height and width in pixels, multiples of 16, for TI2V-5B of 32 (default: the model's, or that of the last "
        "picture to edit)",
        None,
        pinned=True,
    )
    video_length: int | None = flag(f"number of frames, 4n+1; 1 makes an image {_MODELS}", None, pinned=True)
    fps: int | None = flag(f"frames per second of the file {_MODELS}", None, pinned=True)
    infer_steps: int | None = flag(f"sampling steps {_MODELS}", None, pinned=True)
    guidance_scale: float | None = flag(f"classifier-free guidance; 1 switches it off {_MODELS}", None, pinned=True)
    guidance_scale_high_noise: float | None = flag(
        f"guidance {_EXPERT} (default: --guidance_scale, or else the model's)", None, pinned=True
    )
    timestep_boundary: float | None = flag(
        f"timestep from which on the high-noise expert works, 0.875 or 875 {_MODELS}", None, pinned=True
    )
    flow_shift: float | None = flag(f"shift of the sampling schedule {_MODELS}", None, pinned=True)
    sample_solver: Literal["unipc", "dpm++", "euler"] | None = flag(
        "sampler (default: unipc; Qwen-Image has euler alone)", None, pinned=True, values={"vanilla": "euler"}
    )
    cpu_noise: bool = flag("accepted; noise is always drawn on the CPU", False)
    force_v2_1_time_embedding: bool = flag("accepted; a timestep that all tokens share is always embedded once", False)

    # How it is computed.
    attention: Attention | None = flag(
        "attention kernel (default: auto, the fastest of flash3, flash, sdpa that runs here)", None, pinned=True,
        names=("attn_mode",),
        constants={"sdpa": "sdpa", "flash_attn": "flash", "flash3": "flash3", "xformers": "xformers",
                   "sage_attn": "sage"},
        values={"torch": "sdpa", "flash2": "flash", "sageattn": "sage"},
    )  # fmt: skip
    dtype: Dtype | None = flag("precision of the transformer (default: bfloat16 on CUDA, float32 on CPU)", None,
                               pinned=True, values=DTYPE_VALUES)  # fmt: skip
    vae_dtype: Dtype | None = flag(
        "precision of the VAE (default: bfloat16 on CUDA, for the first frame float16; float32 on CPU and ROCm)", None,
        pinned=True, values=DTYPE_VALUES,
    )  # fmt: skip
    t5_dtype: Dtype | None = flag("precision of the text encoder (default: bfloat16 on CUDA, float32 on CPU)", None,
                                  pinned=True, values=DTYPE_VALUES)  # fmt: skip
    fp8_t5: bool | None = flag(FP8_T5, None, pinned=True, names=("fp8_vl",))
    quantize: Quantize | None = flag(
        "hold the transformer's blocks in 8 or 4 bits (default: none)", None, pinned=True,
        constants={"fp8": "fp8", "fp8_scaled": "fp8"},
    )  # fmt: skip
    blocks_to_swap: int | None = flag("so many blocks wait in host memory and come when they are needed (default: 0)",
                                      None, pinned=True)  # fmt: skip
    use_pinned_memory_for_block_swap: bool = flag("accepted: they are always copied from pinned memory", False)
    offload_inactive_dit: bool = flag(
        "of two experts the idle one waits in host memory, and both do while a video is decoded (the default; "
        "--no_offload_inactive_dit keeps both on the device)", True,
    )  # fmt: skip
    vae_cache_cpu: bool = flag(VAE_CACHE, False)
    vae_tile: int | None = vae_tile(None)
    compile: bool | None = flag("torch.compile for whole blocks, one graph for each shape", None, pinned=True)
    plain: bool | None = flag("sample through the libraries' own modules: the same numbers to rounding, slower", None,
                              pinned=True)  # fmt: skip
    device: str | None = flag("cuda, cuda:1, cpu … (default: cuda when there is one)", None)

    save_path: Path = flag("the .mp4 or .png to write, or a folder", names=("output_dir", "output"))
    fresh: bool = flag("make again what is there already; without it a video whose file holds these settings is kept",
                       False)  # fmt: skip

    def _smoke_changes(self) -> dict[str, Any]:
        changes = {name: tuple(map(of_try, getattr(self, name))) for name in ("lora_weight", "lora_weight_high_noise")}
        path = self.save_path.parent / SMOKE / self.save_path.name
        return {**super()._smoke_changes(), **changes, "num_videos": 1, "infer_steps": SMOKE_SAMPLING_STEPS,
                "save_path": path, "fresh": True}  # fmt: skip
