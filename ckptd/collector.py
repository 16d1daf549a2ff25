"""Python's garbage collector, told to wait."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """While much is made and none of it is garbage: looking through all of it again and again takes longer than making it.

    For the whole process, so for a few seconds at most. Where several overlap, the last to end or one before it resumes.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
