"""The pages that the program prints about itself: `wangen --help`, `docs/flags.md`, `docs/from-musubi.md`, and the
table in `docs/doctor.md`.

`python -m wangen.generator.reference` writes them into a checkout; tests compare them with what the table says.
"""

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from wangen.generator.cli import wangen
from wangen.generator.doctor.catalogue import KINDS, Kind
from wangen.generator.entry import OVERVIEW
from wangen.generator.musubi import verdicts
from wangen.generator.steps import STEPS, CacheLatents, CacheText, Train
from wangen.generator.table import Option, Step, options, text_of
from wangen.profiles import config_files, model, model_names

DOCS = Path(__file__).parent.parent / "docs"
FLAGS_PAGE = DOCS / "flags.md"
MUSUBI_PAGE = DOCS / "from-musubi.md"
DOCTOR_PAGE = DOCS / "doctor.md"
_FINDINGS = ("<!-- findings -->\n", "<!-- end of findings -->\n")

DIFFERENCES = (
    "`--skip_existing` is the default, and it looks at content: an entry is kept when nothing that made it has "
    "changed. `--recache` encodes again.",
    "Caching removes only entries of its own kind and dataset that no item needs; never another file.",
    "`--min_timestep` and `--max_timestep` mean what they say in every sampling mode, `sigma` (which inverts them "
    "there) included; the model is fed 1000 sigma, not 1000 sigma + 1.",
    "Since `sigma` is inverted there, `--logit_mean` has the opposite sign where `--weighting_scheme logit_normal` "
    "draws with `--timestep_sampling sigma`; `wangen lint` turns it.",
    "One expert of A14B alone is `--experts high` with `--dit_high_noise`, or `--experts low` with `--dit`; of "
    "`--min_timestep` to `--max_timestep` it trains the part on its side of `--timestep_boundary`.",
    "Two experts give two LoRAs, `NAME_high_noise` and `NAME_low_noise`, each with an optimizer of its own; "
    "`--timestep_boundary` takes 0.875 and 875.",
    "`--attention sage` trains: its forward pass with the exact gradient of SDPA. A kernel that is missing is "
    "replaced with one warning.",
    "`--fp8_base` and `--fp8_scaled` are one thing, `--quantize fp8`: scaled blocks of the frozen linear layers; "
    "norms, modulation, embeddings and the head stay as they are. `int8` and `nf4` are there too.",
    "`--blocks_to_swap` copies frozen weights to the device only, and never back; `--vram 8|12|16|24` chooses for a "
    "card.",
    "`--include_patterns` and `--exclude_patterns` (also inside `--network_args`) really restrict, and one that "
    "matches nothing is refused. Where `--network_args` has both, they mean what they do in musubi-tuner: "
    "`include_patterns` takes back what `exclude_patterns` took.",
    "Samples of a model with two experts use both where both are trained; "
    "their settings are in the files. What a prompt leaves open is the "
    "model's own (`--w 832 --h 480 --f 81` for Wan, `--w 1280 --h 704 --f 121` for TI2V-5B; seed 42, no negative "
    "prompt), not 256x256 and one frame with a random seed: write `--w`, `--h` and `--f`. There is a sample after the "
    "last step, too.",
    "`generate` puts LoRAs beside the weights and merges nothing, so that any number of them fit a quantised base; "
    "`--fp8` and `--fp8_scaled` are one thing, `--quantize fp8`. Sizes and lengths are the model's own, not 256x256.",
    "`generate --from FILE` repeats a video or picture from the settings inside it, byte by byte.",
    "Training resumes by itself where it stopped, with step, order, noise and schedule; `--fresh` starts again.",
    "The training state is always kept (the newest); `--save_state` keeps that of every saved LoRA.",
    "Adafactor takes `--learning_rate` unless `--optimizer_args relative_step=True` is given, which musubi-tuner adds.",
    "`--preserve_distribution_shape` cuts in `sigma`, too; musubi-tuner ignores it there.",
    "`--debug_mode console` is refused (take `image` or `video`), and so are `--timestep_sampling flux2_shift`, "
    "`krea2_shift` and `ideogram4_shift`, which are for other models, and schedules that [flags.md](flags.md) does not "
    "name.",
    "`--log_with all` is refused: name them, `--log_with tensorboard wandb`; so is `--mixed_precision fp16`: "
    "`bf16`, or `no`.",
    "Of `--network_args` a LoRA takes no `rank_dropout` and `module_dropout` (LoHa and LoKr do); `conv_dim` and "
    "`conv_alpha`, which change nothing there either, are left out with a warning. `--network_alpha 0` is refused: "
    "give the rank.",
    "There are no tasks `t2i-14B` (use `t2v-14B` with images) and `…-FC` (Fun-Control); `flf2v-14B` is not trained.",
    "A dataset is a TOML; one in JSON is refused.",
    "LoRAs are saved in the ComfyUI layout; `--lora_layout kohya` writes musubi-tuner's.",
    "`constant` with a warm-up warms up; musubi-tuner stops there.",
    "Attention is one flag, `--attention`; `--sdpa --flash_attn --flash3 --xformers --sage_attn` are spellings of it, "
    "and two at once are an error.",
    "A clip's frame rate is read from the file, and clips of 24 or 30 frames per second are thinned to the model's: "
    "without `source_fps` musubi-tuner takes every frame, which `source_fps = 16.0` does here (for a model of 16 "
    "frames per second; `wangen lint --fix` writes it). It may be a whole number.",
    "`--network_dropout` drops what comes into the adapter, as peft does; musubi-tuner drops what comes out of A.",
    "Of Qwen-Image's blocks the layers `img_mod` and `txt_mod` get an adapter only with `--lora_targets all_linear`; "
    "musubi-tuner means to leave them out, too, but its pattern finds none of them, so that its LoRAs have them. "
    "`--network_weights` names what it drops.",
    "Uncaptioned images and clips that are too short stop the step by name. Folders inside the folder are not looked "
    "into, and files of other kinds are left where they are.",
    "An image's EXIF orientation is applied, transparency goes over white, and a bucket is chosen by the ratio of "
    "aspect ratios, in caching and in training alike.",
    "Relative paths in a TOML are looked for in the working folder, then beside the TOML.",
    "Paths in a jsonl manifest start at the manifest; blank lines are fine; `caption` may be a list.",
    "A folder of frames is not read as a video; a video block needs `target_frames` unless it has "
    '`frame_extraction = "full"`, and lengths must be 4n+1 '
    "(musubi-tuner rounds down); `check` wants a `cache_directory` that is not the media folder.",
    "The VAE encodes in float16 on CUDA (musubi-tuner: bfloat16), and in float32 what leaves its range.",
    "`--vae`, `--t5` and `--clip` of training serve `--cache_mode`, `--cache_latents`, `--cache_latents_to_disk` and "
    "`--sample_prompts`.",
    "A schedule that depends on the run's length refuses to resume with another length: all but `constant`, "
    "`constant_with_warmup`, `inverse_sqrt` and `adafactor`, and these too where the warm-up is a share of the run.",
    "The tokenizer is found beside the T5 file or given with `--tokenizer`; nothing is downloaded.",
)

MUSUBI_DEFAULTS = {
    ("train", "learning_rate"): "2e-06",
    ("train", "network_dim"): "4",
    ("train", "network_alpha"): "1",
    ("train", "max_train_epochs"): "none: 1600 steps",
    ("train", "mixed_precision"): "none",
    ("train", "save_precision"): "the transformer's",
    ("train", "attention"): "none (an error)",
    ("train", "timestep_sampling"): "sigma",
    ("train", "discrete_flow_shift"): "1.0",
    ("train", "lr_scheduler_min_lr_ratio"): "0, with rex 0.01",
    ("train", "seed"): "random",
    ("train", "checkpointing"): "none",
    ("train", "optimizer_type"): "none (an error)",
    ("train", "max_data_loader_n_workers"): "8",
    ("train", "network_module"): "none (an error)",
    ("train", "offload_inactive_dit"): "off",
    ("train", "log_with"): "none",
    ("cache_latents", "num_workers"): "processors - 1",
    ("cache_text", "batch_size"): "the dataset's",
    ("generate", "negative_prompt"): "a Chinese text",
    ("generate", "attention"): "torch",
    ("generate", "video_size"): "256 256",
    ("generate", "fps"): "16",
    ("generate", "seed"): "random",
}


def overview() -> str:
    """What `wangen --help` shows, 100 columns wide."""
    with click.Context(wangen, info_name="wangen", terminal_width=100) as context:
        return wangen.get_help(context) + "\n"


def flags_page() -> str:
    """`docs/flags.md`: every flag of every step."""
    lines = [
        "# Flags of every step",
        "",
        "Printed by `python -m wangen.generator.reference` from the table of steps (`generator/steps.py`).",
        "`wangen STEP …` and `python -m wangen.runtime STEP …` are the same. Dashes may stand for underscores. The",
        "first name of a flag that is true or false has a `--no_` form. `--config_file FILE.toml` takes the same names",
        "as keys, with true or false in place of `--no_`.",
        f"Configurations for `train` ship with wangen and are given by name: {', '.join(map(_code, config_files()))}.",
    ]
    for step in STEPS:
        lines += ["", f"## {step.command}", "", inspect.getdoc(step) or "", ""]
        if step.spellings:
            lines += [f"Also called {', '.join(f'`{name}`' for name in step.spellings)}.", ""]
        lines += ["| flag | takes | default | meaning |", "|---|---|---|---|", *_rows(step)]
    return "\n".join(lines) + "\n"


def from_musubi_page() -> str:
    """`docs/from-musubi.md`: for people who come from musubi-tuner; every deliberate difference."""
    lines = [
        "# From musubi-tuner",
        "",
        "Printed by `python -m wangen.generator.reference` from the table of steps.",
        "",
        "[tutorials/from-musubi.md](tutorials/from-musubi.md) goes the way step by step; here is what differs.",
        "",
        "Your dataset TOML works when it names folders of images or videos (see below for what is refused). Flags keep",
        "their names; dashes are accepted too. The old script names are spellings of the steps:",
        "",
        "| script | step |",
        "|---|---|",
    ]
    lines += [f"| `{step.spellings[0]}.py` | `wangen {step.command}` |" for step in STEPS if step.spellings]
    lines += ["", "## What differs", "", *(f"* {difference}" for difference in DIFFERENCES)]
    lines += ["", "## Other defaults", "", "| step | flag | musubi-tuner | wangen |", "|---|---|---|---|"]
    for step in STEPS:
        for option in options(step):
            theirs = MUSUBI_DEFAULTS.get((step.command, option.name))
            if theirs:
                ours = (_default(option) or "see --help") + _of_models(step, option)
                lines.append(f"| {step.command} | `--{option.name}` | {theirs} | {ours} |")
    for step in (Train, CacheLatents, CacheText):
        program = step.spellings[0]
        lines += ["", f"## Every flag of {program}.py", "", "| musubi-tuner | here |", "|---|---|"]
        lines += [f"| `--{name}` | {_cell(verdict)} |" for name, verdict in verdicts(step)]
    lines += ["", "## Flags that are answered", "", "| step | flag | answer |", "|---|---|---|"]
    for step in STEPS:
        answers = sorted(step.elsewhere.items())
        lines += [f"| {step.command} | `--{name}` | {_cell(answer)} |" for name, answer in answers]
    return "\n".join(lines) + "\n"


def doctor_page(page: str) -> str:
    """`docs/doctor.md` with the present table of findings.

    Args:
        page: its text, with the two marks between which the table stands.
    """
    before, _, rest = page.partition(_FINDINGS[0])
    rows = [
        f"| `{kind.name}` | {_level(kind)} | {_cell(kind.meaning)} | {_cell(kind.cure)} |" for kind in KINDS.values()
    ]
    table = ["| finding | | what it means | what to do |", "|---|---|---|---|", *rows]
    return before + _FINDINGS[0] + "\n".join(table) + "\n" + _FINDINGS[1] + rest.partition(_FINDINGS[1])[2]


def _level(kind: Kind) -> str:
    return "**problem**" if kind.level == "problem" else kind.level


def _code(text: str) -> str:
    return f"`{text}`"


def _rows(step: type[Step]) -> Iterator[str]:
    for option in options(step):
        names = [f"`--{name}`" for name in (option.name, *option.flag.names)]
        constants = [f"`--{name}` = {value}" for name, value in option.flag.constants.items()]
        spelled = [f"`{name}` = {value}" for name, value in option.flag.values.items() if name]
        also = f" ({', '.join(constants + spelled)})" if constants or spelled else ""
        knob = " A knob of the scripts, once it has a value." if option.flag.knob else ""
        default = _default(option, step.one_of) + _of_models(step, option)
        yield f"| {', '.join(names)} | {_takes(option)} | {default} | {_cell(option.flag.help)}{also}.{knob} |"


def _takes(option: Option) -> str:
    if option.kind is bool:
        return "nothing"
    if option.flag.model_choices:
        return "a model profile"
    kind = {"str": "text", "int": "whole number", "float": "number", "Path": "path"}[option.kind.__name__]
    one = ", ".join(option.choices) if option.choices else kind
    return one if option.length is None else f"{option.length or 'any number'} x {one}"


def _default(option: Option, one_of: Sequence[str] = ()) -> str:
    if option.required:
        return "**required**"
    if option.name in one_of:
        return "**required**, or " + ", ".join(f"`--{name}`" for name in one_of if name != option.name)
    if option.kind is bool:
        return "on" if option.default else "off"
    if option.default in (None, (), ""):
        return ""
    values = option.default if isinstance(option.default, tuple) else (option.default,)
    return f"`{' '.join(map(text_of, values))}`"


def _of_models(step: type[Step], option: Option) -> str:
    """The models that have a default of their own."""
    models: dict[str, list[str]] = {}
    for name in model_names():
        own = model(name).defaults.get(step.command, {}) if option.name in step.of_profile else {}
        if own.get(option.name, option.default) != option.default:
            models.setdefault(text_of(own[option.name]), []).append(name)
    return "".join(f"; {', '.join(names)}: `{value}`" for value, names in models.items())


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def write_pages() -> None:
    """Write the overview and the pages of `docs/`."""
    Path(OVERVIEW).write_text(overview(), encoding="utf-8", newline="\n")
    FLAGS_PAGE.parent.mkdir(exist_ok=True)
    FLAGS_PAGE.write_text(flags_page(), encoding="utf-8", newline="\n")
    MUSUBI_PAGE.write_text(from_musubi_page(), encoding="utf-8", newline="\n")
    page = doctor_page(DOCTOR_PAGE.read_text(encoding="utf-8"))
    DOCTOR_PAGE.write_text(page, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write_pages()
