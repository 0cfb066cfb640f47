"""What the card computes: attention kernels, the VAE's convolution, speed, and memory that it reads while it does."""

from collections.abc import Iterator

from wangen.generator.doctor.check_python import said
from wangen.generator.doctor.facts import Facts, Trial
from wangen.generator.doctor.findings import Finding, found

_PACKAGES = {"flash3": "flash-attn-3", "flash": "flash-attn", "xformers": "xformers", "sage": "sageattention"}
_CONVOLVES_FRAMES = 91500
"""The version of cuDNN whose convolutions over frames PyTorch 2.9.1 takes again."""

_FAR, _SLOW = 0.05, 0.4
"""Half precision is off by less than a thousandth; a card reaches 60 to 80 % of its peak in such a product."""


def check(facts: Facts) -> Iterator[Finding]:
    """All that is said of what was computed."""
    on_card = bool(facts.trials.get("cards", Trial()).found.get("cards"))
    yield from _sdpa(facts.trials.get("attention sdpa", Trial()), on_card=on_card)
    yield from _packages(facts)
    yield from _vae(facts.trials.get("vae", Trial()), on_card=on_card)
    if on_card and _lacks_cudnn(facts.trials.get("torch", Trial())):
        yield found("vae-without-cudnn", "the VAE's convolutions are computed without cuDNN")
    yield from _speed(facts.trials.get("speed", Trial()), on_card=on_card)
    lock = facts.trials.get("lock", Trial())
    if lock.failed or lock.found.get("locked") is False:
        yield found("memory-not-locked", f"a gigabyte of the host's memory is not locked{_behind(lock)}")
    if on_card and facts.trials.get("libraries", Trial()).found.get("triton") is False:
        yield found("no-triton", "triton is not installed, or makes no kernels here")


def _sdpa(trial: Trial, *, on_card: bool) -> Iterator[Finding]:
    if trial.failed or trial.found.get("runs") is False:
        yield found(
            "attention-fails", f"PyTorch's own attention does not run: {trial.found.get('reason') or said(trial)}"
        )
    elif trial.found:
        yield Finding("ok", "attention", "attention sdpa runs, forward and backward")
        if on_card and not trial.found.get("has_flash"):
            yield found("sdpa-no-flash", "this PyTorch has no FlashAttention of its own")


def _packages(facts: Facts) -> Iterator[Finding]:
    missing = []
    for kernel, package in _PACKAGES.items():
        trial = facts.trials.get(f"attention {kernel}", Trial())
        if trial.crash:
            yield found("attention-crash", f"attention {kernel} ({package}): {said(trial)}", facts.python.path)
        elif trial.error or (trial.found.get("installed") and not trial.found["runs"]):
            reason = trial.error or trial.found["reason"]
            yield found("attention-package", f"attention {kernel} ({package}) does not run here: {reason}")
        elif trial.found.get("runs"):
            backward = "; its backward pass is SDPA's" if kernel == "sage" else ", forward and backward"
            yield Finding("ok", "attention", f"attention {kernel} runs{backward}")
        elif trial.found:
            missing.append(kernel)
    if missing:
        yield Finding("ok", "attention", f"not installed, and not needed: {', '.join(missing)}")


def _vae(trial: Trial, *, on_card: bool) -> Iterator[Finding]:
    if not trial.found and not trial.failed:
        return
    error = trial.found.get("error")
    if trial.failed:
        yield found("vae-wrong", f"a convolution over frames fails: {said(trial)}")
    elif not trial.found["finite"] or error is None or error > _FAR:
        off = "not finite" if error is None or not trial.found["finite"] else f"off by {error:.0%}"
        yield found("vae-wrong", f"a convolution over frames in {trial.found['dtype']} is {off}")
    else:
        yield Finding("ok", "vae", f"the VAE's convolution is right in {trial.found['dtype']}"
                      + (" on the card" if on_card else ""))  # fmt: skip


def _lacks_cudnn(torch: Trial) -> bool:
    """Whether PyTorch passes cuDNN over for convolutions over frames: https://github.com/pytorch/pytorch/issues/166643."""
    version, cudnn = torch.found.get("version", ""), torch.found.get("cudnn")
    if not cudnn or torch.found.get("hip"):
        return False
    return bool(version.startswith("2.9.0") or (version.startswith("2.9.") and cudnn < _CONVOLVES_FRAMES))


def _speed(trial: Trial, *, on_card: bool) -> Iterator[Finding]:
    if trial.failed:
        yield found("card-fails", f"a large matrix product fails: {said(trial)}")
    elif trial.found and on_card:
        tflops, peak = trial.found["tflops"], trial.found["peak_tflops"]
        words = f"{tflops:.3g} TFLOP/s in {trial.found['dtype']}" + (f" of at most {peak:.3g}" if peak else "")
        yield Finding("ok", "speed", f"a large matrix product: {words}")
        if peak and tflops < _SLOW * peak:
            yield found("card-slow", words)


def _behind(trial: Trial) -> str:
    return f": {said(trial)}" if trial.failed else ""
