"""The names of one LoRA weight in every world that LoRAs of Wan and Qwen-Image come from.

    ComfyUI      diffusion_model.blocks.0.self_attn.q.lora_A.weight
    kohya        lora_unet_blocks_0_self_attn_q.lora_down.weight   (and .lora_up.weight, .alpha)
    diffusers    transformer.blocks.0.attn1.to_q.lora_A.weight
    peft         base_model.model.blocks.0.attn1.to_q.lora_A.weight

Of Qwen-Image all worlds have diffusers' names of the modules (`transformer_blocks.0.attn.to_q`).

They differ in three independent parts: a prefix, the module's name (original or diffusers) and a suffix. Each part
is read by itself, so mixtures that other trainers write are understood as well. The factors of LoHa and LoKr have the
same suffixes everywhere (`.hada_w1_a`, `.lokr_w1`), which are LyCORIS' own.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

Layout = Literal["comfyui", "kohya", "diffusers", "peft"]
AdapterKind = Literal["lora", "loha", "lokr"]

KOHYA_PREFIX = "lora_unet_"
UNDERSCORED_PREFIXES = (KOHYA_PREFIX, "lycoris_", "lora_transformer_")
"""Before names with underscores for dots: kohya's, LyCORIS' own (SimpleTuner) and OneTrainer's."""

DOTTED_PREFIXES: dict[str, Layout] = {
    "model.diffusion_model.": "comfyui",
    "base_model.model.": "peft",
    "diffusion_model.": "comfyui",
    "transformer.": "diffusers",
}

# The end of a key -> the adapter that has such keys; a plain LoRA has none of them.
OTHER_ADAPTERS = {
    r"\.dora_scale|\.lora_magnitude_vector(\..+)?": "a DoRA",
    r"\.hada_[wt][12](_[ab])?": "a LoHa",
    r"\.lokr_[wt][12](_[ab])?": "a LoKr",
    r"\.oft_(blocks|diag|r)\b.*": "an OFT adapter",
}
# The end of a key -> what it makes of the file. A key that no layout knows is told by the first that fits.
FOREIGN_ENDS = {
    **OTHER_ADAPTERS,
    r"\.lora_mid\.weight": "a LoRA in three factors (CP or Tucker form)",
    r"\.diff(_[bm])?|\.set_weight": "a LoRA with differences of whole weights or biases beside it",
    r"\.lora_(B|up)(\.default)?\.bias": "a LoRA with biases",
}
FOREIGN_BEGINNINGS = {
    r"lora_te\d?_|text_encoders?\.|lora_prior_|conditioner\.|cond_stage_model\.": "a LoRA that changes a text encoder",
    r"(lora_unet|lycoris|lora_transformer)_(double|single|single_transformer)_blocks_"
    r"|(diffusion_model|transformer)\.(double_blocks|single_blocks|single_transformer_blocks"
    r"|transformer_blocks|joint_blocks|input_blocks|output_blocks|layers)\.": "a LoRA of another model than Wan",
    r"lora_unet_(down|mid|up|input|output|transformer)_|unet\.": "a LoRA of another model than Wan",
    r"transformer_2\.": "a file of two LoRAs, one for each expert, which have to be a file each",
}

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
QWEN_OUTER_MODULES = (
    "img_in", "txt_in", "time_text_embed.timestep_embedder.linear_1", "time_text_embed.timestep_embedder.linear_2",
    "norm_out.linear",
)  # fmt: skip
"""Linear layers of Qwen-Image outside its blocks, but for `proj_out`, whose name they share with Wan's head here."""

OUTER_MODULES = {
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "head.head": "proj_out",
    "patch_embedding": "patch_embedding",
}
QWEN_BLOCK_MODULES = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj",
    "attn.to_add_out", "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2", "img_mod.1",
    "txt_mod.1",
)  # fmt: skip
"""The linear layers of a block of Qwen-Image, of which the names of all worlds are the same."""


class AdapterKey(NamedTuple):
    """What one key of an adapter's file stands for, of any kind that is trained here.

    Attributes:
        module: the module's name in diffusers (`blocks.0.attn1.to_q`).
        part: `down`, `up` or `alpha`; a factor's own suffix (`hada_w1_a`, `lokr_w2`); `dora_scale` for a DoRA's
            magnitudes as ComfyUI calls them, `magnitude` for those as peft does.
    """

    module: str
    part: str


def parse_lora_key(key: str) -> AdapterKey | None:
    """The module and part that a key of a plain LoRA names; None for a key of something else.

    >>> parse_lora_key("lora_unet_blocks_3_cross_attn_k_img.lora_up.weight")
    AdapterKey(module='blocks.3.attn2.add_k_proj', part='up')
    >>> parse_lora_key("diffusion_model.blocks.0.ffn.2.lora_A.weight")
    AdapterKey(module='blocks.0.ffn.net.2', part='down')
    >>> parse_lora_key("diffusion_model.blocks.0.norm3.diff") is None
    True
    """
    match = KEY.fullmatch(key)
    if match is None:
        return None
    module = _module_of_stem(match["stem"])
    if module is None:
        return None
    return AdapterKey(module, "alpha" if match["alpha"] else SIDES[match["side"]])


def parse_adapter_key(key: str) -> AdapterKey | None:
    """The module and part that a key of a LoRA, DoRA, LoHa or LoKr names; None for a key of something else.

    >>> parse_adapter_key("lora_unet_blocks_0_self_attn_q.lokr_w2_a")
    AdapterKey(module='blocks.0.attn1.to_q', part='lokr_w2_a')
    >>> parse_adapter_key("base_model.model.blocks.0.attn1.to_q.lora_magnitude_vector.weight").part
    'magnitude'
    """
    if plain := parse_lora_key(key):
        return plain
    match = ADAPTER_KEY.fullmatch(key)
    module = _module_of_stem(match["stem"]) if match else None
    if match is None or module is None:
        return None
    return AdapterKey(module, "magnitude" if match["magnitude"] else match["part"])


def adapter_key(layout: Layout, module: str, part: str, *, qwen: bool) -> str:
    """The key of one part of a module in a layout; a part is named as by `parse_adapter_key`, `qwen` as `module_names`.

    >>> adapter_key("comfyui", "blocks.0.attn1.to_q", "lokr_w1", qwen=False)
    'diffusion_model.blocks.0.self_attn.q.lokr_w1'
    >>> adapter_key("diffusers", "blocks.0.attn1.to_q", "magnitude", qwen=False)
    'transformer.blocks.0.attn1.to_q.lora_magnitude_vector.weight'

    Raises:
        KeyError: no such module in a transformer.
    """
    down, up, alpha = module_names(layout, module, qwen=qwen)
    plain = {"down": down, "up": up, "alpha": alpha}
    return plain.get(part) or alpha.removesuffix("alpha") + PART_ENDS.get(part, part)


def foreign(key: str) -> str:
    """What a key that `parse_lora_key` does not know makes of its file, in words; empty when that is not known either.

    >>> foreign("lora_unet_blocks_0_self_attn_q.hada_w1_a")
    'a LoHa'
    >>> foreign("diffusion_model.blocks.0.norm3.diff_b")
    'a LoRA with differences of whole weights or biases beside it'
    >>> foreign("transformer_2.blocks.0.attn1.to_q.lora_A.weight")[:28]
    'a file of two LoRAs, one for'
    """
    for end, words in FOREIGN_ENDS.items():
        if re.fullmatch(f".+({end})", key):
            return words
    for beginning, words in FOREIGN_BEGINNINGS.items():
        if re.match(beginning, key):
            return words
    return ""


def layout_of(keys: Iterable[str]) -> str:
    """The layout of a LoRA's keys; `mixed` when they are of several, `bare` when they have no prefix.

    >>> layout_of(["lora_unet_blocks_0_ffn_0.alpha"]), layout_of(["blocks.0.attn1.to_q.lora_A.weight"])
    ('kohya', 'bare')
    """
    found = Counter(_layout_of(key) for key in keys)
    return next(iter(found)) if len(found) == 1 else "mixed"


def _layout_of(key: str) -> str:
    if key.startswith(UNDERSCORED_PREFIXES):
        return "kohya"
    return next((layout for prefix, layout in DOTTED_PREFIXES.items() if key.startswith(prefix)), "bare")


def module_name(name: str) -> str | None:
    """The diffusers name of a module with an original or a diffusers name; None for one that no LoRA can change.

    >>> module_name("blocks.0.self_attn.q"), module_name("blocks.0.attn1.to_q"), module_name("blocks.0.norm3")
    ('blocks.0.attn1.to_q', 'blocks.0.attn1.to_q', None)
    """
    if match := QWEN_BLOCK.fullmatch(name):
        return name if match["rest"] in QWEN_BLOCK_MODULES else None
    if match := BLOCK.fullmatch(name):
        rest = BLOCK_MODULES.get(match["rest"], match["rest"])
        return f"blocks.{match['number']}.{rest}" if rest in ORIGINAL_BLOCK_MODULES else None
    module = OUTER_MODULES.get(name, name)
    return module if module in ORIGINAL_OUTER_MODULES else None


def original_name(module: str) -> str:
    """The official name of a module that diffusers calls `module`.

    >>> original_name("blocks.7.attn1.to_out.0")
    'blocks.7.self_attn.o'

    Raises:
        KeyError: no such module in a transformer.
    """
    if (match := QWEN_BLOCK.fullmatch(module)) and match["rest"] in QWEN_BLOCK_MODULES:
        return module
    if match := BLOCK.fullmatch(module):
        return f"blocks.{match['number']}.{ORIGINAL_BLOCK_MODULES[match['rest']]}"
    return ORIGINAL_OUTER_MODULES[module]


def is_of_qwen(modules: Iterable[str]) -> bool:
    """Whether a LoRA that changes these modules is one of Qwen-Image; `proj_out` alone may be of either family.

    >>> is_of_qwen(["proj_out", "transformer_blocks.0.attn.to_q"]), is_of_qwen(["proj_out", "blocks.0.attn1.to_q"])
    (True, False)
    >>> is_of_qwen(["proj_out", "img_in"])
    True
    """
    return any(module in QWEN_OUTER_MODULES or QWEN_BLOCK.fullmatch(module) for module in modules)


def module_names(layout: Layout, module: str, *, qwen: bool) -> tuple[str, str, str]:
    """The keys of down, up and alpha of a module in a layout.

    >>> module_names("kohya", "blocks.0.attn1.to_q", qwen=False)[0]
    'lora_unet_blocks_0_self_attn_q.lora_down.weight'
    >>> [module_names("comfyui", "proj_out", qwen=qwen)[0] for qwen in (False, True)]
    ['diffusion_model.head.head.lora_A.weight', 'diffusion_model.proj_out.lora_A.weight']

    Args:
        layout: whose keys.
        module: its name in diffusers.
        qwen: the LoRA is one of Qwen-Image, whose modules have one name everywhere.

    Raises:
        KeyError: no such module in a transformer.
    """
    original = module if qwen and module_name(module) else original_name(module)
    if layout == "kohya":
        stem = KOHYA_PREFIX + original.replace(".", "_")
        return f"{stem}.lora_down.weight", f"{stem}.lora_up.weight", f"{stem}.alpha"
    stems = {"comfyui": f"diffusion_model.{original}", "diffusers": f"transformer.{module}"}
    stem = stems.get(layout, f"base_model.model.{module}")
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight", f"{stem}.alpha"


def without_prefix(stem: str) -> str:
    """A module's name without what layouts put before it.

    >>> without_prefix("base_model.model.diffusion_model.blocks.0.ffn.0")
    'blocks.0.ffn.0'
    """
    for prefix in DOTTED_PREFIXES:
        stem = stem.removeprefix(prefix)
    return stem


def _module_of_stem(stem: str) -> str | None:
    for prefix in UNDERSCORED_PREFIXES:
        if stem.startswith(prefix):
            return _module_of_underscored(stem.removeprefix(prefix))
    return module_name(without_prefix(stem))


def _module_of_underscored(stem: str) -> str | None:
    stem = stem.removeprefix("_")  # two underscores in files of Wan Fun's trainer
    if match := re.fullmatch(r"transformer_blocks_(?P<number>\d{1,4})_(?P<rest>.+)", stem):
        rest = UNDERSCORED_QWEN_MODULES.get(match["rest"])
        return None if rest is None else f"transformer_blocks.{match['number']}.{rest}"
    if match := re.fullmatch(r"blocks_(?P<number>\d{1,4})_(?P<rest>.+)", stem):
        rest = UNDERSCORED_BLOCK_MODULES.get(match["rest"])
        return None if rest is None else f"blocks.{match['number']}.{rest}"
    return UNDERSCORED_OUTER_MODULES.get(stem)


def _underscored(modules: dict[str, str]) -> dict[str, str]:
    """Original and diffusers names with underscores for dots -> diffusers name."""
    return {name.replace(".", "_"): new for original, new in modules.items() for name in (original, new)}


KEY = re.compile(r"(?P<stem>.+)\.(?:(?P<alpha>alpha)|lora[_.](?P<side>A|B|down|up)(?:\.default)?(?:\.weight)?)")
ADAPTER_KEY = re.compile(
    r"(?P<stem>.+)\.(?:(?P<part>hada_w[12]_[ab]|lokr_w[12](?:_[ab])?|dora_scale)(?:\.default)?"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
PART_ENDS = {"magnitude": "lora_magnitude_vector.weight"}
BLOCK = re.compile(r"blocks\.(?P<number>\d{1,4})\.(?P<rest>.+)")
QWEN_BLOCK = re.compile(r"transformer_blocks\.(?P<number>\d{1,4})\.(?P<rest>.+)")
SIDES = {"A": "down", "down": "down", "B": "up", "up": "up"}
ORIGINAL_BLOCK_MODULES = {new: original for original, new in BLOCK_MODULES.items()}
_OUTER_OF_ALL = OUTER_MODULES | {name: name for name in QWEN_OUTER_MODULES}
ORIGINAL_OUTER_MODULES = {new: original for original, new in _OUTER_OF_ALL.items()}
UNDERSCORED_BLOCK_MODULES = _underscored(BLOCK_MODULES)
UNDERSCORED_QWEN_MODULES = {name.replace(".", "_"): name for name in QWEN_BLOCK_MODULES}
UNDERSCORED_OUTER_MODULES = _underscored(_OUTER_OF_ALL)
