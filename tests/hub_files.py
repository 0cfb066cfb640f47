"""What the local hub holds in the tests of `wangen models download`: a large file, and every file of a task."""

import random
from pathlib import Path

from helpers import read_tree
from parity import DIT, T5, VAE21, VECTORS

from wangen import profiles

MIB = 2**20

T5_FP8 = "Comfy-Org/Wan_2.1_ComfyUI_repackaged/split_files/text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors"
FP8_NAME = T5_FP8.rpartition("/")[2]
LARGE = random.Random(1).randbytes(25 * MIB)
"""The content of that file."""

MODEL = profiles.model("t2v-1.3B")
CONTENTS = {"vae": VAE21, "t5": T5, "dit": DIT}
"""What stands for the weights of this task."""
FILES = {
    **{
        f"{weights.downloads[0].repo}/{weights.downloads[0].path}": CONTENTS[weights.flag].read_bytes()
        for weights in MODEL.weights
    },
    **{f"{file.repo}/{file.path}": (VECTORS / "t5" / file.path).read_bytes() for file in MODEL.tokenizer},
}
"""Every file of the task, by its name on the hub."""


def left(folder: Path) -> list[str]:
    """What a run left in the models folder, without its lock."""
    return sorted(name for name in read_tree(folder) if not name.endswith(".lock"))
