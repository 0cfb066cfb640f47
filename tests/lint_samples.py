"""Scripts for the linter's tests: one right script for each shell, made from its flags, and edits of it."""

from pathlib import Path

from wangen.generator import lint
from wangen.generator.lint.kinds import Finding

SHELLS = ("sh", "bat", "ps1")
ROOT = {"sh": "/ai", "bat": "C:\\AI", "ps1": "C:\\AI"}
MARK = {"sh": "\\", "bat": "^", "ps1": "`"}
HEAD = {
    "sh": '#!/usr/bin/env bash\nset -euo pipefail\ncd "$(dirname "$0")"\nsource venv/bin/activate\n',
    "bat": '@echo off\nsetlocal\ncd /d "%~dp0"\ncall venv\\Scripts\\activate.bat\n',
    "ps1": "Set-Location $PSScriptRoot\n& .\\venv\\Scripts\\Activate.ps1\n",
}
CHECK = {
    "sh": "",
    "bat": 'if not "%ERRORLEVEL%"=="0" exit /b %ERRORLEVEL%\n',
    "ps1": "if ($LASTEXITCODE -ne 0) { exit $LASTEXITCODE }\n",
}
STEPS = {
    "latents": ("python", "wan_cache_latents.py", {"dataset_config": "@cats.toml", "vae": "@Wan2.1_VAE.pth"}),
    "text": ("python", "wan_cache_text_encoder_outputs.py",
             {"dataset_config": "@cats.toml", "t5": "@models_t5_umt5-xxl-enc-bf16.pth"}),
    "train": ("accelerate launch --mixed_precision bf16", "wan_train_network.py", {
        "task": "t2v-14B", "dit": "@wan2.1_t2v_14B_bf16.safetensors", "dataset_config": "@cats.toml", "sdpa": None,
        "mixed_precision": "bf16", "optimizer_type": "adamw8bit", "learning_rate": "1e-4",
        "gradient_checkpointing": None, "network_module": "networks.lora_wan", "network_dim": "16",
        "timestep_sampling": "shift", "discrete_flow_shift": "5", "max_train_epochs": "16",
        "save_every_n_epochs": "1", "output_dir": "@out", "output_name": "cats"}),
}  # fmt: skip
A14B = {
    "task": "t2v-A14B", "dit": "@t2v_low_noise_bf16.safetensors", "dit_high_noise": "@t2v_high_noise_bf16.safetensors",
    "discrete_flow_shift": "12", "timestep_boundary": "875",
}  # fmt: skip

OUT = object()
"""The value of a flag that is taken out."""


def value_of(shell: str, value: str) -> str:
    """A value as the shell writes it; `@x` is a path below the root."""
    if not value.startswith("@"):
        return value
    separator = "/" if shell == "sh" else "\\"
    return f'"{ROOT[shell]}{separator}{value[1:]}"'


def call(shell: str, step: str, changes: dict, *, tool: str = "musubi") -> str:
    """The lines of one call, a flag on each."""
    launcher, program, flags = STEPS[step]
    words = [f"--{name}" + ("" if value is None else f" {value_of(shell, value)}")
             for name, value in (flags | changes).items() if value is not OUT]  # fmt: skip
    start = f"{launcher} src/musubi_tuner/{program}" if tool == "musubi" else f"wangen {tool}"
    return f" {MARK[shell]}\n".join([start, *(f"  {word}" for word in words)]) + "\n"


def script(shell: str, *, latents=None, text=None, train=None, order=("latents", "text", "train")) -> str:
    """A whole script; the arguments change the flags of a step, `OUT` leaves the step out."""
    edits = {"latents": latents, "text": text, "train": train}
    calls = [call(shell, step, edits[step] or {}) for step in order if edits[step] is not OUT]
    return HEAD[shell] + CHECK[shell].join(calls)


def encode(shell: str, text: str) -> bytes:
    """The bytes of a script as its shell needs them."""
    plain = text if shell == "sh" else text.replace("\n", "\r\n")
    return (b"\xef\xbb\xbf" if shell == "ps1" and not text.isascii() else b"") + plain.encode()


def findings(shell: str, text: str, folder: Path = Path("/nowhere")) -> list[Finding]:
    """What the linter says about a script's text."""
    return lint.lint(lint.parse(folder / f"run.{shell}", shell, encode(shell, text)))


def line_of(text: str, part: str) -> int:
    """The number of the first line that holds a text."""
    return next(number for number, line in enumerate(text.split("\n"), 1) if part in line)


def expect(shell: str, text: str, kind: str, at: str | int, *words: str, folder: Path = Path("/nowhere")) -> Finding:
    """The finding of that kind at that line (a number, or a text in it) whose message holds the words."""
    number = line_of(text, at) if isinstance(at, str) else at
    found = findings(shell, text, folder)
    match = [f for f in found if f.kind == kind and f.line == number and all(w in f"{f.found} {f.cure}" for w in words)]
    assert match, f"no {kind} in line {number} with {words}; found:\n" + "\n".join(map(str, found)) + "\n" + text
    return match[0]
