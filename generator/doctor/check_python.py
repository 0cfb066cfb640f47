"""The Python of the scripts, its libraries, and whether they start."""

import re
from collections.abc import Iterator

from wangen.generator.doctor.cures import library_cure
from wangen.generator.doctor.facts import THIS, TOLD_WHY, Facts, Trial
from wangen.generator.doctor.findings import Finding, found
from wangen.generator.interpreter import TOLD
from wangen.generator.setup.installing import explain

_NO_MEMORY = re.compile("MemoryError|annot allocate memory|bad_alloc|paging file|WinError 1455|SIGKILL")
OLDEST = (3, 11)
SHOWN = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "av")


def check(facts: Facts) -> Iterator[Finding]:
    """All that is said of the interpreter."""
    python = facts.python
    if facts.shadows:
        yield found("shadows", f"`python -m` takes these files for libraries: {', '.join(facts.shadows)}")
    if python.looked:
        yield found("no-environment", "no environment for the workspace's scripts", ", ".join(python.looked))
    if python.starts:
        cure = f"unset {TOLD}, or have it name a Python that starts" if python.why == TOLD_WHY else ""
        yield found("python-fails", f"the Python of the scripts does not start: {python.starts}", python.path, cure)
        return
    version = ".".join(map(str, python.version))
    yield Finding("ok", "python", f"Python {version}, {python.why}", python.path)
    if python.version < OLDEST:
        yield found("python-old", f"Python {version}; wangen needs 3.11 or newer", python.path)
    if python.bits != 64:
        yield found("python-32-bit", f"this Python is a {python.bits}-bit one", python.path)
    if "windowsapps" in python.base.lower():
        yield found("python-store", "this Python comes from the Microsoft Store", python.base)
    if not python.own:
        yield found("no-venv", "this Python is no environment of its own", python.base)
    variables = facts.system.variables
    if named := [name for name in ("PYTHONPATH", "PYTHONHOME") if variables.get(name)]:
        yield found("python-variables", f"{' and '.join(named)} set", "; ".join(variables[name] for name in named))
    yield from _libraries(facts)
    yield from _starts(facts)


def _libraries(facts: Facts) -> Iterator[Finding]:
    python = facts.python
    # A note is of PyTorch's build, of which the checks of the card know more.
    problems = [fault for fault in python.faults if fault.level == "problem"]
    if missing := [fault for fault in problems if fault.missing]:
        # Where nobody named this Python, and setup made none, wangen alone may be all that is wanted.
        alone = python.why == THIS and any(fault.missing == "torch" for fault in missing)
        what = f"not installed: {', '.join(fault.missing for fault in missing)}"
        cure = "" if alone else library_cure(facts) or missing[0].cure
        yield found("no-runtime" if alone else "library", what, python.path, cure)
    for fault in problems:
        if not fault.missing:
            yield found("library", fault.what, python.path, library_cure(facts) or fault.cure)
    if not problems:
        versions = ", ".join(f"{name} {python.packages[name]}" for name in SHOWN if python.packages.get(name))
        yield Finding("ok", "libraries", f"wangen {python.packages.get('wangen')}, {versions}")


def _starts(facts: Facts) -> Iterator[Finding]:
    torch, libraries, video = (facts.trials.get(name, Trial()) for name in ("torch", "libraries", "video"))
    if "No module named wangen.runtime" in torch.error or "No module named 'wangen" in torch.error:
        yield found("environment-old", f"the wangen there is not this one: {torch.error}", facts.python.path)
        return
    yield from _fails(facts, torch, "torch-fails", "PyTorch does not start")
    yield from _fails(facts, libraries, "library-fails", "the libraries of training do not start")
    if libraries.found:
        yield Finding("ok", "libraries", "the libraries of training start")
    yield from _fails(facts, video, "video-fails", "PyAV does not write and read a clip")
    if video.found:
        if not video.found["ffmpeg"]:
            yield found("ffmpeg-fails", "the ffmpeg of imageio-ffmpeg does not run", facts.python.path)
        yield Finding("ok", "video", "PyAV writes and reads a clip")


def _fails(facts: Facts, trial: Trial, name: str, what: str) -> Iterator[Finding]:
    """A trial that failed, unless a library that is not installed is the reason, which is said already."""
    lacking = any(fault.missing for fault in facts.python.faults) and "ModuleNotFoundError" in trial.error
    if trial.failed and not lacking:
        yield found(name, f"{what}: {said(trial)}", facts.python.path, _cure(facts, trial))


def _cure(facts: Facts, trial: Trial) -> str:
    if _NO_MEMORY.search(said(trial)):
        return "free memory, or raise its limit: the container's or the job's, ulimit -v, on Windows the page file"
    return explain(trial.error).replace("this script", "the setup script") or library_cure(facts)


def said(trial: Trial) -> str:
    """How a trial failed, on one line."""
    return ": ".join(part for part in (trial.crash, trial.error) if part) or "it gave nothing"
