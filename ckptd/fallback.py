"""Loads that may go back: to the last checkpoint of a run that is whole, if the one that is meant is damaged.

What is meant is read back before it is answered, so such a load reads the store once more.
Promises: nobody is given an older checkpoint but because every newer one was found damaged, and
hears which and why; a store that is away is an error, never damage; all who ask at the same time
share one reading, and what was found whole is not read again while its `.metadata` is the same.
Damage is never remembered for loads: storage may be repaired. Retention is told of it. Lives on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ckptd import errors
from ckptd.attempt import checkpoint_of
from ckptd.ledger import Ledger, newest_first
from ckptd.model import LATEST, CheckpointId
from ckptd.node import Node
from ckptd.restore import Restore
from ckptd.scan import Entry
from ckptd.store import Object, Store
from ckptd.survey import KnownDamage
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.verify import ADVICE, is_whole

log = logging.getLogger(__name__)
#: How often a run that is written to meanwhile is looked at again.
LOOKS: Final = 5
#: Checkpoints that are known to be whole.
REMEMBERED: Final = 10_000

#: What makes a durable checkpoint the same one.
_Key: TypeAlias = tuple[CheckpointId, str, Object]


@dataclass(slots=True)
class _Check:
    """One reading, for all who wait for it."""

    stop: threading.Event = field(default_factory=threading.Event)
    waiting: int = 0
    task: asyncio.Task[tuple[str, ...]] | None = None


class Fallback:
    """Answers what `Restore.resolve` answers, with what is whole."""

    def __init__(self, node: Node, restore: Restore, ledger: Ledger, store: Store, threads: Executor, known: KnownDamage) -> None:
        self.node = node
        self.restore = restore
        self.ledger = ledger
        self.store = store
        self.threads = threads
        self.known = known
        self._whole: dict[_Key, None] = {}
        self._checks: dict[_Key, _Check] = {}

    async def resolve(self, target: CheckpointId | str) -> Checkpoint:
        """The attempt that an id, or the newest of a run, means now; if it is damaged, the newest good one that was accepted before it.

        `skipped` of the answer names the damaged ones, newest first. Raises Corrupt that names them all if no
        good one is left; NotFound if there is none at all; StoreError, Unavailable.
        """
        for _ in range(LOOKS):
            found = await self._look(target)
            if found is not None:
                return found
        raise errors.Unavailable(f"{named(target)} is being replaced all the time: load again")

    async def _look(self, target: CheckpointId | str) -> Checkpoint | None:
        """None: something was deleted or saved again meanwhile."""
        run = target.run if isinstance(target, CheckpointId) else target
        waiting = await self.restore.unstored(run)
        try:
            line = await self.restore.resolve(target)
            if (held := self._held(CheckpointId.parse(line.summary.id), line.summary.attempt)) is not None:
                held.not_reached.extend(line.not_reached)
                return held
        except errors.Corrupt:
            pass  # that is what is to be found out below
        entries = await self.restore.questions.ask("entries", run, self.ledger.entries)
        waiting |= await self.restore.unstored(run)
        candidates = list(_newest_first(entries, waiting))
        if isinstance(target, CheckpointId):
            while candidates and _id(candidates[0]) != target:  # accepted later
                del candidates[0]
        newest = _order(candidates[0]) if candidates else ""
        skipped: list[str] = []
        for candidate in candidates:
            try:
                found, why = await self._good(candidate)
            except errors.NotFound:
                return None
            if found is not None:
                if skipped:
                    found.skipped.extend(skipped)
                    log.error("a load of %s goes back to %s: %s", named(target), _id(candidate), "; ".join(skipped))
                seen = await self.restore.whereabouts.survey(run)
                if isinstance(target, CheckpointId):
                    seen = {name: one for name, one in seen.items() if name <= newest or one.summary.id == str(target)}
                return self.restore.with_what_is_newer(found, _order(candidate), seen)
            skipped.append(f"{_id(candidate)}: {why}")
        if not skipped:
            return None
        ids = ", ".join(str(_id(candidate)) for candidate in candidates)
        raise errors.Corrupt(f"there is no good checkpoint to go back to, all of these are damaged: {ids} ({'; '.join(skipped)})")

    async def _good(self, candidate: Entry | Checkpoint) -> tuple[Checkpoint | None, str]:
        """The checkpoint if it is whole; else what is wrong with it. Raises NotFound if it is not there any more."""
        name = candidate.summary.attempt if isinstance(candidate, Checkpoint) else candidate.attempt
        if (held := self._held(_id(candidate), name)) is not None:
            return held, ""
        if isinstance(candidate, Checkpoint):
            now = (await self.restore.unstored(_id(candidate).run)).get(candidate.summary.attempt)
            if now is None:
                raise errors.NotFound(f"{_id(candidate)} has been made durable since, or given up")
            own = self.node.catalog.attempts.get(now.summary.attempt)
            return (now, "") if own is None or own.joint else (None, "its memory is gone")
        try:
            line = await self.restore.readable(candidate)
        except errors.LeaseLost as exc:
            raise errors.NotFound(str(exc)) from exc
        except errors.Corrupt as exc:
            return None, str(exc).removesuffix(ADVICE)
        damage = await self._damage(candidate, line.summary.attempt)
        if damage:
            more = len(damage) - 1
            return None, damage[0] + (f" (and {more} more)" if more else "")
        return line, ""

    def _held(self, id: CheckpointId, name: str | None) -> Checkpoint | None:
        """The attempt, if all of it is in this node's memory."""
        attempt = self.node.catalog.attempts.get(name or "")
        if attempt is None or attempt.id != id or not attempt.whole or attempt.state in (Checkpoint.ABORTED, Checkpoint.LOST):
            return None
        there = all(self.node.arena.get(token).path.exists() for token in attempt.tokens)
        return checkpoint_of(attempt) if there else None

    async def _damage(self, entry: Entry, name: str) -> tuple[str, ...]:
        """What is damaged of it; reads it unless that is known or under way. `name`: of the attempt, or a stock one's state."""
        key = (entry.id, name, entry.metadata)
        if key in self._whole and not self.known.of(entry):  # what was whole when it was read may have rotted since
            return ()
        check = self._checks.get(key)
        if check is None:
            check = self._checks[key] = _Check()
            check.task = asyncio.create_task(self._read(key, entry, check))
            check.task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # all who waited may be gone
        assert check.task is not None
        check.waiting += 1
        try:
            return await asyncio.shield(check.task)
        finally:
            check.waiting -= 1
            if not check.waiting:
                check.stop.set()
                self._forget(key, check)

    async def _read(self, key: _Key, entry: Entry, check: _Check) -> tuple[str, ...]:
        log.info("reading %s back before it is loaded with fallback", entry.id)
        try:
            damage = await asyncio.get_running_loop().run_in_executor(
                self.threads, is_whole, self.store, self.ledger, entry, check.stop.is_set
            )
        except InterruptedError:
            log.info("nobody waits for %s any more: it is not read to its end", entry.id)
            raise
        finally:
            self._forget(key, check)
        if damage:
            log.error("checkpoint %s is damaged: %s", entry.id, "; ".join(damage))
            self.known.found(entry, damage[0])
        else:
            self.known.whole(entry)
            self._whole[key] = None
            while len(self._whole) > REMEMBERED:
                del self._whole[next(iter(self._whole))]
        return damage

    def _forget(self, key: _Key, check: _Check) -> None:
        if self._checks.get(key) is check:
            del self._checks[key]


def named(target: CheckpointId | str) -> str:
    """As the user wrote it."""
    return str(target) if isinstance(target, CheckpointId) else f"{target}/{LATEST}" if target else LATEST


def _id(candidate: Entry | Checkpoint) -> CheckpointId:
    return candidate.id if isinstance(candidate, Entry) else CheckpointId.parse(candidate.summary.id)


def _order(candidate: Entry | Checkpoint) -> str:
    return candidate.order if isinstance(candidate, Entry) else candidate.summary.attempt


def _newest_first(entries: Sequence[Entry], unstored: Mapping[str, Checkpoint]) -> Iterator[Entry | Checkpoint]:
    """What is durable and what is not yet (by attempt), as `latest` would find them if the newer ones were not there."""
    waiting = sorted(unstored)
    for entry in newest_first(entries):
        while waiting and waiting[-1] > entry.order:
            yield unstored[waiting.pop()]
        yield entry
    yield from (unstored[name] for name in reversed(waiting))
