"""How the runtime's libraries are installed: one text for the scripts and for the messages.

The package is on no index, so that nothing may tell users to fetch it by name: whoever claims the name would be
installed instead. It is installed from a clone.
"""

PLACE = "in the folder of a wangen clone"
PACKAGE = '".[runtime]"'


def install_line(python: str) -> str:
    """What to do when a library is missing.

    >>> install_line("/venv/bin/python")
    'in the folder of a wangen clone: "/venv/bin/python" -m pip install ".[runtime]"'
    """
    return f'{PLACE}: "{python}" -m pip install {PACKAGE}'
