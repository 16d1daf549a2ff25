"""How fast this machine is at what a save needs: copying into shared memory, and compressing.

Promises: what is measured leaves no name and no byte behind, even if the process is killed; no
page is touched that was not granted before. Measures for a moment, so figures are rough.
"""

from __future__ import annotations

import array
import mmap
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckptd.codec import Codec

#: Standard deviation of the numbers that are compressed: that of a layer's weights, more or less.
_SPREAD: Final = 0.02
#: Compressing is measured for this long.
_COMPRESSING_SECONDS: Final = 0.3
#: Numbers are drawn for this many bytes, a quarter of a block: drawing takes longer than compressing.
_DRAWN_NBYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Copying:
    """Bytes per second of one thread's copy into a mapped file of shared memory."""

    #: Pages that nobody has had before.
    fresh: float
    #: Pages that this mapping has touched before: what a save into a warm segment is.
    touched: float
    #: Pages with content, through a mapping made anew.
    mapped_anew: float


def copying(directory: Path, nbytes: int) -> Copying:
    """Copies `nbytes`, a multiple of the page, into a nameless file in `directory`. Raises OSError: no room, or no such files there."""
    file = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # A full file system is an error here, and no SIGBUS below.
        granted = _timed(lambda: os.posix_fallocate(file, 0, nbytes))
        content = memoryview(bytearray(os.urandom(4096) * (nbytes // 4096)))
        with mmap.mmap(file, nbytes) as mapped:
            fresh = granted + _timed(lambda: _copy(mapped, content))
            touched = min(_timed(lambda: _copy(mapped, content)) for _ in range(3))
        with mmap.mmap(file, nbytes) as mapped:
            anew = _timed(lambda: _copy(mapped, content))
    finally:
        os.close(file)
    return Copying(nbytes / fresh, nbytes / touched, nbytes / anew)


def compressing(codec: Codec) -> tuple[float, float]:
    """Bytes per second of one thread, and the ratio, for blocks that look like float32 weights."""
    block = array.array("f", (random.gauss(0.0, _SPREAD) for _ in range(_DRAWN_NBYTES // 4))).tobytes()
    stored, rounds = 0, 0
    started = time.perf_counter()
    while (passed := time.perf_counter() - started) < _COMPRESSING_SECONDS:
        stored += len(codec.encode(block))
        rounds += 1
    return rounds * len(block) / passed, rounds * len(block) / stored


def _copy(mapped: mmap.mmap, content: memoryview) -> None:
    mapped[:] = content


def _timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
