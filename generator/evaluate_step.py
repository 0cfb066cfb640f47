"""The judging step of the table: checkpoints against the base, on items and prompts that were not trained on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from wangen.generator.step_parts import (
    CLIP,
    DIT,
    DTYPE_VALUES,
    FP8_T5,
    SMOKE_ITEMS,
    T5,
    TOKENIZER,
    VAE,
    VAE_CACHE,
    Attention,
    DatasetStep,
    Dtype,
    of_try,
    vae_tile,
)
from wangen.generator.table import SMOKE, flag
from wangen.generator.train_values import Quantize

_MODELS = "(default: the model's)"


@dataclass(frozen=True, kw_only=True)
class Evaluate(DatasetStep):
    """Judge LoRAs against the base: held-out loss, paired videos, signals; ranks checkpoints and names the best.

    The dataset is one that was not trained on, or with --validation_items the one that was; latents and texts come
    from the cache.
    """

    command: ClassVar[str] = "evaluate"
    module: ClassVar[str] = "wangen.runtime.evaluate"
    elsewhere: ClassVar[Mapping[str, str]] = {
        "lora_multiplier": "LoRAs are judged as they were trained, at strength 1: leave --lora_multiplier out",
        "fvd": "FVD needs hundreds of clips and another model's weights: leave it out",
    }

    smoke: bool = flag("try the job: few items, one prompt, few sampling steps", False)

    # What is judged.
    lora_weight: tuple[Path, ...] = flag(
        "LoRAs to judge; a training run's folder means all of its checkpoints, of two experts in pairs",
        names=("lora_weights",),
    )  # fmt: skip
    lora_weight_high_noise: tuple[Path, ...] = flag(
        "where --lora_weight names files: the high-noise expert's LoRA for each of them (Wan 2.2 A14B)", ()
    )
    validation_items: int = flag(
        "the dataset was trained on but for so many items, with the same --validation_items and --seed: judge by these",
        0, pinned=True, knob=True,
    )  # fmt: skip
    forgetting_config: Path | None = flag(
        "TOML or manifest of a dataset outside of what was trained: a higher loss on it is what the LoRA forgot", None
    )
    training_config: Path | None = flag(
        "TOML or manifest of what was trained on: videos are compared with its clips in motion, and for copies "
        "(default: with --validation_items the rest of the dataset)",
        None,
    )

    # By what.
    validation_timesteps: int = flag("noise levels at which each item is judged, of each expert", 8, pinned=True)
    condition_frames: int | None = flag(
        "TI2V-5B: so many first frames are given (default: as in the LoRAs' training by their headers, else 1)",
        None,
        pinned=True,
    )
    seed: int = flag("seed of noise, videos and intervals", 42, pinned=True, knob=True)
    prompt_file: Path | None = flag(
        "prompts of the videos, .txt, .toml or .json as of --sample_prompts (default: the captions of the dataset)",
        None, names=("sample_prompts",),
    )  # fmt: skip
    num_prompts: int = flag("without --prompt_file: at most so many captions, of every activity in turn", 8,
                            pinned=True)  # fmt: skip
    num_videos: int = flag("videos of every prompt, with the seeds seed, seed + 1, …; 0 makes none", 1, pinned=True)
    videos_of: Literal["best", "all"] = flag("make videos with the best checkpoint, or with every one", "best",
                                             pinned=True)  # fmt: skip
    clip_model: Path | None = flag("folder of a CLIP model (transformers): adds the CLIP score of every video", None)

    # The model.
    task: str = flag("model profile", "t2v-14B", pinned=True, model_choices=True)
    dit: Path = flag(f"{DIT}; of two experts the one for low noise")
    dit_high_noise: Path | None = flag("weights of the high-noise expert (Wan 2.2 A14B)", None)
    timestep_boundary: float | None = flag(
        f"timestep from which on the high-noise expert works, 0.875 or 875 {_MODELS}", None, pinned=True
    )
    vae: Path | None = flag(f"{VAE}; needed for videos", None)
    t5: Path | None = flag(f"{T5}; needed for videos", None)
    tokenizer: Path | None = flag(TOKENIZER, None)
    clip: Path | None = flag(CLIP, None)

    # How videos are sampled and everything is computed.
    video_size: tuple[int, int] | None = flag(f"height and width of the videos in pixels {_MODELS}", None, pinned=True)
    video_length: int | None = flag(f"frames of the videos, 4n+1 {_MODELS}", None, pinned=True)
    infer_steps: int | None = flag(f"sampling steps {_MODELS}", None, pinned=True)
    guidance_scale: float | None = flag(f"classifier-free guidance {_MODELS}", None, pinned=True)
    guidance_scale_high_noise: float | None = flag(
        "guidance of the high-noise expert (default: --guidance_scale, or else the model's)", None, pinned=True
    )
    flow_shift: float | None = flag(f"shift of the sampling schedule {_MODELS}", None, pinned=True)
    sample_solver: Literal["unipc", "dpm++", "euler"] | None = flag(
        "sampler (default: unipc; Qwen-Image has euler alone)", None, pinned=True
    )
    negative_prompt: str | None = flag("what to avoid, where guidance is above 1 (default: none)", None, pinned=True)
    attention: Attention = flag("attention kernel; auto takes the fastest of flash3, flash, sdpa that runs here",
                                "auto", pinned=True)  # fmt: skip
    dtype: Dtype | None = flag("precision of the transformer (default: bfloat16 on CUDA, float32 on CPU)", None,
                               values=DTYPE_VALUES)  # fmt: skip
    vae_dtype: Dtype | None = flag("precision of the VAE (default: the device's)", None, values=DTYPE_VALUES)
    t5_dtype: Dtype | None = flag("precision of the text encoder (default: the device's)", None, values=DTYPE_VALUES)
    fp8_t5: bool = flag(FP8_T5, False, pinned=True)
    quantize: Quantize = flag("hold the transformer's blocks in 8 or 4 bits", "none", pinned=True)
    blocks_to_swap: int = flag("so many blocks wait in host memory and come when they are needed", 0, pinned=True)
    vae_cache_cpu: bool = flag(VAE_CACHE, False)
    vae_tile: int = vae_tile()
    device: str | None = flag("cuda, cuda:1, cpu … (default: cuda when there is one)", None)

    output_dir: Path = flag("folder for evaluation.json, the videos and what is kept for going on")

    def _smoke_changes(self) -> dict[str, Any]:
        """A try judges what a try has trained: files are as they are named, a run's folder has a folder of its own."""
        loras = tuple(map(of_try, self.lora_weight))
        held_out = min(self.validation_items, SMOKE_ITEMS // 2)  # as training does
        return {**super()._smoke_changes(), "lora_weight": loras, "output_dir": self.output_dir / SMOKE,
                "validation_items": held_out}  # fmt: skip
