"""Rules between the steps of a script: what is missing, what comes too early, what does not agree."""

from collections.abc import Iterator

from wangen.generator.lint.kinds import Finding
from wangen.generator.lint.script import FOREIGN, UNKNOWN, Call, Given, Script, quoted
from wangen.generator.unread_flags import ENCODE_FIRST

_CACHING = {"cache_latents": ("latents", "wan_cache_latents.py"),
            "cache_text": ("text embeddings", "wan_cache_text_encoder_outputs.py")}  # fmt: skip


def foreign(script: Script) -> Iterator[Finding]:
    """HunyuanVideo's scripts in the place of Wan's."""
    for line, name in script.foreign:
        yield Finding(
            "foreign-step", line, f"{name}.py works for HunyuanVideo, not for Wan", f"write {FOREIGN[name]}.py"
        )


def order(script: Script) -> Iterator[Finding]:
    """Both caching steps, in front of training."""
    trainings = script.steps("train")
    if not trainings:
        return
    first = trainings[0]
    present = {name for name in _CACHING if script.steps(name)}
    for name, (what, program) in _CACHING.items():
        step = program if first.tool == "musubi-tuner" else name
        calls = script.steps(name)
        in_functions = any(call.command.function for call in (first, *calls))  # which run when they are called
        if calls and calls[0].line > first.line and calls[0].args and not (calls[0].more or in_functions):
            yield Finding("order", calls[0].line, f"the {what} are cached after training has read them",
                          f"move this line before line {first.line}")  # fmt: skip
        elif not (calls or _foreign(script, name) or _encodes(first)):
            yield Finding("missing-step", first.line, f"nothing in this script caches the {what} that training reads",
                          f"call {step} before this line", "error" if present else "warning")  # fmt: skip


def _encodes(training: Call) -> bool:
    """Whether training makes by itself what no step before it has cached."""
    return training.value("cache_mode") in ("auto", "realtime") or any(map(training.given, ENCODE_FIRST))


def _foreign(script: Script, step: str) -> bool:
    wanted = {"cache_latents": "cache_latents", "cache_text": "cache_text_encoder_outputs"}[step]
    return any(name == wanted for _, name in script.foreign)


def agreement(script: Script) -> Iterator[Finding]:
    """The same dataset TOML, VAE and text encoder in every step that names one."""
    for name, what in (("dataset_config", "TOML"), ("vae", "VAE"), ("t5", "text encoder")):
        caching = [
            (call, flag) for call in script.calls if call.name.startswith("cache_") and (flag := call.given(name))
        ]
        known = {_plain(flag) for _, flag in caching if _plain(flag)}
        for call in script.calls:
            flag = call.given(name)
            if flag is None or not _plain(flag) or call.name.startswith("cache_") or not known:
                continue
            if _plain(flag) not in known:
                yield _differs(call, flag, what, caching[0][1])
        yield from _caches_differ(script, name, what)


def _caches_differ(script: Script, name: str, what: str) -> Iterator[Finding]:
    """Two caching steps with different files, each once in the script."""
    latents, text = script.steps("cache_latents"), script.steps("cache_text")
    one, two = (calls[0].given(name) if len(calls) == 1 else None for calls in (latents, text))
    if one and two and _plain(one) and _plain(two) and _plain(one) != _plain(two):
        yield _differs(text[0] if two.line >= one.line else latents[0], max(one, two, key=lambda flag: flag.line), what,
                       min(one, two, key=lambda flag: flag.line))  # fmt: skip


def _differs(call: Call, flag: Given, what: str, other: Given) -> Finding:
    mine, theirs = (given.values[0].text for given in (flag, other))
    found = f"{call.program} takes another {what} ({mine}) than caching in line {other.line} ({theirs})"
    return Finding("differs", flag.line, found, f"name one file in both places: --{flag.name} {quoted(theirs)}")


def _plain(flag: Given) -> str:
    """A path in one spelling; empty when it is not known."""
    text = flag.values[0].text if flag.values else ""
    if not text or UNKNOWN in text:
        return ""
    parts = [part for part in text.replace("\\", "/").split("/") if part != "."]
    plain = "/".join(parts)
    return plain.casefold() if ":" in plain[:3] or "\\" in text else plain


def outputs(script: Script) -> Iterator[Finding]:
    """Two trainings that write the same files."""
    seen: dict[tuple[str, str], Call] = {}
    for call in script.steps("train"):
        folder, name = call.given("output_dir"), call.given("output_name")
        if folder is None or name is None or not _plain(folder) or not _plain(name):
            continue
        key = _plain(folder), _plain(name)
        before = seen.setdefault(key, call)
        if before is not call:
            yield Finding("same-output", name.line, f"this overwrites the files of the training in line {before.line}",
                          "give each its own --output_name")  # fmt: skip


RULES = (foreign, order, agreement, outputs)
