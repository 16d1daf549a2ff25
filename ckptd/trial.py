"""Tries a store out: whether it keeps the promises that a commit hangs on, and how fast it is.

Promises: writes under temporary names of our own and nothing else, removes what it wrote, and
what a kill leaves is swept as what any cut-off upload leaves; makes no directory, not even the root.
Reports what it saw; what that means to an operator is `doctor`'s to say.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from ckptd.errors import Corrupt, NotFound
from ckptd.model import BLOCK_NBYTES
from ckptd.store import Buffer, Object, Store, temporary_name

#: A small object that is replaced while it is read.
_SMALL_NBYTES: Final = 256 * 1024
_REPLACEMENTS: Final = 6
#: Speed is measured with the first size, and with the next one unless that took long.
_SPEED_NBYTES: Final = (8 * 1024 * 1024, 64 * 1024 * 1024)
_LONG_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Tried:
    """What was seen."""

    #: What a reader saw of an object while it was replaced, or of a put that failed; "" if always one whole version.
    torn: str
    #: What a listing or a read got wrong right after a put or a delete; "" if nothing.
    stale: str
    #: The store's clock less ours, in seconds; None if its listings do not tell times.
    skew_seconds: float | None
    #: How exact `skew_seconds` is at best: the put's own time, and the resolution of the store's times.
    skew_within_seconds: float
    #: Of one put of 256 KiB.
    put_seconds: float


def promises(store: Store) -> Tried:
    """Puts, replaces, lists, reads and deletes a small object. Raises what the store raises; StoreError if its root is missing."""
    with _object(store) as key:
        began = time.time()
        store.put(key, lambda: [_version(0)], nbytes_hint=_SMALL_NBYTES)
        ended = time.time()
        listed = _listed(store, key)
        stale = ""
        if [found.nbytes for found in listed] != [_SMALL_NBYTES]:
            stale = "an object is not listed as it is right after it was written"
        elif store.get(key) != _version(0):
            stale = "an object does not read back as it was written"
        times = [found.modified for found in listed if found.modified]
        skew = times[0] - (began + ended) / 2 if times else None
        torn = _replaced(store, key) or _interrupted(store, key)
        store.delete([key])
        if not stale and _listed(store, key):
            stale = "an object is still listed right after it was deleted"
    return Tried(torn, stale, skew, (ended - began) / 2 + 1.0, ended - began)


def speed(store: Store) -> tuple[float, float]:
    """Bytes per second of one put, and of reading it back block by block. Raises what the store raises."""
    content = os.urandom(1024 * 1024)
    written = read = 0.0
    for nbytes in _SPEED_NBYTES:
        pieces = [content] * (nbytes // len(content))
        with _object(store) as key:
            began = time.perf_counter()
            store.put(key, lambda pieces=pieces: pieces, nbytes_hint=nbytes)  # type: ignore[misc]
            put_seconds = time.perf_counter() - began
            began = time.perf_counter()
            for at in range(0, nbytes, BLOCK_NBYTES):
                store.get(key, at, at + BLOCK_NBYTES)
            written, read = nbytes / put_seconds, nbytes / (time.perf_counter() - began)
        if put_seconds > _LONG_SECONDS:
            break
    return written, read


@contextlib.contextmanager
def _object(store: Store) -> Iterator[str]:
    """A name for an object that is gone afterwards, whatever happens."""
    key = temporary_name()
    _listed(store, key)  # raises if the root is missing: a put would make it
    try:
        yield key
    except BaseException:
        with contextlib.suppress(Exception):  # what brought us here is what the caller has to know
            store.delete([key])
        raise
    store.delete([key])


def _listed(store: Store, key: str) -> list[Object]:
    return [found for found in store.list(key, temporary=True) if found.key == key]


def _version(number: int) -> bytes:
    return bytes([number]) * _SMALL_NBYTES


def _replaced(store: Store, key: str) -> str:
    """Replaces an object again and again while a thread reads it."""
    begun, over = threading.Event(), threading.Event()

    def read() -> str:
        try:
            return look()
        finally:
            begun.set()

    def look() -> str:
        while not over.is_set():
            try:
                found = store.get(key)
            except NotFound:
                return "an object is gone for a moment while it is replaced"
            except Corrupt:
                found = b""
            if len(found) != _SMALL_NBYTES or len(set(found)) != 1:
                return "an object that is being replaced is neither the old one nor the new one"
            begun.set()
        return ""

    with ThreadPoolExecutor(1, "trial") as threads:
        reading = threads.submit(read)
        begun.wait()
        try:
            for number in range(1, _REPLACEMENTS + 1):
                store.put(key, lambda number=number: [_version(number)], nbytes_hint=_SMALL_NBYTES)  # type: ignore[misc]
        finally:
            over.set()
    return reading.result()


class _Interrupted(Exception):
    pass


def _interrupted(store: Store, key: str) -> str:
    """A put that fails in the middle changes nothing."""

    def source() -> Iterator[Buffer]:
        yield _version(0)[: _SMALL_NBYTES // 2]
        raise _Interrupted

    with contextlib.suppress(_Interrupted):
        store.put(key, source, nbytes_hint=_SMALL_NBYTES)
    found = store.get(key)
    return "" if found == _version(_REPLACEMENTS) else "a put that failed has replaced a part of the object"
