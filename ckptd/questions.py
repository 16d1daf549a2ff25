"""Questions to the store and to peers that many ask at the same moment: ranks that start together share the answers.

Promises: who asks gets an answer to a question that was put after he asked, so that what another
process wrote before is seen; of one kind, at most one question is on its way and one is waiting.
Lives on the loop; calls that block run in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, cast

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")


def unattended(work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
    """A task of its own: to be shielded. All who wait for it may be gone when it fails."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task


async def to_its_end(what: str, work: Coroutine[Any, Any, R]) -> R:
    """What it gives or raises. If whoever waits is cancelled it goes on, and the log has what it raises then."""
    task = unattended(work)

    def log_failure(ended: asyncio.Task[R]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            log.warning("%s, for a caller that has gone: %s: %s", what, type(error).__name__, error)

    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(log_failure)
        raise


class Questions:
    """Puts questions, shared by (kind, argument)."""

    def __init__(self, threads: Executor) -> None:
        self.threads = threads
        self._asking: dict[tuple[str, object], asyncio.Task[object]] = {}
        self._next: dict[tuple[str, object], asyncio.Task[object]] = {}

    async def ask(self, what: str, argument: T, call: Callable[[T], R]) -> R:
        """Ranks that ask the store the same together share one answer, always one whose question came after theirs."""
        return await self.share(what, argument, lambda: asyncio.get_running_loop().run_in_executor(self.threads, call, argument))

    async def share(self, what: str, argument: object, put: Callable[[], Awaitable[R]]) -> R:
        """The same for a question that is put on the loop."""
        key = (what, argument)
        task = self._next.get(key)
        if task is None:
            before = self._asking.get(key)
            task = unattended(self._put_after(key, before, put))
            if before is None:
                self._asking[key] = task
            else:
                self._next[key] = task
        return cast("R", await asyncio.shield(task))

    async def _put_after(self, key: tuple[str, object], before: asyncio.Task[object] | None, put: Callable[[], Awaitable[R]]) -> R:
        task = asyncio.current_task()
        if before is not None:
            await asyncio.wait([before])
            self._next.pop(key, None)
            self._asking[key] = cast("asyncio.Task[object]", task)
        try:
            return await put()
        finally:
            if self._asking.get(key) is task:
                del self._asking[key]
