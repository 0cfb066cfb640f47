"""Qwen2.5-VL as text encoder: a prompt in its template, control images and all -> the embedding.

Letters in shapes: L tokens, N patches of pictures.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

from wangen.generator.errors import WangenError
from wangen.generator.kinds import expect
from wangen.generator.layouts import HEAD_DIM
from wangen.generator.tokenizer_file import tokenizer_of
from wangen.profiles import Model, Prompt
from wangen.runtime.models.qwen_image_edit.pictures import MERGE, TIME_PATCH, patches, seen_by_encoder
from wangen.runtime.models.qwen_image_edit.streamed import StreamedTextEncoder
from wangen.runtime.weights.filling import Checkpoint, build, fill, open_checkpoint

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger("wangen")

PAD = "<|image_pad|>"
"""The token that stands for one merged patch of a picture."""
MAX_ROWS = 4096 - 128
"""Of an embedding: the transformer has 4096 positions, and a text's begin behind half the rows of the picture's latent
patches, which are 128 of a picture of 4096 pixels."""
VISION_HEAD_DIM = 80
FULL_ATTENTION_EVERY = 8
"""The vision blocks look at windows of the picture, but for every eighth, which looks at all of it."""
MROPE_SECTION = (16, 24, 24)
"""How half the width of a head is shared out to time, height and width."""


def load_text_encoder(
    path: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", fp8: bool = False
) -> Qwen2_5_VLModel:
    """Qwen2.5-VL without its output layer, frozen and in eval mode; its sizes are read from its tensors.

    Args:
        path: ComfyUI's `qwen_2.5_vl_7b.safetensors` or its fp8 form, or a folder as transformers saves it, old or new.
        dtype: None keeps what the file stores, and a file that mixes precisions needs another to compute with.
        device: where the weights go; `meta` compares names and shapes only.
        fp8: keep the weights of the language part's linear layers as 8-bit floats with one scale per row.

    Raises:
        WangenError: another kind of file, missing, surplus or misshapen tensors.
    """
    checkpoint, model = _open(path)
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    small = [name for name in linears if name.startswith("language_model.")] if fp8 else ()
    fill(model, checkpoint, dtype, device, make_fp8=small)
    return model


def load_streamed_text_encoder(
    path: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", fp8: bool = False
) -> StreamedTextEncoder:
    """The same with the language layers left in the file until their turn comes; as `load_text_encoder`."""
    checkpoint, model = _open(path)
    return StreamedTextEncoder(model, checkpoint, dtype=dtype, device=device, fp8=fp8)


def _open(path: Path) -> tuple[Checkpoint, Qwen2_5_VLModel]:
    """A file's tensors by the names of the module that its sizes imply, and that module on the meta device."""
    checkpoint = open_checkpoint(path, expect(path, "qwen2.5-vl", "--t5"), _module_names)
    config = _config(checkpoint)
    return checkpoint, build(path, lambda: Qwen2_5_VLModel(config))


def _module_names(names: Iterable[str]) -> Mapping[str, str]:
    """File name -> module name, for the names it was published with and for those of transformers 5.

    >>> _module_names(["model.layers.0.mlp.up_proj.weight", "model.visual.blocks.0.norm1.weight", "lm_head.weight"])
    {'model.layers.0.mlp.up_proj.weight': 'language_model.layers.0.mlp.up_proj.weight', \
'model.visual.blocks.0.norm1.weight': 'visual.blocks.0.norm1.weight'}
    """
    return {
        name: re.sub(r"^model\.(?!visual\.)(language_model\.)?", "language_model.", name).removeprefix("model.")
        for name in names
        if not name.startswith("lm_head.")
    }


def _config(checkpoint: Checkpoint) -> Qwen2_5_VLConfig:
    """The sizes of a Qwen2.5-VL, read from its tensors; what no tensor tells is that of all of its models.

    Raises:
        WangenError: a tensor that tells a size is missing.
    """
    size, layer = checkpoint.size, "language_model.layers.0"
    text = {
        "vocab_size": size("language_model.embed_tokens.weight", 0),
        "hidden_size": size("language_model.embed_tokens.weight", 1),
        "intermediate_size": size(f"{layer}.mlp.gate_proj.weight", 0),
        "num_hidden_layers": checkpoint.num_blocks("language_model.layers."),
        "num_attention_heads": size(f"{layer}.self_attn.q_proj.weight", 0) // HEAD_DIM,
        "num_key_value_heads": size(f"{layer}.self_attn.k_proj.weight", 0) // HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": list(MROPE_SECTION)},
    }
    depth = checkpoint.num_blocks("visual.blocks.")
    vision = {
        "depth": depth,
        "hidden_size": size("visual.patch_embed.proj.weight", 0),
        "intermediate_size": size("visual.blocks.0.mlp.gate_proj.weight", 0),
        "num_heads": max(1, size("visual.patch_embed.proj.weight", 0) // VISION_HEAD_DIM),
        "patch_size": size("visual.patch_embed.proj.weight", 3),
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TIME_PATCH,
        "out_hidden_size": size("visual.merger.mlp.2.weight", 0),
        "fullatt_block_indexes": list(range(FULL_ATTENTION_EVERY - 1, depth, FULL_ATTENTION_EVERY)),
    }
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision)


def load_tokenizer(path: Path) -> Tokenizer:
    """Qwen2.5-VL's tokenizer, without truncation or padding.

    Args:
        path: its `tokenizer.json`.

    Raises:
        WangenError: the file is no such tokenizer.
    """
    text = path.read_text("utf-8", errors="replace")
    if '"BPE"' not in text or PAD not in text:
        raise WangenError(f"not Qwen2.5-VL's tokenizer: no BPE model with {PAD}", where=str(path),
                          cure="get processor/tokenizer.json of Qwen/Qwen-Image-Edit")  # fmt: skip
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class PictureTextEncoder:
    """Prompts, with control images where the template shows them -> embeddings, one after the other.

    Args:
        text_encoder: from `load_text_encoder` or `load_streamed_text_encoder`.
        tokenizer: from `load_tokenizer`.
        prompt: the template, and what is cut from the answer.
    """

    def __init__(
        self, text_encoder: Qwen2_5_VLModel | StreamedTextEncoder, tokenizer: Tokenizer, prompt: Prompt
    ) -> None:
        self._text_encoder, self._tokenizer, self._prompt = text_encoder, tokenizer, prompt
        self._model = text_encoder.model if isinstance(text_encoder, StreamedTextEncoder) else text_encoder
        self._pad: int = tokenizer.encode(PAD).ids[0]
        self._model.config.image_token_id = self._pad

    @torch.no_grad()
    def encode(
        self,
        prompts: Sequence[str],
        on_block: Callable[[int, int], None] = lambda done, total: None,
        *,
        pictures: "Sequence[Sequence[Image]] | None" = None,
    ) -> list[torch.Tensor]:
        """For each prompt its embedding (L, dim) on the CPU.

        Args:
            prompts: the texts, as they are.
            on_block: told how many of them are done, or, where the encoder is streamed, of its layers.
            pictures: for each prompt its control images in RGB, of any size.

        Raises:
            WangenError: a prompt has the token that stands for pictures, or is too long, or the weights of a streamed
                encoder cannot be read.
        """
        given = pictures or [()] * len(prompts)
        inputs = (
            self._inputs(prompt, seen if self._prompt.picture else ())
            for prompt, seen in zip(prompts, given, strict=True)
        )
        if isinstance(self._text_encoder, StreamedTextEncoder):
            states = self._text_encoder.hidden_states(inputs, on_block)
            return [self._embedding(hidden) for hidden in states]
        embeddings = []
        for number, one in enumerate(inputs, 1):
            embeddings.append(self._embedding(self._text_encoder(**one).last_hidden_state))
            on_block(number, len(prompts))
        return embeddings

    def _embedding(self, hidden: torch.Tensor) -> torch.Tensor:
        """(1, L, dim) -> (L, dim) on the CPU, without what the template puts before a prompt."""
        return hidden[0, self._prompt.num_dropped :].cpu()

    def _inputs(self, prompt: str, pictures: "Sequence[Image]") -> dict[str, Any]:
        """What the model is called with.

        Raises:
            WangenError: the prompt has the token that stands for pictures, or is too long.
        """
        if PAD in prompt:
            raise WangenError(f"a prompt has {PAD}, which stands for a part of a control image",
                              where=prompt[:80], cure="take it out of the caption")  # fmt: skip
        device = self._model.device
        ready = [patches(seen_by_encoder(picture, self._prompt.picture_size)) for picture in pictures]
        grids = [grid for _, grid in ready]
        text = self._prompt.template.replace("{}", self._marks(grids) + prompt, 1)
        ids = torch.tensor([self._within_limit(self._tokenizer.encode(text).ids, prompt)], device=device)
        seen: dict[str, Any] = {}
        if ready:
            values = torch.cat([value for value, _ in ready]).to(device, self._model.dtype)
            seen = {"pixel_values": values, "image_grid_thw": torch.tensor([(1, *grid) for grid in grids]).to(device)}
        places = positions(ids[0].eq(self._pad), grids)[:, None]
        return {"input_ids": ids, "position_ids": places, "use_cache": False, **seen}

    def _within_limit(self, ids: list[int], prompt: str) -> list[int]:
        """The tokens of a prompt, cut where the profile says so, with a word on it.

        Raises:
            WangenError: there are more than the transformer has positions for.
        """
        count = len(ids) - self._prompt.num_dropped
        if 0 < self._prompt.max_tokens < count:
            log.warning("  a text longer than Qwen-Image's %d tokens, what follows is not seen: %r…",
                        self._prompt.max_tokens, prompt[:40])  # fmt: skip
            return ids[: self._prompt.num_dropped + self._prompt.max_tokens]
        if count > MAX_ROWS:
            raise WangenError(
                f"a prompt has {count} tokens with its control images, and the transformer takes {MAX_ROWS}",
                where=prompt[:80], cure="shorten the caption",
            )  # fmt: skip
        return ids

    def _marks(self, grids: Sequence[tuple[int, int]]) -> str:
        """What stands for the pictures in the text, with a token for each merged patch."""
        marks = (
            self._prompt.picture.replace("{}", str(number)).replace(PAD, PAD * (height * width // MERGE**2))
            for number, (height, width) in enumerate(grids, 1)
        )
        return "".join(marks)


def positions(is_picture: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The positions of a prompt's tokens in time, height and width, (3, L).

    Text counts on in all three. A picture's tokens have the place where it begins, and to that in height and width
    their row and column; the text after it goes on behind its longer side. The libraries leave this out where they
    are not told which tokens are pictures (diffusers' issue 14194).

    Args:
        is_picture: (L,) whether a token stands for a part of a picture.
        grids: height and width of each picture in patches.

    >>> positions(torch.tensor([0, 1, 1, 0]).bool(), [(2, 4)]).tolist()
    [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    """
    parts, rest, position = [], is_picture.tolist(), 0
    for height, width in grids:
        before = rest.index(True)
        rows, columns = height // MERGE, width // MERGE
        parts.append(torch.arange(position, position + before).expand(3, -1))
        grid = torch.stack(torch.meshgrid(torch.arange(1), torch.arange(rows), torch.arange(columns), indexing="ij"))
        parts.append(position + before + grid.flatten(1))
        position += before + max(rows, columns)
        rest = rest[before + rows * columns :]
    parts.append(torch.arange(position, position + len(rest)).expand(3, -1))
    return torch.cat(parts, dim=1).to(is_picture.device)


def load_prompt_encoder(
    path: Path,
    tokenizer: Path | None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    fp8: bool,
    plain: bool,
    model: Model,
) -> PictureTextEncoder:
    """What captions and control images are encoded with: `plain` loads the encoder whole, else its layers are streamed.

    Raises:
        WangenError: the file is no Qwen2.5-VL, or there is no tokenizer.
    """
    assert model.prompt is not None, "the profiles of this family have a template"
    load = load_text_encoder if plain else load_streamed_text_encoder
    text_encoder = load(path, dtype=dtype, device=device, fp8=fp8)
    return PictureTextEncoder(text_encoder, load_tokenizer(tokenizer_of(path, tokenizer, model)), model.prompt)
