"""THE TABLE: one frozen dataclass per step, one field per flag.

Every reader is generic: the click command, the script line (`Step.argv`), the `--config_file` TOML, `docs/flags.md`
and the typed `run(options)` of the runtime. Adding a flag is adding a field here and using it in the runtime.
`table.py` says what a field may be.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from wangen.generator.table import SMOKE, Step, flag

Attention = Literal["auto", "sdpa", "flash", "flash3", "xformers", "sage"]
Dtype = Literal["float32", "bfloat16", "float16"]
ExportDtype = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "fp8_scaled"]
TimestepSampling = Literal["uniform", "sigmoid", "shift", "logit_normal"]

DTYPE_VALUES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16"}
DEFAULT_EPOCHS = 35
SMOKE_STEPS = 50
SMOKE_ITEMS = 8

_LATER = "is not in this version of wangen; leave it out"
_SMOKE = f"try the job: at most {SMOKE_ITEMS} items"
_DIT = "transformer weights: .safetensors (any shard, fp8 too), .pth, .gguf or a diffusers folder"
_VAE = "VAE weights: Wan2.1_VAE.pth, Wan2.2_VAE.pth, .safetensors or a diffusers folder"
_T5 = "umT5 text encoder weights: .pth, .safetensors (ComfyUI fp8 too), .gguf or a folder"
_TOKENIZER = "tokenizer folder or file (default: found beside or inside the T5 weights)"
_CLIP = "CLIP image encoder weights (Wan 2.1 I2V): .pth, .safetensors or a folder"
_CACHE_TASK = "model profile that the cache is for (default: text-to-video with this VAE)"
_VAE_CACHE = "keep what the VAE remembers of earlier frames in host memory: slower, the same latents"
_FP8_T5 = "hold the text encoder in 8 bits: half the memory of bfloat16, and embeddings that differ a little"
_ON_THE_FLY = "only read with --cache_latents or --cache_latents_to_disk"
_SAMPLES = "samples during training are not in this version: run `wangen generate` on the saved LoRA instead"


def _vae_tile() -> Any:
    return flag(
        "let the VAE work in overlapping squares of this many pixels, a multiple of 64: less memory, not quite the "
        "same latents; 0 takes the picture whole",
        0, pinned=True, names=("tile", "vae_spatial_tile_sample_min_size"), constants={"vae_tiling": "256"},
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DatasetStep(Step):
    """What all steps that read a dataset share."""

    dataset_config: Path = flag("the dataset's TOML file")
    resolution: str = flag("which resolutions of the TOML to use: all, or for example 256,832x480", "all", knob=True)


@dataclass(frozen=True, kw_only=True)
class Check(DatasetStep):
    """Check files, captions, weights and disk before anything starts; needs no GPU and no torch."""

    command: ClassVar[str] = "check"
    module: ClassVar[str] = "wangen.generator.check"

    task: str = flag("model profile that the weights must fit", "t2v-14B", pinned=True, model_choices=True)
    vae: Path | None = flag(_VAE, None)
    t5: Path | None = flag(_T5, None)
    tokenizer: Path | None = flag(_TOKENIZER, None)
    clip: Path | None = flag(_CLIP, None)
    dit: Path | None = flag(_DIT, None)
    dit_high_noise: Path | None = flag("weights of the high-noise expert (Wan 2.2 A14B); --dit is the other", None)
    output_dir: Path | None = flag("folder for LoRAs and reports, checked for write access and free space", None)


@dataclass(frozen=True, kw_only=True)
class CacheStep(DatasetStep):
    """What the two caching steps share."""

    smoke: bool = flag(f"{_SMOKE}; their entries stay for the whole job", False)
    task: str | None = flag(_CACHE_TASK, None, pinned=True, model_choices=True)
    device: str | None = flag("cuda, cuda:1, cpu … (default: cuda when there is one)", None)
    num_workers: int | None = flag("threads that read and decode media (default: 4, on ROCm 1)", None, knob=True)
    skip_existing: bool = flag("keep entries that are valid (the default; --recache encodes again)", True)
    recache: bool = flag("encode every item again", False)
    shard: str | None = flag(
        "encode part i of n (0/4 … 3/4), one process per card or node; auto takes i and n from Slurm's array or from "
        "RANK and WORLD_SIZE; nothing is removed", None,
    )  # fmt: skip
    plain: bool = flag("encode with the libraries' own modules: the same numbers to rounding, slower", False)
    keep_cache: bool = flag("do not remove entries that no item of the dataset needs", False)

    def _smoke_changes(self) -> dict[str, Any]:
        return {**super()._smoke_changes(), "keep_cache": True}


@dataclass(frozen=True, kw_only=True)
class CacheLatents(CacheStep):
    """Encode images and clips with the VAE into the embedding cache."""

    command: ClassVar[str] = "cache_latents"
    module: ClassVar[str] = "wangen.runtime.cache_latents"
    spellings: ClassVar[tuple[str, ...]] = ("wan_cache_latents", "wan_cache_latents.py")
    elsewhere: ClassVar[Mapping[str, str]] = {
        "one_frame": f"one-frame caching {_LATER}",
        "console_width": "--debug_mode writes an HTML page: leave the console's flags out",
        "console_back": "--debug_mode writes an HTML page: leave the console's flags out",
        "console_num_images": "--debug_mode writes an HTML page: leave the console's flags out",
        "disable_cudnn_backend": "not needed: on ROCm the VAE runs in float32 by itself",
        "t5": "T5 weights belong to cache_text: leave --t5 out here",
        "dit": "transformer weights belong to train and generate: leave --dit out here",
    }

    vae: Path = flag(_VAE)
    i2v: bool = flag("image-to-video: also encode the first frame as condition (an I2V --task says the same)", False)
    clip: Path | None = flag(f"{_CLIP}; adds its view of the first frame", None)
    vae_dtype: Dtype | None = flag(
        "precision of the VAE and of the cached latents (default: float16 on CUDA, float32 on CPU and ROCm)",
        None, knob=True, values=DTYPE_VALUES,
    )  # fmt: skip
    clip_dtype: Dtype | None = flag("precision of CLIP (default: float16 on a GPU, float32 on a CPU)", None,
                                    values=DTYPE_VALUES)  # fmt: skip
    debug_mode: Literal["image", "video"] | None = flag(
        "encode nothing: write a contact sheet (HTML) of exactly what would be encoded, as images or as clips", None
    )
    vae_cache_cpu: bool = flag(_VAE_CACHE, False)
    vae_tile: int = _vae_tile()
    batch_size: int | None = flag("largest number of items in one encode (default: the dataset's batch_size)", None)


@dataclass(frozen=True, kw_only=True)
class CacheText(CacheStep):
    """Encode captions with umT5 into the embedding cache."""

    command: ClassVar[str] = "cache_text"
    module: ClassVar[str] = "wangen.runtime.cache_text"
    spellings: ClassVar[tuple[str, ...]] = (
        "wan_cache_text_encoder_outputs",
        "wan_cache_text_encoder_outputs.py",
    )
    elsewhere: ClassVar[Mapping[str, str]] = {
        "vae": "VAE weights belong to cache_latents: leave --vae out here",
        "dit": "transformer weights belong to train and generate: leave --dit out here",
    }

    t5: Path = flag(_T5)
    tokenizer: Path | None = flag(_TOKENIZER, None)
    t5_dtype: Dtype | None = flag(
        "precision of the text encoder and of the cached embeddings (default: bfloat16 on a GPU, float32 on a CPU)",
        None, knob=True, values=DTYPE_VALUES,
    )  # fmt: skip
    fp8_t5: bool = flag(_FP8_T5, False, pinned=True)
    stream_t5: bool = flag(
        "read the text encoder block by block: 1.5 GB of memory are enough (the default; --no_stream_t5 loads it "
        "whole)", True,
    )  # fmt: skip
    batch_size: int = flag("captions per encode with --plain (else each goes at its own length)", 16)


@dataclass(frozen=True, kw_only=True)
class CheckCache(DatasetStep):
    """Say which cache entries are valid, stale, missing or corrupt; fails when training would not find all."""

    command: ClassVar[str] = "check_cache"
    module: ClassVar[str] = "wangen.runtime.check_cache"

    smoke: bool = flag(f"{_SMOKE}, those that training takes under --smoke", False)
    task: str | None = flag(_CACHE_TASK, None, pinned=True, model_choices=True)
    vae: Path | None = flag("judge latents against this VAE", None)
    clip: Path | None = flag("judge CLIP's tokens against this image encoder", None)
    clip_dtype: Dtype | None = flag("judge CLIP's tokens against this precision", None, values=DTYPE_VALUES)
    t5: Path | None = flag("judge text embeddings against this text encoder", None)
    tokenizer: Path | None = flag(_TOKENIZER, None)
    vae_dtype: Dtype | None = flag("judge latents against this precision", None, knob=True, values=DTYPE_VALUES)
    t5_dtype: Dtype | None = flag("judge embeddings against this precision", None, knob=True, values=DTYPE_VALUES)
    vae_tile: int = _vae_tile()
    fp8_t5: bool = flag("judge embeddings of a text encoder in 8 bits", False, pinned=True)
    deep: bool = flag("read every payload and every source again, not the headers alone", False)
    repair: bool = flag("remove corrupt entries and what killed writers left, so that caching makes them anew", False)


@dataclass(frozen=True, kw_only=True)
class Train(DatasetStep):
    """Train a LoRA on the cached latents and text embeddings; run it again to resume."""

    command: ClassVar[str] = "train"
    module: ClassVar[str] = "wangen.runtime.train"
    spellings: ClassVar[tuple[str, ...]] = ("wan_train_network", "wan_train_network.py")
    elsewhere: ClassVar[Mapping[str, str]] = {
        "fp8_base": f"a quantised base {_LATER}",
        "fp8_scaled": f"a quantised base {_LATER}",
        "blocks_to_swap": f"block swap {_LATER}",
        "use_pinned_memory_for_block_swap": f"block swap {_LATER}",
        "block_swap_h2d_only": f"block swap {_LATER}",
        "dit_high_noise": f"training both Wan 2.2 experts in one run {_LATER}",
        "timestep_boundary": f"training both Wan 2.2 experts in one run {_LATER}",
        "offload_inactive_dit": f"training both Wan 2.2 experts in one run {_LATER}",
        "sample_prompts": _SAMPLES,
        "sample_every_n_steps": _SAMPLES,
        "sample_every_n_epochs": _SAMPLES,
        "sample_at_first": _SAMPLES,
        "compile": f"torch.compile {_LATER}",
        "network_args": "use --network_dropout for dropout; patterns and LoRA+ are not in this version",
        "wandb_api_key": "keys do not belong on a command line; this version logs to TensorBoard",
        "lr_scheduler_type": "use --lr_scheduler",
        "split_attn": f"split attention {_LATER}",
    }

    smoke: bool = flag(f"{_SMOKE}, {SMOKE_STEPS} steps from step 0, into the folder smoke of the output folder", False)
    dit: Path = flag(_DIT)
    task: str = flag("model profile", "t2v-14B", pinned=True, model_choices=True)
    output_dir: Path = flag("folder for the LoRA, checkpoints and the report")
    output_name: str = flag("file name of the LoRA without its ending")
    attention: Attention = flag(
        "attention kernel; auto takes the first of flash3, flash, sdpa that runs forward and backward here",
        "auto", pinned=True, knob=True, names=("attn_mode",),
        constants={"sdpa": "sdpa", "flash_attn": "flash", "flash3": "flash3", "xformers": "xformers",
                   "sage_attn": "sage"},
        values={"torch": "sdpa", "flash2": "flash", "sageattn": "sage"},
        refused={"sage": "sage attention has no backward pass and would train nothing: use auto or sdpa"},
    )  # fmt: skip
    network_module: Literal["lora"] = flag("kind of adapter", "lora", values={"networks.lora_wan": "lora"})
    network_dim: int = flag("LoRA rank", 16, pinned=True, knob=True)
    network_alpha: float = flag("LoRA alpha; the adapter is scaled by alpha / rank", 16.0, pinned=True, knob=True)
    network_dropout: float = flag("dropout on the adapter's input, 0 to 1", 0.0, pinned=True)
    network_weights: Path | None = flag("start from this LoRA (ComfyUI, kohya or diffusers layout)", None)
    learning_rate: float = flag("learning rate", 1e-4, pinned=True, knob=True)
    lr_scheduler: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = flag("learning-rate schedule", "constant", pinned=True, knob=True)
    lr_warmup_steps: str = flag(
        "warm-up: steps (100), a share of the run (0.05) or a percentage (5%)", "0", pinned=True
    )
    lr_scheduler_num_cycles: int = flag("restarts of cosine_with_restarts", 1, pinned=True)
    lr_scheduler_power: float = flag("power of polynomial", 1.0, pinned=True)
    optimizer_type: str = flag(
        "AdamW, another class of torch.optim, or a dotted path such as bitsandbytes.optim.AdamW8bit", "AdamW",
        pinned=True, values={"adamw": "AdamW", "": "AdamW", "adamw8bit": "bitsandbytes.optim.AdamW8bit"},
    )  # fmt: skip
    optimizer_args: tuple[str, ...] = flag("key=value for the optimizer, e.g. weight_decay=0.01", (), pinned=True)
    max_grad_norm: float = flag("clip the gradient's norm; 0 switches clipping off", 1.0, pinned=True)
    max_train_epochs: int | None = flag(
        f"epochs; wins over --max_train_steps ({DEFAULT_EPOCHS} when neither is given)", None, knob=True
    )
    max_train_steps: int | None = flag("optimizer steps", None, knob=True)
    gradient_accumulation_steps: int = flag("batches per optimizer step", 1, pinned=True, knob=True)
    gradient_checkpointing: bool = flag("recompute each block in the backward pass to save memory", True, pinned=True)
    gradient_checkpointing_cpu_offload: bool = flag("park what checkpointing keeps in host memory", False)
    mixed_precision: Literal["bf16", "no"] = flag(
        "bf16, or no for float32", "bf16", pinned=True, knob=True, values={"fp32": "no"},
        refused={"fp16": "use bf16 (weights of any precision are converted on loading) or no"},
    )  # fmt: skip
    timestep_sampling: TimestepSampling = flag(
        "how timesteps are drawn", "shift", pinned=True, knob=True, values={"logit-normal": "logit_normal"},
        refused={"sigma": "use uniform or logit_normal; musubi-tuner's sigma inverts min_timestep and max_timestep"},
    )  # fmt: skip
    discrete_flow_shift: float = flag("shift of timestep_sampling shift", 5.0, pinned=True, knob=True)
    sigmoid_scale: float = flag("scale of the normal draw in sigmoid and shift", 1.0, pinned=True)
    logit_mean: float = flag("mean of logit_normal", 0.0, pinned=True)
    logit_std: float = flag("standard deviation of logit_normal", 1.0, pinned=True)
    min_timestep: int = flag("lowest timestep, 0 is clean", 0, pinned=True)
    max_timestep: int = flag("highest timestep, 1000 is pure noise", 1000, pinned=True)
    preserve_distribution_shape: bool = flag(
        "cut the distribution to [min, max] instead of squeezing it into it", False, pinned=True
    )
    weighting_scheme: Literal["none", "sigma_sqrt", "cosmap"] = flag("loss weight by timestep", "none", pinned=True)
    seed: int = flag("seed of order, noise, timesteps, dropout and initial weights", 42, pinned=True, knob=True)
    max_data_loader_n_workers: int = flag("threads that read cache entries", 4, knob=True)
    cache_latents: bool = flag("encode what the cache lacks before training and keep it in memory", False)
    cache_latents_to_disk: bool = flag("encode what the cache lacks before training and keep it in the cache", False)
    vae: Path | None = flag(f"{_VAE}; {_ON_THE_FLY}", None)
    vae_dtype: Dtype | None = flag(f"precision of the VAE; {_ON_THE_FLY}", None, values=DTYPE_VALUES)
    vae_cache_cpu: bool = flag(f"{_VAE_CACHE}; {_ON_THE_FLY}", False)
    clip: Path | None = flag(f"{_CLIP}; {_ON_THE_FLY}", None)
    t5: Path | None = flag(f"{_T5}; {_ON_THE_FLY}", None)
    tokenizer: Path | None = flag(f"{_TOKENIZER}; {_ON_THE_FLY}", None)
    t5_dtype: Dtype | None = flag(f"precision of the text encoder; {_ON_THE_FLY}", None, values=DTYPE_VALUES)
    fp8_t5: bool = flag(f"{_FP8_T5}; {_ON_THE_FLY}", False)
    caption_dropout: float = flag("share of the draws that see the empty prompt, 0 to 1", 0.0, pinned=True)
    persistent_data_loader_workers: bool = flag("accepted; the reading threads always live through the run", False)
    save_every_n_epochs: int | None = flag("save the LoRA every N epochs", None, knob=True)
    save_every_n_steps: int | None = flag("save the LoRA every N steps", None, knob=True)
    save_last_n_epochs: int | None = flag("keep LoRAs of the last N epochs only", None)
    save_last_n_steps: int | None = flag("keep LoRAs of the last N steps only", None)
    save_state: bool = flag("keep the training state of every saved LoRA, not the newest alone", False)
    save_state_on_train_end: bool = flag("accepted; the newest training state is always kept", False)
    save_state_every_n_steps: int | None = flag(
        "write the training state every N steps (default: at every saved LoRA and every 10 minutes)", None
    )
    save_precision: Dtype = flag("precision of the LoRA file", "float32", pinned=True, values=DTYPE_VALUES)
    lora_layout: tuple[Literal["comfyui", "kohya", "diffusers"], ...] = flag(
        "layouts to save the LoRA in; every further one gets its name as a suffix", ("comfyui",), pinned=True
    )
    logging_dir: Path | None = flag("TensorBoard folder (default: logs inside the output folder)", None)
    log_with: Literal["tensorboard", "none"] = flag("experiment log", "tensorboard")
    training_comment: str | None = flag("comment stored in the LoRA's header", None)
    resume: Path | None = flag("start from this training state instead of the newest", None)
    fresh: bool = flag("start again from step 0 and overwrite the earlier run", False)
    resume_changed: bool = flag("resume although settings that change the result differ", False)
    device: str | None = flag("cuda, cuda:1, cpu … (default: cuda when there is one)", None)

    def _smoke_changes(self) -> dict[str, Any]:
        return {
            **super()._smoke_changes(),
            "output_dir": self.output_dir / SMOKE,
            "max_train_steps": SMOKE_STEPS,
            "max_train_epochs": None,
            "fresh": True,
        }


@dataclass(frozen=True, kw_only=True)
class Generate(Step):
    """Sample a video or image from a prompt, with or without LoRAs."""

    command: ClassVar[str] = "generate"
    module: ClassVar[str] = "wangen.runtime.generate"
    spellings: ClassVar[tuple[str, ...]] = ("wan_generate_video", "wan_generate_video.py")
    elsewhere: ClassVar[Mapping[str, str]] = {
        "dit_high_noise": f"sampling with both Wan 2.2 experts {_LATER}",
        "lora_weight_high_noise": f"sampling with both Wan 2.2 experts {_LATER}",
        "lora_multiplier_high_noise": f"sampling with both Wan 2.2 experts {_LATER}",
        "guidance_scale_high_noise": f"sampling with both Wan 2.2 experts {_LATER}",
        "timestep_boundary": f"sampling with both Wan 2.2 experts {_LATER}",
        "offload_inactive_dit": f"sampling with both Wan 2.2 experts {_LATER}",
        "image_path": f"image-to-video sampling {_LATER}",
        "clip": f"image-to-video sampling {_LATER}",
        "fp8": f"quantised weights {_LATER}",
        "fp8_scaled": f"quantised weights {_LATER}",
        "blocks_to_swap": f"block swap {_LATER}",
        "compile": f"torch.compile {_LATER}",
        "output_type": "the ending of --save_path decides: .mp4 for a video, .png for one frame",
    }

    dit: Path = flag(_DIT)
    vae: Path = flag(_VAE)
    t5: Path = flag(_T5)
    tokenizer: Path | None = flag(_TOKENIZER, None)
    task: str = flag("model profile", "t2v-14B", pinned=True, model_choices=True)
    prompt: str = flag("what to show")
    negative_prompt: str = flag("what to avoid; used when --guidance_scale is above 1", "", pinned=True)
    lora_weight: tuple[Path, ...] = flag("LoRA files (ComfyUI, kohya or diffusers layout)", ())
    lora_multiplier: tuple[float, ...] = flag("strength of each LoRA (default: 1)", ())
    video_size: tuple[int, int] = flag("height and width in pixels, multiples of 16", (256, 256), pinned=True)
    video_length: int = flag("number of frames, 4n+1; 1 makes an image", 81, pinned=True)
    fps: int = flag("frames per second of the file", 16, pinned=True)
    infer_steps: int = flag("sampling steps", 50, pinned=True)
    guidance_scale: float = flag("classifier-free guidance; 1 switches it off", 5.0, pinned=True)
    flow_shift: float = flag("shift of the sampling schedule", 5.0, pinned=True)
    sample_solver: Literal["unipc", "euler"] = flag("sampler", "unipc", pinned=True, values={"vanilla": "euler"})
    seed: int = flag("seed of the initial noise, which is always drawn on the CPU", 42, pinned=True)
    cpu_noise: bool = flag("accepted; noise is always drawn on the CPU", False)
    save_path: Path = flag("the .mp4 or .png to write, or a folder")
    attention: Attention = flag(
        "attention kernel; auto takes the first of flash3, flash, sdpa that runs here", "auto", pinned=True,
        names=("attn_mode",),
        constants={"sdpa": "sdpa", "flash_attn": "flash", "flash3": "flash3", "xformers": "xformers",
                   "sage_attn": "sage"},
        values={"torch": "sdpa", "flash2": "flash", "sageattn": "sage"},
    )  # fmt: skip
    dtype: Dtype | None = flag("precision of the transformer (default: bfloat16 on CUDA, float32 on CPU)", None,
                               values=DTYPE_VALUES)  # fmt: skip
    vae_dtype: Dtype | None = flag(
        "precision of the VAE (default: bfloat16 on CUDA, float32 on CPU and ROCm)", None, values=DTYPE_VALUES
    )
    vae_cache_cpu: bool = flag(_VAE_CACHE, False)
    vae_tile: int = _vae_tile()
    fp8_t5: bool = flag(_FP8_T5, False, pinned=True)
    device: str | None = flag("cuda, cuda:1, cpu … (default: cuda when there is one)", None)


@dataclass(frozen=True, kw_only=True)
class Export(Step):
    """Convert a LoRA to other layouts and dtypes, merge LoRAs into a checkpoint, or print what a header says."""

    command: ClassVar[str] = "export"
    module: ClassVar[str] = "wangen.runtime.export"
    spellings: ClassVar[tuple[str, ...]] = ("convert_lora", "convert_lora.py", "merge_lora", "merge_lora.py")
    elsewhere: ClassVar[Mapping[str, str]] = {
        "diffusers_prefix": "every known prefix is read; --layout says which one is written",
        "device": "export computes on the CPU: leave --device out",
    }

    lora_weight: tuple[Path, ...] = flag(
        "LoRA to convert (any layout; a file, or a folder of peft or diffusers), or LoRAs to merge", (),
        names=("input",),
    )  # fmt: skip
    lora_multiplier: tuple[float, ...] = flag("strength of each merged LoRA, one number per LoRA (default: 1)", ())
    dit: Path | None = flag("merge into this transformer: any format, any shard, or a diffusers folder", None)
    save_path: Path | None = flag(
        "the .safetensors to write; with --layout peft also a folder, with --metadata a .json; a LoRA that is there is "
        "replaced, by merging a merged file; export.report.json appears beside it",
        None, names=("output", "save_merged_model"),
    )  # fmt: skip
    overwrite: bool = flag("replace whatever else is at --save_path", False)
    layout: tuple[Literal["comfyui", "kohya", "diffusers", "peft"], ...] = flag(
        "layouts to convert to (comfyui: read by ComfyUI, diffusers and most trainers; kohya: musubi-tuner and "
        "ComfyUI; diffusers; peft); every further one gets its name as a suffix", ("comfyui",), names=("target",),
        values={"default": "kohya", "other": "comfyui"},
    )  # fmt: skip
    dtype: ExportDtype | None = flag(
        "precision of the file; fp8_scaled for a merged checkpoint only (default: as in the file read, bfloat16 for "
        "GGUF)", None, names=("save_precision",), values={**DTYPE_VALUES, "fp8": "float8_e4m3fn"},
    )  # fmt: skip
    metadata: bool = flag("print what the header of the LoRA or of --dit says, as JSON; no weight is read", False)


STEPS: tuple[type[Step], ...] = (Check, CacheLatents, CacheText, CheckCache, Train, Generate, Export)


def find_step(name: str) -> type[Step] | None:
    """The step with this command name or spelling; dashes and underscores are the same.

    >>> find_step("cache-latents").__name__, find_step("wan_train_network.py").__name__, find_step("bake")
    ('CacheLatents', 'Train', None)
    """
    wanted = name.replace("-", "_")
    return next((step for step in STEPS if wanted in (step.command, *step.spellings)), None)
