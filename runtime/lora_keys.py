"""The names of one LoRA weight in every world that Wan LoRAs come from.

    ComfyUI      diffusion_model.blocks.0.self_attn.q.lora_A.weight
    kohya        lora_unet_blocks_0_self_attn_q.lora_down.weight   (and .lora_up.weight, .alpha)
    diffusers    transformer.blocks.0.attn1.to_q.lora_A.weight
    peft         base_model.model.blocks.0.attn1.to_q.lora_A.weight

They differ in three independent parts: a prefix, the module's name (original or diffusers) and a suffix. Each part
is read by itself, so mixtures that other trainers write are understood as well.
"""

import re
from typing import Literal, NamedTuple

Layout = Literal["comfyui", "kohya", "diffusers"]
Part = Literal["down", "up", "alpha"]

KOHYA_PREFIX = "lora_unet_"
DOTTED_PREFIXES = ("model.diffusion_model.", "base_model.model.", "diffusion_model.", "transformer.")

# original name within a block -> diffusers name within a block
BLOCK_MODULES = {
    **{f"self_attn.{original}": f"attn1.{new}" for original, new in zip("qkv", ("to_q", "to_k", "to_v"), strict=True)},
    **{f"cross_attn.{original}": f"attn2.{new}" for original, new in zip("qkv", ("to_q", "to_k", "to_v"), strict=True)},
    "self_attn.o": "attn1.to_out.0",
    "cross_attn.o": "attn2.to_out.0",
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
OUTER_MODULES = {
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "head.head": "proj_out",
}


class LoraKey(NamedTuple):
    """What one key of a LoRA file stands for.

    Attributes:
        module: the module's name in diffusers (`blocks.0.attn1.to_q`).
        part: which of its tensors.
    """

    module: str
    part: Part


def parse_key(key: str) -> LoraKey | None:
    """The module and part that a key of any layout names; None for a key of something else.

    >>> parse_key("lora_unet_blocks_3_cross_attn_k_img.lora_up.weight")
    LoraKey(module='blocks.3.attn2.add_k_proj', part='up')
    >>> parse_key("diffusion_model.blocks.0.ffn.2.lora_A.weight")
    LoraKey(module='blocks.0.ffn.net.2', part='down')
    >>> parse_key("diffusion_model.blocks.0.norm3.diff") is None
    True
    """
    match = KEY.fullmatch(key)
    if match is None:
        return None
    stem = match["stem"]
    module = _module_of_kohya(stem) if stem.startswith(KOHYA_PREFIX) else _module_of_dotted(stem)
    if module is None:
        return None
    return LoraKey(module, "alpha" if match["alpha"] else SIDES[match["side"]])


def original_name(module: str) -> str:
    """The official name of a module that diffusers calls `module`.

    >>> original_name("blocks.7.attn1.to_out.0")
    'blocks.7.self_attn.o'

    Raises:
        KeyError: no such module in a Wan transformer.
    """
    if match := BLOCK.fullmatch(module):
        return f"blocks.{match['number']}.{ORIGINAL_BLOCK_MODULES[match['rest']]}"
    return ORIGINAL_OUTER_MODULES[module]


def module_names(layout: Layout, module: str) -> tuple[str, str, str]:
    """The keys of down, up and alpha of a module in a layout.

    >>> module_names("kohya", "blocks.0.attn1.to_q")[0]
    'lora_unet_blocks_0_self_attn_q.lora_down.weight'

    Raises:
        KeyError: no such module in a Wan transformer.
    """
    if layout == "kohya":
        stem = KOHYA_PREFIX + original_name(module).replace(".", "_")
        return f"{stem}.lora_down.weight", f"{stem}.lora_up.weight", f"{stem}.alpha"
    stem = f"diffusion_model.{original_name(module)}" if layout == "comfyui" else f"transformer.{module}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight", f"{stem}.alpha"


def _module_of_dotted(stem: str) -> str | None:
    for prefix in DOTTED_PREFIXES:
        if stem.startswith(prefix):
            stem = stem.removeprefix(prefix)
            break
    if match := BLOCK.fullmatch(stem):
        rest = BLOCK_MODULES.get(match["rest"], match["rest"])
        return f"blocks.{match['number']}.{rest}" if rest in ORIGINAL_BLOCK_MODULES else None
    module = OUTER_MODULES.get(stem, stem)
    return module if module in ORIGINAL_OUTER_MODULES else None


def _module_of_kohya(stem: str) -> str | None:
    stem = stem.removeprefix(KOHYA_PREFIX)
    if match := re.fullmatch(r"blocks_(?P<number>\d{1,4})_(?P<rest>.+)", stem):
        rest = UNDERSCORED_BLOCK_MODULES.get(match["rest"])
        return None if rest is None else f"blocks.{match['number']}.{rest}"
    return UNDERSCORED_OUTER_MODULES.get(stem)


def _underscored(modules: dict[str, str]) -> dict[str, str]:
    """Original and diffusers names with underscores for dots -> diffusers name."""
    return {name.replace(".", "_"): new for original, new in modules.items() for name in (original, new)}


KEY = re.compile(r"(?P<stem>.+)\.(?:(?P<alpha>alpha)|lora_(?P<side>A|B|down|up)(?:\.default)?(?:\.weight)?)")
BLOCK = re.compile(r"blocks\.(?P<number>\d{1,4})\.(?P<rest>.+)")
SIDES: dict[str, Part] = {"A": "down", "down": "down", "B": "up", "up": "up"}
ORIGINAL_BLOCK_MODULES = {new: original for original, new in BLOCK_MODULES.items()}
ORIGINAL_OUTER_MODULES = {new: original for original, new in OUTER_MODULES.items()}
UNDERSCORED_BLOCK_MODULES = _underscored(BLOCK_MODULES)
UNDERSCORED_OUTER_MODULES = _underscored(OUTER_MODULES)
