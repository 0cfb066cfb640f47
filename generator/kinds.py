"""What a weight file is, from its header alone: which model, in which layout, how big, how quantised.

A file is judged by the names and shapes of its tensors, never by its own name. Some models cannot be told apart that
way, for their tensors are the same: the Wan 2.1 T2V 14B, the two experts of T2V-A14B, and what was trained from them
(Phantom, CausVid, FusionX …); I2V-14B and Fun-InP 14B; the experts of I2V-A14B; the VAEs of Wan 2.1 and of
Qwen-Image; Qwen-Image and its Edit models. `Facts` then names every profile that fits, and what the file's name says
is given as a hint, no more.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from wangen import profiles
from wangen.generator import relatives
from wangen.generator.companions import TRANSFORMER_PREFIX, sort_out, strip_prefix
from wangen.generator.errors import WangenError
from wangen.generator.expert_names import expert_said, noted_expert
from wangen.generator.formats import Header, Shapes
from wangen.generator.headers import read_header, require_known_format, shards
from wangen.generator.layouts import Layout, layout_of, sizes_of
from wangen.generator.tasks import supported
from wangen.generator.vae_twins import QWEN, said_by_name, takes_vae
from wangen.generator.weight_counts import CLIP_DIM, QWEN_TEXT_DIM, UMT5_DIM

# kind -> (plain words, the flag that takes it)
KINDS = {
    "wan-vae-2.1": ("a Wan 2.1 VAE", "--vae"),
    "wan-vae-2.2": ("a Wan 2.2 VAE", "--vae"),
    "umt5-encoder": ("a umT5 text encoder", "--t5"),
    "open-clip": ("a CLIP image encoder", "--clip"),
    "wan-transformer-t2v": ("a Wan text-to-video transformer", "--dit"),
    "wan-transformer-i2v": ("a Wan 2.1 image-to-video transformer", "--dit"),
    "wan-transformer-flf2v": ("a Wan 2.1 first-and-last-frame transformer", "--dit"),
    "wan-transformer-i2v-2.2": ("a Wan 2.2 image-to-video transformer", "--dit"),
    "wan-transformer-ti2v": ("a Wan 2.2 text-and-image-to-video transformer", "--dit"),
    "wan-transformer-other": ("a relative of the Wan transformers", ""),
    "qwen-image-transformer": ("a Qwen-Image transformer", "--dit"),
    "qwen2.5-vl": ("a Qwen2.5-VL text encoder", "--t5"),
    "lora": ("a LoRA for Wan", "--network_weights or --lora_weight"),
    "lora-other": ("another adapter for Wan (LoHa, LoKr, DoRA)", ""),
    "pipeline": ("a checkpoint with several models in one file", ""),
    "quantized-other": ("weights quantised in a form that is not read here", ""),
    "training-state": ("a part of a training state", ""),
    "other": ("another model", ""),
    "unknown": ("a weight file of no known kind", ""),
}

# Per-block position biases are what umT5 has and T5 has not: the tensor that only umT5 has, by layout.
_SECOND_BIAS = {
    "original": "blocks.1.pos_embedding.embedding.weight",
    "huggingface": "block.1.layer.0.SelfAttention.relative_attention_bias.weight",
    "gguf": "enc.blk.1.attn_rel_b.weight",
}
# What only first-and-last-frame transformers have: positions of two images' features, or Kijai's marker.
_TWO_IMAGES = ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed", "model_type.Wan2_1-FLF2V")
WIDTHS = {
    "umt5-encoder": UMT5_DIM, "open-clip": CLIP_DIM, "wan-vae-2.1": 96, "wan-vae-2.2": 160, "qwen2.5-vl": QWEN_TEXT_DIM
}  # fmt: skip
"""The size `dim` of the models that all profiles share."""

_FAMILIES = {"wan-transformer-": "a Wan transformer", "wan-vae-": "a Wan VAE"}
"""The beginning of several kinds -> what they have in common."""
_OTHER_VISION = {1024: "ViT-L", 1408: "ViT-g", 1664: "ViT-bigG"}
_DIT_FLAGS = ("--dit", "--dit_high_noise")
_NUM_NAMES, _NAME_CHARACTERS = 3, 60


@dataclass(frozen=True)
class Judged:
    """What the names and shapes of a file's tensors say.

    Attributes:
        kind: a key of `KINDS`.
        words: the kind with the size, or the name of another model: "a Wan text-to-video transformer (14B, dim 5120)".
        layout: whose names the tensors have: `original`, `diffusers`, `huggingface`, `gguf`; empty when unknown.
        sizes: what the shapes say: dim, ffn_dim, num_layers, num_heads, in_channels, out_channels …
        profiles: every model profile that a file of these shapes fits.
    """

    kind: str
    words: str = ""
    layout: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    profiles: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts(Judged):
    """What is known of a weight file.

    Attributes:
        format: `safetensors`, `pth` or `gguf`.
        num_parameters: elements of all weights, in their logical shapes.
        dtypes: bytes of the weights by dtype, most first.
        quantisation: `fp8_e4m3`, `fp8_scaled`, `Q4_K GGUF` …; empty for 16 and 32 bits.
        hint: what the file's name says beyond its tensors, as a sentence; often empty.
        metadata: the text fields of the file.
        files: all files, where it is sharded.
        num_bytes: their sizes together.
    """

    format: str
    num_parameters: int
    dtypes: Mapping[str, int]
    quantisation: str
    hint: str
    metadata: Mapping[str, str] = field(repr=False)
    files: tuple[Path, ...]
    num_bytes: int


def examine(path: Path, flag: str = "") -> Facts:
    """What a weight file is.

    Args:
        path: a file, any of its shards, their index, or a folder as `headers.read_header` takes it.
        flag: the option that it was given to, which says what is meant in a folder of several models.

    Raises:
        WangenError: as `headers.read_header`.
    """
    header, files = read_header(path, flag), shards(path, flag)
    judged = judge(header)
    weights = header.tensors if judged.kind == "pipeline" else sort_out(header).weights
    dtypes: dict[str, int] = {}
    for info in weights.values():
        dtypes[info.dtype] = dtypes.get(info.dtype, 0) + (info.place.num_bytes if info.place else 0)
    return Facts(
        **vars(judged),
        format=header.format,
        num_parameters=sum(math.prod(info.shape) for info in weights.values()),
        dtypes=dict(sorted(dtypes.items(), key=lambda item: -item[1])),
        quantisation=_quantisation(header, dtypes),
        hint=_hint(judged.kind, files[0], header.metadata),
        metadata=header.metadata,
        files=tuple(files),
        num_bytes=sum(file.stat().st_size for file in files),
    )


def judge(header: Header) -> Judged:
    """What the tensors of a header are."""
    judged = _judge(header)
    fitting = _fitting(judged.kind, judged.sizes)
    return replace(judged, words=_words(judged, fitting), profiles=fitting)


def kind_of(header: Header) -> str:
    """The kind that a header shows: a key of `KINDS`."""
    return _judge(header).kind


def describe(kind: str) -> str:
    """A kind in plain words.

    >>> describe("wan-transformer-t2v")
    'a Wan text-to-video transformer'
    """
    return KINDS[kind][0]


def expect(path: Path, kinds: str | Sequence[str], flag: str, task: str | None = None) -> Header:
    """The header of a file that must be of one kind, or of one of several.

    Args:
        path: the file given to `flag`, or a folder.
        kinds: what `flag` takes.
        flag: the flag as the user writes it (`--vae`).
        task: the model profile that the file must fit.

    Raises:
        WangenError: as `headers.read_header`, `headers.require_known_format` and `require`.
    """
    header = read_header(path, flag)
    require_known_format(header, path)
    require(path, judge(header), kinds, flag, task)
    return header


def require(path: Path, judged: Judged, kinds: str | Sequence[str], flag: str, task: str | None = None) -> None:
    """Refuse a file of another kind, or of another task.

    Args:
        path: the file, for the message.
        judged: what it is.
        kinds: what `flag` takes.
        flag: the flag as the user writes it (`--vae`).
        task: the model profile that the file must fit. A transformer whose sizes are those of another profile is
            refused; one whose sizes are no profile's passes.

    Raises:
        WangenError: the file is something else; the message says what, what was expected, and what takes this file.
    """
    wanted = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if judged.kind not in wanted:
        taker = f"{flag} of {task}" if task else flag
        takes = (task and takes_vae(profiles.model(task), wanted)) or _family(wanted)
    elif task and judged.profiles and task not in judged.profiles:
        taker, takes = f"--task {task}", _words(_of_task(task, judged.kind), (task,))
    else:
        return
    cure = f"give {takes}{_belongs(judged.kind, flag, judged.profiles)}"
    raise WangenError(f"this is {judged.words}; {taker} takes {takes}", where=str(path), cure=cure)


def _judge(header: Header) -> Judged:
    """Identify the model by names and shapes, from what is told most surely to what is not."""
    names = header.tensors
    if words := relatives.adapter(names):
        of_qwen = relatives.is_for_qwen(names)
        ours = of_qwen or relatives.is_for_wan(names)
        plain = words == "a LoRA" and ours
        about = "" if plain else words + ("" if ours else " for another model than Wan")
        about = f"{words} for Qwen-Image" if of_qwen else about
        return Judged("lora" if plain else "lora-other", about)
    if parts := relatives.parts_of(names):
        inner = {strip_prefix(name): info.shape for name, info in names.items() if name.startswith(TRANSFORMER_PREFIX)}
        words = relatives.other_model(inner)
        about = f" ({words})" if words else ""
        return Judged("pipeline", f"a checkpoint that holds {', '.join(parts[:-1])} and {parts[-1]} in one file{about}")
    if packing := relatives.packing(names):
        return Judged("quantized-other", f"weights quantised by {packing}")
    if names and relatives.is_optimizer(names):
        return Judged("training-state", "the optimizer of a training state")
    shapes = {strip_prefix(name): info.shape for name, info in names.items()}
    found = layout_of(shapes)
    if found:
        return _of_layout(*found)
    if (relative := relatives.relative(shapes)) and any(name.startswith("blocks.0.") for name in shapes):
        return Judged("wan-transformer-other", f"the {relative} part of a transformer")
    if words := relatives.other_model(shapes):
        return Judged("other", words)
    some = ", ".join(name[:_NAME_CHARACTERS] for name in sorted(names)[:_NUM_NAMES])
    return Judged("unknown", f"{describe('unknown')} (its tensors: {some} …)")


def _of_layout(layout: Layout, shapes: Shapes) -> Judged:
    sizes = sizes_of(layout, shapes)
    if layout.family == "transformer":
        kind, relative = _transformer_kind(shapes, sizes)
        return Judged(kind, f"a {relative} transformer" if relative else "", layout.name, sizes)
    if layout.family == "t5" and sizes["num_layers"] > 1 and _SECOND_BIAS[layout.name] not in shapes:
        return Judged("other", "a T5 text encoder, not umT5 (its layers share one position bias)")
    if layout.family == "clip" and sizes.get("dim") in _OTHER_VISION:
        return Judged("other", f"a CLIP {_OTHER_VISION[sizes['dim']]} image encoder, where Wan takes ViT-H")
    kinds = {
        "vae": "wan-vae-2.1", "vae-2.2": "wan-vae-2.2", "t5": "umt5-encoder", "clip": "open-clip",
        "qwen-transformer": "qwen-image-transformer", "qwen-vl": "qwen2.5-vl",
    }  # fmt: skip
    return Judged(kinds[layout.family], "", layout.name, sizes)


def _transformer_kind(shapes: Shapes, sizes: Mapping[str, int]) -> tuple[str, str]:
    """The kind of a transformer, and the name of the relative that it is, if it is one."""
    if relative := relatives.relative(shapes):
        return "wan-transformer-other", relative
    has_image = any(name.startswith(("img_emb.", "condition_embedder.image_embedder.")) for name in shapes)
    two_images = any(name.startswith(_TWO_IMAGES) for name in shapes)
    channels = sizes.get("in_channels", 0), sizes.get("out_channels", 0), has_image
    if channels == (36, 16, True) and sizes.get("dim") == relatives.FUN_INP_DIM:
        return "wan-transformer-other", "Wan 2.1 Fun-InP 1.3B"
    kinds = {
        (16, 16, False): "wan-transformer-t2v",
        (36, 16, True): "wan-transformer-flf2v" if two_images else "wan-transformer-i2v",
        (36, 16, False): "wan-transformer-i2v-2.2",
        (48, 48, False): "wan-transformer-ti2v",
    }
    if channels in kinds:
        return kinds[channels], ""
    number = f"Wan-like ({channels[0]} input and {channels[1]} output channels)"
    return "wan-transformer-other", relatives.CHANNELS.get(channels, number)


def _fitting(kind: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The profiles that take a file of this kind and of these sizes."""
    models = [profiles.model(name) for name in tasks_of(kind)]
    if not _is_transformer(kind):
        return tuple(model.name for model in models if sizes.get("dim") == WIDTHS.get(kind))
    return tuple(model.name for model in models if vars(model.transformer).items() <= sizes.items())


def _is_transformer(kind: str) -> bool:
    return kind.startswith(("wan-transformer-", "qwen-image-transformer"))


def tasks_of(kind: str) -> list[str]:
    """The profiles that take a file of this kind, whatever its sizes."""
    names = profiles.model_names()
    return [name for name in names if any(weights.kind == kind for weights in profiles.model(name).weights)]


def _of_task(task: str, kind: str) -> Judged:
    return Judged(kind, sizes=vars(profiles.model(task).transformer))


def _words(judged: Judged, fitting: Sequence[str]) -> str:
    """What a file is, with its size: that of people (14B) where it is a known one, and the width."""
    words = judged.words or describe(judged.kind)
    if not _is_transformer(judged.kind) or "dim" not in judged.sizes:
        return words
    of_wan = judged.kind.startswith("wan-")
    known = {name.rpartition("-")[2].removeprefix("A") for name in fitting if of_wan}
    size = ", ".join([*sorted(known), f"dim {judged.sizes['dim']}"])
    return f"{words} ({size})"


def _family(kinds: Sequence[str]) -> str:
    """Several kinds in words: what they have in common."""
    found = []
    for kind in kinds:
        same = next((start for start in _FAMILIES if kind.startswith(start) and len(kinds) > 1), None)
        found.append(_FAMILIES[same] if same else describe(kind))
    return " or ".join(dict.fromkeys(found))


def _belongs(kind: str, flag: str, fitting: Sequence[str]) -> str:
    """What takes a file, as the end of a cure; empty when nothing does."""
    belongs = KINDS[kind][1]
    if belongs and belongs != flag and not (belongs == "--dit" and flag in _DIT_FLAGS):
        return f"; this file belongs to {belongs}"
    tasks = sorted(fitting or tasks_of(kind), key=lambda task: task not in supported())
    named = [*tasks[:3], *(["…"] if len(tasks) > 3 else [])]
    return f"; this file is for --task {', '.join(named)}" if tasks else ""


def _quantisation(header: Header, dtypes: Mapping[str, int]) -> str:
    """How most of the weights are coded, where that is not a plain number of 16 bits or more."""
    most = max(dtypes, key=lambda dtype: dtypes[dtype], default="")
    if header.format == "gguf":
        return "" if most in ("F32", "F16", "BF16") else f"{most} GGUF"
    if most in ("F8_E4M3", "F8_E5M2"):
        scaled = any("scale" in roles for roles in sort_out(header).companions.values())
        name = "fp8" if scaled and most == "F8_E4M3" else most.lower().replace("f8", "fp8")
        return f"{name}_scaled" if scaled else name
    return {"I8": "int8", "U8": "packed in bytes"}.get(most, "")


def _hint(kind: str, path: Path, metadata: Mapping[str, str]) -> str:
    """What the name of a file says that its tensors cannot."""
    if kind == "wan-vae-2.1" and said_by_name(path) == QWEN:
        return "its name says Qwen-Image, whose VAE has the same tensors"
    if kind in ("wan-transformer-t2v", "wan-transformer-i2v-2.2") and (noise := expert_said(path, metadata)):
        return f"its {'header' if noted_expert(metadata) else 'name'} says {noise}-noise expert"
    return ""
