"""Profiles: what is known of a platform (a shell and its paths) and of a model (its weights and good settings).

Each profile is one TOML file beside this module. Unknown keys are refused, so that a typing error is seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import exp
from pathlib import Path
from typing import Any, Literal, get_args

from wangen.profiles import reading
from wangen.profiles.reading import ProfileError

WeightRole = Literal["vae", "t5", "clip", "dit", "dit_high_noise"]
WEIGHT_ROLES = get_args(WeightRole)
"""The flags that take weights; a model profile has those that its model needs."""

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
class Download:
    """A file on the Hugging Face hub.

    Attributes:
        repo: `owner/name` of a model repository that asks for no account.
        path: of the file in it; a `.safetensors.index.json` stands for the shards it names, too.
    """

    repo: str
    path: str

    @property
    def address(self) -> str:
        """Of the repository, for people."""
        return f"https://huggingface.co/{self.repo}"


WeightKind = Literal[
    "wan-vae-2.1", "wan-vae-2.2", "umt5-encoder", "open-clip", "wan-transformer-t2v", "wan-transformer-i2v",
    "wan-transformer-flf2v", "wan-transformer-i2v-2.2", "wan-transformer-ti2v", "qwen-image-transformer", "qwen2.5-vl",
]  # fmt: skip
"""What weights that models need can be, of all that `kinds.examine` knows."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """One weight file that a model needs.

    Attributes:
        flag: the step flag that takes it: `vae`, `t5`, `clip`, `dit`, or `dit_high_noise` for the second expert.
        kind: what `kinds.examine` must call it.
        files: names in circulation, best first, each the end of a path: a name alone, or with the folder that tells
            it apart (`low_noise_model/diffusion_pytorch_model-00001-of-00006.safetensors`). A `*` stands for any part
            of a name; of several files that fit, the largest is the best.
        downloads: where to get it, best first: any one of them will do; none where nobody offers it. The names of all
            fit one in `files`.
    """

    flag: WeightRole
    kind: WeightKind
    files: tuple[str, ...]
    downloads: tuple[Download, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TransformerSizes:
    """Sizes of a transformer (of each expert, where there are two); every head is 128 wide.

    Attributes:
        dim: width of the tokens.
        ffn_dim: width inside the feed-forward layers.
        num_layers: blocks.
        num_heads: attention heads.
        in_channels: latent channels and those of the condition, where it is laid behind them.
        out_channels: latent channels.
    """

    dim: int
    ffn_dim: int
    num_layers: int
    num_heads: int
    in_channels: int
    out_channels: int


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The two transformers of a Wan 2.2 A14B model: one for the noisy part of sampling, one for the rest.

    Attributes:
        boundary: timestep / 1000 from which on, upwards, the high-noise expert works.
        guidance_high_noise: classifier-free guidance while it does; `defaults.generate.guidance_scale` is the other's.
    """

    boundary: float
    guidance_high_noise: float


@dataclass(frozen=True, kw_only=True)
class Preset:
    """How to train a model on a card of a given size: what `--vram` stands for.

    Attributes:
        quantize: form of the frozen blocks: `none`, `fp8`, `int8` or `nf4`.
        blocks_to_swap: blocks that wait in host memory.
        checkpointing: `none`, `full` or `selective`.
        checkpointing_free_blocks: so many of the last blocks are not recomputed.
        gradient_checkpointing_cpu_offload: what checkpointing keeps waits in host memory.
        resolution: of the largest bucket that the budget is made for, as [width, height] in pixels.
        num_frames: of that bucket.
        network_dim: the largest rank that it is made for.
    """

    quantize: Literal["none", "fp8", "int8", "nf4"] = "none"
    blocks_to_swap: int = 0
    checkpointing: Literal["none", "full", "selective"] = "full"
    checkpointing_free_blocks: int = 0
    gradient_checkpointing_cpu_offload: bool = False
    resolution: tuple[int, int]
    num_frames: int
    network_dim: int = 32


MERGED_PATCH_PX = 28
"""Side of what a vision-language model makes one token of, in pixels."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The text that a language model is given as text encoder, and what of its answer is the embedding.

    Attributes:
        template: the prompt stands at its `{}`.
        num_dropped: so many first tokens, the same for every prompt, are no part of the embedding.
        picture: what stands for each control image before the prompt, its number at `{}`; empty: it sees none of them.
        picture_size: area that the encoder sees control images in, as [width, height] in pixels.
        max_tokens: an embedding is cut at so many; 0 leaves it whole.
    """

    template: str
    num_dropped: int
    picture: str = ""
    picture_size: tuple[int, int] = (0, 0)
    max_tokens: int = 0

    @property
    def picture_tokens(self) -> int:
        """About how many tokens, each a row of the embedding, a control image becomes."""
        return self.picture_size[0] * self.picture_size[1] // MERGED_PATCH_PX**2


@dataclass(frozen=True, kw_only=True)
class DynamicShift:
    """A sampler's shift that grows with the picture: e to a power that lies on a line over the number of tokens.

    Attributes:
        tokens: two numbers of tokens.
        powers: the power at each of them.
        terminal: the last noise level above 0, to which the schedule is stretched.
    """

    tokens: tuple[int, int]
    powers: tuple[float, float]
    terminal: float

    def at(self, tokens: int) -> float:
        """The shift for so many tokens.

        >>> round(DynamicShift(tokens=(256, 8192), powers=(0.5, 0.9), terminal=0.02).at(4096), 3)
        2.001
        """
        (low, high), (first, last) = self.tokens, self.powers
        return exp(first + (last - first) * (tokens - low) / (high - low))


Condition = Literal["text", "image", "first_and_last", "text_or_image", "controls"]
"""What is made from what: a text, also the first frame, also both ends, the first frame if given, or control images."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model variant: what `--task` names.

    Attributes:
        name: the file's name, e.g. `t2v-1.3B`.
        architecture: the module of `wangen.runtime.models` that knows it.
        title: its name for people.
        condition: what a video is made from.
        latent_channels: channels of a latent.
        spatial_stride: pixels per latent cell, in each direction.
        temporal_stride: frames per latent frame after the first.
        patch: latent cells per token: frames, height, width.
        fps: frames per second of its training clips.
        resolution: default bucket area as [width, height] in pixels.
        num_frames: default clip length in frames, 4n+1.
        bucket_step: buckets are multiples of this, in pixels.
        lora_targets: regular expression over diffusers' module names.
        max_controls: control images that it takes at most.
        prompt: how its text encoder is asked, where that is a language model.
        shift, shift_480p: of its sampler, where it grows with the picture, or is another up to 832x480 pixels.
        transformer: sizes of the transformer, or of each expert.
        experts: where the model has two transformers, how they share the work; `dit` is then the low-noise one.
        weights: the files it needs.
        tokenizer: the text encoder's tokenizer: all these files, at these paths beside the text encoder's.
        defaults: step name -> flag -> value: good settings.
        presets: gigabytes of a card -> how to train on it.
        source: where those settings come from.
    """

    name: str
    architecture: str
    title: str
    condition: Condition
    latent_channels: int
    spatial_stride: int
    temporal_stride: int
    patch: tuple[int, int, int]
    fps: int
    resolution: tuple[int, int]
    num_frames: int
    bucket_step: int
    lora_targets: str
    max_controls: int = 0
    prompt: Prompt | None = None
    shift: DynamicShift | None = None
    shift_480p: float | None = None
    transformer: TransformerSizes
    experts: Experts | None = None
    weights: tuple[Weights, ...]
    tokenizer: tuple[Download, ...]
    defaults: Mapping[str, Mapping[str, Any]]
    presets: Mapping[int, Preset] = field(default_factory=dict)
    source: str

    def kind_of(self, flag: str) -> str:
        """What `kinds.examine` must call the file that a weight flag takes. Raises KeyError for no such flag."""
        kinds: dict[str, str] = {weights.flag: weights.kind for weights in self.weights}
        return kinds[flag]

    @property
    def has_clip(self) -> bool:
        """Whether it sees its first frame through CLIP, too."""
        return any(weights.flag == "clip" for weights in self.weights)

    def latent_size(self, size: tuple[int, int], num_frames: int) -> tuple[int, int, int]:
        """Frames, height and width in latent cells of a picture or a clip; `size` is (width, height) in pixels."""
        width, height = (side // self.spatial_stride for side in size)
        return (num_frames - 1) // self.temporal_stride + 1, height, width


def platform_names() -> list[str]:
    """Names of the platforms that ship with wangen."""
    return reading.names("platforms")


def model_names() -> list[str]:
    """Names of the model profiles, which are the values of `--task`."""
    return reading.names("models")


def config_files() -> dict[str, Path]:
    """The configurations for `--config_file` that ship with wangen, by name."""
    return {name: reading.path("configs", name) for name in reading.names("configs")}


@cache
def platform(name: str) -> Platform:
    """The platform profile of that name. Raises KeyError when there is none."""
    return make_platform(name, platform_values(name))


def platform_values(name: str) -> dict[str, Any]:
    """What the file of a platform profile says. Raises KeyError when there is none."""
    return reading.read("platforms", name)


def make_platform(name: str, values: Mapping[str, Any]) -> Platform:
    """A platform profile from the values of a TOML file, whose keys and types are right."""
    given = _tuples(values)
    if "torch_builds" in given:
        given["torch_builds"] = tuple(TorchBuild(**build) for build in given["torch_builds"])
    return Platform(name=name, **given)


@cache
def model(name: str) -> Model:
    """The model profile of that name. Raises KeyError when there is none."""
    return make_model(name, model_values(name))


def model_values(name: str) -> dict[str, Any]:
    """What the file of a model profile says, on top of the one that it is based on. Raises KeyError for no such one.

    A `based_on` gives every key that is not said again; of the weights every role, of the defaults every step, of the
    presets every card, and what is not said again of the prompt.

    Raises:
        ProfileError: the file is no TOML, what it is based on is not there or itself, or one of these is no table.
    """
    return _with_below(name, ())


def _with_below(name: str, above: tuple[str, ...]) -> dict[str, Any]:
    """The values of a model profile and of those below it; `above` are those that are based on it."""
    values, where = reading.read("models", name), str(reading.path("models", name))
    if "based_on" not in values:
        return values
    base = values.pop("based_on")
    if base in (*above, name):
        raise ProfileError(f"the model {name} is based on itself", where=where, cure="name another based_on")
    if base not in model_names():
        raise ProfileError(f"there is no model {base!r} to begin with", where=f"{where}, based_on",
                         cure=f"one of {', '.join(model_names())}")  # fmt: skip
    below = _with_below(base, (*above, name))
    tables: list[str] = [key for key in ("weights", "defaults", "presets", "prompt") if key in below or key in values]
    merged = {key: {**below.get(key, {}), **reading.table(values.get(key, {}), f"{where}, {key}")} for key in tables}
    return {**below, **values, **merged}


def make_model(name: str, values: Mapping[str, Any]) -> Model:
    """A model profile from the values of a TOML file.

    Raises:
        ProfileError: a key is unknown or missing, or a value does not fit.
    """
    where, given = str(reading.path("models", name)), {**values, "name": name}
    if "weights" in given:
        given["weights"] = [
            reading.make(Weights, {**reading.table(rest, f"{where}, weights.{role}"), "flag": role},
                         f"{where}, weights.{role}")
            for role, rest in reading.table(given["weights"], f"{where}, weights").items()
        ]  # fmt: skip
    if "name" in values:
        raise ProfileError("unknown key 'name'", where=where, cure="take it out: the file's name is the model's")
    made = reading.make(Model, given, where)
    sizes = {"latent_channels": made.latent_channels, "spatial_stride": made.spatial_stride, "patch": min(made.patch),
             "temporal_stride": made.temporal_stride, "fps": made.fps, "resolution": min(made.resolution),
             "num_frames": made.num_frames, "bucket_step": made.bucket_step, "weights": len(made.weights)}  # fmt: skip
    if none := [key for key, number in sizes.items() if number < 1]:
        raise ProfileError(f"{none[0]} is below 1 or empty", where=where, cure=f"give {none[0]} as other profiles do")
    if any(side % made.bucket_step for side in made.resolution):
        raise ProfileError(f"resolution is {made.resolution[0]} x {made.resolution[1]}, no multiples of bucket_step",
                         where=where, cure=f"give multiples of {made.bucket_step}")  # fmt: skip
    for weights in made.weights:
        if not weights.files or any(file.split() != [file] for file in weights.files):
            raise ProfileError(f"files must be names without blanks, got {list(weights.files)!r}",
                             where=f"{where}, weights.{weights.flag}", cure="rename the file, and give its name "
                             "here")  # fmt: skip
        if not weights.downloads and "*" in weights.files[0]:
            raise ProfileError("the first of files is no whole name, and there are no downloads that give one",
                             where=f"{where}, weights.{weights.flag}", cure="give a name without * first")  # fmt: skip
    return made


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
