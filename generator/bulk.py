"""Making very many objects quickly."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bulk() -> Iterator[None]:
    """No search for cycles among objects while the block makes hundreds of thousands that have none.

    Python would go over all of them again and again: with 40,000 items that was two fifths of the time of judging, and
    of importing torch, diffusers and peft, which make a million objects that stay, a third. As a decorator it covers a
    function.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
