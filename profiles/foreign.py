"""What is known of another tool whose scripts people bring along."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def musubi() -> dict[str, Any]:
    """The file on musubi-tuner: its flags, its defaults, and flags of other programs that are met on its lines."""
    return tomllib.loads(files("wangen.profiles").joinpath("tools", "musubi_tuner.toml").read_text(encoding="utf-8"))
