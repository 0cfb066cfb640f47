"""The flags of `generate` with every default filled in, and all that can be refused before a model loads."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wangen.generator.edit_tasks import task_warning
from wangen.generator.errors import UsageError, many, write_cure
from wangen.generator.experts import ORDER, choose_boundary, expect_two_experts, lora_of_the_other, seem_swapped
from wangen.generator.formats import Header
from wangen.generator.generate_step import DEFAULT_SEED
from wangen.generator.headers import read_header
from wangen.generator.kinds import expect
from wangen.generator.lora_config import lora_file, lora_identity
from wangen.generator.run_names import EXPERTS
from wangen.generator.sample_prompts import MAX_SEED, SamplePrompt, defaults_of, make_prompt, read_prompts
from wangen.generator.sampling_refusals import LORA_FLAGS, refuse_sampling
from wangen.generator.steps import Generate
from wangen.profiles import Model
from wangen.runtime.adapters import is_dora, read_adapter
from wangen.runtime.devices import DTYPES, choose_dtype, require_compiler
from wangen.runtime.fast.attention import choose_kernel
from wangen.runtime.lora import nothing_matches, require_size
from wangen.runtime.lora_folder import find_lora, has_lora, require_one_run
from wangen.runtime.memory.blocks import in_a_block
from wangen.runtime.sampling.scenes import Encoders
from wangen.runtime.trained_on import fingerprints
from wangen.runtime.training.adapter_config import changeable_weights

log = logging.getLogger("wangen")

_Pair = tuple[Path, float]
"""A LoRA, or a run's folder, and its strength."""

PROMPT_FLAGS = (
    "negative_prompt", "image_path", "control_image_path", "background_color",
    "video_size", "video_length", "fps", "infer_steps", "guidance_scale",
    "guidance_scale_high_noise", "flow_shift", "sample_solver",
)  # fmt: skip
"""What a line of a prompt file may say for itself."""


def resolved(options: Generate, model: Model, device: torch.device) -> Generate:
    """The flags with what the model and the device decide filled in, but for those that a prompt may say itself.

    Raises:
        UsageError: numbers out of range, or flags that contradict each other or the model.
        WangenError: a folder holds no LoRA.
    """
    refuse_sampling(options, model)
    dtype, kernel = choose_dtype(options.dtype, device), options.attention or "auto"
    changes: dict[str, Any] = {
        "task": model.name,
        "seed": DEFAULT_SEED if options.seed is None else options.seed,
        "timestep_boundary": choose_boundary(options.timestep_boundary, model),
        **_loras(options, model),
        "attention": kernel if options.plain else _kernel(kernel, device, dtype),
        "dtype": dtype,
        "t5_dtype": choose_dtype(options.t5_dtype, device),
        "fp8_t5": bool(options.fp8_t5),
        "quantize": options.quantize or "none",
        "blocks_to_swap": options.blocks_to_swap or 0,
        "vae_tile": options.vae_tile or 0,
        "compile": bool(options.compile),
        "plain": bool(options.plain),
    }
    options = replace(options, **changes)
    _refuse_beside_plain(options)
    return options


def _loras(options: Generate, model: Model) -> dict[str, Any]:
    """The flags of the LoRAs with files in place of runs' folders, and a strength for each.

    Raises:
        WangenError: a folder has no LoRA that fits, or only those of several runs.
    """
    expert = "low_noise" if model.experts else ""
    low = _pairs(options.lora_weight, options.lora_multiplier)
    high = _pairs(options.lora_weight_high_noise, options.lora_multiplier_high_noise)
    if options.dit_high_noise and not high:  # a run's folder has a LoRA of each
        high = [pair for pair in low if has_lora(pair[0], "high_noise")]
    else:
        low, high = _without_lone(low, high, "low_noise"), _without_lone(high, low, "high_noise")
    loras = tuple(find_lora(path, "--lora_weight", expert) for path, _ in low)
    high_loras = tuple(find_lora(path, "--lora_weight_high_noise", "high_noise") for path, _ in high)
    for path in {path for path, _ in low} & {path for path, _ in high}:
        require_one_run(path, loras + high_loras)
    return {
        "lora_weight": loras,
        "lora_multiplier": tuple(strength for _, strength in low),
        "lora_weight_high_noise": high_loras,
        "lora_multiplier_high_noise": tuple(strength for _, strength in high),
    }


def _pairs(paths: Sequence[Path], strengths: Sequence[float]) -> list[_Pair]:
    return list(zip(paths, strengths or (1.0,) * len(paths), strict=True))


def _without_lone(own: list[_Pair], others: list[_Pair], expert: str) -> list[_Pair]:
    """What is given for an expert, without folders, given for both, that hold LoRAs of the other one alone.

    So a script gives the folder of a run that trained one of them.
    """
    (other,) = {*EXPERTS} - {expert}
    lone = {path for path, _ in others if has_lora(path, other) and not any(has_lora(path, e) for e in (expert, ""))}
    for path, _ in own:
        if path in lone:
            log.warning("  %s holds a LoRA of the %s expert alone: the %s one stays as it is", path,
                        other.replace("_", "-"), expert.replace("_", "-"))  # fmt: skip
    return [pair for pair in own if pair[0] not in lone]


def _kernel(name: str, device: torch.device, dtype: str) -> str:
    """The attention kernel that decides the pixels: where one does not run here, what takes its place."""
    if name in ("auto", "sdpa"):
        return name
    return choose_kernel(name, device, DTYPES[dtype], backward=False).name


def prompts_of(options: Generate, model: Model) -> list[SamplePrompt]:
    """Every video that is asked for, one after the other: for each prompt as many seeds as `--num_videos`.

    Args:
        options: resolved.
        model: its own settings stand for what neither flags nor prompts say.

    Raises:
        UsageError: there is no prompt, or one asks for what cannot be.
    """
    given = {name: value for name in PROMPT_FLAGS if (value := getattr(options, name)) is not None}
    defaults: dict[str, Any] = {**defaults_of(model), **given}
    if options.guidance_scale is not None and options.guidance_scale_high_noise is None:
        defaults["guidance_scale_high_noise"] = None  # what is given is both experts'
    assert options.seed is not None, "resolved"
    if options.prompt_file:
        if options.prompt is not None:
            raise UsageError("--prompt and --prompt_file contradict each other", cure="give one of them")
        prompts = read_prompts(options.prompt_file, model, options.seed, defaults, flag="--prompt_file")
    elif options.prompt is None:
        raise UsageError("generate needs --prompt", cure="or --prompt_file FILE.txt, or --from FILE.mp4")
    else:
        values = {"prompt": options.prompt}
        prompts = [make_prompt(values, model, options.seed, defaults, where="--prompt", folder=Path())]
    if max(prompt.seed for prompt in prompts) + options.num_videos - 1 > MAX_SEED:
        raise UsageError(f"--num_videos {options.num_videos}: the last seed is too large", cure="give a smaller --seed")
    return [replace(prompt, seed=prompt.seed + more) for prompt in prompts for more in range(options.num_videos)]


def _refuse_beside_plain(options: Generate) -> None:
    if options.plain and (options.blocks_to_swap or options.compile):
        raise UsageError("--plain knows no block swap and no --compile", cure="leave it out")
    if options.blocks_to_swap and options.blocks_to_swap < 0:
        raise UsageError(f"--blocks_to_swap {options.blocks_to_swap}: must be 0 or above")
    if options.compile:
        require_compiler()


def require_files(options: Generate, model: Model, encoders: Encoders | None, *, together: bool = True) -> None:
    """See from their headers that all weights are what they are given for, and that the LoRAs fit.

    Args:
        options: resolved.
        model: the model profile.
        encoders: the weights around the transformers; None where nothing is sampled.
        together: the LoRAs are used at once, and not one after the other.

    Raises:
        WangenError: a file is of another kind or cannot be read, or a LoRA is for another model.
        UsageError: a DoRA at another strength than 1, or more blocks to swap than there are.
    """
    for name, flag, multiplier in LORA_FLAGS if model.experts else LORA_FLAGS[:1]:
        header = expect(getattr(options, name), model.kind_of(name), f"--{name}", model.name)
        _refuse_blocks(options, header)
        doras = [
            path
            for path, strength in zip(getattr(options, flag), getattr(options, multiplier), strict=True)
            if _expect_lora(path, f"--{flag}", header, strength) and strength
        ]
        if len(doras) > 1:
            log.warning("  --%s: each of %d DoRAs scales whole weights: together they are not the sum of what each "
                        "does, and other tools make something else of them", flag, len(doras))  # fmt: skip
    if encoders is not None:
        encoders.require(model)
    if warning := task_warning(options.dit, model):
        log.warning("  %s", warning)
    if model.experts:
        assert options.dit_high_noise is not None, "refused before"
        expect_two_experts(options.dit, options.dit_high_noise)
        if seem_swapped(options.dit, options.dit_high_noise):
            log.warning("  --dit and --dit_high_noise seem swapped by their names or headers: %s", ORDER)
        for line in _other_boundaries(options):
            log.warning("  %s", line)
    for line in _other_bases(options, together=together):
        log.warning("  %s", line)


def _other_boundaries(options: Generate) -> list[str]:
    """A sentence for each other boundary between the experts that LoRAs say they were trained with."""
    used, trained = options.timestep_boundary, dict[float, Path]()
    for path in (*options.lora_weight, *options.lora_weight_high_noise):
        told = fingerprints(read_header(lora_file(path)).metadata)
        with suppress(KeyError, ValueError, IndexError):  # somebody else's
            trained.setdefault(float(told[-1]["timestep_boundary"]), path)
    return [
        f"{path} was trained with --timestep_boundary {boundary:g}, and is used with {used:g}: the noise levels "
        "between are the other expert's here" for boundary, path in trained.items() if boundary != used
    ]  # fmt: skip


def _other_bases(options: Generate, *, together: bool) -> list[str]:
    """A sentence for each LoRA that was trained with others merged into its base, which are missing or come after it.

    `together`: all LoRAs are used at once.
    """
    paths = list(dict.fromkeys((*options.lora_weight, *options.lora_weight_high_noise)))
    merged, scales = dict[Path, list[str]](), dict[Path, bool]()
    for path in paths:
        told = fingerprints(read_header(lora_file(path)).metadata)
        wanted = told[-1].get("base_weights") if told else None
        if isinstance(wanted, list) and wanted:  # somebody else's may be anything
            merged[path] = list(map(str, wanted))
            scales[path] = str(told[-1].get("dora")) == str(True)
    given = {lora_identity(path) for path in paths} if merged and together else set()
    return [
        f"{path} was trained with {many(len(wanted), 'other LoRA')} merged into its base (--base_weights): with a "
        "--dit into which they are not merged, too, it is not what was trained" for path, wanted in merged.items()
        if scales[path] or not given.issuperset(wanted)  # a DoRA comes before all others here
    ]  # fmt: skip


def _refuse_blocks(options: Generate, transformer: Header) -> None:
    """More blocks to swap than the file has."""
    modules = changeable_weights(transformer)
    blocks = len({module.split(".")[1] for module in modules if in_a_block(module)})
    if (options.blocks_to_swap or 0) > blocks:
        raise UsageError(f"--blocks_to_swap {options.blocks_to_swap}: this transformer has {blocks} blocks",
                         cure=f"give 0 to {blocks}")  # fmt: skip


def _expect_lora(path: Path, flag: str, transformer: Header, strength: float) -> bool:
    """A LoRA that is damaged or of another model, or a DoRA at a strength that it cannot have; whether it is a DoRA."""
    file, weights, adapter = lora_file(path), changeable_weights(transformer), read_adapter(path, flag)
    if not adapter.keys() & weights.keys():
        raise nothing_matches(adapter, str(file))
    for module, weight in adapter.items():
        if module in weights:
            require_size(module, weight, weights[module].shape, str(file))
    dora = is_dora(adapter)
    if strength not in (0, 1) and dora:
        raise UsageError(f"a DoRA at strength {strength:g}", where=str(file),
                         cure="give it the strength 1: it scales whole weights")  # fmt: skip
    if warning := lora_of_the_other(path, flag, "high" if flag.endswith("high_noise") else "low"):
        log.warning("  %s", warning)
    return dora


def files_of(options: Generate, prompts: Sequence[SamplePrompt]) -> list[Path]:
    """The file of each video; in a folder they are named by prompt and seed.

    Raises:
        UsageError: `--save_path` names one file for several videos, or one that is read.
    """
    path, ending = options.save_path, options.save_path.suffix.lower()
    if names_file(path):
        if len(prompts) > 1:
            raise UsageError(f"--save_path names one file for {len(prompts)} videos", cure="name a folder")
        if ending == ".png" and prompts[0].frames != 1:
            raise UsageError("a .png holds one frame", cure="give --video_length 1 or save to .mp4")
        _refuse_place(path, options.repeat, prompts[0])
        return [path]
    several = len(prompts) > options.num_videos
    files = []
    for index, prompt in enumerate(prompts):
        stem = f"{index // options.num_videos + 1:03d}-seed-{prompt.seed}" if several else f"seed-{prompt.seed}"
        files.append(path / f"{stem}.{'png' if prompt.frames == 1 else 'mp4'}")
    return files


def _refuse_place(path: Path, repeated: Path | None, prompt: SamplePrompt) -> None:
    """A name that no file can have, or that of a file which is read and would be gone."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UsageError(f"--save_path: {error.strerror}", where=str(path), cure=write_cure(error)) from None
    if path.is_dir():
        raise UsageError(
            f"--save_path ends in {path.suffix} and is a folder", where=str(path), cure="name a file in it"
        )
    read = [("--from", repeated), ("--image_path", prompt.image)]
    for flag, file in read + [("--control_image_path", one) for one in prompt.controls]:
        if file is not None and path.samefile(file):
            raise UsageError(f"--save_path is the file of {flag}, which would be replaced", where=str(path),
                             cure="give another --save_path")  # fmt: skip


def names_file(save_path: Path) -> bool:
    """Whether `--save_path` names the one file to write, and no folder."""
    return save_path.suffix.lower() in (".mp4", ".png")
