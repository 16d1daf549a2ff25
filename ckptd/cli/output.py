"""Standard output, where all that a command has to say goes.

Promises: what could not be written is an error of its own, in words, and never a success;
Python does not try again when it exits. A reader that went away is no such error: that stays
BrokenPipeError, which the command line answers without a word.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

from ckptd.errors import CkptdError


def write(text: str) -> None:
    """Writes all of `text`, and now. Raises CkptdError if it cannot, BrokenPipeError if nobody reads."""
    if sys.stdout is None:
        raise CkptdError("cannot write to standard output: it is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        abandon(sys.stdout)
        raise
    except (OSError, ValueError) as exc:  # ValueError: closed by ourselves
        abandon(sys.stdout)
        raise CkptdError(f"cannot write to standard output: {getattr(exc, 'strerror', None) or exc}") from exc


def flush() -> None:
    """As `write`, for what is still buffered; a closed standard output has nothing."""
    if sys.stdout is not None:
        write("")


def abandon(stream: TextIO) -> None:
    """What is still buffered goes nowhere."""
    try:
        to = stream.fileno()
    except (OSError, ValueError):  # no file of the operating system behind it
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, to)
    os.close(nowhere)
