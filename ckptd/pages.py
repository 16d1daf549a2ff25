"""The threads that make and free the pages of segments.

Making a page costs twenty times what writing into one costs, and freeing a big file is
slow too: neither may stop the event loop. Promises: work on a segment is done piece by
piece and in order, so that it can be abandoned; its pages are freed only when no thread
makes more of them. What a page counts against is the arena's affair.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ckptd import segment as files
from ckptd.errors import Unavailable
from ckptd.segment import PIECE, Segment

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class Pages:
    """Two pools: one for what somebody waits for, and one thread at low priority for what nobody does."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(4, "arena")
        self._gentle_pool = ThreadPoolExecutor(1, "arena-spare", initializer=_be_gentle)
        self._pieces: dict[str, asyncio.Future[None]] = {}  # by token: what a thread is working on
        self._closed = False

    async def make(self, segment: Segment, *, gentle: bool = False) -> None:
        """Makes all pages of a segment. Raises OSError if there is no memory, Unavailable after `close`.

        Cancelled, it returns at once, and a thread may still be at its last piece: `free` knows.
        """
        loop = asyncio.get_running_loop()
        pool = self._gentle_pool if gentle else self._pool
        for at in range(0, segment.nbytes, PIECE):
            if self._closed:
                raise Unavailable("the daemon is stopping")
            piece = loop.run_in_executor(pool, files.populate, segment.path, at, min(PIECE, segment.nbytes - at))
            self._pieces[segment.token] = piece
            piece.add_done_callback(lambda done: None if done.cancelled() else done.exception())
            try:
                await asyncio.shield(piece)
            except asyncio.CancelledError:
                if self._closed and piece.cancelled():
                    raise Unavailable("the daemon is stopping") from None
                raise
            finally:
                if piece.done():
                    self._pieces.pop(segment.token, None)

    def free(self, segment: Segment, then: Callable[[], None]) -> None:
        """Unlinks a segment and frees its memory; calls `then` on the loop when both are done (at once where none runs)."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            files.remove(segment.path)
            then()
            return

        def freed(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                _log.error("cannot free %s: %s", segment.path, error)
            then()

        def begin(_: asyncio.Future[None] | None = None) -> None:
            if not self._closed:
                loop.run_in_executor(self._pool, files.remove, segment.path).add_done_callback(freed)

        piece = self._pieces.pop(segment.token, None)
        if piece is None or piece.done():
            begin()
        else:
            piece.add_done_callback(begin)

    def close(self) -> None:
        """Waits for the threads, for one piece of work at most; what has not begun is not done."""
        self._closed = True
        for pool in (self._gentle_pool, self._pool):
            pool.shutdown(wait=True, cancel_futures=True)


def _be_gentle() -> None:
    # On Linux priorities are per thread.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
