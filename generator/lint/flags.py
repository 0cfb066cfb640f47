"""Rules about one call: its flags, its words, and what it needs, judged by its own tool."""

from collections.abc import Iterator

from wangen.generator.lint import tools
from wangen.generator.lint.kinds import Finding
from wangen.generator.lint.script import MARK, UNKNOWN, Call, Script, Word
from wangen.generator.table import options
from wangen.generator.toml_values import is_clip_length, longest_clip

KERNELS = ("sdpa", "flash_attn", "flash3", "sage_attn", "xformers")
_COMMANDS = {"pause", "echo", "exit", "python", "accelerate", "if", "goto", "rem", "call", "cd", "fi", "done", "set"}
_NO_EFFECT = {
    "guidance_scale": "musubi-tuner's Wan trainer ignores it",
    "img_in_txt_in_offloading": "it belongs to HunyuanVideo and does nothing for Wan",
}
_SECRETS = {
    "wandb_api_key": "run `wandb login` once, or set WANDB_API_KEY",
    "huggingface_token": "run `hf auth login` once, or set HF_TOKEN",
}
_DEFAULTS = {
    "network_module": "write --network_module networks.lora_wan: without it the trainer stops after loading the model",
    "optimizer_type": "write --optimizer_type adamw8bit: without it the trainer stops with \"torch.optim has no ''\"",
    "output_dir": "write --output_dir FOLDER: without it the first save fails, after hours of training",
    "output_name": "write --output_name NAME: without it the last save fails, after the whole run",
}


def flags(script: Script) -> Iterator[Finding]:
    """Unknown flags and wrong values."""
    for call in script.calls:
        for fault in call.faults:
            yield Finding(fault.kind, fault.line, fault.found, fault.cure)


def missing(script: Script) -> Iterator[Finding]:
    """Flags without which the call fails."""
    for call in script.calls:
        for name in tools.required(call):
            if not call.more and call.given(name) is None:
                value = "PATH" if name != "output_name" else "NAME"
                cure = _DEFAULTS.get(name) if call.tool == "musubi-tuner" else ""
                yield Finding("missing-flag", call.line, f"{call.program} needs --{name}",
                              cure or f"write --{name} {value}")  # fmt: skip


def twice(script: Script) -> Iterator[Finding]:
    """A flag that is given again with another value."""
    for call in script.calls:
        seen: dict[str, str] = {}
        lists = {option.name for option in options(call.step) if call.tool == "wangen" and option.length == 0}
        for flag in call.flags:
            text = " ".join(word.text for word in flag.values)
            if seen.get(flag.name, text) != text and flag.name != "attention" and flag.name not in lists:
                yield Finding("twice", flag.line, f"{flag.spelled} is given twice; '{text}' wins", "take one off")
            seen[flag.name] = text


def stray(script: Script) -> Iterator[Finding]:
    """Words that belong to no flag: mostly the rest of a path with a blank in it."""
    for call in script.calls:
        later = [word for torn in tools.torn_values(call) for word in torn.rest[1:]]
        for word in call.stray:
            if word.text.strip() in ("", "^", "\\", "`") or UNKNOWN in word.text:
                continue  # a continuation mark, judged by the rule on continuations, or a text not known here
            if any(word is part for part in later):
                continue  # one finding for a torn path
            yield _stray(script, call, word)


def _stray(script: Script, call: Call, word: Word) -> Finding:
    if word.text[0] in "–—":
        dashed = "--" + word.text.lstrip("–—-")
        return Finding("smart-character", word.line, f"'{word.text}' begins with a typographic dash",
                       f"write {dashed}")  # fmt: skip
    start = script.lines[word.line - 1].strip().split()[:1]
    if start == [word.text] and word.text.lower() in _COMMANDS and word.line > 1:
        mark = MARK[script.shell]
        return Finding("continuation", word.line - 1, f"this line ends in {mark}, so that '{word.text}' below belongs "
                       f"to {call.program}", f"take the {mark} off the last line of the call")  # fmt: skip
    torn = next((torn for torn in tools.torn_values(call) if torn.rest[0] is word), None)
    if torn:
        return Finding("unquoted", word.line, f"{call.program} receives '{torn.first.text}' and, apart from it, "
                       f"'{word.text}'", f'quote the whole: "{torn.whole().text}"')  # fmt: skip
    return Finding("stray-word", word.line, f"'{word.text}' belongs to no flag of {call.program}", "take it off")


def attention(script: Script) -> Iterator[Finding]:
    """Exactly one attention kernel, and for musubi-tuner never sage in training; wangen has its gradient."""
    for call in script.steps("train"):
        kernels = [flag for flag in call.flags if flag.name in KERNELS or flag.name == "attention"]
        names = {(flag.values[0].text if flag.values else flag.name).replace("sageattn", "sage") for flag in kernels}
        for flag in kernels:
            if flag.name == "sage_attn" and call.tool == "musubi-tuner":
                yield Finding("sage", flag.line, "sage attention has no backward pass: nothing can be trained with it",
                              "write --sdpa")  # fmt: skip
        if len(names) > 1:
            spelled = " and ".join(dict.fromkeys(flag.spelled for flag in kernels))
            yield Finding("attention", kernels[-1].line, f"{spelled} contradict each other", "keep one of them")
        if not kernels and call.tool == "musubi-tuner" and not call.more:
            yield Finding("attention", call.line, "no attention kernel is chosen, and the trainer needs one",
                          "write --sdpa")  # fmt: skip


def precision(script: Script) -> Iterator[Finding]:
    """`--mixed_precision` of the trainer, of accelerate and of the weights must agree."""
    for call in _musubi_trainings(script):
        weights = (call.value("dit") or "").lower()
        own = call.value("mixed_precision")
        line = call.line_of("mixed_precision")
        kind = "fp16" if "fp16" in weights else "bf16" if "bf16" in weights else ""
        if own is None and call.given("mixed_precision") is None and not call.more:
            yield Finding("precision", line, "the trainer needs --mixed_precision itself; accelerate's is not seen in "
                          "time", f"write --mixed_precision {kind or 'bf16'} behind {call.program}.py")  # fmt: skip
        elif own in ("fp16", "bf16") and kind and own != kind:
            yield Finding("precision", line, f"--mixed_precision {own} with weights in {kind} (by their name) is "
                          "refused by musubi-tuner", f"write --mixed_precision {kind}, or {own} weights")  # fmt: skip
        launched = _accelerate_precision(call)
        if launched and own and launched != own:
            yield Finding("precision", line, f"accelerate is told {launched} and the trainer {own}",
                          "write the same twice", "warning")  # fmt: skip


def _accelerate_precision(call: Call) -> str:
    texts = [word.text for word in call.launcher]
    for place, text in enumerate(texts):
        if text.startswith("--mixed_precision="):
            return text.partition("=")[2]
        if text == "--mixed_precision" and place + 1 < len(texts):
            return texts[place + 1]
    return ""


def memory(script: Script) -> Iterator[Finding]:
    """Memory features that exclude or need each other."""
    for call in _musubi_trainings(script):
        has = {flag.name for flag in call.flags}
        swap = call.number("blocks_to_swap", 0)
        most = 29 if "1.3B" in (call.value("task") or "") else 39
        pairs = [
            ("fp8_scaled" in has and "fp8_base" not in has, "fp8_scaled", "needs --fp8_base", "add --fp8_base"),
            ("fp8_base" in has and call.value("mixed_precision") == "no", "fp8_base", "needs autocast",
             "write --mixed_precision bf16"),
            (bool(swap) and "offload_inactive_dit" in has, "offload_inactive_dit",
             "does not work together with --blocks_to_swap", "keep one of them"),
            (swap > most, "blocks_to_swap", f"can be {most} at most for this model", f"write --blocks_to_swap {most}"),
            ("block_swap_h2d_only" in has and "gradient_checkpointing" not in has, "block_swap_h2d_only",
             "needs --gradient_checkpointing", "add --gradient_checkpointing"),
            ("block_swap_h2d_only" in has and "dit_high_noise" in has, "block_swap_h2d_only",
             "trains one expert's weights in the name of the other with --dit_high_noise",
             "take --block_swap_h2d_only off"),
            ("split_attn" in has and "flash3" in has, "split_attn", "does not work with --flash3", "write --sdpa"),
            ("persistent_data_loader_workers" in has and call.value("max_data_loader_n_workers") == "0",
             "persistent_data_loader_workers", "fails without workers", "take it off, or give workers"),
            ("dim_from_weights" in has, "dim_from_weights", "is broken in musubi-tuner",
             "write --network_dim with the rank of the LoRA"),
        ]  # fmt: skip
        for wrong, name, found, cure in pairs:
            if wrong:
                yield Finding("memory", call.line_of(name), f"--{name} {found}", cure)


def saving(script: Script) -> Iterator[Finding]:
    """What is written when, and what is not: saving, samples, resume, length."""
    for call in _musubi_trainings(script):
        has = {flag.name for flag in call.flags}
        line = call.line
        if not call.more and not has & {"save_every_n_epochs", "save_every_n_steps"}:
            yield Finding("saving", line, "nothing is saved before the end of the run, and a crash loses all",
                          "write --save_every_n_epochs 1")  # fmt: skip
        if "resume" in has:
            yield Finding("saving", call.line_of("resume"), "musubi-tuner counts from step 0 again after --resume: it "
                          "trains the whole length once more and overwrites the earlier files",
                          "give another --output_name, and the steps that are left as --max_train_steps")  # fmt: skip
        if {"max_train_steps", "max_train_epochs"} <= has:
            yield Finding("saving", call.line_of("max_train_steps"), "--max_train_epochs wins over --max_train_steps",
                          "take one off")  # fmt: skip
        if "learning_rate" not in has and not call.more:
            yield Finding("saving", line, "the default learning rate, 2e-6, is far too low for a LoRA",
                          "write --learning_rate 1e-4")  # fmt: skip
        yield from _samples(call, has)


def _samples(call: Call, has: set[str]) -> Iterator[Finding]:
    needed = [name for name in ("vae", "t5") if name not in has]
    if "sample_prompts" in has and needed and not call.more:
        yield Finding("samples", call.line_of("sample_prompts"), "samples need the VAE and the text encoder",
                      "add " + " and ".join(f"--{name} PATH" for name in needed), "error")  # fmt: skip
    wishes = [name for name in ("sample_every_n_epochs", "sample_every_n_steps", "sample_at_first") if name in has]
    if wishes and "sample_prompts" not in has and not call.more:
        yield Finding("samples", call.line_of(wishes[0]), f"--{wishes[0]} does nothing without --sample_prompts",
                      "add --sample_prompts FILE, or take it off")  # fmt: skip


def values(script: Script) -> Iterator[Finding]:
    """Flags that do nothing or say too much, adapters of another model, lengths and sizes that Wan cannot have."""
    for call in script.calls:
        for flag in call.flags:
            if call.tool == "musubi-tuner" and call.name == "train" and flag.name in _NO_EFFECT:
                yield Finding("no-effect", flag.line, f"{flag.spelled}: {_NO_EFFECT[flag.name]}", "take it off")
            if flag.name in _SECRETS:
                yield Finding("secret", flag.line, f"{flag.spelled} shows a secret in every list of processes",
                              _SECRETS[flag.name])  # fmt: skip
        module = call.value("network_module") or ""
        if call.tool == "musubi-tuner" and module.startswith("networks.lora") and module != "networks.lora_wan":
            yield Finding("value", call.line_of("network_module"), f"--network_module {module} is made for another "
                          "model", "write --network_module networks.lora_wan")  # fmt: skip
        yield from _sizes(call)


def _sizes(call: Call) -> Iterator[Finding]:
    length = call.value("video_length")
    if length and _is_number(length) and not is_clip_length(int(length)):
        yield Finding("value", call.line_of("video_length"), f"--video_length {length} is not 4n+1",
                      f"write {longest_clip(int(length))}")  # fmt: skip
    size = call.given("video_size")
    for word in size.values if size else ():
        if _is_number(word.text) and int(word.text) % 16:
            yield Finding("value", word.line, f"--video_size {word.text} is no multiple of 16",
                          f"write {int(word.text) // 16 * 16 or 16}")  # fmt: skip


def _is_number(text: str) -> bool:
    """Whether it is a number of pixels or frames: Python takes thousands of digits for none, and `²` for a digit."""
    return text.isdecimal() and len(text) < 10


def _musubi_trainings(script: Script) -> Iterator[Call]:
    return (call for call in script.steps("train") if call.tool == "musubi-tuner")


RULES = (flags, missing, twice, stray, attention, precision, memory, saving, values)
