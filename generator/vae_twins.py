"""Two VAEs with the same tensors and other values, Wan 2.1's and Qwen-Image's, told by what is written on them."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from wangen.generator.errors import WangenError
from wangen.generator.headers import shards
from wangen.profiles import Model

KIND = "wan-vae-2.1"
WAN, QWEN = "Wan 2.1", "Qwen-Image"

_OF: Mapping[str, str] = {"wan": WAN, "qwen_image_edit": QWEN}
"""Architecture -> whose VAE it has."""
_NAMES: Mapping[str, re.Pattern[str]] = {QWEN: re.compile("qwen"), WAN: re.compile(r"(?<![a-z])wan[ _.-]?2")}
_CLASSES: Mapping[str, str] = {"AutoencoderKLWan": WAN, "AutoencoderKLQwenImage": QWEN}
CONFIG = "config.json"


def said_by_name(path: Path) -> str:
    """Whose VAE a file is by its name: `Wan 2.1`, `Qwen-Image`, or nothing where the name says neither or both.

    >>> said_by_name(Path("qwen_image_vae.safetensors")), said_by_name(Path("Wan2_1_VAE_bf16.safetensors"))
    ('Qwen-Image', 'Wan 2.1')
    >>> said_by_name(Path("Qwen-Image/vae/diffusion_pytorch_model.safetensors"))
    ''
    """
    found = [whose for whose, words in _NAMES.items() if words.search(path.name.lower())]
    return found[0] if len(found) == 1 else ""


def takes_vae(model: Model, kinds: Sequence[str]) -> str:
    """Which of the two a model takes, in words; empty where another kind of file is asked for.

    >>> from wangen import profiles
    >>> takes_vae(profiles.model("qwen-image"), [KIND])
    'a Qwen-Image VAE'
    """
    return f"a {_OF[model.architecture]} VAE" if list(kinds) == [KIND] and model.architecture in _OF else ""


def vae_of(model: Model) -> str:
    """Whose of the two VAEs a model has; empty where it has another.

    >>> from wangen import profiles
    >>> vae_of(profiles.model("qwen-image")), vae_of(profiles.model("ti2v-5B"))
    ('Qwen-Image', '')
    """
    return _OF.get(model.architecture, "") if model.kind_of("vae") == KIND else ""


def twin_warning(path: Path | None, model: Model) -> str:
    """What to say of a VAE that is, by its name or its configuration, the other one's; empty where nothing says so.

    Args:
        path: given to `--vae`, a file or a folder.
        model: what it was given for.
    """
    own = vae_of(model)
    if path is None or not own:
        return ""
    with suppress(WangenError):  # a file that cannot be read is refused elsewhere
        for file in shards(path, "--vae"):
            for place, said in (("name", said_by_name(file)), (CONFIG, _said_by_config(file.parent / CONFIG))):
                if said and said != own:
                    usual = next(weights for weights in model.weights if weights.flag == "vae").files[0]
                    return (f"--vae {path}: its {place} says {said}, and {model.name} takes {own}'s VAE, which has the "
                            f"same tensors with other values: give {usual}")  # fmt: skip
                if said:
                    return ""
    return ""


def _said_by_config(path: Path) -> str:
    """Whose VAE diffusers' configuration beside a file says."""
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        return _CLASSES.get(str(json.loads(path.read_text(encoding="utf-8")).get("_class_name")), "")
    return ""
