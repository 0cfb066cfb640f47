"""The cards: their drivers, the PyTorch that is to use them, and what that PyTorch made of them when it was tried."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wangen.generator.doctor.check_python import said
from wangen.generator.doctor.cures import torch_cure
from wangen.generator.doctor.facts import Facts, Trial
from wangen.generator.doctor.findings import Finding, found
from wangen.generator.errors import many
from wangen.generator.memory import GIB, gib_text
from wangen.generator.setup.hardware import Version

_HIDING = {"CUDA_VISIBLE_DEVICES": "cuda", "HIP_VISIBLE_DEVICES": "rocm", "ROCR_VISIBLE_DEVICES": "rocm"}
_HIDDEN = ("", "-1", "NoDevFiles")
_BLOCKING = ("CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL", "PYTORCH_NO_CUDA_MEMORY_CACHING")
_SMALL, _TAKEN = 15 * GIB // 2, GIB
_NO_BFLOAT16: Version = (8, 0)
_FEW_LANES = 4


def check(facts: Facts) -> Iterator[Finding]:
    """All that is said of drivers and cards."""
    yield from _drivers(facts)
    yield from _wsl(facts)
    yield from _variables(facts)
    for card in facts.cards:
        if card.used is not None and card.used > _TAKEN:
            names = ", ".join(sorted({name for name, _ in facts.programs})) or "programs that the driver does not name"
            yield found("card-in-use", f"{gib_text(card.used)} of the memory of {card.name} are taken: {names}")
        if card.lanes and card.max_lanes and card.lanes * _FEW_LANES <= card.max_lanes:
            yield found("pcie-narrow", f"{card.name} uses {card.lanes} of its {card.max_lanes} PCI Express lanes")
    windows = facts.system.kind in ("windows", "wsl")
    if windows and facts.hardware.driver and not any(card.model == "TCC" for card in facts.cards):
        yield found("shared-memory-of-windows", "the driver of Windows may lend the card the host's memory")
    if facts.system.kind == "windows" and len(facts.hardware.cards) > 1:
        yield found("windows-gpus", many(len(facts.hardware.cards), "card"))
    torch = facts.trials.get("torch", Trial()).found
    if torch:
        yield from _build(facts, torch)


def _drivers(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    if hardware.driver:
        cuda = "{}.{}".format(*hardware.cuda) if hardware.cuda else "an unknown version"
        shown = [f"{card.name}{f' ({gib_text(card.total)})' if card.total else ''}" for card in facts.cards]
        cards = ", ".join(shown or hardware.cards) or "no card listed"
        yield Finding("ok", "driver", f"NVIDIA driver {hardware.driver} for CUDA up to {cuda}: {cards}")
    elif hardware.trouble:
        yield found("driver-silent", f"the NVIDIA driver does not answer: {hardware.trouble}")
    if hardware.amd:
        yield Finding("ok", "driver", f"AMD card: {hardware.amd}")
    closed = [path for path, usable in facts.system.devices.items() if not usable]
    if closed and not hardware.driver:  # beside an NVIDIA card, AMD's is mostly the one inside the processor
        yield found("rocm-rights", "this user may not use the AMD card", ", ".join(closed))


def _wsl(facts: Facts) -> Iterator[Finding]:
    system = facts.system
    if system.kind != "wsl":
        return
    if system.release.startswith("4.4."):
        yield found("wsl-1", f"this is WSL 1 (kernel {system.release})")
    elif not system.wsl_driver and not facts.hardware.driver:
        yield found("wsl-driver", "there is no driver of Windows here", "/usr/lib/wsl/lib/libcuda.so.1")
    if system.drivers:
        yield found("wsl-linux-driver", "a driver for Linux is installed in this distribution",
                    ", ".join(system.drivers))  # fmt: skip


def _variables(facts: Facts) -> Iterator[Finding]:
    variables = facts.system.variables
    for name in _BLOCKING:
        if variables.get(name, "0") not in ("", "0"):
            yield found("blocking", f"{name}={variables[name]}")
    if "HSA_OVERRIDE_GFX_VERSION" in variables and facts.hardware.amd:
        yield found("rocm-override", f"HSA_OVERRIDE_GFX_VERSION={variables['HSA_OVERRIDE_GFX_VERSION']}")
    named = [part for part in variables.get("LD_LIBRARY_PATH", "").split(":") if re.search("cuda|cudnn|rocm", part)]
    if named:
        yield found("library-path", "LD_LIBRARY_PATH names CUDA or ROCm libraries", ", ".join(named))


def _build(facts: Facts, torch: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether this PyTorch is one for the cards that are there, and sees them."""
    hardware, trial = facts.hardware, facts.trials.get("cards", Trial())
    kind = "rocm" if torch["hip"] else "cuda" if torch["cuda"] else "cpu"
    built = {"rocm": f"ROCm {torch['hip']}", "cuda": f"CUDA {torch['cuda']}", "cpu": "the CPU"}[kind]
    words = f"PyTorch {torch['version']} for {built}"
    there = {"cuda": bool(hardware.driver), "rocm": bool(hardware.amd)}
    if trial.failed:
        yield found("card-fails", f"{words}: looking at the cards fails: {said(trial)}")
    elif cards := trial.found.get("cards", []):
        yield from _seen(cards, words, kind, trial.found["architectures"], torch_cure(facts))
    elif not any(there.values()):
        if not hardware.trouble:  # else it is said already
            yield found("no-card", f"{words}, and no card")
    elif kind == "cpu":
        yield found("torch-cpu", words, facts.python.path, torch_cure(facts))
    elif not there[kind]:
        yield found("torch-other", words, facts.python.path, torch_cure(facts))
    elif kind == "cuda" and hardware.cuda and int(torch["cuda"].split(".")[0]) > hardware.cuda[0]:
        offered = "{}.{}".format(*hardware.cuda)
        yield found("driver-old", f"{words} on driver {hardware.driver}, which offers CUDA {offered}")
    elif hiding := [f"{name}={facts.system.variables[name]}" for name, of in _HIDING.items()
                    if of == kind and facts.system.variables.get(name, "0").strip() in _HIDDEN]:  # fmt: skip
        yield found("card-hidden", f"{words} sees no card", ", ".join(hiding))
    else:
        yield found("card-unseen", f"{words} sees no card: {trial.found.get('reason') or 'it does not say why'}")


def _seen(
    cards: Sequence[Mapping[str, Any]], words: str, kind: str, built_for: Sequence[str], cure: str
) -> Iterator[Finding]:
    """What is said of each card that PyTorch sees."""
    for card in cards:
        name = card["name"]
        major, minor = card["capability"]
        if "no kernel image" in card["error"] or (kind == "cuda" and not covers(built_for, (major, minor))):
            yield found("card-unsupported", f"{words} has no code for {name} (compute capability {major}.{minor}); it "
                        f"has {' '.join(built_for)}", cure=cure)  # fmt: skip
        elif card["error"]:
            yield found("card-fails", f"{words}: a calculation on {name} fails: {card['error']}")
        else:
            yield Finding("ok", "card", f"{words} computes on {name}")
        if card["total_bytes"] < _SMALL:
            yield found("card-small", f"{name} has {gib_text(card['total_bytes'])}")
        if kind == "cuda" and (major, minor) < _NO_BFLOAT16:
            yield found("card-old", f"{name} has compute capability {major}.{minor}")
    if kind == "rocm":
        yield Finding("ok", "rocm", "on ROCm the VAE runs in float32 without autocast, and one thread decodes")


def covers(built_for: Sequence[str], capability: Version) -> bool:
    """Whether a build of PyTorch has code for a card: of its own generation, up to its version, or to be translated.

    >>> covers(["sm_80", "sm_86", "sm_90"], (8, 9)), covers(["sm_80", "sm_90"], (12, 0))
    (True, False)
    >>> covers(["sm_90", "compute_90"], (12, 0)), covers([], (8, 0))
    (True, True)
    """
    for text in built_for:
        named = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", text)
        if not named:
            return True  # of another maker, or not known
        version = int(named[2]), int(named[3])
        if version <= capability and (named[1] == "compute" or version[0] == capability[0]):
            return True
    return not built_for
