"""The training step of the table: what is trained, on what, how, and what it leaves behind."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from wangen.generator.errors import UsageError
from wangen.generator.launch import asks_for_several, launch, machines, require_together
from wangen.generator.step_parts import (
    CLIP,
    DECODER,
    DEFAULT_EPOCHS,
    DIT,
    DTYPE_VALUES,
    FP8_T5,
    SMOKE_ITEMS,
    SMOKE_STEPS,
    T5,
    TEXT_ENCODER,
    TOKENIZER,
    TRY,
    VAE,
    VAE_CACHE,
    Attention,
    DatasetStep,
    Decoder,
    Dtype,
)
from wangen.generator.table import SMOKE, flag
from wangen.generator.train_values import ELSEWHERE, OFF_AT_ZERO, OPTIMIZERS, LrScheduler, Quantize, TimestepSampling

_ENCODES = "read by --cache_mode, --cache_latents, --cache_latents_to_disk and --sample_prompts"
_DECODES = "read by --cache_mode, --cache_latents, --cache_latents_to_disk, --sample_prompts and --sample_continuations"
_FLY = "read by --cache_mode, --cache_latents and --cache_latents_to_disk"
_MEMORY = "default: as --vram says, else"
_OTHER_MODEL = "it is made for another model: use shift, or flux_shift for a shift that grows with the picture"
_BLOCK_SWAP = "accepted: frozen blocks are always only copied to the device, from pinned memory"


@dataclass(frozen=True, kw_only=True)
class Train(DatasetStep):
    """Train a LoRA on the cached latents and text embeddings; run it again to resume."""

    command: ClassVar[str] = "train"
    module: ClassVar[str] = "wangen.runtime.train"
    spellings: ClassVar[tuple[str, ...]] = (
        "wan_train_network", "wan_train_network.py", "qwen_image_train_network", "qwen_image_train_network.py",
    )  # fmt: skip
    of_profile: ClassVar[tuple[str, ...]] = ("learning_rate", "timestep_sampling", "discrete_flow_shift")
    at_most_one: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("validation_items", "validation_config"), ("max_train_epochs", "max_train_steps"),
    )  # fmt: skip
    elsewhere: ClassVar[Mapping[str, str]] = ELSEWHERE
    off_at_zero: ClassVar[tuple[str, ...]] = OFF_AT_ZERO

    smoke: bool = flag(f"{TRY}, {SMOKE_STEPS} steps from step 0, into the folder smoke of the output folder", False)

    # What is trained.
    dit: Path | None = flag(f"{DIT}; of two experts the one for low noise", None)
    dit_high_noise: Path | None = flag("weights of the high-noise expert (Wan 2.2 A14B)", None)
    task: str = flag("model profile", "t2v-14B", pinned=True, model_choices=True)
    experts: Literal["both", "high", "low"] = flag("which of two experts to train", "both", knob=True)
    timestep_boundary: float | None = flag(
        "timestep from which on the high-noise expert works, 0.875 or 875 (default: the model's)", None, pinned=True
    )
    high_noise_share: float | None = flag(
        "share of the steps that train the high-noise expert (default: its share of the drawn timesteps)", None,
        pinned=True,
    )  # fmt: skip
    expert_turn_steps: int = flag("with two experts: steps before the other one's turn", 10)
    offload_inactive_dit: bool = flag(
        "the idle expert waits in host memory (the default; --no_offload_inactive_dit keeps both on the device)", True
    )
    condition_frames: int | None = flag(
        "TI2V-5B: so many first frames of a clip are given, 4n+1, and 0 for text alone (default: 1)", None, pinned=True
    )
    condition_dropout: float = flag("share of the draws that are not given these frames, 0 to 1", 0.0, pinned=True)
    force_v2_1_time_embedding: bool = flag("accepted; a timestep that all tokens share is always embedded once", False)
    output_dir: Path = flag("folder for the LoRA, checkpoints and the report", names=("output",))
    output_name: str = flag("file name of the LoRA without its ending")

    # The adapter.
    train_mode: Literal["lora", "full"] = flag("an adapter, or every weight of the transformer", "lora", pinned=True)
    network_module: Literal["lora", "loha", "lokr"] = flag(
        "kind of adapter", "lora", pinned=True,
        values={"networks.lora_wan": "lora", "networks.lora_qwen_image": "lora", "networks.lora": "lora",
                "networks.loha": "loha", "networks.lokr": "lokr"},
        refused={"lycoris.kohya": "use lora, loha or lokr"},
    )  # fmt: skip
    network_dim: int = flag("rank of the adapter", 16, pinned=True, knob=True)
    network_alpha: float = flag("alpha; the adapter is scaled by alpha / rank", 16.0, pinned=True, knob=True)
    network_dropout: float = flag("dropout on the adapter's input, at least 0 and below 1", 0.0, pinned=True)
    rslora: bool = flag("rank-stabilised LoRA: scaled by alpha / sqrt(rank)", False, pinned=True)
    dora: bool = flag("weight-decomposed LoRA (DoRA)", False, pinned=True)
    lokr_factor: int = flag("LoKr's first factor, or its next lower divisor; -1: the most square", -1, pinned=True)
    lora_targets: Literal["all", "all_linear", "attention", "self_attention", "cross_attention", "ffn"] = flag(
        "which layers of blocks get an adapter; all_linear: also Qwen-Image's img_mod and txt_mod", "all", pinned=True
    )
    include_patterns: tuple[str, ...] = flag("only layers whose name one of these regular expressions finds", (),
                                             pinned=True)  # fmt: skip
    exclude_patterns: tuple[str, ...] = flag("no layer whose name one of these regular expressions finds", (),
                                             pinned=True)  # fmt: skip
    network_args: tuple[str, ...] = flag(
        "musubi-tuner's key=value: include_patterns, exclude_patterns, loraplus_lr_ratio, use_rslora, use_dora, of "
        "loha and lokr rank_dropout and module_dropout, of lokr factor and decompose_both", (), pinned=True,
    )  # fmt: skip
    network_weights: Path | None = flag(
        "start from this adapter (ComfyUI, kohya, diffusers or peft layout), or a run's folder: its best or last",
        None, names=("lora_weights",),
    )  # fmt: skip
    network_weights_high_noise: Path | None = flag(
        "the high-noise expert starts from this adapter (default: its own in a folder of --network_weights)", None
    )
    dim_from_weights: bool = flag("take rank and alpha from --network_weights", False, pinned=True)
    base_weights: tuple[Path, ...] = flag("LoRAs that are merged into the frozen base before training", ())
    base_weights_multiplier: tuple[float, ...] = flag("strength of each of them (default: 1)", (), pinned=True)
    scale_weight_norms: float | None = flag(
        "after every step shrink what an adapter adds to a weight (with --dora its B A) to at most this norm",
        None, pinned=True,
    )  # fmt: skip

    # Optimizer and schedule.
    learning_rate: float = flag("learning rate", 1e-4, pinned=True, knob=True)
    loraplus_lr_ratio: float | None = flag(
        "LoRA+: learning rate of B over that of A, for example 16", None, pinned=True
    )
    lr_scheduler: LrScheduler = flag("learning-rate schedule", "constant", pinned=True, knob=True)
    lr_warmup_steps: str = flag(
        "warm-up: steps (100), a share of the run (0.05) or a percentage (5%)", "0", pinned=True
    )
    lr_decay_steps: str = flag("decay of warmup_stable_decay: steps, a share or a percentage", "0", pinned=True)
    lr_scheduler_num_cycles: int = flag(
        "cycles of cosine_with_restarts: 2 restart once; half waves of cosine_with_min_lr and warmup_stable_decay: "
        "1 goes down, 2 come up again", 1, pinned=True,
    )  # fmt: skip
    lr_scheduler_power: float = flag("power of polynomial", 1.0, pinned=True)
    lr_scheduler_min_lr_ratio: float = flag(
        "lowest learning rate over the highest, of cosine_with_min_lr, warmup_stable_decay and rex", 0.0, pinned=True
    )
    lr_scheduler_timescale: int | None = flag(
        "time scale of inverse_sqrt (default: the warm-up, or 10000 without one)", None, pinned=True
    )
    optimizer_type: str = flag(
        "AdamW, AdamW8bit (bitsandbytes or torchao), Adafactor, another class of torch.optim, or a dotted path",
        "AdamW", pinned=True, knob=True, values=OPTIMIZERS,
    )  # fmt: skip
    optimizer_args: tuple[str, ...] = flag("key=value for the optimizer, e.g. weight_decay=0.01", (), pinned=True)
    max_grad_norm: float = flag("clip the gradient's norm; 0 switches clipping off", 1.0, pinned=True)
    ema_decay: float | None = flag("keep an average of the adapter too, with this decay (0.99), saved as -ema", None,
                                   pinned=True)  # fmt: skip
    max_train_epochs: int | None = flag(
        f"epochs; wins over --max_train_steps ({DEFAULT_EPOCHS} when neither is given)", None, knob=True,
        names=("num_epochs",),
    )  # fmt: skip
    max_train_steps: int | None = flag("optimizer steps", None, knob=True, names=("max_steps",))
    gradient_accumulation_steps: int = flag("batches per optimizer step", 1, pinned=True, knob=True)
    mixed_precision: Literal["bf16", "no"] = flag(
        "bf16, or no for float32", "bf16", pinned=True, knob=True, values={"fp32": "no"},
        refused={"fp16": "use bf16 (weights of any precision are converted on loading) or no"},
    )  # fmt: skip

    # Timesteps and loss.
    timestep_sampling: TimestepSampling = flag(
        "how timesteps are drawn", "shift", pinned=True, knob=True, values={"logit-normal": "logit_normal"},
        refused={"flux2_shift": _OTHER_MODEL, "krea2_shift": _OTHER_MODEL, "ideogram4_shift": _OTHER_MODEL},
    )  # fmt: skip
    discrete_flow_shift: float = flag("shift of timestep_sampling shift", 5.0, pinned=True, knob=True)
    sigmoid_scale: float = flag("scale of the normal draw in sigmoid and the shifts", 1.0, pinned=True)
    logit_mean: float = flag("mean of logit_normal and logsnr", 0.0, pinned=True)
    logit_std: float = flag("standard deviation of logit_normal and logsnr", 1.0, pinned=True)
    mode_scale: float = flag("scale of weighting_scheme mode", 1.29, pinned=True)
    min_timestep: int = flag("lowest timestep, 0 is clean", 0, pinned=True)
    max_timestep: int = flag("highest timestep, 1000 is pure noise", 1000, pinned=True)
    preserve_distribution_shape: bool = flag(
        "cut the distribution to [min, max] instead of squeezing it into it", False, pinned=True
    )
    num_timestep_buckets: int | None = flag(
        "stratified: of so many draws in a row every one falls into another part of the distribution", None, pinned=True
    )
    show_timesteps: Literal["console", "image"] | None = flag(
        "draw the distribution of the timesteps, for each expert, and train nothing", None
    )
    weighting_scheme: Literal["none", "sigma_sqrt", "cosmap", "logit_normal", "mode"] = flag(
        "loss weight by timestep; logit_normal and mode are densities of timestep_sampling sigma", "none", pinned=True
    )
    noise_offset: float = flag("constant noise per channel, in parts of the noise, for example 0.05", 0.0, pinned=True)
    caption_dropout: float = flag("share of the draws that see the empty prompt, 0 to 1", 0.0, pinned=True)
    prior_loss_weight: float = flag("weight of the loss on regularisation sets (is_reg = true in the TOML)", 1.0,
                                    pinned=True)  # fmt: skip
    seed: int = flag("seed of order, noise, timesteps, dropout and initial weights", 42, pinned=True, knob=True)

    # Memory.
    vram: Literal["8", "12", "16", "24", "auto"] | None = flag(
        "gigabytes of the card: take the model's preset, or less where batches are small; given flags win", None
    )
    quantize: Quantize | None = flag(
        f"hold the frozen blocks in 8 or 4 bits ({_MEMORY} none)", None, pinned=True,
        constants={"fp8_base": "fp8", "fp8_scaled": "fp8"},
    )  # fmt: skip
    blocks_to_swap: int | None = flag(
        f"so many blocks wait in host memory and come when they are needed ({_MEMORY} 0)", None, knob=True
    )
    block_swap_ring_size: int = flag("device buffers that swapped blocks come into", 2)
    use_pinned_memory_for_block_swap: bool = flag(_BLOCK_SWAP, False)
    block_swap_h2d_only: bool = flag(_BLOCK_SWAP, False)
    checkpointing: Literal["none", "full", "selective"] | None = flag(
        f"recompute in the backward pass: nothing, every block, or all but attention ({_MEMORY} full)", None,
        pinned=True, names=(), constants={"gradient_checkpointing": "full", "no_gradient_checkpointing": "none"},
    )  # fmt: skip
    checkpointing_free_blocks: int | None = flag(f"so many of the last blocks are not recomputed ({_MEMORY} 0)", None)
    gradient_checkpointing_cpu_offload: bool | None = flag(
        f"park what checkpointing keeps in host memory ({_MEMORY} no)", None, pinned=True
    )
    split_attn: bool = flag("attention for one item of the batch at a time", False, pinned=True)

    # Speed.
    attention: Attention = flag(
        "attention kernel; auto takes the fastest of flash3, flash, sdpa that runs forward and backward here; sage "
        "runs forward only, with the exact gradient of sdpa",
        "auto", pinned=True, knob=True, names=("attn_mode",),
        constants={"sdpa": "sdpa", "flash_attn": "flash", "flash3": "flash3", "xformers": "xformers",
                   "sage_attn": "sage"},
        values={"torch": "sdpa", "flash2": "flash", "sageattn": "sage"},
    )  # fmt: skip
    compile: bool = flag("torch.compile for whole blocks, one graph for each shape; where that cannot be, for "
                         "their norms, rotations and gates", False, pinned=True)  # fmt: skip
    cuda_graphs: bool = flag("replay the kernels of small steps (pictures, short clips) as CUDA graphs where memory "
                             "allows: the same numbers sooner", True)  # fmt: skip
    plain: bool = flag("train through the library's own modules: the same numbers to rounding, slower", False,
                       pinned=True)  # fmt: skip
    cuda_allow_tf32: bool = flag("let float32 products round their operands to TF32", False, pinned=True)
    pack: bool = flag(
        "the batches of a step (see --gradient_accumulation_steps) run as one sequence, whatever their shapes, but for "
        "those whose first frames are given", False, pinned=True,
    )  # fmt: skip
    max_data_loader_n_workers: int = flag(
        "threads that read cache entries; 0 reads in the training thread", 4, knob=True
    )
    persistent_data_loader_workers: bool = flag("accepted; the reading threads always live through the run", False)
    disable_numpy_memmap: bool = flag("accepted; weights are read without numpy", False)
    img_in_txt_in_offloading: bool = flag("accepted; it is HunyuanVideo's and changes nothing here", False)
    profile: bool = flag("write one torch trace of a few steps into the output folder", False)
    deterministic: bool = flag("on a GPU: a run that was resumed ends with the same bytes; slower", False)
    peak_tflops: float | None = flag("the device's speed in TFLOP/s, for the log's MFU (default: of known cards)", None)
    device: str | None = flag("cuda, cuda:1, cpu … (default: cuda when there is one)", None)

    # Several GPUs.
    gpus: str = flag("GPUs of this machine that train together, one process each: a number, or auto for all that there "
                     "are; each step's batches are shared out (several machines: srun with one task on each, or "
                     "torchrun)", "1",
                     names=("num_processes", "nproc_per_node"))  # fmt: skip
    parallel: Literal["auto", "ddp", "fsdp", "hsdp"] = flag(
        "how several processes hold the model: ddp each a copy, fsdp in parts over all (the frozen weights; with "
        "--train_mode full weights, gradients, optimizer), hsdp in parts within each machine; auto: ddp where a copy "
        "fits", "auto"
    )  # fmt: skip
    max_restarts: int = flag("with --gpus: how often processes that failed are started again, from the last state", 0)

    # Encoding what the cache lacks, and samples.
    cache_mode: Literal["cached", "auto", "realtime"] = flag(
        "cached trains on the cache alone, and encoders are never loaded; auto encodes first what it lacks, or has of "
        "other weights than --vae and --t5, as --cache_latents does; realtime encodes every item each time it is "
        "drawn, without a cache", "cached",
    )  # fmt: skip
    cache_latents: bool = flag("encode what the cache lacks before training and keep it in memory", False)
    cache_latents_to_disk: bool = flag("encode what the cache lacks before training and keep it in the cache", False)
    vae: Path | None = flag(f"{VAE}; {_DECODES}", None)
    vae_dtype: Dtype | None = flag(f"precision of the VAE; {_DECODES}", None, knob=True, values=DTYPE_VALUES)
    vae_cache_cpu: bool = flag(f"{VAE_CACHE}; {_DECODES}", False)
    decoder: Decoder | None = flag(f"{DECODER} (default: as for the entries that are there, else pyav); {_FLY}", None)
    vae_device: str | None = flag(f"where the VAE encodes (default: --device); {_FLY}", None)
    clip: Path | None = flag(f"{CLIP}; {_ENCODES}", None)
    t5: Path | None = flag(f"{T5}; {_ENCODES}", None, names=TEXT_ENCODER)
    tokenizer: Path | None = flag(f"{TOKENIZER}; {_ENCODES}", None)
    t5_dtype: Dtype | None = flag(f"precision of the text encoder; {_ENCODES}", None, knob=True, values=DTYPE_VALUES)
    fp8_t5: bool = flag(f"{FP8_T5}; {_ENCODES}", False, names=("fp8_vl",))
    text_encoder_device: str | None = flag(f"where the text encoder works (default: --device); {_FLY}", None)

    # The truth while it runs.
    validation_items: int = flag("so many items of the dataset are held out for validation", 0, pinned=True, knob=True)
    validation_config: Path | None = flag(
        "a dataset TOML or a manifest that is held out for validation instead", None, names=("val_manifest",)
    )
    validation_timesteps: int = flag("timesteps at which every held-out item is judged", 8)
    validate_every_n_steps: int | None = flag("steps between two validations (default: once an epoch)", None, knob=True)
    keep_best: bool = flag("keep the LoRA, or the --ema_decay average, with the lowest validation loss as -best", False)
    sample_prompts: Path | None = flag(
        "samples on the way: a prompt file, .txt (a prompt per line, then --w --h --f --d --s …), .toml or .json", None
    )
    sample_continuations: int = flag(
        "so many held-out clips are continued from their --condition_frames whenever samples are due: videos beside "
        "their source, PSNR and SSIM of each frame (TI2V-5B)", 0,
    )  # fmt: skip
    continuation_guidance: float = flag(
        "guidance of --sample_continuations against the empty prompt and, with --condition_dropout, against given "
        "frames that are as noisy as the others; 1 is none", 1.0,
    )  # fmt: skip
    continuation_steps: int | None = flag("sampler steps of --sample_continuations (default: the model's)", None)
    sample_every_n_steps: int | None = flag("steps between two samples", None, knob=True)
    sample_every_n_epochs: int | None = flag("epochs between two samples", None, knob=True)
    sample_at_first: bool = flag("also sample before the first step", False)
    logging_dir: Path | None = flag("folder of the experiment log (default: logs inside the output folder)", None)
    log_with: tuple[Literal["tensorboard", "wandb", "mlflow", "none"], ...] = flag(
        "experiment logs, one or more; metrics.jsonl is always written", ("tensorboard",),
        refused={"all": "name them: --log_with tensorboard wandb"},
    )  # fmt: skip
    log_tracker_name: str | None = flag("project in wandb, experiment in mlflow (default: wangen)", None)
    wandb_run_name: str | None = flag("name of the run in wandb (default: --output_name)", None)

    # Saving and resuming.
    save_every_n_epochs: int | None = flag("save the LoRA every N epochs", None, knob=True)
    save_every_n_steps: int | None = flag("save the LoRA every N steps", None, knob=True, names=("save_steps",))
    save_last_n_epochs: int | None = flag("keep the last N of the LoRAs of --save_every_n_epochs only", None)
    save_last_n_steps: int | None = flag("of --save_every_n_steps keep only LoRAs at most N steps old", None)
    keep_last: int | None = flag("of the LoRAs saved on the way keep the last N only", None)
    save_state: bool = flag("keep the training state of every saved LoRA, not the newest alone", False)
    save_last_n_epochs_state: int | None = flag(
        "with --save_state: so many states instead (default: --save_last_n_epochs)", None
    )
    save_last_n_steps_state: int | None = flag(
        "with --save_state: their states at most N steps old instead (default: --save_last_n_steps)", None
    )
    save_state_on_train_end: bool = flag("accepted; the newest training state is always kept", False)
    save_state_every_n_steps: int | None = flag("write the training state every N steps", None)
    save_state_every_n_minutes: float = flag(
        "write the training state every N minutes (and with every saved LoRA, and at ends of epochs)", 10.0
    )
    async_save: bool = flag(
        "go on training while a state is written (of weights in parts: --train_mode full with fsdp or hsdp)", False
    )
    save_precision: Dtype = flag("precision of the saved file", "float32", pinned=True, values=DTYPE_VALUES)
    lora_layout: tuple[Literal["comfyui", "kohya", "diffusers"], ...] = flag(
        "layouts to save the LoRA in; every further one gets its name as a suffix", ("comfyui",), pinned=True
    )
    no_metadata: bool = flag("store only the least, and --metadata_*, in the LoRA's header", False)
    training_comment: str | None = flag("comment stored in the LoRA's header", None)
    metadata_title: str | None = flag("title stored in the LoRA's header (modelspec.title)", None)
    metadata_author: str | None = flag("author stored in the LoRA's header (modelspec.author)", None)
    metadata_description: str | None = flag("description stored in the LoRA's header (modelspec.description)", None)
    metadata_license: str | None = flag("licence stored in the LoRA's header (modelspec.license)", None)
    metadata_tags: str | None = flag("tags stored in the LoRA's header (modelspec.tags)", None)
    resume: Path | None = flag("start from this training state instead of the newest", None)
    fresh: bool = flag("start again from step 0 and overwrite the earlier run", False)
    resume_changed: bool = flag("resume although settings that change the result differ", False)

    @property
    def leads(self) -> bool:
        """Whether it is the first of the processes that train together, and not the one that only starts them.

        Raises:
            UsageError: the processes would not train together.
        """
        return not self.starts_processes and launch().rank == 0

    @property
    def starts_processes(self) -> bool:
        """Whether others do the work: `--gpus` asks for several, or a Slurm step runs this on several machines; not
        where torchrun has started this one, nor in a `--smoke`.

        Raises:
            UsageError: `--gpus` is no number of them, this is native Windows, or a launcher started copies.
        """
        if self.smoke or (not asks_for_several(self.gpus) and (os.environ.get("WORLD_SIZE") or machines() == 1)):
            return False
        if os.environ.get("WORLD_SIZE"):
            raise UsageError("--gpus under torchrun, which has started the processes already", cure="leave it out")
        machines()
        require_together(sys.platform)
        return True

    def _smoke_changes(self) -> dict[str, Any]:
        """So that a try takes every line that the whole job takes, whose parts may be longer than the try."""
        changes = {
            **super()._smoke_changes(),
            "output_dir": self.output_dir / SMOKE,
            "logging_dir": self.logging_dir and self.logging_dir / SMOKE,
            "max_train_steps": SMOKE_STEPS,
            "max_train_epochs": None,
            "fresh": True,
            "resume": None,
            "validation_items": min(self.validation_items, SMOKE_ITEMS // 2),
            "sample_continuations": min(self.sample_continuations, 1),
        }
        if self.high_noise_share is not None and 0 < self.high_noise_share < 1:
            changes["high_noise_share"] = min(max(self.high_noise_share, 1 / SMOKE_STEPS), 1 - 1 / SMOKE_STEPS)
        if self.lr_scheduler == "warmup_stable_decay":
            changes |= {"lr_warmup_steps": _as_steps(self.lr_warmup_steps, "0"),
                        "lr_decay_steps": _as_steps(self.lr_decay_steps, "1")}  # fmt: skip
        return changes


def _as_steps(text: str, steps: str) -> str:
    """Other steps for a part of the run, where a part is given; what is no number stays, to be refused."""
    try:
        return steps if float(text.removesuffix("%")) > 0 else text
    except ValueError:
        return text
