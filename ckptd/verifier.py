"""The verifications that an operator asks a daemon for.

One thread of low priority reads for all who ask; whoever goes away stops his own. Promises: what
is only in memory is named as such and not passed over; one damaged checkpoint keeps no other from
being read; what is damaged is remembered for those who decide what may go. Lives on the loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar

from ckptd import errors
from ckptd.attempt import Attempt
from ckptd.ledger import Ledger
from ckptd.model import CheckpointId, parse_run, parse_target
from ckptd.node import Node
from ckptd.scan import Entry
from ckptd.store import Store
from ckptd.survey import KnownDamage
from ckptd.v1.daemon_pb2 import Checkpoint, VerifyReply, VerifyRequest
from ckptd.verify import reply_of, verify

T = TypeVar("T")


class Verifier:
    """Verifies what is in the store, one checkpoint after another."""

    def __init__(self, node: Node, ledger: Ledger, store: Store, threads: Executor, known: KnownDamage) -> None:
        self.node = node
        self.ledger = ledger
        self.store = store
        self.threads = threads
        self.known = known

    async def replies(self, request: VerifyRequest) -> AsyncIterator[VerifyReply]:
        """What is found, as it is found. Raises NotFound if there is no such checkpoint, and what the store raises."""
        entries, waiting = await self._meant(request)
        for attempt in waiting:
            state = Checkpoint.State.Name(attempt.state).lower()
            yield VerifyReply(id=str(attempt.id), note=f"{state}: nothing in the store yet", ended=True)
        for entry in entries:
            steps = verify(self.store, self.ledger, entry)
            damage = ""
            try:
                while (step := await self._run(functools.partial(next, steps, None))) is not None:
                    if step.damage and not damage:
                        damage = step.damage[0]
                        self.known.found(entry, damage)
                    elif step.ended and not damage:
                        self.known.whole(entry)
                    yield reply_of(step)
            finally:
                with suppress(RuntimeError):  # the daemon ends
                    self.threads.submit(steps.close)  # behind the step that may still be running

    async def loaded(self, looking: Awaitable[Entry], damage: errors.Corrupt) -> None:
        """A load has found this. `looking` finds what it has read, and raises if that is not in the store (any more)."""
        with suppress(errors.CkptdError):
            self.known.found(await looking, str(damage))

    async def _meant(self, request: VerifyRequest) -> tuple[list[Entry], list[Attempt]]:
        """What is to be read, and what is in memory alone."""
        waiting = unstored(self.node)  # before the store is asked: what becomes durable meanwhile is in its answer
        if not request.id:
            run = parse_run(request.run) if request.HasField("run") else None
            entries = await self._run(lambda: self.ledger.entries(run))
            stored = {entry.id for entry in entries}
            return entries, [attempt for attempt in waiting if attempt.id not in stored and run in (None, attempt.id.run)]
        target = parse_target(request.id)
        try:
            entry = await self._run(lambda: self.ledger.find(target) if isinstance(target, CheckpointId) else self.ledger.latest(target))
        except errors.NotFound:
            entry = None
        meant = [attempt for attempt in waiting if target in (attempt.id, attempt.id.run)]
        newest = max(meant, key=lambda attempt: attempt.name, default=None)
        if entry is not None and (newest is None or isinstance(target, CheckpointId) or newest.name < entry.order):
            return [entry], []
        if newest is not None:
            return [], [newest]
        raise errors.NotFound(f"there is no checkpoint {request.id} in {self.store.url} or in memory; `ckptd list` shows what is there")

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, call)


def unstored(node: Node) -> list[Attempt]:
    """What this node holds, whole or with others, and the store does not have, at least not yet."""
    attempts = node.catalog.attempts.values()
    return [a for a in attempts if (a.restorable and a.state != Checkpoint.DURABLE) or (a.joint and a.pending)]
