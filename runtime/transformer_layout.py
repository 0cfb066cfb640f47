"""A whole transformer by the official names or by those of diffusers, and the folder that diffusers loads."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wangen import profiles
from wangen.generator.companions import Contents
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.formats import Header
from wangen.generator.headers import PIPELINE
from wangen.generator.kinds import KINDS, Facts, kind_of, tasks_of
from wangen.generator.lora_config import is_safetensors
from wangen.runtime.models import family
from wangen.runtime.safetensors_file import require_free
from wangen.runtime.weights.quantized import is_quantized

TransformerLayout = Literal["original", "diffusers"]
KNOWN = tuple(kind for kind in KINDS if kind.startswith(("wan-transformer-", "qwen-image-transformer"))
              and kind != "wan-transformer-other")  # fmt: skip
"""The kinds of transformers whose names and configuration are known."""
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"


@dataclass(frozen=True)
class Form:
    """What is written of a transformer, and where.

    Attributes:
        header: its tensors by the names that they get.
        contents: the same, told apart.
        file: the safetensors file.
        config: the configuration beside it, as JSON; empty where a file stands alone.
    """

    header: Header
    contents: Contents
    file: Path
    config: str = ""

    @property
    def config_file(self) -> Path:
        """Where the configuration goes."""
        return self.file.with_name(CONFIG_FILE)

    def require_free(self, read: Collection[Path], ours: Callable[[Facts], bool], overwrite: bool) -> None:
        """See that the file, and the folder that is made of it, may be written.

        Args:
            read: files that must stay whatever is said.
            ours: whether a weight file that is there is of the kind that is made.
            overwrite: any other file may be replaced, too.

        Raises:
            UsageError: it may not.
        """
        require_free(self.file, read, ours, overwrite)
        if self.config:
            self._require_free_folder(overwrite)

    def _require_free_folder(self, overwrite: bool) -> None:
        folder, index = self.file.parent, self.file.with_name(f"{WEIGHTS_FILE}.index.json")
        if (folder / PIPELINE).exists():
            raise UsageError("the folder of a whole pipeline, in which a transformer has a folder of its own",
                             where=str(folder), cure=f"give {folder / 'transformer'}")  # fmt: skip
        if index.exists():
            raise UsageError("an index of shards is there, which would be read in place of the new file",
                             where=str(index), cure="give another --save_path")  # fmt: skip
        if overwrite or self.file.exists() or not self.config_file.exists():
            return
        if self.config_file.read_bytes() != self.config.encode():  # the same is what a killed export left
            raise UsageError(
                "the configuration of another model is there and would be replaced",
                where=str(self.config_file),
                cure="give another --save_path, or --overwrite as well",
            )


def in_layout(
    dit: Path, header: Header, contents: Contents, layout: TransformerLayout, save_path: Path, dtype: str | None
) -> Form:
    """A transformer by other names; whether it is whole is seen from its header, and no weight is read.

    Args:
        dit: where it lies.
        header: of that, of one of the kinds `KNOWN`.
        contents: its tensors, told apart.
        layout: whose names.
        save_path: a `.safetensors`; for diffusers also a folder, which gets a configuration.
        dtype: that was asked for; what is quantised needs one.

    Raises:
        WangenError: missing, surplus or misshapen tensors, or quantised ones that would stay so.
    """
    quantised = next((name for name, info in contents.weights.items() if is_quantized(info)), None)
    if quantised and dtype is None:
        raise WangenError(
            f"{quantised} is quantised, and other layouts take 16 or 32 bits",
            where=str(dit),
            cure="give the file that it was made from, or --dtype bfloat16 to dequantise it",
        )
    architecture = family(profiles.model(tasks_of(kind_of(header))[0]))
    model = architecture.load_transformer(dit, device="meta")
    names = dict(architecture.transformer_names(contents.weights))
    if layout == "original":
        names = {old: architecture.original_tensor_name(new) for old, new in names.items()}
    weights = {names[old]: info for old, info in contents.weights.items()}
    companions = {names[old]: beside for old, beside in contents.companions.items()}
    renamed = Contents(weights, companions, None, {name: name for name in weights}, {})
    only_weights = Header(weights, header.metadata, header.format)
    if is_safetensors(save_path):
        return Form(only_weights, renamed, save_path)
    return Form(only_weights, renamed, save_path / WEIGHTS_FILE, model.to_json_string())
