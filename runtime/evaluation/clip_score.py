"""CLIP score: how well a clip's pictures fit its prompt, by a CLIP model that lies on the disk.

Hessel et al. 2021, https://arxiv.org/abs/2104.08718, as the mean over frames of 100 cos(picture, text). It saturates
near 30 to 39 and says little between good clips; compare only numbers of one model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wangen.generator.errors import WangenError

if TYPE_CHECKING:
    import numpy as np
    import torch

    Frames = np.ndarray[Any, np.dtype[np.uint8]]

NUM_FRAMES = 8


class ClipScore:
    """A CLIP model of transformers' format, read from a folder and never from a hub.

    Args:
        folder: with config.json, weights and the processor's files.
        device: where it computes.

    Raises:
        WangenError: the folder holds no CLIP model.
    """

    def __init__(self, folder: Path, device: "torch.device") -> None:
        from safetensors import SafetensorError
        from transformers import AutoConfig, AutoProcessor, CLIPConfig, CLIPModel

        if not (folder / "config.json").is_file():
            raise WangenError("--clip_model: no model folder of transformers", where=str(folder),
                              cure="give the folder that holds config.json")  # fmt: skip
        local = {"local_files_only": True, "trust_remote_code": False}
        try:
            if not isinstance(AutoConfig.from_pretrained(folder, **local), CLIPConfig):
                raise ValueError("its config.json is another model's")
            model, told = CLIPModel.from_pretrained(folder, **local, use_safetensors=True, output_loading_info=True)
            if told["missing_keys"]:  # they would be random numbers
                raise ValueError(f"it lacks {min(told['missing_keys'])}")
            self._processor = AutoProcessor.from_pretrained(folder, **local)
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            first = str(error).splitlines()[0]
            raise WangenError(f"--clip_model: no CLIP model ({first})", where=str(folder)) from None
        self._model = model.eval().to(device)
        self._device = device

    def __call__(self, frames: "Frames", prompt: str) -> float:
        """The score of a clip (T, H, W, 3) uint8 with a prompt, from frames spread evenly over it."""
        import torch

        chosen = [frames[index] for index in spread(len(frames), NUM_FRAMES)]
        words = {"text": [prompt], "padding": True, "truncation": True, "return_tensors": "pt"}
        inputs = self._processor(images=chosen, **words).to(self._device)
        with torch.no_grad():
            found = self._model(**inputs)
        pictures = torch.nn.functional.normalize(found.image_embeds, dim=-1)
        text = torch.nn.functional.normalize(found.text_embeds, dim=-1)
        return float(100 * (pictures @ text.T).mean())


def spread(length: int, count: int) -> Sequence[int]:
    """At most `count` places spread evenly over a length, the first and the last among them.

    >>> spread(81, 5), spread(2, 8)
    ([0, 20, 40, 60, 80], [0, 1])
    """
    if length <= count:
        return list(range(length))
    return [round(place * (length - 1) / (count - 1)) for place in range(count)]
