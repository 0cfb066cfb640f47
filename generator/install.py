"""How the runtime's libraries are installed: one text for the scripts and for the messages.

The package is on no index, so that nothing may tell users to fetch it by name: whoever claims the name would be
installed instead. It is installed from a clone.
"""

import importlib
import sys
from typing import Any

from wangen.generator.errors import WangenError

PLACE = "in the folder of a wangen clone"
PACKAGE = '".[runtime]"'


def install_line(python: str) -> str:
    """What to do when a library is missing.

    >>> install_line("/venv/bin/python")
    'in the folder of a wangen clone: "/venv/bin/python" -m pip install ".[runtime]"'
    """
    return f'{PLACE}: "{python}" -m pip install {PACKAGE}'


def require_library(name: str) -> Any:
    """A library of the runtime that clips need.

    Raises:
        WangenError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise WangenError(
            f"clips need the library {name}, which is not installed",
            where=sys.executable,
            cure=install_line(sys.executable),
        ) from None
