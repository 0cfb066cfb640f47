"""The captioning step of the table: captions by a local vision-language model."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from wangen.generator.step_parts import DTYPE_VALUES, Dtype
from wangen.generator.table import Step, flag

INSTRUCTION = (
    "Describe in one or two plain sentences what is shown: who or what, what happens, where, the light and the camera."
)


@dataclass(frozen=True, kw_only=True)
class Caption(Step):
    """Write a caption beside every image and clip that has none, with a local vision-language model."""

    command: ClassVar[str] = "caption"
    module: ClassVar[str] = "wangen.runtime.caption"
    one_of: ClassVar[tuple[str, ...]] = ("dataset_dir", "manifest")

    dataset_dir: Path | None = flag("folder of images and clips", None, names=("image_directory", "video_directory"))
    manifest: Path | None = flag(
        "a .jsonl that names the media; lines with a caption keep it, the others take the .txt beside their file", None
    )
    model: Path | None = flag(
        "folder of the model as transformers saves it: config.json, processor, .safetensors; nothing is downloaded",
        None,
    )
    prompt: str = flag("what the model is asked of each image or clip", INSTRUCTION, pinned=True)
    trigger_word: str = flag("word in front of every caption that is written", "", pinned=True, names=("trigger",))
    frames: int = flag("frames of a clip that the model sees, from even parts of it", 8, pinned=True)
    max_side: int = flag("longest side in pixels of the pictures that the model gets", 1024, pinned=True)
    max_new_tokens: int = flag("longest answer in tokens", 160, pinned=True)
    batch_size: int = flag("images or clips that are captioned together", 1)
    dtype: Dtype | None = flag("precision of the model (default: bfloat16 on CUDA, float32 on CPU)", None,
                               values=DTYPE_VALUES)  # fmt: skip
    device: str | None = flag("cuda, cuda:1, cpu … (default: cuda when there is one)", None)
    report_only: bool = flag("write no caption: tell of those that are there, without a model", False)
