"""One node's deletions: by policy, by request, and of what nothing needs any more; pins; and the drain before it goes.

Promises: only what is durable is deleted by a policy, only in runs that this node saves to, and
only after something of the run became durable; what a load reads, or a save of this node is about to
replace, stays. Lives on the loop; the store is worked on in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from ckptd import errors
from ckptd.attempt import MEMORY_ONLY
from ckptd.deletion import Deletion
from ckptd.ledger import Ledger
from ckptd.model import CheckpointId
from ckptd.node import Node
from ckptd.questions import to_its_end
from ckptd.restore import Restore
from ckptd.retention import Policy, Verdict, decide
from ckptd.scan import Entry
from ckptd.survey import KnownDamage, survey
from ckptd.sweeper import Deleted, Sweeper, Swept
from ckptd.v1.daemon_pb2 import Checkpoint, DrainReply

log = logging.getLogger(__name__)
#: What nothing needs is looked for this often, in the runs that this node saves to.
SWEEP_SECONDS = 3600.0
#: A pause after a failure: on a full disk nothing else makes room. It doubles up to the longest.
RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
#: What is collected younger than this could be what a flush of ours has just put: then none may run.
UPLOAD_SECONDS = 3600.0

T = TypeVar("T")


class Upkeep:
    """What one daemon does about checkpoints that are not needed any more."""

    def __init__(
        self,
        node: Node,
        restore: Restore,
        ledger: Ledger,
        sweeper: Sweeper,
        threads: Executor,
        *,
        policy: Policy,
        delete_grace_seconds: float,
        orphan_age_seconds: float,
        known: KnownDamage,
    ) -> None:
        self.node = node
        self.restore = restore
        self.ledger = ledger
        self.sweeper = sweeper
        self.threads = threads
        self.policy = policy
        self.delete_grace_seconds = delete_grace_seconds
        self.orphan_age_seconds = orphan_age_seconds
        self.known = known
        self.deletion = Deletion(node, restore, ledger, sweeper, threads)
        self._one_at_a_time = asyncio.Lock()
        #: When each run that this node saves to is looked at next, in the loop's time.
        self._due: dict[str, float] = {}
        #: The pause after the last failure, by run.
        self._pauses: dict[str, float] = {}
        self._woken = asyncio.Event()
        node.backlog.became_durable = self._became_durable
        node.backlog.take_away = sweeper.delete

    # -- what is asked for ------------------------------------------------------------------

    async def prune(
        self,
        run: str | None,
        policy: Policy | None = None,
        *,
        dry_run: bool = False,
        delete_grace_seconds: float | None = None,
        orphan_age_seconds: float | None = None,
    ) -> tuple[list[Verdict], Swept]:
        """Deletes what no rule keeps (None: this daemon's own rules), then what nothing refers to and is old enough."""
        grace = self.delete_grace_seconds if delete_grace_seconds is None else delete_grace_seconds
        orphan_age = self.orphan_age_seconds if orphan_age_seconds is None else orphan_age_seconds
        return await self._alone("a prune", lambda: self._prune(run, policy or self.policy, grace, orphan_age, dry_run=dry_run))

    async def delete(self, checkpoint: CheckpointId) -> tuple[Deleted, float]:
        """Deletes one checkpoint from store and memory; returns what goes, and after how many seconds.

        Raises NotFound; WrongPhase if it is pinned or a load reads it; Unavailable if it may come back without a second deletion.
        """
        return await self._alone(f"the deletion of {checkpoint}", lambda: self._delete(checkpoint))

    async def pin(self, checkpoint: CheckpointId, *, pinned: bool) -> Checkpoint:
        """No policy deletes the checkpoint any more, or again any may. Raises NotFound, WrongPhase."""
        async with self._one_at_a_time:
            held = [one for one in self.node.catalog.attempts.values() if one.id == checkpoint and one.pending]
            if held and await self._find(checkpoint) is None:
                way_out = f": `ckptd wait {checkpoint}`" if held[-1].record.durable else f", which it will not be: {MEMORY_ONLY}"
                raise errors.WrongPhase(f"{checkpoint} is not durable yet, and only then it can be pinned{way_out}")
            await self._run(self.ledger.pin if pinned else self.ledger.unpin, checkpoint)
        return await self.restore.resolve(checkpoint)

    async def drain(self, ending: asyncio.Event, *, cancel: bool = False) -> AsyncIterator[DrainReply]:
        """Takes no new saves; tells how much is left whenever that changes, at last what cannot, or is not to, become durable.

        Raises Unavailable if the daemon ends (`ending`) before that.
        """
        self.node.drained = not cancel
        if cancel:
            yield DrainReply()
            return
        log.info("draining: no new saves are taken")
        told: DrainReply | None = None
        while True:
            changed = asyncio.ensure_future(self.node.changed())
            try:
                catalog = self.node.catalog
                pending = catalog.on_their_way()
                begun = {str(shard.id) for token, shard in catalog.shards.items() if catalog.holder(token) is None}
                if not pending and not begun and not self.node.backlog.flushing():
                    break
                nbytes = sum(attempt.record.summary.raw_bytes for attempt in pending)
                reply = DrainReply(accepted=len(pending), nbytes=nbytes, begun=sorted(begun))
                if ending.is_set():
                    raise errors.Unavailable(f"the daemon is shutting down, and {len(pending)} checkpoints wait for its next start")
                if reply != told:
                    told = reply
                    yield reply
                await asyncio.wait([changed], timeout=1.0)
            finally:
                changed.cancel()
        ended = [a for a in self.node.catalog.attempts.values() if a.state == Checkpoint.FAILED or (a.state == Checkpoint.LOST and a.held)]
        kept = [a for a in self.node.catalog.attempts.values() if a.pending and not a.record.durable]
        yield DrainReply(failed=[f"{attempt.id}: {attempt.reason}" for attempt in ended], memory_only=[str(a.id) for a in kept])

    # -- by itself --------------------------------------------------------------------------

    async def forever(self) -> None:
        """Looks at each run after something of it became durable, and then from time to time."""
        loop = asyncio.get_running_loop()
        while True:
            self._woken.clear()
            now = loop.time()
            for run in [run for run, due in self._due.items() if due <= now]:
                self._due[run] = now + SWEEP_SECONDS
                try:
                    await self._look_after(run)
                    self.node.catalog.troubles.pop(f"upkeep of {run}", None)
                    self._pauses.pop(run, None)
                except errors.CkptdError as exc:
                    pause = self._pauses[run] = min(2 * self._pauses.get(run, RETRY_SECONDS / 2), LONGEST_RETRY_SECONDS)
                    log.warning("old checkpoints of run %r could not be looked after, again in %.0f s: %s", run, pause, exc)
                    self.node.catalog.trouble(f"upkeep of {run}", f"old checkpoints of run {run!r} could not be deleted: {exc}")
                    self._look_again(run, pause)
            pause = min(self._due.values(), default=loop.time() + SWEEP_SECONDS) - loop.time()
            try:
                async with asyncio.timeout(max(0.0, pause)):
                    await self._woken.wait()
            except TimeoutError:
                continue

    def _became_durable(self, checkpoint: CheckpointId) -> None:
        if not self.policy.empty or checkpoint.run not in self._due:
            self._look_again(checkpoint.run, 0.0)

    def _look_again(self, run: str, after_seconds: float) -> None:
        due = asyncio.get_running_loop().time() + after_seconds
        self._due[run] = min(due, self._due.get(run, due))
        self._woken.set()

    # -- inside -----------------------------------------------------------------------------

    async def _look_after(self, run: str) -> None:
        if not self.policy.empty:
            refused: list[errors.StoreError] = []
            ages = self.delete_grace_seconds, self.orphan_age_seconds
            await self._alone("a prune", lambda: self._prune(run, self.policy, *ages, dry_run=False, refused=refused))
            if refused:
                raise refused[0]
            return
        async with self._one_at_a_time:  # nobody gave rules: no checkpoint is looked at
            swept = await self._sweep(run, self.delete_grace_seconds, self.orphan_age_seconds, dry_run=False)
        if swept.later_files:
            self._look_again(run, min(self.delete_grace_seconds + 1.0, SWEEP_SECONDS))

    async def _alone(self, what: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Does it when nothing else is at it. Who goes away before that has asked for nothing; what has begun is done to its end."""

        async def then_let_others() -> T:
            try:
                return await work()
            finally:
                self._one_at_a_time.release()

        await self._one_at_a_time.acquire()
        return await to_its_end(what, then_let_others())

    async def _delete(self, checkpoint: CheckpointId) -> tuple[Deleted, float]:
        deleted = await self.deletion.delete(checkpoint)
        log.info("deleted %s: %d files, %d bytes, go after %.0f s", checkpoint, deleted.files, deleted.nbytes, self.delete_grace_seconds)
        self._look_again(checkpoint.run, min(self.delete_grace_seconds, SWEEP_SECONDS))
        return deleted, self.delete_grace_seconds

    async def _prune(
        self,
        run: str | None,
        policy: Policy,
        grace: float,
        orphan_age: float,
        *,
        dry_run: bool,
        refused: list[errors.StoreError] | None = None,
    ) -> tuple[list[Verdict], Swept]:
        """`refused` gets what kept single checkpoints from going."""
        surveyed = await self._run(survey, self.sweeper.store, self.ledger, run, self._busy_now(), self.known)
        verdicts = decide([candidate for _, candidate in surveyed], policy, time.time_ns() // 1000)
        entries = {entry.id: entry for entry, _ in surveyed}
        doomed = [verdict for verdict in verdicts if not verdict.keep]
        # What is due goes first: where the disk is full, even a tombstone needs room.
        try:
            swept = await self._sweep(run, grace, orphan_age, dry_run=dry_run)
        except errors.StoreError:
            if not doomed or dry_run:
                raise
            swept = Swept()  # the sweep below says it, after all that can go has gone
        if doomed and not dry_run:
            refused = [] if refused is None else refused
            verdicts = [one if one.keep else await self._carry_out(entries[one.id], one, refused) for one in verdicts]
            swept = swept.then(await self._sweep(run, grace, orphan_age, dry_run=dry_run))
        gone = [verdict for verdict in verdicts if not verdict.keep]
        if (gone or swept.files) and not dry_run:
            log.info("pruned %d checkpoints; %d files went (%d bytes), %d later", len(gone), swept.files, swept.nbytes, swept.later_files)
        if swept.later_files or gone:
            for touched in {verdict.id.run for verdict in verdicts} if run is None else {run}:
                self._look_again(touched, min(grace + 1.0, SWEEP_SECONDS))
        return verdicts, swept

    async def _carry_out(self, entry: Entry, verdict: Verdict, refused: list[errors.StoreError]) -> Verdict:
        """Deletes one checkpoint, unless it is in use by now, or is not what was decided about any more."""
        busy = self._busy_now()(entry)
        if not busy:
            self.node.backlog.held.add(entry.id)
            try:
                await self._run(self.sweeper.delete, entry)
                self.node.forget(entry.id, durable_only=True)
            except (errors.NotFound, errors.WrongPhase, errors.Corrupt, errors.StoreError) as exc:
                busy = str(exc)  # the others can go all the same
                refused.extend([exc] if isinstance(exc, errors.StoreError) else [])
            finally:
                self._let_go(entry.id)
        return verdict if not busy else Verdict(id=verdict.id, keep=True, reason=f"kept: {busy}", stored_bytes=verdict.stored_bytes)

    async def _sweep(self, run: str | None, grace: float, orphan_age: float, *, dry_run: bool) -> Swept:
        backlog = self.node.backlog
        alone = not dry_run and orphan_age < UPLOAD_SECONDS
        backlog.paused = alone
        try:
            while alone and backlog.flushing():
                await self.node.changed()
            busy = {attempt.id for attempt in self.node.catalog.on_their_way()} | self.restore.reading()
            return await self._run(
                lambda: self.sweeper.sweep(run, delete_grace_seconds=grace, orphan_age_seconds=orphan_age, busy=busy, dry_run=dry_run)
            )
        finally:
            backlog.paused = False
            self.node.wake()

    def _busy_now(self) -> Callable[[Entry], str]:
        """Why a checkpoint must not go now, as things stand."""
        saving = {attempt.id for attempt in self.node.catalog.on_their_way()}
        reading = self.restore.reading()

        def why(entry: Entry) -> str:
            if entry.id in reading:
                return "a load reads it"
            return "a newer save of it is on its way" if entry.id in saving else ""

        return why

    async def _find(self, checkpoint: CheckpointId) -> Entry | None:
        try:
            return await self._run(self.ledger.find, checkpoint)
        except errors.NotFound:
            return None

    def _let_go(self, checkpoint: CheckpointId) -> None:
        self.node.backlog.held.discard(checkpoint)
        self.node.wake()

    async def _run(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, call, *arguments)
