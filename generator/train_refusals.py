"""Flags of training that are refused wherever they are read: by the trainer, and by what publishes, checks or plans."""

import math
import os
from collections.abc import Iterable
from pathlib import Path

from wangen import profiles
from wangen.generator.adapter_settings import loraplus_ratio, settings_of_flags
from wangen.generator.errors import UsageError, many
from wangen.generator.expert_names import noise_of
from wangen.generator.experts import choose_boundary
from wangen.generator.launch import asks_for_several
from wangen.generator.sample_prompts import MAX_SEED
from wangen.generator.steps import Train
from wangen.generator.table import options as flags_of
from wangen.generator.toml_values import is_clip_length
from wangen.generator.train_values import FOR_ADAPTERS, optimizer_arguments, steps_of

FLOAT32_MAX = 3.4e38
MAX_VALIDATION_TIMESTEPS = 1000
"""Further ones would lie between those that a model was trained with."""

MOST_NAME_BYTES = 160
"""Of `--output_name`; a file's name has 255 at most on common disks, and experts, steps and layouts are added."""

_ENDINGS = (".safetensors", ".pt", ".pth", ".ckpt")

_AT_MOST = {"num_timestep_buckets": 10**6, "validation_timesteps": MAX_VALIDATION_TIMESTEPS}
"""Where memory or patience would end long before the range of a float32."""

OF_TIMESTEPS = ("discrete_flow_shift", "sigmoid_scale", "logit_std", "num_timestep_buckets")
ABOVE_ZERO = (
    *OF_TIMESTEPS, "network_dim", "network_alpha", "learning_rate", "gradient_accumulation_steps",
    "max_train_steps", "max_train_epochs", "save_every_n_steps", "save_every_n_epochs", "save_state_every_n_steps",
    "save_state_every_n_minutes", "save_last_n_epochs", "save_last_n_steps", "keep_last", "expert_turn_steps",
    "loraplus_lr_ratio", "scale_weight_norms", "validation_timesteps",
    "validate_every_n_steps", "sample_every_n_steps", "sample_every_n_epochs", "block_swap_ring_size", "peak_tflops",
    "save_last_n_epochs_state", "save_last_n_steps_state", "continuation_guidance", "continuation_steps",
    "lr_scheduler_num_cycles", "lr_scheduler_power", "lr_scheduler_timescale",
)  # fmt: skip

SHARES = ("caption_dropout", "condition_dropout", "lr_scheduler_min_lr_ratio")
NOT_NEGATIVE = (
    "max_grad_norm", "noise_offset", "prior_loss_weight", "validation_items", "max_data_loader_n_workers",
    "sample_continuations", "max_restarts",
)  # fmt: skip

_USUAL = "leave it out for the usual one, or give a number {}"

MODE_SCALES = (-1.0, 2 / (math.pi - 2))
"""Of `--mode_scale`: the density of sigma is one within them; outside its curve turns back."""


def refuse_flags(options: Train) -> None:
    """Refuse flags that no run of any model can have on any machine.

    Raises:
        UsageError: numbers out of range, or flags that contradict each other.
    """
    refuse_numbers(options)
    name = options.output_name
    if not name.strip(" .") or Path(name).name != name:
        raise UsageError(f"--output_name is a file name without folders, got {name!r}",
                         cure="give the folder to --output_dir")  # fmt: skip
    if Path(name).suffix.lower() in _ENDINGS:
        raise UsageError(f"--output_name {name!r} has the ending of a file, which is added to it",
                         cure=f"give {Path(name).stem!r}")  # fmt: skip
    if len(os.fsencode(name)) > MOST_NAME_BYTES:
        raise UsageError(f"--output_name is longer than {MOST_NAME_BYTES} bytes, to which endings are added: {name!r}",
                         cure="give a shorter one")  # fmt: skip
    if not options.lora_layout:
        raise UsageError("--lora_layout is empty", cure="leave it out for comfyui")
    if len(set(options.lora_layout)) < len(options.lora_layout):
        raise UsageError(f"--lora_layout {' '.join(options.lora_layout)} names one twice", cure="name each once")
    if options.fresh and options.resume:
        raise UsageError("--fresh and --resume contradict each other", cure="give one of them")
    if options.deterministic and options.attention == "xformers":
        raise UsageError("--deterministic: the gradient of --attention xformers adds up in no fixed order",
                         cure="leave one out: --attention auto has kernels that do")  # fmt: skip
    if options.cache_mode == "realtime" and (options.cache_latents or options.cache_latents_to_disk):
        raise UsageError("--cache_mode realtime keeps nothing: --cache_latents contradicts it", cure="leave one out")
    if options.keep_best and not (options.validation_items or options.validation_config):
        raise UsageError("--keep_best needs a validation", cure="give --validation_items, for example 8")
    if options.validation_items and options.validation_config:
        raise UsageError("--validation_items and --validation_config contradict each other", cure="give one of them")
    refuse_memory(options)
    _refuse_schedule(options)
    if options.train_mode == "full":
        _refuse_beside_full(options)
    elif options.scale_weight_norms and options.network_module != "lora":
        raise UsageError("--scale_weight_norms is for LoRA alone",
                         cure="leave it out, or give --network_module lora")  # fmt: skip
    settings_of_flags(options)
    loraplus_ratio(options)
    require_timesteps(options)


def refuse_numbers(options: Train) -> None:
    """Refuse numbers that no run can have.

    Raises:
        UsageError: there is one.
    """
    _require_above_zero(options, ABOVE_ZERO)
    for name in NOT_NEGATIVE:
        value = getattr(options, name)
        if not (value >= 0 and math.isfinite(value)):
            raise UsageError(f"--{name} must be 0 or above, got {value}", cure=_USUAL.format("from 0 on"))
    require_seed(options.seed)
    asks_for_several(options.gpus)
    for name in ("lr_warmup_steps", "lr_decay_steps"):
        steps_of(name, getattr(options, name), 1)
    for name in SHARES:
        if not 0 <= getattr(options, name) <= 1:
            raise UsageError(f"--{name} must be 0 to 1, got {getattr(options, name)}",
                             cure="give a share: 0.1 is a tenth")  # fmt: skip
    if not 0 <= options.network_dropout < 1:
        raise UsageError(f"--network_dropout must be at least 0 and below 1, got {options.network_dropout}",
                         cure="give a share: 0.1 is a tenth")  # fmt: skip
    if options.ema_decay is not None and not 0 < options.ema_decay < 1:
        raise UsageError(f"--ema_decay must be between 0 and 1, got {options.ema_decay}", cure="0.99 is usual")
    if options.high_noise_share is not None and not 0 < options.high_noise_share < 1:
        raise UsageError(f"--high_noise_share must be between 0 and 1, got {options.high_noise_share}",
                         cure="to train one expert alone give --experts high or --experts low")  # fmt: skip


def require_seed(seed: int) -> None:
    """Refuse a seed that torch would not take, here or in what judges the run by the same.

    Raises:
        UsageError: it is negative, or has more than 63 bits.
    """
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"--seed {seed}: a seed is a whole number from 0 to {MAX_SEED}", cure="leave it out for 42")


def _require_above_zero(options: Train, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(options, name)
        most = _AT_MOST.get(name, FLOAT32_MAX)
        if value is not None and not 0 < value <= most:
            limit = f" and at most {most:.7g}" if value > 0 or name in _AT_MOST else ""
            raise UsageError(f"--{name} must be above 0{limit}, got {value}", cure=_cure(name, options))


def _cure(name: str, options: Train) -> str:
    """What to give in place of a number that is not above 0."""
    if name == "network_alpha":
        return f"give the rank, --network_alpha {options.network_dim}, which 0 means in musubi-tuner"
    return "leave it out for the warm-up's steps" if name == "lr_scheduler_timescale" else _USUAL.format("above 0")


def sets_its_rate(options: Train) -> bool:
    """Whether the optimizer is an Adafactor that sets the learning rate itself."""
    given = optimizer_arguments(options.optimizer_args).get("relative_step", options.lr_scheduler == "adafactor")
    return options.optimizer_type.lower() == "adafactor" and bool(given)


def _refuse_schedule(options: Train) -> None:
    """A schedule that lacks a flag, or that another optimizer has."""
    schedule = options.lr_scheduler
    if schedule == "adafactor" and options.optimizer_type.lower() != "adafactor":
        raise UsageError("--lr_scheduler adafactor is Adafactor's own", cure="give --optimizer_type Adafactor")
    other = schedule not in ("constant", "adafactor") or loraplus_ratio(options) is not None
    if sets_its_rate(options) and other:
        raise UsageError(
            "Adafactor with relative_step=True sets the learning rate itself: no schedule and no LoRA+",
            cure="leave --lr_scheduler and --loraplus_lr_ratio out, or give --optimizer_args relative_step=False",
        )
    if schedule == "warmup_stable_decay" and not steps_of("lr_decay_steps", options.lr_decay_steps, 10**9):
        raise UsageError("--lr_scheduler warmup_stable_decay needs --lr_decay_steps", cure="give steps, 0.2 or 20%")


def refuse_memory(options: Train) -> None:
    """Refuse ways to save memory that cannot go together.

    Raises:
        UsageError: they are asked for.
    """
    swap = options.blocks_to_swap or 0
    if swap < 0 or (options.checkpointing_free_blocks or 0) < 0:
        raise UsageError("--blocks_to_swap and --checkpointing_free_blocks are 0 or above",
                         cure=_USUAL.format("from 0 on"))  # fmt: skip
    if swap and options.checkpointing == "none":
        raise UsageError("--blocks_to_swap needs checkpointing: without it every block's weights stay for the backward",
                         cure="give --checkpointing full or selective")  # fmt: skip
    if options.checkpointing == "none" and options.gradient_checkpointing_cpu_offload:
        raise UsageError("--gradient_checkpointing_cpu_offload parks what checkpointing keeps, and it is switched off",
                         cure="give --checkpointing full or selective")  # fmt: skip
    selects = options.checkpointing == "selective" or options.checkpointing_free_blocks
    if options.plain and options.attention == "sage":
        raise UsageError("--plain: the kernel of --attention sage has no gradient of its own", cure="leave one out")
    if options.plain and (swap or selects):
        raise UsageError("--plain knows no block swap, selective checkpointing or free blocks", cure="leave it out")
    if options.train_mode == "full" and (options.quantize not in (None, "none") or swap):
        raise UsageError("--train_mode full trains every weight: none can be quantised or swapped",
                         cure="give --quantize none --blocks_to_swap 0, or --train_mode lora")  # fmt: skip


def _refuse_beside_full(options: Train) -> None:
    """What `--train_mode full` would ignore, where it is not as it is without being given; rank and alpha may be."""
    if options.network_weights or options.network_weights_high_noise:
        raise UsageError("--train_mode full starts from --dit: it takes no --network_weights",
                         cure="merge the LoRA first: wangen export --dit … --lora_weight …")  # fmt: skip
    usual = {option.name: option.default for option in flags_of(Train)}
    ignored = [f"--{name}" for name in FOR_ADAPTERS if getattr(options, name) != usual[name]]
    if ignored:
        raise UsageError(f"--train_mode full trains every weight, without adapters: it takes no {' '.join(ignored)}",
                         cure="leave out what it does not take, or give --train_mode lora")  # fmt: skip


def require_timesteps(options: Train) -> None:
    """Refuse timestep flags that describe no distribution.

    Raises:
        UsageError: a number is out of its range, or two flags contradict each other.
    """
    _require_above_zero(options, OF_TIMESTEPS)
    if not math.isfinite(options.logit_mean):
        raise UsageError(f"--logit_mean must be a number, got {options.logit_mean}", cure="0 is usual")
    if not MODE_SCALES[0] <= options.mode_scale <= MODE_SCALES[1]:
        raise UsageError(f"--mode_scale must be -1 to {MODE_SCALES[1]:.2f}, got {options.mode_scale}",
                         cure="1.29 is usual")  # fmt: skip
    if not 0 <= options.min_timestep < options.max_timestep <= 1000:
        raise UsageError(f"timesteps {options.min_timestep} to {options.max_timestep} are no range within 0 to 1000",
                         cure="give a --min_timestep below --max_timestep; 0 and 1000 are all of them")  # fmt: skip
    scheme, sampling = options.weighting_scheme, options.timestep_sampling
    if scheme in ("logit_normal", "mode") and sampling != "sigma":
        raise UsageError(
            f"--weighting_scheme {scheme} says how --timestep_sampling sigma draws, and this run draws {sampling}",
            cure="leave --weighting_scheme out, or give --timestep_sampling sigma",
        )


def choose_condition_frames(given: int | None, model: profiles.Model) -> int:
    """How many clean first frames a training gives: as `--condition_frames` says, else 1 where the model takes them.

    Raises:
        UsageError: the model takes none this way, or no latent frames are made of so many.
    """
    if model.condition != "text_or_image":
        if given:
            raise UsageError(f"--condition_frames: {model.name} does not take given frames this way",
                             cure="leave it out; an I2V model has its first frame from the cache")  # fmt: skip
        return 0
    frames = 1 if given is None else given
    if frames and not is_clip_length(frames):
        raise UsageError(f"--condition_frames {frames}: must be 4n+1, or 0 for none", cure="1 gives the first frame")
    return frames


def is_narrowed(options: Train) -> bool:
    """Whether `--min_timestep` and `--max_timestep` leave something of the timesteps out."""
    return (options.min_timestep, options.max_timestep) != (0, 1000)


def refuse_more_blocks(options: Train, num_blocks: int) -> None:
    """Refuse more blocks to swap than are recomputed, and more that are not recomputed than there are.

    Raises:
        UsageError: there are more.
    """
    room = num_blocks - (options.checkpointing_free_blocks or 0)
    beside = f" beside --vram {options.vram}, which is made for weights of more blocks" if options.vram else ""
    if room < 0:
        raise UsageError(f"--checkpointing_free_blocks {options.checkpointing_free_blocks}: the model has "
                         f"{num_blocks} blocks", cure=f"give 0 to {num_blocks}{beside}")  # fmt: skip
    if (options.blocks_to_swap or 0) > room:
        raise not_so_many_swapped(options.blocks_to_swap or 0, room, beside)


def not_so_many_swapped(num_swapped: int, room: int, beside: str = "") -> UsageError:
    """What is said where only `room` blocks can be swapped; `beside` is added to what to do."""
    are = "is" if room == 1 else "are"
    return UsageError(f"--blocks_to_swap {num_swapped}: only the {many(room, 'block')} that {are} recomputed can be "
                      "swapped", cure=f"give 0 to {room}{beside}")  # fmt: skip


def refuse_experts(options: Train, model: profiles.Model) -> None:
    """An expert without its weights, and flags of experts for a model that has none.

    Raises:
        UsageError: there is one.
    """
    if model.experts is None:
        if options.dit is None:
            raise UsageError("train needs --dit", cure="the transformer's weights")
        for name in ("dit_high_noise", "network_weights_high_noise", "high_noise_share"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name}: {model.name} has one transformer", cure="leave it out, or give its --task")
        if options.experts != "both":
            raise UsageError(f"--experts: {model.name} has one transformer", cure="leave it out")
        return
    if options.experts in ("both", "low") and options.dit is None:
        raise UsageError(f"the low-noise expert of {model.name} has no weights",
                         cure="give --dit, or train the other one alone with --experts high")  # fmt: skip
    if options.experts in ("both", "high") and options.dit_high_noise is None:
        cure = "give --dit_high_noise, or train the other one alone with --experts low"
        boundary = choose_boundary(options.timestep_boundary, model)
        assert boundary is not None, "it has two experts"
        if options.dit and noise_of(options.dit) == "high":
            cure = "--dit is named so: give it to --dit_high_noise, with --experts high to train it alone"
        elif options.experts == "high" or options.min_timestep >= 1000 * boundary:
            cure = "give its weights to --dit_high_noise, with --experts high to train it alone; --dit is the other's"
        raise UsageError(f"the high-noise expert of {model.name} has no weights", cure=cure)
