"""Whether a directory that several nodes have as their store is the same one on all of them.

A small object with a temporary name, which one node puts there and the others look for by its name. Promises: only what is
surely not there counts as missing; a store that does not answer soon, or raises, is not asked again for it and delays nobody
for longer; the object is removed afterwards, and what a killed daemon leaves of it any sweep deletes. Lives on the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, TypeVar

from ckptd.errors import CkptdError, NotFound
from ckptd.store import Store, temporary_name

log = logging.getLogger(__name__)
T = TypeVar("T")

#: How long the store may take to put the object, or to look for it.
ANSWER_SECONDS: Final = 2.0


class Witness:
    """Puts such objects into one node's store, and looks for those of others."""

    def __init__(self, store: Store, threads: Executor) -> None:
        self._store = store
        self._threads = threads
        #: Nodes that have been shown one together, or could not be.
        self._shown: set[frozenset[str]] = set()
        self._removing: set[asyncio.Future[None]] = set()

    async def show(self, nodes: frozenset[str]) -> str:
        """The key of an object for these nodes to look for; "" if they have been shown one before, or there can be none now."""
        if nodes in self._shown:
            return ""
        self._shown.add(nodes)
        key = temporary_name()
        if await self._soon(lambda: self._store.put(key, lambda: [b"ckptd"]), late=lambda: self.remove(key)) is None:
            return ""
        return key

    def forget(self, nodes: frozenset[str]) -> None:
        """They have not all answered: the next time they are shown another one."""
        self._shown.discard(nodes)

    async def is_missing(self, key: str) -> bool:
        """Whether another node's object is surely not in this node's store."""

        def look() -> bool:
            try:
                # By its name: a network file system may answer a listing from what it had seen before.
                self._store.get(key)
            except NotFound:
                return True
            return False

        return await self._soon(look) is True

    def remove(self, key: str) -> None:
        """The object has done its work; nobody waits for its end."""
        removing = asyncio.get_running_loop().run_in_executor(self._threads, self._store.delete, [key])
        self._removing.add(removing)
        removing.add_done_callback(self._removed)

    def _removed(self, removing: asyncio.Future[None]) -> None:
        self._removing.discard(removing)
        if not removing.cancelled() and (error := removing.exception()) is not None:
            log.info("a small object with a temporary name stays in the store until a sweep deletes it: %s", error)

    async def _soon(self, call: Callable[[], T], late: Callable[[], object] = lambda: None) -> T | None:
        """What the store says; None if it says nothing soon, or raises. `late`: follows if it did what it was asked to after all."""
        asked = asyncio.get_running_loop().run_in_executor(self._threads, call)
        done, _ = await asyncio.wait((asked,), timeout=ANSWER_SECONDS)
        if not done:
            asked.add_done_callback(lambda ended: None if ended.cancelled() or ended.exception() is not None else late())
            return None
        try:
            return asked.result()
        except CkptdError as exc:
            log.info("whether other nodes see the same store is not known: %s", exc)
            return None
