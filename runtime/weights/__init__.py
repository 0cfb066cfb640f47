"""Wan 2.1 text-to-video checkpoints in their original layouts -> diffusers and transformers modules.

Sizes are read from the tensors, never from a hub. A model is built without memory on the meta device and its tensors
are put in one by one, memory-mapped where neither dtype nor device changes: at no time does a second copy exist.
Files are judged by their headers before a tensor is read, so a wrong file is named in milliseconds.
"""

import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers, convert_wan_vae_to_diffusers
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import UMT5Config, UMT5EncoderModel

from wangen.generator.companions import strip_prefix
from wangen.generator.errors import WangenError
from wangen.generator.headers import Header, expect, shards
from wangen.generator.tokenizer_file import find_tokenizer
from wangen.runtime.prompts import clean_prompt

HEAD_DIM = 128
OTHER_FILE = "download the file again, or give one of the original Wan 2.1 text-to-video files"
MAX_PROMPT_TOKENS = 512

Shapes = Mapping[str, tuple[int, ...]]


def load_transformer(
    path: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> WanTransformer3DModel:
    """A Wan text-to-video transformer, frozen and in eval mode.

    Args:
        path: `.safetensors` (whole, or any shard) or `.pth`; the prefixes that ComfyUI adds are understood.
        dtype: None keeps what the file stores. Another dtype casts all weights except those that diffusers keeps in
            float32 (time embedder, modulation tables, the affine norm): their products steer every block, and
            rounding them costs more than they weigh. The forward pass then computes in `dtype`.
        device: where the weights go, tensor by tensor.

    Raises:
        WangenError: another kind of file, missing, surplus or misshapen tensors.
    """
    header = expect(path, "wan-transformer-t2v", "--dit")
    shapes = _shapes(header)
    dim = _size(path, shapes, "patch_embedding.weight", 0)
    if dim % HEAD_DIM:
        raise WangenError(f"a transformer {dim} wide: not a multiple of the head size {HEAD_DIM}", where=str(path))
    patch = shapes["patch_embedding.weight"][2:]
    with torch.device("meta"):
        model = WanTransformer3DModel(
            patch_size=patch,
            num_attention_heads=dim // HEAD_DIM,
            attention_head_dim=HEAD_DIM,
            in_channels=_size(path, shapes, "patch_embedding.weight", 1),
            out_channels=_size(path, shapes, "head.head.weight", 0) // max(1, int(torch.Size(patch).numel())),
            text_dim=_size(path, shapes, "text_embedding.0.weight", 1),
            freq_dim=_size(path, shapes, "time_embedding.0.weight", 1),
            ffn_dim=_size(path, shapes, "blocks.0.ffn.0.weight", 0),
            num_layers=_num_blocks(path, shapes),
        )
    # The rotary frequencies are computed, not stored: on the meta device they would have no values.
    model.rope = WanRotaryPosEmbed(HEAD_DIM, patch, model.config.rope_max_seq_len)
    kept = tuple(WanTransformer3DModel._keep_in_fp32_modules)
    _fill(model, path, header, convert_wan_transformer_to_diffusers, dtype, device, keep_float32=kept)
    shield_from_autocast(model, torch.device(device))
    return model


def shield_from_autocast(model: WanTransformer3DModel, device: torch.device) -> None:
    """Let autocast, under which training runs, leave some modules alone.

    It would round the time embedding, which the official code keeps in float32 (its projection too; diffusers rounds
    that one). And on CUDA it would turn queries and keys into float32 at their norms, which flash attention and
    xformers refuse; the CPU's autocast does not.
    """
    off = torch.autocast(device.type, enabled=False)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.RMSNorm)]
    for module in (model.condition_embedder.time_embedder, *norms):
        module.forward = off(module.forward)


def load_vae(path: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> AutoencoderKLWan:
    """A Wan 2.1 VAE, frozen and in eval mode.

    Args:
        path: `Wan2.1_VAE.pth` or its safetensors form, in the original names.
        dtype: None keeps what the file stores (float32 in the official one).
        device: where the weights go.

    Raises:
        WangenError: another kind of file, missing, surplus or misshapen tensors.
    """
    header = expect(path, "wan-vae-2.1", "--vae")
    shapes = _shapes(header)
    with torch.device("meta"):
        model = AutoencoderKLWan(
            base_dim=_size(path, shapes, "encoder.conv1.weight", 0),
            z_dim=16,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=2,
            attn_scales=[],
            temperal_downsample=[False, True, True],
        )
    _fill(model, path, header, convert_wan_vae_to_diffusers, dtype, device)
    return model


def load_text_encoder(
    path: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> UMT5EncoderModel:
    """A umT5 encoder, frozen and in eval mode.

    Args:
        path: `models_t5_umt5-xxl-enc-bf16.pth` or its safetensors form, in the original names.
        dtype: None keeps what the file stores (bfloat16 in the official one). All weights are cast alike, as the
            official code does; transformers by itself would keep `wo` in float32.
        device: where the weights go.

    Raises:
        WangenError: another kind of file, missing, surplus or misshapen tensors.
    """
    header = expect(path, "umt5-encoder", "--t5")
    shapes = _shapes(header)
    num_heads = _size(path, shapes, "blocks.0.pos_embedding.embedding.weight", 1)
    config = UMT5Config(
        vocab_size=_size(path, shapes, "token_embedding.weight", 0),
        d_model=_size(path, shapes, "token_embedding.weight", 1),
        d_kv=_size(path, shapes, "blocks.0.attn.q.weight", 0) // max(1, num_heads),
        d_ff=_size(path, shapes, "blocks.0.ffn.fc1.weight", 0),
        num_layers=_num_blocks(path, shapes),
        num_heads=num_heads,
        relative_attention_num_buckets=_size(path, shapes, "blocks.0.pos_embedding.embedding.weight", 0),
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    with torch.device("meta"):
        model = UMT5EncoderModel(config)
    _fill(model, path, header, _umt5_names, dtype, device)
    return model


def load_tokenizer(path: Path) -> Tokenizer:
    """The umT5 tokenizer, without truncation or padding; it ends every text with `</s>`.

    `AutoTokenizer` is avoided: its present form gives umT5 the unknown token of another model.

    Args:
        path: the T5 weights (the tokenizer is looked for beside them), a folder, `tokenizer.json` or `spiece.model`.

    Raises:
        WangenError: none found, with the places looked at, or the file is no tokenizer.
    """
    file = find_tokenizer(Path(path))
    tokenizer = _tokenizer_from_spiece(file) if file.name.endswith(".model") else _tokenizer_from_json(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.token_to_id("</s>") is None or tokenizer.encode("a").tokens[-1:] != ["</s>"]:
        raise WangenError("this tokenizer does not end a text with </s>: not umT5's", where=str(file))
    return tokenizer


@torch.no_grad()
def encode_prompts(text_encoder: UMT5EncoderModel, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[torch.Tensor]:
    """The embedding of each prompt, computed as one batch padded to its longest and masked.

    Args:
        text_encoder: from `load_text_encoder`.
        tokenizer: from `load_tokenizer`.
        prompts: raw texts; they are cleaned here. The empty text is the `</s>` token alone.

    Returns:
        For each prompt (length, text_dim) in the encoder's dtype on its device, where length counts the `</s>` and
        is at most 512; a longer prompt is cut and keeps its `</s>`.
    """
    if not prompts:
        return []
    end = tokenizer.token_to_id("</s>")
    texts = [encoding.ids[:-1] for encoding in tokenizer.encode_batch([clean_prompt(prompt) for prompt in prompts])]
    rows = [[*ids[: MAX_PROMPT_TOKENS - 1], end] for ids in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=text_encoder.device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=text_encoder.device)
    hidden = text_encoder(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, longest, text_dim)
    return [hidden[i, : len(row)].clone() for i, row in enumerate(rows)]


def _fill(
    model: torch.nn.Module,
    path: Path,
    header: Header,
    convert: Callable[[dict[str, Any]], dict[str, Any]],
    dtype: torch.dtype | None,
    device: torch.device | str,
    *,
    keep_float32: Iterable[str] = (),
) -> None:
    """Put a file's tensors into a model on the meta device, and freeze it.

    `convert` renames the keys of a state dict. It is run on the names alone, so no tensor is held while it works.
    """
    names = _new_names(path, header, convert)
    _compare(path, model, {names[name]: info.shape for name, info in header.tensors.items()})
    if dtype is None and any(info.dtype.startswith("F8") for info in header.tensors.values()):
        raise WangenError("weights stored in 8 bits cannot be computed with as they are", where=str(path),
                          cure="ask for bfloat16")  # fmt: skip
    kept = set(keep_float32)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in read_tensors(path, header):
        new_name = names[name]
        wanted = torch.float32 if dtype is not None and kept & set(new_name.split(".")) else dtype
        state[new_name] = tensor.to(device=device, dtype=wanted)
    model.load_state_dict(state, strict=False, assign=True)
    if isinstance(model, UMT5EncoderModel):
        model.tie_weights()
    model.to(device)
    model.eval().requires_grad_(False)
    unset = [name for name, value in [*model.named_parameters(), *model.named_buffers()] if value.is_meta]
    assert not unset, f"left on the meta device: {unset[:3]}"


def _new_names(path: Path, header: Header, convert: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, str]:
    """The module's name for each tensor of the file."""
    try:
        converted = convert({strip_prefix(name): name for name in header.tensors})
    except (LookupError, ValueError) as error:
        raise WangenError(f"the tensor names of this file are not understood ({error})", where=str(path)) from error
    names = {old: new for new, old in converted.items()}
    if lost := header.tensors.keys() - names.keys():
        raise WangenError(f"two tensors of this file mean the same weight ({min(lost)})", where=str(path))
    return names


def _compare(path: Path, model: torch.nn.Module, found: Shapes) -> None:
    # Parameters by object: a tied weight is listed once, as the file stores it once.
    wanted = {name: tuple(value.shape) for name, value in model.named_parameters()}
    problems = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unexpected": sorted(found.keys() - wanted.keys()),
        "of another shape": sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name]),
    }
    words = [
        f"{len(names)} {problem} ({', '.join(names[:3])}{' …' if len(names) > 3 else ''})"
        for problem, names in problems.items()
        if names
    ]
    if words:
        raise WangenError("the tensors do not fit the model: " + "; ".join(words), where=str(path), cure=OTHER_FILE)


def read_tensors(path: Path, header: Header) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file and all its shards by the file's own names, memory-mapped one by one.

    Args:
        path: as for `read_header`.
        header: what `read_header` made of it.
    """
    if header.format == "pth":
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        yield from content.get("state_dict", content).items()
        return
    for file in shards(path):
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield name, opened.get_tensor(name)


def _shapes(header: Header) -> Shapes:
    return {strip_prefix(name): info.shape for name, info in header.tensors.items()}


def _size(path: Path, shapes: Shapes, name: str, axis: int) -> int:
    shape = shapes.get(name)
    if shape is None or axis >= len(shape):
        raise WangenError(f"the tensors do not fit the model: {name} is {shape or 'missing'}", where=str(path),
                          cure=OTHER_FILE)  # fmt: skip
    return shape[axis]


def _num_blocks(path: Path, shapes: Shapes) -> int:
    numbers = {int(match[1]) for name in shapes if (match := re.match(r"blocks\.(\d{1,4})\.", name))}
    if numbers != set(range(len(numbers))):
        raise WangenError("the tensors do not fit the model: blocks are missing", where=str(path), cure=OTHER_FILE)
    return len(numbers)


UMT5_NAMES = {
    "norm1": "layer.0.layer_norm",
    "attn.q": "layer.0.SelfAttention.q",
    "attn.k": "layer.0.SelfAttention.k",
    "attn.v": "layer.0.SelfAttention.v",
    "attn.o": "layer.0.SelfAttention.o",
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}


def _umt5_names(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The official umT5 names in those of transformers; unknown names stay as they are."""
    renamed = {}
    for name, value in checkpoint.items():
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", name)
        if match and match[2] in UMT5_NAMES:
            name = f"encoder.block.{match[1]}.{UMT5_NAMES[match[2]]}.weight"
        elif name == "token_embedding.weight":
            name = "shared.weight"
        elif name == "norm.weight":
            name = "encoder.final_layer_norm.weight"
        renamed[name] = value
    return renamed


def _tokenizer_from_json(file: Path) -> Tokenizer:
    # The library raises a bare Exception for a file it cannot parse, so what it must hold is checked before.
    text = file.read_text("utf-8", errors="replace")
    if '"model"' not in text or '"vocab"' not in text:
        raise WangenError("not a tokenizer.json: it has no model with a vocabulary", where=str(file))
    return Tokenizer.from_str(text)


def _tokenizer_from_spiece(file: Path) -> Tokenizer:
    """A fast tokenizer from a SentencePiece model alone, through the converter of transformers."""
    import sentencepiece
    from transformers.convert_slow_tokenizer import T5Converter

    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as error:
        raise WangenError(f"not a SentencePiece model ({error})", where=str(file)) from error
    # The converter asks its tokenizer for these three things only.
    source = types.SimpleNamespace(vocab_file=str(file), _extra_ids=0, convert_tokens_to_ids=pieces.piece_to_id)
    with warnings.catch_warnings():
        # umT5 was trained with bytes as fallback, but its official fast tokenizer does without them too.
        warnings.filterwarnings("ignore", message="The sentencepiece tokenizer that you are converting")
        tokenizer: Tokenizer = T5Converter(source).converted()
    tokenizer.add_special_tokens([pieces.id_to_piece(pieces.unk_id())])  # as in the official tokenizer.json
    return tokenizer
