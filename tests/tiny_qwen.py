"""Tiny random models of Qwen-Image, as diffusers' pipelines save them and as ComfyUI's single files.

Everything is built here: nothing is downloaded. The sizes that the loaders take for given are the real ones (heads of
128 and 80, rotary dimensions, four stages of the VAE); all others are small.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from wangen import profiles

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]  # fmt: skip
TEXT_DIM = 256
NUM_LAYERS = 2
"""Of the text encoder's language part."""
PIPELINES = {"qwen-image": QwenImagePipeline, "qwen-image-edit": QwenImageEditPipeline,
             "qwen-image-edit-plus": QwenImageEditPlusPipeline}  # fmt: skip
# What scheduler/scheduler_config.json of Qwen/Qwen-Image says.
SCHEDULER = {"base_image_seq_len": 256, "base_shift": 0.5, "max_image_seq_len": 8192, "max_shift": 0.9, "shift": 1.0,
             "shift_terminal": 0.02, "time_shift_type": "exponential", "use_dynamic_shifting": True}  # fmt: skip


SHORT = {"template": "<|im_start|>user\n{}<|im_end|>\n", "num_dropped": 6}
"""Of a profile's prompt, for tests that ask no more of an embedding than to differ: the tokenizer knows bytes alone."""


@dataclass(frozen=True)
class TinyQwen:
    """A tiny Qwen-Image.

    Attributes:
        folder: a diffusers pipeline: `transformer/`, `vae/`, `text_encoder/`, `processor/tokenizer.json`.
        single: ComfyUI's files by the flag that takes them.
    """

    folder: Path
    single: dict[str, Path]

    def weights(self, *, single: bool = False) -> dict[str, Path]:
        """What the flags are given."""
        return dict(self.single) if single else dict.fromkeys(("dit", "vae", "t5"), self.folder)


def make_transformer(*, zero_cond_t: bool = False, seed: int = 0, size: int = 2) -> QwenImageTransformer2DModel:
    """A transformer of so many layers, each with so many heads."""
    torch.manual_seed(seed)
    model = QwenImageTransformer2DModel(
        num_layers=size, num_attention_heads=size, joint_attention_dim=TEXT_DIM, zero_cond_t=zero_cond_t
    )
    return _lively(model)


def make_vae() -> AutoencoderKLQwenImage:
    torch.manual_seed(1)
    return _lively(AutoencoderKLQwenImage(base_dim=8))


def make_text_encoder(tokenizer: Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(2)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": tokenizer.get_vocab_size(), "hidden_size": TEXT_DIM, "intermediate_size": 64,
            "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1e6,
        },
        vision_config={
            "depth": 8, "hidden_size": 80, "intermediate_size": 96, "num_heads": 1, "out_hidden_size": TEXT_DIM,
            "fullatt_block_indexes": [7],
        },
        image_token_id=tokenizer.token_to_id("<|image_pad|>"),
        video_token_id=tokenizer.token_to_id("<|video_pad|>"),
        vision_start_token_id=tokenizer.token_to_id("<|vision_start|>"),
        vision_end_token_id=tokenizer.token_to_id("<|vision_end|>"),
    )  # fmt: skip
    return _lively(Qwen2_5_VLForConditionalGeneration(config))


def _lively(model: Any) -> Any:
    """Weights large enough that every part of the input shows in the output; frozen, in eval mode."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "gamma" not in name:
                parameter.copy_(torch.randn_like(parameter) / parameter[0].numel() ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(0.05 * torch.randn_like(parameter))
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def make_tokenizer() -> Tokenizer:
    """Bytes as tokens, and the special ones."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return tokenizer


def write_tiny_qwen(folder: Path, size: int = 2) -> TinyQwen:
    """Write the pipeline's folder and ComfyUI's files; the size is that of `make_transformer`."""
    tokenizer = make_tokenizer()
    pipeline = folder / "Qwen-Image-Edit"
    parts = {
        "transformer": make_transformer(size=size),
        "vae": make_vae(),
        "text_encoder": make_text_encoder(tokenizer),
    }
    for name, part in parts.items():
        part.save_pretrained(pipeline / name)
    (pipeline / "processor").mkdir()
    tokenizer.save(str(pipeline / "processor" / "tokenizer.json"))
    index = {"_class_name": "QwenImageEditPipeline", **{name: ["x", "y"] for name in parts}}
    (pipeline / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    comfyui = folder / "comfyui"
    (comfyui / "processor").mkdir(parents=True)
    tokenizer.save(str(comfyui / "processor" / "tokenizer.json"))
    single = {"dit": comfyui / "qwen_image_edit_bf16.safetensors", "vae": comfyui / "qwen_image_vae.safetensors",
              "t5": comfyui / "qwen_2.5_vl_7b.safetensors"}  # fmt: skip
    dit = {f"model.diffusion_model.{name}": value for name, value in parts["transformer"].state_dict().items()}
    save_file({name: value.contiguous() for name, value in dit.items()}, single["dit"])
    save_file(original_vae_names(parts["vae"].state_dict()), single["vae"])
    save_file(published_text_names(parts["text_encoder"].state_dict()), single["t5"])
    return TinyQwen(pipeline, single)


def published_text_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names that Qwen2.5-VL was published with, and ComfyUI's file has."""
    names = {
        name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual.") for name in state
    }
    return {new: state[old].clone() for old, new in names.items()}


def original_vae_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names of the official Wan VAE, which ComfyUI's file of Qwen-Image's VAE has."""
    from tiny_weights import vae_shapes

    from wangen.runtime.weights.vae_names import vae_names

    originals = vae_names(vae_shapes(8))
    assert set(originals.values()) == set(state)
    return {original: state[new].clone() for original, new in originals.items()}


class Processor:
    """What the pipelines ask of Qwen2VLProcessor, which itself needs torchvision: pictures and text -> tensors."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>")
        self._images = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 12845056})

    def __call__(self, text: list[str], images: Any, padding: bool, return_tensors: str) -> Any:
        listed = images if isinstance(images, list) else [images]
        found = self._images(images=listed, return_tensors=return_tensors)
        counts = iter([int(grid.prod()) // 4 for grid in found["image_grid_thw"]] * len(text))
        full = []
        for one in text:
            head, *rest = one.split("<|image_pad|>")
            full.append(head + "".join("<|image_pad|>" * next(counts) + part for part in rest))
        tokens = self._tokenizer(full, padding=padding, return_tensors=return_tensors)
        tokens.update(found)
        return tokens


def pipeline_of(task: str, tiny: TinyQwen, **changes: Any) -> Any:
    """diffusers' pipeline of a task on the tiny models, in float32."""
    tokenizer = Tokenizer.from_file(str(tiny.folder / "processor" / "tokenizer.json"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>")
    parts = {
        "scheduler": FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        "vae": AutoencoderKLQwenImage.from_pretrained(tiny.folder / "vae"),
        "text_encoder": Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny.folder / "text_encoder"),
        "transformer": QwenImageTransformer2DModel.from_pretrained(tiny.folder / "transformer"),
        "tokenizer": fast,
        **changes,
    }
    if task == "qwen-image":
        made = PIPELINES[task](**parts)
    else:
        made = PIPELINES[task](processor=Processor(tokenizer), **parts)
        tell_pictures(made)
    made.set_progress_bar_config(disable=True)
    return made


def tell_pictures(pipeline: Any) -> None:
    """Let the text encoder know which tokens are pictures, as the processor says and the pipelines do not pass on."""
    encoder = pipeline.text_encoder
    original, pad = encoder.forward, encoder.config.image_token_id

    def forward(input_ids: torch.Tensor, **given: Any) -> Any:
        return original(input_ids=input_ids, mm_token_type_ids=(input_ids == pad).int(), **given)

    encoder.forward = forward


def smaller(patch: pytest.MonkeyPatch, task: str, by: int = 4, **prompt: Any) -> None:
    """The profile with areas of sides so many times shorter, so that the tiny models on a CPU take a moment.

    Of the prompt more may be changed, such as its template.
    """
    values = profiles.model_values(task)
    sides = values["prompt"].get("picture_size", [0, 0])
    values["prompt"] = {**values["prompt"], "picture_size": [side // by for side in sides], **prompt}
    made, known = profiles.make_model(task, values), profiles.model
    width, height = made.resolution
    model = replace(made, resolution=(width // by, height // by))
    patch.setattr(profiles, "model", lambda name: model if name == task else known(name))


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """A drawn picture of soft colours with edges."""
    draw = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 5, 5, generator=draw)
    pixels = torch.nn.functional.interpolate(coarse, (size[1], size[0]), mode="bicubic").clamp(0, 1)
    pixels[:, :, size[1] // 4 : size[1] // 2, size[0] // 3 : size[0] // 2] = 0.9
    return Image.fromarray((pixels[0] * 255).byte().permute(1, 2, 0).numpy())
