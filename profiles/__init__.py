"""Profiles: what is known of a platform (a shell and its paths) and of a model (its weights and good settings).

Each profile is one TOML file beside this module. Unknown keys are refused, so that a typing error is seen.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A place where scripts run.

    Attributes:
        name: the file's name, e.g. `linux`.
        kind: decides how paths are written and translated.
        shells: templates to emit: `sh`, `bat`, `ps1`.
        suffix: ending of the platform's TOML files: `<slug>_<suffix>.toml`.
        venv: folders searched for the virtual environment, relative to the bundle's root.
        accelerator: decides which PyTorch build the setup script installs.
        torch_index: PyTorch's wheel index for that accelerator; empty for the default index.
        overrides: step name -> flag -> value, where this platform needs another default.
    """

    name: str
    kind: Literal["windows", "wsl", "linux", "slurm"]
    shells: tuple[str, ...]
    suffix: str
    venv: tuple[str, ...] = ("venv", ".venv")
    accelerator: Literal["cuda", "rocm", "cpu"] = "cuda"
    torch_index: str = ""
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """One weight file that a model needs.

    Attributes:
        flag: the step flag that takes it (`vae`, `t5`, `dit`).
        kind: what `headers.identify` must call it.
        files: file names in circulation, best first.
        source: where it can be downloaded, for people to read.
    """

    flag: str
    kind: str
    files: tuple[str, ...]
    source: str


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model variant: what `--task` names.

    Attributes:
        name: the file's name, e.g. `t2v-1.3B`.
        architecture: the module of `wangen.runtime.models` that knows it.
        title: its name for people.
        latent_channels: channels of a latent.
        spatial_stride: pixels per latent cell, in each direction.
        temporal_stride: frames per latent frame after the first.
        patch: latent cells per token: frames, height, width.
        fps: frames per second of its training clips.
        resolution: default bucket area as [width, height] in pixels.
        num_frames: default clip length in frames, 4n+1.
        bucket_step: buckets are multiples of this, in pixels.
        lora_targets: regular expression over diffusers' module names.
        weights: the files it needs.
        defaults: step name -> flag -> value: good settings.
        source: where those settings come from.
    """

    name: str
    architecture: str
    title: str
    latent_channels: int
    spatial_stride: int
    temporal_stride: int
    patch: tuple[int, int, int]
    fps: int
    resolution: tuple[int, int]
    num_frames: int
    bucket_step: int
    lora_targets: str
    weights: tuple[Weights, ...]
    defaults: Mapping[str, Mapping[str, Any]]
    source: str

    def kind_of(self, flag: str) -> str:
        """What `headers.identify` must call the file that a weight flag takes. Raises KeyError for no such flag."""
        return {weights.flag: weights.kind for weights in self.weights}[flag]


def platform_names() -> list[str]:
    """Names of the platforms that ship with wangen."""
    return _names("platforms")


def model_names() -> list[str]:
    """Names of the model profiles, which are the values of `--task`."""
    return _names("models")


@cache
def platform(name: str) -> Platform:
    """The platform profile of that name. Raises KeyError when there is none."""
    return Platform(name=name, **_tuples(_read("platforms", name)))


@cache
def model(name: str) -> Model:
    """The model profile of that name. Raises KeyError when there is none."""
    values = _tuples(_read("models", name))
    values["weights"] = tuple(Weights(flag=role, **_tuples(rest)) for role, rest in values["weights"].items())
    return Model(name=name, **values)


def _names(folder: str) -> list[str]:
    entries = files(__name__).joinpath(folder).iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml"))


def _read(folder: str, name: str) -> dict[str, Any]:
    if name not in _names(folder):
        raise KeyError(name)
    return tomllib.loads(files(__name__).joinpath(folder, f"{name}.toml").read_text(encoding="utf-8"))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
