"""A local vision-language model: pictures and an instruction -> a text. Nothing is fetched, unpickled or executed."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wangen.generator.errors import WangenError

if TYPE_CHECKING:
    from PIL import Image

_FAILURES = (Exception,)
"""The tokenizer's library, which is written in another language, raises nothing narrower."""
_CURE = "give the folder of a model for images and text, as transformers saves it, with its weights in .safetensors"


class VisionLanguageModel:
    """A model of transformers with its processor.

    Args:
        folder: with `config.json`, the processor's files and the weights.
        dtype: of the weights.
        device: where it runs.

    Raises:
        WangenError: the folder holds no such model, weights are missing, or a library that its processor needs.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        if not (folder / "config.json").is_file():
            raise WangenError("this folder holds no model of transformers (no config.json)", where=str(folder),
                              cure=_CURE)  # fmt: skip
        self._processor, self._model = _load(folder, dtype)
        self._model.to(device).eval()
        self._folder, self._dtype, self._device = folder, dtype, device

    @torch.inference_mode()
    def describe(self, seen: Sequence[Sequence["Image.Image"]], instruction: str, max_new_tokens: int) -> list[str]:
        """The most likely answer for each group of pictures, on one line; the same every time.

        Args:
            seen: for each answer the pictures that it is about: one, or the frames of a clip.
            instruction: what is asked of each.
            max_new_tokens: length at which an answer is broken off.

        Raises:
            WangenError: the model's chat template takes no pictures, or its processor not these.
            torch.OutOfMemoryError: the device's memory is full.
        """
        texts = [self._prompt(len(pictures), instruction) for pictures in seen]
        try:
            inputs = self._processor(text=texts, images=[list(pictures) for pictures in seen], return_tensors="pt",
                                     padding=True).to(self._device, dtype=self._dtype)  # fmt: skip
        except (TypeError, ValueError) as error:
            raise WangenError(f"the model's processor does not take these pictures and its chat template's text "
                              f"({_short(error)})", where=str(self._folder), cure=_CURE) from None  # fmt: skip
        answers = self._model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1)
        asked = inputs["input_ids"]
        if answers.shape[1] >= asked.shape[1] and torch.equal(answers[:, : asked.shape[1]], asked):
            answers = answers[:, asked.shape[1] :]  # models of two parts answer without repeating the question
        decoded = self._processor.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [" ".join(text.split()) for text in decoded]

    def _prompt(self, num_pictures: int, instruction: str) -> str:
        """The text that stands for these pictures and the instruction, in the form that the model was trained on."""
        import jinja2

        if not getattr(self._processor, "chat_template", None):
            mark = getattr(self._processor, "image_token", None)
            return f"{mark}\n" * num_pictures * bool(mark) + instruction
        content = [*[{"type": "image"}] * num_pictures, {"type": "text", "text": instruction}]
        try:
            prompt: str = self._processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise WangenError(f"the model's chat template takes no pictures ({_short(error)})", where=str(self._folder),
                              cure=_CURE) from None  # fmt: skip
        return prompt


def _load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        processor = AutoProcessor.from_pretrained(folder, **local)
        model, info = AutoModelForImageTextToText.from_pretrained(
            folder, **local, use_safetensors=True, dtype=dtype, output_loading_info=True
        )
    except ImportError as error:
        raise WangenError(f"a library that this model needs is not installed: {_short(error)}", where=str(folder),
                          cure=_install(str(error))) from None  # fmt: skip
    except _FAILURES as error:
        raise WangenError(f"cannot be loaded as a vision-language model: {_short(error)}", where=str(folder),
                          cure=_CURE) from None  # fmt: skip
    if missing := sorted(info["missing_keys"]):
        raise WangenError(f"{len(missing)} weights are missing, such as {missing[0]}", where=str(folder),
                          cure="download the model again")  # fmt: skip
    if not hasattr(processor, "tokenizer") or not hasattr(processor, "image_processor"):
        raise WangenError("this model has no processor for pictures", where=str(folder), cure=_CURE)
    processor.tokenizer.padding_side = "left"  # answers begin where the questions end
    if processor.tokenizer.pad_token is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    return processor, model


def _install(text: str) -> str:
    """What to do about a library that a message of transformers names."""
    if "torchvision" in text.lower():  # the processors of Qwen-VL and SmolVLM import it for their videos
        return f'"{sys.executable}" -m pip install torchvision, from where torch was installed; or take another model'
    return "install it into this environment, or take another model"


def _short(error: BaseException) -> str:
    """The first line of a library's message, which may go on for pages."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
