"""Copies of other nodes' shards in this node's memory, so that a node may be lost before anything of it is in the store.

Which shards, the attempt's record says (`ring.copies`). Promises: a copy counts only once it is whole, checked and
sealed; one for which there is no memory keeps nothing else waiting for long, and is tried again. Lives on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from ckptd import errors
from ckptd.attempt import Attempt, irreplaceable
from ckptd.node import Node
from ckptd.peers import Peers
from ckptd.pull import pull
from ckptd.ring import copies, participants
from ckptd.table import read_table
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Receipt

log = logging.getLogger(__name__)

#: How long a copy stands in the line for memory.
MEMORY_SECONDS: Final = 1.0
#: Pauses between two tries.
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 15.0


class Replicas:
    """Fetches what this node has to keep for others."""

    def __init__(self, node: Node, peers: Peers) -> None:
        self.node = node
        self.peers = peers
        #: Told of every attempt of which all copies have arrived.
        self.arrived: Callable[[Attempt], None] = lambda _: None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, attempt: Attempt) -> None:
        """Fetches what the attempt's record wants to be kept here; fine if that is nothing, or under way."""
        if attempt.record.replicas and attempt.name not in self._tasks and self._wanted(attempt):
            task = self._tasks[attempt.name] = asyncio.create_task(self._fetch_all(attempt))
            task.add_done_callback(lambda _: self._tasks.pop(attempt.name, None))

    def _wanted(self, attempt: Attempt) -> list[Receipt]:
        if self.node.name not in participants(attempt.record):
            return []
        return [receipt for receipt in copies(attempt.record, self.node.name) if receipt.token not in attempt.held]

    async def _fetch_all(self, attempt: Attempt) -> None:
        pause = FIRST_PAUSE_SECONDS
        started = time.monotonic()
        while _is_wanted(attempt) and (wanted := self._wanted(attempt)):
            for receipt in wanted:
                try:
                    await self._fetch(attempt, receipt)
                except errors.CkptdError as exc:
                    log.warning("no copy of the shard of rank %d of %s yet, again in %.1f s: %s", receipt.rank, attempt.id, pause, exc)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                    break
                except Exception:
                    log.exception("no copy of the shard of rank %d of %s", receipt.rank, attempt.id)
                    return
        if _is_wanted(attempt):
            nbytes = sum(receipt.nbytes for receipt in copies(attempt.record, self.node.name))
            log.info("copied %s: %d bytes of other nodes, %.2f s", attempt.id, nbytes, time.monotonic() - started)
            self.arrived(attempt)

    async def _fetch(self, attempt: Attempt, receipt: Receipt) -> None:
        arena, loop = self.node.arena, asyncio.get_running_loop()
        nbytes = receipt.nbytes + receipt.table_nbytes
        attempts = self.node.catalog.attempts
        segment = await arena.allocate(nbytes, "", deadline=loop.time() + MEMORY_SECONDS, sparing=lambda: irreplaceable(attempts.values()))
        try:
            await pull(self.peers, receipt.address, receipt.token, [(0, nbytes)], segment.path, self.node.memory_threads)
            await loop.run_in_executor(self.node.memory_threads, read_table, segment.path, receipt)
            if receipt.token in arena or not _is_wanted(attempt) or self.node.catalog.attempts.get(attempt.name) is not attempt:
                arena.drop(segment.token)
                return
            arena.seal(segment.token, nbytes, name=receipt.token)
        except BaseException:
            arena.drop(segment.token)
            raise
        self.node.catalog.copied(attempt.name, receipt)


def _is_wanted(attempt: Attempt) -> bool:
    """Whether copies are of use: also of what the store refuses, which memory alone can give back."""
    return attempt.pending or attempt.state == Checkpoint.FAILED
