"""THE TABLE: one frozen dataclass per step, one field per flag.

Every reader is generic: the click command, the script line (`Step.argv`), the `--config_file` TOML, `docs/flags.md`
and the typed `run(options)` of the runtime. Adding a flag is adding a field here and using it in the runtime.
`table.py` says what a field may be.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from wangen.generator.caption_step import Caption as Caption
from wangen.generator.errors import UsageError
from wangen.generator.evaluate_step import Evaluate as Evaluate
from wangen.generator.generate_step import Generate as Generate
from wangen.generator.launch import asks_for_several, launch
from wangen.generator.prepare_steps import Preprocess as Preprocess
from wangen.generator.prepare_steps import WorldModel as WorldModel
from wangen.generator.report_steps import MakeReport as MakeReport
from wangen.generator.report_steps import Watch as Watch
from wangen.generator.step_parts import (
    CACHE_TASK,
    CLIP,
    DECODER,
    DIT,
    DTYPE_VALUES,
    FP8_T5,
    LATER,
    MODEL_VERSION,
    T5,
    TEXT_ENCODER,
    TOKENIZER,
    TRY,
    VAE,
    VAE_CACHE,
    DatasetStep,
    Decoder,
    Dtype,
    ExportDtype,
    vae_tile,
)
from wangen.generator.table import REPORT, Step, flag
from wangen.generator.train_step import Train as Train


@dataclass(frozen=True, kw_only=True)
class Check(DatasetStep):
    """Check files, captions, weights and disk before anything starts; needs no GPU."""

    command: ClassVar[str] = "check"
    module: ClassVar[str] = "wangen.generator.check"

    task: str = flag("model profile that the weights must fit", "t2v-14B", pinned=True, model_choices=True)
    vae: Path | None = flag(VAE, None)
    t5: Path | None = flag(T5, None, names=TEXT_ENCODER)
    tokenizer: Path | None = flag(TOKENIZER, None)
    clip: Path | None = flag(CLIP, None)
    dit: Path | None = flag(DIT, None)
    dit_high_noise: Path | None = flag("weights of the high-noise expert (Wan 2.2 A14B); --dit is the other", None)
    output_dir: Path | None = flag("folder for LoRAs and reports, checked for write access and free space", None)
    reads: tuple[Path, ...] = flag("further files and folders that later steps read: LoRAs, held-out sets", ())
    sample_prompts: Path | None = flag("prompts of training's samples, which are judged as training does", None)


@dataclass(frozen=True, kw_only=True)
class CacheStep(DatasetStep):
    """What the two caching steps share."""

    smoke: bool = flag(f"{TRY}; their entries stay for the whole job", False)
    task: str | None = flag(CACHE_TASK, None, pinned=True, model_choices=True)
    device: str | None = flag(
        "cuda, cuda:1, cpu … (default: cuda when there is one)", None,
        names=("vae_device", "text_encoder_device"),
    )  # fmt: skip
    num_workers: int | None = flag("threads that read and decode media (default: 4, on ROCm 1)", None, knob=True)
    skip_existing: bool = flag("keep entries that are valid (the default; --recache encodes again)", True)
    recache: bool = flag("encode every item again", False)
    shard: str | None = flag(
        "encode part i of n (0/4 … 3/4), one process per card or node; auto takes i and n from Slurm's array or from "
        "RANK and WORLD_SIZE; nothing is removed", None,
    )  # fmt: skip
    gpus: str = flag("GPUs of this machine that encode side by side, one process each: a number, or auto for all that "
                     "there are", "1")  # fmt: skip
    plain: bool = flag("encode with the libraries' own modules: the same numbers to rounding, slower", False)
    packed: bool = flag("keep entries in packs of up to 1 GiB and not in a file each; training reads both", False)
    keep_cache: bool = flag("do not remove entries that no item of the dataset needs", False)

    @property
    def starts_processes(self) -> bool:
        """Whether `--gpus` asks for others to encode; not in a `--smoke`.

        Raises:
            UsageError: it is no number of them, contradicts `--shard`, or this is native Windows.
        """
        if not asks_for_several(self.gpus) or self.smoke:
            return False
        if self.shard:
            raise UsageError("--gpus and --shard both divide the work", cure="leave one of them out")
        if sys.platform == "win32":
            raise UsageError(
                "--gpus: a step starts no further processes on native Windows",
                cure="give --shard 0/2 --device cuda:0 in one window, 1/2 and cuda:1 in another, or use WSL",
            )
        return True

    @property
    def local_rank(self) -> int:
        """The number on its machine of a process that torchrun started for a part; it takes the GPU of that number."""
        return launch().local_rank if self.shard and "WORLD_SIZE" in os.environ else 0

    @property
    def lock_file(self) -> Path | None:
        """Each part has a lock of its own, for they work side by side: `run.lock` is `run-2-of-8.lock` for part 2."""
        return self.lock and self.lock.parent / f"{self.lock.stem}{self._part}{self.lock.suffix}"

    @property
    def waits(self) -> bool:
        """A part that a launcher has given waits for the same one of an earlier job: what that encodes is kept."""
        return self.shard == "auto"

    @property
    def report_name(self) -> str:
        """Each part has a report of its own: `cache_text-2-of-8.report.json`."""
        return f"{self.command}{self._part}{REPORT}"

    @property
    def _part(self) -> str:
        """What the names of a part's files have behind those of the whole; empty for the whole."""
        names = ("SLURM_ARRAY_TASK_ID", "RANK") if self.shard == "auto" else ()
        part = next((os.environ[name] for name in names if name in os.environ), self.shard)
        return f"-{part.replace('/', '-of-')}" if part else ""

    def _smoke_changes(self) -> dict[str, Any]:
        return {**super()._smoke_changes(), "keep_cache": True}


@dataclass(frozen=True, kw_only=True)
class CacheLatents(CacheStep):
    """Encode images and clips with the VAE into the embedding cache."""

    command: ClassVar[str] = "cache_latents"
    module: ClassVar[str] = "wangen.runtime.cache_latents"
    spellings: ClassVar[tuple[str, ...]] = (
        "wan_cache_latents", "wan_cache_latents.py", "qwen_image_cache_latents", "qwen_image_cache_latents.py",
    )  # fmt: skip
    elsewhere: ClassVar[Mapping[str, str]] = {
        **MODEL_VERSION,
        "one_frame": f"one-frame caching {LATER}",
        "console_width": "--debug_mode writes an HTML page: leave the console's flags out",
        "console_back": "--debug_mode writes an HTML page: leave the console's flags out",
        "console_num_images": "--debug_mode writes an HTML page: leave the console's flags out",
        "disable_cudnn_backend": "not needed: on ROCm the VAE runs in float32 by itself",
        "t5": "T5 weights belong to cache_text: leave --t5 out here",
        "dit": "transformer weights belong to train and generate: leave --dit out here",
    }

    vae: Path = flag(VAE)
    i2v: bool = flag("image-to-video: also encode the first frame as condition (an I2V --task says the same)", False)
    clip: Path | None = flag(f"{CLIP}; adds its view of the first frame", None)
    vae_dtype: Dtype | None = flag(
        "precision of the VAE and of the cached latents (default: float16 on CUDA, float32 on CPU and ROCm)",
        None, knob=True, values=DTYPE_VALUES,
    )  # fmt: skip
    clip_dtype: Dtype | None = flag("precision of CLIP (default: float16 on a GPU, float32 on a CPU)", None,
                                    values=DTYPE_VALUES)  # fmt: skip
    debug_mode: Literal["image", "video"] | None = flag(
        "encode nothing: write a contact sheet (HTML) of exactly what would be encoded, as images or as clips", None
    )
    vae_cache_cpu: bool = flag(VAE_CACHE, False)
    vae_tile: int = vae_tile()
    decoder: Decoder | None = flag(f"{DECODER} (default: pyav)", None)
    batch_size: int | None = flag("largest number of items in one encode (default: the dataset's batch_size)", None)


@dataclass(frozen=True, kw_only=True)
class CacheText(CacheStep):
    """Encode captions, with the control images of edit models, into the embedding cache."""

    command: ClassVar[str] = "cache_text"
    module: ClassVar[str] = "wangen.runtime.cache_text"
    spellings: ClassVar[tuple[str, ...]] = (
        "wan_cache_text_encoder_outputs",
        "wan_cache_text_encoder_outputs.py",
        "qwen_image_cache_text_encoder_outputs",
        "qwen_image_cache_text_encoder_outputs.py",
    )
    elsewhere: ClassVar[Mapping[str, str]] = {
        **MODEL_VERSION,
        "vae": "VAE weights belong to cache_latents: leave --vae out here",
        "dit": "transformer weights belong to train and generate: leave --dit out here",
    }

    t5: Path = flag(T5, names=TEXT_ENCODER)
    tokenizer: Path | None = flag(TOKENIZER, None)
    t5_dtype: Dtype | None = flag(
        "precision of the text encoder and of the cached embeddings (default: bfloat16 on a GPU, float32 on a CPU)",
        None, knob=True, values=DTYPE_VALUES,
    )  # fmt: skip
    fp8_t5: bool = flag(FP8_T5, False, pinned=True, names=("fp8_vl",))
    stream_t5: bool = flag(
        "read the text encoder block by block: of umT5 1.5 GB of memory are enough, of Qwen2.5-VL about 5 (the "
        "default; --no_stream_t5 loads it whole)", True,
    )  # fmt: skip
    batch_size: int = flag("captions per encode with --plain or --no_stream_t5 (else each goes at its own length)", 16)


@dataclass(frozen=True, kw_only=True)
class CheckCache(DatasetStep):
    """Say which cache entries are valid, stale, missing or corrupt; fails when training would not find all."""

    command: ClassVar[str] = "check_cache"
    module: ClassVar[str] = "wangen.runtime.check_cache"

    smoke: bool = flag(f"{TRY}, those that training takes under --smoke", False)
    task: str | None = flag(CACHE_TASK, None, pinned=True, model_choices=True)
    vae: Path | None = flag("judge latents against this VAE", None)
    clip: Path | None = flag("judge CLIP's tokens against this image encoder", None)
    clip_dtype: Dtype | None = flag("judge CLIP's tokens against this precision", None, values=DTYPE_VALUES)
    t5: Path | None = flag("judge text embeddings against this text encoder", None, names=TEXT_ENCODER)
    tokenizer: Path | None = flag(TOKENIZER, None)
    vae_dtype: Dtype | None = flag("judge latents against this precision", None, knob=True, values=DTYPE_VALUES)
    t5_dtype: Dtype | None = flag("judge embeddings against this precision", None, knob=True, values=DTYPE_VALUES)
    vae_tile: int = vae_tile()
    fp8_t5: bool = flag("judge embeddings of a text encoder in 8 bits", False, pinned=True)
    deep: bool = flag("read every payload and every source again, not the headers alone", False)
    repair: bool = flag("remove corrupt entries and what killed writers left, so that caching makes them anew", False)


@dataclass(frozen=True, kw_only=True)
class Export(Step):
    """Convert a LoRA or a transformer to other layouts, merge LoRAs into a transformer, or print what a header says."""

    command: ClassVar[str] = "export"
    module: ClassVar[str] = "wangen.runtime.export"
    spellings: ClassVar[tuple[str, ...]] = ("convert_lora", "convert_lora.py", "merge_lora", "merge_lora.py")
    elsewhere: ClassVar[Mapping[str, str]] = {
        "diffusers_prefix": "every known prefix is read; --layout says which one is written",
        "device": "export computes on the CPU: leave --device out",
    }

    lora_weight: tuple[Path, ...] = flag(
        "LoRA to convert (any layout; a file, or a folder of a run, of peft or diffusers), or LoRAs to merge", (),
        names=("lora_weights", "input"),
    )  # fmt: skip
    lora_multiplier: tuple[float, ...] = flag("strength of each merged LoRA, one number per LoRA (default: 1)", ())
    dit: Path | None = flag(
        "merge into this transformer, or convert it where no LoRA is: any format, any shard, or a diffusers folder",
        None,
    )
    save_path: Path | None = flag(
        "the .safetensors to write; with --layout peft, and diffusers of a transformer, also a folder, with --metadata "
        "a .json; a LoRA that is there is replaced, by merging a merged file; export.report.json appears beside it",
        None, names=("output", "save_merged_model"),
    )  # fmt: skip
    overwrite: bool = flag("replace whatever else is at --save_path", False)
    layout: tuple[Literal["comfyui", "kohya", "diffusers", "peft", "original"], ...] = flag(
        "layouts to convert to (comfyui: read by ComfyUI, diffusers and most trainers; kohya: musubi-tuner and "
        "ComfyUI; diffusers; peft), of a LoRA comfyui by default; every further one gets its name as a suffix; of a "
        "whole transformer original or comfyui (both the official names) or diffusers", (), names=("target",),
        values={"default": "kohya", "other": "comfyui"},
    )  # fmt: skip
    dtype: ExportDtype | None = flag(
        "precision of the file; fp8_scaled for a whole transformer only (default: as in the file read, bfloat16 for "
        "GGUF)", None, names=("save_precision",), values={**DTYPE_VALUES, "fp8": "float8_e4m3fn"},
    )  # fmt: skip
    metadata: bool = flag("print what the header of the LoRA or of --dit says, as JSON; no weight is read", False)


STEPS: tuple[type[Step], ...] = (
    Check,
    CacheLatents,
    CacheText,
    CheckCache,
    Train,
    Generate,
    Evaluate,
    Export,
    Preprocess,
    WorldModel,
    Caption,
    MakeReport,
    Watch,
)


def find_step(name: str) -> type[Step] | None:
    """The step with this command name or spelling; dashes and underscores are the same.

    >>> find_step("cache-latents").__name__, find_step("wan_train_network.py").__name__, find_step("bake")
    ('CacheLatents', 'Train', None)
    """
    wanted = name.replace("-", "_")
    return next((step for step in STEPS if wanted in (step.command, *step.spellings)), None)
