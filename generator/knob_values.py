"""What a knob may hold. A .bat asks here, because cmd would read a value's signs wherever it looked at them."""

import os
import re
import sys

VALUE = re.compile(r"[A-Za-z0-9._,+-]+")
"""What a knob may hold: nothing here means anything to any shell."""


def require(names: str) -> None:
    """End with exit code 2 where one of these environment variables, parted by blanks, holds no value for a knob."""
    for name in names.split():
        if not VALUE.fullmatch(os.environ.get(name, "")):
            sys.stderr.write(f"wangen: the knob {name} may hold letters, digits and . _ , + - only\n")
            sys.exit(2)
