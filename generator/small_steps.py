"""Steps that wait for the processor, unless their kernels are replayed as CUDA graphs."""

from wangen.generator.steps import Train

SMALL_STEP = 16 * 1024**2
"""Numbers, tokens by the width of the model, up to which steps are recorded. On an H200 Qwen-Image still gained half of
its time at 10.6 million, Wan 1.3B nothing at 12, and 14B nothing at 21."""


GRAPHS_BYTES = 2 * 1024**3
"""What graphs of the 14B took of a card beside what its plan counts (H200). Quantised they kept within it."""


def is_small(num_tokens: int, width: int) -> bool:
    """Whether a step of so many tokens waits for the processor, if its kernels are not replayed.

    >>> is_small(1024, 5120), is_small(4096, 5120), is_small(7800, 1536), is_small(32760, 1536)
    (True, False, True, False)
    """
    return num_tokens * width <= SMALL_STEP


def replays(options: Train) -> bool:
    """Whether a run's small steps are replayed on an NVIDIA GPU; the memory flags are filled in."""
    comes_and_goes = options.blocks_to_swap or options.gradient_checkpointing_cpu_offload
    asked = options.cuda_graphs and options.cache_mode != "realtime" and options.train_mode == "lora"
    return asked and not (options.plain or options.compile or comes_and_goes or options.network_dropout)


def graphs_bytes(options: Train, num_tokens: int, width: int) -> int:
    """What should stay free of a card, so that its small steps can be replayed; the memory flags are filled in."""
    is_replayed = replays(options) and is_small(num_tokens, width)
    return GRAPHS_BYTES if is_replayed and options.quantize in (None, "none") else 0
