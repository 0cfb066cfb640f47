"""`wangen doctor --real`: what somebody who runs real weights on a real card should report, to be pasted.

Of the machine and of a run it has the numbers that help, and no path, no name of a user, host, file or dataset.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from wangen.generator.commit import version_words
from wangen.generator.doctor.check_places import speed
from wangen.generator.doctor.check_python import SHOWN
from wangen.generator.doctor.facts import Facts, Trial
from wangen.generator.doctor.findings import Finding
from wangen.generator.memory import gib_text

_KERNELS = ("sdpa", "flash3", "flash", "xformers", "sage")


def block(facts: Facts, findings: Sequence[Finding], run: Mapping[str, str]) -> str:
    """The text to paste.

    Args:
        facts: of the machine.
        findings: of the checks; their names alone are shown.
        run: label -> text, of a run.
    """
    rows = [*_machine(facts), *_trials(facts.trials), ("found", _names(findings)), *_disks(facts)]
    if run:
        rows += [("", ""), ("run", ""), *((f"  {label}", text) for label, text in run.items())]
    lines = [f"{label + ':':18} {text}".rstrip() if label else "" for label, text in rows]
    return "\n".join(["```", version_words(), *lines, "```"])


def _machine(facts: Facts) -> Iterator[tuple[str, str]]:
    system, memory, hardware = facts.system, facts.memory, facts.hardware
    # A kernel of somebody's own can be named after anything.
    release = re.match(r"[\d.]*(-\d+)?", system.release)
    yield "system", f"{system.kind} {release[0] if release else ''}, {memory.processors} processors"
    limit = f", limited to {gib_text(memory.limit)}" if memory.limit and memory.limit < memory.total else ""
    yield "memory", f"{gib_text(memory.total)}{limit}, swap {gib_text(memory.swap)}"
    if hardware.driver:
        cuda = "{}.{}".format(*hardware.cuda) if hardware.cuda else "?"
        yield "driver", f"NVIDIA {hardware.driver}, CUDA up to {cuda}"
    for card in facts.cards:
        size = f", {gib_text(card.total)}" if card.total else ""
        taken = f", {gib_text(card.used)} taken" if card.used else ""
        lanes = f", {card.lanes} of {card.max_lanes} lanes" if card.lanes else ""
        yield "card", f"{card.name}{size}{taken}{lanes}{', ' + card.model if card.model else ''}"
    if hardware.amd:
        yield "card", f"AMD {hardware.amd}"
    yield "python", ".".join(map(str, facts.python.version))
    yield "libraries", " ".join(f"{name}={version}" for name in SHOWN if (version := facts.python.packages.get(name)))


def _trials(trials: Mapping[str, Trial]) -> Iterator[tuple[str, str]]:
    torch = trials.get("torch", Trial()).found
    if torch:
        yield "torch", f"{torch['version']}, CUDA {torch['cuda']}, HIP {torch['hip']}, cuDNN {torch.get('cudnn')}"
    for card in trials.get("cards", Trial()).found.get("cards", []):
        capability = "{}.{}".format(*card["capability"])
        yield "torch sees", f"{card['name']}, {capability} {card['architecture']}, {gib_text(card['total_bytes'])}"
    yield "attention", " ".join(f"{name}={_kernel(trials.get(f'attention {name}', Trial()))}" for name in _KERNELS)
    speed, vae, lock = (trials.get(name, Trial()).found for name in ("speed", "vae", "lock"))
    if speed:
        yield "product", f"{speed['tflops']:.4g} TFLOP/s in {speed['dtype']}"
    if vae:
        error = "not finite" if vae["error"] is None else f"error {vae['error']:.1e}"
        yield "convolution", f"{vae['dtype']}, {error}"
    if lock.get("locked") is not None:
        yield "locked memory", "yes" if lock["locked"] else "no"
    yield "triton", "yes" if trials.get("libraries", Trial()).found.get("triton") else "no"


def _kernel(trial: Trial) -> str:
    if trial.crash:
        return "crashes"
    if trial.error or trial.found.get("runs") is False:
        return "fails"
    return "runs" if trial.found.get("runs") else "no"


def _names(findings: Sequence[Finding]) -> str:
    names = [f"{finding.name} ({finding.level})" for finding in findings if finding.level != "ok"]
    return ", ".join(dict.fromkeys(names)) or "nothing"


def _disks(facts: Facts) -> Iterator[tuple[str, str]]:
    seen = set()
    for place in facts.places:
        if place.write_rate is not None and place.mount not in seen:
            seen.add(place.mount)
            yield "disk", f"{place.file_system}{speed(place)}"
