"""How a training step computes: the choices that change speed and memory, and (but for rounding) no number."""

from dataclasses import dataclass, field
from typing import Literal

Checkpointing = Literal["none", "full", "selective"]


@dataclass(frozen=True, kw_only=True)
class Tricks:
    """The exact short cuts of the fast path, each to be switched off alone.

    Attributes:
        collapse_text: the zero rows behind a text become one key whose score has log n added.
        no_input_gradient: nothing before the first block, and no input of it, takes part in the backward pass.
        short_recompute: under checkpointing a block's last frozen product, which no gradient needs, is not done again.
        grouped: q, k and v (k and v of the text) are one product, with one for the three adapters' first halves.
        fused_norms: adaLN as one layer norm, RMS norm and rotary embedding as one function.
        by_hand: a block of Wan is one function of autograd, where `grouped` and `fused_norms` are taken as well.
        pieces: of long clips, what comes after self attention in a block by hand is done for a part of the tokens at a
            time.
    """

    collapse_text: bool = True
    no_input_gradient: bool = True
    short_recompute: bool = True
    grouped: bool = True
    fused_norms: bool = True
    by_hand: bool = True
    pieces: bool = True


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How the transformer's forward and backward pass run.

    Attributes:
        attention: the kernel, a value of `--attention`.
        checkpointing: what is recomputed in the backward pass: nothing, every block, or all of it but attention.
        free_blocks: so many of the last blocks keep everything and are not recomputed.
        offload: what checkpointing keeps (the blocks' inputs, and with `selective` attention's outputs) waits in host
            memory.
        split_attention: attention runs for one item of the batch at a time.
        compile: torch.compile makes one function of a whole block, with static shapes: one for each bucket, shared by
            all blocks. Of blocks that cannot be had so (`fast/dit_compiled.py`) it makes norms, rotations and gates.
        graphs: small steps are replayed as CUDA graphs, on NVIDIA's GPUs and where no weights come and go.
        plain: the library's own forward; `Tricks`, `selective`, `free_blocks` and block swap are then out of reach.
        tricks: the exact short cuts.
    """

    attention: str = "auto"
    checkpointing: Checkpointing = "full"
    free_blocks: int = 0
    offload: bool = False
    split_attention: bool = False
    compile: bool = False
    graphs: bool = False
    plain: bool = False
    tricks: Tricks = field(default_factory=Tricks)
