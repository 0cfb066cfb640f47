"""Rules about the flags of wangen's own training that exclude or need each other.

Training refuses the same before a model loads; here it is known before the script runs at all.
"""

from collections.abc import Iterator

from wangen import profiles
from wangen.generator.errors import UsageError
from wangen.generator.lint.experts import swapped
from wangen.generator.lint.kinds import Finding
from wangen.generator.lint.script import UNKNOWN, Call, Script
from wangen.generator.memory import preset_flags
from wangen.generator.steps import Train
from wangen.generator.table import Option, options
from wangen.generator.train_values import FOR_ADAPTERS

_INTERVALS = ("sample_every_n_steps", "sample_every_n_epochs", "sample_at_first")
_HIGH_ONLY = ("dit_high_noise", "network_weights_high_noise", "high_noise_share", "timestep_boundary")

_Wrong = tuple[bool, str, str, str]
"""Whether it is wrong, the flag whose line is shown, what was found, what to do."""


def memory(script: Script) -> Iterator[Finding]:
    """Ways to save memory that cannot go together, or that the model does not have."""
    for call in _trainings(script):
        for wrong, name, found, cure in (*_checkpointed(call), *_whole(call)):
            if wrong:
                yield Finding("memory", call.line_of(name), f"--{name} {found}", cure)
        model = _model(call)
        vram, swap = call.value("vram"), call.number("blocks_to_swap", 0)
        if model is None:
            continue
        free = call.number("checkpointing_free_blocks", 0)
        most = max(0, model.transformer.num_layers - free)
        if swap > most:
            beside = f" beside --checkpointing_free_blocks {free:g}" if free else ""
            found = f"--blocks_to_swap can be {most:g} at most for {model.name}{beside}"
            yield Finding("memory", call.line_of("blocks_to_swap"), found, f"write --blocks_to_swap {most:g}")
        try:
            preset_flags(model, vram)
        except UsageError as error:
            yield Finding("memory", call.line_of("vram"), error.found, error.cure)


def _checkpointed(call: Call) -> Iterator[_Wrong]:
    """What works on recomputed blocks only."""
    off = call.value("checkpointing") == "none"
    plain = _is_on(call, "plain")
    cure = "write --checkpointing full or selective"
    swaps = call.number("blocks_to_swap", 0) > 0
    yield swaps and off, "blocks_to_swap", "needs checkpointing", cure
    offloads = _is_on(call, "gradient_checkpointing_cpu_offload")
    yield offloads and off, "gradient_checkpointing_cpu_offload", "parks what checkpointing keeps", cure
    yield plain and swaps, "plain", "knows no block swap", "take one of them off"
    selective = call.value("checkpointing") == "selective"
    yield plain and selective, "plain", "knows no selective checkpointing", "write --checkpointing full"
    free = call.number("checkpointing_free_blocks", 0) > 0
    yield plain and free, "plain", "computes every block again", "take --checkpointing_free_blocks off"


def _whole(call: Call) -> Iterator[_Wrong]:
    """What every weight being trained excludes."""
    whole = call.value("train_mode") == "full"
    quantised = (call.value("quantize") or "none") != "none"
    found = "and --train_mode full contradict each other: every weight is trained"
    yield whole and quantised, "quantize", found, "take one of them off"
    yield whole and call.number("blocks_to_swap", 0) > 0, "blocks_to_swap", found, "take one of them off"
    adapters = call.given("network_weights") is not None
    found = "is for adapters, and --train_mode full trains none"
    yield whole and adapters, "network_weights", found, "take it off"
    for option in options(Train):
        if option.name in FOR_ADAPTERS:
            yield whole and not _as_usual(call, option), option.name, found, "take it off"


def _as_usual(call: Call, option: Option) -> bool:
    """Whether a flag is left out, given what it would be anyway, or given what is not known here."""
    given = call.given(option.name)
    if given is None or isinstance(option.default, bool):
        return not _is_on(call, option.name)
    if isinstance(option.default, float):
        return call.number(option.name, option.default) == option.default
    values = [option.flag.values.get(value.text, value.text) for value in given.values]
    usual = option.default if isinstance(option.default, tuple) else (option.default,)
    return any(UNKNOWN in value for value in values) or values == [str(value) for value in usual]


def experts(script: Script) -> Iterator[Finding]:
    """An expert of Wan 2.2 without its weights, and flags of experts for a model that has none."""
    for call in _trainings(script):
        model = _model(call)
        if model is None:
            continue
        if model.experts is None:
            for name in _HIGH_ONLY:
                if call.given(name):
                    yield Finding("experts", call.line_of(name), f"--{name}: {model.name} has one transformer",
                                  "take it off, or write the --task of the weights")  # fmt: skip
            needed = {"dit": "transformer"}
        else:
            yield from swapped(call, "warning") if call.given("dit") and call.given("dit_high_noise") else ()
            chosen = call.value("experts") or "both"
            needed = {} if chosen == "high" else {"dit": "low-noise expert"}
            needed |= {} if chosen == "low" else {"dit_high_noise": "high-noise expert"}
        for name, what in needed.items():
            if call.given(name) is None and not call.more:
                other = "" if model.experts is None else ", or train the other one alone with --experts"
                yield Finding("missing-flag", call.line, f"the {what} of {model.name} has no weights",
                              f"write --{name} PATH{other}")  # fmt: skip


def samples(script: Script) -> Iterator[Finding]:
    """Samples without prompts or encoders, and what needs a validation."""
    for call in _trainings(script):
        wishes = [name for name in _INTERVALS if call.given(name)]
        made = any(call.given(name) for name in ("sample_prompts", "sample_continuations"))
        if wishes and not made and not call.more:
            yield Finding("samples", call.line_of(wishes[0]), f"--{wishes[0]} needs --sample_prompts",
                          "add --sample_prompts FILE.txt, or take it off", "error")  # fmt: skip
        missing = [f"--{name} PATH" for name in ("vae", "t5") if call.given(name) is None]
        if call.given("sample_prompts") and missing and not call.more:
            yield Finding("samples", call.line_of("sample_prompts"), "samples need the VAE and the text encoder",
                          f"add {' and '.join(missing)}", "error")  # fmt: skip
        judged = [name for name in ("validation_items", "validation_config") if call.given(name)]
        for name in ("keep_best", "sample_continuations"):
            if call.given(name) and not judged and not call.more:
                yield Finding("value", call.line_of(name), f"--{name} needs a validation",
                              "add --validation_items 8")  # fmt: skip
        if call.given("sample_continuations") and call.given("vae") is None and not call.more:
            yield Finding("samples", call.line_of("sample_continuations"), "continuations need the VAE",
                          "add --vae PATH", "error")  # fmt: skip


def _is_on(call: Call, name: str) -> bool:
    """Whether a flag without a value is given, and not as `--no_…`."""
    flag = call.given(name)
    return flag is not None and not (flag.values and flag.values[0].text == "no")


def _model(call: Call) -> profiles.Model | None:
    """The model of a call; None where it is not known here."""
    given = call.given("task")
    task = call.value("task") if given else Train.task
    return profiles.model(task) if task in profiles.model_names() and task else None


def _trainings(script: Script) -> Iterator[Call]:
    return (call for call in script.steps(Train.command) if call.tool == "wangen")


RULES = (memory, experts, samples)
