"""What people give by mistake: the relatives of Wan's transformers, and other models, each told by a tensor's name.

The relatives stand on the same blocks and have inputs of their own; wangen neither trains nor samples them, and says
which one it was given.
"""

import re
from collections.abc import Iterable, Mapping

from wangen.generator.formats import Shapes
from wangen.generator.lora_keys import OTHER_ADAPTERS, UNDERSCORED_PREFIXES

# The beginning of a tensor's name, without prefix -> the relative that has it.
RELATIVES = {
    "vace_": "Wan VACE",
    "pose_patch_embedding.": "Wan 2.2 Animate",
    "face_adapter.": "Wan 2.2 Animate",
    "motion_encoder.": "Wan 2.2 Animate",
    "casual_audio_encoder.": "Wan 2.2 S2V",
    "audio_injector.": "Wan 2.2 S2V",
    "trainable_cond_mask.": "Wan 2.2 S2V",
    "control_adapter.": "Wan Fun-Camera",
    "ref_conv.": "Wan Fun-Control",
    "audio_proj.audio_proj_glob_": "HuMo",
    "audio_proj.proj1": "MultiTalk, InfiniteTalk or SkyReels-V3",
    "multitalk_audio_proj.": "MultiTalk or InfiniteTalk",
    "proj_model.": "FantasyTalking",
    "blocks.0.cam_encoder.": "ReCamMaster",
    "blocks.0.motion_attn.": "MTVCrafter",
    "blocks.0.self_attn.ref_adapter.": "Lynx",
    "blocks.0.cross_attn.ip_adapter.": "Lynx",
    "dwpose_embedding.": "UniAnimate",
    "randomref_embedding_pose.": "UniAnimate",
    "fps_embedding.": "SkyReels-V2",
    "condition_embedder.fps_embedding.": "SkyReels-V2",
    "patch_embedding_mask.": "SCAIL-2",
    "patch_embedding_pose.": "SCAIL",
    "patch_embedding_global.": "WanDancer",
    "LQ_proj_in.": "FlashVSR",
    "controlnet_patch_embedding.": "Uni3C",
    "video_model.blocks.0.": "Ovi",
}

# (input channels, output channels, whether an image branch is there) -> the relative with such a transformer.
CHANNELS = {
    (48, 16, True): "Wan 2.1 Fun-Control",
    (52, 16, False): "Wan 2.2 Fun-Control",
}
FUN_INP_DIM = 1536
"""The only image-to-video transformer of Wan's form this wide is Fun-InP 1.3B."""

# The beginning of a tensor's name -> what the file is. The first that fits counts.
OTHERS = {
    "txt_in.individual_token_refiner.": "a HunyuanVideo transformer",
    "context_embedder.token_refiner.": "a HunyuanVideo transformer",
    "double_blocks.0.": "a Flux transformer",
    "single_transformer_blocks.0.": "a Flux transformer",
    "transformer_blocks.0.img_mod.": "a Qwen-Image transformer",
    "patchify_proj.": "an LTX-Video transformer",
    "caption_projection.": "an LTX-Video or PixArt transformer",
    "patch_embed.text_proj.": "a CogVideoX transformer",
    "joint_blocks.0.": "a Stable Diffusion 3 transformer",
    "input_blocks.0.": "a Stable Diffusion UNet",
    "down_blocks.0.": "a Stable Diffusion UNet",
    "encoder.down.0.block.0.": "an image VAE (Stable Diffusion, Flux)",
    "encoder.down_blocks.0.resnets.0.norm1.weight": "an image VAE (Stable Diffusion, Flux)",
    "encoder.down_blocks.0.resnets.0.conv1.conv.": "another video VAE (HunyuanVideo, CogVideoX, LTX)",
    "encoder.down.0.block.0.conv1.conv.": "another video VAE (HunyuanVideo)",
    "encoder.0.weight": "a tiny VAE for previews (TAE)",
    "decoder.1.weight": "a tiny VAE for previews (TAE)",
    "decoder.block.0.": "a whole T5 with its decoder",
    "dec.blk.0.": "a whole T5 with its decoder",
    "text_model.encoder.layers.0.": "a CLIP text encoder",
    "transformer.text_model.encoder.layers.0.": "a CLIP text encoder",
    "transformer.resblocks.0.": "an OpenCLIP text encoder",
    "visual.blocks.0.attn.qkv.": "a Qwen-VL language model",
    "model.visual.blocks.0.": "a Qwen-VL language model",
    "model.layers.0.self_attn.": "a language model",
    "model.language_model.layers.0.": "a language model",
    "blk.0.attn_q.": "a language model",
}

# The end of a tensor's name -> the form of quantisation that it belongs to.
PACKED = {
    r"\.(qweight|wscales|wtscale|smooth_orig|proj_down)": "SVDQuant (nunchaku) or GPTQ",
    r"\.(absmax|quant_map|nested_absmax|SCB|quant_state\..+|weight_format)": "bitsandbytes",
    r"\.(weight_scale_2|weight_global_scale)": "NVFP4",
}

_LORA = re.compile(r"[._]lora[_.](A|B|down|up)\b")

_PREFIXES = "|".join(UNDERSCORED_PREFIXES)
_WAN_MODULE = re.compile(
    rf"(?:^|\.|lora_unet__|{_PREFIXES})blocks[._]\d+[._]"
    r"(?:self_attn[._][qkvo]|cross_attn[._](?:[qkvo]|[kv]_img)|ffn[._](?:0|2|net)"
    r"|attn[12][._](?:to_[qkv]|to_out|add_[kv]_proj))(?=\.|_\d|$)"
)
_QWEN_MODULE = re.compile(
    rf"(?:^|\.|{_PREFIXES})transformer_blocks[._]\d+[._]"
    r"(?:attn[._](?:to_[qkv]|to_out[._]0|to_add_out|add_[qkv]_proj)|(?:img|txt)_(?:mlp[._]net[._](?:0[._]proj|2)|mod[._]1))"
    r"(?=\.|$)"
)
_OPTIMIZER = re.compile(
    r"\d+\.[a-z0-9_]+"
    r"|(?:blocks|transformer_blocks|condition_embedder|patch_embedding|proj_out|scale_shift_table|group)\b[^/]*/[A-Za-z0-9_.]+"
)

# Prefixes of the parts of a checkpoint that holds a whole pipeline.
_PARTS = {
    "the transformer": ("model.diffusion_model.", "diffusion_model."),
    "the VAE": ("first_stage_model.", "vae."),
    "the text encoder": ("text_encoders.", "cond_stage_model.", "conditioner."),
}


def parts_of(names: Iterable[str]) -> list[str]:
    """Which parts of a pipeline the names of a file belong to, where there is more than one.

    >>> parts_of(["model.diffusion_model.head.head.bias", "vae.conv1.bias"])
    ['the transformer', 'the VAE']
    """
    listed = list(names)
    parts = [part for part, prefixes in _PARTS.items() if any(name.startswith(prefixes) for name in listed)]
    return parts if len(parts) > 1 else []


def packing(names: Iterable[str]) -> str:
    """The form of quantisation that is not read here, in words; empty for none.

    >>> packing(["blocks.0.ffn.0.weight", "blocks.0.ffn.0.weight.absmax"])
    'bitsandbytes'
    """
    return _first(PACKED, names)


def adapter(names: Iterable[str]) -> str:
    """What a file with low-rank factors is, in words; empty for a file without.

    >>> adapter(["lora_unet_blocks_0_ffn_0.lora_up.weight"])
    'a LoRA'
    """
    listed = list(names)
    return _first(OTHER_ADAPTERS, listed) or ("a LoRA" if any(map(_LORA.search, listed)) else "")


def is_for_wan(names: Iterable[str]) -> bool:
    """Whether the modules that an adapter changes are those of a Wan transformer, in any trainer's names.

    >>> is_for_wan(["diffusion_model.blocks.0.self_attn.q.lora_A.weight"])
    True
    >>> is_for_wan(["lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"])
    False
    """
    return any(map(_WAN_MODULE.search, names))


def is_for_qwen(names: Iterable[str]) -> bool:
    """Whether the modules that an adapter changes are those of a Qwen-Image transformer, and none of Flux's alone.

    >>> is_for_qwen(["transformer.transformer_blocks.0.img_mlp.net.2.lora_A.weight"])
    True
    """
    listed = list(names)
    return any(map(_QWEN_MODULE.search, listed)) and not any("single_transformer_blocks" in name for name in listed)


def is_optimizer(names: Iterable[str]) -> bool:
    """Whether the tensors are an optimizer's, as in the `optimizer.safetensors` of a training state."""
    return all(map(_OPTIMIZER.fullmatch, names))


def relative(shapes: Shapes) -> str:
    """The relative of Wan that has such a tensor; empty for none."""
    return _begins(RELATIVES, shapes)


def other_model(shapes: Shapes) -> str:
    """Another model that is known by a tensor's name, in words; empty for none."""
    return _begins(OTHERS, shapes)


def _begins(table: Mapping[str, str], names: Iterable[str]) -> str:
    listed = list(names)
    return next((words for start, words in table.items() if any(name.startswith(start) for name in listed)), "")


def _first(table: Mapping[str, str], names: Iterable[str]) -> str:
    listed = list(names)
    for pattern, words in table.items():
        ends = re.compile(f"(?:{pattern})$")
        if any(map(ends.search, listed)):
            return words
    return ""
