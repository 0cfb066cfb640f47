"""Bundles of hostile paths and texts for the tests of the scripts."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from wangen.generator.scripts import Bundle
from wangen.generator.steps import CacheLatents, CacheText, Check, CheckCache, Generate, Train
from wangen.profiles import platform


def read_calls(record: Path) -> list[dict[str, Any]]:
    """What a recorder wrote, one entry per call; none when it was never called."""
    if not record.exists():
        return []
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


def put(path: Path, data: bytes) -> None:
    """Write a script as publishing does: a .sh can be executed."""
    path.write_bytes(data)
    path.chmod(0o755 if path.suffix == ".sh" else 0o644)


PLATFORMS = {"sh": "linux", "bat": "windows", "ps1": "windows"}

# Every character that some shell gives a meaning to, and what quoting usually trips over.
HOSTILE = [
    "plain",
    "two words",
    " blanks ",
    "musubi (x86) & 100% é日本 !x! ^y",
    "a&b|c<d>e^f",
    "%PATH%",
    "%%A",
    "100% of 5%",
    "!PATH!",
    "$HOME `id` $(id)",
    "it's",
    "typographic ‘quotes’ ‚and‛ “more”",
    "semi;colon,comma=equals",
    "tilde~at@hash#star*question?[brackets]{braces}",
    "back\\slash",
    "C:\\ends\\in\\",
    "\\\\nas\\share\\x",
    "-dash",
    "--double",
    "/slash /c",
    "🦊 emoji",
    "e\u0301 combining",
    "no\u00a0break",
    "tab\there",
    ":: rem",
    "@('x')",
    "^",
    "%",
    "!",
]
# What bash carries and the Windows shells refuse.
POSIX_ONLY = ["line\nbreak", 'double "quotes"', "\r\n", "\x01\x7f", '"; exit 7; "', "$'\\n'", "\x1a"]


def steps(text="plain", **train):
    """One step of every kind, the text in paths and free texts."""
    path = PurePosixPath(text)
    config = PurePosixPath("files/tomls/x.toml")
    return (
        Check(dataset_config=config, vae=path, t5=path),
        CacheLatents(dataset_config=config, vae=path, vae_dtype="float32", num_workers=4),
        CacheText(dataset_config=config, t5=path, device=text, num_workers=4),
        CheckCache(dataset_config=config, vae=path, vae_dtype="float32"),
        Train(dataset_config=config, dit=path, output_dir=path, output_name=text, training_comment=text,
              optimizer_args=("weight_decay=0.01", text), max_train_epochs=35, **train),
    )  # fmt: skip


def prompts(*texts):
    """A generate step for each prompt."""
    path = PurePosixPath("m.safetensors")
    return tuple(Generate(dit=path, vae=path, t5=path, prompt=text, save_path=PurePosixPath("o.mp4")) for text in texts)


def bundle(shell, chosen=None, *, root=None, venv=("venv", ".venv"), version="0.1.0"):
    """A bundle for the platform of that shell."""
    chosen = steps() if chosen is None else tuple(chosen)
    return Bundle(
        platform=platform(PLATFORMS[shell]), slug="red_house", root=root, venv=venv, steps=chosen, version=version
    )
