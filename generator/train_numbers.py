"""Numbers of training that are refused wherever they are read: by the trainer, and by what plans its run."""

from wangen.generator.errors import UsageError
from wangen.generator.steps import Train

_FLOAT32_MAX = 3.4e38
MAX_VALIDATION_TIMESTEPS = 1000
"""Further ones would lie between those that a model was trained with."""

_AT_MOST = {"num_timestep_buckets": 10**6, "validation_timesteps": MAX_VALIDATION_TIMESTEPS}
"""Where memory or patience would end long before the range of a float32."""

ABOVE_ZERO = (
    "network_dim", "network_alpha", "learning_rate", "gradient_accumulation_steps", "discrete_flow_shift",
    "max_train_steps", "max_train_epochs", "save_every_n_steps", "save_every_n_epochs", "save_state_every_n_steps",
    "save_state_every_n_minutes", "save_last_n_epochs", "save_last_n_steps", "keep_last", "expert_turn_steps",
    "loraplus_lr_ratio", "scale_weight_norms", "num_timestep_buckets", "validation_timesteps",
    "validate_every_n_steps", "sample_every_n_steps", "sample_every_n_epochs", "block_swap_ring_size", "peak_tflops",
    "save_last_n_epochs_state", "save_last_n_steps_state", "continuation_guidance", "continuation_steps",
)  # fmt: skip


def refuse_not_above_zero(options: Train) -> None:
    """Refuse a number that must be above 0 and is not, or is larger than can be computed with.

    Raises:
        UsageError: there is one.
    """
    for name in ABOVE_ZERO:
        value = getattr(options, name)
        most = _AT_MOST.get(name, _FLOAT32_MAX)
        if value is not None and not 0 < value <= most:
            raise UsageError(f"--{name} must be above 0 and at most {most:.7g}, got {value}")


def refuse_more_blocks(options: Train, num_blocks: int) -> None:
    """Refuse more blocks to swap than are recomputed, and more that are not recomputed than there are.

    Raises:
        UsageError: there are more.
    """
    room = num_blocks - (options.checkpointing_free_blocks or 0)
    if room < 0:
        raise UsageError(f"--checkpointing_free_blocks {options.checkpointing_free_blocks}: the model has "
                         f"{num_blocks} blocks", cure=f"give 0 to {num_blocks}")  # fmt: skip
    if (options.blocks_to_swap or 0) > room:
        raise UsageError(f"--blocks_to_swap {options.blocks_to_swap}: the blocks that are recomputed are {room}",
                         cure=f"give 0 to {room}")  # fmt: skip
