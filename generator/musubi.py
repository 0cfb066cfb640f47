"""What musubi-tuner's training script takes, as far as its users' scripts have it: each is accepted or answered."""

from collections.abc import Iterator

from wangen.generator.steps import Train
from wangen.generator.table import spellings

_WORDS = (
    "config_file dataset_config sdpa flash_attn sage_attn xformers split_attn compile cuda_allow_tf32 "
    "max_train_steps max_train_epochs max_data_loader_n_workers persistent_data_loader_workers seed "
    "gradient_checkpointing gradient_checkpointing_cpu_offload gradient_accumulation_steps mixed_precision "
    "save_precision logging_dir log_with log_tracker_name wandb_run_name wandb_api_key sample_every_n_steps "
    "sample_at_first sample_every_n_epochs sample_prompts optimizer_type optimizer_args learning_rate max_grad_norm "
    "lr_scheduler lr_warmup_steps lr_decay_steps lr_scheduler_num_cycles lr_scheduler_min_lr_ratio fp8_base "
    "blocks_to_swap use_pinned_memory_for_block_swap block_swap_h2d_only disable_numpy_memmap timestep_sampling "
    "discrete_flow_shift sigmoid_scale weighting_scheme logit_mean logit_std min_timestep max_timestep "
    "preserve_distribution_shape num_timestep_buckets show_timesteps no_metadata network_weights network_module "
    "network_dim network_alpha network_dropout network_args training_comment dim_from_weights scale_weight_norms "
    "base_weights base_weights_multiplier output_dir output_name resume save_every_n_epochs save_every_n_steps "
    "save_last_n_epochs save_last_n_epochs_state save_last_n_steps save_last_n_steps_state save_state "
    "save_state_on_train_end metadata_title metadata_author metadata_description metadata_license metadata_tags dit "
    "vae vae_dtype task fp8_scaled t5 fp8_t5 clip vae_cache_cpu force_v2_1_time_embedding dit_high_noise "
    "timestep_boundary offload_inactive_dit"
)
TRAINING_FLAGS = tuple(_WORDS.split())
"""Flags of its `wan_train_network.py` (v0.3.4)."""


def verdicts() -> Iterator[tuple[str, str]]:
    """Each of its training flags with what becomes of it here.

    >>> dict(verdicts())["sdpa"]
    '`--attention sdpa`'
    """
    known = {name: (option, constant) for name, option, constant in spellings(Train)}
    for name in TRAINING_FLAGS:
        if name not in known:
            yield name, f"answered: {Train.elsewhere[name]}"
            continue
        option, constant = known[name]
        if constant is not None:
            yield name, f"`--{option.name} {constant}`"
        elif option.flag.help.startswith("accepted"):
            yield name, option.flag.help
        else:
            yield name, f"taken: {option.flag.help}"
