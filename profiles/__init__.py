"""Profiles: what is known of a platform (a shell and its paths) and of a model (its weights and good settings).

Each profile is one TOML file beside this module. Unknown keys are refused, so that a typing error is seen.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

TORCH_INDEX = "https://download.pytorch.org/whl"
"""PyTorch's own wheel index: one folder for each build."""


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """One build of PyTorch.

    Attributes:
        tag: its folder in PyTorch's wheel index, such as `cu128`, or the address of another index.
        driver: least CUDA version that the driver must offer, such as `12.8`; empty where none is asked.
    """

    tag: str
    driver: str = ""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A place where scripts run.

    Attributes:
        name: the file's name, e.g. `linux`.
        kind: decides how paths are written and translated.
        shells: templates to emit: `sh`, `bat`, `ps1`.
        suffix: ending of the platform's TOML files: `<slug>_<suffix>.toml`.
        venv: folders searched for the virtual environment, relative to the bundle's root.
        accelerator: the kind of card, which decides the precision of the encoders.
        torch_builds: what the setup script chooses from, newest first.
        overrides: step name -> flag -> value, where this platform needs another default.
        reasons: `step.flag` -> why it does; the scripts say it above the knob.
    """

    name: str
    kind: Literal["windows", "wsl", "linux", "slurm"]
    shells: tuple[str, ...]
    suffix: str
    venv: tuple[str, ...] = ("venv", ".venv")
    accelerator: Literal["cuda", "rocm", "cpu"] = "cuda"
    torch_builds: tuple[TorchBuild, ...] = (TorchBuild(tag="cpu"),)
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


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
    return make_platform(name, platform_values(name))


def platform_values(name: str) -> dict[str, Any]:
    """What the file of a platform profile says. Raises KeyError when there is none."""
    return _read("platforms", name)


def make_platform(name: str, values: Mapping[str, Any]) -> Platform:
    """A platform profile from the values of a TOML file, whose keys and types are right."""
    given = _tuples(values)
    if "torch_builds" in given:
        given["torch_builds"] = tuple(TorchBuild(**build) for build in given["torch_builds"])
    return Platform(name=name, **given)


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
